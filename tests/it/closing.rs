//! A VBAR is closed while others use it: every call afterwards says so, pins stay good, and nothing
//! is left when the last of them goes.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use vbar::driver::kernel::checksum;
use vbar::driver::sim::Verb;
use vbar::driver::{CaptureMode, Driver, DriverCode};
use vbar::host::source::{FileIdentity, FileTime, ModelFile, ReadAt};
use vbar::memory::pager::{HeldPins, Reclaim};
use vbar::model::binding::Binding;
use vbar::options::Eviction;
use vbar::units::Stream;
use vbar::{AllocationFault, Error, ErrorCode, Fault, RuntimeOptions, Vbar};

use crate::world::{P, ROOMY, World, budget_options, drawn, pattern_sum, resident};

/// The call was refused because the VBAR is closed.
#[track_caller]
fn closed<T>(answer: Result<T, Error>) {
    let error = answer.map(drop).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Closed, "{error}");
}

/// A VBAR of which nothing is left, all work being done.
#[track_caller]
fn check_gone(world: &World) {
    world.sim.ctx_synchronize().unwrap();
    world.runtime.refresh().unwrap();
    world.runtime.refresh().unwrap();
    let numbers = world.runtime.numbers();
    assert_eq!((numbers.closing_bars, numbers.lingering_mappings), (0, 0), "{numbers:?}");
    world.check();
}

#[test]
fn every_call_on_a_closed_vbar_says_so() {
    let world = World::budget(8);
    let (vbar, handle, open) = (world.vbar(4), world.vbar(4), world.vbar(4));
    let (closing, other_handle) = (vbar.clone(), vbar.clone());
    let allocation = vbar.allocate(P).unwrap();
    drop(resident(&world, &vbar, 0..2));
    assert!(!vbar.is_closed());
    closing.close();
    closing.close();
    assert!(vbar.is_closed() && other_handle.is_closed() && !handle.is_closed());
    closed(vbar.fault(0..P, world.stream));
    closed(vbar.fault(3 * P..4 * P, Stream::NONE));
    closed(vbar.fault(0..0, world.stream));
    closed(vbar.allocate(512));
    closed(vbar.free_memory(u64::MAX));
    closed(vbar.free_memory(0));
    closed(vbar.prioritise());
    closed(vbar.deprioritise());
    closed(vbar.set_class(3));
    closed(vbar.set_floor(1));
    closed(vbar.set_watermark(2));
    closed(vbar.end_of_run(world.stream, HeldPins::Keep));
    closed(vbar.end_of_run(world.stream, HeldPins::Release));
    closed(vbar.bind(Binding::new(), Vec::new()));
    closed(allocation.fault(world.stream));
    closed(allocation.fault_wait(world.stream));
    allocation.invalidate();
    // What only tells something still does.
    let marks = vbar.marks();
    assert_eq!((marks.class, marks.watermark, marks.floor), (i32::MIN, 0, 0));
    assert_eq!((marks.page_count, vbar.bytes()), (4, 4 * P));
    assert_eq!((vbar.draw(4).len(), vbar.residency().len()), (4, 4));
    assert!(vbar.base() != open.base() && allocation.range() == (0..P));
    // None of several ranges is taken, wherever the closed one stands.
    for ranges in [
        [(&open, 0..2 * P), (&vbar, 0..P)],
        [(&vbar, 0..P), (&open, 0..2 * P)],
        [(&open, 0..P), (&vbar, 0..0)],
    ] {
        closed(world.runtime.fault_many(&ranges, world.stream));
        assert_eq!(open.draw(4), "....");
    }
    check_gone(&world);
    assert_eq!((vbar.marks().resident, world.sim.live_reservations()), (0, 2));
    // A second time to the last handle, which has nothing left to close.
    other_handle.destroy_wait().unwrap();
    drop((allocation, vbar, closing));
    assert_eq!(world.runtime.numbers().bars, 2);
    drop(resident(&world, &handle, 0..4));
    drop((handle, open));
    check_gone(&world);
    world.check_shut();
}

