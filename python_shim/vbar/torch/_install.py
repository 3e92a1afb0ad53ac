"""Making vbar PyTorch's allocator: what is checked before, what is changed, what is kept.

Nothing is changed until everything was found that is needed, so that a refusal leaves PyTorch as it
was.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
import warnings
from typing import TYPE_CHECKING, Any

from .. import _abi_torch
from .._call import call
from .._device import Device, options_of
from .._errors import Error
from .._values import ContextWaits, Eviction, Prefer
from . import _compatible, _statistics

if TYPE_CHECKING:
    from .._sizes import Size

#: Versions of PyTorch whose behaviour is known, the first and the last.
OLDEST, NEWEST = (2, 8), (2, 14)
#: Settings of PyTorch's own allocators, comma-separated.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

logger = logging.getLogger("vbar.torch")

_lock = threading.Lock()
#: PyTorch's object for us, once it is its allocator. Never let go: tensors are freed through it
#: until the process ends.
_kept: list[Any] = []


class InstallError(Error, RuntimeError):
    """PyTorch cannot use vbar here; the text says what to do. PyTorch is as it was."""


class NotInUse(Error, RuntimeError):
    """PyTorch allocates elsewhere."""


def configure(
    *,
    driver: str | None = None,
    budget: Size | None = None,
    headroom: Size | None = None,
    page_size: Size | None = None,
    threads: bool | None = True,
    eviction: Eviction = Eviction.ALIASING,
    poison: bool = False,
    scrub: bool = False,
    host_mapped: bool = False,
    prefer: Prefer | str = Prefer.AUTO,
    host_allowance: Size | None = None,
    wait_timeout: float | None = None,
    staging_slots: int | None = None,
) -> None:
    """Say how devices are opened that PyTorch allocates on, each when it is first used.

    Options are those of :class:`vbar.Device`, ``budget`` that of weights and tensors together;
    ``"50%"`` is half of the memory of each device. A device that the program has open is shared,
    and what is given is changed of it as far as it can be; its page size stays. :func:`install` and
    :func:`mem_pool` take the same ones.

    Raises:
        AlreadyOpen: a device is open with another page size.
        InvalidArgument: an option is outside what is allowed.
    """
    options = options_of(
        driver=driver,
        budget=budget,
        headroom=headroom,
        page_size=page_size,
        threads=threads,
        eviction=eviction,
        # A wait for the whole context would break the capture of a graph.
        context_waits=ContextWaits.NEVER,
        poison=poison,
        scrub=scrub,
        host_mapped=host_mapped,
        prefer=prefer,
        host_allowance=host_allowance,
        wait_timeout=wait_timeout,
        staging_slots=staging_slots,
    )
    call(_abi_torch.library().vbar_torch_configure, options)


def install(*, statistics: bool = True, **options: Any) -> None:
    """Make vbar PyTorch's allocator, for all CUDA devices of this process, until it ends.

    Before the first use of CUDA. Importing torch, ``torch.cuda.is_available()`` and
    ``torch.cuda.device_count()`` are no use yet; a tensor on ``"cuda"`` is one, so are
    ``torch.cuda.current_device()`` and ``torch.cuda.get_device_properties()``. A second time only
    applies its options.

    Args:
        statistics: whether ``torch.cuda.memory_allocated`` and its like answer with vbar's numbers
            instead of raising; see :func:`uninstall_statistics`.
        **options: as for :func:`configure`.

    Raises:
        InstallError: CUDA was used already, or PyTorch lacks something that is needed.
        AlreadyOpen, InvalidArgument: as for :func:`configure`.
    """
    import torch

    with _lock:
        if _kept:
            if options:
                configure(**options)
            if statistics:
                _statistics.install_statistics()
            return
        allocator = _make_allocator(torch)
        _check_unused(torch)
        _warn_of_settings(torch)
        configure(**options)
        try:
            torch._C._cuda_changeCurrentAllocator(allocator)
        except RuntimeError as error:
            raise InstallError(_too_late(str(error))) from None
        keep(allocator)
        _kept.append(allocator)
        _forget_backend()
        _compatible.install(torch)
        if statistics:
            _statistics.install_statistics()


def is_installed() -> bool:
    """Whether :func:`install` made vbar PyTorch's allocator in this process."""
    return bool(_kept)


def check_in_use(ordinal: int | None = None) -> int:
    """Check that PyTorch allocates here, by a small tensor.

    Args:
        ordinal: PyTorch's number of a device; ``None`` is its current one.

    Returns:
        The requests that were seen on that device so far.

    Raises:
        NotInUse: the tensor came from elsewhere.
    """
    import torch

    index = torch.cuda.current_device() if ordinal is None else ordinal
    before = _statistics.allocations_seen(index)
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device=f"cuda:{index}")
    seen = _statistics.allocations_seen(index)
    del tensor
    if seen == before:
        raise NotInUse(
            f"a tensor on cuda:{index} was not allocated by vbar: "
            + ("another allocator is in use" if _kept else "call vbar.torch.install() first")
        )
    return seen


