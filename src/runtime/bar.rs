//! A VBAR as a program holds it, and the guard of a fault.

use std::ops::Range;
use std::sync::Arc;

use super::{Allocation, Runtime};
use crate::error::{Error, ErrorCode, Result};
use crate::memory::pager::{BarMarks, Faulted, Freed, HeldPins, Hit, Hold, Residency};
use crate::memory::pins::Token;
use crate::memory::space::SpaceKind;
use crate::memory::vbar::{self, Bar};
use crate::outcome::{Reason, Refusal};
use crate::slots::Thread;
use crate::units::{DeviceAddress, Generation, PageIndex, Stream};

/// A virtual base address register: addresses for one model, memory only where it is needed.
///
/// A clone is another handle to the same VBAR; the last one to go closes it, which never blocks.
/// Any handle may close it before, with [`Vbar::close`], whatever other threads do with it.
#[derive(Clone)]
pub struct Vbar {
    inner: Arc<VbarInner>,
}

pub(super) struct VbarInner {
    pub(super) runtime: Runtime,
    pub(super) bar: Arc<Bar>,
}

/// What a fault came to.
#[derive(Debug)]
#[must_use = "a guard that is dropped at once pins nothing"]
pub enum Fault<G> {
    /// Resident, pinned by the guard, and valid for the stream given.
    Resident(G),
    /// As `Resident`, with pages in the host's memory: the device reads them over the link, at a
    /// small part of the speed of its own memory. Only with
    /// [`HostMapped::On`](crate::options::HostMapped), and only of a bound VBAR.
    ///
    /// A variant of its own, since it is a choice: read it where it is, copy it to where there is
    /// room, or drop the guard and compute on the host.
    HostMapped(G),
    /// Not resident, by decision; nothing has changed.
    Offloaded(Refusal),
}

impl<G> Fault<G> {
    /// The guard, or `None` when not all of the range is in the device's memory.
    pub fn resident(self) -> Option<G> {
        match self {
            Self::Resident(guard) => Some(guard),
            Self::HostMapped(_) | Self::Offloaded(_) => None,
        }
    }

    /// The guard, wherever the bytes are, or `None` when the range has no pins.
    pub fn readable(self) -> Option<G> {
        match self {
            Self::Resident(guard) | Self::HostMapped(guard) => Some(guard),
            Self::Offloaded(_) => None,
        }
    }

    /// Why the range is not resident, or `None` when it is.
    pub fn offloaded(&self) -> Option<Reason> {
        match self {
            Self::Resident(_) => None,
            Self::HostMapped(_) => Some(Reason::HostMapped),
            Self::Offloaded(refusal) => Some(refusal.reason),
        }
    }
}

/// What an end of run found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EndOfRun {
    /// Pages that had pins, with their number. With [`HeldPins::Release`] they have none now.
    pub held: Vec<(PageIndex, u32)>,
}

impl Vbar {
    pub(super) fn new(runtime: Runtime, bar: Arc<Bar>) -> Self {
        Self { inner: Arc::new(VbarInner { runtime, bar }) }
    }

