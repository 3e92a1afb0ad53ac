"""How fast a model runs that is larger than its budget: passes beside their bound, with torch.

Every figure stands beside its floor, measured in the same process: the same loop on plain resident
tensors ("compute"), and the bytes that were streamed over the rate of the link. Results are
compared bit by bit with those of the resident tensors.

    VBAR_LIBRARY=.../libvbar.so PYTHONPATH=python_shim python3 benches/stream.py --json out.json
"""

import argparse
import concurrent.futures
import json
import math
import os
import pathlib
import random
import statistics
import struct
import sys
import time

import torch

import vbar

MIB = 1 << 20


def write_model(path, tensors):
    """Writes a safetensors file of bf16 tensors that are on the device."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 4096 + 4096 - 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.view(torch.uint8).cpu().numpy().data)


class Raw:
    """Device memory at an address that never changes, for torch to look at."""

    def __init__(self, address, count):
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<i2",
            "data": (address, False),
            "version": 3,
        }


class Workload:
    """A model, and one pass over it."""

    #: What one step makes resident together.
    steps: list
    #: What the first of equal layers is given.
    input: torch.Tensor

    def __init__(self, tensors, steps, compute):
        self.tensors, self.steps, self.compute = tensors, steps, compute
        self.bytes = sum(tensor.nbytes for tensor in tensors.values())

    def resident(self):
        """A pass over plain resident tensors."""
        state = None
        for step in self.steps:
            state = self.compute(state, [self.tensors[name] for name in step])
        return state

    @staticmethod
    def view(model, name):
        told = model[name]
        flat = torch.as_tensor(Raw(told.address, told.nbytes // 2), device="cuda")
        return flat.view(torch.bfloat16).view(told.shape)

    def prepare(self, model):
        """What a program does once after it has opened a model."""
        self.ranges = [
            vbar.Ranges((model.bar, model[name].bar_offset, model[name].nbytes) for name in step)
            for step in self.steps
        ]
        # Torch asks the driver about an address, which must be backed then.
        self.step_views = [None] * len(self.steps)

    def fault(self, device, model, index):
        step = self.steps[index]
        if len(step) == 1:
            return model.fault(step[0])
        return device.fault_many(self.ranges[index])

    def streamed(self, device, model, offloaded):
        """A pass through faults."""
        state = None
        for index, step in enumerate(self.steps):
            with self.fault(device, model, index) as fault:
                if fault:
                    weights = self.step_views[index]
                    if weights is None:
                        weights = [self.view(model, name) for name in step]
                        self.step_views[index] = weights
                else:
                    offloaded.append((step[0], fault.reason))
                    weights = [self.tensors[name] for name in step]
                state = self.compute(state, weights)
        return state


def equal_layers(count, layer_bytes, tokens):
    n = math.isqrt(layer_bytes // 2)
    n -= n % 64
    tensors = {
        f"layers.{index}.weight": torch.randn(n, n, device="cuda", dtype=torch.bfloat16) * 0.01
        for index in range(count)
    }
    x = torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16)

    def compute(state, weights):
        return torch.nn.functional.linear(x if state is None else state, weights[0])

    workload = Workload(tensors, [[name] for name in tensors], compute)
    workload.input = x
    return workload


def uneven_layers(total_bytes, tokens):
    """Layers of 0.5 to 512 MiB, most of them small."""
    width, rng, tensors, left = 4096, random.Random(7), {}, total_bytes
    while left > 0:
        size = int(2 ** rng.uniform(19, 29))
        rows = max(64, size // 2 // width)
        name = f"layers.{len(tensors):04}.weight"
        tensors[name] = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) * 0.01
        left -= tensors[name].nbytes
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)

    def compute(state, weights):
        out = torch.nn.functional.linear(x, weights[0])
        part = out[:, 0].float().sum()
        return part if state is None else state + part

    return Workload(tensors, [[name] for name in tensors], compute)


def small_tensors(count, groups, tokens):
    """Many tensors of 64 KiB in groups, each group faulted at once."""
    tensors = {
        f"t.{index:05}": torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
        for index in range(count)
    }
    names, per = list(tensors), count // groups
    steps = [names[at : at + per] for at in range(0, count, per)]
    x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)

    def compute(state, weights):
        for weight in weights:
            part = torch.nn.functional.linear(x, weight)
        part = part.float().sum()
        return part if state is None else state + part

    return Workload(tensors, steps, compute)


def warm(path):
    """Reads the file, so that the page cache has it."""
    size, part = os.path.getsize(path), 256 * MIB

    def read(offset):
        buffer = bytearray(4 * MIB)
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            while file.tell() < offset + part and file.readinto(buffer):
                pass

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(read, range(0, size, part)))


def link_rate():
    """Bytes a second from page-locked memory to the device."""
    host = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device="cuda")
    rates = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(8):
            target.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(8 * host.nbytes / (time.perf_counter() - start))
    return statistics.median(rates)


def timed(work, rounds, passes):
    """Median seconds of one pass."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(passes):
            work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / passes)
    return statistics.median(times)


