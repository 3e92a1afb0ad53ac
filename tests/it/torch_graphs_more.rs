//! Memory graphs that end in the middle: with their thread, and while launches use what they had.

use std::sync::atomic::{AtomicU32, Ordering};

use vbar::Error;
use vbar::driver::sim::Verb;
use vbar::driver::{CaptureMode, Driver};
use vbar::torch::{Freed, MemoryGraph, Pass, PoolId};

use crate::torch::Torch;
use crate::world::{P, pattern_sum, resident};

const STEP: u64 = 1;
const BLOCK: u64 = 2;

fn graph(torch: &Torch) -> MemoryGraph {
    MemoryGraph::new(&torch.allocator, torch.world.stream).unwrap()
}

/// A thread that ends with scopes open, and a pause. Returns a block that it left, of two pages.
fn end_in_scopes(torch: &Torch, graph: &MemoryGraph) -> u64 {
    let run = || {
        graph.enter(STEP)?;
        graph.enter(BLOCK)?;
        let left = torch.malloc(2 * P);
        assert_eq!(torch.allocator.free(torch.malloc(5 * P)), Freed::Cached);
        graph.pause()?;
        Ok::<u64, Error>(left)
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap()).unwrap()
}

/// Programs have a graph a thread, and may lose the thread by an exception in the middle of a pass.
#[test]
fn scopes_end_with_their_thread() {
    let torch = Torch::budget(16);
    let graph = graph(&torch);
    let left = end_in_scopes(&torch, &graph);
    assert_eq!(graph.statistics().rogue_count, 1);
    // What it has no use for goes to who asks: the cache's end, another thread, weights.
    torch.allocator.empty_cache().unwrap();
    assert_eq!(torch.reserved(), 2);
    graph.enter(STEP).unwrap();
    assert!(graph.resume().is_err(), "the pause ended, too");
    let block = torch.malloc(P);
    assert_eq!(torch.allocator.free(block), Freed::Cached);
    assert_eq!(graph.leave().unwrap(), Pass::Whole);
    assert_eq!(torch.allocator.free(left), Freed::Cached);
    assert_eq!(graph.statistics().rogue_count, 0);
    let left = end_in_scopes(&torch, &graph);
    let vbar = torch.world.vbar(14);
    drop(resident(&torch.world, &vbar, 0..14));
    torch.check();
    let other = end_in_scopes(&torch, &graph);
    graph.use_stream(torch.world.another_stream()).unwrap();
    for block in [left, other] {
        assert_ne!(torch.allocator.free(block), Freed::Unknown);
    }
    drop(graph);
    torch.check();
    drop(vbar);
    torch.check_shut();
}

/// A launch on a stream that nobody knows of uses a block which is freed, and waits for another
/// stream when the graph goes.
#[test]
fn what_was_captured_and_waits_is_nobodys_before_the_last_launch() {
    let torch = Torch::budget(32);
    let (world, stream) = (&torch.world, torch.world.stream);
    let (other, side) = (world.another_stream(), world.another_stream());
    let memory = graph(&torch);
    memory.enter(STEP).unwrap();
    let input = torch.malloc(2 * P);
    torch.write(input, 2 * P, 1, stream);
    let id = PoolId(0, 1);
    torch.allocator.begin_pool(id, Box::new(move |asked| asked == stream));
    world.sim.begin_capture(stream, CaptureMode::Global).unwrap();
    torch.sum(input, 2 * P, stream);
    let captured = world.sim.end_capture(stream).unwrap();
    torch.allocator.end_pool(id);
    world.sim.stream_synchronize(stream).unwrap();
    world.sim.hold_stream(other).unwrap();
    torch.sum(input, 2 * P, other);
    torch.allocator.record_stream(input, other);
    assert_eq!(torch.allocator.free(input), Freed::Deferred);
    memory.leave().unwrap();
    world.sim.hold_stream(side).unwrap();
    captured.launch(side).unwrap();
    drop(memory);
    torch.finish(other);
    let block = torch.malloc(2 * P);
    assert_ne!(block, input);
    torch.write(block, 2 * P, 99, stream);
    world.sim.stream_synchronize(stream).unwrap();
    torch.finish(side);
    assert_eq!(world.word(torch.target, stream), pattern_sum(2 * P, 1).wrapping_mul(2));
    torch.allocator.free(block);
    drop(captured);
    torch.allocator.release_pool(id);
    torch.check();
    torch.allocator.empty_cache().unwrap();
    assert_eq!(torch.reserved(), 0);
    torch.check_shut();
}

