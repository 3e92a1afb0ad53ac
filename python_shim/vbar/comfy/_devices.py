"""Devices as ComfyUI opens them: one each, their budgets, and the VBARs on them.

Two headrooms meet here. One is of the card: what weights and tensors together may hold is its size
less that, which is vbar's explicit budget. The other is of what the driver says is free, so other
programs count: vbar's headroom. ``init`` sets the first for the process, ``init_devices`` adds to
both for a device.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
import math
import operator
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterable

from .. import _abi, _abi_torch, _library
from .._device import Device
from .._errors import Error
from .._values import Statistics
from . import _report

if TYPE_CHECKING:
    from ._bars import ModelVBAR
    from ._host import HostBuffer

logger = logging.getLogger("vbar.comfy")

#: Left to others unless told: of the card, and of what the driver says is free.
HEADROOM = 256 << 20
#: The most that a headroom is taken for.
HEADROOM_MAX = 1 << 60

_lock = threading.RLock()
_options: dict[str, Any] = {}
#: What has page-locked memory that it unlocks by a device.
_hosts: weakref.WeakSet[HostBuffer] = weakref.WeakSet()


class Context:
    """A device that is open, as ``get_devctx`` gives it: nothing in it is for clients."""

    def __init__(self, device: Device, index: int, extra: int) -> None:
        self.device, self.index, self.extra = device, index, extra
        self.total: int = device.info.total_bytes
        #: Counts the ends of nodes.
        self.epoch = 0
        self.has_threads = _options.get("threads") is not False
        #: When a weight was last faulted.
        self.used_at = 0.0
        #: When it was last seen whether the host has memory for what is page-locked.
        self.looked_at = 0.0
        #: The same of the device's memory, for what its clients save themselves.
        self.relieved_at = 0.0
        #: Held while a page of such a VBAR comes or leaves, and its client is called.
        self.leaving = threading.RLock()
        #: Numbers of VBARs, in the order in which they were last made the last to lose pages.
        self.ranks = itertools.count(1)
        #: Since the last end.
        self.traffic = _report.Traffic()
        self._bars: weakref.WeakSet[ModelVBAR] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<device {self.index} of vbar: {self.device.info.name}>"

    def add(self, bar: ModelVBAR) -> None:
        with _lock:
            self._bars.add(bar)

    def bars(self) -> list[ModelVBAR]:
        with _lock:
            return list(self._bars)

    def apply(self, simple: int) -> None:
        """Sets budget and headroom anew."""
        # A card all of which is to be left free keeps room for one page: no budget is automatic.
        page = self.device.page_size
        self.device.budget = max(self.total - simple - self.extra, page)
        self.device.headroom = min(HEADROOM + self.extra, max(self.total - page, 0))


class Lib:
    """What ``lib`` is once ``init`` was called: true, and some functions as they are called in C."""

    @property
    def alloc_fn(self) -> Any:
        return _abi_torch.library().vbar_torch_segment_malloc

    @property
    def free_fn(self) -> Any:
        return _abi_torch.library().vbar_torch_segment_free

    def set_simple_vram_headroom(self, nbytes: Any) -> bool:
        set_simple_headroom(getattr(nbytes, "value", nbytes))
        return True

    def get_simple_vram_headroom(self) -> int:
        return simple_headroom()

    def get_total_vram_usage(self) -> int:
        return total_used()


#: As the package's attributes of these names.
lib: Lib | None = None
contexts: dict[int, Context] = {}
_simple = HEADROOM


def set_options(options: dict[str, Any]) -> None:
    """Options for devices that are opened from now on."""
    _options.update(options)


def options() -> dict[str, Any]:
    return dict(_options)


def init(implementation: str | None, simple: int | None) -> bool:
    """Loads the library. A second time only takes the headroom."""
    global lib
    with _lock:
        if simple is not None:
            simple = _headroom(simple)
        if lib is None:
            if (implementation or _kind_of_torch()) != "cuda":
                logger.error("vbar has no implementation %r: CUDA is what there is", implementation)
                return False
            try:
                _library.load()
            except Error as error:
                logger.error("vbar's library was not loaded: %s", error)
                return False
            lib = Lib()
        if simple is not None:
            _set_simple(simple)
        return True


def init_devices(wanted: Iterable[Any]) -> bool:
    """Opens devices, all or none of them; of those that are open the extra headroom is taken."""
    with _lock:
        if lib is None:
            logger.error("init_devices before init: nothing is opened")
            return False
        opened: list[int] = []
        changed: list[tuple[Context, int]] = []
        index = None
        try:
            for entry in wanted:
                index, extra = entry if isinstance(entry, (tuple, list)) else (entry, None)
                index = operator.index(index)
                known = contexts.get(index)
                if known is None:
                    contexts[index] = Context(_open(index), index, saturated(extra or 0))
                    opened.append(index)
                    known = contexts[index]
                elif extra is not None:
                    changed.append((known, known.extra))
                    known.extra = saturated(extra)
                known.apply(_simple)
        except Exception as error:
            # ComfyUI falls back to what it did before there were VBARs.
            logger.error("device %s was not opened: %s", index, error)
            for at in opened:
                contexts.pop(at).device.close()
            for context, before in changed:
                context.extra = before
                _apply(context)
            return False
        return True


def _open(index: int) -> Device:
    if index < 0:
        raise ValueError(f"there is no device {index}")
    from .. import torch as of_torch

    if of_torch.is_installed():
        return of_torch.device(index)
    return Device(ordinal=index, **_options)


def lazy_lib(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module whose ``lib`` is the one of now: such a module may have been
    imported before ``control.init``."""

    def attribute(name: str) -> Any:
        if name == "lib":
            return lib
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return attribute


