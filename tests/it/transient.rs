//! A code that may be another one a moment later is no error at once, whichever call returns it:
//! calls are made again a few times, counted, and what fails for good leaves everything as it was.

use std::time::Duration;

use tempfile::TempDir;
use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode};
use vbar::memory::pager::HeldPins;
use vbar::model::synth::{synthesize, tensor_seed};
use vbar::units::Stream;
use vbar::{AllocationFault, Error, ErrorCode, Vbar};

use crate::world::{P, World, pattern_sum, resident, resident_on};

const CODES: [DriverCode; 2] = [DriverCode::OUT_OF_MEMORY, DriverCode::NOT_READY];
/// Calls after the first that are made before a code counts.
const RETRIES: u64 = 3;

/// A page that a stream still uses, and the VBAR that is to have its frame for another stream.
struct Contested {
    world: World,
    new: Vbar,
    other: Stream,
    _old: Vbar,
}

fn contested() -> Contested {
    let world = World::budget(1);
    let (old, new, other) = (world.vbar(1), world.vbar(1), world.another_stream());
    world.sim.hold_stream(world.stream).unwrap();
    let guard = resident(&world, &old, 0..1);
    world.write(guard.address(), P, 1, world.stream);
    drop(guard);
    Contested { world, new, other, _old: old }
}

impl Contested {
    fn fault(&self) -> Result<(), Error> {
        self.new.fault(0..P, self.other).map(|fault| drop(fault.resident().expect("by aliasing")))
    }

    fn end(self) {
        self.world.sim.heal();
        self.world.sim.release_stream(self.world.stream).unwrap();
        self.world.sim.ctx_synchronize().unwrap();
        drop(resident_on(&self.new, 0..1, self.other));
        self.world.check();
    }
}

#[test]
fn a_fault_outlasts_a_few_transient_codes_of_each_call() {
    let verbs = [
        Verb::StreamWaitEvent,
        Verb::StreamGetId,
        Verb::StreamIsCapturing,
        Verb::EventRecord,
        Verb::EventCreate,
    ];
    for (verb, code) in verbs.into_iter().flat_map(|verb| CODES.map(|code| (verb, code))) {
        for count in 1..=RETRIES {
            let contested = contested();
            let before = contested.world.runtime.statistics().driver_retries;
            contested.world.sim.fail_next_n(verb, count, code);
            contested.fault().unwrap_or_else(|error| panic!("{verb} {count} times: {error}"));
            let retries = contested.world.runtime.statistics().driver_retries - before;
            assert_eq!(retries, count, "{verb} {code:?}");
            contested.end();
        }
    }
}

#[test]
fn a_transient_code_that_stays_is_an_error_and_changes_nothing() {
    let verbs = [Verb::StreamWaitEvent, Verb::StreamGetId, Verb::EventRecord];
    for (verb, code) in verbs.into_iter().flat_map(|verb| CODES.map(|code| (verb, code))) {
        let contested = contested();
        let numbers = contested.world.runtime.numbers();
        contested.world.sim.fail_always(verb, code);
        let error = contested.fault().unwrap_err();
        assert_eq!((error.code(), error.driver_code()), (ErrorCode::Driver, Some(code)), "{verb}");
        assert_eq!(contested.world.runtime.used_bytes(), numbers.used_bytes);
        assert!(contested.new.residency().iter().all(|page| page.pins == 0), "{verb}");
        contested.end();
    }
}

#[test]
fn a_fill_outlasts_a_few_transient_codes_of_each_call() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    synthesize(&path, 8 * P, 6).unwrap();
    let verbs = [Verb::MemcpyHtodAsync, Verb::EventRecord, Verb::StreamCreate, Verb::StreamGetId];
    for (verb, code) in verbs.into_iter().flat_map(|verb| CODES.map(|code| (verb, code))) {
        for count in 1..=RETRIES {
            let (world, name) = (World::budget(20), format!("{verb} {code:?} {count}"));
            // The fill stream is made when the first model is bound.
            world.sim.fail_next_n(verb, count, code);
            let bar = world.runtime.open_model(&path).unwrap();
            let tensor = &bar.model().tensors()[0];
            let guard = bar.fault(0, world.stream).unwrap().resident().unwrap();
            let target = world.scratch();
            world.sum(guard.address(), tensor.bytes, target, Duration::ZERO, world.stream);
            let expected = pattern_sum(tensor.bytes, tensor_seed(6, &tensor.name));
            assert_eq!(world.word(target, world.stream), expected, "{name}");
            assert_eq!(world.runtime.statistics().driver_retries, count, "{name}");
            drop(guard);
            world.check();
        }
    }
}

#[test]
fn a_copy_that_never_succeeds_is_an_error_and_leaves_no_page() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    synthesize(&path, 8 * P, 6).unwrap();
    for code in CODES {
        let world = World::budget(20);
        let bar = world.runtime.open_model(&path).unwrap();
        world.sim.fail_always(Verb::MemcpyHtodAsync, code);
        let error = bar.fault(0, world.stream).map(drop).unwrap_err();
        assert_eq!((error.code(), error.driver_code()), (ErrorCode::Driver, Some(code)));
        assert_eq!(world.sim.calls(Verb::MemcpyHtodAsync), 1 + RETRIES);
        world.sim.heal();
        drop(bar.fault(0, world.stream).unwrap().resident().unwrap());
        world.check();
    }
}

#[test]
fn uses_and_ends_of_runs_outlast_a_few_transient_codes() {
    for code in CODES {
        let world = World::budget(4);
        let (vbar, other) = (world.vbar(2), world.another_stream());
        let allocation = vbar.allocate(P).unwrap();
        let AllocationFault::Refill(fill) = allocation.fault(world.stream).unwrap() else {
            panic!("never written")
        };
        world.write(fill.address(), P, 3, world.stream);
        world.sim.fail_next_n(Verb::EventRecord, RETRIES, code);
        let guard = fill.commit(world.stream).unwrap();
        world.sim.fail_next_n(Verb::EventRecord, RETRIES, code);
        guard.also_used_on(other).unwrap();
        // What an unpin records is recorded: the page has fences and can go.
        world.sim.fail_next_n(Verb::EventRecord, RETRIES, code);
        drop(guard);
        world.sim.fail_next_n(Verb::EventRecord, RETRIES, code);
        vbar.end_of_run(other, HeldPins::Keep).unwrap();
        assert_eq!(world.runtime.statistics().driver_retries, 4 * RETRIES);
        let waits = world.sim.calls(Verb::CtxSynchronize);
        assert_eq!(vbar.free_memory(u64::MAX).unwrap().bytes, P);
        assert_eq!(world.sim.calls(Verb::CtxSynchronize), waits);
        world.check();
    }
}
