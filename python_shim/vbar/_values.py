"""Numbers with names, and what the library tells, as values.

Enumerations have the numbers of ``vbar.h``. A number that a newer library gives and this package
does not know becomes a member of its own, ``UNKNOWN_17``, so that nothing is lost or misread.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Mapping, NamedTuple


class _Numbered(enum.IntEnum):
    @classmethod
    def _missing_(cls, value: object) -> Any:
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_, member._value_ = f"UNKNOWN_{value}", value
        return member

    def __str__(self) -> str:
        return self.name.lower()


class Reason(_Numbered):
    """Why a range is offloaded."""

    NONE = 0
    TOO_LARGE = 1
    BUDGET = 2
    ALL_PINNED = 3
    ABOVE_WATERMARK = 4
    DRIVER_MEMORY = 5
    MAPPINGS = 6
    NO_ADDRESSES = 7
    CAPTURE = 8
    FENCE_UNKNOWN = 9
    FENCE_PENDING = 10
    QUARANTINED = 11
    #: Pinned and readable all the same, pages of it in the host's memory.
    HOST_MAPPED = 12


class Shortfall(_Numbered):
    """Why memory that was asked back did not come."""

    NONE = 0
    NOTHING_RESIDENT = 1
    AT_FLOOR = 2
    ALL_PINNED = 3
    FENCE_UNKNOWN = 4
    TIMED_OUT = 5


class PageState(_Numbered):
    """What a page is to the library."""

    ABSENT = 0
    CLAIMED = 1
    ISSUED = 2
    RESIDENT = 3
    HOST_MAPPED = 4
    EVICTING = 5
    QUARANTINED = 6


class BudgetSource(_Numbered):
    """What determines the budget now."""

    LIMIT = 1
    DRIVER_FREE = 2
    DRIVER_REFUSED = 3
    SHRUNK = 4


class WaitKind(_Numbered):
    """What the CPU waited for."""

    CLAIM = 0
    STAGING = 1
    FRAME = 2
    OLD_MAPPING = 3
    READY = 4
    RELEASE = 5
    CONTEXT = 6
    READ = 7
    REGISTER = 8


class Eviction(enum.IntEnum):
    """How a frame in use gets to its next page."""

    #: Mapped at its next address at once, behind fences: nobody waits.
    ALIASING = 0
    #: Unmapped first, after its fences: for debugging, a use after the unpin faults.
    STRICT = 1


class ContextWaits(enum.IntEnum):
    """Whether a call may wait for the whole context when no fence covers a page that must go."""

    #: One wait rather than a refusal. It would break a capture that the library does not know.
    ALLOWED = 0
    #: Refuse with :attr:`Reason.FENCE_UNKNOWN`. With torch's allocator on the device, which knows
    #: when a graph is being captured, a fault waits all the same before it is refused for that.
    NEVER = 1


class Prefer(enum.IntEnum):
    """Where the bytes of a bound file are read from, when page-locked memory does not hold them."""

    #: From the page cache what is there, or all of it when the file fits into what the host can
    #: spare; else past it.
    AUTO = 0
    #: Through the page cache.
    RAM = 1
    #: Past the page cache (``O_DIRECT``), where the file system can; else through it.
    DISK = 2


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """What a device is."""

    ordinal: int
    #: Whether it is a simulated one.
    simulated: bool
    #: The ``CUcontext`` that the library works in, as a number.
    context: int
    #: Size of pages and frames, in bytes.
    page_bytes: int
    #: The whole device, in bytes.
    total_bytes: int
    name: str
    #: The driver, and why it was chosen.
    driver: str


@dataclasses.dataclass(frozen=True)
class Freed:
    """What giving memory back came to."""

    #: Bytes given back to the driver, whole pages.
    bytes: int
    #: Why it was less than was asked.
    shortfall: Shortfall
    #: Pages that are pinned, for :attr:`Shortfall.ALL_PINNED`.
    pinned_count: int


@dataclasses.dataclass(frozen=True)
class BarInfo:
    """A VBAR's marks at some moment."""

    page_count: int
    #: Pages that have a frame.
    resident_count: int
    #: Pages at or above are not faulted in; of a bound VBAR all are.
    watermark: int
    #: Pages below are not evicted.
    floor: int
    #: A larger class is kept longer.
    priority_class: int
    #: False where the device has no addresses for it, so that every fault is offloaded.
    has_addresses: bool


