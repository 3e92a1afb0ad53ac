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

impl<T> Tokens<T> {
    /// An empty table. `tag`, 1 to 15, tells its ids from those of other tables.
    #[must_use]
    pub const fn new(tag: u8) -> Self {
        Self { tag, slots: boxcar::Vec::new(), free: Mutex::new(Vec::new()) }
    }

    /// Puts a value in. Gives it back when every slot is taken.
    ///
    /// # Errors
    /// The value.
    #[inline]
    pub fn put(&self, cache: &mut SlotCache, value: T) -> Result<u64, T> {
        let Some(index) = cache.free.pop().or_else(|| self.refill(cache)) else {
            return Err(value);
        };
        let slot = &self.slots[index as usize];
        let generation = slot.word.load(Relaxed) >> STATE_BITS;
        // SAFETY: the slot is free and was in this caller's cache alone, so nobody else looks at
        // its value before the word below is published.
        unsafe { (*slot.value.get()).write(value) };
        slot.word.store(generation << STATE_BITS | HELD, Release);
        Ok(id_of(self.tag, generation, index))
    }

    /// Takes a value out, once. `None` for an id that names none.
    #[inline]
    pub fn take(&self, cache: &mut SlotCache, id: u64) -> Option<T> {
        let (generation, index) = parts_of(self.tag, id)?;
        let slot = self.slots.get(index)?;
        self.claim(slot, generation)?;
        // SAFETY: the claim made this caller the only one to reach the value, which was written
        // before the word was HELD.
        let value = unsafe { slot.value.get().cast::<T>().read() };
        slot.word.store((generation + 1) << STATE_BITS | FREE, Release);
        if generation < GENERATION_MAX {
            cache.free.push(index as u32);
            if cache.free.len() > 2 * BATCH {
                self.give_back(cache, BATCH);
            }
        }
        Some(value)
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

    #[test]
    fn a_value_comes_out_once_and_only_by_its_own_id() {
        let (tokens, others) = (Tokens::new(1), Tokens::new(2));
        let mut cache = SlotCache::default();
        let id = tokens.put(&mut cache, "one".to_owned()).unwrap();
        let other = others.put(&mut SlotCache::default(), "other".to_owned()).unwrap();
        for wrong in [0, u64::MAX, id + 1, id | 1 << 30, other] {
            assert_eq!(tokens.take(&mut cache, wrong), None, "{wrong:#x}");
        }
        assert_eq!(tokens.with(id, |value| value.len()), Some(3));
        assert_eq!(tokens.take(&mut cache, id).as_deref(), Some("one"));
        assert_eq!(tokens.take(&mut cache, id), None);
        assert_eq!(tokens.with(id, |_| ()), None);
        let again = tokens.put(&mut cache, "two".to_owned()).unwrap();
        assert_ne!(again, id, "a slot's next value has another id");
    }

    #[test]
    fn each_of_many_threads_takes_what_nobody_else_took() {
        let tokens = Tokens::new(1);
        let taken = AtomicU64::new(0);
        let ids: Vec<u64> = {
            let mut cache = SlotCache::default();
            (0..10_000u64).map(|value| tokens.put(&mut cache, value).unwrap()).collect()
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut cache = SlotCache::default();
                    for id in &ids {
                        let _ = tokens.with(*id, |value| *value += 0);
                        if tokens.take(&mut cache, *id).is_some() {
                            taken.fetch_add(1, Relaxed);
                        }
                        let own = tokens.put(&mut cache, 7).unwrap();
                        assert_eq!(tokens.take(&mut cache, own), Some(7));
                    }
                    tokens.give_back(&mut cache, usize::MAX);
                });
            }
        });
        assert_eq!(taken.load(Relaxed), 10_000);
        assert!(tokens.slots.count() < 10_000 + 10 * BATCH, "slots are used again");
    }
}
