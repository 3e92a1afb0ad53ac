//! Waiting of the CPU: every wait is counted, timed, bounded and can be cancelled.
//!
//! A [`Wait`] is made when a call starts to wait for one kind of thing, and asked again and again.
//! It ends by itself at its time-out, by another thread through its [`Cancellation`], and by the
//! waiting thread's own [`WaitCheck`]. Whoever asks it holds no lock: the check is the program's
//! code. It knows nothing of what is waited for.

use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::counters::{Counters, Waiter};
use crate::error::{Error, ErrorCode, Result};
use crate::outcome::WaitKind;
use crate::process;
use crate::sync::{AtomicU64, Ordering, yield_now};
use crate::trace;

/// Asked on a waiting thread whether it should go on waiting: [`ControlFlow::Break`] ends the wait
/// with `Cancelled`.
pub type WaitCheck = Box<dyn FnMut() -> ControlFlow<()>>;

/// A thread's check is called at most this often.
pub const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// The check of a thread, and when it was called last.
#[derive(Default)]
struct ThreadCheck {
    check: RefCell<Option<WaitCheck>>,
    called: Cell<Option<Instant>>,
    /// Raised by each `set_wait_check`: tells a check that replaced itself.
    changes: Cell<u64>,
}

thread_local! {
    static CHECK: ThreadCheck = ThreadCheck::default();
}

/// Sets, or takes away, the check of the calling thread, and returns the one before. From now on
/// it is called on this thread while a call of the library waits, about each 5 ms, with no lock of
/// the library held; when nothing waits it costs nothing. A program that has to look after signals
/// (an interpreter, say) does it here.
///
/// The check may call the library; it is not called again by waits of its own, and may set another
/// check or none. It should not ask for what its thread was about to get: the call that waits may
/// hold pages, or an allocation that it is filling, which then come free at the time-out only. A
/// check that panics is taken away, and the wait ends with `Cancelled`.
pub fn set_wait_check(check: Option<WaitCheck>) -> Option<WaitCheck> {
    // A thread whose locals are gone already waits for nothing more.
    let set = CHECK.try_with(|own| {
        own.changes.set(own.changes.get() + 1);
        own.called.set(None);
        own.check.replace(check)
    });
    set.unwrap_or(None)
}

thread_local! {
    /// How many [`Unasked`] the thread has.
    static UNASKED: Cell<u32> = const { Cell::new(0) };
}

/// While it lives, waits of the calling thread do not call its check: for calls that come with a
/// lock of their caller's held, which whoever the check waits for may be waiting for in turn.
pub struct Unasked(());

impl Unasked {
    /// From now on.
    #[expect(clippy::new_without_default, reason = "it is a scope and no value")]
    #[inline]
    #[must_use]
    pub fn new() -> Self {
        UNASKED.set(UNASKED.get() + 1);
        Self(())
    }
}

impl Drop for Unasked {
    #[inline]
    fn drop(&mut self) {
        UNASKED.set(UNASKED.get() - 1);
    }
}

/// Calls the thread's check if it is time to; whether the wait should go on.
fn ask_thread() -> ControlFlow<()> {
    if UNASKED.get() > 0 {
        return ControlFlow::Continue(());
    }
    CHECK.try_with(ThreadCheck::ask).unwrap_or(ControlFlow::Continue(()))
}

impl ThreadCheck {
    fn ask(&self) -> ControlFlow<()> {
        // Out of its place while it is called: what it calls itself does not call it.
        let Some(mut check) = self.take_due() else { return ControlFlow::Continue(()) };
        let changes = self.changes.get();
        let answer = catch_unwind(AssertUnwindSafe(&mut check));
        self.called.set(Some(Instant::now()));
        match answer {
            Ok(answer) => {
                if self.changes.get() == changes {
                    self.check.replace(Some(check));
                }
                answer
            }
            Err(_) => {
                log::error!("a wait's check panicked and is not called again");
                ControlFlow::Break(())
            }
        }
    }

    fn take_due(&self) -> Option<WaitCheck> {
        if self.called.get().is_some_and(|called| called.elapsed() < CHECK_INTERVAL) {
            return None;
        }
        self.check.take()
    }
}

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

    /// Lets time pass: yields at first, then sleeps, 20 to 200 us. The caller holds no lock.
    ///
    /// # Errors
    /// `TimedOut` past the time-out, `Cancelled` when another thread or this thread's own check
    /// said so, `ProcessEnding`.
    pub fn pause(&mut self) -> Result<()> {
        self.check()?;
        self.rounds = self.rounds.saturating_add(1);
        match self.rounds {
            0..=16 => yield_now(),
            _ if cfg!(vbar_loom) => yield_now(),
            17..=64 => std::thread::sleep(Duration::from_micros(20)),
            _ => std::thread::sleep(Duration::from_micros(200)),
        }
        Ok(())
    }

    /// The same checks without letting time pass, for a caller that sleeps on a condition variable,
    /// and how long it may sleep before it asks again. It takes its lock after this call.
    ///
    /// # Errors
    /// As [`Wait::pause`].
    pub fn check(&self) -> Result<Duration> {
        let ended = ask_thread();
        // The check may have forked: what is waited for is the parent's.
        process::check()?;
        let cancelled = self.cancellation.epoch.load(Ordering::Acquire) != self.epoch;
        if cancelled || ended.is_break() {
            let text = format!("waiting for {} was cancelled", self.kind);
            return Err(Error::new(ErrorCode::Cancelled, text));
        }
        let waited = self.started.elapsed();
        if waited >= self.timeout {
            let text = format!(
                "waited {} ms for {}, which is the longest that is allowed; where work on the \
                 device takes so long, set a longer wait time-out",
                waited.as_millis(),
                self.kind
            );
            return Err(Error::new(ErrorCode::TimedOut, text));
        }
        Ok((self.timeout - waited).min(CHECK_INTERVAL))
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.counters.wait(self.kind, self.started.elapsed(), waiter());
        trace::wait(self.kind.word(), self.started);
    }
}
fn waiter() -> Waiter {
    if process::is_own_thread() { Waiter::Library } else { Waiter::Program }
}
