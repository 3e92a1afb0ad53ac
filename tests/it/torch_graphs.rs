//! Memory graphs: scopes whose requests repeat get the same addresses, and nothing else changes.

use std::sync::Arc;

use vbar::ErrorCode;
use vbar::driver::sim::Verb;
use vbar::driver::{CaptureMode, Driver, DriverCode};
use vbar::torch::{Freed, MemoryGraph, Pass, PoolId};
use vbar::units::{DeviceAddress, Stream};

use crate::torch::{Torch, check_books};
use crate::world::{P, World, options, pattern_sum, resident};

const STEP: u64 = 1;
const BLOCK: u64 = 2;

fn graph(torch: &Torch) -> MemoryGraph {
    MemoryGraph::new(&torch.allocator, torch.world.stream).unwrap()
}

/// All driver calls but those that tell streams apart.
fn calls(torch: &Torch) -> u64 {
    let telling = [Verb::StreamGetId, Verb::StreamIsCapturing];
    let verbs = Verb::ALL.iter().filter(|verb| !telling.contains(verb));
    verbs.map(|verb| torch.world.sim.calls(*verb)).sum()
}

/// A pass as a layer makes it: its requests overlap, and are of many sizes. Returns the addresses.
#[track_caller]
fn layer(torch: &Torch, sizes: &[u64]) -> Vec<u64> {
    let mut addresses = Vec::new();
    let mut last = None;
    for &bytes in sizes {
        let address = torch.malloc(bytes);
        addresses.push(address);
        if let Some(last) = last.replace(address) {
            assert_eq!(torch.allocator.free(last), Freed::Cached);
        }
    }
    last.into_iter().for_each(|last| assert_eq!(torch.allocator.free(last), Freed::Cached));
    addresses
}

const SIZES: [u64; 7] = [3 * P, 512, 40 << 10, P / 2 + 512, 5 * P, 1000, 2 * P];

#[test]
fn a_repeated_pass_has_the_same_addresses_and_calls_no_driver() {
    let torch = Torch::budget(64);
    let graph = graph(&torch);
    graph.enter(STEP).unwrap();
    let first = layer(&torch, &SIZES);
    assert_eq!(graph.next(STEP).unwrap(), Pass::Whole);
    let (before, pool) = (calls(&torch), graph.statistics().pool_bytes);
    for _ in 0..10 {
        assert_eq!(layer(&torch, &SIZES), first);
        assert_eq!(graph.next(STEP).unwrap(), Pass::Whole);
    }
    assert_eq!(calls(&torch), before);
    assert_eq!(graph.leave().unwrap(), Pass::Whole);
    // Again from outside.
    graph.enter(STEP).unwrap();
    assert_eq!(layer(&torch, &SIZES), first);
    assert_eq!(graph.leave().unwrap(), Pass::Whole);
    let told = graph.statistics();
    assert_eq!((told.used_bytes, told.rogue_count, told.pool_bytes), (0, 0, pool));
    // Two neighbours live at a time.
    assert_eq!(told.peak_used_bytes, 5 * P + P / 2 + 512);
    torch.check();
    drop(graph);
    torch.allocator.empty_cache().unwrap();
    assert_eq!(torch.reserved(), 0);
    torch.check_shut();
}

/// Programs begin a pass before their first, or behind their last.
#[test]
fn a_pass_in_which_nothing_is_done_is_no_other_way() {
    let torch = Torch::budget(64);
    let graph = graph(&torch);
    let mut first = Vec::new();
    for _ in 0..3 {
        graph.enter(STEP).unwrap();
        for _ in 0..3 {
            assert_eq!(graph.next(STEP).unwrap(), Pass::Whole);
            let addresses = layer(&torch, &SIZES);
            first = if first.is_empty() { addresses.clone() } else { first };
            assert_eq!(addresses, first);
        }
        assert_eq!(graph.next(STEP).unwrap(), Pass::Whole);
        assert_eq!(graph.leave().unwrap(), Pass::Whole);
    }
    torch.check();
}

