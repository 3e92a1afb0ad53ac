"""PyTorch's tensors and weights in one memory on a real GPU: much of both, what is counted, ends.

Fails where there is no GPU or no torch: it is run on purpose, on a machine that has them.

    VBAR_LIBRARY=.../libvbar.so PYTHONPATH=python_shim python3 tests/python/test_torch_memory_gpu.py

Each test is a process of its own, or several; what it printed is shown. Large needs 40 GiB of the
device and of page cache, and a file system with sparse files.
"""

import itertools
import sys
import tempfile
import textwrap
import unittest

import torch
from support import run_together
from test_torch_gpu import INSTALLED, START, Case


class Checked(Case):
    def check(self, program, *arguments, **more):
        printed = super().check(program, *arguments, **more)
        print(printed)
        return printed


class Temporaries(Checked):
    def test_scenario_49_random_tensors_are_created_and_dropped(self):
        self.check("""
            vbar.torch.check_in_use()
            for turn in range(200):
                tensor = torch.randn(7 * MIB, device="cuda")
                square = tensor * tensor
                total = square.sum() if turn == 0 else total + square.sum()
                del tensor, square
            torch.cuda.synchronize()
            mean = float(total) / (200 * 7 * MIB)
            peak = torch.cuda.max_memory_reserved()
            print("mean of the squares", mean, "peak", peak >> 20, "MiB")
            assert 0.99 < mean < 1.01
            # Two at a time, and the small ones' slab.
            assert peak <= 4 * 28 * MIB, peak
        """)

    def test_scenario_49_in_a_small_budget_with_streams_that_are_late(self):
        self.check("""
            with vbar.torch.device() as device:
                device.budget = GIB
                sides = [torch.cuda.Stream() for _ in range(3)]
                main, sums = torch.cuda.current_stream(), []
                for turn in range(200):
                    side = sides[turn % 3]
                    tensor = torch.randn(7 * MIB, device="cuda")
                    wanted = tensor.sum()
                    side.wait_stream(main)
                    with torch.cuda.stream(side):
                        # About 2 ms, so that what is dropped would be more than there is.
                        torch.cuda._sleep(4_000_000)
                        found = tensor.sum()
                    tensor.record_stream(side)
                    del tensor
                    sums.append((wanted, found))
                torch.cuda.synchronize()
                wrong = [turn for turn, (wanted, found) in enumerate(sums)
                         if float(wanted) != float(found)]
                assert not wrong, wrong
                told = device.statistics()
                print(told, torch.cuda.memory_stats()["num_ooms"])
                assert told.peak_bytes <= GIB and torch.cuda.memory_stats()["num_ooms"] == 0
        """)

    def test_scenario_49_in_a_pool_of_pytorchs(self):
        self.check("""
            pool = vbar.torch.mem_pool(headroom="1G")
            with torch.cuda.use_mem_pool(pool):
                for turn in range(200):
                    tensor = torch.randn(7 * MIB, device="cuda")
                    square = tensor * tensor
                    del tensor
                    total = square.sum() if turn == 0 else total + square.sum()
                    del square
                torch.cuda.synchronize()
            assert 0.99 < float(total) / (200 * 7 * MIB) < 1.01
            with vbar.torch.device() as device:
                used = device.statistics().used_bytes
                print(used >> 20, "MiB in the pool")
                assert used <= 256 * MIB
                del pool, total
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.synchronize()
                device.trim()
                assert device.statistics().used_bytes <= 32 * MIB, device.statistics()
        """, start=START)


#: Drops three things in the order of the first argument; the second says how many of them before
#: the interpreter ends with the rest.
DROPPED = """
    gone = 0
    for name in sys.argv[1].split(","):
        if "tensors" in held:
            for at, tensor in enumerate(held["tensors"]):
                assert int(tensor[0]) == int(tensor[-1]) == at + 1, (name, at)
            del tensor
        if gone == int(sys.argv[2]):
            break
        del held[name]
        gone += 1
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    sys.kept = held
    del held
    print("the end was reached", flush=True)
"""


