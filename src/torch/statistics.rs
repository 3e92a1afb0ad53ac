//! What the allocator counts: PyTorch's own numbers, and the layout of its memory.
//!
//! Values only. The names are the keys of `torch.cuda.memory_stats`, where each number has four
//! parts (`current`, `peak`, `allocated`, `freed`) for all requests, small ones and large ones.

use crate::units::Stream;

/// One number over time.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stat {
    /// Now.
    pub current: u64,
    /// The most since the start or the last [`reset_peaks`](super::Allocator::reset_peaks).
    pub peak: u64,
    /// All that was added since the start or the last
    /// [`reset_accumulated`](super::Allocator::reset_accumulated).
    pub allocated: u64,
    /// All that was taken off since then.
    pub freed: u64,
}

impl Stat {
    #[inline(always)]
    pub(super) fn add(&mut self, amount: u64) {
        self.current += amount;
        self.allocated += amount;
        self.peak = self.peak.max(self.current);
    }

    #[inline(always)]
    pub(super) fn sub(&mut self, amount: u64) {
        debug_assert!(self.current >= amount, "more is taken off than there is");
        self.current = self.current.saturating_sub(amount);
        self.freed += amount;
    }

    /// Follows a number that is only known at moments.
    pub(super) fn set(&mut self, now: u64) {
        match now.checked_sub(self.current) {
            Some(more) => self.add(more),
            None => self.sub(self.current - now),
        }
    }
}

/// Which requests a number is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Up to half a slab (1 MiB where pages are not smaller than 2 MiB).
    Small = 0,
    /// Larger ones.
    Large = 1,
}

/// A number of both kinds of requests and of each.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PoolStat {
    /// All.
    pub all: Stat,
    /// `small_pool`.
    pub small_pool: Stat,
    /// `large_pool`.
    pub large_pool: Stat,
}

impl PoolStat {
    #[inline(always)]
    pub(super) fn add(&mut self, kind: Kind, amount: u64) {
        self.all.add(amount);
        self.of(kind).add(amount);
    }

    #[inline(always)]
    pub(super) fn sub(&mut self, kind: Kind, amount: u64) {
        self.all.sub(amount);
        self.of(kind).sub(amount);
    }

    #[inline(always)]
    fn of(&mut self, kind: Kind) -> &mut Stat {
        match kind {
            Kind::Small => &mut self.small_pool,
            Kind::Large => &mut self.large_pool,
        }
    }

    pub(super) fn each(&mut self, change: impl Fn(&mut Stat)) {
        change(&mut self.all);
        change(&mut self.small_pool);
        change(&mut self.large_pool);
    }
}

/// Everything that is counted. Bytes unless a name ends in `count` or begins with `num_`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct AllocatorStatistics {
    /// `allocation`: live blocks.
    pub allocation: PoolStat,
    /// `segment`: runs of neighbouring pages that are mapped.
    pub segment: PoolStat,
    /// `active`: live blocks and those that were freed and wait for streams.
    pub active: PoolStat,
    /// `inactive_split`: free pieces of pages that are partly used.
    pub inactive_split: PoolStat,
    /// `allocated_bytes`: of live blocks, rounded up as they are.
    pub allocated_bytes: PoolStat,
    /// `reserved_bytes`: of mapped pages.
    pub reserved_bytes: PoolStat,
    /// `active_bytes`.
    pub active_bytes: PoolStat,
    /// `inactive_split_bytes`; between calls that map or give back it is not followed.
    pub inactive_split_bytes: PoolStat,
    /// `requested_bytes`: of live blocks, as asked for.
    pub requested_bytes: PoolStat,
    /// Requests that were searched for again after memory was given back.
    pub num_alloc_retries: u64,
    /// Requests that ended out of memory.
    pub num_ooms: u64,
    /// Times that all streams were waited for.
    pub num_sync_all_streams: u64,
    /// Pages mapped.
    pub num_device_alloc: u64,
    /// Pages given back.
    pub num_device_free: u64,
    /// Frees of an address that no live block starts at; `NULL` is none.
    pub unknown_free: u64,
    /// Bytes in blocks that were freed and wait for streams or for the end of a capture.
    pub pending_bytes: u64,
    /// Bytes of the pages of graph pools.
    pub pool_bytes: u64,
    /// Bytes of mapped pages that cached blocks may keep before weights are evicted.
    pub reserve_bytes: u64,
    /// Requests of at least one byte so far: that PyTorch really allocates here.
    pub malloc_count: u64,
    /// Frees that were served so far.
    pub free_count: u64,
}

/// What a memory graph has.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct GraphStatistics {
    /// Bytes of its live blocks, rounded up as they are.
    pub used_bytes: u64,
    /// The most that this was.
    pub peak_used_bytes: u64,
    /// Bytes of its pages: their addresses and their frames come and go together.
    pub pool_bytes: u64,
    /// Live blocks whose scope has ended.
    pub rogue_count: u64,
}

/// What a piece of a segment is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockState {
    /// `active_allocated`.
    Allocated,
    /// `active_awaiting_free`.
    AwaitingFree,
    /// `inactive`.
    Free,
}

/// A piece of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    /// Its first byte.
    pub address: u64,
    /// Its bytes, rounded up as they are.
    pub bytes: u64,
    /// As asked for; 0 of a free piece.
    pub requested_bytes: u64,
    /// What it is.
    pub state: BlockState,
}

/// Neighbouring pages that are mapped, of one kind and pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Its first byte.
    pub address: u64,
    /// Its bytes, whole pages.
    pub bytes: u64,
    /// Which requests it serves.
    pub kind: Kind,
    /// The stream that its first piece was used on last; `Stream::NONE` when none is known.
    pub stream: Stream,
    /// The graph pool; `None` for the ordinary one.
    pub pool: Option<PoolId>,
    /// Its pieces, in order of address; they cover it.
    pub blocks: Vec<Block>,
}

/// Names a graph pool, as PyTorch's `MempoolId_t`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PoolId(pub u64, pub u64);
