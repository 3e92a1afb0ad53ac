"""VBARs whose client saves pages itself: no byte goes before its callback has said so.

The client keeps what it is told to save in a file, as ComfyUI would, and reads it back where a
signature says that a page is lost. Whatever happens, what it reads is what it wrote last.
"""

import os
import random
import threading
import unittest

from comfy_support import COMFY_PAGE, MIB, Case, control, torch
from support import refused

import comfy_aimdo.host_buffer as host_buffer
import comfy_aimdo.model_vbar as model_vbar
import comfy_aimdo.vram_buffer as vram_buffer
from comfy_aimdo.model_vbar import ModelVBAR, vbar_fault, vbar_signature_compare, vbar_unpin


class Spilled:
    """A client: its pages, and the file that it saves them to."""

    def __init__(self, case, pages, answer=True):
        self.case, self.answer = case, answer
        self.side = case.stream()
        self.path = case.folder / f"spilled {id(self)}"
        self.file = open(self.path, "w+b")
        case.addCleanup(self.file.close)
        self.vbar = ModelVBAR(pages * COMFY_PAGE, 0, pageout_callback=self.save)
        self.allocs = [self.vbar.alloc(COMFY_PAGE) for _ in range(pages)]
        self.kept, self.written = [None] * pages, [None] * pages
        self.calls = []

    def save(self, offset, size):
        self.calls.append((offset // COMFY_PAGE, size))
        if isinstance(self.answer, BaseException):
            raise self.answer
        if self.answer in (True, None):
            # On a stream of its own, behind nothing.
            told = offset, size, self.side.handle, self.vbar.base_addr + offset, 0
            host_buffer.write_device_to_file(self.file, *told)
        return self.answer

    def use(self, number, seed=None):
        """Reads a page, or writes it anew; whether it was resident, ``None`` if it is offloaded."""
        alloc, case = self.allocs[number], self.case
        signature = vbar_fault(alloc)
        if signature is None:
            return None
        equal = vbar_signature_compare(signature, self.kept[number])
        if seed is not None:
            case.sim.launch_pattern(alloc[1], COMFY_PAGE, seed, case.compute)
            self.written[number] = seed
        elif not equal:
            told = number * COMFY_PAGE, COMFY_PAGE, case.compute.handle, alloc[1], 0
            host_buffer.read_file_to_device(self.file, *told)
        self.kept[number] = signature
        case.assertEqual(self.word(number), self.expected(number), f"page {number}")
        vbar_unpin(alloc)
        return equal

    def word(self, number):
        return self.case.sim.read(self.allocs[number][1], 64, self.case.compute)

    def expected(self, number):
        return self.case.sim.pattern(COMFY_PAGE, self.written[number])[:64]

    def resident(self):
        return [number for number, bits in enumerate(self.vbar.get_residency()) if bits & 1]


class Paged(Case):
    #: MiB that may be used.
    pages = 4

    def setUp(self):
        super().setUp()
        self.set_pages(self.pages)

    def set_pages(self, count):
        total = self.device.info.total_bytes
        control.set_simple_vram_headroom(total - count * COMFY_PAGE)

    def test_pages_leave_when_others_are_needed_and_come_back_from_the_clients_file(self):
        client = Spilled(self, 6)
        for number in range(4):
            self.assertIs(client.use(number, seed=number + 1), False)
        self.assertEqual((client.calls, client.resident()), ([], [0, 1, 2, 3]))
        # Its own last pages are refused, as any VBAR's are: those before them are kept longer.
        self.assertIsNone(client.use(4))
        other = Spilled(self, 3)
        for number in range(2):
            self.assertIs(other.use(number, seed=50 + number), False)
        self.assertEqual(client.calls, [(3, COMFY_PAGE), (2, COMFY_PAGE)])
        self.assertEqual((client.resident(), other.resident()), ([0, 1], [0, 1]))
        client.vbar.prioritize()
        self.assertIs(client.use(0), True)
        self.assertIs(client.use(3), False)
        self.assertEqual(other.calls, [(1, COMFY_PAGE)])
        self.assertIs(client.use(2), False)
        self.assertEqual(other.resident(), [])
        self.assertLessEqual(control.get_total_vram_usage(), 4 * COMFY_PAGE)

    def test_a_callback_that_refuses_or_raises_keeps_its_page(self):
        client = Spilled(self, 4)
        for number in range(4):
            client.use(number, seed=number + 1)
        for answer in (False, 0, ValueError("full")):
            client.answer, client.calls = answer, []
            other = Spilled(self, 1)
            with self.logged("WARNING") as logged:
                self.assertIsNone(other.use(0))
            words = "full" if isinstance(answer, ValueError) else "at 100663296 are kept"
            self.assertIn(words, logged.output[0])
            with self.logged("WARNING"):
                self.assertEqual(client.vbar.free_memory(1e32), 0)
            error = refused(RuntimeError, "bytes at", client.vbar.set_watermark, COMFY_PAGE)
            del error
            client.vbar.prioritize()
            self.assertEqual(client.resident(), [0, 1, 2, 3])
            self.assertEqual(client.calls[:2], [(3, COMFY_PAGE)] * 2)
            # Those behind the cut are each asked.
            self.assertEqual([at for at, _ in client.calls[2:]], [3, 2, 1])
            other.vbar.close()
        for number in range(4):
            self.assertIs(client.use(number), True)
        # One that says nothing has saved it.
        client.answer = None
        self.assertEqual(client.vbar.free_memory(1), COMFY_PAGE)
        client.vbar.prioritize()
        self.assertIs(client.use(3), False)

    def test_an_interrupt_in_a_callback_keeps_the_page(self):
        client = Spilled(self, 2, KeyboardInterrupt())
        client.use(0, seed=5)
        with self.assertRaises(KeyboardInterrupt):
            client.vbar.set_watermark(0)
        client.vbar.prioritize()
        self.assertIs(client.use(0), True)

    def test_free_memory_goes_down_to_the_limit_and_passes_pins(self):
        client = Spilled(self, 4)
        for number in range(4):
            client.use(number, seed=number + 1)
        self.assertIsNotNone(vbar_fault(client.allocs[3]))
        self.assertEqual(client.vbar.get_residency(), [1, 1, 1, 3])
        client.vbar.set_watermark_limit(1)
        self.assertEqual(client.vbar.free_memory(1e32), 2 * COMFY_PAGE)
        self.assertEqual(client.calls, [(2, COMFY_PAGE), (1, COMFY_PAGE)])
        self.assertEqual(client.resident(), [0, 3])
        self.assertEqual(client.vbar.free_memory(1e32), 0)
        model_vbar.vbars_reset_watermark_limits()
        self.assertEqual(client.vbar.free_memory(1e32), COMFY_PAGE)
        # Above its watermark by now: it goes with its pin.
        client.vbar.set_watermark(COMFY_PAGE)
        self.assertEqual(client.resident(), [3])
        client.answer = False
        error = refused(RuntimeError, "are kept by their client", vbar_unpin, client.allocs[3])
        del error
        self.assertEqual(client.vbar.get_residency()[3], 1)
        client.vbar.prioritize()
        self.assertIsNotNone(vbar_fault(client.allocs[3]))
        client.vbar.set_watermark(COMFY_PAGE)
        client.answer = True
        vbar_unpin(client.allocs[3])
        self.assertEqual((client.resident(), control.get_total_vram_usage()), ([], 0))
        client.vbar.prioritize()
        for number in range(4):
            self.assertIs(client.use(number), False)

    def test_a_callback_comes_behind_all_work_on_its_page(self):
        client = Spilled(self, 1)
        signature = vbar_fault(client.allocs[0])
        self.sim.launch_sleep(20000, self.compute)
        self.sim.launch_pattern(client.allocs[0][1], COMFY_PAGE, 9, self.compute)
        client.kept[0], client.written[0] = signature, 9
        vbar_unpin(client.allocs[0])
        self.assertEqual(client.vbar.free_memory(1e32), COMFY_PAGE)
        self.assertEqual(os.pread(client.file.fileno(), 64, 0), client.expected(0))
        client.vbar.prioritize()
        self.assertIs(client.use(0), False)

    def test_while_a_graph_is_captured_nothing_leaves(self):
        client = Spilled(self, 1)
        client.use(0, seed=4)
        torch.cuda.capturing = True
        self.addCleanup(setattr, torch.cuda, "capturing", False)
        with self.logged("WARNING") as logged:
            self.assertEqual(client.vbar.free_memory(1e32), 0)
        self.assertIn("was not waited for", logged.output[0])
        torch.cuda.capturing = False
        self.assertEqual(client.calls, [])
        self.assertIs(client.use(0), True)

    def test_weights_and_buffers_get_the_pages_of_those_that_rank_below(self):
        client = Spilled(self, 4)
        for number in range(4):
            client.use(number, seed=number + 1)
        weights = ModelVBAR(2 * COMFY_PAGE, 0)
        alloc = weights.alloc(COMFY_PAGE)
        client.vbar.prioritize()
        # It was made the last to lose pages.
        self.assertIsNone(vbar_fault(alloc))
        self.assertEqual(client.calls, [])
        weights.prioritize()
        self.assertIsNotNone(vbar_fault(alloc))
        self.assertEqual(client.calls, [(3, COMFY_PAGE)])
        vbar_unpin(alloc)
        client.vbar.prioritize()
        buffer = vram_buffer.VRAMBuffer(1 << 34, 0)
        buffer.get(3 * COMFY_PAGE)
        self.assertEqual(client.resident(), [0])
        self.assertEqual(weights.loaded_size(), 0)
        client.vbar.deprioritize()
        weights.prioritize()
        self.assertIsNotNone(vbar_fault(alloc))
        self.assertEqual(client.resident(), [])
        vbar_unpin(alloc)

    def test_pressure_takes_pages_at_an_unpin_and_at_the_end_of_a_node(self):
        client = Spilled(self, 4)
        for number in range(4):
            client.use(number, seed=number + 1)
        self.set_pages(3)
        self.context.relieved_at = 0.0
        self.assertIs(client.use(0), True)
        self.assertEqual(client.resident(), [0, 1, 2])
        self.set_pages(1)
        model_vbar.vbars_reset_watermark_limits()
        self.assertEqual(client.resident(), [0])
        self.assertEqual(control.get_total_vram_usage(), COMFY_PAGE)

    def test_a_fault_that_finds_no_memory_leaves_nothing(self):
        client = Spilled(self, 8)
        block = client.vbar, client.vbar.base_addr, 5 * COMFY_PAGE
        self.assertIsNone(vbar_fault(block))
        # Nobody has written what came: others have it without being asked.
        self.assertEqual(client.vbar.get_residency().count(3), 0)
        buffer = vram_buffer.VRAMBuffer(1 << 34, 0)
        buffer.get(4 * COMFY_PAGE)
        buffer.close()
        self.assertEqual(client.calls, [])
        self.set_pages(6)
        client.vbar.prioritize()
        one = vbar_fault(block)
        self.assertEqual(len(one), 7)
        vbar_unpin(block)
        self.assertTrue(vbar_signature_compare(one, vbar_fault(block)))
        vbar_unpin(block)
        # A page of it was lost.
        for number in range(5):
            client.written[number] = 0
            self.sim.launch_pattern(client.allocs[number][1], COMFY_PAGE, 0, self.compute)
        client.vbar.free_memory(1)
        client.vbar.prioritize()
        self.assertFalse(vbar_signature_compare(one, vbar_fault(block)))
        vbar_unpin(block)

    def test_closed_it_drops_its_pages_and_asks_nobody(self):
        for end in ("close", "drop", "deinit"):
            client = Spilled(self, 2)
            client.use(0, seed=1)
            if end == "close":
                client.vbar.close()
                self.assertIsNone(vbar_fault(client.allocs[0]))
                self.assertEqual(client.vbar.get_residency(), [])
            elif end == "drop":
                client.vbar = client.allocs = None
                import gc

                gc.collect()
            if end == "deinit":
                control.deinit()
                self.assertIsNone(vbar_fault(client.allocs[0]))
                self.sim.close()
                self.open()
            self.assertEqual(client.calls, [])
            self.compute.synchronize()
            self.device.free_memory()
            self.assertEqual(control.get_total_vram_usage(), 0)

    def test_pins_of_a_node_that_was_cancelled_go_when_it_runs_again(self):
        client = Spilled(self, 2)
        client.use(0, seed=1)
        for _ in range(5):
            self.assertIsNotNone(vbar_fault(client.allocs[0]))
            model_vbar.vbars_reset_watermark_limits()
        client.use(0)
        self.assertEqual(client.vbar.free_memory(1e32), COMFY_PAGE)

    def test_pages_that_are_larger_than_those_of_clients_are_not_kept(self):
        self.close()
        self.open(page_size=64 * MIB)
        with self.logged("WARNING"):
            vbar = ModelVBAR(64 * MIB, 0, pageout_callback=lambda *_: True)
        self.assertIsNone(vbar_fault(vbar.alloc(5)))

    def test_threads_use_two_clients_at_a_time(self):
        clients, failed = [Spilled(self, 3) for _ in range(2)], []

        def run(client, seed):
            choose = random.Random(seed)
            try:
                for turn in range(12):
                    number = choose.randrange(3)
                    first = client.written[number] is None
                    client.use(number, seed * 100 + turn if first or choose.random() < 0.3 else None)
                    if choose.random() < 0.3:
                        client.vbar.prioritize()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=told) for told in zip(clients, (1, 2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failed, [])


if __name__ == "__main__":
    unittest.main()
