//! Carrying out a plan: the driver calls that put frames behind pages, and their undoing.
//!
//! No lock is held. Everything up to the commit point can be undone: with aliasing the victims keep
//! their mappings until the new ones stand, so a failure leaves every page as it was. After the
//! commit point only the fill can fail; its pages go back to Absent when the fill stream is done
//! with them. What cannot be undone is quarantined, counted and logged.

mod gradual;
mod scrub;

use std::sync::Arc;

use super::Pager;
use super::plan::{Asker, Backing, Claim, Protected, Take, Victim};
use super::state::{Destination, Lingering, LingeringFrame};
use crate::copy::fill::{FillJob, Filler};
use crate::copy::pipeline::Pipeline;
use crate::counters;
use crate::driver::{DriverError, DriverResult, FrameHandle};
use crate::error::{Error, ErrorCode, Result};
use crate::memory::frames::FrameIndex;
use crate::memory::page_table::{Page, PageState};
use crate::options::Eviction;
use crate::outcome::Reason;
use crate::process;
use crate::sync::fence::StreamSlot;
use crate::sync::ticket::Ticket;
use crate::trace::Kind;
use crate::units::Stream;

/// Why a plan was not carried out. Everything is as it was.
pub(super) enum Failure {
    /// The driver has no memory although the budget allows it, or was not ready for too long.
    Pressure,
    /// No more mappings.
    Mappings,
    /// Anything else.
    Error(Error),
}

/// Who writes the new bytes, and so waits for the frames' former users.
#[derive(Clone, Copy)]
pub(super) struct Writer {
    pub(super) stream: Stream,
    pub(super) slot: Option<StreamSlot>,
}

/// A claim with its frame in hand.
struct Placed {
    claim: Claim,
    handle: FrameHandle,
    /// Index in the table; `None` for a handle that was created and not entered yet.
    frame: Option<FrameIndex>,
    mapped: bool,
    /// What was behind the page before.
    before: Behind,
}

impl Placed {
    fn frame(&self) -> FrameIndex {
        self.frame.expect("every claim has its frame at the commit point")
    }

    /// Whether it is a weight's, on the device.
    fn is_weights(&self) -> bool {
        self.claim.backing == Backing::Device && !self.claim.bar.is_arena()
    }

    /// When the page may be used whose last copy is done at `copied`. One between tensors has no
    /// copies; its frame's former users count all the same.
    fn ready(&self, filler: &Filler, copied: Ticket) -> Result<Ticket> {
        let after = !self.claim.users.is_empty() || filler.is_scrubbing();
        let idle = copied.is_none() && after;
        if idle { filler.fence() } else { Ok(copied) }
    }
}

/// What is behind a page without a frame.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Behind {
    Nothing,
    Poison,
}

impl Behind {
    fn of(page: &Page) -> Self {
        if page.is_poisoned() { Self::Poison } else { Self::Nothing }
    }
}

impl Pager {
    /// Gives every claim its frame, orders the writer behind the frames' former users, fills bound
    /// pages and publishes them, protected where a fault asked.
    pub(super) fn act(
        &self,
        claims: Vec<Claim>,
        writer: Option<Writer>,
    ) -> std::result::Result<Vec<Protected>, Failure> {
        let mut placed = self.place(claims);
        // Read while the mappings are made.
        let filler = match self.filler_for(&placed) {
            Ok(filler) => filler,
            Err(error) => {
                self.undo(placed);
                return Err(Failure::Error(error));
            }
        };
        let filling = filler.as_ref().map(|filler| filler.begin(fill_jobs(&placed)));
        // Old mappings of frames that have moved go while the bytes are on their way.
        if let Err(error) = self.reap() {
            drop(filling);
            self.undo(placed);
            return Err(Failure::Error(error));
        }
        let filling = match (filling, filler.as_ref()) {
            (Some(filling), Some(filler)) if self.is_gradual(&placed, filler) => {
                return self.act_gradually(placed, filler, filling);
            }
            (filling, _) => filling,
        };
        let done = if self.is_strict() { self.unmap_victims_first(&mut placed) } else { Ok(()) }
            .and_then(|()| self.lift_claimed(&placed))
            .and_then(|()| self.create_missing(&mut placed))
            .and_then(|()| self.map_all(&mut placed))
            .and_then(|()| self.order_writers(&placed, writer));
        if let Err(failure) = done {
            self.undo(placed);
            return Err(failure);
        }
        self.commit(placed, writer, filling)
    }

