//! The plan of a fault: which pages to give a frame, and where each frame comes from.
//!
//! Made under the device's lock, for the whole request at once: either every page of every range
//! gets its frame or nothing has changed. Resident pages are pinned first, so that they cannot be
//! taken as victims of the same request. Order of taking: a free frame whose users have passed, a
//! new frame under the budget, a free frame still in use, then victims by rank; for an allocator's
//! arena, before new ones, those that its stream comes after anyway. Short queries of
//! events are the only driver calls here; none of them waits.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::state::{BarState, Lingering, State};
use super::{Request, Role, host_mapped};
use crate::copy::fill::Keep;
use crate::driver::CaptureState;
use crate::error::{Error, ErrorCode, Result};
use crate::memory::budget::BudgetSource;
use crate::memory::page_table::{PageState, Pin};
use crate::memory::policy::{Rank, streaming_page_count};
use crate::memory::vbar::Bar;
use crate::options::Eviction;
use crate::outcome::{Reason, WaitKind};
use crate::sync::device::Device;
use crate::sync::fence::{Cover, Look, StreamSlot};
use crate::sync::ticket::Ticket;
use crate::units::PageIndex;

pub(super) use super::claim::{Asker, Backing, Claim, Protected, Take, Taken, Victim};

/// Which frames a request can use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Usable {
    /// Any whose users a stream can wait for.
    Recorded,
    /// Only those whose users have passed.
    Passed,
    /// None: the stream is being captured, so only what is resident will do.
    Nothing,
}

/// What planning came to.
pub(super) enum Planned {
    /// Every page was resident and is protected.
    Ready(Vec<Protected>),
    /// The claims are made; the resident pages of the request are protected.
    Act(Vec<Claim>, Vec<Protected>),
    /// There are frames for pages that have host frames, which they are leaving; ask again.
    LeaveHost(Taken),
    /// Nothing has changed; so many frames are missing, and somebody may give them back.
    Reclaim(u32),
    /// Nothing has changed; ask again when this has moved.
    Wait(WaitKind),
    /// Nothing has changed; frames could be had after a wait for the whole context.
    ContextWait,
    /// Nothing has changed: offloaded.
    Refuse(Reason),
}

/// Whether others are asked for frames before pages are evicted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reclaiming {
    /// Yes: plan without victims first.
    First,
    /// They have nothing to give, or there are none.
    Done,
}

/// How far a request has come with its waiting.
#[derive(Clone, Copy)]
pub(super) struct Standing {
    /// Its place in the line of those that wait for frames, if it waits.
    pub(super) turn: Option<u64>,
    pub(super) reclaim: Reclaiming,
    /// Of the stream that it is for.
    pub(super) capture: CaptureState,
    /// That stream.
    pub(super) slot: Option<StreamSlot>,
}

