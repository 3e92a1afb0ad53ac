//! For how many frames a plan is to be made, where their number rises and falls within each cycle.
//! Pure.
//!
//! A program's own memory comes and goes within a step, and with it what weights can have. A plan
//! for more frames than stay throughout is one for fewer a moment later, and each change voids what
//! was fetched ahead. So what the last cycles had at their worst moment counts for this one too.
//!
//! Not so what is short in one cycle alone, which counts while it lasts; nor where there are more
//! now than one of those cycles ever had, as then something has ended; nor where the worst moment
//! leaves less than half of what there is now, as then plans in turn are better than frames without
//! use.

/// Numbers of frames that differ by less than this part have the same reason.
const LIKE_PARTS: u64 = 8;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Fewest {
    /// Of the cycle before the last, and of the last.
    ended: [Option<Seen>; 2],
    in_this_cycle: Option<Seen>,
    limit: Option<u64>,
}

/// The numbers of frames in a cycle.
#[derive(Clone, Copy, Debug)]
struct Seen {
    fewest: u64,
    most: u64,
}

impl Fewest {
    /// There are so many now. Returns those to plan for.
    pub(super) fn see(&mut self, frames: u64) -> u64 {
        let seen = self.in_this_cycle.get_or_insert(Seen { fewest: frames, most: frames });
        *seen = Seen { fewest: seen.fewest.min(frames), most: seen.most.max(frames) };
        let fewest = seen.fewest;
        self.limit = self.lasting(fewest, frames).filter(|lasting| *lasting < frames);
        self.limit.unwrap_or(frames)
    }

    /// Frames that may be used where there are more that will soon be gone again, as seen last.
    pub(super) fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// A cycle has ended.
    pub(super) fn turn(&mut self) {
        self.ended = [self.ended[1], self.in_this_cycle.take()];
    }

    /// What there is throughout each cycle, if that is known and of use with so many now.
    fn lasting(&self, fewest: u64, frames: u64) -> Option<u64> {
        let [Some(first), Some(second)] = self.ended else { return None };
        let most = first.most.min(second.most);
        if frames > most && !is_like(frames, most) {
            return None;
        }
        let fewer_of_like = |one: u64, other: u64, or: u64| match is_like(one, other) {
            true => one.min(other),
            false => or,
        };
        let either = first.fewest.max(second.fewest);
        let lasting = fewer_of_like(first.fewest, second.fewest, either);
        let lasting = fewer_of_like(fewest, lasting, lasting);
        (lasting >= frames / 2).then_some(lasting)
    }
}

fn is_like(one: u64, other: u64) -> bool {
    one.abs_diff(other) <= one.max(other) / LIKE_PARTS
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a cycle with so many frames at a time plans for.
    fn cycle<const N: usize>(fewest: &mut Fewest, frames: [u64; N]) -> [u64; N] {
        let planned = frames.map(|frames| fewest.see(frames));
        fewest.turn();
        planned
    }

    #[test]
    fn what_comes_and_goes_in_each_cycle_is_planned_for_once() {
        let mut fewest = Fewest::default();
        for _ in 0..2 {
            assert_eq!(cycle(&mut fewest, [100, 70, 90, 100]), [100, 70, 90, 100]);
        }
        for _ in 0..20 {
            assert_eq!(cycle(&mut fewest, [100, 70, 90, 100]), [70; 4]);
        }
        // It ends: after a whole cycle without.
        assert_eq!(cycle(&mut fewest, [100; 2]), [70; 2]);
        assert_eq!(cycle(&mut fewest, [100; 2]), [100; 2]);
    }

    #[test]
    fn what_comes_once_counts_while_it_is_there() {
        let mut fewest = Fewest::default();
        for _ in 0..3 {
            cycle(&mut fewest, [100]);
        }
        assert_eq!(cycle(&mut fewest, [100, 60, 10, 100]), [100, 60, 10, 100]);
        for _ in 0..3 {
            assert_eq!(cycle(&mut fewest, [100]), [100]);
        }
    }

    #[test]
    fn a_little_more_and_less_is_the_same() {
        let mut fewest = Fewest::default();
        for shortest in [70, 71, 69, 72, 70] {
            cycle(&mut fewest, [100, shortest]);
        }
        assert_eq!(cycle(&mut fewest, [100, 69, 100]), [70, 69, 69]);
        assert_eq!(cycle(&mut fewest, [100, 71, 100]), [69; 3]);
    }

    #[test]
    fn what_has_ended_is_seen_at_once() {
        let mut fewest = Fewest::default();
        for _ in 0..3 {
            cycle(&mut fewest, [100, 70, 100]);
        }
        // More than there was at any time.
        assert_eq!([120, 90, 101].map(|frames| fewest.see(frames)), [120, 70, 70]);
        // Also where the end of a cycle saw it already.
        let mut fewest = Fewest::default();
        for _ in 0..3 {
            cycle(&mut fewest, [70]);
        }
        assert_eq!(cycle(&mut fewest, [70, 100]), [70, 100]);
        assert_eq!(fewest.see(100), 100);
    }

    #[test]
    fn frames_are_not_left_without_use_for_a_moment_that_takes_most_of_them() {
        let mut fewest = Fewest::default();
        for _ in 0..2 {
            cycle(&mut fewest, [100, 40, 70, 100]);
        }
        for _ in 0..4 {
            assert_eq!(cycle(&mut fewest, [100, 40, 70, 100]), [100, 40, 40, 100]);
        }
    }
}