    fn is_strict(&self) -> bool {
        self.device.options.eviction == Eviction::Strict
    }

    fn place(&self, claims: Vec<Claim>) -> Vec<Placed> {
        let state = self.state.lock();
        let placed = claims.into_iter().map(|claim| {
            let frame = match &claim.take {
                Take::Free(frame) => Some(*frame),
                Take::Victim(victim) => Some(victim.frame),
                Take::Create => None,
            };
            let handle = frame.map_or(FrameHandle(0), |frame| state.handle(frame));
            let before = Behind::of(claim.entry());
            Placed { claim, handle, frame, mapped: false, before }
        });
        placed.collect()
    }

    /// Strict eviction: the old mapping goes before the new one comes. The page is absent from
    /// here on; when a later step fails its frame goes to the free list.
    fn unmap_victims_first(&self, placed: &mut [Placed]) -> std::result::Result<(), Failure> {
        for entry in placed {
            let Take::Victim(victim) = &entry.claim.take else { continue };
            let frame = victim.frame;
            if let Err(error) = self.unmap(victim) {
                return Err(self.failure(error));
            }
            self.settle_unmapped(&victim.bar, victim.page);
            let now = self.device.fences.now();
            self.state.lock().sink_watermark(victim.bar.id, victim.page, now);
            self.trace_evict(victim);
            entry.claim.take = Take::Free(frame);
            counters::add(&self.device.counters.pages_evicted, 1);
        }
        Ok(())
    }

    /// What stands in for the pages goes before they come.
    fn lift_claimed(&self, placed: &[Placed]) -> std::result::Result<(), Failure> {
        let poisoned = placed.iter().filter(|entry| entry.before == Behind::Poison);
        poisoned.map(|entry| &entry.claim).try_for_each(|claim| {
            let lifted = self.lift_poison(&claim.bar, claim.page);
            lifted.map_err(|error| self.failure(error))
        })
    }

    fn create_missing(&self, placed: &mut [Placed]) -> std::result::Result<(), Failure> {
        let (driver, page_bytes) = (&self.device.driver, self.page_bytes());
        for entry in placed.iter_mut().filter(|entry| entry.frame.is_none()) {
            let _span = self.span_of_page(Kind::Create, &entry.claim.bar, entry.claim.page);
            let backing = entry.claim.backing;
            entry.handle = match backing {
                Backing::Device => self
                    .device
                    .retry(|| driver.mem_create(self.device.ordinal, page_bytes))
                    .map_err(|error| self.failure(error))?,
                Backing::Host => self.create_host_frame()?,
            };
            entry.frame = Some(self.state.lock().frames_of(backing).created(entry.handle));
        }
        Ok(())
    }

    /// Maps every frame, then gives access over runs of neighbouring pages in one call each.
    fn map_all(&self, placed: &mut [Placed]) -> std::result::Result<(), Failure> {
        let (driver, page_bytes) = (&self.device.driver, self.page_bytes());
        for entry in placed.iter_mut() {
            let address = entry.claim.bar.address(entry.claim.page);
            let _span = self.span_of_page(Kind::Map, &entry.claim.bar, entry.claim.page);
            self.device
                .retry(|| driver.mem_map(address, page_bytes, entry.handle))
                .map_err(|error| self.failure(error))?;
            entry.mapped = true;
        }
        let mut start = 0;
        while start < placed.len() {
            let first = &placed[start].claim;
            let neighbours = placed[start..].iter().zip(0..).take_while(|(entry, step)| {
                entry.claim.bar.id == first.bar.id && entry.claim.page.0 == first.page.0 + step
            });
            let count = neighbours.count();
            let (address, bytes) = (first.bar.address(first.page), count as u64 * page_bytes);
            let pages = first.page.0..first.page.0 + count as u32;
            let _span = self.span_of(Kind::Access, &first.bar, pages);
            // What an allocator gives out is copied between devices too; weights are their owner's.
            let devices = match first.bar.is_arena() {
                true => self.device.reach().map_err(Failure::Error)?,
                false => std::slice::from_ref(&self.device.ordinal),
            };
            self.device
                .retry(|| driver.mem_set_access(address, bytes, devices))
                .map_err(|error| self.failure(error))?;
            start += count;
        }
        Ok(())
    }

