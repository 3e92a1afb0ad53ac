//! Faults and their tokens: the path that a layer takes.
//!
//! A token owns pins: it keeps what it was faulted from alive, and comes out of the table once, so
//! a second unpin takes nobody's pin. A hit makes no allocation here either.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use std::cell::RefCell;
use std::ffi::{CStr, c_char};

use super::bar::{self, BarEntry, VbarBar};
use super::call::{call, invalid, stale};
use super::device::{self, VbarDevice, VbarStream};
use super::model::ModelEntry;
use super::status::VbarStatus;
use super::tag;
use super::value::{Out, OutArray, Plain, byte_range, read_array};
use crate::error::{Error, ErrorCode, Result};
use crate::memory::pager::Hold;
use crate::outcome::Reason;
use crate::runtime::{Allocation, AllocationFault, Fault, Guard, Runtime};
use crate::slots::{Handles, Ref, SlotCache, Tokens};
use crate::sync::Mutex;
use crate::units::Stream;

/// Pins of one fault, given back once. 0 is none; ids are never used again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct VbarToken {
    /// The id.
    pub id: u64,
}

/// A piece of a VBAR whose bytes the program writes itself. 0 is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct VbarAllocation {
    /// The id.
    pub id: u64,
}

/// What a fault came to; none of them is an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarOutcome {
    /// The bytes are there, pinned, and valid for the stream given.
    Resident = 1,
    /// Mapped and pinned, the bytes undefined: write them, then `vbar_token_commit`.
    Refill = 2,
    /// Not resident, by decision: use the host's copy. Nothing is pinned.
    Offloaded = 3,
    /// Another caller is filling the allocation. Nothing is pinned.
    Busy = 4,
}

/// Why a range is offloaded. A number that a program does not know is a new reason.
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
    /// A page at or above its VBAR's watermark.
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
}

/// What a fault came to. `address`, `bytes`, `signature` and `token` are 0 unless it is resident or
/// to be refilled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct VbarFault {
    /// Device address of the first byte.
    pub address: u64,
    /// Length in bytes.
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
    /// Its first byte.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

// SAFETY: integers.
unsafe impl Plain for VbarToken {}
// SAFETY: integers.
unsafe impl Plain for VbarAllocation {}
// SAFETY: integers.
unsafe impl Plain for VbarFault {}
// SAFETY: integers.
unsafe impl Plain for VbarRange {}

pub(super) struct AllocationEntry {
    allocation: Allocation,
}

/// What a token's pages belong to.
pub(super) enum Source {
    Bar(Ref<BarEntry>),
    Model(Ref<ModelEntry>),
    Allocation(Ref<AllocationEntry>),
}

/// Whether the token's holder is to write the bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Bytes {
    Valid,
    ToWrite,
}

struct Held {
    source: Source,
    hold: Hold,
    bytes: Bytes,
}

static ALLOCATIONS: Handles<AllocationEntry> = Handles::new(tag::ALLOCATION, 1);
static TOKENS: Tokens<Held> = Tokens::new(tag::TOKEN);

thread_local! {
    static CACHE: RefCell<ThreadCache> = RefCell::default();
}

/// The thread's free slots of `TOKENS`, given back when it ends.
#[derive(Default)]
struct ThreadCache(SlotCache);

impl Drop for ThreadCache {
    fn drop(&mut self) {
        TOKENS.give_back(&mut self.0, usize::MAX);
    }
}

/// With the thread's cache, or one for this call at a thread's end.
#[inline]
fn with_cache<R>(mut work: impl FnMut(&mut SlotCache) -> R) -> R {
    let cached = CACHE.try_with(|cache| work(&mut cache.borrow_mut().0));
    cached.unwrap_or_else(|_| work(&mut ThreadCache::default().0))
}

impl VbarFault {
    const NOTHING: Self = Self {
        address: 0,
        bytes: 0,
        signature: 0,
        token: VbarToken { id: 0 },
        outcome: 0,
        reason: 0,
    };

