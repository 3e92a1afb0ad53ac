//! Copies of the program's own: between files, its memory and device addresses that it names.
//!
//! Nothing here knows a page: whoever copies into one holds it pinned.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use super::Runtime;
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
        let read = self.within(|| self.pager().filler()?.read_file(file, bytes, target, stream));
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
        let written =
            self.within(|| self.pager().filler()?.write_file(file, bytes, source, stream));
        written.map_err(|error| self.pager().told(error, format_args!("{source} to a file")))
    }

    /// Calls with the device's context current.
    fn within(&self, act: impl FnOnce() -> Result<()>) -> Result<()> {
        self.device().check()?;
        let _scope = self.device().enter()?;
        act()
    }
}
