//! How many pages a cache may keep although they are free: as many as come to be in use again.
//!
//! A step of training or inference uses and frees the same memory again and again. What it will
//! need in a moment stays, so that weights and activations do not trade frames at each step; a
//! tensor that was there once, however large, keeps nothing. Pages in, pages out.
//!
//! Two rules, for two who ask:
//!
//! * Weights ([`Reserve::for_weights`]) get what does not *come back*. Of each number of pages the
//!   last two times are known at which so many came to be in use. Time is counted in pages that
//!   weights were loaded into, so that a step is as long at any speed. So many stay if weights got,
//!   from the first time to the second and from the second until now, no more pages than the budget
//!   has beside them. What is kept leaves room for all that was loaded meanwhile: a layer's
//!   activations stay while the next layer is loaded, and no tensor, however large, that comes once
//!   in a pass has weights of that pass take turns. What is kept in vain costs weights one turnover
//!   of their own frames.
//! * Frames that move within the cache ([`Reserve::pages`]) leave it what was in use at a time in
//!   the last seconds: nobody loses by that. It bounds the other, too: what was idle for long goes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A peak counts for one to two of these.
pub(super) const WINDOW: Duration = Duration::from_secs(8);

/// No reading of the clock.
const NEVER: u64 = u64::MAX;

/// When a number of pages came to be in use, last and the time before, in pages loaded by then.
#[derive(Clone, Copy, Debug)]
struct Rises {
    last: u64,
    before: u64,
}

const NO_RISE: Rises = Rises { last: NEVER, before: NEVER };

impl Rises {
    fn rise(&mut self, now: u64) {
        // Without a weight that was loaded in between it is the same time.
        if self.last != now {
            *self = Self { last: now, before: self.last };
        }
    }

    fn comes_back(self, now: u64, within: u64) -> bool {
        self.before != NEVER && self.last - self.before <= within && now - self.last <= within
    }
}

/// See the module's text.
#[derive(Default, Debug)]
pub(super) struct Reserve {
    started: Duration,
    peak: u64,
    before: u64,
    /// Pages that weights were loaded into so far: the pager counts them. What it was when somebody
    /// asked last is not enough: weights that find free frames ask nobody.
    loaded: Arc<AtomicU64>,
    /// Of each number of pages, from 0.
    rises: Vec<Rises>,
}

impl Reserve {
    /// `loaded` counts the pages that weights were loaded into.
    pub(super) fn new(loaded: Arc<AtomicU64>) -> Self {
        Self { loaded, ..Self::default() }
    }

    /// So many pages are in use, one more than before.
    #[inline(always)]
    pub(super) fn observe(&mut self, used: u64) {
        self.peak = self.peak.max(used);
        let loaded = self.loaded.load(Ordering::Relaxed);
        match self.rises.get_mut(used as usize) {
            Some(rises) => rises.rise(loaded),
            None => self.observe_first(used, loaded),
        }
    }

    #[cold]
    fn observe_first(&mut self, used: u64, loaded: u64) {
        self.rises.resize(used as usize + 1, NO_RISE);
        self.rises[used as usize].rise(loaded);
    }

    /// Pages that may stay mapped at `now`, of which `used` are in use.
    pub(super) fn pages(&mut self, now: Duration, used: u64) -> u64 {
        let age = now.saturating_sub(self.started);
        if age >= WINDOW {
            self.before = if age >= WINDOW * 2 { used } else { self.peak };
            self.peak = used;
            self.started = now;
        }
        self.peak = self.peak.max(used);
        self.peak.max(self.before)
    }

    /// Of `mapped` pages, those that weights may have, in a budget of so many pages. Who asks for a
    /// number is told of so many at most, and they count as loaded.
    pub(super) fn for_weights(
        &mut self,
        now: Duration,
        (used, mapped): (u64, u64),
        budget: u64,
        asked: Option<u64>,
    ) -> u64 {
        let most = asked.unwrap_or(u64::MAX);
        let known = self.rises.len().saturating_sub(1) as u64;
        let lately = self.pages(now, used).min(known).max(used);
        let beyond = mapped.saturating_sub(lately).min(most);
        let loaded = self.loaded.load(Ordering::Relaxed) + asked.unwrap_or(0);
        let rises = &self.rises;
        let is_spare =
            |pages: &u64| !rises[*pages as usize].comes_back(loaded, budget.saturating_sub(*pages));
        let idle = (used + 1..=lately.min(mapped)).rev().filter(is_spare);
        beyond + idle.take((most - beyond) as usize).count() as u64
    }

