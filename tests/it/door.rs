//! The contract of the door, as a suite that runs on the simulated device and on a real one.
//!
//! Only what both keep is asked: nothing that CUDA leaves undefined. Each check makes what it needs
//! and gives it back; a failed check ends the suite.
#![expect(unsafe_code, reason = "copies through the trait take raw pointers")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vbar::driver::kernel::{checksum, pattern};
use vbar::driver::{
    CaptureMode, CaptureState, DeviceAttribute, Driver, DriverCode, DriverResult, Event,
    FrameHandle, KernelCall,
};
use vbar::units::{DeviceAddress, DeviceOrdinal, Stream};

#[path = "door_host.rs"]
mod host;

const MS: u64 = 1_000_000;

/// Runs the whole suite on one device of a driver.
pub(crate) fn check_door(driver: Arc<dyn Driver>, device: DeviceOrdinal) {
    let before = driver.ctx_get_current().expect("the current context");
    let context = driver.device_primary_ctx_retain(device).expect("a context");
    driver.ctx_set_current(Some(context)).expect("a current context");
    driver.module_load().expect("the kernels");
    driver.module_load().expect("loading again does nothing");
    let rig = Rig::new(driver.clone(), device);

    check_identity(&rig);
    check_contexts_are_per_thread(&rig);
    check_round_trip(&rig);
    check_several_mappings_in_one_call(&rig);
    check_aliasing(&rig);
    check_memory_outlives_its_handle(&rig);
    check_refusals(&rig);
    check_free_memory_moves(&rig);
    check_never_recorded_events(&rig);
    check_wait_takes_the_record_of_its_moment(&rig);
    check_events_of_a_context(&rig);
    check_stream_queries(&rig);
    check_stream_ids(&rig);
    check_destroyed_stream_finishes(&rig);
    check_copies(&rig);
    check_kernels(&rig);
    check_kernel_refusals(&rig);
    check_delayed_kernel(&rig);
    check_mapping_does_not_wait(&rig);
    check_capture_state(&rig);
    host::check_host_frames(&rig);
    host::check_registered_memory(&rig);
    host::check_ranges(&rig);
    host::check_unregistering_waits(&rig);
    host::check_registered_file(&rig);
    host::check_elapsed_time(&rig);
    host::check_linear_memory(&rig);

    driver.ctx_synchronize().expect("nothing is left that fails");
    driver.ctx_set_current(before).expect("the context of before");
    driver.device_primary_ctx_release(device).expect("the context's release");
}

/// A driver, a device, and the size that everything here has.
pub(crate) struct Rig {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) device: DeviceOrdinal,
    pub(crate) page: u64,
}

/// Frames at consecutive addresses of a reservation of their own.
pub(crate) struct Pages {
    pub(crate) address: DeviceAddress,
    pub(crate) frames: Vec<FrameHandle>,
}

impl Rig {
    pub(crate) fn new(driver: Arc<dyn Driver>, device: DeviceOrdinal) -> Self {
        let page = driver.mem_get_allocation_granularity(device).expect("the granularity");
        assert!(page.is_power_of_two());
        Self { driver, device, page }
    }

    pub(crate) fn pages(&self, count: u64) -> Pages {
        let bytes = count * self.page;
        let address = self.driver.mem_address_reserve(bytes, 0).expect("a reservation");
        let frames = (0..count).map(|index| {
            let frame = self.driver.mem_create(self.device, self.page).expect("a frame");
            let at = address.offset(index * self.page);
            self.driver.mem_map(at, self.page, frame).expect("a mapping");
            frame
        });
        let frames = frames.collect();
        self.driver.mem_set_access(address, bytes, &[self.device]).expect("access");
        Pages { address, frames }
    }

