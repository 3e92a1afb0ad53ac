//! Ranges of a VBAR that the program writes, of whose bytes the library has a copy.
//!
//! Owns which ranges these are and the page-locked memory of each, and what fills each of the
//! VBAR's pages from it: a [`Bound`] of the ranges in that page, which is made when the page is
//! filled and anew once one of them was saved or dropped, so that a fill under way keeps the one
//! that it began with, and a save costs by its own pages, however many ranges there are. A range
//! has room before it has bytes; from then on its pages are served as those of bound VBARs are,
//! whatever has a place in them besides. Ranges do not overlap. Copies nothing and waits for
//! nothing.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, ErrorCode, Result};
use crate::host::bound::{Bound, Source};
use crate::host::carved::Part;
use crate::host::memory::HostMemory;
use crate::model::binding::Binding;
use crate::sync::{AtomicBool, Mutex, Relaxed};
use crate::units::{PageIndex, PageSize};

/// See the module's text.
pub struct Saves {
    page_size: PageSize,
    state: Mutex<State>,
    /// Whether some range is saved, to be asked without the lock.
    any: AtomicBool,
    /// What fills a page that no range with bytes has a part in.
    nothing: Arc<Bound>,
}

#[derive(Default)]
struct State {
    /// By first byte.
    ranges: BTreeMap<u64, Entry>,
    /// Pages that ranges have a part in.
    pages: BTreeMap<u32, OfPage>,
    /// Ranges that have bytes.
    saved_count: u64,
}

#[derive(Default)]
struct OfPage {
    range_count: u32,
    /// What fills it, if it was filled since the last change.
    bound: Option<Arc<Bound>>,
}

struct Entry {
    end: u64,
    held: Held,
}

/// What there is of a range.
pub enum Held {
    /// Room for its bytes.
    Room(Part),
    /// It is being saved.
    Saving,
    /// Its bytes.
    Bytes(Arc<HostMemory>),
}

impl Saves {
    /// Of no range.
    #[must_use]
    pub fn new(page_size: PageSize) -> Self {
        let nothing = Arc::new(bound_of(std::iter::empty()));
        Self { page_size, state: Mutex::default(), any: AtomicBool::new(false), nothing }
    }

    /// Whether a range has room, or bytes.
    ///
    /// # Errors
    /// `InvalidArgument` for one that overlaps another.
    pub fn is_known(&self, bytes: &Range<u64>) -> Result<bool> {
        self.state.lock().is_known(bytes)
    }

    /// Gives a range room.
    ///
    /// # Errors
    /// As [`Saves::is_known`]; `InvalidArgument` also where another thread was quicker.
    pub fn prepare(&self, bytes: &Range<u64>, room: Part) -> Result<()> {
        let mut state = self.state.lock();
        if state.is_known(bytes)? {
            return Err(refusal(bytes, "it has room already"));
        }
        state.ranges.insert(bytes.start, Entry { end: bytes.end, held: Held::Room(room) });
        for page in self.page_size.pages_of(bytes) {
            state.pages.entry(page).or_default().range_count += 1;
        }
        Ok(())
    }

    /// Takes the room of a range out, for its bytes to be copied there.
    ///
    /// # Errors
    /// `InvalidArgument` where it has none.
    pub fn start(&self, bytes: &Range<u64>) -> Result<Part> {
        let mut state = self.state.lock();
        match state.entry(bytes) {
            Some(held @ Held::Room(_)) => match std::mem::replace(held, Held::Saving) {
                Held::Room(room) => Ok(room),
                Held::Saving | Held::Bytes(_) => unreachable!("it was matched above"),
            },
            _ => Err(refusal(bytes, "it was not prepared")),
        }
    }

    /// The range has bytes from now on. Gives them back where it was dropped meanwhile.
    pub fn finish(&self, bytes: &Range<u64>, memory: Arc<HostMemory>) -> Option<Arc<HostMemory>> {
        let mut state = self.state.lock();
        match state.entry(bytes) {
            Some(held @ Held::Saving) => *held = Held::Bytes(memory),
            _ => return Some(memory),
        }
        state.saved_count += 1;
        self.follow(&mut state, bytes);
        None
    }

