//! One pass: every tensor faulted in natural order, used on the compute stream, unpinned.
//!
//! Nothing is waited for until the end of the pass, so that reading, copying and computing go on
//! side by side.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vbar::counters::SourceBytes;
use vbar::trace::{self, Kind};
use vbar::{Fault, ModelBar, Result};

use super::screen::{Screen, Seen};
use super::verify::{Round, Verifier};
use crate::compute::Compute;

/// Tensors with wrong bytes that a pass names. Where all are wrong, more of them say nothing.
const NAMED_MAX: usize = 8;

/// What a pass counted.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Counted {
    pub(super) time: Duration,
    /// Faults that found every page resident.
    pub(super) resident: u64,
    /// Faults that had to fill a page.
    pub(super) refilled: u64,
    /// Faults that were refused.
    pub(super) offloaded: u64,
    /// Pages that were fetched before a fault asked for them.
    pub(super) pages_ahead: u64,
    pub(super) bytes_copied: u64,
    /// Bytes of the tensors that were resident when they were used.
    pub(super) bytes_resident: u64,
    pub(super) mismatches: u64,
    /// Where the bytes of fills came from.
    pub(super) sources: SourceBytes,
}

impl Counted {
    /// Of the faults so far, the part that found every page resident.
    pub(super) fn hit_rate(&self) -> f64 {
        let faults = self.resident + self.refilled + self.offloaded;
        self.resident as f64 / faults.max(1) as f64
    }
}

/// What every pass needs.
pub(super) struct Course<'a> {
    pub(super) bar: &'a ModelBar,
    pub(super) compute: &'a Compute,
    pub(super) screen: &'a Screen<'a>,
}

impl Course<'_> {
    /// Makes a pass; `between_halves` is called in its middle.
    pub(super) fn pass(
        &self,
        verifier: Option<&mut Verifier>,
        between_halves: impl FnOnce() -> Result<()>,
    ) -> Result<Counted> {
        let _span = trace::span(Kind::Pass).device(self.compute.device().ordinal);
        let start = Instant::now();
        let sources_before = self.sources();
        let (filled_before, ahead_before) = (self.filled_bytes(), self.pages_ahead());
        let mut counted = Counted::default();
        let mut round = verifier.map(|verifier| verifier.begin(self.compute)).transpose()?;
        let count = self.bar.model().tensors().len();
        let middle = count / 2;
        self.stretch(0..middle, round.as_mut(), &mut counted)?;
        between_halves()?;
        self.stretch(middle..count, round.as_mut(), &mut counted)?;
        match round {
            Some(round) => {
                let found = round.finish()?;
                counted.bytes_copied = found.copied_bytes;
                counted.mismatches = self.report_mismatches(&found.mismatched);
            }
            None => self.compute.synchronize()?,
        }
        counted.bytes_copied += self.filled_bytes() - filled_before;
        counted.pages_ahead = self.pages_ahead() - ahead_before;
        counted.sources = self.sources().since(sources_before);
        counted.time = start.elapsed();
        Ok(counted)
    }

    fn stretch(
        &self,
        tensors: std::ops::Range<usize>,
        mut round: Option<&mut Round<'_>>,
        counted: &mut Counted,
    ) -> Result<()> {
        for tensor in tensors {
            let misses_before = self.misses();
            match self.bar.fault(tensor, self.compute.stream)? {
                Fault::Resident(guard) | Fault::HostMapped(guard) => {
                    // This thread is the only one that faults here.
                    match self.misses() == misses_before {
                        true => counted.resident += 1,
                        false => counted.refilled += 1,
                    }
                    counted.bytes_resident += guard.bytes();
                    if let Some(round) = round.as_deref_mut() {
                        round.resident(tensor, &guard)?;
                    }
                    guard.unpin()?;
                }
                Fault::Offloaded(reason) => {
                    log::debug!("tensor {tensor} is offloaded: {reason}");
                    counted.offloaded += 1;
                    if let Some(round) = round.as_deref_mut() {
                        round.offloaded(tensor, self.bar.model())?;
                    }
                }
            }
            self.screen.step(|| Seen {
                strip: self.bar.vbar().draw(u32::MAX),
                counted: *counted,
                pages_ahead: self.pages_ahead(),
                filled_bytes: self.filled_bytes(),
            });
        }
        Ok(())
    }

    fn report_mismatches(&self, mismatched: &[usize]) -> u64 {
        for tensor in mismatched.iter().take(NAMED_MAX) {
            let name = &self.bar.model().tensors()[*tensor].name;
            self.screen.say(format!("MISMATCH tensor {name:?}: its bytes are not the file's"));
        }
        match mismatched.len().saturating_sub(NAMED_MAX) {
            0 => {}
            1 => self.screen.say("MISMATCH and 1 more tensor"),
            more => self.screen.say(format!("MISMATCH and {more} more tensors")),
        }
        mismatched.len() as u64
    }

    fn misses(&self) -> u64 {
        self.compute.device().counters.misses.load(Ordering::Relaxed)
    }

    fn pages_ahead(&self) -> u64 {
        self.compute.device().counters.pages_ahead.load(Ordering::Relaxed)
    }

    fn sources(&self) -> SourceBytes {
        self.compute.device().counters.sources.bytes()
    }

    fn filled_bytes(&self) -> u64 {
        self.compute.device().counters.bytes_filled.load(Ordering::Relaxed)
    }
}
