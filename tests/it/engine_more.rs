//! The engine on a thread of its own, in the middle of what programs, files and drivers do to it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vbar::driver::sim::Verb;
use vbar::driver::{CaptureMode, Driver};
use vbar::host::model_files::Model;
use vbar::host::source::{FileIdentity, ModelFile, ReadAt};
use vbar::memory::pager::HeldPins;
use vbar::model::synth::{synthesize, tensor_seed};
use vbar::options::{Eviction, Poison, Threads};
use vbar::units::{DeviceAddress, Stream};
use vbar::{ErrorCode, Fault, ModelBar, Result, Runtime, RuntimeOptions};

use crate::forked::in_child;
use crate::world::{DEVICE, P, ROOMY, World, budget_options, pattern_sum};

pub(crate) const SEED: u64 = 9;
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn threaded(pages: u64) -> RuntimeOptions {
    RuntimeOptions { threads: Some(Threads::On), ..budget_options(pages) }
}

/// What a test does to the reading of a file.
#[derive(Default)]
struct Tricks {
    /// Reads from here on fail.
    bad_from: AtomicU64,
    /// Reads wait while it is shut.
    is_shut: AtomicBool,
    /// Reads that wait.
    waiting: AtomicU64,
}

struct Tricky {
    file: std::fs::File,
    tricks: Arc<Tricks>,
}

impl ReadAt for Tricky {
    fn read_at(&self, target: &mut [u8], offset: u64) -> std::io::Result<usize> {
        self.tricks.waiting.fetch_add(1, Ordering::SeqCst);
        let start = Instant::now();
        while self.tricks.is_shut.load(Ordering::SeqCst) && start.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_micros(200));
        }
        self.tricks.waiting.fetch_sub(1, Ordering::SeqCst);
        let left = self.tricks.bad_from.load(Ordering::SeqCst).saturating_sub(offset);
        if left == 0 {
            return Err(std::io::Error::from_raw_os_error(libc::EIO));
        }
        let length = (target.len() as u64).min(left) as usize;
        ReadAt::read_at(&self.file, &mut target[..length], offset)
    }

    fn identity(&self) -> std::io::Result<FileIdentity> {
        self.file.identity()
    }
}

/// A device and the files of its models.
pub(crate) struct Rig {
    pub(crate) world: World,
    pub(crate) folder: TempDir,
    target: DeviceAddress,
}

impl Rig {
    pub(crate) fn new(options: RuntimeOptions) -> Self {
        Self::on(ROOMY, options)
    }

    pub(crate) fn on(sim: &str, options: RuntimeOptions) -> Self {
        let world = World::with(sim, options);
        let target = world.scratch();
        Self { world, folder: TempDir::new().unwrap(), target }
    }

    pub(crate) fn path(&self, name: &str, pages: u64) -> std::path::PathBuf {
        let path = self.folder.path().join(format!("{name}.safetensors"));
        synthesize(&path, pages * P, SEED).unwrap();
        path
    }

    pub(crate) fn model(&self, name: &str, pages: u64) -> ModelBar {
        self.world.runtime.open_model(&self.path(name, pages)).unwrap()
    }

    fn tricky(&self, name: &str, pages: u64) -> (ModelBar, Arc<Tricks>) {
        let file = std::fs::File::open(self.path(name, pages)).unwrap();
        let tricks = Arc::new(Tricks { bad_from: AtomicU64::new(u64::MAX), ..Tricks::default() });
        let reader = Tricky { file, tricks: Arc::clone(&tricks) };
        let file = ModelFile::from_reader(Box::new(reader), name).unwrap();
        let model = Model::from_file(file).unwrap();
        (self.world.runtime.bind_model(model).unwrap(), tricks)
    }

    /// The sum that one use of a tensor adds on the device; `None` when it was offloaded.
    fn touch(&self, model: &ModelBar, tensor: usize, stream: Stream) -> Result<Option<u64>> {
        self.touch_into(model, tensor, stream, self.target)
    }

