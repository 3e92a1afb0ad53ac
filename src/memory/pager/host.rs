//! The filler and what it holds of the host's memory: made at the first binding, gone at closing.

use std::ops::Range;
use std::sync::Arc;

use super::Pager;
use crate::copy::fill::{Filler, LockedBytes};
use crate::error::Result;
use crate::memory::vbar::Bar;
use crate::options::Threads;

impl Pager {
    /// The filler, made at the first binding; the context is current.
    pub(in crate::memory) fn filler(&self) -> Result<Arc<Filler>> {
        // In this order everywhere: the threads are those that were asked for last.
        let reading = self.reading.lock();
        let mut filler = self.filler.lock();
        if let Some(filler) = &*filler {
            return Ok(Arc::clone(filler));
        }
        let made = Arc::new(Filler::new(Arc::clone(&self.device))?);
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
        let mut reading = self.reading.lock();
        *reading = threads;
        if let Some(filler) = self.made_filler() {
            filler.set_threads(threads);
        }
    }

    /// Drops pages from the page-locked cache: they stay on the device, or their VBAR is closed.
    pub fn forget_locked(&self, bar: &Bar, pages: impl Iterator<Item = u32>) {
        let Some(filler) = self.made_filler() else { return };
        for run in runs(pages) {
            filler.forget(bar.id, run);
        }
    }

    /// Gives page-locked memory back where it is time to; see [`Filler::housekeep`]. Lets go of the
    /// program's memory that nobody reads any more.
    ///
    /// # Errors
    /// As there.
    pub fn housekeep_host(&self) -> Result<()> {
        self.sweep_memory();
        self.made_filler().map_or(Ok(()), |filler| filler.housekeep())
    }

    /// Lets go of the program's memory that VBARs which are gone were bound to, and that nobody
    /// reads any more. Where the filler is being made there is none.
    pub(super) fn sweep_memory(&self) {
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

    /// Page-locked bytes that the pager holds, by what holds them.
    #[must_use]
    pub fn locked(&self) -> LockedBytes {
        self.made_filler().map_or_else(LockedBytes::default, |filler| filler.locked())
    }

    pub(super) fn made_filler(&self) -> Option<Arc<Filler>> {
        // A forked child must not wait for a lock that nobody may ever release.
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
