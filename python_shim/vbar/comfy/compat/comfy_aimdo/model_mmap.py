"""Files as the host reads them."""

from __future__ import annotations

from vbar.comfy import _devices
from vbar.comfy._mapping import ModelMMAP

__all__ = ["ModelMMAP"]

__getattr__ = _devices.lazy_lib(__name__)
