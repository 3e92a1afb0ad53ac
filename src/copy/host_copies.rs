//! Copies that the device makes from the program's own memory, and who keeps that memory alive.
//!
//! Owns a lease of each memory that was copied from, with the fences of the copies that are not
//! known to be done. When a VBAR is gone ([`HostCopies::retire`]) its memories go with their last
//! fences, in passing ([`HostCopies::sweep`]). No last lease is dropped with the lock held: the
//! memory's owner is the program's code.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::host::bound::Bound;
use crate::host::memory::{HostLease, HostMemory};
use crate::sync::device::Device;
use crate::sync::fence::Cover;
use crate::sync::ticket::Ticket;
use crate::sync::{AtomicBool, Mutex, Relaxed};

/// See the module's text.
#[derive(Default)]
pub(super) struct HostCopies {
    state: Mutex<State>,
    /// Whether leases are leaving: all that is looked at while none are.
    leaving: AtomicBool,
}

#[derive(Default)]
struct State {
    /// Memories of VBARs that are there, by key.
    held: BTreeMap<usize, Held>,
    /// Memories that nobody begins to read, and that fills under way may still have.
    parting: Vec<(u32, Arc<HostMemory>)>,
    /// Memories that nobody gets a lease of any more.
    leaving: Vec<Held>,
}

struct Held {
    bar: u32,
    lease: HostLease,
    /// The last copies' fences, one of each slot.
    fences: Vec<Ticket>,
}

impl Held {
    fn new(bar: u32, lease: HostLease) -> Self {
        Self { bar, lease, fences: Vec::new() }
    }

    fn note(&mut self, ticket: Ticket) {
        let same = self.fences.iter_mut().find(|fence| fence.slot() == ticket.slot());
        match same {
            // Another thread's later fence may have been noted first.
            Some(fence) if fence.sequence() >= ticket.sequence() => {}
            Some(fence) => *fence = ticket,
            None => self.fences.push(ticket),
        }
    }

    /// Whether nobody reads the memory any more: no copy does, and no thread.
    fn is_done(&self, device: &Device) -> bool {
        let passed = |fence: &Ticket| matches!(device.fences.cover(*fence), Ok(Cover::Passed));
        self.lease.is_last() && self.fences.iter().all(passed)
    }
}

impl HostCopies {
    /// Keeps a memory of a VBAR until `ticket` has passed, and as long as the VBAR is there.
    pub(super) fn note(&self, bar: u32, memory: &HostMemory, lease: HostLease, ticket: Ticket) {
        let mut state = self.state.lock();
        let key = lease.key();
        if memory.is_given_up() {
            // A copy that outlived its VBAR.
            match state.leaving.iter_mut().find(|held| held.lease.key() == key) {
                Some(held) => held.note(ticket),
                None => {
                    state.leaving.push(Held { bar, lease, fences: vec![ticket] });
                    self.leaving.store(true, Relaxed);
                }
            }
        } else {
            state.held.entry(key).or_insert_with(|| Held::new(bar, lease)).note(ticket);
        }
    }

    /// The VBAR is gone, nothing is copied to it from now on: its memories go when the copies and
    /// reads that are under way are done.
    pub(super) fn retire(&self, bar: u32, bound: &Bound) {
        let mut state = self.state.lock();
        for memory in bound.memories() {
            self.let_go(&mut state, bar, memory);
        }
    }

    fn let_go(&self, state: &mut State, bar: u32, memory: &HostMemory) {
        // Under the lock: a copy that is noted later finds the memory given up.
        let Some(own) = memory.end_leases() else { return };
        // Its own lease is no longer needed where there is one with fences.
        let held = state.held.remove(&own.key()).unwrap_or_else(|| Held::new(bar, own));
        state.leaving.push(held);
        self.leaving.store(true, Relaxed);
    }

    /// No fill begins to read this memory from now on; the VBAR may be there for long.
    pub(super) fn part(&self, bar: u32, memory: Arc<HostMemory>) {
        self.state.lock().parting.push((bar, memory));
        self.leaving.store(true, Relaxed);
    }

    /// The fences of all copies to and from a memory that are known.
    pub(super) fn fences_of(&self, memory: &HostMemory) -> Vec<Ticket> {
        let Ok(lease) = memory.lease() else { return Vec::new() };
        let state = self.state.lock();
        state.held.get(&lease.key()).map_or_else(Vec::new, |held| held.fences.clone())
    }

    /// Drops the leases of retired memories that nobody reads any more, and so their owners.
    pub(super) fn sweep(&self, device: &Device) {
        if !self.leaving.load(Relaxed) {
            return;
        }
        let mut state = self.state.lock();
        // What fills under way still have they may read yet.
        let parting = std::mem::take(&mut state.parting);
        let (free, kept): (Vec<_>, Vec<_>) =
            parting.into_iter().partition(|(_, memory)| Arc::strong_count(memory) == 1);
        free.iter().for_each(|(bar, memory)| self.let_go(&mut state, *bar, memory));
        state.parting = kept;
        let all = std::mem::take(&mut state.leaving);
        let (done, pending): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|held| held.is_done(device));
        self.leaving.store(!(pending.is_empty() && state.parting.is_empty()), Relaxed);
        state.leaving = pending;
        drop(state);
        drop((done, free));
    }

    /// Whether memory of a VBAR that is gone is still read, as far as is known.
    pub(super) fn is_leaving(&self, bar: u32) -> bool {
        self.leaving.load(Relaxed) && self.state.lock().leaving.iter().any(|held| held.bar == bar)
    }

    /// Ends all leases: nothing is copied any more.
    pub(super) fn end(&self) {
        let state = std::mem::take(&mut *self.state.lock());
        drop(state);
    }

    /// Leaves all memory for good: the device may read it at any time.
    pub(super) fn leak(&self) {
        std::mem::forget(std::mem::take(&mut *self.state.lock()));
    }
}
