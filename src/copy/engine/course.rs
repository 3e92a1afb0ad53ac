//! How far the engine is ahead of the program: pages entered, in use, and spent. Pure.
//!
//! The engine *enters* the steps that it expects, in their order; a page of an entered step is
//! wanted and must not lose its frame. The program's fault takes a step out of the front, its pages
//! are in use until they are unpinned; a page that is neither entered nor in use any more, and that
//! no plan keeps, is *spent*: its frame may go to the next page that is wanted. Numbers in, numbers
//! out: whether a page has its frame, and whether it can lose it, is the pager's to say.

use crate::model::schedule::{BarId, PageRef, Span};
use std::collections::{HashMap, HashSet, VecDeque};

/// What a fault was, as the course sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Arrival {
    /// The step in front.
    Expected,
    /// Another one: what was entered is void.
    Other,
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Course {
    /// Expected and not faulted yet, the next one first.
    entered: VecDeque<Box<[Span]>>,
    /// Times that a page is in an entered step or in use.
    uses: HashMap<PageRef, u32>,
    /// Pages of entered steps that nobody has fetched yet.
    wanted: VecDeque<PageRef>,
    /// Pages that may lose their frames, the first ones first.
    spent: VecDeque<PageRef>,
    /// The same, to be asked.
    is_spent: HashSet<PageRef>,
    /// Pages of entered steps that cannot be fetched: the program's fault says why.
    given_up: HashSet<PageRef>,
}

/// The pages of spans, one after the other.
pub(super) fn pages_of(spans: &[Span]) -> impl Iterator<Item = PageRef> + '_ {
    spans.iter().flat_map(Span::pages)
}

impl Course {
    /// Enters the step that is expected after all that are entered.
    pub(super) fn enter(&mut self, step: &[Span]) {
        for key in pages_of(step) {
            let uses = self.uses.entry(key).or_default();
            *uses += 1;
            if *uses == 1 {
                self.is_spent.remove(&key);
            }
            self.wanted.push_back(key);
        }
        self.entered.push_back(step.into());
    }

    /// Steps that are entered.
    pub(super) fn entered_count(&self) -> usize {
        self.entered.len()
    }

    /// Whether a step with these spans is the one in front.
    pub(super) fn is_next(&self, spans: &[Span]) -> bool {
        self.entered.front().is_some_and(|step| **step == *spans)
    }

    /// The program has faulted these spans. `kept` says whether a plan keeps a page.
    pub(super) fn faulted(&mut self, spans: &[Span], kept: impl Fn(PageRef) -> bool) -> Arrival {
        if self.is_next(spans) {
            // From entered to in use: the counts stay.
            self.entered.pop_front();
            return Arrival::Expected;
        }
        for key in pages_of(spans) {
            *self.uses.entry(key).or_default() += 1;
            self.is_spent.remove(&key);
        }
        self.clear(kept);
        Arrival::Other
    }

    /// The program has given the pins of a span back.
    pub(super) fn unpinned(&mut self, span: &Span, kept: impl Fn(PageRef) -> bool) {
        for page in span.pages() {
            self.end_use(page, &kept);
        }
    }

    /// Voids what is entered; what is in use stays so. What is needed last may lose its frame
    /// first.
    pub(super) fn clear(&mut self, kept: impl Fn(PageRef) -> bool) {
        self.wanted.clear();
        self.given_up.clear();
        for step in std::mem::take(&mut self.entered).iter().rev() {
            step.iter().rev().flat_map(|span| span.pages().rev()).for_each(|key| {
                self.end_use(key, &kept);
            });
        }
    }

    /// Whether one of the next `count` pages that were fetched has lost its frame since, as one
    /// does that the program's own memory was needed for.
    pub(super) fn has_lost(&self, count: usize, is_absent: impl Fn(PageRef) -> bool) -> bool {
        let wanted = self.wanted.front();
        let entered = self.entered.iter().flat_map(|step| pages_of(step));
        let mut fetched = entered.take_while(|page| Some(page) != wanted).take(count);
        fetched.any(|page| is_absent(page) && !self.given_up.contains(&page))
    }

    fn end_use(&mut self, key: PageRef, kept: &impl Fn(PageRef) -> bool) {
        // A use that began before anybody was told has no count.
        if let Some(uses) = self.uses.get_mut(&key) {
            *uses -= 1;
            if *uses > 0 {
                return;
            }
            self.uses.remove(&key);
            self.given_up.remove(&key);
        }
        if !kept(key) {
            self.add_spent(key);
        }
    }

    /// Adds a page that may lose its frame, unless it is needed.
    pub(super) fn add_spent(&mut self, key: PageRef) {
        if !self.uses.contains_key(&key) && self.is_spent.insert(key) {
            self.spent.push_back(key);
        }
    }

    /// Takes the page out that was spent first.
    pub(super) fn take_spent(&mut self) -> Option<PageRef> {
        // What was needed again meanwhile is in the line still, and not in the set.
        while let Some(key) = self.spent.pop_front() {
            if self.is_spent.remove(&key) {
                return Some(key);
            }
        }
        None
    }

    /// Whether the page is entered or in use.
    #[cfg(test)]
    pub(super) fn is_needed(&self, key: PageRef) -> bool {
        self.uses.contains_key(&key)
    }

    /// Pages that may lose their frames.
    #[cfg(test)]
    pub(super) fn spent_count(&self) -> usize {
        self.is_spent.len()
    }

