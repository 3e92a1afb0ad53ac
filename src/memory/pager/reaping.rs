//! Which old mappings a request removes before it plans, and which it leaves for later.

use super::Pager;
use super::state::{Lingering, LingeringFrame};
use crate::error::Result;

/// Which mappings that outlasted their pages are removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reaping {
    /// Those whose frames come free with them. Old mappings of frames that have moved can wait for
    /// whoever needs their addresses.
    Frames,
    All,
}

impl Pager {
    /// As [`Pager::reap`], of [`Reaping::Frames`] unless no frame can come of it. Returns what was
    /// done: `All` also where there was nothing to do.
    pub(super) fn reap_for(&self, reaping: Reaping) -> Result<Reaping> {
        let can_wait = reaping == Reaping::Frames && {
            let state = self.state.lock();
            let moved = |entry: &Lingering| entry.frame == LingeringFrame::Moved;
            state.closing == 0 && !state.lingering.is_empty() && state.lingering.iter().all(moved)
        };
        if can_wait { Ok(Reaping::Frames) } else { self.reap().map(|()| Reaping::All) }
    }
}
