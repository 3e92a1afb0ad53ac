//! Bound VBARs: the bytes on the device are the file's, whatever the budget, or there is an error.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use vbar::driver::sim::Verb;
use vbar::driver::{CaptureMode, Driver, DriverCode};
use vbar::host::model_files::Model;
use vbar::host::source::{FileIdentity, ModelFile, ReadAt};
use vbar::model::synth::{synthesize, tensor_seed};
use vbar::options::{Eviction, RuntimeOptions};
use vbar::units::{DeviceAddress, Stream};
use vbar::{ErrorCode, Fault, ModelBar, Reason, Refusal};

use crate::world::{DEVICE, P, ROOMY, World, budget_options, pattern_sum};

/// Pages of the model, nearly.
const N: u64 = 64;
const SEED: u64 = 11;

struct Bench {
    world: World,
    bar: ModelBar,
    target: DeviceAddress,
    folder: TempDir,
}

fn bench(options: RuntimeOptions) -> Bench {
    bench_on(ROOMY, options)
}

fn bench_on(sim: &str, options: RuntimeOptions) -> Bench {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    synthesize(&path, N * P, SEED).unwrap();
    let world = World::with(sim, options);
    let bar = world.runtime.open_model(&path).unwrap();
    let target = world.scratch();
    Bench { world, bar, target, folder }
}

fn tensor_sum(bar: &ModelBar, seed: u64, tensor: usize) -> u64 {
    let tensor = &bar.model().tensors()[tensor];
    pattern_sum(tensor.bytes, tensor_seed(seed, &tensor.name))
}

impl Bench {
    fn count(&self) -> usize {
        self.bar.model().tensors().len()
    }

    /// Enqueues the checksum of one tensor, added to the target. Unpins right after.
    #[track_caller]
    fn use_tensor(&self, tensor: usize, stream: Stream) {
        match self.bar.fault(tensor, stream).unwrap() {
            Fault::Resident(guard) | Fault::HostMapped(guard) => {
                let delay = Duration::from_micros(50);
                self.world.sum(guard.address(), guard.bytes(), self.target, delay, stream);
            }
            Fault::Offloaded(reason) => panic!("tensor {tensor} is offloaded: {reason}"),
        }
    }

    /// Runs some tensors; what their checksums add up to, on the device and by the file's pattern.
    #[track_caller]
    fn check_tensors(&self, tensors: Range<usize>) {
        let before = self.world.word(self.target, self.world.stream);
        let mut expected = before;
        for tensor in tensors {
            self.use_tensor(tensor, self.world.stream);
            expected = expected.wrapping_add(tensor_sum(&self.bar, SEED, tensor));
        }
        assert_eq!(self.world.word(self.target, self.world.stream), expected);
    }

    #[track_caller]
    fn check_pass(&self) {
        self.check_tensors(0..self.count());
    }

    fn filled(&self) -> u64 {
        self.world.runtime.statistics().bytes_filled
    }

    /// Pages that one tensor touches, at most.
    fn widest(&self) -> u64 {
        let pages = |tensor| {
            let place = self.bar.range(tensor);
            place.end.div_ceil(P) - place.start / P
        };
        (0..self.count()).map(pages).max().unwrap()
    }

    fn check_shut(self) {
        let Self { world, bar, .. } = self;
        world.check();
        drop(bar);
        world.check_shut();
    }
}

#[test]
fn every_tensor_has_the_files_bytes_and_only_the_tail_streams() {
    for eviction in [Eviction::Aliasing, Eviction::Strict] {
        let bench = bench(RuntimeOptions { eviction, ..budget_options(40) });
        bench.check_pass();
        bench.check_pass();
        let (pages, streaming) = (bench.bar.vbar().bytes() / P, 2 * bench.widest());
        for pass in 2..5 {
            let before = bench.filled();
            bench.check_pass();
            let filled = (bench.filled() - before).div_ceil(P);
            let most = pages - 40 + streaming + 1;
            assert!(filled <= most, "{eviction:?} pass {pass}: {filled} pages, at most {most}");
            assert!(filled >= pages - 40 - 1, "{eviction:?} pass {pass}: {filled} pages");
        }
        assert!(bench.world.used() <= 40);
        bench.check_shut();
    }
}

#[test]
fn a_model_that_fits_is_read_once() {
    let bench = bench(budget_options(80));
    bench.check_pass();
    let filled = bench.filled();
    bench.check_pass();
    bench.check_pass();
    assert_eq!(bench.filled(), filled);
    assert_eq!(bench.world.sim.calls(Verb::MemUnmap), 0);
    bench.check_shut();
}

#[test]
fn the_budget_may_halve_and_come_back_in_mid_run() {
    let bench = bench(budget_options(40));
    let half = bench.count() / 2;
    for budget in [40, 20, 40, 12, 80] {
        bench.check_tensors(0..half);
        bench.world.runtime.set_budget(Some(budget * P)).unwrap();
        bench.check_tensors(half..bench.count());
        bench.check_pass();
        bench.world.runtime.refresh().unwrap();
        assert!(bench.world.used() <= budget, "{} of {budget}", bench.world.used());
    }
    bench.check_shut();
}

