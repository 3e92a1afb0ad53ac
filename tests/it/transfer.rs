//! Copies between files and device memory that the program fills itself, through the ring.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use vbar::copy::fill::Filler;
use vbar::driver::kernel::checksum;
use vbar::driver::sim::Verb;
use vbar::driver::{CaptureMode, DriverCode};
use vbar::options::{RuntimeOptions, Threads};
use vbar::units::{MIB, PageSize, Stream};
use vbar::{ErrorCode, Vbar};

use crate::world::{P, World, options, pattern_bytes, resident_on};

/// Pages that several threads read a part of each.
const LARGE: u64 = 2 * MIB;

fn world(threads: Threads, page: u64) -> World {
    let page_size = PageSize::new(page).unwrap();
    let options = RuntimeOptions { page_size, threads: Some(threads), ..options() };
    World::with("capacity=64M,granularity=64K", options)
}

/// A file of the pattern of a seed.
fn file(bytes: u64, seed: u64) -> Arc<File> {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&pattern_bytes(bytes, seed), 0).unwrap();
    Arc::new(file)
}

fn sum_of(bytes: &[u8]) -> u64 {
    checksum(bytes, 0)
}

/// The bytes of a VBAR, as work on a stream sees them.
fn check_sum(world: &World, vbar: &Vbar, bytes: &[u8], stream: Stream) {
    let word = world.scratch();
    world.sum(vbar.base(), bytes.len() as u64, word, Duration::ZERO, stream);
    assert_eq!(world.word(word, stream), sum_of(bytes));
}

#[test]
fn a_file_goes_to_the_device_and_back_behind_the_work_of_its_stream() {
    for (threads, page) in [(Threads::Off, P), (Threads::On, LARGE), (Threads::Off, LARGE)] {
        let world = world(threads, page);
        let bytes = 5 * page + 4328;
        let (vbar, stored) = (world.runtime.create_bar(6 * page).unwrap(), file(bytes + 100, 7));
        let guard = resident_on(&vbar, 0..6 * page / P, world.stream);
        let read = |at: u64| {
            let range = at..at + bytes;
            world.runtime.read_file(&stored, range, vbar.base(), world.stream)
        };
        read(100).unwrap();
        let wanted = pattern_bytes(bytes + 100, 7);
        check_sum(&world, &vbar, &wanted[100..], world.stream);
        // A kernel writes late; the file has what it wrote.
        world.write(vbar.base(), bytes, 9, world.stream);
        world.runtime.write_file(&stored, 50..50 + bytes, vbar.base(), world.stream).unwrap();
        let mut found = vec![0; bytes as usize];
        stored.read_exact_at(&mut found, 50).unwrap();
        assert!(found == pattern_bytes(bytes, 9));
        read(0).unwrap();
        drop(guard);
        drop(vbar);
        world.check();
        world.check_shut();
    }
}

#[test]
fn a_file_that_ends_or_cannot_be_written_leaves_the_ring_whole() {
    for threads in [Threads::Off, Threads::On] {
        let world = world(threads, LARGE);
        let (vbar, stored) = (world.runtime.create_bar(4 * LARGE).unwrap(), file(3 * LARGE, 3));
        let guard = resident_on(&vbar, 0..4 * LARGE / P, world.stream);
        let read = |bytes: u64| {
            let base = vbar.base();
            world.runtime.read_file(&stored, 0..bytes, base, world.stream)
        };
        for _ in 0..10 {
            let error = read(4 * LARGE).unwrap_err();
            assert_eq!(error.code(), ErrorCode::Io, "{error}");
            assert!(error.to_string().contains("reading bytes"), "{error}");
        }
        read(3 * LARGE).unwrap();
        check_sum(&world, &vbar, &pattern_bytes(3 * LARGE, 3), world.stream);
        let reading = File::open("/proc/self/exe").unwrap();
        for _ in 0..10 {
            let written = world.runtime.write_file(&reading, 0..8, vbar.base(), world.stream);
            assert_eq!(written.unwrap_err().code(), ErrorCode::Io);
        }
        read(3 * LARGE).unwrap();
        drop(guard);
        drop(vbar);
        world.check();
        world.check_shut();
    }
}

