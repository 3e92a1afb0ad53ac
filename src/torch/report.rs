//! What is told: counts, the layout of the memory, and the numbers of a request that failed.

use super::heap::{Core, LARGE, MID};
use super::pages::kind_of;
use super::statistics::{AllocatorStatistics, Block, BlockState, Kind, PoolStat, Segment};
use super::{Allocator, OutOfMemory};
use crate::error::{Error, ErrorCode};
use crate::process;
use crate::sync::Relaxed;
use crate::units::Stream;

impl Allocator {
    /// Everything that is counted.
    #[must_use]
    pub fn statistics(&self) -> AllocatorStatistics {
        if process::ending() {
            return AllocatorStatistics::default();
        }
        let (now, budget) = (self.pager.device.fences.now(), self.pager.budget_pages());
        let Some(mut core) = self.look() else { return AllocatorStatistics::default() };
        let (used, page_bytes) = (core.pages.used(), core.geometry.page_bytes);
        core.note_splits();
        let mapped = core.pages.mapped();
        let reserve = &mut core.pages.reserve;
        let spare = reserve.for_weights(now, (used, mapped), budget, None);
        core.statistics.reserve_bytes = (mapped - spare) * page_bytes;
        core.statistics.pool_bytes = core.private_pages() * page_bytes;
        core.statistics
    }

    /// Every `peak` becomes what is `current`.
    pub fn reset_peaks(&self) {
        let Some(mut core) = self.look() else { return };
        core.statistics.each(|stat| stat.peak = stat.current);
    }

    /// Every `allocated` and `freed`, and the counts that only grow, become 0.
    pub fn reset_accumulated(&self) {
        let Some(mut core) = self.look() else { return };
        let statistics = &mut core.statistics;
        statistics.each(|stat| (stat.allocated, stat.freed) = (0, 0));
        statistics.num_alloc_retries = 0;
        statistics.num_ooms = 0;
        statistics.num_sync_all_streams = 0;
        statistics.num_device_alloc = 0;
        statistics.num_device_free = 0;
    }

    /// First address and bytes of the live block that an address lies in.
    #[must_use]
    pub fn base_of(&self, address: u64) -> Option<(u64, u64)> {
        if let Some(direct) = &self.direct {
            return direct.block_at(address);
        }
        if !self.owns(address) {
            return None;
        }
        let offset = address - self.base;
        let core = self.look()?;
        let (start, bytes) = core.block_at(offset)?;
        Some((self.base + start, bytes))
    }

