//! VBARs bound to the program's own memory: the bytes are right, they come the way that they
//! should, and the memory's owner is dropped once, after the last copy.
//!
//! The owner here unregisters and unmaps the memory, so that a copy which is still to be made then
//! is a breach that the simulated device reports, or ends the test at once.
#![expect(unsafe_code, reason = "registers memory with the device, as a program would")]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use memmap2::MmapMut;
use tempfile::TempDir;
use vbar::copy::fill::{FillJob, Filler, Keep};
use vbar::driver::kernel::{checksum, pattern};
use vbar::driver::sim::{Sim, SimOptions, Verb};
use vbar::driver::{Context, Driver, DriverCode};
use vbar::host::bound::{Bound, Source};
use vbar::host::memory::{HostLock, HostMemory};
use vbar::host::source::ModelFile;
use vbar::memory::pager::HeldPins;
use vbar::model::binding::Binding;
use vbar::options::{Eviction, RuntimeOptions, Threads};
use vbar::sync::device::Device;
use vbar::units::DeviceAddress;
use vbar::{Error, ErrorCode, Fault, Vbar};

use crate::world::{DEVICE, P, ROOMY, World, budget_options, options, pattern_bytes};

/// A device that looks whether the source of a copy changes before the copy is done.
const STRICT: &str = "capacity=64M,granularity=64K,checked=1";

/// Memory of a program, some ranges of it registered with the device.
struct Owned {
    sim: Arc<Sim>,
    context: Context,
    memory: MmapMut,
    registered: Vec<NonNull<u8>>,
    drops: Arc<AtomicU64>,
}

// SAFETY: the addresses are those of the mapping, which is the owner's.
unsafe impl Send for Owned {}

impl Owned {
    /// Memory of `bytes` bytes with the pattern of `seed`, registered in ranges that end at `ends`.
    fn new(world: &World, bytes: u64, seed: u64, ends: &[u64], drops: &Arc<AtomicU64>) -> Self {
        let mut memory = MmapMut::map_anon(bytes as usize).unwrap();
        pattern(&mut memory, seed);
        let (mut registered, mut start) = (Vec::new(), 0);
        for end in ends {
            let at = NonNull::new(memory[start as usize..].as_mut_ptr()).unwrap();
            // SAFETY: mapped until it is unregistered, when this is dropped.
            unsafe { world.sim.mem_host_register(at, (end - start) as usize) }.unwrap();
            registered.push(at);
            start = *end;
        }
        let (sim, drops) = (Arc::clone(&world.sim), Arc::clone(drops));
        let context = world.runtime.device().context;
        Self { sim, context, memory, registered, drops }
    }

    fn source(self) -> Source {
        HostMemory::new(self).unwrap().into()
    }
}

impl AsRef<[u8]> for Owned {
    fn as_ref(&self) -> &[u8] {
        &self.memory
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        let before = self.sim.ctx_get_current().unwrap();
        self.sim.ctx_set_current(Some(self.context)).unwrap();
        for at in self.registered.drain(..) {
            self.sim.mem_host_unregister(at).unwrap();
        }
        self.sim.ctx_set_current(before).unwrap();
        self.drops.fetch_add(1, Ordering::Relaxed);
    }
}

/// A VBAR on a device, and what its bytes must be.
struct Rig {
    world: World,
    vbar: Vbar,
    bytes: Vec<u8>,
    target: DeviceAddress,
    drops: Arc<AtomicU64>,
    random: u64,
}

impl Rig {
    /// A VBAR of `pages` pages, all of it bound to one memory that is registered up to `ends`.
    fn new(sim: &str, options: RuntimeOptions, pages: u64, ends: &[u64]) -> Self {
        let world = World::with(sim, options);
        let (vbar, drops) = (world.vbar(pages), Arc::default());
        let owned = Owned::new(&world, pages * P, 1, ends, &drops);
        vbar.bind_sources(bound(&[(0..pages * P, 0, 0)]), vec![owned.source()]).unwrap();
        let target = world.scratch();
        Self { world, vbar, bytes: pattern_bytes(pages * P, 1), target, drops, random: 1 }
    }

