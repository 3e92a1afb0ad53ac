//! The plan in force: which pages of the learned order stay, when, for so many frames.
//!
//! Values only; `model/placement` decides, this puts its answer into the form that the pager takes,
//! follows where in the cycle the program is, and says when another plan is due.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::position::{Moved, Position};
use crate::model::placement::{Cycle, CycleStep, Layout, PassMeasured, Ranking, Split};
use crate::model::schedule::{BarId, PageRef, StepId};

/// A plan for fewer frames is made at once. For more, only when they are more by this part, or all
/// that there is to place: a budget that trembles must not move pages to and fro.
const GROWTH_PARTS: u64 = 64;
/// Parts of the pages that come and go with the phases of a cycle: each time that one of them has
/// changed, faults are told anew which pages to leave alone.
const TURN_PARTS: usize = 8;
/// Streaming frames that are tried at most, as a multiple of what the model of the pipeline takes.
const MOST_TIMES: u32 = 4;

/// Pages by their VBAR.
pub(super) type Kept = HashMap<BarId, Arc<BTreeSet<u32>>>;

/// See the module's text.
pub(super) struct Plan {
    /// Of the schedule when it was made.
    pub(super) revision: u64,
    /// Compute time was sampled for all of its steps.
    pub(super) sampled: bool,
    /// Another plan is not expected soon: what it streams is worth a place in page-locked memory.
    pub(super) is_settled: bool,
    /// Steps that had come when it was made.
    pub(super) made_at: u64,
    /// Steps from the first on whose compute time is known.
    known: usize,
    /// Frames that it was made for.
    frames: u64,
    longest_compute_ns: u64,
    ranking: Ranking,
    layout: Layout,
    split: Split,
    position: Position,
    /// Per VBAR, the pages that stay throughout.
    throughout: Kept,
    /// The pages that stay from a step on, those that stay throughout too; the first from step 0.
    turns: Vec<(usize, Kept)>,
    /// The one in force.
    turn: usize,
}

impl Plan {
    /// A plan for a cycle that was learned.
    pub(super) fn new(revision: u64, sampled: bool, cycle: Cycle, frames: u64) -> Self {
        let steps = cycle.steps.iter().map(|step| StepId(step.ordinal)).collect();
        let longest = cycle.steps.iter().map(|step| step.compute_ns).max();
        let ranking = Ranking::new(cycle);
        let mut plan = Self {
            revision,
            sampled,
            is_settled: false,
            made_at: 0,
            known: 0,
            frames,
            longest_compute_ns: longest.unwrap_or(0),
            layout: Layout::default(),
            split: Split::new(0, 0, 0, 0),
            position: Position::new(steps),
            throughout: Kept::new(),
            turns: Vec::new(),
            turn: 0,
            ranking,
        };
        plan.is_settled = sampled && plan.may_last();
        plan.lay_out(frames);
        plan
    }

    /// The same for another number of frames: all that was tried of the split is void.
    pub(super) fn with_frames(mut self, frames: u64) -> Self {
        self.lay_out(frames);
        self
    }

    /// The same for a link that takes `page_ns` nanoseconds a page. Which pages stay before which
    /// others does not depend on it.
    pub(super) fn with_link(mut self, page_ns: u64) -> Self {
        self.ranking.set_page_ns(page_ns);
        self.lay_out(self.frames);
        self
    }

    /// Time of a page on the link that it was made for.
    pub(super) fn page_ns(&self) -> u64 {
        self.ranking.cycle().page_ns
    }

    fn lay_out(&mut self, frames: u64) {
        let few = u32::try_from(frames).unwrap_or(u32::MAX);
        self.frames = frames;
        // Where one step needs more nothing stays: each fault takes what it can get.
        let (layout, least) = match (self.ranking.lay_out(few), self.ranking.place(few, 1)) {
            (Ok(layout), Ok(least)) => (layout, least.streaming_frames()),
            _ => (Layout::streaming_all(few, self.step_count()), few),
        };
        let streaming = layout.streaming_frames();
        let most = streaming.saturating_mul(MOST_TIMES).min(few);
        self.split = Split::new(streaming, least.min(streaming), most, self.page_ns());
        self.adopt(layout);
    }

