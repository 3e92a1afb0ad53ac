//! The option `scrub`: bytes of one owner are not there for the next, and what that costs.
//!
//! New memory of these devices holds 0xA5, so that what nobody cleared shows. Each check is made
//! without the option as well, where the bytes must be seen: else it would prove nothing.

use std::time::Duration;

use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode};
use vbar::host::memory::HostMemory;
use vbar::model::binding::Binding;
use vbar::options::{Eviction, HostMapped, RuntimeOptions, Scrub};
use vbar::units::{DeviceAddress, Stream};
use vbar::{AllocationFault, ErrorCode, Vbar};

use crate::torch::Torch;
use crate::world::{P, World, budget_options, pattern_bytes, pattern_sum, resident, resident_on};

const DIRTY: &str = "capacity=64M,granularity=64K,poison=1,checked=1";
const NEW: u8 = 0xA5;
const SECRET: u64 = 7;

fn options(pages: u64, scrub: Scrub) -> RuntimeOptions {
    RuntimeOptions { scrub, ..budget_options(pages) }
}

fn world(pages: u64, scrub: Scrub) -> World {
    World::with(DIRTY, options(pages, scrub))
}

/// Writes a secret to all pages of a VBAR, and gives them back.
fn keep_secret(world: &World, vbar: &Vbar, pages: u64) {
    let guard = resident(world, vbar, 0..pages);
    world.write(guard.address(), pages * P, SECRET, world.stream);
}

/// The bytes at an address, once the stream is done.
fn bytes(world: &World, address: DeviceAddress, count: u64, stream: Stream) -> Vec<u8> {
    world.sim.stream_synchronize(stream).unwrap();
    world.sim.read_bytes(address, count as usize).unwrap()
}

