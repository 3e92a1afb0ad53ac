//! When the device did what: timed events, and their times on the trace's clock while one is on.
//!
//! One event at a known moment is the origin; another one's time is its distance from that. Events
//! are asked long after they were recorded, by whoever records the next ones, and never waited for.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::driver::{DriverCode, DriverResult, Event};
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
    events: TimedEvents,
    pending: VecDeque<Pending>,
}

/// Timed events for one who records them again and again.
#[derive(Default)]
pub(super) struct TimedEvents {
    free: Vec<Event>,
    /// An event and its reading of the trace's clock.
    origin: Option<(Event, u64)>,
}

impl TimedEvents {
    /// Records one on a stream; the context is current.
    pub(super) fn record(&mut self, device: &Device, stream: Stream) -> DriverResult<Event> {
        let event = match self.free.pop() {
            Some(event) => event,
            None => device.driver.event_create_timed()?,
        };
        if let Err(error) = device.driver.event_record(event, stream) {
            self.free.push(event);
            return Err(error);
        }
        Ok(event)
    }

    /// Takes events back whose times nobody asks any more.
    pub(super) fn give_back(&mut self, events: impl IntoIterator<Item = Event>) {
        self.free.extend(events);
    }

    /// Finds out where the clock stands, by `stream`, unless that is known. Returns whether it is.
    pub(super) fn set_origin(&mut self, device: &Device, stream: Stream) -> bool {
        if self.origin.is_none() {
            self.origin = find_origin(device, stream);
        }
        self.origin.is_some()
    }

    /// When the device came by an event, on the trace's clock. `None` without an origin, and where
    /// the driver does not say; it says `NOT_READY` before.
    pub(super) fn reading(&self, device: &Device, event: Event) -> Option<DriverResult<u64>> {
        let (origin, origin_ns) = self.origin?;
        let elapsed = device.driver.event_elapsed(origin, event);
        Some(elapsed.map(|time| origin_ns.saturating_add(nanos(time))))
    }

    /// Gives them back to the driver, and those that are in use no more; the context is current.
    pub(super) fn close(self, device: &Device, used: impl IntoIterator<Item = Event>) {
        let origin = self.origin.map(|(event, _)| event);
        for event in self.free.into_iter().chain(used).chain(origin) {
            if let Err(error) = device.driver.event_destroy(event) {
                log::warn!("a timed event stays: {error}");
            }
        }
    }
}

/// A time in nanoseconds; 584 years at most.
pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
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
        if !books.events.set_origin(device, stream) || books.pending.len() >= PENDING_MAX {
            return None;
        }
        books.events.record(device, stream).ok()
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
        match books.events.record(device, stream) {
            Ok(end) => books.pending.push_back(Pending { told, stream, start, end }),
            Err(_) => books.events.give_back([start]),
        }
    }

    /// Gives the events back; the context is current and its work is done.
    pub(super) fn close(&self, device: &Device) {
        let mut books = std::mem::take(&mut *self.books.lock());
        books.read(device);
        let pending = books.pending.into_iter().flat_map(|entry| [entry.start, entry.end]);
        books.events.close(device, pending);
    }
}

impl Books {
    /// Tells of the copies that are done.
    fn read(&mut self, device: &Device) {
        while let Some(first) = self.pending.front() {
            let end = match self.events.reading(device, first.end) {
                Some(Err(error)) if error.code == DriverCode::NOT_READY => return,
                Some(end) => end,
                None => return,
            };
            let Some(entry) = self.pending.pop_front() else { return };
            let start = self.events.reading(device, entry.start);
            self.events.give_back([entry.start, entry.end]);
            if let (Some(Ok(start)), Ok(end)) = (start, end) {
                let CopyTold { bar, pages, bytes } = entry.told;
                trace::gpu_copy(device.ordinal, entry.stream, bar, pages, bytes, start..end);
            }
        }
    }
}

/// Records an event and sees it pass: then is when it was.
fn find_origin(device: &Device, stream: Stream) -> Option<(Event, u64)> {
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
