"""``torch.cuda.memory_allocated`` and its like, answered with vbar's numbers.

PyTorch raises for all of them when the allocator is not its own. They are replaced where programs
find them, in ``torch.cuda``, ``torch.cuda.memory`` and ``torch.accelerator``, each by one that
answers as PyTorch's would; what is built on them (``memory_summary``) works then.
"""

from __future__ import annotations

import collections
import ctypes
import inspect
import sys
import threading
from typing import Any, Callable

from .. import _abi, _abi_torch
from .._call import call
from .._errors import Unsupported

_lock = threading.Lock()
#: Of what was replaced: where, its name, what was there, what is there now.
_replaced: list[tuple[Any, str, Any, Any]] = []

#: Keys of ``memory_stats`` with four parts, of all requests, small ones and large ones.
_KEYS = [
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
]
_COUNTS = {
    "num_alloc_retries": "alloc_retry_count",
    "num_ooms": "oom_count",
    "num_sync_all_streams": "sync_all_streams_count",
    "num_device_alloc": "device_alloc_count",
    "num_device_free": "device_free_count",
}
#: What PyTorch's own allocator does not count, under ``vbar.``.
_OURS = [
    "malloc_count",
    "free_count",
    "unknown_free_count",
    "pending_bytes",
    "pool_bytes",
    "reserve_bytes",
    "free_frame_bytes",
]
_STATES = {
    _abi_torch.BLOCK_ALLOCATED: "active_allocated",
    _abi_torch.BLOCK_AWAITING_FREE: "active_awaiting_free",
    _abi_torch.BLOCK_FREE: "inactive",
}


class NotAnswered(Unsupported, RuntimeError):
    """What only PyTorch's own allocator can tell."""

    status = 0


def install_statistics() -> None:
    """Let PyTorch's functions about memory answer with vbar's numbers. A second time does nothing.

    :func:`install` does it unless told not to.
    """
    import torch

    with _lock:
        if _replaced:
            return
        answers = _answers()
        for module in (torch.cuda, torch.cuda.memory):
            for name, answer in answers.items():
                _replace(module, name, answer)
        # Of PyTorch 2.9 and newer; loaded as `torch.accelerator` says.
        accelerator = getattr(torch, "accelerator", None)
        memory = getattr(accelerator, "memory", None)
        for module in (accelerator, memory):
            for name, answer in _accelerator_answers().items():
                _replace(module, name, answer)


def uninstall_statistics() -> None:
    """Put PyTorch's own functions back: they raise while vbar is the allocator.

    What somebody replaced after us stays. A second time does nothing.
    """
    with _lock:
        while _replaced:
            module, name, original, answer = _replaced.pop()
            if getattr(module, name) is answer:
                setattr(module, name, original)


def allocations_seen(ordinal: int) -> int:
    """Requests that PyTorch has made of vbar on a device; 0 while it allocates elsewhere."""
    return int(_numbers(ordinal).malloc_count)


def _replace(module: Any, name: str, answer: Callable[..., Any]) -> None:
    original = getattr(module, name, None)
    if original is not None:
        setattr(module, name, answer)
        _replaced.append((module, name, original, answer))


def _numbers(ordinal: int) -> _abi_torch.TorchStatistics:
    told = _abi_torch.TorchStatistics(size=ctypes.sizeof(_abi_torch.TorchStatistics))
    call(_abi_torch.library().vbar_torch_statistics, ordinal, told)
    return told


def _index_of(device: Any) -> int:
    """The number of a device as PyTorch's functions take one: also a text, or ``None``."""
    torch = sys.modules["torch"]
    if device is None:
        return int(torch.cuda.current_device())
    if isinstance(device, int):
        return torch.cuda.current_device() if device < 0 else device
    given = torch.device(device)
    if given.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return int(torch.cuda.current_device() if given.index is None else given.index)


def _is_used() -> bool:
    """Whether CUDA is in use: until then PyTorch tells of nothing, and we start nothing."""
    return bool(sys.modules["torch"].cuda.is_initialized())


def _nested(ordinal: int) -> dict[str, Any]:
    told = _numbers(ordinal)
    stats: dict[str, Any] = {key: _pools_of(getattr(told, key)) for key in _KEYS}
    # Requests that PyTorch's own allocator never caches, which is a setting of it.
    nothing = _parts_of(_abi_torch.TorchStat())
    stats["oversize_allocations"] = nothing
    stats["oversize_segments"] = dict(nothing)
    stats["max_split_size"] = -1
    stats.update({key: getattr(told, name) for key, name in _COUNTS.items()})
    stats["vbar"] = {name: getattr(told, name) for name in _OURS}
    return stats


def _pools_of(stat: Any) -> dict[str, dict[str, int]]:
    return {name: _parts_of(getattr(stat, name)) for name, *_ in stat._fields_}


def _parts_of(stat: Any) -> dict[str, int]:
    return {name: getattr(stat, name) for name, *_ in stat._fields_}


def _flat(stats: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in stats.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, value))
    return found


def _stats(device: Any) -> collections.OrderedDict[str, Any]:
    if not _is_used():
        return collections.OrderedDict()
    return collections.OrderedDict(sorted(_flat(_nested(_index_of(device)))))