    /// What was in use until now counts no more.
    pub(super) fn forget(&mut self, now: Duration, used: u64) {
        self.rises.clear();
        (self.started, self.peak, self.before) = (now, used, used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    /// Pages come to be in use one by one, up to `peak`, and are free again.
    fn step(reserve: &mut Reserve, peak: u64) {
        (1..=peak).for_each(|used| reserve.observe(used));
    }

    /// Of 50 pages that are mapped, in a budget of 40, those that weights may not have.
    fn kept(reserve: &mut Reserve, now: Duration, used: u64) -> u64 {
        50 - reserve.for_weights(now, (used, 50), 40, None)
    }

    fn load(reserve: &mut Reserve, pages: u64) {
        reserve.loaded.fetch_add(pages, Ordering::Relaxed);
    }

    #[test]
    fn a_peak_counts_for_a_window_and_until_the_next_has_passed() {
        let mut reserve = Reserve::default();
        reserve.observe(9);
        assert_eq!(reserve.pages(WINDOW / 2, 3), 9);
        assert_eq!(reserve.pages(WINDOW, 3), 9);
        reserve.observe(5);
        assert_eq!(reserve.pages(WINDOW * 3 / 2, 3), 9);
        assert_eq!(reserve.pages(WINDOW * 2, 3), 5);
        assert_eq!(reserve.pages(WINDOW * 9, 2), 2);
    }

    #[test]
    fn what_is_in_use_is_never_less() {
        let mut reserve = Reserve::default();
        assert_eq!(reserve.pages(WINDOW * 5, 4), 4);
        assert_eq!(kept(&mut reserve, WINDOW * 5, 4), 4);
        reserve.forget(WINDOW * 6, 1);
        assert_eq!(reserve.pages(WINDOW * 6, 1), 1);
    }

    #[test]
    fn a_tensor_that_was_there_once_keeps_nothing_from_weights() {
        let mut reserve = Reserve::default();
        // However often, if no weight is loaded in between.
        (0..5).for_each(|_| step(&mut reserve, 40));
        assert_eq!(kept(&mut reserve, NOW, 0), 0);
        load(&mut reserve, 1);
        assert_eq!(kept(&mut reserve, NOW, 0), 0);
    }

    #[test]
    fn what_comes_back_between_weights_stays_and_long_lived_pages_do_not_add_to_it() {
        let mut reserve = Reserve::default();
        for layer in 0..50 {
            step(&mut reserve, 6);
            load(&mut reserve, 4);
            assert_eq!(kept(&mut reserve, NOW, 0), if layer == 0 { 0 } else { 6 });
        }
        // Three that stay, and two that come and go above them.
        let mut reserve = Reserve::default();
        step(&mut reserve, 3);
        for _ in 0..9 {
            (4..=5).for_each(|used| reserve.observe(used));
            load(&mut reserve, 4);
        }
        assert_eq!(kept(&mut reserve, NOW, 3), 5);
        assert_eq!(kept(&mut reserve, NOW, 0), 2);
    }

    #[test]
    fn a_tensor_that_comes_once_a_pass_leaves_room_for_the_pass() {
        let mut reserve = Reserve::default();
        for _ in 0..3 {
            step(&mut reserve, 40);
            load(&mut reserve, 30);
        }
        assert_eq!(kept(&mut reserve, NOW, 0), 10);
        // Who needs few is told of few.
        assert_eq!(reserve.for_weights(NOW, (0, 50), 40, Some(3)), 3);
        // And has room beside what is kept: with these 33 pages are loaded, and 7 stay.
        assert_eq!(reserve.for_weights(NOW, (0, 9), 40, Some(3)), 2);
        load(&mut reserve, 8);
        assert_eq!(kept(&mut reserve, NOW, 0), 2);
    }

    #[test]
    fn another_phase_frees_what_it_does_not_use() {
        let mut reserve = Reserve::default();
        for _ in 0..3 {
            step(&mut reserve, 10);
            load(&mut reserve, 4);
        }
        // The next one is smaller: what it does not use goes, the more of it the longer.
        for layer in 0..10 {
            step(&mut reserve, 2);
            let since = (layer + 1) * 4;
            let found = kept(&mut reserve, NOW, 0);
            assert_eq!(found, (40 - since).clamp(2, 10), "{layer}");
            load(&mut reserve, 4);
        }
        // A peak that is farther apart than that never counts.
        for _ in 0..5 {
            step(&mut reserve, 30);
            assert_eq!(kept(&mut reserve, NOW, 0), 2);
            for _ in 0..15 {
                load(&mut reserve, 4);
                step(&mut reserve, 2);
            }
        }
        reserve.forget(NOW, 0);
        assert_eq!(kept(&mut reserve, NOW, 0), 0);
    }
}
