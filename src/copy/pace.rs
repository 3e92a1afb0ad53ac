//! How soon streamed bytes move into the page-locked cache: a few windows a cycle.
//!
//! A window costs once, fresh memory and the driver's registering of it, and saves a little in each
//! cycle from then on. All of them in one cycle made that cycle four times as long (16 GiB on an
//! H200, a warm file), to save a seventh of each later one. So a cycle takes as many as cost half
//! of its time, one at least, spread over it: done in about ten cycles, and no layer stalls. And
//! all at once where they come back soon.
//! [`windows_a_cycle`] decides, numbers in, numbers out; [`Pace`] counts.
//!
//! What would come from the disk does not ask here, each read that is not made saves more than a
//! window costs; nor what gets a window that nobody needs any more, and that is locked already.

use std::time::Duration;

use crate::copy::gpu_clock::nanos;
use crate::model::placement::PassMeasured;
use crate::sync::Mutex;

/// Windows cost this part of a cycle's time at most.
const COST_PARTS: u64 = 2;
/// Cycles that it takes at most where times are known: a window's time is from the first read to
/// the last call, and several are on their way together, so that each costs less than it takes.
const CYCLES_MAX: u64 = 10;
/// The part of its spans that a cycle promotes where times are not known: at five or six copies a
/// window (H200) it costs a tenth of its time.
const BLIND_PARTS: u64 = 64;
/// Windows that have come back after so many cycles are made at once.
const SOON_CYCLES: u64 = 4;
/// A window's cost is the mean of about so many.
const MEAN_OF: u64 = 8;

/// What is known of a cycle and of windows, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Known {
    /// A cycle.
    pub(super) cycle_ns: u64,
    /// Of that, what no cycle would take if all that is streamed was page-locked.
    pub(super) saved_ns: u64,
    /// One window, once.
    pub(super) window_ns: u64,
}

/// How many windows a cycle that streams so many spans may take. Whether they come back soon is
/// asked for all spans, however many have theirs: the last ones must not come in a burst.
pub(super) fn windows_a_cycle(spans: u64, known: Option<Known>) -> u64 {
    let windows = match known {
        None => spans / BLIND_PARTS,
        Some(Known { saved_ns, window_ns, .. })
            if spans.saturating_mul(window_ns) <= SOON_CYCLES.saturating_mul(saved_ns) =>
        {
            spans
        }
        Some(Known { cycle_ns, window_ns, .. }) => {
            (cycle_ns / COST_PARTS / window_ns.max(1)).max(spans / CYCLES_MAX)
        }
    };
    windows.max(1).min(spans)
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Pace {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Spans that a cycle streams. `None`: nobody knows of cycles, and nothing is held back.
    spans: Option<u64>,
    /// Windows that a cycle may take.
    windows: u64,
    /// Each span that comes adds `windows`, a window takes `spans`.
    credit: u64,
    /// What windows cost in the cycle at hand.
    spent_ns: u64,
    /// The cycle before, where it was measured.
    last: Option<Measured>,
    window_ns: Option<u64>,
}

/// A cycle's time, and what of it page-locked memory would save.
#[derive(Clone, Copy)]
struct Measured {
    cycle_ns: u64,
    saved_ns: u64,
}

/// What became of a span.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Came {
    /// A window was made for it.
    Promoted,
    /// It has one, got one that another did not need any more, or goes without.
    AsBefore,
}

impl Pace {
    /// So many spans stream a cycle from now on.
    pub(super) fn set_spans(&self, spans: u64) {
        let mut state = self.state.lock();
        if state.spans != Some(spans) {
            // The only window of a cycle comes in its middle.
            (state.spans, state.credit) = (Some(spans), spans / 2);
            state.decide(None);
        }
    }

    /// The times that are known hold no longer.
    pub(super) fn forget_times(&self) {
        let mut state = self.state.lock();
        (state.spent_ns, state.last) = Default::default();
        state.decide(None);
    }