    /// Gives pages back; nothing may be pending on them.
    pub(crate) fn give_back(&self, pages: Pages) {
        let bytes = pages.frames.len() as u64 * self.page;
        self.driver.mem_unmap(pages.address, bytes).expect("unmapping");
        for frame in pages.frames {
            self.driver.mem_release(frame).expect("a release");
        }
        self.driver.mem_address_free(pages.address, bytes).expect("freeing addresses");
    }

    pub(crate) fn stream(&self) -> Stream {
        self.driver.stream_create().expect("a stream")
    }

    pub(crate) fn event(&self) -> Event {
        self.driver.event_create().expect("an event")
    }

    pub(crate) fn memset(&self, target: DeviceAddress, value: u8, bytes: u64, stream: Stream) {
        self.driver.memset_d8_async(target, value, bytes, stream).expect("a memset");
    }

    /// Writes bytes from ordinary memory and waits.
    pub(crate) fn write(&self, target: DeviceAddress, bytes: &[u8], stream: Stream) {
        // SAFETY: the slice outlives the copy, which the synchronisation ends.
        unsafe { self.driver.memcpy_htod_async(target, bytes.as_ptr(), bytes.len(), stream) }
            .expect("a copy to the device");
        self.driver.stream_synchronize(stream).expect("its end");
    }

    /// Reads bytes into ordinary memory and waits.
    pub(crate) fn read(&self, source: DeviceAddress, len: usize, stream: Stream) -> Vec<u8> {
        let mut bytes = vec![0u8; len];
        // SAFETY: the buffer outlives the copy, which the synchronisation ends.
        unsafe { self.driver.memcpy_dtoh_async(bytes.as_mut_ptr(), source, len, stream) }
            .expect("a copy from the device");
        self.driver.stream_synchronize(stream).expect("its end");
        bytes
    }

    /// A kernel that writes `bytes` bytes after `delay_ms`.
    pub(crate) fn write_late(
        &self,
        target: DeviceAddress,
        bytes: u64,
        delay_ms: u64,
        stream: Stream,
    ) {
        let call = KernelCall::Pattern { target, bytes, seed: 1, delay_nanos: delay_ms * MS };
        self.driver.launch_kernel(call, stream).expect("a launch");
    }

    /// Polls an event until it has passed.
    pub(crate) fn wait(&self, event: Event) {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            match self.driver.event_query(event) {
                Ok(()) => return,
                Err(error) => assert_eq!(error.code, DriverCode::NOT_READY),
            }
            assert!(Instant::now() < end, "the event did not pass in 30 s");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    pub(crate) fn is_ready(&self, event: Event) -> bool {
        let answer = self.driver.event_query(event);
        answer.is_ok() || {
            assert_code(answer, DriverCode::NOT_READY);
            false
        }
    }

    fn destroy(&self, streams: &[Stream], events: &[Event]) {
        for stream in streams {
            self.driver.stream_destroy(*stream).expect("a stream's end");
        }
        for event in events {
            self.driver.event_destroy(*event).expect("an event's end");
        }
    }
}

#[track_caller]
pub(crate) fn assert_code<T: std::fmt::Debug>(result: DriverResult<T>, code: DriverCode) {
    assert_eq!(result.map_err(|error| error.code).expect_err("a refusal was expected"), code);
}

fn bytes_of(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; len];
    pattern(&mut bytes, seed);
    bytes
}

fn check_identity(rig: &Rig) {
    let Rig { driver, device, page } = rig;
    let description = driver.description();
    assert!(description.starts_with("cuda") || description.starts_with("sim:"), "{description}");
    assert!(driver.version().expect("a version") >= 11_000);
    let count = driver.device_get_count().expect("a count");
    assert!(device.0 < count);
    assert!(!driver.device_get_name(*device).expect("a name").is_empty());
    assert!(driver.device_total_mem(*device).expect("a size") >= *page);
    let vmm = DeviceAttribute::VirtualMemoryManagementSupported;
    assert_eq!(driver.device_get_attribute(*device, vmm), Ok(1));
    let none = DeviceOrdinal(count);
    assert_code(driver.device_get_name(none), DriverCode::INVALID_DEVICE);
    assert_code(driver.device_total_mem(none), DriverCode::INVALID_DEVICE);
    assert_code(driver.device_primary_ctx_retain(none), DriverCode::INVALID_DEVICE);
}

