"""PyTorch on vbar's allocator over two GPUs: NCCL, FSDP, tensor parallel, a model on both of them.

Fails where there are fewer than two GPUs, or no torch: it is run on purpose, on a machine that has
them.

    VBAR_LIBRARY=.../libvbar.so PYTHONPATH=python_shim \\
        python3 tests/python/test_torch_distributed_gpu.py

Each test is a process of its own, or two that talk by NCCL; what they printed is shown. Everything
is compared with what one process computes, or with numbers that are exact.
"""

import sys
import tempfile
import textwrap
import unittest

import torch
from support import run, run_together

#: NVLink's multicast is not what is tested, and its failures are other programs' too.
SETTINGS = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "WARN",
}

START = """
    import copy, ctypes, datetime, faulthandler, gc, os, sys, threading
    # Whoever waits for ever says where, before it is killed.
    faulthandler.dump_traceback_later(50 if len(sys.argv) > 2 else 150, exit=True)
    import torch
    from torch import nn
    import torch.nn.functional as F
    import vbar, vbar.torch
    from support import refused, same, write_tensors

    MIB, GIB = 1 << 20, 1 << 30
    folder = sys.argv[1]

    def seen(name, ordinal):
        return getattr(vbar.torch._statistics._numbers(ordinal), name)

    def bytes_of(count, value, ordinal):
        return torch.full((count,), value, dtype=torch.uint8, device=f"cuda:{ordinal}")

    class Mlp(nn.Module):
        def __init__(self, width=512):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(self.norm(x))))

    class Stack(nn.Module):
        def __init__(self, count=6, width=512):
            super().__init__()
            self.blocks = nn.ModuleList(Mlp(width) for _ in range(count))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x
"""

INSTALLED = textwrap.dedent(START) + textwrap.dedent("""
    vbar.torch.install(budget="8G")
""")

RANKS = INSTALLED + textwrap.dedent("""
    import torch.distributed as dist

    rank = int(sys.argv[2])
    own = torch.device("cuda", rank)
    torch.cuda.set_device(own)
    vbar.torch.check_in_use()
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=60), device_id=own)

    def pressure():
        # Weights that take all that is free, so that tensors have to evict.
        device = vbar.torch.device()
        told = device.statistics()
        count = (told.budget_bytes - told.used_bytes) // device.page_size * device.page_size
        bar = device.create_bar(count)
        with bar.fault(0, count) as guard:
            assert guard, guard
        return device, bar
""")

LEAVE = "\ndist.destroy_process_group()\n"

END = """
torch.cuda.synchronize()
print("the end was reached", flush=True)
"""


def setUpModule():
    count = torch.cuda.device_count()
    assert count >= 2, f"two GPUs are needed, torch sees {count}"


class Case(unittest.TestCase):
    def ended_well(self, code, printed):
        print(printed)
        self.assertEqual(code, 0, f"the program ended with {code}:\n{printed}")
        self.assertIn("the end was reached", printed)
        self.assertNotIn("a bug of vbar", printed)
        return printed

    def check(self, program, start=INSTALLED, **environment):
        """Runs a program that must end well; what it printed."""
        whole = textwrap.dedent(start) + textwrap.dedent(program) + END
        with tempfile.TemporaryDirectory() as folder:
            return self.ended_well(*run(whole, folder, **{**SETTINGS, **environment}))

    def check_both(self, program, start=RANKS, end=LEAVE, **environment):
        """Runs a program on each GPU; both must end well. What they printed."""
        whole = textwrap.dedent(start) + textwrap.dedent(program) + end + END
        with tempfile.TemporaryDirectory() as folder:
            both = [(folder, rank) for rank in (0, 1)]
            results = run_together(whole, both, seconds=60, **{**SETTINGS, **environment})
        if any(code for code, _ in results):
            # The one that failed is not always the first.
            self.fail("\n".join(f"ended with {code}:\n{printed}" for code, printed in results))
        return [self.ended_well(*result) for result in results]


