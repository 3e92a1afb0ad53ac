"""What ComfyUI wrote into a VBAR comes back by itself: kept in page-locked memory, brought ahead.

The client here is told what ComfyUI is told and does what it does: it writes where a comparison
says that the bytes are not there, patches, cancels, switches. At each use a kernel reads the bytes,
and what it read must be what was written last; the device, which knows of every race, sees none.
"""

import dataclasses
import os
import random
import threading
import time
import unittest
import unittest.mock

from comfy_support import MIB, PAGE, Case, control
from support import refused

import comfy_aimdo.model_vbar as model_vbar
import comfy_aimdo.vram_buffer as vram_buffer
from vbar import Cancelled, DriverError, PageState, Reason, TimedOut
from vbar._guard import Pins
from vbar.comfy import _devices, _idle, _saved

IN_FRAMES = (PageState.ISSUED, PageState.RESIDENT)


class Weight:
    """A module of a client: where it is, what it kept, and what its bytes should be."""

    def __init__(self, bar, nbytes, seed):
        self.alloc = bar.alloc(nbytes)
        self.nbytes, self.seed = nbytes, seed
        self.kept, self.stored = None, None

    @property
    def address(self):
        return self.alloc[1]


class Client:
    """What ComfyUI does, on a stream that computes and one that copies."""

    def __init__(self, case):
        self.case, self.sim = case, case.sim
        self.offload = case.stream()
        self.results = case.device.create_bar(PAGE)
        self.results.set_class(1 << 30)
        self.words = self.results.fault(0, PAGE, case.compute)
        self.uses, self.spent = [], None
        self.counts = {"hit": 0, "written": 0, "none": 0}
        self.sim.write(self.words.address, bytes(PAGE), case.compute)

    def use(self, weight, unpin=True):
        """One layer; whether its bytes were there."""
        signature = model_vbar.vbar_fault(weight.alloc)
        equal = model_vbar.vbar_signature_compare(signature, weight.kept)
        if signature is None:
            self.counts["none"] += 1
            return None
        if not equal:
            self.write(weight)
            weight.kept = signature
        self.counts["hit" if equal else "written"] += 1
        self.read(weight)
        if unpin:
            model_vbar.vbar_unpin(weight.alloc)
        return equal

    def write(self, weight):
        """By kernels: bytes that no file has."""
        self.offload.wait_for(self.case.compute)
        self.sim.launch_pattern(weight.address, weight.nbytes, weight.seed, self.offload)
        self.case.compute.wait_for(self.offload)
        weight.stored = weight.seed

    def read(self, weight):
        word = self.words.address + 8 * len(self.uses)
        self.sim.launch_checksum(weight.address, weight.nbytes, word, self.case.compute)
        self.uses.append((weight.nbytes, weight.stored))
        if len(self.uses) == 512:
            self.check()

    def check(self):
        """What the kernels have read."""
        found = self.sim.read(self.words.address, 8 * len(self.uses) or 8, self.case.compute)
        for at, told in enumerate(self.uses):
            word = int.from_bytes(found[8 * at : 8 * at + 8], "little")
            self.case.assertEqual(word, self.sum_of(*told), f"use {at}: {told}")
        self.uses = []
        self.sim.write(self.words.address, bytes(4096), self.case.compute)

    def sum_of(self, nbytes, seed):
        known = self.case.sums
        if (nbytes, seed) not in known:
            known[nbytes, seed] = self.sim.checksum(self.sim.pattern(nbytes, seed))
        return known[nbytes, seed]

    def node(self):
        self.offload.synchronize()
        self.check()
        model_vbar.vbars_reset_watermark_limits()

    def steps(self, weights, count=1):
        """Passes over weights; how their uses came out."""
        before = dict(self.counts)
        for _ in range(count):
            for weight in weights:
                self.use(weight)
        return {name: count - before[name] for name, count in self.counts.items()}

    def close(self):
        self.check()
        self.words.close()
        self.results.close()


class Saving(Case):
    #: Pages that weights may have, beside one of the test.
    pages = 6

    def setUp(self):
        self.sums = {}
        super().setUp()

    def start(self, pages=None, **options):
        """The device anew, with a budget."""
        self.close()
        self.open(**options)
        total = self.device.info.total_bytes
        control.set_simple_vram_headroom(total - (1 + (pages or self.pages)) * PAGE)
        client = Client(self)
        return client

    def model(self, sizes, seed=1):
        bar = model_vbar.ModelVBAR(10 * sum(sizes), 0)
        bar.prioritize()
        return bar, [Weight(bar, size, seed + at) for at, size in enumerate(sizes)]

    def locked(self):
        return self.device.statistics().locked_saved_bytes

    def settle(self, client, weights, passes=6):
        """Passes until nothing is written."""
        for _ in range(passes):
            came = client.steps(weights)
            client.node()
            if came == {"hit": len(weights), "written": 0, "none": 0}:
                return
        self.fail(f"still {came}")


