//! What VBARs are filled from, as callers describe it: files and memory of their own.

#![expect(unsafe_code, reason = "memory and its owner are a caller's raw pointers")]

use std::ffi::{c_char, c_void};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::call::{invalid, keeping_message};
use super::device::choice;
use super::value::{Plain, read_path};
use crate::error::{Error, Result};
use crate::host::bound::Source;
use crate::host::memory::{HostLock, HostMemory};
use crate::host::source::ModelFile;
use crate::process;

/// Called when memory that a VBAR was bound to is not read any more, with the context given with
/// it: by any thread, of the program in a call or of the library. It may call the CUDA driver, and
/// no function of this library.
pub type VbarRelease = Option<unsafe extern "C" fn(context: *mut c_void)>;

/// What is asked of memory that a VBAR is to be bound to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarHostLock {
    /// The driver is asked whether all of it is page-locked (`cuMemHostAlloc`,
    /// `cuMemHostRegister`, torch's `pin_memory`). Then the device reads it directly, without
    /// staging slots; other memory goes through these, or through the page-locked cache.
    Either = 0,
    /// It must be page-locked, all of it; else it is not bound.
    Required = 1,
}

/// A file, or host memory of the program's, that VBARs are filled from.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarBindSource {
    /// Path of a file; NULL where something else says what it is.
    pub path: *const c_char,
    /// An open descriptor, of which the library keeps a duplicate; used where `path` and `memory`
    /// are NULL and `memory_bytes` is 0.
    pub descriptor: i32,
    /// Of memory, a `VbarHostLock`; else 0.
    pub host_lock: u32,
    /// Host memory, used where `path` is NULL. From the call on, and until `release` is called, it
    /// stays mapped, nobody writes it, and what is page-locked of it stays so, in the same ranges.
    /// Without a `release` that is until `vbar_bar_destroy_wait`, or the close of the device, has
    /// returned `VBAR_STATUS_OK`: a VBAR that was destroyed may still be copied to.
    pub memory: *const c_void,
    /// Length of that memory in bytes.
    pub memory_bytes: u64,
    /// Called exactly once, when the memory is not read any more: after the VBAR was destroyed and
    /// its last copy is done, or before a binding that fails returns. Not called where that end is
    /// never seen: the device is lost, or the process ends. NULL where nobody is to be called.
    pub release: VbarRelease,
    /// Given to `release`.
    pub context: *mut c_void,
}

// SAFETY: integers, raw pointers, and a pointer to a function that may be NULL.
unsafe impl Plain for VbarBindSource {}

/// Raises a flag: a `release` for programs that look rather than be called, with a `context` that
/// points to a `uint32_t`. It is set to 1, visible after all reads of the memory; NULL is left
/// alone. Thread-safe.
///
/// # Safety
/// `flag` is NULL or points to an aligned `uint32_t` that may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_flag_raise(flag: *mut c_void) {
    if !flag.is_null() && flag.cast::<u32>().is_aligned() {
        // SAFETY: not NULL, aligned, and the caller's to be written to.
        let flag = unsafe { std::sync::atomic::AtomicU32::from_ptr(flag.cast()) };
        flag.store(1, std::sync::atomic::Ordering::Release);
    }
}

/// Tells whoever owns memory that it is not read any more, once.
struct Owner {
    release: VbarRelease,
    context: *mut c_void,
}

// SAFETY: the context is only handed back to its function, which any thread may call.
unsafe impl Send for Owner {}

impl Drop for Owner {
    fn drop(&mut self) {
        let Some(release) = self.release.filter(|_| !process::ending()) else { return };
        // SAFETY: whoever gave the function promised that any thread may call it with its context,
        // once.
        keeping_message(|| unsafe { release(self.context) });
    }
}

/// A source as it was given, and the owner of its memory.
pub(super) struct Taken {
    source: VbarBindSource,
    owner: Owner,
}

/// Takes the sources over: their owners are told from here on.
pub(super) fn take(sources: &[VbarBindSource]) -> Vec<Taken> {
    let take = |source: &VbarBindSource| {
        let VbarBindSource { release, context, .. } = *source;
        Taken { source: *source, owner: Owner { release, context } }
    };
    sources.iter().map(take).collect()
}

impl Taken {
    /// Opens the file, or takes the memory.
    ///
    /// # Errors
    /// `InvalidArgument` for what is neither, `Io`, `Format`.
    pub(super) fn open(self) -> Result<Source> {
        let Self { source, owner } = self;
        let is_memory = !source.memory.is_null() || source.memory_bytes > 0;
        match (source.path.is_null(), is_memory) {
            (true, true) => open_memory(&source, owner).map(Source::from),
            (false, true) => Err(invalid("a source has a path and memory: it is one of them")),
            (_, false) if source.host_lock != 0 => {
                Err(invalid(format!("a file's host_lock is {}, not 0", source.host_lock)))
            }
            (_, false) if source.release.is_some() => Err(invalid("a file has no release")),
            (false, false) => open_path(source.path),
            (true, false) => open_descriptor(source.descriptor),
        }
    }
}

fn open_memory(source: &VbarBindSource, owner: Owner) -> Result<HostMemory> {
    let lock = choice("host_lock", source.host_lock, [HostLock::Either, HostLock::Required])?;
    let bytes = usize::try_from(source.memory_bytes);
    let bytes = bytes.map_err(|_| invalid("memory of more bytes than there are addresses"))?;
    // SAFETY: the caller promises that the bytes stay readable and as they are until the owner is
    // told.
    let memory = unsafe { HostMemory::from_raw(source.memory.cast(), bytes, owner) }?;
    Ok(memory.with_lock(lock))
}

fn open_path(path: *const c_char) -> Result<Source> {
    Ok(Arc::new(ModelFile::open(read_path(path)?)?).into())
}

fn open_descriptor(descriptor: i32) -> Result<Source> {
    let duplicated = duplicate(descriptor)?;
    let path = std::fs::read_link(format!("/proc/self/fd/{descriptor}"));
    let name = path.map(|path| path.display().to_string());
    let name = name.unwrap_or_else(|_| format!("descriptor {descriptor}"));
    Ok(Arc::new(ModelFile::from_fd(duplicated, name)?).into())
}

/// A descriptor of our own for the file behind a caller's.
///
/// # Errors
/// `InvalidArgument` for a number that is no descriptor, `Io`.
pub(super) fn duplicate(descriptor: i32) -> Result<OwnedFd> {
    if descriptor < 0 {
        return Err(invalid(format!("descriptor {descriptor} is none")));
    }
    // SAFETY: not -1. Used for the one call below, which tells a number that is not open; nothing
    // is closed through it.
    let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let duplicated = borrowed.try_clone_to_owned();
    duplicated.map_err(|error| Error::io(format_args!("descriptor {descriptor}"), &error))
}
