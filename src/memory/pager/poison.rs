//! Poison: one frame of a known pattern behind every page that was evicted.
//!
//! A debug mode. A read through an address whose page has gone then gives [`POISON_BYTE`]s and not
//! a dead context. Owns the frame, with addresses of its own through which it is filled once, and
//! the moments at which it is mapped behind a page and taken away again. The frame is one of the
//! table's: it counts against the budget, and each page that it is behind is an old mapping of it,
//! so that it goes back to the driver when the last of those has gone. It is made before the first
//! page gets a frame, while the budget has room for it; it gives way when the budget falls below
//! two pages or when everything else is pinned. What fails here is counted and told to the log, and
//! is no error of the program's; a page that it cannot be taken away from is as it was.
//!
//! It does not make stale reads right. Between the end of a page's mapping and the poison, and
//! between the poison and the page's next frame, the address has nothing behind it for some
//! microseconds; with aliasing a page's old mapping stays until its users have passed; and a stale
//! *write* is seen behind all poisoned pages.
//!
//! [`POISON_BYTE`]: crate::options::POISON_BYTE

use std::sync::Arc;

use super::Pager;
use super::state::{Life, State};
use crate::driver::{DriverError, DriverResult, FrameHandle};
use crate::error::{Error, ErrorCode, Result};
use crate::memory::frames::FrameIndex;
use crate::memory::page_table::{Page, PageState};
use crate::memory::vbar::Bar;
use crate::options::{POISON_BYTE, Poison};
use crate::outcome::WaitKind;
use crate::sync::Relaxed;
use crate::units::{DeviceAddress, PageIndex, Stream};

/// A budget of fewer pages is all for pages.
const BUDGET_PAGES_MIN: u64 = 2;

/// Where the poison is.
pub(super) enum Store {
    /// The mode is off.
    Off,
    /// With the thread that makes it or gives it back.
    Away,
    /// Ready for the next step, or done.
    Here(Home),
}

/// The poison frame and the addresses through which it is filled, as far as they are made. What a
/// failure leaves is gone on from at the next attempt.
#[derive(Default)]
pub(super) struct Home {
    frame: Option<FrameIndex>,
    base: Option<DeviceAddress>,
    stream: Option<Stream>,
    stage: Stage,
}

/// How far the frame has come; in order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
enum Stage {
    #[default]
    Unmapped,
    Mapped,
    Accessible,
    /// The pattern is being written.
    Written,
    /// The pattern is there.
    Filled,
}

impl Store {
    pub(super) fn new(poison: Poison) -> Self {
        match poison {
            Poison::Off => Self::Off,
            Poison::On => Self::Here(Home::default()),
        }
    }

    fn home(&self) -> Option<&Home> {
        match self {
            Self::Here(home) => Some(home),
            _ => None,
        }
    }

    fn take(&mut self) -> Option<Home> {
        match std::mem::replace(self, Self::Away) {
            Self::Here(home) => Some(home),
            other => {
                *self = other;
                None
            }
        }
    }
}

impl State {
    /// Whether the budget, in pages, has one for the poison.
    fn is_poison_affordable(&self, page_bytes: u64) -> bool {
        self.budget.allowed().0 / page_bytes >= BUDGET_PAGES_MIN
    }

    /// Pages of the budget that are the poison's.
    pub(super) fn poison_share(&self, page_bytes: u64) -> u32 {
        let off = matches!(self.poison, Store::Off);
        u32::from(!off && self.is_poison_affordable(page_bytes))
    }

    /// Of those, pages that are not held yet.
    pub(super) fn poison_reserve(&self, page_bytes: u64) -> u32 {
        let waiting = self.poison.home().is_some_and(|home| home.frame.is_none());
        if waiting { self.poison_share(page_bytes) } else { 0 }
    }

    /// The poison's frame, if there is one.
    pub(super) fn poison_frame(&self) -> Option<FrameIndex> {
        self.poison.home()?.frame
    }

    /// The poison's frame, if it can be put behind pages.
    fn filled_poison(&self) -> Option<FrameIndex> {
        self.poison.home().filter(|home| home.stage == Stage::Filled)?.frame
    }

    /// Pages that it is behind.
    pub(super) fn poisoned_pages(&self) -> u32 {
        self.poison_frame().map_or(0, |frame| self.frames.old_mappings(frame))
    }

