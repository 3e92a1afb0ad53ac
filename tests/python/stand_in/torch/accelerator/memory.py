"""As torch.accelerator.memory."""

from ..cuda.memory import _refuse_plugs, empty_cache

__all__ = ["empty_cache", "memory_allocated", "memory_stats", "reset_peak_memory_stats"]


def memory_stats(device_index=None, /):
    _refuse_plugs("getDeviceStats")
    return {}


def memory_allocated(device_index=None, /):
    return memory_stats(device_index).get("allocated_bytes.all.current", 0)


def reset_peak_memory_stats(device_index=None, /):
    _refuse_plugs("resetPeakStats")
