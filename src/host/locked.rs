//! Page-locked memory, cut into slots that hold bytes on their way to or from the device.
//!
//! Owns the memory and frees it once. A slot is used by one thread at a time; between the enqueuing
//! of a copy and the passing of its fence nobody touches it: `copy/staging` keeps that rule.

#![expect(unsafe_code, reason = "page-locked memory is a raw pointer of the driver")]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::driver::{Driver, DriverResult};
use crate::error::{Error, ErrorCode, Result};
use crate::process;
use crate::trace::{self, Kind};
use crate::units::{DeviceAddress, Stream};

struct LockedMemory {
    driver: Arc<dyn Driver>,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory belongs to no thread, and the slots made of it do not overlap.
unsafe impl Send for LockedMemory {}
// SAFETY: a shared reference gives no access to the bytes.
unsafe impl Sync for LockedMemory {}

impl Drop for LockedMemory {
    fn drop(&mut self) {
        if process::ending() {
            return;
        }
        // SAFETY: `base` came from `mem_host_alloc` of this driver, and the last slot is gone.
        if let Err(error) = unsafe { self.driver.mem_free_host(self.base) } {
            log::warn!("page-locked memory was not freed: {error}");
            return;
        }
        trace::unlock_bytes(self.bytes);
    }
}

/// A part of page-locked memory that one thread at a time reads or writes.
pub struct LockedSlot {
    memory: Arc<LockedMemory>,
    offset: usize,
    bytes: usize,
}

/// Allocates `count` slots of `bytes` each, the runtime's context current. Takes about 0.8 ms a
/// MiB, during which the driver starts no kernels: do it before the work starts.
///
/// # Errors
/// `HostMemory` with the driver's code.
pub fn allocate(driver: &Arc<dyn Driver>, count: usize, bytes: usize) -> Result<Vec<LockedSlot>> {
    let fail = |reason: String| {
        let text = format!("{count} page-locked slots of {bytes} bytes: {reason}");
        Error::new(ErrorCode::HostMemory, text)
    };
    let total = count.checked_mul(bytes).filter(|total| *total > 0);
    let total = total.ok_or_else(|| fail("no such size".into()))?;
    let span = trace::span(Kind::Register).bytes(total as u64);
    let base = driver.mem_host_alloc(total).map_err(|error| fail(error.to_string()))?;
    drop(span);
    trace::lock_bytes(total);
    let memory = Arc::new(LockedMemory { driver: Arc::clone(driver), base, bytes: total });
    let slot = |index| LockedSlot { memory: Arc::clone(&memory), offset: index * bytes, bytes };
    Ok((0..count).map(slot).collect())
}

impl LockedSlot {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the slot has no bytes, which no slot has.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The bytes. No copy of the slot is pending.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let start = self.start();
        // SAFETY: the slot's range lies in the allocation and is no other slot's; no copy of it is
        // pending, so nothing else reads or writes it while the borrow lasts.
        unsafe { std::slice::from_raw_parts_mut(start, self.bytes) }
    }

    /// Enqueues a copy of `range` of the slot to the device. The slot must not be touched until the
    /// copy is done.
    ///
    /// # Errors
    /// What the driver says; nothing was enqueued then.
    ///
    /// # Panics
    /// When the range leaves the slot.
    pub fn copy_to_device(
        &mut self,
        range: Range<usize>,
        target: DeviceAddress,
        stream: Stream,
    ) -> DriverResult<()> {
        let source = self.bytes_mut()[range.clone()].as_ptr();
        // SAFETY: the range lies in the slot, which lives and stays untouched until the fence of
        // the copy has passed.
        unsafe { self.memory.driver.memcpy_htod_async(target, source, range.len(), stream) }
    }

    /// Enqueues a copy from the device to `range` of the slot; as [`LockedSlot::copy_to_device`].
    ///
    /// # Errors
    /// What the driver says; nothing was enqueued then.
    ///
    /// # Panics
    /// When the range leaves the slot.
    pub fn copy_from_device(
        &mut self,
        range: Range<usize>,
        source: DeviceAddress,
        stream: Stream,
    ) -> DriverResult<()> {
        let target = self.bytes_mut()[range.clone()].as_mut_ptr();
        // SAFETY: as above, for writing.
        unsafe { self.memory.driver.memcpy_dtoh_async(target, source, range.len(), stream) }
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: the offset lies in the allocation, whose size is count x bytes.
        unsafe { self.memory.base.as_ptr().add(self.offset) }
    }
}
