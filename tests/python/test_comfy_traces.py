"""What a ComfyUI calls, as `comfy_traces` has it, against the package on the simulated device.

The replay is the client: it faults, compares, stages, pins and copies as the calls say, and its
kernels read each weight when they use it. What they read must be what a model of the bytes says, in
which no memory is ever short; and the device, which knows of every race, must have seen none.
"""

import ctypes
import json
import pathlib
import unittest

from comfy_support import MIB, PAGE, Case, control, torch
from support import pattern

import comfy_aimdo.host_buffer as host_buffer
import comfy_aimdo.model_mmap as model_mmap
import comfy_aimdo.model_vbar as model_vbar
import comfy_aimdo.torch as tensors
import comfy_aimdo.vram_buffer as vram_buffer

TRACES = pathlib.Path(__file__).with_name("comfy_traces")
_ALIGNED = 1024


class Layer:
    """A module, with the attributes that a client keeps on one."""

    def __init__(self, model, alloc, file, at, data):
        self.model, self.alloc, self.file, self.at, self.data = model, alloc, file, at, data
        self.kept = None
        #: What this fault came to, and where its bytes go.
        self.signature = self.target = self.raw = None
        self.resident = False
        #: Bytes that the VBAR has by the model of bytes, those that are used now, and the pin.
        self.stored = self.expected = None
        self.pin = None


