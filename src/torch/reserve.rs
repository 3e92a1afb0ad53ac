//! How many pages a cache may keep: as many as were in use at a time lately.
//!
//! A step of training or sampling uses and frees the same memory again and again. What it will need
//! in a moment stays, so that weights and activations do not trade frames at each step; what was
//! needed in an earlier phase goes. Pages in, pages out; the time is the caller's.

use std::time::Duration;

/// A peak counts for one to two of these.
pub(super) const WINDOW: Duration = Duration::from_secs(8);

/// See the module's text.
#[derive(Default, Debug)]
pub(super) struct Reserve {
    started: Duration,
    peak: u64,
    before: u64,
}

impl Reserve {
    /// So many pages are in use.
    #[inline(always)]
    pub(super) fn observe(&mut self, used: u64) {
        self.peak = self.peak.max(used);
    }

    /// Pages that may stay mapped at `now`, of which `used` are in use.
    pub(super) fn pages(&mut self, now: Duration, used: u64) -> u64 {
        let age = now.saturating_sub(self.started);
        if age >= WINDOW {
            self.before = if age >= WINDOW * 2 { used } else { self.peak };
            self.peak = used;
            self.started = now;
        }
        self.observe(used);
        self.peak.max(self.before)
    }

    /// Peaks until now count no more.
    pub(super) fn forget(&mut self, now: Duration, used: u64) {
        *self = Self { started: now, peak: used, before: used };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        reserve.forget(WINDOW * 6, 1);
        assert_eq!(reserve.pages(WINDOW * 6, 1), 1);
    }
}