    /// The pages that are wanted next, up to `count`.
    pub(super) fn wanted(&self, count: usize) -> Vec<PageRef> {
        self.wanted.iter().take(count).copied().collect()
    }

    /// The first `count` of the wanted pages have their frames.
    pub(super) fn fetched(&mut self, count: usize) {
        self.wanted.drain(..count.min(self.wanted.len()));
    }

    /// The first `count` of the wanted pages cannot have frames.
    pub(super) fn give_up(&mut self, count: usize) {
        self.given_up.extend(self.wanted.drain(..count.min(self.wanted.len())));
    }

    /// Takes pages off the front that `fetched` holds for.
    pub(super) fn skip_fetched(&mut self, fetched: impl Fn(PageRef) -> bool) {
        while self.wanted.front().is_some_and(|page| fetched(*page)) {
            self.wanted.pop_front();
        }
    }

    /// No page may lose its frame until it is added again.
    pub(super) fn clear_spent(&mut self) {
        self.spent.clear();
        self.is_spent.clear();
    }

    /// Whether every page of the entered steps was fetched.
    pub(super) fn is_all_fetched(&self) -> bool {
        self.wanted.is_empty()
    }

    /// Forgets everything about a VBAR.
    pub(super) fn forget(&mut self, bar: BarId) {
        self.entered.retain(|step| step.iter().all(|span| span.bar != bar));
        self.wanted.retain(|key| key.bar != bar);
        self.uses.retain(|key, _| key.bar != bar);
        self.given_up.retain(|key| key.bar != bar);
        self.spent.retain(|key| key.bar != bar);
        self.is_spent.retain(|key| key.bar != bar);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(pages: std::ops::Range<u32>) -> Span {
        Span::new(BarId(1), pages)
    }

    fn key(page: u32) -> PageRef {
        PageRef { bar: BarId(1), page }
    }

    const NONE_KEPT: fn(PageRef) -> bool = |_| false;

    #[test]
    fn a_page_is_spent_when_its_last_use_is_over() {
        let mut course = Course::default();
        // Page 1 is in both.
        course.enter(&[span(0..2)]);
        course.enter(&[span(1..3)]);
        assert_eq!(course.wanted(9), [key(0), key(1), key(1), key(2)]);
        course.fetched(4);
        assert_eq!(course.faulted(&[span(0..2)], NONE_KEPT), Arrival::Expected);
        assert_eq!(course.take_spent(), None);
        course.unpinned(&span(0..2), NONE_KEPT);
        assert_eq!((course.take_spent(), course.take_spent()), (Some(key(0)), None));
        course.faulted(&[span(1..3)], NONE_KEPT);
        course.unpinned(&span(1..3), |key| key.page == 2);
        assert_eq!((course.take_spent(), course.take_spent()), (Some(key(1)), None));
    }

    #[test]
    fn another_fault_voids_what_was_entered_and_keeps_what_is_in_use() {
        let mut course = Course::default();
        course.enter(&[span(0..1)]);
        course.enter(&[span(1..2)]);
        course.faulted(&[span(0..1)], NONE_KEPT);
        assert_eq!(course.faulted(&[span(7..8)], NONE_KEPT), Arrival::Other);
        assert_eq!((course.entered_count(), course.wanted(9)), (0, vec![]));
        assert_eq!((course.take_spent(), course.take_spent()), (Some(key(1)), None));
        assert!(course.is_needed(key(0)) && course.is_needed(key(7)));
    }

    #[test]
    fn what_is_void_goes_from_the_end() {
        let mut course = Course::default();
        course.add_spent(key(9));
        course.enter(&[span(0..2)]);
        course.enter(&[span(2..4)]);
        course.clear(|page| page.page == 2);
        let spent: Vec<_> = std::iter::from_fn(|| course.take_spent()).collect();
        // What was used before is needed later still.
        assert_eq!(spent, [9, 3, 1, 0].map(key));
    }

    #[test]
    fn a_fetched_page_without_a_frame_is_noticed_unless_it_cannot_have_one() {
        let mut course = Course::default();
        course.enter(&[span(0..2)]);
        course.enter(&[span(2..4)]);
        let is_absent = |absent: u32| move |page: PageRef| page.page == absent;
        // Nobody has fetched any yet.
        assert!(!course.has_lost(9, is_absent(0)));
        course.fetched(2);
        assert!(course.has_lost(9, is_absent(1)) && !course.has_lost(1, is_absent(1)));
        assert!(!course.has_lost(9, is_absent(2)));
        course.give_up(1);
        assert!(!course.has_lost(9, is_absent(2)) && !course.has_lost(9, is_absent(3)));
        // The next time it may have one.
        course.clear(NONE_KEPT);
        course.enter(&[span(2..3)]);
        course.fetched(1);
        assert!(course.has_lost(9, is_absent(2)));
    }

    #[test]
    fn a_spent_page_that_is_needed_again_is_not_taken() {
        let mut course = Course::default();
        course.add_spent(key(3));
        course.add_spent(key(4));
        course.enter(&[span(3..4)]);
        assert_eq!((course.spent_count(), course.take_spent()), (1, Some(key(4))));
        course.faulted(&[span(3..4)], NONE_KEPT);
        course.unpinned(&span(3..4), NONE_KEPT);
        assert_eq!((course.take_spent(), course.take_spent()), (Some(key(3)), None));
        // An unpin of a use that nobody was told of.
        course.unpinned(&span(9..10), NONE_KEPT);
        assert_eq!(course.take_spent(), Some(key(9)));
    }
}
