//! Waits for page-locked slots, and for a page that another thread is filling.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use tempfile::TempDir;
use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode};
use vbar::model::synth::{synthesize, tensor_seed};
use vbar::options::RuntimeOptions;
use vbar::outcome::WaitKind;
use vbar::units::Stream;
use vbar::{ErrorCode, Fault, ModelBar, Result, set_wait_check};

use super::{LONG, SHORT, cancelling};
use crate::world::{P, ROOMY, World, budget_options, pattern_sum};

/// A model whose fill stream is held, with one slot between file and device.
pub(super) struct Held {
    pub(super) world: World,
    bar: ModelBar,
    fill: Stream,
    _folder: TempDir,
}

impl Held {
    pub(super) fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("model.safetensors");
        synthesize(&path, 16 * P, 3).unwrap();
        let options = RuntimeOptions {
            staging_slot_count: 1,
            wait_timeout: LONG,
            // The slot is a page, so every page is one copy.
            ..budget_options(32)
        };
        let world = World::with(ROOMY, options);
        // The next stream that is made gets this one's handle: the fill stream.
        let fill = world.another_stream();
        world.sim.stream_destroy(fill).unwrap();
        let bar = world.runtime.open_model(&path).unwrap();
        world.sim.hold_stream(fill).unwrap();
        Self { world, bar, fill, _folder: folder }
    }

    pub(super) fn fault(&self, tensor: usize) -> Result<()> {
        match self.bar.fault(tensor, self.world.stream)? {
            Fault::Resident(guard) | Fault::HostMapped(guard) => drop(guard),
            Fault::Offloaded(reason) => panic!("offloaded: {reason}"),
        }
        Ok(())
    }

    /// Tensors of pages that no other tensor in the list touches.
    pub(super) fn apart(&self) -> Vec<usize> {
        let (mut apart, mut end) = (Vec::new(), 0);
        for tensor in 0..self.bar.model().tensors().len() {
            let place = self.bar.range(tensor);
            if place.start / P >= end && place.end > place.start {
                apart.push(tensor);
                end = place.end.div_ceil(P);
            }
        }
        apart
    }

    /// Lets the fills go on: every tensor comes, with its own bytes, and nothing is left.
    pub(super) fn check_goes_on(self) {
        let Self { world, bar, fill, .. } = self;
        world.sim.release_stream(fill).unwrap();
        world.runtime.set_wait_timeout(LONG);
        let target = world.scratch();
        let mut expected = 0u64;
        for (at, tensor) in bar.model().tensors().iter().enumerate() {
            let Fault::Resident(guard) = bar.fault(at, world.stream).unwrap() else {
                panic!("the budget holds all");
            };
            world.sum(guard.address(), guard.bytes(), target, Duration::ZERO, world.stream);
            let sum = pattern_sum(tensor.bytes, tensor_seed(3, &tensor.name));
            expected = expected.wrapping_add(sum);
        }
        assert_eq!(world.word(target, world.stream), expected);
        world.check();
        drop(bar);
        world.check_shut();
    }
}

#[test]
fn a_slot_whose_copy_is_late_is_waited_for_no_longer_than_told() {
    let held = Held::new();
    let tensors = held.apart();
    held.fault(tensors[0]).unwrap();
    held.world.runtime.set_wait_timeout(SHORT);
    let failed = held.fault(tensors[1]).unwrap_err();
    assert_eq!(failed.code(), ErrorCode::TimedOut);
    assert!(failed.to_string().contains(WaitKind::Staging.word()), "{failed}");
    held.world.runtime.set_wait_timeout(Duration::MAX);
    let cancelled = cancelling(&held.world.runtime, || held.fault(tensors[1]).unwrap_err());
    assert_eq!(cancelled.code(), ErrorCode::Cancelled);
    set_wait_check(Some(Box::new(|| ControlFlow::Break(()))));
    assert_eq!(held.fault(tensors[1]).unwrap_err().code(), ErrorCode::Cancelled);
    set_wait_check(None);
    held.check_goes_on();
}

