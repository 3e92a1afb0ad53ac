"""Devices: opening with options, budget, memory given back, waits, statistics."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any, Callable, Iterable, SupportsIndex

from . import _abi, _library, _log
from ._call import call, text_of
from ._closeable import Closeable
from ._errors import InvalidArgument
from ._guard import Offloaded
from ._many import Guards, Ranges
from ._owner import Owned
from ._sizes import Size, parse_part, parse_seconds, parse_size, unsigned
from ._streams import Stream, handle_of
from ._values import (
    BudgetSource,
    ContextWaits,
    DeviceInfo,
    Eviction,
    Freed,
    Prefer,
    Reason,
    Shortfall,
    Statistics,
    WaitCount,
    WaitKind,
)

if TYPE_CHECKING:
    from ._bar import Bar
    from ._model import Model, ModelPath

_U32_MAX = (1 << 32) - 1


class Device(Closeable):
    """An open device. Opening it again shares it: its budget, bars and models are one.

    Args:
        driver: ``"cuda"``, ``"cuda:1"``, ``"sim"``, ``"sim:capacity=8G,seed=7"``, or ``"auto"``,
            which is a CUDA device where there is one, else a simulated one. ``None`` is what the
            environment variable ``VBAR_DRIVER`` says, else ``"cuda"``.
        ordinal: the device's number in that driver.
        budget: most device memory for frames, in bytes, as ``"8G"``, or as a part of the device's
            memory: ``"50%"`` is half of all that it has, free or not. ``None`` is what is free,
            less the headroom, followed as it changes.
        headroom: device memory left free for others, likewise; ``None`` is 256 MiB.
        page_size: of pages and frames, a power of two; ``None`` is 16 MiB.
        threads: whether the library has threads of its own; ``None`` leaves an open device as it
            is. One notices what other programs take from the device, also between calls. Another,
            the engine, learns the order in which models that exceed the budget are faulted, keeps
            some of their weights and fetches the others before they are asked for.
        context: the ``CUcontext`` to work in, as a number; ``None`` is the primary one, which
            torch and CuPy work in.
        eviction: how a frame in use gets to its next page.
        context_waits: whether a call may wait for the whole context.
        poison: keeps a frame of a pattern that no weight has behind evicted pages, so that a use
            after its guard's end reads that and does not cost the context. For debugging.
        scrub: clears a frame on the device before another page has it, so that neither a weight
            that you write nor a tensor of torch finds bytes of an earlier one. It is that of the
            first opening while the device is open.
        host_mapped: gives a range that needs more device frames than it can have page-locked host
            memory, which the device reads over the link: its guard is true and has the reason
            ``HOST_MAPPED``.
        prefer: where the bytes of a bound file are read from, when page-locked memory does not hold
            them: ``"auto"``, ``"ram"`` (through the page cache), ``"disk"`` (past it), or a
            :class:`vbar.Prefer`.
        host_allowance: most host memory that may be page-locked, in bytes or as ``"8G"``; ``None``
            is what the system can spare, which bounds a number too; 0 is none, and copies are
            slower. This and ``prefer`` stay those
            of the first opening while the device is open.
        wait_timeout: longest time that one call waits for anything, in seconds; ``None`` is 30.
        staging_slots: page-locked slots between file and device; ``None`` is 4.

    Options that are given again for an open device, if they may change, are applied.

    Raises:
        DriverMissing: there is no driver, or it is too old.
        DeviceNotRegistered: the driver has no such device.
        AlreadyOpen: the device is open with another context or page size.
        InvalidArgument: an option is outside what is allowed.
    """

    def __init__(
        self,
        driver: str | None = None,
        ordinal: int = 0,
        *,
        budget: Size | None = None,
        headroom: Size | None = None,
        page_size: Size | None = None,
        threads: bool | None = True,
        context: SupportsIndex | None = None,
        eviction: Eviction = Eviction.ALIASING,
        context_waits: ContextWaits = ContextWaits.NEVER,
        poison: bool = False,
        scrub: bool = False,
        host_mapped: bool = False,
        prefer: Prefer | str = Prefer.AUTO,
        host_allowance: Size | None = None,
        wait_timeout: float | None = None,
        staging_slots: int | None = None,
    ) -> None:
        options = options_of(
            driver=driver,
            ordinal=ordinal,
            budget=budget,
            headroom=headroom,
            page_size=page_size,
            threads=threads,
            context=context,
            eviction=eviction,
            context_waits=context_waits,
            poison=poison,
            scrub=scrub,
            host_mapped=host_mapped,
            prefer=prefer,
            host_allowance=host_allowance,
            wait_timeout=wait_timeout,
            staging_slots=staging_slots,
        )
        self._open(_library.load().vbar_device_open, options, of_torch=context is None)

    def _open(self, function: Callable[..., int], *arguments: Any, of_torch: bool) -> None:
        """Takes an id from the function that makes one."""
        lib = _library.load()
        self._lib, self._owned = lib, Owned(lib.vbar_device_close)
        # From here on the library keeps what the logger wants, and what it warns of as it opens.
        _log.deliver()
        self._id = self._owned.open(function, *arguments)
        try:
            self._info = self._read_info()
        except BaseException:
            # What is raised has this frame, which has the device.
            self._owned.release()
            raise
        #: Number of the device in its driver.
        self.ordinal = self._info.ordinal
        # Torch's streams are of the primary context of a real device.
        is_torchs = of_torch and not self._info.simulated
        self._torch_ordinal: int | None = self.ordinal if is_torchs else None

    @classmethod
    def _made_by(cls, function: Callable[..., int], *arguments: Any) -> Device:
        """A device that another function than ``vbar_device_open`` gives an id of."""
        made = cls.__new__(cls)
        made._open(function, *arguments, of_torch=True)
        return made

    def __repr__(self) -> str:
        return f"<vbar.Device {self.ordinal}: {self._info.name} ({self._info.driver})>"

    def close(self) -> None:
        """Close. What was made with the device lives on; the memory goes with the last of it. A
        second time does nothing.
        """
        self._owned.close()

    @property
    def info(self) -> DeviceInfo:
        """What the device is."""
        return self._info

    @property
    def page_size(self) -> int:
        """Size of pages and frames, in bytes."""
        return self._info.page_bytes

    def create_bar(self, nbytes: Size) -> Bar:
        """Make a VBAR: addresses that cost nothing, rounded up to whole pages.

        Where the device has none for it, every fault is offloaded.
        """
        from ._bar import Bar

        return Bar(self, nbytes)

    def open_model(self, source: ModelPath, name: str | None = None) -> Model:
        """Open a safetensors model and bind it to a VBAR of its own.

        Args:
            source: a file, a sharded model's index, a folder, or a descriptor or open file.
            name: what messages call a descriptor.

        Raises:
            FileError: it cannot be opened or read.
            FormatError: it is no safetensors model.
        """
        from ._model import Model

        return Model(self, source, name)

    def fault_many(
        self, ranges: Ranges | Iterable[tuple[Bar, int, int]], stream: Stream = None
    ) -> Guards | Offloaded:
        """Make several ranges resident, or none of them.

        Args:
            ranges: of each the VBAR, its first byte and its length, in bytes. What is faulted again
                and again costs less as :class:`vbar.Ranges`, made once.
            stream: as for :meth:`vbar.Bar.fault`.

        Raises:
            InvalidArgument: a range is outside its VBAR.
            TimedOut, Cancelled: a wait ended.
        """
        wanted = ranges if isinstance(ranges, Ranges) else Ranges(ranges)
        handle = handle_of(stream, self._torch_ordinal)
        return Guards._fault(self, wanted, handle, stream)

    def schedule_hint(self, steps: Iterable[Iterable[tuple[Bar, int, int]]]) -> None:
        """Say in which order ranges of bound VBARs will be faulted, again and again.

        Advice: it is believed until the program does something else, and nothing comes of it on a
        device without threads. Not needed: an order is learned from its first pass.

        Args:
            steps: of each what one fault, or one :meth:`fault_many`, makes resident together: the
                VBAR, its first byte and its length, in bytes, of each range.

        Raises:
            InvalidArgument: a step has no ranges, a range is outside its VBAR, or that one is not
                bound.
        """
        given = [list(step) for step in steps]
        counts = (ctypes.c_size_t * len(given))(*map(len, given))
        told = Ranges(entry for step in given for entry in step)._told
        call(self._lib.vbar_device_schedule_hint, self._id, told, counts, len(given))

    @property
    def budget(self) -> int | None:
        """The explicit budget in bytes; ``None`` for an automatic one.

        Setting it gives back at once what it no longer covers, as far as pins and fences allow.
        What may be held now is in :meth:`statistics`.
        """
        return self._budgets()[0] or None

    @budget.setter
    def budget(self, budget: Size | None) -> None:
        nbytes, ppm = _budget_options(budget)
        if ppm:
            # As the library computes it where a device is opened so.
            nbytes = max(self._info.total_bytes * ppm // 1_000_000, 1)
        call(self._lib.vbar_device_set_budget, self._id, nbytes)

    @property
    def headroom(self) -> int:
        """Device memory left free for others, in bytes. Setting it acts as for :attr:`budget`."""
        return self._budgets()[1]

    @headroom.setter
    def headroom(self, headroom: Size) -> None:
        call(self._lib.vbar_device_set_headroom, self._id, parse_size(headroom, "headroom"))

    def set_wait_timeout(self, seconds: float) -> None:
        """Set the longest time that one call waits for anything, for waits that start later."""
        milliseconds = parse_seconds(seconds, "wait_timeout")
        call(self._lib.vbar_device_set_wait_timeout, self._id, milliseconds)

    def refresh(self) -> None:
        """Notice pressure of other programs now, as the next miss would."""
        call(self._lib.vbar_device_refresh, self._id)

    def trim(self, keep: Size = 0) -> int:
        """Give frames that no page has back to the driver until at most ``keep`` bytes are held.

        Returns:
            The bytes given back.
        """
        freed = ctypes.c_uint64()
        call(self._lib.vbar_device_trim, self._id, parse_size(keep, "keep"), freed)
        return freed.value

    def trim_host(self, keep: Size = 0) -> int:
        """Give page-locked host memory back until at most ``keep`` bytes are held.

        What is in use stays, and one slot. Waits for the device; host frames are none of it.

        Returns:
            The bytes given back.
        """
        freed = ctypes.c_uint64()
        call(self._lib.vbar_device_trim_host, self._id, parse_size(keep, "keep"), freed)
        return freed.value

    def trim_host_frames(self) -> int:
        """Give host frames back that nobody uses.

        Returns:
            The bytes given back.
        """
        freed = ctypes.c_uint64()
        call(self._lib.vbar_device_trim_host_frames, self._id, freed)
        return freed.value

    def free_memory(self, nbytes: Size | None = None) -> Freed:
        """Give memory of all VBARs back to the driver, lowest rank first.

        Waits for fences, never for pins. ``None`` asks for everything.
        """
        freed = _abi.Freed()
        call(self._lib.vbar_device_free_memory, self._id, asked_bytes(nbytes), freed)
        return freed_of(freed)

    def cancel_waits(self) -> None:
        """End every wait that is under way on the device with :class:`vbar.Cancelled`.

        For another thread than the one that waits; later waits are not touched.
        """
        call(self._lib.vbar_device_cancel_waits, self._id)

    def retire_stream(self, stream: Stream) -> None:
        """Tell the library that a stream is about to be destroyed; it must still be valid."""
        call(self._lib.vbar_stream_retire, self._id, handle_of(stream, self._torch_ordinal))

    def read_file(
        self, file: Any, file_offset: int, nbytes: int, target: int, stream: Stream = None
    ) -> None:
        """Read bytes of an open file to a device address, by copies on ``stream``.

        Returns when the last copy is enqueued. Whatever is behind the address, pinned as a rule,
        stays until they are done.

        Args:
            file: a descriptor, or something that has one.
            file_offset: first byte in the file.
            nbytes: length in bytes.
            target: device address of the first byte.
            stream: as for :meth:`vbar.Bar.fault`.

        Raises:
            FileError: it cannot be read, or ends before.
            Unsupported: the stream is being captured.
        """
        told = _moved(file, file_offset, nbytes, target)
        handle = handle_of(stream, self._torch_ordinal)
        call(self._lib.vbar_device_read_file, self._id, *told, handle)

    def write_file(
        self, file: Any, file_offset: int, nbytes: int, source: int, stream: Stream = None
    ) -> None:
        """Write bytes of the device to an open file, as they are behind what was enqueued on
        ``stream``. Returns when the file has them. As :meth:`read_file` otherwise.
        """
        told = _moved(file, file_offset, nbytes, source)
        handle = handle_of(stream, self._torch_ordinal)
        call(self._lib.vbar_device_write_file, self._id, *told, handle)

    def copy_from_host(self, address: int, nbytes: int, target: int, stream: Stream = None) -> None:
        """Enqueue a copy of host memory to a device address on ``stream``.

        Args:
            address: of the first byte on the host. Memory that is page-locked stays as it is until
                the copy is done; other memory is read before this returns.
            nbytes: length in bytes.
            target: device address of the first byte.
            stream: as for :meth:`vbar.Bar.fault`.
        """
        told = unsigned(address, "address"), unsigned(nbytes, "nbytes"), unsigned(target, "target")
        handle = handle_of(stream, self._torch_ordinal)
        call(self._lib.vbar_device_copy_from_host, self._id, *told, handle)

    def lock_host(self, address: int, nbytes: int) -> None:
        """Page-lock memory of the program's own, which stays mapped until :meth:`unlock_host`.

        Raises:
            DriverError: it is locked already, or cannot be.
        """
        told = unsigned(address, "address"), unsigned(nbytes, "nbytes")
        call(self._lib.vbar_device_lock_host, self._id, *told)

    def unlock_host(self, address: int) -> None:
        """End the page-lock of memory that begins at ``address``, whoever in this process locked
        it. Waits for running kernels; no copy of it is pending.

        Raises:
            NotFound: no locked memory begins there.
        """
        call(self._lib.vbar_device_unlock_host, self._id, unsigned(address, "address"))

    def statistics(self) -> Statistics:
        """Everything that is counted, consistent while others work."""
        told = _abi.Statistics(size=ctypes.sizeof(_abi.Statistics))
        call(self._lib.vbar_device_statistics, self._id, told)
        values: dict[str, Any] = {name: getattr(told, name) for name, *_ in told._fields_}
        del values["size"]
        counts = enumerate(values.pop("refusal_count"))
        refusals = {Reason(at): count for at, count in counts if count}
        waits = {
            WaitKind(at): WaitCount(wait.count, wait.nanos)
            for at, wait in enumerate(values["waits"])
            if wait.count
        }
        values.update(
            budget_source=BudgetSource(told.budget_source), refusal_counts=refusals, waits=waits
        )
        return Statistics(**values)

    def _budgets(self) -> tuple[int, int]:
        budget, headroom = ctypes.c_uint64(), ctypes.c_uint64()
        call(self._lib.vbar_device_budget, self._id, budget, headroom)
        return budget.value, headroom.value

    def _read_info(self) -> DeviceInfo:
        info = _abi.DeviceInfo(size=ctypes.sizeof(_abi.DeviceInfo))
        call(self._lib.vbar_device_info, self._id, info)
        return DeviceInfo(
            ordinal=info.ordinal,
            simulated=bool(info.simulated),
            context=info.context or 0,
            page_bytes=info.page_bytes,
            total_bytes=info.total_bytes,
            name=text_of(info.name),
            driver=text_of(info.driver),
        )


def options_of(
    *,
    driver: str | None = None,
    ordinal: int = 0,
    budget: Size | None = None,
    headroom: Size | None = None,
    page_size: Size | None = None,
    threads: bool | None = True,
    context: SupportsIndex | None = None,
    eviction: Eviction = Eviction.ALIASING,
    context_waits: ContextWaits = ContextWaits.NEVER,
    poison: bool = False,
    scrub: bool = False,
    host_mapped: bool = False,
    prefer: Prefer | str = Prefer.AUTO,
    host_allowance: Size | None = None,
    wait_timeout: float | None = None,
    staging_slots: int | None = None,
) -> _abi.DeviceOptions:
    """The options of :class:`Device`, as the library wants them."""
    budget_bytes, budget_ppm = _budget_options(budget)
    return _abi.DeviceOptions(
        size=ctypes.sizeof(_abi.DeviceOptions),
        driver=None if driver is None else c_text(driver, "driver"),
        ordinal=unsigned(ordinal, "ordinal", _U32_MAX),
        threads=_threads_option(threads),
        budget_bytes=budget_bytes,
        budget_ppm=budget_ppm,
        headroom_bytes=_headroom_option(headroom),
        page_bytes=_given(page_size, "page_size"),
        context=None if context is None else unsigned(context, "context"),
        eviction=Eviction(eviction),
        context_waits=ContextWaits(context_waits),
        poison=_abi.POISON_ON if poison else _abi.POISON_OFF,
        scrub=_abi.SCRUB_ON if scrub else _abi.SCRUB_OFF,
        host_mapped=_abi.HOST_MAPPED_ON if host_mapped else _abi.HOST_MAPPED_OFF,
        prefer=_prefer_option(prefer),
        host_allowance_bytes=_allowance_option(host_allowance),
        wait_timeout_ms=_time_option(wait_timeout),
        staging_slot_count=_count_option(staging_slots, "staging_slots"),
    )


def _given(size: Size | None, what: str) -> int:
    """An option that is 0 when it is not given."""
    if size is None:
        return 0
    nbytes = parse_size(size, what)
    if not nbytes:
        raise InvalidArgument(f"{what} is 0: None is the default")
    return nbytes


def _budget_options(budget: Size | None) -> tuple[int, int]:
    """Bytes and millionths of the device's memory, of which at most one is not 0."""
    ppm = parse_part(budget, "budget")
    if ppm is not None:
        return 0, ppm
    try:
        return _given(budget, "budget"), 0
    except InvalidArgument as error:
        if not isinstance(budget, str) or "no size" not in str(error):
            raise
        raise InvalidArgument(f"{error}; or a part of the device's memory, as 50%") from None


