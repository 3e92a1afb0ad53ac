//! What free memory becomes with time: anybody's, whole pages again, and given back. Under the
//! allocator's lock, as `heap`; which fences have passed was asked before.

use std::ops::Range;

use super::extents::{Extents, Piece};
use super::heap::{ChunkUse, Core, LARGE, MID, ORDINARY};
use super::pages::{Use, kind_of};
use crate::memory::pager::Returned;
use crate::sync::fence::{Fences, StreamSlot};
use crate::sync::ticket::Ticket;

/// Which empty pages are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Which {
    /// Those whose uses are over, or known to be some day.
    Recorded,
    /// Those whose uses are over, or come before what is enqueued on a stream now.
    Before(Option<StreamSlot>),
    /// All.
    Any,
}

/// Uses on one stream that are not known to be over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Span {
    /// The first of them: once it is asked for, what has passed of all is known.
    pub(super) oldest: Ticket,
    /// The last of them: when it has passed all have.
    pub(super) newest: Ticket,
}

impl Span {
    /// Widens the span of the ticket's stream.
    pub(super) fn widen(spans: &mut Vec<Self>, ticket: Ticket) {
        let Some(span) = spans.iter_mut().find(|span| span.newest.slot() == ticket.slot()) else {
            return spans.push(Self { oldest: ticket, newest: ticket });
        };
        if ticket.sequence() < span.oldest.sequence() {
            span.oldest = ticket;
        }
        if ticket.sequence() > span.newest.sequence() {
            span.newest = ticket;
        }
    }
}

impl Core {
    /// What memory of a pool waits for that is not the heap `own`'s, a span a stream slot.
    pub(super) fn unsettled(&self, pool: u32, own: u32, fences: &Fences) -> Vec<Span> {
        let mut spans: Vec<Span> = Vec::new();
        let mut add = |ticket: Ticket| {
            if !fences.known_passed(ticket) {
                Span::widen(&mut spans, ticket);
            }
        };
        for &(_, at) in self.pool(pool).heaps.iter().filter(|(_, at)| *at != own) {
            let heap = self.heap(at);
            let pieces = heap.free.iter().flat_map(Extents::iter);
            pieces.for_each(|piece| add(heap.ticket(piece.mark)));
            let slabs = heap.partial.iter().flatten();
            let marks = slabs.filter_map(|at| self.slabs[*at as usize].as_ref());
            marks.filter(|slab| slab.used == 0).for_each(|slab| add(heap.ticket(slab.mark)));
        }
        for &at in &self.pool(pool).chunk_pages {
            self.chunk_tickets(at).into_iter().for_each(&mut add);
        }
        spans
    }

    /// Whether free parts of chunks wait for work of their streams: several streams' may make up
    /// pages that are empty when it has passed.
    pub(super) fn has_unsettled_chunks(&self, fences: &Fences) -> bool {
        self.heaps.iter().flatten().any(|heap| {
            let mut marks = heap.free[MID].iter().map(|piece| heap.ticket(piece.mark));
            marks.any(|ticket| !fences.known_passed(ticket))
        })
    }

    /// Lets a heap have what is free in its pool and no work uses any more, and makes whole pages
    /// of what was cut.
    pub(super) fn settle(&mut self, own: u32, fences: &Fences) {
        self.merge_retired(fences);
        let pool = self.heap(own).pool;
        self.tidy(pool, fences);
        for kind in [MID, LARGE] {
            for piece in self.pool_mut(pool).neutral[kind].take_passed(|_| true) {
                self.heap_mut(own).free[kind].insert(piece);
            }
        }
    }

    /// Makes neutral what has passed, chunks of what is left of them, and pages of free chunks.
    pub(super) fn tidy(&mut self, pool: u32, fences: &Fences) {
        self.drop_empty_slabs(pool);
        let heaps: Vec<u32> = self.pool(pool).heaps.iter().map(|(_, heap)| *heap).collect();
        for &at in &heaps {
            let index = self.heap(at).index;
            let passed = |mark: u64| mark == 0 || fences.known_passed(Ticket::new(index, mark));
            for kind in [MID, LARGE] {
                for piece in self.heap_mut(at).free[kind].take_passed(passed) {
                    self.pool_mut(pool).neutral[kind].insert(Piece { mark: 0, ..piece });
                }
            }
        }
        for &at in &heaps {
            self.free_whole_chunks(pool, Some(at));
        }
        self.free_whole_chunks(pool, None);
        self.uncut_pages(pool, fences);
    }

