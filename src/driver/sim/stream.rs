//! Streams: queues of work, each in its own order, and how work enters and leaves them.
//!
//! Owns what a stream is and how an operation is enqueued: its place in the queue, what it waits
//! for, its clock, and the check of its accesses against the earlier ones of the same frames.
//! Completion is one atomic number a stream, so that a query is one load. Who runs the work is
//! `executor`'s affair, what it does to memory `execute`'s.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::Core;
use super::capture::Capture;
use super::memory::Space;
use super::order::{Access, AccessKind, Clock, Order};
use super::verb::Verb;
use crate::driver::{DriverResult, KernelCall};
use crate::units::Stream;

/// How a stream relates to the legacy default stream of its context.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StreamKind {
    /// It is the legacy default stream.
    Legacy,
    /// It waits for the legacy default stream, and the other way round.
    Blocking,
    /// They have nothing to do with each other.
    NonBlocking,
}

/// What an operation does. Addresses are device addresses, except host sources and targets.
#[derive(Clone, Debug)]
pub(super) enum Work {
    CopyIn {
        target: u64,
        source: u64,
        bytes: u64,
    },
    CopyOut {
        target: u64,
        source: u64,
        bytes: u64,
    },
    Fill {
        target: u64,
        value: u8,
        bytes: u64,
    },
    Kernel(KernelCall),
    /// Nothing but a place in the order: an event's record, or a wait.
    Mark,
    /// A mark that notes its time: the record of an event with timing.
    Stamp(Arc<OnceLock<Instant>>),
}

/// Bytes of device memory that an operation accesses.
pub(super) struct Span {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) kind: AccessKind,
}

impl Work {
    fn is_mark(&self) -> bool {
        matches!(self, Self::Mark | Self::Stamp(_))
    }

    /// Notes the time, if that is what it does.
    pub(super) fn stamp(&self) {
        if let Self::Stamp(time) = self {
            let _first = time.set(Instant::now());
        }
    }

    pub(super) fn spans(&self) -> impl Iterator<Item = Span> {
        let span = |address, bytes, kind| Some(Span { address, bytes, kind });
        let spans = match *self {
            Self::CopyIn { target, bytes, .. } | Self::Fill { target, bytes, .. } => {
                [span(target, bytes, AccessKind::Write), None]
            }
            Self::CopyOut { source, bytes, .. } => [span(source, bytes, AccessKind::Read), None],
            Self::Kernel(KernelCall::Checksum { source, bytes, target, .. }) => {
                [span(source.0, bytes, AccessKind::Read), span(target.0, 8, AccessKind::Add)]
            }
            Self::Kernel(KernelCall::Pattern { target, bytes, .. }) => {
                [span(target.0, bytes, AccessKind::Write), None]
            }
            Self::Mark | Self::Stamp(_) => [None, None],
        };
        spans.into_iter().flatten()
    }
}

/// A place in a stream's order.
#[derive(Clone)]
pub(super) struct Point {
    pub(super) stream: Arc<StreamState>,
    pub(super) number: u64,
}

impl Point {
    pub(super) fn passed(&self) -> bool {
        self.stream.completed() >= self.number
    }
}

/// One enqueued operation.
pub(super) struct Operation {
    pub(super) number: u64,
    pub(super) work: Work,
    /// It runs after these, beside everything before it on its own stream.
    pub(super) after: Vec<Point>,
    /// An address of its that had nothing behind it when it was enqueued. Stricter than CUDA,
    /// where a mapping made in time would do: accesses are checked when work is enqueued.
    pub(super) missing: Option<u64>,
    /// With `checked=1`, the checksum of the page-locked bytes that it copies.
    pub(super) source_sum: Option<u64>,
}

/// The part of a stream that changes.
#[derive(Default)]
pub(super) struct Queue {
    pub(super) operations: VecDeque<Operation>,
    pub(super) enqueued: u64,
    pub(super) clock: Clock,
    /// Waits that the next operation inherits.
    pub(super) held: bool,
    /// Destroyed: the worker leaves when the queue is empty.
    pub(super) closed: bool,
    pub(super) has_worker: bool,
    /// Seeded: when the operation at the head, which has begun, may finish.
    pub(super) not_before: Option<Instant>,
}

