//! Free memory: best fit, cut at the front, joined with its neighbours.
//!
//! A list of free pieces in order of address, none of which touches another, in chunks of at most
//! 64, and where those of a size are (`sizes`). The smallest that is large enough is cut, the
//! lowest of those: programs ask for the same few sizes again and again, and find again what they
//! freed.
//! Each piece carries a *mark*, a number that grows with the uses of its memory; where pieces are
//! joined the larger mark holds. Numbers in, numbers out: knows no page, no stream, and no unit.

use std::ops::Range;

use super::sizes::Sizes;

/// Pieces of a chunk at most.
const CHUNK_MAX: usize = 64;

/// A free piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Piece {
    pub(super) start: u64,
    pub(super) bytes: u64,
    /// See the module's text.
    pub(super) mark: u64,
}

impl Piece {
    pub(super) fn end(&self) -> u64 {
        self.start + self.bytes
    }
}

struct Chunk {
    /// At least one, by address.
    pieces: Vec<Piece>,
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Extents {
    chunks: Vec<Chunk>,
    sizes: Sizes,
    bytes: u64,
    /// The place of the last chunk that became empty: a list of one piece comes and goes without
    /// the host's allocator.
    spare: Vec<Piece>,
}

/// Where a piece is.
type Place = (usize, usize);

impl Extents {
    /// Bytes of all pieces.
    #[cfg(test)]
    fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// The pieces in order of address.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Piece> {
        self.chunks.iter().flat_map(|chunk| &chunk.pieces)
    }

    /// Adds a piece that overlaps none, and joins it with those that it touches.
    pub(super) fn insert(&mut self, piece: Piece) {
        let Piece { mut start, mut bytes, mut mark } = piece;
        if bytes == 0 {
            return;
        }
        self.bytes += bytes;
        let after = self.first_from(start);
        let before = self.before(after);
        if let Some(place) = before
            && self.at(place).end() == start
        {
            let joined = *self.at(place);
            mark = mark.max(joined.mark);
            if let Some(place) = after
                && self.at(place).start == start + bytes
            {
                let last = self.remove(place);
                self.bytes += last.bytes;
                bytes += last.bytes;
                mark = mark.max(last.mark);
            }
            // Its place has not moved: what was removed came after it.
            start = joined.start;
            self.set(place, Piece { start, bytes: joined.bytes + bytes, mark });
            return;
        }
        if let Some(place) = after
            && self.at(place).start == start + bytes
        {
            let joined = *self.at(place);
            bytes += joined.bytes;
            self.set(place, Piece { start, bytes, mark: mark.max(joined.mark) });
            return;
        }
        self.add(before, Piece { start, bytes, mark });
    }

    /// Takes `bytes` from the front of the smallest piece that has so many, the lowest of those.
    /// Returns where they start, and their mark.
    pub(super) fn take_best(&mut self, bytes: u64) -> Option<(u64, u64)> {
        let place = self.first_from(self.sizes.best(bytes)?)?;
        let Piece { start, bytes: all, mark } = *self.at(place);
        if all == bytes {
            self.remove(place);
        } else {
            self.set(place, Piece { start: start + bytes, bytes: all - bytes, mark });
        }
        self.bytes -= if all == bytes { 0 } else { bytes };
        Some((start, mark))
    }

    /// Takes the lowest `bytes` that start at a multiple of `alignment`, a power of two.
    pub(super) fn take_aligned(&mut self, bytes: u64, alignment: u64) -> Option<Piece> {
        let fits = |piece: &Piece| {
            let start = piece.start.next_multiple_of(alignment);
            (start + bytes <= piece.end()).then_some(start)
        };
        if self.sizes.largest() < bytes {
            return None;
        }
        let start = self.iter().find_map(fits)?;
        self.take_range(start..start + bytes).pop()
    }

    /// Takes what is free of a range, cut at its ends.
    pub(super) fn take_range(&mut self, range: Range<u64>) -> Vec<Piece> {
        let mut taken = Vec::new();
        loop {
            let first = self.first_from(range.start);
            let place = match self.before(first) {
                Some(place) if self.at(place).end() > range.start => place,
                _ => match first {
                    Some(place) if self.at(place).start < range.end => place,
                    _ => return taken,
                },
            };
            let piece = self.remove(place);
            let cut = piece.start.max(range.start)..piece.end().min(range.end);
            let mark = piece.mark;
            taken.push(Piece { start: cut.start, bytes: cut.end - cut.start, mark });
            for rest in [piece.start..cut.start, cut.end..piece.end()] {
                if !rest.is_empty() {
                    let bytes = rest.end - rest.start;
                    self.insert(Piece { start: rest.start, bytes, mark });
                }
            }
            if cut.end == range.end {
                return taken;
            }
        }
    }

    /// Takes the pieces whose marks are passed.
    pub(super) fn take_passed(&mut self, passed: impl Fn(u64) -> bool) -> Vec<Piece> {
        let mut taken = Vec::new();
        for chunk in &mut self.chunks {
            chunk.pieces.retain(|piece| {
                let goes = passed(piece.mark);
                if goes {
                    self.sizes.remove(piece.bytes, piece.start);
                    taken.push(*piece);
                }
                !goes
            });
        }
        self.chunks.retain(|chunk| !chunk.pieces.is_empty());
        self.bytes -= taken.iter().map(|piece| piece.bytes).sum::<u64>();
        taken
    }

