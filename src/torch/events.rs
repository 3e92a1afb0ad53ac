//! What the scopes of a memory graph did, to compare with: a tree of events.
//!
//! A path from the root is one way that the scopes went; where a later pass does something else
//! the path branches. Numbers in, numbers out: knows no memory, and nothing of who does what.

/// Events that are kept at most: 8 MiB of them. A program that has done so many different things
/// does not repeat itself.
const EVENTS_MAX: usize = 1 << 18;
/// Ways on from one event at most, for the same reason, scopes' beginnings aside.
const WAYS_MAX: usize = 64;
const NONE: u32 = u32::MAX;

/// Before the first event.
pub(super) const ROOT: u32 = 0;

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    /// A scope of a name began.
    Enter(u64),
    /// The innermost scope ended.
    Leave,
    /// So many bytes were taken from an offset on.
    Take {
        /// Where.
        start: u64,
        /// How many.
        bytes: u64,
    },
    /// The block at an offset was freed.
    Give(u64),
}

struct Node {
    event: Event,
    /// The first event that came after this one.
    child: u32,
    /// Another event that came after the same one.
    sibling: u32,
}

/// See the module's text.
pub(super) struct Events {
    nodes: Vec<Node>,
}

impl Default for Events {
    fn default() -> Self {
        // The root's event is none that is looked at.
        Self { nodes: vec![Node { event: Event::Leave, child: NONE, sibling: NONE }] }
    }
}

impl Events {
    /// The first of the events after `at` that fits.
    pub(super) fn find(&self, at: u32, fits: impl Fn(Event) -> bool) -> Option<u32> {
        self.after(at).find(|next| fits(self.nodes[*next as usize].event))
    }

    pub(super) fn event(&self, at: u32) -> Event {
        self.nodes[at as usize].event
    }

    /// Adds an event after `at`, behind those that are there; `None` when there are too many.
    pub(super) fn add(&mut self, at: u32, event: Event) -> Option<u32> {
        let is_scope = matches!(event, Event::Enter(_));
        let full = self.nodes.len() >= EVENTS_MAX;
        let last = self.after(at).enumerate().last();
        if full || !is_scope && last.is_some_and(|(ways, _)| ways + 1 >= WAYS_MAX) {
            return None;
        }
        let new = self.nodes.len() as u32;
        self.nodes.push(Node { event, child: NONE, sibling: NONE });
        match last {
            Some((_, last)) => self.nodes[last as usize].sibling = new,
            None => self.nodes[at as usize].child = new,
        }
        Some(new)
    }

    fn after(&self, at: u32) -> impl Iterator<Item = u32> {
        let some = |at: u32| (at != NONE).then_some(at);
        let first = some(self.nodes[at as usize].child);
        std::iter::successors(first, move |at| some(self.nodes[*at as usize].sibling))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_branch_where_something_else_happens() {
        let mut events = Events::default();
        let first = events.add(ROOT, Event::Enter(1)).unwrap();
        let take = Event::Take { start: 0, bytes: 512 };
        let (one, two) = (events.add(first, take), events.add(first, Event::Give(7)));
        assert_eq!(events.find(first, |event| event == take), one);
        assert_eq!(events.find(first, |event| event == Event::Give(7)), two);
        assert_eq!(events.find(first, |event| event == Event::Give(8)), None);
        assert_eq!(events.event(two.unwrap()), Event::Give(7));
        assert_eq!(events.find(two.unwrap(), |_| true), None);
        assert_eq!(events.find(ROOT, |_| true), Some(first));
    }

    #[test]
    fn there_is_an_end_to_what_is_kept() {
        let mut events = Events::default();
        let ways = (0..).map_while(|way| events.add(ROOT, Event::Give(way))).count();
        assert_eq!(ways, WAYS_MAX);
        // Scopes of many names are no sign of a program that never repeats itself.
        let named = events.add(ROOT, Event::Enter(1)).unwrap();
        let mut at = named;
        let mut length = 0;
        while let Some(next) = events.add(at, Event::Leave) {
            (at, length) = (next, length + 1);
        }
        assert_eq!(length + WAYS_MAX + 2, EVENTS_MAX);
        assert_eq!(events.add(named, Event::Leave), None);
    }
}
