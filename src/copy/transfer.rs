//! Copies between files and device memory that the program fills itself, by way of the ring.
//!
//! For programs that keep their own buffers, or write the pages of a bare VBAR. The copies are
//! enqueued on the program's stream, in the order of the file, and the program orders what comes
//! before and after them. A read returns when its last copy is enqueued, a write when the file has
//! all bytes. Nothing is kept: no page is known to hold these bytes, no file is watched.

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::copy::fill::Filler;
use crate::copy::readers::Readers;
use crate::copy::staging::StagingSlot;
use crate::driver::{CaptureState, DriverResult};
use crate::error::{Error, ErrorCode, Result};
use crate::host::locked::LentPart;
use crate::host::pageable::PageableMemory;
use crate::outcome::WaitKind;
use crate::sync::device::Device;
use crate::sync::fence::StreamSlot;
use crate::sync::ticket::Ticket;
use crate::sync::{Condvar, Mutex};
use crate::units::{DeviceAddress, MIB, Stream};

/// What one thread reads at a time; less is read by the caller.
const PART_BYTES: usize = MIB as usize;
/// Where no memory is page-locked, pieces of this size are copied one by one.
const PAGEABLE_BYTES: u64 = 2 * MIB;
/// Slots that a write holds at a time: one comes from the device while another goes to the file.
const WRITE_SLOTS: usize = 2;

/// A stream that is copied on, as fences know it: the program's, or one of the library's own.
#[derive(Clone, Copy)]
pub struct OnStream {
    pub(super) stream: Stream,
    pub(super) slot: StreamSlot,
}

impl OnStream {
    /// A stream of the library's own; the context is current.
    ///
    /// # Errors
    /// What the driver says; nothing is left behind then.
    pub(super) fn make(device: &Device) -> Result<Self> {
        let stream = device.retry(|| device.driver.stream_create());
        let stream = stream.map_err(|error| device.note(error.into()))?;
        // Kept: with its slot another stream's, uses of what is copied could not be told.
        let slot = device.slot_of(stream).and_then(|slot| {
            device.fences.keep(slot.expect("a stream that was created has a slot"))
        });
        match slot {
            Ok(slot) => Ok(Self { stream, slot }),
            Err(error) => {
                let _ = device.driver.stream_destroy(stream);
                Err(device.note(error))
            }
        }
    }

    /// Destroys a stream of the library's own that nothing was enqueued on.
    pub(super) fn destroy_unused(self, device: &Device) {
        // What was to be made in its place failed for a reason that says more.
        let _ = device.driver.stream_destroy(self.stream);
    }
}

/// Bytes on their way from the device to a file.
struct Leaving {
    place: StagingSlot,
    ticket: Ticket,
    /// Where in the file.
    bytes: Range<u64>,
}

impl Filler {
    /// Reads `bytes` of a file and enqueues their copies to `target` on `stream`; the context is
    /// current.
    ///
    /// # Errors
    /// `Io`, also for a file that ends before; `InvalidArgument` for no stream, `Unsupported` for
    /// one that is being captured; those of waiting for a slot; what the driver says. Copies that
    /// were enqueued before the failure still run.
    pub fn read_file(
        &self,
        file: &Arc<File>,
        bytes: Range<u64>,
        target: DeviceAddress,
        stream: Stream,
    ) -> Result<()> {
        let on = self.on_stream(stream)?;
        let mut at = bytes.start;
        while at < bytes.end {
            let target = target.offset(at - bytes.start);
            self.cover()?;
            let part = match self.staging.take(&self.device)? {
                Some(place) => {
                    let part = part_of(at..bytes.end, self.part_bytes());
                    self.read_through(file, &part, place, target, on)?;
                    part
                }
                None => {
                    let part = part_of(at..bytes.end, PAGEABLE_BYTES);
                    self.read_pageable(file, &part, target, stream)?;
                    part
                }
            };
            at = part.end;
        }
        Ok(())
    }

    /// Copies device memory from `source` on to `bytes` of a file, behind what was enqueued on
    /// `stream`; the context is current.
    ///
    /// # Errors
    /// As [`Filler::read_file`]; what was written before the failure stays.
    pub fn write_file(
        &self,
        file: &File,
        bytes: Range<u64>,
        source: DeviceAddress,
        stream: Stream,
    ) -> Result<()> {
        let on = self.on_stream(stream)?;
        let (mut begun, mut leaving) = (bytes.start, VecDeque::new());
        while begun < bytes.end || !leaving.is_empty() {
            while begun < bytes.end && leaving.len() < WRITE_SLOTS {
                // Whoever waits for a slot has none: two writes never wait for each other.
                self.cover()?;
                let place = match leaving.is_empty() {
                    true => self.staging.take(&self.device)?,
                    false => self.staging.try_take(&self.device)?,
                };
                let Some(place) = place else { break };
                let part = part_of(begun..bytes.end, self.part_bytes());
                let source = source.offset(part.start - bytes.start);
                begun = part.end;
                leaving.push_back(self.fetch(part, place, source, on)?);
            }
            match leaving.pop_front() {
                Some(part) => self.write_out(file, part)?,
                None => {
                    let part = part_of(begun..bytes.end, PAGEABLE_BYTES);
                    let source = source.offset(part.start - bytes.start);
                    self.write_pageable(file, &part, source, stream)?;
                    begun = part.end;
                }
            }
        }
        Ok(())
    }

