"""A call of the library: what it returns becomes an exception, what it said is delivered."""

from __future__ import annotations

from typing import Any, Callable

from . import _interrupt, _library, _log
from ._errors import of_status


def call(function: Callable[..., int], *arguments: Any) -> None:
    """Calls, and raises what went wrong.

    Outputs are written only on success. The handler of a signal may raise all the same, so whoever
    gets something that must be given back looks at its output then.
    """
    if _interrupt.unarmed:
        _interrupt.arm()
    status = function(*arguments)
    if status or _interrupt.stash:
        raise_failure(status)
    _log.deliver()


def call_often(function: Callable[..., int], *arguments: Any) -> None:
    """As :func:`call`, for calls of which there are many."""
    if _interrupt.unarmed:
        _interrupt.arm()
    status = function(*arguments)
    if status or _interrupt.stash:
        raise_failure(status)
    _log.deliver_if_due()


def raise_failure(status: int) -> None:
    """Raises unless the call was good, and the interrupt is another thread's."""
    # First of all: the next failure on this thread replaces the message.
    error: BaseException | None = of_status(status, last_message()) if status else None
    error = _interrupt.take() or error
    try:
        _log.deliver()
        if error is not None:
            raise error
    finally:
        # Else the exception has this frame, which has the exception, and what the callers' frames
        # hold would stay until the next collection of garbage.
        del error


def last_message() -> str:
    """What the last call on this thread that failed said."""
    return text_of(_library.load().vbar_last_message())


def text_of(value: bytes) -> str:
    """A text of the library's."""
    return value.decode("utf-8", "replace")
