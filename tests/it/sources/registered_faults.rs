//! Registered pages of a file when something goes wrong: the driver refuses or hangs, the file
//! changes under them.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use vbar::ErrorCode;
use vbar::driver::DriverCode;
use vbar::driver::sim::Verb;

use super::registered::{PAGES, able, preferring, rig};
use super::*;

/// A rig whose model streams from memory, and its system.
fn warm() -> (Rig, super::host_memory::System) {
    let system = able(60 << 30);
    (rig(&system, preferring(Prefer::Ram)), system)
}

/// Lets the one on trial come back.
fn keep_house(rig: &Rig) {
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(2));
        rig.filler().housekeep().unwrap();
    }
}

#[test]
fn a_driver_that_refuses_is_not_asked_again() {
    // The first is on trial, the third is one of several.
    for nth in [1, 3] {
        let (rig, _system) = warm();
        let verb = Verb::MemHostRegisterReadOnly;
        rig.sim.fail(verb, nth - 1, u64::MAX, DriverCode::NOT_SUPPORTED);
        rig.stream(3);
        keep_house(&rig);
        let calls = rig.read_only_calls();
        assert_eq!((calls, rig.registered_bytes()), (nth, (nth - 1) * UNIT));
        rig.sim.heal();
        let before = rig.sources().registered_bytes;
        rig.stream(4);
        keep_house(&rig);
        assert_eq!(rig.read_only_calls(), calls, "it is tried again");
        // What is registered serves, the rest is locked in memory of ours now.
        assert_eq!(rig.sources().registered_bytes - before, 4 * (nth - 1) * P);
        assert_eq!(rig.cache_bytes(), (u64::from(PAGES) - (nth - 1)) * UNIT);
        rig.check_shut();
    }
}

#[test]
fn a_trial_whose_thread_cannot_enter_the_context_has_failed() {
    // The housekeeping enters it too, now and then by the clock: it is tried until the trial is
    // whom the failure meets.
    let met = (0..20).any(|_| {
        let (rig, _system) = warm();
        rig.stream(2);
        rig.fill(0..PAGES, Keep::Locked);
        rig.sim.fail_nth(Verb::ThreadExchangeStreamCaptureMode, 1, DriverCode::UNKNOWN);
        keep_house(&rig);
        let none = (rig.read_only_calls(), rig.registered_bytes()) == (0, 0);
        rig.stream(2);
        rig.check_shut();
        none
    });
    assert!(met);
}

#[test]
fn a_driver_that_hangs_is_left_behind() {
    let (rig, _system) = warm();
    rig.sim.hang(Verb::MemHostRegisterReadOnly);
    rig.stream(3);
    while rig.read_only_calls() == 0 {
        std::thread::yield_now();
    }
    // Its bytes are held: nobody knows. Meanwhile everything goes on.
    assert_eq!(rig.registered_bytes(), UNIT);
    let begun = std::time::Instant::now();
    while begun.elapsed() < Duration::from_millis(2050) {
        rig.stream(1);
        std::thread::sleep(Duration::from_millis(20));
    }
    // It counts as off: the bytes are locked in memory of ours.
    rig.stream(2);
    assert_eq!((rig.read_only_calls(), rig.cache_bytes()), (1, u64::from(PAGES) * UNIT));
    assert_eq!(rig.registered_bytes(), UNIT);
    // It comes back after all, and gives the window back itself.
    rig.sim.heal();
    while rig.sim.calls(Verb::MemHostUnregister) == 0 {
        std::thread::yield_now();
    }
    rig.stream(1);
    assert_eq!((rig.read_only_calls(), rig.sources().registered_bytes), (1, 0));
    rig.check_shut();
}

#[test]
fn closing_waits_for_a_trial_no_longer_than_it_counts() {
    let (mut rig, _system) = warm();
    rig.sim.hang(Verb::MemHostRegisterReadOnly);
    rig.stream(3);
    while rig.read_only_calls() == 0 {
        std::thread::yield_now();
    }
    drop(rig.filler.take());
    assert_eq!(rig.sim.live_streams(), 0);
    rig.sim.heal();
    // The thread lets go of the window, then of the device.
    while Arc::strong_count(&rig.device) > 1 || rig.sim.locked_bytes() > 0 {
        std::thread::yield_now();
    }
    assert_eq!(rig.sim.violations(), Vec::<String>::new());
}

