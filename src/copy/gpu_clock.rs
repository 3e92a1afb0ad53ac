//! When the device did what: timed events, read on the trace's clock. Only while a trace is on.
//!
//! One event at a known moment is the origin; another one's time is its distance from that. Events
//! are asked long after they were recorded, by whoever records the next ones, and never waited for.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::driver::{DriverCode, Event};
use crate::sync::Mutex;
use crate::sync::device::Device;
use crate::trace;
use crate::units::Stream;

/// The origin is found out at the first copy; where the stream is busy for longer there is none.
const ORIGIN_PATIENCE: Duration = Duration::from_millis(100);
/// Copies whose times are not read yet, at most.
const PENDING_MAX: usize = 4096;

/// What is told of a copy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct CopyTold {
    pub(super) bar: u32,
    pub(super) pages: Range<u32>,
    pub(super) bytes: u64,
}

struct Pending {
    told: CopyTold,
    stream: Stream,
    start: Event,
    end: Event,
}

/// See the module's text.
#[derive(Default)]
pub(super) struct GpuClock {
    books: Mutex<Books>,
}

#[derive(Default)]
struct Books {
    origin: Option<(Event, u64)>,
    pending: VecDeque<Pending>,
    free: Vec<Event>,
}

impl GpuClock {
    /// A copy is about to be enqueued; the context is current. `None` while no trace is on, and
    /// where an event cannot be had.
    pub(super) fn begin(&self, device: &Device, stream: Stream) -> Option<Event> {
        if !trace::is_on() {
            return None;
        }
        let mut books = self.books.lock();
        books.read(device);
        if books.origin.is_none() {
            books.origin = find_origin(device, stream);
        }
        if books.origin.is_none() || books.pending.len() >= PENDING_MAX {
            return None;
        }
        books.record(device, stream)
    }

    /// The copy was enqueued.
    pub(super) fn end(
        &self,
        device: &Device,
        stream: Stream,
        start: Option<Event>,
        told: CopyTold,
    ) {
        let Some(start) = start else { return };
        let mut books = self.books.lock();
        match books.record(device, stream) {
            Some(end) => books.pending.push_back(Pending { told, stream, start, end }),
            None => books.free.push(start),
        }
    }

    /// Gives the events back; the context is current and its work is done.
    pub(super) fn close(&self, device: &Device) {
        let mut books = std::mem::take(&mut *self.books.lock());
        books.read(device);
        let pending = books.pending.drain(..).flat_map(|entry| [entry.start, entry.end]);
        let origin = books.origin.map(|(event, _)| event);
        for event in pending.chain(books.free.drain(..)).chain(origin) {
            if let Err(error) = device.driver.event_destroy(event) {
                log::warn!("an event of a trace stays: {error}");
            }
        }
    }
}

impl Books {
    fn record(&mut self, device: &Device, stream: Stream) -> Option<Event> {
        let event = match self.free.pop() {
            Some(event) => event,
            None => device.driver.event_create_timed().ok()?,
        };
        if device.driver.event_record(event, stream).is_err() {
            self.free.push(event);
            return None;
        }
        Some(event)
    }

    /// Reads the copies that are done.
    fn read(&mut self, device: &Device) {
        let Some((origin, origin_ns)) = self.origin else { return };
        while let Some(first) = self.pending.front() {
            let at = |event| device.driver.event_elapsed(origin, event);
            let (start, end) = match (at(first.start), at(first.end)) {
                (_, Err(error)) if error.code == DriverCode::NOT_READY => return,
                times => times,
            };
            let Some(Pending { told, stream, start: first, end: last }) = self.pending.pop_front()
            else {
                return;
            };
            self.free.extend([first, last]);
            if let (Ok(start), Ok(end)) = (start, end) {
                let ns = |time: Duration| origin_ns + u64::try_from(time.as_nanos()).unwrap_or(0);
                let CopyTold { bar, pages, bytes } = told;
                let time_ns = ns(start)..ns(end);
                trace::gpu_copy(device.ordinal, stream, bar, pages, bytes, time_ns);
            }
        }
    }
}

/// Records an event and sees it pass: then is when it was.
pub(super) fn find_origin(device: &Device, stream: Stream) -> Option<(Event, u64)> {
    let event = device.driver.event_create_timed().ok()?;
    let found = device.driver.event_record(event, stream).is_ok() && {
        let since = Instant::now();
        loop {
            match device.driver.event_query(event) {
                Ok(()) => break true,
                Err(error) if error.code != DriverCode::NOT_READY => break false,
                Err(_) if since.elapsed() > ORIGIN_PATIENCE => break false,
                Err(_) => std::hint::spin_loop(),
            }
        }
    };
    if !found {
        let _ = device.driver.event_destroy(event);
        return None;
    }
    Some((event, trace::clock_ns()))
}
