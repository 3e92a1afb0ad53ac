//! One book of page-locked memory: ring, cache and host frames in sum, of all runtimes of the
//! process, are within what may be held.

use vbar::Fault;
use vbar::model::synth::synthesize;
use vbar::options::HostMapped;

use super::host_memory::{MARGIN, System, let_it_be_seen};
use super::*;
use crate::world::{World, budget_options};

/// Slots that a runtime without threads has.
const RING: u64 = 4 * UNIT;
const PAGES: u64 = 17;

/// A model of 17 pages whose range as a whole finds 4 device frames.
fn hosted(options: RuntimeOptions) -> (World, vbar::ModelBar, TempDir) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    synthesize(&path, (PAGES - 2) * P, 3).unwrap();
    let world = World::with(ROOMY, options);
    let bar = world.runtime.open_model(&path).unwrap();
    assert_eq!(bar.vbar().bytes(), PAGES * P);
    (world, bar, folder)
}

fn host_options(allowance: Option<u64>) -> RuntimeOptions {
    let host_mapped = HostMapped::On;
    RuntimeOptions { host_mapped, host_allowance: allowance, ..budget_options(4) }
}

/// Page-locked bytes as the device has them.
fn device_bytes(world: &World) -> u64 {
    world.sim.locked_bytes() + world.sim.live_host_frames() * P
}

fn fault_whole<'a>(world: &World, bar: &'a vbar::ModelBar) -> Fault<vbar::Guard<'a>> {
    bar.vbar().fault(0..PAGES * P, world.stream).unwrap()
}

#[test]
fn host_frames_and_the_ring_are_within_one_limit() {
    // With the ring it is one byte too little, then just enough.
    for (allowance, fits) in [(PAGES * P + RING - 1, false), (PAGES * P + RING, true)] {
        let (world, bar, _folder) = hosted(host_options(Some(allowance)));
        match fault_whole(&world, &bar) {
            Fault::HostMapped(_) => assert!(fits, "{allowance}"),
            Fault::Offloaded(_) => assert!(!fits, "{allowance}"),
            Fault::Resident(_) => panic!("there are 4 device frames"),
        }
        assert!(device_bytes(&world) <= allowance);
        assert_eq!(world.sim.live_host_frames(), if fits { PAGES } else { 0 });
        // What is given back can be had again.
        world.sim.stream_synchronize(world.stream).unwrap();
        assert_eq!(world.runtime.trim_host_frames().unwrap(), u64::from(fits) * PAGES * P);
        assert_eq!(matches!(fault_whole(&world, &bar), Fault::HostMapped(_)), fits);
        world.check();
        drop(bar);
        world.check_shut();
    }
}

#[test]
fn a_host_frame_that_was_not_made_is_not_held() {
    use vbar::driver::DriverCode;
    use vbar::driver::sim::Verb;
    for nth in 1..=PAGES {
        let (world, bar, _folder) = hosted(host_options(Some(PAGES * P + RING)));
        world.sim.fail_nth(Verb::MemMap, nth, DriverCode::INVALID_VALUE);
        assert!(bar.vbar().fault(0..PAGES * P, world.stream).is_err());
        assert_eq!(world.sim.live_host_frames(), 0);
        // All of the allowance is there again: the same fault needs every byte of it.
        assert!(matches!(fault_whole(&world, &bar), Fault::HostMapped(_)), "map {nth}");
        world.check();
        drop(bar);
        world.check_shut();
    }
}

#[test]
fn groups_that_shrink_take_host_frames_cache_and_ring_back() {
    let system = System::new(60 << 30);
    system.set_groups(("max", 1 << 30), ("max", 2 << 30));
    let root = system.options().system_root;
    let (world, bar, _folder) = hosted(RuntimeOptions { system_root: root, ..host_options(None) });
    drop(fault_whole(&world, &bar));
    assert_eq!(device_bytes(&world), PAGES * P + RING);
    // The outer group has a limit now, and less than nothing is left below it.
    system.set_groups(("max", 1 << 30), (&(2u64 << 30).to_string(), 3 << 30));
    for _ in 0..100 {
        let_it_be_seen();
        world.runtime.refresh().unwrap();
        // Without threads a fill looks after the ring.
        let _ = world.runtime.free_memory(u64::MAX).unwrap();
        world.touch(bar.vbar(), 0..1).unwrap();
        if device_bytes(&world) == 0 {
            break;
        }
    }
    assert_eq!(device_bytes(&world), 0);
    assert!(matches!(fault_whole(&world, &bar), Fault::Offloaded(_)));
    // No limit again.
    system.set_groups(("max", 0), ("max", 0));
    let_it_be_seen();
    assert!(matches!(fault_whole(&world, &bar), Fault::HostMapped(_)));
    world.check();
    drop(bar);
    world.check_shut();
}

#[test]
fn two_devices_share_one_machine() {
    let system = System::new(MARGIN + 20 * UNIT);
    let first = Rig::new(12, system.options(), Reader::Descriptor);
    first.fill(0..12, Keep::Locked);
    let held = first.filler().locked_bytes();
    assert!(held >= 4 * UNIT);
    // Room for the second ring, then none: what the first holds is not there twice.
    system.set_available(MARGIN + UNIT);
    let_it_be_seen();
    let second = Rig::new(12, system.options(), Reader::Descriptor);
    system.set_available(MARGIN);
    let_it_be_seen();
    assert_eq!(second.filler().allowance_bytes(), UNIT);
    second.fill(0..12, Keep::Locked);
    assert_eq!((second.cache_bytes(), second.sim.locked_bytes()), (0, UNIT));
    // What the first gives back the second may have; the tree shows it.
    let freed = first.filler().trim_host(0).unwrap();
    assert!(freed >= held - UNIT);
    system.set_available(MARGIN + 2 * UNIT);
    let_it_be_seen();
    second.fill(0..2, Keep::Locked);
    assert!(second.cache_bytes() > 0);
    first.check_shut();
    second.check_shut();
}
