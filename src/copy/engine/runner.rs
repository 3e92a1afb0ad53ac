//! What the engine's thread does with the notes: learn, plan, fetch.
//!
//! Owns the schedule, the course and the plan in force. Everything it decides on comes from the
//! pure modules; everything it does goes through the pager.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::course::{Arrival, Course};
use super::drift::Drift;
use super::fewest::Fewest;
use super::meter::{Meter, Reading};
use super::notes::{Note, Notes, Taken};
use super::plan::Plan;
use super::samples::{Sample, Wanted as SamplesWanted};
use crate::copy::fill::Keep;
use crate::error::{Error, ErrorCode, Result};
use crate::memory::page_table::PageState;
use crate::memory::pager::{Fetched, PageOf, Pager, Role, Spent, Stop, Wanted};
use crate::memory::vbar::Bar;
use crate::model::placement::{Cycle, PassMeasured};
use crate::model::schedule::{BarId, PageRef, Schedule, Span, StepId};
use crate::units::{MIB, PageIndex};

/// Without a note the engine looks this often whether the budget has changed.
pub(super) const PAUSE_MAX: Duration = Duration::from_millis(25);
/// Where a page is free in a moment.
const PAUSE_MOMENT: Duration = Duration::from_micros(100);
/// Pages that are fetched at a time: enough to read several at once, few enough to look at the
/// notes between.
const BATCH: usize = 16;
/// What a MiB takes on the link until that is measured, in nanoseconds: 55 GB/s, page-locked memory
/// to an H100 or H200.
const NS_PER_MIB: u64 = 19_000;
/// Cycles after which a plan is believed although no compute time was sampled.
const PATIENT_CYCLES: u64 = 3;
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
    /// Of those, the ones that stay now.
    pub kept_pages: u64,
    /// Frames for the others.
    pub streaming_frames: u64,
    /// Steps that the engine is ahead of the program.
    pub steps_ahead: u64,
    /// Cycles of plans that were measured so far.
    pub measured_cycles: u64,
    /// Time that a MiB takes on the link, in nanoseconds; 0 before that was measured.
    pub link_ns_per_mib: u64,
}

#[derive(Default)]
pub(super) struct Runner {
    schedule: Schedule,
    course: Course,
    plan: Option<Plan>,
    plans: u64,
    /// Frames to plan for.
    frames: Fewest,
    meter: Meter,
    measured_cycles: u64,
    /// As measured by the last turn of a cycle, and when the last plan was made.
    link_ns_per_mib: Option<u64>,
    drift: Drift,
    /// The same of the time of a page on the link.
    link_drift: Drift,
    /// Where a frame lacks, pages that may lose theirs are to be looked for.
    is_search_due: bool,
    /// Steps that came so far.
    steps: u64,
    bars: HashMap<BarId, Arc<Bar>>,
    /// Pages that the program wished for, once.
    wishes: VecDeque<PageRef>,
    told: Vec<ErrorCode>,
}

/// Whether there is more to do at once.
enum Progress {
    Made,
    /// Nothing to do before a note comes, or this time is over.
    Blocked(Duration),
}

