//! Limits that the kernel sets to a process, as far as they matter to page-locked memory, large
//! reservations and model files.

use serde::Serialize;
use vbar::host::mounts::SystemRoot;
use vbar::units::{KIB, format_bytes};
use vbar::{Error, ErrorCode, Result};

use super::line::Line;

/// What the kernel gives a process unless told otherwise.
const MAP_COUNT_USUAL: u64 = 65_530;
/// Files that a program has open beside the model's.
const OTHER_FILES: u64 = 64;

/// The limits; `None` is no limit, or not known to this kernel.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
pub(super) struct Limits {
    memlock_bytes: Option<u64>,
    address_space_bytes: Option<u64>,
    open_files: Option<u64>,
    /// Mappings of a process.
    max_map_count: Option<u64>,
    /// 0: by guess, 1: anything, 2: no more than can be kept.
    overcommit_memory: Option<u64>,
    /// With 2: what may be promised in all, and what is.
    commit_limit_bytes: Option<u64>,
    committed_bytes: Option<u64>,
}

impl Limits {
    pub(super) fn read(root: &SystemRoot) -> Result<Self> {
        const LIMITS: &str = "/proc/self/limits";
        let limits = root.read(LIMITS)?.unwrap_or_default();
        let limit = |name: &str| soft_limit(&limits, name).map_err(|what| wrong(LIMITS, &what));
        let meminfo = root.read("/proc/meminfo")?.unwrap_or_default();
        let kibibytes = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(KIB)
        };
        Ok(Self {
            memlock_bytes: limit("Max locked memory")?,
            address_space_bytes: limit("Max address space")?,
            open_files: limit("Max open files")?,
            max_map_count: number(root, "/proc/sys/vm/max_map_count")?,
            overcommit_memory: number(root, "/proc/sys/vm/overcommit_memory")?,
            commit_limit_bytes: kibibytes("CommitLimit:"),
            committed_bytes: kibibytes("Committed_AS:"),
        })
    }

    /// `simulated`: each resident page of a simulated device is a mapping of the process.
    pub(super) fn lines(&self, simulated: bool, model_files: usize) -> Vec<Line> {
        let memlock = self.memlock_bytes.map_or_else(|| "no limit".to_owned(), format_bytes);
        let memlock = format!("{memlock}; the CUDA driver does not check it");
        vec![
            Line::ok("RLIMIT_MEMLOCK", memlock),
            self.address_space(),
            self.files(model_files as u64),
            self.map_count(simulated),
            self.overcommit(),
        ]
    }

    fn address_space(&self) -> Line {
        const TOPIC: &str = "RLIMIT_AS";
        match self.address_space_bytes {
            None => Line::ok(TOPIC, "no limit"),
            Some(bytes) => Line::note(
                TOPIC,
                format!("{}: CUDA reserves more addresses than memory", format_bytes(bytes)),
                "ulimit -v unlimited",
            ),
        }
    }

    fn files(&self, model_files: u64) -> Line {
        const TOPIC: &str = "RLIMIT_NOFILE";
        let wanted = model_files.saturating_add(OTHER_FILES);
        match self.open_files {
            None => Line::ok(TOPIC, "no limit"),
            Some(files) if files >= wanted => Line::ok(TOPIC, format!("{files} files")),
            Some(files) => Line::note(
                TOPIC,
                format!("{files} files, of which a program and the model's may take {wanted}"),
                format!("ulimit -n {}", wanted.next_power_of_two()),
            ),
        }
    }

    fn map_count(&self, simulated: bool) -> Line {
        const TOPIC: &str = "max_map_count";
        let of = if simulated { "; each resident page of a simulated device is one" } else { "" };
        match self.max_map_count {
            None => Line::ok(TOPIC, "not limited by this kernel"),
            Some(count) if count >= MAP_COUNT_USUAL => {
                Line::ok(TOPIC, format!("{count} mappings{of}"))
            }
            Some(count) => Line::note(
                TOPIC,
                format!("{count} mappings, fewer than the usual {MAP_COUNT_USUAL}{of}"),
                format!("sysctl vm.max_map_count={MAP_COUNT_USUAL}"),
            ),
        }
    }

    fn overcommit(&self) -> Line {
        const TOPIC: &str = "overcommit";
        match (self.overcommit_memory, self.commit_limit_bytes.zip(self.committed_bytes)) {
            (Some(2), Some((limit, committed))) => Line::note(
                TOPIC,
                format!(
                    "strict: {} of {} are promised already; page-locked memory counts",
                    format_bytes(committed),
                    format_bytes(limit)
                ),
                "where allocations fail although memory is free: sysctl vm.overcommit_memory=0",
            ),
            (Some(2), None) => Line::note(
                TOPIC,
                "strict, and /proc/meminfo does not say how much is promised",
                "where allocations fail although memory is free: sysctl vm.overcommit_memory=0",
            ),
            (Some(1), _) => Line::ok(TOPIC, "anything is promised"),
            _ => Line::ok(TOPIC, "by the kernel's guess"),
        }
    }
}

