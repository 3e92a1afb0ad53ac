//! Values that are put in once and taken out once, by id.
//!
//! A slot's word is its generation and who has the value: nobody, the table, one caller who looks
//! at it, or one who ends it. Whoever moves the word on has the value to itself, which is all that
//! makes this sound. From the moment that its end begins an id names nothing: a value's end may
//! run code that names it again. Free slots are handed out in batches to caches that threads keep,
//! so that putting and taking touch nothing that threads share.

#![expect(unsafe_code, reason = "values behind a word that says whose they are")]

use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};

use super::thread::{FreeSlot, SlotCache};
use super::{GENERATION_MAX, SLOTS_MAX, id_of, parts_of};
use crate::sync::{Acquire, AtomicU64, Mutex, Relaxed, Release, UnsafeCell, yield_now};

const FREE: u64 = 0;
const HELD: u64 = 1;
const LOOKED_AT: u64 = 2;
const ENDING: u64 = 3;
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
    /// Generation, then one of the four states.
    word: AtomicU64,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: a value is reached only by whoever moved the slot's word out of HELD, so by one thread
// at a time; values travel between threads, which `T: Send` allows.
unsafe impl<T: Send> Sync for Slot<T> {}

impl<T> Tokens<T> {
    /// An empty table. `tag`, 1 to 15, tells its ids from those of other tables.
    #[cfg(not(vbar_loom))]
    #[must_use]
    pub const fn new(tag: u8) -> Self {
        Self { tag, slots: boxcar::Vec::new(), free: Mutex::new(Vec::new()) }
    }

    /// As above; no static has a lock of loom's.
    #[cfg(vbar_loom)]
    pub fn new(tag: u8) -> Self {
        Self { tag, slots: boxcar::Vec::new(), free: Mutex::new(Vec::new()) }
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
        slot.value.with_mut(|value| unsafe { value.cast::<T>().write(make()) });
        slot.word.store(generation << STATE_BITS | HELD, Release);
        id_of(self.tag, generation, index)
    }

    /// Begins the end of a value, once: the caller has it alone and in its place, since moving it
    /// would cost more than the rest of a hit. `None` for an id that names none, and for one whose
    /// end has begun.
    #[inline(always)]
    pub fn end(&self, id: u64) -> Option<Ending<'_, T>> {
        let (generation, index) = parts_of(self.tag, id)?;
        let slot = self.slots.get(index)?;
        claim(slot, generation, ENDING)?;
        Some(Ending { table: self, slot, generation, index })
    }

    /// Looks at a value, alone. `None` for an id that names none.
    pub fn with<R>(&self, id: u64, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        let (generation, index) = parts_of(self.tag, id)?;
        let slot = self.slots.get(index)?;
        claim(slot, generation, LOOKED_AT)?;
        let unclaim = Unclaim { slot, generation };
        // SAFETY: the claim made this caller the only one to reach the value, which was written
        // before the word was HELD; `unclaim` lets go of it after the look, also by unwinding.
        let looked = slot.value.with_mut(|value| look(unsafe { &mut *value.cast::<T>() }));
        drop(unclaim);
        Some(looked)
    }

    /// A free slot for who has none, and more for the cache if it is open. `None` when every slot
    /// is taken.
    #[cold]
    pub fn refill(&self, cache: &SlotCache) -> Option<FreeSlot> {
        let mut free = self.free.lock();
        let taken = free.pop().or_else(|| self.make());
        for _ in 1..BATCH.min(cache.vacant() + 1) {
            let Some(slot) = free.pop().or_else(|| self.make()) else { break };
            if let Err(FreeSlot(slot)) = cache.push(FreeSlot(slot)) {
                free.push(slot);
                break;
            }
        }
        taken.map(FreeSlot)
    }

    /// A slot that never had a value; under the lock, so that indexes stay below the limit.
    fn make(&self) -> Option<u32> {
        let is_full = self.slots.count() >= SLOTS_MAX as usize;
        let (word, value) = (AtomicU64::new(0), UnsafeCell::new(MaybeUninit::uninit()));
        (!is_full).then(|| self.slots.push(Slot { word, value }) as u32)
    }

    /// Gives a slot back that a cache has no room for, and half of what the cache has.
    #[cold]
    pub fn overflow(&self, cache: &SlotCache, slot: FreeSlot) {
        self.free.lock().push(slot.0);
        self.give_back(cache, BATCH);
    }

    /// Gives up to `count` slots of a cache back.
    pub fn give_back(&self, cache: &SlotCache, count: usize) {
        let mut free = self.free.lock();
        free.extend(std::iter::from_fn(|| cache.pop()).take(count).map(|slot| slot.0));
    }
}