fn check_contexts_are_per_thread(rig: &Rig) {
    let here = rig.driver.ctx_get_current().expect("a context");
    assert!(here.is_some());
    let driver = rig.driver.clone();
    let there = std::thread::spawn(move || {
        assert_eq!(driver.ctx_get_current(), Ok(None));
        assert_code(driver.mem_get_info(), DriverCode::INVALID_CONTEXT);
        assert_code(driver.stream_create(), DriverCode::INVALID_CONTEXT);
        assert_code(driver.ctx_synchronize(), DriverCode::INVALID_CONTEXT);
        driver.ctx_set_current(here).expect("a context may be current on two threads");
        let stream = driver.stream_create().expect("a stream");
        driver.stream_destroy(stream).expect("its end");
        driver.ctx_set_current(None).expect("no context");
        driver.ctx_get_current()
    });
    assert_eq!(there.join().expect("the thread"), Ok(None));
    assert_eq!(rig.driver.ctx_get_current(), Ok(here));
}

fn check_round_trip(rig: &Rig) {
    let Rig { driver, device, page } = rig;
    let bytes = 8 * page;
    let address = driver.mem_address_reserve(bytes, bytes).expect("a reservation");
    assert_eq!(address.0 % bytes, 0, "the alignment was not kept");
    let stream = rig.stream();
    for round in 0..3u8 {
        let at = address.offset(u64::from(round) * page);
        let frame = driver.mem_create(*device, *page).expect("a frame");
        driver.mem_map(at, *page, frame).expect("a mapping");
        driver.mem_set_access(at, *page, &[*device]).expect("access");
        rig.memset(at, round + 1, *page, stream);
        assert_eq!(rig.read(at, *page as usize, stream), vec![round + 1; *page as usize]);
        driver.mem_unmap(at, *page).expect("unmapping");
        driver.mem_release(frame).expect("a release");
    }
    driver.mem_address_free(address, bytes).expect("freeing addresses");
    rig.destroy(&[stream], &[]);
}

fn check_several_mappings_in_one_call(rig: &Rig) {
    let pages = rig.pages(3);
    let stream = rig.stream();
    // Two bytes on either side of the border between two mappings.
    let across = pages.address.offset(rig.page - 2);
    rig.write(across, &[1, 2, 3, 4], stream);
    assert_eq!(rig.read(across, 4, stream), [1, 2, 3, 4]);
    rig.give_back(pages);
    rig.destroy(&[stream], &[]);
}

fn check_aliasing(rig: &Rig) {
    let Rig { driver, device, page } = rig;
    let pages = rig.pages(1);
    let second = driver.mem_address_reserve(*page, 0).expect("a reservation");
    driver.mem_map(second, *page, pages.frames[0]).expect("a second mapping");
    driver.mem_set_access(second, *page, &[*device]).expect("access");
    let (writer, reader) = (rig.stream(), rig.stream());
    let (written, read) = (rig.event(), rig.event());
    for round in 0..20u8 {
        driver.stream_wait_event(writer, read).expect("a wait");
        rig.memset(pages.address, round, *page, writer);
        driver.event_record(written, writer).expect("a record");
        driver.stream_wait_event(reader, written).expect("a wait");
        let bytes = rig.read(second.offset(page / 2), 64, reader);
        assert_eq!(bytes, [round; 64]);
        driver.event_record(read, reader).expect("a record");
    }
    driver.mem_unmap(second, *page).expect("unmapping one of two");
    assert_eq!(rig.read(pages.address, 8, writer), [19; 8]);
    driver.mem_address_free(second, *page).expect("freeing addresses");
    rig.give_back(pages);
    rig.destroy(&[writer, reader], &[written, read]);
}

