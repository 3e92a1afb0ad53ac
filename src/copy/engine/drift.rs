//! Whether the device computes for other times than a plan was made for. Pure.
//!
//! Samples come in beside the time that the plan expects of their step. What counts is a whole
//! cycle's together: single steps vary, a program that changes its batch does so for all. Another
//! plan costs pages that move, so it takes several cycles in a row that say the same, and after
//! each new plan twice as many.

/// Cycles in a row that must be off before a first new plan.
const CYCLES: u32 = 3;
/// The same, at most.
const CYCLES_MAX: u32 = 48;
/// A cycle is off where its time is by more than one part in this many.
const PARTS: u64 = 5;

/// See the module's text.
#[derive(Clone, Debug)]
pub(super) struct Drift {
    expected_ns: u64,
    sampled_ns: u64,
    /// Cycles that were slower, negative: faster, one after the other.
    off: i64,
    patience: u32,
}

impl Default for Drift {
    fn default() -> Self {
        Self { expected_ns: 0, sampled_ns: 0, off: 0, patience: CYCLES }
    }
}

impl Drift {
    /// A step took `sampled_ns` nanoseconds of which the plan says `expected_ns`.
    pub(super) fn sample(&mut self, expected_ns: u64, sampled_ns: u64) {
        self.expected_ns = self.expected_ns.saturating_add(expected_ns);
        self.sampled_ns = self.sampled_ns.saturating_add(sampled_ns);
    }

    /// A cycle has ended. Returns whether all times are to be sampled anew.
    pub(super) fn end_cycle(&mut self) -> bool {
        let (expected, sampled) = (self.expected_ns, self.sampled_ns);
        (self.expected_ns, self.sampled_ns) = (0, 0);
        if sampled == 0 {
            return false;
        }
        self.off = match () {
            () if sampled > expected.saturating_add(expected / PARTS) => self.off.max(0) + 1,
            () if sampled < expected - expected / PARTS => self.off.min(0) - 1,
            () => 0,
        };
        let is_over = self.off.unsigned_abs() >= u64::from(self.patience);
        if is_over {
            self.off = 0;
            self.patience = (self.patience * 2).min(CYCLES_MAX);
        }
        is_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cycle(drift: &mut Drift, sampled_ns: u64) -> bool {
        (0..8).for_each(|_| drift.sample(1000, sampled_ns));
        drift.end_cycle()
    }

    #[test]
    fn three_slow_cycles_in_a_row_are_a_drift_and_noise_is_none() {
        let mut drift = Drift::default();
        assert!((0..100).all(|number| !cycle(&mut drift, 850 + number * 37 % 300)));
        // Slow, slow, fast, slow, slow: no two thirds of a batch.
        let times = [1500, 1500, 600, 1500, 1500, 1000];
        assert!(times.iter().all(|time| !cycle(&mut drift, *time)));
        assert_eq!([1300; 3].map(|time| cycle(&mut drift, time)), [false, false, true]);
        let found: Vec<_> = (0..6).map(|_| cycle(&mut drift, 500)).collect();
        assert_eq!(found, [false, false, false, false, false, true], "twice the patience");
        assert!(!drift.end_cycle(), "nothing was sampled");
    }

    #[test]
    fn one_slow_step_of_many_is_no_drift() {
        let mut drift = Drift::default();
        for _ in 0..10 {
            (0..63).for_each(|_| drift.sample(1000, 1000));
            drift.sample(1000, 9000);
            assert!(!drift.end_cycle());
        }
    }
}
