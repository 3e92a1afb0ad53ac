//! Other bytes are written after everything that has used the pages, on whatever stream.

use std::time::Duration;

use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode, KernelCall};
use vbar::memory::pager::HeldPins;
use vbar::runtime::FillGuard;
use vbar::units::Stream;
use vbar::{Allocation, AllocationFault, ErrorCode, RuntimeOptions};

use crate::world::{P, World, options, resident};

/// Every unpin records its fence.
fn world(budget_pages: u64) -> World {
    let options = RuntimeOptions {
        budget_bytes: Some(budget_pages * P),
        record_interval: Duration::ZERO,
        ..options()
    };
    World::with("capacity=64M,granularity=64K", options)
}

#[track_caller]
fn refill(allocation: &Allocation, stream: Stream) -> FillGuard<'_> {
    match allocation.fault(stream).unwrap() {
        AllocationFault::Refill(fill) => fill,
        other => panic!("a refill is asked for, not {other:?}"),
    }
}

fn write(world: &World, fill: &FillGuard<'_>, stream: Stream) {
    let (target, bytes) = (fill.address(), fill.bytes());
    let call = KernelCall::Pattern { target, bytes, seed: 1, delay_nanos: 0 };
    world.sim.launch_kernel(call, stream).unwrap();
}

/// Lets a held stream go on, waits for both, and looks for races.
#[track_caller]
fn release_and_check(world: &World, held: Stream) {
    world.sim.release_stream(held).unwrap();
    world.sim.stream_synchronize(held).unwrap();
    world.sim.stream_synchronize(world.stream).unwrap();
    world.check();
}

#[test]
fn a_fill_that_was_given_up_is_done_before_the_next() {
    let world = world(8);
    let other = world.sim.stream_create().unwrap();
    world.sim.module_load().unwrap();
    let vbar = world.vbar(2);
    let allocation = vbar.allocate(P).unwrap();
    world.sim.hold_stream(other).unwrap();
    let fill = refill(&allocation, other);
    write(&world, &fill, other);
    drop(fill);
    let fill = refill(&allocation, world.stream);
    write(&world, &fill, world.stream);
    drop(fill.commit(world.stream).unwrap());
    release_and_check(&world, other);
}

#[test]
fn pages_that_kept_their_bytes_are_written_after_their_readers() {
    let world = world(2);
    let reader = world.sim.stream_create().unwrap();
    world.sim.module_load().unwrap();
    let (vbar, rival) = (world.vbar(2), world.vbar(1));
    let allocation = vbar.allocate(2 * P).unwrap();
    let fill = refill(&allocation, world.stream);
    write(&world, &fill, world.stream);
    drop(fill.commit(world.stream).unwrap());
    // The first page is still being read when the second one loses its frame.
    world.sim.stream_synchronize(world.stream).unwrap();
    let guard = vbar.fault(0..P, reader).unwrap().resident().unwrap();
    world.sim.hold_stream(reader).unwrap();
    let target = guard.address().offset(P / 2);
    let call = KernelCall::Pattern { target, bytes: 8, seed: 2, delay_nanos: 0 };
    world.sim.launch_kernel(call, reader).unwrap();
    drop(guard);
    drop(resident(&world, &rival, 0..1));
    let drawn = vbar.draw(2);
    vbar.prioritise().unwrap();
    let fill = refill(&allocation, world.stream);
    write(&world, &fill, world.stream);
    drop(fill.commit(world.stream).unwrap());
    release_and_check(&world, reader);
    assert_eq!(drawn.chars().nth(1), Some('.'), "{drawn}");
}

#[test]
fn a_frame_keeps_its_users_when_its_next_page_fails() {
    let world = world(1);
    let (reader, other) = (world.sim.stream_create().unwrap(), world.sim.stream_create().unwrap());
    world.sim.module_load().unwrap();
    let (vbar, rival) = (world.vbar(1), world.vbar(2));
    let guard = vbar.fault(0..P, reader).unwrap().resident().unwrap();
    world.sim.hold_stream(reader).unwrap();
    let call = KernelCall::Pattern { target: guard.address(), bytes: P, seed: 1, delay_nanos: 0 };
    world.sim.launch_kernel(call, reader).unwrap();
    drop(guard);
    // The frame is mapped at its next page, whose stream waits for the reader, and then the fence
    // behind its users fails.
    world.sim.fail_nth(Verb::EventRecord, 1, DriverCode::INVALID_VALUE);
    assert!(rival.fault(0..P, world.stream).is_err());
    if let Some(guard) = rival.fault(P..2 * P, other).unwrap().resident() {
        let target = guard.address();
        let call = KernelCall::Pattern { target, bytes: P, seed: 2, delay_nanos: 0 };
        world.sim.launch_kernel(call, other).unwrap();
    }
    release_and_check(&world, reader);
}

#[test]
fn pages_that_were_released_by_force_are_written_after_their_readers() {
    let world = world(8);
    let reader = world.sim.stream_create().unwrap();
    world.sim.module_load().unwrap();
    let vbar = world.vbar(1);
    let allocation = vbar.allocate(P).unwrap();
    let fill = refill(&allocation, world.stream);
    write(&world, &fill, world.stream);
    drop(fill.commit(world.stream).unwrap());
    world.sim.stream_synchronize(world.stream).unwrap();
    let guard = vbar.fault(0..P, reader).unwrap().resident().unwrap();
    world.sim.hold_stream(reader).unwrap();
    let call = KernelCall::Pattern { target: guard.address(), bytes: 8, seed: 2, delay_nanos: 0 };
    world.sim.launch_kernel(call, reader).unwrap();
    drop(guard);
    let token = vbar.fault(0..P, reader).unwrap().resident().unwrap().into_token();
    vbar.end_of_run(world.stream, HeldPins::Release).unwrap();
    let fill = refill(&allocation, world.stream);
    write(&world, &fill, world.stream);
    drop(fill.commit(world.stream).unwrap());
    release_and_check(&world, reader);
    assert_eq!(world.runtime.unpin(token, world.stream).unwrap_err().code(), ErrorCode::StaleToken);
}