#[test]
fn two_streams_share_a_model() {
    let bench = bench(budget_options(16));
    let other = bench.world.another_stream();
    for _ in 0..3 {
        let mut expected = bench.world.word(bench.target, bench.world.stream);
        for tensor in 0..bench.count() {
            for stream in [bench.world.stream, other] {
                bench.use_tensor(tensor, stream);
                expected = expected.wrapping_add(tensor_sum(&bench.bar, SEED, tensor));
            }
        }
        bench.world.sim.ctx_synchronize().unwrap();
        assert_eq!(bench.world.word(bench.target, other), expected);
    }
    bench.check_shut();
}

#[test]
fn a_range_larger_than_the_budget_is_offloaded_and_others_go_on() {
    let bench = bench(budget_options(20));
    let whole = 0..bench.bar.vbar().bytes();
    for _ in 0..2 {
        let outcome = bench.bar.vbar().fault(whole.clone(), bench.world.stream).unwrap();
        let needed_bytes = whole.end;
        let Fault::Offloaded(refusal) = outcome else { panic!("{outcome:?}") };
        assert_eq!(refusal, Refusal { reason: Reason::TooLarge, needed_bytes });
        bench.check_pass();
    }
    bench.check_shut();
}

#[test]
fn models_compete_by_class() {
    let bench = bench(budget_options(48));
    let path = bench.folder.path().join("other.safetensors");
    synthesize(&path, N / 2 * P, SEED + 1).unwrap();
    let other = bench.world.runtime.open_model(&path).unwrap();
    other.vbar().set_class(1).unwrap();
    let sum = |tensor| tensor_sum(&other, SEED + 1, tensor);
    for _ in 0..3 {
        // The one of lower class streams through what the other leaves.
        let mut expected = bench.world.word(bench.target, bench.world.stream);
        for tensor in 0..other.model().tensors().len() {
            let Fault::Resident(guard) = other.fault(tensor, bench.world.stream).unwrap() else {
                panic!("the higher class is resident");
            };
            let (address, bytes) = (guard.address(), guard.bytes());
            bench.world.sum(address, bytes, bench.target, Duration::ZERO, bench.world.stream);
            expected = expected.wrapping_add(sum(tensor));
        }
        assert_eq!(bench.world.word(bench.target, bench.world.stream), expected);
        bench.check_pass();
    }
    let marks = other.vbar().marks();
    assert_eq!(marks.resident, marks.page_count, "the lower class took pages");
    drop(other);
    bench.check_pass();
    bench.check_shut();
}

#[test]
fn a_bound_vbar_has_no_watermark() {
    let bench = bench(budget_options(2 * N));
    bench.check_pass();
    let marks = bench.bar.vbar().marks();
    let refused = bench.bar.vbar().set_watermark(1).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::InvalidArgument);
    assert!(refused.to_string().contains("no watermark"), "{refused}");
    assert_eq!(bench.bar.vbar().marks(), marks);
    bench.check_pass();
    bench.check_shut();
}

#[test]
fn a_truncated_file_is_an_error_and_others_go_on() {
    let bench = bench(budget_options(16));
    bench.check_pass();
    let path = bench.folder.path().join("other.safetensors");
    synthesize(&path, N / 2 * P, SEED + 1).unwrap();
    let other = bench.world.runtime.open_model(&path).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(N / 4 * P).unwrap();
    let count = other.model().tensors().len();
    for tensor in [0, count / 2, count - 1] {
        if other.model().tensors()[tensor].bytes == 0 {
            continue;
        }
        let error = other.fault(tensor, bench.world.stream).map(drop).unwrap_err();
        assert_eq!(error.code(), ErrorCode::FileChanged, "{error}");
    }
    bench.world.sim.ctx_synchronize().unwrap();
    bench.world.runtime.refresh().unwrap();
    assert_eq!(other.vbar().marks().resident, 0);
    bench.check_pass();
    drop(other);
    bench.check_shut();
}

/// A file that fails past an offset, while it is told to.
struct Failing {
    file: std::fs::File,
    bad_from: Arc<AtomicU64>,
}

