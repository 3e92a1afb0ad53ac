"""A handler of a signal that raises at any instruction at all: nothing is left open or pinned.

Python runs handlers between two of its instructions. Here every one of them has its turn: a call
is made again and again, and the n-th time its n-th instruction raises.
"""

import dis
import gc
import sys
import unittest
from unittest import mock

import vbar
from support import PAGE, Case, Sim, check_program, open_device, pattern, spec
from vbar import _dlpack
from vbar._call import call_often
from vbar._hold import Hold


class Raised(BaseException):
    """What the handler raises; no ``except Exception`` takes it for its own."""


#: Between an exception and its ``except``, and behind that, no handler of a signal runs, and an
#: interpreter that is made to raise there keeps the exception for ever.
HANDLERS_OWN = {
    dis.opmap.get(name) for name in ("PUSH_EXC_INFO", "COPY", "POP_EXCEPT", "RERAISE")
}


def raises_at(number, call):
    """Runs a call and raises before its ``number``-th instruction; whether there was one."""
    left = number

    def trace(frame, event, _argument):
        nonlocal left
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] not in HANDLERS_OWN:
            left -= 1
            if left == 0:
                raise Raised
        return trace

    sys.settrace(trace)
    try:
        call()
    except Raised:
        return True
    finally:
        sys.settrace(None)
    return False


class Handlers(Case):
    def check_everywhere(self, call, check):
        swallowed = []
        hook, sys.unraisablehook = sys.unraisablehook, swallowed.append
        # Once whole: what is made once in a process is there then.
        call()
        number = 1
        try:
            while raises_at(number, call):
                check(number)
                number += 1
        finally:
            sys.unraisablehook = hook
        check(0)
        # Each of them has come to somebody: no end is written in Python.
        self.assertEqual(swallowed, [])
        self.assertGreater(number, 20)

    def test_no_vbar_is_left(self):
        with open_device() as device:

            def made():
                device.create_bar(PAGE)

            def closed():
                device.create_bar(PAGE).close()

            def awaited():
                device.create_bar(PAGE).close(wait=True)

            def used():
                with device.create_bar(PAGE) as bar:
                    bar.fault(0, 64)

            def check(number):
                told = device.statistics()
                left = told.bar_count, told.closing_bar_count, told.resident_page_count
                self.assertEqual(left, (0, 0, 0), number)

            for call in (made, closed, awaited, used):
                with self.subTest(call.__name__):
                    self.check_everywhere(call, check)

    def test_no_model_is_left(self):
        path = self.model_of({"a": ("U8", (64,), pattern(64)), "b": ("U8", (64,), pattern(64))})
        with open_device() as device, open(path, "rb") as file:

            def opened():
                device.open_model(path)

            def by_descriptor():
                device.open_model(file, "name")

            def closed():
                with device.open_model(path) as model:
                    len(model)

            def check(number):
                told = device.statistics()
                self.assertEqual((told.bar_count, told.closing_bar_count), (0, 0), number)

            for call in (opened, by_descriptor, closed):
                with self.subTest(call.__name__):
                    self.check_everywhere(call, check)

    def test_no_device_is_left(self):
        name = spec()

        def opened():
            open_device(name)

        def closed():
            open_device(name).close()

        def check(number):
            # One that is open has its page size.
            with self.subTest(number):
                open_device(name, page_size=2 * PAGE).close()

        for call in (opened, closed):
            with self.subTest(call.__name__):
                self.check_everywhere(call, check)

    def test_no_pin_is_left(self):
        path = self.model_of({"a": ("U8", (64,), pattern(64))})
        with open_device() as device, device.open_model(path) as model:
            bar, stream = device.create_bar(2 * PAGE), Sim(device).stream()
            weight, twice = bar.allocate(64), vbar.Ranges([(bar, 0, 64), (bar, PAGE, 1)])

            def faulted():
                bar.fault(0, 64)

            def of_a_model():
                with model.fault("a", stream) as bytes:
                    bytes.also_used_on(0)

            def closed():
                bar.fault(0, 64).close()

            def refilled():
                with weight.fault() as bytes:
                    if isinstance(bytes, vbar.Refill):
                        bytes.commit()
                weight.invalidate()

            def many():
                device.fault_many(twice, stream)

            def many_closed():
                with device.fault_many(twice, stream):
                    pass

            def many_taken():
                with device.fault_many(twice) as guards:
                    guards[1].close()
                    guards[0].signature

            idle = []

            def held():
                # As around a streamed forward: the same one again, if it is not lost.
                hold = idle.pop() if idle else Hold(device, twice, 0, idle)
                if hold.fault() is None:
                    with hold:
                        pass

            def held_and_dropped():
                Hold(device, twice, 0).fault()

            def held_and_lent():
                hold = idle.pop() if idle else Hold(device, twice, 0, idle)
                if hold.fault() is None:
                    hold.lease()

            def held_and_failed():
                hold = Hold(device, twice, 0)
                hold.fault()
                try:
                    with hold:
                        raise ValueError
                except ValueError:
                    pass

            def many_kept():
                return device.fault_many(twice)[1]

            def interface():
                bar.fault(0, 64, stream).view("U8").__cuda_array_interface__

            def check(number):
                pages = bar.residency() + model.bar.residency()
                self.assertEqual([page.pin_count for page in pages], [0] * len(pages), number)

            calls = [faulted, of_a_model, closed, refilled, many, many_closed, many_taken]
            calls += [held, held_and_dropped, held_and_lent, held_and_failed]
            for call in [*calls, many_kept, interface]:
                with self.subTest(call.__name__):
                    self.check_everywhere(call, check)

    def test_no_export_is_left(self):
        with open_device() as device:
            bar = device.create_bar(PAGE)

            def exported():
                with bar.fault(0, 64) as bytes:
                    bytes.view("U8").__dlpack__(max_version=(1, 0))

            def check(number):
                self.assertEqual(bar.residency()[0].pin_count, 0, number)

            self.check_everywhere(exported, check)

    def test_no_export_is_left_by_a_handler_that_raises_in_the_wake_of_another(self):
        """One raises at the call that exports, or it fails, and one at any instruction behind."""

        class First(BaseException):
            pass

        def raising(when):
            def call(function, *arguments):
                exports = function is _dlpack._known_capsules().export
                if not exports or when == "after":
                    call_often(function, *arguments)
                if exports:
                    raise First

            return mock.patch.object(_dlpack, "call_often", call)

        with open_device() as device:
            bar = device.create_bar(PAGE)
            guard = bar.fault(0, 64)
            view, six_bits = guard.view("U8"), guard.view("F6_E2M3", 4)

            def exported():
                try:
                    view.__dlpack__(max_version=(1, 0))
                except First:
                    pass

            def refused():
                try:
                    six_bits.__dlpack__()
                except vbar.Unsupported:
                    pass

            def check(number):
                # Its own.
                self.assertEqual(bar.residency()[0].pin_count, 1, number)

            view.__dlpack__()
            for when in ("before", "after"):
                with self.subTest(when), raising(when):
                    self.check_everywhere(exported, check)
            with self.subTest("refused"):
                self.check_everywhere(refused, check)
            guard.close()

    def test_what_is_dropped_is_closed_without_an_instruction_of_python(self):
        with open_device() as device:
            bar = device.create_bar(PAGE)
            made = [device.create_bar(PAGE), bar.fault(0, 64), device.fault_many([(bar, 0, 64)])]
            cycle = [device.create_bar(PAGE)]
            cycle.append(cycle)
            seen = []

            def trace(frame, event, _argument):
                seen.append((frame.f_code.co_name, event))

            sys.settrace(trace)
            made.clear()
            del cycle
            gc.collect()
            sys.settrace(None)
            self.assertEqual(seen, [])
            self.assertEqual(bar.residency()[0].pin_count, 0)
            self.assertEqual(device.statistics().bar_count, 1)


