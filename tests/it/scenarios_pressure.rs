//! Scenarios of too little memory: who loses pages, how many, and what is said.

use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode};
use vbar::memory::pager::{HeldPins, Shortfall};
use vbar::options::RuntimeOptions;
use vbar::units::PageIndex;
use vbar::{ErrorCode, Fault, Reason};

use crate::world::{DEVICE, P, World, drawn, fault, options, resident};

#[test]
fn scenario_2_out_of_memory_is_an_outcome() {
    let world = World::budget(2);
    let vbar = world.vbar(4);
    drop(resident(&world, &vbar, 0..2));
    world.sim.fail_next_n(Verb::MemCreate, 2, DriverCode::OUT_OF_MEMORY);
    assert_eq!(fault(&world, &vbar, 2..3).offloaded(), Some(Reason::Budget));
    assert_eq!((drawn(&vbar, 4).as_str(), world.used()), ("##..", 2));
    world.check();
}

#[test]
fn scenario_2_the_driver_may_refuse_what_it_called_free() {
    let world = World::new(4);
    let vbar = world.vbar(4);
    drop(resident(&world, &vbar, 0..2));
    world.sim.fail_next_n(Verb::MemCreate, 2, DriverCode::OUT_OF_MEMORY);
    drop(resident(&world, &vbar, 2..3));
    assert_eq!(world.runtime.statistics().driver_retries, 2);
    world.sim.fail_always(Verb::MemCreate, DriverCode::OUT_OF_MEMORY);
    assert_eq!(fault(&world, &vbar, 3..4).offloaded(), Some(Reason::DriverMemory));
    assert_eq!((drawn(&vbar, 4).as_str(), world.used()), ("###.", 3));
    world.sim.heal();
    drop(resident(&world, &vbar, 3..4));
    world.check();
}

#[test]
fn scenario_2_what_is_resident_gives_what_the_driver_does_not() {
    let world = World::new(4);
    let (old, new) = (world.vbar(2), world.vbar(2));
    drop(resident(&world, &old, 0..2));
    world.sim.fail_always(Verb::MemCreate, DriverCode::OUT_OF_MEMORY);
    drop(resident(&world, &new, 0..2));
    assert_eq!((drawn(&old, 2).as_str(), drawn(&new, 2).as_str()), ("..", "##"));
    world.check();
}

#[test]
fn scenario_3_a_watermark_heals() {
    let world = World::budget(8);
    let vbar = world.vbar(8);
    drop(resident(&world, &vbar, 0..8));
    world.runtime.set_budget(Some(4 * P)).unwrap();
    assert_eq!((drawn(&vbar, 8).as_str(), world.used()), ("####....", 4));
    assert_eq!(vbar.marks().watermark, 4);
    assert_eq!(world.touch(&vbar, 7..8), Err(Reason::AboveWatermark));
    world.runtime.set_budget(Some(100 * P)).unwrap();
    drop(resident(&world, &vbar, 7..8));
    world.check();
}

#[test]
fn scenario_3_free_memory_says_what_it_freed_and_why_not_more() {
    let world = World::budget(8);
    let vbar = world.vbar(8);
    drop(resident(&world, &vbar, 0..6));
    let freed = vbar.free_memory(8 * P).unwrap();
    assert_eq!((freed.bytes, freed.shortfall), (6 * P, Some(Shortfall::NothingResident)));
    vbar.prioritise().unwrap();
    let held = resident(&world, &vbar, 0..3);
    let freed = vbar.free_memory(P).unwrap();
    assert_eq!((freed.bytes, freed.shortfall), (0, Some(Shortfall::AllPinned(3))));
    drop(held);
    vbar.set_floor(2).unwrap();
    let freed = vbar.free_memory(8 * P).unwrap();
    assert_eq!((freed.bytes, freed.shortfall), (P, Some(Shortfall::AtFloor)));
    let freed = vbar.free_memory(0).unwrap();
    assert_eq!((freed.bytes, freed.shortfall), (0, None));
    world.check();
}

