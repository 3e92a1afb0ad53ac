//! Every driver call of every operation fails in turn, with every kind of code: all is as before,
//! or set aside and told, and what was asked for is had once the driver works again. A code that
//! loses the device makes everything say so, and closing leaves no runtime behind.

use std::sync::Arc;

use tempfile::TempDir;
use vbar::driver::sim::{Sim, SimOptions, Verb};
use vbar::driver::{Driver, DriverCode};
use vbar::options::RuntimeOptions;
use vbar::units::Stream;
use vbar::{ErrorCode, ModelBar, Result, Runtime, Vbar};

use crate::each_call_cases::{CASES, Came, Case, Leaves, Scene};
use crate::world::{DEVICE, P, World, options};

const SIM: &str = "capacity=64M,granularity=64K,seed=5,poison=1";

const CODES: [DriverCode; 4] = [
    DriverCode::OUT_OF_MEMORY,
    DriverCode::NOT_READY,
    DriverCode::INVALID_VALUE,
    DriverCode::ILLEGAL_ADDRESS,
];

fn scene(case: &Case) -> Scene {
    let bytes = case.budget * P;
    let made = RuntimeOptions { budget_bytes: Some(bytes), ..options() };
    let world = World::with(SIM, (case.change)(made));
    world.sim.run_unhelped();
    let bars = vec![world.vbar(4), world.vbar(4)];
    let (model, allocator, blocks) = (None, None, Vec::new());
    let folder = TempDir::new().unwrap();
    let mut scene = Scene { world, bars, model, allocator, blocks, folder };
    (case.prepare)(&mut scene);
    scene.settle();
    scene
}

/// What is to be as before.
#[derive(PartialEq, Eq, Debug)]
struct Books {
    drawn: Vec<String>,
    pins: Vec<u32>,
    frames: u64,
    host_frames: u64,
    mappings: usize,
    reservations: usize,
    used: u64,
    reserved_by_torch: u64,
}

impl Scene {
    /// All work is done, and the library knows. Nothing fails here because it was told to.
    pub(crate) fn settle(&self) {
        let World { sim, runtime, .. } = &self.world;
        sim.spare(|| {
            let _ = sim.ctx_synchronize();
            let device = runtime.device();
            let _ = device.enter().and_then(|_scope| device.context_wait());
            let _ = runtime.refresh();
            let _ = runtime.refresh();
        });
    }

    fn vbars(&self) -> impl Iterator<Item = &Vbar> {
        self.bars.iter().chain(self.model.iter().map(ModelBar::vbar))
    }

    fn books(&self) -> Books {
        let World { sim, runtime, .. } = &self.world;
        let pages = || self.vbars().flat_map(|vbar| vbar.residency());
        let allocator = self.allocator.as_ref();
        Books {
            drawn: self.vbars().map(|vbar| vbar.draw(16).replace('i', "#")).collect(),
            pins: pages().map(|page| page.pins).collect(),
            frames: sim.live_frames(DEVICE),
            host_frames: sim.live_host_frames(),
            mappings: sim.live_mappings(),
            reservations: sim.live_reservations(),
            used: runtime.used_bytes(),
            reserved_by_torch: allocator.map_or(0, |it| it.statistics().reserved_bytes.all.current),
        }
    }

    /// What holds whatever failed.
    #[track_caller]
    fn check(&self, name: &str) {
        let World { sim, runtime, .. } = &self.world;
        assert_eq!(sim.violations(), Vec::<String>::new(), "{name}");
        assert!(runtime.is_valid(), "{name}: the tables contradict themselves");
        let numbers = runtime.numbers();
        let held = sim.used_bytes(DEVICE);
        let stuck = (numbers.lingering_mappings + numbers.quarantined_pages) * P;
        assert!(held >= numbers.used_bytes, "{name}: {held} {numbers:?}");
        assert!(held - numbers.used_bytes <= stuck, "{name}: {held} {numbers:?}");
        let used = numbers.used_bytes - numbers.quarantined_bytes;
        assert!(used <= numbers.budget_bytes, "{name}: {numbers:?}");
        let told = numbers.quarantined_bytes + numbers.quarantined_pages + runtime_lost(self);
        let aside = sim.struck().iter().any(|it| Verb::GIVING_BACK.contains(&it.verb));
        assert!(told == 0 || aside, "{name}: set aside out of nothing: {numbers:?}");
    }

