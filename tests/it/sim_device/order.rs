//! Order: races and early unmapping are found, whatever the interleaving; streams run as told.
#![expect(unsafe_code, reason = "copies through the trait take raw pointers")]

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vbar::driver::{Driver, DriverCode, Event, FrameHandle};
use vbar::units::{DeviceAddress, Stream};

use super::{DEVICE, check_clean, check_violation, open};
use crate::door::{Rig, assert_code};

const SMALL: &str = "capacity=4M,granularity=64K";
const RECORD: &str = "capacity=4M,granularity=64K,on_violation=record";

#[test]
fn unordered_writes_are_a_race_and_lose_the_device() {
    let (sim, rig) = open(SMALL);
    let (pages, event) = (rig.pages(1), rig.event());
    let (a, b) = (rig.stream(), rig.stream());
    rig.memset(pages.address, 1, 16, a);
    // The breach is the caller's, and surfaces on a later call.
    rig.memset(pages.address.offset(8), 2, 16, b);
    check_violation(&sim, &["not ordered after the write", "created; mapped at", "stream"]);
    assert_code(sim.memset_d8_async(pages.address, 1, 1, a), DriverCode::ILLEGAL_ADDRESS);
    assert_code(sim.event_query(event), DriverCode::ILLEGAL_ADDRESS);
    assert_code(sim.mem_unmap(pages.address, rig.page), DriverCode::ILLEGAL_ADDRESS);
    assert_code(sim.ctx_synchronize(), DriverCode::ILLEGAL_ADDRESS);
}

#[test]
fn a_race_through_two_mappings_is_found() {
    let (sim, rig) = open(RECORD);
    let pages = rig.pages(1);
    let second = sim.mem_address_reserve(rig.page, 0).unwrap();
    sim.mem_map(second, rig.page, pages.frames[0]).unwrap();
    sim.mem_set_access(second, rig.page, &[DEVICE]).unwrap();
    rig.memset(pages.address, 1, 16, rig.stream());
    rig.memset(second, 2, 16, rig.stream());
    check_violation(&sim, &["not ordered after the write"]);
}

#[test]
fn events_and_the_host_order_streams() {
    let (sim, rig) = open(SMALL);
    let pages = rig.pages(1);
    let (a, b, event) = (rig.stream(), rig.stream(), rig.event());
    for value in 0..50 {
        rig.memset(pages.address, value, rig.page, a);
        sim.event_record(event, a).unwrap();
        sim.stream_wait_event(b, event).unwrap();
        rig.memset(pages.address, value, rig.page, b);
        sim.event_record(event, b).unwrap();
        if value % 2 == 0 {
            rig.wait(event);
        } else {
            sim.stream_wait_event(a, event).unwrap();
        }
    }
    sim.ctx_synchronize().unwrap();
    rig.give_back(pages);
    assert_eq!(sim.violations(), Vec::<String>::new());
}

#[test]
fn a_wait_before_the_record_orders_nothing() {
    let (sim, rig) = open(RECORD);
    let (pages, event) = (rig.pages(1), rig.event());
    let (a, b) = (rig.stream(), rig.stream());
    sim.stream_wait_event(b, event).unwrap();
    rig.memset(pages.address, 1, 16, a);
    sim.event_record(event, a).unwrap();
    rig.memset(pages.address, 2, 16, b);
    check_violation(&sim, &["not ordered after the write"]);
}

#[test]
fn reads_may_overlap_and_writes_wait_for_them() {
    let (sim, rig) = open(RECORD);
    let pages = rig.pages(1);
    let (a, b) = (rig.stream(), rig.stream());
    let memory = sim.mem_host_alloc(64).unwrap();
    let read = |stream, offset: usize| {
        // SAFETY: each copy has eight bytes of its own, which stay until the device is idle.
        let target = unsafe { memory.as_ptr().add(offset) };
        // SAFETY: as above.
        unsafe { sim.memcpy_dtoh_async(target, pages.address, 8, stream) }.unwrap();
    };
    read(a, 0);
    read(b, 8);
    assert!(sim.violations().is_empty());
    rig.memset(pages.address, 2, 16, b);
    check_violation(&sim, &["not ordered after the read"]);
    sim.ctx_synchronize().unwrap();
    // SAFETY: allocated above, freed once, not used afterwards.
    unsafe { sim.mem_free_host(memory) }.unwrap();
}