    /// Each poisoned page is one of the mappings that are counted; for tests and debug builds.
    pub(super) fn is_poison_valid(&self) -> bool {
        let Some(frame) = self.poison_frame() else { return true };
        let bars = self.bars.values();
        let pages = bars.flat_map(|entry| entry.bar.table.touched());
        let of_frame = |page: &Page| page.is_poisoned() && page.frame() == frame;
        let count = pages.filter(|(_, page)| of_frame(page)).count();
        count <= self.frames.old_mappings(frame) as usize
    }
}

impl Pager {
    /// Makes the poison, or goes on with it, where the budget has room.
    /// What fails is counted and no error.
    ///
    /// # Errors
    /// `Cancelled`: the caller's waits are to end.
    pub(super) fn prepare_poison(&self) -> Result<()> {
        if self.device.options.poison == Poison::Off {
            return Ok(());
        }
        let page_bytes = self.page_bytes();
        let mut home = {
            let mut state = self.state.lock();
            if state.filled_poison().is_some() || !state.is_poison_affordable(page_bytes) {
                return Ok(());
            }
            let is_new = state.poison_frame().is_none();
            if is_new && state.room(page_bytes) == 0 {
                return Ok(());
            }
            let Some(home) = state.poison.take() else { return Ok(()) };
            if is_new {
                state.frames.start_creating(1);
            }
            home
        };
        let made = self.create_poison(&mut home).and_then(|()| self.fill_poison(&mut home));
        self.state.lock().poison = Store::Here(home);
        match made {
            Err(error) if error.code() == ErrorCode::Cancelled => Err(error),
            Err(error) => {
                self.count_unpoisoned(error);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// The frame, which is counted as being created if there is none.
    fn create_poison(&self, home: &mut Home) -> Result<()> {
        if home.frame.is_some() {
            return Ok(());
        }
        let (driver, page_bytes) = (&self.device.driver, self.page_bytes());
        match self.device.retry(|| driver.mem_create(self.device.ordinal, page_bytes)) {
            Ok(handle) => {
                home.frame = Some(self.state.lock().frames.created(handle));
                Ok(())
            }
            Err(error) => {
                self.state.lock().frames.cancel_creating(1);
                Err(error.into())
            }
        }
    }

    /// Writes the pattern through addresses and a stream of its own, and waits for that once.
    fn fill_poison(&self, home: &mut Home) -> Result<()> {
        let (driver, page_bytes) = (&self.device.driver, self.page_bytes());
        let frame = home.frame.expect("the frame comes first");
        let base = match home.base {
            Some(base) => base,
            None => self.device.retry(|| driver.mem_address_reserve(page_bytes, page_bytes))?,
        };
        home.base = Some(base);
        if home.stage < Stage::Mapped {
            let handle = self.state.lock().handle(frame);
            self.device.retry(|| driver.mem_map(base, page_bytes, handle))?;
            home.stage = Stage::Mapped;
        }
        if home.stage < Stage::Accessible {
            let devices = [self.device.ordinal];
            self.device.retry(|| driver.mem_set_access(base, page_bytes, &devices))?;
            home.stage = Stage::Accessible;
        }
        let stream = match home.stream {
            Some(stream) => stream,
            None => self.device.retry(|| driver.stream_create())?,
        };
        home.stream = Some(stream);
        if home.stage < Stage::Written {
            self.device.retry(|| driver.memset_d8_async(base, POISON_BYTE, page_bytes, stream))?;
            home.stage = Stage::Written;
        }
        self.wait_for_poison(stream)?;
        home.stage = Stage::Filled;
        Ok(())
    }

    /// As every wait it is bounded, and can be cancelled: the device may be busy with other work.
    fn wait_for_poison(&self, stream: Stream) -> Result<()> {
        let slot = self.device.slot_of(stream)?.expect("a stream that was created has a slot");
        let written = self.device.retry(|| self.device.fences.record(stream, slot))?;
        self.device.wait_passed(&[written], WaitKind::Ready)
    }

    /// The mapping of a page that this thread owns has gone: puts the poison in its place where
    /// that is wanted and possible, and settles the page.
    pub(super) fn settle_unmapped(&self, bar: &Bar, page: PageIndex) {
        let entry = bar.table.page(page);
        // The addresses of a closed VBAR go as soon as they can.
        if self.device.options.poison == Poison::Off || bar.is_closed() {
            return entry.settle(PageState::Absent);
        }
        let poison = {
            let mut state = self.state.lock();
            state.filled_poison().map(|frame| {
                // Counted before it is made: the frame does not go in between.
                state.frames.leave_mapping(frame);
                (frame, state.handle(frame))
            })
        };
        let Some((frame, handle)) = poison else {
            self.device.counters.poison_failures.fetch_add(1, Relaxed);
            return entry.settle(PageState::Absent);
        };
        let lost = match self.map_poison(bar.address(page), handle) {
            Ok(()) => {
                let state = self.state.lock();
                if state.filled_poison() == Some(frame) {
                    entry.set_frame(frame);
                    entry.note_poison();
                    return entry.settle(PageState::Absent);
                }
                // It was given up meanwhile.
                drop(state);
                self.unmap_at(bar.address(page)).err()
            }
            Err(Unpoisoned { error, lost }) => {
                self.count_unpoisoned(error.into());
                lost
            }
        };
        self.end_poison(bar, page, frame, lost);
    }

    /// The poison is not behind the page, which this thread owns; unless it could not be removed.
    fn end_poison(&self, bar: &Bar, page: PageIndex, frame: FrameIndex, lost: Option<DriverError>) {
        let entry = bar.table.page(page);
        match lost {
            None => entry.settle(PageState::Absent),
            Some(error) => {
                self.state.lock().frames.note_stray(frame);
                self.note_quarantine(bar.id, page, &error);
                entry.settle(PageState::Quarantined);
            }
        }
        self.drop_poison_mapping(frame);
    }

    fn map_poison(
        &self,
        address: DeviceAddress,
        handle: FrameHandle,
    ) -> std::result::Result<(), Unpoisoned> {
        let (driver, page_bytes) = (&self.device.driver, self.page_bytes());
        let unmapped = |error| Unpoisoned { error, lost: None };
        self.device.retry(|| driver.mem_map(address, page_bytes, handle)).map_err(unmapped)?;
        let devices = [self.device.ordinal];
        let allowed = self.device.retry(|| driver.mem_set_access(address, page_bytes, &devices));
        allowed.map_err(|error| Unpoisoned { error, lost: self.unmap_at(address).err() })
    }

    /// Takes the poison away from behind a page that this thread owns, if it is there.
    ///
    /// # Errors
    /// What the driver says; the poison is still there then.
    pub(super) fn lift_poison(&self, bar: &Bar, page: PageIndex) -> DriverResult<()> {
        let entry = bar.table.page(page);
        if !entry.is_poisoned() {
            return Ok(());
        }
        self.unmap_at(bar.address(page))?;
        let frame = entry.frame();
        entry.clear_poison();
        self.drop_poison_mapping(frame);
        Ok(())
    }

    fn drop_poison_mapping(&self, frame: FrameIndex) {
        let handle = self.state.lock().frames.drop_old_mapping(frame);
        handle.map(|handle| self.release_handle(handle));
    }

    /// Takes the poison away from behind all pages of a VBAR that nobody uses any more. Returns
    /// what kept it somewhere, the last thing if there are several.
    pub(super) fn lift_all_poison(&self, bar: &Bar) -> Option<DriverError> {
        let mut kept = None;
        for (page, entry) in bar.table.touched().filter(|(_, entry)| entry.is_poisoned()) {
            if let Err(error) = self.lift_poison(bar, page) {
                let frame = entry.frame();
                entry.clear_poison();
                self.state.lock().frames.note_stray(frame);
                self.note_quarantine(bar.id, page, &error);
                self.drop_poison_mapping(frame);
                kept = Some(error);
            }
        }
        kept
    }

    /// Whether the poison holds a frame that the budget has no room for.
    pub(super) fn is_poison_too_much(&self) -> bool {
        let state = self.state.lock();
        state.poison_frame().is_some() && !state.is_poison_affordable(self.page_bytes())
    }

    /// Gives the poison back from behind all pages; when it does not go from one of them it stays
    /// what it is. Returns the frames that went to the driver.
    pub(super) fn give_up_poison(&self) -> u32 {
        let (home, claims) = {
            let mut state = self.state.lock();
            if state.poison_frame().is_none() {
                return 0;
            }
            let Some(home) = state.poison.take() else { return 0 };
            (home, claim_poisoned(&state))
        };
        let mut stays = false;
        for (bar, page) in claims {
            if let Err(error) = self.lift_poison(&bar, page) {
                self.count_unpoisoned(error.into());
                stays = true;
            }
            bar.table.page(page).settle(PageState::Absent);
        }
        self.changed.notify_all();
        if stays {
            self.state.lock().poison = Store::Here(home);
            return 0;
        }
        self.return_home(home)
    }

    /// Gives the poison back if there is no page that it is or could soon be behind, and more than
    /// `keep` frames are held. Returns the frames that went to the driver.
    pub(super) fn trim_poison(&self, keep: u32) -> u32 {
        let home = {
            let mut state = self.state.lock();
            let unused = state.poisoned_pages() == 0 && state.order.is_empty();
            let idle = state.poison_frame().is_some() && unused;
            if !idle || state.frames.held() <= keep {
                return 0;
            }
            state.poison.take()
        };
        home.map_or(0, |home| self.return_home(home))
    }

    /// Unmakes what there is of the poison. Returns the frames that went to the driver.
    fn return_home(&self, home: Home) -> u32 {
        let (home, released) = self.unmake(home);
        self.state.lock().poison = Store::Here(home);
        released
    }

    fn unmake(&self, home: Home) -> (Home, u32) {
        let (driver, page_bytes) = (&self.device.driver, self.page_bytes());
        let Home { frame, mut base, stream, stage } = home;
        if stage == Stage::Written
            && let Some(stream) = stream
            && let Err(error) = self.wait_for_poison(stream)
        {
            // The pattern may still be on its way: another time.
            self.count_unpoisoned(error);
            return (home, 0);
        }
        if stage >= Stage::Mapped
            && let (Some(address), Some(frame)) = (base, frame)
            && let Err(error) = self.unmap_at(address)
        {
            let error = self.device.note(error.into());
            log::error!("addresses of the poison are lost: {error}");
            let mut state = self.state.lock();
            state.frames.note_stray(frame);
            state.quarantined_pages += 1;
            base = None;
        }
        if let Some(base) = base
            && let Err(error) = self.device.retry(|| driver.mem_address_free(base, page_bytes))
        {
            let error = self.device.note(error.into());
            log::error!("addresses of the poison are lost: {error}");
        }
        if let Some(stream) = stream {
            // Only saves the slot: its last record has passed, so another stream may take it.
            let _ = self.device.fences.retire(stream);
            if let Err(error) = self.device.retry(|| driver.stream_destroy(stream)) {
                let error = self.device.note(error.into());
                log::warn!("the stream of the poison stays: {error}");
            }
        }
        let handle = frame.and_then(|frame| self.state.lock().frames.remove(frame));
        let released = handle.is_some_and(|handle| self.release_handle(handle));
        (Home::default(), u32::from(released))
    }

    fn unmap_at(&self, address: DeviceAddress) -> DriverResult<()> {
        self.device.retry(|| self.device.driver.mem_unmap(address, self.page_bytes()))
    }

    /// Something of the poison failed: one line in the log, and a count.
    fn count_unpoisoned(&self, error: Error) {
        let error = self.device.note(error);
        match self.device.counters.poison_failures.fetch_add(1, Relaxed) {
            0 => log::warn!("pages are evicted without poison: {error}"),
            _ => log::debug!("pages are evicted without poison: {error}"),
        }
    }
}

/// Why a page has no poison behind it.
struct Unpoisoned {
    error: DriverError,
    /// It is half there and could not be removed.
    lost: Option<DriverError>,
}

/// Claims all absent pages that have poison behind them.
fn claim_poisoned(state: &State) -> Vec<(Arc<Bar>, PageIndex)> {
    let bars = state.bars.values().filter(|entry| entry.life != Life::Leaving);
    let pages = bars.flat_map(|entry| {
        let poisoned = entry.bar.table.touched().filter(|(_, page)| page.is_poisoned());
        poisoned.map(|(index, page)| (&entry.bar, index, page))
    });
    let claimed = pages.filter(|(_, _, page)| page.claim().is_ok());
    claimed.map(|(bar, index, _)| (Arc::clone(bar), index)).collect()
}
