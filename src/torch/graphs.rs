//! Memory graphs as a program has them: their calls, and which requests are theirs.
//!
//! While scopes of a graph are open on a thread, what this thread asks for on the graph's stream is
//! the graph's (`graph`), unless the graph is paused or a capture has a pool of its own for it. A
//! request that the graph cannot serve is an ordinary one, and its scopes are broken: a graph makes
//! no request fail. Scopes end with their thread.
//!
//! Its pages stay while scopes are open, with their frames: that is what makes a repeated pass map
//! nothing. Between, they go back when memory is short or the cache is emptied, and the graph
//! begins anew; not once something was captured while scopes were open, since its launches use the
//! addresses whenever the program says so.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use super::Allocator;
use super::extents::Piece;
use super::graph::{Graph, Pass, Yields};
use super::heap::{Core, ORDINARY, Sort};
use super::serve::Ask;
use super::statistics::GraphStatistics;
use crate::driver::CaptureState;
use crate::error::{Error, ErrorCode, Result};
use crate::process;
use crate::sync::fence::StreamSlot;
use crate::sync::ticket::Ticket;
use crate::sync::{AtomicU32, AtomicU64, MutexGuard, Relaxed, Release};
use crate::units::Stream;

/// Scopes within each other, at most.
const DEPTH_MAX: usize = 4096;
/// Times that a change of streams is tried while other threads free.
const TURNS_MAX: u32 = 16;

thread_local! {
    /// The session of the graph whose scopes are open on this thread. The word behind it is not
    /// used again while this is here, so its address tells sessions apart.
    static SESSION: RefCell<Weak<()>> = const { RefCell::new(Weak::new()) };
}

/// This thread's session; none once the thread ends.
pub(super) fn session() -> Weak<()> {
    SESSION.try_with(|session| session.borrow().clone()).unwrap_or_default()
}

fn set_session(session: Weak<()>) {
    let _ended = SESSION.try_with(|place| place.replace(session));
}

/// Which graphs there are, for who has no lock.
#[derive(Default)]
pub(super) struct Graphs {
    /// With open scopes.
    active: AtomicU32,
    last_id: AtomicU64,
}

impl Graphs {
    /// Whether scopes of any graph are open.
    #[inline(always)]
    pub(super) fn any(&self) -> bool {
        self.active.load(Relaxed) > 0
    }

    fn note(&self, core: &Core) {
        let open = core.graphs.iter().flatten().filter(|graph| graph.session.is_some());
        self.active.store(open.count() as u32, Release);
    }
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorCode::InvalidArgument, text.into())
}

/// Scopes around requests that repeat; dropped, its memory is ordinary. See the module's text.
pub struct MemoryGraph {
    allocator: Arc<Allocator>,
    id: u64,
}

impl Drop for MemoryGraph {
    fn drop(&mut self) {
        let allocator = &self.allocator;
        if process::ending() {
            return;
        }
        let mut core = allocator.core.lock();
        if let Some(at) = core.find_graph(|graph| graph.id == self.id) {
            core.remove_graph(at, &allocator.pager.device.fences);
            allocator.graphs.note(&core);
            allocator.note_waiting(&core);
        }
    }
}

impl MemoryGraph {
    /// The graph of an allocator's, for work on a stream.
    ///
    /// # Errors
    /// `Unsupported` on a device without virtual memory management, `InvalidArgument` for no
    /// stream, `Closed`, `DeviceLost`, `ProcessEnding`, and what the driver says of the stream.
    pub fn new(allocator: &Arc<Allocator>, stream: Stream) -> Result<Self> {
        process::check()?;
        if allocator.direct.is_some() {
            let text = "a memory graph needs a device with virtual memory management";
            return Err(Error::new(ErrorCode::Unsupported, text));
        }
        let slot = allocator.slot_for_graph(stream)?;
        let device = &allocator.pager.device;
        let held = device.fences.hold(slot)?;
        let id = allocator.graphs.last_id.fetch_add(1, Relaxed) + 1;
        let mut core = allocator.core.lock();
        let heap = core.heap_of(ORDINARY, held.slot(), stream, &device.fences);
        core.add_graph(id, heap);
        drop(core);
        Ok(Self { allocator: Arc::clone(allocator), id })
    }

