//! Scenarios of a driver that fails: everything as before, or set aside and told.

use vbar::driver::DriverCode;
use vbar::driver::sim::{Sim, SimOptions, Verb};
use vbar::options::{Eviction, RuntimeOptions};
use vbar::units::DeviceOrdinal;
use vbar::{ErrorCode, Fault, Reason, Runtime, Vbar};

use crate::world::{DEVICE, P, ROOMY, World, budget_options, drawn, fault, options, resident};

#[test]
fn scenario_7_a_failed_wait_unmaps_nothing() {
    for verb in [Verb::CtxRecordEvent, Verb::CtxSynchronize, Verb::EventQuery] {
        let ctx_event = u8::from(verb != Verb::CtxSynchronize);
        let world = World::with(
            &format!("{ROOMY},ctx_event={ctx_event}"),
            RuntimeOptions {
                record_interval: match verb {
                    Verb::EventQuery => std::time::Duration::ZERO,
                    // No fence is recorded, so that only the context tells.
                    _ => std::time::Duration::from_secs(1000),
                },
                ..budget_options(2)
            },
        );
        let (old, new) = (world.vbar(2), world.vbar(2));
        let target = world.scratch();
        let guard = resident(&world, &old, 0..2);
        world.sum(guard.address(), 2 * P, target, std::time::Duration::ZERO, world.stream);
        drop(guard);
        let unmaps = world.sim.calls(Verb::MemUnmap);
        world.sim.fail_always(verb, DriverCode::INVALID_CONTEXT);
        if verb == Verb::EventQuery {
            // Nor does the context tell.
            world.sim.fail_always(Verb::CtxRecordEvent, DriverCode::INVALID_CONTEXT);
        }
        let failed = old.free_memory(P);
        assert_eq!(world.sim.calls(Verb::MemUnmap), unmaps, "{verb}");
        assert!(!matches!(failed, Ok(freed) if freed.bytes > 0), "{verb}: {failed:?}");
        assert_eq!(failed.unwrap_err().code(), ErrorCode::Driver, "{verb}");
        assert!(new.fault(0..P, world.another_stream()).is_err(), "{verb}");
        assert_eq!(world.sim.calls(Verb::MemUnmap), unmaps, "{verb}");
        assert_eq!((world.used(), world.sim.live_frames(DEVICE)), (2, 3));
        world.sim.heal();
        let freed = old.free_memory(2 * P).unwrap();
        assert_eq!((freed.bytes, world.used()), (2 * P, 0), "{verb}");
        world.check();
    }
}

#[test]
fn scenario_10_without_virtual_memory_management_all_is_offloaded() {
    let world = World::with("capacity=16M,granularity=64K,vmm=0", options());
    let vbar = world.vbar(40);
    for page in 0..40 {
        assert_eq!(world.touch(&vbar, page..page + 1), Err(Reason::NoAddresses));
    }
    assert_eq!(world.runtime.statistics().refused(Reason::NoAddresses), 40);
    let allocation = vbar.allocate(P).unwrap();
    assert_eq!(allocation.address(), vbar.base());
    drop((allocation, vbar));
    world.check_shut();
}

#[test]
fn scenario_10_a_reserve_that_is_not_supported_offloads() {
    for code in [DriverCode::NOT_SUPPORTED, DriverCode::OUT_OF_MEMORY] {
        let world = World::budget(4);
        world.sim.fail_nth(Verb::MemAddressReserve, 1, code);
        let (one, two) = (world.vbar(4), world.vbar(4));
        assert_eq!(world.touch(&one, 0..1), Err(Reason::NoAddresses));
        assert_eq!(world.touch(&two, 0..1), Ok(()));
        assert_ne!(one.base(), two.base());
        drop((one, two));
        world.check_shut();
    }
}

