//! Events recorded for a whole context: what they order, what they refuse, what they break.

use vbar::driver::{CaptureMode, CaptureState, Context, Driver, DriverCode, Event};
use vbar::units::{DeviceOrdinal, Stream};

use super::{DEVICE, assert_code, check_clean, check_violation, open};

const RECORD: &str = "capacity=4M,granularity=64K,on_violation=record";

#[test]
fn whoever_has_seen_the_event_has_seen_all_streams() {
    for seed in ["", ",seed=3", ",seed=4,latency=200us"] {
        let (sim, rig) = open(&format!("capacity=4M,granularity=64K,checked=1{seed}"));
        let context = sim.ctx_get_current().unwrap().unwrap();
        let (pages, event) = (rig.pages(4), rig.event());
        let blocking = sim.stream_create_blocking().unwrap();
        let streams = [rig.stream(), blocking, Stream::PER_THREAD, rig.stream()];
        for (index, stream) in streams.into_iter().enumerate() {
            rig.write_late(pages.address.offset(index as u64 * rig.page), 8, 5, stream);
        }
        sim.stream_destroy(streams[3]).unwrap();
        sim.ctx_record_event(context, event).unwrap();
        rig.wait(event);
        // A peek at what was not seen to be written, or an unmapping, would be a breach.
        for index in 0..4 {
            let at = pages.address.offset(index * rig.page);
            assert_ne!(sim.read_bytes(at, 8).unwrap(), [0; 8]);
        }
        rig.give_back(pages);
        sim.stream_destroy(streams[0]).unwrap();
        sim.stream_destroy(blocking).unwrap();
        sim.event_destroy(event).unwrap();
        check_clean(&sim);
    }
}

#[test]
fn work_after_the_record_is_not_ordered_by_it() {
    let (sim, rig) = open(RECORD);
    let context = sim.ctx_get_current().unwrap().unwrap();
    let (pages, event, stream) = (rig.pages(1), rig.event(), rig.stream());
    rig.memset(pages.address, 1, 8, stream);
    sim.ctx_record_event(context, event).unwrap();
    rig.memset(pages.address, 2, 8, stream);
    rig.wait(event);
    sim.mem_unmap(pages.address, rig.page).unwrap();
    check_violation(&sim, &["was unmapped"]);
}

#[test]
fn a_stream_comes_after_every_stream_of_the_record() {
    let (sim, rig) = open(RECORD);
    let context = sim.ctx_get_current().unwrap().unwrap();
    let (pages, event) = (rig.pages(1), rig.event());
    let (first, second, reader) = (rig.stream(), rig.stream(), rig.stream());
    for stream in [first, second] {
        sim.hold_stream(stream).unwrap();
    }
    rig.memset(pages.address, 1, 8, first);
    rig.memset(pages.address.offset(8), 2, 8, second);
    sim.ctx_record_event(context, event).unwrap();
    sim.stream_wait_event(reader, event).unwrap();
    rig.memset(pages.address, 3, 16, reader);
    sim.release_stream(second).unwrap();
    assert!(!rig.is_ready(event), "one of two has passed");
    sim.release_stream(first).unwrap();
    sim.stream_synchronize(reader).unwrap();
    assert_eq!(sim.read_bytes(pages.address, 16).unwrap(), [3; 16]);
    assert_eq!(sim.violations(), Vec::<String>::new());
    // Without the wait it is a race with both.
    sim.hold_stream(first).unwrap();
    rig.memset(pages.address, 4, 8, first);
    rig.memset(pages.address, 5, 8, second);
    check_violation(&sim, &["not ordered after"]);
    sim.release_stream(first).unwrap();
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let (sim, rig) = open("capacity=4M,granularity=64K,devices=2");
    let here = sim.ctx_get_current().unwrap().unwrap();
    let there = sim.device_primary_ctx_retain(DeviceOrdinal(1)).unwrap();
    let event = rig.event();
    assert_code(sim.ctx_record_event(there, event), DriverCode::INVALID_HANDLE);
    assert_code(sim.ctx_record_event(here, Event(7)), DriverCode::INVALID_HANDLE);
    assert_code(sim.ctx_record_event(Context(0), event), DriverCode::INVALID_CONTEXT);
    assert!(rig.is_ready(event), "a refused call recorded");
    sim.ctx_record_event(here, event).unwrap();
    sim.lose_device(DEVICE, DriverCode::ILLEGAL_ADDRESS);
    assert_code(sim.ctx_record_event(here, event), DriverCode::ILLEGAL_ADDRESS);
    assert_code(sim.event_query(event), DriverCode::ILLEGAL_ADDRESS);
}

#[test]
fn a_capture_in_the_context_is_broken_in_every_mode() {
    let (sim, rig) = open("capacity=4M,granularity=64K");
    let context = sim.ctx_get_current().unwrap().unwrap();
    let (stream, event) = (rig.stream(), rig.event());
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        sim.thread_exchange_stream_capture_mode(CaptureMode::Relaxed).unwrap();
        sim.begin_capture(stream, mode).unwrap();
        let refused = sim.ctx_record_event(context, event);
        assert_code(refused, DriverCode::STREAM_CAPTURE_UNSUPPORTED);
        assert_eq!(sim.stream_is_capturing(stream), Ok(CaptureState::Invalidated));
        let ended = sim.end_capture(stream).map(drop);
        assert_code(ended, DriverCode::STREAM_CAPTURE_INVALIDATED);
    }
    assert!(rig.is_ready(event), "a refused call recorded");
}
