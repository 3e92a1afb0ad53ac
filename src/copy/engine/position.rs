//! Where in a plan's cycle the program is. Pure.
//!
//! The next step of the cycle is expected; another one is taken for the next of its kind in the
//! cycle, so a skipped pass or one more of them puts nothing out of step for long.

use std::collections::HashMap;

use crate::model::schedule::StepId;

/// See the module's text.
pub(super) struct Position {
    steps: Vec<StepId>,
    /// Where each step is in the cycle, by rising index.
    places: HashMap<StepId, Vec<usize>>,
    /// The step that is expected.
    next: usize,
}

/// How a step moved the position.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Moved {
    /// The step was not the one that was expected.
    pub(super) is_jump: bool,
    /// With the step a cycle has begun anew.
    pub(super) is_turn: bool,
}

impl Position {
    /// Before the first step of a cycle.
    pub(super) fn new(steps: Vec<StepId>) -> Self {
        let mut places: HashMap<StepId, Vec<usize>> = HashMap::new();
        for (index, step) in steps.iter().enumerate() {
            places.entry(*step).or_default().push(index);
        }
        Self { steps, places, next: 0 }
    }

    /// Index of the step that is expected.
    pub(super) fn next(&self) -> usize {
        self.next
    }

    /// Index of the step that came last.
    pub(super) fn last(&self) -> usize {
        self.next.checked_sub(1).unwrap_or(self.steps.len().saturating_sub(1))
    }

    /// Index of a step in the cycle, the first of several.
    pub(super) fn index_of(&self, step: StepId) -> Option<usize> {
        self.places.get(&step)?.first().copied()
    }

    /// A step has come. One that the cycle does not have moves nothing.
    pub(super) fn advance(&mut self, step: StepId) -> Moved {
        let Some(places) = self.places.get(&step) else {
            return Moved { is_jump: true, is_turn: false };
        };
        let before = self.next;
        let behind = places.partition_point(|place| *place < before);
        let place = places.get(behind).or(places.first()).copied().unwrap_or(before);
        self.next = (place + 1) % self.steps.len();
        Moved { is_jump: place != before, is_turn: place < before || place == 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn position(steps: &[u32]) -> Position {
        Position::new(steps.iter().map(|step| StepId(*step)).collect())
    }

    #[test]
    fn the_expected_steps_turn_once_a_cycle() {
        let mut position = position(&[7, 8, 8, 9]);
        for _ in 0..3 {
            let moved: Vec<_> =
                [7, 8, 8, 9].map(|step| position.advance(StepId(step))).into_iter().collect();
            assert!(moved.iter().all(|moved| !moved.is_jump));
            assert_eq!(moved.iter().filter(|moved| moved.is_turn).count(), 1);
            assert_eq!((position.next(), position.last()), (0, 3));
        }
    }

    #[test]
    fn passes_left_out_or_put_in_are_caught_up_with() {
        // An encoder, three passes, a decoder.
        let mut position = position(&[0, 1, 2, 1, 2, 1, 2, 3]);
        let mut play = |steps: &[u32]| -> (usize, usize) {
            let moved: Vec<_> = steps.iter().map(|step| position.advance(StepId(*step))).collect();
            (moved.iter().filter(|moved| moved.is_jump).count(), position.next())
        };
        assert_eq!(play(&[0, 1, 2, 1, 2, 3]), (1, 0), "a pass left out");
        assert_eq!(play(&[0, 1, 2, 1, 2, 1, 2, 1, 2]), (1, 3), "one too many is the next cycle's");
        assert_eq!(play(&[3]), (1, 0));
        assert_eq!(play(&[0, 99]), (1, 1), "another step");
        assert_eq!(play(&[1, 2, 1, 2, 1, 2, 3]), (0, 0));
    }
}
