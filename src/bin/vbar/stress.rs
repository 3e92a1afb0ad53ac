//! `vbar stress`: random operations by several threads, every byte and invariant checked.
//!
//! Owns the course of a run: set up, let the threads work, stop them now and then to look at the
//! invariants, heal the driver, and see that nothing is left at the end. What the threads do is in
//! `worker`, `uses`,
//! `ahead`, `saves` and `settings`; what must be true in `world`, `checks` and `invariants`.

mod ahead;
mod checks;
mod choice;
mod invariants;
mod journal;
mod report;
mod saves;
mod settings;
mod uses;
mod worker;
mod world;

use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::ProgressBar;
use parking_lot::RwLock;
use vbar::driver::select::{self, Opened, Selection};
use vbar::driver::sim::{Sim, SimOptions};
use vbar::model::synth::SyntheticModel;
use vbar::options::{Eviction, Threads};
use vbar::units::{KIB, PageSize};
use vbar::{Error, ErrorCode, Result, Runtime, RuntimeOptions};

use crate::arguments;
use crate::doctor::has_virtual_memory;
use crate::help::{DEVICES, Help};
use crate::output::{Output, Verdict};
use journal::Journal;
use report::Report;
use worker::Worker;
use world::World;

pub(crate) const HELP: Help = Help {
    examples: &[
        ("On a GPU where there is one, else simulated", "vbar stress --seconds 20"),
        (
            "The operations of a seed again, with failing driver calls",
            "vbar stress --device sim --seconds 60 --seed 7 --threads 8 --fail 0.02",
        ),
        (
            "A million operations, however long they take",
            "vbar stress --device sim --threads 8 --operations 1000000",
        ),
        ("On a GPU or not at all", "vbar stress --device cuda --json"),
    ],
    notes: &[
        "Which operations a thread makes follows from the seed; how they interleave does not, \
         unless the device is simulated with a seed of its own (sim:seed=7): what fails cannot be \
         cut down to fewer operations. Without options a \
         simulated device is small, and its new memory is not zeroed.",
        DEVICES,
    ],
    exit: &[
        (0, "everything was checked and nothing was wrong"),
        (1, "something was wrong, or nothing could be checked"),
    ],
};

/// Time between two looks at the invariants.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Pages of the budget, and as many again for each thread as its checks and pins take.
const BUDGET_PAGES: u64 = 24;
const THREAD_PAGES: u64 = 2;
/// Pages of a small simulated device, in budgets.
const CAPACITY_BUDGETS: u64 = 3;
/// The model, in parts of the budget.
const MODEL_PARTS: (u64, u64) = (4, 3);

/// Do random things to a device for a while and check everything
#[derive(Args)]
#[command(after_help = HELP.text())]
pub(crate) struct Arguments {
    /// How long, in whole seconds
    #[arg(long, value_name = "N", default_value_t = 10)]
    #[arg(value_parser = arguments::whole(0..=u64::MAX))]
    seconds: u64,
    /// End after so many operations instead, however long they take
    #[arg(long, value_name = "N", conflicts_with = "seconds")]
    #[arg(value_parser = arguments::whole(1..=u64::MAX))]
    operations: Option<u64>,
    /// Operations follow from it [default: drawn, and printed]
    #[arg(long, value_name = "S", value_parser = arguments::whole(0..=u64::MAX))]
    seed: Option<u64>,
    /// Threads that work at the same time
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = arguments::whole(1..=64u32))]
    threads: u32,
    /// auto, cuda[:index] or sim[:options]
    #[arg(long, value_parser = arguments::device, default_value = "auto")]
    device: Selection,
    /// Part of the driver's calls that fail, 0 to 1; simulated devices only
    #[arg(long, value_name = "RATE", default_value_t = 0.0, value_parser = arguments::probability)]
    fail: f64,
    /// Whether the library works on threads of its own beside them: on or off
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = arguments::threads)]
    library_threads: Threads,
}

