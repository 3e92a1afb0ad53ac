//! When pages that the program writes are ready for it: clear of their frames' former users, and
//! with [`Scrub`] of what these left in them.
//!
//! Frames are cleared after the commit point, since until then the bytes are still those of the
//! page before. On the stream that will write, which is behind the frames' former users by then;
//! without a stream on the fill stream, and the CPU waits for the pages as for any that are not
//! ready. Pages that are filled are the filler's to clear (`copy/scrub`).

use super::{Claim, Placed, Writer};
use crate::error::Result;
use crate::memory::pager::Pager;
use crate::options::Scrub;
use crate::sync::fence::StreamSlot;
use crate::sync::ticket::Ticket;
use crate::units::Stream;

impl Pager {
    /// Clears the frames of the bare pages among the claims, whose indexes are given. Returns the
    /// ticket behind which all of them are; `None` where nothing is to be cleared.
    pub(super) fn scrub(
        &self,
        placed: &[Placed],
        bare: &[usize],
        caller: Option<Writer>,
    ) -> Result<Option<Ticket>> {
        if self.device.options.scrub == Scrub::Off || bare.is_empty() {
            return Ok(None);
        }
        let (stream, slot) = self.scrub_stream(caller)?;
        let (driver, page_bytes) = (&self.device.driver, self.page_bytes());
        let follows = |left: &usize, right: &usize| {
            let (left, right) = (&placed[*left].claim, &placed[*right].claim);
            left.bar.id == right.bar.id && left.page.0 + 1 == right.page.0
        };
        for run in bare.chunk_by(follows) {
            let first = &placed[run[0]].claim;
            let address = first.bar.address(first.page);
            let bytes = run.len() as u64 * page_bytes;
            let cleared = self.device.retry(|| driver.memset_d8_async(address, 0, bytes, stream));
            cleared.map_err(|error| self.device.note(error.into()))?;
        }
        let ticket = self.device.retry(|| self.device.fences.record(stream, slot));
        ticket.map(Some).map_err(|error| self.device.note(error))
    }

    /// The ticket after which a page that the program fills may be written by anybody. `cleared`
    /// is the one behind which the frames of the request are clear of their former users.
    pub(super) fn clear(
        &self,
        claim: &Claim,
        caller: Option<Writer>,
        cleared: &mut Option<Ticket>,
    ) -> Result<Ticket> {
        if claim.users.is_empty() {
            return Ok(Ticket::NONE);
        }
        // Another allocation in the same page may be written through another stream: that one has
        // to wait for the frame's former users as well, which the caller's stream does already.
        if let Some(ticket) = *cleared {
            return Ok(ticket);
        }
        let Writer { stream, slot } = caller.expect("frames in use are only taken for a stream");
        let slot = slot.expect("frames in use are only taken for a stream");
        let ticket = self.device.retry(|| self.device.fences.record(stream, slot));
        let ticket = ticket.map_err(|error| self.device.note(error))?;
        *cleared = Some(ticket);
        Ok(ticket)
    }

    /// What may still be clearing the frame of a bare page that comes to nothing.
    pub(super) fn scrubbing(&self, claim: &Claim, caller: Option<Writer>) -> Option<Ticket> {
        if self.device.options.scrub == Scrub::Off || claim.fill.is_some() {
            return None;
        }
        let fences = &self.device.fences;
        let Ok((stream, slot)) = self.scrub_stream(caller) else {
            // Nothing was enqueued on a stream that there is not.
            return None;
        };
        Some(fences.record(stream, slot).unwrap_or_else(|_| fences.stamp_anyhow(slot)))
    }

    fn scrub_stream(&self, caller: Option<Writer>) -> Result<(Stream, StreamSlot)> {
        match caller {
            Some(Writer { stream, slot: Some(slot) }) => Ok((stream, slot)),
            _ => self.filler().map(|filler| filler.stream()),
        }
    }
}
