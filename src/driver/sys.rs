//! The part of `cuda.h` that the library uses: types, constants, and a table of functions that is
//! filled from `libcuda.so.1` at run time.
//!
//! Every field and return code is an integer: a newer driver returns numbers that this source does
//! not know, and an unknown value of a Rust enum is undefined behaviour. Handles are `usize`, which
//! has the size and register of the pointers that they are; nothing here looks behind one. The
//! names are those of `cuda.h`, so that they can be looked up there; where `cuda.h` redirects a
//! name to a versioned symbol, the table names that symbol. `tests/layouts.rs` compares all of it
//! with bindings that were generated from the header.
//!
//! A library, once opened, stays open: the driver has threads and exit handlers of its own, and the
//! table is copied freely. Nothing here decides; `cuda/` does.

#![expect(unsafe_code, reason = "opens a library and declares its functions")]

use std::ffi::{OsStr, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::error::{Error, ErrorCode, Result};

/// The driver's name for the dynamic linker. The `.1` is the driver's interface, unchanged since
/// the first CUDA; the name without it is the toolkit's stub.
pub const LIBRARY: &str = "libcuda.so.1";

/// `CUresult`: 0, or what went wrong.
pub type CUresult = c_int;
/// `CUdevice`.
pub type CUdevice = c_int;
/// `CUdeviceptr`.
pub type CUdeviceptr = u64;
/// `CUcontext`, a pointer that only the driver follows; so are the types up to `CUuserObject`.
pub type CUcontext = usize;
/// `CUmodule`.
pub type CUmodule = usize;
/// `CUfunction`.
pub type CUfunction = usize;
/// `CUstream`.
pub type CUstream = usize;
/// `CUevent`.
pub type CUevent = usize;
/// `CUgraph`.
pub type CUgraph = usize;
/// `CUuserObject`.
pub type CUuserObject = usize;
/// `CUmemGenericAllocationHandle`.
pub type CUmemGenericAllocationHandle = u64;
/// `CUhostFn`.
pub type CUhostFn = unsafe extern "C" fn(data: *mut c_void);

/// `CUmemLocation`. The second word is a union in newer headers, of which both use `id`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUmemLocation {
    /// `CUmemLocationType`, [`CU_MEM_LOCATION_TYPE_DEVICE`] or
    /// [`CU_MEM_LOCATION_TYPE_HOST_NUMA`].
    pub type_: c_uint,
    /// The device's ordinal, or the number of the host's NUMA node.
    pub id: c_int,
}

/// `allocFlags` of `CUmemAllocationProp`; 8 reserved bytes in the first headers that had it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct CUmemAllocFlags {
    /// `CUmemAllocationCompType`.
    pub compression_type: u8,
    /// Whether network adapters may reach the memory.
    pub gpu_direct_rdma_capable: u8,
    /// `CU_MEM_CREATE_USAGE_*`.
    pub usage: u16,
    /// Zeros.
    pub reserved: [u8; 4],
}

/// `CUmemAllocationProp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUmemAllocationProp {
    /// `CUmemAllocationType`, [`CU_MEM_ALLOCATION_TYPE_PINNED`].
    pub type_: c_uint,
    /// `CUmemAllocationHandleType`s, 0 for a handle that is not shared.
    pub requested_handle_types: c_uint,
    /// Where the memory is.
    pub location: CUmemLocation,
    /// Zero outside Windows.
    pub win32_handle_meta_data: usize,
    /// What the memory is for.
    pub alloc_flags: CUmemAllocFlags,
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CUmemAccessDesc {
    /// Who may access.
    pub location: CUmemLocation,
    /// `CUmemAccess_flags`, [`CU_MEM_ACCESS_FLAGS_PROT_READWRITE`].
    pub flags: c_uint,
}

/// The constants of `cuda.h` that the library uses, with its names.
pub mod constants {
    #![expect(missing_docs, reason = "cuda.h documents them under the same names")]
    use super::{c_int, c_uint};

