//! What the system says of itself, of any bytes: memory, control groups, mounts, the kernel module.
//! In a container these texts come from others. Sums stay within what they are of.

use std::fs::File;
use std::os::fd::AsFd;

use vbar::host::allowance::{GroupMemory, SystemMemory};
use vbar::host::file_system::FileSystem;
use vbar::host::kernel_module::{module_version, registration_refused};
use vbar::host::mounts::SystemRoot;
use vbar::host::room::LockedRoom;

use super::{Target, check_words, tree};

pub(crate) const TARGET: Target = Target {
    name: "system",
    run,
    words: &[
        tree::WORDS[0],
        tree::WORDS[2],
        tree::WORDS[3],
        tree::WORDS[4],
        tree::WORDS[6],
        "proc/meminfo\n",
        "proc/self/cgroup\n",
        "proc/self/mountinfo\n",
        "proc/pressure/memory\n",
        "proc/driver/nvidia/version\n",
        "sys/fs/cgroup/memory.max\n",
        "memory.high",
        "memory.stat",
        "memory.current",
        "MemTotal: ",
        "MemAvailable: ",
        " kB\n",
        "0::/",
        "2:memory:/",
        "max\n",
        "active_file ",
        "inactive_file ",
        "total_active_file ",
        "30 23 0:26 / /sys/fs/cgroup rw",
        " - cgroup2 cgroup2 rw\n",
        " - cgroup cgroup rw,memory\n",
        "\\040",
        "\\377",
        "\\+12",
        "some avg10=",
        "inf",
        "nan",
        "NVRM version: ",
        "580.159.04",
        "\u{e9}",
    ],
    runs: 1500,
    bytes_max: 4096,
};

pub(crate) fn run(input: &[u8]) {
    let folder = tree::folder();
    tree::make(input, folder.path());
    let root = SystemRoot::new(folder.path());
    match SystemMemory::read(&root) {
        Ok(memory) => check_memory(&memory),
        Err(error) => check_words(&error.to_string()),
    }
    match root.mounts() {
        Ok(mounts) => drop(mounts),
        Err(error) => check_words(&error.to_string()),
    }
    match module_version(&root) {
        Ok(version) => drop(registration_refused(true, version.as_deref())),
        Err(error) => check_words(&error.to_string()),
    }
    let file = File::open("/dev/null").expect("it is there");
    let _ = FileSystem::of(file.as_fd(), &root);
    check_room(root);
}

fn check_memory(memory: &SystemMemory) {
    for number in [0, 1 << 20, u64::MAX] {
        let allowance = memory.allowance(number, memory.default_margin_bytes());
        assert!(allowance.room_bytes <= memory.available_bytes);
        for room in memory.groups.iter().filter_map(GroupMemory::room_bytes) {
            assert!(allowance.room_bytes <= room);
        }
    }
}

/// What is held is never more than may be.
fn check_room(root: SystemRoot) {
    let room = LockedRoom::new(root, Some(1 << 30));
    let allowed = room.allowance_bytes();
    assert!(allowed <= 1 << 30);
    let _ = (room.is_short(), room.excess_bytes(), room.spare_bytes());
    for bytes in [1 << 20, u64::MAX] {
        if room.try_hold(bytes) {
            assert!(room.held_bytes() <= allowed);
            room.release(bytes);
        }
    }
    assert_eq!(room.held_bytes(), 0);
}
