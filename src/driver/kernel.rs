//! The library's own kernels: what they compute, once, in Rust.
//!
//! The CUDA driver runs them from embedded PTX, the simulated device runs the functions below; both
//! must give the same numbers. They exist to verify bytes on the device, never to fill weights.
//!
//! Checksum: the bytes are read as little-endian 64-bit words, the last one padded with zeros;
//! each word is mixed with its index, and the results are added modulo 2^64. A sum, so that parts
//! can be added in any order; the index makes it see moved and swapped words.

use crate::units::DeviceAddress;

/// A launch of one of the library's kernels. Addresses are device addresses, 8-byte aligned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KernelCall {
    /// Adds the checksum of `bytes` bytes at `source` to the 64-bit word at `target`.
    Checksum {
        /// First byte, 8-byte aligned.
        source: DeviceAddress,
        /// Length in bytes, any number.
        bytes: u64,
        /// Index of the first word, so that parts of one tensor add up to the whole's checksum.
        first_word: u64,
        /// Nanoseconds that the kernel waits before it reads: a long kernel for tests of ordering.
        delay_nanos: u64,
        /// A 64-bit word in device memory, added to atomically.
        target: DeviceAddress,
    },
    /// Writes the pattern of `seed` over `bytes` bytes at `target`: word i is `mix(seed, i)`, the
    /// last word cut off.
    Pattern {
        /// First byte, 8-byte aligned.
        target: DeviceAddress,
        /// Length in bytes, any number.
        bytes: u64,
        /// Any number.
        seed: u64,
        /// Nanoseconds that the kernel waits before it writes.
        delay_nanos: u64,
    },
}

const INDEX_FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
const MIX_FACTOR: u64 = 0xD6E8_FEB8_6659_FD93;

/// One word of a checksum or pattern: `word` mixed with its `index`, all arithmetic modulo 2^64.
#[must_use]
pub fn mix(word: u64, index: u64) -> u64 {
    let mut mixed = word ^ index.wrapping_add(1).wrapping_mul(INDEX_FACTOR);
    mixed ^= mixed >> 32;
    mixed = mixed.wrapping_mul(MIX_FACTOR);
    mixed ^ (mixed >> 32)
}

/// The checksum of `bytes`, whose first word has index `first_word`.
#[must_use]
pub fn checksum(bytes: &[u8], first_word: u64) -> u64 {
    let mut words = bytes.chunks_exact(8);
    let mut sum = 0u64;
    let mut index = first_word;
    for word in &mut words {
        let word = u64::from_le_bytes(word.try_into().expect("chunks of eight"));
        sum = sum.wrapping_add(mix(word, index));
        index = index.wrapping_add(1);
    }
    if !words.remainder().is_empty() {
        let mut last = [0; 8];
        last[..words.remainder().len()].copy_from_slice(words.remainder());
        sum = sum.wrapping_add(mix(u64::from_le_bytes(last), index));
    }
    sum
}

/// Writes the pattern of `seed` over `target`; what [`KernelCall::Pattern`] writes.
pub fn pattern(target: &mut [u8], seed: u64) {
    for (index, word) in target.chunks_mut(8).enumerate() {
        let bytes = mix(seed, index as u64).to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_and_swaps_are_seen() {
        let mut bytes = vec![0; 1003];
        pattern(&mut bytes, 7);
        let whole = checksum(&bytes, 0);
        let parts = checksum(&bytes[..512], 0).wrapping_add(checksum(&bytes[512..], 64));
        assert_eq!(whole, parts);
        bytes.swap(8, 16);
        assert_ne!(whole, checksum(&bytes, 0));
    }
}
