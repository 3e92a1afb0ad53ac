//! Reading a file past the page cache (`O_DIRECT`, open(2)).
//!
//! Owns a description of the file of its own, opened again through `/proc`, and the alignment that
//! its file system asks for (`STATX_DIOALIGN`, statx(2); 4 KiB where the kernel does not say).
//! Any offset, length and target will do: what is aligned goes straight to its place, the edges,
//! and what lies otherwise in memory than in the file, through a buffer of one's own.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use crate::host::reading::refusal;
use crate::sync::{AtomicBool, Relaxed};
use rustix::fs::{AtFlags, StatxFlags, statx};

/// What is tried where the kernel does not say, and the most that is supported: memory that direct
/// reads go to has this much room to spare.
pub const ALIGNMENT_MAX: u64 = 4096;
/// Largest read through a buffer.
const BUFFER_BYTES: usize = 1 << 20;

/// See the module's text.
pub struct DirectFile {
    file: File,
    alignment: u64,
    refused: AtomicBool,
}

impl DirectFile {
    /// Opens the file behind a descriptor once more.
    ///
    /// # Errors
    /// What the system says: where the file system has no such reads, or `/proc` is missing.
    /// `Unsupported` where they need more than 4 KiB of alignment.
    pub fn open(file: BorrowedFd<'_>) -> io::Result<Self> {
        let alignment = alignment_of(file)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let flags = libc::O_DIRECT | libc::O_NOCTTY | libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        Ok(Self { file, alignment, refused: AtomicBool::new(false) })
    }

    /// Notes that the file system refused a read after all.
    pub(super) fn refuse(&self, name: &str, error: &io::Error) {
        if !self.refused.swap(true, Relaxed) {
            log::info!("{}", refusal(name, error));
        }
    }

    /// Whether the file system refused a read.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        self.refused.load(Relaxed)
    }

    /// What offsets, lengths and addresses of memory are multiples of where nothing is copied.
    #[must_use]
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Fills `target` from `offset` on, as far as the file goes. Returns the bytes filled, fewer
    /// than asked at the end of the file only.
    ///
    /// # Errors
    /// What the system says, with the bytes filled before.
    pub fn read_at(&self, offset: u64, target: &mut [u8]) -> Result<usize, (usize, io::Error)> {
        let align = self.alignment as usize;
        let skew = (offset % self.alignment) as usize;
        if target.as_ptr().addr() % align != skew {
            return self.read_buffered(offset, target);
        }
        let head = if skew == 0 { 0 } else { (align - skew).min(target.len()) };
        let middle = (target.len() - head) / align * align;
        let (first, rest) = target.split_at_mut(head);
        let (whole, last) = rest.split_at_mut(middle);
        let mut done = 0;
        for (part, kind) in [(first, Part::Edge), (whole, Part::Whole), (last, Part::Edge)] {
            let wanted = part.len();
            let at = offset + done as u64;
            let got = match kind {
                Part::Edge => self.read_buffered(at, part),
                Part::Whole => self.read_whole(at, part),
            };
            let got = got.map_err(|(got, error)| (done + got, error))?;
            done += got;
            if got < wanted {
                break;
            }
        }
        Ok(done)
    }

    /// Everything aligned.
    fn read_whole(&self, offset: u64, target: &mut [u8]) -> Result<usize, (usize, io::Error)> {
        let mut done = 0;
        while done < target.len() {
            let got = self.read_once(offset + done as u64, &mut target[done..]);
            let got = got.map_err(|error| (done, error))?;
            done += got;
            if got == 0 {
                return Ok(done);
            }
            if !(got as u64).is_multiple_of(self.alignment) {
                // The end of the file, most likely; a buffered read tells.
                let rest = self.read_buffered(offset + done as u64, &mut target[done..]);
                return rest.map(|got| done + got).map_err(|(got, error)| (done + got, error));
            }
        }
        Ok(done)
    }

    /// Through aligned memory, of which the wanted bytes are copied.
    fn read_buffered(&self, offset: u64, target: &mut [u8]) -> Result<usize, (usize, io::Error)> {
        let align = self.alignment as usize;
        let room = (target.len() + 2 * align).min(BUFFER_BYTES).next_multiple_of(align);
        let mut memory = vec![0; room + align];
        let start = memory.as_ptr().align_offset(align);
        let buffer = &mut memory[start..start + room];
        let mut done = 0;
        while done < target.len() {
            let at = offset + done as u64;
            let skew = (at % self.alignment) as usize;
            let wanted = (skew + target.len() - done).next_multiple_of(align).min(room);
            let got = self.read_once(at - skew as u64, &mut buffer[..wanted]);
            let got = got.map_err(|error| (done, error))?;
            let bytes = got.saturating_sub(skew).min(target.len() - done);
            target[done..done + bytes].copy_from_slice(&buffer[skew..skew + bytes]);
            done += bytes;
            if bytes == 0 {
                break;
            }
        }
        Ok(done)
    }

    fn read_once(&self, offset: u64, target: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.file.read_at(target, offset) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                answer => return answer,
            }
        }
    }
}

enum Part {
    Edge,
    Whole,
}

fn alignment_of(file: BorrowedFd<'_>) -> io::Result<u64> {
    let unsupported = |text: &str| Err(io::Error::new(io::ErrorKind::Unsupported, text));
    let found = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    let said = found.ok().filter(|found| {
        StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::DIOALIGN)
    });
    let Some(said) = said else { return Ok(ALIGNMENT_MAX) };
    if said.stx_dio_offset_align == 0 {
        return unsupported("the file system has no direct reads of this file");
    }
    let alignment = u64::from(said.stx_dio_offset_align.max(said.stx_dio_mem_align));
    if alignment > ALIGNMENT_MAX || !alignment.is_power_of_two() {
        return unsupported("direct reads of this file need more than 4 KiB of alignment");
    }
    Ok(alignment)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    fn check(direct: &DirectFile, bytes: &[u8], offset: usize, length: usize, skew: usize) {
        let mut memory = vec![0xEE; length + skew + 2 * ALIGNMENT_MAX as usize];
        let start = memory.as_ptr().align_offset(ALIGNMENT_MAX as usize) + skew;
        let got = direct.read_at(offset as u64, &mut memory[start..start + length]).unwrap();
        let end = (offset + length).min(bytes.len());
        let wanted = &bytes[offset.min(end)..end];
        assert_eq!(got, wanted.len(), "{length} bytes at {offset}, {skew} askew");
        assert!(&memory[start..start + got] == wanted, "{length} bytes at {offset}, {skew} askew");
        let outside = memory[..start].iter().chain(&memory[start + length..]);
        assert!(outside.copied().all(|byte| byte == 0xEE), "{length} bytes at {offset}");
    }

    #[test]
    fn any_offset_length_and_place_will_do() {
        let mut file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..300_001u32).map(|at| (at * 7 % 251) as u8).collect();
        file.write_all(&bytes).unwrap();
        file.sync_all().unwrap();
        let Ok(direct) = DirectFile::open(file.as_fd()) else { return };
        if direct.read_at(0, &mut [0; 16]).is_err() {
            return; // Opened, and refused: the caller reads otherwise.
        }
        for offset in [0, 1, 511, 512, 4095, 4096, 5000, 299_000, 300_000, 300_001, 400_000] {
            for length in [0, 1, 700, 4096, 8192, 100_003] {
                for skew in [0, offset % ALIGNMENT_MAX as usize, 9] {
                    check(&direct, &bytes, offset, length, skew);
                }
            }
        }
    }
}
