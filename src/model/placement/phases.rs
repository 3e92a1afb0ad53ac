//! What stays during a part of a cycle: pages that are kept from one visit to the next, and dropped
//! where their next visit is far.
//!
//! A workflow has phases: an encoder once, a denoiser for many passes, a decoder. A page that stays
//! throughout takes its frame from all of them; one that is kept *between* the passes of its own
//! phase takes it from that phase only. The stretch between two visits of a page is a *gap*, and
//! to keep a page over a gap saves one load, whatever its length; so the shortest are kept first,
//! as long as there are frames at each of their steps, and the page whose next visit is farthest
//! goes. Gaps that repeat are kept or dropped together, and among ones of equal length those pages
//! stay that the ranking gives up last, so that what streams of a loop is spread over it.
//!
//! Frames for streaming are left free at each step: as many as the parts of the cycle that come
//! once are best with; where passes repeat, no more than the step in use and the next stream; none
//! inside of a phase all of whose pages are kept, where nothing streams.

use std::collections::HashMap;

use super::occupancy::Occupancy;
use super::pipeline::{Flow, Forecast, forecast};
use super::visits::Visit;
use super::{Placement, Ranking, TooFewFrames};
use crate::model::schedule::PageRef;

/// Frames for streaming beside those of two steps where passes repeat: one changes hands. Each more
/// is a load more in each of the passes.
const SPARE: i64 = 1;

/// Turns of a cycle at most: the pages that stay are listed for each.
const TURNS_MAX: usize = 128;

/// A placement as it is followed: which pages stay, which come and go, and when.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Layout {
    /// Steps of the cycle.
    step_count: usize,
    /// Pages that stay throughout, those that would be given up next in front.
    residents: Vec<PageRef>,
    /// Of the others, those that are kept from visit to visit, and from when to when: loaded before
    /// the first step, dropped behind the last.
    stays: HashMap<PageRef, Vec<Visit>>,
    /// Frames for what comes and goes at once.
    streaming_frames: u32,
    forecast: Option<Forecast>,
}

/// Gaps of a page that follow each other and are alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Item {
    place: u32,
    /// Index of the visit before the first gap.
    visit: usize,
    gaps: usize,
    /// Steps of each gap.
    length: usize,
}

impl Layout {
    /// Nothing stays: `frames` frames for the steps of a cycle.
    #[must_use]
    pub fn streaming_all(frames: u32, step_count: usize) -> Self {
        Self { step_count, streaming_frames: frames, ..Self::default() }
    }

    /// Pages that stay throughout.
    #[must_use]
    pub fn residents(&self) -> &[PageRef] {
        &self.residents
    }

    /// Frames for streaming; 0 where everything stays.
    #[must_use]
    pub fn streaming_frames(&self) -> u32 {
        self.streaming_frames
    }

    /// What a steady cycle comes to; `None` where nothing was placed.
    #[must_use]
    pub fn flow(&self) -> Option<Flow> {
        self.forecast.map(|forecast| forecast.flow)
    }

    pub(super) fn forecast(&self) -> Option<Forecast> {
        self.forecast
    }

    /// Whether some pages are kept for a part of the cycle.
    #[must_use]
    pub fn has_phases(&self) -> bool {
        !self.stays.is_empty()
    }

    /// Whether a page that does not stay throughout is kept behind a step.
    #[must_use]
    pub fn is_kept_behind(&self, page: PageRef, step: usize) -> bool {
        self.stays.get(&page).is_some_and(|stays| stays.iter().any(|stay| self.holds(*stay, step)))
    }

    fn holds(&self, stay: Visit, step: usize) -> bool {
        let within = |step: usize| stay.first <= step && step < stay.last;
        within(step) || within(step + self.step_count)
    }

    /// The pages that are kept behind a step, for a part of the cycle only.
    pub fn kept_behind(&self, step: usize) -> impl Iterator<Item = PageRef> + '_ {
        let stays = self.stays.iter();
        let kept = stays.filter(move |(_, stays)| stays.iter().any(|stay| self.holds(*stay, step)));
        kept.map(|(page, _)| *page)
    }

    /// Steps behind which the pages that are kept have become others, each time that a part of
    /// them has changed; about `parts` parts in a cycle of two phases, and `TURNS_MAX` in any.
    /// Begins with step 0.
    #[must_use]
    pub fn turns(&self, parts: usize) -> Vec<usize> {
        let mut changes = vec![0usize; self.step_count];
        for stay in self.stays.values().flatten() {
            changes[stay.first % self.step_count] += 1;
            changes[stay.last % self.step_count] += 1;
        }
        let most = changes.iter().sum::<usize>().div_ceil(TURNS_MAX);
        let part = (self.stays.len() / parts.max(1)).max(most).max(1);
        let mut turns = vec![0];
        let mut changed = 0;
        for (step, count) in changes.iter().enumerate().skip(1) {
            changed += count;
            if changed >= part {
                turns.push(step);
                changed = 0;
            }
        }
        turns
    }
}

