//! Bytes that a program wrote and saved: they come back by themselves, what lies beside them in a
//! page is told to be lost, and memory is counted, given back, and never written in a race.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vbar::driver::sim::Verb;
use vbar::driver::{CaptureMode, Driver, DriverCode};
use vbar::options::{Eviction, RuntimeOptions};
use vbar::units::Stream;
use vbar::{ErrorCode, Fault, Reason, Vbar};

use crate::forked::in_child;
use crate::world::{P, World, budget_options, options, pattern_bytes, pattern_sum};

const STRICT_DEVICE: &str = "capacity=64M,granularity=64K,checked=1";

/// Writes the pattern of `seed` over bytes of a VBAR and saves them.
#[track_caller]
fn write_and_save(world: &World, vbar: &Vbar, bytes: std::ops::Range<u64>, seed: u64) {
    vbar.prepare_save(bytes.clone()).unwrap();
    let Fault::Resident(guard) = vbar.fault(bytes.clone(), Stream::NONE).unwrap() else {
        panic!("{bytes:?} are not resident");
    };
    world.write(guard.address(), bytes.end - bytes.start, seed, world.stream);
    vbar.save(bytes, world.stream).unwrap();
    let token = guard.into_token();
    world.runtime.unpin(token, world.stream).unwrap();
}

/// What a kernel on the stream reads.
#[track_caller]
fn check_bytes(world: &World, vbar: &Vbar, bytes: std::ops::Range<u64>, seed: u64) {
    let scratch = world.scratch();
    let Fault::Resident(guard) = vbar.fault(bytes.clone(), world.stream).unwrap() else {
        panic!("{bytes:?} are not resident");
    };
    let length = bytes.end - bytes.start;
    world.sum(guard.address(), length, scratch, Duration::ZERO, world.stream);
    guard.unpin().unwrap();
    assert_eq!(world.word(scratch, world.stream), pattern_sum(length, seed), "{bytes:?}");
}

#[test]
fn written_bytes_come_back_through_fewer_frames_than_they_need() {
    for eviction in [Eviction::Strict, Eviction::Aliasing] {
        let options = RuntimeOptions { eviction, ..budget_options(4) };
        let world = World::with(STRICT_DEVICE, options);
        let vbar = world.vbar(10);
        for page in 0..10 {
            write_and_save(&world, &vbar, page * P..(page + 1) * P, page);
        }
        for _ in 0..3 {
            for page in 0..10 {
                check_bytes(&world, &vbar, page * P..(page + 1) * P, page);
            }
        }
        assert!(world.runtime.used_bytes() <= 4 * P);
        let told = world.runtime.statistics();
        assert!(told.sources.host_locked_bytes >= 20 * P, "{told:?}");
        assert_eq!(told.locked_bytes, told.locked.sum());
        assert!(told.locked.saved_bytes >= 10 * P);
        // No save has moved the watermark, which is for what is not saved.
        assert_eq!(vbar.marks().watermark, 10);
        world.check();
        drop(vbar);
        world.check_shut();
    }
}

#[test]
fn what_lies_beside_saved_bytes_is_told_to_be_lost() {
    let world = World::with(STRICT_DEVICE, budget_options(2));
    let (vbar, other) = (world.vbar(4), world.vbar(2));
    write_and_save(&world, &vbar, 0..P / 2, 7);
    let before = resident_signature(&world, &vbar, P / 2..P);
    other.prioritise().unwrap();
    world.touch(&other, 0..2).unwrap();
    assert_ne!(vbar.draw(1), "#");
    // It streams through frames of others like it and of lower ones.
    vbar.prioritise().unwrap();
    check_bytes(&world, &vbar, 0..P / 2, 7);
    assert_ne!(resident_signature(&world, &vbar, P / 2..P), before);
    // A range over two pages, of which one has bytes and none is lost by the way.
    write_and_save(&world, &vbar, P / 2..2 * P - 512, 8);
    other.prioritise().unwrap();
    world.touch(&other, 0..2).unwrap();
    vbar.prioritise().unwrap();
    check_bytes(&world, &vbar, P / 2..2 * P - 512, 8);
    check_bytes(&world, &vbar, 0..P / 2, 7);
    world.check();
    drop((vbar, other));
    world.check_shut();
}

