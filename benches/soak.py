"""A quarter of an hour of PyTorch, C and Python in a tight budget, beside others that want more.

One process has PyTorch with vbar's allocator: tensors on several streams, modules larger than the
budget, patches that change, Ctrl-C; and a thread that runs `soak.c` in the same runtime. `soak.c`
runs in a process of its own too, and a third one takes and releases device memory at random. Once a
second all of them stop and are sampled together: what the library counts, what the driver says of
the device, and what the system says of the processes. Each byte that is read is compared.

The verdict: no wrong byte; memory, reservations, descriptors, mappings, threads no more in the last
quarter than in the second; frames that are counted equal to those that the driver misses; a pass
takes as long. Samples are written as they come: ``--report`` judges what there is, at any time.

    VBAR_LIBRARY=.../libvbar.so PYTHONPATH=python_shim python3 benches/soak.py --seconds 900
    ... python3 benches/soak.py --no-torch --seconds 600    # C and Python on the simulated device
    ... python3 benches/soak.py --report soak.jsonl --svg soak.svg

It ends with 0 when all is well, 1 when not, 2 for arguments, 3 when samples are too few to say.
"""

import argparse
import contextlib
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import soak_report
from soak_loads import MIB, write_model

HERE = pathlib.Path(__file__).resolve().parent
GIB = 1 << 30
MISTAKES = ("bar", "descriptor", "byte", "list")


class Stuck(Exception):
    """A load did not answer."""


class Ended(Exception):
    """A load ended, or said that something failed."""


class Child:
    """A load, from outside: a process, or the thread of another one."""

    def __init__(self, name, process, target, source, patience):
        self.name, self.process, self.patience = name, process, patience
        self.target, self.source, self.rest = target, source, b""

    def say(self, line):
        try:
            os.write(self.target, line.encode() + b"\n")
        except BrokenPipeError:
            raise Ended(f"{self.name} is not there any more") from None

    def hear(self):
        until = time.monotonic() + self.patience
        while b"\n" not in self.rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.source], [], [], left)[0]:
                raise Stuck(f"{self.name} did not answer within {self.patience} s")
            got = os.read(self.source, 1 << 16)
            if not got:
                raise Ended(f"{self.name} ended without a word")
            self.rest += got
        line, _, self.rest = self.rest.partition(b"\n")
        told = json.loads(line)
        if "failed" in told:
            raise Ended(f"{self.name}: {told['failed']}")
        return told

    def ask(self, line):
        self.say(line)
        return self.hear()


def compile_into(folder):
    """The load in C, as a program and as an object for a thread of another one."""
    import vbar._library

    library = pathlib.Path(vbar._library.load()._name).resolve()
    # What the linker wrote down, and the loader looks for: the same file as the package has.
    link = folder / f"libvbar.so.{vbar._library.load().vbar_abi_version()}"
    link.symlink_to(library)
    compiler = [os.environ.get("CC", "cc"), "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror"]
    compiler += ["-pedantic", "-I", str(HERE.parent / "include"), str(HERE / "soak.c")]
    linked = [str(link), f"-Wl,-rpath,{folder}", "-ldl"]
    started = [
        subprocess.Popen([*compiler, *kind, "-o", str(folder / name), *linked])
        for name, kind in [("soak", []), ("soak.so", ["-shared", "-fPIC", "-DSOAK_SHARED"])]
    ]
    if any([process.wait() for process in started]):
        raise SystemExit("soak.c was not compiled")