    pub(super) fn offloaded(reason: Reason) -> Self {
        let (outcome, reason) = (VbarOutcome::Offloaded as u32, VbarReason::from(reason) as u32);
        Self { outcome, reason, ..Self::NOTHING }
    }

    /// What a guard says; its pins have no token yet.
    #[inline]
    fn of(guard: &Guard<'_>, outcome: VbarOutcome) -> Self {
        // Generations only grow, so the newest tells whether any page of the range has another.
        let newest = guard.signature().iter().max().map_or(0, |generation| generation.0);
        Self {
            address: guard.address().0,
            bytes: guard.bytes(),
            signature: newest,
            outcome: outcome as u32,
            ..Self::NOTHING
        }
    }
}

/// Puts pins under a token. With no token left they are given back.
///
/// # Errors
/// `TooManyPins`.
#[inline]
pub(super) fn hand_out(
    source: Source,
    hold: Hold,
    bytes: Bytes,
    fault: VbarFault,
) -> Result<VbarFault> {
    let mut held = Some(Held { source, hold, bytes });
    let put = with_cache(|cache| match held.take().map(|value| TOKENS.put(cache, value)) {
        Some(Ok(id)) => Some(id),
        Some(Err(value)) => {
            held = Some(value);
            None
        }
        None => None,
    });
    if let Some(id) = put {
        return Ok(VbarFault { token: VbarToken { id }, ..fault });
    }
    held.map_or(Ok(()), |held| held.unpin(Stream::NONE))?;
    Err(Error::new(ErrorCode::TooManyPins, "16.7 million tokens are held"))
}

fn take(token: VbarToken) -> Result<Held> {
    with_cache(|cache| TOKENS.take(cache, token.id)).ok_or_else(|| spent(token))
}

impl Held {
    #[inline]
    fn unpin(self, stream: Stream) -> Result<()> {
        let Self { source, hold, bytes } = self;
        match source {
            Source::Bar(entry) => entry.vbar.unpin_hold(hold, stream),
            Source::Model(entry) => entry.bar.vbar().unpin_hold(hold, stream),
            Source::Allocation(entry) => match bytes {
                Bytes::Valid => entry.allocation.unpin_hold(hold, stream),
                Bytes::ToWrite => entry.allocation.abandon(hold, stream),
            },
        }
    }

    fn used_on(&self, stream: Stream) -> Result<()> {
        match &self.source {
            Source::Bar(entry) => entry.vbar.hold_used_on(&self.hold, stream),
            Source::Model(entry) => entry.bar.vbar().hold_used_on(&self.hold, stream),
            Source::Allocation(entry) => entry.allocation.hold_used_on(&self.hold, stream),
        }
    }

    fn commit(&mut self, stream: Stream) -> Result<()> {
        match (&self.source, self.bytes) {
            (Source::Allocation(entry), Bytes::ToWrite) => {
                entry.allocation.commit_hold(&self.hold, stream)?;
                self.bytes = Bytes::Valid;
                Ok(())
            }
            _ => Err(invalid("the token is of no fault that asked for a refill")),
        }
    }
}

/// Makes bytes of a VBAR resident for work on `stream`, and pins them. On a bound VBAR they are the
/// file's; on another they are what was last written while `signature` stays the same. A hit makes
/// no driver call that waits and takes no lock. Thread-safe.
///
/// # Safety
/// `fault` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_bar_fault(
    bar: VbarBar,
    offset: u64,
    bytes: u64,
    stream: VbarStream,
    fault: *mut VbarFault,
) -> VbarStatus {
    call(|| {
        let out = Out::new(fault)?;
        let entry = bar::find(bar)?;
        let (told, hold) = match entry.vbar.fault(byte_range(offset, bytes)?, Stream(stream))? {
            Fault::Resident(guard) => told_and_hold(guard),
            Fault::Offloaded(reason) => {
                out.write(VbarFault::offloaded(reason));
                return Ok(());
            }
        };
        out.write(hand_out(Source::Bar(entry), hold, Bytes::Valid, told)?);
        Ok(())
    })
}

