//! Reads what the system says of its memory: the machine's, and that of the control groups which
//! this process is in, both versions, up to the root.
//!
//! The root of the tree is a parameter. Nothing is computed here beyond sums: `host/allowance` says
//! what it comes to. Where a container shows its own group as the root of the tree, the groups
//! around it cannot be seen; its runtime has set their limits in the group that can.

use std::path::{Component, Path, PathBuf};

use crate::error::{Error, ErrorCode, Result};
use crate::host::allowance::{GroupMemory, SystemMemory};
use crate::host::mounts::{Mount, SystemRoot};
use crate::names::{printable, quoted};
use crate::units::KIB;

/// Version 1 has no word for "no limit": it says 2^63 less a page. A limit of 2^60 bytes is none.
const UNLIMITED_FROM: u64 = 1 << 60;

impl SystemMemory {
    /// Reads it.
    ///
    /// # Errors
    /// `Io` when a file cannot be read, `Format` when one is not what proc(5) or cgroups(7) say,
    /// with its path.
    pub fn read(root: &SystemRoot) -> Result<Self> {
        const PATH: &str = "/proc/meminfo";
        let text = root.read(PATH)?.ok_or_else(|| wrong(PATH, "is not there"))?;
        let field = |name: &str| {
            let kibibytes = keyed(&text, name);
            let bytes = kibibytes.and_then(|number| number.checked_mul(KIB));
            bytes.ok_or_else(|| wrong(PATH, format_args!("has no size {name}")))
        };
        Ok(Self {
            total_bytes: field("MemTotal:")?,
            available_bytes: field("MemAvailable:")?,
            groups: read_groups(root)?,
        })
    }
}

/// Which files a version has.
struct Version {
    kind: &'static str,
    limits: &'static [&'static str],
    current: &'static str,
    /// Counters of file pages, of the group and all below it.
    file: [&'static str; 2],
}

const VERSION_1: Version = Version {
    kind: "cgroup",
    limits: &["memory.limit_in_bytes"],
    current: "memory.usage_in_bytes",
    file: ["total_active_file", "total_inactive_file"],
};
const VERSION_2: Version = Version {
    kind: "cgroup2",
    limits: &["memory.max", "memory.high"],
    current: "memory.current",
    file: ["active_file", "inactive_file"],
};

/// The process's group and those around it, as far as they can be seen; none without groups.
fn read_groups(root: &SystemRoot) -> Result<Vec<GroupMemory>> {
    let Some(text) = root.read("/proc/self/cgroup")? else { return Ok(Vec::new()) };
    let Some((version, path)) = group_of_memory(&text) else { return Ok(Vec::new()) };
    let mounts = root.mounts()?;
    let fitting = mounts.iter().filter(|mount| {
        mount.kind == version.kind && (version.kind == "cgroup2" || mount.has_option("memory"))
    });
    let Some((point, within)) = place_of(fitting, path) else { return Ok(Vec::new()) };
    let mut groups = Vec::new();
    for within in within.ancestors() {
        let folder = if within == Path::new("") { point.clone() } else { point.join(within) };
        groups.extend(read_group(root, version, folder)?);
    }
    Ok(groups)
}

/// The version that memory is under, and the process's path in it. A line is
/// `number:controllers:path`; version 2 has number 0 and no controllers.
fn group_of_memory(text: &str) -> Option<(&'static Version, &Path)> {
    let mut second = None;
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        if controllers.split(',').any(|controller| controller == "memory") {
            return Some((&VERSION_1, Path::new(path)));
        }
        if controllers.is_empty() {
            second = Some((&VERSION_2, Path::new(path)));
        }
    }
    second
}

/// The mount that shows most of the way to `path`, and the path in it. A path that leaves every
/// mount, as one above a container's own group does, is seen as the mount's own group.
fn place_of<'a>(
    mounts: impl Iterator<Item = &'a Mount>,
    path: &Path,
) -> Option<(PathBuf, PathBuf)> {
    let leaves = path.components().any(|component| component == Component::ParentDir);
    let places = mounts.map(|mount| {
        let within = path.strip_prefix(&mount.root).ok().filter(|_| !leaves);
        (mount, within.map(Path::to_owned))
    });
    let best = places
        .max_by_key(|(mount, within)| within.as_ref().map(|_| mount.root.components().count()));
    best.map(|(mount, within)| (mount.point.clone(), within.unwrap_or_default()))
}

/// A group; `None` where memory is not counted, as in the root of version 2.
fn read_group(
    root: &SystemRoot,
    version: &Version,
    folder: PathBuf,
) -> Result<Option<GroupMemory>> {
    let mut limit_bytes = None;
    let mut counted = false;
    for name in version.limits {
        let path = folder.join(name);
        let Some(text) = root.read(&path)? else { continue };
        counted = true;
        let limit = parse_limit(&path, text.trim())?;
        limit_bytes = [limit_bytes, limit].into_iter().flatten().min();
    }
    if !counted {
        return Ok(None);
    }
    let path = folder.join(version.current);
    let text = root.read(&path)?.ok_or_else(|| wrong(path.display(), "is not there"))?;
    let current_bytes = parse_number(&path, text.trim())?;
    let statistics = root.read(folder.join("memory.stat"))?.unwrap_or_default();
    // Version 1 has no totals where its groups are not nested.
    let counter = |name: &str| {
        keyed(&statistics, name).or_else(|| keyed(&statistics, name.strip_prefix("total_")?))
    };
    let file_bytes =
        version.file.iter().filter_map(|name| counter(name)).fold(0, u64::saturating_add);
    Ok(Some(GroupMemory { folder, limit_bytes, current_bytes, file_bytes }))
}

fn parse_limit(path: &Path, text: &str) -> Result<Option<u64>> {
    if text == "max" {
        return Ok(None);
    }
    Ok(Some(parse_number(path, text)?).filter(|limit| *limit < UNLIMITED_FROM))
}

fn parse_number(path: &Path, text: &str) -> Result<u64> {
    text.parse()
        .map_err(|_| wrong(path.display(), format_args!("{} is no number of bytes", quoted(text))))
}

/// The number behind a name at the beginning of a line.
fn keyed(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_ascii_whitespace);
    lines.find_map(|mut words| (words.next() == Some(name)).then(|| words.next()?.parse().ok())?)
}

fn wrong(path: impl std::fmt::Display, what: impl std::fmt::Display) -> Error {
    let path = printable(&path.to_string());
    Error::new(ErrorCode::Format, format!("{path}: {what}"))
}

#[cfg(test)]
mod tests;