    /// A cycle has ended; it came to this, where it was measured.
    pub(super) fn end_cycle(&self, pass: Option<PassMeasured>) {
        let mut state = self.state.lock();
        let spent_ns = std::mem::take(&mut state.spent_ns);
        let Some(PassMeasured { pass_ns, wait_ns, copy_ns }) = pass else {
            state.last = None;
            return;
        };
        // Of what the device waits, the link needs some anyway; the windows themselves took some.
        let late_ns = wait_ns.min(pass_ns.saturating_sub(copy_ns));
        let saved_ns = late_ns.saturating_sub(spent_ns);
        let now = Measured { cycle_ns: pass_ns, saved_ns };
        // One that was slow for some other reason must not count.
        if let Some((before, window_ns)) = state.last.replace(now).zip(state.window_ns) {
            let cycle_ns = now.cycle_ns.min(before.cycle_ns);
            let saved_ns = now.saved_ns.min(before.saved_ns);
            state.decide(Some(Known { cycle_ns, saved_ns, window_ns }));
        }
    }

    /// Whether a span that comes now may have a window.
    pub(super) fn is_due(&self) -> bool {
        let state = self.state.lock();
        state.spans.is_none_or(|spans| spans > 0 && state.credit + state.windows >= spans)
    }

    /// A span has come.
    pub(super) fn note_span(&self, came: Came) {
        let mut state = self.state.lock();
        let Some(spans) = state.spans else { return };
        let taken = if came == Came::Promoted { spans } else { 0 };
        // No more than one window later: what was not taken must not come in a burst.
        state.credit = (state.credit + state.windows).saturating_sub(taken).min(spans);
    }

    /// A new window took so long, from the beginning of the read into it until it was registered.
    pub(super) fn note_window(&self, time: Duration) {
        let mut state = self.state.lock();
        let cost_ns = nanos(time);
        state.spent_ns = state.spent_ns.saturating_add(cost_ns);
        let mean = |mean: u64| mean - mean / MEAN_OF + cost_ns / MEAN_OF;
        state.window_ns = Some(state.window_ns.map_or(cost_ns, mean).max(1));
    }
}

