//! Ranges that no device frames can be had for: read from the host's memory, or offloaded with the
//! bytes that they need; never a wrong byte, and nothing left over.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tempfile::TempDir;
use vbar::driver::sim::{Sim, SimOptions, Verb};
use vbar::driver::{CaptureMode, Driver, DriverCode};
use vbar::host::spare::HostRoom;
use vbar::model::synth::{synthesize, tensor_seed};
use vbar::options::{HostMapped, Poison, RuntimeOptions, Threads};
use vbar::units::{DeviceAddress, Stream};
use vbar::{ErrorCode, Fault, Guard, ModelBar, Reason};

use crate::host_mapped_twin::{check_host_mapped, is_supported};
use crate::world::{DEVICE, P, ROOMY, World, budget_options, drawn, pattern_sum};

const SEED: u64 = 5;

/// As many bytes as the test says.
struct Room(AtomicU64);

impl HostRoom for Room {
    fn allowed_bytes(&self, _held_bytes: u64) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

struct Bench {
    world: World,
    bar: ModelBar,
    room: Arc<Room>,
    target: DeviceAddress,
    _folder: TempDir,
}

/// A model of `pages` pages, a budget of `budget` pages, and host memory to spare.
fn bench_on(sim: &str, pages: u64, options: RuntimeOptions) -> Bench {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    synthesize(&path, pages * P, SEED).unwrap();
    let world = World::with(sim, options);
    let room = Arc::new(Room(AtomicU64::new(u64::MAX)));
    world.runtime.set_host_room(Arc::clone(&room) as _);
    let bar = world.runtime.open_model(&path).unwrap();
    let target = world.scratch();
    Bench { world, bar, room, target, _folder: folder }
}

fn host_options(budget: u64) -> RuntimeOptions {
    RuntimeOptions { host_mapped: HostMapped::On, ..budget_options(budget) }
}

fn bench(pages: u64, budget: u64) -> Bench {
    bench_on(ROOMY, pages, host_options(budget))
}

impl Bench {
    fn fault(&self) -> Fault<Guard<'_>> {
        self.bar.vbar().fault(0..self.bar.vbar().bytes(), self.world.stream).unwrap()
    }

    fn pages(&self) -> u64 {
        self.bar.vbar().bytes() / P
    }

    #[track_caller]
    fn host_mapped(&self) -> Guard<'_> {
        match self.fault() {
            Fault::HostMapped(guard) => guard,
            other => panic!("{other:?}"),
        }
    }

    fn drawn(&self) -> String {
        drawn(self.bar.vbar(), u32::MAX)
    }

    fn host_pages(&self) -> u64 {
        self.world.runtime.numbers().host_mapped_bytes / P
    }

    /// Sums every tensor by kernels; the caller's guard covers them.
    #[track_caller]
    fn check_bytes(&self, guard: &Guard<'_>) {
        let (world, stream) = (&self.world, self.world.stream);
        let mut expected = world.word(self.target, stream);
        for (index, tensor) in self.bar.model().tensors().iter().enumerate() {
            let source = guard.address().offset(self.bar.range(index).start);
            world.sum(source, tensor.bytes, self.target, Default::default(), stream);
            let sum = pattern_sum(tensor.bytes, tensor_seed(SEED, &tensor.name));
            expected = expected.wrapping_add(sum);
        }
        assert_eq!(world.word(self.target, stream), expected);
    }

    #[track_caller]
    fn check_shut(self) {
        let Self { world, bar, .. } = self;
        world.check();
        drop(bar);
        let sim = Arc::clone(&world.sim);
        world.check_shut();
        assert_eq!(sim.live_host_frames(), 0);
    }
}

#[test]
fn the_twin_holds_on_the_simulated_device() {
    for text in ["capacity=64M,granularity=64K", "capacity=64M,granularity=64K,seed=3,poison=1"] {
        let sim = Sim::new(SimOptions::parse(text).unwrap());
        assert!(is_supported(&*sim, DEVICE));
        check_host_mapped(&sim.driver(), DEVICE, P);
        assert_eq!(sim.violations(), Vec::<String>::new());
        assert_eq!((sim.live_host_frames(), sim.live_mappings()), (0, 0));
    }
}

#[test]
fn a_weight_larger_than_the_budget_is_read_from_the_host() {
    for budget in [0, 1, 3] {
        let bench = bench(8, budget);
        let guard = bench.host_mapped();
        bench.check_bytes(&guard);
        assert_eq!((bench.host_pages(), bench.world.used()), (bench.pages(), 0));
        assert_eq!(bench.world.sim.live_host_frames(), bench.pages());
        assert_eq!(bench.drawn(), "h".repeat(bench.pages() as usize));
        let second = bench.host_mapped();
        assert_eq!(second.signature(), guard.signature());
        assert_eq!(bench.world.runtime.statistics().refused(Reason::HostMapped), 2);
        drop((guard, second));
        bench.check_shut();
    }
}

