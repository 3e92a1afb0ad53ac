//! The suite on a real device: the door's contract, fences, aliasing, and memory given back.
//!
//! Fails where there is no device, never skips. `make device` runs it, `make device-bundle` packs
//! it for machines without a Rust toolchain.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::sync::Arc;
use std::time::Duration;

use vbar::driver::cuda::Cuda;
use vbar::driver::kernel::{checksum, pattern};
use vbar::driver::{Driver, KernelCall};
use vbar::memory::pager::HeldPins;
use vbar::options::{Eviction, POISON_BYTE, Poison, RuntimeOptions, Threads};
use vbar::units::{DeviceAddress, DeviceOrdinal, GIB, MIB, PageSize, Stream};
use vbar::{Allocation, AllocationFault, ErrorCode, Fault, Runtime, Vbar};

#[path = "it/door.rs"]
mod door;
#[path = "it/host_mapped_twin.rs"]
mod host_mapped_twin;

const DEVICE: DeviceOrdinal = DeviceOrdinal(0);
const P: u64 = 2 * MIB;

fn driver() -> Arc<dyn Driver> {
    let cuda = Cuda::open().expect("these tests need an NVIDIA driver");
    assert!(cuda.device_get_count().unwrap() > 0, "these tests need a device");
    cuda
}

/// A runtime of its own for one test: `Runtime::open` shares, so tests take turns.
struct World {
    driver: Arc<dyn Driver>,
    runtime: Runtime,
    stream: Stream,
    sums: Sums,
    _turn: std::sync::MutexGuard<'static, ()>,
}

static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

impl World {
    fn new(options: RuntimeOptions) -> Self {
        let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let driver = driver();
        let page_size = PageSize::new(P).unwrap();
        let options = RuntimeOptions { page_size, ..options };
        let runtime = Runtime::open(Arc::clone(&driver), DEVICE, options).unwrap();
        driver.ctx_set_current(Some(runtime.device().context)).unwrap();
        driver.module_load().unwrap();
        let stream = driver.stream_create().unwrap();
        let sums = Sums::new(Arc::clone(&driver), 4096);
        Self { driver, runtime, stream, sums, _turn: turn }
    }

    fn budget(pages: u64) -> Self {
        Self::new(RuntimeOptions { budget_bytes: Some(pages * P), ..RuntimeOptions::default() })
    }

    /// Writes the pattern of `seed` into an allocation that asks for a refill, and commits.
    fn write(&self, allocation: &Allocation, seed: u64, stream: Stream) {
        let fill = match allocation.fault(stream).unwrap() {
            AllocationFault::Refill(fill) => fill,
            other => panic!("the allocation does not ask for a refill: {other:?}"),
        };
        let (target, bytes) = (fill.address(), fill.bytes());
        let call = KernelCall::Pattern { target, bytes, seed, delay_nanos: 0 };
        self.driver.launch_kernel(call, stream).unwrap();
        drop(fill.commit(stream).unwrap());
    }

    /// Enqueues a checksum of the range into word `index`, after a delay on the device.
    fn enqueue_sum(&self, source: DeviceAddress, bytes: u64, index: u64, delay: Duration) {
        let call = KernelCall::Checksum {
            source,
            bytes,
            first_word: 0,
            delay_nanos: delay.as_nanos() as u64,
            target: self.sums.address.offset(index * 8),
        };
        self.driver.launch_kernel(call, self.stream).unwrap();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.driver.ctx_set_current(Some(self.runtime.device().context));
        self.driver.stream_synchronize(self.stream).unwrap();
        self.driver.stream_destroy(self.stream).unwrap();
    }
}

/// Words of device memory for checksums, outside the runtime.
struct Sums {
    driver: Arc<dyn Driver>,
    address: DeviceAddress,
    frame: vbar::driver::FrameHandle,
    count: usize,
}

