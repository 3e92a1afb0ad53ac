"""The plug-in functions driven as PyTorch drives them, with no PyTorch and no GPU.

PyTorch is not loaded, so that nothing is thrown: a request that cannot be served is NULL and a
message. The allocator's device lives until the process ends: each test with a state of its own is a
program.
"""

import textwrap
import unittest

from support import check_program

START = """
    import ctypes, os, random, sys, threading
    import vbar, vbar.sim, vbar.torch
    from support import Sim
    from vbar import _abi_torch
    from vbar._call import last_message

    MIB = 1 << 20
    lib = _abi_torch.library()
    malloc, free = lib.vbar_torch_malloc, lib.vbar_torch_free

    def configure(spec="capacity=64M", **options):
        told = {"page_size": "2M", "headroom": 0, "threads": False, **options}
        vbar.torch.configure(driver=f"sim:{spec}", **told)

    def numbers(ordinal=0):
        told = _abi_torch.TorchStatistics(size=ctypes.sizeof(_abi_torch.TorchStatistics))
        assert lib.vbar_torch_statistics(ordinal, told) == 0, last_message()
        return told

    def allocated(ordinal=0):
        return numbers(ordinal).allocated_bytes.all.current

    def reserved(ordinal=0):
        return numbers(ordinal).reserved_bytes.all.current
"""

CONFIGURED = textwrap.dedent(START) + textwrap.dedent("""
    configure()
    device = vbar.torch.device(0)
    sim = Sim(device)
""")

ENDED = textwrap.dedent("""
    assert sim.violations() == 0, vbar.sim.Sim.violations(sim)
""")


