//! Events: what a record is, and what waiting for and asking about it mean.
//!
//! An event holds its latest record, a place in one stream's order with the clock of that moment,
//! or of a whole context a place in each of its streams. Never recorded, it makes nothing wait. A
//! record made under capture is no place in a stream.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Core;
use super::capture::Capture;
use super::order::Clock;
use super::stream::{Point, StreamState, Work};
use super::verb::Verb;
use crate::driver::{Context, DriverCode, DriverResult, Event};
use crate::units::Stream;

/// An event.
pub(super) struct EventState {
    handle: usize,
    pub(super) context: usize,
    device: usize,
    timing: Timing,
    record: Mutex<Recorded>,
}

/// Whether an event's records take the time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Timing {
    Off,
    On,
}

/// What an event holds.
#[derive(Clone)]
enum Recorded {
    Never,
    Live(Arc<Record>),
    /// In the capture, after so many operations of the stream with this id.
    Captured {
        capture: Arc<Capture>,
        stream: u64,
        made: u64,
    },
}

struct Record {
    /// Passed when all of them are: one for a stream, one a stream for a context.
    points: Vec<Point>,
    clock: Clock,
    /// When it passed, of an event with timing.
    time: Option<Arc<OnceLock<Instant>>>,
    /// Whether the host's clock has it.
    seen: AtomicBool,
}

impl Core {
    pub(super) fn event_create(&self, timing: Timing, verb: Verb) -> DriverResult<Event> {
        let context = self.current(verb)?;
        self.alive(context.device, verb)?;
        let (device, context) = (context.device, context.handle);
        let event = self.events.insert(|handle| {
            let record = Mutex::new(Recorded::Never);
            EventState { handle, context, device, timing, record }
        });
        Ok(Event(event.handle))
    }

    fn event(&self, event: Event, verb: Verb) -> DriverResult<Arc<EventState>> {
        self.events.get(event.0).ok_or_else(|| verb.error(DriverCode::INVALID_HANDLE))
    }

    pub(super) fn event_destroy(&self, event: Event) -> DriverResult<()> {
        let gone = self.events.remove(event.0);
        gone.map(drop).ok_or_else(|| Verb::EventDestroy.error(DriverCode::INVALID_HANDLE))
    }

    pub(super) fn event_record(self: &Arc<Self>, event: Event, stream: Stream) -> DriverResult<()> {
        let verb = Verb::EventRecord;
        self.current(verb)?;
        let event = self.event(event, verb)?;
        let stream = self.stream(stream, verb)?;
        self.alive(stream.device, verb)?;
        if event.context != stream.context {
            return Err(verb.error(DriverCode::INVALID_HANDLE));
        }
        if let Some(capture) = self.capture_of(&stream, verb)? {
            let (made, id) = (capture.made_by(stream.id), stream.id);
            *event.record.lock() = Recorded::Captured { capture, stream: id, made };
            return Ok(());
        }
        self.ensure_worker(&stream, verb)?;
        let _launch = self.launches.read();
        // Under the event's lock, so that two records of one event leave the later one in it.
        let mut record = event.record.lock();
        let time = (event.timing == Timing::On).then(Arc::default);
        let work = time.as_ref().map_or(Work::Mark, |time| Work::Stamp(Arc::clone(time)));
        let (number, clock) = self.enqueue(&stream, work, None);
        let (points, seen) = (vec![Point { stream, number }], AtomicBool::new(false));
        *record = Recorded::Live(Arc::new(Record { points, clock, time, seen }));
        drop(record);
        self.drive();
        Ok(())
    }

