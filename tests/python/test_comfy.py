"""The package that ComfyUI imports, row by row of its tables: names, shapes, exceptions, effects."""

import ctypes
import gc
import inspect
import os
import threading
import time
import unittest
import unittest.mock
import weakref

import vbar as vbar_library
from comfy_support import COMFY_PAGE, MIB, PAGE, Case, control, torch
from support import pattern, refused
from vbar.comfy import _libc

import comfy_aimdo.host_buffer as host_buffer
import comfy_aimdo.malloc_graph as malloc_graph
import comfy_aimdo.model_mmap as model_mmap
import comfy_aimdo.model_vbar as model_vbar
import comfy_aimdo.storage as storage
import comfy_aimdo.torch as tensors
import comfy_aimdo.vram_buffer as vram_buffer
from comfy_aimdo.model_vbar import ModelVBAR, vbar_fault, vbar_signature_compare, vbar_unpin
from vbar.comfy import _pins as vbar_comfy_pins
from vbar.comfy import _saved


class Surface(unittest.TestCase):
    def check_signature(self, function, *names, **defaults):
        found = inspect.signature(function).parameters
        self.assertEqual([*found], [*names, *defaults])
        told = {name: found[name].default for name in defaults}
        self.assertEqual(told, defaults)

    def test_every_name_and_keyword_is_there(self):
        check = self.check_signature
        check(control.init, implementation=None, simple_vram_headroom=None, nvml_pressure=False)
        check(control.init_devices, "device_ids")
        check(control.init_device, "device_id", extra_vram_headroom=0)
        check(control.get_devctx, "device_id")
        check(control.record, "stream", assert_graph_breaks=False)
        for name in ("deinit", "analyze", "get_total_vram_usage", "get_simple_vram_headroom"):
            check(getattr(control, name))
        for level in (
            "none critical error warning info detail debug verbose vverbose".split()
        ):
            check(getattr(control, f"set_log_{level}"))
        check(ModelVBAR, "size", "device", pageout_callback=None)
        check(ModelVBAR.prioritize, "self", malloc_async_clamp=None)
        check(model_vbar.vbars_analyze, device=None)
        check(model_vbar.vbars_reset_watermark_limits)
        for name in (
            "alloc fault unpin deprioritize set_watermark_limit set_watermark free_memory close "
            "loaded_size get_nr_pages get_watermark get_residency"
        ).split():
            self.assertTrue(callable(getattr(ModelVBAR, name)), name)
        keywords = {"size": 0, "prewarm": 0, "max_grow_size": 0, "mark_cold": True}
        check(host_buffer.HostBuffer, **keywords)
        check(host_buffer.HostBuffer.extend, "self", "size", reallocate=False, register=True)
        check(host_buffer.HostBuffer.truncate, "self", "size", do_unregister=True)
        found = inspect.signature(host_buffer.HostBuffer.read_file_slice).parameters
        rest = {"offset": 0, "stream": 0, "device_ptr": 0, "device": -1}
        self.assertEqual({name: found[name].default for name in rest}, rest)
        found = inspect.signature(host_buffer.read_file_to_device).parameters
        self.assertEqual(len(found), 7)
        self.assertEqual(found["mark_cold"].default, True)
        self.assertEqual(len(inspect.signature(host_buffer.write_device_to_file).parameters), 6)
        self.assertEqual(len(inspect.signature(host_buffer.write_host_to_file).parameters), 4)
        check(host_buffer.cleanup_file_reader)
        check(model_mmap.ModelMMAP, "path")
        check(vram_buffer.VRAMBuffer, "max_size", "device")
        check(vram_buffer.VRAMBuffer.get, "self", "size", offset=0)
        check(tensors.aimdo_to_tensor, "alloc", "device")
        check(tensors.hostbuf_to_tensor, "hostbuf")
        check(tensors.get_tensor_from_raw_ptr, "ptr", "size", "device")
        check(tensors.get_torch_allocator)
        check(malloc_graph.record, "stream", assert_breaks=False)
        check(storage.fast_disk, "path")

    def test_lib_is_none_before_init_and_is_there_everywhere_after(self):
        modules = [control, host_buffer, model_vbar, model_mmap, vram_buffer, malloc_graph]
        modules += [tensors, storage]
        self.assertEqual([module.lib for module in modules], [None] * 8)
        self.assertEqual(control.get_total_vram_usage(), 0)
        refused(RuntimeError, "before control.init", control.get_simple_vram_headroom)
        refused(RuntimeError, "before control.init", control.set_simple_vram_headroom, 1)
        refused(RuntimeError, "was not opened", control.get_devctx, 0)
        refused(RuntimeError, "was not opened", ModelVBAR, 1, 0)
        self.assertEqual(model_vbar.vbars_analyze(), 0)
        self.assertFalse(control.init_devices([0]))
        self.assertTrue(control.init())
        self.addCleanup(control.deinit)
        for module in modules:
            self.assertTrue(module.lib)
            self.assertIs(module.lib, control.lib)
        self.assertEqual(control.lib.get_simple_vram_headroom(), 256 * MIB)
        control.lib.set_simple_vram_headroom(ctypes.c_uint64(5))
        self.assertEqual(control.get_simple_vram_headroom(), 5)
        for name in ("alloc_fn", "free_fn"):
            self.assertTrue(ctypes.cast(getattr(control.lib, name), ctypes.c_void_p).value)
        self.assertEqual(dict(control.devctxs), {})

    def test_another_implementation_is_none_of_ours(self):
        with self.assertLogs("vbar.comfy", "ERROR"):
            self.assertFalse(control.init("rocm"))
        self.assertIsNone(control.lib)


