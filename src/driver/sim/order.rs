//! Happens-before: which work is known to have finished before which.
//!
//! Every stream has a component in a vector clock; each operation ticks it. An event takes the
//! clock of its record, a wait merges it, and what the host has seen finish is the host's clock,
//! merged into everything enqueued afterwards. All of it is decided when work is *enqueued*, since
//! a wait takes the record of its moment: a breach is found whatever the interleaving, on the call
//! that makes it. Each frame remembers its accesses by exact byte range, and its latest history.
//! There is one host clock: what one thread has seen, all threads are taken to know.

use std::collections::VecDeque;
use std::fmt;

use crate::units::DeviceAddress;

/// A vector clock; a missing component is 0.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(super) struct Clock(Vec<u64>);

impl Clock {
    pub(super) fn get(&self, slot: usize) -> u64 {
        self.0.get(slot).copied().unwrap_or(0)
    }

    pub(super) fn raise(&mut self, slot: usize, tick: u64) {
        if self.0.len() <= slot {
            self.0.resize(slot + 1, 0);
        }
        self.0[slot] = self.0[slot].max(tick);
    }

    pub(super) fn merge(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// The first component in which `other` is ahead of this clock.
    pub(super) fn first_unseen(&self, other: &Self) -> Option<usize> {
        (0..other.0.len()).find(|&slot| other.0[slot] > self.get(slot))
    }
}

/// The host's clock, and the clock components given to streams.
#[derive(Default)]
pub(super) struct Order {
    pub(super) host: Clock,
    /// By slot: the last tick of the stream that had it, and its id, for messages.
    slots: Vec<(u64, u64)>,
    free: Vec<usize>,
}

impl Order {
    /// A component for a new stream, and the tick that it continues from.
    pub(super) fn take_slot(&mut self, stream: u64) -> (usize, u64) {
        if let Some(slot) = self.free.pop() {
            self.slots[slot].1 = stream;
            return (slot, self.slots[slot].0);
        }
        self.slots.push((0, stream));
        (self.slots.len() - 1, 0)
    }

    /// Gives a destroyed stream's component back, if the host knows that all its work is done.
    /// Only then may another stream continue it: everything it does is ordered after that work.
    pub(super) fn give_slot(&mut self, slot: usize, last_tick: u64) -> bool {
        if self.host.get(slot) < last_tick {
            return false;
        }
        self.slots[slot].0 = last_tick;
        self.free.push(slot);
        true
    }

    pub(super) fn stream_of(&self, slot: usize) -> u64 {
        self.slots[slot].1
    }
}

/// What an operation does to bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AccessKind {
    Read,
    Write,
    /// An atomic addition: two of them need no order.
    Add,
}

impl fmt::Display for AccessKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Add => "atomic addition",
        })
    }
}

/// One access of an operation to one frame, bytes counted from the frame's start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) kind: AccessKind,
    pub(super) slot: usize,
    pub(super) tick: u64,
    pub(super) stream: u64,
    pub(super) operation: u64,
}

impl Access {
    fn conflicts(&self, other: &Self) -> bool {
        let harmless = self.kind == other.kind && self.kind != AccessKind::Write;
        !harmless && self.start < other.end && other.start < self.end
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { start, end, kind, stream, operation, .. } = self;
        write!(f, "{kind} of bytes {start:#x}..{end:#x} by stream {stream} operation {operation}")
    }
}

/// Something that happened to a frame.
#[derive(Clone, Copy, Debug)]
pub(super) enum FrameEvent {
    Created,
    Mapped(DeviceAddress),
    AccessSet(DeviceAddress),
    Accessed(Access),
    Unmapped(DeviceAddress),
    Released,
}

impl fmt::Display for FrameEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Created => f.write_str("created"),
            Self::Mapped(address) => write!(f, "mapped at {address}"),
            Self::AccessSet(address) => write!(f, "access set at {address}"),
            Self::Accessed(access) => access.fmt(f),
            Self::Unmapped(address) => write!(f, "unmapped at {address}"),
            Self::Released => f.write_str("handle released"),
        }
    }
}

