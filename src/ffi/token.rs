//! Tokens: pins of a fault, given back once.
//!
//! A token keeps what it was faulted from alive, and comes out of the table once, so a second unpin
//! takes nobody's pin. Putting and taking touch a slot that the thread caches: no lock, no
//! allocation.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use std::ops::Range;

use super::allocation::AllocationEntry;
use super::bar::BarEntry;
use super::call::{call, invalid};
use super::device::VbarStream;
use super::model::ModelEntry;
use super::status::VbarStatus;
use super::tag;
use super::value::{Plain, read_array};
use crate::error::{Error, ErrorCode, Result};
use crate::memory::pager::{Hit, Hold};
use crate::runtime::{Runtime, Vbar};
use crate::slots::thread::{self, Thread};
use crate::slots::{Ending, FreeSlot, Ref, Tokens};
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

impl Source {
    #[inline(always)]
    fn end_on(self, thread: &Thread) {
        match self {
            Self::Bar(entry) => entry.end_on(thread),
            Self::Model(entry) => entry.end_on(thread),
            Self::Allocation(entry) => entry.end_on(thread),
        }
    }
}

/// Whether the token's holder is to write the bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Bytes {
    Valid,
    ToWrite,
}

pub(super) struct Held {
    /// Until the token's end.
    source: Option<Source>,
    hold: Hold,
    bytes: Bytes,
}

static TOKENS: Tokens<Held> = Tokens::new(tag::TOKEN);

/// Gives the thread's free slots of `TOKENS` back when it ends.
struct AtThreadEnd;

impl Drop for AtThreadEnd {
    fn drop(&mut self) {
        thread::with(|thread| thread.slots.close());
        // In a forked child another thread's copy may hold the table's lock for ever.
        if !crate::process::ending() {
            thread::with(|thread| TOKENS.give_back(&thread.slots, usize::MAX));
        }
    }
}

/// Opens the thread's cache, unless the thread is at its end.
fn open_cache(thread: &Thread) {
    thread_local!(static AT_END: AtThreadEnd = const { AtThreadEnd });
    if AT_END.try_with(|_| ()).is_ok() {
        thread.slots.open();
    }
}

#[cold]
fn refill(thread: &Thread) -> Option<FreeSlot> {
    open_cache(thread);
    TOKENS.refill(&thread.slots)
}

#[inline(always)]
fn keep(thread: &Thread, slot: FreeSlot) {
    if let Err(slot) = thread.slots.push(slot) {
        overflow(thread, slot);
    }
}

#[cold]
fn overflow(thread: &Thread, slot: FreeSlot) {
    open_cache(thread);
    TOKENS.overflow(&thread.slots, slot);
}

/// A token that is not given out yet: taken before the pins are, so that nothing can fail between.
pub(super) struct Reserved(Option<FreeSlot>);

impl Reserved {
    /// # Errors
    /// `TooManyPins` when every token is held.
    #[inline(always)]
    pub(super) fn take(thread: &Thread) -> Result<Self> {
        match thread.slots.pop().or_else(|| refill(thread)) {
            Some(slot) => Ok(Self(Some(slot))),
            None => Err(none_left()),
        }
    }

    /// Puts a plain hit's pin under the token.
    #[inline(always)]
    pub(super) fn hand_out_hit(mut self, bar: Ref<BarEntry>, hit: Hit) -> VbarToken {
        let slot = self.0.take().expect("reserved until it is given out");
        let make = || {
            let source = Some(Source::Bar(bar));
            Held { source, hold: hit.into_hold(), bytes: Bytes::Valid }
        };
        VbarToken { id: TOKENS.put(slot, make) }
    }

    /// Puts pins under the token.
    pub(super) fn hand_out(mut self, source: Source, hold: Hold, bytes: Bytes) -> VbarToken {
        let slot = self.0.take().expect("reserved until it is given out");
        VbarToken { id: TOKENS.put(slot, || Held { source: Some(source), hold, bytes }) }
    }
}

impl Drop for Reserved {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            unused(slot);
        }
    }
}

