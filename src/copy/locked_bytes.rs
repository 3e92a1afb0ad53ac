//! How much page-locked memory a runtime holds, and what for. Numbers only.

/// Page-locked bytes by what holds them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LockedBytes {
    /// The staging ring.
    pub ring_bytes: u64,
    /// The page-locked cache, windows without use included.
    pub cache_bytes: u64,
    /// Registered pages of files: they would be in memory without, and could be dropped.
    pub registered_bytes: u64,
    /// What the program wrote and was saved, room for more of it included.
    pub saved_bytes: u64,
    /// Of all these, what is to go: it is above the allowance, or saved while memory is short.
    pub excess_bytes: u64,
}

impl LockedBytes {
    /// All of them.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.ring_bytes + self.cache_bytes + self.registered_bytes + self.saved_bytes
    }
}