    fn core(&self) -> Result<MutexGuard<'_, Core>> {
        process::check()?;
        let mut core = self.allocator.core.lock();
        let at = self.index(&core);
        core.graph_mut(at).end_abandoned();
        Ok(core)
    }

    fn index(&self, core: &Core) -> u32 {
        core.find_graph(|graph| graph.id == self.id).expect("a graph is there until its end")
    }

    /// Does something with the graph, whose scopes are open on this thread.
    fn within<T>(&self, what: &str, act: impl FnOnce(&mut Graph) -> Result<T>) -> Result<T> {
        let mut core = self.core()?;
        let at = self.index(&core);
        let graph = core.graph_mut(at);
        if !graph.is_of(&session()) {
            return Err(invalid(format!("{what}: no scope of the graph is open on this thread")));
        }
        let done = act(graph)?;
        if graph.depth() == 0 {
            graph.close(self.allocator.pager.device.fences.now());
            self.allocator.graphs.note(&core);
            set_session(Weak::new());
        }
        Ok(done)
    }

    /// Begins a scope within those that are open. `name` tells which earlier pass it is compared
    /// with, and nothing else depends on it.
    ///
    /// # Errors
    /// `InvalidArgument` while scopes of the graph are open on another thread, those of another
    /// graph on this one, or thousands within each other; `ProcessEnding`.
    pub fn enter(&self, name: u64) -> Result<()> {
        let own = session();
        let mut core = self.core()?;
        let at = self.index(&core);
        let graph = core.graph_mut(at);
        match graph.session {
            Some(_) if graph.is_of(&own) => {}
            Some(_) => return Err(invalid("scopes of the graph are open on another thread")),
            None if own.strong_count() > 0 => {
                return Err(invalid("scopes of another graph are open on this thread"));
            }
            None => {
                let new = Arc::new(());
                set_session(Arc::downgrade(&new));
                graph.session = Some(new);
            }
        }
        if graph.depth() >= DEPTH_MAX {
            return Err(invalid(format!("{DEPTH_MAX} scopes are open within each other")));
        }
        graph.enter(name);
        self.allocator.graphs.note(&core);
        Ok(())
    }

    /// Ends the innermost scope.
    ///
    /// # Errors
    /// `InvalidArgument` where none is open on this thread, `ProcessEnding`.
    pub fn leave(&self) -> Result<Pass> {
        self.within("the end of a scope", |graph| graph.leave().ok_or_else(no_scope))
    }

    /// Ends a pass of the innermost scope and begins another in its place: of the same name it is
    /// compared with what that one was.
    ///
    /// # Errors
    /// As [`MemoryGraph::leave`].
    pub fn next(&self, name: u64) -> Result<Pass> {
        self.within("an iteration", |graph| graph.next(name).ok_or_else(no_scope))
    }

    /// Requests are ordinary until as many calls of [`MemoryGraph::resume`], and belong to no
    /// scope.
    ///
    /// # Errors
    /// As [`MemoryGraph::leave`].
    pub fn pause(&self) -> Result<()> {
        self.within("a pause", |graph| {
            graph.pauses = graph.pauses.saturating_add(1);
            Ok(())
        })
    }

    /// Ends a pause.
    ///
    /// # Errors
    /// As [`MemoryGraph::leave`]; `InvalidArgument` also where nothing is paused.
    pub fn resume(&self) -> Result<()> {
        self.within("the end of a pause", |graph| {
            let left = graph.pauses.checked_sub(1);
            graph.pauses = left.ok_or_else(|| invalid("the end of a pause that never began"))?;
            Ok(())
        })
    }

    /// Ends all scopes, from any thread. What lives stays.
    ///
    /// # Errors
    /// `ProcessEnding`.
    pub fn abort(&self) -> Result<()> {
        let mut core = self.core()?;
        let at = self.index(&core);
        core.graph_mut(at).close(self.allocator.pager.device.fences.now());
        self.allocator.graphs.note(&core);
        Ok(())
    }

    /// Takes another stream from now on. What it does there comes after all that the old one was
    /// given by now.
    ///
    /// # Errors
    /// `InvalidArgument` for no stream, while scopes are open on another thread, and while a stream
    /// is being captured; what the driver says. The graph has its old stream then.
    pub fn use_stream(&self, stream: Stream) -> Result<()> {
        process::check()?;
        let slot = self.allocator.slot_for_graph(stream)?;
        let device = &self.allocator.pager.device;
        let _scope = device.enter()?;
        for _ in 0..TURNS_MAX {
            let held = device.fences.hold(slot)?;
            let (at, old) = {
                let mut core = self.core()?;
                let at = self.index(&core);
                let graph = core.graph_mut(at);
                if graph.session.is_some() && !graph.is_of(&session()) {
                    return Err(invalid("scopes of the graph are open on another thread"));
                }
                let heap = core.heap_of(ORDINARY, held.slot(), stream, &device.fences);
                let from = core.graph_mut(at).heap;
                if from == heap {
                    return Ok(());
                }
                (at, (core.heap(from).stream, core.heap(from).slot))
            };
            let after = self.order(old, (stream, held.slot()))?;
            let mut core = self.core()?;
            // With nothing in it, it may have gone meanwhile.
            let heap = core.heap_of(ORDINARY, held.slot(), stream, &device.fences);
            let ready = device.fences.stamp_if_still(held.slot());
            if let Some(ready) = ready
                && core.heap(heap).slot == held.slot()
                && core.may_turn_graph(at, after)
            {
                core.turn_graph(at, heap, ready.sequence());
                return Ok(());
            }
        }
        Err(invalid("other threads free memory of the graph without end"))
    }

    /// Lets a stream wait for another. Returns the ticket that it waits for.
    fn order(&self, old: (Stream, StreamSlot), new: (Stream, StreamSlot)) -> Result<Ticket> {
        let device = &self.allocator.pager.device;
        for stream in [old.0, new.0] {
            if device.capture_state(stream)? != CaptureState::None {
                return Err(invalid("a stream of the graph's is being captured"));
            }
        }
        let ticket = device.retry(|| device.fences.record(old.0, old.1));
        let ticket = ticket.map_err(|error| device.note(error))?;
        let waits = device.retry(|| device.fences.stream_wait(new.0, new.1, ticket));
        match waits.map_err(|error| device.note(error))? {
            true => Ok(ticket),
            false => Err(invalid("the graph's old stream was retired meanwhile")),
        }
    }

    /// What it has now.
    #[must_use]
    pub fn statistics(&self) -> GraphStatistics {
        match self.core() {
            Ok(mut core) => {
                let at = self.index(&core);
                core.graph_mut(at).statistics()
            }
            Err(_) => GraphStatistics::default(),
        }
    }
}

