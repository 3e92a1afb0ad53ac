//! PyTorch's allocator: stream-ordered blocks on the pager's frames.
//!
//! One [`Allocator`] a device. Weights and what PyTorch allocates share the frames and the budget:
//! the allocator owns an *arena*, a very large reservation whose pages get their frames by faults
//! of the pager and are pinned while they hold live or cached blocks. What is cached goes back when
//! weights need it ([`Reclaim`](crate::memory::pager::Reclaim)).

mod oom;
mod statistics;

use std::sync::Arc;

use crate::error::Result;
use crate::memory::pager::Pager;
use crate::units::Stream;

pub use oom::{OutOfMemory, Size};
pub use statistics::{
    AllocatorStatistics, Block, BlockState, Kind, PoolId, PoolStat, Segment, Stat,
};

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

/// See the module's text.
pub struct Allocator {
    pager: Arc<Pager>,
}

impl Allocator {
    /// An allocator with nothing mapped, over its own reservation.
    ///
    /// # Errors
    /// `DeviceLost`, `ProcessEnding`, and what the driver says.
    pub fn new(pager: Arc<Pager>) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { pager }))
    }

    /// The address of `bytes` new bytes for work on `stream`, a multiple of 512; 0 for no bytes.
    ///
    /// # Errors
    /// [`OutOfMemory`]; everything is as it was then.
    pub fn malloc(&self, bytes: usize, stream: Stream) -> std::result::Result<u64, OutOfMemory> {
        let _ = stream;
        let device = self.pager.device.ordinal;
        let requested_bytes = bytes as u64;
        Err(OutOfMemory { requested_bytes, device, ..OutOfMemory::default() })
    }

    /// Gives a block back in stream order: work that was enqueued before on its own stream, and on
    /// those that it was recorded for, may still use it.
    pub fn free(&self, address: u64) -> Freed {
        let _ = address;
        Freed::Nothing
    }

    /// Notes that `stream` uses a block too: it is not reused before the work that is enqueued
    /// there when it is freed is done. The stream must live until then. An address of no live
    /// block is ignored.
    pub fn record_stream(&self, address: u64, stream: Stream) {
        let _ = (address, stream);
    }

    /// Gives all cached pages back to the driver, waiting for the work that used them.
    ///
    /// # Errors
    /// `DeviceLost`, `ProcessEnding`, `Cancelled`, and what the driver says.
    pub fn empty_cache(&self) -> Result<()> {
        Ok(())
    }

    /// From now on requests for streams that `filter` admits come from the pool `id`, made if it
    /// is new, whose memory is its own until it is released as often as it was begun.
    pub fn begin_pool(&self, id: PoolId, filter: PoolFilter) {
        let _ = (id, filter);
    }

    /// Requests come from the ordinary pool again.
    pub fn end_pool(&self, id: PoolId) {
        let _ = id;
    }

    /// Gives up one use of a pool; after the last one its memory is ordinary as its blocks die.
    pub fn release_pool(&self, id: PoolId) {
        let _ = id;
    }

    /// First address and bytes of the live block that an address lies in.
    #[must_use]
    pub fn base_of(&self, address: u64) -> Option<(u64, u64)> {
        let _ = address;
        None
    }

    /// Sets the part of the device's memory that the allocator may hold, 0 to 1.
    pub fn set_fraction(&self, fraction: f64) {
        let _ = fraction;
    }

    /// The part of the device's memory that the allocator may hold.
    #[must_use]
    pub fn fraction(&self) -> f64 {
        1.0
    }

    /// Everything that is counted.
    #[must_use]
    pub fn statistics(&self) -> AllocatorStatistics {
        AllocatorStatistics::default()
    }

    /// Every `peak` becomes what is `current`.
    pub fn reset_peaks(&self) {}

    /// Every `allocated` and `freed`, and the counts that only grow, become 0.
    pub fn reset_accumulated(&self) {}

    /// All mapped pages and their blocks, in order of address.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Segment> {
        Vec::new()
    }

    /// Memory for a caller that caches by itself (a `MemPool` of PyTorch's own allocator): `bytes`
    /// for work on `stream`, in pages of its own. `None` when it cannot be had; it does not count
    /// on the caller giving anything back.
    pub fn segment_malloc(&self, bytes: usize, stream: Stream) -> Option<u64> {
        let _ = (bytes, stream);
        None
    }

    /// Gives such memory back; its pages go when all work that was enqueued on the device before
    /// is done.
    pub fn segment_free(&self, address: u64) -> Freed {
        let _ = address;
        Freed::Nothing
    }
}
