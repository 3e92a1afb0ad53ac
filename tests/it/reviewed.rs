//! What a hostile review found wrong with answers: what is refused, and whose bytes a page shows.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use vbar::driver::sim::{Sim, SimOptions, Verb};
use vbar::driver::{Driver, KernelCall};
use vbar::host::source::ModelFile;
use vbar::memory::pager::HeldPins;
use vbar::model::binding::Binding;
use vbar::options::Eviction;
use vbar::runtime::FillGuard;
use vbar::units::{DeviceAddress, DeviceOrdinal, PageSize, Stream, TIB};
use vbar::{Allocation, AllocationFault, ErrorCode, Fault, Reason};
use vbar::{Runtime, RuntimeOptions};

use crate::world::{
    DEVICE, P, ROOMY, World, budget_options, drawn, fault, options, pattern_bytes, pattern_sum,
    resident, resident_on,
};

/// A device that checks every access and writes breaches down.
const CHECKED: &str = "capacity=64M,granularity=64K,on_violation=record,checked=1";

/// How long a slow kernel runs.
const SLOW: Duration = Duration::from_millis(50);

fn checked(pages: u64) -> World {
    World::with(CHECKED, budget_options(pages))
}

#[track_caller]
fn refill(allocation: &Allocation, stream: Stream) -> FillGuard<'_> {
    match allocation.fault(stream).unwrap() {
        AllocationFault::Refill(fill) => fill,
        other => panic!("no refill is due: {other:?}"),
    }
}

/// Work on `later` starts after what is on `earlier` now.
fn order(world: &World, earlier: Stream, later: Stream) {
    let event = world.sim.event_create().unwrap();
    world.sim.event_record(event, earlier).unwrap();
    world.sim.stream_wait_event(later, event).unwrap();
    world.sim.event_destroy(event).unwrap();
}

/// Enqueues the pattern of `seed` over one page by a kernel that takes its time.
fn write_slowly(world: &World, target: DeviceAddress, seed: u64, stream: Stream) {
    let delay_nanos = SLOW.as_nanos() as u64;
    let call = KernelCall::Pattern { target, bytes: P, seed, delay_nanos };
    world.sim.launch_kernel(call, stream).unwrap();
}

/// A binding of one page to a file of one page of sevens.
fn page_of_sevens() -> (tempfile::TempDir, Binding, Arc<ModelFile>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sevens");
    std::fs::write(&path, vec![7_u8; P as usize]).unwrap();
    let mut binding = Binding::new();
    binding.bind(0..P, 0, 0, P).unwrap();
    (folder, binding, Arc::new(ModelFile::open(&path).unwrap()))
}

#[test]
fn a_vbar_that_was_faulted_bare_is_not_bound_any_more() {
    let world = World::budget(4);
    let (_folder, binding, file) = page_of_sevens();
    let used = world.vbar(1);
    drop(resident(&world, &used, 0..1));
    let refused = used.bind(binding, vec![file]).map(drop);
    assert_eq!(refused.map_err(|error| error.code()), Err(ErrorCode::InvalidArgument));
    assert_eq!(world.touch(&used, 0..1), Ok(()));

    let (_folder, binding, file) = page_of_sevens();
    let unused = world.vbar(1);
    unused.bind(binding, vec![file]).unwrap();
    let guard = resident(&world, &unused, 0..1);
    world.sim.stream_synchronize(world.stream).unwrap();
    let bytes = world.sim.read_bytes(guard.address(), P as usize).unwrap();
    assert_eq!(bytes, vec![7; P as usize]);
    drop(guard);
    world.check();
}

#[test]
fn a_runtime_does_not_take_the_token_of_another_for_its_own() {
    let text = format!("{ROOMY},devices=2");
    let sim = Sim::new(SimOptions::parse(&text).unwrap());
    let open = |device| Runtime::open(sim.driver(), device, options()).unwrap();
    let (first, second) = (open(DEVICE), open(DeviceOrdinal(1)));
    let (ours, theirs) = (first.create_bar(P).unwrap(), second.create_bar(P).unwrap());
    let token = resident_on(&ours, 0..1, Stream::NONE).into_token();
    let other = resident_on(&theirs, 0..1, Stream::NONE).into_token();
    let refused = second.unpin(token, Stream::NONE);
    assert_eq!(refused.map_err(|error| error.code()), Err(ErrorCode::StaleToken));
    assert_eq!((ours.residency()[0].pins, theirs.residency()[0].pins), (1, 1));
    first.unpin(token, Stream::NONE).unwrap();
    second.unpin(other, Stream::NONE).unwrap();
    assert_eq!((ours.residency()[0].pins, theirs.residency()[0].pins), (0, 0));
}

