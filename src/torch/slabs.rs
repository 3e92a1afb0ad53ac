//! Small blocks: slabs of slots of one size, found by a bitmap in a few instructions.
//!
//! A slab is a stretch of memory that is cut into slots of one size class; a set bit is a free
//! slot, and a word above them says which words have one, so the lowest free slot is two counts of
//! trailing zeros away. It remembers what was asked for in each slot. Knows no stream and no page;
//! a slab's *mark* is the largest that was given with a free.

/// What every size is a multiple of, in bytes.
pub(super) const GRAIN: u64 = 512;
/// Largest class, in bytes.
const CLASS_MAX: u64 = 32 << 10;
/// Classes of one grain each, before they grow by quarters.
const EVEN_CLASSES: usize = 8;
/// Size classes in all.
pub(super) const CLASS_COUNT: usize = EVEN_CLASSES + 3 * 4;
/// Slots of a slab at most.
const SLOT_MAX: usize = 4096;
/// Bytes of a slab at most.
pub(super) const SLAB_MAX: u64 = SLOT_MAX as u64 * GRAIN;

/// Bytes of a slot of a class.
pub(super) fn class_bytes(class: usize) -> u64 {
    match class.checked_sub(EVEN_CLASSES) {
        None => (class as u64 + 1) * GRAIN,
        Some(beyond) => {
            let base = (EVEN_CLASSES as u64 * GRAIN) << (beyond / 4);
            base + base / 4 * (beyond as u64 % 4 + 1)
        }
    }
}

/// The class of a size, in bytes; `None` for one that no class holds.
#[inline]
pub(super) fn class_of(bytes: u64) -> Option<usize> {
    debug_assert!(bytes > 0);
    if bytes > CLASS_MAX {
        return None;
    }
    let grains = bytes.div_ceil(GRAIN);
    if grains <= EVEN_CLASSES as u64 {
        return Some(grains as usize - 1);
    }
    // 9..=16 grains in four classes, 17..=32 in four, 33..=64 in four.
    let octave = (grains - 1).ilog2() - 3;
    let quarter = (grains - 1) >> (octave + 1) & 3;
    Some(EVEN_CLASSES + octave as usize * 4 + quarter as usize)
}

/// Largest size that slabs of so many bytes serve.
pub(super) fn class_max(slab_bytes: u64) -> u64 {
    CLASS_MAX.min(slab_bytes / 2)
}

/// One slab.
pub(super) struct Slab {
    pub(super) base: u64,
    pub(super) class: u8,
    /// Index of the heap that it belongs to.
    pub(super) heap: u32,
    bytes: u32,
    slot_bytes: u32,
    slot_count: u16,
    pub(super) used: u16,
    /// See the module's text.
    pub(super) mark: u64,
    /// Words of `free` that have a set bit.
    summary: u64,
    free: [u64; SLOT_MAX / 64],
    requested: Box<[u32]>,
}

impl Slab {
    /// A slab of `bytes` bytes at `base` with all slots free.
    pub(super) fn new(base: u64, bytes: u64, class: usize, heap: u32, mark: u64) -> Self {
        let slot_bytes = class_bytes(class);
        let slot_count = (bytes / slot_bytes).min(SLOT_MAX as u64) as usize;
        let mut free = [0; SLOT_MAX / 64];
        let mut summary = 0;
        for (word, bits) in free.iter_mut().enumerate() {
            let left = slot_count.saturating_sub(word * 64).min(64);
            *bits = if left == 64 { u64::MAX } else { (1 << left) - 1 };
            summary |= u64::from(left > 0) << word;
        }
        Self {
            base,
            class: class as u8,
            heap,
            bytes: bytes as u32,
            slot_bytes: slot_bytes as u32,
            slot_count: slot_count as u16,
            used: 0,
            mark,
            summary,
            free,
            requested: vec![0; slot_count].into_boxed_slice(),
        }
    }

