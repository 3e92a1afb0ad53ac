"""Ctrl-C, and other signals, during a wait of the library."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import unittest

from support import Case, check_program, pattern

WAITS = """
    import os, signal, sys, threading, time, vbar
    from support import Sim
    def soon(*signals, after=0.15, between=0.0):
        def send():
            time.sleep(after)
            for one in signals:
                os.kill(os.getpid(), one)
                time.sleep(between)
        threading.Thread(target=send, daemon=True).start()
    # A guard is held, so closing and waiting for the memory goes on until the time-out.
    device = vbar.Device("sim", headroom=0, wait_timeout=60, threads=False)
    bar = device.create_bar(1)
    guard = bar.fault(0, 64)
    started = time.monotonic()
"""


class Interrupts(Case):
    def check(self, text, *arguments):
        program = WAITS + textwrap.indent(textwrap.dedent(text), "    ")
        return check_program(self, program, *arguments)

    def test_ctrl_c_ends_a_wait(self):
        self.check("""
            soon(signal.SIGINT)
            try:
                bar.close(wait=True)
            except KeyboardInterrupt as interrupt:
                assert time.monotonic() - started < 20
                assert interrupt.__cause__ is None
            else:
                sys.exit("not interrupted")
            # The next wait asks again.
            other = device.create_bar(1)
            held = other.fault(0, 64)
            soon(signal.SIGINT)
            try:
                other.close(wait=True)
            except KeyboardInterrupt:
                assert time.monotonic() - started < 40
            else:
                sys.exit("not interrupted")
        """)

    def test_ctrl_c_ends_a_fault_that_waits_and_pins_nothing(self):
        size = 4 << 20
        path = self.model_of({"a": ("U8", (size,), pattern(size))})
        self.check(
            """
            slow = vbar.Device(
                "sim:capacity=64M,bandwidth=100K", headroom=0, page_size="4M", wait_timeout=300)
            model = slow.open_model(sys.argv[1])
            soon(signal.SIGINT)
            try:
                # With no stream the call waits until the bytes are there: 40 s at that speed.
                model.fault("a", stream=vbar.NO_STREAM)
            except KeyboardInterrupt:
                assert time.monotonic() - started < 20
            else:
                sys.exit("not interrupted")
            assert model.bar.residency()[0].pin_count == 0
            os._exit(0)
        """,
            path,
        )

    def test_a_handler_that_raises_nothing_lets_the_wait_go_on(self):
        self.check("""
            seen = []
            signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
            device.set_wait_timeout(0.6)
            soon(signal.SIGUSR1, signal.SIGUSR1, after=0.1, between=0.1)
            try:
                bar.close(wait=True)
            except vbar.TimedOut:
                # They ran during the wait, and it lasted as long as it should.
                assert len(seen) == 2, seen
                assert time.monotonic() - started >= 0.6
            else:
                sys.exit("not timed out")
        """)

    def test_what_a_handler_raises_comes_out_as_it_is(self):
        self.check("""
            class Stop(Exception):
                pass
            def handler(number, frame):
                raise Stop(number)
            signal.signal(signal.SIGTERM, handler)
            soon(signal.SIGTERM)
            try:
                bar.close(wait=True)
            except Stop as stop:
                assert stop.args == (signal.SIGTERM,)
            else:
                sys.exit("not stopped")
        """)

    def test_a_handler_may_call_the_library_and_wait_itself(self):
        self.check("""
            other = device.create_bar(1)
            held = other.fault(0, 64)
            def handler(number, frame):
                device.set_wait_timeout(0.1)
                try:
                    other.close(wait=True)
                except vbar.TimedOut:
                    device.set_wait_timeout(60)
                guard.close()
            signal.signal(signal.SIGUSR1, handler)
            soon(signal.SIGUSR1)
            bar.close(wait=True)
            assert time.monotonic() - started < 30
        """)

    def test_a_storm_of_signals_loses_no_interrupt(self):
        self.check("""
            signal.signal(signal.SIGUSR1, lambda number, frame: None)
            for turn in range(20):
                one = device.create_bar(1)
                held = one.fault(0, 64)
                try:
                    soon(*[signal.SIGUSR1] * 200, signal.SIGINT, after=0.001)
                    one.close(wait=True)
                except KeyboardInterrupt:
                    pass
                else:
                    sys.exit("not interrupted")
            assert time.monotonic() - started < 40
        """)

    def test_a_thread_that_waits_is_not_the_one_that_is_interrupted(self):
        self.check("""
            ended, end = [], threading.Event()
            def wait():
                try:
                    bar.close(wait=True)
                    ended.append("done")
                except BaseException as error:
                    ended.append(error)
                end.set()
            thread = threading.Thread(target=wait)
            thread.start()
            soon(signal.SIGINT)
            try:
                end.wait()
            except KeyboardInterrupt:
                assert time.monotonic() - started < 20
            else:
                sys.exit("not interrupted")
            assert ended == []
            guard.close()
            end.wait()
            assert ended == ["done"], ended
        """)

    def test_a_device_opened_by_another_thread_is_interrupted_too(self):
        self.check("""
            made = []
            def make():
                mine = vbar.Device("sim:capacity=32M", headroom=0, wait_timeout=60)
                made.append(mine.create_bar(1))
                made.append(made[0].fault(0, 64))
            thread = threading.Thread(target=make)
            thread.start()
            thread.join()
            soon(signal.SIGINT)
            try:
                made[0].close(wait=True)
            except KeyboardInterrupt:
                assert time.monotonic() - started < 20
            else:
                sys.exit("not interrupted")
        """)

    def test_an_interrupt_that_nobody_catches_ends_the_program(self):
        program = textwrap.dedent(WAITS) + "print('waits', flush=True)\nbar.close(wait=True)\n"
        path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
        child = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(child.kill)
        self.assertEqual(child.stdout.readline(), "waits\n")
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=30)
        self.assertEqual(child.returncode, -signal.SIGINT, errors)
        self.assertRegex(errors, r"KeyboardInterrupt\s*$")
        self.assertNotIn("Exception ignored", errors)

    def test_an_interrupted_call_that_was_good_keeps_nothing(self):
        # As if the wait had ended at the very moment that the handler raised.
        self.check("""
            from vbar import _interrupt
            def interrupted(call):
                _interrupt.stash.append(KeyboardInterrupt())
                try:
                    call()
                except KeyboardInterrupt:
                    return
                sys.exit("not interrupted")
            weight = bar.allocate(64)
            interrupted(lambda: bar.fault(0, 64))
            interrupted(lambda: device.fault_many([(bar, 0, 64), (bar, 0, 1)]))
            interrupted(lambda: weight.fault())
            from vbar._hold import Hold
            hold = Hold(device, vbar.Ranges([(bar, 0, 64), (bar, 0, 1)]), 0)
            interrupted(hold.fault)
            interrupted(lambda: guard.view("U8").__dlpack__())
            assert bar.residency()[0].pin_count == 1, bar.residency()
            with weight.fault() as bytes:
                assert isinstance(bytes, vbar.Refill)
            count = device.statistics().bar_count
            interrupted(lambda: device.create_bar(1))
            assert device.statistics().bar_count == count
            interrupted(lambda: vbar.Device("sim", headroom=0))
            # The checks that were replaced are garbage, which interrupts nobody.
            import gc
            gc.collect()
            assert not _interrupt.stash, _interrupt.stash
        """)

    def test_a_handler_that_raises_right_after_the_call_leaks_no_pin(self):
        self.check("""
            lib = vbar.load()
            def interrupted(name, call):
                function = getattr(lib, name)
                def raises(*arguments):
                    status = function(*arguments)
                    if not done:
                        done.append(name)
                        raise KeyboardInterrupt
                    return status
                done = []
                setattr(lib, name, raises)
                try:
                    call()
                except KeyboardInterrupt:
                    return
                finally:
                    setattr(lib, name, function)
                sys.exit(f"{name}: not interrupted")
            weight = bar.allocate(64)
            interrupted("vbar_bar_fault", lambda: bar.fault(0, 64))
            interrupted("vbar_allocation_fault", weight.fault)
            interrupted("vbar_device_fault_many", lambda: device.fault_many([(bar, 0, 64)] * 3))
            assert bar.residency()[0].pin_count == 1, bar.residency()
            interrupted("vbar_token_unpin", lambda: bar.fault(0, 64).close())
            def many():
                with device.fault_many([(bar, 0, 64)] * 3) as guards:
                    guards[1]
            interrupted("vbar_tokens_unpin", many)
            assert bar.residency()[0].pin_count == 1, bar.residency()
            with weight.fault() as bytes:
                assert isinstance(bytes, vbar.Refill)
        """)


if __name__ == "__main__":
    unittest.main()
