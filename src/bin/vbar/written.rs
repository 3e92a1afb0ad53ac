//! A file that a command writes at its end, looked at before it begins.
//!
//! What cannot be written is told before minutes of measuring, and a file of another kind is not
//! replaced. The library looks; here is what is a wrong argument.

use std::io::ErrorKind;
use std::path::Path;

use vbar::host::output::{self, Kind};
use vbar::{Error, ErrorCode, Result};

/// Refuses a place where a file of this kind cannot or should not be written.
///
/// # Errors
/// `InvalidArgument` for a folder, and for a file of another kind; `Io` for what the system does
/// not allow.
pub(crate) fn check(path: &Path, kind: &Kind) -> Result<()> {
    let refuse = |why: &str| {
        Err(Error::new(ErrorCode::InvalidArgument, format!("{}: {why}", path.display())))
    };
    if path.is_dir() {
        return refuse("is a folder; name a file");
    }
    match output::check_kind(path, kind) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => refuse(&error.to_string()),
        checked => checked.map_err(|error| Error::io(path.display(), &error)),
    }
}
