"""As torch.accelerator."""

from . import memory
from .memory import *  # noqa: F403

__all__ = ["memory"]
