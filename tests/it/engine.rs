//! The streaming engine: what it brings in before it is asked for, and that nothing is wrong with
//! the bytes whatever the program does.

use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;
use vbar::driver::Driver;
use vbar::model::synth::{synthesize, tensor_seed};
use vbar::options::{Eviction, Threads};
use vbar::sync::fence::Cover;
use vbar::units::DeviceAddress;
use vbar::{ErrorCode, Fault, ModelBar, RuntimeOptions};

use crate::world::{P, ROOMY, World, budget_options, pattern_sum};

const SEED: u64 = 5;

/// Models on one device, and the engine driven by hand.
pub(crate) struct Bench {
    pub(crate) world: World,
    pub(crate) bars: Vec<ModelBar>,
    target: DeviceAddress,
    expected: u64,
    _folder: TempDir,
}

impl Bench {
    /// A model for each number of pages.
    pub(crate) fn new(pages: &[u64], options: RuntimeOptions) -> Self {
        Self::on(ROOMY, pages, options)
    }

    /// The same on another simulated device.
    pub(crate) fn on(sim: &str, pages: &[u64], options: RuntimeOptions) -> Self {
        let folder = TempDir::new().unwrap();
        let world = World::with(sim, options);
        if world.runtime.threads() == Threads::Off {
            world.runtime.open_engine_by_hand();
        }
        let open = |(number, pages): (usize, &u64)| {
            let path = folder.path().join(format!("{number}.safetensors"));
            synthesize(&path, pages * P, SEED).unwrap();
            open_model(&world, &path)
        };
        let bars = pages.iter().enumerate().map(open).collect();
        let target = world.scratch();
        Self { world, bars, target, expected: 0, _folder: folder }
    }

    /// Uses one tensor, and lets the engine work afterwards.
    #[track_caller]
    pub(crate) fn touch(&mut self, bar: usize, tensor: usize) {
        let model = &self.bars[bar];
        match model.fault(tensor, self.world.stream).unwrap() {
            Fault::Resident(guard) | Fault::HostMapped(guard) => {
                let delay = Duration::from_micros(20);
                let (address, bytes) = (guard.address(), guard.bytes());
                self.world.sum(address, bytes, self.target, delay, self.world.stream);
            }
            Fault::Offloaded(reason) => panic!("tensor {tensor} is offloaded: {reason}"),
        }
        let told = &model.model().tensors()[tensor];
        let sum = pattern_sum(told.bytes, tensor_seed(SEED, &told.name));
        self.expected = self.expected.wrapping_add(sum);
        if self.world.runtime.threads() == Threads::Off {
            // What the engine can do depends on what the device has done.
            self.world.sim.stream_synchronize(self.world.stream).unwrap();
            self.world.runtime.drive_engine().unwrap();
        }
    }

    #[track_caller]
    pub(crate) fn pass(&mut self, bar: usize) {
        (0..self.bars[bar].model().tensors().len()).for_each(|tensor| self.touch(bar, tensor));
    }

    pub(crate) fn misses(&self) -> u64 {
        self.world.runtime.statistics().misses
    }

    pub(crate) fn mapped(&self) -> u64 {
        self.world.runtime.statistics().pages_mapped
    }

    /// All bytes so far were right, and nothing was broken.
    #[track_caller]
    pub(crate) fn check(&self) {
        assert_eq!(self.world.word(self.target, self.world.stream), self.expected);
        self.world.check();
    }

    #[track_caller]
    pub(crate) fn check_shut(self) {
        self.check();
        let Self { world, bars, .. } = self;
        drop(bars);
        world.check_shut();
    }
}

fn open_model(world: &World, path: &Path) -> ModelBar {
    world.runtime.open_model(path).unwrap()
}

#[test]
fn after_two_passes_nothing_is_missed_and_no_more_is_loaded_than_must_be() {
    let mut bench = Bench::new(&[64], budget_options(32));
    for _ in 0..3 {
        bench.pass(0);
    }
    let pages = bench.bars[0].vbar().bytes() / P;
    for pass in 3..7 {
        let (misses, mapped) = (bench.misses(), bench.mapped());
        bench.pass(0);
        let loads = bench.mapped() - mapped;
        assert_eq!(
            bench.misses() - misses,
            0,
            "pass {pass}: {:?}",
            bench.world.runtime.engine_numbers()
        );
        assert!(loads <= pages - 32 + 12, "pass {pass}: {loads} loads of {pages} pages");
    }
    bench.check_shut();
}

