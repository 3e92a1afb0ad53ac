//! Files that are written because somebody named them: traces, records, plots.
//!
//! Their permissions are what the user's umask leaves. A symbolic link in the place of one is not
//! followed: in a folder that others may write to, it would have us overwrite what they like. Links
//! in `/dev` are the system's.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// An empty file at `path`, in place of the file that was there.
///
/// # Errors
/// What the system says; a symbolic link is told as one.
pub fn create(path: &Path) -> io::Result<File> {
    let flags = if path.starts_with("/dev") { 0 } else { libc::O_NOFOLLOW };
    let mut options = OpenOptions::new();
    let opened = options.write(true).create(true).truncate(true).custom_flags(flags).open(path);
    opened.map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => io::Error::new(
            error.kind(),
            "is a symbolic link, which is not followed; name the file itself",
        ),
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{PermissionsExt, symlink};

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
    fn nobody_gets_a_file_that_may_be_run_or_written_by_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        let mode = create(&path).unwrap().metadata().unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode & !0o666, 0, "{mode:o}");
    }
}
