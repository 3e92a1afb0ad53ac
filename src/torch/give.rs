//! Frees: blocks go back to the heap of their stream. Under the allocator's lock, as `heap`.
//!
//! Also the counting of both ways.

use super::extents::Piece;
use super::heap::{Core, LARGE, Live, MID, Sort};
use super::pages::{Use, kind_of};
use super::pending::Waiting;
use super::statistics::Kind;
use crate::sync::fence::Fences;

/// What the quick way of freeing came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Given {
    /// The block is cached.
    Cached,
    /// No live block starts there.
    Unknown,
    /// Fences have to be asked or recorded first; nothing has changed.
    NotYet,
}

impl Core {
    /// Frees a block if nothing but a stamp is needed for it.
    #[inline(always)]
    pub(super) fn give(&mut self, offset: u64, fences: &Fences) -> Given {
        if !self.uses.is_empty() && self.uses.contains_key(&offset) {
            return Given::NotYet;
        }
        match self.slab_at(offset) {
            Some(slab) => self.give_slot(slab, offset, fences),
            None => self.give_piece(offset, fences),
        }
    }

    #[inline(always)]
    fn give_slot(&mut self, at: u32, offset: u64, fences: &Fences) -> Given {
        if !self.pending.is_empty() && self.pending.contains(offset) {
            return Given::Unknown;
        }
        let heap = self.slab_mut(at).heap;
        let Some(ticket) = self.stamp(heap, fences) else { return Given::NotYet };
        let slab = self.slab_mut(at);
        let Some(requested) = slab.give(offset, ticket.sequence()) else { return Given::Unknown };
        let bytes = slab.slot_bytes();
        self.after_slot(at);
        self.count_free(Kind::Small, bytes, requested);
        Given::Cached
    }

    /// A slot of the slab has just become free.
    #[inline(always)]
    fn after_slot(&mut self, at: u32) {
        let slab = self.slab_mut(at);
        let (heap, class, used) = (slab.heap, usize::from(slab.class), slab.used);
        if slab.left_full() {
            self.add_partial(heap, class, at);
        }
        if used == 0 && self.heap(heap).partial[class].len() > 1 {
            self.drop_slab(at);
        }
    }

    #[inline(always)]
    fn give_piece(&mut self, offset: u64, fences: &Fences) -> Given {
        let Some(live) = self.live.get(&offset) else { return Given::Unknown };
        match live.sort {
            Sort::Segment => return Given::Unknown,
            Sort::Graph(graph) => return self.give_in_graph(graph, offset, fences),
            _ => {}
        }
        let Some(ticket) = self.stamp(live.heap, fences) else { return Given::NotYet };
        let Some(live) = self.live.remove(&offset) else { return Given::Unknown };
        self.cache(offset, live.bytes, live.heap, live.sort, ticket.sequence());
        self.count_free(live.sort.kind(), live.bytes, live.requested);
        Given::Cached
    }

    /// As [`Core::give_piece`] for a block of a memory graph.
    #[inline(never)]
    fn give_in_graph(&mut self, graph: u32, start: u64, fences: &Fences) -> Given {
        let Some(&Live { bytes, requested, heap, sort }) = self.live.get(&start) else {
            return Given::Unknown;
        };
        if heap != self.graph_mut(graph).heap {
            return Given::NotYet;
        }
        let Some(ticket) = self.stamp(heap, fences) else { return Given::NotYet };
        self.live.remove(&start);
        self.leave_graph(graph, start, bytes);
        self.cache_in_graph(graph, Piece { start, bytes, mark: ticket.sequence() }, heap);
        self.count_free(sort.kind(), bytes, requested);
        Given::Cached
    }

    /// Puts a piece that is live no more among the free ones of its heap.
    #[inline(always)]
    fn cache(&mut self, start: u64, bytes: u64, heap: u32, sort: Sort, mark: u64) {
        let kind = if sort == Sort::Mid { MID } else { LARGE };
        if kind == LARGE {
            self.pages.remove_live(start..start + bytes);
        }
        let heap = self.heap_mut(heap);
        heap.held -= 1;
        heap.free[kind].insert(Piece { start, bytes, mark });
    }

