"""A module that is built with no memory: its parameters are on ``meta``, its buffers are real.

``torch.device("meta")`` as a context would empty the buffers too, and those that a constructor
computes are in no file. So parameters are emptied one by one when a module takes them: what
``torch.empty`` gave them was never touched, and what initialises them afterwards works on ``meta``.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any, Iterator

#: Of each thread, the parameters that were emptied in its block, by the id of what they were.
_local = threading.local()
_lock = threading.Lock()
#: How many blocks there are, and what ``register_parameter`` was before the first of them.
_open: list[Any] = [0, None]


@contextlib.contextmanager
def empty_model() -> Iterator[None]:
    """A block in which modules are built without memory for their parameters::

        with vbar.torch.empty_model():
            model = Model(config)
        vbar.torch.stream(model, "model.safetensors")

    Parameters end on ``torch.device("meta")``, with their shape, type and ``requires_grad``; one
    that two modules share stays one. Buffers are computed as ever, in ordinary memory, so nothing
    is lost of those that are in no file. A parameter that is made of numbers (``torch.randn``)
    rather than by ``torch.empty``, as PyTorch's own layers do it, has memory until its module takes
    it. Only for what this thread builds; blocks may be nested.
    """
    import torch

    _enter(torch)
    outer = getattr(_local, "emptied", None)
    _local.emptied = {} if outer is None else outer
    try:
        yield
    finally:
        _local.emptied = outer
        _leave(torch)


def _enter(torch: Any) -> None:
    with _lock:
        _open[0] += 1
        if _open[0] > 1:
            return
        _open[1] = original = torch.nn.Module.register_parameter

        def register_parameter(self: Any, name: str, param: Any) -> None:
            emptied = getattr(_local, "emptied", None)
            if emptied is not None and param is not None:
                param = _emptied(torch, emptied, param)
            original(self, name, param)

        torch.nn.Module.register_parameter = register_parameter


def _leave(torch: Any) -> None:
    with _lock:
        _open[0] -= 1
        if not _open[0]:
            torch.nn.Module.register_parameter = _open[1]


def _emptied(torch: Any, emptied: dict[int, Any], param: Any) -> Any:
    if not isinstance(param, torch.nn.Parameter) or param.device.type == "meta":
        # What is no parameter is refused by PyTorch itself.
        return param
    known = emptied.get(id(param))
    # An id is another's once its owner is gone.
    if known is None or known[0]() is not param:
        empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
        made = torch.nn.Parameter(empty, requires_grad=param.requires_grad)
        known = emptied[id(param)] = weakref.ref(param), made
    return known[1]
