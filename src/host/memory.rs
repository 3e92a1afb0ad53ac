//! Host memory of the program that VBARs are filled from.
//!
//! Owns what keeps the memory alive, and gives it up once, when the VBAR is gone and the last
//! [`HostLease`] has been dropped: whoever reads the bytes, or has a copy of them enqueued, holds a
//! lease until that is done. Knows whether the memory is page-locked, by asking the driver once,
//! and where its ranges end: a copy must not cross such an end. Locks nothing itself.

#![expect(unsafe_code, reason = "reads memory of the program behind a raw pointer")]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::driver::{Driver, DriverResult};
use crate::error::{Error, ErrorCode, Result};
use crate::host::carved::Part;
use crate::process;
use crate::sync::Mutex;
use crate::units::{DeviceAddress, Stream};

/// What a binding asks of host memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HostLock {
    /// The driver is asked: the device reads page-locked memory directly, other memory goes through
    /// the library's own.
    #[default]
    Either,
    /// It must be page-locked, all of it; else it is not bound.
    Required,
}

/// Bytes of the program's own that a VBAR can be bound to, as it can be to a file.
///
/// The bytes must not change while the VBAR is bound: what is resident, or in the page-locked
/// cache, would not follow. Its owner is dropped exactly once, by whichever thread of program or
/// library is there when the last copy of the bytes is done after the VBAR was closed; where that
/// is never seen (a lost device, an ending process) it is not dropped at all. An owner's `drop` may
/// call the driver, and must not call this library.
pub struct HostMemory {
    base: NonNull<u8>,
    bytes: usize,
    lock: HostLock,
    /// Where the page-locked ranges end that it consists of, from its start, rising; the last one
    /// is its length. Empty unless all of it is page-locked.
    locked_ends: Vec<u64>,
    /// Empty once nobody may ask for the bytes any more.
    lease: Mutex<Option<HostLease>>,
}

/// Keeps host memory alive for one reader. A clone is one more.
#[derive(Clone)]
pub struct HostLease(Arc<Owned>);

struct Owned {
    base: NonNull<u8>,
    bytes: usize,
    /// A box that was taken apart: a box that is moved says that nobody else points into it.
    owner: NonNull<dyn Send>,
}

