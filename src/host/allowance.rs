//! How much host memory may be page-locked and registered: what the system says is left, less a
//! margin.
//!
//! Pure: numbers in, numbers out; `host/system_memory` reads them. Page-locked memory cannot be
//! swapped or dropped, so what is measured is what the kernel could give out without swapping: its
//! own estimate for the machine (`MemAvailable`, proc(5)), and for each memory control group, up to
//! the root, its limit less what it uses, clean file pages not counted as use since the kernel
//! drops those first. `RLIMIT_MEMLOCK` is no part of it: the driver does not check it.

use std::path::PathBuf;

use crate::units::{GIB, MIB};

/// The margin is this part of the memory that the innermost limit leaves in all.
const MARGIN_PARTS: u64 = 16;
/// The margin in bytes, at least and at most: small machines need some room to live in, and large
/// ones do not need a sixteenth of a terabyte.
const MARGIN_MIN: u64 = 512 * MIB;
const MARGIN_MAX: u64 = 8 * GIB;

/// The memory of one control group and of all groups below it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupMemory {
    /// Its folder in the control group's file system.
    pub folder: PathBuf,
    /// What it may use, in bytes; `None` where there is no limit. Above `memory.high` a group is
    /// slowed down until it gives memory back, which page-locked memory cannot be: where that is
    /// the smaller one, it is the limit.
    pub limit_bytes: Option<u64>,
    /// What it uses, file pages included, in bytes.
    pub current_bytes: u64,
    /// File pages among them, active and inactive, in bytes.
    pub file_bytes: u64,
}

impl GroupMemory {
    /// What it may use beyond what it cannot give back, in bytes; `None` where there is no limit.
    #[must_use]
    pub fn room_bytes(&self) -> Option<u64> {
        let kept_bytes = self.current_bytes.saturating_sub(self.file_bytes);
        self.limit_bytes.map(|limit| limit.saturating_sub(kept_bytes))
    }
}

/// The memory of the machine, and of the groups that this process is in.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SystemMemory {
    /// All memory of the machine, in bytes.
    pub total_bytes: u64,
    /// What the kernel could give out without swapping, in bytes.
    pub available_bytes: u64,
    /// The process's group, then those around it.
    pub groups: Vec<GroupMemory>,
}

/// What is shortest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bound {
    /// The machine's available memory.
    Machine,
    /// The group of that index.
    Group(usize),
}

/// How much may be held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allowance {
    /// Page-locked and registered bytes that may be held in all, those held now included.
    pub bytes: u64,
    /// What is left of the machine and of each group, whichever is least, in bytes.
    pub room_bytes: u64,
    /// Which of them that is.
    pub bound: Bound,
}

impl SystemMemory {
    /// What may be held in all by a process that holds `held_bytes` of anonymous page-locked
    /// memory: those, and what is left, less a margin for everybody else.
    #[must_use]
    pub fn allowance(&self, held_bytes: u64, margin_bytes: u64) -> Allowance {
        let groups = self.groups.iter().enumerate();
        let rooms = groups.filter_map(|(at, group)| Some((group.room_bytes()?, Bound::Group(at))));
        let machine = (self.available_bytes, Bound::Machine);
        // The first of equals: the machine, then the innermost group.
        let least = std::iter::once(machine).chain(rooms).min_by_key(|(room, _)| *room);
        let (room_bytes, bound) = least.unwrap_or(machine);
        let bytes = held_bytes.saturating_add(room_bytes).saturating_sub(margin_bytes);
        Allowance { bytes, room_bytes, bound }
    }

    /// The margin unless told otherwise, in bytes: a sixteenth of the machine's memory, or of the
    /// smallest limit around the process; 512 MiB at least, 8 GiB at most.
    #[must_use]
    pub fn default_margin_bytes(&self) -> u64 {
        let limits = self.groups.iter().filter_map(|group| group.limit_bytes);
        let least = limits.fold(self.total_bytes, u64::min);
        (least / MARGIN_PARTS).clamp(MARGIN_MIN, MARGIN_MAX)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn group(limit_bytes: Option<u64>, current_bytes: u64, file_bytes: u64) -> GroupMemory {
        GroupMemory { folder: PathBuf::new(), limit_bytes, current_bytes, file_bytes }
    }

    fn memory(available_bytes: u64, groups: Vec<GroupMemory>) -> SystemMemory {
        SystemMemory { total_bytes: 64 * GIB, available_bytes, groups }
    }

    #[test]
    fn the_shortest_counts() {
        let free = memory(40 * GIB, vec![]);
        let allowance = free.allowance(0, GIB);
        assert_eq!((allowance.bytes, allowance.bound), (39 * GIB, Bound::Machine));
        // File pages can be dropped: they are room.
        let inner = group(Some(8 * GIB), 7 * GIB, 5 * GIB);
        let outer = group(Some(32 * GIB), 30 * GIB, 2 * GIB);
        let nested = memory(40 * GIB, vec![inner, group(None, 9 * GIB, 0), outer]);
        let allowance = nested.allowance(0, GIB);
        assert_eq!((allowance.room_bytes, allowance.bound), (4 * GIB, Bound::Group(2)));
        assert_eq!(allowance.bytes, 3 * GIB);
    }

    #[test]
    fn what_is_held_is_allowed_until_others_need_it() {
        let tight = memory(GIB, vec![]);
        assert_eq!(tight.allowance(10 * GIB, 2 * GIB).bytes, 9 * GIB);
        assert_eq!(tight.allowance(0, 2 * GIB).bytes, 0);
    }

    #[test]
    fn a_group_above_its_limit_has_no_room() {
        assert_eq!(group(Some(GIB), 3 * GIB, GIB).room_bytes(), Some(0));
        // More file pages than use: the counters are read one after the other.
        assert_eq!(group(Some(GIB), GIB, 2 * GIB).room_bytes(), Some(GIB));
        assert_eq!(group(None, GIB, 0).room_bytes(), None);
    }

    #[test]
    fn the_margin_follows_the_smallest_limit() {
        let margin = |groups| memory(0, groups).default_margin_bytes();
        assert_eq!(margin(vec![]), 4 * GIB);
        assert_eq!(margin(vec![group(Some(16 * GIB), 0, 0), group(None, 0, 0)]), GIB);
        assert_eq!(margin(vec![group(Some(GIB), 0, 0)]), MARGIN_MIN);
    }

    proptest! {
        #[test]
        fn no_room_is_overrun(
            held in any::<u64>(), margin in any::<u64>(), available in any::<u64>(),
            numbers in prop::collection::vec(any::<(bool, u64, u64, u64)>(), 0..4),
        ) {
            let groups = numbers.into_iter().map(|(limited, limit, current, file)| {
                group(limited.then_some(limit), current, file)
            });
            let memory = memory(available, groups.collect());
            let allowance = memory.allowance(held, margin);
            prop_assert!(allowance.room_bytes <= available);
            for room in memory.groups.iter().filter_map(GroupMemory::room_bytes) {
                prop_assert!(allowance.room_bytes <= room);
            }
            let most = u128::from(held) + u128::from(allowance.room_bytes);
            prop_assert!(u128::from(allowance.bytes) <= most.saturating_sub(u128::from(margin)));
        }
    }
}
