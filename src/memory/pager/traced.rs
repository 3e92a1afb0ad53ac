//! What a trace is told of faults, pages and memory.
//!
//! Helpers that keep the lines elsewhere in the pager few: each is nothing while no trace is
//! recorded. A plain hit asks once whether one is, and then takes the way of all other faults.

use std::ops::Range;
use std::sync::Arc;

use super::plan::{Claim, Victim};
use super::state::State;
use super::{Faulted, Hold, Pager, Request};
use crate::error::Result;
use crate::memory::vbar::Bar;
use crate::outcome::Reason;
use crate::trace::{self, Counter, Guard, Kind, RESIDENT};
use crate::units::{PageIndex, Stream};

impl Pager {
    /// Gives the pins of a hold back. Work that used the pages on the hold's stream was enqueued
    /// before the call; the pages keep their bytes until it is done.
    ///
    /// # Errors
    /// `StaleToken` when a forced end of run took pins back before; the others were given back.
    #[inline(always)]
    pub fn unpin(&self, bar: &Arc<Bar>, hold: &Hold) -> Result<()> {
        if trace::is_on() {
            return self.unpin_traced(bar, hold);
        }
        self.unpin_untraced(bar, hold)
    }

    #[cold]
    #[inline(never)]
    fn unpin_traced(&self, bar: &Arc<Bar>, hold: &Hold) -> Result<()> {
        let _span = self.span_of(Kind::Unpin, bar, hold.pages.clone()).stream(hold.stream);
        self.unpin_untraced(bar, hold)
    }

    /// A span of this device.
    pub(super) fn span(&self, kind: Kind) -> Guard {
        trace::span(kind).device(self.device.ordinal)
    }

    /// A span of some pages, and of their bytes.
    pub(super) fn span_of(&self, kind: Kind, bar: &Bar, pages: Range<u32>) -> Guard {
        let bytes = pages.len() as u64 * self.page_bytes();
        self.span(kind).pages(bar.id, pages).bytes(bytes)
    }

    /// A span of one page.
    pub(super) fn span_of_page(&self, kind: Kind, bar: &Bar, page: PageIndex) -> Guard {
        self.span_of(kind, bar, page.0..page.0 + 1)
    }

    /// A span of what is claimed, from the begin of its planning on.
    pub(super) fn span_of_claims(&self, kind: Kind, begin_ns: u64, claims: &[Claim]) -> Guard {
        let span = self.span(kind).bytes(claims.len() as u64 * self.page_bytes()).since(begin_ns);
        let Some(first) = claims.first() else { return span };
        let neighbours = claims.iter().zip(first.page.0..);
        let neighbours = neighbours
            .take_while(|(claim, page)| claim.bar.id == first.bar.id && claim.page.0 == *page);
        let end = neighbours.last().map_or(0, |(_, page)| page + 1);
        span.pages(first.bar.id, first.page.0..end)
    }

    /// Serves a fault within a span, which ends with what it came to. Of several requests each has
    /// a mark of its own, since each has an unpin.
    pub(super) fn traced<T>(
        &self,
        requests: &[Request<'_>],
        stream: Stream,
        serve: impl FnOnce() -> Result<Faulted<T>>,
    ) -> Result<Faulted<T>> {
        if !trace::is_on() {
            return serve();
        }
        let count: usize = requests.iter().map(|request| request.pages.len()).sum();
        let bytes = count as u64 * self.page_bytes();
        let mut span = self.span(Kind::Fault).stream(stream).bytes(bytes);
        if let [request] = requests {
            span = span.pages(request.bar.id, request.pages.clone());
        }
        let faulted = serve();
        span.note(match &faulted {
            Ok(Faulted::Resident(_)) => RESIDENT,
            Ok(Faulted::HostMapped(_)) => Reason::HostMapped.word(),
            Ok(Faulted::Offloaded(refusal)) => refusal.reason.word(),
            Err(_) => "error",
        });
        if requests.len() > 1
            && matches!(faulted, Ok(Faulted::Resident(_) | Faulted::HostMapped(_)))
        {
            for Request { bar, pages } in requests {
                let mark = trace::mark(Kind::Fault).device(self.device.ordinal).stream(stream);
                drop(mark.pages(bar.id, pages.clone()).detail(RESIDENT));
            }
        }
        faulted
    }

    /// A page is losing its frame.
    pub(super) fn trace_evict(&self, victim: &Victim) {
        let mark = trace::mark(Kind::Evict).device(self.device.ordinal).bytes(self.page_bytes());
        drop(mark.pages(victim.bar.id, victim.page.0..victim.page.0 + 1));
    }

    /// So many pages of a VBAR are to stay from now on.
    pub(super) fn trace_plan(&self, bar: &Bar, kept: usize) {
        let mark = trace::mark(Kind::Plan).device(self.device.ordinal);
        drop(mark.pages(bar.id, 0..0).bytes(kept as u64 * self.page_bytes()));
    }

    /// The budget may have changed.
    pub(super) fn trace_budget(&self, state: &State) {
        if trace::is_on() {
            let (bytes, _) = state.budget.allowed();
            trace::value(Counter::Budget, Some(self.device.ordinal), bytes);
        }
    }

    /// Frames or pages have come or gone.
    pub(super) fn trace_memory(&self) {
        if !trace::is_on() {
            return;
        }
        let (held, resident) = {
            let state = self.state.lock();
            let resident: usize = state.bars.values().map(|entry| entry.resident.len()).sum();
            (u64::from(state.frames.held()), resident as u64)
        };
        let device = Some(self.device.ordinal);
        trace::value(Counter::Held, device, held * self.page_bytes());
        trace::value(Counter::Resident, device, resident * self.page_bytes());
    }
}
