//! Our own declarations of the driver's interface against `cuda-driver-sys`, whose bindings were
//! generated from `cuda.h` of CUDA 10.2.
//!
//! Compared: size, alignment and field offsets of the structures; every constant and return code
//! that both have; and of every function the number and sizes of its arguments, which is all that
//! the calling convention sees of integers and pointers. The signatures are compared by the
//! compiler, in constants: a test that named a function at run time would need the library to link.
//!
//! What CUDA 10.2 does not have stands here as numbers copied from `cuda.h` of CUDA 12.9 and 13.5,
//! beside the names that it has there.

use std::mem::{align_of, offset_of, size_of};

use cuda_driver_sys as header;
use vbar::driver::sys::{self, Api};
use vbar::driver::{CaptureMode, DeviceAttribute, DriverCode};

/// Sizes of a function's arguments, and of its result last.
trait Shape {
    const SIZES: &'static [usize];
}

macro_rules! shapes {
    ($($name:ident)*) => {
        impl<R, $($name),*> Shape for unsafe extern "C" fn($($name),*) -> R {
            const SIZES: &'static [usize] = &[$(size_of::<$name>(),)* size_of::<R>()];
        }
        shapes!(@fewer $($name)*);
    };
    (@fewer) => {};
    (@fewer $first:ident $($name:ident)*) => { shapes!($($name)*); };
}
shapes!(A B C D E F G H I J K);

impl<F: Shape> Shape for Option<F> {
    const SIZES: &'static [usize] = F::SIZES;
}

const fn sizes<F: Shape + Copy>(_function: F) -> &'static [usize] {
    F::SIZES
}

const fn field_sizes<F: Shape>(_field: fn(&Api) -> &F) -> &'static [usize] {
    F::SIZES
}

const fn same(ours: &[usize], theirs: &[usize]) -> bool {
    if ours.len() != theirs.len() {
        return false;
    }
    let mut index = 0;
    while index < ours.len() {
        if ours[index] != theirs[index] {
            return false;
        }
        index += 1;
    }
    true
}

/// Compares fields of [`Api`] with functions of the header; `_` once an argument, for the compiler
/// to fill in.
macro_rules! signatures {
    ($($ours:ident = $theirs:ident($($argument:tt)*);)*) => {
        $(const _: () = {
            let theirs: unsafe extern "C" fn($($argument)*) -> _ = header::$theirs;
            assert!(same(field_sizes(|api| &api.$ours), sizes(theirs)), stringify!($ours));
        };)*
    };
}

signatures! {
    cuInit = cuInit(_);
    cuDriverGetVersion = cuDriverGetVersion(_);
    cuDeviceGet = cuDeviceGet(_, _);
    cuDeviceGetCount = cuDeviceGetCount(_);
    cuDeviceGetName = cuDeviceGetName(_, _, _);
    cuDeviceTotalMem = cuDeviceTotalMem_v2(_, _);
    cuDeviceGetAttribute = cuDeviceGetAttribute(_, _, _);
    cuDeviceCanAccessPeer = cuDeviceCanAccessPeer(_, _, _);
    cuDevicePrimaryCtxRetain = cuDevicePrimaryCtxRetain(_, _);
    // `_v2` since CUDA 11.0, with the same argument.
    cuDevicePrimaryCtxRelease = cuDevicePrimaryCtxRelease(_);
    cuDevicePrimaryCtxGetState = cuDevicePrimaryCtxGetState(_, _, _);
    cuCtxGetCurrent = cuCtxGetCurrent(_);
    cuCtxSetCurrent = cuCtxSetCurrent(_);
    cuCtxGetDevice = cuCtxGetDevice(_);
    cuCtxSynchronize = cuCtxSynchronize();
    cuMemGetInfo = cuMemGetInfo_v2(_, _);
    cuMemGetAllocationGranularity = cuMemGetAllocationGranularity(_, _, _);
    cuMemAddressReserve = cuMemAddressReserve(_, _, _, _, _);
    cuMemAddressFree = cuMemAddressFree(_, _);
    cuMemCreate = cuMemCreate(_, _, _, _);
    cuMemRelease = cuMemRelease(_);
    cuMemMap = cuMemMap(_, _, _, _, _);
    cuMemSetAccess = cuMemSetAccess(_, _, _, _);
    cuMemUnmap = cuMemUnmap(_, _);
    cuMemAlloc = cuMemAlloc_v2(_, _);
    cuMemFree = cuMemFree_v2(_);
    cuMemHostAlloc = cuMemHostAlloc(_, _, _);
    cuMemFreeHost = cuMemFreeHost(_);
    cuMemHostRegister = cuMemHostRegister_v2(_, _, _);
    cuMemHostUnregister = cuMemHostUnregister(_);
    cuPointerGetAttributes = cuPointerGetAttributes(_, _, _, _);
    cuMemcpyHtoDAsync = cuMemcpyHtoDAsync_v2(_, _, _, _);
    cuMemcpyDtoHAsync = cuMemcpyDtoHAsync_v2(_, _, _, _);
    cuMemsetD8Async = cuMemsetD8Async(_, _, _, _);
    cuStreamCreate = cuStreamCreate(_, _);
    cuStreamDestroy = cuStreamDestroy_v2(_);
    cuStreamSynchronize = cuStreamSynchronize(_);
    cuStreamQuery = cuStreamQuery(_);
    cuStreamWaitEvent = cuStreamWaitEvent(_, _, _);
    cuStreamGetCtx = cuStreamGetCtx(_, _);
    cuStreamIsCapturing = cuStreamIsCapturing(_, _);
    cuThreadExchangeStreamCaptureMode = cuThreadExchangeStreamCaptureMode(_);
    cuEventCreate = cuEventCreate(_, _);
    cuEventDestroy = cuEventDestroy_v2(_);
    cuEventRecord = cuEventRecord(_, _);
    cuEventQuery = cuEventQuery(_);
    cuEventElapsedTime = cuEventElapsedTime(_, _, _);
    cuModuleLoadDataEx = cuModuleLoadDataEx(_, _, _, _, _);
    cuModuleGetFunction = cuModuleGetFunction(_, _, _);
    cuModuleUnload = cuModuleUnload(_);
    cuLaunchKernel = cuLaunchKernel(_, _, _, _, _, _, _, _, _, _, _);
}

