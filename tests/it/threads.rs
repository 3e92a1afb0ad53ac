//! Many threads at once, with kernels that look at every byte: what one page at a time gets right
//! must hold when faults, fills, evictions and unpins meet.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use vbar::driver::Driver;
use vbar::model::synth::{synthesize, tensor_seed};
use vbar::options::{Eviction, RuntimeOptions};
use vbar::{AllocationFault, Fault};

use crate::world::{P, ROOMY, World, budget_options, pattern_sum};

const THREADS: u64 = 6;

/// A cheap sequence of numbers, another one for each thread.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }
}

fn each_thread(world: &World, work: impl Fn(u64, Draw) + Sync) {
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let work = &work;
            scope.spawn(move || {
                let context = world.runtime.device().context;
                world.sim.ctx_set_current(Some(context)).unwrap();
                work(thread, Draw(thread.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1));
            });
        }
    });
}

#[test]
fn threads_share_a_model_that_is_too_large() {
    for eviction in [Eviction::Aliasing, Eviction::Strict] {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("model.safetensors");
        synthesize(&path, 48 * P, 5).unwrap();
        let world = World::with(ROOMY, RuntimeOptions { eviction, ..budget_options(30) });
        let bar = world.runtime.open_model(&path).unwrap();
        let tensors = bar.model().tensors();
        let sums: Vec<u64> = tensors
            .iter()
            .map(|tensor| pattern_sum(tensor.bytes, tensor_seed(5, &tensor.name)))
            .collect();
        let refused = AtomicU64::new(0);
        let target = world.scratch();
        let streams: Vec<_> = (0..THREADS).map(|_| world.another_stream()).collect();
        each_thread(&world, |thread, mut draw| {
            let (stream, target) = (streams[thread as usize], target.offset(thread * 8));
            let mut expected = 0u64;
            for _ in 0..400 {
                let tensor = draw.below(tensors.len() as u64) as usize;
                match bar.fault(tensor, stream).unwrap() {
                    Fault::Resident(guard) | Fault::HostMapped(guard) => {
                        let (address, bytes) = (guard.address(), guard.bytes());
                        world.sum(address, bytes, target, Duration::ZERO, stream);
                        expected = expected.wrapping_add(sums[tensor]);
                    }
                    // Others pin what could give way.
                    Fault::Offloaded(_) => drop(refused.fetch_add(1, Ordering::Relaxed)),
                }
                if draw.below(64) == 0 {
                    bar.vbar().free_memory(4 * P).unwrap();
                }
            }
            assert_eq!(world.word(target, stream), expected, "{eviction:?} thread {thread}");
        });
        world.check();
        assert!(refused.into_inner() < THREADS * 400 / 2, "nearly everything was refused");
        drop(bar);
        world.check_shut();
    }
}

#[test]
fn threads_fill_and_read_the_same_allocations() {
    for eviction in [Eviction::Aliasing, Eviction::Strict] {
        let world = World::evicting(10, eviction);
        let bars = [world.vbar(6), world.vbar(6), world.vbar(6)];
        let allocations: Vec<_> = (0..18)
            .map(|at| bars[at % 3].allocate([P / 2, P, P + 512][at / 3 % 3]).unwrap())
            .collect();
        let target = world.scratch();
        let streams: Vec<_> = (0..THREADS).map(|_| world.another_stream()).collect();
        let (hits, fills) = (AtomicU64::new(0), AtomicU64::new(0));
        each_thread(&world, |thread, mut draw| {
            let (stream, target) = (streams[thread as usize], target.offset(thread * 8));
            let mut expected = 0u64;
            for _ in 0..800 {
                let at = draw.below(18);
                match allocations[at as usize].fault_wait(stream).unwrap() {
                    AllocationFault::Resident(guard) => {
                        let (address, bytes) = (guard.address(), guard.bytes());
                        world.sum(address, bytes, target, Duration::ZERO, stream);
                        expected = expected.wrapping_add(pattern_sum(bytes, at));
                        hits.fetch_add(1, Ordering::Relaxed);
                    }
                    AllocationFault::Refill(fill) => {
                        world.write(fill.address(), fill.bytes(), at, stream);
                        if draw.below(8) > 0 {
                            drop(fill.commit(stream).unwrap());
                        }
                        fills.fetch_add(1, Ordering::Relaxed);
                    }
                    AllocationFault::Offloaded(_) => bars[at as usize % 3].prioritise().unwrap(),
                    AllocationFault::Busy => panic!("the call waits"),
                }
                match draw.below(40) {
                    0 => drop(bars[at as usize % 3].free_memory(2 * P).unwrap()),
                    1 => drop(world.runtime.trim(6 * P).unwrap()),
                    2 => world.runtime.set_budget(Some((6 + draw.below(5)) * P)).unwrap(),
                    _ => {}
                }
            }
            assert_eq!(world.word(target, stream), expected, "{eviction:?} thread {thread}");
        });
        world.check();
        let (hits, fills) = (hits.into_inner(), fills.into_inner());
        assert!(hits > 100 && fills > 20, "{hits} hits, {fills} fills");
        drop((allocations, bars));
        world.check_shut();
    }
}

#[test]
fn vbars_come_and_go_while_others_take_their_pages() {
    for eviction in [Eviction::Aliasing, Eviction::Strict] {
        let world = World::evicting(6, eviction);
        let stays = world.vbar(4);
        stays.set_class(1).unwrap();
        let streams: Vec<_> = (0..THREADS).map(|_| world.another_stream()).collect();
        each_thread(&world, |thread, mut draw| {
            let stream = streams[thread as usize];
            for round in 0..300 {
                if thread == 0 {
                    let page = draw.below(4);
                    stays.prioritise().unwrap();
                    drop(stays.fault(page * P..(page + 1) * P, stream).unwrap());
                    continue;
                }
                let bar = world.vbar(4);
                bar.set_class(draw.below(2) as i32).unwrap();
                let pages = 1 + draw.below(3);
                let guard = bar.fault(0..pages * P, stream).unwrap().resident();
                let token = guard.and_then(|guard| {
                    world.write(guard.address(), pages * P, round, stream);
                    (draw.below(4) == 0).then(|| guard.into_token())
                });
                drop(bar);
                token.map_or(Ok(()), |token| world.runtime.unpin(token, stream)).unwrap();
            }
        });
        world.sim.ctx_synchronize().unwrap();
        // Unlike a refresh it looks after closed VBARs however lately that was done.
        world.runtime.trim(u64::MAX).unwrap();
        world.check();
        let numbers = world.runtime.numbers();
        assert_eq!((numbers.bars, numbers.closing_bars, numbers.lingering_mappings), (1, 0, 0));
        drop(stays);
        world.check_shut();
    }
}