/// Makes several ranges of VBARs of one device resident, each with a token of its own, or none of
/// them: then every element of `faults` says the same reason. Thread-safe.
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
        let runtime = &device::find(device)?.runtime;
        let told = match fault_ranges(runtime, &entries, ranges, Stream(stream))? {
            Fault::Resident(holds) => hand_out_all(entries, holds)?,
            Fault::Offloaded(reason) => vec![VbarFault::offloaded(reason); count],
        };
        out.write(told);
        Ok(())
    })
}

/// What a guard says, and its pins.
#[inline]
pub(super) fn told_and_hold(guard: Guard<'_>) -> (VbarFault, Hold) {
    (VbarFault::of(&guard, VbarOutcome::Resident), guard.into_hold())
}

fn fault_ranges(
    runtime: &Runtime,
    entries: &[Ref<BarEntry>],
    ranges: &[VbarRange],
    stream: Stream,
) -> Result<Fault<Vec<(VbarFault, Hold)>>> {
    let mut wanted = Vec::with_capacity(ranges.len());
    for (entry, range) in entries.iter().zip(ranges) {
        wanted.push((&entry.vbar, byte_range(range.offset, range.bytes)?));
    }
    Ok(match runtime.fault_many(&wanted, stream)? {
        Fault::Resident(guards) => Fault::Resident(guards.into_iter().map(told_and_hold).collect()),
        Fault::Offloaded(reason) => Fault::Offloaded(reason),
    })
}

/// All of them get tokens, or all pins are given back.
fn hand_out_all(
    entries: Vec<Ref<BarEntry>>,
    holds: Vec<(VbarFault, Hold)>,
) -> Result<Vec<VbarFault>> {
    let mut told: Vec<VbarFault> = Vec::with_capacity(holds.len());
    let mut failed = None;
    for (entry, (fault, hold)) in entries.into_iter().zip(holds) {
        if failed.is_some() {
            entry.vbar.unpin_hold(hold, Stream::NONE)?;
            continue;
        }
        match hand_out(Source::Bar(entry), hold, Bytes::Valid, fault) {
            Ok(fault) => told.push(fault),
            Err(error) => failed = Some(error),
        }
    }
    let Some(error) = failed else { return Ok(told) };
    told.into_iter().try_for_each(|fault| take(fault.token)?.unpin(Stream::NONE))?;
    Err(error)
}

/// Gives the pins of a token back, once. `stream` is the one that it was faulted for, which lives
/// still; all work that uses the bytes was enqueued on it before, and they stay until that is done.
/// `VBAR_STREAM_NONE` where that stream was destroyed meanwhile: the pages are evicted last. Another
/// stream is one that used them too. The pins are given back also when a status says that recording
/// the use failed. A token that was to be committed asks for a refill again. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_token_unpin(token: VbarToken, stream: VbarStream) -> VbarStatus {
    call(|| take(token)?.unpin(Stream(stream)))
}

/// Remembers that another stream uses the bytes too; call it after that work was enqueued.
/// Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_token_also_used_on(token: VbarToken, stream: VbarStream) -> VbarStatus {
    call(|| {
        let used = TOKENS.with(token.id, |held| held.used_on(Stream(stream)));
        used.unwrap_or_else(|| Err(spent(token)))
    })
}

/// Declares that everything that writes an allocation's bytes was enqueued on `stream`
/// (`VBAR_STREAM_NONE`: they are in place). The token keeps its pins. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_token_commit(token: VbarToken, stream: VbarStream) -> VbarStatus {
    call(|| {
        let committed = TOKENS.with(token.id, |held| held.commit(Stream(stream)));
        committed.unwrap_or_else(|| Err(spent(token)))
    })
}

#[cold]
fn spent(token: VbarToken) -> Error {
    let text = format!("token {:#x} holds no pins: given back, or never given out", token.id);
    Error::new(ErrorCode::StaleToken, text)
}