/// The functions that are newer than CUDA 10.2, with the sizes of `cuda.h`'s arguments.
macro_rules! newer_signatures {
    ($($ours:ident($($size:literal),*);)*) => {
        $(const _: () = assert!(
            same(field_sizes(|api| &api.$ours), &[$($size,)* 4]),
            stringify!($ours)
        );)*
    };
}

newer_signatures! {
    // CUresult cuStreamGetId(CUstream, unsigned long long *)
    cuStreamGetId(8, 8);
    // CUresult cuCtxGetId(CUcontext, unsigned long long *)
    cuCtxGetId(8, 8);
    // CUresult cuCtxRecordEvent(CUcontext, CUevent)
    cuCtxRecordEvent(8, 8);
    // CUresult cuStreamGetCaptureInfo_v2(CUstream, CUstreamCaptureStatus *, cuuint64_t *,
    // CUgraph *,
    //     const CUgraphNode **, size_t *)
    cuStreamGetCaptureInfo_v2(8, 8, 8, 8, 8, 8);
    // The same with const CUgraphEdgeData ** before the last.
    cuStreamGetCaptureInfo_v3(8, 8, 8, 8, 8, 8, 8);
    // CUresult cuUserObjectCreate(CUuserObject *, void *, CUhostFn, unsigned, unsigned)
    cuUserObjectCreate(8, 8, 8, 4, 4);
    // CUresult cuUserObjectRelease(CUuserObject, unsigned)
    cuUserObjectRelease(8, 4);
    // CUresult cuGraphRetainUserObject(CUgraph, CUuserObject, unsigned, unsigned)
    cuGraphRetainUserObject(8, 8, 4, 4);
}

#[test]
fn every_function_of_the_table_is_compared() {
    // A function added to the table belongs in one of the two lists above.
    assert_eq!((Api::REQUIRED.len(), Api::OPTIONAL.len()), (51, 8));
}

macro_rules! check_layout {
    ($ours:ident, $theirs:ident { $($field:ident = $their_field:ident),* }) => {
        assert_eq!(size_of::<sys::$ours>(), size_of::<header::$theirs>());
        assert_eq!(align_of::<sys::$ours>(), align_of::<header::$theirs>());
        $(assert_eq!(
            offset_of!(sys::$ours, $field),
            offset_of!(header::$theirs, $their_field),
            concat!(stringify!($ours), ".", stringify!($field))
        );)*
    };
}

