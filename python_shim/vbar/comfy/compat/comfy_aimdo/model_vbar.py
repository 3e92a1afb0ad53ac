"""VBARs of models: faults, pins, signatures, ranks."""

from __future__ import annotations

from typing import Any

from vbar.comfy import _devices
from vbar.comfy._bars import (
    ModelVBAR,
    vbar_fault,
    vbar_signature_compare,
    vbar_unpin,
    vbars_analyze,
    vbars_reset_watermark_limits,
)

__all__ = [
    "ModelVBAR",
    "vbar_fault",
    "vbar_signature_compare",
    "vbar_unpin",
    "vbars_analyze",
    "vbars_reset_watermark_limits",
]


def __getattr__(name: str) -> Any:
    # As it is now: this may have been imported before `control.init`.
    if name == "lib":
        return _devices.lib
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
