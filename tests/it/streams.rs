//! Streams, fences and captures: work is ordered without the CPU, and nobody's capture breaks.

use std::time::Duration;

use vbar::driver::sim::Verb;
use vbar::driver::{CaptureMode, Driver, DriverCode, KernelCall};
use vbar::memory::pager::HeldPins;
use vbar::options::{ContextWaits, RuntimeOptions};
use vbar::units::Stream;
use vbar::{Allocation, AllocationFault, Fault, Reason, Vbar, WaitKind};

use crate::engine_more::eventually;
use crate::world::{P, ROOMY, World, budget_options, fault, pattern_sum, resident, resident_on};

const DELAY: Duration = Duration::from_millis(1);

/// Fills an allocation with the pattern of `seed` on `stream`.
#[track_caller]
fn fill(world: &World, allocation: &Allocation, seed: u64, stream: Stream) {
    match allocation.fault(stream).unwrap() {
        AllocationFault::Refill(fill) => {
            world.write(fill.address(), fill.bytes(), seed, stream);
            drop(fill.commit(stream).unwrap());
        }
        other => panic!("a refill is due, not {other:?}"),
    }
}

/// Reads an allocation on `stream`; its bytes are the pattern of `seed`.
#[track_caller]
fn check_bytes(world: &World, allocation: &Allocation, seed: u64, stream: Stream) {
    let target = world.scratch();
    match allocation.fault(stream).unwrap() {
        AllocationFault::Resident(guard) => {
            world.sum(guard.address(), guard.bytes(), target, DELAY, stream);
            let bytes = guard.bytes();
            drop(guard);
            assert_eq!(world.word(target, stream), pattern_sum(bytes, seed));
        }
        other => panic!("the bytes are there, not {other:?}"),
    }
}

#[test]
fn a_commit_on_one_stream_is_waited_for_on_another() {
    let world = World::budget(4);
    let vbar = world.vbar(2);
    let (writer, reader) = (world.stream, world.another_stream());
    let allocation = vbar.allocate(P + P / 2).unwrap();
    world.sim.hold_stream(writer).unwrap();
    fill(&world, &allocation, 5, writer);
    let target = world.scratch();
    let AllocationFault::Resident(guard) = allocation.fault(reader).unwrap() else {
        panic!("committed");
    };
    world.sum(guard.address(), guard.bytes(), target, Duration::ZERO, reader);
    drop(guard);
    world.sim.release_stream(writer).unwrap();
    assert_eq!(world.word(target, reader), pattern_sum(P + P / 2, 5));
    world.check();
}

#[test]
fn two_streams_on_one_page_are_both_waited_for() {
    for _ in 0..50 {
        let world = World::budget(1);
        let (old, new) = (world.vbar(1), world.vbar(1));
        let (one, two) = (world.stream, world.another_stream());
        let target = world.scratch();
        let allocation = old.allocate(P).unwrap();
        fill(&world, &allocation, 1, one);
        for stream in [one, two] {
            let AllocationFault::Resident(guard) = allocation.fault(stream).unwrap() else {
                panic!("committed");
            };
            world.sum(guard.address(), P, target, DELAY, stream);
        }
        let other = new.allocate(P).unwrap();
        let third = world.another_stream();
        fill(&world, &other, 2, third);
        world.sim.ctx_synchronize().unwrap();
        assert_eq!(world.word(target, third), pattern_sum(P, 1).wrapping_mul(2));
        check_bytes(&world, &other, 2, one);
        world.check();
    }
}

