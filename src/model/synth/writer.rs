//! Writes one synthetic safetensors file: under another name, by several threads, then renamed.
//!
//! The file appears under its name only when it is whole. While it is written it is
//! `.<name>.partial` in the same folder, locked by its writer; one that a killed writer left
//! behind is taken over by the next.

use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::existing::{kind_of, name_of};
use crate::driver::kernel::mix;
use crate::error::{Error, ErrorCode, Result};
use crate::units::format_bytes;

/// Bytes that a thread makes and writes at once; a multiple of the pattern's word.
const CHUNK_BYTES: u64 = 4 << 20;
const WORD_BYTES: usize = 8;
const THREADS_MAX: usize = 8;

/// Told of bytes as they are written, by any thread.
pub type Progress<'a> = &'a (dyn Fn(u64) + Sync);

/// A stretch of the file that is filled with the pattern of a seed.
pub(super) struct Stretch {
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) seed: u64,
}

/// Writes the file: `head`, then the stretches.
pub(super) fn write_file(
    path: &Path,
    head: &[u8],
    stretches: &[Stretch],
    progress: Progress<'_>,
) -> Result<()> {
    let mut partial = Partial::create(path)?;
    let last = stretches.last().map_or(head.len() as u64, |last| last.offset + last.bytes);
    check_space(path, last)?;
    let io_error = |error| Error::io(path.display(), &error);
    partial.file.set_len(last).map_err(io_error)?;
    partial.file.write_all_at(head, 0).map_err(io_error)?;
    progress(head.len() as u64);
    write_stretches(&partial.file, path, stretches, progress)?;
    partial.rename_to(path)
}

/// Refuses when the file system of `path` has less than `bytes` free.
///
/// # Errors
/// `Io`, with both numbers.
pub(super) fn check_space(path: &Path, bytes: u64) -> Result<()> {
    let folder = folder_of(path);
    let space = rustix::fs::statvfs(folder).map_err(|e| Error::io(folder.display(), &e.into()))?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if free < bytes {
        let text = format!(
            "{}: {} are to be written, but the file system has only {} free",
            path.display(),
            format_bytes(bytes),
            format_bytes(free)
        );
        return Err(Error::new(ErrorCode::Io, text));
    }
    Ok(())
}

fn write_stretches(
    file: &File,
    path: &Path,
    stretches: &[Stretch],
    progress: Progress<'_>,
) -> Result<()> {
    let chunks = chunks_of(stretches);
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let failure = Mutex::new(None);
    let work = || {
        let mut buffer = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
            buffer.resize(chunk.bytes, 0);
            write_pattern(&mut buffer, chunk.seed, chunk.first_word);
            if let Err(error) = file.write_all_at(&buffer, chunk.offset) {
                stop.store(true, Ordering::Relaxed);
                failure.lock().get_or_insert_with(|| Error::io(path.display(), &error));
                return;
            }
            progress(chunk.bytes as u64);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get());
    std::thread::scope(|scope| {
        // As many as the system gives; this one works too.
        for _ in 1..threads.min(THREADS_MAX).min(chunks.len()) {
            if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    failure.into_inner().map_or(Ok(()), Err)
}

/// What a thread writes at once.
struct Chunk {
    offset: u64,
    bytes: usize,
    seed: u64,
    first_word: u64,
}

fn chunks_of(stretches: &[Stretch]) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    for stretch in stretches {
        let mut done = 0;
        while done < stretch.bytes {
            let bytes = (stretch.bytes - done).min(CHUNK_BYTES);
            chunks.push(Chunk {
                offset: stretch.offset + done,
                bytes: usize::try_from(bytes).expect("at most CHUNK_BYTES"),
                seed: stretch.seed,
                first_word: done / WORD_BYTES as u64,
            });
            done += bytes;
        }
    }
    chunks
}

/// `kernel::pattern` from a word on: word i is `mix(seed, first_word + i)`.
fn write_pattern(target: &mut [u8], seed: u64, first_word: u64) {
    let mut words = target.chunks_exact_mut(WORD_BYTES);
    let mut index = first_word;
    for word in &mut words {
        word.copy_from_slice(&mix(seed, index).to_le_bytes());
        index += 1;
    }
    let rest = words.into_remainder();
    let bytes = rest.len();
    rest.copy_from_slice(&mix(seed, index).to_le_bytes()[..bytes]);
}

/// The file while it is written; removed when it is dropped before it was renamed.
pub(super) struct Partial {
    pub(super) file: File,
    path: PathBuf,
    is_renamed: bool,
}

impl Partial {
    /// An empty file, locked, that will become the one at `path`.
    pub(super) fn create(path: &Path) -> Result<Self> {
        let name = path.file_name().ok_or_else(|| invalid(path, "not the path of a file"))?;
        let mut partial_name = std::ffi::OsString::from(".");
        partial_name.push(name);
        partial_name.push(".partial");
        let partial = folder_of(path).join(partial_name);
        let io_error = |error| Error::io(partial.display(), &error);
        if let Some(kind) = kind_of(&partial)?.filter(|kind| !kind.is_file()) {
            let text = format!("{} is in the place of the file; remove it first", name_of(kind));
            return Err(invalid(&partial, &text));
        }
        // A writer renames its file while it holds the lock, so a lock may be had on a file that
        // has left this name meanwhile.
        loop {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                // Neither what a link points to nor a pipe that came meanwhile.
                .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
                .open(&partial)
                .map_err(io_error)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::new(
                        ErrorCode::Io,
                        format!("{}: another process is writing it", path.display()),
                    ));
                }
                Err(TryLockError::Error(error)) => return Err(io_error(error)),
            }
            let opened = file.metadata().map_err(io_error)?;
            let named = std::fs::metadata(&partial);
            if named.is_ok_and(|named| (named.dev(), named.ino()) == (opened.dev(), opened.ino())) {
                let created = Self { file, path: partial.clone(), is_renamed: false };
                created.file.set_len(0).map_err(io_error)?;
                return Ok(created);
            }
        }
    }

    /// Gives the file its name, in place of what had it.
    pub(super) fn rename_to(&mut self, path: &Path) -> Result<()> {
        std::fs::rename(&self.path, path).map_err(|error| Error::io(path.display(), &error))?;
        self.is_renamed = true;
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.is_renamed {
            // Nothing to do about a failure: the next writer takes the file over.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The folder that a path's last name is in.
pub(super) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

pub(super) fn invalid(path: &Path, text: &str) -> Error {
    Error::new(ErrorCode::InvalidArgument, format!("{}: {text}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::kernel;

    #[test]
    fn chunks_join_to_the_kernel_s_pattern() {
        let mut whole = vec![0; 1003];
        kernel::pattern(&mut whole, 5);
        let mut parts = vec![0; 1003];
        write_pattern(&mut parts[..512], 5, 0);
        write_pattern(&mut parts[512..], 5, 64);
        assert_eq!(whole, parts);
    }
}
