//! The real driver: each verb is one call into `libcuda.so.1`, opened at run time.
//!
//! Owns the process's one table of driver functions, the list of devices, and the kernels loaded
//! into each context. Adds to the driver what the contract of [`Driver`] promises and the driver
//! does not check itself: ordinals out of range, `Stream::NONE`, alignment of kernel arguments.
//! Retries nothing, waits for nothing of its own, and keeps no stream or event.

#![expect(unsafe_code, reason = "calls the driver through function pointers")]

use std::ffi::{CStr, OsStr, c_int, c_uint};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::driver::sys::{self, *};
use crate::driver::{
    CaptureMode, CaptureState, Context, DeviceAttribute, DeviceMemory, Driver, DriverCode,
    DriverError, DriverResult, Event, FrameHandle, GraphRelease, HostNode, KernelCall, select,
};
use crate::error::Result;
use crate::process;
use crate::units::{DeviceAddress, DeviceOrdinal, Stream};

mod graph;
mod kernels;
mod linear;
mod place;
mod pointer;
#[cfg(test)]
mod tests;

const _: () = assert!(usize::BITS == 64, "the driver exists for 64-bit programs only");

/// The driver behind `libcuda.so.1`.
pub struct Cuda {
    api: Api,
    version: i32,
    devices: Vec<Device>,
    kernels: kernels::Loaded,
    /// Held while a frame or a mapping goes: a driver (580.159, CUDA 13.0) that released a handle
    /// while another thread unmapped its last mapping freed its record of it twice (`abort` in
    /// `cuMemUnmap`). It takes these calls one at a time anyway: the lock costs nothing.
    unmapping: Mutex<()>,
}

struct Device {
    handle: CUdevice,
    /// The primary context when it was retained last, or 0: tells which kernels die with it.
    primary: AtomicUsize,
}

impl Cuda {
    /// The process's driver, opened and initialised by the first call that succeeds.
    ///
    /// # Errors
    /// `DriverMissing` when the library, or one of its functions, is not there; `Driver` when it
    /// cannot be initialised, which is also how a machine without a GPU answers; `ProcessEnding`.
    pub fn open() -> Result<Arc<Self>> {
        static PROCESS: Mutex<Option<Arc<Cuda>>> = Mutex::new(None);
        let entering = process::enter()?;
        let mut process = PROCESS.lock();
        if let Some(cuda) = &*process {
            return Ok(Arc::clone(cuda));
        }
        let cuda = process.insert(Self::open_library(OsStr::new(sys::LIBRARY))?);
        entering.stay();
        Ok(Arc::clone(cuda))
    }

    /// An instance of its own from a library that is not the driver's, for tests.
    ///
    /// # Errors
    /// As [`Cuda::open`].
    #[doc(hidden)]
    pub fn open_library(path: &OsStr) -> Result<Arc<Self>> {
        let api = Api::open(path)?;
        let opened = Self::initialise(api);
        let told =
            |error| crate::Error::from(error).context(path.display()).appended(select::DOCTOR);
        opened.map(Arc::new).map_err(told)
    }

    fn initialise(api: Api) -> DriverResult<Self> {
        // SAFETY: may be called any number of times, by any thread; 0 is the only flag.
        check("cuInit", unsafe { (api.cuInit)(0) })?;
        let version = output("cuDriverGetVersion", |version| {
            // SAFETY: `version` is a valid place for the result.
            unsafe { (api.cuDriverGetVersion)(version) }
        })?;
        let count: c_int = output("cuDeviceGetCount", |count| {
            // SAFETY: `count` is a valid place for the result.
            unsafe { (api.cuDeviceGetCount)(count) }
        })?;
        let device = |ordinal| {
            let handle = output("cuDeviceGet", |device| {
                // SAFETY: `device` is a valid place for the result; the ordinal is checked.
                unsafe { (api.cuDeviceGet)(device, ordinal) }
            })?;
            Ok(Device { handle, primary: AtomicUsize::new(0) })
        };
        let devices = (0..count).map(device).collect::<DriverResult<_>>()?;
        let (kernels, unmapping) = (kernels::Loaded::default(), Mutex::new(()));
        Ok(Self { api, version, devices, kernels, unmapping })
    }

