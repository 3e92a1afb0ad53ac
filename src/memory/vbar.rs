//! A VBAR as the pager sees it: addresses, page table, and the files it is bound to.
//!
//! The part that the hit path reads without a lock. What needs the device's lock (which pages are
//! resident, watermark, rank) is in the pager's `BarState`.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::error::{Error, ErrorCode, Result};
use crate::host::bound::Bound;
use crate::memory::page_table::PageTable;
use crate::memory::saves::Saves;
use crate::memory::space::Space;
use crate::sync::{AcqRel, AtomicBool, AtomicU64, Relaxed};
use crate::units::{DeviceAddress, PageIndex, PageSize, align_up};

/// Allocations start at multiples of this, in bytes, as CUDA's own do.
pub const ALLOCATION_ALIGNMENT: u64 = 512;

/// Who calls the close of a VBAR.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Closer {
    /// The one that closes it.
    First,
    /// One that comes after it was closed.
    Later,
}

/// What a VBAR's pages are for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Weights: evicted when others need their frames.
    Weights,
    /// What an allocator hands out. Its pages are pinned as long as they are mapped, and it gives
    /// them back itself; it has no watermark, and its extent is what is mapped.
    Arena,
}

/// Shared part of a VBAR.
pub struct Bar {
    /// Index in the runtime, not reused.
    pub id: u32,
    /// Its addresses.
    pub space: Space,
    /// Its pages' size.
    pub page_size: PageSize,
    /// Its pages.
    pub table: PageTable,
    /// What they are for.
    pub content: Content,
    allocated: AtomicU64,
    closed: AtomicBool,
    /// One of the two, whoever asks first.
    filled: OnceLock<Filled>,
}

/// Where the bytes of a VBAR's pages come from, if not from the program alone.
enum Filled {
    /// All of them.
    Bound(Arc<Bound>),
    /// Those of ranges that were saved.
    Saves(Saves),
}

impl Bar {
    /// A VBAR over `space`, nothing resident.
    #[must_use]
    pub fn new(id: u32, space: Space, page_size: PageSize, content: Content) -> Self {
        let page_count = u32::try_from(space.bytes / page_size.bytes()).expect("checked at create");
        Self {
            id,
            space,
            page_size,
            table: PageTable::new(page_count),
            content,
            allocated: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            filled: OnceLock::new(),
        }
    }

    /// Address of a page.
    #[must_use]
    pub fn address(&self, page: PageIndex) -> DeviceAddress {
        self.space.base.offset(self.page_size.offset_of(page))
    }

    /// The pages that a byte range touches.
    ///
    /// # Errors
    /// `InvalidArgument` for an inverted range or one that leaves the VBAR.
    #[inline]
    pub fn pages_of(&self, bytes: &Range<u64>) -> Result<Range<u32>> {
        if bytes.start > bytes.end || bytes.end > self.space.bytes {
            return Err(self.out_of_range(bytes));
        }
        Ok(self.page_size.pages_of(bytes))
    }

    /// Takes the next `bytes` of the VBAR. Returns their offset, a multiple of 512.
    ///
    /// # Errors
    /// `NoAddresses` when they do not fit; nothing is taken then.
    pub fn allocate(&self, bytes: u64) -> Result<Range<u64>> {
        let mut taken = self.allocated.load(Relaxed);
        loop {
            let range = align_up(taken, ALLOCATION_ALIGNMENT)
                .and_then(|start| Some(start..start.checked_add(bytes)?))
                .filter(|range| range.end <= self.space.bytes)
                .ok_or_else(|| {
                    let all = self.space.bytes;
                    let text = format!("they do not fit: {taken} of {all} bytes are allocated");
                    Error::new(ErrorCode::NoAddresses, text)
                })?;
            match self.allocated.compare_exchange_weak(taken, range.end, Relaxed, Relaxed) {
                Ok(_) => return Ok(range),
                Err(now) => taken = now,
            }
        }
    }

    /// Notes that the VBAR is closed. Returns what the caller is.
    pub fn note_closed(&self) -> Closer {
        match self.closed.swap(true, AcqRel) {
            false => Closer::First,
            true => Closer::Later,
        }
    }

