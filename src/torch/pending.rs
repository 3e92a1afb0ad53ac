//! Blocks that were freed and cannot be cached yet: streams that they were recorded for still work,
//! or a capture is under way.
//!
//! Values under the allocator's lock. Who asks for the fences does it elsewhere, with no lock held.

use super::heap::{ByOffset, Sort};
use super::sweep::Span;
use crate::sync::fence::StreamSlot;
use crate::sync::ticket::Ticket;
use crate::units::{Context, Stream};

/// Another stream that a block was recorded for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Used {
    pub(super) stream: Stream,
    pub(super) of: Of,
}

/// What a stream is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Of {
    /// The device's own context, which knows it by a slot.
    Ours(StreamSlot),
    /// Another context, of another device mostly: a fence of ours cannot be recorded there.
    Another(Context),
    /// Not known: while a stream is being captured it is not asked for.
    Unknown(StreamSlot),
}

impl Used {
    pub(super) fn ours(stream: Stream, slot: StreamSlot) -> Self {
        Self { stream, of: Of::Ours(slot) }
    }

    /// Whether both are one stream.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        match (self.of, other.of) {
            (Of::Another(_), _) | (_, Of::Another(_)) => self == other,
            (Of::Ours(one) | Of::Unknown(one), Of::Ours(two) | Of::Unknown(two)) => {
                one.stream_id() == two.stream_id()
            }
        }
    }
}

/// A block that was freed and waits.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) bytes: u64,
    pub(super) requested: u64,
    pub(super) heap: u32,
    pub(super) sort: Sort,
    /// All work of its own stream up to the free.
    pub(super) own: Ticket,
    /// What has to pass.
    pub(super) tickets: Vec<Ticket>,
    /// Streams that were being captured: what they use the block for runs later, and is recorded
    /// when no capture is under way.
    pub(super) capturing: Vec<Used>,
    /// A thread is recording fences for it.
    pub(super) in_hand: bool,
}

impl Waiting {
    /// A block in the hands of the thread that frees it.
    pub(super) fn new(bytes: u64, requested: u64, heap: u32, sort: Sort) -> Self {
        let (tickets, capturing) = (Vec::new(), Vec::new());
        Self { bytes, requested, heap, sort, own: Ticket::NONE, tickets, capturing, in_hand: true }
    }

    /// Whether it waits for fences only.
    pub(super) fn is_recorded(&self) -> bool {
        self.capturing.is_empty() && !self.in_hand
    }
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Pending {
    blocks: ByOffset<Waiting>,
}

impl Pending {
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(super) fn contains(&self, offset: u64) -> bool {
        self.blocks.contains_key(&offset)
    }

    pub(super) fn insert(&mut self, offset: u64, waiting: Waiting) {
        self.blocks.insert(offset, waiting);
    }

    pub(super) fn get_mut(&mut self, offset: u64) -> Option<&mut Waiting> {
        self.blocks.get_mut(&offset)
    }

    pub(super) fn remove(&mut self, offset: u64) -> Option<Waiting> {
        self.blocks.remove(&offset)
    }

    pub(super) fn count(&self) -> u32 {
        self.blocks.len() as u32
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &Waiting)> {
        self.blocks.iter().map(|(offset, waiting)| (*offset, waiting))
    }

    /// Blocks of one heap are another's.
    pub(super) fn move_heap(&mut self, from: u32, into: u32) {
        let moved = self.blocks.values_mut().filter(|waiting| waiting.heap == from);
        moved.for_each(|waiting| waiting.heap = into);
    }

    /// Blocks of a memory graph are ordinary ones, after a ticket too: where they start, and their
    /// bytes.
    pub(super) fn end_graph(&mut self, graph: u32, after: Option<Ticket>) -> Vec<(u64, u64)> {
        let of_it = |(_, waiting): &(&u64, &mut Waiting)| waiting.sort == Sort::Graph(graph);
        let blocks = self.blocks.iter_mut().filter(of_it);
        let turned = blocks.map(|(offset, waiting)| {
            waiting.sort = Sort::Large;
            waiting.tickets.extend(after);
            (*offset, waiting.bytes)
        });
        turned.collect()
    }

    /// What the blocks wait for, a span a stream.
    pub(super) fn spans(&self) -> Vec<Span> {
        let mut spans = Vec::new();
        let tickets = self.blocks.values().flat_map(|waiting| &waiting.tickets);
        tickets.for_each(|ticket| Span::widen(&mut spans, *ticket));
        spans
    }

    /// Takes the blocks that wait for nothing more.
    pub(super) fn take_ready(&mut self, passed: impl Fn(Ticket) -> bool) -> Vec<(u64, Waiting)> {
        let ready = |waiting: &Waiting| {
            waiting.is_recorded() && waiting.tickets.iter().all(|ticket| passed(*ticket))
        };
        let ready = self.blocks.iter().filter(|(_, waiting)| ready(waiting));
        let offsets: Vec<u64> = ready.map(|(offset, _)| *offset).collect();
        offsets.into_iter().filter_map(|at| Some((at, self.blocks.remove(&at)?))).collect()
    }

    /// The blocks that wait for the end of a capture.
    pub(super) fn captured(&self) -> Vec<u64> {
        let captured = |waiting: &Waiting| !waiting.in_hand && !waiting.capturing.is_empty();
        let captured = self.blocks.iter().filter(|(_, waiting)| captured(waiting));
        captured.map(|(offset, _)| *offset).collect()
    }
}
