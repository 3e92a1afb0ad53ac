//! Things that many threads use by id, and that somebody closes meanwhile.
//!
//! Looking one up counts a use, in a cell of the thread's own; closing marks the slot first and
//! looks at the counts then, so either the user sees the mark or the closer sees the use: between
//! its write and its read each side has a barrier, the user's a light one. Whoever ends the last
//! use of a closed slot drops the thing. Where the kernel denies the closer its barrier, nobody
//! can tell whether it was the last, and the thing stays for ever.

#![expect(unsafe_code, reason = "things behind a word that says whether they live")]

use std::mem::MaybeUninit;
use std::ops::Deref;

use super::barrier::{Paid, heavy, light, prepare};
use super::thread::{self, OWNED, Thread};
use super::{GENERATION_MAX, SLOTS_MAX, id_of, parts_of};
use crate::sync::{
    Acquire, AtomicBool, AtomicU64, Mutex, Ordering::SeqCst, Relaxed, Release, UnsafeCell,
};

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
const SHARED: usize = if cfg!(vbar_loom) { 1 } else { 8 };

struct Slot<T: 'static> {
    /// Generation, then one of the three states.
    word: AtomicU64,
    uses: Box<[Cell]>,
    /// What users of the value pay between counting and looking is known to be a barrier.
    paid: AtomicBool,
    /// Has a value unless the slot is free.
    value: UnsafeCell<MaybeUninit<T>>,
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
    #[cfg(not(vbar_loom))]
    #[must_use]
    pub const fn new(tag: u8, spread: Spread) -> Self {
        Self { tag, spread, slots: boxcar::Vec::new(), free: Mutex::new(Vec::new()) }
    }

    /// As above; no static has a lock of loom's.
    #[cfg(vbar_loom)]
    pub fn new(tag: u8, spread: Spread) -> Self {
        Self { tag, spread, slots: boxcar::Vec::new(), free: Mutex::new(Vec::new()) }
    }

    /// Puts a thing in. Gives it back when every slot is taken.
    ///
    /// # Errors
    /// The thing.
    pub fn insert(&'static self, value: T) -> Result<u64, T> {
        match self.reserve() {
            Some(place) => Ok(place.fill(value)),
            None => Err(value),
        }
    }

    /// A place for a thing that is yet to be made; `None` when every slot is taken.
    pub fn reserve(&'static self) -> Option<Place<T>> {
        self.reserve_below(SLOTS_MAX)
    }

    fn reserve_below(&'static self, slots_max: u32) -> Option<Place<T>> {
        let mut free = self.free.lock();
        if let Some(index) = free.pop() {
            return Some(Place { slot: &self.slots[index as usize] });
        }
        // Under the lock: the count is the index.
        let index = self.slots.count() as u32;
        if index >= slots_max {
            return None;
        }
        let cells = if self.spread == Spread::One { 1 } else { OWNED + SHARED };
        let uses = (0..cells).map(|_| Cell::default()).collect();
        let (word, paid) = (AtomicU64::new(0), AtomicBool::new(false));
        let value = UnsafeCell::new(MaybeUninit::uninit());
        self.slots.push(Slot { word, uses, paid, value, table: self, index });
        Some(Place { slot: &self.slots[index as usize] })
    }

    /// A use of the thing that `id` names, or `None`.
    pub fn get(&'static self, id: u64) -> Option<Ref<T>> {
        thread::with(|thread| self.get_on(thread, id))
    }

    /// As [`Handles::get`], for who has looked up the calling thread already.
    #[inline(always)]
    pub fn get_on(&'static self, thread: &Thread, id: u64) -> Option<Ref<T>> {
        let (generation, index) = parts_of(self.tag, id)?;
        let slot = self.slots.get(index)?;
        slot.count(thread, 1);
        light();
        if slot.word.load(Acquire) != generation << STATE_BITS | LIVE {
            slot.end_use(thread);
            return None;
        }
        Some(Ref { slot })
    }

    /// Closes a thing: nobody finds it any more, and the end of its last use drops it. Returns
    /// whether the id named one.
    pub fn close(&'static self, id: u64) -> bool {
        let closed = self.mark_closed(id);
        closed.inspect(|(slot, word)| slot.drop_if_unused(*word)).is_some()
    }

    /// Closes things, all of them before the first is dropped, with one barrier for all.
    pub fn close_all(&'static self, ids: &[u64]) {
        let closed: Vec<_> = ids.iter().filter_map(|id| self.mark_closed(*id)).collect();
        let unpaid = closed.iter().any(|(slot, _)| slot.paid() == Paid::Perhaps);
        let reached = heavy(if unpaid { Paid::Perhaps } else { Paid::Always });
        for (slot, word) in closed {
            if reached || slot.paid() == Paid::Always {
                slot.drop_unused(word);
            }
        }
    }

    fn mark_closed(&'static self, id: u64) -> Option<(&'static Slot<T>, u64)> {
        let (generation, index) = parts_of(self.tag, id)?;
        let slot = self.slots.get(index)?;
        Some((slot, slot.mark_closed(generation)?))
    }
}