    /// The piece that an address lies in.
    pub(super) fn piece_at(&self, address: u64) -> Option<Piece> {
        let piece = *self.at(self.before(self.first_from(address + 1))?);
        (piece.end() > address).then_some(piece)
    }

    /// The pieces that touch a range.
    pub(super) fn overlapping(&self, range: Range<u64>) -> impl Iterator<Item = Piece> {
        let first = self.first_from(range.start + 1);
        let from = self.before(first).filter(|place| self.at(*place).end() > range.start).or(first);
        let (chunk, skipped) = from.unwrap_or((self.chunks.len(), 0));
        let pieces = self.chunks[chunk..].iter().flat_map(|chunk| &chunk.pieces).skip(skipped);
        pieces.copied().take_while(move |piece| piece.start < range.end)
    }

    /// The first piece that starts at or after an address.
    fn first_from(&self, address: u64) -> Option<Place> {
        let starts_before = |chunk: &Chunk| chunk.pieces[0].start < address;
        let chunk = self.chunks.partition_point(starts_before);
        if let Some(chunk) = chunk.checked_sub(1) {
            let pieces = &self.chunks[chunk].pieces;
            let piece = pieces.partition_point(|piece| piece.start < address);
            if piece < pieces.len() {
                return Some((chunk, piece));
            }
        }
        (chunk < self.chunks.len()).then_some((chunk, 0))
    }

    /// The piece before a place, or the last one.
    fn before(&self, place: Option<Place>) -> Option<Place> {
        match place {
            Some((chunk, 0)) => {
                let chunk = chunk.checked_sub(1)?;
                Some((chunk, self.chunks[chunk].pieces.len() - 1))
            }
            Some((chunk, piece)) => Some((chunk, piece - 1)),
            None => {
                let chunk = self.chunks.len().checked_sub(1)?;
                Some((chunk, self.chunks[chunk].pieces.len() - 1))
            }
        }
    }

    fn at(&self, (chunk, piece): Place) -> &Piece {
        &self.chunks[chunk].pieces[piece]
    }

    fn set(&mut self, (chunk, piece): Place, value: Piece) {
        let old = std::mem::replace(&mut self.chunks[chunk].pieces[piece], value);
        self.sizes.change((old.bytes, old.start), (value.bytes, value.start));
    }

    fn remove(&mut self, (at, piece): Place) -> Piece {
        let chunk = &mut self.chunks[at];
        let removed = chunk.pieces.remove(piece);
        self.bytes -= removed.bytes;
        self.sizes.remove(removed.bytes, removed.start);
        if chunk.pieces.is_empty() {
            self.spare = self.chunks.remove(at).pieces;
        }
        removed
    }

    /// Adds a piece behind another, or as the first.
    fn add(&mut self, before: Option<Place>, piece: Piece) {
        if self.chunks.is_empty() {
            let mut pieces = std::mem::take(&mut self.spare);
            pieces.reserve(CHUNK_MAX);
            self.chunks.push(Chunk { pieces });
        }
        self.sizes.insert(piece.bytes, piece.start);
        let (at, place) = before.map_or((0, 0), |(chunk, piece)| (chunk, piece + 1));
        let chunk = &mut self.chunks[at];
        chunk.pieces.insert(place, piece);
        if chunk.pieces.len() == CHUNK_MAX {
            let mut upper = Vec::with_capacity(CHUNK_MAX);
            upper.extend(chunk.pieces.drain(CHUNK_MAX / 2..));
            self.chunks.insert(at + 1, Chunk { pieces: upper });
        }
    }

