"""Finding the library, and its ABI version before anything else."""

import pathlib
import subprocess
import unittest

import vbar
from support import ROOT, Case, check_program, run_program
from vbar import _abi

LOAD = """
    import sys, vbar
    from vbar import _abi
    _abi.ABI_VERSION += int(sys.argv[1])
    try:
        vbar.Device("sim")
    except vbar.AbiError as error:
        assert isinstance(error, ImportError) and isinstance(error, vbar.Error)
        print(error)
"""


class Library(Case):
    def make(self, abi_version, names):
        """A library whose every function but the version's ends the process."""
        source = self.folder / "fake.c"
        functions = [f"void {name}(void) {{ abort(); }}\n" for name in names]
        source.write_text(
            "#include <stdint.h>\n#include <stdlib.h>\n"
            f"uint32_t vbar_abi_version(void) {{ return {abi_version}; }}\n" + "".join(functions)
        )
        library = self.folder / "libfake.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        return library

    def test_the_library_answers(self):
        self.assertRegex(vbar.version(), r"^\d+\.\d+\.\d+$")
        self.assertEqual(vbar.__version__, vbar.version())
        self.assertEqual(vbar.status_text(0), "ok")
        self.assertEqual(vbar.status_text(-5), "unknown status")

    def test_the_version_is_that_of_cargo_toml(self):
        manifest = (ROOT / "Cargo.toml").read_text()
        self.assertIn(f'\nversion = "{vbar.version()}"\n', manifest)

    def test_scenario_25_another_abi_is_refused_before_any_other_call(self):
        others = [name for name in _abi.FUNCTIONS if name != "vbar_abi_version"]
        fake = self.make(vbar.ABI_VERSION, others)
        # The package is of the next ABI, the library of this one.
        said = check_program(self, LOAD, 1, VBAR_LIBRARY=str(fake))
        self.assertRegex(said, f"has ABI {vbar.ABI_VERSION}, .* needs {vbar.ABI_VERSION + 1}")
        # The other way round.
        said = check_program(self, LOAD, -1, VBAR_LIBRARY=str(fake))
        self.assertRegex(said, f"has ABI {vbar.ABI_VERSION}, .* needs {vbar.ABI_VERSION - 1}")
        # What the test stands on: the next call would have ended the process.
        code, _, _ = run_program(LOAD, 0, VBAR_LIBRARY=str(fake))
        self.assertEqual(code, -6)

    def test_scenario_25_a_function_that_lacks_is_named_before_any_call(self):
        lacking = {"vbar_model_fault", "vbar_token_unpin"}
        fake = self.make(vbar.ABI_VERSION, set(_abi.FUNCTIONS) - lacking - {"vbar_abi_version"})
        said = check_program(self, LOAD, 0, VBAR_LIBRARY=str(fake))
        self.assertRegex(said, "lacks vbar_token_unpin, vbar_model_fault: it is older")

    def test_a_missing_library_is_named(self):
        said = check_program(self, LOAD, 0, VBAR_LIBRARY="/nonexistent/libvbar.so")
        self.assertIn("/nonexistent/libvbar.so is not there", said)

    def test_another_library_is_refused(self):
        libc = next(
            line.split()[-1]
            for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
            if "/libc.so" in line
        )
        said = check_program(self, LOAD, 0, VBAR_LIBRARY=libc)
        self.assertIn(f"{libc} is no vbar library", said)
        text = self.folder / "libtext.so"
        text.write_text("no library at all")
        said = check_program(self, LOAD, 0, VBAR_LIBRARY=str(text))
        self.assertIn(f"{text} is no vbar library", said)

    def test_a_library_is_named_by_its_whole_path(self):
        """A name is looked for, and what is found from the current folder is anybody's."""
        for named in ("libvbar.so", "./libvbar.so", "python_shim/libvbar.so"):
            said = check_program(self, LOAD, 0, VBAR_LIBRARY=named)
            self.assertIn(f"VBAR_LIBRARY is {named}: name the library by its whole path", said)

    def test_a_privileged_process_takes_no_library_from_its_environment(self):
        program = """
            import pathlib
            from vbar import _library
            _library._is_privileged = lambda: True
            print(_library._path() == str(pathlib.Path(_library.__file__).parent / "libvbar.so"))
        """
        said = check_program(self, program, VBAR_LIBRARY="/tmp/another.so")
        self.assertEqual(said.strip(), "True")

    def test_the_package_is_imported_without_the_library(self):
        program = "import vbar; print(vbar.NO_STREAM, vbar.Device, vbar.Reason.BUDGET)"
        check_program(self, program, VBAR_LIBRARY="/nonexistent/libvbar.so")

    def test_the_first_calls_of_many_threads_load_it_once(self):
        program = """
            import threading, vbar
            found = set()
            def load(): found.add(id(vbar.load()))
            threads = [threading.Thread(target=load) for _ in range(8)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            print(len(found))
        """
        self.assertEqual(check_program(self, program), "1\n")


if __name__ == "__main__":
    unittest.main()
