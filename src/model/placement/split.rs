//! How many of the frames are for streaming: first by the model of the pipeline, then by what the
//! passes measure.
//!
//! More streaming frames let the link run further ahead; fewer leave room for residents, so that
//! there is less to stream. [`Split`] tries a change for one pass and keeps it only if the pass was
//! the better for it. A direction that did not pay is tried again after twice as many passes, up to
//! 64, so it settles instead of swinging.

use super::{Placement, Ranking, TooFewFrames};

/// Time on the link counts for one part in this many of time that the program waits.
const LOAD_COST: u64 = 20;
/// Passes between two trials in a direction that has not paid, at most.
const PATIENCE_MAX: u32 = 64;

impl Ranking {
    /// The placement for `frames` frames whose split the model of the pipeline finds best: the
    /// least of the time of a cycle and a twentieth of the time on the link, for copies that gain
    /// nothing slow down kernels and whoever else wants the link. Goes through all visits a dozen
    /// times: milliseconds for a loop, tenths of a second for 100,000 visits, so not under a lock.
    ///
    /// # Errors
    /// One step alone needs more than `frames`.
    pub fn place_best(&self, frames: u32) -> Result<Placement<'_>, TooFewFrames> {
        let least = self.place(frames, 1)?;
        let ample = self.place_ample(frames)?;
        let (low, high) = (least.streaming_frames, ample.streaming_frames);
        if high == 0 {
            return Ok(ample);
        }
        let mut sizes: Vec<u32> = (0..=8).map(|part| low + (high - low) * part / 8).collect();
        // Uneven steps may want more than the parts of two of them.
        sizes.extend([high + high / 2, high * 2, high * 4].map(|size| size.min(frames)));
        sizes.dedup();
        let mut best = None;
        for size in sizes {
            let placement = self.place(frames, size)?;
            let flow = placement.flow();
            let cost = (flow.cycle_ns + flow.copy_ns / LOAD_COST, placement.streaming_frames);
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                best = Some((cost, placement));
            }
        }
        Ok(best.map_or(ample, |(_, placement)| placement))
    }
}

/// What one pass, or one cycle, came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PassMeasured {
    /// Its time, in nanoseconds.
    pub pass_ns: u64,
    /// Time for which the GPU waited for pages, of these.
    pub wait_ns: u64,
    /// Time for which the link was busy.
    pub copy_ns: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    More = 0,
    Fewer = 1,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// The next pass still carries the last change.
    Settling,
    /// So many passes since the last trial.
    Steady(u32),
    /// A change is in the pass before last; what was before it.
    Trying { direction: Direction, before: u32, before_ns: u64, settled: bool },
}

/// Streaming frames, adjusted by measured passes.
#[derive(Clone, Debug)]
pub struct Split {
    frames: u32,
    least: u32,
    most: u32,
    phase: Phase,
    /// Passes to wait before the next trial, by direction.
    patience: [u32; 2],
}

impl Split {
    /// Begins with `frames` streaming frames, of `least` to `most`.
    #[must_use]
    pub fn new(frames: u32, least: u32, most: u32) -> Self {
        let most = most.max(least);
        let frames = frames.clamp(least, most);
        Self { frames, least, most, phase: Phase::Settling, patience: [1; 2] }
    }

    /// Streaming frames to be used now.
    #[must_use]
    pub fn frames(&self) -> u32 {
        self.frames
    }

    /// The budget or the cycle has changed: other bounds, and all that was tried is void.
    pub fn rebound(&mut self, least: u32, most: u32) {
        *self = Self::new(self.frames, least, most);
    }

    /// A pass has ended. Returns the streaming frames for the next.
    pub fn observe(&mut self, pass: PassMeasured) -> u32 {
        match self.phase {
            Phase::Settling => self.phase = Phase::Steady(0),
            Phase::Steady(passes) => self.steady(pass, passes + 1),
            Phase::Trying { direction, before, before_ns, settled: false } => {
                self.phase = Phase::Trying { direction, before, before_ns, settled: true };
            }
            Phase::Trying { direction, before, before_ns, settled: true } => {
                self.judge(pass, direction, before, before_ns);
            }
        }
        self.frames
    }

    fn steady(&mut self, pass: PassMeasured, passes: u32) {
        self.phase = Phase::Steady(passes);
        // The GPU waits, and the link has time: it could not run far enough ahead.
        let waits = pass.wait_ns > pass.pass_ns / 100;
        let link_is_idle = pass.copy_ns < pass.pass_ns / 100 * 97;
        let mut directions = [Direction::More, Direction::Fewer].into_iter();
        let tried = directions.find(|direction| {
            let possible = match direction {
                Direction::More => waits && link_is_idle && self.frames < self.most,
                Direction::Fewer => self.frames > self.least,
            };
            possible && passes >= self.patience[*direction as usize]
        });
        let Some(direction) = tried else { return };
        let (before, before_ns) = (self.frames, pass.pass_ns);
        self.frames = match direction {
            Direction::More => before.saturating_add((before / 4).max(1)).min(self.most),
            Direction::Fewer => (before - (before / 8).max(1)).max(self.least),
        };
        self.phase = Phase::Trying { direction, before, before_ns, settled: false };
    }

    fn judge(&mut self, pass: PassMeasured, direction: Direction, before: u32, before_ns: u64) {
        let pays = match direction {
            // More loads must buy time; fewer are their own reward.
            Direction::More => pass.pass_ns < before_ns - before_ns / 200,
            Direction::Fewer => pass.pass_ns <= before_ns + before_ns / 1000,
        };
        let patience = &mut self.patience[direction as usize];
        if pays {
            *patience = 1;
            self.phase = Phase::Steady(0);
        } else {
            *patience = (*patience * 2).min(PATIENCE_MAX);
            self.frames = before;
            self.phase = Phase::Settling;
        }
    }
}
