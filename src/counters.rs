//! Counts of what happened, cheap enough for the hit path.
//!
//! Hits are counted in cells of a thread each, a cache line apart, so that threads do not slow one
//! another; everything rarer is a plain atomic. Reading sums; numbers only ever grow.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::outcome::{Reason, WaitKind};
use crate::slots::Thread;
use crate::slots::thread::{OWNED, SHARED};

#[repr(align(128))]
#[derive(Default)]
struct Cacheline(AtomicU64);

/// A counter that many threads raise without touching one another's cache lines.
pub struct Sharded {
    cells: Box<[Cacheline]>,
}

impl Default for Sharded {
    fn default() -> Self {
        Self { cells: (0..OWNED + SHARED).map(|_| Cacheline::default()).collect() }
    }
}

impl Sharded {
    /// One more, counted for the calling thread.
    #[inline(always)]
    pub fn raise(&self, thread: &Thread) {
        let number = thread.number();
        let cell = &self.cells[number].0;
        if number < OWNED {
            // This thread's own: a load and a store are enough, and 5 ns cheaper.
            cell.store(cell.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        } else {
            cell.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The sum over all threads.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.cells.iter().map(|cell| cell.0.load(Ordering::Relaxed)).sum()
    }
}

/// Whose thread waited.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Waiter {
    /// The program's, in a call: this time the program lost.
    Program = 0,
    /// The library's own: nobody waited for it.
    Library = 1,
}

/// How often and how long, for one kind of wait.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct WaitCount {
    /// Waits.
    pub count: u64,
    /// Their time together.
    pub total: Duration,
}

/// Bytes that fills took from each source.
#[derive(Default)]
pub struct Sources {
    /// Page-locked memory that held them from an earlier fill.
    pub locked_cache: AtomicU64,
    /// Registered pages of the page cache.
    pub registered: AtomicU64,
    /// The page cache: reads that did not have to wait.
    pub page_cache: AtomicU64,
    /// The disk, through the page cache or past it.
    pub disk: AtomicU64,
    /// Those of the disk that went past the page cache.
    pub direct: AtomicU64,
    /// Page-locked memory of the program's own.
    pub host_locked: AtomicU64,
    /// Other memory of the program's own.
    pub host_pageable: AtomicU64,
}

/// A reading of [`Sources`], in bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct SourceBytes {
    /// Copied from the page-locked cache: nothing was read for them.
    pub locked_cache_bytes: u64,
    /// Copied from registered pages of the page cache.
    pub registered_bytes: u64,
    /// Read from the page cache, without waiting.
    pub page_cache_bytes: u64,
    /// Read from the disk.
    pub disk_bytes: u64,
    /// Of `disk_bytes`, those that went past the page cache.
    pub direct_bytes: u64,
    /// Copied from page-locked memory of the program that a VBAR is bound to: the device read them
    /// where they are.
    pub host_locked_bytes: u64,
    /// Read from other memory of the program that a VBAR is bound to.
    pub host_pageable_bytes: u64,
}

impl SourceBytes {
    /// What came after an earlier reading of the same counts.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            locked_cache_bytes: self.locked_cache_bytes - before.locked_cache_bytes,
            registered_bytes: self.registered_bytes - before.registered_bytes,
            page_cache_bytes: self.page_cache_bytes - before.page_cache_bytes,
            disk_bytes: self.disk_bytes - before.disk_bytes,
            direct_bytes: self.direct_bytes - before.direct_bytes,
            host_locked_bytes: self.host_locked_bytes - before.host_locked_bytes,
            host_pageable_bytes: self.host_pageable_bytes - before.host_pageable_bytes,
        }
    }
}

impl Sources {
    /// The bytes so far.
    #[must_use]
    pub fn bytes(&self) -> SourceBytes {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        SourceBytes {
            locked_cache_bytes: load(&self.locked_cache),
            registered_bytes: load(&self.registered),
            page_cache_bytes: load(&self.page_cache),
            disk_bytes: load(&self.disk),
            direct_bytes: load(&self.direct),
            host_locked_bytes: load(&self.host_locked),
            host_pageable_bytes: load(&self.host_pageable),
        }
    }
}

/// The counters of one runtime.
#[derive(Default)]
pub struct Counters {
    /// Faults that found every page resident.
    pub hits: Sharded,
    /// Faults that had to map or fill a page.
    pub misses: AtomicU64,
    /// Pages that got a frame.
    pub pages_mapped: AtomicU64,
    /// Of those, pages of the device's memory that are no allocator's.
    pub weights_mapped: Arc<AtomicU64>,
    /// Of those, pages that were fetched before a fault asked for them.
    pub pages_ahead: AtomicU64,
    /// Pages that lost their frame.
    pub pages_evicted: AtomicU64,
    /// Evictions whose frame was mapped at its next address before it left the last one.
    pub pages_aliased: AtomicU64,
    /// Bytes copied to the device by fills.
    pub bytes_filled: AtomicU64,
    /// Where they came from.
    pub sources: Sources,
    /// Driver calls that were tried again after a transient code.
    pub driver_retries: AtomicU64,
    /// Pages that were evicted and got no poison, though the mode is on, and attempts to make it
    /// that failed.
    pub poison_failures: AtomicU64,
    refusals: [AtomicU64; Reason::ALL.len()],
    waits: [[(AtomicU64, AtomicU64); WaitKind::ALL.len()]; 2],
}

impl Counters {
    /// Counts a refusal.
    pub fn refuse(&self, reason: Reason) {
        self.refusals[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a wait and its time.
    pub fn wait(&self, kind: WaitKind, time: Duration, waiter: Waiter) {
        let (count, nanos) = &self.waits[waiter as usize][kind as usize];
        count.fetch_add(1, Ordering::Relaxed);
        nanos.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Refusals for `reason` so far.
    #[must_use]
    pub fn refusals(&self, reason: Reason) -> u64 {
        self.refusals[reason as usize].load(Ordering::Relaxed)
    }

    /// Waits of `kind` so far.
    #[must_use]
    pub fn waits(&self, kind: WaitKind, waiter: Waiter) -> WaitCount {
        let (count, nanos) = &self.waits[waiter as usize][kind as usize];
        WaitCount {
            count: count.load(Ordering::Relaxed),
            total: Duration::from_nanos(nanos.load(Ordering::Relaxed)),
        }
    }
}

/// Adds to a plain counter.
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slots::thread;

    #[test]
    fn every_thread_is_counted_however_many_there_were() {
        let counter = Sharded::default();
        for _ in 0..3 {
            std::thread::scope(|scope| {
                for _ in 0..OWNED {
                    scope.spawn(|| {
                        (0..100).for_each(|_| thread::with(|thread| counter.raise(thread)))
                    });
                }
            });
        }
        assert_eq!(counter.sum(), 3 * 100 * OWNED as u64);
    }
}