#[test]
fn it_is_a_choice_and_needs_a_device_that_can() {
    let older = format!("{ROOMY},host_vmm=0");
    for (sim, options) in [(ROOMY, budget_options(3)), (&older, host_options(3))] {
        let bench = bench_on(sim, 8, options);
        let Fault::Offloaded(refusal) = bench.fault() else { panic!("nobody asked for it") };
        assert_eq!((refusal.reason, refusal.needed_bytes), (Reason::TooLarge, bench.pages() * P));
        assert_eq!(bench.world.sim.calls(Verb::MemCreateHost), 0);
        bench.check_shut();
    }
}

#[test]
fn the_hosts_allowance_is_kept() {
    let bench = bench(8, 3);
    for allowed in [0, P, (bench.pages() - 1) * P] {
        bench.room.0.store(allowed, Ordering::Relaxed);
        let Fault::Offloaded(refusal) = bench.fault() else { panic!("{allowed} bytes allowed") };
        assert_eq!((refusal.reason, refusal.needed_bytes), (Reason::TooLarge, bench.pages() * P));
        assert_eq!((bench.host_pages(), bench.world.used()), (0, 0));
    }
    bench.room.0.store(bench.pages() * P, Ordering::Relaxed);
    let guard = bench.host_mapped();
    // Less is allowed than is held: what is pinned stays, and is readable still.
    bench.room.0.store(2 * P, Ordering::Relaxed);
    bench.world.runtime.refresh().unwrap();
    assert_eq!(bench.host_pages(), bench.pages());
    bench.check_bytes(&bench.host_mapped());
    drop(guard);
    bench.world.sim.ctx_synchronize().unwrap();
    bench.world.runtime.refresh().unwrap();
    assert_eq!(bench.host_pages(), 2);
    assert_eq!(bench.world.runtime.trim_host_frames().unwrap(), 2 * P);
    assert_eq!(bench.world.sim.live_host_frames(), 0);
    bench.check_shut();
}

#[test]
fn pages_move_to_the_device_once_nobody_uses_them() {
    let bench = bench(6, 2);
    let guard = bench.host_mapped();
    bench.world.runtime.set_budget(Some(32 * P)).unwrap();
    // Pinned, they stay where they are.
    assert_eq!(bench.fault().offloaded(), Some(Reason::HostMapped));
    bench.world.sim.hold_stream(bench.world.stream).unwrap();
    let (source, stream) = (guard.address(), bench.world.stream);
    bench.world.sum(source, P, bench.target, Default::default(), stream);
    drop(guard);
    // Not pinned, and still read.
    let other = bench.world.another_stream();
    let whole = 0..bench.bar.vbar().bytes();
    let fault = bench.bar.vbar().fault(whole, other).unwrap();
    assert_eq!(fault.offloaded(), Some(Reason::HostMapped));
    drop(fault);
    bench.world.sim.release_stream(stream).unwrap();
    bench.world.sim.ctx_synchronize().unwrap();
    let guard = bench.fault().resident().unwrap();
    bench.check_bytes(&guard);
    assert_eq!((bench.host_pages(), bench.world.sim.live_host_frames()), (0, 0));
    assert_eq!(bench.world.used(), bench.pages());
    drop(guard);
    bench.check_shut();
}

#[test]
fn parts_that_fit_move_and_parts_that_are_pinned_send_the_rest_to_the_host() {
    let bench = bench(6, 3);
    drop(bench.host_mapped());
    bench.world.sim.ctx_synchronize().unwrap();
    let vbar = bench.bar.vbar();
    let part = |pages: std::ops::Range<u64>| {
        vbar.fault(pages.start * P..pages.end * P, bench.world.stream).unwrap()
    };
    let two = part(0..2).resident().unwrap();
    assert_eq!(&bench.drawn()[..4], "PPhh");
    assert_eq!(part(1..6).offloaded(), Some(Reason::HostMapped));
    // The budget's last frame is free: what needs two finds the others pinned.
    bench.world.sim.ctx_synchronize().unwrap();
    let both = part(2..4);
    assert_eq!(both.offloaded(), Some(Reason::HostMapped));
    bench.check_bytes(&bench.host_mapped());
    drop((two, both));
    bench.check_shut();
}

