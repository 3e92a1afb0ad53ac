"""The Python shim against the built library, and against what is no library of its ABI."""

import os
import unittest

import vbar


class Shim(unittest.TestCase):
    def setUp(self):
        self.library = os.environ["VBAR_LIBRARY"]
        vbar._library = None

    def tearDown(self):
        os.environ["VBAR_LIBRARY"] = self.library

    def test_the_library_answers(self):
        self.assertRegex(vbar.version(), r"^\d+\.\d+\.\d+$")
        self.assertEqual(vbar.status_text(0), "ok")
        self.assertEqual(vbar.status_text(-5), "unknown status")

    def test_a_missing_library_is_named(self):
        os.environ["VBAR_LIBRARY"] = "/nonexistent/libvbar.so"
        with self.assertRaisesRegex(vbar.AbiError, "/nonexistent/libvbar.so"):
            vbar.load()

    def test_another_library_is_refused(self):
        os.environ["VBAR_LIBRARY"] = "libc.so.6"
        with self.assertRaisesRegex(vbar.AbiError, "no vbar library"):
            vbar.load()

    def test_another_abi_is_refused_before_any_other_call(self):
        wanted = vbar.ABI_VERSION
        self.addCleanup(setattr, vbar, "ABI_VERSION", wanted)
        vbar.ABI_VERSION = wanted + 1
        with self.assertRaisesRegex(vbar.AbiError, f"has ABI {wanted}, .* needs {wanted + 1}"):
            vbar.version()


if __name__ == "__main__":
    unittest.main()
