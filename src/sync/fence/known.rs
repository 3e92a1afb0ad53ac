//! Which stream a handle names: slots by the id that the driver gives a stream, and never again.
//!
//! The driver refuses to tell the id of a stream that is being captured, and breaks the capture
//! that asks for it. Such a stream has a slot by its handle until it is seen running again, when a
//! record on it covers what was stamped there.

use std::num::NonZeroU64;

use super::{FREE, Fences, RETIRED, Ring, SLOT_COUNT, Slot, StreamSlot};
use crate::error::{Error, ErrorCode, Result};
use crate::sync::{AcqRel, Acquire, Relaxed, Release};
use crate::units::Stream;

/// Marks an id that stands for a handle. The driver's are small numbers.
const CAPTURED: u64 = 1 << 63;

thread_local! {
    /// Its address tells one thread's default stream from another's.
    static THREAD_MARK: u8 = const { 0 };
}

impl StreamSlot {
    /// Whether the stream was being captured when the slot was asked for: it says which stream it
    /// was only for as long as the stream is there.
    #[inline(always)]
    #[must_use]
    pub fn is_captured(self) -> bool {
        self.id.get() >= CAPTURED
    }
}

impl Fences {
    /// The slot of a stream, found by its id or made. The handle must be valid, and for an
    /// implicit one the runtime's context current; the stream is not being captured.
    /// `Stream::NONE` has no slot.
    ///
    /// # Errors
    /// What the driver says of the handle; `Unsupported` when 256 streams are in use at once.
    #[inline(always)]
    pub fn slot_of(&self, stream: Stream) -> Result<Option<StreamSlot>> {
        if stream.is_none() {
            return Ok(None);
        }
        self.find_or_insert(self.id_of(stream)?).map(Some)
    }

    /// Learns the default stream's id while it may be asked for; the runtime's context is current.
    ///
    /// # Errors
    /// What the driver says.
    pub fn learn_default_stream(&self) -> Result<()> {
        self.id_of(Stream::LEGACY).map(drop)
    }

    /// The slot of a stream that is being captured, or of the default stream while one is: no call
    /// of the driver's.
    ///
    /// # Errors
    /// `Unsupported` when 256 streams are in use at once, and for a default stream that was not
    /// seen before.
    #[cold]
    pub fn slot_in_capture(&self, stream: Stream) -> Result<StreamSlot> {
        if !stream.is_default() {
            return self.find_or_insert(captured_id(stream));
        }
        let known = NonZeroU64::new(self.default_id.load(Relaxed));
        let id = known.ok_or_else(|| {
            let text = "the default stream was not used before a capture began";
            Error::new(ErrorCode::Unsupported, text)
        })?;
        self.find_or_insert(id)
    }

    /// Whether the slot is one that the stream got while it was being captured. A handle may be
    /// another stream's by now: only for streams that are known to be there still.
    #[must_use]
    pub fn is_captured_as(&self, stream: Stream, slot: StreamSlot) -> bool {
        slot.id == captured_id(stream)
    }

    /// The slot that a stream had while it was being captured, until [`Fences::end_capture`].
    #[must_use]
    pub fn captured_slot(&self, stream: Stream) -> Option<StreamSlot> {
        let slot = self.find(captured_id(stream))?;
        self.entry(slot).capturing.load(Acquire).then_some(slot)
    }

    /// Covers what was stamped on a stream while it was being captured, as it runs again.
    ///
    /// # Errors
    /// As [`Fences::record`]; all is as it was then.
    pub fn end_capture(&self, stream: Stream, slot: StreamSlot) -> Result<()> {
        self.cover_stamps(stream, slot)?;
        self.note_capture(slot, false);
        Ok(())
    }

    /// Forgets a stream that is about to be destroyed, after covering its uses by a last record. It
    /// is not being captured.
    ///
    /// # Errors
    /// As [`Fences::record`]; the stream is still known then.
    pub fn retire(&self, stream: Stream) -> Result<()> {
        for id in [captured_id(stream), self.id_of(stream)?] {
            let Some(slot) = self.find(id) else { continue };
            self.cover_stamps(stream, slot)?;
            let entry = self.entry(slot);
            self.change_capture(entry, false);
            entry.id.store(RETIRED, Release);
        }
        Ok(())
    }

