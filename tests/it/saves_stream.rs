//! What is saved is copied on a stream of the library's own: the program's work goes on meanwhile,
//! the pages keep their frames until the copy is done, and whoever could not wait for one waits for
//! it the next time.

use std::time::Duration;

use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode};
use vbar::options::{ContextWaits, Eviction, RuntimeOptions};
use vbar::units::Stream;
use vbar::{ErrorCode, Fault, Guard, Vbar};

use crate::world::{P, World, budget_options, pattern_sum};

const STRICT_DEVICE: &str = "capacity=64M,granularity=64K,checked=1";
const PATIENCE: Duration = Duration::from_secs(5);

fn page(index: u64) -> std::ops::Range<u64> {
    index * P..(index + 1) * P
}

/// Writes a page on a stream, with its pins.
fn written<'a>(world: &World, vbar: &'a Vbar, index: u64, seed: u64, stream: Stream) -> Guard<'a> {
    vbar.prepare_save(page(index)).unwrap();
    let Fault::Resident(guard) = vbar.fault(page(index), stream).unwrap() else {
        panic!("page {index} is not resident");
    };
    world.write(guard.address(), P, seed, stream);
    guard
}

fn save(world: &World, vbar: &Vbar, index: u64, seed: u64, stream: Stream) {
    let guard = written(world, vbar, index, seed, stream);
    vbar.save(page(index), stream).unwrap();
    guard.unpin().unwrap();
}

#[track_caller]
fn check_page(world: &World, vbar: &Vbar, index: u64, seed: u64) {
    let scratch = world.scratch();
    let Fault::Resident(guard) = vbar.fault(page(index), world.stream).unwrap() else {
        panic!("page {index} is not resident");
    };
    world.sum(guard.address(), P, scratch, Duration::ZERO, world.stream);
    guard.unpin().unwrap();
    assert_eq!(world.word(scratch, world.stream), pattern_sum(P, seed), "page {index}");
}

/// A world whose copies are stuck behind the work of a stream that is held, which has saved page 0
/// of the VBAR; then another stream, which is not held, has saved page 1.
fn stuck(options: RuntimeOptions) -> (World, Vbar, Stream) {
    let world = World::with(STRICT_DEVICE, options);
    let vbar = world.vbar(8);
    let held = world.another_stream();
    world.sim.hold_stream(held).unwrap();
    save(&world, &vbar, 0, 1, held);
    save(&world, &vbar, 1, 2, world.stream);
    // Its work is done, and waits for no copy.
    world.sim.stream_synchronize(world.stream).unwrap();
    world.runtime.set_wait_timeout(Duration::ZERO);
    (world, vbar, held)
}

/// Its work goes on.
fn release(world: &World, held: Stream) {
    world.runtime.set_wait_timeout(PATIENCE);
    world.sim.release_stream(held).unwrap();
}

fn check_end(world: World, vbar: Vbar, held: Stream) {
    world.check();
    drop(vbar);
    let _ = world.sim.stream_destroy(held);
    let (sim, own) = (world.sim.clone(), world.sim.live_streams());
    world.check_shut();
    // The fill stream, that of saves, and the world's.
    assert_eq!(sim.live_streams() + 3, own);
}

#[test]
fn a_frame_is_not_used_otherwise_before_its_copy_is_done() {
    for eviction in [Eviction::Strict, Eviction::Aliasing] {
        let (world, vbar, held) = stuck(RuntimeOptions { eviction, ..budget_options(2) });
        vbar.prepare_save(page(2)).unwrap();
        // Whoever asks for idle frames gets none of these, although no stream of the program uses
        // the second one any more.
        let error = vbar.fault(page(2), Stream::NONE).unwrap_err();
        assert_eq!(error.code(), ErrorCode::TimedOut, "a frame was given away: {error}");
        release(&world, held);
        save(&world, &vbar, 2, 3, world.stream);
        for _ in 0..2 {
            for (index, seed) in [(0, 1), (1, 2), (2, 3)] {
                check_page(&world, &vbar, index, seed);
            }
        }
        check_end(world, vbar, held);
    }
}

#[test]
fn an_eviction_whose_frame_is_aliased_is_ordered_behind_the_copy() {
    let options = RuntimeOptions { eviction: Eviction::Aliasing, ..budget_options(3) };
    let world = World::with(STRICT_DEVICE, options);
    let (vbar, held) = (world.vbar(6), world.another_stream());
    for index in 0..6 {
        save(&world, &vbar, index, index + 1, world.stream);
    }
    for turn in 0..4 {
        vbar.drop_save(page(0)).unwrap();
        vbar.drop_save(page(1)).unwrap();
        world.sim.stream_synchronize(world.stream).unwrap();
        world.sim.hold_stream(held).unwrap();
        save(&world, &vbar, 0, 10 + turn, held);
        save(&world, &vbar, 1, 20 + turn, world.stream);
        world.runtime.set_wait_timeout(Duration::ZERO);
        // Fills are enqueued over frames whose copies are not done.
        for index in 2..6 {
            match vbar.fault(page(index), world.stream) {
                Ok(Fault::Resident(guard)) => guard.unpin().unwrap(),
                Ok(_) => {}
                Err(error) => assert_eq!(error.code(), ErrorCode::TimedOut, "{error}"),
            }
        }
        release(&world, held);
        check_page(&world, &vbar, 0, 10 + turn);
        check_page(&world, &vbar, 1, 20 + turn);
    }
    for index in 2..6 {
        check_page(&world, &vbar, index, index + 1);
    }
    check_end(world, vbar, held);
}

