//! Poison mode: what a read finds through the address of an evicted page, and that the frame it is
//! made of is accounted for, gives way, and leaves nothing behind.

use std::time::Duration;

use tempfile::TempDir;
use vbar::driver::kernel::checksum;
use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode};
use vbar::model::synth::{synthesize, tensor_seed};
use vbar::options::{Eviction, POISON_BYTE, Poison};
use vbar::units::DeviceAddress;
use vbar::{Allocation, AllocationFault, ErrorCode, Fault, Reason, RuntimeOptions, Vbar, WaitKind};

use crate::world::{DEVICE, P, ROOMY, World, budget_options, drawn, pattern_sum, resident};

const EVICTIONS: [Eviction; 2] = [Eviction::Aliasing, Eviction::Strict];

fn poison_options(pages: u64, eviction: Eviction) -> RuntimeOptions {
    RuntimeOptions { eviction, poison: Poison::On, ..budget_options(pages) }
}

/// A budget of `pages` pages, one of which the poison takes.
fn world(pages: u64, eviction: Eviction) -> World {
    World::with(ROOMY, poison_options(pages, eviction))
}

/// Everything that can go has gone: nothing lingers.
fn settle(world: &World) {
    world.sim.ctx_synchronize().unwrap();
    world.runtime.refresh().unwrap();
    world.runtime.refresh().unwrap();
}

/// A kernel that reads without a pin finds poison in all of the pages.
#[track_caller]
fn check_poison(world: &World, target: DeviceAddress, vbar: &Vbar, pages: std::ops::Range<u64>) {
    for page in pages {
        let before = world.word(target, world.stream);
        let address = vbar.base().offset(page * P);
        world.sum(address, P, target, Duration::ZERO, world.stream);
        let sum = world.word(target, world.stream).wrapping_sub(before);
        assert_eq!(world.sim.violations(), Vec::<String>::new(), "page {page} is fatal");
        assert_eq!(sum, checksum(&vec![POISON_BYTE; P as usize], 0), "page {page}");
    }
}

fn fill(world: &World, allocation: &Allocation, seed: u64) {
    let AllocationFault::Refill(fill) = allocation.fault(world.stream).unwrap() else {
        panic!("a refill is due")
    };
    world.write(fill.address(), fill.bytes(), seed, world.stream);
    drop(fill.commit(world.stream).unwrap());
}

#[test]
fn a_nan_in_every_format() {
    let bytes = [POISON_BYTE; 8];
    assert!(f64::from_le_bytes(bytes).is_nan());
    assert!(f32::from_le_bytes([POISON_BYTE; 4]).is_nan());
    // Exponent all ones and a mantissa that is not 0, by width of exponent and mantissa: f16, bf16,
    // fp8 e5m2; e4m3 has no infinity and one NaN, all ones.
    for (exponent, mantissa) in [(5, 10), (8, 7), (5, 2), (4, 3)] {
        let word = u16::from_le_bytes([POISON_BYTE; 2]) >> (16 - (1 + exponent + mantissa));
        assert_eq!(word >> mantissa & ((1 << exponent) - 1), (1 << exponent) - 1);
        assert_ne!(word & ((1 << mantissa) - 1), 0);
    }
}

#[test]
fn a_stale_read_finds_the_pattern_and_a_refill_its_bytes() {
    for eviction in EVICTIONS {
        let world = world(4, eviction);
        let (vbar, other, target) = (world.vbar(3), world.vbar(3), world.scratch());
        let allocation = vbar.allocate(3 * P).unwrap();
        for round in 0..3 {
            vbar.prioritise().unwrap();
            fill(&world, &allocation, round);
            let AllocationFault::Resident(guard) = allocation.fault(world.stream).unwrap() else {
                panic!("it was just filled")
            };
            let sums = world.scratch();
            world.sum(guard.address(), 3 * P, sums, Duration::ZERO, world.stream);
            drop(guard);
            assert_eq!(world.word(sums, world.stream), pattern_sum(3 * P, round));
            other.prioritise().unwrap();
            drop(resident(&world, &other, 0..3));
            settle(&world);
            assert_eq!((vbar.draw(3).as_str(), drawn(&other, 3).as_str()), ("...", "###"));
            check_poison(&world, target, &vbar, 0..3);
            let numbers = world.runtime.numbers();
            // In the first round the other's pages never had a frame.
            assert_eq!((numbers.poison_bytes, numbers.poisoned_pages), (P, 3), "{eviction:?}");
            assert_eq!((world.used(), numbers.peak_bytes), (4, 4 * P));
            world.check();
        }
        assert_eq!(world.runtime.statistics().poison_failures, 0);
        drop((allocation, vbar, other));
        settle(&world);
        world.check_shut();
    }
}