    fn drop_empty_slabs(&mut self, pool: u32) {
        let empty = |(_, slab): &(usize, &Option<Box<super::slabs::Slab>>)| {
            slab.as_ref().is_some_and(|slab| slab.used == 0 && self.heap(slab.heap).pool == pool)
        };
        let slabs = self.slabs.iter().enumerate();
        let empty: Vec<u32> = slabs.filter(empty).map(|(at, _)| at as u32).collect();
        empty.into_iter().for_each(|at| self.drop_slab(at));
    }

    /// Chunks that are free from end to end are no heap's any more.
    fn free_whole_chunks(&mut self, pool: u32, heap: Option<u32>) {
        let bytes = self.geometry.chunk_bytes;
        loop {
            let free = match heap {
                Some(heap) => &mut self.heap_mut(heap).free[MID],
                None => &mut self.pool_mut(pool).neutral[MID],
            };
            let Some(piece) = free.take_aligned(bytes, bytes) else { return };
            let ticket = heap.map_or(Ticket::NONE, |heap| self.heap(heap).ticket(piece.mark));
            if let Some((chunk_page, chunk)) = self.chunk_at(piece.start) {
                self.free_chunk(chunk_page, chunk, ticket);
            }
        }
    }

    /// Pages with nothing but free chunks are whole again, if one heap or anybody may have them.
    fn uncut_pages(&mut self, pool: u32, fences: &Fences) {
        let free = |core: &Self, at: &u32| core.pages.page(core.chunk_page(*at).page).live == 0;
        let whole: Vec<u32> =
            self.pool(pool).chunk_pages.iter().filter(|at| free(self, at)).copied().collect();
        for at in whole {
            let mut tickets = self.chunk_tickets(at);
            tickets.retain(|ticket| !fences.known_passed(*ticket));
            let newest = tickets.iter().copied().max_by_key(|ticket| ticket.sequence());
            let one_stream =
                newest.is_none_or(|newest| tickets.iter().all(|it| it.slot() == newest.slot()));
            let heaps = self.pool(pool).heaps.iter();
            let owner = newest.and_then(|newest| {
                // One whose slot is another stream's by now still has its number.
                let has = |heap: &super::heap::Heap| {
                    heap.index == newest.slot() && fences.is_still(heap.slot)
                };
                heaps.map(|(_, heap)| *heap).find(|heap| has(self.heap(*heap)))
            });
            if !one_stream || newest.is_some() && owner.is_none() {
                continue;
            }
            let page = self.forget_chunks(pool, at);
            self.turn_page(page, Use::Large);
            let (start, bytes) = (self.pages.start_of(page), self.geometry.page_bytes);
            let mark = newest.map_or(0, Ticket::sequence);
            let piece = Piece { start, bytes, mark };
            match owner {
                Some(heap) => self.heap_mut(heap).free[LARGE].insert(piece),
                None => self.pool_mut(pool).neutral[LARGE].insert(piece),
            }
        }
    }

    fn chunk_tickets(&self, at: u32) -> Vec<Ticket> {
        let chunks = self.chunk_page(at).chunks.iter();
        let tickets = chunks.filter_map(|chunk| match chunk {
            ChunkUse::Free(ticket) if !ticket.is_none() => Some(*ticket),
            _ => None,
        });
        tickets.collect()
    }

    /// The page is in no table of chunks any more.
    fn forget_chunks(&mut self, pool: u32, at: u32) -> u32 {
        self.pool_mut(pool).chunk_pages.retain(|other| *other != at);
        let entry = self.chunk_pages[at as usize].take();
        entry.expect("a page of chunks is known").page
    }

