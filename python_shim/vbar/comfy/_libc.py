"""The system's calls on ranges of addresses, for which Python has none that tell the address."""

from __future__ import annotations

import ctypes
import mmap
import os

PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_NONE, _READ, _WRITE = 0, mmap.PROT_READ, mmap.PROT_WRITE
_PRIVATE, _ANONYMOUS = mmap.MAP_PRIVATE, mmap.MAP_ANONYMOUS
_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value
_SHARED = mmap.MAP_SHARED
_DONTNEED, _HUGEPAGE, _COLD, _POPULATE_READ, _POPULATE_WRITE = 4, 14, 20, 22, 23


def _failed(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def reserve(nbytes: int) -> int:
    """Addresses with nothing behind them; raises ``OSError``."""
    flags = _PRIVATE | _ANONYMOUS | _NORESERVE
    address = _libc.mmap(None, nbytes, _NONE, flags, -1, 0)
    if address == _FAILED:
        raise _failed(f"{nbytes} bytes of addresses")
    # Touched and locked in a fraction of the time; a kernel that does not want to changes nothing.
    _libc.madvise(address, nbytes, _HUGEPAGE)
    return int(address)


def map_file(descriptor: int, nbytes: int) -> int:
    """A private mapping of a file, for reading; raises ``OSError``."""
    address = _libc.mmap(None, nbytes, _READ, _PRIVATE, descriptor, 0)
    if address == _FAILED:
        raise _failed(f"a mapping of {nbytes} bytes of a file")
    return int(address)


def release(address: int, nbytes: int) -> None:
    """Gives addresses back."""
    if _libc.munmap(address, nbytes) != 0:
        raise _failed(f"{nbytes} bytes of addresses")


def commit(address: int, nbytes: int) -> None:
    """Lets addresses be read and written; raises ``OSError``."""
    if _libc.mprotect(address, nbytes, _READ | _WRITE) != 0:
        raise _failed(f"{nbytes} bytes of memory")


def decommit(address: int, nbytes: int) -> None:
    """Gives the memory back, and keeps the addresses; raises ``OSError``."""
    drop(address, nbytes)
    if _libc.mprotect(address, nbytes, _NONE) != 0:
        raise _failed(f"{nbytes} bytes of memory")


def drop(address: int, nbytes: int) -> None:
    """Lets the system have the memory behind addresses; raises ``OSError``."""
    if _libc.madvise(address, nbytes, _DONTNEED) != 0:
        raise _failed(f"{nbytes} bytes of memory")


def cool(descriptor: int, offset: int, nbytes: int) -> None:
    """Has the system take cached pages of a file before others when it needs memory, those alone
    that no other mapping has; as far as it can: without, they go in its own order. Nothing is
    dropped, whoever reads them next finds them.
    """
    start = offset // PAGE * PAGE
    length = offset + nbytes - start
    # What is cold is told of mapped pages alone, so they are mapped for as long.
    address = _libc.mmap(None, length, _READ, _SHARED, descriptor, start)
    if address == _FAILED:
        return
    if _libc.madvise(address, length, _POPULATE_READ) == 0:
        _libc.madvise(address, length, _COLD)
    _libc.munmap(address, length)


def touch(address: int, nbytes: int) -> None:
    """Has memory put behind addresses now, as far as the system can: without, it comes later."""
    _libc.madvise(address, nbytes, _POPULATE_WRITE)


def view(address: int, nbytes: int) -> memoryview:
    """Memory as Python reads and writes it. It stays mapped for as long."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
