//! Frames that move rather than memory that grows.
//!
//! Free pieces may be too small where much is free in all: then a request needs fresh pages, and
//! what is free elsewhere would stay mapped for nothing. The frames of empty pages move instead, to
//! the fresh ones, in the order of the stream. A move costs calls of the driver, about 60 us a
//! page, so a loop in which each round moves some would be slower than one with a little more
//! memory: moves have to be earned by what is asked for, which work takes time to write and read.

use super::Allocator;
use super::grow::Growth;
use super::serve::Ask;
use super::sweep::Which;
use crate::driver::CaptureState;
use crate::memory::pager::GiveTo;
use crate::options::Eviction;
use crate::units::MIB;

/// Pages that are asked for in large blocks until one may move: of the usual 16 MiB the work on
/// them takes ten times as long as the move, or longer.
const PAGES_A_MOVE: u64 = 64;
/// The same at least, in bytes, for small pages.
const BYTES_A_MOVE: u64 = 256 * MIB;
/// Of the pages that are mapped, the part that may move at a time.
const MOVED_PART: u64 = 2;

/// Moves that were earned and not made.
#[derive(Debug)]
pub(super) struct Moves {
    /// In bytes that were asked for.
    earned: u64,
    /// What a move costs of them.
    price: u64,
}

impl Moves {
    pub(super) fn new(page_bytes: u64) -> Self {
        Self { earned: 0, price: (page_bytes * PAGES_A_MOVE).max(BYTES_A_MOVE) }
    }

    /// A large block of so many bytes was asked for.
    #[inline(always)]
    pub(super) fn earn(&mut self, bytes: u64) {
        self.earned = self.earned.saturating_add(bytes);
    }

    /// Of `wanted` pages, how many may move, while `mapped` pages are.
    pub(super) fn allowed(&mut self, wanted: u64, mapped: u64) -> u64 {
        self.earned = self.earned.min((mapped / MOVED_PART).saturating_mul(self.price));
        wanted.min(self.earned / self.price)
    }

    /// So many pages have moved.
    pub(super) fn spend(&mut self, pages: u64) {
        self.earned = self.earned.saturating_sub(pages.saturating_mul(self.price));
    }
}

impl Allocator {
    /// Gives frames of empty pages away, for those that a request needs: as many as are mapped
    /// beyond what was in use at a time lately, if they were earned. Nobody waits for them: only
    /// pages go whose uses are over, or come before the request on its stream.
    pub(super) fn move_frames(&self, ask: &Ask, growth: &Growth) {
        if ask.capture != CaptureState::None {
            return;
        }
        let fences = &self.pager.device.fences;
        let allowed = {
            let now = fences.now();
            let mut core = self.core.lock();
            let (used, mapped) = (core.pages.used(), core.pages.mapped());
            let spare = mapped.saturating_sub(core.pages.reserve.pages(now, used));
            core.moves.allowed(spare.min(growth.fresh_count()), mapped)
        };
        if allowed == 0 {
            return;
        }
        // What was freed last has to be recorded, for its mapping to go some day.
        self.cover(ask.stream, ask.slot);
        // Strictly, a frame's old mapping goes before the new one comes.
        let strict = self.pager.device.options.eviction == Eviction::Strict;
        let slot = if strict { None } else { Some(ask.slot) };
        let moved = self.release_empty(allowed, Which::Before(slot), GiveTo::Pages);
        self.core.lock().moves.spend(moved);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_are_earned_and_spent() {
        let mut moves = Moves::new(MIB);
        assert_eq!(moves.allowed(5, 100), 0);
        moves.earn(3 * BYTES_A_MOVE + 1);
        assert_eq!((moves.allowed(5, 100), moves.allowed(2, 100)), (3, 2));
        moves.spend(2);
        assert_eq!(moves.allowed(5, 100), 1);
        // Not more than a part of what is there, however much was asked for.
        moves.earn(u64::MAX);
        assert_eq!(moves.allowed(u64::MAX, 100), 100 / MOVED_PART);
        moves.spend(u64::MAX);
        assert_eq!(moves.allowed(1, 100), 0);
        let mut moves = Moves::new(16 * MIB);
        moves.earn(64 * 16 * MIB - 1);
        assert_eq!(moves.allowed(1, 100), 0);
        moves.earn(1);
        assert_eq!(moves.allowed(1, 100), 1);
    }
}
