//! Eight threads call everything on VBARs that any of them closes at any moment: whatever meets, a
//! call finishes or says `Closed`, pinned bytes stay what they were, and nothing is left.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tempfile::TempDir;
use vbar::driver::Driver;
use vbar::driver::sim::Verb;
use vbar::memory::pager::{Freed, HeldPins, Shortfall};
use vbar::model::synth::{synthesize, tensor_seed};
use vbar::options::{Eviction, Poison};
use vbar::units::{DeviceAddress, Stream};
use vbar::{
    Allocation, AllocationFault, Error, ErrorCode, Fault, ModelBar, RuntimeOptions, Vbar,
    set_wait_check,
};

use crate::world::{P, ROOMY, World, budget_options, drawn, pattern_sum, resident};

const THREADS: u64 = 8;
const OPERATIONS: u64 = 500;
const SLOTS: u64 = 4;
const SEED: u64 = 21;

/// A bare VBAR and its allocations.
struct Bare {
    vbar: Vbar,
    pieces: Vec<Allocation>,
}

/// VBARs that all threads share, and replace when they are closed.
struct Shared<'a> {
    world: &'a World,
    bare: Vec<Mutex<Arc<Bare>>>,
    bound: Mutex<Arc<ModelBar>>,
    model: std::path::PathBuf,
    closed: AtomicU64,
    served: AtomicU64,
}

/// One thread's cheap sequence of numbers, its stream, and what its kernels must come to.
struct Worker<'a> {
    shared: &'a Shared<'a>,
    random: u64,
    stream: Stream,
    target: DeviceAddress,
    expected: u64,
}

fn open_bare(world: &World) -> Arc<Bare> {
    let vbar = world.vbar(5);
    let sizes = [P / 2, P, P + 512, P / 2];
    let pieces = sizes.iter().map(|bytes| vbar.allocate(*bytes).unwrap()).collect();
    Arc::new(Bare { vbar, pieces })
}

impl<'a> Shared<'a> {
    fn new(world: &'a World, folder: &TempDir) -> Self {
        let model = folder.path().join("model.safetensors");
        synthesize(&model, 12 * P, SEED).unwrap();
        let bound = Mutex::new(Arc::new(world.runtime.open_model(&model).unwrap()));
        let bare = (0..SLOTS).map(|_| Mutex::new(open_bare(world))).collect();
        let (closed, served) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { world, bare, bound, model, closed, served }
    }
}

