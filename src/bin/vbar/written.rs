//! A file that a command writes at its end, looked at before it begins.
//!
//! What cannot be written is told before minutes of measuring, and a file of another kind is not
//! replaced: a mistyped name may be that of a model.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use vbar::host::output;
use vbar::{Error, ErrorCode, Result};

/// A kind of file, by what it begins with.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) start: &'static str,
}

/// Refuses a place where a file of this kind cannot or should not be written.
///
/// # Errors
/// `InvalidArgument` for a folder, and for a file of another kind; `Io` for what the system does
/// not allow.
pub(crate) fn check(path: &Path, kind: &Kind) -> Result<()> {
    let refuse = |why: &str| {
        Err(Error::new(ErrorCode::InvalidArgument, format!("{}: {why}", path.display())))
    };
    let io_error = |error| Error::io(path.display(), &error);
    let there = std::fs::metadata(path).ok();
    if there.as_ref().is_some_and(std::fs::Metadata::is_dir) {
        return refuse("is a folder; name a file");
    }
    // Before it is read: it may be a link, or nobody's to write.
    output::check(path).map_err(io_error)?;
    if !there.is_some_and(|there| there.is_file() && there.len() > 0) {
        return Ok(());
    }
    let mut start = Vec::new();
    let file = File::open(path).map_err(io_error)?;
    file.take(kind.start.len() as u64).read_to_end(&mut start).map_err(io_error)?;
    match start == kind.start.as_bytes() {
        true => Ok(()),
        false => refuse(&format!(
            "is there already and no {}; remove it or name another file",
            kind.name
        )),
    }
}
