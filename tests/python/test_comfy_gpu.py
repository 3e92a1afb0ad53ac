"""The package that ComfyUI imports, on a real GPU with PyTorch, and no ComfyUI: a client of its own
does what ComfyUI does with a layer, and compares every weight where it is used.

Fails where there is no GPU or no torch: it is run on purpose, on a machine that has them.

    VBAR_LIBRARY=.../libvbar.so PYTHONPATH=python_shim python3 tests/python/test_comfy_gpu.py

Each test is a process of its own. Two of them passed on an H200 (`is_started_by_one_command`,
`are_written_from_the_device`), the first failed there for a wrong expectation and was not run since;
the others have not been run on a GPU yet.
"""

import os
import subprocess
import sys
import tempfile
import textwrap
import unittest

from support import ROOT, run

START = """
    import ctypes, gc, os, sys
    import vbar.comfy
    vbar.comfy.install()
    import comfy_aimdo.control as control
    assert control.init(simple_vram_headroom=None)
    import torch
    import comfy_aimdo.host_buffer as host_buffer
    import comfy_aimdo.model_vbar as model_vbar
    import comfy_aimdo.torch as tensors
    import comfy_aimdo.vram_buffer as vram_buffer
    import vbar.torch
    from comfy_aimdo.model_mmap import ModelMMAP

    MIB, GIB = 1 << 20, 1 << 30
    folder = sys.argv[1]
    total = torch.cuda.mem_get_info()[1]
    device = torch.device("cuda", 0)

    def cap(gib):
        assert control.init_devices([(0, total - int(gib * GIB))])

    def write(name, count, mib, seed=1):
        path = os.path.join(folder, name)
        generator = torch.Generator().manual_seed(seed)
        layers = [
            torch.randint(0, 256, (mib * MIB,), dtype=torch.uint8, generator=generator)
            for _ in range(count)
        ]
        with open(path, "wb") as file:
            for layer in layers:
                file.write(layer.numpy().tobytes())
        return path, layers

    class Model:
        '''A model of equal layers, cast layer by layer on two streams.'''

        streams = [torch.cuda.Stream() for _ in range(2)]
        buffers, turn = {}, 0

        def __init__(self, path, layers, source="pin"):
            self.layers, self.source = layers, source
            self.mapping = ModelMMAP(path)
            size = sum(layer.numel() for layer in layers)
            self.bar = model_vbar.ModelVBAR(10 * size, 0)
            self.host = host_buffer.HostBuffer(0, 64 * MIB, 2 * size)
            self.allocs = [self.bar.alloc(layer.numel()) for layer in layers]
            self.kept = [None] * len(layers)
            self.pins = {}
            self.hits = 0

        def layer(self, index, patch=0, cancel=False):
            alloc, size = self.allocs[index], self.layers[index].numel()
            current = torch.cuda.current_stream()
            signature = model_vbar.vbar_fault(alloc)
            resident = model_vbar.vbar_signature_compare(signature, self.kept[index])
            self.hits += resident
            Model.streams[Model.turn].wait_stream(current)
            Model.turn = 1 - Model.turn
            stream = Model.streams[Model.turn]
            if resident or signature is not None:
                target = tensors.aimdo_to_tensor(alloc, device)
            else:
                if stream not in Model.buffers:
                    Model.buffers[stream] = vram_buffer.VRAMBuffer(16 * GIB, 0)
                target = tensors.aimdo_to_tensor(Model.buffers[stream].get(size), device)
            assert target.device == device and target.numel() == size
            if not resident:
                self.copy(index, target, stream)
            current.wait_stream(stream)
            if cancel:
                return
            if not resident:
                if patch:
                    target.add_(patch)
                if signature is not None:
                    self.kept[index] = signature
            # Work on the current stream that uses the weight, after some time.
            torch.cuda._sleep(200000)
            same = torch.equal(target, self.layers[index].to(device) + patch)
            assert same, f"layer {index}, {signature is not None}, {resident}"
            if signature is not None:
                model_vbar.vbar_unpin(alloc)
            stream.wait_stream(current)

        def copy(self, index, target, stream):
            size = target.numel()
            at = index * size
            descriptor = self.mapping.get_file_handle()
            if self.source == "ring":
                told = stream.cuda_stream, target.data_ptr(), 0
                host_buffer.read_file_to_device(descriptor, at, size, *told, mark_cold=False)
                return
            if index not in self.pins:
                offset = self.host.size
                self.host.extend(size=size, register=False)
                pin = tensors.hostbuf_to_tensor(self.host)[offset : offset + size]
                assert torch.cuda.cudart().cudaHostRegister(pin.data_ptr(), size, 1) == 0
                assert pin.is_pinned()
                self.pins[index] = pin
                self.host.read_file_slice(
                    descriptor, at, size, offset=pin.data_ptr() - self.host.get_raw_address(),
                    stream=stream.cuda_stream, device_ptr=target.data_ptr(), device=0,
                )
                return
            with torch.cuda.stream(stream):
                target.copy_(self.pins[index], non_blocking=True)

        def step(self, **options):
            for index in range(len(self.layers)):
                self.layer(index, **options)

    def what_fits(layer):
        '''Layers in what the context, buffers and tensors leave of the cap.'''
        budget = control.get_devctx(0).device.statistics().budget_bytes
        buffers = sum(buffer.size() for buffer in Model.buffers.values())
        print("budget", budget >> 20, "buffers", buffers >> 20,
              "tensors", torch.cuda.memory_reserved() >> 20, "MiB")
        return (budget - buffers - torch.cuda.max_memory_reserved()) // layer

    def end_of_node():
        for stream in Model.streams:
            stream.synchronize()
        torch.cuda.synchronize()
        Model.buffers.clear()
        torch.cuda.empty_cache()
        model_vbar.vbars_reset_watermark_limits()
"""