// SAFETY: the memory belongs to no thread, and a shared reference only reads it.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}
// SAFETY: as above; the owner, which may be sent, is not touched before it is dropped.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl HostMemory {
    /// The bytes of a value that owns them: a `Vec<u8>`, an `Arc<[u8]>`, a mapping, a `&'static`
    /// slice.
    ///
    /// # Errors
    /// `InvalidArgument` for one of no bytes.
    pub fn new<T: AsRef<[u8]> + Send + 'static>(owner: T) -> Result<Self> {
        // In its last place before it is asked: a value may hold its bytes in itself.
        let owner = NonNull::from(Box::leak(Box::new(owner)));
        // SAFETY: the box has just been leaked, and nobody else knows it.
        let bytes: &[u8] = unsafe { owner.as_ref() }.as_ref();
        let (base, length) = (NonNull::from(bytes).cast::<u8>(), bytes.len());
        // SAFETY: the slice was borrowed from the owner, which from now on is neither moved nor
        // touched until it is dropped.
        unsafe { Self::of(base, length, owner) }
    }

    /// `bytes` bytes at `pointer`, which `owner` keeps alive: it is dropped when they are not read
    /// any more.
    ///
    /// # Errors
    /// `InvalidArgument` for NULL, for no bytes, and for a range that does not end in the address
    /// space; the owner is dropped then.
    ///
    /// # Safety
    /// Until the owner is dropped the bytes are mapped and readable, and nobody writes them. Copies
    /// of them are enqueued and wait: that they could be read when this was called is not enough.
    pub unsafe fn from_raw(
        pointer: *const u8,
        bytes: usize,
        owner: impl Send + 'static,
    ) -> Result<Self> {
        let Some(base) = NonNull::new(pointer.cast_mut()) else {
            return Err(refusal("host memory at NULL"));
        };
        // SAFETY: as the caller promises; the owner was a box.
        unsafe { Self::of(base, bytes, NonNull::from(Box::leak(Box::new(owner)))) }
    }

    /// Page-locked memory of the library's own, which the device writes before anybody reads it:
    /// copies from it are ordered behind the one to it.
    ///
    /// # Errors
    /// As [`HostMemory::from_raw`].
    pub fn of_part(part: Part) -> Result<Self> {
        let (base, bytes) = (part.base(), part.len());
        // SAFETY: the part keeps its bytes mapped until it is dropped, and nobody else has them.
        let memory = unsafe { Self::from_raw(base, bytes, part) }?;
        Ok(Self { locked_ends: vec![bytes as u64], ..memory })
    }

    /// # Safety
    /// As [`HostMemory::from_raw`]; the owner is a box that was leaked, and is given up.
    unsafe fn of(base: NonNull<u8>, bytes: usize, owner: NonNull<dyn Send>) -> Result<Self> {
        let lease = HostLease(Arc::new(Owned { base, bytes, owner }));
        if bytes == 0 {
            return Err(refusal("host memory of no bytes"));
        }
        let in_space = isize::try_from(bytes).is_ok()
            && (base.as_ptr().addr() as u64).checked_add(bytes as u64).is_some();
        if !in_space {
            let text =
                format!("{bytes} bytes of host memory at {base:p} end past the address space");
            return Err(refusal(text));
        }
        let (lease, locked_ends) = (Mutex::new(Some(lease)), Vec::new());
        Ok(Self { base, bytes, lock: HostLock::Either, locked_ends, lease })
    }

    /// Asks for memory that is page-locked, or not.
    #[must_use]
    pub fn with_lock(self, lock: HostLock) -> Self {
        Self { lock, ..self }
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// What errors call it.
    #[must_use]
    pub fn name(&self) -> String {
        format!("host memory of {} bytes at {:p}", self.bytes, self.base)
    }

    /// Asks the driver which ranges of it are page-locked. It must stay so, in the same ranges, for
    /// as long as it is bound.
    ///
    /// # Errors
    /// `InvalidArgument` when it must be page-locked and is not, naming the first byte that is not;
    /// what the driver says.
    pub fn find_locked(
        &mut self,
        range_at: impl Fn(u64) -> Result<Option<Range<u64>>>,
    ) -> Result<()> {
        let start = self.base.as_ptr().expose_provenance() as u64;
        let (bytes, mut ends, mut known) = (self.bytes(), Vec::new(), 0);
        while known < bytes {
            // A range that does not reach past the byte would be asked for again and again.
            let Some(range) = range_at(start + known)?.filter(|range| range.end > start + known)
            else {
                break;
            };
            known = (range.end - start).min(bytes);
            ends.push(known);
        }
        if known < bytes {
            ends.clear();
        }
        if known < bytes && self.lock == HostLock::Required {
            let text = format!("{} is not page-locked from byte {known} on", self.name());
            return Err(refusal(text));
        }
        self.locked_ends = ends;
        Ok(())
    }

    /// Whether all of it is page-locked, as far as the driver was asked.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        !self.locked_ends.is_empty()
    }

    /// The end of the page-locked range that a byte lies in, both from the start of the memory.
    ///
    /// # Panics
    /// When the memory is not page-locked, or does not have the byte.
    #[must_use]
    pub fn locked_end(&self, at: u64) -> u64 {
        self.locked_ends[self.locked_ends.partition_point(|end| *end <= at)]
    }

    /// Keeps the memory alive.
    ///
    /// # Errors
    /// `Closed` when the VBAR that was bound to it is gone.
    pub fn lease(&self) -> Result<HostLease> {
        self.lease.lock().clone().ok_or_else(|| {
            let text = format!("{}: its VBAR is closed", self.name());
            Error::new(ErrorCode::Closed, text)
        })
    }

    /// Whether nobody gets a lease any more.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.lease.lock().is_none()
    }

    /// Nobody gets a lease from now on. What is returned is the memory's own.
    pub fn end_leases(&self) -> Option<HostLease> {
        self.lease.lock().take()
    }
}

impl HostLease {
    /// The bytes of a range, from the start of the memory.
    ///
    /// # Panics
    /// When the range leaves the memory.
    #[must_use]
    pub fn bytes(&self, range: Range<u64>) -> &[u8] {
        // SAFETY: whoever made the memory promised that these bytes can be read, and are written by
        // nobody, until the owner is dropped, which this lease prevents.
        let all = unsafe { std::slice::from_raw_parts(self.0.base.as_ptr(), self.0.bytes) };
        &all[range.start as usize..range.end as usize]
    }

    /// Enqueues a copy of a range, from the start of the memory, to the device. A lease must be
    /// kept until the copy is done.
    ///
    /// # Errors
    /// What the driver says; nothing was enqueued then.
    ///
    /// # Panics
    /// When the range leaves the memory.
    pub fn copy_to_device(
        &self,
        driver: &dyn Driver,
        range: Range<u64>,
        target: DeviceAddress,
        stream: Stream,
    ) -> DriverResult<()> {
        let bytes = self.bytes(range);
        // SAFETY: the bytes stay as they are until the owner is dropped, and `copy/host_copies`
        // keeps a lease until the copy is done.
        unsafe { driver.memcpy_htod_async(target, bytes.as_ptr(), bytes.len(), stream) }
    }