def deinit() -> None:
    global lib, _simple
    with _lock:
        lib, _simple = None, HEADROOM
        closing = [contexts.pop(index) for index in list(contexts)]
        hosts = list(_hosts) if closing else []
    for buffer in hosts:
        # By the first, as all is locked.
        buffer._unlock_all(closing[0].device)
    for context in closing:
        for bar in context.bars():
            bar.close()
        context.device.close()


def add_host(buffer: HostBuffer) -> None:
    """Has a buffer unlock what is locked when the devices go."""
    with _lock:
        _hosts.add(buffer)


def get(index: Any) -> Context:
    """The context of a device.

    Raises:
        RuntimeError: it was not opened.
    """
    context = contexts.get(index)
    if context is None:
        known = ", ".join(map(str, contexts)) or "none"
        raise RuntimeError(
            f"device {index} was not opened (open: {known}): call control.init_devices([{index}])"
        )
    return context


def get_or_current(index: Any) -> Context:
    """As :func:`get`; ``None`` and -1 are PyTorch's current device, or the first that is open."""
    if index is not None and index != -1:
        return get(index)
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return get(cuda.current_device())
    return any_context()


def any_context() -> Context:
    """Some context, for what belongs to no device.

    Raises:
        RuntimeError: none is open.
    """
    for context in list(contexts.values()):
        return context
    raise RuntimeError("no device was opened: call control.init and control.init_devices")


def any_traffic() -> _report.Traffic:
    """That of some device, for what belongs to none; one that nobody reads where none is open."""
    for context in list(contexts.values()):
        return context.traffic
    return _report.Traffic()


def set_simple_headroom(nbytes: Any) -> None:
    """Sets what of each card is left to others.

    Raises:
        ValueError: it is negative, or more than 2^60.
        RuntimeError: ``init`` was not called.
    """
    with _lock:
        nbytes = _headroom(nbytes)
        if lib is None:
            raise RuntimeError("a headroom before control.init")
        _set_simple(nbytes)


def simple_headroom() -> int:
    if lib is None:
        raise RuntimeError("a headroom before control.init")
    return _simple


def total_used() -> int:
    """Bytes of frames, of all devices."""
    told = [statistics(context) for context in list(contexts.values())]
    return sum(int(one.used_bytes) for one in told if one is not None)


def statistics(context: Context) -> Statistics | None:
    """The numbers of a device; ``None`` when another thread has closed it meanwhile.

    Raises:
        RuntimeError: it has none.
    """
    try:
        return context.device.statistics()
    except Error as error:
        if contexts.get(context.index) is not context:
            return None
        raise RuntimeError(f"{context!r} has no numbers: {error}") from error


def analyze() -> None:
    """Says in the log what each device holds."""
    for index, context in list(contexts.items()):
        told, bars = statistics(context), context.bars()
        if told is None:
            continue
        resident = sum(bar.loaded_size() for bar in bars)
        logger.info(
            "device %d: %d MiB of %d MiB in frames, of these %d MiB weights of %d models; %d MiB are "
            "free for more, %d MiB of the host page-locked",
            index,
            told.used_bytes >> 20,
            told.budget_bytes >> 20,
            resident >> 20,
            len(bars),
            max(told.budget_bytes - told.used_bytes, 0) >> 20,
            told.locked_bytes >> 20,
        )
        for bar in bars:
            logger.debug("  %r: %d MiB resident", bar, bar.loaded_size() >> 20)


def _set_simple(nbytes: int) -> None:
    global _simple
    _simple = nbytes
    for context in list(contexts.values()):
        _apply(context)


def _apply(context: Context) -> None:
    try:
        context.apply(_simple)
    except Error as error:
        logger.error("%r keeps its headroom: %s", context, error)


def _headroom(nbytes: Any) -> int:
    whole = operator.index(nbytes)
    if not 0 <= whole <= HEADROOM_MAX:
        raise ValueError(f"a headroom of {whole} bytes: 0 to 2^60 is expected")
    return whole


def saturated(nbytes: Any) -> int:
    """A size as clients write one, also 1e32: what is too large is the largest, below 0 is 0."""
    if isinstance(nbytes, float):
        if math.isnan(nbytes):
            return 0
        nbytes = _abi.ALL_BYTES if nbytes >= _abi.ALL_BYTES else int(nbytes)
    return max(0, min(int(nbytes), _abi.ALL_BYTES))


def current_stream(index: int) -> int:
    """PyTorch's current stream on a device, as a number; the default one until CUDA is used."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)
    if torch is None or cuda is None or is_initialized is None or not is_initialized():
        return 0
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(raw(index) if raw is not None else cuda.current_stream(index).cuda_stream)


def is_capturing() -> bool:
    """Whether PyTorch captures a graph on its current stream."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    asked = getattr(cuda, "is_current_stream_capturing", None)
    return bool(cuda is not None and asked is not None and cuda.is_initialized() and asked())


def synchronize(index: int) -> bool:
    """Waits for all work on a device; whether there is none any more."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    try:
        if cuda is None or not cuda.is_initialized() or is_capturing():
            return False
        cuda.synchronize(index)
        return True
    except Exception:
        # At the end of the process, or of the device: nobody can tell.
        return False


def _kind_of_torch() -> str:
    """What PyTorch was built for, without importing it."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "cuda"
    return "rocm" if "rocm" in version else "cuda"