#[test]
fn a_captured_stream_gets_no_host_frames() {
    let bench = bench(6, 2);
    let stream: Stream = bench.world.stream;
    bench.world.sim.begin_capture(stream, CaptureMode::Global).unwrap();
    assert_eq!(bench.fault().offloaded(), Some(Reason::TooLarge));
    assert_eq!(bench.host_pages(), 0);
    drop(bench.world.sim.end_capture(stream).unwrap());

    // What somebody reads there cannot be captured, and what nobody reads moves.
    let guard = bench.host_mapped();
    bench.world.runtime.set_budget(Some(32 * P)).unwrap();
    for (expected, guard) in [(Some(Reason::Capture), Some(guard)), (None, None)] {
        bench.world.sim.begin_capture(stream, CaptureMode::Global).unwrap();
        assert_eq!(bench.fault().offloaded(), expected);
        drop(bench.world.sim.end_capture(stream).unwrap());
        drop(guard);
        bench.world.sim.ctx_synchronize().unwrap();
    }
    bench.check_shut();
}

#[test]
fn poison_stands_in_for_what_left_the_host_and_no_stream_waits_for_the_bytes() {
    let options = RuntimeOptions { poison: Poison::On, ..host_options(3) };
    let bench = bench_on(ROOMY, 6, options);
    for _ in 0..2 {
        let whole = 0..bench.bar.vbar().bytes();
        let fault = bench.bar.vbar().fault(whole, Stream::NONE).unwrap();
        let Fault::HostMapped(guard) = fault else { panic!("{fault:?}") };
        bench.check_bytes(&guard);
        assert_eq!(bench.world.runtime.numbers().poisoned_pages, 0);
        drop(guard);
        assert_eq!(bench.world.runtime.trim_host_frames().unwrap(), bench.pages() * P);
        assert_eq!(bench.world.runtime.numbers().poisoned_pages, bench.pages());
    }
    bench.check_shut();
}

/// Fails the `nth` call of a verb while three pages are mapped; whether the fault was served.
fn fail_at(verb: Verb, nth: u64, count: u64, code: DriverCode) -> bool {
    let bench = bench(3, 0);
    let name = format!("{verb} {nth} {count} {}", code.0);
    bench.world.sim.fail(verb, nth - 1, count, code);
    let served = match bench.bar.vbar().fault(0..3 * P, bench.world.stream) {
        Ok(Fault::HostMapped(_)) => true,
        Ok(Fault::Offloaded(refusal)) => {
            assert_eq!(refusal.reason, Reason::TooLarge, "{name}");
            false
        }
        Ok(Fault::Resident(_)) => panic!("{name}: there is no budget"),
        Err(error) => {
            assert_eq!(error.code(), ErrorCode::Driver, "{name}: {error}");
            false
        }
    };
    bench.world.sim.heal();
    bench.world.sim.ctx_synchronize().unwrap();
    bench.world.runtime.refresh().unwrap();
    // Pages whose bytes came before another one's failed are good.
    let kept = bench.drawn().matches('h').count() as u64;
    let absent = bench.drawn().matches('.').count() as u64;
    assert_eq!(absent + kept, bench.pages(), "{name}: {}", bench.drawn());
    assert_eq!((bench.world.sim.live_host_frames(), bench.host_pages()), (kept, kept), "{name}");
    bench.world.check();
    // A driver that refused such frames for good is not asked again.
    if served || verb != Verb::MemCreateHost || code.is_transient() {
        bench.check_bytes(&bench.host_mapped());
    }
    bench.check_shut();
    served
}

#[test]
fn a_failure_at_any_step_leaves_everything_as_it_was() {
    let verbs = [
        (Verb::MemCreateHost, 3),
        (Verb::MemMap, 3),
        (Verb::MemSetAccess, 1),
        (Verb::MemcpyHtodAsync, 3),
    ];
    for (verb, calls) in verbs {
        for nth in 1..=calls {
            assert!(!fail_at(verb, nth, 1, DriverCode::INVALID_VALUE), "{verb} {nth}");
            // Transient codes are outlasted, and give up when they stay.
            for code in [DriverCode::OUT_OF_MEMORY, DriverCode::NOT_READY] {
                assert!(fail_at(verb, nth, 2, code), "{verb} {nth}");
                assert!(!fail_at(verb, nth, u64::MAX, code), "{verb} {nth}");
            }
        }
        assert!(fail_at(verb, calls + 1, 1, DriverCode::INVALID_VALUE), "{verb}");
    }
    for nth in 1..=4 {
        fail_at(Verb::EventRecord, nth, 1, DriverCode::INVALID_VALUE);
        fail_at(Verb::EventQuery, nth, 1, DriverCode::NOT_READY);
    }
}

#[test]
fn what_cannot_be_unmapped_is_set_aside() {
    let bench = bench(3, 0);
    bench.world.sim.fail_nth(Verb::MemSetAccess, 1, DriverCode::INVALID_VALUE);
    bench.world.sim.fail_nth(Verb::MemUnmap, 2, DriverCode::INVALID_VALUE);
    assert!(bench.bar.vbar().fault(0..3 * P, bench.world.stream).is_err());
    assert_eq!(bench.drawn(), ".X..");
    assert_eq!((bench.host_pages(), bench.world.sim.live_host_frames()), (1, 1));
    assert_eq!(bench.fault().offloaded(), Some(Reason::TooLarge));
    bench.world.check();
}

