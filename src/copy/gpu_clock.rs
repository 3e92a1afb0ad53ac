//! When the device did what: timed events, their times on the trace's clock while one is on, and
//! the rate of the link by some copies of all.
//!
//! One event at a known moment is the origin; another one's time is its distance from that. Events
//! are asked long after they were recorded, by whoever records the next ones, and never waited for.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::driver::{DriverCode, DriverResult, Event};
use crate::sync::device::Device;
use crate::sync::{AtomicBool, Mutex, Relaxed};
use crate::trace;
use crate::units::Stream;

/// The origin is found out at the first copy; where the stream is busy for longer there is none.
const ORIGIN_PATIENCE: Duration = Duration::from_millis(100);
/// Copies whose times are not read yet, at most.
const PENDING_MAX: usize = 4096;

/// Copies of which one is timed for the rate of the link.
const TIMED: u32 = 16;
/// Bytes that are timed before the rate is believed.
const BELIEVED_BYTES: u64 = 1 << 20;
/// Bytes after which those before count for half: the rate is that of the last seconds.
const HALVED_BYTES: u64 = 4 << 30;

/// What is told of a copy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct CopyTold {
    pub(super) bar: u32,
    pub(super) pages: Range<u32>,
    pub(super) bytes: u64,
}

struct Pending {
    told: CopyTold,
    /// For the trace that was on, not for the rate alone.
    is_traced: bool,
    stream: Stream,
    start: Event,
    end: Event,
}

/// See the module's text.
#[derive(Default)]
pub(super) struct GpuClock {
    /// Whether the rate of the link is measured.
    measures: AtomicBool,
    books: Mutex<Books>,
}

#[derive(Default)]
struct Books {
    events: TimedEvents,
    pending: VecDeque<Pending>,
    copies: u32,
    link: LinkRate,
}

/// Bytes and their time on the link.
#[derive(Clone, Copy, Debug, Default)]
struct LinkRate {
    bytes: u64,
    nanos: u64,
}

impl LinkRate {
    fn add(&mut self, bytes: u64, nanos: u64) {
        (self.bytes, self.nanos) = (self.bytes + bytes, self.nanos.saturating_add(nanos));
        if self.bytes >= HALVED_BYTES {
            (self.bytes, self.nanos) = (self.bytes / 2, self.nanos / 2);
        }
    }

    fn ns_per_mib(self) -> Option<u64> {
        let nanos = (u128::from(self.nanos) << 20).checked_div(u128::from(self.bytes))?;
        let is_believed = self.bytes >= BELIEVED_BYTES && self.nanos > 0;
        is_believed.then(|| u64::try_from(nanos).unwrap_or(u64::MAX).max(1))
    }
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
    /// Whether the rate of the link is to be measured from now on.
    pub(super) fn measure_link(&self, measures: bool) {
        self.measures.store(measures, Relaxed);
    }

    /// Time that a MiB took on the link lately, in nanoseconds; `None` before enough was measured.
    pub(super) fn link_ns_per_mib(&self) -> Option<u64> {
        self.books.lock().link.ns_per_mib()
    }

    /// A copy is about to be enqueued; the context is current. `None` while no trace is on and the
    /// copy is not one of those that are timed, and where an event cannot be had.
    pub(super) fn begin(&self, device: &Device, stream: Stream) -> Option<Event> {
        let is_traced = trace::is_on();
        if !is_traced && !self.measures.load(Relaxed) {
            return None;
        }
        let mut books = self.books.lock();
        books.copies = books.copies.wrapping_add(1);
        if !is_traced && !books.copies.is_multiple_of(TIMED) {
            return None;
        }
        books.read(device);
        let has_origin = !is_traced || books.events.set_origin(device, stream);
        if !has_origin || books.pending.len() >= PENDING_MAX {
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
        let is_traced = trace::is_on();
        let mut books = self.books.lock();
        match books.events.record(device, stream) {
            Ok(end) => books.pending.push_back(Pending { told, is_traced, stream, start, end }),
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
    /// Takes in and tells of the copies that are done.
    fn read(&mut self, device: &Device) {
        while let Some(first) = self.pending.front() {
            let elapsed = device.driver.event_elapsed(first.start, first.end);
            if elapsed.as_ref().is_err_and(|error| error.code == DriverCode::NOT_READY) {
                return;
            }
            let Some(entry) = self.pending.pop_front() else { return };
            if let Ok(elapsed) = elapsed {
                self.link.add(entry.told.bytes, nanos(elapsed));
            }
            let at = |event| self.events.reading(device, event);
            let told = entry.is_traced.then(|| (at(entry.start), at(entry.end)));
            self.events.give_back([entry.start, entry.end]);
            if let Some((Some(Ok(start)), Some(Ok(end)))) = told {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_the_link_is_that_of_the_last_bytes() {
        let mut link = LinkRate::default();
        assert_eq!(link.ns_per_mib(), None);
        link.add(BELIEVED_BYTES - 1, 19_000);
        assert_eq!(link.ns_per_mib(), None, "too little");
        link.add(BELIEVED_BYTES + 1, 19_000);
        assert_eq!(link.ns_per_mib(), Some(19_000));
        // A slower link from here on.
        (0..4096).for_each(|_| link.add(16 << 20, 16 * 40_000));
        assert!((39_000..=40_000).contains(&link.ns_per_mib().unwrap()), "{link:?}");
    }
}
