//! Fetching pages ahead of need, for an engine that knows what comes next.
//!
//! As a fault, but nobody waits for it: it takes frames that no page has, then those of VBARs of
//! lower rank, then of the pages that the engine names, and stops where there are none. Nothing is
//! pinned afterwards. The engine decides which pages, in which order, and at whose cost; what the
//! driver is asked for and how it is undone is `act`'s as for every fault.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::hands::{Grip, InHand};
use super::plan::{Asker, Backing, Blocked, Claim, Take, Usable, take_pages, take_spare};
use super::state::{Life, State};
use super::{Pager, Poll};
use crate::copy::fill::Keep;
use crate::error::Result;
use crate::memory::page_table::PageState;
use crate::memory::vbar::Bar;
use crate::options::Eviction;
use crate::outcome::Reason;
use crate::sync::ticket::Ticket;
use crate::trace::{self, Kind};
use crate::units::PageIndex;

/// A page of a bound VBAR.
#[derive(Clone)]
pub struct PageOf {
    /// The VBAR.
    pub bar: Arc<Bar>,
    /// Its page.
    pub page: u32,
}

/// A page to be fetched.
#[derive(Clone)]
pub struct Wanted {
    /// Which.
    pub page: PageOf,
    /// Whether it goes through a streaming frame, or is to stay.
    pub role: Role,
}

/// What a page that is fetched is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// It stays until the plan changes.
    Kept,
    /// It gives its frame to another when it was used.
    Streamed,
}

/// Pages that may lose their frames to what is fetched.
pub trait Spent {
    /// The page that goes first; it is out of the list then.
    fn take(&mut self) -> Option<PageOf>;
    /// A page that was taken out and could not be had: it is pinned, or a stream uses it that no
    /// fence covers.
    fn put_back(&mut self, page: PageOf);
    /// Frames that pages which a plan has may have: beyond them only what is spent is taken, as
    /// what is free besides will soon be others' again. `None` without a limit.
    fn frame_limit(&self) -> Option<u64>;
}

/// How far a fetch came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fetched {
    /// Pages of the list that have their frame now, from its start.
    pub done: usize,
    /// Why not all of them.
    pub stop: Option<Stop>,
}

/// What a fetch stopped at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// No frame can be had now: the next unpin may give one.
    NoFrame,
    /// The page has an old mapping, or another thread's claim: it is free in a moment.
    InUse,
    /// The page cannot be had at all.
    Refused(Reason),
    /// The VBAR is closed.
    Closed,
}

impl Pager {
    /// Fetches pages in their order, as far as there are frames. `spent`, asked under the device's
    /// lock, names pages that may lose theirs. Waits for no fence and no pin.
    ///
    /// # Errors
    /// `DeviceLost`, `ProcessEnding`, `Io` and `FileChanged` of the file, `TimedOut` and
    /// `Cancelled` of a wait for the staging ring, and what the driver says. Pages before the one
    /// that failed may have their frames.
    pub fn fetch(&self, wanted: &[Wanted], spent: &mut dyn Spent) -> Result<Fetched> {
        self.device.check()?;
        let _scope = self.device.enter()?;
        self.poll_budget(Poll::IfDue)?;
        self.reap()?;
        self.shrink()?;
        self.prepare_poison()?;
        self.ask_ahead(wanted, spent.frame_limit());
        let begin_ns = trace::begin();
        let (claims, fetched, _under_way) = {
            let mut state = self.state.lock();
            let (claims, fetched) = self.plan_ahead(&mut state, wanted, spent);
            let under_way = UnderWay::new(self, &mut state, wanted, claims.len());
            (claims, fetched, under_way)
        };
        if claims.is_empty() {
            return Ok(fetched);
        }
        let _span = self.span_of_claims(Kind::Prefetch, begin_ns, &claims);
        let (count, pages) = (claims.len() as u64, fetched.done);
        match self.act(claims, None) {
            Ok(_none) => {
                crate::counters::add(&self.device.counters.pages_ahead, count);
                Ok(Fetched { done: pages, ..fetched })
            }
            Err(failure) => {
                if failure.into_reason()? == Reason::DriverMemory {
                    self.cap_budget();
                }
                Ok(Fetched { done: 0, stop: Some(Stop::NoFrame) })
            }
        }
    }