    /// All mapped pages and their blocks, in order of address.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Segment> {
        let Some(core) = self.look() else { return Vec::new() };
        if let Some(direct) = &self.direct {
            drop(core);
            return direct.segments();
        }
        let mut segments = core.segments();
        drop(core);
        for segment in &mut segments {
            segment.address += self.base;
            segment.blocks.iter_mut().for_each(|block| block.address += self.base);
        }
        segments
    }

    /// Sets the part of the device's memory that the allocator may hold, 0 to 1. What it holds
    /// beyond that goes as it is asked for more.
    pub fn set_fraction(&self, fraction: f64) {
        let fraction = if fraction.is_nan() { 1.0 } else { fraction.clamp(0.0, 1.0) };
        self.fraction.store(fraction.to_bits(), Relaxed);
        let bytes = (self.capacity_bytes as f64 * fraction) as u64;
        let pages = if fraction < 1.0 { bytes / self.arena.page_size.bytes() } else { u64::MAX };
        self.page_limit.store(pages, Relaxed);
    }

    /// The part of the device's memory that the allocator may hold.
    #[must_use]
    pub fn fraction(&self) -> f64 {
        f64::from_bits(self.fraction.load(Relaxed))
    }

    /// The state, to be looked at. `None` in a forked child and at exit.
    fn look(&self) -> Option<crate::sync::MutexGuard<'_, Core>> {
        (!process::ending()).then(|| self.core.lock())
    }

    /// What a request that failed comes to.
    #[cold]
    pub(super) fn out_of_memory(&self, requested: u64, cause: Option<Error>) -> OutOfMemory {
        let device = &self.pager.device;
        let (requested_bytes, ordinal) = (requested, device.ordinal);
        let none = OutOfMemory { requested_bytes, device: ordinal, ..OutOfMemory::default() };
        if cause.as_ref().is_some_and(|error| error.code() == ErrorCode::ProcessEnding) {
            return OutOfMemory { cause, ..none };
        }
        let free = device.enter().ok().and_then(|_scope| device.driver.mem_get_info().ok());
        let numbers = self.pager.numbers();
        let page_bytes = self.arena.page_size.bytes();
        let limit = self.page_limit.load(Relaxed);
        let limit_bytes = limit.checked_mul(page_bytes).filter(|it| *it < numbers.budget_bytes);
        let mut core = self.core.lock();
        core.statistics.num_ooms += u64::from(cause.is_none());
        let mapped = core.pages.mapped();
        OutOfMemory {
            capacity_bytes: self.capacity_bytes,
            free_bytes: free.map_or(0, |memory| memory.free_bytes),
            budget_bytes: numbers.budget_bytes,
            budget_source: numbers.budget_source,
            limit_bytes,
            weights_bytes: numbers.resident_pages.saturating_sub(mapped) * page_bytes,
            allocated_bytes: core.statistics.allocated_bytes.all.current,
            reserved_bytes: core.statistics.reserved_bytes.all.current,
            pool_bytes: core.private_pages() * page_bytes,
            pending_bytes: core.statistics.pending_bytes,
            cause,
            ..none
        }
    }
}

impl AllocatorStatistics {
    fn each(&mut self, change: impl Fn(&mut super::Stat)) {
        let stats: [&mut PoolStat; 9] = [
            &mut self.allocation,
            &mut self.segment,
            &mut self.active,
            &mut self.inactive_split,
            &mut self.allocated_bytes,
            &mut self.reserved_bytes,
            &mut self.active_bytes,
            &mut self.inactive_split_bytes,
            &mut self.requested_bytes,
        ];
        stats.into_iter().for_each(|stat| stat.each(&change));
    }
}

impl Core {
    /// Pages that graph pools keep.
    fn private_pages(&self) -> u64 {
        let pages = (0..self.pages.known()).map(|page| self.pages.page(page));
        let private = pages.filter(|page| {
            let pool = || self.pools[page.pool as usize].as_ref();
            kind_of(page.used_for).is_some() && pool().is_some_and(|pool| pool.id.is_some())
        });
        private.count() as u64
    }

    /// Follows the free pieces of pages that are partly used.
    fn note_splits(&mut self) {
        let (mut count, mut bytes) = ([0; 2], [0; 2]);
        for segment in self.segments() {
            for block in segment.blocks.iter().filter(|block| block.state == BlockState::Free) {
                let pages = self.pages.index_of(block.address)
                    ..=self.pages.index_of(block.address + block.bytes - 1);
                let within = |page: u32| {
                    let range = self.pages.range_of(page);
                    let end = (block.address + block.bytes).min(range.end);
                    end - block.address.max(range.start)
                };
                let split = pages.filter(|page| self.pages.page(*page).live > 0).map(within);
                let split: u64 = split.sum();
                count[segment.kind as usize] += u64::from(split > 0);
                bytes[segment.kind as usize] += split;
            }
        }
        let note = |stat: &mut PoolStat, now: [u64; 2]| {
            stat.all.set(now[0] + now[1]);
            stat.small_pool.set(now[0]);
            stat.large_pool.set(now[1]);
        };
        note(&mut self.statistics.inactive_split, count);
        note(&mut self.statistics.inactive_split_bytes, bytes);
    }