#[test]
fn a_bound_page_comes_back_with_the_files_bytes() {
    for eviction in EVICTIONS {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("model.safetensors");
        synthesize(&path, 16 * P, 4).unwrap();
        let world = world(8, eviction);
        let bar = world.runtime.open_model(&path).unwrap();
        let (target, count) = (world.scratch(), bar.model().tensors().len());
        let mut expected = 0u64;
        for tensor in (0..3).flat_map(|_| 0..count) {
            let Fault::Resident(guard) = bar.fault(tensor, world.stream).unwrap() else {
                panic!("tensor {tensor} streams")
            };
            world.sum(guard.address(), guard.bytes(), target, Duration::ZERO, world.stream);
            let seed = tensor_seed(4, &bar.model().tensors()[tensor].name);
            expected = expected.wrapping_add(pattern_sum(guard.bytes(), seed));
        }
        assert_eq!(world.word(target, world.stream), expected, "{eviction:?}");
        settle(&world);
        let drawn = bar.vbar().draw(16);
        let absent = (0..).zip(drawn.chars()).filter(|(_, page)| *page == '.');
        let absent: Vec<u64> = absent.map(|(page, _)| page).collect();
        assert!(absent.len() >= 8, "{eviction:?}: {absent:?}");
        absent.into_iter().for_each(|page| {
            check_poison(&world, target, bar.vbar(), page..page + 1);
        });
        drop(bar);
        settle(&world);
        world.check_shut();
    }
}

/// Something that takes the upper two of four pages.
type Take = fn(&World, &Vbar);

#[test]
fn whatever_takes_a_page_leaves_poison() {
    let takes: [(&str, Take); 5] = [
        ("free_memory", |_, vbar| assert_eq!(vbar.free_memory(2 * P).unwrap().bytes, 2 * P)),
        ("free_memory of the device", |world, _| {
            assert_eq!(world.runtime.free_memory(2 * P).unwrap().bytes, 2 * P);
        }),
        ("set_watermark", |_, vbar| vbar.set_watermark(2).unwrap()),
        ("set_budget", |world, _| world.runtime.set_budget(Some(3 * P)).unwrap()),
        ("outside", |world, _| {
            world.sim.set_outside_bytes(DEVICE, (64 << 20) - 6 * P);
            world.runtime.set_headroom(2 * P).unwrap();
        }),
    ];
    for (name, take) in takes {
        for eviction in EVICTIONS {
            let world = world(5, eviction);
            let (vbar, target) = (world.vbar(4), world.scratch());
            drop(resident(&world, &vbar, 0..4));
            world.sim.ctx_synchronize().unwrap();
            take(&world, &vbar);
            settle(&world);
            assert_eq!((drawn(&vbar, 4).as_str(), world.used()), ("##..", 3), "{name}");
            check_poison(&world, target, &vbar, 2..4);
            // What is cached goes, and the poison stays where it is behind a page.
            world.runtime.trim(0).unwrap();
            assert_eq!(world.used(), 3, "{name}");
            check_poison(&world, target, &vbar, 2..4);
            world.check();
            drop(vbar);
            settle(&world);
            world.runtime.trim(0).unwrap();
            let numbers = world.runtime.numbers();
            assert_eq!((numbers.used_bytes, numbers.poison_bytes), (0, 0), "{name}");
            world.check_shut();
        }
    }
}

