//! A trace of what the library did and when: spans on the threads that called it, and on the GPU.
//!
//! Off by default, and then a span costs one relaxed load. [`start`] turns it on for the process,
//! [`stop`] turns it off and gives the [`Trace`], which writes itself in the trace event format
//! that Perfetto and Chrome read. Spans nest by scope: each is a [`Guard`] that ends when dropped.
//!
//! Owns the clock of the spans and what is in one; `lane` keeps the spans of each thread, `taken`
//! is what was kept, `chrome` writes it. Knows nothing of pages and files: who instruments passes
//! numbers. Recording waits for nobody and is never an error: what finds no room is dropped and
//! counted.
//!
//! A forked child records nothing, and what its parent had recorded is not its own to take.

mod chrome;
mod kind;
mod lane;
mod taken;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::OnceLock;
use std::time::Instant;

pub use chrome::FILE_START;
pub use kind::{Counter, Kind, Record, What};
pub use lane::{is_on, start, stop};
pub(crate) use taken::RESIDENT;
pub use taken::{Thread, Total, Trace};

use crate::process;
use crate::sync::Relaxed;
use crate::sync::fixed::AtomicU64;
use crate::units::{DeviceOrdinal, Stream};

/// A reading of the trace's clock, in nanoseconds: monotone, one for all threads, never 0. Its
/// zero is the first reading of the process. Times of the GPU are told in it.
#[must_use]
pub fn clock_ns() -> u64 {
    at_ns(Instant::now())
}

/// The reading of an instant; those before the first reading are taken for that.
fn at_ns(instant: Instant) -> u64 {
    static ZERO: OnceLock<Instant> = OnceLock::new();
    let nanos = instant.saturating_duration_since(*ZERO.get_or_init(Instant::now)).as_nanos();
    u64::try_from(nanos).unwrap_or(u64::MAX).max(1)
}

/// As [`clock_ns`], or 0 while no trace is recorded: for [`Guard::since`].
#[inline]
#[must_use]
pub fn begin() -> u64 {
    if is_on() { clock_ns() } else { 0 }
}

/// Begins a span on the calling thread, which ends when the guard is dropped.
#[inline]
pub fn span(kind: Kind) -> Guard {
    Guard::of(What::Span(kind))
}

/// Something that takes no time; it is recorded when the guard is dropped, with the time of this
/// call.
#[inline]
pub fn mark(kind: Kind) -> Guard {
    Guard::of(What::Mark(kind))
}

/// The value of a counter from now on, of a device or (`None`) of the process.
#[inline]
pub fn value(counter: Counter, device: Option<DeviceOrdinal>, value: u64) {
    let mut guard = Guard::of(What::Value(counter)).bytes(value);
    if let Some(open) = &mut guard.open {
        open.record.device = device;
    }
}

/// A wait of the CPU that began at `started` and ends now.
#[inline]
pub(crate) fn wait(what: &'static str, started: Instant) {
    if is_on() {
        drop(span(Kind::Wait).since(at_ns(started)).detail(what));
    }
}

/// Page-locked bytes of the process.
static LOCKED_BYTES: AtomicU64 = AtomicU64::new(0);

/// So many bytes were page-locked.
pub(crate) fn lock_bytes(bytes: usize) {
    let before = LOCKED_BYTES.fetch_add(bytes as u64, Relaxed);
    value(Counter::Locked, None, before + bytes as u64);
}

/// So many bytes are page-locked no more.
pub(crate) fn unlock_bytes(bytes: usize) {
    let before = LOCKED_BYTES.fetch_sub(bytes as u64, Relaxed);
    value(Counter::Locked, None, before.saturating_sub(bytes as u64));
}

/// A use of pages on the GPU, from fault to unpin as the stream came to them, by timed events. The
/// times are readings of [`clock_ns`]; an end before the begin counts as the begin.
pub fn gpu_span(
    device: DeviceOrdinal,
    stream: Stream,
    bar: u32,
    pages: Range<u32>,
    begin_ns: u64,
    end_ns: u64,
) {
    let guard = Guard::of(What::OnDevice(Kind::GpuUse)).device(device).stream(stream);
    guard.pages(bar, pages).between(begin_ns, end_ns);
}

