//! How long a cycle takes in which pages are streamed ahead: one link, one GPU, so many frames.
//!
//! A model, not a measurement: each page takes the same time on the link, copies run one after
//! another in the order of their use and across the end of the cycle, a copy begins when its frame
//! is free, a step begins when its pages are there, and its frames are free when the last step of a
//! visit has ended. The same rules hold for the real engine, which has noise besides.

use std::collections::VecDeque;

use super::visits::Visit;
use super::{Cycle, Placement};

/// What one steady cycle comes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flow {
    /// Time of a cycle, in nanoseconds.
    pub cycle_ns: u64,
    /// Time for which the GPU waited for pages, of these.
    pub wait_ns: u64,
    /// Time for which the link was busy.
    pub copy_ns: u64,
    /// Pages that were copied.
    pub loads: u64,
}

/// Time on the link counts for one part in this many of time that the program waits.
const LOAD_COST: u64 = 20;
/// Time of a page on a link that is faster than it was measured, as parts of what was measured.
const FAST_LINK: (u64, u64) = (3, 4);

/// Cycles that are run; the last ones are measured.
const CYCLES: usize = 4;
/// Cycles that are measured.
const MEASURED: usize = 2;

impl Flow {
    /// What a cycle costs: its time, and a part of the time on the link, for copies that gain
    /// nothing slow down kernels and whoever else wants the link.
    fn cost(self) -> u64 {
        self.cycle_ns.saturating_add(self.copy_ns / LOAD_COST)
    }
}

/// What is known of a placement before anything is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Forecast {
    pub(super) flow: Flow,
    /// To compare placements of one cycle by: its cost as it was measured, and that with a faster
    /// link, together.
    pub(super) cost: u64,
}

/// The flow of a cycle that loads a page for each of `visits`, and its cost.
///
/// Both counts, for the two mistakes do not weigh the same. A streaming frame more than is needed
/// costs one load of all; one too few, and the link stands still in each step, by a page in those
/// of the step. When a plan is made the link was timed while files were still being read, and
/// compute while nothing ran beside it: the split must be right where they are somewhat wrong, and
/// where a frame takes a moment to change hands.
pub(super) fn forecast(cycle: &Cycle, visits: &[Visit], frames: u32) -> Option<Forecast> {
    let compute: Vec<u64> = cycle.steps.iter().map(|step| step.compute_ns).collect();
    let measured = flow(&compute, visits, frames, cycle.page_ns)?;
    let (parts, whole) = FAST_LINK;
    let page_ns = cycle.page_ns.saturating_mul(parts) / whole;
    let fast = flow_on(Link { page_ns, handing_ns: page_ns }, &compute, visits, frames)?;
    Some(Forecast { flow: measured, cost: measured.cost().saturating_add(fast.cost()) })
}

/// What copies have to reckon with.
#[derive(Clone, Copy)]
struct Link {
    /// Time of a page.
    page_ns: u64,
    /// From the end of a step to the first copy into a frame that it has set free.
    handing_ns: u64,
}

impl Placement<'_> {
    /// The flow of a steady cycle under this placement.
    #[must_use]
    pub fn flow(&self) -> Flow {
        self.forecast().flow
    }

    pub(super) fn forecast(&self) -> Forecast {
        let visits = self.ranking.streamed_visits(self.streamed);
        forecast(&self.ranking.cycle, &visits, self.streaming_frames)
            .expect("a placement has the frames that its steps need")
    }
}

/// The flow of steps that compute for `compute` nanoseconds, with one page loaded for each of
/// `visits`, which are sorted, through `frames` frames. `None` where a step needs more of them.
#[must_use]
pub fn flow(compute: &[u64], visits: &[Visit], frames: u32, page_ns: u64) -> Option<Flow> {
    flow_on(Link { page_ns, handing_ns: 0 }, compute, visits, frames)
}

fn flow_on(link: Link, compute: &[u64], visits: &[Visit], frames: u32) -> Option<Flow> {
    let steps = compute.len();
    // Frames in the order in which they become free: loads take them in the same order.
    let mut frees: VecDeque<u64> = (0..frames).map(|_| 0).collect();
    let mut ending = vec![0u32; steps * (CYCLES + 1)];
    let (mut link_ns, mut now, mut waited) = (0u64, 0u64, 0u64);
    let mut marks = Vec::new();
    for round in 0..CYCLES {
        marks.push((now, waited));
        let mut next = visits.iter().peekable();
        for (index, compute_ns) in compute.iter().enumerate() {
            let mut ready = 0;
            while let Some(visit) = next.next_if(|visit| visit.first == index) {
                // Loads run ahead as far as there are frames; there is none only if the frames of
                // this very step are not enough.
                let free = frees.pop_front()?;
                link_ns = link_ns.max(free) + link.page_ns;
                ready = link_ns;
                ending[round * steps + visit.last] += 1;
            }
            let start = now.max(ready);
            waited += start - now;
            now = start + compute_ns;
            frees.extend((0..ending[round * steps + index]).map(|_| now + link.handing_ns));
        }
    }
    let (from, waited_before) = marks[CYCLES - MEASURED];
    let loads = visits.len() as u64;
    Some(Flow {
        cycle_ns: (now - from) / MEASURED as u64,
        wait_ns: (waited - waited_before) / MEASURED as u64,
        copy_ns: loads * link.page_ns,
        loads,
    })
}
