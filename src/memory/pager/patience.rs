//! How long one request waits, for what, and whom it asks.
//!
//! Holds the request's waits, one of each kind, its place in the line for frames, and what it may
//! do only once. Dropping it ends the waits and leaves the line.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::plan::{Reclaiming, Standing};
use super::{Pager, Reclaim, Request};
use crate::driver::CaptureState;
use crate::error::{ErrorCode, Result};
use crate::outcome::{Reason, WaitKind};
use crate::process;
use crate::sync::fence::StreamSlot;
use crate::sync::wait::Wait;
use crate::units::Stream;

/// What one request has waited for so far, and its place in the line for frames.
pub(super) struct Patience<'a> {
    pager: &'a Pager,
    waits: HashMap<&'static str, Wait<'a>>,
    pub(super) turn: Option<u64>,
    reclaimer: Option<Arc<dyn Reclaim>>,
    last_resort: Option<Arc<dyn Reclaim>>,
    covered: Option<()>,
    context_waited: Option<()>,
    pub(super) refused_once: Option<()>,
}

impl<'a> Patience<'a> {
    pub(super) fn new(pager: &'a Pager) -> Self {
        let (waits, reclaimer) = (HashMap::new(), pager.reclaimer());
        let last_resort = reclaimer.clone();
        let (turn, covered, context_waited, refused_once) = Default::default();
        Self { pager, waits, turn, reclaimer, last_resort, covered, context_waited, refused_once }
    }

    /// Whether there is somebody to ask for frames before pages are evicted.
    pub(super) fn reclaim(&self) -> Reclaiming {
        match self.reclaimer {
            Some(_) => Reclaiming::First,
            None => Reclaiming::Done,
        }
    }

    /// Asks for frames, with no lock held, until there is nothing to give.
    ///
    /// # Errors
    /// What the driver says of the request's stream.
    pub(super) fn ask_for(
        &mut self,
        frames: u32,
        requests: &[Request<'_>],
        stream: Stream,
        standing: Standing,
    ) -> Result<()> {
        let Some(reclaimer) = self.reclaimer.clone() else { return Ok(()) };
        let given = if requests.iter().all(|request| request.bar.is_arena()) {
            reclaimer.reclaim_own(frames)
        } else {
            // What was freed behind the last work on this stream can be had once it is covered.
            if reclaimer.spare(Some(frames)) > 0 {
                self.cover_own(stream, standing.slot, standing.capture)?;
            }
            reclaimer.reclaim(frames)
        };
        if given == 0 {
            self.reclaimer = None;
        }
        Ok(())
    }

    /// Asks for frames that their holder would rather keep, before the request is refused; whether
    /// it is worth another plan.
    pub(super) fn ask_last(&mut self, requests: &[Request<'_>], reason: Reason) -> bool {
        let frames = requests.iter().map(|request| request.pages.end - request.pages.start).sum();
        let helps = matches!(
            reason,
            Reason::Budget
                | Reason::AllPinned
                | Reason::FencePending
                | Reason::FenceUnknown
                | Reason::DriverMemory
        );
        let given = match &self.last_resort {
            Some(reclaimer) if helps => reclaimer.reclaim_reserved(frames),
            _ => return false,
        };
        if given == 0 {
            self.last_resort = None;
        }
        given > 0
    }

    pub(super) fn pause(&mut self, kind: WaitKind) -> Result<()> {
        let pager = self.pager;
        let wait = self.waits.entry(kind.word()).or_insert_with(|| pager.device.wait(kind));
        match kind {
            WaitKind::Claim => {
                let patience = wait.check()?.min(Duration::from_millis(1));
                let mut state = pager.state.lock();
                // The claim may be over already: then the wake-up is lost, for a millisecond.
                pager.changed.wait_for(&mut state, patience);
                Ok(())
            }
            WaitKind::Frame => {
                self.turn.get_or_insert_with(|| pager.state.lock().line_up());
                wait.pause()
            }
            _ => wait.pause(),
        }
    }

    /// What no fence covers may be the caller's own earlier work: covers that. Once a request, and
    /// never while the stream is being captured; returns whether it was done.
    pub(super) fn cover_own(
        &mut self,
        stream: Stream,
        slot: Option<StreamSlot>,
        capture: CaptureState,
    ) -> Result<bool> {
        let Some(slot) = slot.filter(|_| capture == CaptureState::None) else { return Ok(false) };
        if self.covered.replace(()).is_some() {
            return Ok(false);
        }
        let device = &self.pager.device;
        let cover = || device.fences.cover_stamps(stream, slot);
        device.retry(cover).map_err(|error| device.note(error))?;
        Ok(true)
    }

    /// Finds out what no fence covers by a wait for the context, if the options allow it or
    /// [`Pager::settle_unknown`] does. Once a request; returns whether it was done.
    pub(super) fn wait_for_context(&mut self, capture: CaptureState) -> Result<bool> {
        let device = &self.pager.device;
        if self.may_wait_for_context(capture) {
            return device.context_wait().map(|()| true);
        }
        if capture != CaptureState::None || self.context_waited.replace(()).is_some() {
            return Ok(false);
        }
        self.pager.settle_unknown()
    }

    /// Once a request, if the options allow it, and never while a known stream is being captured.
    pub(super) fn may_wait_for_context(&mut self, capture: CaptureState) -> bool {
        capture == CaptureState::None
            && self.pager.device.may_wait_for_context()
            && self.context_waited.replace(()).is_none()
    }
}

impl Pager {
    /// Finds out what no fence covers by a wait for the current context, whatever the options say,
    /// where PyTorch's allocator knows that this breaks no capture. What its streams have freed or
    /// used is covered when they are used again, and one that rests keeps it from everybody.
    /// Returns whether it was done.
    ///
    /// # Errors
    /// `Cancelled`, and what the driver says.
    pub(crate) fn settle_unknown(&self) -> Result<bool> {
        let device = &self.device;
        let is_safe = !device.fences.is_capture_known()
            && self.reclaimer().is_some_and(|reclaimer| reclaimer.knows_no_capture());
        if !is_safe {
            return Ok(false);
        }
        match device.context_wait_asked() {
            Err(error) if matches!(error.code(), ErrorCode::TimedOut | ErrorCode::Unsupported) => {
                Ok(false)
            }
            waited => waited.map(|()| true),
        }
    }
}

impl Drop for Patience<'_> {
    fn drop(&mut self) {
        if let Some(turn) = self.turn
            && !process::ending()
        {
            self.pager.state.lock().queue.retain(|waiting| *waiting != turn);
        }
    }
}