#[test]
fn the_budget_has_one_page_less_for_pages() {
    let world = world(4, Eviction::Aliasing);
    let vbar = world.vbar(8);
    assert_eq!(world.used(), 0);
    assert_eq!(world.touch(&vbar, 0..4), Err(Reason::TooLarge));
    assert_eq!(world.touch(&vbar, 0..3), Ok(()));
    assert_eq!((world.used(), world.runtime.numbers().resident_pages), (4, 3));
    // A page of its own would be needed above what is kept.
    let held = resident(&world, &vbar, 0..3);
    assert_eq!(world.touch(&vbar, 3..4), Err(Reason::Budget));
    drop(held);
    world.runtime.set_budget(Some(6 * P)).unwrap();
    vbar.prioritise().unwrap();
    assert_eq!(world.touch(&vbar, 0..5), Ok(()));
    assert_eq!((world.used(), world.runtime.numbers().peak_bytes), (6, 6 * P));
    world.check();
}

#[test]
fn a_budget_of_one_page_is_all_for_pages() {
    let world = world(1, Eviction::Aliasing);
    let (vbar, other) = (world.vbar(1), world.vbar(1));
    assert_eq!(world.touch(&vbar, 0..1), Ok(()));
    assert_eq!(world.touch(&other, 0..1), Ok(()));
    settle(&world);
    let numbers = world.runtime.numbers();
    assert_eq!((numbers.used_bytes, numbers.poison_bytes), (P, 0));
    assert_eq!(world.runtime.statistics().poison_failures, 1, "one page has no poison");
    world.check();
}

#[test]
fn the_poison_gives_way_to_a_smaller_budget() {
    for pages in [0, 1] {
        let world = world(4, Eviction::Strict);
        let (vbar, target) = (world.vbar(3), world.scratch());
        drop(resident(&world, &vbar, 0..3));
        world.sim.ctx_synchronize().unwrap();
        vbar.free_memory(2 * P).unwrap();
        check_poison(&world, target, &vbar, 1..3);
        world.runtime.set_budget(Some(pages * P)).unwrap();
        settle(&world);
        let numbers = world.runtime.numbers();
        assert_eq!((world.used(), numbers.poison_bytes), (pages, 0));
        assert_eq!(world.sim.live_mappings() as u64, 1 + pages, "the test's own, and its pages");
        world.check();
        world.runtime.set_budget(Some(4 * P)).unwrap();
        vbar.prioritise().unwrap();
        drop(resident(&world, &vbar, 0..3));
        world.sim.ctx_synchronize().unwrap();
        vbar.free_memory(P).unwrap();
        check_poison(&world, target, &vbar, 2..3);
        world.check();
    }
}

#[test]
fn the_poison_gives_way_when_all_else_is_pinned() {
    let world = world(5, Eviction::Aliasing);
    let (vbar, gone) = (world.vbar(4), world.vbar(1));
    drop(resident(&world, &gone, 0..1));
    world.sim.ctx_synchronize().unwrap();
    gone.free_memory(P).unwrap();
    let guard = resident(&world, &vbar, 0..4);
    assert_eq!(world.used(), 5);
    world.runtime.set_budget(Some(4 * P)).unwrap();
    assert_eq!((world.used(), world.runtime.numbers().poison_bytes), (4, 0));
    world.check();
    drop(guard);
    drop((vbar, gone));
    settle(&world);
    world.check_shut();
}

#[test]
fn pins_left_at_the_end_leave_no_poison() {
    let world = world(4, Eviction::Aliasing);
    let vbar = world.vbar(3);
    drop(resident(&world, &vbar, 0..3));
    world.sim.ctx_synchronize().unwrap();
    vbar.free_memory(2 * P).unwrap();
    let _never_given_back = resident(&world, &vbar, 0..1).into_token();
    drop(vbar);
    assert_eq!(world.runtime.numbers().closing_bars, 1);
    world.check_shut();
}

#[test]
fn a_poison_that_cannot_be_made_is_made_later() {
    let verbs = [
        Verb::MemCreate,
        Verb::MemAddressReserve,
        Verb::MemMap,
        Verb::MemSetAccess,
        Verb::StreamCreate,
        Verb::MemsetD8Async,
        Verb::EventCreate,
        Verb::EventRecord,
        Verb::EventQuery,
    ];
    for verb in verbs {
        for attempts in 1..3 {
            let world = world(4, Eviction::Aliasing);
            let (vbar, target) = (world.vbar(3), world.scratch());
            for attempt in 0..attempts {
                world.sim.fail_nth(verb, 1, DriverCode::INVALID_VALUE);
                drop(resident(&world, &vbar, attempt..attempt + 1));
                assert_eq!(world.runtime.statistics().poison_failures, attempt + 1, "{verb}");
                world.check();
            }
            drop(resident(&world, &vbar, 0..3));
            world.sim.ctx_synchronize().unwrap();
            vbar.free_memory(P).unwrap();
            check_poison(&world, target, &vbar, 2..3);
            world.check();
            drop(vbar);
            settle(&world);
            world.check_shut();
        }
    }
}

