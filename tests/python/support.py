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
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
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
    header, pieces, end = {}, [], 0
    for name, (dtype, shape, raw) in tensors.items():
        begin, end = end, end + len(raw)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        pieces.append(raw)
    if metadata is not None:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(pieces))
    return path


#: Types of PyTorch as safetensors call them.
_TORCH_NAMES = {
    "torch.float32": "F32",
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.int64": "I64",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}


def write_tensors(path, tensors):
    """Writes a safetensors file of PyTorch's tensors, wherever they are."""
    told = {}
    for name, tensor in tensors.items():
        # As bytes, since not every type is one of NumPy's.
        one = tensor.detach().contiguous().cpu()
        raw = ctypes.string_at(one.data_ptr(), one.nbytes) if one.nbytes else b""
        told[name] = (_TORCH_NAMES[str(tensor.dtype)], tuple(tensor.shape), raw)
    return write_model(path, told)


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
    done = subprocess.run(
        _command(textwrap.dedent(text), arguments),
        env=_environment(environment),
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


def refused(kind, words, call, *arguments, **named):
    """Calls what must raise an exception of a kind with words in its text; that exception."""
    try:
        call(*arguments, **named)
    except kind as error:
        assert words in str(error), f"{words!r} is not in: {error}"
        return error
    raise AssertionError(f"nothing was raised with {words!r}")


def same(found, wanted, what=""):
    """Two tensors of PyTorch's are equal, bit by bit."""
    import torch

    assert torch.equal(found, wanted), f"{what}: {found.flatten()[:8]} {wanted.flatten()[:8]}"


def run(program, *arguments, seconds=200, **environment):
    """Runs a program; how it ended and what it printed, both outputs in their order.

    When its time is over it is killed, and says where it was.
    """
    (result,) = run_together(program, [arguments], seconds, **environment)
    return result


def run_together(program, lists_of_arguments, seconds=200, **environment):
    """Runs a program several times at once; of each how it ended and what it printed.

    When one of them fails the others, which may wait for it for ever, are given a few seconds. Who
    is killed says where it was.
    """
    with contextlib.ExitStack() as stack:
        started = []
        for arguments in lists_of_arguments:
            printed = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                _command(program, arguments),
                env=_environment(environment),
                stdout=printed,
                stderr=subprocess.STDOUT,
            )
            stack.callback(_end, process)
            started.append((process, printed))
        limit = time.monotonic() + seconds
        while any(process.poll() is None for process, _ in started) and time.monotonic() < limit:
            if any(process.returncode for process, _ in started):
                limit = min(limit, time.monotonic() + 5)
            time.sleep(0.05)
        results = []
        for process, printed in started:
            _end(process, said=True)
            printed.seek(0)
            results.append((process.returncode, printed.read().decode(errors="replace")))
        return results


def _end(process, said=False):
    if said and process.poll() is None:
        # Its fault handler prints the stacks of all threads, and ends it, without a core.
        resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    if process.poll() is None:
        process.kill()
        process.wait()


def _command(program, arguments):
    return [sys.executable, "-X", "faulthandler", "-c", program, *map(str, arguments)]


def _environment(changes):
    path = os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])
    return {**os.environ, "PYTHONPATH": path, **changes}
