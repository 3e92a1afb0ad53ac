"""A module's forward within a graph of ``torch.compile``.

There the block around a ``forward`` is no block: the graph has an operation ``vbar::fault_N`` that
returns the unit's N tensors, and its kernels read those. To the compiler they are new tensors, so
nothing can be read before it was faulted, and each of them dies behind the last kernel that reads
it, wherever the compiler has moved that one; and it dies as well when an exception or Ctrl-C ends
the graph in the middle. Who they share their pins with is them alone: the pins end with the last.

Every such operation writes ``order``, as far as the compiler knows: a tensor that nobody reads. So
they stay in their order, and so does ``vbar::used``, which takes what a forward returned and does
nothing: the next fault comes behind the work of the one before, and a graph needs no more memory
than eager forwards do. An operation that writes one of its inputs might as well have returned it,
therefore the compiler does not take the memory of what these return for other things.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import TYPE_CHECKING, Any, Callable

from ._parameters import StreamError

if TYPE_CHECKING:
    from ._units import Unit

#: By the number in a unit's key; which graphs hand on, and find nothing when it was unstreamed.
_units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def number(unit: Unit) -> int:
    """The number that a graph knows a unit by. Never repeats in a process."""
    given = next(_numbers)
    _units[given] = unit
    return given


@functools.lru_cache(maxsize=None)
def _library() -> Any:
    import torch

    # Kept for ever: when it goes, so do its operations.
    return torch.library.Library("vbar", "FRAGMENT")


@functools.lru_cache(maxsize=None)
def fault_of(count: int) -> Any:
    """The operation for units of so many tensors; the compiler wants to know how many are returned.

    ``(order, key, weights)``: the weights say of which shapes and types the results are.
    """
    import torch

    returns = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"

    def fault(order: Any, key: Any, weights: Any) -> Any:
        unit = _units.get(int(key))
        if unit is None:
            raise StreamError("the module was unstreamed, and this graph was compiled before that")
        lent = unit.lend()
        return lent[0] if count == 1 else lent

    def described(order: Any, key: Any, weights: Any) -> Any:
        made = tuple(map(torch.empty_like, weights))
        return made[0] if count == 1 else made

    return _define(
        f"fault_{count}", f"(Tensor(a!) order, Tensor key, Tensor[] weights) -> {returns}",
        fault, described,
    )


@functools.lru_cache(maxsize=None)
def used() -> Any:
    """The operation ``(order, results)``: what comes behind it comes behind those."""

    def nothing(order: Any, results: Any) -> None:
        return None

    return _define("used", "(Tensor(a!) order, Tensor[] results) -> ()", nothing, nothing)


def _define(name: str, schema: str, kernel: Callable[..., Any], described: Any) -> Any:
    import torch

    library = _library()
    # Results in any layout; and no part of a CUDA graph, which would replay them without a fault.
    tags = [torch.Tag.flexible_layout] if name == "used" else []
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    library.define(name + schema, tags=(*tags, unsafe) if unsafe is not None else tuple(tags))
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"vbar::{name}", described, lib=library)
    return getattr(torch.ops.vbar, name).default


def lender(torch: Any, places: Any, order: Any, key: Any, weights: tuple[Any, ...]) -> Any:
    """What a traced forward begins with, goes on to when it has its result, and ends with.

    All of it is read by the compiler and becomes part of a graph. That the module's dictionaries
    are replaced is seen by the trace alone: when it is over they are those that they were.

    Args:
        places: of each dictionary its module, the attribute that it is, itself, and of each name
            in there that is a streamed tensor which of the weights it is.
    """
    fault, after, one = fault_of(len(weights)), used(), len(weights) == 1
    tensor_type = torch.Tensor

    def begin() -> None:
        lent = fault(order, key, weights)
        if one:
            lent = (lent,)
        for module, attribute, values, names in places:
            within = dict(values)
            for name, at in names:
                within[name] = lent[at]
            object.__setattr__(module, attribute, within)

    def returned(result: Any) -> None:
        after(order, tensors_in(result))

    def end() -> None:
        for module, attribute, values, _ in places:
            object.__setattr__(module, attribute, values)

    def tensors_in(value: Any) -> list[Any]:
        if isinstance(value, tensor_type):
            return [value]
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (tuple, list)):
            return [tensor for each in value for tensor in tensors_in(each)]
        return []

    return begin, returned, end
