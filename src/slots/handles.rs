//! Things that many threads use by id, and that somebody closes meanwhile.
//!
//! Looking one up counts a use, in a cell that few threads share; closing marks the slot first and
//! looks at the counts then, so either the user sees the mark or the closer sees the use (both
//! sides are sequentially consistent). Whoever ends the last use of a closed slot drops the thing.

#![expect(unsafe_code, reason = "things behind a word that says whether they live")]

use std::cell::UnsafeCell;
use std::ops::Deref;

use super::{GENERATION_MAX, SLOTS_MAX, id_of, parts_of};
use crate::counters::thread_index;
use crate::sync::{AtomicU64, Mutex, Ordering::SeqCst};

const FREE: u64 = 0;
const LIVE: u64 = 1;
const CLOSED: u64 = 2;
const STATE_BITS: u32 = 2;

/// A table of things with ids; see the module's text.
pub struct Handles<T: 'static> {
    tag: u8,
    /// Counting cells of each thing: many for what all threads use at once.
    cells: usize,
    slots: boxcar::Vec<Slot<T>>,
    free: Mutex<Vec<u32>>,
}

struct Slot<T> {
    /// Generation, then one of the three states.
    word: AtomicU64,
    uses: Box<[Cell]>,
    value: UnsafeCell<Option<T>>,
}

/// Uses begun less uses ended, modulo 2^64: a use may end in another cell than it began in.
#[repr(align(64))]
#[derive(Default)]
struct Cell(AtomicU64);

// SAFETY: a value is written and dropped only by whoever moved the word from FREE or CLOSED, which
// one thread can, while nobody has a use of it; in between it is shared, which `T: Sync` allows.
unsafe impl<T: Send + Sync> Sync for Slot<T> {}

/// A use of a thing. It stays until this is dropped, also when it is closed meanwhile.
pub struct Ref<T: 'static> {
    table: &'static Handles<T>,
    index: u32,
    value: &'static T,
}

impl<T: Send + Sync> Handles<T> {
    /// An empty table. `tag`, 1 to 15, tells its ids from those of other tables; `cells` is a
    /// power of two.
    #[must_use]
    pub const fn new(tag: u8, cells: usize) -> Self {
        assert!(cells.is_power_of_two());
        Self { tag, cells, slots: boxcar::Vec::new(), free: Mutex::new(Vec::new()) }
    }

    /// Puts a thing in. Gives it back when every slot is taken.
    ///
    /// # Errors
    /// The thing.
    pub fn insert(&self, value: T) -> Result<u64, T> {
        let mut free = self.free.lock();
        let index = match free.pop() {
            Some(index) => index,
            None if self.slots.count() >= SLOTS_MAX as usize => return Err(value),
            None => {
                let uses = (0..self.cells).map(|_| Cell::default()).collect();
                let (word, empty) = (AtomicU64::new(0), UnsafeCell::new(None));
                self.slots.push(Slot { word, uses, value: empty }) as u32
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
    #[inline]
    pub fn get(&'static self, id: u64) -> Option<Ref<T>> {
        let (generation, index) = parts_of(self.tag, id)?;
        let slot = self.slots.get(index)?;
        slot.cell().fetch_add(1, SeqCst);
        if slot.word.load(SeqCst) != generation << STATE_BITS | LIVE {
            self.end_use(index as u32);
            return None;
        }
        // SAFETY: the word says that the slot has a value, and nobody drops it while the use that
        // was counted before the word was read goes on.
        let value = unsafe { &*slot.value.get() }.as_ref()?;
        Some(Ref { table: self, index: index as u32, value })
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
        self.drop_if_unused(index as u32);
        true
    }
}

impl<T> Handles<T> {
    #[inline]
    fn end_use(&self, index: u32) {
        let slot = &self.slots[index as usize];
        slot.cell().fetch_sub(1, SeqCst);
        if slot.word.load(SeqCst) & ((1 << STATE_BITS) - 1) == CLOSED {
            self.drop_if_unused(index);
        }
    }

    /// Drops a closed thing whose last use has ended. Uses begun were all counted before the slot
    /// was closed, so a sum of nothing means that none is left.
    #[cold]
    fn drop_if_unused(&self, index: u32) {
        let slot = &self.slots[index as usize];
        let word = slot.word.load(SeqCst);
        let uses = slot.uses.iter().fold(0u64, |sum, cell| sum.wrapping_add(cell.0.load(SeqCst)));
        if word & ((1 << STATE_BITS) - 1) != CLOSED || uses != 0 {
            return;
        }
        let generation = (word >> STATE_BITS) + 1;
        let freed = generation << STATE_BITS | FREE;
        if slot.word.compare_exchange(word, freed, SeqCst, SeqCst).is_err() {
            return;
        }
        // SAFETY: this caller alone moved the word from CLOSED, and no use is left.
        let value = unsafe { (*slot.value.get()).take() };
        // The slot is listed first: dropping may take long, or close others of the table.
        if generation <= GENERATION_MAX {
            self.free.lock().push(index);
        }
        drop(value);
    }
}

impl<T> Slot<T> {
    #[inline]
    fn cell(&self) -> &AtomicU64 {
        &self.uses[thread_index() & (self.uses.len() - 1)].0
    }
}

impl<T: Send + Sync> Deref for Ref<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.value
    }
}

impl<T> Drop for Ref<T> {
    #[inline]
    fn drop(&mut self) {
        self.table.end_use(self.index);
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
        static TABLE: Handles<Thing> = Handles::new(3, 4);
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
        static TABLE: Handles<Thing> = Handles::new(4, 2);
        static DROPS: AtomicUsize = AtomicUsize::new(0);
        const THINGS: u64 = 2000;
        let current = AtomicU64::new(TABLE.insert(Thing(&DROPS, 0)).ok().unwrap());
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut last = 0;
                    while last < THINGS {
                        if let Some(thing) = TABLE.get(current.load(SeqCst)) {
                            assert!(thing.1 >= last, "an id found an older thing");
                            last = thing.1;
                        }
                    }
                });
            }
            for number in 1..=THINGS {
                let next = TABLE.insert(Thing(&DROPS, number)).ok().unwrap();
                let old = current.swap(next, SeqCst);
                assert!(TABLE.close(old));
            }
        });
        assert!(TABLE.close(current.load(SeqCst)));
        assert_eq!(DROPS.load(Ordering::SeqCst) as u64, THINGS + 1);
        assert!(TABLE.slots.count() < 10, "slots are used again");
    }
}
