//! Page-locked host memory: which ranges copies may read and write behind the caller's back.
//!
//! Owns the ranges given out, and knows those of the program's own that are registered. A copy
//! whose host side lies in one is asynchronous; any other is pageable, and the call returns only
//! when it has run. A copy across the end of a registered range is refused, as a real device does.
//!
//! Pages of a file are registered for reading only, and only through a shared mapping. A device
//! reads such pages themselves, whatever becomes of the file; here they are read through the
//! mapping by a call that fails where the file was cut short, and there the bytes are those of the
//! registering.
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
    /// Of those, pages of files, with what they were when they were registered.
    file_pages: RwLock<BTreeMap<u64, Vec<u8>>>,
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

    /// The page-locked ranges.
    pub(super) fn locked_ranges(&self) -> Vec<Range<u64>> {
        let both = [&self.ranges, &self.registered];
        let of = |ranges: &RwLock<BTreeMap<u64, u64>>| {
            let ranges = ranges.read();
            ranges.iter().map(|(&start, &bytes)| start..start + bytes).collect::<Vec<_>>()
        };
        both.into_iter().flat_map(of).collect()
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

    /// Whether a part of the range is registered for reading only.
    pub(super) fn is_read_only(&self, address: u64, bytes: u64) -> bool {
        let pages = self.file_pages.read();
        let last = pages.range(..address.saturating_add(bytes)).next_back();
        last.is_some_and(|(start, pages)| start + pages.len() as u64 > address)
    }

    /// Copies from registered pages of a file; `false` where the range is none.
    ///
    /// # Safety
    /// `target` is writable for `bytes`.
    pub(super) unsafe fn copy_file_pages(&self, target: u64, source: u64, bytes: usize) -> bool {
        let pages = self.file_pages.read();
        let Some((start, pages)) = pages.range(..=source).next_back() else { return false };
        let within = (source - start) as usize;
        let Some(known) = pages.get(within..within + bytes) else { return false };
        // SAFETY: the caller's target; the source is only read where it can be.
        unsafe { os::copy_or(target, source, known) };
        true
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
        let of_file = |kind| kind != os::Mapping::Anonymous;
        if !os::is_mapped(start, end) || os::mappings(start, end).into_iter().any(of_file) {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        let _launches = self.launches.write();
        self.enter_registered(start, bytes as u64, verb)
    }

    /// As [`Core::mem_host_register`], of pages of a file, for reading.
    pub(super) fn mem_host_register_read_only(
        &self,
        memory: NonNull<u8>,
        bytes: usize,
    ) -> DriverResult<()> {
        let verb = Verb::MemHostRegisterReadOnly;
        let context = self.current(verb)?;
        self.alive(context.device, verb)?;
        if !self.options.read_only {
            return Err(verb.error(DriverCode::NOT_SUPPORTED));
        }
        let start = memory.as_ptr().expose_provenance() as u64;
        let end = start.checked_add(bytes as u64).filter(|end| *end > start);
        let end = end.ok_or_else(|| verb.error(DriverCode::INVALID_VALUE))?;
        if !os::is_mapped(start, end) {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        if os::mappings(start, end).contains(&os::Mapping::PrivateFile) {
            let text = format!("host memory {start:#x} of {bytes} bytes, a private mapping of a");
            self.violation(context.device, format!("{text} file, was registered: that hangs"));
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        let mut pages = vec![0; bytes];
        // SAFETY: the source is only read where it can be. Pages that cannot are not there to be
        // registered.
        if unsafe { os::copy_readable(pages.as_mut_ptr().expose_provenance() as u64, start, bytes) }
            < bytes
        {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        let _launches = self.launches.write();
        self.enter_registered(start, bytes as u64, verb)?;
        self.host.file_pages.write().insert(start, pages);
        Ok(())
    }

    fn enter_registered(&self, start: u64, bytes: u64, verb: Verb) -> DriverResult<()> {
        let end = start + bytes;
        let taken = |ranges: &BTreeMap<u64, u64>| {
            before(ranges, end - 1).is_some_and(|range| range.end > start)
        };
        let mut registered = self.host.registered.write();
        if taken(&registered) || taken(&self.host.ranges.read()) {
            return Err(verb.error(DriverCode::HOST_MEMORY_ALREADY_REGISTERED));
        }
        registered.insert(start, bytes);
        Ok(())
    }

    /// Waits for all work of the process; a copy of the range that is not done is a breach.
    pub(super) fn mem_host_unregister(&self, memory: NonNull<u8>) -> DriverResult<()> {
        let verb = Verb::MemHostUnregister;
        let context = self.current(verb)?;
        self.alive(context.device, verb)?;
        let start = memory.as_ptr().expose_provenance() as u64;
        let bytes = self.host.registered.read().get(&start).copied();
        let bytes = bytes.ok_or_else(|| {
            let around = before(&self.host.registered.read(), start);
            verb.error(match around.is_some_and(|range| range.contains(&start)) {
                true => DriverCode::INVALID_VALUE,
                false => DriverCode::HOST_MEMORY_NOT_REGISTERED,
            })
        })?;
        if let Some(Point { stream, number }) = self.host.pending_copy(&(start..start + bytes)) {
            let (at, stream_id) = (context.device, stream.id);
            let text = format!("host memory {start:#x} of {bytes} bytes was unregistered while");
            self.violation(at, format!("{text} stream {stream_id} operation {number} copies it"));
        }
        if !os::is_mapped(start, start + bytes) {
            let text = format!("host memory {start:#x} of {bytes} bytes was unmapped while");
            self.violation(context.device, format!("{text} it was registered"));
        }
        self.wait_for_device(None);
        self.host.registered.write().remove(&start);
        self.host.file_pages.write().remove(&start);
        Ok(())
    }
}
