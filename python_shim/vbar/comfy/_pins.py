"""Pins of ranges that the client writes itself, on streams that the fault is not told of.

ComfyUI copies a weight on a stream of its own choice, some time after the fault, and orders that
stream behind the compute stream one turn late. So a range gets frames that nothing uses any more
(``STREAM_NONE``), never such as are handed on behind a fence. The unpin names the stream that
computes, which ComfyUI has ordered behind its copies by then.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .. import _abi, _interrupt, _library, _log
from .._call import raise_failure
from .._errors import StaleToken
from .._guard import Pins, fault_of
from .._values import Reason
from . import _devices

if TYPE_CHECKING:
    from .._bar import Bar

#: How long a fault waits for frames whose last users have a fence. Longer, and the weight is
#: offloaded this time.
PATIENCE = 1.0
_PAUSE = 0.0002


def pin(
    bar: Bar,
    offset: int,
    nbytes: int,
    index: int,
    patience: float = PATIENCE,
    written: bool = True,
) -> Pins:
    """Makes bytes resident and pins them: what has no token is offloaded, for its reason.

    Those that the client does not write are valid for the current stream, and need not be idle.

    Raises:
        vbar.Error: the fault failed.
    """
    stream = _devices.current_stream(index)
    handle = _abi.STREAM_NONE if written else stream
    if _devices.is_capturing():
        # What a graph uses is kept for it, which takes the stream that is being captured.
        handle, patience = stream, 0.0
    started = 0.0
    while True:
        pins = fault_of(bar._lib.vbar_bar_fault, bar._id, offset, nbytes, handle)
        is_pending = not pins.token and pins.reason == Reason.FENCE_PENDING and patience > 0
        now = time.monotonic() if is_pending or started else 0.0
        started = started or now
        if not is_pending or now >= started + patience:
            break
        time.sleep(_PAUSE)
    context = _devices.contexts.get(index)
    if started and context is not None:
        context.traffic.waited(now - started)
    if pins.token:
        pins.own(bar._lib.vbar_token_unpin, stream)
    return pins


def unpin(pins: Pins, stream: int) -> None:
    """Gives pins back behind the work on a stream.

    Raises:
        vbar.Error: the use is known to no fence; the pins are given back all the same.
    """
    if not pins.token:
        return
    try:
        status = _library.load().vbar_token_unpin(pins.token, stream)
        if status or _interrupt.stash:
            raise_failure(status)
        _log.deliver_if_due()
    except StaleToken:
        pass
    except BaseException:
        # It may not have come to the call; a second time is refused, and harmless.
        pins.release()
        raise
    pins.forget()
