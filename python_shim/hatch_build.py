"""Hooks of the build: the version of Cargo.toml, and the native library with its platform.

The library is built by cargo from the repository that this folder is in, unless the environment
variable ``VBAR_BUILD_LIBRARY`` names one that was built already.
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
    """The library, and the platform that it runs on."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            stop("there is no source distribution of this folder alone: build a wheel")
        library = built_library()
        platform, floor = platform_of(library)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        if version == "editable":
            # The package stays where it is, and looks for the library beside itself.
            shutil.copy(library, FOLDER / "vbar/libvbar.so")
        else:
            build_data["force_include"][str(library)] = "vbar/libvbar.so"
        self.app.display_info(f"libvbar.so needs glibc {floor} or newer")


def built_library() -> pathlib.Path:
    named = os.environ.get("VBAR_BUILD_LIBRARY")
    if named:
        library = pathlib.Path(named).resolve()
        if not library.is_file():
            stop(f"VBAR_BUILD_LIBRARY is {named}, which is no file")
        return library
    root = crate_root()
    cargo = shutil.which("cargo")
    if cargo is None:
        stop(
            "cargo was not found, which builds its native library. Install Rust with rustup "
            "(https://rustup.rs), or install the wheel, which needs no compiler"
        )
    return compile_library(cargo, root)


def compile_library(cargo: str, root: pathlib.Path) -> pathlib.Path:
    """Builds the library without symbols, and without what only the program needs."""
    command = [cargo, "rustc", "--release", "--locked", "--lib", "--crate-type", "cdylib"]
    command += ["--no-default-features", "--message-format", "json-render-diagnostics"]
    command += ["--", "-C", "strip=symbols"]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        stop(f"{' '.join(command[:3])} failed; what it said is above")
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message["target"]["name"] == "vbar":
            for file in message["filenames"]:
                if file.endswith(".so"):
                    return pathlib.Path(file)
    stop("cargo said nothing of a library")


def platform_of(library: pathlib.Path) -> tuple[str, str]:
    """The platform tag by the newest glibc symbols that the library needs, and that version."""
    objdump = shutil.which("objdump")
    if objdump is None:
        stop("objdump was not found, which tells the glibc that the library needs: get binutils")
    told = subprocess.run(
        [objdump, "-p", library], env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True
    )
    if told.returncode:
        stop(f"{library} is no library: {told.stderr.strip()}")
    foreign = set(re.findall(r"NEEDED\s+(\S+)", told.stdout)) - SYSTEM_LIBRARIES
    if foreign:
        stop(f"{library} needs {', '.join(sorted(foreign))}, which not every system has")
    versions = re.findall(r"\bGLIBC_(\d+)\.(\d+)", told.stdout)
    major, minor = max((int(major), int(minor)) for major, minor in versions)
    return f"manylinux_{major}_{minor}_{os.uname().machine}", f"{major}.{minor}"
