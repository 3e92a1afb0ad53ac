"""PyTorch on vbar's allocator on a real GPU: reuse, graphs, threads, exceptions, exit, statistics.

Fails where there is no GPU or no torch: it is run on purpose, on a machine that has them.

    VBAR_LIBRARY=.../libvbar.so PYTHONPATH=python_shim python3 tests/python/test_torch_gpu.py

Each test is a process of its own, since an allocator is for ever; what it printed is shown when it
fails. Numbers in brackets are those of the list of tests that an allocator of PyTorch's has to pass:
all of 1 to 18 are here but 15, which needs two GPUs: test_torch_distributed_gpu.py has it.
VBAR_TEST_OPS=all compares every operator instead of a part of them.
"""

import json
import os
import pathlib
import sys
import tempfile
import textwrap
import unittest

import torch
from support import run

START = """
    import ctypes, gc, os, random, sys, threading, warnings
    import torch
    import vbar, vbar.torch
    from support import refused, same

    MIB, GIB = 1 << 20, 1 << 30

    def seen(name, ordinal=0):
        return getattr(vbar.torch._statistics._numbers(ordinal), name)

    def bytes_of(count, value=0):
        return torch.full((count,), value, dtype=torch.uint8, device="cuda")

    #: About 0.1 s of the GPU's clock.
    LONG = 200_000_000
"""

INSTALLED = textwrap.dedent(START) + textwrap.dedent("""
    vbar.torch.install(headroom="1G")
""")


class Case(unittest.TestCase):
    def check(self, program, *arguments, start=INSTALLED, **more):
        """Runs a program that must end well; what it printed."""
        whole = textwrap.dedent(start) + textwrap.dedent(program)
        whole += "\nprint('the end was reached', flush=True)\n"
        code, printed = run(whole, *arguments, **more)
        self.assertEqual(code, 0, f"the program ended with {code}:\n{printed}")
        self.assertIn("the end was reached", printed)
        self.assertNotIn("a bug of vbar", printed)
        return printed


