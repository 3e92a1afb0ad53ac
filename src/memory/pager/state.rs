//! What the device's lock protects: frames, budget, and per VBAR the resident pages and marks.
//!
//! Plain data with small moves; no driver call, no waiting. Invariant (checked by `is_valid`): a
//! page that is Issued or Resident and published is in its VBAR's `resident` set, and a VBAR is in
//! `order` exactly while it has resident pages.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Role;
use super::claim::Backing;
use super::hands::Hands;
use super::poison::Store;
use crate::copy::fill::Keep;
use crate::driver::FrameHandle;
use crate::error::Result;
use crate::memory::budget::Budget;
use crate::memory::frames::{FrameIndex, Frames};
use crate::memory::page_table::PageState;
use crate::memory::policy::{Healing, Rank};
use crate::memory::vbar::Bar;
use crate::options::Poison;
use crate::sync::ticket::Ticket;
use crate::units::{PageIndex, PageSize};

/// A VBAR's part of the state.
pub(super) struct BarState {
    pub(super) bar: Arc<Bar>,
    pub(super) rank: Rank,
    /// Published pages with a frame.
    pub(super) resident: BTreeSet<u32>,
    /// Published pages with a host frame.
    pub(super) hosted: BTreeSet<u32>,
    /// Bound VBARs: pages that stream through the last frames, oldest fill first.
    pub(super) streaming: VecDeque<u32>,
    /// Bound VBARs with a plan: pages that stay; see [`Pager::set_kept`](super::Pager::set_kept).
    pub(super) kept: Option<Arc<BTreeSet<u32>>>,
    /// What is done with the bytes of the other pages.
    pub(super) keep_streamed: Keep,
    /// Bare VBARs: pages at or above are not faulted in.
    pub(super) watermark: u32,
    /// Pages below are not evicted.
    pub(super) floor: u32,
    pub(super) healing: Healing,
    pub(super) life: Life,
    /// Bytes from its start that were allocated, bound or faulted so far.
    pub(super) extent: u64,
}

impl BarState {
    /// Whether a plan keeps the page.
    pub(super) fn is_kept(&self, page: u32) -> bool {
        self.kept.as_ref().is_some_and(|kept| kept.contains(&page))
    }

    /// Pages that a plan keeps, the highest first.
    pub(super) fn kept_pages(&self) -> impl Iterator<Item = u32> + '_ {
        let resident = self.resident.range(self.floor..).rev().copied();
        resident.filter(|page| self.is_kept(*page))
    }

    /// Pages that no plan keeps, those first that can best be done without. With a plan these are
    /// the ones that were used since they were filled, the one filled first first: their next use
    /// is a cycle away. What was fetched and not used yet comes behind, the last fetched first,
    /// which is needed last. Some may come twice.
    pub(super) fn not_kept(&self) -> impl Iterator<Item = u32> + '_ {
        let is_planned = self.kept.is_some();
        let is_free = |page: &u32| *page >= self.floor && !self.is_kept(*page);
        let is_used = |page: &u32| self.bar.table.page(PageIndex(*page)).is_used();
        let is_streaming = move |page: &u32| is_planned && is_free(page);
        let streaming = || self.streaming.iter().copied().filter(is_streaming);
        let others = || self.resident.range(self.floor..).rev().copied().filter(is_free);
        let used = streaming().chain(others().filter(move |_| is_planned)).filter(is_used);
        used.chain(streaming().rev()).chain(others())
    }

    /// What the VBAR's plan has the page for, if there is a plan.
    pub(super) fn role_of(&self, page: PageIndex) -> Option<Role> {
        let kept = self.kept.as_ref()?;
        Some(if kept.contains(&page.0) { Role::Kept } else { Role::Streamed })
    }

    /// A page that is in a set and whose word says otherwise.
    fn contradiction(&self) -> Option<String> {
        let word = |page: &u32| self.bar.table.page(PageIndex(*page)).word();
        let mapped = self.resident.iter().find(|page| {
            let state = word(page).state;
            !(state.is_mapped() || state == PageState::Claimed)
        });
        let hosted = self.hosted.iter().find(|page| {
            let state = word(page).state;
            !matches!(state, PageState::HostMapped | PageState::Claimed)
        });
        let page = mapped.or(hosted)?;
        Some(format!("page {page} of VBAR {} is {:?}", self.bar.id, word(page)))
    }
}

