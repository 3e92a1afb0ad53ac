//! What kind of file system a model lies on, and what may be done with its pages.
//!
//! Owns the list of file systems whose cached pages may be registered with the device: those where
//! pinned pages of a shared mapping are known to be safe. A name alone is not believed: it must
//! agree with the magic number (statfs(2)), and the file must not be on memory of its own (DAX).

use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;

use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, fstatfs, fstatvfs, statx};

use crate::error::{Error, Result};
use crate::host::mounts::{Mount, SystemRoot};

/// What a file system does with bytes, as far as it matters here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileSystemKind {
    /// On a disk of this machine.
    Local,
    /// In memory.
    Memory,
    /// On another machine, or behind a hypervisor.
    Network,
    /// A program of the user answers every read.
    UserSpace,
    /// Shows files of other file systems, as containers' images.
    Layered,
    /// Not known here.
    Other,
}

/// Name, magic number, kind, and whether cached pages may be registered. Where several share a
/// number the name tells them apart; the first is what a bare number is called.
const KNOWN: &[(&str, u64, FileSystemKind, bool)] = {
    use FileSystemKind::{Layered, Local, Memory, Network, UserSpace};
    &[
        ("ext2/3/4", 0xEF53, Local, false),
        ("ext2", 0xEF53, Local, false),
        ("ext3", 0xEF53, Local, false),
        ("ext4", 0xEF53, Local, true),
        ("xfs", 0x5846_5342, Local, true),
        ("btrfs", 0x9123_683E, Local, true),
        ("f2fs", 0xF2F5_2010, Local, false),
        ("zfs", 0x2FC1_2FC1, Local, false),
        ("bcachefs", 0xCA45_1A4E, Local, false),
        ("squashfs", 0x7371_7368, Local, false),
        ("erofs", 0xE0F5_E1E2, Local, false),
        ("vfat", 0x4D44, Local, false),
        ("exfat", 0x2011_BAB0, Local, false),
        ("ntfs3", 0x7366_746E, Local, false),
        ("tmpfs", 0x0102_1994, Memory, true),
        ("ramfs", 0x8584_58F6, Memory, false),
        ("hugetlbfs", 0x9584_58F6, Memory, false),
        ("nfs", 0x6969, Network, false),
        ("nfs4", 0x6969, Network, false),
        ("9p", 0x0102_1997, Network, false),
        ("smb2", 0xFE53_4D42, Network, false),
        ("cifs", 0xFF53_4D42, Network, false),
        ("smb3", 0xFE53_4D42, Network, false),
        ("ceph", 0x00C3_6400, Network, false),
        ("lustre", 0x0BD0_0BD0, Network, false),
        ("gpfs", 0x4750_4653, Network, false),
        ("afs", 0x5346_414F, Network, false),
        ("fuse", 0x6573_5546, UserSpace, false),
        ("virtiofs", 0x6573_5546, Network, false),
        ("overlay", 0x794C_7630, Layered, false),
        ("ecryptfs", 0xF15F, Layered, false),
    ]
};

/// The file system of one file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileSystem {
    /// Its name in the list of mounts, `ext4`, `fuse.sshfs`; else what its number is called.
    pub name: String,
    /// Its magic number.
    pub magic: u64,
    /// What it does with bytes.
    pub kind: FileSystemKind,
    /// Where it is mounted, when the list of mounts has it.
    pub point: Option<PathBuf>,
    /// Whether the file's pages are the storage itself and not a copy in memory.
    pub dax: bool,
    /// Bytes that may still be written.
    pub free_bytes: u64,
}

impl FileSystem {
    /// The file system that an open file lies on. `root` is where the system's own files are.
    ///
    /// # Errors
    /// `Io` when the system refuses to say.
    pub fn of(file: BorrowedFd<'_>, root: &SystemRoot) -> Result<Self> {
        let failed = |error: rustix::io::Errno| Error::io("its file system", &error.into());
        let numbers = fstatfs(file).map_err(failed)?;
        let space = fstatvfs(file).map_err(failed)?;
        // A kernel older than 4.11 has no statx, and none before 5.8 says DAX: the mount does.
        let attributes = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS);
        let attributes = attributes.map(|statx| statx.stx_attributes);
        let fdinfo = root.read(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
        let mounts = root.mounts()?;
        let mount = fdinfo.and_then(|text| mount_of(&text, &mounts));
        let magic = numbers.f_type as u64 & 0xFFFF_FFFF;
        let mut found = Self::describe(magic, mount);
        found.dax |= attributes.is_ok_and(|attributes| attributes.contains(StatxAttributes::DAX));
        found.free_bytes = space.f_bavail.saturating_mul(space.f_frsize);
        Ok(found)
    }