class Requests(Case):
    def test_1_no_bytes(self):
        self.check("""
            for turn in range(100):
                empty = torch.empty(0, device="cuda")
                assert empty.data_ptr() == 0 and (empty + 1).numel() == 0
                empty.record_stream(torch.cuda.Stream())
            assert seen("unknown_free_count") == 0
            vbar.torch.check_in_use()
        """)

    def test_2_scenario_28_out_of_memory(self):
        self.check("""
            total = torch.cuda.get_device_properties(0).total_memory
            for turn in range(20):
                error = refused(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate",
                                torch.empty, 4 * total, dtype=torch.uint8, device="cuda")
                assert isinstance(error, torch.cuda.OutOfMemoryError), type(error)
                assert "GPU 0 has a total capacity of" in str(error), error
                kept = bytes_of(64 * MIB, turn)
                assert int(kept[-1]) == turn
            refused(torch.OutOfMemoryError, "more than 1EB memory", torch.empty, 1 << 61,
                    dtype=torch.uint8, device="cuda")
            print(error)
            # Filled to the last byte, then half of it given back.
            held = []
            try:
                while True:
                    held.append(bytes_of(512 * MIB, len(held) % 250))
            except torch.OutOfMemoryError as error:
                print(len(held), "times 512 MiB, then:", error)
            assert len(held) * 512 * MIB > total // 2
            for at, tensor in enumerate(held):
                assert int(tensor[0]) == int(tensor[-1]) == at % 250
            del held[::2], tensor
            again = bytes_of(GIB, 3)
            assert int(again[-1]) == 3
            assert torch.cuda.memory_stats()["num_ooms"] >= 22
        """)

    def test_3_a_failure_in_a_thread_of_autograds_is_the_same_exception(self):
        self.check("""
            class Much(torch.autograd.Function):
                @staticmethod
                def forward(context, value):
                    return value * 2
                @staticmethod
                def backward(context, gradient):
                    torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
                    return gradient
            for turn in range(5):
                value = torch.ones(1000, device="cuda", requires_grad=True)
                refused(torch.OutOfMemoryError, "Tried to allocate", Much.apply(value).sum().backward)
                (value * 3).sum().backward()
                assert value.grad.unique().tolist() == [3.0]
        """)

    def test_4_frees_from_other_threads_and_on_other_streams(self):
        self.check("""
            streams = [torch.cuda.Stream() for _ in range(4)]
            for turn in range(50):
                held = []
                for at, stream in enumerate(streams):
                    with torch.cuda.stream(stream):
                        held.append(bytes_of(3 * MIB, at))
                def drop(stream):
                    with torch.cuda.stream(stream):
                        while held:
                            held.pop()
                torch.cuda.synchronize()
                assert [int(tensor[-1]) for tensor in held] == [0, 1, 2, 3]
                thread = threading.Thread(target=drop, args=(streams[turn % 4],))
                thread.start()
                thread.join()
            gc.collect()
            assert torch.cuda.memory_allocated() == 0, torch.cuda.memory_summary()
            assert seen("unknown_free_count") == 0
        """)

    def test_5_fresh_threads_without_a_context(self):
        self.check("""
            torch.cuda.init()
            results = []
            def work(at):
                results.append((at, int(bytes_of(5 * MIB, at).sum(dtype=torch.int64))))
            for at in range(20):
                thread = threading.Thread(target=work, args=(at,))
                thread.start()
                thread.join()
            assert results == [(at, 5 * MIB * at) for at in range(20)], results
            value = torch.ones(1000, 1000, device="cuda", requires_grad=True)
            (value @ value).sum().backward()
            assert torch.isfinite(value.grad).all()
        """)

    def test_14_scenario_22_unknown_pointers_are_counted(self):
        self.check("""
            library = vbar.load()
            from vbar import _abi_torch
            _abi_torch.library()
            tensor = bytes_of(MIB, 7)
            before = torch.cuda.memory_allocated()
            for at, pointer in enumerate((0xdead, tensor.data_ptr() + 512, (1 << 64) - 1)):
                library.vbar_torch_free(pointer, 4096, 0, 0)
                assert seen("unknown_free_count") == at + 1
            library.vbar_torch_free(None, 4096, 0, 0)
            other = torch.empty(MIB, dtype=torch.uint8)
            library.vbar_torch_free(other.data_ptr(), MIB, 0, 0)
            assert seen("unknown_free_count") == 4
            assert torch.cuda.memory_allocated() == before and int(tensor[0]) == 7
        """)


