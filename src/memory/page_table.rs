//! The record of a VBAR's pages: one atomic word a page, so that a hit takes no lock.
//!
//! A word holds the state (3 bits), a mark of graphs, the pins (16 bits) and the generation (44
//! bits). It is the truth about a page; the side fields next to it are written before the state
//! that publishes them. This module moves words and tickets; it calls no driver, takes no lock and
//! decides nothing.
//!
//! | from        | to                                | by                                       |
//! |-------------|-----------------------------------|------------------------------------------|
//! | Absent      | Claimed                           | a fault, under the device's lock         |
//! | Claimed     | Issued, Resident, HostMapped      | the claimer: published                   |
//! | Claimed     | Absent                            | the claimer: undone                      |
//! | Claimed     | Evicting                          | the claimer: its fill failed             |
//! | Issued      | Resident                          | whoever sees the ready fence passed      |
//! | Issued, Resident, HostMapped | Evicting         | the evictor, pins 0, under the lock      |
//! | Evicting    | Absent, or back (undone)          | the evictor, when the mapping is gone    |
//! | Claimed, Evicting | Quarantined                 | a failed undo; nothing leads out         |
//!
//! Drawing: `.` Absent, `f` Claimed, `i` Issued, `#` Resident, `P` pinned, `!` Evicting, `X`
//! Quarantined, `h` HostMapped.

use std::ops::Range;
use std::sync::OnceLock;

use crate::error::{Error, ErrorCode, Result};
use crate::sync::ticket::Ticket;
use crate::sync::{AcqRel, Acquire, AtomicBool, AtomicU32, AtomicU64, Relaxed, Release, fixed};
use crate::units::{Generation, PageIndex};

/// Of pins that a forced end of run took back.
const FORCED: &str = "the pins were released by force, by an end of run; fault again";

/// State of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum PageState {
    /// No frame.
    Absent = 0,
    /// One thread makes the driver calls that give it a frame.
    Claimed = 1,
    /// It has its frame; the bytes, or the frame's former users, are not known to be done.
    Issued = 2,
    /// It has its frame and everything before it is done.
    Resident = 3,
    /// It has a host frame, which the device reads over the link, after its ready fence.
    HostMapped = 4,
    /// On its way out; its mapping may outlast its frame.
    Evicting = 5,
    /// A failed undo left it in a state that the driver alone knows; never used again.
    Quarantined = 6,
}

impl PageState {
    fn from_bits(bits: u64) -> Self {
        match bits {
            0 => Self::Absent,
            1 => Self::Claimed,
            2 => Self::Issued,
            3 => Self::Resident,
            4 => Self::HostMapped,
            5 => Self::Evicting,
            _ => Self::Quarantined,
        }
    }

    /// Whether the device may read the page, after its ready fence.
    #[must_use]
    pub fn is_mapped(self) -> bool {
        matches!(self, Self::Issued | Self::Resident)
    }

    /// As [`PageState::is_mapped`], from the host's memory too.
    #[must_use]
    pub fn is_readable(self) -> bool {
        self.is_mapped() || self == Self::HostMapped
    }

    fn may_become(self, next: Self) -> bool {
        use PageState as S;
        matches!(
            (self, next),
            (S::Absent, S::Claimed)
                | (S::Claimed, S::Issued | S::Resident | S::HostMapped | S::Absent)
                | (S::Claimed, S::Evicting | S::Quarantined)
                | (S::Issued, S::Resident | S::Evicting)
                | (S::Resident | S::HostMapped, S::Evicting)
                | (S::Evicting, S::Absent | S::Issued | S::Resident | S::HostMapped)
                | (S::Evicting, S::Quarantined)
        )
    }
}

const STATE: u64 = 7;
/// See [`Page::enter_graph`].
const GRAPH: u64 = 8;
const STATE_BITS: u32 = 4;
const PIN_BITS: u32 = 16;
const PIN_ONE: u64 = 1 << STATE_BITS;
const PIN_MAX: u64 = (1 << PIN_BITS) - 1;
const GENERATION_SHIFT: u32 = STATE_BITS + PIN_BITS;

/// A page's word, taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Word {
    /// State.
    pub state: PageState,
    /// Pins; at most 65,535.
    pub pins: u32,
    /// Generation of the bytes, 0 before the first.
    pub generation: Generation,
    /// A graph may have come since this was last taken away.
    marked: bool,
}

impl Word {
    fn unpack(bits: u64) -> Self {
        Self {
            state: PageState::from_bits(bits & STATE),
            pins: ((bits >> STATE_BITS) & PIN_MAX) as u32,
            generation: Generation(bits >> GENERATION_SHIFT),
            marked: bits & GRAPH != 0,
        }
    }

