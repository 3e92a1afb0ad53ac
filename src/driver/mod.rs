//! The door to the device: one trait, two implementations, one contract.
//!
//! Nothing outside this folder names a CUDA symbol. [`cuda`] calls `libcuda.so.1`, opened at run
//! time; [`sim`] is a simulated device in host memory. Both keep the contract below; the suite in
//! `tests/` is run on both.
//!
//! # Contract
//!
//! * A verb is the driver call it is named after: `mem_map` is `cuMemMap`. Verbs are thread-safe.
//!   A verb that fails has changed nothing, unless its code is sticky.
//! * **Contexts are per thread.** Verbs whose documentation says *current context* act on the
//!   calling thread's one and return `INVALID_CONTEXT` without one. Address space, handles and
//!   mappings belong to the process; streams and events to the context they were created in.
//! * **Mapping is explicit.** A handle is mapped whole, at page boundaries, into reserved and
//!   unmapped addresses; it has no access until `mem_set_access`. Unmapping names exactly mapped
//!   ranges. A handle may be mapped at several addresses. Memory of a released handle lives until
//!   its last mapping goes, also when the two happen at once on two threads. A reservation with
//!   live mappings cannot be freed. None of these calls waits for the device: the caller knows
//!   that no pending work uses what it unmaps.
//! * **Streams run in order and apart.** Work on one stream runs in the order of its enqueuing;
//!   work on two is unordered, except through `stream_wait_event` and the legacy default stream,
//!   which waits for, and is waited for by, all blocking streams of its context (those made here
//!   are non-blocking).
//! * **An event holds its latest record.** `stream_wait_event` takes the record that exists at the
//!   call; an event that was never recorded makes nothing wait, and a query of it succeeds.
//!   `event_query` returns success, `NOT_READY`, or a code that says nothing about progress.
//!   `ctx_record_event` records everything that was enqueued in a context by then, on every stream,
//!   destroyed ones and default streams too; the call itself waits for nothing and stops nobody's
//!   launches. Older drivers do not have it.
//! * **Errors surface late.** An illegal access on the device is returned by some later call, is
//!   sticky, and belongs to whoever enqueued it, not to the call that returns it.
//! * **Capture.** On a capturing stream nothing runs; `event_query` and `event_record` of others
//!   may be refused with codes 900 to 908 unless the thread is in relaxed capture mode.
//! * Calls that wait for the whole device, and stop launches meanwhile: `mem_free`,
//!   `mem_free_host`, `mem_host_unregister`, `module_load`, `ctx_synchronize`. `mem_host_alloc` and
//!   `mem_host_register` wait for nothing, and stop launches for as long as they take.

use std::ops::Range;
use std::ptr::NonNull;
use std::time::Duration;

use crate::units::{DeviceAddress, DeviceOrdinal, Stream};

pub use crate::units::Context;

pub mod code;
#[cfg(not(vbar_loom))]
pub mod cuda;
pub mod kernel;
#[cfg(all(test, vbar_loom))]
pub(crate) mod modelled;
#[cfg(not(vbar_loom))]
pub mod select;
#[cfg(not(vbar_loom))]
pub mod sim;
#[cfg(not(vbar_loom))]
pub mod sys;

pub use code::{DriverCode, DriverError};
pub use kernel::KernelCall;

/// Result of a driver call.
pub type DriverResult<T> = Result<T, DriverError>;

/// A NUMA node of the host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct HostNode(pub u32);

/// One unit of physical memory, of a device unless told otherwise, as
/// `CUmemGenericAllocationHandle`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FrameHandle(pub u64);

/// An event, as `CUevent`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Event(pub usize);

/// Free and total memory of a device, in bytes, as `cuMemGetInfo` tells them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceMemory {
    /// What the driver says is free, other processes' use taken off. It jitters.
    pub free_bytes: u64,
    /// The whole device.
    pub total_bytes: u64,
}

/// Attributes of a device that the library asks for, with `CUdevice_attribute`'s numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub enum DeviceAttribute {
    /// Whether the device has no memory of its own and uses the machine's: 1 or 0.
    Integrated = 18,
    /// `CUcomputemode`: 0 any number of contexts, 2 none, 3 those of one process.
    ComputeMode = 20,
    /// Bus of the device's place in the machine. A simulated device has no place: `INVALID_VALUE`,
    /// as for the other two.
    PciBusId = 33,
    /// Number of the device on its bus.
    PciDeviceId = 34,
    /// Domain of the device's place in the machine.
    PciDomainId = 50,
    /// Major compute capability.
    ComputeCapabilityMajor = 75,
    /// Minor compute capability.
    ComputeCapabilityMinor = 76,
    /// Whether reservations, handles and mappings work at all: 1 or 0.
    VirtualMemoryManagementSupported = 102,
    /// Whether read-only host memory can be registered: 1 or 0.
    ReadOnlyHostRegisterSupported = 113,
    /// NUMA node of the host that is nearest to the device; -1 where the host has none.
    HostNumaId = 134,
    /// Whether [`Driver::mem_create_host`] and mappings of its handles work: 1 or 0; since CUDA
    /// 12.9.
    HostNumaVirtualMemoryManagementSupported = 141,
}