impl Sums {
    fn new(driver: Arc<dyn Driver>, count: usize) -> Self {
        let address = driver.mem_address_reserve(P, 0).unwrap();
        let frame = driver.mem_create(DEVICE, P).unwrap();
        driver.mem_map(address, P, frame).unwrap();
        driver.mem_set_access(address, P, &[DEVICE]).unwrap();
        let sums = Self { driver, address, frame, count };
        sums.clear();
        sums
    }

    fn clear(&self) {
        self.driver.memset_d8_async(self.address, 0, P, Stream::DEFAULT).unwrap();
        self.driver.ctx_synchronize().unwrap();
    }

    fn read(&self) -> Vec<u64> {
        let mut slot =
            vbar::host::locked::allocate(&self.driver, 1, self.count * 8).unwrap().remove(0);
        slot.copy_from_device(0..self.count * 8, self.address, Stream::DEFAULT).unwrap();
        self.driver.ctx_synchronize().unwrap();
        let words = slot.bytes_mut().chunks_exact(8);
        words.map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect()
    }
}

impl Drop for Sums {
    fn drop(&mut self) {
        self.driver.mem_unmap(self.address, P).unwrap();
        self.driver.mem_release(self.frame).unwrap();
        self.driver.mem_address_free(self.address, P).unwrap();
    }
}

fn pattern_sum(bytes: u64, seed: u64) -> u64 {
    let mut expected = vec![0; bytes as usize];
    pattern(&mut expected, seed);
    checksum(&expected, 0)
}

#[test]
fn the_door_keeps_its_contract() {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    door::check_door(driver(), DEVICE);
}

#[test]
fn what_is_too_large_is_read_from_the_host() {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let driver = driver();
    assert!(host_mapped_twin::is_supported(&*driver, DEVICE), "a driver of CUDA 12.9 or later");
    host_mapped_twin::check_host_mapped(&driver, DEVICE, P);
}

/// A driver was seen to free its record of a handle twice when this happened at once, and took the
/// process with it; see `driver/cuda`.
#[test]
fn a_handle_is_released_while_its_last_mapping_goes() {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let driver = driver();
    let context = driver.device_primary_ctx_retain(DEVICE).unwrap();
    let rounds = 20_000;
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let (handles, released) = std::sync::mpsc::sync_channel::<Option<_>>(0);
            let driver = &driver;
            scope.spawn(move || {
                driver.ctx_set_current(Some(context)).unwrap();
                while let Ok(Some(frame)) = released.recv() {
                    driver.mem_release(frame).unwrap();
                }
            });
            scope.spawn(move || {
                driver.ctx_set_current(Some(context)).unwrap();
                let address = driver.mem_address_reserve(P, P).unwrap();
                for round in 0..rounds {
                    let frame = driver.mem_create(DEVICE, P).unwrap();
                    driver.mem_map(address, P, frame).unwrap();
                    driver.mem_set_access(address, P, &[DEVICE]).unwrap();
                    handles.send(Some(frame)).unwrap();
                    (0..round % 400).for_each(|_| std::hint::spin_loop());
                    driver.mem_unmap(address, P).unwrap();
                }
                handles.send(None).unwrap();
                driver.mem_address_free(address, P).unwrap();
            });
        }
    });
    driver.device_primary_ctx_release(DEVICE).unwrap();
}

