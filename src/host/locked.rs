//! Page-locked memory, cut into slots that hold bytes on their way to or from the device.
//!
//! Owns the memory and gives it back once. It comes from the driver, or is a *window*: anonymous
//! memory of ours that is registered with the driver once it has been touched, many times quicker.
//! A slot is used by one thread at a time, which may lend parts of it that do not overlap to
//! others; between the enqueuing of a copy and the passing of its fence nobody touches it:
//! `copy/staging`, `copy/cache` and, of parts, `copy/saved` keep that rule.

#![expect(unsafe_code, reason = "page-locked memory is a raw pointer of the driver")]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::driver::{Driver, DriverResult};
use crate::error::{Error, ErrorCode, Result};
use crate::host::anonymous::AnonymousMemory;
use crate::host::own;
use crate::process;
use crate::sync::fixed::{AtomicBool, AtomicU64};
use crate::sync::{AcqRel, Acquire, Relaxed, Release};
use crate::trace::{self, Kind};
use crate::units::{DeviceAddress, Stream};

struct LockedMemory {
    driver: Arc<dyn Driver>,
    base: NonNull<u8>,
    bytes: usize,
    /// The mapping behind a window; the driver's own memory has none.
    window: Option<AnonymousMemory>,
    /// Whether the device may read it directly.
    locked: AtomicBool,
    /// Whether the driver has been asked to let it go.
    gone: bool,
}

// SAFETY: the memory belongs to no thread, and the slots made of it do not overlap.
unsafe impl Send for LockedMemory {}
// SAFETY: a shared reference gives no access to the bytes.
unsafe impl Sync for LockedMemory {}

impl LockedMemory {
    fn register(&self) -> DriverResult<()> {
        if !self.locked.load(Acquire) {
            // SAFETY: the window is mapped, and stays so until it is unregistered in `drop`.
            unsafe { self.driver.mem_host_register(self.base, self.bytes) }?;
            self.locked.store(true, Release);
            own::enter(self.base);
            trace::lock_bytes(self.bytes);
        }
        Ok(())
    }

    fn give_back(&mut self) -> DriverResult<()> {
        own::leave(self.base);
        let given_back = match (&self.window, *self.locked.get_mut()) {
            // SAFETY: `base` came from `mem_host_alloc` of this driver, and the last slot is gone.
            (None, _) => unsafe { self.driver.mem_free_host(self.base) },
            (Some(_), true) => self.driver.mem_host_unregister(self.base),
            (Some(_), false) => Ok(()),
        };
        if given_back.is_err() {
            own::enter(self.base);
        }
        given_back
    }

    /// Once. What the driver does not let go the device may still read: it stays mapped.
    fn free(&mut self) -> DriverResult<()> {
        self.gone = true;
        let locked = *self.locked.get_mut();
        let mut freed = self.give_back();
        if freed.is_err_and(|error| error.code.is_transient()) {
            // Nobody will come again.
            freed = self.give_back();
        }
        match freed {
            Ok(()) => trace::unlock_bytes(if locked { self.bytes } else { 0 }),
            Err(error) => {
                log::warn!("page-locked memory was not freed: {error}");
                std::mem::forget(self.window.take());
            }
        }
        freed
    }
}

impl Drop for LockedMemory {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        if process::ending() {
            std::mem::forget(self.window.take());
        } else {
            let _told = self.free();
        }
    }
}

/// A part of page-locked memory that one thread at a time reads or writes.
pub struct LockedSlot {
    memory: Arc<LockedMemory>,
    offset: usize,
    bytes: usize,
    /// Parts that are lent.
    lent: Arc<AtomicU64>,
}

/// A part of a slot in another thread's hands, until it is dropped.
pub struct LentPart {
    memory: Arc<LockedMemory>,
    start: usize,
    bytes: usize,
    lent: Arc<AtomicU64>,
}

