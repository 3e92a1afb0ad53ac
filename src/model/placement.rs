//! Which pages stay resident and which are streamed again in each cycle.
//!
//! Pure: a cycle of steps in, a set of pages out. All pages of a cycle are put in one order, by
//! which they are given up ([`Ranking`]); a placement streams the first so many of it and keeps the
//! rest. The order does not depend on how many that is, so a budget that changes by k pages moves
//! k pages, a budget that comes back finds the placement that it had, and there is nothing to
//! ratchet. It ranks
//!
//! 1. by class, smaller first;
//! 2. by the loads that a page would cost in each cycle (its *visits*), fewer first: what several
//!    passes use stays;
//! 3. by the rate at which its step would then be streamed: pages of the step over its compute
//!    time, so that each step streams a part that fits behind its compute. Steps that are alike
//!    take turns by multiples of the golden ratio, whose prefixes are spread evenly, however long.
//!
//! Frames that are not given to residents are for streaming: pages pass through them in the order
//! of their use ([`pipeline`] says how long that takes, [`split`] how many they should be). Where a
//! cycle has phases, pages may be kept for one of them only ([`phases`]).

use std::collections::HashMap;

use crate::model::schedule::{BarId, PageRef, Schedule};

mod occupancy;
pub mod phases;
pub mod pipeline;
pub mod split;
mod victim;
mod visits;

pub use phases::Layout;
pub use split::{PassMeasured, Split};
pub use victim::{next_victim, victims};
pub use visits::Visit;

use visits::visits_of;

/// Frames that streaming has beyond the pages of the step in use and of the next, so that the link
/// is busy while frames change hands.
pub const SPARE_FRAMES: u32 = 3;

/// A step of a cycle.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CycleStep {
    /// The pages that it reads, each once.
    pub pages: Vec<PageRef>,
    /// GPU time from its wait to its unpin, in nanoseconds.
    pub compute_ns: u64,
    /// Smaller classes are given up first.
    pub class: i32,
    /// A number that stays with the step from cycle to cycle; of steps that follow each other, ones
    /// that follow each other.
    pub ordinal: u32,
}

/// What repeats: steps in their order, and what a page costs on the link.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Cycle {
    /// The steps; behind the last comes the first again.
    pub steps: Vec<CycleStep>,
    /// Time to copy one page to the device, in nanoseconds.
    pub page_ns: u64,
}

impl Cycle {
    /// The confirmed cycle of a schedule; `None` before there is one. `class_of` gives the class of
    /// a VBAR. A step whose compute time is not known is taken to compute as long per page as the
    /// others do; if none is known, as long as its pages take on the link.
    #[must_use]
    pub fn of(schedule: &Schedule, page_ns: u64, class_of: impl Fn(BarId) -> i32) -> Option<Self> {
        let steps = schedule.cycle()?;
        let page_count = |step| -> u64 {
            schedule.spans(step).iter().map(|span| u64::from(span.page_count())).sum()
        };
        let (mut known_pages, mut known_ns) = (0u64, 0u64);
        for step in &steps {
            if let Some(compute_ns) = schedule.compute_ns(*step) {
                known_pages += page_count(*step);
                known_ns = known_ns.saturating_add(compute_ns);
            }
        }
        let mean_ns = known_ns.checked_div(known_pages).unwrap_or(page_ns);
        let steps = steps.into_iter().map(|step| {
            let spans = schedule.spans(step);
            let mut pages: Vec<PageRef> = spans.iter().flat_map(|span| span.pages()).collect();
            pages.sort_unstable();
            pages.dedup();
            let guess = mean_ns.saturating_mul(pages.len() as u64);
            let compute_ns = schedule.compute_ns(step).unwrap_or(guess);
            let class = spans.iter().map(|span| class_of(span.bar)).max().unwrap_or(0);
            CycleStep { pages, compute_ns, class, ordinal: step.0 }
        });
        Some(Self { steps: steps.collect(), page_ns })
    }

    /// Compute time of all steps, in nanoseconds.
    #[must_use]
    pub fn compute_ns(&self) -> u64 {
        self.steps.iter().map(|step| step.compute_ns).sum()
    }
}

/// Frames too few to run a cycle at all: `needed` is the least, the pages of one step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TooFewFrames {
    /// Frames that the largest step needs.
    pub needed: u32,
}

/// The pages of a cycle in the order in which they are given up. See the module's text.
#[derive(Clone, Debug)]
pub struct Ranking {
    cycle: Cycle,
    /// By the order of giving up.
    pages: Vec<PageRef>,
    places: HashMap<PageRef, u32>,
    /// By the same order.
    visits: Vec<Vec<Visit>>,
    /// By the same order.
    classes: Vec<i32>,
    /// All visits by the step at which they begin, with the place of their page in the order.
    timetable: Vec<(Visit, u32)>,
}

