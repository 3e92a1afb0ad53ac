//! Numbers of a device, in one struct that grows.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use super::call::call;
use super::device::{self, VbarDevice};
use super::fault::VbarReason;
use super::status::VbarStatus;
use super::value::{Growing, OutGrowing, Plain};
use crate::memory::budget::BudgetSource;
use crate::outcome::WaitKind;
use crate::runtime::Statistics;

/// What determines the budget now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarBudgetSource {
    /// The explicit limit.
    Limit = 1,
    /// What is free, less the headroom.
    DriverFree = 2,
    /// The driver refused memory that it had called free.
    DriverRefused = 3,
    /// Another program took memory.
    Shrunk = 4,
}

/// What the CPU waited for: an index of `VbarStatistics::waits`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarWaitKind {
    /// Another thread's driver calls on the same page.
    Claim = 0,
    /// A page-locked slot whose last copy is not done.
    Staging = 1,
    /// A frame: a victim's fences where aliasing is off, or the end of what the engine has in hand.
    Frame = 2,
    /// The page's own old mapping.
    OldMapping = 3,
    /// A fence, for a caller that gave no stream.
    Ready = 4,
    /// Fences of pages that are to be given back.
    Release = 5,
    /// The whole context.
    Context = 6,
    /// Bytes that threads of the library's own read from a file.
    Read = 7,
    /// Host memory being registered with the driver, or given back.
    Register = 8,
}

/// Waits of one kind.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct VbarWaitCount {
    /// How often.
    pub count: u64,
    /// Their time together, in nanoseconds.
    pub nanos: u64,
}

/// Numbers of a device. Those of memory were taken together; counts only ever grow, but for what
/// the engine does now.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarStatistics {
    /// `sizeof(VbarStatistics)`, set by the caller.
    pub size: usize,
    /// Bytes of all frames held.
    pub used_bytes: u64,
    /// The most that `used_bytes` was.
    pub peak_bytes: u64,
    /// Bytes of frames that no page has.
    pub free_bytes: u64,
    /// Bytes of frames lost to a failed undo, counted in `used_bytes`.
    pub quarantined_bytes: u64,
    /// What may be held.
    pub budget_bytes: u64,
    /// A `VbarBudgetSource`.
    pub budget_source: u32,
    /// VBARs open.
    pub bar_count: u32,
    /// VBARs closed that still have pages.
    pub closing_bar_count: u32,
    /// Mappings that outlast their pages.
    pub lingering_count: u32,
    /// Pages that have a frame.
    pub resident_page_count: u64,
    /// Pages whose addresses are lost.
    pub quarantined_page_count: u64,
    /// Page-locked host bytes held.
    pub locked_bytes: u64,
    /// Faults that found every page resident.
    pub hit_count: u64,
    /// Faults that had to map or fill a page.
    pub miss_count: u64,
    /// Pages that got a frame, be it one of the host.
    pub mapped_page_count: u64,
    /// Pages that lost their frame.
    pub evicted_page_count: u64,
    /// Of those, pages whose frame was at its next page before its users had passed.
    pub aliased_page_count: u64,
    /// Bytes copied to the device by fills.
    pub filled_bytes: u64,
    /// Driver calls tried again after a transient code.
    pub driver_retry_count: u64,
    /// Bytes of the poison frame, counted in `used_bytes`.
    pub poison_bytes: u64,
    /// Pages that read as poison now.
    pub poisoned_page_count: u64,
    /// Pages that were evicted and got no poison although they should.
    pub poison_failure_count: u64,
    /// Refusals by `VbarReason`.
    pub refusal_count: [u64; 32],
    /// Waits of the CPU by `VbarWaitKind`.
    pub waits: [VbarWaitCount; 16],
    /// Of the pages that got a frame, those that were fetched before a fault asked for them.
    pub ahead_page_count: u64,
    /// Steps for which the order that the engine expects has been right; this and what follows is
    /// of now, and 0 without threads. A step is a fault of bound VBARs, told to the engine while
    /// these exceed the budget.
    pub engine_trust: u64,
    /// Steps that were not as expected so far.
    pub engine_departure_count: u64,
    /// Plans made so far of which pages stay.
    pub engine_plan_count: u64,
    /// Pages of the plan in force, in all; 0 without one.
    pub engine_planned_page_count: u64,
    /// Of those, the ones that stay.
    pub engine_kept_page_count: u64,
    /// Steps that the engine is ahead of the program.
    pub engine_ahead_step_count: u64,
    /// Bytes of host frames held, page-locked and in none of the other numbers: see
    /// `VbarDeviceOptions::host_mapped`.
    pub host_mapped_bytes: u64,
    /// Of `locked_bytes`, those of slots between file and device.
    pub locked_ring_bytes: u64,
    /// Of `locked_bytes`, those that hold pages of bound VBARs between fills.
    pub locked_cache_bytes: u64,
    /// Of the bytes that fills took from their sources: copied from page-locked memory that held
    /// them from an earlier fill, with nothing read for them. These five only grow; a resident
    /// page takes no bytes.
    pub source_locked_cache_bytes: u64,
    /// Copied from registered pages of the page cache.
    pub source_registered_bytes: u64,
    /// Read from the page cache, without waiting for a disk.
    pub source_page_cache_bytes: u64,
    /// Read from the disk.
    pub source_disk_bytes: u64,
    /// Of `source_disk_bytes`, those that went past the page cache (`O_DIRECT`).
    pub source_direct_bytes: u64,
    /// Copied from page-locked memory of the program that a VBAR is bound to: the device read them
    /// where they are. This one and the next only grow.
    pub source_host_locked_bytes: u64,
    /// Read from other memory of the program that a VBAR is bound to.
    pub source_host_pageable_bytes: u64,
    /// Of `locked_bytes`, pages of files that are registered: they would be in memory without, but
    /// could be dropped.
    pub locked_registered_bytes: u64,
    /// Of `locked_bytes`, those that hold what `vbar_bar_save` saved, room for more included.
    pub locked_saved_bytes: u64,
    /// Of `locked_bytes`, those that are to go: what is above the allowance, and all that is saved
    /// while the system is short of memory. The library gives back what it can by itself; what is
    /// saved goes by `vbar_bar_drop_save`.
    pub locked_excess_bytes: u64,
}

