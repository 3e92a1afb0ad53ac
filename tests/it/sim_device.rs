//! The simulated device itself: what it finds, how it fails, what it costs.
#![expect(clippy::unwrap_used, reason = "a call that fails ends the test")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use vbar::driver::sim::{Sim, SimOptions};
use vbar::driver::{Driver, DriverCode, FrameHandle};
use vbar::units::{DeviceAddress, DeviceOrdinal, Stream, TIB};

use crate::door::{Rig, assert_code, check_door};

mod capture;
mod context_event;
mod faults;
mod order;
mod registered;

const DEVICE: DeviceOrdinal = DeviceOrdinal(0);

fn sim(options: &str) -> Arc<Sim> {
    Sim::new(SimOptions::parse(options).expect("options"))
}

/// A simulated driver whose first device is current on this thread, its kernels loaded.
fn open(options: &str) -> (Arc<Sim>, Rig) {
    let sim = sim(options);
    let context = sim.device_primary_ctx_retain(DEVICE).expect("a context");
    sim.ctx_set_current(Some(context)).expect("a current context");
    sim.module_load().expect("the kernels");
    let rig = Rig::new(sim.driver(), DEVICE);
    (sim, rig)
}

/// After a suite that cleans up: nothing lives, nothing was found.
#[track_caller]
fn check_clean(sim: &Sim) {
    assert_eq!(sim.violations(), Vec::<String>::new());
    assert_eq!((sim.live_frames(DEVICE), sim.used_bytes(DEVICE)), (0, 0));
    assert_eq!((sim.live_reservations(), sim.reserved_bytes(), sim.live_mappings()), (0, 0, 0));
    assert_eq!((sim.live_events(), sim.live_streams(), sim.locked_bytes()), (0, 0, 0));
}

/// Exactly one breach was found, and its text has all of these.
#[track_caller]
fn check_violation(sim: &Sim, parts: &[&str]) {
    let violations = sim.violations();
    assert_eq!(violations.len(), 1, "{violations:#?}");
    for part in parts {
        assert!(violations[0].contains(part), "'{part}' is not in: {}", violations[0]);
    }
}

#[test]
fn the_door_is_kept_asynchronously() {
    let sim = sim("capacity=1G");
    check_door(sim.clone(), DEVICE);
    check_clean(&sim);
}

#[test]
fn the_door_is_kept_by_an_older_driver() {
    let sim = sim("capacity=1G,ctx_event=0,read_only=1");
    assert!(sim.version().unwrap() < 12_050);
    check_door(sim.clone(), DEVICE);
    check_clean(&sim);
}

#[test]
fn the_door_is_kept_late_with_small_pages_and_on_the_second_device() {
    let sim = sim("capacity=256M,devices=2,granularity=64K,latency=200us,poison=1,bandwidth=2G");
    check_door(sim.clone(), DeviceOrdinal(1));
    check_clean(&sim);
    assert_eq!((sim.live_frames(DeviceOrdinal(1)), sim.used_bytes(DeviceOrdinal(1))), (0, 0));
}

#[test]
fn the_door_is_kept_in_seeded_order() {
    for seed in 0..4 {
        let sim = sim(&format!("capacity=256M,granularity=64K,seed={seed},read_only=1"));
        check_door(sim.clone(), DEVICE);
        check_clean(&sim);
    }
}

#[test]
fn the_description_is_parsed_back() {
    let (sim, _) = open("capacity=64M,granularity=64K,seed=7");
    assert_eq!(sim.description(), "sim:capacity=64M,granularity=64K,seed=7");
}

#[test]
fn the_device_is_full_to_the_byte_and_another_program_takes_its_share() {
    let (sim, rig) = open("capacity=1M,granularity=64K");
    let pages = rig.pages(16);
    assert_code(sim.mem_create(DEVICE, rig.page), DriverCode::OUT_OF_MEMORY);
    assert_eq!(sim.mem_get_info().unwrap().free_bytes, 0);
    rig.give_back(pages);
    sim.set_outside_bytes(DEVICE, 14 * rig.page);
    assert_eq!(sim.mem_get_info().unwrap().free_bytes, 2 * rig.page);
    let pages = rig.pages(2);
    assert_code(sim.mem_create(DEVICE, rig.page), DriverCode::OUT_OF_MEMORY);
    // A share that grows over what is used takes nothing away, and leaves nothing free.
    sim.set_outside_bytes(DEVICE, u64::MAX / 2);
    assert_eq!(sim.mem_get_info().unwrap().free_bytes, 0);
    rig.give_back(pages);
    check_clean(&sim);
}

