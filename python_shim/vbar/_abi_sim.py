"""``vbar_sim.h`` in ctypes, as ``_abi`` has ``vbar.h``: bound when it is first asked for."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int32, c_size_t, c_uint64, c_void_p
from typing import Any

from . import _library
from ._abi import Device, Status, Stream

Sim = c_uint64


class SimLive(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("frame_count", c_uint64),
        ("used_bytes", c_uint64),
        ("reservation_count", c_uint64),
        ("reserved_bytes", c_uint64),
        ("mapping_count", c_uint64),
        ("locked_bytes", c_uint64),
        ("event_count", c_uint64),
        ("stream_count", c_uint64),
    ]


#: What the package calls: result and arguments by name.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "vbar_sim_open": (Status, [Device, POINTER(Sim)]),
    "vbar_sim_close": (Status, [Sim]),
    "vbar_sim_stream_create": (Status, [Device, POINTER(Stream)]),
    "vbar_sim_stream_destroy": (Status, [Device, Stream]),
    "vbar_sim_stream_synchronize": (Status, [Device, Stream]),
    "vbar_sim_stream_wait": (Status, [Device, Stream, Stream]),
    "vbar_sim_stream_hold": (Status, [Device, Stream]),
    "vbar_sim_stream_release": (Status, [Device, Stream]),
    "vbar_sim_launch_checksum": (
        Status,
        [Device, c_uint64, c_uint64, c_uint64, c_uint64, Stream],
    ),
    "vbar_sim_launch_pattern": (
        Status,
        [Device, c_uint64, c_uint64, c_uint64, c_uint64, Stream],
    ),
    "vbar_sim_launch_sleep": (Status, [Device, c_uint64, Stream]),
    "vbar_sim_copy_to_device": (Status, [Device, c_uint64, c_void_p, c_size_t, Stream]),
    "vbar_sim_copy_to_host": (Status, [Device, c_void_p, c_uint64, c_size_t, Stream]),
    "vbar_sim_peek": (Status, [Sim, c_uint64, c_void_p, c_size_t]),
    "vbar_sim_checksum": (c_uint64, [c_void_p, c_size_t]),
    "vbar_sim_pattern": (Status, [c_void_p, c_size_t, c_uint64]),
    "vbar_sim_set_outside_bytes": (Status, [Sim, c_uint64]),
    "vbar_sim_fail": (Status, [Sim, c_char_p, c_uint64, c_uint64, c_int32]),
    "vbar_sim_fail_rate": (Status, [Sim, c_double, c_uint64]),
    "vbar_sim_heal": (Status, [Sim]),
    "vbar_sim_lose_device": (Status, [Sim, c_int32]),
    "vbar_sim_calls": (Status, [Sim, c_char_p, POINTER(c_uint64)]),
    "vbar_sim_live": (Status, [Sim, POINTER(SimLive)]),
    "vbar_sim_violation_count": (Status, [Sim, POINTER(c_uint64)]),
    "vbar_sim_violation": (Status, [Sim, c_uint64, c_char_p, c_size_t]),
}

_bound: list[ctypes.CDLL] = []


def library() -> ctypes.CDLL:
    """The native library with these functions."""
    found = _library.load()
    if not _bound:
        _library.bind(found, FUNCTIONS, "the native library")
        _bound.append(found)
    return found
