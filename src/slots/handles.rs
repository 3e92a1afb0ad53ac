//! Things that many threads use by id, and that somebody closes meanwhile.
//!
//! Looking one up counts a use, in a cell of the thread's own; closing marks the slot first and
//! looks at the counts then, so either the user sees the mark or the closer sees the use: between
//! its write and its read each side has a barrier, the user's a light one. Whoever ends the last
//! use of a closed slot drops the thing.

#![expect(unsafe_code, reason = "things behind a word that says whether they live")]

use std::cell::UnsafeCell;
use std::ops::Deref;

use super::barrier::{heavy, light, prepare};
use super::{GENERATION_MAX, SLOTS_MAX, id_of, parts_of};
use crate::counters::{OWNED, thread_index};
use crate::sync::{Acquire, AtomicU64, Mutex, Ordering::SeqCst, Relaxed, Release};

const FREE: u64 = 0;
const LIVE: u64 = 1;
const CLOSED: u64 = 2;
const STATE_BITS: u32 = 2;

/// A table of things with ids; see the module's text.
pub struct Handles<T: 'static> {
    tag: u8,
    spread: Spread,
    slots: boxcar::Vec<Slot<T>>,
    free: Mutex<Vec<u32>>,
}

/// How the uses of one thing are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spread {
    /// In a cell for each of the first threads of the process and a few for the others: 5 KiB a
    /// thing, for what many threads use at once.
    Threads,
    /// In one cell, for things that there are many of.
    One,
}

/// Cells that the threads after the first ones share.
const SHARED: usize = 8;

struct Slot<T: 'static> {
    /// Generation, then one of the three states.
    word: AtomicU64,
    uses: Box<[Cell]>,
    value: UnsafeCell<Option<T>>,
    table: &'static Handles<T>,
    index: u32,
}

/// Uses begun less uses ended, modulo 2^64: a use may end in another cell than it began in.
#[repr(align(64))]
#[derive(Default)]
struct Cell(AtomicU64);

// SAFETY: a value is written and dropped only by whoever moved the word from FREE or CLOSED, which
// one thread can, while nobody has a use of it; in between it is shared, which `T: Sync` allows.
unsafe impl<T: Send + Sync> Sync for Slot<T> {}

/// A use of a thing. It stays until this is dropped, also when it is closed meanwhile. One word,
/// since tokens carry it.
pub struct Ref<T: 'static> {
    slot: &'static Slot<T>,
}

impl<T: Send + Sync> Handles<T> {
    /// An empty table. `tag`, 1 to 15, tells its ids from those of other tables.
    #[must_use]
    pub const fn new(tag: u8, spread: Spread) -> Self {
        Self { tag, spread, slots: boxcar::Vec::new(), free: Mutex::new(Vec::new()) }
    }

    /// Puts a thing in. Gives it back when every slot is taken.
    ///
    /// # Errors
    /// The thing.
    pub fn insert(&'static self, value: T) -> Result<u64, T> {
        prepare();
        let mut free = self.free.lock();
        let index = match free.pop() {
            Some(index) => index,
            None if self.slots.count() >= SLOTS_MAX as usize => return Err(value),
            None => {
                let cells = if self.spread == Spread::One { 1 } else { OWNED + SHARED };
                let uses = (0..cells).map(|_| Cell::default()).collect();
                let (word, empty) = (AtomicU64::new(0), UnsafeCell::new(None));
                // Under the lock: the count is the index.
                let index = self.slots.count() as u32;
                self.slots.push(Slot { word, uses, value: empty, table: self, index }) as u32
            }
        };
        drop(free);
        let slot = &self.slots[index as usize];
        let generation = slot.word.load(SeqCst) >> STATE_BITS;
        // SAFETY: the slot is free and was taken from the list by this caller alone.
        unsafe { *slot.value.get() = Some(value) };
        slot.word.store(generation << STATE_BITS | LIVE, SeqCst);
        Ok(id_of(self.tag, generation, index))
    }

    /// A use of the thing that `id` names, or `None`.
    #[inline(always)]
    pub fn get(&'static self, id: u64) -> Option<Ref<T>> {
        let (generation, index) = parts_of(self.tag, id)?;
        let slot = self.slots.get(index)?;
        slot.count(1);
        light();
        if slot.word.load(Acquire) != generation << STATE_BITS | LIVE {
            slot.end_use();
            return None;
        }
        Some(Ref { slot })
    }

    /// Closes a thing: nobody finds it any more, and the end of its last use drops it. Returns
    /// whether the id named one.
    pub fn close(&'static self, id: u64) -> bool {
        let Some((generation, index)) = parts_of(self.tag, id) else { return false };
        let Some(slot) = self.slots.get(index) else { return false };
        let (live, closed) = (generation << STATE_BITS | LIVE, generation << STATE_BITS | CLOSED);
        if slot.word.compare_exchange(live, closed, SeqCst, SeqCst).is_err() {
            return false;
        }
        slot.drop_if_unused();
        true
    }
}