/// A free slot of a table, for one thing.
pub struct Place<T: 'static> {
    slot: &'static Slot<T>,
}

impl<T> Place<T> {
    /// Puts the thing in. Returns its id.
    pub fn fill(self, value: T) -> u64 {
        let slot = self.slot;
        std::mem::forget(self);
        let generation = slot.word.load(SeqCst) >> STATE_BITS;
        slot.paid.store(prepare() == Paid::Always, Relaxed);
        // SAFETY: the slot is free and was taken from the list by this caller alone.
        slot.value.with_mut(|place| unsafe { place.cast::<T>().write(value) });
        slot.word.store(generation << STATE_BITS | LIVE, SeqCst);
        id_of(slot.table.tag, generation, slot.index)
    }
}

impl<T> Drop for Place<T> {
    fn drop(&mut self) {
        self.slot.table.free.lock().push(self.slot.index);
    }
}

impl<T> Slot<T> {
    /// Returns the word as it is then, or `None` unless it was live.
    fn mark_closed(&self, generation: u64) -> Option<u64> {
        let (live, closed) = (generation << STATE_BITS | LIVE, generation << STATE_BITS | CLOSED);
        self.word.compare_exchange(live, closed, SeqCst, SeqCst).ok().map(|_| closed)
    }

    fn paid(&self) -> Paid {
        if self.paid.load(Relaxed) { Paid::Always } else { Paid::Perhaps }
    }

    #[inline(always)]
    fn end_use(&self, thread: &Thread) {
        self.count(thread, 1u64.wrapping_neg());
        light();
        let word = self.word.load(Acquire);
        if word & ((1 << STATE_BITS) - 1) == CLOSED {
            self.drop_if_unused(word);
        }
    }

    /// Drops a closed thing whose last use has ended. `word` is the slot's from before: a thing
    /// that was closed behind the barrier is somebody else's to drop.
    #[cold]
    fn drop_if_unused(&self, word: u64) {
        if heavy(self.paid()) {
            self.drop_unused(word);
        }
    }

    /// As above, behind the barrier. Uses begun were all counted before the slot was closed, so a
    /// sum of nothing means that none is left.
    fn drop_unused(&self, word: u64) {
        let uses = self.uses.iter().fold(0u64, |sum, cell| sum.wrapping_add(cell.0.load(Acquire)));
        if uses != 0 {
            return;
        }
        let generation = (word >> STATE_BITS) + 1;
        let freed = generation << STATE_BITS | FREE;
        if self.word.compare_exchange(word, freed, SeqCst, SeqCst).is_err() {
            return;
        }
        // SAFETY: this caller alone moved the word from CLOSED, behind which there is a value, and
        // no use is left.
        let value = self.value.with_mut(|value| unsafe { value.cast::<T>().read() });
        // The slot is listed first: dropping may take long, or close others of the table.
        if generation <= GENERATION_MAX {
            self.table.free.lock().push(self.index);
        }
        drop(value);
    }

    /// Adds to the calling thread's count. What the thread did with the thing before is seen by
    /// whoever reads the count.
    #[inline(always)]
    fn count(&self, thread: &Thread, difference: u64) {
        let number = thread.number();
        match self.uses.len() {
            1 => {
                self.uses[0].0.fetch_add(difference, SeqCst);
            }
            // The thread's own: nobody else writes it.
            _ if number < OWNED => {
                let cell = &self.uses[number].0;
                cell.store(cell.load(Relaxed).wrapping_add(difference), Release);
            }
            _ => {
                self.uses[OWNED + number % SHARED].0.fetch_add(difference, SeqCst);
            }
        }
    }
}

impl<T> Ref<T> {
    /// Closes the thing, as [`Handles::close`] does; the end of this use looks whether it was the
    /// last. Returns whether it was open.
    #[must_use]
    pub fn close(&self) -> bool {
        // In use, so its generation stays.
        self.slot.mark_closed(self.slot.word.load(Acquire) >> STATE_BITS).is_some()
    }

    /// As dropping it, for who has looked up the calling thread already.
    #[inline(always)]
    pub fn end_on(self, thread: &Thread) {
        self.slot.end_use(thread);
        std::mem::forget(self);
    }
}

impl<T: Send + Sync> Deref for Ref<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the slot had a value when the use began, and nobody drops it while a use that
        // was counted before the word was read goes on.
        self.slot.value.with(|value| unsafe { &*value.cast::<T>() })
    }
}

