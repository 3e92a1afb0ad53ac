//! The child of a fork touches nothing of the driver, whatever it calls, and frees nothing.
#![expect(unsafe_code, reason = "fork and _exit, which std does not offer")]

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use vbar::driver::select::{self, Selection};
use vbar::driver::sim::{Sim, Verb};
use vbar::host::model_files::Model;
use vbar::host::spare::HostRoom;
use vbar::memory::pager::{HeldPins, Reclaim};
use vbar::model::synth::synthesize;
use vbar::options::Threads;
use vbar::{AllocationFault, ErrorCode, Fault, Runtime, RuntimeOptions, trace};

use crate::world::{DEVICE, P, ROOMY, World, budget_options, resident};

pub(crate) fn calls(sim: &Sim) -> u64 {
    Verb::ALL.iter().map(|verb| sim.calls(*verb)).sum()
}

/// Runs `child` in a forked process; whether it came back true. A child that hangs is ended.
pub(crate) fn in_child(child: impl FnOnce() -> bool) -> bool {
    match fork() {
        None => end_child(child),
        Some(child) => is_good(child),
    }
}

/// Forks in the middle of `work`, where it calls what it is given, which returns whether it is in
/// the child now. What `work` comes to there is looked at by `look`, with `count` as it was at the
/// fork and as it is then, and must be found good; in the parent it is returned.
#[track_caller]
pub(crate) fn forking<T>(
    work: impl FnOnce(Box<dyn FnOnce() -> bool>) -> T,
    count: impl Fn() -> u64 + Clone + 'static,
    look: impl FnOnce(T, u64, u64) -> bool,
) -> T {
    let (child, at_fork) = (Rc::new(Cell::new(Some(0))), Rc::new(Cell::new(0)));
    let (set_child, set_count, counted) = (Rc::clone(&child), Rc::clone(&at_fork), count.clone());
    let parent = std::process::id();
    let split = Box::new(move || {
        set_count.set(counted());
        set_child.set(fork());
        set_child.get().is_none()
    });
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(split)));
    if std::process::id() != parent {
        end_child(|| done.is_ok_and(|done| look(done, at_fork.get(), count())));
    }
    match child.get() {
        Some(0) | None => panic!("it did not fork"),
        Some(child) => assert!(is_good(child), "the child hung, or panicked, or was not told"),
    }
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The child of a fork in the parent, and nothing in the child, which is ended when it hangs.
fn fork() -> Option<libc::pid_t> {
    // SAFETY: the child calls only the code under test, which must hold up after a fork, and ends
    // with `_exit` without unwinding into the test harness.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    if pid == 0 {
        // SAFETY: asks for a signal, whose default is to end the process: this child only.
        unsafe { libc::alarm(30) };
    }
    (pid > 0).then_some(pid)
}

fn end_child(child: impl FnOnce() -> bool) -> ! {
    let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
    // SAFETY: ends the process at once, running nothing.
    unsafe { libc::_exit(i32::from(!good)) }
}

