"""The soak of the benchmarks, in seconds and on the simulated device: it runs, and it can fail."""

import copy
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from support import ROOT, Case

sys.path.insert(0, str(ROOT / "benches"))

import soak  # noqa: E402
import soak_report  # noqa: E402

PROGRAM = [sys.executable, str(ROOT / "benches/soak.py")]
#: Samples are counted and not timed, so that a slow machine has as many.
SHORT = ["--no-torch", "--no-times", "--samples", "16", "--rounds", "1", "--bare-every", "1"]


class Runs(Case):
    """Whole runs. They are started together: each is a handful of processes that wait a lot."""

    WANTED = {
        "well": [],
        "leaks": ["python:bar", "c:descriptor"],
        "bytes": ["python:byte", "thread:byte", "c:list"],
    }

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.programs = pathlib.Path(folder.name)
        soak.compile_into(cls.programs)

    def setUp(self):
        super().setUp()
        self.path = self.folder / "soak.jsonl"

    def start(self, name, mistakes=(), more=()):
        folder = self.folder / name
        folder.mkdir()
        command = [*PROGRAM, *SHORT, "--folder", str(folder), "--jsonl", str(folder / "soak.jsonl")]
        command += ["--programs", str(self.programs)]
        command += ["--json", str(folder / "verdict"), "--svg", str(folder / "soak.svg"), *more]
        for mistake in mistakes:
            command += ["--inject", mistake]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.kill)
        return process, folder

    def ended(self, process, folder):
        printed, _ = process.communicate(timeout=250)
        self.assertTrue((folder / "verdict").exists(), printed)
        self.assertTrue((folder / "soak.svg").read_text().endswith("</svg>\n"))
        told = json.loads((folder / "verdict").read_text())
        self.assertEqual(process.returncode, told["code"], printed)
        # What it made is gone: three files are left.
        self.assertEqual(len(list(folder.iterdir())), 3)
        return told, printed

    def test_a_run_is_well_and_each_mistake_is_found(self):
        started = {name: self.start(name, wanted) for name, wanted in self.WANTED.items()}
        found = {name: self.ended(*each) for name, each in started.items()}

        told, printed = found["well"]
        self.assertEqual((told["code"], told["wrong"], told["grown"]), (0, [], []), printed)
        self.assertEqual(set(told["loads"]), {"python", "thread", "c"})
        for load in told["loads"].values():
            self.assertGreater(load["verified"], 16 << 20)
            self.assertGreater(load["evicted"], 0)
        rows = {row["what"] for row in told["rows"]}
        for what in ("descriptors", "rss", "bars", "reservations", "frames alive, not counted"):
            self.assertIn(f"python: {what}", rows)
        self.assertIn("all is well", printed)
        # The same file, judged later; and one that is cut off in the middle of a line.
        whole = started["well"][1] / "soak.jsonl"
        self.assertEqual(soak_report.verdict(whole)["code"], 0)
        self.path.write_text(whole.read_text()[:-300])
        cut = soak_report.verdict(self.path)
        self.assertEqual((cut["code"], cut["complete"]), (3, False))

        told, printed = found["leaks"]
        self.assertEqual((told["code"], told["wrong"]), (1, []), printed)
        for what in ("python: bars", "python: reservations", "python: reserved", "c: descriptors"):
            self.assertIn(what, told["grown"])
        self.assertNotIn("c: bars", told["grown"])
        self.assertNotIn("python: descriptors", told["grown"])

        told, printed = found["bytes"]
        self.assertEqual(told["code"], 1, printed)
        loads = [text.split(":")[0] for text in told["wrong"]]
        self.assertEqual(sorted(loads), ["python", "thread"], printed)
        self.assertTrue(all("times wrong bytes" in text for text in told["wrong"]), printed)
        self.assertEqual({what for what in told["grown"] if what.startswith("python")}, set())
        self.assertIn("c: anonymous", told["grown"])

    def test_its_processes_end_with_it(self):
        process, folder = self.start("killed", more=["--samples", "100000"])
        path, until = folder / "soak.jsonl", time.monotonic() + 120
        while not (path.exists() and '"sample"' in path.read_text()):
            self.assertIsNone(process.poll())
            self.assertLess(time.monotonic(), until)
            time.sleep(0.05)
        tasks = f"/proc/{process.pid}/task/{process.pid}/children"
        children = [int(pid) for pid in pathlib.Path(tasks).read_text().split()]
        self.assertEqual(len(children), 2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        while any(map(is_running, children)):
            self.assertLess(time.monotonic(), until)
            time.sleep(0.05)
        # What was written until then can be judged.
        self.assertIn(soak_report.verdict(path)["code"], (0, 3))


def is_running(pid):
    try:
        return "State:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


class Report(Case):
    """The verdict, of samples that are made up."""

    def verdict(self, change=lambda number, sample: None, count=40, end=True):
        path = self.folder / "soak.jsonl"
        load = {"rounds": 1, "verified": 0, "wrong": 0, "used": 100 << 20, "bars": 3}
        neighbour = {"free": 40 << 30, "total": 140 << 30, "taken": 98 << 30}
        process = {"descriptors": 20, "rss": 900 << 20}
        lines = [{"soak": {"seconds": count, "budget": 1 << 30}}]
        for number in range(count):
            sample = {
                "at": number + 1.0,
                "bare": number % 2 == 1,
                "loads": {"python": {**load, "verified": number}, "neighbour": dict(neighbour)},
                "processes": {"python": dict(process)},
                "seconds": {"python": 0.1 + number % 3 * 0.002},
            }
            change(number, sample)
            lines.append({"sample": copy.deepcopy(sample)})
        lines += [{"end": {"codes": {"python": 0}}}] if end else []
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return soak_report.verdict(path)

    def check_grows(self, what, change):
        told = self.verdict(change)
        self.assertEqual((told["code"], told["grown"]), (1, [what]), told)

    def test_what_is_flat_is_well(self):
        told = self.verdict()
        self.assertEqual((told["code"], told["wrong"], told["grown"]), (0, [], []))
        self.assertIn("all is well", soak_report.table(told))

    def test_what_grows_is_named(self):
        def of_process(name, step):
            def change(number, sample):
                sample["processes"]["python"][name] += step * number
            return change

        def of_load(load, name, step):
            def change(number, sample):
                sample["loads"][load][name] += step * number
            return change

        self.check_grows("python: descriptors", of_process("descriptors", 1))
        self.check_grows("python: rss", of_process("rss", 4 << 20))
        self.check_grows("python: bars", of_load("python", "bars", 1))
        # A handle that the driver has and nobody counts.
        self.check_grows("device: in use, not counted", of_load("neighbour", "free", -(2 << 20)))

        def slower(number, sample):
            sample["seconds"]["python"] *= 1 + number / 80
        self.check_grows("python: seconds of a pass", slower)

    def test_noise_and_what_was_there_from_the_first_quarter_on_are_well(self):
        def change(number, sample):
            if number % 7 == 3:
                sample["processes"]["python"]["descriptors"] += 400
            if number > 8:
                sample["processes"]["python"]["rss"] += 500 << 20
        told = self.verdict(change)
        self.assertEqual((told["code"], told["grown"]), (0, []), told)

    def test_what_is_wrong_once_is_wrong(self):
        def bytes_wrong(number, sample):
            sample["loads"]["python"].update(wrong=1, first_wrong="there")
        self.assertIn("there", self.verdict(bytes_wrong)["wrong"][0])

        def no_progress(number, sample):
            sample["loads"]["python"]["verified"] = min(number, 20)
        self.assertIn("nothing in quarter 3", self.verdict(no_progress)["wrong"][0])

        def frames_apart(number, sample):
            sample["loads"]["python"]["live_bytes"] = (100 << 20) + (number == 30) * 4096
        self.assertIn("4096 bytes at 31.0 s", self.verdict(frames_apart)["wrong"][0])

        def too_much(number, sample):
            sample["loads"]["python"]["used"] += (number == 7) << 31
        self.assertEqual(self.verdict(too_much)["code"], 1)

        # A budget that was raised, and lowered again while all of it was in use.
        def lingering(number, sample):
            sample["loads"]["python"]["used"] = (10 << 30) // 8 + (number == limit)
        for limit, wrong in ((-1, 0), (7, 1)):
            self.assertEqual(len(self.verdict(lingering)["wrong"]), wrong)

    def test_too_little_is_neither(self):
        self.assertEqual(self.verdict(end=False)["code"], 3)
        few = self.verdict(count=10)
        self.assertEqual(few["code"], 3)
        self.assertIn("python: rss", few["too_few_samples"])
        (self.folder / "empty").write_text("")
        self.assertEqual(soak_report.verdict(self.folder / "empty")["code"], 3)


if __name__ == "__main__":
    unittest.main()
