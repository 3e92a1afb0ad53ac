"""What a program tells the engine ahead of need, and what comes of it."""

import time
import unittest

import vbar
from support import PAGE, Case, open_device, pattern


class Ahead(Case):
    def model_of_layers(self):
        return self.model_of({f"layer.{n}": ("U8", (PAGE,), pattern(PAGE, n)) for n in range(8)})

    def eventually(self, holds):
        end = time.monotonic() + 20
        while not holds():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.001)

    def test_with_threads_wishes_come_true_and_an_order_is_kept_to(self):
        path = self.model_of_layers()
        with open_device(threads=True, budget=5 * PAGE) as device, device.open_model(path) as model:
            misses = device.statistics().miss_count
            model.prefetch("layer.5")
            self.eventually(lambda: device.statistics().ahead_page_count > 0)
            with model.fault("layer.5") as weight:
                self.assertTrue(weight)
            names = list(model)
            model.schedule_hint(names)
            for _ in range(6):
                for name in names:
                    with model.fault(name) as weight:
                        self.assertTrue(weight)
                    time.sleep(0.001)
            told = device.statistics()
            self.assertGreater(told.engine_trust, 0)
            self.assertGreater(told.engine_plan_count, 0)
            self.assertGreater(told.engine_planned_page_count, told.engine_kept_page_count)
            self.assertLess(told.miss_count - misses, 6 * 8)

    def test_without_threads_advice_is_checked_and_nothing_comes_of_it(self):
        path = self.model_of_layers()
        with open_device(budget=4 * PAGE) as device, device.open_model(path) as model:
            bar = device.create_bar(PAGE)
            model.prefetch("layer.1")
            model.bar.prefetch(0, PAGE)
            model.schedule_hint(reversed(list(model)))
            device.schedule_hint([[(model.bar, 0, 1), (model.bar, PAGE, 1)], [(model.bar, 0, 9)]])
            device.schedule_hint([])
            other, past, below = (bar, 0, 1), (model.bar, 1 << 63, 1), (model.bar, -1, 1)
            for wrong in ([[]], [[other]], [[past]], [[below]]):
                with self.assertRaises(vbar.InvalidArgument):
                    device.schedule_hint(wrong)
            for wrong in ((bar, 0, 1), (model.bar, 0, 1 << 63)):
                with self.assertRaises(vbar.InvalidArgument):
                    wrong[0].prefetch(*wrong[1:])
            with self.assertRaises(KeyError):
                model.prefetch("layer.9")
            with self.assertRaises(vbar.NotFound):
                model.schedule_hint(["layer.0", "layer.9"])
            told = device.statistics()
            self.assertEqual((told.used_bytes, told.ahead_page_count), (0, 0))
            self.assertEqual(told.engine_plan_count, 0)


if __name__ == "__main__":
    unittest.main()