#[test]
fn scenario_19_opening_twice_shares_the_runtime() {
    let world = World::budget(4);
    let vbar = world.vbar(4);
    let again = Runtime::open(world.sim.driver(), DEVICE, budget_options(2)).unwrap();
    assert_eq!(world.runtime.budget_settings(), (Some(2 * P), 0));
    drop(resident(&world, &vbar, 0..2));
    assert_eq!(again.used_bytes(), 2 * P);
    let other_pages =
        RuntimeOptions { page_size: vbar::units::PageSize::new(2 * P).unwrap(), ..options() };
    let refused = Runtime::open(world.sim.driver(), DEVICE, other_pages).map(drop).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::AlreadyOpen);
    drop(again);
    drop(resident(&world, &vbar, 0..2));
    world.check();
    drop(vbar);
    let sim = world.sim.clone();
    world.check_shut();
    let reopened = Runtime::open(sim.driver(), DEVICE, budget_options(4)).unwrap();
    let vbar = reopened.create_bar(P).unwrap();
    assert_eq!((sim.live_reservations(), sim.live_frames(DEVICE)), (1, 0));
    drop(vbar);
    drop(reopened);
    assert_eq!((sim.live_reservations(), sim.live_frames(DEVICE)), (0, 0));
}

#[test]
fn scenario_20_a_device_that_was_not_opened_is_named() {
    let world = World::with("capacity=64M,granularity=64K,devices=2", budget_options(4));
    let vbar = world.vbar(2);
    drop(resident(&world, &vbar, 0..2));
    let second = DeviceOrdinal(1);
    let code = Runtime::opened(&world.sim.driver(), second).map(drop).unwrap_err().code();
    assert_eq!(code, ErrorCode::DeviceNotRegistered);
    let missing = Runtime::open(world.sim.driver(), DeviceOrdinal(2), options());
    assert_eq!(missing.map(drop).unwrap_err().code(), ErrorCode::DeviceNotRegistered);
    let other = Runtime::open(world.sim.driver(), second, budget_options(4)).unwrap();
    let far = other.create_bar(2 * P).unwrap();
    let guard = far.fault(0..2 * P, vbar::units::Stream::NONE).unwrap().resident();
    assert!(guard.is_some());
    assert_eq!((drawn(&vbar, 2).as_str(), world.sim.live_frames(second)), ("##", 2));
    drop(guard);
    world.check();
}

/// Where the frames of a fault come from.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Supply {
    Fresh,
    Free,
    Victims,
}

struct Trial {
    world: World,
    bar: Vbar,
    other: Vbar,
}

fn trial(supply: Supply, eviction: Eviction) -> Trial {
    let world = World::evicting(if supply == Supply::Victims { 4 } else { 8 }, eviction);
    let (other, bar) = (world.vbar(4), world.vbar(8));
    match supply {
        Supply::Fresh => {}
        Supply::Victims => drop(resident(&world, &other, 0..4)),
        Supply::Free => {
            let closing = world.vbar(4);
            drop(resident(&world, &closing, 0..4));
            closing.destroy_wait().unwrap();
            assert_eq!(world.runtime.numbers().free_bytes, 4 * P);
        }
    }
    Trial { world, bar, other }
}

fn books(trial: &Trial) -> (String, String, u64, usize, u64, u64) {
    let Trial { world, bar, other } = trial;
    (
        drawn(bar, 8),
        drawn(other, 4),
        world.sim.live_frames(DEVICE),
        world.sim.live_mappings(),
        world.used(),
        world.runtime.numbers().free_bytes,
    )
}

const FOUR: std::ops::Range<u64> = 0..4;

/// Pages of one request: neighbours, whose access is set in one call, or apart.
const SHAPES: [&[std::ops::Range<u64>]; 2] = [&[FOUR], &[0..1, 2..3, 4..5, 6..7]];

fn fault_shape(trial: &Trial, shape: &[std::ops::Range<u64>]) -> vbar::Result<Option<Reason>> {
    let ranges: Vec<_> =
        shape.iter().map(|pages| (&trial.bar, pages.start * P..pages.end * P)).collect();
    let outcome = trial.world.runtime.fault_many(&ranges, trial.world.stream)?;
    Ok(outcome.offloaded())
}

