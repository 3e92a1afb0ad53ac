"""How much memory PyTorch's allocators hold for what a program has live, and how long they take.

``--record training PATH`` (or ``sampling``) runs a program of ``torch_programs.py`` with vbar's
allocator and writes what it asks for; ``--with native`` does so by PyTorch's own. ``TRACE...``
replays such files, also gzipped ones, with tensors of bytes on streams of their own: with PyTorch's
own allocator, with its expandable segments, and with vbar, each in a process of its own. Told are

* the most that was live at a time, as it was asked for, not rounded;
* the most that the allocator held, by its own count, and their ratio, the utilisation: in the first
  replay, in which nothing is cached yet, and after ``--replays`` of them;
* by how much the driver has less afterwards than before, which other programs change too, and what
  vbar holds beyond its count: frames that nobody has;
* nanoseconds an event, ``torch.empty`` and what Python takes included: of the first replay, and of
  the last;
* with ``--tight`` the least memory, in hundredths of what is live, in which the trace runs.

No kernel runs, so that events of streams are never late. ``--run training`` (or ``sampling``) runs
the program itself in the same ways, as often, and tells the seconds of the last one, what was
allocated and what was held at most, and what it computed, which is the same in all ways.

    VBAR_LIBRARY=.../libvbar.so PYTHONPATH=python_shim python3 benches/torch_replay.py TRACE
"""

import argparse
import gzip
import json
import os
import pathlib
import subprocess
import sys
import time

MIB = 1 << 20
MALLOC, RECORD, FREE = range(3)
WAYS = ("native", "expandable", "vbar")
#: Hundredths of what is live that are tried, in this order.
PERCENTS = [*range(100, 121), *range(122, 151, 2), *range(155, 301, 5)]


def read(path):
    """The events of a trace: tuples of a kind, an id, and a stream, in the end bytes."""
    opened = gzip.open if str(path).endswith(".gz") else open
    events = []
    with opened(path, "rt", encoding="ascii") as file:
        for line in file:
            words = line.split("#")[0].split()
            if not words:
                continue
            verb, numbers = words[0], [int(word) for word in words[1:]]
            if verb == "malloc" and len(numbers) == 3:
                events.append((MALLOC, numbers[0], numbers[2], numbers[1]))
            elif verb == "record" and len(numbers) == 2:
                events.append((RECORD, numbers[0], numbers[1], 0))
            elif verb == "free" and len(numbers) == 1:
                events.append((FREE, numbers[0], 0, 0))
            else:
                raise ValueError(f"{path}: {line.rstrip()!r} is no event")
    return events


def live_peak(events):
    """The most bytes that are live at a time."""
    live, peak, sizes = 0, 0, {}
    for kind, block, _, nbytes in events:
        if kind == MALLOC:
            sizes[block] = nbytes
            live += nbytes
            peak = max(peak, live)
        elif kind == FREE:
            live -= sizes.pop(block)
    return peak


def replay(torch, events, streams):
    """Asks for what a trace says; nanoseconds."""
    tensors, current = {}, 0
    empty, uint8, set_stream = torch.empty, torch.uint8, torch.cuda.set_stream
    started = time.perf_counter_ns()
    try:
        for kind, block, stream, nbytes in events:
            if kind == MALLOC:
                if stream != current:
                    set_stream(streams[stream])
                    current = stream
                tensors[block] = empty(nbytes, dtype=uint8, device="cuda")
            elif kind == FREE:
                del tensors[block]
            else:
                tensors[block].record_stream(streams[stream])
        return time.perf_counter_ns() - started
    finally:
        set_stream(streams[0])
        tensors.clear()


