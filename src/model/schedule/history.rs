//! The last steps, by positions that only rise, and where each was last seen.

use std::collections::{HashMap, VecDeque};

use super::steps::StepId;

/// Steps from `start` to `end`; older ones are forgotten. Invariant: the two maps hold positions
/// in the history only, each the last one of its kind.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    steps: VecDeque<StepId>,
    start: u64,
    last: HashMap<StepId, u64>,
    last_behind: HashMap<(StepId, StepId), u64>,
}

impl History {
    pub(super) fn start(&self) -> u64 {
        self.start
    }

    pub(super) fn end(&self) -> u64 {
        self.start + self.steps.len() as u64
    }

    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    #[cfg(test)]
    pub(super) fn index_len(&self) -> usize {
        self.last.len() + self.last_behind.len()
    }

    pub(super) fn get(&self, position: u64) -> Option<StepId> {
        let index = usize::try_from(position.checked_sub(self.start)?).ok()?;
        self.steps.get(index).copied()
    }

    /// Where a step was last.
    pub(super) fn last(&self, step: StepId) -> Option<u64> {
        self.last.get(&step).copied()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = StepId> {
        self.steps.iter().copied()
    }

    /// Adds a step. Where it was before: the step, and the step behind the one it follows now.
    pub(super) fn push(&mut self, step: StepId) -> [Option<u64>; 2] {
        let position = self.end();
        let behind = self.steps.back().map(|before| (*before, step));
        self.steps.push_back(step);
        let pair = behind.and_then(|pair| self.last_behind.insert(pair, position));
        [self.last.insert(step, position), pair]
    }

    /// Forgets the oldest step.
    pub(super) fn pop(&mut self) -> Option<StepId> {
        let step = self.steps.pop_front()?;
        if self.last.get(&step) == Some(&self.start) {
            self.last.remove(&step);
        }
        if let Some(next) = self.steps.front() {
            let pair = (step, *next);
            if self.last_behind.get(&pair) == Some(&(self.start + 1)) {
                self.last_behind.remove(&pair);
            }
        }
        self.start += 1;
        Some(step)
    }
}
