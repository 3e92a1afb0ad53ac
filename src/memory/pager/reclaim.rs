//! Who else holds frames that a fault may have: asked before any page is evicted.
//!
//! A cache of mapped memory on the same frames (an allocator for activations, say) registers
//! itself and is told how many frames are missing. It is called with no lock held, on the thread
//! that faults, the runtime's context current, and gives frames back through the pager or the
//! runtime's public calls.

use std::sync::{Arc, Weak};

use super::Pager;
use crate::process;

/// A holder of frames that can do without some.
pub trait Reclaim: Send + Sync {
    /// `frames` more are needed. Gives back what it can do without and returns how many frames
    /// that were; 0 when there is nothing to give.
    fn reclaim(&self, frames: u32) -> u32;
}

impl Pager {
    /// Registers who is asked for frames before pages are evicted; the last one registered counts.
    /// It is not kept alive.
    pub fn set_reclaim(&self, reclaim: &Arc<dyn Reclaim>) {
        if !process::ending() {
            *self.reclaim.lock() = Some(Arc::downgrade(reclaim));
        }
    }

    /// Who is registered, if it still lives.
    pub(super) fn reclaimer(&self) -> Option<Arc<dyn Reclaim>> {
        self.reclaim.lock().as_ref().and_then(Weak::upgrade)
    }
}
