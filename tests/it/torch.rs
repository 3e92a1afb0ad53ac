//! PyTorch's allocator by itself: addresses, sizes, reuse on one stream, counts, giving back.

use std::collections::BTreeMap;
use std::sync::Arc;

use vbar::driver::Driver;
use vbar::torch::{Allocator, BlockState, Freed, Kind, OutOfMemory, PoolStat};
use vbar::units::{DeviceAddress, Stream};
use vbar::{Reason, Runtime};

use crate::world::{DEVICE, P, World, pattern_sum};

/// A small random number generator: the same numbers in every run of a seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// A world with PyTorch's allocator, and a word where checksums add up.
pub(crate) struct Torch {
    pub(crate) world: World,
    pub(crate) allocator: Arc<Allocator>,
    pub(crate) target: DeviceAddress,
}

impl Torch {
    pub(crate) fn of(world: World) -> Self {
        let allocator = world.runtime.torch_allocator().unwrap();
        let target = world.scratch();
        Self { world, allocator, target }
    }

    /// A budget of `pages` pages on a device with memory to spare.
    pub(crate) fn budget(pages: u64) -> Self {
        Self::of(World::budget(pages))
    }

    #[track_caller]
    pub(crate) fn malloc(&self, bytes: u64) -> u64 {
        self.malloc_on(bytes, self.world.stream)
    }

    #[track_caller]
    pub(crate) fn malloc_on(&self, bytes: u64, stream: Stream) -> u64 {
        let address = self.allocator.malloc(bytes as usize, stream).unwrap();
        assert_ne!(address, 0);
        assert!(address.is_multiple_of(512), "{address:#x}");
        address
    }

    /// The largest tensor of up to `most` pages, as a program finds out: by trying, and some of
    /// what it tries cannot be had.
    pub(crate) fn largest(&self, most: u64) -> u64 {
        let (mut low, mut high) = (0, most);
        while low < high {
            let middle = (low + high).div_ceil(2);
            match self.allocator.malloc((middle * P) as usize, self.world.stream) {
                Ok(block) => {
                    self.allocator.free(block);
                    low = middle;
                }
                Err(_) => high = middle - 1,
            }
        }
        low
    }

    /// Enqueues the pattern of `seed` over a block.
    pub(crate) fn write(&self, address: u64, bytes: u64, seed: u64, stream: Stream) {
        self.world.write(DeviceAddress(address), bytes, seed, stream);
    }

    /// Enqueues the checksum of a block, added to the word.
    pub(crate) fn sum(&self, address: u64, bytes: u64, stream: Stream) {
        let delay = std::time::Duration::ZERO;
        self.world.sum(DeviceAddress(address), bytes, self.target, delay, stream);
    }

    /// Lets a stream that was held go on, and waits for it.
    pub(crate) fn finish(&self, stream: Stream) {
        self.world.sim.release_stream(stream).unwrap();
        self.world.sim.stream_synchronize(stream).unwrap();
    }

    /// Pages that the allocator holds.
    pub(crate) fn reserved(&self) -> u64 {
        self.allocator.statistics().reserved_bytes.all.current / P
    }

    /// Books, pages and the device agree.
    #[track_caller]
    pub(crate) fn check(&self) {
        self.world.check();
        check_books(&self.allocator);
    }

    /// Nothing is left when everything is closed.
    #[track_caller]
    pub(crate) fn check_shut(self) {
        let Self { world, allocator, .. } = self;
        drop(allocator);
        world.check_shut();
    }
}

/// Enters a block among the live ones, of which it overlaps none.
#[track_caller]
pub(crate) fn enter_apart(live: &mut BTreeMap<u64, u64>, address: u64, bytes: u64) {
    let before = live.range(..=address).next_back();
    assert!(before.is_none_or(|(start, bytes)| start + bytes <= address));
    let after = live.range(address..).next();
    assert!(after.is_none_or(|(start, _)| address + bytes <= *start));
    live.insert(address, bytes);
}

