//! Faults that were found by reading, each with what it came to.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vbar::driver::sim::Verb;
use vbar::driver::{CaptureMode, Driver, DriverCode};
use vbar::memory::pager::HeldPins;
use vbar::runtime::FillGuard;
use vbar::torch::PoolId;
use vbar::units::Stream;
use vbar::{AllocationFault, ErrorCode, RuntimeOptions};

use crate::torch::Torch;
use crate::world::{P, ROOMY, World, budget_options, resident};

/// A commit after a forced end of run gave out a guard without pins, whose pages could go while
/// the caller believed to hold them.
#[test]
fn a_fill_is_not_committed_after_a_forced_end_of_run() {
    for named in [true, false] {
        let world = World::budget(1);
        let (vbar, other) = (world.vbar(1), world.vbar(1));
        let allocation = vbar.allocate(P).unwrap();
        let fault = || -> FillGuard<'_> {
            match allocation.fault(world.stream).unwrap() {
                AllocationFault::Refill(fill) => fill,
                _ => panic!("a refill is due"),
            }
        };
        let fill = fault();
        world.write(fill.address(), P, 3, world.stream);
        vbar.end_of_run(world.stream, HeldPins::Release).unwrap();
        let stream = if named { world.stream } else { Stream::NONE };
        let error = fill.commit(stream).map(drop).unwrap_err();
        assert_eq!(error.code(), ErrorCode::StaleToken, "{error}");
        let asked = format!("commit of the allocation at 0..{P} of VBAR {}", vbar.number());
        assert!(error.to_string().starts_with(&asked), "{error}");
        // The page can go, behind what was written to it, and the next fault asks for a refill.
        world.touch(&other, 0..1).unwrap();
        vbar.prioritise().unwrap();
        let fill = fault();
        world.write(fill.address(), P, 4, world.stream);
        drop(fill.commit(world.stream).unwrap());
        assert!(matches!(allocation.fault(world.stream).unwrap(), AllocationFault::Resident(_)));
        world.check();
    }
}

/// A stream whose id was not to be had at the end of its pool counted as captured until it was
/// used again, and until then nothing could wait for the device.
#[test]
fn the_end_of_a_pool_is_noted_without_the_id_of_its_stream() {
    let torch = Torch::budget(8);
    let (stream, id) = (torch.world.stream, PoolId(0, 1));
    torch.allocator.begin_pool(id, Box::new(move |asked| asked == stream));
    torch.world.sim.begin_capture(stream, CaptureMode::Global).unwrap();
    let block = torch.malloc_on(2 * P, stream);
    torch.write(block, 2 * P, 1, stream);
    let graph = torch.world.sim.end_capture(stream).unwrap();
    assert!(torch.world.runtime.device().fences.is_capture_known());
    torch.world.sim.fail_always(Verb::StreamGetId, DriverCode::INVALID_VALUE);
    torch.allocator.end_pool(id);
    torch.world.sim.heal();
    assert!(!torch.world.runtime.device().fences.is_capture_known());
    drop(graph);
    torch.allocator.free(block);
    torch.allocator.release_pool(id);
    torch.allocator.empty_cache().unwrap();
    assert_eq!(torch.reserved(), 0);
    torch.check();
}

/// Without virtual memory management: a block that was on its way while its pool was released went
/// to a pool that there was no more, and stayed there.
#[test]
fn a_block_on_its_way_does_not_outlive_its_pool() {
    let world = World::with("capacity=64M,granularity=64K,vmm=0", crate::world::options());
    let runtime = &world.runtime;
    let allocator = runtime.torch_allocator().unwrap();
    let (stream, id) = (world.stream, PoolId(1, 2));
    allocator.begin_pool(id, Box::new(move |asked| asked == stream));
    let begun = world.sim.calls(Verb::MemAlloc);
    world.sim.hang(Verb::MemAlloc);
    let context = world.runtime.device().context;
    let address = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            world.sim.ctx_set_current(Some(context)).unwrap();
            address.store(allocator.malloc(P as usize, stream).unwrap(), Ordering::Release);
        });
        while world.sim.calls(Verb::MemAlloc) == begun {
            std::thread::sleep(Duration::from_millis(1));
        }
        allocator.end_pool(id);
        allocator.release_pool(id);
        world.sim.heal();
    });
    allocator.free(address.into_inner());
    allocator.empty_cache().unwrap();
    assert_eq!(allocator.statistics().reserved_bytes.all.current, 0);
}

/// What was given away while a stream was held, and what no fence covered then, is gone after the
/// caches were emptied once the stream runs, although nobody works between calls.
#[test]
fn emptied_caches_leave_no_mapping_behind() {
    for record_interval in [Duration::ZERO, Duration::from_secs(1000)] {
        for free_first in [true, false] {
            let options = RuntimeOptions {
                record_interval,
                wait_timeout: Duration::from_millis(20),
                ..budget_options(2)
            };
            let torch = Torch::of(World::with(ROOMY, options));
            let (held, other) = (torch.world.stream, torch.world.another_stream());
            let vbar = torch.world.vbar(1);
            drop(resident(&torch.world, &vbar, 0..1));
            torch.world.sim.hold_stream(held).unwrap();
            let block = torch.malloc_on(P, held);
            torch.write(block, P, 1, held);
            torch.allocator.free(block);
            let second = torch.allocator.malloc(P as usize, other);
            if free_first && let Ok(second) = second {
                torch.allocator.free(second);
            }
            let _ = torch.allocator.empty_cache();
            torch.world.sim.release_stream(held).unwrap();
            if !free_first && let Ok(second) = second {
                torch.allocator.free(second);
            }
            torch.allocator.empty_cache().unwrap();
            vbar.free_memory(u64::MAX).unwrap();
            torch.world.runtime.trim(0).unwrap();
            assert_eq!(torch.reserved(), 0);
            // The word where sums are is all that is mapped, and all that is held.
            assert_eq!((torch.world.sim.live_mappings(), torch.world.used()), (1, 0));
            torch.check();
        }
    }
}
