//! What a use of pages leaves behind: stamps and fences, and pins that a captured graph holds.
//!
//! A stamp is on its pages before their pins go, so whoever finds a page without pins finds its
//! users too. A use on a capturing stream leaves pins, since it happens again with every launch.

use std::sync::Arc;

use super::messages::PagesOf;
use super::{Generations, Hold, Pager};
use crate::driver::{CaptureState, DriverError};
use crate::error::{Error, ErrorCode, Result};
use crate::memory::page_table::Page;
use crate::memory::vbar::Bar;
use crate::sync::fence::{Cover, StreamSlot};
use crate::sync::ticket::Ticket;
use crate::units::{PageIndex, Stream};

impl Pager {
    /// As [`Pager::unpin`], which records it in a trace if there is one.
    #[inline(always)]
    pub(super) fn unpin_untraced(&self, bar: &Arc<Bar>, hold: &Hold) -> Result<()> {
        if crate::process::ending() {
            return Ok(());
        }
        if let Some(slot) = self.stamp_use(bar, hold) {
            self.cover_or_warn(std::iter::once((bar, hold)), slot);
        }
        self.end_use(bar, hold)
    }

    /// Stamps what a hold was used for. Returns the slot whose stamps a record is to cover.
    #[inline(always)]
    pub(super) fn stamp_use(&self, bar: &Bar, hold: &Hold) -> Option<StreamSlot> {
        let mut slot = hold.slot?;
        if hold.kept || slot.is_captured() {
            slot = self.slot_after_capture(bar, hold, slot)?;
        }
        self.stamp(bar, hold, hold.stream, slot);
        Some(slot)
    }

    /// The slot for the uses of a hold that was got in a capture, or is kept by its graph; `None`
    /// where nothing is left to do.
    #[cold]
    fn slot_after_capture(&self, bar: &Bar, hold: &Hold, slot: StreamSlot) -> Option<StreamSlot> {
        if hold.kept && self.is_capturing(hold.stream) {
            // All of its uses are in the graph, which has pins of its own.
            return None;
        }
        if !slot.is_captured() {
            return Some(slot);
        }
        // The stream's own now. Where it is not known to be the same stream, nothing is recorded.
        let is_named =
            !hold.stream.is_none() && self.device.fences.is_captured_as(hold.stream, slot);
        let running = || {
            let _scope = self.device.enter().ok()?;
            match self.device.inspect(hold.stream).ok()? {
                (CaptureState::None, own) => own,
                _ => None,
            }
        };
        let own = if is_named { running() } else { None };
        if own.is_none() {
            let unknown = self.device.fences.unrecorded_stamp();
            bar.table
                .pages(hold.pages.clone())
                .for_each(|(_, page)| self.stamp_page(page, unknown));
        }
        own
    }

    #[inline(always)]
    fn end_use(&self, bar: &Arc<Bar>, hold: &Hold) -> Result<()> {
        let dropped = self.drop_pins(bar, hold);
        if self.is_followed(bar) {
            self.tell_unpins(&[(bar, hold)], hold.stream);
        }
        dropped
    }

    /// As [`Pager::unpin`], for a hold that was put aside: the stream's handle of that time may be
    /// no good any more, so the caller names it again. `Stream::NONE`: the stream is gone, and
    /// what was enqueued on it may not be done. Another stream: the pages were used on that one.
    ///
    /// # Errors
    /// As [`Pager::unpin`]; what the driver says of another stream. The pins are given back.
    #[inline(always)]
    pub fn unpin_on(&self, bar: &Arc<Bar>, hold: &Hold, stream: Stream) -> Result<()> {
        match stream == hold.stream {
            true => self.unpin(bar, hold),
            false => self.unpin_elsewhere(bar, hold, stream),
        }
    }

    #[cold]
    fn unpin_elsewhere(&self, bar: &Arc<Bar>, hold: &Hold, stream: Stream) -> Result<()> {
        if crate::process::ending() {
            return Ok(());
        }
        let named = match stream.is_none() {
            true => Ok(()),
            false => self.also_used_on(bar, hold, stream).map(|_| ()),
        };
        // Given back in its stead: nothing may be asked of the stream that it was faulted for.
        let (pages, generations) = (hold.pages.clone(), hold.generations.clone());
        let Hold { slot, kept, .. } = *hold;
        let gone = Hold { pages, generations, stream: Stream::NONE, slot, kept };
        self.unpin(bar, &gone).and(named)
    }

    #[cold]
    pub(super) fn is_capturing(&self, stream: Stream) -> bool {
        if stream.is_none() {
            return false;
        }
        let _context = match stream.is_implicit() {
            true => self.device.enter_context().ok(),
            false => None,
        };
        self.device.capture_state(stream).is_ok_and(|state| state == CaptureState::Active)
    }

