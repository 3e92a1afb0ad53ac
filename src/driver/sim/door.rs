//! The driver trait on a simulated device: each verb's gate, then the part that does it.
//!
//! The gate is the same everywhere: count the call, let an injected failure strike, refuse what a
//! capture forbids. Verbs that are one line stand here whole.
#![expect(unsafe_code, reason = "the trait's copies take raw pointers")]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::event::Timing;
use super::stream::{Point, Span, StreamKind, StreamState, Work};
use super::{Core, Sim, Verb};
use crate::driver::{
    CaptureMode, CaptureState, Context, DeviceAttribute, DeviceMemory, Driver, DriverCode,
    DriverResult, Event, FrameHandle, GraphRelease, HostNode, KernelCall,
};
use crate::units::{DeviceAddress, DeviceOrdinal, Stream};

impl Core {
    /// Enqueues work, or records it into the stream's capture; where it is when it was enqueued.
    fn submit(
        self: &Arc<Self>,
        stream: Stream,
        work: Work,
        verb: Verb,
    ) -> DriverResult<Option<(Arc<StreamState>, u64)>> {
        self.current(verb)?;
        let stream = self.stream(stream, verb)?;
        self.alive(stream.device, verb)?;
        if work.spans().any(|Span { address, bytes, .. }| address.checked_add(bytes).is_none()) {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        let Some(work) = self.capture_work(&stream, work, verb)? else { return Ok(None) };
        self.ensure_worker(&stream, verb)?;
        let number = {
            let _launch = self.launches.read();
            self.enqueue(&stream, work, None).0
        };
        self.drive();
        Ok(Some((stream, number)))
    }

    /// A copy, whose host side is `host`: asynchronous when that is page-locked.
    fn submit_copy(
        self: &Arc<Self>,
        stream: Stream,
        work: Work,
        (host, bytes): (u64, u64),
        verb: Verb,
    ) -> DriverResult<()> {
        if bytes == 0 {
            return self.stream(stream, verb).map(drop);
        }
        let written = verb == Verb::MemcpyDtohAsync && self.host.is_read_only(host, bytes);
        if self.host.is_cut(host, bytes) || written {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        let pageable = !self.host.contains(host, bytes);
        let Some((stream, number)) = self.submit(stream, work, verb)? else { return Ok(()) };
        if pageable {
            self.wait_for(&stream, number);
        } else {
            self.host.note_copy(Point { stream, number }, host..host + bytes);
        }
        Ok(())
    }

    fn launch(self: &Arc<Self>, call: KernelCall, stream: Stream) -> DriverResult<()> {
        let verb = Verb::LaunchKernel;
        let context = self.current(verb)?;
        if !context.module.load(std::sync::atomic::Ordering::Acquire) {
            return Err(verb.error(DriverCode::NOT_FOUND));
        }
        let work = Work::Kernel(call);
        if work.spans().any(|span| !span.address.is_multiple_of(8)) {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        self.submit(stream, work, verb).map(drop)
    }

    fn gate_unsafe(&self, verb: Verb) -> DriverResult<()> {
        self.enter(verb)?;
        self.unsafe_call(verb)
    }

    fn destroy_stream(&self, handle: Stream) -> DriverResult<()> {
        let verb = Verb::StreamDestroy;
        let stream = self.streams.remove(handle.0);
        let stream = stream.ok_or_else(|| verb.error(DriverCode::INVALID_HANDLE))?;
        if let Some(capture) = &*stream.capture.lock() {
            capture.invalidate();
        }
        stream.close();
        Ok(())
    }

    /// The stream, for a call that asks for the end of its work: not one that is being captured.
    fn running(&self, stream: Stream, verb: Verb) -> DriverResult<Arc<StreamState>> {
        self.current(verb)?;
        let stream = self.stream(stream, verb)?;
        self.alive(stream.device, verb)?;
        if let Some(capture) = self.capture_of(&stream, verb)? {
            capture.invalidate();
            return Err(verb.error(DriverCode::STREAM_CAPTURE_UNSUPPORTED));
        }
        Ok(stream)
    }

    fn stream_synchronize(&self, stream: Stream) -> DriverResult<()> {
        let verb = Verb::StreamSynchronize;
        let stream = self.running(stream, verb)?;
        self.synchronize(&stream);
        self.alive(stream.device, verb)
    }

    fn stream_query(&self, stream: Stream) -> DriverResult<()> {
        let verb = Verb::StreamQuery;
        let stream = self.running(stream, verb)?;
        self.drive();
        if !self.is_done(&stream) {
            return Err(verb.error(DriverCode::NOT_READY));
        }
        self.alive(stream.device, verb)
    }

    fn mem_get_info(&self) -> DriverResult<DeviceMemory> {
        let context = self.current(Verb::MemGetInfo)?;
        self.alive(context.device, Verb::MemGetInfo)?;
        let device = &self.devices[context.device];
        let mut free_bytes = device.free_bytes();
        if self.options.jitter > 0 {
            let short = self.random.lock().below(self.options.jitter + 1);
            free_bytes = free_bytes.saturating_sub(short);
        }
        Ok(DeviceMemory { free_bytes, total_bytes: device.capacity })
    }
}

impl Driver for Sim {
    fn description(&self) -> String {
        format!("sim:{}", self.core.options)
    }

    fn version(&self) -> DriverResult<i32> {
        self.core.enter(Verb::Version)?;
        Ok(if self.core.options.ctx_event { 13_000 } else { 12_040 })
    }

    fn device_get_count(&self) -> DriverResult<u32> {
        self.core.enter(Verb::DeviceGetCount)?;
        Ok(self.core.options.devices)
    }

    fn device_get_name(&self, device: DeviceOrdinal) -> DriverResult<String> {
        self.core.enter(Verb::DeviceGetName)?;
        self.core.device_index(device, Verb::DeviceGetName)?;
        Ok(format!("simulated device {device}"))
    }

    fn device_total_mem(&self, device: DeviceOrdinal) -> DriverResult<u64> {
        self.core.enter(Verb::DeviceTotalMem)?;
        let index = self.core.device_index(device, Verb::DeviceTotalMem)?;
        Ok(self.core.devices[index].capacity)
    }

    fn device_get_attribute(
        &self,
        device: DeviceOrdinal,
        attribute: DeviceAttribute,
    ) -> DriverResult<i32> {
        self.core.enter(Verb::DeviceGetAttribute)?;
        self.core.device_index(device, Verb::DeviceGetAttribute)?;
        Ok(match attribute {
            DeviceAttribute::Integrated | DeviceAttribute::ComputeMode => 0,
            DeviceAttribute::PciBusId
            | DeviceAttribute::PciDeviceId
            | DeviceAttribute::PciDomainId => {
                return Err(Verb::DeviceGetAttribute.error(DriverCode::INVALID_VALUE));
            }
            DeviceAttribute::ComputeCapabilityMajor => 9,
            DeviceAttribute::ComputeCapabilityMinor => 0,
            DeviceAttribute::VirtualMemoryManagementSupported => i32::from(self.core.options.vmm),
            DeviceAttribute::ReadOnlyHostRegisterSupported => {
                i32::from(self.core.options.read_only)
            }
            DeviceAttribute::HostNumaId => 0,
            DeviceAttribute::HostNumaVirtualMemoryManagementSupported => {
                i32::from(self.core.options.vmm && self.core.options.host_vmm)
            }
        })
    }

    fn device_can_access_peer(
        &self,
        device: DeviceOrdinal,
        peer: DeviceOrdinal,
    ) -> DriverResult<bool> {
        let verb = Verb::DeviceCanAccessPeer;
        self.core.enter(verb)?;
        let (device, peer) =
            (self.core.device_index(device, verb)?, self.core.device_index(peer, verb)?);
        Ok(self.core.options.peers && device != peer)
    }

    fn device_primary_ctx_retain(&self, device: DeviceOrdinal) -> DriverResult<Context> {
        self.core.enter(Verb::DevicePrimaryCtxRetain)?;
        self.core.primary_retain(device)
    }

    fn device_primary_ctx_release(&self, device: DeviceOrdinal) -> DriverResult<()> {
        self.core.enter(Verb::DevicePrimaryCtxRelease)?;
        self.core.primary_release(device)
    }

    fn ctx_get_current(&self) -> DriverResult<Option<Context>> {
        self.core.enter(Verb::CtxGetCurrent)?;
        let handle = self.core.current_handle();
        Ok((handle != 0).then_some(Context(handle)))
    }

    fn ctx_set_current(&self, context: Option<Context>) -> DriverResult<()> {
        self.core.enter(Verb::CtxSetCurrent)?;
        self.core.ctx_set_current(context)
    }

    fn ctx_synchronize(&self) -> DriverResult<()> {
        let verb = Verb::CtxSynchronize;
        self.core.enter(verb)?;
        let context = self.core.current(verb)?;
        self.core.alive(context.device, verb)?;
        self.core.conflicting_call(verb, context.handle)?;
        self.core.synchronize_context(context.handle);
        self.core.alive(context.device, verb)
    }

    fn ctx_record_event(&self, context: Context, event: Event) -> DriverResult<()> {
        self.core.enter(Verb::CtxRecordEvent)?;
        self.core.ctx_record_event(context, event)
    }

    fn mem_get_info(&self) -> DriverResult<DeviceMemory> {
        self.core.enter(Verb::MemGetInfo)?;
        self.core.mem_get_info()
    }

    fn mem_get_allocation_granularity(&self, device: DeviceOrdinal) -> DriverResult<u64> {
        let verb = Verb::MemGetAllocationGranularity;
        self.core.enter(verb)?;
        self.core.device_index(device, verb)?;
        if !self.core.options.vmm {
            return Err(verb.error(DriverCode::NOT_SUPPORTED));
        }
        Ok(self.core.options.granularity)
    }

    fn mem_address_reserve(&self, bytes: u64, alignment: u64) -> DriverResult<DeviceAddress> {
        self.core.gate_unsafe(Verb::MemAddressReserve)?;
        self.core.mem_address_reserve(bytes, alignment).map(DeviceAddress)
    }

    fn mem_address_free(&self, address: DeviceAddress, bytes: u64) -> DriverResult<()> {
        self.core.gate_unsafe(Verb::MemAddressFree)?;
        self.core.mem_address_free(address, bytes)
    }

    fn mem_create(&self, device: DeviceOrdinal, bytes: u64) -> DriverResult<FrameHandle> {
        self.core.gate_unsafe(Verb::MemCreate)?;
        self.core.mem_create(device, bytes)
    }

    fn mem_create_host(&self, node: HostNode, bytes: u64) -> DriverResult<FrameHandle> {
        self.core.gate_unsafe(Verb::MemCreateHost)?;
        self.core.mem_create_host(node, bytes)
    }

    fn mem_release(&self, frame: FrameHandle) -> DriverResult<()> {
        self.core.gate_unsafe(Verb::MemRelease)?;
        self.core.mem_release(frame)
    }

    fn mem_map(&self, address: DeviceAddress, bytes: u64, frame: FrameHandle) -> DriverResult<()> {
        self.core.gate_unsafe(Verb::MemMap)?;
        self.core.mem_map(address, bytes, frame)
    }

    fn mem_set_access(
        &self,
        address: DeviceAddress,
        bytes: u64,
        devices: &[DeviceOrdinal],
    ) -> DriverResult<()> {
        self.core.gate_unsafe(Verb::MemSetAccess)?;
        self.core.mem_set_access(address, bytes, devices)
    }

    fn mem_unmap(&self, address: DeviceAddress, bytes: u64) -> DriverResult<()> {
        self.core.gate_unsafe(Verb::MemUnmap)?;
        self.core.mem_unmap(address, bytes)
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<DeviceAddress> {
        self.core.gate_unsafe(Verb::MemAlloc)?;
        self.core.mem_alloc(bytes)
    }

    fn mem_free(&self, address: DeviceAddress) -> DriverResult<()> {
        self.core.gate_unsafe(Verb::MemFree)?;
        self.core.mem_free(address)
    }

    fn mem_host_alloc(&self, bytes: usize) -> DriverResult<NonNull<u8>> {
        self.core.gate_unsafe(Verb::MemHostAlloc)?;
        self.core.mem_host_alloc(bytes)
    }

    unsafe fn mem_free_host(&self, memory: NonNull<u8>) -> DriverResult<()> {
        self.core.gate_unsafe(Verb::MemFreeHost)?;
        self.core.mem_free_host(memory)
    }

    unsafe fn mem_host_register(&self, memory: NonNull<u8>, bytes: usize) -> DriverResult<()> {
        self.core.gate_unsafe(Verb::MemHostRegister)?;
        self.core.mem_host_register(memory, bytes)
    }

    unsafe fn mem_host_register_read_only(
        &self,
        memory: NonNull<u8>,
        bytes: usize,
    ) -> DriverResult<()> {
        self.core.gate_unsafe(Verb::MemHostRegisterReadOnly)?;
        self.core.mem_host_register_read_only(memory, bytes)
    }

    fn mem_host_unregister(&self, memory: NonNull<u8>) -> DriverResult<()> {
        self.core.gate_unsafe(Verb::MemHostUnregister)?;
        self.core.mem_host_unregister(memory)
    }

    fn pointer_get_host_range(&self, address: u64) -> DriverResult<Option<Range<u64>>> {
        self.core.enter(Verb::PointerGetHostRange)?;
        Ok(self.core.host.range_at(address))
    }

    unsafe fn memcpy_htod_async(
        &self,
        target: DeviceAddress,
        source: *const u8,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()> {
        let verb = Verb::MemcpyHtodAsync;
        self.core.enter(verb)?;
        let (source, bytes) = (source.expose_provenance() as u64, bytes as u64);
        let work = Work::CopyIn { target: target.0, source, bytes };
        self.core.submit_copy(stream, work, (source, bytes), verb)
    }

    unsafe fn memcpy_dtoh_async(
        &self,
        target: *mut u8,
        source: DeviceAddress,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()> {
        let verb = Verb::MemcpyDtohAsync;
        self.core.enter(verb)?;
        let (target, bytes) = (target.expose_provenance() as u64, bytes as u64);
        let work = Work::CopyOut { target, source: source.0, bytes };
        self.core.submit_copy(stream, work, (target, bytes), verb)
    }

    fn memset_d8_async(
        &self,
        target: DeviceAddress,
        value: u8,
        bytes: u64,
        stream: Stream,
    ) -> DriverResult<()> {
        self.core.enter(Verb::MemsetD8Async)?;
        let work = Work::Fill { target: target.0, value, bytes };
        self.core.submit(stream, work, Verb::MemsetD8Async).map(drop)
    }

    fn stream_create(&self) -> DriverResult<Stream> {
        self.core.enter(Verb::StreamCreate)?;
        self.core.stream_create(StreamKind::NonBlocking, Verb::StreamCreate)
    }

    fn stream_destroy(&self, stream: Stream) -> DriverResult<()> {
        self.core.enter(Verb::StreamDestroy)?;
        self.core.destroy_stream(stream)
    }

    fn stream_synchronize(&self, stream: Stream) -> DriverResult<()> {
        self.core.gate_unsafe(Verb::StreamSynchronize)?;
        self.core.stream_synchronize(stream)
    }

    fn stream_query(&self, stream: Stream) -> DriverResult<()> {
        self.core.gate_unsafe(Verb::StreamQuery)?;
        self.core.stream_query(stream)
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> DriverResult<()> {
        self.core.enter(Verb::StreamWaitEvent)?;
        self.core.stream_wait_event(stream, event)
    }

    fn stream_get_id(&self, stream: Stream) -> DriverResult<u64> {
        let verb = Verb::StreamGetId;
        self.core.enter(verb)?;
        let id = |stream: &Arc<StreamState>| match self.core.capture_of(stream, verb)? {
            None => Ok(stream.id),
            // As the driver does: it refuses, and the capture is broken.
            Some(capture) => {
                capture.invalidate();
                Err(verb.error(DriverCode::STREAM_CAPTURE_UNSUPPORTED))
            }
        };
        if stream.is_implicit() {
            return id(&self.core.stream(stream, verb)?);
        }
        let found = self.core.streams.with(stream.0, id);
        found.unwrap_or_else(|| Err(verb.error(DriverCode::INVALID_HANDLE)))
    }

    fn stream_get_context(&self, stream: Stream) -> DriverResult<Context> {
        let verb = Verb::StreamGetContext;
        self.core.enter(verb)?;
        let stream = self.core.running(stream, verb)?;
        Ok(Context(stream.context))
    }

    fn stream_is_capturing(&self, stream: Stream) -> DriverResult<CaptureState> {
        self.core.enter(Verb::StreamIsCapturing)?;
        self.core.stream_is_capturing(stream)
    }

    fn thread_exchange_stream_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        self.core.enter(Verb::ThreadExchangeStreamCaptureMode)?;
        Ok(self.core.exchange_capture_mode(mode))
    }

    fn graph_retain(&self, stream: Stream, release: GraphRelease) -> DriverResult<()> {
        self.core.enter(Verb::GraphRetain)?;
        self.core.graph_retain(stream, release)
    }

    fn event_create(&self) -> DriverResult<Event> {
        self.core.enter(Verb::EventCreate)?;
        self.core.event_create(Timing::Off, Verb::EventCreate)
    }

    fn event_create_timed(&self) -> DriverResult<Event> {
        self.core.enter(Verb::EventCreateTimed)?;
        self.core.event_create(Timing::On, Verb::EventCreateTimed)
    }

    fn event_elapsed(&self, start: Event, end: Event) -> DriverResult<Duration> {
        self.core.gate_unsafe(Verb::EventElapsed)?;
        self.core.event_elapsed(start, end)
    }

    fn event_destroy(&self, event: Event) -> DriverResult<()> {
        self.core.enter(Verb::EventDestroy)?;
        self.core.event_destroy(event)
    }

    fn event_record(&self, event: Event, stream: Stream) -> DriverResult<()> {
        self.core.enter(Verb::EventRecord)?;
        self.core.event_record(event, stream)
    }

    fn event_query(&self, event: Event) -> DriverResult<()> {
        self.core.gate_unsafe(Verb::EventQuery)?;
        self.core.event_query(event)
    }

    fn module_load(&self) -> DriverResult<()> {
        let verb = Verb::ModuleLoad;
        self.core.gate_unsafe(verb)?;
        let context = self.core.current(verb)?;
        self.core.alive(context.device, verb)?;
        if !context.module.load(std::sync::atomic::Ordering::Acquire) {
            self.core.wait_for_device(Some(context.handle));
            context.module.store(true, std::sync::atomic::Ordering::Release);
        }
        Ok(())
    }

    fn launch_kernel(&self, call: KernelCall, stream: Stream) -> DriverResult<()> {
        self.core.enter(Verb::LaunchKernel)?;
        self.core.launch(call, stream)
    }
}