    /// The number that messages call the VBAR by; no other VBAR of its runtime ever has it.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.bar().id
    }

    /// First address, a multiple of the page size.
    #[must_use]
    pub fn base(&self) -> DeviceAddress {
        self.bar().space.base
    }

    /// Length in bytes, whole pages.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bar().space.bytes
    }

    /// Whether the VBAR has addresses of the device. Without, every fault is offloaded.
    #[must_use]
    pub fn is_reserved(&self) -> bool {
        self.bar().space.kind == SpaceKind::Reserved
    }

    /// The runtime that the VBAR belongs to.
    #[must_use]
    pub fn runtime(&self) -> &Runtime {
        &self.inner.runtime
    }

    /// Takes the next `bytes` of a bare VBAR, 512-byte aligned. Allocations may share pages, and
    /// are given back with the VBAR.
    ///
    /// # Errors
    /// `NoAddresses` when they do not fit, `InvalidArgument` on a bound VBAR, `Closed`,
    /// `DeviceLost`, `ProcessEnding`; nothing is taken then.
    pub fn allocate(&self, bytes: u64) -> Result<Allocation> {
        let range = self.inner.runtime.pager().allocate(self.bar(), bytes)?;
        Ok(Allocation::new(self.clone(), range))
    }

    /// Makes a byte range resident, for work on `stream`, and pins it until the guard is dropped.
    ///
    /// On a bound VBAR its bytes are the file's. On a bare one they are what was last written while
    /// the pages kept their generations: see [`Guard::signature`], or use [`Vbar::allocate`], which
    /// keeps track of that.
    ///
    /// # Errors
    /// `InvalidArgument` for a range outside the VBAR, `Closed`, `TimedOut`, `Cancelled`,
    /// `TooManyPins`; `Io` and `FileChanged` of a bound VBAR; `DeviceLost`, `ProcessEnding`, and
    /// what the driver says. Nothing is pinned then.
    #[inline]
    pub fn fault(&self, bytes: Range<u64>, stream: Stream) -> Result<Fault<Guard<'_>>> {
        self.inner.fault(bytes, stream)
    }

    /// Gives memory of the VBAR back to the driver: from its end down to its floor, whole pages,
    /// lowering the watermark of a bare one. Waits for fences, never for pins. `u64::MAX` asks for
    /// everything.
    ///
    /// # Errors
    /// `Closed`, `Cancelled`, `DeviceLost`, `ProcessEnding`, or what the driver says.
    pub fn free_memory(&self, bytes: u64) -> Result<Freed> {
        self.inner.runtime.pager().free_memory(self.bar(), bytes)
    }

    /// Makes the VBAR the newest of its class and lifts its watermark to all pages.
    ///
    /// # Errors
    /// `Closed`, `DeviceLost`, `ProcessEnding`; nothing has changed then.
    pub fn prioritise(&self) -> Result<()> {
        self.inner.runtime.pager().prioritise(self.bar())
    }

    /// Makes the VBAR the oldest of its class.
    ///
    /// # Errors
    /// As [`Vbar::prioritise`].
    pub fn deprioritise(&self) -> Result<()> {
        self.inner.runtime.pager().deprioritise(self.bar())
    }

    /// Puts the VBAR into a class, 0 at first; a larger one is kept longer.
    ///
    /// # Errors
    /// As [`Vbar::prioritise`].
    pub fn set_class(&self, class: i32) -> Result<()> {
        self.inner.runtime.pager().set_class(self.bar(), class)
    }

    /// Pages below are not evicted. In pages, at most all of them; an end of run lifts it.
    ///
    /// # Errors
    /// As [`Vbar::prioritise`].
    pub fn set_floor(&self, pages: u32) -> Result<()> {
        self.inner.runtime.pager().set_floor(self.bar(), pages)
    }

    /// Sets a bare VBAR's watermark, in pages, and frees unpinned pages at or above it.
    ///
    /// # Errors
    /// `InvalidArgument` on a bound VBAR, whose pages are all faulted in; those of
    /// [`Vbar::free_memory`].
    pub fn set_watermark(&self, pages: u32) -> Result<()> {
        self.inner.runtime.pager().set_watermark(self.bar(), pages)
    }

    /// Class, watermark, floor and resident pages. Of a closed VBAR: the lowest class, no watermark
    /// and no floor, and as resident what its pins still keep.
    #[must_use]
    pub fn marks(&self) -> BarMarks {
        self.inner.runtime.pager().marks(self.bar())
    }

    /// Takes page-locked memory for a range, to save it once it is written; see
    /// [`Pager::prepare_save`](crate::memory::pager::Pager::prepare_save).
    ///
    /// # Errors
    /// As there.
    pub fn prepare_save(&self, bytes: Range<u64>) -> Result<()> {
        self.inner.runtime.pager().prepare_save(self.bar(), bytes)
    }

    /// Saves a range that was prepared and is pinned, behind the work on `stream`: its pages come
    /// back with its bytes; see [`Pager::save`](crate::memory::pager::Pager::save).
    ///
    /// # Errors
    /// As there.
    pub fn save(&self, bytes: Range<u64>, stream: Stream) -> Result<()> {
        self.inner.runtime.pager().save(self.bar(), bytes, stream)
    }

    /// Forgets what was saved of a range, which may be written then; see
    /// [`Pager::drop_saved`](crate::memory::pager::Pager::drop_saved).
    ///
    /// # Errors
    /// As there.
    pub fn drop_save(&self, bytes: Range<u64>) -> Result<()> {
        self.inner.runtime.pager().drop_saved(self.bar(), bytes)
    }

    /// Ends a run: see [`crate::memory::pager::Pager::end_of_run`].
    ///
    /// # Errors
    /// `Closed`, `DeviceLost`, `ProcessEnding`, and what the driver says of the stream.
    pub fn end_of_run(&self, stream: Stream, held: HeldPins) -> Result<EndOfRun> {
        let held = self.inner.runtime.pager().end_of_run(self.bar(), stream, held)?;
        Ok(EndOfRun { held })
    }

    /// Every page's state, from the first. `Resident` where the bytes have arrived: the driver is
    /// asked. A page is loaded from `Issued` on, whose bytes are there for whatever is enqueued
    /// behind the fault.
    #[must_use]
    pub fn residency(&self) -> Vec<Residency> {
        self.residency_of(0..u32::MAX)
    }

    /// As [`Vbar::residency`], of the pages of a range, as far as the VBAR has them.
    #[must_use]
    pub fn residency_of(&self, pages: Range<u32>) -> Vec<Residency> {
        self.inner.runtime.pager().residency(self.bar(), pages)
    }

    /// The first `limit` pages as characters: `.` absent, `f` filling, `i` on its way, `#`
    /// resident, `P` pinned, `h` in the host's memory, `!` evicting, `X` quarantined. Nobody is
    /// asked: `i` is what is not known to have arrived, as no fault has come for it since.
    #[must_use]
    pub fn draw(&self, limit: u32) -> String {
        vbar::draw(self.bar(), limit)
    }

    /// Closes the VBAR now, whatever handles and allocations of it there are, and never blocks:
    /// from here on every call on them returns `Closed`. Faults that are under way on other threads
    /// finish with their pins or return `Closed`. Pins that were given out stay good, guards and
    /// tokens alike: the pages keep their bytes until they are given back, and the VBAR goes with
    /// the last of them. Its addresses may belong to somebody else afterwards.
    ///
    /// Closing again does nothing but look whether what is left can go.
    pub fn close(&self) {
        self.inner.runtime.pager().close_bar(self.bar());
    }

    /// Whether the VBAR was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.bar().is_closed()
    }

    /// Closes the VBAR, as [`Vbar::close`] does, and waits until its memory is given back.
    ///
    /// # Errors
    /// `TimedOut` while pins of it are held; those of waiting. It is closed all the same.
    pub fn destroy_wait(self) -> Result<()> {
        self.close();
        self.inner.runtime.pager().wait_closed(self.bar())
    }

    /// Gives pins back that were taken out of a guard; `stream` as in [`Runtime::unpin`].
    ///
    /// # Errors
    /// As [`Guard::unpin`]; what the driver says of another stream.
    #[inline(always)]
    pub(crate) fn unpin_hold(&self, hold: &Hold, stream: Stream) -> Result<()> {
        self.inner.unpin_hold(hold, stream)
    }

    /// As [`Vbar::fault`] for a plain hit, its pin in the caller's hands; see [`Pager::hit`].
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub(crate) fn hit(
        &self,
        thread: &Thread,
        bytes: &Range<u64>,
        stream: Stream,
    ) -> Result<Option<Hit>> {
        let pages = self.bar().pages_of(bytes)?;
        self.inner.runtime.pager().hit(thread, self.bar(), &pages, stream)
    }

    /// As [`Vbar::fault`] for what is no plain hit, the pins in the caller's hands.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn fault_otherwise(
        &self,
        bytes: &Range<u64>,
        stream: Stream,
    ) -> Result<Faulted<Hold>> {
        let pages = self.bar().pages_of(bytes)?;
        self.inner.runtime.pager().fault_otherwise(self.bar(), pages, stream)
    }

    /// As [`Guard::also_used_on`].
    pub(crate) fn hold_used_on(&self, hold: &Hold, stream: Stream) -> Result<()> {
        self.inner.hold_used_on(hold, stream)
    }

    pub(super) fn bar(&self) -> &Arc<Bar> {
        &self.inner.bar
    }

    pub(super) fn inner(&self) -> &VbarInner {
        &self.inner
    }
}

