//! What happened: operations by thread, violations, errors that were to be expected.
//!
//! Shared by all threads of a run. The first violation ends the run: what comes after it says
//! nothing.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use vbar::{Error, ErrorCode};

/// Operations of a thread that are remembered.
const LAST_OPERATIONS: usize = 12;
/// Violations that are kept.
const VIOLATIONS_MAX: usize = 100;

/// See the module's text.
pub(super) struct Journal {
    /// Whether the driver was told to fail.
    fails: bool,
    stop: AtomicBool,
    operations: AtomicU64,
    checks: AtomicU64,
    unchecked: AtomicU64,
    violations: Mutex<Vec<String>>,
    errors: Mutex<BTreeMap<&'static str, u64>>,
    last: Vec<Mutex<VecDeque<String>>>,
}

impl Journal {
    pub(super) fn new(threads: usize, fails: bool) -> Self {
        Self {
            fails,
            stop: AtomicBool::new(false),
            operations: AtomicU64::new(0),
            checks: AtomicU64::new(0),
            unchecked: AtomicU64::new(0),
            violations: Mutex::default(),
            errors: Mutex::default(),
            last: (0..threads).map(|_| Mutex::default()).collect(),
        }
    }

    /// An operation begins.
    pub(super) fn operation(&self, thread: usize, text: String) {
        self.operations.fetch_add(1, Ordering::Relaxed);
        let mut last = self.last[thread].lock();
        if last.len() == LAST_OPERATIONS {
            last.pop_front();
        }
        last.push_back(text);
    }

    /// Something that must never happen.
    pub(super) fn violation(&self, text: String) {
        self.stop();
        let mut violations = self.violations.lock();
        if violations.len() < VIOLATIONS_MAX && !violations.contains(&text) {
            violations.push(text);
        }
    }

    /// An error of a call: one that may come is counted, any other is a violation.
    pub(super) fn error(&self, doing: &'static str, error: &Error) {
        let may_come = match error.code() {
            // Some thread cancels all waits now and then.
            ErrorCode::Cancelled => true,
            ErrorCode::Driver | ErrorCode::HostMemory | ErrorCode::NoAddresses => self.fails,
            _ => false,
        };
        if may_come {
            *self.errors.lock().entry(doing).or_default() += 1;
        } else {
            self.violation(format!("{doing}: {:?}: {error}", error.code()));
        }
    }

    /// Checksums were compared, or could not be because the driver failed.
    pub(super) fn compared(&self, checks: u64, unchecked: u64) {
        self.checks.fetch_add(checks, Ordering::Relaxed);
        self.unchecked.fetch_add(unchecked, Ordering::Relaxed);
    }

    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    pub(super) fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    /// Checksums that were compared, and that could not be.
    pub(super) fn checks(&self) -> (u64, u64) {
        (self.checks.load(Ordering::Relaxed), self.unchecked.load(Ordering::Relaxed))
    }

    pub(super) fn violations(&self) -> Vec<String> {
        self.violations.lock().clone()
    }

    /// Errors that were to be expected, by what was being done.
    pub(super) fn errors(&self) -> BTreeMap<&'static str, u64> {
        self.errors.lock().clone()
    }

    /// The last operations of each thread, the oldest first.
    pub(super) fn last_operations(&self) -> Vec<Vec<String>> {
        self.last.iter().map(|last| last.lock().iter().cloned().collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_injected_failures_are_forgiven() {
        let driver = Error::new(ErrorCode::Driver, "cuMemCreate failed");
        let quiet = Journal::new(1, false);
        quiet.error("fault", &driver);
        assert_eq!(quiet.violations().len(), 1);
        assert!(quiet.is_stopped());
        let failing = Journal::new(1, true);
        failing.error("fault", &driver);
        assert!(!failing.is_stopped());
        failing.error("fault", &Error::new(ErrorCode::DeviceLost, "lost"));
        assert!(failing.is_stopped());
    }

    #[test]
    fn the_last_operations_are_kept() {
        let journal = Journal::new(2, false);
        (0..20).for_each(|n| journal.operation(1, format!("fault {n}")));
        let last = journal.last_operations();
        assert_eq!((last[0].len(), last[1].len()), (0, LAST_OPERATIONS));
        assert_eq!(last[1].last().map(String::as_str), Some("fault 19"));
        assert_eq!(journal.operations(), 20);
    }
}