class Subinterpreters(Case):
    def test_the_interrupt_stays_the_main_interpreters(self):
        check_program(
            self,
            """
            import os, signal, sys, threading, time, vbar
            interpreters = None
            for name in ("_interpreters", "_xxsubinterpreters"):
                try:
                    interpreters = __import__(name)
                    break
                except ImportError:
                    pass
            if interpreters is None:
                sys.exit(0)
            device = vbar.Device("sim", headroom=0, wait_timeout=60, threads=False)
            bar = device.create_bar(1)
            guard = bar.fault(0, 64)
            try:
                # Of the kind that shares the interpreter lock, where ctypes can be imported.
                other = interpreters.create("legacy")
            except TypeError:
                other = interpreters.create(isolated=False)
            failed = interpreters.run_string(other, '''if True:
                import sys
                sys.path[:] = %r
                import vbar
                from vbar import _interrupt
                assert not _interrupt.unarmed
                with vbar.Device("sim:capacity=32M", headroom=0, threads=False) as mine:
                    with mine.create_bar(1).fault(0, 64) as bytes:
                        assert bytes
                assert _interrupt._check is None
            ''' % (sys.path,))
            assert failed is None, failed
            for left in (2, 1):
                if left == 1:
                    # Nor does its end take the check away.
                    interpreters.destroy(other)
                started = time.monotonic()
                def send():
                    time.sleep(0.15)
                    os.kill(os.getpid(), signal.SIGINT)
                threading.Thread(target=send, daemon=True).start()
                waiting = device.create_bar(1)
                held = waiting.fault(0, 64)
                try:
                    waiting.close(wait=True)
                except KeyboardInterrupt:
                    assert time.monotonic() - started < 20
                else:
                    sys.exit("not interrupted")
            """,
        )


if __name__ == "__main__":
    unittest.main()