#[test]
fn what_is_asked_for_between_passes_moves_nothing() {
    let torch = Torch::budget(64);
    let graph = graph(&torch);
    graph.enter(STEP).unwrap();
    let first = layer(&torch, &SIZES);
    let mut kept = Vec::new();
    for round in 1..6u64 {
        assert_eq!(graph.next(STEP).unwrap(), Pass::Whole);
        graph.pause().unwrap();
        kept.push(torch.malloc(round * P / 2));
        graph.resume().unwrap();
        assert_eq!(layer(&torch, &SIZES), first);
        // A stream that is not the graph's.
        let other = torch.malloc_on(2 * P, Stream::DEFAULT);
        assert!(!first.contains(&other));
        kept.push(other);
    }
    assert_eq!(graph.leave().unwrap(), Pass::Whole);
    assert_eq!(graph.statistics().rogue_count, 0);
    kept.into_iter().for_each(|block| assert_eq!(torch.allocator.free(block), Freed::Cached));
    torch.check();
}

#[test]
fn another_way_is_a_break_once_and_a_branch_then() {
    let torch = Torch::budget(64);
    let graph = graph(&torch);
    let other = [3 * P, 512, 6 * P, 1000];
    graph.enter(STEP).unwrap();
    let first = layer(&torch, &SIZES);
    assert_eq!(graph.next(STEP).unwrap(), Pass::Whole);
    let branch = layer(&torch, &other);
    assert_eq!(branch[..2], first[..2]);
    assert_eq!(graph.next(STEP).unwrap(), Pass::Broken);
    for _ in 0..3 {
        assert_eq!(layer(&torch, &SIZES), first);
        assert_eq!(graph.next(STEP).unwrap(), Pass::Whole);
        assert_eq!(layer(&torch, &other), branch);
        assert_eq!(graph.next(STEP).unwrap(), Pass::Whole);
    }
    // Less than a known way is another one, too.
    layer(&torch, &SIZES[..2]);
    assert_eq!(graph.next(STEP).unwrap(), Pass::Broken);
    layer(&torch, &SIZES[..2]);
    assert_eq!(graph.leave().unwrap(), Pass::Whole);
    torch.check();
}

#[test]
fn a_scope_within_is_followed_by_its_name() {
    let torch = Torch::budget(64);
    let graph = graph(&torch);
    let (one, two) = ([P, 2 * P], [700, 3 * P]);
    let pass = |blocks: &[&[u64]]| {
        let mut addresses = vec![torch.malloc(P)];
        for (name, sizes) in blocks.iter().enumerate() {
            graph.enter(BLOCK + name as u64).unwrap();
            addresses.extend(layer(&torch, sizes));
            // Passes of a scope within are compared with each other.
            assert_eq!(graph.next(BLOCK + name as u64).unwrap(), Pass::Whole);
            addresses.extend(layer(&torch, sizes));
            assert_eq!(graph.leave().unwrap(), Pass::Whole);
        }
        torch.allocator.free(addresses[0]);
        addresses
    };
    graph.enter(STEP).unwrap();
    let first = pass(&[&one, &two]);
    assert_eq!(first[1..3], first[3..5]);
    assert_eq!(graph.next(STEP).unwrap(), Pass::Whole);
    assert_eq!(pass(&[&one, &two]), first);
    assert_eq!(graph.next(STEP).unwrap(), Pass::Whole);
    // In another order: the outer one departs; what is within is new there, and whole.
    graph.enter(BLOCK + 7).unwrap();
    layer(&torch, &two);
    assert_eq!(graph.leave().unwrap(), Pass::Whole);
    assert_eq!(graph.next(STEP).unwrap(), Pass::Broken);
    assert_eq!(pass(&[&one, &two]), first);
    // Another name in its place is compared with its own.
    assert_eq!(graph.next(STEP + 100).unwrap(), Pass::Whole);
    assert_eq!(graph.leave().unwrap(), Pass::Whole);
    torch.check();
}

#[test]
fn what_breaks_within_breaks_what_is_around_it() {
    let torch = Torch::budget(64);
    let graph = graph(&torch);
    for (sizes, outcome) in [(&SIZES[..2], Pass::Whole), (&SIZES[1..3], Pass::Broken)] {
        graph.enter(STEP).unwrap();
        graph.enter(BLOCK).unwrap();
        layer(&torch, sizes);
        assert_eq!(graph.leave().unwrap(), outcome);
        assert_eq!(graph.leave().unwrap(), outcome);
    }
    torch.check();
}

