//! Ranges for which no device frames can be had, read by the device from the host's memory.
//!
//! Where the options ask for it and the device can, a bound range that is too large, or that the
//! budget or pins leave no frames for, gets host frames behind its missing pages: page-locked, of
//! a table of their own, within the host's allowance, filled as device frames are. The pages that
//! have some keep them, whoever comes next: a fixed set is the best that a loop over too many pages
//! can have. They move to device frames at the first fault that finds those, once nobody uses them,
//! and give their memory back under the host's pressure, when it is trimmed, and with their VBAR.
//! A host frame that no page has goes to the driver at once: there is no list of free ones.
//!
//! Plans here, under the lock; `act` carries the plans out and undoes them.

use std::collections::HashSet;
use std::sync::Arc;

use super::act::Failure;
use super::claim::{Asker, Backing, Claim, Protected, Take, Taken, Victim};
use super::patience::Patience;
use super::plan::{Blocked, PageOf, Usable, will_pass};
use super::state::{Destination, State};
use super::{Faulted, Generations, Hold, Pager, Request, too_many_pins};
use crate::copy::fill::Keep;
use crate::counters;
use crate::driver::{CaptureState, DeviceAttribute, FrameHandle, HostNode};
use crate::error::Result;
use crate::host::mounts::SystemRoot;
use crate::host::room::LockedRoom;
use crate::host::spare::HostRoom;
use crate::memory::page_table::{Page, PageState, Pin};
use crate::memory::vbar::Bar;
use crate::options::HostMapped;
use crate::outcome::{Reason, Refusal, WaitKind};
use crate::process;
use crate::sync::device::Device;
use crate::sync::fence::{Cover, StreamSlot};
use crate::sync::ticket::Ticket;
use crate::sync::{AtomicBool, Mutex, Relaxed};
use crate::units::{PageIndex, Stream};

/// Where host frames come from.
pub(super) struct Host {
    /// The node nearest to the device; `None` where there are no host frames.
    node: Option<HostNode>,
    /// The driver has refused one for good.
    refused: AtomicBool,
    /// The runtime's part of the book of page-locked memory, in which its host frames are.
    pub(super) room: Arc<LockedRoom>,
    /// The program's own bound.
    bound: Mutex<Option<Arc<dyn HostRoom>>>,
}

impl Host {
    pub(super) fn of(device: &Device) -> Self {
        let attribute = |attribute| device.driver.device_get_attribute(device.ordinal, attribute);
        let wanted = device.options.host_mapped == HostMapped::On;
        // A driver that does not know the attribute does not have it.
        let supported = DeviceAttribute::HostNumaVirtualMemoryManagementSupported;
        let node = (wanted && attribute(supported).is_ok_and(|value| value == 1)).then(|| {
            let node = attribute(DeviceAttribute::HostNumaId).unwrap_or(-1);
            HostNode(u32::try_from(node).unwrap_or(0))
        });
        if wanted && node.is_none() {
            log::warn!("device {} cannot map host memory: ranges are offloaded", device.ordinal);
        }
        let root = device.options.system_root.as_ref().map(SystemRoot::new).unwrap_or_default();
        let room = Arc::new(LockedRoom::new(root, device.options.host_allowance));
        Self { node, refused: AtomicBool::new(false), room, bound: Mutex::new(None) }
    }
}

/// What planning came to.
enum Plan {
    Act(Vec<Claim>, Vec<Protected>),
    Wait(WaitKind),
    Refuse,
}

impl Pager {
    /// Sets who bounds host frames, beside the system, from now on.
    pub fn set_host_room(&self, room: Arc<dyn HostRoom>) {
        if !process::ending() {
            *self.host.bound.lock() = Some(room);
        }
    }

