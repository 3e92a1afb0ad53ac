"""A ComfyUI that restarts itself comes back on vbar.

What restarts it, ComfyUI-Manager and nodes that do as it does, replaces the process by
``os.execv(sys.executable, [sys.executable, *sys.argv])``. That is the command line as the program
sees it, in which this package is not. So the exec of this process's own interpreter with its own
program gets ``-m vbar.comfy`` back; every other one is as it was.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, Callable, Sequence

logger = logging.getLogger("vbar.comfy")

_MODULE = ("-m", "vbar.comfy")
#: Options of the interpreter whose value is an argument of its own.
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")


def watch(program: str) -> None:
    """From now on a restart of ``program``, this process's own, is one through this package."""
    whole = os.path.abspath(program)

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def replace(path: Any, arguments: Sequence[Any], *environment: Any) -> Any:
            return function(path, through_us(whole, path, arguments), *environment)

        return replace

    # All others of the kind call these two by their names in the module.
    os.execv, os.execve = watched(os.execv), watched(os.execve)


def through_us(program: str, path: Any, arguments: Sequence[Any]) -> Sequence[Any]:
    """The arguments of an exec, with this package before ``program`` if it is a restart of it."""
    try:
        told = [os.fsdecode(argument) for argument in arguments]
        is_ours = _identity(os.fsdecode(path)) == _identity(sys.executable)
    except (TypeError, ValueError):
        # A descriptor, or what exec refuses itself.
        return arguments
    at = _first_of_the_program(told)
    if not is_ours or at is None:
        return arguments
    if os.path.abspath(told[at]) != program:
        return arguments
    told[at:at] = _MODULE
    logger.info("restarting on vbar: %s", " ".join(told))
    return told


def _identity(interpreter: str) -> tuple[str, str]:
    """A virtual environment's interpreter is a link to that of the system, which does not have its
    packages: where it lies tells them apart, what it is called does not.
    """
    return os.path.realpath(interpreter), os.path.realpath(os.path.dirname(interpreter))


def _first_of_the_program(arguments: list[str]) -> int | None:
    """Which argument of an interpreter is the path of a program, if one is."""
    at = 1
    while at < len(arguments) and arguments[at].startswith("-"):
        if arguments[at] in ("-", "--") or arguments[at][:2] in ("-m", "-c"):
            return None
        at += 2 if arguments[at] in _WITH_VALUE else 1
    return at if at < len(arguments) else None
