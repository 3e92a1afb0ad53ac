"""A line in the log for each node that used weights: what was resident, what was streamed, from
where, how long that was waited for and why.

VBARs count the faults of their allocations, files and pins the time that they took; at the end of a
node all of it is taken together and begins anew. A block of allocations that is faulted as one is
not counted: its parts are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from typing import TYPE_CHECKING, Iterator, Mapping, Optional

from .._errors import Error
from .._values import Reason, Statistics, WaitKind

if TYPE_CHECKING:
    from ._devices import Context

logger = logging.getLogger("vbar.comfy")

_MIB, _GIB = 1 << 20, 1 << 30
#: Waits that are shorter together are not told of, in seconds.
_SHORT = 0.01

#: Why weights are not resident; everything else is told by its name.
_WHY = {
    Reason.TOO_LARGE: "weights are larger than the budget of {budget}",
    Reason.BUDGET: "they do not fit into the budget of {budget} beside tensors and buffers",
    Reason.ABOVE_WATERMARK: "they do not fit into the budget of {budget} beside tensors and buffers",
    Reason.ALL_PINNED: "all other pages were pinned",
    Reason.DRIVER_MEMORY: "the driver had no memory for them",
    Reason.NO_ADDRESSES: "they have no addresses on the device",
    Reason.CAPTURE: "a graph was being captured",
    Reason.FENCE_PENDING: "work used the memory for longer than was waited",
    Reason.FENCE_UNKNOWN: "no fence tells when the memory was last used",
}
_FILES, _IN_USE = "for files", "for memory that was in use"
#: What the library waits for on its own threads' or the device's account. Reads and slots are
#: within the calls that are timed here.
_WAITS = {
    WaitKind.CLAIM: _IN_USE,
    WaitKind.FRAME: _IN_USE,
    WaitKind.OLD_MAPPING: _IN_USE,
    WaitKind.RELEASE: _IN_USE,
    WaitKind.READY: "for copies",
    WaitKind.CONTEXT: "for the whole device",
    WaitKind.REGISTER: "for page-locking",
}


@dataclasses.dataclass
class Used:
    """What faults came to since the last time, in bytes."""

    #: Of weights that were used, each once.
    distinct: int = 0
    #: That a fault found as the one before left them.
    resident: int = 0
    #: That got pages anew, to be written.
    brought: int = 0
    #: That got none, by reason.
    offloaded: dict[Reason, int] = dataclasses.field(default_factory=dict)

    @property
    def streamed(self) -> int:
        return self.brought + sum(self.offloaded.values())

    def add(self, other: Used) -> None:
        self.distinct += other.distinct
        self.resident += other.resident
        self.brought += other.brought
        for reason, nbytes in other.offloaded.items():
            self.offloaded[reason] = self.offloaded.get(reason, 0) + nbytes


class Uses:
    """The faults of one VBAR. By several threads at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Of each allocation, by first byte and length, its signature of last time.
        self._last: dict[tuple[int, int], int] = {}
        self._seen: set[tuple[int, int]] = set()
        self._used = Used()

    def allocated(self, key: tuple[int, int]) -> None:
        with self._lock:
            self._last[key] = 0

    def fault(self, key: tuple[int, int], signature: int, reason: Reason = Reason.NONE) -> None:
        """One was faulted; its signature is 0 when it is offloaded."""
        with self._lock:
            last = self._last.get(key)
            if last is None:
                return
            used, nbytes = self._used, key[1]
            if key not in self._seen:
                self._seen.add(key)
                used.distinct += nbytes
            if not signature:
                used.offloaded[reason] = used.offloaded.get(reason, 0) + nbytes
            elif signature == last:
                used.resident += nbytes
            else:
                used.brought += nbytes
                self._last[key] = signature

    def take(self) -> Used:
        with self._lock:
            used, self._used, self._seen = self._used, Used(), set()
            return used


