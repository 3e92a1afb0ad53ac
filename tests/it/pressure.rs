//! The housekeeping thread: other programs' pressure is answered while this one makes no calls.

use std::sync::mpsc;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use vbar::driver::DriverCode;
use vbar::driver::sim::Verb;
use vbar::options::{RuntimeOptions, Threads};
use vbar::units::Stream;
use vbar::{ErrorCode, Fault, Runtime, Vbar};

use crate::forked::in_child;
use crate::logs;
use crate::world::{DEVICE, P, World, budget_options, options, resident, resident_on};

const NAME: &str = "vbar pressure";
/// Pages of the device, resident ones, and headroom.
const ALL: u64 = 32;
const OURS: u64 = 20;
const HEADROOM: u64 = 4;

/// Threads are counted by name in all of the process: one test at a time.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Waits until something is so; long enough for the slowest machine.
#[track_caller]
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn running() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim_end() == NAME).count()
}

/// A thread that has been joined is gone for us, and a moment later for the operating system.
#[track_caller]
fn check_no_thread() {
    eventually("the thread is gone", || running() == 0);
}

fn threaded() -> RuntimeOptions {
    let headroom_bytes = Some(HEADROOM * P);
    RuntimeOptions { threads: Some(Threads::On), headroom_bytes, ..options() }
}

/// A device of which this program has most, its pages unpinned.
fn idle(options: RuntimeOptions, sim: &str) -> (World, Vbar) {
    let world = World::with(&format!("capacity={},granularity=64K{sim}", ALL * P), options);
    let vbar = world.vbar(OURS);
    drop(resident(&world, &vbar, 0..OURS));
    assert_eq!(world.used(), OURS);
    (world, vbar)
}

/// Another program takes memory, as much as there is: the headroom is ours to restore.
fn take_outside(world: &World, pages: u64) {
    world.sim.set_outside_bytes(DEVICE, pages * P);
}

/// Waits until the thread has looked so many times more.
fn looks(world: &World, count: u64) {
    let before = world.sim.calls(Verb::MemGetInfo);
    eventually("the thread looks", || world.sim.calls(Verb::MemGetInfo) >= before + count);
}

fn uncovered() -> RuntimeOptions {
    RuntimeOptions { record_interval: Duration::from_secs(1000), ..threaded() }
}

/// A thread that waits for the context: uncovered uses, pressure, and work that does not end until
/// the stream is let go.
fn waiting() -> (World, Vbar, Stream) {
    let wait_timeout = Duration::MAX;
    let options = RuntimeOptions { wait_timeout, threads: None, ..uncovered() };
    let (world, vbar) = idle(options, "");
    let held = world.another_stream();
    let guard = resident_on(&vbar, 0..1, held);
    world.sim.hold_stream(held).unwrap();
    world.write(guard.address(), P, 1, held);
    drop(guard);
    take_outside(&world, 10);
    world.runtime.set_threads(Threads::On).unwrap();
    eventually("the thread waits", || world.sim.calls(Verb::CtxRecordEvent) > 0);
    (world, vbar, held)
}

#[test]
fn pressure_is_answered_without_a_call() {
    let _turn = turn();
    let (world, vbar) = idle(threaded(), "");
    let (hits, misses) = {
        let statistics = world.runtime.statistics();
        (statistics.hits, statistics.misses)
    };
    for outside in 9..=14 {
        take_outside(&world, outside);
        let left = ALL - HEADROOM - outside;
        eventually("the headroom is free again", || world.used() == left);
    }
    let statistics = world.runtime.statistics();
    assert_eq!((statistics.hits, statistics.misses), (hits, misses));
    world.check();
    // Pinned pages stay, however much is missing.
    let pinned = resident(&world, &vbar, 0..8);
    take_outside(&world, 24);
    eventually("what is not pinned goes", || world.used() == 8);
    looks(&world, 3);
    assert_eq!(world.used(), 8);
    drop(pinned);
    eventually("and then the rest", || world.used() == 4);
    world.check();
    drop(vbar);
    world.check_shut();
    check_no_thread();
}

#[test]
fn without_the_thread_the_next_fault_notices() {
    let _turn = turn();
    let (world, vbar) = idle(RuntimeOptions { threads: None, ..threaded() }, "");
    assert_eq!((world.runtime.threads(), running()), (Threads::Off, 0));
    take_outside(&world, 12);
    std::thread::sleep(Duration::from_millis(80));
    assert_eq!(world.used(), OURS);
    let miss = world.vbar(1);
    assert!(matches!(miss.fault(0..P, world.stream).unwrap(), Fault::Resident(_)));
    assert!(world.used() < OURS);
    world.check();
    drop((vbar, miss));
    world.check_shut();
}

#[test]
fn what_no_fence_covers_goes_after_an_event_of_the_context() {
    let _turn = turn();
    let (world, vbar) = idle(uncovered(), "");
    take_outside(&world, 12);
    eventually("the headroom is free again", || world.used() == ALL - HEADROOM - 12);
    assert!(world.sim.calls(Verb::CtxRecordEvent) > 0);
    world.check();
    drop(vbar);
    world.check_shut();
}

