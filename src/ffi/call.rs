//! The boundary: what every export does before and after its work.
//!
//! No panic leaves it; an error becomes a status and the thread's last message; log messages that
//! queued meanwhile are delivered once no lock is held. Knows no ids.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::log;
use super::status::VbarStatus;
use crate::error::{Error, ErrorCode, Result};
use crate::process;

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// Runs the body of an export.
#[inline(always)]
pub(super) fn call(body: impl FnOnce() -> Result<()>) -> VbarStatus {
    let status = call_in_handler(body);
    log::deliver();
    status
}

/// As [`call`], for exports that a handler of a signal may call: nobody's callback runs, and no
/// lock is taken that the interrupted thread may have.
#[inline(always)]
pub(super) fn call_in_handler(body: impl FnOnce() -> Result<()>) -> VbarStatus {
    // The status is made inside, so that a hit carries no result through memory.
    let guarded = || match process::check().and_then(|()| body()) {
        Ok(()) => VbarStatus::Ok,
        Err(error) => failed(&error),
    };
    let status = catch_unwind(AssertUnwindSafe(guarded));
    status.unwrap_or_else(|panic| failed(&panicked(&*panic)))
}

/// What a panic of ours is told as.
#[cold]
pub(super) fn panicked(panic: &(dyn std::any::Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    Error::new(ErrorCode::Internal, format!("a bug of vbar: {text}"))
}

#[cold]
fn failed(error: &Error) -> VbarStatus {
    tell(error);
    VbarStatus::from(error.code())
}

/// Makes an error the thread's last message.
#[cold]
pub(super) fn tell(error: &Error) {
    // A zero byte can come from a name in a file: it ends the message, nothing else.
    let text = error.to_string().replace('\0', " ");
    let text = CString::new(text).unwrap_or_default();
    // At a thread's end there is nobody left to ask for it.
    let _ = MESSAGE.try_with(|message| message.replace(text));
}

/// Does something that may run exports; the thread's message stays as it was.
pub(super) fn keeping_message(work: impl FnOnce()) {
    let kept = MESSAGE.try_with(RefCell::take);
    work();
    if let Ok(kept) = kept {
        let _ = MESSAGE.try_with(|message| message.replace(kept));
    }
}

pub(super) fn last_message() -> *const c_char {
    MESSAGE.try_with(|message| message.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// An argument is outside what its function allows.
#[cold]
pub(super) fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorCode::InvalidArgument, text)
}

/// An id that names nothing of its kind: never given out, closed, or of another kind.
#[cold]
pub(super) fn stale(kind: &str, id: u64) -> Error {
    let text = match id {
        0 => format!("no {kind}: the id is 0"),
        _ => format!("{id:#x} is no {kind}: it was closed, or never given out"),
    };
    Error::new(ErrorCode::StaleHandle, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    #[test]
    fn a_panic_is_a_status_and_a_message() {
        let status = call(|| panic!("number {}", 7));
        assert_eq!(status, VbarStatus::Internal);
        #[expect(unsafe_code, reason = "the message is a C string of this thread")]
        // SAFETY: the pointer is the thread's message, which lives until the next failure.
        let message = unsafe { CStr::from_ptr(last_message()) };
        assert_eq!(message.to_str(), Ok("a bug of vbar: number 7"));
        assert_eq!(call(|| Ok(())), VbarStatus::Ok);
    }
}
