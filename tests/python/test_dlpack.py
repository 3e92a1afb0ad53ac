"""DLPack and ``__cuda_array_interface__``: what is exported, and who holds the pins."""

import ctypes
import gc
import itertools
import threading
import unittest
from unittest import mock

import vbar
from consumer import Consumed
from support import PAGE, Case, Sim, check_program, open_device, pattern
from vbar import _abi, _dlpack

#: Code, bits and lanes of dlpack.h.
TYPES = {
    "BOOL": (6, 8, 1),
    "I8": (0, 8, 1),
    "I16": (0, 16, 1),
    "I32": (0, 32, 1),
    "I64": (0, 64, 1),
    "U8": (1, 8, 1),
    "U16": (1, 16, 1),
    "U32": (1, 32, 1),
    "U64": (1, 64, 1),
    "F16": (2, 16, 1),
    "F32": (2, 32, 1),
    "F64": (2, 64, 1),
    "BF16": (4, 16, 1),
    "C64": (5, 64, 1),
    "F8_E4M3": (10, 8, 1),
    "F8_E4M3FNUZ": (11, 8, 1),
    "F8_E5M2": (12, 8, 1),
    "F8_E5M2FNUZ": (13, 8, 1),
    "F8_E8M0": (14, 8, 1),
    "F4": (17, 4, 2),
}
INTERFACE_TYPES = {
    "BOOL": "|b1",
    "I8": "|i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "U8": "|u1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "C64": "<c8",
}


def pins(bar):
    return bar.residency()[0].pin_count


