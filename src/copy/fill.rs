//! Fill jobs: which bytes of which files go where, and the filler that carries one out.
//!
//! A job is enqueued on the fill stream and ends in one ready ticket; it never waits for its own
//! copies. This filler reads with `pread` on the calling thread into the staging ring. `Raw` is the
//! only encoding: the seam where weights that are packed or quantised in the file will be decoded
//! on the device.

use std::ops::Range;
use std::sync::Arc;

use crate::copy::staging::Staging;
use crate::counters;
use crate::driver::DriverCode;
use crate::error::{Error, Result};
use crate::host::bound::Bound;
use crate::model::binding::{Encoding, Segment};
use crate::outcome::WaitKind;
use crate::process;
use crate::sync::device::Device;
use crate::sync::fence::StreamSlot;
use crate::sync::ticket::Ticket;
use crate::trace::{self, Kind};
use crate::units::{DeviceAddress, MIB, Stream};

/// Largest staging slot: copies of 16 MiB come within 1 % of the link rate.
const SLOT_BYTES_MAX: u64 = 16 * MIB;

/// Whether bytes are worth a place in page-locked memory after they were read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Keep {
    /// They are not.
    #[default]
    No,
    /// They are: they come back pass after pass.
    Locked,
}

/// One fill: segments of files and the addresses that they belong at.
pub struct FillJob<'a> {
    /// The files and what binds them.
    pub bound: &'a Bound,
    /// Address of the VBAR's first byte.
    pub base: DeviceAddress,
    /// The bytes of the VBAR to fill, whole pages.
    pub target: Range<u64>,
}

/// Carries out fill jobs on a stream of its own.
pub struct Filler {
    device: Arc<Device>,
    staging: Staging,
    stream: Stream,
    slot: StreamSlot,
}

impl Filler {
    /// Makes the staging ring and the fill stream; the runtime's context is current.
    ///
    /// # Errors
    /// `HostMemory`, or what the driver says; nothing is left behind then.
    pub fn new(device: Arc<Device>) -> Result<Self> {
        let slot_bytes = device.options.page_size.bytes().min(SLOT_BYTES_MAX) as usize;
        let count = device.options.staging_slot_count.max(1);
        let staging = Staging::new(&device, count, slot_bytes)?;
        let stream = device.retry(|| device.driver.stream_create());
        let stream = stream.map_err(|error| device.note(error.into()))?;
        match device.slot_of(stream) {
            Ok(slot) => {
                let slot = slot.expect("a stream that was created has a slot");
                Ok(Self { device, staging, stream, slot })
            }
            Err(error) => {
                let _ = device.driver.stream_destroy(stream);
                Err(device.note(error))
            }
        }
    }

    /// The fill stream and its slot.
    #[must_use]
    pub fn stream(&self) -> (Stream, StreamSlot) {
        (self.stream, self.slot)
    }

    /// Page-locked bytes that the filler holds.
    #[must_use]
    pub fn locked_bytes(&self) -> u64 {
        self.staging.locked_bytes()
    }

    /// Reads the job's bytes and enqueues their copies. Returns the ticket after which all of them
    /// are in place. A target range without segments gives `Ticket::NONE`.
    ///
    /// # Errors
    /// `Io`, `FileChanged`, those of waiting, and what the driver says. Copies enqueued before the
    /// failure still run: the caller takes [`Filler::fence`] before it reuses the target.
    pub fn fill(&self, job: &FillJob<'_>) -> Result<Ticket> {
        let mut ready = Ticket::NONE;
        let mut start = job.target.start;
        while start < job.target.end {
            let end = job.target.end.min(start + self.staging.slot_bytes() as u64);
            let segments = job.bound.binding().segments_of(start..end);
            if let (Some(first), Some(last)) = (segments.first(), segments.last()) {
                let span = first.target.start..last.target.end;
                ready = self.fill_span(job, span, &segments)?;
            }
            start = end;
        }
        Ok(ready)
    }

    /// Records a fence on the fill stream that covers everything enqueued so far.
    ///
    /// # Errors
    /// What the driver says.
    pub fn fence(&self) -> Result<Ticket> {
        let record = || self.device.fences.record(self.stream, self.slot);
        let recorded = self.device.retry(record);
        recorded.map_err(|error| self.device.note(error))
    }

    /// Waits for everything enqueued so far, where no fence can be had.
    ///
    /// # Errors
    /// Those of waiting, and what the driver says.
    pub fn wait(&self) -> Result<()> {
        let mut wait = self.device.wait(WaitKind::Staging);
        loop {
            match self.device.driver.stream_query(self.stream) {
                Ok(()) => return Ok(()),
                Err(error) if error.code == DriverCode::NOT_READY => wait.pause()?,
                Err(error) => return Err(self.device.note(error.into())),
            }
        }
    }

    /// One slot's worth: every segment read to its place in the slot, then one copy. The gaps
    /// between segments carry whatever the slot held: no tensor lies there.
    fn fill_span(
        &self,
        job: &FillJob<'_>,
        span: Range<u64>,
        segments: &[Segment],
    ) -> Result<Ticket> {
        let slot = self.staging.take(&self.device)?;
        let length = (span.end - span.start) as usize;
        let read = trace::span(Kind::Read).device(self.device.ordinal).detail("file");
        let read = read.bytes(segments.iter().map(|s| s.target.end - s.target.start).sum());
        slot.with(|memory| read_segments(job.bound, segments, span.start, memory.bytes_mut()))?;
        drop(read);
        let copied = trace::span(Kind::Copy).device(self.device.ordinal).stream(self.stream);
        let _copied = copied.bytes(length as u64);
        let target = job.base.offset(span.start);
        let copy = || slot.with(|memory| memory.copy_to_device(0..length, target, self.stream));
        self.device.retry(copy).map_err(|error| self.device.note(error.into()))?;
        let ticket = match self.fence() {
            Ok(ticket) => ticket,
            Err(error) => {
                // The copy is enqueued and no fence covers it: only the stream's end tells when
                // the slot is free again, or else a wait for the context.
                if self.wait().is_err() {
                    slot.give_back(self.device.fences.unrecorded_stamp());
                }
                return Err(error);
            }
        };
        slot.give_back(ticket);
        counters::add(&self.device.counters.bytes_filled, length as u64);
        Ok(ticket)
    }
}

fn read_segments(bound: &Bound, segments: &[Segment], start: u64, slot: &mut [u8]) -> Result<()> {
    for segment in segments {
        let range = (segment.target.start - start) as usize..(segment.target.end - start) as usize;
        match segment.encoding {
            Encoding::Raw => {
                bound.file(segment.file).read_exact_at(segment.source_offset, &mut slot[range])?;
            }
        }
    }
    // After the reads: bytes of a file that changed meanwhile must not count as the model's.
    let mut files: Vec<usize> = segments.iter().map(|segment| segment.file).collect();
    files.dedup();
    files.into_iter().try_for_each(|file| bound.file(file).check_unchanged())
}

impl Drop for Filler {
    fn drop(&mut self) {
        if process::ending() || self.device.is_lost() {
            return;
        }
        // Whoever closes has waited for the context: this ends at once.
        let end = || -> Result<()> {
            let _scope = self.device.enter()?;
            self.device.driver.stream_synchronize(self.stream)?;
            self.device.driver.stream_destroy(self.stream).map_err(Error::from)
        };
        if let Err(error) = end() {
            log::warn!("closing the fill stream: {error}");
        }
    }
}
