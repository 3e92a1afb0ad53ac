//! PyTorch's allocator where it is hardest to be right: slots of streams that change hands, calls
//! of the driver that fail in the middle of a move, threads that let go of what others ask for.

use std::sync::Arc;

use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode};
use vbar::options::{Eviction, RuntimeOptions};
use vbar::sync::fence::Cover;
use vbar::torch::{Freed, PoolId};
use vbar::units::Stream;

use crate::torch::Torch;
use crate::torch_memory::{earn, hole};
use crate::world::{P, ROOMY, World, budget_options, options};

/// Memory that a stream freed before it was retired, and a block that is freed after that: the
/// first is nobody else's before its work is done.
#[test]
fn a_free_after_its_stream_was_retired_makes_nothing_anybodys() {
    for bytes in [20 << 10, 4 * P] {
        let torch = Torch::of(World::with(ROOMY, options()));
        let (own, other) = (torch.world.stream, torch.world.another_stream());
        let block = torch.malloc_on(bytes, own);
        // Not beside it, where the two would be one piece.
        let (_between, last) = (torch.malloc_on(P, own), torch.malloc_on(P, own));
        torch.world.sim.hold_stream(own).unwrap();
        torch.write(block, bytes, 1, own);
        torch.allocator.free(block);
        torch.world.runtime.retire_stream(own).unwrap();
        torch.allocator.free(last);
        for seed in 0..3 {
            let elsewhere = torch.malloc_on(bytes, other);
            assert_ne!(elsewhere, block, "its writer has not run");
            torch.write(elsewhere, bytes, seed, other);
        }
        torch.world.sim.stream_synchronize(other).unwrap();
        torch.finish(own);
        torch.allocator.empty_cache().unwrap();
        torch.check();
    }
}

/// A block that `own` still writes and that waits for `used` too, freed; then `own` is retired, and
/// has a new slot on which nothing was used.
fn freed_and_retired(torch: &Torch, bytes: u64, own: Stream, used: Stream) -> u64 {
    let block = torch.malloc_on(bytes, own);
    let _between = torch.malloc_on(P, own);
    torch.world.sim.hold_stream(own).unwrap();
    torch.world.sim.hold_stream(used).unwrap();
    torch.write(block, bytes, 1, own);
    torch.allocator.record_stream(block, used);
    assert_eq!(torch.allocator.free(block), Freed::Deferred);
    torch.world.runtime.retire_stream(own).unwrap();
    torch.malloc_on(3 * P, own);
    block
}

/// The same of a block that waits for a stream that it was recorded for.
#[test]
fn a_block_that_waits_while_its_stream_is_retired_is_not_anybodys() {
    let torch = Torch::of(World::with(ROOMY, options()));
    let (own, used) = (torch.world.stream, torch.world.another_stream());
    let other = torch.world.another_stream();
    let bytes = 4 * P;
    let block = freed_and_retired(&torch, bytes, own, used);
    torch.finish(used);
    for seed in 0..3 {
        let elsewhere = torch.malloc_on(bytes, other);
        assert_ne!(elsewhere, block, "its writer has not run");
        torch.write(elsewhere, bytes, seed, other);
    }
    torch.world.sim.stream_synchronize(other).unwrap();
    torch.finish(own);
    torch.check();
}

/// As above, and the new slot is another stream's by the time that the block waits no more: what
/// that one records tells nothing of the block.
#[test]
fn a_block_that_waited_has_no_mark_of_another_stream() {
    for bytes in [20 << 10, 4 * P] {
        let torch = Torch::of(World::with(ROOMY, options()));
        let device = Arc::clone(torch.world.runtime.device());
        let (own, used) = (torch.world.stream, torch.world.another_stream());
        let other = torch.world.another_stream();
        let block = freed_and_retired(&torch, bytes, own, used);
        let slot = device.fences.slot_of(own).unwrap().unwrap();
        let thief = take_slot(&torch, slot.index());
        torch.finish(used);
        // The block waits for its own stream alone.
        let mut elsewhere = vec![torch.malloc_on(512, other)];
        let stolen = device.fences.slot_of(thief).unwrap().unwrap();
        for _ in 0..3 {
            let fence = device.fences.record(thief, stolen).unwrap();
            torch.world.sim.stream_synchronize(thief).unwrap();
            assert_eq!(device.fences.cover(fence).unwrap(), Cover::Passed);
        }
        for seed in 0..3 {
            let found = torch.malloc_on(bytes, other);
            assert_ne!(found, block, "its writer has not run");
            torch.write(found, bytes, seed, other);
            elsewhere.push(found);
        }
        torch.world.sim.stream_synchronize(other).unwrap();
        torch.finish(own);
        for block in elsewhere {
            torch.allocator.free(block);
        }
        torch.allocator.free(torch.malloc_on(bytes, own));
        torch.world.sim.stream_synchronize(other).unwrap();
        torch.allocator.empty_cache().unwrap();
        torch.check();
    }
}