/// What registers a window while its slot is elsewhere.
pub struct Registrar(Arc<LockedMemory>);

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
    own::enter(base);
    let driver = Arc::clone(driver);
    let locked = AtomicBool::new(true);
    let memory =
        Arc::new(LockedMemory { driver, base, bytes: total, window: None, locked, gone: false });
    Ok((0..count).map(|index| LockedSlot::new(&memory, index * bytes, bytes)).collect())
}

/// Maps a window of `bytes`: ordinary memory, nothing behind it yet, that
/// [`LockedSlot::register`] locks. It begins where a huge page does.
///
/// # Errors
/// `HostMemory` when the operating system has no addresses for it.
pub fn map_window(driver: &Arc<dyn Driver>, bytes: usize) -> Result<LockedSlot> {
    let fail = |reason: String| {
        Error::new(ErrorCode::HostMemory, format!("a window of {bytes} bytes: {reason}"))
    };
    let window = AnonymousMemory::map(bytes).map_err(|error| fail(error.to_string()))?;
    let base = window.base();
    let (driver, locked) = (Arc::clone(driver), AtomicBool::new(false));
    let memory =
        Arc::new(LockedMemory { driver, base, bytes, window: Some(window), locked, gone: false });
    Ok(LockedSlot::new(&memory, 0, bytes))
}

/// A window of `bytes` that is locked at once, the runtime's context current; the driver touches
/// it.
///
/// # Errors
/// `HostMemory` where it cannot be mapped; what the driver says where it does not lock it.
pub fn lock_window(driver: &Arc<dyn Driver>, bytes: usize) -> Result<LockedSlot> {
    let slot = map_window(driver, bytes)?;
    let span = trace::span(Kind::Register).bytes(bytes as u64);
    let registered = slot.register();
    drop(span);
    registered.map(|()| slot).map_err(|error| {
        Error::from(error).context(format_args!("a page-locked window of {bytes} bytes"))
    })
}

impl LockedSlot {
    fn new(memory: &Arc<LockedMemory>, offset: usize, bytes: usize) -> Self {
        Self { memory: Arc::clone(memory), offset, bytes, lent: Arc::default() }
    }

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

    /// Whether the device reads it directly: not a window before it is registered.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.memory.locked.load(Acquire)
    }

    /// Locks a window, the runtime's context current. The driver starts no kernels meanwhile,
    /// under 1 ms for 16 MiB that have been touched. Again: does nothing.
    ///
    /// # Errors
    /// What the driver says; the window is ordinary memory then.
    pub fn register(&self) -> DriverResult<()> {
        self.memory.register()
    }

    /// Gives the memory back if this is its last slot, the runtime's context current.
    ///
    /// # Errors
    /// What the driver says; it keeps the memory then, and so does the process.
    pub fn free(self) -> DriverResult<()> {
        Arc::into_inner(self.memory).map_or(Ok(()), |mut memory| memory.free())
    }

    /// What locks the window later.
    #[must_use]
    pub fn registrar(&self) -> Registrar {
        Registrar(Arc::clone(&self.memory))
    }

    /// The bytes. No copy of the slot is pending.
    ///
    /// # Panics
    /// While a part is lent.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.check_whole();
        let start = self.start();
        // SAFETY: the slot's range lies in the allocation and is no other slot's; no part is lent
        // and no copy of it is pending, so nothing else touches it while the borrow lasts.
        unsafe { std::slice::from_raw_parts_mut(start, self.bytes) }
    }

    /// Lends parts of the slot, which come back when they are dropped. No copy of it is pending.
    ///
    /// # Panics
    /// While a part is lent, and when the ranges are not in order, overlap, or leave the slot.
    pub fn lend(&mut self, ranges: impl IntoIterator<Item = Range<usize>>) -> Vec<LentPart> {
        self.check_whole();
        let mut end = 0;
        let parts = ranges.into_iter().map(|range| {
            assert!(end <= range.start && range.start <= range.end, "parts overlap");
            end = range.end;
            assert!(end <= self.bytes, "a part leaves its slot");
            self.lent.fetch_add(1, Relaxed);
            LentPart {
                memory: Arc::clone(&self.memory),
                start: self.offset + range.start,
                bytes: range.end - range.start,
                lent: Arc::clone(&self.lent),
            }
        });
        parts.collect()
    }

    /// Enqueues a copy of `range` of the slot to the device. The slot must not be touched until the
    /// copy is done.
    ///
    /// # Errors
    /// What the driver says; nothing was enqueued then.
    ///
    /// # Panics
    /// When the range leaves the slot, or a part is lent.
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
    /// When the range leaves the slot, or a part is lent.
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

    /// A part of a window as a slot of its own. Parts that are there do not overlap, and nobody
    /// touches the window's own bytes meanwhile: `host/carved` keeps that rule.
    pub(super) fn part(&self, range: Range<usize>) -> Self {
        assert!(range.start < range.end && range.end <= self.bytes, "a part leaves its slot");
        Self::new(&self.memory, self.offset + range.start, range.len())
    }

    /// Address of the first byte.
    pub(super) fn base(&self) -> *const u8 {
        self.start()
    }

    fn check_whole(&self) {
        assert_eq!(self.lent.load(Acquire), 0, "a part of the slot is lent");
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: the offset lies in the allocation, whose size is count x bytes.
        unsafe { self.memory.base.as_ptr().add(self.offset) }
    }
}

