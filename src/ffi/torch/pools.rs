//! Which graph pool a request is for: asked of PyTorch's filters, before the allocator is.
//!
//! A filter is C++ and may throw (it asks CUDA about the stream), which no `catch_unwind` may see.
//! So the entries ask here first, outside of theirs, and the filter that the allocator is given
//! only reads the answer, which the thread keeps for the length of the call. Filters are asked one
//! at a time, under the lock that also ends them: what they captured dies when the end returns, as
//! it is with PyTorch's own allocator, whose lock is held as well.

use std::cell::Cell;

use super::callable::Callable;
use crate::process;
use crate::sync::{AtomicU32, Mutex, Ordering};
use crate::torch::{PoolFilter, PoolId};
use crate::units::Stream;

/// A pool of a device, by the device's ordinal.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Pool {
    pub(super) device: i32,
    pub(super) id: PoolId,
}

/// A pool that was begun and not released as often.
struct Known {
    pool: Pool,
    /// Times begun less times released.
    uses: u32,
    /// While requests may go to it.
    filter: Option<Callable>,
}

/// In the order of their last beginning.
static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());
/// Of those, the ones that have a filter.
static OPEN: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static CHOSEN: Cell<Option<PoolId>> = const { Cell::new(None) };
}

/// The pool that a request is for. What a filter throws leaves this by unwinding.
#[inline]
pub(super) fn choose(device: i32, stream: Stream) -> Option<PoolId> {
    match OPEN.load(Ordering::Acquire) {
        0 => None,
        _ => ask_filters(device, stream),
    }
}

#[cold]
fn ask_filters(device: i32, stream: Stream) -> Option<PoolId> {
    let _entering = process::entering();
    let known = KNOWN.lock();
    // The one that was begun last is the innermost.
    let open = known.iter().rev().filter(|known| known.pool.device == device);
    for known in open {
        if let Some(filter) = &known.filter
            && filter.admits(stream)
        {
            return Some(known.pool.id);
        }
    }
    None
}

/// Runs a request of the allocator's for the pool that was chosen.
#[inline]
pub(super) fn with_chosen<T>(chosen: Option<PoolId>, request: impl FnOnce() -> T) -> T {
    if chosen.is_none() {
        return request();
    }
    /// Ends the choice, also when the request panics.
    struct Scope;
    impl Drop for Scope {
        fn drop(&mut self) {
            CHOSEN.set(None);
        }
    }
    CHOSEN.set(chosen);
    let _scope = Scope;
    request()
}

/// What the allocator asks: whether the request under way on this thread is for the pool.
pub(super) fn filter_of(id: PoolId) -> PoolFilter {
    Box::new(move |_| CHOSEN.get() == Some(id))
}

/// Opens a pool for what the filter admits. Gives the filter back when the pool is open already.
pub(super) fn begin(pool: Pool, filter: Callable) -> std::result::Result<(), Callable> {
    let _entering = process::entering();
    let mut known = KNOWN.lock();
    let at = known.iter().position(|known| known.pool == pool);
    let uses = match at.map(|at| &known[at]) {
        Some(Known { filter: Some(_), .. }) => return Err(filter),
        Some(Known { uses, .. }) => *uses,
        None => 0,
    };
    if let Some(at) = at {
        known.remove(at);
    }
    known.push(Known { pool, uses: uses + 1, filter: Some(filter) });
    OPEN.fetch_add(1, Ordering::Release);
    Ok(())
}

/// Closes a pool: no filter is asked for it any more. Returns whether it was open.
pub(super) fn end(pool: Pool) -> bool {
    let _entering = process::entering();
    let mut known = KNOWN.lock();
    let filter = known.iter_mut().find(|known| known.pool == pool);
    let filter = filter.and_then(|known| known.filter.take());
    // Its destructor is the program's.
    drop(known);
    closed(filter)
}

/// What a release came to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Released {
    /// The pool was begun less often.
    Unknown,
    /// It is closed, or others use it.
    WasClosed,
    /// Nobody uses it any more, and it had not been ended: a capture failed half-way.
    WasOpen,
}

/// Counts a release; the last one closes the pool as [`end`] does, if that never came.
pub(super) fn release(pool: Pool) -> Released {
    let _entering = process::entering();
    let mut known = KNOWN.lock();
    let Some(at) = known.iter().position(|known| known.pool == pool) else {
        return Released::Unknown;
    };
    known[at].uses -= 1;
    let filter = if known[at].uses == 0 { known.remove(at).filter } else { None };
    drop(known);
    if closed(filter) { Released::WasOpen } else { Released::WasClosed }
}

fn closed(filter: Option<Callable>) -> bool {
    if filter.is_some() {
        OPEN.fetch_sub(1, Ordering::Release);
    }
    filter.is_some()
}
