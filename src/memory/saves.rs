//! Ranges of a VBAR that the program writes, of whose bytes the library has a copy.
//!
//! Owns which ranges these are and the page-locked memory of each, and what fills each of the
//! VBAR's pages from it: a [`Bound`] of the ranges in that page, which is made when the page is
//! filled and anew once one of them was saved or dropped, so that a fill under way keeps the one
//! that it began with, and a save costs by its own pages, however many ranges there are. A range
//! has room before it has bytes; from then on its pages are served as those of bound VBARs are,
//! whatever has a place in them besides. Ranges do not overlap; a range that is dropped and comes
//! again is another one. Of copies of ranges that are gone it keeps the fences, by their bytes,
//! until somebody has waited for them. Copies nothing and waits for nothing.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, ErrorCode, Result};
use crate::host::bound::{Bound, Source};
use crate::host::carved::Part;
use crate::host::memory::HostMemory;
use crate::model::binding::Binding;
use crate::sync::ticket::Ticket;
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
    /// Saves that were begun.
    begun: u64,
    /// Fences of copies of ranges which are gone, until somebody has waited for them.
    owed: Vec<(Range<u64>, Ticket)>,
    /// No range is added any more.
    ended: bool,
}

#[derive(Default)]
struct OfPage {
    range_count: u32,
    /// What fills it, if it was filled since the last change.
    bound: Option<Arc<Bound>>,
}

/// A save that was begun: its range may be dropped, and be prepared and saved by another thread,
/// before it ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Begun(u64);

struct Entry {
    end: u64,
    held: Held,
}

/// What there is of a range.
pub enum Held {
    /// Room for its bytes.
    Room(Part),
    /// It is being saved.
    Saving(Begun),
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

    /// Gives a range room. Returns the room where another thread was quicker.
    ///
    /// # Errors
    /// As [`Saves::is_known`]; `Closed` after [`Saves::end`].
    pub fn prepare(&self, bytes: &Range<u64>, room: Part) -> Result<Option<Part>> {
        let mut state = self.state.lock();
        if state.ended {
            return Err(Error::new(ErrorCode::Closed, "the VBAR is closed"));
        }
        if state.is_known(bytes)? {
            return Ok(Some(room));
        }
        state.ranges.insert(bytes.start, Entry { end: bytes.end, held: Held::Room(room) });
        for page in self.page_size.pages_of(bytes) {
            state.pages.entry(page).or_default().range_count += 1;
        }
        Ok(None)
    }

    /// Takes the room of a range out, for its bytes to be copied there.
    ///
    /// # Errors
    /// `InvalidArgument` where it has none.
    pub fn start(&self, bytes: &Range<u64>) -> Result<(Begun, Part)> {
        let mut state = self.state.lock();
        let begun = Begun(state.begun);
        let (_, room) = match state.entry(bytes) {
            Some(held @ Held::Room(_)) => match std::mem::replace(held, Held::Saving(begun)) {
                Held::Room(room) => (held, room),
                Held::Saving(_) | Held::Bytes(_) => unreachable!("it was matched above"),
            },
            _ => return Err(refusal("it was not prepared")),
        };
        state.begun += 1;
        Ok((begun, room))
    }

    /// The range has bytes from now on. Gives them back where it was dropped meanwhile.
    pub fn finish(
        &self,
        bytes: &Range<u64>,
        begun: Begun,
        memory: Arc<HostMemory>,
    ) -> Option<Arc<HostMemory>> {
        let mut state = self.state.lock();
        match state.entry(bytes) {
            Some(held @ Held::Saving(_)) if held.is_saved_by(begun) => *held = Held::Bytes(memory),
            _ => return Some(memory),
        }
        state.saved_count += 1;
        self.follow(&mut state, bytes);
        None
    }