    /// Faults bytes, multiples of 8, and enqueues their checksum. What it must add.
    #[track_caller]
    fn try_use(&self, range: Range<u64>) -> Result<u64, Error> {
        match self.vbar.fault(range.clone(), self.world.stream)? {
            Fault::Resident(guard) | Fault::HostMapped(guard) => {
                let (delay, stream) = (Duration::from_micros(20), self.world.stream);
                self.world.sum(guard.address(), guard.bytes(), self.target, delay, stream);
            }
            Fault::Offloaded(refusal) => panic!("{range:?}: {refusal}"),
        }
        Ok(checksum(&self.bytes[range.start as usize..range.end as usize], 0))
    }

    /// Uses ranges; all bytes must be right.
    #[track_caller]
    fn check_ranges(&self, ranges: impl IntoIterator<Item = Range<u64>>) {
        let mut expected = self.world.word(self.target, self.world.stream);
        for range in ranges {
            expected = expected.wrapping_add(self.try_use(range).unwrap());
        }
        assert_eq!(self.world.word(self.target, self.world.stream), expected);
    }

    fn pages(&self) -> impl Iterator<Item = Range<u64>> + Clone + use<> {
        (0..self.bytes.len() as u64 / P).map(|page| page * P..(page + 1) * P)
    }

    /// Ranges somewhere, of up to three pages.
    fn random_ranges(&mut self, count: usize) -> Vec<Range<u64>> {
        let all = self.bytes.len() as u64;
        let range = |_| {
            let start = self.next() % (all / 8) * 8;
            start..(start + 8 + self.next() % (3 * P / 8) * 8).min(all)
        };
        (0..count).map(range).collect()
    }

    fn next(&mut self) -> u64 {
        self.random =
            self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.random >> 33
    }

    /// Closes everything: the owners are dropped, `owners` in all, and nothing is left.
    #[track_caller]
    fn check_shut(self, owners: u64) {
        let Self { world, vbar, drops, .. } = self;
        world.check();
        assert_eq!(drops.load(Ordering::Relaxed), 0, "while it was bound");
        world.sim.stream_synchronize(world.stream).unwrap();
        vbar.end_of_run(world.stream, HeldPins::Keep).unwrap();
        vbar.destroy_wait().unwrap();
        assert_eq!(drops.load(Ordering::Relaxed), owners);
        world.check_shut();
        assert_eq!(drops.load(Ordering::Relaxed), owners);
    }
}

/// A binding of targets to sources and their offsets.
fn bound(segments: &[(Range<u64>, usize, u64)]) -> Binding {
    let mut binding = Binding::new();
    for (target, source, offset) in segments {
        binding.bind(target.clone(), *source, *offset, target.end - target.start).unwrap();
    }
    binding
}

#[test]
fn page_locked_memory_is_copied_from_directly() {
    for threads in [Threads::Off, Threads::On] {
        let options = RuntimeOptions { threads: Some(threads), ..budget_options(12) };
        let mut rig = Rig::new(STRICT, options, 40, &[40 * P]);
        rig.check_ranges(rig.pages());
        for _ in 0..3 {
            let ranges = rig.random_ranges(60);
            rig.check_ranges(ranges);
        }
        let told = rig.world.runtime.statistics();
        assert!(told.pages_evicted > 0 && told.bytes_filled > 40 * P);
        assert_eq!(told.sources.host_locked_bytes, told.bytes_filled, "{:?}", told.sources);
        assert_eq!(told.locked.cache_bytes, 0, "it is page-locked already");
        rig.check_shut(1);
    }
}

#[test]
fn pageable_memory_goes_through_the_ring() {
    for threads in [Threads::Off, Threads::On] {
        let options = RuntimeOptions { threads: Some(threads), ..budget_options(12) };
        let mut rig = Rig::new(STRICT, options, 40, &[]);
        rig.check_ranges(rig.pages());
        for _ in 0..3 {
            let ranges = rig.random_ranges(60);
            rig.check_ranges(ranges);
        }
        let told = rig.world.runtime.statistics();
        let sources = told.sources;
        assert!(sources.host_pageable_bytes >= 40 * P);
        // The engine may have begun reads that the program left behind.
        let all = sources.host_pageable_bytes + sources.locked_cache_bytes;
        assert!(all >= told.bytes_filled, "{told:?}");
        assert_eq!(sources.host_locked_bytes, 0);
        assert_eq!(sources.page_cache_bytes + sources.disk_bytes, 0);
        rig.check_shut(1);
    }
}