def _read(ordinal: int) -> tuple[Any, Any]:
    """All segments and blocks of a device, taken at one moment."""
    library = _abi_torch.library()
    room = [64, 1024]
    while True:
        segments = (_abi_torch.TorchSegment * room[0])()
        blocks = (_abi_torch.TorchBlock * room[1])()
        counts = ctypes.c_size_t(), ctypes.c_size_t()
        call(
            library.vbar_torch_snapshot,
            ordinal,
            segments,
            room[0],
            counts[0],
            blocks,
            room[1],
            counts[1],
        )
        found = [count.value for count in counts]
        if found[0] <= room[0] and found[1] <= room[1]:
            return segments[: found[0]], blocks[: found[1]]
        # Others allocate meanwhile.
        room = [2 * max(pair) for pair in zip(room, found)]


def _segments(ordinal: int) -> list[dict[str, Any]]:
    segments, blocks = _read(ordinal)
    found, at = [], 0
    for segment in segments:
        own = blocks[at : at + segment.block_count]
        at += segment.block_count
        live = [block for block in own if block.state == _abi_torch.BLOCK_ALLOCATED]
        active = [block for block in own if block.state != _abi_torch.BLOCK_FREE]
        stream = 0 if segment.stream == _abi.STREAM_NONE else segment.stream
        found.append(
            {
                "device": ordinal,
                "address": segment.address,
                "total_size": segment.bytes,
                "allocated_size": sum(block.bytes for block in live),
                "active_size": sum(block.bytes for block in active),
                "requested_size": sum(block.requested_bytes for block in live),
                "stream": stream,
                "segment_type": "small" if segment.small else "large",
                "segment_pool_id": (segment.pool.first, segment.pool.second),
                "is_expandable": False,
                "frames": [],
                "blocks": [
                    {
                        "address": block.address,
                        "size": block.bytes,
                        "requested_size": block.requested_bytes,
                        "state": _STATES[block.state],
                        "frames": [],
                    }
                    for block in own
                ],
            }
        )
    return found


def _all_segments() -> list[dict[str, Any]]:
    count = sys.modules["torch"].cuda.device_count() if _is_used() else 0
    return [segment for ordinal in range(count) for segment in _segments(ordinal)]


def _answers() -> dict[str, Callable[..., Any]]:
    library = _abi_torch.library()

    def memory_stats(device: Any = None) -> collections.OrderedDict[str, Any]:
        """As PyTorch's, with vbar's numbers; those under ``vbar.`` are its own."""
        return _stats(device)

    def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
        """As PyTorch's, with vbar's numbers."""
        return _nested(_index_of(device)) if _is_used() else {}

    def memory_allocated(device: Any = None) -> int:
        """Bytes of live tensors."""
        return int(_stats(device).get("allocated_bytes.all.current", 0))

    def max_memory_allocated(device: Any = None) -> int:
        """The most that ``memory_allocated`` was."""
        return int(_stats(device).get("allocated_bytes.all.peak", 0))

    def memory_reserved(device: Any = None) -> int:
        """Bytes of memory that tensors have, or had and will have again."""
        return int(_stats(device).get("reserved_bytes.all.current", 0))

    def max_memory_reserved(device: Any = None) -> int:
        """The most that ``memory_reserved`` was."""
        return int(_stats(device).get("reserved_bytes.all.peak", 0))

    def reset_peak_memory_stats(device: Any = None) -> None:
        """Every peak becomes what is now."""
        call(library.vbar_torch_reset_peaks, _index_of(device))

    def reset_accumulated_memory_stats(device: Any = None) -> None:
        """Every sum over time becomes 0."""
        call(library.vbar_torch_reset_accumulated, _index_of(device))

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        """Bytes that can be had without taking them from a tensor or a weight, and all there are.

        What the driver calls free, and frames that vbar holds for whoever asks first.
        """
        told = _numbers(_index_of(device))
        return told.device_free_bytes + told.free_frame_bytes, told.device_total_bytes

    def get_per_process_memory_fraction(device: Any = None) -> float:
        """What ``set_per_process_memory_fraction`` set, else 1."""
        return float(_numbers(_index_of(device)).memory_fraction)

    def memory_snapshot(*_: Any, **__: Any) -> list[dict[str, Any]]:
        """As PyTorch's, of all devices; with no stack traces, which vbar does not record."""
        return _all_segments()

    def _snapshot(*_: Any, **__: Any) -> dict[str, Any]:
        """As PyTorch's, with no history."""
        count = sys.modules["torch"].cuda.device_count()
        return {
            "segments": _all_segments(),
            "device_traces": [[] for _ in range(count)],
            "allocator_settings": {},
            "external_annotations": [],
        }

    def _record_memory_history(enabled: Any = "all", *_: Any, **__: Any) -> None:
        """Refused, unless it is turned off."""
        if enabled:
            raise NotAnswered(
                "vbar records no history of allocations: torch.cuda.memory._record_memory_history "
                "needs PyTorch's own allocator, so run without vbar.torch.install() for it"
            )

    return {name: answer for name, answer in locals().items() if inspect.isfunction(answer)}


def _accelerator_answers() -> dict[str, Callable[..., Any]]:
    cuda = _answers()
    names = [
        "memory_stats",
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
    ]
    return {**{name: cuda[name] for name in names}, "get_memory_info": cuda["mem_get_info"]}
