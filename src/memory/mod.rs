//! Device memory: pages, frames, budget, and the pager that moves one behind the other.

pub mod budget;
pub mod frames;
pub mod page_table;
pub mod pager;
pub mod pins;
pub mod policy;
pub mod saves;
pub mod space;
pub mod vbar;
