"""Ranges that are pinned and unpinned again and again, with nothing made in between.

:class:`vbar._many.Guards` are for who looks at them. This is for who knows the addresses already,
thousands of times a second: what a fault and an unpin need was prepared once, and serves again.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import operator
from typing import TYPE_CHECKING, Any, Callable

from . import _abi, _interrupt, _log
from ._call import raise_failure
from ._guard import Offloaded
from ._unshared import Unshared
from ._values import Reason

if TYPE_CHECKING:
    from types import TracebackType

    from ._device import Device
    from ._many import Ranges

#: A fault as 64-bit numbers, and which of them are its token, and its outcome and reason.
_WORDS = ctypes.sizeof(_abi.Fault) // 8
_BYTES = _abi.Fault.bytes.offset // 8
_TOKEN = _abi.Fault.token.offset // 8
_ALL, _CALL = slice(None), operator.methodcaller("__call__")


class Hold(Unshared):
    """The pins of prepared ranges, for a block at a time, on one stream.

    It owns its tokens from before the call that makes them, as :class:`vbar._guard.Pins` does:
    whoever is interrupted drops it, and the pins go. So who uses it again takes it out of wherever
    it waits, and puts it back when the block has ended well.
    """

    __slots__ = ("handle", "_call", "_unpin", "_words", "_made", "_told", "_none", "_idle", "_end")

    def __init__(
        self, device: Device, ranges: Ranges, handle: int, idle: list[Hold] | None = None
    ) -> None:
        library, count = device._lib, len(ranges)
        #: The stream.
        self.handle = handle
        #: Where it waits for who is next.
        self._idle = idle
        buffer, told = bytearray(ctypes.sizeof(ranges._faults_type)), bytearray(8 * count)
        self._words = memoryview(buffer).cast("Q")
        #: The tokens where a fault writes them, and behind each other as an unpin reads them.
        self._made, self._told = self._words[_TOKEN::_WORDS], memoryview(told).cast("Q")
        self._none = memoryview(bytes(8 * count)).cast("Q")
        # As objects of ctypes, which are handed on without being looked at.
        faults, tokens = ranges._faults_type, ranges._tokens_type
        self._call: Callable[[], int] = functools.partial(
            _quick(library, "vbar_device_fault_many"),
            _abi.Device(device._id),
            ctypes.pointer(ranges._told),
            ctypes.c_size_t(count),
            _abi.Stream(handle),
            ctypes.pointer(faults.from_buffer(buffer)),
        )
        self._unpin: Callable[[], int] = functools.partial(
            _quick(library, "vbar_tokens_unpin"),
            ctypes.pointer(tokens.from_buffer(told)),
            ctypes.c_size_t(count),
            _abi.Stream(handle),
        )
        # Token by token, as they are when it comes to that.
        given = map(library.vbar_token_unpin, filter(None, self._made), itertools.repeat(handle))
        self._end = functools.partial(collections.deque(maxlen=0).extend, given)

    def fault(self) -> Offloaded | None:
        """Pins the ranges, on the stream; or says why not, and nothing is pinned."""
        try:
            if _interrupt.unarmed:
                _interrupt.arm()
            status = self._call()
            if status or _interrupt.stash:
                raise_failure(status)
            _log.deliver_if_due()
        except BaseException:
            # A signal's handler may have raised although the fault was good. Not at some later
            # time: what was raised has this frame.
            self.release()
            raise
        if self._made[0]:
            return None
        return Offloaded(self._reason(), self._words[_BYTES])

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            # What the block raised says more.
            self.release()
            return
        try:
            self._told[:] = self._made
            status = self._unpin()
            if status or _interrupt.stash:
                raise_failure(status)
            self._made[:] = self._none
        except BaseException:
            # It may not have come to the call; a second time is refused, and harmless.
            self.release()
            raise
        if self._idle is not None:
            self._idle.append(self)

    def release(self) -> None:
        """Give the pins back if there are any, and say nothing."""
        if self._made[0]:
            self._told[:] = self._made
            self._unpin()
            self._made[:] = self._none

    def lease(self) -> Lease:
        """Hands its pins over: they end when what this returns is dropped, and it serves again."""
        made, told = self._made, self._told
        steps: list[Callable[[], Any]] = [
            functools.partial(operator.setitem, told, _ALL, made),
            self._unpin,
            functools.partial(operator.setitem, made, _ALL, self._none),
        ]
        if self._idle is not None:
            steps.append(functools.partial(self._idle.append, self))
        return Lease(steps)

    def _reason(self) -> Reason:
        fault = _abi.Fault.from_buffer(self._words.obj)
        return Reason(fault.reason)


class Lease:
    """Pins that have no block: whoever is left with this drops it, and they end."""

    __slots__ = ("_end",)

    def __init__(self, steps: list[Callable[[], Any]]) -> None:
        # One after the other, in C.
        self._end = functools.partial(collections.deque(maxlen=0).extend, map(_CALL, steps))


# As of a handle: no function of Python.
Lease.__del__ = Lease._end  # type: ignore[attr-defined]
Hold.__del__ = Hold._end  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=None)
def _quick(library: Any, name: str) -> Any:
    """A function of the library that takes objects of ctypes as they are."""
    return ctypes.CFUNCTYPE(ctypes.c_int32)((name, library))
