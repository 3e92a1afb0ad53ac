//! PyTorch's allocator where things go wrong or are missing, and beside streamed weights.

use std::time::Duration;

use tempfile::TempDir;
use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode};
use vbar::model::synth::{synthesize, tensor_seed};
use vbar::options::{ContextWaits, Eviction, Poison, RuntimeOptions, Threads};
use vbar::torch::{Freed, PoolId};
use vbar::units::{DeviceAddress, Stream};
use vbar::{ErrorCode, Fault};

use crate::forked::in_child;
use crate::torch::{Torch, check_books};
use crate::world::{DEVICE, P, ROOMY, World, budget_options, options, pattern_sum};

/// Every step of getting pages fails once: either the request is served all the same, or it is out
/// of memory and everything is as it was.
#[test]
fn a_failed_step_leaves_everything_as_it_was() {
    let codes = [DriverCode::OUT_OF_MEMORY, DriverCode::INVALID_VALUE];
    for verb in [Verb::MemCreate, Verb::MemMap, Verb::MemSetAccess] {
        for (nth, code) in (1..=4).flat_map(|nth| codes.map(|code| (nth, code))) {
            let torch = Torch::budget(16);
            let kept = torch.malloc(P + P / 2);
            let before = (torch.reserved(), torch.world.used());
            torch.world.sim.fail_nth(verb, nth, code);
            let served = torch.allocator.malloc(4 * P as usize, torch.world.stream);
            torch.world.sim.heal();
            match served {
                Ok(block) => drop(torch.allocator.free(block)),
                Err(_) => assert_eq!((torch.reserved(), torch.world.used()), before),
            }
            let block = torch.malloc(4 * P);
            assert!(block >= kept + P + P / 2 || block + 4 * P <= kept);
            torch.write(block, 4 * P, 1, torch.world.stream);
            torch.check();
        }
    }
}

#[test]
fn strict_eviction_and_poison_serve_blocks_too() {
    for (eviction, poison) in [
        (Eviction::Strict, Poison::Off),
        (Eviction::Aliasing, Poison::On),
        (Eviction::Strict, Poison::On),
    ] {
        let options = RuntimeOptions { eviction, poison, ..budget_options(16) };
        let torch = Torch::of(World::with(ROOMY, options));
        let weights = torch.world.vbar(16);
        for round in 0..20 {
            let bytes = (1 + round * 5 % 12) * P;
            let block = torch.malloc(bytes);
            torch.write(block, bytes, round, torch.world.stream);
            weights.prioritise().unwrap();
            let _ = torch.world.touch(&weights, round % 8..round % 8 + 3);
            torch.allocator.free(block);
            torch.check();
        }
        torch.allocator.empty_cache().unwrap();
        assert_eq!(torch.reserved(), 0);
    }
}

/// Scenario 49: many temporaries, dropped while their kernels run, under pressure.
#[test]
fn scenario_49_temporaries_are_not_unmapped_under_their_kernels() {
    for context_waits in [ContextWaits::Allowed, ContextWaits::Never] {
        let options = RuntimeOptions { context_waits, ..budget_options(40) };
        let torch = Torch::of(World::with(ROOMY, options));
        let side = torch.world.another_stream();
        for round in 0..200u64 {
            let stream = if round % 5 == 0 { side } else { torch.world.stream };
            let block = torch.malloc_on(28 * P, stream);
            torch.write(block, 28 * P, round, stream);
            torch.allocator.free(block);
            if round % 16 == 3 {
                torch.allocator.empty_cache().unwrap();
            }
        }
        torch.world.sim.ctx_synchronize().unwrap();
        assert!(torch.allocator.statistics().reserved_bytes.all.peak <= 40 * P);
        torch.check();
    }
}

