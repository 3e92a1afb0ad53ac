//! Two facts about the process: it has forked, it is exiting. And what the library's own threads
//! owe to it. And which variables of the environment it may heed.
//!
//! After either, no driver call may be made: a forked child has no usable context, and at exit the
//! driver may be gone already. [`ending`] is asked by every entry and costs about a nanosecond. The
//! fork is seen through one OS page that the kernel wipes in the child (`MADV_WIPEONFORK`,
//! madvise(2)), the exit through one handler that is registered after the driver was loaded, so
//! that it runs before the driver's own. Nothing is freed here.
//!
//! A child that was forked before the library had anything is no such child: it may open devices
//! of its own. So the forks that count are those while somebody is [`entering`], which is said
//! before the first lock of an opening is taken, and all those after it has succeeded.
//!
//! A thread of the library's own takes none of the program's signals ([`spawn`]), and the exit
//! waits a moment for what it is in the middle of ([`work`]).

#![expect(unsafe_code, reason = "atexit, signal masks, an atomic in a mapping the kernel writes")]

use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, Ordering, fence};
use std::sync::{Once, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorCode, Result};

/// What the byte says while calls may be made.
const ALIVE: u8 = 1;
/// What it says once the process exits.
const EXITING: u8 = 2;
/// What the kernel writes: it is a forked child, unless nobody was [`entering`] at the fork.
const WIPED: u8 = 0;

/// The byte before the first [`entering`], and where a fork is not seen.
static UNWATCHED: AtomicU8 = AtomicU8::new(ALIVE);
/// The byte to ask: `UNWATCHED`, or the one that the kernel wipes in a forked child.
static ASKED: AtomicPtr<AtomicU8> = AtomicPtr::new((&raw const UNWATCHED).cast_mut());
/// Calls that are entering, and what has stayed of those that succeeded. A forked child has a copy
/// of it, which tells what its parent was doing.
static ENTERED: AtomicU32 = AtomicU32::new(0);
/// Whether one of those that succeeded has stayed.
static STAYED: AtomicBool = AtomicBool::new(false);

/// A call that may be in the middle of something at a fork, from [`entering`].
#[must_use = "it ends when it is dropped"]
pub struct Entering(());

/// As [`entering`], for what may be called in a child.
///
/// # Errors
/// `ProcessEnding`.
pub fn enter() -> Result<Entering> {
    check()?;
    Ok(entering())
}

/// Says, before any lock is taken, that the calling thread begins what makes a child that is forked
/// meanwhile useless: it would have copies of locks that nobody gives back, and of a driver that is
/// half open. Takes no lock itself. Where the kernel has no `MADV_WIPEONFORK` (before 4.14) a fork
/// is not seen.
pub fn entering() -> Entering {
    // The byte is there before the count says so: a fork in between is one of before. In such a
    // child it is put right first, so that its own count is not taken for its parent's.
    watch_forks();
    let _ = is_forked();
    ENTERED.fetch_add(1, Ordering::SeqCst);
    Entering(())
}

impl Entering {
    /// It has succeeded: every child from now on is one that may do nothing.
    pub fn stay(self) {
        // One of them is enough, however often a device is opened.
        if !STAYED.swap(true, Ordering::SeqCst) {
            std::mem::forget(self);
        }
    }
}

impl Drop for Entering {
    fn drop(&mut self) {
        ENTERED.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Starts watching for fork and exit; called after the driver is open. Later calls do nothing.
pub fn watch() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        entering().stay();
        // SAFETY: `on_exit` is a plain C function of static life time; atexit may be called at any
        // time and its failure only means that the exit is not seen.
        unsafe { libc::atexit(on_exit) };
    });
}

/// Puts the byte that the kernel wipes in its place, once. Threads that come here at the same time
/// each make one, and one of them stays: a lock would be what a fork finds held.
fn watch_forks() {
    let unwatched = (&raw const UNWATCHED).cast_mut();
    if ASKED.load(Ordering::Acquire) != unwatched {
        return;
    }
    let Some(flag) = fork_flag() else { return };
    let made = std::ptr::from_ref(flag).cast_mut();
    // One OS page stays behind where another thread was first.
    let _ = ASKED.compare_exchange(unwatched, made, Ordering::AcqRel, Ordering::Acquire);
}