/// The counts are those of the snapshot.
#[track_caller]
pub(crate) fn check_books(allocator: &Allocator) {
    let statistics = allocator.statistics();
    let segments = allocator.snapshot();
    let bytes = |state: BlockState| -> u64 {
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        blocks.filter(|block| block.state == state).map(|block| block.bytes).sum()
    };
    let reserved: u64 = segments.iter().map(|segment| segment.bytes).sum();
    assert_eq!(statistics.reserved_bytes.all.current, reserved);
    assert_eq!(statistics.segment.all.current, segments.len() as u64);
    assert_eq!(statistics.allocated_bytes.all.current, bytes(BlockState::Allocated));
    assert_eq!(statistics.pending_bytes, bytes(BlockState::AwaitingFree));
    let active = bytes(BlockState::Allocated) + bytes(BlockState::AwaitingFree);
    assert_eq!(statistics.active_bytes.all.current, active);
    for kind in [Kind::Small, Kind::Large] {
        let of_kind = || segments.iter().filter(|segment| segment.kind == kind);
        let blocks = || of_kind().flat_map(|segment| &segment.blocks);
        let live = || blocks().filter(|block| block.state == BlockState::Allocated);
        let active = || blocks().filter(|block| block.state != BlockState::Free);
        let counted = |stat: &PoolStat| match kind {
            Kind::Small => stat.small_pool.current,
            Kind::Large => stat.large_pool.current,
        };
        for (stat, recount, what) in [
            (&statistics.segment, of_kind().count() as u64, "segments"),
            (&statistics.reserved_bytes, of_kind().map(|it| it.bytes).sum(), "reserved"),
            (&statistics.allocation, live().count() as u64, "allocations"),
            (&statistics.allocated_bytes, live().map(|it| it.bytes).sum(), "allocated"),
            (&statistics.requested_bytes, live().map(|it| it.requested_bytes).sum(), "requested"),
            (&statistics.active, active().count() as u64, "active"),
            (&statistics.active_bytes, active().map(|it| it.bytes).sum(), "active bytes"),
        ] {
            assert_eq!(counted(stat), recount, "{what} of {kind:?}");
            let parts = stat.small_pool.current + stat.large_pool.current;
            assert_eq!(stat.all.current, parts, "{what} of both");
        }
    }
    for segment in &segments {
        let mut end = segment.address;
        for block in &segment.blocks {
            assert_eq!(block.address, end, "blocks cover their segment");
            end += block.bytes;
        }
        assert_eq!(end, segment.address + segment.bytes);
    }
}

#[test]
fn what_is_freed_is_used_again_at_once_on_its_stream() {
    let torch = Torch::budget(16);
    for bytes in [1, 512, 513, 5000, 32 << 10, 40 << 10, P, 3 * P + 17] {
        let one = torch.malloc(bytes);
        torch.write(one, bytes / 8 * 8, 1, torch.world.stream);
        assert_eq!(torch.allocator.free(one), Freed::Cached);
        assert_eq!(torch.malloc(bytes), one, "{bytes} bytes");
        torch.write(one, bytes / 8 * 8, 2, torch.world.stream);
        assert_eq!(torch.allocator.free(one), Freed::Cached);
    }
    torch.check();
    torch.check_shut();
}

/// Scenarios 22 and 28: NULL, no bytes, addresses of nobody, and a free too many.
#[test]
fn scenario_22_a_free_of_an_unknown_pointer_is_counted_and_returns() {
    let torch = Torch::budget(16);
    assert_eq!(torch.allocator.malloc(0, torch.world.stream).unwrap(), 0);
    assert_eq!(torch.allocator.free(0), Freed::Nothing);
    let (small, mid, large) = (torch.malloc(700), torch.malloc(40 << 10), torch.malloc(2 * P));
    let used = torch.world.used();
    let mut unknown = 0;
    for address in [4096, u64::MAX, small + 512, small + 1, mid + 512, large + P, large + 3 * P] {
        assert_eq!(torch.allocator.free(address), Freed::Unknown, "{address:#x}");
        unknown += 1;
    }
    for address in [small, mid, large] {
        assert_eq!(torch.allocator.free(address), Freed::Cached);
        assert_eq!(torch.allocator.free(address), Freed::Unknown, "freed twice");
        unknown += 1;
    }
    let statistics = torch.allocator.statistics();
    assert_eq!((statistics.unknown_free, statistics.num_ooms), (unknown, 0));
    assert_eq!(torch.world.used(), used);
    torch.allocator.record_stream(4096, torch.world.stream);
    torch.allocator.record_stream(0, torch.world.stream);
    torch.check();
}

