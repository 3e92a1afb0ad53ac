//! What a hostile review found wrong over time: memory that did not come back, failures that left
//! something behind, streams that nobody retired, forks at a bad moment.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode};
use vbar::memory::pager::HeldPins;
use vbar::units::Stream;
use vbar::{Fault, RuntimeOptions};

use crate::forked::in_child;
use crate::world::{DEVICE, P, ROOMY, World, budget_options, resident, resident_on};

/// More calls of one verb than any operation here makes.
const CALLS_MAX: u64 = 64;

/// Options under which no fence covers an unpin for as long as the test runs.
fn unfenced(pages: u64) -> RuntimeOptions {
    RuntimeOptions { record_interval: Duration::from_secs(3600), ..budget_options(pages) }
}

#[test]
fn a_trim_gives_back_a_closed_vbar_that_no_fence_covers() {
    let world = World::with(ROOMY, unfenced(8));
    let vbar = world.vbar(8);
    drop(resident(&world, &vbar, 0..8));
    world.sim.ctx_synchronize().unwrap();
    drop(vbar);
    world.runtime.trim(0).unwrap();
    assert_eq!(world.used(), 0, "{:?}", world.runtime.numbers());
    world.check();
    world.check_shut();
}

#[test]
fn idle_pages_that_no_fence_covers_obey_a_smaller_budget() {
    let world = World::with(ROOMY, unfenced(8));
    let vbar = world.vbar(8);
    drop(resident(&world, &vbar, 0..8));
    world.sim.ctx_synchronize().unwrap();
    world.runtime.set_budget(Some(2 * P)).unwrap();
    world.runtime.refresh().unwrap();
    assert_eq!(world.used(), 2, "{:?}", world.runtime.numbers());
    world.check();
}

#[test]
fn idle_pages_that_no_fence_covers_obey_pressure_from_outside() {
    let options = RuntimeOptions { budget_bytes: None, headroom_bytes: Some(P), ..unfenced(0) };
    let world = World::with("capacity=8M,granularity=64K", options);
    let vbar = world.vbar(100);
    for page in 0..100 {
        drop(resident(&world, &vbar, page..page + 1));
    }
    world.sim.ctx_synchronize().unwrap();
    world.sim.set_outside_bytes(DEVICE, 100 * P);
    world.runtime.refresh().unwrap();
    let numbers = world.runtime.numbers();
    assert!(numbers.used_bytes <= numbers.budget_bytes, "{numbers:?}");
    world.check();
}

#[test]
fn the_pages_of_a_closed_vbar_go_to_one_that_is_open() {
    let world = World::with(ROOMY, unfenced(8));
    let (open, closed) = (world.vbar(8), world.vbar(6));
    drop(resident(&world, &open, 0..8));
    open.end_of_run(world.stream, HeldPins::Keep).unwrap();
    closed.prioritise().unwrap();
    drop(resident(&world, &closed, 0..6));
    drop(closed);
    world.sim.ctx_synchronize().unwrap();
    let _ = world.touch(&open, 0..8);
    open.end_of_run(world.stream, HeldPins::Keep).unwrap();
    assert_eq!(world.touch(&open, 0..8), Ok(()), "{:?}", world.runtime.numbers());
    world.check();
}

#[test]
fn an_open_vbar_comes_back_after_another_failed_to_take_its_pages() {
    let world = World::budget(8);
    let (open, closed) = (world.vbar(8), world.vbar(6));
    drop(resident(&world, &open, 0..8));
    closed.prioritise().unwrap();
    world.sim.fail_nth(Verb::EventRecord, 1, DriverCode::NOT_READY);
    drop(closed.fault(0..6 * P, world.stream));
    world.sim.heal();
    drop(closed);
    world.sim.ctx_synchronize().unwrap();
    let _ = world.touch(&open, 0..8);
    world.runtime.refresh().unwrap();
    assert_eq!(world.touch(&open, 0..8), Ok(()), "{:?}", world.runtime.numbers());
    world.check();
}

