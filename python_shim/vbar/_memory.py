"""Memory of the program that VBARs are bound to, kept until no copy reads it any more.

The library raises a flag then, and this package looks at the flags in passing: when a VBAR is bound
or closed, when a device is, when statistics are asked for, and with the library's messages. No
callback is installed, so no thread of the library ever waits for Python. What is kept is kept
outside the reach of Python's own end: memory whose flag is never raised stays.
"""

from __future__ import annotations

import ctypes
from typing import Any, Iterable

from . import _abi
from ._errors import InvalidArgument
from ._sizes import unsigned

_SIMPLE = 0


class _Buffer(ctypes.Structure):
    """``Py_buffer``, part of Python's stable ABI."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.restype = ctypes.c_int
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.restype = None
_release_buffer.argtypes = [ctypes.POINTER(_Buffer)]
_keep = ctypes.pythonapi.Py_IncRef
_keep.restype, _keep.argtypes = None, [ctypes.py_object]
_let_go = ctypes.pythonapi.Py_DecRef
_let_go.restype, _let_go.argtypes = None, [ctypes.py_object]


class MemorySource:
    """Bytes of the program's own as a source of :meth:`vbar.Bar.bind`, beside files.

    The object is kept alive until the VBAR was closed and the last copy of its bytes is done. Its
    bytes must not change while the VBAR is bound: what is resident would not follow.

    Args:
        source: anything with contiguous bytes in the host's memory: what has the buffer protocol
            (``bytes``, ``bytearray``, ``mmap``, arrays of NumPy), a tensor of torch on the CPU,
            pinned ones too, or what has an ``__array_interface__``.
        page_locked: ``True`` where it must be page-locked, so that the device reads it directly;
            else that is found out. Other memory goes through the library's own.

    Raises:
        InvalidArgument: there are no such bytes, or they are not contiguous.
    """

    __slots__ = ("_source", "_page_locked", "_buffer", "_address", "nbytes")

    def __init__(self, source: Any, page_locked: bool = False) -> None:
        self._source, self._page_locked = source, bool(page_locked)
        self._buffer: _Buffer | None = None
        #: Length in bytes.
        self.nbytes: int = 0
        self._address, self.nbytes = self._find()

    def _find(self) -> tuple[int, int]:
        source = self._source
        if callable(getattr(source, "data_ptr", None)):
            return _tensor_bytes(source)
        buffer = _Buffer()
        try:
            _get_buffer(source, buffer, _SIMPLE)
        except TypeError:
            interface = getattr(source, "__array_interface__", None)
            if not isinstance(interface, dict):
                text = f"{type(source).__name__} has no bytes in the host's memory"
                raise InvalidArgument(text) from None
            return _interface_bytes(interface)
        except (BufferError, ValueError) as error:
            raise InvalidArgument(f"{type(source).__name__} is not contiguous: {error}") from None
        self._buffer = buffer
        return buffer.buf or 0, buffer.len

    def __del__(self, release: Any = _release_buffer) -> None:
        buffer = getattr(self, "_buffer", None)
        if buffer is not None:
            self._buffer = None
            release(buffer)

    def __repr__(self) -> str:
        return f"<vbar.MemorySource {self.nbytes} bytes at {self._address:#x}>"


def _tensor_bytes(tensor: Any) -> tuple[int, int]:
    device = getattr(getattr(tensor, "device", None), "type", "cpu")
    if device != "cpu":
        raise InvalidArgument(f"a tensor on {device} has no bytes in the host's memory")
    if not tensor.is_contiguous():
        raise InvalidArgument("the tensor is not contiguous")
    return tensor.data_ptr(), tensor.nbytes


def _interface_bytes(interface: dict[str, Any]) -> tuple[int, int]:
    data, kind = interface.get("data"), interface.get("typestr")
    if not (isinstance(data, tuple) and isinstance(data[0], int) and isinstance(kind, str)):
        raise InvalidArgument("the __array_interface__ has no address")
    if interface.get("strides") is not None:
        raise InvalidArgument("the array is not contiguous")
    digits = kind[2:]
    nbytes = int(digits) if digits.isdigit() else 0
    for extent in interface.get("shape", ()):
        nbytes *= unsigned(extent, "an extent")
    return data[0], nbytes


class Kept:
    """A source that the library reads, and the flag that is raised when it does not any more."""

    __slots__ = ("source", "flag")

    def __init__(self, source: MemorySource) -> None:
        self.source, self.flag = source, ctypes.c_uint32()


_kept: list[Kept] = []


def give(lib: ctypes.CDLL, told: _abi.BindSource, source: MemorySource) -> Kept:
    """Describes a source to the library and keeps it, until the library raises the flag: whatever
    becomes of the call that it is for. Where that is not made it is to be taken back.
    """
    kept = Kept(source)
    told.memory, told.memory_bytes = source._address, source.nbytes
    told.host_lock = _abi.HOST_LOCK_REQUIRED if source._page_locked else _abi.HOST_LOCK_EITHER
    told.release = ctypes.cast(lib.vbar_flag_raise, ctypes.c_void_p)
    told.context = ctypes.addressof(kept.flag)
    # Modules lose what they have when Python ends, and threads of the library may still copy.
    _keep(kept)
    _kept.append(kept)
    return kept


def take_back(given: Iterable[Kept]) -> None:
    """Lets go of sources that were given to no call, or are not read any more."""
    for kept in given:
        try:
            _kept.remove(kept)
        except ValueError:
            # Another thread did.
            continue
        _let_go(kept)


def let_go() -> None:
    """Lets go of what the library does not read any more."""
    if _kept:
        take_back([kept for kept in _kept if kept.flag.value])