#[test]
fn a_block_that_outlives_its_scope_keeps_its_memory() {
    let torch = Torch::budget(64);
    let graph = graph(&torch);
    graph.enter(STEP).unwrap();
    let rogue = torch.malloc(3 * P);
    torch.write(rogue, 3 * P, 5, torch.world.stream);
    assert_eq!(graph.statistics().rogue_count, 0);
    assert_eq!(graph.next(STEP).unwrap(), Pass::Whole);
    assert_eq!(graph.statistics().rogue_count, 1);
    // Its place is known and not free.
    let next = torch.malloc(3 * P);
    assert!(next.abs_diff(rogue) >= 3 * P);
    torch.write(next, 3 * P, 6, torch.world.stream);
    torch.sum(rogue, 3 * P, torch.world.stream);
    assert_eq!(torch.world.word(torch.target, torch.world.stream), pattern_sum(3 * P, 5));
    torch.allocator.free(next);
    assert_eq!(graph.leave().unwrap(), Pass::Broken);
    assert_eq!(torch.allocator.free(rogue), Freed::Cached);
    assert_eq!(torch.allocator.free(rogue), Freed::Unknown);
    assert_eq!(graph.statistics().rogue_count, 0);
    graph.enter(STEP).unwrap();
    assert_eq!(torch.malloc(3 * P), rogue);
    torch.check();
    drop(graph);
    torch.check();
}

#[test]
fn two_buffers_in_turn_come_to_be_two_ways() {
    let torch = Torch::budget(64);
    let graph = graph(&torch);
    graph.enter(STEP).unwrap();
    let mut kept = torch.malloc(2 * P);
    let mut outcomes = Vec::new();
    for _ in 0..8 {
        outcomes.push(graph.next(STEP).unwrap());
        let next = torch.malloc(2 * P);
        torch.allocator.free(std::mem::replace(&mut kept, next));
        assert_eq!(graph.statistics().used_bytes, 2 * P);
    }
    assert!(outcomes.contains(&Pass::Broken));
    assert_eq!(outcomes[5..], [Pass::Whole; 3]);
    torch.allocator.free(kept);
    torch.check();
}

#[test]
fn an_abort_ends_all_scopes_and_no_block() {
    let torch = Torch::budget(64);
    let graph = graph(&torch);
    graph.enter(STEP).unwrap();
    let first = layer(&torch, &SIZES);
    assert_eq!(graph.next(STEP).unwrap(), Pass::Whole);
    let block = torch.malloc(SIZES[0]);
    graph.enter(BLOCK).unwrap();
    graph.pause().unwrap();
    graph.abort().unwrap();
    assert_eq!(graph.statistics().rogue_count, 1);
    assert_eq!(graph.leave().unwrap_err().code(), ErrorCode::InvalidArgument);
    let ordinary = torch.malloc(P);
    assert_eq!(graph.statistics().rogue_count, 1);
    torch.allocator.free(block);
    torch.allocator.free(ordinary);
    // It begins anew, not paused.
    graph.enter(STEP).unwrap();
    assert_eq!(layer(&torch, &SIZES), first);
    assert_eq!(graph.leave().unwrap(), Pass::Whole);
    torch.check();
}

#[test]
fn a_thread_has_the_scopes_of_one_graph_at_a_time() {
    let torch = Torch::budget(64);
    let (one, two) = (graph(&torch), graph(&torch));
    let refused = |done: vbar::Result<()>, text: &str| {
        let error = done.unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
        assert!(error.to_string().contains(text), "{error}");
    };
    refused(one.resume(), "on this thread");
    one.enter(STEP).unwrap();
    refused(two.enter(STEP), "another graph");
    refused(two.pause(), "on this thread");
    refused(one.resume(), "never began");
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            refused(one.enter(STEP), "on another thread");
            refused(one.leave().map(drop), "on this thread");
            refused(one.use_stream(Stream::DEFAULT), "on another thread");
            two.enter(STEP).unwrap();
            // Each thread's requests are its own graph's.
            let block = torch.malloc(P);
            assert_eq!((one.statistics().used_bytes, two.statistics().used_bytes), (0, P));
            torch.allocator.free(block);
            two.leave().unwrap();
        });
        other.join().unwrap();
    });
    // From any thread.
    std::thread::scope(|scope| scope.spawn(|| one.abort().unwrap()).join().unwrap());
    two.enter(STEP).unwrap();
    two.leave().unwrap();
    torch.check();
}

