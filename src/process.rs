//! Two facts about the process: it has forked, it is exiting.
//!
//! After either, no driver call may be made: a forked child has no usable context, and at exit the
//! driver may be gone already. [`ending`] is asked by every entry and costs about a nanosecond. The
//! fork is seen through one OS page that the kernel wipes in the child (`MADV_WIPEONFORK`,
//! madvise(2)), the exit through one handler that is registered after the driver was loaded, so
//! that it runs before the driver's own. Nothing is freed here.

#![expect(unsafe_code, reason = "atexit and an atomic in a mapping that the kernel writes")]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use crate::error::{Error, ErrorCode, Result};

static EXITING: AtomicBool = AtomicBool::new(false);
static ALIVE: OnceLock<&'static AtomicU8> = OnceLock::new();

/// Starts watching for fork and exit; called after the driver is open. Later calls do nothing.
///
/// Where the kernel has no `MADV_WIPEONFORK` (before 4.14) a fork is not seen.
pub fn watch() {
    ALIVE.get_or_init(|| {
        // SAFETY: `on_exit` is a plain C function of static life time; atexit may be called at any
        // time and its failure only means that the exit is not seen.
        unsafe { libc::atexit(on_exit) };
        fork_flag()
    });
}

/// Whether the process is exiting or is the child of a fork: then nothing may be called or freed.
#[inline]
#[must_use]
pub fn ending() -> bool {
    EXITING.load(Ordering::Relaxed)
        || ALIVE.get().is_some_and(|alive| alive.load(Ordering::Relaxed) == 0)
}

/// Whether calls may be made.
///
/// # Errors
/// `ProcessEnding`.
#[inline]
pub fn check() -> Result<()> {
    if ending() {
        return Err(Error::new(ErrorCode::ProcessEnding, "the process is ending or forked"));
    }
    Ok(())
}

extern "C" fn on_exit() {
    EXITING.store(true, Ordering::Relaxed);
}

fn fork_flag() -> &'static AtomicU8 {
    static ALWAYS: AtomicU8 = AtomicU8::new(1);
    let Ok(mut page) = memmap2::MmapMut::map_anon(1) else { return &ALWAYS };
    let start = page.as_mut_ptr().cast();
    // SAFETY: the advice is on one byte of a private anonymous mapping of ours, and changes only
    // what a child sees there.
    if unsafe { libc::madvise(start, 1, libc::MADV_WIPEONFORK) } != 0 {
        return &ALWAYS;
    }
    // The mapping is never unmapped: the flag is asked until the process ends.
    let page: &'static mut memmap2::MmapMut = Box::leak(Box::new(page));
    // SAFETY: the pointer is to one byte of a leaked, writable mapping that only this atomic uses.
    let flag = unsafe { AtomicU8::from_ptr(page.as_mut_ptr()) };
    flag.store(1, Ordering::Relaxed);
    flag
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_knows_it() {
        watch();
        assert!(!ending());
        // SAFETY: the child calls only `ending` and `_exit`, both safe after a fork.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::from(!ending());
            // SAFETY: ends the child without running handlers of the parent.
            unsafe { libc::_exit(code) };
        }
        assert!(child > 0, "fork failed");
        let mut status = 0;
        // SAFETY: `status` is a valid place for the child's status.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(waited, child);
        assert_eq!(status, 0, "the child did not see that it is one");
        assert!(!ending());
    }
}