/// Plans a request.
pub(super) fn plan(
    state: &mut State,
    device: &Device,
    items: &[Request<'_>],
    usable: Usable,
    standing: Standing,
) -> Result<Planned> {
    // Under the lock: a VBAR that is open now cannot be forgotten before its claims are settled.
    items.iter().try_for_each(|item| state.open(item.bar).map(drop))?;
    let now = device.fences.now();
    let widest = items.iter().map(|item| u64::from(item.pages.end - item.pages.start)).max();
    if widest.unwrap_or(0) > state.allowed_pages(device.options.page_size) {
        // Before its pages are looked at: the place for their words is made when they are.
        return Ok(Planned::Refuse(match state.budget.allowed().1 {
            BudgetSource::DriverRefused => Reason::DriverMemory,
            _ => Reason::TooLarge,
        }));
    }
    let (protected, wanted, hosted) = match protect_resident(state, device, items, standing)? {
        Walk::Pages(protected, wanted, hosted) => (protected, wanted, hosted),
        Walk::Wait(kind) => return Ok(Planned::Wait(kind)),
        Walk::ContextWait => return Ok(Planned::ContextWait),
        Walk::Refuse(reason) => return Ok(Planned::Refuse(reason)),
    };
    if wanted.is_empty() {
        return Ok(Planned::Ready(protected));
    }
    if usable == Usable::Nothing {
        return Ok(Planned::Refuse(Reason::Capture));
    }
    if !state.is_turn(standing.turn) {
        return Ok(Planned::Wait(WaitKind::Frame));
    }
    let taken = below_watermark(state, device, &wanted, now).and_then(|()| {
        // What an allocator gives away as it asks for more is to be used again, not added to.
        let arenas = items.iter().all(|item| item.bar.is_arena());
        let behind = if arenas { standing.slot } else { None };
        let how = (usable, standing.reclaim, behind);
        take_frames(state, device, items, (&wanted, &protected), how)
    });
    Ok(match taken {
        Ok((takes, _)) if !hosted.is_empty() => {
            untake(state, takes);
            Planned::LeaveHost(host_mapped::leave(state, device, &hosted))
        }
        Ok((takes, own)) => Planned::Act(claim(&wanted, takes, own, state), protected),
        Err(Stop::Refuse(reason)) => Planned::Refuse(reason),
        Err(Stop::ContextWait) => Planned::ContextWait,
        Err(Stop::Reclaim(frames)) => Planned::Reclaim(frames),
        Err(Stop::Wait(kind)) => Planned::Wait(kind),
        Err(Stop::Error(error)) => return Err(error),
    })
}

enum Stop {
    Refuse(Reason),
    ContextWait,
    Reclaim(u32),
    Wait(WaitKind),
    Error(Error),
}

pub(super) type PageOf<'a> = (&'a Arc<Bar>, PageIndex);

enum Walk<'a> {
    /// Protected, to be given a frame, and of those the ones that have host frames.
    Pages(Vec<Protected>, Vec<PageOf<'a>>, Vec<PageOf<'a>>),
    Wait(WaitKind),
    ContextWait,
    Refuse(Reason),
}

/// Protects what is resident and lists what is absent, each page once.
fn protect_resident<'a>(
    state: &State,
    device: &Device,
    items: &[Request<'a>],
    standing: Standing,
) -> Result<Walk<'a>> {
    let (mut protected, mut hosted) = (Vec::new(), Vec::new());
    let mut wanted: Vec<PageOf<'a>> = Vec::new();
    // Pages repeat only when ranges of one request share a page.
    let mut seen = HashSet::new();
    for item in items {
        for (index, page) in item.bar.table.pages(item.pages.clone()) {
            let word = match page.pin() {
                Pin::Pinned(word) => {
                    let bar = Arc::clone(item.bar);
                    protected.push(Protected::new(bar, index, word.generation));
                    continue;
                }
                Pin::Full => {
                    let text = format!(
                        "page {index} has as many pins as can be counted (65535): give guards back"
                    );
                    return Err(Error::new(ErrorCode::TooManyPins, text));
                }
                Pin::Absent(word) => word,
            };
            match word.state {
                PageState::Absent => {
                    if items.len() == 1 || seen.insert((item.bar.id, index)) {
                        wanted.push((item.bar, index));
                    }
                }
                PageState::HostMapped => {
                    if host_mapped::is_idle(device, page) {
                        if items.len() == 1 || seen.insert((item.bar.id, index)) {
                            wanted.push((item.bar, index));
                            hosted.push((item.bar, index));
                        }
                    } else if standing.capture != CaptureState::None {
                        return Ok(Walk::Refuse(Reason::Capture));
                    } else {
                        // Somebody uses it where it is; so does this request.
                        protected.push(host_mapped::protect(item.bar, index)?);
                    }
                }
                PageState::Quarantined => return Ok(Walk::Refuse(Reason::Quarantined)),
                PageState::Evicting if will_pass(state, device, item.bar, index) => {
                    return Ok(Walk::Wait(WaitKind::OldMapping));
                }
                PageState::Evicting => return Ok(Walk::ContextWait),
                _ => return Ok(Walk::Wait(WaitKind::Claim)),
            }
        }
    }
    Ok(Walk::Pages(protected, wanted, hosted))
}

