//! The pager: the one place where pages change hands.
//!
//! Owns the state of a device's memory behind one lock, and serves faults: a hit pins pages by
//! their words alone; a miss plans the whole request under the lock (`plan`), carries it out with
//! the lock released (`act`), and gives memory back under pressure (`release`); `uses` remembers
//! who used a page. Waits happen with no lock held. Decides nothing that `policy` and `budget` can
//! decide.

mod act;
mod ahead;
mod arena;
mod claim;
mod close;
mod follow;
mod hands;
mod hold;
mod host;
mod host_mapped;
mod many;
mod marks;
mod messages;
mod patience;
mod plan;
mod poison;
mod poll;
mod reaping;
mod reclaim;
mod release;
mod saves;
mod state;
mod traced;
mod uses;

use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

use crate::copy::fill::Filler;
use crate::counters;
use crate::driver::CaptureState;
use crate::error::Result;
use crate::memory::budget::Budget;
use crate::memory::page_table::{Page, PageState, Pin};
use crate::memory::vbar::Bar;
use crate::options::{Eviction, HEADROOM_DEFAULT, Threads};
use crate::outcome::{Reason, Refusal, WaitKind};
use crate::slots::thread::{self, Thread};
use crate::sync::device::Device;
use crate::sync::fence::StreamSlot;
use crate::sync::ticket::Ticket;
use crate::sync::{Condvar, Mutex};
use crate::trace::{self, Kind};
use crate::units::{Generation, PageIndex, Stream};

pub use ahead::{Fetched, PageOf, Role, Spent, Stop, Wanted};
pub use arena::{GiveTo, Returned};
pub use close::is_work_pending;
pub use follow::Follow;
pub use hold::{Generations, Hit, Hold};
pub use many::Request;
pub use marks::{BarMarks, HeldPins, MemoryNumbers, Residency};
pub use reclaim::Reclaim;
pub use release::{Freed, Shortfall};

use act::{Failure, Writer};
use hands::{Grip, InHand};
use host_mapped::Host;
use plan::{Planned, Protected, Standing, Usable};
pub(in crate::memory) use poll::Poll;
use reaping::Reaping;
use release::Excess;
use state::State;
use {hold::too_many_pins, patience::Patience, reclaim::Reclaimers};

/// See the module's text.
pub struct Pager {
    /// The device, shared with the layers above.
    pub device: Arc<Device>,
    state: Mutex<State>,
    changed: Condvar,
    filler: Mutex<Option<Arc<Filler>>>,
    /// Whether the filler has threads that read; locked while that changes.
    reading: Mutex<Threads>,
    reclaim: Reclaimers,
    follower: OnceLock<Weak<dyn Follow>>,
    host: Host,
}

/// What a fault came to.
#[derive(Debug)]
pub enum Faulted<T> {
    /// Every page is resident, pinned, and valid for the stream given.
    Resident(T),
    /// As `Resident`, some pages from the host's memory.
    HostMapped(T),
    /// Nothing has changed.
    Offloaded(Refusal),
}

/// How the caller's stream can be used.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Waits are placed on the stream.
    Stream,
    /// There is no stream, or it is being captured: the CPU waits.
    Cpu,
}

impl Pager {
    /// A pager with no VBAR and no frame.
    #[must_use]
    pub fn new(device: Arc<Device>) -> Self {
        let options = &device.options;
        let page_bytes = options.page_size.bytes();
        let jitter = u64::from(std::process::id());
        let headroom = options.headroom_bytes.unwrap_or(HEADROOM_DEFAULT);
        let budget = Budget::new(options.budget_bytes, headroom, page_bytes, jitter);
        Self {
            state: Mutex::new(State::new(budget, options.poison)),
            changed: Condvar::new(),
            filler: Mutex::new(None),
            reading: Mutex::new(options.threads.unwrap_or_default()),
            reclaim: Reclaimers::default(),
            follower: OnceLock::new(),
            host: Host::of(&device),
            device,
        }
    }