class Streams(Case):
    def test_8_a_recorded_stream_keeps_a_tensor(self):
        self.check("""
            side = torch.cuda.Stream()
            for turn in range(20):
                tensor = bytes_of(8 * MIB, 1)
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    torch.cuda._sleep(LONG // 4)
                    copy = tensor.clone()
                tensor.record_stream(side)
                address = tensor.data_ptr()
                del tensor
                # What would get the memory if it were free.
                others = [bytes_of(8 * MIB, 2) for _ in range(4)]
                assert address not in {other.data_ptr() for other in others}
                side.synchronize()
                assert int(copy.min()) == 1, turn
                del others, copy
            # And afterwards it is reused.
            tensor = bytes_of(8 * MIB, 1)
            tensor.record_stream(side)
            address = tensor.data_ptr()
            del tensor
            torch.cuda.synchronize()
            found = [torch.empty(8 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
            assert address in {one.data_ptr() for one in found}, "the block was never reused"
        """)

    def test_8_foreign_memory_is_recorded_for_nothing(self):
        self.check("""
            side = torch.cuda.Stream()
            with vbar.torch.device() as device, device.create_bar(4 * MIB) as bar:
                allocation = bar.allocate(MIB)
                with allocation.fault() as written:
                    view = torch.from_dlpack(written.view(torch.uint8, (MIB,)))
                    view.fill_(3)
                    view.record_stream(side)
                    view[100:].record_stream(side)
                    del view
                    written.commit()
            part = bytes_of(MIB, 1)[1000:]
            part.record_stream(side)
            assert seen("unknown_free_count") == 0
        """)

    def test_9_scenario_23_freed_while_it_is_used(self):
        self.check("""
            first, second = torch.cuda.Stream(), torch.cuda.Stream()
            for turn in range(30):
                with torch.cuda.stream(first):
                    tensor = bytes_of(16 * MIB, 1)
                    torch.cuda._sleep(LONG // 2)
                    result = tensor.sum(dtype=torch.int64)
                    address = tensor.data_ptr()
                    del tensor
                # Of the same size, on another stream that overwrites it at once.
                with torch.cuda.stream(second):
                    over = [bytes_of(16 * MIB, 9) for _ in range(3)]
                    assert address not in {one.data_ptr() for one in over}, "given out in use"
                torch.cuda.synchronize()
                assert int(result) == 16 * MIB, turn
                # On its own stream it comes back at once.
                with torch.cuda.stream(first):
                    tensor = bytes_of(16 * MIB, 1)
                    kept = tensor.data_ptr()
                    del tensor
                    assert torch.empty(16 * MIB, dtype=torch.uint8, device="cuda").data_ptr() == kept
        """)

    def test_9_under_pressure_of_weights(self):
        self.check("""
            with vbar.torch.device() as device:
                device.budget = 3 * GIB
                bar = device.create_bar(2 * GIB)
                pages = 2 * GIB // (64 * MIB)
                torch.manual_seed(3)
                wanted = None
                for turn in range(200):
                    with bar.fault(turn % pages * 64 * MIB, 64 * MIB) as weight:
                        pass
                    tensor = torch.randn(1 + turn % 7, 16 * MIB, device="cuda")
                    total = float((tensor * 0 + 1).sum(dtype=torch.float64))
                    assert total == (1 + turn % 7) * 16 * MIB, (turn, total)
                    if turn % 50 == 49:
                        torch.cuda.empty_cache()
                print(device.statistics())
                assert device.statistics().evicted_page_count > 0
                bar.close()
        """)

    def test_11_threads_with_values_of_their_own(self):
        self.check("""
            wrong = []
            def work(seed):
                dice, held = random.Random(seed), []
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    for turn in range(400):
                        if len(held) > 8 or (held and dice.random() < 0.4):
                            value, tensor = held.pop(dice.randrange(len(held)))
                            if not bool((tensor == value).all()):
                                wrong.append((seed, turn, value, tensor.unique().tolist()[:4]))
                            # Whoever gets it too early reads this.
                            tensor.fill_(255)
                            continue
                        size = 1 << dice.randrange(8, 24)
                        value = dice.randrange(250)
                        held.append((value, bytes_of(size + dice.randrange(size), value)))
                    for value, tensor in held:
                        if not bool((tensor == value).all()):
                            wrong.append((seed, "end", value))
                stream.synchronize()
            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            assert not wrong, wrong[:5]
            gc.collect()
            assert torch.cuda.memory_allocated() == 0
        """)


