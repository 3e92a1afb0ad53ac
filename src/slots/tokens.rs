//! Values that are put in once and taken out once, by id.
//!
//! A slot's word is its generation and who has the value: nobody, the table, or one caller who
//! looks at it. Whoever moves the word on has the value to itself, which is all that makes this
//! sound. Free slots are handed out in batches to caches that threads keep, so that putting and
//! taking touch nothing that threads share.

#![expect(unsafe_code, reason = "values behind a word that says whose they are")]

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;

use super::{GENERATION_MAX, SLOTS_MAX, id_of, parts_of};
use crate::sync::{Acquire, AtomicU64, Mutex, Relaxed, Release};

const FREE: u64 = 0;
const HELD: u64 = 1;
const BUSY: u64 = 2;
const STATE_BITS: u32 = 2;
/// Slots that a cache takes and gives at a time.
const BATCH: usize = 32;

/// A table of values with ids; see the module's text.
pub struct Tokens<T> {
    tag: u8,
    slots: boxcar::Vec<Slot<T>>,
    free: Mutex<Vec<u32>>,
}

struct Slot<T> {
    /// Generation, then one of the three states.
    word: AtomicU64,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: a value is reached only by whoever moved the slot's word to BUSY, or out of HELD, so by
// one thread at a time; values travel between threads, which `T: Send` allows.
unsafe impl<T: Send> Sync for Slot<T> {}

/// Free slots that one thread keeps.
#[derive(Default)]
pub struct SlotCache {
    free: Vec<u32>,
}

/// A slot without a value; for [`Tokens::put`] or [`Tokens::keep`].
#[must_use = "a slot that nobody keeps is lost"]
pub struct FreeSlot(u32);

impl<T> Tokens<T> {
    /// An empty table. `tag`, 1 to 15, tells its ids from those of other tables.
    #[must_use]
    pub const fn new(tag: u8) -> Self {
        Self { tag, slots: boxcar::Vec::new(), free: Mutex::new(Vec::new()) }
    }

    /// Takes a free slot. `None` when every slot is taken.
    #[inline]
    pub fn reserve(&self, cache: &mut SlotCache) -> Option<FreeSlot> {
        match cache.free.pop() {
            Some(index) => Some(FreeSlot(index)),
            None => self.refill(cache).map(FreeSlot),
        }
    }

    /// Puts a value in, which `make` makes once its place is known, and gives it an id. Parts that
    /// are in registers are then written from there; a value that is made before goes through
    /// memory, which costs more than all the rest.
    #[inline(always)]
    pub fn put(&self, slot: FreeSlot, make: impl FnOnce() -> T) -> u64 {
        let index = slot.0;
        let slot = &self.slots[index as usize];
        let generation = slot.word.load(Relaxed) >> STATE_BITS;
        // SAFETY: the slot is free and was given to this caller alone, so nobody else looks at its
        // value before the word below is published.
        unsafe { slot.value.get().cast::<T>().write(make()) };
        slot.word.store(generation << STATE_BITS | HELD, Release);
        id_of(self.tag, generation, index)
    }

    /// Ends a value, once: `end` has it alone and in its place, since moving it would cost more
    /// than the rest of a hit; then it is dropped. `None` for an id that names none.
    #[inline(always)]
    pub fn end<R>(&self, id: u64, end: impl FnOnce(&T) -> R) -> Option<(R, Option<FreeSlot>)> {
        let (generation, index) = parts_of(self.tag, id)?;
        let slot = self.slots.get(index)?;
        self.claim(slot, generation)?;
        let ending = Ending { slot, generation };
        // SAFETY: the claim made this caller the only one to reach the value, which was written
        // before the word was HELD; `ending` drops it afterwards, also by unwinding.
        let ended = end(unsafe { &*slot.value.get().cast::<T>() });
        drop(ending);
        // A slot whose generations are used up is not used again.
        let free = (generation < GENERATION_MAX).then_some(FreeSlot(index as u32));
        Some((ended, free))
    }

    /// Looks at a value, alone. `None` for an id that names none.
    pub fn with<R>(&self, id: u64, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        let (generation, index) = parts_of(self.tag, id)?;
        let slot = self.slots.get(index)?;
        self.claim(slot, generation)?;
        let unclaim = Unclaim { slot, generation };
        // SAFETY: the claim made this caller the only one to reach the value, which was written
        // before the word was HELD; `unclaim` lets go of it after the look, also by unwinding.
        let looked = look(unsafe { &mut *slot.value.get().cast::<T>() });
        drop(unclaim);
        Some(looked)
    }

    /// Moves a slot's word from HELD to BUSY; waits while another caller looks at the value.
    #[inline]
    fn claim(&self, slot: &Slot<T>, generation: u64) -> Option<()> {
        let held = generation << STATE_BITS | HELD;
        let busy = generation << STATE_BITS | BUSY;
        loop {
            match slot.word.compare_exchange(held, busy, Acquire, Relaxed) {
                Ok(_) => return Some(()),
                Err(word) if word == busy => std::thread::yield_now(),
                Err(_) => return None,
            }
        }
    }

