"""What a fault came to: pins that somebody holds, or the reason why not.

A guard owns one token of the library and gives it back once: at the end of its ``with`` block, by
:meth:`Guard.close`, or when it is dropped. Nothing here decides or waits.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, Callable, Literal, Sequence, TypeVar

from . import _abi, _interrupt, _library, _log
from ._call import call_often, raise_failure
from ._errors import GuardReleased
from ._owner import nothing
from ._streams import Stream, handle_of
from ._unshared import Unshared
from ._values import Reason

if TYPE_CHECKING:
    from types import TracebackType

    from ._dlpack import View
    from ._device import Device
    from ._model import Tensor

    #: Faults the guarded bytes once more, for a stream handle: its own token for who asks.
    FaultAgain = Callable[[int], Pins]

_NotResident = TypeVar("_NotResident", bound="NotResident")


#: Where a fault has its token.
_TOKEN_OFFSET = _abi.Fault.token.offset


class Pins(_abi.Fault):
    """What a fault came to, and the one owner of its token, from before the call on.

    A handler of a signal may raise right after the call, or anywhere else: whoever is left with
    this drops it then, and the pins go. To hand them over is to hand this over.
    """

    __slots__ = ("_end",)

    #: What keeps the stream alive, on which the token is given back when this is dropped.
    stream_owner: Any = None

    #: What ends it; not there until there is something to own, which Python passes over.
    _end: Callable[..., Any]

    def own(self, unpin: Callable[[int, int], int], stream: int) -> None:
        """Own the token, also one that is yet to come: it is given back on ``stream``."""
        # The token itself, read when it comes to that; a reference to this would be a cycle.
        token = _abi.Token.from_address(ctypes.addressof(self) + _TOKEN_OFFSET)
        self._end = functools.partial(unpin, token, stream)

    def release(self) -> None:
        """Give the token back if there is one, and say nothing."""
        self._end()
        # Only then is it gone: a second time is refused, and harmless.
        self.forget()

    def forget(self) -> None:
        """There is no token, or it is somebody else's."""
        self._end = nothing
        self.token = 0


# As of a handle: no function of Python.
Pins.__del__ = Pins._end  # type: ignore[attr-defined]


class Guard(Unshared):
    """Bytes that are resident, pinned, and valid for work on the guard's stream.

    Enqueue that work within the ``with`` block. When it ends the bytes stay until the work is
    done, and not longer than they must. The stream must live until then.
    """

    __slots__ = (
        "_pins",
        "_unpin",
        "_stream",
        "_stream_owner",
        "_device",
        "_again",
        "_writable",
        "address",
        "nbytes",
        "signature",
        "reason",
        "tensor",
        "__weakref__",
    )

    #: Device address of the first byte. It never changes, but is only backed while pinned.
    address: int
    #: Length in bytes.
    nbytes: int
    #: Equal to an earlier signature of the same bytes exactly when no page of them lost its bytes
    #: since. Never repeats in a process.
    signature: int
    #: ``NONE``, or ``HOST_MAPPED`` where pages of it are in the host's memory: the device reads
    #: those over the link. Only on a device that was opened with ``host_mapped=True``.
    reason: Reason
    #: What the model says of it, for a model's tensor.
    tensor: Tensor | None

    def __init__(
        self,
        device: Device,
        fault: Pins,
        stream: int,
        stream_owner: Any,
        again: FaultAgain,
        tensor: Tensor | None = None,
        writable: bool = False,
    ) -> None:
        self._pins: Pins | None = fault
        self._unpin = device._lib.vbar_token_unpin
        self._device = device
        self._stream = stream
        # A stream that its library destroys when it is dropped lives for as long as the guard.
        self._stream_owner = fault.stream_owner = stream_owner
        self._again = again
        self._writable = writable
        self.address = fault.address
        self.nbytes = fault.bytes
        self.signature = fault.signature
        self.reason = Reason(fault.reason)
        self.tensor = tensor

    def __bool__(self) -> Literal[True]:
        return True

    def __enter__(self) -> Guard:
        self._check_held()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Once, and this frame's from here on.
        pins, self._pins = self._pins, None
        if pins is None:
            return
        if not pins.token:
            return
        if kind is not None:
            # What the block raised says more.
            pins.release()
            return
        try:
            call_often(self._unpin, pins.token, self._stream)
        except BaseException:
            # It may not have come to the call.
            pins.release()
            raise
        pins.forget()

    @property
    def _token(self) -> int:
        pins = self._pins
        return 0 if pins is None else pins.token

    def __repr__(self) -> str:
        held = "pinned" if self._token else "released"
        return f"<vbar.{type(self).__name__} {self.nbytes} bytes at {self.address:#x}, {held}>"

    @property
    def stream(self) -> int:
        """The handle of the stream that the bytes are valid for."""
        return self._stream

    @property
    def is_held(self) -> bool:
        """Whether the pins are still held."""
        return self._token != 0

    def close(self) -> None:
        """Give the pins back. A second time does nothing.

        Raises:
            StaleToken: a forced end of run took them before: the bytes may have changed.
        """
        self.__exit__(None, None, None)

    def also_used_on(self, stream: Stream) -> None:
        """Remember that another stream uses the bytes too; call it after that work was enqueued.

        Raises:
            GuardReleased: the pins were given back.
            Unsupported: the stream is being captured, or is ``NO_STREAM``.
        """
        self._check_held()
        handle = handle_of(stream, self._device._torch_ordinal)
        call_often(self._device._lib.vbar_token_also_used_on, self._token, handle)

    def view(self, dtype: Any = None, shape: Sequence[int] | int | None = None) -> View:
        """The bytes as a tensor for other libraries, by DLPack or ``__cuda_array_interface__``.

        Args:
            dtype: a :class:`Dtype`, or a name or type of NumPy or torch. A model's tensor has one.
            shape: elements in each dimension, the slowest first. A model's tensor has one, which
                holds for every type of the same size; else all bytes in one dimension.

        Raises:
            GuardReleased: the pins were given back.
            InvalidArgument: no type, or one that the bytes do not fit.
        """
        from ._dlpack import View

        self._check_held()
        return View._of(self, dtype, shape)

    def _fault_again(self, stream: int) -> Pins:
        return self._again(stream)

    def _check_held(self) -> None:
        if not self._token:
            raise GuardReleased("the guard's pins were given back: fault again")