class Steady(Saving):
    def test_all_that_does_not_stay_comes_back_without_a_copy_of_the_client(self):
        client = self.start()
        bar, weights = self.model([PAGE] * 12)
        self.settle(client, weights)
        misses = self.device.statistics().miss_count
        came = client.steps(weights, 5)
        self.assertEqual(came, {"hit": 60, "written": 0, "none": 0})
        self.assertGreaterEqual(self.device.statistics().miss_count - misses, 5 * 6)
        self.assertGreaterEqual(bar._saved.saved_bytes(), 6 * PAGE)
        client.close()

    def test_without_it_the_rest_is_offloaded(self):
        client = self.start()
        _saved.is_on, before = False, _saved.is_on
        self.addCleanup(setattr, _saved, "is_on", before)
        bar, weights = self.model([PAGE] * 12)
        for _ in range(3):
            client.steps(weights)
            client.node()
        self.assertEqual(client.steps(weights), {"hit": 6, "written": 0, "none": 6})
        self.assertEqual((bar._saved.saved_bytes(), self.locked()), (0, 0))
        client.close()

    def test_no_allowance_is_as_without(self):
        for allowance in (0, "1M"):
            client = self.start(host_allowance=allowance)
            _, weights = self.model([PAGE] * 12)
            for _ in range(3):
                client.steps(weights)
                client.node()
            came = client.steps(weights)
            self.assertEqual(came, {"hit": 6, "written": 0, "none": 6}, allowance)
            client.close()

    def test_a_small_allowance_saves_some(self):
        client = self.start(host_allowance="12M", staging_slots=1)
        bar, weights = self.model([PAGE] * 12)
        for _ in range(6):
            client.steps(weights)
            client.node()
        came = client.steps(weights, 2)
        self.assertGreater(came["hit"], 2 * 6)
        self.assertGreater(came["none"] + came["written"], 0)
        self.assertGreater(bar._saved.saved_bytes(), 0)
        self.assertLessEqual(self.device.statistics().locked_bytes, 12 * MIB)
        client.close()

    def test_what_fits_is_never_saved(self):
        client = self.start(pages=16)
        bar, weights = self.model([PAGE] * 12)
        for _ in range(4):
            client.steps(weights)
            client.node()
        bar.free_memory(1e32)
        client.steps(weights, 3)
        self.assertEqual((bar._saved.saved_bytes(), self.locked()), (0, 0))
        client.close()

    def test_units_share_pages(self):
        client = self.start()
        _, weights = self.model([PAGE // 3 + 512 * n for n in range(30)] + [3 * PAGE - 8] * 3)
        self.settle(client, weights, 10)
        self.assertEqual(client.steps(weights, 3)["written"], 0)
        client.close()

    def test_ahead_of_need_in_the_order_that_was_learned(self):
        client = self.start(threads=True)
        bar, weights = self.model([PAGE] * 12)
        hits = {}
        for _ in range(40):
            for weight in weights:
                client.use(weight)
                self.sim.launch_sleep(300, self.compute)
                self.compute.synchronize()
            client.node()
        before = self.device.statistics()
        came = client.steps(weights, 0)
        for _ in range(4):
            for weight in weights:
                hits[client.use(weight)] = True
                self.sim.launch_sleep(2000, self.compute)
                self.compute.synchronize()
        told = self.device.statistics()
        self.assertEqual([*hits], [True])
        self.assertGreater(told.engine_plan_count, 0)
        self.assertGreater(told.ahead_page_count, before.ahead_page_count)
        self.assertGreater(told.engine_planned_page_count, told.engine_kept_page_count)
        self.assertEqual(came["none"], 0)
        client.close()


class Changes(Saving):
    def test_a_patch_is_kept_as_it_was_written_and_another_one_replaces_it(self):
        client = self.start()
        _, weights = self.model([PAGE] * 12)
        self.settle(client, weights)
        for weight in weights[::2]:
            weight.kept, weight.seed = None, weight.seed + 1000
        came = client.steps(weights)
        self.assertEqual((came["none"], came["written"]), (0, 6))
        client.node()
        self.settle(client, weights)
        self.assertEqual(client.steps(weights, 3), {"hit": 36, "written": 0, "none": 0})
        client.close()

    def test_a_cancel_between_fault_and_write_leaves_nothing_wrong(self):
        client = self.start()
        _, weights = self.model([PAGE] * 12)
        self.settle(client, weights)
        for weight in weights:
            weight.kept, weight.seed = None, weight.seed + 7
        for weight in weights[:3]:
            signature = model_vbar.vbar_fault(weight.alloc)
            self.assertFalse(model_vbar.vbar_signature_compare(signature, weight.kept))
        # The half of one is written; one is unpinned, the others are not.
        half = weights[1]
        self.sim.launch_pattern(half.address, half.nbytes // 2, half.seed, self.compute)
        model_vbar.vbar_unpin(half.alloc)
        client.node()
        self.settle(client, weights)
        client.close()

    def test_an_interrupt_behind_a_save_leaves_none_that_nobody_knows_of(self):
        client = self.start()
        bar, weights = self.model([PAGE] * 12)
        kind, interrupted = type(bar._bar), []
        save = kind.save

        def interrupting(*arguments):
            save(*arguments)
            if not interrupted:
                interrupted.append(arguments)
                raise KeyboardInterrupt

        with unittest.mock.patch.object(kind, "save", interrupting):
            with self.assertRaises(KeyboardInterrupt):
                client.steps(weights, 6)
        # It is saved at its next use, as any other.
        self.settle(client, weights)
        client.close()

    def test_who_does_not_compare_may_have_written(self):
        client = self.start()
        bar, weights = self.model([PAGE] * 12)
        self.settle(client, weights)
        one = next(w for w in weights if bar._saved._unit((w.address - bar.base_addr, PAGE)).saved)
        one.seed += 99
        signature = model_vbar.vbar_fault(one.alloc)
        self.sim.launch_pattern(one.address, one.nbytes, one.seed, self.compute)
        one.stored, one.kept = one.seed, signature
        model_vbar.vbar_unpin(one.alloc)
        client.steps(weights, 3)
        client.node()
        client.steps(weights, 3)
        client.close()

    def test_nothing_is_saved_while_another_use_may_write(self):
        client = self.start()
        bar, weights = self.model([PAGE] * 12)
        self.settle(client, weights)
        one = weights[-1]
        one.kept, one.seed = None, one.seed + 50
        first = model_vbar.vbar_fault(one.alloc)
        self.assertFalse(model_vbar.vbar_signature_compare(first, one.kept))
        second = model_vbar.vbar_fault(one.alloc)
        self.assertTrue(model_vbar.vbar_signature_compare(second, first))
        # The second one's pins are given back, and the first one writes.
        model_vbar.vbar_unpin(one.alloc)
        client.write(one)
        one.kept = first
        client.read(one)
        model_vbar.vbar_unpin(one.alloc)
        client.steps(weights, 3)
        client.close()

    def test_who_writes_comes_after_all_uses_of_the_frames(self):
        client = self.start()
        bar, weights = self.model([PAGE] * 12)
        self.settle(client, weights)
        saved = bar._saved
        pages = bar._bar.residency(0, 12)
        away = next(n for n in range(12) if pages[n].state not in IN_FRAMES)
        one, unit = weights[away], saved._unit((away * PAGE, PAGE))
        self.assertTrue(unit.saved)
        bar.prioritize()
        # Frames are in use for a while, by who reads other weights.
        self.sim.launch_sleep(30000, self.compute)
        for n in range(12):
            if pages[n].state in IN_FRAMES:
                client.use(weights[n])
        pin, dropped = _saved._pins.pin, []

        def racing(*arguments, **keywords):
            # Another thread's drop, in between.
            if not keywords.get("written", True) and not dropped:
                dropped.append(saved._drop(unit))
            return pin(*arguments, **keywords)

        with unittest.mock.patch.object(_saved._pins, "pin", racing):
            signature = model_vbar.vbar_fault(one.alloc)
        self.assertEqual(dropped, [None])
        self.assertIsNotNone(signature)
        self.assertFalse(model_vbar.vbar_signature_compare(signature, one.kept))
        # On a stream that is behind none of those uses.
        self.sim.launch_pattern(one.address, one.nbytes, one.seed, client.offload)
        self.compute.wait_for(client.offload)
        one.kept = signature
        client.read(one)
        model_vbar.vbar_unpin(one.alloc)
        client.close()

    def test_two_models_in_turn(self):
        client = self.start()
        _, first = self.model([PAGE] * 9)
        _, second = self.model([PAGE] * 8, 500)
        for _ in range(4):
            for bar_weights in (first, second):
                client.steps(bar_weights, 3)
                client.node()
        self.settle(client, first)
        self.settle(client, second)
        client.close()

    def test_a_buffer_takes_frames_of_what_streams(self):
        client = self.start(pages=14)
        _, weights = self.model([PAGE] * 20)
        self.settle(client, weights)
        buffer = vram_buffer.VRAMBuffer(64 * MIB, 0)
        buffer.get(2 * PAGE)
        client.steps(weights, 2)
        client.node()
        buffer.close()
        self.settle(client, weights)
        client.close()

    def test_free_memory_frees_and_what_was_saved_comes_back(self):
        client = self.start()
        bar, weights = self.model([PAGE] * 12)
        self.settle(client, weights)
        self.assertGreater(bar.free_memory(1e32), 0)
        self.assertEqual(bar.loaded_size(), 0)
        came = client.steps(weights)
        self.assertEqual(came["none"], 0)
        self.settle(client, weights)
        client.close()

    def test_a_watermark_that_is_set_holds(self):
        client = self.start()
        bar, weights = self.model([PAGE] * 12)
        self.settle(client, weights)
        bar.set_watermark(3 * PAGE)
        came = client.steps(weights, 2)
        self.assertEqual(came["none"], 2 * 9)
        bar.prioritize()
        self.settle(client, weights)
        bar.set_watermark_limit(2 * PAGE)
        bar.free_memory(1e32)
        self.assertEqual(bar.loaded_size(), 2 * PAGE)
        client.close()

    def test_what_stays_needs_no_copy(self):
        client = self.start()
        bar, weights = self.model([PAGE] * 12)
        self.settle(client, weights)
        control.set_simple_vram_headroom(0)
        bar.prioritize()
        for _ in range(8):
            client.steps(weights, 2)
            client.node()
        self.assertEqual(bar._saved.saved_bytes(), 0)
        self.device.trim_host()
        self.assertEqual(self.locked(), 0)
        client.close()

    def test_where_memory_is_short_the_first_to_go_gives_way(self):
        client = self.start()
        one, first = self.model([PAGE] * 9)
        other, second = self.model([PAGE] * 9, 500)
        for _ in range(3):
            client.steps(first, 2)
            client.steps(second, 2)
            client.node()
        before = one._saved.saved_bytes(), other._saved.saved_bytes()
        self.assertGreater(min(before), 0)
        other.deprioritize()
        told, real = self.device.statistics(), type(self.device).statistics
        # As one bar, the one that goes first, sees it.
        seen = [dataclasses.replace(told, locked_excess_bytes=1)]

        def statistics(device):
            return seen.pop() if seen else real(device)

        with unittest.mock.patch.object(type(self.device), "statistics", statistics):
            client.node()
        self.assertEqual(other._saved.saved_bytes(), 0)
        self.assertEqual(one._saved.saved_bytes(), before[0])
        client.steps(first, 2)
        client.steps(second, 2)
        client.close()

    def test_what_the_first_to_go_gave_is_asked_of_no_other(self):
        client = self.start()
        one, first = self.model([PAGE] * 9)
        other, second = self.model([PAGE] * 9, 500)
        for _ in range(3):
            client.steps(first, 2)
            client.steps(second, 2)
            client.node()
        client.steps(first)
        before = one._saved.saved_bytes()
        self.assertGreater(min(before, other._saved.saved_bytes()), 0)
        other.deprioritize()
        # As long as windows are not given back what is dropped is held.
        told = dataclasses.replace(self.device.statistics(), locked_excess_bytes=PAGE)
        with unittest.mock.patch.object(type(self.device), "statistics", lambda _: told):
            self._context_looks_now()
            one._saved._look()
        self.assertEqual(other._saved.saved_bytes(), 0)
        self.assertEqual(one._saved.saved_bytes(), before)
        client.close()

    def test_where_memory_gets_short_copies_go_in_the_middle_of_a_node(self):
        client = self.start(threads=True)
        bar, weights = self.model([PAGE] * 12)
        self.settle(client, weights)
        self.assertGreater(bar._saved.saved_bytes(), 0)
        real = type(self.device).statistics

        def statistics(device):
            told = real(device)
            return dataclasses.replace(told, locked_excess_bytes=told.locked_saved_bytes)

        with unittest.mock.patch.object(type(self.device), "statistics", statistics):
            client.steps(weights[:1])
            # It looks now and then: not at each use.
            self._context_looks_now()
            came = client.steps(weights)
            self.assertLess(came["hit"], len(weights), "some have lost their bytes")
            self._context_looks_now()
            client.steps(weights)
            self.assertEqual(bar._saved.saved_bytes(), 0)
            self.assertEqual(client.steps(weights)["none"], 6)
        # Nothing more in this node; the library's thread has given the memory back by itself.
        client.steps(weights)
        self.assertEqual(bar._saved.saved_bytes(), 0)
        end = time.monotonic() + 60
        while self.locked() and time.monotonic() < end:
            time.sleep(0.01)
        self.assertEqual(self.locked(), 0)
        client.node()
        self.settle(client, weights)
        self.assertGreater(bar._saved.saved_bytes(), 0)
        client.close()

    def _context_looks_now(self):
        _devices.get(0).looked_at = 0.0

    def test_of_a_weight_that_stays_in_part_only_the_rest_is_kept(self):
        client = self.start(pages=10)
        bar, weights = self.model([4 * PAGE] * 5)
        self.settle(client, weights)
        for _ in range(6):
            client.steps(weights, 3)
            client.node()
        # A plan of the engine's would do the same: these pages stay in place of others.
        bar.set_watermark_limit(2 * PAGE)
        for _ in range(6):
            self.assertEqual(client.steps(weights, 3)["none"], 0)
            client.node()
            bar.set_watermark_limit(2 * PAGE)
        pages = bar._bar.residency(0, 20)
        pieces = [piece for unit in bar._saved._units.values() for piece in unit.pieces]
        kept = [at for at, piece in enumerate(pieces) if not piece.saved]
        self.assertGreaterEqual(len(kept), 2)
        self.assertTrue(all(pages[at].state in IN_FRAMES for at in kept), kept)
        self.assertTrue(any(unit.saved and not all(p.saved for p in unit.pieces)
                            for unit in bar._saved._units.values()))  # fmt: skip
        self.assertEqual(bar._saved.saved_bytes(), (20 - len(kept)) * PAGE)
        came = client.steps(weights, 2)
        self.assertEqual((came["written"], came["none"]), (0, 0))
        client.close()

    def test_what_has_lost_its_rest_is_written_in_the_order_that_was_learned(self):
        client = self.start(pages=14, threads=True)
        bar, weights = self.model([6 * PAGE] * 3)
        for _ in range(40):
            client.steps(weights, 4)
            client.node()
            # Some pages stay, and have no copies after a while.
            if bar._saved.saved_bytes() < sum(weight.nbytes for weight in weights):
                break
        self.assertGreater(bar._saved.saved_bytes(), 0)
        self.assertLess(bar._saved.saved_bytes(), sum(weight.nbytes for weight in weights))
        before = self.device.statistics()
        # For a moment there are fewer frames.
        total = self.device.info.total_bytes
        for pages in (6, 14):
            control.set_simple_vram_headroom(total - (1 + pages) * PAGE)
            self.device.refresh()
        came = client.steps(weights, 6)
        client.node()
        told = self.device.statistics()
        self.assertGreater(came["written"], 0)
        self.assertEqual(came["none"], 0)
        # A fault more would be another order, and the engine would learn it anew.
        self.assertEqual(told.engine_departure_count, before.engine_departure_count)
        client.close()

    def test_closed_in_the_middle_of_its_fills(self):
        client = self.start()
        bar, weights = self.model([PAGE] * 12)
        self.settle(client, weights)
        with self.compute.held():
            for weight in weights[:2]:
                model_vbar.vbar_fault(weight.alloc)
            bar.close()
            self.assertIsNone(model_vbar.vbar_fault(weights[0].alloc))
        del bar, weights
        client.close()
        self.compute.synchronize()
        self.device.free_memory()
        self.device.trim()
        self.device.trim_host()
        self.assertEqual(self.locked(), 0)

    def test_while_a_graph_is_captured_nothing_comes(self):
        client = self.start()
        bar, weights = self.model([PAGE] * 12)
        self.settle(client, weights)
        resident = [page.state in IN_FRAMES for page in bar._bar.residency(0, 12)]
        self.assertIn(False, resident)
        before = _saved._devices.is_capturing
        self.addCleanup(setattr, _saved._devices, "is_capturing", before)
        _saved._devices.is_capturing = lambda: True
        for weight, there in zip(weights, resident):
            signature = model_vbar.vbar_fault(weight.alloc)
            self.assertEqual(signature is not None, there)
            model_vbar.vbar_signature_compare(signature, weight.kept)
            model_vbar.vbar_unpin(weight.alloc)
        _saved._devices.is_capturing = before
        client.close()

    def test_blocks_of_modules_keep_their_signature_while_their_parts_come_back(self):
        client = self.start()
        bar, weights = self.model([PAGE // 2] * 24)
        self.settle(client, weights)
        kept = {}
        for turn in range(6):
            for at in range(0, 24, 4):
                part = weights[at : at + 4]
                for weight in part:
                    client.use(weight, unpin=False)
                first, last = part[0].alloc, part[-1].alloc
                block = bar, first[1], last[1] + last[2] - first[1]
                signature = model_vbar.vbar_fault(block)
                same = model_vbar.vbar_signature_compare(signature, kept.get(at))
                if turn > 2:
                    self.assertTrue(same)
                kept[at] = signature
                model_vbar.vbar_unpin(block)
                for weight in part:
                    model_vbar.vbar_unpin(weight.alloc)
            client.node()
        client.close()

    def test_threads_fault_at_a_time(self):
        client = self.start(pages=10)
        _, weights = self.model([PAGE] * 16)
        failed = []

        def run(own):
            try:
                for _ in range(12):
                    for weight in own:
                        signature = model_vbar.vbar_fault(weight.alloc)
                        if not model_vbar.vbar_signature_compare(signature, weight.kept):
                            if signature is None:
                                continue
                            self.sim.launch_pattern(
                                weight.address, weight.nbytes, weight.seed, self.compute
                            )
                            weight.kept, weight.stored = signature, weight.seed
                        found = self.sim.read(weight.address, 64, self.compute)
                        if found != self.sim.pattern(64, weight.stored):
                            failed.append(weight.address)
                        model_vbar.vbar_unpin(weight.alloc)
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=[weights[n::3]]) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failed, [])
        client.close()


class Waits(Saving):
    """Work that is stuck, or a wait that is cancelled: nobody writes what a copy may be using."""

    def start(self, **options):
        client = super().start(**options)
        self.bar, self.weights = self.model([PAGE] * 12)
        self.settle(client, self.weights)
        self.saved = self.bar._saved
        return client

    def unit_of(self, weight):
        return self.saved._unit((weight.address - self.bar.base_addr, weight.nbytes))

    def faulted_anew(self, client):
        """A weight that was patched, and has its pins still."""
        one = next(weight for weight in self.weights if self.unit_of(weight).saved)
        one.kept, one.seed = None, one.seed + 100
        self.assertFalse(client.use(one, unpin=False))
        return one

    def unpin_while_held(self, one):
        """The copy of it is enqueued behind work that does not end."""
        model_vbar.vbar_unpin(one.alloc)
        self.assertTrue(self.unit_of(one).saved)

    def check_refused(self, signature, words):
        """It is compared with nothing, and differs."""
        compare = model_vbar.vbar_signature_compare
        return refused(RuntimeError, words, compare, signature, None)

    def check_written_anew(self, client, one, signature):
        """A fault says that its bytes are gone: they may be written, and are saved again."""
        one.seed += 100
        self.assertFalse(model_vbar.vbar_signature_compare(signature, None))
        one.kept = signature
        self.check_written_at_once(client, one)

    def check_written_at_once(self, client, one):
        """On a stream that is behind nothing: a copy that is under way is seen by the device."""
        self.sim.launch_pattern(one.address, one.nbytes, one.seed, client.offload)
        self.compute.wait_for(client.offload)
        one.stored = one.seed
        client.read(one)
        model_vbar.vbar_unpin(one.alloc)
        client.node()
        self.settle(client, self.weights)
        client.close()

    def check_refused_until_done(self, client, begin, kind):
        one = self.faulted_anew(client)
        with self.compute.held():
            self.unpin_while_held(one)
            signature = model_vbar.vbar_fault(one.alloc)
            one.seed += 100
            end = begin()
            error = self.check_refused(signature, "may not be written yet")
            self.assertIsInstance(error.__cause__, kind)
            # Nor the next time, as long as that work does not end.
            self.check_refused(signature, "may be under way")
            end()
        # It is pinned as it was, and only its copy is gone.
        at = (one.address - self.bar.base_addr) // PAGE
        self.assertEqual(self.bar._bar.residency(at, 1)[0].pin_count, 1)
        self.assertFalse(self.unit_of(one).saved)
        self.assertFalse(model_vbar.vbar_signature_compare(signature, None))
        one.kept = signature
        self.check_written_at_once(client, one)

    def test_who_compares_may_not_write_before_a_copy_is_done(self):
        client = self.start()

        def begin():
            self.device.set_wait_timeout(0.05)
            return lambda: self.device.set_wait_timeout(30)

        self.check_refused_until_done(client, begin, TimedOut)

    def test_nor_when_the_wait_is_cancelled(self):
        client, over = self.start(), threading.Event()

        def cancel():
            while not over.wait(0.005):
                self.device.cancel_waits()

        def begin():
            thread = threading.Thread(target=cancel)
            thread.start()

            def end():
                over.set()
                thread.join()

            self.addCleanup(end)
            return end

        self.check_refused_until_done(client, begin, Cancelled)

    def test_a_wait_that_failed_for_another_is_made_up_for_by_who_faults_next(self):
        client = self.start()
        one = self.faulted_anew(client)
        self.device.set_wait_timeout(0.05)
        with self.compute.held():
            self.unpin_while_held(one)
            # Whoever drops it writes nothing, and is told nothing.
            self.saved.set_cut(0)
            self.saved.set_cut(None)
            self.assertFalse(self.unit_of(one).saved)
            self.assertIsNone(model_vbar.vbar_fault(one.alloc))
        self.device.set_wait_timeout(30)
        signature = model_vbar.vbar_fault(one.alloc)
        self.check_written_anew(client, one, signature)

    def test_an_interrupt_of_a_wait_is_no_end_of_the_copy(self):
        client = self.start()
        one = self.faulted_anew(client)
        kind, drop = type(self.bar._bar), type(self.bar._bar).drop_save

        def interrupted(*arguments):
            try:
                drop(*arguments)
            except TimedOut:
                raise KeyboardInterrupt from None

        self.device.set_wait_timeout(0.05)
        with self.compute.held():
            self.unpin_while_held(one)
            signature = model_vbar.vbar_fault(one.alloc)
            with unittest.mock.patch.object(kind, "drop_save", interrupted):
                with self.assertRaises(KeyboardInterrupt):
                    model_vbar.vbar_signature_compare(signature, None)
            self.check_refused(signature, "may be under way")
        self.device.set_wait_timeout(30)
        self.check_written_anew(client, one, signature)

    def test_a_save_that_failed_may_have_begun_its_copy(self):
        client = self.start()
        one = self.faulted_anew(client)
        kind, save = type(self.bar._bar), type(self.bar._bar).save

        def failing(*arguments):
            save(*arguments)
            raise DriverError("the fence of a copy")

        self.device.set_wait_timeout(0.05)
        with self.compute.held():
            with unittest.mock.patch.object(kind, "save", failing):
                with self.logged("WARNING"):
                    model_vbar.vbar_unpin(one.alloc)
            self.assertIsNone(model_vbar.vbar_fault(one.alloc))
            # While a graph is captured nobody waits for it.
            with unittest.mock.patch.object(_devices, "is_capturing", lambda: True):
                self.assertIsNone(model_vbar.vbar_fault(one.alloc))
        self.device.set_wait_timeout(30)
        self.assertIsNotNone(model_vbar.vbar_fault(one.alloc))
        self.assertEqual(self.saved._owed, set())
        model_vbar.vbar_unpin(one.alloc)
        client.close()

    def test_no_wait_that_was_made_up_for_waits_for_the_whole_device(self):
        client = self.start()
        one = self.faulted_anew(client)
        other = self.stream()
        self.device.set_wait_timeout(0.05)
        with self.compute.held():
            self.unpin_while_held(one)
            self.saved.set_cut(0)
            self.saved.set_cut(None)
        self.assertEqual(len(self.saved._owed), 1)
        self.device.set_wait_timeout(30)
        # Somebody else's work does not end meanwhile.
        with other.held():
            self.sim.launch_sleep(10, other)
            signature = model_vbar.vbar_fault(one.alloc)
            self.assertIsNotNone(signature)
            one.seed += 100
            self.assertFalse(model_vbar.vbar_signature_compare(signature, None))
        one.kept = signature
        self.check_written_at_once(client, one)

    def test_a_copy_of_a_vbar_that_is_closed_is_owed_to_nobody(self):
        client = self.start()
        one = self.faulted_anew(client)
        self.device.set_wait_timeout(0.05)
        with self.compute.held():
            self.unpin_while_held(one)
            self.saved.set_cut(0)
            self.bar.close()
            self.assertTrue(self.saved._settle())
        self.device.set_wait_timeout(30)
        client.close()

    def test_who_compares_may_not_write_before_a_fill_is_done(self):
        client = self.start()
        pages = self.bar._bar.residency(0, 12)
        resident = [page.state in IN_FRAMES for page in pages]
        one = self.weights[resident.index(False)]
        self.bar.prioritize()
        self.device.set_wait_timeout(0.05)
        with self.compute.held():
            # Its fill is behind the use of its frame, and that behind work that does not end.
            for weight, there in zip(self.weights, resident):
                if there:
                    client.use(weight)
            signature = model_vbar.vbar_fault(one.alloc)
            self.assertIsNotNone(signature)
            self.assertTrue(self.unit_of(one).uses[0].streamed)
            # Another thread may have dropped its copy, and waited.
            with unittest.mock.patch.object(_saved.Saved, "_drop", lambda *_: None):
                error = self.check_refused(signature, "may not be written yet")
                self.assertIsInstance(error.__cause__, TimedOut)
                none = Pins(reason=Reason.FENCE_PENDING)
                with unittest.mock.patch.object(_saved._pins, "pin", lambda *_: none):
                    self.check_refused(signature, "not idle")
        self.device.set_wait_timeout(30)
        self.check_written_anew(client, one, signature)

    def test_a_model_that_another_thread_closes_fails_nobody_elses_fault(self):
        client = self.start()
        other, _ = self.model([PAGE] * 3, 900)
        native, info, closed = other._bar, type(other._bar).info, []

        def closing(bar):
            if bar is native and not closed:
                closed.append(other.close())
            return info(bar)

        offloaded = self.model([PAGE] * 12, 500)[1]
        with unittest.mock.patch.object(type(native), "info", closing):
            for weight in offloaded:
                client.use(weight)
        self.assertEqual(closed, [None], "it was asked how much is resident")
        client.close()


class Idle(Saving):
    """Nobody uses weights: copies go all the same."""

    def start(self, **options):
        client = super().start(**options)
        self.bar, self.weights = self.model([PAGE] * 12)
        self.saved = self.bar._saved
        # With threads nobody knows when which page comes.
        for _ in range(6):
            client.steps(self.weights)
            client.node()
        if not options.get("threads"):
            self.settle(client, self.weights)
        return client

    def resident_and_saved(self):
        """Bytes of pages that are as they were used last, and have a copy."""
        told = 0
        for unit in self.saved._units.values():
            for piece, page in zip(unit.pieces, self.saved._pages(unit.key)):
                there = page.state in IN_FRAMES and page.generation == piece.seen
                told += piece.key[1] if there and piece.saved else 0
        return told

    def test_one_copy_is_enough_of_what_is_resident(self):
        client = self.start()
        client.steps(self.weights)
        client.node()
        self.assertGreater(self.resident_and_saved(), 0)
        before, used = self.saved.saved_bytes(), self.context.used_at
        _saved._look_after(self.context, used + 9.9)
        self.assertEqual(self.saved.saved_bytes(), before)
        kept = model_vbar.vbar_fault(self.weights[-1].alloc)
        model_vbar.vbar_signature_compare(kept, self.weights[-1].kept)
        _saved._look_after(self.context, self.context.used_at + 10)
        # What is pinned may be saved yet.
        pinned = self.resident_and_saved()
        self.assertLessEqual(pinned, PAGE)
        model_vbar.vbar_unpin(self.weights[-1].alloc)
        _saved._look_after(self.context, self.context.used_at + 10)
        self.assertEqual(self.resident_and_saved(), 0)
        self.assertGreater(self.saved.saved_bytes(), 0)
        # What is there is there, and the rest comes back by itself.
        self.settle(client, self.weights)
        client.close()

    def test_what_the_host_has_no_memory_for_goes_with_no_use(self):
        client = self.start()
        statistics, said = type(self.device).statistics, []

        def short(device):
            said.append(device)
            excess = max(3 * PAGE - freed(), 0)
            return dataclasses.replace(statistics(device), locked_excess_bytes=excess)

        before = self.saved.saved_bytes()

        def freed():
            return before - self.saved.saved_bytes()

        self.assertGreater(before, 3 * PAGE)
        with unittest.mock.patch.object(type(self.device), "statistics", short):
            _saved._look_after(self.context, self.context.used_at)
        self.assertEqual((freed(), len(said)), (3 * PAGE, 1))
        self.settle(client, self.weights)
        client.close()

    def test_a_thread_looks_after_them_where_the_device_has_threads(self):
        looked, look = threading.Event(), _saved._look_after

        def seen(context, now):
            look(context, now + 60)
            looked.set()

        with unittest.mock.patch.multiple(_idle, EACH=0.005):
            with unittest.mock.patch.object(_saved, "_look_after", seen):
                client = self.start(threads=True)
                client.steps(self.weights, 2)
                self.assertTrue(looked.wait(60), "nobody looks after them")
                client.node()
                context = self.context
                self.bar.close()
                # With the last copy it ends; another save starts another one.
                self.until(lambda: context not in _idle._looked_after)
                looked.clear()
                _, self.weights = self.model([PAGE] * 12, 500)
                client.steps(self.weights, 6)
                self.assertTrue(looked.wait(60), "nobody looks after them again")
                client.close()
                self.close()
                self.until(lambda: context not in _idle._looked_after)

    def test_without_threads_there_is_none(self):
        client = self.start(threads=False)
        self.assertGreater(self.saved.saved_bytes(), 0)
        self.assertNotIn(self.context, _idle._looked_after)
        client.close()

    def test_a_thread_that_cannot_be_started_fails_no_save(self):
        refused_starts = []

        def refuse(thread):
            refused_starts.append(thread)
            raise RuntimeError("can't start new thread")

        with unittest.mock.patch.object(threading.Thread, "start", refuse):
            client = self.start(threads=True)
        self.assertGreater(self.saved.saved_bytes(), 0)
        self.assertGreater(len(refused_starts), 1)
        self.assertNotIn(self.context, _idle._looked_after)
        client.close()

    def until(self, is_so):
        end = time.monotonic() + 60
        while not is_so():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.002)


class Random(Saving):
    """Sequences by seed: whatever happens, each use reads what was written last.

    COMFY_SEEDS=first,count tries others.
    """

    steps = 600

    def test_sequences(self):
        saved = 0
        first, count = map(int, os.environ.get("COMFY_SEEDS", "1,4").split(","))
        for seed in range(first, first + count):
            with self.subTest(seed=seed):
                saved += self.sequence(seed)
        self.assertGreater(saved, 0)

    def sequence(self, seed):
        choose = random.Random(seed)
        options = {"threads": seed % 3 == 0}
        if seed % 4 == 1:
            options["host_allowance"] = "24M"
        client = self.start(pages=choose.randint(4, 9), **options)
        live, held, most = [], [], 0

        def new_model():
            sizes = [choose.choice([PAGE, PAGE // 4 + 512, 3 * PAGE // 2, 1000, 2 * PAGE])
                     for _ in range(choose.randint(6, 14))]  # fmt: skip
            live.append(self.model(sizes, choose.randint(1, 1 << 30)))

        new_model()
        for _ in range(self.steps):
            bar, weights = choose.choice(live)
            what = choose.random()
            weight = choose.choice(weights)
            if what < 0.30:
                client.use(weight)
            elif what < 0.62:
                start = choose.randrange(len(weights))
                for one in weights[start : start + choose.randint(1, 12)]:
                    client.use(one)
            elif what < 0.66:
                weight.kept, weight.seed = None, choose.randint(1, 1 << 30)
            elif what < 0.70:
                # Cancelled: before or in the middle of a write, unpinned or not.
                signature = model_vbar.vbar_fault(weight.alloc)
                if choose.random() < 0.9:
                    equal = model_vbar.vbar_signature_compare(signature, weight.kept)
                    if signature is not None and not equal and choose.random() < 0.5:
                        client.offload.wait_for(self.compute)
                        half = weight.nbytes // 16 * 8
                        self.sim.launch_pattern(weight.address, half, 5, client.offload)
                        self.compute.wait_for(client.offload)
                if choose.random() < 0.5:
                    model_vbar.vbar_unpin(weight.alloc)
            elif what < 0.76:
                # Several are pinned at a time.
                for one in weights[: choose.randint(1, 3)]:
                    if client.use(one, unpin=False) is not None:
                        held.append(one)
            elif what < 0.82:
                while held:
                    model_vbar.vbar_unpin(held.pop().alloc)
            elif what < 0.87:
                while held:
                    model_vbar.vbar_unpin(held.pop().alloc)
                client.node()
            elif what < 0.89:
                bar.free_memory(choose.choice([1e32, PAGE, 3 * PAGE]))
            elif what < 0.91:
                choose.choice([bar.prioritize, bar.deprioritize])()
            elif what < 0.92:
                bar.set_watermark(choose.randint(0, 20) * PAGE)
            elif what < 0.93:
                bar.set_watermark_limit(choose.randint(0, 3) * PAGE)
            elif what < 0.95:
                pages = choose.randint(4, 12)
                total = self.device.info.total_bytes
                control.set_simple_vram_headroom(total - (1 + pages) * PAGE)
            elif what < 0.97:
                self.sim.launch_sleep(choose.randint(10, 300), self.compute)
            elif what < 0.985 and len(live) < 3:
                new_model()
            elif len(live) > 1:
                client.check()
                held = [one for one in held if one.alloc[0] is not bar]
                live.remove((bar, weights))
                bar.close()
            most = max(most, sum(one._saved.saved_bytes() for one, _ in live))
        while held:
            model_vbar.vbar_unpin(held.pop().alloc)
        client.node()
        client.close()
        self.assertEqual(self.sim.violations(), [])
        return most


if __name__ == "__main__":
    unittest.main()
