//! PyTorch's allocator and streams: nobody's bytes are written by others before their time.

use std::time::Duration;

use vbar::driver::{CaptureMode, Driver};
use vbar::torch::{Freed, PoolId};
use vbar::units::{DeviceAddress, Stream};

use crate::torch::{Random, Torch, check_books};
use crate::world::{P, World, options, pattern_sum};

const DELAY: Duration = Duration::from_millis(2);

/// Scenario 23: freed while a kernel runs, asked for on another stream.
#[test]
fn scenario_23_another_stream_gets_a_block_when_its_work_is_over() {
    let torch = Torch::budget(16);
    let (one, two) = (torch.world.stream, torch.world.another_stream());
    for bytes in [1024, 4 * P] {
        let block = torch.malloc_on(bytes, one);
        torch.write(block, bytes, 1, one);
        torch.world.sim.hold_stream(one).unwrap();
        torch.world.sum(DeviceAddress(block), bytes, torch.target, DELAY, one);
        assert_eq!(torch.allocator.free(block), Freed::Cached);
        let other = torch.malloc_on(bytes, two);
        assert_ne!(other, block, "its reader has not run");
        torch.write(other, bytes, 2, two);
        // A record is what tells; a request on the first stream makes one.
        let third = torch.malloc_on(bytes, one);
        assert_eq!(third, block);
        torch.allocator.free(third);
        torch.allocator.free(torch.malloc_on(512, one));
        torch.finish(one);
        assert_eq!(torch.world.word(torch.target, one), pattern_sum(bytes, 1));
        torch.world.sim.write_bytes(torch.target, &[0; 8]).unwrap();
        torch.allocator.free(other);
    }
    torch.check();
}

#[test]
fn a_block_goes_to_another_stream_once_its_own_is_done() {
    let torch = Torch::budget(4);
    let (one, two) = (torch.world.stream, torch.world.another_stream());
    let block = torch.malloc_on(4 * P, one);
    torch.write(block, 4 * P, 1, one);
    torch.allocator.free(block);
    // Covered by the next request there.
    assert_eq!(torch.malloc_on(4 * P, one), block);
    torch.allocator.free(block);
    torch.world.sim.stream_synchronize(one).unwrap();
    let other = torch.malloc_on(4 * P, two);
    torch.write(other, 4 * P, 2, two);
    torch.check();
}

/// As `test_record_stream` of PyTorch's own tests.
#[test]
fn a_recorded_block_waits_for_the_other_stream() {
    let torch = Torch::budget(16);
    let (own, used) = (torch.world.another_stream(), torch.world.stream);
    for bytes in [4096, 48 << 10, 2 * P] {
        let block = torch.malloc_on(bytes, own);
        torch.write(block, bytes, 7, own);
        torch.world.sim.stream_synchronize(own).unwrap();
        torch.world.sim.hold_stream(used).unwrap();
        torch.allocator.record_stream(block, used);
        // Enqueued after the record, before the free: it counts.
        torch.world.sum(DeviceAddress(block), bytes, torch.target, DELAY, used);
        assert_eq!(torch.allocator.free(block), Freed::Deferred);
        assert_eq!(torch.allocator.free(block), Freed::Unknown, "freed twice");
        assert_eq!(torch.allocator.statistics().pending_bytes, bytes);
        let other = torch.malloc_on(bytes, own);
        assert_ne!(other, block, "used again too soon");
        torch.write(other, bytes, 8, own);
        check_books(&torch.allocator);
        torch.world.sim.release_stream(used).unwrap();
        assert_eq!(torch.world.word(torch.target, used), pattern_sum(bytes, 7));
        assert_eq!(torch.malloc_on(bytes, own), block, "not used again");
        torch.allocator.free(block);
        torch.allocator.free(other);
        torch.world.sim.write_bytes(torch.target, &[0; 8]).unwrap();
    }
    // The own stream, and the same one twice.
    let block = torch.malloc_on(512, own);
    torch.allocator.record_stream(block, own);
    assert_eq!(torch.allocator.free(block), Freed::Cached);
    torch.check();
}

