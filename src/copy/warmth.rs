//! Whether a file is worth registering: it is streamed again and again, and its pages are in
//! memory each time.
//!
//! Pure: told part by part what was read, and whether any of it came from the disk. A round ends
//! when a part comes a second time.

use std::collections::BTreeSet;

/// Rounds in a row that come from memory before a file is promoted, and rounds from the disk before
/// it is not looked at any more.
pub(super) const ROUNDS: u32 = 2;

/// What is known of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// Not enough.
    Open,
    /// It is in memory, and wanted again and again.
    Warm,
    /// It comes from the disk.
    Cold,
}

/// The rounds of one file.
#[derive(Default)]
pub(super) struct Warmth {
    seen: BTreeSet<(u32, u64)>,
    is_cold: bool,
    warm_rounds: u32,
    cold_rounds: u32,
}

impl Warmth {
    /// A part was read, from memory alone or not.
    pub(super) fn read(&mut self, part: (u32, u64), disk_bytes: u64) -> Verdict {
        if !self.seen.insert(part) {
            self.end_round();
            self.seen.insert(part);
        }
        self.is_cold |= disk_bytes > 0;
        match (self.warm_rounds, self.cold_rounds) {
            (ROUNDS.., _) => Verdict::Warm,
            (_, ROUNDS..) => Verdict::Cold,
            _ => Verdict::Open,
        }
    }

    /// Whether anything of the round at hand came from the disk.
    pub(super) fn is_cold(&self) -> bool {
        self.is_cold
    }

    fn end_round(&mut self) {
        match self.is_cold {
            true => (self.warm_rounds, self.cold_rounds) = (0, self.cold_rounds + 1),
            false => (self.warm_rounds, self.cold_rounds) = (self.warm_rounds + 1, 0),
        }
        self.seen.clear();
        self.is_cold = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The verdict after each part of each round; a round is cold at the part that is named.
    fn verdicts(rounds: &[Option<u64>]) -> Vec<Verdict> {
        let mut warmth = Warmth::default();
        let mut read = |cold: &Option<u64>| {
            let parts = (0..3).map(|part| (part, u64::from(*cold == Some(part))));
            parts.map(|(part, disk)| warmth.read((0, part), disk)).collect::<Vec<_>>()
        };
        rounds.iter().flat_map(&mut read).collect()
    }

    #[test]
    fn two_whole_rounds_from_memory_make_a_file_warm() {
        use Verdict::{Open, Warm};
        assert_eq!(verdicts(&[None; 3]), [Open, Open, Open, Open, Open, Open, Warm, Warm, Warm]);
        // One part from the disk, and it begins anew.
        let verdicts = verdicts(&[None, Some(2), None, None, None]);
        assert_eq!(verdicts.iter().position(|it| *it == Warm), Some(12));
    }

    #[test]
    fn two_rounds_from_the_disk_make_it_cold() {
        let verdicts = verdicts(&[Some(0), Some(1), None]);
        assert_eq!(verdicts.iter().position(|it| *it == Verdict::Cold), Some(6));
    }
}