    /// Orders the program's stream behind everything that still uses the frames that it will write
    /// to. The filler orders its own stream, page by page.
    fn order_writers(
        &self,
        placed: &[Placed],
        writer: Option<Writer>,
    ) -> std::result::Result<(), Failure> {
        let bare = placed.iter().filter(|entry| entry.claim.fill.is_none());
        for user in bare.flat_map(|entry| &entry.claim.users) {
            let Writer { stream, slot } =
                writer.expect("frames in use are only taken for a stream");
            let slot = slot.expect("frames in use are only taken for a stream");
            let fences = &self.device.fences;
            let ordered = self.device.retry(|| fences.stream_wait(stream, slot, *user));
            if !ordered.map_err(|error| Failure::Error(self.device.note(error)))? {
                let text = "a frame in use was taken although no fence covers its user";
                return Err(Failure::Error(Error::new(ErrorCode::Internal, text)));
            }
        }
        Ok(())
    }

    /// The commit point: victims lose their pages, claims are filled and published.
    fn commit(
        &self,
        placed: Vec<Placed>,
        writer: Option<Writer>,
        filling: Option<Pipeline<'_>>,
    ) -> std::result::Result<Vec<Protected>, Failure> {
        let weights = placed.iter().filter(|entry| entry.is_weights()).count();
        counters::add(&self.device.counters.pages_mapped, placed.len() as u64);
        counters::add(&self.device.counters.weights_mapped, weights as u64);
        self.part_with_victims(&placed);
        let mut published = Vec::with_capacity(placed.len());
        let mut is_published = vec![false; placed.len()];
        let filled = self.make_ready(&placed, writer, filling, &mut |index, ticket| {
            let entry = &placed[index];
            published.extend(self.publish(&entry.claim, entry.frame(), ticket));
            is_published[index] = true;
        });
        // After the first failure the rest is not tried.
        for (entry, _) in placed.iter().zip(is_published).filter(|(_, published)| !published) {
            let destination = entry.claim.backing.destination();
            self.withdraw(&entry.claim, entry.frame(), destination, writer);
        }
        self.notify_changed();
        filled.map_or_else(|error| Err(Failure::Error(error)), |()| Ok(published))
    }

    /// The victims lose their pages: there is no way back.
    fn part_with_victims(&self, placed: &[Placed]) {
        let mut lingering = Vec::new();
        for entry in placed {
            if let Take::Victim(victim) = &entry.claim.take {
                counters::add(&self.device.counters.pages_evicted, 1);
                self.trace_evict(victim);
                self.part_with_victim(victim, &entry.claim.users, &mut lingering);
            }
        }
        let mut state = self.state.lock();
        for old in &lingering {
            state.frames.leave_mapping(old.bar.table.page(old.page).frame());
        }
        state.lingering.extend(lingering);
        for entry in placed {
            if let Take::Victim(victim) = &entry.claim.take {
                state.sink_watermark(victim.bar.id, victim.page, self.device.fences.now());
            }
        }
    }

    /// The old mapping goes now if its users have passed, else when they have.
    fn part_with_victim(&self, victim: &Victim, users: &[Ticket], lingering: &mut Vec<Lingering>) {
        if users.is_empty() {
            match self.unmap(victim) {
                Ok(()) => self.settle_unmapped(&victim.bar, victim.page),
                Err(error) => {
                    self.quarantine_page(victim, &error);
                    self.state.lock().frames.note_stray(victim.frame);
                }
            }
            return;
        }
        counters::add(&self.device.counters.pages_aliased, 1);
        lingering.push(Lingering {
            bar: Arc::clone(&victim.bar),
            page: victim.page,
            users: users.to_vec(),
            frame: LingeringFrame::Moved,
        });
    }

    /// Calls `ready` for every claim with the ticket after which its page may be used: of the fill,
    /// or of the frame's former users. Stops at the first failure.
    fn make_ready(
        &self,
        placed: &[Placed],
        caller: Option<Writer>,
        filling: Option<Pipeline<'_>>,
        ready: &mut dyn FnMut(usize, Ticket),
    ) -> Result<()> {
        let (bound, bare): (Vec<usize>, Vec<usize>) =
            (0..placed.len()).partition(|index| placed[*index].claim.fill.is_some());
        if let Some(filling) = filling {
            self.fill(placed, &bound, filling, ready)?;
        }
        let scrubbed = self.scrub(placed, &bare, caller)?;
        let mut cleared = None;
        for index in bare {
            let ticket = match scrubbed {
                Some(ticket) => ticket,
                None => self.clear(&placed[index].claim, caller, &mut cleared)?,
            };
            ready(index, ticket);
        }
        Ok(())
    }

