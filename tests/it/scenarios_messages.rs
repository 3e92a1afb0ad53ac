//! Scenario 60: an error tells what it is about, and the numbers agree while others work.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode};
use vbar::memory::pager::HeldPins;
use vbar::model::synth::synthesize;
use vbar::options::{ContextWaits, Eviction, Poison};
use vbar::runtime::Statistics;
use vbar::{AllocationFault, Error, ErrorCode, Fault, ModelBar, RuntimeOptions, Vbar};

use crate::world::{DEVICE, P, ROOMY, World, budget_options, options, resident, resident_on};

const CODE: DriverCode = DriverCode::INVALID_VALUE;

/// What the text of an error has: these words, and the numbers of the memory as they are.
#[track_caller]
fn check_text(world: &World, error: &Error, words: &[&str]) {
    let numbers = world.runtime.numbers();
    let used = format!("{} bytes used", numbers.used_bytes);
    let source = numbers.budget_source.words();
    let budget = format!("budget {} bytes ({source})", numbers.budget_bytes);
    let text = error.to_string();
    for word in words.iter().chain(&[used.as_str(), budget.as_str()]) {
        assert!(text.contains(word), "'{word}' is not in: {text}");
    }
}

/// As [`check_text`], of a call to the driver.
#[track_caller]
fn check_driver_text(world: &World, error: &Error, verb: Verb, words: &[&str]) {
    assert_eq!((error.code(), error.driver_code()), (ErrorCode::Driver, Some(CODE)), "{error}");
    let call = format!("{} returned CUDA_ERROR_INVALID_VALUE (1)", verb.call());
    check_text(world, error, &[&[call.as_str()], words].concat());
}

#[test]
fn scenario_60_every_driver_call_of_a_bare_fault_is_told() {
    let verbs = [
        Verb::MemCreate,
        Verb::MemMap,
        Verb::MemSetAccess,
        Verb::MemGetInfo,
        Verb::StreamGetId,
        Verb::StreamIsCapturing,
        Verb::CtxGetCurrent,
        Verb::ThreadExchangeStreamCaptureMode,
    ];
    for verb in verbs {
        let world = World::budget(6);
        let vbar = world.vbar(4);
        drop(resident(&world, &vbar, 0..1));
        let bar = format!("of VBAR {}", vbar.number());
        world.sim.fail_always(verb, CODE);
        let error = vbar.fault(P..2 * P, world.stream).map(drop).unwrap_err();
        check_driver_text(&world, &error, verb, &[&format!("page 1 {bar} ({P} bytes)")]);
        let error = vbar.fault(P..4 * P, world.stream).map(drop).unwrap_err();
        check_driver_text(&world, &error, verb, &[&format!("pages 1..4 {bar} ({} bytes)", 3 * P)]);
        let ranges = [(&vbar, P..2 * P), (&vbar, 2 * P..4 * P)];
        let error = world.runtime.fault_many(&ranges, world.stream).map(drop).unwrap_err();
        let asked = format!("page 1 {bar}, pages 2..4 {bar} ({} bytes)", 3 * P);
        check_driver_text(&world, &error, verb, &[&asked]);
        world.sim.heal();
        world.check();
    }
}

#[test]
fn scenario_60_a_long_request_names_its_first_ranges() {
    let world = World::budget(20);
    let vbar = world.vbar(16);
    world.sim.fail_always(Verb::MemCreate, CODE);
    let ranges: Vec<_> = (0..10).map(|page| (&vbar, page * P..(page + 1) * P)).collect();
    let error = world.runtime.fault_many(&ranges, world.stream).map(drop).unwrap_err();
    let asked = format!("and 6 more ranges ({} bytes)", 10 * P);
    check_driver_text(&world, &error, Verb::MemCreate, &["page 3 of", &asked]);
}

#[test]
fn scenario_60_strict_eviction_tells_what_did_not_go() {
    let world = World::evicting(1, Eviction::Strict);
    let (old, new) = (world.vbar(1), world.vbar(1));
    drop(resident(&world, &old, 0..1));
    world.sim.ctx_synchronize().unwrap();
    world.sim.fail_always(Verb::MemUnmap, CODE);
    let error = new.fault(0..P, world.stream).map(drop).unwrap_err();
    let page = format!("page 0 of VBAR {} ({P} bytes)", new.number());
    check_driver_text(&world, &error, Verb::MemUnmap, &[&page]);
    world.sim.heal();
    world.check();
}

