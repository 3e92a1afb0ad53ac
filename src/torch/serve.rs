//! A request that no free piece of its stream's heap serves at once.
//!
//! In this order, until one helps: what other streams have freed and are done with; fresh pages, by
//! a fault of the pager, which evicts weights by rank; cached pages of any stream, whose frames
//! come back as fresh ones; a wait for what was freed and is in use; a wait for the device. After
//! each the heap is searched again. Only then the request is out of memory.

use super::graph::Yields;
use super::grow::Growth;
use super::heap::{Core, Sort};
use super::sweep::Which;
use super::{Allocator, OutOfMemory, PoolId};
use crate::driver::CaptureState;
use crate::error::{Error, ErrorCode, Result};
use crate::memory::page_table::PageState;
use crate::memory::pager::{Faulted, GiveTo, Request};
use crate::outcome::{Reason, WaitKind};
use crate::sync::Relaxed;
use crate::sync::fence::StreamSlot;
use crate::sync::ticket::Ticket;
use crate::sync::wait::Wait;
use crate::units::{Generation, PageIndex, Stream};

/// What a request asks for.
#[derive(Clone, Copy)]
pub(super) struct Ask {
    pub(super) requested: u64,
    pub(super) stream: Stream,
    pub(super) slot: StreamSlot,
    pub(super) capture: CaptureState,
    /// The pool, by its place and its id: it may be released while it is asked for.
    pub(super) pool: (u32, Option<PoolId>),
    /// A segment for a caller that caches by itself, or a region of a memory graph.
    pub(super) sort: Sort,
}

/// What was done already for a request that does not fit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Tried {
    Nothing,
    Caches,
    Fences,
    Device,
}

/// What a try came to.
enum Tries {
    Served(u64),
    Short(Option<Reason>),
}

impl Allocator {
    #[cold]
    pub(super) fn malloc_slowly(
        &self,
        requested: u64,
        stream: Stream,
    ) -> std::result::Result<u64, OutOfMemory> {
        let address = self.malloc_unrecorded(requested, stream)?;
        if self.recorder.is_on() {
            self.recorder.malloc(address, requested, stream);
        }
        Ok(address)
    }

    /// The same for callers whose requests are in no record.
    pub(super) fn malloc_unrecorded(
        &self,
        requested: u64,
        stream: Stream,
    ) -> std::result::Result<u64, OutOfMemory> {
        let served = self.ask(requested, stream, Sort::Large).and_then(|ask| match ask {
            Some(ask) => match &self.direct {
                Some(direct) => self.serve_directly(direct, &ask),
                None => self.serve(&ask),
            },
            None => Ok(None),
        });
        match served {
            Ok(Some(offset)) => Ok(self.address_of(offset)),
            Ok(None) => Err(self.out_of_memory(requested, None)),
            Err(error) => Err(self.out_of_memory(requested, Some(error))),
        }
    }

    /// Looks at the stream. `None` for more bytes than there are addresses.
    pub(super) fn ask(&self, requested: u64, stream: Stream, sort: Sort) -> Result<Option<Ask>> {
        let device = &self.pager.device;
        device.check()?;
        if self.closed.load(Relaxed) {
            return Err(Error::new(ErrorCode::Closed, "the device was closed"));
        }
        if requested > self.arena.space.bytes / 2 {
            return Ok(None);
        }
        let _context = device.enter_context()?;
        let (capture, slot) = device.inspect(stream)?;
        let Some(slot) = slot else {
            let text = "a block belongs to a stream, and none was named";
            return Err(Error::new(ErrorCode::InvalidArgument, text));
        };
        if matches!(stream, Stream::DEFAULT | Stream::LEGACY) {
            self.legacy.store(slot.stream_id(), Relaxed);
        }
        let pool = self.route(stream);
        Ok(Some(Ask { requested, stream, slot, capture, pool, sort }))
    }