#[test]
fn copies_end_where_registered_ranges_end() {
    let ends = [P - 8, P + 8, 3 * P / 2 + 1, 5 * P, 8 * P];
    let rig = Rig::new(STRICT, options(), 8, &ends);
    // A page with two ends in it, one with none, one with one.
    for (page, copies) in [(0, 2), (1, 3), (2, 1), (4, 1), (5, 1)] {
        let before = rig.world.sim.calls(Verb::MemcpyHtodAsync);
        rig.check_ranges(std::iter::once(page * P..(page + 1) * P));
        assert_eq!(rig.world.sim.calls(Verb::MemcpyHtodAsync) - before, copies, "page {page}");
    }
    let sources = rig.world.runtime.statistics().sources;
    assert_eq!(sources.host_locked_bytes, 5 * P);
    rig.check_shut(1);
}

#[test]
fn memory_with_a_hole_is_pageable_and_refused_where_it_must_not_be() {
    // The last page is not registered.
    let rig = Rig::new(STRICT, options(), 4, &[P, 3 * P]);
    rig.check_ranges(rig.pages());
    let sources = rig.world.runtime.statistics().sources;
    assert_eq!((sources.host_locked_bytes, sources.host_pageable_bytes), (0, 4 * P));

    let (other, drops) = (rig.world.vbar(4), Arc::default());
    let owned = Owned::new(&rig.world, 4 * P, 1, &[P, 3 * P], &drops);
    let memory = HostMemory::new(owned).unwrap().with_lock(HostLock::Required);
    let all = [(0..4 * P, 0, 0)];
    let error = other.bind_sources(bound(&all), vec![memory.into()]).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
    let says = format!("not page-locked from byte {} on", 3 * P);
    assert!(error.to_string().contains(&says), "{error}");
    assert_eq!(drops.load(Ordering::Relaxed), 1, "the owner of what was refused");
    // It was left as it was, and can be bound.
    let owned = Owned::new(&rig.world, 4 * P, 1, &[P, 4 * P], &drops);
    let memory = HostMemory::new(owned).unwrap().with_lock(HostLock::Required);
    other.bind_sources(bound(&all), vec![memory.into()]).unwrap();
    drop(other);
    assert_eq!(drops.load(Ordering::Relaxed), 2, "nothing was copied from it");
    rig.check_shut(1);
}

/// Files, page-locked and pageable memory, cut to pieces of any size, many in one page.
#[test]
fn sources_of_all_kinds_share_pages() {
    for (threads, seed) in [(Threads::Off, 3), (Threads::On, 4), (Threads::On, 5)] {
        let options = RuntimeOptions { threads: Some(threads), ..budget_options(10) };
        let world = World::with(STRICT, options);
        let (pages, folder, drops) = (32, TempDir::new().unwrap(), Arc::default());
        let (all, path) = (pages * P, folder.path().join("weights"));
        std::fs::write(&path, pattern_bytes(all, 9)).unwrap();
        let sources = vec![
            Source::File(Arc::new(ModelFile::open(&path).unwrap())),
            Owned::new(&world, all, 10, &[all / 3 + 1, all], &drops).source(),
            Owned::new(&world, all, 11, &[], &drops).source(),
        ];
        let (vbar, target) = (world.vbar(pages), world.scratch());
        let bytes = vec![0; all as usize];
        let mut rig = Rig { world, vbar, bytes, target, drops, random: seed };
        let contents = [9, 10, 11].map(|seed| pattern_bytes(all, seed));
        let (mut segments, mut at) = (Vec::new(), 0);
        while at < all {
            let most = if rig.next().is_multiple_of(4) { 2 * P } else { P / 8 };
            let length = (8 + rig.next() % (most / 8) * 8).min(all - at);
            let (source, offset) = (rig.next() as usize % 3, rig.next() % (all - length + 1));
            let (from, to) = (offset as usize..(offset + length) as usize, at as usize);
            rig.bytes[to..to + length as usize].copy_from_slice(&contents[source][from]);
            segments.push((at..at + length, source, offset));
            at += length;
        }
        rig.vbar.bind_sources(bound(&segments), sources).unwrap();
        for _ in 0..4 {
            rig.check_ranges(rig.pages());
            let ranges = rig.random_ranges(50);
            rig.check_ranges(ranges);
        }
        let told = rig.world.runtime.statistics().sources;
        assert!(told.host_locked_bytes > 0 && told.host_pageable_bytes > 0, "{told:?}");
        assert!(told.page_cache_bytes + told.disk_bytes > 0, "{told:?}");
        rig.check_shut(2);
    }
}