impl<T> Slot<T> {
    #[inline]
    fn end_use(&self) {
        self.count(1u64.wrapping_neg());
        light();
        if self.word.load(Relaxed) & ((1 << STATE_BITS) - 1) == CLOSED {
            self.drop_if_unused();
        }
    }

    /// Drops a closed thing whose last use has ended. Uses begun were all counted before the slot
    /// was closed, so a sum of nothing means that none is left.
    #[cold]
    fn drop_if_unused(&self) {
        let word = self.word.load(Acquire);
        heavy();
        let uses = self.uses.iter().fold(0u64, |sum, cell| sum.wrapping_add(cell.0.load(Acquire)));
        if word & ((1 << STATE_BITS) - 1) != CLOSED || uses != 0 {
            return;
        }
        let generation = (word >> STATE_BITS) + 1;
        let freed = generation << STATE_BITS | FREE;
        if self.word.compare_exchange(word, freed, SeqCst, SeqCst).is_err() {
            return;
        }
        // SAFETY: this caller alone moved the word from CLOSED, and no use is left.
        let value = unsafe { (*self.value.get()).take() };
        // The slot is listed first: dropping may take long, or close others of the table.
        if generation <= GENERATION_MAX {
            self.table.free.lock().push(self.index);
        }
        drop(value);
    }

    /// Adds to the calling thread's count. What the thread did with the thing before is seen by
    /// whoever reads the count.
    #[inline]
    fn count(&self, difference: u64) {
        let thread = thread_index();
        match self.uses.len() {
            1 => {
                self.uses[0].0.fetch_add(difference, SeqCst);
            }
            // The thread's own: nobody else writes it.
            _ if thread < OWNED => {
                let cell = &self.uses[thread].0;
                cell.store(cell.load(Relaxed).wrapping_add(difference), Release);
            }
            _ => {
                self.uses[OWNED + thread % SHARED].0.fetch_add(difference, SeqCst);
            }
        }
    }
}

impl<T: Send + Sync> Deref for Ref<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the slot had a value when the use began, and nobody drops it while a use that
        // was counted before the word was read goes on.
        let value = unsafe { &*self.slot.value.get() };
        value.as_ref().expect("a slot in use has its value")
    }
}

impl<T> Drop for Ref<T> {
    #[inline]
    fn drop(&mut self) {
        self.slot.end_use();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Counts how often it is dropped.
    struct Thing(&'static AtomicUsize, u64);

    impl Drop for Thing {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_closed_thing_stays_for_those_who_use_it_and_for_nobody_else() {
        static TABLE: Handles<Thing> = Handles::new(3, Spread::Threads);
        static DROPS: AtomicUsize = AtomicUsize::new(0);
        let id = TABLE.insert(Thing(&DROPS, 7)).ok().unwrap();
        let used = TABLE.get(id).unwrap();
        for wrong in [0, u64::MAX, id + 1, id ^ 1 << 60, id ^ 1 << 40] {
            assert!(TABLE.get(wrong).is_none() && !TABLE.close(wrong), "{wrong:#x}");
        }
        assert!(TABLE.close(id));
        assert!(!TABLE.close(id), "closed once");
        assert!(TABLE.get(id).is_none());
        assert_eq!((used.1, DROPS.load(Ordering::SeqCst)), (7, 0));
        // A use may end on another thread than it began on.
        std::thread::spawn(move || drop(used)).join().unwrap();
        assert_eq!(DROPS.load(Ordering::SeqCst), 1);
        let next = TABLE.insert(Thing(&DROPS, 8)).ok().unwrap();
        assert!(next != id && TABLE.get(id).is_none());
        assert_eq!(TABLE.get(next).unwrap().1, 8);
    }

    #[test]
    fn things_closed_under_their_users_are_dropped_once_each() {
        static SPREAD: Handles<Thing> = Handles::new(4, Spread::Threads);
        static ONE: Handles<Thing> = Handles::new(5, Spread::One);
        check_closing(&SPREAD);
        check_closing(&ONE);
        // Threads past the first ones share cells.
        (0..OWNED).for_each(|_| std::thread::spawn(thread_index).join().map(drop).unwrap());
        check_closing(&SPREAD);
    }

    fn check_closing(table: &'static Handles<Thing>) {
        static DROPS: AtomicUsize = AtomicUsize::new(0);
        const THINGS: u64 = 2000;
        DROPS.store(0, Ordering::SeqCst);
        let current = AtomicU64::new(table.insert(Thing(&DROPS, 0)).ok().unwrap());
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut last = 0;
                    while last < THINGS {
                        if let Some(thing) = table.get(current.load(SeqCst)) {
                            assert!(thing.1 >= last, "an id found an older thing");
                            last = thing.1;
                        }
                    }
                });
            }
            for number in 1..=THINGS {
                let next = table.insert(Thing(&DROPS, number)).ok().unwrap();
                let old = current.swap(next, SeqCst);
                assert!(table.close(old));
            }
        });
        assert!(table.close(current.load(SeqCst)));
        assert_eq!(DROPS.load(Ordering::SeqCst) as u64, THINGS + 1);
        assert!(table.slots.count() < 10, "slots are used again");
    }
}