/// How far a fetch came.
#[derive(Default)]
struct Came {
    /// Pages that have their frames now.
    done: usize,
    /// Pages behind those that cannot be had.
    given_up: usize,
    /// Why not all of the others.
    stop: Option<Stop>,
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
        self.settle(pager);
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
        let (plans, measured_cycles) = (self.plans, self.measured_cycles);
        *self = Self { told, plans, measured_cycles, ..Self::default() };
    }

    pub(super) fn numbers(&self) -> EngineNumbers {
        let plan = self.plan.as_ref();
        EngineNumbers {
            trust: self.schedule.trust(),
            departures: self.schedule.departure_count(),
            plans: self.plans,
            planned_pages: plan.map_or(0, Plan::page_count),
            kept_pages: plan.map_or(0, Plan::kept_count),
            streaming_frames: plan.map_or(0, |plan| u64::from(plan.streaming_frames())),
            steps_ahead: self.course.entered_count() as u64,
            measured_cycles: self.measured_cycles,
            link_ns_per_mib: self.link_ns_per_mib.unwrap_or(0),
        }
    }

    /// Each kind of error is told once: the fault that finds the page missing says it again.
    pub(super) fn tell(&mut self, error: &Error) {
        // Somebody ended it: the runtime as it closes, or the program all waits.
        if error.code() == ErrorCode::Cancelled {
            return log::debug!("fetching ahead of the program: {error}");
        }
        if !self.told.contains(&error.code()) {
            self.told.push(error.code());
            log::warn!("fetching ahead of the program: {error}; not told again");
        }
    }

    fn note(&mut self, pager: &Pager, note: Note) {
        match note {
            Note::Faulted { spans, at_ns } => self.faulted(pager, &spans, at_ns),
            Note::Unpinned(span) => {
                let plan = self.plan.as_ref();
                self.course.unpinned(&span, |page| is_kept(plan, page));
            }
            Note::Closed(bar) => self.forget(pager, BarId(bar)),
            Note::GaveBack => self.frames = Fewest::default(),
            Note::Hint(order) => {
                order.iter().flatten().for_each(|span| self.know(pager, span.bar));
                self.schedule.hint(order.iter().map(Vec::as_slice));
                self.leave_course();
            }
            Note::Prefetch(span) => {
                self.know(pager, span.bar);
                self.schedule.prefetch(span);
            }
        }
    }

    fn faulted(&mut self, pager: &Pager, spans: &[Span], at_ns: Option<u64>) {
        spans.iter().for_each(|span| self.know(pager, span.bar));
        let Some(recorded) = self.schedule.record(spans) else { return };
        self.steps += 1;
        self.move_on(pager, recorded.step, at_ns);
        let plan = self.plan.as_ref();
        let known = self.schedule.spans(recorded.step);
        if self.course.faulted(known, |page| is_kept(plan, page)) == Arrival::Other {
            log::trace!("a fault that was not the next one: {:?}", recorded.verdict);
        }
    }

    /// Follows the program through the plan's cycle, at whose end it is measured.
    fn move_on(&mut self, pager: &Pager, step: StepId, at_ns: Option<u64>) {
        let Some(plan) = &mut self.plan else { return };
        let moved = plan.advance(step);
        self.meter.step(at_ns, plan.longest_ns());
        if moved.is_jump {
            self.meter.spoil();
        }
        if moved.is_turn {
            self.frames.turn();
            let copied = &pager.device.counters.bytes_filled;
            let copied_bytes = copied.load(std::sync::atomic::Ordering::Relaxed);
            let reading = at_ns.map(|at_ns| Reading { at_ns, copied_bytes });
            let compute_ns = plan.cycle_compute_ns(|step| self.schedule.compute_ns(step));
            self.link_ns_per_mib = pager.link_ns_per_mib();
            let ns_per_mib = self.link_ns_per_mib.unwrap_or(NS_PER_MIB);
            self.link_drift.sample(plan.page_ns(), page_ns(pager, ns_per_mib));
            let pass = self.meter.turn(reading, compute_ns, ns_per_mib);
            pager.note_pass_end(pass);
            let sampled = plan.sampled;
            if let Some(pass) = pass.filter(|_| sampled) {
                self.observe(pager, pass);
            }
            self.end_cycle(pager);
        }
        if moved.is_jump {
            // It began anywhere.
            self.meter.spoil();
        }
        self.turn(pager);
        // A page may be kept for a use that has been left out.
        self.is_search_due |= moved.is_jump;
    }

    /// Other pages stay where the program is now than did before.
    fn turn(&mut self, pager: &Pager) {
        let Some(mut plan) = self.plan.take_if(|plan| plan.has_phases()) else { return };
        if plan.take_turn() {
            self.apply(pager, &plan);
        }
        self.plan = Some(plan);
    }

    /// A cycle of the plan in force was measured.
    pub(super) fn observe(&mut self, pager: &Pager, pass: PassMeasured) {
        let Some(mut plan) = self.plan.take() else { return };
        self.measured_cycles += 1;
        let (before, was_trying) = (plan.streaming_frames(), plan.is_trying());
        if plan.observe(pass) {
            let now = plan.streaming_frames();
            log::debug!("{before} frames stream, now {now}: the last cycle was {pass:?}");
            return self.enforce(pager, plan);
        }
        if was_trying && !plan.is_trying() {
            self.forget_locked(pager, &plan);
        }
        self.plan = Some(plan);
    }

    /// Looks whether the device computes, and the link copies, as long as the plan in force says.
    fn end_cycle(&mut self, pager: &Pager) {
        let Some(plan) = self.plan.as_mut().filter(|plan| plan.sampled) else { return };
        if self.drift.end_cycle() {
            log::debug!("the device computes for other times than before: they are sampled anew");
            plan.unlearn();
            self.schedule.forget_samples();
        }
        if self.link_drift.end_cycle()
            && let Some(plan) = self.plan.take()
        {
            self.relink(pager, plan);
        }
    }

    /// The link has become another one than the plan was made for, as one does that was timed while
    /// files were being read: other splits may be better.
    fn relink(&mut self, pager: &Pager, plan: Plan) {
        let (before, before_ns) = (plan.streaming_frames(), plan.page_ns());
        let plan = plan.with_link(page_ns(pager, self.link_ns_per_mib.unwrap_or(NS_PER_MIB)));
        let (now, now_ns) = (plan.streaming_frames(), plan.page_ns());
        log::debug!("a page takes {now_ns} ns, not {before_ns}: {now} frames stream, not {before}");
        self.plans += 1;
        self.meter.spoil();
        self.enforce(pager, plan);
    }

    fn know(&mut self, pager: &Pager, bar: BarId) {
        if !self.bars.contains_key(&bar)
            && let Some(found) = pager.bar(bar.0)
        {
            self.bars.insert(bar, found);
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
        if self.plan.as_ref().is_some_and(|plan| plan.kept().contains_key(&bar)) {
            self.lift_plan(pager);
        }
    }

    fn lift_plan(&mut self, pager: &Pager) {
        let Some(plan) = self.plan.take() else { return };
        for bar in plan.kept().keys() {
            if let Some(bar) = self.bars.get(bar) {
                pager.set_kept(bar, None, Keep::No);
            }
        }
    }

    /// Makes a plan where the order, the frames or what is known of the compute time has changed.
    fn plan_if_due(&mut self, pager: &Pager) {
        let revision = self.schedule.revision();
        if revision == 0 {
            return;
        }
        let same = self.plan.as_ref().is_some_and(|plan| plan.revision == revision);
        if !same {
            self.frames = Fewest::default();
        }
        let frames = self.frames.see(pager.frames_for(|bar| self.bars.contains_key(&BarId(bar))));
        let sampled = self.is_sampled();
        let plan = match self.plan.take() {
            Some(plan) if same && plan.sampled == sampled => {
                if !plan.is_outgrown(frames) {
                    self.plan = Some(plan);
                    return;
                }
                // Pages that were fetched may be gone with the frames.
                self.course.clear(|page| plan.keeps(page));
                plan.with_frames(frames)
            }
            before => {
                self.link_ns_per_mib = pager.link_ns_per_mib();
                let page_ns = page_ns(pager, self.link_ns_per_mib.unwrap_or(NS_PER_MIB));
                let classes = |bar: BarId| self.bars.get(&bar).map_or(0, |bar| pager.class_of(bar));
                let Some(cycle) = Cycle::of(&self.schedule, page_ns, classes) else {
                    self.plan = before;
                    return;
                };
                Plan::new(revision, sampled, cycle, frames)
            }
        };
        log::debug!(
            "plan {}: {} steps, {} pages in {frames} frames: {} stay, {} frames stream",
            self.plans,
            plan.step_count(),
            plan.page_count(),
            plan.kept_count(),
            plan.streaming_frames(),
        );
        self.plans += 1;
        self.meter.spoil();
        self.enforce(pager, plan);
    }

    fn enforce(&mut self, pager: &Pager, mut plan: Plan) {
        plan.made_at = self.steps;
        pager.forget_times();
        self.apply(pager, &plan);
        // What is on trial may stream again in a few cycles.
        if !plan.is_trying() {
            self.forget_locked(pager, &plan);
        }
        self.plan = Some(plan);
        self.find_spent();
    }

    /// One copy is enough of what stays on the device.
    fn forget_locked(&self, pager: &Pager, plan: &Plan) {
        for (bar, kept) in plan.throughout() {
            if let Some(bar) = self.bars.get(bar) {
                pager.forget_locked(bar, kept.iter().copied());
            }
        }
    }

    /// What the plan does not keep may go, the page whose next use is farthest first.
    fn find_spent(&mut self) {
        self.is_search_due = false;
        let Some(plan) = &self.plan else { return };
        self.course.clear_spent();
        for page in plan.pages_from_the_end() {
            if !plan.keeps(page) && is_mapped(&self.bars, page) {
                self.course.add_spent(page);
            }
        }
    }

    fn apply(&self, pager: &Pager, plan: &Plan) {
        let streamed = if plan.is_settled { Keep::Locked } else { Keep::No };
        pager.pace(plan.streamed_count());
        for (bar, kept) in plan.kept() {
            if let Some(bar) = self.bars.get(bar) {
                pager.set_kept(bar, Some(Arc::clone(kept)), streamed);
            }
        }
    }

    /// A plan that was made without samples is soon another one, which streams other pages; but
    /// some programs give none.
    fn settle(&mut self, pager: &Pager) {
        let Some(plan) = &mut self.plan else { return };
        let steps = self.steps - plan.made_at;
        if !plan.is_settled && plan.may_last() && steps > PATIENT_CYCLES * plan.step_count() as u64
        {
            plan.is_settled = true;
            let plan = self.plan.take();
            plan.iter().for_each(|plan| self.apply(pager, plan));
            self.plan = plan;
        }
    }

    /// Takes a sample of compute time in.
    pub(super) fn sample(&mut self, sample: &Sample) {
        let Some(step) = self.schedule.step_of(&sample.spans) else { return };
        self.schedule.sample(step, sample.compute_ns);
        let Some(plan) = self.plan.as_ref().filter(|plan| plan.sampled) else { return };
        if let Some(expected_ns) = plan.compute_ns(step) {
            self.drift.sample(expected_ns, sample.compute_ns);
        }
    }

    /// Which samples are of use: all until each step of the cycle has one, then some.
    pub(super) fn wants_samples(&self) -> SamplesWanted {
        match &self.plan {
            Some(plan) if plan.sampled => SamplesWanted::Some,
            Some(_) => SamplesWanted::All,
            None => SamplesWanted::None,
        }
    }

    fn is_sampled(&mut self) -> bool {
        let Some(plan) = &mut self.plan else { return false };
        plan.sampled || plan.is_known(|step| self.schedule.compute_ns(step).is_some())
    }

    /// Fetches the next pages: those wished for, then those that are expected.
    fn fetch(&mut self, pager: &Pager) -> Result<Progress> {
        while let Some(span) = self.schedule.take_prefetch() {
            self.wishes.extend(span.pages());
        }
        self.wishes.retain(|page| self.bars.contains_key(&page.bar));
        if !self.wishes.is_empty() {
            let wished: Vec<PageRef> = self.wishes.iter().take(BATCH).copied().collect();
            let fetched = self.fetch_pages(pager, &wished)?;
            let done = fetched.done + fetched.given_up;
            self.wishes.drain(..done.min(self.wishes.len()));
            // Without a frame to spare a wish waits, and what is expected comes first.
            if fetched.stop.is_none() {
                return Ok(Progress::Made);
            }
        }
        self.find_lost();
        self.look_ahead();
        let wanted = self.course.wanted(BATCH);
        if wanted.is_empty() {
            return Ok(Progress::Blocked(PAUSE_MAX));
        }
        let fetched = self.fetch_pages(pager, &wanted)?;
        self.course.fetched(fetched.done);
        self.course.give_up(fetched.given_up);
        Ok(match fetched.stop {
            Some(Stop::NoFrame) if std::mem::take(&mut self.is_search_due) => {
                self.find_spent();
                Progress::Made
            }
            Some(Stop::NoFrame) => Progress::Blocked(PAUSE_MAX),
            Some(Stop::InUse) => Progress::Blocked(PAUSE_MOMENT),
            _ => Progress::Made,
        })
    }

    /// Fetches pages in their order, as far as it goes.
    fn fetch_pages(&mut self, pager: &Pager, pages: &[PageRef]) -> Result<Came> {
        let wanted: Vec<Wanted> = pages.iter().map_while(|page| self.wanted(*page)).collect();
        if wanted.is_empty() {
            return Ok(Came { given_up: 1, ..Came::default() });
        }
        let (course, bars) = (&mut self.course, &self.bars);
        let planned = self.plan.is_some();
        let limit = self.frames.limit().filter(|_| planned);
        let mut spent = SpentPages { course, bars, planned, limit };
        match pager.fetch(&wanted, &mut spent) {
            Ok(Fetched { done, stop: Some(Stop::Refused(_) | Stop::Closed) }) => {
                Ok(Came { done, given_up: 1, stop: None })
            }
            Ok(Fetched { done, stop }) => Ok(Came { done, given_up: 0, stop }),
            Err(error) if is_of_the_file(&error) => {
                self.tell(&error);
                Ok(Came { given_up: wanted.len(), ..Came::default() })
            }
            Err(error) => Err(error),
        }
    }

    /// Pages that were fetched and lost their frames to the program's own memory are wanted again,
    /// in their turn.
    fn find_lost(&mut self) {
        let bars = &self.bars;
        if self.course.has_lost(BATCH, |page| state_of(bars, page) == Some(PageState::Absent)) {
            self.leave_course();
        }
    }

    /// Enters steps until a batch of pages is wanted.
    fn look_ahead(&mut self) {
        let entered = self.course.entered_count();
        if !self.course.is_all_fetched() || entered >= AHEAD_MAX {
            return;
        }
        let limit = self.plan.as_ref().map_or(AHEAD_MAX, |plan| plan.step_count().min(AHEAD_MAX));
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

    /// `None` of a VBAR that is gone.
    fn wanted(&self, page: PageRef) -> Option<Wanted> {
        let bar = Arc::clone(self.bars.get(&page.bar)?);
        let kept = self.plan.as_ref().is_some_and(|plan| plan.keeps_throughout(page));
        let role = if kept { Role::Kept } else { Role::Streamed };
        Some(Wanted { page: PageOf { bar, page: page.page }, role })
    }
}

/// The pages that the course names as spent.
struct SpentPages<'a> {
    course: &'a mut Course,
    bars: &'a HashMap<BarId, Arc<Bar>>,
    /// Without a plan the oldest is the one that is needed first: then none is named.
    planned: bool,
    limit: Option<u64>,
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

    fn frame_limit(&self) -> Option<u64> {
        self.limit
    }
}

/// Time of a page on a link that copies a MiB in `ns_per_mib`.
fn page_ns(pager: &Pager, ns_per_mib: u64) -> u64 {
    (pager.device.options.page_size.bytes().saturating_mul(ns_per_mib) / MIB).max(1)
}

fn is_kept(plan: Option<&Plan>, page: PageRef) -> bool {
    plan.is_some_and(|plan| plan.keeps(page))
}

fn is_mapped(bars: &HashMap<BarId, Arc<Bar>>, page: PageRef) -> bool {
    state_of(bars, page).is_some_and(PageState::is_mapped)
}

/// `None` of a VBAR that is gone.
fn state_of(bars: &HashMap<BarId, Arc<Bar>>, page: PageRef) -> Option<PageState> {
    Some(bars.get(&page.bar)?.table.word(PageIndex(page.page)).state)
}

/// Whether the fault that comes for the page will say the same.
fn is_of_the_file(error: &Error) -> bool {
    use ErrorCode::{Cancelled, FileChanged, Io, TimedOut};
    matches!(error.code(), Io | FileChanged | TimedOut | Cancelled)
}
