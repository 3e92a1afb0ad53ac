//! Tokens: pins of a fault, given back once.
//!
//! A token keeps what it was faulted from alive, and comes out of the table once, so a second unpin
//! takes nobody's pin. Putting and taking touch a slot that the thread caches: no lock, no
//! allocation.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use std::cell::RefCell;
use std::ops::Range;

use super::allocation::AllocationEntry;
use super::bar::BarEntry;
use super::call::{call, invalid};
use super::device::VbarStream;
use super::model::ModelEntry;
use super::status::VbarStatus;
use super::tag;
use super::value::Plain;
use crate::error::{Error, ErrorCode, Result};
use crate::memory::pager::{Hit, Hold};
use crate::runtime::Runtime;
use crate::slots::{FreeSlot, Ref, SlotCache, Tokens};
use crate::units::Stream;

/// Pins of one fault, given back once. 0 is none; ids are never used again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct VbarToken {
    /// The id.
    pub id: u64,
}

// SAFETY: integers.
unsafe impl Plain for VbarToken {}

/// What a token's pages belong to.
pub(super) enum Source {
    Bar(Ref<BarEntry>),
    Model(Ref<ModelEntry>),
    Allocation(Ref<AllocationEntry>),
}

/// Whether the token's holder is to write the bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Bytes {
    Valid,
    ToWrite,
}

pub(super) struct Held {
    source: Source,
    hold: Hold,
    bytes: Bytes,
}

static TOKENS: Tokens<Held> = Tokens::new(tag::TOKEN);

thread_local! {
    static CACHE: RefCell<ThreadCache> = RefCell::default();
}

/// The thread's free slots of `TOKENS`, given back when it ends.
#[derive(Default)]
struct ThreadCache(SlotCache);

impl Drop for ThreadCache {
    fn drop(&mut self) {
        // In a forked child another thread's copy may hold the table's lock for ever.
        if !crate::process::ending() {
            TOKENS.give_back(&mut self.0, usize::MAX);
        }
    }
}

/// With the thread's cache, or one for this call at a thread's end.
#[inline(always)]
fn with_cache<R>(work: impl FnOnce(&mut SlotCache) -> R) -> R {
    let mut work = Some(work);
    let mut once = |cache: &mut SlotCache| work.take().map(|work| work(cache));
    let done = CACHE.try_with(|cache| once(&mut cache.borrow_mut().0)).ok().flatten();
    done.or_else(|| once(&mut ThreadCache::default().0)).expect("one of the two did it")
}

/// A token that is not given out yet: taken before the pins are, so that nothing can fail between.
pub(super) struct Reserved(Option<FreeSlot>);

impl Reserved {
    /// # Errors
    /// `TooManyPins` when every token is held.
    #[inline(always)]
    pub(super) fn take() -> Result<Self> {
        match with_cache(|cache| TOKENS.reserve(cache)) {
            Some(slot) => Ok(Self(Some(slot))),
            None => Err(none_left()),
        }
    }

    /// Puts a plain hit's pin under the token.
    #[inline(always)]
    pub(super) fn hand_out_hit(mut self, bar: Ref<BarEntry>, hit: Hit) -> VbarToken {
        let slot = self.0.take().expect("reserved until it is given out");
        let make = || Held { source: Source::Bar(bar), hold: hit.into_hold(), bytes: Bytes::Valid };
        VbarToken { id: TOKENS.put(slot, make) }
    }

    /// Puts pins under the token.
    pub(super) fn hand_out(mut self, source: Source, hold: Hold, bytes: Bytes) -> VbarToken {
        let slot = self.0.take().expect("reserved until it is given out");
        VbarToken { id: TOKENS.put(slot, || Held { source, hold, bytes }) }
    }
}

impl Drop for Reserved {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            with_cache(|cache| TOKENS.keep(cache, slot));
        }
    }
}

#[cold]
fn none_left() -> Error {
    Error::new(ErrorCode::TooManyPins, "16.7 million tokens are held")
}

/// Gives the pins of a token back.
///
/// # Errors
/// `StaleToken`, and those of giving back.
#[inline(always)]
pub(super) fn give_back(token: VbarToken, stream: Stream) -> Result<()> {
    let Some((unpinned, slot)) = TOKENS.end(token.id, |held| held.unpin(stream)) else {
        return Err(spent(token));
    };
    if let Some(slot) = slot {
        with_cache(|cache| TOKENS.keep(cache, slot));
    }
    unpinned
}

