//! A stream that a command computes on, destroyed when it goes out of use.

use std::sync::Arc;

use vbar::driver::KernelCall;
use vbar::sync::device::Device;
use vbar::units::{DeviceAddress, Stream};
use vbar::{Result, Runtime};

/// A stream of a runtime's context. The context must be current on the thread that uses it.
pub(crate) struct Compute {
    runtime: Runtime,
    pub(crate) stream: Stream,
}

impl Compute {
    /// A new stream.
    pub(crate) fn new(runtime: &Runtime) -> Result<Self> {
        let stream = runtime.device().driver.stream_create()?;
        Ok(Self { runtime: runtime.clone(), stream })
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        self.runtime.device()
    }

    /// Adds the checksum of bytes on the device, whose first word has index `first_word`, to the
    /// word at `target`, in stream order.
    pub(crate) fn add_checksum(
        &self,
        source: DeviceAddress,
        bytes: u64,
        first_word: u64,
        target: DeviceAddress,
    ) -> Result<()> {
        let call = KernelCall::Checksum { source, bytes, first_word, delay_nanos: 0, target };
        self.launch(call, bytes)
    }

    /// The same from the first word on, after the kernel has waited for some nanoseconds.
    pub(crate) fn add_late_checksum(
        &self,
        source: DeviceAddress,
        bytes: u64,
        delay_nanos: u64,
        target: DeviceAddress,
    ) -> Result<()> {
        let call = KernelCall::Checksum { source, bytes, first_word: 0, delay_nanos, target };
        self.launch(call, bytes)
    }

    fn launch(&self, call: KernelCall, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        Ok(self.device().driver.launch_kernel(call, self.stream)?)
    }

    /// Waits for the stream's work.
    pub(crate) fn synchronize(&self) -> Result<()> {
        Ok(self.device().driver.stream_synchronize(self.stream)?)
    }
}

impl Drop for Compute {
    fn drop(&mut self) {
        if let Err(error) = self.runtime.retire_stream(self.stream) {
            log::warn!("retiring a stream: {error}");
        }
        if let Err(error) = self.device().driver.stream_destroy(self.stream) {
            log::warn!("{error}");
        }
    }
}
