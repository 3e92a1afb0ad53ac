//! Stream capture: work that is recorded into a graph instead of run.
//!
//! Owns the open captures, who is in them and what breaks them. Rules, from the pages of
//! `cuStreamBeginCapture` and `cuThreadExchangeStreamCaptureMode`: a potentially unsafe call is
//! refused, and breaks the capture, by the mode of the capture and of the calling thread; waiting
//! for an event of the capture brings a stream into it; every stream must come back before the end.
//! Stricter than CUDA: every `mem_*` verb that changes something, `module_load`, and every
//! `event_query`, `stream_query` and `stream_synchronize` count as potentially unsafe. Simpler: a
//! graph runs its operations one after the other, in the order of their recording.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;

use parking_lot::Mutex;

use super::Core;
use super::order::Clock;
use super::stream::{Point, StreamKind, StreamState, Work};
use super::verb::Verb;
use crate::driver::{CaptureMode, CaptureState, DriverCode, DriverResult, GraphRelease};
use crate::units::Stream;

/// An open capture.
pub(super) struct Capture {
    mode: CaptureMode,
    thread: ThreadId,
    context: usize,
    origin: u64,
    blocking: bool,
    invalid: AtomicBool,
    ended: AtomicBool,
    body: Mutex<Body>,
}

#[derive(Default)]
struct Body {
    works: Vec<Work>,
    retained: Vec<GraphRelease>,
    members: Vec<Member>,
}

/// A stream in a capture: how much it recorded, and how much of that others have waited for.
struct Member {
    stream: Arc<StreamState>,
    made: u64,
    joined: u64,
}

impl Capture {
    pub(super) fn invalidate(&self) {
        self.invalid.store(true, Ordering::Release);
    }

    fn is_invalid(&self) -> bool {
        self.invalid.load(Ordering::Acquire)
    }

    /// What the stream has recorded so far; a member's mark counts as one operation.
    pub(super) fn made_by(&self, stream: u64) -> u64 {
        let body = self.body.lock();
        body.members.iter().find(|member| member.stream.id == stream).map_or(0, |one| one.made)
    }

    fn add(&self, stream: u64, work: Work) {
        let mut body = self.body.lock();
        body.works.push(work);
        if let Some(member) = body.members.iter_mut().find(|member| member.stream.id == stream) {
            member.made += 1;
        }
    }

    /// Whether calls of the thread that are potentially unsafe break this capture.
    fn forbids(&self, thread: ThreadId, mode: CaptureMode) -> bool {
        let mine = self.thread == thread;
        match (mode, self.mode) {
            (CaptureMode::Relaxed, _) | (_, CaptureMode::Relaxed) => false,
            (CaptureMode::ThreadLocal, _) => mine,
            (CaptureMode::Global, of_capture) => mine || of_capture == CaptureMode::Global,
        }
    }

    /// Whether the legacy stream of its context is unusable.
    fn implies_legacy(&self, context: usize) -> bool {
        self.context == context && (self.blocking || self.mode == CaptureMode::Global)
    }
}

/// A captured graph, its executable and their life in one: a Sim-only stand-in for `CUgraphExec`.
/// Dropping it calls what was retained, on a thread of the driver, once its launches are done.
/// Several threads may launch it at once.
pub struct SimGraph {
    core: Arc<Core>,
    works: Vec<Work>,
    retained: Mutex<Vec<GraphRelease>>,
    launches: Mutex<Vec<Point>>,
    /// What is done when they are.
    clock: Mutex<Clock>,
}

impl SimGraph {
    /// Runs the recorded operations on `stream`, in order.
    ///
    /// # Errors
    /// What a launch on that stream may return; `NOT_SUPPORTED` while it is being captured.
    pub fn launch(&self, stream: Stream) -> DriverResult<()> {
        let verb = Verb::LaunchKernel;
        let stream = self.core.stream(stream, verb)?;
        self.core.alive(stream.device, verb)?;
        if self.core.capture_of(&stream, verb)?.is_some() {
            return Err(verb.error(DriverCode::NOT_SUPPORTED));
        }
        self.core.ensure_worker(&stream, verb)?;
        let _launch = self.core.launches.read();
        let mut number = stream.tail().number;
        for work in &self.works {
            (number, _) = self.core.enqueue(&stream, work.clone(), None);
        }
        let mut launches = self.launches.lock();
        launches.retain(|point| !point.passed());
        self.clock.lock().merge(&stream.queue.lock().clock);
        launches.push(Point { stream, number });
        Ok(())
    }

    /// Recorded operations.
    #[must_use]
    pub fn operation_count(&self) -> usize {
        self.works.len()
    }
}

