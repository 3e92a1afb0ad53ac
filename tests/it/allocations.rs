//! What an allocation promises: bytes that were committed and not lost, and one writer at a time.

use std::time::Duration;

use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode};
use vbar::memory::pager::{HeldPins, Shortfall};
use vbar::options::{Eviction, RuntimeOptions};
use vbar::units::Stream;
use vbar::{Allocation, AllocationFault, ErrorCode, Fault, Reason, WaitKind};

use crate::world::{
    DEVICE, P, ROOMY, World, budget_options, drawn, pattern_bytes, pattern_sum, resident,
    resident_on,
};

#[track_caller]
fn refill<'a>(allocation: &'a Allocation, stream: Stream) -> vbar::runtime::FillGuard<'a> {
    match allocation.fault(stream).unwrap() {
        AllocationFault::Refill(fill) => fill,
        other => panic!("a refill is due, not {other:?}"),
    }
}

#[track_caller]
fn hit<'a>(allocation: &'a Allocation, stream: Stream) -> vbar::Guard<'a> {
    match allocation.fault(stream).unwrap() {
        AllocationFault::Resident(guard) => guard,
        other => panic!("the bytes are there, not {other:?}"),
    }
}

#[test]
fn bytes_are_valid_from_commit_until_they_are_lost() {
    let world = World::budget(2);
    let vbar = world.vbar(2);
    let allocation = vbar.allocate(P).unwrap();
    let fill = refill(&allocation, world.stream);
    world.write(fill.address(), P, 1, world.stream);
    assert!(matches!(allocation.fault(world.stream).unwrap(), AllocationFault::Busy));
    drop(fill);
    // Dropped without a commit: the bytes do not count.
    let fill = refill(&allocation, world.stream);
    world.write(fill.address(), P, 2, world.stream);
    let guard = fill.commit(world.stream).unwrap();
    let signature = guard.signature().to_vec();
    drop(guard);
    assert_eq!(hit(&allocation, world.stream).signature(), signature);
    allocation.invalidate();
    drop(refill(&allocation, world.stream).commit(world.stream).unwrap());
    vbar.free_memory(P).unwrap();
    vbar.prioritise().unwrap();
    let guard = refill(&allocation, world.stream).commit(Stream::NONE).unwrap();
    assert_ne!(guard.signature(), signature);
    drop(guard);
    vbar.end_of_run(world.stream, HeldPins::Release).unwrap();
    drop(hit(&allocation, world.stream));
    world.check();
}

#[test]
fn a_forced_end_of_run_makes_bytes_unknown() {
    let world = World::budget(2);
    let vbar = world.vbar(2);
    let allocation = vbar.allocate(P).unwrap();
    let guard = refill(&allocation, world.stream).commit(world.stream).unwrap();
    vbar.end_of_run(world.stream, HeldPins::Release).unwrap();
    let again = refill(&allocation, world.stream);
    assert_eq!(guard.unpin().unwrap_err().code(), ErrorCode::StaleToken);
    assert_eq!(vbar.draw(2), "P.");
    drop(again);
    assert_eq!(drawn(&vbar, 2), "#.");
    world.check();
}

#[test]
fn a_second_writer_comes_after_the_first_and_its_readers() {
    let world = World::budget(4);
    let vbar = world.vbar(2);
    let allocation = vbar.allocate(P).unwrap();
    let (one, two, three) = (world.stream, world.another_stream(), world.another_stream());
    let target = world.scratch();
    world.sim.hold_stream(one).unwrap();
    let fill = refill(&allocation, one);
    world.write(fill.address(), P, 1, one);
    drop(fill.commit(one).unwrap());
    let guard = hit(&allocation, two);
    world.sum(guard.address(), P, target, Duration::from_millis(1), two);
    drop(guard);
    allocation.invalidate();
    let fill = refill(&allocation, three);
    world.write(fill.address(), P, 2, three);
    // Given up: the next writer, on yet another stream, comes after that too.
    drop(fill);
    let fill = refill(&allocation, two);
    world.write(fill.address(), P, 3, two);
    drop(fill.commit(two).unwrap());
    world.sim.release_stream(one).unwrap();
    world.sim.ctx_synchronize().unwrap();
    assert_eq!(world.word(target, two), pattern_sum(P, 1));
    let bytes = world.sim.read_bytes(allocation.address(), P as usize).unwrap();
    assert!(bytes == pattern_bytes(P, 3));
    world.check();
}

