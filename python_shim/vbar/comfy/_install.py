"""Putting the compatible package where ComfyUI finds it, and PyTorch on vbar when it is imported.

ComfyUI sets variables that CUDA reads before it imports PyTorch, and uses CUDA right behind that
import. So PyTorch gets its allocator at the end of its own import, whoever that is done by.
"""

from __future__ import annotations

import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import pathlib
import sys
import threading
from typing import Any, Sequence

from .._device import options_of
from .._errors import Error
from . import _devices

logger = logging.getLogger("vbar.comfy")

#: The folder that has the compatible package, and nothing else.
COMPATIBLE = str(pathlib.Path(__file__).with_name("compat"))
_NAME = "comfy_aimdo"

_lock = threading.Lock()


class InstallError(Error, RuntimeError):
    """ComfyUI cannot be put on vbar in this process; the text says what to do."""


def install(*, allocator: bool = True, **options: Any) -> None:
    """Let ``import comfy_aimdo`` find vbar's package, and PyTorch allocate with vbar.

    Before ComfyUI is imported, and before the first use of CUDA. A second time only applies its
    options.

    Args:
        allocator: whether PyTorch gets vbar as its allocator, now or when it is imported. Without,
            weights give way only to what the driver says is used.
        **options: as for :func:`vbar.torch.configure`, for the devices that ComfyUI opens.

    Raises:
        InstallError: ``comfy_aimdo`` was imported already, or PyTorch cannot get its allocator any
            more: nothing is changed then.
        TypeError, ValueError: an option is none of :func:`vbar.torch.configure`, or not as it
            expects them: nothing is changed then.
    """
    _check_options(options)
    with _lock:
        imported = sys.modules.get(_NAME)
        if imported is not None and not _is_ours(imported):
            where = getattr(imported, "__file__", None) or list(getattr(imported, "__path__", []))
            raise InstallError(
                f"{_NAME} was imported already, from {where}: call vbar.comfy.install() before "
                "ComfyUI or a node of it is imported, or start it with python -m vbar.comfy"
            )
        if allocator:
            _install_allocator(options)
        _devices.set_options(options)
        if COMPATIBLE not in sys.path:
            # A package with an `__init__` wins over one without, whatever the order; first, it wins
            # over any other too.
            sys.path.insert(0, COMPATIBLE)
            importlib.invalidate_caches()
        importlib.import_module(_NAME)


def is_installed() -> bool:
    """Whether ``import comfy_aimdo`` gives vbar's package in this process."""
    return _is_ours(sys.modules.get(_NAME))


def _check_options(options: dict[str, Any]) -> None:
    """What is wrong with them is raised here, and not into PyTorch's import."""
    from .. import torch as of_torch

    inspect.signature(of_torch.configure).bind(**options)
    options_of(**options)


def _is_ours(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and pathlib.Path(file).parent == pathlib.Path(COMPATIBLE, _NAME)


def _install_allocator(options: dict[str, Any]) -> None:
    if "torch" not in sys.modules:
        if not any(isinstance(finder, _AfterTorch) for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterTorch())
        return
    from .. import torch as of_torch

    try:
        of_torch.install(**options)
    except of_torch.InstallError as error:
        raise InstallError(str(error)) from error


def _after_import() -> None:
    """PyTorch was imported. It works without us too, so that nothing is raised into its import."""
    from .. import torch as of_torch

    try:
        of_torch.install(**_devices.options())
    except Error as error:
        logger.warning(
            "PyTorch keeps its own allocator, and weights give way only to what the driver says is "
            "used: %s",
            error,
        )


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds PyTorch as the others do, and has its loader tell when it was imported. It stays until
    then: ComfyUI asks where PyTorch is, for its version, before it imports it."""

    def __init__(self) -> None:
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch" or getattr(self._asking, "others", False):
            return None
        self._asking.others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.others = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader, self)
        return spec


class _Telling(importlib.abc.Loader):
    """A loader that calls when its module was executed, and leaves no trace of itself."""

    def __init__(self, loader: Any, finder: _AfterTorch) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        # Whoever only asks where PyTorch is may ask its loader for more.
        return getattr(self._loader, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy is one of the real loader: nobody waits for what it loads.
        return copy.copy, (self._loader,)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _after_import()
