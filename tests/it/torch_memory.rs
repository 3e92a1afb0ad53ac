//! How much memory PyTorch's allocator holds for what is live: small blocks, and frames that move.

use std::collections::BTreeMap;

use vbar::RuntimeOptions;
use vbar::driver::Driver;
use vbar::options::Eviction;
use vbar::torch::Freed;
use vbar::units::{MIB, PageSize, Stream};

use crate::torch::{Random, Torch, enter_apart};
use crate::world::{P, ROOMY, World, budget_options, options, pattern_sum};

const KIB: u64 = 1 << 10;

/// Pages that are cut into chunks, and chunks into slices.
fn with_pages_of(page_bytes: u64, capacity: &str) -> Torch {
    let page_size = PageSize::new(page_bytes).unwrap();
    let options = RuntimeOptions { page_size, ..options() };
    Torch::of(World::with(&format!("capacity={capacity},granularity=64K"), options))
}

/// Asks for so much that `pages` pages may move.
pub(crate) fn earn(torch: &Torch, pages: u64, stream: Stream) {
    for _ in 0..pages * 256 * MIB / (2 * MIB) {
        let block = torch.malloc_on(2 * MIB, stream);
        torch.allocator.free(block);
    }
}

fn held(torch: &Torch) -> u64 {
    torch.allocator.statistics().reserved_bytes.all.current
}

/// Every class and every stream used to hold 2 MiB, and 64 MiB were full with 3 MiB live.
#[test]
fn small_blocks_of_all_classes_hold_little_more_than_they_are() {
    let torch = with_pages_of(2 * MIB, "64M");
    let streams: Vec<Stream> = (0..4).map(|_| torch.world.another_stream()).collect();
    // One of each size on each stream.
    let mut live = 0;
    for bytes in (1..=64).map(|i| i * 512) {
        for stream in &streams {
            torch.malloc_on(bytes, *stream);
            live += bytes;
        }
    }
    assert_eq!(live, 4 * 64 * 65 / 2 * 512);
    assert!(held(&torch) <= 4 * 4 * MIB, "{} KiB for {} KiB", held(&torch) / KIB, live / KIB);
    // The more there is, the smaller the part that is not used.
    let mut random = Random(5);
    for more in [8, 16, 32] {
        while live < more * MIB {
            let bytes = 1 + random.below(32 * KIB);
            torch.malloc_on(bytes, streams[random.below(4) as usize]);
            live += bytes;
        }
        let most = live * 5 / 4 + 12 * MIB;
        assert!(held(&torch) <= most, "{} MiB for {more}", held(&torch) / MIB);
    }
}

/// Slabs grow with their class, and go when they are empty.
#[test]
fn what_small_blocks_held_goes_to_whoever_asks() {
    let torch = with_pages_of(2 * MIB, "64M");
    for bytes in [512, 3 * KIB, 20 * KIB, 24 * KIB, 32 * KIB] {
        let blocks: Vec<u64> = (0..40 * MIB / bytes).map(|_| torch.malloc(bytes)).collect();
        assert!(held(&torch) <= 48 * MIB, "{} MiB of {bytes}", held(&torch) / MIB);
        blocks.into_iter().for_each(|block| {
            torch.allocator.free(block);
        });
        // More than is left beside it.
        let large = torch.malloc(50 * MIB);
        torch.allocator.free(large);
        torch.allocator.empty_cache().unwrap();
        assert_eq!(held(&torch), 0);
    }
}

/// Scenario 28, in slices and chunks: live ranges never overlap, and all of it is found again.
#[test]
fn scenario_28_no_two_live_slots_and_slices_overlap() {
    for (page_bytes, seed) in [(2 * MIB, 28), (256 * KIB, 29), (4 * MIB, 30)] {
        let torch = with_pages_of(page_bytes, "96M");
        let mut random = Random(seed);
        let streams = [torch.world.stream, torch.world.another_stream()];
        let mut live: BTreeMap<u64, u64> = BTreeMap::new();
        for round in 0..40_000 {
            let grows = random.below(100) < if (round / 4000) % 2 == 0 { 60 } else { 40 };
            if grows || live.is_empty() {
                let most = if random.below(8) == 0 { 300 * KIB } else { 33 * KIB };
                let bytes = 1 + random.below(most);
                let stream = streams[random.below(2) as usize];
                let Ok(address) = torch.allocator.malloc(bytes as usize, stream) else { continue };
                enter_apart(&mut live, address, bytes);
            } else {
                let from = random.below(u64::MAX);
                let next = live.range(from..).next().or(live.iter().next());
                let address = *next.unwrap().0;
                let bytes = live.remove(&address).unwrap();
                assert_eq!(torch.allocator.base_of(address + bytes / 2).unwrap().0, address);
                assert_eq!(torch.allocator.free(address), Freed::Cached);
                assert_eq!(torch.allocator.free(address), Freed::Unknown);
            }
            if round % 8000 == 0 {
                crate::torch::check_books(&torch.allocator);
            }
        }
        live.into_keys().for_each(|address| {
            torch.allocator.free(address);
        });
        crate::torch::check_books(&torch.allocator);
        torch.allocator.empty_cache().unwrap();
        assert_eq!(held(&torch), 0);
        assert_eq!(torch.world.sim.violations(), Vec::<String>::new());
    }
}