fn each_step(each: impl Fn(Supply, Eviction, &[std::ops::Range<u64>], Verb, u64)) {
    for supply in [Supply::Fresh, Supply::Free, Supply::Victims] {
        for eviction in [Eviction::Aliasing, Eviction::Strict] {
            for shape in SHAPES {
                for verb in [Verb::MemCreate, Verb::MemMap, Verb::MemSetAccess] {
                    let calls = match verb {
                        Verb::MemCreate if supply != Supply::Fresh => 0,
                        Verb::MemSetAccess => shape.len() as u64,
                        _ => 4,
                    };
                    (1..=calls).for_each(|nth| each(supply, eviction, shape, verb, nth));
                }
            }
        }
    }
}

#[test]
fn scenario_31_a_failure_at_any_step_leaves_everything_as_it_was() {
    each_step(|supply, eviction, shape, verb, nth| {
        let trial = trial(supply, eviction);
        let before = books(&trial);
        let name = format!("{supply:?} {eviction:?} {shape:?} {verb} {nth}");
        trial.world.sim.fail_nth(verb, nth, DriverCode::INVALID_VALUE);
        let error = fault_shape(&trial, shape).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Driver, "{name}");
        check_undone(&trial, &before, (supply, eviction), &name);
        trial.world.sim.heal();
        trial.bar.prioritise().unwrap();
        assert_eq!(fault_shape(&trial, shape).unwrap(), None, "{name}");
        trial.world.check();
    });
}

fn check_undone(
    trial: &Trial,
    before: &(String, String, u64, usize, u64, u64),
    (supply, eviction): (Supply, Eviction),
    name: &str,
) {
    if (supply, eviction) == (Supply::Victims, Eviction::Strict) {
        // The victims are gone; their frames are free.
        assert_eq!(drawn(&trial.bar, 8), "........", "{name}");
        let (mappings, used) = (trial.world.sim.live_mappings() as u64, trial.world.used());
        let free = trial.world.runtime.numbers().free_bytes / P;
        assert_eq!(used, mappings + free, "{name}");
    } else {
        assert_eq!(&books(trial), before, "{name}");
    }
    trial.world.check();
}

#[test]
fn scenario_31_a_transient_code_that_stays_is_an_outcome() {
    for code in [DriverCode::OUT_OF_MEMORY, DriverCode::NOT_READY] {
        each_step(|supply, eviction, shape, verb, nth| {
            let trial = trial(supply, eviction);
            let before = books(&trial);
            let name = format!("{supply:?} {eviction:?} {shape:?} {verb} {nth} {code:?}");
            // The first calls pass, all later ones fail: by a rule for each later call.
            let far = 64;
            (nth..far).for_each(|at| trial.world.sim.fail_nth(verb, at, code));
            let outcome = fault_shape(&trial, shape).unwrap();
            assert_eq!(outcome, Some(Reason::DriverMemory), "{name}");
            check_undone(&trial, &before, (supply, eviction), &name);
            trial.world.sim.heal();
            trial.bar.prioritise().unwrap();
            assert_eq!(fault_shape(&trial, shape).unwrap(), None, "{name}");
            trial.world.check();
        });
    }
}

#[test]
fn scenario_31_what_cannot_be_undone_is_set_aside_and_told() {
    for supply in [Supply::Fresh, Supply::Free, Supply::Victims] {
        for eviction in [Eviction::Aliasing, Eviction::Strict] {
            let trial = trial(supply, eviction);
            let Trial { world, bar, other } = &trial;
            let name = format!("{supply:?} {eviction:?}");
            world.sim.fail_nth(Verb::MemSetAccess, 1, DriverCode::INVALID_VALUE);
            // With strict eviction four victims are unmapped first.
            let strict = (supply, eviction) == (Supply::Victims, Eviction::Strict);
            let nth = if strict { 6 } else { 2 };
            world.sim.fail_nth(Verb::MemUnmap, nth, DriverCode::INVALID_VALUE);
            assert!(fault_shape(&trial, SHAPES[0]).is_err(), "{name}");
            assert_eq!(drawn(bar, 8), ".X......", "{name}");
            assert_eq!(world.runtime.numbers().quarantined_pages, 1, "{name}");
            assert_eq!(fault(world, bar, 0..2).offloaded(), Some(Reason::Quarantined), "{name}");
            assert_eq!(world.runtime.statistics().refused(Reason::Quarantined), 1);
            bar.prioritise().unwrap();
            drop(resident(world, bar, 2..5));
            assert_eq!(drawn(bar, 8), ".X###...", "{name}");
            world.check();
            // Everything goes but what is set aside, which still counts.
            bar.free_memory(u64::MAX).unwrap();
            other.free_memory(u64::MAX).unwrap();
            world.runtime.trim(0).unwrap();
            assert_eq!(world.used(), 1, "{name}: the frame behind the lost page is held");
            assert_eq!(world.runtime.numbers().quarantined_bytes, P, "{name}");
            world.check();
        }
    }
}