#[test]
fn parts_of_a_page_are_apart() {
    let (sim, rig) = open(SMALL);
    let pages = rig.pages(1);
    rig.memset(pages.address, 1, 100, rig.stream());
    rig.memset(pages.address.offset(100), 2, 100, rig.stream());
    sim.ctx_synchronize().unwrap();
    rig.give_back(pages);
    assert!(sim.violations().is_empty());
}

#[test]
fn unmapping_under_pending_work_is_found() {
    let (sim, rig) = open(RECORD);
    let (pages, stream) = (rig.pages(1), rig.stream());
    rig.write_late(pages.address, 8, 20, stream);
    sim.mem_unmap(pages.address, rig.page).unwrap();
    check_violation(&sim, &["was unmapped while work of stream", "mapped at", "write of bytes"]);
    // And the kernel itself finds nothing to write to.
    sim.stream_synchronize(stream).unwrap();
    assert!(sim.violations()[1].contains("nothing is mapped"), "{:?}", sim.violations());
}

#[test]
fn unmapping_finished_work_that_nobody_has_seen_finish_is_found() {
    let (sim, rig) = open(RECORD);
    let (pages, stream) = (rig.pages(1), rig.stream());
    rig.memset(pages.address, 1, 8, stream);
    std::thread::sleep(Duration::from_millis(20));
    sim.mem_unmap(pages.address, rig.page).unwrap();
    check_violation(&sim, &["not known to have finished"]);
}

#[test]
fn the_old_mapping_may_go_while_the_new_one_works() {
    let (sim, rig) = open(SMALL);
    let (pages, a, b) = (rig.pages(1), rig.stream(), rig.stream());
    let event = rig.event();
    let second = sim.mem_address_reserve(rig.page, 0).unwrap();
    rig.write_late(pages.address, 8, 30, a);
    sim.event_record(event, a).unwrap();
    sim.mem_map(second, rig.page, pages.frames[0]).unwrap();
    sim.mem_set_access(second, rig.page, &[DEVICE]).unwrap();
    sim.stream_wait_event(b, event).unwrap();
    rig.write_late(second, 8, 60, b);
    rig.wait(event);
    sim.mem_unmap(pages.address, rig.page).unwrap();
    sim.ctx_synchronize().unwrap();
    assert!(sim.violations().is_empty());
}

#[test]
fn touching_what_is_not_there_or_not_allowed_is_an_illegal_address() {
    for allowed in [false, true] {
        let (sim, rig) = open("capacity=4M,devices=2,granularity=64K");
        let address = sim.mem_address_reserve(2 * rig.page, 0).unwrap();
        let frame = sim.mem_create(DEVICE, rig.page).unwrap();
        let mut expected = "has no access";
        sim.mem_map(address, rig.page, frame).unwrap();
        if allowed {
            sim.mem_set_access(address, rig.page, &[DEVICE]).unwrap();
            expected = "nothing was mapped when it was enqueued";
        }
        let stream = rig.stream();
        rig.memset(address, 1, rig.page + u64::from(allowed), stream);
        assert_code(sim.stream_synchronize(stream), DriverCode::ILLEGAL_ADDRESS);
        check_violation(&sim, &[expected]);
        assert_code(sim.mem_create(DEVICE, rig.page), DriverCode::ILLEGAL_ADDRESS);
        // The other device is none the worse.
        sim.mem_create(vbar::units::DeviceOrdinal(1), rig.page).unwrap();
        // Nothing was written, since not all of it could be.
        assert_eq!(sim.read_bytes(address, 1).unwrap(), [0]);
    }
}

