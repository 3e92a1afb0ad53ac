//! What a user sets and reads: VBARs, ranks, watermarks, floors, budget, residency, numbers.

use std::ops::Range;
use std::sync::Arc;

use super::state::{BarState, Life, State};
use super::{Pager, Poll};
use crate::driver::CaptureState;
use crate::error::{Error, ErrorCode, Result};
use crate::host::bound::Bound;
use crate::memory::budget::BudgetSource;
use crate::memory::page_table::{PageState, Word, draw};
use crate::memory::policy::{Healing, Rank};
use crate::memory::space::{self, Space};
use crate::memory::vbar::{Bar, Content};
use crate::process;
use crate::sync::MutexGuard;
use crate::sync::context::WithoutEvent;
use crate::sync::fence::{Cover, Look};
use crate::sync::ticket::Ticket;
use crate::trace::Kind;
use crate::units::{Generation, PageIndex, Stream};

/// Largest VBAR: 2^31 pages.
const PAGE_COUNT_MAX: u64 = 1 << 31;

/// The marks of one VBAR, as they are now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BarMarks {
    /// Class: a larger one is kept longer.
    pub class: i32,
    /// Pages at or above are not faulted in (bare VBARs).
    pub watermark: u32,
    /// Pages below are not evicted.
    pub floor: u32,
    /// Pages with a frame.
    pub resident: u32,
    /// Pages in all.
    pub page_count: u32,
}

/// One page in a residency map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Residency {
    /// State.
    pub state: PageState,
    /// Pins.
    pub pins: u32,
    /// Generation of the bytes.
    pub generation: Generation,
    /// As in the drawing of `page_table`.
    pub drawn: char,
}

/// The numbers of a device's memory, taken together under the lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryNumbers {
    /// Bytes of all frames held, those being created included.
    pub used_bytes: u64,
    /// The most that `used_bytes` was.
    pub peak_bytes: u64,
    /// Bytes of frames on the free list.
    pub free_bytes: u64,
    /// Bytes of frames in quarantine, counted in `used_bytes`.
    pub quarantined_bytes: u64,
    /// Bytes of the poison frame, counted in `used_bytes`: 0, or a page.
    pub poison_bytes: u64,
    /// Evicted pages that it is behind.
    pub poisoned_pages: u64,
    /// What may be held, and what determines it.
    pub budget_bytes: u64,
    /// See `budget_bytes`.
    pub budget_source: BudgetSource,
    /// Bytes of host frames held: page-locked memory of the host, none of the device's.
    pub host_mapped_bytes: u64,
    /// Pages of all VBARs that have a frame.
    pub resident_pages: u64,
    /// Mappings that outlast their pages.
    pub lingering_mappings: u64,
    /// Pages whose addresses are lost.
    pub quarantined_pages: u64,
    /// VBARs open, and closing.
    pub bars: u32,
    /// VBARs that were closed and still have pages.
    pub closing_bars: u32,
}

/// How an end of run treats pins that are still held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeldPins {
    /// They stay.
    Keep,
    /// They are taken back; their holders' unpins are stale, their pages' bytes unknown. A page
    /// that a captured graph holds keeps its pins.
    Release,
}

impl Pager {
    /// A VBAR of `bytes`, rounded up to whole pages, newest in its class.
    ///
    /// # Errors
    /// `InvalidArgument` for no bytes or more than 2^31 pages; what the driver says.
    pub fn create_bar(&self, bytes: u64, reserve: bool) -> Result<Arc<Bar>> {
        let made = self.make_bar(bytes, reserve);
        made.map_err(|error| self.told(error, format_args!("creating a VBAR of {bytes} bytes")))
    }