/// Moves a slot's word from HELD on; waits while another caller looks at the value.
#[inline(always)]
fn claim<T>(slot: &Slot<T>, generation: u64, state: u64) -> Option<()> {
    let (held, claimed) = (generation << STATE_BITS | HELD, generation << STATE_BITS | state);
    match slot.word.compare_exchange(held, claimed, Acquire, Relaxed) {
        Ok(_) => Some(()),
        Err(word) => claim_later(&slot.word, word, generation, state),
    }
}

#[cold]
fn claim_later(place: &AtomicU64, mut word: u64, generation: u64, state: u64) -> Option<()> {
    let (held, claimed) = (generation << STATE_BITS | HELD, generation << STATE_BITS | state);
    while word == generation << STATE_BITS | LOOKED_AT {
        yield_now();
        match place.compare_exchange(held, claimed, Acquire, Relaxed) {
            Ok(_) => return Some(()),
            Err(now) => word = now,
        }
    }
    None
}

impl<T> Drop for Tokens<T> {
    fn drop(&mut self) {
        for (_, slot) in self.slots.iter() {
            if slot.word.load(Acquire) & ((1 << STATE_BITS) - 1) == HELD {
                // SAFETY: nobody else has the table any more, and the word says that the slot has
                // a value.
                slot.value.with_mut(|value| unsafe { value.cast::<T>().drop_in_place() });
            }
        }
    }
}

/// A value at its end. Dropping this drops the value and gives its slot to all.
pub struct Ending<'a, T> {
    table: &'a Tokens<T>,
    slot: &'a Slot<T>,
    generation: u64,
    index: usize,
}

impl<T> Ending<'_, T> {
    /// Takes the value out, and its slot as [`Ending::free`] does.
    pub fn take(self) -> (T, Option<FreeSlot>) {
        let Self { table, slot, generation, index } = self;
        std::mem::forget(self);
        // SAFETY: as in `free`; the value is not reached through the slot any more.
        let value = slot.value.with_mut(|value| unsafe { value.cast::<T>().read() });
        let emptied = Emptied { table, slot, generation, index };
        let free = emptied.free();
        std::mem::forget(emptied);
        (value, free)
    }

    /// Drops the value. Returns its slot, for the thread's cache; `None` when the slot has had its
    /// last value.
    #[inline(always)]
    pub fn free(self) -> Option<FreeSlot> {
        let Self { table, slot, generation, index } = self;
        let emptied = Emptied { table, slot, generation, index };
        std::mem::forget(self);
        // SAFETY: the claim made this caller the only one to reach the value, which was written
        // before the word was HELD.
        slot.value.with_mut(|value| unsafe { value.cast::<T>().drop_in_place() });
        let free = emptied.free();
        std::mem::forget(emptied);
        free
    }
}

impl<T> Deref for Ending<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: as in `free`, which this outlives no reference to.
        self.slot.value.with(|value| unsafe { &*value.cast::<T>() })
    }
}

impl<T> DerefMut for Ending<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        self.slot.value.with_mut(|value| unsafe { &mut *value.cast::<T>() })
    }
}

impl<T> Drop for Ending<'_, T> {
    #[cold]
    fn drop(&mut self) {
        let Self { table, slot, generation, index } = *self;
        let _emptied = Emptied { table, slot, generation, index };
        // SAFETY: as in `free`.
        slot.value.with_mut(|value| unsafe { value.cast::<T>().drop_in_place() });
    }
}

/// A slot whose value has gone, perhaps by unwinding. Dropping this gives it to all.
struct Emptied<'a, T> {
    table: &'a Tokens<T>,
    slot: &'a Slot<T>,
    generation: u64,
    index: usize,
}

impl<T> Emptied<'_, T> {
    /// Frees it. One whose generations are used up is not used again.
    #[inline(always)]
    fn free(&self) -> Option<FreeSlot> {
        self.slot.word.store((self.generation + 1) << STATE_BITS | FREE, Release);
        (self.generation < GENERATION_MAX).then_some(FreeSlot(self.index as u32))
    }
}

impl<T> Drop for Emptied<'_, T> {
    #[cold]
    fn drop(&mut self) {
        self.table.free.lock().extend(self.free().map(|slot| slot.0));
    }
}

/// Lets go of a slot that was looked at.
struct Unclaim<'a, T> {
    slot: &'a Slot<T>,
    generation: u64,
}

impl<T> Drop for Unclaim<'_, T> {
    fn drop(&mut self) {
        self.slot.word.store(self.generation << STATE_BITS | HELD, Release);
    }
}

