//! A store-load barrier that the rare side pays for.
//!
//! Two threads each write one thing and then read the other's: at least one must see the other's
//! write. Usually both need a full barrier, 5 ns. Here the frequent side only keeps the compiler
//! from reordering, and the rare side has the kernel put a barrier into every running thread
//! (`membarrier`, membarrier(2), Linux 4.14). Where the kernel refuses, both pay.

#![expect(unsafe_code, reason = "a system call that the C library has no function for")]

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence, fence};

/// Whether the rare side's barrier reaches all threads.
static REACHES_ALL: AtomicBool = AtomicBool::new(false);

/// Registers the process; before the first [`light`]. Later calls do nothing.
pub(super) fn prepare() {
    static PREPARE: Once = Once::new();
    PREPARE.call_once(|| {
        let registered = membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) == 0;
        REACHES_ALL.store(registered, Ordering::SeqCst);
    });
}

/// The frequent side's barrier, between its write and its read.
#[inline]
pub(super) fn light() {
    if REACHES_ALL.load(Ordering::Relaxed) {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// The rare side's barrier, between its write and its read.
#[cold]
pub(super) fn heavy() {
    fence(Ordering::SeqCst);
    if REACHES_ALL.load(Ordering::Relaxed) {
        // A registered process can only fail for want of kernel memory, which comes back.
        while membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED) != 0 {
            std::thread::yield_now();
        }
    }
}

fn membarrier(command: libc::c_int) -> libc::c_long {
    // SAFETY: the call takes numbers and touches no memory of the process.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) }
}
