//! Which staging slot comes next: the one whose last copy was enqueued longest ago. Pure.

use std::collections::VecDeque;

use crate::sync::ticket::Ticket;

/// The order of slots that are not in use by a thread.
#[derive(Default)]
pub struct Ring {
    idle: VecDeque<(usize, Ticket)>,
}

impl Ring {
    /// A ring of `count` slots that were never used.
    #[must_use]
    pub fn new(count: usize) -> Self {
        Self { idle: (0..count).map(|slot| (slot, Ticket::NONE)).collect() }
    }

    /// Takes the slot that was given back first, with the ticket of its last copy.
    pub fn take(&mut self) -> Option<(usize, Ticket)> {
        self.idle.pop_front()
    }

    /// Gives a slot back; its last copy is done at `ticket`.
    pub fn give_back(&mut self, slot: usize, ticket: Ticket) {
        debug_assert!(self.idle.iter().all(|(other, _)| *other != slot), "slot given back twice");
        if ticket.is_none() {
            self.idle.push_front((slot, ticket));
        } else {
            self.idle.push_back((slot, ticket));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_unused_slot_comes_first() {
        let mut ring = Ring::new(2);
        let (first, _) = ring.take().unwrap();
        let (second, _) = ring.take().unwrap();
        assert!(ring.take().is_none());
        ring.give_back(second, Ticket::new(0, 1));
        ring.give_back(first, Ticket::new(0, 2));
        assert_eq!(ring.take(), Some((second, Ticket::new(0, 1))));
        ring.give_back(second, Ticket::NONE);
        assert_eq!(ring.take(), Some((second, Ticket::NONE)));
    }
}
