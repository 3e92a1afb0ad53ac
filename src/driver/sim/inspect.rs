//! What tests ask of a simulated device, and what they do to it, beside the driver's verbs.
//!
//! Counts, peeks, failure injection, and the hand on a stream. Nothing of this exists on a real
//! device, so nothing outside tests and demonstrations may need it.
#![expect(unsafe_code, reason = "peeks at device memory through the device's window")]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::faults::{FailRule, Struck};
use super::memory::Piece;
use super::order::Clock;
use super::os;
use super::stream::StreamKind;
use super::{Sim, SimGraph, SimOptions, Verb};
use crate::driver::{CaptureMode, DriverCode, DriverError, DriverResult};
use crate::units::{DeviceAddress, DeviceOrdinal, Stream};

/// Counts.
impl Sim {
    /// The options in force.
    #[must_use]
    pub fn options(&self) -> &SimOptions {
        &self.core.options
    }

    /// Breaches of the contract found so far, each a sentence with the page's history.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.core.violations.lock().clone()
    }

    /// Frames of this process whose memory lives: with a handle, a mapping, or both.
    #[must_use]
    pub fn live_frames(&self, device: DeviceOrdinal) -> u64 {
        self.core.holdings[device.0 as usize].frames.load(Ordering::Relaxed)
    }

    /// Bytes of those frames.
    #[must_use]
    pub fn used_bytes(&self, device: DeviceOrdinal) -> u64 {
        self.core.holdings[device.0 as usize].bytes.load(Ordering::Relaxed)
    }

    /// Host frames of this process whose memory lives; their memory is none of the device's.
    #[must_use]
    pub fn live_host_frames(&self) -> u64 {
        self.core.host_frames.holdings.frames.load(Ordering::Relaxed)
    }

    /// Reservations not freed.
    #[must_use]
    pub fn live_reservations(&self) -> usize {
        self.core.space.read().reservations.len()
    }

    /// Bytes of those reservations.
    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        self.core.space.read().reserved_bytes
    }

    /// Mappings not unmapped.
    #[must_use]
    pub fn live_mappings(&self) -> usize {
        self.core.space.read().mappings.len()
    }

    /// Page-locked bytes given out, in whole OS pages.
    #[must_use]
    pub fn locked_bytes(&self) -> u64 {
        self.core.host.locked_bytes()
    }

    /// The ranges of page-locked host memory, in no order.
    #[must_use]
    pub fn locked_ranges(&self) -> Vec<Range<u64>> {
        self.core.host.locked_ranges()
    }

    /// Events not destroyed.
    #[must_use]
    pub fn live_events(&self) -> usize {
        self.core.events.len()
    }

    /// Streams made and not destroyed; default streams are not counted.
    #[must_use]
    pub fn live_streams(&self) -> usize {
        self.core.streams.len()
    }

    /// Calls of a verb so far, failed ones too.
    #[must_use]
    pub fn calls(&self, verb: Verb) -> u64 {
        self.core.calls[verb as usize].load(Ordering::Relaxed)
    }
}

/// Trouble.
impl Sim {
    /// Bytes of the device that other programs use from now on.
    pub fn set_outside_bytes(&self, device: DeviceOrdinal, bytes: u64) {
        self.core.devices[device.0 as usize].set_outside_bytes(bytes);
    }

    /// The `nth` call of `verb` from now, 1 being the next, fails with `code`.
    pub fn fail_nth(&self, verb: Verb, nth: u64, code: DriverCode) {
        self.fail(verb, nth.saturating_sub(1), 1, code);
    }

    /// After `skip` good calls of `verb`, `count` fail with `code`; `u64::MAX` is all of them.
    pub fn fail(&self, verb: Verb, skip: u64, count: u64, code: DriverCode) {
        if count > 0 {
            self.core.faults.add(FailRule { verb, skip, count, code });
        }
    }

    /// The next `count` calls of `verb` fail with `code`.
    pub fn fail_next_n(&self, verb: Verb, count: u64, code: DriverCode) {
        self.fail(verb, 0, count, code);
    }

    /// All calls of `verb` fail with `code`, until [`Sim::heal`].
    pub fn fail_always(&self, verb: Verb, code: DriverCode) {
        self.fail(verb, 0, u64::MAX, code);
    }

    /// Memory, copy and event calls fail with this probability, by `seed`, with out-of-memory or
    /// not-ready as each may. Unmapping and releasing never fail this way.
    pub fn fail_rate(&self, probability: f64, seed: u64) {
        self.core.faults.set_rate(probability, seed);
    }

    /// Calls of `verb` do not return, until [`Sim::heal`]; those that hang go on then.
    pub fn hang(&self, verb: Verb) {
        self.core.faults.hang(verb);
    }

    /// Ends all injected failures. A lost device stays lost.
    pub fn heal(&self) {
        self.core.faults.heal();
    }

    /// Calls that failed because they were told to, so far.
    #[must_use]
    pub fn struck(&self) -> Vec<Struck> {
        self.core.faults.struck()
    }

    /// Calls that `during` makes are spared: none fails because it was told to, and none counts
    /// for a rule. Those of other threads are spared too.
    pub fn spare<R>(&self, during: impl FnOnce() -> R) -> R {
        self.core.faults.spare(during)
    }

    /// With a seed: nothing runs between the program's calls from now on, however long it makes
    /// none. The interleaving of a program of one thread does not depend on the clock then.
    pub fn run_unhelped(&self) {
        self.core.unhelped.store(true, Ordering::Relaxed);
    }

