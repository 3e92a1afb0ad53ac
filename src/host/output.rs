//! Files that are written because somebody named them: traces, records, plots.
//!
//! Their permissions are what the user's umask leaves. A symbolic link in the place of one is not
//! followed: in a folder that others may write to, it would have us overwrite what they like. Links
//! in `/dev` are the system's.
//!
//! What takes minutes to come about can be checked beforehand: [`check`] tries what [`create`] will
//! do, and leaves the place as it was.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// An empty file at `path`, in place of the file that was there.
///
/// # Errors
/// What the system says; a symbolic link is told as one.
pub fn create(path: &Path) -> io::Result<File> {
    let opened = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(link_flag(path))
        .open(path);
    opened.map_err(told)
}

/// Whether [`create`] may write to `path` now. The file that is there keeps its bytes; where none
/// is, none is left.
///
/// # Errors
/// As [`create`].
pub fn check(path: &Path) -> io::Result<()> {
    // Neither waits for a pipe's reader.
    let flags = link_flag(path) | libc::O_NONBLOCK;
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(flags);
    match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        // A pipe that nobody reads yet.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => return Ok(()),
        opened => return opened.map(drop).map_err(told),
    }
    match options.create_new(true).open(path) {
        Ok(file) => {
            drop(file);
            std::fs::remove_file(path)
        }
        // Somebody has made it meanwhile.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(missing_folder(path).unwrap_or_else(|| told(error))),
    }
}

/// A kind of file, by what it begins with.
pub struct Kind {
    /// What it is called.
    pub name: &'static str,
    /// Its first bytes.
    pub start: &'static str,
}

/// As [`check`], and whether the file that is there is an empty one, one of this kind, or none that
/// has bytes to lose: a mistyped name may be that of a model.
///
/// # Errors
/// `AlreadyExists` for a file of another kind; as [`check`], and of reading what is there.
pub fn check_kind(path: &Path, kind: &Kind) -> io::Result<()> {
    // Before it is read: it may be a link.
    check(path)?;
    match std::fs::metadata(path) {
        Ok(there) if there.is_file() && there.len() > 0 => {}
        _ => return Ok(()),
    }
    let mut start = Vec::new();
    File::open(path)?.take(kind.start.len() as u64).read_to_end(&mut start)?;
    if start == kind.start.as_bytes() {
        return Ok(());
    }
    let text = format!("is there already and no {}; remove it or name another file", kind.name);
    Err(io::Error::new(io::ErrorKind::AlreadyExists, text))
}

fn link_flag(path: &Path) -> i32 {
    if path.starts_with("/dev") { 0 } else { libc::O_NOFOLLOW }
}

fn told(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::ELOOP) => io::Error::new(
            error.kind(),
            "is a symbolic link, which is not followed; name the file itself",
        ),
        _ => error,
    }
}

/// That there is no folder for the file, which the system says of the file.
fn missing_folder(path: &Path) -> Option<io::Error> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty())?;
    let text = format!("the folder {} does not exist", folder.display());
    (!folder.exists()).then(|| io::Error::new(io::ErrorKind::NotFound, text))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (kept, link) = (folder.path().join("kept"), folder.path().join("link"));
        std::fs::write(&kept, "precious").unwrap();
        symlink(&kept, &link).unwrap();
        let error = create(&link).unwrap_err().to_string();
        assert!(error.contains("symbolic link"), "{error}");
        assert_eq!(std::fs::read(&kept).unwrap(), b"precious");
        // One that leads nowhere is no way to make a file elsewhere either.
        symlink(folder.path().join("new"), folder.path().join("nowhere")).unwrap();
        assert!(create(&folder.path().join("nowhere")).is_err());
        assert!(!folder.path().join("new").exists());
        // The file itself is replaced; the system's links are what they are.
        create(&kept).unwrap();
        assert!(std::fs::read(&kept).unwrap().is_empty());
        let open = File::open(&kept).unwrap();
        create(&Path::new("/dev/fd").join(open.as_raw_fd().to_string())).unwrap();
    }

    #[test]
    fn a_check_says_what_creating_would_and_leaves_no_trace() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("kept"), "precious").unwrap();
        symlink(at("kept"), at("link")).unwrap();
        std::fs::create_dir(at("folder")).unwrap();
        check(&at("kept")).unwrap();
        check(&at("new")).unwrap();
        assert!(!at("new").exists());
        check(Path::new("/dev/null")).unwrap();
        for (path, why) in [
            (at("link"), "symbolic link"),
            (at("folder"), "directory"),
            (at("nowhere/new"), "nowhere does not exist"),
            // Not even root makes a file there.
            (PathBuf::from("/proc/new"), "No such file"),
        ] {
            let error = check(&path).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
            assert_eq!(create(&path).unwrap_err().kind(), error.kind());
        }
        assert_eq!(std::fs::read(at("kept")).unwrap(), b"precious");
        // A pipe would have creating wait for its reader.
        rustix::fs::mkfifoat(rustix::fs::CWD, at("pipe"), rustix::fs::Mode::from(0o600)).unwrap();
        check(&at("pipe")).unwrap();
    }

    #[test]
    fn a_file_of_another_kind_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let kind = Kind { name: "trace", start: "{\"trace" };
        for (bytes, is_taken) in
            [("", true), ("{\"traces\"", true), ("{\"tra", false), ("x", false)]
        {
            std::fs::write(&path, bytes).unwrap();
            let checked = check_kind(&path, &kind);
            assert_eq!(checked.is_ok(), is_taken, "{bytes}: {checked:?}");
            assert!(is_taken || checked.unwrap_err().to_string().contains("no trace"));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), bytes);
        }
        check_kind(&folder.path().join("new"), &kind).unwrap();
        check_kind(Path::new("/dev/null"), &kind).unwrap();
    }

    #[test]
    fn nobody_gets_a_file_that_may_be_run_or_written_by_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        let mode = create(&path).unwrap().metadata().unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode & !0o666, 0, "{mode:o}");
    }
}