#[test]
fn scenario_4_leaked_pins_are_reported_and_released() {
    let world = World::budget(8);
    let vbar = world.vbar(4);
    std::mem::forget(resident(&world, &vbar, 0..4));
    let freed = vbar.free_memory(4 * P).unwrap();
    assert_eq!((freed.bytes, freed.shortfall), (0, Some(Shortfall::AllPinned(4))));
    let four: Vec<_> = (0..4).map(|page| (PageIndex(page), 1)).collect();
    let end = vbar.end_of_run(world.stream, HeldPins::Keep).unwrap();
    assert_eq!(end.held, four);
    assert_eq!(vbar.draw(4), "PPPP");
    let end = vbar.end_of_run(world.stream, HeldPins::Release).unwrap();
    assert_eq!(end.held, four);
    let freed = vbar.free_memory(4 * P).unwrap();
    assert_eq!((freed.bytes, freed.shortfall, world.used()), (4 * P, None, 0));
    world.check();
}

#[test]
fn scenario_4_a_guard_unpins_when_its_owner_unwinds() {
    let world = World::budget(8);
    let vbar = world.vbar(4);
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _guard = resident(&world, &vbar, 0..4);
        std::panic::resume_unwind(Box::new(()));
    }));
    assert!(unwound.is_err());
    assert_eq!(drawn(&vbar, 4), "####");
    assert_eq!(vbar.free_memory(4 * P).unwrap().bytes, 4 * P);
    world.check();
}

#[test]
fn scenario_5_a_double_unpin_takes_no_neighbours_pin() {
    let world = World::budget(8);
    let vbar = world.vbar(1);
    let (a, b) = (0..P / 2, P / 2..P);
    let token = |range| match vbar.fault(range, world.stream).unwrap() {
        Fault::Resident(guard) | Fault::HostMapped(guard) => guard.into_token(),
        Fault::Offloaded(reason) => panic!("{reason}"),
    };
    let (a, b) = (token(a), token(b));
    world.runtime.unpin(a, world.stream).unwrap();
    assert_eq!(world.runtime.unpin(a, world.stream).unwrap_err().code(), ErrorCode::StaleToken);
    let freed = vbar.free_memory(P).unwrap();
    assert_eq!((freed.bytes, freed.shortfall), (0, Some(Shortfall::AllPinned(1))));
    world.runtime.unpin(b, world.stream).unwrap();
    assert_eq!(vbar.free_memory(P).unwrap().bytes, P);
    let unknown = vbar::memory::pins::Token(7 << 32 | 99);
    assert_eq!(
        world.runtime.unpin(unknown, world.stream).unwrap_err().code(),
        ErrorCode::StaleToken
    );
    world.check();
}

#[test]
fn scenario_15_headroom_is_never_given_away() {
    let world = World::with(
        &format!("capacity={},granularity=64K", 4 * P),
        RuntimeOptions { headroom_bytes: Some(P), ..options() },
    );
    let (first, second) = (world.vbar(3), world.vbar(1));
    let held = resident(&world, &first, 0..3);
    assert_eq!(fault(&world, &second, 0..1).offloaded(), Some(Reason::AllPinned));
    assert_eq!(world.used(), 3);
    world.check();
    let plain = world.sim.mem_create(DEVICE, P).unwrap();
    world.sim.mem_release(plain).unwrap();
    drop(held);
}

#[test]
fn scenario_17_other_programs_memory_is_respected() {
    let world = World::with(
        &format!("capacity={},granularity=64K", 10 * P),
        RuntimeOptions { headroom_bytes: Some(P), ..options() },
    );
    let vbar = world.vbar(9);
    drop(resident(&world, &vbar, 0..6));
    let free = || 10 - world.used();
    for (outside, most) in (3..=9).map(|outside| (outside, 9 - outside)) {
        world.sim.set_outside_bytes(DEVICE, outside * P);
        let _ = world.touch(&vbar, 8..9);
        assert!(world.used() <= most, "{} pages held with {outside} outside", world.used());
        assert!(free() > outside, "no headroom is left with {outside} pages outside");
    }
    world.sim.set_outside_bytes(DEVICE, 0);
    vbar.prioritise().unwrap();
    drop(resident(&world, &vbar, 0..9));
    world.check();
}