    /// Checks the invariants; for tests and debug builds.
    #[cfg(test)]
    fn is_valid(&self) -> bool {
        let pieces: Vec<_> = self.iter().collect();
        pieces.windows(2).all(|pair| pair[0].end() < pair[1].start)
            && pieces.iter().map(|piece| piece.bytes).sum::<u64>() == self.bytes
            && self.chunks.iter().all(|chunk| (1..CHUNK_MAX).contains(&chunk.pieces.len()))
            && pieces.iter().map(|piece| piece.bytes).max().unwrap_or(0) == self.sizes.largest()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn piece(start: u64, bytes: u64, mark: u64) -> Piece {
        Piece { start, bytes, mark }
    }

    fn pieces(extents: &Extents) -> Vec<(u64, u64, u64)> {
        extents.iter().map(|piece| (piece.start, piece.bytes, piece.mark)).collect()
    }

    #[test]
    fn pieces_that_touch_are_one_with_the_larger_mark() {
        let mut extents = Extents::default();
        extents.insert(piece(0, 4, 1));
        extents.insert(piece(8, 4, 2));
        assert_eq!(pieces(&extents), [(0, 4, 1), (8, 4, 2)]);
        extents.insert(piece(4, 4, 0));
        assert_eq!((pieces(&extents), extents.bytes()), (vec![(0, 12, 2)], 12));
    }

    #[test]
    fn the_smallest_that_fits_is_cut_at_its_front() {
        let mut extents = Extents::default();
        for (start, bytes) in [(0, 2), (10, 9), (20, 5), (30, 5)] {
            extents.insert(piece(start, bytes, start));
        }
        assert_eq!(extents.take_best(4), Some((20, 20)));
        assert_eq!(extents.take_best(6), Some((10, 10)));
        assert_eq!(extents.take_best(6), None);
        assert_eq!(pieces(&extents), [(0, 2, 0), (16, 3, 10), (24, 1, 20), (30, 5, 30)]);
    }

    #[test]
    fn a_range_is_taken_out_of_the_middle() {
        let mut extents = Extents::default();
        extents.insert(piece(0, 10, 3));
        extents.insert(piece(12, 10, 4));
        assert_eq!(extents.take_range(4..16), [piece(4, 6, 3), piece(12, 4, 4)]);
        assert_eq!(pieces(&extents), [(0, 4, 3), (16, 6, 4)]);
        assert_eq!(extents.take_aligned(4, 4), Some(piece(0, 4, 3)));
        assert_eq!(extents.take_aligned(4, 4), Some(piece(16, 4, 4)));
        assert_eq!(extents.take_aligned(4, 4), None);
        extents.insert(piece(31, 6, 5));
        assert_eq!(extents.take_aligned(6, 2), None);
        assert_eq!(extents.take_aligned(5, 2), Some(piece(32, 5, 5)));
        assert_eq!(pieces(&extents), [(20, 2, 4), (31, 1, 5)]);
    }

    /// Every unit of memory by itself: free with a mark, or not.
    #[derive(Default)]
    struct Naive(BTreeSet<u64>);

    impl Naive {
        fn runs(&self) -> Vec<(u64, u64)> {
            let mut runs: Vec<(u64, u64)> = Vec::new();
            for unit in &self.0 {
                match runs.last_mut() {
                    Some((start, bytes)) if *start + *bytes == *unit => *bytes += 1,
                    _ => runs.push((*unit, 1)),
                }
            }
            runs
        }

        fn take(&mut self, bytes: u64) -> Option<u64> {
            let fits = self.runs().into_iter().filter(|(_, all)| *all >= bytes);
            let (start, _) = fits.min_by_key(|(start, all)| (*all, *start))?;
            self.0.retain(|unit| !(start..start + bytes).contains(unit));
            Some(start)
        }
    }

    proptest! {
        #[test]
        fn does_as_the_naive_list_does(steps in prop::collection::vec((0u8..8, 1u64..9), 1..400)) {
            let (mut extents, mut naive) = (Extents::default(), Naive::default());
            let all = 2048;
            extents.insert(piece(0, all, 0));
            naive.0.extend(0..all);
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (what, bytes) in steps {
                match what {
                    0..=4 => {
                        let taken = extents.take_best(bytes).map(|(start, _)| start);
                        prop_assert_eq!(taken, naive.take(bytes));
                        live.extend(taken.map(|start| (start, bytes)));
                    }
                    5..=6 if !live.is_empty() => {
                        let (start, bytes) = live.swap_remove((bytes as usize * 7) % live.len());
                        extents.insert(piece(start, bytes, 0));
                        naive.0.extend(start..start + bytes);
                    }
                    _ => {
                        let range = bytes * 8..bytes * 8 + 20;
                        let taken = extents.take_range(range.clone());
                        for piece in taken {
                            for unit in piece.start..piece.end() {
                                prop_assert!(range.contains(&unit));
                                prop_assert!(naive.0.remove(&unit));
                            }
                            live.push((piece.start, piece.bytes));
                        }
                        prop_assert!(range.into_iter().all(|unit| !naive.0.contains(&unit)));
                    }
                }
                prop_assert!(extents.is_valid());
                let runs: Vec<_> = extents.iter().map(|p| (p.start, p.bytes)).collect();
                prop_assert_eq!(runs, naive.runs());
            }
        }
    }

    #[test]
    fn many_pieces_are_found_by_address() {
        let mut extents = Extents::default();
        let places: Vec<u64> = (0..1000).map(|i| (i * 617) % 1000).collect();
        for place in &places {
            extents.insert(piece(place * 4, 2, *place));
            assert!(extents.is_valid());
        }
        for place in 0..1000 {
            assert_eq!(extents.piece_at(place * 4 + 1), Some(piece(place * 4, 2, place)));
            assert_eq!(extents.piece_at(place * 4 + 2), None);
        }
        assert_eq!(extents.take_passed(|mark| mark % 2 == 0).len(), 500);
        assert!(extents.is_valid());
        assert_eq!(extents.bytes(), 1000);
        let marks = |range| extents.overlapping(range).map(|piece| piece.mark).collect::<Vec<_>>();
        assert!(marks(0..4).is_empty());
        assert_eq!(marks(5..14), [1, 3]);
        assert_eq!(marks(3997..9999), [999]);
    }
}