#[test]
fn scenario_60_a_frame_in_use_tells_why_it_cannot_be_waited_for() {
    for verb in [Verb::StreamWaitEvent, Verb::EventRecord, Verb::EventQuery] {
        let world = World::budget(1);
        let (old, new, other) = (world.vbar(1), world.vbar(1), world.another_stream());
        world.sim.hold_stream(world.stream).unwrap();
        let guard = resident(&world, &old, 0..1);
        world.write(guard.address(), P, 1, world.stream);
        drop(guard);
        world.sim.fail_always(verb, CODE);
        let error = new.fault(0..P, other).map(drop).unwrap_err();
        let page = format!("page 0 of VBAR {} ({P} bytes)", new.number());
        check_driver_text(&world, &error, verb, &[&page]);
        world.sim.heal();
        world.sim.release_stream(world.stream).unwrap();
        world.sim.ctx_synchronize().unwrap();
        drop(resident_on(&new, 0..1, other));
        world.check();
    }
}

fn model(world: &World) -> (TempDir, ModelBar) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    synthesize(&path, 8 * P, 3).unwrap();
    let bar = world.runtime.open_model(&path).unwrap();
    (folder, bar)
}

#[test]
fn scenario_60_every_driver_call_of_a_fill_is_told() {
    for verb in [Verb::MemcpyHtodAsync, Verb::EventRecord, Verb::EventCreate] {
        let world = World::budget(20);
        let (_folder, bar) = model(&world);
        world.sim.fail_always(verb, CODE);
        let error = bar.fault(0, world.stream).map(drop).unwrap_err();
        let words = [&*bar.model().tensors()[0].name, "of VBAR", "bytes)"];
        check_driver_text(&world, &error, verb, &words);
        world.sim.heal();
        drop(bar.fault(0, world.stream).unwrap());
        world.check();
    }
}

#[test]
fn scenario_60_a_file_that_fails_is_told_with_the_page() {
    let world = World::budget(20);
    let (folder, bar) = model(&world);
    let path = folder.path().join("model.safetensors");
    std::fs::File::options().write(true).open(path).unwrap().set_len(100).unwrap();
    let error = bar.fault(0, world.stream).map(drop).unwrap_err();
    assert_eq!(error.code(), ErrorCode::FileChanged, "{error}");
    check_text(&world, &error, &["model.safetensors", "of VBAR"]);
    assert_eq!(error.driver_code(), None);
}

#[test]
fn scenario_60_a_wait_that_ends_is_told_with_the_page() {
    let options = RuntimeOptions {
        eviction: Eviction::Strict,
        wait_timeout: Duration::from_millis(10),
        ..budget_options(1)
    };
    let world = World::with(ROOMY, options);
    let (old, new) = (world.vbar(1), world.vbar(1));
    world.sim.hold_stream(world.stream).unwrap();
    let guard = resident(&world, &old, 0..1);
    world.write(guard.address(), P, 1, world.stream);
    drop(guard);
    let error = new.fault(0..P, world.another_stream()).map(drop).unwrap_err();
    assert_eq!(error.code(), ErrorCode::TimedOut);
    let page = format!("page 0 of VBAR {}", new.number());
    let words = ["waited ", " ms for frame", &page, "set a longer wait time-out"];
    check_text(&world, &error, &words);
    world.sim.release_stream(world.stream).unwrap();
}

#[test]
fn scenario_60_an_allocation_tells_what_it_waited_for() {
    let world = World::budget(4);
    let (vbar, other) = (world.vbar(2), world.another_stream());
    let allocation = vbar.allocate(P).unwrap();
    world.sim.hold_stream(world.stream).unwrap();
    let AllocationFault::Refill(fill) = allocation.fault(world.stream).unwrap() else {
        panic!("never written")
    };
    world.write(fill.address(), P, 1, world.stream);
    drop(fill.commit(world.stream).unwrap());
    world.sim.fail_always(Verb::StreamWaitEvent, CODE);
    let error = allocation.fault(other).map(drop).unwrap_err();
    let asked = format!("the allocation at 0..{P} of VBAR {}", vbar.number());
    check_driver_text(&world, &error, Verb::StreamWaitEvent, &[&asked]);
    world.sim.heal();
    world.sim.release_stream(world.stream).unwrap();
    drop(allocation.fault(other).unwrap());
    world.check();
}

#[test]
fn scenario_60_a_lost_device_tells_how_it_was_lost() {
    let world = World::budget(4);
    let vbar = world.vbar(2);
    world.sim.lose_device(DEVICE, DriverCode::ECC_UNCORRECTABLE);
    // The first call finds out, and the later ones remember.
    for call in 0..3 {
        let error = vbar.fault(0..P, world.stream).map(drop).unwrap_err();
        assert_eq!(error.code(), ErrorCode::DeviceLost, "{error}");
        let page = format!("page 0 of VBAR {}", vbar.number());
        check_text(&world, &error, &["CUDA_ERROR_ECC_UNCORRECTABLE (214)", "cu", &page]);
        assert_eq!(error.to_string().contains("device 0 is lost: cu"), call > 0, "{error}");
    }
}

