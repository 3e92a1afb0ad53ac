"""What PyTorch calls, and what is told of its allocator, in ctypes: as :mod:`vbar._abi`."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from . import _library
from ._abi import Device, DeviceOptions, Status, Stream

RAISE_NOTHING = 1
RAISE_RUNTIME_ERROR = 2
RAISE_OUT_OF_MEMORY_ERROR = 3

BLOCK_ALLOCATED = 1
BLOCK_AWAITING_FREE = 2
BLOCK_FREE = 3

GRAPH_STEP_ENTER = 1
GRAPH_STEP_LEAVE = 2
GRAPH_STEP_NEXT = 3
GRAPH_STEP_PAUSE = 4
GRAPH_STEP_RESUME = 5
GRAPH_STEP_ABORT = 6


class TorchPool(ctypes.Structure):
    _fields_ = [
        ("first", c_uint64),
        ("second", c_uint64),
    ]


class TorchStat(ctypes.Structure):
    _fields_ = [
        ("current", c_uint64),
        ("peak", c_uint64),
        ("allocated", c_uint64),
        ("freed", c_uint64),
    ]


class TorchPoolStat(ctypes.Structure):
    _fields_ = [
        ("all", TorchStat),
        ("small_pool", TorchStat),
        ("large_pool", TorchStat),
    ]


class TorchStatistics(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("allocation", TorchPoolStat),
        ("segment", TorchPoolStat),
        ("active", TorchPoolStat),
        ("inactive_split", TorchPoolStat),
        ("allocated_bytes", TorchPoolStat),
        ("reserved_bytes", TorchPoolStat),
        ("active_bytes", TorchPoolStat),
        ("inactive_split_bytes", TorchPoolStat),
        ("requested_bytes", TorchPoolStat),
        ("alloc_retry_count", c_uint64),
        ("oom_count", c_uint64),
        ("sync_all_streams_count", c_uint64),
        ("device_alloc_count", c_uint64),
        ("device_free_count", c_uint64),
        ("malloc_count", c_uint64),
        ("free_count", c_uint64),
        ("unknown_free_count", c_uint64),
        ("pending_bytes", c_uint64),
        ("pool_bytes", c_uint64),
        ("reserve_bytes", c_uint64),
        ("device_free_bytes", c_uint64),
        ("device_total_bytes", c_uint64),
        ("free_frame_bytes", c_uint64),
        ("memory_fraction", c_double),
    ]


class TorchSegment(ctypes.Structure):
    _fields_ = [
        ("address", c_uint64),
        ("bytes", c_uint64),
        ("stream", c_size_t),
        ("pool", TorchPool),
        ("block_count", c_uint64),
        ("small", c_uint32),
        ("reserved", c_uint32),
    ]


class TorchBlock(ctypes.Structure):
    _fields_ = [
        ("address", c_uint64),
        ("bytes", c_uint64),
        ("requested_bytes", c_uint64),
        ("state", c_uint32),
        ("reserved", c_uint32),
    ]


class TorchGraph(ctypes.Structure):
    _fields_ = [
        ("id", c_uint64),
    ]


class TorchGraphStatistics(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("used_bytes", c_uint64),
        ("peak_used_bytes", c_uint64),
        ("pool_bytes", c_uint64),
        ("rogue_count", c_uint64),
    ]


#: What PyTorch calls, by its addresses: the names of the setters of its allocator and of the
#: functions that they are given.
HOOKS: dict[str, str] = {
    "set_init_fn": "vbar_torch_init",
    "set_reset_fn": "vbar_torch_reset",
    "set_memory_fraction_fn": "vbar_torch_memory_fraction",
    "set_base_alloc_fn": "vbar_torch_base_alloc",
    "set_record_stream_fn": "vbar_torch_record_stream",
    "set_begin_allocate_to_pool": "vbar_torch_begin_pool",
    "set_end_allocate_to_pool_fn": "vbar_torch_end_pool",
    "set_release_pool": "vbar_torch_release_pool",
}

FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "vbar_torch_malloc": (c_void_p, [c_size_t, c_int32, Stream]),
    "vbar_torch_free": (None, [c_void_p, c_size_t, c_int32, Stream]),
    "vbar_torch_init": (None, [c_int32]),
    "vbar_torch_reset": (None, []),
    "vbar_torch_memory_fraction": (None, [c_double, c_int32]),
    "vbar_torch_base_alloc": (c_void_p, [c_void_p, POINTER(c_size_t)]),
    "vbar_torch_record_stream": (None, [c_void_p, Stream]),
    "vbar_torch_begin_pool": (None, [c_int32, TorchPool, c_void_p]),
    "vbar_torch_end_pool": (None, [c_int32, TorchPool]),
    "vbar_torch_release_pool": (None, [c_int32, TorchPool]),
    "vbar_torch_segment_malloc": (c_void_p, [c_size_t, c_int32, Stream]),
    "vbar_torch_segment_free": (None, [c_void_p, c_size_t, c_int32, Stream]),
    "vbar_torch_configure": (Status, [POINTER(DeviceOptions)]),
    "vbar_torch_device": (Status, [c_int32, POINTER(Device)]),
    "vbar_torch_raise": (Status, [POINTER(c_uint32)]),
    "vbar_torch_statistics": (Status, [c_int32, POINTER(TorchStatistics)]),
    "vbar_torch_reset_peaks": (Status, [c_int32]),
    "vbar_torch_reset_accumulated": (Status, [c_int32]),
    "vbar_torch_snapshot": (
        Status,
        [
            c_int32,
            POINTER(TorchSegment),
            c_size_t,
            POINTER(c_size_t),
            POINTER(TorchBlock),
            c_size_t,
            POINTER(c_size_t),
        ],
    ),
    "vbar_torch_record_start": (Status, [c_int32, c_char_p]),
    "vbar_torch_record_stop": (Status, [c_int32, POINTER(c_uint64)]),
    "vbar_torch_graph_create": (Status, [c_int32, Stream, POINTER(TorchGraph)]),
    "vbar_torch_graph_step": (Status, [TorchGraph, c_uint32, c_uint64, POINTER(c_uint32)]),
    "vbar_torch_graph_use_stream": (Status, [TorchGraph, Stream]),
    "vbar_torch_graph_statistics": (Status, [TorchGraph, POINTER(TorchGraphStatistics)]),
    "vbar_torch_graph_destroy": (Status, [TorchGraph]),
}

_bound: list[ctypes.CDLL] = []


def library() -> ctypes.CDLL:
    """The native library with these functions."""
    found = _library.load()
    if not _bound:
        _library.bind(found, FUNCTIONS, "the native library")
        _bound.append(found)
    return found


def address_of(name: str) -> int:
    """The address of a function, as PyTorch wants it."""
    return ctypes.cast(getattr(library(), name), c_void_p).value or 0
