//! A clock for the hit path: 10 ns a reading where `Instant` takes 25 or more.
//!
//! Counts the processor's time stamps on x86-64, nanoseconds elsewhere. Only good for "has about so
//! much time passed": the rate is learned from [`Instant`] as it goes, and a processor whose count
//! jumps makes a fence come early or late, no more.

#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "the time stamp counter is read by an intrinsic")
)]

use std::time::{Duration, Instant};

use crate::sync::Relaxed;
use crate::sync::fixed::AtomicU64;

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
        let nanos = self.started.elapsed().as_nanos().max(1);
        let ticks = u128::from(read().wrapping_sub(self.first));
        let interval = self.interval.as_nanos().saturating_mul(ticks) / nanos;
        let interval = u64::try_from(interval).unwrap_or(u64::MAX);
        // Every hit reads it: not written for less than a hundredth.
        let known = self.interval_ticks.load(Relaxed);
        if interval.abs_diff(known) > known / 100 {
            self.interval_ticks.store(interval, Relaxed);
        }
    }
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
