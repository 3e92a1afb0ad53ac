//! Closing: of a VBAR, which never blocks, and of the runtime, which waits once.
//!
//! A closed VBAR is a zombie until its last page is absent: its pages go when their users have
//! passed and their pins are gone. Looking after zombies is done in passing, by whoever serves a
//! miss, and never takes more than a tenth of the time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Pager;
use super::hands::Parting;
use super::plan::{Blocked, Usable, take_pages};
use super::state::{BarState, Destination, Life};
use crate::counters;
use crate::driver::DriverResult;
use crate::error::{Error, ErrorCode, Result};
use crate::memory::page_table::PageState;
use crate::memory::space;
use crate::memory::vbar::{Bar, Closer};
use crate::outcome::WaitKind;

/// Between two looks at closing VBARs passes this many times what the last one took.
const CLOSING_PAUSE: u32 = 10;

/// What is left of the pages of a VBAR whose last frame has gone.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Left {
    Nothing,
    Quarantined,
}

impl Pager {
    /// Closes a VBAR without blocking: no call on it succeeds from now on; its pages go when their
    /// users have passed and their pins are gone, its reservation when its last page has gone.
    /// Calls under way finish or return `Closed`. Called again it only looks whether what is left
    /// can go now.
    pub fn close_bar(&self, bar: &Bar) {
        // After a fork another thread's copy may hold the lock for ever.
        if crate::process::ending() {
            return;
        }
        if bar.note_closed() == Closer::First {
            self.start_closing(bar);
            self.tell_closed(bar);
            self.forget_all_locked(bar);
        }
        self.tidy_closed(bar);
    }

    fn start_closing(&self, bar: &Bar) {
        let mut state = self.state.lock();
        let Ok(entry) = state.open_mut(bar) else { return };
        entry.life = Life::Closing;
        entry.floor = 0;
        entry.watermark = 0;
        let extent = std::mem::take(&mut entry.extent);
        state.extents = state.extents.saturating_sub(extent);
        state.closing += 1;
        self.update_eager(&state);
        // What is left of it is taken before anything else.
        let recency = state.oldest_recency();
        state.set_rank(bar.id, i32::MIN, recency);
    }

    /// Something that may have been the last that kept a closed VBAR is gone: a pin, a fault under
    /// way, a handle. What can go of it goes now.
    #[cold]
    pub(super) fn tidy_closed(&self, bar: &Bar) {
        if let Err(error) = self.device.check().and_then(|()| self.reap_now()) {
            log::debug!("VBAR {} stays until later: {error}", bar.id);
        }
    }

    /// As `reap`, looking after closing VBARs too, however lately that was done.
    pub(super) fn reap_now(&self) -> Result<()> {
        self.state.lock().closing_next = None;
        self.reap()
    }

    /// Moves closing VBARs on if it is time to; in the scope of the caller.
    pub(super) fn look_after_closing(&self) {
        let started = Instant::now();
        {
            let mut state = self.state.lock();
            if state.closing == 0 || state.closing_next.is_some_and(|next| started < next) {
                return;
            }
            // Nobody else meanwhile.
            state.closing_next = Some(started + Duration::from_secs(1));
        }
        self.finish_closing();
        let pause = started.elapsed().saturating_mul(CLOSING_PAUSE).max(Duration::from_micros(100));
        self.state.lock().closing_next = Some(Instant::now() + pause);
    }

    /// Evicts the unpinned pages of closing VBARs, and frees those VBARs that have none left.
    fn finish_closing(&self) {
        let closing = |(id, entry): (&u32, &BarState)| (entry.life == Life::Closing).then_some(*id);
        let ids: Vec<u32> = self.state.lock().bars.iter().filter_map(closing).collect();
        for id in ids {
            self.evict_closing(id);
            let Some((bar, left)) = self.start_leaving(id) else { continue };
            let kept = self.lift_all_poison(&bar);
            if left == Left::Quarantined || kept.is_some() {
                log::error!("addresses of VBAR {id} are lost: it has pages in quarantine");
            } else if let Err(error) =
                self.device.retry(|| space::free(&*self.device.driver, bar.space))
            {
                let error = self.device.note(error);
                log::error!("addresses of VBAR {id} are lost: {error}");
            }
            let bound = bar.end_filling();
            if let Some(filler) = self.made_filler() {
                filler.retire(bar.id, &bound);
            }
            // Only now: whoever waits for the VBAR to be gone finds its addresses free.
            let mut state = self.state.lock();
            state.bars.remove(&id);
            state.closing -= 1;
        }
    }

    /// Takes on the rest of closing a VBAR, if its last page has gone: nobody claims a page of a
    /// closed VBAR, so none will come back.
    fn start_leaving(&self, id: u32) -> Option<(Arc<Bar>, Left)> {
        let mut state = self.state.lock();
        let entry = state.bars.get_mut(&id)?;
        if entry.life != Life::Closing || !(entry.resident.is_empty() && entry.hosted.is_empty()) {
            return None;
        }
        let mut left = Left::Nothing;
        for (_, page) in entry.bar.table.touched() {
            match page.word().state {
                PageState::Absent => {}
                // It will never be absent: its addresses are lost.
                PageState::Quarantined => left = Left::Quarantined,
                _ => return None,
            }
        }
        entry.life = Life::Leaving;
        Some((Arc::clone(&entry.bar), left))
    }

