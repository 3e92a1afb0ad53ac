//! Graph pools: memory that a captured graph reads and writes again at every launch.
//!
//! Between `begin_pool` and `end_pool` requests for the streams that the pool's filter admits come
//! from the pool. Its pages are its own, with their frames, from the first request until the pool
//! was released as often as it was begun; then its memory is ordinary, block by block as they die,
//! after all work of the device, since nobody knows on which streams the graph was launched.

use std::sync::Arc;

use super::extents::{Extents, Piece};
use super::graphs::session;
use super::heap::{Core, ORDINARY, Pool};
use super::{Allocator, PoolFilter, PoolId};
use crate::process;
use crate::sync::fence::Fences;
use crate::sync::ticket::Ticket;
use crate::sync::{AtomicU32, Mutex, Relaxed, Release};
use crate::units::Stream;

/// A pool that requests may come from now.
struct OpenPool {
    id: PoolId,
    index: u32,
    filter: PoolFilter,
}

/// The pools that are open, the newest last.
#[derive(Default)]
pub(super) struct OpenPools {
    pools: Mutex<Vec<Arc<OpenPool>>>,
    count: AtomicU32,
}

impl OpenPools {
    /// Whether there are any.
    #[inline(always)]
    pub(super) fn any(&self) -> bool {
        self.count.load(Relaxed) > 0
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Arc<OpenPool>>)) {
        let mut pools = self.pools.lock();
        change(&mut pools);
        self.count.store(pools.len() as u32, Release);
    }
}

impl Allocator {
    /// From now on requests for streams that `filter` admits come from the pool `id`, made if it
    /// is new, whose memory is its own until it is released as often as it was begun.
    pub fn begin_pool(&self, id: PoolId, filter: PoolFilter) {
        if process::ending() {
            return;
        }
        let index = {
            let mut core = self.core.lock();
            let index = core.pool_of(id);
            core.pool_mut(index).uses += 1;
            index
        };
        self.open.change(|pools| pools.push(Arc::new(OpenPool { id, index, filter })));
        self.note_capture_of(&session());
    }

    /// Requests come from the ordinary pool again. What was freed while streams were being
    /// captured is looked at now.
    pub fn end_pool(&self, id: PoolId) {
        if process::ending() {
            return;
        }
        let mut ended = None;
        self.open.change(|pools| {
            let last = pools.iter().rposition(|pool| pool.id == id);
            ended = last.map(|at| pools.remove(at));
        });
        let Some(ended) = ended else { return };
        self.look_at_streams(ended.index);
        if self.open.any() {
            return;
        }
        match &self.direct {
            Some(direct) => {
                if let Err(error) = self.release_leaving(direct) {
                    log::warn!("what was freed during a capture: {error}");
                }
            }
            None => self.end_captured(),
        }
    }

    /// Whether the streams of a pool are being captured still: what is known of them holds back
    /// waits for the device.
    fn look_at_streams(&self, pool: u32) {
        let streams: Vec<Stream> = {
            let core = self.core.lock();
            let heaps = core.pools[pool as usize].iter().flat_map(|pool| &pool.heaps);
            let streams = heaps.map(|(_, heap)| core.heap(*heap).stream);
            // The default stream counts as captured while others are.
            streams.chain(std::iter::once(Stream::DEFAULT)).collect()
        };
        let device = &self.pager.device;
        let Ok(_scope) = device.enter() else { return };
        for stream in streams {
            if let Err(error) = device.inspect(stream) {
                let error = device.note(error);
                log::debug!("a stream of a graph pool: {error}");
            }
        }
    }

    /// Gives up one use of a pool; after the last one its memory is ordinary as its blocks die.
    pub fn release_pool(&self, id: PoolId) {
        if process::ending() {
            return;
        }
        let fences = &self.pager.device.fences;
        let mut core = self.core.lock();
        let Some(index) = core.known_pool(id) else { return };
        let pool = core.pool_mut(index);
        pool.uses = pool.uses.saturating_sub(1);
        if pool.uses > 0 {
            return;
        }
        let Some(direct) = &self.direct else {
            return core.retire_pool(index, fences.unrecorded_stamp());
        };
        core.pools[index as usize] = None;
        drop(core);
        self.release_pool_directly(direct, index);
    }

    /// The pool that a request for work on a stream comes from, and its id.
    pub(super) fn route(&self, stream: Stream) -> (u32, Option<PoolId>) {
        if !self.open.any() {
            return (ORDINARY, None);
        }
        let open = self.open.pools.lock().clone();
        let admits = |pool: &&Arc<OpenPool>| (pool.filter)(stream);
        let admitted = open.iter().rev().find(admits);
        admitted.map_or((ORDINARY, None), |pool| (pool.index, Some(pool.id)))
    }
}

impl Core {
    pub(super) fn known_pool(&self, id: PoolId) -> Option<u32> {
        let same = |pool: &Option<Pool>| pool.as_ref().is_some_and(|pool| pool.id == Some(id));
        self.pools.iter().position(same).map(|at| at as u32)
    }

