//! Blocks: where a request's bytes are, and where they go when it is freed. Everything here is
//! under the allocator's lock and makes no driver call.
//!
//! A *pool* is the ordinary one, or a graph's own. In a pool each stream has a *heap*: free memory
//! that this stream used last, and may use again at once. What other streams' heaps hold becomes
//! *neutral* when the work that used it has passed ([`Core::settle`] in `sweep`): then it is
//! anybody's. Memory is in pages; some are cut into chunks of 2 MiB for smaller requests.
//!
//! ```text
//! request <= 32 KiB        a slot of a slab, one size class a slab         "small"
//! request <= half a chunk  best fit, in chunks of the stream's heap        "mid"
//! larger                   best fit over pages, across them               "large"
//! ```

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::extents::{Extents, Piece};
use super::graph::Graph;
use super::moves::Moves;
use super::pages::{Pages, Use};
use super::pending::{Pending, Used};
use super::reserve::Reserve;
use super::slabs::{CLASS_COUNT, GRAIN, Slab, class_max};
use super::small::NO_SLAB;
use super::statistics::{AllocatorStatistics, Kind, PoolId};
use crate::sync::fence::{Fences, StreamSlot};
use crate::sync::ticket::Ticket;
use crate::units::{MIB, Stream};

/// The ordinary pool.
pub(super) const ORDINARY: u32 = 0;
/// Index in [`Heap::free`]: pieces of chunks.
pub(super) const MID: usize = 0;
/// Index in [`Heap::free`]: pieces of pages.
pub(super) const LARGE: usize = 1;

/// Bytes of a slice, where chunks are as large.
const SLICE_MAX: u64 = 64 << 10;

/// Sizes that follow from that of a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub(super) page_bytes: u64,
    pub(super) chunk_bytes: u64,
    /// Largest small request.
    pub(super) small_max: u64,
    /// Largest request that a slab serves.
    pub(super) class_max: u64,
    /// Slabs are whole slices of so many bytes, as a power of two.
    pub(super) slice_shift: u32,
}

impl Geometry {
    pub(super) fn new(page_bytes: u64) -> Self {
        // A page has 64 chunks at most.
        let chunk_bytes = (2 * MIB).min(page_bytes).max(page_bytes / 64);
        let (small_max, class_max) = (chunk_bytes / 2, class_max(chunk_bytes));
        let slice_shift = SLICE_MAX.min(chunk_bytes).trailing_zeros();
        Self { page_bytes, chunk_bytes, small_max, class_max, slice_shift }
    }

    pub(super) fn slice_bytes(&self) -> u64 {
        1 << self.slice_shift
    }

    fn slices(&self) -> usize {
        (self.page_bytes >> self.slice_shift) as usize
    }

    pub(super) fn chunks(&self) -> usize {
        (self.page_bytes / self.chunk_bytes) as usize
    }
}

/// A hash of one multiplication: keys are multiples of 512.
#[derive(Default)]
pub(super) struct OffsetHasher(u64);

impl Hasher for OffsetHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are numbers");
    }

    #[inline(always)]
    fn write_u64(&mut self, key: u64) {
        // The table takes its place from the low bits and its tag from the high ones.
        let hash = (key >> 9).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = hash ^ (hash >> 32);
    }
}

pub(super) type ByOffset<T> = HashMap<u64, T, BuildHasherDefault<OffsetHasher>>;

/// A live block that no slab holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Live {
    pub(super) bytes: u64,
    pub(super) requested: u64,
    pub(super) heap: u32,
    pub(super) sort: Sort,
}

/// What a block is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sort {
    /// A slot of a slab: its index.
    Slot(u32),
    /// A piece of chunks.
    Mid,
    /// A piece of pages.
    Large,
    /// The same, in the hands of a caller that caches by itself.
    Segment,
    /// A piece of a memory graph's: the graph's index.
    Graph(u32),
    /// Pages that a memory graph cuts by itself: in no table of blocks.
    Region,
}

impl Sort {
    pub(super) fn kind(self) -> Kind {
        match self {
            Self::Slot(_) | Self::Mid => Kind::Small,
            Self::Large | Self::Segment | Self::Graph(_) | Self::Region => Kind::Large,
        }
    }
}

/// The free memory of one stream in one pool.
pub(super) struct Heap {
    pub(super) pool: u32,
    pub(super) slot: StreamSlot,
    /// Its handle when it was seen last.
    pub(super) stream: Stream,
    /// The stream's slot, by number, that the marks are of.
    pub(super) index: u16,
    /// Of chunks and of pages; the marks are sequences of the slot.
    pub(super) free: [Extents; 2],
    /// Slabs of a class with a free slot, lowest first.
    pub(super) partial: [Vec<u32>; CLASS_COUNT],
    /// Slices that the slabs of a class have.
    pub(super) slices: [u32; CLASS_COUNT],
    /// Live blocks, slabs and frees under way: while there are any the heap stays.
    pub(super) held: u64,
}