    /// A stream of the program, to copy on; the context is current.
    ///
    /// # Errors
    /// `InvalidArgument` for no stream, `Unsupported` for one that is being captured; what the
    /// driver says.
    pub fn on_stream(&self, stream: Stream) -> Result<OnStream> {
        match self.device.inspect(stream)? {
            (CaptureState::None, Some(slot)) => Ok(OnStream { stream, slot }),
            (CaptureState::None, None) => {
                let text = "no stream was named, which would be the one to copy on";
                Err(Error::new(ErrorCode::InvalidArgument, text))
            }
            _ => {
                let text = format!("{stream:?} is being captured: nothing is copied on it now");
                Err(Error::new(ErrorCode::Unsupported, text))
            }
        }
    }

    fn read_through(
        &self,
        file: &Arc<File>,
        bytes: &Range<u64>,
        place: StagingSlot,
        target: DeviceAddress,
        on: OnStream,
    ) -> Result<()> {
        let length = (bytes.end - bytes.start) as usize;
        let mut place = self.read_to(file, bytes, place)?;
        let copy = || place.memory().copy_to_device(0..length, target, on.stream);
        self.device.retry(copy).map_err(|error| self.device.note(error.into()))?;
        let (ticket, fenced) = self.fence_on(on);
        place.give_back(ticket);
        fenced
    }

    /// Fills a slot from a file, by the threads that read where there are some.
    fn read_to(
        &self,
        file: &Arc<File>,
        bytes: &Range<u64>,
        mut place: StagingSlot,
    ) -> Result<StagingSlot> {
        let length = (bytes.end - bytes.start) as usize;
        let readers = self.readers().filter(|_| length > PART_BYTES);
        let Some(readers) = readers else {
            read_exact(file, bytes.start, &mut place.memory().bytes_mut()[..length])?;
            return Ok(place);
        };
        let reading = Reading::begin(file, bytes.start, length, place, &readers);
        let wait = self.device.wait(WaitKind::Read);
        loop {
            // Left alone by a wait that ends: the slot goes back behind the last thread that reads.
            let patience = wait.check()?;
            if let Some(ended) = reading.ended(patience) {
                return ended;
            }
        }
    }

    /// Enqueues a copy from the device to a slot.
    fn fetch(
        &self,
        bytes: Range<u64>,
        mut place: StagingSlot,
        source: DeviceAddress,
        on: OnStream,
    ) -> Result<Leaving> {
        let length = (bytes.end - bytes.start) as usize;
        let copy = || place.memory().copy_from_device(0..length, source, on.stream);
        self.device.retry(copy).map_err(|error| self.device.note(error.into()))?;
        let (ticket, fenced) = self.fence_on(on);
        place.set_busy_until(ticket);
        fenced.map(|()| Leaving { place, ticket, bytes })
    }

    fn write_out(&self, file: &File, leaving: Leaving) -> Result<()> {
        let Leaving { mut place, ticket, bytes } = leaving;
        self.device.wait_passed(&[ticket], WaitKind::Staging)?;
        place.set_busy_until(Ticket::NONE);
        let length = (bytes.end - bytes.start) as usize;
        write_all(file, bytes.start, &place.memory().bytes_mut()[..length])
    }

    /// Records a fence behind copies that were enqueued on the program's stream. Returns when
    /// their memory is free again, too.
    pub(super) fn fence_on(&self, on: OnStream) -> (Ticket, Result<()>) {
        let device = &self.device;
        let recorded = device.retry(|| device.fences.record(on.stream, on.slot));
        match recorded.map_err(|error| device.note(error)) {
            Ok(ticket) => (ticket, Ok(())),
            // No fence covers the copy: the stream's end does, where it comes in time.
            Err(error) if self.wait_for(on.stream).is_ok() => (Ticket::NONE, Err(error)),
            Err(error) => (device.fences.stamp_anyhow(on.slot), Err(error)),
        }
    }

