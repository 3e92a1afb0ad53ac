"""What `vbar.torch.stream` costs: its passes beside the same model's through faults, with torch.

The workload is that of `stream.py`, equal bf16 layers. In one process, in turns, it goes through
faults as an engine of one's own would, as a `torch.nn.Module` of linear layers through
`vbar.torch.stream`, and as that module compiled as one graph. Beside all of them stands their
floor: max(compute, streamed bytes / rate of the link). Results are compared bit by bit with those
of the resident tensors.

    VBAR_LIBRARY=.../libvbar.so PYTHONPATH=python_shim python3 benches/torch_stream.py --quick
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import sys
import time

import torch
from stream import MIB, equal_layers, integers, link_rate, timed, wait_text, warm, write_model

import vbar
import vbar.torch


class Layers(torch.nn.Module):
    """The workload as a module: its layers one after the other."""

    def __init__(self, workload):
        super().__init__()
        rows, width = next(iter(workload.tensors.values())).shape
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(width, rows, bias=False, dtype=torch.bfloat16) for _ in workload.steps
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Way:
    """A way to run the model, and what was measured of it."""

    def __init__(self, name, run):
        self.name, self.run = name, run
        self.seconds, self.streamed, self.equal, self.waits = [], [], True, ""

    def measure(self, device, passes):
        torch.cuda.synchronize()
        before = device.statistics()
        self.seconds.append(timed(self.run, 1, passes))
        after = device.statistics()
        self.streamed.append((after.filled_bytes - before.filled_bytes) / passes)
        self.waits = wait_text(before, after)


def ways_of(workload, streaming, names):
    """All of them over one model: they fault the same ranges in the same order, so what the engine
    learned and what is resident are the same for each.
    """
    offloaded, module = [], streaming.module
    workload.prepare(streaming.model)
    compiled = torch.compile(module, fullgraph=True)

    def by_faults():
        found = workload.streamed(streaming.device, streaming.model, offloaded)
        assert not offloaded, offloaded
        return found

    made = {
        "faults": by_faults,
        "stream": lambda: module(workload.input),
        "compiled": lambda: compiled(workload.input),
    }
    return [Way(name, made[name]) for name in names]


def one_budget(workload, path, percent, arguments, link):
    """Rounds of each way in turns: what the machine does meanwhile hits all of them."""
    page = int(arguments.page[:-1]) * MIB
    budget = math.ceil(workload.bytes * percent / 100 / page) * page
    budget += 2 * page if percent == 100 else 0
    compute = timed(workload.resident, arguments.rounds, arguments.passes)
    wanted = workload.resident()
    with vbar.torch.empty_model():
        module = Layers(workload)
    streaming = vbar.torch.stream(
        module.eval(), path, budget, one_graph=True, page_size=arguments.page
    )
    device, rows = streaming.device, []
    ways = ways_of(workload, streaming, arguments.ways.split(","))
    for way in ways:
        warm(path)
        torch.cuda.synchronize()
        start = time.perf_counter()
        way.equal = bool(torch.equal(way.run(), wanted))
        print(f"{way.name}: its first pass took {time.perf_counter() - start:.2f} s", flush=True)
    for _ in range(arguments.learn):
        ways[0].run()
    for _ in range(arguments.rounds):
        for way in ways:
            way.measure(device, arguments.passes)
    for way in ways:
        way.equal = way.equal and bool(torch.equal(way.run(), wanted))
        seconds, streamed = statistics.median(way.seconds), statistics.median(way.streamed)
        ratios = [mine / first for mine, first in zip(way.seconds, ways[0].seconds)]
        rows.append(
            {
                "way": way.name,
                "budget_percent": percent,
                "compute_ms": compute * 1e3,
                "pass_ms": seconds * 1e3,
                "rounds_ms": [each * 1e3 for each in way.seconds],
                "streamed_bytes": streamed,
                "over_bound": seconds / max(compute, streamed / link),
                "over_first_way": statistics.median(ratios),
                "equal": way.equal,
                "waits": way.waits,
            }
        )
        print(
            f"budget {percent:3} %, {way.name:8}: pass {seconds * 1e3:8.2f} ms, compute"
            f" {compute * 1e3:.2f}, streamed {streamed / 1e9:6.2f} GB"
            f" ({streamed / link * 1e3:7.2f} ms): {rows[-1]['over_bound']:.3f} of the bound,"
            f" {rows[-1]['over_first_way']:.4f} of {ways[0].name};"
            f" {'equal' if way.equal else 'DIFFERENT'}; {way.waits}",
            flush=True,
        )
    torch.cuda.synchronize()
    # Not `unstream`, which would read all of it once more.
    streaming.model.close()
    device.close()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp"))
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--layer-mib", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--budgets", type=integers, default=[25, 50, 75])
    parser.add_argument("--ways", default="faults,stream,compiled")
    parser.add_argument("--page", default="16M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--learn", type=int, default=16, help="passes before any is measured")
    parser.add_argument("--quick", action="store_true", help="one budget, few rounds")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.budgets, arguments.rounds, arguments.learn = arguments.budgets[1:2], 3, 12
    link = link_rate()
    print(f"link {link / 1e9:.1f} GB/s, page-locked memory to the device", flush=True)
    torch.manual_seed(7)
    workload = equal_layers(arguments.layers, arguments.layer_mib * MIB, arguments.tokens)
    path = arguments.folder / "vbar-torch-stream.safetensors"
    write_model(path, workload.tensors)
    rows = []
    try:
        with torch.no_grad():
            for percent in arguments.budgets:
                rows += one_budget(workload, path, percent, arguments, link)
    finally:
        os.unlink(path)
    if arguments.json:
        arguments.json.write_text(json.dumps({"link": link, "rows": rows}, indent=1))
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