#[test]
fn a_closed_vbar_keeps_its_memory_until_the_last_copy_is_done() {
    let options = RuntimeOptions { eviction: Eviction::Aliasing, ..budget_options(1) };
    let Rig { world, vbar, drops, target, .. } = Rig::new(STRICT, options, 2, &[2 * P]);
    let guard = vbar.fault(0..P, world.stream).unwrap().resident().unwrap();
    world.sim.stream_synchronize(world.stream).unwrap();
    world.sim.hold_stream(world.stream).unwrap();
    world.sum(guard.address(), P, target, Duration::ZERO, world.stream);
    drop(guard);
    // Its frame is still read: the copy comes after that, whenever it is.
    let guard = vbar.fault(P..2 * P, world.another_stream()).unwrap().resident().unwrap();
    drop(guard);
    let other = vbar.clone();
    vbar.close();
    drop(vbar);
    world.runtime.refresh().unwrap();
    assert_eq!(drops.load(Ordering::Relaxed), 0, "a copy is to come");
    world.sim.release_stream(world.stream).unwrap();
    world.sim.ctx_synchronize().unwrap();
    // A handle is left, and the memory goes all the same.
    other.clone().destroy_wait().unwrap();
    assert_eq!(drops.load(Ordering::Relaxed), 1);
    assert_eq!(other.fault(0..P, world.stream).unwrap_err().code(), ErrorCode::Closed);
    drop(other);
    world.check();
    world.check_shut();
    assert_eq!(drops.load(Ordering::Relaxed), 1);
}

/// The page is given up, and the VBAR goes, while the first half of the page is to be copied.
#[test]
fn a_copy_of_a_fill_that_failed_keeps_the_memory() {
    let options = RuntimeOptions { eviction: Eviction::Aliasing, ..budget_options(1) };
    let world = World::with(STRICT, options);
    let (old, vbar, drops) = (world.vbar(1), world.vbar(1), Arc::default());
    let (target, other) = (world.scratch(), world.another_stream());
    let owned = Owned::new(&world, P, 1, &[P / 2, P], &drops);
    vbar.bind_sources(bound(&[(0..P, 0, 0)]), vec![owned.source()]).unwrap();
    let guard = old.fault(0..P, world.stream).unwrap().resident().unwrap();
    world.sim.stream_synchronize(world.stream).unwrap();
    world.sim.hold_stream(world.stream).unwrap();
    world.sum(guard.address(), P, target, Duration::ZERO, world.stream);
    drop(guard);
    let copies = world.sim.calls(Verb::MemcpyHtodAsync);
    world.sim.fail_nth(Verb::MemcpyHtodAsync, 2, DriverCode::INVALID_VALUE);
    assert_eq!(vbar.fault(0..P, other).unwrap_err().code(), ErrorCode::Driver);
    assert_eq!(world.sim.calls(Verb::MemcpyHtodAsync) - copies, 2);
    vbar.close();
    drop(vbar);
    world.runtime.refresh().unwrap();
    assert_eq!(drops.load(Ordering::Relaxed), 0, "a copy is to come");
    world.sim.release_stream(world.stream).unwrap();
    world.sim.ctx_synchronize().unwrap();
    // In passing: whoever makes something, or misses, lets it go.
    drop(world.vbar(1));
    assert_eq!(drops.load(Ordering::Relaxed), 1);
    drop(old);
    world.check();
    world.check_shut();
}

