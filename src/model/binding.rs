//! Which bytes of which file belong to which addresses of a VBAR.
//!
//! Pure: numbers in, numbers out. Owns the [`Binding`], whose invariant is that its segments are
//! sorted and do not overlap, and the rule by which a model is laid out ([`lay_out`]). Positions
//! in a VBAR are bytes from its start; files are named by their index in a list that others keep.
//! Nothing here reads a file or checks that it is as long as a segment says.

use std::ops::Range;

use crate::error::{Error, ErrorCode, Result};
use crate::names::quoted;
use crate::units::{PageSize, align_up};

mod layout;

pub use layout::{SKIPPED_PERCENT_MAX, lay_out};

/// Every tensor starts at a multiple of this many bytes: what kernels that load whole vectors, and
/// PyTorch's allocator, count on.
pub const TENSOR_ALIGNMENT: u64 = 512;

/// How the bytes of a segment are stored in the file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Encoding {
    /// As they are in memory.
    #[default]
    Raw,
}

/// A stretch of a VBAR and the stretch of a file that its bytes come from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Bytes from the start of the VBAR; never empty.
    pub target: Range<u64>,
    /// Index of the file.
    pub file: usize,
    /// First byte in the file. As many are stored as the target has: `Raw` is the only encoding.
    pub source_offset: u64,
    /// How they are stored.
    pub encoding: Encoding,
}

impl Segment {
    /// Length of the target in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.target.end - self.target.start
    }

    /// Whether `next` goes on, in the VBAR and in the file, where this one ends.
    fn continues_in(&self, next: &Self) -> bool {
        self.target.end == next.target.start
            && self.file == next.file
            && self.encoding == next.encoding
            && self.source_offset.checked_add(self.bytes()) == Some(next.source_offset)
    }

    /// The part of it in `range`, which it touches.
    fn clipped(&self, range: &Range<u64>) -> Self {
        let start = self.target.start.max(range.start);
        Self {
            target: start..self.target.end.min(range.end),
            source_offset: self.source_offset + (start - self.target.start),
            ..self.clone()
        }
    }
}

/// Where the bytes of a VBAR come from: segments by rising target, none overlapping. Addresses
/// between them have no bytes of their own.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Binding {
    segments: Vec<Segment>,
}

impl Binding {
    /// A binding of nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Binds `target` to the `source_bytes` bytes at `source_offset` of a file, stored raw. Any
    /// alignment will do. An empty target binds nothing.
    ///
    /// # Errors
    /// `InvalidArgument`: the target ends before it starts, is not as long as the source, the
    /// source ends past 2^64, or the target overlaps one that is bound already. The binding is
    /// then as it was.
    pub fn bind(
        &mut self,
        target: Range<u64>,
        file: usize,
        source_offset: u64,
        source_bytes: u64,
    ) -> Result<()> {
        let refuse = |text: String| {
            let text = format!("range {:#x}..{:#x}: {text}", target.start, target.end);
            Err(Error::new(ErrorCode::InvalidArgument, text))
        };
        let Some(target_bytes) = target.end.checked_sub(target.start) else {
            return refuse("ends before it starts".to_owned());
        };
        if target_bytes != source_bytes {
            return refuse(format!("{target_bytes} bytes bound to {source_bytes} of a file"));
        }
        if source_offset.checked_add(source_bytes).is_none() {
            return refuse(format!("{source_bytes} bytes at {source_offset} end past 2^64"));
        }
        let position = self.first_ending_after(target.start);
        if let Some(other) = self.segments.get(position)
            && other.target.start < target.end
            && target_bytes > 0
        {
            let other = &other.target;
            return refuse(format!("overlaps the bound {:#x}..{:#x}", other.start, other.end));
        }
        if target_bytes > 0 {
            let segment = Segment { target, file, source_offset, encoding: Encoding::Raw };
            self.segments.insert(position, segment);
        }
        debug_assert!(self.is_valid());
        Ok(())
    }

    /// All segments, by rising target.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The parts of segments that lie in `range`, by rising target; found in O(log n + k).
    #[must_use]
    pub fn segments_of(&self, range: Range<u64>) -> Vec<Segment> {
        if range.is_empty() {
            return Vec::new();
        }
        let rest = &self.segments[self.first_ending_after(range.start)..];
        let touched = rest.iter().take_while(|segment| segment.target.start < range.end);
        touched.map(|segment| segment.clipped(&range)).collect()
    }

    /// Bytes that are bound.
    #[must_use]
    pub fn bound_bytes(&self) -> u64 {
        self.segments.iter().map(Segment::bytes).sum()
    }

    /// End of the last bound byte, from the start of the VBAR; 0 when nothing is bound.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.segments.last().map_or(0, |segment| segment.target.end)
    }

    /// Whether the invariant holds.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let each = self.segments.iter().all(|segment| {
            !segment.target.is_empty()
                && segment.source_offset.checked_add(segment.bytes()).is_some()
        });
        each && self.segments.windows(2).all(|pair| pair[0].target.end <= pair[1].target.start)
    }

    /// Index of the first segment with a byte at or after `position`.
    fn first_ending_after(&self, position: u64) -> usize {
        self.segments.partition_point(|segment| segment.target.end <= position)
    }

    /// Puts a segment behind all others; joins it to the last one where both go on, so that one
    /// read and one copy do for neighbours.
    fn append(&mut self, segment: Segment) {
        debug_assert!(self.end() <= segment.target.start && !segment.target.is_empty());
        match self.segments.last_mut() {
            Some(last) if last.continues_in(&segment) => last.target.end = segment.target.end,
            _ => self.segments.push(segment),
        }
    }
}

/// A tensor to be laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayoutItem<'a> {
    /// What errors call it.
    pub name: &'a str,
    /// Its length.
    pub bytes: u64,
    /// Index of its file.
    pub file: usize,
    /// Its first byte in the file.
    pub source_offset: u64,
    /// A power of two; [`TENSOR_ALIGNMENT`] is the least that is used.
    pub alignment: u64,
}

/// A model in a VBAR.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Where each item lies, in the order they were given. An item of no bytes has an empty range.
    pub places: Vec<Range<u64>>,
    /// The same places with their sources, neighbours joined.
    pub binding: Binding,
    /// End of the last place, from the start of the VBAR.
    pub end: u64,
    /// Bytes left out so that tensors straddle fewer pages (not those of alignment).
    pub skipped_bytes: u64,
}

#[cfg(test)]
mod tests;
