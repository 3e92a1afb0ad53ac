//! Faults: the path that a layer takes, and what it can come to.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use std::ffi::{CStr, c_char};
use std::ops::Range;

use super::bar::{self, BarEntry, VbarBar};
use super::call::call;
use super::device::{self, VbarDevice, VbarStream};
use super::status::VbarStatus;
use super::token::{Bytes, Reserved, Source, VbarToken};
use super::value::{Out, OutArray, Plain, byte_range, read_array};
use crate::error::Result;
use crate::memory::pager::{Faulted, Hold};
use crate::outcome::{Reason, Refusal};
use crate::runtime::{Guard, Runtime};
use crate::slots::Ref;
use crate::slots::thread::{self, Thread};
use crate::units::{Generation, Stream};

/// What a fault came to; none of them is an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarOutcome {
    /// Mapped, pinned, and valid for the stream given. The bytes are there too, except in a VBAR
    /// that is not bound and faulted by range: see `vbar_bar_fault`. With `VBAR_REASON_HOST_MAPPED`
    /// the device reads pages of it over the link, at a fraction of its memory's speed.
    Resident = 1,
    /// Mapped and pinned, the bytes undefined: write them, then `vbar_token_commit`.
    Refill = 2,
    /// Not resident, by decision: use the host's copy. Nothing is pinned.
    Offloaded = 3,
    /// Another caller is filling the allocation. Nothing is pinned.
    Busy = 4,
}

/// Why a range is offloaded, or resident in the host's memory. A number that a program does not
/// know is a new reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarReason {
    /// It is not offloaded.
    None = 0,
    /// It needs more frames than the budget has in all.
    TooLarge = 1,
    /// The budget is used by pages of higher priority.
    Budget = 2,
    /// Every page that could be evicted is pinned.
    AllPinned = 3,
    /// A page at or above its VBAR's watermark, which evictions lower: `vbar_bar_prioritise` at the
    /// start of a run lifts it.
    AboveWatermark = 4,
    /// The driver had no memory although the budget allowed it.
    DriverMemory = 5,
    /// No more mappings.
    Mappings = 6,
    /// No addresses, or no virtual memory management.
    NoAddresses = 7,
    /// The stream is being captured and the range is not resident.
    Capture = 8,
    /// The pages that could be evicted were used by a stream that no fence covers.
    FenceUnknown = 9,
    /// The pages that could be evicted are still in use, and no stream was given.
    FencePending = 10,
    /// A page of the range is lost to a failed undo.
    Quarantined = 11,
    /// It is resident, pages of it in the host's memory, which the device reads over the link: see
    /// `VbarDeviceOptions::host_mapped`. Whoever does not want it so gives the token back.
    HostMapped = 12,
}

/// What a fault came to. `address`, `signature` and `token` are 0 unless it is resident, to be
/// refilled, or offloaded with `VBAR_REASON_HOST_MAPPED`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct VbarFault {
    /// Device address of the first byte.
    pub address: u64,
    /// Length in bytes. Of a fault that is offloaded and not pinned: bytes of device frames that
    /// its ranges need, whole pages, each of them once; with a budget of less it is too large. 0
    /// when it is busy.
    pub bytes: u64,
    /// Equal to an earlier signature of the same range exactly when no page of it lost its bytes
    /// since. Never repeats in a process.
    pub signature: u64,
    /// The pins; give them back with `vbar_token_unpin`.
    pub token: VbarToken,
    /// A `VbarOutcome`.
    pub outcome: u32,
    /// A `VbarReason`.
    pub reason: u32,
}

/// Bytes of a VBAR.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarRange {
    /// The VBAR.
    pub bar: VbarBar,
    /// Its first byte in the VBAR.
    pub bar_offset: u64,
    /// Its length.
    pub bytes: u64,
}

// SAFETY: integers.
unsafe impl Plain for VbarFault {}
// SAFETY: integers.
unsafe impl Plain for VbarRange {}

impl VbarFault {
    pub(super) const NOTHING: Self = Self {
        address: 0,
        bytes: 0,
        signature: 0,
        token: VbarToken { id: 0 },
        outcome: 0,
        reason: 0,
    };

    pub(super) fn offloaded(refusal: Refusal) -> Self {
        let bytes = refusal.needed_bytes;
        Self { bytes, ..Self::NOTHING }.because(refusal.reason)
    }

