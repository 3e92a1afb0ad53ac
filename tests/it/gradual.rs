//! Large requests into free frames: copies begin before the last page is mapped, and a failure at
//! any call leaves every page as it was.

use std::ops::ControlFlow;

use tempfile::TempDir;
use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode};
use vbar::model::synth::{synthesize, tensor_seed};
use vbar::{ErrorCode, Fault, ModelBar, Reason, Result, Vbar, set_wait_check};

use crate::world::{DEVICE, P, World, budget_options, drawn, pattern_sum};

/// Pages of the model, nearly.
const N: u64 = 24;
const SEED: u64 = 5;

struct Bench {
    world: World,
    bar: ModelBar,
    /// Whose pages have the frames at first.
    other: Option<Vbar>,
    _folder: TempDir,
}

/// With frames that were never made, or that are free.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Supply {
    Fresh,
    Free,
    /// Behind pages of another VBAR.
    Taken,
}

fn bench(supply: Supply) -> Bench {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    synthesize(&path, N * P, SEED).unwrap();
    let world = World::with(crate::world::ROOMY, budget_options(N + 8));
    let bar = world.runtime.open_model(&path).unwrap();
    if supply == Supply::Free {
        let closing = world.vbar(N + 8);
        world.touch(&closing, 0..N + 8).unwrap();
        closing.destroy_wait().unwrap();
    }
    let mut other = None;
    if supply == Supply::Taken {
        let taken = world.vbar(N + 8);
        world.touch(&taken, 0..N + 8).unwrap();
        bar.vbar().prioritise().unwrap();
        world.sim.ctx_synchronize().unwrap();
        other = Some(taken);
    }
    Bench { world, bar, other, _folder: folder }
}

impl Bench {
    fn pages(&self) -> u64 {
        self.bar.vbar().bytes() / P
    }

    /// All tensors by one request.
    fn fault_all(&self) -> Result<Option<Reason>> {
        let tensors = self.bar.model().tensors();
        let ranges: Vec<(&Vbar, _)> = (0..tensors.len())
            .filter(|tensor| tensors[*tensor].bytes > 0)
            .map(|tensor| (self.bar.vbar(), self.bar.range(tensor)))
            .collect();
        let outcome = self.world.runtime.fault_many(&ranges, self.world.stream)?;
        Ok(outcome.offloaded())
    }

    #[track_caller]
    fn check_bytes(&self) {
        let (world, stream) = (&self.world, self.world.stream);
        let target = world.scratch();
        let mut expected = 0u64;
        for (index, tensor) in self.bar.model().tensors().iter().enumerate() {
            let guard = self.bar.fault(index, stream).unwrap().resident().unwrap();
            let (address, bytes) = (guard.address(), guard.bytes());
            world.sum(address, bytes, target, std::time::Duration::ZERO, stream);
            expected =
                expected.wrapping_add(pattern_sum(tensor.bytes, tensor_seed(SEED, &tensor.name)));
        }
        assert_eq!(world.word(target, stream), expected);
    }

    fn books(&self) -> (String, u64, usize, u64, u64) {
        let Self { world, bar, .. } = self;
        (
            drawn(bar.vbar(), u32::MAX),
            world.sim.live_frames(DEVICE),
            world.sim.live_mappings(),
            world.used(),
            world.runtime.numbers().free_bytes,
        )
    }

    fn check_shut(self) {
        let Self { world, bar, other, .. } = self;
        world.check();
        drop((bar, other));
        world.check_shut();
    }
}

#[test]
fn copies_begin_before_the_last_page_is_mapped() {
    let bench = bench(Supply::Fresh);
    let sim = &bench.world.sim;
    sim.fail_nth(Verb::MemMap, bench.pages(), DriverCode::INVALID_VALUE);
    assert_eq!(bench.fault_all().unwrap_err().code(), ErrorCode::Driver);
    assert!(sim.calls(Verb::MemcpyHtodAsync) > 0);
    sim.heal();
    assert_eq!(bench.fault_all().unwrap(), None);
    bench.check_bytes();
    bench.check_shut();
}

/// As where a model streams through frames that others, or its own pages, have to give up.
#[test]
fn copies_into_frames_of_other_pages_begin_before_the_last_page_is_mapped() {
    let bench = bench(Supply::Taken);
    let sim = &bench.world.sim;
    let (mapped, copied) = (sim.calls(Verb::MemMap), sim.calls(Verb::MemcpyHtodAsync));
    sim.fail_nth(Verb::MemMap, bench.pages(), DriverCode::INVALID_VALUE);
    assert_eq!(bench.fault_all().unwrap_err().code(), ErrorCode::Driver);
    assert!(sim.calls(Verb::MemMap) - mapped >= bench.pages());
    assert!(sim.calls(Verb::MemcpyHtodAsync) > copied);
    sim.heal();
    assert_eq!(bench.fault_all().unwrap(), None);
    bench.check_bytes();
    bench.check_shut();
}

