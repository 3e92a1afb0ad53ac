"""``MallocGraph``: scopes that newer clients put around work whose allocations repeat.

A graph is one of the native library's, of vbar's own allocator: what a pass of a scope allocates on
the graph's stream and thread has the addresses that it had in the pass before, and maps nothing.
Where PyTorch allocates by itself there is nothing to do it with: the graph does nothing then, and
counts 0.

A client that did not ask for it sees no exception of a graph. What makes no sense, or fails, ends
the graph's scopes, what is allocated is ordinary until the client has ended its own, and each of
these is told as broken.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import sys
from typing import Any

from .. import _abi_torch
from .._call import call
from .._errors import Error
from .._streams import handle_of

logger = logging.getLogger("vbar.comfy")

#: That graphs do nothing was said.
_said: list[bool] = []


class MallocGraph:
    """See the module's text. Clients set attributes of their own on it.

    Args:
        stream: the stream whose allocations the scopes are about.
        assert_breaks: whether a scope that breaks, and what fails, raises ``RuntimeError``.
    """

    _native: _abi_torch.TorchGraph | None = None

    def __init__(self, stream: Any, assert_breaks: bool = False) -> None:
        self._assert_breaks = assert_breaks
        #: Of the scopes that the client has open, the innermost last.
        self._names: list[int] = []
        self._pauses = 0
        #: The client's scopes are none of the native graph's, until all are ended.
        self._fallen = False
        self._library = _abi_torch.library() if _is_in_use() else None
        if self._library is None:
            return
        made = _abi_torch.TorchGraph()
        try:
            ordinal = _ordinal_of(stream)
            handle = handle_of(_stream_in(stream), ordinal)
            call(self._library.vbar_torch_graph_create, ordinal, handle, made)
        except Error as error:
            self._fall(str(error))
        finally:
            # Also where an interrupt came when it was made.
            self._native = made if made.id else None

    def __del__(self) -> None:
        # At the interpreter's exit, too: nothing here looks a name up that may be gone.
        native, self._native = self._native, None
        if native is not None and self._library is not None:
            self._library.vbar_torch_graph_destroy(native)

    def push(self, name: Any = None) -> None:
        """Begins a scope within the one that is open.

        Raises:
            RuntimeError: it could not be begun, and that was to raise. No scope is open for it.
        """
        self._names.append(_number_of(name))
        if not self._is_on():
            return
        try:
            self._step(_abi_torch.GRAPH_STEP_ENTER, self._names[-1])
            if len(self._names) == 1:
                # It began within a pause.
                for _ in range(self._pauses):
                    self._step(_abi_torch.GRAPH_STEP_PAUSE)
        except Error as error:
            if self._assert_breaks:
                self._names.pop()
            self._fall(str(error))

    def pop(self) -> bool:
        """Ends the innermost scope; whether it was broken: it went another way than before.

        Raises:
            RuntimeError: it was, and that was to raise.
        """
        if not self._names:
            return self._fall("a scope was ended that was not begun")
        is_on = self._is_on()
        self._names.pop()
        try:
            return self._ended(is_on, _abi_torch.GRAPH_STEP_LEAVE, 0)
        finally:
            self._fallen &= bool(self._names)

    def iterate(self, name: Any = None) -> bool:
        """Ends an iteration of the innermost scope and begins the next, which is compared with
        those of its name; without one, of the same. Whether the one that ended was broken.

        Raises:
            RuntimeError: as for :meth:`pop`.
        """
        if not self._names:
            return self._fall("an iteration outside a scope")
        if name is not None:
            self._names[-1] = _number_of(name)
        return self._ended(self._is_on(), _abi_torch.GRAPH_STEP_NEXT, self._names[-1])

    def abort(self) -> None:
        """Ends all scopes, from any thread. What was allocated lives on."""
        self._names.clear()
        self._pauses, self._fallen = 0, False
        self._abort()

    def pause(self, sync: Any = False) -> None:
        """Begins a part whose allocations are ordinary, and belong to no scope.

        ``sync`` is taken and not needed: the allocator sees captures by itself.
        """
        self._pauses += 1
        self._change_pause(_abi_torch.GRAPH_STEP_PAUSE)

    def resume(self, sync: Any = False) -> None:
        """Ends such a part; where there is none, nothing."""
        if self._pauses:
            self._pauses -= 1
            self._change_pause(_abi_torch.GRAPH_STEP_RESUME)

    def use_stream(self, ctx: Any) -> Any:
        """Takes another stream for the scopes from now on; gives back what it was given.

        Raises:
            RuntimeError: it cannot be taken, and what fails was to raise.
        """
        if self._library is not None and self._native is not None:
            try:
                handle = handle_of(_stream_in(ctx), _ordinal_of(ctx))
                call(self._library.vbar_torch_graph_use_stream, self._native, handle)
            except Error as error:
                self._fall(str(error))
        return ctx

    @property
    def peak_used(self) -> int:
        """The most bytes that were live at a time."""
        return int(self._statistics().peak_used_bytes)

    @property
    def virtual_bytes(self) -> int:
        """Bytes of addresses that the graph has of its own."""
        return int(self._statistics().pool_bytes)

    @property
    def physical_bytes(self) -> int:
        """Bytes of memory behind them: as many, they come and go together."""
        return int(self._statistics().pool_bytes)

    @property
    def rogue_count(self) -> int:
        """Live allocations whose scope has ended."""
        return int(self._statistics().rogue_count)

    def _is_on(self) -> bool:
        return self._native is not None and not self._fallen

    def _step(self, step: int, name: int = 0) -> bool:
        assert self._library is not None
        broken = ctypes.c_uint32()
        call(self._library.vbar_torch_graph_step, self._native, step, name, broken)
        return bool(broken.value)

    def _ended(self, is_on: bool, step: int, name: int) -> bool:
        """A pass ends: whether it was broken."""
        if not is_on:
            return self._fallen
        try:
            broken = self._step(step, name)
        except Error as error:
            return self._fall(str(error))
        if broken and self._assert_breaks:
            raise _failure("a scope went another way than before")
        return broken

    def _change_pause(self, step: int) -> None:
        if self._names and self._is_on():
            try:
                self._step(step)
            except Error as error:
                self._fall(str(error))

    def _abort(self) -> None:
        if self._native is not None:
            try:
                self._step(_abi_torch.GRAPH_STEP_ABORT)
            except Error as error:
                logger.debug("the end of a memory graph's scopes: %s", error)

    def _fall(self, why: str) -> bool:
        """What is allocated is ordinary until the client's scopes are ended."""
        self._abort()
        self._fallen = bool(self._names)
        if self._assert_breaks:
            raise _failure(why)
        logger.warning("a memory graph: %s; allocations are ordinary from here on", why)
        return True

    def _statistics(self) -> _abi_torch.TorchGraphStatistics:
        told = _abi_torch.TorchGraphStatistics(ctypes.sizeof(_abi_torch.TorchGraphStatistics))
        if self._library is not None and self._native is not None:
            try:
                call(self._library.vbar_torch_graph_statistics, self._native, told)
            except Error as error:
                logger.debug("what a memory graph has: %s", error)
        return told


