//! A window of a file's pages that the device reads itself: a shared mapping, registered read-only.
//!
//! Owns the mapping, which is never read here: a file that was cut short would kill the process. It
//! keeps its file open, and with that the file's lock, as long as the pages are registered. What a
//! device may still read is not unmapped: where the driver does not let go, the mapping stays.

#![expect(unsafe_code, reason = "registers a mapping, and gives its address to the driver")]

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{Advice, fadvise, fstat};

use crate::driver::{Driver, DriverCode, DriverError, DriverResult};
use crate::error::{Error, ErrorCode, Result};
use crate::host::anonymous::os_page;
use crate::host::own;
use crate::host::source::ModelFile;
use crate::process;
use crate::trace;
use crate::units::{DeviceAddress, MIB, Stream};

/// Most bytes of a window.
pub const WINDOW_BYTES_MAX: u64 = 64 * MIB;

/// See the module's text.
pub struct FileWindow {
    driver: Arc<dyn Driver>,
    file: Arc<ModelFile>,
    /// Gone only where it had to be left behind.
    mapping: Option<MmapRaw>,
    /// The bytes of the file that it shows, whole OS pages.
    extent: Range<u64>,
    registered: bool,
}

/// Whether a window's pages are in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cached {
    /// All of them.
    Yes,
    /// One at least is not.
    No,
    /// The system does not say.
    Unknown,
}

impl FileWindow {
    /// Maps the OS pages that hold `bytes` of a file.
    ///
    /// # Errors
    /// `Unsupported` for a file without a descriptor and for more than a window may hold,
    /// `HostMemory` when the system does not map it.
    pub fn map(
        driver: &Arc<dyn Driver>,
        file: &Arc<ModelFile>,
        bytes: &Range<u64>,
    ) -> Result<Self> {
        let page = os_page();
        let extent = bytes.start / page * page..bytes.end.next_multiple_of(page);
        let length = extent.end - extent.start;
        let descriptor = file.descriptor().filter(|_| length <= WINDOW_BYTES_MAX);
        let descriptor = descriptor.ok_or_else(|| {
            let text = format!("{}: no window of {length} bytes", file.name());
            Error::new(ErrorCode::Unsupported, text)
        })?;
        let mut options = MmapOptions::new();
        options.offset(extent.start).len(length as usize);
        let mapped = options.map_raw_read_only(&descriptor);
        let mapping = mapped.map_err(|error| {
            let text = format!("{}: mapping {length} bytes: {error}", file.name());
            Error::new(ErrorCode::HostMemory, text)
        })?;
        let (driver, file) = (Arc::clone(driver), Arc::clone(file));
        Ok(Self { driver, file, mapping: Some(mapping), extent, registered: false })
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &Arc<ModelFile> {
        &self.file
    }

    /// Bytes that it shows, whole OS pages.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.extent.end - self.extent.start
    }

    /// Whether it shows those bytes of that file.
    #[must_use]
    pub fn shows(&self, file: &Arc<ModelFile>, bytes: &Range<u64>) -> bool {
        Arc::ptr_eq(&self.file, file)
            && self.extent.start <= bytes.start
            && bytes.end <= self.extent.end
    }

    /// Has the system read what is not in memory, in its own time.
    pub fn read_ahead(&self) {
        if let Some(descriptor) = self.file.descriptor() {
            // Advice: where it is not taken the pages are not there at the next look either.
            let length = std::num::NonZeroU64::new(self.bytes());
            let _ = fadvise(descriptor, self.extent.start, length, Advice::WillNeed);
        }
    }