/// How far a VBAR has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Life {
    Open,
    /// Closed by its owner; it goes when its last page is absent.
    Closing,
    /// Its last page is absent, and one thread frees its addresses.
    Leaving,
}

/// A mapping that outlasts the page's hold on its frame: removed when its users have passed.
pub(super) struct Lingering {
    pub(super) bar: Arc<Bar>,
    pub(super) page: PageIndex,
    pub(super) users: Vec<Ticket>,
    pub(super) frame: LingeringFrame,
}

/// What happens to the frame when the mapping goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LingeringFrame {
    /// It is behind another page already.
    Moved,
    /// It goes there.
    To(FrameIndex, Destination),
}

impl LingeringFrame {
    /// Whether the mapping keeps a device frame from going elsewhere.
    pub(super) fn is_of_device(self) -> bool {
        matches!(self, Self::To(_, Destination::FreeList | Destination::Driver))
    }
}

/// Where a frame goes when its page lost it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Destination {
    FreeList,
    Driver,
    /// A host frame, of the other table: it goes to the driver too.
    Host,
}

impl Destination {
    /// Whose memory the frame is.
    pub(super) fn backing(self) -> Backing {
        match self {
            Self::FreeList | Self::Driver => Backing::Device,
            Self::Host => Backing::Host,
        }
    }
}

/// See the module's text.
pub(super) struct State {
    /// What is mapped behind evicted pages.
    pub(super) poison: Store,
    pub(super) frames: Frames,
    /// Frames of the host's memory: none of the budget's.
    pub(super) host_frames: Frames,
    pub(super) budget: Budget,
    pub(super) polled_at: Option<Instant>,
    pub(super) bars: HashMap<u32, BarState>,
    pub(super) order: BTreeSet<Rank>,
    pub(super) lingering: Vec<Lingering>,
    /// Handles whose release failed, and addresses whose unmapping failed.
    pub(super) quarantined_pages: u32,
    /// VBARs that are closing.
    pub(super) closing: u32,
    /// When to look after them next.
    pub(super) closing_next: Option<Instant>,
    /// The extents of all VBARs that are not, together.
    pub(super) extents: u64,
    /// Pages that the engine is fetching now: their frames have no page yet.
    pub(super) ahead_count: u32,
    /// Device frames of evicted pages whose mappings a thread is removing now: they are on no list
    /// and free in a moment.
    pub(super) parting_count: u32,
    /// The same of pages that go because the frames held are more than the budget: these frames go
    /// to the driver.
    pub(super) shrinking_count: u32,
    /// Claims and frames that threads carry out, or away.
    pub(super) hands: Hands,
    /// Requests that wait for frames, in the order in which they came.
    pub(super) queue: VecDeque<u64>,
    next_turn: u64,
    newest: i64,
    oldest: i64,
    next_bar: u32,
}

impl State {
    pub(super) fn new(budget: Budget, poison: Poison) -> Self {
        Self {
            poison: Store::new(poison),
            frames: Frames::default(),
            host_frames: Frames::default(),
            budget,
            polled_at: None,
            bars: HashMap::new(),
            order: BTreeSet::new(),
            lingering: Vec::new(),
            quarantined_pages: 0,
            closing: 0,
            closing_next: None,
            extents: 0,
            ahead_count: 0,
            parting_count: 0,
            shrinking_count: 0,
            hands: Hands::default(),
            queue: VecDeque::new(),
            next_turn: 0,
            newest: 0,
            oldest: 0,
            next_bar: 0,
        }
    }

    /// Lines a request up behind those that wait for frames already.
    pub(super) fn line_up(&mut self) -> u64 {
        self.next_turn += 1;
        self.queue.push_back(self.next_turn);
        self.next_turn
    }

    /// Whether a request may take frames: nobody waits who came before it.
    pub(super) fn is_turn(&self, turn: Option<u64>) -> bool {
        self.queue.front().is_none_or(|first| Some(*first) == turn)
    }

    pub(super) fn next_bar_id(&mut self) -> u32 {
        self.next_bar += 1;
        self.next_bar
    }

