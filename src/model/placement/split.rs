//! How many of the frames are for streaming: first by the model of the pipeline, then by what the
//! passes measure.
//!
//! More streaming frames let the link run further ahead; fewer leave room for residents, so that
//! there is less to stream. [`Split`] tries a change for a few passes and keeps it only if the
//! middle one of them was the better for it. Fewer are tried only where the least of them could
//! save some hundredths of the loads: for less the bad passes of a trial are not worth it. A
//! direction that did not pay is tried again after twice as many passes, up to 64, so it settles
//! instead of swinging; and what small changes have made slower together goes back to the best that
//! was measured.

use super::phases::Layout;
use super::{Placement, Ranking, TooFewFrames};

/// Pages are kept for parts of a cycle where that saves one part in this many of its cost,
const COST_GAIN: u64 = 1000;
/// or one part in this many of its loads.
const LOADS_GAIN: u64 = 64;
/// Looks at visits that a choice of what is kept for parts of a cycle may take, whatever the cycle:
/// about a tenth of a second;
const PHASES_WORK_MAX: u64 = 1 << 20;
/// or so many at each visit, however many these are. A workflow takes two or three: a gap is one
/// between two passes or one between two phases. Thousands of passes in no order take thousands, so
/// that the plan of 100,000 steps took ten seconds and that of 262,000 a minute and a half, in
/// which nothing was fetched ahead.
const PHASES_WORK_A_VISIT: u64 = 8;
/// Passes between two trials in a direction that has not paid, at most.
const PATIENCE_MAX: u32 = 64;
/// Passes before the first trial of more frames and of fewer: the first ones still put what streams
/// into page-locked memory, and each trial costs a few passes. More are tried only where the link
/// stands still and the GPU waits: that is a choice which was wrong.
const PATIENCE_FIRST: [u32; 2] = [4, 16];
/// Fewer frames are tried where the least could save one part in this many of the time on the link.
const TRIAL_GAIN: u64 = 64;
/// Passes whose middle one counts.
const PASSES: usize = 3;

impl Ranking {
    /// The placement for `frames` frames whose split the model of the pipeline finds best: the
    /// least of the time of a cycle and a twentieth of the time on the link, and the same with a
    /// faster link. Goes through all visits a dozen times: milliseconds for a loop, tenths of a
    /// second for 100,000 visits, so not under a lock.
    ///
    /// # Errors
    /// One step alone needs more than `frames`.
    pub fn place_best(&self, frames: u32) -> Result<Placement<'_>, TooFewFrames> {
        let mut best: Option<(u64, Placement<'_>)> = None;
        let mut look = |sizes: &[u32]| {
            for size in sizes {
                let placement = self.place(frames, *size)?;
                let cost = placement.forecast().cost;
                if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                    best = Some((cost, placement));
                }
            }
            Ok(best.as_ref().map(|(_, placement)| placement.streaming_frames))
        };
        if let Some(near) = look(&self.sizes(frames)?)? {
            look(&[near.saturating_sub(1).max(1), near + 1])?;
        }
        match best {
            Some((_, placement)) => Ok(placement),
            None => self.place_ample(frames),
        }
    }

    /// Streaming frames that are worth a look; none where everything stays.
    fn sizes(&self, frames: u32) -> Result<Vec<u32>, TooFewFrames> {
        let low = self.place(frames, 1)?.streaming_frames;
        let high = self.place_ample(frames)?.streaming_frames;
        if high == 0 {
            return Ok(Vec::new());
        }
        let mut sizes: Vec<u32> = (0..=8).map(|part| low + (high - low) * part / 8).collect();
        // Uneven steps may want more than the parts of two of them.
        sizes.extend([high + high / 2, high * 2, high * 4].map(|size| size.min(frames)));
        sizes.dedup();
        Ok(sizes)
    }

    /// The layout for `frames` frames that the model of the pipeline finds best: that of
    /// [`Ranking::place_best`], unless it pays to keep pages for a part of the cycle only.
    ///
    /// # Errors
    /// One step alone needs more than `frames`.
    pub fn lay_out(&self, frames: u32) -> Result<Layout, TooFewFrames> {
        let mut best = self.place_best(frames)?.layout();
        let items = self.items();
        if best.streaming_frames() == 0 || !items.iter().any(|item| self.is_part(item)) {
            return Ok(best);
        }
        let visits = self.timetable.len() as u64;
        if self.work_of(&items) > PHASES_WORK_MAX.max(visits * PHASES_WORK_A_VISIT) {
            return Ok(best);
        }
        let flow_of = |layout: &Layout| layout.forecast().map(|of| (of.cost, of.flow.loads));
        let Some((mut least, loads)) = flow_of(&best) else { return Ok(best) };
        // What stays throughout is never fetched twice: for less than this it is left so.
        let (little, few) = (least / COST_GAIN, loads / LOADS_GAIN);
        // Each takes longer than a look at what stays throughout: not all of them.
        let sizes = self.sizes(frames)?.into_iter().step_by(2);
        for size in std::iter::once(best.streaming_frames()).chain(sizes) {
            let Ok(layout) = self.place_items(&items, frames, size) else { continue };
            let Some((phases_cost, phases_loads)) = flow_of(&layout) else { continue };
            let pays =
                best.has_phases() || phases_cost + little < least || phases_loads + few < loads;
            if phases_cost < least && pays {
                (least, best) = (phases_cost, layout);
            }
        }
        Ok(best)
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
    /// So many passes since the last trial.
    Steady(u32),
    /// A change is on trial; what was before it.
    Trying { direction: Direction, before: u32, before_ns: u64 },
}