#[test]
fn a_captured_stream_is_refused_and_its_capture_goes_on() {
    let world = world(Threads::Off, P);
    let (vbar, stored) = (world.vbar(1), file(P, 1));
    let guard = resident_on(&vbar, 0..1, world.stream);
    let captured = world.another_stream();
    world.sim.begin_capture(captured, CaptureMode::Global).unwrap();
    let refused = [
        world.runtime.read_file(&stored, 0..P, vbar.base(), captured),
        world.runtime.write_file(&stored, 0..P, vbar.base(), captured),
    ];
    for refused in refused {
        let error = refused.unwrap_err();
        assert_eq!(error.code(), ErrorCode::Unsupported, "{error}");
    }
    drop(world.sim.end_capture(captured).expect("our calls broke the capture"));
    let none = world.runtime.read_file(&stored, 0..P, vbar.base(), Stream::NONE).unwrap_err();
    assert_eq!(none.code(), ErrorCode::InvalidArgument, "{none}");
    drop(guard);
    world.check();
}

#[test]
fn a_slot_is_not_used_again_before_its_copy_is_done() {
    let world = world(Threads::Off, P);
    let (vbar, stored) = (world.vbar(16), file(16 * P, 5));
    let guard = resident_on(&vbar, 0..16, world.stream);
    let read = |bytes: u64| world.runtime.read_file(&stored, 0..bytes, vbar.base(), world.stream);
    read(P).unwrap();
    world.sim.hold_stream(world.stream).unwrap();
    world.runtime.set_wait_timeout(Duration::from_millis(30));
    // More than the ring has slots for, while no copy can be done.
    let error = read(16 * P).unwrap_err();
    assert_eq!(error.code(), ErrorCode::TimedOut, "{error}");
    world.sim.release_stream(world.stream).unwrap();
    world.runtime.set_wait_timeout(Duration::from_secs(5));
    read(16 * P).unwrap();
    check_sum(&world, &vbar, &pattern_bytes(16 * P, 5), world.stream);
    drop(guard);
    world.check();
}

#[test]
fn a_copy_that_no_fence_covers_is_waited_for() {
    let world = world(Threads::Off, P);
    let (vbar, stored) = (world.vbar(4), file(4 * P, 5));
    let guard = resident_on(&vbar, 0..4, world.stream);
    world.runtime.read_file(&stored, 0..P, vbar.base(), world.stream).unwrap();
    for verb in [Verb::EventRecord, Verb::MemcpyHtodAsync, Verb::MemcpyDtohAsync] {
        world.sim.fail_always(verb, DriverCode::INVALID_VALUE);
        let base = vbar.base();
        let read = world.runtime.read_file(&stored, 0..4 * P, base, world.stream);
        let written = world.runtime.write_file(&stored, 0..4 * P, base, world.stream);
        assert!(read.is_err() || written.is_err(), "{verb:?} did not fail");
        world.sim.heal();
        world.runtime.read_file(&stored, 0..4 * P, base, world.stream).unwrap();
    }
    check_sum(&world, &vbar, &pattern_bytes(4 * P, 5), world.stream);
    drop(guard);
    world.check();
}

/// Offsets up to the last that there is: the system refuses them, and nothing comes of sums.
#[test]
fn bytes_at_the_last_offsets_are_an_error_of_the_file() {
    for threads in [Threads::Off, Threads::On] {
        let world = world(threads, LARGE);
        let (vbar, stored) = (world.runtime.create_bar(LARGE).unwrap(), file(LARGE, 3));
        let guard = resident_on(&vbar, 0..LARGE / P, world.stream);
        for bytes in [u64::MAX - 50..u64::MAX, u64::MAX - LARGE..u64::MAX] {
            let base = vbar.base();
            let read = world.runtime.read_file(&stored, bytes.clone(), base, world.stream);
            let written = world.runtime.write_file(&stored, bytes, base, world.stream);
            for error in [read.unwrap_err(), written.unwrap_err()] {
                assert_eq!(error.code(), ErrorCode::Io, "{error}");
            }
        }
        world.runtime.read_file(&stored, 0..LARGE, vbar.base(), world.stream).unwrap();
        check_sum(&world, &vbar, &pattern_bytes(LARGE, 3), world.stream);
        drop(guard);
        drop(vbar);
        world.check();
        world.check_shut();
    }
}