#[test]
fn models_that_take_turns_are_learned_as_one_workflow() {
    let mut bench = Bench::new(&[16, 40, 12], budget_options(36));
    let workflow = |bench: &mut Bench| {
        bench.pass(0);
        (0..6).for_each(|_| bench.pass(1));
        bench.pass(2);
    };
    for _ in 0..3 {
        workflow(&mut bench);
    }
    let (misses, mapped) = (bench.misses(), bench.mapped());
    workflow(&mut bench);
    let numbers = bench.world.runtime.engine_numbers();
    assert_eq!(bench.misses() - misses, 0, "{numbers:?}");
    // The denoiser's 40 pages six times through what is left, encoder and decoder once.
    let loads = bench.mapped() - mapped;
    assert!(loads <= 6 * (40 - 36 + 12) + 28, "{loads} loads, {numbers:?}");
    bench.check_shut();
}

#[test]
fn a_changed_order_is_learned_anew_without_a_wrong_byte() {
    let mut bench = Bench::new(&[48], budget_options(24));
    let count = bench.bars[0].model().tensors().len();
    for _ in 0..3 {
        bench.pass(0);
    }
    for _ in 0..3 {
        (0..count).rev().for_each(|tensor| bench.touch(0, tensor));
    }
    let misses = bench.misses();
    (0..count).rev().for_each(|tensor| bench.touch(0, tensor));
    assert_eq!(bench.misses() - misses, 0, "{:?}", bench.world.runtime.engine_numbers());
    // Conditional layers, then a start in the middle.
    for pass in 0..4 {
        (0..count).filter(|tensor| tensor % 5 != pass).for_each(|tensor| bench.touch(0, tensor));
    }
    (count / 2..count).for_each(|tensor| bench.touch(0, tensor));
    bench.pass(0);
    bench.check_shut();
}

#[test]
fn the_plan_follows_the_budget_down_and_up() {
    let mut bench = Bench::new(&[64], budget_options(40));
    for _ in 0..3 {
        bench.pass(0);
    }
    for pages in [20, 32, 12, 40] {
        bench.world.runtime.set_budget(Some(pages * P)).unwrap();
        bench.world.sim.stream_synchronize(bench.world.stream).unwrap();
        bench.world.runtime.refresh().unwrap();
        bench.world.runtime.drive_engine().unwrap();
        assert!(bench.world.used() <= pages);
        for _ in 0..2 {
            bench.pass(0);
        }
        let (misses, mapped) = (bench.misses(), bench.mapped());
        bench.pass(0);
        let numbers = bench.world.runtime.engine_numbers();
        assert_eq!(bench.misses() - misses, 0, "{pages} pages: {numbers:?}");
        let all = bench.bars[0].vbar().bytes() / P;
        let loads = bench.mapped() - mapped;
        assert!(loads <= all - pages + 12, "{pages} pages: {loads} loads, {numbers:?}");
        assert!(bench.world.used() <= pages);
    }
    bench.check_shut();
}

#[test]
fn when_everything_fits_the_engine_has_nothing_to_do() {
    let mut bench = Bench::new(&[16], budget_options(40));
    for _ in 0..4 {
        bench.pass(0);
    }
    let numbers = bench.world.runtime.engine_numbers();
    assert_eq!((numbers.trust, numbers.plans), (0, 0));
    // It shrinks, and grows again so that all of it fits.
    bench.world.runtime.set_budget(Some(8 * P)).unwrap();
    (0..4).for_each(|_| bench.pass(0));
    bench.world.runtime.set_budget(Some(40 * P)).unwrap();
    (0..2).for_each(|_| bench.pass(0));
    let mapped = bench.mapped();
    (0..2).for_each(|_| bench.pass(0));
    assert_eq!(bench.mapped(), mapped);
    bench.check_shut();
}

#[test]
fn a_model_that_is_closed_is_forgotten() {
    let mut bench = Bench::new(&[24, 24], budget_options(18));
    for _ in 0..3 {
        bench.pass(0);
        bench.pass(1);
    }
    drop(bench.bars.remove(0));
    bench.world.runtime.drive_engine().unwrap();
    (0..3).for_each(|_| bench.pass(0));
    let misses = bench.misses();
    bench.pass(0);
    assert_eq!(bench.misses() - misses, 0);
    bench.check_shut();
}

