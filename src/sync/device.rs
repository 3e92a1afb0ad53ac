//! One device as the layers above share it: driver, context, fences, counters, options.
//!
//! Owns whether the device is lost, and the scope in which driver calls are made: the runtime's
//! context current, the thread in relaxed capture mode, both put back afterwards. Knows no pages.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::counters::{self, Counters};
use crate::driver::{
    CaptureMode, CaptureState, Context, Driver, DriverCode, DriverError, DriverResult,
};
use crate::error::{Error, ErrorCode, Result, Transient};
use crate::options::{ContextWaits, RuntimeOptions};
use crate::outcome::WaitKind;
use crate::process;
use crate::sync::context::WithoutEvent;
use crate::sync::fence::{Cover, Fences, StreamSlot};
use crate::sync::ticket::Ticket;
use crate::sync::wait::{Cancellation, Wait};
use crate::sync::{AtomicBool, AtomicU64, Relaxed};
use crate::units::{DeviceOrdinal, Stream};

/// What a program can do about a lost device.
const LOST_ADVICE: &str = "nothing on it can be used any more: end the process and start anew";

/// See the module's text.
pub struct Device {
    /// The door.
    pub driver: Arc<dyn Driver>,
    /// Which device.
    pub ordinal: DeviceOrdinal,
    /// The context that all work is done in.
    pub context: Context,
    /// Fences of that context.
    pub fences: Fences,
    /// What happened so far.
    pub counters: Counters,
    /// Ends waits.
    pub cancellation: Cancellation,
    /// As given at open; budget, headroom, time-out and threads may have changed since.
    pub options: RuntimeOptions,
    /// The device, then those that reach its memory; empty before they were asked for.
    reach: OnceLock<Vec<DeviceOrdinal>>,
    lost: AtomicBool,
    /// Whether the context has been one.
    entered: AtomicBool,
    /// Longest wait, in nanoseconds.
    wait_timeout: AtomicU64,
    /// The first error that said so.
    lost_by: OnceLock<Box<str>>,
}

/// Closing waits at least this long for the work of the context, whatever the time-out of other
/// waits is: nobody comes again, and what is not freed then never is.
const CLOSING_TIMEOUT_MIN: Duration = Duration::from_secs(30);

/// What it means that the context is none any more.
const CONTEXT_GONE: &str = "the context is gone with all that was in it: something in this process \
                            has reset the device (cudaDeviceReset) or destroyed the context; open \
                            the device again";

/// Before each further attempt at a call that returned a transient code.
const RETRY_PAUSES: [Duration; 3] =
    [Duration::ZERO, Duration::from_micros(50), Duration::from_millis(1)];

impl Device {
    /// A device whose context exists.
    #[must_use]
    pub fn new(
        driver: Arc<dyn Driver>,
        ordinal: DeviceOrdinal,
        context: Context,
        options: RuntimeOptions,
    ) -> Self {
        Self {
            fences: Fences::new(Arc::clone(&driver), context, options.record_interval),
            driver,
            ordinal,
            context,
            counters: Counters::default(),
            cancellation: Cancellation::default(),
            wait_timeout: AtomicU64::new(nanos(options.wait_timeout)),
            options,
            reach: OnceLock::new(),
            lost: AtomicBool::new(false),
            entered: AtomicBool::new(false),
            lost_by: OnceLock::new(),
        }
    }

    /// Longest time that waits which start from now on take. Longer than 584 years is as good.
    pub fn set_wait_timeout(&self, timeout: Duration) {
        self.wait_timeout.store(nanos(timeout), Relaxed);
    }

    /// Longest time that a wait takes.
    #[must_use]
    pub fn wait_timeout(&self) -> Duration {
        Duration::from_nanos(self.wait_timeout.load(Relaxed))
    }

    /// Whether calls may be made at all.
    ///
    /// # Errors
    /// `ProcessEnding` or `DeviceLost`.
    #[inline(always)]
    pub fn check(&self) -> Result<()> {
        process::check()?;
        if self.lost.load(Relaxed) {
            return Err(self.lost_error());
        }
        Ok(())
    }

    #[cold]
    fn lost_error(&self) -> Error {
        let why = self.lost_by.get().map_or("a sticky driver error", |why| why);
        let text = format!("device {} is lost: {why}; {LOST_ADVICE}", self.ordinal);
        Error::new(ErrorCode::DeviceLost, text)
    }

