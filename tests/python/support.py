"""What the tests of the package share: a small simulated device, model files, subprocesses.

``Sim`` is the part of ``vbar_sim.h`` that the tests need. Every test opens a device of its own:
simulated devices of different names share nothing.
"""

import contextlib
import ctypes
import itertools
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import textwrap
import unittest

import vbar

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIB = 1 << 20
PAGE = 2 * MIB

_seeds = itertools.count(1)


def spec(**options):
    """A simulated device that no other test has: each text of options is a device of its own."""
    told = {"capacity": "64M", **options}
    # Faster than the host, so that it is a name and nothing else.
    told["bandwidth"] = told.get("bandwidth", 10**12 + next(_seeds))
    return "sim:" + ",".join(f"{key}={value}" for key, value in told.items())


def open_device(driver=None, **options):
    """A simulated device with pages of 2 MiB, no headroom and no threads."""
    told = {"headroom": 0, "page_size": PAGE, "threads": False, **options}
    return vbar.Device(driver or spec(), **told)


def write_model(path, tensors, metadata=None):
    """Writes a safetensors file: of each tensor its type, its shape and its bytes."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += raw
    if metadata is not None:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    return path


def pattern(nbytes, seed=1):
    """Bytes that no other seed has."""
    return random.Random(seed).randbytes(nbytes)


class Case(unittest.TestCase):
    """A test with a folder of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def model_of(self, tensors, **rest):
        return write_model(self.folder / "model.safetensors", tensors, **rest)


class Sim:
    """The simulated device behind a device: its streams, and its memory from outside."""

    def __init__(self, device):
        self._device = device._id
        self._lib = vbar.load()
        for name, arguments in _SIM_FUNCTIONS.items():
            function = getattr(self._lib, name)
            function.restype, function.argtypes = ctypes.c_int32, arguments
        self._lib.vbar_sim_checksum.restype = ctypes.c_uint64
        self._lib.vbar_sim_checksum.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        sim = ctypes.c_uint64()
        self._call("vbar_sim_open", self._device, sim)
        self._sim = sim.value

    def _call(self, name, *arguments):
        status = getattr(self._lib, name)(*arguments)
        if status:
            raise AssertionError(f"{name}: {self._lib.vbar_last_message().decode()}")

    def stream(self):
        stream = ctypes.c_size_t()
        self._call("vbar_sim_stream_create", self._device, stream)
        return stream.value

    def destroy(self, stream):
        self._call("vbar_sim_stream_destroy", self._device, stream)

    def synchronize(self, stream):
        self._call("vbar_sim_stream_synchronize", self._device, stream)

    @contextlib.contextmanager
    def held(self, stream):
        self._call("vbar_sim_stream_hold", self._device, stream)
        try:
            yield
        finally:
            self._call("vbar_sim_stream_release", self._device, stream)

    def write(self, address, data, stream):
        """Enqueues a copy to the device, and waits for it."""
        source = ctypes.create_string_buffer(data, len(data))
        self._call("vbar_sim_copy_to_device", self._device, address, source, len(data), stream)
        self.synchronize(stream)

    def read(self, address, nbytes, stream):
        """Enqueues a copy to the host, and waits for it: what work on the stream sees."""
        target = ctypes.create_string_buffer(nbytes)
        self._call("vbar_sim_copy_to_host", self._device, target, address, nbytes, stream)
        self.synchronize(stream)
        return target.raw

    def launch_read(self, source, nbytes, target, stream):
        """Enqueues a kernel that reads, and adds a checksum to the word at a device address."""
        self._call("vbar_sim_launch_checksum", self._device, source, nbytes, target, 0, stream)

    def checksum(self, data):
        """What that kernel adds."""
        return self._lib.vbar_sim_checksum(data, len(data))

    def peek(self, address, nbytes):
        """The bytes at a mapped address, whatever streams do."""
        target = ctypes.create_string_buffer(nbytes)
        self._call("vbar_sim_peek", self._sim, address, target, nbytes)
        return target.raw

    def lose(self, code=719):
        self._call("vbar_sim_lose_device", self._sim, code)

    def fail(self, verb, skip=0, count=1, code=2):
        self._call("vbar_sim_fail", self._sim, verb.encode(), skip, count, code)

    def live(self):
        live = _Live(size=ctypes.sizeof(_Live))
        self._call("vbar_sim_live", self._sim, live)
        return live

    def calls(self, verb):
        count = ctypes.c_uint64()
        self._call("vbar_sim_calls", self._sim, verb.encode(), count)
        return count.value

    def violations(self):
        count = ctypes.c_uint64()
        self._call("vbar_sim_violation_count", self._sim, count)
        return count.value


class _Live(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("frame_count", ctypes.c_uint64),
        ("used_bytes", ctypes.c_uint64),
        ("reservation_count", ctypes.c_uint64),
        ("reserved_bytes", ctypes.c_uint64),
        ("mapping_count", ctypes.c_uint64),
        ("locked_bytes", ctypes.c_uint64),
        ("event_count", ctypes.c_uint64),
        ("stream_count", ctypes.c_uint64),
    ]


_u64, _size, _pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
_SIM_FUNCTIONS = {
    "vbar_sim_open": [_u64, ctypes.POINTER(_u64)],
    "vbar_sim_stream_create": [_u64, ctypes.POINTER(_size)],
    "vbar_sim_stream_destroy": [_u64, _size],
    "vbar_sim_stream_synchronize": [_u64, _size],
    "vbar_sim_stream_hold": [_u64, _size],
    "vbar_sim_stream_release": [_u64, _size],
    "vbar_sim_copy_to_device": [_u64, _u64, _pointer, _size, _size],
    "vbar_sim_copy_to_host": [_u64, _pointer, _u64, _size, _size],
    "vbar_sim_launch_checksum": [_u64, _u64, _u64, _u64, _u64, _size],
    "vbar_sim_peek": [_u64, _u64, _pointer, _size],
    "vbar_sim_set_outside_bytes": [_u64, _u64],
    "vbar_sim_lose_device": [_u64, ctypes.c_int32],
    "vbar_sim_fail": [_u64, ctypes.c_char_p, _u64, _u64, ctypes.c_int32],
    "vbar_sim_live": [_u64, ctypes.POINTER(_Live)],
    "vbar_sim_calls": [_u64, ctypes.c_char_p, ctypes.POINTER(_u64)],
    "vbar_sim_violation_count": [_u64, ctypes.POINTER(_u64)],
}


def run_program(text, *arguments, **environment):
    """Runs a program with this interpreter; its exit code, output and error output."""
    path = os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(text), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def check_program(case, text, *arguments, **environment):
    """Runs a program that must end well and say nothing on the error output; what it printed."""
    code, output, errors = run_program(text, *arguments, **environment)
    case.assertEqual((code, errors), (0, ""), output)
    return output