impl ReadAt for Failing {
    fn read_at(&self, target: &mut [u8], offset: u64) -> std::io::Result<usize> {
        let left = self.bad_from.load(Ordering::Relaxed).saturating_sub(offset);
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

fn failing_bench(options: RuntimeOptions) -> (Bench, Arc<AtomicU64>) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    synthesize(&path, N * P, SEED).unwrap();
    let bad_from = Arc::new(AtomicU64::new(u64::MAX));
    let file = std::fs::File::open(&path).unwrap();
    let reader = Failing { file, bad_from: Arc::clone(&bad_from) };
    let file = ModelFile::from_reader(Box::new(reader), "failing").unwrap();
    let world = World::with(ROOMY, options);
    let bar = world.runtime.bind_model(Model::from_file(file).unwrap()).unwrap();
    let target = world.scratch();
    (Bench { world, bar, target, folder }, bad_from)
}

#[test]
fn a_read_error_in_the_middle_of_a_range_leaves_no_page_behind() {
    for eviction in [Eviction::Aliasing, Eviction::Strict] {
        let (bench, bad_from) = failing_bench(RuntimeOptions { eviction, ..budget_options(12) });
        let tensors = bench.bar.model().tensors();
        let largest = (0..bench.count()).max_by_key(|tensor| tensors[*tensor].bytes).unwrap();
        bench.check_pass();
        for round in 0..4 {
            // Not resident, so that it must be read.
            bench.bar.vbar().free_memory(u64::MAX).unwrap();
            if round % 2 == 1 {
                bench.check_tensors(0..largest.min(6));
            }
            bad_from.store(tensors[largest].offset + tensors[largest].bytes / 2, Ordering::Relaxed);
            let error = bench.bar.fault(largest, bench.world.stream).map(drop).unwrap_err();
            assert_eq!(error.code(), ErrorCode::Io, "{error}");
            bad_from.store(u64::MAX, Ordering::Relaxed);
            bench.check_tensors(largest..largest + 1);
            bench.check_pass();
        }
        bench.check_shut();
    }
}

#[test]
fn copies_and_fences_that_fail_leave_no_page_behind() {
    let verbs =
        [Verb::MemcpyHtodAsync, Verb::EventRecord, Verb::EventCreate, Verb::StreamWaitEvent];
    for verb in verbs {
        let bench = bench(budget_options(12));
        bench.check_pass();
        for nth in 1..=6 {
            bench.bar.vbar().free_memory(3 * P).unwrap();
            bench.world.sim.fail_nth(verb, nth, DriverCode::INVALID_VALUE);
            for tensor in 0..bench.count() {
                match bench.bar.fault(tensor, bench.world.stream) {
                    Ok(outcome) => drop(outcome.resident()),
                    Err(error) => assert_eq!(error.code(), ErrorCode::Driver, "{verb}: {error}"),
                }
            }
            bench.world.sim.heal();
            bench.check_pass();
        }
        bench.check_shut();
    }
}

#[test]
fn a_miss_on_a_capturing_stream_is_filled_and_waited_for() {
    let bench = bench(budget_options(16));
    let (world, stream) = (&bench.world, bench.world.stream);
    let tensor = (0..bench.count()).find(|at| bench.bar.range(*at).end > P).unwrap();
    let expected = tensor_sum(&bench.bar, SEED, tensor);
    world.sim.begin_capture(stream, CaptureMode::Global).unwrap();
    bench.use_tensor(tensor, stream);
    let graph = world.sim.end_capture(stream).unwrap();
    let other = world.another_stream();
    for launch in 1..=3u64 {
        for tensor in 0..bench.count() {
            // Pressure: everything else streams by.
            drop(bench.bar.fault(tensor, other).unwrap());
        }
        graph.launch(stream).unwrap();
        assert_eq!(world.word(bench.target, stream), expected.wrapping_mul(launch));
    }
    drop(graph);
    bench.world.sim.ctx_synchronize().unwrap();
    bench.check_shut();
}

#[test]
fn scarce_late_and_shuffled_devices_give_the_same_bytes() {
    for seed in 0..6 {
        let sim = format!("{ROOMY},seed={seed},poison=1");
        let bench = bench_on(&sim, budget_options(14));
        bench.check_pass();
        bench.check_pass();
        assert_eq!(bench.world.sim.live_frames(DEVICE), bench.world.used() + 1);
        bench.check_shut();
    }
    let bench = bench_on(&format!("{ROOMY},latency=200us"), budget_options(14));
    bench.check_pass();
    bench.check_shut();
}

#[test]
fn models_that_take_turns_stream_through_each_others_frames() {
    // The older one ranks lower, and the newer one holds all frames when it comes again.
    let folder = TempDir::new().unwrap();
    let world = World::with(ROOMY, budget_options(24));
    let open = |pages: u64| {
        let path = folder.path().join(format!("{pages}.safetensors"));
        synthesize(&path, pages * P, SEED).unwrap();
        world.runtime.open_model(&path).unwrap()
    };
    let (older, newer) = (open(20), open(40));
    let target = world.scratch();
    let mut expected = 0u64;
    for bar in [&older, &newer, &older, &newer, &older] {
        for tensor in 0..bar.model().tensors().len() {
            let guard = bar.fault(tensor, world.stream).unwrap().resident().expect("it streams");
            world.sum(guard.address(), guard.bytes(), target, Duration::ZERO, world.stream);
            expected = expected.wrapping_add(tensor_sum(bar, SEED, tensor));
        }
    }
    assert_eq!(world.word(target, world.stream), expected);
    // One of a higher class gives nothing.
    newer.vbar().set_class(1).unwrap();
    (0..newer.model().tensors().len()).for_each(|tensor| {
        newer.fault(tensor, world.stream).unwrap().resident().expect("it streams");
    });
    let refused = older.fault(0, world.stream).unwrap().offloaded();
    assert_eq!(refused, Some(Reason::Budget));
    world.check();
    drop((older, newer));
    world.check_shut();
}