/// A copy without a fence whose stream does not end in time is told so, and its slot is nobody
/// else's before it is done.
#[test]
fn a_copy_that_no_fence_covers_is_not_waited_for_without_end() {
    let world = world(Threads::Off, P);
    let (vbar, stored) = (world.vbar(4), file(4 * P, 5));
    let guard = resident_on(&vbar, 0..4, world.stream);
    world.runtime.read_file(&stored, 0..P, vbar.base(), world.stream).unwrap();
    world.sim.hold_stream(world.stream).unwrap();
    world.runtime.set_wait_timeout(Duration::from_millis(30));
    world.sim.fail_always(Verb::EventRecord, DriverCode::INVALID_VALUE);
    let error = world.runtime.read_file(&stored, 0..P, vbar.base(), world.stream).unwrap_err();
    assert_eq!(error.driver_code(), Some(DriverCode::INVALID_VALUE), "{error}");
    world.sim.heal();
    world.sim.release_stream(world.stream).unwrap();
    world.runtime.set_wait_timeout(Duration::from_secs(5));
    world.runtime.read_file(&stored, 0..4 * P, vbar.base(), world.stream).unwrap();
    check_sum(&world, &vbar, &pattern_bytes(4 * P, 5), world.stream);
    drop(guard);
    world.check();
}

/// However many streams come, none gets the slot of the one that fills: uses of what is copied
/// would be told by another stream's fences.
#[test]
fn the_fill_stream_keeps_its_slot() {
    let world = world(Threads::Off, P);
    let device = Arc::clone(world.runtime.device());
    let _scope = device.enter().unwrap();
    let filler = Filler::new(Arc::clone(&device)).unwrap();
    let (_, slot) = filler.stream();
    for _ in 0..600 {
        let stream = world.another_stream();
        let other = device.fences.slot_of(stream).unwrap().unwrap();
        assert_ne!(other.index(), slot.index());
    }
    assert!(device.fences.is_still(slot));
    assert_eq!(filler.stamp().slot(), slot.index());
}

/// A copy that is refused for a moment is made again where no memory can be page-locked, too.
#[test]
fn a_refusal_for_a_moment_is_nobodys_error_without_a_ring() {
    let options = RuntimeOptions { host_allowance: Some(0), ..options() };
    let world = World::with("capacity=64M,granularity=64K", options);
    let (vbar, stored) = (world.vbar(4), file(4 * P, 5));
    let guard = resident_on(&vbar, 0..4, world.stream);
    world.sim.fail_nth(Verb::MemcpyHtodAsync, 1, DriverCode::NOT_READY);
    world.runtime.read_file(&stored, 0..4 * P, vbar.base(), world.stream).unwrap();
    world.sim.fail_nth(Verb::MemcpyDtohAsync, 1, DriverCode::NOT_READY);
    world.runtime.write_file(&stored, 0..4 * P, vbar.base(), world.stream).unwrap();
    // One whose end was not seen is not: the device may be writing to the memory.
    world.sim.fail_nth(Verb::StreamSynchronize, 1, DriverCode::NOT_READY);
    let base = vbar.base();
    let error = world.runtime.write_file(&stored, 0..P, base, world.stream).unwrap_err();
    assert_eq!(error.driver_code(), Some(DriverCode::NOT_READY), "{error}");
    world.sim.heal();
    check_sum(&world, &vbar, &pattern_bytes(4 * P, 5), world.stream);
    drop(guard);
    world.check();
}
