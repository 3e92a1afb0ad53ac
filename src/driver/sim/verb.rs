//! The verbs of the door by name: what failures are injected into and calls are counted by.
//!
//! A verb's name is the trait's method, its call the one of `cuda.h` that error texts carry.

use std::fmt;
use std::str::FromStr;

use crate::driver::code::{DriverCode, DriverError};
use crate::names::quoted;

impl Verb {
    /// Those that give something back: what they fail to give back is set aside for good.
    pub const GIVING_BACK: [Self; 8] = [
        Self::MemUnmap,
        Self::MemRelease,
        Self::MemAddressFree,
        Self::MemFreeHost,
        Self::MemHostUnregister,
        Self::StreamDestroy,
        Self::EventDestroy,
        Self::DevicePrimaryCtxRelease,
    ];
}

macro_rules! verbs {
    ($($verb:ident, $name:literal, $call:literal;)*) => {
        /// A method of [`Driver`](crate::driver::Driver).
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum Verb {
            $(#[doc = concat!("`", $name, "`, `", $call, "`")] $verb,)*
        }

        impl Verb {
            /// Every verb, in the order of the trait.
            pub const ALL: &'static [Self] = &[$(Self::$verb),*];

            /// The method's name, `mem_map`.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$verb => $name,)* }
            }

            /// The driver call, `cuMemMap`.
            #[must_use]
            pub fn call(self) -> &'static str {
                match self { $(Self::$verb => $call,)* }
            }
        }
    };
}

verbs! {
    Version, "version", "cuDriverGetVersion";
    DeviceGetCount, "device_get_count", "cuDeviceGetCount";
    DeviceGetName, "device_get_name", "cuDeviceGetName";
    DeviceTotalMem, "device_total_mem", "cuDeviceTotalMem";
    DeviceGetAttribute, "device_get_attribute", "cuDeviceGetAttribute";
    DeviceCanAccessPeer, "device_can_access_peer", "cuDeviceCanAccessPeer";
    DevicePrimaryCtxRetain, "device_primary_ctx_retain", "cuDevicePrimaryCtxRetain";
    DevicePrimaryCtxRelease, "device_primary_ctx_release", "cuDevicePrimaryCtxRelease";
    CtxGetCurrent, "ctx_get_current", "cuCtxGetCurrent";
    CtxSetCurrent, "ctx_set_current", "cuCtxSetCurrent";
    CtxSynchronize, "ctx_synchronize", "cuCtxSynchronize";
    CtxRecordEvent, "ctx_record_event", "cuCtxRecordEvent";
    MemGetInfo, "mem_get_info", "cuMemGetInfo";
    MemGetAllocationGranularity, "mem_get_allocation_granularity", "cuMemGetAllocationGranularity";
    MemAddressReserve, "mem_address_reserve", "cuMemAddressReserve";
    MemAddressFree, "mem_address_free", "cuMemAddressFree";
    MemCreate, "mem_create", "cuMemCreate";
    MemCreateHost, "mem_create_host", "cuMemCreate";
    MemRelease, "mem_release", "cuMemRelease";
    MemMap, "mem_map", "cuMemMap";
    MemSetAccess, "mem_set_access", "cuMemSetAccess";
    MemUnmap, "mem_unmap", "cuMemUnmap";
    MemAlloc, "mem_alloc", "cuMemAlloc";
    MemFree, "mem_free", "cuMemFree";
    MemHostAlloc, "mem_host_alloc", "cuMemHostAlloc";
    MemFreeHost, "mem_free_host", "cuMemFreeHost";
    MemHostRegister, "mem_host_register", "cuMemHostRegister";
    MemHostRegisterReadOnly, "mem_host_register_read_only", "cuMemHostRegister";
    MemHostUnregister, "mem_host_unregister", "cuMemHostUnregister";
    PointerGetHostRange, "pointer_get_host_range", "cuPointerGetAttributes";
    MemcpyHtodAsync, "memcpy_htod_async", "cuMemcpyHtoDAsync";
    MemcpyDtohAsync, "memcpy_dtoh_async", "cuMemcpyDtoHAsync";
    MemsetD8Async, "memset_d8_async", "cuMemsetD8Async";
    StreamCreate, "stream_create", "cuStreamCreate";
    StreamDestroy, "stream_destroy", "cuStreamDestroy";
    StreamSynchronize, "stream_synchronize", "cuStreamSynchronize";
    StreamQuery, "stream_query", "cuStreamQuery";
    StreamWaitEvent, "stream_wait_event", "cuStreamWaitEvent";
    StreamGetId, "stream_get_id", "cuStreamGetId";
    StreamGetContext, "stream_get_context", "cuStreamGetCtx";
    StreamIsCapturing, "stream_is_capturing", "cuStreamIsCapturing";
    ThreadExchangeStreamCaptureMode, "thread_exchange_stream_capture_mode",
        "cuThreadExchangeStreamCaptureMode";
    GraphRetain, "graph_retain", "cuGraphRetainUserObject";
    EventCreate, "event_create", "cuEventCreate";
    EventCreateTimed, "event_create_timed", "cuEventCreate";
    EventElapsed, "event_elapsed", "cuEventElapsedTime";
    EventDestroy, "event_destroy", "cuEventDestroy";
    EventRecord, "event_record", "cuEventRecord";
    EventQuery, "event_query", "cuEventQuery";
    ModuleLoad, "module_load", "cuModuleLoadData";
    LaunchKernel, "launch_kernel", "cuLaunchKernel";
}

impl Verb {
    /// Number of verbs.
    pub const COUNT: usize = Self::ALL.len();

    /// This verb's call has returned `code`.
    pub(super) fn error(self, code: DriverCode) -> DriverError {
        DriverError::new(self.call(), code)
    }

    /// The codes that a random failure of this verb may return. Unmapping and releasing have none:
    /// a program that cannot give back has nothing left to try, so those fail only when asked to.
    pub(super) fn random_failures(self) -> &'static [DriverCode] {
        match self {
            Self::MemCreate | Self::MemCreateHost | Self::MemMap | Self::MemSetAccess => {
                &[DriverCode::OUT_OF_MEMORY, DriverCode::NOT_READY]
            }
            Self::MemAddressReserve
            | Self::MemHostAlloc
            | Self::MemHostRegister
            | Self::MemHostRegisterReadOnly
            | Self::MemcpyHtodAsync
            | Self::MemcpyDtohAsync
            | Self::MemsetD8Async
            | Self::LaunchKernel
            | Self::CtxRecordEvent
            | Self::EventCreate
            | Self::EventCreateTimed
            | Self::EventRecord
            | Self::StreamWaitEvent => &[DriverCode::OUT_OF_MEMORY],
            Self::EventQuery | Self::EventElapsed | Self::StreamQuery => &[DriverCode::NOT_READY],
            _ => &[],
        }
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Verb {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.iter().copied().find(|verb| verb.name() == text).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|verb| verb.name()).collect();
            format!("{} is no driver verb; these are: {}", quoted(text), names.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_back() {
        for verb in Verb::ALL {
            assert_eq!(verb.name().parse::<Verb>(), Ok(*verb));
        }
        assert!("mem_mop".parse::<Verb>().unwrap_err().contains("mem_map"));
    }
}
