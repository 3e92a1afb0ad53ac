"""Devices, VBARs, allocations and models as a program uses them, on the simulated device."""

import array
import copy
import ctypes
import dataclasses
import logging
import mmap
import os
import pathlib
import threading
import time
import types
import unittest
import weakref

import vbar
from support import MIB, PAGE, ROOT, Case, Sim, check_program, open_device, pattern, spec
from vbar._hold import Hold


class Devices(Case):
    def test_a_device_tells_what_it_is(self):
        with vbar.Device("sim:capacity=32M", page_size="4M", headroom="1M", budget="16M") as device:
            self.assertEqual((device.budget, device.headroom), (16 * MIB, MIB))
            self.assertTrue(device.info.simulated)
            self.assertEqual((device.page_size, device.info.total_bytes), (4 * MIB, 32 * MIB))
            self.assertIn("sim:capacity=32M", repr(device))
            device.budget, device.headroom = "8M", 0
            self.assertEqual((device.budget, device.headroom), (8 * MIB, 0))
            device.budget = None
            self.assertIsNone(device.budget)
            device.refresh()
            device.set_wait_timeout(2.5)

    def test_opening_again_shares_and_applies(self):
        name = spec()
        with open_device(name, budget="16M") as first, open_device(name, budget="8M") as second:
            self.assertEqual(first.budget, second.budget, 8 * MIB)
            bar = first.create_bar(PAGE)
            self.assertEqual(second.statistics().bar_count, 1)
            first.close()
            # What was made lives on.
            with bar.fault(0, PAGE) as bytes:
                self.assertTrue(bytes)
            bar.close()

    def test_closing_twice_does_nothing_and_use_after_it_is_an_error(self):
        device = open_device()
        device.close()
        device.close()
        with self.assertRaisesRegex(vbar.StaleHandle, "closed, or never given out"):
            device.refresh()

    def test_the_driver_is_named_by_the_environment(self):
        program = "import vbar; print(vbar.Device(headroom=0).info.total_bytes)"
        said = check_program(self, program, VBAR_DRIVER="sim:capacity=48M")
        self.assertEqual(said.strip(), str(48 * MIB))

    def test_statistics_are_a_value(self):
        with open_device(budget=2 * PAGE) as device:
            bar = device.create_bar(8 * PAGE)
            with bar.fault(0, PAGE), bar.fault(0, PAGE):
                found = device.statistics()
            self.assertEqual((found.hit_count, found.miss_count, found.used_bytes), (1, 1, PAGE))
            self.assertEqual(found.budget_source, vbar.BudgetSource.LIMIT)
            with bar.fault(0, 3 * PAGE) as refused:
                self.assertFalse(refused)
            self.assertEqual(device.statistics().refusal_counts, {vbar.Reason.TOO_LARGE: 1})
            with self.assertRaises(dataclasses.FrozenInstanceError):
                found.used_bytes = 0

    def test_trim_gives_free_frames_back(self):
        with open_device() as device:
            bar = device.create_bar(2 * PAGE)
            with bar.fault(0, 2 * PAGE):
                pass
            bar.end_of_run()
            bar.close(wait=True)
            self.assertEqual(device.statistics().free_bytes, 2 * PAGE)
            self.assertEqual((device.trim(keep=PAGE), device.trim()), (PAGE, PAGE))
            self.assertEqual(device.statistics().used_bytes, 0)
            self.assertEqual(device.free_memory().shortfall, vbar.Shortfall.NOTHING_RESIDENT)


