//! What operations do to memory, a chunk at a time, each byte looked up first.
//!
//! Before an operation touches anything, every byte of it must be mapped with access for the
//! stream's device; each chunk is looked up again under the read lock, so that unmapping never
//! waits for more than a chunk. What fails is a violation with the sticky `ILLEGAL_ADDRESS`, and
//! the rest of the operation is skipped.
#![expect(unsafe_code, reason = "copies between host memory and the device's window")]

use super::Core;
use super::memory::Space;
use super::order::AccessKind;
use super::os;
use super::stream::{Operation, StreamState, Work};
use crate::driver::KernelCall;
use crate::driver::kernel;

/// Bytes handled between two looks at the address space.
const CHUNK: u64 = 4 << 20;
/// Bytes that kernels compute on at a time, in a buffer of their own.
const BUFFER: usize = 64 << 10;

/// An address that an operation may not touch.
struct Fault {
    address: u64,
    why: &'static str,
}

/// Looks a range up; where its first bytes are in the window, and how many of them.
fn resolve(space: &Space, device: usize, address: u64, bytes: u64) -> Result<(u64, u64), Fault> {
    let piece = space.piece(address, bytes);
    let piece = piece.ok_or(Fault { address, why: "nothing is mapped" })?;
    if piece.mapping.access & (1 << device) == 0 {
        return Err(Fault { address, why: "the device has no access" });
    }
    Ok((piece.mapping.frame.window_address(piece.offset), piece.bytes))
}

impl Core {
    /// Runs an operation; on a lost device it does nothing.
    pub(super) fn execute(&self, stream: &StreamState, operation: &Operation) {
        if self.is_lost(stream.device) {
            return;
        }
        let missing = operation.missing.map_or(Ok(()), |address| {
            Err(Fault { address, why: "nothing was mapped when it was enqueued" })
        });
        let result = missing.and_then(|()| self.check_spans(stream, &operation.work));
        let result = result.and_then(|()| {
            self.warm_up(&operation.work);
            self.run(stream, &operation.work)
        });
        if operation.source_sum != self.source_sum(&operation.work) {
            let (id, number) = (stream.id, operation.number);
            let text = format!("the source of stream {id} operation {number} was changed before");
            self.violation(stream.device, format!("{text} the copy was done"));
        }
        if let Err(Fault { address, why }) = result {
            self.violation(
                stream.device,
                format!(
                    "stream {} operation {} ({:x?}) touched {address:#x}, where {why}{}",
                    stream.id,
                    operation.number,
                    operation.work,
                    self.history_of(address)
                ),
            );
        }
    }

    /// With `checked=1`, the checksum of the page-locked bytes that a copy reads.
    pub(super) fn source_sum(&self, work: &Work) -> Option<u64> {
        let Work::CopyIn { source, bytes, .. } = *work else { return None };
        // What others write to a file is no breach of the program's.
        let checked = self.options.checked
            && self.host.contains(source, bytes)
            && !self.host.is_read_only(source, bytes);
        checked.then(|| checksum(source, 0, bytes as usize))
    }

    fn history_of(&self, address: u64) -> String {
        let space = self.space.read();
        space.piece(address, 1).map_or(String::new(), |piece| {
            let frame = &piece.mapping.frame;
            format!("; frame {}: {}", frame.handle, frame.record.lock().history())
        })
    }

    fn check_spans(&self, stream: &StreamState, work: &Work) -> Result<(), Fault> {
        let space = self.space.read();
        for span in work.spans() {
            let mut done = 0;
            while done < span.bytes {
                let at = span.address.wrapping_add(done);
                done += resolve(&space, stream.device, at, span.bytes - done)?.1;
            }
        }
        Ok(())
    }

    /// Has the operating system put memory behind what is about to be written, many OS pages at a
    /// time, which is several times faster than a fault for each.
    fn warm_up(&self, work: &Work) {
        for span in work.spans().filter(|span| span.kind == AccessKind::Write) {
            let mut done = 0;
            while done < span.bytes {
                let space = self.space.read();
                let wanted = (span.bytes - done).min(CHUNK);
                let Some(piece) = space.piece(span.address + done, wanted) else { return };
                piece.mapping.frame.warm_up(piece.offset, piece.bytes);
                done += piece.bytes;
            }
        }
    }