#[test]
fn default_streams_are_streams() {
    let torch = Torch::budget(16);
    let context = Some(torch.world.runtime.device().context);
    for stream in [Stream::DEFAULT, Stream::LEGACY, Stream::PER_THREAD] {
        for bytes in [512, P, 3 * P] {
            torch.world.sim.ctx_set_current(None).unwrap();
            let block = torch.malloc_on(bytes, stream);
            torch.world.sim.ctx_set_current(context).unwrap();
            torch.write(block, bytes, 1, stream);
            torch.world.sim.ctx_set_current(None).unwrap();
            assert_eq!(torch.allocator.free(block), Freed::Cached);
            assert_eq!(torch.malloc_on(bytes, stream), block);
            torch.allocator.free(block);
            assert_eq!(torch.world.sim.ctx_get_current().unwrap(), None);
        }
    }
    torch.world.sim.ctx_set_current(context).unwrap();
    let none = torch.allocator.malloc(512, Stream::NONE).unwrap_err();
    assert!(!none.is_memory());
    torch.check();
}

/// A graph's memory is its own between its launches, whatever eager code does.
#[test]
fn a_graph_keeps_its_memory_between_launches() {
    for bytes in [2048, 40 << 10, 3 * P] {
        let torch = Torch::budget(32);
        let (stream, eager) = (torch.world.stream, torch.world.another_stream());
        let id = PoolId(0, 1);
        torch.allocator.begin_pool(id, Box::new(move |asked| asked == stream));
        torch.world.sim.begin_capture(stream, CaptureMode::Global).unwrap();
        let one = torch.malloc_on(bytes, stream);
        torch.write(one, bytes, 1, stream);
        torch.sum(one, bytes, stream);
        assert_eq!(torch.allocator.free(one), Freed::Cached);
        // In the order of the graph the block is free again.
        let two = torch.malloc_on(bytes, stream);
        assert_eq!(two, one);
        torch.write(two, bytes, 2, stream);
        torch.sum(two, bytes, stream);
        torch.allocator.free(two);
        let graph = torch.world.sim.end_capture(stream).unwrap();
        torch.allocator.end_pool(id);
        let expected = pattern_sum(bytes, 1).wrapping_add(pattern_sum(bytes, 2));
        for launch in 1..5u64 {
            // Eager code on the same stream and on another one does not get it.
            for (used, seed) in [(stream, 11), (eager, 12)] {
                let block = torch.malloc_on(bytes, used);
                assert_ne!(block, one);
                torch.write(block, bytes, seed, used);
                torch.allocator.free(block);
            }
            torch.allocator.empty_cache().unwrap();
            graph.launch(stream).unwrap();
            let sum = torch.world.word(torch.target, stream);
            assert_eq!(sum, expected.wrapping_mul(launch), "launch {launch} of {bytes} bytes");
        }
        assert!(torch.reserved() > 0);
        drop(graph);
        torch.allocator.release_pool(id);
        torch.allocator.empty_cache().unwrap();
        assert_eq!(torch.reserved(), 0);
        torch.check();
        torch.check_shut();
    }
}

#[test]
fn two_graphs_share_a_pool_and_live_tensors_outlast_it() {
    let torch = Torch::budget(16);
    let stream = torch.world.stream;
    let id = PoolId(3, 4);
    let mut graphs = Vec::new();
    let mut output = 0;
    for _ in 0..2 {
        torch.allocator.begin_pool(id, Box::new(move |asked| asked == stream));
        torch.world.sim.begin_capture(stream, CaptureMode::Relaxed).unwrap();
        output = torch.malloc_on(2 * P, stream);
        torch.write(output, 2 * P, 5, stream);
        graphs.push(torch.world.sim.end_capture(stream).unwrap());
        torch.allocator.end_pool(id);
    }
    assert_eq!(torch.allocator.statistics().pool_bytes, 4 * P);
    for graph in graphs {
        graph.launch(stream).unwrap();
        drop(graph);
        torch.allocator.release_pool(id);
    }
    torch.sum(output, 2 * P, stream);
    assert_eq!(torch.world.word(torch.target, stream), pattern_sum(2 * P, 5));
    torch.allocator.empty_cache().unwrap();
    // Both blocks live still.
    assert_eq!(torch.reserved(), 4);
    assert_eq!(torch.allocator.free(output), Freed::Cached);
    torch.allocator.empty_cache().unwrap();
    assert_eq!(torch.reserved(), 2);
    torch.check();
}