/// A call on a VBAR, or on its runtime.
type Call = fn(&World, &Vbar) -> Result<(), Error>;

#[test]
fn scenario_60_other_calls_tell_as_much() {
    let calls: [(&str, Verb, Call); 9] = [
        ("freeing 65536 bytes of VBAR", Verb::CtxGetCurrent, |_, vbar| {
            vbar.free_memory(P).map(drop)
        }),
        ("freeing 65536 bytes:", Verb::CtxGetCurrent, |world, _| {
            world.runtime.free_memory(P).map(drop)
        }),
        ("setting the budget to 131072 bytes", Verb::MemGetInfo, |world, _| {
            world.runtime.set_budget(Some(2 * P))
        }),
        ("lifting the budget's limit", Verb::MemGetInfo, |world, _| world.runtime.set_budget(None)),
        ("setting the headroom to 65536 bytes", Verb::MemGetInfo, |world, _| {
            world.runtime.set_headroom(P)
        }),
        ("looking at the budget", Verb::MemGetInfo, |world, _| world.runtime.refresh()),
        ("trimming to 65536 bytes", Verb::CtxGetCurrent, |world, _| {
            world.runtime.trim(P).map(drop)
        }),
        ("creating a VBAR of 65536 bytes", Verb::CtxGetCurrent, |world, _| {
            world.runtime.create_bar(P).map(drop)
        }),
        ("end of run of VBAR", Verb::EventRecord, |world, vbar| {
            vbar.end_of_run(world.stream, HeldPins::Keep).map(drop)
        }),
    ];
    for (asked, verb, call) in calls {
        let world = World::budget(6);
        let vbar = world.vbar(4);
        drop(resident(&world, &vbar, 0..4));
        world.sim.fail_always(verb, CODE);
        check_driver_text(&world, &call(&world, &vbar).unwrap_err(), verb, &[asked]);
        world.sim.heal();
        world.check();
    }
}

#[test]
fn scenario_60_a_vbar_that_cannot_be_told_says_how_much_there_is() {
    let world = World::budget(6);
    let vbar = world.vbar(1);
    let error = vbar.allocate(2 * P).map(drop).unwrap_err();
    assert_eq!(error.code(), ErrorCode::NoAddresses);
    let asked = format!("{} bytes of VBAR {}", 2 * P, vbar.number());
    check_text(&world, &error, &[&asked, &format!("0 of {P} bytes are allocated")]);
    world.sim.fail_always(Verb::MemAddressReserve, DriverCode::INVALID_CONTEXT);
    let error = world.runtime.create_bar(3 * P).map(drop).unwrap_err();
    assert_eq!(error.driver_code(), Some(DriverCode::INVALID_CONTEXT));
    check_text(&world, &error, &["cuMemAddressReserve", "CUDA_ERROR_INVALID_CONTEXT", "196608"]);
    let error = vbar.fault(P..2 * P, world.stream).map(drop).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
    let text = format!("bytes {P}..{} are outside VBAR {} of {P} bytes", 2 * P, vbar.number());
    assert_eq!(error.to_string(), text);
}

#[test]
fn scenario_60_the_source_of_the_budget_is_named() {
    let asked_at = |world: &World| {
        let vbar = world.vbar(1);
        world.sim.fail_nth(Verb::MemCreate, 1, CODE);
        vbar.fault(0..P, world.stream).map(drop).unwrap_err()
    };
    let world = World::budget(3);
    check_text(&world, &asked_at(&world), &["budget 196608 bytes (explicit)"]);
    let world = World::new(100);
    check_text(&world, &asked_at(&world), &["(automatic: driver-free memory less headroom)"]);
    let options = RuntimeOptions { poll_interval: Duration::from_secs(3600), ..options() };
    let world = World::with("capacity=6400K,granularity=64K", options);
    world.sim.fail_always(Verb::MemCreate, DriverCode::OUT_OF_MEMORY);
    let vbar = world.vbar(2);
    drop(vbar.fault(0..P, world.stream).unwrap());
    let error = vbar.allocate(4 * P).map(drop).unwrap_err();
    check_text(&world, &error, &["budget 0 bytes (automatic: the driver refused more)"]);
    let world = World::new(100);
    let vbar = world.vbar(4);
    let held = resident(&world, &vbar, 0..4);
    world.runtime.set_headroom(2 * P).unwrap();
    world.sim.set_outside_bytes(DEVICE, 96 * P);
    world.runtime.refresh().unwrap();
    let error = vbar.allocate(5 * P).map(drop).unwrap_err();
    check_text(&world, &error, &["(automatic: shrunk for another program)"]);
    drop(held);
}

