//! The learned order of faults of a device's bound VBARs, and what comes next.
//!
//! Pure: steps in, predictions out. A *step* is one fault: the spans of pages that it names. Every
//! step goes into a bounded history; what will follow is what followed the last time that the same
//! steps came in this order. A place in the history that is being repeated is a *thread*; of
//! several, the one that has been right for longest is believed. That makes a pass over a model
//! known when its second one begins, with no sign of where it ended, and a workflow of several
//! models (encoder, denoiser many times, decoder) when it begins again: the thread that runs
//! through the last workflow has been right since before the denoiser began, the one that runs
//! through its last pass only since then. Past the end of the history a thread goes on where it
//! began, so predictions run across passes.
//!
//! A step that was not predicted never stops the learning. If it comes a little later in the
//! prediction, the steps between were skipped; if it comes nowhere, it was put in, and the thread
//! waits for the next; a thread that waits for too long is dropped. Knows nothing of frames, and
//! of time only what [`Schedule::sample`] is told.

use std::collections::VecDeque;

mod history;
mod span;
mod steps;
mod threads;

pub use span::{BarId, PageRef, Span, join};
pub use steps::StepId;

use history::History;
use steps::StepTable;
use threads::{Outcome, Threads};

/// Steps that are remembered unless a schedule is made with another number: a workflow of 2,000
/// weights and 60 passes twice over, in 1 MiB.
pub const HISTORY_STEPS: usize = 1 << 18;
/// Spans that all remembered steps may have together, whatever their number.
pub const SPANS_MAX: usize = 1 << 20;
/// One-off wishes that are kept; past it the oldest is dropped.
pub const PREFETCHES_MAX: usize = 1024;
/// Steps in a row after which a repetition counts as one that can be planned with.
pub const CONFIRMED_STEPS: u64 = 16;
/// A prediction reaches as many times further as the steps for which it has been right.
const REACH: u64 = 4;

/// How a step stood to the prediction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Nothing was predicted.
    Unknown,
    /// It was the predicted one.
    Predicted,
    /// This many predicted steps were left out; the prediction goes on behind them.
    Skipped(u32),
    /// It was another one. What [`Schedule::upcoming`] says now follows from this step.
    Departed,
}

/// What [`Schedule::record`] says of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recorded {
    /// The step, for [`Schedule::sample`].
    pub step: StepId,
    /// How it stood to the prediction.
    pub verdict: Verdict,
}

/// A step that is to come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Upcoming<'a> {
    /// The step.
    pub step: StepId,
    /// Its pages.
    pub spans: &'a [Span],
    /// Steps from the last recorded one; 1 is the next.
    pub distance: u64,
    /// Compute time of the steps between, in nanoseconds, as far as it was sampled.
    pub starts_in_ns: u64,
}

/// The order of faults on one device. See the module's text.
#[derive(Clone, Debug)]
pub struct Schedule {
    capacity: usize,
    steps: StepTable,
    history: History,
    threads: Threads,
    prefetches: VecDeque<Span>,
    /// What the last revision was made of: a thread, and the period it had.
    planned: Option<(u64, u64)>,
    revision: u64,
    departures: u64,
    /// Reused, so that recording a known step allocates nothing.
    scratch: Vec<Span>,
}

impl Default for Schedule {
    fn default() -> Self {
        Self::new(HISTORY_STEPS)
    }
}