#[test]
fn a_capture_breaks_on_nothing_that_is_freed_meanwhile() {
    let torch = Torch::budget(16);
    let (captured, other) = (torch.world.stream, torch.world.another_stream());
    let before = torch.malloc_on(P, captured);
    torch.write(before, P, 1, captured);
    let recorded = torch.malloc_on(P, other);
    torch.write(recorded, P, 2, other);
    torch.world.sim.stream_synchronize(other).unwrap();
    let id = PoolId(0, 9);
    torch.allocator.begin_pool(id, Box::new(move |asked| asked == captured));
    torch.world.sim.begin_capture(captured, CaptureMode::Global).unwrap();
    torch.sum(before, P, captured);
    torch.allocator.record_stream(recorded, captured);
    assert_eq!(torch.allocator.free(before), Freed::Deferred);
    assert_eq!(torch.allocator.free(recorded), Freed::Deferred);
    // Others go on, and fresh pages are had for the capture.
    let eager = torch.malloc_on(2 * P, other);
    assert!(eager != before && eager != recorded);
    torch.write(eager, 2 * P, 3, other);
    let inside = torch.malloc_on(3 * P, captured);
    torch.write(inside, 3 * P, 4, captured);
    let graph = torch.world.sim.end_capture(captured);
    assert!(graph.is_ok(), "our calls broke the capture");
    torch.allocator.end_pool(id);
    torch.world.sim.stream_synchronize(captured).unwrap();
    let again = [torch.malloc_on(P, captured), torch.malloc_on(P, other)];
    assert_eq!(again, [before, recorded], "what was deferred came free");
    assert_eq!(torch.allocator.statistics().pending_bytes, 0);
    torch.check();
}

/// Threads with sizes and streams of their own, and blocks that change hands between them.
#[test]
fn threads_never_see_others_bytes() {
    let torch = Torch::of(World::with("capacity=64M,granularity=64K", options()));
    let context = Some(torch.world.runtime.device().context);
    let shared = std::sync::Mutex::new(Vec::new());
    let weights = torch.world.vbar(64);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            torch.world.sim.ctx_set_current(context).unwrap();
            for round in 0..200 {
                let budget = (400 + round * 37 % 500) * P;
                torch.world.runtime.set_budget(Some(budget)).unwrap();
                weights.prioritise().unwrap();
                let _ = torch.world.touch(&weights, round % 60..round % 60 + 4);
            }
        });
        for thread in 0..8u64 {
            let (torch, shared) = (&torch, &shared);
            scope.spawn(move || {
                torch.world.sim.ctx_set_current(context).unwrap();
                let stream = torch.world.another_stream();
                let target = torch.world.scratch();
                let (mut random, mut expected) = (Random(thread + 1), 0u64);
                let mut own: Vec<(u64, u64, u64)> = Vec::new();
                for round in 0..400 {
                    if random.below(3) > 0 || own.is_empty() {
                        let bytes = match random.below(8) {
                            0..=4 => 8 + random.below(4 << 10) / 8 * 8,
                            5..=6 => 8 + random.below(P) / 8 * 8,
                            _ => 8 + random.below(4 * P) / 8 * 8,
                        };
                        let Ok(block) = torch.allocator.malloc(bytes as usize, stream) else {
                            continue;
                        };
                        let seed = thread << 32 | round;
                        torch.write(block, bytes, seed, stream);
                        own.push((block, bytes, seed));
                    }
                    if own.len() > 12 || random.below(3) == 0 {
                        let at = random.below(own.len() as u64) as usize;
                        let (block, bytes, seed) = own.swap_remove(at);
                        let source = DeviceAddress(block);
                        torch.world.sum(source, bytes, target, Duration::ZERO, stream);
                        expected = expected.wrapping_add(pattern_sum(bytes, seed));
                        // Another thread frees it, or this one does.
                        if random.below(2) == 0 {
                            shared.lock().unwrap().push(block);
                        } else {
                            assert_ne!(torch.allocator.free(block), Freed::Unknown);
                        }
                    }
                    let other = shared.lock().unwrap().pop();
                    if let Some(block) = other {
                        assert_ne!(torch.allocator.free(block), Freed::Unknown);
                    }
                    if random.below(64) == 0 {
                        torch.allocator.empty_cache().unwrap();
                    }
                }
                assert_eq!(torch.world.word(target, stream), expected, "thread {thread}");
                for (block, ..) in own {
                    torch.allocator.free(block);
                }
            });
        }
    });
    for block in shared.into_inner().unwrap() {
        torch.allocator.free(block);
    }
    torch.allocator.empty_cache().unwrap();
    assert_eq!((torch.reserved(), torch.allocator.statistics().unknown_free), (0, 0));
    torch.check();
}