impl Heap {
    /// The ticket that a mark stands for.
    pub(super) fn ticket(&self, mark: u64) -> Ticket {
        if mark == 0 { Ticket::NONE } else { Ticket::new(self.index, mark) }
    }
}

/// The ordinary pool, or a graph's.
#[derive(Default)]
pub(super) struct Pool {
    pub(super) id: Option<PoolId>,
    /// Times that it was begun less times that it was released.
    pub(super) uses: u32,
    /// It was released: its memory is ordinary when this has passed.
    pub(super) retired: Option<Ticket>,
    /// Heaps by their streams' ids.
    pub(super) heaps: Vec<(u64, u32)>,
    /// What no work uses any more.
    pub(super) neutral: [Extents; 2],
    /// Pages that are cut into chunks, lowest first.
    pub(super) chunk_pages: Vec<u32>,
}

/// What a chunk is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ChunkUse {
    /// Free after a ticket.
    Free(Ticket),
    /// One slab.
    Slab,
    /// Blocks, and slabs of less than a chunk.
    Mid,
}

/// A page that is cut into chunks.
pub(super) struct ChunkPage {
    pub(super) page: u32,
    pub(super) chunks: Vec<ChunkUse>,
    /// The slab of each slice, or [`NO_SLAB`].
    pub(super) slabs: Vec<u32>,
    /// A bit for each free chunk.
    pub(super) free: u64,
}

/// See the module's text.
pub(super) struct Core {
    pub(super) geometry: Geometry,
    pub(super) pages: Pages,
    pub(super) live: ByOffset<Live>,
    pub(super) slabs: Vec<Option<Box<Slab>>>,
    pub(super) vacant_slabs: Vec<u32>,
    pub(super) chunk_pages: Vec<Option<ChunkPage>>,
    pub(super) heaps: Vec<Option<Box<Heap>>>,
    pub(super) pools: Vec<Option<Pool>>,
    pub(super) graphs: Vec<Option<Box<Graph>>>,
    /// Streams beside its own that a live block was recorded for.
    pub(super) uses: ByOffset<Vec<Used>>,
    pub(super) pending: Pending,
    pub(super) moves: Moves,
    pub(super) statistics: AllocatorStatistics,
}

impl Core {
    pub(super) fn new(page_bytes: u64, page_count: u32, reserve: Reserve) -> Self {
        Self {
            geometry: Geometry::new(page_bytes),
            pages: Pages::new(page_count, page_bytes.trailing_zeros(), reserve),
            live: ByOffset::with_capacity_and_hasher(4096, Default::default()),
            slabs: Vec::new(),
            vacant_slabs: Vec::new(),
            chunk_pages: Vec::new(),
            heaps: Vec::new(),
            pools: vec![Some(Pool::default())],
            graphs: Vec::new(),
            uses: ByOffset::default(),
            pending: Pending::default(),
            moves: Moves::new(page_bytes),
            statistics: AllocatorStatistics::default(),
        }
    }

    pub(super) fn pool(&self, pool: u32) -> &Pool {
        self.pools[pool as usize].as_ref().expect("a pool with memory exists")
    }

    pub(super) fn pool_mut(&mut self, pool: u32) -> &mut Pool {
        self.pools[pool as usize].as_mut().expect("a pool with memory exists")
    }

    #[inline(always)]
    pub(super) fn heap(&self, heap: u32) -> &Heap {
        self.heaps[heap as usize].as_ref().expect("a heap with blocks exists")
    }

    #[inline(always)]
    pub(super) fn heap_mut(&mut self, heap: u32) -> &mut Heap {
        self.heaps[heap as usize].as_mut().expect("a heap with blocks exists")
    }

    #[inline(always)]
    pub(super) fn slab_mut(&mut self, slab: u32) -> &mut Slab {
        self.slabs[slab as usize].as_mut().expect("a slab with slots exists")
    }

    /// The heap of a stream in a pool, by the stream's id.
    #[inline(always)]
    pub(super) fn known_heap(&self, pool: u32, stream_id: u64) -> Option<u32> {
        let found = self.pool(pool).heaps.iter().find(|(stream, _)| *stream == stream_id);
        found.map(|(_, heap)| *heap)
    }

