"""Lives and ends: objects dropped in any order, threads, forks, the interpreter's end."""

import gc
import itertools
import json
import os
import random
import textwrap
import threading
import unittest
import weakref

import vbar
from support import PAGE, Case, Sim, check_program, open_device, pattern, run_program, spec

ALL = """
    import sys, threading, vbar
    from support import write_model
    device = vbar.Device("sim:capacity=64M", headroom=0, page_size="2M", budget="8M")
    bar = device.create_bar("8M")
    allocation = bar.allocate(64)
    model = device.open_model(sys.argv[1])
    guard = model.fault("a")
    refill = allocation.fault()
    raw = bar.fault(0, 64)
    many = device.fault_many([(bar, 0, 64)])
    view = guard.view()
    interface = raw.view("U8")
    interface.__cuda_array_interface__
    capsule = view.__dlpack__()
    names = ["device", "bar", "allocation", "model", "guard", "refill", "raw", "many", "view",
             "interface", "capsule"]
"""


class Traced(Case):
    """`VBAR_TRACE` in a program that has the library and knows nothing of it."""

    START = """
        import os, sys, threading, time, vbar
        device = vbar.Device("sim:capacity=64M", headroom=0, page_size="2M")
        bar = device.create_bar("8M")
        with bar.fault(0, 64, stream=0):
            pass
    """

    #: Nobody closes it any more.
    HELD = "import ctypes\nctypes.pythonapi.Py_IncRef(ctypes.py_object(device))\n"

    def trace(self, program, code=0, name="trace.json", errors=""):
        """The names of the spans in the file, `None` where there is no trace in it."""
        path = self.folder / name
        whole = textwrap.dedent(self.START) + textwrap.dedent(program)
        told = run_program(whole, VBAR_TRACE=str(path))
        self.assertEqual(told[0], code, told)
        self.assertIn(errors, told[2])
        found = list(self.folder.glob("trace*.json"))
        if not found or not found[0].stat().st_size:
            return None
        with open(found[0]) as file:
            told = json.load(file)
        os.unlink(found[0])
        return {event["name"] for event in told["traceEvents"] if event["ph"] == "X"}

    def test_it_is_written_at_every_end_but_a_sudden_one(self):
        held = self.HELD
        for program, code in (
            ("", 0),
            ("device.close()", 0),
            # As PyTorch's allocator does, which lives as long as the process.
            (held, 0),
            (held + "sys.exit(3)", 3),
            (held + "1 / 0", 1),
            (held + "stop = threading.Event()\n"
             "def work():\n"
             "    while True:\n"
             "        with bar.fault(0, 64, stream=0): pass\n"
             "threading.Thread(target=work, daemon=True).start()\n"
             "time.sleep(0.05)\n", 0),
        ):
            found = self.trace(program, code)
            self.assertLessEqual({"fault", "map", "unpin"}, found or set(), program)
        for program, code in (
            (held + "os._exit(0)", 0),
            (held + "os.execv('/bin/true', ['true'])", 0),
            (held + "os.kill(os.getpid(), 9)", -9),
        ):
            self.assertIsNone(self.trace(program, code), program)

    def test_a_child_does_not_write_over_its_parents(self):
        program = """
            child = os.fork()
            if child == 0:
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert os.path.getsize(os.environ["VBAR_TRACE"]) == 0
            bar.prioritise()
            device.refresh()
        """
        for held in ("", self.HELD):
            self.assertIn("budget_change", self.trace(held + textwrap.dedent(program)))

    def test_each_process_has_one_where_the_name_says_so(self):
        self.assertIn("fault", self.trace("", name="trace-%p.json"))

    def test_a_file_that_cannot_be_written_is_told_and_changes_nothing(self):
        told = "import logging\nlogging.basicConfig()\ndevice.statistics()\n"
        start = "import logging\nlogging.basicConfig()\n" + textwrap.dedent(self.START)
        code, _, errors = run_program(start + told, VBAR_TRACE="/nowhere/trace.json")
        self.assertEqual(code, 0, errors)
        self.assertIn("VBAR_TRACE: no trace of this run: /nowhere/trace.json", errors)
        code, _, errors = run_program(
            textwrap.dedent(self.START) + self.HELD,
            VBAR_TRACE="/dev/full",
        )
        self.assertEqual(code, 0)
        self.assertIn("vbar: VBAR_TRACE: /dev/full: No space left", errors)


