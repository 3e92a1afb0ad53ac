//! The distinct steps: their pages, their compute time, and how often the history has them.
//!
//! A step lives as long as the history holds it; its number is then given to another one.

use std::collections::HashMap;
use std::sync::Arc;

use super::span::Span;

/// A step by its number. Steps that are first seen one after another have numbers that follow each
/// other, until numbers are given out again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StepId(pub u32);

/// A new sample of compute time counts for one part in this many.
const SMOOTHING: u64 = 4;

#[derive(Clone, Debug)]
struct Record {
    spans: Arc<[Span]>,
    /// Smoothed; 0 before the first sample. No `Option`: the number of a `None` is never written,
    /// and optimised code adds it up before it asks whether there is one, then drops the sum. That
    /// is right, but a branch on memory that nobody wrote is what memory checkers report.
    compute_ns: u64,
    is_sampled: bool,
    /// Times that the history has it.
    held: u32,
}

/// All steps that the history has.
#[derive(Clone, Debug, Default)]
pub(super) struct StepTable {
    numbers: HashMap<Arc<[Span]>, StepId>,
    records: Vec<Option<Record>>,
    free: Vec<StepId>,
    span_count: usize,
}

impl StepTable {
    /// The number of a step. A new one must be held before the next is asked for.
    pub(super) fn intern(&mut self, spans: &[Span]) -> StepId {
        if let Some(step) = self.numbers.get(spans) {
            return *step;
        }
        let spans: Arc<[Span]> = spans.into();
        self.span_count += spans.len();
        let (compute_ns, is_sampled) = (0, false);
        let record = Record { spans: Arc::clone(&spans), compute_ns, is_sampled, held: 0 };
        let step = self.free.pop().unwrap_or_else(|| {
            self.records.push(None);
            let last = u32::try_from(self.records.len() - 1);
            StepId(last.expect("the history holds less than 2^32 steps"))
        });
        self.records[step.0 as usize] = Some(record);
        self.numbers.insert(spans, step);
        step
    }

    /// The number of a step that is known.
    pub(super) fn find(&self, spans: &[Span]) -> Option<StepId> {
        self.numbers.get(spans).copied()
    }

    /// The history has it once more.
    pub(super) fn hold(&mut self, step: StepId) {
        if let Some(record) = self.record_mut(step) {
            record.held += 1;
        }
    }

    /// The history has it once less; with the last time it is forgotten.
    pub(super) fn release(&mut self, step: StepId) {
        self.let_go(step);
        if self.record(step).is_some_and(|record| record.held == 0) {
            self.remove(step);
        }
    }

    /// The history has it once less, for the moment: [`Self::sweep`] forgets.
    pub(super) fn let_go(&mut self, step: StepId) {
        if let Some(record) = self.record_mut(step) {
            record.held -= 1;
        }
    }

    /// Forgets what the history does not have.
    pub(super) fn sweep(&mut self) {
        for number in (0u32..).zip(0..self.records.len()).map(|(number, _)| StepId(number)) {
            if self.record(number).is_some_and(|record| record.held == 0) {
                self.remove(number);
            }
        }
    }

    pub(super) fn spans(&self, step: StepId) -> &[Span] {
        self.record(step).map_or(&[], |record| &record.spans)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.records.len()
    }

    pub(super) fn span_count(&self) -> usize {
        self.span_count
    }

    pub(super) fn compute_ns(&self, step: StepId) -> Option<u64> {
        let told = self.record(step).map_or((0, false), |of| (of.compute_ns, of.is_sampled));
        let (compute_ns, is_sampled) = told;
        is_sampled.then_some(compute_ns)
    }

    pub(super) fn sample(&mut self, step: StepId, compute_ns: u64) {
        if let Some(record) = self.record_mut(step) {
            let old = record.compute_ns;
            record.compute_ns = match record.is_sampled {
                false => compute_ns,
                true => old - old / SMOOTHING + compute_ns / SMOOTHING,
            };
            record.is_sampled = true;
        }
    }

    pub(super) fn forget_samples(&mut self) {
        self.records.iter_mut().flatten().for_each(|record| {
            (record.compute_ns, record.is_sampled) = (0, false);
        });
    }

    fn record(&self, step: StepId) -> Option<&Record> {
        self.records.get(step.0 as usize)?.as_ref()
    }

    fn record_mut(&mut self, step: StepId) -> Option<&mut Record> {
        self.records.get_mut(step.0 as usize)?.as_mut()
    }

    fn remove(&mut self, step: StepId) {
        if let Some(record) = self.records[step.0 as usize].take() {
            self.span_count -= record.spans.len();
            self.numbers.remove(&record.spans);
            self.free.push(step);
        }
    }
}
