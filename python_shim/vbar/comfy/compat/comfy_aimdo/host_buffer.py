"""Memory of the host that grows in place, and copies between files and devices."""

from __future__ import annotations

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

__getattr__ = _devices.lazy_lib(__name__)
