//! Status numbers, their texts, versions, and the last message of a thread.
//!
//! What a caller asks before anything else and after everything. Nothing here takes an id.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use std::ffi::{CStr, c_char};

use super::call;
use crate::error::ErrorCode;

/// Raised with every change that an older caller would not survive.
pub const VBAR_ABI_VERSION: u32 = 1;

/// What a call came to. Numbers are never reused; a caller treats one that it does not know as an
/// error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
#[non_exhaustive]
pub enum VbarStatus {
    /// Done.
    Ok = 0,
    /// An argument is outside what the function's documentation allows.
    InvalidArgument = 1,
    /// An id or handle that was freed, or never given out.
    StaleHandle = 2,
    /// A token whose pins were given back, or taken back by force.
    StaleToken = 3,
    /// The driver's library or one of its symbols is missing, or too old.
    DriverMissing = 4,
    /// A driver call failed.
    Driver = 5,
    /// The device is lost until the process ends.
    DeviceLost = 6,
    /// No such device, or it was never opened.
    DeviceNotRegistered = 7,
    /// The device is open with another driver, context or page size.
    AlreadyOpen = 8,
    /// The driver cannot do what was asked.
    Unsupported = 9,
    /// No addresses for the request.
    NoAddresses = 10,
    /// The operating system allows no more mappings in this process.
    TooManyMappings = 11,
    /// Reading or opening a file failed.
    Io = 12,
    /// A file is not what its header, its name or the format says.
    Format = 13,
    /// A file changed while bound.
    FileChanged = 14,
    /// A wait ran into its time-out.
    TimedOut = 15,
    /// A wait was cancelled.
    Cancelled = 16,
    /// Page-locked memory could not be had.
    HostMemory = 17,
    /// More pins on a page than can be counted.
    TooManyPins = 18,
    /// The process is exiting or has forked.
    ProcessEnding = 19,
    /// The object is being closed.
    Closed = 20,
    /// A name that is not there.
    NotFound = 21,
    /// A bug of the library.
    Internal = 22,
}

/// The ABI version of the loaded library: equal to `VBAR_ABI_VERSION` of a matching header.
/// Thread-safe; may be called at any time.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_abi_version() -> u32 {
    VBAR_ABI_VERSION
}

/// The library's version, "0.1.0", as a string of static life time.
/// Thread-safe; may be called at any time.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => panic!("a version has no zero byte"),
        };
    VERSION.as_ptr()
}

/// A sentence for a status, as a string of static life time; one that says so for a number that is
/// none. Thread-safe; may be called at any time.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_status_text(status: i32) -> *const c_char {
    text_of(status).as_ptr()
}

/// What the last call on this thread that did not return `VBAR_STATUS_OK` said: a sentence with the
/// numbers, and the driver's code by name where there is one; empty before the first. The string
/// lives until the next call on this thread that fails. Thread-safe: each thread has its own.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_last_message() -> *const c_char {
    call::last_message()
}

fn text_of(status: i32) -> &'static CStr {
    match status {
        0 => c"ok",
        1 => c"invalid argument",
        2 => c"stale id or handle",
        3 => c"stale token",
        4 => c"the CUDA driver is missing or too old",
        5 => c"a driver call failed",
        6 => c"the device is lost",
        7 => c"no such device, or it was not opened",
        8 => c"the device is open with other settings",
        9 => c"not supported",
        10 => c"no addresses left",
        11 => c"no more mappings in this process",
        12 => c"reading a file failed",
        13 => c"a file is malformed",
        14 => c"a file changed while bound",
        15 => c"timed out",
        16 => c"cancelled",
        17 => c"no page-locked memory",
        18 => c"too many pins on a page",
        19 => c"the process is ending or has forked",
        20 => c"closed",
        21 => c"not found",
        22 => c"internal error",
        _ => c"unknown status",
    }
}

impl From<ErrorCode> for VbarStatus {
    fn from(code: ErrorCode) -> Self {
        match code {
            ErrorCode::InvalidArgument => Self::InvalidArgument,
            ErrorCode::StaleHandle => Self::StaleHandle,
            ErrorCode::StaleToken => Self::StaleToken,
            ErrorCode::DriverMissing => Self::DriverMissing,
            ErrorCode::Driver => Self::Driver,
            ErrorCode::DeviceLost => Self::DeviceLost,
            ErrorCode::DeviceNotRegistered => Self::DeviceNotRegistered,
            ErrorCode::AlreadyOpen => Self::AlreadyOpen,
            ErrorCode::Unsupported => Self::Unsupported,
            ErrorCode::NoAddresses => Self::NoAddresses,
            ErrorCode::TooManyMappings => Self::TooManyMappings,
            ErrorCode::Io => Self::Io,
            ErrorCode::Format => Self::Format,
            ErrorCode::FileChanged => Self::FileChanged,
            ErrorCode::TimedOut => Self::TimedOut,
            ErrorCode::Cancelled => Self::Cancelled,
            ErrorCode::HostMemory => Self::HostMemory,
            ErrorCode::TooManyPins => Self::TooManyPins,
            ErrorCode::ProcessEnding => Self::ProcessEnding,
            ErrorCode::Closed => Self::Closed,
            ErrorCode::NotFound => Self::NotFound,
            ErrorCode::Internal => Self::Internal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_have_the_numbers_of_the_errors_and_a_text_each() {
        let mut texts = std::collections::HashSet::new();
        for number in 0..=22 {
            assert!(texts.insert(text_of(number)), "two statuses share a text");
        }
        assert_eq!(text_of(23), text_of(-1));
        for code in [ErrorCode::InvalidArgument, ErrorCode::Io, ErrorCode::Internal] {
            assert_eq!(VbarStatus::from(code) as i32, code as i32);
        }
    }
}
