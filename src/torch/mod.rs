//! PyTorch's allocator: stream-ordered blocks on the pager's frames.
//!
//! One [`Allocator`] a device. Weights and what PyTorch allocates share the frames and the budget:
//! the allocator owns an *arena*, a very large reservation whose pages get their frames by faults
//! of the pager and are pinned while they hold live or cached blocks. What is cached goes back when
//! weights need it ([`Reclaim`]), except for what the step under
//! way will want again.
//!
//! The quick way is here: a stream's id, one lock held for nanoseconds, a bitmap or a list, no
//! driver call but the one that tells streams apart. Whatever needs more is in `serve` (a request)
//! and `free` (a free). No lock is held across a driver call, a fault or a wait.
//!
//! ```text
//! mod serve free reclaim pools segment report     calls: locks, fences, faults, waits
//! moves                                           frames that move rather than memory that grows
//! graphs                                          scopes whose requests repeat
//! elsewhere                                       streams of other contexts
//! record                                          what was asked for, to a file
//! direct                                          the same without an arena
//! heap small give grow sweep pending pages graph  under the lock: blocks, pages
//! extents sizes slabs reserve events              pure: pieces, slots, a peak, a tree
//! oom statistics                                  values
//! ```
//!
//! A stream may use again at once what it has freed; another stream when the work before the free
//! is known to be over. That is known from records of events: a free stamps its block and makes no
//! driver call, and a later request on the same stream records, at most once in 50 us.

mod direct;
mod elsewhere;
mod events;
mod extents;
mod free;
mod give;
mod graph;
mod graphs;
mod grow;
mod heap;
mod moves;
mod oom;
mod pages;
mod pending;
mod pools;
mod reclaim;
mod record;
mod report;
mod reserve;
mod segment;
mod serve;
mod sizes;
mod slabs;
mod small;
mod statistics;
mod sweep;

use std::sync::Arc;

use crate::driver::{CaptureState, DeviceAttribute};
use crate::error::{Error, ErrorCode, Result};
use crate::memory::pager::{Pager, Reclaim};
use crate::memory::vbar::Bar;
use crate::process;
use crate::sync::fence::StreamSlot;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Mutex, Relaxed, Release};
use crate::units::{Stream, TIB};

pub use graph::Pass;
pub use graphs::MemoryGraph;
pub use oom::{OutOfMemory, Size};
pub use statistics::{
    AllocatorStatistics, Block, BlockState, GraphStatistics, Kind, PoolId, PoolStat, Segment, Stat,
};

use direct::Direct;
use give::Given;
use graphs::Graphs;
use heap::{Core, ORDINARY};
use pools::OpenPools;
use record::Recorder;
use reserve::Reserve;

/// Says which streams allocate from a graph pool while it is open. Called with no lock held.
pub type PoolFilter = Box<dyn Fn(Stream) -> bool + Send + Sync>;

/// What a free came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Freed {
    /// The address was 0: nothing to do.
    Nothing,
    /// The block is cached.
    Cached,
    /// The block is cached when the streams that it was recorded for are done, or a capture is.
    Deferred,
    /// No live block starts at the address: counted, and nothing else.
    Unknown,
    /// The process is ending or has forked, or the device is closed: nothing was done.
    Ending,
}

/// Smallest reservation that is asked for first.
const ARENA_MIN: u64 = TIB;
/// The reservation is this many times the device, if that is more: fresh addresses over free frames
/// are what keeps fragments from stranding memory.
const ARENA_DEVICES: u64 = 8;

/// Whether the device maps memory at all.
fn has_mappings(pager: &Pager) -> bool {
    let attribute = DeviceAttribute::VirtualMemoryManagementSupported;
    let device = &pager.device;
    device.driver.device_get_attribute(device.ordinal, attribute).is_ok_and(|has| has != 0)
}

/// See the module's text.
pub struct Allocator {
    pager: Arc<Pager>,
    arena: Arc<Bar>,
    base: u64,
    capacity_bytes: u64,
    core: Mutex<Core>,
    /// Without virtual memory management: then the arena is a stand-in, and nothing is in `core`
    /// but counts and pools.
    direct: Option<Direct>,
    /// The default stream's id, 0 before it is known.
    legacy: AtomicU64,
    /// Blocks that were freed and wait.
    waiting: AtomicU32,
    open: OpenPools,
    graphs: Graphs,
    /// Waits for streams of other contexts, once there was one.
    elsewhere: Mutex<Option<Stream>>,
    /// Pages that the allocator may hold.
    page_limit: AtomicU64,
    /// Bits of the fraction that it follows from.
    fraction: AtomicU64,
    closed: AtomicBool,
    recorder: Recorder,
}

impl Allocator {
    /// An allocator with nothing mapped, over its own reservation.
    ///
    /// # Errors
    /// `NoAddresses` where the driver has none, `DeviceLost`, `ProcessEnding`, and what the driver
    /// says.
    pub fn new(pager: Arc<Pager>) -> Result<Arc<Self>> {
        let device = &pager.device;
        let capacity_bytes = device.driver.device_total_mem(device.ordinal);
        let capacity_bytes = capacity_bytes.map_err(|error| device.note(error.into()))?;
        let wanted = capacity_bytes.saturating_mul(ARENA_DEVICES).max(ARENA_MIN);
        let (arena, direct) = match pager.create_arena(wanted)? {
            Some(arena) => (arena, None),
            None if has_mappings(&pager) => {
                let text = format!("no addresses for what PyTorch allocates ({wanted} bytes)");
                return Err(Error::new(ErrorCode::NoAddresses, text));
            }
            None => (pager.create_bar(wanted, false)?, Some(Direct::default())),
        };
        let page_bytes = arena.page_size.bytes();
        let reserve = Reserve::new(Arc::clone(&pager.device.counters.weights_mapped));
        let allocator = Arc::new(Self {
            base: if direct.is_some() { 0 } else { arena.space.base.0 },
            core: Mutex::new(Core::new(page_bytes, arena.table.page_count(), reserve)),
            direct,
            pager,
            arena,
            capacity_bytes,
            legacy: AtomicU64::new(0),
            waiting: AtomicU32::new(0),
            open: OpenPools::default(),
            graphs: Graphs::default(),
            elsewhere: Mutex::new(None),
            page_limit: AtomicU64::new(u64::MAX),
            fraction: AtomicU64::new(1.0f64.to_bits()),
            closed: AtomicBool::new(false),
            recorder: Recorder::default(),
        });
        if allocator.direct.is_none() {
            let holder: Arc<dyn Reclaim> = Arc::clone(&allocator) as _;
            allocator.pager.set_allocator(&holder);
        }
        Ok(allocator)
    }

