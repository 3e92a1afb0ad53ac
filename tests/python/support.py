"""What the tests of the package share: a small simulated device, model files, subprocesses.

Every test opens a device of its own: simulated devices of different names share nothing.
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
import vbar.sim
from vbar._call import call

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


class Sim(vbar.sim.Sim):
    """As tests here like it: a stream is a number, and there until somebody destroys it."""

    def _call(self, name, *arguments):
        call(getattr(self._lib, f"vbar_sim_stream_{name}"), self._device, *arguments)

    def stream(self):
        stream = ctypes.c_size_t()
        self._call("create", stream)
        return stream.value

    def destroy(self, stream):
        self._call("destroy", stream)

    def synchronize(self, stream):
        self._call("synchronize", stream)

    @contextlib.contextmanager
    def held(self, stream):
        self._call("hold", stream)
        try:
            yield
        finally:
            self._call("release", stream)

    def violations(self):
        return len(super().violations())


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
