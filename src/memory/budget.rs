//! How many bytes of frames a runtime may hold: a limit, what the driver says, and headroom.
//!
//! budget = min(explicit limit if one is set, frames held + driver-free - headroom), in whole
//! pages. Pure: observations come in as numbers, the answer goes out; time and randomness are the
//! caller's. Does not know what the frames are used for.

/// What determines the budget at the moment, for messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BudgetSource {
    /// The explicit limit.
    #[default]
    Limit,
    /// Frames held and driver-free memory less headroom.
    DriverFree,
    /// The driver refused memory that it had called free, until the next observation.
    DriverRefused,
    /// Another program took memory; not enough has come back to grow again.
    Shrunk,
}

impl BudgetSource {
    /// A few words for a message.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Limit => "explicit",
            Self::DriverFree => "automatic: driver-free memory less headroom",
            Self::DriverRefused => "automatic: the driver refused more",
            Self::Shrunk => "automatic: shrunk for another program",
        }
    }
}

/// The budget of one device.
#[derive(Clone, Debug)]
pub struct Budget {
    limit: Option<u64>,
    headroom: u64,
    page_bytes: u64,
    observed: Option<Observation>,
    refused_at: Option<u64>,
    shrunk_to: Option<u64>,
    jitter: u64,
}

#[derive(Clone, Copy, Debug)]
struct Observation {
    held: u64,
    free: u64,
}

impl Budget {
    /// A budget with an optional explicit limit and a headroom, in bytes. `jitter` is any number
    /// that differs between processes.
    #[must_use]
    pub fn new(limit: Option<u64>, headroom: u64, page_bytes: u64, jitter: u64) -> Self {
        let observed = None;
        let (refused_at, shrunk_to) = (None, None);
        Self { limit, headroom, page_bytes, observed, refused_at, shrunk_to, jitter }
    }

    /// Sets or lifts the explicit limit, in bytes.
    pub fn set_limit(&mut self, limit: Option<u64>) {
        self.limit = limit;
    }

    /// The explicit limit, in bytes, as it was set.
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Sets the headroom, in bytes. A shrink by another program is forgotten: the user knows.
    pub fn set_headroom(&mut self, headroom: u64) {
        self.headroom = headroom;
        self.shrunk_to = None;
    }

    /// The headroom, in bytes, as it was set.
    #[must_use]
    pub fn headroom(&self) -> u64 {
        self.headroom
    }

    /// Takes in what the driver called free, of `total` bytes, while we held `held` bytes of
    /// frames.
    pub fn observe(&mut self, held: u64, free: u64, total: u64) {
        self.observed = Some(Observation { held, free });
        self.refused_at = None;
        let automatic = (held + free).saturating_sub(self.headroom);
        if automatic < held {
            self.shrunk_to = Some(automatic);
        } else if self.shrunk_to.is_some() && free >= self.growth_threshold(total) {
            self.shrunk_to = None;
        }
    }

    /// The driver refused a frame while we held `held` bytes: no more until the next observation.
    pub fn refuse(&mut self, held: u64) {
        self.refused_at = Some(held);
    }

    /// Bytes of frames that may be held, whole pages, and what determines them.
    #[must_use]
    pub fn allowed(&self) -> (u64, BudgetSource) {
        let automatic = self
            .observed
            .map_or(u64::MAX, |seen| (seen.held + seen.free).saturating_sub(self.headroom));
        let (allowed, source) = [
            (self.limit.unwrap_or(u64::MAX), BudgetSource::Limit),
            (self.refused_at.unwrap_or(u64::MAX), BudgetSource::DriverRefused),
            (self.shrunk_to.unwrap_or(u64::MAX), BudgetSource::Shrunk),
            (automatic, BudgetSource::DriverFree),
        ]
        .into_iter()
        .min_by_key(|(bytes, _)| *bytes)
        .expect("four candidates");
        (allowed / self.page_bytes * self.page_bytes, source)
    }

    /// Growing back after a shrink needs twice the headroom, and up to a quarter more that differs
    /// between processes, so that two of them do not trade pages for ever. Where so much can never
    /// be free, halfway from the headroom to all of the device will do.
    fn growth_threshold(&self, total: u64) -> u64 {
        let twice = self.headroom.saturating_mul(2);
        let threshold = twice.saturating_add(twice / 4 * (self.jitter % 256) / 256);
        threshold.min(self.headroom + total.saturating_sub(self.headroom) / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: u64 = 16;

    #[test]
    fn the_smallest_bound_holds_and_is_named() {
        let mut budget = Budget::new(Some(10 * P + 3), P, P, 0);
        assert_eq!(budget.allowed(), (10 * P, BudgetSource::Limit));
        budget.observe(2 * P, 5 * P, 1000 * P);
        assert_eq!(budget.allowed(), (6 * P, BudgetSource::DriverFree));
        budget.refuse(3 * P);
        assert_eq!(budget.allowed(), (3 * P, BudgetSource::DriverRefused));
        budget.observe(3 * P, 100 * P, 1000 * P);
        assert_eq!(budget.allowed(), (10 * P, BudgetSource::Limit));
    }

    #[test]
    fn growing_back_needs_twice_the_headroom() {
        let mut budget = Budget::new(None, 2 * P, P, 0);
        budget.observe(6 * P, P, 1000 * P);
        assert_eq!(budget.allowed(), (5 * P, BudgetSource::Shrunk));
        budget.observe(5 * P, 3 * P, 1000 * P);
        assert_eq!(budget.allowed(), (5 * P, BudgetSource::Shrunk));
        budget.observe(5 * P, 4 * P, 1000 * P);
        assert_eq!(budget.allowed(), (7 * P, BudgetSource::DriverFree));
    }

    #[test]
    fn a_headroom_of_most_of_the_device_does_not_stick() {
        let mut budget = Budget::new(None, 8 * P, P, 0);
        budget.observe(2 * P, 7 * P, 10 * P);
        assert_eq!(budget.allowed(), (P, BudgetSource::Shrunk));
        budget.observe(P, 9 * P, 10 * P);
        assert_eq!(budget.allowed(), (2 * P, BudgetSource::DriverFree));
    }

    #[test]
    fn headroom_beyond_everything_leaves_nothing() {
        let mut budget = Budget::new(None, u64::MAX, P, 255);
        budget.observe(4 * P, 4 * P, 1000 * P);
        assert_eq!(budget.allowed().0, 0);
    }
}
