"""A stand-in for PyTorch: what vbar.torch touches of it, behaving as PyTorch 2.11 was seen to.

There is no native allocator in it: tensors exist only while a plug-in is the allocator. Settings
come by the environment:

    STAND_IN_LIBRARY  what calls plug-in functions and catches C++ (tests/abi/torch/stand_in.cpp)
    STAND_IN_C10      libraries to load before, as importing torch does, with colons between
    STAND_IN_VERSION  the version
    STAND_IN_MISSING  names that the plug-in's object lacks, with commas between
    STAND_IN_DEVICES  how many CUDA devices there are
"""

import ctypes
import os

from . import _dense
from ._dense import (  # noqa: F401
    DTYPES,
    arange,
    as_tensor,
    device,
    dtype,
    empty_like,
    equal,
    frombuffer,
    full,
    inference_mode,
    is_grad_enabled,
    manual_seed,
    no_grad,
    randn,
    tensor,
)

globals().update(DTYPES)
float32 = DTYPES["float32"]

__version__ = os.environ.get("STAND_IN_VERSION", "2.11.0+cu130")

#: As libtorch_python's dependencies are: by a path, and for nobody else.
_loaded = [
    ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    for path in os.environ.get("STAND_IN_C10", "").split(":")
    if path
]

class OutOfMemoryError(RuntimeError):
    """As torch's."""


class Tensor(_dense.Dense):
    """Bytes of the current allocator, or numbers: those of `_dense`."""

    def __init__(self, nbytes, index):
        cuda.init()
        self._plug = _C._current
        if self._plug is None:
            raise NotImplementedError("the stand-in has no allocator of its own")
        self._where = (nbytes, index, cuda.current_stream(index).cuda_stream)
        self._address = self._plug.malloc(*self._where)

    def data_ptr(self):
        return self._address if hasattr(self, "_address") else super().data_ptr()

    def record_stream(self, stream):
        if not hasattr(self, "_address"):
            return super().record_stream(stream)
        self._plug.record(self._address, stream.cuda_stream)

    def __del__(self):
        if getattr(self, "_address", None):
            self._plug.free(self._address, *self._where)


def empty(nbytes, *, dtype=None, device=None):
    if isinstance(nbytes, tuple):
        return _dense.empty(nbytes, dtype or float32, device)
    given = globals()["device"](device)
    return Tensor(nbytes, given.index or 0)


_dense.Tensor = Tensor

from . import (  # noqa: E402,F401
    _C,
    _guards,
    accelerator,
    backends,
    compiler,
    cuda,
    library,
    nn,
    utils,
)
from .library import ops  # noqa: E402,F401


class _TorchCompileInductorWrapper:
    """As torch.compile's backend: it compiles nothing, and returns the settings it would use."""

    def __init__(self, config):
        self.config = config

    def __call__(self, model_, inputs_):
        return self.config


class Tag:
    flexible_layout, cudagraph_unsafe = "flexible_layout", "cudagraph_unsafe"
