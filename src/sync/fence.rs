//! Fences: points on streams, known by ticket, passed when an event says so.
//!
//! Each stream that uses pages has a *slot*: a monotone sequence over a ring of events. A use is
//! stamped with the sequence that the *next* record will get; a record raises that sequence before
//! it calls the driver, so every use stamped with it was enqueued before the event. An event is
//! recorded again only after it has passed. A query means "passed" only when it returns success.
//!
//! Only the caller's own call records, on the stream it gave: handles are never kept. This module
//! does not know pages; it never waits on the CPU (see `wait.rs` for that) except in
//! [`Fences::context_wait`], which `context` does.

#[cfg(all(test, vbar_loom))]
mod every_order;
mod hold;
mod known;

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::driver::{CaptureMode, Context, Driver, DriverCode, Event};
use crate::error::Result;
use crate::sync::clock::Ticks;
use crate::sync::context::{ContextFence, WithoutEvent};
use crate::sync::ticket::Ticket;
use crate::sync::wait::Wait;
use crate::sync::{
    AcqRel, Acquire, AtomicBool, AtomicU32, AtomicU64, Mutex, Relaxed, Release, raise,
};
use crate::units::Stream;

/// Streams of one context that can be known at a time.
pub const SLOT_COUNT: usize = if cfg!(vbar_loom) { 2 } else { 256 };

/// A slot of its own, behind the streams': it is never recorded on.
const UNRECORDED: u16 = SLOT_COUNT as u16;

const FREE: u64 = 0;
const RETIRED: u64 = u64::MAX;

/// A stream as this module knows it: its slot, and the id that tells whether the slot is still its.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StreamSlot {
    /// Never 0, which keeps an `Option` of it in two words.
    id: NonZeroU64,
    index: u16,
}

impl StreamSlot {
    /// Tells streams apart for as long as the process lives.
    #[inline(always)]
    #[must_use]
    pub fn stream_id(self) -> u64 {
        self.id.get()
    }

    /// What the slot's tickets are of.
    #[inline(always)]
    #[must_use]
    pub fn index(self) -> u16 {
        self.index
    }
}

/// What one look at many tickets has found: of each stream the first point that has not passed. A
/// later one on it has not either.
#[derive(Default)]
pub struct Look {
    waiting: Vec<Ticket>,
}

/// Apart from its neighbours by the two cache lines that processors fetch together.
#[repr(align(128))]
struct Slot {
    /// The stream's id plus one; `FREE` or `RETIRED`.
    id: AtomicU64,
    /// The sequence that the next record gets.
    next: AtomicU64,
    /// The highest sequence stamped on anything.
    stamped: AtomicU64,
    /// The highest sequence recorded, and known to have passed.
    recorded: AtomicU64,
    passed: AtomicU64,
    /// The clock's reading at the last record, or when the stream was first seen.
    recorded_at: AtomicU64,
    /// The stream was being captured when it was seen last.
    capturing: AtomicBool,
    /// Who holds the slot for its stream: see `hold`.
    holds: AtomicU32,
    /// Per other slot, the highest sequence that this stream waits for already.
    waited: Box<[AtomicU64]>,
    ring: Mutex<Ring>,
}

#[derive(Default)]
struct Ring {
    /// Recorded and not known to have passed, oldest first.
    pending: VecDeque<(u64, Event)>,
    free: Vec<Event>,
}

/// What a stream can do about a ticket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cover {
    /// It has passed.
    Passed,
    /// A record covers it: streams can wait for it.
    Recorded,
    /// No record covers it yet.
    Unknown,
}

/// The fences of one context.
pub struct Fences {
    driver: Arc<dyn Driver>,
    context: ContextFence,
    slots: Box<[Slot]>,
    insert: Mutex<()>,
    started: Instant,
    ticks: Ticks,
    /// Set while VBARs exceed the budget: every unpin records at once.
    eager: AtomicBool,
    /// Slots that are `capturing`.
    capture_count: AtomicU32,
    /// The id of the context's default stream plus one; 0 before it is known.
    default_id: AtomicU64,
}

