//! Which earlier part of the history is being repeated.
//!
//! A *thread* is a position in the history that is held to be what comes next. Each step moves
//! every thread on by one, if it is right. Of those that are right the one with the longest
//! unbroken run is believed. New threads begin where a step was seen last, so there is always one
//! that is one step old, unless the step is new.

use super::history::History;
use super::steps::StepId;

/// Threads at a time. Two are what a loop in a loop needs.
const THREADS_MAX: usize = 8;
/// Steps in a row that a thread may be wrong or jump.
const MISSES_MAX: u32 = 8;
/// The farthest jump, in steps.
const JUMP_MAX: u64 = 64;

/// A place that is being repeated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Thread {
    /// Differs from every other thread's.
    pub(super) name: u64,
    /// Position of the step that it says comes next.
    pub(super) cursor: u64,
    /// Steps for which it was right without a break; a jump halves it.
    pub(super) run: u64,
    /// Steps for which it was right; each miss and each jump halves it.
    pub(super) worth: u64,
    /// Steps since the last miss or jump.
    pub(super) clean: u64,
    /// Misses and jumps since it was right.
    misses: u32,
    /// Whether the last step was neither where it pointed nor a little later.
    lost: bool,
}

/// How the believed thread stood to a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    NoThread,
    Matched,
    Jumped(u32),
    Lost,
}

/// All threads; the believed one is first.
#[derive(Clone, Debug, Default)]
pub(super) struct Threads {
    threads: Vec<Thread>,
    names: u64,
}

impl Thread {
    /// Moves over `step`, which is not in the history yet.
    fn advance(&mut self, step: StepId, history: &History) -> Outcome {
        if history.get(self.cursor) == Some(step) {
            self.cursor += 1;
            // After one step that was put in it is to be believed more than a thread that begins
            // there, after two as much; after more it has no advantage.
            self.run += if self.lost { 3 - u64::from(self.misses.min(3)) } else { 0 };
            self.run += 1;
            self.worth += 1;
            self.clean += 1;
            (self.misses, self.lost) = (0, false);
            return Outcome::Matched;
        }
        self.misses += 1;
        self.worth /= 2;
        self.clean = 0;
        // No farther than half the way back to where the step was last, or a step that was put into
        // a loop would be a jump into its next pass, and each step of a reversed pass a jump; and
        // no farther than the thread has been right for.
        let back = history.last(step).map_or(0, |last| history.end() - last);
        let farthest = JUMP_MAX.min(back / 2).min(self.run);
        let is_step = |ahead: &u64| history.get(self.cursor + ahead) == Some(step);
        let Some(ahead) = (1..=farthest).find(is_step) else {
            (self.run, self.lost) = (0, true);
            return Outcome::Lost;
        };
        self.cursor += ahead + 1;
        self.run /= 2;
        self.lost = false;
        Outcome::Jumped(u32::try_from(ahead).unwrap_or(u32::MAX))
    }

    /// Larger is more to be believed.
    fn rank(&self) -> (bool, u64, u64, u64) {
        (!self.lost, self.run, self.worth, self.cursor)
    }
}

impl Threads {
    /// The believed one.
    pub(super) fn best(&self) -> Option<&Thread> {
        self.threads.first()
    }

    /// Moves all threads over a step that is not in the history yet.
    pub(super) fn advance(&mut self, step: StepId, history: &History) -> Outcome {
        let mut outcome = Outcome::NoThread;
        for (index, thread) in self.threads.iter_mut().enumerate() {
            let own = thread.advance(step, history);
            if index == 0 {
                outcome = own;
            }
        }
        self.threads.retain(|thread| thread.misses < MISSES_MAX);
        outcome
    }

    /// Begins threads behind the positions where the last step, and the last two, were before.
    pub(super) fn propose(&mut self, seen: [Option<u64>; 2], history: &History) {
        for (position, run) in seen.into_iter().zip([1, 2]).rev() {
            let Some(position) = position.filter(|position| *position >= history.start()) else {
                continue;
            };
            self.begin(position + 1, run);
        }
        self.sort();
        // Threads that came to the same place are one.
        for index in (1..self.threads.len()).rev() {
            let cursor = self.threads[index].cursor;
            let is_same = |other: &Thread| other.cursor == cursor && !other.lost;
            if self.threads[..index].iter().any(is_same) {
                self.threads.remove(index);
            }
        }
    }

    /// Begins a thread that is believed before all others.
    pub(super) fn believe(&mut self, cursor: u64, worth: u64) {
        self.threads.clear();
        self.begin(cursor, worth);
    }

    /// The history before `start` is forgotten.
    pub(super) fn drop_before(&mut self, start: u64) {
        self.threads.retain(|thread| thread.cursor >= start);
    }

    pub(super) fn clear(&mut self) {
        self.threads.clear();
    }

    fn begin(&mut self, cursor: u64, run: u64) {
        if self.threads.iter().any(|thread| thread.cursor == cursor && !thread.lost) {
            return;
        }
        if self.threads.len() == THREADS_MAX {
            self.sort();
            if !self.threads.last().is_some_and(|last| last.lost || last.run <= run) {
                return;
            }
            self.threads.pop();
        }
        self.names += 1;
        let (name, worth) = (self.names, run);
        let thread = Thread { name, cursor, run, worth, clean: run, misses: 0, lost: false };
        self.threads.push(thread);
    }

    fn sort(&mut self) {
        self.threads.sort_by_key(|thread| std::cmp::Reverse(thread.rank()));
    }
}
