"""The native library: found, loaded once, its ABI version compared before anything else is called.

Owns the only ``CDLL``. ``VBAR_LIBRARY`` names another file than the one beside the package, by its
whole path: a name alone would be looked for, and ``./`` depends on where the program was started. A
process that has rights which its user has not takes no library from its environment.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import threading
from typing import Any, Mapping

from . import _abi
from ._errors import AbiError

#: Of <sys/auxv.h>.
_AT_SECURE = 23

_lock = threading.Lock()
_library: ctypes.CDLL | None = None


def load() -> ctypes.CDLL:
    """The native library, loaded at the first call. Thread-safe.

    Raises:
        AbiError: it is missing, is no vbar library, lacks a function, or has another ABI version.
            Nothing but ``vbar_abi_version`` was called then.
    """
    global _library
    library = _library
    if library is None:
        with _lock:
            library = _library
            if library is None:
                library = _library = _open(_path())
    return library


def loaded() -> ctypes.CDLL | None:
    """The native library if it was loaded."""
    return _library


def version() -> str:
    """The native library's version, which is the package's."""
    return str(load().vbar_version().decode())


def status_text(status: int) -> str:
    """A sentence for a status number of the C ABI."""
    return str(load().vbar_status_text(status).decode())


def _path() -> str:
    named = os.environ.get("VBAR_LIBRARY")
    if not named or _is_privileged():
        return str(pathlib.Path(__file__).resolve().with_name("libvbar.so"))
    if not os.path.isabs(named):
        raise AbiError(f"VBAR_LIBRARY is {named}: name the library by its whole path, from /")
    return named


def _is_privileged() -> bool:
    """Whether the kernel raised the process's rights at its start, getauxval(3)."""
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return bool(getauxval(_AT_SECURE))


def _open(path: str) -> ctypes.CDLL:
    if os.sep in path and not os.path.exists(path):
        raise AbiError(
            f"{path} is not there: install the wheel, which has the library in it, "
            "or name a library with VBAR_LIBRARY"
        )
    try:
        # Resolved on the way in, not at some later call; nobody else's symbols are touched.
        library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        abi_version = library.vbar_abi_version
    except (OSError, AttributeError) as error:
        raise AbiError(f"{path} is no vbar library: {error}") from None
    abi_version.restype, abi_version.argtypes = _abi.FUNCTIONS["vbar_abi_version"]
    found = abi_version()
    if found != _abi.ABI_VERSION:
        raise AbiError(
            f"{path} has ABI {found}, this package needs {_abi.ABI_VERSION}: "
            "install library and package of one version"
        )
    bind(library, _abi.FUNCTIONS, path)
    return library


def bind(
    library: ctypes.CDLL, functions: Mapping[str, tuple[Any, list[Any]]], path: str
) -> None:
    """Sets results and arguments of functions.

    Raises:
        AbiError: the library lacks one.
    """
    missing = []
    for name, (result, arguments) in functions.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            missing.append(name)
            continue
        function.restype, function.argtypes = result, arguments
    if missing:
        raise AbiError(
            f"{path} lacks {', '.join(missing)}: it is older than this package; "
            "install library and package of one version"
        )
