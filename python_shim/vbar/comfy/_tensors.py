"""Tensors of PyTorch over addresses that are known: no copy, and nothing that keeps the memory."""

from __future__ import annotations

import ctypes
from typing import Any

from .. import _abi_torch


class _Bytes:
    """What PyTorch asks for a device's bytes. It has no reference to whose they are."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address if nbytes else 0, False),
            "strides": None,
            "version": 2,
        }


def aimdo_to_tensor(alloc: Any, device: Any) -> Any:
    """Bytes of the device as a tensor of ``uint8``: of an allocation, or what a buffer gave.

    It keeps nothing: whoever reads it holds the pins.
    """
    _, address, nbytes = alloc
    return get_tensor_from_raw_ptr(address, nbytes, device)


def get_tensor_from_raw_ptr(ptr: int, size: int, device: Any) -> Any:
    """As :func:`aimdo_to_tensor`, by address and length."""
    import torch

    return torch.as_tensor(_Bytes(ptr, size), device=device)


def hostbuf_to_tensor(hostbuf: Any) -> Any:
    """All bytes that a host buffer has now, as a tensor of ``uint8``. It keeps nothing: they are
    there until the buffer is cut or dropped.
    """
    import torch

    size = hostbuf.size
    if not size:
        return torch.empty((0,), dtype=torch.uint8)
    memory = (ctypes.c_uint8 * size).from_address(hostbuf.get_raw_address())
    return torch.frombuffer(memory, dtype=torch.uint8)


class CUDAPluggableAllocator:
    """vbar's functions as PyTorch takes an allocator for a ``MemPool``."""

    def __init__(self, *_ignored: Any) -> None:
        import torch

        malloc, free = "vbar_torch_segment_malloc", "vbar_torch_segment_free"
        make = torch._C._cuda_customAllocator
        self._allocator = make(_abi_torch.address_of(malloc), _abi_torch.address_of(free))

    def allocator(self) -> Any:
        """PyTorch's object."""
        return self._allocator


_allocator: CUDAPluggableAllocator | None = None


def get_torch_allocator() -> CUDAPluggableAllocator:
    """The allocator, made once: what PyTorch keeps of it lives as long."""
    global _allocator
    if _allocator is None:
        _allocator = CUDAPluggableAllocator()
    return _allocator