    /// Asks whoever holds frames that it can do without for those that there are not: before the
    /// engine names pages that lose theirs.
    fn ask_ahead(&self, wanted: &[Wanted], limit: Option<u64>) {
        let Some(reclaimer) = self.reclaimer() else { return };
        let missing = {
            let state = self.state.lock();
            let absent = |wanted: &&Wanted| {
                let PageOf { bar, page } = &wanted.page;
                bar.table.word(PageIndex(*page)).state == PageState::Absent
            };
            let needed = wanted.iter().filter(absent).count() as u64;
            let needed = needed.min(spare_count(&state, limit)) as u32;
            let there = state.frames.free_count() + state.creatable(self.page_bytes());
            if state.is_turn(None) {
                needed.saturating_sub(there + state.leaving_count())
            } else {
                0
            }
        };
        if missing > 0 {
            reclaimer.reclaim(missing);
        }
    }

    /// Claims what frames can be had for.
    fn plan_ahead(
        &self,
        state: &mut State,
        wanted: &[Wanted],
        spent: &mut dyn Spent,
    ) -> (Vec<Claim>, Fetched) {
        let mut search = Search {
            pager: self,
            spare_count: spare_count(state, spent.frame_limit()),
            blocked_pages: Vec::new(),
            blocked: Blocked::default(),
        };
        let mut claims = Vec::new();
        let mut fetched = Fetched { done: 0, stop: None };
        // Who waits for frames already comes first.
        if !state.is_turn(None) {
            fetched.stop = Some(Stop::NoFrame);
            return (claims, fetched);
        }
        for entry in wanted {
            let PageOf { bar, page } = &entry.page;
            if state.open(bar).is_err() {
                fetched.stop = Some(Stop::Closed);
                break;
            }
            let found = match bar.table.page(PageIndex(*page)).word().state {
                state if state.is_mapped() => None,
                // Its bytes are the program's to write, which it does when it faults.
                PageState::Absent if !bar.streams(*page) => {
                    fetched.stop = Some(Stop::Refused(Reason::AboveWatermark));
                    break;
                }
                PageState::Absent => Some(search.take(state, bar, spent)),
                // It is read where it is; the next fault moves it.
                PageState::HostMapped => {
                    fetched.stop = Some(Stop::Refused(Reason::HostMapped));
                    break;
                }
                PageState::Quarantined => {
                    fetched.stop = Some(Stop::Refused(Reason::Quarantined));
                    break;
                }
                _ => {
                    fetched.stop = Some(Stop::InUse);
                    break;
                }
            };
            match found {
                None => {}
                Some(Some((take, users))) => claims.push(claim(state, entry, take, users)),
                Some(None) => {
                    fetched.stop = Some(Stop::NoFrame);
                    break;
                }
            }
            fetched.done += 1;
        }
        // What is pinned still is asked again the next time.
        search.blocked_pages.into_iter().for_each(|page| spent.put_back(page));
        (claims, fetched)
    }

    /// Says which pages of a bound VBAR are to stay: faults take the others first. `None`: no plan.
    /// `streamed` says whether the bytes of the others are worth a place in page-locked memory.
    pub fn set_kept(&self, bar: &Bar, kept: Option<Arc<BTreeSet<u32>>>, streamed: Keep) {
        self.trace_plan(bar, kept.as_ref().map_or(0, |kept| kept.len()));
        if let Ok(entry) = self.state.lock().open_mut(bar) {
            (entry.kept, entry.keep_streamed) = (kept, streamed);
        }
    }

    /// An open VBAR by its number.
    #[must_use]
    pub fn bar(&self, number: u32) -> Option<Arc<Bar>> {
        let state = self.state.lock();
        let entry = state.bars.get(&number)?;
        (!entry.bar.is_closed()).then(|| Arc::clone(&entry.bar))
    }

    /// Class of a VBAR; that of a closed one is the lowest.
    #[must_use]
    pub fn class_of(&self, bar: &Bar) -> i32 {
        self.state.lock().open(bar).map_or(i32::MIN, |entry| entry.rank.class)
    }

    /// Time that a MiB took on the link lately, in nanoseconds; `None` before that was measured.
    #[must_use]
    pub fn link_ns_per_mib(&self) -> Option<u64> {
        self.filler.lock().as_ref()?.link_ns_per_mib()
    }