    fn touch_into(
        &self,
        model: &ModelBar,
        tensor: usize,
        stream: Stream,
        target: DeviceAddress,
    ) -> Result<Option<u64>> {
        let Fault::Resident(guard) = model.fault(tensor, stream)? else { return Ok(None) };
        let delay = Duration::from_micros(20);
        self.world.sum(guard.address(), guard.bytes(), target, delay, stream);
        guard.unpin()?;
        let told = &model.model().tensors()[tensor];
        Ok(Some(pattern_sum(told.bytes, tensor_seed(SEED, &told.name))))
    }

    /// Passes over a model in order, every byte checked.
    #[track_caller]
    pub(crate) fn check_passes(&self, model: &ModelBar, count: u64) {
        let stream = self.world.stream;
        let mut expected = self.world.word(self.target, stream);
        for _ in 0..count {
            for tensor in 0..model.model().tensors().len() {
                let sum = self.touch(model, tensor, stream).unwrap();
                let sum = sum.unwrap_or_else(|| panic!("tensor {tensor} is offloaded"));
                expected = expected.wrapping_add(sum);
            }
        }
        assert_eq!(self.world.word(self.target, stream), expected);
    }

    /// Everything agrees once the threads have ended, and nothing is left afterwards.
    #[track_caller]
    pub(crate) fn check_shut(self, models: Vec<ModelBar>) {
        let Self { world, .. } = self;
        world.runtime.set_threads(Threads::Off).unwrap();
        world.sim.ctx_synchronize().unwrap();
        world.runtime.refresh().unwrap();
        world.check();
        drop(models);
        world.check_shut();
    }

    pub(crate) fn plans(&self) -> u64 {
        self.world.runtime.engine_numbers().plans
    }
}

#[track_caller]
pub(crate) fn eventually(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "{what}: not after {PATIENCE:?}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The engine is in the middle of reading what it fetches, and stays there until it is let go.
fn fetching(rig: &Rig, model: &ModelBar, tricks: &Tricks, pages: std::ops::Range<u64>) {
    tricks.is_shut.store(true, Ordering::SeqCst);
    model.vbar().prefetch(pages.start * P..pages.end * P).unwrap();
    eventually("the engine reads", || tricks.waiting.load(Ordering::SeqCst) > 0);
    let _ = rig;
}

fn let_go(tricks: &Tricks) {
    tricks.is_shut.store(false, Ordering::SeqCst);
}

#[test]
fn a_fault_waits_for_frames_that_the_engine_has_in_hand() {
    for eviction in [Eviction::Aliasing, Eviction::Strict] {
        let rig = Rig::new(RuntimeOptions { eviction, ..threaded(6) });
        let (model, tricks) = rig.tricky("model", 24);
        fetching(&rig, &model, &tricks, 0..6);
        // They are nobody's pins.
        let ended = model.vbar().end_of_run(rig.world.stream, HeldPins::Keep).unwrap();
        assert_eq!(ended.held, []);
        std::thread::scope(|scope| {
            let fault = scope.spawn(|| {
                rig.world.sim.ctx_set_current(Some(rig.world.runtime.device().context)).unwrap();
                let range = 12 * P..16 * P;
                let fault = model.vbar().fault(range, rig.world.stream).unwrap();
                fault.offloaded()
            });
            std::thread::sleep(Duration::from_millis(30));
            assert!(!fault.is_finished(), "{eviction:?}: the fault did not wait");
            let_go(&tricks);
            assert_eq!(fault.join().unwrap(), None, "{eviction:?}");
        });
        rig.check_passes(&model, 2);
        rig.check_shut(vec![model]);
    }
}

#[test]
fn a_vbar_that_is_closed_while_its_pages_are_fetched_goes_at_once() {
    let rig = Rig::new(threaded(6));
    let (model, tricks) = rig.tricky("model", 24);
    fetching(&rig, &model, &tricks, 0..6);
    model.vbar().close();
    assert_eq!(rig.world.runtime.numbers().closing_bars, 1);
    let_go(&tricks);
    eventually("the VBAR is gone", || rig.world.runtime.numbers().closing_bars == 0);
    rig.check_shut(vec![model]);
}

#[test]
fn the_runtime_is_closed_in_the_middle_of_a_fetch() {
    let rig = Rig::new(threaded(6));
    let (model, tricks) = rig.tricky("model", 24);
    fetching(&rig, &model, &tricks, 0..6);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            let_go(&tricks);
        });
        drop(model);
        rig.world.check_shut();
    });
}

