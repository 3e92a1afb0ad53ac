//! The simulated device's only source of chance: splitmix64, seeded.
//!
//! Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.

/// A generator; equal seeds give equal numbers.
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; 0 when `bound` is 0. The tiny bias of the remainder is accepted.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.next() % bound }
    }

    /// True with probability `probability`.
    pub(super) fn chance(&mut self, probability: f64) -> bool {
        // 53 bits fit a double exactly.
        ((self.next() >> 11) as f64) < probability * (1u64 << 53) as f64
    }
}
