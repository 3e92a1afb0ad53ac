"""A thread that looks after page-locked copies while nobody uses weights.

Copies go at uses and at the ends of nodes (`_saved`), of which there are none once a prompt is
over. So while something is saved a thread looks each second, and ends when nothing is any more.
Where the device has no threads there is none here either: then it waits for the next use.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from ._devices import Context

logger = logging.getLogger("vbar.comfy")

#: Seconds between two looks.
EACH = 1.0

_lock = threading.Lock()
#: Devices that a thread looks after.
_looked_after: weakref.WeakSet[Context] = weakref.WeakSet()


def start(
    context: Context, is_needed: Callable[[Context], bool], look: Callable[[Context, float], None]
) -> None:
    """Has a thread look after a device as long as it is needed, unless one does so."""
    if not context.has_threads or context in _looked_after:
        return
    with _lock:
        if context in _looked_after:
            return
        _looked_after.add(context)
    told = weakref.ref(context), is_needed, look
    thread = threading.Thread(target=_run, args=told, name="vbar.comfy idle", daemon=True)
    try:
        thread.start()
    except BaseException as error:
        # The next save tries again.
        _looked_after.discard(context)
        if not isinstance(error, RuntimeError):
            raise
        logger.debug("nobody looks after %r: %s", context, error)


def _run(
    reference: weakref.ref[Context],
    is_needed: Callable[[Context], bool],
    look: Callable[[Context, float], None],
) -> None:
    while True:
        time.sleep(EACH)
        context = reference()
        if context is None:
            return
        with _lock:
            if not is_needed(context):
                # Whoever saves from now on starts another one.
                _looked_after.discard(context)
                return
        try:
            look(context, time.monotonic())
        except Exception as error:
            # Closed meanwhile, or lost: the next look finds nothing to do.
            logger.debug("%r was not looked after: %s", context, error)
        # Not while it waits.
        del context


def _forget() -> None:
    # A forked child has no threads.
    global _lock, _looked_after
    _lock, _looked_after = threading.Lock(), weakref.WeakSet()


os.register_at_fork(after_in_child=_forget)