#[test]
fn frees_of_other_threads_and_after_the_end_are_right() {
    let torch = Torch::budget(64);
    let graph = graph(&torch);
    for pass in 0..3 {
        graph.enter(STEP).unwrap();
        let block = torch.malloc(2 * P);
        torch.write(block, 2 * P, pass, torch.world.stream);
        std::thread::scope(|scope| {
            let free = scope.spawn(|| assert_eq!(torch.allocator.free(block), Freed::Cached));
            free.join().unwrap();
        });
        assert_eq!(graph.statistics().used_bytes, 0);
        assert_eq!(graph.leave().unwrap(), Pass::Whole);
    }
    graph.enter(STEP).unwrap();
    let blocks = [torch.malloc(2 * P), torch.malloc(700)];
    for (block, bytes) in blocks.into_iter().zip([2 * P, 700]) {
        torch.write(block, bytes, 9, torch.world.stream);
    }
    drop(graph);
    torch.check();
    // They live, and their pages with them.
    torch.allocator.empty_cache().unwrap();
    let ordinary = torch.malloc(4 * P);
    torch.write(ordinary, 4 * P, 10, torch.world.stream);
    torch.sum(blocks[0], 2 * P, torch.world.stream);
    assert_eq!(torch.world.word(torch.target, torch.world.stream), pattern_sum(2 * P, 9));
    for block in blocks.into_iter().chain([ordinary]) {
        assert_eq!(torch.allocator.free(block), Freed::Cached);
    }
    torch.allocator.empty_cache().unwrap();
    assert_eq!(torch.reserved(), 0);
    torch.check_shut();
}

/// Out of memory within a scope is what it is outside: room is made, or the request fails by
/// itself, and the pass goes on.
#[test]
fn memory_that_is_short_within_a_scope_breaks_it_and_nothing_else() {
    let torch = Torch::budget(8);
    let graph = graph(&torch);
    graph.enter(STEP).unwrap();
    let first = torch.malloc(3 * P);
    let used = torch.malloc(3 * P);
    torch.allocator.free(first);
    torch.write(used, 3 * P, 3, torch.world.stream);
    assert!(torch.allocator.malloc(20 * P as usize, torch.world.stream).is_err());
    // What the graph has free is the request's, rather than that it fails.
    let large = torch.malloc(5 * P);
    torch.write(large, 5 * P, 4, torch.world.stream);
    torch.sum(used, 3 * P, torch.world.stream);
    assert_eq!(torch.world.word(torch.target, torch.world.stream), pattern_sum(3 * P, 3));
    assert!(torch.allocator.malloc(P as usize, torch.world.stream).is_err());
    torch.allocator.free(large);
    torch.allocator.free(used);
    assert_eq!(graph.next(STEP).unwrap(), Pass::Broken);
    let again = layer(&torch, &SIZES[..3]);
    assert_eq!(graph.next(STEP).unwrap(), Pass::Whole);
    assert_eq!(layer(&torch, &SIZES[..3]), again);
    assert_eq!(graph.leave().unwrap(), Pass::Whole);
    torch.check();
    drop(graph);
    torch.check_shut();
}

#[test]
fn a_graph_without_scopes_gives_its_memory_to_who_asks() {
    let torch = Torch::budget(16);
    let graph = graph(&torch);
    graph.enter(STEP).unwrap();
    layer(&torch, &SIZES);
    assert!(graph.statistics().pool_bytes > 0);
    // While they are open, not even to who empties the cache.
    torch.allocator.empty_cache().unwrap();
    assert!(graph.statistics().pool_bytes > 0);
    graph.leave().unwrap();
    let block = torch.malloc(16 * P);
    assert_eq!(graph.statistics().pool_bytes, 0);
    torch.allocator.free(block);
    graph.enter(STEP).unwrap();
    let first = layer(&torch, &SIZES);
    // The first pass that is known.
    assert_eq!(graph.next(STEP).unwrap(), Pass::Whole);
    assert_eq!(layer(&torch, &SIZES), first);
    graph.leave().unwrap();
    torch.allocator.empty_cache().unwrap();
    assert_eq!((graph.statistics().pool_bytes, torch.reserved()), (0, 0));
    // Weights that find nothing else.
    graph.enter(STEP).unwrap();
    layer(&torch, &SIZES);
    graph.leave().unwrap();
    let vbar = torch.world.vbar(16);
    drop(resident(&torch.world, &vbar, 0..16));
    torch.check();
}

