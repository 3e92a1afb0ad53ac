//! The C ABI: ids instead of pointers, one status, outputs only on success.
//!
//! Each export guards itself (`call`), checks its arguments, calls one method of the runtime and
//! writes its outputs. `include/vbar.h` is generated from this folder, `include/vbar_sim.h` from
//! its files [`sim`] and [`sim_graph`]; `tests/abi.rs` compares both, and the exported symbols with
//! them. Decides nothing about memory.
//!
//! ```text
//! call     the boundary: panics, statuses, messages       value    structs, texts, pointers
//! device -> bar -> allocation -> fault -> token           status   numbers and their texts
//!        -> model          -> dlpack  log   messages        sim      the simulated device
//!                           -> capsule  of Python
//!        -> ahead  hints and wishes      wait     time-outs, cancelling
//!        -> transfer  copies of the program's own      saves    what it wrote, kept
//! torch    what PyTorch calls
//! ```

pub mod ahead;
pub mod allocation;
pub mod bar;
mod call;
pub mod capsule;
pub mod device;
pub mod dlpack;
pub mod fault;
pub mod log;
pub mod model;
pub mod saves;
pub mod sim;
pub mod sim_graph;
pub mod source;
pub mod statistics;
pub mod status;
pub mod token;
pub mod torch;
pub mod transfer;
mod value;
pub mod wait;

pub use status::{VBAR_ABI_VERSION, VbarStatus};

/// Tags of the tables of ids, so that an id of one type is none of another.
mod tag {
    pub(super) const DEVICE: u8 = 1;
    pub(super) const BAR: u8 = 2;
    pub(super) const ALLOCATION: u8 = 3;
    pub(super) const MODEL: u8 = 4;
    pub(super) const TOKEN: u8 = 5;
    pub(super) const SIM: u8 = 6;
    pub(super) const SIM_GRAPH: u8 = 7;
    pub(super) const TORCH_GRAPH: u8 = 8;
}
