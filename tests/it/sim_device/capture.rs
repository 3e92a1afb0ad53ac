//! Capture: what is recorded, what breaks it, and when what was retained is released.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use vbar::driver::{CaptureMode, CaptureState, Driver, DriverCode};
use vbar::units::Stream;

use super::open;
use crate::door::assert_code;

const SMALL: &str = "capacity=4M,granularity=64K";

#[test]
fn captured_work_runs_when_the_graph_is_launched() {
    let (sim, rig) = open(SMALL);
    let (pages, stream, side) = (rig.pages(1), rig.stream(), rig.stream());
    let (fork, join) = (rig.event(), rig.event());
    sim.begin_capture(stream, CaptureMode::Global).unwrap();
    assert_eq!(sim.stream_is_capturing(stream), Ok(CaptureState::Active));
    assert_eq!(sim.stream_is_capturing(side), Ok(CaptureState::None));
    assert_eq!(sim.stream_is_capturing(Stream::DEFAULT), Ok(CaptureState::Implicit));
    rig.memset(pages.address, 1, 8, stream);
    sim.event_record(fork, stream).unwrap();
    sim.stream_wait_event(side, fork).unwrap();
    assert_eq!(sim.stream_is_capturing(side), Ok(CaptureState::Active));
    rig.memset(pages.address, 2, 4, side);
    sim.event_record(join, side).unwrap();
    sim.stream_wait_event(stream, join).unwrap();
    let graph = sim.end_capture(stream).unwrap();
    assert_eq!(graph.operation_count(), 2);
    assert_eq!(sim.stream_is_capturing(side), Ok(CaptureState::None));
    assert_eq!(sim.read_bytes(pages.address, 1).unwrap(), [0], "captured work ran");
    for _ in 0..3 {
        rig.memset(pages.address, 7, 8, stream);
        graph.launch(stream).unwrap();
        sim.stream_synchronize(stream).unwrap();
        assert_eq!(sim.read_bytes(pages.address, 8).unwrap(), [2, 2, 2, 2, 1, 1, 1, 1]);
    }
    // A launch is work like any other: beside another stream's it is a race.
    graph.launch(stream).unwrap();
    rig.memset(pages.address, 7, 8, side);
    assert_eq!(sim.violations().len(), 1);
}

#[test]
fn unsafe_calls_break_a_global_capture_unless_the_thread_is_relaxed() {
    let (sim, rig) = open(SMALL);
    let (stream, idle, event) = (rig.stream(), rig.stream(), rig.event());
    let unsafe_call = |call: &dyn Fn() -> Option<DriverCode>, relaxed: bool| {
        sim.begin_capture(stream, CaptureMode::Global).unwrap();
        let mode = if relaxed { CaptureMode::Relaxed } else { CaptureMode::Global };
        sim.thread_exchange_stream_capture_mode(mode).unwrap();
        let code = call();
        sim.thread_exchange_stream_capture_mode(CaptureMode::Global).unwrap();
        let end = sim.end_capture(stream).map(drop).map_err(|error| error.code);
        (code, end)
    };
    let refused =
        (Some(DriverCode::STREAM_CAPTURE_UNSUPPORTED), Err(DriverCode::STREAM_CAPTURE_INVALIDATED));
    let query = || sim.event_query(event).err().map(|error| error.code);
    let done = || sim.stream_query(idle).err().map(|error| error.code);
    let create = || sim.mem_create(super::DEVICE, rig.page).err().map(|error| error.code);
    let synchronize = || sim.ctx_synchronize().err().map(|error| error.code);
    for call in [&query as &dyn Fn() -> Option<DriverCode>, &done, &create, &synchronize] {
        assert_eq!(unsafe_call(call, false), refused);
    }
    assert_eq!(unsafe_call(&query, true), (None, Ok(())));
    assert_eq!(unsafe_call(&done, true), (None, Ok(())));
    assert_eq!(unsafe_call(&create, true), (None, Ok(())));
    // Waiting for a context that captures conflicts in every mode.
    assert_eq!(unsafe_call(&synchronize, true), refused);
}

#[test]
fn another_threads_calls_break_global_captures_only() {
    for (mode, breaks) in [(CaptureMode::Global, true), (CaptureMode::ThreadLocal, false)] {
        let (sim, rig) = open(SMALL);
        let (stream, event) = (rig.stream(), rig.event());
        sim.begin_capture(stream, mode).unwrap();
        let other = sim.clone();
        let query = std::thread::spawn(move || other.event_query(event).is_err()).join().unwrap();
        assert_eq!(query, breaks);
        assert_eq!(sim.end_capture(stream).is_err(), breaks);
    }
}

