//! Waits: each kind of them ends at its time-out, by another thread, and by the waiting thread's
//! own check, with no lock held and everything as before.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use vbar::driver::Driver;
use vbar::memory::pager::Shortfall;
use vbar::options::{Eviction, RuntimeOptions};
use vbar::outcome::WaitKind;
use vbar::units::Stream;
use vbar::{AllocationFault, Error, ErrorCode, Fault, Result, Runtime, Vbar, set_wait_check};

use crate::world::{P, ROOMY, World, budget_options, resident_on};

mod check;
mod closing;
mod context;
mod fork;
mod staging;

/// Long enough for every test, short enough to end one that fails.
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(20);

type Attempt = Box<dyn Fn(&World) -> Result<()>>;

/// A call that waits, and cannot go on until the streams are let go.
struct Stuck {
    world: World,
    held: Vec<Stream>,
    kind: WaitKind,
    attempt: Attempt,
}

fn done<T>(fault: Fault<T>) {
    if let Fault::Offloaded(reason) = fault {
        panic!("offloaded: {reason}");
    }
}

/// A page in use by a stream that is held; fences are recorded when told.
fn in_use(options: RuntimeOptions) -> (World, Vbar, Stream) {
    let world = World::with(ROOMY, RuntimeOptions { wait_timeout: LONG, ..options });
    let old = world.vbar(1);
    let held = world.another_stream();
    let guard = resident_on(&old, 0..1, held);
    world.sim.hold_stream(held).unwrap();
    world.write(guard.address(), P, 1, held);
    drop(guard);
    (world, old, held)
}

fn uncovered() -> RuntimeOptions {
    RuntimeOptions { record_interval: Duration::from_secs(1000), ..budget_options(1) }
}

/// A fault takes a frame whose use on another stream no fence covers.
fn stuck_on_context() -> Stuck {
    let (world, old, held) = in_use(uncovered());
    let (new, other) = (world.vbar(1), world.another_stream());
    let attempt = move |_: &World| {
        let _old = &old;
        new.fault(0..P, other).map(done)
    };
    Stuck { world, held: vec![held], kind: WaitKind::Context, attempt: Box::new(attempt) }
}

/// Memory is to be given back that is in use.
fn stuck_on_release() -> Stuck {
    let (world, old, held) = in_use(budget_options(1));
    let attempt = move |_: &World| match old.free_memory(P)?.shortfall {
        Some(Shortfall::TimedOut) => {
            Err(Error::new(ErrorCode::TimedOut, format!("{}, by its shortfall", WaitKind::Release)))
        }
        // After a failed attempt the page goes as soon as its reader is done.
        None | Some(Shortfall::NothingResident) => Ok(()),
        other => panic!("{other:?}"),
    };
    Stuck { world, held: vec![held], kind: WaitKind::Release, attempt: Box::new(attempt) }
}

/// A caller without a stream faults a page whose frame another page's reader still uses.
fn stuck_on_ready() -> Stuck {
    let (world, old, held) = in_use(budget_options(1));
    let new = world.vbar(1);
    drop(resident_on(&new, 0..1, world.stream));
    let attempt = move |_: &World| {
        let _old = &old;
        new.fault(0..P, Stream::NONE).map(done)
    };
    Stuck { world, held: vec![held], kind: WaitKind::Ready, attempt: Box::new(attempt) }
}

/// With strict eviction a page loses its mapping only after its reader is done.
fn stuck_on_frame() -> Stuck {
    let options = RuntimeOptions { eviction: Eviction::Strict, ..budget_options(1) };
    let (world, old, held) = in_use(options);
    let new = world.vbar(1);
    let attempt = move |world: &World| {
        let _old = &old;
        new.fault(0..P, world.stream).map(done)
    };
    Stuck { world, held: vec![held], kind: WaitKind::Frame, attempt: Box::new(attempt) }
}

/// A page is faulted whose frame went elsewhere while its old mapping is in use.
fn stuck_on_old_mapping() -> Stuck {
    let (world, old, held) = in_use(budget_options(1));
    let new = world.vbar(1);
    drop(resident_on(&new, 0..1, world.stream));
    old.set_watermark(1).unwrap();
    let attempt = move |world: &World| {
        let _new = &new;
        // When the wait is over the newer VBAR keeps its page, by its rank.
        old.fault(0..P, world.stream).map(drop)
    };
    Stuck { world, held: vec![held], kind: WaitKind::OldMapping, attempt: Box::new(attempt) }
}

/// Somebody else fills the allocation, and does not come to an end.
fn stuck_on_claim() -> Stuck {
    let world = World::with(ROOMY, RuntimeOptions { wait_timeout: LONG, ..budget_options(2) });
    let allocation = world.vbar(1).allocate(P).unwrap();
    // Guards borrow; what they borrow lives for ever here.
    let allocation: &'static _ = Box::leak(Box::new(allocation));
    let AllocationFault::Refill(fill) = allocation.fault(world.stream).unwrap() else {
        panic!("never written");
    };
    let fill = std::sync::Mutex::new(Some(fill));
    let attempt = move |world: &World| {
        // Stuck while nothing is held; the last attempt comes after the release.
        let streams = world.sim.stream_query(world.stream);
        if streams.is_ok() {
            drop(fill.lock().unwrap().take());
        }
        allocation.fault_wait(world.stream).map(drop)
    };
    let held = world.stream;
    world.sim.hold_stream(held).unwrap();
    world.sim.memset_d8_async(world.scratch(), 1, 8, held).unwrap();
    Stuck { world, held: vec![held], kind: WaitKind::Claim, attempt: Box::new(attempt) }
}

