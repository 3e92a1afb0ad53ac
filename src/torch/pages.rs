//! The arena's pages: which are mapped, for what, and how many live blocks touch each.
//!
//! Numbers in, numbers out. A page without live blocks is empty: it can be given back, whatever its
//! cached pieces are. Counts the runs of neighbouring mapped pages of a kind, which are PyTorch's
//! segments. What the pieces are is `heap`'s business, the reserve's rule is `reserve`'s.

use std::ops::Range;

use super::reserve::Reserve;
use super::statistics::Kind;
use crate::units::Generation;

/// What a page is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Use {
    /// It has no frame.
    Unmapped,
    /// A thread is getting it a frame.
    Mapping,
    /// Blocks that are cut from pages.
    Large,
    /// Slabs: the index of its `ChunkPage`.
    Small(u32),
}

/// One page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page {
    pub(super) used_for: Use,
    /// Index of the pool that it belongs to while it is mapped.
    pub(super) pool: u32,
    /// Live blocks, slabs, and graph pools that keep it.
    pub(super) live: u32,
    /// Of the pin that keeps its frame.
    pub(super) generation: Generation,
}

const NEW: Page = Page { used_for: Use::Unmapped, pool: 0, live: 0, generation: Generation(0) };

/// See the module's text.
pub(super) struct Pages {
    pages: Vec<Page>,
    shift: u32,
    /// Pages of the arena.
    count: u32,
    /// Pages that are mapped, or about to be.
    mapped: u64,
    /// Of those, the ones with something live.
    used: u64,
    pub(super) reserve: Reserve,
}

impl Pages {
    /// `count` pages of `1 << shift` bytes, none of them mapped.
    pub(super) fn new(count: u32, shift: u32, reserve: Reserve) -> Self {
        Self { pages: Vec::new(), shift, count, mapped: 0, used: 0, reserve }
    }

    /// Pages of the arena.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// One past the highest page that was ever mapped.
    pub(super) fn known(&self) -> u32 {
        self.pages.len() as u32
    }

    /// Pages that are mapped, or about to be.
    pub(super) fn mapped(&self) -> u64 {
        self.mapped
    }

    /// Mapped pages with something live.
    pub(super) fn used(&self) -> u64 {
        self.used
    }

    #[inline(always)]
    pub(super) fn index_of(&self, offset: u64) -> u32 {
        (offset >> self.shift) as u32
    }

    pub(super) fn start_of(&self, page: u32) -> u64 {
        u64::from(page) << self.shift
    }

    pub(super) fn range_of(&self, page: u32) -> Range<u64> {
        self.start_of(page)..self.start_of(page + 1)
    }

    /// The page, if it was ever mapped.
    #[inline(always)]
    pub(super) fn get(&self, page: u32) -> Option<&Page> {
        self.pages.get(page as usize)
    }

    pub(super) fn page(&self, page: u32) -> Page {
        self.get(page).copied().unwrap_or(NEW)
    }

    fn page_mut(&mut self, page: u32) -> &mut Page {
        let page = page as usize;
        if page >= self.pages.len() {
            self.pages.resize(page + 1, NEW);
        }
        &mut self.pages[page]
    }

    /// Counts a live block in each page that it touches.
    #[inline(always)]
    pub(super) fn add_live(&mut self, bytes: Range<u64>) {
        for page in self.index_of(bytes.start)..=self.index_of(bytes.end - 1) {
            self.keep(page);
        }
    }

    /// The block is gone.
    #[inline(always)]
    pub(super) fn remove_live(&mut self, bytes: Range<u64>) {
        for page in self.index_of(bytes.start)..=self.index_of(bytes.end - 1) {
            self.let_go(page);
        }
    }

    /// Counts one thing that keeps a page.
    #[inline(always)]
    pub(super) fn keep(&mut self, page: u32) {
        let page = &mut self.pages[page as usize];
        page.live += 1;
        if page.live == 1 {
            self.used += 1;
            self.reserve.observe(self.used);
        }
    }

    #[inline(always)]
    pub(super) fn let_go(&mut self, page: u32) {
        let page = &mut self.pages[page as usize];
        page.live -= 1;
        self.used -= u64::from(page.live == 0);
    }

