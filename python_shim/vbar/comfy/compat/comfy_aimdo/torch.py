"""Tensors over addresses, and PyTorch's object for vbar's functions."""

from __future__ import annotations

from typing import Any

from vbar.comfy import _devices
from vbar.comfy._tensors import (
    CUDAPluggableAllocator,
    aimdo_to_tensor,
    get_tensor_from_raw_ptr,
    get_torch_allocator,
    hostbuf_to_tensor,
)

__all__ = [
    "CUDAPluggableAllocator",
    "aimdo_to_tensor",
    "get_tensor_from_raw_ptr",
    "get_torch_allocator",
    "hostbuf_to_tensor",
]


def __getattr__(name: str) -> Any:
    # As it is now: this may have been imported before `control.init`.
    if name == "lib":
        return _devices.lib
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
