//! Limits of the machine: mappings, addresses, and VBARs far larger than any device.

use vbar::units::TIB;
use vbar::{Fault, Reason};

use crate::world::{P, ROOMY, World, budget_options, drawn, resident};

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