fn check_memory_outlives_its_handle(rig: &Rig) {
    let mut pages = rig.pages(1);
    let stream = rig.stream();
    rig.memset(pages.address, 7, rig.page, stream);
    rig.driver.stream_synchronize(stream).expect("its end");
    rig.driver.mem_release(pages.frames.remove(0)).expect("a release while mapped");
    assert_eq!(rig.read(pages.address, 16, stream), [7; 16]);
    rig.driver.mem_unmap(pages.address, rig.page).expect("unmapping");
    rig.driver.mem_address_free(pages.address, rig.page).expect("freeing addresses");
    rig.destroy(&[stream], &[]);
}

fn check_refusals(rig: &Rig) {
    let Rig { driver, device, page } = rig;
    assert_code(driver.mem_address_reserve(0, 0), DriverCode::INVALID_VALUE);
    assert_code(driver.mem_create(*device, page + 1), DriverCode::INVALID_VALUE);
    let none = DeviceOrdinal(driver.device_get_count().expect("a count"));
    assert!(driver.mem_create(none, *page).is_err());

    let address = driver.mem_address_reserve(4 * page, 0).expect("a reservation");
    let frame = driver.mem_create(*device, 2 * page).expect("a frame of two pages");
    assert_code(driver.mem_set_access(address, *page, &[*device]), DriverCode::INVALID_VALUE);
    assert!(driver.mem_map(address, *page, frame).is_err(), "part of a handle was mapped");
    driver.mem_map(address, 2 * page, frame).expect("a mapping");
    assert!(driver.mem_map(address, 2 * page, frame).is_err(), "mapped over a mapping");
    assert_code(driver.mem_unmap(address, *page), DriverCode::INVALID_VALUE);
    assert_code(driver.mem_unmap(address.offset(*page), *page), DriverCode::INVALID_VALUE);
    // What was refused changed nothing: the mapping is whole, and goes whole.
    driver.mem_set_access(address, 2 * page, &[*device]).expect("access");
    driver.mem_unmap(address, 2 * page).expect("unmapping");
    driver.mem_release(frame).expect("a release");
    driver.mem_address_free(address, 4 * page).expect("freeing addresses");
}

fn check_free_memory_moves(rig: &Rig) {
    // Large enough to stand out from what other processes and the driver itself do.
    let bytes = (64u64 << 20).next_multiple_of(rig.page);
    let before = rig.driver.mem_get_info().expect("the memory");
    assert!(before.free_bytes <= before.total_bytes && before.free_bytes >= bytes);
    let frame = rig.driver.mem_create(rig.device, bytes).expect("a frame");
    let with = rig.driver.mem_get_info().expect("the memory");
    assert!(before.free_bytes.saturating_sub(with.free_bytes) >= bytes / 2);
    rig.driver.mem_release(frame).expect("a release");
    let after = rig.driver.mem_get_info().expect("the memory");
    assert!(after.free_bytes.saturating_sub(with.free_bytes) >= bytes / 2);
}

fn check_never_recorded_events(rig: &Rig) {
    let (event, stream) = (rig.event(), rig.stream());
    assert!(rig.is_ready(event));
    rig.driver.stream_wait_event(stream, event).expect("a wait for nothing");
    rig.driver.stream_synchronize(stream).expect("which ends");
    rig.destroy(&[stream], &[event]);
}

fn check_wait_takes_the_record_of_its_moment(rig: &Rig) {
    let pages = rig.pages(1);
    let (first, second) = (rig.stream(), rig.stream());
    let (event, passed) = (rig.event(), rig.event());
    rig.write_late(pages.address, 8, 50, first);
    rig.driver.event_record(event, first).expect("a record");
    rig.driver.stream_wait_event(second, event).expect("a wait");
    rig.driver.event_record(passed, second).expect("a record");
    // The same event again, much later: the wait above is not for this record.
    rig.write_late(pages.address, 8, 400, first);
    rig.driver.event_record(event, first).expect("a record");
    assert!(!rig.is_ready(passed));
    rig.wait(passed);
    assert!(!rig.is_ready(event), "the wait took the later record");
    rig.wait(event);
    rig.give_back(pages);
    rig.destroy(&[first, second], &[event, passed]);
}