    /// Whether a device was lost for this process.
    #[must_use]
    pub fn is_lost(&self, device: DeviceOrdinal) -> bool {
        self.core.is_lost(device.0 as usize)
    }

    /// Loses a device for this process: every later call that touches it returns `code`.
    pub fn lose_device(&self, device: DeviceOrdinal, code: DriverCode) {
        self.core.lose(device.0 as usize, code);
    }

    /// Nothing more runs on the stream until [`Sim::release_stream`].
    ///
    /// # Errors
    /// `INVALID_HANDLE`; `INVALID_CONTEXT` for a default stream without a current context.
    pub fn hold_stream(&self, stream: Stream) -> DriverResult<()> {
        self.core.stream(stream, Verb::StreamGetId).map(|stream| stream.hold(true))
    }

    /// Lets a held stream go on.
    ///
    /// # Errors
    /// As [`Sim::hold_stream`].
    pub fn release_stream(&self, stream: Stream) -> DriverResult<()> {
        self.core.stream(stream, Verb::StreamGetId).map(|stream| stream.hold(false))
    }

    /// A stream that waits for the legacy default stream and is waited for by it, as
    /// `CU_STREAM_DEFAULT` makes.
    ///
    /// # Errors
    /// As `stream_create`.
    pub fn stream_create_blocking(&self) -> DriverResult<Stream> {
        self.core.stream_create(StreamKind::Blocking, Verb::StreamCreate)
    }
}

/// Capture, as a program that owns the streams does it.
impl Sim {
    /// `cuStreamBeginCapture`.
    ///
    /// # Errors
    /// `STREAM_CAPTURE_UNSUPPORTED` for the legacy stream, `INVALID_VALUE` when it captures.
    pub fn begin_capture(&self, stream: Stream, mode: CaptureMode) -> DriverResult<()> {
        self.core.begin_capture(stream, mode)
    }

    /// Whether the current context has the kernels. `module_load` breaks captures, so that nobody
    /// may call it for nothing.
    #[must_use]
    pub fn has_module(&self) -> bool {
        let context = self.core.current(Verb::ModuleLoad);
        context.is_ok_and(|context| context.module.load(Ordering::Acquire))
    }

    /// `cuStreamEndCapture` and `cuGraphInstantiate`.
    ///
    /// # Errors
    /// `STREAM_CAPTURE_INVALIDATED`, `_UNJOINED`, `_UNMATCHED` or `_WRONG_THREAD`.
    pub fn end_capture(&self, stream: Stream) -> DriverResult<SimGraph> {
        self.core.end_capture(stream)
    }
}

/// Peeks.
impl Sim {
    /// The bytes at a mapped address, as they are now. With `checked=1`, reading what the host
    /// does not know to be written is a violation.
    ///
    /// # Errors
    /// `INVALID_VALUE` when not all of the range is mapped.
    pub fn read_bytes(&self, address: DeviceAddress, len: usize) -> Result<Vec<u8>, DriverError> {
        let mut bytes = vec![0u8; len];
        let target = bytes.as_mut_ptr().expose_provenance() as u64;
        self.peek(address, len as u64, Verb::MemcpyDtohAsync, |window, done, length| {
            // SAFETY: the buffer has `len` bytes, the window range was looked up under the lock.
            unsafe { os::copy(target + done, window, length) }
        })?;
        Ok(bytes)
    }

    /// Writes bytes at a mapped address, now.
    ///
    /// # Errors
    /// As [`Sim::read_bytes`].
    pub fn write_bytes(&self, address: DeviceAddress, bytes: &[u8]) -> Result<(), DriverError> {
        let source = bytes.as_ptr().expose_provenance() as u64;
        let length = bytes.len() as u64;
        self.peek(address, length, Verb::MemcpyHtodAsync, |window, done, length| {
            // SAFETY: the slice has the bytes, the window range was looked up under the lock.
            unsafe { os::copy(window, source + done, length) }
        })
    }

    fn peek(
        &self,
        address: DeviceAddress,
        bytes: u64,
        verb: Verb,
        mut each: impl FnMut(u64, u64, usize),
    ) -> DriverResult<()> {
        let host: Option<Clock> =
            self.core.options.checked.then(|| self.core.order.lock().host.clone());
        let mut unseen = None;
        let space = self.core.space.read();
        // Looked up whole first, so that a failure changes nothing.
        if space.for_pieces(address.0, bytes, |_, _| ()).is_some() {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        let _ = space.for_pieces(address.0, bytes, |at, piece| {
            let Piece { mapping, offset, bytes } = *piece;
            if let Some(host) = &host {
                let record = mapping.frame.record.lock();
                if let Some(write) = record.unseen_write(offset, offset + bytes, host) {
                    let device = mapping.frame.device.ordinal.0 as usize;
                    unseen = Some((device, at, write, record.history()));
                }
            }
            each(mapping.frame.window_address(offset), at - address.0, bytes as usize);
        });
        drop(space);
        if let Some((device, at, write, history)) = unseen {
            let text = format!("the host peeked at {at:#x} without having seen the {write}");
            self.core.violation(device, format!("{text}: {history}"));
        }
        Ok(())
    }

    /// This simulated driver as the trait object that the library takes.
    #[must_use]
    pub fn driver(self: &Arc<Self>) -> Arc<dyn crate::driver::Driver> {
        self.clone()
    }
}
