"""Tensors over addresses, and PyTorch's object for vbar's functions."""

from __future__ import annotations

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

__getattr__ = _devices.lazy_lib(__name__)