class Processes(Case):
    def test_collectives(self):
        # With and without NCCL's own use of virtual memory.
        for settings in ({}, {"NCCL_CUMEM_ENABLE": "0"}):
            with self.subTest(**settings):
                self.check_both("""
                    print("NCCL", torch.cuda.nccl.version())
                    device, bar = pressure()
                    dice = torch.Generator("cuda")
                    for turn, count in enumerate((1, 1000, 1 << 20, 64 << 20)):
                        def of(other):
                            dice.manual_seed(10 * turn + other)
                            return torch.randint(-1 << 40, 1 << 40, (count,), device="cuda",
                                                 generator=dice)
                        mine, others = of(rank), of(1 - rank)
                        total = mine.clone()
                        dist.all_reduce(total)
                        same(total, mine + others, "all_reduce")
                        both = torch.empty(2 * count, dtype=torch.int64, device="cuda")
                        dist.all_gather_into_tensor(both, mine)
                        same(both[rank * count : (rank + 1) * count], mine, "all_gather")
                        same(both[(1 - rank) * count :][:count], others, "all_gather")
                        part = torch.empty(count, dtype=torch.int64, device="cuda")
                        dist.reduce_scatter_tensor(part, both)
                        same(part, 2 * mine, "reduce_scatter")
                        told = mine.clone()
                        dist.broadcast(told, src=0)
                        same(told, mine if rank == 0 else others, "broadcast")
                        swapped = torch.empty_like(both)
                        dist.all_to_all_single(swapped, both)
                        same(swapped[:count], swapped[count:], "all_to_all")
                        got = torch.empty_like(mine)
                        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, 1 - rank),
                                                        dist.P2POp(dist.irecv, got, 1 - rank)])
                        for work in works: work.wait()
                        same(got, others, "send and receive")
                    print(device.statistics())
                    assert device.statistics().evicted_page_count > 0
                    assert seen("unknown_free_count", rank) == 0
                """, **settings)

    def test_a_tensor_is_dropped_while_it_is_sent(self):
        self.check_both("""
            side = torch.cuda.Stream()
            for turn in range(30):
                count = (8 + turn % 5) * MIB
                work = None
                with torch.cuda.stream(side):
                    torch.cuda._sleep(20_000_000)
                    mine = torch.full((count,), rank + 1, dtype=torch.int32, device="cuda")
                    both = torch.empty(2 * count, dtype=torch.int32, device="cuda")
                    work = dist.all_gather_into_tensor(both, mine, async_op=True)
                del mine
                # What would get its memory.
                over = [torch.full((count,), 9, dtype=torch.int32, device="cuda") for _ in range(3)]
                with torch.cuda.stream(side):
                    work.wait()
                    assert int(both[0]) == int(both[count - 1]) == 1
                    assert int(both[count]) == int(both[-1]) == 2, turn
                    assert int(both.sum()) == 3 * count, turn
                del over, both, work
        """, TORCH_NCCL_AVOID_RECORD_STREAMS="0")

    def test_a_captured_collective(self):
        # NCCL would share what a graph uses with the other process: by default it is told not to.
        for settings in ({}, {"NCCL_GRAPH_REGISTER": "1"}):
            with self.subTest(**settings):
                self.check_both("""
                    print("NCCL_GRAPH_REGISTER is", os.environ["NCCL_GRAPH_REGISTER"])
                    given = torch.zeros(8 * MIB, device="cuda")
                    for _ in range(3):
                        dist.all_reduce(given)
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        total = given * 2
                        dist.all_reduce(total)
                        result = total + 1
                    for turn in range(20):
                        given.fill_(turn + rank)
                        over = [torch.full((8 * MIB,), -1.0, device="cuda") for _ in range(4)]
                        graph.replay()
                        wanted = 2 * (2 * turn + 1) + 1
                        assert result.unique().tolist() == [wanted], (turn, result[:4])
                        del over
                    del graph, total, result
                    gc.collect()
                    torch.cuda.synchronize()
                """, **settings)

    def test_fully_sharded(self):
        self.check_both("""
            from torch.distributed.fsdp import fully_shard
            torch.manual_seed(3)
            plain = Stack().cuda()
            sharded = copy.deepcopy(plain)
            for block in sharded.blocks:
                fully_shard(block)
            fully_shard(sharded)
            device, bar = pressure()
            before = device.statistics().evicted_page_count
            # In proportion to gradients, so that what is rounded otherwise stays as small as it is.
            one = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
            other = torch.optim.SGD(sharded.parameters(), lr=0.5, momentum=0.9)
            for turn in range(4):
                torch.manual_seed(100 + turn)
                batch = torch.randn(2, 256, 512, device="cuda")
                # One process computes the mean over all, each of two that over its half.
                plain(batch).square().mean().backward()
                sharded(batch[rank : rank + 1]).square().mean().backward()
                for optimizer in (one, other):
                    optimizer.step()
                    optimizer.zero_grad()
            whole = dict(sharded.named_parameters())
            for name, wanted in plain.named_parameters():
                found = whole[name].full_tensor()
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)
            held = sum(each.to_local().nbytes for each in whole.values())
            print("sharded", held, "bytes of", sum(each.nbytes for each in plain.parameters()))
            evicted = device.statistics().evicted_page_count - before
            print(evicted, "pages evicted")
            assert evicted > 0
            assert seen("unknown_free_count", rank) == 0
        """)

    def test_tensor_parallel(self):
        self.check_both("""
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor.parallel import (
                ColwiseParallel, RowwiseParallel, parallelize_module)
            mesh = init_device_mesh("cuda", (2,))
            torch.manual_seed(3)
            plain = Stack(3).cuda()
            parallel = copy.deepcopy(plain)
            for block in parallel.blocks:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, mesh, plan)
            assert parallel.blocks[0].up.weight.to_local().shape == (1024, 512)
            for turn in range(3):
                torch.manual_seed(100 + turn)
                batch = torch.randn(64, 512, device="cuda")
                for module in (plain, parallel):
                    module.zero_grad()
                wanted, found = plain(batch), parallel(batch)
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
                wanted.square().mean().backward()
                found.square().mean().backward()
                gradients = dict(plain.named_parameters())
                for name, value in parallel.named_parameters():
                    grad = getattr(value.grad, "full_tensor", lambda: value.grad)()
                    torch.testing.assert_close(grad, gradients[name].grad, rtol=1e-3, atol=1e-5)
        """)

    def test_pytorchs_allocator_registers_a_pool_of_ours(self):
        # Its memory cannot be shared: refused, or done without, and the bits are right.
        printed = self.check_both("""
            import torch.distributed as dist
            rank = int(sys.argv[2])
            own = torch.device("cuda", rank)
            torch.cuda.set_device(own)
            dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank,
                                    world_size=2, timeout=datetime.timedelta(seconds=60),
                                    device_id=own)
            pool = vbar.torch.mem_pool(budget="8G")
            with torch.cuda.use_mem_pool(pool):
                tensor = torch.full((32 * MIB,), rank + 1, dtype=torch.int32, device="cuda")
            backend = dist.group.WORLD._get_backend(own)
            try:
                backend.register_mem_pool(pool)
                print("registered")
            except RuntimeError as error:
                print("not registered:", error)
            for turn in range(3):
                dist.all_reduce(tensor)
                assert tensor.unique().tolist() == [3 * 2**turn], tensor.unique()
        """, start=START)
        self.assertTrue(all("registered" in each for each in printed))

    def test_the_interpreters_end_with_the_group_alive(self):
        self.check_both("""
            import builtins
            builtins.kept = torch.ones(MIB, device="cuda")
            dist.all_reduce(builtins.kept)
            builtins.pending = dist.all_reduce(builtins.kept, async_op=True)
        """, end="")


