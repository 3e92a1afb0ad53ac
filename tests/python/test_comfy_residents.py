"""How many layers of a model that does not fit stay resident, by numbers: what fits, less one.

A client as ComfyUI is one: layers of 96 MiB on two copy streams, a buffer for each of these, tensors
of PyTorch in between. The cap is that of `init_devices`, and what else the card holds (a context of
CUDA and PyTorch is 0.6 GiB) counts as well. Kernels are simulated as sleeps, so that the host runs
ahead of them, and nothing is written: `test_comfy_traces` is about bytes.
"""

import types
import unittest

import vbar.sim
import vbar.torch
from comfy_support import MIB, control, torch
from support import spec
from vbar import _abi_torch
from vbar._call import last_message
from vbar.comfy import _devices, _saved

import comfy_aimdo.model_vbar as model_vbar
import comfy_aimdo.vram_buffer as vram_buffer

GIB = 1 << 30
CARD, PAGE, LAYER, LAYERS, STEPS = 8 * GIB, 16 * MIB, 96 * MIB, 24, 4


class Residents(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # What stays when nothing comes back by itself; and nothing here is worth a copy.
        cls.was_on, _saved.is_on = _saved.is_on, False
        # One for the process, as PyTorch's allocator is.
        options = {"driver": spec(capacity="8G", seed=3), "page_size": PAGE, "threads": False}
        vbar.torch.configure(**options)
        _devices._options.clear()
        _devices.set_options(options)
        assert control.init(simple_vram_headroom=256 * MIB)
        assert control.init_devices([0])
        cls.device = control.get_devctx(0).device
        cls.sim = vbar.sim.Sim(cls.device)
        torch.cuda.host_device = cls.device
        cls.compute, cls.copies = cls.sim.stream(), [cls.sim.stream(), cls.sim.stream()]
        torch.cuda.streams = [cls.compute, *cls.copies]
        torch.cuda.set_stream(types.SimpleNamespace(cuda_stream=cls.compute.handle))

    @classmethod
    def tearDownClass(cls):
        torch.cuda.synchronize()
        torch.cuda.set_stream(types.SimpleNamespace(cuda_stream=0))
        torch.cuda.streams, torch.cuda.host_device = [], None
        control.deinit()
        cls.sim.close()
        _saved.is_on = cls.was_on

    def tensor(self, nbytes):
        address = _abi_torch.library().vbar_torch_malloc(nbytes, 0, self.compute.handle)
        self.assertTrue(address, last_message())
        return address

    def drop(self, address):
        _abi_torch.library().vbar_torch_free(address, 0, 0, self.compute.handle)

    def layer(self, index, sleep, tensors):
        """Whether it was resident."""
        alloc = self.allocs[index]
        signature = model_vbar.vbar_fault(alloc)
        resident = model_vbar.vbar_signature_compare(signature, self.kept[index])
        self.turn = 1 - self.turn
        copy = self.copies[self.turn]
        copy.wait_for(self.compute)
        if signature is None:
            if self.turn not in self.buffers:
                self.buffers[self.turn] = vram_buffer.VRAMBuffer(16 * GIB, 0)
            self.buffers[self.turn].get(LAYER)
        else:
            self.kept[index] = signature
        if not resident:
            self.sim.launch_sleep(20, copy)
        self.compute.wait_for(copy)
        self.sim.launch_sleep(sleep, self.compute)
        if tensors:
            first, second = self.tensor(tensors), self.tensor(tensors)
            self.drop(first)
            third = self.tensor(tensors // 3)
            self.drop(third)
            self.drop(second)
        model_vbar.vbar_unpin(alloc if signature is not None else None)
        copy.wait_for(self.compute)
        return resident

    def end_of_node(self):
        torch.cuda.synchronize()
        self.buffers.clear()
        _abi_torch.library().vbar_torch_reset()
        model_vbar.vbars_reset_watermark_limits()

    def what_fits(self, tensors):
        """Layers in what the buffers and tensors leave of the budget."""
        numbers = self.device.statistics()
        others = sum(buffer.size() for buffer in self.buffers.values())
        if tensors:
            # Two of them at a time, each in whole pages.
            others += 2 * -(-tensors // PAGE) * PAGE
        return (numbers.budget_bytes - others) // LAYER

    def check(self, cap, context, sleep, tensors=0):
        self.assertTrue(control.init_devices([(0, CARD - cap)]))
        self.sim.set_outside_bytes(context)
        self.device.refresh()
        told = self.device.statistics()
        # The cap is of the whole card, and 256 MiB of it are left free.
        self.assertEqual(told.budget_bytes, (cap - 256 * MIB - context) // PAGE * PAGE)
        bar = model_vbar.ModelVBAR(10 * LAYERS * LAYER, 0)
        self.allocs = [bar.alloc(LAYER) for _ in range(LAYERS)]
        self.kept, self.buffers, self.turn = [None] * LAYERS, {}, 0
        for node in range(2):
            bar.prioritize()
            steps = []
            for step in range(STEPS):
                resident = [
                    index for index in range(LAYERS) if self.layer(index, sleep, tensors)
                ]
                used = self.device.statistics()
                self.assertLessEqual(used.used_bytes, used.budget_bytes)
                if step or node:
                    steps.append(resident)
            fits = min(self.what_fits(tensors), LAYERS)
            self.assertGreaterEqual(len(steps[-1]), fits - 1, (steps, fits))
            # Who stays is the same from step to step: nobody chases his own tail.
            self.assertEqual(steps[1:], [steps[-1]] * len(steps[1:]))
            self.end_of_node()
        bar.close()
        self.assertEqual(self.sim.violations(), [])
        return fits

    def test_what_else_the_card_holds_is_not_there_for_layers(self):
        fits = [
            self.check(2 * GIB, context, 50, tensors=96 * MIB)
            for context in (0, 300 * MIB, 650 * MIB)
        ]
        self.assertEqual(fits, [14, 11, 7])

    def test_a_host_that_runs_far_ahead_changes_nothing(self):
        for sleep in (0, 500, 2000):
            self.check(2 * GIB, 650 * MIB, sleep, tensors=90 * MIB)

    def test_without_tensors_and_with_all_resident(self):
        self.check(1 * GIB, 100 * MIB, 200)
        self.assertEqual(self.check(7 * GIB, 100 * MIB, 200), LAYERS)


if __name__ == "__main__":
    unittest.main()
