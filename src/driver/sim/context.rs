//! Contexts and the handles in them: who is current on which thread, and what a handle names.
//!
//! Owns the primary context of each device and the tables of streams and events. Handles are
//! reused, the latest freed one first, as a driver that recycles its structures would: whoever
//! keeps a handle too long meets somebody else's stream.

use std::cell::RefCell;
use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::ThreadId;

use parking_lot::{Mutex, RwLock};

use super::Core;
use super::stream::{StreamKind, StreamState};
use super::verb::Verb;
use crate::driver::{CaptureMode, Context, DriverCode, DriverResult};
use crate::units::{DeviceOrdinal, Stream};

/// A table of shared objects by handle.
pub(super) struct Table<T> {
    base: usize,
    entries: RwLock<Entries<T>>,
}

struct Entries<T> {
    slots: Vec<Option<Arc<T>>>,
    free: Vec<usize>,
}

/// Handles lie this far apart, as pointers to structures would.
const STEP: usize = 0x80;

impl<T> Table<T> {
    pub(super) fn new(base: usize) -> Self {
        Self { base, entries: RwLock::new(Entries { slots: Vec::new(), free: Vec::new() }) }
    }

    pub(super) fn insert(&self, make: impl FnOnce(usize) -> T) -> Arc<T> {
        let mut entries = self.entries.write();
        let index = entries.free.pop().unwrap_or(entries.slots.len());
        let object = Arc::new(make(self.base + index * STEP));
        if index == entries.slots.len() {
            entries.slots.push(None);
        }
        entries.slots[index] = Some(object.clone());
        object
    }

    fn index(&self, handle: usize) -> Option<usize> {
        let offset = handle.checked_sub(self.base)?;
        offset.is_multiple_of(STEP).then_some(offset / STEP)
    }

    /// Calls `with` on the object, under the table's read lock.
    pub(super) fn with<R>(&self, handle: usize, with: impl FnOnce(&Arc<T>) -> R) -> Option<R> {
        let index = self.index(handle)?;
        self.entries.read().slots.get(index)?.as_ref().map(with)
    }

    pub(super) fn get(&self, handle: usize) -> Option<Arc<T>> {
        self.with(handle, Arc::clone)
    }

    pub(super) fn remove(&self, handle: usize) -> Option<Arc<T>> {
        let index = self.index(handle)?;
        let mut entries = self.entries.write();
        let object = entries.slots.get_mut(index)?.take()?;
        entries.free.push(index);
        Some(object)
    }

    pub(super) fn remove_where(&self, gone: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut entries = self.entries.write();
        let mut removed = Vec::new();
        for index in 0..entries.slots.len() {
            if entries.slots[index].as_ref().is_some_and(|object| gone(object)) {
                removed.extend(entries.slots[index].take());
                entries.free.push(index);
            }
        }
        removed
    }

    pub(super) fn len(&self) -> usize {
        let entries = self.entries.read();
        entries.slots.len() - entries.free.len()
    }
}

/// A primary context.
pub(super) struct ContextState {
    pub(super) device: usize,
    pub(super) handle: usize,
    pub(super) legacy: Arc<StreamState>,
    per_thread: Mutex<HashMap<ThreadId, Arc<StreamState>>>,
    /// Whether the library's kernels are loaded.
    pub(super) module: AtomicBool,
}

/// The primary context of one device and how often it is retained.
#[derive(Default)]
pub(super) struct Primary {
    state: RwLock<Option<Arc<ContextState>>>,
    retained: Mutex<u64>,
}

const CONTEXT_BASE: usize = 0xC000_0000;
const CONTEXT_STEP: usize = 0x1000;

/// What the driver keeps for a thread, for one simulated process.
#[derive(Clone, Copy)]
struct ThreadState {
    sim: u64,
    context: usize,
    mode: CaptureMode,
}

thread_local! {
    /// Without a destructor, so that it can still be asked for when a thread, or the process, ends
    /// and others' destructors make their last calls.
    static THREAD: RefCell<ManuallyDrop<Vec<ThreadState>>> =
        const { RefCell::new(ManuallyDrop::new(Vec::new())) };
    static EMPTIES_THREAD: EmptiesThread = const { EmptiesThread };
}

struct EmptiesThread;

impl Drop for EmptiesThread {
    fn drop(&mut self) {
        THREAD.with_borrow_mut(|states| drop(std::mem::take(&mut **states)));
    }
}

impl Core {
    /// Calls `with` on the calling thread's state.
    fn thread<R>(&self, with: impl FnOnce(&mut ThreadState) -> R) -> R {
        // What a thread that is ending asks for once more stays behind: some bytes.
        let _ = EMPTIES_THREAD.try_with(|_| ());
        THREAD.with_borrow_mut(|states| {
            if let Some(state) = states.iter_mut().find(|state| state.sim == self.id) {
                return with(state);
            }
            let mut state = ThreadState { sim: self.id, context: 0, mode: CaptureMode::Global };
            let result = with(&mut state);
            states.push(state);
            result
        })
    }

    /// Forgets the calling thread's state, when the simulated device goes.
    pub(super) fn forget_thread(&self) {
        THREAD.with_borrow_mut(|states| states.retain(|state| state.sim != self.id));
    }