/// What is captured in a scope is launched later: its memory is nobody else's until the graph
/// goes, and then only after all work.
#[test]
fn what_was_captured_in_a_scope_keeps_its_memory() {
    let torch = Torch::budget(32);
    let (world, stream) = (&torch.world, torch.world.stream);
    let memory = graph(&torch);
    memory.enter(STEP).unwrap();
    let input = torch.malloc(2 * P);
    torch.write(input, 2 * P, 1, stream);
    let id = PoolId(0, 1);
    torch.allocator.begin_pool(id, Box::new(move |asked| asked == stream));
    world.sim.begin_capture(stream, CaptureMode::Global).unwrap();
    let within = torch.malloc(3 * P);
    assert_eq!(memory.statistics().used_bytes, 2 * P, "the capture has a pool");
    torch.write(within, 3 * P, 2, stream);
    torch.sum(input, 2 * P, stream);
    torch.sum(within, 3 * P, stream);
    let captured = world.sim.end_capture(stream).unwrap();
    torch.allocator.end_pool(id);
    torch.allocator.free(input);
    assert_eq!(memory.leave().unwrap(), Pass::Whole);
    let pool_bytes = memory.statistics().pool_bytes;
    torch.allocator.empty_cache().unwrap();
    assert_eq!(memory.statistics().pool_bytes, pool_bytes);
    for round in 1..4u64 {
        memory.enter(STEP).unwrap();
        assert_eq!(torch.malloc(2 * P), input);
        torch.write(input, 2 * P, round, stream);
        captured.launch(stream).unwrap();
        torch.allocator.free(input);
        // There was no capture within, this time.
        memory.leave().unwrap();
    }
    let sums = (1..4).map(|round| pattern_sum(2 * P, round)).fold(0u64, u64::wrapping_add);
    let expected = sums.wrapping_add(pattern_sum(3 * P, 2).wrapping_mul(3));
    assert_eq!(world.word(torch.target, stream), expected);
    // A launch on a stream that nobody knows of is under way when the graph goes.
    let side = world.another_stream();
    world.sim.hold_stream(side).unwrap();
    captured.launch(side).unwrap();
    drop(memory);
    let block = torch.malloc(2 * P);
    assert_ne!(block, input);
    torch.write(block, 2 * P, 99, stream);
    torch.finish(side);
    torch.allocator.free(block);
    torch.allocator.free(within);
    drop(captured);
    torch.allocator.release_pool(id);
    torch.check();
    torch.allocator.empty_cache().unwrap();
    assert_eq!(torch.reserved(), 0);
    torch.check_shut();
}

#[test]
fn another_stream_comes_after_the_old_one() {
    let torch = Torch::budget(64);
    let (world, one) = (&torch.world, torch.world.stream);
    let two = world.another_stream();
    let graph = graph(&torch);
    graph.enter(STEP).unwrap();
    let (first, second) = (torch.malloc(2 * P), torch.malloc(2 * P));
    world.sim.hold_stream(one).unwrap();
    for (block, seed) in [(first, 1), (second, 2)] {
        torch.write(block, 2 * P, seed, one);
        torch.sum(block, 2 * P, one);
    }
    torch.allocator.free(first);
    graph.use_stream(two).unwrap();
    // Freed before the change: written there when the sum was taken here.
    let third = torch.malloc_on(2 * P, two);
    assert_eq!(third, first);
    torch.write(third, 2 * P, 3, two);
    // Freed after it: not before its own stream is done.
    assert_eq!(torch.allocator.free(second), Freed::Deferred);
    let fourth = torch.malloc_on(2 * P, two);
    assert!(fourth.abs_diff(second) >= 2 * P);
    torch.write(fourth, 2 * P, 4, two);
    // The old stream's requests are ordinary.
    let used = graph.statistics().used_bytes;
    let ordinary = torch.malloc(P);
    assert_eq!(graph.statistics().used_bytes, used);
    torch.finish(one);
    let expected = pattern_sum(2 * P, 1).wrapping_add(pattern_sum(2 * P, 2));
    assert_eq!(world.word(torch.target, one), expected);
    for block in [third, fourth, ordinary] {
        torch.allocator.free(block);
    }
    world.sim.stream_synchronize(two).unwrap();
    graph.use_stream(one).unwrap();
    graph.use_stream(one).unwrap();
    world.sim.begin_capture(two, CaptureMode::Relaxed).unwrap();
    assert!(graph.use_stream(two).is_err());
    drop(world.sim.end_capture(two).unwrap());
    assert!(graph.use_stream(Stream::NONE).is_err());
    let again = torch.malloc(2 * P);
    torch.write(again, 2 * P, 5, one);
    torch.allocator.free(again);
    torch.check();
    drop(graph);
    torch.allocator.empty_cache().unwrap();
    assert_eq!(torch.reserved(), 0);
    torch.check_shut();
}

