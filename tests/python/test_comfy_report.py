"""The line that a node that used weights leaves in the log: its numbers, and its words."""

import dataclasses
import unittest
import unittest.mock

from comfy_support import MIB, PAGE, Case, control
from support import pattern
from vbar import Reason, WaitKind
from vbar._values import WaitCount
from vbar.comfy import _report, _saved

import comfy_aimdo.host_buffer as host_buffer
import comfy_aimdo.model_vbar as model_vbar
import comfy_aimdo.vram_buffer as vram_buffer
from comfy_aimdo.model_vbar import ModelVBAR, vbar_fault, vbar_unpin


class Nodes(Case):
    def setUp(self):
        super().setUp()
        self.path = self.folder / "model"
        self.path.write_bytes(pattern(12 * PAGE))
        self.file = open(self.path, "rb")
        self.addCleanup(self.file.close)
        self.vbar = ModelVBAR(100 * PAGE, 0)
        self.allocs = [self.vbar.alloc(PAGE) for _ in range(12)]
        self.buffer = None

    def use(self, index, from_file=False, block=False):
        alloc = self.allocs[index]
        signature = vbar_fault(alloc)
        if block:
            vbar_fault((self.vbar, alloc[1], 2 * PAGE))
            vbar_unpin((self.vbar, alloc[1], 2 * PAGE))
        target = alloc[1]
        if signature is None:
            self.buffer = self.buffer or vram_buffer.VRAMBuffer(1 << 30, 0)
            target = self.buffer.get(PAGE)[1]
        if from_file:
            told = self.file.fileno(), index * PAGE, PAGE, self.compute.handle, target, 0
            host_buffer.read_file_to_device(*told)
        vbar_unpin(alloc if signature is not None else None)

    def end(self):
        """What the end of a node says."""
        self.compute.synchronize()
        with self.logged("INFO") as logged:
            model_vbar.vbars_reset_watermark_limits()
            # There is no assertion of the contrary before Python 3.10.
            _report.logger.info("end")
        self.assertEqual(logged.records[-1].getMessage(), "end")
        said = [record.getMessage() for record in logged.records[:-1]]
        self.assertTrue(all(record.levelname == "INFO" for record in logged.records))
        return said

    def test_a_node_that_used_nothing_says_nothing(self):
        self.assertEqual(self.end(), [])
        self.use(0)
        self.assertEqual(len(self.end()), 1)
        self.assertEqual(self.end(), [])

    def test_what_came_from_where_and_what_stayed(self):
        for step in range(4):
            for index in range(12):
                self.use(index, from_file=not step)
        said, = self.end()
        self.assertTrue(said.startswith(
            "GPU 0: 24.0 MiB of weights used 4 times, 24.0 MiB are resident now. "
            "24.0 MiB were streamed, from files, to stay. "
        ), said)
        for index in (0, 1, 2):
            self.use(index)
        said, = self.end()
        self.assertIn("6.0 MiB of weights used once, all resident", said)

    def test_what_came_back_by_itself(self):
        total = self.device.info.total_bytes
        control.set_simple_vram_headroom(total - 8 * PAGE)
        kept = {}
        for _ in range(6):
            for alloc in self.allocs:
                signature = vbar_fault(alloc)
                model_vbar.vbar_signature_compare(signature, kept.get(alloc))
                kept[alloc] = signature
                vbar_unpin(alloc)
            said, = self.end()
        self.assertRegex(said, "0 bytes were streamed; [0-9.]+ MiB came ahead of need. ")

    @unittest.mock.patch.object(_saved, "is_on", False)
    def test_what_did_not_fit_and_why(self):
        total = self.device.info.total_bytes
        control.set_simple_vram_headroom(total - 19 * PAGE)
        for step in range(2):
            for index in range(12):
                self.use(index, block=index < 3)
        self.end()
        # As tensors would: memory that no weight can have.
        held = vram_buffer.VRAMBuffer(1 << 30, 0)
        held.get(8 * PAGE)
        for step in range(2):
            for index in range(12):
                self.use(index)
        said, = self.end()
        resident = self.vbar.loaded_size() // MIB
        self.assertLess(resident, 7)
        self.assertIn(f"24.0 MiB of weights used twice, {resident}.0 MiB are resident now.", said)
        self.assertIn(" were streamed, from RAM. Not resident: they do not fit", said)
        self.assertIn("the budget of 38.0 MiB beside tensors and buffers", said)
        self.vbar.prioritize()
        del held
        self.use(7, from_file=True)
        self.use(6)
        said, = self.end()
        self.assertIn("4.0 MiB were streamed, 2.0 MiB from files and 2.0 MiB from RAM", said)

    def test_what_has_no_addresses_is_told_so(self):
        self.sim.fail("cuMemAddressReserve", count=None)
        with self.logged("WARNING"):
            written = ModelVBAR(64 * MIB, 0)
        self.sim.heal()
        vbar_fault(written.alloc(MIB))
        said, = self.end()
        self.assertIn("1.0 MiB were streamed, from RAM. Not resident: they have no addr", said)

    def test_waits_are_those_of_the_node(self):
        traffic = _report.Traffic()
        now = self.device.statistics()
        waits = {
            WaitKind.FRAME: WaitCount(1, 2 * 10**9),
            WaitKind.OLD_MAPPING: WaitCount(1, 10**9),
            WaitKind.CONTEXT: WaitCount(1, 5 * 10**8),
            # Within the calls that are timed.
            WaitKind.READ: WaitCount(1, 10**9),
        }
        now = dataclasses.replace(now, waits=waits, filled_bytes=5)
        traffic.waited(0.25)
        with traffic.reading(7):
            pass
        nbytes, found, filled = traffic.take(now)
        files = found.pop("for files")
        self.assertTrue(0 <= files < 60, files)
        expected = {"for memory that was in use": 3.25, "for the whole device": 0.5}
        self.assertEqual((nbytes, found, filled), (7, expected, 5))
        waits = {**waits, WaitKind.FRAME: WaitCount(2, 3 * 10**9)}
        again = traffic.take(dataclasses.replace(now, waits=waits, filled_bytes=9))
        self.assertEqual(again, (0, {"for memory that was in use": 1.0}, 4))


