//! One book of the page-locked and registered memory that this process holds, against what may be
//! held.
//!
//! The system's memory is one, however many devices there are: all rooms below one root of the
//! system's files write into one book, which remembers what the system said last, asked at most
//! each 100 ms. A [`LockedRoom`] is one runtime's part of it, with a limit of its own. Nothing is
//! locked before it is held here, be it a slot, a window, a host frame or a registered file page:
//! `host/allowance` computes, `system_memory` reads, this file remembers. Where the system does not
//! say what it has it is 64 MiB, the ring as it is unless told otherwise.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::host::allowance::SystemMemory;
use crate::host::mounts::SystemRoot;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Relaxed};
use crate::units::MIB;

/// The system is asked at most this often.
const READ_INTERVAL: Duration = Duration::from_millis(100);
/// Memory is short when tasks wait for it for this part of the time, in percent, over 10 s.
const PRESSURE_PERCENT: f64 = 10.0;

/// What may be held where the system does not say what it has.
const UNKNOWN_BYTES: u64 = 64 * MIB;

/// What is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Held {
    /// Memory that exists because it is held: slots, windows, host frames.
    Own,
    /// Pages of a file that would be there without us, and count as room for others until the
    /// system needs them: registered ones are none.
    FilePages,
}

/// One runtime's part of the book.
pub struct LockedRoom {
    book: Arc<Book>,
    limit_bytes: Option<u64>,
    held_bytes: AtomicU64,
    /// Of those, file pages.
    file_bytes: AtomicU64,
}

/// What this process holds of one system's memory.
struct Book {
    root: SystemRoot,
    held_bytes: AtomicU64,
    file_bytes: AtomicU64,
    seen: Mutex<Option<(Instant, Seen)>>,
    told: AtomicBool,
}

/// What the system said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Seen {
    allowance_bytes: u64,
    is_short: bool,
}

/// The books that rooms are open in; there is one unless tests have systems of their own.
static BOOKS: Mutex<Vec<Weak<Book>>> = Mutex::new(Vec::new());

impl LockedRoom {
    /// Room for `limit_bytes` at most, where the system's own files lie below `root`.
    #[must_use]
    pub fn new(root: SystemRoot, limit_bytes: Option<u64>) -> Self {
        let (held_bytes, file_bytes) = Default::default();
        Self { book: Book::of(root), limit_bytes, held_bytes, file_bytes }
    }

    /// The system's own files.
    #[must_use]
    pub fn root(&self) -> &SystemRoot {
        &self.book.root
    }