fn resident_signature(world: &World, vbar: &Vbar, bytes: std::ops::Range<u64>) -> u64 {
    let Fault::Resident(guard) = vbar.fault(bytes, world.stream).unwrap() else {
        panic!("it is not resident");
    };
    guard.signature().iter().map(|generation| generation.0).max().unwrap()
}

#[test]
fn what_was_dropped_is_written_anew_behind_all_copies() {
    let world = World::with(STRICT_DEVICE, budget_options(2));
    let vbar = world.vbar(4);
    let second = world.another_stream();
    write_and_save(&world, &vbar, 0..P, 1);
    write_and_save(&world, &vbar, P..2 * P, 2);
    write_and_save(&world, &vbar, 2 * P..3 * P, 3);
    let Fault::Resident(guard) = vbar.fault(0..P, world.stream).unwrap() else { panic!() };
    // Whoever writes on a stream that comes after nothing is in no race.
    vbar.drop_save(0..P).unwrap();
    world.write(guard.address(), P, 10, second);
    world.sim.stream_synchronize(second).unwrap();
    vbar.prepare_save(0..P).unwrap();
    vbar.save(0..P, second).unwrap();
    let token = guard.into_token();
    world.runtime.unpin(token, second).unwrap();
    for (page, seed) in [(1, 2), (2, 3), (0, 10), (1, 2), (2, 3), (0, 10)] {
        check_bytes(&world, &vbar, page * P..(page + 1) * P, seed);
    }
    vbar.drop_save(0..P).unwrap();
    vbar.drop_save(0..P).unwrap();
    vbar.drop_save(5..6).unwrap();
    world.check();
    drop(vbar);
    let _ = world.sim.stream_destroy(second);
    world.check_shut();
}

#[test]
fn a_watermark_keeps_out_what_was_not_prepared() {
    let world = World::budget(2);
    let vbar = world.vbar(4);
    world.touch(&vbar, 0..2).unwrap();
    let refused = world.touch(&vbar, 2..3).unwrap_err();
    assert!(matches!(refused, Reason::Budget | Reason::AboveWatermark), "{refused}");
    write_and_save(&world, &vbar, 2 * P..3 * P, 5);
    write_and_save(&world, &vbar, 3 * P..4 * P, 6);
    check_bytes(&world, &vbar, 2 * P..3 * P, 5);
    check_bytes(&world, &vbar, 3 * P..4 * P, 6);
    world.check();
}

