//! PyTorch's allocator at the edges: pages of every size, absurd requests, few addresses, threads
//! whose frames move, forks in the middle of a record.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode};
use vbar::options::{Eviction, RuntimeOptions};
use vbar::torch::{Freed, PoolId};
use vbar::units::{DeviceAddress, KIB, MIB, PageSize, Stream};

use crate::forked::in_child;
use crate::torch::{Random, Torch, check_books};
use crate::torch_traces::trace::{self, Event};
use crate::world::{DEVICE, P, ROOMY, World, options, pattern_sum};

#[test]
fn pages_of_every_size_serve_blocks_of_every_size() {
    for shift in [12u32, 13, 15, 16, 20, 21, 22, 25, 27, 29] {
        let page = 1u64 << shift;
        let page_size = PageSize::new(page).unwrap();
        let granularity = page.min(2 * MIB) / KIB;
        let capacity = (page * 24).max(64 * MIB);
        let world = World::with(
            &format!("capacity={capacity},granularity={granularity}K"),
            RuntimeOptions { page_size, ..options() },
        );
        let allocator = world.runtime.torch_allocator().unwrap();
        let (one, two) = (world.stream, world.another_stream());
        let mut sizes = vec![1, 511, 512, 513, 4096, 4097, 33 * KIB, MIB, MIB + 1];
        for near in [page / 128, page / 64, page / 2, page, 2 * page, 5 * page] {
            sizes.extend([near - 1, near, near + 1]);
        }
        sizes.retain(|bytes| *bytes > 0 && *bytes < capacity / 3);
        for round in 0..3 {
            let mut live = Vec::new();
            for (index, bytes) in sizes.iter().enumerate() {
                let stream = if index % 3 == round { two } else { one };
                let block = allocator.malloc(*bytes as usize, stream).unwrap();
                let (first, written) = (DeviceAddress(block), bytes.next_multiple_of(8).min(P));
                world.write(first, written, *bytes, stream);
                assert_eq!(allocator.base_of(block + bytes / 2).unwrap().0, block, "{page}");
                live.push(block);
                if index % 2 == round % 2 {
                    assert_eq!(allocator.free(live.swap_remove(index / 2)), Freed::Cached);
                }
            }
            check_books(&allocator);
            for block in live {
                assert_eq!(allocator.free(block), Freed::Cached);
            }
            if round == 1 {
                allocator.empty_cache().unwrap();
                assert_eq!(allocator.statistics().reserved_bytes.all.current, 0, "{page}");
            }
        }
        for absurd in [usize::MAX, usize::MAX - 511, isize::MAX as usize, 1 << 62, 1 << 45, 1 << 40]
        {
            assert!(allocator.malloc(absurd, one).unwrap_err().is_memory(), "{absurd:#x}");
            assert_eq!(allocator.segment_malloc(absurd, one), None, "{absurd:#x}");
        }
        allocator.empty_cache().unwrap();
        check_books(&allocator);
        assert_eq!(allocator.statistics().reserved_bytes.all.current, 0, "{page}");
        assert_eq!(world.sim.violations(), Vec::<String>::new());
    }
}

/// An arena that is hardly larger than the blocks: what has moved gives its addresses back.
#[test]
fn few_addresses_serve_what_fits_them() {
    for eviction in [Eviction::Aliasing, Eviction::Strict] {
        let options = RuntimeOptions { eviction, ..options() };
        let torch =
            Torch::of(World::with("capacity=64M,granularity=64K,address_space=5M", options));
        let mut random = Random(5);
        let mut most = 64;
        while torch.allocator.malloc((most * P) as usize, torch.world.stream).is_err() {
            most -= 1;
        }
        assert!(most >= 16, "an arena of {most} pages");
        let torch = Torch::of(World::with(
            "capacity=64M,granularity=64K,address_space=5M",
            RuntimeOptions { eviction, ..crate::world::options() },
        ));
        let (one, two) = (torch.world.stream, torch.world.another_stream());
        for round in 0..400u64 {
            let bytes = (1 + random.below(most)) * P - 512 * (round % 2);
            let stream = if round % 3 == 0 { two } else { one };
            let block = torch.malloc_on(bytes, stream);
            torch.write(block, bytes, round, stream);
            torch.allocator.free(block);
            if round % 50 == 0 {
                torch.check();
            }
        }
    }
}

