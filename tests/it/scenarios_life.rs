//! Scenarios of bytes and lives: what a page holds, who may still read it, and what is left behind.

use std::time::Duration;

use vbar::driver::Driver;
use vbar::driver::sim::Verb;
use vbar::options::Eviction;
use vbar::units::DeviceOrdinal;
use vbar::{ErrorCode, Fault, Reason, Runtime};

use crate::world::{
    DEVICE, P, ROOMY, World, budget_options, fault, options, pattern_bytes, pattern_sum, resident,
    resident_on,
};

#[test]
fn scenario_6_a_signature_never_comes_again() {
    let world = World::with("capacity=64M,granularity=64K,poison=1", budget_options(4));
    let first = world.vbar(1);
    let before = resident(&world, &first, 0..1).signature().to_vec();
    assert_eq!(resident(&world, &first, 0..1).signature(), before);
    first.destroy_wait().unwrap();
    let second = world.vbar(1);
    let after = resident(&world, &second, 0..1).signature().to_vec();
    assert_ne!(before, after);
    second.free_memory(P).unwrap();
    second.prioritise().unwrap();
    let refilled = resident(&world, &second, 0..1);
    assert!(refilled.signature() != after && refilled.signature() != before);
}

/// Unpins right after a launch and lets another VBAR take the page: the launch reads the old bytes.
fn check_late_reader(eviction: Eviction, rounds: u64) {
    let world = World::evicting(2, eviction);
    let writer = world.another_stream();
    let target = world.scratch();
    let (old, new) = (world.vbar(2), world.vbar(2));
    let mut expected = 0u64;
    let delay = Duration::from_micros(300);
    for round in 0..rounds {
        old.prioritise().unwrap();
        let guard = resident(&world, &old, 0..2);
        world.write(guard.address(), 2 * P, round, world.stream);
        world.sum(guard.address(), 2 * P, target, delay, world.stream);
        expected = expected.wrapping_add(pattern_sum(2 * P, round));
        drop(guard);
        new.prioritise().unwrap();
        let guard = resident_on(&new, 0..2, writer);
        world.write(guard.address(), 2 * P, !round, writer);
        drop(guard);
    }
    assert_eq!(world.word(target, world.stream), expected);
    world.sim.stream_synchronize(writer).unwrap();
    world.check();
    let aliased = world.runtime.statistics().pages_aliased;
    assert_eq!(aliased > 0, eviction == Eviction::Aliasing, "{aliased} pages were aliased");
}

#[test]
fn scenario_7_a_late_reader_sees_its_bytes_with_aliasing() {
    check_late_reader(Eviction::Aliasing, 200);
}

#[test]
fn scenario_7_a_late_reader_sees_its_bytes_with_strict_eviction() {
    check_late_reader(Eviction::Strict, 200);
}

#[test]
fn scenario_7_giving_back_waits_for_the_reader() {
    let world = World::budget(2);
    let vbar = world.vbar(1);
    let target = world.scratch();
    for round in 0..100 {
        vbar.prioritise().unwrap();
        let guard = resident(&world, &vbar, 0..1);
        world.write(guard.address(), P, round, world.stream);
        world.sum(guard.address(), P, target, Duration::from_micros(200), world.stream);
        drop(guard);
        let freed = vbar.free_memory(P).unwrap();
        assert_eq!((freed.bytes, freed.shortfall), (P, None));
    }
    let sums = (0..100).map(|round| pattern_sum(P, round));
    assert_eq!(world.word(target, world.stream), sums.fold(0, u64::wrapping_add));
    world.check();
}

#[test]
fn scenario_8_five_thousand_vbars_leave_no_addresses() {
    let world = World::new(8);
    for round in 0..5000u64 {
        let vbar = world.vbar(8);
        let page = round % 8;
        drop(resident(&world, &vbar, page..page + 1));
        drop(vbar);
        assert_eq!(world.sim.live_reservations(), 0, "round {round}");
    }
    world.runtime.trim(0).unwrap();
    assert_eq!((world.used(), world.sim.reserved_bytes()), (0, 0));
    world.check();
    world.check_shut();
}

#[test]
fn scenario_9_addresses_are_what_was_asked_for() {
    let limit = format!("{ROOMY},address_space={}", 10 * P);
    let world = World::with(&limit, budget_options(4));
    let bars = [world.vbar(3), world.vbar(3), world.vbar(3)];
    for bar in &bars {
        assert_eq!((world.touch(bar, 2..3), bar.bytes()), (Ok(()), 3 * P));
        let beyond = bar.fault(3 * P..4 * P, world.stream).map(drop).unwrap_err();
        assert_eq!(beyond.code(), ErrorCode::InvalidArgument);
        bar.allocate(3 * P).unwrap();
        assert_eq!(bar.allocate(1).map(drop).unwrap_err().code(), ErrorCode::NoAddresses);
    }
    let fourth = world.vbar(3);
    assert_eq!(world.touch(&fourth, 0..1), Err(Reason::NoAddresses));
    let [first, ..] = bars;
    first.destroy_wait().unwrap();
    let fifth = world.vbar(3);
    assert_eq!(world.touch(&fifth, 0..1), Ok(()));
    world.check();
}