/// A slot that is held is no other stream's, however many come; when it is let go of it is.
#[test]
fn a_slot_that_is_held_is_nobody_elses() {
    let torch = Torch::of(World::with(ROOMY, options()));
    let device = Arc::clone(torch.world.runtime.device());
    let own = torch.world.stream;
    let slot = device.fences.slot_of(own).unwrap().unwrap();
    let held = device.fences.hold(slot).unwrap();
    assert_eq!(held.slot(), slot);
    for _ in 0..600 {
        let stream = torch.world.another_stream();
        let taken = device.fences.slot_of(stream).unwrap().unwrap();
        assert_ne!(taken.index(), slot.index());
    }
    assert!(device.fences.is_still(slot));
    drop(held);
    let thief = take_slot(&torch, slot.index());
    assert!(device.fences.hold_if_still(slot).is_none());
    let stolen = device.fences.slot_of(thief).unwrap().unwrap();
    // Neither a stamp nor a hold is of the slot as it was told.
    assert_ne!(device.fences.stamp_anyhow(slot).slot(), stolen.index());
    assert_ne!(device.fences.hold(slot).unwrap().slot(), slot);
    assert!(device.fences.is_still(stolen));
}

/// As above, the stream's next request instead of a free.
#[test]
fn a_request_after_its_stream_was_retired_makes_nothing_anybodys() {
    for bytes in [40 << 10, 4 * P] {
        let torch = Torch::of(World::with(ROOMY, options()));
        let (own, other) = (torch.world.stream, torch.world.another_stream());
        let (block, second) = (torch.malloc_on(bytes, own), torch.malloc_on(bytes, own));
        torch.world.sim.hold_stream(own).unwrap();
        torch.write(block, bytes, 1, own);
        torch.allocator.free(block);
        torch.world.runtime.retire_stream(own).unwrap();
        torch.allocator.free(torch.malloc_on(512, own));
        let elsewhere = torch.malloc_on(bytes, other);
        assert_ne!(elsewhere, block, "its writer has not run");
        torch.write(elsewhere, bytes, 2, other);
        torch.world.sim.stream_synchronize(other).unwrap();
        torch.world.sim.release_stream(own).unwrap();
        torch.allocator.free(second);
        torch.check();
    }
}

/// Lets another stream have the slot of one that sleeps.
fn steal_slot(torch: &Torch, from: Stream) -> Stream {
    let device = torch.world.runtime.device();
    device.context_wait_asked().unwrap();
    let slot = device.fences.slot_of(from).unwrap().unwrap();
    take_slot(torch, slot.index())
}

/// A stream that has taken a slot over whose uses have all passed.
fn take_slot(torch: &Torch, index: u16) -> Stream {
    let fences = &torch.world.runtime.device().fences;
    for _ in 0..4096 {
        let stream = torch.world.another_stream();
        if fences.slot_of(stream).unwrap().unwrap().index() == index {
            return stream;
        }
    }
    panic!("nobody has the slot");
}

/// Pages that the work of one stream left in chunks are not those of the stream that had its slot
/// before.
#[test]
fn a_page_of_chunks_goes_to_the_stream_that_has_the_slot_now() {
    let torch = Torch::of(World::with(ROOMY, options()));
    let (own, filler) = (torch.world.stream, torch.world.another_stream());
    let _kept = torch.malloc_on(P, own);
    let stream = steal_slot(&torch, own);
    let block = torch.malloc_on(20 << 10, stream);
    torch.world.sim.hold_stream(stream).unwrap();
    torch.write(block, 20 << 10, 1, stream);
    torch.allocator.free(block);
    // Makes whole pages of what is free in chunks.
    torch.malloc_on(2 * P, filler);
    let asked = torch.malloc_on(P, own);
    torch.write(asked, P, 2, own);
    torch.world.sim.stream_synchronize(own).unwrap();
    torch.finish(stream);
    torch.check();
}