#[test]
fn default_streams_work_with_and_without_a_current_context() {
    for stream in [Stream::DEFAULT, Stream::LEGACY, Stream::PER_THREAD] {
        let world = World::budget(1);
        let (old, new) = (world.vbar(1), world.vbar(1));
        let (one, two) = (old.allocate(P).unwrap(), new.allocate(P).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // No context is current here, except for the launches themselves.
                let context = Some(world.runtime.device().context);
                for round in 0..10 {
                    for (bar, allocation) in [(&old, &one), (&new, &two)] {
                        bar.prioritise().unwrap();
                        world.sim.ctx_set_current(None).unwrap();
                        let AllocationFault::Refill(fill) = allocation.fault(stream).unwrap()
                        else {
                            panic!("{stream:?}: a refill is due");
                        };
                        world.sim.ctx_set_current(context).unwrap();
                        world.write(fill.address(), P, round, stream);
                        world.sim.ctx_set_current(None).unwrap();
                        let guard = fill.commit(stream).unwrap();
                        drop(guard);
                        let hit = allocation.fault(stream).unwrap();
                        assert!(matches!(hit, AllocationFault::Resident(_)), "{hit:?}");
                        drop(hit);
                        assert_eq!(world.sim.ctx_get_current().unwrap(), None);
                    }
                }
            });
        });
        world.check();
    }
}

#[test]
fn a_hit_on_a_late_page_needs_no_context_and_breaks_no_capture() {
    let world = World::budget(1);
    let (old, new) = (world.vbar(1), world.vbar(1));
    let (second, reader, captured) =
        (world.another_stream(), world.another_stream(), world.another_stream());
    world.sim.hold_stream(world.stream).unwrap();
    let guard = resident(&world, &old, 0..1);
    world.write(guard.address(), P, 3, world.stream);
    drop(guard);
    drop(resident_on(&new, 0..1, second));
    assert_eq!(new.draw(1), "i");
    world.sim.begin_capture(captured, CaptureMode::Global).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            drop(resident_on(&new, 0..1, reader));
            world.sim.release_stream(world.stream).unwrap();
            // The CPU waits, asking about an event.
            drop(resident_on(&new, 0..1, Stream::NONE));
            assert_eq!(world.sim.ctx_get_current().unwrap(), None);
        });
    });
    assert!(world.sim.end_capture(captured).is_ok(), "our calls broke the capture");
    // The unpins of that thread were recorded: nothing waits for the context.
    assert_eq!(new.free_memory(P).unwrap().bytes, P);
    assert_eq!(world.runtime.statistics().waited(WaitKind::Context).count, 0);
    world.check();
}

/// A residency map is of what is there, not of what somebody has noticed.
#[test]
fn a_residency_map_tells_of_bytes_that_have_arrived_and_breaks_no_capture() {
    let world = World::budget(2);
    let (old, new) = (world.vbar(2), world.vbar(2));
    let (second, captured) = (world.another_stream(), world.another_stream());
    world.sim.hold_stream(world.stream).unwrap();
    let guard = resident(&world, &old, 0..2);
    world.write(guard.address(), 2 * P, 3, world.stream);
    drop(guard);
    drop(resident_on(&new, 0..2, second));
    let states = || new.residency().iter().map(|page| page.drawn).collect::<String>();
    world.sim.begin_capture(captured, CaptureMode::Global).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let asked = world.sim.calls(Verb::EventQuery);
            assert_eq!(states(), "ii");
            // About one stream it is asked once.
            assert_eq!(world.sim.calls(Verb::EventQuery) - asked, 1);
            world.sim.fail_next_n(Verb::CtxSetCurrent, 1, DriverCode::INVALID_CONTEXT);
            assert_eq!(states(), "ii", "of a driver that cannot be asked");
            world.sim.release_stream(world.stream).unwrap();
            eventually("the pages are there", || states() == "##");
            assert_eq!(world.sim.ctx_get_current().unwrap(), None);
            let calls = || Verb::ALL.iter().map(|verb| world.sim.calls(*verb)).sum::<u64>();
            let known = calls();
            assert_eq!(states(), "##");
            assert_eq!(calls(), known, "what is known is not asked");
        });
    });
    assert!(world.sim.end_capture(captured).is_ok(), "our calls broke the capture");
    world.check();
}

