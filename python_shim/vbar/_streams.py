"""Streams of other libraries, as the number that their handle is."""

from __future__ import annotations

import operator
import sys
from typing import TYPE_CHECKING, Any, Optional, Protocol, SupportsIndex, Union

from . import _abi
from ._errors import InvalidArgument

#: No stream, a promise instead: the work that the call speaks of has finished, or, of a fault, the
#: call is to wait until the bytes are there.
NO_STREAM = _abi.STREAM_NONE


class _CudaStream(Protocol):
    """The protocol of CUDA Python, which its version and the handle are told by."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class _TorchStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...


class _CupyStream(Protocol):
    @property
    def ptr(self) -> int: ...


if TYPE_CHECKING:
    #: A ``CUstream`` as a number (0 to 2 are CUDA's default streams), a stream of torch, CuPy or
    #: CUDA Python, :data:`NO_STREAM`, or ``None`` for torch's current stream where torch is in
    #: use, else CUDA's default stream.
    Stream = Optional[Union[SupportsIndex, _CudaStream, _TorchStream, _CupyStream]]
else:
    Stream = Any


def handle_of(stream: Stream, torch_ordinal: int | None) -> int:
    """The handle of a stream. ``torch_ordinal`` is the device whose current stream torch is asked
    for; ``None`` does not ask torch.

    Raises:
        InvalidArgument: it is no stream.
    """
    if type(stream) is int and 0 <= stream <= _abi.STREAM_NONE:
        return stream
    if stream is None:
        return 0 if torch_ordinal is None else _torch_current(torch_ordinal)
    handle: Any = stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return _handle_of_protocol(stream, protocol() if callable(protocol) else protocol)
    elif hasattr(stream, "cuda_stream"):
        handle = stream.cuda_stream
    elif hasattr(stream, "ptr"):
        handle = stream.ptr
    try:
        number = operator.index(handle)
    except TypeError:
        raise InvalidArgument(f"{_short(stream)} is no stream") from None
    if isinstance(stream, bool) or not 0 <= number <= _abi.STREAM_NONE:
        raise InvalidArgument(f"{_short(stream)} is no stream")
    return number


def _handle_of_protocol(stream: Any, told: Any) -> int:
    """The handle in what ``__cuda_stream__`` said: the version of its protocol, 0, and that."""
    wrong = ""
    if not isinstance(told, (tuple, list)) or len(told) != 2:
        wrong = "a pair of version and handle is expected"
    elif not all(hasattr(number, "__index__") for number in told) or isinstance(told[1], bool):
        wrong = "two whole numbers are expected"
    elif operator.index(told[0]) != 0:
        wrong = "version 0 of the protocol is what is known"
    elif not 0 <= operator.index(told[1]) <= _abi.STREAM_NONE:
        wrong = "a handle has 64 bits and no sign"
    if wrong:
        name = type(stream).__name__
        raise InvalidArgument(
            f"the {name} is no stream: its __cuda_stream__ gave {_short(told)}, {wrong}"
        )
    return operator.index(told[1])


def _short(told: Any) -> str:
    """What it is, in a line: it may be anything, also a number of more digits than are printed."""
    try:
        text = repr(told)
    except Exception:
        return f"a {type(told).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _torch_current(ordinal: int) -> int:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)
    # Until torch uses CUDA its current stream is the default one; asking would start it. While
    # another thread still imports torch, it has neither.
    if cuda is None or is_initialized is None or not is_initialized():
        return 0
    return int(cuda.current_stream(ordinal).cuda_stream)