/// Runs `work` while another thread holds the only slot and the claim of `tensors[1]`.
fn beside_a_filling_thread(held: &Held, tensors: &[usize], work: impl FnOnce(&dyn Fn())) {
    held.fault(tensors[0]).unwrap();
    let context = held.world.runtime.device().context;
    let (waits, is_waiting) = mpsc::channel();
    let (ends, has_ended) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            held.world.sim.ctx_set_current(Some(context)).unwrap();
            set_wait_check(Some(Box::new(move || {
                let _ = waits.send(());
                ControlFlow::Continue(())
            })));
            let filled = held.fault(tensors[1]);
            let _ = ends.send(filled.is_ok());
        });
        is_waiting.recv_timeout(LONG).expect("the slot's copy is held");
        work(&|| {
            held.world.sim.release_stream(held.fill).unwrap();
            assert_eq!(has_ended.recv_timeout(Duration::from_secs(10)), Ok(true));
        });
    });
}

#[test]
fn a_slot_in_another_threads_hands_is_waited_for_with_the_ring_free() {
    let held = Held::new();
    let tensors = held.apart();
    beside_a_filling_thread(&held, &tensors, |let_go| {
        held.world.runtime.set_wait_timeout(SHORT);
        let failed = held.fault(tensors[2]).unwrap_err();
        assert_eq!(failed.code(), ErrorCode::TimedOut);
        assert!(failed.to_string().contains(WaitKind::Staging.word()), "{failed}");
        held.world.runtime.set_wait_timeout(Duration::MAX);
        // In the middle of a thread's wait the other one gives the slot back, for which it takes
        // the ring. Another tensor: the pages of the last are on their way out, which comes first.
        let asked = AtomicBool::new(false);
        let_go_during_a_wait(&held, tensors[3], let_go, &asked);
        assert!(asked.load(Ordering::Acquire), "nothing waited");
    });
    held.check_goes_on();
}

/// Faults a tensor; the first time that the thread is asked about its wait, it lets go first.
fn let_go_during_a_wait(held: &Held, tensor: usize, let_go: &dyn Fn(), asked: &AtomicBool) {
    // A check lives for ever, as far as the compiler knows; what it needs comes and goes by
    // channels with this thread, which waits in it.
    let (ask, asked_by_check) = mpsc::channel();
    let (answer, answered) = mpsc::channel();
    let context = held.world.runtime.device().context;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            held.world.sim.ctx_set_current(Some(context)).unwrap();
            let mut first = true;
            set_wait_check(Some(Box::new(move || {
                if std::mem::take(&mut first) {
                    let _ = ask.send(());
                    let _ = answered.recv_timeout(LONG);
                }
                ControlFlow::Continue(())
            })));
            held.fault(tensor).unwrap();
        });
        asked_by_check.recv_timeout(LONG).expect("the slot is in use");
        let_go();
        asked.store(true, Ordering::Release);
        let _ = answer.send(());
    });
}

#[test]
fn a_page_that_another_thread_fills_is_waited_for_no_longer_than_told() {
    let held = Held::new();
    let tensors = held.apart();
    beside_a_filling_thread(&held, &tensors, |let_go| {
        held.world.runtime.set_wait_timeout(SHORT);
        let failed = held.fault(tensors[1]).unwrap_err();
        assert_eq!(failed.code(), ErrorCode::TimedOut);
        assert!(failed.to_string().contains(WaitKind::Claim.word()), "{failed}");
        held.world.runtime.set_wait_timeout(Duration::MAX);
        set_wait_check(Some(Box::new(|| ControlFlow::Break(()))));
        assert_eq!(held.fault(tensors[1]).unwrap_err().code(), ErrorCode::Cancelled);
        set_wait_check(None);
        let_go();
        held.fault(tensors[1]).unwrap();
    });
    held.check_goes_on();
}

#[test]
fn a_copy_that_no_fence_covers_is_waited_for_no_longer_than_told() {
    let held = Held::new();
    let tensors = held.apart();
    held.world.runtime.set_wait_timeout(SHORT);
    held.world.sim.fail_always(Verb::EventRecord, DriverCode::INVALID_VALUE);
    let failed = held.fault(tensors[0]).unwrap_err();
    assert_eq!(failed.code(), ErrorCode::Driver);
    assert!(failed.to_string().contains("cuEventRecord"), "{failed}");
    held.world.sim.heal();
    // The copy is under way, in a slot that is not free before it is done.
    assert_eq!(held.fault(tensors[1]).unwrap_err().code(), ErrorCode::TimedOut);
    held.check_goes_on();
}