#[test]
fn whoever_shares_a_runtime_shares_its_engine() {
    let rig = Rig::new(threaded(20));
    let first = rig.model("first", 24);
    let shared = Runtime::open(rig.world.sim.driver(), DEVICE, budget_options(20)).unwrap();
    let second = shared.open_model(&rig.path("second", 24)).unwrap();
    for _ in 0..4 {
        rig.check_passes(&first, 1);
        rig.check_passes(&second, 1);
    }
    assert_eq!(shared.engine_numbers(), rig.world.runtime.engine_numbers());
    assert!(rig.plans() > 0, "{:?}", shared.engine_numbers());
    drop((shared, first));
    rig.check_passes(&second, 3);
    rig.check_shut(vec![second]);
}

#[test]
fn streams_use_one_model_at_once() {
    for (eviction, poison) in [
        (Eviction::Aliasing, Poison::Off),
        (Eviction::Aliasing, Poison::On),
        (Eviction::Strict, Poison::On),
    ] {
        let rig = Rig::new(RuntimeOptions { eviction, poison, ..threaded(30) });
        let model = rig.model("model", 48);
        let streams: Vec<_> = (0..3).map(|_| rig.world.another_stream()).collect();
        let refused = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for (thread, stream) in streams.iter().enumerate() {
                let (rig, model, refused) = (&rig, &model, &refused);
                scope.spawn(move || {
                    let context = rig.world.runtime.device().context;
                    rig.world.sim.ctx_set_current(Some(context)).unwrap();
                    let target = rig.target.offset(thread as u64 * 8);
                    let mut expected = 0u64;
                    for at in 0..4 * model.model().tensors().len() {
                        let tensor = at % model.model().tensors().len();
                        match rig.touch_into(model, tensor, *stream, target).unwrap() {
                            Some(sum) => expected = expected.wrapping_add(sum),
                            // Others pin what could give way.
                            None => drop(refused.fetch_add(1, Ordering::Relaxed)),
                        }
                    }
                    assert_eq!(rig.world.word(target, *stream), expected, "{eviction:?}");
                });
            }
        });
        let (refused, all) = (refused.into_inner(), 12 * model.model().tensors().len() as u64);
        assert!(refused < all / 10, "{eviction:?}: {refused} of {all} were refused");
        rig.check_shut(vec![model]);
    }
}

#[test]
fn a_stream_is_destroyed_between_faults() {
    let rig = Rig::new(threaded(16));
    let model = rig.model("model", 40);
    let count = model.model().tensors().len();
    let mut expected = 0u64;
    for round in 0..24 {
        let stream = rig.world.another_stream();
        for tensor in (0..count / 4).map(|at| (round * (count / 4) + at) % count) {
            let sum = rig.touch(&model, tensor, stream).unwrap();
            expected = expected.wrapping_add(sum.expect("it is resident"));
        }
        // A token outlives its stream: nothing may be asked of that one any more.
        let fault = model.fault(round % count, stream).unwrap();
        let token = fault.resident().map(vbar::Guard::into_token);
        rig.world.runtime.retire_stream(stream).unwrap();
        rig.world.sim.stream_synchronize(stream).unwrap();
        rig.world.sim.stream_destroy(stream).unwrap();
        token.map_or(Ok(()), |token| rig.world.runtime.unpin(token, Stream::NONE)).unwrap();
    }
    assert_eq!(rig.world.word(rig.target, rig.world.stream), expected);
    rig.check_shut(vec![model]);
}