/// A long kernel reads a page; it is unpinned right after the launch and its frame is taken, by
/// aliasing, by waiting, or given to the driver: the kernel's result is intact every time.
fn check_long_kernel(options: RuntimeOptions, rounds: u64) {
    let world = World::new(RuntimeOptions { budget_bytes: Some(2 * P), ..options });
    let reader = world.runtime.create_bar(2 * P).unwrap();
    let taker = world.runtime.create_bar(2 * P).unwrap();
    taker.set_class(1).unwrap();
    let other = world.driver.stream_create().unwrap();
    let page = reader.allocate(P).unwrap();
    let taken = [taker.allocate(P).unwrap(), taker.allocate(P).unwrap()];
    for round in 0..rounds {
        reader.prioritise().unwrap();
        taker.prioritise().unwrap();
        world.write(&page, round, world.stream);
        let AllocationFault::Resident(guard) = page.fault(world.stream).unwrap() else {
            panic!("the page was just written")
        };
        world.enqueue_sum(guard.address(), P, round, Duration::from_micros(300));
        drop(guard);
        match round % 3 {
            0 => {
                reader.free_memory(P).unwrap();
            }
            _ => taken.iter().for_each(|part| world.write(part, !round, other)),
        }
        taker.free_memory(u64::MAX).unwrap();
    }
    let sums = world.sums.read();
    for round in 0..rounds {
        assert_eq!(sums[round as usize], pattern_sum(P, round), "round {round}");
    }
    world.driver.stream_synchronize(other).unwrap();
    world.driver.stream_destroy(other).unwrap();
}

#[test]
fn scenario_7_a_long_kernel_keeps_its_page_with_aliasing() {
    check_long_kernel(RuntimeOptions::default(), 1000);
}

#[test]
fn scenario_7_a_long_kernel_keeps_its_page_in_strict_mode() {
    let options = RuntimeOptions { eviction: Eviction::Strict, ..RuntimeOptions::default() };
    check_long_kernel(options, 300);
}

#[test]
fn scenario_8_five_thousand_bars_leave_nothing() {
    let world = World::new(RuntimeOptions::default());
    let total = world.driver.device_total_mem(DEVICE).unwrap();
    let free = || world.driver.mem_get_info().unwrap().free_bytes;
    let before = free();
    for _ in 0..5000 {
        let vbar = world.runtime.create_bar(total).unwrap();
        drop(vbar.fault(0..1, world.stream).unwrap().resident().expect("one page fits"));
        vbar.destroy_wait().unwrap();
    }
    world.runtime.trim(0).unwrap();
    let numbers = world.runtime.numbers();
    assert_eq!((numbers.used_bytes, numbers.bars, numbers.closing_bars), (0, 0, 0));
    let lost = before.saturating_sub(free());
    assert!(lost < 64 * MIB, "{lost} bytes of device memory are gone");
}

#[test]
fn memory_goes_back_to_the_driver_and_back_in() {
    let world = World::new(RuntimeOptions { budget_bytes: Some(4 * GIB), ..Default::default() });
    let free = || world.driver.mem_get_info().unwrap().free_bytes;
    let vbar = world.runtime.create_bar(2 * GIB).unwrap();
    for round in 0..5 {
        drop(vbar.fault(0..GIB, world.stream).unwrap().resident().expect("a GiB fits"));
        let before = free();
        let freed = vbar.free_memory(u64::MAX).unwrap();
        assert_eq!(freed.bytes, GIB, "round {round}: {freed:?}");
        let after = free();
        assert!(after >= before + GIB - 64 * MIB, "free memory went from {before} to {after}");
        vbar.prioritise().unwrap();
    }
}

#[test]
fn recycled_frames_need_a_refill_and_say_so() {
    let world = World::budget(2);
    let old = world.runtime.create_bar(P).unwrap();
    let allocation = old.allocate(P).unwrap();
    world.write(&allocation, 1, world.stream);
    let signature = {
        let AllocationFault::Resident(guard) = allocation.fault(world.stream).unwrap() else {
            panic!("just written")
        };
        guard.signature().to_vec()
    };
    old.free_memory(u64::MAX).unwrap();
    old.prioritise().unwrap();
    let AllocationFault::Refill(fill) = allocation.fault(world.stream).unwrap() else {
        panic!("evicted bytes must be written again")
    };
    let guard = fill.commit(world.stream).unwrap();
    assert_ne!(guard.signature(), signature);
}

