"""``ModelVBAR``: a model's addresses, as ComfyUI faults, unpins and ranks them.

Pages are told in units of 32 MiB, which clients know by heart; underneath they are the device's
own. A signature is an array as long as clients expect, and says of the whole range whether a page
of it lost its bytes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from typing import Any, Callable, Optional, Tuple, TypeVar

from .._bar import Bar
from .._errors import Error
from .._guard import Pins
from .._values import Freed, Reason, Shortfall
from . import _devices, _paged, _pins, _report, _saved

logger = logging.getLogger("vbar.comfy")

#: The unit of pages that clients count in.
PAGE = _paged.PAGE
_ALIGNMENT = 512
_RESIDENT, _PINNED = 1, 2

#: Addresses of what has none: past all that a device has, each once.
_nowhere = 1 << 60
_nowhere_lock = threading.Lock()

#: The VBAR, the first address, the length in bytes.
Alloc = Tuple["ModelVBAR", int, int]

_Told = TypeVar("_Told")


class ModelVBAR:
    """See the module's text.

    Args:
        size: addresses, in bytes. More than the card has are addresses that are never resident.
        device: the device's index.
        pageout_callback: who saves pages that are written on the device. Called with the first byte
            and the length in the VBAR before a page leaves, when all work that used it is over, on
            any thread that needs memory; it returns when the bytes are saved, calls no VBAR, and
            keeps the page by ``False`` or an exception. Not called for what :meth:`close` drops.

    Raises:
        RuntimeError: the device was not opened.
    """

    page_size = PAGE

    def __init__(self, size: Any, device: Any, pageout_callback: Any = None) -> None:
        self._bar: Bar | None = None
        self._saved: _saved.Saved | _paged.Paged | None = None
        #: By first byte and length, the pins of faults, each with the node's number.
        self._held: dict[tuple[int, int], list[tuple[Pins, int]]] = {}
        self._lock = threading.Lock()
        self._limit = 0
        #: What its faults came to, for the report at the end of a node.
        self.uses = _report.Uses()
        context = _devices.get(device)
        self._context = context
        self.device = device
        self.max_size = size
        self.offset = 0
        wanted = _devices.saturated(size)
        pages = min(-(-wanted // PAGE), context.total // PAGE)
        if pageout_callback is not None and PAGE % context.device.page_size:
            logger.warning("pages of %d bytes are not saved by a client: none are kept", PAGE)
            pages = 0
        self._bar = _reserve(context, pages * PAGE) if pages else None
        if self._bar is not None and pageout_callback is not None:
            self._saved = _paged.Paged(self._bar, context, pageout_callback)
        elif self._bar is not None:
            self._saved = _saved.Saved(self._bar, context)
        #: It was made the first to lose pages.
        self._is_low = False
        self._set_rank(1)
        #: Bytes that may be resident.
        self._backed = pages * PAGE if self._bar is not None else 0
        self.base_addr = self._bar.address if self._bar is not None else _take_nowhere(wanted)
        context.add(self)

    def __repr__(self) -> str:
        return f"<ModelVBAR on device {self.device}: {self.offset} of {self.max_size} bytes>"

    def alloc(self, nbytes: Any) -> Alloc:
        """The next bytes, 512-byte aligned.

        Raises:
            MemoryError: they do not fit.
        """
        nbytes = int(nbytes)
        with self._lock:
            start = -(-self.offset // _ALIGNMENT) * _ALIGNMENT
            if nbytes < 0 or start + nbytes > self.max_size:
                raise MemoryError(
                    f"VBAR OOM: {nbytes} bytes at {start} of {self.max_size} that were asked for"
                )
            self.offset = start + nbytes
        self.uses.allocated((start, nbytes))
        return self, self.base_addr + start, nbytes

    def fault(self, address: int, nbytes: int) -> Any:
        """Makes bytes resident and pins their pages.

        Returns:
            A signature, which stays the same as long as no page lost its bytes; ``None`` when they
            are offloaded, as all are once the VBAR is closed.

        Raises:
            RuntimeError: it failed.
        """
        at, saved = address - self.base_addr, self._saved
        key = at, nbytes
        if saved is None or at < 0 or at + nbytes > self._backed:
            self.uses.fault(key, 0, Reason.NO_ADDRESSES)
            return None
        if nbytes <= 0:
            return _signature_type(0)()
        held = self._held.get(key)
        if held:
            self._drop_leaked(key, held)
        signature, pins = _signature_type(nbytes)(), None
        try:
            pins = saved.pin(key)
            if isinstance(saved, _saved.Saved):
                while _paged.is_room_missing(pins) and _paged.make_room(self._context, self._rank):
                    pins = saved.pin(key)
            if pins.token:
                value, signature.use = saved.enter(key, pins)
        except (Error, RuntimeError) as error:
            if pins is not None:
                # Not when what is raised goes, which has this frame.
                pins.release()
            if self._bar is not None:
                text = f"a fault of {nbytes} bytes at {address:#x} failed: {error}"
                raise RuntimeError(text) from error
            # Another thread has closed it meanwhile.
            self.uses.fault(key, 0, Reason.NO_ADDRESSES)
            return None
        if not pins.token:
            self.uses.fault(key, 0, Reason(pins.reason))
            return None
        # What came back by itself is counted by the library.
        self.uses.fault(key, value)
        signature[0], signature[1] = value & 0xFFFF_FFFF, value >> 32
        # Each step is one of the interpreter's: threads fault and unpin at a time.
        self._held.setdefault(key, []).append((pins, self._context.epoch))
        return signature

    def unpin(self, address: int, nbytes: int) -> None:
        """Gives the pins of one fault of these bytes back, behind the work on the current stream.

        What is not pinned stays so: clients unpin what they may have pinned.

        Raises:
            RuntimeError: the use is known to no fence, what was to be done before failed, or the
                callback keeps a page above the watermark; the pins are given back all the same.
        """
        held = self._held.get((address - self.base_addr, nbytes))
        if not held:
            return
        try:
            pins, _ = held.pop()
        except IndexError:
            # Another thread was quicker.
            return
        stream, saved = _devices.current_stream(self._context.index), self._saved
        try:
            try:
                if saved is not None:
                    saved.before_unpin(pins, stream)
            finally:
                _pins.unpin(pins, stream)
            if isinstance(saved, _paged.Paged):
                saved.unpinned()
        except (Error, _paged.Refused) as error:
            raise RuntimeError(f"an unpin of {nbytes} bytes at {address:#x}: {error}") from error

    def prioritize(self, malloc_async_clamp: Any = None) -> None:
        """Makes this the last to lose pages, and all of it may be resident again."""
        self._is_low = False
        self._set_rank(1)
        self._set_cut(None)
        self._mark(lambda bar: bar.prioritise())

    def deprioritize(self) -> None:
        """Makes this the first to lose pages."""
        self._is_low = True
        self._set_rank(-1)
        self._mark(lambda bar: bar.deprioritise())

    def set_watermark_limit(self, nbytes: Any) -> None:
        """Keeps the first bytes from eviction, whole pages, until the end of the node."""
        self._limit = _devices.saturated(nbytes)
        if isinstance(self._saved, _paged.Paged):
            self._saved.limit = -(-self._limit // PAGE)
        self._mark(lambda bar: bar.set_floor(self._pages_of(bar, self._limit)))

    def set_watermark(self, nbytes: Any) -> None:
        """Lets only the first bytes be resident, whole pages; others that no pin holds go now.

        Raises:
            RuntimeError: it failed, or the callback keeps a page; the others are gone.
        """
        told, saved = _devices.saturated(nbytes), self._saved
        if isinstance(saved, _paged.Paged):
            told = -(-told // PAGE) * PAGE
        self._set_cut(told)
        self._mark(lambda bar: bar.set_watermark(self._pages_of(bar, told)))
        if isinstance(saved, _paged.Paged):
            self._mark(lambda _: saved.cut_off())

    def free_memory(self, nbytes: Any) -> int:
        """Gives memory back, from the end down to the limit. Never raises.

        Returns:
            The bytes that came; when none did the log says why.
        """
        wanted, bar = _devices.saturated(nbytes), self._bar
        if bar is None or not wanted:
            return 0
        try:
            # A fence behind all that the current stream was given.
            self._end_of_run(bar)
            if isinstance(self._saved, _paged.Paged):
                return self._saved.free(wanted)
            bar.set_floor(self._pages_of(bar, self._limit))
            freed = bar.free_memory(wanted)
        except Exception as error:
            # Closed by another thread it gives back all that it has.
            level = logging.DEBUG if self._bar is None else logging.ERROR
            logger.log(level, "%r gave nothing back: %s", self, error)
            return 0
        if not freed.bytes:
            level = logging.WARNING
            if freed.shortfall in (Shortfall.NOTHING_RESIDENT, Shortfall.NONE):
                level = logging.DEBUG
            logger.log(level, "%r gave nothing back of %d bytes: %s", self, wanted, _why(freed))
        return int(freed.bytes)

    def loaded_size(self) -> int:
        """Bytes that are resident. Of one that is closed none, as of all that is told here."""
        return self._ask(lambda bar: bar.info().resident_count * bar.page_size, 0)

    def _missing_bytes(self) -> int:
        """Bytes that were allocated, can be resident and are not."""
        loaded = self.loaded_size()
        # Behind that: another thread may have closed it meanwhile.
        backed = self._backed
        return min(self.offset, backed) - loaded if backed else 0

    def get_nr_pages(self) -> int:
        """Pages that may be resident at all."""
        return self._backed // PAGE

    def get_watermark(self) -> int:
        """Pages that may be resident now."""
        return self._ask(lambda bar: bar.info().watermark * bar.page_size // PAGE, 0)

    def get_residency(self) -> list[int]:
        """Of each page 1 when it is resident, 2 when it is pinned, or both."""
        none: list[int] = []
        return self._ask(self._residency_of, none)

    def _residency_of(self, bar: Bar) -> list[int]:
        pages, size = bar.residency(), bar.page_size
        told = []
        for start in range(0, self._backed, PAGE):
            own = pages[start // size : max(start // size + 1, (start + PAGE) // size)]
            # What no allocation has is not missed.
            wanted = own[: max(-(-(self.offset - start) // size), 0)]
            resident = bool(wanted) and all(page.state in _saved.MAPPED for page in wanted)
            saved = self._saved
            kept = saved.pins_of(start) if isinstance(saved, _paged.Paged) else 0
            pinned = any(page.pin_count > kept for page in own)
            told.append(_RESIDENT * resident | _PINNED * pinned)
        return told

    def close(self) -> None:
        """Gives pages and addresses back, when the work that uses them is done. Never blocks."""
        # First what says that it is closed: whoever finds the library's VBAR closed looks there.
        self._backed = 0
        bar, saved, self._bar, self._saved = self._bar, self._saved, None, None
        if isinstance(saved, _paged.Paged):
            saved.close()
        # Each owner gives its pins back as it goes.
        self._held = {}
        if bar is not None:
            bar.close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:
            # At the end of the interpreter what this needs may be gone; so is the process, then.
            pass

    def _end_of_node(self) -> None:
        """Nothing keeps pages from eviction any more but pins, and all uses have a fence."""
        bar, self._limit = self._bar, 0
        if bar is None:
            return
        pinned = self._end_of_run(bar)
        if self._saved is not None:
            self._saved.end_of_node(self._is_low)
        if pinned and not isinstance(self._saved, _paged.Paged):
            logger.debug("%r has %d pages that are pinned at the end of a node", self, pinned)

    def _end_of_run(self, bar: Bar) -> int:
        return bar.end_of_run(_devices.current_stream(self._context.index))

    def _drop_leaked(self, key: tuple[int, int], held: list[tuple[Pins, int]]) -> None:
        """What a node that was cancelled or failed has pinned, and is pinned anew, is given back:
        nobody else would, and the pages could never leave.
        """
        epoch, leaked = self._context.epoch, []
        for entry in list(held):
            if entry[1] != epoch and entry in held:
                held.remove(entry)
                leaked.append(entry[0])
        for pins in leaked:
            logger.debug("%r: pins of %s from an earlier node are given back", self, key)
            pins.release()
            if self._saved is not None:
                self._saved.released(pins)

    def _set_rank(self, sign: int) -> None:
        self._rank = sign * next(self._context.ranks)
        if isinstance(self._saved, _paged.Paged):
            self._saved.rank = self._rank

    def _set_cut(self, nbytes: int | None) -> None:
        if self._saved is not None:
            self._saved.set_cut(nbytes)

    def _mark(self, act: Callable[[Bar], None]) -> None:
        self._ask(act, None)

    def _ask(self, act: Callable[[Bar], _Told], of_closed: _Told) -> _Told:
        """What is done with the library's VBAR, or ``of_closed``: another thread may close it at
        any time.

        Raises:
            RuntimeError: it failed.
        """
        bar = self._bar
        if bar is None:
            return of_closed
        try:
            return act(bar)
        except Error as error:
            if self._bar is None:
                return of_closed
            raise RuntimeError(f"{self!r}: {error}") from error

    @staticmethod
    def _pages_of(bar: Bar, nbytes: int) -> int:
        return min(-(-nbytes // bar.page_size), bar.page_count)


def vbar_fault(alloc: Alloc) -> Any:
    """As :meth:`ModelVBAR.fault`, of an allocation."""
    vbar, address, nbytes = alloc
    return vbar.fault(address, nbytes)


def vbar_unpin(alloc: Optional[Alloc]) -> None:
    """As :meth:`ModelVBAR.unpin`; of ``None`` it does nothing."""
    if alloc is not None:
        vbar, address, nbytes = alloc
        vbar.unpin(address, nbytes)


def vbar_signature_compare(first: Any, second: Any) -> bool:
    """Whether no page was lost between two faults of the same bytes.

    Raises:
        ValueError: the signatures are of ranges of different lengths.
        RuntimeError: they differ, and work that reads or writes the bytes was not over when the
            time was, or the wait was cancelled: whoever has faulted them may not write them yet.
            To compare again waits again.
    """
    if first is None or second is None:
        _tell(first, second, False)
        return False
    one, other = bytes(first), bytes(second)
    if len(one) != len(other):
        raise ValueError(f"signatures of {len(one)} and {len(other)} bytes are of different ranges")
    equal = one == other
    _tell(first, second, equal)
    return equal


def _tell(first: Any, second: Any, equal: bool) -> None:
    try:
        _saved.compared(first, second, equal)
    except Error as error:
        raise RuntimeError(f"bytes that were faulted may not be written yet: {error}") from error


def vbars_analyze(device: Any = None) -> int:
    """Bytes of VBARs that are resident on a device; ``None`` is the first. 0 for one not opened."""
    for index, context in list(_devices.contexts.items()):
        if device is None or index == device:
            return sum(bar.loaded_size() for bar in context.bars())
    return 0


def vbars_reset_watermark_limits() -> None:
    """The end of a node: all limits are 0, and what was used has a fence."""
    for context in list(_devices.contexts.values()):
        context.epoch += 1
        for bar in sorted(context.bars(), key=lambda bar: not bar._is_low):
            try:
                bar._end_of_node()
            except Error as error:
                # That it was closed meanwhile is nothing to warn of.
                level = logging.DEBUG if bar._bar is None else logging.WARNING
                logger.log(level, "the end of a node for %r: %s", bar, error)
        _report.end_of_node(context)


def _reserve(context: _devices.Context, nbytes: int) -> Bar | None:
    """Addresses that can be backed; ``None`` where the device has none."""
    try:
        bar = context.device.create_bar(nbytes)
        if bar.info().has_addresses:
            return bar
        why = "no addresses"
        bar.close()
    except Error as error:
        why = str(error)
    logger.warning("%d bytes could not be reserved, all of them are offloaded: %s", nbytes, why)
    return None


def _take_nowhere(nbytes: int) -> int:
    global _nowhere
    with _nowhere_lock:
        start = _nowhere
        _nowhere += max(-(-nbytes // PAGE), 1) * PAGE
    return start


@functools.lru_cache(maxsize=None)
def _type_of_length(count: int) -> Any:
    # An array all the same, which knows the fault that it is of.
    return type("Signature", (ctypes.c_uint32 * count,), {"use": None})


def _signature_type(nbytes: int) -> Any:
    return _type_of_length(nbytes // PAGE + 2)


def _why(freed: Freed) -> str:
    words = {
        Shortfall.NOTHING_RESIDENT: "nothing of it is resident",
        Shortfall.AT_FLOOR: "what is left is below its watermark limit",
        Shortfall.ALL_PINNED: f"{freed.pinned_count} pages are pinned",
        Shortfall.FENCE_UNKNOWN: "what is left was used by streams that no fence covers",
        Shortfall.TIMED_OUT: "what is left was still in use when the time was over",
    }
    return words.get(freed.shortfall, str(freed.shortfall))