#[test]
fn a_stream_that_was_destroyed_is_asked_nothing() {
    let rig = Rig::new(budget_options(16));
    rig.world.runtime.open_engine_by_hand();
    let model = rig.model("model", 40);
    let sim = &rig.world.sim;
    for _ in 0..4 {
        for tensor in 0..model.model().tensors().len() {
            let stream = rig.world.another_stream();
            let fault = model.fault(tensor, stream).unwrap();
            let token = fault.resident().map(vbar::Guard::into_token).unwrap();
            sim.stream_synchronize(stream).unwrap();
            rig.world.runtime.retire_stream(stream).unwrap();
            sim.stream_destroy(stream).unwrap();
            let asked = || sim.calls(Verb::StreamIsCapturing) + sim.calls(Verb::EventRecord);
            let before = asked();
            rig.world.runtime.unpin(token, Stream::NONE).unwrap();
            assert_eq!(asked(), before, "tensor {tensor}");
            rig.world.runtime.drive_engine().unwrap();
        }
    }
    assert!(rig.plans() > 0);
    rig.check_shut(vec![model]);
}

#[test]
fn scenario_46_a_graph_keeps_its_pages_while_the_engine_runs() {
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        let rig = Rig::new(threaded(24));
        let model = rig.model("model", 48);
        let (captured, other) = (rig.world.another_stream(), rig.world.stream);
        rig.check_passes(&model, 3);
        let target = rig.target.offset(512);
        rig.world.sim.begin_capture(captured, mode).unwrap();
        let mut sum = 0u64;
        for tensor in [1, 7, 8, 9] {
            let touched = rig.touch_into(&model, tensor, captured, target).unwrap();
            sum = sum.wrapping_add(touched.unwrap_or(0));
            // The order goes on beside it.
            rig.touch(&model, tensor, other).unwrap();
        }
        let graph = rig.world.sim.end_capture(captured).unwrap();
        for launch in 1..=3u64 {
            rig.check_passes(&model, 1);
            graph.launch(captured).unwrap();
            let word = rig.world.word(target, captured);
            assert_eq!(word, sum.wrapping_mul(launch), "{mode:?}");
        }
        drop(graph);
        rig.check_shut(vec![model]);
    }
}

/// Makes a file another one than was opened.
fn spoil(how: &str, path: &Path) {
    match how {
        "deleted" => std::fs::remove_file(path).unwrap(),
        "replaced" => {
            let other = path.with_extension("new");
            synthesize(&other, 32 * P, SEED + 1).unwrap();
            std::fs::rename(other, path).unwrap();
        }
        "cut" => {
            let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
            file.set_len(file.metadata().unwrap().len() / 2).unwrap();
        }
        "unreadable" => {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o000)).unwrap();
        }
        _ => std::fs::write(path, vec![7; 32 * P as usize]).unwrap(),
    }
}

#[test]
fn a_file_that_is_another_one_now_fails_its_own_faults_only() {
    for how in ["deleted", "replaced", "cut", "unreadable", "written"] {
        let rig = Rig::new(threaded(20));
        let (spoiled, whole) = (rig.model(how, 32), rig.model("whole", 32));
        for _ in 0..3 {
            rig.check_passes(&spoiled, 1);
            rig.check_passes(&whole, 1);
        }
        spoil(how, &rig.folder.path().join(format!("{how}.safetensors")));
        let stream = rig.world.stream;
        for _ in 0..4 {
            let mut expected = rig.world.word(rig.target, stream);
            for tensor in 0..spoiled.model().tensors().len() {
                // What was filled before stays, and has the bytes of that time.
                match rig.touch(&spoiled, tensor, stream) {
                    Ok(sum) => expected = expected.wrapping_add(sum.expect("it fits")),
                    Err(error) => assert_eq!(error.code(), ErrorCode::FileChanged, "{error}"),
                }
            }
            assert_eq!(rig.world.word(rig.target, stream), expected, "{how}");
            rig.check_passes(&whole, 1);
        }
        rig.check_passes(&whole, 8);
        let numbers = rig.world.runtime.engine_numbers();
        assert!(numbers.trust > 0, "{how}: {numbers:?}");
        rig.check_shut(vec![spoiled, whole]);
    }
}