    fn pack(self) -> u64 {
        self.state as u64
            | if self.marked { GRAPH } else { 0 }
            | (u64::from(self.pins) << STATE_BITS)
            | (self.generation.0 << GENERATION_SHIFT)
    }
}

/// The next generation of any page in the process: never 0, never given out twice.
///
/// 44 bits last for over a hundred years of 16 MiB pages at link speed.
pub fn next_generation() -> Generation {
    static NEXT: fixed::AtomicU64 = fixed::AtomicU64::new(1);
    Generation(NEXT.fetch_add(1, Relaxed) & ((1 << 44) - 1))
}

/// Readers that a page remembers apart; more are joined by an event.
pub const READER_COUNT: usize = 4;

/// One page: its word and the tickets of its users. Two cache lines, which processors fetch in
/// pairs, so that threads on neighbouring pages do not slow one another.
#[repr(align(128))]
#[derive(Default)]
pub struct Page {
    word: AtomicU64,
    ready: AtomicU64,
    readers: [AtomicU64; READER_COUNT],
    /// Index of the page's frame; written under the device's lock.
    frame: AtomicU32,
    /// Poison is mapped behind the page, which is on its way in or out, or absent; its frame is
    /// `frame` then. Written by whoever owns the page, before the state is published.
    poisoned: AtomicBool,
    /// Pins that graphs hold; raised before the pin is made, lowered after it is given back.
    graphs: AtomicU32,
}

/// What came of trying to pin a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pin {
    /// Pinned; the word before the pin.
    Pinned(Word),
    /// The page has no frame now; nothing was done.
    Absent(Word),
    /// The page has as many pins as can be counted; nothing was done.
    Full,
}

impl Page {
    /// The word now.
    #[inline]
    #[must_use]
    pub fn word(&self) -> Word {
        Word::unpack(self.word.load(Acquire))
    }

    /// Adds a pin if the page is mapped.
    #[inline(always)]
    pub fn pin(&self) -> Pin {
        self.pin_if(PageState::is_mapped)
    }

    /// Adds a pin if the page is mapped, be it from the host's memory.
    pub fn pin_readable(&self) -> Pin {
        self.pin_if(PageState::is_readable)
    }

    #[inline(always)]
    fn pin_if(&self, admits: impl Fn(PageState) -> bool) -> Pin {
        let mut bits = self.word.load(Acquire);
        loop {
            let word = Word::unpack(bits);
            if !admits(word.state) {
                return Pin::Absent(word);
            }
            if u64::from(word.pins) == PIN_MAX {
                return Pin::Full;
            }
            match self.word.compare_exchange_weak(bits, bits + PIN_ONE, AcqRel, Acquire) {
                Ok(_) => return Pin::Pinned(word),
                Err(now) => bits = now,
            }
        }
    }

    /// Takes a pin back that was made when the page had `generation`. The user's stamp is on the
    /// page already.
    ///
    /// A pinned page keeps its generation, except when its pins are taken back by force; so the
    /// generation tells whose pin it is, and a late unpin cannot take a later run's pin.
    ///
    /// # Errors
    /// `StaleToken` when the pins were taken back by force since; nothing is done then.
    #[inline]
    pub fn unpin(&self, generation: Generation) -> Result<()> {
        let mut bits = self.word.load(Acquire);
        loop {
            let word = Word::unpack(bits);
            if word.generation != generation || word.pins == 0 {
                return Err(Error::new(ErrorCode::StaleToken, FORCED));
            }
            match self.word.compare_exchange_weak(bits, bits - PIN_ONE, AcqRel, Acquire) {
                Ok(_) => return Ok(()),
                Err(now) => bits = now,
            }
        }
    }

    /// Takes all pins back. The bytes get a new generation, which makes the holders' unpins stale,
    /// and their bytes unknown: a holder may still write to them. A page that a graph holds keeps
    /// all its pins: the graph may be launched again. Returns the pins that the page had.
    pub fn force_unpin(&self) -> u32 {
        loop {
            let word = self.word();
            // Asked for each attempt: a graph counts itself, and marks the word, before it pins.
            if word.pins == 0 || self.graphs.load(Acquire) > 0 {
                return word.pins;
            }
            // A mark from before would not show that another graph came: it is taken away first.
            let next = match word.marked {
                true => Word { marked: false, ..word },
                false => Word { pins: 0, generation: next_generation(), ..word },
            };
            if self.exchange(word, next).is_ok() && !word.marked {
                return word.pins;
            }
        }
    }

    /// Counts a graph that is about to pin the page, and marks the word: its pin alone would not
    /// keep an exchange from succeeding that began before it, when somebody's unpin makes the word
    /// what it was.
    pub fn enter_graph(&self) {
        self.graphs.fetch_add(1, AcqRel);
        self.word.fetch_or(GRAPH, AcqRel);
    }

