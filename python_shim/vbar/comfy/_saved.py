"""What ComfyUI wrote into a VBAR, kept in page-locked memory so that it comes back by itself.

A client that finds the signature of a fault unchanged writes nothing, whatever cast or patch made
the bytes; one that finds it changed, or has kept none, writes them anew before it unpins. So the
bytes of a *unit*, the range of one fault, are final at the unpin behind its stream. A unit that
does not stay, since it was refused or lost while more is used than the budget has, is saved there:
from then on the streaming engine fills its pages, ahead of need once it knows the order, and
signatures stay the same. A client that finds one changed all the same, since it patched, has the
unit's copy dropped before the comparison returns: whoever writes is never in a race with a fill.
Where the wait for that fails, so does the comparison, and nobody writes until it was made up for.
Pages that have stayed for some nodes lose their copies, one by one, as do those that are there when
no weight was used for a while. Where the host runs short of memory copies go, at the end of a node,
while it uses weights, or while nobody does; the library gives what they were in back, a few windows
at a time, from a thread of its own. Where there is no page-locked memory, everything is as without.

A range that has others within it (ComfyUI faults blocks and their modules) is never saved itself:
its signature says whether its parts have kept their bytes.
"""

from __future__ import annotations

import bisect
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Iterator, Optional

from .._errors import Cancelled, Closed, Error, HostMemory, StaleHandle, TimedOut
from .._guard import Pins
from .._values import PageState, Reason
from . import _devices, _idle, _pins

if TYPE_CHECKING:
    from .._bar import Bar

logger = logging.getLogger("vbar.comfy")

#: First byte and length, in a VBAR.
Key = tuple[int, int]

#: Refusals that streaming helps against.
_STREAMABLE = (Reason.BUDGET, Reason.ABOVE_WATERMARK, Reason.FENCE_PENDING)
#: Pages that have a frame.
MAPPED = (PageState.ISSUED, PageState.RESIDENT)
#: A page that stayed resident for so many nodes needs no copy.
_NODES_STILL = 3
#: So many uses of a unit that nobody compared, and it is not saved again.
_UNSEEN_MAX = 3
#: Seconds between two looks at the host's memory while weights are used; the library's own are as far
#: apart.
_LOOK = 0.1
#: Seconds without a use after which one copy is enough of what is resident.
_IDLE = 10.0
#: Bytes between the parts of a range that are nobody's: ComfyUI aligns to 1024.
_GAP = 1024

#: Whether anything is saved: ``VBAR_COMFY_AHEAD=off`` leaves all to the client.
is_on = os.environ.get("VBAR_COMFY_AHEAD", "on").lower() not in ("off", "0", "no")


class Unit:
    """A range that is faulted as one."""

    __slots__ = (
        "key", "generation", "seen", "pieces", "wanted", "excluded", "unseen", "uses", "inner",
        "parts", "node",
    )  # fmt: skip

    def __init__(self, key: Key, page_bytes: int) -> None:
        self.key = key
        #: What of it lies in each of its pages.
        self.pieces = list(_pieces_of(key, page_bytes))
        #: What signatures say: another one when bytes were lost.
        self.generation = 0
        #: The newest generation of its pages when it was faulted last.
        self.seen = 0
        #: It does not stay, so it is to be saved.
        self.wanted = False
        #: It is never saved.
        self.excluded = False
        self.unseen = 0
        #: Faults whose pins are held.
        self.uses: list[Use] = []
        #: Units within it, and their generations when it was faulted last.
        self.inner: list[Unit] = []
        self.parts: Optional[tuple[int, ...]] = None
        #: The last node that used it.
        self.node = -1

    @property
    def saved(self) -> bool:
        """Whether pages of it come back with its bytes."""
        return any(piece.saved for piece in self.pieces)

    def has(self, other: Unit) -> bool:
        start, end = self.key[0], sum(self.key)
        return start <= other.key[0] and sum(other.key) <= end

    def touches(self, other: Unit) -> bool:
        return self.key[0] < sum(other.key) and other.key[0] < sum(self.key)


class Piece:
    """What of a unit lies in one page: saved by itself, since of many a weight some pages stay."""

    __slots__ = ("key", "saved", "seen", "still", "seen_before")

    def __init__(self, key: Key) -> None:
        self.key = key
        #: The page comes back with these bytes.
        self.saved = False
        #: The page's generation when the unit was faulted last, the nodes in a row that have not
        #: changed it, and what it was before them.
        self.seen, self.still, self.seen_before = 0, 0, 0