#[test]
fn a_per_thread_stream_is_not_another_threads() {
    let world = World::budget(1);
    let (old, new) = (world.vbar(1), world.vbar(1));
    let target = world.scratch();
    let context = Some(world.runtime.device().context);
    let stream = Stream::PER_THREAD;
    let allocation = old.allocate(P).unwrap();
    let token = std::thread::scope(|scope| {
        let work = scope.spawn(|| {
            world.sim.ctx_set_current(context).unwrap();
            fill(&world, &allocation, 9, stream);
            let AllocationFault::Resident(guard) = allocation.fault(stream).unwrap() else {
                panic!("committed");
            };
            world.sum(guard.address(), P, target, Duration::from_millis(20), stream);
            guard.into_token()
        });
        work.join().unwrap()
    });
    // On this thread the handle names another stream, whose fences say nothing of that work.
    world.runtime.unpin(token, stream).unwrap();
    let guard = resident(&world, &new, 0..1);
    world.write(guard.address(), P, 1, world.stream);
    drop(guard);
    world.sim.ctx_synchronize().unwrap();
    assert_eq!(world.word(target, world.stream), pattern_sum(P, 9));
    world.check();
}

#[test]
fn without_a_stream_only_passed_frames_are_taken() {
    let world = World::budget(1);
    let (old, new) = (world.vbar(1), world.vbar(1));
    let guard = resident(&world, &old, 0..1);
    world.sim.hold_stream(world.stream).unwrap();
    world.write(guard.address(), P, 1, world.stream);
    drop(guard);
    let outcome = new.fault(0..P, Stream::NONE).unwrap();
    assert_eq!(outcome.offloaded(), Some(Reason::FencePending));
    assert_eq!(world.runtime.statistics().refused(Reason::FencePending), 1);
    world.sim.release_stream(world.stream).unwrap();
    world.sim.stream_synchronize(world.stream).unwrap();
    drop(resident_on(&new, 0..1, Stream::NONE));
    world.check();
}

#[test]
fn a_stream_destroyed_unretired_is_not_its_successor() {
    let world = World::with(
        ROOMY,
        RuntimeOptions { record_interval: Duration::from_secs(1000), ..budget_options(1) },
    );
    let (old, new) = (world.vbar(1), world.vbar(1));
    let target = world.scratch();
    for round in 0..20 {
        old.prioritise().unwrap();
        let stream = world.another_stream();
        let guard = resident_on(&old, 0..1, stream);
        world.write(guard.address(), P, round, stream);
        world.sum(guard.address(), P, target, DELAY, stream);
        drop(guard);
        world.sim.stream_destroy(stream).unwrap();
        let again = world.another_stream();
        assert_eq!(again, stream, "the handle comes again");
        new.prioritise().unwrap();
        let guard = resident_on(&new, 0..1, again);
        world.write(guard.address(), P, !round, again);
        drop(guard);
        world.sim.stream_destroy(again).unwrap();
    }
    world.sim.ctx_synchronize().unwrap();
    let sums = (0..20).map(|round| pattern_sum(P, round)).fold(0, u64::wrapping_add);
    assert_eq!(world.word(target, world.stream), sums);
    world.check();
}

#[test]
fn what_no_fence_covers_is_refused_when_the_context_may_not_be_waited_for() {
    let world = World::with(
        ROOMY,
        RuntimeOptions {
            record_interval: Duration::from_secs(1000),
            context_waits: ContextWaits::Never,
            ..budget_options(1)
        },
    );
    let (old, new) = (world.vbar(1), world.vbar(1));
    let other = world.another_stream();
    drop(resident_on(&old, 0..1, other));
    assert_eq!(world.touch(&new, 0..1), Err(Reason::FenceUnknown));
    world.runtime.retire_stream(other).unwrap();
    assert_eq!(world.touch(&new, 0..1), Ok(()));
    // What the caller's own stream did is covered by a fence as soon as it comes back.
    assert_eq!(world.touch(&world.vbar(1), 0..1), Ok(()));
    world.check();
}

#[test]
fn nine_streams_on_one_page_are_all_waited_for() {
    let world = World::budget(1);
    let (old, new) = (world.vbar(1), world.vbar(1));
    let target = world.scratch();
    let allocation = old.allocate(P).unwrap();
    fill(&world, &allocation, 4, world.stream);
    let streams: Vec<_> = (0..9).map(|_| world.another_stream()).collect();
    for stream in &streams {
        let AllocationFault::Resident(guard) = allocation.fault(*stream).unwrap() else {
            panic!("committed");
        };
        world.sum(guard.address(), P, target, DELAY, *stream);
    }
    let guard = resident(&world, &new, 0..1);
    world.write(guard.address(), P, 1, world.stream);
    drop(guard);
    world.sim.ctx_synchronize().unwrap();
    assert_eq!(world.word(target, world.stream), pattern_sum(P, 4).wrapping_mul(9));
    world.check();
}

