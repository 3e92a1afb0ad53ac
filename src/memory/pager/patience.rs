//! How long one request waits, for what, and whom it asks.
//!
//! Holds the request's waits, one of each kind, its place in the line for frames, and what it may
//! do only once. Dropping it ends the waits and leaves the line.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::plan::Reclaiming;
use super::{Pager, Reclaim};
use crate::driver::CaptureState;
use crate::error::Result;
use crate::outcome::WaitKind;
use crate::sync::wait::Wait;

/// What one request has waited for so far, and its place in the line for frames.
pub(super) struct Patience<'a> {
    pager: &'a Pager,
    waits: HashMap<&'static str, Wait<'a>>,
    pub(super) turn: Option<u64>,
    reclaimer: Option<Arc<dyn Reclaim>>,
    recorded: Option<()>,
    context_waited: Option<()>,
    pub(super) refused_once: Option<()>,
}

impl<'a> Patience<'a> {
    pub(super) fn new(pager: &'a Pager) -> Self {
        let (waits, reclaimer) = (HashMap::new(), pager.reclaimer());
        let (turn, recorded, context_waited, refused_once) = Default::default();
        Self { pager, waits, turn, reclaimer, recorded, context_waited, refused_once }
    }

    /// Whether there is somebody to ask for frames before pages are evicted.
    pub(super) fn reclaim(&self) -> Reclaiming {
        match self.reclaimer {
            Some(_) => Reclaiming::First,
            None => Reclaiming::Done,
        }
    }

    /// Asks for frames, with no lock held, until there is nothing to give.
    pub(super) fn ask_for(&mut self, frames: u32) {
        if self.reclaimer.as_ref().is_none_or(|reclaimer| reclaimer.reclaim(frames) == 0) {
            self.reclaimer = None;
        }
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

    /// Once a request, and never while a known stream is being captured.
    pub(super) fn may_record(&mut self, capture: CaptureState) -> bool {
        capture == CaptureState::None && self.recorded.replace(()).is_none()
    }

    /// Once a request, if the options allow it, and never while a known stream is being captured.
    pub(super) fn may_wait_for_context(&mut self, capture: CaptureState) -> bool {
        capture == CaptureState::None
            && self.pager.device.may_wait_for_context()
            && self.context_waited.replace(()).is_none()
    }
}

impl Drop for Patience<'_> {
    fn drop(&mut self) {
        if let Some(turn) = self.turn {
            self.pager.state.lock().queue.retain(|waiting| *waiting != turn);
        }
    }
}
