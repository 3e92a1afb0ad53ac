//! Two facts about the process: it has forked, it is exiting.
//!
//! After either, no driver call may be made: a forked child has no usable context, and at exit the
//! driver may be gone already. [`ending`] is asked by every entry and costs about a nanosecond. The
//! fork is seen through one OS page that the kernel wipes in the child (`MADV_WIPEONFORK`,
//! madvise(2)), the exit through one handler that is registered after the driver was loaded, so
//! that it runs before the driver's own. Nothing is freed here.

#![expect(unsafe_code, reason = "atexit and an atomic in a mapping that the kernel writes")]

use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use crate::error::{Error, ErrorCode, Result};

/// 1 while the process may call the driver; before [`watch`], and where a fork is not seen.
static ALIVE: AtomicU8 = AtomicU8::new(1);
/// The byte to ask: `ALIVE`, or the one that the kernel wipes in a forked child.
static ASKED: AtomicPtr<AtomicU8> = AtomicPtr::new((&raw const ALIVE).cast_mut());

/// Starts watching for fork and exit; called after the driver is open. Later calls do nothing.
///
/// Where the kernel has no `MADV_WIPEONFORK` (before 4.14) a fork is not seen.
pub fn watch() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: `on_exit` is a plain C function of static life time; atexit may be called at any
        // time and its failure only means that the exit is not seen.
        unsafe { libc::atexit(on_exit) };
        if let Some(flag) = fork_flag() {
            ASKED.store(std::ptr::from_ref(flag).cast_mut(), Ordering::Release);
        }
    });
}

/// Whether the process is exiting or is the child of a fork: then nothing may be called or freed.
#[inline]
#[must_use]
pub fn ending() -> bool {
    asked().load(Ordering::Relaxed) == 0
}

#[inline]
fn asked() -> &'static AtomicU8 {
    // SAFETY: points to a static or to a leaked mapping, both of which live until the process ends
    // and are only used through this atomic.
    unsafe { &*ASKED.load(Ordering::Acquire) }
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
    asked().store(0, Ordering::Relaxed);
}

fn fork_flag() -> Option<&'static AtomicU8> {
    let mut page = memmap2::MmapMut::map_anon(1).ok()?;
    let start = page.as_mut_ptr().cast();
    // SAFETY: the advice is on one byte of a private anonymous mapping of ours, and changes only
    // what a child sees there.
    if unsafe { libc::madvise(start, 1, libc::MADV_WIPEONFORK) } != 0 {
        return None;
    }
    // The mapping is never unmapped: the flag is asked until the process ends.
    let page: &'static mut memmap2::MmapMut = Box::leak(Box::new(page));
    // SAFETY: the pointer is to one byte of a leaked, writable mapping that only this atomic uses.
    let flag = unsafe { AtomicU8::from_ptr(page.as_mut_ptr()) };
    flag.store(1, Ordering::Relaxed);
    Some(flag)
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
