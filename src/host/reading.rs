//! Which way the bytes of a model file come, and where they came from.
//!
//! Reads what is cached first, without waiting, so that the two sources can be told apart; then
//! the rest, through the page cache or past it. A file system that refuses direct reads is told
//! once and read through the page cache from then on. Pages of the cache are given back only while
//! this process alone holds the file's lock (flock(2)): others may want them.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

use rustix::fs::{Advice, FlockOperation, fadvise, flock, fstatfs};

use crate::error::Result;
use crate::host::direct::DirectFile;
use crate::host::source::ModelFile;
use crate::options::Prefer;

/// Bytes of one request to read ahead.
const AHEAD_BYTES: u64 = 1 << 20;

/// The way of a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reading {
    /// Through the page cache.
    Cached,
    /// What is in the page cache from there, the rest past it.
    CachedOrDirect,
    /// Past the page cache.
    Direct,
}

/// Bytes of one read by their source.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReadBytes {
    /// From the page cache: they came without waiting.
    pub page_cache: u64,
    /// From the disk.
    pub disk: u64,
    /// Of those, past the page cache.
    pub direct: u64,
}

impl ReadBytes {
    /// Where most of them came from, for traces.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self { direct: 1.., .. } => "direct",
            Self { disk, page_cache, .. } if disk > page_cache => "disk",
            _ => "page cache",
        }
    }
}

impl Reading {
    /// The way of a model that `fits` into what the host can spare, or does not.
    #[must_use]
    pub fn of(prefer: Prefer, fits: impl FnOnce() -> bool) -> Self {
        match prefer {
            Prefer::Ram => Self::Cached,
            Prefer::Disk => Self::Direct,
            Prefer::Auto if fits() => Self::Cached,
            Prefer::Auto => Self::CachedOrDirect,
        }
    }

    /// Whether it may go past the page cache, which wants memory that lies as the file does.
    #[must_use]
    pub fn may_be_direct(self) -> bool {
        self != Self::Cached
    }
}

impl ModelFile {
    /// Fills `target` with the bytes from `offset` on, the way that is asked for. `before_disk` is
    /// called when they are not in the page cache and will be read through it.
    ///
    /// # Errors
    /// As [`ModelFile::read_exact_at`].
    pub fn read_by(
        &self,
        reading: Reading,
        offset: u64,
        target: &mut [u8],
        before_disk: impl FnOnce(),
    ) -> Result<ReadBytes> {
        let mut bytes = ReadBytes::default();
        let mut done = 0;
        if reading != Reading::Direct {
            done = self.read_cached(offset, target)?;
            bytes.page_cache = done as u64;
        }
        let rest = &mut target[done..];
        if rest.is_empty() {
            return Ok(bytes);
        }
        let (length, at) = (rest.len() as u64, offset + done as u64);
        if reading.may_be_direct() && self.read_direct(at, rest)? {
            (bytes.disk, bytes.direct) = (length, length);
            return Ok(bytes);
        }
        before_disk();
        self.read_exact_at(at, rest)?;
        match self.lies_in_memory() {
            true => bytes.page_cache += length,
            false => bytes.disk = length,
        }
        Ok(bytes)
    }

    /// Whether `range` is in memory, as far as a look at one byte in each `step` tells. Never waits
    /// for a disk; `false` where the system does not say.
    pub fn is_in_memory(&self, range: &Range<u64>, step: u64) -> bool {
        let last = range.end.saturating_sub(1);
        let mut looks = range.clone().step_by(step as usize).chain([last]);
        looks.all(|at| {
            loop {
                match self.read_cached_at(&mut [0], at) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                    Err(_) => return self.lies_in_memory(),
                    Ok(bytes) => return bytes == 1,
                }
            }
        })
    }

    /// Whether its file system is one in memory, which cannot be asked what would not wait.
    fn lies_in_memory(&self) -> bool {
        let magic = self.descriptor().and_then(|file| fstatfs(file).ok());
        magic.is_some_and(|it| matches!(it.f_type as u64 & 0xFFFF_FFFF, 0x0102_1994 | 0x8584_58F6))
    }

    /// What is in the page cache, from the first byte on.
    fn read_cached(&self, offset: u64, target: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        while done < target.len() {
            let at = self.position(offset, done, target.len())?;
            match self.read_cached_at(&mut target[done..], at) {
                Ok(bytes) if bytes > 0 => done += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Whatever it is, the read that follows finds it too.
                _ => break,
            }
        }
        Ok(done)
    }

    /// Fills `target` past the page cache; `false` where that is refused.
    fn read_direct(&self, offset: u64, target: &mut [u8]) -> Result<bool> {
        let Some(direct) = self.direct() else { return Ok(false) };
        self.position(offset, 0, target.len())?;
        match direct.read_at(offset, target) {
            Ok(got) if got == target.len() => Ok(true),
            Ok(got) => Err(self.ended(offset, got, target.len())),
            Err((_, error)) if error.raw_os_error() == Some(libc::EINVAL) => {
                direct.refuse(self.name(), &error);
                Ok(false)
            }
            Err((got, error)) => Err(self.failed(offset, got, target.len(), &error)),
        }
    }

    /// Has the system begin to read `range` into the page cache, in order (posix_fadvise(2)).
    pub fn read_ahead(&self, range: &Range<u64>) {
        let Some(file) = self.descriptor() else { return };
        // A request is cut to what the disk takes at once, 1 MiB or more on most.
        for start in range.clone().step_by(AHEAD_BYTES as usize) {
            let length = std::num::NonZeroU64::new(AHEAD_BYTES.min(range.end - start));
            // Advice: where it is not taken the reads that follow find the bytes themselves.
            let _ = fadvise(file, start, length, Advice::WillNeed);
        }
    }

    /// How the file is read past the page cache, if it can be.
    #[must_use]
    pub fn direct(&self) -> Option<&DirectFile> {
        let opened = self.direct.get_or_init(|| {
            let opened = DirectFile::open(self.descriptor()?);
            let refused = |error: io::Error| log::info!("{}", refusal(self.name(), &error));
            opened.map_err(refused).ok()
        });
        opened.as_ref().filter(|direct| !direct.is_refused())
    }

    /// Gives the file's cached pages in `range` back, if nobody else has the file in use: this
    /// process holds its lock, exclusively, from the first such call until the file is closed.
    pub fn drop_cached(&self, range: &Range<u64>) {
        let Some(file) = self.lock.get_or_init(|| self.lock_file().ok()) else { return };
        let length = std::num::NonZeroU64::new(range.end - range.start);
        // Advice: where it is not taken the pages stay.
        let _ = fadvise(file, range.start, length, Advice::DontNeed);
    }

    /// Whether this process alone has the file: it holds its lock, from the first such call until
    /// the file is closed.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.lock.get_or_init(|| self.lock_file().ok()).is_some()
    }

    /// A description of one's own: a lock on the program's would be the program's.
    fn lock_file(&self) -> io::Result<File> {
        let descriptor = self.descriptor().ok_or(io::ErrorKind::Unsupported)?;
        let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        let file = OpenOptions::new().read(true).open(path)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(file)
    }
}

/// What is logged, once a file, where direct reads are refused.
pub(super) fn refusal(name: &str, error: &io::Error) -> String {
    format!("{name}: no reads past the page cache ({error}); it is read through it")
}