#[test]
fn an_unmapping_in_the_middle_of_a_slow_copy_is_found_by_the_copy_too() {
    let options = "capacity=64M,granularity=2M,bandwidth=100M,on_violation=record";
    let (sim, rig) = open(options);
    let (pages, stream) = (rig.pages(8), rig.stream());
    let memory = sim.mem_host_alloc(16 << 20).unwrap();
    // SAFETY: the memory stays until the stream has been waited for.
    let copy = unsafe { sim.memcpy_htod_async(pages.address, memory.as_ptr(), 16 << 20, stream) };
    copy.unwrap();
    std::thread::sleep(Duration::from_millis(20));
    sim.mem_unmap(pages.address.offset(14 << 20), 2 << 20).unwrap();
    sim.stream_synchronize(stream).unwrap();
    let violations = sim.violations();
    assert_eq!(violations.len(), 2, "{violations:#?}");
    assert!(violations[1].contains("nothing is mapped"), "{violations:#?}");
    // SAFETY: allocated above, freed once, not used afterwards.
    unsafe { sim.mem_free_host(memory) }.unwrap();
}

#[test]
fn peeks_are_checked_when_asked_for() {
    let (sim, rig) = open("capacity=4M,granularity=64K,checked=1,on_violation=record");
    let (pages, stream) = (rig.pages(1), rig.stream());
    rig.memset(pages.address, 3, 8, stream);
    let _ = sim.read_bytes(pages.address, 8).unwrap();
    check_violation(&sim, &["without having seen the write"]);
    sim.stream_synchronize(stream).unwrap();
    assert_eq!(sim.read_bytes(pages.address, 8).unwrap(), [3; 8]);
    assert_eq!(sim.violations().len(), 1);
}

#[test]
fn a_source_that_changes_before_its_copy_is_done_is_found() {
    let (sim, rig) = open("capacity=4M,granularity=64K,checked=1,on_violation=record");
    let (pages, stream) = (rig.pages(1), rig.stream());
    let memory = sim.mem_host_alloc(4096).unwrap();
    for change in [0, 1] {
        sim.hold_stream(stream).unwrap();
        // SAFETY: the memory stays; that its bytes may change is what is tested.
        unsafe { sim.memcpy_htod_async(pages.address, memory.as_ptr(), 4096, stream) }.unwrap();
        // SAFETY: the copy is held back, so nobody reads the byte now.
        unsafe { *memory.as_ptr() = change };
        sim.release_stream(stream).unwrap();
        sim.stream_synchronize(stream).unwrap();
    }
    check_violation(&sim, &["was changed before the copy was done"]);
    // SAFETY: allocated above, freed once, not used afterwards.
    unsafe { sim.mem_free_host(memory) }.unwrap();
}

#[test]
fn work_enqueued_before_its_mapping_is_found() {
    let (sim, rig) = open(RECORD);
    let stream = rig.stream();
    let address = sim.mem_address_reserve(rig.page, 0).unwrap();
    let frame = sim.mem_create(DEVICE, rig.page).unwrap();
    sim.hold_stream(stream).unwrap();
    rig.memset(address, 1, 8, stream);
    sim.mem_map(address, rig.page, frame).unwrap();
    sim.mem_set_access(address, rig.page, &[DEVICE]).unwrap();
    sim.release_stream(stream).unwrap();
    sim.stream_synchronize(stream).unwrap();
    check_violation(&sim, &["when it was enqueued", "mapped at"]);
}

