//! Pages by their VBAR and index, one by one and in stretches.

use std::ops::Range;

/// A bound VBAR of the device, by a number that its owner gives it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct BarId(pub u32);

/// One page of a VBAR.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PageRef {
    /// The VBAR.
    pub bar: BarId,
    /// The page's index in it.
    pub page: u32,
}

/// A stretch of pages of a VBAR.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Span {
    /// The VBAR.
    pub bar: BarId,
    /// Its first page.
    pub first: u32,
    /// The page behind its last one.
    pub end: u32,
}

impl Span {
    /// The pages `pages` of `bar`; a range that ends before it starts has none.
    #[must_use]
    pub fn new(bar: BarId, pages: Range<u32>) -> Self {
        Self { bar, first: pages.start, end: pages.end.max(pages.start) }
    }

    /// Number of its pages.
    #[must_use]
    pub fn page_count(&self) -> u32 {
        self.end - self.first
    }

    /// Its pages, by rising index.
    pub fn pages(&self) -> impl Iterator<Item = PageRef> + use<> {
        let bar = self.bar;
        (self.first..self.end).map(move |page| PageRef { bar, page })
    }

    /// Whether every page of `other` is one of its own.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        self.bar == other.bar && self.first <= other.first && other.end <= self.end
    }
}

/// The spans without empty ones, each joined to the one before it where that ends in or at it:
/// tensors that lie side by side, or share a page.
pub(super) fn join(spans: &[Span], joined: &mut Vec<Span>) {
    joined.clear();
    for span in spans.iter().filter(|span| span.page_count() > 0) {
        match joined.last_mut() {
            Some(last) if last.bar == span.bar && (last.first..=last.end).contains(&span.first) => {
                last.end = last.end.max(span.end);
            }
            _ => joined.push(*span),
        }
    }
}
