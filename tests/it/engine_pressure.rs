//! Other programs take device memory while the engine streams, and give it back.

use vbar::RuntimeOptions;
use vbar::driver::Driver;
use vbar::driver::sim::Verb;
use vbar::memory::pager::HeldPins;
use vbar::options::Threads;

use crate::engine::Bench;
use crate::engine_more::{Rig, eventually};
use crate::world::{DEVICE, P, drawn, options, resident_on};

/// Pages of the device, and of the headroom.
const ALL: u64 = 64;
const HEADROOM: u64 = 4;

/// An automatic budget: what is free, less the headroom.
fn automatic(threads: Option<Threads>) -> RuntimeOptions {
    RuntimeOptions { threads, headroom_bytes: Some(HEADROOM * P), ..options() }
}

fn device() -> String {
    format!("capacity={},granularity=64K", ALL * P)
}

/// Whether what the device has left, with `outside` pages of others, is the headroom or more. They
/// can take no more at once than is free: the headroom.
fn headroom_is_free(sim: &vbar::driver::sim::Sim, outside: u64) -> bool {
    sim.used_bytes(DEVICE) / P + outside + HEADROOM <= ALL
}

#[test]
fn one_look_restores_the_headroom_and_the_plan_grows_back_a_little_at_a_time() {
    // By hand: a look is a call, and no time passes.
    let mut bench = Bench::on(&device(), &[80], automatic(Some(Threads::Off)));
    (0..4).for_each(|_| bench.pass(0));
    let before = bench.world.runtime.engine_numbers();
    let look = |bench: &Bench, outside: u64| {
        bench.world.sim.set_outside_bytes(DEVICE, outside * P);
        bench.world.sim.ctx_synchronize().unwrap();
        bench.world.runtime.refresh().unwrap();
    };
    for outside in (HEADROOM..=24).step_by(HEADROOM as usize) {
        look(&bench, outside);
        assert!(headroom_is_free(&bench.world.sim, outside), "{outside} pages outside");
        bench.world.runtime.drive_engine().unwrap();
        assert!(headroom_is_free(&bench.world.sim, outside), "{outside} pages outside");
    }
    let misses = bench.misses();
    bench.pass(0);
    assert!(bench.misses() - misses <= 3, "the plan moved with a stall");
    for _ in 0..2 {
        bench.pass(0);
        assert!(headroom_is_free(&bench.world.sim, 24), "{} used", bench.world.used());
    }
    let small = bench.world.runtime.engine_numbers();
    assert!(small.kept_pages < before.kept_pages, "{small:?} {before:?}");

    // What comes back is less than would be missed the next moment: nothing grows on it.
    for _ in 0..5 {
        look(&bench, 24 - HEADROOM + 1);
        bench.pass(0);
        assert!(headroom_is_free(&bench.world.sim, 24), "{} used", bench.world.used());
    }
    let same = bench.world.runtime.engine_numbers();
    assert_eq!((same.plans, same.kept_pages), (small.plans, small.kept_pages));

    // All of it comes back. Nothing is fetched for that alone: a pass loads what it loaded before,
    // or less, until as much is kept as in the beginning.
    let (mut loads, mut used) = (u64::MAX, bench.world.used());
    look(&bench, 0);
    assert_eq!(bench.world.used(), used);
    for pass in 0..4 {
        let (misses, mapped) = (bench.misses(), bench.mapped());
        bench.pass(0);
        assert_eq!(bench.misses() - misses, 0, "pass {pass}");
        assert!(bench.mapped() - mapped <= loads, "pass {pass}");
        assert!(headroom_is_free(&bench.world.sim, 0) && bench.world.used() >= used);
        (loads, used) = (bench.mapped() - mapped, bench.world.used());
    }
    let grown = bench.world.runtime.engine_numbers();
    assert_eq!(grown.kept_pages, before.kept_pages, "{grown:?} {before:?}");
    bench.check_shut();
}

#[test]
fn what_enqueued_work_still_needs_goes_last() {
    let mut bench = Bench::on(&device(), &[48], automatic(Some(Threads::Off)));
    (0..2).for_each(|_| bench.pass(0));
    bench.world.sim.stream_synchronize(bench.world.stream).unwrap();
    let held = bench.world.another_stream();
    bench.world.sim.hold_stream(held).unwrap();
    let guard = resident_on(bench.bars[0].vbar(), 44..48, held);
    bench.world.write(bench.world.scratch(), P, 1, held);
    drop(guard);
    bench.bars[0].vbar().end_of_run(held, HeldPins::Keep).unwrap();
    let outside = ALL - bench.world.sim.used_bytes(DEVICE) / P;
    bench.world.sim.set_outside_bytes(DEVICE, outside * P);
    bench.world.runtime.refresh().unwrap();
    assert!(headroom_is_free(&bench.world.sim, outside), "{} used", bench.world.used());
    assert!(
        drawn(bench.bars[0].vbar(), 48).ends_with("####"),
        "{}",
        drawn(bench.bars[0].vbar(), 48)
    );
    bench.world.sim.release_stream(held).unwrap();
    bench.check_shut();
}

#[test]
fn the_headroom_is_back_after_four_looks_of_a_thread_that_looks_each_25_ms() {
    let rig = Rig::on(&device(), automatic(Some(Threads::On)));
    let model = rig.model("model", 80);
    rig.check_passes(&model, 4);
    assert!(rig.plans() > 0);
    for outside in [4, 8, 12, 16, 20, 0, 4, 8] {
        // The program makes no call: the library's threads are alone with it.
        let sim = &rig.world.sim;
        sim.set_outside_bytes(DEVICE, outside * P);
        let before = sim.calls(Verb::MemGetInfo);
        eventually("the headroom is free", || headroom_is_free(sim, outside));
        let looks = sim.calls(Verb::MemGetInfo) - before;
        // A tenth of a second has four; one may have been under way.
        assert!(looks <= 5, "{outside} pages outside: {looks} looks");
        rig.check_passes(&model, 1);
        assert!(headroom_is_free(&rig.world.sim, outside), "{outside} pages outside");
    }
    rig.world.sim.set_outside_bytes(DEVICE, 0);
    rig.check_passes(&model, 3);
    rig.check_shut(vec![model]);
}