    /// Closes everything; what is left could not be given back.
    fn shut(self, name: &str, died: bool) {
        let Self { world, bars, model, allocator, blocks, .. } = self;
        if let Some(allocator) = &allocator {
            blocks.into_iter().for_each(|block| {
                allocator.free(block);
            });
        }
        drop((bars, model, allocator));
        let World { sim, runtime, .. } = world;
        let watched = Arc::downgrade(runtime.device());
        drop(runtime);
        assert_eq!(sim.violations(), Vec::<String>::new(), "{name}");
        assert_eq!(watched.strong_count(), 0, "{name}: somebody keeps the runtime");
        if died || sim.struck().iter().any(|it| Verb::GIVING_BACK.contains(&it.verb)) {
            return;
        }
        let left = (sim.live_frames(DEVICE), sim.live_host_frames(), sim.live_mappings());
        assert_eq!(left, (0, 0, 0), "{name}");
        let left = (sim.live_reservations(), sim.live_events(), sim.locked_bytes());
        assert_eq!(left, (0, 0, 0), "{name}");
    }
}

fn runtime_lost(scene: &Scene) -> u64 {
    u64::from(scene.world.runtime.device().check().is_err())
}

/// Calls of each verb that the operation makes when nothing fails.
fn calls_of(case: &Case) -> Vec<(Verb, u64)> {
    let mut scene = scene(case);
    let calls = |scene: &Scene| -> Vec<u64> {
        Verb::ALL.iter().map(|verb| scene.world.sim.calls(*verb)).collect()
    };
    let before = calls(&scene);
    assert_eq!((case.act)(&mut scene).unwrap(), Came::Done, "{}", case.name);
    let made = calls(&scene).into_iter().zip(before).map(|(after, before)| after - before);
    let made = Verb::ALL.iter().copied().zip(made).filter(|(_, count)| *count > 0).collect();
    scene.settle();
    scene.check(case.name);
    scene.shut(case.name, false);
    made
}

fn fail_one(case: &Case, verb: Verb, nth: u64, code: DriverCode, count: u64) {
    let name = format!("{}: {verb} {nth} {code:?} x{count}", case.name);
    let mut scene = scene(case);
    let before = scene.books();
    scene.world.sim.fail(verb, nth - 1, count, code);
    let outcome = (case.act)(&mut scene);
    let struck = !scene.world.sim.struck().is_empty();
    scene.world.sim.heal();
    if code.is_sticky() {
        return check_lost(scene, struck, outcome, &name);
    }
    scene.settle();
    scene.check(&name);
    let gave_back = Verb::GIVING_BACK.contains(&verb) && struck;
    if let Err(error) = &outcome {
        assert!(struck, "{name}: an error out of nothing: {error:?}");
        let codes = [ErrorCode::Driver, ErrorCode::HostMemory, ErrorCode::Unsupported];
        assert!(codes.contains(&error.code()), "{name}: {error:?}");
    }
    if outcome != Ok(Came::Done) && case.leaves == Leaves::Before && !gave_back {
        assert_eq!(scene.books(), before, "{name}: {outcome:?}");
    }
    // And once more, with a driver that works.
    let again = (case.act)(&mut scene);
    let lost = scene.world.runtime.numbers();
    if verb == Verb::MemCreateHost && code == DriverCode::INVALID_VALUE {
        // A container forbids what the device could do: it is not asked again.
        assert!(again.is_ok(), "{name}: {again:?}");
    } else if lost.quarantined_bytes + lost.quarantined_pages == 0 {
        assert_eq!(again, Ok(Came::Done), "{name}: after {outcome:?}");
    } else {
        assert!(gave_back, "{name}");
        assert!(again.is_ok(), "{name}: {again:?}");
    }
    scene.settle();
    scene.check(&name);
    scene.shut(&name, false);
}

/// The device is lost: every call says so, and nothing keeps the runtime.
fn check_lost(scene: Scene, struck: bool, outcome: Result<Came>, name: &str) {
    if !struck {
        return scene.shut(name, false);
    }
    if let Err(error) = &outcome {
        // The reservation of a VBAR may fail with any code.
        assert_eq!(error.code(), ErrorCode::DeviceLost, "{name}: {error:?}");
    }
    for vbar in scene.vbars() {
        let answers = [
            vbar.fault(0..P, scene.world.stream).map(drop),
            vbar.fault(0..P, Stream::NONE).map(drop),
            vbar.prioritise(),
            vbar.free_memory(P).map(drop),
        ];
        let codes = answers.each_ref().map(|it| it.as_ref().err().map(|error| error.code()));
        assert_eq!(codes, [Some(ErrorCode::DeviceLost); 4], "{name}: {outcome:?}");
    }
    if let Some(allocator) = &scene.allocator {
        let refused = allocator.malloc(P as usize, scene.world.stream).unwrap_err();
        let cause = refused.cause.map(|cause| cause.code());
        assert_eq!(cause, Some(ErrorCode::DeviceLost), "{name}");
    }
    assert_eq!(scene.world.runtime.trim(0).unwrap_err().code(), ErrorCode::DeviceLost, "{name}");
    assert!(scene.world.runtime.create_bar(P).is_err(), "{name}");
    scene.shut(name, true);
}

