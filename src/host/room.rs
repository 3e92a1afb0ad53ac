//! The page-locked memory that is held, against what may be held.
//!
//! Owns the count of bytes held by one runtime and what the system said last, asked at most each
//! 100 ms. Nothing is locked before it is held here: `host/allowance` computes, `system_memory`
//! reads, this file remembers. Where the system does not say it is 64 MiB, the ring as it is unless
//! told otherwise.

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

/// See the module's text.
pub struct LockedRoom {
    root: SystemRoot,
    limit_bytes: Option<u64>,
    held_bytes: AtomicU64,
    seen: Mutex<Option<(Instant, Seen)>>,
    told: AtomicBool,
}

/// What the system said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Seen {
    allowance_bytes: u64,
    is_short: bool,
}

impl LockedRoom {
    /// Room for `limit_bytes` at most, where the system's own files lie below `root`.
    #[must_use]
    pub fn new(root: SystemRoot, limit_bytes: Option<u64>) -> Self {
        let (held_bytes, seen, told) = Default::default();
        Self { root, limit_bytes, held_bytes, seen, told }
    }

    /// Page-locked bytes held.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Relaxed)
    }

    /// Page-locked bytes that may be held in all, those held included.
    #[must_use]
    pub fn allowance_bytes(&self) -> u64 {
        self.look().allowance_bytes
    }

    /// Whether the system is short of memory: nothing more is to be locked.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.look().is_short
    }

    /// Bytes held above the allowance.
    #[must_use]
    pub fn excess_bytes(&self) -> u64 {
        self.held_bytes().saturating_sub(self.allowance_bytes())
    }

    /// Holds `bytes` more if they may be held. Returns whether they are.
    #[must_use]
    pub fn try_hold(&self, bytes: u64) -> bool {
        let allowance = self.allowance_bytes();
        let hold = |held: u64| held.checked_add(bytes).filter(|held| *held <= allowance);
        self.held_bytes.fetch_update(Relaxed, Relaxed, hold).is_ok()
    }

    /// Holds as many of `count` pieces of `bytes` as may be held. Returns how many.
    #[must_use]
    pub fn hold_some(&self, count: usize, bytes: u64) -> usize {
        (0..count).take_while(|_| self.try_hold(bytes)).count()
    }

    /// Gives up `bytes` that were held.
    pub fn release(&self, bytes: u64) {
        self.held_bytes.fetch_sub(bytes, Relaxed);
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
        let held = self.held_bytes();
        let read = || -> Result<Seen> {
            let memory = SystemMemory::read(&self.root)?;
            let margin = memory.default_margin_bytes();
            let pressure = self.root.read("/proc/pressure/memory")?;
            let is_short = match pressure.as_deref().and_then(some_average) {
                Some(percent) => percent >= PRESSURE_PERCENT,
                None => memory.available_bytes < margin,
            };
            let allowance = memory.allowance(held, margin).bytes;
            let allowance_bytes = self.limit_bytes.map_or(allowance, |limit| limit.min(allowance));
            Ok(Seen { allowance_bytes, is_short })
        };
        read().unwrap_or_else(|error| {
            if !self.told.swap(true, Relaxed) {
                log::warn!("little memory is page-locked, what the system has is unknown: {error}");
            }
            let allowance_bytes =
                self.limit_bytes.map_or(UNKNOWN_BYTES, |it| it.min(UNKNOWN_BYTES));
            Seen { allowance_bytes, is_short: true }
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
        let small = LockedRoom::new(SystemRoot::new(folder.path()), Some(MIB));
        assert_eq!((small.allowance_bytes(), small.hold_some(9, MIB)), (MIB, 1));
        let unknown = LockedRoom::new(SystemRoot::new("/nonexistent"), None);
        assert_eq!((unknown.allowance_bytes(), unknown.is_short()), (UNKNOWN_BYTES, true));
    }
}