    pub(super) fn newest_recency(&mut self) -> i64 {
        self.newest += 1;
        self.newest
    }

    pub(super) fn oldest_recency(&mut self) -> i64 {
        self.oldest -= 1;
        self.oldest
    }

    /// A VBAR is used up to `end`, in bytes.
    pub(super) fn raise_extent(&mut self, bar: u32, end: u64) {
        let Some(entry) = self.bars.get_mut(&bar) else { return };
        let raised = end.saturating_sub(entry.extent);
        if entry.life == Life::Open && raised > 0 && !entry.bar.is_arena() {
            entry.extent = end;
            self.extents = self.extents.saturating_add(raised);
        }
    }

    /// State of a VBAR that may be used. Another thread may have closed it at any moment before;
    /// while the lock is held it stays open.
    pub(super) fn open(&self, bar: &Bar) -> Result<&BarState> {
        let entry = self.bars.get(&bar.id).filter(|entry| entry.life == Life::Open);
        entry.ok_or_else(|| bar.closed_error())
    }

    /// As [`State::open`], to be changed.
    pub(super) fn open_mut(&mut self, bar: &Bar) -> Result<&mut BarState> {
        let entry = self.bars.get_mut(&bar.id).filter(|entry| entry.life == Life::Open);
        entry.ok_or_else(|| bar.closed_error())
    }

    /// State of a VBAR that was seen open under this lock, or that has resident pages: a closed one
    /// is forgotten only when its last page is absent.
    pub(super) fn bar(&self, id: u32) -> &BarState {
        self.bars.get(&id).expect("a VBAR's state lives until its last page is absent")
    }

    /// As [`State::bar`], to be changed.
    pub(super) fn bar_mut(&mut self, id: u32) -> &mut BarState {
        self.bars.get_mut(&id).expect("a VBAR's state lives until its last page is absent")
    }

    /// Enters a published page. `streams`: it came through a streaming frame.
    pub(super) fn add_resident(&mut self, bar: u32, page: PageIndex, streams: bool) {
        let entry = self.bars.get_mut(&bar).expect("the page is not absent, so its VBAR is known");
        if entry.resident.is_empty() {
            self.order.insert(entry.rank);
        }
        entry.resident.insert(page.0);
        if streams {
            entry.streaming.push_back(page.0);
        }
        self.follow_arena(bar);
    }

    /// Takes a page out; it is about to be evicted.
    pub(super) fn remove_resident(&mut self, bar: u32, page: PageIndex) {
        let entry = self.bars.get_mut(&bar).expect("the page is not absent, so its VBAR is known");
        entry.resident.remove(&page.0);
        if entry.kept.is_some()
            && let Some(at) = entry.streaming.iter().position(|streamed| *streamed == page.0)
        {
            entry.streaming.remove(at);
        }
        if entry.resident.is_empty() {
            self.order.remove(&entry.rank);
        }
        self.follow_arena(bar);
    }

    /// The extent of an arena is what it has resident: whether all VBARs exceed the budget together
    /// does not depend on its addresses.
    fn follow_arena(&mut self, bar: u32) {
        let Some(entry) = self.bars.get_mut(&bar) else { return };
        if entry.bar.is_arena() && entry.life == Life::Open {
            let extent = entry.resident.len() as u64 * entry.bar.page_size.bytes();
            self.extents = self.extents - entry.extent + extent;
            entry.extent = extent;
        }
    }

    /// A page of a bare VBAR was evicted: the watermark sinks to it, so that the next passes do not
    /// chase memory that is not there.
    pub(super) fn sink_watermark(&mut self, bar: u32, page: PageIndex, now: Duration) {
        // Its last page is absent already, so a closing VBAR may be gone.
        let Some(entry) = self.bars.get_mut(&bar) else { return };
        if !entry.bar.streams(page.0) && !entry.bar.is_arena() {
            entry.watermark = entry.watermark.min(page.0);
            entry.healing.evicted(now);
        }
    }

    /// Pages of closed VBARs: memory that is there for whoever asks.
    pub(super) fn closing_resident(&self) -> u32 {
        if self.closing == 0 {
            return 0;
        }
        let closing = self.bars.values().filter(|entry| entry.life != Life::Open);
        closing.map(|entry| entry.resident.len() as u32).sum()
    }

