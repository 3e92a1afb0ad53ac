//! Memory that the driver places by itself, on the device and in page-locked host memory.
#![expect(unsafe_code, reason = "calls into the driver, and zeros memory that it gave out")]

use std::ffi::c_void;
use std::ptr::NonNull;

use super::{Cuda, check, output};
use crate::driver::sys::CU_MEMHOSTALLOC_PORTABLE;
use crate::driver::{DriverCode, DriverError, DriverResult};
use crate::units::DeviceAddress;

impl Cuda {
    /// `mem_alloc`.
    pub(super) fn linear_alloc(&self, bytes: u64) -> DriverResult<DeviceAddress> {
        let address = output("cuMemAlloc", |address| {
            // SAFETY: `address` is a valid place for the result.
            unsafe { (self.api.cuMemAlloc)(address, bytes as usize) }
        })?;
        Ok(DeviceAddress(address))
    }

    /// `mem_free`.
    pub(super) fn linear_free(&self, address: DeviceAddress) -> DriverResult<()> {
        // SAFETY: the driver looks the address up among its allocations, and waits for the work
        // that uses it. Host memory is not reached through device addresses.
        check("cuMemFree", unsafe { (self.api.cuMemFree)(address.0) })
    }

    /// `mem_host_alloc`.
    pub(super) fn host_alloc(&self, bytes: usize) -> DriverResult<NonNull<u8>> {
        const CALL: &str = "cuMemHostAlloc";
        let mut memory: *mut c_void = std::ptr::null_mut();
        // SAFETY: `memory` is a valid place for the result.
        let code =
            unsafe { (self.api.cuMemHostAlloc)(&mut memory, bytes, CU_MEMHOSTALLOC_PORTABLE) };
        check(CALL, code)?;
        let memory = NonNull::new(memory.cast::<u8>());
        let memory = memory.ok_or(DriverError::new(CALL, DriverCode::OUT_OF_MEMORY))?;
        // The driver cuts small requests from memory that it has used before, and the contract
        // promises zeros. Small beside the cost of the call, 50 ms for 64 MiB.
        // SAFETY: the driver gave out `bytes` bytes that nobody else knows of yet.
        unsafe { memory.write_bytes(0, bytes) };
        Ok(memory)
    }
}