    /// Makes a request readable that was refused device frames, its missing pages from the host's
    /// memory. `None`: it stays refused, and nothing has changed.
    pub(super) fn host_map(
        &self,
        requests: &[Request<'_>],
        refused: Reason,
        capture: CaptureState,
    ) -> Result<Option<Vec<Protected>>> {
        let bound = requests.iter().all(|request| request.bar.bound().is_some());
        if self.host.node.is_none() || !bound || capture != CaptureState::None {
            return Ok(None);
        }
        let may_map = matches!(refused, Reason::TooLarge | Reason::Budget | Reason::AllPinned)
            && !self.host.refused.load(Relaxed);
        let mut patience = Patience::new(self);
        loop {
            self.device.check()?;
            self.reap()?;
            // With none allowed, what is all readable already still is.
            let allowed_pages = if may_map { self.allowed_host_pages() } else { 0 };
            let plan = self.plan_host(&mut self.state.lock(), requests, allowed_pages)?;
            match plan {
                Plan::Refuse => return Ok(None),
                Plan::Wait(kind) => patience.pause(kind)?,
                Plan::Act(claims, protected) if claims.is_empty() => return Ok(Some(protected)),
                Plan::Act(claims, mut protected) => {
                    counters::add(&self.device.counters.misses, 1);
                    return match self.act(claims, None) {
                        Ok(mapped) => {
                            protected.extend(mapped);
                            Ok(Some(protected))
                        }
                        Err(Failure::Error(error)) => Err(error),
                        Err(Failure::Pressure | Failure::Mappings) => Ok(None),
                    };
                }
            }
        }
    }

    fn plan_host(
        &self,
        state: &mut State,
        requests: &[Request<'_>],
        allowed_pages: u64,
    ) -> Result<Plan> {
        requests.iter().try_for_each(|request| state.open(request.bar).map(drop))?;
        let held = u64::from(state.host_frames.held());
        let device_pages = state.allowed_pages(self.device.options.page_size);
        let most = device_pages.max(u64::from(state.frames.held())) + allowed_pages.max(held);
        if needed_pages(requests) > most {
            // Before its pages are looked at: the place for their words is made when they are.
            return Ok(Plan::Refuse);
        }
        let (mut protected, mut wanted) = (Vec::new(), Vec::new());
        let mut seen = HashSet::new();
        for request in requests {
            for (index, page) in request.bar.table.pages(request.pages.clone()) {
                let word = match page.pin_readable() {
                    Pin::Pinned(word) => {
                        let bar = Arc::clone(request.bar);
                        protected.push(Protected::new(bar, index, word.generation));
                        continue;
                    }
                    Pin::Full => return Err(too_many_pins()),
                    Pin::Absent(word) => word,
                };
                match word.state {
                    PageState::Absent if seen.insert((request.bar.id, index)) => {
                        wanted.push((request.bar, index));
                    }
                    PageState::Absent => {}
                    PageState::Evicting if will_pass(state, &self.device, request.bar, index) => {
                        return Ok(Plan::Wait(WaitKind::OldMapping));
                    }
                    PageState::Evicting | PageState::Quarantined => return Ok(Plan::Refuse),
                    _ => return Ok(Plan::Wait(WaitKind::Claim)),
                }
            }
        }
        let bytes = wanted.len() as u64 * self.page_bytes();
        if !wanted.is_empty()
            && (held + wanted.len() as u64 > allowed_pages
                || !self.host.room.try_hold_unasked(bytes))
        {
            return Ok(Plan::Refuse);
        }
        state.host_frames.start_creating(wanted.len() as u32);
        Ok(Plan::Act(wanted.into_iter().map(claim).collect(), protected))
    }

    /// Pages of host frames that may be held in all.
    fn allowed_host_pages(&self) -> u64 {
        let held = u64::from(self.state.lock().host_frames.held()) * self.page_bytes();
        let room = &self.host.room;
        // What is above the allowance goes from the page-locked cache first, as far as that goes.
        let excess = room.excess_bytes().saturating_sub(room.held_bytes().saturating_sub(held));
        let allowed = (held + room.spare_bytes()).saturating_sub(excess);
        let bound = self.host.bound.lock().clone();
        let bound = bound.map_or(u64::MAX, |bound| bound.allowed_bytes(held));
        allowed.min(bound) / self.page_bytes()
    }

    /// A new host frame. What the driver will not give is told once, and is no error of the
    /// request's: it is offloaded then.
    pub(super) fn create_host_frame(&self) -> std::result::Result<FrameHandle, Failure> {
        let node = self.host.node.unwrap_or_default();
        let create = || self.device.driver.mem_create_host(node, self.page_bytes());
        let error = match self.device.retry(create) {
            Ok(handle) => return Ok(handle),
            Err(error) if error.code.is_transient() => return Err(Failure::Pressure),
            Err(error) => self.device.note(error.into()),
        };
        if self.device.is_lost() {
            return Err(Failure::Error(error));
        }
        // Containers may forbid what the device could do.
        if !self.host.refused.swap(true, Relaxed) {
            log::warn!("device {}: no host frames from here on: {error}", self.device.ordinal);
        }
        Err(Failure::Pressure)
    }

    /// Publishes a page with its host frame in place.
    pub(super) fn publish_hosted(&self, claim: &Claim, ready: Ticket) -> Protected {
        let mut state = self.state.lock();
        let generation = claim.entry().publish(PageState::HostMapped, 1, ready);
        state.bar_mut(claim.bar.id).hosted.insert(claim.page.0);
        drop(state);
        Protected::new(Arc::clone(&claim.bar), claim.page, generation)
    }

    /// Pins every page of a request, wherever it is; tells whether one is in the host's memory.
    pub(super) fn pin_all(
        &self,
        requests: &[Request<'_>],
        stream: Stream,
        slot: Option<StreamSlot>,
    ) -> Result<Option<(Vec<Hold>, Backing)>> {
        let mut holds = Vec::with_capacity(requests.len());
        let mut all = Backing::Device;
        for request in requests {
            match self.pin_readable(request, stream, slot) {
                Ok(Some((hold, backing))) => {
                    holds.push(hold);
                    all = if backing == Backing::Host { backing } else { all };
                }
                missing => {
                    let pinned = requests.iter().zip(&holds);
                    pinned.for_each(|(request, hold)| self.release_unused(request.bar, hold));
                    return missing.map(|_| None);
                }
            }
        }
        Ok(Some((holds, all)))
    }

    /// As `pin`, of pages that may have host frames; tells whether one has.
    fn pin_readable(
        &self,
        request: &Request<'_>,
        stream: Stream,
        slot: Option<StreamSlot>,
    ) -> Result<Option<(Hold, Backing)>> {
        let pages = request.pages.clone();
        let hold = |generations: Vec<_>| {
            let pages = pages.start..pages.start + generations.len() as u32;
            let generations = Generations::Many(generations);
            Hold { pages, generations, stream, slot, kept: false }
        };
        let mut generations = Vec::with_capacity(pages.len());
        let mut backing = Backing::Device;
        for (_, page) in request.bar.table.pages(pages.clone()) {
            match page.pin_readable() {
                Pin::Pinned(word) => {
                    generations.push(word.generation);
                    if word.state == PageState::HostMapped {
                        backing = Backing::Host;
                    }
                }
                Pin::Absent(_) => {
                    self.release_unused(request.bar, &hold(generations));
                    return Ok(None);
                }
                Pin::Full => {
                    self.release_unused(request.bar, &hold(generations));
                    return Err(too_many_pins());
                }
            }
        }
        Ok(Some((hold(generations), backing)))
    }

    /// What a request came to whose pages are all pinned.
    pub(super) fn served(&self, holds: Vec<Hold>, backing: Backing) -> Faulted<Vec<Hold>> {
        match backing {
            Backing::Device => Faulted::Resident(holds),
            Backing::Host => {
                self.device.counters.refuse(Reason::HostMapped);
                Faulted::HostMapped(holds)
            }
        }
    }

    /// What a request came to that is offloaded.
    pub(super) fn refuse<T>(&self, reason: Reason, requests: &[Request<'_>]) -> Faulted<T> {
        self.device.counters.refuse(reason);
        let needed_bytes = needed_pages(requests).saturating_mul(self.page_bytes());
        Faulted::Offloaded(Refusal { reason, needed_bytes })
    }

    /// Gives host frames back that the host's allowance no longer covers, as far as pins and fences
    /// allow; in the scope of the caller.
    pub(super) fn shrink_host(&self) {
        let held = u64::from(self.state.lock().host_frames.held());
        if held > 0 {
            let excess = held.saturating_sub(self.allowed_host_pages());
            self.give_back_hosted(u32::try_from(excess).unwrap_or(u32::MAX));
        }
    }

    /// Gives the host frames back that nobody uses. Returns their bytes.
    ///
    /// # Errors
    /// `DeviceLost`, `ProcessEnding`, or what the driver says.
    pub fn trim_host_frames(&self) -> Result<u64> {
        let trim = || {
            self.device.check()?;
            let _scope = self.device.enter()?;
            self.reap_now()?;
            Ok(u64::from(self.give_back_hosted(u32::MAX)) * self.page_bytes())
        };
        trim().map_err(|error| self.told(error, "giving host frames back"))
    }

    /// Takes up to `count` host frames from pages that nobody uses, those of the lowest rank first,
    /// and gives them back. Returns how many went.
    fn give_back_hosted(&self, count: u32) -> u32 {
        let taken = {
            let mut state = self.state.lock();
            let entries = state.bars.values().filter(|entry| !entry.hosted.is_empty());
            let mut bars: Vec<_> =
                entries.map(|entry| (entry.rank, Arc::clone(&entry.bar))).collect();
            bars.sort_unstable_by_key(|(rank, _)| *rank);
            let mut taken = Taken::new();
            for (_, bar) in bars {
                let missing = count as usize - taken.len();
                taken.extend(take_hosted(&mut state, &self.device, &bar, missing, Usable::Passed));
            }
            taken
        };
        self.part_with_hosted(taken)
    }

    /// Evicts what a closing VBAR has in the host's memory and nobody pins.
    pub(super) fn evict_hosted(&self, id: u32) {
        let taken = {
            let mut state = self.state.lock();
            let Some(bar) = state.bars.get(&id).map(|entry| Arc::clone(&entry.bar)) else { return };
            take_hosted(&mut state, &self.device, &bar, usize::MAX, Usable::Recorded)
        };
        self.part_with_hosted(taken);
    }

    /// Removes pages from the host's memory, or lets those in use linger. Returns the frames that
    /// went to the driver.
    pub(super) fn part_with_hosted(&self, taken: Taken) -> u32 {
        counters::add(&self.device.counters.pages_evicted, taken.len() as u64);
        let released = self.part_or_linger(taken, Destination::Host);
        self.changed.notify_all();
        released
    }
}

impl Backing {
    /// Where a frame goes whose page lost it.
    pub(super) fn destination(self) -> Destination {
        match self {
            Self::Device => Destination::FreeList,
            Self::Host => Destination::Host,
        }
    }
}

/// Pages of a request, each of them once.
fn needed_pages(requests: &[Request<'_>]) -> u64 {
    let range = |request: &Request<'_>| (request.bar.id, request.pages.start, request.pages.end);
    let mut ranges: Vec<_> = requests.iter().map(range).collect();
    ranges.sort_unstable();
    let (mut needed, mut reached) = (0, (0, 0));
    for (bar, start, end) in ranges {
        let start = if reached.0 == bar { start.max(reached.1) } else { start };
        needed += u64::from(end.saturating_sub(start));
        reached = (bar, end.max(start));
    }
    needed
}

fn claim((bar, page): PageOf<'_>) -> Claim {
    let claimed = bar.table.page(page).claim();
    debug_assert!(claimed.is_ok(), "absent pages are claimed under the lock only");
    let (bar, take, users) = (Arc::clone(bar), Take::Create, Vec::new());
    let (backing, asker) = (Backing::Host, Asker::Fault);
    // One copy in the host's memory is enough.
    let (keep, fill) = (Keep::No, bar.filled_by(page));
    Claim { bar, page, take, users, streams: false, backing, keep, fill, asker }
}

/// Whether a page with a host frame is pinned by nobody and its uses are over; under the lock.
pub(super) fn is_idle(device: &Device, page: &Page) -> bool {
    let passed = |user| matches!(device.fences.cover(user), Ok(Cover::Passed));
    page.word().pins == 0 && page.users().into_iter().all(passed)
}

/// Keeps a page where it is, in the host's memory; under the lock.
pub(super) fn protect(bar: &Arc<Bar>, page: PageIndex) -> Result<Protected> {
    match bar.table.page(page).pin_readable() {
        Pin::Pinned(word) => Ok(Protected::new(Arc::clone(bar), page, word.generation)),
        _ => Err(too_many_pins()),
    }
}

/// Starts to move pages out of the host's memory that were idle just now.
pub(super) fn leave(state: &mut State, device: &Device, hosted: &[PageOf<'_>]) -> Taken {
    let take = |(bar, page): &PageOf<'_>| take_page(state, device, bar, *page, Usable::Passed);
    hosted.iter().filter_map(take).collect()
}

fn take_hosted(
    state: &mut State,
    device: &Device,
    bar: &Arc<Bar>,
    count: usize,
    usable: Usable,
) -> Taken {
    let pages: Vec<u32> = state.bar(bar.id).hosted.iter().rev().copied().collect();
    let take = |page| take_page(state, device, bar, PageIndex(page), usable);
    if count == 0 { Taken::new() } else { pages.into_iter().filter_map(take).take(count).collect() }
}

pub(super) fn take_page(
    state: &mut State,
    device: &Device,
    bar: &Arc<Bar>,
    page: PageIndex,
    usable: Usable,
) -> Option<(Victim, Vec<Ticket>)> {
    let entry = bar.table.page(page);
    entry.start_leaving_host().ok()?;
    // Read after the state changed: who unpins later cannot have pinned, so no stamp is missed.
    match Blocked::default().admit(device, entry.users(), usable) {
        Some(users) => {
            state.bar_mut(bar.id).hosted.remove(&page.0);
            Some((Victim { bar: Arc::clone(bar), page, frame: entry.frame() }, users))
        }
        None => {
            entry.settle(PageState::HostMapped);
            None
        }
    }
}
