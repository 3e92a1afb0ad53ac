//! Policy, budget and placement: every case of up to three VBARs and four pages, beside what a
//! straightforward reading of the rules gives.

use std::collections::BTreeSet;
use std::time::Duration;

use vbar::memory::budget::{Budget, BudgetSource};
use vbar::memory::policy::{Healing, Rank};
use vbar::model::placement::{Cycle, CycleStep, Ranking, TooFewFrames};
use vbar::model::schedule::{BarId, PageRef};
use vbar::options::RuntimeOptions;
use vbar::{Fault, Reason, Vbar};

use crate::world::{P, ROOMY, World, budget_options, drawn};

/// Every sequence of `length` numbers below `end`.
fn sequences(end: usize, length: u32) -> impl Iterator<Item = Vec<usize>> {
    (0..end.pow(length)).map(move |mut number| {
        (0..length)
            .map(|_| {
                let digit = number % end;
                number /= end;
                digit
            })
            .collect()
    })
}

/// A bare VBAR as the rules have it.
struct Bar {
    class: i32,
    recency: usize,
    watermark: u64,
    resident: BTreeSet<u64>,
}

/// Pages of the three VBARs.
const PAGES: [u64; 3] = [2, 1, 1];

/// The rules, read straightforwardly: who is asked for a page takes a free frame, else the highest
/// page of whoever ranks lowest below itself, whose watermark sinks to it; its own VBAR's last.
fn fault(bars: &mut [Bar], budget: u64, bar: usize, page: u64) -> Result<(), Reason> {
    if bars[bar].resident.contains(&page) {
        return Ok(());
    }
    if page >= bars[bar].watermark {
        return Err(Reason::AboveWatermark);
    }
    if budget == 0 {
        return Err(Reason::TooLarge);
    }
    if bars.iter().map(|bar| bar.resident.len() as u64).sum::<u64>() == budget {
        let rank = |bar: &Bar| (bar.class, bar.recency);
        let own = rank(&bars[bar]);
        let below = bars.iter_mut().filter(|other| rank(other) < own && !other.resident.is_empty());
        let lowest = below.min_by_key(|other| rank(other)).map(|other| (other, 0));
        let (from, above) = match lowest {
            Some(lowest) => lowest,
            // Within a VBAR lower addresses rank higher.
            None => (&mut bars[bar], page),
        };
        let victim = from.resident.last().copied().filter(|last| *last >= above);
        let victim = victim.ok_or(Reason::Budget)?;
        from.resident.remove(&victim);
        from.watermark = from.watermark.min(victim);
    }
    bars[bar].resident.insert(page);
    Ok(())
}

fn draw(bars: &[Bar]) -> Vec<String> {
    let draw = |(bar, pages): (&Bar, u64)| {
        (0..pages).map(|page| if bar.resident.contains(&page) { '#' } else { '.' }).collect()
    };
    bars.iter().zip(PAGES).map(draw).collect()
}

/// A page of a VBAR by its number among all four, or a VBAR to be prioritised.
fn check_sequence(world: &World, classes: &[usize], budget: u64, sequence: &[usize]) {
    let vbars: Vec<Vbar> = PAGES.iter().map(|pages| world.vbar(*pages)).collect();
    let mut bars = Vec::new();
    for (index, (vbar, class)) in vbars.iter().zip(classes).enumerate() {
        vbar.set_class(*class as i32).unwrap();
        let (class, watermark) = (*class as i32, PAGES[index]);
        bars.push(Bar { class, recency: index, watermark, resident: BTreeSet::new() });
    }
    for (turn, step) in sequence.iter().enumerate() {
        let name = format!("classes {classes:?}, budget {budget}, {sequence:?} at {turn}");
        match step {
            0..4 => {
                let (bar, page) = [(0, 0), (0, 1), (1, 0), (2, 0)][*step];
                let expected = fault(&mut bars, budget, bar, page);
                let outcome = vbars[bar].fault(page * P..(page + 1) * P, world.stream).unwrap();
                let found = match outcome {
                    Fault::Resident(_) | Fault::HostMapped(_) => Ok(()),
                    Fault::Offloaded(refusal) => Err(refusal.reason),
                };
                assert_eq!(found, expected, "{name}");
            }
            _ => {
                let bar = step - 4;
                vbars[bar].prioritise().unwrap();
                (bars[bar].recency, bars[bar].watermark) = (10 + turn, PAGES[bar]);
            }
        }
        let found: Vec<String> =
            vbars.iter().map(|vbar| drawn(vbar, 4).replace('!', ".")).collect();
        assert_eq!(found, draw(&bars), "{name}");
    }
    vbars.into_iter().for_each(|vbar| vbar.destroy_wait().unwrap());
}

#[test]
fn every_order_of_faults_of_three_vbars_evicts_as_the_rules_say() {
    for budget in 0..=4 {
        let options = RuntimeOptions {
            // A watermark that heals is another matter: see below.
            heal_window: Duration::from_secs(3600),
            ..budget_options(budget)
        };
        let world = World::with(&format!("{ROOMY},seed=1"), options);
        for classes in sequences(2, 3) {
            for length in 1..=4 {
                for sequence in sequences(7, length) {
                    // Longer ones only where they begin with what comes first: the rest is alike.
                    if length == 4 && sequence[0] != 1 && sequence[0] != 3 {
                        continue;
                    }
                    check_sequence(&world, &classes, budget, &sequence);
                }
            }
        }
        world.check();
        world.check_shut();
    }
}