#[test]
fn a_window_that_the_driver_keeps_stays_held() {
    let (rig, _system) = warm();
    rig.register();
    rig.sim.fail_nth(Verb::MemHostUnregister, 1, DriverCode::UNKNOWN);
    let rest = rig.filler().locked_bytes() - u64::from(PAGES) * UNIT;
    // File pages go first.
    assert_eq!(rig.filler().trim_host(rest).unwrap(), (u64::from(PAGES) - 1) * UNIT);
    assert_eq!(rig.registered_bytes(), UNIT);
    assert!(rig.sim.locked_bytes() >= UNIT && rig.sim.violations().is_empty());
    // The rest of the model is registered anew beside it.
    rig.stream(2);
    keep_house(&rig);
    assert!(rig.registered_bytes() > UNIT);
    rig.stream(1);
    assert_eq!(rig.sim.violations(), Vec::<String>::new());
}

#[test]
fn a_refused_copy_of_registered_pages_is_the_devices_error() {
    for nth in 1..=u64::from(PAGES) {
        let (rig, _system) = warm();
        rig.register();
        rig.sim.fail_nth(Verb::MemcpyHtodAsync, nth, DriverCode::INVALID_VALUE);
        let error = rig.fill_failing(0..PAGES, Keep::Locked);
        assert_eq!(error.code(), ErrorCode::Driver);
        rig.stream(1);
        rig.check_shut();
    }
}

#[test]
fn a_fence_that_fails_leaves_the_window_until_its_copy_is_known() {
    let (rig, _system) = warm();
    rig.register();
    rig.sim.fail_nth(Verb::EventRecord, 2, DriverCode::UNKNOWN);
    assert!(rig.try_fill(0..PAGES, Keep::Locked).iter().any(Result::is_err));
    let (stream, _) = rig.filler().stream();
    rig.sim.stream_synchronize(stream).unwrap();
    rig.stream(1);
    rig.filler().trim_host(0).unwrap();
    rig.check_shut();
}

#[test]
fn a_file_that_was_cut_short_says_so_and_kills_nobody() {
    let (rig, _system) = warm();
    rig.register();
    let (stream, _) = rig.filler().stream();
    rig.sim.hold_stream(stream).unwrap();
    assert!(rig.try_fill(0..PAGES, Keep::Locked).iter().all(Result::is_ok));
    // The copies are enqueued; the pages are the device's until they are done. (Of a page that is
    // cut in the middle the kernel clears the rest, for the device too.)
    OpenOptions::new().write(true).open(&rig.path).unwrap().set_len(OFFSET / 4096 * 4096).unwrap();
    rig.sim.release_stream(stream).unwrap();
    rig.sim.stream_synchronize(stream).unwrap();
    let found = rig.sim.read_bytes(rig.base, rig.bytes.len()).unwrap();
    assert!(found == rig.bytes, "what was registered was read");
    // Nobody can vouch for them all the same.
    rig.filler().housekeep().unwrap();
    let mut stale = rig.filler().take_stale();
    stale.sort_unstable();
    assert_eq!(stale, (0..PAGES).map(|page| (0, page)).collect::<Vec<_>>());
    for _ in 0..2 {
        let error = rig.fill_failing(0..PAGES, Keep::Locked);
        assert_eq!(error.code(), ErrorCode::FileChanged, "{error}");
    }
    rig.check_shut();
}

#[test]
fn a_file_that_is_written_or_replaced_says_so() {
    for replaced in [true, false] {
        let (rig, _system) = warm();
        rig.register();
        std::thread::sleep(Duration::from_millis(20));
        if replaced {
            std::fs::rename(&rig.path, rig.folder.path().join("elsewhere")).unwrap();
        } else {
            let file = OpenOptions::new().write(true).open(&rig.path).unwrap();
            file.write_all_at(b"other", OFFSET + 3 * P).unwrap();
        }
        let registered = rig.sources().registered_bytes;
        for _ in 0..2 {
            assert_eq!(rig.fill_failing(0..PAGES, Keep::Locked).code(), ErrorCode::FileChanged);
            rig.filler().housekeep().unwrap();
        }
        assert_eq!(rig.sources().registered_bytes, registered);
        assert!(rig.filler().take_stale().is_empty(), "every copy was done before");
        rig.check_shut();
    }
}