#[test]
fn a_writer_waits_while_another_fills() {
    let world = World::budget(2);
    let vbar = world.vbar(2);
    let allocation = vbar.allocate(P).unwrap();
    std::thread::scope(|scope| {
        let fill = refill(&allocation, world.stream);
        let waiter = scope.spawn(|| {
            let outcome = allocation.fault_wait(Stream::NONE).unwrap();
            assert!(matches!(outcome, AllocationFault::Resident(_)), "{outcome:?}");
        });
        while world.runtime.statistics().hits < 2 {
            std::thread::yield_now();
        }
        drop(fill.commit(world.stream).unwrap());
        waiter.join().unwrap();
    });
    assert!(world.runtime.statistics().waited(WaitKind::Claim).count >= 1);
    world.check();
}

#[test]
fn neighbours_in_a_page_may_have_writers_of_their_own() {
    let world = World::budget(1);
    let (old, new) = (world.vbar(1), world.vbar(1));
    let target = world.scratch();
    let (one, two) = (world.another_stream(), world.another_stream());
    let previous = old.allocate(P).unwrap();
    let fill = refill(&previous, world.stream);
    world.write(fill.address(), P, 1, world.stream);
    let guard = fill.commit(world.stream).unwrap();
    world.sum(guard.address(), P, target, Duration::from_millis(20), world.stream);
    drop(guard);
    // The frame is taken while it is read; two allocations share the page that gets it.
    let (left, right) = (new.allocate(P / 2).unwrap(), new.allocate(P / 2).unwrap());
    for (allocation, stream, seed) in [(&left, one, 2), (&right, two, 3)] {
        let fill = refill(allocation, stream);
        world.write(fill.address(), P / 2, seed, stream);
        drop(fill.commit(stream).unwrap());
    }
    world.sim.ctx_synchronize().unwrap();
    assert_eq!(world.word(target, world.stream), pattern_sum(P, 1));
    for (allocation, seed) in [(&left, 2), (&right, 3)] {
        let bytes = world.sim.read_bytes(allocation.address(), P as usize / 2).unwrap();
        assert!(bytes == pattern_bytes(P / 2, seed));
    }
    world.check();
}

#[test]
fn a_failed_record_leaves_the_frames_former_reader_alone() {
    let world = World::budget(1);
    let (old, new, last) = (world.vbar(1), world.vbar(1), world.vbar(1));
    let target = world.scratch();
    let other = world.another_stream();
    let previous = old.allocate(P).unwrap();
    let fill = refill(&previous, world.stream);
    world.write(fill.address(), P, 1, world.stream);
    let guard = fill.commit(world.stream).unwrap();
    world.sum(guard.address(), P, target, Duration::from_millis(20), world.stream);
    drop(guard);
    world.sim.fail_nth(Verb::EventRecord, 1, DriverCode::INVALID_VALUE);
    assert!(new.fault(0..P, other).is_err());
    assert_eq!(new.draw(1), "!");
    // The frame comes free when its reader is done, for a stream that waits for nothing.
    let third = world.another_stream();
    let guard = loop {
        match last.fault(0..P, third).unwrap() {
            Fault::Resident(guard) | Fault::HostMapped(guard) => break guard,
            Fault::Offloaded(_) => std::thread::yield_now(),
        }
    };
    world.write(guard.address(), P, 2, third);
    drop(guard);
    world.sim.ctx_synchronize().unwrap();
    assert_eq!(world.word(target, world.stream), pattern_sum(P, 1));
    assert_eq!(world.sim.calls(Verb::MemHostRegister), 0, "a bare VBAR needs no filler");
    world.check();
}

#[test]
fn many_ranges_come_together_or_not_at_all() {
    let world = World::budget(4);
    let (one, two) = (world.vbar(4), world.vbar(4));
    let many = |ranges: &[(&vbar::Vbar, std::ops::Range<u64>)]| match world
        .runtime
        .fault_many(ranges, world.stream)
        .unwrap()
    {
        Fault::Resident(guards) | Fault::HostMapped(guards) => Ok(guards.len()),
        Fault::Offloaded(refusal) => Err(refusal.reason),
    };
    assert_eq!(many(&[]), Ok(0));
    assert_eq!(many(&[(&one, 0..3 * P), (&two, 0..2 * P)]), Err(Reason::TooLarge));
    assert_eq!(world.used(), 0);
    // Ranges that share pages, in one VBAR and twice the same.
    let half = P / 2;
    let shared = [(&one, 0..half), (&one, half..P + half), (&two, 0..P), (&one, 0..half)];
    assert_eq!(many(&shared), Ok(4));
    assert_eq!((drawn(&one, 4).as_str(), drawn(&two, 4).as_str()), ("##..", "#..."));
    // What is resident of a request is not taken for the rest of it.
    assert_eq!(many(&[(&one, 0..2 * P), (&two, 0..3 * P)]), Err(Reason::TooLarge));
    assert_eq!((drawn(&one, 4).as_str(), drawn(&two, 4).as_str()), ("##..", "#..."));
    assert_eq!(many(&[(&two, 0..4 * P)]), Ok(1));
    assert_eq!((drawn(&one, 4).as_str(), drawn(&two, 4).as_str()), ("....", "####"));
    let outside = world.runtime.fault_many(&[(&one, 0..P), (&two, 4 * P..5 * P)], world.stream);
    assert_eq!(outside.map(drop).unwrap_err().code(), ErrorCode::InvalidArgument);
    world.check();
}

