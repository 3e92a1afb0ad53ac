//! Arenas: VBARs whose pages an allocator hands out in pieces.
//!
//! A page of an arena gets its frame by a fault like any other, of the highest rank, and stays
//! pinned until its allocator gives it back, with the uses that it knows of. Those may be under
//! way: the frame moves on by their fences, and the mapping goes when they have passed. What the
//! pieces are is the allocator's business.

use std::sync::Arc;

use super::Pager;
use super::hands::Parting;
use super::plan::{Taken, Victim};
use super::state::Destination;
use crate::counters;
use crate::driver::DriverCode;
use crate::error::{Error, Result};
use crate::memory::space::{Space, SpaceKind};
use crate::memory::vbar::{Bar, Content};
use crate::sync::ticket::Ticket;
use crate::units::{Generation, PageIndex};

/// Smallest arena that is of use, in pages.
const PAGES_MIN: u64 = 16;

/// A page that its allocator gives back.
#[derive(Debug)]
pub struct Returned {
    /// The page.
    pub page: u32,
    /// Its generation, from the fault.
    pub generation: Generation,
    /// Uses that may not be over.
    pub users: Vec<Ticket>,
}

/// Where the frames of pages that are given back go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GiveTo {
    /// To whoever needs frames next, now or when their users have passed.
    Pages,
    /// To the driver; their users are waited for.
    Driver,
}

impl Pager {
    /// An arena of `bytes`, or of half as often as the driver has no addresses for more. `None`
    /// where there are none at all.
    ///
    /// # Errors
    /// `DeviceLost`, `ProcessEnding`, and what the driver says.
    pub fn create_arena(&self, bytes: u64) -> Result<Option<Arc<Bar>>> {
        self.device.check()?;
        let _scope = self.device.enter()?;
        self.device.reach()?;
        let page_size = self.device.options.page_size;
        let mut pages = (bytes / page_size.bytes()).min(u64::from(u32::MAX) / 2);
        while pages >= PAGES_MIN {
            let bytes = pages * page_size.bytes();
            match self.device.driver.mem_address_reserve(bytes, page_size.bytes()) {
                Ok(base) => {
                    let space = Space { base, bytes, kind: SpaceKind::Reserved };
                    return Ok(Some(self.enter_bar(space, Content::Arena)));
                }
                Err(error)
                    if matches!(
                        error.code,
                        DriverCode::OUT_OF_MEMORY
                            | DriverCode::NOT_SUPPORTED
                            | DriverCode::INVALID_VALUE
                    ) =>
                {
                    pages /= 2;
                }
                Err(error) => return Err(self.device.note(Error::from(error))),
            }
        }
        Ok(None)
    }

    /// Takes pages of an arena back, which are pinned once each, by the fault that made them
    /// resident. `take_out` takes them out of the allocator's own tables, with no lock held.
    /// Returns how many frames can be had now, in stream order or at once.
    ///
    /// # Errors
    /// `TimedOut` and `Cancelled` of waiting for users, `DeviceLost`, `ProcessEnding`, and what the
    /// driver says. Pages that `take_out` was asked for go all the same, when their users have
    /// passed; where the context cannot be entered it is not asked.
    pub fn give_back(
        &self,
        arena: &Arc<Bar>,
        take_out: impl FnOnce() -> Vec<Returned>,
        to: GiveTo,
    ) -> Result<u32> {
        self.device.check()?;
        // Before any table changes: what was taken out of them must be carried through.
        let _scope = self.device.enter()?;
        // From here on some may be in no table: a request that lacks frames waits for them.
        let coming = Parting::new(self, &mut self.state.lock(), 1);
        let pages = take_out();
        if pages.is_empty() {
            drop(coming);
            self.changed.notify_all();
            return Ok(0);
        }
        let (taken, parting) = {
            let mut state = self.state.lock();
            let mut taken: Taken = Vec::with_capacity(pages.len());
            for Returned { page, generation, users } in pages {
                let entry = arena.table.page(PageIndex(page));
                // Under the lock: nobody takes the page between the two.
                if entry.unpin(generation).is_err() || entry.start_evicting().is_err() {
                    debug_assert!(false, "page {page} of an arena is not its allocator's alone");
                    log::error!("page {page} of an arena is used by others: it stays");
                    continue;
                }
                let all = entry.users().into_iter().chain(users);
                let pending = all.filter(|user| !self.device.fences.known_passed(*user));
                let users = pending.collect();
                let (bar, frame) = (Arc::clone(arena), entry.frame());
                state.remove_resident(arena.id, PageIndex(page));
                taken.push((Victim { bar, page: PageIndex(page), frame }, users));
            }
            let is_counted = |users: &Vec<Ticket>| to == GiveTo::Pages || users.is_empty();
            let counted = taken.iter().filter(|(_, users)| is_counted(users)).count();
            let parting = Parting::new(self, &mut state, counted);
            self.update_eager(&state);
            (taken, parting)
        };
        drop(coming);
        counters::add(&self.device.counters.pages_evicted, taken.len() as u64);
        let count = taken.len() as u32;
        let given = match to {
            GiveTo::Pages => {
                self.part_or_linger(taken, Destination::FreeList);
                Ok(count)
            }
            GiveTo::Driver => self.wait_for_victims(taken).map(|(ready, late)| {
                self.part_or_linger(late, Destination::Driver);
                self.part_or_linger(ready, Destination::Driver)
            }),
        };
        drop(parting);
        self.changed.notify_all();
        given
    }

