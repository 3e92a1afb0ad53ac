//! What the machine's memory and its control groups leave for page-locked memory.

use std::path::PathBuf;

use serde::Serialize;
use vbar::host::allowance::{Bound, SystemMemory};
use vbar::units::{GIB, format_bytes};

use super::line::Line;

/// Less than this is hardly worth having.
const ALLOWANCE_SMALL: u64 = GIB;

/// The serialized form of [`SystemMemory`] and what it comes to.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
pub(super) struct Memory {
    pub(super) total_bytes: u64,
    available_bytes: u64,
    groups: Vec<Group>,
    margin_bytes: u64,
    pub(super) allowance_bytes: u64,
    /// `machine`, or the folder of the group that leaves least.
    pub(super) bound_by: String,
}

#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
struct Group {
    folder: PathBuf,
    limit_bytes: Option<u64>,
    current_bytes: u64,
    file_bytes: u64,
    room_bytes: Option<u64>,
}

impl Memory {
    /// Nothing is held yet: the doctor page-locks nothing when it asks.
    pub(super) fn new(memory: SystemMemory) -> Self {
        let margin_bytes = memory.default_margin_bytes();
        let allowance = memory.allowance(0, margin_bytes);
        let bound_by = match allowance.bound {
            Bound::Machine => "machine".to_owned(),
            Bound::Group(index) => memory.groups[index].folder.display().to_string(),
        };
        let groups = memory.groups.into_iter().map(|group| Group {
            room_bytes: group.room_bytes(),
            folder: group.folder,
            limit_bytes: group.limit_bytes,
            current_bytes: group.current_bytes,
            file_bytes: group.file_bytes,
        });
        Self {
            total_bytes: memory.total_bytes,
            available_bytes: memory.available_bytes,
            groups: groups.collect(),
            margin_bytes,
            allowance_bytes: allowance.bytes,
            bound_by,
        }
    }

    pub(super) fn lines(&self) -> Vec<Line> {
        let (total, available) =
            (format_bytes(self.total_bytes), format_bytes(self.available_bytes));
        let ram = Line::ok("RAM", format!("{available} available of {total}"));
        let mut lines = vec![ram];
        lines.extend(self.groups.iter().filter_map(Group::line));
        if lines.len() == 1 {
            let depth = self.groups.len();
            lines.push(Line::ok("cgroup", format!("no memory limit ({depth} groups seen)")));
        }
        lines.push(self.allowance());
        lines
    }

    fn allowance(&self) -> Line {
        const TOPIC: &str = "RAM allowance";
        let margin = format_bytes(self.margin_bytes);
        let text = format!(
            "{} may be page-locked: what {} leaves, less {margin}",
            format_bytes(self.allowance_bytes),
            if self.bound_by == "machine" { "the machine" } else { &self.bound_by },
        );
        if self.allowance_bytes >= ALLOWANCE_SMALL {
            return Line::ok(TOPIC, text);
        }
        let advice = match &*self.bound_by {
            "machine" => "end what holds memory; little can be kept for streaming",
            _ => "give the container or group more memory; little can be kept for streaming",
        };
        Line::note(TOPIC, text, advice)
    }
}

impl Group {
    /// None without a limit.
    fn line(&self) -> Option<Line> {
        let text = format!(
            "{} at most, {} used, {} of them file pages ({})",
            format_bytes(self.limit_bytes?),
            format_bytes(self.current_bytes),
            format_bytes(self.file_bytes),
            self.folder.display()
        );
        Some(Line::ok("cgroup", text))
    }
}

#[cfg(test)]
mod tests {
    use vbar::units::MIB;

    use super::super::line::Level;
    use super::super::machine::tests::machine;
    use super::*;

    fn memory(limit: &str) -> Memory {
        let (_folder, machine) = machine(
            &[
                ("proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable: 25165824 kB\n"),
                ("proc/self/cgroup", "0::/pod/app\n"),
                ("proc/self/mountinfo", "30 2 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
                ("sys/fs/cgroup/pod/memory.max", limit),
                ("sys/fs/cgroup/pod/memory.current", "1073741824\n"),
                ("sys/fs/cgroup/pod/memory.stat", "active_file 536870912\ninactive_file 0\n"),
                ("sys/fs/cgroup/pod/app/memory.max", "max\n"),
                ("sys/fs/cgroup/pod/app/memory.current", "1\n"),
            ],
            &[],
        );
        Memory::new(SystemMemory::read(&machine.root).unwrap())
    }

    #[test]
    fn a_limit_around_the_process_is_found_and_counts() {
        let memory = memory("8589934592\n");
        assert_eq!(memory.bound_by, "/sys/fs/cgroup/pod");
        // 8 GiB less what cannot be dropped, less the margin of a sixteenth.
        assert_eq!(memory.allowance_bytes, 8 * GIB - 512 * MIB - 512 * MIB);
        let lines = memory.lines();
        let texts: Vec<_> = lines.iter().map(|line| (&*line.topic, line.verdict)).collect();
        let ok = Level::Ok;
        assert_eq!(texts, [("RAM", ok), ("cgroup", ok), ("RAM allowance", ok)]);
        assert!(lines[1].text.starts_with("8.0 GiB at most, 1.0 GiB used"), "{lines:?}");
    }

    #[test]
    fn a_small_allowance_is_noted() {
        let lines = memory("1610612736\n").lines();
        let allowance = lines.last().unwrap();
        assert_eq!(allowance.verdict, Level::Note, "{lines:?}");
        assert!(allowance.advice.as_ref().unwrap().contains("container"), "{lines:?}");
    }

    #[test]
    fn without_a_limit_the_machine_counts() {
        let memory = memory("max\n");
        assert_eq!((&*memory.bound_by, memory.allowance_bytes), ("machine", 22 * GIB));
        let lines = memory.lines();
        assert_eq!(lines[1].text, "no memory limit (2 groups seen)");
        assert!(lines[2].text.contains("the machine leaves"), "{lines:?}");
    }
}
