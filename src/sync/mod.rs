//! Locks and atomics behind one façade, so that a model checker can stand in for them, and the
//! fences and waits that are built on them.
//!
//! With `--cfg vbar_loom`, which only `make loom` sets and only for the crate's own tests, the
//! names below are loom's, and what uses them is run in every order that its threads can take, in
//! larger models with a few interruptions at most (the `every_order` modules). Without it they are
//! the standard library's and parking_lot's.

mod cell;
pub mod clock;
pub mod context;
pub mod device;
pub mod fence;
mod lock;
#[cfg(vbar_loom)]
mod loomed;
pub mod ticket;
pub mod wait;

pub(crate) use std::sync::atomic::{
    Ordering, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

#[cfg(not(vbar_loom))]
pub(crate) use parking_lot::Once;

#[cfg(not(vbar_loom))]
pub(crate) use {
    cell::UnsafeCell,
    fixed::{AtomicBool, AtomicU32, AtomicU64, Condvar, Mutex, MutexGuard},
    std::{sync::atomic::fence as memory_fence, thread::yield_now},
};

#[cfg(vbar_loom)]
pub(crate) use {
    loom::{
        cell::UnsafeCell,
        sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence as memory_fence},
        thread::yield_now,
    },
    loomed::{Condvar, Mutex},
};

#[cfg(all(test, vbar_loom))]
pub(crate) use loomed::{model, spawn};

/// Raises a number to `to` where it is less; whoever reads it then sees what came before. By
/// exchanges: ThreadSanitizer sees no `fetch_max`, and what that orders would look like no order.
#[inline]
pub(crate) fn raise(number: &AtomicU64, to: u64) {
    // Written where it is as large, too: that orders as `fetch_max` does.
    let _before = number.fetch_update(AcqRel, Acquire, |now| Some(now.max(to)));
}

/// The same without a stand-in: for statics, which outlive the runs of a model, and for numbers
/// that no other memory is ordered by.
pub(crate) mod fixed {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

    pub(crate) use super::lock::Mutex;
    #[cfg(not(vbar_loom))]
    pub(crate) use super::lock::{Condvar, MutexGuard};
}