    /// Covers stamps that were just made, if it is time to and possible. They are of holds of one
    /// slot, and so of one stream.
    #[inline(always)]
    pub(super) fn cover_or_warn<'a>(
        &self,
        pins: impl Iterator<Item = (&'a Arc<Bar>, &'a Hold)> + Clone,
        slot: StreamSlot,
    ) {
        let Some((_, first)) = pins.clone().next() else { return };
        if !first.stream.is_none()
            && let Err(error) = self.cover_stamps(pins, first.stream, slot)
        {
            // The stamps stay uncovered until the stream is used again, or the context is waited
            // for.
            let error = self.device.note(error);
            log::warn!("no fence was recorded: {error}");
        }
    }

    #[inline(always)]
    fn cover_stamps<'a>(
        &self,
        mut pins: impl Iterator<Item = (&'a Arc<Bar>, &'a Hold)> + Clone,
        stream: Stream,
        slot: StreamSlot,
    ) -> Result<()> {
        let implicit = stream.is_implicit();
        let _context = if implicit { Some(self.device.enter_context()?) } else { None };
        let capture = self.device.capture_state(stream)?;
        // The per-thread default stream is another one on another thread. While one is captured it
        // has no id, and pages that are kept for its graph without need are only kept for longer.
        let is_other = || Ok::<_, Error>(self.device.slot_of(stream)? != Some(slot));
        if implicit && capture == CaptureState::None && is_other()? {
            return Ok(());
        }
        self.device.fences.note_capture(slot, capture != CaptureState::None);
        match capture {
            // Of a closed VBAR this may be the last use for long: nobody waits for another record.
            CaptureState::None
                if pins.any(|(bar, _)| bar.is_closed())
                    || self.device.fences.is_record_due(slot) =>
            {
                let _scope = self.device.enter()?;
                self.device.retry(|| self.device.fences.record_in_passing(stream, slot))
            }
            // What was faulted before the capture began and used in it.
            CaptureState::Active => self.keep_all_for_graph(pins),
            _ => Ok(()),
        }
    }

    /// Remembers that `stream` uses the pages too, and records a fence behind that.
    ///
    /// # Errors
    /// What the driver says of the stream; `Unsupported` for one that is being captured, and for
    /// no stream.
    pub fn also_used_on(&self, bar: &Bar, hold: &Hold, stream: Stream) -> Result<Ticket> {
        self.record_use(bar, hold, stream).map_err(|error| {
            let pages = PagesOf(bar, &hold.pages);
            self.told(error, format_args!("use of {pages} on {stream:?}"))
        })
    }

    fn record_use(&self, bar: &Bar, hold: &Hold, stream: Stream) -> Result<Ticket> {
        self.device.check()?;
        let _scope = self.device.enter()?;
        if let (CaptureState::None, Some(slot)) = self.device.inspect(stream)? {
            self.stamp(bar, hold, stream, slot);
            let recorded = self.device.retry(|| self.device.fences.record(stream, slot));
            return recorded.map_err(|error| self.device.note(error));
        }
        let text = match stream.is_none() {
            true => "no stream was named, which would be the one that uses the bytes",
            false => "work on a stream that is being captured runs later: it has no fence",
        };
        Err(Error::new(ErrorCode::Unsupported, text))
    }

    #[inline]
    pub(super) fn stamp(&self, bar: &Bar, hold: &Hold, stream: Stream, mut slot: StreamSlot) {
        loop {
            let ticket = self.device.fences.stamp(slot);
            for (_, page) in bar.table.pages(hold.pages.clone()) {
                if !page.stamp(ticket, |other| self.device.fences.known_passed(other)) {
                    self.join_stamp(page, stream, slot);
                }
            }
            // The slot may have gone to another stream before the stamps were in place.
            match self.device.fences.confirm(slot, ticket) {
                Ok(None) => return,
                Ok(Some(other)) => slot = other,
                Err(error) => {
                    let error = self.device.note(error);
                    log::warn!("a use is known to no fence: {error}");
                    let unknown = self.device.fences.unrecorded_stamp();
                    for (_, page) in bar.table.pages(hold.pages.clone()) {
                        self.stamp_page(page, unknown);
                    }
                    return;
                }
            }
        }
    }

    /// Stamps a page with a ticket that no stream can be made to wait with. A page that remembers
    /// four other streams is known to be free only after a context wait.
    pub(super) fn stamp_page(&self, page: &Page, ticket: Ticket) {
        if page.stamp(ticket, |other| self.device.fences.known_passed(other)) {
            return;
        }
        let unknown = self.device.fences.unrecorded_stamp();
        let _replaced = page.users().iter().any(|user| page.replace_stamp(*user, unknown));
    }

    /// A page that remembers four other streams: ours waits for one of them and takes its place.
    #[cold]
    pub(super) fn join_stamp(&self, page: &Page, stream: Stream, slot: StreamSlot) {
        let fences = &self.device.fences;
        let scope = self.device.enter();
        let can_wait = scope.is_ok() && self.can_wait(stream, slot);
        for user in page.users() {
            let joined = can_wait
                && matches!(fences.cover(user), Ok(Cover::Recorded | Cover::Passed))
                && self
                    .device
                    .retry(|| fences.stream_wait(stream, slot, user))
                    .is_ok_and(|waits| waits);
            // Stamped anew: a record of another thread may cover the old stamp and not the wait.
            let ticket = fences.stamp(slot);
            if joined && page.replace_stamp(user, ticket) {
                return;
            }
        }
        // None of them is recorded: the page is known to be free only after a context wait.
        let unknown = fences.unrecorded_stamp();
        let replaced = page.users().iter().any(|user| page.replace_stamp(*user, unknown));
        debug_assert!(replaced || page.users().len() < 5, "a full page has a stamp to replace");
    }

    /// Whether the stream can be made to wait for others, its context current: on this thread it is
    /// still the slot's (a default stream may be another one here), and it is not being captured,
    /// which a wait for what is outside would break.
    fn can_wait(&self, stream: Stream, slot: StreamSlot) -> bool {
        !stream.is_none()
            && self.device.capture_state(stream).is_ok_and(|state| state == CaptureState::None)
            && self.device.fences.slot_of(stream).is_ok_and(|own| own == Some(slot))
    }

    #[inline(always)]
    pub(super) fn drop_pins(&self, bar: &Bar, hold: &Hold) -> Result<()> {
        if let Generations::One(generation) = hold.generations {
            let unpinned = bar.table.page(PageIndex(hold.pages.start)).unpin(generation);
            // Asked after the pin has gone: whoever closes the VBAR sees either that or us.
            if unpinned.is_ok() && !bar.is_closed() {
                return Ok(());
            }
            return self.end_unpin(bar, hold, unpinned);
        }
        self.end_unpin(bar, hold, self.drop_many(bar, hold))
    }

    #[cold]
    fn end_unpin(&self, bar: &Bar, hold: &Hold, unpinned: Result<()>) -> Result<()> {
        if bar.is_closed() {
            self.tidy_closed(bar);
        }
        unpinned.map_err(|error| {
            self.told(error, format_args!("unpinning {}", PagesOf(bar, &hold.pages)))
        })
    }

    fn drop_many(&self, bar: &Bar, hold: &Hold) -> Result<()> {
        let mut result = Ok(());
        let pages = bar.table.pages(hold.pages.clone());
        for ((_, page), generation) in pages.zip(hold.generations.as_slice()) {
            if let Err(error) = page.unpin(*generation) {
                result = Err(error);
            }
        }
        result
    }

    #[cold]
    pub(super) fn keep_or_unpin(&self, bar: &Arc<Bar>, hold: &mut Hold) -> Result<()> {
        let kept = self.keep_for_graph(bar, hold);
        match kept {
            Ok(()) => hold.kept = true,
            Err(_) => self.release_unused(bar, hold),
        }
        kept
    }

    /// Keeps what no graph holds yet; all of it, also where some cannot be kept.
    #[cold]
    fn keep_all_for_graph<'a>(
        &self,
        pins: impl Iterator<Item = (&'a Arc<Bar>, &'a Hold)>,
    ) -> Result<()> {
        let mut kept = Ok(());
        for (bar, hold) in pins.filter(|(_, hold)| !hold.kept) {
            kept = kept.and(self.keep_for_graph(bar, hold));
        }
        kept
    }

    /// Pins the pages of a hold once more, until the graph that its stream captures into is gone.
    #[cold]
    pub(super) fn keep_for_graph(&self, bar: &Arc<Bar>, hold: &Hold) -> Result<()> {
        let pages = hold.pages.clone();
        bar.table.pages(pages.clone()).for_each(|(_, page)| page.enter_graph());
        let pinned = match self.pin(bar, pages.clone(), Stream::NONE, None) {
            Ok(Some((pinned, _))) => pinned,
            missing => {
                bar.table.pages(pages).for_each(|(_, page)| page.leave_graph());
                let text = "the pins were released by force while the stream was captured";
                return missing.and(Err(Error::new(ErrorCode::StaleToken, text)));
            }
        };
        let release = GraphPins { bar: Arc::clone(bar), pinned };
        // When this fails the pins are given back as the closure is dropped uncalled: no graph
        // holds the pages, and the caller is told.
        let retained = self.device.driver.graph_retain(hold.stream, Box::new(|| drop(release)));
        retained.map_err(|error: DriverError| {
            self.device.note(Error::from(error).context("no graph holds the pages"))
        })
    }
}

/// Pins of a graph. Given back on a driver thread: only counts change, and no fence is needed,
/// since a graph is destroyed after its launches are done.
struct GraphPins {
    bar: Arc<Bar>,
    pinned: Hold,
}

impl Drop for GraphPins {
    fn drop(&mut self) {
        let pages = self.bar.table.pages(self.pinned.pages.clone());
        for ((_, page), generation) in pages.zip(self.pinned.generations.as_slice()) {
            // A forced end of run leaves the pins of graphs alone, so this cannot be stale.
            let unpinned = page.unpin(*generation);
            debug_assert!(unpinned.is_ok(), "a graph's pin was taken");
            page.leave_graph();
        }
    }
}