#[test]
fn a_budget_grows_again_under_a_large_headroom() {
    let world = World::new(10);
    world.runtime.set_headroom(6 * P).unwrap();
    let vbar = world.vbar(4);
    assert_eq!(world.touch(&vbar, 0..4), Ok(()));
    world.sim.set_outside_bytes(DEVICE, 2 * P);
    world.sim.ctx_synchronize().unwrap();
    world.runtime.refresh().unwrap();
    assert!(world.used() < 4, "pressure took nothing");
    world.sim.set_outside_bytes(DEVICE, 0);
    vbar.prioritise().unwrap();
    let _ = world.touch(&vbar, 0..4);
    world.runtime.refresh().unwrap();
    assert_eq!(world.touch(&vbar, 0..4), Ok(()), "{:?}", world.runtime.numbers());
    world.check();
}

/// For every verb, and every call of it in `operation`: a world of `prepare` in which that call
/// fails with `code`; `verify` sees each.
fn each_failing_call<T>(
    code: DriverCode,
    prepare: impl Fn() -> (World, T),
    operation: impl Fn(&World, &T),
    verify: impl Fn(World, T, &str),
) {
    let mut failures = 0;
    for verb in Verb::ALL {
        for nth in 1..=CALLS_MAX {
            let (world, things) = prepare();
            let before = world.sim.calls(*verb);
            world.sim.fail_nth(*verb, nth, code);
            operation(&world, &things);
            let failed = world.sim.calls(*verb) - before >= nth;
            world.sim.heal();
            if !failed {
                break;
            }
            assert!(nth < CALLS_MAX, "{verb:?} is called more often than the test looks");
            failures += 1;
            verify(world, things, &format!("{code:?} of {verb:?}, call {nth}"));
        }
    }
    assert!(failures > 0, "nothing failed");
}

/// Healthy again, the VBAR is served, unless pages were lost for good and the numbers say so.
#[track_caller]
fn check_healed(world: &World, vbar: &vbar::Vbar, pages: u64, case: &str) -> bool {
    let faulted = vbar.fault(0..pages * P, world.stream);
    let served = matches!(faulted, Ok(Fault::Resident(_)));
    let numbers = world.runtime.numbers();
    let whole = numbers.quarantined_pages == 0 && numbers.quarantined_bytes == 0;
    assert!(served || !whole, "{case}: a later fault {faulted:?}, {numbers:?}");
    drop(faulted);
    world.runtime.refresh().unwrap();
    world.check();
    whole
}

#[test]
fn a_call_that_fails_while_the_budget_shrinks_leaves_nothing_behind() {
    for code in [DriverCode::INVALID_VALUE, DriverCode::NOT_READY] {
        let prepare = || {
            let world = World::budget(8);
            let vbar = world.vbar(8);
            drop(resident(&world, &vbar, 0..8));
            (world, vbar)
        };
        let shrink = |world: &World, _: &_| drop(world.runtime.set_budget(Some(2 * P)));
        each_failing_call(code, prepare, shrink, |world, vbar, case| {
            world.sim.ctx_synchronize().unwrap();
            world.runtime.set_budget(Some(8 * P)).unwrap();
            let whole = check_healed(&world, &vbar, 8, case);
            drop(vbar);
            if whole {
                world.check_shut();
            }
        });
    }
}

#[test]
fn a_call_that_fails_while_old_mappings_are_reaped_leaves_nothing_behind() {
    for code in [DriverCode::INVALID_VALUE, DriverCode::NOT_READY] {
        let prepare = || {
            let world = World::budget(2);
            let (old, new, other) = (world.vbar(2), world.vbar(2), world.another_stream());
            let guard = resident(&world, &old, 0..2);
            world.sim.hold_stream(world.stream).unwrap();
            world.write(guard.address(), 2 * P, 1, world.stream);
            drop(guard);
            new.prioritise().unwrap();
            drop(resident_on(&new, 0..2, other));
            world.sim.release_stream(world.stream).unwrap();
            world.sim.ctx_synchronize().unwrap();
            assert_eq!(world.runtime.numbers().lingering_mappings, 2);
            (world, (old, new, other))
        };
        let reap = |world: &World, _: &_| drop(world.runtime.refresh());
        each_failing_call(code, prepare, reap, |world, (old, new, other), case| {
            old.prioritise().unwrap();
            let whole = check_healed(&world, &old, 2, case);
            drop((old, new));
            world.sim.stream_destroy(other).unwrap();
            if whole {
                world.check_shut();
            }
        });
    }
}

