//! A device for models: streams whose work is done when the model says so, and nothing else.
//!
//! Everything is under one lock of loom's, so that the order of a model's calls is loom's to
//! choose, and so is the moment at which the device gets on ([`Modelled::get_on`]). A verb that no
//! model needs fails.

#![expect(unsafe_code, reason = "the door has unsafe verbs, which all fail here")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::{
    CaptureMode, CaptureState, Context, DeviceAttribute, DeviceMemory, Driver, DriverCode,
    DriverError, DriverResult, Event, FrameHandle, GraphRelease, HostNode, KernelCall,
};
use crate::sync::Mutex;
use crate::units::{DeviceAddress, DeviceOrdinal, KIB, MIB, Stream};

/// The only context.
pub(crate) const CONTEXT: Context = Context(1);
const MEMORY: u64 = 64 * MIB;

/// See the module's text.
pub(crate) struct Modelled {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    streams: BTreeMap<usize, Work>,
    /// The records that events hold.
    events: BTreeMap<usize, Point>,
    last_number: u64,
}

/// A stream, and how many of its operations.
#[derive(Clone, Copy)]
struct Point {
    stream: usize,
    count: usize,
}

#[derive(Default)]
struct Work {
    /// What each operation waits for.
    enqueued: Vec<Option<Point>>,
    done: usize,
}

fn missing() -> DriverError {
    DriverError::new("a verb that no model needs", DriverCode::NOT_SUPPORTED)
}

impl Modelled {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::default() })
    }

    /// Enqueues work. Returns its number on the stream, from 1.
    pub(crate) fn launch(&self, stream: Stream) -> usize {
        let mut state = self.state.lock();
        let work = state.streams.entry(stream.0).or_default();
        work.enqueued.push(None);
        work.enqueued.len()
    }

    /// Whether work is done.
    pub(crate) fn is_done(&self, stream: Stream, number: usize) -> bool {
        self.state.lock().done(stream.0) >= number
    }

    /// The device does all that is enqueued on a stream, up to a wait for what is not done.
    pub(crate) fn get_on(&self, stream: Stream) {
        let mut state = self.state.lock();
        let Some(work) = state.streams.get(&stream.0) else { return };
        let ready = |wait: &&Option<Point>| {
            wait.is_none_or(|point| state.done(point.stream) >= point.count)
        };
        let done = work.done + work.enqueued[work.done..].iter().take_while(ready).count();
        state.streams.entry(stream.0).or_default().done = done;
    }

    /// The first of `count` numbers that nothing else has.
    fn number(&self, count: u64) -> u64 {
        let mut state = self.state.lock();
        let first = state.last_number + count;
        state.last_number = first + count;
        first
    }

    fn record(&self, event: Event, stream: Stream) {
        let mut state = self.state.lock();
        let count = state.streams.get(&stream.0).map_or(0, |work| work.enqueued.len());
        state.events.insert(event.0, Point { stream: stream.0, count });
    }

    fn enqueue_wait(&self, stream: Stream, event: Event) {
        let mut state = self.state.lock();
        let point = state.events.get(&event.0).copied();
        state.streams.entry(stream.0).or_default().enqueued.push(point);
    }

    fn has_passed(&self, event: Event) -> bool {
        let state = self.state.lock();
        let point = state.events.get(&event.0);
        point.is_none_or(|point| state.done(point.stream) >= point.count)
    }
}

impl State {
    fn done(&self, stream: usize) -> usize {
        self.streams.get(&stream).map_or(0, |work| work.done)
    }
}

impl Driver for Modelled {
    fn description(&self) -> String {
        "a model's device".to_owned()
    }

    fn version(&self) -> DriverResult<i32> {
        Ok(13000)
    }

    fn device_get_count(&self) -> DriverResult<u32> {
        Ok(1)
    }

    fn device_get_name(&self, _: DeviceOrdinal) -> DriverResult<String> {
        Err(missing())
    }

    fn device_total_mem(&self, _: DeviceOrdinal) -> DriverResult<u64> {
        Ok(MEMORY)
    }

    fn device_get_attribute(
        &self,
        _: DeviceOrdinal,
        attribute: DeviceAttribute,
    ) -> DriverResult<i32> {
        Ok(i32::from(attribute == DeviceAttribute::VirtualMemoryManagementSupported))
    }

    fn device_can_access_peer(&self, _: DeviceOrdinal, _: DeviceOrdinal) -> DriverResult<bool> {
        Err(missing())
    }

    fn device_primary_ctx_retain(&self, _: DeviceOrdinal) -> DriverResult<Context> {
        Ok(CONTEXT)
    }

    fn device_primary_ctx_release(&self, _: DeviceOrdinal) -> DriverResult<()> {
        Ok(())
    }

    fn ctx_get_current(&self) -> DriverResult<Option<Context>> {
        Ok(Some(CONTEXT))
    }

    fn ctx_set_current(&self, _: Option<Context>) -> DriverResult<()> {
        Ok(())
    }

    fn ctx_synchronize(&self) -> DriverResult<()> {
        Err(missing())
    }

    fn ctx_record_event(&self, _: Context, _: Event) -> DriverResult<()> {
        Err(missing())
    }