class WithModel(Case):
    def setUp(self):
        super().setUp()
        self.device = open_device(budget=2 * PAGE)
        self.addCleanup(self.device.close)
        self.sim = Sim(self.device)
        self.data = pattern(512)
        tensors = {f"{name}": (name, (4, 8), self.raw(name, 32)) for name in TYPES}
        tensors["scalar"] = ("F32", (), self.data[:4])
        tensors["empty"] = ("F32", (3, 0), b"")
        tensors["F6_E2M3"] = ("F6_E2M3", (4, 8), self.data[:24])
        tensors["large"] = ("U8", (PAGE,), pattern(PAGE, 2))
        self.model = self.device.open_model(self.model_of(tensors))
        self.addCleanup(self.model.close)
        self.assertEqual(self.model["BF16"].bar_offset // PAGE, 0)

    def raw(self, name, elements):
        bits = TYPES[name][1]
        data = self.data[: elements * bits // 8]
        return bytes(byte & 1 for byte in data) if name == "BOOL" else data


class Exports(WithModel):
    """What is exported."""

    def test_every_type_goes_with_its_code_and_its_bytes(self):
        stream = self.sim.stream()
        for name, dtype in TYPES.items():
            with self.model.fault(name, stream) as weight:
                view = weight.view()
                self.assertEqual(view.__dlpack_device__(), (2, 0))
                for version in (None, (0, 8), (1, 0), (1, 3), (2, 0)):
                    tensor = Consumed(view.__dlpack__(stream=stream, max_version=version))
                    self.assertEqual(tensor.dtype, dtype, name)
                    shape = (4, 4) if name == "F4" else (4, 8)
                    self.assertEqual((tensor.shape, tensor.strides), (shape, (shape[1], 1)))
                    self.assertEqual((tensor.device, tensor.data), ((2, 0), weight.address))
                    self.assertEqual(tensor.versioned, version is not None and version >= (1, 0))
                    if tensor.versioned:
                        managed = tensor.managed
                        # Bytes of a file: read-only.
                        told = (managed.major, managed.minor, managed.flags)
                        self.assertEqual(told, (1, 1, 1))
                    found = self.sim.read(tensor.data, weight.nbytes, stream)
                    self.assertEqual(found, self.raw(name, 32))
                    tensor.delete()
        self.assertEqual(self.sim.violations(), 0)

    def test_types_that_do_not_go_leave_no_pin(self):
        with self.model.fault("F6_E2M3") as weight:
            before = pins(self.model.bar)
            with self.assertRaisesRegex(vbar.Unsupported, "6-bit"):
                weight.view().__dlpack__()
            self.assertEqual(pins(self.model.bar), before)
            self.assertEqual(Consumed(weight.view("u8").__dlpack__()).shape, (24,))

    def test_an_export_that_nobody_gets_leaves_no_pin(self):
        # As a signal's handler does it that raises right after a call was done, or before it.
        calls = [(_dlpack._known_capsules(), name) for name in ("_new", "export")]
        with self.model.fault("F32") as weight:
            weight.view().__dlpack__()
            before = pins(self.model.bar)
            for (owner, name), done in itertools.product(calls, (False, True)):
                function = getattr(owner, name)

                def interrupted(*arguments, function=function, done=done):
                    if done:
                        function(*arguments)
                    raise KeyboardInterrupt

                for version in (None, (1, 1)):
                    with self.subTest(name, done=done), mock.patch.object(owner, name, interrupted):
                        with self.assertRaises(KeyboardInterrupt):
                            weight.view().__dlpack__(max_version=version)
                    gc.collect()
                    self.assertEqual(pins(self.model.bar), before, name)
        self.assertEqual(self.sim.violations(), 0)

    def test_an_export_ends_well_wherever_a_handler_raises(self):
        check_program(
            self,
            """
            import random, signal, sys, time, vbar
            from vbar import _dlpack
            device = vbar.Device("sim", headroom=0, threads=False)
            bar = device.create_bar(1)
            guard = bar.fault(0, 64)
            view = guard.view("U8")
            class Stop(Exception):
                pass
            def handler(number, frame):
                # Not in what is only there to stop the timer, however late that comes to it.
                if frame.f_code.co_name not in ("once", "<module>"):
                    raise Stop
            sys.unraisablehook = lambda raised: None
            def once():
                try:
                    # Again, for one that a finalizer swallows.
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 2e-4), 0.02)
                    while True:
                        view.__dlpack__()
                except Stop:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                once()
            """,
        )

    def test_a_shape_of_numbers_that_overflow_is_checked_by_pythons_own(self):
        class Count(int):
            def __mul__(self, other):
                return 0

            __rmul__ = __mul__

        class Index:
            def __init__(self, count):
                self.count = count

            def __index__(self):
                return self.count

        with self.model.fault("F32") as weight:
            for kind in (Count, Index):
                self.assertEqual(weight.view("U8", kind(5)).shape, (5,))
                self.assertIs(type(weight.view("U8", (kind(5), 2)).shape[0]), int)
                for shape in (kind(1 << 40), (kind(1 << 32), kind(1 << 32)), (kind(-1),)):
                    with self.assertRaises(vbar.InvalidArgument):
                        weight.view("U8", shape)
            with self.assertRaises(vbar.InvalidArgument):
                weight.view("U8", (1 << 80, 0))

    def test_each_export_has_pins_of_its_own(self):
        with self.model.fault("F32") as weight:
            view = weight.view()
            first, second = Consumed(view.__dlpack__()), Consumed(view.__dlpack__())
            self.assertEqual(pins(self.model.bar), 3)
            first.delete()
            self.assertEqual(pins(self.model.bar), 2)
            second.delete()
            self.assertEqual(pins(self.model.bar), 1)
        self.assertEqual(self.sim.violations(), 0)

    def test_scalars_and_empty_tensors_go(self):
        with self.model.fault("scalar") as weight:
            tensor = Consumed(weight.view().__dlpack__())
            self.assertEqual((tensor.ndim, tensor.shape, tensor.data), (0, (), weight.address))
            tensor.delete()
        with self.model.fault("empty") as weight:
            tensor = Consumed(weight.view().__dlpack__())
            self.assertEqual((tensor.shape, tensor.strides, tensor.data), ((3, 0), (1, 1), 0))
            tensor.delete()

    def test_a_view_may_be_of_another_type_and_shape(self):
        with self.model.fault("F32") as weight:
            for dtype, shape, wanted in (
                (None, None, (4, 8)),
                ("I32", None, (4, 8)),
                ("bfloat16", None, (64,)),
                (vbar.Dtype.U8, (2, 64), (2, 64)),
                (None, 5, (5,)),
                ("float64", (), ()),
                ("complex64", (0, 3), (0, 3)),
            ):
                view = weight.view(dtype, shape)
                self.assertEqual(view.shape, wanted)
                tensor = Consumed(view.__dlpack__())
                self.assertEqual((tensor.shape, tensor.dtype), (wanted, TYPES[view.dtype.name]))
                tensor.delete()
            for dtype, shape in (
                ("F32", (33,)),
                ("F64", (4, 8)),
                ("F32", (-1, 32)),
                ("F32", (1 << 62, 1 << 62)),
                ("int", None),
                ("float", None),
                ("OTHER", None),
                (object(), None),
                (7, None),
            ):
                with self.assertRaises(vbar.InvalidArgument, msg=repr((dtype, shape))):
                    weight.view(dtype, shape)
        with self.assertRaises(TypeError):
            vbar.View()

    def test_types_are_named_as_others_name_them(self):
        class Torch:
            def __repr__(self):
                return "torch.float8_e4m3fn"

        class Numpy:
            name = "uint16"

        class float16:
            pass

        wanted = {
            "F8_E4M3": (Torch(), "float8_e4m3fn", "f8_e4m3"),
            "U16": (Numpy(), "uint16"),
            "F16": (float16, "half"),
            "BF16": ("bfloat16", "BF16", vbar.Dtype.BF16),
            "F4": ("float4_e2m1fn_x2",),
        }
        for name, others in wanted.items():
            for other in others:
                self.assertIs(vbar.Dtype.of(other), vbar.Dtype[name])

    def test_an_address_that_is_not_aligned_is_refused(self):
        with self.device.create_bar(PAGE) as bar, bar.fault(1, 64) as bytes:
            self.assertEqual(bytes.view("U8").shape, (64,))
            with self.assertRaisesRegex(vbar.InvalidArgument, "not aligned"):
                bytes.view("F32")

    def test_streams_are_as_the_array_api_says(self):
        stream = self.sim.stream()
        with self.model.fault("F32", stream) as weight:
            view = weight.view()
            for given in (None, -1, 1, 2, stream):
                Consumed(view.__dlpack__(stream=given)).delete()
            for wrong in (0, -2, 1 << 64, vbar.NO_STREAM):
                with self.assertRaisesRegex(vbar.InvalidArgument, "stream is"):
                    view.__dlpack__(stream=wrong)
            self.assertEqual(pins(self.model.bar), 1)
        self.assertEqual(self.sim.violations(), 0)

    def test_copies_and_other_devices_are_refused(self):
        with self.model.fault("F32") as weight:
            view = weight.view()
            Consumed(view.__dlpack__(copy=False, dl_device=(2, 0))).delete()
            with self.assertRaisesRegex(BufferError, "never a copy"):
                view.__dlpack__(copy=True)
            for other in ((1, 0), (2, 1)):
                with self.assertRaisesRegex(BufferError, "not on"):
                    view.__dlpack__(dl_device=other)

    def test_the_consumers_stream_comes_after_the_fill(self):
        consumer = self.sim.stream()
        self.assertEqual(self.model["large"].nbytes, PAGE)
        # The fault's own stream is behind the fill already; the consumer's is another.
        with self.model.fault("large", self.sim.stream()) as weight:
            tensor = Consumed(weight.view().__dlpack__(stream=consumer))
            found = self.sim.read(tensor.data, PAGE, consumer)
            self.assertEqual(found, pattern(PAGE, 2))
            tensor.delete()
        self.assertEqual(self.sim.violations(), 0)


class Pins(WithModel):
    """Whose pins are held when."""

    def test_a_view_that_outlives_its_guard_exports_nothing(self):
        with self.model.fault("F32") as weight:
            view = weight.view()
        for export in (view.__dlpack__, lambda: view.__cuda_array_interface__):
            with self.assertRaises(vbar.GuardReleased) as caught:
                export()
            self.assertIsInstance(caught.exception, BufferError)
        self.assertEqual(pins(self.model.bar), 0)

    def test_an_export_keeps_its_pins_until_its_consumer_drops_it(self):
        for version in (None, (1, 0)):
            with self.model.fault("F32") as weight:
                view = weight.view()
                one = Consumed(view.__dlpack__(max_version=version))
                two = Consumed(view.__dlpack__(max_version=version))
                self.assertEqual(pins(self.model.bar), 3)
            del view, weight
            gc.collect()
            self.assertEqual(pins(self.model.bar), 2)
            one.delete()
            self.assertEqual(pins(self.model.bar), 1)
            # Pinned: the bytes stay whatever else wants memory.
            self.sim.synchronize(0)
            other = self.device.create_bar(2 * PAGE)
            with other.fault(0, 2 * PAGE) as refused:
                self.assertEqual(refused.reason, vbar.Reason.ALL_PINNED)
            self.assertEqual(self.sim.peek(two.data, 128), self.data[:128])
            two.delete()
            self.assertEqual(pins(self.model.bar), 0)
            with other.fault(0, 2 * PAGE) as bytes:
                self.assertTrue(bytes)
            other.end_of_run()
            other.close(wait=True)

    def test_a_capsule_that_nobody_consumes_gives_its_pins_back(self):
        for version in (None, (1, 0)):
            with self.model.fault("F32") as weight:
                capsule = weight.view().__dlpack__(max_version=version)
                self.assertEqual(pins(self.model.bar), 2)
            del capsule
            self.assertEqual(pins(self.model.bar), 0)

    def test_a_consumed_capsule_gives_nothing_back(self):
        with self.model.fault("F32") as weight:
            capsule = weight.view().__dlpack__()
        tensor = Consumed(capsule)
        with self.assertRaises(ValueError):
            Consumed(capsule)
        del capsule
        gc.collect()
        self.assertEqual(pins(self.model.bar), 1)
        tensor.delete()
        self.assertEqual(pins(self.model.bar), 0)

    def test_pins_come_back_when_everything_else_is_closed(self):
        with self.model.fault("F32") as weight:
            tensor = Consumed(weight.view().__dlpack__())
        self.sim.synchronize(0)
        self.model.close()
        # The device goes with the last use of anything of it.
        self.device.close()
        self.assertEqual(self.sim.peek(tensor.data, 128), self.data[:128])
        self.assertEqual(self.sim.live().reservation_count, 1)
        tensor.delete()
        left = self.sim.live()
        self.assertEqual((left.frame_count, left.reservation_count, left.locked_bytes), (0, 0, 0))

    def test_a_consumers_stream_that_is_gone_is_not_touched(self):
        stream = self.sim.stream()
        with self.model.fault("F32") as weight:
            tensor = Consumed(weight.view().__dlpack__(stream=stream))
        result = self.device.create_bar(PAGE).fault(0, 8, stream)
        # The first launch loads the kernels, which waits for the device.
        self.sim.launch_checksum(tensor.data, 128, result.address, stream)
        with self.sim.held(stream):
            # Work that is still to run when the consumer lets go.
            self.sim.launch_checksum(tensor.data, 128, result.address, stream)
            calls = {verb: self.sim.calls(verb) for verb in ("cuStreamGetId", "cuEventRecord")}
            tensor.delete()
            self.assertEqual(calls, {verb: self.sim.calls(verb) for verb in calls})
            self.assertEqual(pins(self.model.bar), 0)
            # Nothing covers that work, so the page stays.
            self.assertEqual(self.model.bar.free_memory().bytes, 0)
        self.sim.synchronize(stream)
        found = int.from_bytes(self.sim.read(result.address, 8, stream), "little")
        self.assertEqual(found, 2 * self.sim.checksum(self.data[:128]) % (1 << 64))
        # The library sees the stream again: its next fence covers everything before.
        self.model.bar.end_of_run(stream)
        self.assertEqual(self.model.bar.free_memory().bytes, PAGE)
        self.assertEqual(self.sim.violations(), 0)

    def test_a_stream_destroyed_before_the_consumer_lets_go_does_no_harm(self):
        stream = self.sim.stream()
        with self.model.fault("F32") as weight:
            tensor = Consumed(weight.view().__dlpack__(stream=stream))
        self.sim.destroy(stream)
        tensor.delete()
        self.assertEqual(pins(self.model.bar), 0)
        self.assertEqual(self.sim.violations(), 0)

    def test_a_forced_end_of_run_and_an_export_meet(self):
        with self.model.fault("F32") as weight:
            tensor = Consumed(weight.view().__dlpack__())
        self.assertEqual(self.model.bar.end_of_run(release_pins=True), 1)
        tensor.delete()
        self.assertEqual(pins(self.model.bar), 0)

    def test_deleters_run_on_any_thread(self):
        tensors = []
        with self.model.fault("F32") as weight:
            view = weight.view()
            for at in range(200):
                version = (1, 0) if at % 2 else None
                tensors.append(Consumed(view.__dlpack__(max_version=version)))
        self.assertEqual(pins(self.model.bar), 200)

        def delete():
            while True:
                try:
                    tensors.pop().delete()
                except IndexError:
                    return

        threads = [threading.Thread(target=delete) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(pins(self.model.bar), 0)

    def test_weights_are_evicted_and_filled_again_between_two_exports(self):
        stream = self.sim.stream()
        addresses = set()
        for _ in range(3):
            with self.model.fault("F32", stream) as weight:
                tensor = Consumed(weight.view().__dlpack__(stream=stream))
                addresses.add(tensor.data)
                self.assertEqual(self.sim.read(tensor.data, 128, stream), self.data[:128])
                tensor.delete()
            self.model.bar.end_of_run(stream)
            self.assertGreater(self.model.bar.free_memory().bytes, 0)
        self.assertEqual(len(addresses), 1)
        self.assertEqual(self.device.statistics().evicted_page_count, 3)
        self.assertEqual(self.sim.violations(), 0)


class OwnBytes(Case):
    """Allocations: the program writes through its exports."""

    def test_a_refill_is_written_through_a_view(self):
        with open_device() as device:
            sim, bar = Sim(device), device.create_bar(PAGE)
            stream, weight = sim.stream(), bar.allocate(1024)
            with weight.fault(stream) as bytes:
                self.assertIsInstance(bytes, vbar.Refill)
                tensor = Consumed(bytes.view("F32").__dlpack__(stream=stream, max_version=(1, 0)))
                self.assertEqual(tensor.managed.flags, 0)
                interface = bytes.view("F32").__cuda_array_interface__
                self.assertEqual(interface["data"], (weight.address, False))
                sim.write(tensor.data, pattern(1024), stream)
                tensor.delete()
                bytes.commit()
                # Committed, its bytes are not to be written any more.
                tensor = Consumed(bytes.view("F32").__dlpack__(max_version=(1, 0)))
                self.assertEqual(tensor.managed.flags, 1)
                tensor.delete()
            with weight.fault(stream) as bytes:
                self.assertEqual(sim.read(bytes.address, 1024, stream), pattern(1024))
                tensor = Consumed(bytes.view("F32").__dlpack__(max_version=(1, 0)))
                self.assertEqual((tensor.managed.flags, tensor.shape), (1, (256,)))
                tensor.delete()
            self.assertEqual((sim.violations(), pins(bar)), (0, 0))

    def test_bytes_that_were_declared_no_good_are_not_exported(self):
        with open_device() as device:
            bar = device.create_bar(PAGE)
            weight = bar.allocate(64)
            with weight.fault() as bytes:
                bytes.commit(vbar.NO_STREAM)
                view = bytes.view("U8")
                weight.invalidate()
                with self.assertRaises(vbar.GuardReleased):
                    view.__dlpack__()
                self.assertEqual(pins(bar), 1)

    def test_a_bare_bars_bytes_may_be_written(self):
        with open_device() as device, device.create_bar(PAGE) as bar, bar.fault(0, 64) as bytes:
            tensor = Consumed(bytes.view("U8", (8, 8)).__dlpack__(max_version=(1, 0)))
            self.assertEqual(tensor.managed.flags, 0)
            tensor.delete()


class Interface(Case):
    """``__cuda_array_interface__``."""

    def test_it_has_the_types_of_numpy_and_no_others(self):
        tensors = {name: (name, (2, 8), bytes(TYPES[name][1] * 2)) for name in TYPES}
        with open_device() as device, device.open_model(self.model_of(tensors)) as model:
            for name in TYPES:
                with model.fault(name) as weight:
                    view = weight.view()
                    if name not in INTERFACE_TYPES:
                        with self.assertRaisesRegex(AttributeError, f"{name}: take it by DLPack"):
                            view.__cuda_array_interface__
                        self.assertFalse(hasattr(view, "__cuda_array_interface__"))
                        continue
                    self.assertEqual(
                        view.__cuda_array_interface__,
                        {
                            "shape": (2, 8),
                            "typestr": INTERFACE_TYPES[name],
                            "data": (weight.address, True),
                            "strides": None,
                            "stream": 1,
                            "version": 3,
                        },
                    )

    def test_the_stream_is_the_guards(self):
        with open_device() as device, device.create_bar(PAGE) as bar:
            stream = Sim(device).stream()
            for given, told in ((0, 1), (1, 1), (2, 2), (stream, stream), (vbar.NO_STREAM, None)):
                with bar.fault(0, 64, stream=given) as bytes:
                    self.assertEqual(bytes.view("U8").__cuda_array_interface__["stream"], told)

    def test_the_view_holds_the_pins_for_as_long_as_a_consumer_holds_it(self):
        with open_device() as device, device.create_bar(PAGE) as bar:
            with bar.fault(0, 64) as bytes:
                view = bytes.view("U8")
                self.assertEqual(pins(bar), 1)
                owner, _ = view, view.__cuda_array_interface__
                view.__cuda_array_interface__
                self.assertEqual(pins(bar), 2)
                del view
            self.assertEqual(pins(bar), 1)
            # Pinned as they are, another consumer could have them; new exports are refused.
            with self.assertRaises(vbar.GuardReleased):
                owner.__dlpack__()
            del owner
            self.assertEqual(pins(bar), 0)


class Ends(Case):
    """Exports at the interpreter's end."""

    PROGRAM = """
        import sys, vbar
        from consumer import Consumed
        device = vbar.Device("sim", headroom=0)
        bar = device.create_bar(1)
        guard = bar.fault(0, 64)
        view = guard.view("U8")
        interface = view.__cuda_array_interface__
        capsules = [view.__dlpack__(), view.__dlpack__(max_version=(1, 0))]
        consumed = [Consumed(view.__dlpack__()), Consumed(view.__dlpack__(max_version=(1, 0)))]
        class Late:
            def __del__(self, consumed=consumed):
                while consumed:
                    consumed.pop().delete()
    """

    def test_the_interpreter_ends_with_capsules_and_consumers_alive(self):
        for end in (
            "",
            "late = Late()",
            "cycle = [Late(), capsules, view]; cycle.append(cycle); del capsules, view",
            "guard.close(); late = Late()",
            "del device, bar, guard, view; late = Late()",
            "sys.modules['late'] = Late()",
            "import atexit; atexit.register(Late().__del__)",
        ):
            with self.subTest(end):
                check_program(self, self.PROGRAM + "\n        " + end)

    def test_a_deleter_after_the_interpreter_does_no_harm(self):
        # What a C++ library's static objects do.
        program = (
            self.PROGRAM
            + """
        import ctypes
        libc = ctypes.CDLL(None)
        for tensor in consumed:
            address = ctypes.cast(tensor.managed.deleter, ctypes.c_void_p).value
            libc.__cxa_atexit(ctypes.c_void_p(address), ctypes.c_void_p(tensor.pointer), None)
        """
        )
        check_program(self, program)


class Export(Case):
    """The C function by itself."""

    def test_it_refuses_what_is_no_tensor_of_the_token(self):
        with open_device() as device, device.create_bar(4 * PAGE) as bar:
            library, guard = vbar.load(), bar.fault(PAGE, PAGE)
            managed = ctypes.c_void_p()

            def export(**given):
                told = {
                    "size": ctypes.sizeof(_abi.DlpackTensor),
                    "address": guard.address,
                    "dtype": vbar.Dtype.U8,
                    "rank": 0,
                }
                tensor = _abi.DlpackTensor(**{**told, **given})
                return library.vbar_dlpack_export(guard._token, 0, tensor, managed)

            for wrong in (
                {"address": guard.address - 1},
                {"address": guard.address + PAGE},
                {"address": (1 << 64) - 1},
                {"dtype": 0},
                {"dtype": 99},
                {"form": 2},
                {"access": 2},
                {"rank": 65},
                {"rank": 1},
                {"size": 8},
                {"shape": (ctypes.c_uint64 * 1)(PAGE + 1), "rank": 1},
                {"shape": (ctypes.c_uint64 * 1)((1 << 64) - 1), "rank": 1},
            ):
                self.assertEqual(export(**wrong), vbar.InvalidArgument.status, wrong)
                self.assertIsNone(managed.value)
            for other in (0, 1, guard._token + 1):
                with self.subTest(other):
                    tensor = _abi.DlpackTensor(
                        size=ctypes.sizeof(_abi.DlpackTensor), dtype=5, address=guard.address
                    )
                    status = library.vbar_dlpack_export(other, 0, tensor, managed)
                    self.assertEqual(status, vbar.StaleToken.status)
            # The token is still the guard's.
            guard.close()
            self.assertEqual(bar.residency()[1].pin_count, 0)

    def test_a_fill_is_not_handed_over(self):
        with open_device() as device, device.create_bar(PAGE) as bar:
            weight = bar.allocate(64)
            with weight.fault() as bytes:
                tensor = _abi.DlpackTensor(
                    size=ctypes.sizeof(_abi.DlpackTensor), dtype=5, address=bytes.address
                )
                managed = ctypes.c_void_p()
                status = vbar.load().vbar_dlpack_export(bytes._token, 0, tensor, managed)
                self.assertEqual(status, vbar.InvalidArgument.status)


if __name__ == "__main__":
    unittest.main()