    /// Forgets a range. `None` where it is not known.
    pub fn remove(&self, bytes: &Range<u64>) -> Option<Held> {
        let mut state = self.state.lock();
        state.entry(bytes)?;
        let Entry { held, .. } = state.ranges.remove(&bytes.start)?;
        for page in self.page_size.pages_of(bytes) {
            if let Some(of_page) = state.pages.get_mut(&page) {
                of_page.range_count -= 1;
                if of_page.range_count == 0 {
                    state.pages.remove(&page);
                }
            }
        }
        if matches!(held, Held::Bytes(_)) {
            state.saved_count -= 1;
            self.follow(&mut state, bytes);
        }
        Some(held)
    }

    /// What fills a page now.
    #[must_use]
    pub fn bound(&self, page: u32) -> Arc<Bound> {
        let State { ranges, pages, .. } = &mut *self.state.lock();
        let Some(of_page) = pages.get_mut(&page) else { return Arc::clone(&self.nothing) };
        let start = self.page_size.offset_of(PageIndex(page));
        let made = || Arc::new(bound_of(in_bytes(ranges, start..start + self.page_size.bytes())));
        Arc::clone(of_page.bound.get_or_insert_with(made))
    }

    /// What fills all pages.
    #[must_use]
    pub fn bound_whole(&self) -> Bound {
        let state = self.state.lock();
        bound_of(state.ranges.iter().map(|(start, entry)| (*start, entry)))
    }

    /// Whether a range with room or bytes has a part in the page.
    #[must_use]
    pub fn has(&self, page: u32) -> bool {
        self.state.lock().pages.contains_key(&page)
    }

    /// Whether some range is saved.
    #[inline]
    #[must_use]
    pub fn is_any(&self) -> bool {
        self.any.load(Relaxed)
    }

    /// Other bytes fill the pages of a range from now on.
    fn follow(&self, state: &mut State, bytes: &Range<u64>) {
        for page in self.page_size.pages_of(bytes) {
            if let Some(of_page) = state.pages.get_mut(&page) {
                of_page.bound = None;
            }
        }
        self.any.store(state.saved_count > 0, Relaxed);
    }
}

impl State {
    fn is_known(&self, bytes: &Range<u64>) -> Result<bool> {
        let before = self.ranges.range(..bytes.end).next_back();
        match before.filter(|(_, entry)| entry.end > bytes.start) {
            None => Ok(false),
            Some((start, entry)) if (*start..entry.end) == *bytes => Ok(true),
            Some((start, entry)) => {
                let text =
                    format!("it overlaps {start}..{}, which has room or is saved", entry.end);
                Err(refusal(bytes, &text))
            }
        }
    }

    fn entry(&mut self, bytes: &Range<u64>) -> Option<&mut Held> {
        let entry = self.ranges.get_mut(&bytes.start)?;
        (entry.end == bytes.end).then_some(&mut entry.held)
    }
}

/// The ranges with a part in `bytes`, rising.
fn in_bytes(
    ranges: &BTreeMap<u64, Entry>,
    bytes: Range<u64>,
) -> impl Iterator<Item = (u64, &Entry)> {
    // Of those that begin before, the last one alone may reach into it.
    let before = ranges.range(..bytes.start).next_back();
    let before = before.filter(|(_, entry)| entry.end > bytes.start);
    before.into_iter().chain(ranges.range(bytes)).map(|(start, entry)| (*start, entry))
}

/// What fills pages from those of some ranges that have bytes.
fn bound_of<'a>(ranges: impl Iterator<Item = (u64, &'a Entry)>) -> Bound {
    let (mut binding, mut sources) = (Binding::new(), Vec::new());
    for (start, entry) in ranges {
        let Held::Bytes(memory) = &entry.held else { continue };
        let bound = binding.bind(start..entry.end, sources.len(), 0, entry.end - start);
        bound.expect("ranges do not overlap");
        sources.push(Source::Memory(Arc::clone(memory)));
    }
    Bound::new(binding, sources).expect("each range has memory of its length")
}

fn refusal(bytes: &Range<u64>, why: &str) -> Error {
    let text = format!("saving bytes {}..{} of a VBAR: {why}", bytes.start, bytes.end);
    Error::new(ErrorCode::InvalidArgument, text)
}