impl Drop for SimGraph {
    fn drop(&mut self) {
        let retained = std::mem::take(self.retained.get_mut());
        let launches = std::mem::take(self.launches.get_mut());
        self.core.release_retained(retained, launches, std::mem::take(self.clock.get_mut()));
    }
}

impl Core {
    /// Gives back what a graph that is gone held when its launches are done, which the host knows
    /// by that: cuUserObjectCreate promises it of the destructor.
    fn release_retained(
        self: &Arc<Self>,
        retained: Vec<GraphRelease>,
        launches: Vec<Point>,
        clock: Clock,
    ) {
        if retained.is_empty() {
            return;
        }
        self.start_thread("sim graph release".into(), move |core| {
            for point in launches {
                core.wait_for(&point.stream, point.number);
            }
            core.host_has_seen(&clock);
            for release in retained {
                release();
            }
        })
        .expect("the simulated device needs a thread");
    }

    /// The capture that the stream is in. Errors when it is broken, or when the stream is the
    /// legacy one and a capture makes it unusable, which breaks that capture.
    pub(super) fn capture_of(
        &self,
        stream: &StreamState,
        verb: Verb,
    ) -> DriverResult<Option<Arc<Capture>>> {
        if stream.kind == StreamKind::Legacy && self.open_captures.load(Ordering::Acquire) > 0 {
            let captures = self.captures.lock();
            let mut broken = captures.iter().filter(|one| one.implies_legacy(stream.context));
            if broken.clone().next().is_some() {
                broken.by_ref().for_each(|capture| capture.invalidate());
                return Err(verb.error(DriverCode::STREAM_CAPTURE_IMPLICIT));
            }
        }
        if !stream.capturing.load(Ordering::Acquire) {
            return Ok(None);
        }
        let capture = stream.capture.lock().clone();
        if capture.as_ref().is_some_and(|capture| capture.is_invalid()) {
            return Err(verb.error(DriverCode::STREAM_CAPTURE_INVALIDATED));
        }
        Ok(capture)
    }

    /// Records the work when the stream is being captured, else gives it back.
    pub(super) fn capture_work(
        &self,
        stream: &StreamState,
        work: Work,
        verb: Verb,
    ) -> DriverResult<Option<Work>> {
        let Some(capture) = self.capture_of(stream, verb)? else { return Ok(Some(work)) };
        capture.add(stream.id, work);
        Ok(None)
    }

    /// Refuses a potentially unsafe call while a capture forbids it, and breaks that capture.
    pub(super) fn unsafe_call(&self, verb: Verb) -> DriverResult<()> {
        if self.open_captures.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let (thread, mode) = (std::thread::current().id(), self.capture_mode());
        self.break_captures(verb, |capture| capture.forbids(thread, mode))
    }

    /// Refuses a call that waits for a stream or context in which something is captured.
    pub(super) fn conflicting_call(&self, verb: Verb, context: usize) -> DriverResult<()> {
        self.break_captures(verb, |capture| capture.context == context)
    }

    fn break_captures(&self, verb: Verb, broken: impl Fn(&Capture) -> bool) -> DriverResult<()> {
        let captures = self.captures.lock();
        let mut any = false;
        for capture in captures.iter().filter(|capture| broken(capture)) {
            capture.invalidate();
            any = true;
        }
        if any { Err(verb.error(DriverCode::STREAM_CAPTURE_UNSUPPORTED)) } else { Ok(()) }
    }

    pub(super) fn stream_is_capturing(&self, stream: Stream) -> DriverResult<CaptureState> {
        let verb = Verb::StreamIsCapturing;
        let state = |stream: &Arc<StreamState>| {
            if stream.kind == StreamKind::Legacy && self.open_captures.load(Ordering::Acquire) > 0 {
                let captures = self.captures.lock();
                if captures.iter().any(|capture| capture.implies_legacy(stream.context)) {
                    return CaptureState::Implicit;
                }
            }
            if !stream.capturing.load(Ordering::Acquire) {
                return CaptureState::None;
            }
            let capture = stream.capture.lock();
            capture.as_ref().map_or(CaptureState::None, |capture| {
                if capture.is_invalid() { CaptureState::Invalidated } else { CaptureState::Active }
            })
        };
        if stream.is_implicit() {
            return Ok(state(&self.stream(stream, verb)?));
        }
        let found = self.streams.with(stream.0, state);
        found.ok_or_else(|| verb.error(DriverCode::INVALID_HANDLE))
    }

    /// Drops what open captures hold, when the device goes.
    pub(super) fn abandon_captures(&self) {
        for capture in self.captures.lock().drain(..) {
            let body = std::mem::take(&mut *capture.body.lock());
            for member in &body.members {
                *member.stream.capture.lock() = None;
            }
        }
    }

