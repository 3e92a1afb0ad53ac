//! Locks and atomics behind one façade, so that a model checker can stand in for them, and the
//! fences and waits that are built on them.

pub mod clock;
pub mod context;
pub mod device;
pub mod fence;
mod lock;
pub mod ticket;
pub mod wait;

pub(crate) use lock::{Condvar, Mutex, MutexGuard};
pub(crate) use parking_lot::Once;
pub(crate) use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, Ordering, Ordering::AcqRel, Ordering::Acquire,
    Ordering::Relaxed, Ordering::Release,
};
