"""Scopes around work whose allocations repeat."""

from __future__ import annotations

from typing import Any

from vbar.comfy import _devices
from vbar.comfy._graph import MallocGraph, record

__all__ = ["MallocGraph", "record"]


def __getattr__(name: str) -> Any:
    # As it is now: this may have been imported before `control.init`.
    if name == "lib":
        return _devices.lib
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