/// A graph pool's heap is merged into that of a stream whose slot was another one.
#[test]
fn a_pool_is_merged_with_the_uses_of_what_it_frees() {
    for bytes in [20 << 10, 4 * P] {
        let torch = Torch::of(World::with(ROOMY, options()));
        let (own, other) = (torch.world.stream, torch.world.another_stream());
        let _kept = torch.malloc_on(P, own);
        let thief = steal_slot(&torch, own);
        torch.world.sim.hold_stream(thief).unwrap();
        torch.allocator.free(torch.malloc_on(512, thief));
        // The stream gets a new slot now, which its ordinary heap does not know of.
        let id = PoolId(0, 1);
        torch.allocator.begin_pool(id, Box::new(move |asked| asked == own));
        let (block, _between) = (torch.malloc_on(bytes, own), torch.malloc_on(3 * P, own));
        torch.allocator.end_pool(id);
        torch.allocator.release_pool(id);
        torch.world.sim.release_stream(thief).unwrap();
        // All that the graph may have done is over; what comes now is the stream's own.
        torch.world.runtime.device().context_wait_asked().unwrap();
        torch.world.sim.hold_stream(own).unwrap();
        torch.write(block, bytes, 1, own);
        torch.allocator.free(block);
        for seed in 0..3 {
            let elsewhere = torch.malloc_on(bytes.max(P), other);
            torch.write(elsewhere, bytes, seed, other);
        }
        torch.world.sim.stream_synchronize(other).unwrap();
        torch.check();
        torch.finish(own);
        torch.allocator.empty_cache().unwrap();
        torch.check();
    }
}

/// The pool is ended, released and its memory ordinary between the question whose stream it is and
/// the answer.
#[test]
fn a_pool_may_go_while_its_filter_is_asked() {
    let torch = Torch::of(World::with(ROOMY, options()));
    for bytes in [512, 40 << 10, 3 * P] {
        let id = PoolId(0, 1);
        let weak = Arc::downgrade(&torch.allocator);
        let filter = move |_| {
            let allocator = weak.upgrade().unwrap();
            allocator.end_pool(id);
            allocator.release_pool(id);
            allocator.empty_cache().unwrap();
            true
        };
        torch.allocator.begin_pool(id, Box::new(filter));
        let block = torch.malloc(bytes);
        torch.write(block, bytes / 8 * 8, 1, torch.world.stream);
        assert_eq!(torch.allocator.free(block), Freed::Cached);
        torch.check();
    }
    torch.allocator.empty_cache().unwrap();
    assert_eq!(torch.reserved(), 0);
    torch.check_shut();
}

/// A device in the state in which a call of it moves frames or gives them back.
fn ready(eviction: Eviction) -> (Torch, u64, u64) {
    let options = RuntimeOptions { eviction, ..budget_options(60) };
    let torch = Torch::of(World::with(ROOMY, options));
    let stream = torch.world.stream;
    let all = torch.malloc(50 * P);
    torch.allocator.free(all);
    earn(&torch, 0, stream);
    for _ in 0..4 * 256 {
        torch.allocator.free(torch.malloc(16 * P));
    }
    torch.allocator.empty_cache().unwrap();
    let (_, behind) = hole(&torch, 6, stream);
    let segment = torch.allocator.segment_malloc(2 * P as usize + 512, stream).unwrap();
    torch.world.sim.stream_synchronize(stream).unwrap();
    (torch, behind, segment)
}

