//! Giving memory back: mappings that linger, pressure, `free_memory`, trim, and closing.
//!
//! Frames that pressure takes go to the driver; frames that a fault takes are recycled. Nothing
//! here waits for a pin. Waits for fences are counted and bounded.

use std::sync::Arc;

use super::Pager;
use super::hands::{Grip, InHand, Parting};
use super::plan::{Backing, Blocked, Taken, Usable, Victim, take_pages};
use super::state::{Destination, Lingering, LingeringFrame, State};
use crate::counters;
use crate::error::{ErrorCode, Result};
use crate::memory::frames::FrameIndex;
use crate::memory::page_table::PageState;
use crate::memory::vbar::Bar;
use crate::outcome::WaitKind;
use crate::process;
use crate::sync::context::WithoutEvent;
use crate::sync::fence::{Cover, Look};
use crate::sync::ticket::Ticket;

/// Why memory that was asked back did not come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shortfall {
    /// No page of the VBAR (or device) has a frame.
    NothingResident,
    /// What is left lies below the VBAR's floor.
    AtFloor,
    /// What is left is pinned: so many pages.
    AllPinned(u32),
    /// What is left was used by streams that no fence covers, and waits for the context are off.
    FenceUnknown,
    /// What is left was still in use when the time was over.
    TimedOut,
}

/// What `free_memory` came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Freed {
    /// Bytes given back to the driver, whole pages.
    pub bytes: u64,
    /// Why it was less than was asked, if it was.
    pub shortfall: Option<Shortfall>,
}

impl Pager {
    /// Removes mappings that outlasted their pages and whose users have passed, and lets go of the
    /// program's memory that VBARs which are gone were bound to.
    pub(super) fn reap(&self) -> Result<()> {
        self.sweep_memory();
        {
            let state = self.state.lock();
            if state.lingering.is_empty() && state.closing == 0 {
                return Ok(());
            }
        }
        // Before the tables change: what was taken out of them must be carried through.
        let _scope = self.device.enter()?;
        let (ripe, parting) = {
            let mut state = self.state.lock();
            let mut look = Look::default();
            let is_ripe = |entry: &mut Lingering| self.have_passed(&entry.users, &mut look);
            let ripe: Vec<Lingering> = state.lingering.extract_if(.., is_ripe).collect();
            let frames = ripe.iter().filter(|entry| entry.frame.is_of_device()).count();
            let parting = Parting::new(self, &mut state, frames);
            (ripe, parting)
        };
        if !ripe.is_empty() {
            for entry in ripe {
                self.remove_lingering(entry);
            }
            drop(parting);
            self.changed.notify_all();
        }
        self.look_after_closing();
        Ok(())
    }

    /// Whether work is known to be done.
    fn have_passed(&self, users: &[Ticket], look: &mut Look) -> bool {
        let mut covers = users.iter().map(|user| self.device.fences.cover_in(look, *user));
        covers.all(|cover| matches!(cover, Ok(Cover::Passed)))
    }

    fn remove_lingering(&self, entry: Lingering) {
        let Lingering { bar, page, frame, .. } = entry;
        let own = bar.table.page(page).frame();
        let frame = match frame {
            LingeringFrame::Moved => None,
            LingeringFrame::To(frame, destination) => Some((frame, destination)),
        };
        self.part(&Victim { bar, page, frame: own }, frame, Counted::No);
    }

    /// Removes an evicting page's mapping, its users passed, and passes its frame on. Returns
    /// whether the frame went to the driver.
    fn part(
        &self,
        victim: &Victim,
        frame: Option<(FrameIndex, Destination)>,
        counted: Counted,
    ) -> bool {
        if let Err(error) = self.unmap(victim) {
            self.quarantine_page(victim, &error);
            let mut state = self.state.lock();
            state.shrinking_count -= counted as u32;
            match frame {
                Some((frame, to)) => state.frames_of(to.backing()).quarantine(frame),
                None => {
                    state.frames.note_stray(victim.frame);
                    state.frames.drop_old_mapping(victim.frame);
                }
            }
            return false;
        }
        self.settle_unmapped(&victim.bar, victim.page);
        let mut state = self.state.lock();
        // With the frame itself: whoever looks at the books finds it in one of them.
        state.shrinking_count -= counted as u32;
        let Some((frame, destination)) = frame else {
            let handle = state.frames.drop_old_mapping(victim.frame);
            drop(state);
            return handle.is_some_and(|handle| self.release_handle(handle));
        };
        if destination == Destination::Host {
            let handle = state.host_frames.remove(frame);
            drop(state);
            return handle.is_some_and(|handle| self.release_to(Backing::Host, handle));
        }
        let over = state.excess(self.page_bytes()) > 0;
        if destination == Destination::FreeList && !over {
            state.frames.put_free(frame, Vec::new());
            return false;
        }
        let handle = state.frames.remove(frame);
        drop(state);
        handle.is_some_and(|handle| self.release_handle(handle))
    }

