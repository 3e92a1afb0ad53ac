//! Giving pins back: a stamp for each stream that used a page, before its pin count drops.
//!
//! The stamp says which fence the page's frame has to wait for. A record that covers it is made
//! now if it is time to, else by a later call on the same stream. Uses inside a captured graph keep
//! their pins until the graph is gone.

use std::sync::Arc;

use super::{Generations, Hold, Pager};
use crate::driver::{CaptureState, DriverError};
use crate::error::{Error, ErrorCode, Result};
use crate::memory::page_table::Page;
use crate::memory::vbar::Bar;
use crate::sync::fence::{Cover, StreamSlot};
use crate::sync::ticket::Ticket;
use crate::units::{PageIndex, Stream};

impl Pager {
    /// Gives the pins of a hold back. Work that used the pages on the hold's stream was enqueued
    /// before the call; the pages keep their bytes until it is done.
    ///
    /// # Errors
    /// `StaleToken` when a forced end of run took pins back before; the others were given back.
    #[inline]
    pub fn unpin(&self, bar: &Arc<Bar>, hold: &Hold) -> Result<()> {
        if crate::process::ending() {
            return Ok(());
        }
        let Some(slot) = hold.slot else { return self.drop_pins(bar, hold) };
        let _context = match hold.stream.is_implicit() {
            true => Some(self.device.enter_context()?),
            false => None,
        };
        match self.device.capture_state(hold.stream) {
            Ok(CaptureState::Active) => self.pin_to_graph(bar, hold),
            Ok(CaptureState::None) => {
                self.stamp(bar, hold, hold.stream, slot);
                if self.device.fences.is_record_due(slot) {
                    self.record_in_passing(hold.stream, slot);
                }
                self.drop_pins(bar, hold)
            }
            // Nothing can be recorded now, or the handle is no good any more: the stamps stay
            // uncovered until the stream is used again, or the context is waited for.
            Ok(_) | Err(_) => {
                self.stamp(bar, hold, hold.stream, slot);
                self.drop_pins(bar, hold)
            }
        }
    }

    /// Records a fence on the caller's stream. A failure leaves the stamps uncovered, as if it had
    /// not been time yet.
    fn record_in_passing(&self, stream: Stream, slot: StreamSlot) {
        let record = || {
            let _scope = self.device.enter()?;
            self.device.fences.record_in_passing(stream, slot)
        };
        if let Err(error) = record() {
            log::warn!("no fence was recorded: {}", self.device.note(error));
        }
    }

    /// Remembers that `stream` uses the pages too.
    ///
    /// # Errors
    /// What the driver says of the stream.
    pub fn also_used_on(&self, bar: &Bar, hold: &Hold, stream: Stream) -> Result<()> {
        let _context = self.device.enter_context()?;
        if let (CaptureState::None, Some(slot)) = self.device.inspect(stream)? {
            self.stamp(bar, hold, stream, slot);
            return self.device.fences.record(stream, slot).map(|_| ());
        }
        let text = "a stream that is being captured cannot be named beside another one";
        Err(Error::new(ErrorCode::Unsupported, text))
    }

    #[inline]
    fn stamp(&self, bar: &Bar, hold: &Hold, stream: Stream, mut slot: StreamSlot) {
        loop {
            let ticket = self.device.fences.stamp(slot);
            for (_, page) in bar.table.pages(hold.pages.clone()) {
                if !page.stamp(ticket, |other| self.device.fences.known_passed(other)) {
                    self.join_stamp(page, ticket, stream, slot);
                }
            }
            // The slot may have gone to another stream before the stamps were in place.
            match self.device.fences.confirm(slot) {
                Ok(None) => return,
                Ok(Some(other)) => slot = other,
                Err(error) => {
                    log::warn!("a use is known to no fence: {}", self.device.note(error));
                    let unknown = self.device.fences.unrecorded_stamp();
                    for (_, page) in bar.table.pages(hold.pages.clone()) {
                        if !page.stamp(unknown, |_| false) {
                            let users = page.users();
                            let _replaced = users.iter().any(|u| page.replace_stamp(*u, unknown));
                        }
                    }
                    return;
                }
            }
        }
    }

    /// A page that remembers four other streams: ours waits for one of them and takes its place.
    #[cold]
    fn join_stamp(&self, page: &Page, ticket: Ticket, stream: Stream, slot: StreamSlot) {
        let fences = &self.device.fences;
        for user in page.users() {
            let joined = matches!(fences.cover(user), Ok(Cover::Recorded | Cover::Passed))
                && fences.stream_wait(stream, slot, user).is_ok_and(|waits| waits);
            if joined && page.replace_stamp(user, ticket) {
                return;
            }
        }
        // None of them is recorded: the page is known to be free only after a context wait.
        let unknown = fences.unrecorded_stamp();
        let replaced = page.users().iter().any(|user| page.replace_stamp(*user, unknown));
        debug_assert!(replaced || page.users().len() < 5, "a full page has a stamp to replace");
    }

    #[inline]
    fn drop_pins(&self, bar: &Bar, hold: &Hold) -> Result<()> {
        if let Generations::One(generation) = hold.generations {
            return bar.table.page(PageIndex(hold.pages.start)).unpin(generation);
        }
        let mut result = Ok(());
        let pages = bar.table.pages(hold.pages.clone());
        for ((_, page), generation) in pages.zip(hold.generations.as_slice()) {
            if let Err(error) = page.unpin(*generation) {
                result = Err(error);
            }
        }
        result
    }

    /// The pages of a captured use stay pinned until the graph is gone.
    #[cold]
    fn pin_to_graph(&self, bar: &Arc<Bar>, hold: &Hold) -> Result<()> {
        let (kept, pages) = (Arc::clone(bar), hold.pages.clone());
        let generations = hold.generations.clone();
        let release = move || {
            for ((_, page), generation) in kept.table.pages(pages).zip(generations.as_slice()) {
                // Called on a driver thread: only the counts change, no fence is needed since a
                // graph is destroyed after its launches are done.
                let _ = page.unpin(*generation);
            }
        };
        // When this fails the closure is dropped uncalled: the pages stay pinned for ever, which
        // is safe, rather than be evicted under a graph that will be launched.
        let retained = self.device.driver.graph_retain(hold.stream, Box::new(release));
        retained.map_err(|error: DriverError| {
            let error = Error::from(error).context("pages stay pinned, no graph holds them");
            self.device.note(error)
        })
    }
}
