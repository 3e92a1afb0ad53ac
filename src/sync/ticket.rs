//! Tickets: points on streams as plain numbers, comparable and storable in one word.
//!
//! What has passed is known to `fence`; this is only the number.

/// A point on a stream: the slot of the stream and a sequence on it. Passed when the slot's passed
/// sequence has reached it. Packed in 64 bits; 0 is [`Ticket::NONE`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ticket(u64);

const SLOT_BITS: u32 = 10;

impl Ticket {
    /// Nothing to wait for.
    pub const NONE: Self = Self(0);
    /// The point `sequence` (from 1) of stream slot `slot`.
    #[must_use]
    pub fn new(slot: u16, sequence: u64) -> Self {
        debug_assert!(sequence > 0 && sequence < (1 << (64 - SLOT_BITS)) - 1);
        debug_assert!(u64::from(slot) < (1 << SLOT_BITS) - 1);
        Self(u64::from(slot) | (sequence << SLOT_BITS))
    }

    /// The stream slot.
    #[must_use]
    pub fn slot(self) -> u16 {
        (self.0 & ((1 << SLOT_BITS) - 1)) as u16
    }

    /// The sequence on the slot.
    #[must_use]
    pub fn sequence(self) -> u64 {
        self.0 >> SLOT_BITS
    }

    /// The ticket as a number, to be kept in an atomic.
    #[must_use]
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// The ticket of [`Ticket::to_bits`].
    #[must_use]
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Whether there is nothing to wait for.
    #[must_use]
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }
}
