"""Scenario 32: what cannot be shared with another process says so, and addresses cost what they
are.
"""

import copy
import multiprocessing.reduction
import pickle
import unittest

import vbar
from support import MIB, PAGE, Case, Sim, open_device, pattern


class Sharing(Case):
    def test_scenario_32_nothing_is_pickled_copied_or_sent(self):
        path = self.model_of({"a": ("U8", (64,), pattern(64))})
        with open_device() as device, device.open_model(path) as model:
            bar = device.create_bar(PAGE)
            allocation = bar.allocate(64)
            with model.fault("a") as guard, allocation.fault() as refill:
                many = device.fault_many([(bar, 0, 1)])
                for one in (device, bar, allocation, model, guard, refill, many, guard.view()):
                    for attempt in (
                        pickle.dumps,
                        copy.copy,
                        copy.deepcopy,
                        multiprocessing.reduction.ForkingPickler.dumps,
                        lambda one: pickle.dumps(one, protocol=2),
                        lambda one: pickle.dumps([one, {"weight": one}]),
                    ):
                        with self.assertRaisesRegex(
                            TypeError, f"vbar.{type(one).__name__} cannot be .* this process only"
                        ):
                            attempt(one)
                many.close()
                self.assertEqual(model.bar.residency()[0].pin_count, 1)

    def test_what_is_only_told_may_be_sent(self):
        path = self.model_of({"a": ("BF16", (4, 8), pattern(64))})
        with open_device() as device, device.open_model(path) as model:
            told = (model["a"], device.info, device.statistics(), model.bar.info())
            told += (model.bar.residency()[0], vbar.Reason.BUDGET, vbar.Dtype.BF16)
            self.assertEqual(pickle.loads(pickle.dumps(told)), told)

    def test_exceptions_may_be_sent(self):
        with open_device() as device:
            for call in (
                lambda: device.open_model(self.folder / "missing"),
                lambda: device.create_bar(-1),
                lambda: device.create_bar(PAGE).fault(PAGE, 1),
            ):
                with self.assertRaises(vbar.Error) as caught:
                    call()
                sent = pickle.loads(pickle.dumps(caught.exception))
                self.assertEqual(type(sent), type(caught.exception))
                self.assertEqual((str(sent), sent.status), (str(caught.exception), sent.status))

    def test_scenario_32_many_small_bars_cost_addresses_in_proportion(self):
        with open_device() as device:
            sim = Sim(device)
            before = sim.live()
            bars = [device.create_bar(1 + at % PAGE) for at in range(500)]
            live = sim.live()
            self.assertEqual(live.reserved_bytes - before.reserved_bytes, 500 * PAGE)
            self.assertEqual(sum(bar.nbytes for bar in bars), 500 * PAGE)
            self.assertEqual((live.frame_count, live.used_bytes), (0, 0))
            large = device.create_bar(1 << 40)
            self.assertEqual(sim.live().reserved_bytes - live.reserved_bytes, 1 << 40)
            del bars, large
            self.assertEqual(sim.live().reserved_bytes, before.reserved_bytes)
            self.assertLess(device.statistics().used_bytes, MIB)


if __name__ == "__main__":
    unittest.main()
