//! How many frames there have been throughout the last cycles. Pure.
//!
//! A program's own memory comes and goes within a step, and with it what weights can have. A plan
//! for more frames than stay throughout is one for fewer a moment later, and each change voids what
//! was fetched ahead. So a plan has what there was at the worst moment of this cycle and of the
//! last: fewer frames count at once, more when they have lasted.

/// See the module's text.
#[derive(Debug)]
pub(super) struct Fewest {
    in_last_cycle: u64,
    in_this_cycle: u64,
}

impl Default for Fewest {
    fn default() -> Self {
        Self { in_last_cycle: u64::MAX, in_this_cycle: u64::MAX }
    }
}

impl Fewest {
    /// There are so many now. Returns those that there were throughout.
    pub(super) fn see(&mut self, frames: u64) -> u64 {
        self.in_this_cycle = self.in_this_cycle.min(frames);
        self.in_this_cycle.min(self.in_last_cycle)
    }

    /// A cycle has ended.
    pub(super) fn turn(&mut self) {
        self.in_last_cycle = std::mem::replace(&mut self.in_this_cycle, u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_count_at_once_and_more_when_they_have_lasted() {
        let mut fewest = Fewest::default();
        assert_eq!(fewest.see(100), 100);
        assert_eq!(fewest.see(80), 80);
        assert_eq!(fewest.see(100), 80);
        fewest.turn();
        assert_eq!(fewest.see(100), 80, "the last cycle had fewer");
        fewest.turn();
        assert_eq!(fewest.see(100), 100);
    }

    #[test]
    fn what_comes_and_goes_in_each_cycle_is_nothing_to_plan_for() {
        let mut fewest = Fewest::default();
        let seen: Vec<u64> = (0..20)
            .map(|_| {
                fewest.turn();
                [100, 70, 90, 100].map(|frames| fewest.see(frames))[3]
            })
            .collect();
        assert_eq!(seen, [70; 20]);
        // It ends: after a whole cycle without.
        fewest.turn();
        assert_eq!(fewest.see(100), 70);
        fewest.turn();
        assert_eq!(fewest.see(100), 100);
    }
}