#[test]
fn hundreds_of_streams_come_and_go() {
    let world = World::budget(2);
    let vbar = world.vbar(4);
    for round in 0..700u64 {
        let stream = world.another_stream();
        drop(resident_on(&vbar, round % 2..round % 2 + 1, stream));
        if round % 3 == 0 {
            world.runtime.retire_stream(stream).unwrap();
        }
        world.sim.stream_destroy(stream).unwrap();
    }
    assert_eq!(vbar.free_memory(u64::MAX).unwrap().bytes, 2 * P);
    world.check();
}

/// The events of a stream that is gone serve those that come.
#[test]
fn streams_that_come_and_go_leave_no_events() {
    let world = World::budget(2);
    let vbar = world.vbar(4);
    let mut counts = Vec::new();
    for _ in 0..200 {
        let stream = world.another_stream();
        for page in [0, 1, 0] {
            drop(resident_on(&vbar, page..page + 1, stream));
        }
        world.runtime.retire_stream(stream).unwrap();
        world.sim.stream_synchronize(stream).unwrap();
        world.sim.stream_destroy(stream).unwrap();
        counts.push(world.sim.live_events());
    }
    assert!(counts[199] <= counts[9], "{counts:?}");
    world.check();
}

#[test]
fn a_forced_end_of_run_waits_for_the_holders_work() {
    let world = World::budget(1);
    let (old, new) = (world.vbar(1), world.vbar(1));
    let target = world.scratch();
    let allocation = old.allocate(P).unwrap();
    fill(&world, &allocation, 7, world.stream);
    let AllocationFault::Resident(guard) = allocation.fault(world.stream).unwrap() else {
        panic!("committed");
    };
    world.sum(guard.address(), P, target, Duration::from_millis(20), world.stream);
    let held = old.end_of_run(world.stream, HeldPins::Release).unwrap().held;
    assert_eq!(held.len(), 1);
    let other = world.another_stream();
    let thief = resident_on(&new, 0..1, other);
    world.write(thief.address(), P, 1, other);
    drop(thief);
    world.sim.ctx_synchronize().unwrap();
    assert_eq!(world.word(target, world.stream), pattern_sum(P, 7));
    assert!(guard.unpin().is_err());
    world.check();
}

#[test]
fn a_hit_on_a_capturing_stream_pins_until_the_graph_is_gone() {
    // The guard goes in the capture, or after it.
    for late in [false, true] {
        let world = World::budget(2);
        let (old, new) = (world.vbar(1), world.vbar(2));
        let target = world.scratch();
        let allocation = old.allocate(P).unwrap();
        fill(&world, &allocation, 6, world.stream);
        world.sim.begin_capture(world.stream, CaptureMode::Global).unwrap();
        let AllocationFault::Resident(guard) = allocation.fault(world.stream).unwrap() else {
            panic!("committed");
        };
        world.sum(guard.address(), P, target, Duration::ZERO, world.stream);
        let graph = if late {
            let graph = world.sim.end_capture(world.stream).unwrap();
            drop(guard);
            graph
        } else {
            drop(guard);
            world.sim.end_capture(world.stream).unwrap()
        };
        assert_eq!(old.draw(1), "P");
        let other = world.another_stream();
        let outcome = new.fault(0..2 * P, other).unwrap();
        assert_eq!(outcome.offloaded(), Some(Reason::AllPinned));
        let thief = resident_on(&new, 0..1, other);
        world.write(thief.address(), P, 1, other);
        drop(thief);
        for launch in 1..=3u64 {
            graph.launch(world.stream).unwrap();
            let sum = pattern_sum(P, 6).wrapping_mul(launch);
            assert_eq!(world.word(target, world.stream), sum, "late: {late}");
        }
        drop(graph);
        while old.draw(1) == "P" {
            std::thread::yield_now();
        }
        drop(resident_on(&new, 0..2, other));
        world.check();
    }
}