/// Runs the command.
pub(crate) fn stress(arguments: &Arguments, output: &Output) -> Result<Verdict> {
    let seed = arguments.seed.unwrap_or_else(any_seed);
    let budget_pages = BUDGET_PAGES + THREAD_PAGES * u64::from(arguments.threads);
    let wrong = |text: &str| Err(Error::new(ErrorCode::InvalidArgument, text));
    let cannot_fail = "--fail: a real driver does not fail when it is told to; use --device sim";
    // Whether it is there or not.
    if arguments.fail > 0.0 && matches!(arguments.device, Selection::Cuda(_)) {
        return wrong(cannot_fail);
    }
    let opened = open(&arguments.device, budget_pages)?;
    if arguments.fail > 0.0 && opened.sim.is_none() {
        return wrong(cannot_fail);
    }
    if !has_virtual_memory(&*opened.driver, opened.device) {
        let text = format!(
            "device {} has no virtual memory management: nothing can be resident on it, so there \
             is nothing to check; choose another with --device",
            opened.device
        );
        return Err(Error::new(ErrorCode::Unsupported, text));
    }
    output.labelled("device", &opened.how);
    output.labelled("seed", seed.to_string());
    let start = Instant::now();
    let journal = work(arguments, &opened, budget_pages, seed, output)?;
    let report = Report::new(&opened, &journal, seed, start.elapsed());
    report.show(output);
    output.object(&report);
    Ok(Verdict::of(report.ok))
}

fn any_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(1, |since| since.as_nanos() as u64 & 0xFFFF_FFFF)
}

/// A simulated device without options is made small, so that everything is scarce on it.
fn open(selection: &Selection, budget_pages: u64) -> Result<Opened> {
    let mut opened = select::open(selection)?;
    if opened.sim.as_ref().is_some_and(|sim| *sim.options() == SimOptions::default()) {
        let granularity = 64 * KIB;
        let sim = Sim::new(SimOptions {
            capacity: CAPACITY_BUDGETS * budget_pages * granularity,
            granularity,
            poison: true,
            ..SimOptions::default()
        });
        opened.how = format!("a small simulated device, {}", sim.driver().description());
        opened.driver = sim.driver();
        opened.sim = Some(sim);
    }
    Ok(opened)
}

/// The run itself, from setting up to the last look.
fn work(
    arguments: &Arguments,
    opened: &Opened,
    budget_pages: u64,
    seed: u64,
    output: &Output,
) -> Result<Journal> {
    let granularity = opened.driver.mem_get_allocation_granularity(opened.device)?;
    let page_size = PageSize::new(granularity).ok_or_else(|| world::internal("granularity"))?;
    let options = RuntimeOptions {
        budget_bytes: Some(budget_pages * page_size.bytes()),
        headroom_bytes: Some(0),
        page_size,
        // Every fourth seed tries the mode for debugging.
        eviction: if seed % 4 == 3 { Eviction::Strict } else { Eviction::Aliasing },
        poll_interval: Duration::from_millis(1),
        heal_window: Duration::from_millis(20),
        threads: Some(arguments.library_threads),
        ..RuntimeOptions::default()
    };
    let runtime = Runtime::open(Arc::clone(&opened.driver), opened.device, options)?;
    let device = Arc::clone(runtime.device());
    let scope = device.enter()?;
    device.driver.module_load()?;
    let (parts, of) = MODEL_PARTS;
    let model = ModelFile::new(budget_pages * page_size.bytes() * parts / of, seed)?;
    let journal = Journal::new(arguments.threads as usize, arguments.fail > 0.0);
    let sim = opened.sim.clone();
    let world = World::new(runtime, sim, journal, &model.path, budget_pages, seed)?;
    let threads = 0..arguments.threads as usize;
    let workers = threads.map(|thread| Worker::new(&world, thread, seed));
    let workers: Vec<Worker<'_>> = workers.collect::<Result<_>>()?;
    if let Some(sim) = &opened.sim
        && arguments.fail > 0.0
    {
        sim.fail_rate(arguments.fail, seed);
    }
    run_threads(&world, workers, arguments, output)?;
    drop(scope);
    Ok(invariants::look_at_the_end(world, budget_pages * page_size.bytes()))
}

