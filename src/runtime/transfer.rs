//! Copies of the program's own: between files, its memory and device addresses that it names.
//!
//! Nothing here knows a page: whoever copies into one holds it pinned.

use std::fs::File;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::Runtime;
use crate::copy::fill::Filler;
use crate::driver::{Driver, DriverCode, DriverResult};
use crate::error::Result;
use crate::host::own;
use crate::units::{DeviceAddress, Stream};

impl Runtime {
    /// Reads `bytes` of a file through page-locked memory and enqueues their copies to `target` on
    /// `stream`. Returns when they are read and the last copy is enqueued.
    ///
    /// # Errors
    /// `Io`, also for a file that ends before; `InvalidArgument` for no stream; `Unsupported` for
    /// one that is being captured; `TimedOut`, `Cancelled`; `HostMemory`; what the driver says.
    /// Copies that were enqueued before the failure still run.
    pub fn read_file(
        &self,
        file: &Arc<File>,
        bytes: Range<u64>,
        target: DeviceAddress,
        stream: Stream,
    ) -> Result<()> {
        let read = self.transfer(|filler| filler.read_file(file, bytes, target, stream));
        read.map_err(|error| self.pager().told(error, format_args!("a file to {target}")))
    }

    /// Writes device memory from `source` on to `bytes` of a file, as it is behind what was
    /// enqueued on `stream`. Returns when the file has them.
    ///
    /// # Errors
    /// As [`Runtime::read_file`]; what was written before the failure stays.
    pub fn write_file(
        &self,
        file: &File,
        bytes: Range<u64>,
        source: DeviceAddress,
        stream: Stream,
    ) -> Result<()> {
        let written = self.transfer(|filler| filler.write_file(file, bytes, source, stream));
        written.map_err(|error| self.pager().told(error, format_args!("{source} to a file")))
    }

    fn transfer(&self, act: impl FnOnce(&Filler) -> Result<()>) -> Result<()> {
        self.device().check()?;
        let _scope = self.device().enter()?;
        act(&*self.pager().filler()?)
    }

    /// Ends the page-lock of a range of the program's that begins here, whoever locked it; whether
    /// there was one. No copy of it is pending. Ranges of the library's own stay locked.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn unlock_host(&self, start: NonNull<u8>) -> Result<bool> {
        let address = start.addr().get() as u64;
        let mut is_locked = false;
        self.within(|driver| {
            // The driver is asked to unlock nothing else: its codes for that are several.
            let range = driver.pointer_get_host_range(address)?;
            is_locked = range.is_some_and(|range| range.start == address) && !own::begins_at(start);
            if !is_locked {
                return Ok(());
            }
            match driver.mem_host_unregister(start) {
                // Page-locked memory that was allocated as such (`cuMemHostAlloc`).
                Err(error) if error.code == DriverCode::HOST_MEMORY_NOT_REGISTERED => {
                    is_locked = false;
                    Ok(())
                }
                done => done,
            }
        })?;
        Ok(is_locked)
    }

    /// Calls the driver with the device's context current, again when it was not ready.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn within(
        &self,
        mut act: impl FnMut(&dyn Driver) -> DriverResult<()>,
    ) -> Result<()> {
        self.device().check()?;
        let _scope = self.device().enter()?;
        let done = self.device().retry(|| act(&*self.device().driver));
        done.map_err(|error| self.device().note(error.into()))
    }
}

#[cfg(test)]
#[cfg(not(vbar_loom))]
mod tests {
    use super::*;
    use crate::driver::sim::{Sim, SimOptions};
    use crate::host::file_pages::FileWindow;
    use crate::host::locked::{allocate, map_window};
    use crate::host::source::ModelFile;
    use crate::options::RuntimeOptions;
    use crate::units::DeviceOrdinal;

    #[test]
    fn ranges_of_the_librarys_own_stay_locked() {
        let options = SimOptions::parse("capacity=64M,granularity=64K,read_only=1").unwrap();
        let sim = Sim::new(options);
        let runtime =
            Runtime::open(sim.driver(), DeviceOrdinal(0), RuntimeOptions::default()).unwrap();
        sim.ctx_set_current(Some(runtime.device().context)).unwrap();
        let before = sim.locked_bytes();
        // As windows of the cache are, the slots of the ring, and pages of files.
        let mut window = map_window(&sim.driver(), 8192).unwrap();
        window.register().unwrap();
        let slots = allocate(&sim.driver(), 2, 4096).unwrap();
        let stored = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(stored.path(), [7; 8192]).unwrap();
        let stored = Arc::new(ModelFile::open(stored.path()).unwrap());
        let mut pages = FileWindow::map(&sim.driver(), &stored, &(0..8192)).unwrap();
        pages.register().unwrap();
        assert_eq!(sim.locked_bytes(), before + 24576);
        let ranges = sim.locked_ranges();
        assert!(ranges.len() >= 3, "{ranges:?}");
        for range in ranges {
            let start = std::ptr::without_provenance_mut(range.start as usize);
            assert!(!runtime.unlock_host(NonNull::new(start).unwrap()).unwrap(), "{range:x?}");
        }
        assert_eq!(sim.locked_bytes(), before + 24576);
        let at = NonNull::new(window.bytes_mut().as_mut_ptr()).unwrap();
        assert!(own::begins_at(at));
        drop((window, slots, pages));
        assert!(!own::begins_at(at));
        assert_eq!((sim.locked_bytes(), sim.violations()), (before, vec![]));
    }
}
