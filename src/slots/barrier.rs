//! A store-load barrier that the rare side pays for.
//!
//! Two threads each write one thing and then read the other's: at least one must see the other's
//! write. Usually both need a full barrier, 5 ns. Here the frequent side only keeps the compiler
//! from reordering, and the rare side has the kernel put a barrier into every running thread
//! (`membarrier`, membarrier(2), Linux 4.14). Where the kernel refuses, both pay.
//!
//! A kernel that agreed may refuse later, when a sandbox closes around the process. From then on
//! both pay, too. But a frequent side that did not pay yet can be reached by nothing else that is
//! sure on every processor, so the rare side is told, and must do without what it wanted to know.

#![expect(unsafe_code, reason = "a system call that the C library has no function for")]

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence};

use crate::sync::memory_fence;

/// Whether the frequent side leaves the barrier to the rare one.
static SPARED: AtomicBool = AtomicBool::new(false);
/// Attempts at a barrier that the kernel has no memory for.
const ATTEMPTS: u32 = 100;

/// What a frequent side has between its write and its read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Paid {
    /// A full barrier, each time.
    Always,
    /// Perhaps nothing but the compiler's order.
    Perhaps,
}

/// Registers the process; before the first [`light`]. Tells what the frequent side pays for things
/// that nobody knows yet: it never pays less afterwards.
pub(super) fn prepare() -> Paid {
    static PREPARE: Once = Once::new();
    // Models are of the case where both pay: no model reaches into threads as the kernel does.
    PREPARE.call_once(|| {
        let registered =
            !cfg!(vbar_loom) && membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) == 0;
        SPARED.store(registered, Ordering::SeqCst);
    });
    if SPARED.load(Ordering::SeqCst) { Paid::Perhaps } else { Paid::Always }
}

/// The frequent side's barrier, between its write and its read.
#[inline]
pub(super) fn light() {
    if SPARED.load(Ordering::Relaxed) {
        compiler_fence(Ordering::SeqCst);
    } else {
        memory_fence(Ordering::SeqCst);
    }
}

/// The rare side's barrier, between its write and its read. False when it is none: then what the
/// rare side reads says nothing.
#[cold]
#[must_use]
pub(super) fn heavy(paid: Paid) -> bool {
    memory_fence(Ordering::SeqCst);
    if paid == Paid::Always {
        return true;
    }
    let mut refusal = None;
    for _ in 0..ATTEMPTS {
        if membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED) == 0 {
            return true;
        }
        let error = std::io::Error::last_os_error();
        // Memory of the kernel comes back.
        let is_over = error.raw_os_error() != Some(libc::ENOMEM);
        refusal = Some(error);
        if is_over {
            break;
        }
        std::thread::yield_now();
    }
    if let (true, Some(error)) = (SPARED.swap(false, Ordering::SeqCst), refusal) {
        log::error!("membarrier, which worked before: {error}; what was open then is never freed");
    }
    false
}

fn membarrier(command: libc::c_int) -> libc::c_long {
    // SAFETY: the call takes numbers and touches no memory of the process.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) }
}