#[test]
fn scenario_31_an_evicted_page_that_cannot_be_unmapped_keeps_its_frame_counted() {
    let trial = trial(Supply::Victims, Eviction::Aliasing);
    let Trial { world, bar, other } = &trial;
    world.sim.fail_nth(Verb::MemUnmap, 1, DriverCode::INVALID_VALUE);
    let _ = world.touch(bar, 0..1);
    assert_eq!(world.runtime.numbers().quarantined_pages, 1);
    bar.free_memory(u64::MAX).unwrap();
    other.free_memory(u64::MAX).unwrap();
    world.runtime.trim(0).unwrap();
    assert_eq!(world.used(), 1);
    world.check();
}

#[test]
fn scenario_31_a_release_that_fails_is_told_and_not_called_freed() {
    let world = World::budget(4);
    let vbar = world.vbar(4);
    drop(resident(&world, &vbar, 0..4));
    world.sim.fail_nth(Verb::MemRelease, 2, DriverCode::INVALID_VALUE);
    let freed = vbar.free_memory(4 * P).unwrap();
    assert_eq!((freed.bytes, world.used()), (3 * P, 1));
    assert_eq!(world.runtime.numbers().quarantined_bytes, P);
    world.check();
}

#[test]
fn scenario_44_each_handle_is_released_once() {
    let world = World::budget(4);
    let vbar = world.vbar(4);
    drop(resident(&world, &vbar, 0..4));
    assert_eq!(vbar.free_memory(4 * P).unwrap().bytes, 4 * P);
    assert_eq!(world.sim.calls(Verb::MemRelease), 4);
    drop(vbar);
    world.runtime.trim(0).unwrap();
    assert_eq!(world.sim.calls(Verb::MemRelease), 4);
    assert_eq!(world.sim.calls(Verb::MemAddressFree), 1);
    world.check_shut();
}

#[test]
fn scenario_47_one_failure_does_not_poison_the_next_call() {
    let sim = Sim::new(SimOptions::parse(ROOMY).unwrap());
    sim.fail_nth(Verb::DeviceGetAttribute, 1, DriverCode::INVALID_VALUE);
    let runtime = Runtime::open(sim.driver(), DEVICE, options()).unwrap();
    let vbar = runtime.create_bar(P).unwrap();
    let outcome = vbar.fault(0..P, vbar::units::Stream::NONE).unwrap();
    assert_eq!(outcome.offloaded(), Some(Reason::NoAddresses));
    let world = World::budget(4);
    let vbar = world.vbar(4);
    for verb in [Verb::MemCreate, Verb::MemMap, Verb::MemSetAccess, Verb::MemGetInfo] {
        world.sim.fail_nth(verb, 1, DriverCode::INVALID_VALUE);
        let failed = vbar.fault(0..P, world.stream);
        assert_eq!(failed.map(|_| ()).unwrap_err().code(), ErrorCode::Driver, "{verb}");
        let Fault::Resident(guard) = vbar.fault(0..P, world.stream).unwrap() else {
            panic!("{verb}: a healthy driver serves the next fault");
        };
        drop(guard);
        vbar.free_memory(P).unwrap();
        world.runtime.trim(0).unwrap();
        vbar.prioritise().unwrap();
    }
    world.check();
}