impl Schedule {
    /// A schedule that remembers `capacity` steps, at least two. Memory is taken as they come.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.max(2),
            steps: StepTable::default(),
            history: History::default(),
            threads: Threads::default(),
            prefetches: VecDeque::new(),
            planned: None,
            revision: 0,
            departures: 0,
            scratch: Vec::new(),
        }
    }

    /// A fault named `spans`, in this order; `None` where they have no pages. O(1) in the length of
    /// the history.
    pub fn record(&mut self, spans: &[Span]) -> Option<Recorded> {
        let step = self.intern(spans)?;
        self.prefetches.retain(|wanted| !spans.iter().any(|span| span.covers(wanted)));
        let verdict = match self.threads.advance(step, &self.history) {
            Outcome::NoThread => Verdict::Unknown,
            Outcome::Matched => Verdict::Predicted,
            Outcome::Jumped(steps) => Verdict::Skipped(steps),
            Outcome::Lost => {
                self.departures += 1;
                Verdict::Departed
            }
        };
        self.push(step);
        self.revise();
        Some(Recorded { step, verdict })
    }

    /// The program says in which order it will fault, from the next fault on and again and again.
    /// Believed until it departs from it. Steps with no pages are left out.
    pub fn hint<'a>(&mut self, order: impl IntoIterator<Item = &'a [Span]>) {
        let before = self.history.end();
        for spans in order {
            if let Some(step) = self.intern(spans) {
                self.push_quietly(step);
            }
        }
        let hinted = self.history.end() - before.max(self.history.start());
        if hinted > 0 {
            self.threads.believe(self.history.end() - hinted, hinted);
            self.revise();
        }
    }

    /// The program will want `span`, once. Past [`PREFETCHES_MAX`] the oldest wish is dropped.
    pub fn prefetch(&mut self, span: Span) {
        if span.page_count() == 0 || self.prefetches.contains(&span) {
            return;
        }
        if self.prefetches.len() == PREFETCHES_MAX {
            self.prefetches.pop_front();
        }
        self.prefetches.push_back(span);
    }

    /// The oldest wish of [`Self::prefetch`] that no fault has overtaken; it is then forgotten.
    pub fn take_prefetch(&mut self) -> Option<Span> {
        self.prefetches.pop_front()
    }

    /// The GPU took `compute_ns` nanoseconds from the wait of a fault to its unpin. Smoothed: a
    /// sample counts for a quarter. Unknown steps are ignored.
    pub fn sample(&mut self, step: StepId, compute_ns: u64) {
        self.steps.sample(step, compute_ns);
    }

    /// The GPU computes for other times than before: no step's is known.
    pub fn forget_samples(&mut self) {
        self.steps.forget_samples();
    }

    /// The step with these spans, if the history has it.
    #[must_use]
    pub fn step_of(&self, spans: &[Span]) -> Option<StepId> {
        let mut joined = Vec::new();
        span::join_all(spans, &mut joined);
        self.steps.find(&joined)
    }

    /// Compute time of a step in nanoseconds, smoothed; `None` before its first sample.
    #[must_use]
    pub fn compute_ns(&self, step: StepId) -> Option<u64> {
        self.steps.compute_ns(step)
    }

    /// The pages of a step; none of one that was forgotten.
    #[must_use]
    pub fn spans(&self, step: StepId) -> &[Span] {
        self.steps.spans(step)
    }

    /// At most `limit` steps that are predicted to follow the last recorded one, across the ends of
    /// passes. Reaches no further than the prediction is worth: four times as many steps as it has
    /// been right for, less for each that it was not.
    pub fn upcoming(&self, limit: usize) -> impl Iterator<Item = Upcoming<'_>> {
        let best = self.threads.best();
        let reach = best.map_or(0, |thread| thread.worth.saturating_mul(REACH));
        let cursor = best.map_or(0, |thread| thread.cursor);
        let period = (self.history.end() - cursor).max(1);
        let mut starts_in_ns = 0u64;
        (0..reach.min(limit as u64)).filter_map(move |ahead| {
            let step = self.history.get(cursor + ahead % period)?;
            let at = starts_in_ns;
            starts_in_ns = starts_in_ns.saturating_add(self.compute_ns(step).unwrap_or(0));
            let (spans, distance) = (self.spans(step), ahead + 1);
            Some(Upcoming { step, spans, distance, starts_in_ns: at })
        })
    }

    /// Steps for which the prediction has been right, fewer for each that it was not; 0 when there
    /// is none.
    #[must_use]
    pub fn trust(&self) -> u64 {
        self.threads.best().map_or(0, |thread| thread.worth)
    }

    /// The steps that repeat, once each time that they come: one pass over a model in a loop, the
    /// whole workflow where several take turns. Begins with the step that is predicted next; `None`
    /// until a repetition is confirmed ([`CONFIRMED_STEPS`], or all of a shorter one).
    #[must_use]
    pub fn cycle(&self) -> Option<Vec<StepId>> {
        let (_, period) = self.confirmed()?;
        let end = self.history.end();
        Some((end - period..end).filter_map(|at| self.history.get(at)).collect())
    }

    /// Changes when [`Self::cycle`] has become another one and is worth a new plan: not for a step
    /// that was skipped or put in once.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Steps that departed from a prediction so far.
    #[must_use]
    pub fn departure_count(&self) -> u64 {
        self.departures
    }

    /// Steps and spans that are remembered.
    #[must_use]
    pub fn held(&self) -> (usize, usize) {
        (self.history.len(), self.steps.span_count())
    }

    /// A bar is closed: no step with a page of it is predicted any more. Costs as much as the
    /// history is long.
    pub fn forget(&mut self, bar: BarId) {
        let kept: Vec<StepId> = self.history.iter().collect();
        self.prefetches.retain(|span| span.bar != bar);
        while let Some(step) = self.history.pop() {
            self.steps.let_go(step);
        }
        self.threads.clear();
        self.planned = None;
        for step in kept {
            if !self.spans(step).is_empty() && self.spans(step).iter().all(|span| span.bar != bar) {
                self.push(step);
            }
        }
        self.steps.sweep();
        self.revise();
    }

    fn intern(&mut self, spans: &[Span]) -> Option<StepId> {
        let mut joined = std::mem::take(&mut self.scratch);
        span::join_all(spans, &mut joined);
        let step = (!joined.is_empty()).then(|| self.steps.intern(&joined));
        self.scratch = joined;
        step
    }

    /// Puts a step into the history, and begins the threads that it suggests.
    fn push(&mut self, step: StepId) {
        let seen = self.push_quietly(step);
        self.threads.propose(seen, &self.history);
    }

    /// Puts a step into the history. Where the last ones like it were: the same step, and the same
    /// step behind the same one.
    fn push_quietly(&mut self, step: StepId) -> [Option<u64>; 2] {
        self.steps.hold(step);
        while self.history.len() >= self.capacity
            || (self.steps.span_count() > SPANS_MAX && self.history.len() > 0)
        {
            let Some(oldest) = self.history.pop() else { break };
            self.steps.release(oldest);
        }
        let seen = self.history.push(step);
        self.threads.drop_before(self.history.start());
        seen
    }

    /// The confirmed thread, by its name, and its period in steps.
    fn confirmed(&self) -> Option<(u64, u64)> {
        let best = self.threads.best()?;
        let period = self.history.end() - best.cursor;
        (best.run >= period.min(CONFIRMED_STEPS)).then_some((best.name, period))
    }

    fn revise(&mut self) {
        let Some((name, period)) = self.confirmed() else { return };
        let changed = match self.planned {
            None => true,
            Some((planned, _)) if planned != name => true,
            // Skipped or put in: only if a whole cycle has come without.
            Some((_, planned)) => {
                planned != period && self.threads.best().is_some_and(|best| best.clean >= period)
            }
        };
        if changed {
            self.planned = Some((name, period));
            self.revision += 1;
        }
    }
}

#[cfg(test)]
mod tests;
