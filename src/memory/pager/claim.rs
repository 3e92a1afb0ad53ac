//! What a plan is made of: claims, where their frames come from, and pins that protect.
//!
//! Values that `plan` and its like make under the lock and `act` carries out. A [`Protected`] gives
//! its pin back when it is dropped; everything else here owes its undoing to `act`.

use std::sync::Arc;

use crate::copy::fill::Keep;
use crate::host::bound::Bound;
use crate::memory::frames::FrameIndex;
use crate::memory::page_table::Page;
use crate::memory::vbar::Bar;
use crate::sync::ticket::Ticket;
use crate::units::{Generation, PageIndex};

/// A page to be given a frame.
pub(super) struct Claim {
    pub(super) bar: Arc<Bar>,
    pub(super) page: PageIndex,
    pub(super) take: Take,
    /// Work that may still use the frame: the new bytes come after it.
    pub(super) users: Vec<Ticket>,
    /// The page goes through a streaming frame.
    pub(super) streams: bool,
    /// Whose memory its frame is.
    pub(super) backing: Backing,
    /// Whether its bytes are worth a place in page-locked memory.
    pub(super) keep: Keep,
    /// What fills it, as it was when it was claimed; `None` where the program does.
    pub(super) fill: Option<Arc<Bound>>,
    pub(super) asker: Asker,
}

/// Who asked for a page.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Asker {
    /// A fault, which needs it together with others: protected until all are there.
    Fault,
    /// The engine, ahead of need. Nothing protects it: a program must not find pins of which it
    /// has none, nor a fault pages that it cannot have.
    Engine,
}

impl Claim {
    pub(super) fn entry(&self) -> &Page {
        self.bar.table.page(self.page)
    }
}

/// Whose memory a frame is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Backing {
    /// The device's.
    Device,
    /// The host's, read over the link.
    Host,
}

/// Where a claim's frame comes from.
pub(super) enum Take {
    /// From the free list.
    Free(FrameIndex),
    /// To be created.
    Create,
    /// From a page, which is Evicting from now on.
    Victim(Victim),
}

/// A page that loses its frame.
pub(super) struct Victim {
    pub(super) bar: Arc<Bar>,
    pub(super) page: PageIndex,
    pub(super) frame: FrameIndex,
}

/// Victims, each with what may still use its frame.
pub(super) type Taken = Vec<(Victim, Vec<Ticket>)>;

impl Victim {
    pub(super) fn entry(&self) -> &Page {
        self.bar.table.page(self.page)
    }
}

/// A pin that keeps a page of a request from being taken as a victim while the request is served.
/// It is given back without a stamp: nobody has used the page through it.
pub(super) struct Protected {
    pub(super) bar: Arc<Bar>,
    pub(super) page: PageIndex,
    generation: Generation,
}

impl Protected {
    pub(super) fn new(bar: Arc<Bar>, page: PageIndex, generation: Generation) -> Self {
        Self { bar, page, generation }
    }
}

impl Drop for Protected {
    fn drop(&mut self) {
        // Taken back by a forced end of run meanwhile is as good.
        let _ = self.bar.table.page(self.page).unpin(self.generation);
    }
}
