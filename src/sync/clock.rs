//! A clock for the hit path: 10 ns a reading where `Instant` takes 25 or more.
//!
//! Counts the processor's time stamps on x86-64, nanoseconds elsewhere. Only good for "has about so
//! much time passed": the rate is learned from [`Instant`] as it goes, and a processor whose count
//! jumps, as over a suspend or a move of a virtual machine, makes a fence come early, or late by a
//! few intervals, no more.

#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "the time stamp counter is read by an intrinsic")
)]

use std::time::{Duration, Instant};

use crate::sync::Relaxed;
use crate::sync::fixed::AtomicU64;

/// Ticks of the fastest clock there may be, in a nanosecond.
const RATE_MAX: u64 = 10;

/// Tells roughly whether an interval is over.
pub struct Ticks {
    started: Instant,
    first: u64,
    interval: Duration,
    /// The interval in ticks, as far as the rate is known.
    interval_ticks: AtomicU64,
}

impl Ticks {
    /// A clock that watches for `interval`.
    #[must_use]
    pub fn new(interval: Duration) -> Self {
        // A nanosecond a tick until the rate is known: at most a few times too often.
        let nanos = u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX);
        let interval_ticks = AtomicU64::new(nanos);
        Self { started: Instant::now(), first: read(), interval, interval_ticks }
    }

    /// A reading.
    #[inline]
    #[must_use]
    pub fn now(&self) -> u64 {
        read()
    }

    /// Whether the interval has passed since the reading `then`.
    #[inline]
    #[must_use]
    pub fn is_over(&self, then: u64) -> bool {
        read().wrapping_sub(then) >= self.interval_ticks.load(Relaxed)
    }

    /// Learns the rate; called now and then, where a slower clock does not hurt.
    pub fn learn(&self) {
        let known = self.interval_ticks.load(Relaxed);
        let told = ticks_of(self.interval, self.first, read(), self.started.elapsed());
        // Every hit reads it: not written for less than a hundredth.
        if let Some(interval) = told.filter(|told| told.abs_diff(known) > known / 100) {
            self.interval_ticks.store(interval, Relaxed);
        }
    }
}

/// The interval in ticks, from a count that went from `first` to `now` while so much time passed.
/// A count that was put back says nothing; one that was put forward says at most a rate that there
/// may be.
fn ticks_of(interval: Duration, first: u64, now: u64, passed: Duration) -> Option<u64> {
    let ticks = now.checked_sub(first)?;
    let told = interval.as_nanos().saturating_mul(u128::from(ticks)) / passed.as_nanos().max(1);
    let most = interval.as_nanos().saturating_mul(u128::from(RATE_MAX));
    u64::try_from(told.min(most)).ok()
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn read() -> u64 {
    // SAFETY: the instruction exists on every x86-64 processor and touches no memory.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn read() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Over a suspend the count may begin anew, or jump; `Instant` stops or goes on.
    #[test]
    fn a_count_that_jumps_never_makes_an_interval_endless() {
        const HOUR: Duration = Duration::from_secs(3600);
        let interval = Duration::from_micros(50);
        let told = |first, now, passed| ticks_of(interval, first, now, passed);
        // At 3 GHz.
        let hour = 3 * HOUR.as_nanos() as u64;
        assert_eq!(told(1000, 1000 + hour, HOUR), Some(150_000));
        // Begun anew: it is as it was; once it is past the first reading it says less than it did.
        assert_eq!(told(1 << 40, 5, HOUR), None);
        assert!(told(1000, 2000, HOUR).unwrap() < 150_000);
        // Put forward, and by as much as can be.
        assert_eq!(told(0, 1 << 60, HOUR), Some(500_000));
        assert_eq!(told(0, u64::MAX, Duration::ZERO), Some(500_000));
        // No time has passed, or it went back, which `Instant` tells as none.
        assert_eq!(told(7, 7, Duration::ZERO), Some(0));
        // An interval for ever stays one.
        assert_eq!(ticks_of(Duration::MAX, 0, 1, Duration::from_nanos(1)), None);
        // A reading from before the count was put back is over, whatever the interval is.
        let ticks = Ticks::new(interval);
        assert!(ticks.is_over(ticks.now() + (1 << 50)));
    }

    #[test]
    fn the_rate_is_learned() {
        let ticks = Ticks::new(Duration::from_millis(20));
        std::thread::sleep(Duration::from_millis(20));
        ticks.learn();
        let then = ticks.now();
        assert!(!ticks.is_over(then), "20 ms have not passed");
        std::thread::sleep(Duration::from_millis(60));
        assert!(ticks.is_over(then), "60 ms have passed");
    }
}