/// Whether the process is exiting or is the child of a fork: then nothing may be called, freed or
/// locked. Locks that other threads held, or waited for, at a fork are so for ever in the child; at
/// exit a thread that holds one may have been interrupted by the exit itself.
#[inline]
#[must_use]
pub fn ending() -> bool {
    match asked().load(Ordering::Relaxed) {
        ALIVE => false,
        WIPED => is_child(),
        _ => true,
    }
}

/// Whether the process is the child of a fork.
#[inline]
#[must_use]
pub(crate) fn is_forked() -> bool {
    asked().load(Ordering::Relaxed) == WIPED && is_child()
}

/// In a child: whether its parent had, or was about to have, anything at the fork. If it had not,
/// the child is a process as any other from now on.
#[cold]
fn is_child() -> bool {
    if ENTERED.load(Ordering::SeqCst) == 0 {
        // Not over what another thread of the child has made of it meanwhile.
        let (now, then) = (Ordering::SeqCst, Ordering::SeqCst);
        let _ = asked().compare_exchange(WIPED, ALIVE, now, then);
    }
    // What another thread of the child has entered, it entered after it had come by here.
    asked().load(Ordering::SeqCst) == WIPED
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
    if ending() { Err(ended()) } else { Ok(()) }
}

/// The two are one code: nothing can be done after either.
#[cold]
fn ended() -> Error {
    let text = match is_forked() {
        true => {
            "the process is ending or forked: it is the child of a fork, and CUDA stays with the \
             process that opened it; start workers with spawn or exec, or open devices after the \
             fork"
        }
        false => "the process is ending or forked: it exits, and nothing is done any more",
    };
    Error::new(ErrorCode::ProcessEnding, text)
}

/// A variable of the environment that is set to something, in a process whose user may say what it
/// does. Where the kernel raised its rights at its start, by a setuid or setgid bit or by
/// capabilities of its file (`AT_SECURE`, getauxval(3)), the environment is another user's and
/// counts for nothing: it would choose what is written, and where.
#[must_use]
pub fn variable(name: &str) -> Option<OsString> {
    if is_privileged() {
        return None;
    }
    std::env::var_os(name).filter(|text| !text.is_empty())
}

/// Whether the process has rights that its user has not.
fn is_privileged() -> bool {
    // SAFETY: reads the auxiliary vector of the process, which never changes.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// What is done first of all at the exit, while calls may still be made.
static LAST: OnceLock<fn()> = OnceLock::new();

/// Has something done when the process exits by itself: `exit`, or the end of `main`. The first one
/// counts. Whatever it locks may be held by the thread that exits, if a signal's handler exits: it
/// must not wait for ever. The program's own means of telling may be gone.
pub(crate) fn at_exit(last: fn()) {
    let _ = LAST.set(last);
}

extern "C" fn on_exit() {
    // A forked child has none of its parent's threads.
    if ending() {
        return;
    }
    if let Some(last) = LAST.get() {
        last();
    }
    asked().store(EXITING, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    let started = Instant::now();
    while WORKING.load(Ordering::Acquire) > 0 && started.elapsed() < EXIT_PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Threads of the library's own that are inside the driver, or about to be.
static WORKING: AtomicU32 = AtomicU32::new(0);
/// The exit waits this long for them.
const EXIT_PATIENCE: Duration = Duration::from_millis(50);

/// A piece of work of a thread of the library's own, from [`work`].
pub struct Work(());

/// Begins a piece of work on a thread of the library's own; `None` when the process is ending, and
/// the driver may not be called. The exit waits for its end, though not for long.
#[must_use]
pub fn work() -> Option<Work> {
    WORKING.fetch_add(1, Ordering::Relaxed);
    let work = Work(());
    // The exit raises its flag and then looks at the count, here it is the other way round: one of
    // the two sees the other.
    fence(Ordering::SeqCst);
    (!ending()).then_some(work)
}

impl Drop for Work {
    fn drop(&mut self) {
        WORKING.fetch_sub(1, Ordering::Release);
    }
}

/// Starts a thread of the library's own. Signals meant for the program are blocked on it, so that
/// the program's handlers run on the program's threads; those that a fault of the thread itself
/// raises are not.
///
/// # Errors
/// What the operating system says.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    let mut blocked = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `blocked` is a place for a set, which the call fills.
    unsafe { libc::sigfillset(blocked.as_mut_ptr()) };
    for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP] {
        // SAFETY: the set was filled above, and the numbers are signals.
        unsafe { libc::sigdelset(blocked.as_mut_ptr(), fault) };
    }
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `blocked` is a filled set, `before` a place for one. Only this thread's mask changes,
    // which the new thread inherits.
    let code =
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, blocked.as_ptr(), before.as_mut_ptr()) };
    if code != 0 {
        return Err(std::io::Error::from_raw_os_error(code));
    }
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        OWN.set(true);
        body();
    });
    // SAFETY: the call above succeeded and wrote this thread's mask to `before`.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    thread
}