/// A stream.
pub(super) struct StreamState {
    /// Unique in the process.
    pub(super) id: u64,
    pub(super) handle: usize,
    pub(super) context: usize,
    pub(super) device: usize,
    pub(super) kind: StreamKind,
    slot: usize,
    first_tick: u64,
    completed: AtomicU64,
    /// Whether `capture` is set: what a quick verb reads.
    pub(super) capturing: AtomicBool,
    pub(super) capture: Mutex<Option<Arc<Capture>>>,
    pub(super) queue: Mutex<Queue>,
    /// There is work, or none will come.
    pub(super) wake: Condvar,
    /// Work has finished.
    done: Condvar,
}

/// Stream ids are unique in the process, over all simulated devices.
static STREAM_IDS: AtomicU64 = AtomicU64::new(1);

/// How long a waiting thread sleeps before it looks whether the device is going away.
pub(super) const LOOK: Duration = Duration::from_millis(20);

impl StreamState {
    pub(super) fn completed(&self) -> u64 {
        self.completed.load(Ordering::Acquire)
    }

    /// The latest operation.
    pub(super) fn tail(self: &Arc<Self>) -> Point {
        let number = self.queue.lock().enqueued;
        Point { stream: self.clone(), number }
    }

    /// Notes that one more operation has finished.
    pub(super) fn complete_one(&self) {
        let _queue = self.queue.lock();
        self.completed.fetch_add(1, Ordering::Release);
        self.done.notify_all();
    }

    /// Waits a moment for operation `number`; whether it has finished.
    pub(super) fn wait_briefly(&self, number: u64, at_most: Duration) -> bool {
        let mut queue = self.queue.lock();
        if self.completed() < number {
            self.done.wait_for(&mut queue, at_most);
        }
        self.completed() >= number
    }

    pub(super) fn hold(&self, held: bool) {
        self.queue.lock().held = held;
        self.wake.notify_all();
    }

    /// Destroys it: what was enqueued runs. Nobody could let a held one go any more.
    pub(super) fn close(&self) {
        let mut queue = self.queue.lock();
        (queue.closed, queue.held) = (true, false);
        drop(queue);
        self.wake.notify_all();
    }
}

impl Core {
    pub(super) fn make_stream(
        &self,
        handle: usize,
        context: usize,
        device: usize,
        kind: StreamKind,
    ) -> StreamState {
        let id = STREAM_IDS.fetch_add(1, Ordering::Relaxed);
        let (slot, first_tick) = self.order.lock().take_slot(id);
        StreamState {
            id,
            handle,
            context,
            device,
            kind,
            slot,
            first_tick,
            completed: AtomicU64::new(0),
            capturing: AtomicBool::new(false),
            capture: Mutex::new(None),
            queue: Mutex::default(),
            wake: Condvar::new(),
            done: Condvar::new(),
        }
    }

    /// A stream outside the table of handles, known to whoever waits for a whole context.
    pub(super) fn new_stream(
        &self,
        handle: usize,
        context: usize,
        device: usize,
        kind: StreamKind,
    ) -> Arc<StreamState> {
        let stream = Arc::new(self.make_stream(handle, context, device, kind));
        self.all_streams.lock().push(stream.clone());
        stream
    }

    pub(super) fn stream_create(&self, kind: StreamKind, verb: Verb) -> DriverResult<Stream> {
        let context = self.current(verb)?;
        self.alive(context.device, verb)?;
        self.forget_finished_streams();
        let (device, context) = (context.device, context.handle);
        let stream = self.streams.insert(|at| self.make_stream(at, context, device, kind));
        let handle = Stream(stream.handle);
        self.all_streams.lock().push(stream);
        Ok(handle)
    }

    /// Drops destroyed streams whose work the host knows to be done. One that a call of another
    /// thread has in hand, looked up before it was destroyed, stays: that call may still enqueue,
    /// and a seeded device runs the work of the streams that are here and no other.
    fn forget_finished_streams(&self) {
        self.all_streams.lock().retain(|stream| {
            // Nobody finds it any more, so that this says all.
            if Arc::strong_count(stream) > 1 {
                return true;
            }
            let queue = stream.queue.lock();
            let finished = queue.closed && stream.completed() == queue.enqueued;
            let last_tick = stream.first_tick + queue.enqueued;
            !(finished && self.order.lock().give_slot(stream.slot, last_tick))
        });
    }

    pub(super) fn close_streams_of(&self, context: usize) {
        for stream in self.all_streams.lock().iter().filter(|stream| stream.context == context) {
            stream.close();
        }
    }

    /// The streams whose earlier work an operation on `stream` follows without being asked to.
    fn neighbours(&self, stream: &StreamState) -> Vec<Arc<StreamState>> {
        let wanted = match stream.kind {
            StreamKind::NonBlocking => return Vec::new(),
            StreamKind::Blocking => StreamKind::Legacy,
            StreamKind::Legacy => StreamKind::Blocking,
        };
        let all = self.all_streams.lock();
        let same =
            |other: &&Arc<StreamState>| other.context == stream.context && other.kind == wanted;
        all.iter().filter(same).cloned().collect()
    }

