//! CUDA virtual-memory allocator: run models larger than the GPU.
//!
//! A *VBAR* reserves device addresses at no cost; a *fault* puts physical memory behind them when
//! a layer needs its weights; the *evictor* takes it back from the coldest pages; bound VBARs
//! *fill* themselves from safetensors files. [`Runtime`] is where a program starts.
//!
//! # Two flows, one direction each
//!
//! ```text
//! bytes      file -> page-locked slot (staging ring) -> copy (fill stream) -> frame -> tensor
//! decisions  pressure -> budget -> policy -> plan -> pager -> driver
//! ```
//!
//! A module imports only from lower rows, or from its own folder on its own row; `tests/tidy.rs`
//! checks it. Each file opens with what it owns and what it leaves to others.
//!
//! ```text
//! 9  ffi                                            bin: the command line
//! 8  runtime        one per device: what a program opens
//! 7  torch          PyTorch's allocator, on the pager's frames         model/synth
//! 5  memory/{pager, pins}    the one place where pages change hands
//! 4  memory/{vbar, space, frames}                   copy/{staging, fill}
//! 3  sync/{fence, context, device, wait, clock}     host: files, page-locked memory
//! 2  memory/{page_table, policy, budget}  model/{binding, schedule, placement, policy_model}
//!    copy/ring  host/{safetensors, allowance}                                          pure
//! 1  driver/{cuda, sim}      the door
//! 0  units  error  names  options  outcome  counters  trace  process  slots  sync/ticket
//!    driver/code
//! ```
//!
//! # Locks
//!
//! Three, taken in this order, and none of them held while anybody waits or a driver call is made
//! that maps, copies or creates:
//!
//! 1. the pager's state, one per device;
//! 2. a stream slot's ring of events (two are never held together);
//! 3. the staging ring's order of slots.
//!
//! Locks that guard one lookup (the registry of runtimes, tokens, the filler's place, the thread)
//! are taken alone; that of the leases of the program's memory, under no other, has the second
//! under it, and that of the place of PyTorch's allocator the first, once. The allocator's own is
//! taken alone and held for as long as it takes to find a block; that of a record of its requests,
//! taken alone otherwise, has it under it when the record begins. A trace's, under any other, is
//! held for as long as it takes to append a record. The hit path takes none. Two more are taken
//! first of all and only by what PyTorch calls: one while a device of its is opened, one while a
//! filter of a graph pool is asked, as PyTorch's own allocator does. A wait asks the waiting
//! thread's check ([`set_wait_check`]), which is the program's code: nobody who waits holds a lock.
//! The child of a fork takes none, gives none back and wakes nobody (`sync/lock`), nor does a
//! process that exits.
//!
//! # Threads
//!
//! None but the callers', unless [`RuntimeOptions::threads`] asks for them.

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
pub mod slots;
pub mod sync;
pub mod torch;
pub mod trace;
pub mod units;

pub use error::{Error, ErrorCode, Result};
pub use options::{HostMapped, RuntimeOptions, Threads};
pub use outcome::{Reason, Refusal, WaitKind};
pub use runtime::{Allocation, AllocationFault, Fault, Guard, Guards, ModelBar, Runtime, Vbar};
pub use sync::wait::{WaitCheck, set_wait_check};

/// The README's programs are compiled with the documentation's tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