thread_local!(static OWN: std::cell::Cell<bool> = const { std::cell::Cell::new(false) });

/// Whether the calling thread is the library's own.
#[must_use]
pub fn is_own_thread() -> bool {
    OWN.get()
}

fn fork_flag() -> Option<&'static AtomicU8> {
    let mut page = memmap2::MmapMut::map_anon(1).ok()?;
    let start = page.as_mut_ptr().cast();
    // SAFETY: the advice is on one byte of a private anonymous mapping of ours, and changes only
    // what a child sees there.
    if unsafe { libc::madvise(start, 1, libc::MADV_WIPEONFORK) } != 0 {
        return None;
    }
    let byte = page.as_mut_ptr();
    // The mapping is never unmapped: the flag is asked until the process ends.
    std::mem::forget(page);
    // SAFETY: the pointer is to one byte of a leaked, writable mapping that only this atomic uses.
    let flag = unsafe { AtomicU8::from_ptr(byte) };
    flag.store(ALIVE, Ordering::Relaxed);
    Some(flag)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a child says that it is good.
    fn in_child(look: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child calls what is under test, which takes no lock, and `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::from(!look());
            // SAFETY: ends the child without running handlers of the parent.
            unsafe { libc::_exit(code) };
        }
        assert!(child > 0, "fork failed");
        let mut status = 0;
        // SAFETY: `status` is a valid place for the child's status.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        waited == child && status == 0
    }

    #[test]
    fn a_forked_child_knows_it() {
        watch();
        assert!(!ending());
        assert!(in_child(|| ending() && is_forked()), "the child did not see that it is one");
        assert!(!ending());
    }

    /// In a process where nobody else enters anything: its own children, and theirs.
    #[test]
    fn a_child_of_before_is_a_process_as_any_other() {
        let alone = || {
            // As in a process that has just begun, whatever other tests did in this one.
            ENTERED.store(0, Ordering::SeqCst);
            STAYED.store(false, Ordering::SeqCst);
            asked().store(ALIVE, Ordering::SeqCst);
            let failed = entering();
            // The parent is entering: whoever comes of that may do nothing, and none of theirs.
            let mut good = in_child(|| ending() && is_forked() && in_child(ending));
            drop(failed);
            // That has failed: the next one may, and so may its own child before it enters.
            good &= in_child(|| {
                let mut good = !is_forked() && !ending() && in_child(|| !ending());
                let entered = entering();
                good &= !ending() && in_child(ending);
                entered.stay();
                good && !ending() && in_child(ending)
            });
            // A child that enters before it asks, too.
            good && in_child(|| {
                let _entered = entering();
                !ending() && !is_forked()
            })
        };
        assert!(in_child(alone));
    }
}
