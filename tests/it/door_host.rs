//! The part of the door's suite about host memory, mapped and registered, and the time between
//! events.
#![expect(unsafe_code, reason = "registers memory and copies through raw pointers")]

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use vbar::driver::kernel::pattern;
use vbar::driver::{DeviceAttribute, DriverCode, HostNode};

use super::{Rig, bytes_of};

const LEN: usize = 64 << 10;

/// Ordinary memory, whole OS pages.
fn memory() -> memmap2::MmapMut {
    memmap2::MmapMut::map_anon(2 * LEN).expect("memory")
}

fn start(memory: &mut memmap2::MmapMut) -> NonNull<u8> {
    NonNull::new(memory.as_mut_ptr()).expect("a mapping is not at 0")
}

fn register(rig: &Rig, memory: NonNull<u8>, bytes: usize) -> Result<(), DriverCode> {
    // SAFETY: every caller keeps the mapping until it has unregistered it.
    unsafe { rig.driver.mem_host_register(memory, bytes) }.map_err(|error| error.code)
}

fn unregister(rig: &Rig, memory: NonNull<u8>) -> Result<(), DriverCode> {
    rig.driver.mem_host_unregister(memory).map_err(|error| error.code)
}

/// Host memory at a device address: read and written as a frame is, and no memory of the device's.
pub(super) fn check_host_frames(rig: &Rig) {
    let (driver, device) = (&rig.driver, rig.device);
    let attribute = |attribute| driver.device_get_attribute(device, attribute);
    let supported = attribute(DeviceAttribute::HostNumaVirtualMemoryManagementSupported);
    if supported.unwrap_or(0) != 1 {
        assert!(driver.mem_create_host(HostNode(0), rig.page).is_err(), "not told to be there");
        return;
    }
    let node = attribute(DeviceAttribute::HostNumaId).ok().and_then(|node| node.try_into().ok());
    let (stream, node) = (rig.stream(), HostNode(node.unwrap_or(0)));
    let free_before = driver.mem_get_info().expect("free memory").free_bytes;
    // More than the driver may need for page tables.
    let frames: Vec<_> =
        (0..16).map(|_| driver.mem_create_host(node, rig.page).expect("a host frame")).collect();
    let taken = free_before.saturating_sub(driver.mem_get_info().expect("free memory").free_bytes);
    assert!(taken < 16 * rig.page, "{taken} bytes of the device");
    let address = driver.mem_address_reserve(rig.page, 0).expect("addresses");
    driver.mem_map(address, rig.page, frames[0]).expect("a mapping");
    driver.mem_set_access(address, rig.page, &[device]).expect("access");
    let mut bytes = vec![0; LEN];
    pattern(&mut bytes, 9);
    rig.write(address, &bytes, stream);
    assert_eq!(rig.read(address, LEN, stream), bytes);
    rig.write_late(address, 16, 10, stream);
    driver.stream_synchronize(stream).expect("its end");
    assert_eq!(rig.read(address, 16, stream), bytes_of(1, 16));
    driver.mem_unmap(address, rig.page).expect("unmapping");
    frames.into_iter().for_each(|frame| driver.mem_release(frame).expect("releasing"));
    driver.mem_address_free(address, rig.page).expect("freeing addresses");
    rig.destroy(&[stream], &[]);
}

pub(super) fn check_registered_memory(rig: &Rig) {
    let (pages, stream) = (rig.pages(2), rig.stream());
    let mut memory = memory();
    let at = start(&mut memory);
    pattern(&mut memory, 5);
    assert_eq!(unregister(rig, at), Err(DriverCode::HOST_MEMORY_NOT_REGISTERED));
    assert_eq!(register(rig, at, 0), Err(DriverCode::INVALID_VALUE));
    register(rig, at, LEN).expect("registering");
    assert_eq!(register(rig, at, LEN), Err(DriverCode::HOST_MEMORY_ALREADY_REGISTERED));
    // Within it, but not where it begins.
    let within = NonNull::new(memory[4096..].as_mut_ptr()).expect("not at 0");
    assert_eq!(unregister(rig, within), Err(DriverCode::INVALID_VALUE));
    // Behind work that takes its time: the copy is asynchronous, as from any page-locked memory.
    rig.memset(pages.address, 0, rig.page, stream);
    rig.write_late(pages.address, 16, 50, stream);
    let begun = Instant::now();
    // SAFETY: the memory stays as it is until the stream has been waited for.
    unsafe { rig.driver.memcpy_htod_async(pages.address, at.as_ptr(), LEN, stream) }
        .expect("a copy");
    assert!(begun.elapsed() < Duration::from_millis(40), "the copy was waited for");
    rig.driver.stream_synchronize(stream).expect("its end");
    assert_eq!(rig.read(pages.address, LEN, stream), memory[..LEN]);
    unregister(rig, at).expect("unregistering");
    assert_eq!(unregister(rig, at), Err(DriverCode::HOST_MEMORY_NOT_REGISTERED));
    // It is ordinary memory again, and can be registered again.
    rig.write(pages.address, &memory[..LEN], stream);
    register(rig, at, 2 * LEN).expect("registering again");
    unregister(rig, at).expect("unregistering again");
    rig.give_back(pages);
    rig.destroy(&[stream], &[]);
}