#[test]
fn a_vbar_whose_end_is_beyond_every_address_is_refused() {
    let sim = Sim::new(SimOptions::parse("capacity=64M").unwrap());
    let options =
        RuntimeOptions { page_size: PageSize::new(8 << 30).unwrap(), ..RuntimeOptions::default() };
    let options = RuntimeOptions { headroom_bytes: Some(0), ..options };
    let runtime = Runtime::open(sim.driver(), DEVICE, options).unwrap();
    let refused = runtime.create_bar(u64::MAX).map(drop);
    assert_eq!(refused.map_err(|error| error.code()), Err(ErrorCode::InvalidArgument));
    assert_eq!(sim.live_reservations(), 0);
}

#[test]
fn a_record_interval_may_be_for_ever() {
    let options = RuntimeOptions { record_interval: Duration::MAX, ..budget_options(4) };
    let world = World::with(ROOMY, options);
    let vbar = world.vbar(4);
    for _ in 0..100 {
        drop(resident(&world, &vbar, 0..4));
    }
    assert_eq!(vbar.end_of_run(world.stream, HeldPins::Keep).unwrap().held, []);
    world.check();
}

#[test]
fn a_headroom_larger_than_the_device_is_refused_at_open() {
    let sim = Sim::new(SimOptions::parse(ROOMY).unwrap());
    for headroom in [u64::MAX, (64 << 20) + 1] {
        let options = RuntimeOptions { headroom_bytes: Some(headroom), ..options() };
        let refused = Runtime::open(sim.driver(), DEVICE, options).map(drop);
        assert_eq!(refused.map_err(|error| error.code()), Err(ErrorCode::InvalidArgument));
    }
    Runtime::open(sim.driver(), DEVICE, options()).unwrap();
}

#[test]
fn a_watermark_frees_no_page_below_it() {
    let world = World::budget(8);
    let vbar = world.vbar(8);
    drop(resident(&world, &vbar, 0..8));
    let pinned = resident(&world, &vbar, 7..8);
    world.sim.ctx_synchronize().unwrap();
    vbar.set_watermark(7).unwrap();
    assert_eq!(drawn(&vbar, 8), "#######P");
    drop(pinned);
    world.check();
}

#[test]
fn a_whole_vbar_of_a_tebibyte_is_refused_as_too_large() {
    let page = PageSize::new(2 << 20).unwrap();
    let options =
        RuntimeOptions { page_size: page, budget_bytes: Some(8 << 20), ..budget_options(0) };
    let world = World::with("capacity=64M,granularity=2M", options);
    let vbar = world.runtime.create_bar(TIB).unwrap();
    let whole = vbar.fault(0..TIB, world.stream).unwrap().offloaded();
    assert_eq!(whole, Some(Reason::TooLarge));
    let residency = vbar.residency();
    assert_eq!(residency.len() as u64, TIB / page.bytes());
    assert!(residency.iter().all(|page| page.pins == 0));
    assert_eq!(world.used(), 0);
    // What fits is served, at both ends.
    for start in [0, TIB - page.bytes()] {
        let end: Range<u64> = start..start + page.bytes();
        assert!(vbar.fault(end, world.stream).unwrap().resident().is_some());
    }
    world.check();
}

#[test]
fn a_refill_comes_after_a_raw_use_of_its_page_on_another_stream() {
    let world = checked(4);
    let (vbar, other, target) = (world.vbar(1), world.another_stream(), world.scratch());
    let guard = resident(&world, &vbar, 0..1);
    world.write(guard.address(), P, 3, world.stream);
    world.sum(guard.address(), P, target, SLOW, world.stream);
    drop(guard);
    let allocation = vbar.allocate(P).unwrap();
    let fill = refill(&allocation, other);
    world.write(fill.address(), P, 4, other);
    let guard = fill.commit(other).unwrap();
    assert_eq!(world.word(target, world.stream), pattern_sum(P, 3));
    world.sim.stream_synchronize(other).unwrap();
    let bytes = world.sim.read_bytes(guard.address(), P as usize).unwrap();
    assert!(bytes == pattern_bytes(P, 4), "the refill's bytes are not what it wrote");
    drop(guard);
    world.check();
}