/// Threads with large blocks, whose frames move between them and weights.
#[test]
fn threads_whose_frames_move_never_see_others_bytes() {
    for eviction in [Eviction::Aliasing, Eviction::Strict] {
        let torch = Torch::of(World::with(ROOMY, RuntimeOptions { eviction, ..options() }));
        let context = Some(torch.world.runtime.device().context);
        let weights = torch.world.vbar(64);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                torch.world.sim.ctx_set_current(context).unwrap();
                for round in 0..150 {
                    let budget = (500 + round * 37 % 400) * P;
                    torch.world.runtime.set_budget(Some(budget)).unwrap();
                    weights.prioritise().unwrap();
                    let _ = torch.world.touch(&weights, round % 60..round % 60 + 4);
                }
            });
            for thread in 0..4u64 {
                let torch = &torch;
                scope.spawn(move || {
                    torch.world.sim.ctx_set_current(context).unwrap();
                    move_and_check(torch, thread);
                });
            }
        });
        torch.allocator.empty_cache().unwrap();
        assert_eq!((torch.reserved(), torch.allocator.statistics().unknown_free), (0, 0));
        torch.check();
    }
}

/// What one of the threads does.
fn move_and_check(torch: &Torch, thread: u64) {
    let (stream, target) = (torch.world.another_stream(), torch.world.scratch());
    let (mut random, mut expected) = (Random(thread + 1), 0u64);
    let free = |block, is_segment| match is_segment {
        true => torch.allocator.segment_free(block),
        false => torch.allocator.free(block),
    };
    let mut own: Vec<(u64, u64, u64, bool)> = Vec::new();
    for round in 0..300 {
        if round % 8 == 0 {
            for _ in 0..400 {
                let Ok(block) = torch.allocator.malloc(20 * P as usize, stream) else { break };
                torch.allocator.free(block);
            }
        }
        if random.below(3) > 0 || own.is_empty() {
            let limit = if random.below(4) == 0 { P } else { 50 * P };
            let bytes = 8 + random.below(limit) / 8 * 8;
            let is_segment = random.below(9) == 0;
            let block = match is_segment {
                true => torch.allocator.segment_malloc(bytes as usize, stream),
                false => torch.allocator.malloc(bytes as usize, stream).ok(),
            };
            let Some(block) = block else { continue };
            let seed = thread << 32 | round;
            torch.write(block, bytes, seed, stream);
            own.push((block, bytes, seed, is_segment));
        }
        if own.len() > 6 || random.below(2) == 0 {
            let at = random.below(own.len() as u64) as usize;
            let (block, bytes, seed, is_segment) = own.swap_remove(at);
            torch.world.sum(DeviceAddress(block), bytes, target, Duration::ZERO, stream);
            expected = expected.wrapping_add(pattern_sum(bytes, seed));
            assert_ne!(free(block, is_segment), Freed::Unknown);
        }
        if random.below(64) == 0 {
            torch.allocator.empty_cache().unwrap();
        }
    }
    assert_eq!(torch.world.word(target, stream), expected, "thread {thread}");
    for (block, _, _, is_segment) in own {
        assert_ne!(free(block, is_segment), Freed::Unknown);
    }
}