    /// The pool that a request was routed to, or the ordinary one when it is released by now.
    pub(super) fn standing_pool(&self, (index, id): (u32, Option<PoolId>)) -> u32 {
        let is_same = |pool: &Pool| pool.id == id && pool.retired.is_none();
        let pool = self.pools.get(index as usize).and_then(Option::as_ref);
        if pool.is_some_and(is_same) { index } else { ORDINARY }
    }

    fn pool_of(&mut self, id: PoolId) -> u32 {
        if let Some(index) = self.known_pool(id) {
            return index;
        }
        let pool = Some(Pool { id: Some(id), ..Pool::default() });
        match self.pools.iter().position(Option::is_none) {
            Some(at) => {
                self.pools[at] = pool;
                at as u32
            }
            None => {
                self.pools.push(pool);
                self.pools.len() as u32 - 1
            }
        }
    }

    /// The pool's pages are no longer kept. Requests do not find it any more; what it holds is
    /// ordinary as soon as `after` has passed.
    fn retire_pool(&mut self, index: u32, after: Ticket) {
        for page in 0..self.pages.known() {
            let entry = self.pages.page(page);
            if entry.pool == index && super::pages::kind_of(entry.used_for).is_some() {
                self.pages.let_go(page);
            }
        }
        let pool = self.pool_mut(index);
        (pool.id, pool.retired) = (None, Some(after));
    }

    /// Whether there are pools that wait to be ordinary.
    pub(super) fn has_retired(&self) -> bool {
        self.pools.iter().flatten().any(|pool| pool.retired.is_some())
    }

    /// The memory of pools that were released, and whose last launches are over, is ordinary.
    pub(super) fn merge_retired(&mut self, fences: &Fences) {
        for index in 0..self.pools.len() as u32 {
            let retired = self.pools[index as usize].as_ref().and_then(|pool| pool.retired);
            let passed = retired.is_some_and(|retired| fences.known_passed(retired));
            if passed && !self.is_growing(index) {
                self.merge_pool(index, fences);
            }
        }
    }

    /// Whether a thread is getting the pool a page.
    fn is_growing(&self, index: u32) -> bool {
        let mut pages = (0..self.pages.known()).map(|page| self.pages.page(page));
        pages.any(|page| page.pool == index && page.used_for == super::pages::Use::Mapping)
    }

    fn merge_pool(&mut self, index: u32, fences: &Fences) {
        let Some(pool) = self.pools[index as usize].take() else { return };
        for page in 0..self.pages.known() {
            let entry = self.pages.page(page);
            let kind = super::pages::kind_of(entry.used_for);
            if let Some(kind) = kind.filter(|_| entry.pool == index) {
                let change = self.pages.set_pool(page, ORDINARY);
                self.count_segments(kind, change);
            }
        }
        for (kind, mut free) in pool.neutral.into_iter().enumerate() {
            for piece in free.take_passed(|_| true) {
                self.pool_mut(ORDINARY).neutral[kind].insert(piece);
            }
        }
        for at in pool.chunk_pages {
            self.add_chunk_page(ORDINARY, at);
        }
        for (id, heap) in pool.heaps {
            match self.known_heap(ORDINARY, id) {
                Some(into) if self.is_comparable(heap, into, fences) => {
                    self.merge_heap(heap, into);
                }
                // A second one of the stream's goes when all in it is anybody's or live no more.
                _ => {
                    self.heap_mut(heap).pool = ORDINARY;
                    self.pool_mut(ORDINARY).heaps.push((id, heap));
                }
            }
        }
    }

    /// Whether the marks of one heap can be those of another of the same stream: they are of one
    /// slot, or have all passed. What was freed since the pool was released may be in use.
    fn is_comparable(&self, from: u32, into: u32, fences: &Fences) -> bool {
        let heap = self.heap(from);
        let slabs = self.slabs.iter().flatten().filter(|slab| slab.heap == from);
        let pieces = heap.free.iter().flat_map(Extents::iter).map(|piece| piece.mark);
        let mut marks = pieces.chain(slabs.map(|slab| slab.mark));
        heap.slot == self.heap(into).slot
            || marks.all(|mark| fences.known_passed(heap.ticket(mark)))
    }

    /// Moves everything of one heap into another of the same stream, of which it
    /// [is comparable](Self::is_comparable).
    fn merge_heap(&mut self, from: u32, into: u32) {
        let Some(heap) = self.heaps[from as usize].take() else { return };
        let own = heap.slot == self.heap(into).slot;
        let target = self.heap_mut(into);
        target.held += heap.held;
        for (kind, mut free) in heap.free.into_iter().enumerate() {
            for piece in free.take_passed(|_| true) {
                let mark = if own { piece.mark } else { 0 };
                target.free[kind].insert(Piece { mark, ..piece });
            }
        }
        for slab in self.slabs.iter_mut().flatten().filter(|slab| slab.heap == from) {
            slab.heap = into;
            slab.mark = if own { slab.mark } else { 0 };
        }
        for (class, slices) in heap.slices.into_iter().enumerate() {
            self.heap_mut(into).slices[class] += slices;
        }
        for (class, slabs) in heap.partial.into_iter().enumerate() {
            slabs.into_iter().for_each(|slab| self.add_partial(into, class, slab));
        }
        self.live.values_mut().filter(|live| live.heap == from).for_each(|live| live.heap = into);
        self.pending.move_heap(from, into);
    }
}