    pub(super) fn capture_mode(&self) -> CaptureMode {
        self.thread(|state| state.mode)
    }

    pub(super) fn exchange_capture_mode(&self, mode: CaptureMode) -> CaptureMode {
        self.thread(|state| std::mem::replace(&mut state.mode, mode))
    }

    /// The handle of the calling thread's current context, 0 without.
    pub(super) fn current_handle(&self) -> usize {
        self.thread(|state| state.context)
    }

    pub(super) fn context_of(&self, handle: usize) -> Option<Arc<ContextState>> {
        let offset = handle.checked_sub(CONTEXT_BASE)?;
        let primary = self.primaries.get(offset / CONTEXT_STEP)?;
        if !offset.is_multiple_of(CONTEXT_STEP) {
            return None;
        }
        primary.state.read().clone()
    }

    /// The calling thread's current context.
    pub(super) fn current(&self, verb: Verb) -> DriverResult<Arc<ContextState>> {
        let handle = self.current_handle();
        if handle == 0 {
            return Err(verb.error(DriverCode::INVALID_CONTEXT));
        }
        self.context_of(handle).ok_or_else(|| verb.error(DriverCode::CONTEXT_IS_DESTROYED))
    }

    /// For calls of no device in particular: the current context's device, if any, is not lost.
    pub(super) fn current_alive(&self, verb: Verb) -> DriverResult<()> {
        let handle = self.current_handle();
        if handle == 0 {
            return Ok(());
        }
        self.alive((handle - CONTEXT_BASE) / CONTEXT_STEP, verb)
    }

    pub(super) fn current_device(&self) -> Option<usize> {
        self.current_handle().checked_sub(CONTEXT_BASE).map(|offset| offset / CONTEXT_STEP)
    }

    pub(super) fn ctx_set_current(&self, context: Option<Context>) -> DriverResult<()> {
        let handle = context.map_or(0, |context| context.0);
        if handle != 0 && self.context_of(handle).is_none() {
            return Err(Verb::CtxSetCurrent.error(DriverCode::INVALID_CONTEXT));
        }
        self.thread(|state| state.context = handle);
        Ok(())
    }

    pub(super) fn primary_retain(&self, device: DeviceOrdinal) -> DriverResult<Context> {
        let verb = Verb::DevicePrimaryCtxRetain;
        let index = self.device_index(device, verb)?;
        self.alive(index, verb)?;
        let primary = &self.primaries[index];
        let mut retained = primary.retained.lock();
        let handle = CONTEXT_BASE + index * CONTEXT_STEP;
        if *retained == 0 {
            let legacy = self.new_stream(0, handle, index, StreamKind::Legacy);
            *primary.state.write() = Some(Arc::new(ContextState {
                device: index,
                handle,
                legacy,
                per_thread: Mutex::default(),
                module: AtomicBool::new(false),
            }));
        }
        *retained += 1;
        Ok(Context(handle))
    }

    pub(super) fn primary_release(&self, device: DeviceOrdinal) -> DriverResult<()> {
        let verb = Verb::DevicePrimaryCtxRelease;
        let index = self.device_index(device, verb)?;
        let primary = &self.primaries[index];
        let mut retained = primary.retained.lock();
        *retained = retained.checked_sub(1).ok_or(verb.error(DriverCode::INVALID_CONTEXT))?;
        if *retained > 0 {
            return Ok(());
        }
        let handle = CONTEXT_BASE + index * CONTEXT_STEP;
        self.synchronize_context(handle);
        *primary.state.write() = None;
        drop(retained);
        self.events.remove_where(|event| event.context == handle);
        self.streams.remove_where(|stream| stream.context == handle);
        self.close_streams_of(handle);
        Ok(())
    }

    /// The stream that a handle names for the calling thread.
    pub(super) fn stream(&self, stream: Stream, verb: Verb) -> DriverResult<Arc<StreamState>> {
        if !stream.is_implicit() {
            let found = self.streams.get(stream.0);
            return found.ok_or_else(|| verb.error(DriverCode::INVALID_HANDLE));
        }
        let context = self.current(verb)?;
        if stream != Stream::PER_THREAD {
            return Ok(context.legacy.clone());
        }
        let thread = std::thread::current().id();
        let mut streams = context.per_thread.lock();
        let made = streams.entry(thread).or_insert_with(|| {
            self.new_stream(0, context.handle, context.device, StreamKind::Blocking)
        });
        Ok(made.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_reused_and_stale_ones_refused() {
        let table = Table::new(0x1000);
        let made = |value: u32| {
            let mut handle = 0;
            table.insert(|at| {
                handle = at;
                value
            });
            handle
        };
        let (first, second) = (made(1), made(2));
        assert_eq!(table.remove(first).as_deref(), Some(&1));
        assert!(table.remove(first).is_none());
        assert_eq!(made(3), first);
        assert_eq!(table.get(second).as_deref(), Some(&2));
        assert!(table.get(second + 1).is_none() && table.get(7).is_none());
        assert_eq!((table.remove_where(|value| *value == 3).len(), table.len()), (1, 1));
    }
}