    /// Passes an error on, and remembers it when it means that the device is lost.
    pub fn note(&self, error: Error) -> Error {
        let gone = error.driver_code() == Some(DriverCode::CONTEXT_IS_DESTROYED);
        let error = if gone && !self.is_lost() { error.appended(CONTEXT_GONE) } else { error };
        if error.code() == ErrorCode::DeviceLost && !self.lost.swap(true, Relaxed) {
            let _first = self.lost_by.set(error.to_string().into_boxed_str());
            log::error!("device {} is lost: {error}; {LOST_ADVICE}", self.ordinal);
        }
        error
    }

    /// Makes a call, and makes it again while it fails with a transient code: at once, then after
    /// 50 us, then after 1 ms. Counted. No lock is held: it sleeps.
    ///
    /// # Errors
    /// What the call returns, the last time if that was transient each time.
    #[inline]
    pub fn retry<T, E: Transient>(
        &self,
        mut call: impl FnMut() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        match call() {
            Err(error) if error.is_transient() => self.retry_slowly(error, call),
            answer => answer,
        }
    }

    #[cold]
    fn retry_slowly<T, E: Transient>(
        &self,
        mut last: E,
        mut call: impl FnMut() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        for pause in RETRY_PAUSES {
            counters::add(&self.counters.driver_retries, 1);
            std::thread::sleep(pause);
            match call() {
                Err(error) if error.is_transient() => last = error,
                answer => return answer,
            }
        }
        Err(last)
    }

    /// The device, and all that reach its memory as peers, asked for once: whom access is given to
    /// that others' kernels and copies need as well.
    ///
    /// # Errors
    /// What the driver says; it is asked again then.
    pub fn reach(&self) -> Result<&[DeviceOrdinal]> {
        if let Some(reach) = self.reach.get() {
            return Ok(reach);
        }
        let count = self.driver.device_get_count().map_err(|error| self.note(error.into()))?;
        let mut reach = vec![self.ordinal];
        for other in (0..count).map(DeviceOrdinal).filter(|other| *other != self.ordinal) {
            let able = self.retry(|| self.driver.device_can_access_peer(other, self.ordinal));
            if able.map_err(|error| self.note(error.into()))? {
                reach.push(other);
            }
        }
        Ok(self.reach.get_or_init(|| reach))
    }

