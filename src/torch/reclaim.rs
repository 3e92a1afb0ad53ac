//! Cached pages go back: to weights that need their frames, or to the driver.
//!
//! What comes to be in use again and again stays mapped although it is free now (`reserve`); above
//! that cached pages go before any weight is evicted, and the rest goes before a request is
//! refused. Never a page with a live block, and none before its fences.

use super::Allocator;
use super::graph::Yields;
use super::sweep::Which;
use crate::error::{Error, ErrorCode, Result};
use crate::memory::pager::{GiveTo, Reclaim};
use crate::outcome::WaitKind;
use crate::sync::Relaxed;

/// Who asks for frames.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asks {
    /// A fault or a fetch of weights, or a budget that shrinks.
    Weights,
    /// A request of the allocator's own.
    Own,
}

impl Reclaim for Allocator {
    fn reclaim(&self, frames: u32) -> u32 {
        self.give_spare(frames, Asks::Weights)
    }

    fn reclaim_own(&self, frames: u32) -> u32 {
        self.give_spare(frames, Asks::Own)
    }

    fn spare(&self, of: Option<u32>) -> u32 {
        if self.closed.load(Relaxed) || self.direct.is_some() {
            return 0;
        }
        self.spare_pages(of, Asks::Weights) as u32
    }

    fn reclaim_reserved(&self, frames: u32) -> u32 {
        if self.closed.load(Relaxed) || frames == 0 {
            return 0;
        }
        self.yield_graphs(Yields::Closed);
        let given = self.give_recorded(u64::from(frames));
        given + self.give_others(u64::from(frames) - u64::from(given))
    }

    /// PyTorch begins a pool before it captures. Without its allocator it captures unseen.
    fn knows_no_capture(&self) -> bool {
        !self.closed.load(Relaxed) && self.direct.is_none() && !self.open.any()
    }
}

impl Allocator {
    /// Pages that are mapped beyond what is kept from whoever asks, for so many.
    fn spare_pages(&self, asked: Option<u32>, asks: Asks) -> u64 {
        let (now, budget) = (self.pager.device.fences.now(), self.pager.budget_pages());
        let asked = asked.map(u64::from);
        let mut core = self.core.lock();
        if asked.is_some_and(|asked| asked > 0) {
            core.yield_graphs(match asks {
                Asks::Weights => Yields::Idle(now),
                Asks::Own => Yields::Closed,
            });
        }
        let (used, mapped) = (core.pages.used(), core.pages.mapped());
        match asks {
            Asks::Own => {
                let spare = mapped.saturating_sub(core.pages.reserve.pages(now, used));
                spare.min(asked.unwrap_or(u64::MAX))
            }
            Asks::Weights => core.pages.reserve.for_weights(now, (used, mapped), budget, asked),
        }
    }

    fn give_spare(&self, frames: u32, asks: Asks) -> u32 {
        if self.closed.load(Relaxed) || frames == 0 {
            return 0;
        }
        let spare = self.spare_pages(Some(frames), asks);
        if spare == 0 {
            return 0;
        }
        let given = self.give_recorded(spare);
        let others = self.give_others(spare - u64::from(given));
        match asks {
            // What cannot be had at once is not asked for twice: it comes to the next who asks.
            Asks::Weights => given,
            Asks::Own => given + others,
        }
    }

    /// Gives pages whose frames can be had, at once or in the order of streams.
    fn give_recorded(&self, count: u64) -> u32 {
        self.poll_pending();
        self.release_empty(count, Which::Recorded, GiveTo::Pages) as u32
    }

    /// Gives pages whose frames come when their stream is used again, by a fault of the pager too,
    /// or after a wait for the context.
    fn give_others(&self, count: u64) -> u32 {
        if count == 0 { 0 } else { self.release_empty(count, Which::Any, GiveTo::Pages) as u32 }
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
        self.yield_graphs(Yields::Closed);
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
