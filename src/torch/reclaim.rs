//! Cached pages go back: to weights that need their frames, or to the driver.
//!
//! What the work of the last seconds used at a time stays mapped although it is free now
//! (`reserve`); above that cached pages go before any weight is evicted, and the rest goes before a
//! request is refused. Never a page with a live block, and none before its fences.

use super::Allocator;
use super::sweep::Which;
use crate::error::{Error, ErrorCode, Result};
use crate::memory::pager::{GiveTo, Reclaim};
use crate::outcome::WaitKind;
use crate::sync::Relaxed;

impl Reclaim for Allocator {
    fn reclaim(&self, frames: u32) -> u32 {
        if self.closed.load(Relaxed) {
            return 0;
        }
        let spare = {
            let now = self.pager.device.fences.now();
            let mut core = self.core.lock();
            let (used, mapped) = (core.pages.used(), core.pages.mapped());
            mapped.saturating_sub(core.pages.reserve.pages(now, used))
        };
        self.give_frames(spare.min(u64::from(frames)))
    }

    fn reclaim_reserved(&self, frames: u32) -> u32 {
        if self.closed.load(Relaxed) { 0 } else { self.give_frames(u64::from(frames)) }
    }

    /// PyTorch begins a pool before it captures. Without its allocator it captures unseen.
    fn knows_no_capture(&self) -> bool {
        !self.closed.load(Relaxed) && self.direct.is_none() && !self.open.any()
    }
}

impl Allocator {
    fn give_frames(&self, count: u64) -> u32 {
        if count == 0 {
            return 0;
        }
        self.poll_pending();
        let recorded = self.release_empty(count, Which::Recorded, GiveTo::Pages);
        // The frames of the others come when their stream is used again, by a fault of the pager
        // too, or after a wait for the context.
        let others = match count - recorded {
            0 => 0,
            missing => self.release_empty(missing, Which::Any, GiveTo::Pages),
        };
        (recorded + others) as u32
    }

    /// Gives up to `count` empty pages back. Returns how many went.
    pub(super) fn release_empty(&self, count: u64, which: Which, to: GiveTo) -> u64 {
        let released = self.try_release(count, which, to);
        released.unwrap_or_else(|error| {
            log::warn!("giving cached pages back: {error}");
            0
        })
    }

    fn try_release(&self, count: u64, which: Which, to: GiveTo) -> Result<u64> {
        let is_nothing = {
            let core = self.core.lock();
            core.pages.empty_count() == 0 && core.pages.used() == 0
        };
        if is_nothing {
            return Ok(0);
        }
        let mut count_taken = 0;
        let take_out = || {
            let taken = self.core.lock().take_empty(count, which, &self.pager.device.fences);
            count_taken = taken.len() as u64;
            taken
        };
        self.pager.give_back(&self.arena, take_out, to)?;
        Ok(count_taken)
    }

    /// Gives all cached pages back to the driver, and the frames that no page has. Waits for the
    /// work that used them, and where no fence tells for all work of the device, as PyTorch's own
    /// does; while a stream is being captured such pages stay.
    ///
    /// # Errors
    /// `DeviceLost`, `ProcessEnding`, `Cancelled`, and what the driver says.
    pub fn empty_cache(&self) -> Result<()> {
        let device = &self.pager.device;
        device.check()?;
        if self.closed.load(Relaxed) {
            return Ok(());
        }
        if let Some(direct) = &self.direct {
            return self.release_cached(direct);
        }
        let _scope = device.enter()?;
        self.poll_pending();
        settle_for(self.try_release(u64::MAX, Which::Recorded, GiveTo::Driver))?;
        // What an earlier call gave back and could not wait for, too.
        let (leaving, unknown) = self.pager.leaving_users();
        settle_for(device.wait_passed(&leaving, WaitKind::Release))?;
        let unsettled = unknown || {
            let core = self.core.lock();
            core.pages.empty_count() > 0
                || !core.pending.is_empty()
                || core.has_retired()
                || core.has_unsettled_chunks(&device.fences)
        };
        if unsettled && !self.open.any() {
            settle_for(device.context_wait_asked())?;
            self.poll_pending();
            settle_for(self.try_release(u64::MAX, Which::Any, GiveTo::Driver))?;
        }
        {
            let mut core = self.core.lock();
            let used = core.pages.used();
            core.pages.reserve.forget(device.fences.now(), used);
        }
        self.pager.trim(0)?;
        Ok(())
    }
}

/// What could not be waited for goes later.
fn settle_for<T: Default>(done: Result<T>) -> Result<T> {
    let later =
        |error: &Error| matches!(error.code(), ErrorCode::Unsupported | ErrorCode::TimedOut);
    match done {
        Err(error) if later(&error) => {
            log::debug!("cached pages stay until later: {error}");
            Ok(T::default())
        }
        done => done,
    }
}