@dataclasses.dataclass(frozen=True)
class Page:
    """One page of a residency map."""

    state: PageState
    pin_count: int
    #: Changes when the page lost its bytes, and never repeats in a process.
    generation: int


class Segment(NamedTuple):
    """Which bytes of which file belong where in a VBAR; all in bytes."""

    bar_offset: int
    source_offset: int
    nbytes: int
    #: Index of the file among the sources.
    source: int = 0


@dataclasses.dataclass(frozen=True)
class WaitCount:
    """Waits of one kind."""

    count: int
    #: Their time together, in nanoseconds.
    nanos: int


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Numbers of a device. Those of memory were taken together; counts only ever grow."""

    #: Bytes of all frames held.
    used_bytes: int
    #: The most that ``used_bytes`` was.
    peak_bytes: int
    #: Bytes of frames that no page has.
    free_bytes: int
    #: Bytes of frames lost to a failed undo, counted in ``used_bytes``.
    quarantined_bytes: int
    #: What may be held.
    budget_bytes: int
    budget_source: BudgetSource
    #: VBARs open.
    bar_count: int
    #: VBARs closed that still have pages.
    closing_bar_count: int
    #: Mappings that outlast their pages.
    lingering_count: int
    #: Pages that have a frame.
    resident_page_count: int
    #: Pages whose addresses are lost.
    quarantined_page_count: int
    #: Page-locked host bytes held.
    locked_bytes: int
    #: Faults that found every page resident.
    hit_count: int
    #: Faults that had to map or fill a page.
    miss_count: int
    #: Pages that got a frame.
    mapped_page_count: int
    #: Pages that lost their frame.
    evicted_page_count: int
    #: Of those, pages whose frame was at its next page before its users had passed.
    aliased_page_count: int
    #: Bytes copied to the device by fills.
    filled_bytes: int
    #: Driver calls tried again after a transient code.
    driver_retry_count: int
    #: Bytes of the poison frame, counted in ``used_bytes``.
    poison_bytes: int
    #: Evicted pages that have the poison frame behind them.
    poisoned_page_count: int
    #: Pages that were evicted and got no poison although they should.
    poison_failure_count: int
    #: Bytes of host frames, page-locked and in none of the other numbers.
    host_mapped_bytes: int
    #: Refusals by reason; reasons that never occurred are left out.
    refusal_counts: Mapping[Reason, int]
    #: Waits of the CPU; kinds that never occurred are left out.
    waits: Mapping[WaitKind, WaitCount]
    #: Of the pages that got a frame, those that were fetched before a fault asked for them.
    ahead_page_count: int
    #: Steps for which the order that the engine expects has been right; this and what follows is of
    #: now, and 0 without threads.
    engine_trust: int
    #: Steps that were not as expected so far.
    engine_departure_count: int
    #: Plans made so far of which pages stay.
    engine_plan_count: int
    #: Pages of the plan in force, in all; 0 without one.
    engine_planned_page_count: int
    #: Of those, the ones that stay.
    engine_kept_page_count: int
    #: Steps that the engine is ahead of the program.
    engine_ahead_step_count: int
    #: Of ``locked_bytes``, those of slots between file and device.
    locked_ring_bytes: int
    #: Of ``locked_bytes``, those that hold pages of bound VBARs between fills.
    locked_cache_bytes: int
    #: Of the bytes that fills took from their sources: copied from page-locked memory that held
    #: them from an earlier fill. These five only grow; a resident page takes no bytes.
    source_locked_cache_bytes: int
    #: Copied from registered pages of the page cache.
    source_registered_bytes: int
    #: Read from the page cache, without waiting for a disk.
    source_page_cache_bytes: int
    #: Read from the disk.
    source_disk_bytes: int
    #: Of ``source_disk_bytes``, those that went past the page cache.
    source_direct_bytes: int
    #: Copied from page-locked memory of the program that a VBAR is bound to: the device read them
    #: where they are. This one and the next only grow.
    source_host_locked_bytes: int
    #: Read from other memory of the program that a VBAR is bound to.
    source_host_pageable_bytes: int
    #: Of ``locked_bytes``, pages of files that are registered: they would be in memory without, but
    #: could be dropped.
    locked_registered_bytes: int
    #: Of ``locked_bytes``, those that hold what :meth:`vbar.Bar.save` saved, room for more included.
    locked_saved_bytes: int
    #: Of ``locked_bytes``, those that are to go: what is above the allowance, and all that is saved
    #: while the system is short of memory. What is saved goes by :meth:`vbar.Bar.drop_save`.
    locked_excess_bytes: int