#[cold]
fn unused(slot: FreeSlot) {
    thread::with(|thread| keep(thread, slot));
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
pub(super) fn give_back(thread: &Thread, token: VbarToken, stream: Stream) -> Result<()> {
    let Some(held) = TOKENS.end(token.id) else { return Err(spent(token)) };
    let unpinned = held.unpin(stream);
    end(thread, held);
    unpinned
}

/// Ends a token whose pins were given back.
#[inline(always)]
fn end(thread: &Thread, mut held: Ending<'_, Held>) {
    if let Some(source) = held.source.take() {
        source.end_on(thread);
    }
    if let Some(slot) = held.free() {
        keep(thread, slot);
    }
}

/// Gives the pins of several tokens back: all of them, also when some are spent.
///
/// # Errors
/// As [`give_back`], of one of them.
fn give_back_all(thread: &Thread, tokens: &[VbarToken], stream: Stream) -> Result<()> {
    let mut result = Ok(());
    let mut ending = Vec::with_capacity(tokens.len());
    for token in tokens {
        match TOKENS.end(token.id) {
            Some(held) => ending.push(held),
            None => result = result.and(Err(spent(*token))),
        }
    }
    // Those of the first one's device go together, which are all unless a program mixes them.
    let runtime = ending.first().map(|held| held.runtime().clone());
    if let Some(runtime) = runtime {
        let together =
            |held: &&Ending<'_, Held>| held.bytes == Bytes::Valid && held.runtime().is(&runtime);
        let holds: Vec<_> =
            ending.iter().filter(together).map(|held| (held.vbar(), &held.hold)).collect();
        result = result.and(runtime.unpin_holds(&holds, stream));
        for held in ending.iter().filter(|held| !together(held)) {
            result = result.and(held.unpin(stream));
        }
    }
    for held in ending {
        end(thread, held);
    }
    result
}

/// Puts what a token holds under a new one, and the old one is spent: whoever knew it has nothing
/// any more.
///
/// # Errors
/// `StaleToken`, and `TooManyPins` when every token is held.
pub(super) fn renew(token: VbarToken) -> Result<VbarToken> {
    thread::with(|thread| {
        let reserved = Reserved::take(thread)?;
        let Some(ending) = TOKENS.end(token.id) else { return Err(spent(token)) };
        let (Held { source, hold, bytes }, slot) = ending.take();
        if let Some(slot) = slot {
            keep(thread, slot);
        }
        let source = source.expect("a token has its source until its end");
        Ok(reserved.hand_out(source, hold, bytes))
    })
}

/// Looks at what a token holds.
///
/// # Errors
/// `StaleToken`.
pub(super) fn look<R>(token: VbarToken, look: impl FnOnce(&mut Held) -> R) -> Result<R> {
    TOKENS.with(token.id, look).ok_or_else(|| spent(token))
}

impl Held {
    /// The VBAR that the pages are of.
    #[inline(always)]
    fn vbar(&self) -> &Vbar {
        match self.source.as_ref().expect("a token has its source until its end") {
            Source::Bar(entry) => &entry.vbar,
            Source::Model(entry) => entry.bar.vbar(),
            Source::Allocation(entry) => entry.allocation.vbar(),
        }
    }

    /// The device that the pages are of.
    pub(super) fn runtime(&self) -> &Runtime {
        self.vbar().runtime()
    }

    /// Device addresses of the pages.
    pub(super) fn addresses(&self) -> Range<u64> {
        let (base, page_bytes) = (self.vbar().base().0, self.runtime().page_size().bytes());
        let at = |page: u32| base + u64::from(page) * page_bytes;
        at(self.hold.pages.start)..at(self.hold.pages.end)
    }

    /// Whether the bytes wait for a commit.
    pub(super) fn is_to_be_written(&self) -> bool {
        self.bytes == Bytes::ToWrite
    }

    #[inline(always)]
    fn unpin(&self, stream: Stream) -> Result<()> {
        match self.bytes {
            Bytes::Valid => self.vbar().unpin_hold(&self.hold, stream),
            Bytes::ToWrite => self.abandon(stream),
        }
    }

    #[cold]
    fn abandon(&self, stream: Stream) -> Result<()> {
        match &self.source {
            Some(Source::Allocation(entry)) => entry.allocation.abandon(&self.hold, stream),
            _ => self.vbar().unpin_hold(&self.hold, stream),
        }
    }

    fn commit(&mut self, stream: Stream) -> Result<()> {
        match (&self.source, self.bytes) {
            (Some(Source::Allocation(entry)), Bytes::ToWrite) => {
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
    call(|| thread::with(|thread| give_back(thread, token, Stream(stream))))
}

/// Gives the pins of several tokens back, each as `vbar_token_unpin` does, and all of them whatever
/// the status: it is that of a token which failed. Of tokens for one stream and device it costs
/// less than one by one: a single fence covers all uses. Statuses: those of `vbar_token_unpin`;
/// `INVALID_ARGUMENT` for an array that cannot be, of which nothing is given back. Thread-safe.
///
/// # Safety
/// The array has `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_tokens_unpin(
    tokens: *const VbarToken,
    count: usize,
    stream: VbarStream,
) -> VbarStatus {
    call(|| {
        let tokens = read_array(tokens, count)?;
        thread::with(|thread| give_back_all(thread, tokens, Stream(stream)))
    })
}

/// Remembers that another stream uses the bytes too; call it after that work was enqueued. It makes
/// that stream wait for nothing: order it behind the fault's stream first, or fault once more for
/// it. Statuses: the common ones, the driver's, `UNSUPPORTED` for a stream that is being captured,
/// and for none. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_token_also_used_on(token: VbarToken, stream: VbarStream) -> VbarStatus {
    call(|| look(token, |held| held.vbar().hold_used_on(&held.hold, Stream(stream)))?)
}

/// Declares that everything that writes an allocation's bytes was enqueued on `stream`
/// (`VBAR_STREAM_NONE`: they are in place). The token keeps its pins. Statuses: the common ones,
/// the driver's, `UNSUPPORTED` for a stream that is being captured; `INVALID_ARGUMENT` unless a
/// refill was asked for; `STALE_TOKEN` after a forced end of run, which took the pins. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_token_commit(token: VbarToken, stream: VbarStream) -> VbarStatus {
    call(|| look(token, |held| held.commit(Stream(stream)))?)
}

#[cold]
fn spent(token: VbarToken) -> Error {
    let text =
        format!("token {:#x} holds no pins: given back, exported, or never given out", token.id);
    Error::new(ErrorCode::StaleToken, text)
}