class Words(unittest.TestCase):
    def check(self, expected, used, **more):
        told = dict(resident=0, budget=6 << 30, file_bytes=0, waits={}, filled=0)
        told.update(more)
        self.assertEqual(_report.sentence(used, **told), expected)

    def test_sentences(self):
        gib = 1 << 30
        self.check(
            "7.00 GiB of weights used 8 times, 4.00 GiB are resident now. 28.00 GiB were "
            "streamed, 7.00 GiB from files and 21.00 GiB from RAM; 4.00 GiB of that to stay. Not "
            "resident: they do not fit into the budget of 6.00 GiB beside tensors and buffers. "
            "Waited 0.40 s for files, 0.02 s for memory that was in use",
            _report.Used(
                7 * gib, 28 * gib, 4 * gib,
                {Reason.BUDGET: gib, Reason.ABOVE_WATERMARK: 22 * gib, Reason.ALL_PINNED: gib},
            ),
            resident=4 * gib,
            file_bytes=7 * gib,
            waits={"for memory that was in use": 0.02, "for files": 0.4, "for copies": 0.001},
        )
        self.check("1.00 GiB of weights used 1.5 times on average, all resident. No waits",
                   _report.Used(gib, gib * 3 // 2))
        self.check(
            "5 bytes of weights used once, 5 bytes are resident now. 0 bytes were streamed; "
            "1.0 MiB came ahead of need. No waits",
            _report.Used(5, 5), resident=5, filled=MIB,
        )
        self.check(
            "2.0 MiB of weights used once, 0 bytes are resident now. 2.0 MiB were streamed, from "
            "RAM. Not resident: they are offloaded (quarantined). No waits",
            _report.Used(2 * MIB, offloaded={Reason.QUARANTINED: 2 * MIB}),
        )


if __name__ == "__main__":
    unittest.main()