    /// A thread is about to get the page a frame for a pool.
    pub(super) fn start_mapping(&mut self, page: u32, pool: u32) {
        let entry = self.page_mut(page);
        debug_assert_eq!(entry.used_for, Use::Unmapped, "page {page} is mapped twice");
        (entry.used_for, entry.pool) = (Use::Mapping, pool);
        self.mapped += 1;
    }

    /// The page did not get a frame.
    pub(super) fn cancel_mapping(&mut self, page: u32) {
        let entry = self.page_mut(page);
        debug_assert_eq!((entry.used_for, entry.live), (Use::Mapping, 0));
        entry.used_for = Use::Unmapped;
        self.mapped -= 1;
    }

    /// The page has its frame. Returns by how much the segments of the kind changed.
    pub(super) fn note_mapped(&mut self, page: u32, generation: Generation, for_: Use) -> i64 {
        let entry = self.page_mut(page);
        debug_assert_eq!(entry.used_for, Use::Mapping);
        (entry.used_for, entry.generation) = (for_, generation);
        self.joined(page)
    }

    /// The page is given back. As [`Pages::note_mapped`].
    pub(super) fn note_unmapped(&mut self, page: u32) -> i64 {
        let change = -self.joined(page);
        let entry = self.page_mut(page);
        debug_assert_eq!(entry.live, 0, "page {page} is used");
        entry.used_for = Use::Unmapped;
        self.mapped -= 1;
        change
    }

    /// A page changes between large blocks and slabs: by how much the segments of its old kind and
    /// those of its new kind changed.
    pub(super) fn turn(&mut self, page: u32, for_: Use) -> (i64, i64) {
        let old = -self.joined(page);
        self.page_mut(page).used_for = for_;
        (old, self.joined(page))
    }

    /// A page goes to another pool: by how much the segments of its kind changed.
    pub(super) fn set_pool(&mut self, page: u32, pool: u32) -> i64 {
        let old = self.joined(page);
        self.page_mut(page).pool = pool;
        self.joined(page) - old
    }

    /// 1 for a page by itself, 0 beside one of its kind and pool, -1 between two: what it adds to
    /// the number of runs.
    fn joined(&self, page: u32) -> i64 {
        let like = |page: u32| {
            let page = self.page(page);
            kind_of(page.used_for).map(|kind| (kind, page.pool))
        };
        let own = like(page);
        let before = page.checked_sub(1).and_then(like);
        let after = like(page + 1);
        debug_assert!(own.is_some());
        1 - i64::from(before == own) - i64::from(after == own)
    }

    /// Mapped pages that nothing keeps, highest first.
    pub(super) fn empty(&self) -> impl Iterator<Item = u32> {
        let mapped = |page: &Page| kind_of(page.used_for).is_some();
        let empty = move |(_, page): &(usize, &Page)| mapped(page) && page.live == 0;
        self.pages.iter().enumerate().rev().filter(empty).map(|(index, _)| index as u32)
    }

    /// Pages that could be given back at most.
    pub(super) fn empty_count(&self) -> u64 {
        // What is being mapped counts as mapped and, until then, not as used.
        self.mapped.saturating_sub(self.used)
    }
}

/// Which requests a page serves; `None` for one without a frame.
pub(super) fn kind_of(used_for: Use) -> Option<Kind> {
    match used_for {
        Use::Unmapped | Use::Mapping => None,
        Use::Large => Some(Kind::Large),
        Use::Small(_) => Some(Kind::Small),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_mapped_pages_are_counted_as_they_join_and_part() {
        let mut pages = Pages::new(100, 12, Reserve::default());
        let mut runs = 0;
        for page in [3, 5, 4, 9] {
            pages.start_mapping(page, 0);
            runs += pages.note_mapped(page, Generation(1), Use::Large);
        }
        assert_eq!((runs, pages.mapped(), pages.used()), (2, 4, 0));
        assert_eq!(pages.turn(4, Use::Small(0)), (1, 1));
        assert_eq!(pages.turn(4, Use::Large), (-1, -1));
        runs += pages.note_unmapped(4);
        assert_eq!(runs, 3);
        pages.add_live(pages.start_of(3) + 5..pages.start_of(3) + 6);
        assert_eq!(pages.empty().collect::<Vec<_>>(), [9, 5]);
        pages.remove_live(pages.start_of(3) + 5..pages.start_of(3) + 6);
        assert_eq!((pages.empty().count(), pages.empty_count()), (3, 3));
    }
}