    pub const CU_MEM_ALLOCATION_TYPE_PINNED: c_uint = 1;
    pub const CU_MEM_LOCATION_TYPE_DEVICE: c_uint = 1;
    pub const CU_MEM_LOCATION_TYPE_HOST_NUMA: c_uint = 3;
    pub const CU_MEM_ACCESS_FLAGS_PROT_READWRITE: c_uint = 3;
    pub const CU_MEM_ALLOC_GRANULARITY_MINIMUM: c_uint = 0;
    pub const CU_MEMHOSTALLOC_PORTABLE: c_uint = 1;
    pub const CU_MEMHOSTREGISTER_PORTABLE: c_uint = 1;
    pub const CU_MEMHOSTREGISTER_READ_ONLY: c_uint = 8;
    pub const CU_STREAM_NON_BLOCKING: c_uint = 1;
    pub const CU_EVENT_DEFAULT: c_uint = 0;
    pub const CU_EVENT_DISABLE_TIMING: c_uint = 2;
    pub const CU_STREAM_CAPTURE_STATUS_NONE: c_uint = 0;
    pub const CU_STREAM_CAPTURE_STATUS_ACTIVE: c_uint = 1;
    pub const CU_STREAM_CAPTURE_STATUS_INVALIDATED: c_uint = 2;
    pub const CU_STREAM_CAPTURE_MODE_GLOBAL: c_uint = 0;
    pub const CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: c_uint = 1;
    pub const CU_STREAM_CAPTURE_MODE_RELAXED: c_uint = 2;
    pub const CU_MEMORYTYPE_HOST: c_uint = 1;
    pub const CU_POINTER_ATTRIBUTE_MEMORY_TYPE: c_int = 2;
    pub const CU_POINTER_ATTRIBUTE_IS_MANAGED: c_int = 8;
    pub const CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: c_int = 11;
    pub const CU_POINTER_ATTRIBUTE_RANGE_SIZE: c_int = 12;
    pub const CU_USER_OBJECT_NO_DESTRUCTOR_SYNC: c_uint = 1;
    pub const CU_GRAPH_USER_OBJECT_MOVE: c_uint = 1;
    pub const CU_JIT_ERROR_LOG_BUFFER: c_uint = 5;
    pub const CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: c_uint = 6;
    pub const CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: c_int = 16;
    pub const CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: c_int = 39;
    pub const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: c_int = 75;
    pub const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: c_int = 76;
}
pub use constants::*;

/// Declares the table, and how it is filled. A field has the name that `cuda.h` gives the function,
/// the text is the symbol behind it, and every function returns a `CUresult`.
macro_rules! table {
    (
        required { $($name:ident = $symbol:literal ( $($argument:ty),* );)* }
        optional { $($new_name:ident = $new_symbol:literal ( $($new_argument:ty),* );)* }
    ) => {
        /// The driver's functions. Those in an `Option` are newer than the oldest driver that the
        /// library works with.
        #[expect(non_snake_case, reason = "cuda.h's names")]
        #[expect(missing_docs, reason = "cuda.h documents them under the same names")]
        #[derive(Clone, Copy)]
        pub struct Api {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> CUresult,)*
            $(pub $new_name: Option<unsafe extern "C" fn($($new_argument),*) -> CUresult>,)*
        }

        impl Api {
            fn from_library(library: &Library, path: &OsStr) -> Result<Self> {
                Ok(Self {
                    // SAFETY: the symbol is cuda.h's function with these arguments; its symbols
                    // never change their meaning, a changed function gets a new one.
                    $($name: match unsafe { library.get($symbol) } {
                        Ok(symbol) => *symbol,
                        Err(_) => return Err(symbol_missing(path, $symbol)),
                    },)*
                    $(
                        // SAFETY: as above.
                        $new_name: unsafe { library.get($new_symbol) }.ok().map(|symbol| *symbol),
                    )*
                })
            }

            /// Symbols without which the library does not work, for tests.
            #[doc(hidden)]
            pub const REQUIRED: &'static [&'static str] = &[$($symbol),*];
            /// Symbols that an older driver may lack, for tests.
            #[doc(hidden)]
            pub const OPTIONAL: &'static [&'static str] = &[$($new_symbol),*];
        }
    };
}

