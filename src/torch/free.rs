//! Frees that need more than a stamp: blocks that other streams were recorded for, and frees while
//! a stream is being captured.
//!
//! Such a block is *pending*: in no table of live or free blocks until the fences that were
//! recorded for it have passed. Nothing is recorded on a stream that is being captured; what it
//! uses waits for the end of the capture and is recorded then.

use super::heap::{ORDINARY, Sort};
use super::pending::{Of, Used};
use super::{Allocator, Freed};
use crate::driver::CaptureState;
use crate::sync::fence::StreamSlot;
use crate::sync::ticket::Ticket;
use crate::sync::{Relaxed, Release};
use crate::units::Stream;

/// What has to be over before a block can be cached.
#[derive(Default)]
struct Fencing {
    tickets: Vec<Ticket>,
    capturing: Vec<Used>,
}

impl Allocator {
    /// Notes that `stream` uses a block too: it is not reused before the work that is enqueued
    /// there when it is freed is done. The stream must live until then. An address of no live
    /// block is ignored.
    pub fn record_stream(&self, address: u64, stream: Stream) {
        let device = &self.pager.device;
        if device.check().is_err() || self.closed.load(Relaxed) || stream.is_none() {
            return;
        }
        if self.recorder.is_on() {
            self.recorder.record(address, stream);
        }
        if let Some(direct) = &self.direct {
            return self.record_directly(direct, address, stream);
        }
        let offset = address.wrapping_sub(self.base);
        if offset >= self.arena.space.bytes {
            return;
        }
        let elsewhere = self.default_elsewhere(stream);
        let found = device.enter_context().and_then(|_context| self.what_it_is(stream));
        let mut core = self.core.lock();
        let Some(heap) = core.live_heap(offset) else { return };
        let own = core.heap(heap).slot;
        // Uses that cannot be known of: only a wait for the device tells that they are over.
        let unknown = Used::ours(Stream::NONE, own);
        let named = found.as_ref().map_or(unknown, |used| used.unwrap_or(unknown));
        let is_own = named.is_same(&Used::ours(stream, own)) && named != unknown;
        let named = Some(named).filter(|_| !is_own);
        for used in named.into_iter().chain(elsewhere) {
            let uses = core.uses.entry(offset).or_default();
            if !uses.iter().any(|known| known.is_same(&used)) {
                uses.push(used);
            }
        }
        drop(core);
        if let Err(error) = found {
            let error = device.note(error);
            log::error!("a block was recorded for {stream:?}: {error}");
        }
    }

    /// Frees a block whose uses have to be fenced first.
    #[cold]
    pub(super) fn free_slowly(&self, offset: u64) -> Freed {
        let device = &self.pager.device;
        let (uses, mut slot, stream, pool) = {
            let mut core = self.core.lock();
            let Some(waiting) = core.take_out(offset) else {
                drop(core);
                return self.count_unknown(offset + self.base);
            };
            let mut uses = core.uses.remove(&offset).unwrap_or_default();
            let heap = core.heap(waiting.heap);
            let (slot, stream, pool) = (heap.slot, heap.stream, heap.pool);
            if core.is_elsewhere(&waiting) {
                uses.push(Used::ours(stream, slot));
            }
            core.pending.insert(offset, waiting);
            self.note_waiting(&core);
            (uses, slot, stream, pool)
        };
        let mut fencing = Fencing::default();
        let own = self.own_ticket(&mut slot, &mut fencing);
        if pool == ORDINARY && self.is_captured(stream) {
            fencing.capturing.push(Used::ours(stream, slot));
        }
        for used in uses {
            self.fence(used, &mut fencing);
        }
        if let Err(error) = device.check() {
            log::debug!("a block stays: {error}");
        }
        self.put_aside(offset, own, slot, fencing)
    }

    /// The ticket of all work on a block's own stream.
    fn own_ticket(&self, slot: &mut StreamSlot, fencing: &mut Fencing) -> Ticket {
        let device = &self.pager.device;
        loop {
            let ticket = device.fences.stamp(*slot);
            match device.fences.confirm(*slot, ticket) {
                Ok(None) => return ticket,
                Ok(Some(other)) => *slot = other,
                Err(error) => {
                    let error = device.note(error);
                    log::warn!("a use is known to no fence: {error}");
                    fencing.tickets.push(device.fences.unrecorded_stamp());
                    return Ticket::NONE;
                }
            }
        }
    }

    /// Whether a stream is being captured, where one may be. What is known of it is up to date
    /// then.
    fn is_captured(&self, stream: Stream) -> bool {
        let device = &self.pager.device;
        let seen = device.enter_context().and_then(|_context| device.inspect(stream));
        seen.is_ok_and(|(capture, _)| capture != CaptureState::None)
    }