fn no_scope() -> Error {
    invalid("no scope of the graph is open")
}

impl Allocator {
    /// The slot of a stream that a graph is to have.
    fn slot_for_graph(&self, stream: Stream) -> Result<StreamSlot> {
        let ask = self.ask(1, stream, Sort::Region)?;
        ask.map(|ask| ask.slot).ok_or_else(|| invalid("a device without addresses"))
    }

    /// Serves a request of a thread that has scopes open; `None` for one that is ordinary.
    #[cold]
    pub(super) fn malloc_in_graph(&self, requested: u64, stream: Stream) -> Option<u64> {
        let session = session();
        if session.strong_count() == 0 || self.closed.load(Relaxed) || process::ending() {
            return None;
        }
        self.pager.device.check().ok()?;
        // Captures have pools of their own.
        if requested > self.arena.space.bytes / 2 || self.route(stream).0 != ORDINARY {
            return None;
        }
        let id = self.id_in_graph(stream, &session)?;
        if self.waiting.load(Relaxed) > 0 && !self.open.any() {
            // What other streams used in the pass before has its known place again.
            self.poll_pending();
        }
        let offset = loop {
            let mut core = self.core.lock();
            let at = core.find_graph(|graph| graph.is_of(&session))?;
            let is_own = core.known_heap(ORDINARY, id) == Some(core.graph_mut(at).heap);
            if !is_own || !core.graph_mut(at).serves() {
                return None;
            }
            if let Some(offset) = core.take_in_graph(at, requested) {
                break offset;
            }
            drop(core);
            self.grow_graph(&session, requested, stream)?;
        };
        let address = self.address_of(offset);
        if self.recorder.is_on() {
            self.recorder.malloc(address, requested, stream);
        }
        Some(address)
    }