#[test]
fn scenario_13_devices_are_counted_apart() {
    let sim = format!("capacity={},granularity=64K,devices=2", 4 * P);
    let world = World::with(&sim, options());
    let other = Runtime::open(world.sim.driver(), DeviceOrdinal(1), options()).unwrap();
    let (near, far) = (world.vbar(4), other.create_bar(4 * P).unwrap());
    drop(resident(&world, &near, 0..4));
    let guard = far.fault(0..4 * P, vbar::units::Stream::NONE).unwrap().resident();
    assert!(guard.is_some());
    drop(guard);
    drop(resident(&world, &near, 0..4));
    let evicted = [&world.runtime, &other].map(|runtime| runtime.statistics().pages_evicted);
    assert_eq!((evicted, world.sim.calls(Verb::MemUnmap)), ([0, 0], 0));
    world.check();
}

#[test]
fn scenario_13_eight_threads_and_three_vbars() {
    const THREADS: u64 = 8;
    const OPERATIONS: u64 = 100_000 / THREADS;
    let world = World::budget(10);
    let bars = [world.vbar(6), world.vbar(6), world.vbar(6)];
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (world, bars) = (&world, &bars);
            scope.spawn(move || {
                let mut random = thread.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
                let context = world.runtime.device().context;
                world.sim.ctx_set_current(Some(context)).unwrap();
                let stream = world.sim.stream_create().unwrap();
                for _ in 0..OPERATIONS {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let bar = &bars[(random >> 8) as usize % 3];
                    let start = (random >> 16) % 6;
                    let end = (start + 1 + (random >> 24) % 2).min(6);
                    match random % 32 {
                        0 => drop(bar.free_memory((random >> 32) % 4 * P).unwrap()),
                        1 | 2 => bar.prioritise().unwrap(),
                        3 => bar.deprioritise().unwrap(),
                        4 => drop(world.runtime.trim(4 * P).unwrap()),
                        5 => bar.set_class((random >> 40) as i32 % 3).unwrap(),
                        _ => match bar.fault(start * P..end * P, stream).unwrap() {
                            Fault::Resident(guard) | Fault::HostMapped(guard) => drop(guard),
                            Fault::Offloaded(_) => {}
                        },
                    }
                }
            });
        }
    });
    world.runtime.refresh().unwrap();
    world.check();
    let numbers = world.runtime.numbers();
    let states = bars.iter().flat_map(|bar| bar.residency());
    let mapped = states.filter(|page| page.state.is_mapped()).count() as u64;
    assert_eq!(numbers.resident_pages, mapped);
    assert_eq!(numbers.used_bytes, mapped * P + numbers.free_bytes);
    assert!(numbers.used_bytes <= 10 * P && numbers.peak_bytes <= 10 * P);
    assert_eq!(world.sim.live_mappings() as u64, mapped + numbers.lingering_mappings);
    drop(bars);
    world.check_shut();
}

#[test]
fn scenario_59_unloading_really_unloads() {
    let world = World::budget(4);
    let vbar = world.vbar(4);
    for round in 0..50 {
        vbar.prioritise().unwrap();
        let guard = resident(&world, &vbar, 0..4);
        // In flight when the model is unloaded.
        world.write(guard.address(), 4 * P, round, world.stream);
        drop(guard);
        let freed = vbar.free_memory(u64::MAX).unwrap();
        assert_eq!((freed.bytes, world.used()), (4 * P, 0), "round {round}");
        vbar.prioritise().unwrap();
        let guard = resident(&world, &vbar, 0..4);
        world.write(guard.address(), 4 * P, !round, world.stream);
        world.sim.stream_synchronize(world.stream).unwrap();
        let bytes = world.sim.read_bytes(guard.address(), 4 * P as usize).unwrap();
        assert!(bytes == pattern_bytes(4 * P, !round), "round {round}");
    }
    world.check();
    assert!(world.runtime.free_memory(u64::MAX).unwrap().bytes >= 4 * P);
    assert_eq!((world.used(), world.sim.live_frames(DEVICE)), (0, 0));
    let _ = fault(&world, &vbar, 0..1);
}