    /// The same pins, pages of them in the host's memory. Resident all the same: a program that
    /// does not look at the reason is right, only slower, and gives its token back.
    pub(super) fn host_mapped(self) -> Self {
        Self { reason: VbarReason::HostMapped as u32, ..self }
    }

    fn because(self, reason: Reason) -> Self {
        let (outcome, reason) = (VbarOutcome::Offloaded as u32, VbarReason::from(reason) as u32);
        Self { outcome, reason, ..self }
    }

    /// Pins that have no token yet.
    #[inline(always)]
    fn resident(address: u64, bytes: u64, newest: Generation) -> Self {
        let (signature, outcome) = (newest.0, VbarOutcome::Resident as u32);
        Self { address, bytes, signature, outcome, ..Self::NOTHING }
    }

    /// What a guard says; its pins have no token yet.
    pub(super) fn of(guard: &Guard<'_>, outcome: VbarOutcome) -> Self {
        let resident = Self::resident(guard.address().0, guard.bytes(), newest(guard.hold()));
        Self { outcome: outcome as u32, ..resident }
    }
}

/// Makes bytes of a VBAR, from `bar_offset` on, resident for work on `stream`, and pins them. On a
/// bound VBAR they are the file's; on another they are what was last written while `signature`
/// stays the same, and undefined before: compare it, or use allocations, which ask for a refill
/// themselves. A hit makes no driver call that waits and takes no lock. Statuses: the common ones,
/// the driver's, `CLOSED`, `TIMED_OUT`, `CANCELLED`, `TOO_MANY_PINS`, `IO` and `FILE_CHANGED` of a
/// bound VBAR, `UNSUPPORTED` for a use that no fence covers where waits for the context are off;
/// `INVALID_ARGUMENT` outside the VBAR. Thread-safe.
///
/// # Safety
/// `fault` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_bar_fault(
    bar: VbarBar,
    bar_offset: u64,
    bytes: u64,
    stream: VbarStream,
    fault: *mut VbarFault,
) -> VbarStatus {
    call(|| {
        thread::with(|thread| fault_bytes(thread, bar, bar_offset, bytes, Stream(stream), fault))
    })
}

#[inline(always)]
fn fault_bytes(
    thread: &Thread,
    bar: VbarBar,
    bar_offset: u64,
    bytes: u64,
    stream: Stream,
    fault: *mut VbarFault,
) -> Result<()> {
    let out = Out::new(fault)?;
    let entry = bar::find_on(thread, bar)?;
    let range = byte_range(bar_offset, bytes)?;
    let reserved = Reserved::take(thread)?;
    let Some(hit) = entry.vbar.hit(thread, &range, stream)? else {
        return fault_otherwise(entry, &range, stream, reserved, &out);
    };
    let address = entry.vbar.base().0 + bar_offset;
    let token = reserved.hand_out_hit(entry, hit);
    out.write(VbarFault { token, ..VbarFault::resident(address, bytes, hit.generation) });
    Ok(())
}

/// What is no plain hit.
#[inline(never)]
fn fault_otherwise(
    entry: Ref<BarEntry>,
    range: &Range<u64>,
    stream: Stream,
    reserved: Reserved,
    out: &Out<VbarFault>,
) -> Result<()> {
    let address = entry.vbar.base().0 + range.start;
    let told = |hold: &Hold| VbarFault::resident(address, range.end - range.start, newest(hold));
    let (told, hold) = match entry.vbar.fault_otherwise(range, stream)? {
        Faulted::Resident(hold) => (told(&hold), hold),
        Faulted::HostMapped(hold) => (told(&hold).host_mapped(), hold),
        Faulted::Offloaded(refusal) => {
            out.write(VbarFault::offloaded(refusal));
            return Ok(());
        }
    };
    let token = reserved.hand_out(Source::Bar(entry), hold, Bytes::Valid);
    out.write(VbarFault { token, ..told });
    Ok(())
}

/// Generations only grow, so the newest tells whether any page of the range has another.
fn newest(hold: &Hold) -> Generation {
    hold.generations.as_slice().iter().max().copied().unwrap_or_default()
}