class Ends(unittest.TestCase):
    def check_orders(self, program, names):
        """Every order, all of it and a part of it before the end, several processes at once."""
        whole = textwrap.dedent(program) + textwrap.dedent(DROPPED)
        for count in (len(names), 1):
            orders = [(",".join(order), count) for order in itertools.permutations(names)]
            for order, (code, printed) in zip(orders, run_together(whole, orders)):
                with self.subTest(order=order):
                    self.assertEqual(code, 0, printed)
                    self.assertEqual(printed.splitlines(), ["the end was reached"], printed)

    def test_scenario_50_a_pool_its_tensors_and_its_allocator(self):
        self.check_orders(START + """
    pool = vbar.torch.mem_pool(headroom="1G")
    with torch.cuda.use_mem_pool(pool):
        tensors = [bytes_of(size, at + 1) for at, size in enumerate((30 * MIB, 1000, 3 * MIB))]
    held = {"tensors": tensors, "pool": pool, "allocator": vbar.torch._pool._made.pop()}
    del tensors, pool
        """, ("tensors", "pool", "allocator"))

    def test_scenario_50_a_graph_the_tensors_and_the_allocator(self):
        self.check_orders(START + """
    vbar.torch.install(headroom="1G")
    tensors = [bytes_of(size, at + 1) for at, size in enumerate((30 * MIB, 1000, 3 * MIB))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = tensors[0] * 2
    graph.replay()
    allocator = vbar.torch._install._kept.pop()
    held = {"tensors": tensors, "graph": (graph, result), "allocator": allocator}
    del tensors, graph, result, allocator
        """, ("tensors", "graph", "allocator"))


class Books(Checked):
    def test_scenario_52_what_we_hold_is_what_the_driver_misses(self):
        self.check("""
            # What is loaded when it is first used is not counted as ours.
            kept = bytes_of(GIB, 3)
            int(kept[-1])
            torch.cuda.synchronize()
            with vbar.Device(headroom="1G", threads=False) as device:
                page = device.page_size
                bar, other = device.create_bar(4 * GIB), device.create_bar(4 * GIB)
                torchs = torch.cuda.memory_stats()
                free, used = torch.cuda.mem_get_info()[0], device.statistics().used_bytes
                def compare(what):
                    now, missing = device.statistics().used_bytes, torch.cuda.mem_get_info()[0]
                    print(f"{what}: we hold {now - used >> 20} MiB more, the driver has",
                          f"{free - missing >> 20} MiB less")
                    # A frame is what was asked for: the driver's own records are less than this.
                    assert abs((free - missing) - (now - used)) <= 8 * MIB
                    assert torch.cuda.memory_stats() == torchs
                    return now
                with bar.fault(0, 4 * GIB) as guard:
                    assert guard
                bar.end_of_run()
                held = compare("faulted")
                for count in (1, 7, 100):
                    freed = bar.free_memory(count * page)
                    assert freed.bytes == count * page, freed
                    assert held - compare(f"{count} pages evicted") == count * page
                    held -= count * page
                # Pages that change hands: neither knows of it.
                device.budget = held
                with other.fault(0, GIB) as guard:
                    assert guard
                other.end_of_run()
                assert compare("taken by another VBAR") == held
                assert device.statistics().evicted_page_count >= 108 + GIB // page
                device.free_memory()
                assert compare("all evicted") == used
                bar.close(), other.close()
            assert int(kept[0]) == 3
        """, start=START)

    def test_scenario_52_weights_are_none_of_pytorchs_numbers(self):
        self.check("""
            vbar.torch.uninstall_statistics()
            tensor = bytes_of(GIB, 3)
            int(tensor[-1])
            def reserved():
                return seen("reserved_bytes").all.current, seen("allocated_bytes").all.current
            with vbar.torch.device() as device:
                device.budget = 6 * GIB
                bar = device.create_bar(4 * GIB)
                before, used = reserved(), device.statistics().used_bytes
                free = torch.cuda.mem_get_info()[0]
                def compare(what):
                    now, missing = device.statistics().used_bytes, torch.cuda.mem_get_info()[0]
                    print(f"{what}: {now - used >> 20} MiB more, {free - missing >> 20} MiB less")
                    assert abs((free - missing) - (now - used)) <= 8 * MIB
                with bar.fault(0, 4 * GIB) as guard:
                    assert guard
                bar.end_of_run()
                compare("weights")
                assert reserved() == before
                other = bytes_of(3 * GIB, 4)
                compare("a tensor that evicted weights")
                assert device.statistics().evicted_page_count > 0
                assert [b - a for a, b in zip(before, reserved())] == [3 * GIB, 3 * GIB]
                bar.free_memory()
                compare("no weights")
                del other
                torch.cuda.empty_cache()
                device.trim()
                compare("no second tensor")
                assert reserved() == before
                bar.close()
        """)