    #[cold]
    fn refill(&self, cache: &mut SlotCache) -> Option<u32> {
        let mut free = self.free.lock();
        let start = free.len().saturating_sub(BATCH);
        cache.free.extend(free.drain(start..));
        if cache.free.is_empty() {
            // Under the lock, so that indexes stay below the limit.
            for _ in 0..BATCH {
                if self.slots.count() >= SLOTS_MAX as usize {
                    break;
                }
                let (word, value) = (AtomicU64::new(0), UnsafeCell::new(MaybeUninit::uninit()));
                cache.free.push(self.slots.push(Slot { word, value }) as u32);
            }
        }
        cache.free.pop()
    }

    /// Keeps a slot that an ended value left, for the thread's next one.
    #[inline]
    pub fn keep(&self, cache: &mut SlotCache, slot: FreeSlot) {
        cache.free.push(slot.0);
        if cache.free.len() > 2 * BATCH {
            self.give_back(cache, BATCH);
        }
    }

    /// Gives free slots of a cache to all; at a thread's end, all of them.
    pub fn give_back(&self, cache: &mut SlotCache, count: usize) {
        let start = cache.free.len().saturating_sub(count);
        self.free.lock().extend(cache.free.drain(start..));
    }
}

impl<T> Drop for Tokens<T> {
    fn drop(&mut self) {
        for (_, slot) in self.slots.iter() {
            if slot.word.load(Acquire) & ((1 << STATE_BITS) - 1) == HELD {
                // SAFETY: nobody else has the table any more, and the word says that the slot has
                // a value.
                unsafe { slot.value.get().cast::<T>().drop_in_place() };
            }
        }
    }
}

/// Drops the value of a claimed slot and frees the slot.
struct Ending<'a, T> {
    slot: &'a Slot<T>,
    generation: u64,
}

impl<T> Drop for Ending<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: the slot is claimed by whoever has this, and has a value.
        unsafe { self.slot.value.get().cast::<T>().drop_in_place() };
        self.slot.word.store((self.generation + 1) << STATE_BITS | FREE, Release);
    }
}

/// Lets go of a claimed slot.
struct Unclaim<'a, T> {
    slot: &'a Slot<T>,
    generation: u64,
}

impl<T> Drop for Unclaim<'_, T> {
    fn drop(&mut self) {
        self.slot.word.store(self.generation << STATE_BITS | HELD, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put<T>(tokens: &Tokens<T>, cache: &mut SlotCache, value: T) -> u64 {
        tokens.put(tokens.reserve(cache).unwrap(), || value)
    }

    fn take<T: Clone>(tokens: &Tokens<T>, cache: &mut SlotCache, id: u64) -> Option<T> {
        let (value, slot) = tokens.end(id, T::clone)?;
        tokens.keep(cache, slot.unwrap());
        Some(value)
    }

    #[test]
    fn a_value_comes_out_once_and_only_by_its_own_id() {
        let (tokens, others) = (Tokens::new(1), Tokens::new(2));
        let mut cache = SlotCache::default();
        let id = put(&tokens, &mut cache, "one".to_owned());
        let other = put(&others, &mut SlotCache::default(), "other".to_owned());
        for wrong in [0, u64::MAX, id + 1, id | 1 << 30, other] {
            assert_eq!(take(&tokens, &mut cache, wrong), None, "{wrong:#x}");
        }
        assert_eq!(tokens.with(id, |value| value.len()), Some(3));
        assert_eq!(take(&tokens, &mut cache, id).as_deref(), Some("one"));
        assert_eq!(take(&tokens, &mut cache, id), None);
        assert_eq!(tokens.with(id, |_| ()), None);
        let again = put(&tokens, &mut cache, "two".to_owned());
        assert_ne!(again, id, "a slot's next value has another id");
    }

    #[test]
    fn a_value_is_dropped_once_also_when_its_end_unwinds() {
        let value = std::sync::Arc::new(());
        let tokens = Tokens::new(1);
        let id = put(&tokens, &mut SlotCache::default(), std::sync::Arc::clone(&value));
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = tokens.end(id, |_| panic!("an end that fails"));
        }));
        assert!(unwound.is_err());
        assert_eq!(std::sync::Arc::strong_count(&value), 1);
        assert!(tokens.with(id, |_| ()).is_none());
    }

    #[test]
    fn each_of_many_threads_takes_what_nobody_else_took() {
        let tokens = Tokens::new(1);
        let taken = AtomicU64::new(0);
        let ids: Vec<u64> = {
            let mut cache = SlotCache::default();
            (0..10_000u64).map(|value| put(&tokens, &mut cache, value)).collect()
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut cache = SlotCache::default();
                    for id in &ids {
                        let _ = tokens.with(*id, |value| *value += 0);
                        if take(&tokens, &mut cache, *id).is_some() {
                            taken.fetch_add(1, Relaxed);
                        }
                        let own = put(&tokens, &mut cache, 7);
                        assert_eq!(take(&tokens, &mut cache, own), Some(7));
                    }
                    tokens.give_back(&mut cache, usize::MAX);
                });
            }
        });
        assert_eq!(taken.load(Relaxed), 10_000);
        assert!(tokens.slots.count() < 10_000 + 10 * BATCH, "slots are used again");
    }
}
