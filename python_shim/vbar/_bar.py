"""VBARs and allocations: faults, marks, memory given back, residency."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any, Iterable, Sequence, Union

from . import _abi, _memory
from ._call import call
from ._closeable import Closeable
from ._device import Device, asked_bytes, c_path, descriptor_of, freed_of
from ._errors import InvalidArgument
from ._guard import Busy, Guard, Offloaded, Pins, Refill, fault_of
from ._memory import MemorySource
from ._owner import Owned
from ._sizes import Size, parse_size, unsigned
from ._streams import Stream, handle_of
from ._unshared import Unshared
from ._values import BarInfo, Freed, Page, PageState, Reason, Segment

#: A path, a descriptor, or something that has one; or memory of the program's own.
BindSource = Union[str, bytes, "os.PathLike[Any]", int, MemorySource, Any]

_U32_MAX = (1 << 32) - 1


class Bar(Closeable):
    """A VBAR: addresses for one model, memory only where it is needed.

    Closing it, or dropping it, never blocks: its memory goes when the work that uses it is done and
    its guards are gone.
    """

    #: Of a model's VBAR there is none.
    _owned: Owned | None = None

    def __init__(self, device: Device, nbytes: Size) -> None:
        lib, size = device._lib, parse_size(nbytes, "nbytes")
        self._owned = owned = Owned(lib.vbar_bar_destroy)
        handle = owned.open(lib.vbar_bar_create, device._id, size)
        try:
            self._adopt(device, handle, bound=False)
        except BaseException:
            # What is raised has this frame, which has the VBAR.
            owned.release()
            raise

    @classmethod
    def _of_model(cls, device: Device, handle: int) -> Bar:
        """A model's VBAR, which ends with it."""
        bar = object.__new__(cls)
        bar._adopt(device, handle, bound=True)
        return bar

    def _adopt(self, device: Device, handle: int, bound: bool) -> None:
        self._device, self._lib, self._id = device, device._lib, handle
        self._bound = bound
        info = self._read_info()
        #: First device address, a multiple of the page size; it never changes.
        self.address: int = info.address
        #: Length in bytes, whole pages.
        self.nbytes: int = info.bytes
        #: Size of a page in bytes.
        self.page_size: int = info.page_bytes
        #: Pages.
        self.page_count: int = info.page_count

    def __repr__(self) -> str:
        return f"<vbar.Bar {self.nbytes} bytes at {self.address:#x}>"

    def close(self, wait: bool = False, stream: Stream = None) -> None:
        """Close the VBAR and its allocations. A second time does nothing.

        Args:
            wait: until its memory was given back, which it is not while guards are held.
            stream: of its last work, when it is waited for; as for :meth:`fault`. What other
                streams did is known by :meth:`end_of_run` for each of them.

        Raises:
            TimedOut, Cancelled: the wait ended; the VBAR is closed all the same.
            InvalidArgument: it is a model's.
        """
        owned = self._owned
        if owned is None:
            raise InvalidArgument("the VBAR belongs to a model: close the model")
        if wait and owned:
            # No fence may cover the last use yet, and nobody will come to record one.
            self.end_of_run(stream)
            owned.close(self._lib.vbar_bar_destroy_wait)
        else:
            owned.close()

    def bind(self, sources: Sequence[BindSource], segments: Iterable[Segment]) -> None:
        """Bind a VBAR that was never used to files and memory: from now on a fault fills what it
        maps.

        Works for any format whose tensors are stored as they are in memory. Memory is kept until
        the VBAR was closed and its last copy is done.

        Args:
            sources: files, by path or descriptor; memory, as a :class:`vbar.MemorySource`.
            segments: which bytes of which source belong where; none overlap.

        Raises:
            FileError: a file cannot be opened.
            InvalidArgument: the segments are not within the VBAR or their source, overlap, or it
                was used; memory is not page-locked that must be.
        """
        told = (_abi.BindSource * len(sources))()
        given: list[_memory.Kept] = []
        called = False
        try:
            for place, source in zip(told, sources):
                if isinstance(source, MemorySource):
                    given.append(_memory.give(self._lib, place, source))
                elif isinstance(source, (str, bytes, os.PathLike)):
                    place.path = c_path(source)
                else:
                    place.descriptor = descriptor_of(source)
            pieces = [_segment_of(segment) for segment in segments]
            array = (_abi.BindSegment * len(pieces))(*pieces)
            called = True
            call(self._lib.vbar_bar_bind, self._id, told, len(told), array, len(pieces))
        finally:
            if not called:
                _memory.take_back(given)
        self._bound = True

    def fault(self, bar_offset: int, nbytes: int, stream: Stream = None) -> Guard | Offloaded:
        """Make bytes resident for work on ``stream``, and pin them.

        On a bound VBAR they are the file's; on another what was last written while the guard's
        ``signature`` stays the same. Use the result as a context manager; it is false when the
        bytes are offloaded, and says why::

            with bar.fault(bar_offset, nbytes, stream=stream) as weight:
                if weight:
                    launch(weight.address, stream)
                else:
                    print(weight.reason)

        Args:
            bar_offset: first byte.
            nbytes: length in bytes.
            stream: the work's stream: a number, a stream of torch, CuPy or CUDA Python; ``None`` is
                torch's current stream where torch uses CUDA, else CUDA's default stream;
                ``NO_STREAM`` waits until the bytes are there.

        Raises:
            InvalidArgument: the range is outside the VBAR, or ``stream`` is none.
            FileError, FileChanged: the file cannot be read, or is another one now.
            TimedOut, Cancelled: a wait ended.
        """
        at, size = unsigned(bar_offset, "bar_offset"), unsigned(nbytes, "nbytes")
        handle = handle_of(stream, self._device._torch_ordinal)
        fault = self._fault_raw(at, size, handle)
        if not fault.token:
            return Offloaded(Reason(fault.reason), fault.bytes)
        return self._guard_of(fault, at, size, handle, stream)

    def prefetch(self, bar_offset: int, nbytes: int) -> None:
        """Say that bytes of a bound VBAR will be wanted soon, once.

        Advice: they are brought in as far as there are frames that nothing needs earlier, and not
        at all on a device without threads.

        Raises:
            InvalidArgument: the range is outside the VBAR, or it is not bound.
        """
        at, size = unsigned(bar_offset, "bar_offset"), unsigned(nbytes, "nbytes")
        call(self._lib.vbar_bar_prefetch, self._id, at, size)

    def prepare_save(self, bar_offset: int, nbytes: int) -> None:
        """Take page-locked memory for bytes that the program writes, to save them once they are
        written. From here on the watermark does not keep them out. Again: does nothing.

        Raises:
            HostMemory: the allowance has no room, or the system is short of memory.
            TimedOut: a thread of the library's was still locking some; next time it is there.
            InvalidArgument: the range is empty, outside the VBAR or over another one that was
                prepared; the VBAR is bound.
        """
        at, size = unsigned(bar_offset, "bar_offset"), unsigned(nbytes, "nbytes")
        call(self._lib.vbar_bar_prepare_save, self._id, at, size)

    def save(self, bar_offset: int, nbytes: int, stream: Stream = None) -> None:
        """Save bytes that were prepared and are pinned, as they are behind the work on ``stream``;
        unpin them on that stream afterwards, whose later work does not wait for the copy. From now
        on their pages come back with these bytes, ahead of need where the device has threads,
        whatever a guard's signature says. Nobody writes them until :meth:`drop_save`.

        Raises:
            InvalidArgument: they were not prepared, or are saved already; ``stream`` is none.
            Unsupported: the stream is being captured.
        """
        at, size = unsigned(bar_offset, "bar_offset"), unsigned(nbytes, "nbytes")
        handle = handle_of(stream, self._device._torch_ordinal)
        call(self._lib.vbar_bar_save, self._id, at, size, handle)

    def drop_save(self, bar_offset: int, nbytes: int) -> None:
        """Forget what was saved of bytes, the same ones: waits for the copies to and from that
        memory, so whoever has pinned them may write them. Does nothing where nothing was prepared.

        Raises:
            TimedOut, Cancelled: the wait ended; forgotten all the same, and nobody may write them
                before another call for them has waited.
        """
        at, size = unsigned(bar_offset, "bar_offset"), unsigned(nbytes, "nbytes")
        call(self._lib.vbar_bar_drop_save, self._id, at, size)

    def _fault_raw(self, bar_offset: int, nbytes: int, stream: int) -> Pins:
        return fault_of(self._lib.vbar_bar_fault, self._id, bar_offset, nbytes, stream)

    def _guard_of(
        self, fault: Pins, bar_offset: int, nbytes: int, stream: int, owner: Any
    ) -> Guard:
        again = functools.partial(self._fault_raw, bar_offset, nbytes)
        return Guard(self._device, fault, stream, owner, again, writable=not self._bound)

    def allocate(self, nbytes: Size) -> Allocation:
        """Take the next bytes, 512-byte aligned, for a weight that the program writes itself.

        It ends with the VBAR.

        Raises:
            NoAddresses: they do not fit.
            InvalidArgument: the VBAR is bound.
        """
        return Allocation._in(self, parse_size(nbytes, "nbytes"))

    def info(self) -> BarInfo:
        """The VBAR's marks now."""
        info = self._read_info()
        return BarInfo(
            page_count=info.page_count,
            resident_count=info.resident_count,
            watermark=info.watermark,
            floor=info.floor,
            priority_class=info.priority_class,
            has_addresses=bool(info.has_addresses),
        )

    def _read_info(self) -> _abi.BarInfo:
        info = _abi.BarInfo(size=ctypes.sizeof(_abi.BarInfo))
        call(self._lib.vbar_bar_info, self._id, info)
        return info

    def residency(self, first: int = 0, count: int | None = None) -> list[Page]:
        """The state of ``count`` pages from ``first`` on; ``None`` is up to the last.

        Loaded are those that are ``RESIDENT`` and those that are ``ISSUED``, whose bytes are on
        their way: what is enqueued behind a fault finds them.
        """
        start = unsigned(first, "first", _U32_MAX)
        if count is None:
            count = max(self.page_count - start, 0)
        number = unsigned(count, "count", self.page_count)
        pages = (_abi.Page * number)()
        call(self._lib.vbar_bar_residency, self._id, start, number, pages)
        return [Page(PageState(page.state), page.pin_count, page.generation) for page in pages]

    def prioritise(self) -> None:
        """Make the VBAR the newest of its class, and lift its watermark to all pages."""
        call(self._lib.vbar_bar_prioritise, self._id)

    def deprioritise(self) -> None:
        """Make the VBAR the oldest of its class: the first to lose pages."""
        call(self._lib.vbar_bar_deprioritise, self._id)

    def set_class(self, priority_class: int) -> None:
        """Put the VBAR into a class, 0 at first; a larger one is kept longer."""
        shifted = unsigned(priority_class + (1 << 31), "2^31 + the class", _U32_MAX)
        call(self._lib.vbar_bar_set_class, self._id, shifted - (1 << 31))

    def set_floor(self, page_count: int) -> None:
        """Keep the first pages from eviction until the end of the run."""
        pages = unsigned(page_count, "page_count", _U32_MAX)
        call(self._lib.vbar_bar_set_floor, self._id, pages)

    def set_watermark(self, page_count: int) -> None:
        """Set the watermark of a VBAR that is not bound, and free unpinned pages at or above it.

        Raises:
            InvalidArgument: it is bound: all of its pages are faulted in.
        """
        pages = unsigned(page_count, "page_count", _U32_MAX)
        call(self._lib.vbar_bar_set_watermark, self._id, pages)

    def free_memory(self, nbytes: Size | None = None) -> Freed:
        """Give memory back to the driver: from the end down to the floor, whole pages.

        Waits for fences, never for pins: call :meth:`end_of_run` first, so that there is one behind
        the last use. ``None`` asks for everything.
        """
        freed = _abi.Freed()
        call(self._lib.vbar_bar_free_memory, self._id, asked_bytes(nbytes), freed)
        return freed_of(freed)

    def end_of_run(self, stream: Stream = None, release_pins: bool = False) -> int:
        """End a run whose work was enqueued on ``stream``: records a fence, lifts the floor.

        Args:
            stream: as for :meth:`fault`.
            release_pins: take pins that are still held back by force: their guards are stale.

        Returns:
            How many pages had pins.
        """
        pinned = ctypes.c_uint32()
        held = _abi.HELD_PINS_RELEASE if release_pins else _abi.HELD_PINS_KEEP
        handle = handle_of(stream, self._device._torch_ordinal)
        call(self._lib.vbar_bar_end_of_run, self._id, handle, held, pinned)
        return pinned.value