class Comfy(unittest.TestCase):
    def check(self, program):
        with tempfile.TemporaryDirectory() as folder:
            whole = textwrap.dedent(START) + textwrap.dedent(program)
            code, printed = run(whole, folder)
        self.assertEqual(code, 0, printed)
        print(printed, end="")

    def test_a_model_larger_than_the_cap_is_right_at_every_step(self):
        self.check("""
            cap(2)
            for source in ("pin", "ring"):
                model = Model(*write("model", 24, 96), source)
                for node in range(2):
                    model.bar.prioritize()
                    for step in range(4):
                        model.hits = 0
                        model.step()
                    fits = what_fits(96 * MIB)
                    print(source, "of 24 layers", model.hits, "were resident,", fits, "fit")
                    assert fits >= 4 and model.hits >= fits - 1, (model.hits, fits)
                    end_of_node()
                used = control.get_total_vram_usage()
                assert used <= 2 * GIB, used
                print(source, "resident", model.bar.loaded_size() >> 20, "MiB")
                del model
        """)

    def test_what_does_not_stay_comes_back_without_a_copy_of_the_client(self):
        self.check("""
            cap(2)
            for patch in (0, 3):
                model = Model(*write("model", 24, 96, 5))
                for node in range(3):
                    model.bar.prioritize()
                    for step in range(4):
                        model.hits = 0
                        model.step(patch=patch)
                    end_of_node()
                assert model.hits == 24, model.hits
                told = control.get_devctx(0).device.statistics()
                assert told.locked_saved_bytes > 0 and told.ahead_page_count > 0, told
                print("patch", patch, told.locked_saved_bytes >> 20, "MiB saved")
                # Another patch replaces what was saved.
                model.kept = [None] * 24
                for step in range(3):
                    model.step(patch=patch + 1)
                end_of_node()
                del model
        """)

    def test_two_models_and_tensors_share_the_cap(self):
        self.check("""
            cap(2)
            one = Model(*write("one", 16, 64, 1))
            other = Model(*write("other", 16, 64, 2), "ring")
            for _ in range(3):
                for model in (one, other):
                    model.bar.prioritize()
                    model.step()
                    tensor = torch.ones(700 * MIB, dtype=torch.uint8, device=device)
                    model.step()
                    assert int(tensor[::MIB].sum()) == 700
                    del tensor
                    end_of_node()
            assert control.get_total_vram_usage() <= 2 * GIB
            # More than there is is PyTorch's own exception, and it goes on.
            try:
                torch.empty(3 * GIB, dtype=torch.uint8, device=device)
                raise AssertionError("it was not refused")
            except torch.OutOfMemoryError:
                pass
            one.bar.prioritize()
            one.step()
            end_of_node()
        """)

    def test_patches_cancelling_and_unloading(self):
        self.check("""
            cap(2)
            model = Model(*write("model", 24, 64))
            model.bar.prioritize()
            model.step(patch=3)
            model.step(patch=3)
            end_of_node()
            model.kept = [None] * 24
            model.bar.prioritize()
            for at in (3, 11):
                for index in range(at):
                    model.layer(index, patch=5)
                model.layer(at, patch=5, cancel=True)
                end_of_node()
                model.bar.prioritize()
            model.step(patch=5)
            model.step(patch=5)
            end_of_node()
            assert not any(page & 2 for page in model.bar.get_residency())
            before = model.bar.loaded_size()
            assert before and model.bar.free_memory(1e32) == before
            assert model.bar.loaded_size() == 0
            model.pins.clear()
            model.host.truncate(0)
            model.bar.prioritize()
            model.step(patch=5)
            end_of_node()
        """)

    def test_twenty_loads_grow_nothing(self):
        self.check("""
            cap(2)
            path, layers = write("model", 12, 64)
            held = []
            for _ in range(20):
                model = Model(path, layers)
                model.bar.prioritize()
                model.step()
                end_of_node()
                del model
                gc.collect()
                model_vbar.vbars_reset_watermark_limits()
                control.get_devctx(0).device.free_memory()
                control.get_devctx(0).device.trim()
                free, _ = torch.cuda.mem_get_info()
                held.append(free)
            assert held[2] - held[-1] < 64 * MIB, held
        """)

    def test_files_are_written_from_the_device(self):
        self.check("""
            cap(2)
            buffer = vram_buffer.VRAMBuffer(GIB, 0)
            view = tensors.aimdo_to_tensor(buffer.get(100 * MIB), device)
            view.random_(0, 256)
            path = os.path.join(folder, "spilled")
            with open(path, "w+b") as file:
                stream = torch.cuda.current_stream().cuda_stream
                told = stream, view.data_ptr(), 0
                host_buffer.write_device_to_file(file, 10, 100 * MIB, *told)
                again = torch.empty_like(view)
                host_buffer.read_file_to_device(file, 10, 100 * MIB, stream, again.data_ptr(), 0)
                assert torch.equal(view, again)
        """)

    def test_a_program_is_started_by_one_command(self):
        with tempfile.TemporaryDirectory() as folder:
            main = os.path.join(folder, "main.py")
            with open(main, "w") as file:
                file.write(
                    "import os, sys\n"
                    "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'backend:cudaMallocAsync'\n"
                    "import comfy_aimdo.control as control\n"
                    "assert control.init(simple_vram_headroom=None, nvml_pressure=True)\n"
                    "import torch\n"
                    "assert torch.cuda.current_device() == 0\n"
                    "assert control.init_devices((index, 0) for index in [0])\n"
                    "import vbar.torch\n"
                    "assert vbar.torch.is_installed() and vbar.torch.check_in_use()\n"
                    "stats = torch.cuda.memory_stats()\n"
                    "print(stats['active_bytes.all.current'], sys.argv[1:])\n"
                    # Where PyTorch reads its variable for the first time, by versions.
                    "assert torch.cuda.get_allocator_backend() == 'pluggable'\n"
                    "assert torch.ones(5).pin_memory().cuda().sum().item() == 5\n"
                )
            path = os.pathsep.join([str(ROOT / "python_shim"), os.environ.get("PYTHONPATH", "")])
            done = subprocess.run(
                [sys.executable, "-m", "vbar.comfy", main, "--listen"],
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                timeout=200,
            )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("['--listen']", done.stdout)


if __name__ == "__main__":
    unittest.main(verbosity=2)