#[test]
fn a_capture_is_closed_against_work_outside() {
    let (sim, rig) = open("capacity=4M,granularity=64K,on_violation=record");
    let (stream, side, event) = (rig.stream(), rig.stream(), rig.event());
    let pages = rig.pages(1);
    let begin = || sim.begin_capture(stream, CaptureMode::Relaxed).unwrap();
    let broken = || {
        assert_eq!(sim.stream_is_capturing(stream), Ok(CaptureState::Invalidated));
        assert_code(
            sim.memset_d8_async(pages.address, 0, 1, stream),
            DriverCode::STREAM_CAPTURE_INVALIDATED,
        );
        let end = sim.end_capture(stream).map(drop);
        assert_code(end, DriverCode::STREAM_CAPTURE_INVALIDATED);
    };
    sim.event_record(event, side).unwrap();
    begin();
    let wait = sim.stream_wait_event(stream, event);
    assert_code(wait, DriverCode::STREAM_CAPTURE_ISOLATION);
    broken();
    begin();
    sim.event_record(event, stream).unwrap();
    assert_code(sim.event_query(event), DriverCode::CAPTURED_EVENT);
    broken();
    begin();
    let synchronize = sim.stream_synchronize(stream);
    assert_code(synchronize, DriverCode::STREAM_CAPTURE_UNSUPPORTED);
    broken();
    // A side stream must come back.
    begin();
    sim.event_record(event, stream).unwrap();
    sim.stream_wait_event(side, event).unwrap();
    rig.memset(pages.address, 1, 1, side);
    assert_code(sim.end_capture(stream).map(drop), DriverCode::STREAM_CAPTURE_UNJOINED);
    sim.begin_capture(stream, CaptureMode::Global).unwrap();
    let legacy = sim.memset_d8_async(pages.address, 0, 1, Stream::LEGACY);
    assert_code(legacy, DriverCode::STREAM_CAPTURE_IMPLICIT);
    broken();
    let legacy = sim.begin_capture(Stream::LEGACY, CaptureMode::Relaxed);
    assert_code(legacy, DriverCode::STREAM_CAPTURE_UNSUPPORTED);
}

#[test]
fn what_a_graph_retains_is_released_once_after_its_last_launch() {
    let (sim, rig) = open(SMALL);
    let (pages, stream) = (rig.pages(1), rig.stream());
    let released = Arc::new(AtomicUsize::new(0));
    let retain = || {
        let released = released.clone();
        let count = move || {
            released.fetch_add(1, Ordering::SeqCst);
        };
        sim.graph_retain(stream, Box::new(count))
    };
    assert_code(retain(), DriverCode::INVALID_VALUE);
    assert_eq!(Arc::strong_count(&released), 1, "a refused release was kept");
    sim.begin_capture(stream, CaptureMode::Relaxed).unwrap();
    rig.write_late(pages.address, 8, 60, stream);
    retain().unwrap();
    retain().unwrap();
    let graph = sim.end_capture(stream).unwrap();
    graph.launch(stream).unwrap();
    drop(graph);
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(released.load(Ordering::SeqCst), 0, "released while the graph runs");
    wait_until(|| released.load(Ordering::SeqCst) == 2);
    assert_eq!(Arc::strong_count(&released), 1);
    // A broken capture releases too.
    sim.begin_capture(stream, CaptureMode::Relaxed).unwrap();
    retain().unwrap();
    assert!(sim.ctx_synchronize().is_err());
    assert!(sim.end_capture(stream).is_err());
    wait_until(|| released.load(Ordering::SeqCst) == 3);
}

#[test]
fn what_a_graph_retained_may_be_the_last_holder_of_the_device() {
    let (sim, rig) = open(SMALL);
    let (other, stream, page) = (sim.second_process(), rig.stream(), rig.page);
    let pages = rig.pages(1);
    sim.begin_capture(stream, CaptureMode::Relaxed).unwrap();
    rig.memset(pages.address, 1, 8, stream);
    let held = sim.clone();
    sim.graph_retain(stream, Box::new(move || drop(held))).unwrap();
    let graph = sim.end_capture(stream).unwrap();
    drop((sim, rig));
    drop(graph);
    let all = (4 << 20) / page;
    wait_until(|| other.mem_create(super::DEVICE, all * page).is_ok());
}

fn wait_until(done: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < end, "it did not come to pass in 10 s");
        std::thread::sleep(Duration::from_millis(1));
    }
}
