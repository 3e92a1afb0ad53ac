//! The checksum of a stretch of a file, to compare with what the device computes.
//!
//! The numbers are those of `driver/kernel`: words mixed with their index and added up, so the
//! parts of a stretch may be read in any order. It verifies; nothing is filled with what it reads.

use crate::driver::kernel;
use crate::error::Result;
use crate::host::source::ModelFile;

/// Bytes read at once: a multiple of the checksum's word, small enough for the CPU's cache.
const CHUNK_BYTES: usize = 1 << 20;
const WORD_BYTES: u64 = 8;

/// [`kernel::checksum`] of the `bytes` bytes at `offset`, with the first word's index 0.
///
/// # Errors
/// Those of [`ModelFile::read_exact_at`].
pub fn file_checksum(file: &ModelFile, offset: u64, bytes: u64) -> Result<u64> {
    let mut buffer = vec![0; chunk_of(bytes)];
    let mut sum = 0u64;
    let mut done = 0;
    while done < bytes {
        let chunk = &mut buffer[..chunk_of(bytes - done)];
        file.read_exact_at(offset.saturating_add(done), chunk)?;
        sum = sum.wrapping_add(kernel::checksum(chunk, done / WORD_BYTES));
        done += chunk.len() as u64;
    }
    Ok(sum)
}

fn chunk_of(bytes: u64) -> usize {
    usize::try_from(bytes).map_or(CHUNK_BYTES, |bytes| bytes.min(CHUNK_BYTES))
}