    /// Makes pages resident and pins them, for use on `stream`.
    ///
    /// # Errors
    /// `Closed`, `TimedOut`, `Cancelled`, `TooManyPins`, `Io` and `FileChanged` of a bound VBAR,
    /// `DeviceLost`, `ProcessEnding`, and what the driver says. Nothing is pinned then.
    #[inline(always)]
    pub fn fault(
        &self,
        bar: &Arc<Bar>,
        pages: Range<u32>,
        stream: Stream,
    ) -> Result<Faulted<Hold>> {
        match thread::with(|thread| self.hit(thread, bar, &pages, stream))? {
            Some(hit) => Ok(Faulted::Resident(hit.into_hold())),
            None => self.fault_otherwise(bar, pages, stream),
        }
    }

    /// The plainest hit by itself, one mapped page and a stream that is not being captured, told
    /// in values that fit in registers: what a hit moves through memory is what it costs. `None`
    /// is anything else.
    ///
    /// # Errors
    /// As [`Pager::fault`].
    #[inline(always)]
    pub fn hit(
        &self,
        thread: &Thread,
        bar: &Arc<Bar>,
        pages: &Range<u32>,
        stream: Stream,
    ) -> Result<Option<Hit>> {
        match self.plain_hit(thread, bar, pages, stream) {
            Ok(Some(hit)) => {
                if self.is_followed(bar) {
                    self.tell_fault(&[Request { bar, pages: pages.clone() }], stream);
                }
                Ok(Some(hit))
            }
            Ok(None) => Ok(None),
            Err(error) => Err(self.fault_failed(error, &[Request { bar, pages: pages.clone() }])),
        }
    }

    #[inline(always)]
    fn plain_hit(
        &self,
        thread: &Thread,
        bar: &Arc<Bar>,
        pages: &Range<u32>,
        stream: Stream,
    ) -> Result<Option<Hit>> {
        if pages.len() != 1 || stream.is_implicit() || bar.is_closed() || trace::is_on() {
            return Ok(None);
        }
        self.device.check()?;
        let (capture, slot) = self.device.inspect(stream)?;
        if capture != CaptureState::None {
            return Ok(None);
        }
        let page = bar.table.page(PageIndex(pages.start));
        let word = match page.pin() {
            Pin::Pinned(word) => word,
            Pin::Absent(_) => return Ok(None),
            Pin::Full => return Err(too_many_pins()),
        };
        let hit = Hit { page: pages.start, generation: word.generation, stream, slot };
        if word.state != PageState::Resident && !self.is_ready(page, slot) {
            self.order_or_unpin(bar, &hit.into_hold(), capture)?;
        }
        self.device.counters.hits.raise(thread);
        Ok(Some(hit))
    }

    /// As [`Pager::fault`], for what is no plain hit.
    ///
    /// # Errors
    /// As there.
    #[inline(never)]
    pub fn fault_otherwise(
        &self,
        bar: &Arc<Bar>,
        pages: Range<u32>,
        stream: Stream,
    ) -> Result<Faulted<Hold>> {
        let request = [Request { bar, pages: pages.clone() }];
        let faulted = self.traced(&request, stream, || self.fault_range(bar, pages, stream));
        faulted.map_err(|error| self.fault_failed(error, &request))
    }

    fn fault_range(
        &self,
        bar: &Arc<Bar>,
        pages: Range<u32>,
        stream: Stream,
    ) -> Result<Faulted<Hold>> {
        self.device.check()?;
        bar.check_open()?;
        let context = match stream.is_implicit() {
            true => Some(self.device.enter_context()?),
            false => None,
        };
        let (capture, slot) = self.device.inspect(stream)?;
        if let Some((mut hold, ordered)) = self.pin(bar, pages.clone(), stream, slot)? {
            if !ordered {
                self.order_or_unpin(bar, &hold, capture)?;
            }
            if capture == CaptureState::Active {
                self.keep_or_unpin(bar, &mut hold)?;
            }
            thread::with(|thread| self.device.counters.hits.raise(thread));
            if self.is_followed(bar) {
                self.tell_fault(&[Request { bar, pages }], stream);
            }
            return Ok(Faulted::Resident(hold));
        }
        drop(context);
        let request = [Request { bar, pages }];
        Ok(match self.fault_slowly(&request, stream)? {
            Faulted::Resident(mut holds) => Faulted::Resident(holds.remove(0)),
            Faulted::HostMapped(mut holds) => Faulted::HostMapped(holds.remove(0)),
            Faulted::Offloaded(refusal) => Faulted::Offloaded(refusal),
        })
    }