class Orders(Case):
    def test_closing_waits_for_the_last_use_only(self):
        with open_device(wait_timeout=20) as device:
            sim = Sim(device)
            for stream in (0, sim.stream()):
                bar = device.create_bar(PAGE)
                with bar.fault(0, 64, stream):
                    pass
                # Right after a use no fence is behind it yet.
                with bar.fault(0, 64, stream):
                    pass
                bar.close(wait=True, stream=stream)
                bar.close(wait=True)
            device.trim()
            self.check_nothing_left_but_staging(sim)

    def check_nothing_left_but_staging(self, sim):
        left = sim.live()
        self.assertEqual((left.frame_count, left.reservation_count, left.mapping_count), (0, 0, 0))

    def make(self):
        """One of everything, by name, and what tells whether it is gone."""
        path = self.model_of({"a": ("U8", (64,), pattern(64))})
        device = open_device(budget=4 * PAGE)
        sim, bar = Sim(device), device.create_bar(2 * PAGE)
        allocation, model = bar.allocate(64), device.open_model(path)
        guard, refill = model.fault("a"), allocation.fault()
        interface = refill.view("U8")
        self.assertTrue(interface.__cuda_array_interface__)
        made = {
            "device": device,
            "bar": bar,
            "allocation": allocation,
            "model": model,
            "guard": guard,
            "refill": refill,
            "capsule": guard.view().__dlpack__(),
            "interface": interface,
        }
        return made, sim

    def check_nothing_left(self, sim):
        self.check_nothing_left_but_staging(sim)
        self.assertEqual((sim.live().locked_bytes, sim.violations()), (0, 0))

    def test_everything_is_given_back_whatever_is_dropped_first(self):
        names = list(self.make()[0])
        orders = [names, names[::-1]]
        orders += [random.Random(seed).sample(names, len(names)) for seed in range(20)]
        for order in orders:
            with self.subTest(order):
                made, sim = self.make()
                for name in order:
                    del made[name]
                gc.collect()
                self.check_nothing_left(sim)

    def test_everything_is_given_back_whatever_is_closed_first(self):
        names = ["device", "bar", "model", "guard", "refill"]
        for order in itertools.permutations(names):
            with self.subTest(order):
                made, sim = self.make()
                for name in order:
                    made[name].close()
                made.clear()
                gc.collect()
                self.check_nothing_left(sim)

    def test_cycles_are_collected(self):
        made, sim = self.make()
        made["self"] = made
        del made
        gc.collect()
        self.check_nothing_left(sim)

    def test_objects_may_be_referred_to_weakly(self):
        made, _ = self.make()
        references = [weakref.ref(made[name]) for name in ("device", "bar", "model", "guard")]
        made.clear()
        gc.collect()
        self.assertEqual([reference() for reference in references], [None] * 4)

    def test_a_device_that_did_not_open_leaves_nothing(self):
        name = spec()
        for wrong in ({"page_size": 3}, {"budget": "x"}, {"ordinal": 7}):
            with self.assertRaises(vbar.Error):
                open_device(name, **wrong)
        with open_device(name) as device:
            sim = Sim(device)
        self.check_nothing_left(sim)


