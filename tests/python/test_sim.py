"""``vbar.sim``: what a test of a program does with a simulated device, and no GPU."""

import gc
import unittest

import vbar
import vbar.sim
from support import MIB, PAGE, Case, open_device, pattern


class Simulated(Case):
    def setUp(self):
        super().setUp()
        self.device = open_device()
        self.addCleanup(self.device.close)
        self.sim = vbar.sim.Sim(self.device)
        self.addCleanup(self.sim.close)

    def tearDown(self):
        self.assertEqual(self.sim.violations(), [])

    def test_streams_go_wherever_a_stream_is_taken(self):
        data = pattern(PAGE)
        path = self.model_of({"a": ("U8", (PAGE,), data)})
        model = self.device.open_model(path)
        before = self.sim.live().stream_count
        stream = self.sim.stream()
        self.assertEqual(stream.__cuda_stream__(), (0, stream.handle))
        self.assertEqual(self.sim.live().stream_count, before + 1)
        for told in (stream, stream.handle):
            with model.fault("a", stream=told) as weight:
                self.assertEqual(weight.stream, stream.handle)
                self.assertEqual(self.sim.read(weight.address, PAGE, told), data)
                self.assertEqual(self.sim.peek(weight.address, PAGE), data)
        self.device.retire_stream(stream)
        stream.close()
        stream.close()
        self.assertEqual(self.sim.live().stream_count, before)
        with self.assertRaisesRegex(vbar.DriverError, "INVALID_HANDLE"):
            stream.synchronize()

    def test_a_stream_that_is_dropped_is_destroyed(self):
        before = self.sim.live().stream_count
        self.sim.stream()
        with self.sim.stream() as stream:
            self.assertEqual(self.sim.live().stream_count, before + 1)
        self.assertEqual(self.sim.live().stream_count, before)
        cycle = [self.sim.stream(), stream]
        cycle.append(cycle)
        del cycle
        gc.collect()
        self.assertEqual(self.sim.live().stream_count, before)

    def test_kernels_write_read_and_sleep_in_the_order_of_their_stream(self):
        bar, stream = self.device.create_bar(PAGE), self.sim.stream()
        with bar.fault(0, PAGE, stream=stream) as bytes:
            word = bytes.address + PAGE - 8
            self.sim.write(word, b"\0" * 8, stream)
            with stream.held():
                self.sim.launch_sleep(1000, stream)
                self.sim.launch_pattern(bytes.address, 4096, 5, stream, delay_us=10)
                self.sim.launch_checksum(bytes.address, 4096, word, stream, delay_us=10)
                # Nothing has run.
                self.assertEqual(self.sim.peek(word, 8), b"\0" * 8)
            stream.synchronize()
            written = self.sim.pattern(4096, 5)
            self.assertEqual(self.sim.read(bytes.address, 4096, stream), written)
            told = int.from_bytes(self.sim.read(word, 8, stream), "little")
            self.assertEqual(told, self.sim.checksum(written))

    def test_other_programs_take_memory_and_give_it_back(self):
        self.device.headroom = 8 * MIB
        bar = self.device.create_bar(16 * PAGE)
        with bar.fault(0, 16 * PAGE):
            pass
        bar.end_of_run()
        self.assertEqual(self.device.statistics().used_bytes, 32 * MIB)
        self.sim.set_outside_bytes(32 * MIB)
        self.device.refresh()
        self.assertLessEqual(self.device.statistics().used_bytes, 24 * MIB)
        self.sim.set_outside_bytes("0")
        self.device.refresh()
        self.assertGreater(self.device.statistics().budget_bytes, 24 * MIB)

    def test_driver_calls_fail_when_they_are_told_to(self):
        bar = self.device.create_bar(8 * PAGE)
        self.sim.fail("cuMemCreate", skip=1, count=None)
        with bar.fault(0, PAGE) as bytes:
            self.assertTrue(bytes)
        refused = bar.fault(PAGE, PAGE)
        self.assertFalse(refused)
        self.assertEqual(refused.reason, vbar.Reason.DRIVER_MEMORY)
        self.assertGreater(self.sim.calls("mem_create"), 1)
        self.sim.heal()
        self.device.refresh()
        with bar.fault(PAGE, PAGE) as bytes:
            self.assertTrue(bytes)
        self.sim.fail_rate(0.0)
        self.sim.lose()
        with self.assertRaises(vbar.DeviceLost):
            bar.fault(2 * PAGE, PAGE)

    def test_wrong_arguments_are_refused(self):
        for call in (
            lambda: self.sim.fail("no such call"),
            lambda: self.sim.fail("mem_map", skip=-1),
            lambda: self.sim.fail_rate(1.5),
            lambda: self.sim.fail_rate(float("nan")),
            lambda: self.sim.launch_sleep(-1),
            lambda: self.sim.calls("no such call"),
            lambda: self.sim.pattern(-1, 0),
        ):
            with self.assertRaises(vbar.InvalidArgument):
                call()
        for call in (lambda: self.sim.peek(0, 8), lambda: self.sim.read(0, 8, stream=0xDEAD)):
            with self.assertRaisesRegex(vbar.DriverError, "INVALID_"):
                call()

    def test_the_simulated_device_outlives_the_device(self):
        stream = self.sim.stream()
        with self.device.create_bar(PAGE) as bar, bar.fault(0, 1, stream=stream):
            pass
        self.device.close()
        del bar
        with self.assertRaises(vbar.StaleHandle):
            self.sim.stream()
        live = self.sim.live()
        self.assertEqual((live.frame_count, live.mapping_count, live.reservation_count), (0, 0, 0))
        del stream


class Breaches(Case):
    def test_a_race_is_told_with_the_pages_history(self):
        with open_device("sim:capacity=64M,on_violation=record") as device:
            sim, bar = vbar.sim.Sim(device), device.create_bar(PAGE)
            first, second = sim.stream(), sim.stream()
            with bar.fault(0, PAGE, stream=first) as bytes:
                with first.held():
                    sim.launch_pattern(bytes.address, 64, 1, first)
                    # Nothing orders the second stream behind the first.
                    sim.launch_pattern(bytes.address, 64, 2, second)
            said = sim.violations()
            self.assertEqual(len(said), 1, said)
            self.assertIn("by stream", said[0])


if __name__ == "__main__":
    unittest.main()