/// Whether the users of an evicting page are known to pass by themselves. A copy that could not be
/// covered is not: only a wait for the context tells that it is done.
pub(super) fn will_pass(state: &State, device: &Device, bar: &Bar, page: PageIndex) -> bool {
    let same = |entry: &&Lingering| entry.bar.id == bar.id && entry.page == page;
    let users = state.lingering.iter().find(same).map_or(&[][..], |entry| &entry.users);
    users.iter().all(|user| !matches!(device.fences.cover(*user), Ok(Cover::Unknown)))
}

fn below_watermark(
    state: &mut State,
    device: &Device,
    wanted: &[PageOf<'_>],
    now: Duration,
) -> std::result::Result<(), Stop> {
    let page_bytes = device.options.page_size.bytes();
    let surplus =
        state.creatable(page_bytes) + state.frames.free_count() + state.closing_resident();
    for (bar, page) in wanted {
        let entry = state.bar_mut(bar.id);
        if bar.streams(page.0) || bar.is_arena() || page.0 < entry.watermark {
            continue;
        }
        let healed = entry.healing.observe(now, surplus);
        entry.watermark = entry.watermark.saturating_add(healed).min(bar.table.page_count());
        if page.0 >= entry.watermark {
            return Err(Stop::Refuse(Reason::AboveWatermark));
        }
    }
    Ok(())
}

/// Frames that were taken, with what may still use them.
type Frames = Vec<(Take, Vec<Ticket>)>;

/// Finds a frame for every wanted page, or gives back what it took.
fn take_frames(
    state: &mut State,
    device: &Device,
    items: &[Request<'_>],
    (wanted, protected): (&[PageOf<'_>], &[Protected]),
    (usable, reclaim, behind): (Usable, Reclaiming, Option<StreamSlot>),
) -> std::result::Result<(Frames, OwnVictims), Stop> {
    let needed = wanted.len();
    let (takes, blocked) = take_spare(state, device, needed, usable, behind);
    if takes.len() < needed && reclaim == Reclaiming::First {
        let missing = (needed - takes.len()) as u32;
        untake(state, takes);
        return Err(Stop::Reclaim(missing));
    }
    let mut search = Search { device, usable, needed, blocked, takes };
    let own = search.victims(state, items);
    let Search { takes, blocked, .. } = search;
    if takes.len() < needed {
        let allowed = state.allowed_pages(device.options.page_size);
        untake(state, takes);
        // What the request has already counts: it cannot give way to the rest of it.
        let own: HashSet<_> = protected.iter().map(|own| (own.bar.id, own.page)).collect();
        let too_large = (needed + own.len()) as u64 > allowed;
        return Err(blocked.stop(device, too_large, state));
    }
    Ok((takes, own))
}

/// Up to `needed` frames that no page has to give up: free ones, new ones under the budget, free
/// ones that are still in use, and those of pages that only wait for their last users to be gone.
/// Before new ones come those whose users are all before the stream `behind` anyway.
pub(super) fn take_spare(
    state: &mut State,
    device: &Device,
    needed: usize,
    usable: Usable,
    behind: Option<StreamSlot>,
) -> (Vec<(Take, Vec<Ticket>)>, Blocked) {
    let mut takes: Vec<(Take, Vec<Ticket>)> = Vec::with_capacity(needed);
    let passed = |users: &[Ticket]| {
        users.iter().all(|user| device.fences.known_passed(*user)).then(Vec::new)
    };
    let free = |(frame, users)| (Take::Free(frame), users);
    takes.extend(state.frames.take_free(needed, passed).into_iter().map(free));
    if let Some(slot) = behind.filter(|_| usable == Usable::Recorded) {
        let fences = &device.fences;
        let before =
            |user: &Ticket| fences.is_recorded(*user) && fences.ordered_before(*user, slot);
        let before = |users: &[Ticket]| users.iter().all(before).then(|| users.to_vec());
        let missing = needed - takes.len();
        takes.extend(state.frames.take_free(missing, before).into_iter().map(free));
        let missing = needed - takes.len();
        takes.extend(state.take_leaving(missing, before).into_iter().map(free));
    }
    let creatable = state.creatable(device.options.page_size.bytes()) as usize;
    let created = (needed - takes.len()).min(creatable);
    state.frames.start_creating(created as u32);
    takes.extend((0..created).map(|_| (Take::Create, Vec::new())));
    let mut blocked = Blocked::default();
    let mut in_use = |users: &[Ticket]| blocked.admit(device, users.to_vec(), usable);
    let missing = needed - takes.len();
    takes.extend(state.frames.take_free(missing, &mut in_use).into_iter().map(free));
    // Strictly, a frame's old mapping goes before the new one comes.
    if usable == Usable::Recorded {
        let missing = needed - takes.len();
        takes.extend(state.take_leaving(missing, &mut in_use).into_iter().map(free));
    }
    (takes, blocked)
}

fn claim(
    wanted: &[PageOf<'_>],
    takes: Vec<(Take, Vec<Ticket>)>,
    own: OwnVictims,
    state: &mut State,
) -> Vec<Claim> {
    for (take, _) in &takes {
        if let Take::Victim(victim) = take {
            state.remove_resident(victim.bar.id, victim.page);
        }
    }
    wanted
        .iter()
        .zip(takes)
        .map(|((bar, page), (take, users))| {
            let claimed = bar.table.page(*page).claim();
            debug_assert!(claimed.is_ok(), "absent pages are claimed under the lock only");
            let (bar, page) = (Arc::clone(bar), *page);
            let planned = state.bar(bar.id).role_of(page);
            let streams = planned.map_or(own == OwnVictims::Some && bar.streams(page.0), |role| {
                role == Role::Streamed
            });
            let keep = match planned {
                Some(Role::Streamed) => state.bar(bar.id).keep_streamed,
                _ => Keep::No,
            };
            let (backing, asker) = (Backing::Device, Asker::Fault);
            let fill = bar.filled_by(page);
            Claim { bar, page, take, users, streams, backing, keep, fill, asker }
        })
        .collect()
}

/// Puts back what a refused plan took.
pub(super) fn untake(state: &mut State, takes: Vec<(Take, Vec<Ticket>)>) {
    for (take, users) in takes {
        match take {
            Take::Free(frame) => state.frames.put_free(frame, users),
            Take::Create => state.frames.cancel_creating(1),
            // Issued and not Resident: whoever hits the page finds out again.
            Take::Victim(victim) => victim.entry().settle(PageState::Issued),
        }
    }
}

/// Why candidates could not be taken.
#[derive(Default)]
pub(super) struct Blocked {
    pub(super) pinned: u32,
    pub(super) unknown: u32,
    pub(super) pending: u32,
    /// The driver would not say: an invalid context or handle, a lost device.
    pub(super) failed: Option<Error>,
    look: Look,
}

impl Blocked {
    fn stop(self, device: &Device, too_large: bool, state: &State) -> Stop {
        if let Some(error) = self.failed {
            return Stop::Error(device.note(error));
        }
        let strict = device.options.eviction == Eviction::Strict;
        let reason = if state.budget.allowed().1 == BudgetSource::DriverRefused {
            Reason::DriverMemory
        } else if too_large {
            Reason::TooLarge
        } else if state.ahead_count + state.parting_count + state.shrinking_count > 0 {
            // The frames of a fetch, and of pages whose mappings somebody removes, can be had in a
            // moment; who is in the line has them first.
            return Stop::Wait(WaitKind::Frame);
        } else if self.pending > 0 {
            if strict {
                return Stop::Wait(WaitKind::Frame);
            }
            Reason::FencePending
        } else if self.unknown > 0 {
            if device.may_wait_for_context() {
                return Stop::ContextWait;
            }
            Reason::FenceUnknown
        } else if self.pinned > 0 {
            Reason::AllPinned
        } else {
            Reason::Budget
        };
        Stop::Refuse(reason)
    }

    /// Whether a frame with these users can be taken; counts why not. Returns the users that have
    /// not passed.
    pub(super) fn admit(
        &mut self,
        device: &Device,
        users: Vec<Ticket>,
        usable: Usable,
    ) -> Option<Vec<Ticket>> {
        let mut remaining = Vec::new();
        for user in users {
            match device.fences.cover_in(&mut self.look, user) {
                Ok(Cover::Passed) => {}
                Ok(Cover::Recorded) => remaining.push(user),
                Ok(Cover::Unknown) => {
                    self.unknown += 1;
                    return None;
                }
                Err(error) => {
                    self.failed = Some(error);
                    return None;
                }
            }
        }
        if usable == Usable::Passed && !remaining.is_empty() {
            self.pending += 1;
            return None;
        }
        Some(remaining)
    }
}

/// Whether a request took pages of its own VBAR: the sign that it streams.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OwnVictims {
    None,
    Some,
}

/// A search for victims under way. It stops at the first frame too many, so that its cost does not
/// grow with the pages and VBARs that it leaves alone.
struct Search<'a> {
    device: &'a Device,
    usable: Usable,
    needed: usize,
    blocked: Blocked,
    takes: Vec<(Take, Vec<Ticket>)>,
}

impl Search<'_> {
    /// Takes victims in order of rank; pages of the requester itself last.
    fn victims(&mut self, state: &mut State, items: &[Request<'_>]) -> OwnVictims {
        let lowest = items.iter().min_by_key(|item| state.bar(item.bar.id).rank);
        let own = lowest.expect("a request has a range").bar;
        let limit: Rank = state.bar(own.id).rank;
        for rank in state.order.range(..limit) {
            if self.takes.len() == self.needed {
                return OwnVictims::None;
            }
            let entry = state.bar(rank.bar);
            // What a plan keeps is not given up for the pages of its neighbours.
            self.take_from(&entry.bar, entry.not_kept());
        }
        if self.takes.len() == self.needed {
            return OwnVictims::None;
        }
        if state.bar(own.id).kept.is_some() {
            self.victims_of_plans(state, own);
            return OwnVictims::Some;
        }
        if own.is_arena() {
            // What was asked for cannot be computed without, and weights can be streamed.
            [false, true].into_iter().for_each(|kept| self.take_of_plans(state, kept, |_| true));
            return OwnVictims::None;
        }
        let ranges = || items.iter().filter(|item| item.bar.id == own.id).map(|item| &item.pages);
        if !ranges().all(|pages| own.comes_filled(pages)) {
            let entry = state.bar(own.id);
            let end = ranges().map(|pages| pages.end).max().unwrap_or(0).max(entry.floor);
            self.take_from(own, entry.resident.range(end..).rev().copied());
            return OwnVictims::None;
        }
        let widest = ranges().map(|pages| pages.end - pages.start).max().unwrap_or(1);
        let missing = (self.needed - self.takes.len()) as u32;
        top_up_streaming(state, own.id, streaming_page_count(widest.max(missing)) as usize);
        let entry = state.bar(own.id);
        let pending_before = self.blocked.pending;
        self.take_from(own, entry.streaming.iter().copied());
        // Where the CPU waits for frames it waits for a streaming one, rather than take a page that
        // is kept and was last used long ago.
        let strict = self.device.options.eviction == Eviction::Strict;
        if !strict || self.blocked.pending == pending_before {
            let tail = entry.resident.range(entry.floor..).rev().copied();
            self.take_from(own, tail.filter(|page| !entry.streaming.contains(page)));
        }
        // One that no plan has yet, and that has lost all its pages to those that a plan has: it
        // must have frames to be learned.
        let like = |of: &BarState| of.rank.class <= limit.class;
        [false, true].into_iter().for_each(|kept| self.take_of_plans(state, kept, like));
        self.take_from_likes(state, own, limit);
        OwnVictims::Some
    }

    /// Takes pages that no plan keeps: of the VBAR itself, then of the others that have plans, then
    /// of those like it that have none; then what plans keep, lowest rank first.
    fn victims_of_plans(&mut self, state: &State, own: &Arc<Bar>) {
        let entry = state.bar(own.id);
        self.take_from(own, entry.not_kept());
        self.take_of_plans(state, false, |_| true);
        // Such a one takes what streams here, too: it would end up with all that is not pinned.
        self.take_from_likes(state, own, entry.rank);
        self.take_of_plans(state, true, |_| true);
    }

    /// Takes pages that plans keep, or do not.
    fn take_of_plans(&mut self, state: &State, kept: bool, from: impl Fn(&BarState) -> bool) {
        let others = state.order.iter().map(|rank| state.bar(rank.bar));
        for entry in others.filter(|entry| entry.kept.is_some() && from(entry)) {
            match kept {
                true => self.take_from(&entry.bar, entry.kept_pages()),
                false => self.take_from(&entry.bar, entry.not_kept()),
            }
        }
    }

    /// Takes pages of bound VBARs of the same class and a higher rank that have no plan: nor does a
    /// rank keep others like it from streaming through their frames. An order in which models take
    /// turns is learned of faults that are served.
    fn take_from_likes(&mut self, state: &State, own: &Arc<Bar>, rank: Rank) {
        for entry in state.order.range(rank..).map(|rank| state.bar(rank.bar)) {
            let is_like_it = entry.bar.has_filled() && entry.kept.is_none();
            if is_like_it && entry.rank.class == rank.class && entry.bar.id != own.id {
                let pages = entry.resident.range(entry.floor..).rev().copied();
                self.take_from(&entry.bar, pages.filter(|page| entry.bar.streams(*page)));
            }
        }
    }

    fn take_from(&mut self, bar: &Arc<Bar>, candidates: impl Iterator<Item = u32>) {
        let missing = self.needed - self.takes.len();
        let taken =
            take_pages(self.device, bar, candidates, missing, self.usable, &mut self.blocked);
        self.takes.extend(taken.into_iter().map(|(victim, users)| (Take::Victim(victim), users)));
    }
}

/// Makes sure that at least `wanted` pages of a bound VBAR stream, if it has so many: the highest
/// ones that do not yet, behind those that do.
fn top_up_streaming(state: &mut State, bar: u32, wanted: usize) {
    let entry = state.bar_mut(bar);
    let (resident, floor) = (&entry.resident, entry.floor);
    entry.streaming.retain(|page| *page >= floor && resident.contains(page));
    let missing = wanted.saturating_sub(entry.streaming.len());
    let tail = resident.range(floor..).rev().filter(|page| !entry.streaming.contains(page));
    let mut tail: Vec<u32> = tail.take(missing).copied().collect();
    tail.reverse();
    entry.streaming.extend(tail);
}

/// Starts to evict up to `count` of the candidates, in their order; looks at no more of them than
/// it must.
pub(super) fn take_pages(
    device: &Device,
    bar: &Arc<Bar>,
    candidates: impl Iterator<Item = u32>,
    count: usize,
    usable: Usable,
    blocked: &mut Blocked,
) -> Taken {
    let evict = |page| start_evicting(device, bar, PageIndex(page), usable, blocked);
    if count == 0 { Vec::new() } else { candidates.filter_map(evict).take(count).collect() }
}

/// Starts to evict one page if nothing forbids it. The page stays in the sets until the plan holds.
fn start_evicting(
    device: &Device,
    bar: &Arc<Bar>,
    page: PageIndex,
    usable: Usable,
    blocked: &mut Blocked,
) -> Option<(Victim, Vec<Ticket>)> {
    let entry = bar.table.page(page);
    if let Err(word) = entry.start_evicting() {
        blocked.pinned += u32::from(word.pins > 0);
        return None;
    }
    // Read after the state changed: who unpins later cannot have pinned, so no stamp is missed.
    match blocked.admit(device, entry.users(), usable) {
        Some(users) => Some((Victim { bar: Arc::clone(bar), page, frame: entry.frame() }, users)),
        None => {
            entry.settle(PageState::Issued);
            None
        }
    }
}