/// The child has the parent's buffer and its place in the file: it writes neither.
#[test]
fn a_forked_child_writes_nothing_to_a_record() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.txt");
    let torch = RefCell::new(Some(Torch::budget(8)));
    {
        let held = torch.borrow();
        let torch = held.as_ref().unwrap();
        torch.allocator.start_recording(&path).unwrap();
        (0..5).for_each(|_| assert_eq!(torch.allocator.free(torch.malloc(700)), Freed::Cached));
    }
    assert!(in_child(|| {
        let torch = torch.borrow_mut().take().unwrap();
        let refused = torch.allocator.stop_recording().is_err();
        torch.allocator.record_stream(4096, Stream::DEFAULT);
        let Torch { world, allocator, .. } = torch;
        drop(allocator);
        // The simulated device is the parent's, with its threads.
        std::mem::forget(world.sim);
        drop(world.runtime);
        refused && std::fs::metadata(&path).unwrap().len() == 0
    }));
    let torch = torch.take().unwrap();
    torch.allocator.free(torch.malloc(700));
    let count = torch.allocator.stop_recording().unwrap();
    assert_eq!(count, 12);
    assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 12);
}

/// What is recorded when its allocator goes is in the file.
#[test]
fn a_record_is_whole_when_its_device_is_closed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.txt");
    let torch = Torch::budget(8);
    torch.allocator.start_recording(&path).unwrap();
    torch.allocator.free(torch.malloc(700));
    torch.check_shut();
    assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 2);
}

/// What threads in pools share.
struct Shared {
    torch: Torch,
    done: AtomicBool,
    blocks: Mutex<Vec<u64>>,
    asked: AtomicU64,
    freed: AtomicU64,
}

impl Shared {
    fn begin_and_end_pools(&self) {
        let allocator = &self.torch.allocator;
        for number in 1.. {
            if self.done.load(Ordering::Relaxed) {
                return;
            }
            let id = PoolId(number % 5, 7);
            allocator.begin_pool(id, Box::new(|_| true));
            std::thread::yield_now();
            allocator.end_pool(id);
            allocator.release_pool(id);
            if number % 7 == 0 {
                allocator.empty_cache().unwrap();
            }
        }
    }

    /// Each record is whole by itself.
    fn record(&self) {
        let (folder, allocator) = (tempfile::tempdir().unwrap(), &self.torch.allocator);
        let path = folder.path().join("trace.txt");
        while !self.done.load(Ordering::Relaxed) {
            allocator.start_recording(&path).unwrap();
            std::thread::sleep(Duration::from_millis(1));
            let count = allocator.stop_recording().unwrap();
            let events = trace::parse(&std::fs::read_to_string(&path).unwrap()).unwrap();
            assert_eq!(events.len() as u64, count);
            let (mut live, mut seen) = (BTreeSet::new(), BTreeSet::new());
            for event in &events {
                match event {
                    Event::Malloc { id, .. } => assert!(live.insert(*id) && seen.insert(*id)),
                    Event::Free { id } => assert!(live.remove(id), "{id} is not live"),
                    Event::Record { id, .. } => assert!(live.contains(id)),
                }
            }
        }
    }