#[test]
fn whatever_call_fails_the_owner_is_dropped_once_and_the_bytes_are_right() {
    let verbs = [
        Verb::MemcpyHtodAsync,
        Verb::EventRecord,
        Verb::EventCreate,
        Verb::StreamQuery,
        Verb::StreamWaitEvent,
        Verb::MemCreate,
        Verb::MemMap,
    ];
    for verb in verbs {
        for nth in 1..12 {
            // Ends within pages, so that copies before the one that fails were enqueued.
            let ends = [P / 2, 5 * P / 2, 11 * P / 2, 8 * P];
            let rig = Rig::new(STRICT, budget_options(3), 8, &ends);
            rig.world.sim.fail_nth(verb, nth, DriverCode::INVALID_VALUE);
            let mut expected = 0;
            for page in rig.pages().chain(rig.pages()) {
                match rig.try_use(page) {
                    Ok(sum) => expected = sum.wrapping_add(expected),
                    Err(error) => assert_eq!(error.code(), ErrorCode::Driver, "{verb} {nth}"),
                }
            }
            rig.world.sim.heal();
            let found = rig.world.word(rig.target, rig.world.stream);
            assert_eq!(found, expected, "{verb} {nth}");
            rig.check_ranges(rig.pages());
            rig.check_shut(1);
        }
    }
}

#[test]
fn asking_the_driver_may_fail() {
    let world = World::with(STRICT, options());
    let (vbar, drops) = (world.vbar(4), Arc::default());
    let all = [(0..4 * P, 0, 0)];
    for nth in 1..=2 {
        let owned = Owned::new(&world, 4 * P, 1, &[P, 4 * P], &drops);
        world.sim.fail_nth(Verb::PointerGetHostRange, nth, DriverCode::INVALID_VALUE);
        let error = vbar.bind_sources(bound(&all), vec![owned.source()]).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Driver);
        assert!(error.to_string().contains("cuPointerGetAttributes"), "{error}");
        assert_eq!(drops.load(Ordering::Relaxed), nth);
    }
    drop(vbar);
    world.check_shut();
}

#[test]
fn what_cannot_be_bound_is_refused_and_its_owner_dropped() {
    let world = World::with(STRICT, options());
    let (vbar, drops) = (world.vbar(4), Arc::default());
    let memory = || Owned::new(&world, 2 * P, 1, &[], &drops).source();
    let refused = |vbar: &Vbar, segments: &[(Range<u64>, usize, u64)], code, says: &str| {
        let before = drops.load(Ordering::Relaxed);
        let error = vbar.bind_sources(bound(segments), vec![memory()]).unwrap_err();
        assert_eq!(error.code(), code);
        assert!(error.to_string().contains(says), "{error}");
        assert_eq!(drops.load(Ordering::Relaxed), before + 1);
    };
    let invalid = ErrorCode::InvalidArgument;
    refused(&vbar, &[(0..2 * P, 0, 1)], invalid, "bytes at 1 of memory 0, which has");
    refused(&vbar, &[(0..P, 1, 0)], invalid, "which has None bytes");
    refused(&vbar, &[(3 * P..5 * P, 0, 0)], invalid, "larger than the VBAR");
    refused(&vbar, &[], invalid, "without bytes");
    let bound_twice = world.vbar(2);
    bound_twice.bind_sources(bound(&[(0..P, 0, 0)]), vec![memory()]).unwrap();
    refused(&bound_twice, &[(P..2 * P, 0, 0)], invalid, "already");
    let used = world.vbar(2);
    drop(used.fault(0..P, world.stream).unwrap().resident().unwrap());
    refused(&used, &[(0..P, 0, 0)], invalid, "used already");
    let closed = world.vbar(2);
    closed.close();
    refused(&closed, &[(0..P, 0, 0)], ErrorCode::Closed, "closed");
    world.check();
    drop((vbar, bound_twice, used, closed));
    assert_eq!(drops.load(Ordering::Relaxed), 8);
    world.check_shut();
}