def _pieces_of(key: Key, page_bytes: int) -> Iterator[Piece]:
    at, end = key[0], sum(key)
    while at < end:
        up_to = min(end, at - at % page_bytes + page_bytes)
        yield Piece((at, up_to - at))
        at = up_to


class Use:
    """A fault whose pins are held, as its signature knows it."""

    __slots__ = ("owner", "unit", "equal", "streamed")

    def __init__(self, owner: Saved, unit: Unit, streamed: bool) -> None:
        self.owner, self.unit = weakref.ref(owner), unit
        #: The bytes are valid for a stream; others may have fills or former users before them.
        self.streamed = streamed
        #: What its comparison came to; ``None`` before, and of one that nobody compares.
        self.equal: Optional[bool] = None


class Saved:
    """What is saved of a VBAR. Its calls may be made by any thread.

    Args:
        bar: the VBAR, not bound.
        context: its device.
    """

    def __init__(self, bar: Bar, context: _devices.Context) -> None:
        self._bar, self._context = bar, context
        self._units: dict[Key, Unit] = {}
        self._order: list[Key] = []
        self._longest = 0
        #: Held while units change; never while a fault waits.
        self._lock = threading.RLock()
        #: Since this node nothing more is saved, for want of memory.
        self._full_at = -1
        #: Bytes from here on are not to be resident.
        self.cut: Optional[int] = None
        #: Ranges whose copies may be under way although they are dropped, since the wait for them
        #: failed: nothing else orders a write behind them.
        self._owed: set[Key] = set()

    def pin(self, key: Key) -> Pins:
        """Faults a range. One that is saved comes filled, for the current stream; any other once
        its frames are idle, to be written on any stream.

        Raises:
            vbar.Error: the fault failed.
        """
        self._context.used_at = time.monotonic()
        unit = self._unit(key)
        if unit.saved or unit.wanted or unit.inner:
            # While a graph is captured what is not there is not brought in: it would keep it for
            # good. The library sees to that itself for what does not stream.
            if _devices.is_capturing() and not self._is_resident(key):
                return Pins(reason=Reason.CAPTURE)
        pins = self._fault(unit)
        if not pins.token and pins.reason in _STREAMABLE and self._may_save(unit):
            if self._is_tight() and self._forget_rest(unit) and self._prepare(unit):
                pins = self._fault(unit)
                if pins.token:
                    unit.wanted = True
                else:
                    self._drop(unit)
        return pins

    def enter(self, key: Key, pins: Pins) -> tuple[int, Use]:
        """What the signature of a fault says, and the use that its comparison is told to."""
        unit = self._unit(key)
        use = Use(self, unit, getattr(pins, "streamed", False))
        with self._lock:
            if unit.seen != pins.signature:
                # Asked now: what is dropped later has its bytes in pages that are pinned.
                if not self._kept_bytes(unit):
                    if unit.seen and not unit.wanted and self._is_tight():
                        unit.wanted = self._may_save(unit)
                    unit.generation = pins.signature
                unit.seen = pins.signature
            unit.uses.append(use)
            unit.node = self._context.epoch
            pins.use = use
            return unit.generation, use

    def before_unpin(self, pins: Pins, stream: int) -> None:
        """The client is done with a fault, behind the work on a stream: saves what is to be."""
        use = self._leave(pins)
        if use is None:
            return
        unit = use.unit
        with self._lock:
            if use.equal is None:
                self._unseen(unit)
            elif unit.inner:
                if not use.equal:
                    self._drop_inner(unit)
            elif unit.wanted and not unit.saved and self._may_save(unit):
                # Whoever else has it may be writing.
                if all(other.equal for other in unit.uses) and not _devices.is_capturing():
                    self._save(unit, stream)
        self._look()

    def released(self, pins: Pins) -> None:
        """Pins went without an unpin: whoever had them may have been in the middle of writing."""
        use = self._leave(pins)
        if use is not None and use.equal is None:
            with self._lock:
                self._drop(use.unit)
                self._drop_inner(use.unit)

    def told(self, use: Use, equal: bool) -> None:
        """A client has compared the signature of a fault that it holds.

        Raises:
            vbar.Error: it may not write yet, since a copy may be under way still. Its pins stay,
                and to compare again waits again.
        """
        failed = None
        with self._lock:
            if use not in use.unit.uses:
                return
            if equal:
                use.equal = use.equal is not False
                return
            # It writes from here on.
            use.equal = False
            if use.unit.saved:
                failed = self._drop(use.unit)
            failed = self._drop_inner(use.unit) or failed
        try:
            if failed is not None:
                raise failed
        finally:
            # Else the exception has this frame, which has the exception.
            del failed
        if not self._settle():
            raise Error("copies of memory that may be written may be under way still")
        if use.streamed:
            self._wait_filled(use.unit)

    def end_of_node(self, is_first_to_go: bool) -> None:
        """Drops what is not needed any more, and more where the host has no memory for it."""
        epoch = self._context.epoch
        with self._lock:
            saved = [unit for unit in self._units.values() if unit.saved and not unit.uses]
            for unit in saved:
                if epoch - unit.node > 1:
                    continue
                self._drop_still(unit)
        self._give_way(saved, is_first_to_go)

    def _look(self) -> None:
        """Drops what the host has no memory for, of all VBARs, if it is time to look."""
        context, now = self._context, time.monotonic()
        if now < context.looked_at + _LOOK:
            return
        context.looked_at = now
        try:
            _drop_what_is_too_much(context)
        except Error as error:
            # The unpin that it was for is good all the same: nothing is dropped this time.
            logger.debug("%r has no numbers: %s", context, error)

    def drop_resident(self) -> None:
        """Drops copies of pages that have been resident since they were last used."""
        with self._lock:
            for unit in self._units.values():
                if unit.saved and not unit.uses:
                    self._drop_there(unit, [piece for piece in unit.pieces if piece.saved])

    def _give_way(self, saved: list[Unit], is_first_to_go: bool) -> None:
        device = self._context.device
        excess = device.statistics().locked_excess_bytes
        if excess <= 0 or not saved:
            return
        self._drop_excess(saved, is_first_to_go, excess)
        told = device.statistics()
        device.trim_host(max(told.locked_bytes - told.locked_excess_bytes, 0))

    def _drop_excess(self, saved: list[Unit], is_first_to_go: bool, excess: int) -> int:
        """Drops copies, those of the highest bytes first, until so many bytes went that were too
        many; those that are too many still."""
        if not saved:
            return excess
        bars = self._context.bars()
        others = any(bar._saved is not self and _has_saved(bar) for bar in bars)
        # One that others come before keeps nothing; else as much goes as must.
        logger.debug("%d bytes of page-locked memory are to go", excess)
        with self._lock:
            for unit in reversed(saved):
                if excess <= 0 and not (is_first_to_go and others):
                    break
                if unit.saved and not unit.uses:
                    excess -= sum(piece.key[1] for piece in unit.pieces if piece.saved)
                    self._drop(unit)
            self._full_at = self._context.epoch
        return excess

    def has_saved(self) -> bool:
        return any(unit.saved for unit in list(self._units.values()))

    def saved_bytes(self) -> int:
        """Bytes that are saved now."""
        units = list(self._units.values())
        return sum(piece.key[1] for unit in units for piece in unit.pieces if piece.saved)

    def set_cut(self, nbytes: Optional[int]) -> None:
        """Says from which byte on nothing is to be resident, if there is one."""
        self.cut = nbytes
        if nbytes is None:
            return
        with self._lock:
            for unit in self._units.values():
                if sum(unit.key) > nbytes:
                    unit.wanted = False
                    self._drop(unit)

    def _fault(self, unit: Unit) -> Pins:
        streamed = unit.saved or any(one.saved for one in unit.inner)
        if not streamed and not self._settle():
            # As of all that is still in use: the client has its bytes elsewhere this time.
            return Pins(reason=Reason.FENCE_UNKNOWN)
        pins = _pins.pin(self._bar, *unit.key, self._context.index, written=not streamed)
        pins.streamed = streamed
        return pins

    def _unit(self, key: Key) -> Unit:
        unit = self._units.get(key)
        if unit is not None:
            return unit
        with self._lock:
            return self._units.get(key) or self._new_unit(key)

    def _new_unit(self, key: Key) -> Unit:
        unit = Unit(key, self._bar.page_size)
        for other in self._touching(unit):
            if unit.has(other):
                unit.inner.append(other)
            elif other.has(unit):
                other.inner.append(unit)
                other.inner.sort(key=lambda one: one.key)
                self._exclude(other)
            else:
                # Whose bytes are whose is not known.
                self._exclude(other)
                unit.excluded = True
        unit.excluded = unit.excluded or bool(unit.inner)
        self._units[key] = unit
        self._longest = max(self._longest, key[1])
        bisect.insort(self._order, key)
        return unit

    def _touching(self, unit: Unit) -> list[Unit]:
        start, end = unit.key[0], sum(unit.key)
        first = bisect.bisect_left(self._order, (start - self._longest, 0))
        near = self._order[first : bisect.bisect_left(self._order, (end, 0))]
        return [one for one in map(self._units.__getitem__, near) if one.touches(unit)]

    def _exclude(self, unit: Unit) -> None:
        unit.excluded, unit.wanted = True, False
        self._drop(unit)

    def _may_save(self, unit: Unit) -> bool:
        if not is_on or unit.excluded or self._full_at == self._context.epoch:
            return False
        return self.cut is None or sum(unit.key) <= self.cut

    def _is_tight(self) -> bool:
        """Whether all weights and what else has frames are more than the budget. Without, a unit
        is out because the client wanted memory, and what has come of that is the client's.
        """
        told = self._context.device.statistics()
        missing = sum(bar._missing_bytes() for bar in self._context.bars())
        return bool(told.used_bytes + missing > told.budget_bytes)

    def _prepare(self, unit: Unit) -> bool:
        try:
            for piece in unit.pieces:
                self._bar.prepare_save(*piece.key)
            return True
        except (HostMemory, TimedOut, Cancelled) as error:
            logger.debug("nothing more is saved in this node: %s", error)
            self._full_at = self._context.epoch
        except Error as error:
            logger.debug("%d bytes at %d are not saved: %s", unit.key[1], unit.key[0], error)
            unit.excluded = True
        self._drop(unit)
        return False

    def _forget_rest(self, unit: Unit) -> bool:
        """Drops what is saved of a unit that has lost bytes, whose client writes all of it anew:
        else each such use would be faulted twice, which is another order for the engine.
        """
        with self._lock:
            pages = self._pages(unit.key) if unit.saved else []
            if any(not it.saved and at.state not in MAPPED for it, at in zip(unit.pieces, pages)):
                return self._drop(unit) is None
        return True

    def _save(self, unit: Unit, stream: int) -> None:
        if not self._prepare(unit):
            return
        try:
            for piece in unit.pieces:
                self._bar.save(*piece.key, stream)
                piece.saved, piece.still, piece.seen_before = True, 0, piece.seen
            _idle.start(self._context, _is_any_saved, _look_after)
        except BaseException as error:
            # An interrupt may come right behind a save, of which nobody would know; a save that
            # failed may have begun its copy, which the drop waits for.
            self._drop(unit)
            if not isinstance(error, Error):
                raise
            logger.warning("%d bytes at %d are not saved: %s", unit.key[1], unit.key[0], error)
            unit.excluded = True

    def _drop(self, unit: Unit) -> Optional[Error]:
        """Forgets the copy of a unit, and room for one. Whoever has pinned it may write it then.

        Returns:
            What ended the wait for copies to and from it, if something did: nobody may write it
            before :meth:`_settle`. It is forgotten all the same.
        """
        failed = None
        for piece in unit.pieces:
            failed = self._drop_piece(piece) or failed
        return failed

    def _drop_piece(self, piece: Piece) -> Optional[Error]:
        # First: a fault that comes now finds its bytes lost where they are.
        piece.saved = False
        try:
            self._bar.drop_save(*piece.key)
        except (StaleHandle, Closed):
            # Another thread has closed the VBAR: nobody has these bytes any more.
            return None
        except Error as error:
            self._owed.add(piece.key)
            logger.debug("the copy of %d bytes at %d: %s", piece.key[1], piece.key[0], error)
            return error
        except BaseException:
            # An interrupt has ended the wait.
            self._owed.add(piece.key)
            raise
        return None

    def _settle(self) -> bool:
        """Waits for the copies whose own waits have failed, if there are any, as long as the device
        lets one wait; whether none is under way any more.
        """
        if self._owed and _devices.is_capturing():
            return False
        for key in list(self._owed):
            try:
                self._bar.drop_save(*key)
            except (StaleHandle, Closed):
                pass
            except Error as error:
                logger.debug("the copy of %d bytes at %d: %s", key[1], key[0], error)
                return False
            self._owed.discard(key)
        return True

    def _wait_filled(self, unit: Unit) -> None:
        """Waits, for any stream, for what was ordered for one.

        Raises:
            vbar.Error: the wait failed.
        """
        try:
            pins = _pins.pin(self._bar, *unit.key, self._context.index)
        except (StaleHandle, Closed):
            # Another thread has closed the VBAR: nobody has these bytes any more.
            return
        if not pins.token:
            raise Error(f"the bytes are not idle: {Reason(pins.reason)}")
        pins.release()

    def _drop_still(self, unit: Unit) -> None:
        """Forgets the copies of pages that have stayed for some nodes: one is enough."""
        for piece in unit.pieces:
            piece.still = piece.still + 1 if piece.seen == piece.seen_before else 0
            piece.seen_before = piece.seen
        still = [it for it in unit.pieces if it.saved and it.still >= _NODES_STILL]
        self._drop_there(unit, still)

    def _drop_there(self, unit: Unit, pieces: list[Piece]) -> None:
        """Forgets those of some copies whose pages have been there since they were last used."""
        pages = self._pages(unit.key) if pieces else []
        for piece, page in zip(unit.pieces, pages):
            if piece in pieces and page.generation == piece.seen and page.state in MAPPED:
                self._drop_piece(piece)
        unit.wanted = unit.saved

    def _drop_inner(self, unit: Unit) -> Optional[Error]:
        failed = None
        for part in unit.inner:
            if part.saved:
                failed = self._drop(part) or failed
        return failed

    def _unseen(self, unit: Unit) -> None:
        """Nobody compared: whether bytes were written is not known."""
        for one in (unit, *unit.inner):
            if one.saved or one is unit and unit.wanted:
                self._drop(one)
                one.unseen += 1
                one.excluded = one.excluded or one.unseen >= _UNSEEN_MAX

    def _leave(self, pins: Pins) -> Optional[Use]:
        use: Optional[Use] = getattr(pins, "use", None)
        if use is None:
            return None
        with self._lock:
            if use not in use.unit.uses:
                return None
            use.unit.uses.remove(use)
        return use

    def _kept_bytes(self, unit: Unit) -> bool:
        """Whether a unit whose pages have changed has its bytes all the same."""
        if not unit.inner:
            return self._observe(unit)
        whole = sum(one.key[1] + _GAP - 1 for one in unit.inner) >= unit.key[1]
        for one in unit.inner:
            if not self._observe(one):
                one.generation = max(piece.seen for piece in one.pieces)
            one.seen = max(piece.seen for piece in one.pieces)
        before, unit.parts = unit.parts, tuple(one.generation for one in unit.inner)
        return whole and before == unit.parts

    def _observe(self, unit: Unit) -> bool:
        """Whether each page of a unit that is pinned is as it was, or has come back filled."""
        kept = True
        for piece, page in zip(unit.pieces, self._pages(unit.key)):
            kept = kept and (piece.saved or piece.seen == page.generation)
            piece.seen = page.generation
        return kept

    def _pages(self, key: Key) -> Any:
        size = self._bar.page_size
        first, end = key[0] // size, -(-sum(key) // size)
        return self._bar.residency(first, end - first)

    def _is_resident(self, key: Key) -> bool:
        return all(page.state in MAPPED for page in self._pages(key))