impl VbarInner {
    #[inline(always)]
    pub(super) fn fault(&self, bytes: Range<u64>, stream: Stream) -> Result<Fault<Guard<'_>>> {
        let pages = self.bar.pages_of(&bytes)?;
        Ok(match self.runtime.pager().fault(&self.bar, pages, stream)? {
            Faulted::Resident(hold) => Fault::Resident(Guard::new(self, bytes, hold)),
            Faulted::HostMapped(hold) => Fault::HostMapped(Guard::new(self, bytes, hold)),
            Faulted::Offloaded(refusal) => Fault::Offloaded(refusal),
        })
    }

    #[inline(always)]
    fn unpin_hold(&self, hold: &Hold, stream: Stream) -> Result<()> {
        self.runtime.pager().unpin_on(&self.bar, hold, stream)
    }

    fn hold_used_on(&self, hold: &Hold, stream: Stream) -> Result<()> {
        self.runtime.pager().also_used_on(&self.bar, hold, stream).map(|_| ())
    }
}

impl Drop for VbarInner {
    fn drop(&mut self) {
        self.runtime.pager().close_bar(&self.bar);
    }
}

/// Pins on a byte range. Dropping it unpins: by then, all work that uses the range was enqueued on
/// the guard's stream, and the bytes stay until that work is done.
///
/// The stream given to the fault must be valid until the guard is gone.
pub struct Guard<'a> {
    vbar: &'a VbarInner,
    bytes: Range<u64>,
    hold: Option<Hold>,
}