    /// Records what is on all streams of a context. Nothing is enqueued, so no work waits for it.
    pub(super) fn ctx_record_event(&self, context: Context, event: Event) -> DriverResult<()> {
        let verb = Verb::CtxRecordEvent;
        if !self.options.ctx_event {
            return Err(verb.error(DriverCode::NOT_SUPPORTED));
        }
        let context = self.context_of(context.0);
        let context = context.ok_or_else(|| verb.error(DriverCode::INVALID_CONTEXT))?;
        let event = self.event(event, verb)?;
        self.alive(context.device, verb)?;
        if event.context != context.handle {
            return Err(verb.error(DriverCode::INVALID_HANDLE));
        }
        self.conflicting_call(verb, context.handle)?;
        let _launch = self.launches.read();
        let mut record = event.record.lock();
        let (points, clock) = self.tails_of(context.handle);
        let seen = AtomicBool::new(false);
        *record = Recorded::Live(Arc::new(Record { points, clock, time: None, seen }));
        drop(record);
        self.drive();
        Ok(())
    }

    pub(super) fn stream_wait_event(
        self: &Arc<Self>,
        stream: Stream,
        event: Event,
    ) -> DriverResult<()> {
        let verb = Verb::StreamWaitEvent;
        self.current(verb)?;
        let stream = self.stream(stream, verb)?;
        self.alive(stream.device, verb)?;
        let recorded = self.event(event, verb)?.record.lock().clone();
        match recorded {
            Recorded::Captured { capture, stream: id, made } => {
                self.join_capture(&stream, &capture, (id, made))
            }
            Recorded::Never => self.capture_of(&stream, verb).map(drop),
            Recorded::Live(record) => {
                if let Some(capture) = self.capture_of(&stream, verb)? {
                    capture.invalidate();
                    return Err(verb.error(DriverCode::STREAM_CAPTURE_ISOLATION));
                }
                self.wait_for_record(&stream, &record, verb)
            }
        }
    }

    fn wait_for_record(
        self: &Arc<Self>,
        stream: &Arc<StreamState>,
        record: &Record,
        verb: Verb,
    ) -> DriverResult<()> {
        // What the host has seen, everything enqueued from now on follows anyway.
        if record.seen.load(Ordering::Acquire) {
            return Ok(());
        }
        self.ensure_worker(stream, verb)?;
        let _launch = self.launches.read();
        self.enqueue(stream, Work::Mark, Some((&record.points, &record.clock)));
        self.drive();
        Ok(())
    }

    /// The time between two records.
    pub(super) fn event_elapsed(&self, start: Event, end: Event) -> DriverResult<Duration> {
        let verb = Verb::EventElapsed;
        self.drive();
        let [start, end] = [start, end].map(|event| {
            let event = self.event(event, verb)?;
            self.alive(event.device, verb)?;
            match &*event.record.lock() {
                Recorded::Captured { .. } => Err(verb.error(DriverCode::CAPTURED_EVENT)),
                Recorded::Live(record) => {
                    let time = record.time.clone();
                    time.ok_or_else(|| verb.error(DriverCode::INVALID_HANDLE))
                }
                Recorded::Never => Err(verb.error(DriverCode::INVALID_HANDLE)),
            }
        });
        match (start?.get(), end?.get()) {
            (Some(start), Some(end)) => Ok(end.saturating_duration_since(*start)),
            _ => Err(verb.error(DriverCode::NOT_READY)),
        }
    }

    pub(super) fn event_query(&self, event: Event) -> DriverResult<()> {
        let verb = Verb::EventQuery;
        self.drive();
        let answer = self.events.with(event.0, |event| {
            self.alive(event.device, verb)?;
            match &*event.record.lock() {
                Recorded::Never => Ok(()),
                Recorded::Captured { capture, .. } => {
                    capture.invalidate();
                    Err(verb.error(DriverCode::CAPTURED_EVENT))
                }
                Recorded::Live(record) if record.points.iter().all(Point::passed) => {
                    if !record.seen.load(Ordering::Acquire) {
                        self.host_has_seen(&record.clock);
                        record.seen.store(true, Ordering::Release);
                    }
                    Ok(())
                }
                Recorded::Live(_) => Err(verb.error(DriverCode::NOT_READY)),
            }
        });
        answer.unwrap_or_else(|| Err(verb.error(DriverCode::INVALID_HANDLE)))
    }
}
