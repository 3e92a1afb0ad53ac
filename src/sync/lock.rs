//! The library's mutex and condition variable: parking_lot's, which nobody touches in the child of
//! a fork.
//!
//! The child has copies of locks that threads of its parent held, and of the table through which
//! every lock of the process parks and wakes threads, whose parts may be locked too: then even to
//! give a lock back that was free waits for ever. So whoever can be called in a child asks
//! [`process::ending`] before it comes here. Builds with debug assertions check that: a hang that
//! needs another thread at the right moment is a panic each time.

use std::time::Duration;

pub(crate) use parking_lot::MutexGuard;

use crate::process;

/// See the module's text.
#[derive(Default)]
pub(crate) struct Mutex<T>(parking_lot::Mutex<T>);

impl<T> Mutex<T> {
    /// A mutex that nobody holds.
    pub(crate) const fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }

    /// Waits for it.
    #[inline]
    #[track_caller]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        check_not_forked();
        self.0.lock()
    }

    /// The value, of one that nobody else can reach.
    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }

    /// Takes it if nobody has it.
    #[inline]
    #[track_caller]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        check_not_forked();
        self.0.try_lock()
    }

    /// Waits for it, though not longer than that.
    #[track_caller]
    pub(crate) fn try_lock_for(&self, patience: Duration) -> Option<MutexGuard<'_, T>> {
        check_not_forked();
        self.0.try_lock_for(patience)
    }
}

/// See the module's text. Whoever waits has a guard, which the child cannot have got.
#[derive(Default)]
pub(crate) struct Condvar(parking_lot::Condvar);

impl Condvar {
    /// One that nobody waits for.
    pub(crate) const fn new() -> Self {
        Self(parking_lot::Condvar::new())
    }

    /// Wakes one who waits.
    #[track_caller]
    pub(crate) fn notify_one(&self) {
        check_not_forked();
        self.0.notify_one();
    }

    /// Wakes all who wait.
    #[track_caller]
    pub(crate) fn notify_all(&self) {
        check_not_forked();
        self.0.notify_all();
    }

    /// Gives the lock back until it is woken.
    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.0.wait(guard);
    }

    /// As [`Condvar::wait`], though not longer than that.
    pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, patience: Duration) {
        self.0.wait_for(guard, patience);
    }
}

#[inline]
#[track_caller]
fn check_not_forked() {
    debug_assert!(!process::is_forked(), "a forked child touches a lock");
}
