"""The library's messages, handed to :mod:`logging` as logger ``"vbar"``.

The library keeps messages and this package fetches them: after calls that failed or are rare, and
now and then after others. No callback is installed, so no thread of the library ever waits for
Python. What the logger does not want is not kept.
"""

from __future__ import annotations

import ctypes
import logging
import time

from . import _library, _memory

logger = logging.getLogger("vbar")
# What every library does: without a configuration of the program its messages go nowhere.
logger.addHandler(logging.NullHandler())

#: Python's level of a library's level.
_LEVELS = {
    1: logging.ERROR,
    2: logging.WARNING,
    3: logging.INFO,
    4: logging.DEBUG,
    5: logging.DEBUG - 5,
}
_ROOM = 4096
_SECONDS_BETWEEN = 0.5

_level = -1
_due = 0.0


def deliver_if_due() -> None:
    """Delivers unless that was done just now: for calls of which there are many."""
    if time.monotonic() >= _due:
        deliver()


def deliver() -> None:
    """Hands the messages that the library has to the logger ``"vbar"``, and lets go of memory that
    it does not read any more. Thread-safe.
    """
    global _due
    _due = time.monotonic() + _SECONDS_BETWEEN
    _memory.let_go()
    library = _library.load()
    _follow_level(library)
    text = ctypes.create_string_buffer(_ROOM)
    level, length = ctypes.c_uint32(), ctypes.c_size_t()
    while library.vbar_log_poll(text, _ROOM, level, length) == 0 and level.value:
        said = text.value.decode("utf-8", "replace")
        logger.log(_LEVELS.get(level.value, logging.INFO), "%s", said)


def _follow_level(library: ctypes.CDLL) -> None:
    """Has the library keep what the logger wants now."""
    global _level
    wanted = logger.getEffectiveLevel()
    level = max((ours for ours, theirs in _LEVELS.items() if theirs >= wanted), default=0)
    if level != _level and library.vbar_log_set_level(level) == 0:
        _level = level
