"""What would keep a streamed module's weights beyond a forward, and how it is found out.

``torch.export`` and ``torch.jit.trace`` make programs that have the weights within them, which then
read them with nobody to fault. Export looks at the modules of what it is given before anything
else, so there it is refused, whichever way it traces.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any, Callable

from .._errors import Error

_MODULES = "named_modules"


class StreamError(Error, RuntimeError):
    """A streamed module cannot do that, or not now; the text says why, and what to do."""


def no_export() -> StreamError:
    """What is said to ``torch.export``."""
    return StreamError(
        "a streamed module is not exported: what torch.export makes has its weights within it. "
        "Compile it by torch.compile, or export an ordinary one"
    )


def no_trace() -> StreamError:
    """What is said to ``torch.jit.trace``, and to who uses it, as ``torch.onnx`` may."""
    return StreamError(
        "a streamed module is not traced: what torch.jit.trace makes has its weights within it. "
        "Compile it by torch.compile, or trace an ordinary one"
    )


def is_exported() -> bool:
    """Whether it is torch.export that asks: while it traces it says so nowhere but in the stack."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(("torch.export", "torch._export")):
            return True
        frame = frame.f_back
    return False


def keep_from_export(module: Any) -> None:
    """Puts a check before what export asks first: which modules there are, this one among them."""
    attributes = module.__dict__
    if _MODULES not in attributes:
        attributes[_MODULES] = _checked(module.named_modules)


def let_export(module: Any) -> None:
    """Takes it away."""
    if hasattr(module.__dict__.get(_MODULES), "checks_for_vbar"):
        del module.__dict__[_MODULES]


def _checked(named_modules: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    is_traced = torch.compiler.is_dynamo_compiling

    @functools.wraps(named_modules)
    def checked(*args: Any, **kwargs: Any) -> Any:
        # Forwards may call it, and the compiler cannot read what looks at the stack.
        if not is_traced() and is_exported():
            raise no_export()
        return named_modules(*args, **kwargs)

    checked.checks_for_vbar = True  # type: ignore[attr-defined]
    return checked