/// A name, and a call that is given a segment.
type NamedCall = (&'static str, fn(&Torch, u64));

const CALLS: &[NamedCall] = &[
    ("malloc", |torch, _| {
        if let Ok(block) = torch.allocator.malloc(12 * P as usize, torch.world.stream) {
            torch.allocator.free(block);
        }
    }),
    ("busy malloc", |torch, _| {
        torch.world.sim.hold_stream(torch.world.stream).unwrap();
        if let Ok(block) = torch.allocator.malloc(6 * P as usize, torch.world.stream) {
            torch.allocator.free(block);
        }
        if let Ok(block) = torch.allocator.malloc(12 * P as usize, torch.world.stream) {
            torch.allocator.free(block);
        }
        torch.world.sim.release_stream(torch.world.stream).unwrap();
    }),
    ("malloc with nothing left", |torch, _| {
        let other = torch.world.another_stream();
        if let Ok(block) = torch.allocator.malloc(54 * P as usize, other) {
            torch.allocator.free(block);
        }
    }),
    ("empty_cache", |torch, _| drop(torch.allocator.empty_cache())),
    ("segment_free", |torch, segment| {
        torch.allocator.segment_free(segment);
    }),
    ("budget", |torch, _| drop(torch.world.runtime.set_budget(Some(4 * P)))),
    ("capture", |torch, _| {
        let stream = torch.world.stream;
        torch.allocator.begin_pool(PoolId(7, 7), Box::new(move |asked| asked == stream));
        let block = torch.allocator.malloc(3 * P as usize, stream);
        torch.allocator.end_pool(PoolId(7, 7));
        torch.allocator.release_pool(PoolId(7, 7));
        drop(block.map(|block| torch.allocator.free(block)));
    }),
];

/// Each call of the driver in the middle of each of these fails, once: nothing is lost, and
/// everything can be had again.
#[test]
fn no_frame_is_lost_wherever_a_call_fails() {
    let codes = [
        DriverCode::OUT_OF_MEMORY,
        DriverCode::INVALID_VALUE,
        DriverCode::INVALID_CONTEXT,
        DriverCode::UNKNOWN,
    ];
    let mut lost = Vec::new();
    for eviction in [Eviction::Aliasing, Eviction::Strict] {
        for (name, call) in CALLS {
            let (torch, _, segment) = ready(eviction);
            let count = |torch: &Torch| Verb::ALL.map_calls(torch);
            let before = count(&torch);
            call(&torch, segment);
            let made = count(&torch).into_iter().zip(before).map(|(after, before)| after - before);
            let made: Vec<u64> = made.collect();
            // A call of the test's own.
            let verbs = Verb::ALL.iter().zip(made);
            let verbs = verbs.filter(|(verb, _)| **verb != Verb::StreamCreate);
            for (verb, calls) in verbs {
                for nth in (1..=calls.min(4)).chain((calls > 4).then_some(calls)) {
                    for code in codes {
                        let what = format!("{eviction:?} {name}: {verb:?} {nth} {code:?}");
                        if let Some(wrong) = fails_once(eviction, call, (*verb, nth, code)) {
                            lost.push(format!("{what}: {wrong}"));
                        }
                    }
                }
            }
        }
    }
    assert!(lost.is_empty(), "{} of them:\n{}", lost.len(), lost.join("\n"));
}

trait Calls {
    fn map_calls(&self, torch: &Torch) -> Vec<u64>;
}

impl Calls for [Verb] {
    fn map_calls(&self, torch: &Torch) -> Vec<u64> {
        self.iter().map(|verb| torch.world.sim.calls(*verb)).collect()
    }
}

/// What is wrong after a call in which the `nth` call of a verb fails.
fn fails_once(
    eviction: Eviction,
    call: &fn(&Torch, u64),
    (verb, nth, code): (Verb, u64, DriverCode),
) -> Option<String> {
    let (torch, behind, segment) = ready(eviction);
    torch.world.sim.fail_nth(verb, nth, code);
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| call(&torch, segment)));
    torch.world.sim.heal();
    if done.is_err() {
        return Some("it panicked".to_owned());
    }
    if torch.world.runtime.device().check().is_err() {
        // Lost: the code says so.
        return None;
    }
    torch.check();
    torch.world.runtime.set_budget(Some(60 * P)).unwrap();
    let _ = torch.world.sim.release_stream(torch.world.stream);
    torch.allocator.free(torch.malloc(512));
    torch.world.sim.ctx_synchronize().unwrap();
    torch.allocator.free(behind);
    torch.allocator.segment_free(segment);
    for _ in 0..3 {
        torch.allocator.empty_cache().unwrap();
    }
    let (reserved, used) = (torch.reserved(), torch.world.used());
    // The mapping or the frame that the driver would not let go of is kept out of use.
    let kept = u64::from(matches!(verb, Verb::MemUnmap | Verb::MemRelease));
    if reserved != 0 || used > kept {
        return Some(format!("{reserved} pages are reserved and {used} used"));
    }
    let all = (60 - used) * P;
    let Ok(block) = torch.allocator.malloc(all as usize, torch.world.stream) else {
        return Some("the budget cannot be had again".to_owned());
    };
    torch.write(block, all, 1, torch.world.stream);
    torch.check();
    None
}
