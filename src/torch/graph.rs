//! A memory graph: scopes of one thread whose requests repeat, and a pool of its own for them.
//!
//! Under the allocator's lock, as `heap`; makes no driver call. The pool is *regions*, live pieces
//! of whole pages of the graph's heap, in which the graph places blocks by itself: where a pass did
//! the same before they go where they went then, else best fit; so a repeated pass has the same
//! addresses, and maps nothing. What a pass does is followed along what earlier ones did
//! (`events`); where it departs, the scopes that are open are *broken*: they go on as another
//! branch. A known place is only taken when it is free, so that nothing follows from a record but
//! which free bytes are taken.
//!
//! Marks of free pieces are those of the graph's heap. A block of another heap, from before the
//! graph changed its stream, waits (`pending`) as if that had been recorded for it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::events::{Event, Events, ROOT};
use super::extents::{Extents, Piece};
use super::graphs::session;
use super::heap::{ByOffset, Core, LARGE, Live, Sort};
use super::pending::{Used, Waiting};
use super::slabs::GRAIN;
use super::statistics::{GraphStatistics, Kind};
use crate::sync::fence::Fences;
use crate::sync::ticket::Ticket;
use crate::units::Stream;

/// Graphs without an open scope keep their memory so long from weights: a program that works in
/// steps has the next one under way by then.
const IDLE_MIN: Duration = Duration::from_secs(1);

/// The serial of a block that outlived its scope.
const ROGUE: u64 = 0;

/// Pages that a graph has: a piece of its heap's, which that holds.
struct Region {
    start: u64,
    bytes: u64,
}

/// Whether a pass of a scope has been what an earlier one was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pass {
    /// It was, or it was the first.
    Whole,
    /// It departed on the way: the scope was broken.
    Broken,
}

/// A pass of a scope that is under way.
struct Scope {
    name: u64,
    /// The event before its beginning, and that: `None` in a pass that nobody follows.
    before: Option<u32>,
    entry: Option<u32>,
    /// Of the blocks that it takes.
    serial: u64,
    pass: Pass,
}

/// See the module's text.
pub(super) struct Graph {
    pub(super) id: u64,
    /// The heap of its stream, which stays for it.
    pub(super) heap: u32,
    /// While scopes are open: known to the thread whose they are by a weak one.
    pub(super) session: Option<Arc<()>>,
    /// Requests beyond this are in regions of their own kind.
    small_max: u64,
    regions: Vec<Region>,
    free: [Extents; 2],
    events: Events,
    /// The event that was last; `None` while it is not known where the pass is.
    at: Option<u32>,
    scopes: Vec<Scope>,
    pub(super) pauses: u32,
    /// Live blocks, by the serials of their scopes.
    blocks: ByOffset<u64>,
    next_serial: u64,
    used_bytes: u64,
    peak_bytes: u64,
    rogue_count: u64,
    /// Something was captured while scopes were open: its addresses may be used at every launch.
    is_captured: bool,
    idle_since: Duration,
}

/// Which graphs give what they do not use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Yields {
    /// Those that have had no scope for a while, by the time.
    Idle(Duration),
    /// Those that have no scope.
    Closed,
    /// All: memory is short.
    All,
}

impl Graph {
    pub(super) fn new(id: u64, heap: u32, small_max: u64) -> Self {
        Self {
            id,
            heap,
            session: None,
            small_max,
            regions: Vec::new(),
            free: Default::default(),
            events: Events::default(),
            at: Some(ROOT),
            scopes: Vec::new(),
            pauses: 0,
            blocks: ByOffset::default(),
            next_serial: ROGUE + 1,
            used_bytes: 0,
            peak_bytes: 0,
            rogue_count: 0,
            is_captured: false,
            idle_since: Duration::ZERO,
        }
    }

    pub(super) fn is_of(&self, session: &Weak<()>) -> bool {
        self.session.as_ref().is_some_and(|own| Arc::as_ptr(own) == session.as_ptr())
    }

    /// Ends the scopes of a thread that has ended without: nobody else could, but by an abort.
    pub(super) fn end_abandoned(&mut self) {
        // The thread's own is the only weak one that stays.
        if self.session.as_ref().is_some_and(|session| Arc::weak_count(session) == 0) {
            self.close(Duration::ZERO);
        }
    }