#[test]
fn a_page_remembers_the_stream_that_committed_its_refill() {
    for eviction in [Eviction::Aliasing, Eviction::Strict] {
        let world = World::with(CHECKED, RuntimeOptions { eviction, ..budget_options(1) });
        let (vbar, next) = (world.vbar(1), world.vbar(1));
        let (writer, third) = (world.another_stream(), world.another_stream());
        let allocation = vbar.allocate(P).unwrap();
        let fill = refill(&allocation, world.stream);
        order(&world, world.stream, writer);
        write_slowly(&world, fill.address(), 4, writer);
        drop(fill.commit(writer).unwrap());
        next.prioritise().unwrap();
        let guard = resident_on(&next, 0..1, third);
        world.write(guard.address(), P, 9, third);
        world.sim.ctx_synchronize().unwrap();
        let bytes = world.sim.read_bytes(guard.address(), P as usize).unwrap();
        assert!(bytes == pattern_bytes(P, 9), "{eviction:?}: the late refill wrote over the page");
        drop(guard);
        world.check();
    }
}

#[test]
fn memory_is_not_freed_under_a_refill_committed_on_another_stream() {
    let world = checked(1);
    let (vbar, writer) = (world.vbar(1), world.another_stream());
    let allocation = vbar.allocate(P).unwrap();
    let fill = refill(&allocation, world.stream);
    order(&world, world.stream, writer);
    write_slowly(&world, fill.address(), 4, writer);
    drop(fill.commit(writer).unwrap());
    vbar.free_memory(u64::MAX).unwrap();
    world.sim.ctx_synchronize().unwrap();
    world.check();
}

#[test]
fn a_refill_faulted_without_a_stream_and_committed_on_one_is_waited_for() {
    let world = checked(1);
    let (vbar, next) = (world.vbar(1), world.vbar(1));
    let allocation = vbar.allocate(P).unwrap();
    let refill_late = |seed| {
        let fill = refill(&allocation, Stream::NONE);
        write_slowly(&world, fill.address(), seed, world.stream);
        fill.commit(world.stream).unwrap()
    };
    let guard = refill_late(4);
    world.sim.stream_synchronize(world.stream).unwrap();
    let bytes = world.sim.read_bytes(guard.address(), P as usize).unwrap();
    assert!(bytes == pattern_bytes(P, 4), "the refill's bytes are not what it wrote");
    drop(guard);
    allocation.invalidate();
    drop(refill_late(5));
    next.prioritise().unwrap();
    // Without a stream nothing orders the new user, so the page moves idle or not at all.
    drop(next.fault(0..P, Stream::NONE).unwrap());
    world.sim.ctx_synchronize().unwrap();
    assert!(matches!(fault(&world, &next, 0..1), Fault::Resident(_)));
    world.check();
}

/// Of a miss beside so many pages of a closed VBAR whose work is not done: how often the driver is
/// asked about events by a fault of `pages` pages, with room for them or without.
fn queries_beside(lingering: u64, pages: u64, room: u64) -> u64 {
    let sim = format!("capacity={},granularity=64K", 2 * (lingering + pages) * P);
    let world = World::with(&sim, budget_options(lingering + room));
    let (old, new, other) = (world.vbar(lingering), world.vbar(pages), world.another_stream());
    world.sim.hold_stream(world.stream).unwrap();
    for page in 0..lingering {
        let guard = resident(&world, &old, page..page + 1);
        world.write(guard.address(), 8, 1, world.stream);
        drop(guard);
    }
    drop(old);
    assert_eq!(world.runtime.numbers().lingering_mappings, lingering);
    let before = world.sim.calls(Verb::EventQuery);
    drop(resident_on(&new, 0..pages, other));
    let queries = world.sim.calls(Verb::EventQuery) - before;
    world.sim.release_stream(world.stream).unwrap();
    world.sim.ctx_synchronize().unwrap();
    world.check();
    queries
}

#[test]
fn pages_that_wait_for_their_users_cost_a_miss_no_query_each() {
    for (pages, room) in [(1, 1), (1, 0), (8, 0), (100, 0)] {
        let (few, many) = (queries_beside(200, pages, room), queries_beside(2000, pages, room));
        assert!(many <= few, "{pages} pages, room for {room}: {many} queries instead of {few}");
    }
}
