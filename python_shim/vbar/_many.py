"""Ranges that are faulted together, and their guards, which give their pins back together.

A program with many small weights faults a hundred ranges at a time, layer after layer. So what is
known of the ranges is prepared once, one call makes them resident, one gives the pins back, and
nothing is made for a range that nobody looks at.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Literal, Sequence, Tuple, overload

from . import _abi
from ._call import call_often
from ._guard import Guard, Offloaded
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


class Guards(Unshared, Sequence[Guard]):
    """The guards of :meth:`vbar.Device.fault_many`, in the order of its ranges.

    They give their pins back together, at the end of the ``with`` block, by :meth:`close`, or when
    this is dropped; a guard that somebody has taken out and kept lives on then.
    """

    __slots__ = ("_unpin", "_ranges", "_handle", "_stream", "_faults", "_words", "_made")

    def __init__(self, device: Device, ranges: Ranges, handle: int, stream: Any) -> None:
        self._unpin = device._lib.vbar_tokens_unpin
        self._ranges, self._handle, self._stream = ranges, handle, stream
        #: By index, those that somebody has looked at: each has its own token from then on.
        self._made: dict[int, Guard] = {}
        # One zeroed buffer, as the library writes it and as numbers; no numbers: no tokens.
        buffer = bytearray(ctypes.sizeof(ranges._faults_type))
        self._faults: Any = ranges._faults_type.from_buffer(buffer) if buffer else ()
        self._words = memoryview(buffer).cast("Q") if buffer else None

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
        if kind is not None:
            # What the block raised says more.
            self._give_back()
            return
        tokens = self._take_tokens(self._take_made())
        if tokens is not None:
            call_often(self._unpin, tokens, len(tokens), self._handle)

    def __del__(self) -> None:
        # Also of an object that was never made whole, and at the interpreter's end.
        if getattr(self, "_words", None) is not None:
            self._release(())

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
            guard = bar._guard_of(self._faults[index], at, size, self._handle, self._stream)
            known = self._made.setdefault(index, guard)
            if self._words is None or known is not guard:
                # All pins were given back, or another thread was quicker.
                guard._token = 0
            else:
                self._words[index * _WORDS + _TOKEN] = 0
            guard = known
        return guard

    def _take_made(self) -> list[int]:
        """The tokens of the guards that were made, which have none any more."""
        tokens = []
        for guard in list(self._made.values()):
            token, guard._token = guard._token, 0
            if token:
                tokens.append(token)
        return tokens

    def _take_tokens(self, made: Sequence[int]) -> ctypes.Array[_abi.Token] | None:
        """All tokens, once, as the library reads them."""
        words, self._words = self._words, None
        if words is None:
            return None
        own = words[_TOKEN::_WORDS]
        if not self._made:
            # All of them are there, or none.
            return self._ranges._tokens_type.from_buffer_copy(own.tobytes()) if own[0] else None
        tokens = array("Q", [*filter(None, own), *made])
        return (_abi.Token * len(tokens)).from_buffer_copy(tokens) if tokens else None

    def _release(self, made: Sequence[int]) -> None:
        tokens = self._take_tokens(made)
        if tokens is not None:
            self._unpin(tokens, len(tokens), self._handle)

    def _give_back(self) -> None:
        self._release(self._take_made())