    /// Whether the VBAR was closed: what is left of it goes as soon as it can.
    #[inline]
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }

    /// Whether it is an allocator's.
    #[inline]
    #[must_use]
    pub fn is_arena(&self) -> bool {
        self.content == Content::Arena
    }

    /// Whether the VBAR may be used. Another thread may close it at any moment: what must hold
    /// while pages change hands is asked under the device's lock.
    ///
    /// # Errors
    /// `Closed`.
    #[inline]
    pub fn check_open(&self) -> Result<()> {
        if self.is_closed() { Err(self.closed_error()) } else { Ok(()) }
    }

    /// What every call on a closed VBAR returns.
    #[cold]
    #[must_use]
    pub fn closed_error(&self) -> Error {
        Error::new(ErrorCode::Closed, format!("VBAR {} is closed", self.id))
    }

    /// Binds the VBAR to what fills it, once.
    ///
    /// # Errors
    /// `InvalidArgument` when it is bound or has allocations already.
    pub fn bind(&self, bound: Arc<Bound>, bytes: u64) -> Result<()> {
        let refuse = |text: &str| Err(Error::new(ErrorCode::InvalidArgument, text));
        if bytes > self.space.bytes {
            return refuse("the binding is larger than the VBAR");
        }
        let saved = "ranges of the VBAR are saved";
        if self.saves().is_some() {
            return refuse(saved);
        }
        if self.allocated.compare_exchange(0, bytes, Relaxed, Relaxed).is_err() {
            return refuse("the VBAR is bound, or has allocations, already");
        }
        self.filled.set(Filled::Bound(bound)).or_else(|_| {
            // Another thread was quicker, and nothing is taken.
            let _ = self.allocated.compare_exchange(bytes, 0, Relaxed, Relaxed);
            refuse(if self.saves().is_some() { saved } else { "the VBAR is bound already" })
        })
    }

    /// What fills the VBAR, if it is bound.
    #[inline]
    #[must_use]
    pub fn bound(&self) -> Option<&Arc<Bound>> {
        match self.filled.get() {
            Some(Filled::Bound(bound)) => Some(bound),
            _ => None,
        }
    }

    /// Ranges that the program writes and the library keeps a copy of, if it was ever asked to.
    #[inline]
    #[must_use]
    pub fn saves(&self) -> Option<&Saves> {
        match self.filled.get() {
            Some(Filled::Saves(saves)) => Some(saves),
            _ => None,
        }
    }

    /// The same, for one that is to be added.
    ///
    /// # Errors
    /// `InvalidArgument` of a bound VBAR: it is filled from elsewhere.
    pub fn saves_or_new(&self) -> Result<&Saves> {
        let refuse = |text| Err(Error::new(ErrorCode::InvalidArgument, text));
        if self.is_arena() {
            return refuse("an allocator's pages stay as long as they are mapped: none is saved");
        }
        match self.filled.get_or_init(|| Filled::Saves(Saves::new(self.page_size))) {
            Filled::Saves(saves) => Ok(saves),
            Filled::Bound(_) => {
                refuse("a bound VBAR has its bytes from elsewhere: nothing of it is saved")
            }
        }
    }

    /// The last page of a closed VBAR has gone: nothing is saved of it from now on, and the room
    /// for what was to be is given back. Returns what had filled its pages.
    pub fn end_filling(&self) -> Arc<Bound> {
        match self.filled.get_or_init(|| Filled::Saves(Saves::new(self.page_size))) {
            Filled::Bound(bound) => Arc::clone(bound),
            Filled::Saves(saves) => saves.end(),
        }
    }

    /// What fills a page now, if anything does: once there is something that stays so.
    #[must_use]
    pub fn filled_by(&self, page: PageIndex) -> Option<Arc<Bound>> {
        Some(match self.filled.get()? {
            Filled::Bound(bound) => Arc::clone(bound),
            Filled::Saves(saves) => saves.bound(page.0),
        })
    }

    /// Whether a page streams: it comes back filled, and no watermark keeps it out.
    #[must_use]
    pub fn streams(&self, page: u32) -> bool {
        match self.filled.get() {
            None => false,
            Some(Filled::Bound(_)) => true,
            Some(Filled::Saves(saves)) => saves.has(page),
        }
    }

    /// Whether all of some pages are mapped, or come back filled.
    #[must_use]
    pub fn comes_filled(&self, pages: &Range<u32>) -> bool {
        let is_mapped = |page: u32| self.table.word(PageIndex(page)).state.is_mapped();
        self.bound().is_some() || pages.clone().all(|page| self.streams(page) || is_mapped(page))
    }

    /// Whether the bytes of some pages come from elsewhere than the program.
    #[inline]
    #[must_use]
    pub fn has_filled(&self) -> bool {
        match self.filled.get() {
            None => false,
            Some(Filled::Bound(_)) => true,
            Some(Filled::Saves(saves)) => saves.is_any(),
        }
    }

    #[cold]
    fn out_of_range(&self, bytes: &Range<u64>) -> Error {
        let text = format!(
            "bytes {}..{} are outside VBAR {} of {} bytes",
            bytes.start, bytes.end, self.id, self.space.bytes
        );
        Error::new(ErrorCode::InvalidArgument, text)
    }
}

/// Drawing of the first `limit` pages: see `page_table`.
#[must_use]
pub fn draw(bar: &Bar, limit: u32) -> String {
    let shown = 0..bar.table.page_count().min(limit);
    bar.table.pages(shown).map(|(_, page)| crate::memory::page_table::draw(page.word())).collect()
}

#[cfg(test)]
#[cfg(not(vbar_loom))]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::memory::space::SpaceKind;
    use crate::model::binding::Binding;

    /// Two threads at once: one of them is told no, and what it was to have is not taken.
    #[test]
    fn a_vbar_is_bound_or_has_ranges_that_are_saved_and_never_both() {
        for round in 0..200 {
            let (bytes, kind) = (4 * 4096, SpaceKind::Unreserved);
            let space = Space { base: DeviceAddress(1 << 20), bytes, kind };
            let bar = Bar::new(round, space, PageSize::new(4096).unwrap(), Content::Weights);
            let bound = Arc::new(
                Bound::new(Binding::new(), Vec::<Arc<crate::host::source::ModelFile>>::new())
                    .unwrap(),
            );
            let start = Barrier::new(2);
            let (binds, saves) = std::thread::scope(|scope| {
                let binds = scope.spawn(|| {
                    start.wait();
                    bar.bind(Arc::clone(&bound), bytes).is_ok()
                });
                start.wait();
                let saves = bar.saves_or_new().is_ok();
                (binds.join().unwrap(), saves)
            });
            assert!(binds != saves, "bound {binds}, saved {saves}");
            assert_eq!((bar.bound().is_some(), bar.saves().is_some()), (binds, saves));
            assert_eq!(bar.allocate(bytes).is_ok(), saves);
        }
    }
}
