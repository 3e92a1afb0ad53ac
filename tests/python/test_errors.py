"""An exception for each status: its class, its text, and that nothing is lost on the way."""

import contextlib
import gc
import os
import threading
import unittest

import vbar
from support import PAGE, Case, Sim, check_program, open_device, spec, write_model


class Statuses(Case):
    def check_raises(self, kind, call, text="", also=()):
        with self.assertRaisesRegex(kind, text) as caught:
            call()
        error = caught.exception
        self.assertIsInstance(error, vbar.Error)
        self.assertEqual(error.status, kind.status)
        for base in also:
            self.assertIsInstance(error, base)
        return error

    def test_arguments_and_handles(self):
        with open_device() as device:
            bar = device.create_bar(PAGE)
            self.check_raises(
                vbar.InvalidArgument, lambda: bar.fault(PAGE, 1), f"{PAGE}", also=[ValueError]
            )
            guard = bar.fault(0, 1)
            bar.close()
            self.check_raises(vbar.StaleHandle, lambda: bar.fault(0, 1), "no VBAR")
            # A token outlives its VBAR's id.
            guard.close()
            self.assertEqual(guard._unpin(12345, 0), vbar.StaleToken.status)

    def test_devices(self):
        self.check_raises(vbar.DeviceNotRegistered, lambda: vbar.Device("sim", 5), "5")
        name = spec()
        with open_device(name):
            other = {"page_size": 2 * PAGE}
            self.check_raises(vbar.AlreadyOpen, lambda: open_device(name, **other), "page")
        self.check_raises(vbar.InvalidArgument, lambda: vbar.Device("cuba"), "cuba")
        # Where there is a driver it has no such device.
        with self.assertRaises((vbar.DriverMissing, vbar.DeviceNotRegistered)):
            vbar.Device("cuda:63")

    def test_the_driver(self):
        with open_device() as device:
            sim, bar = Sim(device), device.create_bar(2 * PAGE)
            stream = sim.stream()
            with bar.fault(0, 1, stream):
                pass
            sim.fail("cuEventRecord", code=1)
            said = self.check_raises(vbar.DriverError, lambda: bar.end_of_run(stream))
            self.assertRegex(str(said), "cuEventRecord.*INVALID_VALUE")
            self.check_raises(vbar.Unsupported, lambda: self.used_on_none(bar))
            sim.lose()
            self.check_raises(vbar.DeviceLost, lambda: bar.fault(PAGE, PAGE))
        # More addresses than a process has.
        huge = "sim:capacity=16T,devices=8"
        self.check_raises(
            vbar.HostMemory, lambda: vbar.Device(huge), "addresses", also=[MemoryError]
        )

    def used_on_none(self, bar):
        with bar.fault(0, 1) as bytes:
            bytes.also_used_on(vbar.NO_STREAM)

    def test_room(self):
        with open_device() as device:
            bar = device.create_bar(PAGE)
            self.check_raises(vbar.NoAddresses, lambda: bar.allocate(2 * PAGE), also=[MemoryError])
            guards = []

            def pin_for_ever():
                while True:
                    guards.append(bar.fault(0, 1))

            self.check_raises(vbar.TooManyPins, pin_for_ever, also=[OverflowError])
            self.assertEqual(len(guards), 65535)
            guards.clear()
            self.assertEqual(bar.residency()[0].pin_count, 0)

    def test_files(self):
        with open_device() as device:
            missing = self.folder / "missing.safetensors"
            error = self.check_raises(
                vbar.FileError, lambda: device.open_model(missing), "missing", also=[OSError]
            )
            self.assertEqual(error.errno, 2)
            garbage = self.folder / "garbage.safetensors"
            garbage.write_bytes(b"\xff" * 100)
            self.check_raises(
                vbar.FormatError, lambda: device.open_model(garbage), "garbage", also=[ValueError]
            )
            path = self.model_of({"a": ("U8", (PAGE,), bytes(PAGE))})
            empty = write_model(self.folder / "empty.safetensors", {})
            self.check_raises(
                vbar.InvalidArgument, lambda: device.open_model(empty), "the model has no tensors"
            )
            with device.open_model(path) as model:
                self.check_raises(
                    vbar.NotFound, lambda: model.fault("b"), "no tensor 'b'", also=[KeyError]
                )
                self.check_raises(vbar.NotFound, lambda: model.metadata("b"))
                os.utime(path, ns=(1, 1))
                self.check_raises(
                    vbar.FileChanged, lambda: model.fault("a"), "model", also=[OSError]
                )

    def test_waits(self):
        with open_device(wait_timeout=0.05) as device:
            bar = device.create_bar(PAGE)
            guard = bar.fault(0, 1)
            call = lambda: bar.close(wait=True)  # noqa: E731
            self.check_raises(vbar.TimedOut, call, "waited", also=[TimeoutError])
            # It is closed all the same.
            bar.close()
            with self.assertRaises(vbar.StaleHandle):
                bar.info()
            guard.close()
        with open_device() as device:
            bar = device.create_bar(PAGE)
            done = threading.Event()

            def cancel():
                while not done.wait(0.02):
                    device.cancel_waits()

            thread = threading.Thread(target=cancel)
            thread.start()
            with bar.fault(0, 1):
                self.check_raises(vbar.Cancelled, lambda: bar.close(wait=True), "cancelled")
            done.set()
            thread.join()

    def test_a_forked_child_gets_process_ending(self):
        program = """
            import os, sys, vbar, warnings
            # Python warns of forks beside threads; what the library does then is the test.
            warnings.simplefilter("ignore")
            device = vbar.Device("sim", headroom=0)
            bar = device.create_bar(1)
            guard = bar.fault(0, 1)
            view = guard.view("U8")
            capsule = view.__dlpack__()
            child = os.fork()
            if child == 0:
                calls = [device.refresh, device.statistics, lambda: bar.fault(0, 1), guard.close,
                         view.__dlpack__, lambda: bar.close(wait=True), device.close]
                wrong = []
                for call in calls:
                    try:
                        call()
                        wrong.append(call)
                    except (vbar.ProcessEnding, vbar.GuardReleased):
                        pass
                # Everything is dropped and finalized in the child, too.
                del guard, view, capsule, bar, device
                sys.exit(len(wrong))
            _, status = os.waitpid(child, 0)
            assert status == 0, status
            assert bar.residency()[0].pin_count == 2
            del capsule
            guard.close()
            assert bar.residency()[0].pin_count == 0
        """
        check_program(self, program)

    def test_an_exception_keeps_nothing_alive(self):
        with open_device() as device:
            bar = device.create_bar(PAGE)

            def fail():
                guard = bar.fault(0, 1)
                self.assertTrue(guard)
                bar.fault(PAGE, 1)

            gc.disable()
            self.addCleanup(gc.enable)
            with contextlib.suppress(vbar.InvalidArgument):
                fail()
            self.assertEqual(bar.residency()[0].pin_count, 0)

    def test_the_text_is_of_the_thread_that_failed(self):
        with open_device() as device:
            bar, wrong = device.create_bar(PAGE), []

            def fail(offset):
                for _ in range(300):
                    try:
                        bar.fault(offset, 1)
                    except vbar.InvalidArgument as error:
                        if str(offset) not in str(error):
                            wrong.append((offset, str(error)))

            threads = [threading.Thread(target=fail, args=(PAGE + at,)) for at in range(1000, 1006)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
