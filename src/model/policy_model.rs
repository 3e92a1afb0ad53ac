//! Policies side by side on the same cycle: what each loads, and how long it takes.
//!
//! A yardstick for the placement, for tests and for `vbar bench policy`; nothing in the library
//! decides by it. Caches that load on demand ([`Policy::Lru`], [`Policy::Fifo`]) make the GPU wait
//! for each page; placements ([`Policy::Prefix`], [`Policy::Spread`]) stream ahead, as
//! [`pipeline`](super::placement::pipeline) models it; Belady's optimum is the least that any can
//! load, with its time given as the bound that no order of copies can beat.

use std::collections::{BTreeSet, HashMap};

use crate::model::placement::pipeline::flow;
use crate::model::placement::{Cycle, CycleStep, Ranking, TooFewFrames};
use crate::model::schedule::{BarId, PageRef};

/// A way of choosing what stays.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Policy {
    /// The page that was used longest ago goes.
    Lru,
    /// The page that was loaded longest ago goes.
    Fifo,
    /// The first pages stay, the others stream through frames for two steps.
    Prefix,
    /// The library's placement.
    Spread,
    /// The page that is used again last goes: no policy loads fewer (Belady, 1966).
    Belady,
}

impl Policy {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Lru, Self::Fifo, Self::Prefix, Self::Spread, Self::Belady];

    /// Its name, in lower case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Fifo => "fifo",
            Self::Prefix => "prefix",
            Self::Spread => "spread",
            Self::Belady => "belady",
        }
    }
}

/// What one steady cycle comes to under a policy.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PolicyFlow {
    /// Pages that are loaded in it, the mean of several.
    pub loads: f64,
    /// Its time in nanoseconds.
    pub cycle_ns: f64,
    /// Frames for streaming; 0 of a policy that has none.
    pub streaming_frames: u32,
}

/// Cycles that are run, and those whose loads count: the first fill the cache, and at the end
/// Belady's optimum knows that nothing follows.
const CYCLES: usize = 6;
const MEASURED: std::ops::Range<usize> = 2..5;

/// Runs a policy over the ranked cycle with `frames` frames.
///
/// # Errors
/// One step alone needs more than `frames`.
pub fn run(policy: Policy, ranking: &Ranking, frames: u32) -> Result<PolicyFlow, TooFewFrames> {
    let needed = ranking.largest_step();
    if frames < needed {
        return Err(TooFewFrames { needed });
    }
    let cycle = ranking.cycle();
    let compute_ns = cycle.compute_ns() as f64;
    let with_loads = |loads: f64| loads * cycle.page_ns as f64;
    let demand = |cycle_ns: fn(f64, f64) -> f64| {
        let loads = loads_on_demand(policy, cycle, frames);
        let cycle_ns = cycle_ns(compute_ns, with_loads(loads));
        PolicyFlow { loads, cycle_ns, streaming_frames: 0 }
    };
    match policy {
        Policy::Lru | Policy::Fifo => Ok(demand(|compute, copies| compute + copies)),
        Policy::Belady => Ok(demand(f64::max)),
        Policy::Prefix => Ok(prefix(ranking, frames)),
        Policy::Spread => {
            let layout = ranking.lay_out(frames)?;
            let flow = layout.flow().expect("frames that suffice have a flow");
            Ok(PolicyFlow {
                loads: flow.loads as f64,
                cycle_ns: flow.cycle_ns as f64,
                streaming_frames: layout.streaming_frames(),
            })
        }
    }
}

fn prefix(ranking: &Ranking, frames: u32) -> PolicyFlow {
    let cycle = ranking.cycle();
    let all = ranking.page_count();
    let streaming_frames =
        if frames >= all { 0 } else { (ranking.largest_step() * 2).clamp(2, frames) };
    let mut first = BTreeSet::new();
    let in_order = cycle.steps.iter().flat_map(|step| &step.pages);
    for page in in_order {
        if first.len() < (frames - streaming_frames) as usize {
            first.insert(*page);
        }
    }
    let compute: Vec<u64> = cycle.steps.iter().map(|step| step.compute_ns).collect();
    let visits = ranking.visits_without(|page| first.contains(&page));
    let flow = flow(&compute, &visits, streaming_frames, cycle.page_ns)
        .expect("two steps fit, or all frames stream");
    let (loads, cycle_ns) = (flow.loads as f64, flow.cycle_ns as f64);
    PolicyFlow { loads, cycle_ns, streaming_frames }
}