impl Placement<'_> {
    /// The same as a layout.
    #[must_use]
    pub fn layout(&self) -> Layout {
        Layout {
            step_count: self.ranking.cycle.steps.len(),
            residents: self.residents().to_vec(),
            stays: HashMap::new(),
            streaming_frames: self.streaming_frames,
            forecast: Some(self.forecast()),
        }
    }
}

impl Ranking {
    /// The layout for `frames` frames of which `streaming_frames` are for streaming, with pages
    /// kept from visit to visit. Takes O(n log n) for n visits, and a run of the pipeline.
    ///
    /// # Errors
    /// Some steps need more frames than that leaves to them.
    pub fn place_phases(&self, frames: u32, streaming: u32) -> Result<Layout, TooFewFrames> {
        self.place_items(&self.items(), frames, streaming)
    }

    pub(super) fn place_items(
        &self,
        items: &[Item],
        frames: u32,
        streaming: u32,
    ) -> Result<Layout, TooFewFrames> {
        let few = TooFewFrames { needed: self.largest_step() };
        if streaming > frames {
            return Err(few);
        }
        let everywhere = vec![i64::from(streaming); self.cycle.steps.len()];
        let first = self.choose(items, frames, everywhere);
        // What streams in a phase that is passed through again and again takes its frames from each
        // of its passes: no more than are of use there.
        let kept = match first.reserve_where_passes_repeat() {
            Some(reserve) => self.choose(items, frames, reserve).kept,
            None => first.kept,
        };
        self.laid_out(&kept, frames, streaming).ok_or(few)
    }

    /// Chooses gaps to keep, with frames left for streaming at each step.
    fn choose(&self, items: &[Item], frames: u32, reserve: Vec<i64>) -> Chooser<'_> {
        let mut chooser = Chooser::new(self, frames, reserve);
        for level in items.chunk_by(|a, b| self.level(a) == self.level(b)) {
            self.phases(level).iter().for_each(|phase| chooser.keep_phase(phase));
        }
        chooser
    }

    /// Looks at visits that a choice among these items takes: for each, all of its page's. The
    /// gaps of a page are of few kinds where passes repeat, and of as many as it has visits where
    /// they come in no order.
    pub(super) fn work_of(&self, items: &[Item]) -> u64 {
        items.iter().map(|item| self.visits[item.place as usize].len() as u64).sum()
    }

    /// Class, larger first, and length of gaps, shorter first.
    fn level(&self, item: &Item) -> (std::cmp::Reverse<i32>, usize) {
        (std::cmp::Reverse(self.classes[item.place as usize]), item.length)
    }

    /// All gaps in the order in which they are kept.
    pub(super) fn items(&self) -> Vec<Item> {
        let steps = self.cycle.steps.len();
        let mut items = Vec::new();
        for (place, visits) in (0u32..).zip(&self.visits) {
            let count = visits.len();
            let length = |visit: usize| {
                let next = visits[(visit + 1) % count].first;
                let next = if visit + 1 >= count { next + steps } else { next };
                next - visits[visit].last
            };
            // Begins behind a gap that is another one than its follower, if there is one.
            let start =
                (0..count).find(|visit| length((visit + count - 1) % count) != length(*visit));
            let start = start.unwrap_or(0);
            let mut gap = 0;
            while gap < count {
                let visit = (start + gap) % count;
                let gaps = (gap..count)
                    .take_while(|gap| length((start + gap) % count) == length(visit))
                    .count();
                items.push(Item { place, visit, gaps, length: length(visit) });
                gap += gaps;
            }
        }
        items.sort_unstable_by_key(|item| {
            (self.level(item), std::cmp::Reverse(item.place), item.visit)
        });
        items
    }

    /// The items of a level by the parts of the cycle that they are in.
    fn phases(&self, level: &[Item]) -> Vec<Vec<Item>> {
        let mut by_start: Vec<(usize, usize, Item)> = level
            .iter()
            .map(|item| {
                let (first, end) = self.reach(item);
                (first, end, *item)
            })
            .collect();
        by_start.sort_by_key(|(first, end, _)| (*first, *end));
        let mut phases: Vec<(usize, Vec<Item>)> = Vec::new();
        for (first, end, item) in by_start {
            match phases.last_mut() {
                Some((last, items)) if first < *last => {
                    *last = end.max(*last);
                    items.push(item);
                }
                _ => phases.push((end, vec![item])),
            }
        }
        let mut phases: Vec<Vec<Item>> = phases.into_iter().map(|(_, items)| items).collect();
        for items in &mut phases {
            items.sort_unstable_by_key(|item| (std::cmp::Reverse(item.place), item.visit));
        }
        phases
    }

    /// The steps of an item, those of the visits at both ends too.
    fn reach(&self, item: &Item) -> (usize, usize) {
        let steps = self.cycle.steps.len();
        let visits = &self.visits[item.place as usize];
        let first = visits[item.visit].first;
        if item.gaps == visits.len() {
            return (first, first + steps);
        }
        let last = item.visit + item.gaps;
        let turns = last / visits.len() * steps;
        (first, visits[last % visits.len()].last + turns + 1)
    }

    /// Whether the item is a part of the cycle: with the others its page stays throughout.
    pub(super) fn is_part(&self, item: &Item) -> bool {
        item.gaps < self.visits[item.place as usize].len()
    }

    fn laid_out(&self, kept: &[Vec<bool>], frames: u32, streaming_frames: u32) -> Option<Layout> {
        let steps = self.cycle.steps.len();
        let (mut residents, mut stays) = (Vec::new(), HashMap::new());
        let mut loads = Vec::new();
        for ((page, visits), kept) in self.pages.iter().zip(&self.visits).zip(kept) {
            let Some(open) = kept.iter().position(|kept| !kept) else {
                residents.push(*page);
                continue;
            };
            let joined = joined(visits, kept, open, steps);
            loads.extend_from_slice(&joined);
            if joined.len() < visits.len() {
                stays.insert(*page, joined);
            }
        }
        loads.sort_unstable();
        let passing = frames - u32::try_from(residents.len()).ok()?;
        let forecast = Some(forecast(&self.cycle, &loads, passing)?);
        Some(Layout { step_count: steps, residents, stays, streaming_frames, forecast })
    }
}