impl Fences {
    /// Fences with no stream known yet.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, context: Context, record_interval: Duration) -> Self {
        let slots = (0..=SLOT_COUNT).map(|_| Slot::new()).collect();
        Self {
            context: ContextFence::new(Arc::clone(&driver), context),
            driver,
            slots,
            insert: Mutex::new(()),
            started: Instant::now(),
            ticks: Ticks::new(record_interval),
            eager: AtomicBool::new(false),
            capture_count: AtomicU32::new(0),
            default_id: AtomicU64::new(0),
        }
    }

    /// Whether unpins record at once (VBARs exceed the budget) or now and then.
    pub fn set_eager(&self, eager: bool) {
        // Not written when nothing changes: the hit path reads it.
        if self.eager.load(Relaxed) != eager {
            self.eager.store(eager, Relaxed);
        }
    }

    /// Whether VBARs exceed the budget, as far as was told.
    #[inline(always)]
    #[must_use]
    pub fn is_eager(&self) -> bool {
        self.eager.load(Relaxed)
    }

    /// Notes whether a stream is being captured: until it is seen again, or retired, that is what
    /// is known of it.
    #[inline(always)]
    pub fn note_capture(&self, slot: StreamSlot, capturing: bool) {
        if self.entry(slot).capturing.load(Relaxed) != capturing {
            self.change_capture(self.entry(slot), capturing);
        }
    }

    #[cold]
    fn change_capture(&self, slot: &Slot, capturing: bool) {
        if slot.capturing.swap(capturing, AcqRel) != capturing {
            match capturing {
                true => self.capture_count.fetch_add(1, AcqRel),
                false => self.capture_count.fetch_sub(1, AcqRel),
            };
        }
    }

    /// Whether a known stream was being captured when it was seen last. To wait for its context
    /// would break the capture.
    #[must_use]
    pub fn is_capture_known(&self) -> bool {
        self.capture_count.load(Acquire) > 0
    }

    /// The ticket that stands for all work enqueued on the stream up to now; the caller stamps it
    /// on what that work uses. No record covers it yet.
    #[inline(always)]
    #[must_use]
    pub fn stamp(&self, slot: StreamSlot) -> Ticket {
        let entry = self.entry(slot);
        let sequence = entry.next.load(Acquire);
        // Acquired, so that `confirm` sees what whoever takes the slot over wrote before.
        if entry.stamped.load(Acquire) < sequence {
            raise(&entry.stamped, sequence);
        }
        Ticket::new(slot.index, sequence)
    }

    /// A ticket for uses that no fence will ever cover: only a wait for the context passes it.
    #[must_use]
    pub fn unrecorded_stamp(&self) -> Ticket {
        Ticket::new(UNRECORDED, self.slots[UNRECORDED as usize].next.load(Acquire))
    }

    /// Whether a stamp stands: asked after it was published. Where it does not, it is to be made
    /// again with the slot that this returns.
    #[inline(always)]
    pub fn confirm(&self, slot: StreamSlot, stamped: Ticket) -> Result<Option<StreamSlot>> {
        match self.stands(slot, stamped) {
            true => Ok(None),
            false => self.find_or_insert(slot.id).map(Some),
        }
    }

    /// The stream's slot when that is another one by now.
    ///
    /// # Errors
    /// As [`Fences::slot_of`].
    pub fn moved(&self, slot: StreamSlot) -> Result<Option<StreamSlot>> {
        match self.is_still(slot) {
            true => Ok(None),
            false => self.find_or_insert(slot.id).map(Some),
        }
    }

    /// Whether the slot is the stream's and the stamp is of what its next record covers. A record
    /// since then may be that of a stream which had the slot in between.
    #[inline(always)]
    fn stands(&self, slot: StreamSlot, stamped: Ticket) -> bool {
        self.is_still(slot) && self.entry(slot).next.load(Acquire) == stamped.sequence()
    }

    /// Whether the ticket is known to have passed, without asking the driver.
    #[inline(always)]
    #[must_use]
    pub fn known_passed(&self, ticket: Ticket) -> bool {
        if ticket.is_none() {
            return true;
        }
        ticket.sequence() <= self.slots[ticket.slot() as usize].passed.load(Acquire)
    }

    /// Whether work on the stream comes after the ticket already: passed, own, or waited for.
    #[inline]
    #[must_use]
    pub fn ordered_before(&self, ticket: Ticket, slot: StreamSlot) -> bool {
        let waited = &self.entry(slot).waited[ticket.slot() as usize];
        self.known_passed(ticket)
            || (ticket.slot() == slot.index || waited.load(Acquire) >= ticket.sequence())
                // Asked last: a slot changes hands before anything else of it changes.
                && self.is_still(slot)
    }

    /// Whether the ticket has passed, or a record covers it, without asking the driver.
    #[must_use]
    pub fn is_recorded(&self, ticket: Ticket) -> bool {
        self.known_passed(ticket)
            || ticket.sequence() <= self.slots[ticket.slot() as usize].recorded.load(Acquire)
    }

    /// What is known of a ticket after asking the driver.
    ///
    /// # Errors
    /// Codes that say nothing about progress and are not a capture's: a lost device, a foreign
    /// context. Nothing has changed then.
    pub fn cover(&self, ticket: Ticket) -> Result<Cover> {
        if self.known_passed(ticket) {
            return Ok(Cover::Passed);
        }
        let entry = &self.slots[ticket.slot() as usize];
        if entry.recorded.load(Acquire) < ticket.sequence() {
            return Ok(Cover::Unknown);
        }
        self.poll(entry)?;
        Ok(if self.known_passed(ticket) { Cover::Passed } else { Cover::Recorded })
    }

    /// As [`Fences::cover`], for a look at many tickets, which takes no time: the driver is asked
    /// about each stream until it says once that something has not passed.
    ///
    /// # Errors
    /// As there.
    pub fn cover_in(&self, look: &mut Look, ticket: Ticket) -> Result<Cover> {
        let waiting = look.waiting.iter_mut().find(|first| first.slot() == ticket.slot());
        match waiting {
            Some(first) if first.sequence() <= ticket.sequence() => {
                let recorded = self.slots[ticket.slot() as usize].recorded.load(Acquire);
                let is_covered = ticket.sequence() <= recorded;
                Ok(if is_covered { Cover::Recorded } else { Cover::Unknown })
            }
            waiting => {
                let cover = self.cover(ticket)?;
                match waiting {
                    _ if cover == Cover::Passed => {}
                    Some(first) => *first = ticket,
                    None => look.waiting.push(ticket),
                }
                Ok(cover)
            }
        }
    }

    /// Lets later work on `stream` wait for the ticket. Returns false when no record covers it.
    ///
    /// # Errors
    /// What the driver says of the wait; the stream does not wait then.
    pub fn stream_wait(&self, stream: Stream, slot: StreamSlot, ticket: Ticket) -> Result<bool> {
        if self.ordered_before(ticket, slot) {
            return Ok(true);
        }
        let ring = self.slots[ticket.slot() as usize].ring.lock();
        let covering = ring.pending.iter().find(|(sequence, _)| *sequence >= ticket.sequence());
        let Some(&(sequence, event)) = covering else {
            // Between the check above and the lock it may have passed and left the ring.
            return Ok(self.known_passed(ticket));
        };
        self.driver.stream_wait_event(stream, event)?;
        drop(ring);
        // Remembered only to save later waits, and only while the slot cannot change hands.
        let own = self.entry(slot);
        if let Some(_ring) = own.ring.try_lock()
            && self.is_still(slot)
        {
            raise(&own.waited[ticket.slot() as usize], sequence);
        }
        Ok(true)
    }

    /// Records a fence on the stream now. Returns its ticket, which covers everything enqueued
    /// before the call.
    ///
    /// # Errors
    /// What the driver says of the record. Stamps stay uncovered until a later record.
    pub fn record(&self, stream: Stream, slot: StreamSlot) -> Result<Ticket> {
        let mut slot = slot;
        loop {
            let mut ring = self.entry(slot).ring.lock();
            if self.is_still(slot) {
                return self.record_locked(stream, slot, &mut ring);
            }
            drop(ring);
            slot = self.find_or_insert(slot.id)?;
        }
    }

    /// Records with the ring locked, so that the slot cannot change hands.
    fn record_locked(&self, stream: Stream, slot: StreamSlot, ring: &mut Ring) -> Result<Ticket> {
        let entry = self.entry(slot);
        let event = match ring.free.pop() {
            Some(event) => event,
            None => self.another_event()?,
        };
        // Raised before the driver is called: who still reads the old number enqueued before us.
        let sequence = entry.next.fetch_add(1, AcqRel);
        if let Err(error) = self.driver.event_record(event, stream) {
            ring.free.push(event);
            return Err(error.into());
        }
        ring.pending.push_back((sequence, event));
        entry.recorded.store(sequence, Release);
        entry.recorded_at.store(self.ticks.now(), Relaxed);
        self.ticks.learn();
        Ok(Ticket::new(slot.index, sequence))
    }

    /// An event that nobody waits for: one that a retired stream has left, else a new one.
    /// Otherwise a program whose streams come and go would have events in every slot.
    #[cold]
    fn another_event(&self) -> Result<Event> {
        for slot in self.slots.iter().filter(|slot| slot.id.load(Acquire) == RETIRED) {
            // The caller has a ring locked: it waits for no second one.
            let Some(mut ring) = slot.ring.try_lock() else { continue };
            if slot.id.load(Acquire) != RETIRED {
                continue;
            }
            self.drain(slot, &mut ring)?;
            if let Some(event) = ring.free.pop() {
                return Ok(event);
            }
        }
        Ok(self.driver.event_create()?)
    }

    /// Whether uses of the stream are without a record, and the interval since the last is over,
    /// whether VBARs exceed the budget or not.
    #[inline(always)]
    #[must_use]
    pub fn is_cover_due(&self, slot: StreamSlot) -> bool {
        let entry = self.entry(slot);
        entry.stamped.load(Relaxed) > entry.recorded.load(Relaxed)
            && self.ticks.is_over(entry.recorded_at.load(Relaxed))
    }

    /// As [`Fences::stamp`], where the slot is still the stream's.
    #[inline(always)]
    #[must_use]
    pub fn stamp_if_still(&self, slot: StreamSlot) -> Option<Ticket> {
        loop {
            let ticket = self.stamp(slot);
            if self.stands(slot, ticket) {
                return Some(ticket);
            }
            if !self.is_still(slot) {
                return None;
            }
        }
    }

    /// Whether it is time for a record on the stream: at once while VBARs exceed the budget, else
    /// at the interval.
    #[inline(always)]
    #[must_use]
    pub fn is_record_due(&self, slot: StreamSlot) -> bool {
        self.eager.load(Relaxed) || self.ticks.is_over(self.entry(slot).recorded_at.load(Relaxed))
    }

    /// Records on the stream, after asking what has passed on it. While everything fits, another
    /// thread that is at the stream's events is left alone: its record, or the next one, covers
    /// this thread's uses. While pages stream that will not do: the next one may come a layer
    /// later, and whoever takes a page's frame would wait for that layer too.
    ///
    /// # Errors
    /// As [`Fences::record`].
    pub fn record_in_passing(&self, stream: Stream, slot: StreamSlot) -> Result<()> {
        let entry = self.entry(slot);
        let ring = match self.eager.load(Relaxed) {
            true => Some(entry.ring.lock()),
            false => entry.ring.try_lock(),
        };
        let Some(mut ring) = ring else { return Ok(()) };
        if !self.is_still(slot) {
            drop(ring);
            return self.record(stream, slot).map(|_| ());
        }
        self.drain(entry, &mut ring)?;
        self.record_locked(stream, slot, &mut ring).map(|_| ())
    }

    /// Records on the stream if there are uses on it that no record covers yet.
    ///
    /// # Errors
    /// As [`Fences::record`].
    pub fn cover_stamps(&self, stream: Stream, slot: StreamSlot) -> Result<()> {
        let entry = self.entry(slot);
        if entry.stamped.load(Acquire) > entry.recorded.load(Acquire) {
            self.record(stream, slot)?;
        }
        Ok(())
    }

    /// Makes what the first wait for the context needs; the context is current.
    ///
    /// # Errors
    /// What the driver says.
    pub fn prepare_context_wait(&self) -> Result<()> {
        self.context.prepare()
    }

    /// Whether the context can be waited for, as far as is known.
    ///
    /// # Errors
    /// As [`ContextFence::check`].
    pub fn check_context_wait(&self, without: WithoutEvent) -> Result<()> {
        self.context.check(without)
    }

    /// Waits for the whole current context, after which every use stamped before is passed.
    ///
    /// # Errors
    /// As [`ContextFence::wait`]; nothing counts as passed then.
    pub fn context_wait(&self, wait: &mut Wait<'_>, without: WithoutEvent) -> Result<()> {
        let cuts: Vec<u64> = self.slots.iter().map(|slot| slot.next.fetch_add(1, AcqRel)).collect();
        self.context.wait(wait, without)?;
        for (slot, cut) in self.slots.iter().zip(cuts) {
            raise(&slot.passed, cut);
            raise(&slot.recorded, cut);
            let mut ring = slot.ring.lock();
            while ring.pending.front().is_some_and(|(sequence, _)| *sequence <= cut) {
                let (_, event) = ring.pending.pop_front().expect("just seen");
                ring.free.push(event);
            }
        }
        Ok(())
    }

    /// Destroys all events; the context is current, nothing uses the fences any more.
    pub fn destroy_events(&self) {
        let mut events = self.context.take_events();
        for slot in &self.slots {
            let mut ring = slot.ring.lock();
            let ring = &mut *ring;
            events
                .extend(ring.pending.drain(..).map(|(_, event)| event).chain(ring.free.drain(..)));
        }
        for event in events {
            let mut destroyed = self.driver.event_destroy(event);
            if destroyed.is_err_and(|error| error.code.is_transient()) {
                destroyed = self.driver.event_destroy(event);
            }
            if let Err(error) = destroyed {
                log::warn!("closing a runtime: {error}");
            }
        }
    }

    /// Time since the fences were made: the monotone clock of the pure modules.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn entry(&self, slot: StreamSlot) -> &Slot {
        &self.slots[slot.index as usize]
    }

    /// Whether every use of the slot's stream is known to have passed, so that another stream can
    /// take the slot over (`known`).
    fn is_idle(&self, slot: &Slot, ring: &mut Ring) -> Result<bool> {
        self.drain(slot, ring)?;
        Ok(slot.stamped.load(Acquire) <= slot.passed.load(Acquire)
            && slot.recorded.load(Acquire) <= slot.passed.load(Acquire))
    }

    /// Whether the slot is still the stream's.
    #[inline(always)]
    #[must_use]
    pub fn is_still(&self, slot: StreamSlot) -> bool {
        self.entry(slot).id.load(Acquire) == slot.id.get()
    }

    fn poll(&self, slot: &Slot) -> Result<()> {
        self.drain(slot, &mut slot.ring.lock())
    }

    fn drain(&self, slot: &Slot, ring: &mut Ring) -> Result<()> {
        if ring.pending.is_empty() {
            return Ok(());
        }
        // Events may be asked while anything is captured, by a thread that says so.
        let _relaxed = Relaxation::new(&*self.driver);
        while let Some(&(sequence, event)) = ring.pending.front() {
            match self.driver.event_query(event) {
                Ok(()) => {}
                Err(error) if error.code == DriverCode::NOT_READY => return Ok(()),
                Err(error) if error.code.is_capture() => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            ring.pending.pop_front();
            ring.free.push(event);
            raise(&slot.passed, sequence);
        }
        Ok(())
    }
}

/// The calling thread in relaxed capture mode until it is dropped, as far as the driver lets it.
struct Relaxation<'a> {
    driver: &'a dyn Driver,
    before: Option<CaptureMode>,
}

impl<'a> Relaxation<'a> {
    fn new(driver: &'a dyn Driver) -> Self {
        let before = driver.thread_exchange_stream_capture_mode(CaptureMode::Relaxed).ok();
        Self { driver, before }
    }
}

impl Drop for Relaxation<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before
            && let Err(error) = self.driver.thread_exchange_stream_capture_mode(before)
        {
            log::warn!("putting the capture mode back: {error}");
        }
    }
}

impl Slot {
    fn new() -> Self {
        Self {
            id: AtomicU64::new(FREE),
            next: AtomicU64::new(1),
            stamped: AtomicU64::new(0),
            recorded: AtomicU64::new(0),
            passed: AtomicU64::new(0),
            recorded_at: AtomicU64::new(0),
            capturing: AtomicBool::new(false),
            holds: AtomicU32::new(0),
            waited: (0..=SLOT_COUNT).map(|_| AtomicU64::new(0)).collect(),
            ring: Mutex::new(Ring::default()),
        }
    }
}
