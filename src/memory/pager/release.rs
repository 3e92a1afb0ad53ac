//! Giving memory back: mappings that linger, pressure, `free_memory`, trim, and closing.
//!
//! Frames that pressure takes go to the driver; frames that a fault takes are recycled. Nothing
//! here waits for a pin. Waits for fences are counted and bounded.

use std::sync::Arc;

use super::Pager;
use super::plan::{Blocked, Usable, Victim, start_evicting};
use super::state::{Lingering, LingeringFrame, State};
use crate::counters;
use crate::error::{ErrorCode, Result};
use crate::memory::frames::FrameIndex;
use crate::memory::page_table::PageState;
use crate::memory::space;
use crate::memory::vbar::Bar;
use crate::outcome::WaitKind;
use crate::sync::fence::Cover;
use crate::sync::ticket::Ticket;
use crate::units::PageIndex;

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
    /// Removes mappings that outlasted their pages and whose users have passed.
    pub(super) fn reap(&self) -> Result<()> {
        let ripe = {
            let mut state = self.state.lock();
            if state.lingering.is_empty() && state.closing == 0 {
                return Ok(());
            }
            let mut ripe = Vec::new();
            let mut rest = Vec::new();
            for entry in state.lingering.drain(..) {
                match self.passed(&entry.users) {
                    Ok(true) => ripe.push(entry),
                    _ => rest.push(entry),
                }
            }
            state.lingering = rest;
            ripe
        };
        if !ripe.is_empty() {
            let _scope = self.device.enter()?;
            for entry in ripe {
                self.remove_lingering(entry);
            }
            self.changed.notify_all();
        }
        self.finish_closing()
    }

    fn passed(&self, users: &[Ticket]) -> Result<bool> {
        for user in users {
            if self.device.fences.cover(*user)? != Cover::Passed {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn remove_lingering(&self, entry: Lingering) {
        let Lingering { bar, page, frame, .. } = entry;
        let own = bar.table.page(page).frame();
        let frame = match frame {
            LingeringFrame::Moved => None,
            LingeringFrame::Free(frame) => Some((frame, Destination::FreeList)),
            LingeringFrame::Release(frame) => Some((frame, Destination::Driver)),
        };
        self.part(&Victim { bar, page, frame: own }, frame);
    }

    /// Removes an evicting page's mapping, its users passed, and passes its frame on. Returns
    /// whether the frame went to the driver.
    fn part(&self, victim: &Victim, frame: Option<(FrameIndex, Destination)>) -> bool {
        if let Err(error) = self.unmap(victim) {
            self.quarantine_page(victim, &error);
            let mut state = self.state.lock();
            match frame {
                Some((frame, _)) => state.frames.quarantine(frame),
                None => {
                    state.frames.note_stray(victim.frame);
                    state.frames.drop_old_mapping(victim.frame);
                }
            }
            return false;
        }
        victim.entry().settle(PageState::Absent);
        let mut state = self.state.lock();
        let Some((frame, destination)) = frame else {
            let handle = state.frames.drop_old_mapping(victim.frame);
            drop(state);
            return handle.is_some_and(|handle| self.release_handle(handle));
        };
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
    /// neither: free frames first, then pages in order of rank.
    pub(super) fn shrink(&self) -> Result<()> {
        let page_bytes = self.page_bytes();
        let victims = {
            let mut state = self.state.lock();
            let mut excess = state.excess(page_bytes);
            if excess == 0 {
                return Ok(());
            }
            let on_their_way =
                state.lingering.iter().filter(|entry| entry.frame != LingeringFrame::Moved).count();
            excess = excess.saturating_sub(on_their_way as u32 + state.frames.leaving());
            let free = take_passed_free(&mut state, self, excess);
            excess -= free.len() as u32;
            let pages = self.take_by_rank(&mut state, excess, &mut Blocked::default());
            (free, pages)
        };
        let (free, pages) = victims;
        let _scope = self.device.enter()?;
        for handle in free {
            self.release_handle(handle);
        }
        self.release_or_linger(pages);
        self.changed.notify_all();
        // A released frame's memory lives on behind an old mapping that nobody needs any more.
        self.reap()
    }

    /// Takes up to `count` pages of any VBAR, lowest rank first, whose users a fence covers.
    fn take_by_rank(
        &self,
        state: &mut State,
        count: u32,
        blocked: &mut Blocked,
    ) -> Vec<(Victim, Vec<Ticket>)> {
        let mut taken = Vec::new();
        for rank in &state.order {
            let entry = state.bar(rank.bar);
            for page in entry.resident.range(entry.floor..).rev() {
                if taken.len() == count as usize {
                    break;
                }
                let page = PageIndex(*page);
                let usable = Usable::Recorded;
                taken.extend(start_evicting(&self.device, &entry.bar, page, usable, blocked));
            }
        }
        self.note_taken(state, &taken);
        taken
    }

    fn note_taken(&self, state: &mut State, taken: &[(Victim, Vec<Ticket>)]) {
        let now = self.device.fences.now();
        for (victim, _) in taken {
            state.remove_resident(victim.bar.id, victim.page);
            state.sink_watermark(victim.bar.id, victim.page, now);
        }
        counters::add(&self.device.counters.pages_evicted, taken.len() as u64);
    }

    fn release_or_linger(&self, pages: Vec<(Victim, Vec<Ticket>)>) -> u32 {
        let mut released = 0;
        for (victim, users) in pages {
            let frame = victim.frame;
            if users.is_empty() {
                released += u32::from(self.part(&victim, Some((frame, Destination::Driver))));
                continue;
            }
            let Victim { bar, page, .. } = victim;
            let frame = LingeringFrame::Release(frame);
            self.state.lock().lingering.push(Lingering { bar, page, users, frame });
        }
        released
    }

    /// Gives memory of one VBAR back to the driver, from its end down to its floor, lowering the
    /// watermark of a bare one. Waits for fences, never for pins.
    ///
    /// # Errors
    /// `DeviceLost`, `ProcessEnding`, `Cancelled`, or what the driver says.
    pub fn free_memory(&self, bar: &Arc<Bar>, bytes: u64) -> Result<Freed> {
        self.free(
            bytes,
            |count| self.take_from_end(bar, count),
            |blocked| self.why_nothing(bar, blocked),
        )
    }

    /// Gives memory of all VBARs back to the driver, lowest rank first; as
    /// [`Pager::free_memory`].
    ///
    /// # Errors
    /// As [`Pager::free_memory`].
    pub fn free_device_memory(&self, bytes: u64) -> Result<Freed> {
        let trimmed = {
            let count = self.wanted_pages(bytes);
            let held = u64::from(self.state.lock().frames.held()) * self.page_bytes();
            self.trim(held.saturating_sub(u64::from(count) * self.page_bytes()))?
        };
        if trimmed >= bytes {
            return Ok(Freed { bytes: trimmed, shortfall: None });
        }
        let take = |count| {
            let mut blocked = Blocked::default();
            let taken = self.take_by_rank(&mut self.state.lock(), count, &mut blocked);
            (taken, blocked)
        };
        let freed = self.free(bytes - trimmed, take, |blocked| match blocked {
            Blocked { unknown: 1.., .. } => Shortfall::FenceUnknown,
            Blocked { pinned: 1.., .. } => Shortfall::AllPinned(blocked.pinned),
            _ => match self.numbers().resident_pages {
                0 => Shortfall::NothingResident,
                _ => Shortfall::AtFloor,
            },
        })?;
        Ok(Freed { bytes: freed.bytes + trimmed, ..freed })
    }

    fn wanted_pages(&self, bytes: u64) -> u32 {
        self.device.options.page_size.pages_for(bytes).min(u64::from(u32::MAX)) as u32
    }

    /// Takes victims, waits for their users and releases their frames, until enough is freed.
    fn free(
        &self,
        bytes: u64,
        take: impl Fn(u32) -> (Vec<(Victim, Vec<Ticket>)>, Blocked),
        why_nothing: impl Fn(&Blocked) -> Shortfall,
    ) -> Result<Freed> {
        self.device.check()?;
        let wanted = self.wanted_pages(bytes);
        let _scope = self.device.enter()?;
        self.reap()?;
        let mut released = 0;
        let mut context_waited = false;
        let shortfall = loop {
            if released >= wanted {
                break None;
            }
            let (taken, blocked) = take(wanted - released);
            if taken.is_empty() {
                if let Some(error) = blocked.failed {
                    return Err(self.device.note(error));
                }
                if blocked.unknown > 0 && !context_waited && self.device.may_wait_for_context() {
                    self.device.context_wait()?;
                    context_waited = true;
                    continue;
                }
                break Some(why_nothing(&blocked));
            }
            let (ready, late) = self.wait_for_victims(taken)?;
            // A frame that came here by aliasing may have its old mapping still, and its memory is
            // the driver's only when that is gone too.
            let reaped = self.reap();
            released += self.release_or_linger(ready);
            if !late.is_empty() {
                self.release_or_linger(late);
                break Some(Shortfall::TimedOut);
            }
            reaped?;
        };
        self.changed.notify_all();
        Ok(Freed { bytes: u64::from(released) * self.page_bytes(), shortfall })
    }

    fn take_from_end(&self, bar: &Arc<Bar>, count: u32) -> (Vec<(Victim, Vec<Ticket>)>, Blocked) {
        let mut blocked = Blocked::default();
        let mut state = self.state.lock();
        let entry = state.bar(bar.id);
        let mut taken = Vec::new();
        for page in entry.resident.range(entry.floor..).rev() {
            if taken.len() == count as usize {
                break;
            }
            let usable = Usable::Recorded;
            taken.extend(start_evicting(&self.device, bar, PageIndex(*page), usable, &mut blocked));
        }
        self.note_taken(&mut state, &taken);
        (taken, blocked)
    }

    /// Waits until the victims' users have passed. Returns those whose have, their users cleared,
    /// and those that were late.
    #[expect(clippy::type_complexity, reason = "two lists of what came in as one")]
    fn wait_for_victims(
        &self,
        taken: Vec<(Victim, Vec<Ticket>)>,
    ) -> Result<(Vec<(Victim, Vec<Ticket>)>, Vec<(Victim, Vec<Ticket>)>)> {
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
                self.release_or_linger(ready);
                Err(error)
            }
            _ => Ok((ready, late)),
        }
    }

    fn why_nothing(&self, bar: &Arc<Bar>, blocked: &Blocked) -> Shortfall {
        let state = self.state.lock();
        let entry = state.bar(bar.id);
        if entry.resident.is_empty() {
            Shortfall::NothingResident
        } else if entry.resident.range(entry.floor..).next().is_none() {
            Shortfall::AtFloor
        } else if blocked.unknown > 0 {
            Shortfall::FenceUnknown
        } else {
            Shortfall::AllPinned(blocked.pinned)
        }
    }

    /// Releases free frames to the driver until at most `keep_bytes` of frames are held or no free
    /// frame whose users have passed is left. Returns the bytes released.
    ///
    /// # Errors
    /// `DeviceLost`, `ProcessEnding`, or what the driver says.
    pub fn trim(&self, keep_bytes: u64) -> Result<u64> {
        self.device.check()?;
        let _scope = self.device.enter()?;
        self.reap()?;
        let page_bytes = self.page_bytes();
        let handles = {
            let mut state = self.state.lock();
            let keep = keep_bytes.div_ceil(page_bytes).min(u64::from(u32::MAX)) as u32;
            let count = state.frames.held().saturating_sub(keep);
            take_passed_free(&mut state, self, count)
        };
        let released = handles.into_iter().filter(|handle| self.release_handle(*handle));
        Ok(released.count() as u64 * page_bytes)
    }

    /// Closes a VBAR without blocking: pages go when their users have passed and their pins are
    /// gone, the reservation when its last page has gone.
    pub fn close_bar(&self, bar: &Arc<Bar>) {
        // After a fork another thread's copy may hold the lock for ever.
        if crate::process::ending() {
            return;
        }
        {
            let mut state = self.state.lock();
            let entry = state.bar_mut(bar.id);
            entry.closing = true;
            entry.floor = 0;
            let extent = std::mem::take(&mut entry.extent);
            state.extents = state.extents.saturating_sub(extent);
            state.closing += 1;
            self.update_eager(&state);
            // What is left of it is taken before anything else.
            let recency = state.oldest_recency();
            state.set_rank(bar.id, i32::MIN, recency);
        }
        if let Err(error) = self.device.check().and_then(|()| self.reap()) {
            log::debug!("VBAR {} stays until its runtime closes: {error}", bar.id);
        }
    }

    /// Moves closing VBARs on: evicts their unpinned pages, frees those that have none left.
    fn finish_closing(&self) -> Result<()> {
        let ids: Vec<u32> = {
            let state = self.state.lock();
            if state.closing == 0 {
                return Ok(());
            }
            state.bars.iter().filter(|(_, entry)| entry.closing).map(|(id, _)| *id).collect()
        };
        let _scope = self.device.enter()?;
        for id in ids {
            self.evict_closing(id);
            let gone = {
                let mut state = self.state.lock();
                let Some(entry) = state.bars.get(&id) else { continue };
                let states = entry.bar.table.touched().map(|(_, page)| page.word().state);
                let left: Vec<PageState> =
                    states.filter(|state| *state != PageState::Absent).collect();
                // A page in quarantine will never be absent: its addresses are lost.
                if left.iter().any(|state| *state != PageState::Quarantined) {
                    continue;
                }
                state.closing -= 1;
                (state.bars.remove(&id), left.is_empty())
            };
            let (Some(entry), all_absent) = gone else { continue };
            if !all_absent {
                log::error!("addresses of VBAR {id} are lost: it has pages in quarantine");
            } else if let Err(error) = space::free(&*self.device.driver, entry.bar.space) {
                log::error!("addresses of VBAR {id} are lost: {}", self.device.note(error));
            }
        }
        Ok(())
    }

    /// Evicts what a closing VBAR has unpinned; its frames are recycled.
    fn evict_closing(&self, id: u32) {
        let taken = {
            let mut state = self.state.lock();
            let Some(entry) = state.bars.get(&id) else { return };
            let mut taken = Vec::new();
            for page in &entry.resident {
                let mut ignored = Blocked::default();
                let (page, usable) = (PageIndex(*page), Usable::Recorded);
                // Pinned pages, and those whose uses no fence covers, go another time.
                taken.extend(start_evicting(&self.device, &entry.bar, page, usable, &mut ignored));
            }
            for (victim, _) in &taken {
                state.remove_resident(id, victim.page);
            }
            counters::add(&self.device.counters.pages_evicted, taken.len() as u64);
            taken
        };
        for (victim, users) in taken {
            let frame = victim.frame;
            if users.is_empty() {
                self.part(&victim, Some((frame, Destination::FreeList)));
                continue;
            }
            let Victim { bar, page, .. } = victim;
            let frame = LingeringFrame::Free(frame);
            self.state.lock().lingering.push(Lingering { bar, page, users, frame });
        }
    }

    /// Blocks until a closed VBAR is gone.
    ///
    /// # Errors
    /// `TimedOut` while it has pins, and those of waiting.
    pub fn wait_closed(&self, bar: &Arc<Bar>) -> Result<()> {
        let mut wait = None;
        let mut context_waited = false;
        loop {
            self.device.check()?;
            self.reap()?;
            if !self.state.lock().bars.contains_key(&bar.id) {
                return Ok(());
            }
            if !context_waited && self.device.may_wait_for_context() {
                let _scope = self.device.enter()?;
                self.device.context_wait()?;
                context_waited = true;
                continue;
            }
            wait.get_or_insert_with(|| self.device.wait(WaitKind::Release)).pause()?;
        }
    }

    /// Frees everything; no VBAR is open any more. Waits for the context once. With a lost device
    /// or an ending process nothing is freed.
    pub fn close(&self) {
        if self.device.check().is_err() {
            return;
        }
        let end = || -> Result<()> {
            let _scope = self.device.enter()?;
            self.device.fences.context_wait()?;
            self.reap()?;
            self.unmap_leftovers();
            let handles = self.state.lock().frames.drain();
            handles.into_iter().for_each(|handle| {
                if let Err(error) = self.device.driver.mem_release(handle) {
                    log::error!("closing: {error}");
                }
            });
            *self.filler.lock() = None;
            self.device.fences.destroy_events();
            Ok(())
        };
        if let Err(error) = end() {
            log::error!("closing device {}: {error}", self.device.ordinal);
        }
    }

    /// VBARs whose pins were never given back: nobody is left to use them.
    fn unmap_leftovers(&self) {
        let bars: Vec<_> = self.state.lock().bars.drain().map(|(_, entry)| entry.bar).collect();
        for bar in bars {
            for (page, entry) in bar.table.touched() {
                if entry.word().state.is_mapped() {
                    let address = bar.address(page);
                    if let Err(error) = self.device.driver.mem_unmap(address, self.page_bytes()) {
                        log::error!("closing: page {page} of VBAR {}: {error}", bar.id);
                    }
                }
            }
            if let Err(error) = space::free(&*self.device.driver, bar.space) {
                log::error!("closing: addresses of VBAR {}: {error}", bar.id);
            }
        }
    }

    /// Frames by the table, and mappings by the words: for tests.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.state.lock().is_valid()
    }
}

/// Where a frame goes when its page lost it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Destination {
    FreeList,
    Driver,
}

fn take_passed_free(
    state: &mut State,
    pager: &Pager,
    count: u32,
) -> Vec<crate::driver::FrameHandle> {
    let passed = |users: &[Ticket]| pager.passed(users).is_ok_and(|passed| passed);
    let mut handles = Vec::new();
    while handles.len() < count as usize {
        let Some(frame) = state.frames.take_releasable(passed) else { break };
        handles.extend(state.frames.remove(frame));
    }
    handles
}
