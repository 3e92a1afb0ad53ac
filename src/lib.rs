//! CUDA virtual-memory allocator: run models larger than the GPU.
//!
//! A *VBAR* reserves device addresses at no cost; a *fault* puts physical memory behind them when
//! a layer needs its weights; the *evictor* takes it back from the coldest pages; bound VBARs
//! *fill* themselves from safetensors files.

pub mod copy;
pub mod counters;
pub mod driver;
pub mod error;
pub mod ffi;
pub mod host;
pub mod memory;
pub mod model;
pub mod names;
pub mod options;
pub mod outcome;
pub mod process;
pub mod runtime;
pub mod sync;
pub mod units;

pub use error::{Error, ErrorCode, Result};
pub use options::RuntimeOptions;
pub use outcome::{Reason, WaitKind};
pub use runtime::{Allocation, AllocationFault, Fault, Guard, ModelBar, Runtime, Vbar};