/// Takes the next `bytes` of a VBAR that is not bound, 512-byte aligned, for bytes that the program
/// writes itself. They end with the VBAR. Thread-safe.
///
/// # Safety
/// `allocation` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_bar_allocate(
    bar: VbarBar,
    bytes: u64,
    allocation: *mut VbarAllocation,
) -> VbarStatus {
    call(|| {
        let out = Out::new(allocation)?;
        let entry = bar::find(bar)?;
        let made = AllocationEntry { allocation: entry.vbar.allocate(bytes)? };
        let id = ALLOCATIONS.insert(made).map_err(|_| device::too_many("allocations"))?;
        entry.allocations.lock().push(id);
        if bar::find(bar).is_err() {
            // Closed meanwhile, perhaps before the id was listed.
            forget_allocations(&entry.allocations);
            return Err(stale("VBAR", bar.id));
        }
        out.write(VbarAllocation { id });
        Ok(())
    })
}

/// Ends the ids of a closed VBAR's allocations.
pub(super) fn forget_allocations(allocations: &Mutex<Vec<u64>>) {
    let ids = std::mem::take(&mut *allocations.lock());
    for id in ids {
        ALLOCATIONS.close(id);
    }
}

fn find(allocation: VbarAllocation) -> Result<Ref<AllocationEntry>> {
    ALLOCATIONS.get(allocation.id).ok_or_else(|| stale("allocation", allocation.id))
}

/// Tells an allocation's device address, which never changes, and its place in the VBAR in bytes.
/// Thread-safe.
///
/// # Safety
/// The outputs are NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_allocation_place(
    allocation: VbarAllocation,
    address: *mut u64,
    range: *mut u64,
    bytes: *mut u64,
) -> VbarStatus {
    call(|| {
        let out = (Out::new(address)?, Out::new(range)?, Out::new(bytes)?);
        let entry = find(allocation)?;
        let place = entry.allocation.range();
        out.0.write(entry.allocation.address().0);
        out.1.write(place.start);
        out.2.write(place.end - place.start);
        Ok(())
    })
}

/// Makes an allocation resident for work on `stream`, and pins it. When its bytes are no longer
/// valid the outcome is a refill, and the stream is the one that will write them. Thread-safe.
///
/// # Safety
/// `fault` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_allocation_fault(
    allocation: VbarAllocation,
    stream: VbarStream,
    fault: *mut VbarFault,
) -> VbarStatus {
    call(|| fault_allocation(allocation, fault, |allocation| allocation.fault(Stream(stream))))
}

/// As `vbar_allocation_fault`, waiting while another caller fills. Thread-safe.
///
/// # Safety
/// `fault` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_allocation_fault_wait(
    allocation: VbarAllocation,
    stream: VbarStream,
    fault: *mut VbarFault,
) -> VbarStatus {
    call(|| fault_allocation(allocation, fault, |allocation| allocation.fault_wait(Stream(stream))))
}

fn fault_allocation(
    allocation: VbarAllocation,
    fault: *mut VbarFault,
    serve: impl FnOnce(&Allocation) -> Result<AllocationFault<'_>>,
) -> Result<()> {
    let out = Out::new(fault)?;
    let entry = find(allocation)?;
    let (told, hold, bytes) = match serve(&entry.allocation)? {
        AllocationFault::Resident(guard) => {
            (VbarFault::of(&guard, VbarOutcome::Resident), guard.into_hold(), Bytes::Valid)
        }
        AllocationFault::Refill(fill) => {
            (VbarFault::of(fill.guard(), VbarOutcome::Refill), fill.into_hold(), Bytes::ToWrite)
        }
        AllocationFault::Offloaded(reason) => {
            out.write(VbarFault::offloaded(reason));
            return Ok(());
        }
        AllocationFault::Busy => {
            out.write(VbarFault { outcome: VbarOutcome::Busy as u32, ..VbarFault::NOTHING });
            return Ok(());
        }
    };
    out.write(hand_out(Source::Allocation(entry), hold, bytes, told)?);
    Ok(())
}

/// Declares an allocation's bytes no good: the next fault asks for a refill. Give tokens back
/// first; during a fill it does nothing. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_allocation_invalidate(allocation: VbarAllocation) -> VbarStatus {
    call(|| {
        find(allocation)?.allocation.invalidate();
        Ok(())
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
        }
    }
}
