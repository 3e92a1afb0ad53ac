//! Where the system's own files are, and what is mounted where.
//!
//! Owns [`SystemRoot`], the folder below which `/proc`, `/sys` and the like are looked for, so that
//! tests run on trees of their own, and the parser of `mountinfo` (proc_pid_mountinfo(5)).

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, ErrorCode, Result};
use crate::names::printable;

/// The folder that stands for `/` when the system's own files are read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SystemRoot(PathBuf);

impl Default for SystemRoot {
    fn default() -> Self {
        Self(PathBuf::from("/"))
    }
}

impl SystemRoot {
    /// A tree that looks like a system's.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self(folder.into())
    }

    /// Where an absolute path lies.
    #[must_use]
    pub fn path(&self, absolute: impl AsRef<Path>) -> PathBuf {
        let absolute = absolute.as_ref();
        self.0.join(absolute.strip_prefix("/").unwrap_or(absolute))
    }

    /// Whether there is anything at an absolute path.
    #[must_use]
    pub fn exists(&self, absolute: impl AsRef<Path>) -> bool {
        self.path(absolute).exists()
    }

    /// The text of a small file, what is no UTF-8 replaced; `None` when there is no such file. It
    /// never waits for a writer, as reading a pipe would.
    ///
    /// # Errors
    /// `Io` with the path, for any other reason; `Format` when it is no regular file, or is longer
    /// than any that the system makes.
    pub fn read(&self, absolute: impl AsRef<Path>) -> Result<Option<String>> {
        let absolute = absolute.as_ref();
        let named = || printable(&absolute.display().to_string());
        match read_small(&self.path(absolute)) {
            Ok(None) => {
                let text = format!("{}: not a regular file of less than 64 MiB", named());
                Err(Error::new(ErrorCode::Format, text))
            }
            Ok(Some(bytes)) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
            Err(error) => match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(None),
                _ => Err(Error::io(named(), &error)),
            },
        }
    }

    /// What is mounted in this process's view, in the order of mounting.
    ///
    /// # Errors
    /// As [`Self::read`]. Without a mounted `/proc` the list is empty.
    pub fn mounts(&self) -> Result<Vec<Mount>> {
        let text = self.read("/proc/self/mountinfo")?.unwrap_or_default();
        Ok(text.lines().filter_map(Mount::parse).collect())
    }
}

/// More than the system's own files ever have.
const SMALL_BYTES_MAX: u64 = 64 << 20;

/// The bytes of a small regular file; `None` when it is none.
fn read_small(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut options = File::options();
    let file = options.read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    if file.metadata()?.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !file.metadata()?.is_file() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    file.take(SMALL_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 != SMALL_BYTES_MAX).then_some(bytes))
}

/// One line of `mountinfo`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mount {
    /// Its number, which a descriptor's `fdinfo` names.
    pub id: u64,
    /// The folder of the file system that is mounted, `/` for all of it.
    pub root: PathBuf,
    /// Where it is mounted.
    pub point: PathBuf,
    /// The file system's name, `ext4`, `fuse.sshfs`.
    pub kind: String,
    /// The options of the mount and of the file system.
    pub options: Vec<String>,
}

impl Mount {
    /// `36 35 98:0 /root /point rw,noatime master:1 - ext3 /dev/root rw,errors=continue`; `None`
    /// for a line of another form.
    #[must_use]
    pub fn parse(line: &str) -> Option<Self> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ');
        let id = fields.next()?.parse().ok()?;
        let (root, point, own) = (fields.nth(2)?, fields.next()?, fields.next()?);
        let mut fields = file_system.split(' ');
        let (kind, _, shared) = (fields.next()?, fields.next()?, fields.next()?);
        let options = own.split(',').chain(shared.split(','));
        Some(Self {
            id,
            root: unescaped(root),
            point: unescaped(point),
            kind: kind.to_owned(),
            options: options.map(str::to_owned).collect(),
        })
    }

    /// Whether an option is set, by its name.
    #[must_use]
    pub fn has_option(&self, name: &str) -> bool {
        self.options.iter().any(|option| option == name)
    }
}

/// Blanks, tabs, line ends and backslashes stand as `\` and three octal digits.
fn unescaped(text: &str) -> PathBuf {
    let mut rest = text;
    let mut path = String::with_capacity(text.len());
    while let Some((before, after)) = rest.split_once('\\') {
        path.push_str(before);
        // Digits alone: a number may have a sign, too.
        let digits = after.get(..3).filter(|digits| digits.bytes().all(|it| it.is_ascii_digit()));
        let digits = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match digits {
            Some(byte) => path.push(char::from(byte)),
            None => path.push('\\'),
        }
        rest = if digits.is_some() { &after[3..] } else { after };
    }
    path.push_str(rest);
    PathBuf::from(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_mountinfo_is_read() {
        let line = "36 35 98:0 /sub /mnt/my\\040disk rw,noatime master:1 shared:2 - \
                    ext4 /dev/x rw,dax=always";
        let mount = Mount::parse(line).unwrap();
        assert_eq!((mount.id, &*mount.kind), (36, "ext4"));
        assert_eq!(mount.root, Path::new("/sub"));
        assert_eq!(mount.point, Path::new("/mnt/my disk"));
        assert!(mount.has_option("noatime") && mount.has_option("dax=always"));
        assert!(!mount.has_option("dax"));
        for wrong in ["", "a b", "36 35 98:0 / /mnt rw", "x 35 98:0 / / rw - ext4 none rw"] {
            assert_eq!(Mount::parse(wrong), None, "{wrong}");
        }
        assert_eq!(unescaped("a\\134b\\x"), Path::new("a\\b\\x"));
        for as_it_is in ["a\\+12b", "a\\400", "a\\1", "a\\\u{e9}1"] {
            assert_eq!(unescaped(as_it_is), Path::new(as_it_is));
        }
    }

    #[test]
    fn what_is_not_there_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let root = SystemRoot::new(folder.path());
        assert_eq!(root.read("/proc/meminfo"), Ok(None));
        assert_eq!(root.mounts(), Ok(vec![]));
        std::fs::create_dir(folder.path().join("proc")).unwrap();
        let error = root.read("/proc").unwrap_err();
        assert!(error.to_string().starts_with("/proc: "), "{error}");
    }

    #[test]
    fn what_is_no_file_is_told_at_once() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let folder = tempfile::tempdir().unwrap();
        let root = SystemRoot::new(folder.path());
        mknodat(CWD, folder.path().join("pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        std::os::unix::fs::symlink("/dev/zero", folder.path().join("zero\n")).unwrap();
        for path in ["/pipe", "/zero\n"] {
            let error = root.read(path).unwrap_err();
            assert_eq!(error.code(), ErrorCode::Format);
            assert!(!error.to_string().contains('\n'), "{error}");
        }
    }

    #[test]
    fn this_machine_has_a_root() {
        let mounts = SystemRoot::default().mounts().unwrap();
        assert!(mounts.iter().any(|mount| mount.point == Path::new("/")), "{mounts:?}");
    }
}
