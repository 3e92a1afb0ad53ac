//! Who loses pages, and when a watermark rises again. Numbers in, numbers out.
//!
//! Order of loss: class first (a smaller one loses first), then recency (the oldest loses first),
//! then, within a VBAR, higher addresses before lower. A fault takes only what ranks below itself,
//! so that a bare VBAR larger than the device keeps its prefix instead of chasing its own tail; a
//! bound one streams its tail through a few frames, first in first out.

use std::time::Duration;

/// Rank of a VBAR: smaller ranks lose pages first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Rank {
    /// The user's class; a larger one is kept longer.
    pub class: i32,
    /// Stamp of the creation or the last prioritising; larger is newer.
    pub recency: i64,
    /// Tie-break, and the VBAR's index.
    pub bar: u32,
}

/// Frames through which a bound VBAR streams what does not fit: enough for the range in use and
/// the next one of its size.
#[must_use]
pub fn streaming_page_count(request_pages: u32) -> u32 {
    request_pages.saturating_mul(2).max(2)
}

/// Raises a watermark after pressure, with hysteresis: by the smallest surplus of a whole window.
///
/// An eviction soon after a rise doubles the window, up to 64 times its first length.
#[derive(Clone, Debug)]
pub struct Healing {
    first_window: Duration,
    window: Duration,
    since: Option<Duration>,
    smallest: u32,
    healed: Option<Duration>,
}

impl Healing {
    /// A watermark that heals after `window` of surplus.
    #[must_use]
    pub fn new(window: Duration) -> Self {
        Self { first_window: window, window, since: None, smallest: 0, healed: None }
    }

    /// The budget has `surplus` pages to spare at `now` (any monotone clock). Returns the pages by
    /// which the watermark rises, 0 for most calls.
    pub fn observe(&mut self, now: Duration, surplus: u32) -> u32 {
        if surplus == 0 {
            self.since = None;
            return 0;
        }
        let Some(since) = self.since else {
            self.since = Some(now);
            self.smallest = surplus;
            return if self.window.is_zero() { self.heal(now, surplus) } else { 0 };
        };
        self.smallest = self.smallest.min(surplus);
        if now.saturating_sub(since) < self.window {
            return 0;
        }
        let pages = self.smallest;
        self.heal(now, pages)
    }

    /// A page of the VBAR was evicted at `now` for want of memory.
    pub fn evicted(&mut self, now: Duration) {
        self.since = None;
        let soon = |healed| now.saturating_sub(healed) < self.window * 2;
        if self.healed.take().is_some_and(soon) {
            self.window = (self.window * 2).min(self.first_window * 64);
        }
    }

    fn heal(&mut self, now: Duration, pages: u32) -> u32 {
        self.healed = Some(now);
        self.since = None;
        pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_watermark_heals_by_the_smallest_surplus() {
        let mut healing = Healing::new(at(100));
        assert_eq!(healing.observe(at(0), 9), 0);
        assert_eq!(healing.observe(at(50), 3), 0);
        assert_eq!(healing.observe(at(100), 7), 3);
        assert_eq!(healing.observe(at(101), 0), 0);
        assert_eq!(healing.observe(at(150), 5), 0);
        assert_eq!(healing.observe(at(249), 5), 0);
        assert_eq!(healing.observe(at(250), 5), 5);
    }

    #[test]
    fn an_eviction_soon_after_doubles_the_window() {
        let mut healing = Healing::new(at(100));
        healing.observe(at(0), 1);
        assert_eq!(healing.observe(at(100), 1), 1);
        healing.evicted(at(150));
        healing.observe(at(200), 1);
        assert_eq!(healing.observe(at(300), 1), 0);
        assert_eq!(healing.observe(at(400), 1), 1);
    }

    #[test]
    fn ranks_put_class_before_recency() {
        let rank = |class, recency| Rank { class, recency, bar: 0 };
        assert!(rank(-1, 9) < rank(0, 1));
        assert!(rank(0, 1) < rank(0, 2));
    }
}