class Replay:
    def __init__(self, case, lines):
        self.case, self.sim, self.device = case, case.sim, case.device
        header = lines[0]
        total = self.device.info.total_bytes
        control.set_simple_vram_headroom(total - header["cap_mib"] * MIB)
        self.streams = [case.stream(), case.stream()]
        self.mappings, self.bars, self.layers, self.hosts = {}, {}, {}, {}
        self.buffers, self.offsets, self.held_blocks = {}, {}, {}
        self.hits = 0
        self.files = {}
        for seed, (name, sizes) in enumerate(header["files"].items(), 1):
            data = pattern(sum(sizes), seed)
            path = case.folder / name
            path.write_bytes(data)
            self.files[name] = path, data
        #: A word for each use of a node, where kernels leave what they read.
        self.results = self.device.create_bar(PAGE)
        self.results.set_class(1 << 30)
        self.words = self.results.fault(0, PAGE, case.compute)
        self.uses = []
        self.clear()

    def run(self, lines):
        for number, (name, *words) in enumerate(lines, 2):
            try:
                getattr(self, f"do_{name}")(*words)
            except BaseException as error:
                error.args = (f"line {number}, {name} {words}: {error}",)
                raise
        self.check()
        self.words.close()

    def clear(self):
        self.sim.write(self.words.address, bytes(8 * 4096), self.case.compute)

    def check(self):
        """What the kernels of a node have read."""
        found = self.sim.read(self.words.address, 8 * len(self.uses) or 8, self.case.compute)
        for at, (layer, expected) in enumerate(self.uses):
            word = int.from_bytes(found[8 * at : 8 * at + 8], "little")
            self.case.assertEqual(word, self.sim.checksum(expected), f"use {at}: {layer}")
        self.uses = []
        self.clear()

    def do_mmap(self, name):
        path, data = self.files[name]
        mapping = self.mappings[name] = model_mmap.ModelMMAP(str(path))
        self.case.assertEqual(ctypes.string_at(mapping.get(), 64), data[:64])

    def do_hostbuf(self, name, *sizes):
        self.hosts[name] = host_buffer.HostBuffer(*sizes), []

    def do_vbar(self, name, size):
        self.bars[name] = model_vbar.ModelVBAR(size, 0)

    def do_prioritize(self, name):
        self.bars[name].prioritize()

    def do_alloc(self, model, name, nbytes, file, at):
        alloc = self.bars[model].alloc(nbytes)
        data = self.files[file][1][at : at + nbytes]
        self.layers[name] = Layer(model, alloc, file, at, data)

    def do_dirty(self, name):
        self.layers[name].kept = None

    def do_fault(self, name):
        layer = self.layers[name]
        layer.signature = model_vbar.vbar_fault(layer.alloc)
        compare = model_vbar.vbar_signature_compare
        layer.resident = compare(layer.signature, layer.kept)
        self.hits += layer.resident
        layer.expected = layer.stored if layer.resident else None
        layer.target = layer.alloc[1]

    def buffer(self, stream, nbytes):
        """Bytes of a stream's cast buffer, behind those that are in use."""
        if stream not in self.buffers:
            self.buffers[stream] = vram_buffer.VRAMBuffer(16 << 30, 0)
        at = self.offsets.get(stream, 0)
        self.offsets[stream] = at + -(-nbytes // _ALIGNED) * _ALIGNED
        got = self.buffers[stream].get(nbytes, at)
        return tensors.aimdo_to_tensor(got, "cuda:0").data_ptr()

    def do_stage(self, name, stream):
        layer = self.layers[name]
        if layer.resident:
            return
        if layer.signature is None:
            layer.target = self.buffer(stream, layer.alloc[2])
        else:
            layer.target = tensors.aimdo_to_tensor(layer.alloc, "cuda:0").data_ptr()

    def do_stage_raw(self, name, stream):
        layer = self.layers[name]
        if layer.resident:
            return
        layer.raw = self.buffer(stream, layer.alloc[2])
        if layer.signature is None:
            layer.target = self.buffer(stream, layer.alloc[2])

    def where(self, layer):
        return layer.target if layer.raw is None else layer.raw

    def do_pin(self, name):
        """As much as its host buffer takes; one that is offloaded goes to another than one that
        was to be resident.
        """
        layer = self.layers[name]
        if layer.resident or layer.pin is not None:
            return
        subset = "weights" if layer.signature is None else "weights-loaded"
        host, stack = self.hosts[f"{layer.model}.{subset}"]
        offset, size = host.size, -(-layer.alloc[2] // _ALIGNED) * _ALIGNED
        host.extend(size=size, register=False)
        pin = tensors.hostbuf_to_tensor(host)[offset : offset + size]
        pin.untyped_storage()._comfy_hostbuf = host
        self.case.assertEqual(torch.cuda.cudart().cudaHostRegister(pin.data_ptr(), size, 1), 0)
        layer.pin = pin, "empty"
        stack.append((layer, offset))

    def do_slice(self, name, stream):
        layer = self.layers[name]
        if layer.resident:
            return
        pin, state = layer.pin
        nbytes, handle = layer.alloc[2], self.streams[stream].handle
        host = pin.untyped_storage()._comfy_hostbuf
        if state == "empty":
            host.read_file_slice(
                self.mappings[layer.file].get_file_handle(),
                layer.at,
                nbytes,
                offset=pin.data_ptr() - host.get_raw_address(),
                stream=handle,
                device_ptr=self.where(layer),
                device=0,
            )
            layer.pin = pin, "read"
        else:
            # By PyTorch, of page-locked memory.
            self.device.copy_from_host(pin.data_ptr(), nbytes, self.where(layer), handle)
        layer.expected = layer.data

    def do_ring(self, name, stream):
        layer = self.layers[name]
        if layer.resident:
            return
        host_buffer.read_file_to_device(
            self.mappings[layer.file].get_file_handle(),
            layer.at,
            layer.alloc[2],
            self.streams[stream].handle,
            self.where(layer),
            0,
            mark_cold=False,
        )
        layer.expected = layer.data

    def do_join(self, stream):
        self.case.compute.wait_for(self.streams[stream])

    def do_turn(self, stream):
        self.streams[stream].wait_for(self.case.compute)
        self.offsets[stream] = 0

    def do_cast(self, name, seed):
        layer = self.layers[name]
        if layer.resident:
            return
        self.read(f"{name} raw", layer.raw, layer.data)
        self.write(layer, seed)
        layer.raw = None

    def do_patch(self, name, seed):
        layer = self.layers[name]
        if not layer.resident:
            self.read(f"{name} before its patch", layer.target, layer.expected)
            self.write(layer, seed)

    def write(self, layer, seed):
        """What a kernel on the compute stream makes of a weight."""
        nbytes = layer.alloc[2]
        self.sim.launch_pattern(layer.target, nbytes, seed + layer.at, self.case.compute)
        layer.expected = self.sim.pattern(nbytes, seed + layer.at)

    def read(self, what, address, expected):
        word = self.words.address + 8 * len(self.uses)
        self.sim.launch_checksum(address, len(expected), word, self.case.compute)
        self.uses.append((what, expected))

    def do_use(self, name):
        layer = self.layers[name]
        if not layer.resident:
            layer.kept = layer.signature
            layer.stored = layer.expected if layer.signature is not None else layer.stored
        self.read(name, layer.target, layer.expected)

    def do_unpin(self, name):
        layer = self.layers[name]
        if layer.signature is not None:
            model_vbar.vbar_unpin(layer.alloc)

    def do_block(self, names):
        allocs = [self.layers[name].alloc for name in names]
        first, last = allocs[0], allocs[-1]
        block = first[0], first[1], last[1] + last[2] - first[1]
        signature = model_vbar.vbar_fault(block)
        parts = all(self.layers[name].signature is not None for name in names)
        # All of it is resident exactly when every part is.
        self.case.assertEqual(signature is not None, parts)
        key = tuple(names)
        before = self.held_blocks.get(key, (None, None))[1]
        resident = all(self.layers[name].resident for name in names)
        if before is not None and signature is not None:
            same = model_vbar.vbar_signature_compare(signature, before)
            self.case.assertEqual(same, resident, f"the block of {names}")
        self.held_blocks[key] = block, signature

    def do_unblock(self, names):
        block, signature = self.held_blocks[tuple(names)]
        if signature is not None:
            model_vbar.vbar_unpin(block)

    def do_hits(self, least):
        self.case.assertGreaterEqual(self.hits, least)
        self.hits = 0

    def do_node(self):
        for stream in self.streams:
            stream.synchronize()
        self.check()
        for mapping in self.mappings.values():
            mapping.bounce()
        self.buffers.clear()
        self.offsets.clear()
        model_vbar.vbars_reset_watermark_limits()
        used = self.device.statistics().used_bytes
        self.case.assertLessEqual(used, self.device.budget)

    def do_free(self, name, nbytes):
        bar = self.bars[name]
        before = bar.loaded_size()
        freed = bar.free_memory(nbytes)
        self.case.assertEqual(bar.loaded_size(), before - freed)
        wanted = min(before, nbytes)
        self.case.assertGreaterEqual(freed, wanted)

    def do_resident(self, name, nbytes):
        self.case.assertEqual(self.bars[name].loaded_size(), nbytes)

    def do_pinned(self, name, pages):
        told = sum(bool(page & 2) for page in self.bars[name].get_residency())
        self.case.assertEqual(told, pages)

    def do_unpin_all(self, model):
        for name, (host, stack) in self.hosts.items():
            if name.split(".")[0] == model:
                while stack:
                    layer, offset = stack.pop()
                    layer.pin = None
                    host.truncate(offset, do_unregister=True)
                host.truncate(0)
        held = sum(host.size for host, _ in self.hosts.values())
        self.case.assertEqual(self.locked(), held)

    def locked(self):
        """Page-locked bytes but for those of the ring."""
        return self.sim.live().locked_bytes - self.device.statistics().locked_bytes

    def do_outside(self, mib):
        self.sim.set_outside_bytes(mib * MIB)
        self.device.refresh()

    def do_headroom(self, mib):
        """So much less for weights and buffers."""
        total = self.device.info.total_bytes
        control.set_simple_vram_headroom(total - self.device.budget + mib * MIB)

    def do_drop(self, name):
        self.do_unpin_all(name)
        for layer in [layer for layer in self.layers if layer.split(".")[0] == name]:
            del self.layers[layer]
        for host in [host for host in self.hosts if host.split(".")[0] == name]:
            del self.hosts[host]
        del self.bars[name]

    def do_empty(self):
        self.case.compute.synchronize()
        self.device.free_memory()
        self.device.trim()
        self.case.assertEqual(self.device.statistics().used_bytes, PAGE)
        self.case.assertEqual(self.locked(), 0)


class Traces(Case):
    def replay(self, name):
        text = (TRACES / f"{name}.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        replay = Replay(self, lines)
        replay.run(lines[1:])

    def test_the_traces_are_all_replayed(self):
        names = {path.stem for path in TRACES.glob("*.jsonl")}
        tests = {name[len("test_") :] for name in dir(self) if name.startswith("test_")}
        # That of memory graphs needs PyTorch's allocator: test_comfy_graph replays it.
        names.remove("graph")
        self.assertEqual(names, tests - {"the_traces_are_all_replayed", "a_wrong_byte_is_seen"})

    def test_a_wrong_byte_is_seen(self):
        replay = Replay(self, [{"cap_mib": 72, "files": {"model": [MIB]}}])
        calls = [
            ["mmap", "model"], ["vbar", "m", MIB], ["alloc", "m", "m.0", MIB, "model", 0],
            ["fault", "m.0"], ["stage", "m.0", 0], ["ring", "m.0", 0], ["join", 0],
        ]
        replay.run(calls)
        replay.words = replay.results.fault(0, PAGE, self.compute)
        self.sim.write(replay.layers["m.0"].target + 77, b"x", self.compute)
        replay.do_use("m.0")
        with self.assertRaisesRegex(AssertionError, "m.0"):
            replay.do_node()
        replay.words.close()
        replay.do_unpin("m.0")

    def test_sample(self):
        self.replay("sample")

    def test_switch(self):
        self.replay("switch")

    def test_patch(self):
        self.replay("patch")

    def test_free(self):
        self.replay("free")

    def test_cancel(self):
        self.replay("cancel")

    def test_blocks(self):
        self.replay("blocks")


if __name__ == "__main__":
    unittest.main()