/// A copy of so many bytes as the GPU made it; times as in [`gpu_span`].
pub fn gpu_copy(
    device: DeviceOrdinal,
    stream: Stream,
    bar: u32,
    pages: Range<u32>,
    bytes: u64,
    time_ns: Range<u64>,
) {
    let guard = Guard::of(What::OnDevice(Kind::GpuCopy)).device(device).stream(stream);
    guard.pages(bar, pages).bytes(bytes).between(time_ns.start, time_ns.end);
}

/// A span under way. Stays on its thread: dropped there, it is recorded.
#[must_use = "a span ends when its guard is dropped"]
pub struct Guard {
    /// `None` when no trace was recorded as it began.
    open: Option<Open>,
    /// Spans of a thread nest, which those that change threads would not.
    _own_thread: PhantomData<*const ()>,
}

struct Open {
    session: u32,
    record: Record,
}

impl Guard {
    #[inline]
    fn of(what: What) -> Self {
        let open = if is_on() { Open::new(what) } else { None };
        Self { open, _own_thread: PhantomData }
    }

    /// Says which device it is about.
    #[inline]
    pub fn device(mut self, device: DeviceOrdinal) -> Self {
        if let Some(open) = &mut self.open {
            open.record.device = Some(device);
        }
        self
    }

    /// Says which pages of which VBAR it is about.
    #[inline]
    pub fn pages(mut self, bar: u32, pages: Range<u32>) -> Self {
        if let Some(open) = &mut self.open {
            (open.record.bar, open.record.pages) = (Some(bar), (pages.start, pages.end));
        }
        self
    }

    /// Says how many bytes it is about.
    #[inline]
    pub fn bytes(mut self, bytes: u64) -> Self {
        if let Some(open) = &mut self.open {
            open.record.bytes = bytes;
        }
        self
    }

    /// Says which stream it is about.
    #[inline]
    pub fn stream(mut self, stream: Stream) -> Self {
        if let Some(open) = &mut self.open {
            open.record.stream = stream;
        }
        self
    }

    /// A word more: what was waited for, where bytes came from, what it came to.
    #[inline]
    pub fn detail(mut self, detail: &'static str) -> Self {
        self.note(detail);
        self
    }

    /// As [`Guard::detail`], for what is known later only.
    #[inline]
    pub fn note(&mut self, detail: &'static str) {
        if let Some(open) = &mut self.open {
            open.record.detail = detail;
        }
    }

    /// It began earlier, at a reading of [`begin`]; 0 leaves it as it is. Nothing else of the
    /// thread may have begun since that has not ended.
    #[inline]
    pub fn since(mut self, begin_ns: u64) -> Self {
        if let Some(open) = &mut self.open
            && begin_ns != 0
        {
            open.record.start_ns = begin_ns;
        }
        self
    }

    /// Records it with these times.
    fn between(mut self, begin_ns: u64, end_ns: u64) {
        if let Some(open) = &mut self.open {
            (open.record.start_ns, open.record.end_ns) = (begin_ns, end_ns.max(begin_ns));
        }
    }
}

impl Open {
    #[cold]
    fn new(what: What) -> Option<Self> {
        if process::ending() {
            return None;
        }
        // The thread becomes known before the clock is read: that takes time once.
        let session = lane::enter()?;
        let now = clock_ns();
        Some(Self { session, record: Record::new(what, now) })
    }

    #[cold]
    fn end(mut self) {
        if process::ending() {
            return;
        }
        if matches!(self.record.what, What::Span(_)) {
            self.record.end_ns = clock_ns();
        }
        lane::push(self.session, self.record);
    }
}

impl Drop for Guard {
    #[inline]
    fn drop(&mut self) {
        if let Some(open) = self.open.take() {
            open.end();
        }
    }
}

#[cfg(all(test, not(vbar_loom)))]
mod tests;
