//! The plan in force: which pages of the learned order stay, for so many frames.
//!
//! Values only; `model/placement` decides, this puts its answer into the form that the pager takes.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use crate::memory::pager::Pager;
use crate::model::schedule::{BarId, PageRef, Schedule, StepId};

/// See the module's text.
pub(super) struct Plan {
    /// Of the schedule when it was made.
    pub(super) revision: u64,
    /// Steps of the cycle.
    pub(super) steps: usize,
    /// Frames that it was made for.
    frames: u64,
    /// Pages of the cycle.
    pub(super) page_count: u64,
    /// Per VBAR, the pages that stay.
    pub(super) kept: HashMap<BarId, Arc<BTreeSet<u32>>>,
}

impl Plan {
    /// Pages that stay.
    pub(super) fn kept_count(&self) -> u64 {
        self.kept.values().map(|pages| pages.len() as u64).sum()
    }

    /// Whether another plan is due for so many frames.
    pub(super) fn is_outgrown(&self, frames: u64) -> bool {
        frames != self.frames && (frames < self.page_count || self.kept_count() < self.page_count)
    }
}

/// Makes a plan for a cycle.
pub(super) fn make(
    schedule: &Schedule,
    cycle: &[StepId],
    frames: u64,
    _before: Option<&Plan>,
    _pager: &Pager,
) -> Plan {
    let mut order: Vec<PageRef> = Vec::new();
    let mut seen = HashSet::new();
    let mut widest = 0;
    for step in cycle {
        let pages: Vec<PageRef> =
            schedule.spans(*step).iter().flat_map(|span| span.pages()).collect();
        widest = widest.max(pages.len() as u64);
        order.extend(pages.into_iter().filter(|page| seen.insert(*page)));
    }
    let count = order.len() as u64;
    let mut kept: HashMap<BarId, BTreeSet<u32>> = HashMap::new();
    for page in &order {
        kept.entry(page.bar).or_default();
    }
    let keep = if frames >= count {
        count
    } else {
        let per_step = (widest * (count - frames)).div_ceil(count.max(1)) + 1;
        frames.saturating_sub(2 * per_step + 3)
    };
    let mut debt = 0;
    for page in &order {
        debt += keep;
        if debt >= count {
            debt -= count;
            kept.entry(page.bar).or_default().insert(page.page);
        }
    }
    let kept = kept.into_iter().map(|(bar, pages)| (bar, Arc::new(pages))).collect();
    let revision = schedule.revision();
    Plan { revision, steps: cycle.len(), frames, page_count: count, kept }
}