    fn make_bar(&self, bytes: u64, reserve: bool) -> Result<Arc<Bar>> {
        self.device.check()?;
        let page_size = self.device.options.page_size;
        let pages = page_size.pages_for(bytes);
        if !(1..=PAGE_COUNT_MAX).contains(&pages) {
            let text = format!("it would have {pages} pages, and 1 to {PAGE_COUNT_MAX} can be");
            return Err(Error::new(ErrorCode::InvalidArgument, text));
        }
        let Some(bytes) = pages.checked_mul(page_size.bytes()) else {
            let text = "its pages do not end below 2^64";
            return Err(Error::new(ErrorCode::InvalidArgument, text));
        };
        let space = if reserve {
            let _scope = self.device.enter()?;
            self.reap()?;
            space::reserve(&*self.device.driver, bytes, page_size)
                .map_err(|error| self.device.note(error))?
        } else {
            space::stand_in(bytes)
        };
        Ok(self.enter_bar(space, Content::Weights))
    }

    pub(super) fn enter_bar(&self, space: Space, content: Content) -> Arc<Bar> {
        let mut state = self.state.lock();
        let id = state.next_bar_id();
        let bar = Arc::new(Bar::new(id, space, self.device.options.page_size, content));
        let recency = state.newest_recency();
        let class = if bar.is_arena() { i32::MAX } else { 0 };
        let entry = BarState {
            bar: Arc::clone(&bar),
            rank: Rank { class, recency, bar: id },
            resident: Default::default(),
            hosted: Default::default(),
            streaming: Default::default(),
            kept: None,
            keep_streamed: Default::default(),
            watermark: bar.table.page_count(),
            floor: 0,
            healing: Healing::new(self.device.options.heal_window),
            life: Life::Open,
            extent: 0,
        };
        state.bars.insert(id, entry);
        bar
    }

    /// Tells the fences whether VBARs exceed the budget: then every unpin records at once, so that
    /// what must be evicted has a fence.
    pub(super) fn update_eager(&self, state: &State) {
        let page_size = self.device.options.page_size;
        let allowed = state.allowed_pages(page_size).saturating_mul(page_size.bytes());
        self.device.fences.set_eager(state.extents > allowed);
    }

    /// Binds a VBAR that was never used: what pages hold already is not the file's.
    ///
    /// # Errors
    /// `InvalidArgument` when it is bound, or was allocated or faulted, or is too small; `Closed`.
    pub fn bind(&self, bar: &Bar, bound: Arc<Bound>, end: u64) -> Result<()> {
        let done = self.bind_unused(bar, bound, end);
        done.map_err(|error| {
            self.told(error, format_args!("binding {end} bytes of VBAR {}", bar.id))
        })
    }

    fn bind_unused(&self, bar: &Bar, bound: Arc<Bound>, end: u64) -> Result<()> {
        self.device.check()?;
        let mut state = self.state.lock();
        if state.open(bar)?.extent > 0 {
            let text = "the VBAR was used already: bind it before its first fault";
            return Err(Error::new(ErrorCode::InvalidArgument, text));
        }
        bar.bind(bound, end)?;
        state.raise_extent(bar.id, end);
        self.update_eager(&state);
        Ok(())
    }

    /// Takes the next `bytes` of a bare VBAR. Returns their place.
    ///
    /// # Errors
    /// `NoAddresses` when they do not fit, `InvalidArgument` on a bound VBAR, `Closed`; nothing is
    /// taken then.
    pub fn allocate(&self, bar: &Bar, bytes: u64) -> Result<Range<u64>> {
        let taken = self.take_bytes(bar, bytes);
        taken.map_err(|error| {
            self.told(error, format_args!("allocating {bytes} bytes of VBAR {}", bar.id))
        })
    }

    fn take_bytes(&self, bar: &Bar, bytes: u64) -> Result<Range<u64>> {
        self.device.check()?;
        let mut state = self.state.lock();
        state.open(bar)?;
        if bar.bound().is_some() {
            let text = "a bound VBAR has no room for allocations";
            return Err(Error::new(ErrorCode::InvalidArgument, text));
        }
        let range = bar.allocate(bytes)?;
        state.raise_extent(bar.id, range.end);
        self.update_eager(&state);
        Ok(range)
    }