class Plug(unittest.TestCase):
    def check(self, program, start=CONFIGURED, end=ENDED, **environment):
        whole = textwrap.dedent(start) + textwrap.dedent(program) + end
        return check_program(self, whole, **environment)

    def test_a_device_is_opened_on_first_use(self):
        self.check("""
            first = malloc(32, 0, 0)
            assert first and first % 512 == 0, last_message()
            with vbar.torch.device(0) as device:
                assert device.info.simulated and device.info.total_bytes == 1 << 30
                assert device.page_size == 16 * MIB
            assert numbers().malloc_count == 1 and allocated() == 512
            free(first, 32, 0, 0)
            assert allocated() == 0
        """, start=START, end="", VBAR_DRIVER="sim:capacity=1G")

    def test_a_device_that_the_program_opened_is_shared(self):
        self.check("""
            with vbar.Device(page_size="2M", headroom=0) as own:
                first = malloc(32, 0, 0)
                assert first, last_message()
                with vbar.torch.device(0) as device:
                    assert device.page_size == 2 * MIB
                    assert own.statistics().used_bytes == device.statistics().used_bytes > 0
            # The program's own id is not what keeps it.
            second = malloc(32, 0, 0)
            assert second and second != first
        """, start=START, end="", VBAR_DRIVER="sim:capacity=64M")

    def test_without_a_driver_it_is_null_and_a_message(self):
        self.check("""
            assert malloc(512, 0, 0) is None
            assert "nowhere" in last_message(), last_message()
            free(None, 0, 0, 0)
            free(0xdead, 0, 0, 0)
            lib.vbar_torch_reset()
        """, start=START, end="", VBAR_DRIVER="nowhere")

    def test_sizes(self):
        self.check("""
            assert malloc(0, 0, 0) is None and allocated() == 0
            held = {}
            for size in (1, 31, 512, 513, 12, 400, 4096, 100_000, MIB, MIB + 1, 5 * MIB, 11 * MIB):
                address = malloc(size, 0, 0)
                assert address and address % 512 == 0, (size, last_message())
                rounded = -(-size // 512) * 512
                for other, bytes in held.items():
                    assert address + rounded <= other or other + bytes <= address
                held[address] = rounded
                assert allocated() == sum(held.values())
            base = ctypes.c_size_t(7)
            for address, bytes in held.items():
                assert lib.vbar_torch_base_alloc(address + bytes - 1, base) == address
                assert base.value == bytes
                free(address, bytes, 0, 0)
            assert allocated() == 0
            free(None, 0, 0, 0)
            assert numbers().unknown_free_count == 0
        """)

    def test_scenario_28_live_ranges_never_overlap(self):
        self.check("""
            import bisect
            dice = random.Random(28)
            starts, ends, live = [], {}, []
            for turn in range(100_000):
                if len(live) > 400 or (live and dice.random() < 0.45):
                    address = live.pop(dice.randrange(len(live)))
                    starts.remove(address)
                    del ends[address]
                    free(address, 1, 0, 0)
                    continue
                size = 1 << dice.randrange(16)
                size += dice.randrange(size)
                address = malloc(size, 0, 0)
                assert address, last_message()
                at = bisect.bisect(starts, address)
                assert at == 0 or ends[starts[at - 1]] <= address
                assert at == len(starts) or address + size <= starts[at]
                starts.insert(at, address)
                ends[address] = address + size
                live.append(address)
            for address in live:
                free(address, 1, 0, 0)
            assert allocated() == 0 and numbers().unknown_free_count == 0
        """)

    def test_scenario_28_out_of_memory_is_null_and_a_message(self):
        self.check("""
            for turn in range(5):
                assert malloc(1 << 40, 0, 0) is None
                assert last_message().startswith(
                    "CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0 has a total capacity "
                    "of 64.00 MiB of which "), last_message()
                address = malloc(5 * MIB, 0, 0)
                assert address
                free(address, 0, 0, 0)
            assert malloc(1 << 60, 0, 0) is None
            assert last_message().endswith("Tried to allocate more than 1EB memory.")
            assert numbers().oom_count == 6 and allocated() == 0
            # What is cached is no obstacle.
            for size in (50 * MIB, 20 * MIB, 60 * MIB):
                address = malloc(size, 0, 0)
                assert address, last_message()
                free(address, 0, 0, 0)
        """)

    def test_scenario_22_unknown_and_double_frees_are_counted(self):
        self.check("""
            address = malloc(4096, 0, 0)
            used = device.statistics().used_bytes
            for turn, unknown in enumerate((0xdead, address + 512, address + 4096, 1, (1 << 64) - 1)):
                free(unknown, 4096, 0, 0)
                assert numbers().unknown_free_count == turn + 1
            assert allocated() == 4096 and device.statistics().used_bytes == used
            free(address, 4096, 0, 0)
            free(address, 4096, 0, 0)
            assert numbers().unknown_free_count == 6 and allocated() == 0
            free(None, 0, 0, 0)
            assert numbers().unknown_free_count == 6
        """)

    def test_a_block_is_reused_at_once_on_its_stream_and_later_elsewhere(self):
        self.check("""
            main, side = sim.stream(), sim.stream()
            with sim.held(main):
                first = malloc(3 * MIB, 0, main)
                sim.launch_pattern(first, 4096, 1, stream=main)
                free(first, 3 * MIB, 0, main)
                # Another stream may not have it while its work runs, its own may.
                other = malloc(3 * MIB, 0, side)
                assert other != first
                sim.launch_pattern(other, 4096, 1, stream=side)
                assert malloc(3 * MIB, 0, main) == first
                free(first, 3 * MIB, 0, main)
            sim.synchronize(main)
            again = malloc(3 * MIB, 0, side)
            sim.launch_pattern(again, 4096, 1, stream=side)
            sim.synchronize(side)
        """)

    def test_a_recorded_stream_keeps_a_block(self):
        self.check("""
            main, side = sim.stream(), sim.stream()
            first = malloc(3 * MIB, 0, main)
            with sim.held(side):
                sim.launch_pattern(first, 4096, 1, stream=side)
                lib.vbar_torch_record_stream(first, side)
                lib.vbar_torch_record_stream(None, side)
                lib.vbar_torch_record_stream(0xdead, side)
                free(first, 3 * MIB, 0, main)
                other = malloc(3 * MIB, 0, main)
                assert other != first
                assert numbers().pending_bytes == 3 * MIB
                sim.launch_pattern(other, 4096, 1, stream=main)
            sim.synchronize(side)
            found = {malloc(3 * MIB, 0, main) for _ in range(4)}
            assert first in found, (first, found)
            sim.synchronize(main)
        """)

    def test_threads_without_a_context(self):
        # A slab for each class of sizes and stream, of one page each here, wants room.
        roomy = CONFIGURED.replace("configure()", 'configure("capacity=256M")')
        self.check(start=roomy, program="""
            wrong, taken, lock = [], {}, threading.Lock()
            streams = [0, sim.stream(), sim.stream()]
            def work(seed):
                dice, live = random.Random(seed), []
                for turn in range(1500):
                    if len(live) > 20 or (live and dice.random() < 0.5):
                        address = live.pop(dice.randrange(len(live)))
                        with lock:
                            del taken[address]
                        free(address, 1, 0, 0)
                        continue
                    address = malloc(1 + dice.randrange(40_000), 0, dice.choice(streams))
                    with lock:
                        if not address or address in taken:
                            wrong.append((seed, turn, address))
                        taken[address] = seed
                    live.append(address)
                for address in live:
                    with lock:
                        del taken[address]
                    free(address, 1, 0, 0)
            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            assert not wrong, wrong[:5]
            assert allocated() == 0 and numbers().unknown_free_count == 0
        """)

    def test_frees_come_from_other_threads_and_streams(self):
        self.check("""
            streams = [sim.stream() for _ in range(3)]
            blocks = [malloc(100_000, 0, streams[at % 3]) for at in range(30)]
            def drop():
                while blocks:
                    # What PyTorch 2.8 tells of a reused address is another tensor's.
                    free(blocks.pop(), 7, 0, streams[0])
            thread = threading.Thread(target=drop)
            thread.start()
            thread.join()
            assert allocated() == 0 and numbers().unknown_free_count == 0
        """)

    def test_a_tensor_evicts_weights(self):
        self.check("""
            bar = device.create_bar(60 * MIB)
            with bar.fault(0, 60 * MIB, stream=0) as weights:
                assert weights
            assert bar.info().resident_count == 30
            address = malloc(40 * MIB, 0, 0)
            assert address, last_message()
            assert bar.info().resident_count <= 12
            # And back, when it is gone.
            free(address, 40 * MIB, 0, 0)
            bar.prioritise()
            with bar.fault(0, 60 * MIB, stream=0) as weights:
                assert weights, weights
        """)

    def test_empty_cache_gives_memory_back(self):
        self.check("""
            blocks = [malloc(7 * MIB, 0, 0) for _ in range(4)] + [malloc(100, 0, 0)]
            for block in blocks:
                free(block, 1, 0, 0)
            assert allocated() == 0 and reserved() >= 28 * MIB
            assert numbers().device_free_bytes <= 36 * MIB
            lib.vbar_torch_reset()
            assert reserved() == 0, reserved()
            device.trim()
            assert numbers().device_free_bytes == 64 * MIB
            lib.vbar_torch_reset()
        """)

    def test_the_fraction_bounds(self):
        self.check("""
            lib.vbar_torch_memory_fraction(0.5, 0)
            assert numbers().memory_fraction == 0.5
            assert malloc(40 * MIB, 0, 0) is None
            assert "out of memory" in last_message()
            first = malloc(20 * MIB, 0, 0)
            assert first, last_message()
            lib.vbar_torch_memory_fraction(1.5, 0)
            assert "0 to 1 is expected" in last_message()
            lib.vbar_torch_memory_fraction(1.0, 0)
            assert malloc(30 * MIB, 0, 0), last_message()
        """)

    def test_graph_pools_by_a_function_of_cpp(self):
        self.check("""
            side = sim.stream()
            Manager = ctypes.CFUNCTYPE(
                ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
            Invoker = ctypes.CFUNCTYPE(
                ctypes.c_bool, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t))
            class Function(ctypes.Structure):
                _fields_ = [("stored", ctypes.c_size_t * 2), ("manager", Manager),
                            ("invoker", Invoker)]
            destroyed = []
            manage = Manager(lambda target, source, what: destroyed.append(what) or False)
            admits = Invoker(lambda stored, stream: stream[0] == side)
            function = Function((1, 2), manage, admits)
            pool = _abi_torch.TorchPool(7, 1)
            lib.vbar_torch_begin_pool(0, pool, ctypes.addressof(function))
            # It was moved from: whoever made it has nothing left to destroy.
            assert not function.manager
            ours, theirs = malloc(3 * MIB, 0, side), malloc(3 * MIB, 0, 0)
            assert ours and theirs
            lib.vbar_torch_end_pool(0, pool)
            assert destroyed == [3]
            segments, _ = vbar.torch._statistics._read(0)
            def pool_of(address):
                (found,) = [s for s in segments if s.address <= address < s.address + s.bytes]
                return found.pool.first, found.pool.second
            assert pool_of(ours) == (7, 1) and pool_of(theirs) == (0, 0)
            # Its memory is its own until it is released: nobody else gets the address.
            free(ours, 1, 0, side)
            assert all(malloc(3 * MIB, 0, side) != ours for _ in range(3))
            lib.vbar_torch_release_pool(0, pool)
            lib.vbar_torch_release_pool(0, pool)
            assert "unknown pool" in last_message()
        """)

    def test_segments_of_a_pool_of_pytorchs(self):
        self.check("""
            take, give = lib.vbar_torch_segment_malloc, lib.vbar_torch_segment_free
            held = [take(size, 0, 0) for size in (2 * MIB, 20 * MIB, 6 * MIB)]
            assert all(held) and all(address % (2 * MIB) == 0 for address in held)
            assert take(1 << 40, 0, 0) is None
            assert "could not be had" in last_message(), last_message()
            assert take(40 * MIB, 0, 0) is None
            for address in held:
                give(address, 1, 0, 0)
            give(None, 0, 0, 0)
            assert take(60 * MIB, 0, 0), last_message()
        """)

    def test_several_devices_are_told_apart_by_the_address(self):
        self.check("""
            configure("devices=2,capacity=64M")
            first, second = malloc(5 * MIB, 0, 0), malloc(7 * MIB, 1, 0)
            assert first and second, last_message()
            assert (allocated(0), allocated(1)) == (5 * MIB, 7 * MIB)
            # Of another device, as it comes when a thread's current one differs.
            free(second, 7 * MIB, 0, 0)
            free(first, 5 * MIB, 1, 0)
            assert (allocated(0), allocated(1)) == (0, 0)
            # It is the first one's still, by its address, and that counts it.
            free(first, 5 * MIB, 1, 0)
            assert (numbers(0).unknown_free_count, numbers(1).unknown_free_count) == (1, 0)
            assert malloc(1, 2, 0) is None
            assert "does not exist" in last_message()
        """, start=START, end="")

    def test_a_forked_child_drops_what_it_inherited(self):
        self.check("""
            import threading
            address = malloc(MIB, 0, 0)
            child = os.fork()
            if not child:
                free(address, MIB, 0, 0)
                lib.vbar_torch_record_stream(address, 0)
                lib.vbar_torch_reset()
                lib.vbar_torch_release_pool(0, _abi_torch.TorchPool(0, 1))
                ok = malloc(MIB, 0, 0) is None and "forked" in last_message()
                os._exit(0 if ok else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert allocated() == MIB
            free(address, MIB, 0, 0)
        """)

    def test_the_process_ends_with_everything_alive(self):
        self.check("""
            import atexit
            held = [malloc(MIB, 0, 0) for _ in range(5)]
            def late():
                for address in held:
                    free(address, MIB, 0, 0)
            atexit.register(late)
            class Kept:
                def __del__(self, free=free, address=malloc(MIB, 0, 0)):
                    free(address, MIB, 0, 0)
            sys.kept = Kept()
            def work():
                while True:
                    free(malloc(100, 0, 0), 100, 0, 0)
            threading.Thread(target=work, daemon=True).start()
        """, end="")


if __name__ == "__main__":
    unittest.main()
