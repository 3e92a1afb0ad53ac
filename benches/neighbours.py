"""How a streaming model lives with its neighbours on one device, with torch.

``pressure``: another program takes device memory until less than the headroom is left. Told are the
milliseconds until the headroom is free again, the passes meanwhile, and how long it takes until as
much of the model is resident as before once the other has gone.

``shared``: two programs stream one model through budgets of their own, and through automatic ones
where both models do not fit. Told are the bytes a second that both got together, beside what one
got alone, and the pages that each loaded a pass.

Every pass is compared bit by bit with the same products of plain resident tensors.

    VBAR_LIBRARY=.../libvbar.so PYTHONPATH=python_shim python3 benches/neighbours.py
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import time

MIB = 1 << 20
GIB = 1 << 30


class Outsider:
    """Another program: takes device memory as the driver gives it, and none of the library's."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        self.taken = []

    def _call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {code}")

    def free_bytes(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def take(self, nbytes):
        """Takes as much of ``nbytes`` as the driver gives, and says how much that was."""
        while nbytes > 0:
            address = ctypes.c_uint64()
            if not self.cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes)):
                self.taken.append(address)
                return nbytes
            nbytes -= 32 * MIB
        return 0

    def leave(self):
        while self.taken:
            self._call("cuMemFree_v2", self.taken.pop())


def stream(path, options, pipe):
    """A program that passes over the model until it is told to stop, and tells of each pass."""
    import stream as bench
    import torch

    import vbar

    torch.manual_seed(7)
    workload = bench.equal_layers(options["layers"], options["layer_mib"] * MIB, options["tokens"])
    if options["write"]:
        bench.write_model(path, workload.tensors)
    wanted = workload.resident()
    # The model's bytes are the file's from here on, the device's memory the library's.
    workload.tensors = {
        name: tensor[:0].clone() for name, tensor in workload.tensors.items()
    }
    torch.cuda.empty_cache()
    with vbar.Device("cuda", budget=options["budget"], threads=True) as device:
        with device.open_model(path) as model:
            workload.prepare(model)
            pipe.send("ready")
            pipe.recv()
            while not pipe.poll():
                offloaded, before = [], device.statistics()
                start = time.perf_counter()
                try:
                    found = workload.streamed(device, model, offloaded)
                except RuntimeError as error:
                    # A layer that no frame was left for: the stand-in above has no bytes to offer.
                    pipe.send({"at": time.time(), "failed": str(error), "offloaded": offloaded})
                    continue
                torch.cuda.synchronize()
                seconds, after = time.perf_counter() - start, device.statistics()
                pipe.send({
                    "at": time.time(),
                    "seconds": seconds,
                    "equal": bool(torch.equal(found, wanted)),
                    "offloaded": [[name, str(reason)] for name, reason in offloaded],
                    "loads": after.mapped_page_count - before.mapped_page_count,
                    "filled": after.filled_bytes - before.filled_bytes,
                    "resident": after.resident_page_count,
                    "used": after.used_bytes,
                })
    pipe.send("left")


class Program:
    """A streaming program in a process of its own."""

    def __init__(self, arguments, path, budget, write=False):
        here, there = multiprocessing.Pipe()
        options = {
            "layers": arguments.layers,
            "layer_mib": arguments.layer_mib,
            "tokens": arguments.tokens,
            "budget": budget,
            "write": write,
        }
        self.pipe, self.passes = here, []
        self.process = multiprocessing.Process(target=stream, args=(path, options, there))
        self.process.start()
        there.close()
        assert self.pipe.recv() == "ready"

    def start(self):
        self.pipe.send("go")

    def listen(self, seconds):
        """The passes that end within ``seconds``."""
        heard, until = [], time.time() + seconds
        while (left := until - time.time()) > 0:
            if self.pipe.poll(left):
                heard.append(self.pipe.recv())
        self.passes += heard
        return heard

    def stop(self):
        self.pipe.send("stop")
        while (heard := self.pipe.recv()) != "left":
            self.passes.append(heard)
        self.process.join()


