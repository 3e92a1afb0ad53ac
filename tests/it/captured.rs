//! Streams that were captured, and their handles: whose work is known to be done, and what may be
//! asked meanwhile.

use vbar::driver::{CaptureMode, Driver, KernelCall};
use vbar::memory::pager::HeldPins;
use vbar::options::{ContextWaits, RuntimeOptions};
use vbar::units::Stream;
use vbar::{ErrorCode, Vbar};

use crate::world::{P, ROOMY, World, budget_options, resident_on};

/// Writes the first page of a VBAR, some time after the launch.
fn write_late(world: &World, vbar: &Vbar, seed: u64, stream: Stream) {
    let call = KernelCall::Pattern { target: vbar.base(), bytes: P, seed, delay_nanos: 20_000_000 };
    world.sim.launch_kernel(call, stream).unwrap();
}

/// The driver does not tell the id of a stream that is being captured: its uses have a slot of
/// their own until it runs again.
#[test]
fn what_a_stream_used_while_it_was_captured_is_covered_when_it_runs_again() {
    let options = RuntimeOptions { context_waits: ContextWaits::Never, ..budget_options(2) };
    let world = World::with(ROOMY, options);
    let (old, other) = (world.vbar(1), world.vbar(1));
    drop(resident_on(&old, 0..1, Stream::NONE));
    drop(resident_on(&other, 0..1, Stream::NONE));
    // Never seen before.
    let captured = world.another_stream();
    world.sim.begin_capture(captured, CaptureMode::Global).unwrap();
    let guard = resident_on(&old, 0..1, captured);
    let retired = world.runtime.retire_stream(captured).unwrap_err();
    assert_eq!(retired.code(), ErrorCode::Unsupported, "{retired}");
    drop(world.sim.end_capture(captured).expect("our calls broke the capture"));
    drop(guard);
    while old.draw(1) == "P" {
        std::thread::yield_now();
    }
    drop(resident_on(&other, 0..1, captured));
    let freed = old.free_memory(P).unwrap();
    assert_eq!(freed.bytes, P, "{freed:?}");
    world.runtime.retire_stream(captured).unwrap();
    world.check();
}

/// Handles come again. What was enqueued on a stream that was captured once, and is gone, is not
/// known to be done by anything that happens on another stream of the same handle.
#[test]
fn the_next_stream_of_a_captured_ones_handle_vouches_for_nothing() {
    let world = World::budget(2);
    let (old, other) = (world.vbar(1), world.vbar(1));
    drop(resident_on(&old, 0..1, Stream::NONE));
    drop(resident_on(&other, 0..1, Stream::NONE));
    let token = {
        let captured = world.another_stream();
        world.sim.begin_capture(captured, CaptureMode::Global).unwrap();
        let token = resident_on(&old, 0..1, captured).into_token();
        drop(world.sim.end_capture(captured).unwrap());
        // Used after the capture, too.
        write_late(&world, &old, 1, captured);
        world.sim.stream_destroy(captured).unwrap();
        let again = world.another_stream();
        assert_eq!(again, captured, "the handle comes again");
        token
    };
    world.runtime.unpin(token, Stream::NONE).unwrap();
    let again = world.another_stream();
    drop(resident_on(&other, 0..1, again));
    while old.draw(1) == "P" {
        std::thread::yield_now();
    }
    let freed = old.free_memory(P).unwrap();
    assert!(freed.bytes == P || freed.shortfall.is_some());
    world.check();
}

/// Unpins of a guard from a capture that come after it, when the stream runs again, are covered.
#[test]
fn guards_of_a_capture_that_go_late_leave_nothing_uncovered() {
    let options = RuntimeOptions { context_waits: ContextWaits::Never, ..budget_options(8) };
    let world = World::with(ROOMY, options);
    let vbar = world.vbar(8);
    (0..8).for_each(|page| drop(resident_on(&vbar, page..page + 1, Stream::NONE)));
    for stream in [world.another_stream(), Stream::PER_THREAD] {
        world.sim.begin_capture(stream, CaptureMode::Global).unwrap();
        let guards: Vec<_> = (0..8).map(|at| resident_on(&vbar, at..at + 1, stream)).collect();
        drop(world.sim.end_capture(stream).unwrap());
        drop(guards);
        while vbar.draw(8).contains('P') {
            std::thread::yield_now();
        }
        vbar.end_of_run(stream, HeldPins::Keep).unwrap();
        world.sim.ctx_synchronize().unwrap();
        assert_eq!(vbar.free_memory(8 * P).unwrap().bytes, 8 * P, "{stream:?}");
        (0..8).for_each(|page| drop(resident_on(&vbar, page..page + 1, Stream::NONE)));
    }
    world.check();
}

/// Whatever asks about events says that it may: slots of streams that went, a fifth stream's stamp,
/// slots of the ring that are given back.
#[test]
fn questions_about_events_break_no_capture() {
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal] {
        let world = World::budget(2);
        let vbar = world.vbar(2);
        drop(resident_on(&vbar, 0..1, Stream::NONE));
        let held = world.another_stream();
        world.sim.hold_stream(held).unwrap();
        for _ in 0..200 {
            let stream = world.another_stream();
            drop(resident_on(&vbar, 0..1, stream));
            world.runtime.retire_stream(stream).unwrap();
        }
        let captured = world.another_stream();
        world.sim.begin_capture(captured, mode).unwrap();
        for _ in 0..60 {
            // New ones, and more of them than a page remembers.
            drop(resident_on(&vbar, 0..1, world.another_stream()));
        }
        drop(resident_on(&vbar, 0..1, captured));
        world.runtime.trim_host(0).unwrap();
        let graph = world.sim.end_capture(captured);
        assert!(graph.is_ok(), "{mode:?}: our calls broke the capture");
        world.sim.release_stream(held).unwrap();
        world.check();
    }
}

/// The destructor of what a graph holds runs when its launches are done, so they are.
#[test]
fn what_a_launched_graph_held_may_go_when_it_has_let_go() {
    let world = World::budget(2);
    let vbar = world.vbar(1);
    drop(resident_on(&vbar, 0..1, Stream::NONE));
    let stream = world.another_stream();
    world.sim.begin_capture(stream, CaptureMode::Global).unwrap();
    let guard = resident_on(&vbar, 0..1, stream);
    world.write(guard.address(), P, 3, stream);
    drop(guard);
    let graph = world.sim.end_capture(stream).unwrap();
    graph.launch(stream).unwrap();
    drop(graph);
    while vbar.draw(1) == "P" {
        std::thread::yield_now();
    }
    assert_eq!(vbar.free_memory(P).unwrap().bytes, P);
    world.check();
}