/// Whether the driver must have `ctx_record_event`: it came with CUDA 12.5.
fn has_context_events(rig: &Rig) -> bool {
    rig.driver.version().expect("a version") >= 12_050
}

fn check_events_of_a_context(rig: &Rig) {
    let context = rig.driver.ctx_get_current().expect("the question").expect("a context");
    let event = rig.event();
    let record = |event| rig.driver.ctx_record_event(context, event);
    if !has_context_events(rig) {
        assert_code(record(event), DriverCode::NOT_SUPPORTED);
        return rig.destroy(&[], &[event]);
    }
    let pages = rig.pages(1);
    let (long, gone, other) = (rig.stream(), rig.stream(), rig.stream());
    let events @ [of_long, of_gone, of_default, of_other, after] = [(); 5].map(|()| rig.event());
    let at = |index| pages.address.offset(index * 8);
    // Pending: on a stream, on one that is destroyed, on a default stream.
    let pending = [(long, 150, of_long), (gone, 200, of_gone), (Stream::DEFAULT, 100, of_default)];
    for (index, (stream, delay_ms, recorded)) in pending.into_iter().enumerate() {
        rig.write_late(at(index as u64), 8, delay_ms, stream);
        rig.driver.event_record(recorded, stream).expect("a record");
    }
    rig.driver.stream_destroy(gone).expect("a stream's end");
    record(event).expect("a record of the context");
    assert!(!rig.is_ready(event), "work of the context is pending");
    // Nobody else is stopped, and a stream that waits for the event waits for all of it.
    rig.memset(at(3), 1, 8, other);
    rig.driver.event_record(of_other, other).expect("a record");
    rig.driver.stream_wait_event(other, event).expect("a wait");
    rig.driver.event_record(after, other).expect("a record");
    rig.wait(of_other);
    assert!(!rig.is_ready(event), "a record of the context waited, or made others wait");
    rig.wait(after);
    for passed in [of_long, of_gone, of_default, event] {
        assert!(rig.is_ready(passed), "the event passed before work of its context");
    }
    check_later_work_is_not_in_the_event(rig, at(0), long, [event, of_long], record);
    rig.give_back(pages);
    rig.destroy(&[long, other], &events);
    rig.destroy(&[], &[event]);
}

fn check_later_work_is_not_in_the_event(
    rig: &Rig,
    target: DeviceAddress,
    stream: Stream,
    [event, late]: [Event; 2],
    record: impl Fn(Event) -> DriverResult<()>,
) {
    rig.write_late(target, 8, 20, stream);
    record(event).expect("a record");
    rig.write_late(target, 8, 300, stream);
    rig.driver.event_record(late, stream).expect("a record");
    rig.wait(event);
    assert!(!rig.is_ready(late), "the event took in work that came after it");
    // Recorded again it holds what is pending now.
    record(event).expect("a record");
    assert!(!rig.is_ready(event));
    rig.wait(event);
    assert!(rig.is_ready(late));
}

fn check_stream_queries(rig: &Rig) {
    let (pages, stream, other) = (rig.pages(1), rig.stream(), rig.stream());
    let done = |stream| rig.driver.stream_query(stream);
    assert_eq!(done(stream), Ok(()), "nothing was enqueued");
    rig.write_late(pages.address, 8, 100, stream);
    assert_code(done(stream), DriverCode::NOT_READY);
    assert_eq!(done(other), Ok(()), "the other stream's work is none of its");
    let end = Instant::now() + Duration::from_secs(30);
    while let Err(error) = done(stream) {
        assert_eq!(error.code, DriverCode::NOT_READY);
        assert!(Instant::now() < end, "the stream was not done in 30 s");
        std::thread::sleep(Duration::from_micros(50));
    }
    assert_eq!(rig.read(pages.address, 8, other), bytes_of(1, 8));
    rig.give_back(pages);
    rig.destroy(&[stream, other], &[]);
}