#[test]
fn two_processes_share_the_memory_and_nothing_else() {
    let (first, rig) = open("capacity=1M,granularity=64K");
    let second = first.second_process();
    let pages = rig.pages(10);
    assert_eq!(second.live_frames(DEVICE), 0);
    let frame = second.mem_create(DEVICE, 6 * rig.page).unwrap();
    assert_code(second.mem_create(DEVICE, rig.page), DriverCode::OUT_OF_MEMORY);
    assert_code(first.mem_create(DEVICE, rig.page), DriverCode::OUT_OF_MEMORY);
    first.lose_device(DEVICE, DriverCode::LAUNCH_FAILED);
    assert_code(first.mem_get_info(), DriverCode::LAUNCH_FAILED);
    assert_eq!(second.ctx_get_current(), Ok(None));
    second.mem_release(frame).unwrap();
    assert!(second.mem_create(DEVICE, rig.page).is_ok());
    // What a process held comes back when it ends.
    let page = rig.page;
    drop((pages, rig, first));
    assert!(second.mem_create(DEVICE, 15 * page).is_ok());
}

#[test]
fn address_space_and_mappings_are_limited() {
    let (sim, rig) = open("capacity=1M,granularity=64K,address_space=1M,mappings=3");
    let page = rig.page;
    let address = sim.mem_address_reserve(12 * page, 0).unwrap();
    assert_code(sim.mem_address_reserve(5 * page, 0), DriverCode::OUT_OF_MEMORY);
    let frame = sim.mem_create(DEVICE, page).unwrap();
    for index in 0..3 {
        sim.mem_map(address.offset(index * page), page, frame).unwrap();
    }
    let refused = sim.mem_map(address.offset(3 * page), page, frame);
    assert_code(refused, DriverCode::OPERATING_SYSTEM);
    sim.mem_unmap(address, page).unwrap();
    sim.mem_map(address.offset(3 * page), page, frame).unwrap();
    assert_eq!((sim.live_mappings(), sim.reserved_bytes()), (3, 12 * page));
}

#[test]
fn the_operating_systems_own_limit_is_told_and_changes_nothing() {
    // In a process of its own: other tests need mappings meanwhile.
    let test = "sim_device::uses_up_all_mappings_of_this_process";
    let this = std::env::current_exe().unwrap();
    let status = std::process::Command::new(this).args(["--exact", "--ignored", test]).output();
    let output = status.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "for a process of its own: leaves it no mappings"]
fn uses_up_all_mappings_of_this_process() {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let limit: u64 = limit.trim().parse().unwrap();
    let (sim, rig) = open("capacity=1M,granularity=4K");
    // More than that many mappings take minutes, on systems that allow them.
    let most = limit.min(200_000) + 9;
    let address = sim.mem_address_reserve(most * rig.page, 0).unwrap();
    let frame = sim.mem_create(DEVICE, rig.page).unwrap();
    let refused = (0..most).find_map(|index| {
        let result = sim.mem_map(address.offset(index * rig.page), rig.page, frame);
        result.err().map(|error| (index, error.code))
    });
    if limit < most {
        let (mapped, code) = refused.expect("the system has a limit");
        assert_eq!(code, DriverCode::OPERATING_SYSTEM);
        assert_eq!(sim.live_mappings() as u64, mapped);
    }
}

#[test]
fn a_terabyte_of_addresses_costs_nothing() {
    let (sim, _) = open("capacity=16M");
    let begun = Instant::now();
    for _ in 0..100 {
        let address = sim.mem_address_reserve(TIB, 0).unwrap();
        sim.mem_address_free(address, TIB).unwrap();
    }
    assert!(begun.elapsed() < Duration::from_secs(1));
    check_clean(&sim);
}

#[test]
fn free_memory_jitters_by_the_seed() {
    let draw = |seed| {
        let (sim, _) = open(&format!("capacity=64M,jitter=1M,seed={seed}"));
        (0..20).map(|_| sim.mem_get_info().unwrap().free_bytes).collect::<Vec<_>>()
    };
    let first = draw(1);
    assert_eq!(first, draw(1));
    assert_ne!(first, draw(2));
    assert!(first.iter().all(|free| (63 << 20..=64 << 20).contains(free)));
}