    /// Marks of a VBAR. Of a closed one: the lowest class, no watermark and no floor, and as
    /// resident what its pins still keep.
    #[must_use]
    pub fn marks(&self, bar: &Bar) -> BarMarks {
        let page_count = bar.table.page_count();
        let state = self.look();
        let Some(entry) = state.as_ref().and_then(|state| state.bars.get(&bar.id)) else {
            return BarMarks { class: i32::MIN, watermark: 0, floor: 0, resident: 0, page_count };
        };
        BarMarks {
            class: entry.rank.class,
            watermark: entry.watermark,
            floor: entry.floor,
            resident: entry.resident.len() as u32,
            page_count,
        }
    }

    /// Makes a VBAR the newest of its class and lifts its watermark to all pages.
    ///
    /// # Errors
    /// `Closed`, `DeviceLost`, `ProcessEnding`; nothing has changed then.
    pub fn prioritise(&self, bar: &Bar) -> Result<()> {
        self.change_marks(bar, |state, class, _| {
            let recency = state.newest_recency();
            state.set_rank(bar.id, class, recency);
            state.bar_mut(bar.id).watermark = bar.table.page_count();
        })
    }

    /// Makes a VBAR the oldest of its class; its watermark stays.
    ///
    /// # Errors
    /// As [`Pager::prioritise`].
    pub fn deprioritise(&self, bar: &Bar) -> Result<()> {
        self.change_marks(bar, |state, class, _| {
            let recency = state.oldest_recency();
            state.set_rank(bar.id, class, recency);
        })
    }

    /// Puts a VBAR into a class.
    ///
    /// # Errors
    /// As [`Pager::prioritise`].
    pub fn set_class(&self, bar: &Bar, class: i32) -> Result<()> {
        self.change_marks(bar, |state, _, recency| state.set_rank(bar.id, class, recency))
    }

    /// Sets the floor, in pages; at most all pages.
    ///
    /// # Errors
    /// As [`Pager::prioritise`].
    pub fn set_floor(&self, bar: &Bar, pages: u32) -> Result<()> {
        let floor = pages.min(bar.table.page_count());
        self.change_marks(bar, |state, _, _| state.bar_mut(bar.id).floor = floor)
    }

    /// Changes marks of an open VBAR, given its class and recency.
    fn change_marks(&self, bar: &Bar, change: impl FnOnce(&mut State, i32, i64)) -> Result<()> {
        self.device.check()?;
        let mut state = self.state.lock();
        let Rank { class, recency, .. } = state.open(bar)?.rank;
        change(&mut state, class, recency);
        Ok(())
    }

    /// Sets a bare VBAR's watermark, in pages, and frees unpinned pages at or above it.
    ///
    /// # Errors
    /// `InvalidArgument` on a bound VBAR, whose pages are all faulted in; as `free_memory`.
    pub fn set_watermark(&self, bar: &Arc<Bar>, pages: u32) -> Result<()> {
        let set = self.change_watermark(bar, pages);
        set.map_err(|error| self.told(error, format_args!("watermark {pages} of VBAR {}", bar.id)))
    }

    fn change_watermark(&self, bar: &Arc<Bar>, pages: u32) -> Result<()> {
        self.device.check()?;
        let pages = pages.min(bar.table.page_count());
        let above = {
            let mut state = self.state.lock();
            let entry = state.open_mut(bar)?;
            if bar.bound().is_some() {
                let text = "a bound VBAR has no watermark: all of its pages are faulted in; \
                            `free_memory` gives some back";
                return Err(Error::new(ErrorCode::InvalidArgument, text));
            }
            entry.watermark = pages;
            entry.resident.range(pages.max(entry.floor)..).count() as u64
        };
        if above > 0 {
            self.free_from(bar, pages, above.saturating_mul(self.page_bytes()))?;
        }
        // The evictions lowered the mark to the pages that they took, which are all above it.
        self.state.lock().open_mut(bar)?.watermark = pages;
        Ok(())
    }

