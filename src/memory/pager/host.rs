//! The filler and what it holds of the host's memory: made at the first binding, gone at closing.

use std::ops::Range;
use std::sync::Arc;

use super::Pager;
use super::claim::Taken;
use super::host_mapped::take_page;
use super::plan::{Blocked, Usable, take_pages};
use super::state::Destination;
use crate::copy::fill::{Filler, LockedBytes};
use crate::error::Result;
use crate::memory::page_table::PageState;
use crate::memory::vbar::Bar;
use crate::model::placement::PassMeasured;
use crate::options::Threads;
use crate::process;
use crate::units::PageIndex;

impl Pager {
    /// The filler, made at the first binding; the context is current.
    pub(crate) fn filler(&self) -> Result<Arc<Filler>> {
        // In this order everywhere: the threads are those that were asked for last.
        let reading = self.reading.lock();
        let mut filler = self.filler.lock();
        if let Some(filler) = &*filler {
            return Ok(Arc::clone(filler));
        }
        let made =
            Arc::new(Filler::with_room(Arc::clone(&self.device), Arc::clone(&self.host.room))?);
        made.set_threads(*reading);
        *filler = Some(Arc::clone(&made));
        Ok(made)
    }

    /// Makes the staging ring and the fill stream ready, before work that they would stop.
    ///
    /// # Errors
    /// `HostMemory`, or what the driver says.
    pub fn prepare_filler(&self) -> Result<()> {
        let made = self.device.enter().and_then(|_scope| self.filler());
        made.map(drop).map_err(|error| self.told(error, "staging ring and fill stream"))
    }

    /// Starts or ends the threads that read files.
    pub fn set_readers(&self, threads: Threads) {
        if process::ending() {
            return;
        }
        let mut reading = self.reading.lock();
        *reading = threads;
        if let Some(filler) = self.made_filler() {
            filler.set_threads(threads);
        }
    }

    /// Drops pages from the page-locked cache: they stay on the device.
    pub fn forget_locked(&self, bar: &Bar, pages: impl Iterator<Item = u32>) {
        let Some(filler) = self.made_filler() else { return };
        for run in runs(pages) {
            filler.forget(bar.id, run);
        }
    }

    /// As [`Pager::forget_locked`], of all pages of a VBAR: one range, however many there are.
    pub(super) fn forget_all_locked(&self, bar: &Bar) {
        if let Some(filler) = self.made_filler() {
            filler.forget(bar.id, 0..bar.table.page_count());
        }
    }

    /// A pass of the program has ended: what it did not stream is not needed in page-locked memory.
    /// See [`Filler::note_pass_end`].
    pub fn note_pass_end(&self, pass: Option<PassMeasured>) {
        self.made_filler().iter().for_each(|filler| filler.note_pass_end(pass));
    }

    /// So many pages stream a cycle by the plan in force; see [`Filler::pace`].
    pub fn pace(&self, pages: u64) {
        self.made_filler().iter().for_each(|filler| filler.pace(pages));
    }

    /// See [`Filler::forget_times`].
    pub fn forget_times(&self) {
        self.made_filler().iter().for_each(|filler| filler.forget_times());
    }

    /// Gives page-locked memory back where it is time to; see [`Filler::housekeep`]. Lets go of the
    /// program's memory that nobody reads any more.
    ///
    /// # Errors
    /// As there.
    pub fn housekeep_host(&self) -> Result<()> {
        self.sweep_memory();
        let Some(filler) = self.made_filler() else { return Ok(()) };
        let kept = filler.housekeep();
        let stale = filler.take_stale();
        if !stale.is_empty() {
            let left = self.evict_stale(stale);
            filler.put_stale(left);
        }
        kept
    }

    /// Takes pages off the device whose bytes are not their file's any more: the next fault finds
    /// that out and says so. Returns those that are in use.
    fn evict_stale(&self, stale: Vec<(u32, u32)>) -> Vec<(u32, u32)> {
        let Ok(_scope) = self.device.enter() else { return stale };
        let (mut blocked, mut left) = (Blocked::default(), Vec::new());
        let (mut taken, mut hosted) = (Taken::new(), Taken::new());
        let mut state = self.state.lock();
        for (number, page) in stale {
            let Some(bar) = state.bars.get(&number).map(|entry| Arc::clone(&entry.bar)) else {
                continue;
            };
            let before = taken.len() + hosted.len();
            let (index, usable) = (PageIndex(page), Usable::Recorded);
            match bar.table.page(index).word().state {
                PageState::HostMapped => {
                    hosted.extend(take_page(&mut state, &self.device, &bar, index, usable));
                }
                PageState::Issued | PageState::Resident => {
                    let page = std::iter::once(page);
                    taken.extend(take_pages(&self.device, &bar, page, 1, usable, &mut blocked));
                }
                // On its way to be one of these.
                PageState::Claimed => {}
                _ => continue,
            }
            if taken.len() + hosted.len() == before {
                left.push((number, page));
            }
        }
        self.note_taken(&mut state, &taken);
        drop(state);
        self.part_or_linger(taken, Destination::FreeList);
        self.part_with_hosted(hosted);
        left
    }

    /// Lets go of the program's memory that VBARs which are gone were bound to, and that nobody
    /// reads any more. Where the filler is being made there is none.
    pub(super) fn sweep_memory(&self) {
        if process::ending() {
            return;
        }
        let filler = self.filler.try_lock().and_then(|filler| filler.clone());
        if let Some(filler) = filler {
            filler.sweep();
        }
    }

    /// Gives page-locked memory back until at most `keep_bytes` are held, or what is left is in
    /// use. Returns the bytes given back. Waits for the device.
    ///
    /// # Errors
    /// `DeviceLost`, `ProcessEnding`, and what the driver says.
    pub fn trim_host(&self, keep_bytes: u64) -> Result<u64> {
        self.device.check()?;
        self.made_filler().map_or(Ok(0), |filler| filler.trim_host(keep_bytes))
    }

    /// Page-locked bytes that the pager holds, by what holds them. None in a forked child.
    #[must_use]
    pub fn locked(&self) -> LockedBytes {
        self.made_filler().map_or_else(LockedBytes::default, |filler| filler.locked())
    }

    pub(super) fn made_filler(&self) -> Option<Arc<Filler>> {
        // Not even tried in a forked child: to give a lock back may wait for ever there.
        if process::ending() {
            return None;
        }
        // It may be in the making, which takes its time.
        self.filler.try_lock_for(std::time::Duration::from_millis(50))?.clone()
    }
}

/// Numbers as ranges, neighbours together; they need not be in order.
fn runs(numbers: impl Iterator<Item = u32>) -> Vec<Range<u32>> {
    let mut runs: Vec<Range<u32>> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some(run) if run.end == number => run.end += 1,
            _ => runs.push(number..number + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_run() {
        assert_eq!(runs([3, 4, 5, 9, 7, 8].into_iter()), [3..6, 9..10, 7..9]);
        assert_eq!(runs(std::iter::empty()), []);
    }
}
