//! Not a module but a crate's root, of the package in `tests/loom` (`make loom`): the modules that
//! share state between threads without one lock around it, and what they stand on, with loom's
//! atomics and locks. What is checked is in the `every_order` modules below them.

#![allow(dead_code, unused_imports, reason = "of the modules below, models use a part")]

pub mod counters;
pub mod driver;
pub mod error;
pub mod names;
pub mod options;
pub mod outcome;
pub mod process;
pub mod slots;
pub mod sync;
pub mod trace;
pub mod units;

/// Page-locked memory, as far as slots of the staging ring need it.
pub mod host {
    pub mod anonymous;
    pub mod locked;
    pub mod own;
}

/// The staging ring.
pub mod copy {
    pub mod ring;
    pub mod staging;
}

/// The words of pages.
pub mod memory {
    pub mod page_table;
}