    /// Whether a sticky error was seen.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost.load(Relaxed)
    }

    /// Makes the context current and the capture mode relaxed until the scope is dropped.
    ///
    /// # Errors
    /// `ProcessEnding`, what the driver says; nothing has changed then.
    pub fn enter(&self) -> Result<Scope<'_>> {
        let context = self.enter_context()?;
        let relax = || self.driver.thread_exchange_stream_capture_mode(CaptureMode::Relaxed);
        let mode = self.retry(relax);
        let mode = mode.map_err(|error| self.note(error.into()))?;
        Ok(Scope { device: self, mode, _context: context })
    }

    /// Makes the context current until the scope is dropped.
    ///
    /// # Errors
    /// As [`Device::enter`].
    #[inline]
    pub fn enter_context(&self) -> Result<ContextScope<'_>> {
        process::check()?;
        let current = self.retry(|| self.driver.ctx_get_current());
        let current = current.map_err(|error| self.note(error.into()))?;
        if current == Some(self.context) {
            return Ok(ContextScope { device: self, restore: None });
        }
        let set = || self.retry(|| self.driver.ctx_set_current(Some(self.context)));
        set().or_else(|error| self.set_after(error, set))?;
        Ok(ContextScope { device: self, restore: Some(current) })
    }

    /// The context has been entered: should it be none later, it has gone.
    pub fn confirm_context(&self) {
        self.entered.store(true, Relaxed);
    }

    /// What to make of a context that cannot be entered. One that has been is gone when the driver
    /// says twice that it is none.
    #[cold]
    fn set_after(&self, error: DriverError, set: impl Fn() -> DriverResult<()>) -> Result<()> {
        let is_gone = |error: DriverError| {
            error.code == DriverCode::INVALID_CONTEXT && self.entered.load(Relaxed)
        };
        if !is_gone(error) {
            return Err(self.note(error.into()));
        }
        set().map_err(|error| match is_gone(error) {
            true => self.note(Error::from(error).losing().appended(CONTEXT_GONE)),
            false => self.note(error.into()),
        })
    }

    /// Whether the stream is being captured, and its slot. For handles whose meaning depends on
    /// the current context that context must be ours: see [`Device::enter_context`].
    ///
    /// # Errors
    /// What the driver says of the handle.
    #[inline(always)]
    pub fn inspect(&self, stream: Stream) -> Result<(CaptureState, Option<StreamSlot>)> {
        if stream.is_none() {
            return Ok((CaptureState::None, None));
        }
        let capture = self.capture_state(stream)?;
        if capture != CaptureState::None {
            return self.inspect_in_capture(stream, capture);
        }
        let slot = match self.fences.slot_of(stream) {
            Ok(slot) => slot,
            Err(error) => self.slot_after(stream, error)?,
        };
        if let Some(slot) = slot {
            self.fences.note_capture(slot, false);
        }
        if self.fences.is_capture_known() {
            self.end_capture(stream)?;
        }
        Ok((capture, slot))
    }

    /// A stream that is being captured must not be asked for its id.
    #[cold]
    fn inspect_in_capture(
        &self,
        stream: Stream,
        capture: CaptureState,
    ) -> Result<(CaptureState, Option<StreamSlot>)> {
        let slot = self.fences.slot_in_capture(stream)?;
        self.fences.note_capture(slot, true);
        Ok((capture, Some(slot)))
    }

    /// A stream runs: a capture of it that was known is over.
    #[cold]
    fn end_capture(&self, stream: Stream) -> Result<()> {
        let Some(slot) = self.fences.captured_slot(stream) else { return Ok(()) };
        let _scope = self.enter()?;
        self.retry(|| self.fences.end_capture(stream, slot))
    }

    /// The slot of a stream: see [`Fences::slot_of`].
    ///
    /// # Errors
    /// As [`Fences::slot_of`].
    pub fn slot_of(&self, stream: Stream) -> Result<Option<StreamSlot>> {
        self.retry(|| self.fences.slot_of(stream))
    }

    /// The slot of a stream that was not found at once.
    #[cold]
    fn slot_after(&self, stream: Stream, error: Error) -> Result<Option<StreamSlot>> {
        let slot = match error.is_transient() {
            true => self.retry_slowly(error, || self.fences.slot_of(stream)),
            false => Err(error),
        };
        match slot {
            Err(error) if error.code() == ErrorCode::Unsupported => self.make_slot(stream, error),
            Err(error) => {
                self.note_running(stream);
                Err(self.note(error))
            }
            found => found,
        }
    }

    /// A stream runs whose id was not to be had: that a capture of it is over is known all the
    /// same, and nothing is held back for it until it is used again.
    fn note_running(&self, stream: Stream) {
        if !self.fences.is_capture_known() {
            return;
        }
        if stream.is_default()
            && let Ok(slot) = self.fences.slot_in_capture(stream)
        {
            self.fences.note_capture(slot, false);
        }
        if let Err(error) = self.end_capture(stream) {
            let error = self.note(error);
            log::debug!("a stream counts as captured until it is used again: {error}");
        }
    }

    /// The slot of a stream when all are taken by streams that no record covers, most of them gone
    /// without having been retired: known to be done after a wait for the context.
    fn make_slot(&self, stream: Stream, error: Error) -> Result<Option<StreamSlot>> {
        if !self.may_wait_for_context() {
            return Err(error);
        }
        let _scope = self.enter()?;
        self.context_wait()?;
        self.fences.slot_of(stream).map_err(|error| self.note(error))
    }

    /// Whether the stream is being captured.
    ///
    /// # Errors
    /// What the driver says of the handle.
    #[inline(always)]
    pub fn capture_state(&self, stream: Stream) -> Result<CaptureState> {
        match self.driver.stream_is_capturing(stream) {
            Ok(state) => Ok(state),
            Err(error) => self.capture_state_after(stream, error),
        }
    }

    #[cold]
    fn capture_state_after(&self, stream: Stream, error: DriverError) -> Result<CaptureState> {
        let state = match error.is_transient() {
            true => self.retry_slowly(error, || self.driver.stream_is_capturing(stream)),
            false => Err(error),
        };
        match state {
            Err(error) if error.code == DriverCode::STREAM_CAPTURE_IMPLICIT => {
                Ok(CaptureState::Implicit)
            }
            state => state.map_err(|error| self.note(error.into())),
        }
    }

    /// Starts a wait of the CPU.
    #[must_use]
    pub fn wait(&self, kind: WaitKind) -> Wait<'_> {
        Wait::start(kind, &self.counters, &self.cancellation, self.wait_timeout())
    }

    /// Waits on the CPU until every ticket has passed.
    ///
    /// # Errors
    /// `TimedOut`, `Cancelled`, what the driver says, and `Unsupported` when no record covers a
    /// ticket and a wait for the whole context is not allowed.
    pub fn wait_passed(&self, tickets: &[Ticket], kind: WaitKind) -> Result<()> {
        let mut wait = None;
        for &ticket in tickets {
            loop {
                match self.fences.cover(ticket).map_err(|error| self.note(error))? {
                    Cover::Passed => break,
                    Cover::Recorded => wait.get_or_insert_with(|| self.wait(kind)).pause()?,
                    Cover::Unknown => self.context_wait()?,
                }
            }
        }
        Ok(())
    }

    /// Whether the CPU may wait for the whole context now: not while a known stream is being
    /// captured, whose capture that would break.
    #[must_use]
    pub fn may_wait_for_context(&self) -> bool {
        self.options.context_waits == ContextWaits::Allowed && !self.fences.is_capture_known()
    }

    /// Waits for the whole context, counted; with an older driver inside it, and then unbounded.
    ///
    /// # Errors
    /// As [`Device::context_wait_or`].
    pub fn context_wait(&self) -> Result<()> {
        self.context_wait_or(WithoutEvent::Synchronize)
    }

    /// As [`Device::context_wait`], with a choice of what an older driver means.
    ///
    /// # Errors
    /// `Unsupported` when the options forbid it, a known stream is being captured, or an older
    /// driver means a refusal; `TimedOut`, `Cancelled`, or what the driver says.
    pub fn context_wait_or(&self, without: WithoutEvent) -> Result<()> {
        if !self.may_wait_for_context() {
            let text = "a use that no fence covers, and waits for the context are off, or a stream \
                        is being captured";
            return Err(Error::new(ErrorCode::Unsupported, text));
        }
        process::check()?;
        self.fences.check_context_wait(without)?;
        let mut wait = self.wait(WaitKind::Context);
        self.fences.context_wait(&mut wait, without).map_err(|error| self.note(error))
    }

    /// Waits for the context because the program asked for it, or has no other way to memory,
    /// whatever the options say.
    ///
    /// # Errors
    /// `Unsupported` while a known stream is being captured; `TimedOut`, `Cancelled`, or what the
    /// driver says.
    pub fn context_wait_asked(&self) -> Result<()> {
        if self.fences.is_capture_known() {
            let text = "a stream is being captured, which a wait for the context would break";
            return Err(Error::new(ErrorCode::Unsupported, text));
        }
        let mut wait = self.wait(WaitKind::Context);
        let waited = self.fences.context_wait(&mut wait, WithoutEvent::Synchronize);
        waited.map_err(|error| self.note(error))
    }

    /// Waits for the context before everything is freed, whatever the options say.
    ///
    /// # Errors
    /// `TimedOut` after the longest wait, and 30 s at least; `Cancelled`; what the driver says.
    pub fn closing_wait(&self) -> Result<()> {
        let timeout = self.wait_timeout().max(CLOSING_TIMEOUT_MIN);
        let kind = WaitKind::Context;
        let mut wait = Wait::start(kind, &self.counters, &self.cancellation, timeout);
        let waited = self.fences.context_wait(&mut wait, WithoutEvent::Synchronize);
        waited.map_err(|error| self.note(error))
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Context and capture mode of the calling thread, put back on drop.
pub struct Scope<'a> {
    device: &'a Device,
    mode: CaptureMode,
    _context: ContextScope<'a>,
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        // In a wait's check the program may have forked.
        if process::ending() {
            return;
        }
        let driver = &self.device.driver;
        if let Err(error) =
            self.device.retry(|| driver.thread_exchange_stream_capture_mode(self.mode))
        {
            let error = self.device.note(error.into());
            log::warn!("putting the capture mode back: {error}");
        }
    }
}

/// Context of the calling thread, put back on drop.
pub struct ContextScope<'a> {
    device: &'a Device,
    restore: Option<Option<Context>>,
}

impl Drop for ContextScope<'_> {
    fn drop(&mut self) {
        let Some(context) = self.restore.filter(|_| !process::ending()) else { return };
        if let Err(error) = self.device.retry(|| self.device.driver.ctx_set_current(context)) {
            // Not noted: a context of the program's own that has gone meanwhile says nothing of
            // this device.
            log::warn!("putting the current context back: {error}");
        }
    }
}