    /// Changes a VBAR's rank.
    pub(super) fn set_rank(&mut self, bar: u32, class: i32, recency: i64) {
        let entry = self.bars.get_mut(&bar).expect("the caller has just seen it under the lock");
        let was_in_order = self.order.remove(&entry.rank);
        entry.rank = Rank { class, recency, bar };
        if was_in_order {
            self.order.insert(entry.rank);
        }
    }

    /// Pages that the budget allows in all.
    pub(super) fn allowed_pages(&self, page_size: PageSize) -> u64 {
        let page_bytes = page_size.bytes();
        self.budget.allowed().0 / page_bytes - u64::from(self.poison_share(page_bytes))
    }

    /// Frames that may still be created for pages under the budget.
    pub(super) fn creatable(&self, page_bytes: u64) -> u32 {
        self.room(page_bytes).saturating_sub(self.poison_reserve(page_bytes))
    }

    /// Frames that may still be created under the budget.
    pub(super) fn room(&self, page_bytes: u64) -> u32 {
        let allowed = (self.budget.allowed().0 / page_bytes).min(u64::from(u32::MAX)) as u32;
        allowed.saturating_sub(self.frames.held())
    }

    /// Frames held beyond the budget.
    pub(super) fn excess(&self, page_bytes: u64) -> u32 {
        let allowed = (self.budget.allowed().0 / page_bytes).min(u64::from(u32::MAX)) as u32;
        self.frames.held().saturating_sub(allowed)
    }

    /// The frames of that memory.
    pub(super) fn frames_of(&mut self, backing: Backing) -> &mut Frames {
        match backing {
            Backing::Device => &mut self.frames,
            Backing::Host => &mut self.host_frames,
        }
    }

    /// The handle behind a page that this thread owns.
    pub(super) fn handle(&self, frame: FrameIndex) -> FrameHandle {
        self.frames.handle(frame)
    }

    /// Frames of pages that are gone but for their last users, which go to the free list then.
    pub(super) fn leaving_count(&self) -> u32 {
        let to_list = |entry: &&Lingering| {
            matches!(entry.frame, LingeringFrame::To(_, Destination::FreeList))
        };
        self.lingering.iter().filter(to_list).count() as u32
    }

    /// Takes the frames of up to `count` pages that are gone but for their last users, if `admit`
    /// lets them, which is asked about each once. The pages' mappings stay behind until these have
    /// passed.
    pub(super) fn take_leaving(
        &mut self,
        count: usize,
        mut admit: impl FnMut(&[Ticket]) -> Option<Vec<Ticket>>,
    ) -> Vec<(FrameIndex, Vec<Ticket>)> {
        let mut taken = Vec::new();
        for entry in &mut self.lingering {
            if taken.len() == count {
                break;
            }
            if let LingeringFrame::To(frame, Destination::FreeList) = entry.frame
                && let Some(users) = admit(&entry.users)
            {
                entry.frame = LingeringFrame::Moved;
                self.frames.leave_mapping(frame);
                taken.push((frame, users));
            }
        }
        taken
    }

    /// Checks the invariants; for tests and debug builds. Pages in the middle of a fault are in
    /// no set yet, so only what is in the sets is checked against the words.
    pub(super) fn contradiction(&self) -> Option<String> {
        let closing = self.bars.values().filter(|entry| entry.life != Life::Open).count();
        let tables = [
            (self.frames.is_valid(), "the table of frames"),
            (self.host_frames.is_valid(), "the table of host frames"),
            (self.is_poison_valid(), "the poison"),
            (closing == self.closing as usize, "the count of closed VBARs"),
        ];
        let wrong = tables.into_iter().find(|(valid, _)| !valid).map(|(_, what)| what.to_owned());
        wrong.or_else(|| self.bars.values().find_map(BarState::contradiction)).or_else(|| {
            let mut bars = self.bars.values();
            let wrong =
                bars.find(|bar| self.order.contains(&bar.rank) == bar.resident.is_empty())?;
            Some(format!("the order of VBARs, about VBAR {}", wrong.bar.id))
        })
    }
}