    /// Sets or lifts the explicit budget, in bytes, and gives back at once what it no longer
    /// covers, as far as pins and fences allow.
    ///
    /// # Errors
    /// `DeviceLost`, `ProcessEnding`, `TimedOut` or `Cancelled` of a wait for the context, or what
    /// the driver says; the budget is set all the same.
    pub fn set_budget(&self, bytes: Option<u64>) -> Result<()> {
        let set =
            self.change_budget(|state| state.budget.set_limit(bytes), WithoutEvent::Synchronize);
        set.map_err(|error| match bytes {
            Some(bytes) => self.told(error, format_args!("setting the budget to {bytes} bytes")),
            None => self.told(error, "lifting the budget's limit"),
        })
    }

    /// Sets the headroom, in bytes; as [`Pager::set_budget`].
    ///
    /// # Errors
    /// As [`Pager::set_budget`].
    pub fn set_headroom(&self, bytes: u64) -> Result<()> {
        let set =
            self.change_budget(|state| state.budget.set_headroom(bytes), WithoutEvent::Synchronize);
        set.map_err(|error| self.told(error, format_args!("setting the headroom to {bytes} bytes")))
    }

    /// Explicit budget and headroom as they were set, in bytes.
    #[must_use]
    pub fn budget_settings(&self) -> (Option<u64>, u64) {
        let settings = |state: &State| (state.budget.limit(), state.budget.headroom());
        self.look().map_or((None, 0), |state| settings(&state))
    }

    fn change_budget(&self, change: impl FnOnce(&mut State), without: WithoutEvent) -> Result<()> {
        let _span = self.span(Kind::Budget);
        // A lost device has a budget all the same; a process that ends has not even a lock.
        process::check()?;
        {
            let mut state = self.state.lock();
            change(&mut state);
            self.update_eager(&state);
            self.trace_budget(&state);
        }
        self.device.check()?;
        let _scope = self.device.enter()?;
        self.poll_budget(Poll::Now)?;
        self.reap_now()?;
        self.shrink_host();
        self.shrink_now(without)
    }

    /// Notices pressure now: asks the driver for its free memory and gives back what the budget no
    /// longer covers, as a fault would.
    ///
    /// # Errors
    /// As [`Pager::set_budget`].
    pub fn refresh(&self) -> Result<()> {
        let noticed = self.change_budget(|_| (), WithoutEvent::Synchronize);
        noticed.map_err(|error| self.told(error, "looking at the budget"))
    }

    /// As [`Pager::refresh`], on a thread of the library's own: it never waits inside the driver.
    ///
    /// # Errors
    /// As [`Pager::set_budget`].
    pub fn relieve(&self) -> Result<()> {
        let noticed = self.change_budget(|_| (), WithoutEvent::Refuse);
        noticed.map_err(|error| self.told(error, "looking at the budget"))
    }

    /// Ends a run of a VBAR: records a fence on the stream, lifts the floor, lets the watermark
    /// heal, and reports the pages that still have pins, with their number.
    ///
    /// # Errors
    /// `Closed`, `DeviceLost`, `ProcessEnding`, and what the driver says of the stream.
    pub fn end_of_run(
        &self,
        bar: &Bar,
        stream: Stream,
        held: HeldPins,
    ) -> Result<Vec<(PageIndex, u32)>> {
        let ended = self.end_run(bar, stream, held);
        ended.map_err(|error| {
            self.told(error, format_args!("end of run of VBAR {} on {stream:?}", bar.id))
        })
    }