class Sizes(unittest.TestCase):
    def test_what_is_too_long_to_be_a_number_is_refused(self):
        for size in ("9" * 400 + ".0", "9" * 5000, "9" * 41 + "G"):
            with self.assertRaises(vbar.InvalidArgument):
                vbar.Device(spec(), budget=size)
        with open_device() as device:
            with self.assertRaises(vbar.InvalidArgument):
                device.set_wait_timeout(10**400)

    def test_what_is_no_text_is_a_type_error(self):
        for driver in (5, b"sim", ["sim"]):
            with self.assertRaisesRegex(TypeError, "driver: a text is expected"):
                vbar.Device(driver)
        with self.assertRaises(vbar.InvalidArgument):
            vbar.Device("\udc80")

    def test_sizes_are_numbers_or_texts(self):
        from vbar._sizes import parse_size

        wanted = {"17": 17, "8G": 8 << 30, "1.5 MiB": 3 << 19, "2kb": 2048, "3t": 3 << 40, 7: 7}
        for size, nbytes in wanted.items():
            self.assertEqual(parse_size(size), nbytes, size)
        texts = ("", "G", "1X", "-1", "1e3", "0x10", "1.2.3", "40%", "17000000T")
        for wrong in (*texts, 1.5, None, -1, 1 << 64):
            with self.assertRaises(vbar.InvalidArgument, msg=repr(wrong)):
                parse_size(wrong)

    def test_a_budget_may_be_a_part_of_the_device(self):
        with open_device(budget="50%") as device:
            half = device.info.total_bytes // 2
            self.assertEqual(device.budget, half)
            device.budget = " 6.25 % "
            self.assertEqual(device.budget, half // 8)
            self.assertEqual(device.statistics().budget_bytes, 2 * PAGE)
            bar = device.create_bar(4 * PAGE)
            self.assertFalse(bar.fault(0, 4 * PAGE))
            with bar.fault(0, 2 * PAGE) as guard:
                self.assertTrue(guard)
            # Opening and setting come to the same, and more than all is what bytes would be.
            for text in ("33.3333%", "0.0001%", "250%"):
                device.budget = text
                with open_device(budget=text) as other:
                    self.assertEqual(device.budget, other.budget)
            self.assertEqual(device.budget, 5 * half)
            long = "9" * 5000 + "%"
            for wrong in ("%", "0%", "0.00001%", "-5%", "40%%", "%40", "1e2%", "x%", "5 0%", long):
                with self.assertRaisesRegex(vbar.InvalidArgument, "use a percentage above 0") as told:
                    device.budget = wrong
                self.assertLess(len(str(told.exception)), 200)
                with self.assertRaises(vbar.InvalidArgument):
                    vbar.Device(spec(), budget=wrong)
            self.assertEqual(device.budget, 5 * half)
            with self.assertRaisesRegex(vbar.InvalidArgument, "'40x' is no size.*memory, as 50%"):
                vbar.Device(spec(), budget="40x")
            # Of other sizes there are no parts.
            for option in ("headroom", "page_size", "host_allowance"):
                with self.assertRaisesRegex(vbar.InvalidArgument, f"{option}: '50%' is no size"):
                    vbar.Device(spec(), **{option: "50%"})

    def test_what_does_not_fit_a_number_of_c_is_refused_and_not_cut_off(self):
        with open_device() as device:
            bar = device.create_bar(4 * PAGE)
            for call in (
                lambda: bar.fault(1 << 64, 1),
                lambda: bar.fault(0, -1),
                lambda: bar.fault(0, 1 << 80),
                lambda: bar.set_class(1 << 31),
                lambda: bar.set_floor(1 << 32),
                lambda: bar.set_watermark(-1),
                lambda: bar.residency(1 << 32),
                lambda: bar.residency(0, 5),
                lambda: device.fault_many([(bar, -1, 1)]),
                lambda: device.create_bar(1 << 64),
                lambda: device.open_model(1 << 31),
                lambda: bar.bind([1 << 40], []),
                lambda: bar.bind(["x"], [(0, 0, 1, 1 << 32)]),
                lambda: device.set_wait_timeout(0),
                lambda: device.set_wait_timeout(float("nan")),
                lambda: vbar.Device("sim", ordinal=1 << 32),
                lambda: vbar.Device("sim", budget=0),
                lambda: vbar.Device("sim", staging_slots=-1),
                lambda: vbar.Device("sim\0"),
            ):
                with self.assertRaises(vbar.InvalidArgument):
                    call()
            bar.set_class(-(1 << 31))
            self.assertEqual(bar.info().priority_class, -(1 << 31))


class Streams(Case):
    class Cuda:
        def __init__(self, handle):
            self.handle = handle

        def __cuda_stream__(self):
            return 0, self.handle

    class Torch:
        def __init__(self, handle):
            self.cuda_stream = handle

    class Cupy:
        def __init__(self, handle):
            self.ptr = handle

    def test_streams_of_other_libraries_are_taken(self):
        with open_device() as device:
            bar, stream = device.create_bar(PAGE), Sim(device).stream()
            for kind in (int, self.Cuda, self.Torch, self.Cupy):
                with bar.fault(0, PAGE, stream=kind(stream)) as bytes:
                    self.assertEqual(bytes.stream, stream)
            with bar.fault(0, PAGE) as bytes:
                self.assertEqual(bytes.stream, 0)
            with bar.fault(0, PAGE, stream=vbar.NO_STREAM) as bytes:
                self.assertEqual(bytes.stream, vbar.NO_STREAM)

    def test_what_is_no_stream_is_refused(self):
        with open_device() as device:
            bar = device.create_bar(PAGE)
            for wrong in ("0", 1.5, True, -1, 1 << 64, object(), self.Torch("x"), self.Cuda(None)):
                with self.assertRaisesRegex(vbar.InvalidArgument, "is no stream"):
                    bar.fault(0, 1, stream=wrong)

    def test_a_protocol_that_says_nonsense_is_refused_with_what_it_said(self):
        class Says:
            def __init__(self, told):
                self.__cuda_stream__ = told

        class Unprintable:
            def __repr__(self):
                raise RuntimeError

        whole, pair = "two whole numbers", "a pair of version and handle"
        with open_device() as device:
            bar = device.create_bar(PAGE)
            for told, why in (
                (7, pair),
                ((), pair),
                ((0,), pair),
                ((0, 1, 2), pair),
                ("00", pair),
                ({0: 0, 1: 1}, pair),
                (Unprintable(), pair),
                ((0, "1"), whole),
                ((0, 1.0), whole),
                ((None, 1), whole),
                ((0, True), whole),
                ((1, 0), "version 0"),
                ((-1, 0), "version 0"),
                ((0, -1), "64 bits"),
                ((0, 1 << 64), "64 bits"),
                ((0, 1 << 100_000), "64 bits"),
            ):
                for said in (told, lambda told=told: told):
                    with self.assertRaises(vbar.InvalidArgument) as caught:
                        bar.fault(0, 1, stream=Says(said))
                    message = str(caught.exception)
                    self.assertIn("the Says is no stream: its __cuda_stream__ gave ", message)
                    self.assertIn(why, message)
                    self.assertLess(len(message), 300)
            with self.assertRaisesRegex(vbar.InvalidArgument, "no stream"):
                bar.fault(0, 1, stream=1 << 100_000)
            with bar.fault(0, 1, stream=Says((0, Sim(device).stream()))) as bytes:
                self.assertTrue(bytes)

    def test_a_guard_keeps_its_stream_object_alive(self):
        import weakref

        with open_device() as device:
            bar, handle = device.create_bar(PAGE), Sim(device).stream()
            stream = self.Cupy(handle)
            guard = bar.fault(0, PAGE, stream=stream)
            alive = weakref.ref(stream)
            del stream
            self.assertIsNotNone(alive())
            guard.close()
            del guard
            self.assertIsNone(alive())

    def test_torchs_current_stream_is_the_default_on_a_real_device_only(self):
        from vbar._streams import handle_of

        program = """
            import sys, types, vbar
            from vbar._streams import handle_of
            asked = []
            def current_stream(ordinal):
                asked.append(ordinal)
                return types.SimpleNamespace(cuda_stream=77)
            torch = sys.modules["torch"] = types.ModuleType("torch")
            assert handle_of(None, 1) == 0, "half imported"
            torch.cuda = types.SimpleNamespace(is_initialized=lambda: False)
            assert handle_of(None, 1) == 0, "torch does not use CUDA: it is not started"
            torch.cuda = types.SimpleNamespace(
                is_initialized=lambda: True, current_stream=current_stream)
            assert handle_of(None, 1) == 77 and asked == [1]
            with vbar.Device("sim", headroom=0) as device:
                with device.create_bar(1).fault(0, 1) as bytes:
                    assert bytes.stream == 0 and asked == [1], "a simulated device is not torch's"
        """
        check_program(self, program)
        self.assertEqual(handle_of(None, None), 0)


class Bars(Case):
    def test_a_fault_is_a_guard_or_says_why_not(self):
        with open_device(budget=2 * PAGE) as device, device.create_bar(4 * PAGE) as bar:
            self.assertEqual((bar.nbytes, bar.page_count, bar.page_size), (4 * PAGE, 4, PAGE))
            with bar.fault(PAGE, 100) as bytes:
                self.assertIsInstance(bytes, vbar.Guard)
                self.assertTrue(bytes and bytes.is_held)
                self.assertEqual((bytes.address, bytes.nbytes), (bar.address + PAGE, 100))
                self.assertEqual([page.pin_count for page in bar.residency()], [0, 1, 0, 0])
                signature = bytes.signature
            self.assertFalse(bytes.is_held)
            self.assertEqual(bar.residency(1, 1)[0].pin_count, 0)
            with bar.fault(PAGE, 100) as bytes:
                self.assertEqual(bytes.signature, signature)
            with bar.fault(0, 3 * PAGE) as refused:
                self.assertIsInstance(refused, vbar.Offloaded)
                self.assertFalse(refused)
                self.assertEqual(refused.reason, vbar.Reason.TOO_LARGE)
                self.assertEqual(str(refused.reason), "too_large")

    def test_a_released_guard_does_nothing_more(self):
        with open_device() as device:
            bar = device.create_bar(PAGE)
            guard = bar.fault(0, PAGE)
            guard.close()
            guard.close()
            for use in (guard.__enter__, guard.view, lambda: guard.also_used_on(0)):
                with self.assertRaises(vbar.GuardReleased):
                    use()
            with self.assertRaises(vbar.InvalidArgument):
                bar.fault(0, PAGE + 1)

    def test_a_dropped_guard_gives_its_pins_back(self):
        with open_device() as device:
            bar = device.create_bar(PAGE)
            guards = [bar.fault(0, PAGE) for _ in range(3)]
            self.assertEqual(bar.residency()[0].pin_count, 3)
            del guards
            self.assertEqual(bar.residency()[0].pin_count, 0)

    def test_the_block_of_a_guard_may_raise(self):
        with open_device() as device:
            bar = device.create_bar(PAGE)
            with self.assertRaises(KeyboardInterrupt), bar.fault(0, PAGE):
                raise KeyboardInterrupt
            self.assertEqual(bar.residency()[0].pin_count, 0)

    def test_scenario_4_leaked_pins_are_reported_and_taken_back(self):
        with open_device() as device:
            bar = device.create_bar(4 * PAGE)
            leaked = bar.fault(0, 4 * PAGE)
            freed = bar.free_memory()
            told = (freed.bytes, freed.shortfall, freed.pinned_count)
            self.assertEqual(told, (0, vbar.Shortfall.ALL_PINNED, 4))
            self.assertEqual(bar.end_of_run(), 4)
            self.assertEqual(bar.end_of_run(release_pins=True), 4)
            with self.assertRaises(vbar.StaleToken):
                leaked.close()
            self.assertEqual(bar.end_of_run(), 0)
            self.assertEqual(bar.free_memory().bytes, 4 * PAGE)

    def test_the_blocks_own_exception_goes_before_a_stale_token(self):
        with open_device() as device:
            bar = device.create_bar(PAGE)
            with self.assertRaises(ZeroDivisionError), bar.fault(0, PAGE):
                bar.end_of_run(release_pins=True)
                1 / 0

    def test_marks_are_set_and_told(self):
        with open_device() as device:
            bar = device.create_bar(4 * PAGE)
            bar.set_class(-3)
            bar.set_floor(1)
            bar.set_watermark(3)
            marks = bar.info()
            self.assertEqual((marks.priority_class, marks.floor, marks.watermark), (-3, 1, 3))
            self.assertEqual((marks.page_count, marks.resident_count), (4, 0))
            self.assertTrue(marks.has_addresses)
            with bar.fault(3 * PAGE, 1) as refused:
                self.assertEqual(refused.reason, vbar.Reason.ABOVE_WATERMARK)
            bar.prioritise()
            self.assertEqual(bar.info().watermark, 4)
            bar.deprioritise()

    def test_many_ranges_or_none(self):
        with open_device(budget=3 * PAGE) as device:
            one, two = device.create_bar(2 * PAGE), device.create_bar(4 * PAGE)
            with device.fault_many([(one, 0, 100), (two, PAGE, PAGE)]) as guards:
                addresses = [guard.address for guard in guards]
                self.assertEqual(addresses, [one.address, two.address + PAGE])
                self.assertEqual((len(guards), bool(guards)), (2, True))
                self.assertEqual(one.residency()[0].pin_count, 1)
            self.assertFalse(any(guard.is_held for guard in guards))
            with device.fault_many([(one, 0, 2 * PAGE), (two, 0, 2 * PAGE)]) as refused:
                self.assertEqual(refused.reason, vbar.Reason.TOO_LARGE)
            pages = one.residency() + two.residency()
            self.assertTrue(all(page.pin_count == 0 for page in pages))
            with device.fault_many([]) as none:
                self.assertEqual(list(none), [])
                self.assertTrue(none)
            with self.assertRaises(vbar.InvalidArgument):
                device.fault_many([(one, 0, 1), (two, 4 * PAGE, 1)])

    def test_prepared_ranges_are_faulted_again_and_again(self):
        with open_device(budget=3 * PAGE) as device:
            bar = device.create_bar(2 * PAGE)
            ranges = vbar.Ranges((bar, at * 64, 64) for at in range(100))
            self.assertEqual((len(ranges), ranges[3]), (100, (bar, 192, 64)))
            for _ in range(3):
                with device.fault_many(ranges) as guards:
                    self.assertEqual(bar.residency()[0].pin_count, 100)
                    self.assertEqual(guards[-1].address, bar.address + 99 * 64)
                    self.assertIs(guards[99], guards[-1])
                    self.assertEqual([guard.nbytes for guard in guards[:2]], [64, 64])
                self.assertEqual(bar.residency()[0].pin_count, 0)
                self.assertFalse(guards[0].is_held or guards[50].is_held)
                guards.close()
            with self.assertRaises(IndexError):
                guards[100]
            with self.assertRaises(vbar.InvalidArgument):
                vbar.Ranges([(bar, -1, 64)])
            with self.assertRaises(vbar.InvalidArgument):
                device.fault_many(vbar.Ranges([(bar, 0, 64), (bar, 2 * PAGE, 1)]))
            self.assertEqual(bar.residency()[0].pin_count, 0)

    def test_a_hold_serves_again_and_again(self):
        with open_device(budget=3 * PAGE) as device:
            sim, bar = Sim(device), device.create_bar(4 * PAGE)
            idle, pins = [], lambda: sum(page.pin_count for page in bar.residency())
            ranges = vbar.Ranges((bar, at * 64, 64) for at in range(5))
            first = Hold(device, ranges, sim.stream(), idle)
            for _ in range(3):
                self.assertIsNone(first.fault())
                with first:
                    self.assertEqual((pins(), idle), (5, []))
                self.assertEqual((pins(), idle), (0, [first]))
                idle.clear()
            # One that is dropped gives its pins back, one whose block raised is used no more.
            second = Hold(device, ranges, 0, idle)
            second.fault()
            self.assertEqual(pins(), 5)
            del second
            self.assertEqual(pins(), 0)
            first.fault()
            with self.assertRaisesRegex(ValueError, "of the block"), first:
                raise ValueError("of the block")
            self.assertEqual((pins(), idle), (0, []))
            # Pins that have no block end with what has them, and it serves again.
            for _ in range(2):
                first.fault()
                lease = first.lease()
                self.assertEqual((pins(), idle), (5, []))
                del lease
                self.assertEqual((pins(), idle), (0, [first]))
                idle.clear()
            # What is taken back by force is an error at the end, once.
            first.fault()
            bar.end_of_run(release_pins=True)
            with self.assertRaises(vbar.StaleToken), first:
                pass
            self.assertEqual((pins(), idle), (0, []))
            del first
            large = Hold(device, vbar.Ranges([(bar, 0, 1), (bar, 0, 4 * PAGE)]), 0)
            for _ in range(2):
                offloaded = large.fault()
                self.assertEqual(offloaded.reason, vbar.Reason.TOO_LARGE)
                self.assertEqual(offloaded.needed_bytes, 4 * PAGE)
            wrong = Hold(device, vbar.Ranges([(bar, 4 * PAGE, 1)]), 0)
            with self.assertRaises(vbar.InvalidArgument):
                wrong.fault()
            with self.assertRaises(TypeError):
                copy.copy(wrong)
            del large, wrong
            self.assertEqual(pins(), 0)
            sim.close()

    def test_guards_that_are_taken_out_end_by_themselves(self):
        with open_device(budget=3 * PAGE) as device:
            bar = device.create_bar(2 * PAGE)
            ranges = vbar.Ranges((bar, at * 64, 64) for at in range(4))
            pins = lambda: bar.residency()[0].pin_count
            guards = device.fault_many(ranges)
            guards[1].close()
            self.assertEqual(pins(), 3)
            kept = guards[2]
            del guards
            self.assertEqual(pins(), 1)
            self.assertTrue(kept.is_held)
            kept.close()
            self.assertEqual(pins(), 0)
            with device.fault_many(ranges) as guards:
                guards[0].close()
                list(guards)
                bar.end_of_run(release_pins=True)
                with self.assertRaises(vbar.StaleToken):
                    guards.close()
                self.assertFalse(any(guard.is_held for guard in guards))
            with self.assertRaisesRegex(ValueError, "of the block"):
                with device.fault_many(ranges):
                    raise ValueError("of the block")
            self.assertEqual(pins(), 0)

    def test_a_bound_bar_has_the_files_bytes(self):
        paths = [self.folder / name for name in ("one.bin", "two.bin")]
        for seed, path in enumerate(paths):
            path.write_bytes(pattern(3 * PAGE, seed))
        with open_device(budget=2 * PAGE) as device, open(paths[1], "rb") as second:
            sim, bar = Sim(device), device.create_bar(4 * PAGE)
            stream = sim.stream()
            bar.bind(
                [paths[0], second],
                [vbar.Segment(0, 512, 2 * PAGE), vbar.Segment(2 * PAGE, 0, PAGE, source=1)],
            )
            wanted = pattern(3 * PAGE, 0)[512 : 512 + 2 * PAGE] + pattern(3 * PAGE, 1)[:PAGE]
            # More pages than the budget has: each is evicted and filled again.
            for offset in (0, PAGE, 2 * PAGE) * 3:
                with bar.fault(offset, PAGE, stream=stream) as bytes:
                    found = sim.read(bytes.address, PAGE, stream)
                self.assertEqual(found, wanted[offset : offset + PAGE])
            self.assertGreater(device.statistics().evicted_page_count, 3)
            self.assertEqual(sim.violations(), 0)

    def test_a_binding_that_is_wrong_is_refused(self):
        path = self.folder / "file.bin"
        path.write_bytes(bytes(PAGE))
        with open_device() as device:
            bar = device.create_bar(PAGE)
            for sources, segments in (
                ([path], [vbar.Segment(0, 0, PAGE + 1)]),
                ([path], [vbar.Segment(0, 0, 10), vbar.Segment(5, 0, 10)]),
                ([path], [vbar.Segment(0, 0, 10, source=1)]),
                ([object()], []),
                ([True], []),
                ([f"{path}\0"], []),
            ):
                with self.assertRaises(vbar.InvalidArgument, msg=repr((sources, segments))):
                    bar.bind(sources, segments)
            with self.assertRaises(vbar.FileError) as caught:
                bar.bind([self.folder / "missing"], [])
            self.assertEqual(caught.exception.errno, 2)

    def test_memory_is_kept_until_it_is_not_read_any_more(self):
        class Bytes(bytearray):
            """Weak references tell whether it is alive."""

        path = self.folder / "file.bin"
        path.write_bytes(pattern(PAGE, 2))
        memory = Bytes(pattern(3 * PAGE, 1))
        wanted, alive = bytes(memory), weakref.ref(memory)
        with open_device(budget=2 * PAGE) as device:
            sim, bar = Sim(device), device.create_bar(4 * PAGE)
            stream = sim.stream()
            bar.bind(
                [vbar.MemorySource(memory), path],
                [vbar.Segment(0, 512, 2 * PAGE), vbar.Segment(2 * PAGE, 0, PAGE, source=1)],
            )
            with self.assertRaises(BufferError):
                memory.append(1)
            del memory
            for offset in (0, PAGE) * 3:
                with bar.fault(offset, PAGE, stream=stream) as weight:
                    found = sim.read(weight.address, PAGE, stream)
                self.assertEqual(found, wanted[512 + offset : 512 + offset + PAGE])
            with bar.fault(2 * PAGE, PAGE, stream=stream) as weight:
                self.assertEqual(sim.read(weight.address, PAGE, stream), pattern(PAGE, 2))
            told = device.statistics()
            self.assertGreaterEqual(told.source_host_pageable_bytes, 2 * PAGE)
            self.assertEqual(told.source_host_locked_bytes, 0)
            self.assertIsNotNone(alive())
            # A pin keeps the VBAR, a zombie then, and so its memory.
            guard = bar.fault(0, PAGE, stream=stream)
            bar.close()
            device.statistics()
            self.assertIsNotNone(alive())
            guard.close()
            sim.synchronize(stream)
            for _ in range(100):
                device.refresh()
                if alive() is None:
                    break
            self.assertIsNone(alive())
            self.assertEqual(sim.violations(), 0)

    def test_python_may_end_while_memory_is_bound(self):
        for threads in (False, True):
            check_program(self, f"""
                import vbar
                page = 2 << 20
                device = vbar.Device("sim:capacity=64M", page_size=page, headroom=0,
                                     budget=3 * page, threads={threads})
                bar = device.create_bar(8 * page)
                bar.bind([vbar.MemorySource(bytearray(8 * page))], [(0, 0, 8 * page)])
                held = bar.fault(0, page)
                for number in range(1, 25):
                    bar.fault(number % 8 * page, page)
            """)

    def test_memory_is_found_in_what_has_it(self):
        size = 4096
        content = pattern(size, 3)

        class Tensor:
            """As torch's: no buffer, no ``__array_interface__``."""

            device, nbytes = types.SimpleNamespace(type="cpu"), size

            def __init__(self, memory, contiguous=True):
                self.memory, self.contiguous = memory, contiguous

            def is_contiguous(self):
                return self.contiguous

            def data_ptr(self):
                return ctypes.addressof(self.memory)

        class Array:
            def __init__(self, memory, **changes):
                interface = {"data": (ctypes.addressof(memory), True), "typestr": "<f4"}
                self.memory = memory
                self.__array_interface__ = {**interface, "shape": (size // 8, 2), **changes}

        raw = (ctypes.c_char * size).from_buffer_copy(content)
        on_gpu = Tensor(raw)
        on_gpu.device = types.SimpleNamespace(type="cuda")
        with open_device() as device, mmap.mmap(-1, size) as mapped:
            mapped[:] = content
            sim = Sim(device)
            stream = sim.stream()
            for source in (content, bytearray(content), memoryview(content), raw, mapped,
                           array.array("I", content), Tensor(raw), Array(raw)):
                with device.create_bar(PAGE) as bar:
                    told = vbar.MemorySource(source)
                    self.assertEqual(told.nbytes, size)
                    bar.bind([told], [(0, 0, size)])
                    with bar.fault(0, size, stream=stream) as weight:
                        self.assertEqual(sim.read(weight.address, size, stream), content)
                    sim.synchronize(stream)
                    bar.close(wait=True, stream=stream)
                del told
            for wrong in (object(), 7, "text", on_gpu, Tensor(raw, contiguous=False),
                          memoryview(content)[::2], Array(raw, strides=(16, 4)),
                          Array(raw, data=None)):
                with self.assertRaises(vbar.InvalidArgument, msg=repr(wrong)):
                    vbar.MemorySource(wrong)
            bar = device.create_bar(PAGE)
            for segments, source in (
                ([(0, 1, size)], vbar.MemorySource(content)),
                ([(0, 0, 8)], vbar.MemorySource(content, page_locked=True)),
                ([(0, 0, 8)], vbar.MemorySource(b"")),
                ([(0, -1, 8)], vbar.MemorySource(content)),
            ):
                with self.assertRaises(vbar.InvalidArgument):
                    bar.bind([source], segments)
            bar.close(wait=True)
            # Nothing of all that is kept: the buffers are free again.
            self.assertEqual(vbar._memory._kept, [])

    def test_scenario_9_a_device_without_addresses_offloads_everything(self):
        with open_device(spec(address_space=8 * PAGE)) as device:
            bars = [device.create_bar(3 * PAGE) for _ in range(4)]
            self.assertFalse(bars[-1].info().has_addresses)
            with bars[-1].fault(0, PAGE) as refused:
                self.assertEqual(refused.reason, vbar.Reason.NO_ADDRESSES)


class Allocations(Case):
    def test_what_was_written_stays_until_it_is_evicted(self):
        with open_device() as device:
            sim, bar = Sim(device), device.create_bar(4 * PAGE)
            stream = sim.stream()
            weight = bar.allocate("1K")
            self.assertEqual((weight.nbytes, weight.bar_offset % 512), (1024, 0))
            self.assertEqual(weight.address, bar.address + weight.bar_offset)
            with weight.fault(stream) as bytes:
                self.assertIsInstance(bytes, vbar.Refill)
                self.assertFalse(bytes.is_committed)
                sim.write(bytes.address, pattern(1024), stream)
                bytes.commit()
                self.assertTrue(bytes.is_committed)
                with self.assertRaises(vbar.InvalidArgument):
                    bytes.commit()
            with weight.fault(stream) as bytes:
                self.assertEqual(type(bytes), vbar.Guard)
                self.assertEqual(sim.read(bytes.address, 1024, stream), pattern(1024))
            bar.end_of_run(stream)
            self.assertEqual(bar.free_memory().bytes, PAGE)
            bar.prioritise()
            with weight.fault(stream) as bytes:
                self.assertIsInstance(bytes, vbar.Refill)
            # It was left without a commit.
            with weight.fault(stream) as bytes:
                self.assertIsInstance(bytes, vbar.Refill)
                bytes.commit(vbar.NO_STREAM)
            weight.invalidate()
            with weight.fault(stream) as bytes:
                self.assertIsInstance(bytes, vbar.Refill)
            self.assertEqual(sim.violations(), 0)

    def test_one_fills_and_others_get_told_or_wait(self):
        with open_device() as device:
            bar = device.create_bar(PAGE)
            weight = bar.allocate(100)
            with weight.fault() as bytes:
                with weight.fault() as other:
                    self.assertIsInstance(other, vbar.Busy)
                    self.assertFalse(other)
                    self.assertEqual(other.reason, vbar.Reason.NONE)
                found = []

                def wait():
                    with weight.fault(wait=True) as waited:
                        found.append(type(waited))

                thread = threading.Thread(target=wait)
                thread.start()
                bytes.commit()
                thread.join(20)
            self.assertEqual(found, [vbar.Guard])

    def test_an_allocation_ends_with_its_bar(self):
        with open_device() as device:
            bar = device.create_bar(PAGE)
            weight = bar.allocate(100)
            with self.assertRaises(vbar.NoAddresses):
                bar.allocate(PAGE)
            bar.close()
            with self.assertRaises(vbar.StaleHandle):
                weight.fault()
            with self.assertRaises(TypeError):
                vbar.Allocation()


class Models(Case):
    def test_a_model_is_a_mapping_of_its_tensors(self):
        tensors = {
            "layers.10.weight": ("BF16", (3, 4), pattern(24)),
            "layers.2.weight": ("F8_E4M3", (7,), pattern(7)),
            "scale": ("F32", (), pattern(4)),
            "empty": ("I64", (0, 5), b""),
            "zero\0within": ("U8", (2,), b"ab"),
        }
        path = self.model_of(tensors, metadata={"format": "pt"})
        with open_device() as device, device.open_model(path) as model:
            self.assertEqual(len(model), 5)
            self.assertEqual(set(model), set(tensors))
            self.assertIn("zero\0within", model)
            # As any mapping says it, and not an error of its own.
            for other in (5, None, "a\0", "\udc80", b"scale", "no such"):
                self.assertNotIn(other, model)
                self.assertIsNone(model.get(other))
            names = list(model)
            self.assertLess(names.index("layers.2.weight"), names.index("layers.10.weight"))
            tensor = model["layers.10.weight"]
            told = (tensor.dtype, tensor.shape, tensor.nbytes)
            self.assertEqual(told, (vbar.Dtype.BF16, (3, 4), 24))
            self.assertEqual(tensor.address, model.bar.address + tensor.bar_offset)
            self.assertEqual(model["scale"].shape, ())
            self.assertEqual(model["zero\0within"].nbytes, 2)
            self.assertEqual(model.nbytes, sum(len(raw) for _, _, raw in tensors.values()))
            self.assertEqual((model.file_count, model.metadata("format")), (1, "pt"))
            self.assertEqual((model.files, tensor.path), ((str(path),), str(path)))
            with open(tensor.path, "rb") as file:
                file.seek(tensor.file_offset)
                self.assertEqual(file.read(tensor.nbytes), tensors["layers.10.weight"][2])
            self.assertNotIn("layers.3.weight", model)
            self.assertIsNone(model.get("layers.3.weight"))
            self.assertEqual({model: 1}[model], 1)

    def test_tensors_have_the_files_bytes(self):
        half = PAGE // 2
        tensors = {f"layers.{at}": ("U8", (half,), pattern(half, at)) for at in range(8)}
        path = self.model_of(tensors)
        with open_device(budget=2 * PAGE) as device, device.open_model(path) as model:
            sim = Sim(device)
            stream = sim.stream()
            for name in list(model) * 2:
                with model.fault(name, stream=stream) as weight:
                    self.assertEqual(weight.tensor, model[name])
                    self.assertEqual(weight.address, model[name].address)
                    found = sim.read(weight.address, weight.nbytes, stream)
                self.assertEqual(found, tensors[name][2], name)
            self.assertEqual(sim.violations(), 0)

    def test_a_model_is_opened_by_descriptor_or_file(self):
        path = self.model_of({"a": ("U8", (4,), b"abcd")})
        with open_device() as device, open(path, "rb") as file:
            for source in (file, file.fileno(), os.fsencode(path), str(path), pathlib.Path(path)):
                with device.open_model(source, name="mine") as model:
                    self.assertEqual(list(model), ["a"])
                    by_path = isinstance(source, (str, bytes, os.PathLike))
                    self.assertEqual(model["a"].path, str(path) if by_path else None)

    def test_a_models_bar_belongs_to_it(self):
        path = self.model_of({"a": ("U8", (4,), b"abcd")})
        with open_device() as device, device.open_model(path) as model:
            with model.fault("a"):
                self.assertEqual(model.bar.info().resident_count, 1)
            model.bar.end_of_run()
            self.assertEqual(model.bar.free_memory().bytes, PAGE)
            with self.assertRaisesRegex(vbar.InvalidArgument, "close the model"):
                model.bar.close()
            with self.assertRaises(vbar.InvalidArgument):
                model.bar.allocate(1)
            with self.assertRaisesRegex(vbar.InvalidArgument, "no watermark"):
                model.bar.set_watermark(1)

    def test_a_tensor_larger_than_the_budget_is_offloaded(self):
        path = self.model_of({"a": ("U8", (3 * PAGE,), bytes(3 * PAGE))})
        with open_device(budget=2 * PAGE) as device, device.open_model(path) as model:
            with model.fault("a") as weight:
                self.assertEqual((bool(weight), weight.reason), (False, vbar.Reason.TOO_LARGE))
                self.assertEqual(weight.needed_bytes, 3 * PAGE)

    def test_a_tensor_larger_than_the_budget_is_read_from_the_host(self):
        path = self.model_of({"a": ("U8", (3 * PAGE,), pattern(3 * PAGE))})
        options = {"budget": 2 * PAGE, "host_mapped": True}
        with open_device(**options) as device, device.open_model(path) as model:
            stream = Sim(device).stream()
            with model.fault("a", stream=stream) as weight:
                self.assertEqual((bool(weight), weight.nbytes), (True, 3 * PAGE))
                self.assertEqual(weight.reason, vbar.Reason.HOST_MAPPED)
                self.assertEqual(device.statistics().host_mapped_bytes, 3 * PAGE)
                self.assertEqual((device.trim_host_frames(), device.statistics().used_bytes), (0, 0))

    def test_bytes_are_counted_by_source(self):
        path = self.model_of({"a": ("U8", (3 * PAGE,), pattern(3 * PAGE))})
        for prefer in ("auto", "ram", vbar.Prefer.DISK):
            options = {"prefer": prefer, "host_allowance": 0}
            with open_device(**options) as device, device.open_model(path) as model:
                with model.fault("a", stream=Sim(device).stream()) as weight:
                    self.assertTrue(weight)
                told = device.statistics()
                sources = told.source_page_cache_bytes + told.source_disk_bytes
                self.assertEqual(sources, told.filled_bytes)
                self.assertLessEqual(told.source_direct_bytes, told.source_disk_bytes)
                self.assertEqual((told.locked_bytes, device.trim_host()), (0, 0))
        with open_device(host_allowance="64M") as device, device.open_model(path) as model:
            with model.fault("a", stream=Sim(device).stream()):
                pass
            told = device.statistics()
            parts = told.locked_ring_bytes + told.locked_cache_bytes
            self.assertEqual(told.locked_bytes, parts + told.locked_registered_bytes)
            self.assertGreater(told.locked_ring_bytes, 0)
            freed = device.trim_host()
            self.assertGreater(freed, 0)
            self.assertEqual(device.statistics().locked_bytes, told.locked_bytes - freed)
        for wrong in ("fast", "", 3, None):
            with self.assertRaises(vbar.InvalidArgument):
                open_device(prefer=wrong)
        with self.assertRaises(vbar.InvalidArgument):
            open_device(host_allowance=-1)


class Debugging(Case):
    def test_a_stale_read_finds_poison(self):
        path = self.model_of({"a": ("U8", (PAGE,), pattern(PAGE))})
        options = {"poison": True, "eviction": vbar.Eviction.STRICT}
        with open_device(budget=4 * PAGE, **options) as device, device.open_model(path) as model:
            sim = Sim(device)
            stream = sim.stream()
            for _ in range(2):
                with model.fault("a", stream) as weight:
                    self.assertEqual(sim.read(weight.address, PAGE, stream), pattern(PAGE))
                model.bar.end_of_run(stream)
                self.assertEqual(model.bar.free_memory().bytes, PAGE)
                self.assertEqual(sim.read(weight.address, PAGE, stream), b"\xff" * PAGE)
                self.assertEqual(device.statistics().poisoned_page_count, 1)
            self.assertEqual(sim.violations(), 0)

    def test_without_it_there_is_nothing_behind_an_evicted_page(self):
        with open_device(spec(on_violation="record")) as device:
            bar, sim = device.create_bar(PAGE), Sim(device)
            with bar.fault(0, PAGE) as bytes:
                pass
            bar.end_of_run()
            self.assertEqual(bar.free_memory().bytes, PAGE)
            with self.assertRaises(vbar.DriverError):
                sim.peek(bytes.address, 8)


class Scrubbing(Case):
    def test_a_page_holds_nothing_of_the_one_before(self):
        for scrub in (False, True):
            with open_device(spec(poison=1), budget=PAGE, scrub=scrub) as device:
                sim = Sim(device)
                stream = sim.stream()
                old, new = device.create_bar(PAGE), device.create_bar(PAGE)
                with old.fault(0, PAGE, stream) as bytes:
                    sim.write(bytes.address, pattern(PAGE), stream)
                with new.fault(0, PAGE, stream) as bytes:
                    found = sim.read(bytes.address, PAGE, stream)
                self.assertEqual(found == pattern(PAGE), not scrub)
                self.assertEqual(not any(found), scrub)
                self.assertEqual(sim.violations(), 0)


class Pressure(Case):
    def test_the_librarys_thread_gives_back_what_others_want(self):
        with open_device(threads=True, headroom="24M") as device:
            bar, sim = device.create_bar(16 * PAGE), Sim(device)
            with bar.fault(0, 16 * PAGE):
                pass
            bar.end_of_run()
            # Of 64 MiB others have 24, and 24 are to be left free.
            sim.set_outside_bytes(24 * MIB)
            until = time.monotonic() + 20
            # No call of ours but those that only look.
            while device.statistics().used_bytes > 16 * MIB and time.monotonic() < until:
                time.sleep(0.01)
            self.assertLessEqual(device.statistics().used_bytes, 16 * MIB)


class Messages(Case):
    def test_messages_go_to_the_logger_at_its_level(self):
        logger = logging.getLogger("vbar")
        self.addCleanup(logger.setLevel, logger.level)
        with self.assertLogs("vbar", logging.INFO) as caught:
            vbar.deliver_messages()
            with open_device():
                pass
        self.assertTrue(any("opened on" in line for line in caught.output), caught.output)

    def test_without_a_configuration_nothing_is_printed(self):
        check_program(self, "import vbar; vbar.Device('sim', headroom=0).close()")


class Examples(Case):
    def test_the_smallest_program_runs(self):
        example = ROOT / "examples/smallest.py"
        text = example.read_text()
        self.assertLessEqual(len(text.splitlines()), 20)
        wide = ("F32", (12 << 20,), bytes(48 * MIB))
        path = self.model_of({"a": ("BF16", (2, 2), pattern(8)), "b": wide})
        # Of 288 MiB, 256 are left free: there is room for the first tensor only.
        program = "import sys; del sys.argv[0]; exec(open(sys.argv[0]).read())"
        said = check_program(self, program, example, path, VBAR_DRIVER="sim:capacity=288M")
        self.assertRegex(said, r"a: 8 bytes at 0x[0-9a-f]+\nb: offloaded, too_large\n")


if __name__ == "__main__":
    unittest.main()