    /// A save failed: its range is not prepared any more, if it was not dropped meanwhile.
    pub fn give_up(&self, bytes: &Range<u64>, begun: Begun) {
        let mut state = self.state.lock();
        if state.entry(bytes).is_some_and(|held| held.is_saved_by(begun)) {
            self.remove_from(&mut state, bytes);
        }
    }

    /// Forgets a range. `None` where it is not known.
    pub fn remove(&self, bytes: &Range<u64>) -> Option<Held> {
        self.remove_from(&mut self.state.lock(), bytes)
    }

    fn remove_from(&self, state: &mut State, bytes: &Range<u64>) -> Option<Held> {
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
            self.follow(state, bytes);
        }
        Some(held)
    }

    /// Copies of a range that is gone, which whoever drops these bytes waits for.
    pub fn owe(&self, bytes: &Range<u64>, copies: &[Ticket]) {
        let copies = copies.iter().filter(|copy| !copy.is_none());
        let mut state = self.state.lock();
        if !state.ended {
            state.owed.extend(copies.map(|copy| (bytes.clone(), *copy)));
        }
    }

    /// The fences of such copies of bytes of a range.
    #[must_use]
    pub fn owed(&self, bytes: &Range<u64>) -> Vec<Ticket> {
        let state = self.state.lock();
        let its = state.owed.iter().filter(|(of, _)| touches(of, bytes));
        its.map(|(_, copy)| *copy).collect()
    }

    /// These copies of bytes of a range are done.
    pub fn settle(&self, bytes: &Range<u64>, copies: &[Ticket]) {
        let mut state = self.state.lock();
        state.owed.retain(|(of, copy)| !(touches(of, bytes) && copies.contains(copy)));
    }

    /// Forgets all ranges and takes no more. Returns what had filled pages, whose memory is for the
    /// caller to take leave of.
    pub fn end(&self) -> Arc<Bound> {
        let mut state = self.state.lock();
        let ranges = std::mem::take(&mut state.ranges);
        *state = State { begun: state.begun, ended: true, ..State::default() };
        self.any.store(false, Relaxed);
        drop(state);
        Arc::new(bound_of(ranges.iter().map(|(start, entry)| (*start, entry))))
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

impl Held {
    fn is_saved_by(&self, begun: Begun) -> bool {
        matches!(self, Self::Saving(by) if *by == begun)
    }
}

impl State {
    fn is_known(&self, bytes: &Range<u64>) -> Result<bool> {
        let before = self.ranges.range(..bytes.end).next_back();
        match before.filter(|(_, entry)| entry.end > bytes.start) {
            None => Ok(false),
            Some((start, entry)) if (*start..entry.end) == *bytes => Ok(true),
            Some((start, entry)) => {
                let end = entry.end;
                Err(refusal(format!("it overlaps {start}..{end}, which has room or is saved")))
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

fn touches(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

fn refusal(why: impl Into<String>) -> Error {
    Error::new(ErrorCode::InvalidArgument, why)
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

    const RANGE: Range<u64> = 512..1024;

    fn rooms() -> (Arc<Sim>, Arc<Carver>, Saves) {
        let sim = Sim::new(SimOptions::parse("capacity=1M,granularity=64K").unwrap());
        let context = sim.device_primary_ctx_retain(DeviceOrdinal(0)).unwrap();
        sim.ctx_set_current(Some(context)).unwrap();
        let carver = Arc::<Carver>::default();
        drop(carver.add_for(lock_window(&sim.driver(), 1 << 16).unwrap(), 1).unwrap());
        (sim, carver, Saves::new(PageSize::new(4096).unwrap()))
    }

    fn memory(room: Part) -> Arc<HostMemory> {
        Arc::new(HostMemory::of_part(room).unwrap())
    }

    #[test]
    fn a_range_that_was_dropped_and_came_again_is_another_one() {
        let (_sim, carver, saves) = rooms();
        let prepare = || saves.prepare(&RANGE, carver.take(512).unwrap()).unwrap();
        assert!(prepare().is_none());
        // What is there already is as good.
        assert!(prepare().is_some());
        let (first, room) = saves.start(&RANGE).unwrap();
        assert!(matches!(saves.remove(&RANGE), Some(Held::Saving(_))));
        assert!(prepare().is_none());
        assert!(saves.finish(&RANGE, first, memory(room)).is_some());
        let (second, room) = saves.start(&RANGE).unwrap();
        // Neither the end of the first save nor its failure is the second one's.
        let other = memory(carver.take(512).unwrap());
        assert!(saves.finish(&RANGE, first, other).is_some());
        saves.give_up(&RANGE, first);
        assert!(saves.is_known(&RANGE).unwrap() && !saves.is_any());
        assert!(saves.finish(&RANGE, second, memory(room)).is_none());
        assert!(saves.is_any() && saves.has(0) && !saves.has(1));
        saves.give_up(&RANGE, second);
        assert!(saves.is_known(&RANGE).unwrap());
    }

    #[test]
    fn once_it_has_ended_nothing_is_kept_and_nothing_added() {
        let (_sim, carver, saves) = rooms();
        let room = || carver.take(512).unwrap();
        saves.prepare(&(0..512), room()).unwrap();
        let (begun, part) = saves.start(&(0..512)).unwrap();
        assert!(saves.finish(&(0..512), begun, memory(part)).is_none());
        saves.prepare(&RANGE, room()).unwrap();
        let bound = saves.end();
        assert_eq!(bound.binding().segments().len(), 1);
        assert!(!saves.is_any() && !saves.has(0) && saves.remove(&RANGE).is_none());
        let error = saves.prepare(&RANGE, room()).err().unwrap();
        assert_eq!(error.code(), ErrorCode::Closed);
        bound.memories().for_each(|memory| drop(memory.end_leases()));
        drop(bound);
        assert!(carver.is_any_idle());
    }

    #[test]
    fn copies_that_nobody_could_wait_for_are_those_of_their_bytes() {
        let (_sim, _carver, saves) = rooms();
        let [first, second] = [Ticket::new(1, 5), Ticket::new(2, 7)];
        saves.owe(&RANGE, &[first, Ticket::NONE]);
        saves.owe(&(4096..8192), &[second]);
        assert!(saves.owed(&(0..512)).is_empty() && saves.owed(&(1024..4096)).is_empty());
        // Whoever asks meanwhile has it to wait for too.
        assert_eq!([saves.owed(&(0..513)), saves.owed(&RANGE)], [[first], [first]]);
        assert_eq!(saves.owed(&(1000..5000)), [first, second]);
        saves.settle(&RANGE, &[second]);
        saves.settle(&(4096..8192), &[first]);
        assert_eq!(saves.owed(&(1000..5000)), [first, second]);
        saves.settle(&(0..513), &[first]);
        assert_eq!(saves.owed(&(0..5000)), [second]);
        drop(saves.end());
        saves.owe(&RANGE, &[first]);
        assert!(saves.owed(&(0..8192)).is_empty());
    }

    /// Pages of the ranges below, in bytes.
    const P: u64 = 64 << 10;

    /// Saves ranges that come to `bytes` each, one behind the other.
    fn save_all(saves: &Saves, carver: &Arc<Carver>, ranges: impl Iterator<Item = Range<u64>>) {
        for bytes in ranges {
            let room = carver.take((bytes.end - bytes.start) as usize).unwrap();
            saves.prepare(&bytes, room).unwrap();
            let (begun, room) = saves.start(&bytes).unwrap();
            assert!(saves.finish(&bytes, begun, memory(room)).is_none());
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
        let of_page: Vec<_> = (3 * P..4 * P).step_by(4096).map(|at| at..at + 4096).collect();
        assert_eq!(targets(&saves, 3), of_page);
        assert_eq!(saves.end().binding().segments().len(), 2000);
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
