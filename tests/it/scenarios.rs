//! Faults that users of such software have met, each by its number.

use vbar::Reason;
use vbar::driver::DriverCode;
use vbar::driver::sim::Verb;

use crate::world::{DEVICE, World, fault, resident};

#[test]
fn scenario_1_not_ready_once_is_retried() {
    let world = World::budget(8);
    let vbar = world.vbar(4);
    world.sim.fail_nth(Verb::MemSetAccess, 1, DriverCode::NOT_READY);
    drop(resident(&world, &vbar, 0..1));
    assert_eq!(world.used(), 1);
    assert_eq!(world.sim.live_frames(DEVICE), 1);
    assert_eq!(vbar.draw(4), "#...");
    world.check();
}

#[test]
fn scenario_1_not_ready_for_ever_is_offloaded() {
    let world = World::budget(8);
    let vbar = world.vbar(4);
    world.sim.fail_always(Verb::MemSetAccess, DriverCode::NOT_READY);
    assert_eq!(fault(&world, &vbar, 0..1).offloaded(), Some(Reason::DriverMemory));
    assert_eq!((world.used(), world.sim.live_frames(DEVICE)), (0, 0));
    assert_eq!(vbar.draw(4), "....");
    world.sim.heal();
    drop(resident(&world, &vbar, 0..1));
    world.check();
}

#[test]
fn scenario_14_a_first_pass_maps_what_fits_and_evicts_nothing() {
    let world = World::new(4);
    let vbar = world.vbar(8);
    for page in 0..8 {
        let _ = world.touch(&vbar, page..page + 1);
    }
    assert_eq!(world.sim.calls(Verb::MemMap), 4);
    assert_eq!(world.sim.calls(Verb::MemUnmap), 0);
    assert_eq!(vbar.draw(8), "####....");
    for page in 0..8 {
        let expected = if page < 4 { Ok(()) } else { Err(Reason::Budget) };
        assert_eq!(world.touch(&vbar, page..page + 1), expected);
    }
    assert_eq!(world.sim.calls(Verb::MemMap), 4);
    world.check();
}

#[test]
fn bars_close_and_leave_nothing() {
    let world = World::new(4);
    for _ in 0..20 {
        let vbar = world.vbar(40);
        drop(resident(&world, &vbar, 0..3));
        vbar.destroy_wait().unwrap();
    }
    assert_eq!(world.sim.live_reservations(), 0);
    world.runtime.trim(0).unwrap();
    assert_eq!(world.used(), 0);
    world.check();
    world.check_shut();
}
