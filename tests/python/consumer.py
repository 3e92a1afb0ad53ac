"""A consumer of DLPack written against dlpack.h, as other libraries are; it trusts nothing."""

import ctypes


class Dtype(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", Dtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", Deleter)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


_python = ctypes.PyDLL(None)
_python.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_python.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_void_p]

_KINDS = {b"dltensor_versioned": ManagedVersioned, b"dltensor": Managed}
# They outlive the capsules that are named by them.
_USED = {name: ctypes.create_string_buffer(b"used_" + name) for name in _KINDS}


class Consumed:
    """A tensor taken out of a capsule; ``delete`` is what its end does."""

    def __init__(self, capsule):
        for name, kind in _KINDS.items():
            if _python.PyCapsule_IsValid(capsule, name):
                self.pointer = _python.PyCapsule_GetPointer(capsule, name)
                self.managed = kind.from_address(self.pointer)
                used = ctypes.addressof(_USED[name])
                assert _python.PyCapsule_SetName(capsule, used) == 0
                break
        else:
            raise ValueError(f"{capsule!r} is no capsule that nobody has consumed")
        self.versioned = name == b"dltensor_versioned"
        tensor = self.managed.tensor
        self.data, self.ndim = tensor.data or 0, tensor.ndim
        self.device = (tensor.device_type, tensor.device_id)
        self.dtype = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
        self.shape = tuple(tensor.shape[: self.ndim])
        self.strides = tuple(tensor.strides[: self.ndim])
        assert tensor.byte_offset == 0

    def delete(self):
        self.managed.deleter(self.pointer)
        self.managed = None
