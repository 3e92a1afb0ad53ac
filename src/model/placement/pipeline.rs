//! How long a cycle takes in which pages are streamed ahead: one link, one GPU, so many frames.
//!
//! A model, not a measurement: each page takes the same time on the link, copies run one after
//! another in the order of their use and across the end of the cycle, a copy begins when its frame
//! is free, a step begins when its pages are there, and its frames are free when the last step of a
//! visit has ended. The same rules hold for the real engine, which has noise besides.

use std::collections::VecDeque;

use super::Placement;
use super::visits::Visit;

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

/// Cycles that are run; the last ones are measured.
const CYCLES: usize = 4;
/// Cycles that are measured.
const MEASURED: usize = 2;

impl Placement<'_> {
    /// The flow of a steady cycle under this placement.
    #[must_use]
    pub fn flow(&self) -> Flow {
        let cycle = &self.ranking.cycle;
        let compute: Vec<u64> = cycle.steps.iter().map(|step| step.compute_ns).collect();
        let visits = self.ranking.streamed_visits(self.streamed);
        flow(&compute, &visits, self.streaming_frames, cycle.page_ns)
            .expect("a placement has the frames that its steps need")
    }
}

/// The flow of steps that compute for `compute` nanoseconds, with one page loaded for each of
/// `visits`, which are sorted, through `frames` frames. `None` where a step needs more of them.
#[must_use]
pub fn flow(compute: &[u64], visits: &[Visit], frames: u32, page_ns: u64) -> Option<Flow> {
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
                link_ns = link_ns.max(free) + page_ns;
                ready = link_ns;
                ending[round * steps + visit.last] += 1;
            }
            let start = now.max(ready);
            waited += start - now;
            now = start + compute_ns;
            frees.extend((0..ending[round * steps + index]).map(|_| now));
        }
    }
    let (from, waited_before) = marks[CYCLES - MEASURED];
    let loads = visits.len() as u64;
    Some(Flow {
        cycle_ns: (now - from) / MEASURED as u64,
        wait_ns: (waited - waited_before) / MEASURED as u64,
        copy_ns: loads * page_ns,
        loads,
    })
}