    /// The filler, where there are bound pages among the claims.
    fn filler_for(&self, placed: &[Placed]) -> Result<Option<Arc<Filler>>> {
        let bound = placed.iter().any(|entry| entry.claim.fill.is_some());
        bound.then(|| self.filler()).transpose()
    }

    /// Fills the bound pages among the claims, whose indexes are given.
    fn fill(
        &self,
        placed: &[Placed],
        bound: &[usize],
        filling: Pipeline<'_>,
        ready: &mut dyn FnMut(usize, Ticket),
    ) -> Result<()> {
        let filler = self.filler()?;
        let mut filled = Ok(());
        filling.run(&mut |job, result| {
            let index = bound[job];
            let ticket = result.and_then(|ticket| placed[index].ready(&filler, ticket));
            match ticket {
                Ok(ticket) if filled.is_ok() => ready(index, ticket),
                Err(error) if filled.is_ok() => filled = Err(error),
                _ => {}
            }
        });
        filled
    }

    fn publish(&self, claim: &Claim, frame: FrameIndex, ready: Ticket) -> Option<Protected> {
        let page = claim.entry();
        page.set_frame(frame);
        if claim.backing == Backing::Host {
            return Some(self.publish_hosted(claim, ready));
        }
        let state = if ready.is_none() { PageState::Resident } else { PageState::Issued };
        let pins = u32::from(claim.asker == Asker::Fault);
        // At one moment for whoever has the lock. A published page that was in no set yet could be
        // evicted, by a stale entry among the streamed ones, and was then entered although it was
        // absent.
        let mut locked = self.state.lock();
        let generation = page.publish(state, pins, ready);
        locked.add_resident(claim.bar.id, claim.page, claim.streams);
        drop(locked);
        (pins > 0).then(|| Protected::new(Arc::clone(&claim.bar), claim.page, generation))
    }

    /// Takes a mapped page back whose bytes did not arrive; its frame goes where it is told. Copies
    /// may be under way to it, and the frame's former users may not be done. Nobody can pin it in
    /// between.
    fn withdraw(
        &self,
        claim: &Claim,
        frame: FrameIndex,
        destination: Destination,
        writer: Option<Writer>,
    ) {
        if process::ending() {
            return;
        }
        let mut users = claim.users.clone();
        users.extend(self.scrubbing(claim, writer));
        if claim.fill.is_some() {
            // Without a fence the copies are waited for, or the next one is theirs too.
            let fence = self.filler().map(|filler| match filler.fence() {
                Ok(ticket) => Some(ticket),
                Err(_) => filler.wait().is_err().then(|| filler.stamp()),
            });
            users.extend(fence.unwrap_or_else(|_| Some(self.device.fences.unrecorded_stamp())));
        }
        let page = claim.entry();
        page.set_frame(frame);
        page.settle(PageState::Evicting);
        let lingering = Lingering {
            bar: Arc::clone(&claim.bar),
            page: claim.page,
            users,
            frame: LingeringFrame::To(frame, destination),
        };
        self.state.lock().lingering.push(lingering);
    }

    /// Undoes everything before the commit point; nothing where the process ends, as the child does
    /// of a fork that the program made while it waited.
    fn undo(&self, placed: Vec<Placed>) {
        if process::ending() {
            return;
        }
        for entry in placed {
            let Placed { claim, frame, mapped, before, .. } = entry;
            let lost = mapped && self.undo_mapping(&claim);
            self.undo_take(&claim, frame, lost);
            match before {
                _ if lost => {}
                Behind::Poison if !claim.entry().is_poisoned() => {
                    self.settle_unmapped(&claim.bar, claim.page);
                }
                _ => claim.entry().settle(PageState::Absent),
            }
        }
        self.changed.notify_all();
    }

    /// Puts the frame of a claim back where it came from. `lost`: it is mapped at the claimed page
    /// too, for good.
    fn undo_take(&self, claim: &Claim, frame: Option<FrameIndex>, lost: bool) {
        let mut state = self.state.lock();
        match (&claim.take, frame) {
            (Take::Victim(victim), _) => {
                victim.entry().settle(PageState::Issued);
                state.add_resident(victim.bar.id, victim.page, false);
                if lost {
                    state.frames.note_stray(victim.frame);
                }
            }
            (Take::Free(frame), _) if lost => state.frames.quarantine(*frame),
            (Take::Free(frame), _) => state.frames.put_free(*frame, claim.users.clone()),
            (Take::Create, None) => {
                state.frames_of(claim.backing).cancel_creating(1);
                self.release_room(claim.backing);
            }
            (Take::Create, Some(frame)) if lost => state.frames_of(claim.backing).quarantine(frame),
            (Take::Create, Some(frame)) => {
                let handle = state.frames_of(claim.backing).remove(frame);
                drop(state);
                handle.map(|handle| self.release_to(claim.backing, handle));
            }
        }
    }

