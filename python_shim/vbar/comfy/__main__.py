"""``python -m vbar.comfy [--vbar-off] path/to/main.py [its arguments]``."""

from __future__ import annotations

import os
import sys
import types
from typing import NoReturn

from . import _restart
from ._install import InstallError, install

_USAGE = """\
usage: python -m vbar.comfy [--vbar-off] path/to/ComfyUI/main.py [its arguments]

Starts ComfyUI on vbar. All arguments behind main.py are its own, but for --vbar-off, which starts it
plain, as if this command were not there."""


def main(arguments: list[str]) -> None:
    is_off = "--vbar-off" in arguments
    given = [argument for argument in arguments if argument != "--vbar-off"]
    if given and given[0] in ("-h", "--help"):
        print(_USAGE)
        return
    if not given:
        _stop(_USAGE)
    path = given[0]
    if os.path.isdir(path):
        path = os.path.join(path, "main.py")
    if not os.path.isfile(path):
        _stop(f"vbar.comfy: there is no {path}\n\n{_USAGE}")
    if not is_off:
        try:
            install()
        except InstallError as error:
            _stop(f"vbar.comfy: {error}")
        _restart.watch(path)
    run(path, given[1:])


def run(path: str, arguments: list[str]) -> None:
    """Runs a program as ``python path arguments`` would, in this process."""
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    sys.argv = [path, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        # Where Python puts the program's folder; what was there is the one of `-m`. Behind it, what
        # was installed: a package of the compatible name in that folder would be the program's own.
        folder = os.path.dirname(os.path.abspath(path))
        for entry in ("", os.getcwd()):
            if entry in sys.path[:2]:
                sys.path.remove(entry)
        sys.path.insert(0, folder)
    # No temporary module: threads and handlers at exit use its names when the program has ended.
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _stop(text: str) -> NoReturn:
    print(text, file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
