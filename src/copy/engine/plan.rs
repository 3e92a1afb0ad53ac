//! The plan in force: which pages of the learned order stay, for so many frames.
//!
//! Values only; `model/placement` decides, this puts its answer into the form that the pager takes,
//! and says when another one is due.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use crate::model::placement::{Cycle, Ranking};
use crate::model::schedule::{BarId, PageRef};

/// A plan for fewer frames is made at once. For more, only when they are more by this part, or all
/// that there is to place: a budget that trembles must not move pages to and fro.
const GROWTH_PARTS: u64 = 64;

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
    /// Frames that it was made for.
    frames: u64,
    ranking: Ranking,
    /// Frames for what does not stay.
    pub(super) streaming_frames: u32,
    /// Per VBAR, the pages that stay.
    pub(super) kept: HashMap<BarId, Arc<BTreeSet<u32>>>,
}

impl Plan {
    /// A plan for a cycle that was learned.
    pub(super) fn new(revision: u64, sampled: bool, cycle: Cycle, frames: u64) -> Self {
        Self::of(revision, sampled, Ranking::new(cycle), frames)
    }

    /// The same for another number of frames.
    pub(super) fn with_frames(self, frames: u64) -> Self {
        let is_settled = self.is_settled;
        Self { is_settled, ..Self::of(self.revision, self.sampled, self.ranking, frames) }
    }

    fn of(revision: u64, sampled: bool, ranking: Ranking, frames: u64) -> Self {
        let mut kept: HashMap<BarId, BTreeSet<u32>> = HashMap::new();
        for page in ranking.pages() {
            kept.entry(page.bar).or_default();
        }
        let few = u32::try_from(frames).unwrap_or(u32::MAX);
        let streaming_frames = match ranking.place_best(few) {
            Ok(placement) => {
                for PageRef { bar, page } in placement.residents() {
                    kept.entry(*bar).or_default().insert(*page);
                }
                placement.streaming_frames()
            }
            // Nothing stays: each fault takes what it can get.
            Err(_) => few,
        };
        let kept = kept.into_iter().map(|(bar, pages)| (bar, Arc::new(pages))).collect();
        let (is_settled, made_at) = (sampled, 0);
        Self { revision, sampled, is_settled, made_at, frames, ranking, streaming_frames, kept }
    }

    /// Steps of the cycle.
    pub(super) fn step_count(&self) -> usize {
        self.ranking.cycle().steps.len()
    }

    /// Pages of the cycle.
    pub(super) fn page_count(&self) -> u64 {
        u64::from(self.ranking.page_count())
    }

    /// Pages that stay.
    pub(super) fn kept_count(&self) -> u64 {
        self.kept.values().map(|pages| pages.len() as u64).sum()
    }

    /// Whether a page stays.
    pub(super) fn keeps(&self, page: PageRef) -> bool {
        self.kept.get(&page.bar).is_some_and(|kept| kept.contains(&page.page))
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

    /// The pages of the cycle, the one that is used last first, as often as they are used.
    pub(super) fn pages_from_the_end(&self) -> impl Iterator<Item = PageRef> + '_ {
        let steps = self.ranking.cycle().steps.iter().rev();
        steps.flat_map(|step| step.pages.iter().rev().copied())
    }
}