#[test]
fn a_miss_on_a_capturing_stream_is_offloaded_and_breaks_nothing() {
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        let world = World::budget(2);
        let vbar = world.vbar(2);
        let fresh = vbar.allocate(P).unwrap();
        let target = world.scratch();
        let other = world.another_stream();
        drop(resident_on(&vbar, 0..1, other));
        world.sim.begin_capture(world.stream, mode).unwrap();
        assert_eq!(fault(&world, &vbar, 1..2).offloaded(), Some(Reason::Capture));
        let refill = fresh.fault(world.stream).unwrap();
        let AllocationFault::Offloaded(refusal) = refill else { panic!("{refill:?}") };
        assert_eq!((refusal.reason, refusal.needed_bytes), (Reason::Capture, P));
        assert_eq!(world.runtime.statistics().refused(Reason::Capture), 2);
        world.sum(target, 8, target.offset(8), Duration::ZERO, world.stream);
        let graph = world.sim.end_capture(world.stream).unwrap();
        assert_eq!(graph.operation_count(), 1);
        world.check();
    }
}

#[test]
fn other_streams_go_on_while_one_is_captured() {
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        let world = World::budget(1);
        let (old, new) = (world.vbar(1), world.vbar(1));
        let captured = world.another_stream();
        let allocation = old.allocate(P).unwrap();
        world.sim.hold_stream(world.stream).unwrap();
        fill(&world, &allocation, 1, world.stream);
        world.sim.begin_capture(captured, mode).unwrap();
        // A hit on a page that is on its way, unpins that ask about events, evictions, releases.
        let third = world.another_stream();
        let hit = allocation.fault(third).unwrap();
        assert!(matches!(hit, AllocationFault::Resident(_)), "{hit:?}");
        drop(hit);
        world.sim.release_stream(world.stream).unwrap();
        for _ in 0..3 {
            for bar in [&new, &old] {
                bar.prioritise().unwrap();
                let guard = resident_on(bar, 0..1, third);
                world.write(guard.address(), P, 2, third);
                drop(guard);
            }
        }
        assert_eq!(old.free_memory(P).unwrap().bytes, P);
        world.runtime.trim(0).unwrap();
        old.end_of_run(third, HeldPins::Keep).unwrap();
        world.runtime.retire_stream(third).unwrap();
        let graph = world.sim.end_capture(captured);
        assert!(graph.is_ok(), "{mode:?}: our calls broke the capture");
        world.check();
    }
}

#[test]
fn the_context_is_not_waited_for_while_a_known_stream_is_captured() {
    let world = World::with(
        ROOMY,
        RuntimeOptions { record_interval: Duration::from_secs(1000), ..budget_options(1) },
    );
    let (old, new) = (world.vbar(1), world.vbar(1));
    drop(resident_on(&old, 0..1, world.another_stream()));
    let captured = world.another_stream();
    world.sim.begin_capture(captured, CaptureMode::Relaxed).unwrap();
    assert!(new.fault(0..P, captured).unwrap().offloaded().is_some());
    assert_eq!(world.touch(&new, 0..1), Err(Reason::FenceUnknown));
    assert_eq!(old.free_memory(P).unwrap().bytes, 0);
    world.sim.end_capture(captured).unwrap();
    // Known again as a stream like others once it is seen.
    drop(new.fault(0..0, captured).unwrap());
    assert_eq!(world.touch(&new, 0..1), Ok(()));
    world.check();
}

#[test]
fn the_legacy_stream_counts_as_capturing_while_another_is() {
    let world = World::budget(2);
    let vbar = world.vbar(2);
    drop(resident_on(&vbar, 0..1, Stream::NONE));
    let target = world.scratch();
    world.sim.begin_capture(world.stream, CaptureMode::Global).unwrap();
    let miss = vbar.fault(P..2 * P, Stream::LEGACY).unwrap();
    assert_eq!(miss.offloaded(), Some(Reason::Capture));
    let Fault::Resident(hit) = vbar.fault(0..P, Stream::LEGACY).unwrap() else {
        panic!("a hit pins and answers");
    };
    drop(hit);
    world.sum(target, 8, target.offset(8), Duration::ZERO, world.stream);
    let graph = world.sim.end_capture(world.stream);
    assert!(graph.is_ok(), "our calls broke the capture");
    world.check();
}