#[test]
fn a_poison_that_cannot_be_mapped_is_no_error() {
    for verb in [Verb::MemMap, Verb::MemSetAccess] {
        for code in [DriverCode::INVALID_VALUE, DriverCode::OUT_OF_MEMORY] {
            let world = world(4, Eviction::Aliasing);
            let (vbar, target) = (world.vbar(3), world.scratch());
            drop(resident(&world, &vbar, 0..3));
            world.sim.ctx_synchronize().unwrap();
            world.sim.fail_always(verb, code);
            assert_eq!(vbar.free_memory(2 * P).unwrap().bytes, 2 * P, "{verb} {code:?}");
            world.sim.heal();
            assert_eq!(world.runtime.statistics().poison_failures, 2);
            assert_eq!(world.runtime.numbers().poisoned_pages, 0);
            // The test's own, the page's and the poison's.
            assert_eq!(world.sim.live_mappings(), 3);
            assert_eq!(vbar.free_memory(P).unwrap().bytes, P);
            check_poison(&world, target, &vbar, 0..1);
            world.check();
        }
    }
}

#[test]
fn a_poison_that_is_half_mapped_for_good_costs_the_page() {
    let world = world(4, Eviction::Aliasing);
    let vbar = world.vbar(3);
    drop(resident(&world, &vbar, 0..3));
    world.sim.ctx_synchronize().unwrap();
    world.sim.fail_nth(Verb::MemSetAccess, 1, DriverCode::INVALID_VALUE);
    // The page goes, and then the poison does not.
    world.sim.fail_nth(Verb::MemUnmap, 2, DriverCode::INVALID_VALUE);
    assert_eq!(vbar.free_memory(P).unwrap().bytes, P);
    assert_eq!((drawn(&vbar, 3).as_str(), world.used()), ("##X", 3));
    assert_eq!(world.runtime.numbers().quarantined_pages, 1);
    world.check();
    vbar.prioritise().unwrap();
    assert_eq!(world.touch(&vbar, 2..3), Err(Reason::Quarantined));
    drop(vbar);
    settle(&world);
    world.runtime.trim(0).unwrap();
    // The driver never gets the frame back, and it counts for as long as we live.
    let numbers = world.runtime.numbers();
    assert_eq!((numbers.used_bytes, numbers.quarantined_bytes, numbers.poison_bytes), (P, P, 0));
    world.check();
}

#[test]
fn a_page_whose_poison_does_not_go_is_as_it_was() {
    for eviction in EVICTIONS {
        for many in [false, true] {
            let world = world(5, eviction);
            let (vbar, target) = (world.vbar(4), world.scratch());
            drop(resident(&world, &vbar, 0..4));
            world.sim.ctx_synchronize().unwrap();
            vbar.free_memory(4 * P).unwrap();
            vbar.prioritise().unwrap();
            let pages = if many { 0..4 } else { 0..1 };
            let books = (world.used(), world.sim.live_mappings());
            world.sim.fail_nth(Verb::MemUnmap, pages.end, DriverCode::INVALID_VALUE);
            let failed = vbar.fault(pages.start * P..pages.end * P, world.stream);
            assert_eq!(failed.map(drop).unwrap_err().code(), ErrorCode::Driver);
            assert_eq!((world.used(), world.sim.live_mappings()), books);
            check_poison(&world, target, &vbar, 0..4);
            world.check();
            world.sim.fail_always(Verb::MemUnmap, DriverCode::NOT_READY);
            assert_eq!(world.touch(&vbar, pages.clone()), Err(Reason::DriverMemory));
            world.sim.heal();
            check_poison(&world, target, &vbar, 0..4);
            assert_eq!(world.touch(&vbar, pages), Ok(()));
            world.check();
        }
    }
}

