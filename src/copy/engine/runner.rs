//! What the engine's thread does with the notes: learn, plan, fetch.
//!
//! Owns the schedule, the course and the plan in force. Everything it decides on comes from the
//! pure modules; everything it does goes through the pager.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::notes::{Note, Notes, Taken};
use super::plan::{self, Plan};
use crate::copy::course::{Arrival, Course};
use crate::error::{Error, ErrorCode, Result};
use crate::memory::pager::{Fetched, PageOf, Pager, Role, Spent, Stop, Wanted};
use crate::memory::vbar::Bar;
use crate::model::schedule::{BarId, PageRef, Schedule, Span};
use crate::units::PageIndex;

/// Without a note the engine looks this often whether the budget has changed.
pub(super) const PAUSE_MAX: Duration = Duration::from_millis(25);
/// Where a page is free in a moment.
const PAUSE_MOMENT: Duration = Duration::from_micros(100);
/// Pages that are fetched at a time: enough to read several at once, few enough to look at the
/// notes between.
const BATCH: usize = 16;
/// Steps that are looked ahead at most.
const AHEAD_MAX: usize = 1 << 14;

/// What the engine knows and does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EngineNumbers {
    /// Steps for which the order has been right.
    pub trust: u64,
    /// Steps that were not as expected so far.
    pub departures: u64,
    /// Plans made so far.
    pub plans: u64,
    /// Pages of the plan in force, in all, 0 without one.
    pub planned_pages: u64,
    /// Of those, the ones that stay.
    pub kept_pages: u64,
    /// Steps that the engine is ahead of the program.
    pub steps_ahead: u64,
}

#[derive(Default)]
pub(super) struct Runner {
    schedule: Schedule,
    course: Course,
    plan: Option<Plan>,
    plans: u64,
    bars: HashMap<BarId, Arc<Bar>>,
    told: Vec<ErrorCode>,
}

/// Whether there is more to do at once.
enum Progress {
    Made,
    /// Nothing to do before a note comes, or this time is over.
    Blocked(Duration),
}

impl Runner {
    /// Takes the notes in and does what can be done. Returns how long to wait for a note.
    pub(super) fn work(&mut self, pager: &Pager, taken: Taken, notes: &Notes) -> Result<Duration> {
        if taken.overrun {
            log::warn!("the engine was too slow for the program: it learns the order anew");
            self.restart(pager);
        }
        for note in taken.notes {
            self.note(pager, note);
        }
        self.plan_if_due(pager);
        loop {
            match self.fetch(pager)? {
                Progress::Made if notes.is_any() => return Ok(Duration::ZERO),
                Progress::Made => {}
                Progress::Blocked(pause) => return Ok(pause),
            }
        }
    }

    /// Forgets order and plan: faults are served as if there was no engine.
    pub(super) fn restart(&mut self, pager: &Pager) {
        self.lift_plan(pager);
        let told = std::mem::take(&mut self.told);
        *self = Self { told, plans: self.plans, ..Self::default() };
    }

    pub(super) fn numbers(&self) -> EngineNumbers {
        let plan = self.plan.as_ref();
        EngineNumbers {
            trust: self.schedule.trust(),
            departures: self.schedule.departure_count(),
            plans: self.plans,
            planned_pages: plan.map_or(0, |plan| plan.page_count),
            kept_pages: plan.map_or(0, Plan::kept_count),
            steps_ahead: self.course.entered_count() as u64,
        }
    }

    /// Each kind of error is told once: the fault that finds the page missing says it again.
    pub(super) fn tell(&mut self, error: &Error) {
        if !self.told.contains(&error.code()) {
            self.told.push(error.code());
            log::warn!("fetching ahead of the program: {error}; not told again");
        }
    }

    fn note(&mut self, pager: &Pager, note: Note) {
        match note {
            Note::Faulted(spans) => self.faulted(pager, &spans),
            Note::Unpinned(span) => {
                let plan = self.plan.as_ref();
                self.course.unpinned(&span, |page| is_kept(plan, page));
            }
            Note::Closed(bar) => self.forget(pager, BarId(bar)),
            Note::Hint(order) => {
                self.schedule.hint(order.iter().map(Vec::as_slice));
                self.leave_course();
            }
            Note::Prefetch(span) => self.schedule.prefetch(span),
        }
    }

    fn faulted(&mut self, pager: &Pager, spans: &[Span]) {
        for span in spans {
            if !self.bars.contains_key(&span.bar)
                && let Some(bar) = pager.bar(span.bar.0)
            {
                self.bars.insert(span.bar, bar);
            }
        }
        let plan = self.plan.as_ref();
        let Some(recorded) = self.schedule.record(spans) else { return };
        let known = self.schedule.spans(recorded.step).to_vec();
        if self.course.faulted(&known, |page| is_kept(plan, page)) == Arrival::Other {
            log::trace!("a fault that was not the next one: {:?}", recorded.verdict);
        }
    }

    fn leave_course(&mut self) {
        let plan = self.plan.as_ref();
        self.course.clear(|page| is_kept(plan, page));
    }

    fn forget(&mut self, pager: &Pager, bar: BarId) {
        if self.bars.remove(&bar).is_none() {
            return;
        }
        self.schedule.forget(bar);
        self.course.forget(bar);
        if self.plan.as_ref().is_some_and(|plan| plan.kept.contains_key(&bar)) {
            self.lift_plan(pager);
        }
    }

    fn lift_plan(&mut self, pager: &Pager) {
        let Some(plan) = self.plan.take() else { return };
        for bar in plan.kept.keys() {
            if let Some(bar) = self.bars.get(bar) {
                pager.set_kept(bar, None);
            }
        }
    }