def _has_saved(bar: Any) -> bool:
    return isinstance(bar._saved, Saved) and bar._saved.has_saved()


def _is_any_saved(context: _devices.Context) -> bool:
    is_open = _devices.contexts.get(context.index) is context
    return is_open and any(map(_has_saved, context.bars()))


def _look_after(context: _devices.Context, now: float) -> None:
    """Nobody may use weights for long."""
    if now >= context.used_at + _IDLE:
        for bar in filter(_has_saved, context.bars()):
            bar._saved.drop_resident()
    _drop_what_is_too_much(context)


def _drop_what_is_too_much(context: _devices.Context) -> None:
    """Drops what the host has no memory for, of all VBARs.

    Raises:
        vbar.Error: the device has no numbers.
    """
    excess = context.device.statistics().locked_excess_bytes
    for bar in sorted(context.bars(), key=lambda bar: not bar._is_low):
        other = bar._saved
        if isinstance(other, Saved) and excess > 0:
            with other._lock:
                saved = [unit for unit in other._units.values() if unit.saved]
            # What goes is held until its windows are given back: not told as gone so soon.
            excess = other._drop_excess(saved, bar._is_low, excess)


def compared(first: Any, second: Any, equal: bool) -> None:
    """Two signatures were compared: whoever holds the fault of one of them is told."""
    for signature in (first, second):
        use: Optional[Use] = getattr(signature, "use", None)
        if use is not None:
            owner = use.owner()
            if owner is not None:
                owner.told(use, equal)
