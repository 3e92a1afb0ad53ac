"""The C ABI in ctypes: numbers, structs and signatures of ``vbar.h``, and nothing else.

``tests/python/test_header.py`` compares every size, offset, number and signature with the header.
Handles are structs of one 64-bit integer there; every calling convention of the platforms that the
library runs on passes such a struct as the integer, so they are integers here.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    c_char,
    c_char_p,
    c_int32,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

#: The ABI that this package was written for.
ABI_VERSION = 1

#: No stream: a promise that the work that the call speaks of has finished.
STREAM_NONE = c_size_t(-1).value
#: A headroom of nothing; 0 is the default.
HEADROOM_NONE = c_uint64(-1).value
#: No page-locked host memory; 0 is what the system can spare.
HOST_ALLOWANCE_NONE = c_uint64(-1).value
#: Everything, where bytes are asked back.
ALL_BYTES = c_uint64(-1).value

OUTCOME_RESIDENT = 1
OUTCOME_REFILL = 2
OUTCOME_OFFLOADED = 3
OUTCOME_BUSY = 4

THREADS_DEFAULT = 0
THREADS_ON = 1
THREADS_OFF = 2

POISON_OFF = 0
POISON_ON = 1

SCRUB_OFF = 0
SCRUB_ON = 1
HOST_MAPPED_OFF = 0
HOST_MAPPED_ON = 1

HOST_LOCK_EITHER = 0
HOST_LOCK_REQUIRED = 1

HELD_PINS_KEEP = 0
HELD_PINS_RELEASE = 1

DLPACK_VERSIONED = 0
DLPACK_UNVERSIONED = 1
DLPACK_READ_ONLY = 0
DLPACK_WRITABLE = 1

# Handles, passed by value.
Handle = c_uint64
Device = c_uint64
Bar = c_uint64
Allocation = c_uint64
Model = c_uint64
Token = c_uint64
Stream = c_size_t
Status = c_int32


class DeviceOptions(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("driver", c_char_p),
        ("ordinal", c_uint32),
        ("threads", c_uint32),
        ("budget_bytes", c_uint64),
        ("headroom_bytes", c_uint64),
        ("page_bytes", c_uint64),
        ("context", c_void_p),
        ("eviction", c_uint32),
        ("context_waits", c_uint32),
        ("wait_timeout_ms", c_uint64),
        ("staging_slot_count", c_uint32),
        ("poison", c_uint32),
        ("host_mapped", c_uint32),
        ("prefer", c_uint32),
        ("host_allowance_bytes", c_uint64),
        ("scrub", c_uint32),
        ("budget_ppm", c_uint32),
    ]


class DeviceInfo(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("ordinal", c_uint32),
        ("simulated", c_uint32),
        ("context", c_void_p),
        ("page_bytes", c_uint64),
        ("total_bytes", c_uint64),
        ("name", c_char * 256),
        ("driver", c_char * 256),
    ]


class Freed(ctypes.Structure):
    _fields_ = [
        ("bytes", c_uint64),
        ("shortfall", c_uint32),
        ("pinned_count", c_uint32),
    ]


class BarInfo(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("address", c_uint64),
        ("bytes", c_uint64),
        ("page_bytes", c_uint64),
        ("page_count", c_uint32),
        ("resident_count", c_uint32),
        ("watermark", c_uint32),
        ("floor", c_uint32),
        ("priority_class", c_int32),
        ("has_addresses", c_uint32),
    ]


class BindSource(ctypes.Structure):
    _fields_ = [
        ("path", c_char_p),
        ("descriptor", c_int32),
        ("host_lock", c_uint32),
        ("memory", c_void_p),
        ("memory_bytes", c_uint64),
        ("release", c_void_p),
        ("context", c_void_p),
    ]


class BindSegment(ctypes.Structure):
    _fields_ = [
        ("bar_offset", c_uint64),
        ("source_offset", c_uint64),
        ("bytes", c_uint64),
        ("source", c_uint32),
        ("encoding", c_uint32),
    ]


class Page(ctypes.Structure):
    _fields_ = [
        ("generation", c_uint64),
        ("state", c_uint32),
        ("pin_count", c_uint32),
    ]


class Fault(ctypes.Structure):
    _fields_ = [
        ("address", c_uint64),
        ("bytes", c_uint64),
        ("signature", c_uint64),
        ("token", Token),
        ("outcome", c_uint32),
        ("reason", c_uint32),
    ]


class Range(ctypes.Structure):
    _fields_ = [
        ("bar", Bar),
        ("bar_offset", c_uint64),
        ("bytes", c_uint64),
    ]


class ModelInfo(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("bar", Bar),
        ("tensor_count", c_uint64),
        ("total_bytes", c_uint64),
        ("file_count", c_uint32),
        ("reserved", c_uint32),
    ]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        # Not a c_char_p: a name may have zeros of its own.
        ("name", c_void_p),
        ("name_bytes", c_size_t),
        ("shape", POINTER(c_uint64)),
        ("rank", c_uint32),
        ("dtype", c_uint32),
        ("bytes", c_uint64),
        ("address", c_uint64),
        ("bar_offset", c_uint64),
        ("file_offset", c_uint64),
        ("file", c_uint32),
        ("reserved", c_uint32),
    ]


class DlpackTensor(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("address", c_uint64),
        ("shape", POINTER(c_uint64)),
        ("rank", c_uint32),
        ("dtype", c_uint32),
        ("form", c_uint32),
        ("access", c_uint32),
    ]


class WaitCount(ctypes.Structure):
    _fields_ = [
        ("count", c_uint64),
        ("nanos", c_uint64),
    ]


class Statistics(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("used_bytes", c_uint64),
        ("peak_bytes", c_uint64),
        ("free_bytes", c_uint64),
        ("quarantined_bytes", c_uint64),
        ("budget_bytes", c_uint64),
        ("budget_source", c_uint32),
        ("bar_count", c_uint32),
        ("closing_bar_count", c_uint32),
        ("lingering_count", c_uint32),
        ("resident_page_count", c_uint64),
        ("quarantined_page_count", c_uint64),
        ("locked_bytes", c_uint64),
        ("hit_count", c_uint64),
        ("miss_count", c_uint64),
        ("mapped_page_count", c_uint64),
        ("evicted_page_count", c_uint64),
        ("aliased_page_count", c_uint64),
        ("filled_bytes", c_uint64),
        ("driver_retry_count", c_uint64),
        ("poison_bytes", c_uint64),
        ("poisoned_page_count", c_uint64),
        ("poison_failure_count", c_uint64),
        ("refusal_count", c_uint64 * 32),
        ("waits", WaitCount * 16),
        ("ahead_page_count", c_uint64),
        ("engine_trust", c_uint64),
        ("engine_departure_count", c_uint64),
        ("engine_plan_count", c_uint64),
        ("engine_planned_page_count", c_uint64),
        ("engine_kept_page_count", c_uint64),
        ("engine_ahead_step_count", c_uint64),
        ("host_mapped_bytes", c_uint64),
        ("locked_ring_bytes", c_uint64),
        ("locked_cache_bytes", c_uint64),
        ("source_locked_cache_bytes", c_uint64),
        ("source_registered_bytes", c_uint64),
        ("source_page_cache_bytes", c_uint64),
        ("source_disk_bytes", c_uint64),
        ("source_direct_bytes", c_uint64),
        ("source_host_locked_bytes", c_uint64),
        ("source_host_pageable_bytes", c_uint64),
        ("locked_registered_bytes", c_uint64),
        ("locked_saved_bytes", c_uint64),
        ("locked_excess_bytes", c_uint64),
    ]


#: Asked on the waiting thread; anything but 0 ends the wait. Its argument is not looked at, which a
#: C function need not do either.
WaitCheck = ctypes.CFUNCTYPE(c_int32)

#: What the package calls: result and arguments by name.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "vbar_abi_version": (c_uint32, []),
    "vbar_version": (c_char_p, []),
    "vbar_status_text": (c_char_p, [c_int32]),
    "vbar_last_message": (c_char_p, []),
    "vbar_log_set_level": (Status, [c_uint32]),
    "vbar_log_poll": (Status, [c_char_p, c_size_t, POINTER(c_uint32), POINTER(c_size_t)]),
    "vbar_device_open": (Status, [POINTER(DeviceOptions), POINTER(Device)]),
    "vbar_device_close": (Status, [Device]),
    "vbar_device_info": (Status, [Device, POINTER(DeviceInfo)]),
    "vbar_device_set_budget": (Status, [Device, c_uint64]),
    "vbar_device_set_headroom": (Status, [Device, c_uint64]),
    "vbar_device_set_wait_timeout": (Status, [Device, c_uint64]),
    "vbar_device_budget": (Status, [Device, POINTER(c_uint64), POINTER(c_uint64)]),
    "vbar_device_refresh": (Status, [Device]),
    "vbar_device_trim": (Status, [Device, c_uint64, POINTER(c_uint64)]),
    "vbar_device_trim_host": (Status, [Device, c_uint64, POINTER(c_uint64)]),
    "vbar_device_trim_host_frames": (Status, [Device, POINTER(c_uint64)]),
    "vbar_device_free_memory": (Status, [Device, c_uint64, POINTER(Freed)]),
    "vbar_device_cancel_waits": (Status, [Device]),
    "vbar_device_statistics": (Status, [Device, POINTER(Statistics)]),
    "vbar_device_fault_many": (
        Status,
        [Device, POINTER(Range), c_size_t, Stream, POINTER(Fault)],
    ),
    "vbar_device_schedule_hint": (
        Status,
        [Device, POINTER(Range), POINTER(c_size_t), c_size_t],
    ),
    "vbar_device_read_file": (Status, [Device, c_int32, c_uint64, c_uint64, c_uint64, Stream]),
    "vbar_device_write_file": (Status, [Device, c_int32, c_uint64, c_uint64, c_uint64, Stream]),
    "vbar_device_copy_from_host": (Status, [Device, c_void_p, c_uint64, c_uint64, Stream]),
    "vbar_device_lock_host": (Status, [Device, c_void_p, c_uint64]),
    "vbar_device_unlock_host": (Status, [Device, c_void_p]),
    "vbar_thread_set_wait_check": (Status, [c_void_p, c_void_p]),
    "vbar_stream_retire": (Status, [Device, Stream]),
    "vbar_bar_create": (Status, [Device, c_uint64, POINTER(Bar)]),
    "vbar_bar_destroy": (Status, [Bar]),
    "vbar_bar_destroy_wait": (Status, [Bar]),
    "vbar_bar_info": (Status, [Bar, POINTER(BarInfo)]),
    "vbar_flag_raise": (None, [c_void_p]),
    "vbar_bar_bind": (
        Status,
        [Bar, POINTER(BindSource), c_size_t, POINTER(BindSegment), c_size_t],
    ),
    "vbar_bar_prioritise": (Status, [Bar]),
    "vbar_bar_deprioritise": (Status, [Bar]),
    "vbar_bar_set_class": (Status, [Bar, c_int32]),
    "vbar_bar_set_floor": (Status, [Bar, c_uint32]),
    "vbar_bar_set_watermark": (Status, [Bar, c_uint32]),
    "vbar_bar_free_memory": (Status, [Bar, c_uint64, POINTER(Freed)]),
    "vbar_bar_end_of_run": (Status, [Bar, Stream, c_uint32, POINTER(c_uint32)]),
    "vbar_bar_residency": (Status, [Bar, c_uint32, c_size_t, POINTER(Page)]),
    "vbar_bar_allocate": (Status, [Bar, c_uint64, POINTER(Allocation)]),
    "vbar_bar_fault": (Status, [Bar, c_uint64, c_uint64, Stream, POINTER(Fault)]),
    "vbar_bar_prepare_save": (Status, [Bar, c_uint64, c_uint64]),
    "vbar_bar_save": (Status, [Bar, c_uint64, c_uint64, Stream]),
    "vbar_bar_drop_save": (Status, [Bar, c_uint64, c_uint64]),
    "vbar_bar_prefetch": (Status, [Bar, c_uint64, c_uint64]),
    "vbar_allocation_place": (
        Status,
        [Allocation, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint64)],
    ),
    "vbar_allocation_fault": (Status, [Allocation, Stream, POINTER(Fault)]),
    "vbar_allocation_fault_wait": (Status, [Allocation, Stream, POINTER(Fault)]),
    "vbar_allocation_invalidate": (Status, [Allocation]),
    "vbar_token_unpin": (Status, [Token, Stream]),
    "vbar_tokens_unpin": (Status, [POINTER(Token), c_size_t, Stream]),
    "vbar_token_also_used_on": (Status, [Token, Stream]),
    "vbar_token_commit": (Status, [Token, Stream]),
    "vbar_model_open": (Status, [Device, c_char_p, POINTER(Model)]),
    "vbar_model_open_descriptor": (Status, [Device, c_int32, c_char_p, POINTER(Model)]),
    "vbar_model_close": (Status, [Model]),
    "vbar_model_info": (Status, [Model, POINTER(ModelInfo)]),
    "vbar_model_tensor": (Status, [Model, c_uint64, POINTER(Tensor)]),
    "vbar_model_find": (Status, [Model, c_char_p, POINTER(c_uint64)]),
    "vbar_model_metadata": (Status, [Model, c_char_p, POINTER(c_char_p)]),
    "vbar_model_file": (Status, [Model, c_uint32, POINTER(c_char_p)]),
    "vbar_model_fault": (Status, [Model, c_uint64, Stream, POINTER(Fault)]),
    "vbar_model_prefetch": (Status, [Model, c_uint64]),
    "vbar_model_schedule_hint": (Status, [Model, POINTER(c_uint64), c_size_t]),
    "vbar_dlpack_export": (
        Status,
        [Token, Stream, POINTER(DlpackTensor), POINTER(c_void_p)],
    ),
    "vbar_dlpack_set_capsule_functions": (Status, [c_void_p] * 4),
    "vbar_dlpack_export_capsule": (Status, [Token, Stream, POINTER(DlpackTensor), c_void_p]),
    "vbar_dlpack_capsule_destructor": (None, [c_void_p]),
}
