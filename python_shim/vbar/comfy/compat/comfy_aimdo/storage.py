"""What a disk is like."""

from __future__ import annotations

from typing import Any

from vbar.comfy import _devices


def fast_disk(path: Any) -> bool | None:
    """Whether the disk of a path is a fast one; ``None`` where that is not looked at: on Linux
    ComfyUI does it itself.
    """
    return None


def __getattr__(name: str) -> Any:
    # As it is now: this may have been imported before `control.init`.
    if name == "lib":
        return _devices.lib
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