impl Worker<'_> {
    fn below(&mut self, end: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % end
    }

    /// What the call came to, unless the VBAR is closed; nothing else may fail.
    #[track_caller]
    fn open<T>(&self, answer: Result<T, Error>) -> Option<T> {
        match answer {
            Ok(value) => {
                self.shared.served.fetch_add(1, Ordering::Relaxed);
                Some(value)
            }
            Err(error) => {
                assert_eq!(error.code(), ErrorCode::Closed, "{error}");
                self.shared.closed.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    fn sum(&mut self, address: DeviceAddress, bytes: u64, expected: u64) {
        self.shared.world.sum(address, bytes, self.target, Duration::ZERO, self.stream);
        self.expected = self.expected.wrapping_add(expected);
    }

    fn operate(&mut self) {
        if self.below(6) == 0 {
            return self.use_bound();
        }
        let slot = self.below(SLOTS);
        let bare = Arc::clone(&self.shared.bare[slot as usize].lock());
        let vbar = &bare.vbar;
        match self.below(24) {
            0..10 => self.use_piece(&bare, slot),
            10 | 11 => self.use_pages(vbar),
            12 => drop(self.open(vbar.free_memory(2 * P))),
            13 => drop(self.open(vbar.prioritise())),
            14 => drop(self.open(vbar.deprioritise())),
            15 => drop(self.open(vbar.set_class(1))),
            16 => drop(self.open(vbar.set_floor(1))),
            17 => drop(self.open(vbar.set_watermark(4))),
            18 => drop(self.open(vbar.end_of_run(self.stream, HeldPins::Keep))),
            19 => drop(self.open(vbar.allocate(512))),
            20 => {
                assert_eq!((vbar.marks().page_count, vbar.draw(5).len()), (5, 5));
                assert_eq!(vbar.residency().len(), 5);
            }
            21 if self.below(4) == 0 => vbar.close(),
            21 | 22 => self.replace(slot),
            _ => drop(self.shared.world.runtime.trim(4 * P).unwrap()),
        }
    }

    /// Reads or writes an allocation; now and then its VBAR is closed under the guard.
    fn use_piece(&mut self, bare: &Bare, slot: u64) {
        let at = self.below(bare.pieces.len() as u64);
        let closes = self.below(40) == 0;
        let seed = slot * 16 + at;
        match self.open(bare.pieces[at as usize].fault_wait(self.stream)) {
            Some(AllocationFault::Resident(guard)) => {
                if closes {
                    bare.vbar.close();
                }
                self.sum(guard.address(), guard.bytes(), pattern_sum(guard.bytes(), seed));
                if self.below(4) == 0 {
                    let token = guard.into_token();
                    std::thread::yield_now();
                    self.shared.world.runtime.unpin(token, self.stream).unwrap();
                }
            }
            Some(AllocationFault::Refill(fill)) => {
                self.shared.world.write(fill.address(), fill.bytes(), seed, self.stream);
                if closes {
                    bare.vbar.close();
                }
                if self.below(8) > 0 {
                    drop(fill.commit(self.stream).unwrap());
                }
            }
            Some(AllocationFault::Offloaded(_)) => drop(self.open(bare.vbar.prioritise())),
            Some(AllocationFault::Busy) => panic!("the call waits"),
            None => {}
        }
    }

    /// Pages of two VBARs at once, or of none.
    fn use_pages(&mut self, vbar: &Vbar) {
        let other = self.below(SLOTS);
        let other = Arc::clone(&self.shared.bare[other as usize].lock());
        let ranges = [(vbar, 0..2 * P), (&other.vbar, P..2 * P)];
        let runtime = &self.shared.world.runtime;
        if let Some(Fault::Resident(guards)) = self.open(runtime.fault_many(&ranges, self.stream)) {
            assert_eq!(guards.len(), 2);
        }
    }

    fn use_bound(&mut self) {
        let bound = Arc::clone(&self.shared.bound.lock());
        let tensors = bound.model().tensors();
        let tensor = self.below(tensors.len() as u64) as usize;
        let (bytes, seed) = (tensors[tensor].bytes, tensor_seed(SEED, &tensors[tensor].name));
        let closes = self.below(10) == 0;
        if let Some(Fault::Resident(guard)) = self.open(bound.fault(tensor, self.stream)) {
            if closes {
                bound.vbar().close();
            }
            self.sum(guard.address(), bytes, pattern_sum(bytes, seed));
        }
        if closes {
            let again = self.shared.world.runtime.open_model(&self.shared.model).unwrap();
            *self.shared.bound.lock() = Arc::new(again);
        }
    }

    fn replace(&mut self, slot: u64) {
        let fresh = open_bare(self.shared.world);
        let old = std::mem::replace(&mut *self.shared.bare[slot as usize].lock(), fresh);
        if self.below(2) == 0 {
            old.vbar.close();
        }
    }
}

fn run(eviction: Eviction, poison: Poison) {
    let folder = TempDir::new().unwrap();
    let world = World::with(ROOMY, RuntimeOptions { eviction, poison, ..budget_options(12) });
    let shared = Shared::new(&world, &folder);
    let target = world.scratch();
    let streams: Vec<_> = (0..THREADS).map(|_| world.another_stream()).collect();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (shared, stream) = (&shared, streams[thread as usize]);
            scope.spawn(move || {
                let context = shared.world.runtime.device().context;
                shared.world.sim.ctx_set_current(Some(context)).unwrap();
                let random = thread.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
                let target = target.offset(thread * 8);
                let mut worker = Worker { shared, random, stream, target, expected: 0 };
                (0..OPERATIONS).for_each(|_| worker.operate());
                let word = shared.world.word(target, stream);
                assert_eq!(word, worker.expected, "{eviction:?} thread {thread}");
            });
        }
    });
    let (closed, served) = (shared.closed.load(Ordering::Relaxed), &shared.served);
    let served = served.load(Ordering::Relaxed);
    assert!(closed > 20 && served > closed, "{closed} calls were refused, {served} served");
    drop(shared);
    world.sim.ctx_synchronize().unwrap();
    world.runtime.refresh().unwrap();
    world.runtime.trim(0).unwrap();
    let numbers = world.runtime.numbers();
    assert_eq!((numbers.bars, numbers.closing_bars, numbers.used_bytes), (0, 0, 0), "{numbers:?}");
    world.check();
    world.check_shut();
}

