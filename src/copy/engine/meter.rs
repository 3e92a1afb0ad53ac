//! What a cycle came to: its time, the part that the device waited, and the link's. Pure.
//!
//! Readings of a clock and of a count of bytes come in; whoever has no clock gives none, and
//! nothing is measured. A cycle in which the program did something else is left out, and so is the
//! time for which it stood still, as one does that waits for its user.

use crate::model::placement::PassMeasured;

/// Readings as a cycle begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Reading {
    /// Any monotone clock, in nanoseconds.
    pub(super) at_ns: u64,
    /// Bytes that were copied to the device so far.
    pub(super) copied_bytes: u64,
}

/// See the module's text.
#[derive(Clone, Debug, Default)]
pub(super) struct Meter {
    began: Option<Reading>,
    /// The clock at the last step.
    last_ns: Option<u64>,
    /// Time since the cycle began for which the program stood still.
    paused_ns: u64,
    is_spoilt: bool,
}

impl Meter {
    /// The cycle that is under way does not count.
    pub(super) fn spoil(&mut self) {
        self.is_spoilt = true;
    }

    /// A step has come. One that came later than `longest_ns` after the last stood still meanwhile:
    /// no lack of bytes takes so long.
    pub(super) fn step(&mut self, at_ns: Option<u64>, longest_ns: u64) {
        let last = std::mem::replace(&mut self.last_ns, at_ns);
        if let (Some(last), Some(now)) = (last, at_ns) {
            let gap = now.saturating_sub(last);
            self.paused_ns += if gap > longest_ns { gap } else { 0 };
        }
    }

    /// A cycle begins, and the one before has ended, which computes for `compute_ns` nanoseconds;
    /// the link copies a MiB in `ns_per_mib`.
    pub(super) fn turn(
        &mut self,
        now: Option<Reading>,
        compute_ns: u64,
        ns_per_mib: u64,
    ) -> Option<PassMeasured> {
        let began = std::mem::replace(&mut self.began, now);
        let is_spoilt = std::mem::take(&mut self.is_spoilt);
        let paused_ns = std::mem::take(&mut self.paused_ns);
        let (began, now) = (began?, now?);
        if is_spoilt {
            return None;
        }
        let pass_ns = now.at_ns.checked_sub(began.at_ns)?.checked_sub(paused_ns)?;
        let bytes = u128::from(now.copied_bytes.saturating_sub(began.copied_bytes));
        let copy_ns = (bytes * u128::from(ns_per_mib)) >> 20;
        let copy_ns = u64::try_from(copy_ns).unwrap_or(u64::MAX);
        Some(PassMeasured { pass_ns, wait_ns: pass_ns.saturating_sub(compute_ns), copy_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cycle_is_measured_from_its_beginning_to_the_next_unless_it_is_spoilt() {
        let mut meter = Meter::default();
        let reading = |at_ns, mib: u64| Some(Reading { at_ns, copied_bytes: mib << 20 });
        assert_eq!(meter.turn(reading(1000, 5), 700, 10), None, "where it began is not known");
        let measured = PassMeasured { pass_ns: 900, wait_ns: 200, copy_ns: 30 };
        assert_eq!(meter.turn(reading(1900, 8), 700, 10), Some(measured));
        meter.spoil();
        assert_eq!(meter.turn(reading(2900, 8), 700, 10), None);
        let measured = PassMeasured { pass_ns: 100, wait_ns: 0, copy_ns: 0 };
        assert_eq!(meter.turn(reading(3000, 8), 700, 10), Some(measured));
        assert_eq!(meter.turn(None, 700, 10), None);
        assert_eq!(meter.turn(reading(4000, 8), 700, 10), None, "no clock before");
    }

    #[test]
    fn a_program_that_stands_still_is_not_measured_meanwhile() {
        let (mut meter, mut now) = (Meter::default(), 0);
        let reading = |at_ns| Some(Reading { at_ns, copied_bytes: 0 });
        meter.step(Some(0), 1500);
        meter.turn(reading(0), 0, 1);
        for (idle_ns, measured_ns) in [(0, 1000), (90_000, 900), (300, 1300), (2000, 900)] {
            for step in 1..=10 {
                now += 100 + if step == 5 { idle_ns } else { 0 };
                meter.step(Some(now), 1500);
            }
            let pass = meter.turn(reading(now), 0, 1).unwrap();
            assert_eq!(pass.pass_ns, measured_ns, "{idle_ns}");
        }
    }
}