    /// Takes a live block out to wait; from now on its address is unknown to frees. It is neither
    /// live nor free until [`Core::put_back`].
    pub(super) fn take_out(&mut self, offset: u64) -> Option<Waiting> {
        let (heap, sort, bytes, requested) = match self.slab_at(offset) {
            Some(_) if self.pending.contains(offset) => return None,
            Some(at) => {
                let slab = self.slab_mut(at);
                (slab.heap, Sort::Slot(at), slab.slot_bytes(), slab.requested(offset)?)
            }
            None => {
                let live = self.live.remove(&offset)?;
                if let Sort::Graph(graph) = live.sort {
                    self.leave_graph(graph, offset, live.bytes);
                }
                (live.heap, live.sort, live.bytes, live.requested)
            }
        };
        let statistics = &mut self.statistics;
        statistics.allocation.sub(sort.kind(), 1);
        statistics.allocated_bytes.sub(sort.kind(), bytes);
        statistics.requested_bytes.sub(sort.kind(), requested);
        statistics.pending_bytes += bytes;
        statistics.free_count += 1;
        Some(Waiting::new(bytes, requested, heap, sort))
    }

    /// Caches a block that waits for nothing more but its own stream. Where its heap has no mark
    /// for that it waits on, for its own stream too.
    pub(super) fn put_back(&mut self, offset: u64, mut waiting: Waiting, fences: &Fences) {
        let Waiting { bytes, heap, sort, own, .. } = waiting;
        let mark = match fences.known_passed(own) {
            true => 0,
            false if self.is_elsewhere(&waiting) => {
                waiting.tickets.push(own);
                return self.pending.insert(offset, waiting);
            }
            false if own.slot() == self.heap(heap).index => own.sequence(),
            // On a slot that was retired since: what is recorded on the new one comes later, unless
            // that is another stream's by now.
            false => match self.stamp(heap, fences) {
                Some(ticket) => ticket.sequence(),
                None => {
                    waiting.tickets.push(own);
                    return self.pending.insert(offset, waiting);
                }
            },
        };
        match sort {
            Sort::Slot(at) => {
                self.slab_mut(at).give(offset, mark);
                self.after_slot(at);
            }
            Sort::Graph(graph) => {
                self.cache_in_graph(graph, Piece { start: offset, bytes, mark }, heap);
            }
            _ => self.cache(offset, bytes, heap, sort, mark),
        }
        let statistics = &mut self.statistics;
        statistics.active.sub(sort.kind(), 1);
        statistics.active_bytes.sub(sort.kind(), bytes);
        statistics.pending_bytes -= bytes;
    }

    /// Changes what a page is cut into.
    pub(super) fn turn_page(&mut self, page: u32, to: Use) {
        let from = kind_of(self.pages.page(page).used_for);
        let (Some(from), Some(kind)) = (from, kind_of(to)) else { return };
        let (old, new) = self.pages.turn(page, to);
        let bytes = self.geometry.page_bytes;
        self.statistics.reserved_bytes.sub(from, bytes);
        self.statistics.reserved_bytes.add(kind, bytes);
        self.count_segments(from, old);
        self.count_segments(kind, new);
    }

    /// The number of segments of a kind changed.
    pub(super) fn count_segments(&mut self, kind: Kind, change: i64) {
        match u64::try_from(change) {
            Ok(more) => self.statistics.segment.add(kind, more),
            Err(_) => self.statistics.segment.sub(kind, change.unsigned_abs()),
        }
    }

    #[inline(always)]
    pub(super) fn count_malloc(&mut self, kind: Kind, bytes: u64, requested: u64) {
        let statistics = &mut self.statistics;
        statistics.malloc_count += 1;
        statistics.allocation.add(kind, 1);
        statistics.active.add(kind, 1);
        statistics.allocated_bytes.add(kind, bytes);
        statistics.active_bytes.add(kind, bytes);
        statistics.requested_bytes.add(kind, requested);
    }

    #[inline(always)]
    pub(super) fn count_free(&mut self, kind: Kind, bytes: u64, requested: u64) {
        let statistics = &mut self.statistics;
        statistics.free_count += 1;
        statistics.allocation.sub(kind, 1);
        statistics.active.sub(kind, 1);
        statistics.allocated_bytes.sub(kind, bytes);
        statistics.active_bytes.sub(kind, bytes);
        statistics.requested_bytes.sub(kind, requested);
    }
}
