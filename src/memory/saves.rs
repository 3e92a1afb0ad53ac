//! Ranges of a VBAR that the program writes, of whose bytes the library has a copy.
//!
//! Owns which ranges these are and the page-locked memory of each, and what fills the VBAR's pages
//! from it: a [`Bound`] that is made anew whenever a range is saved or dropped, so that a fill
//! under way keeps the one that it began with. A range has room before it has bytes; from then on
//! its pages are served as those of bound VBARs are, whatever has a place in them besides. Ranges
//! do not overlap. Copies nothing and waits for nothing.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, ErrorCode, Result};
use crate::host::bound::{Bound, Source};
use crate::host::carved::Part;
use crate::host::memory::HostMemory;
use crate::model::binding::Binding;
use crate::sync::{AtomicBool, Mutex, Relaxed};
use crate::units::PageSize;

/// See the module's text.
pub struct Saves {
    page_size: PageSize,
    state: Mutex<State>,
    /// Whether some range is saved, to be asked without the lock.
    any: AtomicBool,
}

struct State {
    /// By first byte.
    ranges: BTreeMap<u64, Entry>,
    /// Ranges by page.
    pages: BTreeMap<u32, u32>,
    bound: Arc<Bound>,
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
        let bound = Arc::new(bound_of(&BTreeMap::new()));
        let state = State { ranges: BTreeMap::new(), pages: BTreeMap::new(), bound };
        Self { page_size, state: Mutex::new(state), any: AtomicBool::new(false) }
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
            *state.pages.entry(page).or_default() += 1;
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
        self.follow(&mut state);
        None
    }

    /// Forgets a range. `None` where it is not known.
    pub fn remove(&self, bytes: &Range<u64>) -> Option<Held> {
        let mut state = self.state.lock();
        state.entry(bytes)?;
        let Entry { held, .. } = state.ranges.remove(&bytes.start)?;
        for page in self.page_size.pages_of(bytes) {
            if let Some(count) = state.pages.get_mut(&page) {
                *count -= 1;
                if *count == 0 {
                    state.pages.remove(&page);
                }
            }
        }
        if matches!(held, Held::Bytes(_)) {
            self.follow(&mut state);
        }
        Some(held)
    }

    /// What fills pages now.
    #[must_use]
    pub fn bound(&self) -> Arc<Bound> {
        Arc::clone(&self.state.lock().bound)
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

    fn follow(&self, state: &mut State) {
        state.bound = Arc::new(bound_of(&state.ranges));
        self.any.store(!state.bound.binding().segments().is_empty(), Relaxed);
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

/// What fills pages from the ranges that have bytes.
fn bound_of(ranges: &BTreeMap<u64, Entry>) -> Bound {
    let (mut binding, mut sources) = (Binding::new(), Vec::new());
    for (start, entry) in ranges {
        let Held::Bytes(memory) = &entry.held else { continue };
        let bound = binding.bind(*start..entry.end, sources.len(), 0, entry.end - start);
        bound.expect("ranges do not overlap");
        sources.push(Source::Memory(Arc::clone(memory)));
    }
    Bound::new(binding, sources).expect("each range has memory of its length")
}

fn refusal(bytes: &Range<u64>, why: &str) -> Error {
    let text = format!("saving bytes {}..{} of a VBAR: {why}", bytes.start, bytes.end);
    Error::new(ErrorCode::InvalidArgument, text)
}