def device(ordinal: int | None = None) -> Device:
    """The device that PyTorch allocates on, for weights beside its tensors.

    Args:
        ordinal: PyTorch's number of it; ``None`` is its current one.

    Returns:
        It is opened if it is not. Close it as any other; PyTorch's allocator stays.
    """
    if ordinal is None:
        import torch

        ordinal = int(torch.cuda.current_device())
    return Device._made_by(_abi_torch.library().vbar_torch_device, ordinal)


def keep(allocator: Any) -> None:
    """Never let go of an object of PyTorch's: not at the end of the interpreter either."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(allocator))


def make_plug(torch: Any, malloc: str, free: str) -> Any:
    """PyTorch's object for two of our functions.

    It is made of their addresses, in the one copy of the library that this package has loaded.

    Raises:
        InstallError: this PyTorch has none.
    """
    make = getattr(torch._C, "_cuda_customAllocator", None)
    if make is None or not torch.cuda.is_available():
        raise InstallError(
            f"torch {torch.__version__} sees no CUDA device: install a build of PyTorch with CUDA, "
            "on a machine with a GPU and its driver"
        )
    return make(_abi_torch.address_of(malloc), _abi_torch.address_of(free))


def check_version(torch: Any) -> None:
    """Refuses a PyTorch that is too old, warns of one that is newer than what is known."""
    found = version_of(torch)
    if found < OLDEST:
        raise InstallError(
            f"torch {torch.__version__} is too old: {OLDEST[0]}.{OLDEST[1]} or newer is needed"
        )
    if found > NEWEST:
        warnings.warn(
            f"torch {torch.__version__} is newer than what vbar is known to work with, "
            f"{NEWEST[0]}.{NEWEST[1]}",
            RuntimeWarning,
            stacklevel=4,
        )


def version_of(torch: Any) -> tuple[int, int]:
    """Its first two numbers."""
    found = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def expandable_segments() -> str | None:
    """The variable that asks for PyTorch's own expandable segments, if one does."""
    for name in ALLOCATOR_VARIABLES:
        if re.search(r"expandable_segments\s*:\s*true", os.environ.get(name, ""), re.I):
            return name
    return None


def _forget_backend() -> None:
    """Takes the choice of one of PyTorch's own allocators out of its variables.

    It was heeded when PyTorch was loaded. Versions that read it once more, some of them only when
    memory of the host is pinned for the first time, would find another allocator than it says, and
    raise.
    """
    for name in ALLOCATOR_VARIABLES:
        given = os.environ.get(name)
        if given is None:
            continue
        settings = given.split(",")
        kept = [one for one in settings if not re.match(r"\s*backend\s*:", one)]
        if len(kept) == len(settings):
            continue
        if kept:
            os.environ[name] = ",".join(kept)
        else:
            del os.environ[name]
        logger.debug("%s=%s: vbar is PyTorch's allocator, the backend is taken out", name, given)


def _make_allocator(torch: Any) -> Any:
    """PyTorch's object for us with all its hooks; PyTorch does not know of it yet."""
    check_version(torch)
    allocator = make_plug(torch, "vbar_torch_malloc", "vbar_torch_free")
    missing = [setter for setter in _abi_torch.HOOKS if not hasattr(allocator, setter)]
    if missing:
        raise InstallError(
            f"torch {torch.__version__} cannot be told of {', '.join(missing)}: without, memory "
            "would be reused while it is in use"
        )
    _check_exceptions(torch)
    for setter, function in _abi_torch.HOOKS.items():
        getattr(allocator, setter)(_abi_torch.address_of(function))
    return allocator


def _check_exceptions(torch: Any) -> None:
    raised = ctypes.c_uint32()
    call(_abi_torch.library().vbar_torch_raise, raised)
    if raised.value != _abi_torch.RAISE_OUT_OF_MEMORY_ERROR:
        raise InstallError(
            f"c10::OutOfMemoryError was not found in the libraries of torch {torch.__version__}: a "
            "tensor that does not fit could not raise torch.OutOfMemoryError"
        )


def _check_unused(torch: Any) -> None:
    if torch.cuda.is_initialized():
        raise InstallError(_too_late("CUDA is in use"))


def _too_late(why: str) -> str:
    return (
        f"too late ({why}): call vbar.torch.install() before the first use of CUDA in this "
        "process, right after `import torch`. Tensors on cuda, torch.cuda.current_device() and "
        "torch.cuda.get_device_properties() are uses. Where that cannot be, "
        "vbar.torch.mem_pool() works beside PyTorch's own allocator"
    )


def _warn_of_settings(torch: Any) -> None:
    name = expandable_segments()
    if name is not None:
        warnings.warn(
            f"{name} asks for expandable_segments, a setting of PyTorch's own allocator, which is "
            "not in use from now on: remove it",
            RuntimeWarning,
            stacklevel=3,
        )