    /// Start and bytes of the live block that an offset lies in.
    fn block_at(&self, offset: u64) -> Option<(u64, u64)> {
        if let Some(at) = self.slab_at(offset) {
            let slab = self.slabs[at as usize].as_ref()?;
            return Some((slab.slot_start(offset)?, slab.slot_bytes()));
        }
        let found = self.live.get(&offset).map(|live| (offset, live.bytes));
        found.or_else(|| {
            let mut live = self.live.iter().map(|(start, live)| (*start, live.bytes));
            live.find(|(start, bytes)| (*start..*start + *bytes).contains(&offset))
        })
    }

    /// Every piece of memory there is, in order of address.
    fn pieces(&self) -> Vec<Block> {
        let block = |address, bytes, requested_bytes, state| Block {
            address,
            bytes,
            requested_bytes,
            state,
        };
        let mut all = Vec::new();
        for (start, live) in &self.live {
            all.push(block(*start, live.bytes, live.requested, BlockState::Allocated));
        }
        for slab in self.slabs.iter().flatten() {
            let live = slab.live().filter(|start| !self.pending.contains(*start));
            all.extend(live.map(|start| {
                let requested = slab.requested(start).unwrap_or(0);
                block(start, slab.slot_bytes(), requested, BlockState::Allocated)
            }));
        }
        for (start, waiting) in self.pending.iter() {
            all.push(block(start, waiting.bytes, waiting.requested, BlockState::AwaitingFree));
        }
        all.sort_unstable_by_key(|block| block.address);
        all
    }

    /// Runs of pages of a kind and pool, each piece of them live, pending or free.
    fn segments(&self) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        let mut last_pool = 0;
        for page in 0..self.pages.known() {
            let entry = self.pages.page(page);
            let Some(kind) = kind_of(entry.used_for) else { continue };
            let pool = self.pools[entry.pool as usize].as_ref().and_then(|pool| pool.id);
            let (address, bytes) = (self.pages.start_of(page), self.geometry.page_bytes);
            match segments.last_mut() {
                Some(last)
                    if last.address + last.bytes == address
                        && (last.kind, last_pool) == (kind, entry.pool) =>
                {
                    last.bytes += bytes;
                }
                _ => segments.push(Segment {
                    address,
                    bytes,
                    kind,
                    stream: self.stream_at(entry.pool, address, kind),
                    pool,
                    blocks: Vec::new(),
                }),
            }
            last_pool = entry.pool;
        }
        let mut pieces = self.pieces().into_iter().peekable();
        for segment in &mut segments {
            let (mut at, end) = (segment.address, segment.address + segment.bytes);
            while at < end {
                let next = pieces.peek().map_or(end, |piece| piece.address.min(end));
                if at < next {
                    let (bytes, state) = (next - at, BlockState::Free);
                    let free = Block { address: at, bytes, requested_bytes: 0, state };
                    segment.blocks.push(free);
                    at = next;
                } else if let Some(piece) = pieces.next() {
                    at = piece.address + piece.bytes;
                    segment.blocks.push(piece);
                }
            }
        }
        segments
    }

    /// The stream whose heap has what lies at an address.
    fn stream_at(&self, pool: u32, address: u64, kind: Kind) -> Stream {
        if let Some(at) = self.slab_at(address) {
            let slab = self.slabs[at as usize].as_ref();
            return slab.map_or(Stream::NONE, |slab| self.heap(slab.heap).stream);
        }
        if let Some(live) = self.live.get(&address) {
            return self.heap(live.heap).stream;
        }
        let place = if kind == Kind::Small { MID } else { LARGE };
        let heaps = self.pools[pool as usize].iter().flat_map(|pool| &pool.heaps);
        let mut heaps = heaps.map(|(_, heap)| self.heap(*heap));
        let found = heaps.find(|heap| heap.free[place].piece_at(address).is_some());
        found.map_or(Stream::NONE, |heap| heap.stream)
    }
}