    /// As [`Core::known_heap`], of a stream whose slot was just found; made if it is new.
    pub(super) fn heap_of(
        &mut self,
        pool: u32,
        slot: StreamSlot,
        stream: Stream,
        fences: &Fences,
    ) -> u32 {
        let found = self.known_heap(pool, slot.stream_id());
        let Some(heap) = found else { return self.make_heap(pool, slot, stream) };
        let entry = self.heap_mut(heap);
        entry.stream = stream;
        if entry.slot != slot {
            self.move_heap(heap, slot, fences);
        }
        heap
    }

    #[cold]
    fn make_heap(&mut self, pool: u32, slot: StreamSlot, stream: Stream) -> u32 {
        let heap = Box::new(Heap {
            pool,
            slot,
            stream,
            index: slot.index(),
            free: Default::default(),
            partial: Default::default(),
            slices: [0; CLASS_COUNT],
            held: 0,
        });
        let at = match self.heaps.iter().position(Option::is_none) {
            Some(at) => at,
            None => {
                self.heaps.push(None);
                self.heaps.len() - 1
            }
        };
        self.heaps[at] = Some(heap);
        self.pool_mut(pool).heaps.push((slot.stream_id(), at as u32));
        at as u32
    }

    /// The stream has another slot now. Where its old one became free for others because all that
    /// was stamped had passed, the marks count no more. One that was retired may have work before
    /// its last record: what is recorded on the new slot comes after that. Nothing changes where
    /// the new slot is not the stream's any more either: it is found again at the next use.
    #[cold]
    pub(super) fn move_heap(&mut self, heap: u32, slot: StreamSlot, fences: &Fences) {
        // A stream that took it over while the marks are made would pass them.
        let Some(_held) = fences.hold_if_still(slot) else { return };
        let entry = self.heaps[heap as usize].as_mut().expect("a heap with blocks exists");
        let old = entry.index;
        let mark_of = |mark: u64| match mark == 0 || fences.known_passed(Ticket::new(old, mark)) {
            true => 0,
            false => fences.stamp(slot).sequence(),
        };
        (entry.slot, entry.index) = (slot, slot.index());
        for free in &mut entry.free {
            for piece in free.take_passed(|_| true) {
                free.insert(Piece { mark: mark_of(piece.mark), ..piece });
            }
        }
        let slabs = self.slabs.iter_mut().flatten();
        slabs.filter(|slab| slab.heap == heap).for_each(|slab| slab.mark = mark_of(slab.mark));
        self.remark_graphs(heap, &mark_of);
    }

    /// The heap's ticket for all work enqueued on its stream by now; `None` when the stream's slot
    /// is another one meanwhile, which has to be found first.
    #[inline(always)]
    pub(super) fn stamp(&self, heap: u32, fences: &Fences) -> Option<Ticket> {
        fences.stamp_if_still(self.heap(heap).slot)
    }

    /// Takes a block from what is free and at once usable for the heap's stream.
    #[inline(always)]
    pub(super) fn take(&mut self, heap: u32, requested: u64, fences: &Fences) -> Option<u64> {
        if requested <= self.geometry.class_max {
            return self.take_slot(heap, requested, fences);
        }
        let bytes = requested.next_multiple_of(GRAIN);
        if requested <= self.geometry.small_max {
            return self.take_mid(heap, bytes, requested, fences);
        }
        let (offset, _) = self.heap_mut(heap).free[LARGE].take_best(bytes)?;
        self.enter(offset, Live { bytes, requested, heap, sort: Sort::Large });
        Some(offset)
    }

    fn take_mid(&mut self, heap: u32, bytes: u64, requested: u64, fences: &Fences) -> Option<u64> {
        let live = Live { bytes, requested, heap, sort: Sort::Mid };
        if let Some((offset, _)) = self.heap_mut(heap).free[MID].take_best(bytes) {
            self.enter(offset, live);
            return Some(offset);
        }
        let (chunk_page, chunk, mark) = self.take_chunk(heap, fences)?;
        self.chunk_page_mut(chunk_page).chunks[chunk] = ChunkUse::Mid;
        let (start, bytes_of_chunk) =
            (self.chunk_start(chunk_page, chunk), self.geometry.chunk_bytes);
        self.heap_mut(heap).free[MID].insert(Piece { start, bytes: bytes_of_chunk, mark });
        let (offset, _) = self.heap_mut(heap).free[MID].take_best(bytes)?;
        self.enter(offset, live);
        Some(offset)
    }

    /// Enters a block that is no slot among the live ones.
    #[inline(always)]
    pub(super) fn enter(&mut self, offset: u64, live: Live) {
        if live.sort != Sort::Mid {
            // A chunk keeps its page by itself.
            self.pages.add_live(offset..offset + live.bytes);
            self.moves.earn(live.bytes);
        }
        self.heap_mut(live.heap).held += 1;
        if live.sort == Sort::Region {
            return;
        }
        self.live.insert(offset, live);
        self.count_malloc(live.sort.kind(), live.bytes, live.requested);
    }