    /// Pins every page of the range if all are mapped. The flag says whether the stream comes
    /// after all their ready fences already.
    #[inline]
    fn pin(
        &self,
        bar: &Bar,
        pages: Range<u32>,
        stream: Stream,
        slot: Option<StreamSlot>,
    ) -> Result<Option<(Hold, bool)>> {
        if pages.len() != 1 {
            return self.pin_many(bar, pages, stream, slot);
        }
        let page = bar.table.page(PageIndex(pages.start));
        match page.pin() {
            Pin::Pinned(word) => {
                let ordered = word.state == PageState::Resident || self.is_ready(page, slot);
                let generations = Generations::One(word.generation);
                Ok(Some((Hold { pages, generations, stream, slot, kept: false }, ordered)))
            }
            Pin::Absent(_) => Ok(None),
            Pin::Full => Err(too_many_pins()),
        }
    }

    fn pin_many(
        &self,
        bar: &Bar,
        pages: Range<u32>,
        stream: Stream,
        slot: Option<StreamSlot>,
    ) -> Result<Option<(Hold, bool)>> {
        let mut ordered = true;
        let mut generations = Vec::with_capacity(pages.len());
        let release = |generations: Vec<Generation>| {
            let pages = pages.start..pages.start + generations.len() as u32;
            let generations = Generations::Many(generations);
            self.release_unused(bar, &Hold { pages, generations, stream, slot, kept: false });
        };
        for (_, page) in bar.table.pages(pages.clone()) {
            match page.pin() {
                Pin::Pinned(word) => {
                    generations.push(word.generation);
                    ordered &= word.state == PageState::Resident || self.is_ready(page, slot);
                }
                Pin::Absent(_) => {
                    release(generations);
                    return Ok(None);
                }
                Pin::Full => {
                    release(generations);
                    return Err(too_many_pins());
                }
            }
        }
        let generations = Generations::Many(generations);
        Ok(Some((Hold { pages, generations, stream, slot, kept: false }, ordered)))
    }

    fn is_ready(&self, page: &Page, slot: Option<StreamSlot>) -> bool {
        let ready = page.ready();
        if self.device.fences.known_passed(ready) {
            page.note_ready();
            return true;
        }
        slot.is_some_and(|slot| self.device.fences.ordered_before(ready, slot))
    }

    /// Gives pins back that nobody has used: no stamp, no fence.
    pub fn release_unused(&self, bar: &Bar, hold: &Hold) {
        let pages = bar.table.pages(hold.pages.clone());
        for ((_, page), generation) in pages.zip(hold.generations.as_slice()) {
            // Taken back by a forced end of run meanwhile is as good.
            let _ = page.unpin(*generation);
        }
        if bar.is_closed() {
            self.tidy_closed(bar);
        }
    }

    /// In a scope of its own: waiting places and asks about events, which needs the context, and
    /// would break a capture of another stream.
    #[cold]
    fn order_or_unpin(&self, bar: &Bar, hold: &Hold, capture: CaptureState) -> Result<()> {
        let ordered = self.device.enter().and_then(|_scope| self.order(bar, hold, capture));
        if ordered.is_err() {
            self.release_unused(bar, hold);
        }
        ordered
    }

    /// Lets the hold's stream wait for its pages' ready fences.
    fn order(&self, bar: &Bar, hold: &Hold, capture: CaptureState) -> Result<()> {
        let pages = bar.table.pages(hold.pages.clone()).map(|(_, page)| page);
        self.order_pages(pages, hold.stream, hold.slot, capture)
    }

