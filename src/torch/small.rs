//! Slabs of a heap: where they are cut, how large they are, and where they go when they are empty.
//! Under the allocator's lock, as `heap`.
//!
//! A slab is a run of *slices* of a chunk, 64 KiB each. The first slab of a class is one slice;
//! each later one is a quarter of what the class has, up to 2 MiB, so that a class holds little
//! more than it needs. Slabs of less than a chunk lie among the "mid" blocks of their
//! heap, and share chunks with them.

use super::extents::Piece;
use super::heap::{ChunkUse, Core, MID};
use super::pages::Use;
use super::slabs::{SLAB_MAX, Slab, class_of};
use super::statistics::Kind;
use crate::sync::fence::Fences;

/// A slice that no slab has.
pub(super) const NO_SLAB: u32 = u32::MAX;
/// A new slab is this part of what its class has.
const GROWN_PART: u32 = 4;

/// Memory for a slab.
struct Span {
    start: u64,
    bytes: u64,
    mark: u64,
}

impl Core {
    #[inline(always)]
    pub(super) fn take_slot(&mut self, heap: u32, requested: u64, fences: &Fences) -> Option<u64> {
        let class = class_of(requested)?;
        let slab = match self.heap(heap).partial[class].first() {
            Some(slab) => *slab,
            None => self.make_slab(heap, class, fences)?,
        };
        let entry = self.slab_mut(slab);
        let offset = entry.take(requested).expect("a partial slab has a free slot");
        let bytes = entry.slot_bytes();
        if entry.is_full() {
            self.heap_mut(heap).partial[class].remove(0);
        }
        self.count_malloc(Kind::Small, bytes, requested);
        Some(offset)
    }

    /// The slab that an offset lies in.
    #[inline(always)]
    pub(super) fn slab_at(&self, offset: u64) -> Option<u32> {
        let page = self.pages.index_of(offset);
        let Use::Small(at) = self.pages.get(page)?.used_for else { return None };
        let within = offset - self.pages.start_of(page);
        let slab = self.chunk_page(at).slabs[(within >> self.geometry.slice_shift) as usize];
        (slab != NO_SLAB).then_some(slab)
    }

    #[cold]
    fn make_slab(&mut self, heap: u32, class: usize, fences: &Fences) -> Option<u32> {
        let slice = self.geometry.slice_bytes();
        let grown = u64::from(self.heap(heap).slices[class] / GROWN_PART) * slice;
        let span = self.take_span(heap, grown.max(slice), fences)?;
        let index = match self.vacant_slabs.pop() {
            Some(index) => index,
            None => {
                self.slabs.push(None);
                self.slabs.len() as u32 - 1
            }
        };
        let slab = Slab::new(span.start, span.bytes, class, heap, span.mark);
        self.slabs[index as usize] = Some(Box::new(slab));
        self.mark_slices(span.start, span.bytes, index);
        let entry = self.heap_mut(heap);
        entry.slices[class] += (span.bytes / slice) as u32;
        entry.held += 1;
        self.add_partial(heap, class, index);
        Some(index)
    }

    /// Takes memory for a slab of `wanted` bytes, whole slices, that the heap's stream may use at
    /// once; of less, where there is no more.
    fn take_span(&mut self, heap: u32, wanted: u64, fences: &Fences) -> Option<Span> {
        let (chunk_bytes, slice) = (self.geometry.chunk_bytes, self.geometry.slice_bytes());
        let wanted = wanted.min(chunk_bytes).min(SLAB_MAX);
        if wanted < chunk_bytes
            && let Some(span) = self.cut_span(heap, wanted)
        {
            return Some(span);
        }
        if let Some((at, chunk, mark)) = self.take_chunk(heap, fences) {
            let start = self.chunk_start(at, chunk);
            if wanted == chunk_bytes {
                self.chunk_page_mut(at).chunks[chunk] = ChunkUse::Slab;
                return Some(Span { start, bytes: chunk_bytes, mark });
            }
            self.chunk_page_mut(at).chunks[chunk] = ChunkUse::Mid;
            self.heap_mut(heap).free[MID].insert(Piece { start, bytes: chunk_bytes, mark });
            return self.cut_span(heap, wanted);
        }
        let mut less = (wanted / 2).next_multiple_of(slice);
        loop {
            let span = self.cut_span(heap, less);
            if span.is_some() || less <= slice {
                return span;
            }
            less = (less / 2).next_multiple_of(slice);
        }
    }

    /// Cuts a span out of what is free among the mid blocks of the heap.
    fn cut_span(&mut self, heap: u32, bytes: u64) -> Option<Span> {
        let slice = self.geometry.slice_bytes();
        let piece = self.heap_mut(heap).free[MID].take_aligned(bytes, slice)?;
        Some(Span { start: piece.start, bytes, mark: piece.mark })
    }

    /// Says whose slices the bytes are. They may be of two pages, where both are cut.
    fn mark_slices(&mut self, start: u64, bytes: u64, slab: u32) {
        for slice in (start..start + bytes).step_by(self.geometry.slice_bytes() as usize) {
            let Use::Small(at) = self.pages.page(self.pages.index_of(slice)).used_for else {
                debug_assert!(false, "slices are of pages that are cut");
                continue;
            };
            let entry = self.chunk_page(at);
            let within = slice - self.pages.start_of(entry.page);
            let place = (within >> self.geometry.slice_shift) as usize;
            self.chunk_page_mut(at).slabs[place] = slab;
        }
    }

    /// Enters a slab with a free slot among those of its class.
    pub(super) fn add_partial(&mut self, heap: u32, class: usize, slab: u32) {
        let base = |slab: u32| self.slabs[slab as usize].as_ref().map_or(0, |slab| slab.base);
        let partial = &self.heap(heap).partial[class];
        let at = partial.partition_point(|other| base(*other) < base(slab));
        self.heap_mut(heap).partial[class].insert(at, slab);
    }

    /// An empty slab's memory is free.
    pub(super) fn drop_slab(&mut self, at: u32) {
        let Some(slab) = self.slabs[at as usize].take() else { return };
        self.vacant_slabs.push(at);
        let (start, bytes, mark) = (slab.base, slab.bytes(), slab.mark);
        self.mark_slices(start, bytes, NO_SLAB);
        let slices = (bytes >> self.geometry.slice_shift) as u32;
        let heap = self.heap_mut(slab.heap);
        heap.partial[usize::from(slab.class)].retain(|other| *other != at);
        heap.slices[usize::from(slab.class)] -= slices;
        heap.held -= 1;
        let ticket = heap.ticket(mark);
        let Some((chunk_page, chunk)) = self.chunk_at(start) else { return };
        match self.chunk_page(chunk_page).chunks[chunk] {
            ChunkUse::Slab => self.free_chunk(chunk_page, chunk, ticket),
            _ => self.heap_mut(slab.heap).free[MID].insert(Piece { start, bytes, mark }),
        }
    }
}
