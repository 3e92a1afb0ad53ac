//! An allocation in a bare VBAR: knows whether its bytes are still those that were written.
//!
//! Valid means that a fill was committed and every page still has the generation that it had then.
//! One caller fills at a time. The state is one atomic word with a count of its changes, so that a
//! hit takes no lock and sees generations and fence of one commit.

use std::ops::Range;

use super::Runtime;
use super::bar::{Fault, Guard, Vbar};
use crate::driver::CaptureState;
use crate::error::{Error, ErrorCode, Result};
use crate::memory::pager::Hold;
use crate::outcome::{Reason, Refusal, WaitKind};
use crate::sync::ticket::Ticket;
use crate::sync::{AcqRel, Acquire, AtomicU64, Relaxed, Release};
use crate::units::{DeviceAddress, Generation, Stream};

/// Never written.
const NEW: u64 = 0;
/// One caller writes.
const FILLING: u64 = 1;
/// The bytes are those of the last commit, while the pages keep their generations.
const VALID: u64 = 2;
/// Written and not valid: who writes next comes after what was enqueued before.
const STALE: u64 = 3;
const KIND: u64 = 3;
const CHANGE: u64 = KIND + 1;

/// The word after a change to `kind`.
fn changed(word: u64, kind: u64) -> u64 {
    (word & !KIND).wrapping_add(CHANGE) | kind
}

/// A piece of a bare VBAR with contents of its own.
pub struct Allocation {
    vbar: Vbar,
    range: Range<u64>,
    state: AtomicU64,
    /// Generations of the pages at the last commit.
    generations: Box<[AtomicU64]>,
    /// After this ticket the committed bytes are in place.
    ready: AtomicU64,
}