    /// Calls `each` with the window address of every chunk, its offset in the range, its length.
    fn for_chunks(
        &self,
        stream: &StreamState,
        address: u64,
        bytes: u64,
        mut each: impl FnMut(u64, u64, usize),
    ) -> Result<(), Fault> {
        let mut done = 0;
        while done < bytes {
            let wanted = (bytes - done).min(CHUNK);
            let space = self.space.read();
            let at = address.wrapping_add(done);
            let (window, length) = resolve(&space, stream.device, at, wanted)?;
            each(window, done, length as usize);
            drop(space);
            done += length;
        }
        Ok(())
    }

    fn run(&self, stream: &StreamState, work: &Work) -> Result<(), Fault> {
        match *work {
            Work::CopyIn { target, source, bytes } => {
                self.copy(stream, target, bytes, |window, offset, length| {
                    let from = source + offset;
                    // SAFETY: the window range was looked up under the lock that is still held.
                    if unsafe { self.host.copy_file_pages(window, from, length) } {
                        return;
                    }
                    // SAFETY: as above; the caller of the copy keeps the source readable until the
                    // copy is done.
                    unsafe { os::copy(window, from, length) }
                })
            }
            Work::CopyOut { target, source, bytes } => {
                self.copy(stream, source, bytes, |window, offset, length| {
                    // SAFETY: as above, and the caller keeps the target writable.
                    unsafe { os::copy(target + offset, window, length) }
                })
            }
            Work::Fill { target, value, bytes } => {
                self.for_chunks(stream, target, bytes, |window, _, length| {
                    // SAFETY: the window range was looked up under the lock that is still held.
                    unsafe { os::fill(window, value, length) }
                })
            }
            Work::Kernel(KernelCall::Pattern { target, bytes, seed, .. }) => {
                self.for_chunks(stream, target.0, bytes, |window, offset, length| {
                    write_pattern(window, offset / 8, length, seed);
                })
            }
            Work::Kernel(KernelCall::Checksum { source, bytes, first_word, target, .. }) => {
                let mut sum = 0u64;
                self.for_chunks(stream, source.0, bytes, |window, offset, length| {
                    let first = first_word.wrapping_add(offset / 8);
                    sum = sum.wrapping_add(checksum(window, first, length));
                })?;
                self.for_chunks(stream, target.0, 8, |window, _, _| {
                    // SAFETY: looked up under the lock; the launch has checked the alignment.
                    unsafe { os::add(window, sum) }
                })
            }
            Work::Mark | Work::Stamp(_) => {
                work.stamp();
                Ok(())
            }
        }
    }

    /// A copy, at the set bandwidth.
    fn copy(
        &self,
        stream: &StreamState,
        address: u64,
        bytes: u64,
        mut each: impl FnMut(u64, u64, usize),
    ) -> Result<(), Fault> {
        if self.options.bandwidth.is_none() || self.seeded.is_some() {
            return self.for_chunks(stream, address, bytes, each);
        }
        let mut done = 0;
        while done < bytes {
            let length = (bytes - done).min(CHUNK);
            self.sleep(self.transfer_time(length));
            let at = address.wrapping_add(done);
            self.for_chunks(stream, at, length, |window, offset, length| {
                each(window, done + offset, length);
            })?;
            done += length;
        }
        Ok(())
    }
}

/// Writes part of a pattern; chunks begin at whole words, since mappings and [`CHUNK`] do.
fn write_pattern(window: u64, first_word: u64, length: usize, seed: u64) {
    let mut buffer = [0u8; BUFFER];
    let mut done = 0;
    while done < length {
        let part = (length - done).min(BUFFER);
        for (index, word) in buffer[..part].chunks_mut(8).enumerate() {
            let at = first_word + (done / 8 + index) as u64;
            let bytes = kernel::mix(seed, at).to_le_bytes();
            word.copy_from_slice(&bytes[..word.len()]);
        }
        let from = buffer.as_ptr().expose_provenance() as u64;
        // SAFETY: the buffer is ours, the window range was looked up by the caller.
        unsafe { os::copy(window + done as u64, from, part) }
        done += part;
    }
}

/// The checksum of a range in the window or in page-locked memory.
fn checksum(from: u64, first_word: u64, length: usize) -> u64 {
    let mut buffer = [0u8; BUFFER];
    let mut sum = 0u64;
    let mut done = 0;
    while done < length {
        let part = (length - done).min(BUFFER);
        let into = buffer.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the buffer is ours, the caller has looked the range up.
        unsafe { os::copy(into, from + done as u64, part) }
        let first = first_word.wrapping_add((done / 8) as u64);
        sum = sum.wrapping_add(kernel::checksum(&buffer[..part], first));
        done += part;
    }
    sum
}