#[cfg(test)]
#[cfg(not(vbar_loom))]
mod tests {
    use super::*;
    use crate::driver::Driver;
    use crate::driver::sim::{Sim, SimOptions};
    use crate::host::carved::Carver;
    use crate::host::locked::lock_window;
    use crate::units::DeviceOrdinal;

    /// Pages of the ranges below, in bytes.
    const P: u64 = 64 << 10;

    /// Saves ranges that come to `bytes` each, one behind the other.
    fn save_all(saves: &Saves, carver: &Arc<Carver>, ranges: impl Iterator<Item = Range<u64>>) {
        for bytes in ranges {
            let room = carver.take((bytes.end - bytes.start) as usize).unwrap();
            saves.prepare(&bytes, room).unwrap();
            let memory = HostMemory::of_part(saves.start(&bytes).unwrap()).unwrap();
            assert!(saves.finish(&bytes, Arc::new(memory)).is_none());
        }
    }

    fn carver(bytes: usize) -> Arc<Carver> {
        let sim = Sim::new(SimOptions::parse("capacity=1M,granularity=64K").unwrap());
        let context = sim.device_primary_ctx_retain(DeviceOrdinal(0)).unwrap();
        sim.ctx_set_current(Some(context)).unwrap();
        let carver = Arc::<Carver>::default();
        carver.add(lock_window(&sim.driver(), bytes).unwrap());
        carver
    }

    /// The targets that fill a page.
    fn targets(saves: &Saves, page: u32) -> Vec<Range<u64>> {
        let bound = saves.bound(page);
        bound.binding().segments().iter().map(|segment| segment.target.clone()).collect()
    }

    #[test]
    fn two_thousand_ranges_are_saved() {
        let (saves, carver) = (Saves::new(PageSize::new(P).unwrap()), carver(2000 * 4096));
        save_all(&saves, &carver, (0..2000).map(|at| at * 4096..(at + 1) * 4096));
        assert!(saves.is_any());
        assert_eq!(saves.bound_whole().binding().segments().len(), 2000);
        let of_page: Vec<_> = (3 * P..4 * P).step_by(4096).map(|at| at..at + 4096).collect();
        assert_eq!(targets(&saves, 3), of_page);
    }

    #[test]
    fn a_save_changes_what_fills_its_own_pages_and_no_other() {
        let (saves, carver) = (Saves::new(PageSize::new(P).unwrap()), carver(64 * 4096));
        save_all(&saves, &carver, [0..512, P / 2..P + 512, 2 * P - 512..2 * P].into_iter());
        let before: Vec<_> = (0..4).map(|page| saves.bound(page)).collect();
        assert_eq!(targets(&saves, 0), [0..512, P / 2..P + 512]);
        assert_eq!(targets(&saves, 1), [P / 2..P + 512, 2 * P - 512..2 * P]);
        assert!(targets(&saves, 2).is_empty() && targets(&saves, 3).is_empty());
        save_all(&saves, &carver, [P + 512..P + 1024, 3 * P..3 * P + 512].into_iter());
        let is_same = |page: u32| Arc::ptr_eq(&before[page as usize], &saves.bound(page));
        assert_eq!([0, 1, 2, 3].map(is_same), [true, false, true, false]);
        assert_eq!(targets(&saves, 1).len(), 3);
        // One that reaches over two pages goes from both; a fill that began before has it still.
        assert!(matches!(saves.remove(&(P / 2..P + 512)), Some(Held::Bytes(_))));
        let of_first = targets(&saves, 0);
        assert_eq!((of_first.len(), &of_first[0]), (1, &(0..512)));
        assert_eq!(targets(&saves, 1), [P + 512..P + 1024, 2 * P - 512..2 * P]);
        assert_eq!(before[0].binding().segments().len(), 2);
        let mut left = [0..512, P + 512..P + 1024, 2 * P - 512..2 * P, 3 * P..3 * P + 512];
        assert!(left.iter_mut().all(|bytes| saves.is_any() && saves.remove(bytes).is_some()));
        assert!(!saves.is_any() && (0..4).all(|page| targets(&saves, page).is_empty()));
    }
}