    fn adopt(&mut self, layout: Layout) {
        self.throughout = self.by_bar(layout.residents().iter().copied());
        let turns = if layout.has_phases() { layout.turns(TURN_PARTS) } else { vec![0] };
        let kept = |step: &usize| {
            let pages = layout.residents().iter().copied().chain(layout.kept_behind(*step));
            (*step, self.by_bar(pages))
        };
        self.turns = turns.iter().map(kept).collect();
        self.layout = layout;
        self.turn = self.turn_at_position();
    }

    fn by_bar(&self, pages: impl Iterator<Item = PageRef>) -> Kept {
        let mut kept: HashMap<BarId, BTreeSet<u32>> = HashMap::new();
        for page in self.ranking.pages() {
            kept.entry(page.bar).or_default();
        }
        for PageRef { bar, page } in pages {
            kept.entry(bar).or_default().insert(page);
        }
        kept.into_iter().map(|(bar, pages)| (bar, Arc::new(pages))).collect()
    }

    /// A cycle of it was measured. Returns whether other pages stay now: those at the margin.
    pub(super) fn observe(&mut self, pass: PassMeasured) -> bool {
        let before = self.split.frames();
        let streaming = self.split.observe(pass);
        if streaming == before || self.layout.streaming_frames() == 0 {
            return false;
        }
        let few = u32::try_from(self.frames).unwrap_or(u32::MAX);
        let layout = match self.layout.has_phases() {
            true => self.ranking.place_phases(few, streaming),
            false => self.ranking.place(few, streaming).map(|placement| placement.layout()),
        };
        // What cannot be is not tried, and looks as if it did not pay.
        let Ok(layout) = layout else { return false };
        self.adopt(layout);
        true
    }

    /// Whether pages that stay now may stream again after a few passes.
    pub(super) fn is_trying(&self) -> bool {
        self.split.is_trying()
    }

    /// A step has come.
    pub(super) fn advance(&mut self, step: StepId) -> Moved {
        self.position.advance(step)
    }

    /// Whether other pages are to be left alone by faults since the last time.
    pub(super) fn take_turn(&mut self) -> bool {
        let now = self.turn_at_position();
        std::mem::replace(&mut self.turn, now) != now
    }

    fn turn_at_position(&self) -> usize {
        let last = self.position.last();
        self.turns.partition_point(|(step, _)| *step <= last).saturating_sub(1)
    }

    /// Compute time of a cycle, as it is `known` of the steps by now.
    pub(super) fn cycle_compute_ns(&self, known: impl Fn(StepId) -> Option<u64>) -> u64 {
        let of = |step: &CycleStep| known(StepId(step.ordinal)).unwrap_or(step.compute_ns);
        self.steps().iter().map(of).sum()
    }

    /// The longest that a step can take: its compute time, and all frames filled anew for it.
    pub(super) fn longest_ns(&self) -> u64 {
        let filled = self.frames.min(self.page_count());
        self.longest_compute_ns.saturating_add(filled * self.page_ns())
    }

    /// Compute time that it was made for of a step that it has.
    pub(super) fn compute_ns(&self, step: StepId) -> Option<u64> {
        Some(self.steps()[self.position.index_of(step)?].compute_ns)
    }

    /// Whether the compute time of each step `is_known`, which stays so. O(1) on the whole.
    pub(super) fn is_known(&mut self, is_known: impl Fn(StepId) -> bool) -> bool {
        let steps = &self.ranking.cycle().steps;
        while steps.get(self.known).is_some_and(|step| is_known(StepId(step.ordinal))) {
            self.known += 1;
        }
        self.known == steps.len()
    }

    /// Its compute times hold no longer.
    pub(super) fn unlearn(&mut self) {
        (self.sampled, self.known) = (false, 0);
    }

    fn steps(&self) -> &[CycleStep] {
        &self.ranking.cycle().steps
    }

