//! What all the traces of a run came to, to be said at the end.

use std::collections::BTreeMap;
use std::fmt;

use vbar::driver::DriverCode;
use vbar::driver::sim::Struck;

/// Counts.
#[derive(Default)]
pub(crate) struct Totals {
    pub(crate) seeds: u64,
    pub(crate) operations: BTreeMap<&'static str, u64>,
    /// Calls that failed because they were told to, by verb and code.
    pub(crate) failures: BTreeMap<(&'static str, i32), u64>,
    pub(crate) file_faults: u64,
    pub(crate) bytes_verified: u64,
    pub(crate) refusals: BTreeMap<&'static str, u64>,
    pub(crate) losses: u64,
    /// Ranges that were saved.
    pub(crate) saves: u64,
    pub(crate) set_aside: u64,
    pub(crate) violations: u64,
}

impl Totals {
    pub(crate) fn count(&mut self, word: &'static str) {
        *self.operations.entry(word).or_default() += 1;
    }

    pub(crate) fn refuse(&mut self, word: &'static str) {
        *self.refusals.entry(word).or_default() += 1;
    }

    pub(crate) fn add_struck(&mut self, struck: &[Struck]) {
        for Struck { verb, code, count } in struck {
            *self.failures.entry((verb.name(), code.0)).or_default() += count;
        }
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.seeds += other.seeds;
        for (word, count) in other.operations {
            *self.operations.entry(word).or_default() += count;
        }
        for (what, count) in other.failures {
            *self.failures.entry(what).or_default() += count;
        }
        for (word, count) in other.refusals {
            *self.refusals.entry(word).or_default() += count;
        }
        self.file_faults += other.file_faults;
        self.bytes_verified += other.bytes_verified;
        self.losses += other.losses;
        self.saves += other.saves;
        self.set_aside += other.set_aside;
        self.violations += other.violations;
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operations: u64 = self.operations.values().sum();
        let failures: u64 = self.failures.values().sum();
        writeln!(
            f,
            "simulated: {} seeds, {operations} operations, {failures} driver failures, {} file \
             faults, {} devices lost, {} bytes verified, {} ranges saved, {} worlds with something \
             set aside, {} violations",
            self.seeds,
            self.file_faults,
            self.losses,
            self.bytes_verified,
            self.saves,
            self.set_aside,
            self.violations
        )?;
        let mut by_code: BTreeMap<i32, u64> = BTreeMap::new();
        let mut by_verb: BTreeMap<&str, u64> = BTreeMap::new();
        for ((verb, code), count) in &self.failures {
            *by_code.entry(*code).or_default() += count;
            *by_verb.entry(verb).or_default() += count;
        }
        let codes =
            by_code.iter().map(|(code, count)| format!("{} {count}", DriverCode(*code).name()));
        writeln!(f, "  failures by code: {}", codes.collect::<Vec<_>>().join(", "))?;
        let list = |map: &BTreeMap<&str, u64>| {
            map.iter().map(|(word, count)| format!("{word} {count}")).collect::<Vec<_>>().join(", ")
        };
        writeln!(f, "  failures by verb: {}", list(&by_verb))?;
        let operations = self.operations.iter().map(|(word, count)| (*word, *count)).collect();
        writeln!(f, "  operations: {}", list(&operations))?;
        let refusals = self.refusals.iter().map(|(word, count)| (*word, *count)).collect();
        write!(f, "  refusals: {}", list(&refusals))
    }
}
