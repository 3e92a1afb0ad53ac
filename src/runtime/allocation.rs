//! An allocation in a bare VBAR: knows whether its bytes are still those that were written.
//!
//! Valid means that a fill was committed and every page still has the generation that it had then.
//! One caller fills at a time. The state is atomic, so that a hit takes no lock.

use std::ops::Range;
use std::sync::Arc;

use super::bar::{Fault, Guard, VbarInner};
use crate::driver::CaptureState;
use crate::error::Result;
use crate::outcome::{Reason, WaitKind};
use crate::sync::ticket::Ticket;
use crate::sync::{AcqRel, Acquire, AtomicU32, AtomicU64, Relaxed, Release};
use crate::units::{DeviceAddress, Generation, Stream};

const EMPTY: u32 = 0;
const FILLING: u32 = 1;
const VALID: u32 = 2;

/// A piece of a bare VBAR with contents of its own.
pub struct Allocation {
    vbar: Arc<VbarInner>,
    range: Range<u64>,
    state: AtomicU32,
    /// Generations of the pages at the last commit.
    generations: Box<[AtomicU64]>,
    /// After this ticket the committed bytes are in place.
    ready: AtomicU64,
}

/// What a fault of an allocation came to.
#[derive(Debug)]
#[must_use = "a guard that is dropped at once pins nothing"]
pub enum AllocationFault<'a> {
    /// The bytes are those of the last commit, valid for the stream given.
    Resident(Guard<'a>),
    /// Mapped and pinned, the bytes undefined: write them on the stream given, then commit.
    Refill(FillGuard<'a>),
    /// Not resident, by decision; nothing has changed.
    Offloaded(Reason),
    /// Another caller is filling the allocation; nothing has changed.
    Busy,
}

impl Allocation {
    pub(super) fn new(vbar: Arc<VbarInner>, range: Range<u64>) -> Self {
        let pages = vbar.bar.page_size.pages_of(&range);
        let generations = pages.map(|_| AtomicU64::new(0)).collect();
        let (state, ready) = (AtomicU32::new(EMPTY), AtomicU64::new(0));
        Self { vbar, range, state, generations, ready }
    }

    /// Address of the first byte; it never changes.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.vbar.bar.space.base.offset(self.range.start)
    }

    /// The bytes' place in the VBAR.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Makes the allocation resident for work on `stream`. When its bytes are not valid the stream
    /// is the one that will write them.
    ///
    /// # Errors
    /// As [`super::Vbar::fault`].
    pub fn fault(&self, stream: Stream) -> Result<AllocationFault<'_>> {
        let guard = match self.vbar.fault(self.range.clone(), stream)? {
            Fault::Resident(guard) => guard,
            Fault::Offloaded(reason) => return Ok(AllocationFault::Offloaded(reason)),
        };
        loop {
            let state = self.state.load(Acquire);
            if state == VALID && self.is_valid_for(guard.signature()) {
                self.order(&guard)?;
                return Ok(AllocationFault::Resident(guard));
            }
            if state == FILLING {
                guard.release_unused();
                return Ok(AllocationFault::Busy);
            }
            // From Empty or from a Valid whose pages lost their bytes.
            if self.state.compare_exchange(state, FILLING, AcqRel, Acquire).is_ok() {
                // Pages that kept their frames may still be in use elsewhere: those of an
                // allocation that lost only some of its pages, or whose fill was given up.
                let pager = self.vbar.runtime.pager();
                if let Err(error) = pager.order_after_users(&self.vbar.bar, guard.hold()) {
                    self.state.store(EMPTY, Release);
                    return Err(error);
                }
                return Ok(AllocationFault::Refill(FillGuard {
                    allocation: self,
                    guard: Some(guard),
                }));
            }
        }
    }

    /// As [`Allocation::fault`], waiting while another caller fills.
    ///
    /// # Errors
    /// As [`Allocation::fault`], `TimedOut` and `Cancelled`.
    pub fn fault_wait(&self, stream: Stream) -> Result<AllocationFault<'_>> {
        let mut wait = None;
        loop {
            match self.fault(stream)? {
                AllocationFault::Busy => {}
                outcome => return Ok(outcome),
            }
            let device = self.vbar.runtime.device();
            wait.get_or_insert_with(|| device.wait(WaitKind::Claim)).pause()?;
        }
    }

    /// The bytes are no good any more: the next fault asks for a refill. Not during a fill.
    pub fn invalidate(&self) {
        let _ = self.state.compare_exchange(VALID, EMPTY, AcqRel, Relaxed);
    }

    /// The pages are pinned: if they have the committed generations now, they keep them.
    fn is_valid_for(&self, signature: &[Generation]) -> bool {
        let committed = self.generations.iter().map(|generation| generation.load(Acquire));
        committed.eq(signature.iter().map(|generation| generation.0))
    }

    fn order(&self, guard: &Guard<'_>) -> Result<()> {
        let ready = Ticket::from_bits(self.ready.load(Acquire));
        let hold = guard.hold();
        let device = self.vbar.runtime.device();
        let ordered = match hold.slot {
            Some(slot) => device.fences.ordered_before(ready, slot),
            None => device.fences.known_passed(ready),
        };
        if ordered {
            return Ok(());
        }
        let _scope = device.enter()?;
        let capture = match hold.stream.is_none() {
            true => CaptureState::None,
            false => device.capture_state(hold.stream)?,
        };
        self.vbar.runtime.pager().order_after(ready, hold.stream, hold.slot, capture)
    }
}

/// The right to write an allocation's bytes. Dropped without a commit, the next fault asks for a
/// refill again.
#[derive(Debug)]
pub struct FillGuard<'a> {
    allocation: &'a Allocation,
    guard: Option<Guard<'a>>,
}

impl<'a> FillGuard<'a> {
    /// Address of the first byte.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.allocation.address()
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.allocation.range.end - self.allocation.range.start
    }

    /// Declares that everything that writes the bytes was enqueued on `stream`, and keeps the pins.
    /// With `Stream::NONE` the bytes are in place already.
    ///
    /// # Errors
    /// What the driver says of the fence; the allocation asks for a refill again then.
    pub fn commit(mut self, stream: Stream) -> Result<Guard<'a>> {
        let allocation = self.allocation;
        let device = allocation.vbar.runtime.device();
        let ready = {
            let _scope = device.enter()?;
            match device.fences.slot_of(stream)? {
                Some(slot) => device.fences.record(stream, slot)?,
                None => Ticket::NONE,
            }
        };
        let guard = self.guard.take().expect("a fill guard holds until it is consumed");
        for (place, generation) in allocation.generations.iter().zip(guard.signature()) {
            place.store(generation.0, Relaxed);
        }
        allocation.ready.store(ready.to_bits(), Relaxed);
        allocation.state.store(VALID, Release);
        Ok(guard)
    }
}

impl Drop for FillGuard<'_> {
    fn drop(&mut self) {
        // The guard, where it is still here, unpins with a stamp: writes may have been enqueued.
        // Only then may another caller fill, who waits for the stamp.
        if let Some(guard) = self.guard.take() {
            drop(guard);
            self.allocation.state.store(EMPTY, Release);
        }
    }
}

impl std::fmt::Debug for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Allocation({} bytes at {})", self.range.end - self.range.start, self.address())
    }
}