/// No page of the request has come; of the others those are gone whose frames had been taken.
#[test]
fn a_failure_at_any_call_that_takes_frames_of_other_pages_breaks_nothing() {
    for verb in [Verb::MemMap, Verb::MemSetAccess, Verb::MemcpyHtodAsync, Verb::EventRecord] {
        let mut nth = 1;
        loop {
            let bench = bench(Supply::Taken);
            let (name, before) = (format!("{verb} {nth}"), drawn(bench.bar.vbar(), u32::MAX));
            let (sim, used) = (&bench.world.sim, bench.world.used());
            sim.fail_nth(verb, nth, DriverCode::INVALID_VALUE);
            let failed = match bench.fault_all() {
                Ok(refused) => {
                    assert_eq!(refused, None, "{name}");
                    None
                }
                Err(error) => Some(error.code()),
            };
            assert!(failed.is_none_or(|code| code == ErrorCode::Driver), "{name}: {failed:?}");
            sim.heal();
            sim.ctx_synchronize().unwrap();
            bench.world.runtime.refresh().unwrap();
            if failed.is_some() {
                assert_eq!(drawn(bench.bar.vbar(), u32::MAX), before, "{name}");
                assert!(bench.world.used() <= used, "{name}");
            }
            assert_eq!(bench.fault_all().unwrap(), None, "{name}");
            bench.check_bytes();
            bench.check_shut();
            if failed.is_none() {
                break;
            }
            nth += 3;
        }
        assert!(nth > 1, "{verb} is never called");
    }
}

#[test]
fn a_failure_at_any_call_leaves_everything_as_it_was() {
    let verbs = [
        Verb::MemCreate,
        Verb::MemMap,
        Verb::MemSetAccess,
        Verb::MemcpyHtodAsync,
        Verb::EventRecord,
    ];
    for supply in [Supply::Fresh, Supply::Free] {
        for verb in verbs {
            for code in [DriverCode::INVALID_VALUE, DriverCode::OUT_OF_MEMORY] {
                let mut nth = 1;
                loop {
                    let bench = bench(supply);
                    let (name, before) = (format!("{supply:?} {verb} {nth}"), bench.books());
                    let sim = &bench.world.sim;
                    // From there on, so that it does not pass when it is tried again.
                    sim.fail(verb, nth - 1, 1000, code);
                    match bench.fault_all() {
                        Ok(Some(reason)) => assert_eq!(reason, Reason::DriverMemory, "{name}"),
                        Ok(None) => break,
                        Err(error) => assert_eq!(error.code(), ErrorCode::Driver, "{name}"),
                    }
                    sim.heal();
                    sim.ctx_synchronize().unwrap();
                    bench.world.runtime.refresh().unwrap();
                    assert_eq!(bench.books(), before, "{name}");
                    bench.world.check();
                    assert_eq!(bench.fault_all().unwrap(), None, "{name}");
                    bench.check_bytes();
                    bench.check_shut();
                    nth += 3;
                }
                let never = supply == Supply::Free && verb == Verb::MemCreate;
                assert!(nth > 1 || never, "{supply:?} {verb} is never called");
            }
        }
    }
}

#[test]
fn a_page_that_has_come_serves_others_before_the_rest_has() {
    for fails in [false, true] {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("model.safetensors");
        synthesize(&path, N * P, SEED).unwrap();
        let world = World::with(crate::world::ROOMY, budget_options(N + 8));
        // The next stream that is made gets this one's handle: the fill stream.
        let fill = world.another_stream();
        world.sim.stream_destroy(fill).unwrap();
        let bar = world.runtime.open_model(&path).unwrap();
        world.sim.hold_stream(fill).unwrap();
        let bench = Bench { world, bar, other: None, _folder: folder };
        let (world, vbar) = (&bench.world, bench.bar.vbar());
        let (waits, is_waiting) = std::sync::mpsc::channel();
        let guard = std::thread::scope(|scope| {
            let large = scope.spawn(|| {
                let context = world.runtime.device().context;
                world.sim.ctx_set_current(Some(context)).unwrap();
                // For a slot of the ring, whose copies are held.
                set_wait_check(Some(Box::new(move || {
                    let _ = waits.send(());
                    ControlFlow::Continue(())
                })));
                bench.fault_all()
            });
            is_waiting.recv().unwrap();
            // Not even for the copy: that is for the stream.
            set_wait_check(Some(Box::new(|| ControlFlow::Break(()))));
            let guard = vbar.fault(0..P, world.stream).map(Fault::resident);
            set_wait_check(None);
            if fails {
                world.sim.fail(Verb::MemMap, 0, 1000, DriverCode::INVALID_VALUE);
            }
            world.sim.release_stream(fill).unwrap();
            let ended = large.join().unwrap();
            match fails {
                true => assert_eq!(ended.unwrap_err().code(), ErrorCode::Driver),
                false => assert_eq!(ended.unwrap(), None),
            }
            guard.unwrap().expect("the page has come")
        });
        world.sim.heal();
        if fails {
            // It is in use; the others are as they were.
            world.sim.ctx_synchronize().unwrap();
            world.runtime.refresh().unwrap();
            let rest = ".".repeat(bench.pages() as usize - 1);
            assert_eq!(drawn(vbar, u32::MAX), format!("P{rest}"));
            assert_eq!(world.used(), 1);
        }
        drop(guard);
        assert_eq!(bench.fault_all().unwrap(), None);
        bench.check_bytes();
        bench.check_shut();
    }
}
