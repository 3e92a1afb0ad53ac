"""A VBAR whose client saves pages itself: none leaves before its callback has said so.

The client writes bytes that no file has, and is called with the first byte and the length of a page
before that goes. The library takes pages on any thread and calls nobody, so a page that is resident
is pinned here as long as its client has not saved it, and gives way where Python runs: when another
fault or buffer finds no memory, when there is less of it than is held, when the client frees memory
or cuts the watermark. PyTorch's own requests reach these pages by ``free_memory`` alone. What a
callback refuses stays.

Pages are those that clients know, whole: what is saved is as long as what they count in. Before a
callback all work that used the page is over, for which the device is waited for, since the client
reads on a stream that nobody is told of; a page is waited for once after it was used.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional

from .. import _abi
from .._errors import Error
from .._guard import Pins
from .._values import Reason
from . import _devices, _pins

if TYPE_CHECKING:
    from .._bar import Bar

logger = logging.getLogger("vbar.comfy")

#: First byte and length, in a VBAR.
Key = tuple[int, int]
#: Called with the first byte and the length, in the VBAR; ``False`` or an exception keeps the page.
Callback = Callable[[int, int], Any]

#: The unit of pages that clients count in.
PAGE = 32 << 20
#: Seconds between two looks at the device's memory while pages are used.
_LOOK = 0.1
#: Refusals that memory helps against.
_NO_ROOM = (Reason.BUDGET, Reason.ALL_PINNED, Reason.DRIVER_MEMORY, Reason.FENCE_PENDING)


class Refused(RuntimeError):
    """A client keeps a page that was to go."""


class Kept:
    """A page that is resident until its client has saved it."""

    __slots__ = ("pins", "generation", "is_used")

    def __init__(self, pins: Pins, generation: int) -> None:
        self.pins, self.generation = pins, generation
        #: Work may use it that nobody has waited for.
        self.is_used = False


class Paged:
    """What is resident of such a VBAR. Its calls may be made by any thread.

    Args:
        bar: the VBAR, not bound, of whole pages.
        context: its device.
        callback: its client.
    """

    def __init__(self, bar: Bar, context: _devices.Context, callback: Callback) -> None:
        self._bar, self._context, self._callback = bar, context, callback
        self._pages: dict[int, Kept] = {}
        self._born = 0
        #: When its bar was last made the last to lose pages; below 0 the first.
        self.rank = 0
        #: The first page that is not to be resident, and the first that may go.
        self._cut: Optional[int] = None
        self.limit = 0

    def pin(self, key: Key) -> Pins:
        """Faults a range: its pages are kept from then on.

        Raises:
            vbar.Error: a fault failed; nothing of it is kept that was not before.
        """
        numbers = _pages_of(key)
        with self._context.leaving:
            if self._cut is not None and numbers.stop > self._cut:
                return Pins(reason=Reason.ABOVE_WATERMARK)
            new: list[int] = []
            try:
                for number in numbers:
                    if number in self._pages:
                        continue
                    pins = self._bring(number, numbers)
                    if not pins.token:
                        return pins
                    self._born += 1
                    self._pages[number] = Kept(pins, self._born)
                    new.append(number)
                pins = _pins.pin(self._bar, *key, self._context.index)
                if pins.token:
                    pins.key = key
                    new = []
                return pins
            finally:
                # Nobody has written them.
                for number in new:
                    self._pages.pop(number, None)

    def enter(self, key: Key, pins: Pins) -> tuple[int, None]:
        """What the signature of a fault says: another number when a page came anew."""
        with self._context.leaving:
            kept = [self._pages.get(number) for number in _pages_of(key)]
            # Without them another thread has closed the VBAR.
            return max((one.generation for one in kept if one is not None), default=0), None

    def before_unpin(self, pins: Pins, stream: int) -> None:
        """The client is done with a fault, behind the work on a stream."""
        with self._context.leaving:
            for number in _pages_of(getattr(pins, "key", (0, 0))):
                kept = self._pages.get(number)
                if kept is not None:
                    kept.is_used = True

    def released(self, pins: Pins) -> None:
        """Pins went without an unpin."""
        self.before_unpin(pins, 0)

    def unpinned(self) -> None:
        """Pins went: what was to be without its page can be, and what is too much can go.

        Raises:
            Refused: its client keeps it.
        """
        if self._cut is not None:
            self.cut_off()
        look(self._context)

    def set_cut(self, nbytes: Optional[int]) -> None:
        """Says from which byte on nothing is to be resident, whole pages."""
        self._cut = None if nbytes is None else -(-nbytes // PAGE)

    def cut_off(self) -> None:
        """Lets pages behind the cut go that no pin holds.

        Raises:
            Refused: its client keeps one; the others are gone.
        """
        refused: Optional[Refused] = None
        gone = 0
        with self._context.leaving:
            if self._cut is None or not self._pages or max(self._pages) < self._cut:
                return
            for number in self._idle(self._cut):
                try:
                    gone += self._let_go(number)
                except Refused as error:
                    refused = error
        self._give_back(gone)
        try:
            if refused is not None:
                raise refused
        finally:
            # Else the exception has this frame, which has the exception.
            del refused

    def free(self, wanted: int) -> int:
        """Lets pages go, from the end down to the limit, until so many bytes went or its client
        keeps one, which the log says; the bytes that came.
        """
        return self._give_back(self.leave(wanted))

    def leave(self, wanted: int, but: range = range(0)) -> int:
        """As :meth:`free`, those of ``but`` excepted: the bytes that may go. The library may have
        them when it needs them."""
        gone = 0
        with self._context.leaving:
            for number in self._idle(self.limit):
                if gone >= wanted:
                    break
                if number in but:
                    continue
                try:
                    gone += self._let_go(number)
                except Refused as error:
                    logger.warning("%s", error)
                    break
        return gone

    def end_of_node(self, is_first_to_go: bool) -> None:
        """What is too much goes."""
        self.limit = 0
        relieve(self._context)

    def close(self) -> None:
        """Nothing is kept any more: the bytes go with the VBAR, and nobody is asked."""
        # Each gives its pins back as it goes. Without the lock: whoever collects garbage, on any
        # thread, may be here.
        self._pages = {}

    def pins_of(self, nbytes: int) -> int:
        """Pins of the page at a byte that are none of its client's."""
        return 1 if nbytes // PAGE in self._pages else 0

    def _bring(self, number: int, but: range) -> Pins:
        start, length = number * PAGE, min(PAGE, self._bar.nbytes - number * PAGE)
        while True:
            pins = _pins.pin(self._bar, start, length, self._context.index)
            if pins.token or pins.reason not in _NO_ROOM:
                return pins
            # Its own behind the range are the last to go for it, as of any VBAR.
            if make_room(self._context, self.rank):
                continue
            gone = self.leave(1, range(but.stop))
            if not gone:
                return pins
            self._give_back(gone)

    def _idle(self, first: int) -> Iterator[int]:
        """Numbers of pages from one on that no pin of the client holds, the last one first."""
        for number in sorted(self._pages, reverse=True):
            if number < first:
                return
            if not self._is_pinned(number):
                yield number

    def _is_pinned(self, number: int) -> bool:
        size = self._bar.page_size
        pages = self._bar.residency(number * PAGE // size, -(-PAGE // size))
        return any(page.pin_count > 1 for page in pages)

    def _let_go(self, number: int) -> int:
        """Has a page saved; its bytes. The library may take it from then on.

        Raises:
            Refused: its client, or the device, keeps it.
        """
        kept, start = self._pages.get(number), number * PAGE
        if kept is None:
            return 0
        length = min(PAGE, self._bar.nbytes - start)
        if kept.is_used:
            if not _devices.synchronize(self._context.index):
                raise Refused(f"the device's work on {length} bytes at {start} was not waited for")
            for one in paged(self._context):
                one._note_idle()
        try:
            told = self._callback(start, length)
        except Exception as error:
            raise Refused(f"{length} bytes at {start} were not saved: {error!r}") from error
        if told is not None and not told:
            raise Refused(f"{length} bytes at {start} are kept by their client")
        self._pages.pop(number, None)
        _pins.unpin(kept.pins, _abi.STREAM_NONE)
        return length

    def _note_idle(self) -> None:
        # What is pinned now is used anew when its pins go.
        for kept in list(self._pages.values()):
            kept.is_used = False

    def _give_back(self, nbytes: int) -> int:
        if not nbytes:
            return 0
        # A fence behind all that the current stream was given.
        self._bar.end_of_run(_devices.current_stream(self._context.index))
        return int(self._bar.free_memory(nbytes).bytes)


def paged(context: _devices.Context) -> list[Paged]:
    """Those of a device."""
    return [one for one in (bar._saved for bar in context.bars()) if isinstance(one, Paged)]


def make_room(context: _devices.Context, rank: float) -> bool:
    """Has a page of a VBAR go that ranks below; whether one did."""
    for one in sorted(paged(context), key=lambda one: one.rank):
        if one.rank >= rank:
            return False
        gone = one.leave(1)
        if gone:
            one._give_back(gone)
            return True
    return False


def is_room_missing(pins: Pins) -> bool:
    """Whether a fault was refused for want of memory."""
    return not pins.token and pins.reason in _NO_ROOM


def look(context: _devices.Context) -> None:
    """Has pages go when more is held than the budget has, if it is time to look."""
    now = time.monotonic()
    if now >= context.relieved_at + _LOOK:
        context.relieved_at = now
        relieve(context)


def relieve(context: _devices.Context) -> None:
    """Has pages go as long as more is held than the budget has: tensors, or other programs."""
    while True:
        try:
            told = context.device.statistics()
        except Error as error:
            logger.debug("%r has no numbers: %s", context, error)
            return
        if told.used_bytes <= told.budget_bytes or not make_room(context, float("inf")):
            return


def _pages_of(key: Key) -> range:
    return range(key[0] // PAGE, -(-sum(key) // PAGE))