// SAFETY: integers and arrays of them; the size first.
unsafe impl Plain for VbarStatistics {}
// SAFETY: as above.
unsafe impl Growing for VbarStatistics {
    const FIRST_BYTES: usize =
        std::mem::offset_of!(VbarStatistics, waits) + size_of::<[VbarWaitCount; 16]>();
}

/// Tells everything that is counted. Statuses: the common ones. Thread-safe; the numbers are
/// consistent while others work.
///
/// # Safety
/// `statistics` is NULL or points to as many bytes as its size field says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_device_statistics(
    device: VbarDevice,
    statistics: *mut VbarStatistics,
) -> VbarStatus {
    call(|| {
        let out = OutGrowing::new(statistics)?;
        out.write(VbarStatistics::from(device::find(device)?.runtime.statistics()));
        Ok(())
    })
}

impl From<Statistics> for VbarStatistics {
    fn from(from: Statistics) -> Self {
        let (memory, engine, sources) = (from.memory, from.engine, from.sources);
        let mut refusal_count = [0; 32];
        for (reason, count) in from.refusals {
            refusal_count[VbarReason::from(reason) as usize] = count;
        }
        let mut waits = [VbarWaitCount::default(); 16];
        for (kind, wait) in from.waits {
            let nanos = u64::try_from(wait.total.as_nanos()).unwrap_or(u64::MAX);
            waits[VbarWaitKind::from(kind) as usize] = VbarWaitCount { count: wait.count, nanos };
        }
        Self {
            size: 0,
            used_bytes: memory.used_bytes,
            peak_bytes: memory.peak_bytes,
            free_bytes: memory.free_bytes,
            quarantined_bytes: memory.quarantined_bytes,
            budget_bytes: memory.budget_bytes,
            budget_source: VbarBudgetSource::from(memory.budget_source) as u32,
            bar_count: memory.bars,
            closing_bar_count: memory.closing_bars,
            lingering_count: u32::try_from(memory.lingering_mappings).unwrap_or(u32::MAX),
            resident_page_count: memory.resident_pages,
            quarantined_page_count: memory.quarantined_pages,
            locked_bytes: from.locked_bytes,
            hit_count: from.hits,
            miss_count: from.misses,
            mapped_page_count: from.pages_mapped,
            evicted_page_count: from.pages_evicted,
            aliased_page_count: from.pages_aliased,
            filled_bytes: from.bytes_filled,
            driver_retry_count: from.driver_retries,
            poison_bytes: memory.poison_bytes,
            poisoned_page_count: memory.poisoned_pages,
            poison_failure_count: from.poison_failures,
            refusal_count,
            waits,
            ahead_page_count: from.pages_ahead,
            engine_trust: engine.trust,
            engine_departure_count: engine.departures,
            engine_plan_count: engine.plans,
            engine_planned_page_count: engine.planned_pages,
            engine_kept_page_count: engine.kept_pages,
            engine_ahead_step_count: engine.steps_ahead,
            host_mapped_bytes: memory.host_mapped_bytes,
            locked_ring_bytes: from.locked.ring_bytes,
            locked_cache_bytes: from.locked.cache_bytes,
            source_locked_cache_bytes: sources.locked_cache_bytes,
            source_registered_bytes: sources.registered_bytes,
            source_page_cache_bytes: sources.page_cache_bytes,
            source_disk_bytes: sources.disk_bytes,
            source_direct_bytes: sources.direct_bytes,
            source_host_locked_bytes: sources.host_locked_bytes,
            source_host_pageable_bytes: sources.host_pageable_bytes,
            locked_registered_bytes: from.locked.registered_bytes,
            locked_saved_bytes: from.locked.saved_bytes,
            locked_excess_bytes: from.locked.excess_bytes,
        }
    }
}

impl From<BudgetSource> for VbarBudgetSource {
    fn from(source: BudgetSource) -> Self {
        match source {
            BudgetSource::Limit => Self::Limit,
            BudgetSource::DriverFree => Self::DriverFree,
            BudgetSource::DriverRefused => Self::DriverRefused,
            BudgetSource::Shrunk => Self::Shrunk,
        }
    }
}

impl From<WaitKind> for VbarWaitKind {
    fn from(kind: WaitKind) -> Self {
        match kind {
            WaitKind::Claim => Self::Claim,
            WaitKind::Staging => Self::Staging,
            WaitKind::Frame => Self::Frame,
            WaitKind::OldMapping => Self::OldMapping,
            WaitKind::Ready => Self::Ready,
            WaitKind::Release => Self::Release,
            WaitKind::Context => Self::Context,
            WaitKind::Read => Self::Read,
            WaitKind::Register => Self::Register,
        }
    }
}
