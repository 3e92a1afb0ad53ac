//! Where a block goes that no free piece is large enough for. Under the allocator's lock, as
//! `heap`.
//!
//! Fresh addresses over any free frames: a place is a run of free pieces of the heap and of pages
//! without frames, and the best one needs the fewest frames; so a free piece at the end of what is
//! mapped, or between two holes, is used and what is free elsewhere strands nothing. The pages are
//! claimed here; the faults are the caller's.

use std::ops::Range;

use super::extents::Piece;
use super::heap::{Core, LARGE, Live, Sort};
use super::pages::Use;
use super::slabs::GRAIN;
use crate::sync::ticket::Ticket;
use crate::units::Generation;

/// Places within longer runs that a search looks at, at most.
const INNER_MAX: u32 = 64;

/// A place for a block, claimed.
pub(super) struct Growth {
    /// Where the block starts.
    pub(super) start: u64,
    pub(super) bytes: u64,
    pub(super) heap: u32,
    pub(super) purpose: Purpose,
    /// Pages that need a frame, in order, neighbours joined.
    pub(super) fresh: Vec<Range<u32>>,
    /// Free pieces that were taken for it.
    pieces: Vec<Piece>,
}

impl Growth {
    /// Pages that need a frame.
    pub(super) fn fresh_count(&self) -> u64 {
        self.fresh.iter().map(|pages| u64::from(pages.end - pages.start)).sum()
    }
}

/// What the memory is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    /// One block of so many bytes, of those that were asked for.
    Block { requested: u64, sort: Sort },
    /// A page to be cut into chunks.
    Chunks,
}

/// A place that was found, before it is claimed.
struct Place {
    start: u64,
    fresh: u64,
}

impl Core {
    /// Claims a place for `bytes` bytes. `is_absent`: whether a page without a frame can have one;
    /// some are on their way out. `None`: the arena has no such place.
    pub(super) fn claim(
        &mut self,
        heap: u32,
        bytes: u64,
        purpose: Purpose,
        is_absent: &dyn Fn(u32) -> bool,
    ) -> Option<Growth> {
        let aligned = purpose == Purpose::Chunks;
        let place = self.find_place(heap, bytes, aligned, is_absent)?;
        let start = place.start;
        let pool = self.heap(heap).pool;
        let pieces = self.heap_mut(heap).free[LARGE].take_range(start..start + bytes);
        let mut fresh: Vec<Range<u32>> = Vec::new();
        for page in self.pages.index_of(start)..=self.pages.index_of(start + bytes - 1) {
            if self.pages.page(page).used_for != Use::Unmapped {
                continue;
            }
            self.pages.start_mapping(page, pool);
            match fresh.last_mut() {
                Some(run) if run.end == page => run.end += 1,
                _ => fresh.push(page..page + 1),
            }
        }
        // Counted as used from now on: what is free elsewhere is spare by so much.
        self.pages.add_live(start..start + bytes);
        self.heap_mut(heap).held += 1;
        Some(Growth { start, bytes, heap, purpose, fresh, pieces })
    }

    /// What has to be found for a request: so many bytes, for this.
    pub(super) fn needs(&self, requested: u64, sort: Sort) -> (u64, Purpose) {
        if sort != Sort::Segment && requested <= self.geometry.small_max {
            return (self.geometry.page_bytes, Purpose::Chunks);
        }
        (requested.next_multiple_of(GRAIN), Purpose::Block { requested, sort })
    }