#[test]
fn with_a_thread_of_its_own_no_byte_is_wrong() {
    let options = RuntimeOptions { threads: Some(Threads::On), ..budget_options(24) };
    for eviction in [Eviction::Aliasing, Eviction::Strict] {
        let mut bench = Bench::new(&[48, 12], RuntimeOptions { eviction, ..options.clone() });
        for round in 0..6u64 {
            bench.pass(0);
            bench.pass(1);
            let budget = if round % 2 == 0 { 16 } else { 24 };
            bench.world.runtime.set_budget(Some(budget * P)).unwrap();
        }
        assert!(bench.world.runtime.engine_numbers().plans > 0);
        bench.check_shut();
    }
}

#[test]
fn a_hint_makes_the_second_layer_be_there_and_a_wish_comes_true() {
    let mut bench = Bench::new(&[48], budget_options(24));
    let count = bench.bars[0].model().tensors().len();
    // Any order; the first fault is the first of it.
    let order: Vec<usize> = (0..count).map(|at| at * 7 % count).collect();
    bench.bars[0].schedule_hint(&order).unwrap();
    bench.world.runtime.drive_engine().unwrap();
    let misses = bench.misses();
    order.iter().take(5).for_each(|tensor| bench.touch(0, *tensor));
    assert_eq!(bench.misses(), misses);
    bench.check();

    let mut bench = Bench::new(&[48], budget_options(24));
    bench.bars[0].prefetch(9).unwrap();
    bench.world.runtime.drive_engine().unwrap();
    let misses = bench.misses();
    bench.touch(0, 9);
    assert_eq!(bench.misses(), misses);
    let bare = bench.world.vbar(2);
    assert_eq!(bare.prefetch(0..P).unwrap_err().code(), ErrorCode::InvalidArgument);
    bench.check();
    drop(bare);
    bench.check_shut();
}

#[test]
fn an_unpin_is_covered_by_its_own_record_whoever_looks_at_the_events() {
    let bench = Bench::new(&[24], budget_options(8));
    let (world, model) = (&bench.world, &bench.bars[0]);
    let fences = &world.runtime.device().fences;
    let slot = fences.slot_of(world.stream).unwrap().unwrap();
    assert!(fences.is_eager());
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let looker = scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                // Asks the driver of everything that is pending.
                let _ = fences.cover(fences.stamp(slot));
                let _ = world.runtime.numbers();
                let _ = world.runtime.refresh();
            }
        });
        for round in 0..300 {
            let tensor = round % model.model().tensors().len();
            let Fault::Resident(guard) = model.fault(tensor, world.stream).unwrap() else {
                panic!("tensor {tensor} is offloaded");
            };
            let used = fences.stamp(slot);
            drop(guard);
            // Else what takes the page's frame waits for the next use as well.
            assert_ne!(fences.cover(used).unwrap(), Cover::Unknown, "round {round}");
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        looker.join().unwrap();
    });
    bench.check_shut();
}

/// Streams of the program, the library's threads, and copies that are late, in all combinations:
/// the device computes the same with each.
#[test]
fn scenario_42_no_combination_of_streams_threads_and_late_copies_changes_a_result() {
    for streams in 1..=3 {
        for threads in [Threads::Off, Threads::On] {
            for sim in [ROOMY, "capacity=64M,granularity=64K,bandwidth=300M,latency=200us"] {
                let folder = TempDir::new().unwrap();
                let path = folder.path().join("model.safetensors");
                synthesize(&path, 32 * P, SEED).unwrap();
                let staging_slot_count = streams;
                let options = RuntimeOptions {
                    threads: Some(threads),
                    staging_slot_count,
                    ..budget_options(14)
                };
                let world = World::with(sim, options);
                let bar = open_model(&world, &path);
                let targets: Vec<_> =
                    (0..streams).map(|_| (world.another_stream(), world.scratch())).collect();
                let mut expected = vec![0u64; streams];
                for use_number in 0..4 * bar.model().tensors().len() {
                    let tensor = use_number % bar.model().tensors().len();
                    let (stream, target) = targets[use_number % streams];
                    let Fault::Resident(guard) = bar.fault(tensor, stream).unwrap() else {
                        panic!("tensor {tensor} is offloaded");
                    };
                    let delay = Duration::from_micros(30);
                    world.sum(guard.address(), guard.bytes(), target, delay, stream);
                    let told = &bar.model().tensors()[tensor];
                    let sum = pattern_sum(told.bytes, tensor_seed(SEED, &told.name));
                    let slot = &mut expected[use_number % streams];
                    *slot = slot.wrapping_add(sum);
                }
                for ((stream, target), expected) in targets.iter().zip(&expected) {
                    assert_eq!(world.word(*target, *stream), *expected, "{streams} {threads:?}");
                }
                world.check();
                drop(bar);
            }
        }
    }
}
