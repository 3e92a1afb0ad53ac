//! Where the bytes of a span are read to: a slot of the ring, or a window of the page-locked cache.

use crate::copy::cache::WindowLease;
use crate::copy::staging::StagingSlot;
use crate::host::locked::LockedSlot;

/// See the module's text.
pub(super) enum Place {
    Slot(StagingSlot),
    Window(WindowLease),
}

impl Place {
    /// The memory that takes them.
    pub(super) fn memory(&mut self) -> &mut LockedSlot {
        match self {
            Self::Slot(slot) => slot.memory(),
            Self::Window(window) => window.memory(),
        }
    }

    /// Whether nothing was read there before.
    pub(super) fn is_untouched(&self) -> bool {
        matches!(self, Self::Window(window) if window.is_new)
    }
}
