//! Allocations: pieces of a VBAR whose bytes the program writes itself.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use super::bar::{self, VbarBar};
use super::call::{call, stale};
use super::device::{self, VbarStream};
use super::fault::{VbarFault, VbarOutcome};
use super::status::VbarStatus;
use super::tag;
use super::token::{Bytes, Reserved, Source};
use super::value::{Out, Plain};
use crate::error::Result;
use crate::runtime::{Allocation, AllocationFault};
use crate::slots::{Handles, Ref, Spread, thread};
use crate::sync::Mutex;
use crate::units::Stream;

/// A piece of a VBAR whose bytes the program writes itself. 0 is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct VbarAllocation {
    /// The id.
    pub id: u64,
}

// SAFETY: integers.
unsafe impl Plain for VbarAllocation {}

pub(super) struct AllocationEntry {
    pub(super) allocation: Allocation,
}

static ALLOCATIONS: Handles<AllocationEntry> = Handles::new(tag::ALLOCATION, Spread::One);

/// Takes the next `bytes` of a VBAR that is not bound, 512-byte aligned, for bytes that the program
/// writes itself. They end with the VBAR. Statuses: the common ones, `NO_ADDRESSES` when they do
/// not fit, `CLOSED`, `DEVICE_LOST`; `INVALID_ARGUMENT` on a bound VBAR. Thread-safe.
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
        // Before the bytes, which nobody gets back.
        let place = ALLOCATIONS.reserve().ok_or_else(|| device::too_many("allocations"))?;
        let id = place.fill(AllocationEntry { allocation: entry.vbar.allocate(bytes)? });
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
    ALLOCATIONS.close_all(&ids);
}

fn find(allocation: VbarAllocation) -> Result<Ref<AllocationEntry>> {
    ALLOCATIONS.get(allocation.id).ok_or_else(|| stale("allocation", allocation.id))
}

/// Tells an allocation's device address, which never changes, its first byte in the VBAR, and its
/// length in bytes. Statuses: the common ones. Thread-safe.
///
/// # Safety
/// The outputs are NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_allocation_place(
    allocation: VbarAllocation,
    address: *mut u64,
    bar_offset: *mut u64,
    bytes: *mut u64,
) -> VbarStatus {
    call(|| {
        let out = (Out::new(address)?, Out::new(bar_offset)?, Out::new(bytes)?);
        let entry = find(allocation)?;
        let place = entry.allocation.range();
        out.0.write(entry.allocation.address().0);
        out.1.write(place.start);
        out.2.write(place.end - place.start);
        Ok(())
    })
}

/// Makes an allocation resident for work on `stream`, and pins it. When its bytes are no longer
/// valid the outcome is a refill, and the stream is the one that will write them. Statuses: the
/// common ones, the driver's, `CLOSED`, `TIMED_OUT`, `CANCELLED`, `TOO_MANY_PINS`, `UNSUPPORTED`
/// for a use that no fence covers where waits for the context are off. Thread-safe.
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

/// As `vbar_allocation_fault`, waiting while another caller fills. Statuses: those of
/// `vbar_allocation_fault`. Thread-safe.
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
    let reserved = thread::with(Reserved::take)?;
    let (told, hold, bytes) = match serve(&entry.allocation)? {
        AllocationFault::Resident(guard) => {
            (VbarFault::of(&guard, VbarOutcome::Resident), guard.into_hold(), Bytes::Valid)
        }
        AllocationFault::Refill(fill) => {
            (VbarFault::of(fill.guard(), VbarOutcome::Refill), fill.into_hold(), Bytes::ToWrite)
        }
        AllocationFault::Offloaded(refusal) => {
            out.write(VbarFault::offloaded(refusal));
            return Ok(());
        }
        AllocationFault::Busy => {
            out.write(VbarFault { outcome: VbarOutcome::Busy as u32, ..VbarFault::NOTHING });
            return Ok(());
        }
    };
    let token = reserved.hand_out(Source::Allocation(entry), hold, bytes);
    out.write(VbarFault { token, ..told });
    Ok(())
}

/// Declares an allocation's bytes no good: the next fault asks for a refill. Give tokens back
/// first; during a fill it does nothing. Statuses: the common ones. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_allocation_invalidate(allocation: VbarAllocation) -> VbarStatus {
    call(|| {
        find(allocation)?.allocation.invalidate();
        Ok(())
    })
}