#[test]
fn pins_end_at_what_can_be_counted() {
    let world = World::budget(4);
    let vbar = world.vbar(2);
    let guards: Vec<_> = (0..65_535).map(|_| resident(&world, &vbar, 0..1)).collect();
    let full = vbar.fault(0..2 * P, world.stream).map(drop).unwrap_err();
    assert_eq!(full.code(), ErrorCode::TooManyPins);
    drop(resident(&world, &vbar, 1..2));
    let full = vbar.fault(0..2 * P, world.stream).map(drop).unwrap_err();
    assert_eq!(full.code(), ErrorCode::TooManyPins);
    assert_eq!(vbar.residency()[1].pins, 0);
    drop(guards);
    drop(resident(&world, &vbar, 0..2));
    world.check();
}

#[test]
fn a_vbar_closes_under_a_token_and_goes_with_it() {
    let world = World::budget(4);
    let vbar = world.vbar(2);
    let token = resident(&world, &vbar, 0..1).into_token();
    drop(vbar);
    assert_eq!(world.runtime.numbers().closing_bars, 1);
    world.runtime.unpin(token, world.stream).unwrap();
    world.runtime.refresh().unwrap();
    assert_eq!(world.runtime.numbers().closing_bars, 0);
    assert_eq!(world.sim.live_reservations(), 0);
    // A token that is never given back goes with the runtime.
    let vbar = world.vbar(2);
    let _token = resident(&world, &vbar, 0..2).into_token();
    let runtime = world.runtime.clone();
    drop(vbar);
    drop(runtime);
    world.check_shut();
}

#[test]
fn handles_may_go_in_any_order() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let world = World::budget(4);
        let vbar = world.vbar(2);
        let allocation = vbar.allocate(P).unwrap();
        let fill = refill(&allocation, world.stream);
        world.write(fill.address(), P, 1, world.stream);
        drop(fill.commit(world.stream).unwrap());
        let sim = world.sim.clone();
        let World { runtime, .. } = world;
        let (mut runtime, mut vbar, mut allocation) = (Some(runtime), Some(vbar), Some(allocation));
        for which in order {
            match which {
                0 => drop(runtime.take()),
                1 => drop(vbar.take()),
                _ => drop(allocation.take()),
            }
        }
        assert_eq!(sim.violations(), Vec::<String>::new());
        assert_eq!((sim.live_frames(DEVICE), sim.live_reservations()), (0, 0), "{order:?}");
        assert_eq!((sim.live_mappings(), sim.live_events()), (0, 0), "{order:?}");
    }
}

#[test]
fn a_lost_device_says_so_and_is_left_alone() {
    let world = World::budget(2);
    let (vbar, other) = (world.vbar(2), world.vbar(2));
    let allocation = other.allocate(P).unwrap();
    let fill = refill(&allocation, world.stream);
    let guard = resident(&world, &vbar, 0..1);
    let token = resident(&world, &vbar, 0..1).into_token();
    world.sim.lose_device(DEVICE, DriverCode::ILLEGAL_ADDRESS);
    let lost =
        |result: vbar::Result<()>| assert_eq!(result.unwrap_err().code(), ErrorCode::DeviceLost);
    lost(vbar.fault(P..2 * P, world.stream).map(drop));
    lost(vbar.fault(0..P, world.stream).map(drop));
    lost(world.runtime.fault_many(&[(&vbar, 0..P)], world.stream).map(drop));
    lost(vbar.free_memory(P).map(drop));
    lost(world.runtime.trim(0).map(drop));
    lost(world.runtime.refresh());
    lost(world.runtime.set_headroom(P));
    lost(world.runtime.create_bar(P).map(drop));
    lost(vbar.end_of_run(world.stream, HeldPins::Keep).map(drop));
    lost(world.runtime.retire_stream(world.stream));
    lost(guard.also_used_on(world.stream));
    lost(fill.commit(world.stream).map(drop));
    lost(allocation.fault(world.stream).map(drop));
    let _ = guard.unpin();
    let _ = world.runtime.unpin(token, world.stream);
    let unmaps = world.sim.calls(Verb::MemUnmap);
    lost(vbar.destroy_wait());
    drop((allocation, other));
    drop(world.runtime);
    let (unmaps_now, releases) =
        (world.sim.calls(Verb::MemUnmap), world.sim.calls(Verb::MemRelease));
    assert_eq!((unmaps_now, releases), (unmaps, 0));
    assert_eq!(world.sim.violations(), Vec::<String>::new());
}

