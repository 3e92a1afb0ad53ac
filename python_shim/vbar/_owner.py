"""Owners of what the library gives out: made before it does, and closing it in C alone.

A handler of a signal may raise between any two instructions of Python: when a call has given
something out and nobody has stored it yet, and in a ``__del__`` before its first line. So the output
of such a call is an owner itself, and its ``__del__`` is no function of Python: it is a slot, and
what is in that slot is called, which goes from Python's deallocation to the library in C.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Callable

from . import _abi
from ._call import call

#: Called in place of a function of the library when nothing is owned (any more).
nothing: Callable[..., Any] = int


class Handle(ctypes.c_uint64):
    """A handle of the library, as the output of the call that makes it; 0 until then."""

    __slots__ = ("_closing", "_end")

    def __init__(self, closing: Callable[..., int]) -> None:
        #: Called with the handle's number; a partial one is C as well.
        self._closing = closing
        # The number itself, read when it comes to that; a reference to this would be a cycle.
        number = _abi.Handle.from_address(ctypes.addressof(self))
        self._end: Callable[..., Any] = functools.partial(closing, number)

    def close(self, closing: Callable[..., int] | None = None) -> None:
        """Close, by another function if one is given, and raise what went wrong."""
        try:
            call(closing or self._closing, self.value)
        except BaseException:
            # It may not have come to the call; what was closed is refused a second time.
            self.release()
            raise
        self._end = nothing

    def release(self) -> None:
        """Close, and say nothing."""
        self._end()
        self._end = nothing


# As of an instance, whose slot it is: a bound method would be Python.
Handle.__del__ = Handle._end  # type: ignore[attr-defined]


class Owned:
    """The one owner's handle, which only one of those that want to close it gets."""

    __slots__ = ("_handles",)

    def __init__(self, closing: Callable[..., int]) -> None:
        self._handles = [Handle(closing)]

    def __bool__(self) -> bool:
        return bool(self._handles)

    def open(self, function: Callable[..., int], *arguments: Any) -> int:
        """Calls what makes it, its output the last argument; the handle's number."""
        handle = self._handles[0]
        try:
            call(function, *arguments, handle)
        except BaseException:
            # Not at some later time: what is raised has this frame.
            self.release()
            raise
        return int(handle.value)

    def close(self, closing: Callable[..., int] | None = None) -> None:
        """Close, and raise what went wrong. A second time does nothing."""
        for handle in self._take():
            handle.close(closing)

    def release(self) -> None:
        """Close, and say nothing."""
        for handle in self._take():
            handle.release()

    def _take(self) -> list[Handle]:
        try:
            return [self._handles.pop()]
        except IndexError:
            return []