#[test]
fn each_call_of_each_operation_may_fail() {
    let mut trials = 0;
    for case in CASES {
        for (verb, calls) in calls_of(case) {
            for nth in 1..=calls {
                for code in CODES {
                    // Once, which a retry may outlast, and for as long as it is tried.
                    for count in [1, 1000] {
                        fail_one(case, verb, nth, code, count);
                        trials += 1;
                    }
                }
            }
        }
    }
    println!("{trials} failures at every call of {} operations", CASES.len());
    assert!(trials > 1000, "{trials}");
}

/// What is left of a runtime in its process.
fn left(sim: &Sim) -> [u64; 7] {
    [
        sim.live_frames(DEVICE),
        sim.live_host_frames(),
        sim.live_mappings() as u64,
        sim.live_reservations() as u64,
        sim.live_events() as u64,
        sim.live_streams() as u64,
        sim.locked_bytes(),
    ]
}

fn calls(sim: &Sim) -> Vec<u64> {
    Verb::ALL.iter().map(|verb| sim.calls(*verb)).collect()
}

/// Every call of `act` on a scene of `make`, with every code: `after` looks at what it came to.
fn each_call_of<T>(
    make: impl Fn() -> (Arc<Sim>, T),
    act: impl Fn(&Arc<Sim>, T) -> Result<()>,
    after: impl Fn(&Arc<Sim>, Result<()>, DriverCode, &str),
) -> u64 {
    let (sim, made) = make();
    let before = calls(&sim);
    act(&sim, made).unwrap();
    let counts: Vec<_> = calls(&sim).iter().zip(before).map(|(now, then)| now - then).collect();
    let mut trials = 0;
    for (verb, count) in Verb::ALL.iter().zip(counts) {
        for nth in 1..=count {
            for code in CODES {
                let (sim, made) = make();
                sim.fail_nth(*verb, nth, code);
                let done = act(&sim, made);
                sim.heal();
                after(&sim, done, code, &format!("{verb} {nth} {code:?}"));
                assert_eq!(sim.violations(), Vec::<String>::new(), "{verb} {nth} {code:?}");
                trials += 1;
            }
        }
    }
    trials
}

fn held_sim() -> Arc<Sim> {
    let sim = Sim::new(SimOptions::parse(SIM).unwrap());
    sim.run_unhelped();
    // The program has a context of its own: what is left in it does not go with it.
    sim.device_primary_ctx_retain(DEVICE).unwrap();
    sim
}

#[test]
fn each_call_of_opening_may_fail() {
    let open = |sim: &Arc<Sim>| {
        let options = RuntimeOptions { budget_bytes: Some(4 * P), ..options() };
        Runtime::open(sim.driver(), DEVICE, options)
    };
    let trials = each_call_of(
        || (held_sim(), ()),
        |sim, ()| open(sim).map(drop),
        |sim, done, code, name| {
            if code.is_sticky() {
                return;
            }
            if done.is_ok() && !code.is_transient() {
                return;
            }
            assert_eq!(left(sim), [0; 7], "{name}: {done:?}");
            let runtime = open(sim).unwrap();
            let vbar = runtime.create_bar(2 * P).unwrap();
            assert!(vbar.fault(0..2 * P, Stream::NONE).unwrap().resident().is_some(), "{name}");
            drop((vbar, runtime));
            assert_eq!(left(sim), [0; 7], "{name}");
        },
    );
    assert!(trials > 40, "{trials}");
}

#[test]
fn each_call_of_closing_may_fail() {
    let case = Case {
        name: "closing",
        leaves: Leaves::Progress,
        budget: 16,
        change: |options| options,
        prepare: |_| {},
        act: |_| Ok(Came::Done),
    };
    let make = || {
        let mut scene = scene(&case);
        scene.world.sim.device_primary_ctx_retain(DEVICE).unwrap();
        crate::each_call_cases::fill_everything(&mut scene);
        let sim = Arc::clone(&scene.world.sim);
        let Scene { world, bars, model, allocator, folder, .. } = scene;
        let World { runtime, stream, .. } = world;
        // Pins that nobody has given back yet, and a VBAR that they keep.
        let guard = bars[0].fault(0..P, stream).unwrap().resident().unwrap();
        let token = guard.into_token();
        drop((bars, model, allocator, folder));
        (sim, (runtime, token, stream))
    };
    let trials = each_call_of(
        make,
        |_, (runtime, token, stream)| {
            let unpinned = runtime.unpin(token, stream);
            let watched = Arc::downgrade(runtime.device());
            drop(runtime);
            assert_eq!(watched.strong_count(), 0, "somebody keeps the runtime");
            unpinned
        },
        |sim, _, code, name| {
            // What fails for good may keep what it was to give back.
            if !code.is_transient() {
                return;
            }
            // The streams of the world's own are not the runtime's.
            let own = 2;
            assert_eq!(left(sim), [0, 0, 0, 0, 0, own, 0], "{name}");
        },
    );
    assert!(trials > 100, "{trials}");
}