class Devices(Case):
    def test_15_copies_between_two_gpus(self):
        self.check("""
            for turn in range(20):
                count = 1 + turn * 300_007
                torch.manual_seed(turn)
                first = torch.randint(-1 << 60, 1 << 60, (count,), device=f"cuda:{turn % 2}")
                second = first.to(f"cuda:{1 - turn % 2}")
                same(second.cpu(), first.cpu(), "one way")
                same(second.to(first.device), first, "there and back")
                part = torch.zeros(2 * count, dtype=torch.int64, device=second.device)
                part[::2].copy_(first, non_blocking=True)
                same(part[::2].cpu(), first.cpu(), "strided")
            for ordinal in (0, 1):
                assert seen("malloc_count", ordinal) > 0
                assert seen("unknown_free_count", ordinal) == 0
        """)

    def test_15_a_kernel_reads_the_other_gpus_memory(self):
        self.check("""
            from vbar.torch._parameters import bytes_at
            for owner in (0, 1):
                other = 1 - owner
                assert torch.cuda.can_device_access_peer(other, owner)
                torch.manual_seed(owner)
                tensor = torch.randint(0, 256, (64 * MIB,), dtype=torch.uint8,
                                       device=f"cuda:{owner}")
                torch.cuda.synchronize(owner)
                # A tensor of the one device at an address of the other.
                view = bytes_at(torch, tensor.data_ptr(), tensor.nbytes, other)
                assert view.device.index == other
                total = view.sum(dtype=torch.int64)
                assert total.device.index == other
                assert int(total) == int(tensor.sum(dtype=torch.int64))
                view.add_(1)
                torch.cuda.synchronize(other)
                assert int(tensor.sum(dtype=torch.int64)) == int(view.sum(dtype=torch.int64))
                del view
        """)

    def test_4_frees_from_another_thread_with_another_current_device(self):
        self.check("""
            for turn in range(50):
                held = [bytes_of((3 + turn % 4) * MIB, at, at % 2) for at in range(6)]
                assert [int(each[-1]) for each in held] == list(range(6))
                def drop():
                    torch.cuda.set_device(turn % 2)
                    with torch.cuda.stream(torch.cuda.Stream()):
                        while held: held.pop()
                thread = threading.Thread(target=drop)
                thread.start()
                thread.join()
            gc.collect()
            for ordinal in (0, 1):
                assert torch.cuda.memory_allocated(ordinal) == 0, torch.cuda.memory_summary(ordinal)
                assert seen("unknown_free_count", ordinal) == 0
        """)

    def test_each_gpu_has_a_budget_and_weights_of_its_own(self):
        self.check("""
            with vbar.torch.device(0) as first, vbar.torch.device(1) as second:
                first.budget, second.budget = 2 * GIB, 3 * GIB
                bars = [device.create_bar(GIB) for device in (first, second)]
                for bar in bars:
                    with bar.fault(0, GIB): pass
                # That of the one gives way to a tensor there, that of the other stays.
                tensor = bytes_of(3 * GIB // 2, 7, 0)
                assert first.statistics().evicted_page_count > 0
                assert second.statistics().evicted_page_count == 0
                error = refused(torch.OutOfMemoryError, "GPU 0 has", bytes_of, 2 * GIB, 1, 0)
                error = refused(torch.OutOfMemoryError, "GPU 1 has", bytes_of, 4 * GIB, 1, 1)
                print(error)
                other = bytes_of(5 * GIB // 2, 8, 1)
                assert int(tensor[-1]) == 7 and int(other[-1]) == 8
                assert first.statistics().used_bytes <= 2 * GIB
                assert second.statistics().used_bytes <= 3 * GIB
                assert torch.cuda.memory_allocated(0) == 3 * GIB // 2
                assert torch.cuda.memory_allocated(1) == 5 * GIB // 2
                print(first.statistics(), second.statistics(), sep="\\n")
        """)

    def test_collectives_within_one_process(self):
        # Here NCCL reads and writes the other GPU's tensors themselves.
        self.check("""
            from torch.cuda import nccl
            for count in (1, 1000, MIB, 40 * MIB):
                given = [torch.full((count,), at + 1, dtype=torch.int32, device=f"cuda:{at}")
                         for at in (0, 1)]
                nccl.all_reduce(given)
                for ordinal in (0, 1):
                    torch.cuda.synchronize(ordinal)
                for each in given:
                    assert each.unique().tolist() == [3], each[:8]
                whole = [torch.empty(2 * count, dtype=torch.int32, device=f"cuda:{at}")
                         for at in (0, 1)]
                given[1].fill_(7)
                nccl.all_gather(given, whole)
                for ordinal in (0, 1):
                    torch.cuda.synchronize(ordinal)
                for each in whole:
                    assert each[:count].unique().tolist() == [3]
                    assert each[count:].unique().tolist() == [7]
            torch.manual_seed(1)
            module = Stack(2).to("cuda:0")
            batch = torch.randn(64, 512, device="cuda:0")
            with torch.no_grad():
                torch.testing.assert_close(nn.DataParallel(module)(batch), module(batch))
        """)

    def test_a_model_streamed_over_two_gpus(self):
        for start in (INSTALLED, START):
            with self.subTest(installed=start is INSTALLED):
                self.check("""
                    torch.manual_seed(5)
                    halves = [Stack(8, 2048).to(f"cuda:{at}", torch.bfloat16) for at in (0, 1)]
                    def whole(modules, x):
                        for at, module in enumerate(modules):
                            x = module(x.to(f"cuda:{at}"))
                        return x
                    given = [torch.randn(64, 2048, dtype=torch.bfloat16, device="cuda:0")
                             for _ in range(6)]
                    with torch.no_grad():
                        wanted = [whole(halves, x).cpu() for x in given]
                    paths = [write_tensors(os.path.join(folder, f"{at}.safetensors"),
                                           half.state_dict()) for at, half in enumerate(halves)]
                    total = sum(each.nbytes for each in halves[0].parameters())
                    del halves
                    torch.cuda.empty_cache()

                    # With vbar's allocator it is a budget of tensors too.
                    installed = vbar.torch.is_installed()
                    options = {} if installed else {"page_size": "2M"}
                    budgets = [total // 2 + installed * 64 * MIB, total // 3 + installed * 64 * MIB]
                    streamed, streams = [], []
                    torch.set_default_dtype(torch.bfloat16)
                    for at, path in enumerate(paths):
                        with vbar.torch.empty_model():
                            streamed.append(Stack(8, 2048))
                        streams.append(vbar.torch.stream(streamed[at], path, budgets[at],
                                                         ordinal=at, **options))
                    for turn, x in enumerate(given):
                        # Whichever is current.
                        torch.cuda.set_device(turn % 2)
                        with torch.no_grad():
                            found = whole(streamed, x)
                        assert found.device.index == 1
                        same(found.cpu(), wanted[turn], f"pass {turn}")
                    for at, stream in enumerate(streams):
                        told = stream.device.statistics()
                        print(f"cuda:{at}: {told.filled_bytes / total:.2f} times filled,",
                              told.used_bytes, "bytes held of", told.budget_bytes)
                        assert stream.device.ordinal == at
                        assert told.used_bytes <= told.budget_bytes
                        assert told.filled_bytes > 1.5 * total
                """, start=start)


if __name__ == "__main__":
    print(sys.version, torch.__version__, flush=True)
    unittest.main(verbosity=2)
