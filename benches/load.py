"""Measures how fast a safetensors file gets to the device, beside the link and other loaders.

Each way loads the whole file onto the device as a program's first act: open, all bytes, end of the
last copy. The ways take turns round by round, so that what the machine does meanwhile hits all of
them, and each round's bytes are compared once. Ways whose package is missing are left out and said
so. ``--cold`` empties the page cache of the file before each load, and has the file read past it in
turns with the others, as the floor; else it is warmed.

    python3 benches/load.py --gib 8 --rounds 5
"""

import argparse
import concurrent.futures
import contextlib
import functools
import gc
import json
import mmap
import os
import pathlib
import statistics
import sys
import threading
import time

import torch
import vbar

from stream import link_rate, warm, write_model

MIB = 1 << 20


def make_cold(path):
    """Gives the file's pages back, those that were never written included."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class OnVbar:
    """All tensors by one fault, or one after the other, of a model that is opened for it."""

    def __init__(self, path, together, options):
        self.path, self.together = path, together
        self.device = vbar.Device("cuda", **options)

    def load(self):
        model = self.device.open_model(self.path)
        stream = torch.cuda.current_stream()
        guards = contextlib.ExitStack()
        if self.together:
            ranges = [(model.bar, model[name].bar_offset, model[name].nbytes) for name in model]
            made = [guards.enter_context(self.device.fault_many(ranges, stream=stream))]
        else:
            made = [guards.enter_context(model.fault(name, stream=stream)) for name in model]
        torch.cuda.synchronize()
        if not all(made):
            raise RuntimeError("the model does not fit")
        return model, guards

    def check(self, loaded, expected):
        model, _ = loaded
        for name in model:
            with model.fault(name, stream=torch.cuda.current_stream()) as weight:
                expected(name, torch.from_dlpack(weight.view()))

    def free(self, loaded):
        model, guards = loaded
        guards.close()
        torch.cuda.synchronize()
        model.close()
        self.device.trim(0)

    def close(self):
        self.device.close()


class Together:
    """What loads into a dictionary of tensors."""

    def __init__(self, read):
        self.load = read

    def check(self, loaded, expected):
        for name, tensor in loaded.items():
            expected(name, tensor)

    def free(self, loaded):
        loaded.clear()
        gc.collect()
        torch.cuda.empty_cache()

    def close(self):
        pass


class Disk:
    """The floor of a cold load: the file read past the page cache, and left in host memory."""

    PIECE = 4 * MIB

    def __init__(self, path, thread_count):
        self.path, self.thread_count = path, thread_count

    def load(self):
        size = os.path.getsize(self.path)
        offsets = iter(range(0, size, self.PIECE))
        turn = threading.Lock()

        def read():
            # Anonymous memory of a mapping is aligned as O_DIRECT wants it.
            buffer = mmap.mmap(-1, self.PIECE)
            file = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
            try:
                while True:
                    with turn:
                        offset = next(offsets, None)
                    if offset is None:
                        return
                    if os.preadv(file, [buffer], offset) != min(self.PIECE, size - offset):
                        raise RuntimeError("a short read")
            finally:
                os.close(file)

        with concurrent.futures.ThreadPoolExecutor(self.thread_count) as pool:
            for done in [pool.submit(read) for _ in range(self.thread_count)]:
                done.result()

    def check(self, loaded, expected):
        pass

    def free(self, loaded):
        pass

    def close(self):
        pass


def safetensors_way(path):
    from safetensors.torch import load_file

    return Together(lambda: load_file(path, device="cuda"))


def instanttensor_way(path, backend):
    import instanttensor

    candidates = {
        "auto": None,
        "buffered": instanttensor.BackendPolicy.BUFFERED,
        "uring": instanttensor.Backend.URING,
        "mmap": instanttensor.Backend.MMAP,
    }

    def read():
        with instanttensor.safe_open(
            [str(path)], framework="pt", device=0, backend=candidates[backend]
        ) as file:
            return dict(file.tensors())

    return Together(read)


def ways(path, arguments):
    """Name and way, of those that are here."""
    options = {
        "page_size": arguments.page,
        "budget": f"{arguments.gib + 2}G",
        "threads": True,
        "prefer": arguments.prefer,
    }
    found = {
        "vbar, one fault": OnVbar(path, True, options),
        "vbar, a fault a tensor": OnVbar(path, False, options),
    }
    if arguments.cold:
        for count in arguments.disk_threads:
            found[f"O_DIRECT, {count} threads"] = Disk(path, count)
    makers = {"safetensors": lambda: safetensors_way(path)}
    for backend in arguments.instanttensor:
        makers[f"InstantTensor {backend}"] = functools.partial(instanttensor_way, path, backend)
    for name, make in makers.items():
        try:
            found[name] = make()
        except ImportError as error:
            print(f"{name} is left out: {error}", flush=True)
    return found


def measure(path, tensors, arguments, link):
    def expected(name, tensor):
        if not torch.equal(tensor.view(torch.int16), tensors[name].view(torch.int16)):
            raise RuntimeError(f"{name} is not what was written")

    found = ways(path, arguments)
    size = os.path.getsize(path)
    seconds = {name: [] for name in found}
    for turn in range(arguments.rounds + 1):
        for name, way in list(found.items()):
            (make_cold if arguments.cold else warm)(path)
            torch.cuda.synchronize()
            start = time.perf_counter()
            try:
                loaded = way.load()
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001: another's loader may fail in its own ways
                if name.startswith("vbar"):
                    raise
                print(f"{name} is left out: {type(error).__name__}: {error}", flush=True)
                del found[name]
                continue
            took = time.perf_counter() - start
            # The first load of each is compared, and not timed: packages are loaded by it.
            if turn == 0:
                way.check(loaded, expected)
                print(f"{name}: first load {took * 1e3:.1f} ms, bytes are right", flush=True)
            else:
                seconds[name].append(took)
            way.free(loaded)
            del loaded
    rows = []
    for name, way in found.items():
        median = statistics.median(seconds[name])
        rows.append(
            {
                "way": name,
                "ms": median * 1e3,
                "rounds_ms": [second * 1e3 for second in seconds[name]],
                "rate": size / median,
                "of_link": size / median / link,
            }
        )
        print(
            f"{name:28} {median * 1e3:9.1f} ms {size / median / 1e9:6.2f} GB/s,"
            f" {size / median / link:.2f} of the link; rounds"
            f" {' '.join(f'{second * 1e3:.0f}' for second in seconds[name])}",
            flush=True,
        )
        way.close()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp"))
    parser.add_argument("--gib", type=int, default=8)
    parser.add_argument("--tensor-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page", default="16M")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--instanttensor", default=["auto"], type=lambda text: text.split(","))
    parser.add_argument(
        "--disk-threads", default=[1, 4, 16], type=lambda text: [int(n) for n in text.split(",")]
    )
    parser.add_argument("--prefer", choices=["auto", "ram", "disk"], default="auto")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    link = link_rate()
    print(f"link {link / 1e9:.1f} GB/s, page-locked memory to the device", flush=True)
    path = arguments.folder / "vbar-load.safetensors"
    count = arguments.gib * 1024 // arguments.tensor_mib
    shape = (arguments.tensor_mib * MIB // 2 // 4096, 4096)
    tensors = {
        f"layers.{at}.weight": torch.randn(shape, device="cuda").to(torch.bfloat16)
        for at in range(count)
    }
    write_model(path, tensors)
    rows = measure(path, tensors, arguments, link)
    os.unlink(path)
    if arguments.json:
        arguments.json.write_text(json.dumps({"link": link, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
