//! Return codes of the driver as integers with names.
//!
//! An integer and not an enum: a newer driver returns numbers that this source does not know, and
//! an unknown enum value is undefined behaviour. Numbers and names are those of `cuda.h`.

use std::fmt;

/// A `CUresult` as the number that the driver returned.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DriverCode(pub i32);

macro_rules! codes {
    ($($constant:ident = $number:literal, $name:literal;)*) => {
        impl DriverCode {
            $(#[doc = concat!("`", $name, "`")] pub const $constant: Self = Self($number);)*

            /// The name in `cuda.h`, or `CUDA_ERROR_?` for a number that is not known here.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self.0 { $($number => $name,)* _ => "CUDA_ERROR_?" }
            }

            /// Every code known by name, for tests and for parsing options.
            pub const KNOWN: &'static [Self] = &[$(Self::$constant),*];
        }
    };
}

codes! {
    SUCCESS = 0, "CUDA_SUCCESS";
    INVALID_VALUE = 1, "CUDA_ERROR_INVALID_VALUE";
    OUT_OF_MEMORY = 2, "CUDA_ERROR_OUT_OF_MEMORY";
    NOT_INITIALIZED = 3, "CUDA_ERROR_NOT_INITIALIZED";
    DEINITIALIZED = 4, "CUDA_ERROR_DEINITIALIZED";
    STUB_LIBRARY = 34, "CUDA_ERROR_STUB_LIBRARY";
    DEVICE_UNAVAILABLE = 46, "CUDA_ERROR_DEVICE_UNAVAILABLE";
    NO_DEVICE = 100, "CUDA_ERROR_NO_DEVICE";
    INVALID_DEVICE = 101, "CUDA_ERROR_INVALID_DEVICE";
    INVALID_IMAGE = 200, "CUDA_ERROR_INVALID_IMAGE";
    INVALID_CONTEXT = 201, "CUDA_ERROR_INVALID_CONTEXT";
    ALREADY_MAPPED = 208, "CUDA_ERROR_ALREADY_MAPPED";
    NOT_MAPPED = 211, "CUDA_ERROR_NOT_MAPPED";
    ECC_UNCORRECTABLE = 214, "CUDA_ERROR_ECC_UNCORRECTABLE";
    INVALID_PTX = 218, "CUDA_ERROR_INVALID_PTX";
    NVLINK_UNCORRECTABLE = 220, "CUDA_ERROR_NVLINK_UNCORRECTABLE";
    UNSUPPORTED_PTX_VERSION = 222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION";
    OPERATING_SYSTEM = 304, "CUDA_ERROR_OPERATING_SYSTEM";
    INVALID_HANDLE = 400, "CUDA_ERROR_INVALID_HANDLE";
    NOT_FOUND = 500, "CUDA_ERROR_NOT_FOUND";
    NOT_READY = 600, "CUDA_ERROR_NOT_READY";
    ILLEGAL_ADDRESS = 700, "CUDA_ERROR_ILLEGAL_ADDRESS";
    LAUNCH_OUT_OF_RESOURCES = 701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES";
    LAUNCH_TIMEOUT = 702, "CUDA_ERROR_LAUNCH_TIMEOUT";
    CONTEXT_IS_DESTROYED = 709, "CUDA_ERROR_CONTEXT_IS_DESTROYED";
    ASSERT = 710, "CUDA_ERROR_ASSERT";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
    HOST_MEMORY_NOT_REGISTERED = 713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
    HARDWARE_STACK_ERROR = 714, "CUDA_ERROR_HARDWARE_STACK_ERROR";
    ILLEGAL_INSTRUCTION = 715, "CUDA_ERROR_ILLEGAL_INSTRUCTION";
    MISALIGNED_ADDRESS = 716, "CUDA_ERROR_MISALIGNED_ADDRESS";
    INVALID_ADDRESS_SPACE = 717, "CUDA_ERROR_INVALID_ADDRESS_SPACE";
    INVALID_PC = 718, "CUDA_ERROR_INVALID_PC";
    LAUNCH_FAILED = 719, "CUDA_ERROR_LAUNCH_FAILED";
    NOT_PERMITTED = 800, "CUDA_ERROR_NOT_PERMITTED";
    NOT_SUPPORTED = 801, "CUDA_ERROR_NOT_SUPPORTED";
    SYSTEM_NOT_READY = 802, "CUDA_ERROR_SYSTEM_NOT_READY";
    SYSTEM_DRIVER_MISMATCH = 803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
    COMPAT_NOT_SUPPORTED_ON_DEVICE = 804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE";
    MPS_CONNECTION_FAILED = 805, "CUDA_ERROR_MPS_CONNECTION_FAILED";
    MPS_RPC_FAILURE = 806, "CUDA_ERROR_MPS_RPC_FAILURE";
    MPS_SERVER_NOT_READY = 807, "CUDA_ERROR_MPS_SERVER_NOT_READY";
    MPS_MAX_CLIENTS_REACHED = 808, "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED";
    MPS_MAX_CONNECTIONS_REACHED = 809, "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED";
    MPS_CLIENT_TERMINATED = 810, "CUDA_ERROR_MPS_CLIENT_TERMINATED";
    STREAM_CAPTURE_UNSUPPORTED = 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    STREAM_CAPTURE_INVALIDATED = 901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
    STREAM_CAPTURE_MERGE = 902, "CUDA_ERROR_STREAM_CAPTURE_MERGE";
    STREAM_CAPTURE_UNMATCHED = 903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED";
    STREAM_CAPTURE_UNJOINED = 904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED";
    STREAM_CAPTURE_ISOLATION = 905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION";
    STREAM_CAPTURE_IMPLICIT = 906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
    CAPTURED_EVENT = 907, "CUDA_ERROR_CAPTURED_EVENT";
    STREAM_CAPTURE_WRONG_THREAD = 908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD";
    UNKNOWN = 999, "CUDA_ERROR_UNKNOWN";
}

impl DriverCode {
    /// Whether the context is unusable from now on: no later call on the device can succeed.
    #[must_use]
    pub fn is_sticky(self) -> bool {
        matches!(self.0, 214 | 220 | 700 | 702 | 709 | 710 | 714..=719 | 810)
    }

    /// Whether the driver is being torn down because the process exits.
    #[must_use]
    pub fn is_exiting(self) -> bool {
        matches!(self, Self::NOT_INITIALIZED | Self::DEINITIALIZED)
    }

    /// Whether a call was refused because of a stream capture, which says nothing about progress.
    #[must_use]
    pub fn is_capture(self) -> bool {
        (900..=908).contains(&self.0)
    }

    /// Whether the same call may succeed a moment later: memory pressure, or not-ready from calls
    /// that should never return it but do (seen from `cuMemSetAccess` under pressure).
    #[must_use]
    pub fn is_transient(self) -> bool {
        matches!(self, Self::OUT_OF_MEMORY | Self::NOT_READY)
    }
}

impl fmt::Debug for DriverCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name(), self.0)
    }
}

/// A driver call that did not return success.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DriverError {
    /// The call as `cuda.h` names it, `cuMemMap`.
    pub call: &'static str,
    /// What it returned.
    pub code: DriverCode,
}

impl DriverError {
    /// `call` returned `code`.
    #[must_use]
    pub fn new(call: &'static str, code: DriverCode) -> Self {
        Self { call, code }
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} returned {:?}", self.call, self.code)
    }
}

impl std::error::Error for DriverError {}
