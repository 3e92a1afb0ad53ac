//! What can be recorded: kinds of spans, counters, and the record of one of them.
//!
//! Values only. Words are those of the trace file and of `vbar trace --json`.

use crate::outcome::kinds;
use crate::units::{DeviceOrdinal, Stream};

kinds! {
    /// What a span is of.
    Kind {
        /// A fault of the program, from its call to its return; detail: what it came to.
        Fault = "fault",
        /// The pins of a fault given back.
        Unpin = "unpin",
        /// A miss: its plan, and the driver calls that carried it out.
        Claim = "claim",
        /// The same ahead of need, for nobody's fault.
        Prefetch = "prefetch",
        /// A frame created by the driver.
        Create = "create",
        /// A frame mapped behind a page.
        Map = "map",
        /// Access given to a run of pages.
        Access = "set_access",
        /// A page's mapping removed.
        Unmap = "unmap",
        /// A frame given back to the driver.
        Release = "release",
        /// A bound page filled: reads and copies.
        Fill = "fill",
        /// Bytes read from a file; detail: where from.
        Read = "read",
        /// A copy to the device enqueued, and its fence.
        Copy = "copy",
        /// Host memory page-locked or registered.
        Register = "register",
        /// The CPU waited; detail: for what, a word of [`WaitKind`](crate::WaitKind).
        Wait = "wait",
        /// A page lost its frame to another page, or to the driver.
        Evict = "evict",
        /// The pages that are to stay were chosen anew; bytes: of them.
        Plan = "plan_change",
        /// Budget or headroom were set.
        Budget = "budget_change",
        /// A pass over a model.
        Pass = "pass",
        /// Pages in use on the GPU.
        GpuUse = "gpu_use",
        /// A copy as the GPU made it.
        GpuCopy = "gpu_copy",
    }
}

impl Kind {
    /// What all spans of the kind are together, in a few words for a table.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Fault => "faults of the program, from call to return",
            Self::Unpin => "pins of a fault given back",
            Self::Claim => "misses: the plan and its driver calls",
            Self::Prefetch => "the same ahead of need",
            Self::Create => "frames created by the driver",
            Self::Map => "frames mapped behind pages",
            Self::Access => "access given to mapped pages",
            Self::Unmap => "mappings of pages removed",
            Self::Release => "frames given back to the driver",
            Self::Fill => "bound pages filled: reads and copies",
            Self::Read => "bytes read from files",
            Self::Copy => "copies to the device enqueued",
            Self::Register => "host memory page-locked or registered",
            Self::Wait => "waits of the CPU",
            Self::Evict => "pages that lost their frame",
            Self::Plan => "placements chosen anew: pages that stay",
            Self::Budget => "budget or headroom set",
            Self::Pass => "passes over the model",
            Self::GpuUse => "pages in use on the GPU",
            Self::GpuCopy => "copies as the GPU made them",
        }
    }
}

kinds! {
    /// What has a value over time, in bytes.
    Counter {
        /// Frames held of a device.
        Held = "held_bytes",
        /// Pages of a device that have a frame.
        Resident = "resident_bytes",
        /// What may be held of a device.
        Budget = "budget_bytes",
        /// Page-locked memory of the process.
        Locked = "locked_bytes",
    }
}

/// What a record is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// A span on a thread.
    Span(Kind),
    /// A moment on a thread.
    Mark(Kind),
    /// A span on a device.
    OnDevice(Kind),
    /// A value from then on, in `bytes`.
    Value(Counter),
}

/// A span, a mark, or a counter's value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// What it is of.
    pub what: What,
    /// Its begin, by [`clock_ns`](super::clock_ns).
    pub start_ns: u64,
    /// Its end; the begin, where it takes no time.
    pub end_ns: u64,
    /// The device, where it is about one.
    pub device: Option<DeviceOrdinal>,
    /// The VBAR's number on its device, where it is about one.
    pub bar: Option<u32>,
    /// The VBAR's pages, first and behind the last.
    pub pages: (u32, u32),
    /// Bytes that it is about; 0 where that says nothing.
    pub bytes: u64,
    /// The stream; `Stream::NONE` where there is none.
    pub stream: Stream,
    /// A word more; empty where there is none.
    pub detail: &'static str,
}

impl Record {
    /// A record of a moment, about nothing yet.
    pub(super) fn new(what: What, now_ns: u64) -> Self {
        Self {
            what,
            start_ns: now_ns,
            end_ns: now_ns,
            device: None,
            bar: None,
            pages: (0, 0),
            bytes: 0,
            stream: Stream::NONE,
            detail: "",
        }
    }

    /// Its kind; `None` for a counter's value.
    #[must_use]
    pub fn kind(&self) -> Option<Kind> {
        match self.what {
            What::Span(kind) | What::Mark(kind) | What::OnDevice(kind) => Some(kind),
            What::Value(_) => None,
        }
    }
}
