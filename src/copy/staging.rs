//! The staging ring: page-locked slots between file and device.
//!
//! A thread takes a slot, fills it, enqueues its copy, records a fence and gives the slot back with
//! the fence's ticket; the next taker waits for that ticket. No lock is held while it waits.

#[cfg(all(test, vbar_loom))]
mod every_order;

use std::sync::Arc;

use crate::copy::ring::Ring;
use crate::error::Result;
use crate::host::locked::{self, LockedSlot};
use crate::outcome::WaitKind;
use crate::process;
use crate::sync::device::Device;
use crate::sync::fence::Cover;
use crate::sync::ticket::Ticket;
use crate::sync::{AtomicU64, Condvar, Mutex, Relaxed};

/// See the module's text. A clone is the same ring.
#[derive(Clone)]
pub struct Staging {
    shared: Arc<Shared>,
    slot_bytes: usize,
}

struct Shared {
    ring: Mutex<Ring<LockedSlot>>,
    returned: Condvar,
    slot_count: AtomicU64,
}

/// A slot in use by one thread; given back on drop.
pub struct StagingSlot {
    shared: Arc<Shared>,
    slot: Option<LockedSlot>,
    ticket: Ticket,
}

impl Staging {
    /// A ring of `count` slots of `slot_bytes`.
    ///
    /// # Errors
    /// `HostMemory`.
    pub fn new(device: &Device, count: usize, slot_bytes: usize) -> Result<Self> {
        let slots = locked::allocate(&device.driver, count, slot_bytes)?;
        Ok(Self::of(slots, slot_bytes))
    }

    /// A ring of no slots, for memory that cannot be locked: nothing can be taken from it.
    #[must_use]
    pub fn empty(slot_bytes: usize) -> Self {
        Self::of(Vec::new(), slot_bytes)
    }

    /// A ring of slots of `slot_bytes` that there are already.
    #[must_use]
    pub fn of(slots: Vec<LockedSlot>, slot_bytes: usize) -> Self {
        let slot_count = AtomicU64::new(slots.len() as u64);
        let (ring, returned) = (Mutex::new(Ring::new(slots)), Condvar::new());
        Self { shared: Arc::new(Shared { ring, returned, slot_count }), slot_bytes }
    }

    /// One more slot.
    pub fn add(&self, slot: LockedSlot) {
        debug_assert_eq!(slot.len(), self.slot_bytes);
        self.shared.slot_count.fetch_add(1, Relaxed);
        self.shared.give_back(slot, Ticket::NONE);
    }

    /// Takes slots out for good whose last copies are done, as many as told at most, so that
    /// `left` stay at least. Whoever waits for a slot of a ring that has none any more is told.
    ///
    /// # Errors
    /// What the driver says.
    pub fn take_out(&self, device: &Device, at_most: usize, left: u64) -> Result<Vec<LockedSlot>> {
        let mut taken = Vec::new();
        while taken.len() < at_most && self.slot_count() > left {
            let mut slot = match self.try_take(device) {
                Ok(Some(slot)) => slot,
                Ok(None) => break,
                // Those that are out are their taker's to give back.
                Err(_) if !taken.is_empty() => break,
                Err(error) => return Err(error),
            };
            let spare = |count: u64| (count > left).then(|| count - 1);
            if self.shared.slot_count.fetch_update(Relaxed, Relaxed, spare).is_err() {
                break;
            }
            taken.extend(slot.slot.take());
        }
        if !taken.is_empty() && self.slot_count() == 0 {
            // Under the lock: whoever has seen the last slot waits by now.
            let _ring = self.shared.ring.lock();
            self.shared.returned.notify_all();
        }
        Ok(taken)
    }

    /// Slots in all.
    #[must_use]
    pub fn slot_count(&self) -> u64 {
        self.shared.slot_count.load(Relaxed)
    }

    /// Bytes of one slot.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Page-locked bytes in all.
    #[must_use]
    pub fn locked_bytes(&self) -> u64 {
        self.slot_count() * self.slot_bytes as u64
    }

    /// Takes a slot whose last copy is done, waiting for one if need be; `None` when the ring has
    /// no slots, or none any more.
    ///
    /// # Errors
    /// Those of waiting: `TimedOut`, `Cancelled`, what the driver says.
    pub fn take(&self, device: &Device) -> Result<Option<StagingSlot>> {
        let Some((slot, ticket)) = self.take_any(device)? else { return Ok(None) };
        // From here on a failure gives the slot back, its ticket unchanged.
        let mut slot = self.lease(slot, ticket);
        device.wait_passed(&[ticket], WaitKind::Staging)?;
        slot.ticket = Ticket::NONE;
        Ok(Some(slot))
    }

    /// Takes a slot if there is one whose last copy is done.
    ///
    /// # Errors
    /// What the driver says.
    pub fn try_take(&self, device: &Device) -> Result<Option<StagingSlot>> {
        let Some(next) = self.shared.ring.lock().next() else { return Ok(None) };
        let cover = device.fences.cover(next).map_err(|error| device.note(error))?;
        if cover != Cover::Passed {
            return Ok(None);
        }
        let taken = {
            let mut ring = self.shared.ring.lock();
            // Another thread may have been quicker.
            if ring.next() == Some(next) { ring.take() } else { None }
        };
        Ok(taken.map(|(slot, _)| self.lease(slot, Ticket::NONE)))
    }

    fn lease(&self, slot: LockedSlot, ticket: Ticket) -> StagingSlot {
        StagingSlot { shared: Arc::clone(&self.shared), slot: Some(slot), ticket }
    }

    fn take_any(&self, device: &Device) -> Result<Option<(LockedSlot, Ticket)>> {
        let idle = self.shared.ring.lock().take();
        if idle.is_some() {
            return Ok(idle);
        }
        let wait = device.wait(WaitKind::Staging);
        loop {
            // Asked with the ring free: the answer may come from the program's own code.
            let patience = wait.check()?;
            let mut ring = self.shared.ring.lock();
            let idle = ring.take();
            if idle.is_some() || self.slot_count() == 0 {
                return Ok(idle);
            }
            self.shared.returned.wait_for(&mut ring, patience);
            let idle = ring.take();
            if idle.is_some() {
                return Ok(idle);
            }
        }
    }
}

impl Shared {
    fn give_back(&self, slot: LockedSlot, ticket: Ticket) {
        self.ring.lock().give_back(slot, ticket);
        self.returned.notify_one();
    }
}

impl StagingSlot {
    /// The slot's memory.
    pub fn memory(&mut self) -> &mut LockedSlot {
        self.slot.as_mut().expect("the slot goes back when this is dropped")
    }

    /// Whoever takes the slot after this one waits for `ticket`, however it comes back.
    pub fn set_busy_until(&mut self, ticket: Ticket) {
        self.ticket = ticket;
    }

    /// Gives the slot back; the next taker waits for `ticket`.
    pub fn give_back(mut self, ticket: Ticket) {
        self.ticket = ticket;
    }
}

impl Drop for StagingSlot {
    fn drop(&mut self) {
        let Some(slot) = self.slot.take() else { return };
        // In a forked child it is the parent's, in the middle of a call as it may be.
        match process::ending() {
            true => std::mem::forget(slot),
            false => self.shared.give_back(slot, self.ticket),
        }
    }
}