class Control(Case):
    def test_init_again_only_takes_the_headroom(self):
        lib = control.lib
        self.assertTrue(control.init(simple_vram_headroom=64 * MIB))
        self.assertIs(control.lib, lib)
        self.assertEqual(control.get_simple_vram_headroom(), 64 * MIB)
        self.assertTrue(control.init(nvml_pressure=True))
        self.assertEqual(control.get_simple_vram_headroom(), 64 * MIB)
        for wrong in (-1, (1 << 60) + 1):
            refused(ValueError, "2^60", control.set_simple_vram_headroom, wrong)
            refused(ValueError, "2^60", control.init, simple_vram_headroom=wrong)
        self.assertEqual(control.get_simple_vram_headroom(), 64 * MIB)

    def test_the_two_headrooms_mean_two_things(self):
        total = self.device.info.total_bytes
        control.set_simple_vram_headroom(100 * MIB)
        self.assertTrue(control.init_devices([(0, 30 * MIB)]))
        # What is held is bounded by the card, what is free for others by what the driver says.
        self.assertEqual(self.device.budget, total - 130 * MIB)
        self.assertEqual(self.device.headroom, 286 * MIB)
        control.set_simple_vram_headroom(0)
        self.assertEqual(self.device.budget, total - 30 * MIB)
        self.assertEqual(self.device.headroom, 286 * MIB)
        # More than there is keeps a page, and is no automatic budget.
        control.set_simple_vram_headroom(1 << 60)
        self.assertEqual(self.device.budget, PAGE)

    def test_other_programs_are_seen_whoever_is_to_be_asked(self):
        for nvml_pressure in (True, False):
            self.assertTrue(control.init(nvml_pressure=nvml_pressure))
            vbar = ModelVBAR(64 * MIB, 0)
            alloc = vbar.alloc(20 * PAGE)
            self.assertIsNotNone(vbar_fault(alloc))
            vbar_unpin(alloc)
            self.compute.synchronize()
            free = self.device.info.total_bytes - 10 * PAGE
            self.sim.set_outside_bytes(free)
            self.device.refresh()
            self.assertLess(vbar.loaded_size(), 20 * PAGE, nvml_pressure)
            self.sim.set_outside_bytes(0)
            self.device.refresh()
            vbar.close()

    def test_devices_are_opened_all_or_none_and_stay_open(self):
        device = self.device
        self.assertTrue(control.init_device(0))
        self.assertTrue(control.init_devices(index for index in [0]))
        self.assertIs(control.get_devctx(0).device, device)
        with self.logged("ERROR"):
            self.assertFalse(control.init_devices([(0, 7 * MIB), (5, 0)]))
        with self.logged("ERROR"):
            self.assertFalse(control.init_devices(1 // 0 for _ in "x"))
        self.assertEqual([*control.devctxs], [0])
        self.assertEqual(self.context.extra, 0)
        refused(RuntimeError, "device 1 was not opened", control.get_devctx, 1)
        refused(RuntimeError, "device 1 was not opened", ModelVBAR, 1, 1)

    def test_deinit_closes_and_init_opens_again(self):
        vbar = ModelVBAR(MIB, 0)
        self.assertIsNotNone(vbar_fault(vbar.alloc(5)))
        control.deinit()
        self.assertIsNone(control.lib)
        self.assertEqual(dict(control.devctxs), {})
        self.assertIsNone(vbar.fault(vbar.base_addr, 5))
        control.deinit()
        self.sim.close()
        self.open()
        self.assertEqual(control.get_simple_vram_headroom(), 0)

    def test_usage_is_told_and_logged(self):
        vbar = ModelVBAR(64 * MIB, 0)
        self.assertIsNotNone(vbar_fault(vbar.alloc(3 * PAGE)))
        buffer = vram_buffer.VRAMBuffer(1 << 30, 0)
        buffer.get(1)
        self.assertEqual(control.get_total_vram_usage(), 3 * PAGE + 16 * MIB)
        self.assertEqual(model_vbar.vbars_analyze(), 3 * PAGE)
        self.assertEqual(model_vbar.vbars_analyze(0), 3 * PAGE)
        self.assertEqual(model_vbar.vbars_analyze(7), 0)
        with self.logged("INFO") as logged:
            control.analyze()
        self.assertIn("22 MiB of 512 MiB in frames, of these 6 MiB weights", logged.output[0])

    def test_levels_are_those_of_the_logger(self):
        import logging

        logger = logging.getLogger("vbar")
        self.addCleanup(logger.setLevel, logger.level)
        order = "none critical error warning info debug verbose vverbose".split()
        levels = []
        for name in order:
            getattr(control, f"set_log_{name}")()
            levels.append(logger.level)
        self.assertEqual(levels, sorted(set(levels), reverse=True))


class Failures(Case):
    """What fails in the library raises what is documented here, which ``vbar.Error`` is not; what
    another thread closes meanwhile fails nothing.
    """

    def setUp(self):
        super().setUp()
        self.vbar = ModelVBAR(64 * MIB, 0)
        self.alloc = self.vbar.alloc(PAGE)

    def in_the_middle(self, of, name, act):
        """A method that is preceded by an act of another thread, as often as it is called."""
        real = getattr(of, name)

        def raced(*arguments, **named):
            act()
            return real(*arguments, **named)

        return unittest.mock.patch.object(of, name, raced)

    def failing(self, of, name):
        def fail(*_, **__):
            raise vbar_library.DriverError("as told")

        return unittest.mock.patch.object(of, name, fail)

    def test_errors_of_the_library_are_no_runtime_errors_by_themselves(self):
        self.assertFalse(issubclass(vbar_library.Error, RuntimeError))

    def test_one_that_is_closed_meanwhile_is_as_one_that_was(self):
        native = type(self.vbar._bar)
        for method, call, of_closed in (
            ("info", ModelVBAR.loaded_size, 0),
            ("info", ModelVBAR._missing_bytes, 0),
            ("info", ModelVBAR.get_watermark, 0),
            ("residency", ModelVBAR.get_residency, []),
            ("prioritise", ModelVBAR.prioritize, None),
            ("deprioritise", ModelVBAR.deprioritize, None),
            ("set_floor", lambda vbar: vbar.set_watermark_limit(PAGE), None),
            ("set_watermark", lambda vbar: vbar.set_watermark(PAGE), None),
            ("free_memory", lambda vbar: vbar.free_memory(PAGE), 0),
            # Pinned already, and not known by its signature yet.
            ("residency", lambda vbar: vbar_fault((vbar, vbar.base_addr, PAGE)), None),
        ):
            vbar = ModelVBAR(64 * MIB, 0)
            vbar.alloc(2 * PAGE)
            self.assertIsNotNone(vbar.fault(vbar.base_addr + PAGE, PAGE))
            with self.subTest(method), self.in_the_middle(native, method, vbar.close):
                self.assertEqual(call(vbar), of_closed)
                self.assertIsNone(vbar._bar)
            self.assertEqual(call(vbar), of_closed)

    def test_one_that_is_closed_before_its_fault_or_at_a_nodes_end_is_offloaded_quietly(self):
        with self.in_the_middle(_saved._pins, "pin", self.vbar.close):
            self.assertIsNone(vbar_fault(self.alloc))
        vbar = ModelVBAR(64 * MIB, 0)
        with self.logged() as logged:
            with self.in_the_middle(type(vbar._bar), "end_of_run", vbar.close):
                model_vbar.vbars_reset_watermark_limits()
        self.assertIn("the end of a node", "".join(logged.output))
        self.assertEqual([r.levelname for r in logged.records if r.levelno > 20], [])

    def test_a_comparison_of_one_that_is_closed_meanwhile_says_what_it_says(self):
        signature = vbar_fault(self.alloc)
        signature.use.streamed = True
        # Whoever compares has it still.
        saved = self.vbar._saved
        with self.in_the_middle(_saved._pins, "pin", self.vbar.close):
            self.assertFalse(vbar_signature_compare(signature, None))
        self.assertIsNone(self.vbar._saved)
        saved._drop(signature.use.unit)
        self.assertEqual(saved._owed, set())

    def test_a_fault_that_fails_behind_its_pins_keeps_none(self):
        for of, name in ((_saved.Saved, "pin"), (_saved.Saved, "enter")):
            with self.failing(of, name):
                error = refused(RuntimeError, "as told", vbar_fault, self.alloc)
            self.assertIsInstance(error.__cause__, vbar_library.DriverError)
            # The exception is held, which has frames.
            self.assertEqual(self.vbar.get_residency()[0] & 2, 0)
        self.assertIsNotNone(vbar_fault(self.alloc))

    def test_an_unpin_that_fails_gives_its_pins_back(self):
        for of, name in ((_saved.Saved, "before_unpin"), (vbar_comfy_pins, "unpin")):
            self.assertIsNotNone(vbar_fault(self.alloc))
            with self.failing(of, name):
                error = refused(RuntimeError, "as told", vbar_unpin, self.alloc)
            self.assertIsInstance(error.__cause__, vbar_library.DriverError)
            del error
            self.assertEqual(self.vbar.get_residency()[0] & 2, 0)

    def test_an_unpin_needs_no_numbers_of_the_device(self):
        self.assertIsNotNone(vbar_fault(self.alloc))
        self.context.looked_at = 0.0
        with self.failing(type(self.device), "statistics"):
            vbar_unpin(self.alloc)
        self.assertEqual(self.vbar.get_residency()[0] & 2, 0)

    def test_marks_and_numbers_that_fail_raise_runtime_errors(self):
        native, device = type(self.vbar._bar), type(self.device)
        for of, method, call in (
            (native, "info", self.vbar.loaded_size),
            (native, "info", self.vbar.get_watermark),
            (native, "info", model_vbar.vbars_analyze),
            (native, "residency", self.vbar.get_residency),
            (native, "prioritise", self.vbar.prioritize),
            (native, "deprioritise", self.vbar.deprioritize),
            (device, "statistics", control.get_total_vram_usage),
            (device, "statistics", control.analyze),
        ):
            with self.subTest(method), self.failing(of, method):
                refused(RuntimeError, "as told", call)

    def test_a_device_that_is_closed_meanwhile_holds_nothing(self):
        with self.in_the_middle(type(self.device), "statistics", control.deinit):
            self.assertEqual(control.get_total_vram_usage(), 0)
        self.sim.close()
        self.open()
        with self.in_the_middle(type(self.device), "statistics", control.deinit):
            control.analyze()
        self.sim.close()
        self.open()

    def test_a_lost_device_is_no_exception_of_init_devices(self):
        self.sim.lose()
        with self.logged("ERROR"):
            self.assertFalse(control.init_devices([(0, MIB)]))
        self.assertEqual(self.context.extra, 0)
        torch.cuda.streams.clear()

    def test_a_buffer_that_fails_to_unpin_is_closed_all_the_same(self):
        buffer = vram_buffer.VRAMBuffer(1 << 30, 0)
        buffer.get(1)
        before = self.device.statistics().bar_count
        with self.failing(vbar_comfy_pins, "unpin"):
            error = refused(RuntimeError, "as told", buffer.close)
        del error
        self.assertEqual(self.device.statistics().bar_count, before - 1)
        torch.cuda.synchronize()
        self.device.free_memory()
        self.assertEqual(control.get_total_vram_usage(), 0)


class Vbar(Case):
    def fill(self, alloc, data):
        """Writes an allocation as ComfyUI does, and returns the tensor."""
        view = tensors.aimdo_to_tensor(alloc, "cuda:0")
        self.sim.write(view.data_ptr(), data, self.compute)
        return view

    def test_an_allocation_is_the_three_fields(self):
        vbar = ModelVBAR(10 * MIB, 0)
        self.assertEqual((vbar.device, vbar.max_size, vbar.offset), (0, 10 * MIB, 0))
        first, second = vbar.alloc(1000), vbar.alloc(24)
        self.assertEqual(first, (vbar, vbar.base_addr, 1000))
        self.assertEqual(second, (vbar, vbar.base_addr + 1024, 24))
        self.assertIs(type(first), tuple)
        self.assertEqual(vbar.offset, 1048)
        error = refused(MemoryError, "VBAR OOM", vbar.alloc, 10 * MIB)
        self.assertIs(type(error), MemoryError)
        self.assertEqual(vbar.offset, 1048)

    def test_a_signature_is_an_array_that_says_whether_bytes_were_lost(self):
        vbar = ModelVBAR(200 * MIB, 0)
        small, large = vbar.alloc(1000), vbar.alloc(70 * MIB)
        for alloc, length in ((small, 2), (large, 4)):
            one = vbar_fault(alloc)
            self.assertIsInstance(one, ctypes.c_uint32 * length)
            other = vbar.fault(alloc[1], alloc[2])
            self.assertTrue(vbar_signature_compare(one, other))
            self.assertTrue(vbar_signature_compare(bytes(one), other))
        self.assertFalse(vbar_signature_compare(None, one))
        self.assertFalse(vbar_signature_compare(one, None))
        self.assertFalse(vbar_signature_compare(None, None))
        refused(ValueError, "different ranges", vbar_signature_compare, vbar_fault(small), one)
        for _ in range(3):
            vbar_unpin(small)
            vbar_unpin(large)
        self.assertEqual(vbar.free_memory(1e32), vbar_size(71 * MIB))
        vbar.prioritize()
        self.assertFalse(vbar_signature_compare(one, vbar_fault(large)))

    def test_pins_are_counted_and_an_unpin_too_many_takes_nobodys(self):
        vbar = ModelVBAR(64 * MIB, 0)
        one, other = vbar.alloc(1000), vbar.alloc(1000)
        vbar_unpin(None)
        vbar_unpin(one)
        for alloc in (one, one, other):
            self.assertIsNotNone(vbar_fault(alloc))
        vbar_unpin(one)
        for _ in range(3):
            self.assertEqual(vbar.free_memory(1e32), 0)
            vbar_unpin(one)
        # Its neighbour on the same page is pinned still.
        self.assertEqual(vbar.free_memory(1e32), 0)
        self.assertEqual(vbar.get_residency()[0] & 2, 2)
        vbar_unpin(other)
        self.assertEqual(vbar.get_residency()[0] & 2, 0)
        self.assertEqual(vbar.free_memory(1e32), PAGE)

    def test_sizes_saturate_and_free_memory_never_raises(self):
        vbar = ModelVBAR(1e30, 0)
        self.assertEqual(vbar.max_size, 1e30)
        self.assertEqual(vbar.get_nr_pages(), (self.capacity + 256) * MIB // COMFY_PAGE)
        alloc = vbar.alloc(5 * PAGE)
        self.assertIsNotNone(vbar_fault(alloc))
        vbar_unpin(alloc)
        for nothing in (0, -1, -1e30, float("nan")):
            self.assertEqual(vbar.free_memory(nothing), 0)
        self.assertEqual(vbar.free_memory(1), PAGE)
        self.assertEqual(vbar.free_memory(float("inf")), 4 * PAGE)
        vbar.prioritize()
        self.assertIsNotNone(vbar_fault(alloc))
        vbar_unpin(alloc)
        self.sim.lose()
        with self.logged("ERROR"):
            self.assertEqual(vbar.free_memory(1e32), 0)
        refused(RuntimeError, "failed", vbar_fault, vbar.alloc(50 * PAGE))
        with self.logged("ERROR"):
            control.set_simple_vram_headroom(MIB)
        # A lost device has no end of its work to wait for.
        torch.cuda.streams.clear()

    def test_free_memory_says_why_nothing_came(self):
        vbar = ModelVBAR(64 * MIB, 0)
        alloc = vbar.alloc(PAGE)
        with self.logged() as logged:
            vbar.free_memory(1e32)
        self.assertIn("nothing of it is resident", logged.output[-1])
        vbar_fault(alloc)
        with self.logged("WARNING") as logged:
            vbar.free_memory(1e32)
        self.assertIn("1 pages are pinned", logged.output[-1])
        vbar_unpin(alloc)
        vbar.set_watermark_limit(1)
        with self.logged("WARNING") as logged:
            self.assertEqual(vbar.free_memory(1e32), 0)
        self.assertIn("below its watermark limit", logged.output[-1])
        model_vbar.vbars_reset_watermark_limits()
        self.assertEqual(vbar.free_memory(1e32), PAGE)

    def test_the_limit_is_rounded_up_to_pages_and_is_kept_by_free_memory(self):
        vbar = ModelVBAR(64 * MIB, 0)
        alloc = vbar.alloc(8 * PAGE)
        vbar_fault(alloc)
        vbar_unpin(alloc)
        vbar.set_watermark_limit(2 * PAGE + 1)
        self.assertEqual(vbar.free_memory(1e32), 5 * PAGE)
        self.assertEqual(vbar.free_memory(1e32), 0)
        self.assertEqual(vbar.loaded_size(), 3 * PAGE)

    def test_the_watermark_is_told_in_pages_of_32_mib_and_moves(self):
        vbar = ModelVBAR(3 * COMFY_PAGE, 0)
        self.assertEqual((vbar.get_nr_pages(), vbar.get_watermark()), (3, 3))
        alloc = vbar.alloc(3 * COMFY_PAGE)
        self.assertEqual(len(vbar_fault(alloc)), 5)
        self.assertEqual(vbar.get_residency(), [3, 3, 3])
        vbar_unpin(alloc)
        self.assertEqual(vbar.get_residency(), [1, 1, 1])
        vbar.set_watermark(COMFY_PAGE + 1)
        self.assertEqual(vbar.loaded_size(), COMFY_PAGE + PAGE)
        self.assertEqual(vbar.get_watermark(), 1)
        self.assertEqual(vbar.get_residency(), [1, 0, 0])
        self.assertIsNone(vbar_fault(alloc))
        vbar.set_watermark(1e32)
        self.assertIsNotNone(vbar_fault(alloc))
        vbar_unpin(alloc)
        vbar.free_memory(1e32)
        self.assertEqual(vbar.get_watermark(), 0)
        vbar.prioritize()
        self.assertEqual(vbar.get_watermark(), 3)
        self.assertEqual(getattr(vbar, "page_size", None), COMFY_PAGE)

    def test_who_was_prioritized_last_loses_pages_last(self):
        control.set_simple_vram_headroom(self.device.info.total_bytes - 6 * PAGE)
        one, other, third = (ModelVBAR(64 * MIB, 0) for _ in range(3))
        allocs = [vbar.alloc(3 * PAGE) for vbar in (one, other, third)]
        for alloc in allocs[:2]:
            vbar_fault(alloc)
            vbar_unpin(alloc)
        one.prioritize()
        third.prioritize()
        self.assertIsNotNone(vbar_fault(allocs[2]))
        vbar_unpin(allocs[2])
        loaded = [vbar.loaded_size() // PAGE for vbar in (one, other, third)]
        self.assertEqual(loaded, [3, 0, 3])
        third.deprioritize()
        self.assertEqual(third.get_watermark(), 2)
        other.prioritize()
        self.assertIsNotNone(vbar_fault(allocs[1]))
        loaded = [vbar.loaded_size() // PAGE for vbar in (one, other, third)]
        self.assertEqual(loaded, [3, 3, 0])
        vbar_unpin(allocs[1])

    def test_addresses_past_the_reservation_are_offloaded(self):
        vbar = ModelVBAR(1 << 40, 0)
        backed = vbar.get_nr_pages() * COMFY_PAGE
        alloc = vbar.alloc(backed - PAGE)
        beyond, far = vbar.alloc(2 * PAGE), vbar.alloc(1 << 39)
        self.assertEqual(far[1], vbar.base_addr + backed + PAGE)
        for past in (beyond, far, (vbar, vbar.base_addr - 1, 5)):
            self.assertIsNone(vbar_fault(past))
            vbar_unpin(past)
        self.assertEqual(vbar.loaded_size(), 0)
        self.assertIsNotNone(vbar_fault((vbar, alloc[1], PAGE)))

    def test_a_block_tuple_spans_many_modules(self):
        vbar = ModelVBAR(200 * MIB, 0)
        modules = [vbar.alloc(7 * MIB) for _ in range(20)]
        first, last = modules[0], modules[-1]
        block = vbar, first[1], last[1] + last[2] - first[1]
        one = vbar_fault(block)
        self.assertEqual(len(one), 140 * MIB // COMFY_PAGE + 2)
        for module in modules:
            vbar_unpin(module)
        self.assertEqual(vbar.free_memory(1e32), 0)
        vbar_unpin(block)
        self.assertTrue(vbar_signature_compare(one, vbar_fault(block)))
        vbar_unpin(block)
        # A page in the midst of it.
        self.assertEqual(vbar.free_memory(1), PAGE)
        vbar.prioritize()
        self.assertFalse(vbar_signature_compare(one, vbar_fault(block)))
        vbar_unpin(block)
        self.assertIsNotNone(vbar_fault((vbar, first[1], 0)))
        vbar_unpin((vbar, first[1], 0))

    def test_a_bar_without_addresses_runs_and_offloads_all(self):
        self.sim.fail("cuMemAddressReserve", count=None)
        with self.logged("WARNING"):
            one, other = ModelVBAR(64 * MIB, 0), ModelVBAR(64 * MIB, 0)
        self.sim.heal()
        self.assertNotEqual(one.base_addr, other.base_addr)
        for vbar in (one, other):
            alloc = vbar.alloc(PAGE)
            vbar.prioritize()
            vbar.deprioritize()
            vbar.set_watermark_limit(PAGE)
            vbar.set_watermark(PAGE)
            self.assertIsNone(vbar_fault(alloc))
            vbar_unpin(alloc)
            told = vbar.get_nr_pages(), vbar.get_watermark(), vbar.loaded_size()
            self.assertEqual(told, (0, 0, 0))
            self.assertEqual((vbar.get_residency(), vbar.free_memory(1e32)), ([], 0))
        model_vbar.vbars_reset_watermark_limits()
        gc.collect()

    def test_a_card_smaller_than_a_page_of_clients(self):
        self.close()
        self.sim.violations = lambda: []
        self.capacity = -240
        self.open()
        vbar = ModelVBAR(64 * MIB, 0)
        self.assertEqual(vbar.get_nr_pages(), 0)
        self.assertIsNone(vbar_fault(vbar.alloc(5)))

    def test_bytes_stay_until_the_page_is_lost_and_the_tensor_keeps_no_vbar(self):
        vbar = ModelVBAR(64 * MIB, 0)
        alloc, data = vbar.alloc(3 * MIB), pattern(3 * MIB)
        one = vbar_fault(alloc)
        view = self.fill(alloc, data)
        self.assertEqual((view.shape, view.numel(), view.element_size()), ((3 * MIB,), 3 * MIB, 1))
        vbar_unpin(alloc)
        self.assertTrue(vbar_signature_compare(one, vbar_fault(alloc)))
        self.assertEqual(self.sim.read(view.data_ptr(), 3 * MIB, self.compute), data)
        vbar_unpin(alloc)
        gone = weakref.ref(vbar)
        del vbar, alloc
        self.assertIsNone(gone())
        self.assertEqual(self.device.statistics().bar_count, 0)

    def test_an_unpin_covers_the_work_of_the_current_stream(self):
        vbar = ModelVBAR(64 * MIB, 0)
        alloc = vbar.alloc(PAGE)
        vbar_fault(alloc)
        self.fill(alloc, pattern(PAGE))
        self.device.set_wait_timeout(0.05)
        with self.compute.held():
            self.sim.launch_pattern(alloc[1], PAGE, 5, self.compute)
            vbar_unpin(alloc)
            with self.logged("WARNING") as logged:
                self.assertEqual(vbar.free_memory(1e32), 0)
            self.assertIn("still in use", logged.output[-1])
            self.assertEqual(self.device.statistics().used_bytes, PAGE)
        self.compute.synchronize()
        vbar.free_memory(1e32)
        self.assertEqual(self.device.statistics().used_bytes, 0)

    def test_a_fault_takes_no_frame_that_work_still_uses(self):
        # ComfyUI writes on a stream that the fault is not told of: a wait placed on the current one
        # would not order it.
        control.set_simple_vram_headroom(self.device.info.total_bytes - 2 * PAGE)
        old, new = ModelVBAR(64 * MIB, 0), ModelVBAR(64 * MIB, 0)
        used, wanted = old.alloc(2 * PAGE), new.alloc(2 * PAGE)
        vbar_fault(used)
        self.fill(used, pattern(2 * PAGE))
        side = self.stream()
        with self.compute.held():
            self.sim.launch_checksum(used[1], PAGE, used[1] + PAGE, self.compute)
            vbar_unpin(used)
            found = []
            worker = threading.Thread(target=lambda: found.append(vbar_fault(wanted)))
            worker.start()
            worker.join(0.05)
        worker.join()
        # It waited, or gave up: either way this races with nothing.
        if found[0] is not None:
            self.sim.write(wanted[1], pattern(2 * PAGE), side)
            vbar_unpin(wanted)
        else:
            self.assertEqual(self.device.statistics().aliased_page_count, 0)

    def test_faults_from_worker_threads_and_drops_from_any(self):
        bars = [ModelVBAR(256 * MIB, 0) for _ in range(3)]
        allocs = [vbar.alloc(3 * MIB) for vbar in bars for _ in range(8)]
        failed = []

        def work(seed):
            try:
                for at in range(60):
                    alloc = allocs[(seed * 7 + at * 5) % len(allocs)]
                    if vbar_fault(alloc) is not None:
                        vbar_unpin(alloc)
                    if at % 20 == seed:
                        alloc[0].free_memory(5 * PAGE)
                        alloc[0].prioritize()
            except BaseException as error:
                failed.append(error)

        workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.assertEqual(failed, [])
        for vbar in bars:
            self.assertTrue(all(told in (0, 1) for told in vbar.get_residency()))
        dropping = [bars, allocs]
        del bars, vbar, allocs
        worker = threading.Thread(target=dropping.clear)
        worker.start()
        worker.join()
        gc.collect()
        self.compute.synchronize()
        self.device.free_memory()
        self.assertEqual(self.device.statistics().used_bytes, 0)

    def test_pins_of_a_node_that_was_cancelled_go_when_it_runs_again(self):
        vbar = ModelVBAR(64 * MIB, 0)
        alloc = vbar.alloc(PAGE)
        for _ in range(20):
            # Cancelled between fault and unpin.
            self.assertIsNotNone(vbar_fault(alloc))
            model_vbar.vbars_reset_watermark_limits()
        self.assertIsNotNone(vbar_fault(alloc))
        vbar_unpin(alloc)
        self.assertEqual(vbar.free_memory(1e32), PAGE)

    def test_while_a_graph_is_captured_hits_are_kept_for_it_and_nothing_moves(self):
        library, device = vbar_library.load(), ctypes.c_uint64(self.device._id)
        stream, graph = ctypes.c_size_t(self.compute.handle), ctypes.c_uint64()
        vbar = ModelVBAR(64 * MIB, 0)
        there, away = vbar.alloc(PAGE), vbar.alloc(3 * PAGE)
        one = vbar_fault(there)
        self.fill(there, pattern(PAGE))
        vbar_unpin(there)
        torch.cuda.capturing = True
        self.addCleanup(setattr, torch.cuda, "capturing", False)
        begin = library.vbar_sim_stream_begin_capture
        self.assertEqual(begin(device, stream, ctypes.c_uint32(0)), 0)
        self.assertTrue(vbar_signature_compare(one, vbar_fault(there)))
        self.assertIsNone(vbar_fault(away))
        vbar_unpin(there)
        # Nothing of that has broken the capture.
        end = library.vbar_sim_stream_end_capture
        self.assertEqual(end(device, stream, ctypes.byref(graph)), 0)
        torch.cuda.capturing = False
        self.assertEqual(vbar.free_memory(1e32), 0)
        self.assertEqual(library.vbar_sim_graph_destroy(graph), 0)
        # The driver tells on a thread of its own that the graph is gone.
        while vbar.get_residency()[0] & 2:
            time.sleep(0.001)
        self.assertEqual(vbar.free_memory(1e32), PAGE)

    def test_close_is_for_once(self):
        vbar = ModelVBAR(64 * MIB, 0)
        vbar_fault(vbar.alloc(PAGE))
        vbar.close()
        vbar.close()
        self.assertEqual(vbar.loaded_size(), 0)
        self.assertEqual(self.device.statistics().bar_count, 0)

    def test_8_address_space_and_handles_of_a_thousand_bars_come_back(self):
        before = self.sim.live()
        for _ in range(1000):
            vbar = ModelVBAR(1 << 40, 0)
            vbar_fault(vbar.alloc(5))
        del vbar
        self.compute.synchronize()
        self.device.free_memory()
        self.device.trim()
        self.assertEqual(self.sim.live().reservation_count, before.reservation_count)
        self.assertEqual(self.sim.live().frame_count, before.frame_count)


def vbar_size(nbytes):
    return -(-nbytes // PAGE) * PAGE


class Buffers(Case):
    def test_a_buffer_grows_in_chunks_and_never_shrinks(self):
        buffer = vram_buffer.VRAMBuffer(1 << 34, 0)
        self.assertEqual(buffer.size(), 0)
        owner, address, size = buffer.get(5)
        self.assertEqual((owner, size, buffer.size()), (buffer, 5, 16 * MIB))
        self.assertEqual(buffer.get(MIB, 20 * MIB)[1], address + 20 * MIB)
        self.assertEqual(buffer.size(), 32 * MIB)
        buffer.get(1)
        self.assertEqual(buffer.size(), 32 * MIB)
        view = tensors.aimdo_to_tensor(buffer.get(MIB), "cuda:0")
        self.sim.write(view.data_ptr(), pattern(MIB), self.compute)
        self.assertEqual(self.sim.read(view.data_ptr(), MIB, self.compute), pattern(MIB))
        self.assertEqual(self.device.statistics().used_bytes, 32 * MIB)
        # Weights of others never get its memory.
        self.assertEqual(self.device.free_memory().bytes, 0)

    def test_it_takes_memory_of_weights_and_fails_when_there_is_none(self):
        control.set_simple_vram_headroom(self.device.info.total_bytes - 48 * MIB)
        vbar = ModelVBAR(64 * MIB, 0)
        alloc = vbar.alloc(48 * MIB)
        self.assertIsNotNone(vbar_fault(alloc))
        vbar_unpin(alloc)
        self.compute.synchronize()
        buffer = vram_buffer.VRAMBuffer(1 << 34, 0)
        buffer.get(32 * MIB)
        self.assertEqual(vbar.loaded_size(), 16 * MIB)
        refused(RuntimeError, "cannot grow to", buffer.get, 64 * MIB)
        self.assertEqual(buffer.size(), 32 * MIB)
        small = vram_buffer.VRAMBuffer(MIB, 0)
        refused(RuntimeError, "of a buffer of", small.get, 2 * MIB)
        del buffer
        vbar.prioritize()
        self.assertIsNotNone(vbar_fault(alloc))

    def test_once_closed_it_gives_nothing_and_closes_once(self):
        buffer = vram_buffer.VRAMBuffer(1 << 34, 0)
        buffer.get(MIB)
        for _ in range(2):
            buffer.close()
            self.assertEqual(buffer.size(), 0)
            for size in (1, 0, 32 * MIB):
                refused(RuntimeError, "is closed", buffer.get, size)
        self.device.free_memory()
        self.assertEqual(control.get_total_vram_usage(), 0)

    def test_who_gets_while_another_closes_has_memory_or_is_refused(self):
        grow = vram_buffer.VRAMBuffer._grow
        for _ in range(20):
            buffer, ends = vram_buffer.VRAMBuffer(1 << 34, 0), []
            closer = threading.Thread(target=buffer.close)

            def racing(buffer, end, closer=closer):
                # Another thread closes it in the midst of this.
                closer.start()
                time.sleep(0.001)
                grow(buffer, end)
                ends.append(buffer.size())

            with unittest.mock.patch.object(vram_buffer.VRAMBuffer, "_grow", racing):
                self.assertEqual(buffer.get(5)[2], 5)
            closer.join()
            self.assertEqual((ends, buffer.size()), ([16 * MIB], 0))
            refused(RuntimeError, "is closed", buffer.get, 5)
        self.compute.synchronize()
        self.device.free_memory()
        self.assertEqual(control.get_total_vram_usage(), 0)

    def test_it_goes_when_the_work_is_done(self):
        buffer = vram_buffer.VRAMBuffer(1 << 34, 0)
        address = buffer.get(MIB)[1]
        self.sim.launch_sleep(2000, self.compute)
        self.sim.launch_pattern(address, MIB, 3, self.compute)
        del buffer
        self.device.trim()
        self.assertEqual(self.device.statistics().used_bytes, 0)


class Host(Case):
    def write(self, data, name="file"):
        path = self.folder / name
        path.write_bytes(data)
        return path

    def bytes_of(self, buffer):
        return ctypes.string_at(buffer.get_raw_address(), buffer.size)

    def test_a_buffer_grows_where_it_is(self):
        buffer = host_buffer.HostBuffer(0, 8 * MIB, 64 * MIB)
        self.assertEqual((buffer.size, buffer.get_raw_address()), (0, 0))
        first = buffer.extend(1000, register=False)
        second = buffer.extend(size=5 * MIB, register=False)
        self.assertEqual((first, second - first), (buffer.get_raw_address(), 1000))
        self.assertEqual(buffer.size, 5 * MIB + 1000)
        data = pattern(buffer.size)
        ctypes.memmove(first, data, len(data))
        view = tensors.hostbuf_to_tensor(buffer)
        self.assertEqual((view.data_ptr(), view.shape), (first, (buffer.size,)))
        piece = view[1000 : 1000 + 4096]
        piece.untyped_storage()._comfy_hostbuf = buffer
        self.assertIs(piece.untyped_storage()._comfy_hostbuf, buffer)
        self.assertEqual(piece.data_ptr(), second)
        self.assertEqual(bytes(piece.tolist()), data[1000:5096])
        buffer.extend(60 * MIB, register=False)
        self.assertEqual(self.bytes_of(buffer)[: len(data)], data)
        refused(RuntimeError, "beyond", buffer.extend, 20 * MIB)
        self.assertEqual(buffer.size, 65 * MIB + 1000)

    def test_what_is_touched_ahead_holds_up_nobody(self):
        # More pieces than threads wait for the buffer while it waits for the threads.
        buffers = [host_buffer.HostBuffer(0, 64 * MIB, 256 * MIB) for _ in range(2)]
        for buffer in buffers:
            for _ in range(2):
                address = buffer.extend(20 * MIB, register=False)
                ctypes.memset(address + 20 * MIB - 1, 1, 1)
            buffer.truncate(20 * MIB)
            buffer.extend(30 * MIB, register=False)
            buffer.truncate(0)

    def test_memory_is_touched_ahead_while_the_buffer_reads(self):
        buffer = host_buffer.HostBuffer(0, 48 * MIB, 256 * MIB)
        touched, touch = [], _libc.touch

        def slowly(address, nbytes):
            touched.append(address)
            time.sleep(0.001)
            touch(address, nbytes)

        with unittest.mock.patch.object(_libc, "touch", slowly):
            # As whoever reads a file has the buffer's lock.
            with buffer._lock:
                address = buffer.extend(8 * MIB, register=False)
                ahead = set(range(address + 8 * MIB, address + 56 * MIB, 4 * MIB))
                until = time.monotonic() + 60
                while not ahead <= set(touched):
                    self.assertLess(time.monotonic(), until, "memory is not touched ahead")
                    time.sleep(0.001)
            # What is touched is not given back meanwhile, nor touched when it has been.
            for _ in range(20):
                buffer.extend(20 * MIB, register=False)
                buffer.truncate(8 * MIB)
            buffer.extend(20 * MIB, register=False)
            buffer.truncate(0)
            count = len(touched)
            time.sleep(0.02)
            self.assertEqual(len(touched), count, "touched after it was given back")

    def test_a_last_chunk_is_reallocated(self):
        buffer = host_buffer.HostBuffer(0, 0, 64 * MIB)
        buffer.extend(MIB, register=False)
        last = buffer.extend(MIB, register=False)
        self.assertEqual(buffer.extend(3 * MIB, reallocate=True, register=False), last)
        self.assertEqual(buffer.size, 4 * MIB)
        self.assertEqual(buffer.extend(5, reallocate=True, register=True), last)
        self.assertEqual((buffer.size, self.sim.live().locked_bytes), (MIB + 5, 5))
        self.assertEqual(buffer.extend(9, reallocate=True, register=True), last)
        self.assertEqual(self.sim.live().locked_bytes, 9)

    def test_of_no_room_it_is_a_buffer_all_the_same(self):
        for buffer in (host_buffer.HostBuffer(0, 0, 0), host_buffer.HostBuffer()):
            refused(RuntimeError, "beyond", buffer.extend, 1)
            self.assertEqual(tensors.hostbuf_to_tensor(buffer).numel(), 0)
            buffer.truncate(0)
        self.assertEqual(host_buffer.HostBuffer(MIB).size, MIB)
        # A refusal leaves no page behind, and costs nothing.
        huge = host_buffer.HostBuffer(0, 64 * MIB, 1 << 62)
        refused(RuntimeError, "a buffer of", huge.extend, MIB)
        self.assertEqual((huge.size, huge.get_raw_address()), (0, 0))

    def test_scenario_35_truncate_to_the_present_size_is_no_error(self):
        buffer = host_buffer.HostBuffer(0, MIB, 16 * MIB)
        buffer.extend(3 * MIB, register=False)
        buffer.truncate(3 * MIB)
        self.assertEqual(buffer.size, 3 * MIB)
        error = refused(RuntimeError, "cannot keep", buffer.truncate, 3 * MIB + 1)
        self.assertIs(type(error), RuntimeError)
        self.assertEqual(buffer.size, 3 * MIB)
        buffer.truncate(0)
        buffer.truncate(0)
        self.assertEqual((buffer.size, buffer.get_raw_address()), (0, 0))
        refused(RuntimeError, "cannot keep", buffer.truncate, 1)
        # Again with the whole reservation.
        address = buffer.extend(16 * MIB, register=False)
        ctypes.memset(address, 7, 16 * MIB)
        self.assertEqual(buffer.size, 16 * MIB)

    def test_34_a_hundred_cycles_take_no_more_than_the_most_at_a_time(self):
        buffer = host_buffer.HostBuffer(0, 0, 8 * MIB)
        for _ in range(100):
            buffer.extend(3 * MIB)
            buffer.extend(2 * MIB)
            buffer.truncate(3 * MIB)
            buffer.extend(5 * MIB)
            refused(RuntimeError, "beyond", buffer.extend, 1)
            buffer.truncate(0)
        self.assertEqual(self.sim.live().locked_bytes, 0)

    def test_what_was_registered_is_unregistered_by_whoever(self):
        buffer = host_buffer.HostBuffer(0, 0, 64 * MIB)
        runtime = torch.cuda.cudart()
        offsets = []
        for _ in range(3):
            offsets.append(buffer.size)
            address = buffer.extend(size=MIB, register=False)
            self.assertEqual(runtime.cudaHostRegister(address, MIB, 1), 0)
        buffer.extend(MIB)
        self.assertEqual(self.sim.live().locked_bytes, 4 * MIB)
        buffer.truncate(3 * MIB)
        self.assertEqual(self.sim.live().locked_bytes, 3 * MIB)
        buffer.truncate(offsets[2], do_unregister=True)
        self.assertEqual(self.sim.live().locked_bytes, 2 * MIB)
        # One that its owner has unregistered.
        runtime.cudaHostUnregister(buffer.get_raw_address() + offsets[1])
        buffer.truncate(offsets[1], do_unregister=False)
        self.assertEqual(self.sim.live().locked_bytes, MIB)
        # All that is left, by the drop.
        del buffer
        self.assertEqual(self.sim.live().locked_bytes, 0)

    def is_mapped(self, address):
        with open("/proc/self/maps", encoding="ascii") as maps:
            for line in maps:
                start, end = (int(word, 16) for word in line.split()[0].split("-"))
                if start <= address < end:
                    return True
        return False

    def test_what_is_locked_is_unlocked_before_its_device_goes(self):
        buffer = host_buffer.HostBuffer(0, 0, 64 * MIB)
        data = pattern(2 * MIB)
        ctypes.memmove(buffer.extend(MIB), data, MIB)
        address = buffer.extend(MIB, register=False)
        ctypes.memmove(address, data[MIB:], MIB)
        self.assertEqual(torch.cuda.cudart().cudaHostRegister(address, MIB, 1), 0)
        gone = host_buffer.HostBuffer(0, 0, MIB)
        gone.extend(4096)
        del gone
        self.assertEqual(self.sim.live().locked_bytes, 2 * MIB)
        control.deinit()
        self.assertEqual(self.sim.live().locked_bytes, 0)
        # It is memory as before.
        self.assertEqual(self.bytes_of(buffer), data)
        refused(RuntimeError, "no device was opened", buffer.extend, MIB)
        buffer.extend(MIB, register=False)
        del buffer
        self.sim.close()
        self.open()

    def test_memory_that_stays_locked_stays_mapped(self):
        for cut in (0, MIB):
            buffer = host_buffer.HostBuffer(0, 0, 64 * MIB)
            buffer.extend(MIB, register=False)
            address = buffer.extend(MIB)
            self.sim.fail("cuMemHostUnregister", count=None)
            with self.logged("WARNING") as logged:
                buffer.truncate(cut)
            self.sim.heal()
            self.assertIn("stays locked", logged.output[0])
            self.assertEqual(buffer.size, cut)
            self.assertTrue(self.is_mapped(address))
            # The device may still write it.
            ctypes.memset(address, 7, MIB)
            if cut:
                # It is the buffer's still, and goes with it once it can be unlocked.
                self.assertEqual(buffer.extend(2 * MIB, register=False), address)
                buffer.truncate(0)
                self.assertFalse(self.is_mapped(address))
            else:
                # Another time it is other memory.
                self.assertNotEqual(buffer.extend(MIB, register=False), address - MIB)
                self.device.unlock_host(address)
                _libc.release(address - MIB, 64 * MIB)
            self.assertEqual(self.sim.live().locked_bytes, 0)

    def test_memory_that_the_system_does_not_take_fails_nothing(self):
        def fail(*_):
            raise OSError(12, "as told")

        buffer = host_buffer.HostBuffer(0, 0, 64 * MIB)
        buffer.extend(MIB, register=False)
        address = buffer.extend(MIB, register=False)
        with unittest.mock.patch.object(_libc, "decommit", fail):
            buffer.truncate(MIB)
            self.assertEqual(buffer.size, MIB)
            self.assertEqual(buffer.extend(5, register=False), address)
            buffer.extend(1, reallocate=True, register=False)
            self.sim.fail("cuMemHostRegister", count=None)
            error = refused(RuntimeError, "locking", buffer.extend, MIB)
            del error
            self.sim.heal()
            self.assertEqual(buffer.size, MIB + 1)
        ctypes.memset(buffer.extend(8 * MIB, register=False), 3, 8 * MIB)
        real, base = _libc.release, buffer.get_raw_address()
        with unittest.mock.patch.object(_libc, "release", fail):
            with self.logged("WARNING") as logged:
                buffer.truncate(0)
        self.assertIn("stay: ", logged.output[0])
        self.assertEqual((buffer.size, buffer.get_raw_address()), (0, 0))
        real(base, 64 * MIB)
        self.assertEqual(buffer.extend(MIB), buffer.get_raw_address())

    def test_a_chunk_of_another_length_is_locked_as_it_is_told(self):
        buffer, runtime = host_buffer.HostBuffer(0, 0, 64 * MIB), torch.cuda.cudart()
        buffer.extend(MIB, register=False)
        last = buffer.extend(2 * MIB, register=False)
        self.assertEqual(runtime.cudaHostRegister(last, 2 * MIB, 1), 0)
        # Its memory goes in part, and so does the lock that PyTorch has.
        self.assertEqual(buffer.extend(MIB, reallocate=True, register=False), last)
        self.assertEqual(self.sim.live().locked_bytes, 0)
        self.assertEqual(runtime.cudaHostRegister(last, MIB, 1), 0)
        self.assertEqual(buffer.extend(2 * MIB, reallocate=True), last)
        self.assertEqual(self.sim.live().locked_bytes, 2 * MIB)
        refused(RuntimeError, "beyond", buffer.extend, 1 << 40, reallocate=True)
        grow = buffer._grow_to

        def fail(_):
            raise RuntimeError("as told")

        buffer._grow_to = fail
        refused(RuntimeError, "as told", buffer.extend, 3 * MIB, reallocate=True)
        buffer._grow_to = grow
        self.assertEqual(self.sim.live().locked_bytes, 2 * MIB)

    def test_a_chunk_that_is_cut_stays_locked_as_far_as_it_stays(self):
        buffer, runtime = host_buffer.HostBuffer(0, 0, 64 * MIB), torch.cuda.cudart()
        first = buffer.extend(MIB, register=False)
        last = buffer.extend(2 * MIB, register=False)
        for address, size in ((first, MIB), (last, 2 * MIB)):
            self.assertEqual(runtime.cudaHostRegister(address, size, 1), 0)
        buffer.truncate(2 * MIB)
        self.assertEqual(self.sim.live().locked_bytes, 2 * MIB)
        buffer.truncate(MIB)
        self.assertEqual(self.sim.live().locked_bytes, MIB)
        buffer.truncate(0)
        self.assertEqual(self.sim.live().locked_bytes, 0)

    def test_register_and_unregister_by_hand(self):
        buffer = host_buffer.HostBuffer(0, 0, 64 * MIB)
        buffer.extend(8 * MIB, register=False)
        buffer.register(MIB, 2 * MIB)
        self.assertEqual(self.sim.live().locked_bytes, 2 * MIB)
        refused(RuntimeError, "ALREADY_REGISTERED", buffer.register, MIB, MIB)
        buffer.unregister(MIB)
        refused(RuntimeError, "no locked range", buffer.unregister, MIB)
        refused(RuntimeError, "not within", buffer.register, 7 * MIB, 2 * MIB)
        buffer.register(0, 4 * MIB)
        # What stays of a range stays locked.
        buffer.truncate(MIB)
        self.assertEqual(self.sim.live().locked_bytes, MIB)
        self.sim.fail("cuMemHostRegister", count=None)
        refused(RuntimeError, "OUT_OF_MEMORY", buffer.extend, MIB)
        self.sim.heal()
        self.assertEqual(buffer.size, MIB)
        self.assertEqual(buffer.extend(MIB) - buffer.get_raw_address(), MIB)

    def test_a_file_is_read_into_a_buffer_and_on_to_the_device(self):
        data = pattern(10 * MIB + 77)
        path = self.write(data)
        vbar = ModelVBAR(64 * MIB, 0)
        alloc = vbar.alloc(10 * MIB)
        vbar_fault(alloc)
        buffer = host_buffer.HostBuffer(0, 0, 64 * MIB)
        side = self.stream()
        with open(path, "rb") as file:
            buffer.read_file_slice(file, 77, 10 * MIB)
            self.assertEqual(self.bytes_of(buffer), data[77:])
            buffer.truncate(0)
            buffer.extend(12 * MIB)
            buffer.read_file_slice(
                file.fileno(), 5, 9 * MIB, offset=MIB, stream=side.handle, device_ptr=alloc[1],
                device=0,
            )
            self.assertEqual(buffer.size, 12 * MIB)
            found = self.sim.read(alloc[1], 9 * MIB, side)
            self.assertEqual(found, data[5 : 5 + 9 * MIB])
            # No device is the current one.
            for device in ({}, {"device": -1}, {"device": None}):
                buffer.read_file_slice(file, 99, MIB, device_ptr=alloc[1], **device)
                self.assertEqual(self.sim.read(alloc[1], MIB), data[99 : 99 + MIB])
                self.sim.write(alloc[1], bytes(MIB))
            told = {"device_ptr": alloc[1], "device": 3}
            refused(RuntimeError, "was not opened", buffer.read_file_slice, file, 0, 5, **told)
            buffer.read_file_slice(file, 0, 5, offset=0, stream=0, device=None)
            refused(RuntimeError, "the file ends at", buffer.read_file_slice, file, len(data), 1)
        refused(RuntimeError, "Bad file descriptor", buffer.read_file_slice, 999999, 0, 1)
        refused(RuntimeError, "descriptor", buffer.read_file_slice, "path", 0, 1)
        vbar_unpin(alloc)

    def test_file_pages_that_a_buffer_has_too_are_marked_cold_and_stay(self):
        data = pattern(3 * MIB + 77)
        file = os.open(self.write(data), os.O_RDONLY)
        self.addCleanup(os.close, file)
        cooled, cool = [], _libc.cool

        def seen(*told):
            cooled.append(told)
            cool(*told)

        address = vram_buffer.VRAMBuffer(1 << 34, 0)
        target = address.get(3 * MIB)[1]
        with unittest.mock.patch.object(_libc, "cool", seen):
            for mark_cold, count in ((True, 1), (False, 0)):
                buffer = host_buffer.HostBuffer(0, 0, 64 * MIB, mark_cold=mark_cold)
                buffer.read_file_slice(file, 77, 3 * MIB)
                self.assertEqual(self.bytes_of(buffer), data[77:])
                self.assertEqual(cooled, [(file, 77, 3 * MIB)] * count)
                del cooled[:], buffer
                told = file, 5, MIB, self.compute.handle, target, 0
                host_buffer.read_file_to_device(*told, mark_cold=mark_cold)
                self.assertEqual(self.sim.read(target, MIB, self.compute), data[5 : 5 + MIB])
                self.assertEqual(cooled, [(file, 5, MIB)] * count)
                del cooled[:]
            host_buffer.read_file_to_device(*told)
            host_buffer.read_file_to_device(file, 5, 0, 0, target, 0)
            self.assertEqual(cooled, [(file, 5, MIB)])
        # What is cold is there: a read that may not wait for the disk has it.
        found = bytearray(len(data))
        os.preadv(file, [found], 0, os.RWF_NOWAIT)
        self.assertEqual(found, data)

    def test_what_cannot_be_marked_cold_is_left(self):
        advised, real = [], _libc._libc

        class Advising:
            def __getattr__(self, name):
                return getattr(real, name)

            def madvise(self, address, length, advice):
                advised.append((length, advice))
                return real.madvise(address, length, advice)

        file = os.open(self.write(pattern(3 * _libc.PAGE)), os.O_RDONLY)
        self.addCleanup(os.close, file)
        with unittest.mock.patch.object(_libc, "_libc", Advising()):
            _libc.cool(file, _libc.PAGE + 5, _libc.PAGE)
            self.assertEqual(advised[0], (_libc.PAGE + 5, _libc._POPULATE_READ))
            before = advised[1:]
            # Past the end of the file, and no file: nothing is told, nothing raised.
            _libc.cool(file, 8 * _libc.PAGE, 5)
            pipe = os.pipe()
            self.addCleanup(lambda: [os.close(end) for end in pipe])
            _libc.cool(pipe[0], 0, 5)
        self.assertEqual([advice for _, advice in before], [_libc._COLD])
        self.assertEqual(advised[2:], [(5, _libc._POPULATE_READ)])

    def test_a_file_goes_to_the_device_through_the_ring(self):
        data = pattern(9 * MIB + 333)
        path = self.write(data)
        buffer = vram_buffer.VRAMBuffer(1 << 34, 0)
        address = buffer.get(9 * MIB)[1]
        side = self.stream()
        with open(path, "rb") as file:
            read = host_buffer.read_file_to_device
            read(file, 333, 9 * MIB, side.handle, address, 0, mark_cold=False)
            self.assertEqual(self.sim.read(address, 9 * MIB, side), data[333:])
            read(file.fileno(), 1, 8, 0, address, 0)
            self.assertEqual(self.sim.read(address, 8), data[1:9])
            read(file, 0, 0, side.handle, address, 0)
            refused(RuntimeError, "reading bytes", read, file, len(data) - 4, 8, 0, address, 0)
            refused(RuntimeError, "was not opened", read, file, 0, 8, 0, address, 3)
            # After a failure all is well again.
            read(file, 2, 8, side.handle, address, 0)
            self.assertEqual(self.sim.read(address, 8, side), data[2:10])
        host_buffer.cleanup_file_reader()
        self.assertLessEqual(self.device.statistics().locked_ring_bytes, 3 * MIB)

    def test_the_ring_reads_by_threads_too(self):
        self.close()
        self.open(threads=True)
        self.test_a_file_goes_to_the_device_through_the_ring()

    def test_36_a_copy_that_cannot_be_page_locked_is_pageable(self):
        self.close()
        self.open(host_allowance=0)
        self.test_a_file_goes_to_the_device_through_the_ring()

    def test_device_and_host_are_written_to_files(self):
        data = pattern(7 * MIB)
        buffer = vram_buffer.VRAMBuffer(1 << 34, 0)
        address = buffer.get(8 * MIB)[1]
        side = self.stream()
        self.sim.launch_pattern(address, 7 * MIB, 9, side)
        with open(self.folder / "spilled", "w+b") as file:
            host_buffer.write_device_to_file(file, 100, 7 * MIB, side.handle, address, 0)
            self.assertEqual(os.pread(file.fileno(), 7 * MIB, 100), self.sim.pattern(7 * MIB, 9))
            memory = (ctypes.c_char * len(data)).from_buffer_copy(data)
            host_buffer.write_host_to_file(file, 50, len(data), ctypes.addressof(memory))
            self.assertEqual(os.pread(file.fileno(), len(data), 50), data)
        with open(self.folder / "spilled", "rb") as file:
            for write in (
                lambda: host_buffer.write_device_to_file(file, 0, 8, 0, address, 0),
                lambda: host_buffer.write_host_to_file(file, 0, 8, ctypes.addressof(memory)),
            ):
                refused(RuntimeError, "writing", write)

    def test_a_mapping_is_the_file_and_bounces(self):
        data = pattern(3 * MIB + 5)
        path = self.write(data)
        mapping = model_mmap.ModelMMAP(str(path))
        address, descriptor = mapping.get(), mapping.get_file_handle()
        self.assertIs(type(descriptor), int)
        self.assertEqual(os.pread(descriptor, 100, 7), data[7:107])
        self.assertEqual(ctypes.string_at(address, len(data)), data)
        self.assertIs(mapping.bounce(), True)
        self.assertEqual(mapping.get(), address)
        self.assertEqual(ctypes.string_at(address, len(data)), data)
        del mapping
        refused(OSError, "Bad file descriptor", os.fstat, descriptor)
        refused(OSError, "No such file", model_mmap.ModelMMAP, path.with_name("none"))
        empty = model_mmap.ModelMMAP(self.write(b"", "empty"))
        self.assertEqual((empty.get(), empty.bounce()), (0, False))


class Rest(Case):
    def test_an_allocator_for_a_pool_is_made_once(self):
        made = tensors.get_torch_allocator()
        self.assertIs(tensors.get_torch_allocator(), made)
        self.assertIsInstance(made, tensors.CUDAPluggableAllocator)
        hooks = made.allocator().hooks
        told = ctypes.cast(control.lib.alloc_fn, ctypes.c_void_p).value
        self.assertEqual(hooks["malloc"], told)

    def test_a_tensor_by_address(self):
        buffer = vram_buffer.VRAMBuffer(1 << 34, 0)
        address = buffer.get(MIB)[1]
        view = tensors.get_tensor_from_raw_ptr(address, 700, "cuda:0")
        self.assertEqual((view.data_ptr(), view.numel()), (address, 700))
        self.assertEqual(str(view.device), "device('cuda', 0)")

    def test_scopes_of_a_memory_graph_never_break_a_prompt(self):
        graph = control.record(0)
        self.assertIsInstance(graph, malloc_graph.MallocGraph)
        graph._comfy_active = True
        weakref.ref(graph)
        graph.push("step")
        graph.push()
        self.assertIs(graph.pop(), False)
        graph.pause(sync=True)
        graph.resume(sync=True)
        graph.use_stream(5)
        self.assertIs(graph.iterate("step"), False)
        self.assertIs(graph.pop(), False)
        told = graph.peak_used, graph.virtual_bytes, graph.physical_bytes, graph.rogue_count
        self.assertEqual(told, (0, 0, 0, 0))
        with self.logged("WARNING"):
            self.assertIs(graph.pop(), True)
        graph.push()
        graph.abort()
        strict = malloc_graph.record(0, True)
        refused(RuntimeError, "aimdo memory compile error", strict.pop)
        self.assertIs(malloc_graph.record(0, assert_breaks=True).pop.__self__._assert_breaks, True)

    def test_a_disk_is_not_looked_at(self):
        self.assertIsNone(storage.fast_disk("/"))
        self.assertIsNone(storage.fast_disk(None))


if __name__ == "__main__":
    unittest.main()