#[test]
fn the_legacy_stream_orders_blocking_streams_only() {
    let (sim, rig) = open(SMALL);
    let pages = rig.pages(1);
    let blocking = sim.stream_create_blocking().unwrap();
    for stream in [blocking, Stream::DEFAULT, Stream::PER_THREAD, Stream::LEGACY, blocking] {
        rig.write_late(pages.address, 8, 5, stream);
    }
    sim.stream_synchronize(blocking).unwrap();
    rig.give_back(pages);
    assert_eq!(sim.violations(), Vec::<String>::new());

    let (sim, rig) = open(RECORD);
    let pages = rig.pages(1);
    rig.memset(pages.address, 1, 8, rig.stream());
    rig.memset(pages.address, 1, 8, Stream::DEFAULT);
    check_violation(&sim, &["not ordered"]);
}

#[test]
fn a_held_stream_stands_still_and_others_go_on() {
    for options in [SMALL, "capacity=4M,granularity=64K,seed=3"] {
        let (sim, rig) = open(options);
        let pages = rig.pages(2);
        let (a, b) = (rig.stream(), rig.stream());
        let (held, free) = (rig.event(), rig.event());
        sim.hold_stream(a).unwrap();
        rig.memset(pages.address, 1, 8, a);
        sim.event_record(held, a).unwrap();
        rig.memset(pages.address.offset(rig.page), 1, 8, b);
        sim.event_record(free, b).unwrap();
        rig.wait(free);
        std::thread::sleep(Duration::from_millis(5));
        assert!(!rig.is_ready(held));
        assert_eq!(sim.read_bytes(pages.address, 1).unwrap(), [0]);
        sim.release_stream(a).unwrap();
        rig.wait(held);
        assert_eq!(sim.read_bytes(pages.address, 1).unwrap(), [1]);
        rig.give_back(pages);
        assert!(sim.violations().is_empty());
    }
}

/// What racing streams leave behind, with a seed.
fn outcome(seed: u64) -> Vec<u8> {
    let options = format!("capacity=4M,granularity=64K,on_violation=record,seed={seed}");
    let (sim, rig) = open(&options);
    let pages = rig.pages(1);
    let streams: Vec<_> = (0..4).map(|_| rig.stream()).collect();
    let mut seen = Vec::new();
    for round in 0..20u8 {
        for (index, stream) in streams.iter().enumerate() {
            rig.memset(pages.address, round * 4 + index as u8, 8, *stream);
        }
        sim.ctx_synchronize().unwrap();
        seen.extend(sim.read_bytes(pages.address, 1).unwrap());
    }
    seen
}

#[test]
fn a_seed_repeats_its_interleaving() {
    let outcomes: Vec<_> = (0..4).map(outcome).collect();
    for (seed, first) in outcomes.iter().enumerate() {
        assert_eq!(*first, outcome(seed as u64), "seed {seed}");
    }
    assert_ne!(outcomes[0], outcomes[1]);
}

#[test]
fn a_seeded_device_goes_on_by_itself() {
    let (sim, rig) = open("capacity=4M,granularity=64K,seed=1");
    let pages = rig.pages(1);
    rig.memset(pages.address, 9, 8, rig.stream());
    let end = Instant::now() + Duration::from_secs(10);
    while sim.read_bytes(pages.address, 1).unwrap() != [9] {
        assert!(Instant::now() < end, "no thread took the work on");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn pageable_copies_are_waited_for_and_page_locked_ones_are_not() {
    let (sim, rig) = open(SMALL);
    let (pages, stream) = (rig.pages(1), rig.stream());
    let memory = sim.mem_host_alloc(4096).unwrap();
    rig.write_late(pages.address, 8, 100, stream);
    let begun = Instant::now();
    // SAFETY: the memory stays until the stream has been waited for.
    unsafe { sim.memcpy_htod_async(pages.address, memory.as_ptr(), 4096, stream) }.unwrap();
    assert!(begun.elapsed() < Duration::from_millis(50));
    let pageable = [1u8; 16];
    // SAFETY: the array stays until the stream has been waited for.
    unsafe { sim.memcpy_htod_async(pages.address, pageable.as_ptr(), 16, stream) }.unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(99));

    rig.write_late(pages.address, 8, 100, stream);
    let begun = Instant::now();
    assert_eq!(sim.locked_bytes(), 4096);
    // SAFETY: allocated above, freed once; the call waits for the copies.
    unsafe { sim.mem_free_host(memory) }.unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(99), "freeing did not wait for the device");
    sim.ctx_synchronize().unwrap();
    rig.give_back(pages);
    sim.stream_destroy(stream).unwrap();
    check_clean(&sim);
}

