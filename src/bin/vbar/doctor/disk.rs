//! How fast a model's file comes from its disk, past the page cache.
//!
//! A few large reads spread over the file, one after the other, as the library makes them without
//! threads. They end early where the disk is slow: the doctor is not to be waited for.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::{Duration, Instant};

use serde::Serialize;
use vbar::units::MIB;

use super::line::Line;
use crate::output::{megabytes_a_second, rate};

/// What every disk accepts as the alignment of direct reads.
pub(super) const ALIGNMENT: usize = 4096;
/// Bytes of one read, and how many of them there are at most.
const READ_BYTES: usize = 4 * MIB as usize;
const READS_MAX: u64 = 16;
/// No read is begun after this.
pub(super) const PATIENCE: Duration = Duration::from_millis(250);
/// MB/s below which a pass is a wait for the disk whatever the link is.
const SLOW: f64 = 500.0;

/// What was read, and in which time.
#[derive(Serialize, Clone, Copy, PartialEq, Debug)]
pub(super) struct Disk {
    read_bytes: u64,
    read_ms: f64,
}

/// The file once more, past the page cache. It is opened by its descriptor: its name may be that of
/// another file by now.
///
/// # Errors
/// What the system says, `EINVAL` where the file system has no `O_DIRECT`.
pub(super) fn open_direct(descriptor: BorrowedFd<'_>) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    OpenOptions::new().read(true).custom_flags(direct).open(path)
}

/// Memory for direct reads of `bytes` bytes: all of it, and where they begin.
pub(super) fn aligned(bytes: usize) -> (Vec<u8>, usize) {
    let memory = vec![0; bytes + ALIGNMENT];
    let start = memory.as_ptr().align_offset(ALIGNMENT);
    (memory, start)
}

impl Disk {
    /// Reads for `patience`, or a little longer. `None` for a file that is too small to tell.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn measure(
        descriptor: BorrowedFd<'_>,
        bytes: u64,
        patience: Duration,
    ) -> io::Result<Option<Self>> {
        let places = (bytes / READ_BYTES as u64).min(READS_MAX);
        if places < 2 {
            return Ok(None);
        }
        let file = open_direct(descriptor)?;
        let (mut memory, start) = aligned(READ_BYTES);
        let target = &mut memory[start..start + READ_BYTES];
        let step = bytes / places / ALIGNMENT as u64 * ALIGNMENT as u64;
        let (begun, mut read_bytes) = (Instant::now(), 0);
        for place in 0..places {
            read_bytes += file.read_at(target, place * step)? as u64;
            if begun.elapsed() >= patience {
                break;
            }
        }
        let read_ms = begun.elapsed().as_secs_f64() * 1e3;
        Ok((read_bytes > 0).then_some(Self { read_bytes, read_ms }))
    }

    pub(super) fn line(&self) -> Line {
        const TOPIC: &str = "disk";
        let text = format!("{} past the page cache", rate(self.read_bytes, self.read_ms));
        if megabytes_a_second(self.read_bytes, self.read_ms) >= SLOW {
            return Line::ok(TOPIC, text);
        }
        Line::note(
            TOPIC,
            format!("{text}: slow"),
            "a first pass, and what RAM does not hold, takes this long: a faster disk, or more RAM",
        )
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::super::line::Level;
    use super::*;

    #[test]
    fn a_slow_disk_is_noted() {
        let disk = |read_ms| Disk { read_bytes: 64 << 20, read_ms };
        let line = disk(1000.0).line();
        assert_eq!(line.verdict, Level::Note, "{line:?}");
        assert!(line.text.starts_with("67 MB/s") && line.text.contains("slow"), "{line:?}");
        assert!(line.advice.unwrap().contains("faster disk"));
        assert_eq!(disk(20.0).line().verdict, Level::Ok);
    }

    #[test]
    fn what_is_read_is_no_more_than_there_is() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(9 << 20).unwrap();
        // Where the file system has no direct reads that is the answer.
        if let Ok(disk) = Disk::measure(file.as_fd(), 9 << 20, PATIENCE) {
            let read = disk.unwrap().read_bytes;
            assert!(read > 0 && read <= 9 << 20, "{read}");
            let once = Disk::measure(file.as_fd(), 9 << 20, Duration::ZERO).unwrap().unwrap();
            assert_eq!(once.read_bytes, READ_BYTES as u64);
        }
        assert_eq!(Disk::measure(file.as_fd(), 100, PATIENCE).unwrap(), None);
    }
}