#[test]
fn memory_for_saves_is_counted_and_given_back() {
    let allowance = 4 << 20;
    let options = RuntimeOptions {
        host_allowance: Some(allowance),
        staging_slot_count: 1,
        ..budget_options(4)
    };
    let world = World::with(STRICT_DEVICE, options);
    let vbar = world.vbar(64);
    let mut prepared = 0;
    let refused = loop {
        match vbar.prepare_save(prepared * P..(prepared + 1) * P) {
            Ok(()) => prepared += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refused.code(), ErrorCode::HostMemory, "{refused}");
    assert!(prepared > 0 && prepared * P <= allowance);
    assert!(world.sim.locked_bytes() <= allowance);
    world.runtime.trim_host(0).unwrap();
    for page in 0..prepared {
        vbar.drop_save(page * P..(page + 1) * P).unwrap();
    }
    world.runtime.trim_host(0).unwrap();
    assert_eq!(world.runtime.statistics().locked.saved_bytes, 0);
    world.check();
    drop(vbar);
    world.check_shut();
}

#[test]
fn trimming_takes_no_more_than_it_is_asked_for() {
    let world = World::with(STRICT_DEVICE, budget_options(4));
    let vbar = world.vbar(2);
    // Some fill makes the ring; the window is idle again.
    write_and_save(&world, &vbar, 0..P, 1);
    vbar.drop_save(0..P).unwrap();
    let before = world.runtime.statistics();
    assert!(before.locked.ring_bytes > 2 * P && before.locked.saved_bytes > 3 * P);
    world.runtime.trim_host(before.locked_bytes - 3 * P).unwrap();
    let told = world.runtime.statistics().locked;
    assert_eq!((told.saved_bytes, told.ring_bytes), (0, before.locked.ring_bytes));
    world.check();
}

#[test]
fn what_cannot_be_saved_is_refused() {
    let world = World::with(STRICT_DEVICE, options());
    let vbar = world.vbar(4);
    let invalid = |result: vbar::Result<()>, words: &str| {
        let error = result.unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
        assert!(error.to_string().contains(words), "{error}");
    };
    invalid(vbar.prepare_save(8..8), "no bytes");
    invalid(vbar.prepare_save(0..4 * P + 1), "outside");
    invalid(vbar.save(0..P, world.stream), "not prepared");
    vbar.prepare_save(0..P).unwrap();
    vbar.prepare_save(0..P).unwrap();
    invalid(vbar.prepare_save(P - 1..2 * P), "overlaps");
    invalid(vbar.prepare_save(8..16), "overlaps");
    invalid(vbar.save(0..P, world.stream), "not pinned");
    let Fault::Resident(guard) = vbar.fault(0..P, world.stream).unwrap() else { panic!() };
    invalid(vbar.save(0..P - 1, world.stream), "not prepared");
    // What cannot be tried takes nothing away.
    invalid(vbar.save(0..P, Stream::NONE), "no stream");
    world.sim.begin_capture(world.stream, CaptureMode::Relaxed).unwrap();
    let captured = vbar.save(0..P, world.stream).unwrap_err();
    assert_eq!(captured.code(), ErrorCode::Unsupported, "{captured}");
    drop(world.sim.end_capture(world.stream).unwrap());
    vbar.save(0..P, world.stream).unwrap();
    vbar.drop_save(0..P).unwrap();
    write_and_save(&world, &vbar, 0..P, 1);
    invalid(vbar.save(0..P, world.stream), "not prepared");
    drop(guard);
    vbar.close();
    assert_eq!(vbar.prepare_save(P..2 * P).unwrap_err().code(), ErrorCode::Closed);
    drop(vbar);
    world.check_shut();
}

#[test]
fn the_engine_brings_saved_bytes_ahead_in_the_order_that_it_learned() {
    let world = World::with(STRICT_DEVICE, budget_options(6));
    world.runtime.open_engine_by_hand();
    let vbar = world.vbar(12);
    for page in 0..12 {
        write_and_save(&world, &vbar, page * P..(page + 1) * P, page);
    }
    for _ in 0..6 {
        for page in 0..12 {
            world.runtime.drive_engine().unwrap();
            check_bytes(&world, &vbar, page * P..(page + 1) * P, page);
        }
    }
    let before = world.runtime.statistics();
    for page in 0..12 {
        world.runtime.drive_engine().unwrap();
        check_bytes(&world, &vbar, page * P..(page + 1) * P, page);
    }
    let told = world.runtime.statistics();
    assert!(told.engine.plans > 0 && told.engine.kept_pages > 0, "{told:?}");
    assert!(told.pages_ahead > before.pages_ahead, "{told:?}");
    assert_eq!(told.misses, before.misses, "all that streams was there before its fault");
    world.check();
    drop(vbar);
}

#[test]
fn a_closed_vbar_leaves_no_memory_behind() {
    let world = World::with(STRICT_DEVICE, budget_options(3));
    let vbar = world.vbar(6);
    for page in 0..6 {
        write_and_save(&world, &vbar, page * P..(page + 1) * P, page);
    }
    let Fault::Resident(held) = vbar.fault(0..P, world.stream).unwrap() else { panic!() };
    let address = held.address();
    vbar.close();
    // Its bytes stay for who has pinned them.
    world.sim.stream_synchronize(world.stream).unwrap();
    assert_eq!(world.sim.read_bytes(address, P as usize).unwrap(), pattern_bytes(P, 0));
    drop(held);
    drop(vbar);
    world.runtime.trim_host(0).unwrap();
    assert_eq!(world.runtime.statistics().locked.saved_bytes, 0);
    world.check();
    world.check_shut();
}

#[test]
fn while_the_system_is_short_of_memory_what_is_saved_is_to_go() {
    let system = TempDir::new().unwrap();
    let write = |path: &str, text: &str| {
        let path = system.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 60000000 kB\n");
    write("proc/pressure/memory", "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n");
    let options =
        RuntimeOptions { system_root: Some(system.path().to_owned()), ..budget_options(4) };
    let world = World::with(STRICT_DEVICE, options);
    let vbar = world.vbar(4);
    write_and_save(&world, &vbar, 0..P, 1);
    assert_eq!(world.runtime.statistics().locked.excess_bytes, 0);
    write("proc/pressure/memory", "some avg10=50.00 avg60=0.00 avg300=0.00 total=9\n");
    // The system is asked now and then.
    let end = Instant::now() + Duration::from_secs(20);
    let told = loop {
        let told = world.runtime.statistics().locked;
        if told.excess_bytes > 0 || Instant::now() > end {
            break told;
        }
        std::thread::yield_now();
    };
    assert_eq!((told.excess_bytes, told.saved_bytes > 0), (told.saved_bytes, true));
    vbar.drop_save(0..P).unwrap();
    world.runtime.trim_host(0).unwrap();
    let refused = vbar.prepare_save(P..2 * P).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::HostMemory, "{refused}");
    let told = world.runtime.statistics().locked;
    assert_eq!((told.saved_bytes, told.excess_bytes), (0, 0));
    world.check();
    drop(vbar);
    world.check_shut();
}

#[test]
fn room_goes_with_its_vbar_whoever_still_has_a_handle() {
    let world = World::with(STRICT_DEVICE, budget_options(3));
    let vbar = world.vbar(6);
    vbar.prepare_save(0..P).unwrap();
    vbar.prepare_save(P..2 * P).unwrap();
    assert!(world.runtime.statistics().locked.saved_bytes > 0);
    vbar.close();
    assert_eq!(vbar.prepare_save(2 * P..3 * P).unwrap_err().code(), ErrorCode::Closed);
    world.runtime.trim_host(0).unwrap();
    assert_eq!(world.runtime.statistics().locked.saved_bytes, 0);
    vbar.drop_save(0..P).unwrap();
    drop(vbar);
    world.check_shut();
}

#[test]
fn what_was_dropped_goes_although_waiting_for_it_fails() {
    let verbs = [Verb::CtxSetCurrent, Verb::ThreadExchangeStreamCaptureMode];
    for (verb, code) in verbs.into_iter().zip([DriverCode::INVALID_VALUE, DriverCode::NOT_READY]) {
        let world = World::with(STRICT_DEVICE, budget_options(2));
        let vbar = world.vbar(2);
        write_and_save(&world, &vbar, 0..P, 1);
        if verb == Verb::CtxSetCurrent {
            world.sim.ctx_set_current(None).unwrap();
        }
        world.sim.fail_always(verb, code);
        vbar.drop_save(0..P).unwrap_err();
        world.sim.heal();
        let context = world.runtime.device().context;
        world.sim.ctx_set_current(Some(context)).unwrap();
        world.sim.stream_synchronize(world.stream).unwrap();
        vbar.drop_save(0..P).unwrap();
        world.runtime.trim_host(0).unwrap();
        assert_eq!(world.runtime.statistics().locked.saved_bytes, 0, "{verb:?}");
        drop(vbar);
        world.check_shut();
    }
}

#[test]
fn a_forked_child_waits_for_no_lock_of_its_parents() {
    let world = World::with(STRICT_DEVICE, budget_options(2));
    let vbar = world.vbar(64);
    vbar.prepare_save(0..P).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for page in 1..64 {
                    vbar.prepare_save(page * P..(page + 1) * P).unwrap();
                }
                for page in 1..64 {
                    vbar.drop_save(page * P..(page + 1) * P).unwrap();
                }
            }
        });
        let told = || vbar.drop_save(0..P).is_err_and(|it| it.code() == ErrorCode::ProcessEnding);
        let good = (0..40).all(|_| in_child(told));
        stop.store(true, Ordering::Relaxed);
        assert!(good, "the child hung, or was not told");
    });
    drop(vbar);
    world.check_shut();
}