#[test]
fn a_vbar_may_go_while_the_engine_copies_to_it() {
    for (round, ends) in [[12 * P].as_slice(), &[], &[5 * P + 8, 12 * P]].into_iter().enumerate() {
        let options = RuntimeOptions { threads: Some(Threads::On), ..budget_options(6) };
        let rig = Rig::new(ROOMY, options, 12, ends);
        for _ in 0..4 {
            rig.check_ranges(rig.pages());
        }
        let (vbar, drops) = (rig.vbar.clone(), Arc::clone(&rig.drops));
        std::thread::scope(|scope| {
            let work = scope.spawn(|| {
                let context = rig.world.runtime.device().context;
                rig.world.sim.ctx_set_current(Some(context)).unwrap();
                for page in rig.pages().cycle().take(200) {
                    match rig.try_use(page) {
                        Ok(_) => {}
                        Err(error) if error.code() == ErrorCode::Closed => break,
                        Err(error) => panic!("{error}"),
                    }
                }
            });
            // Somewhere in the middle.
            while rig.world.runtime.statistics().misses < 20 + 7 * round as u64
                && !work.is_finished()
            {
                std::thread::yield_now();
            }
            vbar.close();
        });
        rig.world.sim.ctx_synchronize().unwrap();
        rig.world.check();
        let Rig { world, vbar: other, .. } = rig;
        drop((vbar, other));
        world.check_shut();
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn memory_that_a_lost_device_may_read_is_kept() {
    let options = RuntimeOptions { eviction: Eviction::Aliasing, ..budget_options(2) };
    let Rig { world, vbar, drops, .. } = Rig::new(STRICT, options, 4, &[4 * P]);
    drop(vbar.fault(0..2 * P, world.stream).unwrap().resident().unwrap());
    world.sim.lose_device(DEVICE, DriverCode::ILLEGAL_ADDRESS);
    assert!(vbar.fault(2 * P..3 * P, world.stream).is_err());
    let World { runtime, .. } = world;
    drop(vbar);
    drop(runtime);
    assert_eq!(drops.load(Ordering::Relaxed), 0);
}

/// A filler by itself, with threads: pageable memory is kept as a file's pages are, within the
/// allowance; where nothing can be page-locked it comes all the same.
#[test]
fn pageable_memory_is_kept_in_the_page_locked_cache() {
    for ring in [true, false] {
        let sim = Sim::new(SimOptions::parse(STRICT).unwrap());
        let context = sim.device_primary_ctx_retain(DEVICE).unwrap();
        sim.ctx_set_current(Some(context)).unwrap();
        let options = RuntimeOptions { threads: Some(Threads::On), ..options() };
        let device = Arc::new(Device::new(sim.driver(), DEVICE, context, options));
        if !ring {
            sim.fail_always(Verb::MemHostRegister, DriverCode::OUT_OF_MEMORY);
        }
        let filler = Filler::new(Arc::clone(&device)).unwrap();
        let base = sim.mem_address_reserve(8 * P, 0).unwrap();
        let frame = sim.mem_create(DEVICE, 8 * P).unwrap();
        sim.mem_map(base, 8 * P, frame).unwrap();
        sim.mem_set_access(base, 8 * P, &[DEVICE]).unwrap();
        let (bytes, segments) = (pattern_bytes(8 * P, 3), [(0..8 * P - 5, 0, 5)]);
        let memory = HostMemory::new(bytes.clone()).unwrap();
        let bound = Arc::new(Bound::new(bound(&segments), vec![memory]).unwrap());
        for pass in 0..3 {
            let keep = if pass == 0 { Keep::No } else { Keep::Locked };
            let jobs = (0..8).map(|page| {
                let (bound, target) = (Arc::clone(&bound), page * P..(page + 1) * P);
                let page = page as u32;
                FillJob { bound, base, target, bar: 0, page, keep, after: Vec::new() }
            });
            let (stream, _) = filler.stream();
            sim.memset_d8_async(base, 0xEE, 8 * P, stream).unwrap();
            filler.begin(jobs.collect()).run(&mut |_, filled| assert!(filled.is_ok()));
            sim.stream_synchronize(stream).unwrap();
            let found = sim.read_bytes(base, bytes.len() - 5).unwrap();
            assert!(found == bytes[5..], "pass {pass}");
        }
        let (sources, all) = (device.counters.sources.bytes(), 8 * P - 5);
        let (read, cached) = if ring { (2 * all, all) } else { (3 * all, 0) };
        assert_eq!(sources.host_pageable_bytes, read, "{sources:?}");
        assert_eq!(sources.locked_cache_bytes, cached, "{sources:?}");
        drop(filler);
        assert_eq!((sim.locked_bytes(), sim.violations()), (0, vec![]));
        device.fences.destroy_events();
    }
}
