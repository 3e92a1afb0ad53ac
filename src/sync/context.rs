//! Waiting for a whole context: by an event where the driver records one, else inside the driver.
//!
//! The event (`ctx_record_event`, CUDA 12.5) is polled like every other fence, so that the wait is
//! bounded, can be cancelled, and stops nobody's launches. An older driver only has
//! `ctx_synchronize`, which is none of that: the calling thread is gone until the work is done. It
//! is the fallback, told once in the log, and only for who allows it. Knows no streams and no
//! tickets.

use std::sync::Arc;

use crate::driver::{Context, Driver, DriverCode, DriverError, Event};
use crate::error::{Error, ErrorCode, Result};
use crate::process;
use crate::sync::wait::Wait;
use crate::sync::{AtomicBool, Mutex, Relaxed};

/// What to do where the driver cannot record an event for a context.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WithoutEvent {
    /// Wait inside the driver, with no time-out and no way to cancel.
    Synchronize,
    /// Do not wait.
    Refuse,
}

/// A record that fails with a transient code is tried this often.
const ATTEMPTS: u32 = 4;

/// Waits for one context; the context is current on the thread that calls.
pub struct ContextFence {
    driver: Arc<dyn Driver>,
    context: Context,
    /// Events that nobody waits for: never recorded, or passed.
    idle: Mutex<Vec<Event>>,
    /// The driver has refused to record.
    unsupported: AtomicBool,
}

impl ContextFence {
    /// Of a context that exists.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, context: Context) -> Self {
        let (idle, unsupported) = (Mutex::default(), AtomicBool::new(false));
        Self { driver, context, idle, unsupported }
    }

    /// Makes the event of the first wait, before memory is so short that the driver has none.
    ///
    /// # Errors
    /// What the driver says.
    pub fn prepare(&self) -> Result<()> {
        let event = self.driver.event_create()?;
        self.idle.lock().push(event);
        Ok(())
    }

    /// Waits until everything that was enqueued in the context before the call is done.
    ///
    /// # Errors
    /// `TimedOut` and `Cancelled` of `wait`, `Unsupported` when it may only be done without an
    /// event and that is refused, and what the driver says. Nothing is known of the work then.
    pub fn wait(&self, wait: &mut Wait<'_>, without: WithoutEvent) -> Result<()> {
        if !self.unsupported.load(Relaxed) {
            match self.record(wait)? {
                Some(event) => return self.wait_for(event, wait),
                None => self.note_unsupported(),
            }
        }
        self.check(without)?;
        self.driver.ctx_synchronize().map_err(Error::from)
    }

    /// Whether a wait is possible, as far as is known.
    ///
    /// # Errors
    /// `Unsupported` when the driver cannot record and that means a refusal.
    pub fn check(&self, without: WithoutEvent) -> Result<()> {
        if without == WithoutEvent::Refuse && self.unsupported.load(Relaxed) {
            let text = "the driver records no event for a context (CUDA 12.5 does)";
            return Err(Error::new(ErrorCode::Unsupported, text));
        }
        Ok(())
    }

    /// An event that holds the context's work; `None` when the driver cannot.
    fn record(&self, wait: &mut Wait<'_>) -> Result<Option<Event>> {
        let idle = self.idle.lock().pop();
        let event = idle.map_or_else(|| self.driver.event_create(), Ok)?;
        let recorded = self.record_in(event, wait);
        if !matches!(recorded, Ok(true)) {
            self.idle.lock().push(event);
        }
        Ok(recorded?.then_some(event))
    }

    /// Whether the driver can and has.
    fn record_in(&self, event: Event, wait: &mut Wait<'_>) -> Result<bool> {
        let mut left = ATTEMPTS - 1;
        loop {
            match self.driver.ctx_record_event(self.context, event) {
                Ok(()) => return Ok(true),
                Err(error) if error.code == DriverCode::NOT_SUPPORTED => return Ok(false),
                Err(error) if error.code.is_transient() && left > 0 => wait.pause()?,
                Err(error) => return Err(error.into()),
            }
            left -= 1;
        }
    }

    fn wait_for(&self, event: Event, wait: &mut Wait<'_>) -> Result<()> {
        loop {
            let ended = match self.driver.event_query(event) {
                Ok(()) => {
                    self.idle.lock().push(event);
                    return Ok(());
                }
                Err(error) if says_nothing(error) => wait.pause(),
                Err(error) => Err(error.into()),
            };
            if ended.is_err() {
                self.abandon(event);
                return ended;
            }
        }
    }

    /// Destroys an event that has not passed: one that is recorded anew must have.
    fn abandon(&self, event: Event) {
        if process::ending() {
            return;
        }
        if let Err(error) = self.driver.event_destroy(event) {
            log::debug!("an event of an abandoned wait stays: {error}");
        }
    }

    fn note_unsupported(&self) {
        if !self.unsupported.swap(true, Relaxed) {
            log::warn!(
                "the driver records no event for a context (CUDA 12.5 does): waits for the context \
                 have no time-out and cannot be cancelled"
            );
        }
    }

    /// Events to destroy when the fence is no longer used.
    pub(super) fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut *self.idle.lock())
    }
}

/// Whether the answer leaves open what has passed.
fn says_nothing(error: DriverError) -> bool {
    error.code == DriverCode::NOT_READY || error.code.is_capture()
}