    /// Frames that the VBARs of some numbers can have together: what others hold is theirs, but for
    /// what whoever is asked for frames can do without. Asks under the device's lock.
    #[must_use]
    pub fn frames_for(&self, is_asked_for: impl Fn(u32) -> bool) -> u64 {
        let spare = self.reclaimer().map_or(0, |reclaimer| reclaimer.spare(None));
        let state = self.state.lock();
        let others = state.bars.iter().filter(|(number, _)| !is_asked_for(**number));
        let open = others.filter(|(_, entry)| entry.life == Life::Open);
        let held: u64 = open.map(|(_, entry)| entry.resident.len() as u64).sum();
        let lost = u64::from(state.frames.quarantined());
        let allowed = state.allowed_pages(self.device.options.page_size);
        allowed.saturating_sub((held + lost).saturating_sub(u64::from(spare)))
    }
}

/// A fetch whose frames have no page yet: a fault that lacks frames waits for its end.
struct UnderWay<'a> {
    pager: &'a Pager,
    wanted: &'a [Wanted],
    count: u32,
    _in_hand: Option<InHand<'a>>,
}

impl<'a> UnderWay<'a> {
    fn new(pager: &'a Pager, state: &mut State, wanted: &'a [Wanted], claims: usize) -> Self {
        let count = claims as u32;
        state.ahead_count += count;
        let in_hand = (count > 0).then(|| InHand::new(pager, state, Grip::Coming));
        Self { pager, wanted, count, _in_hand: in_hand }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if self.count == 0 {
            return;
        }
        self.pager.state.lock().ahead_count -= self.count;
        self.pager.changed.notify_all();
        // What it had claimed kept a VBAR that was closed meanwhile.
        if let Some(closed) = self.wanted.iter().find(|wanted| wanted.page.bar.is_closed()) {
            self.pager.tidy_closed(&closed.page.bar);
        }
    }
}

/// Frames without a page that may be taken while pages with a plan are to have `limit` at most.
fn spare_count(state: &State, limit: Option<u64>) -> u64 {
    limit.map_or(u64::MAX, |limit| {
        let planned = state.bars.values().filter(|entry| entry.kept.is_some());
        limit.saturating_sub(planned.map(|entry| entry.resident.len() as u64).sum())
    })
}

fn claim(state: &mut State, wanted: &Wanted, take: Take, users: Vec<Ticket>) -> Claim {
    if let Take::Victim(victim) = &take {
        state.remove_resident(victim.bar.id, victim.page);
    }
    let (bar, page) = (Arc::clone(&wanted.page.bar), PageIndex(wanted.page.page));
    let claimed = bar.table.page(page).claim();
    debug_assert!(claimed.is_ok(), "absent pages are claimed under the lock only");
    let streams = wanted.role == Role::Streamed;
    let keep = if streams { state.bar(bar.id).keep_streamed } else { Keep::No };
    let (backing, asker) = (Backing::Device, Asker::Engine);
    let fill = bar.filled_by(page);
    Claim { bar, page, take, users, streams, backing, keep, fill, asker }
}

struct Search<'a> {
    pager: &'a Pager,
    /// Frames without a page that may be taken.
    spare_count: u64,
    /// Pages that were named and cannot be had now.
    blocked_pages: Vec<PageOf>,
    blocked: Blocked,
}

impl Search<'_> {
    fn take(
        &mut self,
        state: &mut State,
        bar: &Arc<Bar>,
        spent: &mut dyn Spent,
    ) -> Option<(Take, Vec<Ticket>)> {
        let device = &self.pager.device;
        let strict = device.options.eviction == Eviction::Strict;
        let usable = if strict { Usable::Passed } else { Usable::Recorded };
        if self.spare_count > 0 {
            let (mut spare, _) = take_spare(state, device, 1, usable, None);
            if let Some(taken) = spare.pop() {
                self.spare_count -= 1;
                return Some(taken);
            }
        }
        let limit = state.bar(bar.id).rank;
        for rank in state.order.range(..limit) {
            let entry = state.bar(rank.bar);
            if entry.kept.is_some() {
                continue;
            }
            let pages = entry.resident.range(entry.floor..).rev().copied();
            let found = take_pages(device, &entry.bar, pages, 1, usable, &mut self.blocked);
            if let Some((victim, users)) = found.into_iter().next() {
                return Some((Take::Victim(victim), users));
            }
        }
        while let Some(PageOf { bar, page }) = spent.take() {
            let known = state.open(&bar).is_ok_and(|entry| entry.resident.contains(&page));
            if !known {
                continue;
            }
            let one = std::iter::once(page);
            let found = take_pages(device, &bar, one, 1, usable, &mut self.blocked);
            match found.into_iter().next() {
                Some((victim, users)) => return Some((Take::Victim(victim), users)),
                None => self.blocked_pages.push(PageOf { bar, page }),
            }
        }
        None
    }
}