    fn read_pageable(
        &self,
        file: &File,
        bytes: &Range<u64>,
        target: DeviceAddress,
        stream: Stream,
    ) -> Result<()> {
        let length = (bytes.end - bytes.start) as usize;
        let mut memory = PageableMemory::new(&self.device.driver, length);
        read_exact(file, bytes.start, memory.bytes_mut())?;
        self.copy_pageable_with(&mut memory, |memory| {
            memory.copy_to_device(0..length, target, stream)
        })
    }

    /// Makes a copy again that was refused for a moment; not one whose end was not seen, which has
    /// the memory's bytes.
    fn copy_pageable_with(
        &self,
        memory: &mut PageableMemory,
        mut copy: impl FnMut(&mut PageableMemory) -> DriverResult<()>,
    ) -> Result<()> {
        let mut given_up = None;
        let copied = self.device.retry(|| {
            let copied = copy(memory);
            if memory.is_given_up()
                && let Err(error) = copied
            {
                given_up = Some(error);
                return Ok(());
            }
            copied
        });
        let copied = given_up.map_or(copied, Err);
        copied.map_err(|error| self.device.note(error.into()))
    }

    fn write_pageable(
        &self,
        file: &File,
        bytes: &Range<u64>,
        source: DeviceAddress,
        stream: Stream,
    ) -> Result<()> {
        let length = (bytes.end - bytes.start) as usize;
        let mut memory = PageableMemory::new(&self.device.driver, length);
        self.copy_pageable_with(&mut memory, |memory| {
            memory.copy_from_device(0..length, source, stream)
        })?;
        write_all(file, bytes.start, memory.bytes_mut())
    }
}

/// A slot that several threads read into. It goes back, or to whoever waits, when the last of them
/// is done.
struct Reading {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    place: Option<StagingSlot>,
    left: usize,
    failed: Option<Error>,
}

impl Reading {
    fn begin(
        file: &Arc<File>,
        start: u64,
        length: usize,
        mut place: StagingSlot,
        readers: &Readers,
    ) -> Arc<Self> {
        let ranges = (0..length).step_by(PART_BYTES);
        let ranges = ranges.map(|at| at..length.min(at + PART_BYTES)).collect::<Vec<_>>();
        let parts = place.memory().lend(ranges.iter().cloned());
        let state = State { place: Some(place), left: ranges.len(), failed: None };
        let reading = Arc::new(Self { state: Mutex::new(state), changed: Condvar::new() });
        readers.submit(ranges.into_iter().zip(parts).map(|(range, part)| {
            let file = Arc::clone(file);
            // Until it is read it counts as bytes that did not come.
            let failed = Some(Error::new(ErrorCode::Internal, "a file was not read"));
            let task = Part { reading: Arc::clone(&reading), part: Some(part), failed };
            Box::new(move || task.read(&file, start + range.start as u64)) as Box<_>
        }));
        reading
    }

    /// The slot, once every part is read; `None` while some are not, after `patience`.
    fn ended(&self, patience: std::time::Duration) -> Option<Result<StagingSlot>> {
        let mut state = self.state.lock();
        if state.left > 0 {
            self.changed.wait_for(&mut state, patience);
        }
        if state.left > 0 {
            return None;
        }
        let place = state.place.take().expect("it is taken once");
        Some(state.failed.take().map_or(Ok(place), Err))
    }
}

/// A part of a slot that a thread reads; done when it is dropped, read or not.
struct Part {
    reading: Arc<Reading>,
    part: Option<LentPart>,
    failed: Option<Error>,
}

impl Part {
    fn read(mut self, file: &File, at: u64) {
        if let Some(part) = &mut self.part {
            self.failed = read_exact(file, at, part.bytes_mut()).err();
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let failed = self.failed.take();
        // The slot is whole again before anybody is told.
        drop(self.part.take());
        let mut state = self.reading.state.lock();
        state.failed = state.failed.take().or(failed);
        state.left -= 1;
        if state.left == 0 {
            self.reading.changed.notify_all();
        }
    }
}

/// The first bytes of what is left, which may end at the last offset that there is.
fn part_of(left: Range<u64>, most: u64) -> Range<u64> {
    left.start..left.start + most.min(left.end - left.start)
}

fn read_exact(file: &File, at: u64, bytes: &mut [u8]) -> Result<()> {
    let end = at + bytes.len() as u64;
    let read = file.read_exact_at(bytes, at);
    read.map_err(|error| Error::io(format_args!("reading bytes {at} to {end}"), &error))
}

fn write_all(file: &File, at: u64, bytes: &[u8]) -> Result<()> {
    let end = at + bytes.len() as u64;
    let written = file.write_all_at(bytes, at);
    written.map_err(|error| Error::io(format_args!("writing bytes {at} to {end}"), &error))
}