    fn device(&self, call: &'static str, ordinal: DeviceOrdinal) -> DriverResult<&Device> {
        let device = self.devices.get(ordinal.0 as usize);
        device.ok_or(DriverError::new(call, DriverCode::INVALID_DEVICE))
    }

    fn create_event(&self, flags: c_uint) -> DriverResult<Event> {
        let event = output("cuEventCreate", |event| {
            // SAFETY: `event` is a valid place for the result.
            unsafe { (self.api.cuEventCreate)(event, flags) }
        })?;
        Ok(Event(event))
    }

    /// An attribute by its number in `CUdevice_attribute`.
    fn attribute(&self, device: CUdevice, attribute: c_int) -> DriverResult<c_int> {
        output("cuDeviceGetAttribute", |value| {
            // SAFETY: `value` is a valid place for the result; the driver checks the others.
            unsafe { (self.api.cuDeviceGetAttribute)(value, attribute, device) }
        })
    }

    /// The properties of every frame: there is one set per device, so that frames are alike.
    fn properties(
        &self,
        call: &'static str,
        device: DeviceOrdinal,
    ) -> DriverResult<CUmemAllocationProp> {
        self.device(call, device)?;
        Ok(properties_at(location(device)))
    }

    fn create(
        &self,
        call: &'static str,
        properties: &CUmemAllocationProp,
        bytes: u64,
    ) -> DriverResult<FrameHandle> {
        let frame = output(call, |frame| {
            // SAFETY: `frame` is a valid place, `properties` is read during the call only.
            unsafe { (self.api.cuMemCreate)(frame, bytes as usize, properties, 0) }
        })?;
        Ok(FrameHandle(frame))
    }
}

fn properties_at(location: CUmemLocation) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CU_MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: 0,
        location,
        win32_handle_meta_data: 0,
        alloc_flags: CUmemAllocFlags::default(),
    }
}

fn location(device: DeviceOrdinal) -> CUmemLocation {
    // `mem_create` and its like have found the ordinal in the list of devices, whose length is an
    // int; any other is refused by the driver.
    CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: device.0 as c_int }
}

fn check(call: &'static str, code: CUresult) -> DriverResult<()> {
    if code == 0 { Ok(()) } else { Err(DriverError::new(call, DriverCode(code))) }
}

/// The one result of a call that writes it through a pointer.
fn output<T: Default>(
    call: &'static str,
    write: impl FnOnce(&mut T) -> CUresult,
) -> DriverResult<T> {
    let mut value = T::default();
    check(call, write(&mut value))?;
    Ok(value)
}

/// The driver looks behind a stream's handle, and [`Stream::NONE`] has nothing behind it.
fn real(call: &'static str, stream: Stream) -> DriverResult<CUstream> {
    if stream.is_none() {
        return Err(DriverError::new(call, DriverCode::INVALID_HANDLE));
    }
    Ok(stream.0)
}

impl Driver for Cuda {
    fn description(&self) -> String {
        format!("cuda {}.{}", self.version / 1000, self.version % 1000 / 10)
    }

    fn version(&self) -> DriverResult<i32> {
        Ok(self.version)
    }

    fn device_get_count(&self) -> DriverResult<u32> {
        Ok(self.devices.len() as u32)
    }

    fn device_get_name(&self, device: DeviceOrdinal) -> DriverResult<String> {
        const CALL: &str = "cuDeviceGetName";
        let device = self.device(CALL, device)?.handle;
        let mut name = [0u8; 256];
        // SAFETY: `name` has as many bytes as the call is told.
        let code = unsafe {
            (self.api.cuDeviceGetName)(name.as_mut_ptr().cast(), name.len() as c_int, device)
        };
        check(CALL, code)?;
        let name = CStr::from_bytes_until_nul(&name);
        Ok(name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default())
    }

    fn device_total_mem(&self, device: DeviceOrdinal) -> DriverResult<u64> {
        const CALL: &str = "cuDeviceTotalMem";
        let device = self.device(CALL, device)?.handle;
        let bytes: usize = output(CALL, |bytes| {
            // SAFETY: `bytes` is a valid place for the result.
            unsafe { (self.api.cuDeviceTotalMem)(bytes, device) }
        })?;
        Ok(bytes as u64)
    }

