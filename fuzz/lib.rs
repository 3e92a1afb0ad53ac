//! The targets of `tests/fuzz`, for libFuzzer.

#[expect(dead_code, reason = "a test runs them on stable Rust and uses more of them")]
#[path = "../tests/fuzz/targets/mod.rs"]
mod targets;

/// Runs a target on an input.
///
/// # Panics
/// When a promise is broken, which is what is looked for.
pub fn run(target: &str, input: &[u8]) {
    (targets::find(target).run)(input);
}