def _headroom_option(headroom: Size | None) -> int:
    if headroom is None:
        return 0
    return parse_size(headroom, "headroom") or _abi.HEADROOM_NONE


def _allowance_option(allowance: Size | None) -> int:
    if allowance is None:
        return 0
    return parse_size(allowance, "host_allowance") or _abi.HOST_ALLOWANCE_NONE


def _prefer_option(prefer: Prefer | str) -> Prefer:
    names = {member.name.lower(): member for member in Prefer}
    found = names.get(prefer) if isinstance(prefer, str) else prefer
    if found not in names.values():
        raise InvalidArgument(f"prefer is {prefer!r}: one of {', '.join(names)} is expected")
    return Prefer(found)


def _threads_option(threads: bool | None) -> int:
    if threads is None:
        return _abi.THREADS_DEFAULT
    return _abi.THREADS_ON if threads else _abi.THREADS_OFF


def _time_option(seconds: float | None) -> int:
    return 0 if seconds is None else parse_seconds(seconds, "wait_timeout")


def _count_option(count: int | None, what: str) -> int:
    if count is None:
        return 0
    return unsigned(count, what, _U32_MAX)


def _moved(file: Any, file_offset: int, nbytes: int, address: int) -> tuple[int, int, int, int]:
    """What a copy between file and device is told."""
    at, size = unsigned(file_offset, "file_offset"), unsigned(nbytes, "nbytes")
    return descriptor_of(file), at, size, unsigned(address, "a device address")


