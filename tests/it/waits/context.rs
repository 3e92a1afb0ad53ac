//! Waiting for the whole context: by an event, or inside an older driver; and every call that may.

use std::time::Duration;

use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode};
use vbar::memory::pager::Shortfall;
use vbar::options::RuntimeOptions;
use vbar::outcome::WaitKind;
use vbar::units::Stream;
use vbar::{AllocationFault, ErrorCode, Reason};

use super::{SHORT, cancelling, in_use, stuck_on_context, uncovered};
use crate::logs;
use crate::world::{P, ROOMY, World, budget_options, pattern_sum, resident, resident_on};

const OLDER: &str = "capacity=64M,granularity=64K,ctx_event=0";

/// A long reader that no fence covers loses its frame to a fault; its bytes are the old ones.
fn check_reader_is_waited_for(sim: &str, event_records: u64, synchronised: u64) {
    let world = World::with(sim, uncovered());
    let (old, new) = (world.vbar(1), world.vbar(1));
    let (target, stream) = (world.scratch(), world.another_stream());
    for round in 0..4 {
        let guard = resident_on(&old, 0..1, stream);
        world.write(guard.address(), P, round, stream);
        world.sum(guard.address(), P, target, Duration::from_millis(5), stream);
        // As if the stream were gone: no fence will cover the use.
        world.runtime.unpin(guard.into_token(), Stream::NONE).unwrap();
        let guard = resident(&world, &new, 0..1);
        world.write(guard.address(), P, !round, world.stream);
        drop(guard);
        new.free_memory(P).unwrap();
        old.set_watermark(1).unwrap();
        new.set_watermark(1).unwrap();
    }
    let expected = (0..4).map(|round| pattern_sum(P, round)).fold(0, u64::wrapping_add);
    assert_eq!(world.word(target, stream), expected);
    let waited = world.runtime.statistics().waited(WaitKind::Context);
    assert_eq!(waited.count, 4, "one a round");
    assert_eq!(world.sim.calls(Verb::CtxRecordEvent), event_records);
    assert_eq!(world.sim.calls(Verb::CtxSynchronize), synchronised);
    world.check();
    drop((old, new));
    world.check_shut();
}

#[test]
fn an_event_of_the_context_covers_what_no_fence_does() {
    for more in ["", ",seed=5", ",seed=6,latency=100us"] {
        check_reader_is_waited_for(&format!("{ROOMY}{more}"), 4, 0);
    }
}

#[test]
fn an_older_driver_is_asked_once_and_then_waits_itself() {
    logs::collect();
    check_reader_is_waited_for(OLDER, 1, 4);
    assert_eq!(logs::count(&logs::this_thread(), "records no event for a context"), 1);
}

#[test]
fn a_record_that_fails_in_passing_is_tried_again() {
    let world = World::with(ROOMY, uncovered());
    let (old, new) = (world.vbar(1), world.vbar(1));
    drop(resident(&world, &old, 0..1));
    for code in [DriverCode::OUT_OF_MEMORY, DriverCode::NOT_READY] {
        world.sim.fail_next_n(Verb::CtxRecordEvent, 3, code);
        assert_eq!(old.free_memory(P).unwrap().bytes, P);
        old.set_watermark(1).unwrap();
        drop(resident(&world, &old, 0..1));
    }
    world.sim.fail_next_n(Verb::CtxRecordEvent, 4, DriverCode::OUT_OF_MEMORY);
    // Another stream: no fence on it covers what that one did.
    let failed = new.fault(0..P, world.another_stream()).map(drop).unwrap_err();
    assert_eq!(failed.code(), ErrorCode::Driver);
    assert!(failed.to_string().contains("cuCtxRecordEvent"), "{failed}");
    assert_eq!(world.sim.calls(Verb::CtxSynchronize), 0, "no fallback for what is not missing");
    drop(resident(&world, &new, 0..1));
    world.check();
    drop((old, new));
    world.check_shut();
}

#[test]
fn an_abandoned_wait_leaves_no_event_and_says_nothing_of_the_work() {
    let stuck = stuck_on_context();
    let (sim, runtime) = (&stuck.world.sim, &stuck.world.runtime);
    let events = sim.live_events();
    runtime.set_wait_timeout(SHORT);
    for _ in 0..20 {
        stuck.ends_with(ErrorCode::TimedOut);
    }
    cancelling(runtime, || {
        runtime.set_wait_timeout(Duration::MAX);
        stuck.ends_with(ErrorCode::Cancelled);
    });
    assert!(sim.live_events() <= events, "{} events of {events}", sim.live_events());
    assert_eq!(stuck.world.used(), 1);
    stuck.check_goes_on();
}