/// Mean loads of a cycle.
fn loads_on_demand(policy: Policy, cycle: &Cycle, frames: u32) -> f64 {
    let mut cache = Cache::default();
    let mut next_uses = NextUses::of(cycle);
    let mut measured = 0;
    let mut now = 0u64;
    for round in 0..CYCLES {
        for step in &cycle.steps {
            for page in &step.pages {
                now += 1;
                let key = match policy {
                    Policy::Belady => u64::MAX - next_uses.after(*page),
                    Policy::Fifo => cache.key(*page).unwrap_or(now),
                    _ => now,
                };
                let loaded = cache.touch(*page, key);
                if loaded && MEASURED.contains(&round) {
                    measured += 1;
                }
                if cache.len() > frames as usize {
                    cache.evict_other_than(&step.pages);
                }
            }
        }
    }
    f64::from(measured) / MEASURED.len() as f64
}

/// Pages in the order in which they go.
#[derive(Default)]
struct Cache {
    keys: HashMap<PageRef, u64>,
    order: BTreeSet<(u64, PageRef)>,
}

impl Cache {
    fn len(&self) -> usize {
        self.keys.len()
    }

    fn key(&self, page: PageRef) -> Option<u64> {
        self.keys.get(&page).copied()
    }

    /// Whether the page was not there.
    fn touch(&mut self, page: PageRef, key: u64) -> bool {
        let old = self.keys.insert(page, key);
        if let Some(old) = old {
            self.order.remove(&(old, page));
        }
        self.order.insert((key, page));
        old.is_none()
    }

    /// The first that the step in use does not need.
    fn evict_other_than(&mut self, needed: &[PageRef]) {
        let victim = self.order.iter().find(|(_, page)| !needed.contains(page)).copied();
        if let Some(victim) = victim {
            self.order.remove(&victim);
            self.keys.remove(&victim.1);
        }
    }
}

/// When each page is used again, asked in the order of the uses.
struct NextUses {
    /// Positions in a cycle at which each page is used, and how many of them have been asked for.
    uses: HashMap<PageRef, (Vec<u64>, usize)>,
    cycle_uses: u64,
}

impl NextUses {
    fn of(cycle: &Cycle) -> Self {
        let mut uses: HashMap<PageRef, (Vec<u64>, usize)> = HashMap::new();
        let mut cycle_uses = 0;
        for page in cycle.steps.iter().flat_map(|step| &step.pages) {
            uses.entry(*page).or_default().0.push(cycle_uses);
            cycle_uses += 1;
        }
        Self { uses, cycle_uses }
    }

    /// Position of the use after the one that is now; never asked of a page without uses.
    fn after(&mut self, page: PageRef) -> u64 {
        let Some((positions, asked)) = self.uses.get_mut(&page) else { return u64::MAX };
        *asked += 1;
        let (rounds, index) = (*asked / positions.len(), *asked % positions.len());
        if rounds >= CYCLES { u64::MAX } else { rounds as u64 * self.cycle_uses + positions[index] }
    }
}

/// A cycle with a name.
#[derive(Clone, Debug)]
pub struct Workload {
    /// One word.
    pub name: &'static str,
    /// What it is.
    pub text: &'static str,
    /// The cycle.
    pub cycle: Cycle,
}

/// Cycles as programs have them, in pages of 16 MiB on a link that copies one in `page_ns`
/// nanoseconds.
#[must_use]
pub fn workloads(page_ns: u64) -> Vec<Workload> {
    let workload = |name, text, steps| Workload { name, text, cycle: Cycle { steps, page_ns } };
    let layers = |tenths: u64| layer_steps(0, &[16; 64], page_ns * tenths / 10, 0);
    let uneven = [1, 32, 2, 1, 16, 1, 1, 24, 8, 1, 4, 1, 32, 1, 12, 3];
    let uneven: Vec<u32> = (0..64).map(|index| uneven[index * 7 % 16]).collect();
    vec![
        workload("loop", "64 layers of 256 MiB, a third of their link time in compute", layers(3)),
        workload("balanced", "the same, computing as long as half of it takes to copy", layers(5)),
        workload(
            "uneven",
            "64 layers of 16 to 512 MiB, half of their link time in compute",
            layer_steps(0, &uneven, page_ns / 2, 0),
        ),
        workload(
            "workflow",
            "an encoder once, a denoiser of 40 layers for 20 passes, a decoder once",
            workflow(page_ns, 20),
        ),
        workload(
            "experts",
            "two denoisers of 40 layers for 10 passes each, between an encoder and a decoder",
            experts(page_ns, 10),
        ),
    ]
}

