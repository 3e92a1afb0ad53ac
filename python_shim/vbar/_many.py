"""Ranges that are faulted together, and their guards, which give their pins back together.

A program with many small weights faults a hundred ranges at a time, layer after layer. So what is
known of the ranges is prepared once, one call makes them resident, one gives the pins back, and
nothing is made for a range that nobody looks at.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
from array import array
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Literal, Sequence, Tuple, overload

from . import _abi
from ._call import call_often
from ._guard import Guard, Offloaded, Pins
from ._owner import nothing
from ._sizes import unsigned
from ._unshared import Unshared
from ._values import Reason

if TYPE_CHECKING:
    from types import TracebackType

    from ._bar import Bar
    from ._device import Device

    RangeTuple = Tuple[Bar, int, int]

#: A fault as 64-bit numbers, and which of them is the token: outputs are read and cleared by them.
_WORDS = ctypes.sizeof(_abi.Fault) // 8
_TOKEN = _abi.Fault.token.offset // 8


class Ranges(Unshared, Sequence["RangeTuple"]):
    """Ranges of VBARs, prepared for :meth:`vbar.Device.fault_many` to be faulted again and again.

    Args:
        ranges: of each the VBAR, its first byte and its length, in bytes.

    Raises:
        InvalidArgument: a number is negative, or too large for any VBAR.
    """

    __slots__ = ("_ranges", "_told", "_faults_type", "_tokens_type")

    def __init__(self, ranges: Iterable[RangeTuple]) -> None:
        self._ranges: tuple[RangeTuple, ...] = tuple(
            (bar, unsigned(bar_offset, "bar_offset"), unsigned(nbytes, "nbytes"))
            for bar, bar_offset, nbytes in ranges
        )
        self._told = (_abi.Range * len(self._ranges))()
        for place, (bar, at, size) in zip(self._told, self._ranges):
            place.bar, place.bar_offset, place.bytes = bar._id, at, size
        self._faults_type = _abi.Fault * len(self._ranges)
        self._tokens_type = _abi.Token * len(self._ranges)

    @overload
    def __getitem__(self, index: int) -> RangeTuple: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RangeTuple]: ...
    def __getitem__(self, index: int | slice) -> RangeTuple | Sequence[RangeTuple]:
        return self._ranges[index]

    def __len__(self) -> int:
        return len(self._ranges)

    def __repr__(self) -> str:
        return f"<vbar.Ranges: {len(self)}>"


class _Tokens:
    """The outputs of one call and the owner of the tokens there, from before the call on.

    As :class:`vbar._guard.Pins`: who has this drops it, and the pins go.
    """

    __slots__ = ("unpin", "handle", "stream", "faults", "words", "is_whole", "array_type", "_end")

    def __init__(self, device: Device, ranges: Ranges, handle: int, stream: Any) -> None:
        self.unpin = device._lib.vbar_tokens_unpin
        # The stream itself lives for as long.
        self.handle, self.stream = handle, stream
        #: Whether no token has gone to a guard.
        self.is_whole = True
        self.array_type = ranges._tokens_type
        # One zeroed buffer, as the library writes it and as numbers.
        buffer = bytearray(ctypes.sizeof(ranges._faults_type))
        self.faults: Any = ranges._faults_type.from_buffer(buffer) if buffer else ()
        #: None of no ranges.
        self.words = memoryview(buffer).cast("Q") if buffer else None
        self._end = nothing
        if self.words is not None:
            # Token by token, as they are when it comes to that.
            one_by_one = map(
                device._lib.vbar_token_unpin,
                filter(None, self.words[_TOKEN::_WORDS]),
                itertools.repeat(handle),
            )
            self._end = functools.partial(collections.deque(maxlen=0).extend, one_by_one)

    def told(self, made: Sequence[Pins] = ()) -> ctypes.Array[_abi.Token] | None:
        """All tokens, as the library reads them; also those of the guards that were made."""
        if self.words is None:
            return None
        own = self.words[_TOKEN::_WORDS]
        if self.is_whole:
            # All of them are there, or none.
            return self.array_type.from_buffer_copy(own.tobytes()) if own[0] else None
        # Each once: a guard that is being made has its token before it is cleared here.
        tokens = array("Q", dict.fromkeys(filter(None, [*own, *(pins.token for pins in made)])))
        return (_abi.Token * len(tokens)).from_buffer_copy(tokens) if tokens else None

    def clear(self, made: Sequence[Pins] = ()) -> None:
        """They were given back."""
        for pins in made:
            pins.forget()
        self._end, self.words = nothing, None

    def release(self, made: Sequence[Pins] = ()) -> None:
        """Give them back, and say nothing."""
        tokens = self.told(made)
        if tokens is not None:
            self.unpin(tokens, len(tokens), self.handle)
        self.clear(made)


# As of a handle: no function of Python.
_Tokens.__del__ = _Tokens._end  # type: ignore[attr-defined]


class Guards(Unshared, Sequence[Guard]):
    """The guards of :meth:`vbar.Device.fault_many`, in the order of its ranges.

    They give their pins back together, at the end of the ``with`` block, by :meth:`close`, or when
    this is dropped; a guard that somebody has taken out and kept lives on then.
    """

    __slots__ = ("_unpin", "_ranges", "_handle", "_stream", "_faults", "_tokens", "_made")

    def __init__(self, device: Device, ranges: Ranges, handle: int, stream: Any) -> None:
        self._unpin = device._lib.vbar_token_unpin
        self._ranges, self._handle, self._stream = ranges, handle, stream
        #: By index, those that somebody has looked at: each has its own token from then on.
        self._made: dict[int, Guard] = {}
        tokens = _Tokens(device, ranges, handle, stream)
        self._faults = tokens.faults
        #: ``None`` when all pins were given back.
        self._tokens: _Tokens | None = tokens

    @classmethod
    def _fault(cls, device: Device, ranges: Ranges, handle: int, stream: Any) -> Guards | Offloaded:
        guards = cls(device, ranges, handle, stream)
        told, faults = ranges._told, guards._faults or None
        function = device._lib.vbar_device_fault_many
        try:
            call_often(function, device._id, told, len(told), handle, faults)
        except BaseException:
            # A signal's handler may have raised although the fault was good.
            guards._give_back()
            raise
        if faults is not None and faults[0].outcome == _abi.OUTCOME_OFFLOADED:
            return Offloaded(Reason(faults[0].reason), faults[0].bytes)
        return guards

    @overload
    def __getitem__(self, index: int) -> Guard: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Guard]: ...
    def __getitem__(self, index: int | slice) -> Guard | Sequence[Guard]:
        found = range(len(self._faults))[index]
        if isinstance(found, range):
            return tuple(map(self._guard, found))
        return self._guard(found)

    def __len__(self) -> int:
        return len(self._faults)

    def __iter__(self) -> Iterator[Guard]:
        return map(self._guard, range(len(self._faults)))

    def __bool__(self) -> Literal[True]:
        # Also of no ranges at all: none of them is offloaded.
        return True

    def __repr__(self) -> str:
        return f"<vbar.Guards: {len(self)}>"

    def __enter__(self) -> Guards:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Once, and this frame's from here on.
        tokens, self._tokens = self._tokens, None
        if tokens is None:
            return
        made = self._take_made()
        if kind is not None:
            # What the block raised says more.
            tokens.release(made)
            return
        told = tokens.told(made)
        if told is not None:
            try:
                call_often(tokens.unpin, told, len(told), self._handle)
            except BaseException:
                # It may not have come to the call.
                tokens.release(made)
                raise
        tokens.clear(made)

    def close(self) -> None:
        """Give all pins back. A second time does nothing.

        Raises:
            StaleToken: a forced end of run took some before; the others were given back.
        """
        self.__exit__(None, None, None)

    def _guard(self, index: int) -> Guard:
        guard = self._made.get(index)
        if guard is None:
            bar, at, size = self._ranges[index]
            # With the token of these guards, which it does not own yet.
            pins = Pins()
            ctypes.memmove(ctypes.byref(pins), ctypes.byref(self._faults[index]), _WORDS * 8)
            guard = bar._guard_of(pins, at, size, self._handle, self._stream)
            known = self._made.setdefault(index, guard)
            tokens = self._tokens
            words = None if tokens is None else tokens.words
            if known is guard and tokens is not None and words is not None:
                tokens.is_whole = False
                pins.own(self._unpin, self._handle)
                words[index * _WORDS + _TOKEN] = 0
            else:
                # All pins were given back, or another thread was quicker.
                pins.forget()
            guard = known
        return guard

    def _take_made(self) -> list[Pins]:
        """The pins of the guards that were made, which have none any more."""
        taken: list[Pins] = []
        for guard in list(self._made.values()):
            pins, guard._pins = guard._pins, None
            if pins is not None and pins.token:
                taken.append(pins)
        return taken

    def _give_back(self) -> None:
        self.__exit__(BaseException, None, None)
