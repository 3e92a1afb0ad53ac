"""vbar: a CUDA virtual-memory allocator.

This package finds the native library, loads it once and compares its ABI version before it calls
anything else. ``VBAR_LIBRARY`` names another library than the one beside the package.
"""

from __future__ import annotations

import ctypes
import os
import pathlib

__all__ = ["ABI_VERSION", "AbiError", "load", "status_text", "version"]

#: The ABI that this package was written for.
ABI_VERSION = 1

_library: ctypes.CDLL | None = None


class AbiError(ImportError):
    """The native library is missing, or of another ABI than this package."""


def load() -> ctypes.CDLL:
    """Load the native library, once a process.

    Raises:
        AbiError: it is missing, is no vbar library, or has another ABI version.
    """
    global _library
    if _library is not None:
        return _library
    beside = pathlib.Path(__file__).with_name("libvbar.so")
    path = os.environ.get("VBAR_LIBRARY") or str(beside)
    try:
        library = ctypes.CDLL(path)
        abi_version = library.vbar_abi_version
    except (OSError, AttributeError) as error:
        raise AbiError(f"{path} is no vbar library: {error}") from error
    abi_version.restype, abi_version.argtypes = ctypes.c_uint32, []
    found = abi_version()
    if found != ABI_VERSION:
        raise AbiError(
            f"{path} has ABI {found}, this package needs {ABI_VERSION}: "
            "install library and package of one version"
        )
    library.vbar_version.restype, library.vbar_version.argtypes = ctypes.c_char_p, []
    library.vbar_status_text.restype = ctypes.c_char_p
    library.vbar_status_text.argtypes = [ctypes.c_int32]
    _library = library
    return library


def version() -> str:
    """The native library's version."""
    return load().vbar_version().decode()


def status_text(status: int) -> str:
    """A sentence for a status number of the C ABI."""
    return load().vbar_status_text(status).decode()
