//! The child of a fork touches nothing of the driver, whatever it calls, and frees nothing.
#![expect(unsafe_code, reason = "fork and _exit, which std does not offer")]

use vbar::driver::sim::{Sim, Verb};
use vbar::memory::pager::HeldPins;
use vbar::{AllocationFault, ErrorCode, Runtime};

use crate::world::{DEVICE, P, World, budget_options, resident};

fn calls(sim: &Sim) -> u64 {
    Verb::ALL.iter().map(|verb| sim.calls(*verb)).sum()
}

/// Runs `child` in a forked process; whether it came back true. A child that hangs is ended.
pub(crate) fn in_child(child: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child calls only the code under test, which must hold up after a fork, and ends
    // with `_exit` without unwinding into the test harness.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    if pid == 0 {
        // SAFETY: asks for a signal, whose default is to end the process: this child only.
        unsafe { libc::alarm(30) };
        let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
        // SAFETY: ends the process at once, running nothing.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = 0;
    // SAFETY: `pid` is a child of ours that was not waited for yet, `status` is writable.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    waited == pid && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
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