#[test]
fn waits_end_by_time_out_and_by_cancelling() {
    let options = RuntimeOptions {
        eviction: Eviction::Strict,
        wait_timeout: Duration::from_millis(20),
        ..budget_options(1)
    };
    let world = World::with(ROOMY, options);
    let (old, new) = (world.vbar(1), world.vbar(1));
    world.sim.hold_stream(world.stream).unwrap();
    let guard = resident(&world, &old, 0..1);
    world.write(guard.address(), P, 1, world.stream);
    drop(guard);
    let other = world.another_stream();
    let late = new.fault(0..P, other).map(drop).unwrap_err();
    assert_eq!(late.code(), ErrorCode::TimedOut);
    assert_eq!(world.runtime.statistics().waited(WaitKind::Frame).count, 1);
    assert!(world.runtime.statistics().waited(WaitKind::Frame).total >= Duration::from_millis(20));
    assert_eq!(drawn(&old, 1), "#");
    let freed = old.free_memory(P).unwrap();
    assert_eq!((freed.bytes, freed.shortfall), (0, Some(Shortfall::TimedOut)));
    assert_eq!(old.draw(1), "!");
    world.sim.release_stream(world.stream).unwrap();
    world.sim.stream_synchronize(world.stream).unwrap();
    world.runtime.refresh().unwrap();
    assert_eq!((old.draw(1).as_str(), world.used()), (".", 0));
    world.check();
}

#[test]
fn a_cancelled_wait_changes_nothing() {
    let world = World::evicting(1, Eviction::Strict);
    let (old, new) = (world.vbar(1), world.vbar(1));
    world.sim.hold_stream(world.stream).unwrap();
    let guard = resident(&world, &old, 0..1);
    world.write(guard.address(), P, 1, world.stream);
    drop(guard);
    let other = world.another_stream();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| new.fault(0..P, other).map(drop).unwrap_err().code());
        while !waiter.is_finished() {
            world.runtime.cancel_waits();
            std::thread::yield_now();
        }
        assert_eq!(waiter.join().unwrap(), ErrorCode::Cancelled);
    });
    assert_eq!((drawn(&old, 1).as_str(), new.draw(1).as_str()), ("#", "."));
    world.sim.release_stream(world.stream).unwrap();
    drop(resident_on(&new, 0..1, other));
    world.check();
}

#[test]
fn a_page_whose_old_mapping_lingers_is_waited_for() {
    let world = World::with(
        ROOMY,
        RuntimeOptions { wait_timeout: Duration::from_millis(20), ..budget_options(1) },
    );
    let (old, new) = (world.vbar(1), world.vbar(1));
    let other = world.another_stream();
    world.sim.hold_stream(world.stream).unwrap();
    let guard = resident(&world, &old, 0..1);
    world.write(guard.address(), P, 1, world.stream);
    drop(guard);
    drop(resident_on(&new, 0..1, other));
    assert_eq!((old.draw(1).as_str(), drawn(&new, 1).as_str()), ("!", "#"));
    assert_eq!(world.runtime.numbers().lingering_mappings, 1);
    old.prioritise().unwrap();
    let late = old.fault(0..P, other).map(drop).unwrap_err();
    assert_eq!(late.code(), ErrorCode::TimedOut);
    assert_eq!(world.runtime.statistics().waited(WaitKind::OldMapping).count, 1);
    world.sim.release_stream(world.stream).unwrap();
    world.sim.ctx_synchronize().unwrap();
    drop(resident_on(&old, 0..1, other));
    assert_eq!(world.runtime.numbers().lingering_mappings, 0);
    world.check();
}