fn check_stream_ids(rig: &Rig) {
    let id = |stream| rig.driver.stream_get_id(stream).expect("an id");
    let mut ids = vec![id(Stream::DEFAULT), id(Stream::PER_THREAD)];
    assert_eq!(ids[0], id(Stream::LEGACY));
    for _ in 0..5 {
        let streams = [rig.stream(), rig.stream()];
        ids.extend(streams.map(id));
        assert_eq!(streams.map(id), streams.map(id));
        rig.destroy(&streams, &[]);
    }
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count, "a stream id came twice");
}

fn check_destroyed_stream_finishes(rig: &Rig) {
    let pages = rig.pages(1);
    let (stream, other, event) = (rig.stream(), rig.stream(), rig.event());
    rig.memset(pages.address, 0, 16, stream);
    rig.write_late(pages.address, 16, 50, stream);
    rig.driver.event_record(event, stream).expect("a record");
    rig.driver.stream_destroy(stream).expect("its end");
    assert!(!rig.is_ready(event), "destroying a stream waited for it");
    rig.wait(event);
    assert_eq!(rig.read(pages.address, 16, other), bytes_of(1, 16));
    rig.give_back(pages);
    rig.destroy(&[other], &[event]);
}

fn check_copies(rig: &Rig) {
    let pages = rig.pages(2);
    let stream = rig.stream();
    for (offset, len) in [(0, 1), (3, 1001), (rig.page - 17, 40), (1, rig.page as usize)] {
        let bytes = bytes_of(offset, len);
        let at = pages.address.offset(offset);
        rig.memset(pages.address, 0xEE, 2 * rig.page, stream);
        rig.write(at, &bytes, stream);
        assert_eq!(rig.read(at, len, stream), bytes, "{len} bytes at {offset}");
        let behind = rig.read(at.offset(len as u64), 8, stream);
        assert_eq!(behind, [0xEE; 8], "{len} bytes at {offset} were more");
    }
    check_page_locked_copies(rig, &pages, stream);
    rig.give_back(pages);
    rig.destroy(&[stream], &[]);
}

fn check_page_locked_copies(rig: &Rig, pages: &Pages, stream: Stream) {
    let len = 100_003;
    let memory = rig.driver.mem_host_alloc(2 * len).expect("page-locked memory");
    // SAFETY: the memory has that many bytes, zeroed, and no copy is pending.
    let bytes = unsafe { std::slice::from_raw_parts_mut(memory.as_ptr(), 2 * len) };
    assert!(bytes.iter().all(|&byte| byte == 0));
    let (source, target) = bytes.split_at_mut(len);
    pattern(source, 5);
    let at = pages.address.offset(5);
    let (from, into) = (source.as_ptr(), target.as_mut_ptr());
    // SAFETY: both halves stay as they are until the stream has been waited for.
    unsafe { rig.driver.memcpy_htod_async(at, from, len, stream) }.expect("a copy");
    // SAFETY: as above.
    unsafe { rig.driver.memcpy_dtoh_async(into, at, len, stream) }.expect("a copy");
    rig.driver.stream_synchronize(stream).expect("their end");
    assert_eq!(source, target);
    free_host(rig, memory);
}

/// Frees page-locked memory that nothing touches any more.
pub(crate) fn free_host(rig: &Rig, memory: NonNull<u8>) {
    // SAFETY: every caller allocated it from this driver and is done with it.
    unsafe { rig.driver.mem_free_host(memory) }.expect("freeing page-locked memory");
}

