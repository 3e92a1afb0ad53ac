//! Limits of the machine: mappings, addresses, and VBARs far larger than any device.

use vbar::driver::sim::{Sim, SimOptions};
use vbar::options::STAGING_SLOTS_MAX;
use vbar::units::TIB;
use vbar::{ErrorCode, Fault, Reason, Runtime, RuntimeOptions};

use crate::world::{DEVICE, P, ROOMY, World, budget_options, drawn, resident};

#[test]
fn too_many_mappings_are_an_outcome() {
    let world = World::with(&format!("{ROOMY},mappings=3"), budget_options(8));
    let (vbar, other) = (world.vbar(8), world.vbar(8));
    assert_eq!(world.touch(&vbar, 0..4), Err(Reason::Mappings));
    assert_eq!((world.sim.live_mappings(), vbar.draw(4).as_str()), (0, "...."));
    drop(resident(&world, &vbar, 0..3));
    assert_eq!(world.touch(&vbar, 3..4), Err(Reason::Mappings));
    assert_eq!(world.touch(&other, 0..1), Err(Reason::Mappings));
    assert_eq!(drawn(&vbar, 4), "###.");
    assert_eq!(world.runtime.statistics().refused(Reason::Mappings), 3);
    vbar.free_memory(P).unwrap();
    drop(resident(&world, &other, 0..1));
    world.check();
}

#[test]
fn a_vbar_of_a_tebibyte_costs_nothing() {
    let world = World::budget(4);
    let vbar = world.runtime.create_bar(TIB).unwrap();
    assert_eq!((world.used(), world.sim.live_frames(crate::world::DEVICE)), (0, 0));
    let last = vbar.fault(TIB - P..TIB, world.stream).unwrap();
    assert!(matches!(last, Fault::Resident(_)), "{last:?}");
    drop(last);
    drop(resident(&world, &vbar, 0..1));
    assert_eq!(world.used(), 2);
    vbar.destroy_wait().unwrap();
    assert_eq!(world.sim.live_reservations(), 0);
    world.check();
    assert!(world.runtime.create_bar(0).is_err());
    assert!(world.runtime.create_bar(u64::MAX).is_err());
}

#[test]
fn a_range_larger_than_the_budget_says_so_whatever_is_resident() {
    let world = World::budget(4);
    let vbar = world.vbar(8);
    assert_eq!(world.touch(&vbar, 0..5), Err(Reason::TooLarge));
    drop(resident(&world, &vbar, 0..3));
    assert_eq!(world.touch(&vbar, 0..5), Err(Reason::TooLarge));
    assert_eq!(world.runtime.statistics().refused(Reason::TooLarge), 2);
    assert_eq!(drawn(&vbar, 8), "###.....");
    world.check();
}

#[test]
fn a_number_of_staging_slots_that_is_a_mistake_is_refused_at_open() {
    for staging_slot_count in [0, STAGING_SLOTS_MAX + 1, usize::MAX] {
        let sim = Sim::new(SimOptions::parse(ROOMY).unwrap());
        let options = RuntimeOptions { staging_slot_count, ..budget_options(4) };
        let error = Runtime::open(sim.driver(), DEVICE, options).err().unwrap();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
        assert_eq!(sim.locked_bytes(), 0);
    }
}