#[test]
fn it_never_waits_inside_an_older_driver() {
    let _turn = turn();
    let (world, vbar) = idle(uncovered(), ",ctx_event=0");
    take_outside(&world, 12);
    eventually("the driver is asked", || world.sim.calls(Verb::CtxRecordEvent) == 1);
    looks(&world, 4);
    assert_eq!((world.sim.calls(Verb::CtxSynchronize), world.used()), (0, OURS));
    let statistics = world.runtime.statistics();
    let waited = statistics.waited(vbar::outcome::WaitKind::Context).count
        + statistics.library_waited(vbar::outcome::WaitKind::Context).count;
    assert_eq!(waited, 1, "what is known to be refused is not counted as a wait");
    // Whoever calls may.
    world.runtime.refresh().unwrap();
    assert_eq!((world.sim.calls(Verb::CtxSynchronize), world.used()), (1, ALL - HEADROOM - 12));
    world.check();
    drop(vbar);
    world.check_shut();
}

#[test]
fn threads_given_again_are_applied_and_not_given_are_not() {
    let _turn = turn();
    let world = World::budget(4);
    let open = |threads| {
        let options = RuntimeOptions { threads, ..budget_options(4) };
        drop(Runtime::open(world.sim.driver(), DEVICE, options).unwrap());
    };
    let is = |threads, count| {
        assert_eq!(world.runtime.threads(), threads);
        eventually("so many threads", || running() == count);
    };
    is(Threads::Off, 0);
    open(None);
    is(Threads::Off, 0);
    open(Some(Threads::On));
    is(Threads::On, 1);
    open(Some(Threads::On));
    open(None);
    is(Threads::On, 1);
    open(Some(Threads::Off));
    is(Threads::Off, 0);
    // What is refused changes nothing.
    let wrong = RuntimeOptions {
        threads: Some(Threads::On),
        headroom_bytes: Some(u64::MAX),
        ..budget_options(4)
    };
    Runtime::open(world.sim.driver(), DEVICE, wrong).map(drop).unwrap_err();
    is(Threads::Off, 0);
    for _ in 0..20 {
        world.runtime.set_threads(Threads::On).unwrap();
        world.runtime.set_threads(Threads::Off).unwrap();
    }
    is(Threads::Off, 0);
    world.check_shut();
}

/// The signals that a thread blocks, by its folder under /proc: bit n - 1 for signal n.
fn blocked(thread: &std::path::Path) -> u64 {
    let status = std::fs::read_to_string(thread.join("status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap()
}

#[test]
fn it_takes_none_of_the_programs_signals() {
    let _turn = turn();
    let own = std::path::Path::new("/proc/thread-self");
    let before = blocked(own);
    let (world, vbar) = idle(threaded(), "");
    assert_eq!(blocked(own), before, "the caller's own mask has changed");
    eventually("the thread runs", || running() == 1);
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let is_it = |task: &std::path::PathBuf| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim_end() == NAME)
    };
    let thread = tasks.into_iter().find(is_it).unwrap();
    let blocks = |signal: i32| blocked(&thread) & (1 << (signal - 1)) != 0;
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGALRM, libc::SIGCHLD, libc::SIGUSR1] {
        assert!(blocks(signal), "signal {signal}");
    }
    // What a fault of its own raises is for whoever reports faults.
    assert!(!blocks(libc::SIGSEGV) && !blocks(libc::SIGBUS));
    drop(vbar);
    world.check_shut();
}

#[test]
fn closing_leaves_no_thread() {
    let _turn = turn();
    for _ in 0..10 {
        let (world, vbar) = idle(threaded(), "");
        drop(vbar);
        world.check_shut();
    }
    check_no_thread();
}

#[test]
fn stopping_ends_its_wait() {
    let _turn = turn();
    let (world, vbar, held) = waiting();
    world.runtime.set_threads(Threads::Off).unwrap();
    check_no_thread();
    assert_eq!(world.used(), OURS);
    // Closing ends it too, before it waits itself.
    world.runtime.set_threads(Threads::On).unwrap();
    let recorded = world.sim.calls(Verb::CtxRecordEvent);
    eventually("the thread waits", || world.sim.calls(Verb::CtxRecordEvent) > recorded);
    let sim = world.sim.clone();
    drop(vbar);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            check_no_thread();
            sim.release_stream(held).unwrap();
        });
        world.check_shut();
    });
}

#[test]
fn cancelling_waits_reaches_it_and_does_not_end_it() {
    let _turn = turn();
    let (world, vbar, held) = waiting();
    for round in 2..5 {
        world.runtime.cancel_waits();
        eventually("it waits anew", || world.sim.calls(Verb::CtxRecordEvent) >= round);
    }
    assert_eq!((running(), world.used()), (1, OURS));
    world.sim.release_stream(held).unwrap();
    eventually("the headroom is free again", || world.used() == ALL - HEADROOM - 10);
    world.check();
    drop(vbar);
    world.check_shut();
}

