"""benches/comfy.py as far as it goes without a GPU: what it asks of its processes, floors, verdicts."""

import argparse
import contextlib
import importlib.util
import io
import json
import pathlib
import sys
import tempfile
import types
import unittest
import unittest.mock

from support import ROOT, open_device

sys.path.insert(0, str(ROOT / "benches"))
import comfy_absent  # noqa: E402

_SPEC = importlib.util.spec_from_file_location("bench_comfy", ROOT / "benches/comfy.py")
bench = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bench)
GIB = 1 << 30


def found(**changes):
    told = dict(
        seconds=0.5, all=[0.5, 0.6], load=1.0, first=2.0, cold=3.0, outputs=[["x"]] * 5, apart=0.0,
        held_bytes=GIB, context_bytes=GIB // 2, resident_bytes=GIB, growth_bytes=0,
        weight_bytes=7 * GIB, tensor_bytes=GIB // 4, samples=1,
    )
    return {**told, **changes}


class Bench(unittest.TestCase):
    def run_bench(self, answers=None, **options):
        """How it ended, what it printed, and what its processes were asked."""
        told = dict(
            off=False,
            tree=pathlib.Path("tree"), original=pathlib.Path("original"), caps=None, steps=8,
            size=1024, rounds=1, runs=2, cases="flux", folder=None, seconds=100, json=None, limit=5,
        )
        told.update(options)
        asked = []

        def run(_, folder, **one):
            asked.append(one)
            if one["kind"] == "make":
                return dict(device="a card", link=50e9, total=80 * GIB)
            key = one["case"], one["kind"], one["cap"]
            return dict((answers or {}).get(key) or found())

        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = bench.parent(argparse.Namespace(**told), pathlib.Path("folder"), run)
        return code, printed.getvalue(), asked

    def test_ours_and_the_original_alternate_at_each_cap(self):
        code, printed, asked = self.run_bench(rounds=2, caps="all,4")
        self.assertEqual(code, 0, printed)
        order = [(one["kind"], one["cap"]) for one in asked]
        both = [("ours", None), ("original", None)] * 2 + [("ours", 4.0), ("original", 4.0)] * 2
        self.assertEqual(order, [("make", None), ("none", None), *both])
        self.assertEqual(asked[0]["checkpoints"], ["bf16"])
        self.assertTrue(all(one["total"] == 80 * GIB for one in asked[1:]))
        # Each measurement is a line, and each cap one with the floor.
        self.assertEqual(len(printed.splitlines()), 1 + 1 + 8 + 2)
        self.assertEqual(printed.count("x floor"), 4)

    def test_only_the_checkpoints_of_the_cases_are_made(self):
        _, _, asked = self.run_bench(cases="fp8,flux,pair,lora")
        made = [(one["case"], one["checkpoints"]) for one in asked if one["kind"] == "make"]
        # Each when its turn comes.
        self.assertEqual(made, [("fp8", ["fp8"]), ("flux", ["bf16"]), ("pair", ["bf16", "second"])])
        kinds = [one["kind"] for one in asked]
        self.assertEqual(kinds[:5], ["make", "none", "ours", "original", "make"])

    def test_the_same_models_are_measured_plain_once(self):
        _, _, asked = self.run_bench(cases="flux,lora,cancel,long", caps="4")
        plain = [one["case"] for one in asked if one["kind"] == "none"]
        self.assertEqual(plain, ["flux", "lora"])

    def test_what_is_least_sure_comes_first(self):
        _, _, asked = self.run_bench(original=None)
        self.assertEqual([one["cap"] for one in asked[2:]], [4.0, 6.0, None, 3.0])

    def test_what_is_wrong_fails_it_and_the_rest_is_measured(self):
        for answer, words in (
            (found(outputs=[["y"], *[["x"]] * 4]), "the cold output is not that of the plain run"),
            (found(outputs=[["x"], ["x"], ["y"]]), "the outputs are not those of the plain run"),
            (found(held_bytes=4 * GIB), "4.50 GiB were held, 0.50 of that by the context"),
            (found(growth_bytes=65 << 20), "grew by 65 MiB"),
            ({"died": "ended with 1: no memory"}, "ended with 1: no memory"),
        ):
            code, printed, asked = self.run_bench({("flux", "ours", 4.0): answer}, caps="4,3")
            self.assertEqual((code, len(asked)), (1, 6), printed)
            self.assertIn(f"FAILED: flux, ours, 4: {words}", printed)
        code, printed, asked = self.run_bench({("flux", "none", None): {"died": "x"}})
        self.assertEqual((code, len(asked)), (1, 2), printed)

    def test_a_plain_run_that_differs_from_itself_is_told(self):
        several = found(outputs=[["x"], ["x"], ["y"]], apart=0.25)
        answers = {("flux", "none", None): several}
        code, printed, _ = self.run_bench(answers, caps="4")
        self.assertEqual(code, 1)
        self.assertIn("plain: the same run has several outputs, 0.25 apart", printed)
        # One whose cold run alone is another is what the others are compared with.
        alike = found(outputs=[["z"], ["x"], ["x"]])
        answers = {("flux", kind, cap): alike
                   for kind, cap in (("none", None), ("ours", 4.0), ("original", 4.0))}
        code, printed, _ = self.run_bench(answers, caps="4")
        self.assertEqual((code, "FAILED" in printed), (0, False), printed)

    def test_no_measurement_begins_when_the_time_is_over(self):
        code, printed, asked = self.run_bench(seconds=-1.0, cases="flux,lora")
        self.assertEqual(code, 3, printed)
        self.assertIn("no time was left for all of: flux, lora", printed)
        self.assertEqual([one["kind"] for one in asked], ["make"])

    def test_measurements_are_kept_by_the_line(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "found.jsonl"
            self.run_bench(caps="4", json=path)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
        kinds = [line["kind"] for line in lines]
        self.assertEqual(kinds, ["make", "none", "ours", "original", "ours", "original"])
        self.assertTrue(all(line["floor"] > 0 for line in lines[4:]))

    def run_child(self, program, **options):
        """What the parent makes of a process that does this in place of measuring."""
        with tempfile.TemporaryDirectory() as folder:
            stand_in = pathlib.Path(folder) / "child.py"
            stand_in.write_text(program)
            told = dict(tree=pathlib.Path(folder), original=None, steps=8, size=64, runs=1, limit=60)
            told = argparse.Namespace(**{**told, **options})
            with unittest.mock.patch.object(bench, "__file__", str(stand_in)):
                return bench.run_child(told, folder, kind="ours", cap=4.0, case="flux", total=GIB)

    def test_what_a_process_found_is_told_from_what_else_it_prints(self):
        found = self.run_child("print('x'); print('found: {\"seconds\": 1}'); print('bye')")
        self.assertEqual(found, {"seconds": 1})
        for program, words in (
            ("print('only this')", "ended without a result: only this"),
            ("print('so far'); raise SystemExit(3)", "ended with 3: so far"),
        ):
            self.assertEqual(self.run_child(program), {"died": words})

    def test_a_process_that_hangs_is_ended(self):
        found = self.run_child("import time; time.sleep(60)", limit=0.5)
        self.assertEqual(found, {"died": "took longer than 0.5 s"})

    def test_floors(self):
        made = dict(link=50 * GIB)
        floor = bench.floor_of(found(), None, made, 8)
        self.assertEqual(floor, (0.5, 0))
        # 4 GiB less a quarter for headroom, a half for the context, a quarter for tensors: 3 of 7.
        floor, streamed = bench.floor_of(found(), 4, made, 8)
        self.assertEqual((floor, streamed), (4 * 8 / 50, 4 * GIB))
        self.assertEqual(bench.floor_of(found(), 9, made, 8), (0.5, 0))
        # Two in turn: each whole once, then half a GiB a step less of it than a part would need.
        two = found(weight_bytes=7 * GIB, samples=2)
        floor, _ = bench.floor_of(two, 4, made, 8)
        self.assertEqual(floor, max(0.5, min(4 * 8, 2 * (3.5 + 0.5 * 7)) / 50))

    def test_only_what_vbar_has_counted_is_told(self):
        def counts(is_dynamic, get_devctx):
            control = types.SimpleNamespace(get_devctx=get_devctx)
            client = types.SimpleNamespace(is_dynamic=is_dynamic, control=control)
            return bench.Client.counts(client)

        def none_open(index):
            raise RuntimeError(f"device {index} was not opened")

        # The plain client opens none; the original's context is a number, or has nothing of ours.
        self.assertEqual(counts(False, none_open), {})
        for context in (4711, object(), types.SimpleNamespace(device=3)):
            self.assertEqual(counts(True, lambda _: context), {})
        with open_device() as device:
            told = device.statistics()
            found = counts(True, {0: types.SimpleNamespace(device=device)}.get)
        self.assertEqual(found["budget_bytes"], told.budget_bytes)
        self.assertEqual({type(value) for value in found.values()} - {int}, set())
        # All of them, and neither the tables nor where the budget is from.
        left_out = {"budget_source", "refusal_counts", "waits"}
        self.assertEqual(set(vars(told)) - set(found), left_out)
        self.assertEqual(json.loads(json.dumps(found)), found)

    def test_what_is_absent_is_made_up_and_may_not_be_used(self):
        finder = comfy_absent.Absent()
        real = comfy_absent.ABSENT
        comfy_absent.ABSENT = ("no_such_package",)
        sys.meta_path.append(finder)
        try:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                import no_such_package.part as part
                from no_such_package.other import thing

                class Derived(part.Base):
                    where: thing.Type = None

                with self.assertRaisesRegex(RuntimeError, "is used, and is not installed"):
                    part.function(1)
            self.assertIn("no_such_package is not installed: it is made up", said.getvalue())
            with self.assertRaises(ImportError):
                import another_such_package  # noqa: F401
        finally:
            sys.meta_path.remove(finder)
            comfy_absent.ABSENT = real


if __name__ == "__main__":
    unittest.main()