impl State {
    fn decide(&mut self, known: Option<Known>) {
        let Some(spans) = self.spans else { return };
        self.windows = windows_a_cycle(spans, known);
        self.credit = self.credit.min(spans);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn known(cycle_ns: u64, saved_ns: u64, window_ns: u64) -> Option<Known> {
        Some(Known { cycle_ns, saved_ns, window_ns })
    }

    #[test]
    fn windows_cost_half_of_a_cycle_unless_they_come_back_soon() {
        // 16 GiB with a tenth of it resident, as measured: 1.6 s of windows for 50 ms a cycle.
        assert_eq!(windows_a_cycle(920, known(336 * MS, 50 * MS, 1_750_000)), 96);
        // Two threads read at a fifth of the link: what costs 2.8 s comes back in three cycles.
        assert_eq!(windows_a_cycle(920, known(1200 * MS, 920 * MS, 3 * MS)), 920);
        assert_eq!(windows_a_cycle(920, known(1200 * MS, 500 * MS, 3 * MS)), 200);
        // The device computes meanwhile: nothing is saved, and there is time.
        assert_eq!(windows_a_cycle(100, known(10_000 * MS, 0, 2 * MS)), 100);
        assert_eq!(windows_a_cycle(1000, known(1000 * MS, 0, 2 * MS)), 250);
        // Several at once take long each: ten cycles are enough all the same.
        assert_eq!(windows_a_cycle(1000, known(100 * MS, 0, 20 * MS)), 100);
    }

    #[test]
    fn a_cycle_takes_one_window_at_least_and_never_more_than_it_streams() {
        assert_eq!(windows_a_cycle(9, known(MS, 0, MS)), 1);
        assert_eq!(windows_a_cycle(9, known(u64::MAX, 0, 1)), 9);
        assert_eq!(windows_a_cycle(9, known(0, 0, u64::MAX)), 1);
        assert_eq!(windows_a_cycle(9, known(MS, 0, 0)), 9);
        assert_eq!(windows_a_cycle(0, known(MS, MS, 1)), 0);
        for (spans, windows) in [(0, 0), (1, 1), (63, 1), (128, 2), (920, 14)] {
            assert_eq!(windows_a_cycle(spans, None), windows, "{spans}");
        }
    }

    /// Spans that come round and round, and which of them have windows.
    struct Round {
        pace: Pace,
        has_window: Vec<bool>,
    }

    impl Round {
        fn new(spans: usize) -> Self {
            let pace = Pace::default();
            pace.set_spans(spans as u64);
            Self { pace, has_window: vec![false; spans] }
        }

        /// A cycle. Which spans got a window in it.
        fn cycle(&mut self) -> Vec<usize> {
            let mut promoted = Vec::new();
            for (index, has_window) in self.has_window.iter_mut().enumerate() {
                let came = match *has_window {
                    false if self.pace.is_due() => Came::Promoted,
                    _ => Came::AsBefore,
                };
                *has_window |= came == Came::Promoted;
                promoted.extend((came == Came::Promoted).then_some(index));
                self.pace.note_span(came);
            }
            promoted
        }

        fn window(&self, time_ns: u64) {
            self.pace.note_window(Duration::from_nanos(time_ns));
        }
    }

    fn pass(pass_ns: u64, copy_ns: u64) -> Option<PassMeasured> {
        Some(PassMeasured { pass_ns, wait_ns: pass_ns, copy_ns })
    }

    #[test]
    fn windows_are_spread_over_the_cycle_and_all_spans_get_one() {
        let mut round = Round::new(256);
        assert_eq!(round.cycle(), [31, 95, 159, 223]);
        // What has one lets the next have its own.
        assert_eq!(round.cycle(), [32, 96, 160, 224]);
        let mut cycles = 2;
        while round.has_window.contains(&false) {
            let promoted = round.cycle();
            assert!(promoted.len() <= 5, "{promoted:?}");
            cycles += 1;
        }
        assert!((64..=68).contains(&cycles), "{cycles} cycles of four");
    }

    #[test]
    fn a_measured_cycle_says_how_many_and_one_alone_does_not_count() {
        let mut round = Round::new(920);
        assert_eq!(round.cycle().len(), 14);
        // One that was slow, by the disk say, would have had all of them at once.
        for (pass_ns, windows) in [(9000 * MS, 14), (336 * MS, 96), (336 * MS, 96), (300 * MS, 92)]
        {
            round.window(1_750_000);
            round.pace.end_cycle(pass(pass_ns, 283 * MS));
            let promoted = round.cycle().len();
            assert!(promoted.abs_diff(windows) <= 1, "{promoted}, not {windows}");
        }
        // Nothing is measured: as before.
        round.pace.end_cycle(None);
        let promoted = round.cycle().len();
        assert!(promoted.abs_diff(92) <= 4, "{promoted}");
        round.pace.forget_times();
        assert!(round.cycle().len().abs_diff(14) <= 1);
    }

    #[test]
    fn what_windows_cost_is_nothing_that_they_would_save() {
        let mut round = Round::new(920);
        for _ in 0..4 {
            // As long as the link takes, but for the windows.
            (0..600).for_each(|_| round.window(1_750_000));
            round.pace.end_cycle(pass(1333 * MS, 283 * MS));
            assert!(round.cycle().len() < 400);
        }
    }

    #[test]
    fn without_a_cycle_nothing_is_held_back_and_without_spans_nothing_is_due() {
        let pace = Pace::default();
        assert!(pace.is_due());
        pace.note_span(Came::Promoted);
        pace.end_cycle(pass(MS, MS));
        assert!(pace.is_due());
        pace.set_spans(0);
        pace.note_span(Came::AsBefore);
        assert!(!pace.is_due());
    }
}