#[test]
fn an_error_is_told_once_and_outlived() {
    let _turn = turn();
    logs::collect();
    let (world, vbar) = idle(threaded(), "");
    let told = || logs::count(NAME, "pressure was not noticed");
    let before = told();
    world.sim.fail_always(Verb::MemGetInfo, DriverCode::INVALID_VALUE);
    looks(&world, 5);
    assert_eq!(told(), before + 1);
    world.sim.heal();
    take_outside(&world, 12);
    eventually("the headroom is free again", || world.used() == ALL - HEADROOM - 12);
    world.check();
    drop(vbar);
    world.check_shut();
}

#[test]
fn a_panic_is_told_once_and_outlived() {
    let _turn = turn();
    let told = || logs::count(NAME, "a panic");
    let before = told();
    logs::react(NAME, "records no event", || panic!("expected by this test"));
    let (world, vbar) = idle(uncovered(), ",ctx_event=0");
    take_outside(&world, 12);
    eventually("the panic is told", || told() == before + 1);
    looks(&world, 3);
    assert_eq!((running(), told()), (1, before + 1));
    world.check();
    drop(vbar);
    world.check_shut();
}

#[test]
fn a_lost_device_is_left_alone() {
    let _turn = turn();
    let (world, vbar) = idle(threaded(), "");
    // It takes its name a moment after it starts.
    eventually("the thread runs", || running() == 1);
    world.sim.lose_device(DEVICE, DriverCode::ILLEGAL_ADDRESS);
    check_no_thread();
    assert_eq!(vbar.fault(0..P, world.stream).map(drop).unwrap_err().code(), ErrorCode::DeviceLost);
    world.runtime.set_threads(Threads::Off).unwrap();
    drop(vbar);
    drop(world);
}

#[test]
fn the_last_runtime_may_go_on_the_thread_itself() {
    let _turn = turn();
    let (world, vbar) = idle(RuntimeOptions { threads: None, ..uncovered() }, ",ctx_event=0");
    drop(vbar);
    let World { sim, runtime, .. } = world;
    let again = runtime.create_bar(P).unwrap();
    drop(again.fault(0..P, Stream::NONE).unwrap().resident().unwrap());
    let (gone, is_gone) = mpsc::channel();
    let (keep, kept) = mpsc::channel::<(Runtime, Vbar)>();
    logs::react(NAME, "records no event", move || {
        drop(kept.recv().unwrap());
        gone.send(()).unwrap();
    });
    runtime.set_threads(Threads::On).unwrap();
    sim.set_outside_bytes(DEVICE, ALL * P);
    keep.send((runtime, again)).unwrap();
    is_gone.recv_timeout(Duration::from_secs(60)).expect("it is closed on the thread");
    check_no_thread();
    assert_eq!((sim.live_frames(DEVICE), sim.live_events()), (0, 0));
    assert_eq!(sim.violations(), Vec::<String>::new());
}

#[test]
fn a_forked_child_has_no_thread_and_leaves_the_parents_alone() {
    let _turn = turn();
    let (world, vbar) = idle(threaded(), "");
    let sim = world.sim.clone();
    let runtime = world.runtime.clone();
    let good = in_child(|| {
        let ending = |result: vbar::Result<()>| {
            result.is_err_and(|error| error.code() == ErrorCode::ProcessEnding)
        };
        let refused = ending(runtime.set_threads(Threads::On))
            && ending(runtime.set_threads(Threads::Off))
            && ending(runtime.refresh())
            && runtime.threads() == Threads::Off;
        runtime.set_wait_timeout(Duration::ZERO);
        runtime.cancel_waits();
        let alone = running() == 0;
        drop((runtime, vbar.clone(), world.runtime));
        refused && alone
    });
    assert!(good, "the child met its parent's thread");
    // In the parent nothing has happened.
    let opened = Runtime::opened(&sim.driver(), DEVICE).unwrap();
    sim.set_outside_bytes(DEVICE, 12 * P);
    let left = (ALL - HEADROOM - 12) * P;
    eventually("the headroom is free again", || opened.used_bytes() == left);
}

/// The process ends while the thread waits for the context, and another while it has just looked.
#[test]
fn the_process_ends_while_the_thread_runs() {
    let this = std::env::current_exe().unwrap();
    for how in ["waiting", "looking"] {
        let child = std::process::Command::new(&this)
            .args(["--exact", "pressure::ends_its_process", "--ignored", "--nocapture"])
            .env("VBAR_TEST_ENDS", how)
            .output()
            .unwrap();
        assert_eq!(child.status.code(), Some(7), "{how}: {child:?}");
    }
}

#[test]
#[ignore = "for a process of its own, which it ends"]
fn ends_its_process() {
    let (world, vbar) = match std::env::var("VBAR_TEST_ENDS").as_deref() {
        Ok("waiting") => {
            let (world, vbar, _) = waiting();
            (world, vbar)
        }
        _ => {
            let (world, vbar) = idle(threaded(), "");
            looks(&world, 2);
            (world, vbar)
        }
    };
    assert_eq!(running(), 1);
    // Never dropped, as a program that ends by exit leaves it.
    std::mem::forget((world, vbar));
    std::process::exit(7);
}
