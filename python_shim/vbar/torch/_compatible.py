"""What in PyTorch asks its own allocator, past every hook, and how it is kept from that.

``cudnn.benchmark`` looks for the largest free block, and raises with any other allocator in the
middle of a model. So do the compiler's CUDA graphs (:mod:`vbar.torch._cuda_graphs`). NCCL wants to
share with the other processes what a captured graph gives it; our frames cannot be shared, so that
it would only try.
"""

from __future__ import annotations

import os
import warnings
from typing import Any, Callable

from ._cuda_graphs import keep_graphs_out

_BENCHMARK = (
    "torch.backends.cudnn.benchmark stays False: cuDNN's search asks PyTorch's own allocator for "
    "its largest free block, and vbar is the allocator"
)


def install(torch: Any) -> None:
    """Once, after vbar became the allocator."""
    _keep_benchmark_off(torch)
    keep_graphs_out(torch, of_all=True)
    # NCCL reads it when its first communicator is made. Who set it knows why.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def _keep_benchmark_off(torch: Any) -> None:
    set_benchmark: Callable[[bool], None] | None
    set_benchmark = getattr(torch._C, "_set_cudnn_benchmark", None)
    if set_benchmark is None:
        return
    native: Callable[[bool], None] = set_benchmark

    def refuse(on: bool) -> None:
        if on:
            warnings.warn(_BENCHMARK, RuntimeWarning, stacklevel=3)
        native(False)

    if torch._C._get_cudnn_benchmark():
        refuse(True)
    # Both ways there: `flags(benchmark=True)` looks it up when it is called, the attribute has
    # what was there when torch was imported.
    torch._C._set_cudnn_benchmark = refuse
    attribute = vars(type(torch.backends.cudnn)).get("benchmark")
    if hasattr(attribute, "setter") and not isinstance(attribute, property):
        attribute.setter = refuse  # type: ignore[union-attr]