    /// Takes a chunk that the heap's stream may use at once: of a page that is cut already, else of
    /// a free one. Returns its page, its number, and its mark.
    pub(super) fn take_chunk(&mut self, heap: u32, fences: &Fences) -> Option<(u32, usize, u64)> {
        let (pool, index) = (self.heap(heap).pool, self.heap(heap).index);
        // With the slot another stream's, its number says nothing of whose tickets they are.
        let is_own = fences.is_still(self.heap(heap).slot);
        let usable =
            |ticket: Ticket| is_own && ticket.slot() == index || fences.known_passed(ticket);
        let found = self.pool(pool).chunk_pages.iter().find_map(|&at| {
            let entry = self.chunk_pages[at as usize].as_ref()?;
            let free = entry.chunks.iter().enumerate().filter_map(|(chunk, used)| match used {
                ChunkUse::Free(ticket) if usable(*ticket) => Some((at, chunk, *ticket)),
                _ => None,
            });
            if entry.free == 0 { None } else { { free }.next() }
        });
        let (at, chunk, ticket) = match found {
            Some(found) => found,
            None => {
                let page_bytes = self.geometry.page_bytes;
                let piece = self.heap_mut(heap).free[LARGE].take_aligned(page_bytes, page_bytes)?;
                let page = self.pages.index_of(piece.start);
                let at = self.cut_page(page, self.heap(heap).ticket(piece.mark));
                let ChunkUse::Free(ticket) = self.chunk_page(at).chunks[0] else { return None };
                (at, 0, ticket)
            }
        };
        let entry = self.chunk_page_mut(at);
        entry.free &= !(1 << chunk);
        let page = entry.page;
        self.pages.keep(page);
        let own = !ticket.is_none() && ticket.slot() == index;
        Some((at, chunk, if own { ticket.sequence() } else { 0 }))
    }

    /// Cuts a free page into chunks. `ticket`: after which it is free.
    pub(super) fn cut_page(&mut self, page: u32, ticket: Ticket) -> u32 {
        let chunks = self.geometry.chunks();
        let free = if chunks == 64 { u64::MAX } else { (1 << chunks) - 1 };
        let (chunks, slabs) =
            (vec![ChunkUse::Free(ticket); chunks], vec![NO_SLAB; self.geometry.slices()]);
        let entry = ChunkPage { page, chunks, slabs, free };
        let at = match self.chunk_pages.iter().position(Option::is_none) {
            Some(at) => at,
            None => {
                self.chunk_pages.push(None);
                self.chunk_pages.len() - 1
            }
        };
        self.chunk_pages[at] = Some(entry);
        self.turn_page(page, Use::Small(at as u32));
        self.add_chunk_page(self.pages.page(page).pool, at as u32);
        at as u32
    }

    /// Enters a page of chunks among those of a pool.
    pub(super) fn add_chunk_page(&mut self, pool: u32, at: u32) {
        let page = self.chunk_page(at).page;
        let of = |at: u32| self.chunk_pages[at as usize].as_ref().map_or(0, |entry| entry.page);
        let place = self.pool(pool).chunk_pages.partition_point(|other| of(*other) < page);
        self.pool_mut(pool).chunk_pages.insert(place, at);
    }

    pub(super) fn chunk_page(&self, at: u32) -> &ChunkPage {
        self.chunk_pages[at as usize].as_ref().expect("a page of chunks is known")
    }

    pub(super) fn chunk_page_mut(&mut self, at: u32) -> &mut ChunkPage {
        self.chunk_pages[at as usize].as_mut().expect("a page of chunks is known")
    }

    pub(super) fn chunk_start(&self, at: u32, chunk: usize) -> u64 {
        let page = self.chunk_page(at).page;
        self.pages.start_of(page) + chunk as u64 * self.geometry.chunk_bytes
    }

    /// A chunk is free after a ticket.
    pub(super) fn free_chunk(&mut self, at: u32, chunk: usize, ticket: Ticket) {
        let entry = self.chunk_page_mut(at);
        entry.chunks[chunk] = ChunkUse::Free(ticket);
        entry.free |= 1 << chunk;
        let page = entry.page;
        self.pages.let_go(page);
    }

    /// The page of chunks and the chunk that an offset lies in.
    pub(super) fn chunk_at(&self, offset: u64) -> Option<(u32, usize)> {
        let page = self.pages.index_of(offset);
        let Use::Small(at) = self.pages.get(page)?.used_for else { return None };
        let within = offset - self.pages.start_of(page);
        Some((at, (within / self.geometry.chunk_bytes) as usize))
    }
}