    /// Bytes that this runtime holds.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Relaxed)
    }

    /// Bytes that the process holds, all its runtimes together.
    #[must_use]
    pub fn process_bytes(&self) -> u64 {
        self.book.held_bytes.load(Relaxed)
    }

    /// Bytes that this runtime may hold in all, those held included: what others of the process
    /// hold is not there for it.
    #[must_use]
    pub fn allowance_bytes(&self) -> u64 {
        let others = self.process_bytes().saturating_sub(self.held_bytes());
        self.limited(self.book.look().allowance_bytes.saturating_sub(others))
    }

    /// Bytes that this runtime may hold beyond those that it holds.
    #[must_use]
    pub fn spare_bytes(&self) -> u64 {
        self.allowance_bytes().saturating_sub(self.held_bytes())
    }

    /// Whether the system is short of memory: nothing more is to be locked.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.book.look().is_short
    }

    /// Bytes of this runtime that are to go: it is above its limit, or the process is above what
    /// the system can spare.
    #[must_use]
    pub fn excess_bytes(&self) -> u64 {
        let held = self.held_bytes();
        let above = self.process_bytes().saturating_sub(self.book.look().allowance_bytes);
        above.min(held).max(held - self.limited(held))
    }

    /// Holds `bytes` more if they may be held. Returns whether they are.
    #[must_use]
    pub fn try_hold(&self, bytes: u64) -> bool {
        self.try_hold_as(Held::Own, bytes)
    }

    /// As [`Self::try_hold`], of memory of that kind.
    #[must_use]
    pub fn try_hold_as(&self, held: Held, bytes: u64) -> bool {
        let allowance = self.book.look().allowance_bytes;
        self.hold_below(held, bytes, allowance)
    }

    /// As [`Self::try_hold`] by what the system said last, however long ago: for callers that hold
    /// a lock, under which it is not asked.
    #[must_use]
    pub fn try_hold_unasked(&self, bytes: u64) -> bool {
        let seen = *self.book.seen.lock();
        let allowance = seen.map_or(0, |(_, seen)| seen.allowance_bytes);
        self.hold_below(Held::Own, bytes, allowance)
    }

    fn hold_below(&self, held: Held, bytes: u64, allowance: u64) -> bool {
        let below = |most: u64| move |held: u64| held.checked_add(bytes).filter(|it| *it <= most);
        let limit = below(self.limit_bytes.unwrap_or(u64::MAX));
        if self.held_bytes.fetch_update(Relaxed, Relaxed, limit).is_err() {
            return false;
        }
        if self.book.held_bytes.fetch_update(Relaxed, Relaxed, below(allowance)).is_err() {
            self.held_bytes.fetch_sub(bytes, Relaxed);
            return false;
        }
        if held == Held::FilePages {
            self.file_bytes.fetch_add(bytes, Relaxed);
            self.book.file_bytes.fetch_add(bytes, Relaxed);
        }
        true
    }

    /// Holds as many of `count` pieces of `bytes` as may be held. Returns how many.
    #[must_use]
    pub fn hold_some(&self, count: usize, bytes: u64) -> usize {
        (0..count).take_while(|_| self.try_hold(bytes)).count()
    }

    /// Gives up `bytes` that were held.
    pub fn release(&self, bytes: u64) {
        self.release_as(Held::Own, bytes);
    }

    /// As [`Self::release`], of memory of that kind.
    pub fn release_as(&self, held: Held, bytes: u64) {
        if held == Held::FilePages {
            self.file_bytes.fetch_sub(bytes, Relaxed);
            self.book.file_bytes.fetch_sub(bytes, Relaxed);
        }
        self.held_bytes.fetch_sub(bytes, Relaxed);
        self.book.held_bytes.fetch_sub(bytes, Relaxed);
    }

    fn limited(&self, bytes: u64) -> u64 {
        bytes.min(self.limit_bytes.unwrap_or(u64::MAX))
    }
}

impl Drop for LockedRoom {
    fn drop(&mut self) {
        self.book.file_bytes.fetch_sub(*self.file_bytes.get_mut(), Relaxed);
        self.book.held_bytes.fetch_sub(*self.held_bytes.get_mut(), Relaxed);
    }
}

impl Book {
    fn of(root: SystemRoot) -> Arc<Self> {
        let mut books = BOOKS.lock();
        books.retain(|book| book.strong_count() > 0);
        if let Some(open) = books.iter().filter_map(Weak::upgrade).find(|book| book.root == root) {
            return open;
        }
        let (held_bytes, file_bytes, seen, told) = Default::default();
        let book = Arc::new(Self { root, held_bytes, file_bytes, seen, told });
        books.push(Arc::downgrade(&book));
        book
    }

    fn look(&self) -> Seen {
        let mut seen = self.seen.lock();
        match *seen {
            Some((at, seen)) if at.elapsed() < READ_INTERVAL => seen,
            _ => {
                let now = self.read();
                *seen = Some((Instant::now(), now));
                now
            }
        }
    }

    fn read(&self) -> Seen {
        // File pages are room as the system counts it, held or not.
        let held = self.held_bytes.load(Relaxed).saturating_sub(self.file_bytes.load(Relaxed));
        let read = || -> Result<Seen> {
            let memory = SystemMemory::read(&self.root)?;
            let margin = memory.default_margin_bytes();
            let pressure = self.root.read("/proc/pressure/memory")?;
            let is_short = match pressure.as_deref().and_then(some_average) {
                Some(percent) => percent >= PRESSURE_PERCENT,
                None => memory.available_bytes < margin,
            };
            Ok(Seen { allowance_bytes: memory.allowance(held, margin).bytes, is_short })
        };
        read().unwrap_or_else(|error| {
            if !self.told.swap(true, Relaxed) {
                log::warn!("little memory is page-locked, what the system has is unknown: {error}");
            }
            Seen { allowance_bytes: UNKNOWN_BYTES, is_short: true }
        })
    }
}

