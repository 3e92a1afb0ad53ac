//! The page-locked cache: bytes of streamed pages that stay where the device reads them at once.
//!
//! Owns the windows, each as long as a slot of the ring, and which span of which VBAR each holds. A
//! window is lent to one fill at a time and comes back with the ticket of its last copy; it is
//! filled anew, or given back to the system, only when that has passed. What is forgotten waits,
//! registered, for the next span. Registering and unregistering stop launches: nothing here does
//! either; whoever takes windows out does it where nobody is in a hurry.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::host::locked::{self, LockedSlot};
use crate::host::room::LockedRoom;
use crate::process;
use crate::sync::device::Device;
use crate::sync::fence::Cover;
use crate::sync::ticket::Ticket;
use crate::sync::{AtomicBool, Mutex, Relaxed};

/// A window that nothing was put into for so long is not needed.
const IDLE_TIME: Duration = Duration::from_secs(1);

/// Which bytes: a VBAR, and which of its slots' worths from the start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Key {
    pub(super) bar: u32,
    pub(super) part: u64,
}

/// See the module's text.
pub(super) struct Cache {
    device: Arc<Device>,
    room: Arc<LockedRoom>,
    window_bytes: usize,
    state: Mutex<State>,
    /// The driver refused to register memory: there are no new windows any more.
    refused: AtomicBool,
}

#[derive(Default)]
struct State {
    entries: BTreeMap<Key, Entry>,
    /// Spans whose window a fill has, and whether they were forgotten since.
    lent: BTreeMap<Key, bool>,
    idle: Vec<Idle>,
    /// Windows in all, those that are lent included.
    window_count: u64,
    uses: u64,
}

struct Entry {
    window: LockedSlot,
    pad: usize,
    ticket: Ticket,
    /// Which use of the cache was its last.
    used: u64,
}

struct Idle {
    window: LockedSlot,
    ticket: Ticket,
    since: Instant,
}

/// A window in the hands of one fill; it comes back when it is dropped.
pub(super) struct WindowLease {
    cache: Arc<Cache>,
    key: Key,
    window: Option<LockedSlot>,
    /// Where the span begins in the window.
    pub(super) pad: usize,
    /// Whether the span's bytes are in it.
    is_filled: bool,
    /// It was made for the span, and is to be registered.
    pub(super) is_new: bool,
    /// When its last copy is done.
    ticket: Ticket,
}

/// Which windows are taken out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Surplus {
    /// Those that nothing was put into for a while.
    LongIdle,
    /// Any whose copies are done: the ones without use first.
    Any,
    /// All, whatever their copies: the stream is known to be done.
    All,
}

impl Surplus {
    /// Whether it takes what nothing has used since then.
    pub(super) fn takes_idle(self, since: Instant) -> bool {
        self != Self::LongIdle || since.elapsed() >= IDLE_TIME
    }
}

impl Cache {
    pub(super) fn new(device: Arc<Device>, room: Arc<LockedRoom>, window_bytes: usize) -> Self {
        let (state, refused) = Default::default();
        Self { device, room, window_bytes, state, refused }
    }

    /// Page-locked bytes held, those about to be locked included.
    pub(super) fn bytes(&self) -> u64 {
        self.state.lock().window_count * self.window_bytes as u64
    }

    /// The window that holds a span.
    pub(super) fn find(self: &Arc<Self>, key: Key) -> Option<WindowLease> {
        let mut state = self.state.lock();
        let Entry { window, pad, ticket, .. } = state.entries.remove(&key)?;
        state.lent.insert(key, false);
        Some(self.lease(key, window, pad, true, ticket))
    }

    /// A window without use for a span that is to be read: it is registered, and costs nothing.
    pub(super) fn idle_window_for(self: &Arc<Self>, key: Key) -> Option<WindowLease> {
        let mut state = self.state.lock();
        if state.lent.contains_key(&key) {
            return None;
        }
        let ready = state.idle.iter().position(|idle| self.has_passed(idle.ticket))?;
        let Idle { window, .. } = state.idle.swap_remove(ready);
        state.lent.insert(key, false);
        Some(self.lease(key, window, 0, false, Ticket::NONE))
    }

    /// A new window for a span that is to be read, which is not registered yet. `None` where there
    /// may be no more.
    pub(super) fn new_window_for(self: &Arc<Self>, key: Key) -> Option<WindowLease> {
        let mut state = self.state.lock();
        if state.lent.contains_key(&key) {
            return None;
        }
        let window = self.map_window()?;
        state.window_count += 1;
        state.lent.insert(key, false);
        Some(self.lease(key, window, 0, false, Ticket::NONE))
    }

    fn map_window(&self) -> Option<LockedSlot> {
        let bytes = self.window_bytes as u64;
        if self.refused.load(Relaxed) || self.room.is_short() || !self.room.try_hold(bytes) {
            return None;
        }
        let window = locked::map_window(&self.device.driver, self.window_bytes).ok();
        if window.is_none() {
            self.room.release(bytes);
        }
        window
    }