    /// Whether requests of the pass that is under way are the graph's.
    pub(super) fn serves(&self) -> bool {
        self.pauses == 0 && self.at.is_some()
    }

    pub(super) fn depth(&self) -> usize {
        self.scopes.len()
    }

    pub(super) fn note_capture(&mut self) {
        self.is_captured = true;
    }

    pub(super) fn statistics(&self) -> GraphStatistics {
        GraphStatistics {
            used_bytes: self.used_bytes,
            peak_used_bytes: self.peak_bytes,
            pool_bytes: self.regions.iter().map(|region| region.bytes).sum(),
            rogue_count: self.rogue_count,
        }
    }

    /// Begins a scope within those that are open.
    pub(super) fn enter(&mut self, name: u64) {
        let before = self.at;
        self.follow(Event::Enter(name));
        self.open(name, before);
    }

    /// The scope whose beginning was just followed is open.
    fn open(&mut self, name: u64, before: Option<u32>) {
        let (entry, serial) = (self.at, self.next_serial);
        self.next_serial += 1;
        let pass = if entry.is_some() { Pass::Whole } else { Pass::Broken };
        self.scopes.push(Scope { name, before, entry, serial, pass });
    }

    /// Ends the innermost scope; `None` when there is none.
    pub(super) fn leave(&mut self) -> Option<Pass> {
        self.follow(Event::Leave);
        let scope = self.scopes.pop()?;
        self.turn_rogue(scope.serial);
        Some(scope.pass)
    }

    /// Ends the innermost scope and begins another in its place, which is followed from where the
    /// one that ended began.
    pub(super) fn next(&mut self, name: u64) -> Option<Pass> {
        self.follow(Event::Leave);
        let Scope { name: last, before, entry, serial, pass } = self.scopes.pop()?;
        self.turn_rogue(serial);
        self.at = entry;
        if name != last {
            self.at = before;
            self.go_on(Event::Enter(name));
        }
        self.open(name, before);
        Some(pass)
    }

    /// Ends all scopes.
    pub(super) fn close(&mut self, now: Duration) {
        for scope in std::mem::take(&mut self.scopes) {
            self.turn_rogue(scope.serial);
        }
        (self.session, self.pauses) = (None, 0);
        (self.at, self.idle_since) = (Some(ROOT), now);
    }

    /// Blocks that are left of a scope have outlived it.
    fn turn_rogue(&mut self, of: u64) {
        for serial in self.blocks.values_mut().filter(|serial| **serial == of) {
            *serial = ROGUE;
            self.rogue_count += 1;
        }
    }

    /// What the pass does is compared with what is known, and known from now on.
    fn follow(&mut self, event: Event) {
        let Some(at) = self.at else { return };
        match self.events.find(at, |known| known == event) {
            Some(next) => self.at = Some(next),
            None => {
                let departs = self.departs(at, event);
                self.go_on(event);
                if departs {
                    self.break_scopes();
                }
            }
        }
    }

    /// Whether something else is known to come after `at`. A pass in which nothing is done is no
    /// way that a scope goes: programs begin a pass before the first one, or behind the last.
    fn departs(&self, at: u32, event: Event) -> bool {
        let begins = self.scopes.last().is_some_and(|scope| scope.entry == Some(at));
        if begins && event == Event::Leave {
            return false;
        }
        self.events.find(at, |known| !begins || known != Event::Leave).is_some()
    }

    /// Goes to an event after the last one, new or not.
    fn go_on(&mut self, event: Event) {
        let Some(at) = self.at else { return };
        let known = self.events.find(at, |known| known == event);
        match known.or_else(|| self.events.add(at, event)) {
            Some(next) => self.at = Some(next),
            None => self.forget(),
        }
    }

    /// The scopes that are open were not what they were.
    pub(super) fn break_scopes(&mut self) {
        self.scopes.iter_mut().for_each(|scope| scope.pass = Pass::Broken);
    }