/// An encoder of 24 layers, a denoiser of 40 layers `passes` times, a decoder of 16 layers.
#[must_use]
pub fn workflow(page_ns: u64, passes: usize) -> Vec<CycleStep> {
    let denoiser = layer_steps(1, &[16; 40], page_ns * 3 / 4, 24);
    let mut steps = layer_steps(0, &[8; 24], page_ns / 4, 0);
    (0..passes).for_each(|_| steps.extend(denoiser.iter().cloned()));
    steps.extend(layer_steps(2, &[4; 16], page_ns * 2, 64));
    steps
}

/// An encoder of 24 layers, two denoisers of 40 layers `passes` times each, a decoder of 16 layers.
#[must_use]
pub fn experts(page_ns: u64, passes: usize) -> Vec<CycleStep> {
    let mut steps = layer_steps(0, &[8; 24], page_ns / 4, 0);
    for (bar, first_ordinal) in [(1, 24), (2, 64)] {
        let denoiser = layer_steps(bar, &[16; 40], page_ns * 3 / 4, first_ordinal);
        (0..passes).for_each(|_| steps.extend(denoiser.iter().cloned()));
    }
    steps.extend(layer_steps(3, &[4; 16], page_ns * 2, 104));
    steps
}

/// A pass over a VBAR: layers of so many pages, which compute for `page_compute_ns` each.
#[must_use]
pub fn layer_steps(
    bar: u32,
    page_counts: &[u32],
    page_compute_ns: u64,
    first_ordinal: u32,
) -> Vec<CycleStep> {
    let mut end = 0;
    let layer = |(count, ordinal): (&u32, u32)| {
        let first = end;
        end += count;
        CycleStep {
            pages: (first..end).map(|page| PageRef { bar: BarId(bar), page }).collect(),
            compute_ns: u64::from(*count) * page_compute_ns,
            class: 0,
            ordinal,
        }
    };
    page_counts.iter().zip(first_ordinal..).map(layer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const C: u64 = 1000;

    fn loads(policy: Policy, ranking: &Ranking, frames: u32) -> f64 {
        run(policy, ranking, frames).unwrap().loads
    }

    #[test]
    fn a_loop_defeats_caches_and_not_placements() {
        let ranking = Ranking::new(workloads(C)[0].cycle.clone());
        let pages = ranking.page_count();
        for frames in [100, 500, 900, 1000] {
            for policy in [Policy::Lru, Policy::Fifo] {
                assert_eq!(loads(policy, &ranking, frames), f64::from(pages));
            }
            let least = f64::from(pages - frames);
            let best = loads(Policy::Belady, &ranking, frames);
            assert!((least..=least + 17.0).contains(&best), "{frames}: {best} of {least}");
            for policy in [Policy::Prefix, Policy::Spread] {
                let flow = run(policy, &ranking, frames).unwrap();
                assert_eq!(flow.loads, least + f64::from(flow.streaming_frames));
            }
        }
        for policy in Policy::ALL {
            assert_eq!(loads(policy, &ranking, pages), 0.0, "{policy:?}");
            assert!(run(policy, &ranking, 15).is_err());
        }
    }

    /// Beyond Belady's optimum, which brings nothing ahead of its use, go the streaming frames:
    /// once in a cycle where the denoiser fits. Where it does not, each of its passes is a cycle of
    /// its own, and begins with what the one before has left in the streaming frames: that is what
    /// looking ahead costs, and no more than the optimum with so many frames fewer.
    #[test]
    fn a_workflow_loads_the_optimum_and_the_streaming_frames() {
        for passes in [1, 4, 20] {
            let ranking = Ranking::new(Cycle { steps: workflow(C, passes), page_ns: C });
            for frames in [120, 300, 500, 640, 645, 700, 800, 880] {
                let best = loads(Policy::Belady, &ranking, frames);
                let flow = run(Policy::Spread, &ranking, frames).unwrap();
                let streaming = f64::from(flow.streaming_frames);
                assert!(flow.loads >= best);
                if frames >= 640 {
                    assert!(flow.loads <= best + streaming, "{passes} {frames}: {flow:?} {best}");
                }
                let fewer = frames - flow.streaming_frames;
                let best = run(Policy::Belady, &ranking, fewer).map_or(best, |flow| flow.loads);
                assert!(flow.loads <= best + streaming, "{passes} {frames}: {flow:?} {best}");
            }
        }
    }

    /// The cycle as one sees it who has the pages of a step there while the one before computes:
    /// each step needs those of the next one, too.
    fn looking_ahead(cycle: &Cycle) -> Cycle {
        let next = cycle.steps.iter().cycle().skip(1);
        let steps = cycle.steps.iter().zip(next).map(|(step, next)| {
            let others = next.pages.iter().filter(|page| !step.pages.contains(page));
            let pages = step.pages.iter().chain(others).copied().collect();
            CycleStep { pages, ..step.clone() }
        });
        Cycle { steps: steps.collect(), page_ns: cycle.page_ns }
    }

    /// Belady's optimum brings each page at its use, when its step waits for it. A copy that is
    /// hidden behind the step before holds its frame for both, in each pass of a denoiser that does
    /// not fit: the optimum of that is the floor. Beyond it go the streaming frames where phases
    /// change, twice in a cycle, and the one that changes hands in each pass, of parts of steps
    /// that are not equal.
    #[test]
    fn a_workflow_that_does_not_fit_loads_the_optimum_of_looking_one_step_ahead() {
        for passes in [4, 20] {
            let cycle = Cycle { steps: workflow(C, passes), page_ns: C };
            let ahead = Ranking::new(looking_ahead(&cycle));
            let ranking = Ranking::new(cycle);
            for frames in [120, 224, 300, 448, 500, 600] {
                let floor = loads(Policy::Belady, &ahead, frames);
                let flow = run(Policy::Spread, &ranking, frames).unwrap();
                let streaming = f64::from(flow.streaming_frames);
                let allowed = floor + 2.0 * (streaming + passes as f64);
                assert!(flow.loads <= allowed, "{passes} {frames}: {flow:?} over {floor}");
            }
        }
    }

    #[test]
    fn experts_have_the_frames_in_turn() {
        let ranking = Ranking::new(Cycle { steps: experts(C, 10), page_ns: C });
        for frames in [640, 700, 880, 1200] {
            let best = run(Policy::Belady, &ranking, frames).unwrap();
            let flow = run(Policy::Spread, &ranking, frames).unwrap();
            let allowed = best.loads + f64::from(flow.streaming_frames);
            assert!(flow.loads <= allowed, "{frames}: {flow:?} of {best:?}");
            assert!(flow.cycle_ns <= best.cycle_ns * 1.01, "{frames}: {flow:?} of {best:?}");
            // Pages that stay throughout leave a part of each denoiser to be loaded in each pass.
            let throughout = ranking.place_best(frames).unwrap().loads();
            assert!(flow.loads * 3.0 < throughout as f64, "{frames}: {throughout}");
        }
    }

    #[test]
    fn nothing_beats_belady_and_spread_beats_the_prefix() {
        for workload in workloads(C) {
            let ranking = Ranking::new(workload.cycle.clone());
            for percent in [15, 25, 50, 75, 90] {
                let frames = ranking.page_count() * percent / 100;
                let best = run(Policy::Belady, &ranking, frames).unwrap();
                let spread = run(Policy::Spread, &ranking, frames).unwrap();
                for policy in Policy::ALL {
                    let flow = run(policy, &ranking, frames).unwrap();
                    let name = (workload.name, percent, policy);
                    assert!(flow.loads >= best.loads, "{name:?}");
                    assert!(flow.cycle_ns >= best.cycle_ns * 0.999, "{name:?}");
                    let lost = policy != Policy::Belady && flow.cycle_ns < spread.cycle_ns * 0.99;
                    assert!(!lost, "{name:?}: {flow:?} beats {spread:?}");
                }
            }
        }
    }
}