/// Pages of a file, in memory where there is such a file system: read by the device as they are,
/// also when the file has been cut short meanwhile.
pub(super) fn check_registered_file(rig: &Rig) {
    let driver = &rig.driver;
    let attribute = DeviceAttribute::ReadOnlyHostRegisterSupported;
    let supported = driver.device_get_attribute(rig.device, attribute).unwrap_or(0);
    let folder = if std::path::Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" };
    let mut file = tempfile::tempfile_in(folder).expect("a file");
    let mut bytes = vec![0; 2 * LEN];
    pattern(&mut bytes, 11);
    std::io::Write::write_all(&mut file, &bytes).expect("its bytes");
    let mapping = memmap2::MmapOptions::new().len(2 * LEN).map_raw_read_only(&file);
    let mapping = mapping.expect("a mapping");
    let at = NonNull::new(mapping.as_mut_ptr()).expect("a mapping is not at 0");
    // SAFETY: the mapping stays until it is unregistered, here and below.
    let register = |at: NonNull<u8>, bytes| unsafe {
        driver.mem_host_register_read_only(at, bytes).map_err(|error| error.code)
    };
    if supported != 1 {
        assert!(register(at, LEN).is_err(), "not told to be there");
        return;
    }
    // SAFETY: as above.
    assert!(unsafe { driver.mem_host_register(at, LEN) }.is_err(), "for writing too");
    let second = NonNull::new(at.as_ptr().wrapping_add(LEN)).expect("not at 0");
    register(at, LEN).expect("registering");
    register(second, LEN).expect("registering the next");
    assert_eq!(register(at, LEN), Err(DriverCode::HOST_MEMORY_ALREADY_REGISTERED));
    let (pages, stream) = (rig.pages(2), rig.stream());
    // SAFETY: the mapping stays until the stream has been waited for.
    let copy = |from: NonNull<u8>, bytes| unsafe {
        let copied = driver.memcpy_htod_async(pages.address, from.as_ptr(), bytes, stream);
        copied.map_err(|error| error.code)
    };
    rig.write_late(pages.address, 16, 50, stream);
    let begun = Instant::now();
    copy(at, LEN).expect("a copy");
    assert!(begun.elapsed() < Duration::from_millis(40), "the copy was waited for");
    driver.stream_synchronize(stream).expect("its end");
    assert_eq!(rig.read(pages.address, LEN, stream), bytes[..LEN]);
    assert_eq!(copy(at, LEN + 1), Err(DriverCode::INVALID_VALUE), "across two");
    // What is registered stays in memory.
    file.set_len(0).expect("cutting it short");
    copy(second, LEN).expect("a copy of what the file has no more");
    driver.stream_synchronize(stream).expect("its end");
    assert_eq!(rig.read(pages.address, LEN, stream), bytes[LEN..]);
    unregister(rig, at).expect("unregistering");
    unregister(rig, second).expect("unregistering the next");
    rig.give_back(pages);
    rig.destroy(&[stream], &[]);
}

