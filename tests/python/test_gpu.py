"""torch and CuPy take weights from a real GPU with no copy, and compute what they would otherwise.

Fails where there is no GPU, torch or CuPy: it is run on purpose, on a machine that has them.

    VBAR_LIBRARY=.../libvbar.so PYTHONPATH=python_shim python3 tests/python/test_gpu.py
"""

import gc
import pathlib
import sys
import tempfile
import threading
import unittest

import cupy
import torch

import vbar
from support import MIB, PAGE, pattern, run_program, write_model

SHAPE = (1024, 1024)
#: Names of types by torch's; each tensor has a page or more of its own.
TYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
}


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def ordinary_weights():
    """A weight of each type, on the host."""
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for dtype, name in TYPES.items():
        if dtype.is_floating_point:
            values = torch.randn(SHAPE, generator=generator).clamp(-3, 3) / 8
        else:
            values = torch.randint(-100, 100, SHAPE, generator=generator)
        weights[name] = values.to(dtype)
    # What wants memory when the others are in use.
    weights["large"] = torch.randint(0, 255, (6 * PAGE,), dtype=torch.uint8, generator=generator)
    return weights


class OnGpu(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        assert torch.cuda.is_available(), "there is no GPU for torch"
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.path = pathlib.Path(folder.name) / "model.safetensors"
        cls.host = ordinary_weights()
        names = {dtype: dtype for dtype in TYPES.values()}
        names["large"] = "U8"
        write_model(
            cls.path,
            {
                name: (names[name], tuple(weight.shape), bytes_of(weight))
                for name, weight in cls.host.items()
            },
        )

    def setUp(self):
        self.device = vbar.Device("cuda", budget=8 * PAGE, page_size=PAGE, headroom="512M")
        self.addCleanup(self.device.close)
        self.model = self.device.open_model(self.path)
        self.addCleanup(self.model.close)

    def tearDown(self):
        torch.cuda.synchronize()
        gc.collect()

    def pins(self, name):
        page = self.model[name].bar_offset // PAGE
        return self.model.bar.residency(page, 1)[0].pin_count

    def evict(self):
        """Everything goes; whoever uses it again has it filled again."""
        self.model.bar.end_of_run()
        freed = self.model.bar.free_memory()
        self.assertGreater(freed.bytes, 0, freed)
        self.assertEqual(self.model.bar.info().resident_count, 0)

    def check_equal(self, name, weight):
        """A tensor of torch's is the weight, bit by bit."""
        wanted = self.host[name].cuda()
        self.assertEqual((weight.dtype, weight.shape), (wanted.dtype, wanted.shape))
        self.assertEqual(weight.device, wanted.device)
        found, wanted = weight.view(torch.uint8), wanted.view(torch.uint8)
        self.assertTrue(torch.equal(found, wanted), name)


class Torch(OnGpu):
    def test_weights_of_every_type_are_taken_with_no_copy(self):
        for name in TYPES.values():
            with self.model.fault(name) as weight:
                tensor = torch.from_dlpack(weight.view())
                self.assertEqual(tensor.data_ptr(), weight.address)
                self.assertEqual(self.pins(name), 2)
                self.check_equal(name, tensor)
                del tensor
                self.assertEqual(self.pins(name), 1)

    def test_a_bf16_weight_computes_what_the_ordinary_one_does(self):
        inputs = torch.randn(64, SHAPE[1], device="cuda", dtype=torch.bfloat16)
        wanted = inputs @ self.host["BF16"].cuda().T
        for turn in range(3):
            with self.model.fault("BF16") as weight:
                found = inputs @ torch.from_dlpack(weight.view()).T
            self.assertTrue(torch.equal(found, wanted), turn)
            # Evicted and refilled between two uses.
            self.evict()
        self.assertGreaterEqual(self.device.statistics().evicted_page_count, 3)

    def test_weights_pushed_out_by_each_other_compute_the_same(self):
        names = ["BF16", "F16", "F32"]
        inputs = {
            name: torch.randn(64, SHAPE[1], device="cuda").to(self.host[name].dtype)
            for name in names
        }
        wanted = {name: inputs[name] @ self.host[name].cuda().T for name in names}
        for turn in range(20):
            for name in names:
                with self.model.fault(name) as weight:
                    found = inputs[name] @ torch.from_dlpack(weight.view()).T
                # Six of the eight pages: what was used just now goes while it may still be read.
                with self.model.fault("large") as large:
                    self.assertTrue(large, large)
                    total = torch.from_dlpack(large.view()).sum(dtype=torch.int64)
                self.assertTrue(torch.equal(found, wanted[name]), (turn, name))
                self.assertEqual(int(total), int(self.host["large"].sum(dtype=torch.int64)))
        self.assertGreater(self.device.statistics().evicted_page_count, 60)

    def test_fp8_weights_are_torchs(self):
        for name in ("F8_E4M3", "F8_E5M2"):
            with self.model.fault(name) as weight:
                tensor = torch.from_dlpack(weight.view())
                found = tensor.to(torch.float32).sum()
                wanted = self.host[name].cuda().to(torch.float32).sum()
                self.assertTrue(torch.equal(found, wanted))

    def test_the_default_is_torchs_current_stream(self):
        side = torch.cuda.Stream()
        with self.model.fault("BF16") as weight:
            self.assertEqual(weight.stream, torch.cuda.current_stream().cuda_stream)
        with torch.cuda.stream(side), self.model.fault("BF16") as weight:
            self.assertEqual(weight.stream, side.cuda_stream)
            self.check_equal("BF16", torch.from_dlpack(weight.view()))
        with self.model.fault("BF16", stream=side) as weight:
            self.assertEqual(weight.stream, side.cuda_stream)

    def test_another_stream_than_the_faults_comes_after_the_fill(self):
        side = torch.cuda.Stream()
        wanted = int(self.host["large"].sum(dtype=torch.int64))
        for _ in range(10):
            with self.model.fault("large") as weight, torch.cuda.stream(side):
                total = torch.from_dlpack(weight.view()).sum(dtype=torch.int64)
            side.synchronize()
            self.assertEqual(int(total), wanted)
            self.model.bar.end_of_run(side)
            self.evict()

    def test_a_view_that_outlives_its_guard_is_refused(self):
        with self.model.fault("F32") as weight:
            view = weight.view()
        with self.assertRaises(BufferError):
            torch.from_dlpack(view)
        with self.assertRaises(BufferError):
            cupy.from_dlpack(view)

    def test_a_tensor_that_outlives_its_guard_keeps_its_pages(self):
        with self.model.fault("F32") as weight:
            tensor = torch.from_dlpack(weight.view())
            rows = tensor[10:20]
        self.assertEqual(self.pins("F32"), 1)
        self.model.bar.end_of_run()
        freed = self.model.bar.free_memory()
        self.assertEqual(freed.shortfall, vbar.Shortfall.ALL_PINNED)
        self.check_equal("F32", tensor)
        del tensor
        # A slice of it has the same storage.
        self.assertEqual(self.pins("F32"), 1)
        self.assertTrue(torch.equal(rows, self.host["F32"].cuda()[10:20]))
        del rows
        self.assertEqual(self.pins("F32"), 0)
        self.evict()

    def test_tensors_of_dropped_streams_are_given_back(self):
        # Of a stream that CuPy destroys; torch keeps its own for ever.
        stream = cupy.cuda.Stream(non_blocking=True)
        handle = stream.ptr
        with self.model.fault("F32", stream=stream) as weight:
            capsule = weight.view().__dlpack__(stream=handle, max_version=(1, 0))
        tensor = torch.utils.dlpack.from_dlpack(capsule)
        self.check_equal("F32", tensor)
        del weight, stream
        gc.collect()
        del tensor, capsule
        self.assertEqual(self.pins("F32"), 0)
        with self.model.fault("F32") as weight:
            self.check_equal("F32", torch.from_dlpack(weight.view()))

    def test_tensors_are_dropped_by_other_threads(self):
        held = []
        with self.model.fault("F32") as weight:
            for _ in range(50):
                held.append(torch.from_dlpack(weight.view()))
        self.assertEqual(self.pins("F32"), 50)
        threads = [threading.Thread(target=held.pop) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(self.pins("F32"), 0)

    def test_torch_writes_a_refill(self):
        wanted = torch.randn(SHAPE)
        with self.device.create_bar(4 * MIB) as bar:
            allocation = bar.allocate(4 * MIB)
            for turn in range(3):
                with allocation.fault() as bytes:
                    self.assertIsInstance(bytes, vbar.Refill)
                    torch.from_dlpack(bytes.view(torch.float32, SHAPE)).copy_(wanted)
                    bytes.commit()
                with allocation.fault() as bytes:
                    self.assertEqual(type(bytes), vbar.Guard)
                    found = torch.from_dlpack(bytes.view(torch.float32, SHAPE)).cpu()
                self.assertTrue(torch.equal(found, wanted), turn)
                bar.end_of_run()
                self.assertEqual(bar.free_memory().bytes, 4 * MIB)
                bar.prioritise()

    def test_an_int_of_torch_is_a_type_too(self):
        with self.model.fault("BF16") as weight:
            found = torch.from_dlpack(weight.view(torch.int16)).view(torch.bfloat16)
            self.check_equal("BF16", found)


class Cupy(OnGpu):
    def test_weights_are_taken_both_ways(self):
        views = {"BF16": "uint16", "F16": None, "F32": None, "F8_E4M3": "uint8", "I8": None}
        for name, dtype in views.items():
            wanted = bytes_of(self.host[name])
            for take in (cupy.from_dlpack, cupy.asarray):
                with self.model.fault(name) as weight:
                    array = take(weight.view(dtype))
                    self.assertEqual((array.data.ptr, array.shape), (weight.address, SHAPE))
                    self.assertEqual(array.get().tobytes(), wanted, (name, take))
                    self.assertEqual(self.pins(name), 2)
                # It holds pins of its own.
                self.assertEqual(self.pins(name), 1)
                self.assertEqual(array.get().tobytes(), wanted, (name, take))
                del array
                gc.collect()
                self.assertEqual(self.pins(name), 0)

    def test_a_weight_computes_what_the_ordinary_one_does(self):
        inputs = cupy.random.default_rng(3).standard_normal((64, SHAPE[1]), dtype=cupy.float32)
        for name in ("F32", "F16"):
            ordinary = cupy.asarray(self.host[name].numpy())
            typed = inputs.astype(ordinary.dtype)
            wanted = typed @ ordinary.T
            for _ in range(3):
                with self.model.fault(name) as weight:
                    found = typed @ cupy.from_dlpack(weight.view()).T
                self.assertTrue(bool((found == wanted).all()), name)
                self.evict()

    def test_a_bf16_weight_is_computed_with_as_integers(self):
        # CuPy has no bfloat16: its upper half of a float32 is put together by hand.
        with self.model.fault("BF16") as weight:
            halves = cupy.from_dlpack(weight.view("uint16"))
            found = (halves.astype(cupy.uint32) << 16).view(cupy.float32).sum(dtype=cupy.float64)
        wanted = cupy.asarray(self.host["BF16"].float().numpy()).sum(dtype=cupy.float64)
        self.assertEqual(float(found), float(wanted))

    def test_its_streams_are_taken(self):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream, self.model.fault("F32", stream=stream) as weight:
            self.assertEqual(weight.stream, stream.ptr)
            found = cupy.from_dlpack(weight.view()).sum()
        stream.synchronize()
        wanted = cupy.asarray(self.host["F32"].numpy()).sum()
        self.assertEqual(float(found), float(wanted))

    def test_bfloat16_goes_by_dlpack_alone(self):
        with self.model.fault("BF16") as weight:
            view = weight.view()
            self.assertFalse(hasattr(view, "__cuda_array_interface__"))
            found = cupy.from_dlpack(view)
            self.assertEqual(str(found.dtype), "bfloat16")
            self.assertEqual(found.view(cupy.uint16).get().tobytes(), bytes_of(self.host["BF16"]))
            del found
            gc.collect()
            self.assertEqual(self.pins("BF16"), 1)

    def test_torch_and_cupy_share_one_weight(self):
        with self.model.fault("F32") as weight:
            view = weight.view()
            one, two = torch.from_dlpack(view), cupy.from_dlpack(view)
            self.assertEqual(one.data_ptr(), two.data.ptr)
            self.assertEqual(self.pins("F32"), 3)
            self.assertTrue(torch.equal(one, torch.from_dlpack(two)))
        del one, two, view
        gc.collect()
        self.assertEqual(self.pins("F32"), 0)


class Own(unittest.TestCase):
    """What needs a device of its own."""

    def test_a_stale_read_finds_poison_and_the_context_lives(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "model.safetensors"
            write_model(path, {"a": ("U8", (PAGE,), pattern(PAGE))})
            # Whatever other tests left open has other options.
            gc.collect()
            options = {"poison": True, "eviction": vbar.Eviction.STRICT, "page_size": PAGE}
            with vbar.Device("cuda", budget=8 * PAGE, **options) as device:
                model = device.open_model(path)
                with model.fault("a") as weight:
                    address = weight.address
                    self.assertEqual(read(address), pattern(PAGE))
                model.bar.end_of_run()
                self.assertEqual(model.bar.free_memory().bytes, PAGE)
                self.assertEqual(read(address), b"\xff" * PAGE)
                self.assertEqual(device.statistics().poisoned_page_count, 1)
                with model.fault("a") as weight:
                    self.assertEqual(read(address), pattern(PAGE))
                model.close()
        self.assertEqual(int(torch.ones(4, device="cuda").sum()), 4)

    def test_a_scrubbed_page_holds_nothing_of_the_one_before(self):
        gc.collect()
        with vbar.Device("cuda", budget=4 * PAGE, page_size=PAGE, scrub=True) as device:
            for _ in range(3):
                bar = device.create_bar(4 * PAGE)
                with bar.fault(0, 4 * PAGE) as weight:
                    for page in range(4):
                        self.assertEqual(read(weight.address + page * PAGE), bytes(PAGE))
                        array_at(weight.address + page * PAGE).fill(1)
                    cupy.cuda.Device().synchronize()
                # Its frames stay, for the next.
                bar.close()

    def test_the_interpreter_ends_with_tensors_alive(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "model.safetensors"
            write_model(path, {"a": ("F32", (16,), pattern(64))})
            program = """
                import sys, cupy, torch, vbar
                device = vbar.Device("cuda", page_size="2M")
                model = device.open_model(sys.argv[1])
                weight = model.fault("a")
                torch.kept = torch.from_dlpack(weight.view())
                cupy.kept = cupy.from_dlpack(weight.view())
                sys.kept = weight.view()
                print(torch.kept.sum().isnan())
            """
            code, _, errors = run_program(program, path)
            self.assertEqual(code, 0, errors)
            # Others may warn of what they like.
            self.assertNotRegex(errors, "Exception ignored|Traceback|vbar")


def read(address):
    """A page at an address, whoever it belongs to."""
    return array_at(address).copy().get().tobytes()


def array_at(address):
    """The same as an array of CuPy's."""
    memory = cupy.cuda.UnownedMemory(address, PAGE, None, 0)
    return cupy.ndarray((PAGE,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))


if __name__ == "__main__":
    print(sys.version, torch.__version__, cupy.__version__, torch.cuda.get_device_name())
    unittest.main()