    /// Lets `stream` wait for pages' ready fences; the CPU where there is no stream or it is being
    /// captured. Of pages that one stream fills the last one stands for all.
    fn order_pages<'a>(
        &self,
        pages: impl Iterator<Item = &'a Page>,
        stream: Stream,
        slot: Option<StreamSlot>,
        capture: CaptureState,
    ) -> Result<()> {
        let mut last: Vec<Ticket> = Vec::new();
        for page in pages {
            if !matches!(page.word().state, PageState::Issued | PageState::HostMapped) {
                continue;
            }
            let ready = page.ready();
            match last.iter_mut().find(|ticket| ticket.slot() == ready.slot()) {
                Some(ticket) if ticket.sequence() < ready.sequence() => *ticket = ready,
                Some(_) => {}
                None if ready.is_none() => {}
                None => last.push(ready),
            }
        }
        last.into_iter().try_for_each(|ready| self.order_after(ready, stream, slot, capture))
    }

    /// Lets `stream` (or the CPU) wait for one ticket.
    ///
    /// # Errors
    /// Those of waiting, and what the driver says.
    pub fn order_after(
        &self,
        ticket: Ticket,
        stream: Stream,
        slot: Option<StreamSlot>,
        capture: CaptureState,
    ) -> Result<()> {
        match slot {
            Some(slot) if capture == CaptureState::None => {
                let fences = &self.device.fences;
                let placed = self.device.retry(|| fences.stream_wait(stream, slot, ticket));
                if placed.map_err(|error| self.device.note(error))? {
                    return Ok(());
                }
                self.device.wait_passed(&[ticket], WaitKind::Ready)
            }
            _ => self.device.wait_passed(&[ticket], WaitKind::Ready),
        }
    }

    /// Serves a request that is not a plain hit.
    #[cold]
    #[inline(never)]
    fn fault_slowly(&self, requests: &[Request<'_>], stream: Stream) -> Result<Faulted<Vec<Hold>>> {
        let faulted = self.serve(requests, stream);
        if matches!(faulted, Ok(Faulted::Resident(_))) && self.device.fences.is_eager() {
            self.tell_fault(requests, stream);
        }
        // What the request had claimed or protected kept a VBAR that was closed meanwhile; what it
        // pinned still does.
        if !matches!(faulted, Ok(Faulted::Resident(_) | Faulted::HostMapped(_)))
            && let Some(closed) = requests.iter().find(|request| request.bar.is_closed())
        {
            self.tidy_closed(closed.bar);
        }
        faulted
    }

    fn serve(&self, requests: &[Request<'_>], stream: Stream) -> Result<Faulted<Vec<Hold>>> {
        requests.iter().try_for_each(|request| request.bar.check_open())?;
        let _scope = self.device.enter()?;
        let (capture, slot) = self.device.inspect(stream)?;
        let unreserved = |request: &Request<'_>| {
            request.bar.space.kind == crate::memory::space::SpaceKind::Unreserved
                && !request.pages.is_empty()
        };
        if requests.iter().any(unreserved) {
            return Ok(self.refuse(Reason::NoAddresses, requests));
        }
        loop {
            let protected = match self.make_resident(requests, stream, slot, capture)? {
                Ok(protected) => protected,
                Err(reason) => match self.host_map(requests, reason, capture)? {
                    Some(protected) => protected,
                    None => return Ok(self.refuse(reason, requests)),
                },
            };
            // The pages are protected: only a forced end of run can come in between.
            let holds = self.pin_all(requests, stream, slot)?;
            drop(protected);
            let Some((mut holds, backing)) = holds else { continue };
            let done = self.order_all(requests, &holds, capture).and_then(|()| {
                let kept = capture == CaptureState::Active;
                requests.iter().zip(&mut holds).try_for_each(|(request, hold)| {
                    hold.kept = kept;
                    if kept { self.keep_for_graph(request.bar, hold) } else { Ok(()) }
                })
            });
            if let Err(error) = done {
                self.release_all_unused(requests, &holds);
                return Err(error);
            }
            return Ok(self.served(holds, backing));
        }
    }

    /// Plans and acts until every page is mapped and protected, or the request is refused.
    fn make_resident(
        &self,
        requests: &[Request<'_>],
        stream: Stream,
        slot: Option<StreamSlot>,
        capture: CaptureState,
    ) -> Result<std::result::Result<Vec<Protected>, Reason>> {
        let (usable, writer) = self.usable_for(requests, stream, slot, capture);
        let (mut patience, mut reaping) = (Patience::new(self), Reaping::Frames);
        loop {
            self.device.check()?;
            // After a refusal the cap that it set holds for this request: what the driver calls
            // free then is what it has just refused.
            if patience.refused_once.is_none() {
                self.poll_budget(Poll::IfDue)?;
            }
            reaping = self.reap_for(reaping)?;
            if self.shrink()? == Excess::Unknown && patience.may_wait_for_context(capture) {
                self.device.context_wait()?;
                self.reap_now()?;
                self.shrink()?;
            }
            self.prepare_poison()?;
            let begin_ns = trace::begin();
            let (turn, reclaim) = (patience.turn, patience.reclaim());
            let standing = Standing { turn, reclaim, capture, slot };
            let (planned, _in_hand) = self.plan(requests, usable, standing)?;
            match planned {
                Planned::Ready(protected) => {
                    // Found after a wait for whoever had it in hand.
                    thread::with(|thread| self.device.counters.hits.raise(thread));
                    return Ok(Ok(protected));
                }
                Planned::Act(claims, mut protected) => {
                    let _span = self.span_of_claims(Kind::Claim, begin_ns, &claims);
                    match self.act(claims, writer) {
                        Ok(mapped) => {
                            counters::add(&self.device.counters.misses, 1);
                            protected.extend(mapped);
                            return Ok(Ok(protected));
                        }
                        Err(failure) => {
                            if let Some(reason) = self.after_failure(failure, &mut patience)? {
                                return Ok(Err(reason));
                            }
                        }
                    }
                }
                Planned::Wait(_)
                | Planned::Reclaim(_)
                | Planned::ContextWait
                | Planned::Refuse(_)
                    if reaping == Reaping::Frames =>
                {
                    reaping = Reaping::All;
                }
                Planned::LeaveHost(taken) => drop(self.part_with_hosted(taken)),
                Planned::Reclaim(frames) => patience.ask_for(frames, requests, stream, standing)?,
                Planned::Wait(kind) => patience.pause(kind)?,
                Planned::ContextWait | Planned::Refuse(Reason::FenceUnknown)
                    if patience.cover_own(stream, slot, capture)? => {}
                Planned::ContextWait if patience.wait_for_context(capture)? => {}
                Planned::ContextWait => return Ok(Err(Reason::FenceUnknown)),
                Planned::Refuse(reason) if patience.ask_last(requests, reason) => {}
                Planned::Refuse(Reason::FenceUnknown) if patience.wait_for_context(capture)? => {}
                Planned::Refuse(reason) => return Ok(Err(reason)),
            }
        }
    }

    /// Which frames a request can use, and who writes to them.
    fn usable_for(
        &self,
        requests: &[Request<'_>],
        stream: Stream,
        slot: Option<StreamSlot>,
        capture: CaptureState,
    ) -> (Usable, Option<Writer>) {
        let bound = requests.iter().all(Request::streams);
        let (mode, writer) = match (capture, slot) {
            (CaptureState::None, Some(_)) => (Mode::Stream, Some(Writer { stream, slot })),
            _ => (Mode::Cpu, None),
        };
        let strict = self.device.options.eviction == Eviction::Strict;
        let usable = match mode {
            // On a capturing stream a bound VBAR is filled on the fill stream, which is none of
            // the capture's; anything else would have to be recorded or waited for.
            _ if capture == CaptureState::Implicit => Usable::Nothing,
            _ if capture != CaptureState::None && !bound => Usable::Nothing,
            _ if strict => Usable::Passed,
            Mode::Cpu if !bound => Usable::Passed,
            _ => Usable::Recorded,
        };
        (usable, writer)
    }

    /// Plans a request under the lock. What it claims is in the caller's hands.
    fn plan(
        &self,
        requests: &[Request<'_>],
        usable: Usable,
        standing: Standing,
    ) -> Result<(Planned, Option<InHand<'_>>)> {
        let mut state = self.state.lock();
        for request in requests {
            let end = u64::from(request.pages.end) * self.page_bytes();
            state.raise_extent(request.bar.id, end);
        }
        self.update_eager(&state);
        let planned = plan::plan(&mut state, &self.device, requests, usable, standing)?;
        let acts = matches!(planned, Planned::Act(..));
        let in_hand = acts.then(|| InHand::new(self, &mut state, Grip::Coming));
        Ok((planned, in_hand))
    }

    /// A refusal of the driver caps the budget and is planned around once: what is resident may
    /// give frames that the driver does not.
    fn after_failure(
        &self,
        failure: Failure,
        patience: &mut Patience<'_>,
    ) -> Result<Option<Reason>> {
        let reason = failure.into_reason()?;
        if reason == Reason::DriverMemory {
            self.cap_budget();
            if patience.refused_once.replace(()).is_none() {
                return Ok(None);
            }
        }
        Ok(Some(reason))
    }

    fn page_bytes(&self) -> u64 {
        self.device.options.page_size.bytes()
    }
}