#[test]
fn threads_read_right_bytes_wherever_these_are() {
    for threads in [Threads::Off, Threads::On] {
        check_threads(threads);
    }
}

fn check_threads(threads: Threads) {
    const THREADS: u64 = 4;
    let options = RuntimeOptions { threads: Some(threads), ..host_options(2) };
    let bench = bench_on(ROOMY, 8, options);
    let (world, vbar) = (&bench.world, bench.bar.vbar());
    let tensors = bench.bar.model().tensors();
    let sums: Vec<u64> = tensors
        .iter()
        .map(|tensor| pattern_sum(tensor.bytes, tensor_seed(SEED, &tensor.name)))
        .collect();
    let wrong = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (sums, wrong, bench) = (&sums, &wrong, &bench);
            scope.spawn(move || {
                let world = &bench.world;
                world.sim.ctx_set_current(Some(world.runtime.device().context)).unwrap();
                let stream = world.another_stream();
                let target = bench.target.offset((thread + 1) * 8);
                let mut expected = 0u64;
                for round in 0..120 {
                    let first = (round * 7 + thread * 3) as usize % tensors.len();
                    let last = (first + 1 + round as usize % 5).min(tensors.len());
                    let range = bench.bar.range(first).start..bench.bar.range(last - 1).end;
                    let Some(guard) = vbar.fault(range, stream).unwrap().readable() else {
                        continue;
                    };
                    for at in first..last {
                        let source = bench.bar.address(at);
                        world.sum(source, tensors[at].bytes, target, Default::default(), stream);
                        expected = expected.wrapping_add(sums[at]);
                    }
                    drop(guard);
                }
                if world.word(target, stream) != expected {
                    wrong.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for round in 0..60 {
            let pages = [0, 2, 5, 32][round % 4];
            world.runtime.set_budget(Some(pages * P)).unwrap();
            let allowed = [u64::MAX, 4 * P, 0][round % 3];
            bench.room.0.store(allowed, Ordering::Relaxed);
            world.runtime.refresh().unwrap();
            world.runtime.trim_host_frames().unwrap();
        }
    });
    assert_eq!(wrong.into_inner(), 0);
    bench.check_shut();
}

#[test]
fn a_forked_child_leaves_it_alone() {
    let bench = bench(4, 1);
    let guard = bench.host_mapped();
    let calls = || Verb::ALL.iter().map(|verb| bench.world.sim.calls(*verb)).sum::<u64>();
    let before = calls();
    let ending = |result: vbar::Result<()>| {
        result.is_err_and(|error| error.code() == ErrorCode::ProcessEnding)
    };
    let whole = 0..bench.bar.vbar().bytes();
    let good = crate::forked::in_child(|| {
        let runtime = &bench.world.runtime;
        let all = ending(bench.bar.vbar().fault(whole, bench.world.stream).map(drop))
            && ending(runtime.trim_host_frames().map(drop));
        drop(guard);
        all && calls() == before
    });
    assert!(good, "the child called the driver, or did not say that it may not");
    assert_eq!(bench.host_pages(), bench.pages());
    assert_eq!(bench.drawn(), "h".repeat(bench.pages() as usize));
    bench.check_shut();
}

#[test]
fn pins_outlive_their_vbar_and_a_lost_device_is_left_alone() {
    let bench = bench(4, 1);
    let token = bench.host_mapped().into_token();
    bench.bar.vbar().close();
    bench.world.check();
    assert_eq!(bench.host_pages(), bench.pages());
    bench.world.runtime.unpin(token, bench.world.stream).unwrap();
    bench.world.sim.ctx_synchronize().unwrap();
    bench.world.runtime.refresh().unwrap();
    assert_eq!((bench.host_pages(), bench.world.sim.live_host_frames()), (0, 0));
    bench.check_shut();

    // Nobody is left to give these back.
    let bench = self::bench(4, 1);
    let _token = bench.host_mapped().into_token();
    bench.check_shut();

    let bench = self::bench(4, 1);
    drop(bench.host_mapped());
    bench.world.sim.lose_device(DEVICE, DriverCode::ILLEGAL_ADDRESS);
    let whole = 0..bench.bar.vbar().bytes();
    let error = bench.bar.vbar().fault(whole, bench.world.stream).unwrap_err();
    assert_eq!(error.code(), ErrorCode::DeviceLost);
    assert_eq!(bench.world.runtime.trim_host_frames().unwrap_err().code(), ErrorCode::DeviceLost);
    assert_eq!(bench.host_pages(), bench.pages());
}
