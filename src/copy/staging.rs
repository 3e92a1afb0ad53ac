//! The staging ring: page-locked slots between file and device.
//!
//! A thread takes a slot, fills it, enqueues its copy, records a fence and gives the slot back with
//! the fence's ticket; the next taker waits for that ticket. No lock is held while it waits.

use crate::copy::ring::Ring;
use crate::error::Result;
use crate::host::locked::{self, LockedSlot};
use crate::outcome::WaitKind;
use crate::sync::device::Device;
use crate::sync::ticket::Ticket;
use crate::sync::{Condvar, Mutex};

/// See the module's text.
pub struct Staging {
    slots: Box<[Mutex<LockedSlot>]>,
    slot_bytes: usize,
    ring: Mutex<Ring>,
    returned: Condvar,
}

/// A slot in use by one thread; given back on drop.
pub struct StagingSlot<'a> {
    staging: &'a Staging,
    index: usize,
    ticket: Ticket,
}

impl Staging {
    /// A ring of `count` slots of `slot_bytes`.
    ///
    /// # Errors
    /// `HostMemory`.
    pub fn new(device: &Device, count: usize, slot_bytes: usize) -> Result<Self> {
        let slots = locked::allocate(&device.driver, count, slot_bytes)?;
        Ok(Self {
            slots: slots.into_iter().map(Mutex::new).collect(),
            slot_bytes,
            ring: Mutex::new(Ring::new(count)),
            returned: Condvar::new(),
        })
    }

    /// Bytes of one slot.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Page-locked bytes in all.
    #[must_use]
    pub fn locked_bytes(&self) -> u64 {
        (self.slots.len() * self.slot_bytes) as u64
    }

    /// Takes a slot whose last copy is done, waiting for one if need be.
    ///
    /// # Errors
    /// Those of waiting: `TimedOut`, `Cancelled`, what the driver says.
    pub fn take(&self, device: &Device) -> Result<StagingSlot<'_>> {
        let (index, ticket) = self.take_any(device)?;
        // From here on a failure gives the slot back, its ticket unchanged.
        let mut slot = StagingSlot { staging: self, index, ticket };
        device.wait_passed(&[ticket], WaitKind::Staging)?;
        slot.ticket = Ticket::NONE;
        Ok(slot)
    }

    fn take_any(&self, device: &Device) -> Result<(usize, Ticket)> {
        let idle = self.ring.lock().take();
        if let Some(taken) = idle {
            return Ok(taken);
        }
        let wait = device.wait(WaitKind::Staging);
        loop {
            // Asked with the ring free: the answer may come from the program's own code.
            let patience = wait.check()?;
            let mut ring = self.ring.lock();
            if let Some(taken) = ring.take() {
                return Ok(taken);
            }
            self.returned.wait_for(&mut ring, patience);
            if let Some(taken) = ring.take() {
                return Ok(taken);
            }
        }
    }
}

impl StagingSlot<'_> {
    /// Works on the slot's memory. The slot is this thread's, so the lock is free.
    pub fn with<T>(&self, work: impl FnOnce(&mut LockedSlot) -> T) -> T {
        work(&mut self.staging.slots[self.index].lock())
    }

    /// Gives the slot back; the next taker waits for `ticket`.
    pub fn give_back(mut self, ticket: Ticket) {
        self.ticket = ticket;
    }
}

impl Drop for StagingSlot<'_> {
    fn drop(&mut self) {
        self.staging.ring.lock().give_back(self.index, self.ticket);
        self.staging.returned.notify_one();
    }
}