    /// Asks whoever holds frames for those that are held beyond the budget.
    pub(super) fn reclaim_excess(&self) {
        let Some(reclaimer) = self.reclaimer() else { return };
        let missing = {
            let state = self.state.lock();
            let lingering = state.lingering.iter();
            let releasing = lingering.filter(|entry| entry.frame.is_of_device()).count() as u32;
            let coming = state.frames.free_count() + releasing + state.shrinking_count;
            state.excess(self.page_bytes()).saturating_sub(coming + state.frames.leaving())
        };
        if missing > 0 {
            reclaimer.reclaim(missing);
        }
    }

    /// Uses that keep old mappings of the device's frames: those that a record covers, and whether
    /// there are others.
    pub fn leaving_users(&self) -> (Vec<Ticket>, bool) {
        let state = self.state.lock();
        let old = state.lingering.iter().filter(|old| old.frame.is_of_device());
        let users = old.flat_map(|old| old.users.iter().copied());
        let pending = users.filter(|user| !self.device.fences.known_passed(*user));
        let (recorded, others): (Vec<Ticket>, Vec<Ticket>) =
            pending.partition(|user| self.device.fences.is_recorded(*user));
        (recorded, !others.is_empty())
    }

    /// Whether frames beyond the budget are on their way whose uses no fence covers.
    pub(super) fn is_release_unknown(&self) -> bool {
        let state = self.state.lock();
        let is_recorded = |user: &Ticket| self.device.fences.is_recorded(*user);
        state.excess(self.page_bytes()) > 0
            && state
                .lingering
                .iter()
                .any(|old| old.frame.is_of_device() && !old.users.iter().all(is_recorded))
    }

    /// As [`Pager::reclaim_excess`], for so many frames that are there in no other way. Returns how
    /// many are on their way.
    pub(super) fn reclaim_last(&self, missing: u32) -> u32 {
        match self.reclaimer() {
            Some(reclaimer) if missing > 0 => reclaimer.reclaim_reserved(missing),
            _ => 0,
        }
    }
}

#[cfg(test)]
#[cfg(not(vbar_loom))]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::driver::Driver;
    use crate::driver::sim::{Sim, SimOptions};
    use crate::memory::pager::{Faulted, Request};
    use crate::options::RuntimeOptions;
    use crate::sync::device::Device;
    use crate::units::{DeviceOrdinal, PageSize, Stream};

    /// Between the allocator's tables and the pager's they are in neither, for as long as another
    /// thread is not run: a request that was refused meanwhile is out of memory for no reason.
    #[test]
    fn a_request_waits_for_pages_that_another_thread_gives_back() {
        let sim = Sim::new(SimOptions::parse("capacity=64M,granularity=64K").unwrap());
        let page_size = PageSize::new(65536).unwrap();
        let budget_bytes = Some(8 * page_size.bytes());
        let options = RuntimeOptions {
            page_size,
            budget_bytes,
            headroom_bytes: Some(0),
            ..RuntimeOptions::default()
        };
        let context = sim.device_primary_ctx_retain(DeviceOrdinal(0)).unwrap();
        let pager =
            Pager::new(Arc::new(Device::new(sim.driver(), DeviceOrdinal(0), context, options)));
        let arena = pager.create_arena(64 * page_size.bytes()).unwrap().unwrap();
        let fault = |pages| {
            let faulted = pager.fault_many(&[Request { bar: &arena, pages }], Stream::NONE);
            let holds = match faulted.unwrap() {
                Faulted::Resident(holds) => holds,
                other => panic!("not resident: {other:?}"),
            };
            let generations = holds[0].generations.as_slice().to_vec();
            let pages = holds[0].pages.clone().zip(generations);
            pages.map(|(page, generation)| Returned { page, generation, users: Vec::new() })
        };
        let first: Vec<Returned> = fault(0..8).collect();
        let (begin, begun) = mpsc::channel();
        let second = std::thread::scope(|scope| {
            let giver = scope.spawn(|| {
                let take_out = || {
                    begin.send(()).unwrap();
                    // The request comes meanwhile.
                    std::thread::sleep(Duration::from_millis(50));
                    first
                };
                pager.give_back(&arena, take_out, GiveTo::Pages).unwrap()
            });
            begun.recv().unwrap();
            let second: Vec<Returned> = fault(8..16).collect();
            assert_eq!(giver.join().unwrap(), 8);
            second
        });
        assert_eq!(pager.give_back(&arena, || second, GiveTo::Driver).unwrap(), 8);
        // Nothing is in hand for nothing.
        assert_eq!(pager.give_back(&arena, Vec::new, GiveTo::Pages).unwrap(), 0);
        assert_eq!(pager.state.lock().parting_count, 0);
        assert_eq!(sim.violations(), Vec::<String>::new());
    }
}