    /// Counts a graph off that has given its pin back.
    pub fn leave_graph(&self) {
        self.graphs.fetch_sub(1, AcqRel);
    }

    /// Claims an absent page, or says what it is instead.
    pub fn claim(&self) -> std::result::Result<(), Word> {
        let word = self.word();
        if word.state != PageState::Absent {
            return Err(word);
        }
        self.exchange(word, Word { state: PageState::Claimed, ..word })
    }

    /// Publishes a claimed page with a new generation and `pins` pins. Its frame, tickets and
    /// mapping are in place.
    pub fn publish(&self, state: PageState, pins: u32, ready: Ticket) -> Generation {
        let generation = next_generation();
        self.ready.store(ready.to_bits(), Relaxed);
        for reader in &self.readers {
            reader.store(0, Relaxed);
        }
        self.update(|word| {
            debug_assert!(word.state.may_become(state), "{:?} to {state:?}", word.state);
            Word { state, pins, generation, ..word }
        });
        generation
    }

    /// Starts to evict a mapped page without pins, or says what it is instead.
    pub fn start_evicting(&self) -> std::result::Result<(), Word> {
        self.evict_if(PageState::is_mapped)
    }

    /// As [`Page::start_evicting`], of a page in the host's memory.
    pub fn start_leaving_host(&self) -> std::result::Result<(), Word> {
        self.evict_if(|state| state == PageState::HostMapped)
    }

    fn evict_if(&self, admits: impl Fn(PageState) -> bool) -> std::result::Result<(), Word> {
        loop {
            let word = self.word();
            if !admits(word.state) || word.pins > 0 {
                return Err(word);
            }
            if self.exchange(word, Word { state: PageState::Evicting, ..word }).is_ok() {
                return Ok(());
            }
        }
    }

    /// Moves a page that this thread owns (Claimed or Evicting) to `state`, keeping the rest.
    ///
    /// # Panics
    /// In debug builds, on a transition that the table of this module does not have.
    pub fn settle(&self, state: PageState) {
        self.update(|word| {
            debug_assert!(word.state.may_become(state), "{:?} to {state:?}", word.state);
            Word { state, ..word }
        });
    }

    /// Notes that the ready fence has passed: later hits need not ask.
    #[inline]
    pub fn note_ready(&self) {
        let mut bits = self.word.load(Acquire);
        loop {
            let word = Word::unpack(bits);
            if word.state != PageState::Issued {
                return;
            }
            let next = Word { state: PageState::Resident, ..word }.pack();
            match self.word.compare_exchange_weak(bits, next, AcqRel, Acquire) {
                Ok(_) => return,
                Err(now) => bits = now,
            }
        }
    }

    /// The ticket after which the page's bytes may be used.
    #[inline]
    #[must_use]
    pub fn ready(&self) -> Ticket {
        Ticket::from_bits(self.ready.load(Acquire))
    }

    /// Sets the ready ticket of a page that the caller has pinned.
    pub fn set_ready(&self, ticket: Ticket) {
        self.ready.store(ticket.to_bits(), Release);
    }

    /// Remembers a use up to `ticket`. Returns false when the page remembers four other streams
    /// already, whose uses `passed` does not know to be over; nothing was done then.
    #[inline]
    pub fn stamp(&self, ticket: Ticket, passed: impl Fn(Ticket) -> bool) -> bool {
        for reader in &self.readers {
            let mut bits = reader.load(Acquire);
            loop {
                let old = Ticket::from_bits(bits);
                let same = !old.is_none() && old.slot() == ticket.slot();
                if same && old.sequence() >= ticket.sequence() {
                    return true;
                }
                if !(old.is_none() || same || passed(old)) {
                    break;
                }
                match reader.compare_exchange_weak(bits, ticket.to_bits(), AcqRel, Acquire) {
                    Ok(_) => return true,
                    Err(now) => bits = now,
                }
            }
        }
        false
    }

    /// Replaces one remembered use by another that comes after it. Returns whether it was there.
    pub fn replace_stamp(&self, old: Ticket, new: Ticket) -> bool {
        self.readers.iter().any(|reader| {
            reader.compare_exchange(old.to_bits(), new.to_bits(), AcqRel, Acquire).is_ok()
        })
    }

    /// All tickets that must pass before the frame may be used otherwise: ready and readers.
    #[must_use]
    pub fn users(&self) -> Vec<Ticket> {
        std::iter::once(&self.ready)
            .chain(&self.readers)
            .map(|ticket| Ticket::from_bits(ticket.load(Acquire)))
            .filter(|ticket| !ticket.is_none())
            .collect()
    }

