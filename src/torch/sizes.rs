//! Where the pieces of a size are: the smallest that is large enough, and of those the lowest.
//!
//! A few pieces are a list that is looked through. More are in bins of similar sizes, sixteen to a
//! doubling, each in order of size and address; a bit a bin says which have any. Numbers in,
//! numbers out: knows no unit.

/// Bins to a doubling, as a power of two.
const FINE: u32 = 4;
/// Bins in all: sizes below `1 << FINE` have one each.
const BIN_COUNT: usize = (64 - FINE as usize + 1) << FINE;
/// More pieces than this go to bins.
const FEW_MAX: usize = 16;
/// Fewer than this come back.
const MANY_MIN: usize = 6;

/// A piece's size and its first address.
type Entry = (u64, u64);

/// See the module's text.
#[derive(Default)]
pub(super) struct Sizes {
    /// All pieces in no order, while there are few.
    few: Vec<Entry>,
    /// Pieces in the bins; 0 while there are few.
    many: usize,
    /// Bins that have a piece.
    used: [u64; BIN_COUNT.div_ceil(64)],
    /// As many bins as were ever needed.
    bins: Vec<Vec<Entry>>,
}

/// The bin of a size.
#[inline(always)]
fn bin_of(bytes: u64) -> usize {
    let Some(shift) = (63 - (bytes | 1).leading_zeros()).checked_sub(FINE) else {
        return bytes as usize;
    };
    // The leading bit counts as one step of `shift`.
    ((shift as usize) << FINE) + (bytes >> shift) as usize
}

impl Sizes {
    #[inline]
    pub(super) fn insert(&mut self, bytes: u64, start: u64) {
        if self.many > 0 {
            return self.put((bytes, start));
        }
        self.few.push((bytes, start));
        if self.few.len() > FEW_MAX {
            self.spread();
        }
    }

    #[inline]
    pub(super) fn remove(&mut self, bytes: u64, start: u64) {
        if self.many == 0 {
            if let Some(at) = self.few.iter().position(|entry| *entry == (bytes, start)) {
                self.few.swap_remove(at);
            }
            return;
        }
        self.pull((bytes, start));
        if self.many < MANY_MIN {
            self.gather();
        }
    }

    /// A piece has become another: mostly one that is as good at its place.
    #[inline]
    pub(super) fn change(&mut self, from: Entry, into: Entry) {
        if self.many == 0 {
            if let Some(entry) = self.few.iter_mut().find(|entry| **entry == from) {
                *entry = into;
            }
            return;
        }
        let at = bin_of(from.0);
        if at == bin_of(into.0) {
            let bin = &mut self.bins[at];
            let place = bin.partition_point(|entry| *entry < from);
            let is_above = place.checked_sub(1).is_none_or(|before| bin[before] < into);
            if is_above && bin.get(place + 1).is_none_or(|after| into < *after) {
                debug_assert_eq!(bin[place], from);
                bin[place] = into;
                return;
            }
        }
        self.pull(from);
        self.put(into);
    }

    /// First address of the smallest piece of `bytes` or more, the lowest of those.
    #[inline]
    pub(super) fn best(&self, bytes: u64) -> Option<u64> {
        if self.many == 0 {
            let fits = self.few.iter().filter(|entry| entry.0 >= bytes);
            return fits.min().map(|(_, start)| *start);
        }
        let at = bin_of(bytes);
        let bin = self.bins.get(at)?;
        if let Some((_, start)) = bin.get(bin.partition_point(|entry| *entry < (bytes, 0))) {
            return Some(*start);
        }
        // Everything in a later bin is large enough.
        let (word, above) = ((at + 1) / 64, u64::MAX << ((at + 1) % 64));
        let words = self.used[word..].iter().enumerate();
        let mut words =
            words.map(|(i, used)| (word + i, if i == 0 { used & above } else { *used }));
        let (word, used) = words.find(|(_, used)| *used != 0)?;
        let (_, start) = self.bins[word * 64 + used.trailing_zeros() as usize].first()?;
        Some(*start)
    }