    fn mem_get_info(&self) -> DriverResult<DeviceMemory> {
        Ok(DeviceMemory { free_bytes: MEMORY, total_bytes: MEMORY })
    }

    fn mem_get_allocation_granularity(&self, _: DeviceOrdinal) -> DriverResult<u64> {
        Ok(64 * KIB)
    }

    fn mem_address_reserve(&self, bytes: u64, _: u64) -> DriverResult<DeviceAddress> {
        Ok(DeviceAddress(self.number(bytes)))
    }

    fn mem_address_free(&self, _: DeviceAddress, _: u64) -> DriverResult<()> {
        Ok(())
    }

    fn mem_create(&self, _: DeviceOrdinal, _: u64) -> DriverResult<FrameHandle> {
        Ok(FrameHandle(self.number(1)))
    }

    fn mem_create_host(&self, _: HostNode, _: u64) -> DriverResult<FrameHandle> {
        Err(missing())
    }

    fn mem_release(&self, _: FrameHandle) -> DriverResult<()> {
        Ok(())
    }

    fn mem_map(&self, _: DeviceAddress, _: u64, _: FrameHandle) -> DriverResult<()> {
        Ok(())
    }

    fn mem_set_access(&self, _: DeviceAddress, _: u64, _: &[DeviceOrdinal]) -> DriverResult<()> {
        Ok(())
    }

    fn mem_unmap(&self, _: DeviceAddress, _: u64) -> DriverResult<()> {
        Ok(())
    }

    fn mem_alloc(&self, _: u64) -> DriverResult<DeviceAddress> {
        Err(missing())
    }

    fn mem_free(&self, _: DeviceAddress) -> DriverResult<()> {
        Err(missing())
    }

    fn mem_host_alloc(&self, _: usize) -> DriverResult<NonNull<u8>> {
        Err(missing())
    }

    unsafe fn mem_free_host(&self, _: NonNull<u8>) -> DriverResult<()> {
        Err(missing())
    }

    unsafe fn mem_host_register(&self, _: NonNull<u8>, _: usize) -> DriverResult<()> {
        Err(missing())
    }

    unsafe fn mem_host_register_read_only(&self, _: NonNull<u8>, _: usize) -> DriverResult<()> {
        Err(missing())
    }

    fn mem_host_unregister(&self, _: NonNull<u8>) -> DriverResult<()> {
        Err(missing())
    }

    fn pointer_get_host_range(&self, _: u64) -> DriverResult<Option<Range<u64>>> {
        Err(missing())
    }

    unsafe fn memcpy_htod_async(
        &self,
        _: DeviceAddress,
        _: *const u8,
        _: usize,
        _: Stream,
    ) -> DriverResult<()> {
        Err(missing())
    }

    unsafe fn memcpy_dtoh_async(
        &self,
        _: *mut u8,
        _: DeviceAddress,
        _: usize,
        _: Stream,
    ) -> DriverResult<()> {
        Err(missing())
    }

    fn memset_d8_async(&self, _: DeviceAddress, _: u8, _: u64, _: Stream) -> DriverResult<()> {
        Err(missing())
    }

    fn stream_create(&self) -> DriverResult<Stream> {
        Ok(Stream(self.number(1) as usize))
    }

    fn stream_destroy(&self, _: Stream) -> DriverResult<()> {
        Ok(())
    }

    fn stream_synchronize(&self, _: Stream) -> DriverResult<()> {
        Err(missing())
    }

    fn stream_query(&self, _: Stream) -> DriverResult<()> {
        Err(missing())
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> DriverResult<()> {
        self.enqueue_wait(stream, event);
        Ok(())
    }

    fn stream_get_id(&self, stream: Stream) -> DriverResult<u64> {
        Ok(stream.0 as u64)
    }

    fn stream_get_context(&self, _: Stream) -> DriverResult<Context> {
        Ok(CONTEXT)
    }

    fn stream_is_capturing(&self, _: Stream) -> DriverResult<CaptureState> {
        Ok(CaptureState::None)
    }

    fn thread_exchange_stream_capture_mode(&self, _: CaptureMode) -> DriverResult<CaptureMode> {
        Ok(CaptureMode::Global)
    }

    fn graph_retain(&self, _: Stream, _: GraphRelease) -> DriverResult<()> {
        Err(missing())
    }

    fn event_create(&self) -> DriverResult<Event> {
        Ok(Event(self.number(1) as usize))
    }

    fn event_create_timed(&self) -> DriverResult<Event> {
        Err(missing())
    }

    fn event_elapsed(&self, _: Event, _: Event) -> DriverResult<Duration> {
        Err(missing())
    }

    fn event_destroy(&self, _: Event) -> DriverResult<()> {
        Ok(())
    }

    fn event_record(&self, event: Event, stream: Stream) -> DriverResult<()> {
        self.record(event, stream);
        Ok(())
    }

    fn event_query(&self, event: Event) -> DriverResult<()> {
        match self.has_passed(event) {
            true => Ok(()),
            false => Err(DriverError::new("cuEventQuery", DriverCode::NOT_READY)),
        }
    }

    fn module_load(&self) -> DriverResult<()> {
        Err(missing())
    }

    fn launch_kernel(&self, _: KernelCall, _: Stream) -> DriverResult<()> {
        Err(missing())
    }
}