    /// Nothing is known any more. Of the passes that are under way only the next ones are.
    fn forget(&mut self) {
        self.events = Events::default();
        let mut at = Some(ROOT);
        for scope in &mut self.scopes {
            scope.before = at;
            at = at.and_then(|at| self.events.add(at, Event::Enter(scope.name)));
            scope.entry = at;
        }
        self.at = if self.scopes.is_empty() { Some(ROOT) } else { None };
        self.break_scopes();
    }

    fn kind_of(&self, bytes: u64) -> usize {
        usize::from(bytes > self.small_max)
    }

    /// A place for a block, if the graph has one.
    fn place(&mut self, bytes: u64) -> Option<u64> {
        let kind = self.kind_of(bytes);
        let free = &self.free[kind];
        let fits = |event| match event {
            Event::Take { start, bytes: known } => {
                let piece = free.piece_at(start).filter(|_| known == bytes);
                piece.is_some_and(|piece| piece.end() >= start + bytes)
            }
            _ => false,
        };
        let known = self.at.and_then(|at| self.events.find(at, fits));
        if let Some(next) = known
            && let Event::Take { start, .. } = self.events.event(next)
        {
            self.free[kind].take_range(start..start + bytes);
            self.at = Some(next);
            return Some(start);
        }
        let (start, _) = self.free[kind].take_best(bytes)?;
        self.follow(Event::Take { start, bytes });
        Some(start)
    }

    fn enter_block(&mut self, start: u64, bytes: u64) {
        self.blocks.insert(start, self.scopes.last().map_or(ROGUE, |scope| scope.serial));
        self.used_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.used_bytes);
    }

    /// A block is live no more; its place is free when [`Graph::give`] is called.
    fn leave_block(&mut self, start: u64, bytes: u64, thread: &Weak<()>) {
        if self.blocks.remove(&start) == Some(ROGUE) {
            self.rogue_count -= 1;
        }
        self.used_bytes -= bytes;
        // What other threads free comes at any time.
        if self.is_of(thread) {
            self.follow(Event::Give(start));
        }
    }

    fn give(&mut self, piece: Piece) {
        let kind = self.kind_of(piece.bytes);
        self.free[kind].insert(piece);
    }

    fn yields(&self, which: Yields) -> bool {
        let is_closed = self.session.is_none();
        match which {
            _ if self.is_captured => false,
            Yields::Idle(now) => is_closed && now.saturating_sub(self.idle_since) >= IDLE_MIN,
            Yields::Closed => is_closed,
            Yields::All => true,
        }
    }

    /// Takes the regions out that nothing is in, with what is free of them.
    fn take_unused(&mut self) -> Vec<Piece> {
        let mut unused = Vec::new();
        let mut kept = Vec::new();
        for region in std::mem::take(&mut self.regions) {
            let range = region.start..region.start + region.bytes;
            let whole = |free: &&mut Extents| {
                free.piece_at(range.start).is_some_and(|piece| piece.end() >= range.end)
            };
            match self.free.iter_mut().find(whole) {
                Some(free) => unused.extend(free.take_range(range.clone())),
                None => kept.push(region),
            }
        }
        self.regions = kept;
        unused
    }
}

impl Core {
    pub(super) fn graph_mut(&mut self, at: u32) -> &mut Graph {
        self.graphs[at as usize].as_mut().expect("a graph with blocks exists")
    }

    pub(super) fn find_graph(&self, which: impl Fn(&Graph) -> bool) -> Option<u32> {
        let found = self.graphs.iter().position(|graph| graph.as_ref().is_some_and(|it| which(it)));
        found.map(|at| at as u32)
    }

    pub(super) fn add_graph(&mut self, id: u64, heap: u32) {
        self.heap_mut(heap).held += 1;
        let graph = Some(Box::new(Graph::new(id, heap, self.geometry.small_max)));
        match self.graphs.iter().position(Option::is_none) {
            Some(at) => self.graphs[at] = graph,
            None => self.graphs.push(graph),
        }
    }

    /// Takes a block from what a graph has; `None` when it has no place.
    pub(super) fn take_in_graph(&mut self, at: u32, requested: u64) -> Option<u64> {
        let bytes = requested.next_multiple_of(GRAIN);
        let graph = self.graph_mut(at);
        let offset = graph.place(bytes)?;
        graph.enter_block(offset, bytes);
        let (heap, sort) = (graph.heap, Sort::Graph(at));
        self.heap_mut(heap).held += 1;
        self.live.insert(offset, Live { bytes, requested, heap, sort });
        self.count_malloc(sort.kind(), bytes, requested);
        Some(offset)
    }

