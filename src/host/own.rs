//! Where the page-locked ranges that are the library's own begin: a program may end the lock of
//! any other, but not of these, which copies of the library's may be under way from.
//!
//! Knows the starts and nothing more: whoever locks a range tells of it, and owns it.

use std::collections::BTreeSet;
use std::ptr::NonNull;

use crate::sync::fixed::Mutex;

static STARTS: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// A range is page-locked, and the library's.
pub(crate) fn enter(start: NonNull<u8>) {
    STARTS.lock().insert(start.addr().get());
}

/// It is about to be given back: others may have the address once it was.
pub(crate) fn leave(start: NonNull<u8>) {
    STARTS.lock().remove(&start.addr().get());
}

/// Whether a range of the library's begins there.
pub(crate) fn begins_at(start: NonNull<u8>) -> bool {
    STARTS.lock().contains(&start.addr().get())
}