/// Without poison the kernels of this test would end the context, and every later call with it.
#[test]
fn a_stale_read_finds_the_pattern_and_a_refill_its_bytes() {
    for eviction in [Eviction::Aliasing, Eviction::Strict] {
        let poison = Poison::On;
        let budget_bytes = Some(5 * P);
        let options = RuntimeOptions { eviction, poison, budget_bytes, ..Default::default() };
        let world = World::new(options);
        let vbar = world.runtime.create_bar(4 * P).unwrap();
        let rival = world.runtime.create_bar(4 * P).unwrap();
        let allocation = vbar.allocate(4 * P).unwrap();
        for round in 0..20 {
            vbar.prioritise().unwrap();
            world.write(&allocation, round, world.stream);
            let AllocationFault::Resident(guard) = allocation.fault(world.stream).unwrap() else {
                panic!("just written")
            };
            world.enqueue_sum(guard.address(), 4 * P, 2 * round, Duration::ZERO);
            drop(guard);
            match round % 2 {
                0 => drop(vbar.free_memory(u64::MAX).unwrap()),
                _ => {
                    rival.prioritise().unwrap();
                    let guard = rival.fault(0..4 * P, world.stream).unwrap().resident();
                    drop(guard.expect("four pages fit"));
                }
            }
            world.driver.stream_synchronize(world.stream).unwrap();
            world.runtime.refresh().unwrap();
            assert_eq!(vbar.draw(4), "....", "{eviction:?} round {round}");
            world.enqueue_sum(vbar.base(), 4 * P, 2 * round + 1, Duration::ZERO);
            world.driver.stream_synchronize(world.stream).unwrap();
        }
        let stale = checksum(&vec![POISON_BYTE; 4 * P as usize], 0);
        let sums = world.sums.read();
        for round in 0..20 {
            assert_eq!(sums[2 * round as usize], pattern_sum(4 * P, round), "round {round}");
            assert_eq!(sums[2 * round as usize + 1], stale, "round {round}");
        }
        assert_eq!(world.runtime.statistics().poison_failures, 0);
        drop(allocation);
        vbar.destroy_wait().unwrap();
        rival.destroy_wait().unwrap();
        world.runtime.trim(0).unwrap();
        assert_eq!(world.runtime.used_bytes(), 0);
    }
}

#[test]
fn a_kernel_keeps_the_pages_of_a_vbar_that_is_closed_under_it() {
    let world = World::budget(4);
    for round in 0..100 {
        let vbar = world.runtime.create_bar(2 * P).unwrap();
        let page = vbar.allocate(P).unwrap();
        world.write(&page, round, world.stream);
        let AllocationFault::Resident(guard) = page.fault(world.stream).unwrap() else {
            panic!("just written")
        };
        vbar.close();
        let refused = vbar.fault(0..P, world.stream).map(drop).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::Closed);
        world.enqueue_sum(guard.address(), P, round, Duration::from_micros(200));
        drop(guard);
        if round % 4 == 3 {
            // Frames of closed VBARs come free when their kernels are done, not before.
            world.driver.stream_synchronize(world.stream).unwrap();
        }
    }
    world.driver.stream_synchronize(world.stream).unwrap();
    world.runtime.trim(0).unwrap();
    let numbers = world.runtime.numbers();
    assert_eq!((numbers.bars, numbers.closing_bars, numbers.used_bytes), (0, 0, 0));
    let sums = world.sums.read();
    for round in 0..100 {
        assert_eq!(sums[round as usize], pattern_sum(P, round), "round {round}");
    }
}