    /// Bytes of the largest piece, 0 where there is none.
    pub(super) fn largest(&self) -> u64 {
        if self.many == 0 {
            return self.few.iter().map(|(bytes, _)| *bytes).max().unwrap_or(0);
        }
        let Some(word) = self.used.iter().rposition(|used| *used != 0) else { return 0 };
        let bin = word * 64 + 63 - self.used[word].leading_zeros() as usize;
        self.bins[bin].last().map_or(0, |(bytes, _)| *bytes)
    }

    /// Into its bin.
    fn put(&mut self, entry: Entry) {
        let at = bin_of(entry.0);
        if at >= self.bins.len() {
            self.bins.resize_with(at + 1, Vec::new);
        }
        let bin = &mut self.bins[at];
        bin.insert(bin.partition_point(|other| *other < entry), entry);
        self.used[at / 64] |= 1 << (at % 64);
        self.many += 1;
    }

    /// Out of its bin.
    fn pull(&mut self, entry: Entry) {
        let at = bin_of(entry.0);
        let bin = &mut self.bins[at];
        let place = bin.partition_point(|other| *other < entry);
        debug_assert_eq!(bin.get(place), Some(&entry));
        bin.remove(place);
        if bin.is_empty() {
            self.used[at / 64] &= !(1 << (at % 64));
        }
        self.many -= 1;
    }

    #[cold]
    fn spread(&mut self) {
        let mut few = std::mem::take(&mut self.few);
        few.drain(..).for_each(|entry| self.put(entry));
        // Its place is kept for when they are few again.
        self.few = few;
    }

    #[cold]
    fn gather(&mut self) {
        for bin in &mut self.bins {
            self.few.append(bin);
        }
        (self.used, self.many) = (Default::default(), 0);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bins_are_in_the_order_of_sizes() {
        let near =
            (0..64).flat_map(|bit| [-1, 0, 1].map(|by| (1u64 << bit).saturating_add_signed(by)));
        let mut sizes: Vec<u64> = (0..5000).chain(near).chain([u64::MAX]).collect();
        sizes.sort_unstable();
        let bins: Vec<usize> = sizes.iter().map(|bytes| bin_of(*bytes)).collect();
        assert!(bins.is_sorted());
        assert_eq!(bins.last(), Some(&(BIN_COUNT - 1)));
        // A bin is an eighth of a doubling wide, or narrower.
        assert!((1..5000u64).all(|bytes| bin_of(bytes) < bin_of(bytes + bytes.div_ceil(8))));
    }

    proptest! {
        #[test]
        fn the_best_is_that_of_a_sorted_set(
            steps in prop::collection::vec((0u8..6, 0u32..40, 1u64..32, 0u64..1 << 40), 1..300),
        ) {
            let (mut sizes, mut set) = (Sizes::default(), BTreeSet::new());
            for (what, shift, bytes, start) in steps {
                let bytes = bytes << shift;
                match what {
                    0 => {
                        let best = set.range((bytes, 0)..).next().map(|(_, start)| *start);
                        prop_assert_eq!(sizes.best(bytes), best);
                    }
                    1..=2 if set.insert((bytes, start)) => sizes.insert(bytes, start),
                    3 if !set.is_empty() && set.insert((bytes, start)) => {
                        let other = set.range(..(bytes, start)).next_back();
                        let other = other.or(set.range((bytes, start + 1)..).next()).copied();
                        set.remove(&other.unwrap());
                        sizes.change(other.unwrap(), (bytes, start));
                    }
                    _ => {
                        let some = set.range((bytes, 0)..).next().copied();
                        if let Some((bytes, start)) = some {
                            set.remove(&(bytes, start));
                            sizes.remove(bytes, start);
                        }
                    }
                }
                prop_assert_eq!(sizes.largest(), set.last().map_or(0, |(bytes, _)| *bytes));
            }
        }
    }
}