#[test]
fn ranks_sort_by_class_then_recency() {
    for numbers in sequences(3, 6) {
        let bars: Vec<(i32, i64)> =
            numbers.chunks(2).map(|pair| (pair[0] as i32, pair[1] as i64)).collect();
        let ranks = bars.iter().zip(0..);
        let mut ranks: Vec<Rank> = ranks
            .map(|((class, recency), bar)| Rank { class: *class, recency: *recency, bar })
            .collect();
        ranks.sort();
        for pair in ranks.windows(2) {
            let key = |rank: &Rank| (rank.class, rank.recency, rank.bar);
            assert!(key(&pair[0]) < key(&pair[1]), "{pair:?}");
        }
    }
}

/// What heals, from all that was seen: the smallest surplus of a whole window without pressure.
struct Seen {
    window: u64,
    surpluses: Vec<(u64, u32)>,
    healed: Option<u64>,
}

impl Seen {
    fn observe(&mut self, now: u64, surplus: u32) -> u32 {
        if surplus == 0 {
            self.surpluses.clear();
            return 0;
        }
        self.surpluses.push((now, surplus));
        if now - self.surpluses[0].0 < self.window {
            return 0;
        }
        let smallest = self.surpluses.iter().map(|(_, surplus)| *surplus).min();
        self.surpluses.clear();
        self.healed = Some(now);
        smallest.expect("one was pushed")
    }

    fn evicted(&mut self, now: u64) {
        self.surpluses.clear();
        if self.healed.take().is_some_and(|healed| now - healed < 2 * self.window) {
            self.window = (2 * self.window).min(64 * 100);
        }
    }
}

#[test]
fn a_watermark_heals_as_the_rules_say_whatever_was_seen() {
    for sequence in sequences(8, 6) {
        let mut healing = Healing::new(Duration::from_millis(100));
        let mut seen = Seen { window: 100, surpluses: Vec::new(), healed: None };
        let mut now = 0;
        for step in &sequence {
            now += [50, 120][step / 4];
            let at = Duration::from_millis(now);
            match step % 4 {
                3 => {
                    healing.evicted(at);
                    seen.evicted(now);
                }
                surplus => {
                    let surplus = surplus as u32;
                    let risen = healing.observe(at, surplus);
                    assert_eq!(risen, seen.observe(now, surplus), "{sequence:?} at {now}");
                }
            }
        }
    }
}

/// What a budget was told, one thing after another.
#[derive(Clone, Copy, Debug)]
enum Told {
    Observed { held: u64, free: u64 },
    Refused(u64),
    Limit(Option<u64>),
    Headroom(u64),
}

const TOTAL: u64 = 6;

/// The rules, over all that was told; in pages. Jitter is 0.
fn allowed(told: &[Told]) -> u64 {
    let (mut limit, mut headroom) = (None, 0);
    let (mut automatic, mut refused, mut shrunk) = (u64::MAX, u64::MAX, u64::MAX);
    let mut observed = None;
    for told in told {
        match *told {
            Told::Limit(pages) => limit = pages,
            Told::Headroom(pages) => (headroom, shrunk) = (pages, u64::MAX),
            Told::Refused(held) => refused = held,
            Told::Observed { held, free } => {
                (observed, refused) = (Some(held + free), u64::MAX);
                let may_hold = (held + free).saturating_sub(headroom);
                // Halfway to all of the device will do where twice the headroom cannot be.
                let enough = (2 * headroom * P).min(headroom * P + (TOTAL - headroom) * P / 2);
                if may_hold < held {
                    shrunk = may_hold;
                } else if free * P >= enough {
                    shrunk = u64::MAX;
                }
            }
        }
        automatic = observed.map_or(u64::MAX, |pages: u64| pages.saturating_sub(headroom));
    }
    limit.unwrap_or(u64::MAX).min(automatic).min(refused).min(shrunk)
}

#[test]
fn a_budget_is_what_the_rules_say_whatever_was_told() {
    let mut all = vec![Told::Limit(None)];
    all.extend((0..=4).step_by(2).map(|pages| Told::Limit(Some(pages))));
    all.extend((0..=3).map(Told::Headroom));
    all.extend((0..=4).map(Told::Refused));
    for held in 0..=4 {
        all.extend((0..=4).map(|free| Told::Observed { held, free }));
    }
    for length in 1..=3 {
        for sequence in sequences(all.len(), length) {
            let told: Vec<Told> = sequence.iter().map(|index| all[*index]).collect();
            let mut budget = Budget::new(None, 0, P, 0);
            for told in &told {
                match *told {
                    Told::Limit(pages) => budget.set_limit(pages.map(|pages| pages * P)),
                    Told::Headroom(pages) => budget.set_headroom(pages * P),
                    Told::Refused(held) => budget.refuse(held * P),
                    Told::Observed { held, free } => budget.observe(held * P, free * P, TOTAL * P),
                }
            }
            let (bytes, source) = budget.allowed();
            let expected = allowed(&told);
            let expected = expected.checked_mul(P).unwrap_or(u64::MAX / P * P);
            assert_eq!(bytes, expected, "{told:?}");
            let is_limit = matches!(source, BudgetSource::Limit);
            assert!(budget.limit() != Some(bytes) || is_limit, "{told:?}: {source:?}");
        }
    }
}