    /// Bytes of the slab.
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.bytes)
    }

    /// Bytes of a slot.
    pub(super) fn slot_bytes(&self) -> u64 {
        u64::from(self.slot_bytes)
    }

    /// Whether the last free made the first free slot.
    #[inline(always)]
    pub(super) fn left_full(&self) -> bool {
        self.used + 1 == self.slot_count
    }

    pub(super) fn is_full(&self) -> bool {
        self.used == self.slot_count
    }

    /// Takes the lowest free slot for a request; its address.
    #[inline(always)]
    pub(super) fn take(&mut self, requested: u64) -> Option<u64> {
        if self.summary == 0 {
            return None;
        }
        let word = self.summary.trailing_zeros() as usize;
        let bit = self.free[word].trailing_zeros() as usize;
        self.free[word] &= self.free[word] - 1;
        if self.free[word] == 0 {
            self.summary &= !(1 << word);
        }
        self.used += 1;
        let slot = word * 64 + bit;
        self.requested[slot] = requested as u32;
        Some(self.base + slot as u64 * self.slot_bytes())
    }

    /// Gives a slot back. Returns what was asked for in it; `None` when no live slot starts there.
    #[inline(always)]
    pub(super) fn give(&mut self, address: u64, mark: u64) -> Option<u64> {
        let slot = self.live_slot(address)?;
        self.free[slot / 64] |= 1 << (slot % 64);
        self.summary |= 1 << (slot / 64);
        self.used -= 1;
        self.mark = self.mark.max(mark);
        Some(u64::from(self.requested[slot]))
    }

    /// What was asked for in the live slot that starts at an address.
    pub(super) fn requested(&self, address: u64) -> Option<u64> {
        Some(u64::from(self.requested[self.live_slot(address)?]))
    }

    /// First address of the slot that an address lies in, if it is live.
    pub(super) fn slot_start(&self, address: u64) -> Option<u64> {
        let within = (address - self.base) / self.slot_bytes() * self.slot_bytes();
        self.live_slot(self.base + within).map(|_| self.base + within)
    }

    /// First addresses of the live slots.
    pub(super) fn live(&self) -> impl Iterator<Item = u64> {
        let slots = 0..usize::from(self.slot_count);
        let live = slots.filter(|slot| self.free[slot / 64] & 1 << (slot % 64) == 0);
        live.map(|slot| self.base + slot as u64 * self.slot_bytes())
    }

    #[inline(always)]
    fn live_slot(&self, address: u64) -> Option<usize> {
        let within = (address - self.base) as u32;
        let slot = (within / self.slot_bytes) as usize;
        let starts = slot as u32 * self.slot_bytes == within;
        let live = starts && slot < usize::from(self.slot_count);
        (live && self.free[slot / 64] & 1 << (slot % 64) == 0).then_some(slot)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_size_has_the_smallest_class_that_holds_it() {
        let sizes: Vec<u64> = (0..CLASS_COUNT).map(class_bytes).collect();
        assert!(sizes.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(sizes.iter().all(|bytes| bytes.is_multiple_of(GRAIN)));
        assert_eq!(sizes.last(), Some(&CLASS_MAX));
        for bytes in 1..=CLASS_MAX {
            let smallest = sizes.iter().position(|size| *size >= bytes);
            assert_eq!(class_of(bytes), smallest, "{bytes} bytes");
        }
        assert_eq!(class_of(CLASS_MAX + 1), None);
    }

    #[test]
    fn a_slot_is_given_back_once() {
        let mut slab = Slab::new(1 << 21, 2 << 20, 1, 0, 7);
        let one = slab.take(600).unwrap();
        assert_eq!((one, slab.requested(one)), (1 << 21, Some(600)));
        assert_eq!(slab.slot_start(one + 1023), Some(one));
        assert_eq!(slab.give(one + 512, 9), None);
        assert_eq!(slab.give(one, 9), Some(600));
        assert_eq!(slab.give(one, 11), None);
        assert_eq!((slab.mark, slab.used), (9, 0));
    }

    proptest! {
        #[test]
        fn slots_are_as_a_set_has_them(
            class in 0..CLASS_COUNT,
            steps in prop::collection::vec((any::<bool>(), any::<u16>()), 1..600),
        ) {
            let bytes = 64 << 10;
            let mut slab = Slab::new(0, bytes, class, 0, 0);
            let size = class_bytes(class);
            let mut live: BTreeMap<u64, u64> = BTreeMap::new();
            for (takes, pick) in steps {
                if takes {
                    let lowest = (0..bytes / size).map(|slot| slot * size);
                    let lowest = lowest.into_iter().find(|slot| !live.contains_key(slot));
                    let requested = u64::from(pick) % size + 1;
                    prop_assert_eq!(slab.take(requested), lowest);
                    live.extend(lowest.map(|slot| (slot, requested)));
                } else {
                    let address = u64::from(pick) * 512 % bytes;
                    prop_assert_eq!(slab.give(address, 0), live.remove(&address));
                }
                prop_assert_eq!(usize::from(slab.used), live.len());
                prop_assert_eq!(slab.is_full(), live.len() as u64 == bytes / size);
            }
            prop_assert!(slab.live().eq(live.keys().copied()));
        }
    }
}
