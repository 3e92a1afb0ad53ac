//! Mutex and condition variable of a model: loom's, in the form of `lock`.
//!
//! A wait has no time-out here: whoever waits for a wake-up that never comes is a deadlock, which
//! loom reports, where the library would look again after its patience.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

/// Loom's mutex.
#[derive(Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

/// Has the lock until it is dropped; empty only while a condition variable has it.
pub(crate) struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

/// A thread of a model that panics ends it: nobody comes after.
const NOT_POISONED: &str = "a thread of the model panicked";

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    #[track_caller]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().expect(NOT_POISONED)))
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().expect(NOT_POISONED)
    }

    #[track_caller]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok().map(|guard| MutexGuard(Some(guard)))
    }

    #[track_caller]
    pub(crate) fn try_lock_for(&self, _patience: Duration) -> Option<MutexGuard<'_, T>> {
        Some(self.lock())
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("nobody waits with it")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("nobody waits with it")
    }
}

/// Loom's condition variable.
#[derive(Default)]
pub(crate) struct Condvar(loom::sync::Condvar);

impl Condvar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    #[track_caller]
    pub(crate) fn notify_one(&self) {
        self.0.notify_one();
    }

    #[track_caller]
    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }

    #[track_caller]
    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let held = guard.0.take().expect("nobody waits with it");
        guard.0 = Some(self.0.wait(held).expect(NOT_POISONED));
    }

    #[track_caller]
    pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _patience: Duration) {
        self.wait(guard);
    }
}

/// Runs a model in every order in which its threads interrupt one another at most so often; one
/// whose threads are few and short without such a bound.
#[cfg(test)]
pub(crate) fn model(interruptions: Option<usize>, run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = interruptions;
    let orders = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counted = std::sync::Arc::clone(&orders);
    builder.check(move || {
        counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        run();
    });
    println!("{} orders", orders.load(std::sync::atomic::Ordering::Relaxed));
}

/// Runs `work` in another thread of a model, on what its threads share.
#[cfg(test)]
pub(crate) fn spawn<S: 'static, R: 'static>(
    shared: &std::sync::Arc<S>,
    work: impl FnOnce(&S) -> R + 'static,
) -> loom::thread::JoinHandle<R> {
    let shared = std::sync::Arc::clone(shared);
    loom::thread::spawn(move || work(&shared))
}
