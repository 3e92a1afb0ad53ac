//! A snapshot of everything that is counted.

use crate::copy::engine::EngineNumbers;
use crate::copy::fill::LockedBytes;
use crate::counters::{SourceBytes, WaitCount, Waiter};
use crate::memory::pager::{MemoryNumbers, Pager};
use crate::outcome::{Reason, WaitKind};
use crate::sync::Ordering;

/// Numbers of one runtime. Those of `memory` were taken together; counts only ever grow.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Statistics {
    /// Memory now.
    pub memory: MemoryNumbers,
    /// Page-locked host bytes held, registered file pages among them.
    pub locked_bytes: u64,
    /// The same by what holds them.
    pub locked: LockedBytes,
    /// Faults that found every page resident.
    pub hits: u64,
    /// Faults that had to map or fill a page.
    pub misses: u64,
    /// Pages that got a frame, be it one of the host.
    pub pages_mapped: u64,
    /// Of those, pages that were fetched before a fault asked for them.
    pub pages_ahead: u64,
    /// Pages that lost their frame.
    pub pages_evicted: u64,
    /// Of those, pages whose frame was at its next page before its users had passed.
    pub pages_aliased: u64,
    /// Bytes copied to the device by fills.
    pub bytes_filled: u64,
    /// Where they came from.
    pub sources: SourceBytes,
    /// Driver calls tried again after a transient code.
    pub driver_retries: u64,
    /// With [`Poison::On`](crate::options::Poison): pages that were evicted and got no poison, and
    /// attempts to make it that failed.
    pub poison_failures: u64,
    /// Refusals by reason, those with none left out.
    pub refusals: Vec<(Reason, u64)>,
    /// Waits of the program's threads in calls, by kind, those with none left out.
    pub waits: Vec<(WaitKind, WaitCount)>,
    /// Waits of the library's own threads likewise. `Register` among them stops launches of all.
    pub library_waits: Vec<(WaitKind, WaitCount)>,
    /// What the streaming engine knows and does now; all 0 without threads.
    pub engine: EngineNumbers,
}

impl Statistics {
    pub(super) fn of(pager: &Pager, engine: EngineNumbers) -> Self {
        let counters = &pager.device.counters;
        let load = |counter: &crate::sync::AtomicU64| counter.load(Ordering::Relaxed);
        let refusals = Reason::ALL.iter().map(|reason| (*reason, counters.refusals(*reason)));
        let waits = |waiter| {
            let waits =
                WaitKind::ALL.iter().map(move |kind| (*kind, counters.waits(*kind, waiter)));
            waits.filter(|(_, wait)| wait.count > 0).collect()
        };
        let locked = pager.locked();
        Self {
            memory: pager.numbers(),
            locked_bytes: locked.sum(),
            locked,
            hits: counters.hits.sum(),
            misses: load(&counters.misses),
            pages_mapped: load(&counters.pages_mapped),
            pages_ahead: load(&counters.pages_ahead),
            pages_evicted: load(&counters.pages_evicted),
            pages_aliased: load(&counters.pages_aliased),
            bytes_filled: load(&counters.bytes_filled),
            sources: counters.sources.bytes(),
            driver_retries: load(&counters.driver_retries),
            poison_failures: load(&counters.poison_failures),
            refusals: refusals.filter(|(_, count)| *count > 0).collect(),
            waits: waits(Waiter::Program),
            library_waits: waits(Waiter::Library),
            engine,
        }
    }

    /// Refusals for one reason.
    #[must_use]
    pub fn refused(&self, reason: Reason) -> u64 {
        self.refusals.iter().find(|(of, _)| *of == reason).map_or(0, |(_, count)| *count)
    }

    /// Waits of the program's threads of one kind.
    #[must_use]
    pub fn waited(&self, kind: WaitKind) -> WaitCount {
        find(&self.waits, kind)
    }

    /// Waits of the library's own threads of one kind.
    #[must_use]
    pub fn library_waited(&self, kind: WaitKind) -> WaitCount {
        find(&self.library_waits, kind)
    }
}

fn find(waits: &[(WaitKind, WaitCount)], kind: WaitKind) -> WaitCount {
    let found = waits.iter().find(|(of, _)| *of == kind);
    found.map_or_else(WaitCount::default, |(_, wait)| *wait)
}
