"""Code of ``torch.compile`` that runs without the CUDA graphs which its mode asks for.

``mode="reduce-overhead"`` captures what was compiled, and replays it. Trees of such graphs need
checkpoints of PyTorch's own allocator. Without trees (``cudagraph_trees = False``) PyTorch's code
is for whoever knows it: what a call returned is overwritten by the next, what it writes into its
inputs is lost, and modules that share code fail, or read the weights of the first.

Of a streamed module a graph would have the addresses of its weights and know of no fault, or be
lent them, and copy each of them into memory of its own; and while PyTorch warms it up, on a stream
of its own, the loan would end on another one.

So both are compiled as in the default mode, and a warning says so.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import types
import warnings
from typing import Any

_SWITCH = "triton.cudagraphs"
_INSTALLED = (
    "torch.compile runs this without the CUDA graphs that its mode asks for: they need PyTorch's "
    "own allocator, and vbar is the allocator. Compile in the default mode, or with "
    'mode="max-autotune-no-cudagraphs", and this is not said'
)
_STREAMED = (
    "torch.compile runs what uses a streamed module's weights without the CUDA graphs that its "
    "mode asks for: those know nothing of faults. Compile in the default mode, or with "
    'mode="max-autotune-no-cudagraphs", and this is not said'
)

_lock = threading.Lock()
#: Whether all code is kept from it, rather than what uses streamed weights.
_all = [False]


def keep_graphs_out(torch: Any, of_all: bool = False) -> None:
    """From now on, of what is compiled; once is enough.

    Args:
        of_all: of everything, rather than of what uses the weights of streamed modules.
    """
    wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
    with _lock:
        _all[0] = _all[0] or of_all
        # A class of a build without a compiler is none that compiles.
        if wrapper is None or hasattr(wrapper.__call__, "asks_vbar"):
            return
        compiled = wrapper.__call__

        # Its settings hold for one compilation, whatever the global ones are.
        @functools.wraps(compiled)
        def without_graphs(self: Any, model: Any, *inputs: Any, **named: Any) -> Any:
            why = _why_not(model) if _wants_graphs(self.config) else None
            if why is not None:
                warnings.warn(why, RuntimeWarning, stacklevel=2)
                self = copy.copy(self)
                self.config = {**self.config, _SWITCH: False}
            return compiled(self, model, *inputs, **named)

        without_graphs.asks_vbar = True  # type: ignore[attr-defined]
        wrapper.__call__ = without_graphs


def _wants_graphs(settings: dict[str, Any]) -> bool:
    if _SWITCH in settings:
        return bool(settings[_SWITCH])
    import torch._inductor.config as config

    return bool(config.triton.cudagraphs)


def _why_not(model: Any) -> str | None:
    if _all[0]:
        return _INSTALLED
    return _STREAMED if _is_lent_weights(model) or _is_within_a_forward() else None


def _is_lent_weights(model: Any) -> bool:
    """Whether a graph has operations of :mod:`vbar.torch._compiled`."""
    graphs = (part.graph for part in model.modules() if hasattr(part, "graph"))
    nodes = (node for graph in graphs for node in graph.nodes)
    return any(getattr(node.target, "namespace", None) == "vbar" for node in nodes)


def _is_within_a_forward() -> bool:
    """Whether it is a streamed forward that runs, and what it calls is compiled now.

    By the stack, so that a forward that is compiled already has nothing to do for this.
    """
    units = f"{__package__}._units"
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "streamed_forward" and frame.f_globals["__name__"] == units:
            return True
        frame = frame.f_back
    return False