/// The first number behind a limit's name; `Ok(None)` for no limit and for an unknown name.
fn soft_limit(limits: &str, name: &str) -> std::result::Result<Option<u64>, String> {
    let Some(rest) = limits.lines().find_map(|line| line.strip_prefix(name)) else {
        return Ok(None);
    };
    match rest.split_ascii_whitespace().next() {
        Some("unlimited") => Ok(None),
        Some(number) => number.parse().map(Some).map_err(|_| format!("'{name}{rest}'")),
        None => Err(format!("'{name}' has no number")),
    }
}

fn number(root: &SystemRoot, path: &str) -> Result<Option<u64>> {
    let Some(text) = root.read(path)? else { return Ok(None) };
    let text = text.trim();
    text.parse().map(Some).map_err(|_| wrong(path, &format!("'{text}' is no number")))
}

fn wrong(path: &str, what: &str) -> Error {
    Error::new(ErrorCode::Format, format!("{path}: {what}"))
}

#[cfg(test)]
mod tests {
    use super::super::line::Level;
    use super::super::machine::tests::machine;
    use super::*;

    const LIMITS: &str = "\
Limit                     Soft Limit           Hard Limit           Units     
Max open files            1024                 1048576              files     
Max locked memory         8388608              8388608              bytes     
Max address space         unlimited            unlimited            bytes     
";

    fn read(files: &[(&str, &str)]) -> Result<Limits> {
        let (_folder, machine) = machine(files, &[]);
        Limits::read(&machine.root)
    }

    fn verdicts(limits: &Limits, model_files: usize) -> Vec<(String, Level)> {
        let lines = limits.lines(false, model_files);
        lines.into_iter().map(|line| (line.topic, line.verdict)).collect()
    }

    #[test]
    fn usual_limits_are_fine() {
        let usual = read(&[
            ("proc/self/limits", LIMITS),
            ("proc/sys/vm/max_map_count", "1048576\n"),
            ("proc/sys/vm/overcommit_memory", "0\n"),
        ]);
        let usual = usual.unwrap();
        assert_eq!((usual.memlock_bytes, usual.address_space_bytes), (Some(8 << 20), None));
        assert!(verdicts(&usual, 8).iter().all(|(_, level)| *level == Level::Ok), "{usual:?}");
        let lines = usual.lines(true, 1);
        assert!(lines[0].text.starts_with("8.0 MiB; "), "{lines:?}");
        assert!(lines[3].text.contains("each resident page"), "{lines:?}");
        // A tree without these files has no limits.
        let none = read(&[]).unwrap();
        assert!(verdicts(&none, 8).iter().all(|(_, level)| *level == Level::Ok));
    }

    #[test]
    fn tight_limits_are_noted_with_the_command() {
        let limits = LIMITS.replace("unlimited ", "8589934592").replace("1024 ", "96   ");
        let tight = read(&[
            ("proc/self/limits", &limits),
            ("proc/sys/vm/max_map_count", "4096\n"),
            ("proc/sys/vm/overcommit_memory", "2\n"),
            ("proc/meminfo", "CommitLimit:   1048576 kB\nCommitted_AS:  524288 kB\n"),
        ]);
        let lines = tight.unwrap().lines(false, 40);
        let noted = lines.iter().filter(|line| line.verdict == Level::Note);
        let advice: Vec<_> = noted.map(|line| line.advice.as_deref().unwrap()).collect();
        assert_eq!(advice[..2], ["ulimit -v unlimited", "ulimit -n 128"]);
        assert_eq!(advice.len(), 4, "{lines:?}");
        assert!(lines[4].text.contains("512.0 MiB of 1.0 GiB"), "{lines:?}");
    }

    #[test]
    fn what_cannot_be_understood_is_told() {
        let error = read(&[("proc/sys/vm/max_map_count", "many\n")]).unwrap_err().to_string();
        assert_eq!(error, "/proc/sys/vm/max_map_count: 'many' is no number");
        let error = read(&[("proc/self/limits", "Max open files  x y files")]).unwrap_err();
        assert!(error.to_string().starts_with("/proc/self/limits: 'Max open files"), "{error}");
    }
}