    fn free(&self, block: u64) {
        if self.torch.allocator.free(block) != Freed::Unknown {
            self.freed.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn ask_and_free(&self, thread: u64) {
        let allocator = &self.torch.allocator;
        let (stream, mut random) = (self.torch.world.another_stream(), Random(thread + 11));
        for _ in 0..1500 {
            let most = [4 * KIB, P, 4 * P][random.below(3) as usize];
            let bytes = 8 + random.below(most);
            let Ok(block) = allocator.malloc(bytes as usize, stream) else { continue };
            self.asked.fetch_add(1, Ordering::Relaxed);
            let other = {
                let mut blocks = self.blocks.lock().unwrap();
                blocks.push(block);
                let at = random.below(blocks.len() as u64) as usize;
                // At times it stays, and somebody frees it once more.
                if random.below(8) == 0 { blocks[at] } else { blocks.swap_remove(at) }
            };
            if random.below(3) == 0 {
                allocator.record_stream(other, stream);
            }
            self.free(other);
        }
    }
}

/// Pools that any request may come from are begun, ended and released while threads ask, free what
/// others free too, and are recorded on and off.
#[test]
fn threads_in_pools_that_come_and_go_free_each_block_once() {
    let shared = Shared {
        torch: Torch::of(World::with(ROOMY, options())),
        done: AtomicBool::new(false),
        blocks: Mutex::default(),
        asked: AtomicU64::new(0),
        freed: AtomicU64::new(0),
    };
    std::thread::scope(|scope| {
        let shared = &shared;
        let start = |work: Box<dyn FnOnce() + Send>| {
            scope.spawn(move || {
                let Torch { world, .. } = &shared.torch;
                world.sim.ctx_set_current(Some(world.runtime.device().context)).unwrap();
                work();
            })
        };
        let others =
            [start(Box::new(|| shared.begin_and_end_pools())), start(Box::new(|| shared.record()))];
        let workers = [0, 1, 2, 3].map(|at| start(Box::new(move || shared.ask_and_free(at))));
        let ended = workers.map(|worker| worker.join());
        shared.done.store(true, Ordering::Relaxed);
        others.into_iter().for_each(|other| other.join().unwrap());
        ended.into_iter().for_each(|ended| ended.unwrap());
    });
    let blocks = std::mem::take(&mut *shared.blocks.lock().unwrap());
    blocks.into_iter().for_each(|block| shared.free(block));
    let Shared { torch, asked, freed, .. } = shared;
    assert_eq!(asked.into_inner(), freed.into_inner());
    torch.allocator.empty_cache().unwrap();
    assert_eq!(torch.reserved(), 0);
    torch.check();
}

/// Without virtual memory: the books are those of the driver's own allocations, whatever fails.
#[test]
fn a_device_without_mappings_keeps_its_books() {
    for seed in 1..=6 {
        let world = World::with("capacity=16M,granularity=64K,vmm=0", options());
        let allocator = world.runtime.torch_allocator().unwrap();
        let streams = [world.stream, world.another_stream(), Stream::DEFAULT];
        let mut random = Random(seed * 77);
        let (mut live, mut pools) = (Vec::new(), 0);
        for round in 0..1500u64 {
            if random.below(20) == 0 {
                let verbs = [Verb::MemAlloc, Verb::MemFree, Verb::CtxSynchronize, Verb::MemGetInfo];
                let verb = verbs[random.below(4) as usize];
                let codes = [DriverCode::OUT_OF_MEMORY, DriverCode::INVALID_VALUE];
                world.sim.fail_nth(verb, 1 + random.below(2), codes[random.below(2) as usize]);
            }
            let stream = streams[random.below(3) as usize];
            match random.below(40) {
                0..=19 => {
                    let most = [4 * KIB, 200 * KIB, 3 * MIB][random.below(3) as usize];
                    let bytes = 8 + random.below(most) / 8 * 8;
                    if let Ok(block) = allocator.malloc(bytes as usize, stream) {
                        world.write(DeviceAddress(block), bytes, round, stream);
                        live.push(block);
                    }
                }
                20..=36 if !live.is_empty() => {
                    let at = random.below(live.len() as u64) as usize;
                    let block = live.swap_remove(at);
                    if random.below(4) == 0 {
                        allocator.record_stream(block, stream);
                    }
                    assert_ne!(allocator.free(block), Freed::Unknown);
                    assert_eq!(allocator.free(block), Freed::Unknown);
                }
                37 => drop(allocator.empty_cache()),
                38 => {
                    pools += 1;
                    let id = PoolId(0, pools);
                    allocator.begin_pool(id, Box::new(move |asked| asked == stream));
                    if let Ok(block) = allocator.malloc(5000, stream) {
                        live.push(block);
                    }
                    allocator.end_pool(id);
                    allocator.release_pool(id);
                }
                _ => {
                    world.sim.heal();
                    check_books(&allocator);
                }
            }
        }
        world.sim.heal();
        for block in live {
            assert_ne!(allocator.free(block), Freed::Unknown);
        }
        world.sim.ctx_synchronize().unwrap();
        allocator.empty_cache().unwrap();
        check_books(&allocator);
        let statistics = allocator.statistics();
        assert_eq!(statistics.reserved_bytes.all.current, 0);
        assert_eq!(statistics.segment.all.current, 0);
        assert_eq!(world.sim.used_bytes(DEVICE), 0);
        assert_eq!(world.sim.violations(), Vec::<String>::new());
    }
}
