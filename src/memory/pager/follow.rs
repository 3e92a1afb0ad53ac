//! Who follows the uses of bound VBARs: told of faults and unpins while VBARs exceed the budget.
//!
//! An engine that learns the order of faults registers itself here. It is called on the program's
//! threads, with no lock held, after the pager is done with the fault or the unpin; it takes a note
//! and returns. While everything fits nobody is told, so that a hit costs no more.

use std::ops::Range;
use std::sync::{Arc, Weak};

use super::{Pager, Request};
use crate::memory::vbar::Bar;
use crate::model::schedule::{BarId, Span};
use crate::sync::device::Device;
use crate::units::Stream;

/// One who follows uses.
pub trait Follow: Send + Sync {
    /// A fault for work on `stream` has made these spans resident, all of them together.
    fn faulted(&self, device: &Device, spans: &[Span], stream: Stream);
    /// The pins of a span were given back by a caller that names `stream`, which is good during the
    /// call; `Stream::NONE` where it names none.
    fn unpinned(&self, device: &Device, span: Span, stream: Stream);
    /// The VBAR of this number was closed.
    fn closed(&self, bar: u32);
}

impl Pager {
    /// Registers who follows uses, once; it is not kept alive. Returns whether it was the first.
    pub fn set_follower(&self, follower: &Arc<dyn Follow>) -> bool {
        self.follower.set(Arc::downgrade(follower)).is_ok()
    }

    /// Whether uses of the VBAR are to be told.
    #[inline(always)]
    pub(super) fn is_followed(&self, bar: &Bar) -> bool {
        self.device.fences.is_eager() && bar.bound().is_some()
    }

    #[cold]
    pub(super) fn tell_fault(&self, requests: &[Request<'_>], stream: Stream) {
        let Some(follower) = self.follower() else { return };
        let followed = requests.iter().filter(|request| self.is_followed(request.bar));
        let span = |request: &Request<'_>| span_of(request.bar, &request.pages);
        let spans: Vec<Span> =
            followed.filter(|request| !request.pages.is_empty()).map(span).collect();
        if !spans.is_empty() {
            follower.faulted(&self.device, &spans, stream);
        }
    }

    #[cold]
    pub(super) fn tell_unpin(&self, bar: &Bar, pages: &Range<u32>, stream: Stream) {
        if let Some(follower) = self.follower() {
            follower.unpinned(&self.device, span_of(bar, pages), stream);
        }
    }

    /// The VBAR was closed; told whether it was followed or not.
    pub(super) fn tell_closed(&self, bar: &Bar) {
        if bar.bound().is_some()
            && let Some(follower) = self.follower()
        {
            follower.closed(bar.id);
        }
    }

    fn follower(&self) -> Option<Arc<dyn Follow>> {
        self.follower.get().and_then(Weak::upgrade)
    }
}

fn span_of(bar: &Bar, pages: &Range<u32>) -> Span {
    Span::new(BarId(bar.id), pages.clone())
}
