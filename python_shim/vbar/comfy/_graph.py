"""``MallocGraph``: scopes that newer clients put around work whose allocations repeat.

vbar's allocator gives a step that allocates as the one before did the same addresses already, and
maps nothing for it. So a scope is kept and counted, and nothing is recorded: it never breaks, and a
use that makes no sense ends the graph quietly, after which it is one that does nothing.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("vbar.comfy")


class MallocGraph:
    """See the module's text. Clients set attributes of their own on it.

    Args:
        stream: the stream whose allocations the scopes are about.
        assert_breaks: whether a scope that breaks raises instead.
    """

    def __init__(self, stream: Any, assert_breaks: bool = False) -> None:
        self._stream = stream
        self._assert_breaks = assert_breaks
        self._scopes: list[Any] = []
        self._paused = 0
        self._ended = False

    def push(self, name: Any = None) -> None:
        """Begins a scope within the one that is open."""
        if not self._ended:
            self._scopes.append(name)

    def pop(self) -> bool:
        """Ends the innermost scope; whether it was broken.

        Raises:
            RuntimeError: it was, and that was to raise.
        """
        if self._ended:
            return False
        if not self._scopes:
            return self._break("a scope was ended that was not begun")
        self._scopes.pop()
        return False

    def iterate(self, name: Any = None) -> bool:
        """Ends an iteration of the innermost scope and begins the next; whether it was broken.

        Raises:
            RuntimeError: as for :meth:`pop`.
        """
        if self._ended:
            return False
        if not self._scopes:
            return self._break("an iteration outside a scope")
        self._scopes[-1] = name
        return False

    def abort(self) -> None:
        """Ends all scopes."""
        self._scopes.clear()
        self._paused = 0
        self._ended = True

    def pause(self, sync: Any = False) -> None:
        """Begins a part whose allocations belong to no scope."""
        self._paused += 1

    def resume(self, sync: Any = False) -> None:
        """Ends such a part."""
        self._paused = max(self._paused - 1, 0)

    def use_stream(self, ctx: Any) -> Any:
        """Takes another stream for the scopes from now on."""
        self._stream = ctx
        return ctx

    @property
    def peak_used(self) -> int:
        """Bytes at the peak of a scope: none are recorded."""
        return 0

    @property
    def virtual_bytes(self) -> int:
        """Bytes of addresses that the graph has of its own."""
        return 0

    @property
    def physical_bytes(self) -> int:
        """Bytes of memory that the graph has of its own."""
        return 0

    @property
    def rogue_count(self) -> int:
        """Allocations that outlived their scope: none are looked for."""
        return 0

    def _break(self, why: str) -> bool:
        self.abort()
        if self._assert_breaks:
            raise RuntimeError(f"aimdo memory compile error: {why}")
        logger.warning("%s: allocations are ordinary from here on", why)
        return True


def record(stream: Any, assert_breaks: bool = False) -> MallocGraph:
    """A graph of scopes, of a stream's allocations."""
    return MallocGraph(stream, assert_breaks)