#[test]
fn a_release_that_times_out_says_so_and_takes_nothing() {
    let (world, old, held) = in_use(uncovered());
    world.runtime.set_wait_timeout(SHORT);
    for freed in [old.free_memory(P).unwrap(), world.runtime.free_memory(P).unwrap()] {
        assert_eq!((freed.bytes, freed.shortfall), (0, Some(Shortfall::TimedOut)));
    }
    assert_eq!(
        cancelling(&world.runtime, || {
            world.runtime.set_wait_timeout(Duration::MAX);
            old.free_memory(P).unwrap_err().code()
        }),
        ErrorCode::Cancelled
    );
    assert_eq!(world.used(), 1);
    world.sim.release_stream(held).unwrap();
    assert_eq!(old.free_memory(P).unwrap().bytes, P);
    world.check();
    drop(old);
    world.check_shut();
}

#[test]
fn a_budget_that_cannot_be_kept_in_time_is_set_all_the_same() {
    let (world, old, held) = in_use(uncovered());
    world.runtime.set_wait_timeout(SHORT);
    assert_eq!(world.runtime.set_budget(Some(0)).unwrap_err().code(), ErrorCode::TimedOut);
    assert_eq!((world.runtime.budget_settings().0, world.used()), (Some(0), 1));
    assert_eq!(world.runtime.refresh().unwrap_err().code(), ErrorCode::TimedOut);
    let miss = world.vbar(1);
    let failed = miss.fault(0..P, world.stream).map(drop).unwrap_err();
    assert_eq!(failed.code(), ErrorCode::TimedOut, "{failed}");
    world.sim.release_stream(held).unwrap();
    world.sim.ctx_synchronize().unwrap();
    world.runtime.refresh().unwrap();
    assert_eq!(world.used(), 0);
    world.check();
    drop((old, miss));
    world.check_shut();
}

#[test]
fn closing_a_vbar_and_trimming_are_bounded() {
    let (world, old, held) = in_use(uncovered());
    world.runtime.set_wait_timeout(SHORT);
    let closed = old.clone();
    drop(old);
    assert_eq!(closed.destroy_wait().unwrap_err().code(), ErrorCode::TimedOut);
    // What the closed VBAR held it holds still; trim goes on with what is free.
    assert_eq!(world.runtime.trim(0).unwrap(), 0);
    assert_eq!(world.used(), 1);
    world.sim.release_stream(held).unwrap();
    world.sim.ctx_synchronize().unwrap();
    world.runtime.set_wait_timeout(super::LONG);
    assert_eq!(world.runtime.trim(0).unwrap(), P);
    world.check();
    world.check_shut();
}

#[test]
fn a_fill_behind_an_uncovered_use_is_bounded() {
    let (world, old, held) = in_use(RuntimeOptions { ..uncovered() });
    let allocation = old.allocate(P).unwrap();
    world.runtime.set_wait_timeout(SHORT);
    let failed = allocation.fault(world.stream).map(drop).unwrap_err();
    assert_eq!(failed.code(), ErrorCode::TimedOut);
    // Nobody is left filling it.
    world.sim.release_stream(held).unwrap();
    world.sim.ctx_synchronize().unwrap();
    let AllocationFault::Refill(fill) = allocation.fault(world.stream).unwrap() else {
        panic!("never written");
    };
    drop(fill.commit(world.stream).unwrap());
    world.check();
    drop((allocation, old));
    world.check_shut();
}

#[test]
fn a_stream_too_many_is_bounded() {
    let options =
        RuntimeOptions { record_interval: Duration::from_secs(1000), ..budget_options(2) };
    let world = World::with(ROOMY, options);
    let vbar = world.vbar(2);
    let held = world.another_stream();
    let guard = resident_on(&vbar, 0..1, held);
    world.sim.hold_stream(held).unwrap();
    world.write(guard.address(), P, 1, held);
    drop(guard);
    let streams: Vec<_> = (0..255).map(|_| world.another_stream()).collect();
    streams.iter().for_each(|stream| drop(resident_on(&vbar, 1..2, *stream)));
    world.runtime.set_wait_timeout(SHORT);
    let failed = vbar.fault(P..2 * P, world.stream).map(drop).unwrap_err();
    assert_eq!(failed.code(), ErrorCode::TimedOut, "{failed}");
    assert!(failed.to_string().contains(WaitKind::Context.word()), "{failed}");
    world.sim.release_stream(held).unwrap();
    world.runtime.set_wait_timeout(super::LONG);
    drop(resident(&world, &vbar, 1..2));
    world.check();
    drop(vbar);
    world.check_shut();
}

#[test]
fn without_context_waits_there_is_neither_event_nor_wait() {
    let options =
        RuntimeOptions { context_waits: vbar::options::ContextWaits::Never, ..uncovered() };
    let (world, old, held) = in_use(options);
    let new = world.vbar(1);
    assert_eq!(world.touch(&new, 0..1), Err(Reason::FenceUnknown));
    assert_eq!(world.sim.calls(Verb::CtxRecordEvent), 0);
    world.sim.release_stream(held).unwrap();
    world.sim.ctx_synchronize().unwrap();
    drop((old, new));
    world.check_shut();
}