    fn device_get_attribute(
        &self,
        device: DeviceOrdinal,
        attribute: DeviceAttribute,
    ) -> DriverResult<i32> {
        let device = self.device("cuDeviceGetAttribute", device)?;
        self.attribute(device.handle, attribute as c_int)
    }

    fn device_can_access_peer(&self, from: DeviceOrdinal, to: DeviceOrdinal) -> DriverResult<bool> {
        place::can_access_peer(self, from, to)
    }

    fn device_primary_ctx_retain(&self, device: DeviceOrdinal) -> DriverResult<Context> {
        const CALL: &str = "cuDevicePrimaryCtxRetain";
        let device = self.device(CALL, device)?;
        let context = output(CALL, |context| {
            // SAFETY: `context` is a valid place for the result.
            unsafe { (self.api.cuDevicePrimaryCtxRetain)(context, device.handle) }
        })?;
        device.primary.store(context, Ordering::Release);
        Ok(Context(context))
    }

    fn device_primary_ctx_release(&self, device: DeviceOrdinal) -> DriverResult<()> {
        const CALL: &str = "cuDevicePrimaryCtxRelease";
        let device = self.device(CALL, device)?;
        // SAFETY: takes an integer that the driver gave out; a count of 0 is refused.
        check(CALL, unsafe { (self.api.cuDevicePrimaryCtxRelease)(device.handle) })?;
        let (mut flags, mut active): (c_uint, c_int) = (0, 1);
        // SAFETY: both are valid places for the results.
        let code = unsafe {
            (self.api.cuDevicePrimaryCtxGetState)(device.handle, &mut flags, &mut active)
        };
        // The context and its modules are gone, and the next one may get the same address.
        if code == 0 && active == 0 {
            self.kernels.forget(device.primary.load(Ordering::Acquire));
        }
        Ok(())
    }

    fn ctx_get_current(&self) -> DriverResult<Option<Context>> {
        let context = output("cuCtxGetCurrent", |context| {
            // SAFETY: `context` is a valid place for the result.
            unsafe { (self.api.cuCtxGetCurrent)(context) }
        })?;
        Ok((context != 0).then_some(Context(context)))
    }

    fn ctx_set_current(&self, context: Option<Context>) -> DriverResult<()> {
        let context = context.map_or(0, |context| context.0);
        // SAFETY: a context of this driver, or null, which leaves the thread with none.
        check("cuCtxSetCurrent", unsafe { (self.api.cuCtxSetCurrent)(context) })
    }

    fn ctx_synchronize(&self) -> DriverResult<()> {
        // SAFETY: takes nothing.
        check("cuCtxSynchronize", unsafe { (self.api.cuCtxSynchronize)() })
    }

    fn ctx_record_event(&self, context: Context, event: Event) -> DriverResult<()> {
        const CALL: &str = "cuCtxRecordEvent";
        let record = present(CALL, self.api.cuCtxRecordEvent)?;
        // SAFETY: a context of this driver and a live event; the driver compares the two.
        check(CALL, unsafe { record(context.0, event.0) })
    }