def check(program, label):
    wrong = [told for told in program.passes if not told.get("equal")]
    print(f"{label}: {len(program.passes)} passes, {len(wrong)} not as wanted {wrong[:2]}", flush=True)
    return not wrong


def median_of(passes, key):
    return statistics.median(told[key] for told in passes)


def pressure(arguments, path):
    headroom, outsider, rows = 256 * MIB, Outsider(), []
    program = Program(arguments, path, None, write=True)
    program.start()
    before = program.listen(5)
    print(f"alone: {median_of(before, 'seconds') * 1e3:.1f} ms a pass", flush=True)
    for step in range(arguments.rounds):
        free = outsider.free_bytes()
        # All that is free but a part of the headroom; then as much again as was given back.
        taken = outsider.take(free - headroom // 4)
        start = time.perf_counter()
        while outsider.free_bytes() < headroom and time.perf_counter() - start < 5:
            time.sleep(0.0005)
        waited = time.perf_counter() - start
        left = outsider.free_bytes()
        passes = program.listen(1.5)
        rows.append({"taken": taken, "ms": waited * 1e3, "left": left})
        print(
            f"taken {taken / GIB:.2f} GiB: headroom back after {waited * 1e3:.1f} ms; passes"
            f" {[round(told.get('seconds', 0) * 1e3) for told in passes]} ms, resident"
            f" {passes[-1].get('resident') if passes else None}",
            flush=True,
        )
    outsider.leave()
    left_at = time.time()
    after = program.listen(arguments.regrow_seconds)
    full = max(told.get("resident", 0) for told in before)
    back = [told["at"] for told in after if told.get("resident", 0) >= 0.95 * full]
    print(
        f"gone: resident {after[0].get('resident')} to {after[-1].get('resident')} of {full};"
        f" 95 % after {back[0] - left_at:.1f} s" if back else f"gone: not back, {after[-1]}",
        flush=True,
    )
    program.stop()
    return rows, check(program, "pressure")


def shared(arguments, path):
    model, fine = arguments.layers * arguments.layer_mib * MIB, True
    for label, budgets, room in [
        ("budgets of a half", [model // 2, model // 2], None),
        ("automatic budgets, room for three quarters of both", [None, None], model * 3 // 2),
    ]:
        outsider = Outsider()
        first = Program(arguments, path, budgets[0])
        first.start()
        alone = first.listen(4)[3:]
        second = Program(arguments, path, budgets[1])
        if room is not None:
            held = alone[-1]["used"]
            outsider.take(max(0, outsider.free_bytes() + held - room))
        second.start()
        first.passes.clear()
        for other, program in [(second, first), (first, second)]:
            program.listen(4)
        first.listen(0.5)
        start, marks = time.time(), [len(first.passes), len(second.passes)]
        first.listen(5)
        second.listen(0.1)
        told = [
            [one for one in program.passes[mark:] if one["at"] > start]
            for program, mark in zip([first, second], marks)
        ]
        seconds = time.time() - start
        rates = [sum(one.get("filled", 0) for one in passes) / seconds for passes in told]
        print(
            f"{label}: alone {median_of(alone, 'seconds') * 1e3:.0f} ms a pass,"
            f" {median_of(alone, 'filled') / median_of(alone, 'seconds') / 1e9:.1f} GB/s; together"
            f" {[round(median_of(passes, 'seconds') * 1e3) for passes in told]} ms,"
            f" {rates[0] / 1e9:.1f} + {rates[1] / 1e9:.1f} GB/s, loads"
            f" {[median_of(passes, 'loads') for passes in told]} a pass, resident"
            f" {[median_of(passes, 'resident') for passes in told]} of"
            f" {model // (16 * MIB)}",
            flush=True,
        )
        for program in [first, second]:
            program.stop()
        outsider.leave()
        fine &= check(first, "first") & check(second, "second")
    return fine


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp"))
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--layer-mib", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--regrow-seconds", type=float, default=20)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    path = arguments.folder / "vbar-neighbours.safetensors"
    try:
        rows, fine = pressure(arguments, path)
        fine &= shared(arguments, path)
    finally:
        if path.exists():
            os.unlink(path)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