    /// Looks whether its pages are in memory, a byte of each. Never waits for a disk.
    #[must_use]
    pub fn cached(&self) -> Cached {
        let end = self.extent.end.min(self.file.bytes());
        let mut at = self.extent.start;
        while at < end {
            match self.file.read_cached_at(&mut [0], at) {
                Ok(1) => at += os_page(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Cached::No,
                // A file in memory is not asked that way.
                Err(_) => return self.cached_by_mapping(),
                Ok(_) => return Cached::No,
            }
        }
        Cached::Yes
    }

    /// By mincore(2), which says the truth to the file's owner only.
    fn cached_by_mapping(&self) -> Cached {
        let status = self.file.descriptor().and_then(|file| fstat(file).ok());
        let owned = status.is_some_and(|it| it.st_uid == rustix::process::geteuid().as_raw());
        let Some(mapping) = self.mapping.as_ref().filter(|_| owned) else {
            return Cached::Unknown;
        };
        let pages = self.bytes().div_ceil(os_page()) as usize;
        let mut states = vec![0u8; pages];
        let (at, length) = (mapping.as_mut_ptr().cast(), mapping.len());
        // SAFETY: writes a byte for each page of the mapping, and reads none of its memory.
        let code = unsafe { libc::mincore(at, length, states.as_mut_ptr()) };
        match code {
            0 if states.iter().all(|state| state & 1 == 1) => Cached::Yes,
            0 => Cached::No,
            _ => Cached::Unknown,
        }
    }

    /// Registers the pages, the runtime's context current: they stay in memory from now on, and the
    /// device reads them. The driver starts no kernels meanwhile, 2 ms for 64 MiB. Again: does
    /// nothing.
    ///
    /// # Errors
    /// What the driver says; nothing is registered then.
    pub fn register(&mut self) -> DriverResult<()> {
        if !self.registered {
            let base = self.base()?;
            // SAFETY: the range is mapped, and stays so until it is unregistered, or for good.
            unsafe { self.driver.mem_host_register_read_only(base, self.bytes() as usize) }?;
            self.registered = true;
            own::enter(base);
            trace::lock_bytes(self.bytes() as usize);
        }
        Ok(())
    }

    /// Gives the pages up, the runtime's context current and no copy of them pending. Waits for
    /// the device. When it fails the mapping is left behind: the device may still read it.
    ///
    /// # Errors
    /// What the driver says.
    pub fn unregister(&mut self) -> DriverResult<()> {
        if !self.registered {
            return Ok(());
        }
        self.registered = false;
        let base = self.base()?;
        own::leave(base);
        match self.driver.mem_host_unregister(base) {
            Ok(()) => trace::unlock_bytes(self.bytes() as usize),
            Err(error) => {
                own::enter(base);
                std::mem::forget(self.mapping.take());
                return Err(error);
            }
        }
        Ok(())
    }

    /// Enqueues a copy of bytes of the file, all of which the window shows.
    ///
    /// # Errors
    /// What the driver says; nothing was enqueued then.
    ///
    /// # Panics
    /// When the bytes leave the window, or it is not registered.
    pub fn copy_to_device(
        &self,
        bytes: &Range<u64>,
        target: DeviceAddress,
        stream: Stream,
    ) -> DriverResult<()> {
        assert!(self.registered && self.shows(&self.file, bytes), "a copy leaves its window");
        let offset = (bytes.start - self.extent.start) as usize;
        let source = self.base()?.as_ptr().wrapping_add(offset);
        let length = (bytes.end - bytes.start) as usize;
        // SAFETY: the range lies in the mapping, whose pages the driver holds until it is
        // unregistered, which its owner does after the copy's fence. That others write to the file
        // is found by comparing its identity.
        unsafe { self.driver.memcpy_htod_async(target, source, length, stream) }
    }

    fn base(&self) -> DriverResult<NonNull<u8>> {
        let base = self.mapping.as_ref().and_then(|mapping| NonNull::new(mapping.as_mut_ptr()));
        base.ok_or_else(|| DriverError::new("cuMemHostRegister", DriverCode::INVALID_VALUE))
    }
}

impl Drop for FileWindow {
    fn drop(&mut self) {
        if !self.registered {
            return;
        }
        if process::ending() {
            std::mem::forget(self.mapping.take());
        } else if let Err(error) = self.unregister() {
            log::warn!("{}: pages stay registered: {error}", self.file.name());
        }
    }
}