#[test]
fn threads_call_everything_on_vbars_that_others_close() {
    run(Eviction::Aliasing, Poison::Off);
    run(Eviction::Strict, Poison::Off);
}

#[test]
fn threads_call_everything_while_evicted_pages_are_poisoned() {
    run(Eviction::Aliasing, Poison::On);
    run(Eviction::Strict, Poison::On);
}

/// Whether work uses the closed VBAR's pages when it is closed.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Closed {
    Idle,
    InUse,
}

#[test]
fn frames_in_the_hands_of_another_thread_are_waited_for() {
    for closed in [Closed::Idle, Closed::InUse] {
        let world = World::budget(4);
        let (old, new) = (world.vbar(4), world.vbar(4));
        world.touch(&old, 0..4).unwrap();
        let sim = Arc::clone(&world.sim);
        if closed == Closed::InUse {
            sim.hold_stream(world.stream).unwrap();
            let guard = resident(&world, &old, 0..4);
            world.write(guard.address(), P, 1, world.stream);
            drop(guard);
            old.close();
            sim.release_stream(world.stream).unwrap();
            sim.stream_synchronize(world.stream).unwrap();
        }
        let before = sim.calls(Verb::MemUnmap);
        sim.hang(Verb::MemUnmap);
        std::thread::scope(|scope| {
            let (runtime, old, sim) = (&world.runtime, &old, &world.sim);
            scope.spawn(move || match closed {
                Closed::Idle => old.close(),
                Closed::InUse => runtime.refresh().unwrap(),
            });
            while sim.calls(Verb::MemUnmap) == before {
                std::thread::yield_now();
            }
            // Asked once somebody waits: from then on the other thread gets on.
            let healed = Arc::clone(sim);
            set_wait_check(Some(Box::new(move || {
                healed.heal();
                ControlFlow::Continue(())
            })));
            let served = world.touch(&new, 0..4);
            set_wait_check(None);
            sim.heal();
            assert_eq!(served, Ok(()), "{closed:?}");
        });
        world.check();
    }
}

#[test]
fn threads_that_notice_a_smaller_budget_evict_no_more_than_one_would() {
    let world = World::budget(8);
    let vbar = world.vbar(8);
    world.touch(&vbar, 0..8).unwrap();
    let (runtime, sim) = (&world.runtime, &world.sim);
    let before = sim.calls(Verb::MemUnmap);
    sim.hang(Verb::MemUnmap);
    std::thread::scope(|scope| {
        scope.spawn(|| runtime.set_budget(Some(5 * P)).unwrap());
        while sim.calls(Verb::MemUnmap) == before {
            std::thread::yield_now();
        }
        let second = scope.spawn(|| runtime.refresh().unwrap());
        while !second.is_finished() && sim.calls(Verb::MemUnmap) == before + 1 {
            std::thread::yield_now();
        }
        sim.heal();
    });
    assert_eq!((drawn(&vbar, 8).as_str(), world.used()), ("#####...", 5));
    world.check();
}