const KINDS: [fn() -> Stuck; 6] = [
    stuck_on_context,
    stuck_on_release,
    stuck_on_ready,
    stuck_on_frame,
    stuck_on_old_mapping,
    stuck_on_claim,
];

impl Stuck {
    #[track_caller]
    fn ends_with(&self, code: ErrorCode) {
        let error = (self.attempt)(&self.world).expect_err("the wait cannot succeed");
        assert_eq!(error.code(), code, "{error}");
        assert!(error.to_string().contains(self.kind.word()), "{}: {error}", self.kind);
        let waited = self.world.runtime.statistics().waited(self.kind);
        assert!(waited.count > 0, "the wait for {} was not counted", self.kind);
    }

    /// Lets the streams go: the call succeeds, and nothing was lost by its failing before.
    #[track_caller]
    fn check_goes_on(self) {
        let Self { world, held, attempt, .. } = self;
        held.iter().for_each(|stream| world.sim.release_stream(*stream).unwrap());
        world.sim.ctx_synchronize().unwrap();
        attempt(&world).expect("nothing is in the way");
        world.check();
    }
}

#[test]
fn every_wait_ends_at_its_time_out() {
    for stuck in KINDS.map(|make| make()) {
        stuck.world.runtime.set_wait_timeout(SHORT);
        stuck.ends_with(ErrorCode::TimedOut);
        stuck.world.runtime.set_wait_timeout(LONG);
        stuck.check_goes_on();
    }
}

#[test]
fn with_no_time_a_call_asks_once() {
    for stuck in KINDS.map(|make| make()) {
        stuck.world.runtime.set_wait_timeout(Duration::ZERO);
        stuck.ends_with(ErrorCode::TimedOut);
        // What needs no waiting needs no time.
        stuck.check_goes_on();
    }
}

/// Cancels the runtime's waits again and again until `work` is done.
fn cancelling<T>(runtime: &Runtime, work: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                runtime.cancel_waits();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        over.store(true, Ordering::Release);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

#[test]
fn every_wait_is_cancelled_by_another_thread() {
    for stuck in KINDS.map(|make| make()) {
        stuck.world.runtime.set_wait_timeout(Duration::MAX);
        cancelling(&stuck.world.runtime, || stuck.ends_with(ErrorCode::Cancelled));
        stuck.check_goes_on();
    }
}

/// Whether another thread gets through calls that take each lock of the runtime.
fn locks_are_free(runtime: &Runtime, vbar: &Vbar) -> bool {
    let (runtime, vbar) = (runtime.clone(), vbar.clone());
    let (sender, answer) = mpsc::channel();
    std::thread::spawn(move || {
        let free = runtime.is_valid() && runtime.numbers().bars > 0;
        runtime.trim(u64::MAX).unwrap();
        runtime.set_threads(runtime.threads()).unwrap();
        drop(Runtime::opened(&runtime.device().driver, runtime.ordinal()).unwrap());
        vbar.set_watermark(1).unwrap();
        let _ = sender.send(free);
    });
    answer.recv_timeout(Duration::from_secs(10)).unwrap_or(false)
}

#[test]
fn every_wait_is_cancelled_by_the_waiting_thread_with_no_lock_held() {
    for stuck in KINDS.map(|make| make()) {
        stuck.world.runtime.set_wait_timeout(Duration::MAX);
        let (runtime, vbar) = (stuck.world.runtime.clone(), stuck.world.vbar(1));
        let free = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&free);
        let before = set_wait_check(Some(Box::new(move || {
            seen.store(locks_are_free(&runtime, &vbar), Ordering::Release);
            ControlFlow::Break(())
        })));
        assert!(before.is_none());
        stuck.ends_with(ErrorCode::Cancelled);
        assert!(free.load(Ordering::Acquire), "{}: a lock was held meanwhile", stuck.kind);
        assert!(set_wait_check(None).is_some());
        stuck.check_goes_on();
    }
}

#[test]
fn a_time_out_is_for_waits_that_start_later() {
    let stuck = stuck_on_context();
    let runtime = &stuck.world.runtime;
    for timeout in [Duration::ZERO, SHORT, Duration::from_secs(1 << 40), Duration::MAX] {
        runtime.set_wait_timeout(timeout);
        let longest = Duration::from_nanos(u64::MAX);
        assert_eq!(runtime.wait_timeout(), timeout.min(longest));
    }
    // Under way for as long as there is time, the wait does not see that later ones have none.
    let asked = AtomicU64::new(0);
    let asked: &'static AtomicU64 = Box::leak(Box::new(asked));
    let shorten = runtime.clone();
    set_wait_check(Some(Box::new(move || {
        shorten.set_wait_timeout(Duration::ZERO);
        match asked.fetch_add(1, Ordering::Relaxed) {
            0..4 => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        }
    })));
    stuck.ends_with(ErrorCode::Cancelled);
    set_wait_check(None);
    stuck.ends_with(ErrorCode::TimedOut);
    assert_eq!(asked.load(Ordering::Relaxed), 5);
    stuck.check_goes_on();
}