def runs_in(torch, events, streams, peak, percent):
    """Whether a trace runs in so many hundredths of what is live."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, peak * percent / 100 / total))
    try:
        replay(torch, events, streams)
        return True
    except torch.OutOfMemoryError:
        return False


def tightest(torch, events, streams, peak):
    """The least memory that does, in hundredths of what is live; None where none of them does."""
    lowest, highest = 0, len(PERCENTS) - 1
    if not runs_in(torch, events, streams, peak, PERCENTS[highest]):
        return None
    while lowest < highest:
        middle = (lowest + highest) // 2
        if runs_in(torch, events, streams, peak, PERCENTS[middle]):
            highest = middle
        else:
            lowest = middle + 1
    return PERCENTS[highest]


def torch_with(way, options):
    """torch, with an allocator."""
    import torch

    if way == "vbar":
        import vbar.torch

        vbar.torch.install(**({"driver": options.driver} if options.driver else {}))
    return torch


def run(way, program, options):
    """One allocator and one program, in this process."""
    torch = torch_with(way, options)
    from torch_programs import PROGRAMS

    seconds, sums = [], []
    for _ in range(options.replays):
        started = time.perf_counter()
        sums.append(PROGRAMS[program]())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    stats = torch.cuda.memory_stats()
    peak, held = (stats[f"{key}.all.peak"] for key in ("requested_bytes", "reserved_bytes"))
    return {
        "program": program,
        "allocator": way,
        "seconds": seconds[-1],
        "requested_peak_bytes": peak,
        "reserved_peak_bytes": held,
        "utilisation": peak / held,
        "device_calls": stats["num_device_alloc"],
        "sums": sums,
    }


def measure(way, path, options):
    """One allocator and one trace, in this process."""
    torch = torch_with(way, options)
    events = read(path)
    torch.cuda.init()
    count = 1 + max((event[2] for event in events), default=0)
    streams = [torch.cuda.current_stream()]
    streams += [torch.cuda.Stream() for _ in range(count - 1)]
    free_before = torch.cuda.mem_get_info()[0]
    reserved, spent = [], []
    for _ in range(options.replays):
        spent.append(replay(torch, events, streams))
        reserved.append(torch.cuda.memory_stats()["reserved_bytes.all.peak"])
    live = live_peak(events)
    free_frame_bytes = torch.cuda.memory_stats().get("vbar.free_frame_bytes", 0)
    found = {
        "trace": str(path),
        "allocator": way,
        "events": len(events),
        "live_peak_bytes": live,
        "reserved_peak_bytes": reserved[0],
        "utilisation": live / reserved[0],
        "reserved_peak_bytes_of_all": reserved[-1],
        "utilisation_of_all": live / reserved[-1],
        "free_frame_bytes": free_frame_bytes,
        "device_bytes": free_before - torch.cuda.mem_get_info()[0],
        "first_ns_an_event": spent[0] / len(events),
        "last_ns_an_event": spent[-1] / len(events),
    }
    if options.tight:
        found["tight_percent"] = tightest(torch, events, streams, live)
    return found


def print_one(found):
    print(
        f"{pathlib.Path(found['trace']).name:>24} {found['allocator']:>10}: "
        f"{found['events']} events, live {found['live_peak_bytes'] / MIB:.0f} MiB, "
        f"held {found['reserved_peak_bytes'] / MIB:.0f} MiB: {found['utilisation']:.2%} "
        f"(of all replays {found['utilisation_of_all']:.2%}), "
        f"device {found['device_bytes'] / MIB:.0f} MiB, "
        f"free frames {found['free_frame_bytes'] / MIB:.0f} MiB, "
        f"{found['first_ns_an_event']:.0f} ns an event at first, "
        f"{found['last_ns_an_event']:.0f} at last"
        + (f", runs in {found['tight_percent']} % of live" if "tight_percent" in found else ""),
        flush=True,
    )


def print_run(found):
    print(
        f"{found['program']:>10} {found['allocator']:>10}: {found['seconds']:.3f} s, requested "
        f"{found['requested_peak_bytes'] / MIB:.0f} MiB, held "
        f"{found['reserved_peak_bytes'] / MIB:.0f} MiB: {found['utilisation']:.2%}, "
        f"{found['device_calls']} calls for memory, {found['sums']}",
        flush=True,
    )


def elsewhere(way, what, options):
    """The same in a process of its own."""
    environment = dict(os.environ)
    environment.pop("PYTORCH_ALLOC_CONF", None)
    environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    if way == "expandable":
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    command = [sys.executable, __file__, "--one", way, "--replays", str(options.replays)]
    command += ["--tight"] if options.tight else []
    command += ["--driver", options.driver] if options.driver else []
    command += ["--run", options.run] if options.run else [str(what)]
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def record(way, program, path, options):
    """Runs a program, and writes what it asks for; gzipped where the name says so."""
    torch = torch_with(way, options)
    import vbar.torch
    from torch_programs import PROGRAMS

    plain = path.removesuffix(".gz")
    started = time.perf_counter()
    if way == "vbar":
        with vbar.torch.record(plain):
            PROGRAMS[program]()
            torch.cuda.synchronize()
    else:
        torch.cuda.memory._record_memory_history(context=None, max_entries=1 << 20)
        PROGRAMS[program]()
        torch.cuda.synchronize()
        vbar.torch.history_to_trace(torch.cuda.memory._snapshot(), plain)
    seconds = time.perf_counter() - started
    if plain != path:
        text = pathlib.Path(plain).read_bytes()
        # Without a time, the same trace is the same file.
        pathlib.Path(path).write_bytes(gzip.compress(text, 9, mtime=0))
        os.remove(plain)
    events = read(path)
    print(
        f"{program}: {len(events)} events in {seconds:.1f} s, live {live_peak(events) / MIB:.0f} "
        f"MiB, {os.path.getsize(path)} bytes of file",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--record", choices=["training", "sampling"], help="write a trace")
    parser.add_argument("--run", choices=["training", "sampling"], help="run the program itself")
    parser.add_argument("--with", dest="ways", default=",".join(WAYS), help="allocators")
    parser.add_argument("--replays", type=int, default=3)
    parser.add_argument("--tight", action="store_true", help="seek the least memory that does")
    parser.add_argument("--driver", help="of vbar, as for vbar.Device")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("traces", nargs="*", metavar="TRACE")
    options = parser.parse_args()
    if bool(options.run) == bool(options.traces):
        parser.error("traces are expected, or --run and none")
    if options.one:
        one = run if options.run else measure
        what = options.run or options.traces[0]
        return print(json.dumps(one(options.one, what, options)))
    ways = options.ways.split(",")
    if not set(ways) <= set(WAYS):
        parser.error(f"--with: {', '.join(WAYS)} are there")
    if options.record:
        # Of one, the last that is named.
        return record(ways[-1], options.record, options.traces[0], options)
    found = []
    for what in options.traces or [options.run]:
        for way in ways:
            found.append(elsewhere(way, what, options))
            if not options.json:
                (print_run if options.run else print_one)(found[-1])
    if options.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
