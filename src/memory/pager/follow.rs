//! Who follows the uses of bound VBARs: told of faults and unpins while VBARs exceed the budget.
//!
//! An engine that learns the order of faults registers itself here. It is called on the program's
//! threads, with no lock held, after the pager is done with the fault or the unpin; it takes a note
//! and returns. While everything fits nobody is told, so that a hit costs no more.

use std::ops::Range;
use std::sync::{Arc, Weak};

use super::{Hold, Pager, Request};
use crate::memory::vbar::Bar;
use crate::model::schedule::{BarId, Span, join};
use crate::sync::device::Device;
use crate::units::Stream;

/// One who follows uses.
pub trait Follow: Send + Sync {
    /// A fault for work on `stream` has made these spans resident, all of them together.
    fn faulted(&self, device: &Device, spans: &[Span], stream: Stream);
    /// The pins of these spans were given back, all of them together, by a caller that names
    /// `stream`, which is good during the call; `Stream::NONE` where it names none.
    fn unpinned(&self, device: &Device, spans: &[Span], stream: Stream);
    /// The VBAR of this number was closed.
    fn closed(&self, bar: u32);
    /// The program had memory of VBARs given back: what it uses from here on may be another amount.
    /// Caches that go back say nothing: programs empty them between any two steps.
    fn gave_back(&self);
}

impl Pager {
    /// Registers who follows uses, once; it is not kept alive. Returns whether it was the first.
    pub fn set_follower(&self, follower: &Arc<dyn Follow>) -> bool {
        self.follower.set(Arc::downgrade(follower)).is_ok()
    }

    /// Whether uses of the VBAR are to be told.
    #[inline(always)]
    pub(super) fn is_followed(&self, bar: &Bar) -> bool {
        self.device.fences.is_eager() && bar.has_filled()
    }

    #[cold]
    pub(super) fn tell_fault(&self, requests: &[Request<'_>], stream: Stream) {
        let Some(follower) = self.follower() else { return };
        let spans = self.followed(requests.iter().map(|request| (request.bar, &request.pages)));
        if !spans.is_empty() {
            follower.faulted(&self.device, &spans, stream);
        }
    }

    #[cold]
    pub(super) fn tell_unpins(&self, pins: &[(&Arc<Bar>, &Hold)], stream: Stream) {
        let Some(follower) = self.follower() else { return };
        let spans = self.followed(pins.iter().map(|(bar, hold)| (*bar, &hold.pages)));
        if !spans.is_empty() {
            follower.unpinned(&self.device, &spans, stream);
        }
    }

    /// What of some ranges is to be told: joined, so that pages which many of them share are told
    /// once, at the end of their use as at its beginning.
    fn followed<'a>(
        &self,
        ranges: impl Iterator<Item = (&'a Arc<Bar>, &'a Range<u32>)>,
    ) -> Vec<Span> {
        let mut joined = Vec::new();
        for (bar, pages) in ranges.filter(|(bar, _)| self.is_followed(bar)) {
            join(Span::new(BarId(bar.id), pages.clone()), &mut joined);
        }
        joined
    }

    /// The VBAR was closed; told whether it was followed or not.
    pub(super) fn tell_closed(&self, bar: &Bar) {
        if (bar.bound().is_some() || bar.saves().is_some())
            && let Some(follower) = self.follower()
        {
            follower.closed(bar.id);
        }
    }

    /// The program has asked for memory of VBARs to be given back.
    pub(super) fn tell_gave_back(&self) {
        if let Some(follower) = self.follower() {
            follower.gave_back();
        }
    }

    fn follower(&self) -> Option<Arc<dyn Follow>> {
        self.follower.get().and_then(Weak::upgrade)
    }
}