/// Looks at what a token holds.
///
/// # Errors
/// `StaleToken`.
pub(super) fn look<R>(token: VbarToken, look: impl FnOnce(&mut Held) -> R) -> Result<R> {
    TOKENS.with(token.id, look).ok_or_else(|| spent(token))
}

impl Held {
    /// The device that the pages are of.
    pub(super) fn runtime(&self) -> &Runtime {
        match &self.source {
            Source::Bar(entry) => entry.vbar.runtime(),
            Source::Model(entry) => entry.bar.vbar().runtime(),
            Source::Allocation(entry) => entry.allocation.runtime(),
        }
    }

    /// Device addresses of the pages.
    pub(super) fn addresses(&self) -> Range<u64> {
        let base = match &self.source {
            Source::Bar(entry) => entry.vbar.base().0,
            Source::Model(entry) => entry.bar.vbar().base().0,
            Source::Allocation(entry) => {
                entry.allocation.address().0 - entry.allocation.range().start
            }
        };
        let page_bytes = self.runtime().page_size().bytes();
        let at = |page: u32| base + u64::from(page) * page_bytes;
        at(self.hold.pages.start)..at(self.hold.pages.end)
    }

    /// Whether the bytes wait for a commit.
    pub(super) fn is_to_be_written(&self) -> bool {
        self.bytes == Bytes::ToWrite
    }

    #[inline(always)]
    fn unpin(&self, stream: Stream) -> Result<()> {
        let hold = &self.hold;
        match &self.source {
            Source::Bar(entry) => entry.vbar.unpin_hold(hold, stream),
            Source::Model(entry) => entry.bar.vbar().unpin_hold(hold, stream),
            Source::Allocation(entry) => match self.bytes {
                Bytes::Valid => entry.allocation.unpin_hold(hold, stream),
                Bytes::ToWrite => entry.allocation.abandon(hold, stream),
            },
        }
    }

    fn used_on(&self, stream: Stream) -> Result<()> {
        match &self.source {
            Source::Bar(entry) => entry.vbar.hold_used_on(&self.hold, stream),
            Source::Model(entry) => entry.bar.vbar().hold_used_on(&self.hold, stream),
            Source::Allocation(entry) => entry.allocation.hold_used_on(&self.hold, stream),
        }
    }

    fn commit(&mut self, stream: Stream) -> Result<()> {
        match (&self.source, self.bytes) {
            (Source::Allocation(entry), Bytes::ToWrite) => {
                entry.allocation.commit_hold(&self.hold, stream)?;
                self.bytes = Bytes::Valid;
                Ok(())
            }
            _ => Err(invalid("the token is of no fault that asked for a refill")),
        }
    }
}

/// Gives the pins of a token back, once. `stream` is the one that it was faulted for, which lives
/// still; all work that uses the bytes was enqueued on it before, and they stay until that is done.
/// `VBAR_STREAM_NONE` where that stream was destroyed meanwhile: then the pages go last. Another
/// stream is one that used them too. The pins are given back also when a status says that recording
/// the use failed. A token that was to be committed asks for a refill again. Statuses: the common
/// ones, the driver's, `UNSUPPORTED` for another stream that is being captured; `STALE_TOKEN` also
/// when an end of run took the pins. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_token_unpin(token: VbarToken, stream: VbarStream) -> VbarStatus {
    call(|| give_back(token, Stream(stream)))
}

/// Remembers that another stream uses the bytes too; call it after that work was enqueued. It makes
/// that stream wait for nothing: order it behind the fault's stream first, or fault once more for
/// it. Statuses: the common ones, the driver's, `UNSUPPORTED` for a stream that is being captured,
/// and for none. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_token_also_used_on(token: VbarToken, stream: VbarStream) -> VbarStatus {
    call(|| look(token, |held| held.used_on(Stream(stream)))?)
}

/// Declares that everything that writes an allocation's bytes was enqueued on `stream`
/// (`VBAR_STREAM_NONE`: they are in place). The token keeps its pins. Statuses: the common ones,
/// the driver's, `UNSUPPORTED` for a stream that is being captured; `INVALID_ARGUMENT` unless a
/// refill was asked for. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_token_commit(token: VbarToken, stream: VbarStream) -> VbarStatus {
    call(|| look(token, |held| held.commit(Stream(stream)))?)
}

#[cold]
fn spent(token: VbarToken) -> Error {
    let text = format!("token {:#x} holds no pins: given back, or never given out", token.id);
    Error::new(ErrorCode::StaleToken, text)
}
