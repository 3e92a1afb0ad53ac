//! Pins of one range: what a fault gives out and an unpin takes back.
//!
//! Values only. Whoever has a hold owes its pins to [`super::Pager::unpin`].

use std::ops::Range;

use crate::error::{Error, ErrorCode};
use crate::sync::fence::StreamSlot;
use crate::units::{Generation, Stream};

/// Pins on the pages of one range, given back by [`super::Pager::unpin`].
#[derive(Debug)]
pub struct Hold {
    /// The pages.
    pub pages: Range<u32>,
    /// Their generations while pinned: the range's signature.
    pub generations: Generations,
    /// The stream that uses the pages, and its slot.
    pub stream: Stream,
    /// `None` for `Stream::NONE`.
    pub slot: Option<StreamSlot>,
    /// The pages are pinned to the graph that the stream captured into, too.
    pub(super) kept: bool,
}

/// A pinned page, before anybody has decided where its hold lives.
#[derive(Clone, Copy)]
pub struct Hit {
    pub(super) page: u32,
    /// Of the page.
    pub generation: Generation,
    pub(super) stream: Stream,
    pub(super) slot: Option<StreamSlot>,
}

impl Hit {
    /// The hold of the page's pin.
    #[inline(always)]
    #[must_use]
    pub fn into_hold(self) -> Hold {
        let Self { page, generation, stream, slot } = self;
        let (pages, generations) = (page..page + 1, Generations::One(generation));
        Hold { pages, generations, stream, slot, kept: false }
    }
}

/// Generations of the pages of a range. Of one page, the common case, without an allocation and in
/// few words: what a hit moves around is what it costs.
#[derive(Clone, Debug)]
pub enum Generations {
    /// Of exactly one page.
    One(Generation),
    /// Of any other number.
    Many(Vec<Generation>),
}

impl Generations {
    /// In order of the pages.
    #[must_use]
    pub fn as_slice(&self) -> &[Generation] {
        match self {
            Self::One(generation) => std::slice::from_ref(generation),
            Self::Many(generations) => generations,
        }
    }
}

#[cold]
pub(super) fn too_many_pins() -> Error {
    Error::new(
        ErrorCode::TooManyPins,
        "one has as many pins as can be counted (65535): give guards back",
    )
}