/// Streams that come and go: their memory is found again, whatever becomes of their slots. That of
/// streams which were not retired is, when it is needed, after a wait for the context.
#[test]
fn more_streams_than_are_known_at_a_time() {
    for (retires, most) in [(true, 60), (false, 1023)] {
        let torch = Torch::of(World::with(ROOMY, options()));
        for round in 0..600u64 {
            let stream = torch.world.another_stream();
            let blocks = [600, 40 << 10, 2 * P].map(|bytes| {
                let block = torch.malloc_on(bytes, stream);
                torch.write(block, bytes, round, stream);
                block
            });
            for block in blocks {
                assert_eq!(torch.allocator.free(block), Freed::Cached);
            }
            if retires {
                torch.world.runtime.retire_stream(stream).unwrap();
                torch.world.sim.stream_synchronize(stream).unwrap();
            }
            torch.world.sim.stream_destroy(stream).unwrap();
            if round % 50 == 0 {
                torch.check();
            }
        }
        assert!(torch.world.used() <= most, "{}", torch.world.used());
        torch.allocator.empty_cache().unwrap();
        assert_eq!(torch.reserved(), 0);
        torch.check();
    }
}

/// A block whose stream's slot went to another stream while it was live.
#[test]
fn a_block_outlives_its_streams_slot() {
    let torch = Torch::of(World::with(ROOMY, options()));
    let own = torch.world.stream;
    let live = [600, 40 << 10, 2 * P].map(|bytes| (torch.malloc_on(bytes, own), bytes));
    for _ in 0..300 {
        let stream = torch.world.another_stream();
        let block = torch.malloc_on(512, stream);
        torch.write(block, 512, 1, stream);
        torch.allocator.free(block);
        torch.allocator.free(torch.malloc_on(512, stream));
        torch.world.sim.stream_synchronize(stream).unwrap();
    }
    for (block, bytes) in live {
        torch.write(block, bytes, 3, own);
        torch.sum(block, bytes, own);
        assert_eq!(torch.allocator.free(block), Freed::Cached);
        let other = torch.world.another_stream();
        let elsewhere = torch.malloc_on(bytes, other);
        torch.write(elsewhere, bytes, 4, other);
        assert_eq!(torch.malloc_on(bytes, own), block);
    }
    torch.check();
}

#[test]
fn a_forked_child_frees_and_asks_for_nothing() {
    let torch = Torch::budget(8);
    let block = torch.malloc(P);
    let calls =
        |torch: &Torch| -> u64 { Verb::ALL.iter().map(|verb| torch.world.sim.calls(*verb)).sum() };
    let before = calls(&torch);
    assert!(in_child(|| {
        let allocator = &torch.allocator;
        let refused = allocator.malloc(512, torch.world.stream).unwrap_err();
        allocator.record_stream(block, Stream::DEFAULT);
        allocator.begin_pool(PoolId(1, 1), Box::new(|_| true));
        allocator.end_pool(PoolId(1, 1));
        allocator.release_pool(PoolId(1, 1));
        let emptied = allocator.empty_cache();
        refused.is_ending()
            && allocator.free(block) == Freed::Ending
            && allocator.segment_free(block) == Freed::Ending
            && allocator.segment_malloc(512, Stream::DEFAULT).is_none()
            && emptied.is_err_and(|error| error.code() == ErrorCode::ProcessEnding)
            && calls(&torch) == before
    }));
    assert_eq!(torch.allocator.free(block), Freed::Cached);
    torch.check();
}