impl<'a> Guard<'a> {
    pub(super) fn new(vbar: &'a VbarInner, bytes: Range<u64>, hold: Hold) -> Self {
        Self { vbar, bytes, hold: Some(hold) }
    }

    /// Address of the range's first byte.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.vbar.bar.space.base.offset(self.bytes.start)
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }

    /// Generations of the pages: equal to an earlier signature of the same range exactly when no
    /// page has lost its bytes since. Never repeats in a process.
    #[must_use]
    pub fn signature(&self) -> &[Generation] {
        self.hold.as_ref().map_or(&[], |hold| hold.generations.as_slice())
    }

    /// Remembers that another stream uses the range too; call it after that work was enqueued.
    ///
    /// # Errors
    /// What the driver says of the stream; `Unsupported` while it is being captured.
    pub fn also_used_on(&self, stream: Stream) -> Result<()> {
        let hold = self.hold.as_ref().expect("a guard holds until it is consumed");
        self.vbar.hold_used_on(hold, stream)
    }

    /// Unpins, as dropping does, and says what failed.
    ///
    /// # Errors
    /// `StaleToken` when the pins were released by a forced end of run.
    #[inline]
    pub fn unpin(mut self) -> Result<()> {
        let unpinned = self.give_back();
        self.hold = None;
        unpinned
    }

    /// In place: what a hit moves around is what it costs.
    #[inline]
    fn give_back(&self) -> Result<()> {
        match &self.hold {
            Some(hold) => self.vbar.runtime.pager().unpin(&self.vbar.bar, hold),
            None => Ok(()),
        }
    }

    /// Puts the pins aside under a token, to be given back with [`Runtime::unpin`].
    #[must_use = "the pages stay pinned until the token is given back"]
    pub fn into_token(mut self) -> Token {
        let hold = self.hold.take().expect("a guard holds until it is consumed");
        self.vbar.runtime.pins().put(Arc::clone(&self.vbar.bar), hold)
    }

    /// Takes the pins out of the guard's hands: whoever has them gives them back with
    /// [`Vbar::unpin_hold`].
    #[inline]
    pub(crate) fn into_hold(mut self) -> Hold {
        self.hold.take().expect("a guard holds until it is consumed")
    }

    /// Takes the guard apart: whoever has the pins gives them back.
    pub(super) fn into_parts(mut self) -> (&'a VbarInner, Hold) {
        (self.vbar, self.hold.take().expect("a guard holds until it is consumed"))
    }

    /// Gives the pins back without a fence: nothing was enqueued that uses the range.
    pub(super) fn release_unused(mut self) {
        if let Some(hold) = self.hold.take() {
            self.vbar.runtime.pager().release_unused(&self.vbar.bar, &hold);
        }
    }

    pub(crate) fn hold(&self) -> &Hold {
        self.hold.as_ref().expect("a guard holds until it is consumed")
    }
}

impl std::fmt::Debug for Guard<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Guard({} bytes at {})", self.bytes(), self.address())
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.give_back() {
            log_failed_unpin(&error);
        }
    }
}

/// Says what nobody is there to be told of.
#[cold]
pub(super) fn log_failed_unpin(error: &Error) {
    // A forced end of run said so already; anything else deserves to be seen.
    match error.code() {
        ErrorCode::StaleToken => log::debug!("unpin: {error}"),
        _ => log::warn!("unpin: {error}"),
    }
}