    /// Enqueues work on a stream that is not being captured, after everything in `waits`; its
    /// number there, and the clock after it when it is a mark.
    pub(super) fn enqueue(
        self: &Arc<Self>,
        stream: &Arc<StreamState>,
        work: Work,
        wait: Option<(&[Point], &Clock)>,
    ) -> (u64, Clock) {
        let mut after = Vec::new();
        let mut joined = Clock::default();
        for neighbour in self.neighbours(stream) {
            let queue = neighbour.queue.lock();
            joined.merge(&queue.clock);
            after.push(Point { stream: neighbour.clone(), number: queue.enqueued });
        }
        if let Some((points, clock)) = wait {
            joined.merge(clock);
            after.extend_from_slice(points);
        }
        after.retain(|point| !point.passed());

        let is_mark = work.is_mark();
        let mut races = Vec::new();
        let mut missing = None;
        let source_sum = self.source_sum(&work);
        let space = (!is_mark).then(|| self.space.read());
        let mut queue = stream.queue.lock();
        queue.enqueued += 1;
        let number = queue.enqueued;
        queue.clock.merge(&joined);
        {
            let order = self.order.lock();
            queue.clock.merge(&order.host);
            queue.clock.raise(stream.slot, stream.first_tick + number);
            if let Some(space) = &space {
                let operation = (&**stream, number);
                missing = note_accesses(space, &order, operation, &work, &queue.clock, &mut races);
            }
        }
        let clock = if is_mark { queue.clock.clone() } else { Clock::default() };
        let operation = Operation { number, work, after, missing, source_sum };
        self.push(stream, &mut queue, operation);
        drop(queue);
        drop(space);
        for race in races {
            self.violation(stream.device, race);
        }
        (number, clock)
    }

    fn push(self: &Arc<Self>, stream: &Arc<StreamState>, queue: &mut Queue, operation: Operation) {
        let idle = stream.completed() + 1 == operation.number;
        let instant = operation.work.is_mark() && operation.after.is_empty();
        if idle && instant && !queue.held && self.is_punctual() {
            operation.work.stamp();
            stream.completed.store(operation.number, Ordering::Release);
            stream.done.notify_all();
            return;
        }
        queue.operations.push_back(operation);
        if self.seeded.is_some() {
            return;
        }
        if queue.has_worker {
            stream.wake.notify_all();
        } else {
            // It was destroyed, and its worker has gone, since it was asked for one.
            queue.has_worker = true;
            self.start_worker(stream.clone()).expect("the simulated device needs a thread");
        }
    }

    /// Whether marks on idle streams may finish at once: nothing makes work late on purpose.
    fn is_punctual(&self) -> bool {
        self.seeded.is_none() && self.options.latency.is_zero()
    }

    /// The host has seen everything on `stream` up to `clock`'s moment.
    pub(super) fn host_has_seen(&self, clock: &Clock) {
        self.order.lock().host.merge(clock);
    }

    /// Waits for all work that is on the stream now, and lets the host know it.
    pub(super) fn synchronize(&self, stream: &Arc<StreamState>) {
        let (number, clock) = {
            let queue = stream.queue.lock();
            (queue.enqueued, queue.clock.clone())
        };
        self.wait_for(stream, number);
        self.host_has_seen(&clock);
    }

    /// Whether all work that is on the stream now has finished; then the host knows it.
    pub(super) fn is_done(&self, stream: &StreamState) -> bool {
        let (number, clock) = {
            let queue = stream.queue.lock();
            (queue.enqueued, queue.clock.clone())
        };
        let done = stream.completed() >= number;
        if done {
            self.host_has_seen(&clock);
        }
        done
    }

    fn streams_of(&self, context: Option<usize>) -> Vec<Arc<StreamState>> {
        let all = self.all_streams.lock();
        let wanted = |stream: &&Arc<StreamState>| context.is_none_or(|at| at == stream.context);
        all.iter().filter(wanted).cloned().collect()
    }

    /// The latest operation of every stream of a context that has any pending, and the clock after
    /// all that the streams have been given so far.
    pub(super) fn tails_of(&self, context: usize) -> (Vec<Point>, Clock) {
        let (mut points, mut clock) = (Vec::new(), Clock::default());
        for stream in self.streams_of(Some(context)) {
            let queue = stream.queue.lock();
            clock.merge(&queue.clock);
            let number = queue.enqueued;
            drop(queue);
            points.push(Point { stream, number });
        }
        points.retain(|point| !point.passed());
        (points, clock)
    }