class Ends(Case):
    """The interpreter's end: exit code 0, nothing on the error output."""

    def setUp(self):
        super().setUp()
        self.model = self.model_of({"a": ("U8", (64,), pattern(64))})

    def check_ends(self, text):
        program = ALL + "".join(f"\n    {line}" for line in text.splitlines())
        check_program(self, program, self.model)

    def test_with_everything_alive(self):
        self.check_ends("")

    def test_in_any_order(self):
        for seed in range(6):
            names = ["device", "bar", "allocation", "model", "guard", "refill", "raw", "many"]
            names += ["view", "interface", "capsule"]
            gone = random.Random(seed).sample(names, seed + 2)
            with self.subTest(gone):
                self.check_ends(f"del {', '.join(gone)}")

    def test_with_things_kept_where_they_die_last(self):
        for text in (
            "sys.kept = [globals()[name] for name in names]",
            "cycle = [globals()[name] for name in names]; cycle.append(cycle)",
            "import builtins; builtins.kept = capsule, guard, view, interface",
            "threading.kept = [globals()[name] for name in names]; del sys.modules['vbar']",
            "class Holder: pass\nHolder.kept = {name: globals()[name] for name in names}",
            "import atexit\natexit.register(lambda: (guard.close(), bar.close(), device.close()))",
            "import atexit\natexit.register(lambda held: held.close(), raw)",
        ):
            with self.subTest(text):
                self.check_ends(text)

    def test_calls_at_the_end_get_an_exception_and_no_more(self):
        self.check_ends(
            "class Late:\n"
            "    def __init__(self): self.call = bar.fault\n"
            "    def __del__(self, errors=(vbar.Error,)):\n"
            "        try: self.call(0, 64).close()\n"
            "        except errors: pass\n"
            "sys.late = Late()"
        )

    def test_with_threads_that_go_on(self):
        self.check_ends(
            "def work():\n"
            "    while True:\n"
            "        try:\n"
            "            with bar.fault(0, 64): pass\n"
            "        except vbar.Error: return\n"
            "for _ in range(3): threading.Thread(target=work, daemon=True).start()\n"
            "import time; time.sleep(0.05)"
        )

    def test_with_the_librarys_own_thread(self):
        check_program(
            self,
            """
            import time, vbar
            device = vbar.Device("sim", headroom=0)
            bar = device.create_bar("16M")
            guard = bar.fault(0, 64)
            time.sleep(0.1)
            """,
        )

    def test_by_an_exception_and_by_system_exit(self):
        from support import run_program

        code, _, errors = run_program(ALL + "\n    sys.exit(3)", self.model)
        self.assertEqual((code, errors), (3, ""))
        code, _, errors = run_program(ALL + "\n    1 / 0", self.model)
        self.assertEqual(code, 1)
        self.assertRegex(errors, r"ZeroDivisionError: division by zero\s*$")

    def test_in_a_child_of_a_fork(self):
        for end in ("sys.exit(0)", "os._exit(0)", "del device, bar, model, capsule"):
            with self.subTest(end):
                self.check_ends(
                    "import os, warnings\n"
                    "warnings.simplefilter('ignore')\n"
                    "child = os.fork()\n"
                    f"if child == 0:\n    {end}\n"
                    "else:\n"
                    "    assert os.waitpid(child, 0)[1] == 0\n"
                    "    raw.close(); guard.close()"
                )

    def test_while_windows_are_locked_ahead(self):
        """A thread of the library's locks memory at the moment that the process ends or forks."""
        start = """
            import os, sys, vbar, warnings
            warnings.simplefilter("ignore")
            device = vbar.Device("sim:capacity=64M", headroom=0, page_size="2M", threads=True)
            bar = device.create_bar("1G")
            bar.prepare_save(0, 64)
        """
        for end in (
            "",
            "os._exit(0)",
            "bar.close(); device.close()",
            "del bar, device",
            "child = os.fork()\n"
            "try:\n"
            "    bar.prepare_save(256 << 20, 64 << 20)\n"
            "    assert child, 'nothing works in a child'\n"
            "except vbar.ProcessEnding:\n"
            "    assert not child\n"
            "    os._exit(7)\n"
            "assert os.waitpid(child, 0)[1] >> 8 == 7\n"
            "assert device.statistics().locked_saved_bytes >= 128 << 20\n",
        ):
            with self.subTest(end):
                check_program(self, textwrap.dedent(start) + end)

    def test_in_children_of_multiprocessing(self):
        program = """
            import multiprocessing, sys, vbar
            def work(at):
                try:
                    bar.fault(0, 64)
                except vbar.ProcessEnding:
                    return at
            device = vbar.Device("sim", headroom=0)
            bar = device.create_bar(1)
            guard = bar.fault(0, 64)
            import warnings
            warnings.simplefilter("ignore")
            with multiprocessing.get_context("fork").Pool(2) as pool:
                assert pool.map(work, range(4)) == [0, 1, 2, 3]
        """
        check_program(self, program)

    def test_a_child_that_forked_first_may_open_devices(self):
        program = """
            import os, sys, vbar
            vbar.load()
            child = os.fork()
            device = vbar.Device("sim", headroom=0)
            with device.create_bar(1).fault(0, 64) as bytes:
                assert bytes
            if child:
                assert os.waitpid(child, 0)[1] == 0
        """
        check_program(self, program)