fn check_kernels(rig: &Rig) {
    let pages = rig.pages(2);
    let stream = rig.stream();
    let sum_at = pages.address;
    for (offset, len) in [(8, 8), (64, 1), (72, 1003), (rig.page - 16, 61), (8, 100_000)] {
        let at = pages.address.offset(offset);
        rig.memset(pages.address, 0xEE, 2 * rig.page, stream);
        let (target, bytes) = (at, len as u64);
        let write = KernelCall::Pattern { target, bytes, seed: offset, delay_nanos: 0 };
        rig.driver.launch_kernel(write, stream).expect("a launch");
        let expected = bytes_of(offset, len);
        let got = rig.read(at, len + 8, stream);
        assert_eq!(got[..len], expected, "pattern of {len} bytes at {offset}");
        assert_eq!(got[len..], [0xEE; 8], "pattern of {len} bytes at {offset} was more");

        rig.memset(sum_at, 0, 8, stream);
        for first_word in [0, 1 << 40] {
            let (source, target) = (at, sum_at);
            let sum = KernelCall::Checksum { source, bytes, first_word, delay_nanos: 0, target };
            rig.driver.launch_kernel(sum, stream).expect("a launch");
        }
        let sum = checksum(&expected, 0).wrapping_add(checksum(&expected, 1 << 40));
        let got = rig.read(sum_at, 8, stream);
        assert_eq!(got, sum.to_le_bytes(), "checksum of {len} bytes at {offset}");
    }
    rig.give_back(pages);
    rig.destroy(&[stream], &[]);
}

fn check_kernel_refusals(rig: &Rig) {
    let (pages, stream) = (rig.pages(1), rig.stream());
    let target = pages.address.offset(4);
    let call = KernelCall::Pattern { target, bytes: 8, seed: 0, delay_nanos: 0 };
    assert_code(rig.driver.launch_kernel(call, stream), DriverCode::INVALID_VALUE);
    rig.driver.stream_synchronize(stream).expect("nothing ran");
    rig.give_back(pages);
    rig.destroy(&[stream], &[]);
}

fn check_delayed_kernel(rig: &Rig) {
    let (pages, stream, event) = (rig.pages(1), rig.stream(), rig.event());
    rig.memset(pages.address, 0, 8, stream);
    let begun = Instant::now();
    rig.write_late(pages.address, 8, 100, stream);
    rig.driver.event_record(event, stream).expect("a record");
    assert!(!rig.is_ready(event));
    rig.wait(event);
    assert!(begun.elapsed() >= Duration::from_millis(99));
    assert_eq!(rig.read(pages.address, 8, stream), bytes_of(1, 8));
    rig.give_back(pages);
    rig.destroy(&[stream], &[event]);
}

fn check_mapping_does_not_wait(rig: &Rig) {
    let (pages, stream, event) = (rig.pages(1), rig.stream(), rig.event());
    rig.write_late(pages.address, 8, 300, stream);
    rig.driver.event_record(event, stream).expect("a record");
    let others = rig.pages(4);
    rig.give_back(others);
    rig.destroy(&[rig.stream()], &[rig.event()]);
    assert!(!rig.is_ready(event), "mapping and unmapping waited for a kernel");
    rig.wait(event);
    rig.give_back(pages);
    rig.destroy(&[stream], &[event]);
}

fn check_capture_state(rig: &Rig) {
    let stream = rig.stream();
    for stream in [stream, Stream::DEFAULT, Stream::LEGACY, Stream::PER_THREAD] {
        assert_eq!(rig.driver.stream_is_capturing(stream), Ok(CaptureState::None));
    }
    let exchange = |mode| rig.driver.thread_exchange_stream_capture_mode(mode);
    let before = exchange(CaptureMode::Relaxed).expect("the old mode");
    assert_eq!(exchange(CaptureMode::ThreadLocal), Ok(CaptureMode::Relaxed));
    assert_eq!(exchange(before), Ok(CaptureMode::ThreadLocal));
    assert!(rig.driver.graph_retain(stream, Box::new(|| ())).is_err());
    rig.destroy(&[stream], &[]);
}