fn is_good(child: libc::pid_t) -> bool {
    let mut status = 0;
    // SAFETY: `child` is one of ours that was not waited for yet, `status` is writable.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    waited == child && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

#[test]
fn a_forked_child_calls_nothing_of_the_driver() {
    let world = World::budget(4);
    // Guards borrow; what they borrow lives for ever here, and its clones are dropped.
    let (vbar, other) = (&*Box::leak(Box::new(world.vbar(2))), world.vbar(2));
    let allocation = &*Box::leak(Box::new(other.allocate(P).unwrap()));
    let spare = other.allocate(P / 2).unwrap();
    let AllocationFault::Refill(fill) = allocation.fault(world.stream).unwrap() else {
        panic!("a refill is due");
    };
    let guard = resident(&world, vbar, 0..1);
    let token = resident(&world, vbar, 0..1).into_token();
    let (sim, driver) = (world.sim.clone(), world.sim.driver());
    let before = calls(&sim);
    let good = in_child(|| {
        let ending = |result: vbar::Result<()>| {
            result.is_err_and(|error| error.code() == ErrorCode::ProcessEnding)
        };
        let runtime = &world.runtime;
        let all = ending(vbar.fault(0..P, world.stream).map(drop))
            && ending(vbar.fault(P..2 * P, world.stream).map(drop))
            && ending(runtime.fault_many(&[(vbar, 0..P)], world.stream).map(drop))
            && ending(allocation.fault(world.stream).map(drop))
            && ending(fill.commit(world.stream).map(drop))
            && ending(guard.also_used_on(world.stream))
            && ending(vbar.free_memory(P).map(drop))
            && ending(vbar.set_watermark(1))
            && ending(vbar.end_of_run(world.stream, HeldPins::Release).map(drop))
            && ending(runtime.create_bar(P).map(drop))
            && ending(runtime.set_budget(None))
            && ending(runtime.set_headroom(P))
            && ending(runtime.refresh())
            && ending(runtime.trim(0).map(drop))
            && ending(runtime.free_memory(P).map(drop))
            && ending(runtime.retire_stream(world.stream))
            && ending(Runtime::open(driver, DEVICE, budget_options(1)).map(drop));
        let _ = runtime.unpin(token, world.stream);
        drop(guard);
        drop((spare, other, vbar.clone()));
        drop(world);
        all && calls(&sim) == before
    });
    assert!(good, "the child called the driver, or did not say that it may not");
}

struct Nobody;

impl Reclaim for Nobody {
    fn reclaim(&self, _: u32) -> u32 {
        0
    }
}

impl HostRoom for Nobody {
    fn allowed_bytes(&self, _: u64) -> u64 {
        0
    }
}

/// With debug assertions, as in tests, a lock that is touched in a child panics: in a program it
/// hangs where another thread of the parent had it, or waited for any lock, at the fork.
#[test]
fn a_forked_child_touches_no_lock() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    synthesize(&path, 16 * P, 3).unwrap();
    let options = RuntimeOptions { threads: Some(Threads::On), ..budget_options(8) };
    let world = World::with(ROOMY, options);
    let runtime = &world.runtime;
    let model = &*Box::leak(Box::new(runtime.open_model(&path).unwrap()));
    let vbar = &*Box::leak(Box::new(world.vbar(4)));
    let allocation = &*Box::leak(Box::new(world.vbar(2).allocate(P).unwrap()));
    let Ok(AllocationFault::Refill(fill)) = allocation.fault(world.stream) else {
        panic!("a refill is due");
    };
    let Ok(Fault::Resident(weight)) = model.fault(0, world.stream) else { panic!("it fits") };
    let (first, second) = (resident(&world, vbar, 0..1), resident(&world, vbar, 1..2));
    let token = resident(&world, vbar, 0..1).into_token();
    let spare = world.vbar(1);
    let good = in_child(|| {
        let _ = (runtime.statistics(), runtime.numbers(), runtime.engine_numbers());
        let _ = (runtime.budget_settings(), runtime.used_bytes(), runtime.threads());
        let _ = (runtime.is_valid(), runtime.wait_timeout());
        let _ = (vbar.marks(), vbar.residency(), vbar.draw(4), vbar.is_closed());
        runtime.set_wait_timeout(Duration::from_secs(1));
        runtime.cancel_waits();
        let nobody: Arc<dyn Reclaim> = Arc::new(Nobody);
        runtime.set_reclaim(&nobody);
        runtime.set_host_room(Arc::new(Nobody));
        let _ = trace::stop();
        allocation.invalidate();
        vbar.close();
        let _ = first.into_token();
        drop((second, weight, fill));
        let ending = |result: vbar::Result<()>| {
            result.is_err_and(|error| error.code() == ErrorCode::ProcessEnding)
        };
        ending(runtime.unpin(token, world.stream))
            && ending(runtime.set_threads(Threads::Off))
            && ending(runtime.trim(0).map(drop))
            && ending(runtime.trim_host(0).map(drop))
            && ending(runtime.trim_host_frames().map(drop))
            && ending(runtime.free_memory(P).map(drop))
            && ending(runtime.refresh())
            && ending(runtime.set_headroom(0))
            && ending(runtime.bind_model(Model::open(&path).unwrap()).map(drop))
            && ending(runtime.device().context_wait())
            && ending(runtime.device().enter().map(drop))
            && ending(model.fault(1, world.stream).map(drop))
            && ending(vbar.allocate(P).map(drop))
            && ending(vbar.prioritise())
            && ending(vbar.set_class(1))
            && ending(vbar.set_floor(1))
            && ending(vbar.free_memory(P).map(drop))
            && ending(spare.destroy_wait())
            && ending(trace::start(8))
            && ending(Runtime::opened(&world.sim.driver(), DEVICE).map(drop))
            && ending(select::open(&Selection::Auto).map(drop))
            && ending(select::open_shared(&Selection::Sim(world.sim.options().clone())).map(drop))
            && model.prefetch(0).is_ok()
            && model.schedule_hint(&[0, 1]).is_ok()
    });
    // The last handles, too.
    let good = good
        && in_child(|| {
            drop((model.vbar().clone(), vbar.clone(), world));
            true
        });
    assert!(good, "the child touched a lock, or did not say that it may do nothing");
}