/// What a fault of an allocation came to.
#[derive(Debug)]
#[must_use = "a guard that is dropped at once pins nothing"]
pub enum AllocationFault<'a> {
    /// The bytes are those of the last commit, valid for the stream given.
    Resident(Guard<'a>),
    /// Mapped and pinned, the bytes undefined: write them on the stream given, then commit.
    Refill(FillGuard<'a>),
    /// Not resident, by decision; nothing has changed.
    Offloaded(Refusal),
    /// Another caller is filling the allocation; nothing has changed.
    Busy,
}

impl Allocation {
    pub(super) fn new(vbar: Vbar, range: Range<u64>) -> Self {
        let pages = vbar.bar().page_size.pages_of(&range);
        let generations = pages.map(|_| AtomicU64::new(0)).collect();
        let (state, ready) = (AtomicU64::new(NEW), AtomicU64::new(0));
        Self { vbar, range, state, generations, ready }
    }

    /// Address of the first byte; it never changes.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.vbar.bar().space.base.offset(self.range.start)
    }

    /// The runtime that the allocation's VBAR belongs to.
    #[must_use]
    pub fn runtime(&self) -> &Runtime {
        self.vbar.runtime()
    }

    /// The VBAR that the allocation is a piece of.
    #[must_use]
    pub fn vbar(&self) -> &Vbar {
        &self.vbar
    }

    /// Its bytes in the VBAR.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Makes the allocation resident for work on `stream`. When its bytes are not valid the stream
    /// is the one that will write them.
    ///
    /// # Errors
    /// As [`super::Vbar::fault`].
    pub fn fault(&self, stream: Stream) -> Result<AllocationFault<'_>> {
        let guard = match self.vbar.fault(self.range.clone(), stream)? {
            Fault::Resident(guard) => guard,
            // Only a bound VBAR has pages there, and that has no allocations.
            Fault::HostMapped(guard) => {
                guard.release_unused();
                return Ok(self.refuse(Reason::HostMapped));
            }
            Fault::Offloaded(refusal) => return Ok(AllocationFault::Offloaded(refusal)),
        };
        loop {
            let state = self.state.load(Acquire);
            if state & KIND == FILLING {
                guard.release_unused();
                return Ok(AllocationFault::Busy);
            }
            let kept = self.pages_kept(guard.signature());
            let ready = Ticket::from_bits(self.ready.load(Acquire));
            if state & KIND == VALID && kept == guard.signature().len() {
                if self.state.load(Acquire) != state {
                    continue;
                }
                self.order(&guard, &[ready])?;
                return Ok(AllocationFault::Resident(guard));
            }
            if self.is_captured(&guard)? {
                guard.release_unused();
                return Ok(self.refuse(Reason::Capture));
            }
            let filling = changed(state, FILLING);
            if self.state.compare_exchange(state, filling, AcqRel, Acquire).is_ok() {
                let fill = FillGuard { allocation: self, guard: Some(guard) };
                // Pages that were not lost may still be in use: the writer comes after that. A
                // forced end of run gives them other generations and leaves them where they are,
                // so the generations do not tell; a page that was mapped anew has no users.
                // Never written does not mean never used: the pages may have been faulted raw.
                let mut users = fill.users();
                users.push(ready);
                let mut ordered = self.order(fill.guard(), &users);
                let unknown = |error: &Error| error.code() == ErrorCode::Unsupported;
                if ordered.as_ref().is_err_and(unknown) && self.settle_unknown()? {
                    ordered = self.order(fill.guard(), &users);
                }
                match ordered {
                    // No fence covers a use, and the CPU may not wait for the context.
                    Err(error) if unknown(&error) => {
                        return Ok(self.refuse(Reason::FenceUnknown));
                    }
                    ordered => ordered?,
                }
                return Ok(AllocationFault::Refill(fill));
            }
        }
    }

    /// As [`Allocation::fault`], waiting while another caller fills.
    ///
    /// # Errors
    /// As [`Allocation::fault`], `TimedOut` and `Cancelled`.
    pub fn fault_wait(&self, stream: Stream) -> Result<AllocationFault<'_>> {
        let mut wait = None;
        loop {
            match self.fault(stream)? {
                AllocationFault::Busy => {}
                outcome => return Ok(outcome),
            }
            let device = self.vbar.runtime().device();
            let wait = wait.get_or_insert_with(|| device.wait(WaitKind::Claim));
            wait.pause().map_err(|error| self.told(error))?;
        }
    }

    /// The bytes are no good any more: the next fault asks for a refill, which comes after all uses
    /// whose guards were given back. Whoever still holds a guard may read what the next filler
    /// writes: give guards back first. Does nothing during a fill.
    pub fn invalidate(&self) {
        let state = self.state.load(Acquire);
        if state & KIND == VALID {
            let _ = self.state.compare_exchange(state, changed(state, STALE), AcqRel, Relaxed);
        }
    }

    /// As [`FillGuard::commit`], for a fill that was taken out of its guard; it goes on when this
    /// fails.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn commit_hold(&self, hold: &Hold, stream: Stream) -> Result<()> {
        let ready = self.record(hold, stream)?;
        self.note_valid(hold.generations.as_slice(), ready);
        Ok(())
    }

    /// Ends a fill that was taken out of its guard, as dropping the guard does.
    ///
    /// # Errors
    /// As [`Allocation::unpin_hold`].
    pub(crate) fn abandon(&self, hold: &Hold, stream: Stream) -> Result<()> {
        // Before the state changes, so that the next writer finds the stamp.
        let unpinned = self.vbar.unpin_hold(hold, stream);
        self.settle(STALE);
        unpinned
    }

    /// A fence behind the writes. The pages remember it: the stream may be another one than the
    /// fault's, and nobody may take the frames before the writes are done.
    fn record(&self, hold: &Hold, stream: Stream) -> Result<Ticket> {
        let ready = match stream.is_none() {
            true => {
                self.vbar.runtime().device().check()?;
                Ticket::NONE
            }
            false => self.vbar.runtime().pager().also_used_on(self.vbar.bar(), hold, stream)?,
        };
        // After the fence, which the writes have to have whoever gets the pages next.
        self.check_held(hold).map(|()| ready)
    }

    /// Whether the pins are the hold's still. A forced end of run may come right after: then the
    /// pages have other generations than those that are committed, and the next fault refills.
    fn check_held(&self, hold: &Hold) -> Result<()> {
        let pages = self.vbar.bar().table.pages(hold.pages.clone());
        let mut pages = pages.zip(hold.generations.as_slice());
        if pages.all(|((_, page), generation)| page.word().generation == *generation) {
            return Ok(());
        }
        let text = "its pins were released by force, by an end of run: fault and write again";
        Err(self.told_of("commit", Error::new(ErrorCode::StaleToken, text)))
    }

    fn note_valid(&self, generations: &[Generation], ready: Ticket) {
        for (place, generation) in self.generations.iter().zip(generations) {
            place.store(generation.0, Release);
        }
        self.ready.store(ready.to_bits(), Release);
        self.settle(VALID);
    }

    fn refuse(&self, reason: Reason) -> AllocationFault<'_> {
        self.vbar.runtime().device().counters.refuse(reason);
        let pages = self.vbar.bar().page_size.pages_of(&self.range);
        let needed_bytes = pages.len() as u64 * self.vbar.bar().page_size.bytes();
        AllocationFault::Offloaded(Refusal { reason, needed_bytes })
    }

    /// Ends a fill; nobody else changes the state during one.
    fn settle(&self, kind: u64) {
        let state = self.state.load(Relaxed);
        self.state.store(changed(state, kind), Release);
    }

    /// Pages that have their committed generations; pinned, they keep them.
    fn pages_kept(&self, signature: &[Generation]) -> usize {
        let committed = self.generations.iter().map(|generation| generation.load(Acquire));
        committed.zip(signature).filter(|(committed, now)| *committed == now.0).count()
    }

    /// An error of a step that is not the pager's.
    #[cold]
    fn told(&self, error: Error) -> Error {
        self.told_of("fault", error)
    }

    #[cold]
    fn told_of(&self, call: &str, error: Error) -> Error {
        let Range { start, end } = self.range;
        let bar = self.vbar.bar().id;
        let asked = format_args!("{call} of the allocation at {start}..{end} of VBAR {bar}");
        self.vbar.runtime().pager().told(error, asked)
    }

    fn is_captured(&self, guard: &Guard<'_>) -> Result<bool> {
        self.capture_of(guard).map_err(|error| self.told(error))
    }

    fn capture_of(&self, guard: &Guard<'_>) -> Result<bool> {
        let stream = guard.hold().stream;
        if stream.is_none() {
            return Ok(false);
        }
        let device = self.vbar.runtime().device();
        let _context = device.enter_context()?;
        Ok(device.capture_state(stream)? != CaptureState::None)
    }

    /// Lets the guard's stream, or the CPU, come after the tickets.
    fn order(&self, guard: &Guard<'_>, tickets: &[Ticket]) -> Result<()> {
        self.order_after(guard, tickets).map_err(|error| self.told(error))
    }

    fn settle_unknown(&self) -> Result<bool> {
        let _scope = self.vbar.runtime().device().enter()?;
        self.vbar.runtime().pager().settle_unknown().map_err(|error| self.told(error))
    }

    fn order_after(&self, guard: &Guard<'_>, tickets: &[Ticket]) -> Result<()> {
        let hold = guard.hold();
        let device = self.vbar.runtime().device();
        let ordered = |ticket: &&Ticket| match hold.slot {
            Some(slot) => device.fences.ordered_before(**ticket, slot),
            None => device.fences.known_passed(**ticket),
        };
        if tickets.iter().all(|ticket| ordered(&ticket)) {
            return Ok(());
        }
        let _scope = device.enter()?;
        let capture = match hold.stream.is_none() {
            true => CaptureState::None,
            false => device.capture_state(hold.stream)?,
        };
        let pager = self.vbar.runtime().pager();
        tickets
            .iter()
            .filter(|ticket| !ordered(ticket))
            .try_for_each(|ticket| pager.order_after(*ticket, hold.stream, hold.slot, capture))
    }
}