/// Writes the first page of a VBAR, some time after the launch.
fn write_late(world: &World, vbar: &Vbar, seed: u64, stream: Stream) {
    let (target, bytes, delay_nanos) = (vbar.base(), P, DELAY.as_nanos() as u64 * 20);
    let call = KernelCall::Pattern { target, bytes, seed, delay_nanos };
    world.sim.launch_kernel(call, stream).unwrap();
}

/// A stream's handle is good only during the call that it is given to: a token whose stream is gone
/// is given back without it, and its pages wait for the context instead of a fence.
#[test]
fn a_token_outlives_its_stream() {
    let world = World::budget(1);
    let (old, new) = (world.vbar(1), world.vbar(1));
    let gone = world.another_stream();
    let token = old.fault(0..P, gone).unwrap().resident().unwrap().into_token();
    write_late(&world, &old, 3, gone);
    world.sim.stream_destroy(gone).unwrap();
    let reused = world.another_stream();
    let asked = world.sim.calls(Verb::StreamIsCapturing);
    world.runtime.unpin(token, Stream::NONE).unwrap();
    assert_eq!(world.sim.calls(Verb::StreamIsCapturing), asked, "a handle was used that is gone");
    drop(new.fault(0..P, reused).unwrap().resident().expect("after a wait for the context"));
    assert!(world.runtime.statistics().waited(WaitKind::Context).count > 0);
    world.check();
}

/// Named with another stream, the pages wait for both.
#[test]
fn a_token_can_be_given_back_on_another_stream() {
    let world = World::budget(1);
    let (old, new) = (world.vbar(1), world.vbar(1));
    let other = world.another_stream();
    let token = resident(&world, &old, 0..1).into_token();
    world.write(old.base(), P, 1, world.stream);
    world.sim.stream_synchronize(world.stream).unwrap();
    write_late(&world, &old, 2, other);
    world.runtime.unpin(token, other).unwrap();
    let guard = resident(&world, &new, 0..1);
    world.write(guard.address(), P, 3, world.stream);
    drop(guard);
    world.sim.ctx_synchronize().unwrap();
    world.check();
}

#[test]
fn an_unpin_on_another_thread_forgets_no_other_streams_use() {
    let options = RuntimeOptions { context_waits: ContextWaits::Never, ..budget_options(1) };
    let world = World::with(ROOMY, options);
    let (vbar, other) = (world.vbar(1), world.vbar(1));
    let context = world.runtime.device().context;
    world.sim.ctx_set_current(Some(context)).unwrap();
    // A default stream, which is another one on another thread.
    let token = resident_on(&vbar, 0..1, Stream::PER_THREAD).into_token();
    // The page remembers four streams, of which the first still reads when the others are done.
    let readers: Vec<Stream> = (0..4).map(|_| world.another_stream()).collect();
    for reader in &readers {
        world.sim.hold_stream(*reader).unwrap();
        let guard = resident_on(&vbar, 0..1, *reader);
        world.sum(guard.address(), P, world.scratch(), Duration::ZERO, *reader);
        drop(guard);
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            world.sim.ctx_set_current(Some(context)).unwrap();
            world.runtime.unpin(token, Stream::PER_THREAD).unwrap();
        });
    });
    for reader in &readers[1..] {
        world.sim.release_stream(*reader).unwrap();
        world.sim.stream_synchronize(*reader).unwrap();
    }
    vbar.end_of_run(Stream::PER_THREAD, HeldPins::Keep).unwrap();
    world.sim.stream_synchronize(Stream::PER_THREAD).unwrap();
    let taken = other.fault(0..P, Stream::NONE).unwrap();
    assert!(taken.offloaded().is_some(), "the page is still read: {taken:?}");
    world.sim.release_stream(readers[0]).unwrap();
    world.sim.stream_synchronize(readers[0]).unwrap();
    world.check();
}
