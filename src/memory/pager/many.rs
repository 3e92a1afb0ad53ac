//! Several ranges at once: faulted together, and given back together.
//!
//! A program with many small weights names a hundred ranges of the same few pages at a time. What
//! does not depend on the range is done once for all: the stream is asked what it is, waits for the
//! pages' fences are placed, a fence is recorded behind the uses, and whoever follows uses is told.

use std::ops::Range;
use std::sync::Arc;

use super::{Faulted, Hold, Pager};
use crate::driver::CaptureState;
use crate::error::Result;
use crate::memory::page_table::Page;
use crate::memory::vbar::Bar;
use crate::slots::thread;
use crate::sync::fence::StreamSlot;
use crate::trace::{self, Kind};
use crate::units::Stream;

/// One range of a `fault_many`.
#[derive(Clone)]
pub struct Request<'a> {
    /// The VBAR.
    pub bar: &'a Arc<Bar>,
    /// Its pages.
    pub pages: Range<u32>,
}

impl Request<'_> {
    /// Whether all of its pages come back filled.
    pub(super) fn streams(&self) -> bool {
        self.bar.bound().is_some() || self.pages.clone().all(|page| self.bar.streams(page))
    }
}

impl Pager {
    /// Makes all ranges resident and pins them, or none of them. The holds come in the order of
    /// the requests. Where every page is mapped no lock is taken.
    ///
    /// # Errors
    /// As [`Pager::fault`]; `Closed` when one of the VBARs is.
    pub fn fault_many(
        &self,
        requests: &[Request<'_>],
        stream: Stream,
    ) -> Result<Faulted<Vec<Hold>>> {
        let faulted = self.traced(requests, stream, || self.fault_ranges(requests, stream));
        faulted.map_err(|error| self.fault_failed(error, requests))
    }

    fn fault_ranges(&self, requests: &[Request<'_>], stream: Stream) -> Result<Faulted<Vec<Hold>>> {
        self.device.check()?;
        let Some(holds) = self.hit_all(requests, stream)? else {
            return self.fault_slowly(requests, stream);
        };
        thread::with(|thread| self.device.counters.hits.raise(thread));
        if self.device.fences.is_eager() {
            self.tell_fault(requests, stream);
        }
        Ok(Faulted::Resident(holds))
    }

    /// Pins every page of all ranges if all are mapped. `None` is anything else, a stream that is
    /// being captured too; nothing is pinned then.
    fn hit_all(&self, requests: &[Request<'_>], stream: Stream) -> Result<Option<Vec<Hold>>> {
        requests.iter().try_for_each(|request| request.bar.check_open())?;
        let _context = match stream.is_implicit() {
            true => Some(self.device.enter_context()?),
            false => None,
        };
        let (capture, slot) = self.device.inspect(stream)?;
        if capture != CaptureState::None {
            return Ok(None);
        }
        let Some((holds, ordered)) = self.pin_mapped(requests, stream, slot)? else {
            return Ok(None);
        };
        if !ordered {
            let ordered = self.device.enter();
            let ordered = ordered.and_then(|_scope| self.order_all(requests, &holds, capture));
            if let Err(error) = ordered {
                self.release_all_unused(requests, &holds);
                return Err(error);
            }
        }
        Ok(Some(holds))
    }

    /// Pins every page of all ranges if all are mapped. The flag says whether the stream comes
    /// after all their ready fences already.
    fn pin_mapped(
        &self,
        requests: &[Request<'_>],
        stream: Stream,
        slot: Option<StreamSlot>,
    ) -> Result<Option<(Vec<Hold>, bool)>> {
        let mut all_ordered = true;
        let mut holds = Vec::with_capacity(requests.len());
        for request in requests {
            match self.pin(request.bar, request.pages.clone(), stream, slot) {
                Ok(Some((hold, ordered))) => {
                    holds.push(hold);
                    all_ordered &= ordered;
                }
                missing => {
                    self.release_all_unused(requests, &holds);
                    return missing.map(|_| None);
                }
            }
        }
        Ok(Some((holds, all_ordered)))
    }

    /// Gives the pins of the first requests back, which nobody has used.
    pub(super) fn release_all_unused(&self, requests: &[Request<'_>], holds: &[Hold]) {
        let pinned = requests.iter().zip(holds);
        pinned.for_each(|(request, hold)| self.release_unused(request.bar, hold));
    }

    /// Lets the holds' stream, which is the same, wait for all their pages' ready fences.
    pub(super) fn order_all(
        &self,
        requests: &[Request<'_>],
        holds: &[Hold],
        capture: CaptureState,
    ) -> Result<()> {
        let Some(first) = holds.first() else { return Ok(()) };
        let pages = requests.iter().flat_map(|request| pages_of(request.bar, &request.pages));
        self.order_pages(pages, first.stream, first.slot, capture)
    }

    /// Gives the pins of several holds back, as [`Pager::unpin_on`] does one by one: all of them,
    /// also when recording fails or some are stale. The holds may be of different streams; those
    /// of `stream` share one fence.
    ///
    /// # Errors
    /// As there; that of the first hold which has one.
    pub fn unpin_all_on(&self, pins: &[(&Arc<Bar>, &Hold)], stream: Stream) -> Result<()> {
        if pins.iter().all(|(_, hold)| hold.stream == stream) {
            return self.unpin_all(pins);
        }
        let (same, other): (Vec<_>, Vec<_>) =
            pins.iter().partition(|(_, hold)| hold.stream == stream);
        let unpinned = self.unpin_all(&same);
        let others = other.iter().map(|(bar, hold)| self.unpin_on(bar, hold, stream));
        others.fold(unpinned, Result::and)
    }

    /// As [`Pager::unpin`], of holds of one stream: all stamps first, then a record for them, then
    /// the pins.
    fn unpin_all(&self, pins: &[(&Arc<Bar>, &Hold)]) -> Result<()> {
        let Some((_, first)) = pins.first() else { return Ok(()) };
        if crate::process::ending() {
            return Ok(());
        }
        // The uses of what a graph holds are in the graph, which has pins of its own.
        let kept = |(_, hold): &(&Arc<Bar>, &Hold)| hold.kept;
        if pins.iter().any(kept) && self.is_capturing(first.stream) {
            let (_, used): (Vec<_>, Vec<_>) = pins.iter().partition(|pin| kept(pin));
            self.stamp_all(&used);
        } else {
            self.stamp_all(pins);
        }
        let dropped = pins.iter().map(|(bar, hold)| {
            let _span = trace::is_on()
                .then(|| self.span_of(Kind::Unpin, bar, hold.pages.clone()).stream(hold.stream));
            self.drop_pins(bar, hold)
        });
        let dropped = dropped.fold(Ok(()), Result::and);
        if self.device.fences.is_eager() {
            self.tell_unpins(pins, first.stream);
        }
        dropped
    }

    /// Stamps the pages of holds of one stream, and covers the stamps if it is time to. The
    /// per-thread default stream is several, one on each thread that has faulted.
    fn stamp_all(&self, pins: &[(&Arc<Bar>, &Hold)]) {
        let mut stamped: Vec<(StreamSlot, Option<StreamSlot>)> = Vec::new();
        for (bar, hold) in pins {
            let Some(slot) = self.stamp_use(bar, hold) else { continue };
            if !stamped.iter().any(|(of, _)| *of == slot) {
                stamped.push((slot, hold.slot));
            }
        }
        for (slot, of_hold) in stamped {
            let of_slot = pins.iter().filter(|(_, hold)| hold.slot == of_hold);
            self.cover_or_warn(of_slot.copied(), slot);
        }
    }
}

fn pages_of<'a>(bar: &'a Bar, pages: &Range<u32>) -> impl Iterator<Item = &'a Page> + use<'a> {
    bar.table.pages(pages.clone()).map(|(_, page)| page)
}