#[test]
fn what_a_drop_could_not_wait_for_the_next_one_waits_for() {
    let (world, vbar, held) = stuck(budget_options(4));
    let timed_out = |bytes| {
        let error = vbar.drop_save(bytes).unwrap_err();
        assert_eq!(error.code(), ErrorCode::TimedOut, "{error}");
    };
    timed_out(page(1));
    // It is forgotten, and its copy is under way: for the same bytes, or some of them.
    timed_out(page(1));
    timed_out(P + 5..P + 6);
    // Others have nothing to wait for.
    vbar.drop_save(page(2)).unwrap();
    vbar.drop_save(P - 5..P).unwrap();
    vbar.prepare_save(page(1)).unwrap();
    timed_out(page(1));
    release(&world, held);
    vbar.drop_save(page(1)).unwrap();
    // On a stream that comes after nothing.
    let free = world.another_stream();
    let Fault::Resident(guard) = vbar.fault(page(1), free).unwrap() else { panic!() };
    world.write(guard.address(), P, 9, free);
    guard.unpin().unwrap();
    world.sim.stream_synchronize(free).unwrap();
    world.sim.stream_destroy(free).unwrap();
    vbar.drop_save(page(1)).unwrap();
    check_page(&world, &vbar, 0, 1);
    check_end(world, vbar, held);
}

#[test]
fn a_save_that_failed_behind_its_copy_is_waited_for_by_whoever_drops_it() {
    let context_waits = ContextWaits::Never;
    let (world, vbar, held) = stuck(RuntimeOptions { context_waits, ..budget_options(4) });
    world.runtime.set_wait_timeout(PATIENCE);
    let guard = written(&world, &vbar, 2, 3, world.stream);
    world.runtime.set_wait_timeout(Duration::ZERO);
    // The program's stream has its fence, the copy has none.
    world.sim.fail(Verb::EventRecord, 1, u64::MAX, DriverCode::INVALID_VALUE);
    let error = vbar.save(page(2), world.stream).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Driver, "{error}");
    world.sim.heal();
    // It is prepared no more.
    let code = vbar.save(page(2), world.stream).unwrap_err().code();
    assert_eq!(code, ErrorCode::InvalidArgument);
    assert_eq!(vbar.drop_save(page(2)).unwrap_err().code(), ErrorCode::TimedOut);
    guard.unpin().unwrap();
    release(&world, held);
    vbar.drop_save(page(2)).unwrap();
    let free = world.another_stream();
    let Fault::Resident(guard) = vbar.fault(page(2), free).unwrap() else { panic!() };
    world.write(guard.address(), P, 9, free);
    guard.unpin().unwrap();
    world.sim.stream_synchronize(free).unwrap();
    world.sim.stream_destroy(free).unwrap();
    check_page(&world, &vbar, 1, 2);
    check_end(world, vbar, held);
}

#[test]
fn a_save_that_cannot_be_ordered_copies_nothing() {
    let world = World::with(STRICT_DEVICE, budget_options(4));
    let (vbar, held) = (world.vbar(4), world.another_stream());
    for verb in [Verb::EventRecord, Verb::StreamWaitEvent, Verb::MemcpyDtohAsync] {
        let guard = written(&world, &vbar, 0, 1, world.stream);
        world.sim.fail_always(verb, DriverCode::INVALID_VALUE);
        let error = vbar.save(page(0), world.stream).unwrap_err();
        world.sim.heal();
        assert_eq!(error.code(), ErrorCode::Driver, "{verb:?}: {error}");
        vbar.drop_save(page(0)).unwrap();
        guard.unpin().unwrap();
    }
    save(&world, &vbar, 0, 5, world.stream);
    check_page(&world, &vbar, 0, 5);
    check_end(world, vbar, held);
}

#[test]
fn a_page_of_many_streams_remembers_its_copy_too() {
    let world = World::with(STRICT_DEVICE, budget_options(1));
    let vbar = world.vbar(2);
    let streams: Vec<Stream> = (0..6).map(|_| world.another_stream()).collect();
    let guard = written(&world, &vbar, 0, 7, world.stream);
    world.sim.stream_synchronize(world.stream).unwrap();
    for stream in &streams {
        world.sim.hold_stream(*stream).unwrap();
        world.sum(guard.address(), P, world.scratch(), Duration::ZERO, *stream);
        guard.also_used_on(*stream).unwrap();
    }
    vbar.save(page(0), world.stream).unwrap();
    guard.unpin().unwrap();
    vbar.prepare_save(page(1)).unwrap();
    world.runtime.set_wait_timeout(Duration::ZERO);
    for stream in &streams {
        let error = vbar.fault(page(1), Stream::NONE).unwrap_err();
        assert_eq!(error.code(), ErrorCode::TimedOut, "{error}");
        world.sim.release_stream(*stream).unwrap();
    }
    world.runtime.set_wait_timeout(PATIENCE);
    save(&world, &vbar, 1, 8, world.stream);
    check_page(&world, &vbar, 0, 7);
    check_page(&world, &vbar, 1, 8);
    for stream in &streams[1..] {
        world.sim.stream_destroy(*stream).unwrap();
    }
    check_end(world, vbar, streams[0]);
}