def descriptor_of(source: Any) -> int:
    """The descriptor that something is, or has.

    Raises:
        InvalidArgument: it has none.
    """
    fileno = getattr(source, "fileno", None)
    descriptor = fileno() if callable(fileno) else source
    if isinstance(descriptor, bool) or not isinstance(descriptor, int):
        raise InvalidArgument(f"{source!r} is no path and no descriptor")
    return unsigned(descriptor, "a descriptor", (1 << 31) - 1)


def asked_bytes(nbytes: Size | None) -> int:
    """Bytes that are asked back; ``None`` is all there are."""
    return _abi.ALL_BYTES if nbytes is None else parse_size(nbytes, "nbytes")


def freed_of(freed: _abi.Freed) -> Freed:
    """What giving memory back came to."""
    return Freed(freed.bytes, Shortfall(freed.shortfall), freed.pinned_count)


def c_text(text: str, what: str) -> bytes:
    """A C string.

    Raises:
        TypeError: it is no text.
        InvalidArgument: it has a zero within, or is none that can be encoded.
    """
    if not isinstance(text, str):
        raise TypeError(f"{what}: a text is expected, not {type(text).__name__}")
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what}: {text!r} has a lone surrogate") from None
    if b"\0" in encoded:
        raise InvalidArgument(f"{what}: {text!r} has a zero character")
    return encoded


def c_path(path: str | bytes | os.PathLike[Any]) -> bytes:
    """A path as a C string.

    Raises:
        InvalidArgument: it has a zero within.
    """
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise InvalidArgument(f"{path!r} has a zero character")
    return encoded