#[test]
fn a_transient_code_while_a_runtime_closes_leaks_nothing() {
    for verb in Verb::ALL {
        for nth in 1..=CALLS_MAX {
            let world = World::budget(8);
            let vbar = world.vbar(4);
            drop(resident(&world, &vbar, 0..4));
            // Held for ever: the VBAR closes with its runtime.
            let _token = resident(&world, &vbar, 0..1).into_token();
            drop(vbar);
            let sim = world.sim.clone();
            let before = sim.calls(*verb);
            sim.fail_nth(*verb, nth, DriverCode::NOT_READY);
            drop(world);
            let failed = sim.calls(*verb) - before >= nth;
            let left = (sim.live_frames(DEVICE), sim.live_mappings(), sim.live_reservations());
            assert_eq!(left, (0, 0, 0), "{verb:?}, call {nth}");
            assert_eq!((sim.live_events(), sim.locked_bytes()), (0, 0), "{verb:?}, call {nth}");
            assert_eq!(sim.violations(), Vec::<String>::new(), "{verb:?}, call {nth}");
            if !failed {
                break;
            }
        }
    }
}

#[test]
fn streams_may_be_destroyed_without_being_retired() {
    let world = World::with(ROOMY, unfenced(64));
    let vbar = world.vbar(2);
    drop(resident(&world, &vbar, 0..1));
    for _ in 0..400 {
        let stream = world.another_stream();
        drop(resident_on(&vbar, 0..1, stream));
        world.sim.stream_synchronize(stream).unwrap();
        world.sim.stream_destroy(stream).unwrap();
    }
    world.check();
}

#[test]
fn short_lived_threads_may_use_their_own_streams() {
    let world = World::with(ROOMY, unfenced(64));
    let vbar = world.vbar(2);
    drop(resident(&world, &vbar, 0..1));
    for _ in 0..400 {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                world.sim.ctx_set_current(Some(world.runtime.device().context)).unwrap();
                drop(resident_on(&vbar, 0..1, Stream::PER_THREAD));
                world.sim.stream_synchronize(Stream::PER_THREAD).unwrap();
            });
        });
    }
    world.check();
}

#[test]
fn a_child_forked_while_other_threads_fault_reads_the_numbers() {
    let world = World::budget(20);
    let stop = AtomicBool::new(false);
    let fault_until_told = || {
        world.sim.ctx_set_current(Some(world.runtime.device().context)).unwrap();
        let (vbar, stream) = (world.vbar(10), world.another_stream());
        while !stop.load(Ordering::Relaxed) {
            vbar.prioritise().unwrap();
            drop(vbar.fault(0..10 * P, stream).unwrap());
        }
    };
    let good = std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(fault_until_told);
        }
        let good = (0..100).all(|_| {
            in_child(|| {
                let _ = world.runtime.statistics();
                let _ = world.runtime.budget_settings();
                let _ = world.runtime.numbers();
                true
            })
        });
        stop.store(true, Ordering::Relaxed);
        good
    });
    assert!(good, "a child hung, or panicked");
    world.check();
}

/// A context that the program had current, and that is gone when a call puts it back, says nothing
/// of the device.
#[test]
fn a_context_that_cannot_be_put_back_is_no_lost_device() {
    let world = World::new(4);
    let own = world.sim.ctx_get_current().unwrap();
    for code in [DriverCode::INVALID_CONTEXT, DriverCode::CONTEXT_IS_DESTROYED] {
        world.sim.ctx_set_current(None).unwrap();
        // The first makes the device's own current.
        world.sim.fail_nth(Verb::CtxSetCurrent, 2, code);
        drop(world.runtime.device().enter_context().unwrap());
        assert!(!world.runtime.device().is_lost(), "{code:?}");
        assert_eq!(world.sim.ctx_get_current().unwrap(), own, "it was put back");
    }
}