#[test]
fn scenario_60_a_use_that_no_fence_covers_is_told_with_its_page() {
    let options = RuntimeOptions {
        record_interval: Duration::from_secs(3600),
        context_waits: ContextWaits::Never,
        ..budget_options(8)
    };
    let world = World::with(ROOMY, options);
    let vbar = world.vbar(1);
    let guard = resident(&world, &vbar, 0..1);
    let token = guard.into_token();
    vbar.end_of_run(world.stream, HeldPins::Release).unwrap();
    let error = world.runtime.unpin(token, world.stream).unwrap_err();
    assert_eq!(error.code(), ErrorCode::StaleToken);
    let page = format!("unpinning page 0 of VBAR {}", vbar.number());
    assert!(error.to_string().starts_with(&page), "{error}");
}

/// What must hold of numbers that were taken together, whatever happens meanwhile.
fn check_statistics(now: &Statistics, before: &Statistics, budget: u64) {
    let memory = &now.memory;
    for bytes in [memory.used_bytes, memory.free_bytes, memory.peak_bytes, memory.budget_bytes] {
        assert_eq!(bytes % P, 0, "{memory:?}");
    }
    assert!(memory.used_bytes <= memory.peak_bytes && memory.peak_bytes <= budget, "{memory:?}");
    assert_eq!((memory.budget_bytes, memory.quarantined_bytes), (budget, 0), "{memory:?}");
    let kept = memory.resident_pages * P + memory.free_bytes + memory.poison_bytes;
    assert!(kept <= memory.used_bytes, "{memory:?}");
    assert!(memory.poison_bytes <= P && memory.quarantined_pages == 0, "{memory:?}");
    assert!(memory.bars + memory.closing_bars <= 64, "{memory:?}");
    // Counts only grow.
    let counts = |of: &Statistics| {
        [of.hits, of.misses, of.pages_mapped, of.pages_evicted, of.pages_aliased, of.bytes_filled]
    };
    let (old, new) = (counts(before), counts(now));
    assert!(old.iter().zip(&new).all(|(old, new)| old <= new), "{old:?} to {new:?}");
    assert!(now.memory.peak_bytes >= before.memory.peak_bytes);
}

#[test]
fn scenario_60_statistics_agree_while_four_threads_work() {
    for (eviction, poison) in [
        (Eviction::Aliasing, Poison::Off),
        (Eviction::Strict, Poison::Off),
        (Eviction::Aliasing, Poison::On),
    ] {
        let world = World::with(ROOMY, RuntimeOptions { eviction, poison, ..budget_options(10) });
        let (_folder, model) = model(&world);
        let shared = [world.vbar(6), world.vbar(6)];
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4u64)
                .map(|thread| {
                    let (world, model, shared) = (&world, &model, &shared);
                    scope.spawn(move || work(world, model, shared, thread))
                })
                .collect();
            let looking = scope.spawn(|| {
                let mut before = world.runtime.statistics();
                let mut looks = 0u64;
                while !done.load(Ordering::Acquire) {
                    let now = world.runtime.statistics();
                    check_statistics(&now, &before, 10 * P);
                    (before, looks) = (now, looks + 1);
                }
                looks
            });
            let ended: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
            done.store(true, Ordering::Release);
            ended.into_iter().for_each(Result::unwrap);
            assert!(looking.join().unwrap() > 0);
        });
        world.sim.ctx_synchronize().unwrap();
        world.check();
    }
}

fn work(world: &World, model: &ModelBar, shared: &[Vbar; 2], thread: u64) {
    world.sim.ctx_set_current(Some(world.runtime.device().context)).unwrap();
    let (stream, target) = (world.another_stream(), world.scratch());
    let tensors = model.model().tensors().len();
    for round in 0..200u64 {
        let at = (thread * 7 + round * 5) % 11;
        match at {
            0..3 => drop(model.fault((round % tensors as u64) as usize, stream).unwrap()),
            3 => assert!(world.runtime.trim(4 * P).unwrap() <= 10 * P),
            4 => assert!(shared[0].free_memory(2 * P).unwrap().bytes <= 2 * P),
            5 => {
                let own = world.vbar(3);
                drop(own.fault(0..2 * P, stream).unwrap());
            }
            _ => {
                let (vbar, page) = (&shared[at as usize % 2], round % 5);
                vbar.prioritise().unwrap();
                if let Fault::Resident(guard) =
                    vbar.fault(page * P..(page + 2) * P, stream).unwrap()
                {
                    world.sum(guard.address(), 2 * P, target, Duration::ZERO, stream);
                }
            }
        }
    }
}