/// `some avg10=1.23 avg60=...`: the percentage.
fn some_average(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    line.split(' ').find_map(|word| word.strip_prefix("avg10="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::GIB;

    #[test]
    fn pressure_is_read() {
        let text = "some avg10=12.50 avg60=1.00 avg300=0.00 total=7\nfull avg10=0.00 total=0\n";
        assert_eq!(some_average(text), Some(12.5));
        for wrong in ["", "full avg10=3.00", "some avg60=1.00", "some avg10=x"] {
            assert_eq!(some_average(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_is_held_stays_below_what_may_be() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("proc")).unwrap();
        let text = "MemTotal: 33554432 kB\nMemAvailable: 4194304 kB\n";
        std::fs::write(folder.path().join("proc/meminfo"), text).unwrap();
        let room = LockedRoom::new(SystemRoot::new(folder.path()), None);
        assert_eq!((room.allowance_bytes(), room.is_short()), (2 * GIB, false));
        assert_eq!(room.hold_some(5, 512 * MIB), 4);
        assert!(!room.try_hold(1) && room.held_bytes() == 2 * GIB);
        room.release(MIB);
        assert!(room.try_hold(MIB));
        drop(room);
        let small = LockedRoom::new(SystemRoot::new(folder.path()), Some(MIB));
        assert_eq!((small.allowance_bytes(), small.hold_some(9, MIB)), (MIB, 1));
        let unknown = LockedRoom::new(SystemRoot::new("/nonexistent"), None);
        assert_eq!((unknown.allowance_bytes(), unknown.is_short()), (UNKNOWN_BYTES, true));
    }

    #[test]
    fn rooms_of_one_system_share_its_memory() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("proc")).unwrap();
        let text = "MemTotal: 33554432 kB\nMemAvailable: 4194304 kB\n";
        std::fs::write(folder.path().join("proc/meminfo"), text).unwrap();
        let room = |limit| LockedRoom::new(SystemRoot::new(folder.path()), limit);
        let (first, second) = (room(None), room(Some(GIB)));
        assert!(first.try_hold(3 * GIB / 2));
        assert_eq!((second.allowance_bytes(), second.spare_bytes()), (GIB / 2, GIB / 2));
        assert!(!second.try_hold(GIB / 2 + 1) && second.try_hold(GIB / 2));
        assert_eq!((first.held_bytes(), second.process_bytes()), (3 * GIB / 2, 2 * GIB));
        assert!(!first.try_hold(1) && !first.try_hold_unasked(1));
        assert_eq!((first.excess_bytes(), second.excess_bytes()), (0, 0));
        drop(first);
        assert_eq!((second.process_bytes(), second.allowance_bytes()), (GIB / 2, GIB));
        let other = LockedRoom::new(SystemRoot::new("/nonexistent"), None);
        assert_eq!(other.process_bytes(), 0);
    }

    #[test]
    fn file_pages_count_but_are_no_memory_of_ours() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("proc")).unwrap();
        let text = "MemTotal: 33554432 kB\nMemAvailable: 4194304 kB\n";
        std::fs::write(folder.path().join("proc/meminfo"), text).unwrap();
        let room = LockedRoom::new(SystemRoot::new(folder.path()), None);
        assert!(room.try_hold_as(Held::FilePages, GIB) && room.try_hold(GIB));
        assert!(!room.try_hold(1));
        // The system counts the file pages among what it can give out, so they are not added.
        *room.book.seen.lock() = None;
        assert_eq!((room.allowance_bytes(), room.excess_bytes()), (3 * GIB, 0));
        room.release_as(Held::FilePages, GIB);
        assert_eq!(room.process_bytes(), GIB);
    }
}