    /// Heaps of streams that have nothing in them.
    fn drop_idle_heaps(&mut self, pool: u32) {
        let heaps: Vec<u32> = self.pool(pool).heaps.iter().map(|(_, heap)| *heap).collect();
        for at in heaps {
            let heap = self.heap(at);
            if heap.held == 0 && heap.free.iter().all(Extents::is_empty) {
                self.pool_mut(pool).heaps.retain(|(_, heap)| *heap != at);
                self.heaps[at as usize] = None;
            }
        }
    }

    /// Takes up to `count` empty pages out, highest first, with what may still use them.
    pub(super) fn take_empty(
        &mut self,
        count: u64,
        which: Which,
        fences: &Fences,
    ) -> Vec<Returned> {
        self.merge_retired(fences);
        for pool in 0..self.pools.len() as u32 {
            if self.pools[pool as usize].is_some() {
                self.tidy(pool, fences);
                self.drop_idle_heaps(pool);
            }
        }
        let wanted = |page: &u32| match which {
            Which::Any => true,
            Which::Recorded => {
                self.page_tickets(*page).into_iter().all(|ticket| fences.is_recorded(ticket))
            }
            Which::Before(stream) => self.page_tickets(*page).into_iter().all(|ticket| {
                let own = |slot| fences.is_recorded(ticket) && fences.ordered_before(ticket, slot);
                fences.known_passed(ticket) || stream.is_some_and(own)
            }),
        };
        let pages: Vec<u32> = self.pages.empty().filter(wanted).take(count as usize).collect();
        pages.into_iter().map(|page| self.take_page(page, fences)).collect()
    }

    /// As [`Core::take_empty`], those of some pages.
    pub(super) fn take_empty_of(&mut self, pages: Range<u32>, fences: &Fences) -> Vec<Returned> {
        self.tidy(ORDINARY, fences);
        let pages: Vec<u32> = self.pages.empty().filter(|page| pages.contains(page)).collect();
        pages.into_iter().map(|page| self.take_page(page, fences)).collect()
    }

    /// What has to pass before an empty page may be used otherwise.
    fn page_tickets(&self, page: u32) -> Vec<Ticket> {
        let entry = self.pages.page(page);
        let retired = self.pool(entry.pool).retired;
        if let Use::Small(at) = entry.used_for {
            return self.chunk_tickets(at).into_iter().chain(retired).collect();
        }
        let range = self.pages.range_of(page);
        let heaps = self.pool(entry.pool).heaps.iter().map(|(_, heap)| self.heap(*heap));
        let tickets = heaps.flat_map(|heap| {
            let pieces = heap.free[LARGE].overlapping(range.clone());
            pieces.map(|piece| heap.ticket(piece.mark))
        });
        tickets.filter(|ticket| !ticket.is_none()).chain(retired).collect()
    }

    fn take_page(&mut self, page: u32, fences: &Fences) -> Returned {
        let entry = self.pages.page(page);
        let mut users = self.page_tickets(page);
        match entry.used_for {
            Use::Small(at) => drop(self.forget_chunks(entry.pool, at)),
            _ => self.take_pieces(entry.pool, page),
        }
        users.retain(|ticket| !fences.known_passed(*ticket));
        users.dedup();
        if let Some(kind) = kind_of(entry.used_for) {
            let change = self.pages.note_unmapped(page);
            self.statistics.reserved_bytes.sub(kind, self.geometry.page_bytes);
            self.count_segments(kind, change);
            self.statistics.num_device_free += 1;
        }
        Returned { page, generation: entry.generation, users }
    }

    /// Takes everything that is free of a page.
    fn take_pieces(&mut self, pool: u32, page: u32) {
        let range = self.pages.range_of(page);
        let mut left = range.end - range.start;
        let heaps: Vec<u32> = self.pool(pool).heaps.iter().map(|(_, heap)| *heap).collect();
        for at in heaps {
            for piece in self.heap_mut(at).free[LARGE].take_range(range.clone()) {
                left -= piece.bytes;
            }
        }
        for piece in self.pool_mut(pool).neutral[LARGE].take_range(range) {
            left -= piece.bytes;
        }
        debug_assert_eq!(left, 0, "an empty page is free from end to end");
    }
}
