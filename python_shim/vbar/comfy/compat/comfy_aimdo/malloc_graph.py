"""Scopes around work whose allocations repeat."""

from __future__ import annotations

from vbar.comfy import _devices
from vbar.comfy._graph import MallocGraph, record

__all__ = ["MallocGraph", "record"]

__getattr__ = _devices.lazy_lib(__name__)
