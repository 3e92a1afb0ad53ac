//! Slots that stay their streams': no other stream takes one over while somebody holds it.
//!
//! A stamp is asked for again where its slot has changed hands (`confirm`). Who cannot ask again,
//! since it has written the slot's number into tables by then, holds the slot meanwhile; and one
//! stamp can be had that is right in any case, [`Fences::stamp_anyhow`].

use super::{Fences, StreamSlot};
use crate::error::Result;
use crate::sync::AcqRel;
use crate::sync::ticket::Ticket;

/// A slot that no other stream takes over before this is dropped. A stream that is retired gives
/// it up all the same.
#[must_use = "the slot may be another stream's once this is dropped"]
pub struct Held<'a> {
    fences: &'a Fences,
    slot: StreamSlot,
}

impl Held<'_> {
    /// The slot.
    #[must_use]
    pub fn slot(&self) -> StreamSlot {
        self.slot
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.fences.entry(self.slot).holds.fetch_sub(1, AcqRel);
    }
}

impl Fences {
    /// Holds the slot of a stream, another one than told where that is another stream's by now.
    ///
    /// # Errors
    /// As [`Fences::slot_of`].
    pub fn hold(&self, slot: StreamSlot) -> Result<Held<'_>> {
        let mut slot = slot;
        loop {
            if let Some(held) = self.hold_if_still(slot) {
                return Ok(held);
            }
            slot = self.find_or_insert(slot.id)?;
        }
    }

    /// As [`Fences::hold`], where the slot is still the stream's. No call of the driver's.
    #[must_use]
    pub fn hold_if_still(&self, slot: StreamSlot) -> Option<Held<'_>> {
        // Written before the slot's stream is read, as `vacate` does it the other way round.
        self.entry(slot).holds.fetch_add(1, AcqRel);
        let held = Held { fences: self, slot };
        self.is_still(slot).then_some(held)
    }

    /// As [`Fences::hold`], for as long as the fences are there: for a stream of the library's own.
    ///
    /// # Errors
    /// As there.
    pub fn keep(&self, slot: StreamSlot) -> Result<StreamSlot> {
        let held = self.hold(slot)?;
        let slot = held.slot();
        std::mem::forget(held);
        Ok(slot)
    }

    /// As [`Fences::stamp`], whatever has become of the slot: of the one that the stream has by
    /// now. Where it has none, and none is to be had, only a wait for the context passes the
    /// ticket.
    #[must_use]
    pub fn stamp_anyhow(&self, slot: StreamSlot) -> Ticket {
        let mut slot = slot;
        loop {
            if let Some(ticket) = self.stamp_if_still(slot) {
                return ticket;
            }
            match self.find_or_insert(slot.id) {
                Ok(other) => slot = other,
                Err(error) => {
                    log::warn!("a use is known to no fence: {error}");
                    return self.unrecorded_stamp();
                }
            }
        }
    }
}