#[test]
fn read_errors_in_mid_stream_are_of_the_fault_that_needs_the_bytes() {
    for eviction in [Eviction::Aliasing, Eviction::Strict] {
        // Nothing is in page-locked memory, so that all of it is read.
        let options = RuntimeOptions { eviction, host_allowance: Some(0), ..threaded(16) };
        let rig = Rig::new(options);
        let (model, tricks) = rig.tricky("model", 40);
        let whole = rig.model("whole", 12);
        let count = model.model().tensors().len();
        rig.check_passes(&model, 3);
        for round in 1..5 {
            let bad = &model.model().tensors()[count * round / 6];
            tricks.bad_from.store(bad.offset + bad.bytes / 2, Ordering::SeqCst);
            let stream = rig.world.stream;
            let mut expected = rig.world.word(rig.target, stream);
            let mut failed = 0;
            for tensor in (0..count).chain(0..count) {
                match rig.touch(&model, tensor, stream) {
                    Ok(sum) => expected = expected.wrapping_add(sum.expect("it fits")),
                    Err(error) => {
                        assert_eq!(error.code(), ErrorCode::Io, "{error}");
                        failed += 1;
                    }
                }
            }
            assert!(failed > 0, "nothing was read");
            assert_eq!(rig.world.word(rig.target, stream), expected);
            rig.check_passes(&whole, 1);
            tricks.bad_from.store(u64::MAX, Ordering::SeqCst);
            rig.check_passes(&model, 3);
        }
        rig.check_shut(vec![model, whole]);
    }
}

#[test]
fn driver_calls_fail_at_random_and_nothing_is_lost() {
    for seed in 0..12u64 {
        let eviction = if seed % 3 == 2 { Eviction::Strict } else { Eviction::Aliasing };
        let poison = if seed % 4 == 3 { Poison::On } else { Poison::Off };
        let rig = Rig::new(RuntimeOptions { eviction, poison, ..threaded(20) });
        let models = vec![rig.model("one", 32), rig.model("two", 16)];
        let (stream, sim) = (rig.world.stream, &rig.world.sim);
        let mut expected = 0u64;
        for (round, model) in models.iter().cycle().take(8).enumerate() {
            for tensor in 0..model.model().tensors().len() {
                sim.fail_rate(0.03, seed * 1000 + round as u64 * 100 + tensor as u64);
                let fault = model.fault(tensor, stream);
                // The engine goes on among failures; the test's own calls do not.
                let told = &model.model().tensors()[tensor];
                match fault {
                    Ok(Fault::Resident(guard) | Fault::HostMapped(guard)) => {
                        sim.heal();
                        let (address, bytes) = (guard.address(), guard.bytes());
                        rig.world.sum(address, bytes, rig.target, Duration::ZERO, stream);
                        let sum = pattern_sum(told.bytes, tensor_seed(SEED, &told.name));
                        expected = expected.wrapping_add(sum);
                        sim.fail_rate(0.03, seed * 7777 + tensor as u64);
                        drop(guard);
                    }
                    Ok(Fault::Offloaded(_)) => {}
                    Err(error) => {
                        use ErrorCode::{Driver, HostMemory, NoAddresses};
                        let may = [Driver, HostMemory, NoAddresses].contains(&error.code());
                        assert!(may, "seed {seed}: {:?}: {error}", error.code());
                    }
                }
            }
        }
        sim.heal();
        assert_eq!(rig.world.word(rig.target, stream), expected, "seed {seed}");
        models.iter().for_each(|model| rig.check_passes(model, 2));
        rig.check_shut(models);
    }
}