    /// Brings the frames held back to the budget, as far as pins and fences allow, waiting for
    /// neither: free frames first, then pages in order of rank. Says what is in the way of more.
    pub(super) fn shrink(&self) -> Result<Excess> {
        if self.is_poison_too_much() {
            let _scope = self.device.enter()?;
            self.give_up_poison();
        }
        if self.state.lock().excess(self.page_bytes()) == 0 {
            return Ok(Excess::None);
        }
        // Before the tables change: what was taken out of them must be carried through.
        let _scope = self.device.enter()?;
        self.reclaim_excess();
        let mut blocked = Blocked::default();
        let (free, pages, missing, in_hand) = {
            let mut state = self.state.lock();
            // What other threads take from their pages now is held still, and need not go twice.
            let leaving = state.frames.leaving() + state.shrinking_count;
            let lingering = state.lingering.iter();
            let releasing = lingering.filter(|entry| entry.frame.is_of_device()).count();
            let excess = state.excess(self.page_bytes()).saturating_sub(releasing as u32 + leaving);
            let free = take_passed_free(&mut state, self, excess);
            let excess = excess - free.len() as u32;
            let pages = self.take_by_rank(&mut state, excess, &mut blocked);
            let missing = excess - pages.len() as u32;
            let (idle, in_use): (Taken, Taken) =
                pages.into_iter().partition(|(_, users)| users.is_empty());
            state.shrinking_count += idle.len() as u32;
            let late = in_use.into_iter().map(|taken| linger(taken, Destination::Driver));
            state.lingering.extend(late);
            let takes = !(free.is_empty() && idle.is_empty());
            let in_hand = takes.then(|| InHand::new(self, &mut state, Grip::Leaving));
            (free, idle, missing, in_hand)
        };
        for handle in free {
            self.release_handle(handle);
        }
        for (victim, _) in &pages {
            self.part(victim, Some((victim.frame, Destination::Driver)), Counted::Yes);
        }
        drop(in_hand);
        // What only helps to find faults gives way when the rest cannot.
        let missing = missing.saturating_sub(self.reclaim_last(missing));
        let given_up = if missing > 0 { self.give_up_poison() } else { 0 };
        self.changed.notify_all();
        // A released frame's memory lives on behind an old mapping that nobody needs any more.
        self.reap()?;
        Ok(match missing.saturating_sub(given_up) {
            0 if self.is_release_unknown() => Excess::Unknown,
            0 => Excess::None,
            _ if blocked.unknown > 0 => Excess::Unknown,
            _ => Excess::InUse,
        })
    }

    /// As [`Pager::shrink`]; what no fence covers is found out by a wait for the context, once and
    /// if that is allowed.
    pub(super) fn shrink_now(&self, without: WithoutEvent) -> Result<()> {
        if self.shrink()? == Excess::Unknown && self.device.may_wait_for_context() {
            let waited = {
                let _scope = self.device.enter()?;
                self.device.context_wait_or(without)
            };
            match waited {
                // Not by this driver, or not now: whoever needs the frames asks again.
                Err(error) if error.code() == ErrorCode::Unsupported => return Ok(()),
                waited => waited?,
            }
            self.reap_now()?;
            self.shrink()?;
        }
        Ok(())
    }