/// Scenario 28: live ranges never overlap, whatever comes and goes.
#[test]
fn scenario_28_no_two_live_ranges_overlap() {
    let torch = Torch::budget(900);
    let mut random = Random(28);
    let streams = [torch.world.stream, torch.world.another_stream()];
    let mut live: BTreeMap<u64, u64> = BTreeMap::new();
    for round in 0..100_000 {
        let grows = random.below(100) < if (round / 5000) % 2 == 0 { 55 } else { 45 };
        if grows || live.is_empty() {
            let bytes = match random.below(10) {
                0..=5 => 1 + random.below(8 << 10),
                6..=8 => 1 + random.below(P),
                _ => 1 + random.below(6 * P),
            };
            let stream = streams[random.below(2) as usize];
            let Ok(address) = torch.allocator.malloc(bytes as usize, stream) else { continue };
            enter_apart(&mut live, address, bytes);
        } else {
            let at = random.below(live.len() as u64) as usize;
            let address = *live.keys().nth(at).unwrap();
            live.remove(&address);
            assert_eq!(torch.allocator.free(address), Freed::Cached);
        }
        if round % 10_000 == 0 {
            torch.check();
            for (start, bytes) in live.iter().take(50) {
                let (base, all) = torch.allocator.base_of(start + bytes / 2).unwrap();
                assert!(base == *start && all >= *bytes);
            }
        }
    }
    for address in live.into_keys() {
        torch.allocator.free(address);
    }
    torch.allocator.empty_cache().unwrap();
    assert_eq!((torch.reserved(), torch.world.used()), (0, 0));
    torch.check();
    torch.check_shut();
}

#[test]
fn empty_cache_gives_back_what_nothing_live_touches() {
    let torch = Torch::budget(32);
    let free = || torch.world.sim.mem_get_info().unwrap().free_bytes;
    let before = free();
    let (kept, large, small) = (torch.malloc(2 * P), torch.malloc(9 * P), torch.malloc(900));
    torch.write(large, 9 * P, 3, torch.world.stream);
    torch.allocator.free(large);
    torch.allocator.free(small);
    assert_eq!(free(), before - 12 * P);
    torch.allocator.empty_cache().unwrap();
    assert_eq!((free(), torch.reserved()), (before - 2 * P, 2));
    torch.allocator.empty_cache().unwrap();
    torch.allocator.free(kept);
    torch.allocator.empty_cache().unwrap();
    assert_eq!((free(), torch.reserved()), (before, 0));
    torch.check();
    torch.check_shut();
}

#[test]
fn a_free_piece_at_the_end_is_used_before_fresh_pages() {
    let torch = Torch::budget(8);
    let one = torch.malloc(2 * P + 512);
    // The rest of the third page, and one more.
    let two = torch.malloc(2 * P - 512);
    assert_eq!((two, torch.reserved()), (one + 2 * P + 512, 4));
    torch.allocator.free(one);
    // The first two pages and a piece are free: what does not fit there starts elsewhere, and what
    // is free strands nothing.
    let three = torch.malloc(5 * P);
    assert!(three >= two + 2 * P - 512);
    assert!(torch.reserved() <= 8);
    torch.check();
}

#[test]
fn fragments_strand_no_memory() {
    // Half of the pages are free, no two of them neighbours: all of them serve one block.
    let torch = Torch::budget(16);
    let blocks: Vec<u64> = (0..16).map(|_| torch.malloc(P)).collect();
    for block in blocks.iter().step_by(2) {
        torch.allocator.free(*block);
    }
    let large = torch.malloc(8 * P);
    torch.write(large, 8 * P, 5, torch.world.stream);
    torch.sum(large, 8 * P, torch.world.stream);
    assert_eq!(torch.world.word(torch.target, torch.world.stream), pattern_sum(8 * P, 5));
    assert_eq!((torch.reserved(), torch.world.used()), (16, 16));
    torch.check();
}

#[test]
fn out_of_memory_tells_numbers_and_leaves_everything_usable() {
    let torch = Torch::budget(8);
    let held = torch.malloc(5 * P);
    let short = torch.allocator.malloc(4 * P as usize, torch.world.stream).unwrap_err();
    let OutOfMemory { requested_bytes, allocated_bytes, reserved_bytes, budget_bytes, .. } = short;
    assert_eq!((requested_bytes, budget_bytes), (4 * P, 8 * P));
    assert_eq!((allocated_bytes, reserved_bytes), (5 * P, 5 * P));
    assert!(short.is_memory());
    assert_eq!(short.capacity_bytes, torch.world.sim.device_total_mem(DEVICE).unwrap());
    let text = short.to_string();
    assert!(text.starts_with("CUDA out of memory. Tried to allocate 256.00 KiB. GPU 0 has"));
    for huge in [1 << 50, usize::MAX / 2, usize::MAX] {
        let short = torch.allocator.malloc(huge, torch.world.stream).unwrap_err();
        assert!(short.is_memory(), "{short}");
    }
    assert_eq!(torch.allocator.statistics().num_ooms, 4);
    let more = torch.malloc(3 * P);
    torch.write(more, 3 * P, 1, torch.world.stream);
    torch.allocator.free(held);
    torch.malloc(5 * P);
    torch.check();
}

