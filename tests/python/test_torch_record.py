"""Records of what PyTorch asks for, and their replay, against the stand-in for PyTorch."""

import gzip
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from support import MIB, ROOT
from test_torch_install import START, Case, Stand
from test_torch_install import setUpModule, tearDownModule  # noqa: F401

REPLAY = ROOT / "benches/torch_replay.py"
#: With room for the headroom.
DRIVER = "sim:capacity=1G"


class Record(Case):
    def test_what_is_asked_for_within_is_written(self):
        self.check("""
            import pathlib, tempfile
            path = pathlib.Path(tempfile.mkdtemp()) / "trace"
            lives = torch.empty(700, device="cuda")
            try:
                with vbar.torch.record(path):
                    one = torch.empty(3 * MIB, device="cuda")
                    refused(vbar.InvalidArgument, str(path), vbar.torch.record(path).__enter__)
                    del one
                    two = torch.empty(1, device="cuda")
                    torch.empty(0, device="cuda")
                    raise KeyError
            except KeyError:
                pass
            del lives
            text = "malloc 1 700 0\\nmalloc 2 3145728 0\\nfree 2\\nmalloc 3 1 0\\n"
            assert path.read_text() == text, path.read_text()
            with vbar.torch.record(path, ordinal=0):
                pass
            assert path.read_text() == "malloc 1 1 0\\n", path.read_text()
        """)

    def test_what_cannot_be_written_is_said(self):
        self.check("""
            refused(vbar.FileError, "/nowhere", vbar.torch.record("/nowhere/x").__enter__)
            full = vbar.torch.record("/dev/full")
            full.__enter__()
            torch.empty(1, device="cuda")
            refused(vbar.FileError, "/dev/full", full.__exit__, None, None, None)
        """)

    def test_without_the_allocator_there_is_nothing_to_record(self):
        self.check("""
            refused(vbar.torch.NotInUse, "history_to_trace", vbar.torch.record("x").__enter__)
        """, start=START)

    def test_a_history_of_pytorchs_becomes_a_trace(self):
        self.check("""
            import pathlib, tempfile
            path = pathlib.Path(tempfile.mkdtemp()) / "trace"
            def entry(action, addr, size, stream):
                return dict(action=action, addr=addr, size=size, stream=stream, time_us=1)
            trace = [
                entry("free_requested", 512, 100, 0), entry("free_completed", 512, 100, 0),
                entry("segment_alloc", 512, 2 * MIB, 0), entry("alloc", 512, 100, 0),
                entry("alloc", 1024, 7, 0xbeef), entry("free_requested", 512, 100, 0),
                entry("free_completed", 512, 100, 0), entry("alloc", 512, 8, 0xfeed),
                dict(action="oom", device_free=1, size=9, stream=0),
                entry("free_requested", 1024, 7, 0xbeef),
            ]
            snapshot = dict(device_traces=[[], trace])
            assert vbar.torch.history_to_trace(snapshot, path, ordinal=1) == 5
            text = "malloc 1 100 0\\nmalloc 2 7 1\\nfree 1\\nmalloc 3 8 2\\nfree 2\\n"
            assert path.read_text() == text, path.read_text()
            assert vbar.torch.history_to_trace(snapshot, path) == 0 and path.read_text() == ""
            for ordinal in (2, -1):
                refused(vbar.InvalidArgument, "2 devices", vbar.torch.history_to_trace, snapshot,
                        path, ordinal=ordinal)
        """, start=START)


class Replay(unittest.TestCase):
    def replay(self, text, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "trace.txt.gz"
            path.write_bytes(gzip.compress(text.encode()))
            command = [sys.executable, REPLAY, "--json", "--with", "vbar", "--driver", DRIVER]
            environment = dict(os.environ, **Stand.environment())
            return subprocess.run(
                [*command, *arguments, path], env=environment, capture_output=True, text=True
            )

    def test_a_trace_is_replayed_and_measured(self):
        text = "# a comment\nmalloc 1 20971520 0\nmalloc 2 5 0 # small\nfree 1\n"
        ended = self.replay(text, "--tight")
        self.assertEqual(ended.returncode, 0, ended.stderr)
        (found,) = json.loads(ended.stdout)
        self.assertEqual((found["events"], found["live_peak_bytes"]), (3, 20 * MIB + 5))
        held = found["reserved_peak_bytes"]
        self.assertTrue(20 * MIB < held <= 64 * MIB, held)
        self.assertEqual(found["utilisation"], (20 * MIB + 5) / held)

    def test_what_is_no_trace_fails(self):
        self.assertNotEqual(self.replay("malloc 1\n").returncode, 0)


if __name__ == "__main__":
    unittest.main()