#[test]
fn a_failed_fault_puts_the_poison_back() {
    for verb in [Verb::MemCreate, Verb::MemMap, Verb::MemSetAccess] {
        let world = world(5, Eviction::Aliasing);
        let (vbar, target) = (world.vbar(4), world.scratch());
        drop(resident(&world, &vbar, 0..2));
        world.sim.ctx_synchronize().unwrap();
        vbar.free_memory(2 * P).unwrap();
        vbar.prioritise().unwrap();
        let books = (world.used(), world.sim.live_mappings());
        world.sim.fail_nth(verb, 1, DriverCode::INVALID_VALUE);
        assert!(vbar.fault(0..4 * P, world.stream).is_err(), "{verb}");
        assert_eq!((world.used(), world.sim.live_mappings()), books, "{verb}");
        check_poison(&world, target, &vbar, 0..2);
        world.check();
        assert_eq!(world.touch(&vbar, 0..4), Ok(()));
        world.check();
    }
}

#[test]
fn a_closed_vbar_whose_poison_does_not_go_loses_its_addresses() {
    let world = world(4, Eviction::Aliasing);
    let vbar = world.vbar(3);
    drop(resident(&world, &vbar, 0..3));
    world.sim.ctx_synchronize().unwrap();
    vbar.free_memory(3 * P).unwrap();
    world.sim.fail_nth(Verb::MemUnmap, 2, DriverCode::INVALID_VALUE);
    drop(vbar);
    settle(&world);
    let numbers = world.runtime.numbers();
    assert_eq!((numbers.bars, numbers.closing_bars, numbers.quarantined_pages), (0, 0, 1));
    assert_eq!((world.sim.live_reservations(), world.sim.live_mappings()), (2, 2));
    // It is poison all the same, until nobody wants any.
    let (again, target) = (world.vbar(1), world.scratch());
    drop(resident(&world, &again, 0..1));
    world.sim.ctx_synchronize().unwrap();
    again.free_memory(P).unwrap();
    check_poison(&world, target, &again, 0..1);
    drop(again);
    settle(&world);
    world.runtime.trim(0).unwrap();
    let numbers = world.runtime.numbers();
    assert_eq!((numbers.used_bytes, numbers.quarantined_bytes), (P, P));
    world.check();
}

#[test]
fn the_wait_for_the_pattern_ends_by_its_time_out() {
    let options = RuntimeOptions {
        wait_timeout: Duration::from_millis(20),
        ..poison_options(4, Eviction::Aliasing)
    };
    let world = World::with(ROOMY, options);
    world.sim.fail_always(Verb::EventQuery, DriverCode::NOT_READY);
    let vbar = world.vbar(3);
    drop(resident(&world, &vbar, 0..1));
    let statistics = world.runtime.statistics();
    assert_eq!((statistics.poison_failures, statistics.waited(WaitKind::Ready).count), (1, 1));
    check_made_later(world, &vbar);
}

/// Whoever cancels waits means the whole call.
#[test]
fn a_cancelled_wait_for_the_pattern_cancels_its_fault() {
    let world = world(4, Eviction::Aliasing);
    world.sim.fail_always(Verb::EventQuery, DriverCode::NOT_READY);
    let vbar = world.vbar(3);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| vbar.fault(P..2 * P, world.stream).map(drop));
        while !waiter.is_finished() {
            world.runtime.cancel_waits();
            std::thread::yield_now();
        }
        assert_eq!(waiter.join().unwrap().unwrap_err().code(), ErrorCode::Cancelled);
    });
    assert_eq!(vbar.draw(3), "...");
    check_made_later(world, &vbar);
}

/// With a driver that works again the poison is made after all.
#[track_caller]
fn check_made_later(world: World, vbar: &Vbar) {
    world.check();
    world.sim.heal();
    let target = world.scratch();
    drop(resident(&world, vbar, 0..3));
    world.sim.ctx_synchronize().unwrap();
    vbar.free_memory(P).unwrap();
    check_poison(&world, target, vbar, 2..3);
    vbar.close();
    settle(&world);
    world.check();
}
