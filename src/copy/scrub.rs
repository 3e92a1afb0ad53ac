//! Clears what files leave of a page and of a slot: [`Scrub`].
//!
//! A bound page that is not filled to its last byte keeps there what was in its frame, and a slot
//! between two tensors what was read to it before, which is copied along. Both are cleared, the
//! page on the fill stream, before its copies and behind the frame's former users.

use std::ops::Range;

use super::fill::{FillJob, Filler};
use super::span::Piece;
use crate::driver::DriverResult;
use crate::error::Result;
use crate::host::locked::LockedSlot;
use crate::options::Scrub;

impl Filler {
    /// Whether frames are cleared.
    pub(crate) fn is_scrubbing(&self) -> bool {
        self.device.options.scrub == Scrub::On
    }

    /// Clears a job's target, unless its bytes cover all of it.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) fn scrub(&self, job: &FillJob) -> Result<()> {
        if !self.is_scrubbing() || is_covered(job) {
            return Ok(());
        }
        let (address, bytes) =
            (job.base.offset(job.target.start), job.target.end - job.target.start);
        let clear = || -> DriverResult<()> {
            self.device.driver.memset_d8_async(address, 0, bytes, self.stream)
        };
        self.device.retry(clear).map_err(|error| self.device.note(error.into()))
    }

    /// Clears what is copied of a slot, up to `end`, and nothing is read to.
    pub(super) fn scrub_slot(&self, slot: &mut LockedSlot, end: usize, pieces: &[Piece]) {
        if self.is_scrubbing() {
            let places = pieces.iter().map(|piece| piece.place.clone());
            clear_between(&mut slot.bytes_mut()[..end], places);
        }
    }
}

/// Whether what is bound writes every byte of a job's target.
fn is_covered(job: &FillJob) -> bool {
    let segments = job.bound.binding().segments_of(job.target.clone());
    let end = segments.iter().try_fold(job.target.start, |reached, segment| {
        (segment.target.start <= reached).then_some(segment.target.end.max(reached))
    });
    end.is_some_and(|end| end >= job.target.end)
}

/// Clears what lies between the ranges, which are in order, within `memory`.
pub(super) fn clear_between(memory: &mut [u8], ranges: impl Iterator<Item = Range<usize>>) {
    let mut reached = 0;
    for range in ranges {
        if reached < range.start {
            memory[reached..range.start].fill(0);
        }
        reached = range.end.max(reached);
    }
    if let Some(rest) = memory.get_mut(reached..) {
        rest.fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nothing_is_read_to_is_cleared() {
        let mut memory = [7; 10];
        clear_between(&mut memory, [2..4, 4..5, 7..9].into_iter());
        assert_eq!(memory, [0, 0, 7, 7, 7, 0, 0, 7, 7, 0]);
        clear_between(&mut memory, std::iter::once(0..10));
        assert_eq!(memory[2], 7);
        clear_between(&mut memory, std::iter::empty());
        assert_eq!(memory, [0; 10]);
    }
}
