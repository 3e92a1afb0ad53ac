//! A bound on host frames that the program sets, beside what the system can spare.
//!
//! The book of all page-locked memory is `host/room`; who knows of other users of the machine's
//! memory says so here: see [`Runtime::set_host_room`](crate::Runtime::set_host_room).

/// Who says how much host memory may be in host frames.
pub trait HostRoom: Send + Sync {
    /// Bytes of host frames that may be held in all, `held_bytes` of which are now. The system's
    /// own bound comes on top. Called with no lock of the library held, before frames are made and
    /// when memory is given back.
    fn allowed_bytes(&self, held_bytes: u64) -> u64;
}