    fn end_run(&self, bar: &Bar, stream: Stream, held: HeldPins) -> Result<Vec<(PageIndex, u32)>> {
        self.device.check()?;
        bar.check_open()?;
        let _scope = self.device.enter()?;
        let fence = match self.device.inspect(stream)? {
            (CaptureState::None, Some(slot)) => {
                let fence = self.device.retry(|| self.device.fences.record(stream, slot));
                fence.map_err(|error| self.device.note(error))?
            }
            // With no stream the caller promises that the work is done.
            (_, None) => Ticket::NONE,
            _ => self.device.fences.unrecorded_stamp(),
        };
        let mut state = self.state.lock();
        let now = self.device.fences.now();
        let surplus = state.creatable(self.page_bytes()) + state.frames.free_count();
        let entry = state.open_mut(bar)?;
        entry.floor = 0;
        let healed = entry.healing.observe(now, surplus);
        entry.watermark = entry.watermark.saturating_add(healed).min(bar.table.page_count());
        let pages = bar.table.touched();
        let pinned = pages.filter_map(|(index, page)| {
            let pins = match held {
                HeldPins::Keep => page.word().pins,
                HeldPins::Release => {
                    // The holders' work counts as the stream's, and may not be done.
                    if page.word().pins > 0 && !fence.is_none() {
                        self.stamp_page(page, fence);
                    }
                    page.force_unpin()
                }
            };
            (pins > 0).then_some((index, pins))
        });
        Ok(pinned.collect())
    }

    /// The pages of a range, as far as the VBAR has them. A page stays `Issued` until a hit finds
    /// its bytes there; whoever reads the map is not told of copies that are long over: the driver
    /// is asked about those that are not known to be.
    #[must_use]
    pub fn residency(&self, bar: &Bar, pages: Range<u32>) -> Vec<Residency> {
        let (mut scope, mut look) = (None, Look::default());
        let mut has_passed = |ready: Ticket| {
            let fences = &self.device.fences;
            if fences.known_passed(ready) {
                return true;
            }
            // Where the driver cannot be asked what is known holds.
            let scope = scope.get_or_insert_with(|| self.device.enter());
            scope.is_ok() && matches!(fences.cover_in(&mut look, ready), Ok(Cover::Passed))
        };
        (pages.start..pages.end.min(bar.table.page_count()))
            .map(|index| {
                let word = seen(bar, PageIndex(index), &mut has_passed);
                Residency {
                    state: word.state,
                    pins: word.pins,
                    generation: word.generation,
                    drawn: draw(word),
                }
            })
            .collect()
    }

    /// The state, to be looked at. `None` in a forked child, whose copy of the lock may be held, or
    /// waited for, by a thread that is not there, and at exit.
    fn look(&self) -> Option<MutexGuard<'_, State>> {
        (!process::ending()).then(|| self.state.lock())
    }

    /// The numbers of the device's memory. All 0 in a forked child, which has none of it, and at
    /// exit.
    #[must_use]
    pub fn numbers(&self) -> MemoryNumbers {
        let Some(state) = self.look() else { return MemoryNumbers::default() };
        let page_bytes = self.page_bytes();
        let bytes = |frames: u32| u64::from(frames) * page_bytes;
        let (budget_bytes, budget_source) = state.budget.allowed();
        MemoryNumbers {
            used_bytes: bytes(state.frames.held()),
            peak_bytes: bytes(state.frames.peak()),
            free_bytes: bytes(state.frames.free_count()),
            quarantined_bytes: bytes(state.frames.quarantined()),
            poison_bytes: bytes(u32::from(state.poison_frame().is_some())),
            poisoned_pages: u64::from(state.poisoned_pages()),
            budget_bytes,
            budget_source,
            host_mapped_bytes: bytes(state.host_frames.held()),
            resident_pages: state.bars.values().map(|entry| entry.resident.len() as u64).sum(),
            lingering_mappings: state.lingering.len() as u64,
            quarantined_pages: u64::from(state.quarantined_pages),
            bars: state.bars.len() as u32 - state.closing,
            closing_bars: state.closing,
        }
    }
}

/// A page's word, `Resident` where its bytes have arrived.
fn seen(bar: &Bar, page: PageIndex, has_passed: &mut impl FnMut(Ticket) -> bool) -> Word {
    let before = bar.table.word(page);
    if before.state != PageState::Issued {
        return before;
    }
    let passed = has_passed(bar.table.page(page).ready());
    let mut word = bar.table.word(page);
    // Nothing pins it: what has passed may be of the bytes before.
    if passed && word.state == PageState::Issued && word.generation == before.generation {
        word.state = PageState::Resident;
    }
    word
}