/// A placement without its ranking, to be kept beside it: [`Ranking::at`] puts them together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cut {
    /// Pages that are streamed: so many of the order.
    pub streamed: u32,
    /// Frames that they share.
    pub streaming_frames: u32,
}

/// Which pages stay, and how many frames the others share.
#[derive(Clone, Debug)]
pub struct Placement<'a> {
    ranking: &'a Ranking,
    /// Pages that are streamed: so many of the order.
    streamed: u32,
    /// Frames that they share.
    streaming_frames: u32,
}

impl Ranking {
    /// Ranks the pages of a cycle. Takes O(n log n) for n touches of pages.
    #[must_use]
    pub fn new(cycle: Cycle) -> Self {
        let found = visits_of(&cycle);
        let mut order: Vec<(i32, u32, u64, PageRef, Vec<Visit>)> = Vec::new();
        // Groups of equal class and visits, those that are given up first in front: what they
        // stream is there when the next group is ranked.
        let mut groups: Vec<_> = found.into_iter().collect();
        groups.sort_unstable_by_key(|page| (page.class, page.loads(), page.home, page.page));
        let mut streamed = vec![0u32; cycle.steps.len()];
        for group in groups.chunk_by(|a, b| (a.class, a.loads()) == (b.class, b.loads())) {
            for home in group.chunk_by(|a, b| a.home == b.home) {
                let before = streamed[home[0].home];
                // Higher pages first, so that what stays of a weight is one stretch.
                for (ahead, page) in (before..).zip(home.iter().rev()) {
                    let key = rate_key(&cycle.steps[page.home], page.compute_ns, ahead);
                    order.push((page.class, page.loads(), key, page.page, page.visits.clone()));
                }
            }
            for page in group {
                page.visits.iter().for_each(|visit| streamed[visit.first] += 1);
            }
        }
        order.sort_by_key(|(class, loads, key, page, _)| (*class, *loads, *key, *page));
        let pages: Vec<PageRef> = order.iter().map(|(_, _, _, page, _)| *page).collect();
        let places = pages.iter().copied().zip(0..).collect();
        let classes = order.iter().map(|(class, ..)| *class).collect();
        let visits: Vec<Vec<Visit>> =
            order.into_iter().map(|(_, _, _, _, visits)| visits).collect();
        let by_place = visits.iter().zip(0..);
        let mut timetable: Vec<(Visit, u32)> = by_place
            .flat_map(|(visits, place)| visits.iter().map(move |visit| (*visit, place)))
            .collect();
        timetable.sort_unstable();
        Self { cycle, pages, places, visits, classes, timetable }
    }

    /// The cycle that was ranked.
    #[must_use]
    pub fn cycle(&self) -> &Cycle {
        &self.cycle
    }

    /// A page takes so long on the link from now on. The order does not depend on it.
    pub fn set_page_ns(&mut self, page_ns: u64) {
        self.cycle.page_ns = page_ns;
    }

    /// Pages of the cycle.
    #[must_use]
    pub fn page_count(&self) -> u32 {
        self.pages.len() as u32
    }

    /// The pages in the order in which they are given up.
    #[must_use]
    pub fn pages(&self) -> &[PageRef] {
        &self.pages
    }

    /// Loads that a page costs in each cycle when it is streamed; 0 of a page that no step has.
    #[must_use]
    pub fn loads_of(&self, page: PageRef) -> u32 {
        self.places.get(&page).map_or(0, |place| self.visits[*place as usize].len() as u32)
    }