    /// The address of `bytes` new bytes for work on `stream`, a multiple of 512; 0 for no bytes.
    ///
    /// # Errors
    /// [`OutOfMemory`]; everything is as it was then.
    #[inline]
    pub fn malloc(&self, bytes: usize, stream: Stream) -> std::result::Result<u64, OutOfMemory> {
        if bytes == 0 {
            return Ok(0);
        }
        if self.graphs.any()
            && let Some(address) = self.malloc_in_graph(bytes as u64, stream)
        {
            return Ok(address);
        }
        match self.malloc_quickly(bytes as u64, stream) {
            Some(offset) => Ok(self.address_of(offset)),
            None => self.malloc_slowly(bytes as u64, stream),
        }
    }

    /// A block from what the stream's heap has, if nothing else has to be looked at.
    #[inline(always)]
    fn malloc_quickly(&self, requested: u64, stream: Stream) -> Option<u64> {
        let device = &self.pager.device;
        let is_plain = device.check().is_ok()
            && !self.closed.load(Relaxed)
            && !self.recorder.is_on()
            && requested <= self.arena.space.bytes
            && !self.open.any();
        if !is_plain {
            return None;
        }
        if self.waiting.load(Relaxed) > 0 {
            self.poll_pending();
        }
        let fences = &device.fences;
        let id = match stream {
            Stream::DEFAULT | Stream::LEGACY => self.legacy.load(Relaxed),
            Stream::PER_THREAD | Stream::NONE => return None,
            // A stream that is being captured must not be asked for its id.
            _ => match device.inspect(stream).ok()? {
                (CaptureState::None, slot) => slot?.stream_id(),
                _ => return None,
            },
        };
        let mut core = self.core.lock();
        let heap = core.known_heap(ORDINARY, id)?;
        let slot = core.heap(heap).slot;
        if !fences.is_still(slot) {
            return None;
        }
        let offset = core.take(heap, requested, fences)?;
        drop(core);
        if fences.is_cover_due(slot) {
            self.cover(stream, slot);
        }
        Some(offset)
    }

    /// Records a fence behind what was freed on a stream, unless it is being captured. Where that
    /// fails the uses stay uncovered until the next time.
    #[cold]
    fn cover(&self, stream: Stream, slot: StreamSlot) {
        let device = &self.pager.device;
        let record = || -> Result<()> {
            let _scope = device.enter()?;
            if device.capture_state(stream)? == CaptureState::None {
                device.retry(|| device.fences.record_in_passing(stream, slot))?;
            }
            Ok(())
        };
        if let Err(error) = record() {
            let error = device.note(error);
            log::debug!("no fence was recorded on {stream:?}: {error}");
        }
    }

    /// Gives a block back in stream order: work that was enqueued before on its own stream, and on
    /// those that it was recorded for, may still use it.
    #[inline]
    pub fn free(&self, address: u64) -> Freed {
        if address == 0 {
            return Freed::Nothing;
        }
        if process::ending() || self.closed.load(Relaxed) {
            return Freed::Ending;
        }
        if self.recorder.is_on() {
            self.recorder.free(address);
        }
        if let Some(direct) = &self.direct {
            return self.free_directly(direct, address);
        }
        let offset = address.wrapping_sub(self.base);
        if offset >= self.arena.space.bytes {
            return self.count_unknown(address);
        }
        let fences = &self.pager.device.fences;
        if self.open.any() || fences.is_capture_known() {
            return self.free_slowly(offset);
        }
        let given = self.core.lock().give(offset, fences);
        match given {
            Given::Cached => Freed::Cached,
            Given::Unknown => self.count_unknown(address),
            Given::NotYet => self.free_slowly(offset),
        }
    }

    #[cold]
    fn count_unknown(&self, address: u64) -> Freed {
        self.core.lock().statistics.unknown_free += 1;
        log::debug!("free of {address:#x}, where no live block starts");
        Freed::Unknown
    }

    /// Whether an address is of this device: one of its arena, or where there is none of a live
    /// block. No lock is held in an arena.
    #[inline]
    #[must_use]
    pub fn owns(&self, address: u64) -> bool {
        match &self.direct {
            Some(direct) => direct.block_at(address).is_some(),
            None => address.wrapping_sub(self.base) < self.arena.space.bytes,
        }
    }

    /// An address in the arena; `base` is 0 where each address is the driver's own.
    #[inline(always)]
    fn address_of(&self, offset: u64) -> u64 {
        self.base + offset
    }

    /// Nothing is served and nothing is done from now on: the device is about to be closed.
    pub(crate) fn close(&self) {
        self.closed.store(true, Release);
        // The driver is not to be called, nor a lock touched, at the exit and in a forked child.
        if !process::ending() {
            self.end_row();
        }
    }
}