/// Streaming frames, adjusted by measured passes.
#[derive(Clone, Debug)]
pub struct Split {
    frames: u32,
    least: u32,
    most: u32,
    /// Time of a page on the link.
    page_ns: u64,
    /// The best that was measured so far, first the model's choice: frames, and the time of a pass
    /// with them once it is known. What is slower than that by half a hundredth goes back to it.
    best: (u32, Option<u64>),
    phase: Phase,
    /// The next pass still carries the last change.
    settling: bool,
    /// Passes with the frames in use, the newest last; no more than [`PASSES`].
    recent: Vec<PassMeasured>,
    /// Passes to wait before the next trial, by direction.
    patience: [u32; 2],
}

impl Split {
    /// Begins with `frames` streaming frames, of `least` to `most`, for a link that takes `page_ns`
    /// a page.
    #[must_use]
    pub fn new(frames: u32, least: u32, most: u32, page_ns: u64) -> Self {
        let most = most.max(least);
        let frames = frames.clamp(least, most);
        let (phase, recent) = (Phase::Steady(0), Vec::new());
        let (best, patience) = ((frames, None), PATIENCE_FIRST);
        Self { frames, least, most, page_ns, best, phase, settling: true, recent, patience }
    }

    /// Streaming frames to be used now.
    #[must_use]
    pub fn frames(&self) -> u32 {
        self.frames
    }

    /// Whether these frames may be others again in a few passes.
    #[must_use]
    pub fn is_trying(&self) -> bool {
        matches!(self.phase, Phase::Trying { .. })
    }

    /// A pass has ended. Returns the streaming frames for the next.
    pub fn observe(&mut self, pass: PassMeasured) -> u32 {
        if std::mem::take(&mut self.settling) {
            return self.frames;
        }
        if self.recent.len() == PASSES {
            self.recent.remove(0);
        }
        self.recent.push(pass);
        match self.phase {
            Phase::Steady(passes) => {
                self.phase = Phase::Steady(passes.saturating_add(1));
                if self.recent.len() == PASSES {
                    self.steady(passes.saturating_add(1));
                }
            }
            Phase::Trying { direction, before, before_ns } => {
                // Two bad ones tell: the other would be lost for nothing.
                let bad = |pass: &PassMeasured| pass.pass_ns > before_ns + before_ns / 30;
                let is_bad = self.recent.iter().filter(|pass| bad(pass)).count() * 2 > PASSES;
                if self.recent.len() == PASSES || is_bad {
                    self.judge(direction, before, before_ns);
                }
            }
        }
        self.frames
    }

    /// The middle one of the passes with the frames in use: noise makes no middle of them.
    fn middle(&self) -> PassMeasured {
        let mut passes = self.recent.clone();
        passes.sort_unstable_by_key(|pass| pass.pass_ns);
        passes[passes.len() / 2]
    }

    fn steady(&mut self, passes: u32) {
        let pass = self.middle();
        match self.best {
            (frames, _) if frames == self.frames => self.best.1 = Some(pass.pass_ns),
            (frames, Some(best_ns)) if pass.pass_ns > best_ns + best_ns / 200 => {
                self.patience = [PATIENCE_MAX; 2];
                return self.change(frames, Phase::Steady(0));
            }
            _ => {}
        }
        // The GPU waits, and the link has time: it could not run far enough ahead.
        let waits = pass.wait_ns > pass.pass_ns / 100;
        let link_is_idle = pass.copy_ns < pass.pass_ns / 100 * 97;
        let mut directions = [Direction::More, Direction::Fewer].into_iter();
        let tried = directions.find(|direction| {
            let possible = match direction {
                Direction::More => waits && link_is_idle && self.frames < self.most,
                Direction::Fewer => self.frames > self.least && self.may_save(pass),
            };
            possible && passes >= self.patience[*direction as usize]
        });
        let Some(direction) = tried else { return };
        let (before, before_ns) = (self.frames, pass.pass_ns);
        let frames = match direction {
            Direction::More => before.saturating_add((before / 4).max(1)).min(self.most),
            Direction::Fewer => (before - (before / 8).max(1)).max(self.least),
        };
        self.change(frames, Phase::Trying { direction, before, before_ns });
    }

    /// Whether fewer frames could save enough to be worth trials, of which each bad pass may take a
    /// tenth longer: a frame saves one load.
    fn may_save(&self, pass: PassMeasured) -> bool {
        let saved_ns = u64::from(self.frames - self.least).saturating_mul(self.page_ns);
        saved_ns >= pass.copy_ns / TRIAL_GAIN
    }

    fn judge(&mut self, direction: Direction, before: u32, before_ns: u64) {
        let pass_ns = self.middle().pass_ns;
        let pays = match direction {
            // More loads must buy time; fewer are their own reward.
            Direction::More => pass_ns < before_ns - before_ns / 200,
            Direction::Fewer => pass_ns <= before_ns + before_ns / 1000,
        };
        let patience = &mut self.patience[direction as usize];
        if pays {
            *patience = 1;
            self.phase = Phase::Steady(0);
            // By less it may be luck, which must not make a slower choice the one to go back to.
            if self.best.1.is_none_or(|best_ns| pass_ns < best_ns - best_ns / 100) {
                self.best = (self.frames, Some(pass_ns));
            }
        } else {
            *patience = (*patience * 2).min(PATIENCE_MAX);
            self.change(before, Phase::Steady(0));
        }
    }

    fn change(&mut self, frames: u32, phase: Phase) {
        (self.frames, self.phase, self.settling) = (frames, phase, true);
        self.recent.clear();
    }
}