    /// The placement for `frames` frames, `streaming_frames` of them for streaming: as many more as
    /// its largest step needs, all for residents where everything fits.
    ///
    /// # Errors
    /// One step alone needs more than `frames`.
    pub fn place(&self, frames: u32, streaming_frames: u32) -> Result<Placement<'_>, TooFewFrames> {
        let pages = self.page_count();
        if frames >= pages {
            return Ok(Placement { ranking: self, streamed: 0, streaming_frames: 0 });
        }
        if frames == 0 {
            return Err(TooFewFrames { needed: self.largest_step() });
        }
        let mut streaming_frames = streaming_frames.clamp(1, frames);
        loop {
            let streamed = pages - (frames - streaming_frames);
            let placement = Placement { ranking: self, streamed, streaming_frames };
            // More streaming frames are fewer residents, of which a step may then need more.
            let needed = placement.frames_in_use(1);
            if needed <= streaming_frames {
                return Ok(placement);
            }
            if needed > frames {
                return Err(TooFewFrames { needed: self.largest_step() });
            }
            streaming_frames = needed;
        }
    }

    /// The placement that a cut of this ranking was taken from. O(1).
    #[must_use]
    pub fn at(&self, cut: Cut) -> Placement<'_> {
        let Cut { streamed, streaming_frames } = cut;
        Placement { ranking: self, streamed: streamed.min(self.page_count()), streaming_frames }
    }

    /// The placement whose streaming frames hold the streamed parts of the step in use and of the
    /// next, and [`SPARE_FRAMES`] more; fewer where `frames` do not suffice for that.
    ///
    /// # Errors
    /// One step alone needs more than `frames`.
    pub fn place_ample(&self, frames: u32) -> Result<Placement<'_>, TooFewFrames> {
        let mut streaming_frames = 1 + SPARE_FRAMES;
        loop {
            let placement = self.place(frames, streaming_frames)?;
            let ample = placement.frames_in_use(2) + SPARE_FRAMES;
            let held = placement.streaming_frames;
            if placement.streamed == 0 || ample <= held || held == frames {
                return Ok(placement);
            }
            streaming_frames = ample.min(frames);
        }
    }

    /// Frames of the largest step.
    #[must_use]
    pub fn largest_step(&self) -> u32 {
        self.cycle.steps.iter().map(|step| step.pages.len()).max().unwrap_or(0) as u32
    }

    /// Visits of the pages that do not stay, by the step at which they begin: for placements that
    /// are not of this ranking.
    #[must_use]
    pub fn visits_without(&self, is_resident: impl Fn(PageRef) -> bool) -> Vec<Visit> {
        let visits = self.timetable.iter();
        let streamed = visits.filter(|(_, place)| !is_resident(self.pages[*place as usize]));
        streamed.map(|(visit, _)| *visit).collect()
    }

    /// Visits of the first `streamed` pages, by the step at which they begin.
    fn streamed_visits(&self, streamed: u32) -> Vec<Visit> {
        let visits = self.timetable.iter().filter(|(_, place)| *place < streamed);
        visits.map(|(visit, _)| *visit).collect()
    }
}

impl Placement<'_> {
    /// Whether a page stays. Pages that no step of the cycle has do not.
    #[must_use]
    pub fn is_resident(&self, page: PageRef) -> bool {
        self.ranking.places.get(&page).is_some_and(|place| *place >= self.streamed)
    }

    /// The pages that stay, those that would be given up next in front.
    #[must_use]
    pub fn residents(&self) -> &[PageRef] {
        &self.ranking.pages[self.streamed as usize..]
    }

    /// The pages that are streamed, the first to be given up in front.
    #[must_use]
    pub fn streamed(&self) -> &[PageRef] {
        &self.ranking.pages[..self.streamed as usize]
    }

    /// What is to be kept of it beside its ranking.
    #[must_use]
    pub fn cut(&self) -> Cut {
        Cut { streamed: self.streamed, streaming_frames: self.streaming_frames }
    }

    /// Frames for streaming; 0 where everything stays.
    #[must_use]
    pub fn streaming_frames(&self) -> u32 {
        self.streaming_frames
    }

    /// Pages that are loaded in each cycle.
    #[must_use]
    pub fn loads(&self) -> u64 {
        let visits = &self.ranking.visits[..self.streamed as usize];
        visits.iter().map(|visits| visits.len() as u64).sum()
    }

    /// The most streamed pages that `steps` steps in a row hold at a time.
    #[must_use]
    pub fn frames_in_use(&self, steps: usize) -> u32 {
        let all = self.ranking.cycle.steps.len();
        if all == 0 {
            return 0;
        }
        // A visit is held in every window of steps that touches one of its own.
        let mut change = vec![0i64; all + 1];
        for visit in self.ranking.visits[..self.streamed as usize].iter().flatten() {
            let length = (visit.last - visit.first + steps).min(all);
            let first = (visit.first % all + all + 1 - steps.min(all)) % all;
            change[first] += 1;
            change[(first + length).min(all)] -= 1;
            if first + length > all {
                change[0] += 1;
                change[first + length - all] -= 1;
            }
        }
        let held = change.iter().scan(0, |held, change| {
            *held += change;
            Some(*held)
        });
        u32::try_from(held.max().unwrap_or(0)).unwrap_or(u32::MAX)
    }
}

/// How fast a step is streamed that streams `ahead` pages and this one, in pages per unit of
/// compute time, as a number to sort by. A step's own multiple of the golden ratio decides when,
/// between two whole pages, it is its turn.
fn rate_key(step: &CycleStep, compute_ns: u64, ahead: u32) -> u64 {
    const SCALE: u128 = 1 << 32;
    // 2^32 over the golden ratio: the product's low half is the fraction of ordinal / golden ratio.
    let turn = u128::from(step.ordinal.wrapping_mul(2_654_435_769));
    let pages = u128::from(ahead) * SCALE + (SCALE - turn);
    // Pages * 2^32 per 2^16 ns: a page in an hour and 2^16 pages in a nanosecond both fit.
    u64::try_from((pages << 16) / u128::from(compute_ns.max(1))).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