/// Weights stream through what activations leave, and nobody's bytes are wrong.
#[test]
fn weights_stream_beside_blocks_that_come_and_go() {
    for threads in [Threads::Off, Threads::On] {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("model.safetensors");
        synthesize(&path, 40 * P, 3).unwrap();
        let options = RuntimeOptions { threads: Some(threads), ..budget_options(30) };
        let torch = Torch::of(World::with(ROOMY, options));
        let bar = torch.world.runtime.open_model(&path).unwrap();
        let stream = torch.world.stream;
        let mut expected = 0u64;
        for pass in 0..6u64 {
            for (index, tensor) in bar.model().tensors().iter().enumerate() {
                let bytes = (1 + (index as u64 * 3 + pass) % 9) * P;
                let block = torch.malloc(bytes);
                torch.write(block, bytes, index as u64, stream);
                match bar.fault(index, stream).unwrap() {
                    Fault::Resident(weight) | Fault::HostMapped(weight) => {
                        let delay = Duration::from_micros(20);
                        let (source, bytes) = (weight.address(), weight.bytes());
                        torch.world.sum(source, bytes, torch.target, delay, stream);
                    }
                    Fault::Offloaded(refused) => panic!("tensor {index}: {refused}"),
                }
                torch.sum(block, bytes, stream);
                torch.allocator.free(block);
                expected = expected
                    .wrapping_add(pattern_sum(tensor.bytes, tensor_seed(3, &tensor.name)))
                    .wrapping_add(pattern_sum(bytes, index as u64));
            }
            assert_eq!(torch.world.word(torch.target, stream), expected, "pass {pass}");
        }
        assert!(torch.world.used() <= 30);
        check_books(&torch.allocator);
        drop(bar);
        torch.check_shut();
    }
}

/// Without virtual memory management each block is the driver's own.
#[test]
fn a_device_without_mappings_serves_blocks() {
    let torch = {
        let world = World::with("capacity=4M,granularity=64K,vmm=0", options());
        let allocator = world.runtime.torch_allocator().unwrap();
        let target = DeviceAddress(allocator.malloc(512, world.stream).unwrap());
        world.sim.write_bytes(target, &[0; 8]).unwrap();
        Torch { world, allocator, target }
    };
    let (one, two) = (torch.world.stream, torch.world.another_stream());
    for bytes in [700, 40 << 10, 2 * P] {
        assert_eq!(torch.world.sim.violations(), Vec::<String>::new());
        let block = torch.malloc_on(bytes, one);
        torch.write(block, bytes / 8 * 8, 7, one);
        torch.sum(block, bytes / 8 * 8, one);
        assert_eq!(torch.allocator.base_of(block + 5).unwrap().0, block);
        assert_eq!(torch.allocator.free(block), Freed::Cached);
        assert_eq!(torch.allocator.free(block), Freed::Unknown);
        assert_eq!(torch.malloc_on(bytes, one), block, "the same stream has it at once");
        torch.allocator.free(block);
        let other = torch.malloc_on(bytes, two);
        assert_ne!(other, block);
        torch.write(other, bytes / 8 * 8, 8, two);
        // Used by the first stream as well: the device is waited for.
        torch.allocator.record_stream(other, one);
        assert_eq!(torch.allocator.free(other), Freed::Cached);
    }
    let id = PoolId(0, 1);
    torch.allocator.begin_pool(id, Box::new(move |stream| stream == two));
    let private = torch.malloc_on(4096, two);
    torch.allocator.free(private);
    let shared = torch.malloc_on(4096, one);
    assert_ne!(shared, private);
    torch.allocator.end_pool(id);
    assert_ne!(torch.malloc_on(4096, two), private, "the graph's memory is its own");
    torch.allocator.release_pool(id);
    assert!(torch.allocator.malloc(8 << 20, one).unwrap_err().is_memory());
    let segment = torch.allocator.segment_malloc(2 << 20, one).unwrap();
    assert_eq!(torch.allocator.segment_free(segment), Freed::Cached);
    torch.allocator.empty_cache().unwrap();
    check_books(&torch.allocator);
    let reserved = torch.allocator.statistics().reserved_bytes.all.current;
    assert_eq!(reserved, 512 + 2 * 4096);
    assert_eq!(torch.world.sim.used_bytes(DEVICE), 3 * P);
    assert_eq!(torch.world.sim.violations(), Vec::<String>::new());
}