    /// Pages have come, or do not come after all: whoever waits for them looks again.
    fn notify_changed(&self) {
        if !process::ending() {
            self.changed.notify_all();
            self.trace_memory();
        }
    }

    /// Removes a mapping that was made for a claim. Returns whether that failed, and the page is
    /// in quarantine.
    fn undo_mapping(&self, claim: &Claim) -> bool {
        let address = claim.bar.address(claim.page);
        let driver = &self.device.driver;
        let _span = self.span_of_page(Kind::Unmap, &claim.bar, claim.page);
        let Err(error) = self.device.retry(|| driver.mem_unmap(address, self.page_bytes())) else {
            return false;
        };
        self.note_quarantine(claim.bar.id, claim.page, &error);
        claim.entry().settle(PageState::Quarantined);
        true
    }

    /// Unmaps a page whose users have passed.
    pub(super) fn unmap(&self, victim: &Victim) -> DriverResult<()> {
        let address = victim.bar.address(victim.page);
        let _span = self.span_of_page(Kind::Unmap, &victim.bar, victim.page);
        self.device.retry(|| self.device.driver.mem_unmap(address, self.page_bytes()))
    }

    /// Gives a handle back to the driver; sets it aside when that fails. Returns whether it went.
    pub(super) fn release_handle(&self, handle: FrameHandle) -> bool {
        self.release_to(Backing::Device, handle)
    }

    /// As [`Pager::release_handle`], of a frame of that memory.
    pub(super) fn release_to(&self, backing: Backing, handle: FrameHandle) -> bool {
        let span = self.span(Kind::Release).bytes(self.page_bytes());
        let Err(error) = self.device.retry(|| self.device.driver.mem_release(handle)) else {
            drop(span);
            self.release_room(backing);
            self.trace_memory();
            return true;
        };
        log::error!("frame {:#x} is quarantined: {error}", handle.0);
        self.device.note(error.into());
        self.state.lock().frames_of(backing).quarantine_handle(handle);
        false
    }

    /// A frame of the host is no longer held.
    fn release_room(&self, backing: Backing) {
        if backing == Backing::Host {
            self.host.room.release(self.page_bytes());
        }
    }

    /// An evicted page whose mapping cannot be removed: its addresses are lost.
    pub(super) fn quarantine_page(&self, victim: &Victim, error: &DriverError) {
        self.note_quarantine(victim.bar.id, victim.page, error);
        victim.entry().settle(PageState::Quarantined);
    }

    pub(super) fn note_quarantine(
        &self,
        bar: u32,
        page: crate::units::PageIndex,
        error: &DriverError,
    ) {
        log::error!("page {page} of VBAR {bar} is quarantined: {error}");
        self.device.note(Error::from(*error));
        self.state.lock().quarantined_pages += 1;
    }

    fn failure(&self, error: DriverError) -> Failure {
        if error.code.is_transient() {
            return Failure::Pressure;
        }
        if error.code == crate::driver::DriverCode::OPERATING_SYSTEM && error.call == "cuMemMap" {
            return Failure::Mappings;
        }
        Failure::Error(self.device.note(error.into()))
    }
}

/// The jobs of the bound pages among the claims, in their order.
fn fill_jobs(placed: &[Placed]) -> Vec<FillJob> {
    placed.iter().filter_map(|entry| fill_job(&entry.claim)).collect()
}

fn fill_job(claim: &Claim) -> Option<FillJob> {
    let bound = Arc::clone(claim.fill.as_ref()?);
    let page_size = claim.bar.page_size;
    let start = page_size.offset_of(claim.page);
    let target = start..start + page_size.bytes();
    let (bar, page, keep) = (claim.bar.id, claim.page.0, claim.keep);
    let (base, after) = (claim.bar.space.base, claim.users.clone());
    Some(FillJob { bound, base, target, bar, page, keep, after })
}

impl Failure {
    /// The refusal that the failure amounts to, or the error.
    pub(super) fn into_reason(self) -> Result<Reason> {
        match self {
            Self::Pressure => Ok(Reason::DriverMemory),
            Self::Mappings => Ok(Reason::Mappings),
            Self::Error(error) => Err(error),
        }
    }
}