#[test]
fn without_virtual_memory_management_every_such_verb_says_so() {
    let (sim, _) = open_without_vmm();
    let nowhere = DeviceAddress(1 << 40);
    let frame = FrameHandle(1);
    for code in [
        sim.mem_address_reserve(4 << 20, 0).map(drop),
        sim.mem_address_free(nowhere, 2 << 20),
        sim.mem_create(DEVICE, 2 << 20).map(drop),
        sim.mem_release(frame),
        sim.mem_map(nowhere, 2 << 20, frame),
        sim.mem_set_access(nowhere, 2 << 20, &[DEVICE]),
        sim.mem_unmap(nowhere, 2 << 20),
        sim.mem_get_allocation_granularity(DEVICE).map(drop),
    ] {
        assert_code(code, DriverCode::NOT_SUPPORTED);
    }
}

fn open_without_vmm() -> (Arc<Sim>, i32) {
    let sim = sim("capacity=16M,vmm=0");
    let attribute = vbar::driver::DeviceAttribute::VirtualMemoryManagementSupported;
    let value = sim.device_get_attribute(DEVICE, attribute).unwrap();
    assert_eq!(value, 0);
    (sim, value)
}

#[test]
fn what_is_not_exactly_so_is_refused() {
    use DriverCode as Code;
    let (sim, rig) = open("capacity=4M,granularity=64K");
    let page = rig.page;
    let address = sim.mem_address_reserve(8 * page, 0).unwrap();
    let (two, one) = (sim.mem_create(DEVICE, 2 * page).unwrap(), rig_frame(&sim, page));
    let at = |pages: u64| address.offset(pages * page);
    assert_code(sim.mem_create(DEVICE, 0), Code::INVALID_VALUE);
    assert_code(sim.mem_create(DEVICE, page / 2), Code::INVALID_VALUE);
    assert_code(sim.mem_create(DeviceOrdinal(1), page), Code::INVALID_DEVICE);
    assert_code(sim.mem_address_reserve(page + 1, 0), Code::INVALID_VALUE);
    assert_code(sim.mem_address_reserve(page, 3), Code::INVALID_VALUE);
    assert_code(sim.mem_map(at(0), page, two), Code::NOT_SUPPORTED);
    assert_code(sim.mem_map(at(0), 2 * page, one), Code::INVALID_VALUE);
    assert_code(sim.mem_map(at(0), page, FrameHandle(99)), Code::INVALID_HANDLE);
    assert_code(sim.mem_map(at(7), 2 * page, two), Code::INVALID_VALUE);
    assert_code(sim.mem_map(at(8), page, one), Code::INVALID_VALUE);
    assert_code(sim.mem_map(address.offset(4096), page, one), Code::INVALID_VALUE);
    sim.mem_map(at(2), 2 * page, two).unwrap();
    for pages in [1, 2, 3] {
        assert_code(sim.mem_map(at(pages), 2 * page, two), Code::INVALID_VALUE);
    }
    sim.mem_map(at(4), page, one).unwrap();
    for (from, pages) in [(2, 1), (3, 1), (2, 4), (1, 3), (0, 1), (3, 2), (5, 1)] {
        assert_code(sim.mem_unmap(at(from), pages * page), Code::INVALID_VALUE);
        let access = sim.mem_set_access(at(from), pages * page, &[DEVICE]);
        assert_code(access, Code::INVALID_VALUE);
    }
    assert_code(sim.mem_set_access(at(4), page, &[]), Code::INVALID_VALUE);
    assert_code(sim.mem_set_access(at(4), page, &[DeviceOrdinal(9)]), Code::INVALID_DEVICE);
    assert_code(sim.mem_address_free(address, 8 * page), Code::INVALID_VALUE);
    sim.mem_unmap(at(2), 3 * page).unwrap();
    assert_code(sim.mem_address_free(address, 7 * page), Code::INVALID_VALUE);
    assert_code(sim.mem_address_free(at(1), 7 * page), Code::INVALID_VALUE);
    sim.mem_address_free(address, 8 * page).unwrap();
    assert_code(sim.mem_address_free(address, 8 * page), Code::INVALID_VALUE);
    for frame in [one, two] {
        sim.mem_release(frame).unwrap();
        assert_code(sim.mem_release(frame), Code::INVALID_VALUE);
    }
    check_clean(&sim);
}

fn rig_frame(sim: &Sim, bytes: u64) -> FrameHandle {
    sim.mem_create(DEVICE, bytes).expect("a frame")
}

