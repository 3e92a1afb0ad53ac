"""Devices, headrooms, messages. ``lib`` is true once ``init`` was called, ``None`` before."""

from __future__ import annotations

import logging
from typing import Any, Iterable

from vbar.comfy import _devices, _graph

# Its presence in the package is how clients find out that there is one.
from . import malloc_graph  # noqa: F401

_VERBOSE, _VERY_VERBOSE, _NOTHING = logging.DEBUG - 1, logging.DEBUG - 5, logging.CRITICAL + 10
_logger = logging.getLogger("vbar")


def __getattr__(name: str) -> Any:
    # As they are now: whoever imported this first sees what `init` made later.
    if name == "lib":
        return _devices.lib
    if name == "devctxs":
        return _devices.contexts
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def init(
    implementation: str | None = None,
    simple_vram_headroom: int | None = None,
    nvml_pressure: bool = False,
) -> bool:
    """Loads the library; a second time only takes the headroom. Before or after PyTorch.

    Args:
        implementation: ``"cuda"``, or what PyTorch was built for.
        simple_vram_headroom: bytes of each card that are left to others; ``None`` is as before.
        nvml_pressure: whom to ask what other programs use, NVML or the driver. Accepted, and the
            same to both: the driver is asked, which tells of the whole card as NVML does, in 8 us
            and without another library, at each miss and each 25 ms where there are threads. So
            weights give way to other programs whatever is said here.

    Returns:
        Whether there is a library for this.
    """
    return _devices.init(implementation, simple_vram_headroom)


def init_devices(device_ids: Iterable[Any]) -> bool:
    """Opens devices, each given as its index or as that and bytes that are left free on it beside
    the headroom. All of them or, with a message, none. Those that are open stay so.
    """
    return _devices.init_devices(device_ids)


def init_device(device_id: int, extra_vram_headroom: int = 0) -> bool:
    """Opens one device, as :func:`init_devices` does."""
    return _devices.init_devices([(device_id, extra_vram_headroom)])


def get_devctx(device_id: int) -> Any:
    """A device's context. Raises ``RuntimeError`` when it is not open."""
    return _devices.get(device_id)


def deinit() -> None:
    """Closes all devices, and the VBARs on them. ``lib`` is ``None`` then."""
    _devices.deinit()


def set_log_none() -> None:
    _logger.setLevel(_NOTHING)


def set_log_critical() -> None:
    _logger.setLevel(logging.CRITICAL)


def set_log_error() -> None:
    _logger.setLevel(logging.ERROR)


def set_log_warning() -> None:
    _logger.setLevel(logging.WARNING)


def set_log_info() -> None:
    _logger.setLevel(logging.INFO)


def set_log_detail() -> None:
    _logger.setLevel(logging.INFO)


def set_log_debug() -> None:
    _logger.setLevel(logging.DEBUG)


def set_log_verbose() -> None:
    _logger.setLevel(_VERBOSE)


def set_log_vverbose() -> None:
    _logger.setLevel(_VERY_VERBOSE)


def analyze() -> None:
    """Says in the log what each device holds."""
    _devices.analyze()


def get_total_vram_usage() -> int:
    """Bytes of all devices that weights, buffers and PyTorch's tensors hold; 0 before
    :func:`init_devices`.
    """
    return _devices.total_used()


def set_simple_vram_headroom(headroom: int) -> None:
    """Sets the bytes of each card that are left to others. Raises ``ValueError`` below 0 and above
    2^60, ``RuntimeError`` before :func:`init`.
    """
    _devices.set_simple_headroom(headroom)


def get_simple_vram_headroom() -> int:
    """The bytes of each card that are left to others. Raises ``RuntimeError`` before
    :func:`init`.
    """
    return _devices.simple_headroom()


def record(stream: Any, assert_graph_breaks: bool = False) -> _graph.MallocGraph:
    """As ``malloc_graph.record``."""
    return _graph.record(stream, assert_graph_breaks)
