"""VBARs of models: faults, pins, signatures, ranks."""

from __future__ import annotations

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

__getattr__ = _devices.lazy_lib(__name__)