    pub(super) fn find_or_insert(&self, id: NonZeroU64) -> Result<StreamSlot> {
        match self.find(id) {
            Some(slot) => Ok(slot),
            None => self.insert(id),
        }
    }

    /// The stream's id plus one: 0 and the largest number mean something else in a slot.
    #[inline]
    fn id_of(&self, stream: Stream) -> Result<NonZeroU64> {
        match NonZeroU64::new(self.default_id.load(Relaxed)).filter(|_| stream.is_default()) {
            Some(id) => Ok(id),
            None => self.ask_id(stream),
        }
    }

    #[inline]
    fn ask_id(&self, stream: Stream) -> Result<NonZeroU64> {
        let id = self.driver.stream_get_id(stream)?.wrapping_add(1);
        let id = NonZeroU64::new(id).filter(|id| id.get() < CAPTURED).ok_or_else(|| {
            Error::new(ErrorCode::Internal, format!("{stream:?} has the id {id:#x} less one"))
        })?;
        if stream.is_default() {
            // The only one of its context, which is the runtime's.
            self.default_id.store(id.get(), Relaxed);
        }
        Ok(id)
    }

    /// Slots are an open-addressed table by stream id: the hit path finds one without a lock.
    #[inline]
    pub(super) fn find(&self, id: NonZeroU64) -> Option<StreamSlot> {
        for index in probe(id) {
            match self.slots[index].id.load(Acquire) {
                found if found == id.get() => return Some(StreamSlot { index: index as u16, id }),
                FREE => return None,
                _ => {}
            }
        }
        None
    }

    fn insert(&self, id: NonZeroU64) -> Result<StreamSlot> {
        let _one_at_a_time = self.insert.lock();
        if let Some(slot) = self.find(id) {
            return Ok(slot);
        }
        for take_idle in [false, true] {
            for index in probe(id) {
                let slot = &self.slots[index];
                let mut ring = slot.ring.lock();
                let is_had = !matches!(slot.id.load(Acquire), FREE | RETIRED);
                if (take_idle || !is_had) && self.vacate(slot, &mut ring)? {
                    slot.id.store(id.get(), Release);
                    return Ok(StreamSlot { index: index as u16, id });
                }
            }
        }
        let text = format!(
            "{SLOT_COUNT} streams have used pages and are not known to be done; retire streams \
             before they are destroyed"
        );
        Err(Error::new(ErrorCode::Unsupported, text))
    }

    /// Takes the slot from the stream that had it, when every use of it is known to have passed,
    /// and forgets what that stream waited for. Returns whether it did; nobody finds the slot then.
    fn vacate(&self, slot: &Slot, ring: &mut Ring) -> Result<bool> {
        let before = slot.id.load(Acquire);
        if slot.holds.load(Relaxed) > 0 || !self.is_idle(slot, ring)? {
            return Ok(false);
        }
        slot.id.store(RETIRED, Release);
        // A use may have been stamped, and confirmed, since the look above. Both sides write
        // `stamped` between writing their own word and reading the other's: whoever comes second
        // there sees what the first one wrote. `holds` likewise, and first: who has held the slot
        // and let go of it has stamped before.
        if slot.holds.fetch_add(0, AcqRel) > 0
            || slot.stamped.fetch_add(0, AcqRel) > slot.passed.load(Acquire)
        {
            slot.id.store(before, Release);
            return Ok(false);
        }
        slot.recorded_at.store(self.ticks.now(), Relaxed);
        self.change_capture(slot, false);
        slot.waited.iter().for_each(|waited| waited.store(0, Release));
        Ok(true)
    }
}

/// Stands for a stream that is being captured: handles tell streams that are there apart.
fn captured_id(stream: Stream) -> NonZeroU64 {
    let handle = match stream {
        Stream::PER_THREAD => THREAD_MARK.with(|mark| std::ptr::from_ref(mark).addr()),
        stream => stream.0,
    };
    NonZeroU64::MIN | CAPTURED | (handle as u64) << 1
}

#[inline]
fn probe(id: NonZeroU64) -> impl Iterator<Item = usize> {
    let first = (id.get().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as usize;
    (0..SLOT_COUNT).map(move |step| (first + step) % SLOT_COUNT)
}
