//! Generational ids for what a caller may hold, free twice, or make up.
//!
//! An id names a slot and the slot's generation, so that one that was given back, was never given
//! out or belongs to another table is told and touches nothing. Two tables: [`Handles`] for things
//! that many threads use at once and somebody closes meanwhile, [`Tokens`] for things that are put
//! in once and taken out once. Reading takes no lock; a hit of the C ABI does both.
//!
//! ```text
//! id:  63..60 tag of the table | 59..24 generation | 23..0 slot
//! ```
//!
//! A slot whose generations are used up is not used again. Knows nothing of what is stored.

mod barrier;
#[cfg(all(test, vbar_loom))]
mod every_order;
mod handles;
pub mod thread;
mod tokens;

pub use handles::{Handles, Ref, Spread};
pub use thread::{FreeSlot, SlotCache, Thread};
pub use tokens::{Ending, Tokens};

/// Slots of one table: 16.7 million.
const SLOTS_MAX: u32 = 1 << SLOT_BITS;
const SLOT_BITS: u32 = 24;
const GENERATION_BITS: u32 = 36;
const GENERATION_MAX: u64 = (1 << GENERATION_BITS) - 1;

/// The id of a slot in the table of `tag`, 1 to 15; so never 0.
fn id_of(tag: u8, generation: u64, slot: u32) -> u64 {
    u64::from(tag) << (SLOT_BITS + GENERATION_BITS) | generation << SLOT_BITS | u64::from(slot)
}

/// Generation and slot of an id, or `None` for an id of another table.
#[inline]
fn parts_of(tag: u8, id: u64) -> Option<(u64, usize)> {
    let ours = id >> (SLOT_BITS + GENERATION_BITS) == u64::from(tag);
    let slot = id & u64::from(SLOTS_MAX - 1);
    ours.then_some((id >> SLOT_BITS & GENERATION_MAX, slot as usize))
}
