"""Between two phases of a program: what the first one left goes back."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from ._install import device as open_device

if TYPE_CHECKING:
    from .._sizes import Size


def release_phase(ordinal: int | None = None, *, keep: Size = 0) -> int:
    """Give back to the driver what a finished phase left: of tensors and of weights' free frames.

    A pipeline's text encoder, denoiser and decoder each have their own tensors. Drop your own
    references first (``del``, or the end of a function); this collects the garbage that is left,
    gives back what is cached, waiting for the work that used it, and the frames that no page has.
    Weights that are resident stay until somebody needs their memory.

    Args:
        ordinal: PyTorch's number of the device; ``None`` is its current one.
        keep: bytes of free frames to keep for the next phase, or as ``"1G"``.

    Returns:
        The bytes by which vbar holds less of the device than before.
    """
    import torch

    gc.collect()
    with open_device(ordinal) as device:
        before = device.statistics().used_bytes
        torch.cuda.empty_cache()
        device.trim(keep)
        return max(0, before - device.statistics().used_bytes)
