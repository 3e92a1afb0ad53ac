//! Several ranges faulted together: one fence for all of them, and no pin that stays.

use std::ops::Range;

use vbar::driver::sim::Verb;
use vbar::driver::{CaptureMode, Driver, DriverCode};
use vbar::memory::pager::HeldPins;
use vbar::units::Stream;
use vbar::{ErrorCode, Fault, Guards, Vbar};

use crate::world::{P, World};

/// Small ranges, several to a page, over `pages` pages.
fn small(vbar: &Vbar, pages: u64) -> Vec<(&Vbar, Range<u64>)> {
    let size = P / 8;
    (0..8 * pages).map(|at| (vbar, at * size..(at + 1) * size)).collect()
}

#[track_caller]
fn many<'a>(world: &World, ranges: &[(&'a Vbar, Range<u64>)], stream: Stream) -> Guards<'a> {
    match world.runtime.fault_many(ranges, stream).unwrap() {
        Fault::Resident(guards) => guards,
        other => panic!("not on the device: {other:?}"),
    }
}

fn pins(vbar: &Vbar) -> Vec<u32> {
    vbar.residency().iter().map(|page| page.pins).collect()
}

/// A world whose VBARs exceed the budget, so that each unpin records.
fn crowded() -> (World, Vbar, Vbar) {
    let world = World::budget(4);
    let (ours, crowd) = (world.vbar(2), world.vbar(4));
    world.touch(&crowd, 3..4).unwrap();
    world.touch(&ours, 0..2).unwrap();
    (world, ours, crowd)
}

#[test]
fn ranges_that_end_together_have_one_fence() {
    let (world, ours, _crowd) = crowded();
    let ranges = small(&ours, 2);
    let asked = |verbs: &[Verb]| verbs.iter().map(|verb| world.sim.calls(*verb)).sum::<u64>();
    let (records, looks) = ([Verb::EventRecord], [Verb::StreamIsCapturing, Verb::StreamGetId]);
    world.sim.stream_synchronize(world.stream).unwrap();
    let before = (asked(&records), asked(&looks));
    let hits = world.runtime.statistics().hits;
    let guards = many(&world, &ranges, world.stream);
    assert_eq!((guards.len(), pins(&ours)), (16, vec![8, 8]));
    assert_eq!(guards[9].address(), ours.base().offset(9 * P / 8));
    assert_eq!(world.runtime.statistics().hits, hits + 1);
    drop(guards);
    assert_eq!(asked(&records), before.0 + 1);
    assert!(asked(&looks) <= before.1 + 4, "the stream is asked once for all");
    assert_eq!(pins(&ours), [0, 0]);
    // One by one each has its own.
    many(&world, &ranges, world.stream).into_iter().for_each(drop);
    assert_eq!(asked(&records), before.0 + 1 + 16);
    assert_eq!(pins(&ours), [0, 0]);
    world.check();
}

#[test]
fn a_fence_that_cannot_be_recorded_keeps_no_pin() {
    let (world, ours, crowd) = crowded();
    let guards = many(&world, &small(&ours, 2), world.stream);
    world.sim.fail_nth(Verb::EventRecord, 1, DriverCode::INVALID_VALUE);
    guards.unpin().unwrap();
    assert_eq!(pins(&ours), [0, 0]);
    // The next use of the stream covers what the lost record would have.
    drop(many(&world, &small(&ours, 1), world.stream));
    world.touch(&crowd, 0..4).unwrap();
    world.check();
}

#[test]
fn a_forced_end_of_run_makes_only_its_own_pins_stale() {
    let world = World::budget(4);
    let (one, two) = (world.vbar(1), world.vbar(1));
    let ranges = [small(&one, 1), small(&two, 1)].concat();
    drop(many(&world, &ranges, world.stream));
    let guards = many(&world, &ranges, world.stream);
    one.end_of_run(world.stream, HeldPins::Release).unwrap();
    assert_eq!((pins(&one), pins(&two)), (vec![0], vec![8]));
    assert_eq!(guards.unpin().unwrap_err().code(), ErrorCode::StaleToken);
    assert_eq!((pins(&one), pins(&two)), (vec![0], vec![0]));
    world.check();
}

#[test]
fn a_range_that_is_not_there_pins_none_of_the_others() {
    let world = World::budget(2);
    let (one, two) = (world.vbar(2), world.vbar(2));
    let held = many(&world, &small(&one, 2), world.stream);
    let ranges = [small(&one, 1), small(&two, 1)].concat();
    assert!(world.runtime.fault_many(&ranges, world.stream).unwrap().offloaded().is_some());
    assert_eq!(pins(&one), [8, 8]);
    two.close();
    let error = world.runtime.fault_many(&ranges, world.stream).map(drop).unwrap_err();
    assert_eq!((error.code(), pins(&one)), (ErrorCode::Closed, vec![8, 8]));
    drop(held);
    world.check();
}

#[test]
fn guards_that_end_in_a_capture_leave_their_pages_to_the_graph() {
    for within in [false, true] {
        let world = World::budget(4);
        let vbar = world.vbar(2);
        world.touch(&vbar, 0..2).unwrap();
        world.sim.stream_synchronize(world.stream).unwrap();
        let ranges = small(&vbar, 2);
        let before = (!within).then(|| many(&world, &ranges, world.stream));
        world.sim.begin_capture(world.stream, CaptureMode::Relaxed).unwrap();
        let guards = before.unwrap_or_else(|| many(&world, &ranges, world.stream));
        guards.unpin().unwrap();
        assert_eq!(pins(&vbar), [8, 8], "within: {within}");
        let graph = world.sim.end_capture(world.stream).unwrap();
        drop(graph);
        while pins(&vbar) != [0, 0] {
            std::thread::yield_now();
        }
        world.check();
    }
}

#[test]
fn implicit_streams_and_none_are_as_good() {
    let (world, ours, _crowd) = crowded();
    for stream in [Stream::LEGACY, Stream::PER_THREAD, Stream::NONE] {
        drop(many(&world, &small(&ours, 2), stream));
        assert_eq!(pins(&ours), [0, 0], "{stream:?}");
    }
    // The per-thread default stream of another thread is another one: nothing is recorded on it.
    let guards = many(&world, &small(&ours, 2), Stream::PER_THREAD);
    std::thread::scope(|scope| {
        scope.spawn(|| guards.unpin().unwrap());
    });
    assert_eq!(pins(&ours), [0, 0]);
    world.check();
}
