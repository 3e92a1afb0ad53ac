//! What a call came to when nothing failed: reasons for a refusal, kinds of wait.
//!
//! Every refusal has a reason and every wait a kind, and both are counted, so that the question
//! "why was this weight not resident" always has an answer in the statistics.

macro_rules! kinds {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub enum $name { $($(#[$doc])* $variant,)* }

        impl $name {
            /// Every value, in order of its index.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// A short word for tables and JSON keys.
            #[must_use]
            pub fn word(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.word())
            }
        }
    };
}
pub(crate) use kinds;

kinds! {
    /// Why a range is offloaded: not resident, by decision.
    Reason {
        /// The range needs more frames than the budget has in all.
        TooLarge = "too_large",
        /// The budget is used by pages of higher priority.
        Budget = "budget",
        /// Every page that could be evicted is pinned.
        AllPinned = "all_pinned",
        /// A bare VBAR's page at or above its watermark.
        AboveWatermark = "above_watermark",
        /// The driver had no memory although the budget allowed it.
        DriverMemory = "driver_memory",
        /// The driver or the operating system allows no more mappings.
        Mappings = "mappings",
        /// The VBAR has no reservation, or the device no virtual memory management.
        NoAddresses = "no_addresses",
        /// The stream is being captured and the range is not resident.
        Capture = "capture",
        /// The pages that could be evicted were used by a stream that no fence covers.
        FenceUnknown = "fence_unknown",
        /// The pages that could be evicted are still in use, and the caller gave no stream.
        FencePending = "fence_pending",
        /// A page of the range was quarantined after a failed undo.
        Quarantined = "quarantined",
        /// No device frames could be had, and the range is readable in host memory: see
        /// [`HostMapped`](crate::options::HostMapped).
        HostMapped = "host_mapped",
    }
}

/// A range that is offloaded: why, and what it takes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Refusal {
    /// Why.
    pub reason: Reason,
    /// Bytes of device frames that the range needs: whole pages, each of them once. With a budget
    /// of less it is [`Reason::TooLarge`].
    pub needed_bytes: u64,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { reason, needed_bytes } = self;
        match reason {
            Reason::TooLarge => write!(f, "{reason}, it needs {needed_bytes} bytes of frames"),
            _ => write!(f, "{reason}"),
        }
    }
}

kinds! {
    /// What the CPU waited for.
    WaitKind {
        /// Another thread's driver calls on the same page.
        Claim = "claim",
        /// A page-locked slot whose last copy is not done.
        Staging = "staging",
        /// A victim's fences where aliasing is off, or the end of what the engine has in hand.
        Frame = "frame",
        /// The page's own old mapping, whose frame went elsewhere.
        OldMapping = "old_mapping",
        /// A fence, for a caller that gave no stream.
        Ready = "ready",
        /// Fences of pages that are to be given back to the driver.
        Release = "release",
        /// The whole context, once, to learn what no fence covers.
        Context = "context",
        /// Bytes that threads of the library's own read from a file.
        Read = "read",
        /// Host memory being registered with the driver, or given back.
        Register = "register",
    }
}