    /// Whether there is no other lease. Once the memory is given up that stays so.
    #[must_use]
    pub fn is_last(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// What tells this memory from any other that is alive.
    #[must_use]
    pub fn key(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // A forked child's memory is its parent's, and at the end of a process the owner's code may
        // be gone: there it stays.
        if !process::ending() {
            // SAFETY: it was a box, which nobody else has; this is dropped once.
            drop(unsafe { Box::from_raw(self.owner.as_ptr()) });
        }
    }
}

fn refusal(text: impl Into<String>) -> Error {
    Error::new(ErrorCode::InvalidArgument, text)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    struct Counted(Vec<u8>, Arc<AtomicU32>);
    impl AsRef<[u8]> for Counted {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    impl Drop for Counted {
        fn drop(&mut self) {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn the_owner_goes_once_with_the_last_lease() {
        let drops = Arc::<AtomicU32>::default();
        let memory = HostMemory::new(Counted(vec![3; 10], Arc::clone(&drops))).unwrap();
        let lease = memory.lease().unwrap();
        let other = lease.clone();
        assert_eq!((lease.key(), lease.bytes(2..4)), (other.key(), &[3, 3][..]));
        drop(memory.end_leases());
        assert_eq!(memory.lease().err().unwrap().code(), ErrorCode::Closed);
        assert!(memory.end_leases().is_none());
        drop(memory);
        drop(lease);
        assert_eq!((drops.load(Ordering::Relaxed), other.bytes(0..10)), (0, &[3; 10][..]));
        drop(other);
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn what_is_no_memory_is_refused_and_its_owner_dropped() {
        let drops = Arc::<AtomicU32>::default();
        let counted = || Counted(vec![], Arc::clone(&drops));
        let byte = 0u8;
        let high = std::ptr::without_provenance(usize::MAX - 7);
        assert!(HostMemory::new(counted()).is_err());
        for (pointer, bytes, says) in [
            (std::ptr::null(), 8, "NULL"),
            (&raw const byte, 0, "no bytes"),
            (&raw const byte, usize::MAX, "address space"),
            (high, 9, "address space"),
        ] {
            // SAFETY: refused before a byte is read.
            let made = unsafe { HostMemory::from_raw(pointer, bytes, counted()) };
            let error = made.err().unwrap();
            assert_eq!(error.code(), ErrorCode::InvalidArgument);
            assert!(error.to_string().contains(says), "{error}");
        }
        assert_eq!(drops.load(Ordering::Relaxed), 5);
    }

    /// Finds the ranges of ten bytes among `ranges`, told from the memory's start.
    fn ends(ranges: &[Range<u64>], lock: HostLock) -> Result<Vec<u64>> {
        let mut memory = HostMemory::new(vec![0; 10])?.with_lock(lock);
        let start = memory.base.as_ptr().addr() as u64;
        memory.find_locked(|at| {
            let found = ranges.iter().find(|range| range.contains(&(at - start)));
            Ok(found.map(|range| range.start + start..range.end + start))
        })?;
        Ok(memory.locked_ends)
    }

    #[test]
    fn memory_is_locked_when_ranges_that_touch_cover_it() {
        let either = |ranges: &[Range<u64>]| ends(ranges, HostLock::Either).unwrap();
        assert_eq!(either(&[0..10, 90..95]), [10]);
        assert_eq!(either(&[0..4, 4..5, 5..99]), [4, 5, 10]);
        assert_eq!(either(&[0..4, 5..10]), [0u64; 0]);
        assert_eq!(either(&[1..3, 3..10]), [0u64; 0]);
        assert_eq!(either(&[]), [0u64; 0]);
        assert_eq!(ends(&[0..7, 7..10], HostLock::Required).unwrap(), [7, 10]);
        let error = ends(&[0..7, 8..10], HostLock::Required).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
        assert!(error.to_string().contains("not page-locked from byte 7 on"), "{error}");
    }

    #[test]
    fn a_byte_is_in_the_range_that_ends_behind_it() {
        let mut memory = HostMemory::new(vec![0; 10]).unwrap();
        memory.locked_ends = vec![4, 5, 10];
        assert_eq!([0, 3, 4, 5, 9].map(|at| memory.locked_end(at)), [4, 4, 5, 10, 10]);
    }
}