/// Pages of a step, by the bits of a number.
fn pages_of(bits: usize, bars: &[u32; 4]) -> Vec<PageRef> {
    let page = |index: usize| PageRef { bar: BarId(bars[index]), page: index as u32 };
    (0..4).filter(|index| bits & 1 << index != 0).map(page).collect()
}

/// How often a page is loaded a cycle when it is streamed: as often as a run of steps that have it
/// begins, once where all have it.
fn loads(cycle: &Cycle, page: PageRef) -> u32 {
    let has: Vec<bool> = cycle.steps.iter().map(|step| step.pages.contains(&page)).collect();
    let begins = (0..has.len()).filter(|at| has[*at] && !has[(at + has.len() - 1) % has.len()]);
    let count = begins.count() as u32;
    if count == 0 { u32::from(has.contains(&true)) } else { count }
}

fn check_cycle(cycle: Cycle, classes: [i32; 3]) {
    let pages: BTreeSet<PageRef> = cycle.steps.iter().flat_map(|step| step.pages.clone()).collect();
    let largest = cycle.steps.iter().map(|step| step.pages.len()).max().unwrap_or(0) as u32;
    let ranking = Ranking::new(cycle.clone());
    assert_eq!(ranking.page_count() as usize, pages.len());
    for page in &pages {
        assert_eq!(ranking.loads_of(*page), loads(&cycle, *page), "{page:?} of {cycle:?}");
    }
    let mut before: Option<BTreeSet<PageRef>> = None;
    for frames in 0..=5 {
        let name = format!("{frames} frames, {cycle:?}");
        let placed = ranking.place_ample(frames);
        if (frames as usize) < pages.len() && largest > frames {
            assert_eq!(placed.unwrap_err(), TooFewFrames { needed: largest }, "{name}");
            continue;
        }
        let placement = placed.unwrap();
        let residents: BTreeSet<PageRef> = placement.residents().iter().copied().collect();
        let streamed: BTreeSet<PageRef> = placement.streamed().iter().copied().collect();
        assert_eq!(&residents | &streamed, pages, "{name}");
        assert!(residents.is_disjoint(&streamed), "{name}");
        assert!(residents.len() as u32 + placement.streaming_frames() <= frames, "{name}");
        assert_eq!(streamed.is_empty(), frames as usize >= pages.len(), "{name}");
        // What is in use at a time fits the frames that are shared.
        for step in &cycle.steps {
            let used = step.pages.iter().filter(|page| streamed.contains(page)).count();
            assert!(used as u32 <= placement.streaming_frames(), "{name}");
        }
        let sum: u64 = streamed.iter().map(|page| u64::from(loads(&cycle, *page))).sum();
        assert_eq!(placement.loads(), sum, "{name}");
        // Classes stay before others, and within one what costs more loads.
        let key = |page: &PageRef| (classes[page.bar.0 as usize], loads(&cycle, *page));
        if let (Some(kept), Some(given)) =
            (residents.iter().map(key).min(), streamed.iter().map(key).max())
        {
            assert!(given <= kept, "{name}: {residents:?}, and {streamed:?} is streamed");
        }
        // With as many frames for streaming, one frame more keeps one page more.
        let Ok(placement) = ranking.place(frames, largest) else { continue };
        let residents: BTreeSet<PageRef> = placement.residents().iter().copied().collect();
        if let Some(before) = before.replace(residents.clone()) {
            assert!(before.is_subset(&residents), "{name}");
        }
    }
}

#[test]
fn every_cycle_of_four_pages_is_placed_as_the_rules_say() {
    let layouts = [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 2]];
    for bars in layouts {
        for classes in [[0, 0, 0], [0, 1, 0], [1, 0, 0]] {
            for length in 1..=3 {
                for sequence in sequences(15, length) {
                    let step = |(ordinal, bits): (usize, &usize)| {
                        let pages = pages_of(bits + 1, &bars);
                        let class = pages.iter().map(|page| classes[page.bar.0 as usize]).max();
                        let (class, ordinal) = (class.unwrap_or(0), ordinal as u32);
                        CycleStep { pages, compute_ns: 1000, class, ordinal }
                    };
                    // A step has one class: of several the largest, which its pages take on.
                    let steps: Vec<CycleStep> = sequence.iter().enumerate().map(step).collect();
                    let mixed = |step: &CycleStep| {
                        step.pages.iter().any(|page| classes[page.bar.0 as usize] != step.class)
                    };
                    if steps.iter().any(mixed) {
                        continue;
                    }
                    check_cycle(Cycle { steps, page_ns: 1000 }, classes);
                }
            }
        }
    }
}
