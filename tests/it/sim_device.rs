//! The simulated device itself: what it finds, how it fails, what it costs.
#![expect(unsafe_code, reason = "copies through the trait take raw pointers")]

use std::sync::Arc;

use vbar::driver::Driver;
use vbar::driver::sim::{Sim, SimOptions};
use vbar::units::DeviceOrdinal;

use crate::door::check_door;

const DEVICE: DeviceOrdinal = DeviceOrdinal(0);

fn sim(options: &str) -> Arc<Sim> {
    Sim::new(SimOptions::parse(options).expect("options"))
}

/// After a suite that cleans up: nothing lives, nothing was found.
#[track_caller]
fn check_clean(sim: &Sim) {
    assert_eq!(sim.violations(), Vec::<String>::new());
    assert_eq!((sim.live_frames(DEVICE), sim.used_bytes(DEVICE)), (0, 0));
    assert_eq!((sim.live_reservations(), sim.reserved_bytes(), sim.live_mappings()), (0, 0, 0));
    assert_eq!((sim.live_events(), sim.live_streams(), sim.locked_bytes()), (0, 0, 0));
}

#[test]
fn the_door_is_kept_asynchronously() {
    let sim = sim("capacity=1G");
    check_door(sim.clone(), DEVICE);
    check_clean(&sim);
}

#[test]
fn the_door_is_kept_late_with_small_pages_and_on_the_second_device() {
    let sim = sim("capacity=256M,devices=2,granularity=64K,latency=200us,poison=1,bandwidth=2G");
    check_door(sim.clone(), DeviceOrdinal(1));
    check_clean(&sim);
}

#[test]
fn the_door_is_kept_in_seeded_order() {
    for seed in 0..4 {
        let sim = sim(&format!("capacity=256M,granularity=64K,seed={seed}"));
        check_door(sim.clone(), DEVICE);
        check_clean(&sim);
    }
}
