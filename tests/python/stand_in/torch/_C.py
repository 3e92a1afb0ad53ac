"""As torch._C: the plug-in's object, and the current allocator."""

import ctypes
import os
import sys

_library = ctypes.CDLL(os.environ["STAND_IN_LIBRARY"]) if "STAND_IN_LIBRARY" in os.environ else None
_current = None
#: Whether the native allocator was used.
_native_initialized = False
_cudnn_benchmark = False
#: What torch.jit.trace has while it traces.
_tracing_state = None

_TEXT_BYTES = 4096
_SETTERS = {
    "set_init_fn": "init",
    "set_reset_fn": "reset",
    "set_memory_fraction_fn": "fraction",
    "set_base_alloc_fn": "base_alloc",
    "set_record_stream_fn": "record_stream",
    "set_begin_allocate_to_pool": "begin",
    "set_end_allocate_to_pool_fn": "end",
    "set_release_pool": "release",
}


class _CUDAPluggableAllocator:
    def __init__(self, malloc, free):
        assert isinstance(malloc, int) and isinstance(free, int)
        self.hooks = {"malloc": malloc, "free": free}
        self._free = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        )(free)

    def _call(self, name, *arguments):
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        ended = getattr(_library, f"stand_in_{name}")(*arguments, text, _TEXT_BYTES)
        if ended == 1:
            raise sys.modules["torch"].OutOfMemoryError(text.value.decode())
        if ended == 2:
            raise RuntimeError(text.value.decode())

    def malloc(self, nbytes, device, stream):
        result = ctypes.c_void_p()
        function = ctypes.c_void_p(self.hooks["malloc"])
        stream, size = ctypes.c_void_p(stream), ctypes.c_size_t(nbytes)
        self._call("malloc", function, size, device, stream, ctypes.byref(result))
        return result.value or 0

    def free(self, address, nbytes, device, stream):
        self._free(address, nbytes, device, stream)

    def init(self, count):
        if "init" in self.hooks:
            self._call("init", ctypes.c_void_p(self.hooks["init"]), count)

    def reset(self):
        if "reset" in self.hooks:
            self._call("reset", ctypes.c_void_p(self.hooks["reset"]))

    def fraction(self, fraction, device):
        if "fraction" in self.hooks:
            function = ctypes.c_void_p(self.hooks["fraction"])
            self._call("fraction", function, ctypes.c_double(fraction), device)

    def record(self, address, stream):
        if "record_stream" in self.hooks:
            function = ctypes.c_void_p(self.hooks["record_stream"])
            self._call("record", function, ctypes.c_void_p(address), ctypes.c_void_p(stream))


def _setter(hook):
    def set_hook(self, function):
        assert isinstance(function, int) and function
        self.hooks[hook] = function

    return set_hook


for _name, _hook in _SETTERS.items():
    if _name not in os.environ.get("STAND_IN_MISSING", "").split(","):
        setattr(_CUDAPluggableAllocator, _name, _setter(_hook))


def _cuda_customAllocator(malloc, free):
    return _CUDAPluggableAllocator(malloc, free)


def _cuda_changeCurrentAllocator(allocator):
    global _current
    if _native_initialized or _current is not None:
        raise RuntimeError("Can't swap an already initialized allocator")
    _current = allocator


def _get_tracing_state():
    return _tracing_state


def _get_cudnn_benchmark():
    return _cudnn_benchmark


def _set_cudnn_benchmark(on):
    global _cudnn_benchmark
    _cudnn_benchmark = on


def _read_settings():
    """What PyTorch does when it first looks at its allocator's settings, which some versions do when
    host memory is first pinned.
    """
    name = "pluggable" if _current is not None else "native"
    for setting in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "").split(","):
        key, _, value = setting.partition(":")
        if key.strip() == "backend" and value.strip() != name:
            raise RuntimeError(
                "Allocator backend parsed at runtime != allocator backend parsed at load time, "
                f"{value} != {name}"
            )