class Allocation(Unshared):
    """A piece of a VBAR whose bytes the program writes itself. It ends with the VBAR.

    ::

        with weight.fault(stream=stream) as bytes:
            if isinstance(bytes, vbar.Refill):
                write(bytes.address, stream)
                bytes.commit()
            if bytes:
                launch(bytes.address, stream)
    """

    def __init__(self) -> None:
        raise TypeError("allocations are made by Bar.allocate")

    @classmethod
    def _in(cls, bar: Bar, nbytes: int) -> Allocation:
        allocation = object.__new__(cls)
        lib, handle = bar._lib, _abi.Allocation()
        call(lib.vbar_bar_allocate, bar._id, nbytes, handle)
        allocation._bar, allocation._lib, allocation._id = bar, lib, handle.value
        address, offset, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
        call(lib.vbar_allocation_place, handle.value, address, offset, size)
        allocation.address, allocation.bar_offset = address.value, offset.value
        allocation.nbytes = size.value
        return allocation

    _bar: Bar
    _lib: ctypes.CDLL
    _id: int
    #: Device address of the first byte; it never changes.
    address: int
    #: First byte in the VBAR.
    bar_offset: int
    #: Length in bytes.
    nbytes: int

    def __repr__(self) -> str:
        return f"<vbar.Allocation {self.nbytes} bytes at {self.address:#x}>"

    def fault(self, stream: Stream = None, wait: bool = False) -> Guard | Refill | Offloaded | Busy:
        """Make the allocation resident for work on ``stream``, and pin it.

        Args:
            stream: as for :meth:`vbar.Bar.fault`; for a refill the one that will write the bytes.
            wait: while another caller fills, instead of saying :class:`vbar.Busy`.

        Returns:
            A :class:`vbar.Refill` when the bytes are to be written first.

        Raises:
            As :meth:`vbar.Bar.fault`.
        """
        device = self._bar._device
        handle = handle_of(stream, device._torch_ordinal)
        lib = self._lib
        function = lib.vbar_allocation_fault_wait if wait else lib.vbar_allocation_fault
        fault = fault_of(function, self._id, handle)
        if fault.outcome == _abi.OUTCOME_RESIDENT:
            return Guard(device, fault, handle, stream, self._fault_again)
        if fault.outcome == _abi.OUTCOME_REFILL:
            raw = functools.partial(self._bar._fault_raw, self.bar_offset, self.nbytes)
            return Refill(device, fault, handle, stream, self._fault_again, raw)
        if fault.outcome == _abi.OUTCOME_BUSY:
            return Busy()
        return Offloaded(Reason(fault.reason), fault.bytes)

    def _fault_again(self, stream: int) -> Pins:
        return fault_of(self._lib.vbar_allocation_fault, self._id, stream)

    def invalidate(self) -> None:
        """Declare the bytes no good: the next fault asks for a refill. Give guards back first;
        during a fill it does nothing.
        """
        call(self._lib.vbar_allocation_invalidate, self._id)


def _segment_of(segment: Segment) -> _abi.BindSegment:
    return _abi.BindSegment(
        bar_offset=unsigned(segment[0], "bar_offset"),
        source_offset=unsigned(segment[1], "source_offset"),
        bytes=unsigned(segment[2], "nbytes"),
        source=unsigned(segment[3], "source", _U32_MAX) if len(segment) > 3 else 0,
    )