    pub(super) fn begin_capture(&self, stream: Stream, mode: CaptureMode) -> DriverResult<()> {
        let verb = Verb::StreamIsCapturing;
        let stream = self.stream(stream, verb)?;
        self.alive(stream.device, verb)?;
        if stream.kind == StreamKind::Legacy {
            return Err(verb.error(DriverCode::STREAM_CAPTURE_UNSUPPORTED));
        }
        if self.capture_of(&stream, verb)?.is_some() {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        let capture = Arc::new(Capture {
            mode,
            thread: std::thread::current().id(),
            context: stream.context,
            origin: stream.id,
            blocking: stream.kind == StreamKind::Blocking,
            invalid: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            body: Mutex::default(),
        });
        enter_capture(&stream, &capture);
        let mut captures = self.captures.lock();
        captures.push(capture);
        self.open_captures.store(captures.len(), Ordering::Release);
        Ok(())
    }

    /// Ends a capture; a broken one ends with an error, and what it retained is released.
    pub(super) fn end_capture(self: &Arc<Self>, stream: Stream) -> DriverResult<SimGraph> {
        let verb = Verb::StreamIsCapturing;
        let stream = self.stream(stream, verb)?;
        let capture = stream.capture.lock().clone();
        let capture = capture.ok_or_else(|| verb.error(DriverCode::INVALID_VALUE))?;
        if capture.origin != stream.id {
            return Err(verb.error(DriverCode::STREAM_CAPTURE_UNMATCHED));
        }
        let same_thread = capture.thread == std::thread::current().id();
        if capture.mode != CaptureMode::Relaxed && !same_thread {
            return Err(verb.error(DriverCode::STREAM_CAPTURE_WRONG_THREAD));
        }
        capture.ended.store(true, Ordering::Release);
        {
            let mut captures = self.captures.lock();
            captures.retain(|open| !Arc::ptr_eq(open, &capture));
            self.open_captures.store(captures.len(), Ordering::Release);
        }
        let body = std::mem::take(&mut *capture.body.lock());
        for member in &body.members {
            member.stream.capturing.store(false, Ordering::Release);
            *member.stream.capture.lock() = None;
        }
        let left = |member: &Member| member.stream.id != stream.id && member.joined < member.made;
        let unjoined = body.members.iter().any(left);
        let graph = SimGraph {
            core: self.clone(),
            works: body.works,
            retained: Mutex::new(body.retained),
            launches: Mutex::default(),
            clock: Mutex::default(),
        };
        if capture.is_invalid() {
            return Err(verb.error(DriverCode::STREAM_CAPTURE_INVALIDATED));
        }
        if unjoined {
            return Err(verb.error(DriverCode::STREAM_CAPTURE_UNJOINED));
        }
        Ok(graph)
    }

    /// A stream waits for an event recorded in `capture` by stream `from` after `made` operations.
    pub(super) fn join_capture(
        &self,
        stream: &Arc<StreamState>,
        capture: &Arc<Capture>,
        (from, made): (u64, u64),
    ) -> DriverResult<()> {
        let verb = Verb::StreamWaitEvent;
        if capture.ended.load(Ordering::Acquire) {
            return Err(verb.error(DriverCode::INVALID_VALUE));
        }
        match self.capture_of(stream, verb)? {
            None => enter_capture(stream, capture),
            Some(other) if Arc::ptr_eq(&other, capture) => {}
            Some(other) => {
                other.invalidate();
                capture.invalidate();
                return Err(verb.error(DriverCode::STREAM_CAPTURE_MERGE));
            }
        }
        let mut body = capture.body.lock();
        if let Some(member) = body.members.iter_mut().find(|member| member.stream.id == from) {
            member.joined = member.joined.max(made);
        }
        Ok(())
    }

    pub(super) fn graph_retain(&self, stream: Stream, release: GraphRelease) -> DriverResult<()> {
        let verb = Verb::GraphRetain;
        let stream = self.stream(stream, verb)?;
        self.alive(stream.device, verb)?;
        let capture = self.capture_of(&stream, verb)?;
        let capture = capture.ok_or_else(|| verb.error(DriverCode::INVALID_VALUE))?;
        capture.body.lock().retained.push(release);
        Ok(())
    }
}

fn enter_capture(stream: &Arc<StreamState>, capture: &Arc<Capture>) {
    let member = Member { stream: stream.clone(), made: 0, joined: 0 };
    capture.body.lock().members.push(member);
    *stream.capture.lock() = Some(capture.clone());
    stream.capturing.store(true, Ordering::Release);
}