#[test]
fn default_streams_and_threads_without_a_context_work() {
    let world = World::budget(4);
    let vbar = world.runtime.create_bar(4 * P).unwrap();
    for stream in [Stream::DEFAULT, Stream::LEGACY, Stream::PER_THREAD, Stream::NONE] {
        drop(vbar.fault(0..P, stream).unwrap().resident().expect("a page fits"));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(world.driver.ctx_get_current().unwrap(), None);
            for stream in [Stream::DEFAULT, Stream::PER_THREAD, world.stream, Stream::NONE] {
                drop(vbar.fault(0..2 * P, stream).unwrap().resident().expect("two pages fit"));
            }
            assert_eq!(world.driver.ctx_get_current().unwrap(), None);
        });
    });
    assert!(vbar.end_of_run(world.stream, HeldPins::Keep).unwrap().held.is_empty());
    world.runtime.retire_stream(world.stream).unwrap();
}

#[test]
fn threads_share_a_small_budget_and_every_byte_is_right() {
    let world = World::budget(6);
    let shared = (0..3).map(|_| world.runtime.create_bar(8 * P).unwrap()).collect::<Vec<Vbar>>();
    let allocations: Vec<Vec<Allocation>> = shared
        .iter()
        .map(|vbar| (0..16).map(|_| vbar.allocate(P / 2).unwrap()).collect())
        .collect();
    let context = world.runtime.device().context;
    std::thread::scope(|scope| {
        for thread in 0..6u64 {
            let (world, allocations) = (&world, &allocations);
            scope.spawn(move || {
                world.driver.ctx_set_current(Some(context)).unwrap();
                let stream = world.driver.stream_create().unwrap();
                let sums = Sums::new(Arc::clone(&world.driver), 1);
                let mut state = thread + 1;
                let mut read = 0;
                for _ in 0..400 {
                    state = vbar::driver::kernel::mix(state, thread);
                    let (bar, at) = ((state % 3) as usize, (state >> 8) as usize % 16);
                    let allocation = &allocations[bar][at];
                    let seed = (bar * 100 + at) as u64;
                    match allocation.fault(stream).unwrap() {
                        AllocationFault::Refill(fill) => {
                            let (target, bytes) = (fill.address(), fill.bytes());
                            let call = KernelCall::Pattern { target, bytes, seed, delay_nanos: 0 };
                            world.driver.launch_kernel(call, stream).unwrap();
                            drop(fill.commit(stream).unwrap());
                        }
                        AllocationFault::Resident(guard) => {
                            let call = KernelCall::Checksum {
                                source: guard.address(),
                                bytes: P / 2,
                                first_word: 0,
                                delay_nanos: 20_000,
                                target: sums.address,
                            };
                            world.driver.memset_d8_async(sums.address, 0, 8, stream).unwrap();
                            world.driver.launch_kernel(call, stream).unwrap();
                            drop(guard);
                            world.driver.stream_synchronize(stream).unwrap();
                            assert_eq!(sums.read()[0], pattern_sum(P / 2, seed), "{allocation:?}");
                            read += 1;
                        }
                        AllocationFault::Offloaded(_) | AllocationFault::Busy => {
                            allocations[bar][0].fault(stream).map(drop).unwrap();
                        }
                    }
                }
                assert!(read > 0, "thread {thread} never read a byte");
                world.driver.stream_synchronize(stream).unwrap();
                world.runtime.retire_stream(stream).unwrap();
                world.driver.stream_destroy(stream).unwrap();
            });
        }
    });
    assert!(world.runtime.is_valid());
}

/// A use that no fence covers: its page is faulted, read for `delay`, and given back as if its
/// stream were gone.
fn use_uncovered(world: &World, allocation: &Allocation, index: u64, delay: Duration) {
    let AllocationFault::Resident(guard) = allocation.fault(world.stream).unwrap() else {
        panic!("just written")
    };
    world.enqueue_sum(guard.address(), P, index, delay);
    world.runtime.unpin(guard.into_token(), Stream::NONE).unwrap();
}