/// Lets the workers work as long as they are told to, then heals the device and lets them finish.
///
/// # Errors
/// `Io` where the system does not give a thread; those that there are have finished then.
fn run_threads(
    world: &World,
    workers: Vec<Worker<'_>>,
    arguments: &Arguments,
    output: &Output,
) -> Result<()> {
    let thread_count = workers.len();
    let healed = RwLock::new(());
    std::thread::scope(|scope| {
        let healing = healed.write();
        // Closed when each worker has let go of its end.
        let (working, all_stopped) = mpsc::channel::<()>();
        let spawned = workers.into_iter().try_for_each(|worker| {
            let (working, healed) = (working.clone(), &healed);
            let work = move || work_and_finish(worker, working, healed);
            std::thread::Builder::new().spawn_scoped(scope, work).map(drop)
        });
        drop(working);
        if spawned.is_ok() {
            watch(world, thread_count as u64, arguments, output);
        }
        world.journal.stop();
        while all_stopped.recv().is_ok() {}
        if let Some(sim) = &world.sim {
            sim.heal();
            sim.set_outside_bytes(world.device, 0);
        }
        drop(healing);
        spawned.map_err(|error| Error::io(format_args!("{thread_count} threads"), &error))
    })
}

/// A worker's thread. It lets go of `working` when it has stopped, and finishes once it may lock
/// `healed`.
fn work_and_finish(mut worker: Worker<'_>, working: mpsc::Sender<()>, healed: &RwLock<()>) {
    let world = worker.world;
    let device = Arc::clone(world.runtime.device());
    let entered = device.enter();
    while entered.is_ok() && !world.journal.is_stopped() {
        worker.step();
    }
    drop(working);
    drop(healed.read());
    if let Err(error) = entered.map(drop).and_then(|()| finish(worker)) {
        world.journal.violation(format!("giving everything back: {error}"));
    }
}

/// Looks at the invariants now and then, until the run is over.
fn watch(world: &World, thread_count: u64, arguments: &Arguments, output: &Output) {
    let start = Instant::now();
    let bar = if output.draws() { ProgressBar::new_spinner() } else { ProgressBar::hidden() };
    // None when it is over.
    let time_left = || match arguments.operations {
        Some(count) => (world.journal.operations() < count).then_some(LOOK_INTERVAL),
        None => Duration::from_secs(arguments.seconds).checked_sub(start.elapsed()),
    };
    while let Some(left) = time_left().filter(|_| !world.journal.is_stopped()) {
        std::thread::sleep(LOOK_INTERVAL.min(left));
        bar.set_message(format!("{} operations", world.journal.operations()));
        bar.tick();
        invariants::look(world, thread_count);
    }
    bar.finish_and_clear();
}

fn finish(worker: Worker<'_>) -> Result<()> {
    let device = Arc::clone(worker.world.runtime.device());
    let _scope = device.enter()?;
    worker.finish()
}

/// A synthetic model in the folder for temporary files, removed at the end.
struct ModelFile {
    path: PathBuf,
}

impl ModelFile {
    fn new(bytes: u64, seed: u64) -> Result<Self> {
        let name = format!("vbar-stress-{}-{seed}.safetensors", std::process::id());
        let path = std::env::temp_dir().join(name);
        SyntheticModel { total_bytes: bytes, seed, shards: 1 }.write(&path, &|_| {})?;
        // Not before: what was there and was not replaced is not removed either.
        Ok(Self { path })
    }
}

impl Drop for ModelFile {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        log::warn!("{}: {error}", path.display());
    }
}