    /// Gives a graph pages of its heap for blocks of a size.
    pub(super) fn add_region(&mut self, at: u32, piece: Piece, of: u64) {
        let graph = self.graph_mut(at);
        graph.regions.push(Region { start: piece.start, bytes: piece.bytes });
        let kind = graph.kind_of(of.next_multiple_of(GRAIN));
        graph.free[kind].insert(piece);
    }

    /// A region is the heap's again, all of which is free: at once, or after a ticket.
    pub(super) fn drop_region(&mut self, heap: u32, piece: Piece, after: Option<Ticket>) {
        let Piece { start, bytes, .. } = piece;
        self.give_free(heap, piece, after);
        self.end_region(heap, &Region { start, bytes });
    }

    fn end_region(&mut self, heap: u32, region: &Region) {
        self.heap_mut(heap).held -= 1;
        self.pages.remove_live(region.start..region.start + region.bytes);
    }

    /// A live block of a graph is freed: whatever follows, the graph has seen it.
    pub(super) fn leave_graph(&mut self, at: u32, offset: u64, bytes: u64) {
        self.graph_mut(at).leave_block(offset, bytes, &session());
    }

    /// Puts a piece among what a graph has free.
    pub(super) fn cache_in_graph(&mut self, at: u32, piece: Piece, heap: u32) {
        self.heap_mut(heap).held -= 1;
        self.graph_mut(at).give(piece);
    }

    /// Whether a block is a graph's that has another stream by now, for which its place is to be.
    pub(super) fn is_elsewhere(&self, waiting: &Waiting) -> bool {
        let Sort::Graph(graph) = waiting.sort else { return false };
        self.graphs[graph as usize].as_ref().is_some_and(|graph| graph.heap != waiting.heap)
    }

    /// The pieces that graphs have free of a heap change their marks with it.
    pub(super) fn remark_graphs(&mut self, heap: u32, mark_of: &dyn Fn(u64) -> u64) {
        for graph in self.graphs.iter_mut().flatten().filter(|graph| graph.heap == heap) {
            for free in &mut graph.free {
                for piece in free.take_passed(|_| true) {
                    free.insert(Piece { mark: mark_of(piece.mark), ..piece });
                }
            }
        }
    }

    /// Whether all that a graph has free was used before a ticket of its stream.
    pub(super) fn may_turn_graph(&self, at: u32, before: Ticket) -> bool {
        let Some(graph) = &self.graphs[at as usize] else { return false };
        let mut marks = graph.free.iter().flat_map(Extents::iter).map(|piece| piece.mark);
        let is_same = self.heap(graph.heap).index == before.slot();
        is_same && marks.all(|mark| mark <= before.sequence())
    }

    /// A graph goes on with another heap, whose stream waits for the old one by now. `ready`: a
    /// mark of the new heap for what comes after that.
    pub(super) fn turn_graph(&mut self, at: u32, heap: u32, ready: u64) {
        let graph = self.graph_mut(at);
        let old = std::mem::replace(&mut graph.heap, heap);
        for free in &mut graph.free {
            for piece in free.take_passed(|_| true) {
                free.insert(Piece { mark: ready, ..piece });
            }
        }
        let holds = graph.regions.len() as u64 + 1;
        self.heap_mut(old).held -= holds;
        self.heap_mut(heap).held += holds;
    }

    /// Lets graphs give the pages that nothing of theirs is in back to their heaps. A graph that
    /// gives any knows nothing any more: its places would be others'.
    pub(super) fn yield_graphs(&mut self, which: Yields) {
        for at in 0..self.graphs.len() as u32 {
            let Some(graph) = self.graphs[at as usize].as_mut() else { continue };
            graph.end_abandoned();
            if !graph.yields(which) || graph.regions.is_empty() {
                continue;
            }
            let unused = graph.take_unused();
            if !unused.is_empty() {
                graph.forget();
            }
            let heap = graph.heap;
            unused.into_iter().for_each(|piece| self.drop_region(heap, piece, None));
        }
    }