#[test]
fn a_wait_for_the_context_is_bounded_and_sees_all_of_it() {
    let world = World::budget(1);
    let (reader, taker) =
        (world.runtime.create_bar(P).unwrap(), world.runtime.create_bar(P).unwrap());
    let (page, taken) = (reader.allocate(P).unwrap(), taker.allocate(P).unwrap());
    // No fence on it covers what the other one does.
    let other = world.driver.stream_create().unwrap();
    for round in 0..20 {
        reader.set_watermark(1).unwrap();
        taker.set_watermark(1).unwrap();
        world.write(&page, round, world.stream);
        use_uncovered(&world, &page, round, Duration::from_millis(100));
        if world.driver.version().unwrap() >= 12_050 {
            world.runtime.set_wait_timeout(Duration::from_millis(5));
            let failed = taken.fault(other).map(drop).unwrap_err();
            assert_eq!(failed.code(), ErrorCode::TimedOut, "{failed}");
            world.runtime.set_wait_timeout(Duration::from_secs(30));
            vbar::set_wait_check(Some(Box::new(|| std::ops::ControlFlow::Break(()))));
            let failed = taken.fault(other).map(drop).unwrap_err();
            assert_eq!(failed.code(), ErrorCode::Cancelled, "{failed}");
            vbar::set_wait_check(None);
        }
        world.write(&taken, !round, world.stream);
        taker.free_memory(P).unwrap();
    }
    world.runtime.retire_stream(other).unwrap();
    world.driver.stream_destroy(other).unwrap();
    let sums = world.sums.read();
    for round in 0..20 {
        assert_eq!(sums[round as usize], pattern_sum(P, round), "round {round}");
    }
}

#[test]
fn other_programs_pressure_is_answered_without_a_call() {
    let options = RuntimeOptions { threads: Some(Threads::On), ..RuntimeOptions::default() };
    let world = World::new(options);
    let vbar = world.runtime.create_bar(GIB).unwrap();
    drop(vbar.fault(0..GIB, world.stream).unwrap().resident().expect("a GiB fits"));
    let free = world.driver.mem_get_info().unwrap().free_bytes;
    world.runtime.set_headroom(free - GIB / 2).unwrap();
    assert_eq!(world.runtime.used_bytes(), GIB);
    // Memory that the runtime knows nothing of.
    let others: Vec<_> =
        (0..16).map(|_| world.driver.mem_create(DEVICE, 64 * MIB).unwrap()).collect();
    let end = std::time::Instant::now() + Duration::from_secs(30);
    // The driver's own needs jitter: about half a GiB has to go.
    while world.runtime.used_bytes() > GIB / 2 + 64 * MIB {
        assert!(std::time::Instant::now() < end, "{} bytes are held", world.runtime.used_bytes());
        std::thread::sleep(Duration::from_millis(1));
    }
    others.into_iter().for_each(|frame| world.driver.mem_release(frame).unwrap());
    assert!(world.runtime.is_valid());
    world.runtime.set_threads(Threads::Off).unwrap();
}

#[test]
fn a_bound_model_larger_than_its_budget_is_right_on_the_device() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    vbar::model::synth::synthesize(&path, 256 * MIB, 7).unwrap();
    let world = World::budget(40);
    let model = world.runtime.open_model(&path).unwrap();
    let count = model.model().tensors().len();
    for pass in 0..3 {
        world.sums.clear();
        let mut resident = vec![false; count];
        for (tensor, seen) in resident.iter_mut().enumerate() {
            let bytes = model.model().tensors()[tensor].bytes;
            if let Fault::Resident(guard) = model.fault(tensor, world.stream).unwrap() {
                world.enqueue_sum(guard.address(), bytes, tensor as u64, Duration::ZERO);
                *seen = true;
            }
        }
        world.driver.stream_synchronize(world.stream).unwrap();
        let sums = world.sums.read();
        for tensor in (0..count).filter(|tensor| resident[*tensor]) {
            let name = &model.model().tensors()[tensor].name;
            assert_eq!(sums[tensor], model.model().checksum(name).unwrap(), "pass {pass} {name}");
        }
        assert!(resident.iter().filter(|seen| **seen).count() * 10 > count * 9);
    }
}