fn is_clear(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

#[test]
fn a_page_finds_nothing_of_the_vbar_before() {
    for eviction in [Eviction::Aliasing, Eviction::Strict] {
        for scrub in [Scrub::Off, Scrub::On] {
            let world = World::with(DIRTY, RuntimeOptions { eviction, ..options(3, scrub) });
            let (old, new) = (world.vbar(2), world.vbar(3));
            let fresh = resident(&world, &old, 0..1);
            let found = bytes(&world, fresh.address(), P, world.stream);
            assert_eq!(is_clear(&found), scrub == Scrub::On, "new memory");
            assert!(scrub == Scrub::On || found.iter().all(|byte| *byte == NEW));
            drop(fresh);
            keep_secret(&world, &old, 2);
            let guard = resident(&world, &new, 0..3);
            let found = bytes(&world, guard.address(), 3 * P, world.stream);
            assert_eq!(is_clear(&found), scrub == Scrub::On, "{eviction:?}");
            let secret = pattern_bytes(2 * P, SECRET);
            let seen = found.chunks(64).filter(|part| secret.chunks(64).any(|it| it == *part));
            assert_eq!(seen.count() > 0, scrub == Scrub::Off, "{eviction:?}");
            drop(guard);
            world.check();
        }
    }
}

/// Cleared behind the work that still reads the page before, and before the work after.
#[test]
fn clearing_is_in_the_order_of_the_streams() {
    let world = world(2, Scrub::On);
    let (old, new, other) = (world.vbar(2), world.vbar(2), world.another_stream());
    keep_secret(&world, &old, 2);
    let target = world.scratch();
    world.sim.hold_stream(world.stream).unwrap();
    let guard = resident(&world, &old, 0..2);
    world.sum(guard.address(), 2 * P, target, Duration::from_millis(1), world.stream);
    drop(guard);
    // Its frames are taken while the sum has not begun.
    let guard = resident_on(&new, 0..2, other);
    world.write(guard.address(), P, 9, other);
    world.sim.release_stream(world.stream).unwrap();
    let found = bytes(&world, guard.address(), 2 * P, other);
    assert_eq!(found[..P as usize], pattern_bytes(P, 9));
    assert!(is_clear(&found[P as usize..]));
    assert_eq!(world.word(target, world.stream), pattern_sum(2 * P, SECRET));
    drop(guard);
    world.check();
}

#[test]
fn without_a_stream_a_page_is_clear_when_the_fault_returns() {
    let world = world(1, Scrub::On);
    let (old, new) = (world.vbar(1), world.vbar(1));
    keep_secret(&world, &old, 1);
    world.sim.stream_synchronize(world.stream).unwrap();
    let guard = resident_on(&new, 0..1, Stream::NONE);
    assert!(is_clear(&world.sim.read_bytes(guard.address(), P as usize).unwrap()));
    drop(guard);
    world.check();
}

#[test]
fn an_allocation_beside_another_keeps_what_was_written() {
    let world = world(1, Scrub::On);
    let vbar = world.vbar(1);
    let (first, second) = (vbar.allocate(P / 2).unwrap(), vbar.allocate(P / 2).unwrap());
    for (allocation, seed) in [(&first, 3), (&second, 4)] {
        let AllocationFault::Refill(fill) = allocation.fault(world.stream).unwrap() else {
            panic!("never written")
        };
        world.write(fill.address(), P / 2, seed, world.stream);
        drop(fill.commit(world.stream).unwrap());
    }
    // Only a frame that comes is cleared, not a page that is there.
    let AllocationFault::Resident(guard) = first.fault(world.stream).unwrap() else {
        panic!("nothing was evicted")
    };
    assert_eq!(bytes(&world, guard.address(), P / 2, world.stream), pattern_bytes(P / 2, 3));
}

#[test]
fn tensors_find_nothing_of_weights() {
    for scrub in [Scrub::Off, Scrub::On] {
        let torch = Torch::of(world(4, scrub));
        let weights = torch.world.vbar(4);
        keep_secret(&torch.world, &weights, 4);
        let block = torch.malloc(3 * P);
        let found = bytes(&torch.world, DeviceAddress(block), 3 * P, torch.world.stream);
        assert_eq!(is_clear(&found), scrub == Scrub::On);
        // A block that PyTorch frees and asks for again is its own, as it was.
        torch.write(block, 3 * P, 5, torch.world.stream);
        torch.allocator.free(block);
        assert_eq!(torch.malloc(3 * P), block);
        let found = bytes(&torch.world, DeviceAddress(block), 3 * P, torch.world.stream);
        assert_eq!(found, pattern_bytes(3 * P, 5));
        torch.allocator.free(block);
        torch.check();
    }
}

/// A VBAR of which `parts` are bound, to memory that is none of the device's.
fn bind(vbar: &Vbar, parts: &[(u64, u64)], seed: u64) {
    let mut binding = Binding::new();
    for (start, end) in parts {
        binding.bind(*start..*end, 0, *start, end - start).unwrap();
    }
    let memory = HostMemory::new(pattern_bytes(vbar.bytes(), seed)).unwrap();
    vbar.bind_sources(binding, vec![memory.into()]).unwrap();
}

/// What no file fills: the end of a page, and the gap between two tensors, which is copied along
/// from a slot that had other bytes before.
#[test]
fn what_is_not_filled_is_clear() {
    let gap = 40 << 10;
    let parts = [(0, 4096), (4096 + gap, P - 4096)];
    for (scrub, host_mapped) in
        [(Scrub::Off, HostMapped::Off), (Scrub::On, HostMapped::Off), (Scrub::On, HostMapped::On)]
    {
        let one_slot = RuntimeOptions { staging_slot_count: 1, ..options(2, scrub) };
        let world = World::with(DIRTY, RuntimeOptions { host_mapped, ..one_slot });
        let (old, new) = (world.vbar(2), world.vbar(3));
        bind(&old, &[(0, 2 * P)], SECRET);
        bind(&new, &[parts[0], parts[1], (P + 512, P + 1024)], 3);
        drop(resident(&world, &old, 0..2));
        // More than the budget, where host memory may stand in.
        let pages = if host_mapped == HostMapped::On { 3 } else { 2 };
        let guard = resident(&world, &new, 0..pages);
        let found = bytes(&world, guard.address(), pages * P, world.stream);
        let expected = pattern_bytes(3 * P, 3);
        let mut filled = vec![false; (pages * P) as usize];
        for (start, end) in parts.into_iter().chain([(P + 512, P + 1024)]) {
            let range = start as usize..end as usize;
            assert_eq!(found[range.clone()], expected[range.clone()]);
            filled[range].fill(true);
        }
        let rest = found.iter().zip(filled).filter(|(_, filled)| !filled);
        let rest: Vec<u8> = rest.map(|(byte, _)| *byte).collect();
        assert_eq!(is_clear(&rest), scrub == Scrub::On);
        drop(guard);
        world.check();
    }
}

/// One call for each run of pages that come together, and none for pages that are filled whole.
#[test]
fn what_it_costs() {
    let count = |scrub| {
        let world = world(8, scrub);
        let (vbar, bound) = (world.vbar(8), world.vbar(2));
        bind(&bound, &[(0, 2 * P)], 1);
        let calls = || Verb::ALL.iter().map(|verb| world.sim.calls(*verb)).sum::<u64>();
        let calls_before = calls();
        drop(resident(&world, &vbar, 0..4));
        drop(resident(&world, &vbar, 5..6));
        drop(resident(&world, &vbar, 0..6));
        let bare = (calls() - calls_before, world.sim.calls(Verb::MemsetD8Async));
        drop(resident(&world, &bound, 0..2));
        (bare, world.sim.calls(Verb::MemsetD8Async))
    };
    let ((without, none), none_bound) = count(Scrub::Off);
    let ((with, cleared), cleared_bound) = count(Scrub::On);
    // Three requests brought pages: 0..4, 5, 4.
    assert_eq!((none, cleared, none_bound, cleared_bound), (0, 3, 0, 3));
    // Beside each a record of an event, and what goes with it.
    assert!(with > without && with - without <= 3 * 6, "{without} calls without, {with} with");
}

#[test]
fn a_page_that_could_not_be_cleared_is_not_handed_out() {
    for verb in [Verb::MemsetD8Async, Verb::EventRecord] {
        for nth in 1..=2 {
            let world = world(4, Scrub::On);
            let (old, new) = (world.vbar(4), world.vbar(4));
            keep_secret(&world, &old, 4);
            let ranges = [(&new, 0..P), (&new, 2 * P..3 * P)];
            world.sim.fail_nth(verb, nth, DriverCode::INVALID_VALUE);
            match world.runtime.fault_many(&ranges, world.stream) {
                Err(error) => {
                    assert_eq!(error.code(), ErrorCode::Driver);
                    assert!(error.to_string().contains(verb.call()), "{error}");
                }
                // There are fewer records than that.
                Ok(_) => assert_eq!((verb, nth), (Verb::EventRecord, 2)),
            }
            world.sim.heal();
            world.check();
            // The frames come again behind what was enqueued on them.
            let (other, target) = (world.another_stream(), world.scratch());
            old.prioritise().unwrap();
            let guard = resident_on(&old, 0..4, other);
            world.write(guard.address(), 4 * P, 2, other);
            world.sum(guard.address(), 4 * P, target, Duration::ZERO, other);
            assert_eq!(world.word(target, other), pattern_sum(4 * P, 2), "{verb:?} {nth}");
            drop(guard);
            world.check();
        }
    }
}