#[test]
fn stale_handles_and_missing_contexts_are_refused() {
    let (sim, rig) = open("capacity=4M,granularity=64K");
    let (stream, event) = (rig.stream(), rig.event());
    sim.stream_destroy(stream).unwrap();
    sim.event_destroy(event).unwrap();
    assert_code(sim.stream_destroy(stream), DriverCode::INVALID_HANDLE);
    assert_code(sim.stream_synchronize(stream), DriverCode::INVALID_HANDLE);
    assert_code(sim.stream_get_id(Stream::NONE), DriverCode::INVALID_HANDLE);
    assert_code(sim.event_query(event), DriverCode::INVALID_HANDLE);
    assert_code(sim.event_record(event, Stream::DEFAULT), DriverCode::INVALID_HANDLE);
    // Handles come again, ids do not.
    assert_eq!(rig.stream(), stream);
    sim.ctx_set_current(None).unwrap();
    for result in [
        sim.module_load(),
        sim.stream_synchronize(stream),
        sim.event_create().map(drop),
        sim.mem_host_alloc(1).map(drop),
        sim.memset_d8_async(DeviceAddress(0), 0, 1, stream),
        sim.stream_is_capturing(Stream::DEFAULT).map(drop),
    ] {
        assert_code(result, DriverCode::INVALID_CONTEXT);
    }
}

#[test]
fn a_context_ends_with_its_last_release() {
    let (sim, rig) = open("capacity=4M,granularity=64K");
    let (context, stream) = (sim.ctx_get_current().unwrap(), rig.stream());
    sim.device_primary_ctx_release(DEVICE).unwrap();
    assert_code(sim.device_primary_ctx_release(DEVICE), DriverCode::INVALID_CONTEXT);
    assert_code(sim.mem_get_info(), DriverCode::CONTEXT_IS_DESTROYED);
    assert_code(sim.stream_get_id(stream), DriverCode::INVALID_HANDLE);
    assert_code(sim.ctx_set_current(context), DriverCode::INVALID_CONTEXT);
    assert_eq!(sim.device_primary_ctx_retain(DEVICE).ok(), context);
    // A new context has nothing of the old one: the kernels must be loaded again.
    let call = vbar::driver::KernelCall::Pattern {
        target: DeviceAddress(0),
        bytes: 0,
        seed: 0,
        delay_nanos: 0,
    };
    assert_code(sim.launch_kernel(call, Stream::DEFAULT), DriverCode::NOT_FOUND);
}

#[test]
fn a_device_goes_at_once_whatever_still_runs() {
    for options in ["capacity=1M,granularity=64K", "capacity=1M,granularity=64K,seed=5"] {
        let (sim, rig) = open(options);
        let other = sim.second_process();
        let pages = rig.pages(16);
        let (first, second, event) = (rig.stream(), rig.stream(), rig.event());
        rig.write_late(pages.address, 8, 60_000, first);
        sim.event_record(event, first).unwrap();
        sim.stream_wait_event(second, event).unwrap();
        rig.memset(pages.address, 1, 8, second);
        let begun = Instant::now();
        drop((sim, rig));
        assert!(begun.elapsed() < Duration::from_secs(30));
        assert!(other.mem_create(DEVICE, 1 << 20).is_ok(), "memory was left behind");
    }
}

#[test]
fn launches_wait_while_a_call_waits_for_the_device() {
    let (sim, rig) = open("capacity=4M,granularity=64K");
    let (pages, stream, other) = (rig.pages(1), rig.stream(), rig.stream());
    let memory = sim.mem_host_alloc(1).unwrap();
    let context = sim.ctx_get_current().unwrap();
    rig.write_late(pages.address, 8, 200, stream);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            sim.ctx_set_current(context).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            rig.memset(pages.address.offset(8), 1, 8, other);
            assert!(begun.elapsed() >= Duration::from_millis(150), "a launch got in");
        });
        crate::door::free_host(&rig, memory);
        assert!(begun.elapsed() >= Duration::from_millis(150));
    });
}

#[test]
fn recycled_memory_holds_nothing_of_before() {
    for (poison, expected) in [(0, 0), (1, 0xA5)] {
        let (sim, rig) = open(&format!("capacity=64K,granularity=64K,poison={poison}"));
        for _ in 0..2 {
            let pages = rig.pages(1);
            assert_eq!(sim.read_bytes(pages.address, 3).unwrap(), [expected; 3]);
            sim.write_bytes(pages.address, &[7; 3]).unwrap();
            assert_eq!(sim.read_bytes(pages.address, 3).unwrap(), [7; 3]);
            assert_code(sim.read_bytes(pages.address, 70_000), DriverCode::INVALID_VALUE);
            rig.give_back(pages);
        }
    }
}