/// The visits of a page with those joined between which it is kept; it is not behind visit `open`.
fn joined(visits: &[Visit], kept: &[bool], open: usize, steps: usize) -> Vec<Visit> {
    let mut joined: Vec<Visit> = Vec::new();
    let mut is_held = false;
    for number in open + 1..=open + visits.len() {
        let (turns, index) = (number / visits.len() * steps, number % visits.len());
        let Visit { first, last } = visits[index];
        match joined.last_mut() {
            Some(stay) if is_held => stay.last = last + turns,
            _ => joined.push(Visit { first: first + turns, last: last + turns }),
        }
        is_held = kept[index];
    }
    for stay in &mut joined {
        let turns = stay.first / steps * steps;
        (stay.first, stay.last) = (stay.first - turns, stay.last - turns);
    }
    joined
}

/// Gaps that are kept so far, and the frames that they take.
struct Chooser<'a> {
    ranking: &'a Ranking,
    frames: i64,
    /// By step: frames that are left for streaming.
    reserve: Vec<i64>,
    /// Those, and frames of pages that are kept, in use or between.
    taken: Occupancy,
    /// Pages in use that are kept neither up to there nor from there on.
    loose: Occupancy,
    /// By place and visit: the gap behind it.
    kept: Vec<Vec<bool>>,
    /// Steps at which nothing streams.
    quiet: Vec<bool>,
}

impl<'a> Chooser<'a> {
    fn new(ranking: &'a Ranking, frames: u32, reserve: Vec<i64>) -> Self {
        let steps = ranking.cycle.steps.len();
        let mut taken = Occupancy::new(steps);
        reserve
            .iter()
            .enumerate()
            .for_each(|(step, reserved)| taken.add(step, step + 1, *reserved));
        let mut loose = Occupancy::new(steps);
        for visit in ranking.visits.iter().flatten() {
            loose.add(visit.first, visit.last + 1, 1);
        }
        Self {
            ranking,
            frames: i64::from(frames),
            reserve,
            taken,
            loose,
            kept: ranking.visits.iter().map(|visits| vec![false; visits.len()]).collect(),
            quiet: vec![false; steps],
        }
    }

