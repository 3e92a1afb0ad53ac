"""Device memory that grows at one address."""

from __future__ import annotations

from vbar.comfy import _devices
from vbar.comfy._buffers import VRAMBuffer

__all__ = ["VRAMBuffer"]

__getattr__ = _devices.lazy_lib(__name__)
