//! Memory for callers that cache by themselves: PyTorch's own allocator with a `MemPool`.
//!
//! What they free goes back to the driver at once, since the rest of their memory does not come
//! from here: after all work of the device, because they tell no streams.

use super::heap::{Core, LARGE, Live, Sort};
use super::{Allocator, Freed};
use crate::memory::pager::GiveTo;
use crate::process;
use crate::sync::Relaxed;
use crate::units::Stream;

impl Allocator {
    /// Memory for a caller that caches by itself (a `MemPool` of PyTorch's own allocator): `bytes`
    /// for work on `stream`. `None` when it cannot be had; it does not count on the caller giving
    /// anything back.
    pub fn segment_malloc(&self, bytes: usize, stream: Stream) -> Option<u64> {
        if bytes == 0 {
            return None;
        }
        if self.direct.is_some() {
            return self.malloc_unrecorded(bytes as u64, stream).ok();
        }
        let served = self.ask(bytes as u64, stream, Sort::Segment).and_then(|ask| match ask {
            Some(ask) => self.serve(&ask),
            None => Ok(None),
        });
        match served {
            Ok(offset) => offset.map(|offset| self.base + offset),
            Err(error) => {
                log::warn!("a segment of {bytes} bytes: {error}");
                None
            }
        }
    }

    /// Gives such memory back: waits for all work that was enqueued on the device before, then its
    /// pages go to the driver. While a stream is being captured they go later.
    pub fn segment_free(&self, address: u64) -> Freed {
        if address == 0 {
            return Freed::Nothing;
        }
        if process::ending() || self.closed.load(Relaxed) {
            return Freed::Ending;
        }
        if let Some(direct) = &self.direct {
            self.record_directly(direct, address, Stream::NONE);
            return self.free_directly(direct, address);
        }
        let offset = address.wrapping_sub(self.base);
        let bytes = {
            let mut core = self.core.lock();
            let is_segment = core.live.get(&offset).is_some_and(|live| live.sort == Sort::Segment);
            let Some(mut waiting) = is_segment.then(|| core.take_out(offset)).flatten() else {
                drop(core);
                return self.count_unknown(address);
            };
            let bytes = waiting.bytes;
            waiting.in_hand = false;
            waiting.tickets.push(self.pager.device.fences.unrecorded_stamp());
            core.pending.insert(offset, waiting);
            self.note_waiting(&core);
            bytes
        };
        self.end_segment(offset, bytes)
    }

    fn end_segment(&self, offset: u64, bytes: u64) -> Freed {
        let device = &self.pager.device;
        let Ok(_scope) = device.enter() else { return Freed::Deferred };
        if self.open.any() {
            return Freed::Deferred;
        }
        if let Err(error) = device.context_wait_asked() {
            log::debug!("a segment goes later: {error}");
            return Freed::Deferred;
        }
        self.poll_pending();
        let take_out = || {
            let mut core = self.core.lock();
            let pages = core.pages.index_of(offset)..core.pages.index_of(offset + bytes - 1) + 1;
            core.take_empty_of(pages, &device.fences)
        };
        if let Err(error) = self.pager.give_back(&self.arena, take_out, GiveTo::Driver) {
            log::warn!("the pages of a segment: {error}");
        }
        Freed::Cached
    }
}

impl Core {
    /// Takes a segment, or a region, from what is free for a heap's stream.
    pub(super) fn take_whole(&mut self, heap: u32, requested: u64, sort: Sort) -> Option<u64> {
        let bytes = requested.next_multiple_of(super::slabs::GRAIN);
        let (start, _) = self.heap_mut(heap).free[LARGE].take_best(bytes)?;
        self.enter(start, Live { bytes, requested, heap, sort });
        Some(start)
    }
}
