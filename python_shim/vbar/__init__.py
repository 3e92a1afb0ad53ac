"""vbar: a CUDA virtual-memory allocator, for models that are larger than the GPU.

A :class:`Device` has VBARs: addresses that cost nothing. A *fault* puts memory behind them when a
layer needs its weights, and fills it from a safetensors file; memory is taken back from the coldest
weights when anything else needs it::

    import torch, vbar

    with vbar.Device(budget="8G") as device, device.open_model("model.safetensors") as model:
        for name in model:
            with model.fault(name) as weight:
                if weight:
                    use(torch.from_dlpack(weight.view()))
                else:
                    use_the_copy_of_the_host(name, weight.reason)

That a weight does not fit is an outcome and not an error: the result of a fault is false then, and
has a ``reason``. What fails raises a subclass of :class:`Error`, one for each status of the C ABI.

All of it may be used from several threads, and Ctrl-C ends a wait. Memory of a VBAR belongs to its
process: it cannot be shared by CUDA's IPC, nothing here is pickled, and the child of a fork gets
:class:`ProcessEnding` from every call. The library's messages go to the logger ``"vbar"``.
Tests without a GPU get streams, pressure and failures from :mod:`vbar.sim`.
"""

from __future__ import annotations

from ._abi import ABI_VERSION
from ._bar import Allocation, Bar
from ._device import Device
from ._dlpack import View
from ._dtypes import Dtype
from ._errors import (
    AbiError,
    AlreadyOpen,
    Cancelled,
    Closed,
    DeviceLost,
    DeviceNotRegistered,
    DriverError,
    DriverMissing,
    Error,
    FileChanged,
    FileError,
    FormatError,
    GuardReleased,
    HostMemory,
    InternalError,
    InvalidArgument,
    NoAddresses,
    NotFound,
    ProcessEnding,
    StaleHandle,
    StaleToken,
    TimedOut,
    TooManyMappings,
    TooManyPins,
    Unsupported,
)
from ._guard import Busy, Guard, Offloaded, Refill
from ._library import load, status_text, version
from ._log import deliver as deliver_messages
from ._many import Guards, Ranges
from ._memory import MemorySource
from ._model import Model, Tensor
from ._sizes import Size
from ._streams import NO_STREAM, Stream
from ._values import (
    BarInfo,
    BudgetSource,
    ContextWaits,
    DeviceInfo,
    Eviction,
    Freed,
    Page,
    PageState,
    Prefer,
    Reason,
    Segment,
    Shortfall,
    Statistics,
    WaitCount,
    WaitKind,
)

__all__ = [
    "ABI_VERSION",
    "NO_STREAM",
    "AbiError",
    "Allocation",
    "AlreadyOpen",
    "Bar",
    "BarInfo",
    "BudgetSource",
    "Busy",
    "Cancelled",
    "Closed",
    "ContextWaits",
    "Device",
    "DeviceInfo",
    "DeviceLost",
    "DeviceNotRegistered",
    "DriverError",
    "DriverMissing",
    "Dtype",
    "Error",
    "Eviction",
    "FileChanged",
    "FileError",
    "FormatError",
    "Freed",
    "Guard",
    "GuardReleased",
    "Guards",
    "HostMemory",
    "InternalError",
    "InvalidArgument",
    "MemorySource",
    "Model",
    "NoAddresses",
    "NotFound",
    "Offloaded",
    "Page",
    "PageState",
    "Prefer",
    "ProcessEnding",
    "Ranges",
    "Reason",
    "Refill",
    "Segment",
    "Shortfall",
    "Size",
    "StaleHandle",
    "StaleToken",
    "Statistics",
    "Stream",
    "Tensor",
    "TimedOut",
    "TooManyMappings",
    "TooManyPins",
    "Unsupported",
    "View",
    "WaitCount",
    "WaitKind",
    "deliver_messages",
    "load",
    "status_text",
    "version",
]


def __getattr__(name: str) -> str:
    # Asked of the library, so that importing the package does not load it.
    if name == "__version__":
        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