    /// Records a fence behind the uses of a stream, or notes that it is being captured.
    fn fence(&self, used: Used, fencing: &mut Fencing) {
        let device = &self.pager.device;
        let used = self.known_by_now(used);
        let stream = used.stream;
        let recorded = match used.of {
            Of::Unknown(_) => Ok(None),
            Of::Another(context) => match self.fence_elsewhere(stream, context) {
                Ok(ticket) => Ok(ticket),
                // No wait for our own context would tell that they are over: tried again later.
                Err(error) => {
                    log::debug!("a use elsewhere has no fence yet: {error}");
                    Ok(None)
                }
            },
            Of::Ours(_) if stream.is_none() => Ok(Some(device.fences.unrecorded_stamp())),
            Of::Ours(slot) => device.enter().and_then(|_scope| {
                if device.capture_state(stream)? != CaptureState::None {
                    return Ok(None);
                }
                device.retry(|| device.fences.record(stream, slot)).map(Some)
            }),
        };
        match recorded {
            Ok(Some(ticket)) => fencing.tickets.push(ticket),
            Ok(None) => fencing.capturing.push(used),
            Err(error) => {
                let error = device.note(error);
                log::warn!("a use is known to no fence: {error}");
                fencing.tickets.push(device.fences.unrecorded_stamp());
            }
        }
    }

    /// Lets a block wait for its fences, or caches it when there are none.
    fn put_aside(&self, offset: u64, own: Ticket, slot: StreamSlot, fencing: Fencing) -> Freed {
        let fences = &self.pager.device.fences;
        let mut core = self.core.lock();
        let Some(waiting) = core.pending.get_mut(offset) else { return Freed::Unknown };
        waiting.in_hand = false;
        waiting.own = own;
        waiting.tickets.extend(fencing.tickets);
        waiting.capturing = fencing.capturing;
        let done = waiting.is_recorded()
            && waiting.tickets.iter().all(|ticket| fences.known_passed(*ticket));
        let heap = waiting.heap;
        if core.heap(heap).slot != slot && core.heap(heap).slot.stream_id() == slot.stream_id() {
            // Not where it has moved on meanwhile, and the slot is the stream's no more.
            core.move_heap(heap, slot, fences);
        }
        if done && let Some(waiting) = core.pending.remove(offset) {
            core.put_back(offset, waiting, fences);
        }
        self.note_waiting(&core);
        if core.pending.contains(offset) { Freed::Deferred } else { Freed::Cached }
    }

    pub(super) fn note_waiting(&self, core: &super::heap::Core) {
        self.waiting.store(core.pending.count(), Release);
    }

    /// Caches the pending blocks whose fences have passed.
    pub(super) fn poll_pending(&self) {
        if self.waiting.load(Relaxed) == 0 {
            return;
        }
        if !self.open.any() {
            self.end_captured();
        }
        let device = &self.pager.device;
        let Ok(_scope) = device.enter() else { return };
        let spans = self.core.lock().pending.spans();
        for span in spans {
            // One question tells what has passed of a stream's.
            if let Err(error) = device.fences.cover(span.oldest) {
                let error = device.note(error);
                log::debug!("asking a stream's events: {error}");
            }
        }
        let mut core = self.core.lock();
        let ready = core.pending.take_ready(|ticket| device.fences.known_passed(ticket));
        for (offset, waiting) in ready {
            core.put_back(offset, waiting, &device.fences);
        }
        self.note_waiting(&core);
    }

    /// Records fences for blocks that were used on streams which are being captured no more.
    pub(super) fn end_captured(&self) {
        let captured = self.core.lock().pending.captured();
        for offset in captured {
            let taken = {
                let mut core = self.core.lock();
                let Some(waiting) = core.pending.get_mut(offset) else { continue };
                if waiting.in_hand {
                    continue;
                }
                waiting.in_hand = true;
                let (own, heap) = (waiting.own, waiting.heap);
                let streams = std::mem::take(&mut waiting.capturing);
                (streams, own, core.heap(heap).slot)
            };
            let (streams, own, slot) = taken;
            let mut fencing = Fencing::default();
            for used in streams {
                self.fence(used, &mut fencing);
            }
            self.put_aside(offset, own, slot, fencing);
        }
    }
}

impl super::heap::Core {
    /// The heap of the live block that starts at an offset.
    fn live_heap(&self, offset: u64) -> Option<u32> {
        if self.pending.contains(offset) {
            return None;
        }
        if let Some(at) = self.slab_at(offset) {
            let slab = self.slabs[at as usize].as_ref()?;
            return slab.requested(offset).map(|_| slab.heap);
        }
        let live = self.live.get(&offset)?;
        (live.sort != Sort::Segment).then_some(live.heap)
    }
}