    /// Takes up to `count` pages of any VBAR, lowest rank first, whose users a fence covers. Of a
    /// bound one, which fetches what it lacks wherever it lies, those first that nobody uses any
    /// more: a program enqueues passes ahead, and its last pages are in use until all of them end.
    fn take_by_rank(&self, state: &mut State, count: u32, blocked: &mut Blocked) -> Taken {
        let mut taken: Taken = Vec::new();
        for rank in &state.order {
            let entry = state.bar(rank.bar);
            let mut take = |usable, blocked: &mut Blocked| {
                let pages = entry.resident.range(entry.floor..).rev().copied();
                let missing = count as usize - taken.len();
                taken.extend(take_pages(&self.device, &entry.bar, pages, missing, usable, blocked));
            };
            if entry.bar.has_filled() {
                // What is in the way of these is asked again below.
                take(Usable::Passed, &mut Blocked::default());
            }
            take(Usable::Recorded, blocked);
            if taken.len() == count as usize {
                break;
            }
        }
        self.note_taken(state, &taken);
        taken
    }

    pub(super) fn note_taken(&self, state: &mut State, taken: &[(Victim, Vec<Ticket>)]) {
        let now = self.device.fences.now();
        for (victim, _) in taken {
            state.remove_resident(victim.bar.id, victim.page);
            state.sink_watermark(victim.bar.id, victim.page, now);
            self.trace_evict(victim);
        }
        counters::add(&self.device.counters.pages_evicted, taken.len() as u64);
    }

    /// Parts with evicting pages, those in use when their users have passed. Returns how many
    /// frames went to the driver at once.
    pub(super) fn part_or_linger(&self, pages: Taken, destination: Destination) -> u32 {
        let mut released = 0;
        // The child of a fork that the program made while it waited for their users.
        if process::ending() {
            return released;
        }
        for (victim, users) in pages {
            if users.is_empty() {
                let frame = Some((victim.frame, destination));
                released += u32::from(self.part(&victim, frame, Counted::No));
                continue;
            }
            self.state.lock().lingering.push(linger((victim, users), destination));
        }
        released
    }

    /// Gives memory of one VBAR back to the driver, from its end down to its floor, lowering the
    /// watermark of a bare one. Waits for fences, never for pins.
    ///
    /// # Errors
    /// `Closed`, `DeviceLost`, `ProcessEnding`, `Cancelled`, or what the driver says.
    pub fn free_memory(&self, bar: &Arc<Bar>, bytes: u64) -> Result<Freed> {
        let freed = self.free_from(bar, 0, bytes);
        self.tell_gave_back();
        freed.map_err(|error| {
            self.told(error, format_args!("freeing {bytes} bytes of VBAR {}", bar.id))
        })
    }

    /// As [`Pager::free_memory`], of pages from `first` on only.
    pub(super) fn free_from(&self, bar: &Arc<Bar>, first: u32, bytes: u64) -> Result<Freed> {
        self.device.check()?;
        bar.check_open()?;
        self.free(
            bytes,
            |count| self.take_from_end(bar, first, count),
            || bar.table.touched().any(|(_, page)| page.word().state == PageState::Claimed),
            |blocked| self.why_nothing(bar, blocked),
        )
    }

    /// Gives memory of all VBARs back to the driver, lowest rank first; as
    /// [`Pager::free_memory`].
    ///
    /// # Errors
    /// As [`Pager::free_memory`].
    pub fn free_device_memory(&self, bytes: u64) -> Result<Freed> {
        let freed = self.free_any(bytes);
        self.tell_gave_back();
        freed.map_err(|error| self.told(error, format_args!("freeing {bytes} bytes")))
    }

    fn free_any(&self, bytes: u64) -> Result<Freed> {
        self.device.check()?;
        let trimmed = {
            let count = self.wanted_pages(bytes);
            let held = u64::from(self.state.lock().frames.held()) * self.page_bytes();
            self.trim_free(held.saturating_sub(u64::from(count) * self.page_bytes()))?
        };
        if trimmed >= bytes {
            return Ok(Freed { bytes: trimmed, shortfall: None });
        }
        let take = |count| {
            let mut blocked = Blocked::default();
            let taken = self.take_by_rank(&mut self.state.lock(), count, &mut blocked);
            Ok((taken, blocked))
        };
        let why_nothing = |blocked: &Blocked| match blocked {
            Blocked { unknown: 1.., .. } => Shortfall::FenceUnknown,
            Blocked { pinned: 1.., .. } => Shortfall::AllPinned(blocked.pinned),
            _ => match self.numbers().resident_pages {
                0 => Shortfall::NothingResident,
                _ => Shortfall::AtFloor,
            },
        };
        let any = || true;
        let freed = self.free(bytes - trimmed, take, any, |blocked| Ok(why_nothing(blocked)))?;
        Ok(Freed { bytes: freed.bytes + trimmed, ..freed })
    }