    /// Makes a plan where the order or the frames have changed.
    fn plan_if_due(&mut self, pager: &Pager) {
        let revision = self.schedule.revision();
        let Some(cycle) = self.schedule.cycle() else { return };
        let bars = self.bars.keys().map(|bar| bar.0).collect();
        let frames = pager.frames_for(&bars);
        if let Some(plan) = &self.plan
            && plan.revision == revision
            && !plan.is_outgrown(frames)
        {
            return;
        }
        let plan = plan::make(&self.schedule, &cycle, frames, self.plan.as_ref(), pager);
        log::debug!(
            "plan {}: {} steps, {} pages, {} of them stay in {} frames",
            self.plans,
            cycle.len(),
            plan.page_count,
            plan.kept_count(),
            frames
        );
        for (bar, kept) in &plan.kept {
            if let Some(bar) = self.bars.get(bar) {
                pager.set_kept(bar, Some(Arc::clone(kept)));
            }
        }
        self.plans += 1;
        self.plan = Some(plan);
        self.seed_spent(&cycle);
    }

    /// What the plan does not keep may go, the page whose next use is farthest first.
    fn seed_spent(&mut self, cycle: &[crate::model::schedule::StepId]) {
        self.course.clear_spent();
        for step in cycle.iter().rev() {
            let spans: Vec<Span> = self.schedule.spans(*step).to_vec();
            for page in spans.iter().rev().flat_map(|span| {
                let pages: Vec<PageRef> = span.pages().collect();
                pages.into_iter().rev()
            }) {
                if !is_kept(self.plan.as_ref(), page) && is_mapped(&self.bars, page) {
                    self.course.add_spent(page);
                }
            }
        }
    }

    /// Fetches the next pages that are wanted.
    fn fetch(&mut self, pager: &Pager) -> Result<Progress> {
        self.look_ahead();
        let wanted = self.wanted();
        if wanted.is_empty() {
            return Ok(match self.course.is_all_fetched() {
                true => Progress::Blocked(PAUSE_MAX),
                // Pages of VBARs that are gone.
                false => {
                    self.course.fetched(1);
                    Progress::Made
                }
            });
        }
        let (course, bars) = (&mut self.course, &self.bars);
        let mut spent = SpentPages { course, bars, planned: self.plan.is_some() };
        let fetched = match pager.fetch(&wanted, &mut spent) {
            Ok(fetched) => fetched,
            Err(error) if is_of_the_file(&error) => {
                self.tell(&error);
                Fetched { done: wanted.len(), stop: None }
            }
            Err(error) => return Err(error),
        };
        self.course.fetched(fetched.done);
        Ok(match fetched.stop {
            None => Progress::Made,
            Some(Stop::NoFrame) => Progress::Blocked(PAUSE_MAX),
            Some(Stop::InUse) => Progress::Blocked(PAUSE_MOMENT),
            Some(Stop::Refused(_) | Stop::Closed) => {
                self.course.fetched(1);
                Progress::Made
            }
        })
    }

    /// Enters steps until a batch of pages is wanted.
    fn look_ahead(&mut self) {
        let entered = self.course.entered_count();
        if !self.course.is_all_fetched() || entered >= AHEAD_MAX {
            return;
        }
        let limit = self.plan.as_ref().map_or(AHEAD_MAX, |plan| plan.steps.min(AHEAD_MAX));
        let bars = &self.bars;
        for upcoming in self.schedule.upcoming(limit).skip(entered) {
            self.course.enter(upcoming.spans);
            // Most pages of most steps have their frames.
            self.course.skip_fetched(|page| is_mapped(bars, page));
            if !self.course.is_all_fetched() {
                return;
            }
        }
    }

    fn wanted(&self) -> Vec<Wanted> {
        let pages = self.course.wanted(BATCH).into_iter();
        let wanted = pages.map_while(|page| {
            let bar = Arc::clone(self.bars.get(&page.bar)?);
            let role = match is_kept(self.plan.as_ref(), page) {
                true => Role::Kept,
                false => Role::Streamed,
            };
            Some(Wanted { page: PageOf { bar, page: page.page }, role })
        });
        wanted.collect()
    }
}

/// The pages that the course names as spent.
struct SpentPages<'a> {
    course: &'a mut Course,
    bars: &'a HashMap<BarId, Arc<Bar>>,
    /// Without a plan the oldest is the one that is needed first: then none is named.
    planned: bool,
}

impl Spent for SpentPages<'_> {
    fn take(&mut self) -> Option<PageOf> {
        if !self.planned {
            return None;
        }
        loop {
            let page = self.course.take_spent()?;
            if let Some(bar) = self.bars.get(&page.bar) {
                return Some(PageOf { bar: Arc::clone(bar), page: page.page });
            }
        }
    }

    fn put_back(&mut self, page: PageOf) {
        self.course.add_spent(PageRef { bar: BarId(page.bar.id), page: page.page });
    }
}

fn is_kept(plan: Option<&Plan>, page: PageRef) -> bool {
    let kept: Option<&Arc<BTreeSet<u32>>> = plan.and_then(|plan| plan.kept.get(&page.bar));
    kept.is_some_and(|kept| kept.contains(&page.page))
}

fn is_mapped(bars: &HashMap<BarId, Arc<Bar>>, page: PageRef) -> bool {
    let word = |bar: &Arc<Bar>| bar.table.word(PageIndex(page.page));
    bars.get(&page.bar).is_some_and(|bar| word(bar).state.is_mapped())
}

/// Whether the fault that comes for the page will say the same.
fn is_of_the_file(error: &Error) -> bool {
    use ErrorCode::{Cancelled, FileChanged, Io, TimedOut};
    matches!(error.code(), Io | FileChanged | TimedOut | Cancelled)
}