    /// The graph is no more. Its live blocks are ordinary ones, and what it has free is its
    /// heap's; after all work of the device, if something was captured.
    pub(super) fn remove_graph(&mut self, at: u32, fences: &Fences) {
        let Some(mut graph) = self.graphs[at as usize].take() else { return };
        let captured = graph.is_captured.then(|| fences.unrecorded_stamp());
        for offset in graph.blocks.keys() {
            let live = self.live.get_mut(offset).expect("a block of a graph is live");
            live.sort = Sort::Large;
            self.pages.add_live(*offset..*offset + live.bytes);
            if captured.is_some() {
                let slot = self.heap(self.live[offset].heap).slot;
                let uses = self.uses.entry(*offset).or_default();
                uses.push(Used::ours(Stream::NONE, slot));
            }
        }
        for (start, bytes) in self.pending.end_graph(at, captured) {
            self.pages.add_live(start..start + bytes);
        }
        let free = graph.free.iter_mut().flat_map(|free| free.take_passed(|_| true));
        free.for_each(|piece| self.give_free(graph.heap, piece, captured));
        graph.regions.iter().for_each(|region| self.end_region(graph.heap, region));
        self.heap_mut(graph.heap).held -= 1;
    }

    /// A free piece of a region is the heap's: at once, or after a ticket.
    fn give_free(&mut self, heap: u32, piece: Piece, after: Option<Ticket>) {
        let Piece { start, bytes, mark } = piece;
        let Some(after) = after else { return self.heap_mut(heap).free[LARGE].insert(piece) };
        self.pages.add_live(start..start + bytes);
        self.heap_mut(heap).held += 1;
        self.statistics.active.add(Kind::Large, 1);
        self.statistics.active_bytes.add(Kind::Large, bytes);
        self.statistics.pending_bytes += bytes;
        let mut waiting = Waiting::new(bytes, 0, heap, Sort::Large);
        (waiting.in_hand, waiting.tickets) = (false, vec![after]);
        waiting.own = self.heap(heap).ticket(mark);
        self.pending.insert(start, waiting);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_get_the_memory_of_graphs_that_have_been_idle() {
        let mut graph = Graph::new(1, 0, 512);
        let (ended, soon) = (Duration::from_secs(7), IDLE_MIN / 2);
        graph.session = Some(Arc::new(()));
        graph.enter(1);
        let late = Yields::Idle(ended + IDLE_MIN * 9);
        assert!(!graph.yields(late) && !graph.yields(Yields::Closed) && graph.yields(Yields::All));
        graph.leave();
        graph.close(ended);
        assert!(graph.yields(Yields::Closed) && !graph.yields(Yields::Idle(ended + soon)));
        assert!(graph.yields(Yields::Idle(ended + IDLE_MIN)));
        graph.note_capture();
        assert!(![late, Yields::Closed, Yields::All].map(|it| graph.yields(it)).contains(&true));
    }

    /// Nothing is known of a pass once too much was done: it is ordinary until the next one.
    #[test]
    fn a_pass_that_never_repeats_itself_is_forgotten() {
        let mut graph = Graph::new(1, 0, 512);
        graph.session = Some(Arc::new(()));
        graph.enter(1);
        graph.enter(2);
        graph.free[1].insert(Piece { start: 0, bytes: 1 << 40, mark: 0 });
        let mut size = 1024;
        while graph.serves() {
            assert!(graph.next(2).is_some() && graph.serves());
            size += 512;
            if let Some(start) = graph.place(size) {
                graph.give(Piece { start, bytes: size, mark: 0 });
            }
            assert!(size < 1 << 30, "all of it is kept");
        }
        assert_eq!(graph.next(2), Some(Pass::Broken));
        // A scope that is within is known again; what is around it, from its next pass on.
        assert!(graph.serves());
        assert_eq!(graph.place(1024), Some(0));
        assert_eq!(graph.leave(), Some(Pass::Whole));
        assert_eq!(graph.leave(), Some(Pass::Broken));
        graph.close(Duration::ZERO);
        assert!(graph.serves());
    }
}
