//! Programs that call every function of the C ABI in any order with anything: ids that were closed
//! or belong to something else, pointers that are NULL or not aligned, sizes that no version has,
//! numbers near 2^64. A byte of an input is a function or a choice of one of its arguments.
//!
//! What a call may not do whatever it is given: end the process, return a status that its header
//! does not tell, break a rule of CUDA on the simulated device, or leave anything behind when all
//! is closed. What a program must promise is kept: kernels touch what they hold, on its stream;
//! streams are idle when they are destroyed; what waits without end is called with no stream held.
//!
//! ```text
//! world   what lives, and how arguments are drawn     abi       the functions
//! memory  devices, VBARs, tokens, allocations         statuses  what the headers say
//! models  models, hints, DLPack, messages, waits      simulated torch
//! ```

mod abi;
mod memory;
mod models;
mod simulated;
pub(crate) mod statuses;
mod torch;
mod world;

use std::ffi::CStr;

use super::Target;
use world::World;

pub(crate) const TARGET: Target =
    Target { name: "calls", run, words: &[], runs: 1500, bytes_max: 600 };

/// The variable that has each call of an input told.
const TELL: &str = "VBAR_FUZZ_TELL";

/// What a call came to; `None` of a function without a status.
type Came = Option<i32>;
type Op = (&'static str, fn(&mut World, &mut Bytes<'_>) -> Came);

/// All functions, those that make something more than once.
fn ops() -> impl Iterator<Item = &'static Op> {
    [memory::OPS, models::OPS, simulated::OPS, torch::OPS].into_iter().flatten()
}

/// The names of the functions that are called.
pub(crate) fn functions() -> impl Iterator<Item = &'static str> {
    ops().map(|(name, _)| *name)
}

/// Functions beside which a stream may be held: none of them waits for it without end.
const BESIDE_A_HELD_STREAM: &[&str] = &[
    "vbar_bar_fault",
    "vbar_device_fault_many",
    "vbar_model_fault",
    "vbar_allocation_fault",
    "vbar_token_unpin",
    "vbar_tokens_unpin",
    "vbar_token_commit",
    "vbar_token_also_used_on",
    "vbar_bar_end_of_run",
    "vbar_bar_info",
    "vbar_device_statistics",
    "vbar_bar_residency",
    "vbar_bar_prioritise",
    "vbar_bar_create",
    "vbar_bar_allocate",
    "vbar_allocation_place",
    "vbar_sim_launch_pattern",
    "vbar_sim_launch_sleep",
    "vbar_sim_copy_to_host",
];

/// The bytes of an input that were not used yet. Behind their end come zeros.
pub(crate) struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::from(self.byte()) % all.len()]
    }

    fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }
}

fn run(input: &[u8]) {
    let all: Vec<&Op> = ops().collect();
    let mut bytes = Bytes(input);
    let tells = std::env::var_os(TELL).is_some();
    let mut world = World::new(&mut bytes);
    while !bytes.is_empty() {
        let (name, op) = all[usize::from(bytes.byte()) % all.len()];
        if !BESIDE_A_HELD_STREAM.contains(name) {
            world.let_go();
        }
        let came = op(&mut world, &mut bytes);
        if tells {
            let why =
                if came.is_some_and(|status| status != 0) { message() } else { String::new() };
            eprintln!("{name}: {came:?} {why}");
        }
        check_status(name, came);
        let told = message();
        assert!(!told.contains("a bug of vbar"), "{name}: {told}");
    }
    world.end();
}

fn check_status(name: &str, came: Came) {
    let Some(status) = came else { return };
    let told = message();
    assert!(
        statuses::may_return(name, status),
        "{name} returns {status}, which is not told: {told}"
    );
    assert!(status == 0 || !told.is_empty(), "{name} returns {status} and says nothing");
}

/// The thread's last message.
fn message() -> String {
    #[expect(unsafe_code, reason = "a C string")]
    // SAFETY: the pointer is a C string that lives until the thread's next failure.
    let text = unsafe { CStr::from_ptr(abi::vbar_last_message()) };
    text.to_string_lossy().into_owned()
}