/// Events that a frame's history holds.
const HISTORY: usize = 16;
/// Accesses unknown to the host that a frame remembers; beyond, the oldest are forgotten, and a
/// race with them is missed.
const ACCESSES_MAX: usize = 4096;

/// What is remembered about a frame.
#[derive(Default)]
pub(super) struct FrameRecord {
    accesses: Vec<Access>,
    history: VecDeque<FrameEvent>,
}

impl FrameRecord {
    pub(super) fn note(&mut self, event: FrameEvent) {
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(event);
    }

    /// The latest history, oldest first.
    pub(super) fn history(&self) -> String {
        let events: Vec<_> = self.history.iter().map(ToString::to_string).collect();
        events.join("; ")
    }

    /// Adds the accesses of an operation whose clock is `clock`; returns the earlier access that
    /// it races with, if there is one.
    pub(super) fn access(&mut self, new: Access, clock: &Clock, host: &Clock) -> Option<Access> {
        let mut race = None;
        self.accesses.retain(|old| {
            // Everything enqueued from now on is ordered after what the host has seen.
            if old.tick <= host.get(old.slot) {
                return false;
            }
            let ordered = old.tick <= clock.get(old.slot);
            if !ordered && race.is_none() && old.conflicts(&new) {
                race = Some(*old);
            }
            // Whoever races with the covered one and not with the new one cannot exist.
            let covered = new.start <= old.start && old.end <= new.end;
            let same = old.slot == new.slot && old.kind == new.kind;
            !(ordered && covered && (new.kind == AccessKind::Write || same))
        });
        if self.accesses.len() == ACCESSES_MAX {
            self.accesses.remove(0);
        }
        self.accesses.push(new);
        self.note(FrameEvent::Accessed(new));
        race
    }

    /// A write to the bytes that `clock` is not ordered after.
    pub(super) fn unseen_write(&self, start: u64, end: u64, clock: &Clock) -> Option<Access> {
        self.accesses
            .iter()
            .find(|old| {
                old.kind != AccessKind::Read
                    && old.start < end
                    && start < old.end
                    && old.tick > clock.get(old.slot)
            })
            .copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(kind: AccessKind, slot: usize, tick: u64, bytes: std::ops::Range<u64>) -> Access {
        let (start, end) = (bytes.start, bytes.end);
        Access { start, end, kind, slot, tick, stream: slot as u64, operation: tick }
    }

    fn clock(ticks: &[u64]) -> Clock {
        Clock(ticks.to_vec())
    }

    #[test]
    fn unordered_writes_race_and_ordered_ones_do_not() {
        let (mut record, host) = (FrameRecord::default(), Clock::default());
        let write = |slot, tick| access(AccessKind::Write, slot, tick, 0..8);
        assert!(record.access(write(0, 1), &clock(&[1]), &host).is_none());
        assert!(record.access(write(1, 1), &clock(&[1, 1]), &host).is_none());
        assert!(record.access(write(0, 2), &clock(&[2]), &host).is_some());
    }

    #[test]
    fn only_touching_bytes_race_and_additions_commute() {
        let (mut record, host) = (FrameRecord::default(), Clock::default());
        assert!(
            record.access(access(AccessKind::Write, 0, 1, 0..8), &clock(&[1]), &host).is_none()
        );
        let beside = access(AccessKind::Write, 1, 1, 8..16);
        assert!(record.access(beside, &clock(&[0, 1]), &host).is_none());
        let add = |slot, tick| access(AccessKind::Add, slot, tick, 16..24);
        assert!(record.access(add(0, 2), &clock(&[2]), &host).is_none());
        assert!(record.access(add(1, 2), &clock(&[0, 2]), &host).is_none());
        let read = access(AccessKind::Read, 2, 1, 16..17);
        assert!(record.access(read, &clock(&[0, 0, 1]), &host).is_some());
    }

    #[test]
    fn a_slot_is_reused_only_after_the_host_has_seen_its_end() {
        let mut order = Order::default();
        let (slot, tick) = order.take_slot(1);
        assert!(!order.give_slot(slot, tick + 3));
        order.host.raise(slot, tick + 3);
        assert!(order.give_slot(slot, tick + 3));
        assert_eq!(order.take_slot(2), (slot, tick + 3));
    }
}