def record(stream: Any, assert_breaks: bool = False) -> MallocGraph:
    """A graph of scopes, of a stream's allocations."""
    return MallocGraph(stream, assert_breaks)


def _is_in_use() -> bool:
    """Whether PyTorch allocates here; that it does not is said once."""
    from ..torch import is_installed

    if is_installed():
        return True
    if not _said:
        _said.append(True)
        logger.info("PyTorch allocates by itself: scopes of memory graphs do nothing")
    return False


def _failure(why: str) -> RuntimeError:
    return RuntimeError(f"aimdo memory compile error: {why}")


def _stream_in(given: Any) -> Any:
    """The stream of what a client gives: itself, or the stream of a context of torch's."""
    is_stream = hasattr(given, "cuda_stream") or not hasattr(given, "stream")
    return given if is_stream else given.stream


def _ordinal_of(given: Any) -> int:
    """The device of a stream; of a number it is not known, and torch's current one."""
    index = getattr(getattr(_stream_in(given), "device", None), "index", None)
    if isinstance(index, int):
        return index
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return int(cuda.current_device()) if cuda is not None and cuda.is_initialized() else 0


def _number_of(name: Any) -> int:
    """A name as the library has it. Two that happened to have one number would be compared with
    each other, and differ.
    """
    text = name if isinstance(name, str) else repr(name)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