    /// By its number and its mount.
    fn describe(magic: u64, mount: Option<&Mount>) -> Self {
        let by_number = KNOWN.iter().find(|(_, number, ..)| *number == magic);
        let name = match (mount, by_number) {
            (Some(mount), _) => mount.kind.clone(),
            (None, Some((name, ..))) => (*name).to_owned(),
            (None, None) => format!("{magic:#x}"),
        };
        // The number says what answers, the name which of several it is.
        let by_name = KNOWN.iter().find(|(known, number, ..)| *known == name && *number == magic);
        let kind = by_name.or(by_number).map_or(FileSystemKind::Other, |known| known.2);
        Self {
            name,
            magic,
            kind,
            point: mount.map(|mount| mount.point.clone()),
            dax: mount.is_some_and(|mount| {
                ["dax", "dax=always"].into_iter().any(|option| mount.has_option(option))
            }),
            free_bytes: 0,
        }
    }

    /// Whether pages of the file that are cached may be registered with the device.
    #[must_use]
    pub fn may_be_registered(&self) -> bool {
        let listed = KNOWN.iter().any(|(name, magic, _, allowed)| {
            *allowed && *name == self.name && *magic == self.magic
        });
        listed && !self.dax
    }
}

/// The mount that a descriptor's `fdinfo` names.
fn mount_of<'a>(fdinfo: &str, mounts: &'a [Mount]) -> Option<&'a Mount> {
    let id = fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:"))?;
    let id: u64 = id.trim().parse().ok()?;
    mounts.iter().find(|mount| mount.id == id)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// As if mounted by `line`'s name and options.
    fn described(magic: u64, kind: &str, options: &str) -> FileSystem {
        let line = format!("36 35 98:0 / /mnt rw - {kind} /dev/x {options}");
        FileSystem::describe(magic, Some(&Mount::parse(&line).unwrap()))
    }

    #[test]
    fn only_known_file_systems_are_on_the_list() {
        for (magic, kind) in
            [(0xEF53, "ext4"), (0x5846_5342, "xfs"), (0x9123_683E, "btrfs"), (0x0102_1994, "tmpfs")]
        {
            assert!(described(magic, kind, "rw").may_be_registered(), "{kind}");
            assert!(!described(magic, kind, "rw,dax").may_be_registered(), "{kind} with DAX");
            assert!(!described(magic, kind, "rw,dax=always").may_be_registered(), "{kind}");
            assert!(!described(0x6573_5546, kind, "rw").may_be_registered(), "FUSE says {kind}");
        }
        for (magic, kind) in [
            (0xEF53, "ext3"),
            (0x6573_5546, "fuse.sshfs"),
            (0x6969, "nfs4"),
            (0x0102_1997, "9p"),
            (0x794C_7630, "overlay"),
            (0x1234, "new"),
        ] {
            assert!(!described(magic, kind, "rw").may_be_registered(), "{kind}");
        }
    }

    #[test]
    fn kinds_follow_the_number_and_the_name() {
        use FileSystemKind::*;
        let kind = |magic, name| described(magic, name, "rw").kind;
        assert_eq!(kind(0x6573_5546, "fuse.sshfs"), UserSpace);
        assert_eq!(kind(0x6573_5546, "virtiofs"), Network);
        assert_eq!((kind(0x794C_7630, "overlay"), kind(0x6969, "nfs4")), (Layered, Network));
        assert_eq!((kind(0x0102_1994, "devtmpfs"), kind(7, "new")), (Memory, Other));
        let bare = FileSystem::describe(0xEF53, None);
        assert_eq!((&*bare.name, bare.kind, bare.may_be_registered()), ("ext2/3/4", Local, false));
        assert_eq!(FileSystem::describe(7, None).name, "0x7");
    }

    #[test]
    fn a_real_file_has_one() {
        let file = tempfile::tempfile().unwrap();
        let root = SystemRoot::default();
        let found = FileSystem::of(file.as_fd(), &root).unwrap();
        assert!(found.point.is_some(), "{found:?}");
        // Without a list of mounts the number is left.
        let folder = tempfile::tempdir().unwrap();
        let bare = FileSystem::of(file.as_fd(), &SystemRoot::new(folder.path())).unwrap();
        assert_eq!((bare.magic, bare.point), (found.magic, None));
    }
}
