//! An open model file: who it is, and reads at a position.
//!
//! Owns the descriptor, opened read-only, and the file's identity at the moment of opening. Bytes
//! are only ever read by calls that return errors, never through a mapping: a file that was cut
//! short meanwhile is a `FileChanged` error and not a `SIGBUS`.
//!
//! `host/reading` chooses between ways to read.
//!
//! What [`ModelFile::check_unchanged`] does not see: a change in place that puts size,
//! modification and change time back (raw access to the disk, some network file systems), and one
//! within the same tick of the file system's clock (a few milliseconds) as the identity.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::OnceLock;

use rustix::io::ReadWriteFlags;

use crate::error::{Error, ErrorCode, Result};
use crate::host::direct::DirectFile;

/// The kernel takes at most this many targets a call (`IOV_MAX`).
const TARGETS_A_CALL_MAX: usize = 1024;

/// A file's time as the file system keeps it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct FileTime {
    /// Since 1970, negative before.
    pub seconds: i64,
    /// The part of a second.
    pub nanos: i64,
}

/// What a file is told apart by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct FileIdentity {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
    /// `st_size`.
    pub bytes: u64,
    /// `st_mtim`: the content was written.
    pub modified: FileTime,
    /// `st_ctim`: content, name, owner or mode changed; cannot be set by programs.
    pub changed: FileTime,
}

impl FileIdentity {
    /// What differs in `now`, in words; `None` when nothing does.
    #[must_use]
    pub fn difference(&self, now: &Self) -> Option<String> {
        let mut found = Vec::new();
        if (self.device, self.inode) != (now.device, now.inode) {
            found.push("it is another file".to_owned());
        }
        if self.bytes != now.bytes {
            found.push(format!("its size went from {} to {} bytes", self.bytes, now.bytes));
        }
        if self.modified != now.modified {
            found.push("its modification time changed".to_owned());
        }
        if self.changed != now.changed {
            found.push("its change time changed (written, renamed, linked or deleted)".to_owned());
        }
        (!found.is_empty()).then(|| found.join(", "))
    }
}

/// Where bytes are read from: a file, or in tests something that fails as files do.
///
/// The calls do what the system calls do, once: they may be interrupted and may read less than
/// asked. [`ModelFile`] is what makes whole reads of them.
pub trait ReadAt: Send + Sync {
    /// `pread`: bytes read, 0 at the end of the file.
    ///
    /// # Errors
    /// What the system says, `EINTR` included.
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize>;

    /// `preadv`: the targets are filled in their order. At most `IOV_MAX` targets. Without a call
    /// of its own a reader fills the first target, which is a short read.
    ///
    /// # Errors
    /// What the system says, `EINTR` included.
    fn read_vectored_at(&self, targets: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        let first = targets.iter_mut().find(|target| !target.is_empty());
        first.map_or(Ok(0), |target| self.read_at(target, offset))
    }

    /// As [`ReadAt::read_at`], of bytes that are in memory already.
    ///
    /// # Errors
    /// What the system says: `WouldBlock` when they are not, `Unsupported` where it cannot tell.
    fn read_cached_at(&self, _target: &mut [u8], _offset: u64) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// `fstat`.
    ///
    /// # Errors
    /// What the system says.
    fn identity(&self) -> io::Result<FileIdentity>;

    /// The descriptor, for advice and mappings; `None` when there is no real file.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl ReadAt for File {
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, target, offset)
    }

    fn read_vectored_at(&self, targets: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
        // std's own is not stable yet.
        Ok(rustix::io::preadv(self, targets, offset)?)
    }

    fn read_cached_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut targets = [IoSliceMut::new(target)];
        Ok(rustix::io::preadv2(self, &mut targets, offset, ReadWriteFlags::NOWAIT)?)
    }

    fn identity(&self) -> io::Result<FileIdentity> {
        let metadata = self.metadata()?;
        Ok(FileIdentity {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.size(),
            modified: FileTime { seconds: metadata.mtime(), nanos: metadata.mtime_nsec() },
            changed: FileTime { seconds: metadata.ctime(), nanos: metadata.ctime_nsec() },
        })
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.as_fd())
    }
}

/// A model file, open for reading. Its calls may be made by any number of threads at once.
pub struct ModelFile {
    name: Box<str>,
    path: Option<Box<Path>>,
    identity: FileIdentity,
    reader: Box<dyn ReadAt>,
    /// How it is read past the page cache, once that was asked; `None` where it cannot be.
    pub(super) direct: OnceLock<Option<DirectFile>>,
    /// A description of the file with our lock on it, once that was asked for.
    pub(super) lock: OnceLock<Option<File>>,
}