#[test]
fn scenario_17_an_outsider_under_pins_is_made_room_for_when_they_go() {
    let world = World::new(8);
    let vbar = world.vbar(8);
    let held = resident(&world, &vbar, 0..6);
    world.sim.set_outside_bytes(DEVICE, 2 * P);
    let other = world.sim.second_process();
    drop(other);
    world.runtime.set_headroom(3 * P).unwrap();
    assert_eq!(world.used(), 6, "pins hold what the budget does not cover");
    assert!(world.touch(&vbar, 6..7).is_err());
    drop(held);
    world.runtime.refresh().unwrap();
    assert_eq!(world.used(), 3);
    world.check();
}

#[test]
fn scenario_18_headroom_changes_at_run_time() {
    let world = World::new(8);
    let vbar = world.vbar(8);
    drop(resident(&world, &vbar, 0..8));
    world.runtime.set_headroom(4 * P).unwrap();
    assert!(world.touch(&vbar, 7..8).is_err());
    assert_eq!((drawn(&vbar, 8).as_str(), world.used()), ("####....", 4));
    assert_eq!(world.runtime.budget_settings(), (None, 4 * P));
    let absurd = world.runtime.set_headroom(9 * P).unwrap_err();
    assert_eq!(absurd.code(), ErrorCode::InvalidArgument);
    assert_eq!(world.runtime.budget_settings(), (None, 4 * P));
    let maps = world.sim.calls(Verb::MemMap);
    world.runtime.set_headroom(0).unwrap();
    assert_eq!((world.sim.calls(Verb::MemMap), world.used()), (maps, 4));
    vbar.prioritise().unwrap();
    drop(resident(&world, &vbar, 0..8));
    world.check();
}

#[test]
fn scenario_58_victims_come_in_the_declared_order() {
    let world = World::budget(9);
    let bars = [world.vbar(3), world.vbar(3), world.vbar(3)];
    for (bar, class) in bars.iter().zip([5, -1, 2]) {
        bar.set_class(class).unwrap();
        drop(resident(&world, bar, 0..3));
    }
    let all = || bars.each_ref().map(|bar| drawn(bar, 3)).join(" ");
    let orders = [
        (8, "### ##. ###"),
        (6, "### ... ###"),
        (5, "### ... ##."),
        (3, "### ... ..."),
        (1, "#.. ... ..."),
    ];
    for (budget, expected) in orders {
        world.runtime.set_budget(Some(budget * P)).unwrap();
        assert_eq!(all(), expected);
    }
    world.check();
}

#[test]
fn scenario_58_a_pinned_model_of_lowest_priority_is_skipped() {
    let world = World::budget(6);
    let (low, mid, high) = (world.vbar(3), world.vbar(3), world.vbar(2));
    low.set_class(-1).unwrap();
    high.set_class(1).unwrap();
    let held = resident(&world, &low, 0..3);
    drop(resident(&world, &mid, 0..3));
    drop(resident(&world, &high, 0..2));
    assert_eq!((low.draw(3).as_str(), drawn(&mid, 3).as_str()), ("PPP", "#.."));
    drop(held);
    // Priorities move without a page lost.
    mid.prioritise().unwrap();
    low.deprioritise().unwrap();
    low.set_class(7).unwrap();
    assert_eq!((drawn(&low, 3).as_str(), drawn(&mid, 3).as_str()), ("###", "#.."));
    world.runtime.set_budget(Some(5 * P)).unwrap();
    assert_eq!((drawn(&low, 3).as_str(), drawn(&mid, 3).as_str()), ("###", "..."));
    world.check();
}
