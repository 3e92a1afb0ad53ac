//! What a thread keeps for the hit path: its number, and free slots of the token table.
//!
//! In a shared object every look at a thread's own storage is a function call. So an export of the
//! hit path looks once, by [`with`], and hands down what it found. Nothing here has a destructor,
//! which would be asked after at each look: who fills the slots gives them back.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Numbers that belong to one thread each, the first threads of the process.
pub const OWNED: usize = if cfg!(vbar_loom) { 2 } else { 64 };
/// Numbers that all later threads share.
pub const SHARED: usize = 64;
/// Free slots that a thread keeps at most.
const KEPT_MAX: usize = 64;

/// See the module's text.
pub struct Thread {
    /// The number plus one; 0 before it is asked for.
    number: Cell<usize>,
    /// Free slots of the token table.
    pub slots: SlotCache,
}

/// With what the calling thread keeps.
#[inline(always)]
pub fn with<R>(work: impl FnOnce(&Thread) -> R) -> R {
    thread_local! {
        static THREAD: Thread = const { Thread { number: Cell::new(0), slots: SlotCache::new() } };
    }
    THREAD.with(work)
}

impl Thread {
    /// One of a model, whose threads share what a thread keeps.
    #[cfg(vbar_loom)]
    pub(super) fn numbered(number: usize) -> Self {
        Self { number: Cell::new(number + 1), slots: SlotCache::new() }
    }

    /// A small number, what threads are spread by: of the thread's own below `OWNED`, for as long
    /// as the process lives; shared with others from there on, below `OWNED + SHARED`.
    #[inline(always)]
    #[must_use]
    pub fn number(&self) -> usize {
        match self.number.get() {
            0 => self.take_number(),
            number => number - 1,
        }
    }

    #[cold]
    fn take_number(&self) -> usize {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let number = next.min(OWNED) + next.saturating_sub(OWNED) % SHARED;
        self.number.set(number + 1);
        number
    }
}

/// A slot without a value.
#[must_use = "a slot that nobody keeps is lost"]
pub struct FreeSlot(pub(super) u32);

/// Free slots of one table. Closed at first, and empty while it is.
pub struct SlotCache {
    slots: [Cell<u32>; KEPT_MAX],
    count: Cell<usize>,
    room: Cell<usize>,
}

impl SlotCache {
    /// A closed cache.
    #[must_use]
    pub const fn new() -> Self {
        let slots = [const { Cell::new(0) }; KEPT_MAX];
        Self { slots, count: Cell::new(0), room: Cell::new(0) }
    }

    /// Lets slots in. Whoever does it gives them back before the cache goes.
    pub fn open(&self) {
        self.room.set(KEPT_MAX);
    }

    /// Lets no more slots in.
    pub fn close(&self) {
        self.room.set(0);
    }

    /// Takes the slot that came last.
    #[inline(always)]
    pub fn pop(&self) -> Option<FreeSlot> {
        let count = self.count.get().checked_sub(1)?;
        self.count.set(count);
        Some(FreeSlot(self.slots[count].get()))
    }

    /// Puts a slot in.
    ///
    /// # Errors
    /// The slot, when the cache is full or closed.
    #[inline(always)]
    pub fn push(&self, slot: FreeSlot) -> Result<(), FreeSlot> {
        let count = self.count.get();
        if count >= self.room.get() {
            return Err(slot);
        }
        self.slots[count].set(slot.0);
        self.count.set(count + 1);
        Ok(())
    }

    /// Slots that it has room for.
    pub(super) fn vacant(&self) -> usize {
        self.room.get().saturating_sub(self.count.get())
    }
}

impl Default for SlotCache {
    fn default() -> Self {
        Self::new()
    }
}