#[test]
fn structures_have_the_layout_of_the_header() {
    check_layout!(CUmemLocation, CUmemLocation { type_ = type_, id = id });
    check_layout!(CUmemAccessDesc, CUmemAccessDesc { location = location, flags = flags });
    check_layout!(CUmemAllocationProp, CUmemAllocationProp {
        type_ = type_,
        requested_handle_types = requestedHandleTypes,
        location = location,
        win32_handle_meta_data = win32HandleMetaData,
        // 8 reserved bytes in CUDA 10.2.
        alloc_flags = reserved
    });
    // struct allocFlags of CUDA 11.0 and later: unsigned char compressionType,
    // gpuDirectRDMACapable; unsigned short usage; unsigned char reserved[4].
    assert_eq!(size_of::<sys::CUmemAllocFlags>(), 8);
    assert_eq!(offset_of!(sys::CUmemAllocFlags, gpu_direct_rdma_capable), 1);
    assert_eq!(offset_of!(sys::CUmemAllocFlags, usage), 2);
    assert_eq!(offset_of!(sys::CUmemAllocFlags, reserved), 4);
}

#[test]
fn types_have_the_size_of_the_header() {
    assert_eq!(size_of::<sys::CUresult>(), size_of::<header::CUresult>());
    assert_eq!(size_of::<sys::CUdevice>(), size_of::<header::CUdevice>());
    assert_eq!(size_of::<sys::CUdeviceptr>(), size_of::<header::CUdeviceptr>());
    assert_eq!(size_of::<sys::CUcontext>(), size_of::<header::CUcontext>());
    assert_eq!(size_of::<sys::CUmodule>(), size_of::<header::CUmodule>());
    assert_eq!(size_of::<sys::CUfunction>(), size_of::<header::CUfunction>());
    assert_eq!(size_of::<sys::CUstream>(), size_of::<header::CUstream>());
    assert_eq!(size_of::<sys::CUevent>(), size_of::<header::CUevent>());
    assert_eq!(size_of::<sys::CUgraph>(), size_of::<header::CUgraph>());
    assert_eq!(size_of::<sys::CUhostFn>(), size_of::<header::CUhostFn>());
    assert_eq!(
        size_of::<sys::CUmemGenericAllocationHandle>(),
        size_of::<header::CUmemGenericAllocationHandle>()
    );
}

/// Compares constants with the enum, or the module, of the same name in the header.
macro_rules! check_constants {
    ($($group:ident: $($name:ident),+;)*) => {
        $($(assert_eq!(
            i64::from(sys::$name),
            header::$group::$name as i64,
            stringify!($name)
        );)+)*
    };
}

#[test]
fn constants_have_the_numbers_of_the_header() {
    check_constants! {
        CUmemAllocationType: CU_MEM_ALLOCATION_TYPE_PINNED;
        CUmemLocationType: CU_MEM_LOCATION_TYPE_DEVICE;
        CUmemAccess_flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        CUmemAllocationGranularity_flags: CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        CUstream_flags_enum: CU_STREAM_NON_BLOCKING;
        CUevent_flags_enum: CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING;
        CUstreamCaptureStatus: CU_STREAM_CAPTURE_STATUS_NONE, CU_STREAM_CAPTURE_STATUS_ACTIVE,
            CU_STREAM_CAPTURE_STATUS_INVALIDATED;
        CUstreamCaptureMode: CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CU_STREAM_CAPTURE_MODE_RELAXED;
        CUjit_option: CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES;
        CUdevice_attribute: CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
        CUmemorytype_enum: CU_MEMORYTYPE_HOST;
        CUpointer_attribute_enum: CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            CU_POINTER_ATTRIBUTE_RANGE_SIZE;
    }
    assert_eq!(sys::CU_MEMHOSTALLOC_PORTABLE, header::CU_MEMHOSTALLOC_PORTABLE);
    assert_eq!(sys::CU_MEMHOSTREGISTER_PORTABLE, header::CU_MEMHOSTREGISTER_PORTABLE);
    // CUDA 11.1.
    assert_eq!(sys::CU_MEMHOSTREGISTER_READ_ONLY, 8);
    // CUDA 11.3: CUuserObject_flags and CUuserObjectRetain_flags.
    assert_eq!(sys::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, 1);
    assert_eq!(sys::CU_GRAPH_USER_OBJECT_MOVE, 1);
}

