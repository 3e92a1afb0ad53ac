//! Page-locked host memory: which ranges copies may read and write behind the caller's back.
//!
//! Owns the ranges given out, and knows those of the program's own that are registered. A copy
//! whose host side lies in one is asynchronous; any other is pageable, and the call returns only
//! when it has run. A copy across the end of a registered range is refused, as a real device does.
#![expect(unsafe_code, reason = "gives page-locked memory back to the operating system")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;

use parking_lot::{Mutex, RwLock};

use super::Core;
use super::os;
use super::stream::Point;
use super::verb::Verb;
use crate::driver::{DriverCode, DriverResult};

/// The ranges that are page-locked.
#[derive(Default)]
pub(super) struct HostMemory {
    /// Given out, start to length, whole OS pages.
    ranges: RwLock<BTreeMap<u64, u64>>,
    /// The program's own memory, start to length.
    registered: RwLock<BTreeMap<u64, u64>>,
    /// Copies of registered memory that were not seen to be done, with its bytes.
    copies: Mutex<Vec<(Point, Range<u64>)>>,
}

/// The range that begins last of those at or before `address`.
fn before(ranges: &BTreeMap<u64, u64>, address: u64) -> Option<Range<u64>> {
    let (&start, &bytes) = ranges.range(..=address).next_back()?;
    Some(start..start + bytes)
}

const OS_PAGE: u64 = 4096;

impl HostMemory {
    pub(super) fn locked_bytes(&self) -> u64 {
        self.ranges.read().values().sum::<u64>() + self.registered.read().values().sum::<u64>()
    }

    /// Whether all of the range lies in one page-locked range.
    pub(super) fn contains(&self, address: u64, bytes: u64) -> bool {
        [&self.ranges, &self.registered].into_iter().any(|ranges| {
            let before = before(&ranges.read(), address);
            before.is_some_and(|range| address - range.start + bytes <= range.end - range.start)
        })
    }

    /// The page-locked range that an address lies in.
    pub(super) fn range_at(&self, address: u64) -> Option<Range<u64>> {
        [&self.ranges, &self.registered].into_iter().find_map(|ranges| {
            before(&ranges.read(), address).filter(|range| range.contains(&address))
        })
    }

    /// Whether the range lies in registered memory in part, or in more than one range of it.
    pub(super) fn is_cut(&self, address: u64, bytes: u64) -> bool {
        let touched = before(&self.registered.read(), address.saturating_add(bytes - 1));
        touched.is_some_and(|range| range.end > address) && !self.contains(address, bytes)
    }

    /// Remembers a copy of registered memory.
    pub(super) fn note_copy(&self, point: Point, bytes: Range<u64>) {
        if before(&self.registered.read(), bytes.start).is_some_and(|range| range.end > bytes.start)
        {
            let mut copies = self.copies.lock();
            copies.retain(|(point, _)| !point.passed());
            copies.push((point, bytes));
        }
    }

    /// A copy of bytes in `range` that is not done.
    fn pending_copy(&self, range: &Range<u64>) -> Option<Point> {
        let copies = self.copies.lock();
        let pending = copies.iter().find(|(point, bytes)| {
            !point.passed() && bytes.start < range.end && range.start < bytes.end
        });
        pending.map(|(point, _)| point.clone())
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

    /// Launches wait for as long as it takes.
    pub(super) fn mem_host_register(&self, memory: NonNull<u8>, bytes: usize) -> DriverResult<()> {
        let verb = Verb::MemHostRegister;
        let context = self.current(verb)?;
        self.alive(context.device, verb)?;
        let start = memory.as_ptr().expose_provenance() as u64;
        let end = start.checked_add(bytes as u64).filter(|end| *end > start);
        let end = end.ok_or_else(|| verb.error(DriverCode::INVALID_VALUE))?;
        if !os::is_mapped(start, end) {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        let _launches = self.launches.write();
        let taken = |ranges: &BTreeMap<u64, u64>| {
            before(ranges, end - 1).is_some_and(|range| range.end > start)
        };
        let mut registered = self.host.registered.write();
        if taken(&registered) || taken(&self.host.ranges.read()) {
            return Err(verb.error(DriverCode::HOST_MEMORY_ALREADY_REGISTERED));
        }
        registered.insert(start, bytes as u64);
        Ok(())
    }

    /// Waits for all work of the process; a copy of the range that is not done is a breach.
    pub(super) fn mem_host_unregister(&self, memory: NonNull<u8>) -> DriverResult<()> {
        let verb = Verb::MemHostUnregister;
        let context = self.current(verb)?;
        self.alive(context.device, verb)?;
        let start = memory.as_ptr().expose_provenance() as u64;
        let bytes = self.host.registered.read().get(&start).copied();
        let bytes = bytes.ok_or_else(|| verb.error(DriverCode::HOST_MEMORY_NOT_REGISTERED))?;
        if let Some(Point { stream, number }) = self.host.pending_copy(&(start..start + bytes)) {
            let (at, stream_id) = (context.device, stream.id);
            let text = format!("host memory {start:#x} of {bytes} bytes was unregistered while");
            self.violation(at, format!("{text} stream {stream_id} operation {number} copies it"));
        }
        self.wait_for_device(None);
        self.host.registered.write().remove(&start);
        Ok(())
    }
}