    /// The offset of a block; `None` when memory is short.
    pub(super) fn serve(&self, ask: &Ask) -> Result<Option<u64>> {
        let device = &self.pager.device;
        let _scope = device.enter()?;
        let mut ask = *ask;
        // What is another stream's meanwhile would be taken for this one's.
        let mut held = device.fences.hold(ask.slot)?;
        ask.slot = held.slot();
        self.poll_pending();
        if let Some(offset) = self.search(&ask) {
            if ask.capture == CaptureState::None && device.fences.is_cover_due(ask.slot) {
                self.cover(ask.stream, ask.slot);
            }
            return Ok(Some(offset));
        }
        let mut tried = Tried::Nothing;
        let mut wait = None;
        loop {
            match self.try_to_serve(&ask)? {
                Tries::Served(offset) => return Ok(Some(offset)),
                // Victims of a request that can wait for no stream: they are free in a moment.
                Tries::Short(Some(Reason::FencePending)) if self.pause(&mut wait)? => {}
                // More than may be held at all: nothing that is given back would help.
                Tries::Short(Some(Reason::TooLarge)) => return Ok(None),
                Tries::Short(_) if tried == Tried::Device => return Ok(None),
                Tries::Short(_) => {
                    tried = self.make_room(&ask, tried)?;
                    self.core.lock().statistics.num_alloc_retries += 1;
                }
            }
            // While something was waited for the stream may have been retired.
            held = device.fences.hold(ask.slot)?;
            ask.slot = held.slot();
        }
    }

    /// The heap that a request is for.
    fn heap_for(&self, core: &mut Core, ask: &Ask) -> u32 {
        let pool = core.standing_pool(ask.pool);
        core.heap_of(pool, ask.slot, ask.stream, &self.pager.device.fences)
    }

    /// Takes what is there for the stream, as the quick way does.
    fn search(&self, ask: &Ask) -> Option<u64> {
        let mut core = self.core.lock();
        let heap = self.heap_for(&mut core, ask);
        self.take(&mut core, heap, ask)
    }

    fn take(&self, core: &mut Core, heap: u32, ask: &Ask) -> Option<u64> {
        match ask.sort {
            Sort::Segment | Sort::Region => core.take_whole(heap, ask.requested, ask.sort),
            _ => core.take(heap, ask.requested, &self.pager.device.fences),
        }
    }

    /// Searches what is anybody's, then for a place with fresh pages.
    fn try_to_serve(&self, ask: &Ask) -> Result<Tries> {
        self.poll_others(ask);
        let claimed = {
            let mut core = self.core.lock();
            let heap = self.heap_for(&mut core, ask);
            core.settle(heap, &self.pager.device.fences);
            if let Some(offset) = self.take(&mut core, heap, ask) {
                return Ok(Tries::Served(offset));
            }
            let (bytes, purpose) = core.needs(ask.requested, ask.sort);
            let is_absent =
                |page| self.arena.table.word(PageIndex(page)).state == PageState::Absent;
            core.claim(heap, bytes, purpose, &is_absent)
        };
        let Some(growth) = claimed else { return Ok(Tries::Short(None)) };
        if !self.is_allowed() {
            self.core.lock().cancel(&growth);
            return Ok(Tries::Short(None));
        }
        self.move_frames(ask, &growth);
        self.fill(ask, growth)
    }

    /// Whether the pages that are mapped, or about to be, are within the limit.
    fn is_allowed(&self) -> bool {
        let limit = self.page_limit.load(Relaxed);
        let over = self.core.lock().pages.mapped().saturating_sub(limit);
        // What is cached elsewhere counts first.
        over == 0 || self.release_empty(over, Which::Any, GiveTo::Pages) >= over
    }

    /// Gets the frames of a place. What was claimed is live then, or as it was.
    fn fill(&self, ask: &Ask, growth: Growth) -> Result<Tries> {
        let fresh = growth.fresh.iter().cloned();
        let requests: Vec<_> = fresh.map(|pages| Request { bar: &self.arena, pages }).collect();
        // On a stream that is being captured nothing may be waited for: only frames that nobody
        // uses will do, which is what no stream means.
        let stream = match ask.capture {
            CaptureState::None => ask.stream,
            _ => Stream::NONE,
        };
        let holds = match self.pager.fault_many(&requests, stream) {
            Ok(Faulted::Resident(holds)) => holds,
            Ok(Faulted::HostMapped(_)) => unreachable!("an arena is not bound"),
            Ok(Faulted::Offloaded(refusal)) => {
                self.core.lock().cancel(&growth);
                return Ok(Tries::Short(Some(refusal.reason)));
            }
            Err(error) => {
                self.core.lock().cancel(&growth);
                return match error.code() {
                    // For want of frames that would come.
                    ErrorCode::TimedOut => Ok(Tries::Short(None)),
                    _ => Err(error),
                };
            }
        };
        let generations: Vec<Generation> =
            holds.iter().flat_map(|hold| hold.generations.as_slice().iter().copied()).collect();
        let fences = &self.pager.device.fences;
        // As above.
        let moved = fences.moved(ask.slot).unwrap_or_else(|error| {
            log::debug!("whether a stream has its slot still: {error}");
            None
        });
        let ready = self.ready_of(moved.unwrap_or(ask.slot), &growth);
        let mut core = self.core.lock();
        if let Some(slot) = moved.filter(|slot| *slot != core.heap(growth.heap).slot) {
            core.move_heap(growth.heap, slot, fences);
        }
        if let Some(offset) = core.finish(&growth, &generations, ready) {
            return Ok(Tries::Served(offset));
        }
        let taken = core.take(growth.heap, ask.requested, fences);
        taken.map_or(Ok(Tries::Short(None)), |offset| Ok(Tries::Served(offset)))
    }

