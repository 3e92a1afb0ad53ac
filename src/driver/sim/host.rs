//! Page-locked host memory: which ranges copies may read and write behind the caller's back.
//!
//! Owns the ranges given out. A copy whose host side lies in one is asynchronous; any other is
//! pageable, and the call returns only when it has run.
#![expect(unsafe_code, reason = "gives page-locked memory back to the operating system")]

use std::collections::BTreeMap;
use std::ptr::NonNull;

use parking_lot::RwLock;

use super::Core;
use super::os;
use super::verb::Verb;
use crate::driver::{DriverCode, DriverResult};

/// The ranges given out, start to length, whole OS pages.
#[derive(Default)]
pub(super) struct HostMemory {
    ranges: RwLock<BTreeMap<u64, u64>>,
}

const OS_PAGE: u64 = 4096;

impl HostMemory {
    pub(super) fn locked_bytes(&self) -> u64 {
        self.ranges.read().values().sum()
    }

    /// Whether all of the range lies in one page-locked range.
    pub(super) fn contains(&self, address: u64, bytes: u64) -> bool {
        let ranges = self.ranges.read();
        let before = ranges.range(..=address).next_back();
        before.is_some_and(|(&start, &length)| address - start + bytes <= length)
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        for (&start, &bytes) in self.ranges.get_mut().iter() {
            // SAFETY: the range is ours, and the driver that lent it out is gone.
            let _ = unsafe { os::unmap(start, bytes) };
        }
    }
}

impl Core {
    pub(super) fn mem_host_alloc(&self, bytes: usize) -> DriverResult<NonNull<u8>> {
        let verb = Verb::MemHostAlloc;
        let context = self.current(verb)?;
        self.alive(context.device, verb)?;
        let rounded =
            (bytes as u64).checked_next_multiple_of(OS_PAGE).filter(|&rounded| rounded > 0);
        let rounded = rounded.ok_or_else(|| verb.error(DriverCode::INVALID_VALUE))?;
        let start = os::allocate(rounded).map_err(|_| verb.error(DriverCode::OUT_OF_MEMORY))?;
        self.host.ranges.write().insert(start, rounded);
        let memory = std::ptr::with_exposed_provenance_mut(start as usize);
        NonNull::new(memory).ok_or_else(|| verb.error(DriverCode::OUT_OF_MEMORY))
    }

    /// Waits for all work of the process, then frees.
    pub(super) fn mem_free_host(&self, memory: NonNull<u8>) -> DriverResult<()> {
        let verb = Verb::MemFreeHost;
        let context = self.current(verb)?;
        self.alive(context.device, verb)?;
        let start = memory.as_ptr().expose_provenance() as u64;
        if !self.host.ranges.read().contains_key(&start) {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        self.wait_for_device(None);
        if let Some(bytes) = self.host.ranges.write().remove(&start) {
            // SAFETY: the range is ours, no work is pending, and the caller gives it up.
            let _ = unsafe { os::unmap(start, bytes) };
        }
        Ok(())
    }
}