    /// The place that needs the fewest frames, the lowest of those.
    fn find_place(
        &self,
        heap: u32,
        bytes: u64,
        aligned: bool,
        is_absent: &dyn Fn(u32) -> bool,
    ) -> Option<Place> {
        let (end, page_bytes) = (self.pages.count(), self.geometry.page_bytes);
        let mut best: Option<Place> = None;
        let mut inner_left = INNER_MAX;
        let mut page = 0;
        while page < end {
            if !self.is_open(heap, page, is_absent) {
                page += 1;
                continue;
            }
            let first = page;
            let mut start = self.pages.start_of(first);
            if let Some(before) = start.checked_sub(1).filter(|_| !aligned)
                && let Some(piece) = self.heap(heap).free[LARGE].piece_at(before)
            {
                start = piece.start;
            }
            // Pages up to the first that is not open, or that is not needed.
            let needed = (start + bytes).div_ceil(page_bytes);
            let mut fresh = 0;
            while u64::from(page) < needed && page < end && self.is_open(heap, page, is_absent) {
                fresh += u64::from(self.pages.page(page).used_for == Use::Unmapped);
                page += 1;
            }
            let reached = self.pages.start_of(page);
            let beyond = match self.heap(heap).free[LARGE].piece_at(reached) {
                Some(piece) if !aligned && piece.start == reached => piece.end(),
                _ => reached,
            };
            let fits = beyond.max(reached) >= start + bytes;
            if fits && best.as_ref().is_none_or(|best| fresh < best.fresh) {
                best = Some(Place { start, fresh });
            }
            if fits && page >= self.pages.known() {
                break;
            }
            // Where a free piece begins within the run fewer frames may be missing.
            let mapped = |page: u32| self.pages.page(page).used_for != Use::Unmapped;
            let inner = (first + 1..page).find(|page| mapped(*page) && !mapped(page - 1));
            page = match inner {
                Some(inner) if fits && inner_left > 0 => {
                    inner_left -= 1;
                    inner
                }
                _ => page.max(first + 1),
            };
        }
        best
    }

    /// Whether a page can be part of a place: without a frame, or free for the heap from end to
    /// end.
    fn is_open(&self, heap: u32, page: u32, is_absent: &dyn Fn(u32) -> bool) -> bool {
        let entry = self.pages.page(page);
        match entry.used_for {
            Use::Unmapped => is_absent(page),
            Use::Large if entry.live == 0 && entry.pool == self.heap(heap).pool => {
                let range = self.pages.range_of(page);
                let piece = self.heap(heap).free[LARGE].piece_at(range.start);
                piece.is_some_and(|piece| piece.end() >= range.end)
            }
            _ => false,
        }
    }

    /// The pages have their frames: the block is live. `generations` are those of the fresh pages,
    /// in order, `ready` the ticket after which another stream may use them. Returns the block's
    /// offset; of chunks there is none.
    pub(super) fn finish(
        &mut self,
        growth: &Growth,
        generations: &[Generation],
        ready: Ticket,
    ) -> Option<u64> {
        let Growth { start, bytes, heap, purpose, .. } = *growth;
        let end = start + bytes;
        self.pages.remove_live(start..end);
        self.heap_mut(heap).held -= 1;
        let pool = self.heap(heap).pool;
        let fresh = growth.fresh.iter().cloned().flatten();
        for (page, generation) in fresh.zip(generations) {
            self.enter_page(page, *generation);
            if self.pool(pool).id.is_some() {
                // Until the pool is released.
                self.pages.keep(page);
            }
        }
        // A stream that has another slot by now has passed what was on its old one.
        let own = !ready.is_none() && ready.slot() == self.heap(heap).index;
        let mark = if own { ready.sequence() } else { 0 };
        let Purpose::Block { requested, sort } = purpose else {
            self.cut_page(self.pages.index_of(start), self.heap(heap).ticket(mark));
            return None;
        };
        // What is left of fresh pages before and after the block.
        for pages in &growth.fresh {
            let (first, last) = (self.pages.start_of(pages.start), self.pages.start_of(pages.end));
            for rest in [first..start.clamp(first, last), end.clamp(first, last)..last] {
                let bytes = rest.end - rest.start;
                self.heap_mut(heap).free[LARGE].insert(Piece { start: rest.start, bytes, mark });
            }
        }
        self.enter(start, Live { bytes, requested, heap, sort });
        Some(start)
    }

    fn enter_page(&mut self, page: u32, generation: Generation) {
        let change = self.pages.note_mapped(page, generation, Use::Large);
        let kind = super::statistics::Kind::Large;
        self.statistics.reserved_bytes.add(kind, self.geometry.page_bytes);
        self.count_segments(kind, change);
        self.statistics.num_device_alloc += 1;
    }

    /// The pages did not get frames: everything is as it was.
    pub(super) fn cancel(&mut self, growth: &Growth) {
        self.pages.remove_live(growth.start..growth.start + growth.bytes);
        self.heap_mut(growth.heap).held -= 1;
        for page in growth.fresh.iter().cloned().flatten() {
            self.pages.cancel_mapping(page);
        }
        for piece in &growth.pieces {
            self.heap_mut(growth.heap).free[LARGE].insert(*piece);
        }
    }
}