    fn wanted_pages(&self, bytes: u64) -> u32 {
        self.device.options.page_size.pages_for(bytes).min(u64::from(u32::MAX)) as u32
    }

    /// Takes victims, waits for their users and releases their frames, until enough is freed. When
    /// there are no more it waits once for what other threads have in hand, if that may be what is
    /// asked for.
    fn free(
        &self,
        bytes: u64,
        take: impl Fn(u32) -> Result<(Taken, Blocked)>,
        may_be_in_hand: impl Fn() -> bool,
        why_nothing: impl Fn(&Blocked) -> Result<Shortfall>,
    ) -> Result<Freed> {
        self.device.check()?;
        let wanted = self.wanted_pages(bytes);
        let _scope = self.device.enter()?;
        self.reap()?;
        let mut released = 0;
        let (mut context_waited, mut hands_waited) = (false, false);
        let shortfall = loop {
            if released >= wanted {
                break None;
            }
            let (taken, blocked) = take(wanted - released)?;
            if taken.is_empty() {
                if let Some(error) = blocked.failed {
                    return Err(self.device.note(error));
                }
                if blocked.unknown > 0 && !context_waited && self.device.may_wait_for_context() {
                    match self.device.context_wait() {
                        // What was released so far is released.
                        Err(error) if error.code() == ErrorCode::TimedOut => {
                            break Some(Shortfall::TimedOut);
                        }
                        waited => waited?,
                    }
                    context_waited = true;
                    continue;
                }
                if !hands_waited && may_be_in_hand() {
                    hands_waited = true;
                    match self.wait_for_hands(&[Grip::Coming, Grip::Leaving]) {
                        Ok(true) => continue,
                        Ok(false) => {}
                        Err(error) if error.code() == ErrorCode::TimedOut => {
                            break Some(Shortfall::TimedOut);
                        }
                        Err(error) => return Err(error),
                    }
                }
                break Some(why_nothing(&blocked)?);
            }
            let (ready, late) = self.wait_for_victims(taken)?;
            // A frame that came here by aliasing may have its old mapping still, and its memory is
            // the driver's only when that is gone too.
            let reaped = self.reap();
            released += self.part_or_linger(ready, Destination::Driver);
            if !late.is_empty() {
                self.part_or_linger(late, Destination::Driver);
                break Some(Shortfall::TimedOut);
            }
            reaped?;
        };
        self.changed.notify_all();
        Ok(Freed { bytes: u64::from(released) * self.page_bytes(), shortfall })
    }

    fn take_from_end(&self, bar: &Arc<Bar>, first: u32, count: u32) -> Result<(Taken, Blocked)> {
        let mut blocked = Blocked::default();
        let mut state = self.state.lock();
        let entry = state.open(bar)?;
        let pages = entry.resident.range(first.max(entry.floor)..).rev().copied();
        let (count, usable) = (count as usize, Usable::Recorded);
        let taken = take_pages(&self.device, bar, pages, count, usable, &mut blocked);
        self.note_taken(&mut state, &taken);
        Ok((taken, blocked))
    }

    /// Waits until the victims' users have passed. Returns those whose have, their users cleared,
    /// and those that were late.
    pub(super) fn wait_for_victims(&self, taken: Taken) -> Result<(Taken, Taken)> {
        let (mut ready, mut late) = (Vec::new(), Vec::new());
        let mut failed = None;
        for (victim, users) in taken {
            if failed.is_none() {
                failed = self.device.wait_passed(&users, WaitKind::Release).err();
            }
            match &failed {
                None => ready.push((victim, Vec::new())),
                Some(_) => late.push((victim, users)),
            }
        }
        match failed {
            Some(error) if error.code() != ErrorCode::TimedOut => {
                // The pages are on their way out all the same; they go when their users have
                // passed.
                ready.extend(late);
                self.part_or_linger(ready, Destination::Driver);
                Err(error)
            }
            _ => Ok((ready, late)),
        }
    }

    fn why_nothing(&self, bar: &Arc<Bar>, blocked: &Blocked) -> Result<Shortfall> {
        let state = self.state.lock();
        let entry = state.open(bar)?;
        Ok(if entry.resident.is_empty() {
            Shortfall::NothingResident
        } else if entry.resident.range(entry.floor..).next().is_none() {
            Shortfall::AtFloor
        } else if blocked.unknown > 0 {
            Shortfall::FenceUnknown
        } else {
            Shortfall::AllPinned(blocked.pinned)
        })
    }