/// The right to write an allocation's bytes. Dropped without a commit, the next fault asks for a
/// refill again.
#[derive(Debug)]
pub struct FillGuard<'a> {
    allocation: &'a Allocation,
    guard: Option<Guard<'a>>,
}

impl<'a> FillGuard<'a> {
    /// Address of the first byte.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.allocation.address()
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.allocation.range.end - self.allocation.range.start
    }

    /// Declares that everything that writes the bytes was enqueued on `stream`, and keeps the pins.
    /// With `Stream::NONE` the bytes are in place already.
    ///
    /// # Errors
    /// `StaleToken` when the pins were taken back by a forced end of run, and what the driver says
    /// of the fence; the allocation asks for a refill again then.
    pub fn commit(mut self, stream: Stream) -> Result<Guard<'a>> {
        let ready = self.allocation.record(self.guard().hold(), stream)?;
        let guard = self.guard.take().expect("a fill guard holds until it is consumed");
        self.allocation.note_valid(guard.signature(), ready);
        Ok(guard)
    }

    /// Takes the fill out of the guard's hands: whoever has it commits or abandons it.
    pub(crate) fn into_hold(mut self) -> Hold {
        self.guard.take().expect("a fill guard holds until it is consumed").into_hold()
    }

    pub(crate) fn guard(&self) -> &Guard<'a> {
        self.guard.as_ref().expect("a fill guard holds until it is consumed")
    }

    /// What may still use the pages.
    fn users(&self) -> Vec<Ticket> {
        let table = &self.allocation.vbar.bar().table;
        table.pages(self.guard().hold().pages.clone()).flat_map(|(_, page)| page.users()).collect()
    }
}

impl Drop for FillGuard<'_> {
    fn drop(&mut self) {
        // The guard unpins with a stamp: writes may have been enqueued. Before the state changes,
        // so that the next writer finds the stamp.
        if let Some(guard) = self.guard.take() {
            drop(guard);
            self.allocation.settle(STALE);
        }
    }
}

impl std::fmt::Debug for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Allocation({} bytes at {})", self.range.end - self.range.start, self.address())
    }
}