#[test]
fn many_streams_come_and_go() {
    let (sim, rig) = open(SMALL);
    let pages = rig.pages(1);
    for value in 0..200 {
        let stream = rig.stream();
        rig.memset(pages.address, value, 8, stream);
        sim.stream_destroy(stream).unwrap();
        sim.ctx_synchronize().unwrap();
    }
    assert_eq!(sim.read_bytes(pages.address, 1).unwrap(), [199]);
    rig.give_back(pages);
    check_clean(&sim);
}

/// A page that threads hand on: whoever has it makes his stream wait for the last user's event.
struct Shared {
    address: DeviceAddress,
    frame: FrameHandle,
    used: Event,
    value: u8,
}

/// One thread's turns with the pages: wait for the last use, check, write; now and then move.
fn take_turns(rig: &Rig, pages: &[Mutex<Shared>], turns: u64, seed: u64) {
    let stream = rig.stream();
    let mut draw = seed;
    for _ in 0..turns {
        draw = vbar::driver::kernel::mix(draw, seed);
        let mut page = pages[draw as usize % pages.len()].lock();
        rig.driver.stream_wait_event(stream, page.used).unwrap();
        let bytes = rig.read(page.address.offset(rig.page / 2), 64, stream);
        assert_eq!(bytes, [page.value; 64]);
        page.value = page.value.wrapping_add(1);
        rig.memset(page.address, page.value, rig.page, stream);
        rig.driver.event_record(page.used, stream).unwrap();
        if draw.is_multiple_of(7) {
            rig.wait(page.used);
            rig.driver.mem_unmap(page.address, rig.page).unwrap();
            rig.driver.mem_address_free(page.address, rig.page).unwrap();
            page.address = rig.driver.mem_address_reserve(rig.page, 0).unwrap();
            rig.driver.mem_map(page.address, rig.page, page.frame).unwrap();
            rig.driver.mem_set_access(page.address, rig.page, &[DEVICE]).unwrap();
        }
    }
    rig.driver.stream_synchronize(stream).unwrap();
    rig.driver.stream_destroy(stream).unwrap();
}

#[test]
fn a_correct_program_of_three_threads_is_never_blamed() {
    for options in ["", ",seed=1", ",seed=2,latency=20us", ",latency=50us"] {
        let (sim, rig) = open(&format!("{SMALL}{options}"));
        let pages: Vec<_> = (0..4)
            .map(|_| {
                let pages = rig.pages(1);
                rig.memset(pages.address, 0, rig.page, Stream::DEFAULT);
                let (address, frame) = (pages.address, pages.frames[0]);
                Mutex::new(Shared { address, frame, used: rig.event(), value: 0 })
            })
            .collect();
        sim.ctx_synchronize().unwrap();
        let context = sim.ctx_get_current().unwrap();
        std::thread::scope(|scope| {
            for seed in 1..4 {
                let (rig, pages) = (&rig, &pages);
                scope.spawn(move || {
                    rig.driver.ctx_set_current(context).unwrap();
                    take_turns(rig, pages, 150, seed);
                });
            }
        });
        for page in pages {
            let page = page.into_inner();
            sim.mem_unmap(page.address, rig.page).unwrap();
            sim.mem_address_free(page.address, rig.page).unwrap();
            sim.mem_release(page.frame).unwrap();
            sim.event_destroy(page.used).unwrap();
        }
        check_clean(&sim);
    }
}