#[test]
fn a_closed_model_says_so_with_the_tensors_name() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    vbar::model::synth::synthesize(&path, 8 * P, 3).unwrap();
    let world = World::budget(20);
    let bar = world.runtime.open_model(&path).unwrap();
    let guard = bar.fault(0, world.stream).unwrap().resident().unwrap();
    bar.vbar().close();
    let error = bar.fault(0, world.stream).map(drop).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Closed);
    assert!(error.to_string().contains(&*bar.model().tensors()[0].name), "{error}");
    drop(guard);
    drop(bar);
    check_gone(&world);
    world.check_shut();
}

#[test]
fn pins_outlive_their_vbar() {
    let world = World::budget(4);
    let (vbar, taker, target) = (world.vbar(4), world.vbar(4), world.scratch());
    let other = world.another_stream();
    let first = vbar.allocate(P).unwrap();
    let AllocationFault::Refill(fill) = first.fault(world.stream).unwrap() else {
        panic!("never written")
    };
    world.write(fill.address(), P, 9, world.stream);
    let raw = resident(&world, &vbar, 1..2);
    let token = resident(&world, &vbar, 2..4).into_token();
    vbar.close();
    assert_eq!((vbar.draw(4).as_str(), vbar.marks().resident), ("PPPP", 4));
    // The pages stay where they are, whoever wants their frames.
    assert!(world.touch(&taker, 0..1).is_err());
    let guard = fill.commit(world.stream).unwrap();
    raw.also_used_on(other).unwrap();
    world.sum(guard.address(), P, target, Duration::ZERO, world.stream);
    drop(guard);
    assert_eq!(world.word(target, world.stream), pattern_sum(P, 9));
    raw.unpin().unwrap();
    assert_eq!(world.runtime.numbers().closing_bars, 1);
    let reservations = world.sim.live_reservations();
    world.runtime.unpin(token, world.stream).unwrap();
    check_gone(&world);
    assert_eq!(world.sim.live_reservations(), reservations - 1);
    assert_eq!(world.touch(&taker, 0..4), Ok(()));
    drop((first, vbar, taker));
    check_gone(&world);
}

#[test]
fn a_closed_vbar_goes_with_its_last_pin_though_no_fence_is_due() {
    // Nothing but the unpin itself would record for an hour.
    let options =
        RuntimeOptions { record_interval: Duration::from_secs(3600), ..budget_options(8) };
    let world = World::with(ROOMY, options);
    let vbar = world.vbar(2);
    let guard = resident(&world, &vbar, 0..2);
    vbar.close();
    world.runtime.refresh().unwrap();
    let waits = world.sim.calls(Verb::CtxSynchronize);
    drop(guard);
    world.sim.stream_synchronize(world.stream).unwrap();
    while world.runtime.numbers().closing_bars > 0 {
        world.runtime.refresh().unwrap();
    }
    assert_eq!(world.sim.calls(Verb::CtxSynchronize), waits);
    drop(vbar);
    world.check();
}

#[test]
fn a_graph_keeps_the_pages_of_a_closed_vbar() {
    let world = World::budget(2);
    let vbar = world.vbar(2);
    drop(resident(&world, &vbar, 0..2));
    world.sim.begin_capture(world.stream, CaptureMode::Relaxed).unwrap();
    let guard = resident(&world, &vbar, 0..1);
    world.write(guard.address(), P, 4, world.stream);
    drop(guard);
    let graph = world.sim.end_capture(world.stream).unwrap();
    vbar.close();
    world.sim.ctx_synchronize().unwrap();
    world.runtime.refresh().unwrap();
    assert_eq!((vbar.draw(2).as_str(), vbar.marks().resident), ("P.", 1));
    graph.launch(world.stream).unwrap();
    world.sim.ctx_synchronize().unwrap();
    drop(graph);
    while world.runtime.numbers().closing_bars > 0 {
        world.runtime.refresh().unwrap();
    }
    check_gone(&world);
}

