//! The system calls of the simulated device: its memory, its address space, its page-locked pages.
//!
//! Everything here takes and returns plain numbers; who owns which address is the callers' affair,
//! and each function says what it asks of them.
#![expect(unsafe_code, reason = "mmap, memfd_create and copies between raw addresses")]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

fn checked(result: libc::c_int) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn pointer(address: u64) -> *mut libc::c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// `mmap` of anything; the address it chose.
///
/// # Safety
/// With `MAP_FIXED` the range `address..address + bytes` belongs to the caller.
unsafe fn map(
    address: u64,
    bytes: u64,
    protection: i32,
    flags: i32,
    file: Option<(&OwnedFd, u64)>,
) -> io::Result<u64> {
    let (descriptor, offset) = file.map_or((-1, 0), |(file, offset)| (file.as_raw_fd(), offset));
    let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
    let (at, length) = (pointer(address), bytes as usize);
    // SAFETY: without MAP_FIXED the kernel picks unused addresses; with it the caller owns them.
    let mapped = unsafe { libc::mmap(at, length, protection, flags, descriptor, offset) };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(mapped.expose_provenance() as u64)
}

const NOTHING: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// A memory file of `bytes`, sparse, that can be neither grown nor shrunk.
pub(super) fn memory_file(bytes: u64) -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a C string literal.
    let descriptor = unsafe { libc::memfd_create(c"vbar-sim-vram".as_ptr(), flags) };
    checked(descriptor)?;
    // SAFETY: the descriptor was just made and nobody else has it.
    let file = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let length = libc::off_t::try_from(bytes).map_err(io::Error::other)?;
    // SAFETY: changes only the file behind an open descriptor.
    checked(unsafe { libc::ftruncate(file.as_raw_fd(), length) })?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: F_ADD_SEALS takes an integer and touches no memory.
    checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
    Ok(file)
}

/// Gives the memory of a range of `file` back; it reads as zeros afterwards.
pub(super) fn punch(file: &OwnedFd, offset: u64, bytes: u64) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (offset, bytes) = (offset as libc::off_t, bytes as libc::off_t);
    // SAFETY: changes only the file; the caller has taken the range out of use.
    checked(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, bytes) })
}

/// Maps all of `file`, readable and writable: the device's own view of its memory.
pub(super) fn map_window(file: &OwnedFd, bytes: u64) -> io::Result<u64> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: no MAP_FIXED.
    let window =
        unsafe { map(0, bytes, protection, flags | libc::MAP_NORESERVE, Some((file, 0))) }?;
    // SAFETY: the range was just mapped; advice that the kernel does not take changes nothing.
    unsafe { libc::madvise(pointer(window), bytes as usize, libc::MADV_HUGEPAGE) };
    Ok(window)
}

/// Puts memory behind a range of the window at once. A kernel that cannot does it fault by fault.
pub(super) fn populate(address: u64, bytes: u64) {
    // SAFETY: the advice changes no byte; a range that is not mapped is refused.
    unsafe { libc::madvise(pointer(address), bytes as usize, libc::MADV_POPULATE_WRITE) };
}

/// Reserves addresses with nothing behind them, aligned to a power of two.
pub(super) fn reserve(bytes: u64, alignment: u64) -> io::Result<u64> {
    let total = bytes.checked_add(alignment).ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: no MAP_FIXED.
    let base = unsafe { map(0, total, libc::PROT_NONE, NOTHING, None) }?;
    let start = base.next_multiple_of(alignment);
    for (from, to) in [(base, start), (start + bytes, base + total)] {
        if to > from {
            // SAFETY: the ends outside the aligned range were just mapped and nobody has them. A
            // failure leaves them reserved, which costs nothing.
            let _ = unsafe { unmap(from, to - from) };
        }
    }
    Ok(start)
}

/// Gives a range of mapped addresses of ours back to the operating system.
///
/// # Safety
/// The range was mapped by the caller and nobody uses it any more.
pub(super) unsafe fn unmap(address: u64, bytes: u64) -> io::Result<()> {
    // SAFETY: the caller gives up a range of its own.
    checked(unsafe { libc::munmap(pointer(address), bytes as usize) })
}

/// Puts a range of `file` at reserved addresses, without access.
///
/// # Safety
/// The range lies inside a reservation of the caller.
pub(super) unsafe fn map_view(
    address: u64,
    bytes: u64,
    file: &OwnedFd,
    offset: u64,
) -> io::Result<()> {
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: the range belongs to the caller.
    unsafe { map(address, bytes, libc::PROT_NONE, flags, Some((file, offset))) }.map(drop)
}

/// Turns a range inside a reservation back into nothing.
///
/// # Safety
/// The range lies inside a reservation of the caller, and nobody uses it any more.
pub(super) unsafe fn unmap_view(address: u64, bytes: u64) -> io::Result<()> {
    // SAFETY: the range belongs to the caller.
    unsafe { map(address, bytes, libc::PROT_NONE, NOTHING | libc::MAP_FIXED, None) }.map(drop)
}

