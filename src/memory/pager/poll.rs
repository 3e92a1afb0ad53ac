//! Asking the driver how much memory is free: what an automatic budget follows.
//!
//! At most once an interval, outside the lock; what it says counts only if no frame came or went
//! meanwhile.

use std::time::Instant;

use super::Pager;
use crate::error::Result;

/// When to ask the driver for its free memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::memory) enum Poll {
    /// When the interval is over.
    IfDue,
    /// Now.
    Now,
}

impl Pager {
    /// Asks the driver for its free memory if it is time to.
    pub(in crate::memory) fn poll_budget(&self, poll: Poll) -> Result<()> {
        let held_before = {
            let mut state = self.state.lock();
            let due =
                state.polled_at.is_none_or(|at| at.elapsed() >= self.device.options.poll_interval);
            if poll == Poll::IfDue && !due {
                return Ok(());
            }
            state.polled_at = Some(Instant::now());
            state.frames.held()
        };
        let memory = match self.device.retry(|| self.device.driver.mem_get_info()) {
            Ok(memory) => memory,
            // What was seen last holds until the next time.
            Err(error) if error.code.is_transient() => return Ok(()),
            Err(error) => return Err(self.device.note(error.into())),
        };
        let mut state = self.state.lock();
        // The two numbers belong together only if no frame came or went between them.
        if state.frames.held() == held_before && !state.frames.is_creating() {
            let held = u64::from(held_before) * self.page_bytes();
            state.budget.observe(held, memory.free_bytes, memory.total_bytes);
            self.update_eager(&state);
            self.trace_budget(&state);
        }
        Ok(())
    }

    /// The driver refused a frame: no more than are held now, until it is asked again.
    pub(super) fn cap_budget(&self) {
        let mut state = self.state.lock();
        let held = u64::from(state.frames.held()) * self.page_bytes();
        state.budget.refuse(held);
    }
}
