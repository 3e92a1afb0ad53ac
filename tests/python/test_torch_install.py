"""vbar.torch against a stand-in for PyTorch, which behaves as PyTorch was seen to: every branch.

Each test is a process of its own: an allocator is for ever. Needs ``c++``, which makes the stand-in's
libraries; without, the tests say so and are skipped.
"""

import itertools
import os
import pathlib
import shutil
import subprocess
import tempfile
import textwrap
import unittest

from support import MIB, ROOT, check_program, run_program, write_model

#: 64 MiB in pages of 2 MiB, on a device that is simulated.
SIM = "sim:capacity=64M"
OPTIONS = f"driver={SIM!r}, page_size='2M', headroom=0, threads=False"

START = f"""
    import gc, warnings
    warnings.simplefilter("error")
    import torch, vbar, vbar.torch
    from support import refused
    MIB = 1 << 20
    OPTIONS = dict({OPTIONS})
    def warned(words, call, *arguments, **named):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            result = call(*arguments, **named)
        texts = [str(one.message) for one in seen]
        assert len(texts) == 1 and words in texts[0], texts
        return result
"""

INSTALLED = textwrap.dedent(START) + """
vbar.torch.install(**OPTIONS)
"""


class Stand:
    """The stand-in's libraries, made once."""

    folder = None

    @classmethod
    def make(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = pathlib.Path(cls.folder.name)
        sources = ROOT / "tests/abi/torch"
        cls.compile("libc10.so", sources / "c10.cpp")
        cls.compile("libc10_cuda.so", sources / "c10_cuda.cpp", cls.path / "libc10.so")
        cls.compile("libstand_in.so", sources / "stand_in.cpp", cls.path / "libc10.so")
        (cls.path / "other").mkdir()
        lacking = "-DWITHOUT_THE_TYPE"
        cls.compile("other/libc10_cuda.so", sources / "c10_cuda.cpp", lacking)

    @classmethod
    def compile(cls, name, *arguments):
        flags = ["-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden"]
        flags += [f"-Wl,-soname,{pathlib.Path(name).name}", f"-Wl,-rpath,{cls.path}"]
        command = ["c++", *flags, *map(str, arguments), "-o", str(cls.path / name)]
        subprocess.run(command, check=True)

    @classmethod
    def environment(cls, c10=("libc10.so", "libc10_cuda.so"), **more):
        # The package may be installed, or be found by PYTHONPATH: here is what comes before.
        import sys

        here = pathlib.Path(__file__).parent
        return {
            "PYTHONPATH": os.pathsep.join([str(here / "stand_in"), str(here), *sys.path]),
            "STAND_IN_LIBRARY": str(cls.path / "libstand_in.so"),
            "STAND_IN_C10": ":".join(str(cls.path / name) for name in c10),
            **more,
        }


def setUpModule():
    if shutil.which("c++") is None:
        raise unittest.SkipTest("no c++ here: the stand-in for PyTorch could not be made")
    Stand.make()


def tearDownModule():
    Stand.folder.cleanup()


class Case(unittest.TestCase):
    def check(self, program, start=INSTALLED, **settings):
        whole = textwrap.dedent(start) + textwrap.dedent(program)
        return check_program(self, whole, **Stand.environment(**settings))


class Install(Case):
    def test_tensors_come_from_vbar(self):
        self.check("""
            assert vbar.torch.is_installed()
            tensor = torch.empty(3 * MIB, device="cuda")
            assert tensor.data_ptr() % 512 == 0 and tensor.data_ptr()
            assert torch.cuda.memory_allocated() == 3 * MIB
            assert vbar.torch.check_in_use() >= 1
            del tensor
            assert torch.cuda.memory_allocated() == 0
        """)

    def test_all_eight_hooks_are_set_with_the_one_loaded_library(self):
        self.check("""
            import ctypes
            from vbar import _abi_torch
            hooks = dict(torch._C._current.hooks)
            assert len(hooks) == 10, hooks
            library = vbar.load()
            names = {"malloc": "malloc", "free": "free", "init": "init", "reset": "reset",
                     "fraction": "memory_fraction", "base_alloc": "base_alloc",
                     "record_stream": "record_stream", "begin": "begin_pool", "end": "end_pool",
                     "release": "release_pool"}
            for hook, name in names.items():
                function = getattr(library, f"vbar_torch_{name}")
                assert ctypes.cast(function, ctypes.c_void_p).value == hooks[hook], hook
            with open("/proc/self/maps") as maps:
                copies = {line.split()[-1] for line in maps if "libvbar" in line}
            assert len(copies) == 1, copies
        """)

    def test_a_second_time_is_harmless(self):
        self.check("""
            kept = torch.empty(MIB, device="cuda")
            vbar.torch.install()
            vbar.torch.install(budget="48M", **OPTIONS)
            with vbar.torch.device() as device:
                assert device.budget == 48 * MIB
            refused(vbar.AlreadyOpen, "2097152", vbar.torch.install, driver=OPTIONS["driver"],
                    page_size="4M")
            assert torch.cuda.memory_allocated() == MIB
        """)

    def test_the_allocator_is_kept_for_ever(self):
        self.check("""
            import sys, weakref
            allocator = torch._C._current
            alive = weakref.ref(allocator)
            torch._C._current = None
            vbar.torch._install._kept.clear()
            del allocator
            gc.collect()
            assert alive() is not None
        """)

    def test_scenario_29_too_late_is_an_error_that_says_what_to_do(self):
        self.check("""
            torch.cuda.current_device()
            refused(vbar.torch.InstallError, "call vbar.torch.install() before the first use",
                    vbar.torch.install, **OPTIONS)
            assert not vbar.torch.is_installed() and torch._C._current is None
            # PyTorch goes on as it was.
            assert torch.cuda.memory_allocated() == 0 and torch.cuda.mem_get_info() == (1, 2)
        """, start=START)

    def test_scenario_29_before_is_not_late_after_questions(self):
        self.check("""
            assert torch.cuda.is_available() and torch.cuda.device_count() == 1
            vbar.torch.install(**OPTIONS)
            assert torch.empty(512, device="cuda").data_ptr()
        """, start=START)

    def test_another_allocator_was_first(self):
        self.check("""
            other = torch._C._cuda_customAllocator(1, 2)
            torch._C._cuda_changeCurrentAllocator(other)
            refused(vbar.torch.InstallError, "Can't swap an already initialized allocator",
                    vbar.torch.install, **OPTIONS)
            assert torch._C._current is other and not vbar.torch.is_installed()
            refused(RuntimeError, "does not yet support", torch.cuda.memory_stats)
        """, start=START)

    def test_scenario_24_a_missing_hook_is_named_and_nothing_is_installed(self):
        for name in ("set_record_stream_fn", "set_release_pool", "set_base_alloc_fn"):
            program = f"""
                refused(vbar.torch.InstallError, {name!r}, vbar.torch.install, **OPTIONS)
                assert torch._C._current is None and not vbar.torch.is_installed()
                assert torch.backends.cudnn.benchmark is False
                torch.backends.cudnn.benchmark = True
                assert torch.backends.cudnn.benchmark is True
                torch.cuda.init()
                assert torch.cuda.memory_stats() == {{}}
            """
            self.check(program, start=START, STAND_IN_MISSING=name)

    def test_scenario_24_exceptions_that_are_not_found(self):
        for c10 in ((), ("libc10.so",), ("libc10.so", "other/libc10_cuda.so")):
            self.check("""
                refused(vbar.torch.InstallError, "c10::OutOfMemoryError was not found",
                        vbar.torch.install, **OPTIONS)
                assert torch._C._current is None
            """, start=START, c10=c10)

    def test_versions(self):
        self.check("""
            refused(vbar.torch.InstallError, "2.8 or newer", vbar.torch.install, **OPTIONS)
        """, start=START, STAND_IN_VERSION="2.7.1")
        self.check("""
            warned("newer than what vbar is known to work with", vbar.torch.install, **OPTIONS)
            assert vbar.torch.is_installed()
        """, start=START, STAND_IN_VERSION="2.15.0a0+git123")

    def test_no_device(self):
        self.check("""
            refused(vbar.torch.InstallError, "no CUDA device", vbar.torch.install, **OPTIONS)
        """, start=START, STAND_IN_DEVICES="0")

    def test_scenario_30_expandable_segments_are_warned_of_and_not_in_use(self):
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            self.check("""
                warned("expandable_segments", vbar.torch.install, **OPTIONS)
                before = vbar.torch.allocations_seen(0)
                tensor = torch.empty(32 * MIB, device="cuda")
                assert vbar.torch.allocations_seen(0) == before + 1
                assert vbar.torch.check_in_use() == before + 2
            """, start=START, **{name: "max_split_size_mb:64,expandable_segments:True"})

    def test_a_choice_of_pytorchs_own_allocators_is_taken_out_of_its_settings(self):
        # As ComfyUI sets it on most cards.
        program = """
            import os
            vbar.torch.install(**OPTIONS)
            assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == {left!r}, dict(os.environ)
            torch._C._read_settings()
            # Of a second call nothing is changed.
            os.environ["PYTORCH_ALLOC_CONF"] = "backend:native"
            vbar.torch.install()
            assert os.environ["PYTORCH_ALLOC_CONF"] == "backend:native"
        """
        for given, left in (
            ("backend:cudaMallocAsync", None),
            ("max_split_size_mb:64, backend : native", "max_split_size_mb:64"),
            ("pinned_use_background_threads:True", "pinned_use_background_threads:True"),
        ):
            settings = {"PYTORCH_CUDA_ALLOC_CONF": given}
            self.check(program.format(left=left), start=START, **settings)
        # Where PyTorch keeps its allocator the setting is its own.
        self.check("""
            import os
            refused(vbar.torch.InstallError, "", vbar.torch.install, **OPTIONS)
            assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "backend:native"
            torch._C._read_settings()
        """, start=START, STAND_IN_MISSING="set_reset_fn", PYTORCH_CUDA_ALLOC_CONF="backend:native")

    def test_scenario_30_not_in_use_is_found_out(self):
        self.check("""
            vbar.torch.install(**OPTIONS)
            # Somebody else's tensors.
            torch.Tensor.__init__ = lambda self, nbytes, index: None
            refused(vbar.torch.NotInUse, "was not allocated by vbar", vbar.torch.check_in_use)
        """, start=START)

    def test_options_that_are_wrong_change_nothing(self):
        self.check("""
            refused(vbar.InvalidArgument, "headroom", vbar.torch.install, headroom="much")
            refused(TypeError, "context", vbar.torch.install, context=1)
            assert torch._C._current is None
            vbar.torch.install(**OPTIONS)
        """, start=START)

    def test_a_device_that_is_open_is_shared_with_its_pages(self):
        self.check("""
            with vbar.Device(**OPTIONS) as device:
                vbar.torch.install(driver=OPTIONS["driver"], budget="40M")
                tensor = torch.empty(8 * MIB, device="cuda")
                assert device.budget == 40 * MIB and device.page_size == 2 * MIB
                assert device.statistics().used_bytes >= 8 * MIB
        """, start=START)

    def test_a_budget_may_be_a_part_of_the_device(self):
        self.check("""
            refused(vbar.InvalidArgument, "percentage above 0", vbar.torch.install, budget="0%")
            assert torch._C._current is None
            vbar.torch.install(budget="25%", **OPTIONS)
            tensor = torch.empty(MIB, device="cuda")
            with vbar.torch.device() as device:
                quarter = device.info.total_bytes // 4
                assert device.budget == quarter == device.statistics().budget_bytes
                # The device is open now: a change of it.
                vbar.torch.install(driver=OPTIONS["driver"], budget="50%")
                assert device.budget == 2 * quarter
                # None leaves it.
                vbar.torch.configure(driver=OPTIONS["driver"])
                assert device.budget == 2 * quarter
        """, start=START)

    def test_its_device_shares_weights_and_budget(self):
        self.check("""
            with vbar.torch.device() as device, vbar.Device(**OPTIONS) as same:
                tensor = torch.empty(8 * MIB, device="cuda")
                assert device.info.simulated and device.page_size == 2 * MIB
                assert device.statistics().used_bytes == same.statistics().used_bytes
            assert vbar.torch.is_installed() and torch.empty(1, device="cuda").data_ptr()
        """)


class OutOfMemory(Case):
    def test_scenario_28_it_is_torchs_exception_and_the_program_goes_on(self):
        self.check("""
            for turn in range(10):
                refused(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB. "
                        "GPU 0 has a total capacity of 64.00 MiB of which ",
                        torch.empty, 2 << 30, device="cuda")
                assert torch.empty(MIB, device="cuda").data_ptr()
            refused(torch.OutOfMemoryError, "more than 1EB memory", torch.empty, 1 << 62,
                    device="cuda")
            assert torch.cuda.memory_stats()["num_ooms"] == 11
            assert torch.empty(0, device="cuda").data_ptr() == 0
            refused(RuntimeError, "0 to 1", torch.cuda.set_per_process_memory_fraction, 1.5)
            refused(RuntimeError, "does not exist", torch.empty, 1, device="cuda:3")
        """)


class Statistics(Case):
    def test_they_answer(self):
        self.check("""
            assert torch.cuda.memory_stats() == {} and torch.cuda.memory_allocated() == 0
            assert not torch.cuda.is_initialized()
            tensor = torch.empty(5 * MIB + 1, device="cuda")
            other = torch.empty(700, device="cuda:0")
            rounded = 5 * MIB + 512 + 1024
            assert torch.cuda.memory_allocated() == rounded
            for device in (None, 0, "cuda", "cuda:0", torch.device("cuda:0")):
                assert torch.cuda.memory.memory_allocated(device) == rounded
            assert torch.cuda.memory_reserved() >= rounded
            del tensor
            assert torch.cuda.max_memory_allocated() == rounded
            assert torch.cuda.memory_allocated() == 1024
            torch.cuda.reset_peak_memory_stats()
            assert torch.cuda.max_memory_allocated() == 1024
            stats = torch.cuda.memory_stats()
            assert list(stats) == sorted(stats)
            assert stats["allocated_bytes.all.allocated"] == rounded
            assert stats["allocated_bytes.all.freed"] == rounded - 1024
            assert stats["requested_bytes.all.current"] == 700
            assert stats["allocation.small_pool.current"] == 1
            assert stats["vbar.malloc_count"] == 2 and stats["num_ooms"] == 0
            torch.cuda.reset_accumulated_memory_stats()
            assert torch.cuda.memory_stats()["allocated_bytes.all.allocated"] == 0
            nested = torch.cuda.memory_stats_as_nested_dict()
            assert nested["allocated_bytes"]["all"]["current"] == 1024
            assert "allocated_bytes all [1024" in torch.cuda.memory_summary()
            assert torch.accelerator.memory_allocated() == 1024
            assert torch.accelerator.memory.memory_stats()["allocated_bytes.all.current"] == 1024
            free, total = torch.cuda.mem_get_info()
            assert total == 64 * MIB and 0 < free <= total
            refused(ValueError, "cuda device", torch.cuda.memory_allocated, "cpu")
        """)

    def test_the_fraction_is_kept(self):
        self.check("""
            torch.cuda.set_per_process_memory_fraction(0.5)
            assert torch.cuda.get_per_process_memory_fraction() == 0.5
            refused(torch.OutOfMemoryError, "out of memory", torch.empty, 40 * MIB, device="cuda")
            torch.cuda.set_per_process_memory_fraction(1.0)
            assert torch.empty(40 * MIB, device="cuda").data_ptr()
        """)

    def test_the_snapshot_covers_what_is_allocated(self):
        self.check("""
            held = [torch.empty(size, device="cuda") for size in (1, 5000, 3 * MIB, 9 * MIB)]
            segments = torch.cuda.memory_snapshot()
            assert sum(one["allocated_size"] for one in segments) == torch.cuda.memory_allocated()
            blocks = [block for one in segments for block in one["blocks"]]
            live = {b["address"] for b in blocks if b["state"] == "active_allocated"}
            assert live == {tensor.data_ptr() for tensor in held}
            for one in segments:
                assert one["device"] == 0 and one["segment_type"] in ("small", "large")
                assert sum(block["size"] for block in one["blocks"]) == one["total_size"]
            told = torch.cuda.memory._snapshot()
            assert told["segments"] == segments and told["device_traces"] == [[]]
        """)

    def test_history_is_refused_with_a_sentence(self):
        self.check("""
            record = torch.cuda.memory._record_memory_history
            refused(RuntimeError, "records no history", record)
            refused(vbar.Unsupported, "own allocator", record, "state", max_entries=5)
            record(None)
            record(enabled=False)
        """)

    def test_it_is_undone(self):
        self.check("""
            ours = torch.cuda.memory_stats
            vbar.torch.uninstall_statistics()
            vbar.torch.uninstall_statistics()
            for call in (torch.cuda.memory_stats, torch.cuda.memory.memory_stats,
                         torch.cuda.reset_peak_memory_stats, torch.accelerator.memory_stats):
                refused(RuntimeError, "does not yet support", call)
            assert torch.cuda.mem_get_info() == (1, 2)
            vbar.torch.install_statistics()
            torch.empty(1, device="cuda")
            assert torch.cuda.memory_stats()["vbar.malloc_count"] == 1
            # What somebody else put there stays.
            torch.cuda.memory_allocated = lambda: 7
            vbar.torch.uninstall_statistics()
            assert torch.cuda.memory_allocated() == 7
        """)

    def test_it_is_left_alone_when_told_to(self):
        self.check("""
            vbar.torch.install(statistics=False, **OPTIONS)
            refused(RuntimeError, "does not yet support", torch.cuda.memory_stats)
            vbar.torch.install(statistics=True)
            torch.cuda.memory_stats()
        """, start=START)


class Compatible(Case):
    def test_cudnns_search_stays_off(self):
        self.check("""
            def assign(): torch.backends.cudnn.benchmark = True
            warned("torch.backends.cudnn.benchmark stays False", assign)
            assert torch.backends.cudnn.benchmark is False
            def flags():
                with torch.backends.cudnn.flags(benchmark=True):
                    assert torch.backends.cudnn.benchmark is False
            warned("stays False", flags)
            torch.backends.cudnn.benchmark = False
        """)

    def test_cudnns_search_that_was_on_is_turned_off(self):
        self.check("""
            torch.backends.cudnn.benchmark = True
            warned("stays False", vbar.torch.install, **OPTIONS)
            assert torch.backends.cudnn.benchmark is False
        """, start=START)

    def test_nccl_shares_no_memory_of_graphs(self):
        program = """
            import os, subprocess, sys
            found = "import os; print(os.environ['NCCL_GRAPH_REGISTER'])"
            # As C's getenv has it, which a child inherits.
            child = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True)
            print(child.stdout.strip())
        """
        self.assertEqual(self.check(program), "0\n")
        self.assertEqual(self.check(program, NCCL_GRAPH_REGISTER="1"), "1\n")

    def test_compiled_functions_have_no_graphs(self):
        # Whether they were asked for by the mode, or by the global setting; and a warning says so.
        self.check("""
            from unittest import mock
            import torch._inductor.config as config
            compiler = torch._TorchCompileInductorWrapper
            asked = {"triton.cudagraphs": True, "max_autotune": True}
            def settings(given):
                return compiler(given)(None, [])
            assert settings(asked) == asked
            vbar.torch.install(**OPTIONS)
            vbar.torch.install(**OPTIONS)
            off = {"triton.cudagraphs": False}
            words = "need PyTorch's own allocator"
            assert warned(words, settings, asked) == {**asked, **off}
            assert asked["triton.cudagraphs"] is True
            assert settings({"max_autotune": True}) == {"max_autotune": True}
            assert settings(off) == off
            with mock.patch.object(config.triton, "cudagraphs", True):
                assert warned(words, settings, {}) == off
                assert settings(off) == off
        """, start=START)

    def test_without_a_compiler(self):
        self.check("""
            del torch._TorchCompileInductorWrapper
            vbar.torch.install(**OPTIONS)
        """, start=START)


class Pool(Case):
    def test_a_pool_has_vbars_segments(self):
        self.check("""
            pool = vbar.torch.mem_pool(use_on_oom=True, no_split=True, **OPTIONS)
            assert isinstance(pool, torch.cuda.MemPool) and pool.use_on_oom and pool.no_split
            assert torch._C._current is None and not vbar.torch.is_installed()
            plug = pool.allocator
            first = plug.malloc(2 * MIB, 0, 0)
            second = plug.malloc(20 * MIB, 0, 0)
            assert first and second and first % (2 * MIB) == 0
            # NULL, and no exception: PyTorch does the rest.
            assert plug.malloc(1 << 40, 0, 0) == 0
            for address, nbytes in ((first, 2 * MIB), (second, 20 * MIB), (0, 0)):
                plug.free(address, nbytes, 0, 0)
            assert vbar.torch.mem_pool(**OPTIONS).allocator is plug
        """, start=START)

    def test_a_pool_beside_the_allocator_is_refused(self):
        self.check("""
            refused(vbar.torch.InstallError, "needs PyTorch's own", vbar.torch.mem_pool)
        """)

    def test_scenario_30_expandable_segments(self):
        conf = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        self.check("""
            refused(vbar.torch.InstallError, "remove it", vbar.torch.mem_pool, **OPTIONS)
        """, start=START, STAND_IN_VERSION="2.9.1", **conf)
        self.check("""
            assert warned("ignored for them", vbar.torch.mem_pool, **OPTIONS)
        """, start=START, **conf)

    def test_no_split_needs_a_newer_pytorch(self):
        self.check("""
            refused(vbar.torch.InstallError, "2.10", vbar.torch.mem_pool, no_split=True, **OPTIONS)
            vbar.torch.mem_pool(**OPTIONS)
        """, start=START, STAND_IN_VERSION="2.9.1")


class Phase(Case):
    def test_what_a_phase_left_goes_back(self):
        self.check("""
            class Cycle: pass
            first = Cycle()
            first.tensor, first.own = torch.empty(40 * MIB, device="cuda"), first
            with vbar.torch.device() as device:
                held = device.statistics().used_bytes
                assert held >= 40 * MIB
                del first
                assert vbar.torch.release_phase() >= 40 * MIB
                assert device.statistics().used_bytes <= held - 40 * MIB
            assert torch.cuda.memory_reserved() == 0
            assert torch.cuda.mem_get_info()[0] == 64 * MIB
        """)


class Example(unittest.TestCase):
    def test_the_example_of_the_readme(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "model.safetensors"
            write_model(path, {name: ("U8", (8 * MIB,), bytes(8 * MIB)) for name in "abc"})
            program = (ROOT / "examples/torch_tensors.py").read_text()
            driver = "sim:capacity=2G"
            printed = check_program(
                self, program, path, **Stand.environment(VBAR_DRIVER=driver)
            )
        self.assertIn("512 MiB in a tensor", printed)
        self.assertIn("CUDA out of memory. Tried to allocate 4.00 GiB", printed)


class Ends(Case):
    def test_scenario_50_the_allocator_outlives_whoever_drops_what(self):
        # In every order, with what is dropped last left to the end of the interpreter, too.
        for order in itertools.permutations(("tensors", "pool", "allocator")):
            for count in (1, 2, 3):
                with self.subTest(order=order, count=count):
                    self.check(f"""
                        import sys, weakref
                        pool = vbar.torch.mem_pool(**OPTIONS)
                        made = vbar.torch._pool._made.pop()
                        sent = [made.malloc(size, 0, 0) for size in (4 * MIB, 2 * MIB)]
                        assert all(sent)
                        class Tensors:
                            # They free their memory when they go, through what PyTorch kept.
                            def __init__(self, allocator): self.allocator = allocator
                            def __del__(self):
                                while sent: self.allocator.free(sent.pop(), 0, 0, 0)
                        alive = weakref.ref(made)
                        held = dict(tensors=Tensors(made), pool=pool, allocator=made)
                        del pool, made
                        for name in {order[:count]!r}:
                            del held[name]
                            gc.collect()
                            assert alive() is not None, "PyTorch calls it when tensors are freed"
                        sys.kept = held
                        del held
                    """, start=START)

    def test_the_interpreter_ends_with_tensors_alive(self):
        self.check("""
            import builtins, sys
            torch.kept = torch.empty(MIB, device="cuda")
            builtins.kept = torch.empty(MIB, device="cuda")
            sys.kept = torch.empty(MIB, device="cuda")
            class Cycle: pass
            cycle = Cycle()
            cycle.own, cycle.tensor = cycle, torch.empty(MIB, device="cuda")
        """)

    def test_the_child_of_a_fork_drops_tensors(self):
        self.check("""
            import os
            tensor = torch.empty(MIB, device="cuda")
            child = os.fork()
            if not child:
                del tensor
                try:
                    torch.empty(MIB, device="cuda")
                except RuntimeError as error:
                    os._exit(0 if "forked" in str(error) else 2)
                os._exit(3)
            assert os.waitpid(child, 0)[1] == 0
            assert torch.cuda.memory_allocated() == MIB
        """)

    def test_without_torch_it_is_an_import_error(self):
        code, _, errors = run_program(
            "import sys; sys.modules['torch'] = None; import vbar.torch; vbar.torch.install()"
        )
        self.assertEqual(code, 1)
        self.assertIn("ModuleNotFoundError", errors)


class Soak(unittest.TestCase):
    """The load of benches/soak.py with PyTorch, which has its verdict in test_soak.py."""

    PROGRAM = """
        import json, os, sys, tempfile, threading
        sys.path.append(sys.argv[1])
        import torch, vbar, vbar.sim, vbar.torch
        KIB = 1 << 10
        opened = vbar.torch.device
        def device(ordinal):
            made = opened(ordinal)
            torch._dense.sim = vbar.sim.Sim(made)
            torch._dense.allocator = lambda nbytes: torch.empty(nbytes, device="cuda")
            return made
        vbar.torch.device = device
        import soak_torch
        soak_torch.PATCHED, soak_torch.RANK = 1, 2
        folder = tempfile.TemporaryDirectory()
        options = {
            "driver": "sim:capacity=4M,granularity=64K", "page": 64 * KIB, "headroom": 0,
            "budget": 1280 * KIB, "seed": 3, "folder": folder.name, "inject": sys.argv[2],
            "layers": 8, "model_bytes": 512 * KIB, "tokens": 1,
        }
        theirs, say = os.pipe()
        hear, theirs_too = os.pipe()
        heard = []
        def drive():
            with os.fdopen(hear) as lines:
                def ask(line):
                    os.write(say, line.encode() + b"\\n")
                    heard.append(json.loads(lines.readline()))
                assert json.loads(lines.readline()) == {"ready": True}
                for _ in range(2):
                    os.write(say, b"go 4\\n")
                    for line in ("stop", "sample", "bare", "sample", "time"):
                        ask(line)
                ask("end")
        thread = threading.Thread(target=drive, daemon=True)
        thread.start()
        soak_torch.Torch(options, theirs, theirs_too).serve()
        thread.join()
        assert heard[-1] == {"ended": True}, heard[-1]
        first, last = heard[3], heard[-3]
        assert last["rounds"] == 8 and last["passes"] > 8 and last["verified"] > 3 << 20, last
        assert last["evicted"] > 50 and first["tensor_bytes"] == last["tensor_bytes"], heard
        assert last["used"] <= 4 * 64 * KIB and first["bars"] == last["bars"], heard
        assert torch._dense.sim.violations() == [], torch._dense.sim.violations()
        print(last["wrong"], last["interrupted"])
    """

    def run_load(self, inject):
        environment = Stand.environment()
        printed = check_program(self, self.PROGRAM, ROOT / "benches", inject, **environment)
        return map(int, printed.split())

    def test_the_load_with_pytorch_runs_and_finds_a_wrong_byte(self):
        wrong, _ = self.run_load("")
        self.assertEqual(wrong, 0)
        wrong, _ = self.run_load("byte")
        self.assertGreater(wrong, 0)


if __name__ == "__main__":
    unittest.main()
