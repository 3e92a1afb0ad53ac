//! Waiting of the CPU: every wait is counted, timed, bounded and can be cancelled.
//!
//! A [`Wait`] is made when a call starts to wait for one kind of thing, and asked again and again.
//! It holds no lock and knows nothing of what is waited for.

use std::time::{Duration, Instant};

use crate::counters::Counters;
use crate::error::{Error, ErrorCode, Result};
use crate::outcome::WaitKind;
use crate::sync::{AtomicU64, Ordering};

/// Lets other threads end the waits of a runtime's callers.
#[derive(Default)]
pub struct Cancellation {
    epoch: AtomicU64,
}

impl Cancellation {
    /// Every wait that is under way ends with `Cancelled`; later ones are not touched.
    pub fn cancel_waits(&self) {
        self.epoch.fetch_add(1, Ordering::Release);
    }
}

/// One wait under way. Dropping it counts it.
pub struct Wait<'a> {
    kind: WaitKind,
    counters: &'a Counters,
    cancellation: &'a Cancellation,
    epoch: u64,
    started: Instant,
    timeout: Duration,
    rounds: u32,
}

impl<'a> Wait<'a> {
    /// Starts to wait for something of `kind`, at most `timeout`.
    #[must_use]
    pub fn start(
        kind: WaitKind,
        counters: &'a Counters,
        cancellation: &'a Cancellation,
        timeout: Duration,
    ) -> Self {
        let epoch = cancellation.epoch.load(Ordering::Acquire);
        Self { kind, counters, cancellation, epoch, started: Instant::now(), timeout, rounds: 0 }
    }

    /// Lets time pass: yields at first, then sleeps, 20 us to 1 ms.
    ///
    /// # Errors
    /// `TimedOut` past the time-out, `Cancelled` when another thread said so.
    pub fn pause(&mut self) -> Result<()> {
        self.check()?;
        self.rounds += 1;
        match self.rounds {
            0..=16 => std::thread::yield_now(),
            17..=64 => std::thread::sleep(Duration::from_micros(20)),
            _ => std::thread::sleep(Duration::from_micros(200)),
        }
        Ok(())
    }

    /// The same checks without letting time pass, for a caller that sleeps on a condition
    /// variable, and how long it may sleep before it asks again.
    ///
    /// # Errors
    /// As [`Wait::pause`].
    pub fn check(&self) -> Result<Duration> {
        if self.cancellation.epoch.load(Ordering::Acquire) != self.epoch {
            return Err(Error::new(
                ErrorCode::Cancelled,
                format!("waiting for {} was cancelled", self.kind),
            ));
        }
        let waited = self.started.elapsed();
        if waited >= self.timeout {
            return Err(Error::new(
                ErrorCode::TimedOut,
                format!("waited {} ms for {}", waited.as_millis(), self.kind),
            ));
        }
        Ok((self.timeout - waited).min(Duration::from_millis(10)))
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.counters.wait(self.kind, self.started.elapsed());
    }
}