/// A free piece, with something live behind it.
pub(crate) fn hole(torch: &Torch, pages: u64, stream: Stream) -> (u64, u64) {
    let first = torch.malloc_on(pages * P, stream);
    let behind = torch.malloc_on(P, stream);
    torch.allocator.free(first);
    (first, behind)
}

#[test]
fn frames_move_to_a_request_that_no_free_piece_serves() {
    for busy in [false, true] {
        let torch = Torch::budget(900);
        let stream = torch.world.stream;
        let (first, behind) = hole(&torch, 40, stream);
        earn(&torch, 50, stream);
        assert_eq!(torch.malloc(40 * P), first);
        if busy {
            torch.world.sim.hold_stream(stream).unwrap();
        }
        torch.write(first, 40 * P, 3, stream);
        torch.write(behind, P, 4, stream);
        torch.allocator.free(first);
        // Its frames come with it, though the work on them has not begun.
        let large = torch.malloc(60 * P);
        torch.write(large, 60 * P, 5, stream);
        assert_eq!((torch.reserved(), torch.world.used()), (61, 61), "busy: {busy}");
        torch.sum(large, 60 * P, stream);
        torch.sum(behind, P, stream);
        torch.world.sim.release_stream(stream).unwrap();
        let sum = pattern_sum(60 * P, 5).wrapping_add(pattern_sum(P, 4));
        assert_eq!(torch.world.word(torch.target, stream), sum);
        torch.check();
    }
}

/// What is left of a page whose frame has moved is no other stream's before the frame's old work
/// is done: the device watches both addresses of it.
#[test]
fn what_is_left_of_moved_frames_waits_for_their_old_work() {
    let torch = Torch::budget(900);
    let (own, other) = (torch.world.stream, torch.world.another_stream());
    let (first, _behind) = hole(&torch, 40, own);
    earn(&torch, 50, own);
    assert_eq!(torch.malloc(40 * P), first);
    torch.world.sim.hold_stream(own).unwrap();
    torch.write(first, 40 * P, 3, own);
    torch.allocator.free(first);
    let large = torch.malloc(59 * P + 16 * KIB);
    assert_eq!((torch.reserved(), torch.world.used()), (61, 61));
    // As large as what is left, which is there for its own stream alone.
    let elsewhere = torch.malloc_on(48 * KIB, other);
    torch.write(elsewhere, 48 * KIB, 4, other);
    assert_eq!(torch.malloc(48 * KIB), large + 59 * P + 16 * KIB);
    torch.world.sim.stream_synchronize(other).unwrap();
    torch.finish(own);
    torch.check();
}

#[test]
fn frames_that_another_stream_uses_stay() {
    let torch = Torch::budget(900);
    let (own, other) = (torch.world.stream, torch.world.another_stream());
    let (first, _behind) = hole(&torch, 40, other);
    earn(&torch, 50, other);
    // Used again, by work that has not begun.
    assert_eq!(torch.malloc_on(40 * P, other), first);
    torch.world.sim.hold_stream(other).unwrap();
    torch.write(first, 40 * P, 3, other);
    torch.allocator.free(first);
    torch.malloc_on(60 * P, own);
    assert_eq!((torch.reserved(), torch.world.used()), (101, 101));
    torch.finish(other);
    torch.check();
}

/// What would cost more than it saves: a loop in which something moves each time.
#[test]
fn frames_do_not_move_more_often_than_was_earned() {
    let torch = Torch::budget(900);
    let stream = torch.world.stream;
    hole(&torch, 40, stream);
    torch.malloc(60 * P);
    assert_eq!(torch.reserved(), 101, "nothing was earned");
    earn(&torch, 7, stream);
    let before = torch.reserved();
    let mapped = torch.allocator.statistics().num_device_alloc;
    hole(&torch, 50, stream);
    torch.malloc(80 * P);
    let mapped = torch.allocator.statistics().num_device_alloc - mapped;
    let grown = torch.reserved() - before;
    assert!(mapped - grown == 7, "{mapped} pages were mapped for {grown}");
    torch.check();
}

#[test]
fn strictly_no_frame_has_two_addresses() {
    let options = RuntimeOptions { eviction: Eviction::Strict, ..budget_options(900) };
    let torch = Torch::of(World::with(ROOMY, options));
    let stream = torch.world.stream;
    let (first, _behind) = hole(&torch, 40, stream);
    earn(&torch, 50, stream);
    assert_eq!(torch.malloc(40 * P), first);
    torch.world.sim.hold_stream(stream).unwrap();
    torch.write(first, 40 * P, 3, stream);
    torch.allocator.free(first);
    torch.malloc(60 * P);
    assert_eq!((torch.reserved(), torch.world.used()), (101, 101));
    torch.world.sim.release_stream(stream).unwrap();
    torch.check();
}
