//! Who else holds frames that a fault may have: asked before any page is evicted.
//!
//! A cache of mapped memory on the same frames (an allocator for activations, say) registers
//! itself and is told how many frames are missing. It is called with no lock held, on the thread
//! that faults, the runtime's context current, and gives frames back through the pager or the
//! runtime's public calls.

use std::sync::{Arc, Weak};

use super::Pager;
use crate::process;
use crate::sync::Mutex;

/// Who is asked.
#[derive(Default)]
pub(super) struct Reclaimers {
    /// The program's.
    program: Mutex<Option<Weak<dyn Reclaim>>>,
    /// The library's own.
    allocator: Mutex<Option<Weak<dyn Reclaim>>>,
}

/// The second is asked for what the first does not give.
struct Both(Arc<dyn Reclaim>, Arc<dyn Reclaim>);

impl Reclaim for Both {
    fn reclaim(&self, frames: u32) -> u32 {
        let given = self.0.reclaim(frames);
        let missing = frames.saturating_sub(given);
        given + if missing > 0 { self.1.reclaim(missing) } else { 0 }
    }

    fn reclaim_own(&self, frames: u32) -> u32 {
        let given = self.0.reclaim_own(frames);
        let missing = frames.saturating_sub(given);
        given + if missing > 0 { self.1.reclaim_own(missing) } else { 0 }
    }

    fn spare(&self, of: Option<u32>) -> u32 {
        let first = self.0.spare(of);
        first.saturating_add(self.1.spare(of.map(|of| of.saturating_sub(first))))
    }

    fn reclaim_reserved(&self, frames: u32) -> u32 {
        let given = self.0.reclaim_reserved(frames);
        let missing = frames.saturating_sub(given);
        given + if missing > 0 { self.1.reclaim_reserved(missing) } else { 0 }
    }

    fn knows_no_capture(&self) -> bool {
        self.0.knows_no_capture() || self.1.knows_no_capture()
    }
}

/// A holder of frames that can do without some.
pub trait Reclaim: Send + Sync {
    /// `frames` more are needed. Gives back what it can do without and returns how many frames
    /// that were; 0 when there is nothing to give.
    fn reclaim(&self, frames: u32) -> u32;

    /// As [`Reclaim::reclaim`], for a request of the library's own allocator: it may be the holder.
    fn reclaim_own(&self, frames: u32) -> u32 {
        self.reclaim(frames)
    }

    /// Frames that [`Reclaim::reclaim`] would give back now, about, if it was told of so many, or
    /// again and again. An engine counts on them as on free ones.
    fn spare(&self, of: Option<u32>) -> u32 {
        let _ = of;
        0
    }

    /// As [`Reclaim::reclaim`], asked last: without them the request is refused, or the budget
    /// exceeded. What is kept to be ready for the next step goes too.
    fn reclaim_reserved(&self, frames: u32) -> u32 {
        let _ = frames;
        0
    }

    /// Whether it is told of the captures of its program and there is none now: then a request
    /// waits for the context, whatever the options say, before it is refused for what no fence
    /// covers.
    fn knows_no_capture(&self) -> bool {
        false
    }
}

impl Pager {
    /// Registers who is asked for frames before pages are evicted; the last one registered counts.
    /// It is not kept alive.
    pub fn set_reclaim(&self, reclaim: &Arc<dyn Reclaim>) {
        if !process::ending() {
            *self.reclaim.program.lock() = Some(Arc::downgrade(reclaim));
        }
    }

    /// Registers an allocator of the library's own, which is asked beside the program's.
    pub fn set_allocator(&self, allocator: &Arc<dyn Reclaim>) {
        if !process::ending() {
            *self.reclaim.allocator.lock() = Some(Arc::downgrade(allocator));
        }
    }

    /// Pages that the budget allows in all.
    pub fn budget_pages(&self) -> u64 {
        self.state.lock().allowed_pages(self.device.options.page_size)
    }

    /// Who is registered, if it still lives.
    pub(super) fn reclaimer(&self) -> Option<Arc<dyn Reclaim>> {
        let live = |holder: &Mutex<Option<Weak<dyn Reclaim>>>| {
            holder.lock().as_ref().and_then(Weak::upgrade)
        };
        match (live(&self.reclaim.allocator), live(&self.reclaim.program)) {
            (Some(own), Some(program)) => Some(Arc::new(Both(own, program))),
            (own, program) => own.or(program),
        }
    }
}