#[test]
fn enums_of_the_door_have_the_numbers_of_the_header() {
    use header::{CUdevice_attribute as Attribute, CUstreamCaptureMode as Mode};
    let attributes = [
        (DeviceAttribute::Integrated, Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED as i32),
        (DeviceAttribute::ComputeMode, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE as i32),
        (DeviceAttribute::PciBusId, Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID as i32),
        (DeviceAttribute::PciDeviceId, Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID as i32),
        (DeviceAttribute::PciDomainId, Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID as i32),
        (
            DeviceAttribute::ComputeCapabilityMajor,
            Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as i32,
        ),
        (
            DeviceAttribute::ComputeCapabilityMinor,
            Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as i32,
        ),
        (
            // The name in CUDA 10.2; VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED since 11.2.
            DeviceAttribute::VirtualMemoryManagementSupported,
            Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED as i32,
        ),
        // CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED of CUDA 11.1 and later.
        (DeviceAttribute::ReadOnlyHostRegisterSupported, 113),
        // CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID of CUDA 12.2 and later, and
        // CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED of 12.9.
        (DeviceAttribute::HostNumaId, 134),
        (DeviceAttribute::HostNumaVirtualMemoryManagementSupported, 141),
    ];
    for (ours, theirs) in attributes {
        assert_eq!(ours as i32, theirs, "{ours:?}");
    }
    assert_eq!(CaptureMode::Global as i32, Mode::CU_STREAM_CAPTURE_MODE_GLOBAL as i32);
    assert_eq!(CaptureMode::ThreadLocal as i32, Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as i32);
    assert_eq!(CaptureMode::Relaxed as i32, Mode::CU_STREAM_CAPTURE_MODE_RELAXED as i32);
}

/// Name and number of a return code in the header.
macro_rules! codes {
    ($($name:ident)*) => {
        &[$((stringify!($name), header::CUresult::$name as i32)),*]
    };
}

const CODES: &[(&str, i32)] = codes! {
    CUDA_SUCCESS CUDA_ERROR_INVALID_VALUE CUDA_ERROR_OUT_OF_MEMORY CUDA_ERROR_NOT_INITIALIZED
    CUDA_ERROR_DEINITIALIZED CUDA_ERROR_NO_DEVICE CUDA_ERROR_INVALID_DEVICE
    CUDA_ERROR_INVALID_IMAGE CUDA_ERROR_INVALID_CONTEXT CUDA_ERROR_ALREADY_MAPPED
    CUDA_ERROR_NOT_MAPPED CUDA_ERROR_ECC_UNCORRECTABLE CUDA_ERROR_INVALID_PTX
    CUDA_ERROR_NVLINK_UNCORRECTABLE CUDA_ERROR_OPERATING_SYSTEM CUDA_ERROR_INVALID_HANDLE
    CUDA_ERROR_NOT_FOUND CUDA_ERROR_NOT_READY CUDA_ERROR_ILLEGAL_ADDRESS
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES CUDA_ERROR_LAUNCH_TIMEOUT CUDA_ERROR_CONTEXT_IS_DESTROYED
    CUDA_ERROR_ASSERT CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED CUDA_ERROR_HARDWARE_STACK_ERROR
    CUDA_ERROR_ILLEGAL_INSTRUCTION CUDA_ERROR_MISALIGNED_ADDRESS CUDA_ERROR_INVALID_ADDRESS_SPACE
    CUDA_ERROR_INVALID_PC CUDA_ERROR_LAUNCH_FAILED CUDA_ERROR_NOT_PERMITTED
    CUDA_ERROR_NOT_SUPPORTED CUDA_ERROR_SYSTEM_NOT_READY CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED CUDA_ERROR_STREAM_CAPTURE_MERGE
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    CUDA_ERROR_CAPTURED_EVENT CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD CUDA_ERROR_UNKNOWN
};

/// Codes that are newer than CUDA 10.2, with their numbers in `cuda.h`.
const NEWER_CODES: &[(&str, i32)] = &[
    ("CUDA_ERROR_STUB_LIBRARY", 34),
    ("CUDA_ERROR_DEVICE_UNAVAILABLE", 46),
    ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", 222),
    ("CUDA_ERROR_MPS_CONNECTION_FAILED", 805),
    ("CUDA_ERROR_MPS_RPC_FAILURE", 806),
    ("CUDA_ERROR_MPS_SERVER_NOT_READY", 807),
    ("CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", 808),
    ("CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", 809),
    ("CUDA_ERROR_MPS_CLIENT_TERMINATED", 810),
];

fn check_code(known: DriverCode) {
    let number = CODES.iter().chain(NEWER_CODES).find(|(name, _)| *name == known.name());
    let (name, number) = number.unwrap_or_else(|| panic!("{known:?} is not compared"));
    assert_eq!(known.0, *number, "{name}");
}

#[test]
fn return_codes_have_the_numbers_of_the_header() {
    DriverCode::KNOWN.iter().copied().for_each(check_code);
}
