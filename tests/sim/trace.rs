//! A trace: what the world is like, then the steps. Drawn from a seed, printed, read back.

use std::fmt;
use std::str::FromStr;

use crate::lines::lines;
use crate::operations::{Mix, Operation, Random};

lines! {
    /// What the world is like. Flags are 0 or 1.
    Config {
        World "world" {
            // Of the device's interleaving.
            schedule,
            devices, budget, strict, poison, ctx_event, late_fences, no_context_waits,
            by_reader, host_mapped, engine, mappings, jitter,
            // Pages that may be page-locked, less one; staging slots, 0 for four; 0 the library's
            // choice, 1 the page cache, 2 the disk.
            allowance, slots, prefer,
            // Frames are cleared before another page has them.
            scrub
        },
    }
}

/// See the module's text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Trace {
    pub(crate) config: Config,
    pub(crate) operations: Vec<Operation>,
}

impl Trace {
    /// The trace of a seed. Seeds take turns with what is rare.
    pub(crate) fn draw(seed: u64, count: u64) -> Self {
        let mut random = Random::of(seed);
        let devices = 1 + u64::from(seed % 5 == 2);
        let models = [0, 1, 0, 2][(seed / 2 % 4) as usize];
        let torch = u64::from(seed % 3 == 1);
        let saves = u64::from(seed % 8 < 3);
        let config = Config::World {
            schedule: seed,
            devices,
            budget: 1 + random.below([8, 8, 24][(seed % 3) as usize]),
            strict: u64::from(seed.is_multiple_of(3)),
            poison: u64::from(seed % 4 == 1),
            // An older driver now and then: waits for the context are another call there.
            ctx_event: u64::from(seed % 4 != 3),
            late_fences: seed % 2,
            no_context_waits: u64::from(seed % 7 == 3),
            by_reader: random.below(2),
            host_mapped: random.below(2),
            engine: random.below(2),
            mappings: u64::from(random.below(8) == 0) * (24 + random.below(24)),
            jitter: u64::from(random.below(8) == 0),
            allowance: u64::from(random.below(4) == 0) * (random.below(24) + 1024 * saves),
            slots: random.below(4),
            prefer: random.below(3),
            scrub: u64::from(seed % 6 == 4),
        };
        let may_lose = seed % 5 == 4;
        let may_die = seed % 11 == 7;
        let mix = Mix { devices, models, torch, saves, may_lose, may_die };
        let mut operations = Vec::new();
        for device in 0..devices {
            for _ in 0..random.below(3) + 1 {
                let (pages, sizes) = (1 + random.below(6), random.below(1 << 16));
                operations.push(Operation::OpenBar { device, pages, sizes });
            }
        }
        for model in 0..models {
            operations.push(Operation::OpenModel { device: random.below(devices), model });
        }
        operations.extend((0..count).map(|_| mix.draw(&mut random)));
        Self { config, operations }
    }
}

impl Trace {
    /// The same with its failures after `nth` good calls each.
    pub(crate) fn failing_at(&self, nth: u64) -> Self {
        let moved = |operation: &Operation| match operation {
            Operation::Fail { .. } => operation.with(1, nth),
            _ => operation.clone(),
        };
        let operations = self.operations.iter().map(moved).collect();
        Self { config: self.config.clone(), operations }
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.config)?;
        self.operations.iter().try_for_each(|operation| write!(f, "\n{operation}"))
    }
}

/// Lines, or statements with semicolons between; `#` begins a remark.
impl FromStr for Trace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default());
        let mut lines = lines.flat_map(|line| line.split(';')).map(str::trim);
        let mut lines = lines.by_ref().filter(|line| !line.is_empty());
        let config = lines.next().ok_or("an empty trace")?.parse()?;
        let operations = lines.map(str::parse).collect::<Result<_, _>>()?;
        Ok(Self { config, operations })
    }
}

#[test]
fn a_trace_is_read_back_as_it_was_printed() {
    for seed in 0..200 {
        let trace = Trace::draw(seed, 60);
        assert_eq!(trace.to_string().parse::<Trace>(), Ok(trace.clone()));
        let one_line = trace.to_string().replace('\n', "; ");
        assert_eq!(one_line.parse::<Trace>(), Ok(trace));
    }
    for wrong in ["", "fault", "world schedule=x", "world x", "world y=1", "world; fault bars=1"] {
        assert!(wrong.parse::<Trace>().is_err(), "{wrong}");
    }
}

#[test]
fn seeds_draw_every_operation() {
    let mut seen: Vec<&str> = (0..2000)
        .flat_map(|seed| Trace::draw(seed, 60).operations)
        .map(|operation| operation.word())
        .collect();
    seen.sort_unstable();
    seen.dedup();
    let mut all = Operation::WORDS.to_vec();
    all.sort_unstable();
    assert_eq!(seen, all);
}