impl<T> Drop for Ref<T> {
    fn drop(&mut self) {
        thread::with(|thread| self.slot.end_use(thread));
    }
}

#[cfg(all(test, not(vbar_loom)))]
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

    /// Asks something when it is dropped.
    struct Asker(fn() -> u64, &'static AtomicU64);

    impl Drop for Asker {
        fn drop(&mut self) {
            self.1.fetch_add(1 + (self.0() << 32), SeqCst);
        }
    }

    #[test]
    fn things_closed_together_are_all_closed_before_one_is_dropped() {
        static TABLE: Handles<Asker> = Handles::new(6, Spread::One);
        static IDS: Mutex<Vec<u64>> = Mutex::new(Vec::new());
        static DROPS: AtomicU64 = AtomicU64::new(0);
        fn found() -> u64 {
            // Not under the lock: a look may drop another of them.
            let ids = IDS.lock().clone();
            ids.into_iter().filter(|id| TABLE.get(*id).is_some()).count() as u64
        }
        let ids: Vec<u64> =
            (0..5).map(|_| TABLE.insert(Asker(found, &DROPS)).ok().unwrap()).collect();
        IDS.lock().clone_from(&ids);
        let used = TABLE.get(ids[3]).unwrap();
        TABLE.close_all(&ids);
        assert_eq!(DROPS.load(SeqCst), 4, "drops, and above them what was found then");
        drop(used);
        TABLE.close_all(&[]);
        TABLE.close_all(&ids);
        assert_eq!(DROPS.load(SeqCst), 5);
    }

    #[test]
    fn a_full_table_says_so_before_the_thing_is_made() {
        static TABLE: Handles<u64> = Handles::new(7, Spread::One);
        let reserve = || TABLE.reserve_below(2);
        let first = reserve().unwrap().fill(1);
        let second = reserve().unwrap();
        assert!(reserve().is_none());
        drop(second);
        let second = reserve().unwrap().fill(2);
        assert!(reserve().is_none());
        assert!(TABLE.close(first));
        assert_eq!(*TABLE.get(second).unwrap(), 2);
        assert!(reserve().is_some());
    }

    /// The kernel refuses `membarrier` to the calling thread from now on.
    fn refuse_membarrier() {
        let step = |code, k, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
        let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
        let is = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
        let mut steps = [
            // The number of the call is the first field of what a filter is given.
            step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
            step(is, libc::SYS_membarrier as u32, 0, 1),
            step(libc::BPF_RET | libc::BPF_K, refused, 0, 0),
            step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
        ];
        let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
        // SAFETY: takes numbers; the thread gains no privileges from now on, and needs none.
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        // SAFETY: the program and its steps live during the call, which copies them for this
        // thread only.
        let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) };
        assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    }

    #[test]
    fn what_nobody_can_tell_to_be_unused_stays_when_the_kernel_starts_to_refuse() {
        static TABLE: Handles<Thing> = Handles::new(8, Spread::Threads);
        static DROPS: AtomicUsize = AtomicUsize::new(0);
        let drops = || DROPS.load(Ordering::SeqCst);
        let insert = |number| TABLE.insert(Thing(&DROPS, number)).ok().unwrap();
        let before = [insert(1), insert(2), insert(3)];
        let spared = TABLE.get(before[0]).unwrap().slot.paid() == Paid::Perhaps;
        let refused = move || {
            refuse_membarrier();
            assert!(TABLE.close(before[0]));
            TABLE.close_all(&before[1..2]);
            assert!(TABLE.get(before[0]).is_none());
            // Where the kernel has refused from the start, all of them go.
            assert_eq!(drops(), if spared { 0 } else { 2 });
            // Whoever learns of a new thing pays for its barriers.
            let after = insert(4);
            let used = TABLE.get(after).unwrap();
            assert!(TABLE.close(after));
            assert_eq!(drops(), if spared { 0 } else { 2 });
            drop(used);
            assert_eq!(drops(), if spared { 1 } else { 3 });
        };
        std::thread::spawn(refused).join().unwrap();
        // A thread that is not refused still reaches everyone.
        assert!(TABLE.close(before[2]));
        assert_eq!(drops(), if spared { 2 } else { 4 });
    }

    #[test]
    fn things_closed_under_their_users_are_dropped_once_each() {
        static SPREAD: Handles<Thing> = Handles::new(4, Spread::Threads);
        static ONE: Handles<Thing> = Handles::new(5, Spread::One);
        check_closing(&SPREAD);
        check_closing(&ONE);
        // Threads past the first ones share cells.
        let number = || thread::with(Thread::number);
        (0..OWNED).for_each(|_| std::thread::spawn(number).join().map(drop).unwrap());
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