def in_turns(first, second, rounds, passes):
    """Median seconds of one pass of each, and of the ratio of the second to the first: what the
    machine does meanwhile hits both."""
    pairs = []
    for _ in range(rounds):
        pairs.append([timed(work, 1, passes) for work in (first, second)])
    ratio = statistics.median(late / early for early, late in pairs)
    return (*(statistics.median(column) for column in zip(*pairs)), ratio)


def wait_text(before, after):
    waits = []
    for kind, wait in after.waits.items():
        was = before.waits.get(kind)
        count, nanos = (
            (wait.count - was.count, wait.nanos - was.nanos) if was else (wait.count, wait.nanos)
        )
        if count:
            waits.append(f"{kind.name.lower()} {count}x {nanos / 1e6:.1f} ms")
    return ", ".join(waits)


def measure(workload, path, arguments, link, label):
    compute = timed(workload.resident, arguments.rounds, arguments.passes)
    wanted = workload.resident()
    page = int(arguments.page[:-1]) * MIB
    rows = []
    for percent in arguments.budgets:
        # Whole pages, so that all of the model is all of it; a page more for the file's gaps.
        budget = math.ceil(workload.bytes * percent / 100 / page) * page
        budget += 2 * page if percent == 100 else 0
        with vbar.Device(
            "cuda", budget=budget, page_size=arguments.page, threads=not arguments.no_threads
        ) as device:
            with device.open_model(path) as model:
                offloaded = []
                workload.prepare(model)

                def run():
                    return workload.streamed(device, model, offloaded)

                warm(path)
                start = time.perf_counter()
                found = run()
                torch.cuda.synchronize()
                first = time.perf_counter() - start
                for _ in range(arguments.learn):
                    run()
                equal = bool(torch.equal(found, wanted)) and bool(torch.equal(run(), wanted))
                torch.cuda.synchronize()
                before = device.statistics()
                seconds = timed(run, arguments.rounds, arguments.passes)
                after = device.statistics()
                count = arguments.rounds * arguments.passes
                streamed = (after.filled_bytes - before.filled_bytes) / count
                bound = max(compute, streamed / link)
                ideal = max(compute, max(0, workload.bytes - budget) / link)
                turns = None
                # Where compute is the bound, the two in turns: processors change their speed. One
                # that waits for the link would be given the time of the others to read ahead in.
                if streamed / link < compute * 0.8:
                    turns = in_turns(workload.resident, run, 3 * arguments.rounds, arguments.passes)
                    print(
                        f"{label} budget {percent:3} % in turns: {turns[0] * 1e3:.2f} and"
                        f" {turns[1] * 1e3:.2f} ms, {turns[2]:.4f} of compute",
                        flush=True,
                    )
                row = {
                    "workload": label,
                    "budget_percent": percent,
                    "compute_ms": compute * 1e3,
                    "pass_ms": seconds * 1e3,
                    "first_ms": first * 1e3,
                    "first_over_bound": first / max(compute, workload.bytes / link),
                    "streamed_bytes": streamed,
                    "over_bound": seconds / bound,
                    "over_ideal": seconds / ideal,
                    "over_compute_in_turns": turns and turns[2],
                    "loads": (after.mapped_page_count - before.mapped_page_count) / count,
                    "model_pages": math.ceil(workload.bytes / device.page_size),
                    "budget_pages": budget // device.page_size,
                    "locked_bytes": after.locked_bytes,
                    "offloaded": len(offloaded),
                    "equal": equal,
                    "waits": wait_text(before, after),
                }
                rows.append(row)
                print(
                    f"{label} budget {percent:3} %: pass {row['pass_ms']:8.2f} ms, compute"
                    f" {row['compute_ms']:8.2f}, streamed {streamed / 1e9:6.2f} GB"
                    f" ({streamed / link * 1e3:7.2f} ms): {row['over_bound']:.3f} of the bound,"
                    f" {row['over_ideal']:.3f} of the ideal; loads {row['loads']:.0f} of"
                    f" {row['model_pages']} - {row['budget_pages']}; first"
                    f" {row['first_over_bound']:.2f}; locked {after.locked_bytes / 1e9:.2f} GB;"
                    f" {'equal' if equal else 'DIFFERENT'}; offloaded {len(offloaded)};"
                    f" {row['waits']}",
                    flush=True,
                )
        torch.cuda.synchronize()
    return rows