table! {
    required {
        cuInit = "cuInit"(c_uint);
        cuDriverGetVersion = "cuDriverGetVersion"(*mut c_int);
        cuDeviceGet = "cuDeviceGet"(*mut CUdevice, c_int);
        cuDeviceGetCount = "cuDeviceGetCount"(*mut c_int);
        cuDeviceGetName = "cuDeviceGetName"(*mut c_char, c_int, CUdevice);
        cuDeviceTotalMem = "cuDeviceTotalMem_v2"(*mut usize, CUdevice);
        cuDeviceGetAttribute = "cuDeviceGetAttribute"(*mut c_int, c_int, CUdevice);
        cuDeviceCanAccessPeer = "cuDeviceCanAccessPeer"(*mut c_int, CUdevice, CUdevice);
        cuDevicePrimaryCtxRetain = "cuDevicePrimaryCtxRetain"(*mut CUcontext, CUdevice);
        cuDevicePrimaryCtxRelease = "cuDevicePrimaryCtxRelease_v2"(CUdevice);
        cuDevicePrimaryCtxGetState = "cuDevicePrimaryCtxGetState"(
            CUdevice, *mut c_uint, *mut c_int);
        cuCtxGetCurrent = "cuCtxGetCurrent"(*mut CUcontext);
        cuCtxSetCurrent = "cuCtxSetCurrent"(CUcontext);
        cuCtxGetDevice = "cuCtxGetDevice"(*mut CUdevice);
        cuCtxSynchronize = "cuCtxSynchronize"();

        cuMemGetInfo = "cuMemGetInfo_v2"(*mut usize, *mut usize);
        cuMemGetAllocationGranularity = "cuMemGetAllocationGranularity"(
            *mut usize, *const CUmemAllocationProp, c_uint);
        cuMemAddressReserve = "cuMemAddressReserve"(
            *mut CUdeviceptr, usize, usize, CUdeviceptr, u64);
        cuMemAddressFree = "cuMemAddressFree"(CUdeviceptr, usize);
        cuMemCreate = "cuMemCreate"(
            *mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, u64);
        cuMemRelease = "cuMemRelease"(CUmemGenericAllocationHandle);
        cuMemMap = "cuMemMap"(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, u64);
        cuMemSetAccess = "cuMemSetAccess"(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
        cuMemUnmap = "cuMemUnmap"(CUdeviceptr, usize);
        cuMemAlloc = "cuMemAlloc_v2"(*mut CUdeviceptr, usize);
        cuMemFree = "cuMemFree_v2"(CUdeviceptr);
        cuMemHostAlloc = "cuMemHostAlloc"(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost = "cuMemFreeHost"(*mut c_void);
        cuMemHostRegister = "cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
        cuMemHostUnregister = "cuMemHostUnregister"(*mut c_void);
        cuPointerGetAttributes = "cuPointerGetAttributes"(
            c_uint, *mut c_int, *mut *mut c_void, CUdeviceptr);
        cuMemcpyHtoDAsync = "cuMemcpyHtoDAsync_v2"(CUdeviceptr, *const c_void, usize, CUstream);
        cuMemcpyDtoHAsync = "cuMemcpyDtoHAsync_v2"(*mut c_void, CUdeviceptr, usize, CUstream);
        cuMemsetD8Async = "cuMemsetD8Async"(CUdeviceptr, u8, usize, CUstream);

        cuStreamCreate = "cuStreamCreate"(*mut CUstream, c_uint);
        cuStreamDestroy = "cuStreamDestroy_v2"(CUstream);
        cuStreamSynchronize = "cuStreamSynchronize"(CUstream);
        cuStreamQuery = "cuStreamQuery"(CUstream);
        cuStreamWaitEvent = "cuStreamWaitEvent"(CUstream, CUevent, c_uint);
        cuStreamGetCtx = "cuStreamGetCtx"(CUstream, *mut CUcontext);
        cuStreamIsCapturing = "cuStreamIsCapturing"(CUstream, *mut c_uint);
        cuThreadExchangeStreamCaptureMode = "cuThreadExchangeStreamCaptureMode"(*mut c_uint);
        cuEventCreate = "cuEventCreate"(*mut CUevent, c_uint);
        cuEventDestroy = "cuEventDestroy_v2"(CUevent);
        cuEventRecord = "cuEventRecord"(CUevent, CUstream);
        cuEventQuery = "cuEventQuery"(CUevent);
        cuEventElapsedTime = "cuEventElapsedTime"(*mut f32, CUevent, CUevent);

        cuModuleLoadDataEx = "cuModuleLoadDataEx"(
            *mut CUmodule, *const c_void, c_uint, *mut c_uint, *mut *mut c_void);
        cuModuleGetFunction = "cuModuleGetFunction"(*mut CUfunction, CUmodule, *const c_char);
        cuModuleUnload = "cuModuleUnload"(CUmodule);
        cuLaunchKernel = "cuLaunchKernel"(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
            *mut *mut c_void, *mut *mut c_void);
    }
    optional {
        // CUDA 12.0.
        cuStreamGetId = "cuStreamGetId"(CUstream, *mut u64);
        cuCtxGetId = "cuCtxGetId"(CUcontext, *mut u64);
        // CUDA 12.5.
        cuCtxRecordEvent = "cuCtxRecordEvent"(CUcontext, CUevent);
        // CUDA 11.3, and what cuda.h of CUDA 13 uses instead of it: stream; state, id, graph, nodes
        // (v3: edges too), node count.
        cuStreamGetCaptureInfo_v2 = "cuStreamGetCaptureInfo_v2"(
            CUstream, *mut c_uint, *mut u64, *mut CUgraph, *mut *const usize, *mut usize);
        cuStreamGetCaptureInfo_v3 = "cuStreamGetCaptureInfo_v3"(
            CUstream, *mut c_uint, *mut u64, *mut CUgraph, *mut *const usize, *mut *const c_void,
            *mut usize);
        // CUDA 11.3.
        cuUserObjectCreate = "cuUserObjectCreate"(
            *mut CUuserObject, *mut c_void, CUhostFn, c_uint, c_uint);
        cuUserObjectRelease = "cuUserObjectRelease"(CUuserObject, c_uint);
        cuGraphRetainUserObject = "cuGraphRetainUserObject"(CUgraph, CUuserObject, c_uint, c_uint);
    }
}

impl Api {
    /// Opens the driver's library at `path`, or wherever the dynamic linker finds that name, and
    /// looks every function up. Initialises nothing. The library is never closed again.
    ///
    /// # Errors
    /// `DriverMissing` with the name of the library, or of the first symbol that it lacks.
    pub fn open(path: &OsStr) -> Result<Self> {
        // SAFETY: the driver's library has initialisers that any program linked with it runs; it
        // asks nothing of the process that opens it.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|error| library_missing(path, &error))?;
        // Never closed, also when a symbol is missing: see the top of this file.
        let library = ManuallyDrop::new(library);
        Self::from_library(&library, path)
    }
}

fn library_missing(path: &OsStr, error: &libloading::Error) -> Error {
    let path = path.display();
    // libloading's own text only says that dlopen failed; the reason is the source.
    let reason = std::error::Error::source(error).map_or(error.to_string(), ToString::to_string);
    let text = format!(
        "{path}, the CUDA driver's library, could not be opened ({reason}). Install the NVIDIA \
         driver; in a container, start it with the NVIDIA container runtime (docker run --gpus \
         all). With no GPU, name sim in the place of cuda for the simulated device; where no \
         device is named, VBAR_DRIVER=sim does"
    );
    Error::new(ErrorCode::DriverMissing, text)
}

fn symbol_missing(path: &OsStr, symbol: &str) -> Error {
    let path = path.display();
    let text = format!(
        "{path} has no symbol {symbol}: it is not the CUDA driver's library, or the driver is \
         older than 450.36 (CUDA 11.0), the oldest that vbar works with; install a newer one"
    );
    Error::new(ErrorCode::DriverMissing, text)
}