#[test]
fn budgets_and_pressure_come_and_go_while_the_engine_runs() {
    for (eviction, poison) in [(Eviction::Aliasing, Poison::On), (Eviction::Strict, Poison::Off)] {
        let options = RuntimeOptions { eviction, poison, ..threaded(40) };
        let rig = Rig::on("capacity=4M,granularity=64K,seed=3", options);
        let model = rig.model("model", 50);
        for round in 0..12u64 {
            rig.check_passes(&model, 1);
            let runtime = &rig.world.runtime;
            match round % 4 {
                0 => runtime.set_budget(Some(16 * P)).unwrap(),
                1 => rig.world.sim.set_outside_bytes(DEVICE, 40 * P),
                2 => runtime.set_budget(Some(40 * P)).unwrap(),
                _ => rig.world.sim.set_outside_bytes(DEVICE, 0),
            }
        }
        assert!(rig.plans() > 0);
        rig.check_shut(vec![model]);
    }
}

#[test]
fn a_forked_child_leaves_the_engine_alone() {
    let rig = Rig::new(threaded(16));
    let model = rig.model("model", 40);
    rig.check_passes(&model, 2);
    let (model, stream) = (&*Box::leak(Box::new(model)), rig.world.stream);
    let good = in_child(|| {
        let ending = |result: Result<()>| {
            result.is_err_and(|error| error.code() == ErrorCode::ProcessEnding)
        };
        let runtime = &rig.world.runtime;
        let hinted = model.schedule_hint(&[1, 2, 3]);
        let wished = model.prefetch(3);
        let quiet = |result: Result<()>| result.is_ok() || ending(result);
        let _ = (runtime.engine_numbers(), runtime.statistics());
        quiet(hinted)
            && quiet(wished)
            && ending(model.fault(1, stream).map(drop))
            && ending(runtime.set_threads(Threads::Off))
    });
    assert!(good, "the child met its parent's engine");
    rig.check_passes(model, 2);
    rig.world.runtime.set_threads(Threads::Off).unwrap();
    rig.world.check();
}

#[test]
fn the_process_ends_in_the_middle_of_a_pass() {
    let this = std::env::current_exe().unwrap();
    for how in ["reading", "streaming"] {
        let start = Instant::now();
        let child = std::process::Command::new(&this)
            .args(["--exact", "engine_more::ends_its_process", "--ignored", "--nocapture"])
            .env("VBAR_TEST_ENDS", how)
            .output()
            .unwrap();
        assert_eq!(child.status.code(), Some(7), "{how}: {child:?}");
        assert!(start.elapsed() < PATIENCE, "{how}: {:?}", start.elapsed());
    }
}

#[test]
#[ignore = "for a process of its own, which it ends"]
fn ends_its_process() {
    let rig = Rig::new(threaded(16));
    let (model, tricks) = rig.tricky("model", 40);
    match std::env::var("VBAR_TEST_ENDS").as_deref() {
        Ok("reading") => fetching(&rig, &model, &tricks, 0..6),
        _ => {
            rig.check_passes(&model, 2);
            for tensor in 0..model.model().tensors().len() / 2 {
                rig.touch(&model, tensor, rig.world.stream).unwrap();
            }
        }
    }
    // Never dropped, as a program that ends by exit leaves it.
    std::mem::forget((rig, model));
    std::process::exit(7);
}

#[test]
fn threads_that_are_turned_on_and_off_by_many_all_come_to_an_end() {
    let rig = Rig::new(threaded(16));
    let model = rig.model("model", 40);
    std::thread::scope(|scope| {
        for turn in 0..4u32 {
            let runtime = &rig.world.runtime;
            scope.spawn(move || {
                for round in 0..60 {
                    let on = (turn + round) % 2 == 0;
                    runtime.set_threads(if on { Threads::On } else { Threads::Off }).unwrap();
                }
            });
        }
        rig.check_passes(&model, 6);
    });
    rig.world.runtime.set_threads(Threads::Off).unwrap();
    assert_eq!(rig.world.runtime.threads(), Threads::Off);
    rig.world.runtime.set_threads(Threads::On).unwrap();
    rig.check_passes(&model, 3);
    rig.check_shut(vec![model]);
}
