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

from ._export import StreamError, is_exported, no_export

if TYPE_CHECKING:
    from ._entries import Entry
    from ._stream import Streaming

#: Versions of PyTorch whose compiler was seen to leave what it is lent alone.
_SEEN = ((2, 11),)

#: By the number in a loan's key; which graphs hand on, and find nothing when it was unstreamed.
_loans: weakref.WeakValueDictionary[int, Loan] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def may_lend(torch: Any) -> bool:
    """Whether graphs of this PyTorch are lent weights."""
    return tuple(map(int, str(torch.__version__).split(".")[:2])) in _SEEN


class Loan:
    """Tensors that graphs are lent together, and what the operation for that is called with."""

    def __init__(
        self, torch: Any, streaming: Streaming, entries: list[Entry], owned: Callable[[], Any]
    ) -> None:
        self._entries, self._owned = entries, owned
        self.order, self.fault = streaming.order, fault_of(len(entries))
        number = next(_numbers)
        _loans[number] = self
        # Ordinary tensors wherever this is called.
        with torch.inference_mode(False):
            # By a tensor, whose number is nothing that a graph is compiled for: one serves all
            # layers.
            self.key = torch.tensor([number], dtype=torch.int64, device="cpu")
            self.weights = tuple(_described(torch, entry) for entry in entries)

    def lend(self) -> tuple[Any, ...]:
        """The tensors, for a graph: new ones, which have their pins for as long as they live.

        Raises:
            WeightOffloaded: they do not fit, and nothing is pinned.
        """
        pins = self._owned()
        lent = tuple(entry.lent.detach() for entry in self._entries)
        for tensor in lent:
            tensor._vbar_pins = pins
        return lent


def _described(torch: Any, entry: Entry) -> Any:
    """What says of which shape and type a tensor is that will be lent.

    A graph has it from before the fault, and whoever compiles, exports or debugs may look into it:
    so it is nothing that has an address of the bar, but one element on the host. A parameter, also
    for a buffer, since of those the shapes are what they are.
    """
    one = torch.empty((), dtype=entry.plain.dtype, device="cpu")
    return torch.nn.Parameter(one.expand(entry.shape), requires_grad=False)


@functools.lru_cache(maxsize=None)
def _library() -> Any:
    import torch

    # Kept for ever: when it goes, so do its operations.
    return torch.library.Library("vbar", "FRAGMENT")


@functools.lru_cache(maxsize=None)
def fault_of(count: int) -> Any:
    """The operation for units of so many tensors; the compiler wants to know how many are returned.

    ``(order, key, weights)``: the weights say of which shapes and types the results are, which are
    where ``order`` is.
    """
    import torch

    returns = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"

    def fault(order: Any, key: Any, weights: Any) -> Any:
        loan = _loans.get(int(key))
        if loan is None:
            raise StreamError("the module was unstreamed, and this graph was compiled before that")
        lent = loan.lend()
        return lent[0] if count == 1 else lent

    def described(order: Any, key: Any, weights: Any) -> Any:
        if is_exported():
            raise no_export()
        where = order.device
        made = tuple(torch.empty(each.shape, dtype=each.dtype, device=where) for each in weights)
        return made[0] if count == 1 else made

    return _define(
        f"fault_{count}", f"(Tensor(a!) order, Tensor key, Tensor[] weights) -> {returns}",
        fault, described,
    )


@functools.lru_cache(maxsize=None)
def used() -> Any:
    """The operation ``(order, results, weights)``: what comes behind it comes behind the results,
    and as long the weights live, also where a graph has views of them only.
    """

    def nothing(order: Any, results: Any, weights: Any) -> None:
        return None

    schema = "(Tensor(a!) order, Tensor[] results, Tensor[] weights) -> ()"
    return _define("used", schema, nothing, nothing)


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


def lender(torch: Any, loan: Loan, places: Any) -> Any:
    """What a traced forward begins with, goes on to when it has its result, and ends with.

    All of it is read by the compiler and becomes part of a graph. That the module's dictionaries
    are replaced is seen by the trace alone: when it is over they are those that they were.

    Args:
        loan: the module's.
        places: of each dictionary its module, the attribute that it is, itself, and of each name
            in there that is a streamed tensor which of the loan's it is.
    """
    fault, order, key, weights = loan.fault, loan.order, loan.key, loan.weights
    after, one, tensors_in = used(), len(weights) == 1, finder(torch)

    def begin() -> Any:
        lent = fault(order, key, weights)
        if one:
            lent = (lent,)
        for module, attribute, values, names in places:
            within = dict(values)
            for name, at in names:
                within[name] = lent[at]
            object.__setattr__(module, attribute, within)
        return lent

    def returned(result: Any, lent: Any) -> None:
        after(order, tensors_in(result), lent)

    def end() -> None:
        for module, attribute, values, _ in places:
            object.__setattr__(module, attribute, values)

    return begin, returned, end


def one_operation(torch: Any, kinds: list[Any]) -> Callable[..., Any]:
    """An operation that is traced, and has tensors that ask among its arguments: they are lent.

    Args:
        kinds: the two subclasses that such tensors are of.
    """
    after, tensors_in = used(), finder(torch)

    def borrow(value: Any, lent: list[Any], orders: list[Any]) -> Any:
        if isinstance(value, kinds[0]) or isinstance(value, kinds[1]):
            loan = value._vbar_entry.loan
            orders.append(loan.order)
            lent.append(loan.fault(loan.order, loan.key, loan.weights))
            return lent[-1]
        if isinstance(value, (tuple, list)):
            return type(value)([borrow(each, lent, orders) for each in value])
        return value

    def call(func: Any, args: Any, kwargs: Any) -> Any:
        lent: list[Any] = []
        orders: list[Any] = []
        args = [borrow(each, lent, orders) for each in args]
        kwargs = {name: borrow(each, lent, orders) for name, each in kwargs.items()}
        result = func(*args, **kwargs)
        after(orders[0], tensors_in(result), lent)
        return result

    return call


def finder(torch: Any) -> Callable[[Any], list[Any]]:
    """What finds the tensors in a result."""
    tensor_type = torch.Tensor

    def tensors_in(value: Any) -> list[Any]:
        if isinstance(value, tensor_type):
            return [value]
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (tuple, list)):
            return [tensor for each in value for tensor in tensors_in(each)]
        return []

    return tensors_in
