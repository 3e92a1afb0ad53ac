//! Both versions of control groups, nested, without limits, in containers; and what is not there.

use std::fs;

use super::*;
use crate::host::allowance::Bound;
use crate::units::{GIB, MIB};

const MEMINFO: &str = "MemTotal:       33554432 kB\nMemFree:         1000 kB\n\
                       MemAvailable:   20971520 kB\nSwapTotal: 0 kB\n";
const ROOT_OF_2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate";
const ROOT_OF_1: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory";

/// A tree of files; parents are made.
fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, SystemRoot) {
    let folder = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let root = SystemRoot::new(folder.path());
    (folder, root)
}

/// A tree with the usual `meminfo`.
fn read(groups: &str, mounts: &str, files: &[(&str, &str)]) -> Result<SystemMemory> {
    let usual =
        [("proc/meminfo", MEMINFO), ("proc/self/cgroup", groups), ("proc/self/mountinfo", mounts)];
    let (_folder, root) = tree(&[&usual[..], files].concat());
    SystemMemory::read(&root)
}

#[test]
fn without_groups_the_machine_counts() {
    let (_folder, root) = tree(&[("proc/meminfo", MEMINFO)]);
    let memory = SystemMemory::read(&root).unwrap();
    assert_eq!((memory.total_bytes, memory.available_bytes), (32 * GIB, 20 * GIB));
    assert_eq!(memory.groups, vec![]);
    assert_eq!(memory.allowance(0, 0).bound, Bound::Machine);
}

#[test]
fn nested_groups_of_version_2_are_read_up_to_the_root() {
    let files = [
        ("sys/fs/cgroup/memory.stat", "anon 1\n"),
        ("sys/fs/cgroup/user.slice/memory.max", "8589934592\n"),
        ("sys/fs/cgroup/user.slice/memory.high", "4294967296\n"),
        ("sys/fs/cgroup/user.slice/memory.current", "3221225472\n"),
        ("sys/fs/cgroup/user.slice/memory.stat", "inactive_file 1073741824\nactive_file 1048576"),
        ("sys/fs/cgroup/user.slice/app/memory.max", "max\n"),
        ("sys/fs/cgroup/user.slice/app/memory.high", "max\n"),
        ("sys/fs/cgroup/user.slice/app/memory.current", "1024\n"),
    ];
    let memory = read("0::/user.slice/app\n", ROOT_OF_2, &files).unwrap();
    let [inner, outer] = &memory.groups[..] else { panic!("{memory:?}") };
    assert_eq!((inner.limit_bytes, inner.current_bytes, inner.file_bytes), (None, 1024, 0));
    assert_eq!(inner.folder, Path::new("/sys/fs/cgroup/user.slice/app"));
    // memory.high is the smaller one.
    assert_eq!((outer.limit_bytes, outer.file_bytes), (Some(4 * GIB), GIB + MIB));
    let allowance = memory.allowance(0, GIB);
    assert_eq!((allowance.bytes, allowance.bound), (GIB + MIB, Bound::Group(1)));
}

#[test]
fn a_group_whose_memory_is_not_counted_is_left_out() {
    let files =
        [("sys/fs/cgroup/a/memory.max", "1048576"), ("sys/fs/cgroup/a/memory.current", "0")];
    let memory = read("0::/a/b/c\n", ROOT_OF_2, &files).unwrap();
    assert_eq!(memory.groups.len(), 1);
    assert_eq!(memory.groups[0].limit_bytes, Some(MIB));
}

#[test]
fn a_container_sees_its_own_group_as_the_root() {
    let files = [("sys/fs/cgroup/memory.max", "2147483648"), ("sys/fs/cgroup/memory.current", "0")];
    for path in ["/", "/../../elsewhere"] {
        let memory = read(&format!("0::{path}\n"), ROOT_OF_2, &files).unwrap();
        assert_eq!(memory.groups.len(), 1, "{path}");
        assert_eq!(memory.groups[0].folder, Path::new("/sys/fs/cgroup"));
        assert_eq!(memory.groups[0].room_bytes(), Some(2 * GIB));
    }
}

