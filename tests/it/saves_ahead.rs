//! Page-locked memory for saves is locked ahead of need by a thread of the library's, counted and
//! bounded as ever, and nothing of it is left behind whatever fails or ends in the middle.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vbar::driver::DriverCode;
use vbar::driver::sim::Verb;
use vbar::{ErrorCode, RuntimeOptions, Threads, Vbar, WaitKind, set_wait_check};

use crate::world::{P, World, budget_options};

const DEVICE: &str = "capacity=64M,granularity=64K";
/// What is locked at a time, and what is kept free.
const WINDOW: u64 = 64 << 20;
const AHEAD: u64 = 2 * WINDOW;

/// A runtime on a system that has memory, whatever this one has; it is there as long as the folder.
fn world_with(threads: Threads, options: RuntimeOptions) -> (World, TempDir) {
    let system = TempDir::new().unwrap();
    let write = |path: &str, text: &str| {
        let path = system.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 60000000 kB\n");
    write("proc/pressure/memory", "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n");
    let (threads, system_root) = (Some(threads), Some(system.path().to_owned()));
    (World::with(DEVICE, RuntimeOptions { threads, system_root, ..options }), system)
}

fn world(options: RuntimeOptions) -> (World, TempDir) {
    world_with(Threads::On, options)
}

fn saved_bytes(world: &World) -> u64 {
    world.runtime.statistics().locked.saved_bytes
}

/// Waits until so much is locked for saves.
#[track_caller]
fn wait_for_saved(world: &World, bytes: u64) {
    let end = Instant::now() + Duration::from_secs(30);
    while saved_bytes(world) != bytes {
        assert!(Instant::now() < end, "{} bytes are locked, not {bytes}", saved_bytes(world));
        std::thread::yield_now();
    }
}

/// Waits of the program for memory to be locked.
fn register_waits(world: &World) -> u64 {
    world.runtime.statistics().waited(WaitKind::Register).count
}

/// Prepares pages one by one.
fn prepare(vbar: &Vbar, pages: std::ops::Range<u64>) -> vbar::Result<()> {
    pages.into_iter().try_for_each(|page| vbar.prepare_save(page * P..(page + 1) * P))
}

#[test]
fn the_next_windows_are_locked_while_one_is_filled() {
    let (world, _system) = world(budget_options(4));
    let vbar = world.vbar(8 * WINDOW / P);
    vbar.prepare_save(0..P).unwrap();
    // Nobody asked for more than a page.
    wait_for_saved(&world, WINDOW + AHEAD);
    assert!(register_waits(&world) <= 1);
    for filled in 0..3 {
        let before = register_waits(&world);
        let pages = WINDOW / P;
        prepare(&vbar, filled * pages + 1..(filled + 1) * pages + 1).unwrap();
        assert_eq!(register_waits(&world), before, "the program waited for a window");
        wait_for_saved(&world, (filled + 2) * WINDOW + AHEAD);
    }
    world.check();
    drop(vbar);
    world.check_shut();
}

#[test]
fn without_threads_a_window_is_locked_when_it_is_needed() {
    let (world, _system) = world_with(Threads::Off, budget_options(4));
    let vbar = world.vbar(2 * WINDOW / P);
    prepare(&vbar, 0..WINDOW / P).unwrap();
    assert_eq!((saved_bytes(&world), register_waits(&world)), (WINDOW, 1));
    vbar.prepare_save(WINDOW..WINDOW + P).unwrap();
    assert_eq!((saved_bytes(&world), register_waits(&world)), (2 * WINDOW, 2));
    drop(vbar);
    world.check_shut();
}

#[test]
fn what_cannot_be_locked_is_refused_and_nothing_is_held() {
    let (world, _system) = world(budget_options(4));
    let vbar = world.vbar(4 * WINDOW / P);
    // The ring is there before.
    vbar.prepare_save(0..P).unwrap();
    wait_for_saved(&world, WINDOW + AHEAD);
    let held = world.runtime.statistics().locked_bytes;
    world.sim.fail_always(Verb::MemHostRegister, DriverCode::OUT_OF_MEMORY);
    // What is ready needs no driver.
    prepare(&vbar, 1..(WINDOW + AHEAD) / P).unwrap();
    for _ in 0..2 {
        let refused = vbar.prepare_save(WINDOW + AHEAD..WINDOW + AHEAD + P).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::HostMemory, "{refused}");
    }
    assert_eq!(world.runtime.statistics().locked_bytes, held);
    assert_eq!(world.sim.locked_bytes(), held);
    world.sim.heal();
    vbar.prepare_save(WINDOW + AHEAD..WINDOW + AHEAD + P).unwrap();
    world.check();
    drop(vbar);
    world.check_shut();
}

