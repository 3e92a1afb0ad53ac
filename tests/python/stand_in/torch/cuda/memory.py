"""As torch.cuda.memory: what PyTorch tells of its own allocator, and refuses of another."""

import collections

from .. import _C

__all__ = [
    "empty_cache",
    "get_per_process_memory_fraction",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
]


def _refuse(what):
    raise RuntimeError(
        f"CUDAPluggableAllocator does not yet support {what}. "
        "If you need it, please file an issue describing your use case."
    )


def _refuse_plugs(what):
    if _C._current is not None:
        _refuse(what)


def empty_cache():
    if _C._current is not None:
        _C._current.reset()


def set_per_process_memory_fraction(fraction, device=None):
    if _C._current is not None:
        _C._current.fraction(fraction, 0)


def get_per_process_memory_fraction(device=None):
    _refuse_plugs("getMemoryFraction")
    return 1.0


def mem_get_info(device=None):
    return (1, 2)


def memory_stats_as_nested_dict(device=None):
    _refuse_plugs("getDeviceStats")
    return {}


def memory_stats(device=None):
    memory_stats_as_nested_dict(device)
    return collections.OrderedDict()


def memory_allocated(device=None):
    return memory_stats(device=device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device=None):
    return memory_stats(device=device).get("allocated_bytes.all.peak", 0)


def memory_reserved(device=None):
    return memory_stats(device=device).get("reserved_bytes.all.current", 0)


def max_memory_reserved(device=None):
    return memory_stats(device=device).get("reserved_bytes.all.peak", 0)


def reset_peak_memory_stats(device=None):
    _refuse_plugs("resetPeakStats")


def reset_accumulated_memory_stats(device=None):
    _refuse_plugs("resetAccumulatedStats")


def reset_max_memory_allocated(device=None):
    return reset_peak_memory_stats(device=device)


def memory_snapshot(mempool_id=None):
    _refuse_plugs("snapshot")
    return []


def _snapshot(device=None):
    _refuse_plugs("snapshot")
    return {}


def _record_memory_history(enabled="all", *args, **kwargs):
    _refuse_plugs("recordHistory")


def memory_summary(device=None, abbreviated=False):
    """The keys that the real one reads."""
    stats = memory_stats(device=device)
    lines = []
    for key in (
        "allocated_bytes",
        "active_bytes",
        "requested_bytes",
        "reserved_bytes",
        "inactive_split_bytes",
        "allocation",
        "active",
        "segment",
        "inactive_split",
    ):
        for pool in ("all", "large_pool", "small_pool"):
            parts = [
                stats[f"{key}.{pool}.{part}"] for part in ("current", "peak", "allocated", "freed")
            ]
            lines.append(f"{key} {pool} {parts}")
    for key in ("oversize_allocations", "oversize_segments"):
        lines.append(f"{key} {[stats[f'{key}.{part}'] for part in ('current', 'peak')]}")
    return f"ooms {stats['num_ooms']} retries {stats['num_alloc_retries']}\n" + "\n".join(lines)
