//! What the program's threads leave for the engine: short notes in the order of the events.
//!
//! Adding one takes a lock for nanoseconds and never waits for the engine. There is room for a
//! bounded number; past it the notes are thrown away and the engine is told, since an order with
//! holes in it is worth nothing.

use std::time::Duration;

use crate::model::schedule::Span;
use crate::sync::{Acquire, AtomicBool, Condvar, Mutex, Release};

/// Notes that there is room for.
const NOTES_MAX: usize = 1 << 16;
/// Faults that may lie unread while the engine sleeps.
const FAULTS_UNREAD: usize = 64;

/// One event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Note {
    /// A fault made these spans resident, at this time if there is a clock.
    Faulted { spans: Vec<Span>, at_ns: Option<u64> },
    /// Pins of a span were given back.
    Unpinned(Span),
    /// The VBAR of this number was closed.
    Closed(u32),
    /// The program had memory of VBARs given back.
    GaveBack,
    /// The order in which the program will fault.
    Hint(Vec<Vec<Span>>),
    /// A span that the program will want.
    Prefetch(Span),
}

/// What was left since the last time.
#[derive(Default)]
pub(super) struct Taken {
    pub(super) notes: Vec<Note>,
    /// Notes were thrown away.
    pub(super) overrun: bool,
}

pub(super) struct Notes {
    closed: AtomicBool,
    taken: Mutex<Taken>,
    added: Condvar,
}

impl Default for Notes {
    fn default() -> Self {
        let (taken, added) = (Mutex::default(), Condvar::new());
        Self { closed: AtomicBool::new(true), taken, added }
    }
}

impl Notes {
    /// Takes notes from now on.
    pub(super) fn open(&self) {
        *self.taken.lock() = Taken::default();
        self.closed.store(false, Release);
    }

    /// Takes no more notes, and wakes the engine up for the last time.
    pub(super) fn close(&self) {
        self.closed.store(true, Release);
        let mut taken = self.taken.lock();
        *taken = Taken::default();
        self.added.notify_all();
    }

    pub(super) fn add(&self, note: Note) {
        self.add_all(std::iter::once(note));
    }

    /// Adds notes of one event, and wakes the engine up at most once for them.
    pub(super) fn add_all(&self, notes: impl Iterator<Item = Note>) {
        if self.closed.load(Acquire) {
            return;
        }
        let mut taken = self.taken.lock();
        let mut wake = false;
        for note in notes {
            if taken.notes.len() >= NOTES_MAX {
                taken.notes.clear();
                taken.overrun = true;
            }
            // A fault by itself sets no frame free: the engine sleeps on until the unpin.
            wake |= !matches!(note, Note::Faulted { .. }) || taken.notes.len() >= FAULTS_UNREAD;
            taken.notes.push(note);
        }
        drop(taken);
        if wake {
            self.added.notify_one();
        }
    }

    /// Takes what there is, waiting for something at most `patience`. `None` when it is over.
    pub(super) fn take(&self, patience: Duration) -> Option<Taken> {
        let mut taken = self.taken.lock();
        if taken.notes.is_empty() && !taken.overrun && !self.closed.load(Acquire) {
            self.added.wait_for(&mut taken, patience);
        }
        if self.closed.load(Acquire) {
            return None;
        }
        Some(std::mem::take(&mut taken))
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Acquire)
    }

    /// Whether something was left since.
    pub(super) fn is_any(&self) -> bool {
        !self.taken.lock().notes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::schedule::BarId;

    #[test]
    fn notes_come_in_their_order_and_too_many_are_told() {
        let notes = Notes::default();
        notes.add(Note::Closed(1));
        assert!(notes.take(Duration::ZERO).is_none(), "closed at first");
        notes.open();
        let span = Span::new(BarId(1), 0..2);
        let faulted = || Note::Faulted { spans: vec![span], at_ns: Some(7) };
        notes.add(faulted());
        notes.add(Note::Unpinned(span));
        assert!(notes.is_any());
        let taken = notes.take(Duration::ZERO).unwrap();
        assert_eq!(taken.notes, [faulted(), Note::Unpinned(span)]);
        for _ in 0..=NOTES_MAX {
            notes.add(Note::Unpinned(span));
        }
        let taken = notes.take(Duration::ZERO).unwrap();
        assert!(taken.overrun && taken.notes.len() == 1);
        notes.close();
        assert!(notes.take(Duration::from_secs(9)).is_none());
    }
}