#[cfg(all(test, not(vbar_loom)))]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn cache() -> SlotCache {
        let cache = SlotCache::new();
        cache.open();
        cache
    }

    fn put<T>(tokens: &Tokens<T>, cache: &SlotCache, value: T) -> u64 {
        let slot = cache.pop().or_else(|| tokens.refill(cache));
        tokens.put(slot.unwrap(), || value)
    }

    fn take<T: Clone>(tokens: &Tokens<T>, cache: &SlotCache, id: u64) -> Option<T> {
        let ending = tokens.end(id)?;
        let value = ending.clone();
        if let Err(slot) = cache.push(ending.free().unwrap()) {
            tokens.overflow(cache, slot);
        }
        Some(value)
    }

    #[test]
    fn a_value_comes_out_once_and_only_by_its_own_id() {
        let (tokens, others) = (Tokens::new(1), Tokens::new(2));
        let cache = cache();
        let id = put(&tokens, &cache, "one".to_owned());
        let other = put(&others, &SlotCache::new(), "other".to_owned());
        for wrong in [0, u64::MAX, id + 1, id | 1 << 30, other] {
            assert_eq!(take(&tokens, &cache, wrong), None, "{wrong:#x}");
        }
        assert_eq!(tokens.with(id, |value| value.len()), Some(3));
        assert_eq!(take(&tokens, &cache, id).as_deref(), Some("one"));
        assert_eq!(take(&tokens, &cache, id), None);
        assert_eq!(tokens.with(id, |_| ()), None);
        let again = put(&tokens, &cache, "two".to_owned());
        assert_ne!(again, id, "a slot's next value has another id");
    }

    /// Does something when it is dropped.
    struct OnDrop<F: Fn()>(F);

    impl<F: Fn()> Drop for OnDrop<F> {
        fn drop(&mut self) {
            (self.0)();
        }
    }

    #[test]
    fn a_value_whose_end_names_it_again_is_spent() {
        static TOKENS: Tokens<OnDrop<fn()>> = Tokens::new(1);
        static ID: AtomicU64 = AtomicU64::new(0);
        fn is_spent() {
            let id = ID.load(Relaxed);
            assert!(TOKENS.end(id).is_none() && TOKENS.with(id, |_| ()).is_none());
        }
        ID.store(put(&TOKENS, &cache(), OnDrop(is_spent as fn())), Relaxed);
        let ending = TOKENS.end(ID.load(Relaxed)).unwrap();
        is_spent();
        let _ = ending.free();
        is_spent();
    }

    #[test]
    fn a_slot_is_used_again_also_when_its_value_s_end_unwinds() {
        static DROPPED: AtomicU64 = AtomicU64::new(0);
        let tokens = Tokens::new(1);
        let closed = SlotCache::new();
        let unwind = |panics_in_end: bool, panics_in_drop: bool| {
            let value = OnDrop(move || {
                DROPPED.fetch_add(1, Relaxed);
                assert!(!panics_in_drop, "a drop that fails");
            });
            let id = put(&tokens, &closed, Box::new(value) as Box<dyn Send>);
            let unwound = catch_unwind(AssertUnwindSafe(|| {
                let ending = tokens.end(id).unwrap();
                assert!(!panics_in_end, "an end that fails");
                let _ = ending.free();
            }));
            assert!(unwound.is_err());
            assert!(tokens.with(id, |_| ()).is_none());
        };
        unwind(true, false);
        unwind(false, true);
        assert_eq!((DROPPED.load(Relaxed), tokens.slots.count()), (2, 1));
    }

    #[test]
    fn a_cache_that_is_closed_keeps_nothing() {
        let (tokens, closed) = (Tokens::new(1), SlotCache::new());
        for value in 0..3 * BATCH {
            let id = put(&tokens, &closed, value);
            assert_eq!(take(&tokens, &closed, id), Some(value));
            assert!(closed.pop().is_none());
        }
        assert_eq!(tokens.slots.count(), 1);
    }

    #[test]
    fn each_of_many_threads_takes_what_nobody_else_took() {
        let tokens = Tokens::new(1);
        let taken = AtomicU64::new(0);
        let ids: Vec<u64> = {
            let cache = cache();
            (0..10_000u64).map(|value| put(&tokens, &cache, value)).collect()
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let cache = cache();
                    for id in &ids {
                        let _ = tokens.with(*id, |value| *value += 0);
                        if take(&tokens, &cache, *id).is_some() {
                            taken.fetch_add(1, Relaxed);
                        }
                        let own = put(&tokens, &cache, 7);
                        assert_eq!(take(&tokens, &cache, own), Some(7));
                    }
                    tokens.give_back(&cache, usize::MAX);
                });
            }
        });
        assert_eq!(taken.load(Relaxed), 10_000);
        assert!(tokens.slots.count() < 10_000 + 10 * BATCH, "slots are used again");
    }
}