/// Closes a VBAR from the middle of a fault on it.
struct Closing(Mutex<Option<Vbar>>);

impl Closing {
    fn new(vbar: &Vbar) -> Self {
        Self(Mutex::new(Some(vbar.clone())))
    }

    fn strike(&self) {
        if let Some(vbar) = self.0.lock().unwrap().take() {
            vbar.close();
        }
    }
}

impl Reclaim for Closing {
    fn reclaim(&self, _frames: u32) -> u32 {
        self.strike();
        0
    }
}

#[test]
fn a_fault_that_is_being_planned_ends_with_closed() {
    let world = World::budget(4);
    let (vbar, other) = (world.vbar(4), world.vbar(4));
    other.prioritise().unwrap();
    drop(resident(&world, &other, 0..2));
    drop(resident(&world, &vbar, 0..2));
    // Both ask for more than is free, so that the reclaimer is asked while pages are protected.
    for many in [false, true] {
        let vbar = if many { world.vbar(4) } else { vbar.clone() };
        vbar.prioritise().unwrap();
        let reclaim: Arc<dyn Reclaim> = Arc::new(Closing::new(&vbar));
        world.runtime.set_reclaim(&reclaim);
        match many {
            false => closed(vbar.fault(0..4 * P, world.stream)),
            true => {
                let ranges = [(&other, 0..P), (&vbar, 0..3 * P)];
                closed(world.runtime.fault_many(&ranges, world.stream));
            }
        }
        assert!(other.residency().iter().all(|page| page.pins == 0));
        check_gone(&world);
    }
    drop((vbar, other));
    check_gone(&world);
    world.check_shut();
}

#[test]
fn a_fault_that_waits_ends_with_closed() {
    let world = World::evicting(2, Eviction::Strict);
    let (old, new) = (world.vbar(2), world.vbar(2));
    world.sim.hold_stream(world.stream).unwrap();
    let guard = resident(&world, &old, 0..2);
    world.write(guard.address(), P, 1, world.stream);
    drop(guard);
    let other = world.another_stream();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| new.fault(0..P, other).map(drop).unwrap_err().code());
        // Long enough for it to have begun to wait, most of the time.
        std::thread::sleep(Duration::from_millis(5));
        new.close();
        assert_eq!(waiter.join().unwrap(), ErrorCode::Closed);
    });
    assert_eq!((drawn(&old, 2).as_str(), new.draw(2).as_str()), ("##", ".."));
    world.sim.release_stream(world.stream).unwrap();
    drop((old, new));
    check_gone(&world);
    world.check_shut();
}

/// A file of zeros, whose reading closes a VBAR, and fails if it is told to.
struct ClosingFile {
    closing: Closing,
    error: Option<i32>,
}

impl ReadAt for ClosingFile {
    fn read_at(&self, target: &mut [u8], _offset: u64) -> io::Result<usize> {
        self.closing.strike();
        match self.error {
            Some(error) => Err(io::Error::from_raw_os_error(error)),
            None => {
                target.fill(0);
                Ok(target.len())
            }
        }
    }

    fn identity(&self) -> io::Result<FileIdentity> {
        let time = FileTime { seconds: 1, nanos: 0 };
        Ok(FileIdentity { device: 1, inode: 1, bytes: 4 * P, modified: time, changed: time })
    }
}

fn bind_closing(world: &World, error: Option<i32>) -> Vbar {
    let vbar = world.vbar(4);
    let reader = ClosingFile { closing: Closing::new(&vbar), error };
    let file = ModelFile::from_reader(Box::new(reader), "closing").unwrap();
    let mut binding = Binding::new();
    binding.bind(0..4 * P, 0, 0, 4 * P).unwrap();
    vbar.bind(binding, vec![Arc::new(file)]).unwrap();
    vbar
}