impl ModelFile {
    /// Opens the file at `path`; symbolic links are followed.
    ///
    /// # Errors
    /// `Io` when it cannot be opened, `Format` when it is no regular file. Never waits for a
    /// writer, as opening a pipe would.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        // O_NONBLOCK means nothing to a regular file, and keeps a pipe from blocking us.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)
            .map_err(|error| Error::io(&name, &error))?;
        Ok(Self { path: Some(path.into()), ..Self::from_file(file, name)? })
    }

    /// Takes over an open descriptor; `name` is what errors call it.
    ///
    /// # Errors
    /// `Io` when the descriptor is not valid, `Format` when it is no regular file. (One that is
    /// not open for reading fails at the first read.)
    pub fn from_fd(descriptor: OwnedFd, name: impl Into<String>) -> Result<Self> {
        Self::from_file(File::from(descriptor), name.into())
    }

    fn from_file(file: File, name: String) -> Result<Self> {
        let metadata = file.metadata().map_err(|error| Error::io(&name, &error))?;
        if !metadata.is_file() {
            return Err(Error::new(ErrorCode::Format, format!("{name}: not a regular file")));
        }
        Self::from_reader(Box::new(file), name)
    }

    /// A file whose bytes come from `reader`.
    ///
    /// # Errors
    /// `Io` when its identity cannot be had.
    pub fn from_reader(reader: Box<dyn ReadAt>, name: impl Into<String>) -> Result<Self> {
        let name = name.into().into_boxed_str();
        let identity = reader.identity().map_err(|error| Error::io(&name, &error))?;
        let (direct, lock) = (OnceLock::new(), OnceLock::new());
        Ok(Self { name, path: None, identity, reader, direct, lock })
    }

    /// What errors call it: its path when it was opened by path.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The path that it was opened by; `None` for one that was open already.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Its length in bytes when it was opened.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.identity.bytes
    }

    /// What it was when it was opened.
    #[must_use]
    pub fn identity(&self) -> &FileIdentity {
        &self.identity
    }

    /// The descriptor, for advice and mappings; `None` when there is no real file.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.reader.descriptor()
    }

    /// Compares the file with what it was when it was opened.
    ///
    /// # Errors
    /// `FileChanged`, with the file's name and what changed. A deleted or renamed file counts as
    /// changed although its old bytes can still be read: its change time moved. `Io` when the
    /// identity cannot be had.
    pub fn check_unchanged(&self) -> Result<()> {
        let now = self.reader.identity().map_err(|error| Error::io(&self.name, &error))?;
        match self.identity.difference(&now) {
            None => Ok(()),
            Some(difference) => Err(Error::new(
                ErrorCode::FileChanged,
                format!(
                    "{}: the file changed while it was open: {difference}; open the model again",
                    self.name
                ),
            )),
        }
    }

    /// Fills `target` with the bytes from `offset` on.
    ///
    /// # Errors
    /// `Io`: a failed read, or the end of the file before `target` is full; with the file's name,
    /// the offset, the bytes wanted and the bytes had. `FileChanged`, with the same, when the file
    /// ended early because it is not what it was. `target` is then filled in part.
    pub fn read_exact_at(&self, offset: u64, target: &mut [u8]) -> Result<()> {
        let wanted = target.len();
        let mut done = 0;
        while done < wanted {
            let at = self.position(offset, done, wanted)?;
            match self.reader.read_at(&mut target[done..], at) {
                Ok(0) => return Err(self.ended(offset, done, wanted)),
                Ok(bytes) => done += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(offset, done, wanted, &error)),
            }
        }
        Ok(())
    }

    /// Fills the targets, one after the other, with the bytes from `offset` on. The slices of
    /// `targets` are used up: they point anywhere afterwards.
    ///
    /// # Errors
    /// As [`Self::read_exact_at`].
    pub fn read_scatter(&self, offset: u64, mut targets: &mut [IoSliceMut<'_>]) -> Result<()> {
        let wanted = targets.iter().map(|target| target.len()).sum();
        let mut done = 0;
        // Empty targets in front would look like the end of the file.
        IoSliceMut::advance_slices(&mut targets, 0);
        while !targets.is_empty() {
            let at = self.position(offset, done, wanted)?;
            let now = targets.len().min(TARGETS_A_CALL_MAX);
            match self.reader.read_vectored_at(&mut targets[..now], at) {
                Ok(0) => return Err(self.ended(offset, done, wanted)),
                Ok(bytes) => {
                    done += bytes;
                    IoSliceMut::advance_slices(&mut targets, bytes);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(offset, done, wanted, &error)),
            }
        }
        Ok(())
    }

    pub(super) fn position(&self, offset: u64, done: usize, wanted: usize) -> Result<u64> {
        // Files end at i64::MAX; a larger offset is an error of the system call, or, as u64::MAX
        // to preadv, no offset at all.
        match offset.checked_add(done as u64) {
            Some(at) if i64::try_from(at).is_ok() => Ok(at),
            _ => Err(self.ended(offset, done, wanted)),
        }
    }

    /// `pread` of what is in memory already: see [`ReadAt::read_cached_at`].
    pub(super) fn read_cached_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        self.reader.read_cached_at(target, offset)
    }

    pub(super) fn ended(&self, offset: u64, got: usize, wanted: usize) -> Error {
        let error = io::Error::new(io::ErrorKind::UnexpectedEof, "unexpected end of file");
        let short = self.failed(offset, got, wanted, &error);
        // Whoever cut the file short is told so; a caller opens it anew then, which is no use
        // where the medium fails.
        match self.check_unchanged() {
            Err(changed) if changed.code() == ErrorCode::FileChanged => changed.appended(short),
            _ => short,
        }
    }

    pub(super) fn failed(
        &self,
        offset: u64,
        got: usize,
        wanted: usize,
        error: &io::Error,
    ) -> Error {
        Error::io(
            format_args!("{}: wanted {wanted} bytes at offset {offset}, got {got}", self.name),
            error,
        )
    }
}

impl std::fmt::Debug for ModelFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelFile").field("name", &self.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
