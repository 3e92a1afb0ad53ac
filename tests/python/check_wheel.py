"""The wheel of ``make wheel`` as a user gets it: what is in it, installed with no index, its tests.

    check_wheel.py WHEEL

Needs pip, and the registry for the build backend of the folder; nothing is skipped without them.
WHEEL_TESTS="library header" has it run those files of tests only, where all of them have run with
the sources of the same commit.
"""

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import venv
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests/python"
WHEEL = pathlib.Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else None


def run(*command, **environment):
    """Runs a command that knows of no library and no package but the ones installed."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VBAR_")}
    clean.pop("PYTHONPATH", None)
    return subprocess.run(
        [str(part) for part in command],
        env={**clean, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.python = cls.new_python("installed")
        done = run(cls.python, "-m", "pip", "install", "--no-index", WHEEL, PATH="/nonexistent")
        assert done.returncode == 0, done.stdout

    @classmethod
    def new_python(cls, name):
        venv.create(cls.folder / name, with_pip=True)
        return cls.folder / name / "bin/python"

    def test_the_name_says_the_platform_that_the_library_needs(self):
        with zipfile.ZipFile(WHEEL) as archive:
            archive.extract("vbar/libvbar.so", self.folder)
        files = (self.folder / "vbar/libvbar.so", self.folder / "installed/bin/vbar")
        told = run("readelf", "-V", *files, LC_ALL="C").stdout
        needs = re.findall(r"Name: GLIBC_(\d+)\.(\d+)", told)
        major, minor = max((int(major), int(minor)) for major, minor in needs)
        version = re.search(r'^version = "(.+)"$', (ROOT / "Cargo.toml").read_text(), re.M)[1]
        platform = f"manylinux_{major}_{minor}_{os.uname().machine}"
        self.assertEqual(WHEEL.name, f"vbar_cuda-{version}-py3-none-{platform}.whl")
        print(f"the wheel needs glibc {major}.{minor}")

    def test_it_has_the_package_the_library_and_the_licences(self):
        with zipfile.ZipFile(WHEEL) as archive:
            names = set(archive.namelist())
            info = archive.getinfo("vbar/libvbar.so")
        for source in (ROOT / "python_shim/vbar").rglob("*.py"):
            self.assertIn(str(source.relative_to(ROOT / "python_shim")), names)
        for name in ("vbar/py.typed", "licenses/LICENSE-MIT", "licenses/LICENSE-APACHE"):
            self.assertTrue(any(found.endswith(name) for found in names), name)
        self.assertFalse([name for name in names if "__pycache__" in name or "test" in name])
        self.assertLess(info.file_size, 16 << 20, "a library that is stripped is smaller")

    def test_the_library_is_stripped_and_exports_what_it_must(self):
        library = self.folder / "installed/lib"
        (found,) = library.glob("python*/site-packages/vbar/libvbar.so")
        sections = run("readelf", "-S", found).stdout
        self.assertNotIn(".debug_info", sections)
        self.assertNotIn(".symtab", sections)
        flags = run("readelf", "-d", found).stdout
        self.assertIn("NODELETE", flags)
        self.assertNotIn("libcuda", flags)

    def test_the_installed_package_passes_its_tests(self):
        files = sorted(TESTS.glob("test_*.py"))
        # What needs a GPU, and a benchmark of the repository that the wheel does not have.
        files = [file for file in files if not file.name.endswith(("_gpu.py", "_soak.py"))]
        self.assertGreater(len(files), 8)
        if only := os.environ.get("WHEEL_TESTS", "").split():
            named = {file.stem.removeprefix("test_"): file for file in files}
            files = [named[name] for name in only]
        # They wait as much as they compute.
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            runs = list(pool.map(lambda file: run(self.python, file), files))
        for file, done in zip(files, runs):
            with self.subTest(file.name):
                self.assertEqual(done.returncode, 0, done.stdout)
        where = run(self.python, "-c", "import vbar; print(vbar.__file__); vbar.load()")
        self.assertIn(str(self.folder), where.stdout)

    def test_it_brings_the_program(self):
        program = self.folder / "installed/bin/vbar"
        self.assertLess(program.stat().st_size, 24 << 20, "a program that is stripped is smaller")
        version = run(self.python, "-c", "import vbar; print(vbar.version())").stdout
        self.assertEqual(run(program, "--version").stdout.split()[-1], version.split()[-1])
        # The library of the same wheel, and a device: 1 is a machine that is not fit, which is told.
        done = run(program, "doctor", "--json", VBAR_DRIVER="sim:capacity=1G")
        self.assertIn(done.returncode, (0, 1), done.stdout)
        self.assertIn('"', done.stdout)

    def test_it_is_uninstalled_without_a_rest(self):
        python = self.new_python("uninstalled")
        self.assertEqual(run(python, "-m", "pip", "install", "--no-index", WHEEL).returncode, 0)
        done = run(python, "-m", "pip", "uninstall", "--yes", "vbar-cuda")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(run(python, "-c", "import vbar").returncode, 1)
        self.assertFalse((self.folder / "uninstalled/bin/vbar").exists())

    def test_types_are_known_to_checkers(self):
        done = run(self.python, "-c", "import vbar, inspect; print(inspect.signature(vbar.Device))")
        self.assertIn("budget: 'Size | None' = None", done.stdout)


class Folder(unittest.TestCase):
    """``pip install`` of the folder, which builds."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        venv.create(self.folder / "venv", with_pip=True)
        self.python = self.folder / "venv/bin/python"

    def install(self, source, **environment):
        return run(self.python, "-m", "pip", "install", source, **environment)

    def test_without_cargo_it_says_what_is_needed(self):
        # All there is but cargo.
        tools = self.folder / "tools"
        tools.mkdir()
        for name in ("objdump", "cc", "git"):
            if shutil.which(name):
                (tools / name).symlink_to(shutil.which(name))
        done = self.install(ROOT / "python_shim", PATH=str(tools))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("cargo was not found", done.stdout)
        self.assertIn("https://rustup.rs", done.stdout)

    def test_alone_it_says_what_is_needed(self):
        shutil.copytree(ROOT / "python_shim", self.folder / "alone")
        done = self.install(self.folder / "alone")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("not within the vbar repository", done.stdout)

    def test_another_library_is_refused_when_it_is_built_in(self):
        text = self.folder / "libtext.so"
        text.write_text("no library")
        for wrong, said in ((text, "is no library"), (self.folder / "none.so", "is no file")):
            done = self.install(ROOT / "python_shim", VBAR_BUILD_LIBRARY=str(wrong))
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(said, done.stdout)

    def test_with_a_library_it_is_installed(self):
        with zipfile.ZipFile(WHEEL) as archive:
            archive.extract("vbar/libvbar.so", self.folder)
        library = str(self.folder / "vbar/libvbar.so")
        done = self.install(ROOT / "python_shim", VBAR_BUILD_LIBRARY=library)
        self.assertEqual(done.returncode, 0, done.stdout)
        done = run(self.python, "-c", "import vbar; print(vbar.version())")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertFalse((self.folder / "venv/bin/vbar").exists(), "none was named")

    def test_a_program_that_is_no_file_is_refused(self):
        library = str(next((WHEEL.parent).glob("*.whl")))
        done = self.install(
            ROOT / "python_shim", VBAR_BUILD_LIBRARY=library, VBAR_BUILD_PROGRAM="/nonexistent/vbar"
        )
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("VBAR_BUILD_PROGRAM is /nonexistent/vbar, which is no file", done.stdout)


if __name__ == "__main__":
    if WHEEL is None or not WHEEL.is_file():
        sys.exit("check_wheel.py WHEEL")
    unittest.main()