def plot(rows, link):
    """Pass time over its bound by budget, a line a workload, as SVG."""
    width, height, left, top = 720, 360, 60, 30
    right, bottom = width - 150, height - 50
    most = max(1.1, max(row["over_bound"] for row in rows) + 0.02)
    least = min(0.95, min(row["over_bound"] for row in rows) - 0.02)
    colours = ["#1b6ca8", "#c8553d", "#588157", "#8e44ad", "#b8860b", "#444444"]

    def at(percent, ratio):
        x = left + (right - left) * percent / 100
        return x, bottom - (bottom - top) * (ratio - least) / (most - least)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="18">Time of a pass over max(compute, streamed bytes / link);'
        f" link {link / 1e9:.1f} GB/s</text>",
    ]
    for percent in range(0, 101, 10):
        x, _ = at(percent, 1)
        out.append(f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{percent} %</text>')
    step = 0.05 if most - least < 0.5 else 0.25
    ratio = math.ceil(least / step) * step
    while ratio <= most:
        _, y = at(0, ratio)
        stroke = "#888" if abs(ratio - 1) < 1e-9 else "#ddd"
        out.append(f'<path d="M{left} {y:.1f}H{right}" stroke="{stroke}"/>')
        out.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{ratio:.2f}</text>')
        ratio += step
    names = list(dict.fromkeys(row["workload"] for row in rows))
    for number, name in enumerate(names):
        colour = colours[number % len(colours)]
        mine = [row for row in rows if row["workload"] == name]
        points = [at(row["budget_percent"], row["over_bound"]) for row in mine]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        y = top + 16 * number + 10
        out.append(f'<text x="{right + 12}" y="{y}" fill="{colour}">{name} tokens</text>')
    middle = (left + right) / 2
    out.append(f'<text x="{middle}" y="{height - 10}" text-anchor="middle">budget</text></svg>')
    return "\n".join(out) + "\n"


def integers(text):
    return [int(part) for part in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp"))
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--layer-mib", type=int, default=256)
    parser.add_argument("--tokens", type=integers, default=[4096])
    parser.add_argument("--budgets", type=integers, default=[10, 25, 50, 75, 90, 100])
    parser.add_argument("--workloads", default="equal,uneven,small")
    parser.add_argument("--page", default="16M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--learn", type=int, default=16)
    parser.add_argument("--no-threads", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--svg", type=pathlib.Path)
    arguments = parser.parse_args()
    link = link_rate()
    print(f"link {link / 1e9:.1f} GB/s, page-locked memory to the device", flush=True)
    rows = []
    for kind in arguments.workloads.split(","):
        path = arguments.folder / f"vbar-{kind}.safetensors"
        for at, tokens in enumerate(arguments.tokens):
            torch.manual_seed(7)
            if kind == "equal":
                workload = equal_layers(arguments.layers, arguments.layer_mib * MIB, tokens)
            elif kind == "uneven":
                workload = uneven_layers(arguments.layers * arguments.layer_mib * MIB // 2, tokens)
            else:
                workload = small_tensors(10_000, 100, 512)
            if at == 0:
                write_model(path, workload.tensors)
            rows += measure(workload, path, arguments, link, f"{kind} {tokens}")
            del workload
            torch.cuda.empty_cache()
        os.unlink(path)
    if arguments.json:
        arguments.json.write_text(json.dumps({"link": link, "rows": rows}, indent=1))
    if arguments.svg:
        arguments.svg.write_text(plot(rows, link))
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