class Soak:
    """All loads, and the file that samples are written to."""

    def __init__(self, arguments, folder):
        self.arguments, self.folder, self.children = arguments, folder, []
        self.programs = arguments.programs or folder
        self.log = open(arguments.jsonl, "w", encoding="utf-8")
        self.began = time.monotonic()

    def write(self, told):
        self.log.write(json.dumps(told) + "\n")
        self.log.flush()

    # Starting.

    def start(self):
        given = self.arguments
        models, seed = [], given.seed
        for kind, count, nbytes in [("python", 3, given.model), ("c", 2, given.c_model)]:
            for at in range(count if kind == "c" or not given.torch else 0):
                sizes = [given.page * 3 // 2 - 512 * (at + index) for index in range(
                    max(4, nbytes * 2 // (3 * given.page)))]
                path = self.folder / f"{kind}{at}.safetensors"
                models.append(write_model(path, sizes, seed + len(models)))
        of_python, of_c = models[:-2], models[-2:]
        mistakes = dict(told.split(":") for told in given.inject)
        common = {"seed": seed, "page": given.page, "headroom": given.headroom}
        # A simulated device is one process's own: the loads are their own neighbours.
        outside = 0 if given.torch else given.budget
        driver = given.driver
        if given.torch:
            self._process("neighbour", "neighbour", {**common, "arena": given.arena})
        options = {
            **common,
            "driver": driver,
            "budget": given.budget,
            "outside": outside,
            "models": of_python,
            "inject": mistakes.get("python"),
            "folder": str(self.folder),
            "layers": given.layers,
            "model_bytes": given.model,
        }
        c = [f"{name}={value}" for name, value in [
            ("driver", driver), ("page", given.page), ("headroom", given.headroom),
            ("seed", seed), *(("model", path) for path in of_c)]]
        if not given.no_thread:
            self._with_thread("python", options, [*c, f"budget={given.budget}"], mistakes)
        else:
            self._process("python", given.kind, options)
        self._c("c", [*c, f"budget={given.c_budget}", f"outside={min(outside, given.c_budget)}",
                      f"inject={mistakes.get('c', '')}"])

    def _pipes(self):
        theirs, target = os.pipe()
        source, theirs_too = os.pipe()
        return theirs, target, source, theirs_too

    def _process(self, name, kind, options, more=()):
        theirs, target, source, theirs_too = self._pipes()
        command = [sys.executable, str(HERE / "soak_loads.py"), kind, json.dumps(options)]
        process = subprocess.Popen(
            [*command, str(theirs), str(theirs_too)], pass_fds=(theirs, theirs_too, *more)
        )
        self._add(name, process, target, source, theirs, theirs_too)

    def _add(self, name, process, target, source, *theirs):
        for one in theirs:
            os.close(one)
        # Models are made and written first.
        child = Child(name, process, target, source, max(300, self.arguments.patience))
        self.children.append(child)
        child.hear()
        child.patience = self.arguments.patience

    def _c(self, name, arguments):
        theirs, target, source, theirs_too = self._pipes()
        command = [str(self.programs / "soak"), f"in={theirs}", f"out={theirs_too}", *arguments]
        process = subprocess.Popen(command, pass_fds=(theirs, theirs_too))
        self._add(name, process, target, source, theirs, theirs_too)

    def _with_thread(self, name, options, arguments, mistakes):
        theirs, target, source, theirs_too = self._pipes()
        told = [f"in={theirs}", f"out={theirs_too}", *arguments]
        told.append(f"inject={mistakes.get('thread', '')}")
        options["thread"] = {"object": str(self.programs / "soak.so"), "arguments": told}
        self._process(name, self.arguments.kind, options, (theirs, theirs_too))
        self._add("thread", self.children[-1].process, target, source, theirs, theirs_too)

    # Sampling.

    def sample(self, number, is_bare):
        """All loads stop, then each says what it counts, and what it is seen to have."""
        began = time.monotonic()
        for child in self.children:
            child.say("stop")
        for child in self.children:
            child.hear()
        if is_bare:
            for child in self.children:
                child.ask("bare")
        # That of another program is last: what it sees is what the others have told.
        loads = {child.name: child.ask("sample") for child in reversed(self.children)}
        told = {
            "at": round(time.monotonic() - self.began, 3),
            "number": number,
            "bare": is_bare,
            "loads": loads,
            "processes": {
                child.name: process_of(child.process.pid)
                for child in self.children
                if child.name != "thread"
            },
        }
        if is_bare and self.arguments.times:
            told["seconds"] = {
                child.name: child.ask("time")["seconds"]
                for child in self.children
                if child.name != "neighbour"
            }
        told["stopped"] = round(time.monotonic() - began, 3)
        self.write({"sample": told})
        return told

    def run(self):
        given = self.arguments
        self.write({"soak": {name: str(value) if isinstance(value, pathlib.Path) else value
                             for name, value in vars(given).items()}})
        if given.programs is None:
            compile_into(self.folder)
        self.start()
        # What is made once is made before anything is sampled.
        for child in self.children:
            child.say("go 6")
        for child in self.children:
            child.ask("stop")
        self.began, number = time.monotonic(), 0
        while not self._is_over(number):
            for child in self.children:
                child.say(f"go {given.rounds}")
            if not given.samples:
                time.sleep(given.sample_seconds)
            is_bare = number % given.bare_every == given.bare_every - 1
            told = self.sample(number, is_bare)
            if number == 0 and given.torch:
                self._let_press(told["loads"])
            number += 1
            if number % given.tell_every == 0:
                verified = sum(each.get("verified", 0) for each in told["loads"].values())
                print(f"{told['at']:.0f} s: {number} samples, {verified / 1e9:.1f} GB verified",
                      flush=True)
        for child in self.children:
            child.say("end")
        for child in self.children:
            child.hear()
        codes = {child.name: child.process.wait(given.patience) for child in self.children}
        return {"codes": codes}

    def _let_press(self, loads):
        """Says how much another program may take, now that the loads have what they want: so much
        that they are left with three fifths of it.
        """
        held = sum(loads[name]["used"] for name in ("python", "c"))
        left = (self.arguments.budget + self.arguments.c_budget) * 3 // 5
        most = loads["neighbour"]["free"] + held - left
        self.children[0].ask(f"most {max(0, most)}")

    def _is_over(self, number):
        given = self.arguments
        if given.samples:
            return number >= given.samples
        return time.monotonic() - self.began >= given.seconds

    def end_all(self):
        """Processes that are still there: they end when nobody asks them any more. One that is
        stuck says where, if it is Python.
        """
        for child in self.children:
            os.close(child.target)
        for child in self.children:
            for number, seconds in ((0, 10), (signal.SIGABRT, 10), (signal.SIGKILL, None)):
                if child.process.poll() is None:
                    child.process.send_signal(number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.process.wait(seconds)


def process_of(pid):
    """What the system says of a process; sizes in bytes."""
    found = {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        found["maps"] = sum(1 for _ in maps)
    names = {"VmRSS": "rss", "RssAnon": "anonymous", "VmSize": "addresses", "VmLck": "locked",
             "VmPin": "pinned"}
    with open(f"/proc/{pid}/status", encoding="utf-8") as status:
        for line in status:
            name, _, rest = line.partition(":")
            if name in names:
                found[names[name]] = int(rest.split()[0]) << 10
    return found


def size(text):
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(float(text[:-1]) * units[text[-1]]) if text[-1] in units else int(text)


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--report", type=pathlib.Path, metavar="FILE", help="judges what is there")
    parser.add_argument("--jsonl", type=pathlib.Path, default=pathlib.Path("soak.jsonl"))
    parser.add_argument("--json", type=pathlib.Path, help="the verdict")
    parser.add_argument("--svg", type=pathlib.Path, help="the verdict, drawn")
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("/tmp"))
    parser.add_argument("--programs", type=pathlib.Path, help="where soak.c was compiled into")
    parser.add_argument("--no-torch", dest="torch", action="store_false",
                        help="C and Python alone, on the simulated device")
    parser.add_argument("--no-thread", action="store_true", help="no C within the Python process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--driver", help="of vbar, as for vbar.Device")
    parser.add_argument("--budget", type=size, help="of the Python process")
    parser.add_argument("--c-budget", type=size)
    parser.add_argument("--model", type=size, help="bytes of each of three models")
    parser.add_argument("--c-model", type=size, help="bytes of each of two models of the C load")
    parser.add_argument("--layers", type=int, default=16, help="of each model of PyTorch's")
    parser.add_argument("--page", type=size)
    parser.add_argument("--headroom", type=size)
    parser.add_argument("--slack", type=size, default=GIB, help="free on the device beside budgets")
    parser.add_argument("--sample-seconds", type=float, default=1)
    parser.add_argument("--samples", type=int, help="how many, instead of --seconds")
    parser.add_argument("--rounds", type=int, default=0,
                        help="most that each load does between two samples; 0: as many as it can")
    parser.add_argument("--bare-every", type=int, default=10,
                        help="samples until all memory is given back and passes are timed")
    parser.add_argument("--tell-every", type=int, default=30)
    parser.add_argument("--patience", type=float, default=120, help="seconds for an answer")
    parser.add_argument("--no-times", dest="times", action="store_false",
                        help="do not judge how long passes take: others use the machine too")
    parser.add_argument("--inject", action="append", default=[], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.samples and not given.rounds:
        parser.error("--samples counts those behind so many --rounds")
    for told in given.inject:
        load, _, mistake = told.partition(":")
        if load not in ("python", "thread", "c") or mistake not in MISTAKES:
            parser.error(f"--inject {told}: no such mistake")
    if given.torch:
        sizes = {"budget": 3 * GIB, "c_budget": GIB, "model": 2 * GIB, "c_model": 768 * MIB,
                 "page": 16 * MIB, "headroom": 256 * MIB, "driver": "cuda"}
    else:
        sizes = {"budget": 24 * MIB, "c_budget": 16 * MIB, "model": 18 * MIB, "c_model": 18 * MIB,
                 "page": MIB, "headroom": 0, "driver": "sim:capacity=48M,granularity=64K"}
    for name, value in sizes.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    given.kind = "torch" if given.torch else "weights"
    # Contexts, and what PyTorch's libraries load, beside the budgets.
    given.arena = given.budget + given.c_budget + given.slack + 4 * GIB
    return given


def end_by_signal(number, frame):
    raise Ended(f"signal {signal.Signals(number).name}")


def main():
    given = parsed()
    if given.report:
        return soak_report.report(given.report, given.json, given.svg)
    signal.signal(signal.SIGTERM, end_by_signal)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="vbar-soak-", dir=given.folder))
    soak = Soak(given, folder)
    try:
        end = soak.run()
    except (Ended, Stuck, KeyboardInterrupt) as error:
        end = {"failed": f"{type(error).__name__}: {error}"}
    finally:
        soak.end_all()
        shutil.rmtree(folder)
    soak.write({"end": {**end, "at": round(time.monotonic() - soak.began, 3)}})
    return soak_report.report(given.jsonl, given.json, given.svg)


if __name__ == "__main__":
    sys.exit(main())