    /// After which the fresh pages may be used by another stream than the one that asked.
    fn ready_of(&self, slot: StreamSlot, growth: &Growth) -> Ticket {
        let fences = &self.pager.device.fences;
        let mut pages = growth.fresh.iter().cloned().flatten();
        let is_ready = |page| fences.known_passed(self.arena.table.page(PageIndex(page)).ready());
        match pages.all(is_ready) {
            true => Ticket::NONE,
            // Recorded on this stream already, so what comes after is later.
            false => fences.stamp_anyhow(slot),
        }
    }

    /// Makes room for a request that does not fit by the next thing that was not tried.
    fn make_room(&self, ask: &Ask, tried: Tried) -> Result<Tried> {
        let device = &self.pager.device;
        if tried < Tried::Caches {
            self.yield_graphs(Yields::Closed);
            self.release_empty(u64::MAX, Which::Recorded, GiveTo::Pages);
            return Ok(Tried::Caches);
        }
        if tried < Tried::Fences {
            let tickets = self.awaited(ask);
            if !tickets.is_empty() {
                self.core.lock().statistics.num_sync_all_streams += 1;
            }
            match device.wait_passed(&tickets, WaitKind::Frame) {
                Err(error) if error.code() != ErrorCode::TimedOut => return Err(error),
                _ => {}
            }
            self.poll_pending();
            self.release_empty(u64::MAX, Which::Recorded, GiveTo::Pages);
            return Ok(Tried::Fences);
        }
        // What a pass that is under way has no use for now, rather than a request that fails.
        self.yield_graphs(Yields::All);
        // Whatever the options say of such waits: the request fails without, and what PyTorch
        // captures is known by its pools.
        if ask.capture == CaptureState::None && !self.open.any() {
            self.core.lock().statistics.num_sync_all_streams += 1;
            match device.context_wait_asked() {
                Err(error) if !is_unhelpful(&error) => return Err(error),
                _ => {}
            }
            self.poll_pending();
            self.release_empty(u64::MAX, Which::Any, GiveTo::Pages);
        }
        Ok(Tried::Device)
    }

    /// What can be waited for by its records.
    fn awaited(&self, ask: &Ask) -> Vec<Ticket> {
        let fences = &self.pager.device.fences;
        let core = self.core.lock();
        let mut spans = core.pending.spans();
        for pool in 0..core.pools.len() as u32 {
            let own = core.pools[pool as usize].as_ref().and_then(|pool| {
                let same = |(id, _): &&(u64, u32)| *id == ask.slot.stream_id();
                pool.heaps.iter().find(same).map(|(_, heap)| *heap)
            });
            if core.pools[pool as usize].is_some() {
                let others = core.unsettled(pool, own.unwrap_or(u32::MAX), fences);
                spans.extend(others);
            }
        }
        let newest = spans.into_iter().map(|span| span.newest);
        newest.filter(|ticket| fences.is_recorded(*ticket)).collect()
    }

    /// Asks what other streams of the pool are done with.
    fn poll_others(&self, ask: &Ask) {
        let device = &self.pager.device;
        let spans = {
            let mut core = self.core.lock();
            let own = self.heap_for(&mut core, ask);
            core.unsettled(core.heap(own).pool, own, &device.fences)
        };
        for span in spans {
            if let Err(error) = device.fences.cover(span.oldest) {
                let error = device.note(error);
                log::debug!("asking a stream's events: {error}");
            }
        }
    }

    /// Lets a moment pass; false when the time is over.
    fn pause<'a>(&'a self, wait: &mut Option<Wait<'a>>) -> Result<bool> {
        let wait = wait.get_or_insert_with(|| self.pager.device.wait(WaitKind::Frame));
        match wait.pause() {
            Ok(()) => Ok(true),
            Err(error) if error.code() == ErrorCode::TimedOut => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Whether a wait for the device could not be done, or not in time: the request fails by itself.
fn is_unhelpful(error: &Error) -> bool {
    matches!(error.code(), ErrorCode::Unsupported | ErrorCode::TimedOut)
}