/// Runs `begin` on another thread and, while it is in the middle of its first call of `verb`,
/// `then` on this one; the other gets on as soon as this one waits.
fn in_the_middle_of<T>(
    world: &World,
    verb: Verb,
    begin: impl FnOnce() + Send,
    then: impl FnOnce() -> T,
) -> T {
    let sim = &world.sim;
    let before = sim.calls(verb);
    sim.hang(verb);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            sim.ctx_set_current(Some(world.runtime.device().context)).unwrap();
            begin();
        });
        while sim.calls(verb) == before {
            std::thread::yield_now();
        }
        let healed = Arc::clone(sim);
        set_wait_check(Some(Box::new(move || {
            healed.heal();
            ControlFlow::Continue(())
        })));
        let done = then();
        set_wait_check(None);
        sim.heal();
        done
    })
}

#[test]
fn a_trim_waits_for_frames_in_the_hands_of_another_thread() {
    let world = World::budget(4);
    let old = world.vbar(4);
    world.touch(&old, 0..4).unwrap();
    world.sim.ctx_synchronize().unwrap();
    let trim = || world.runtime.trim(P).unwrap();
    let trimmed = in_the_middle_of(&world, Verb::MemUnmap, || old.close(), trim);
    assert_eq!((trimmed, world.used()), (3 * P, 1));
    world.check();
}

#[test]
fn a_trim_takes_frames_that_begin_to_linger_in_the_hands_of_another_thread() {
    let world = World::budget(4);
    let old = world.vbar(2);
    world.touch(&old, 0..2).unwrap();
    world.sim.ctx_synchronize().unwrap();
    world.runtime.refresh().unwrap();
    // Closing takes both pages: the first goes at once, the second has a use that is under way.
    world.sim.hold_stream(world.stream).unwrap();
    let guard = resident(&world, &old, 1..2);
    world.write(guard.address(), P, 1, world.stream);
    drop(guard);
    let trim = || {
        world.sim.release_stream(world.stream).unwrap();
        world.sim.stream_synchronize(world.stream).unwrap();
        world.runtime.trim(0).unwrap()
    };
    let trimmed = in_the_middle_of(&world, Verb::MemUnmap, || old.close(), trim);
    assert_eq!((trimmed, world.used()), (2 * P, 0));
    world.check();
}

#[test]
fn freeing_waits_for_a_page_that_another_thread_faults_in() {
    for whole_device in [false, true] {
        let world = World::budget(4);
        let vbar = world.vbar(2);
        let (sender, has_freed) = std::sync::mpsc::channel::<()>();
        let (in_world, faulted) = (&world, &vbar);
        let fault = move || {
            let guard = resident(in_world, faulted, 0..1);
            // Until it was asked for: what is pinned then is told.
            let _ = has_freed.recv();
            drop(guard);
        };
        let free = || {
            let freed = match whole_device {
                true => world.runtime.free_memory(u64::MAX),
                false => vbar.free_memory(u64::MAX),
            };
            drop(sender);
            freed.unwrap()
        };
        let freed = in_the_middle_of(&world, Verb::MemMap, fault, free);
        let pinned = Freed { bytes: 0, shortfall: Some(Shortfall::AllPinned(1)) };
        assert_eq!(freed, pinned, "whole device: {whole_device}");
        world.check();
    }
}

#[test]
fn freeing_takes_a_page_that_another_thread_fetches() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    synthesize(&path, 8 * P, SEED).unwrap();
    let world = World::budget(4);
    world.runtime.open_engine_by_hand();
    let model = world.runtime.open_model(&path).unwrap();
    let pages = model.range(0).end.div_ceil(P) - model.range(0).start / P;
    model.prefetch(0).unwrap();
    let drive = || world.runtime.drive_engine().unwrap();
    let free = || model.vbar().free_memory(pages * P).unwrap();
    let freed = in_the_middle_of(&world, Verb::MemMap, drive, free);
    assert_eq!(freed, Freed { bytes: pages * P, shortfall: None });
    world.check();
}
