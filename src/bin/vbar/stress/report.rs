//! What a stress run came to.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use vbar::driver::select::Opened;

use super::journal::Journal;
use crate::output::Output;

/// The serialized fields are part of the program's interface.
#[derive(Serialize)]
pub(super) struct Report {
    device: String,
    seed: u64,
    seconds: f64,
    operations: u64,
    /// Checksums that were compared.
    checks: u64,
    /// Checksums that could not be compared, because the driver failed as it was told to.
    unchecked: u64,
    /// Errors that were to be expected, by what was being done.
    errors: BTreeMap<&'static str, u64>,
    violations: usize,
    violation_texts: Vec<String>,
    /// By thread, the oldest first; only after a violation.
    last_operations: Vec<Vec<String>>,
    pub(super) ok: bool,
}

impl Report {
    pub(super) fn new(opened: &Opened, journal: &Journal, seed: u64, time: Duration) -> Self {
        let violation_texts = journal.violations();
        let (checks, unchecked) = journal.checks();
        // A run that compared nothing says nothing.
        let ok = violation_texts.is_empty() && checks > 0;
        Self {
            device: opened.how.clone(),
            seed,
            seconds: time.as_secs_f64(),
            operations: journal.operations(),
            checks,
            unchecked,
            errors: journal.errors(),
            violations: violation_texts.len(),
            last_operations: match violation_texts.is_empty() {
                true => Vec::new(),
                false => journal.last_operations(),
            },
            violation_texts,
            ok,
        }
    }

    pub(super) fn show(&self, output: &Output) {
        output.labelled(
            "did",
            format!(
                "{} operations in {:.1} s, {} checksums compared, {} lost to failures",
                self.operations, self.seconds, self.checks, self.unchecked
            ),
        );
        for (doing, count) in &self.errors {
            output.labelled("errors", format!("{doing}: {count}"));
        }
        if self.ok {
            output.line("ok: no violation");
            return;
        }
        if self.violations == 0 {
            let text = "FAILED: nothing was checked; let fewer calls fail, or give it more time";
            output.line(text);
            return;
        }
        for (thread, operations) in self.last_operations.iter().enumerate() {
            output.line(format!("the last operations of thread {thread}:"));
            operations.iter().for_each(|operation| output.line(format!("  {operation}")));
        }
        self.violation_texts.iter().for_each(|text| output.line(format!("VIOLATION {text}")));
        output.line(format!("FAILED with seed {}", self.seed));
    }
}
