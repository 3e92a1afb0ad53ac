//! Which staging slot comes next: the one whose last copy was enqueued longest ago. Pure.

use std::collections::VecDeque;

use crate::sync::ticket::Ticket;

/// The slots that are not in use by a thread, in their order.
pub struct Ring<T> {
    idle: VecDeque<(T, Ticket)>,
}

impl<T> Ring<T> {
    /// A ring of slots that were never used.
    #[must_use]
    pub fn new(slots: impl IntoIterator<Item = T>) -> Self {
        Self { idle: slots.into_iter().map(|slot| (slot, Ticket::NONE)).collect() }
    }

    /// The ticket of the slot that comes next.
    #[must_use]
    pub fn next(&self) -> Option<Ticket> {
        self.idle.front().map(|(_, ticket)| *ticket)
    }

    /// Takes the slot that was given back first, with the ticket of its last copy.
    pub fn take(&mut self) -> Option<(T, Ticket)> {
        self.idle.pop_front()
    }

    /// Gives a slot back; its last copy is done at `ticket`.
    pub fn give_back(&mut self, slot: T, ticket: Ticket) {
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
        let mut ring = Ring::new(0..2);
        let (first, _) = ring.take().unwrap();
        let (second, _) = ring.take().unwrap();
        assert!(ring.take().is_none() && ring.next().is_none());
        ring.give_back(second, Ticket::new(0, 1));
        ring.give_back(first, Ticket::new(0, 2));
        assert_eq!(ring.next(), Some(Ticket::new(0, 1)));
        assert_eq!(ring.take(), Some((second, Ticket::new(0, 1))));
        ring.give_back(second, Ticket::NONE);
        assert_eq!(ring.take(), Some((second, Ticket::NONE)));
    }
}