    /// The id of a stream whose work runs, as cheaply as the quick way finds it.
    fn id_in_graph(&self, stream: Stream, session: &Weak<()>) -> Option<u64> {
        let device = &self.pager.device;
        if matches!(stream, Stream::DEFAULT | Stream::LEGACY) {
            return Some(self.legacy.load(Relaxed)).filter(|id| *id != 0);
        }
        let needs_context = matches!(stream, Stream::PER_THREAD);
        let _context = needs_context.then(|| device.enter_context()).transpose().ok()?;
        match device.inspect(stream).ok()? {
            (CaptureState::None, slot) => slot.map(StreamSlot::stream_id),
            _ => {
                self.note_capture_of(session);
                None
            }
        }
    }

    /// Something is captured on a thread: if scopes of a graph are open there, its addresses stay.
    pub(super) fn note_capture_of(&self, session: &Weak<()>) {
        let mut core = self.core.lock();
        if let Some(at) = core.find_graph(|graph| graph.is_of(session)) {
            core.graph_mut(at).note_capture();
        }
    }

    /// Gets a graph pages for a request. `None` when there are none, and its scopes are broken.
    fn grow_graph(&self, session: &Weak<()>, requested: u64, stream: Stream) -> Option<()> {
        let fences = &self.pager.device.fences;
        let bytes = requested.next_multiple_of(self.arena.page_size.bytes());
        let served = self.ask(bytes, stream, Sort::Region).and_then(|ask| match ask {
            Some(ask) => {
                // Not from a pool that another thread has begun since the request was routed.
                let ask = Ask { pool: (ORDINARY, None), ..ask };
                Ok(self.serve(&ask)?.map(|start| (start, ask.slot.stream_id())))
            }
            None => Ok(None),
        });
        let mut core = self.core.lock();
        let graph = core.find_graph(|graph| graph.is_of(session));
        let (start, id) = match served {
            Ok(Some(served)) => served,
            failed => {
                log::debug!("no pages for {requested} bytes of a memory graph: {failed:?}");
                graph.into_iter().for_each(|at| core.graph_mut(at).break_scopes());
                return None;
            }
        };
        let heap = core.known_heap(ORDINARY, id).expect("a heap with a region is there");
        let stamp = core.stamp(heap, fences);
        match (graph.filter(|at| core.graph_mut(*at).heap == heap), stamp) {
            (Some(at), Some(stamp)) => {
                core.add_region(at, Piece { start, bytes, mark: stamp.sequence() }, requested);
                Some(())
            }
            // The graph was dropped, or its stream has lost its slot, while there was a wait.
            (_, stamp) => {
                let piece = Piece { start, bytes, mark: stamp.map_or(0, Ticket::sequence) };
                let after = stamp.is_none().then(|| fences.unrecorded_stamp());
                core.drop_region(heap, piece, after);
                self.note_waiting(&core);
                None
            }
        }
    }

    /// Lets graphs give what they do not use.
    pub(super) fn yield_graphs(&self, which: Yields) {
        self.core.lock().yield_graphs(which);
    }
}
