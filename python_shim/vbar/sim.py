"""The simulated device, from outside: what a test of a program needs where there is no GPU.

Streams, kernels that read, write and sleep, memory that other programs take, driver calls that
fail, and what the device found wrong. As ``vbar_sim.h``; of a device that was opened as ``"sim"``,
or ``"sim:capacity=1G,seed=7"``::

    import vbar, vbar.sim

    with vbar.Device("sim", threads=False) as device, vbar.sim.Sim(device) as sim:
        stream = sim.stream()
        bar = device.create_bar("32M")
        with bar.fault(0, 4096, stream=stream) as weight:
            sim.write(weight.address, bytes(4096), stream)
        assert not sim.violations()
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from typing import TYPE_CHECKING, Iterator

from . import _abi_sim
from ._call import call, text_of
from ._closeable import Closeable
from ._device import c_text
from ._errors import InvalidArgument
from ._owner import Owned
from ._sizes import Size, parse_size, unsigned
from ._streams import handle_of

if TYPE_CHECKING:
    from ._device import Device
    from ._streams import Stream as AnyStream

#: What ``CUresult`` calls it; failures that a driver's memory calls may have.
OUT_OF_MEMORY = 2
#: A kernel that failed, as a lost device says it.
LAUNCH_FAILED = 719

_I32_MAX = (1 << 31) - 1
_U64_MAX = (1 << 64) - 1
_VIOLATION_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Live:
    """What of a simulated driver is alive."""

    #: Frames: with a handle, a mapping, or both.
    frame_count: int
    #: Bytes of those frames.
    used_bytes: int
    reservation_count: int
    reserved_bytes: int
    mapping_count: int
    #: Page-locked host bytes.
    locked_bytes: int
    event_count: int
    stream_count: int


class Stream(Closeable):
    """A stream of a simulated device, for everything that takes one. Made by :meth:`Sim.stream`.

    Closing it, or dropping it, destroys it: what was enqueued still runs. Before that a program
    calls :meth:`vbar.Device.retire_stream`, as for any stream. It does not keep the device open,
    and goes with it.
    """

    def __init__(self, device: int) -> None:
        lib = _abi_sim.library()
        self._device, self._lib = device, lib
        self._owned = Owned(functools.partial(lib.vbar_sim_stream_destroy, device))
        #: The ``CUstream``, as a number.
        self.handle: int = self._owned.open(lib.vbar_sim_stream_create, device)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol of CUDA Python: its version, and the handle."""
        return 0, self.handle

    def __repr__(self) -> str:
        return f"<vbar.sim.Stream {self.handle:#x}>"

    def close(self) -> None:
        """Destroy the stream. A second time does nothing."""
        self._owned.close()

    def synchronize(self) -> None:
        """Wait until everything that was enqueued has run."""
        call(self._lib.vbar_sim_stream_synchronize, self._device, self.handle)

    def wait_for(self, other: AnyStream) -> None:
        """Let later work here wait for what was enqueued on another stream by now."""
        call(self._lib.vbar_sim_stream_wait, self._device, self.handle, _handle(other))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A block in which nothing more runs on the stream."""
        call(self._lib.vbar_sim_stream_hold, self._device, self.handle)
        try:
            yield
        finally:
            call(self._lib.vbar_sim_stream_release, self._device, self.handle)


class Sim(Closeable):
    """The simulated device behind an open one. It outlives that, to see what was left.

    Where a method takes a stream it is one of :meth:`stream`, its number, or 0, 1 and 2 for CUDA's
    default streams.

    Raises:
        Unsupported: the device is a real one.
    """

    def __init__(self, device: Device) -> None:
        # Its number only: this does not keep the device open.
        self._device, self._lib = device._id, _abi_sim.library()
        self._owned = Owned(self._lib.vbar_sim_close)
        self._id = self._owned.open(self._lib.vbar_sim_open, device._id)

    def close(self) -> None:
        """Let the simulated device go. A second time does nothing."""
        self._owned.close()

    def stream(self) -> Stream:
        """Make a non-blocking stream."""
        return Stream(self._device)

    def launch_sleep(self, microseconds: int, stream: AnyStream = 0) -> None:
        """Enqueue a kernel that waits and touches nothing."""
        time = unsigned(microseconds, "microseconds")
        call(self._lib.vbar_sim_launch_sleep, self._device, time, _handle(stream))

    def launch_checksum(
        self,
        source: int,
        nbytes: int,
        target: int,
        stream: AnyStream = 0,
        delay_us: int = 0,
    ) -> None:
        """Enqueue a kernel that reads: it adds the checksum of bytes to a 64-bit word.

        Args:
            source: device address of the bytes, a multiple of 8.
            nbytes: length in bytes.
            target: device address of the word, a multiple of 8.
            stream: where.
            delay_us: microseconds that it waits before.
        """
        told = unsigned(source, "source"), unsigned(nbytes, "nbytes"), unsigned(target, "target")
        delay = unsigned(delay_us, "delay_us")
        launch = self._lib.vbar_sim_launch_checksum
        call(launch, self._device, *told, delay, _handle(stream))

    def launch_pattern(
        self, target: int, nbytes: int, seed: int, stream: AnyStream = 0, delay_us: int = 0
    ) -> None:
        """Enqueue a kernel that writes the pattern of a seed; as :meth:`launch_checksum`."""
        told = unsigned(target, "target"), unsigned(nbytes, "nbytes"), unsigned(seed, "seed")
        delay = unsigned(delay_us, "delay_us")
        launch = self._lib.vbar_sim_launch_pattern
        call(launch, self._device, *told, delay, _handle(stream))

    def write(self, address: int, data: bytes, stream: AnyStream = 0) -> None:
        """Enqueue a copy of bytes to a device address, and wait for it."""
        source = (ctypes.c_char * len(data)).from_buffer_copy(data)
        told, handle = (unsigned(address, "address"), source, len(data)), _handle(stream)
        try:
            call(self._lib.vbar_sim_copy_to_device, self._device, *told, handle)
        finally:
            # Also where a signal's handler raised: the copy reads what this call owns.
            call(self._lib.vbar_sim_stream_synchronize, self._device, handle)

    def read(self, address: int, nbytes: int, stream: AnyStream = 0) -> bytes:
        """Enqueue a copy from a device address, and wait for it: what work on the stream sees."""
        size = _host_bytes(nbytes)
        target = (ctypes.c_char * size)()
        told, handle = (target, unsigned(address, "address"), size), _handle(stream)
        try:
            call(self._lib.vbar_sim_copy_to_host, self._device, *told, handle)
        finally:
            call(self._lib.vbar_sim_stream_synchronize, self._device, handle)
        return target.raw

    def peek(self, address: int, nbytes: int) -> bytes:
        """The bytes at a mapped device address now, whatever streams do."""
        size = _host_bytes(nbytes)
        target = (ctypes.c_char * size)()
        call(self._lib.vbar_sim_peek, self._id, unsigned(address, "address"), target, size)
        return target.raw

    def checksum(self, data: bytes) -> int:
        """What :meth:`launch_checksum` adds for these bytes."""
        return int(self._lib.vbar_sim_checksum(data, len(data)))

    def pattern(self, nbytes: int, seed: int) -> bytes:
        """What :meth:`launch_pattern` writes."""
        size = _host_bytes(nbytes)
        target = (ctypes.c_char * size)()
        call(self._lib.vbar_sim_pattern, target, size, unsigned(seed, "seed"))
        return target.raw

    def set_outside_bytes(self, nbytes: Size) -> None:
        """Set how much of the device's memory other programs use from now on."""
        call(self._lib.vbar_sim_set_outside_bytes, self._id, parse_size(nbytes, "nbytes"))

    def fail(
        self, verb: str, skip: int = 0, count: int | None = 1, code: int = OUT_OF_MEMORY
    ) -> None:
        """Let driver calls fail.

        Args:
            verb: the CUDA call, ``"cuMemMap"``, or ``"mem_map"``.
            skip: good calls before.
            count: calls that fail then; ``None`` is all of them.
            code: the ``CUresult``.
        """
        failing = _U64_MAX if count is None else unsigned(count, "count")
        told = c_text(verb, "verb"), unsigned(skip, "skip"), failing, unsigned(code, "code", _I32_MAX)
        call(self._lib.vbar_sim_fail, self._id, *told)

    def fail_rate(self, probability: float, seed: int = 0) -> None:
        """Let memory, copy and event calls fail with this probability, by a seed."""
        if not 0 <= probability <= 1:
            raise InvalidArgument(f"probability is {probability!r}: 0 to 1 is expected")
        call(self._lib.vbar_sim_fail_rate, self._id, probability, unsigned(seed, "seed"))

    def heal(self) -> None:
        """End all failures. A lost device stays lost."""
        call(self._lib.vbar_sim_heal, self._id)

    def lose(self, code: int = LAUNCH_FAILED) -> None:
        """Lose the device: every later call that touches it fails with a ``CUresult``."""
        call(self._lib.vbar_sim_lose_device, self._id, unsigned(code, "code", _I32_MAX))

    def calls(self, verb: str) -> int:
        """How often a driver call was made, failed ones included."""
        count = ctypes.c_uint64()
        call(self._lib.vbar_sim_calls, self._id, c_text(verb, "verb"), count)
        return count.value

    def live(self) -> Live:
        """What is alive."""
        told = _abi_sim.SimLive(size=ctypes.sizeof(_abi_sim.SimLive))
        call(self._lib.vbar_sim_live, self._id, told)
        return Live(**{field.name: getattr(told, field.name) for field in dataclasses.fields(Live)})

    def violations(self) -> list[str]:
        """Breaches of CUDA's contract that were found, a sentence each: races between streams, uses
        of what is not mapped, unmapping under pending work.
        """
        count, text = ctypes.c_uint64(), ctypes.create_string_buffer(_VIOLATION_BYTES)
        call(self._lib.vbar_sim_violation_count, self._id, count)
        said = []
        for index in range(count.value):
            call(self._lib.vbar_sim_violation, self._id, index, text, len(text))
            said.append(text_of(text.value))
        return said


def _handle(stream: AnyStream) -> int:
    return handle_of(stream, None)


def _host_bytes(nbytes: int) -> int:
    return unsigned(nbytes, "nbytes", (1 << 63) - 1)
