//! The one error type: a code to branch on, a text for people.
//!
//! An error means that the machine, the caller or a file failed. It is not an outcome: a weight
//! that does not fit is `Offloaded`, never an `Err`. Codes have explicit numbers that the C ABI
//! gives out, so a number is never reused or changed.

use std::fmt;

use crate::driver::code::{DriverCode, DriverError};

/// What went wrong, to branch on. The numbers are those of the C ABI's `VbarStatus`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(i32)]
#[non_exhaustive]
pub enum ErrorCode {
    /// An argument is outside what the function's documentation allows.
    InvalidArgument = 1,
    /// An id, token or handle that was freed, or never given out.
    StaleHandle = 2,
    /// A token whose pins were taken back by a forced end of run.
    StaleToken = 3,
    /// libcuda or one of its symbols is missing, or the driver is too old.
    DriverMissing = 4,
    /// A driver call failed; the text names the call and the code.
    Driver = 5,
    /// A sticky driver error: the device is lost until the process ends.
    DeviceLost = 6,
    /// No such device, or the device was never opened.
    DeviceNotRegistered = 7,
    /// The runtime is open with another driver, context or page size.
    AlreadyOpen = 8,
    /// The driver cannot do what was asked (the text says what).
    Unsupported = 9,
    /// The VBAR, or the address space, has no room for the request.
    NoAddresses = 10,
    /// The operating system allows no more mappings in this process.
    TooManyMappings = 11,
    /// Reading or opening a file failed; the text has the errno.
    Io = 12,
    /// A file is not what its header, its name or the format says.
    Format = 13,
    /// A file changed while bound; its pages are not valid.
    FileChanged = 14,
    /// A wait ran into its time-out.
    TimedOut = 15,
    /// A wait was cancelled.
    Cancelled = 16,
    /// Page-locked memory could not be had.
    HostMemory = 17,
    /// More pins on a page than can be counted.
    TooManyPins = 18,
    /// The process is exiting or has forked; nothing was done.
    ProcessEnding = 19,
    /// The VBAR was closed.
    Closed = 20,
    /// A name that is not in the model.
    NotFound = 21,
    /// A bug of the library that was caught before it did harm.
    Internal = 22,
}

/// An error of the library: its code and a sentence with the numbers.
///
/// One word: results travel through every call of a hit, errors are rare.
#[derive(Clone, PartialEq, Eq)]
pub struct Error {
    parts: Box<Parts>,
}

#[derive(Clone, PartialEq, Eq)]
struct Parts {
    code: ErrorCode,
    /// `SUCCESS` when no driver call failed.
    driver: DriverCode,
    text: Box<str>,
}

/// Result of the library's fallible calls.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error with its sentence.
    #[must_use]
    pub fn new(code: ErrorCode, text: impl Into<String>) -> Self {
        let (driver, text) = (DriverCode::SUCCESS, text.into().into_boxed_str());
        Self { parts: Box::new(Parts { code, driver, text }) }
    }

    /// The code to branch on.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        self.parts.code
    }

    /// What the driver returned, if it is a driver call that failed. The text has its name.
    #[must_use]
    pub fn driver_code(&self) -> Option<DriverCode> {
        (self.parts.driver != DriverCode::SUCCESS).then_some(self.parts.driver)
    }

    /// The same error with what the caller was doing put before the sentence.
    #[must_use]
    pub fn context(self, doing: impl fmt::Display) -> Self {
        self.with_text(|text| format!("{doing}: {text}"))
    }

    /// The same error with more put behind the sentence.
    #[must_use]
    pub fn appended(self, more: impl fmt::Display) -> Self {
        self.with_text(|text| format!("{text}; {more}"))
    }

    /// The same error as one from which the device does not come back.
    #[must_use]
    pub(crate) fn losing(mut self) -> Self {
        self.parts.code = ErrorCode::DeviceLost;
        self
    }

    fn with_text(mut self, change: impl FnOnce(&str) -> String) -> Self {
        self.parts.text = change(&self.parts.text).into_boxed_str();
        self
    }

    /// An error of a system call on `what`, usually a file's path.
    #[must_use]
    pub fn io(what: impl fmt::Display, error: &std::io::Error) -> Self {
        let text = match error.raw_os_error() {
            Some(libc::EMFILE) => {
                format!("{what}: {error}: the process has as many open as it may; raise ulimit -n")
            }
            Some(libc::EACCES | libc::EPERM) => {
                format!("{what}: {error}: this user may not")
            }
            _ => format!("{what}: {error}"),
        };
        Self::new(ErrorCode::Io, text)
    }
}

/// Whether a call that failed so may succeed a moment later.
pub trait Transient {
    /// See the trait.
    fn is_transient(&self) -> bool;
}

impl Transient for DriverError {
    fn is_transient(&self) -> bool {
        self.code.is_transient()
    }
}

impl Transient for Error {
    fn is_transient(&self) -> bool {
        self.parts.driver.is_transient()
    }
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Self {
        let code = if error.code.is_sticky() {
            ErrorCode::DeviceLost
        } else if error.code.is_exiting() {
            ErrorCode::ProcessEnding
        } else {
            ErrorCode::Driver
        };
        let mut made = Self::new(code, error.to_string());
        made.parts.driver = error.code;
        made
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.parts.text)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.parts.code, self.parts.text)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_around_an_error_keeps_its_codes() {
        let error = Error::from(DriverError::new("cuMemMap", DriverCode::NOT_READY));
        let error = error.context("page 3").appended("5 bytes used");
        assert_eq!(
            (error.code(), error.driver_code()),
            (ErrorCode::Driver, Some(DriverCode::NOT_READY))
        );
        let text = "page 3: cuMemMap returned CUDA_ERROR_NOT_READY (600); 5 bytes used";
        assert_eq!(error.to_string(), text);
        assert!(error.is_transient());
        let error = Error::new(ErrorCode::Io, "no such file");
        assert!(error.driver_code().is_none() && !error.is_transient());
    }

    #[test]
    fn what_a_user_can_do_about_a_system_call_is_told() {
        let of = |code| Error::io("m", &std::io::Error::from_raw_os_error(code)).to_string();
        assert!(of(libc::EMFILE).ends_with("raise ulimit -n"), "{}", of(libc::EMFILE));
        assert!(of(libc::EACCES).contains("(os error 13): this user may not"));
        assert_eq!(of(libc::ENOENT), "m: No such file or directory (os error 2)");
    }

    #[test]
    fn a_result_takes_one_word() {
        assert_eq!(size_of::<Result<()>>(), size_of::<usize>());
    }
}
