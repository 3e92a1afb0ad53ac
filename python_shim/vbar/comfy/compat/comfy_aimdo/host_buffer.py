"""Memory of the host that grows in place, and copies between files and devices."""

from __future__ import annotations

from typing import Any

from vbar.comfy import _devices
from vbar.comfy._host import (
    HostBuffer,
    cleanup_file_reader,
    read_file_to_device,
    write_device_to_file,
    write_host_to_file,
)

__all__ = [
    "HostBuffer",
    "cleanup_file_reader",
    "read_file_to_device",
    "write_device_to_file",
    "write_host_to_file",
]


def __getattr__(name: str) -> Any:
    # As it is now: this may have been imported before `control.init`.
    if name == "lib":
        return _devices.lib
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