    /// Evicts what a closing VBAR has unpinned; its frames are recycled.
    fn evict_closing(&self, id: u32) {
        let (taken, _parting) = {
            let mut state = self.state.lock();
            let Some(entry) = state.bars.get(&id) else { return };
            let (pages, mut ignored) = (entry.resident.iter().copied(), Blocked::default());
            // Pinned pages, and those whose uses no fence covers, go another time.
            let usable = Usable::Recorded;
            let taken =
                take_pages(&self.device, &entry.bar, pages, usize::MAX, usable, &mut ignored);
            for (victim, _) in &taken {
                state.remove_resident(id, victim.page);
            }
            counters::add(&self.device.counters.pages_evicted, taken.len() as u64);
            let parting = Parting::new(self, &mut state, taken.len());
            (taken, parting)
        };
        self.part_or_linger(taken, Destination::FreeList);
        self.evict_hosted(id);
    }

    /// Blocks until a closed VBAR is gone.
    ///
    /// # Errors
    /// `TimedOut` while it has pins, and those of waiting.
    pub fn wait_closed(&self, bar: &Bar) -> Result<()> {
        let gone = self.wait_until_gone(bar);
        gone.map_err(|error| self.told(error, format_args!("destroying VBAR {}", bar.id)))
    }

    fn wait_until_gone(&self, bar: &Bar) -> Result<()> {
        let mut wait = None;
        let mut context_waited = false;
        loop {
            self.device.check()?;
            self.reap_now()?;
            let is_leaving = || self.made_filler().is_some_and(|it| it.is_leaving(bar.id));
            if !self.state.lock().bars.contains_key(&bar.id) && !is_leaving() {
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
    /// or an ending process nothing is freed. Nobody will come again, so what fails in passing is
    /// tried again.
    ///
    /// # Errors
    /// `TimedOut` and `Cancelled` when that wait ended before the work did: nothing is freed then,
    /// and whatever would wait for the work has to stay too. What the driver says.
    pub fn close(&self) -> Result<()> {
        if self.device.check().is_err() {
            return Ok(());
        }
        let end = || -> Result<()> {
            let _scope = self.persist(|| self.device.enter())?;
            self.persist(|| self.device.closing_wait())?;
            self.persist(|| self.reap_now())?;
            self.unmap_leftovers();
            self.give_up_poison();
            let handles = {
                let mut state = self.state.lock();
                let host = state.host_frames.drain();
                state.frames.drain().into_iter().chain(host)
            };
            for handle in handles {
                self.log_failure(self.device.retry(|| self.device.driver.mem_release(handle)));
            }
            *self.filler.lock() = None;
            self.device.fences.destroy_events();
            Ok(())
        };
        let ended = end();
        if ended.as_ref().is_err_and(is_work_pending) {
            // Page-locked memory is freed by waiting for the device.
            std::mem::forget(self.filler.lock().take());
        }
        ended
    }

    /// VBARs whose pins were never given back: nobody is left to use them.
    fn unmap_leftovers(&self) {
        let driver = &self.device.driver;
        let bars: Vec<_> = self.state.lock().bars.drain().map(|(_, entry)| entry.bar).collect();
        for bar in bars {
            for (page, entry) in bar.table.touched() {
                if entry.word().state.is_readable() {
                    let address = bar.address(page);
                    self.log_failure(
                        self.device.retry(|| driver.mem_unmap(address, self.page_bytes())),
                    );
                }
            }
            self.lift_all_poison(&bar);
            let freed = self.persist(|| space::free(&**driver, bar.space));
            if let Err(error) = freed {
                log::error!("closing: addresses of VBAR {}: {error}", bar.id);
            }
        }
    }

    /// Tries a step of closing a few times: a transient code must not leak everything.
    fn persist<T>(&self, mut step: impl FnMut() -> Result<T>) -> Result<T> {
        let mut left = 5;
        loop {
            match step() {
                Err(error) if left > 0 && error.code() == ErrorCode::Driver => {
                    log::debug!("closing device {}: {error}, again", self.device.ordinal);
                    std::thread::sleep(Duration::from_millis(1));
                    left -= 1;
                }
                answer => return answer,
            }
        }
    }

    fn log_failure(&self, answer: DriverResult<()>) {
        if let Err(error) = answer {
            log::error!("closing device {}: {}", self.device.ordinal, Error::from(error));
        }
    }
}

/// Whether closing ended although work of the context was pending.
#[must_use]
pub fn is_work_pending(error: &Error) -> bool {
    matches!(error.code(), ErrorCode::TimedOut | ErrorCode::Cancelled)
}
