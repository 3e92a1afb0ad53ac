//! Ordinary host memory that the device copies from or to, one finished copy at a time.
//!
//! Owns the bytes, and the rule that nobody has them while a copy is not known to be done. Such
//! copies go through buffers of the driver, at a tenth of the link: for what is small or rare, and
//! to say what page-locked memory gains.

#![expect(unsafe_code, reason = "the driver copies behind a raw pointer")]

use std::ops::Range;
use std::sync::Arc;

use crate::driver::{Driver, DriverResult};
use crate::units::{DeviceAddress, Stream};

/// See the module's text.
pub struct PageableMemory {
    driver: Arc<dyn Driver>,
    /// Empty once a copy was not seen to end.
    bytes: Vec<u8>,
}

impl PageableMemory {
    /// `bytes` zeros.
    #[must_use]
    pub fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Self {
        Self { driver: Arc::clone(driver), bytes: vec![0; bytes] }
    }

    /// Whether a copy was not seen to end, and the memory has no bytes any more.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Copies `range` to the device and waits for `stream`.
    ///
    /// # Errors
    /// What the driver says. When the end of the copy was not seen the memory is given up: it has
    /// no bytes from then on.
    ///
    /// # Panics
    /// When the range leaves the memory.
    pub fn copy_to_device(
        &mut self,
        range: Range<usize>,
        target: DeviceAddress,
        stream: Stream,
    ) -> DriverResult<()> {
        let source = self.bytes[range.clone()].as_ptr();
        // SAFETY: the range lies in memory of ours, which stays borrowed until the stream is done;
        // where it is not seen to be done the memory is leaked.
        let copied = unsafe { self.driver.memcpy_htod_async(target, source, range.len(), stream) };
        self.finish(copied, stream)
    }

    /// Copies from the device to `range` and waits for `stream`.
    ///
    /// # Errors
    /// As [`PageableMemory::copy_to_device`].
    ///
    /// # Panics
    /// When the range leaves the memory.
    pub fn copy_from_device(
        &mut self,
        range: Range<usize>,
        source: DeviceAddress,
        stream: Stream,
    ) -> DriverResult<()> {
        let target = self.bytes[range.clone()].as_mut_ptr();
        // SAFETY: as above, for writing.
        let copied = unsafe { self.driver.memcpy_dtoh_async(target, source, range.len(), stream) };
        self.finish(copied, stream)
    }

    /// A copy that was refused was not enqueued.
    fn finish(&mut self, copied: DriverResult<()>, stream: Stream) -> DriverResult<()> {
        copied?;
        let finished = self.driver.stream_synchronize(stream);
        if finished.is_err() {
            std::mem::forget(std::mem::take(&mut self.bytes));
        }
        finished
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::DriverCode;
    use crate::driver::sim::{Sim, SimOptions, Verb};
    use crate::units::{DeviceOrdinal, KIB};

    const BYTES: u64 = 64 * KIB;

    /// A device with one page that a stream may use.
    fn page() -> (Arc<Sim>, Stream, DeviceAddress) {
        let sim = Sim::new(SimOptions::parse("capacity=1M,granularity=64K").unwrap());
        let device = DeviceOrdinal(0);
        let context = sim.device_primary_ctx_retain(device).unwrap();
        sim.ctx_set_current(Some(context)).unwrap();
        let address = sim.mem_address_reserve(BYTES, 0).unwrap();
        let frame = sim.mem_create(device, BYTES).unwrap();
        sim.mem_map(address, BYTES, frame).unwrap();
        sim.mem_set_access(address, BYTES, &[device]).unwrap();
        (Arc::clone(&sim), sim.stream_create().unwrap(), address)
    }

    #[test]
    fn bytes_go_there_and_back() {
        let (sim, stream, address) = page();
        let mut memory = PageableMemory::new(&sim.driver(), 1000);
        memory.bytes_mut().fill(7);
        memory.copy_to_device(10..500, address, stream).unwrap();
        memory.bytes_mut().fill(0);
        memory.copy_from_device(0..490, address, stream).unwrap();
        assert!(memory.bytes_mut()[..490].iter().all(|byte| *byte == 7));
        assert!(memory.bytes_mut()[490..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn memory_whose_copy_was_not_seen_to_end_is_given_up() {
        let (sim, stream, address) = page();
        let mut memory = PageableMemory::new(&sim.driver(), 1000);
        sim.fail_nth(Verb::MemcpyHtodAsync, 1, DriverCode::OUT_OF_MEMORY);
        assert!(memory.copy_to_device(0..1000, address, stream).is_err());
        assert_eq!(memory.bytes_mut().len(), 1000);
        sim.fail_nth(Verb::StreamSynchronize, 1, DriverCode::UNKNOWN);
        assert!(memory.copy_to_device(0..1000, address, stream).is_err());
        assert_eq!(memory.bytes_mut().len(), 0);
    }
}
