"""As torch.utils.dlpack, for bytes on a CUDA device: it believes the capsule, and asks nobody."""

import ctypes

from .. import _dense

_python = ctypes.PyDLL(None)
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_python.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
_USED = b"used_dltensor"


class _Managed(ctypes.Structure):
    """dlpack.h's DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    ]


class _Owner:
    def __init__(self, at, managed):
        self.at, self.managed = at, managed

    def __del__(self):
        self.managed.deleter(self.at)


def from_dlpack(capsule):
    at = _python.PyCapsule_GetPointer(capsule, b"dltensor")
    managed = _Managed.from_address(at)
    assert managed.device_type == 2 and managed.ndim == 1 and not managed.strides
    assert (managed.code, managed.bits, managed.lanes) == (1, 8, 1)
    _python.PyCapsule_SetName(capsule, _USED)
    storage = _dense.DeviceStorage(managed.data + managed.byte_offset, _Owner(at, managed))
    where = _dense.device(f"cuda:{managed.device_id}")
    return _dense.make(storage, 0, (managed.shape[0],), _dense.DTYPES["uint8"], where)
