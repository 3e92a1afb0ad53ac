//! What is in the place of a file that is to be written, and whether it may go.
//!
//! Owns the rule that a synthetic model replaces nothing but its like: regular files that carry
//! [`METADATA_KEY`], and indexes of such files. Other regular files go when the caller says so;
//! folders, links, pipes and devices never do, and are not opened either.

use std::collections::BTreeSet;
use std::fs::FileType;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use super::METADATA_KEY;
use super::writer::{folder_of, invalid};
use crate::error::{Error, ErrorCode, Result};
use crate::host::safetensors::{HEADER_BYTES_MAX, INDEX_BYTES_MAX, PREFIX_BYTES, parse_index};
use crate::host::source::ModelFile;

/// Which regular files may be replaced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Replace {
    /// Those of synthetic models.
    Synthetic,
    /// All.
    AnyFile,
}

/// Refuses unless nothing is at `path`, or something that may be replaced.
///
/// # Errors
/// `InvalidArgument`, saying what is there; `Io` when that cannot be known.
pub(super) fn check_replaceable(path: &Path, replace: Replace) -> Result<()> {
    let Some(kind) = kind_of(path)? else { return Ok(()) };
    if !kind.is_file() {
        let text = format!(
            "{} is in the place of the file; remove it first, only regular files are replaced",
            name_of(kind)
        );
        return Err(invalid(path, &text));
    }
    if replace == Replace::AnyFile || is_synthetic(path) {
        return Ok(());
    }
    let text = "is there already and is no synthetic model; remove it first, or replace it with \
                `--force`";
    Err(invalid(path, text))
}

/// Refuses unless `path` is in a folder that exists.
///
/// # Errors
/// `Io`, naming the folder.
pub(super) fn check_folder(path: &Path) -> Result<()> {
    let folder = folder_of(path);
    let (path, shown) = (path.display(), folder.display());
    let text = match std::fs::metadata(folder) {
        Ok(metadata) if metadata.is_dir() => return Ok(()),
        Ok(_) => format!("{path}: {shown} is no folder"),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            format!("{path}: the folder {shown} does not exist")
        }
        Err(error) => return Err(Error::io(shown, &error)),
    };
    Err(Error::new(ErrorCode::Io, text))
}

/// What is at `path` itself: a link is not followed.
pub(super) fn kind_of(path: &Path) -> Result<Option<FileType>> {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) => Ok(Some(metadata.file_type())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(path.display(), &error)),
    }
}

/// What people call it.
pub(super) fn name_of(kind: FileType) -> &'static str {
    if kind.is_dir() {
        "a folder"
    } else if kind.is_symlink() {
        "a symbolic link"
    } else if kind.is_fifo() {
        "a named pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

/// Whether a regular file is of a synthetic model, whole or damaged.
fn is_synthetic(path: &Path) -> bool {
    let Ok(file) = ModelFile::open(path) else { return false };
    has_mark(&file) || is_synthetic_index(path, &file)
}

/// Whether the header has the mark. The tensors do not matter, so that a file that was cut short
/// is known again.
fn has_mark(file: &ModelFile) -> bool {
    let mut prefix = [0; PREFIX_BYTES as usize];
    if file.read_exact_at(0, &mut prefix).is_err() {
        return false;
    }
    let header_bytes = u64::from_le_bytes(prefix);
    if header_bytes > HEADER_BYTES_MAX.min(file.bytes().saturating_sub(PREFIX_BYTES)) {
        return false;
    }
    let mut header = vec![0; header_bytes as usize];
    let read = file.read_exact_at(PREFIX_BYTES, &mut header);
    let parsed = read.ok().and_then(|()| serde_json::from_slice(&header).ok());
    parsed.is_some_and(|header: serde_json::Value| {
        header.pointer("/__metadata__").and_then(|table| table.get(METADATA_KEY)).is_some()
    })
}

/// An index has no mark of its own: the shards that it names have, all that are there.
fn is_synthetic_index(path: &Path, file: &ModelFile) -> bool {
    if file.bytes() > INDEX_BYTES_MAX {
        return false;
    }
    let mut text = vec![0; file.bytes() as usize];
    if file.read_exact_at(0, &mut text).is_err() {
        return false;
    }
    let Ok(shard_of) = parse_index(file.name(), &text) else { return false };
    let shards: BTreeSet<&String> = shard_of.values().collect();
    let mut found = false;
    for shard in shards {
        let shard = folder_of(path).join(shard);
        match kind_of(&shard) {
            Ok(None) => continue,
            Ok(Some(kind)) if kind.is_file() => {}
            _ => return false,
        }
        match ModelFile::open(&shard) {
            Ok(file) if has_mark(&file) => found = true,
            _ => return false,
        }
    }
    found
}