    fn mem_get_info(&self) -> DriverResult<DeviceMemory> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid places for the results.
        check("cuMemGetInfo", unsafe { (self.api.cuMemGetInfo)(&mut free, &mut total) })?;
        Ok(DeviceMemory { free_bytes: free as u64, total_bytes: total as u64 })
    }

    fn mem_get_allocation_granularity(&self, device: DeviceOrdinal) -> DriverResult<u64> {
        const CALL: &str = "cuMemGetAllocationGranularity";
        let properties = self.properties(CALL, device)?;
        let minimum = CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let bytes: usize = output(CALL, |bytes| {
            // SAFETY: `bytes` is a valid place, `properties` is read during the call only.
            unsafe { (self.api.cuMemGetAllocationGranularity)(bytes, &properties, minimum) }
        })?;
        Ok(bytes as u64)
    }

    fn mem_address_reserve(&self, bytes: u64, alignment: u64) -> DriverResult<DeviceAddress> {
        let address = output("cuMemAddressReserve", |address| {
            // SAFETY: `address` is a valid place; the driver checks the numbers, and chooses a
            // range that is free, as no fixed address is asked for.
            unsafe {
                (self.api.cuMemAddressReserve)(address, bytes as usize, alignment as usize, 0, 0)
            }
        })?;
        Ok(DeviceAddress(address))
    }

    fn mem_address_free(&self, address: DeviceAddress, bytes: u64) -> DriverResult<()> {
        // SAFETY: the driver looks the range up among its reservations. Host memory is not reached
        // through device addresses.
        let code = unsafe { (self.api.cuMemAddressFree)(address.0, bytes as usize) };
        check("cuMemAddressFree", code)
    }

    fn mem_create(&self, device: DeviceOrdinal, bytes: u64) -> DriverResult<FrameHandle> {
        const CALL: &str = "cuMemCreate";
        self.create(CALL, &self.properties(CALL, device)?, bytes)
    }

    fn mem_create_host(&self, node: HostNode, bytes: u64) -> DriverResult<FrameHandle> {
        const CALL: &str = "cuMemCreate";
        let invalid = |_| DriverError::new(CALL, DriverCode::INVALID_VALUE);
        let id = c_int::try_from(node.0).map_err(invalid)?;
        let place = CUmemLocation { type_: CU_MEM_LOCATION_TYPE_HOST_NUMA, id };
        self.create(CALL, &properties_at(place), bytes)
    }

    fn mem_release(&self, frame: FrameHandle) -> DriverResult<()> {
        let _alone = self.unmapping.lock();
        // SAFETY: a handle is a number that the driver looks up. Mapped memory lives on.
        check("cuMemRelease", unsafe { (self.api.cuMemRelease)(frame.0) })
    }

    fn mem_map(&self, address: DeviceAddress, bytes: u64, frame: FrameHandle) -> DriverResult<()> {
        let _alone = self.unmapping.lock();
        // SAFETY: numbers that the driver looks up; it maps into unmapped reserved addresses only.
        let code = unsafe { (self.api.cuMemMap)(address.0, bytes as usize, 0, frame.0, 0) };
        check("cuMemMap", code)
    }

    fn mem_set_access(
        &self,
        address: DeviceAddress,
        bytes: u64,
        devices: &[DeviceOrdinal],
    ) -> DriverResult<()> {
        const CALL: &str = "cuMemSetAccess";
        if devices.is_empty() {
            return Err(DriverError::new(CALL, DriverCode::INVALID_VALUE));
        }
        let access = |&device: &DeviceOrdinal| {
            self.device(CALL, device)?;
            let flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            Ok(CUmemAccessDesc { location: location(device), flags })
        };
        let access = devices.iter().map(access).collect::<DriverResult<Vec<_>>>()?;
        // SAFETY: `access` holds as many entries as the call is told, and is read during it only.
        let code = unsafe {
            (self.api.cuMemSetAccess)(address.0, bytes as usize, access.as_ptr(), access.len())
        };
        check(CALL, code)
    }

    fn mem_unmap(&self, address: DeviceAddress, bytes: u64) -> DriverResult<()> {
        let _alone = self.unmapping.lock();
        // SAFETY: the driver looks the range up among its mappings. Work that still uses it faults
        // on the device, which is an error of a later call.
        let code = unsafe { (self.api.cuMemUnmap)(address.0, bytes as usize) };
        check("cuMemUnmap", code)
    }

    fn mem_alloc(&self, bytes: u64) -> DriverResult<DeviceAddress> {
        self.linear_alloc(bytes)
    }

    fn mem_free(&self, address: DeviceAddress) -> DriverResult<()> {
        self.linear_free(address)
    }

    fn mem_host_alloc(&self, bytes: usize) -> DriverResult<NonNull<u8>> {
        self.host_alloc(bytes)
    }

    unsafe fn mem_free_host(&self, memory: NonNull<u8>) -> DriverResult<()> {
        // SAFETY: the caller promises that `mem_host_alloc` gave it out and nothing uses it.
        check("cuMemFreeHost", unsafe { (self.api.cuMemFreeHost)(memory.as_ptr().cast()) })
    }

    unsafe fn mem_host_register(&self, memory: NonNull<u8>, bytes: usize) -> DriverResult<()> {
        let (memory, flags) = (memory.as_ptr().cast(), CU_MEMHOSTREGISTER_PORTABLE);
        // SAFETY: the caller promises that the range is mapped, and stays so.
        let code = unsafe { (self.api.cuMemHostRegister)(memory, bytes, flags) };
        check("cuMemHostRegister", code)
    }

    unsafe fn mem_host_register_read_only(&self, at: NonNull<u8>, len: usize) -> DriverResult<()> {
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_READ_ONLY;
        // SAFETY: the caller promises that the range is mapped, and stays so.
        let code = unsafe { (self.api.cuMemHostRegister)(at.as_ptr().cast(), len, flags) };
        check("cuMemHostRegister", code)
    }

    fn mem_host_unregister(&self, memory: NonNull<u8>) -> DriverResult<()> {
        // SAFETY: the driver looks the address up among the ranges that were registered.
        let code = unsafe { (self.api.cuMemHostUnregister)(memory.as_ptr().cast()) };
        check("cuMemHostUnregister", code)
    }

    fn pointer_get_host_range(&self, address: u64) -> DriverResult<Option<Range<u64>>> {
        pointer::host_range(&self.api, address)
    }

    unsafe fn memcpy_htod_async(
        &self,
        target: DeviceAddress,
        source: *const u8,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()> {
        const CALL: &str = "cuMemcpyHtoDAsync";
        let stream = real(CALL, stream)?;
        // SAFETY: the caller promises that `source` stays readable until the copy is done.
        let code = unsafe { (self.api.cuMemcpyHtoDAsync)(target.0, source.cast(), bytes, stream) };
        check(CALL, code)
    }

    unsafe fn memcpy_dtoh_async(
        &self,
        target: *mut u8,
        source: DeviceAddress,
        bytes: usize,
        stream: Stream,
    ) -> DriverResult<()> {
        const CALL: &str = "cuMemcpyDtoHAsync";
        let stream = real(CALL, stream)?;
        // SAFETY: the caller promises that `target` stays writable until the copy is done.
        let code = unsafe { (self.api.cuMemcpyDtoHAsync)(target.cast(), source.0, bytes, stream) };
        check(CALL, code)
    }

    fn memset_d8_async(
        &self,
        target: DeviceAddress,
        value: u8,
        bytes: u64,
        stream: Stream,
    ) -> DriverResult<()> {
        const CALL: &str = "cuMemsetD8Async";
        let stream = real(CALL, stream)?;
        // SAFETY: writes device memory only; the driver refuses addresses that it did not give out.
        let code = unsafe { (self.api.cuMemsetD8Async)(target.0, value, bytes as usize, stream) };
        check(CALL, code)
    }

    fn stream_create(&self) -> DriverResult<Stream> {
        let stream = output("cuStreamCreate", |stream| {
            // SAFETY: `stream` is a valid place for the result.
            unsafe { (self.api.cuStreamCreate)(stream, CU_STREAM_NON_BLOCKING) }
        })?;
        Ok(Stream(stream))
    }

    fn stream_destroy(&self, stream: Stream) -> DriverResult<()> {
        const CALL: &str = "cuStreamDestroy";
        if stream.is_implicit() {
            return Err(DriverError::new(CALL, DriverCode::INVALID_HANDLE));
        }
        let stream = real(CALL, stream)?;
        // SAFETY: a live stream, as for every verb that takes one.
        check(CALL, unsafe { (self.api.cuStreamDestroy)(stream) })
    }

    fn stream_synchronize(&self, stream: Stream) -> DriverResult<()> {
        const CALL: &str = "cuStreamSynchronize";
        let stream = real(CALL, stream)?;
        // SAFETY: a live stream.
        check(CALL, unsafe { (self.api.cuStreamSynchronize)(stream) })
    }

    fn stream_query(&self, stream: Stream) -> DriverResult<()> {
        const CALL: &str = "cuStreamQuery";
        let stream = real(CALL, stream)?;
        // SAFETY: a live stream.
        check(CALL, unsafe { (self.api.cuStreamQuery)(stream) })
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> DriverResult<()> {
        const CALL: &str = "cuStreamWaitEvent";
        let stream = real(CALL, stream)?;
        // SAFETY: a live stream and an event that `event_create` gave out.
        check(CALL, unsafe { (self.api.cuStreamWaitEvent)(stream, event.0, 0) })
    }

    fn stream_get_id(&self, stream: Stream) -> DriverResult<u64> {
        place::stream_id(self, stream)
    }

    fn stream_get_context(&self, stream: Stream) -> DriverResult<Context> {
        place::stream_context(self, stream)
    }

    fn stream_is_capturing(&self, stream: Stream) -> DriverResult<CaptureState> {
        const CALL: &str = "cuStreamIsCapturing";
        let stream = real(CALL, stream)?;
        let status = output(CALL, |status| {
            // SAFETY: `status` is a valid place for the result; a live stream.
            unsafe { (self.api.cuStreamIsCapturing)(stream, status) }
        });
        match status {
            Ok(CU_STREAM_CAPTURE_STATUS_NONE) => Ok(CaptureState::None),
            Ok(CU_STREAM_CAPTURE_STATUS_ACTIVE) => Ok(CaptureState::Active),
            Ok(CU_STREAM_CAPTURE_STATUS_INVALIDATED) => Ok(CaptureState::Invalidated),
            Ok(_) => Err(DriverError::new(CALL, DriverCode::UNKNOWN)),
            Err(error) if error.code == DriverCode::STREAM_CAPTURE_IMPLICIT => {
                Ok(CaptureState::Implicit)
            }
            Err(error) => Err(error),
        }
    }

    fn thread_exchange_stream_capture_mode(&self, mode: CaptureMode) -> DriverResult<CaptureMode> {
        const CALL: &str = "cuThreadExchangeStreamCaptureMode";
        let mut mode = mode as c_uint;
        // SAFETY: `mode` is read and written during the call only.
        check(CALL, unsafe { (self.api.cuThreadExchangeStreamCaptureMode)(&mut mode) })?;
        match mode {
            CU_STREAM_CAPTURE_MODE_GLOBAL => Ok(CaptureMode::Global),
            CU_STREAM_CAPTURE_MODE_THREAD_LOCAL => Ok(CaptureMode::ThreadLocal),
            CU_STREAM_CAPTURE_MODE_RELAXED => Ok(CaptureMode::Relaxed),
            _ => Err(DriverError::new(CALL, DriverCode::UNKNOWN)),
        }
    }

    fn graph_retain(&self, stream: Stream, release: GraphRelease) -> DriverResult<()> {
        graph::retain(&self.api, stream, release)
    }

    fn event_create(&self) -> DriverResult<Event> {
        self.create_event(CU_EVENT_DISABLE_TIMING)
    }

    fn event_create_timed(&self) -> DriverResult<Event> {
        self.create_event(CU_EVENT_DEFAULT)
    }

    fn event_elapsed(&self, start: Event, end: Event) -> DriverResult<Duration> {
        let millis: f32 = output("cuEventElapsedTime", |millis| {
            // SAFETY: `millis` is a valid place for the result, the events are live.
            unsafe { (self.api.cuEventElapsedTime)(millis, start.0, end.0) }
        })?;
        Ok(Duration::try_from_secs_f64(f64::from(millis) / 1000.0).unwrap_or_default())
    }

    fn event_destroy(&self, event: Event) -> DriverResult<()> {
        // SAFETY: an event that `event_create` gave out, as for every verb that takes one.
        check("cuEventDestroy", unsafe { (self.api.cuEventDestroy)(event.0) })
    }

    fn event_record(&self, event: Event, stream: Stream) -> DriverResult<()> {
        const CALL: &str = "cuEventRecord";
        let stream = real(CALL, stream)?;
        // SAFETY: a live event and a live stream.
        check(CALL, unsafe { (self.api.cuEventRecord)(event.0, stream) })
    }

    fn event_query(&self, event: Event) -> DriverResult<()> {
        // SAFETY: a live event.
        check("cuEventQuery", unsafe { (self.api.cuEventQuery)(event.0) })
    }

    fn module_load(&self) -> DriverResult<()> {
        self.load_kernels()
    }

    fn launch_kernel(&self, call: KernelCall, stream: Stream) -> DriverResult<()> {
        self.launch(call, stream)
    }
}

/// A function that older drivers lack, or `NOT_SUPPORTED`.
fn present<F>(call: &'static str, function: Option<F>) -> DriverResult<F> {
    function.ok_or(DriverError::new(call, DriverCode::NOT_SUPPORTED))
}
