//! What a program can tell the streaming engine: the order of its faults, and single wishes.
//!
//! Advice only: it brings pages in earlier and never makes a fault fail. Without threads
//! ([`Threads::On`](crate::options::Threads)) there is no engine, and nothing comes of it.

use std::ops::Range;

use super::{ModelBar, Runtime, Vbar};
use crate::copy::engine::EngineNumbers;
use crate::error::{Error, ErrorCode, Result};
use crate::model::placement::PassMeasured;
use crate::model::schedule::{BarId, HISTORY_STEPS, Span};

/// Most steps, and most ranges of all steps together, of a hint: what is remembered of an order.
pub const HINT_RANGES_MAX: usize = HISTORY_STEPS;

/// Whether a hint is of a length that is remembered.
///
/// # Errors
/// `InvalidArgument`.
pub(crate) fn check_hint(steps: usize, ranges: usize) -> Result<()> {
    if steps.max(ranges) > HINT_RANGES_MAX {
        let text = format!(
            "a hint of {steps} steps with {ranges} ranges: at most {HINT_RANGES_MAX} are remembered"
        );
        return Err(Error::new(ErrorCode::InvalidArgument, text));
    }
    Ok(())
}

impl Runtime {
    /// Says in which order the program will fault: each step is what one fault, or one
    /// `fault_many`, makes resident together, in bytes of bound VBARs; behind the last step comes
    /// the first again. It is believed until the program does something else. Not needed: an order
    /// is learned from its first pass.
    ///
    /// # Errors
    /// `InvalidArgument` for a range outside its VBAR, a VBAR that is not bound, or one of another
    /// runtime, and for more than [`HINT_RANGES_MAX`] ranges; `Closed`.
    pub fn schedule_hint(&self, steps: &[Vec<(&Vbar, Range<u64>)>]) -> Result<()> {
        check_hint(steps.len(), steps.iter().map(Vec::len).sum())?;
        let mut order = Vec::with_capacity(steps.len());
        for step in steps {
            let spans = step.iter().map(|(vbar, bytes)| self.span_of(vbar, bytes));
            order.push(spans.collect::<Result<Vec<Span>>>()?);
        }
        self.inner.engine.hint(order);
        Ok(())
    }

    fn span_of(&self, vbar: &Vbar, bytes: &Range<u64>) -> Result<Span> {
        if !std::sync::Arc::ptr_eq(&vbar.runtime().inner, &self.inner) {
            return Err(Error::new(ErrorCode::InvalidArgument, "a VBAR of another runtime"));
        }
        vbar.bar().check_open()?;
        if vbar.bar().bound().is_none() {
            let text = "only a bound VBAR can be filled ahead of need";
            return Err(Error::new(ErrorCode::InvalidArgument, text));
        }
        Ok(Span::new(BarId(vbar.bar().id), vbar.bar().pages_of(bytes)?))
    }

    /// What the streaming engine knows and does; all 0 without threads.
    #[must_use]
    pub fn engine_numbers(&self) -> EngineNumbers {
        self.inner.engine.numbers()
    }

    /// Lets the streaming engine take notes without a thread; see [`Runtime::drive_engine`].
    #[doc(hidden)]
    pub fn open_engine_by_hand(&self) {
        self.inner.engine.open_by_hand();
    }

    /// Lets the streaming engine do on this thread what there is to do: for tests that say when.
    ///
    /// # Errors
    /// `DeviceLost`, `ProcessEnding`.
    #[doc(hidden)]
    pub fn drive_engine(&self) -> Result<()> {
        self.inner.engine.drive(self.pager())
    }
}

impl Runtime {
    /// Tells an engine that is driven by hand what a cycle came to; it has no clock.
    #[doc(hidden)]
    pub fn tell_engine_cycle(&self, pass: PassMeasured) {
        self.inner.engine.tell_cycle(self.pager(), pass);
    }
}

impl ModelBar {
    /// Tells an engine that is driven by hand how long the device computes on a tensor.
    ///
    /// # Errors
    /// `Closed`.
    #[doc(hidden)]
    pub fn tell_engine_compute(&self, tensor: usize, compute_ns: u64) -> Result<()> {
        let runtime = self.vbar().runtime();
        let span = runtime.span_of(self.vbar(), &self.range(tensor))?;
        runtime.inner.engine.tell_compute(vec![span], compute_ns);
        Ok(())
    }
}

impl Vbar {
    /// Says that a byte range of a bound VBAR will be wanted soon, once. It is brought in as far as
    /// there are frames that nothing needs earlier.
    ///
    /// # Errors
    /// `InvalidArgument` for a range outside the VBAR, or a VBAR that is not bound; `Closed`.
    pub fn prefetch(&self, bytes: Range<u64>) -> Result<()> {
        let span = self.runtime().span_of(self, &bytes)?;
        self.runtime().inner.engine.prefetch(span);
        Ok(())
    }
}

impl ModelBar {
    /// Says that a tensor will be wanted soon; see [`Vbar::prefetch`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// For an index that the model does not have.
    pub fn prefetch(&self, tensor: usize) -> Result<()> {
        self.vbar().prefetch(self.range(tensor))
    }

    /// Says in which order the program will fault the model's tensors, one by one; see
    /// [`Runtime::schedule_hint`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// For an index that the model does not have.
    pub fn schedule_hint(&self, order: &[usize]) -> Result<()> {
        check_hint(order.len(), order.len())?;
        let steps: Vec<_> =
            order.iter().map(|tensor| vec![(self.vbar(), self.range(*tensor))]).collect();
        self.vbar().runtime().schedule_hint(&steps)
    }
}
