"""What a disk is like."""

from __future__ import annotations

from typing import Any

from vbar.comfy import _devices


def fast_disk(path: Any) -> bool | None:
    """Whether the disk of a path is a fast one; ``None`` where that is not looked at: on Linux
    ComfyUI does it itself.
    """
    return None


__getattr__ = _devices.lazy_lib(__name__)