    /// Releases free frames to the driver until at most `keep_bytes` of frames are held or no free
    /// frame whose users have passed is left; last the poison, if there is no page that it is or
    /// could be behind. Returns the bytes released.
    ///
    /// # Errors
    /// `DeviceLost`, `ProcessEnding`, `Cancelled`, or what the driver says.
    pub fn trim(&self, keep_bytes: u64) -> Result<u64> {
        let trim = || {
            let trimmed = self.trim_free(keep_bytes)?;
            let _scope = self.device.enter()?;
            let poison = self.trim_poison(self.kept_pages(keep_bytes));
            Ok(trimmed + u64::from(poison) * self.page_bytes())
        };
        trim().map_err(|error| self.told(error, format_args!("trimming to {keep_bytes} bytes")))
    }

    fn kept_pages(&self, bytes: u64) -> u32 {
        bytes.div_ceil(self.page_bytes()).min(u64::from(u32::MAX)) as u32
    }

    fn trim_free(&self, keep_bytes: u64) -> Result<u64> {
        self.device.check()?;
        let _scope = self.device.enter()?;
        self.reap_now()?;
        if self.state.lock().closing > 0 && self.device.may_wait_for_context() {
            // Closed VBARs whose last uses no fence covers hold frames that nobody wants.
            match self.device.context_wait() {
                // Then they hold them a while longer; there may be free frames all the same.
                Err(error) if error.code() == ErrorCode::TimedOut => log::debug!("trim: {error}"),
                waited => waited?,
            }
            self.reap_now()?;
        }
        let keep = self.kept_pages(keep_bytes);
        let mut released = self.release_free(keep);
        // Frames that another thread takes from pages whose time is over come free in a moment;
        // or, the first time, begin to linger behind mappings that yet another may remove.
        for _ in 0..2 {
            if self.state.lock().frames.held() <= keep {
                break;
            }
            match self.wait_for_hands(&[Grip::Leaving]) {
                Ok(true) => {
                    self.reap_now()?;
                    released += self.release_free(keep);
                }
                Ok(false) => break,
                Err(error) if error.code() == ErrorCode::TimedOut => {
                    log::debug!("trim: {error}");
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(released * self.page_bytes())
    }

    /// Releases free frames until at most `keep` are held, as far as there are any. Returns how
    /// many went.
    fn release_free(&self, keep: u32) -> u64 {
        let handles = {
            let mut state = self.state.lock();
            let count = state.frames.held().saturating_sub(keep);
            take_passed_free(&mut state, self, count)
        };
        handles.into_iter().filter(|handle| self.release_handle(*handle)).count() as u64
    }

    /// Frames by the table, and mappings by the words: for tests. In a forked child, and at exit,
    /// there is nothing to be looked at.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        if process::ending() {
            return true;
        }
        let contradiction = self.state.lock().contradiction();
        if let Some(what) = &contradiction {
            log::error!("the pager's tables contradict themselves: {what}");
        }
        contradiction.is_none()
    }
}

/// Whether a page that loses its frame is one of `State::shrinking_count`.
#[derive(Clone, Copy)]
enum Counted {
    No,
    Yes,
}

/// The mapping of an evicted page that goes when its users have passed.
fn linger((victim, users): (Victim, Vec<Ticket>), destination: Destination) -> Lingering {
    let Victim { bar, page, frame } = victim;
    Lingering { bar, page, users, frame: LingeringFrame::To(frame, destination) }
}

/// What is left above the budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Excess {
    /// Nothing, or what is on its way.
    None,
    /// Pages that are pinned, or below a floor.
    InUse,
    /// Pages whose uses no fence covers.
    Unknown,
}

fn take_passed_free(
    state: &mut State,
    pager: &Pager,
    count: u32,
) -> Vec<crate::driver::FrameHandle> {
    let mut look = Look::default();
    let mut passed = |users: &[Ticket]| pager.have_passed(users, &mut look);
    let mut handles = Vec::new();
    while handles.len() < count as usize {
        let Some(frame) = state.frames.take_releasable(&mut passed) else { break };
        handles.extend(state.frames.remove(frame));
    }
    handles
}