#[test]
fn nothing_is_locked_ahead_above_the_allowance() {
    for (allowance, saved) in [(4 << 20, 2 << 20), (80 << 20, WINDOW), (160 << 20, 2 * WINDOW)] {
        let options = RuntimeOptions {
            host_allowance: Some(allowance),
            staging_slot_count: 1,
            ..budget_options(4)
        };
        let (world, _system) = world(options);
        let vbar = world.vbar(4 * WINDOW / P);
        vbar.prepare_save(0..P).unwrap();
        wait_for_saved(&world, saved);
        let mut prepared = 1;
        let refused = loop {
            match prepare(&vbar, prepared..prepared + 1) {
                Ok(()) => prepared += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(refused.code(), ErrorCode::HostMemory, "{refused}");
        assert!(prepared * P >= saved && world.sim.locked_bytes() <= allowance);
        world.check();
        drop(vbar);
        world.check_shut();
    }
}

#[test]
fn what_is_free_goes_at_once_when_memory_gets_short() {
    let (world, system) = world(budget_options(4));
    let vbar = world.vbar(8);
    vbar.prepare_save(0..P).unwrap();
    wait_for_saved(&world, WINDOW + AHEAD);
    let pressure = system.path().join("proc/pressure/memory");
    let short = "some avg10=50.00 avg60=0.00 avg300=0.00 total=9\n";
    std::fs::write(&pressure, short).unwrap();
    // One has a page's room in it.
    wait_for_saved(&world, WINDOW);
    let used = world.runtime.statistics().locked;
    assert_eq!(used.excess_bytes, used.saved_bytes);
    // What has room is given out, and nothing is locked beside it.
    prepare(&vbar, 1..8).unwrap();
    let large = world.vbar(WINDOW / P);
    let refused = large.prepare_save(0..WINDOW).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::HostMemory, "{refused}");
    assert_eq!(saved_bytes(&world), WINDOW);
    drop(vbar);
    wait_for_saved(&world, 0);
    world.check();
    drop(large);
    world.check_shut();
}

#[test]
fn what_is_free_goes_when_nothing_is_saved_any_more() {
    let (world, _system) = world(budget_options(4));
    let vbar = world.vbar(8);
    vbar.prepare_save(0..P).unwrap();
    wait_for_saved(&world, WINDOW + AHEAD);
    // One has a page's room in it.
    wait_for_saved(&world, WINDOW);
    vbar.drop_save(0..P).unwrap();
    wait_for_saved(&world, 0);
    vbar.prepare_save(0..P).unwrap();
    world.check();
    drop(vbar);
    world.check_shut();
}

#[test]
fn whoever_waits_for_a_window_can_be_told_to_end() {
    let (world, _system) = world(budget_options(4));
    let vbar = world.vbar(8);
    // The filler and its ring.
    vbar.prepare_save(0..P).unwrap();
    wait_for_saved(&world, WINDOW + AHEAD);
    prepare(&vbar, 1..8).unwrap();
    let large = world.vbar(4 * WINDOW / P);
    world.sim.hang(Verb::MemHostRegister);
    world.runtime.set_wait_timeout(Duration::from_millis(200));
    let waited = large.prepare_save(0..4 * WINDOW).unwrap_err();
    assert_eq!(waited.code(), ErrorCode::TimedOut, "{waited}");
    world.runtime.set_wait_timeout(Duration::from_secs(60));
    let cancelled = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| large.prepare_save(0..4 * WINDOW).unwrap_err());
        while !waiting.is_finished() {
            world.runtime.cancel_waits();
            std::thread::yield_now();
        }
        waiting.join().unwrap()
    });
    assert_eq!(cancelled.code(), ErrorCode::Cancelled, "{cancelled}");
    world.sim.heal();
    // It is there by then, or soon: nothing was lost with those who left.
    large.prepare_save(0..4 * WINDOW).unwrap();
    world.check();
    drop((vbar, large));
    world.check_shut();
}

#[test]
fn a_window_that_is_long_in_coming_is_locked_once() {
    let (world, _system) = world(budget_options(4));
    let vbar = world.vbar(8);
    vbar.prepare_save(0..P).unwrap();
    wait_for_saved(&world, WINDOW + AHEAD);
    let large = world.vbar(2 * WINDOW / P);
    world.sim.hang(Verb::MemHostRegister);
    let (sim, mut looks) = (Arc::clone(&world.sim), 0);
    set_wait_check(Some(Box::new(move || {
        looks += 1;
        if looks == 5 {
            sim.heal();
        }
        ControlFlow::Continue(())
    })));
    let prepared = large.prepare_save(0..2 * WINDOW);
    set_wait_check(None);
    prepared.unwrap();
    // What the thread has begun has ended then.
    world.runtime.set_threads(Threads::Off).unwrap();
    assert_eq!(saved_bytes(&world), WINDOW + AHEAD + 2 * WINDOW);
    world.check();
    drop((vbar, large));
    world.check_shut();
}

#[test]
fn closing_and_ending_threads_in_the_middle_leave_nothing() {
    for _ in 0..3 {
        let (world, _system) = world(budget_options(4));
        let vbar = world.vbar(8);
        vbar.prepare_save(0..P).unwrap();
        drop(vbar);
        world.check_shut();
    }
    let (world, _system) = world(budget_options(4));
    let vbar = world.vbar(2 * (WINDOW + AHEAD) / P);
    vbar.prepare_save(0..P).unwrap();
    world.runtime.set_threads(Threads::Off).unwrap();
    let (locked, before) = (saved_bytes(&world), register_waits(&world));
    prepare(&vbar, 1..locked / P).unwrap();
    assert_eq!((saved_bytes(&world), register_waits(&world)), (locked, before));
    prepare(&vbar, locked / P..locked / P + 1).unwrap();
    assert_eq!((saved_bytes(&world), register_waits(&world)), (locked + WINDOW, before + 1));
    drop(vbar);
    world.check_shut();
}