/// Whether a stream is being captured into a graph.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CaptureState {
    /// Work on the stream runs.
    None,
    /// Work on the stream is recorded into a graph.
    Active,
    /// The capture was broken and must be ended.
    Invalidated,
    /// The legacy default stream while another stream of its context is captured in a mode that
    /// forbids it (`CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`).
    Implicit,
}

/// How the calling thread's calls treat captures of other threads, `CUstreamCaptureMode`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub enum CaptureMode {
    /// Potentially unsafe calls are refused while any thread captures.
    Global = 0,
    /// Potentially unsafe calls are refused while this thread captures.
    ThreadLocal = 1,
    /// Nothing is refused.
    Relaxed = 2,
}

/// Called once when the last graph that retained it is destroyed, on a driver thread that may call
/// no driver verb.
pub type GraphRelease = Box<dyn FnOnce() + Send>;

/// The driver verbs that the library uses. See the module's contract.
///
/// Every verb may return any code; its documentation names those with a meaning of their own.
pub trait Driver: Send + Sync + 'static {
    /// `cuda` or `sim`, then what identifies this instance: `cuda 13.0`, `sim:capacity=8G,seed=7`.
    fn description(&self) -> String;
    /// `cuDriverGetVersion`: 1000 x major + 10 x minor.
    fn version(&self) -> DriverResult<i32>;

    /// `cuDeviceGetCount`.
    fn device_get_count(&self) -> DriverResult<u32>;
    /// `cuDeviceGetName`. `INVALID_DEVICE` for an ordinal out of range, here and below.
    fn device_get_name(&self, device: DeviceOrdinal) -> DriverResult<String>;
    /// `cuDeviceTotalMem`, in bytes.
    fn device_total_mem(&self, device: DeviceOrdinal) -> DriverResult<u64>;
    /// `cuDeviceGetAttribute`. A driver that does not know the attribute returns `INVALID_VALUE`.
    fn device_get_attribute(
        &self,
        device: DeviceOrdinal,
        attribute: DeviceAttribute,
    ) -> DriverResult<i32>;

    /// `cuDeviceCanAccessPeer`: whether `device` can reach the memory of `peer`; no device is
    /// its own peer.
    fn device_can_access_peer(
        &self,
        device: DeviceOrdinal,
        peer: DeviceOrdinal,
    ) -> DriverResult<bool>;
    /// `cuDevicePrimaryCtxRetain`: the primary context, created if need be, its count one up.
    fn device_primary_ctx_retain(&self, device: DeviceOrdinal) -> DriverResult<Context>;
    /// `cuDevicePrimaryCtxRelease`.
    fn device_primary_ctx_release(&self, device: DeviceOrdinal) -> DriverResult<()>;
    /// `cuCtxGetCurrent` of the calling thread.
    fn ctx_get_current(&self) -> DriverResult<Option<Context>>;
    /// `cuCtxSetCurrent` of the calling thread.
    fn ctx_set_current(&self, context: Option<Context>) -> DriverResult<()>;
    /// `cuCtxSynchronize`: waits for all work of the current context.
    fn ctx_synchronize(&self) -> DriverResult<()>;
    /// `cuCtxRecordEvent` (CUDA 12.5): `event`, made in `context`, holds all work of `context` up
    /// to now, for a primary context that of its green contexts too. `INVALID_HANDLE` for an event
    /// of another context, `NOT_SUPPORTED` where the driver does not have the call. While a stream
    /// of the context is captured `STREAM_CAPTURE_UNSUPPORTED`, whatever the thread's capture
    /// mode, and the captures are broken: who may meet one does not call.
    fn ctx_record_event(&self, context: Context, event: Event) -> DriverResult<()>;

    /// `cuMemGetInfo` of the current context's device.
    fn mem_get_info(&self) -> DriverResult<DeviceMemory>;
    /// `cuMemGetAllocationGranularity`, the minimum, in bytes.
    fn mem_get_allocation_granularity(&self, device: DeviceOrdinal) -> DriverResult<u64>;
    /// `cuMemAddressReserve` of `bytes`, a multiple of the granularity, aligned to `alignment`
    /// (0 for the driver's choice). `OUT_OF_MEMORY` when address space is short.
    fn mem_address_reserve(&self, bytes: u64, alignment: u64) -> DriverResult<DeviceAddress>;
    /// `cuMemAddressFree` of a whole reservation with nothing mapped in it.
    fn mem_address_free(&self, address: DeviceAddress, bytes: u64) -> DriverResult<()>;
    /// `cuMemCreate` of `bytes` on `device`, not shareable, bytes undefined.
    fn mem_create(&self, device: DeviceOrdinal, bytes: u64) -> DriverResult<FrameHandle>;
    /// `cuMemCreate` of `bytes` of page-locked host memory on a NUMA node of the host, to be mapped
    /// as device memory is: a device with access reads and writes it over the link. Zeroed by the
    /// operating system. A device without the attribute refuses it.
    fn mem_create_host(&self, node: HostNode, bytes: u64) -> DriverResult<FrameHandle>;
    /// `cuMemRelease`.
    fn mem_release(&self, frame: FrameHandle) -> DriverResult<()>;
    /// `cuMemMap` of a whole handle at `address`.
    fn mem_map(&self, address: DeviceAddress, bytes: u64, frame: FrameHandle) -> DriverResult<()>;
    /// `cuMemSetAccess`, read and write, for each of `devices`, over mapped addresses.
    fn mem_set_access(
        &self,
        address: DeviceAddress,
        bytes: u64,
        devices: &[DeviceOrdinal],
    ) -> DriverResult<()>;
    /// `cuMemUnmap` of one or more whole mappings.
    fn mem_unmap(&self, address: DeviceAddress, bytes: u64) -> DriverResult<()>;

    /// `cuMemAlloc`: `bytes` of device memory of the current context at an address of its own, for
    /// devices without virtual memory management. `OUT_OF_MEMORY`.
    fn mem_alloc(&self, bytes: u64) -> DriverResult<DeviceAddress>;
    /// `cuMemFree` of what `mem_alloc` gave. Waits for the device, which promises no order: the
    /// caller knows that no pending work uses the memory.
    fn mem_free(&self, address: DeviceAddress) -> DriverResult<()>;

    /// `cuMemHostAlloc`, portable: page-locked memory, readable by every device. Zeroed by the
    /// operating system, OS-page aligned.
    fn mem_host_alloc(&self, bytes: usize) -> DriverResult<NonNull<u8>>;
    /// `cuMemFreeHost`. Waits for the device.
    ///
    /// # Safety
    /// `memory` came from `mem_host_alloc` of this driver, is freed once, and nothing in the
    /// process touches it afterwards.
    #[expect(unsafe_code, reason = "the driver reads or frees host memory behind a raw pointer")]
    unsafe fn mem_free_host(&self, memory: NonNull<u8>) -> DriverResult<()>;
    /// `cuMemHostRegister`, portable, of ordinary anonymous memory: page-locked from now on, until
    /// it is unregistered. Stops launches for as long as it takes, about 1 ms for 16 MiB that have
    /// been touched. `HOST_MEMORY_ALREADY_REGISTERED` for a range that touches another,
    /// `INVALID_VALUE` for pages of a file.
    ///
    /// # Safety
    /// `memory` points to `bytes` mapped, readable and writable bytes that stay mapped until they
    /// are unregistered.
    #[expect(unsafe_code, reason = "the driver locks host memory behind a raw pointer")]
    unsafe fn mem_host_register(&self, memory: NonNull<u8>, bytes: usize) -> DriverResult<()>;
    /// `cuMemHostRegister`, portable and read-only, of a shared mapping of a file's pages, which
    /// the device reads from then on and nobody may write through; they stay in memory, whatever
    /// becomes of the file. As [`Driver::mem_host_register`] otherwise; `NOT_SUPPORTED` without the
    /// attribute. A *private* mapping of a file does not come back for minutes.
    ///
    /// # Safety
    /// `memory` points to `bytes` mapped bytes that stay mapped until they are unregistered.
    #[expect(unsafe_code, reason = "the driver locks host memory behind a raw pointer")]
    unsafe fn mem_host_register_read_only(
        &self,
        memory: NonNull<u8>,
        bytes: usize,
    ) -> DriverResult<()>;
    /// `cuMemHostUnregister` of a whole registered range, by its start. Waits for the device.
    /// `INVALID_VALUE` for an address within one, `HOST_MEMORY_NOT_REGISTERED` for any other
    /// memory. No copy of it is pending.
    fn mem_host_unregister(&self, memory: NonNull<u8>) -> DriverResult<()>;
    /// `cuPointerGetAttributes`: the page-locked range of the host that an address lies in, from
    /// `mem_host_alloc` or `mem_host_register`, whoever called them; `None` for any other memory.
    /// Needs no current context.
    fn pointer_get_host_range(&self, address: u64) -> DriverResult<Option<Range<u64>>>;
    /// `cuMemcpyHtoDAsync`. A copy must not cross the end of a registered range.
    ///
    /// # Safety
    /// `source` points to `bytes` readable bytes that stay valid and unchanged until the copy is
    /// done in stream order.
    #[expect(unsafe_code, reason = "the driver reads or frees host memory behind a raw pointer")]
    unsafe fn memcpy_htod_async(
        &self,
        target: DeviceAddress,
        source: *const u8,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()>;
    /// `cuMemcpyDtoHAsync`.
    ///
    /// # Safety
    /// `target` points to `bytes` writable bytes that stay valid, and untouched by the process,
    /// until the copy is done in stream order.
    #[expect(unsafe_code, reason = "the driver reads or frees host memory behind a raw pointer")]
    unsafe fn memcpy_dtoh_async(
        &self,
        target: *mut u8,
        source: DeviceAddress,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()>;
    /// `cuMemsetD8Async`.
    fn memset_d8_async(
        &self,
        target: DeviceAddress,
        value: u8,
        bytes: u64,
        stream: Stream,
    ) -> DriverResult<()>;

    /// `cuStreamCreate`, non-blocking, in the current context.
    fn stream_create(&self) -> DriverResult<Stream>;
    /// `cuStreamDestroy`: returns at once, pending work still runs.
    fn stream_destroy(&self, stream: Stream) -> DriverResult<()>;
    /// `cuStreamSynchronize`.
    fn stream_synchronize(&self, stream: Stream) -> DriverResult<()>;
    /// `cuStreamQuery`: `Ok` when all work on the stream is done, else `NOT_READY`.
    fn stream_query(&self, stream: Stream) -> DriverResult<()>;
    /// `cuStreamWaitEvent`: later work on `stream` waits for the record that `event` holds now.
    fn stream_wait_event(&self, stream: Stream, event: Event) -> DriverResult<()>;
    /// `cuStreamGetId`: unique in the process, never reused, unlike the handle. The default
    /// streams' ids depend on the current context and thread. Of a stream that is being captured,
    /// or of the legacy stream while one is, it may not be asked: an error, and that capture is
    /// broken.
    fn stream_get_id(&self, stream: Stream) -> DriverResult<u64>;
    /// `cuStreamGetCtx`: the context that a stream was created in. Of a stream that is being
    /// captured it is not asked.
    fn stream_get_context(&self, stream: Stream) -> DriverResult<Context>;
    /// `cuStreamIsCapturing`.
    fn stream_is_capturing(&self, stream: Stream) -> DriverResult<CaptureState>;
    /// `cuThreadExchangeStreamCaptureMode`: sets the calling thread's mode, returns the old one.
    fn thread_exchange_stream_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode>;
    /// `cuUserObjectCreate` and `cuGraphRetainUserObject` on the graph that `stream` captures into:
    /// `release` is called when the graph, and every executable made of it, is gone. When the call
    /// fails, `release` is dropped uncalled and nothing is retained.
    fn graph_retain(&self, stream: Stream, release: GraphRelease) -> DriverResult<()>;

    /// `cuEventCreate` without timing, in the current context.
    fn event_create(&self) -> DriverResult<Event>;
    /// `cuEventCreate` with timing, in the current context: its records take the device's time.
    fn event_create_timed(&self) -> DriverResult<Event>;
    /// `cuEventElapsedTime`: from the record of `start` to that of `end`, both made with timing;
    /// zero when `end` came first. Half a microsecond is its resolution. `NOT_READY` while one has
    /// not passed, `INVALID_HANDLE` when one has no timing or was never recorded.
    fn event_elapsed(&self, start: Event, end: Event) -> DriverResult<Duration>;
    /// `cuEventDestroy`.
    fn event_destroy(&self, event: Event) -> DriverResult<()>;
    /// `cuEventRecord`. Event and stream belong to one context.
    fn event_record(&self, event: Event, stream: Stream) -> DriverResult<()>;
    /// `cuEventQuery`: `Ok` is the only answer that means passed.
    fn event_query(&self, event: Event) -> DriverResult<()>;

    /// `cuModuleLoadData` of the library's kernels into the current context. Again for the same
    /// context: does nothing. Waits for the device.
    fn module_load(&self) -> DriverResult<()>;
    /// `cuLaunchKernel` of one of the library's kernels. `NOT_FOUND` before `module_load`.
    /// `INVALID_VALUE` for an address that is not 8-byte aligned.
    fn launch_kernel(&self, call: KernelCall, stream: Stream) -> DriverResult<()>;
}
