//! How long the device computes on what a fault brought: sampled by events around it.
//!
//! One event on the program's stream when a fault returns, behind the wait for its bytes, and one
//! at the unpin. Both are made by the program's own calls, on the streams that it names, while
//! samples are wanted; the engine asks for the times when the device has come by. A sample that
//! cannot be had is left out: it costs a worse plan and nothing else.

use std::collections::{HashMap, VecDeque};

use crate::copy::gpu_clock::{TimedEvents, nanos};
use crate::driver::{CaptureState, DriverCode, Event};
use crate::error::Result;
use crate::memory::pager::Pager;
use crate::model::schedule::{PageRef, Span};
use crate::sync::device::Device;
use crate::sync::{Acquire, AtomicU32, Mutex, Relaxed, Release};
use crate::trace;
use crate::units::Stream;

/// Faults of which one is sampled where some are: no divisor of the steps that models have, so that
/// each of them comes to its turn.
const SOME: u32 = 17;
/// Samples under way at a time; past it none are begun.
const PENDING_MAX: usize = 512;

/// Which faults are sampled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wanted {
    None,
    /// One in a few.
    Some,
    All,
}

impl Wanted {
    /// Faults of which one is sampled; 0: none is.
    fn stride(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Some => SOME,
            Self::All => 1,
        }
    }
}

/// Spans of a fault, and the device's time from its return to its unpin.
pub(super) struct Sample {
    pub(super) spans: Vec<Span>,
    pub(super) compute_ns: u64,
}

struct Pending {
    spans: Vec<Span>,
    stream: Stream,
    start: Event,
    end: Event,
}

#[derive(Default)]
struct Books {
    events: TimedEvents,
    /// Faulted and not unpinned, by the first of their pages: what was faulted together may be
    /// unpinned together or piece by piece.
    open: HashMap<PageRef, (Vec<Span>, Event, Stream)>,
    /// Both events are recorded, oldest first.
    pending: VecDeque<Pending>,
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Samples {
    /// Faults of which one is sampled; 0: none is.
    stride: AtomicU32,
    faults: AtomicU32,
    books: Mutex<Books>,
}

impl Samples {
    /// Which samples are to be taken from now on.
    pub(super) fn want(&self, wanted: Wanted) {
        let stride = wanted.stride();
        let before = self.stride.load(Acquire);
        if before == stride {
            return;
        }
        if before == 0 {
            // Whose ends were not seen would end with the next use of their pages.
            let mut books = self.books.lock();
            let begun: Vec<Event> = books.open.drain().map(|(_, (_, start, _))| start).collect();
            books.events.give_back(begun);
        }
        self.stride.store(stride, Release);
    }

    fn is_wanted(&self) -> bool {
        self.stride.load(Acquire) != 0 || trace::is_on()
    }

    /// Whether the fault that has come is to be sampled.
    fn is_turn(&self) -> bool {
        let stride = self.stride.load(Acquire);
        let is_turn =
            stride == 1 || stride != 0 && self.faults.fetch_add(1, Relaxed).is_multiple_of(stride);
        is_turn || trace::is_on()
    }

    /// A fault has returned.
    pub(super) fn begin(&self, device: &Device, spans: &[Span], stream: Stream) {
        if stream.is_none() || !self.is_turn() {
            return;
        }
        let mut books = self.books.lock();
        let Some(key) = spans.iter().find_map(Span::first_page) else { return };
        if books.pending.len() + books.open.len() >= PENDING_MAX || books.open.contains_key(&key) {
            return;
        }
        if let Ok(start) = record(device, &mut books.events, stream) {
            books.open.insert(key, (spans.to_vec(), start, stream));
        }
    }

    /// The pins of spans were given back for work on `stream`. The stream of the fault is asked
    /// nothing unless it is that one: it may have been destroyed.
    pub(super) fn end(&self, device: &Device, spans: &[Span], stream: Stream) {
        if !self.is_wanted() {
            return;
        }
        let mut books = self.books.lock();
        for key in spans.iter().filter_map(Span::first_page) {
            books.end(device, key, stream);
        }
    }

    /// The samples whose events have passed.
    pub(super) fn take(&self, pager: &Pager) -> Vec<Sample> {
        let mut books = self.books.lock();
        let mut taken = Vec::new();
        if books.pending.is_empty() {
            return taken;
        }
        let Ok(_scope) = pager.device.enter() else { return taken };
        while let Some(first) = books.pending.front() {
            let elapsed = pager.device.driver.event_elapsed(first.start, first.end);
            if elapsed.as_ref().is_err_and(|error| error.code == DriverCode::NOT_READY) {
                break;
            }
            let Some(entry) = books.pending.pop_front() else { break };
            books.trace(&pager.device, &entry);
            let Pending { spans, start, end, .. } = entry;
            books.events.give_back([start, end]);
            if let Ok(elapsed) = elapsed {
                taken.push(Sample { spans, compute_ns: nanos(elapsed) });
            }
        }
        taken
    }

    /// Gives all events back to the driver; the engine has ended.
    pub(super) fn close(&self, pager: &Pager) {
        self.want(Wanted::None);
        let books = std::mem::take(&mut *self.books.lock());
        let Ok(_scope) = pager.device.enter() else { return };
        let open = books.open.into_values().map(|(_, start, _)| start);
        let pending = books.pending.into_iter().flat_map(|entry| [entry.start, entry.end]);
        books.events.close(&pager.device, open.chain(pending));
    }
}

impl Books {
    /// Ends the sample that began with a page, if there is one and it is of this stream.
    fn end(&mut self, device: &Device, key: PageRef, stream: Stream) {
        let other = |(_, _, begun): &(Vec<Span>, Event, Stream)| *begun != stream;
        if self.open.get(&key).is_none_or(|open| other(open) && !stream.is_none()) {
            return;
        }
        let Some((spans, start, _)) = self.open.remove(&key) else { return };
        if stream.is_none() {
            self.events.give_back([start]);
            return;
        }
        match record(device, &mut self.events, stream) {
            Ok(end) => self.pending.push_back(Pending { spans, stream, start, end }),
            Err(_) => self.events.give_back([start]),
        }
    }

    /// Tells a trace, if one is on, when the device was at it.
    fn trace(&mut self, device: &Device, entry: &Pending) {
        if !trace::is_on() || !self.events.set_origin(device, entry.stream) {
            return;
        }
        let at = |event| self.events.reading(device, event);
        let (Some(Ok(start)), Some(Ok(end))) = (at(entry.start), at(entry.end)) else { return };
        for span in &entry.spans {
            let (bar, pages) = (span.bar.0, span.first..span.end);
            trace::gpu_span(device.ordinal, entry.stream, bar, pages, start, end);
        }
    }
}

/// Records a timed event on a stream that is not being captured.
fn record(device: &Device, events: &mut TimedEvents, stream: Stream) -> Result<Event> {
    let _scope = device.enter()?;
    if device.capture_state(stream)? != CaptureState::None {
        let text = "the stream is being captured";
        return Err(crate::error::Error::new(crate::error::ErrorCode::Unsupported, text));
    }
    Ok(events.record(device, stream)?)
}
