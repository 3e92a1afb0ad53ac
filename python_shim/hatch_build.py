"""Hooks of the build: the version of Cargo.toml, the native library and the program ``vbar``.

Both are built by cargo from the repository that this folder is in, unless the environment variable
``VBAR_BUILD_LIBRARY`` names a library that was built already, and ``VBAR_BUILD_PROGRAM`` a program:
with the first alone the wheel has no program.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any, NoReturn

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

FOLDER = pathlib.Path(__file__).resolve().parent

#: What every Linux of PEP 600 has; a wheel may need nothing else.
SYSTEM_LIBRARIES = {
    "ld-linux-aarch64.so.1",
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
}


def stop(text: str) -> NoReturn:
    sys.exit(f"vbar-cuda cannot be built: {text}")


def crate_root() -> pathlib.Path:
    root = FOLDER.parent
    manifest = root / "Cargo.toml"
    if not manifest.is_file() or '\nname = "vbar"\n' not in manifest.read_text():
        stop(
            f"{FOLDER} is not within the vbar repository, whose native library it needs. Install "
            "from a checkout of the whole repository, or install the wheel"
        )
    return root


class Metadata(MetadataHookInterface):
    """The version, which is the crate's."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (crate_root() / "Cargo.toml").read_text()
        metadata["version"] = re.search(r'^version = "([^"]+)"$', text, re.M)[1]


class Build(BuildHookInterface[Any]):
    """The library and the program, and the platform that they run on."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            stop("there is no source distribution of this folder alone: build a wheel")
        library, program = built()
        files = [library, program] if program else [library]
        major, minor = max(map(glibc_of, files))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{major}_{minor}_{os.uname().machine}"
        if program:
            build_data["shared_scripts"][str(program)] = "vbar"
        if version == "editable":
            # The package stays where it is, and looks for the library beside itself.
            shutil.copy(library, FOLDER / "vbar/libvbar.so")
        else:
            build_data["force_include"][str(library)] = "vbar/libvbar.so"
        self.app.display_info(f"the wheel needs glibc {major}.{minor} or newer")


def built() -> tuple[pathlib.Path, pathlib.Path | None]:
    """The library, and the program if there is to be one."""
    library, program = named("VBAR_BUILD_LIBRARY"), named("VBAR_BUILD_PROGRAM")
    if library:
        return library, program
    root = crate_root()
    cargo = shutil.which("cargo")
    if cargo is None:
        stop(
            "cargo was not found, which builds its native library. Install Rust with rustup "
            "(https://rustup.rs), or install the wheel, which needs no compiler"
        )
    # The library without what only the program needs.
    library = compiled(cargo, root, "--lib", "--crate-type", "cdylib", "--no-default-features")
    return library, program or compiled(cargo, root, "--bin", "vbar")


def named(variable: str) -> pathlib.Path | None:
    """The file that a variable of the environment names."""
    value = os.environ.get(variable)
    if not value:
        return None
    file = pathlib.Path(value).resolve()
    if not file.is_file():
        stop(f"{variable} is {value}, which is no file")
    return file


def compiled(cargo: str, root: pathlib.Path, *what: str) -> pathlib.Path:
    """What cargo builds without symbols: a library for C, or a program."""
    command = [cargo, "rustc", "--release", "--locked", *what]
    command += ["--message-format", "json-render-diagnostics", "--", "-C", "strip=symbols"]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        stop(f"{' '.join(command[:5])} failed; what it said is above")
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message["target"]["name"] == "vbar":
            # A program is built with the library that it is a program of.
            is_program = "--bin" in what
            for file in message["filenames"]:
                if file == message["executable"] if is_program else file.endswith(".so"):
                    return pathlib.Path(file)
    stop(f"cargo said nothing of what {' '.join(command[:5])} built")


def glibc_of(file: pathlib.Path) -> tuple[int, int]:
    """The newest version of glibc whose symbols a library or program needs."""
    objdump = shutil.which("objdump")
    if objdump is None:
        stop("objdump was not found, which tells the glibc that the library needs: get binutils")
    told = subprocess.run(
        [objdump, "-p", file], env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True
    )
    if told.returncode:
        stop(f"{file} is no library: {told.stderr.strip()}")
    foreign = set(re.findall(r"NEEDED\s+(\S+)", told.stdout)) - SYSTEM_LIBRARIES
    if foreign:
        stop(f"{file} needs {', '.join(sorted(foreign))}, which not every system has")
    versions = re.findall(r"\bGLIBC_(\d+)\.(\d+)", told.stdout)
    return max((int(major), int(minor)) for major, minor in versions)