/// Allows reads and writes of a mapped view.
///
/// # Safety
/// The range lies inside a reservation of the caller.
pub(super) unsafe fn allow_access(address: u64, bytes: u64) -> io::Result<()> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the range belongs to the caller.
    checked(unsafe { libc::mprotect(pointer(address), bytes as usize, protection) })
}

/// Zeroed pages of ordinary memory.
pub(super) fn allocate(bytes: u64) -> io::Result<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: no MAP_FIXED.
    unsafe { map(0, bytes, libc::PROT_READ | libc::PROT_WRITE, flags, None) }
}

/// Whether something is mapped at every OS page of a range.
pub(super) fn is_mapped(start: u64, end: u64) -> bool {
    const OS_PAGE: u64 = 4096;
    // The range is the program's, and may be longer than anything: the first hole ends the look.
    let mut states = [0u8; 1024];
    let mut from = start & !(OS_PAGE - 1);
    while from < end {
        let bytes = (end - from).min(states.len() as u64 * OS_PAGE);
        // SAFETY: writes a byte for each page of the range, and reads none of its memory.
        let code = unsafe { libc::mincore(pointer(from), bytes as usize, states.as_mut_ptr()) };
        if code != 0 {
            return false;
        }
        from += bytes;
    }
    true
}

/// What a range of addresses shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mapping {
    /// Memory of the process.
    Anonymous,
    /// The pages of a file themselves.
    SharedFile,
    /// Pages of a file until they are written.
    PrivateFile,
}

/// What is mapped in a range, piece by piece (proc_pid_maps(5)). Nothing where the system does not
/// tell.
pub(super) fn mappings(start: u64, end: u64) -> Vec<Mapping> {
    let text = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mapping = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (from, to) = words.next()?.split_once('-')?;
        let (from, to) = (u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?);
        let (shared, inode) = (words.next()?.ends_with('s'), words.nth(2)?);
        let kind = match (inode, shared) {
            ("0", _) => Mapping::Anonymous,
            (_, true) => Mapping::SharedFile,
            (_, false) => Mapping::PrivateFile,
        };
        (from < end && start < to).then_some(kind)
    };
    text.lines().filter_map(mapping).collect()
}

/// Copies from memory that may not be there, by a call of the system. Returns the bytes that came,
/// from the first on.
///
/// # Safety
/// `target` is writable for `bytes`.
pub(super) unsafe fn copy_readable(target: u64, source: u64, bytes: usize) -> usize {
    let to = libc::iovec { iov_base: pointer(target), iov_len: bytes };
    let from = libc::iovec { iov_base: pointer(source), iov_len: bytes };
    // SAFETY: writes to the caller's target only; a source that cannot be read is an error.
    let copied = unsafe { libc::process_vm_readv(std::process::id() as i32, &to, 1, &from, 1, 0) };
    usize::try_from(copied).unwrap_or(0)
}

/// As [`copy_readable`], and `known` where that cannot read, OS page by OS page.
///
/// # Safety
/// `target` is writable for as many bytes as are known.
pub(super) unsafe fn copy_or(target: u64, source: u64, known: &[u8]) {
    const OS_PAGE: u64 = 4096;
    let bytes = known.len();
    // SAFETY: the caller's target.
    if unsafe { copy_readable(target, source, bytes) } == bytes {
        return;
    }
    let mut done = 0;
    while done < bytes {
        let at = source + done as u64;
        let length = ((OS_PAGE - at % OS_PAGE) as usize).min(bytes - done);
        let (to, rest) = (target + done as u64, &known[done..done + length]);
        // SAFETY: a part of the caller's target.
        if unsafe { copy_readable(to, at, length) } < length {
            // SAFETY: as above, from memory of ours.
            unsafe { copy(to, rest.as_ptr().expose_provenance() as u64, length) };
        }
        done += length;
    }
}

/// Copies between two ranges of memory.
///
/// # Safety
/// `source` is readable, `target` writable for `bytes`; they do not overlap. Another stream may
/// touch the same bytes at the same time: that is a breach of the program under test, which the
/// happens-before check reports; the bytes are then undefined, as on a device.
pub(super) unsafe fn copy(target: u64, source: u64, bytes: usize) {
    let (target, source) = (pointer(target).cast::<u8>(), pointer(source).cast::<u8>());
    // SAFETY: both ranges are valid for `bytes`, as the caller promises.
    unsafe { ptr::copy_nonoverlapping(source, target, bytes) }
}

/// Sets `bytes` bytes to `value`.
///
/// # Safety
/// As for the target of [`copy`].
pub(super) unsafe fn fill(target: u64, value: u8, bytes: usize) {
    // SAFETY: the range is writable, as the caller promises.
    unsafe { ptr::write_bytes(pointer(target).cast::<u8>(), value, bytes) }
}

/// Adds to a 64-bit word, atomically, modulo 2^64.
///
/// # Safety
/// `target` is 8-byte aligned and writable.
pub(super) unsafe fn add(target: u64, value: u64) {
    let word = pointer(target).cast::<u64>();
    // SAFETY: aligned and valid, as the caller promises, for as long as the reference is used.
    let word = unsafe { std::sync::atomic::AtomicU64::from_ptr(word) };
    word.fetch_add(value, std::sync::atomic::Ordering::Relaxed);
}
