//! Closing a runtime while its work goes on.

use std::ops::ControlFlow;
use std::time::Duration;

use vbar::driver::Driver;
use vbar::driver::sim::Verb;
use vbar::{Runtime, set_wait_check};

use super::{in_use, uncovered};
use crate::logs;
use crate::world::{DEVICE, P, World, budget_options, options, resident};

#[test]
fn closing_waits_for_the_work_however_short_other_waits_are() {
    for options in [uncovered(), budget_options(1)] {
        let (world, old, held) = in_use(options);
        world.runtime.set_wait_timeout(Duration::ZERO);
        drop(old);
        let sim = world.sim.clone();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(50));
                sim.release_stream(held).unwrap();
            });
            world.check_shut();
        });
    }
}

#[test]
fn a_cancelled_closing_leaves_everything_in_use_where_it_is() {
    logs::collect();
    let (world, old, held) = in_use(uncovered());
    let (sim, address) = (world.sim.clone(), old.base());
    drop(old);
    let (unmaps, releases) = (sim.calls(Verb::MemUnmap), sim.calls(Verb::MemRelease));
    set_wait_check(Some(Box::new(|| ControlFlow::Break(()))));
    drop(world);
    set_wait_check(None);
    assert_eq!((sim.calls(Verb::MemUnmap), sim.calls(Verb::MemRelease)), (unmaps, releases));
    assert_eq!(sim.calls(Verb::DevicePrimaryCtxRelease), 0, "the last release would wait");
    assert_eq!((sim.live_frames(DEVICE), sim.live_mappings()), (1, 1));
    assert_eq!(logs::count(&logs::this_thread(), "what it holds stays"), 1);
    // The work goes on, on memory that is still there, and the device can be used again.
    sim.release_stream(held).unwrap();
    sim.stream_synchronize(held).unwrap();
    assert_eq!(sim.read_bytes(address, 8).unwrap(), crate::world::pattern_bytes(P, 1)[..8]);
    let runtime = Runtime::open(sim.driver(), DEVICE, options()).unwrap();
    let vbar = runtime.create_bar(P).unwrap();
    drop(vbar.fault(0..P, held).unwrap().resident().expect("there is room"));
    drop((vbar, runtime));
    assert_eq!(sim.violations(), Vec::<String>::new());
    assert_eq!(sim.live_frames(DEVICE), 1);
}

#[test]
fn nothing_of_a_model_is_freed_under_a_copy() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    vbar::model::synth::synthesize(&path, 4 * P, 3).unwrap();
    let world = World::budget(8);
    let fill = world.another_stream();
    world.sim.stream_destroy(fill).unwrap();
    let bar = world.runtime.open_model(&path).unwrap();
    world.sim.hold_stream(fill).unwrap();
    let guard = bar.fault(0, world.stream).unwrap().resident().expect("there is room");
    drop(guard);
    drop(bar);
    let (sim, locked) = (world.sim.clone(), world.sim.locked_bytes());
    set_wait_check(Some(Box::new(|| ControlFlow::Break(()))));
    drop(world);
    set_wait_check(None);
    assert_eq!((sim.locked_bytes(), sim.calls(Verb::MemFreeHost)), (locked, 0));
    sim.release_stream(fill).unwrap();
    sim.stream_synchronize(fill).unwrap();
    assert_eq!(sim.violations(), Vec::<String>::new());
}

#[test]
fn a_closed_runtime_has_no_event_left() {
    let world = World::budget(2);
    assert_eq!(world.sim.live_events(), 1, "made at open, for the first wait for the context");
    let vbar = world.vbar(2);
    drop(resident(&world, &vbar, 0..2));
    drop(vbar);
    world.check_shut();
}