    /// Whether it may be the one that lasts. One step again and again is no cycle: small tensors
    /// that share a page look like that in the middle of a first pass, and what streams by a plan
    /// made of it is the rest of the model.
    pub(super) fn may_last(&self) -> bool {
        self.step_count() > 1
    }

    /// Steps of the cycle.
    pub(super) fn step_count(&self) -> usize {
        self.steps().len()
    }

    /// Pages of the cycle.
    pub(super) fn page_count(&self) -> u64 {
        u64::from(self.ranking.page_count())
    }

    /// Pages of the cycle that do not stay throughout.
    pub(super) fn streamed_count(&self) -> u64 {
        let kept: u64 = self.throughout.values().map(|pages| pages.len() as u64).sum();
        self.page_count().saturating_sub(kept)
    }

    /// Frames for what does not stay.
    pub(super) fn streaming_frames(&self) -> u32 {
        self.layout.streaming_frames()
    }

    /// Whether some pages stay for a part of the cycle only.
    pub(super) fn has_phases(&self) -> bool {
        self.layout.has_phases()
    }

    /// Pages that stay now.
    pub(super) fn kept_count(&self) -> u64 {
        self.kept().values().map(|pages| pages.len() as u64).sum()
    }

    /// Per VBAR of the cycle, the pages that stay now, as of the last turn.
    pub(super) fn kept(&self) -> &Kept {
        self.turns.get(self.turn).map_or(&self.throughout, |(_, kept)| kept)
    }

    /// Per VBAR of the cycle, the pages that stay throughout.
    pub(super) fn throughout(&self) -> &Kept {
        &self.throughout
    }

    /// Whether a page stays throughout.
    pub(super) fn keeps_throughout(&self, page: PageRef) -> bool {
        self.throughout.get(&page.bar).is_some_and(|kept| kept.contains(&page.page))
    }

    /// Whether a page stays behind the step that came last.
    pub(super) fn keeps(&self, page: PageRef) -> bool {
        self.keeps_throughout(page) || self.layout.is_kept_behind(page, self.position.last())
    }

    /// Whether another plan is due for so many frames.
    pub(super) fn is_outgrown(&self, frames: u64) -> bool {
        let all = self.page_count();
        if frames < self.frames {
            return frames < all;
        }
        let grown = frames - self.frames;
        self.frames < all && (grown > self.frames / GROWTH_PARTS || frames >= all)
    }

    /// The pages of the cycle, the one that is used last from now on first, as often as they are
    /// used.
    pub(super) fn pages_from_the_end(&self) -> impl Iterator<Item = PageRef> + '_ {
        let (before, behind) = self.steps().split_at(self.position.next());
        let steps = before.iter().rev().chain(behind.iter().rev());
        steps.flat_map(|step| step.pages.iter().rev().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::policy_model::layer_steps;

    /// 64 layers of 16 pages that compute for a third of their 4.9 ms on the link, in a tenth of
    /// the frames.
    #[test]
    fn another_link_makes_another_split_and_moves_only_pages_at_the_margin() {
        let plan = |page_ns: u64| {
            let steps = layer_steps(0, &[16; 64], 1_550_000 / 16, 0);
            Plan::new(1, true, Cycle { steps, page_ns }, 102)
        };
        let right = plan(305_000);
        // The link takes 14.7 pages a layer, of which it copies 5 while one computes.
        assert!((20..=26).contains(&right.streaming_frames()), "{}", right.streaming_frames());
        let slow = plan(900_000);
        assert!(slow.streaming_frames() < 20, "{}", slow.streaming_frames());
        let (before, streaming) = (slow.kept_count(), slow.streaming_frames());
        let kept = slow.kept()[&BarId(0)].clone();
        let moved = slow.with_link(305_000);
        assert_eq!(moved.page_ns(), 305_000);
        assert_eq!(moved.streaming_frames(), right.streaming_frames());
        assert_eq!(moved.kept(), right.kept());
        let more = u64::from(moved.streaming_frames() - streaming);
        assert_eq!(before - moved.kept_count(), more);
        assert!(moved.kept()[&BarId(0)].is_subset(&kept));
    }
}