class Graphs(Case):
    def test_10_eager_work_between_replays(self):
        self.check("""
            torch.manual_seed(1)
            weight = torch.randn(512, 512, device="cuda")
            given = torch.randn(512, 512, device="cuda")
            def step():
                hidden = (given @ weight).relu()
                return (hidden @ weight).sum(dim=0)
            warm = torch.cuda.Stream()
            warm.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(warm):
                for _ in range(3): step()
            torch.cuda.current_stream().wait_stream(warm)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = step()
            for turn in range(30):
                given.copy_(torch.randn(512, 512, device="cuda"))
                # Memory of the graph's that eager code got would be overwritten here.
                over = [torch.full((512, 512), 7.0, device="cuda") for _ in range(20)]
                graph.replay()
                found = result.clone()
                del over
                torch.testing.assert_close(found, step())
                if turn % 10 == 9: torch.cuda.empty_cache()
            kept = seen("pool_bytes")
            assert kept > 0
            del graph, result
            gc.collect()
            torch.cuda.synchronize()
            print("bytes of pools", kept, "then", seen("pool_bytes"))
            assert seen("pool_bytes") < kept
        """)

    def test_10_two_graphs_share_a_pool(self):
        self.check("""
            given = torch.ones(1 << 20, device="cuda")
            first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(first):
                one = (given * 2).sum()
            with torch.cuda.graph(second, pool=first.pool()):
                two = (given * 3).sum()
            for turn in range(10):
                over = [torch.full((1 << 20,), -1.0, device="cuda") for _ in range(8)]
                first.replay()
                assert float(one) == 2.0 * (1 << 20), (turn, float(one))
                second.replay()
                assert float(two) == 3.0 * (1 << 20), (turn, float(two))
            del first, one
            gc.collect()
            second.replay()
            assert float(two) == 3.0 * (1 << 20)
        """)

    def test_10_a_capture_that_fails(self):
        self.check("""
            given = torch.ones(1 << 20, device="cuda")
            for turn in range(5):
                graph = torch.cuda.CUDAGraph()
                try:
                    with torch.cuda.graph(graph):
                        inside = given * 2
                        # Not allowed in a capture.
                        torch.cuda.synchronize()
                except RuntimeError as error:
                    print(type(error).__name__, str(error).splitlines()[0])
                else:
                    raise AssertionError("the capture did not fail")
                inside = None
                graph.reset()
                del graph
                gc.collect()
                torch.cuda.synchronize()
                assert float((given * 3).sum()) == 3.0 * (1 << 20)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                inside = given * 2
            graph.replay()
            assert float(inside.sum()) == 2.0 * (1 << 20)
        """)

    def test_compiled_functions_have_no_graphs(self):
        self.check("""
            model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(),
                                        torch.nn.Linear(256, 256)).cuda().eval()
            compiled = torch.compile(model, mode="reduce-overhead")
            held = []
            with warnings.catch_warnings(record=True) as told, torch.no_grad():
                warnings.simplefilter("always")
                for turn in range(6):
                    given = torch.randn(32, 256, device="cuda")
                    held.append((compiled(given), model(given)))
                    del given
            # What a graph returned would be overwritten by the next replay.
            for found, wanted in held:
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
            assert any("without the CUDA graphs" in str(one.message) for one in told), told
            # What it writes into its input would be lost.
            def step(cache, x):
                cache.add_(x)
                return cache * 2
            step = torch.compile(step, mode="reduce-overhead")
            cache = torch.zeros(64, device="cuda")
            for turn in range(4):
                assert float(step(cache, torch.ones(64, device="cuda"))[0]) == 2.0 * (turn + 1)
                assert float(cache[0]) == turn + 1.0
            # Two of one class share their code: one would have the weights of the other.
            class Own(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.weight = torch.nn.Parameter(torch.randn(64, device="cuda"))
                def forward(self, x):
                    return x * self.weight + 1
            with torch.no_grad():
                pair = [Own(), Own()]
                both = [torch.compile(one, mode="reduce-overhead") for one in pair]
                for turn in range(3):
                    x = torch.randn(8, 64, device="cuda")
                    for one, compiled in zip(pair, both):
                        torch.testing.assert_close(compiled(x), one(x))
            assert seen("pool_bytes") == 0
        """, seconds=400)


class Ends(Case):
    def test_6_the_child_of_a_fork_drops_a_tensor(self):
        self.check("""
            tensor = bytes_of(MIB, 5)
            child = os.fork()
            if not child:
                del tensor
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert int(tensor.sum(dtype=torch.int64)) == 5 * MIB
            assert int(bytes_of(MIB, 6)[0]) == 6
        """)

    def test_7_the_interpreter_ends_with_tensors_alive(self):
        self.check("""
            import builtins
            torch.kept = bytes_of(MIB)
            builtins.kept = bytes_of(MIB)
            sys.kept = bytes_of(MIB)
            class Cycle: pass
            cycle = Cycle()
            cycle.own, cycle.tensor = cycle, bytes_of(MIB)
            cycle.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(cycle.graph):
                cycle.result = cycle.tensor + 1
            torch.cuda._sleep(LONG)
        """)

    def test_7_with_a_pool_alive(self):
        self.check("""
            pool = vbar.torch.mem_pool(headroom="1G")
            with torch.cuda.use_mem_pool(pool):
                torch.kept = bytes_of(30 * MIB)
                gone = bytes_of(MIB)
            del gone
            sys.kept = pool
        """, start=START)


