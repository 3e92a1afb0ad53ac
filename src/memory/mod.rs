//! Device memory: pages, frames, budget, and the pager that moves one behind the other.

pub mod budget;
pub mod page_table;
pub mod policy;