LARGE = INSTALLED + textwrap.dedent("""
    import json, struct, time
    COUNT, SIZE = 60, 512 * MIB

    # 30 GiB of weights in a file that takes no room: zeros, and a number at both ends of each.
    path = sys.argv[1] + "/model.safetensors"
    header = {}
    for at in range(COUNT):
        offsets = [at * SIZE, (at + 1) * SIZE]
        header[f"layer{at:02}"] = {"dtype": "U8", "shape": [SIZE], "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + COUNT * SIZE)
        for at in range(COUNT):
            for end in (0, SIZE - 1):
                file.seek(8 + len(text) + at * SIZE + end)
                file.write(bytes([at + 1]))

    def forward(model, activation=0):
        # What a model's pass does: each layer's weight, and what is kept of the layer.
        kept = []
        for at, name in enumerate(model):
            with model.fault(name) as weight:
                assert weight, (name, weight.reason)
                view = torch.from_dlpack(weight.view())
                assert int(view[0]) == int(view[-1]) == at + 1, name
                del view
            if activation:
                kept.append(bytes_of(activation, at))
        for at, each in enumerate(kept):
            assert int(each[0]) == int(each[-1]) == at
        return sum(each.nbytes for each in kept)

    def largest(most):
        # Bytes of the largest tensor that can be had, in steps of a page of 16 MiB.
        low, high = 0, most // (16 * MIB)
        while low < high:
            middle = (low + high + 1) // 2
            try:
                torch.empty(middle * 16 * MIB, dtype=torch.uint8, device="cuda")
                low = middle
            except torch.OutOfMemoryError:
                high = middle - 1
        return low * 16 * MIB

    def loaded(device, model, what):
        # Bytes of weights in frames, be it that their copies are not over yet.
        pages = model.bar.residency()
        states = {state: sum(page.state == state for page in pages) for state in vbar.PageState}
        reserved = seen("reserved_bytes").all.current, seen("allocated_bytes").all.current
        told = device.statistics()
        print(f"{what}:", ", ".join(f"{count} pages {state.name.lower()}"
                                    for state, count in states.items() if count))
        print(f"    {told.used_bytes >> 20} MiB held of {told.budget_bytes >> 20}",
              f"({told.budget_source.name.lower()}), {told.free_bytes >> 20} MiB in free frames,",
              f"{reserved[0] >> 20} MiB of torch's, {reserved[1] >> 20} MiB in tensors")
        print(f"    {told}")
        in_frames = states[vbar.PageState.ISSUED] + states[vbar.PageState.RESIDENT]
        return in_frames * device.page_size

    def check_largest(device, model, total):
        torch.cuda.empty_cache()
        device.free_memory()
        device.trim()
        alone = largest(total)
        print(f"without weights a tensor of {alone / GIB:.2f} GiB")
        forward(model)
        before = loaded(device, model, "a pass behind it")
        assert before >= COUNT * SIZE, f"{before / GIB:.2f} GiB of weights are loaded"
        # Each was read, so that nothing is on its way any more.
        pages = model.bar.residency()
        late = sum(page.state != vbar.PageState.RESIDENT for page in pages)
        assert late == 0, f"{late} of {len(pages)} pages are told to be on their way"
        tensor = bytes_of(alone, 9)
        assert int(tensor[0]) == int(tensor[-1]) == 9
        after = loaded(device, model, "a tensor of that size")
        assert after <= total - alone, f"{after / GIB:.2f} GiB of weights are left"
        del tensor
        forward(model)
        again = loaded(device, model, "a pass behind that")
        assert again >= COUNT * SIZE, f"{again / GIB:.2f} GiB of weights are loaded"

    bytes_of(MIB)
    int(bytes_of(MIB)[-1])
""")


class Large(Checked):
    def test_30_gb_of_weights_and_more_activations_than_are_left(self):
        with tempfile.TemporaryDirectory() as folder:
            self.check("""
                with vbar.torch.device() as device, device.open_model(path) as model:
                    device.budget = 40 * GIB
                    for turn in range(3):
                        began = time.perf_counter()
                        kept = forward(model, 256 * MIB)
                        print(f"pass {turn}: {kept / GIB:.1f} GiB of activations beside",
                              f"{model.nbytes / GIB:.1f} GiB of weights in 40 GiB,",
                              f"{time.perf_counter() - began:.2f} s")
                    told = device.statistics()
                    print(told)
                    assert kept + model.nbytes > 40 * GIB and told.evicted_page_count > 0
                    assert told.peak_bytes <= 40 * GIB
                    assert torch.cuda.memory_stats()["num_ooms"] == 0
                    check_largest(device, model, 41 * GIB)
                    assert device.statistics().peak_bytes <= 40 * GIB
            """, folder, start=LARGE)

    def test_the_largest_tensor_that_the_card_could_hold(self):
        with tempfile.TemporaryDirectory() as folder:
            self.check("""
                with vbar.torch.device() as device, device.open_model(path) as model:
                    check_largest(device, model, torch.cuda.get_device_properties(0).total_memory)
            """, folder, start=LARGE)


if __name__ == "__main__":
    assert torch.cuda.is_available(), "there is no GPU for torch"
    print(sys.version, torch.__version__, flush=True)
    unittest.main(verbosity=2)
