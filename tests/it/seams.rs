//! The seams that later parts stand on: who gives frames back, and what a graph holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vbar::driver::sim::Verb;
use vbar::driver::{CaptureMode, DriverCode};
use vbar::memory::pager::{HeldPins, Reclaim};
use vbar::{Fault, Vbar};

use crate::world::{P, World, resident};

/// Gives back pages of a VBAR of its own, as a cache of activations would.
struct Cache {
    vbar: Vbar,
    asked: AtomicU64,
}

impl Reclaim for Cache {
    fn reclaim(&self, frames: u32) -> u32 {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let freed = self.vbar.free_memory(u64::from(frames) * P).unwrap();
        (freed.bytes / P) as u32
    }
}

#[test]
fn a_cache_is_asked_for_frames_before_pages_are_evicted() {
    let world = World::budget(4);
    let (weights, more) = (world.vbar(2), world.vbar(3));
    drop(resident(&world, &weights, 0..2));
    let cache = Arc::new(Cache { vbar: world.vbar(2), asked: AtomicU64::new(0) });
    cache.vbar.set_class(7).unwrap();
    drop(resident(&world, &cache.vbar, 0..2));
    let reclaim: Arc<dyn Reclaim> = cache.clone();
    world.runtime.set_reclaim(&reclaim);
    more.prioritise().unwrap();
    drop(resident(&world, &more, 0..2));
    assert_eq!((weights.draw(2).as_str(), cache.vbar.draw(2).as_str()), ("##", ".."));
    assert_eq!(cache.asked.load(Ordering::Relaxed), 1);
    // Nothing is left to give: now pages go.
    drop(resident(&world, &more, 2..3));
    assert_eq!(weights.draw(2), "#.");
    assert_eq!(cache.asked.load(Ordering::Relaxed), 2);
    drop((reclaim, cache));
    weights.prioritise().unwrap();
    assert_eq!(world.touch(&weights, 0..2), Ok(()));
    world.check();
}

#[test]
fn a_forced_end_of_run_leaves_the_pages_of_a_graph() {
    let world = World::budget(2);
    let vbar = world.vbar(2);
    drop(resident(&world, &vbar, 0..2));
    world.sim.begin_capture(world.stream, CaptureMode::Relaxed).unwrap();
    drop(resident(&world, &vbar, 0..1));
    let graph = world.sim.end_capture(world.stream).unwrap();
    let held = vbar.end_of_run(world.stream, HeldPins::Release).unwrap().held;
    assert_eq!(held.len(), 1);
    let other = world.vbar(2);
    assert_eq!(world.touch(&other, 0..1), Ok(()));
    assert_eq!(vbar.draw(2), "P.");
    graph.launch(world.stream).unwrap();
    drop(graph);
    // The graph's pins go on a thread of the driver.
    while vbar.draw(2) != "#." {
        std::thread::yield_now();
    }
    world.check();
}

#[test]
fn a_vbar_with_a_page_in_quarantine_can_be_destroyed() {
    let world = World::budget(4);
    let vbar = world.vbar(3);
    drop(resident(&world, &vbar, 0..2));
    world.sim.fail_always(Verb::MemUnmap, DriverCode::INVALID_VALUE);
    let freed = vbar.free_memory(P).unwrap();
    assert_eq!(freed.bytes, 0);
    world.sim.heal();
    // The next page was tried as well, since the first gave nothing.
    assert_eq!(vbar.draw(3), "XX.");
    assert!(matches!(vbar.fault(P..2 * P, world.stream).unwrap(), Fault::Offloaded(_)));
    vbar.destroy_wait().unwrap();
    let numbers = world.runtime.numbers();
    assert_eq!((numbers.bars, numbers.closing_bars, numbers.quarantined_pages), (0, 0, 2));
}