class Installing(Case):
    def test_18_scenario_29_too_late(self):
        for use in ("torch.empty(1, device='cuda')", "torch.cuda.current_device()",
                    "torch.cuda.get_device_properties(0)"):
            self.check(f"""
                {use}
                error = refused(vbar.torch.InstallError, "before the first use of CUDA",
                                vbar.torch.install)
                print(error)
                assert not vbar.torch.is_installed()
                # PyTorch's own goes on.
                tensor = bytes_of(MIB, 4)
                assert torch.cuda.memory_allocated() >= MIB and int(tensor[0]) == 4
            """, start=START)

    def test_scenario_29_not_too_late(self):
        self.check("""
            assert torch.cuda.is_available() and torch.cuda.device_count() > 0
            vbar.torch.install()
            vbar.torch.install(headroom="2G")
            assert vbar.torch.check_in_use() > 0
            assert torch.cuda.get_allocator_backend() == "pluggable"
            with open("/proc/self/maps") as maps:
                copies = {line.split()[-1] for line in maps if "libvbar" in line}
            assert len(copies) == 1, copies
        """, start=START)

    def test_scenario_24_a_missing_hook_installs_nothing(self):
        self.check("""
            real = torch._C._cuda_customAllocator
            class Lacking:
                def __init__(self, allocator): self.allocator = allocator
                def __getattr__(self, name):
                    if name == "set_record_stream_fn": raise AttributeError(name)
                    return getattr(self.allocator, name)
            torch._C._cuda_customAllocator = lambda *arguments: Lacking(real(*arguments))
            error = refused(vbar.torch.InstallError, "set_record_stream_fn", vbar.torch.install)
            print(error)
            tensor = bytes_of(MIB, 4)
            assert torch.cuda.memory_allocated() >= MIB and int(tensor[0]) == 4
            assert torch.cuda.get_allocator_backend() == "native"
        """, start=START)

    def test_scenario_30_expandable_segments(self):
        self.check("""
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                vbar.torch.install()
            assert any("expandable_segments" in str(one.message) for one in told), told
            before = vbar.torch.allocations_seen(0)
            tensor = bytes_of(GIB)
            assert vbar.torch.allocations_seen(0) > before
            vbar.torch.check_in_use()
        """, start=START, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")

    def test_cudnns_search_stays_off(self):
        self.check("""
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                torch.backends.cudnn.benchmark = True
            assert any("stays False" in str(one.message) for one in told), told
            assert torch.backends.cudnn.benchmark is False
            layer = torch.nn.Conv2d(8, 8, 3).cuda()
            with torch.backends.cudnn.flags(enabled=True, benchmark=True):
                result = layer(torch.randn(2, 8, 64, 64, device="cuda"))
            assert torch.isfinite(result).all()
        """)


class Statistics(Case):
    def test_they_have_all_that_programs_read(self):
        keys = self.check("""
            bytes_of(MIB)
            import json
            print(json.dumps(sorted(torch.cuda.memory_stats())))
        """, start=START)
        native = set(json.loads(keys.splitlines()[-2]))
        self.check("""
            import json
            native = set(json.loads(sys.argv[1]))
            held = [bytes_of(5 * MIB + 1), bytes_of(100)]
            stats = torch.cuda.memory_stats()
            lacking = {key for key in native - set(stats)}
            print("PyTorch's keys that are not here:", sorted(lacking))
            # Counts of things that there are not, in some versions.
            assert not {key for key in lacking if not key.startswith(("oversize", "max_split"))}
            assert torch.cuda.memory_allocated() == stats["allocated_bytes.all.current"]
            assert torch.cuda.memory_allocated("cuda:0") == 5 * MIB + 512 + 512
            print(torch.cuda.memory_summary())
            assert "Allocated memory" in torch.cuda.memory_summary(abbreviated=True)
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_accumulated_memory_stats()
            assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
            segments = torch.cuda.memory_snapshot()
            assert sum(one["allocated_size"] for one in segments) == torch.cuda.memory_allocated()
            assert "segments" in torch.cuda.memory._snapshot()
            refused(RuntimeError, "records no history", torch.cuda.memory._record_memory_history)
            memory = getattr(getattr(torch, "accelerator", None), "memory_allocated", None)
            assert memory is None or memory() == torch.cuda.memory_allocated()
            torch.cuda.set_per_process_memory_fraction(0.1)
            assert torch.cuda.get_per_process_memory_fraction() == 0.1
            total = torch.cuda.get_device_properties(0).total_memory
            refused(torch.OutOfMemoryError, "out of memory", bytes_of, total // 5)
            torch.cuda.set_per_process_memory_fraction(1.0)
            ours = torch.cuda.memory_stats
            vbar.torch.uninstall_statistics()
            refused(RuntimeError, "does not yet support", torch.cuda.memory_stats)
            vbar.torch.install_statistics()
            assert torch.cuda.memory_allocated() == 5 * MIB + 1024
        """, json.dumps(sorted(native)))

    def test_13_empty_cache_gives_memory_to_others(self):
        self.check("""
            vbar.torch.uninstall_statistics()
            tensor = bytes_of(MIB)
            start = torch.cuda.mem_get_info()[0]
            much = [bytes_of(512 * MIB) for _ in range(4)]
            torch.cuda.synchronize()
            held = torch.cuda.mem_get_info()[0]
            assert start - held >= 2 * GIB - 64 * MIB, (start, held)
            del much
            torch.cuda.empty_cache()
            with vbar.torch.device() as device: device.trim()
            after = torch.cuda.mem_get_info()[0]
            print("free:", start, "with tensors:", held, "after:", after)
            assert after - held >= 2 * GIB - 64 * MIB, (held, after)
        """)

    def test_a_phase_gives_its_memory_back(self):
        self.check("""
            def phase():
                tensors = [bytes_of(256 * MIB) for _ in range(4)]
                return float(tensors[0].sum(dtype=torch.float64))
            bytes_of(1)
            for turn in range(3):
                phase()
                given = vbar.torch.release_phase()
                print("given back", given)
                assert given >= GIB - 64 * MIB
        """)


class Pools(Case):
    def test_12_scenario_26_what_a_pool_gives_back(self):
        printed = self.check("""
            options = dict(headroom="1G")
            pool = vbar.torch.mem_pool(**options)
            def segments(): return sum(s["total_size"] for s in pool.snapshot())
            with torch.cuda.use_mem_pool(pool):
                tensor = bytes_of(GIB, 8)
                assert int(tensor[-1]) == 8
                small = [bytes_of(1000, at) for at in range(10)]
                assert seen("malloc_count") >= 0
                del tensor
                torch.cuda.empty_cache()
                print("inside, after empty_cache:", segments())
            torch.cuda.empty_cache()
            print("outside, after empty_cache:", segments())
            with vbar.torch.device() as device:
                used = device.statistics().used_bytes
                print("frames", used)
                assert used >= GIB, "the pool was emptied: the documentation says it is not"
                assert [int(one[0]) for one in small] == list(range(10))
                del small, pool
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.synchronize()
                device.trim()
                after = device.statistics().used_bytes
                print("frames after the pool is gone", after)
                assert after <= used - GIB
        """, start=START)
        print(printed)

    def test_12_out_of_memory_in_a_pool_is_pytorchs(self):
        self.check("""
            pool = vbar.torch.mem_pool(headroom="1G")
            total = torch.cuda.get_device_properties(0).total_memory
            with torch.cuda.use_mem_pool(pool):
                for turn in range(3):
                    error = refused(torch.OutOfMemoryError, "CUDA out of memory", bytes_of, 2 * total)
                    assert int(bytes_of(MIB, 3)[0]) == 3
            print(error)
            vbar.torch.mem_pool(use_on_oom=True, no_split=True)
        """, start=START)

    def test_12_a_tensor_outlives_its_pool(self):
        self.check("""
            for turn in range(5):
                pool = vbar.torch.mem_pool(headroom="1G")
                with torch.cuda.use_mem_pool(pool):
                    tensor = bytes_of(40 * MIB, turn)
                del pool
                gc.collect()
                torch.cuda.empty_cache()
                assert int(tensor.sum(dtype=torch.int64)) == 40 * MIB * turn
                del tensor
                torch.cuda.empty_cache()
        """, start=START)


#: Runs a part of all operators, and saves what comes of them; the first argument says where, then
#: which part of how many.
OPERATORS = """
    import types
    stub = types.ModuleType("expecttest")
    stub.TestCase, stub.assert_expected_inline = __import__("unittest").TestCase, None
    sys.modules.setdefault("expecttest", stub)
    from torch.testing._internal.common_methods_invocations import op_db
    path, part, parts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    side = torch.cuda.Stream()
    dice = random.Random(part)

    def tensors(value):
        if isinstance(value, torch.Tensor): return [value]
        if isinstance(value, dict): value = list(value.values())
        if isinstance(value, (list, tuple)): return [t for one in value for t in tensors(one)]
        return []

    # Their results are whatever was in the memory before.
    UNWRITTEN = ("empty", "new_empty")

    def poison(shape):
        # What was freed on this stream is overwritten before it is used again.
        torch.full((max(shape.numel(), 1),), float("nan"), device="cuda")

    results, skipped = {}, {}
    for index, op in enumerate(op_db):
        if index % parts != part or op.name.startswith(UNWRITTEN): continue
        name = f"{op.name}.{op.variant_test_name}"
        try:
            torch.manual_seed(7)
            random.seed(7)
            grad = op.supports_autograd
            found = []
            for at, sample in enumerate(op.sample_inputs("cuda", torch.float32,
                                                          requires_grad=grad)):
                if at >= 6: break
                stream = side if dice.random() < 0.5 else torch.cuda.current_stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    torch.manual_seed(at)
                    out = tensors(op(sample.input, *sample.args, **sample.kwargs))
                    loss = [o for o in out if o.requires_grad and o.is_floating_point()]
                    if loss:
                        sum(o.sum() for o in loss).backward()
                    given = [t for t in tensors([sample.input, *sample.args]) if t.grad is not None]
                    out += [t.grad for t in given]
                    for one in out: poison(one.shape)
                    found += [one.detach().cpu() if one.layout == torch.strided else None
                              for one in out]
                torch.cuda.current_stream().wait_stream(stream)
                for one in out:
                    if one.layout == torch.strided: one.record_stream(stream)
            results[name] = found
        except Exception as error:
            skipped[name] = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
    torch.cuda.synchronize()
    torch.save((results, skipped), path)
    print(len(results), "operators,", len(skipped), "skipped")
"""


class Operators(Case):
    #: Parts of the operators; one of them is enough to notice what is wrong everywhere.
    PARTS = 16

    def test_16_operators_compute_what_they_do_with_pytorchs_own(self):
        named = os.environ.get("VBAR_TEST_OPS", "3")
        chosen = range(self.PARTS) if named == "all" else map(int, named.split(","))
        for part in chosen:
            with self.subTest(part=part), tempfile.TemporaryDirectory() as folder:
                paths = [pathlib.Path(folder) / name for name in ("native", "again", "ours")]
                starts = [START, START, INSTALLED]
                # Some samples are in the order of a set of strings.
                more = {"seconds": 500, "PYTHONHASHSEED": "0"}
                for path, start in zip(paths, starts):
                    print(self.check(OPERATORS, path, part, self.PARTS, start=start, **more))
                self.compare(*(torch.load(path) for path in paths))

    def compare(self, native, again, ours):
        """Native against ours; what differs between two native runs says nothing."""
        wrong, unlike = [], []
        for name, wanted in native[0].items():
            if name not in ours[0]:
                wrong.append(f"{name}: failed, {ours[1].get(name)}")
                continue
            if difference(wanted, again[0].get(name, [])):
                unlike.append(name)
            elif told := difference(wanted, ours[0][name]):
                wrong.append(f"{name}: {told}")
        print("skipped in both:", sorted(set(native[1]) & set(ours[1])))
        print("not the same twice:", unlike)
        self.assertFalse(wrong, "\n".join(wrong))
        self.assertGreater(len(native[0]), 20)


def difference(wanted, found):
    """Where two lists of tensors differ beyond the tolerance of their type; empty if nowhere."""
    if len(wanted) != len(found):
        return f"{len(found)} tensors, {len(wanted)} wanted"
    for at, (one, other) in enumerate(zip(wanted, found)):
        if one is None or other is None:
            continue
        try:
            torch.testing.assert_close(other, one, equal_nan=True)
        except AssertionError as error:
            return f"tensor {at} of {len(wanted)}, {error}\n{other}\nwanted\n{one}"
    return ""


class Memory(Case):
    def test_frames_move_under_running_kernels(self):
        self.check("""
            kept = bytes_of(1)
            for round in range(20):
                first = bytes_of(640 * MIB)
                behind = bytes_of(20 * MIB, round + 1)
                del first
                # Moves are earned by what is asked for.
                for turn in range(160):
                    torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
                first = bytes_of(640 * MIB, round)
                before, held = seen("device_alloc_count"), torch.cuda.memory_reserved()
                torch.cuda._sleep(LONG)
                first.add_(1)
                copy = first[:: 4 * MIB].clone()
                del first
                # More than that free piece: its frames come with it, while they are being read.
                # Or, where nothing lies before it, it is a part of the place; never in the first
                # round.
                large = bytes_of(960 * MIB, round + 2)
                mapped = seen("device_alloc_count") - before
                assert mapped == 60 or round and mapped == 20, (round, mapped)
                assert torch.cuda.memory_reserved() - held == 20 * 16 * MIB
                assert int(copy.min()) == int(copy.max()) == round + 1
                assert int(behind.min()) == int(behind.max()) == round + 1
                assert int(large.min()) == int(large.max()) == round + 2
                del behind, large, copy
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        """)

    def test_small_tensors_of_all_sizes_hold_little(self):
        self.check("""
            streams = [torch.cuda.Stream() for _ in range(4)]
            held = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    held += [bytes_of(size, size % 251) for size in range(512, 32769, 512)]
            reserved = torch.cuda.memory_reserved()
            print(sum(tensor.numel() for tensor in held), "bytes in", reserved)
            assert reserved <= 32 * MIB
            torch.cuda.synchronize()
            for tensor in held:
                assert int(tensor[0]) == int(tensor[-1]) == tensor.numel() % 251
        """)


class Speed(Case):
    def test_17_the_cost_of_a_tensor_is_printed(self):
        program = """
            import time
            for size in (512, 64 << 10, 4 << 20):
                for _ in range(200): torch.empty(size, dtype=torch.uint8, device="cuda")
                best = 1e9
                for _ in range(5):
                    began = time.perf_counter_ns()
                    for _ in range(5000): torch.empty(size, dtype=torch.uint8, device="cuda")
                    best = min(best, (time.perf_counter_ns() - began) / 5000)
                print(f"torch.empty of {size} bytes: {best:.0f} ns")
        """
        print("native:\n" + self.check(program, start=START))
        print("vbar:\n" + self.check(program))


if __name__ == "__main__":
    assert torch.cuda.is_available(), "there is no GPU for torch"
    print(sys.version, torch.__version__, flush=True)
    unittest.main(verbosity=2)
