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

    /// Its first page; an empty span has none.
    #[must_use]
    pub fn first_page(&self) -> Option<PageRef> {
        self.pages().next()
    }

    /// Its pages, by rising index.
    pub fn pages(&self) -> impl DoubleEndedIterator<Item = PageRef> + use<> {
        let bar = self.bar;
        (self.first..self.end).map(move |page| PageRef { bar, page })
    }

    /// Whether every page of `other` is one of its own.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        self.bar == other.bar && self.first <= other.first && other.end <= self.end
    }
}

/// Adds a span, unless it is empty: joined to the last one where that ends in or at it, as tensors
/// do that lie side by side or share a page.
pub fn join(span: Span, joined: &mut Vec<Span>) {
    if span.page_count() == 0 {
        return;
    }
    match joined.last_mut() {
        Some(last) if last.bar == span.bar && (last.first..=last.end).contains(&span.first) => {
            last.end = last.end.max(span.end);
        }
        _ => joined.push(span),
    }
}

/// The spans without empty ones, each joined to the one before it where [`join`] does that.
pub(super) fn join_all(spans: &[Span], joined: &mut Vec<Span>) {
    joined.clear();
    spans.iter().for_each(|span| join(*span, joined));
}
