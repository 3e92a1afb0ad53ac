"""Signals during a wait: Ctrl-C ends a call that waits, as people expect of Python.

Python runs signal handlers on the main thread only, between two of its instructions; while that
thread waits in the library there are none. So the library asks a check on that thread every few
milliseconds, the check lets Python run the handlers, and what they raise is kept here, ends the
wait, and is raised by the call.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import threading
from typing import Any, Iterator

from . import _abi, _library



def _in_main_interpreter() -> bool:
    """Whether signals are this interpreter's: a subinterpreter runs no handlers, and shares the
    thread's check with the main one, whose Ctrl-C it would take.
    """
    try:
        # A library of our own: of ``ctypes.pythonapi`` everybody may set the signatures.
        python = ctypes.PyDLL(None)
        here, main = python.PyInterpreterState_Get, python.PyInterpreterState_Main
    except AttributeError:
        # Not CPython, and no subinterpreters.
        return True
    here.restype = main.restype = ctypes.c_void_p
    here.argtypes = main.argtypes = []
    return bool(here() == main())


#: What handlers raised during a wait, until the call that waited raises it.
stash: list[BaseException] = []
#: Whether the main thread's waits do not ask yet, and should. Read before every call.
unarmed = _in_main_interpreter()

#: The check that the library has now: it must live for as long.
_check: Any = None


def arm() -> None:
    """Has the main thread's waits ask, if this is the main thread."""
    global unarmed, _check
    if threading.current_thread() is not threading.main_thread():
        return
    check = _new_check()
    address = ctypes.cast(check, ctypes.c_void_p)
    if _library.load().vbar_thread_set_wait_check(address, None) == 0:
        # The one before is asked no more: only this thread asks, and it is here.
        unarmed, _check = False, check


def take() -> BaseException | None:
    """What a handler raised during this thread's wait, once."""
    if not stash or threading.current_thread() is not threading.main_thread():
        return None
    error = stash.pop()
    # The check that it ended is over.
    arm()
    return error


def _new_check() -> Any:
    handlers = _handlers()
    next(handlers)
    # No Python function of its own: what a handler raised on that function's first instruction
    # would be outside any ``try`` that it could have. Of an iterator that has ended it says 1.
    return _abi.WaitCheck(functools.partial(next, handlers, 1))


def _handlers() -> Iterator[int]:
    """Each step resumes inside the ``try``, and pending signals are handled there first."""
    try:
        while True:
            yield 0
    except GeneratorExit:
        # Not a handler's: this check was replaced, whenever the garbage is collected.
        raise
    except BaseException as error:
        stash.append(error)


@atexit.register
def _disarm() -> None:
    """At its end Python is not asked any more."""
    global unarmed
    library = _library.loaded()
    # In a subinterpreter there never was one.
    if _check is not None and library is not None:
        unarmed = True
        library.vbar_thread_set_wait_check(None, None)