class Traffic:
    """What a device's weights were waited for. By several threads at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file_bytes = 0
        self._waits: dict[str, float] = {}
        self._before: Optional[Statistics] = None

    @contextlib.contextmanager
    def reading(self, nbytes: int) -> Iterator[None]:
        """Bytes are read from a file, and go to the device."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waited(time.perf_counter() - start, _FILES)
            with self._lock:
                self._file_bytes += nbytes

    def waited(self, seconds: float, what: str = _IN_USE) -> None:
        with self._lock:
            self._waits[what] = self._waits.get(what, 0.0) + seconds

    def take(self, now: Statistics) -> tuple[int, dict[str, float], int]:
        """Bytes from files, seconds by what was waited for, and bytes that the library filled."""
        with self._lock:
            before, self._before = self._before, now
            nbytes, self._file_bytes = self._file_bytes, 0
            waits, self._waits = self._waits, {}
        known = before.waits if before is not None else {}
        for kind, what in _WAITS.items():
            nanos = _nanos(now, kind) - (known[kind].nanos if kind in known else 0)
            if nanos > 0:
                waits[what] = waits.get(what, 0.0) + nanos / 1e9
        filled = now.filled_bytes - (before.filled_bytes if before is not None else 0)
        return nbytes, waits, filled


def end_of_node(context: Context) -> None:
    """Says what a device's VBARs were used for, if they were."""
    used = Used()
    for bar in context.bars():
        used.add(bar.uses.take())
    try:
        now = context.device.statistics()
    except Error as error:
        logger.debug("%r has no numbers: %s", context, error)
        return
    taken = context.traffic.take(now)
    if used.distinct and logger.isEnabledFor(logging.INFO):
        resident = sum(bar.loaded_size() for bar in context.bars())
        told = sentence(used, resident, now.budget_bytes, *taken)
        logger.info("GPU %d: %s", context.index, told)


def sentence(
    used: Used,
    resident: int,
    budget: int,
    file_bytes: int,
    waits: Mapping[str, float],
    filled: int = 0,
) -> str:
    """The line, of the numbers of a node.

    Args:
        used: what the faults came to.
        resident: bytes of all VBARs that are resident now.
        budget: bytes that may be held.
        file_bytes: bytes that came from files.
        waits: seconds by what was waited for.
        filled: bytes that the library brought by itself, ahead of need.
    """
    told = f"{size(used.distinct)} of weights used {times(used)}"
    if not used.streamed and not filled:
        return f"{told}, all resident{_waited(waits)}"
    told += f", {size(resident)} are resident now. {size(used.streamed)} were streamed"
    from_files = min(file_bytes, used.streamed)
    sources = [(from_files, "files"), (used.streamed - from_files, "RAM")]
    named = [f"{size(nbytes)} from {source}" for nbytes, source in sources if nbytes]
    if len(named) == 1:
        told += f", from {'files' if from_files else 'RAM'}"
    elif named:
        told += f", {' and '.join(named)}"
    if used.brought and used.offloaded:
        told += f"; {size(used.brought)} of that to stay"
    elif used.brought:
        told += ", to stay"
    if filled:
        told += f"; {size(filled)} came ahead of need"
    if used.offloaded:
        reason = max(used.offloaded, key=lambda reason: used.offloaded[reason])
        why = _WHY.get(reason, f"they are offloaded ({reason})")
        told += f". Not resident: {why.format(budget=size(budget))}"
    return told + _waited(waits)


def times(used: Used) -> str:
    """How often each was used, as far as that is the same for all."""
    count = (used.resident + used.streamed) / used.distinct
    if abs(count - round(count)) > 0.005:
        return f"{count:.1f} times on average"
    words = {1: "once", 2: "twice"}
    return words.get(round(count), f"{round(count)} times")


def size(nbytes: int) -> str:
    """Bytes, for people."""
    if nbytes >= _GIB:
        return f"{nbytes / _GIB:.2f} GiB"
    return f"{nbytes / _MIB:.1f} MiB" if nbytes >= _MIB else f"{nbytes} bytes"


def _waited(waits: Mapping[str, float]) -> str:
    whole = sum(waits.values())
    if whole < _SHORT:
        return ". No waits"
    longest = sorted(waits.items(), key=lambda wait: -wait[1])
    told = ", ".join(f"{seconds:.2f} s {what}" for what, seconds in longest if seconds >= _SHORT / 2)
    return f". Waited {told}"


def _nanos(now: Statistics, kind: WaitKind) -> int:
    return now.waits[kind].nanos if kind in now.waits else 0