#[test]
fn a_fault_that_is_being_filled_finishes_with_its_pins() {
    let world = World::budget(4);
    let vbar = bind_closing(&world, None);
    let guard = resident(&world, &vbar, 0..4);
    assert!(vbar.is_closed());
    assert_eq!(vbar.draw(4), "PPPP");
    let target = world.scratch();
    world.sum(guard.address(), 4 * P, target, Duration::ZERO, world.stream);
    let zeros = checksum(&vec![0; 4 * P as usize], 0);
    assert_eq!(world.word(target, world.stream), zeros);
    closed(vbar.fault(0..P, world.stream));
    drop(guard);
    check_gone(&world);
    assert_eq!(world.sim.live_reservations(), 1);
    drop(vbar);
    check_gone(&world);
}

#[test]
fn a_fill_that_fails_while_its_vbar_is_closed_leaves_nothing() {
    let world = World::budget(4);
    let vbar = bind_closing(&world, Some(libc::EIO));
    let error = vbar.fault(0..4 * P, world.stream).map(drop).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Io);
    closed(vbar.fault(0..4 * P, world.stream));
    check_gone(&world);
    assert_eq!(world.sim.live_reservations(), 0);
    drop(vbar);
    check_gone(&world);
    world.check_shut();
}

#[test]
fn driver_failures_keep_a_closed_vbar_only_for_a_while() {
    for verb in [Verb::EventRecord, Verb::EventQuery, Verb::CtxGetCurrent, Verb::MemGetInfo] {
        let world = World::budget(4);
        let vbar = world.vbar(4);
        let guard = resident(&world, &vbar, 0..4);
        world.sim.fail_always(verb, DriverCode::INVALID_VALUE);
        vbar.close();
        drop(guard);
        drop(vbar);
        world.sim.heal();
        world.sim.ctx_synchronize().unwrap();
        world.runtime.trim(0).unwrap();
        check_gone(&world);
        assert_eq!((world.used(), world.sim.live_reservations()), (0, 0), "{verb}");
        world.check_shut();
    }
}

#[test]
fn destroying_closes_though_others_have_handles() {
    let options = RuntimeOptions { wait_timeout: Duration::from_millis(20), ..budget_options(4) };
    let world = World::with(ROOMY, options);
    let vbar = world.vbar(2);
    let other = vbar.clone();
    let guard = resident(&world, &vbar, 0..1);
    let late = other.clone().destroy_wait().unwrap_err();
    assert_eq!(late.code(), ErrorCode::TimedOut);
    assert_eq!(vbar.draw(2), "P.");
    closed(vbar.fault(P..2 * P, world.stream));
    drop(guard);
    other.destroy_wait().unwrap();
    assert_eq!((vbar.draw(2).as_str(), world.sim.live_reservations()), ("..", 0));
    drop(vbar);
    world.check();
}

#[test]
fn a_vbar_without_addresses_is_closed_like_any() {
    let world = World::with("capacity=16M,granularity=64K,vmm=0", budget_options(4));
    let vbar = world.vbar(4);
    assert!(matches!(vbar.fault(0..P, world.stream).unwrap(), Fault::Offloaded(_)));
    vbar.close();
    closed(vbar.fault(0..P, world.stream));
    assert_eq!(world.runtime.numbers().bars, 0);
    check_gone(&world);
}

#[test]
fn a_closed_vbars_frames_serve_another_before_its_copies_are_done() {
    // As when one model takes another's place: nothing is waited for, nothing is refused.
    let world = World::budget(8);
    let target = world.scratch();
    for round in 0..4u64 {
        let vbar = world.vbar(8);
        for page in 0..8 {
            let guard = resident(&world, &vbar, page..page + 1);
            world.write(guard.address(), P, round, world.stream);
            world.sum(guard.address(), P, target, Duration::from_millis(1), world.stream);
        }
    }
    let sums = (0..4).map(|round| pattern_sum(P, round).wrapping_mul(8));
    let expected = sums.fold(0u64, u64::wrapping_add);
    assert_eq!(world.word(target, world.stream), expected);
    world.check();
    world.check_shut();
}