#[test]
fn counts_are_pytorchs_and_can_be_reset() {
    let torch = Torch::budget(16);
    let (one, two) = (torch.malloc(1000), torch.malloc(3 * P + 1));
    torch.allocator.free(one);
    let counted = torch.allocator.statistics();
    assert_eq!(counted.allocated_bytes.all.current, 3 * P + 512);
    assert_eq!(counted.allocated_bytes.all.peak, 3 * P + 512 + 1024);
    assert_eq!(counted.allocated_bytes.small_pool.freed, 1024);
    assert_eq!(counted.requested_bytes.large_pool.current, 3 * P + 1);
    assert_eq!((counted.allocation.all.allocated, counted.allocation.all.freed), (2, 1));
    assert_eq!((counted.num_device_alloc, counted.num_device_free), (5, 0));
    assert_eq!(counted.inactive_split_bytes.large_pool.current, P - 512);
    assert_eq!(counted.segment.all.current, 2);
    torch.allocator.reset_peaks();
    torch.allocator.reset_accumulated();
    let reset = torch.allocator.statistics();
    assert_eq!(reset.allocated_bytes.all.peak, 3 * P + 512);
    assert_eq!(reset.allocation.all.allocated, 0);
    assert_eq!(reset.allocation.all.current, 1);
    assert_eq!(reset.num_device_alloc, 0);
    torch.allocator.free(two);
    torch.check();
}

#[test]
fn a_fraction_bounds_what_is_held() {
    let torch = Torch::of(World::new(32));
    torch.allocator.set_fraction(0.25);
    let one = torch.malloc(8 * P);
    let short = torch.allocator.malloc(P as usize, torch.world.stream).unwrap_err();
    assert_eq!(short.limit_bytes, Some(8 * P));
    torch.allocator.free(one);
    // What is cached counts, and goes when something else is wanted.
    torch.malloc(3 * P);
    torch.malloc(5 * P);
    assert_eq!(torch.reserved(), 8);
    torch.allocator.set_fraction(1.0);
    torch.malloc(9 * P);
    torch.check();
}

#[test]
fn one_allocator_a_runtime_and_nothing_after_it() {
    let torch = Torch::budget(4);
    let again = torch.world.runtime.torch_allocator().unwrap();
    assert!(Arc::ptr_eq(&again, &torch.allocator));
    let live = torch.malloc(P);
    let Torch { world, allocator, .. } = torch;
    let runtime: &Runtime = &world.runtime;
    assert_eq!(runtime.numbers().used_bytes, P);
    world.check_shut();
    // The device is closed: nothing is done any more, and nothing breaks.
    assert_eq!(allocator.free(live), Freed::Ending);
    assert!(!allocator.malloc(P as usize, Stream::DEFAULT).unwrap_err().is_memory());
    allocator.empty_cache().unwrap();
}

#[test]
fn segments_for_a_caller_that_caches_go_back_at_once() {
    let torch = Torch::budget(16);
    let stream = torch.world.stream;
    let one = torch.allocator.segment_malloc(4 * P as usize, stream).unwrap();
    let two = torch.allocator.segment_malloc(512, stream).unwrap();
    torch.write(one, 4 * P, 1, stream);
    assert_eq!(torch.allocator.free(one), Freed::Unknown, "it is a segment");
    assert_eq!(torch.allocator.segment_free(one), Freed::Cached);
    assert_eq!(torch.reserved(), 1);
    assert_eq!(torch.allocator.segment_malloc(99 * P as usize, stream), None);
    assert_eq!(torch.allocator.segment_free(two), Freed::Cached);
    assert_eq!(torch.allocator.segment_free(two), Freed::Unknown);
    assert_eq!((torch.reserved(), torch.world.used()), (0, 0));
    torch.check();
    torch.check_shut();
}

#[test]
fn a_bar_whose_pages_serve_a_block_is_refused_for_want_of_memory() {
    let torch = Torch::budget(8);
    let vbar = torch.world.vbar(4);
    let block = torch.malloc(6 * P);
    assert_eq!(torch.world.touch(&vbar, 0..2), Ok(()));
    assert!(matches!(torch.world.touch(&vbar, 0..3), Err(Reason::AllPinned | Reason::Budget)));
    torch.allocator.free(block);
    assert_eq!(torch.world.touch(&vbar, 0..4), Ok(()));
    torch.check();
}