    /// The frames for streaming that are of use at each step: for its own part and that of the next
    /// where its pages come several times in a cycle. `None` where none can be spared.
    fn reserve_where_passes_repeat(&self) -> Option<Vec<i64>> {
        let steps = self.quiet.len();
        let mut repeats = vec![false; steps];
        for visits in self.ranking.visits.iter().filter(|visits| visits.len() > 1) {
            visits.iter().for_each(|visit| repeats[visit.first] = true);
        }
        let of_use = |step: usize| {
            let [own, next] = [step, step + 1].map(|step| self.loose.most(step, step + 1));
            own + next + SPARE
        };
        let least = |step: usize| if repeats[step] { of_use(step) } else { i64::MAX };
        let reserve = |step: usize| self.reserve[step].min(least(step));
        let reserve: Vec<i64> = (0..steps).map(reserve).collect();
        (reserve != self.reserve).then_some(reserve)
    }

    /// Keeps the items of a phase that there is room for, the first ones first. Where they are all
    /// that is in use in it nothing streams, and there is room for more.
    fn keep_phase(&mut self, phase: &[Item]) {
        let done = phase.iter().take_while(|item| self.keep_if_room(item)).count();
        let reaches = || phase.iter().map(|item| self.ranking.reach(item));
        let first = reaches().map(|(first, _)| first).min().unwrap_or(0);
        let end = reaches().map(|(_, end)| end).max().unwrap_or(0);
        let steps = self.quiet.len();
        if end - first < steps && (done < phase.len() || self.loose.most(first, end) <= 0) {
            let within = (first..end).map(|step| step % steps);
            let loud: Vec<usize> = within.filter(|step| !self.quiet[*step]).collect();
            loud.iter().for_each(|step| self.taken.add(*step, step + 1, -self.reserve[*step]));
            let more = phase[done..].iter().take_while(|item| self.keep_if_room(item)).count();
            if done + more == phase.len() && self.loose.most(first, end) <= 0 {
                loud.iter().for_each(|step| self.quiet[*step] = true);
                return;
            }
            phase[done..done + more].iter().rev().for_each(|item| self.keep(item, -1));
            loud.iter().for_each(|step| self.taken.add(*step, step + 1, self.reserve[*step]));
        }
        phase[done..].iter().for_each(|item| {
            self.keep_if_room(item);
        });
    }

    /// Whether it is kept.
    fn keep_if_room(&mut self, item: &Item) -> bool {
        let has_room = self.has_room(item);
        if has_room {
            self.keep(item, 1);
        }
        has_room
    }

    fn has_room(&self, item: &Item) -> bool {
        let mut pieces = self.pieces(item);
        pieces.all(|(first, end)| self.taken.most(first, end) < self.frames)
    }

    /// Steps at which an item takes one more frame: its gaps, and the visits at their ends that no
    /// other gap has.
    fn pieces(&self, item: &Item) -> impl Iterator<Item = (usize, usize)> + use<> {
        let visits = &self.ranking.visits[item.place as usize];
        let kept = &self.kept[item.place as usize];
        let (steps, count) = (self.ranking.cycle.steps.len(), visits.len());
        let at = |number: usize| {
            let turns = number / count * steps;
            (visits[number % count].first + turns, visits[number % count].last + turns + 1)
        };
        let (from, to) = (item.visit, item.visit + item.gaps);
        let before = kept[(from + count - 1) % count] && item.gaps < count;
        let behind = kept[to % count] && item.gaps < count;
        let first = if before { at(from).1 } else { at(from).0 };
        let end = match () {
            () if item.gaps == count => at(from).0 + steps,
            () if behind => at(to).0,
            () => at(to).1,
        };
        std::iter::once((first, end)).filter(|(first, end)| first < end)
    }

    /// Keeps an item, or with -1 takes that back; the last first.
    fn keep(&mut self, item: &Item, sign: i64) {
        let (place, count) = (item.place as usize, self.kept[item.place as usize].len());
        let gaps = (item.visit..item.visit + item.gaps).map(|visit| visit % count);
        if sign < 0 {
            gaps.clone().for_each(|gap| self.kept[place][gap] = false);
        }
        let pieces: Vec<_> = self.pieces(item).collect();
        let visits = &self.ranking.visits[place];
        let steps = self.ranking.cycle.steps.len();
        for (first, end) in pieces {
            self.taken.add(first, end, sign);
            // Visits of the page within are kept from or to there.
            for visit in visits {
                for first_step in [visit.first, visit.first + steps] {
                    if (first..end).contains(&first_step) {
                        let length = visit.last + 1 - visit.first;
                        self.loose.add(first_step, first_step + length, -sign);
                    }
                }
            }
        }
        if sign > 0 {
            gaps.for_each(|gap| self.kept[place][gap] = true);
        }
    }
}

#[cfg(test)]
mod tests;