#[test]
fn a_block_that_another_stream_uses_is_not_free_before_that_is_done() {
    let torch = Torch::budget(64);
    let (world, one) = (&torch.world, torch.world.stream);
    let two = world.another_stream();
    let graph = graph(&torch);
    graph.enter(STEP).unwrap();
    let block = torch.malloc(2 * P);
    torch.write(block, 2 * P, 1, one);
    world.sim.stream_synchronize(one).unwrap();
    world.sim.hold_stream(two).unwrap();
    torch.sum(block, 2 * P, two);
    torch.allocator.record_stream(block, two);
    assert_eq!(torch.allocator.free(block), Freed::Deferred);
    let other = torch.malloc(2 * P);
    assert_ne!(other, block);
    torch.write(other, 2 * P, 2, one);
    // The graph goes while it waits.
    drop(graph);
    check_books(&torch.allocator);
    torch.finish(two);
    assert_eq!(world.word(torch.target, two), pattern_sum(2 * P, 1));
    torch.allocator.free(other);
    torch.allocator.empty_cache().unwrap();
    assert_eq!(torch.reserved(), 0);
    torch.check_shut();
}

/// The memory that a graph gives up may be in use on its stream still.
#[test]
fn what_a_graph_gives_up_is_in_the_order_of_its_stream() {
    let torch = Torch::budget(8);
    let (world, one) = (&torch.world, torch.world.stream);
    let two = world.another_stream();
    for unused in [false, true] {
        world.sim.write_bytes(torch.target, &[0; 8]).unwrap();
        let block = torch.malloc(6 * P);
        torch.write(block, 6 * P, 7, one);
        world.sim.hold_stream(one).unwrap();
        torch.sum(block, 6 * P, one);
        torch.allocator.free(block);
        let graph = graph(&torch);
        graph.enter(STEP).unwrap();
        let held = torch.malloc(if unused { 512 } else { 6 * P });
        torch.allocator.free(held);
        graph.leave().unwrap();
        drop(graph);
        let other = torch.malloc_on(2 * P, two);
        torch.write(other, 2 * P, 8, two);
        torch.finish(one);
        assert_eq!(world.word(torch.target, one), pattern_sum(6 * P, 7));
        torch.allocator.free(other);
        world.sim.stream_synchronize(two).unwrap();
        torch.allocator.empty_cache().unwrap();
        torch.check();
    }
}

#[test]
fn failures_of_the_driver_leave_a_scope_broken_and_all_books_right() {
    let torch = Torch::budget(16);
    let graph = graph(&torch);
    for verb in [Verb::MemCreate, Verb::MemMap, Verb::MemSetAccess] {
        graph.enter(u64::from(verb as u32) + 10).unwrap();
        torch.world.sim.fail_always(verb, DriverCode::OUT_OF_MEMORY);
        assert!(torch.allocator.malloc(3 * P as usize, torch.world.stream).is_err());
        torch.world.sim.heal();
        let block = torch.malloc(3 * P);
        torch.write(block, 3 * P, 1, torch.world.stream);
        torch.allocator.free(block);
        assert_eq!(graph.leave().unwrap(), Pass::Broken, "{verb}");
        torch.allocator.empty_cache().unwrap();
        torch.check();
    }
}

#[test]
fn there_is_no_graph_without_mappings_and_none_of_no_stream() {
    let world = World::with("capacity=8M,granularity=64K,vmm=0", options());
    let allocator = world.runtime.torch_allocator().unwrap();
    let error = MemoryGraph::new(&allocator, world.stream).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Unsupported);
    let torch = Torch::budget(8);
    assert!(MemoryGraph::new(&torch.allocator, Stream::NONE).is_err());
    let graph = graph(&torch);
    let allocator = Arc::clone(&torch.allocator);
    graph.enter(STEP).unwrap();
    let block = torch.malloc(P);
    let read = torch.world.sim.read_bytes(DeviceAddress(block), 8);
    assert!(read.is_ok());
    // The device is closed with a graph and a block.
    drop(torch);
    assert!(allocator.malloc(1, Stream::DEFAULT).is_err());
    assert_eq!(allocator.free(block), Freed::Ending);
    graph.leave().unwrap();
    drop(graph);
}
