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
    /// there was one. No copy of it is pending.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn unlock_host(&self, start: NonNull<u8>) -> Result<bool> {
        let mut is_locked = false;
        self.within(|driver| {
            is_locked = driver.pointer_get_host_range(start.addr().get() as u64)?.is_some();
            if !is_locked {
                return Ok(());
            }
            match driver.mem_host_unregister(start) {
                // Within a range, but not where it begins.
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