/// Makes several ranges of VBARs of one device resident, each with a token of its own, or none of
/// them: then every element of `faults` says the same reason. Where one has pages in the host's
/// memory, all say `VBAR_REASON_HOST_MAPPED`, each with a token. Statuses: those of
/// `vbar_bar_fault`; `INVALID_ARGUMENT` for a VBAR of another device. Thread-safe.
///
/// # Safety
/// Both arrays have `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_device_fault_many(
    device: VbarDevice,
    ranges: *const VbarRange,
    count: usize,
    stream: VbarStream,
    faults: *mut VbarFault,
) -> VbarStatus {
    call(|| {
        let (ranges, out) = (read_array(ranges, count)?, OutArray::new(faults, count)?);
        let entries: Vec<_> =
            ranges.iter().map(|range| bar::find(range.bar)).collect::<Result<_>>()?;
        let reserved: Vec<_> = thread::with(|thread| {
            ranges.iter().map(|_| Reserved::take(thread)).collect::<Result<_>>()
        })?;
        let runtime = &device::find(device)?.runtime;
        let faulted = fault_ranges(runtime, &entries, ranges, Stream(stream))?;
        let named = entries.into_iter().zip(ranges);
        match faulted {
            Faulted::Resident(holds) => {
                out.write(hand_out_all(named, reserved, holds, std::convert::identity));
            }
            Faulted::HostMapped(holds) => {
                out.write(hand_out_all(named, reserved, holds, VbarFault::host_mapped));
            }
            Faulted::Offloaded(refusal) => {
                out.write(std::iter::repeat_n(VbarFault::offloaded(refusal), count));
            }
        }
        Ok(())
    })
}

/// What a guard says, and its pins.
pub(super) fn told_and_hold(guard: Guard<'_>) -> (VbarFault, Hold) {
    (VbarFault::of(&guard, VbarOutcome::Resident), guard.into_hold())
}

fn fault_ranges(
    runtime: &Runtime,
    entries: &[Ref<BarEntry>],
    ranges: &[VbarRange],
    stream: Stream,
) -> Result<Faulted<Vec<Hold>>> {
    let mut wanted = Vec::with_capacity(ranges.len());
    for (entry, range) in entries.iter().zip(ranges) {
        wanted.push((&entry.vbar, byte_range(range.bar_offset, range.bytes)?));
    }
    runtime.fault_holds(wanted.into_iter(), stream)
}

fn hand_out_all<'a>(
    ranges: impl Iterator<Item = (Ref<BarEntry>, &'a VbarRange)>,
    reserved: Vec<Reserved>,
    holds: Vec<Hold>,
    tell: fn(VbarFault) -> VbarFault,
) -> impl Iterator<Item = VbarFault> {
    ranges.zip(reserved).zip(holds).map(move |(((entry, range), reserved), hold)| {
        let address = entry.vbar.base().0 + range.bar_offset;
        let told = VbarFault::resident(address, range.bytes, newest(&hold));
        let token = reserved.hand_out(Source::Bar(entry), hold, Bytes::Valid);
        VbarFault { token, ..tell(told) }
    })
}

/// A short word for a reason, as a string of static life time. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_reason_text(reason: u32) -> *const c_char {
    let text: &CStr = match reason {
        0 => c"none",
        1 => c"too_large",
        2 => c"budget",
        3 => c"all_pinned",
        4 => c"above_watermark",
        5 => c"driver_memory",
        6 => c"mappings",
        7 => c"no_addresses",
        8 => c"capture",
        9 => c"fence_unknown",
        10 => c"fence_pending",
        11 => c"quarantined",
        12 => c"host_mapped",
        _ => c"unknown",
    };
    text.as_ptr()
}

impl From<Reason> for VbarReason {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::TooLarge => Self::TooLarge,
            Reason::Budget => Self::Budget,
            Reason::AllPinned => Self::AllPinned,
            Reason::AboveWatermark => Self::AboveWatermark,
            Reason::DriverMemory => Self::DriverMemory,
            Reason::Mappings => Self::Mappings,
            Reason::NoAddresses => Self::NoAddresses,
            Reason::Capture => Self::Capture,
            Reason::FenceUnknown => Self::FenceUnknown,
            Reason::FencePending => Self::FencePending,
            Reason::Quarantined => Self::Quarantined,
            Reason::HostMapped => Self::HostMapped,
        }
    }
}