    /// Whether a use since the page was filled is remembered.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.readers.iter().any(|reader| reader.load(Acquire) != 0)
    }

    /// Whether poison is mapped behind the page; asked by whoever owns it, or under the device's
    /// lock.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.poisoned.load(Acquire)
    }

    /// Notes that the page's frame is poison from now on.
    pub fn note_poison(&self) {
        self.poisoned.store(true, Release);
    }

    /// Notes that the poison is gone.
    pub fn clear_poison(&self) {
        self.poisoned.store(false, Release);
    }

    /// Index of the page's frame, meaningful while it is mapped, evicting, or poisoned.
    #[must_use]
    pub fn frame(&self) -> u32 {
        self.frame.load(Acquire)
    }

    /// Notes the page's frame; under the device's lock.
    pub fn set_frame(&self, frame: u32) {
        self.frame.store(frame, Release);
    }

    fn exchange(&self, from: Word, to: Word) -> std::result::Result<(), Word> {
        self.word
            .compare_exchange(from.pack(), to.pack(), AcqRel, Acquire)
            .map(|_| ())
            .map_err(Word::unpack)
    }

    fn update(&self, mut change: impl FnMut(Word) -> Word) {
        let mut bits = self.word.load(Acquire);
        loop {
            let next = change(Word::unpack(bits)).pack();
            match self.word.compare_exchange_weak(bits, next, AcqRel, Acquire) {
                Ok(_) => return,
                Err(now) => bits = now,
            }
        }
    }
}

const CHUNK: usize = if cfg!(vbar_loom) { 2 } else { 256 };

/// The pages of one VBAR. Chunks are made when first touched, so that a VBAR far larger than the
/// device costs nothing.
pub struct PageTable {
    chunks: Box<[OnceLock<Box<[Page; CHUNK]>>]>,
    page_count: u32,
}

impl PageTable {
    /// A table of `page_count` absent pages.
    #[must_use]
    pub fn new(page_count: u32) -> Self {
        let chunk_count = (page_count as usize).div_ceil(CHUNK);
        Self { chunks: (0..chunk_count).map(|_| OnceLock::new()).collect(), page_count }
    }

    /// Pages in the table.
    #[must_use]
    pub fn page_count(&self) -> u32 {
        self.page_count
    }

    /// One page.
    ///
    /// # Panics
    /// Past the end; callers have checked their range.
    #[inline(always)]
    #[must_use]
    pub fn page(&self, index: PageIndex) -> &Page {
        let chunk = &self.chunks[index.0 as usize / CHUNK];
        let pages = match chunk.get() {
            Some(pages) => pages,
            None => touch(chunk),
        };
        &pages[index.0 as usize % CHUNK]
    }

    /// A page's word, without making its place in the table: absent if it was never touched.
    #[must_use]
    pub fn word(&self, index: PageIndex) -> Word {
        let pages = self.chunks[index.0 as usize / CHUNK].get();
        pages.map_or(Word::unpack(0), |pages| pages[index.0 as usize % CHUNK].word())
    }

    /// The pages of a range, with their indexes.
    pub fn pages(&self, range: Range<u32>) -> impl Iterator<Item = (PageIndex, &Page)> {
        range.map(|index| (PageIndex(index), self.page(PageIndex(index))))
    }

    /// The words of all pages in a chunk that was ever touched; the others are absent.
    pub fn touched(&self) -> impl Iterator<Item = (PageIndex, &Page)> {
        self.chunks.iter().enumerate().filter_map(|(at, chunk)| Some((at, chunk.get()?))).flat_map(
            move |(at, pages)| {
                let first = (at * CHUNK) as u32;
                let all = pages.iter().enumerate();
                all.map(move |(i, page)| (PageIndex(first + i as u32), page))
                    .filter(|(index, _)| index.0 < self.page_count)
            },
        )
    }
}

#[cold]
fn touch(chunk: &OnceLock<Box<[Page; CHUNK]>>) -> &[Page; CHUNK] {
    chunk.get_or_init(|| Box::new(std::array::from_fn(|_| Page::default())))
}

/// One character for a page, as in this module's table.
#[must_use]
pub fn draw(word: Word) -> char {
    match word.state {
        PageState::Absent => '.',
        PageState::Claimed => 'f',
        PageState::Issued | PageState::Resident if word.pins > 0 => 'P',
        PageState::Issued => 'i',
        PageState::Resident => '#',
        PageState::HostMapped => 'h',
        PageState::Evicting => '!',
        PageState::Quarantined => 'X',
    }
}

#[cfg(all(test, vbar_loom))]
mod every_order;

#[cfg(test)]
mod tests;
