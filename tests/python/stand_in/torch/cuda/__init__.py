"""As torch.cuda."""

import contextlib
import os
import types

from .. import _C, _dense
from . import memory
from .memory import *  # noqa: F403

_initialized = False


def device_count():
    return int(os.environ.get("STAND_IN_DEVICES", "1"))


def is_available():
    return device_count() > 0


def is_initialized():
    return _initialized


def init():
    global _initialized
    if _initialized:
        return
    _initialized = True
    if _C._current is None:
        _C._native_initialized = True
    else:
        _C._current.init(device_count())


def current_device():
    init()
    return 0


_stream = types.SimpleNamespace(cuda_stream=0)


def current_stream(index=None):
    return _stream


def set_stream(stream):
    global _stream
    _stream = stream


#: The device of vbar whose driver `cudart` is a way to, and streams that `synchronize` waits for;
#: a test sets them.
host_device = None
streams = []
#: Starts of what is registered by `cudart`, and the calls that fail from now on.
registered = set()
failing = 0


class _Cudart:
    """The runtime's calls as PyTorch has them: a number, 0 when all is well."""

    def cudaHostRegister(self, pointer, nbytes, flags):
        global failing
        assert flags == 1
        if failing:
            failing -= 1
            return 2
        host_device.lock_host(pointer, nbytes)
        registered.add(pointer)
        return 0

    def cudaHostUnregister(self, pointer):
        host_device.unlock_host(pointer)
        registered.discard(pointer)
        return 0


def cudart():
    return _Cudart()


def synchronize(device=None):
    for stream in streams:
        stream.synchronize()


#: A test says whether the current stream is being captured.
capturing = False


def is_current_stream_capturing():
    return capturing


class Stream:
    """One of the simulated device's."""

    def __init__(self):
        self._own = _dense.sim.stream()
        self.cuda_stream = self._own.handle

    def synchronize(self):
        self._own.synchronize()

    def wait_stream(self, other):
        # Operations here are done when they return.
        pass


@contextlib.contextmanager
def stream(given):
    before = _stream
    set_stream(given)
    try:
        yield
    finally:
        set_stream(before)


class MemPool:
    def __init__(self, allocator=None, use_on_oom=False, no_split=False):
        init()
        if _C._current is not None:
            memory._refuse("createOrIncrefPool")
        self.allocator, self.use_on_oom, self.no_split = allocator, use_on_oom, no_split


__all__ = ["memory", "MemPool"]
