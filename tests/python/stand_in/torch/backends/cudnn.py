"""As torch.backends.cudnn: a module whose attributes call setters that were bound at import."""

import contextlib
import sys
import types

from .. import _C


class ContextProp:
    def __init__(self, getter, setter):
        self.getter, self.setter = getter, setter

    def __get__(self, owner, kind):
        return self.getter()

    def __set__(self, owner, value):
        self.setter(value)


class CudnnModule(types.ModuleType):
    benchmark = ContextProp(_C._get_cudnn_benchmark, _C._set_cudnn_benchmark)

    @staticmethod
    @contextlib.contextmanager
    def flags(benchmark=False):
        before = _C._get_cudnn_benchmark()
        _C._set_cudnn_benchmark(benchmark)
        try:
            yield
        finally:
            _C._set_cudnn_benchmark(before)


sys.modules[__name__] = CudnnModule(__name__)
