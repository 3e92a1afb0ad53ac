//! A check that forks while its thread waits: the child's call ends, and touches nothing.

use std::ops::ControlFlow;

use vbar::{ErrorCode, Result};

use super::staging::Held;
use super::{KINDS, LONG};
use crate::forked::{calls, forking};
use crate::world::World;

/// The call waits, and its check forks then. The child is told that it is one, by the call that it
/// is in, and no call of the driver and no lock of the library comes of that; in the parent the
/// call ends with `Cancelled`.
#[track_caller]
fn check_forked_in(world: &World, attempt: impl FnOnce() -> Result<()>) {
    let sim = world.sim.clone();
    world.runtime.set_wait_timeout(LONG);
    let in_parent = forking(
        // The parent's wait ends here, and the child's as it may.
        |fork| {
            let mut fork = Some(fork);
            vbar::set_wait_check(Some(Box::new(move || {
                match fork.take().is_some_and(|fork| fork()) {
                    true => ControlFlow::Continue(()),
                    false => ControlFlow::Break(()),
                }
            })));
            attempt()
        },
        move || calls(&sim),
        |ended, before, after| {
            let told = ended.is_err_and(|error| error.code() == ErrorCode::ProcessEnding);
            told && before == after
        },
    );
    vbar::set_wait_check(None);
    assert_eq!(in_parent.unwrap_err().code(), ErrorCode::Cancelled);
}

#[test]
fn a_child_forked_in_any_wait_is_told_and_touches_nothing() {
    for stuck in KINDS.map(|make| make()) {
        check_forked_in(&stuck.world, || (stuck.attempt)(&stuck.world));
        stuck.check_goes_on();
    }
}

#[test]
fn a_child_forked_while_it_fills_is_told_and_touches_nothing() {
    let held = Held::new();
    let tensors = held.apart();
    held.fault(tensors[0]).unwrap();
    check_forked_in(&held.world, || held.fault(tensors[1]));
    held.check_goes_on();
}