#[test]
fn version_1_is_read_and_its_largest_number_is_no_limit() {
    let groups = "12:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/docker/abc\n";
    let files = [
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ("sys/fs/cgroup/memory/memory.usage_in_bytes", "5000\n"),
        ("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "4294967296\n"),
        ("sys/fs/cgroup/memory/docker/memory.usage_in_bytes", "2147483648\n"),
        (
            "sys/fs/cgroup/memory/docker/memory.stat",
            "active_file 1\ntotal_active_file 536870912\ntotal_inactive_file 536870912\n",
        ),
        ("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "9223372036854771712\n"),
        ("sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", "7\n"),
        ("sys/fs/cgroup/memory/docker/abc/memory.stat", "active_file 3\ninactive_file 4\n"),
    ];
    let mounts = format!("{ROOT_OF_1}\n34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu");
    let memory = read(groups, &mounts, &files).unwrap();
    let numbers = memory.groups.iter().map(|group| (group.limit_bytes, group.file_bytes));
    let numbers: Vec<_> = numbers.collect();
    assert_eq!(numbers, [(None, 7), (Some(4 * GIB), GIB), (None, 0)]);
    assert_eq!(memory.allowance(0, 0).room_bytes, 3 * GIB);
}

#[test]
fn a_mount_of_a_part_shows_that_part() {
    // A container of version 1 without a namespace of its own.
    let mounts = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory";
    let files = [
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824"),
        ("sys/fs/cgroup/memory/memory.usage_in_bytes", "0"),
    ];
    for path in ["/docker/abc", "/other"] {
        let memory = read(&format!("4:memory:{path}"), mounts, &files).unwrap();
        assert_eq!(memory.groups.len(), 1, "{path}");
        assert_eq!(memory.groups[0].limit_bytes, Some(GIB));
    }
}

#[test]
fn what_cannot_be_understood_is_told_with_its_path() {
    let error = |files: &[(&str, &str)]| read("0::/a\n", ROOT_OF_2, files).unwrap_err().to_string();
    let text = error(&[("sys/fs/cgroup/a/memory.max", "much")]);
    assert_eq!(text, "/sys/fs/cgroup/a/memory.max: 'much' is no number of bytes");
    let text = error(&[("sys/fs/cgroup/a/memory.max", "5")]);
    assert_eq!(text, "/sys/fs/cgroup/a/memory.current: is not there");
    let (_folder, root) = tree(&[("proc/meminfo", "MemTotal: 5 kB\n")]);
    let text = SystemMemory::read(&root).unwrap_err().to_string();
    assert_eq!(text, "/proc/meminfo: has no size MemAvailable:");
    let (_folder, root) = tree(&[]);
    assert!(SystemMemory::read(&root).is_err());
}

#[test]
fn counters_that_no_machine_has_are_not_summed_past_their_end() {
    let most = format!("active_file {0}\ninactive_file {0}\n", u64::MAX);
    let files = [
        ("sys/fs/cgroup/a/memory.max", "4096"),
        ("sys/fs/cgroup/a/memory.current", "4096"),
        ("sys/fs/cgroup/a/memory.stat", &most),
    ];
    let memory = read("0::/a\n", ROOT_OF_2, &files).unwrap();
    assert_eq!(
        (memory.groups[0].file_bytes, memory.groups[0].room_bytes()),
        (u64::MAX, Some(4096))
    );
}

#[test]
fn this_machine_has_memory() {
    let memory = SystemMemory::read(&SystemRoot::default()).unwrap();
    assert!(memory.available_bytes > 0 && memory.available_bytes <= memory.total_bytes);
    let margin = memory.default_margin_bytes();
    assert!(memory.allowance(0, margin).bytes <= memory.available_bytes);
}