impl Registrar {
    /// As [`LockedSlot::register`].
    ///
    /// # Errors
    /// What the driver says.
    pub fn register(&self) -> DriverResult<()> {
        self.0.register()
    }
}

impl LentPart {
    /// The bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the part lies in the allocation, as its slot checked.
        let start = unsafe { self.memory.base.as_ptr().add(self.start) };
        // SAFETY: no other part has these bytes, and their slot refuses to touch any of its own
        // until this part is dropped.
        unsafe { std::slice::from_raw_parts_mut(start, self.bytes) }
    }
}

impl Drop for LentPart {
    fn drop(&mut self) {
        self.lent.fetch_sub(1, AcqRel);
    }
}

#[cfg(test)]
#[cfg(not(vbar_loom))]
mod tests {
    use super::*;
    use crate::driver::sim::{Sim, SimOptions};
    use crate::units::DeviceOrdinal;

    fn sim() -> Arc<Sim> {
        let sim = Sim::new(SimOptions::parse("capacity=1M,granularity=64K").unwrap());
        let context = sim.device_primary_ctx_retain(DeviceOrdinal(0)).unwrap();
        sim.ctx_set_current(Some(context)).unwrap();
        sim
    }

    #[test]
    fn parts_are_written_by_other_threads_and_come_back() {
        let sim = sim();
        let mut slot = map_window(&sim.driver(), 8192).unwrap();
        assert!(!slot.is_locked());
        let parts = slot.lend([0..10, 10..4096, 5000..8192]);
        std::thread::scope(|scope| {
            for (number, mut part) in (1..).zip(parts) {
                scope.spawn(move || part.bytes_mut().fill(number));
            }
        });
        slot.registrar().register().unwrap();
        assert!(slot.is_locked());
        assert_eq!(sim.locked_bytes(), 8192);
        let bytes = slot.bytes_mut();
        assert_eq!((bytes[9], bytes[10], bytes[4096], bytes[8191]), (1, 2, 0, 3));
        drop(slot);
        assert_eq!((sim.locked_bytes(), sim.violations()), (0, vec![]));
    }

    #[test]
    #[should_panic(expected = "a part of the slot is lent")]
    fn a_slot_is_not_touched_while_a_part_is_lent() {
        let sim = sim();
        let mut slot = map_window(&sim.driver(), 4096).unwrap();
        let _parts = slot.lend([0..1, 1..4096]);
        slot.bytes_mut()[4000] = 1;
    }

    #[test]
    #[should_panic(expected = "parts overlap")]
    fn parts_do_not_overlap() {
        let sim = sim();
        let _parts = map_window(&sim.driver(), 4096).unwrap().lend([0..9, 8..10]);
    }
}