    pub(super) fn synchronize_context(&self, context: usize) {
        for stream in self.streams_of(Some(context)) {
            self.synchronize(&stream);
        }
    }

    /// Waits for the work of a context, or of all, while no launch gets in. The host learns
    /// nothing: calls that happen to wait promise no order.
    pub(super) fn wait_for_device(&self, context: Option<usize>) {
        let _launches = self.launches.write();
        for stream in self.streams_of(context) {
            let tail = stream.tail();
            self.wait_for(&stream, tail.number);
        }
    }
}

/// Notes what an operation accesses, and describes each race with an earlier one. Returns an
/// address with nothing behind it, if there is one: the operation fails when it runs.
fn note_accesses(
    space: &Space,
    order: &Order,
    (stream, operation): (&StreamState, u64),
    work: &Work,
    clock: &Clock,
    races: &mut Vec<String>,
) -> Option<u64> {
    let mut missing = None;
    let (slot, tick) = (stream.slot, stream.first_tick + operation);
    for span in work.spans() {
        let hole = space.for_pieces(span.address, span.bytes, |address, piece| {
            piece.mapping.touched.lock().raise(slot, tick);
            let (start, end) = (piece.offset, piece.offset + piece.bytes);
            let (kind, stream) = (span.kind, stream.id);
            let access = Access { start, end, kind, slot, tick, stream, operation };
            let frame = &piece.mapping.frame;
            let mut record = frame.record.lock();
            if let Some(earlier) = record.access(access, clock, &order.host) {
                races.push(format!(
                    "the {access} at {address:#x} is not ordered after the {earlier}; frame {}: {}",
                    frame.handle,
                    record.history()
                ));
            }
        });
        missing = missing.or(hole);
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::sim::{Sim, SimOptions};
    use crate::units::DeviceOrdinal;

    /// More than any of it takes, however slow the machine.
    const LONG: Duration = Duration::from_secs(60);

    /// The context has nothing pending within a time that is long.
    #[track_caller]
    fn check_context_ends(sim: &Arc<Sim>) {
        let driver = sim.driver();
        let context = driver.ctx_get_current().unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            driver.ctx_set_current(context).unwrap();
            let _gone = tell.send(driver.ctx_synchronize());
        });
        told.recv_timeout(LONG).expect("the context ends").unwrap();
    }

    #[test]
    fn work_of_a_call_that_had_the_stream_before_it_was_destroyed_runs() {
        for seed in [None, Some(5)] {
            let sim = Sim::new(SimOptions { seed, ctx_event: false, ..SimOptions::default() });
            let (driver, core) = (sim.driver(), &sim.core);
            let context = driver.device_primary_ctx_retain(DeviceOrdinal(0)).unwrap();
            driver.ctx_set_current(Some(context)).unwrap();
            let handle = driver.stream_create().unwrap();
            // A call of another thread has come so far.
            let used = core.stream(handle, Verb::EventRecord).unwrap();
            driver.stream_destroy(handle).unwrap();
            // Another stream gets the handle; whoever is finished is forgotten.
            let other = driver.stream_create().unwrap();
            let (number, clock) = core.enqueue(&used, Work::Mark, None);
            let point = Point { stream: used, number };
            let waiting = core.stream(other, Verb::StreamWaitEvent).unwrap();
            core.enqueue(&waiting, Work::Mark, Some((&[point], &clock)));
            check_context_ends(&sim);
            assert!(core.is_done(&waiting));
        }
    }

    #[test]
    fn a_held_stream_that_is_destroyed_goes_on() {
        for seed in [None, Some(5)] {
            let sim = Sim::new(SimOptions { seed, ctx_event: false, ..SimOptions::default() });
            let driver = sim.driver();
            let context = driver.device_primary_ctx_retain(DeviceOrdinal(0)).unwrap();
            driver.ctx_set_current(Some(context)).unwrap();
            let (held, other) = (driver.stream_create().unwrap(), driver.stream_create().unwrap());
            let event = driver.event_create().unwrap();
            sim.hold_stream(held).unwrap();
            driver.event_record(event, held).unwrap();
            driver.stream_wait_event(other, event).unwrap();
            driver.stream_destroy(held).unwrap();
            check_context_ends(&sim);
            assert!(driver.event_query(event).is_ok());
        }
    }
}
