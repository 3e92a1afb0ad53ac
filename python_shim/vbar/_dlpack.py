"""Views of guarded bytes for other libraries: DLPack and ``__cuda_array_interface__``.

Every export faults the bytes once more, for the consumer's stream: a hit, which orders that stream
behind the fill and gives the export pins of its own. A DLPack export keeps them until its consumer
is done with it; its deleter is the library's and needs no Python. ``__cuda_array_interface__`` has
no such end, so the view keeps them, as consumers keep the view.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import threading
from typing import TYPE_CHECKING, Any, Sequence

from . import _abi, _library
from ._call import call_often
from ._dtypes import Dtype
from ._errors import GuardReleased, InvalidArgument
from ._sizes import unsigned
from ._unshared import Unshared

if TYPE_CHECKING:
    from ._guard import Guard, Pins

_DEVICE_CUDA = 2
_LEGACY_STREAM = 1
_PER_THREAD_STREAM = 2
_NO_ORDERING = -1


class View(Unshared):
    """Guarded bytes as a tensor, with rows behind each other. Made by :meth:`vbar.Guard.view`.

    It exports while its guard is held; what it exported before outlives both::

        with model.fault("layers.0.weight") as weight:
            if weight:
                tensor = torch.from_dlpack(weight.view())

    DLPack has all types but the 6-bit ones; ``F4`` goes as pairs, with half the elements in the
    last dimension. ``__cuda_array_interface__`` has the types that NumPy has: not bfloat16 and not
    the 8-bit floats. Bytes of a file are exported read-only; torch's ``as_tensor`` refuses that,
    its ``from_dlpack`` does not.
    """

    __slots__ = ("_guard", "_pins", "_lock", "dtype", "shape", "__weakref__")

    _guard: Guard
    _pins: Pins | None
    _lock: threading.Lock
    dtype: Dtype
    #: Elements in each dimension, the slowest first.
    shape: tuple[int, ...]

    def __init__(self) -> None:
        raise TypeError("views are made by Guard.view")

    @classmethod
    def _of(cls, guard: Guard, dtype: Any, shape: Sequence[int] | int | None) -> View:
        view = object.__new__(cls)
        view._pins, view._lock = None, threading.Lock()
        view._guard = guard
        view.dtype = _dtype_for(guard, dtype)
        view.shape = _shape_for(guard, view.dtype, shape)
        if guard.address % max(view.dtype.bits // 8, 1):
            raise InvalidArgument(f"{guard.address:#x} is not aligned for {view.dtype}")
        return view

    def __repr__(self) -> str:
        return f"<vbar.View {self.dtype} {list(self.shape)} of {self._guard!r}>"

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device type and the ordinal."""
        return _DEVICE_CUDA, self._guard._device.ordinal

    def __dlpack__(
        self,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule for a consumer that works on ``stream``, as the array API standard says.

        Args:
            stream: the handle; ``None`` and 1 are the legacy default stream, 2 the thread's; -1
                asks for no ordering.
            max_version: the version that the consumer knows; from 1.0 on the capsule is versioned.
            dl_device: where it is wanted, which can only be where it is.
            copy: ``True`` cannot be had.

        Raises:
            GuardReleased: the guard's pins were given back. A ``BufferError``.
            BufferError: it was asked for a copy, or on another device.
            Unsupported: DLPack does not have the type.
        """
        self._guard._check_held()
        if copy:
            raise BufferError("a view of a VBAR is never a copy")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the bytes are on {self.__dlpack_device__()}, not on {dl_device}")
        versioned = max_version is not None and max_version[0] >= 1
        return self._export(self._stream_for(stream), versioned)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3. Pins the bytes until the view is dropped, which consumers do when done.

        Raises:
            AttributeError: NumPy has no such type; DLPack has.
            GuardReleased: the guard's pins were given back.
        """
        typestr = self.dtype.typestr
        if typestr is None:
            raise AttributeError(
                f"__cuda_array_interface__ has no type for {self.dtype}: take it by DLPack, or "
                "view it as unsigned integers of its size"
            )
        guard = self._guard
        self._pin()
        stream = guard._stream
        return {
            "shape": self.shape,
            "typestr": typestr,
            "data": (guard.address, not guard._writable),
            "strides": None,
            "stream": _interface_stream(stream),
            "version": 3,
        }

    def _pin(self) -> None:
        with self._lock:
            if self._pins is None:
                self._guard._check_held()
                pins = _fault_again(self._guard, self._guard._stream)
                # For when the view is dropped.
                pins.own(_library.load().vbar_token_unpin, _lasting(self._guard))
                pins.stream_owner = self._guard._stream_owner
                self._pins = pins

    def _stream_for(self, stream: int | None) -> int:
        if stream is None:
            return _LEGACY_STREAM
        number = operator.index(stream)
        if number == _NO_ORDERING:
            return self._guard._stream
        if not 0 < number < _abi.STREAM_NONE:
            raise InvalidArgument(
                f"stream is {number}: a handle, 1, 2, -1 or None is expected; 0 is ambiguous"
            )
        return number

    def _export(self, stream: int, versioned: bool) -> Any:
        capsules = _known_capsules()
        count = len(self.shape)
        described = _abi.DlpackTensor(
            size=ctypes.sizeof(_abi.DlpackTensor),
            address=self._guard.address,
            shape=(ctypes.c_uint64 * count)(*self.shape) if count else None,
            rank=count,
            dtype=self.dtype,
            form=_abi.DLPACK_VERSIONED if versioned else _abi.DLPACK_UNVERSIONED,
            access=_abi.DLPACK_WRITABLE if self._guard._writable else _abi.DLPACK_READ_ONLY,
        )
        # Made first, of nothing: it owns the tensor from the call that exports it on.
        capsule = capsules.new()
        fault = _fault_again(self._guard, stream)
        try:
            call_often(capsules.export, fault.token, stream, described, capsule)
            # The tensor has it.
            fault.forget()
        except BaseException:
            # A type that does not go, or a signal's handler that raised, before the call or after
            # it. Not at some later time: what is raised has this frame. Should another handler
            # raise in here, they go with the frame.
            del capsule
            fault.release()
            raise
        return capsule


def _dtype_for(guard: Guard, dtype: Any) -> Dtype:
    if dtype is None:
        if guard.tensor is None:
            raise InvalidArgument("a type is needed: these bytes have none of their own")
        dtype = guard.tensor.dtype
    found = Dtype.of(dtype)
    if not found.bits:
        raise InvalidArgument(f"elements of type {found} have no size that is known")
    return found


def _shape_for(guard: Guard, dtype: Dtype, shape: Sequence[int] | int | None) -> tuple[int, ...]:
    if shape is None:
        tensor = guard.tensor
        if tensor is not None and tensor.dtype.bits == dtype.bits:
            return tensor.shape
        elements, rest = divmod(guard.nbytes * 8, dtype.bits)
        if rest:
            raise InvalidArgument(f"{guard.nbytes} bytes are no whole number of {dtype}")
        return (elements,)
    # Python's own numbers from here on: those of other libraries overflow.
    try:
        given: Sequence[Any] = (operator.index(shape),)  # type: ignore[arg-type]
    except TypeError:
        given = shape  # type: ignore[assignment]
    counts = tuple(unsigned(count, "a count of the shape") for count in given)
    elements = math.prod(counts)
    if elements * dtype.bits > guard.nbytes * 8:
        raise InvalidArgument(
            f"{dtype} {list(counts)} needs {(elements * dtype.bits + 7) // 8} bytes, "
            f"the guard has {guard.nbytes}"
        )
    return counts


def _fault_again(guard: Guard, stream: int) -> Pins:
    """Pins of their own for what a guard holds; not resident only when it was let go meanwhile."""
    fault = guard._fault_again(stream)
    if fault.outcome != _abi.OUTCOME_RESIDENT:
        fault.release()
        raise GuardReleased("the bytes went, or were declared no good, while they were exported")
    return fault


def _interface_stream(stream: int) -> int | None:
    """``__cuda_array_interface__`` forbids 0; without a stream the bytes are there already."""
    if stream == _abi.STREAM_NONE:
        return None
    return stream or _LEGACY_STREAM


def _lasting(guard: Guard) -> int:
    """The guard's stream if it is certain to live, now that the guard may be gone; else none."""
    stream, owner = guard._stream, guard._stream_owner
    is_object = owner is not None and not hasattr(owner, "__index__")
    return stream if stream <= _PER_THREAD_STREAM or is_object else _abi.STREAM_NONE


class _Capsules:
    """Python's own functions, and the library's that are called with Python's lock held."""

    __slots__ = ("_new", "_name", "export")

    def __init__(self, library: ctypes.CDLL) -> None:
        # Not ``ctypes.pythonapi``, whose signatures everybody may set.
        python = ctypes.PyDLL(None)
        names = ("IsValid", "GetPointer", "SetPointer", "SetName")
        functions = (getattr(python, f"PyCapsule_{name}") for name in names)
        addresses = (ctypes.cast(function, ctypes.c_void_p) for function in functions)
        call_often(library.vbar_dlpack_set_capsule_functions, *addresses)
        destructor = ctypes.cast(library.vbar_dlpack_capsule_destructor, ctypes.c_void_p)
        python.PyCapsule_New.restype = ctypes.py_object
        python.PyCapsule_New.argtypes = [ctypes.c_void_p] * 3
        self._name = _lasting_text(python, b"vbar_dlpack_empty")
        # It must point to something.
        self._new = functools.partial(python.PyCapsule_New, self._name, self._name, destructor)
        holding = ctypes.PyDLL(library._name, handle=library._handle)
        self.export = holding.vbar_dlpack_export_capsule
        _, [*others, _] = _abi.FUNCTIONS["vbar_dlpack_export_capsule"]
        self.export.argtypes = [*others, ctypes.py_object]

    def new(self) -> Any:
        """A capsule that holds nothing, and whose destructor knows it."""
        return self._new()


_capsules: _Capsules | None = None


def _known_capsules() -> _Capsules:
    global _capsules
    capsules = _capsules
    if capsules is None:
        capsules = _capsules = _Capsules(_library.load())
    return capsules


def _lasting_text(python: ctypes.PyDLL, text: bytes) -> int:
    """Address of a C string that outlives the interpreter, as the capsules named by it may."""
    buffer = ctypes.create_string_buffer(text)
    python.Py_IncRef(ctypes.py_object(buffer))
    return ctypes.addressof(buffer)