/// What the driver says of an address: the page-locked range that it lies in, ranges that touch
/// each other apart, whoever locked them; nothing of other memory.
pub(super) fn check_ranges(rig: &Rig) {
    let range = |address: u64| rig.driver.pointer_get_host_range(address).expect("an answer");
    let mut memory = memory();
    let at = start(&mut memory);
    let (first, bytes) = (at.as_ptr().addr() as u64, LEN as u64);
    let second = NonNull::new(memory[LEN..].as_mut_ptr()).expect("not at 0");
    assert_eq!(range(first), None);
    register(rig, at, LEN).expect("registering");
    assert_eq!((range(first), range(first + bytes)), (Some(first..first + bytes), None));
    register(rig, second, LEN / 2).expect("registering its neighbour");
    let neighbour = first + bytes..first + bytes + bytes / 2;
    assert_eq!(range(first + bytes - 1), Some(first..first + bytes));
    assert_eq!(range(first + bytes), Some(neighbour.clone()));
    assert_eq!(range(neighbour.end - 1), Some(neighbour.clone()));
    assert_eq!(range(neighbour.end), None);
    unregister(rig, at).expect("unregistering");
    assert_eq!((range(first), range(first + bytes)), (None, Some(neighbour)));
    unregister(rig, second).expect("unregistering");

    let given = rig.driver.mem_host_alloc(LEN).expect("page-locked memory");
    let first = given.as_ptr().addr() as u64;
    assert_eq!(range(first + 5), Some(first..first + bytes));
    // SAFETY: allocated above, and nobody has used it.
    unsafe { rig.driver.mem_free_host(given) }.expect("freeing");
    assert_eq!(range(first), None);
    let pages = rig.pages(1);
    assert_eq!(range(pages.address.0), None, "the device's memory");
    rig.give_back(pages);
}

pub(super) fn check_unregistering_waits(rig: &Rig) {
    let (pages, stream) = (rig.pages(1), rig.stream());
    let mut memory = memory();
    let at = start(&mut memory);
    register(rig, at, LEN).expect("registering");
    rig.write_late(pages.address, 16, 50, stream);
    let begun = Instant::now();
    unregister(rig, at).expect("unregistering");
    assert!(begun.elapsed() > Duration::from_millis(25), "unregistering did not wait");
    rig.driver.stream_synchronize(stream).expect("its end");
    assert_eq!(rig.read(pages.address, 16, stream), bytes_of(1, 16));
    rig.give_back(pages);
    rig.destroy(&[stream], &[]);
}

pub(super) fn check_elapsed_time(rig: &Rig) {
    let (pages, stream) = (rig.pages(1), rig.stream());
    let timed = || rig.driver.event_create_timed().expect("an event with timing");
    let (start, end, plain) = (timed(), timed(), rig.event());
    let elapsed = |start, end| rig.driver.event_elapsed(start, end).map_err(|error| error.code);
    assert_eq!(elapsed(start, end), Err(DriverCode::INVALID_HANDLE), "never recorded");
    rig.driver.event_record(start, stream).expect("a record");
    rig.write_late(pages.address, 16, 50, stream);
    rig.driver.event_record(end, stream).expect("a record");
    rig.driver.event_record(plain, stream).expect("a record");
    assert_eq!(elapsed(start, end), Err(DriverCode::NOT_READY));
    rig.driver.stream_synchronize(stream).expect("their end");
    let time = elapsed(start, end).expect("both have passed");
    assert!(time > Duration::from_millis(40) && time < Duration::from_secs(10), "{time:?}");
    assert_eq!(elapsed(end, start), Ok(Duration::ZERO));
    assert_eq!(elapsed(start, plain), Err(DriverCode::INVALID_HANDLE), "without timing");
    rig.give_back(pages);
    rig.destroy(&[stream], &[start, end, plain]);
}

/// Memory that the driver places by itself, with and without virtual memory management.
pub(super) fn check_linear_memory(rig: &Rig) {
    let stream = rig.stream();
    let bytes = 3 * rig.page + 100;
    let memory = rig.driver.mem_alloc(bytes).expect("memory");
    let other = rig.driver.mem_alloc(8).expect("a little more");
    assert!(other.0 + 8 <= memory.0 || other.0 >= memory.0 + bytes, "they overlap");
    assert!(memory.0.is_multiple_of(256) && other.0.is_multiple_of(256));
    rig.write(memory.offset(bytes - 16), &bytes_of(3, 16), stream);
    assert_eq!(rig.read(memory.offset(bytes - 16), 16, stream), bytes_of(3, 16));
    // A free waits for the device, whatever its work is.
    let pages = rig.pages(1);
    rig.write_late(pages.address, 16, 50, stream);
    let begun = Instant::now();
    rig.driver.mem_free(memory).expect("freeing");
    assert!(begun.elapsed() > Duration::from_millis(25), "freeing did not wait");
    rig.driver.mem_free(other).expect("freeing");
    let twice = rig.driver.mem_free(other).map_err(|error| error.code);
    assert_eq!(twice, Err(DriverCode::INVALID_VALUE), "freed twice");
    assert!(rig.driver.mem_alloc(1 << 60).is_err());
    rig.driver.stream_synchronize(stream).expect("its end");
    rig.give_back(pages);
    rig.destroy(&[stream], &[]);
}