#[test]
fn what_another_stream_used_is_had_again_once_that_is_done() {
    let torch = Torch::budget(64);
    let (world, one) = (&torch.world, torch.world.stream);
    let two = world.another_stream();
    let graph = graph(&torch);
    graph.enter(STEP).unwrap();
    let mut first = None;
    for _ in 0..5 {
        let block = torch.malloc(2 * P);
        assert_eq!(block, *first.get_or_insert(block));
        torch.write(block, 2 * P, 1, one);
        world.sim.stream_synchronize(one).unwrap();
        torch.sum(block, 2 * P, two);
        torch.allocator.record_stream(block, two);
        assert_eq!(torch.allocator.free(block), Freed::Deferred);
        world.sim.stream_synchronize(two).unwrap();
        assert_eq!(graph.next(STEP).unwrap(), Pass::Whole);
    }
    assert_eq!(graph.statistics().pool_bytes, 2 * P);
    let sums = pattern_sum(2 * P, 1).wrapping_mul(5);
    assert_eq!(world.word(torch.target, two), sums);
    graph.leave().unwrap();
    torch.check();
    drop(graph);
    torch.check_shut();
}

/// What a stream has free goes with the cache when that is nothing, while the graph's new stream
/// is being ordered behind its old one.
#[test]
fn the_cache_may_be_emptied_while_a_graph_changes_its_stream() {
    let torch = Torch::budget(64);
    let (world, one) = (&torch.world, torch.world.stream);
    let two = world.another_stream();
    let graph = graph(&torch);
    graph.enter(STEP).unwrap();
    let block = torch.malloc(2 * P);
    graph.leave().unwrap();
    // The change has something to wait for.
    world.sim.hold_stream(one).unwrap();
    torch.write(block, 2 * P, 1, one);
    let before = world.sim.calls(Verb::StreamWaitEvent);
    world.sim.hang(Verb::StreamWaitEvent);
    std::thread::scope(|scope| {
        let changed = scope.spawn(|| graph.use_stream(two));
        while world.sim.calls(Verb::StreamWaitEvent) == before && !changed.is_finished() {
            std::thread::yield_now();
        }
        torch.allocator.empty_cache().unwrap();
        world.sim.heal();
        changed.join().unwrap().unwrap();
    });
    torch.finish(one);
    graph.enter(STEP).unwrap();
    let again = torch.malloc_on(P, two);
    assert_eq!(graph.statistics().used_bytes, 3 * P);
    graph.leave().unwrap();
    for block in [block, again] {
        assert_ne!(torch.allocator.free(block), Freed::Unknown);
    }
    drop(graph);
    torch.check();
    torch.allocator.empty_cache().unwrap();
    assert_eq!(torch.reserved(), 0);
    torch.check_shut();
}

/// As where another thread begins the pool after the graph has found that the request is its own.
#[test]
fn a_pool_that_is_begun_meanwhile_has_no_page_of_a_graph() {
    let torch = Torch::budget(64);
    let graph = graph(&torch);
    graph.enter(STEP).unwrap();
    let (id, asked) = (PoolId(0, 1), AtomicU32::new(0));
    let admits = move |_| asked.fetch_add(1, Ordering::Relaxed) > 0;
    torch.allocator.begin_pool(id, Box::new(admits));
    let block = torch.malloc(2 * P);
    torch.allocator.end_pool(id);
    assert_eq!(graph.statistics().used_bytes, 2 * P);
    torch.check();
    assert!(torch.allocator.snapshot().iter().all(|segment| segment.pool.is_none()));
    torch.allocator.release_pool(id);
    assert_ne!(torch.allocator.free(block), Freed::Unknown);
    graph.leave().unwrap();
    drop(graph);
    torch.check();
    torch.allocator.empty_cache().unwrap();
    assert_eq!(torch.reserved(), 0);
    torch.check_shut();
}
