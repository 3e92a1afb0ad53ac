"""Files as the host reads them."""

from __future__ import annotations

from typing import Any

from vbar.comfy import _devices
from vbar.comfy._mapping import ModelMMAP

__all__ = ["ModelMMAP"]


def __getattr__(name: str) -> Any:
    # As it is now: this may have been imported before `control.init`.
    if name == "lib":
        return _devices.lib
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