class Refill(Guard):
    """Pinned bytes of an allocation that are undefined: write them, then :meth:`commit`.

    Left without a commit, the next fault asks for a refill again.
    """

    __slots__ = ("is_committed", "_again_raw")

    #: Whether :meth:`commit` was called.
    is_committed: bool

    def __init__(
        self,
        device: Device,
        fault: Pins,
        stream: int,
        stream_owner: Any,
        again: FaultAgain,
        again_raw: FaultAgain,
    ) -> None:
        super().__init__(device, fault, stream, stream_owner, again, writable=True)
        self.is_committed = False
        self._again_raw = again_raw

    def __enter__(self) -> Refill:
        self._check_held()
        return self

    def commit(self, stream: Stream = None) -> None:
        """Declare that everything that writes the bytes was enqueued; the pins stay.

        Args:
            stream: where it was enqueued; ``None`` is the fault's stream, ``NO_STREAM`` says that
                the bytes are in place.

        Raises:
            GuardReleased: the pins were given back.
            InvalidArgument: it was committed before.
        """
        self._check_held()
        handle = self._stream
        if stream is not None:
            handle = handle_of(stream, self._device._torch_ordinal)
        call_often(self._device._lib.vbar_token_commit, self._token, handle)
        self.is_committed, self._writable = True, False

    def _fault_again(self, stream: int) -> Pins:
        # Until the commit the allocation is busy, as far as others are concerned.
        return self._again(stream) if self.is_committed else self._again_raw(stream)


class NotResident:
    """What a fault came to without pins: false, and a block that does nothing at its end."""

    __slots__ = ()

    def __bool__(self) -> Literal[False]:
        return False

    def __enter__(self: _NotResident) -> _NotResident:
        return self

    def __exit__(self, *_raised: object) -> None:
        pass


class Offloaded(NotResident):
    """The bytes are not resident, by decision: use the host's copy. Nothing is pinned. False."""

    __slots__ = ("reason", "needed_bytes")

    #: Why.
    reason: Reason
    #: Bytes of device frames that it needs, whole pages; with a budget of less it is too large.
    needed_bytes: int

    def __init__(self, reason: Reason, needed_bytes: int = 0) -> None:
        self.reason = reason
        self.needed_bytes = needed_bytes

    def __repr__(self) -> str:
        return f"<vbar.Offloaded: {self.reason}>"


class Busy(NotResident):
    """Another caller is filling the allocation. Nothing is pinned. False."""

    __slots__ = ()

    #: It is not offloaded.
    reason = Reason.NONE

    def __repr__(self) -> str:
        return "<vbar.Busy>"


def fault_of(function: Callable[..., int], *arguments: Any) -> Pins:
    """Calls a function of the library that faults; its last arguments are stream and result."""
    pins = Pins()
    pins.own(_library.load().vbar_token_unpin, arguments[-1])
    try:
        # As `call_often` does it: this is the one call that a layer makes all the time.
        if _interrupt.unarmed:
            _interrupt.arm()
        status = function(*arguments, pins)
        if status or _interrupt.stash:
            raise_failure(status)
        _log.deliver_if_due()
        if not pins.token:
            pins.forget()
    except BaseException:
        # A handler of a signal may have raised although the fault was good. Not at some later time:
        # what was raised has this frame.
        if pins.token:
            pins.release()
        else:
            pins.forget()
        raise
    return pins