class Threads(Case):
    def run_threads(self, work, count=4):
        failures = []

        def guarded(number):
            try:
                work(number)
            except BaseException as error:  # noqa: B036
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(at,)) for at in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def test_many_threads_fault_evict_and_export(self):
        data = {f"t{at}": ("U8", (PAGE // 2,), pattern(PAGE // 2, at)) for at in range(12)}
        path = self.model_of(data)
        with open_device(budget=4 * PAGE) as device, device.open_model(path) as model:
            sim = Sim(device)

            def work(number):
                stream, order = sim.stream(), random.Random(number)
                for _ in range(60):
                    name = order.choice(list(model))
                    with model.fault(name, stream) as weight:
                        if not weight:
                            self.assertIn(
                                weight.reason,
                                (vbar.Reason.ALL_PINNED, vbar.Reason.FENCE_UNKNOWN),
                            )
                            continue
                        capsule = weight.view().__dlpack__(stream=stream)
                        found = sim.read(weight.address, weight.nbytes, stream)
                        self.assertEqual(found, data[name][2])
                    del capsule
                    model.bar.end_of_run(stream)

            self.run_threads(work)
            self.assertGreater(device.statistics().evicted_page_count, 0)
            self.assertEqual(sim.violations(), 0)
            self.assertTrue(all(page.pin_count == 0 for page in model.bar.residency()))

    def test_things_are_closed_under_their_users(self):
        for _ in range(10):
            with open_device() as device:
                bar = device.create_bar(2 * PAGE)
                started = threading.Barrier(4)

                def work(number):
                    started.wait()
                    if number == 0:
                        bar.close()
                        return
                    try:
                        while True:
                            with bar.fault(0, PAGE) as bytes:
                                bytes.view("U8").__dlpack__()
                    except (vbar.StaleHandle, vbar.Closed, vbar.GuardReleased):
                        pass

                self.run_threads(work)

    def test_guards_are_closed_by_other_threads(self):
        with open_device() as device:
            bar = device.create_bar(PAGE)
            guards = [bar.fault(0, 64) for _ in range(400)]

            def work(_):
                while True:
                    try:
                        guards.pop().close()
                    except IndexError:
                        return

            self.run_threads(work)
            self.assertEqual(bar.residency()[0].pin_count, 0)

    def test_a_waiting_thread_does_not_stop_others(self):
        with open_device(wait_timeout=20) as device:
            bar, other = device.create_bar(PAGE), device.create_bar(PAGE)
            guard = bar.fault(0, 1)
            thread = threading.Thread(target=lambda: bar.close(wait=True))
            thread.start()
            with self.assertRaises(vbar.StaleHandle):
                while True:
                    bar.info()
            for _ in range(100):
                with other.fault(0, 1) as bytes:
                    self.assertTrue(bytes)
            self.assertTrue(thread.is_alive())
            guard.close()
            thread.join(20)
            self.assertFalse(thread.is_alive())


if __name__ == "__main__":
    unittest.main()