    fn lease(
        self: &Arc<Self>,
        key: Key,
        window: LockedSlot,
        pad: usize,
        is_filled: bool,
        ticket: Ticket,
    ) -> WindowLease {
        let cache = Arc::clone(self);
        let is_new = !window.is_locked();
        WindowLease { cache, key, window: Some(window), pad, is_filled, is_new, ticket }
    }

    /// No new windows from now on. Returns whether that is news.
    pub(super) fn refuse(&self) -> bool {
        !self.refused.swap(true, Relaxed)
    }

    /// Forgets spans: their windows wait for others.
    pub(super) fn forget(&self, bar: u32, parts: Range<u64>) {
        let mut state = self.state.lock();
        let keys = Key { bar, part: parts.start }..Key { bar, part: parts.end };
        if keys.is_empty() {
            return;
        }
        state.lent.range_mut(keys.clone()).for_each(|(_, forgotten)| *forgotten = true);
        let found: Vec<Key> = state.entries.range(keys).map(|(key, _)| *key).collect();
        for key in found {
            if let Some(Entry { window, ticket, .. }) = state.entries.remove(&key) {
                state.idle.push(Idle { window, ticket, since: Instant::now() });
            }
        }
    }

    /// Whether there may be windows to be taken out.
    pub(super) fn may_have(&self, surplus: Surplus) -> bool {
        let state = self.state.lock();
        state.idle.iter().any(|idle| surplus.takes_idle(idle.since))
            || surplus != Surplus::LongIdle && !state.entries.is_empty()
    }

    /// Takes windows out, as many as told at most. Their bytes are no longer held: whoever gets
    /// them gives them back to the system.
    pub(super) fn take_out(&self, surplus: Surplus, at_most: usize) -> Vec<LockedSlot> {
        let mut state = self.state.lock();
        let mut taken = Vec::new();
        let may_go = |ticket| surplus == Surplus::All || self.has_passed(ticket);
        let mut index = 0;
        while index < state.idle.len() && taken.len() < at_most {
            let idle = &state.idle[index];
            if surplus.takes_idle(idle.since) && may_go(idle.ticket) {
                taken.push(state.idle.swap_remove(index).window);
            } else {
                index += 1;
            }
        }
        if surplus != Surplus::LongIdle {
            // Passes go round: what was used last is needed again last.
            let mut keys: Vec<_> = state.entries.iter().map(|(key, it)| (it.used, *key)).collect();
            keys.sort_unstable();
            for (_, key) in keys.into_iter().rev() {
                if taken.len() >= at_most {
                    break;
                }
                if may_go(state.entries[&key].ticket) {
                    taken.extend(state.entries.remove(&key).map(|entry| entry.window));
                }
            }
        }
        state.window_count -= taken.len() as u64;
        taken
    }

    fn has_passed(&self, ticket: Ticket) -> bool {
        matches!(self.device.fences.cover(ticket), Ok(Cover::Passed))
    }

    fn take_back(&self, lease: &mut WindowLease) {
        let Some(window) = lease.window.take() else { return };
        // In a forked child it is the parent's, in the middle of a call as it may be.
        if process::ending() {
            return std::mem::forget(window);
        }
        let mut state = self.state.lock();
        let forgotten = state.lent.remove(&lease.key).unwrap_or(true);
        let ticket = lease.ticket;
        if !window.is_locked() {
            state.window_count -= 1;
            drop(state);
            // Ordinary memory: this is no call of the driver.
            drop(window);
            self.room.release(self.window_bytes as u64);
        } else if forgotten || !lease.is_filled {
            state.idle.push(Idle { window, ticket, since: Instant::now() });
        } else {
            state.uses += 1;
            let (pad, used) = (lease.pad, state.uses);
            state.entries.insert(lease.key, Entry { window, pad, ticket, used });
        }
    }
}

impl WindowLease {
    pub(super) fn memory(&mut self) -> &mut LockedSlot {
        self.window.as_mut().expect("the window goes back when this is dropped")
    }

    /// Gives the window back: the span's bytes are in it, and its last copy is done at `ticket`.
    pub(super) fn keep(mut self, ticket: Ticket) {
        self.is_filled = true;
        self.ticket = ticket;
    }

    /// Gives the window back: its bytes are no good, and its last copy is done at `ticket`.
    pub(super) fn discard(mut self, ticket: Ticket) {
        self.is_filled = false;
        self.ticket = ticket;
    }

    /// When its last copy is done.
    pub(super) fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Leaves the memory for good: the device may read it at any time.
    pub(super) fn leak(mut self) {
        std::mem::forget(self.window.take());
    }
}

impl Drop for WindowLease {
    fn drop(&mut self) {
        let cache = Arc::clone(&self.cache);
        cache.take_back(self);
    }
}
