//! Folders written down in bytes: what an input of several files is.
//!
//! Sections begin with a line `=== KIND NAME`; what follows it, to the next one, is the content.
//! Whatever a name says, nothing is made outside of the folder that is given.

use std::ffi::{CString, OsStr};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Component, Path, PathBuf};

/// A folder for one input, in memory where there is such a place.
pub(super) fn folder() -> tempfile::TempDir {
    let in_memory = tempfile::tempdir_in("/dev/shm");
    in_memory.or_else(|_| tempfile::tempdir()).expect("a folder")
}

/// What symbolic links may lead to beside names within the folder: opened, none of these changes
/// anything or waits.
const LINKS: &[&[u8]] =
    &[b"/", b"/dev/null", b"/dev/zero", b"/dev/full", b"/proc/self/mem", b"/proc/self/maps"];
const DEPTH_MAX: usize = 8;
const FILE_BYTES_MAX: u64 = 1 << 43;
/// Bytes at the beginning of a model's data that are not zero.
const PATTERN_BYTES: u64 = 70_000;

/// The words of this form, for mutations.
pub(super) const WORDS: &[&str] = &[
    "\n=== file ",
    "\n=== model ",
    "\n=== link ",
    "\n=== fifo ",
    "\n=== folder ",
    " -> ",
    "../",
    "./",
    "/",
    "//",
    "..",
    ".",
];

/// Makes what the sections say, and gives the bytes before the first one.
pub(super) fn make<'a>(input: &'a [u8], folder: &Path) -> &'a [u8] {
    let mut sections = split(input);
    let first = sections.next().unwrap_or_default();
    for section in sections {
        let end = section.iter().position(|byte| *byte == b'\n').unwrap_or(section.len());
        let (line, content) = (&section[..end], section.get(end + 1..).unwrap_or_default());
        let (kind, name) = split_at(line, b" ").unwrap_or((line, b""));
        // What the system refuses is not there: that is an input too.
        let _ = make_one(kind, name, content, folder);
    }
    first
}

fn split(input: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(input);
    std::iter::from_fn(move || {
        let text = rest?;
        let (section, after) = match split_at(text, b"\n=== ") {
            Some((section, after)) => (section, Some(after)),
            None => (text, None),
        };
        rest = after;
        Some(section)
    })
}

fn split_at<'a>(text: &'a [u8], mark: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let at = text.windows(mark.len()).position(|window| window == mark)?;
    Some((&text[..at], &text[at + mark.len()..]))
}

fn make_one(kind: &[u8], name: &[u8], content: &[u8], folder: &Path) -> Option<()> {
    match kind {
        b"file" => fs::write(place(name, folder)?, content).ok(),
        b"model" => {
            let (name, bytes) = split_at(name, b" ").unwrap_or((name, b"0"));
            let bytes = std::str::from_utf8(bytes).ok()?.parse().ok()?;
            write_model(&place(name, folder)?, content, bytes)
        }
        b"folder" => fs::create_dir(place(name, folder)?).ok(),
        b"link" => {
            let (name, target) = split_at(name, b" -> ")?;
            let place = place(name, folder)?;
            let target = if LINKS.contains(&target) {
                PathBuf::from(OsStr::from_bytes(target))
            } else {
                inside(target)?
            };
            symlink(target, place).ok()
        }
        b"fifo" => {
            let path = CString::new(place(name, folder)?.as_os_str().as_bytes()).ok()?;
            make_fifo(&path)
        }
        _ => None,
    }
}

fn make_fifo(path: &CString) -> Option<()> {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    mknodat(CWD, path.as_c_str(), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).ok()
}

/// A relative path of plain names.
fn inside(name: &[u8]) -> Option<PathBuf> {
    let path = Path::new(OsStr::from_bytes(name));
    let plain = path.components().all(|part| matches!(part, Component::Normal(_)));
    (plain && path.components().count() <= DEPTH_MAX).then(|| path.to_owned())
}

/// Where a name lies, its folders made. A symbolic link on the way leads to where it was allowed
/// to, so nothing is written through one.
fn place(name: &[u8], folder: &Path) -> Option<PathBuf> {
    let within = inside(name).filter(|path| path.components().count() > 0)?;
    let mut path = folder.to_owned();
    for part in within.components() {
        if path.is_symlink() {
            return None;
        }
        if path != *folder {
            let _ = fs::create_dir(&path);
        }
        path.push(part);
    }
    (!path.is_symlink()).then_some(path)
}

/// A safetensors file of that header and as many bytes of data, most of them a hole.
pub(super) fn write_model(path: &Path, header: &[u8], data_bytes: u64) -> Option<()> {
    let data_bytes = data_bytes.min(FILE_BYTES_MAX);
    let file = fs::File::create(path).ok()?;
    let mut start = (header.len() as u64).to_le_bytes().to_vec();
    start.extend_from_slice(header);
    let data_offset = start.len() as u64;
    start.extend((0..data_bytes.min(PATTERN_BYTES)).map(|at| (at % 251) as u8));
    file.write_all_at(&start, 0).ok()?;
    file.set_len(data_offset + data_bytes).ok()
}
