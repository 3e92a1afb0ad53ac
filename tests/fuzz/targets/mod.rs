//! The targets: what is done with bytes, and the promises that must hold whatever they are.
//!
//! Compiled twice: into the test `fuzz` on stable Rust, and for libFuzzer (`fuzz/`).

pub(crate) mod calls;
pub(crate) mod header;
pub(crate) mod index;
pub(crate) mod options;
mod streamed;
pub(crate) mod system;
mod tree;

/// A target.
pub(crate) struct Target {
    /// Its name, and its corpus's.
    pub(crate) name: &'static str,
    /// Panics when a promise is broken.
    pub(crate) run: fn(&[u8]),
    /// Words that its inputs are made of.
    pub(crate) words: &'static [&'static str],
    /// Mutations that a test runs.
    pub(crate) runs: u64,
    /// The longest input.
    pub(crate) bytes_max: usize,
}

/// All of them.
pub(crate) const TARGETS: &[Target] =
    &[header::TARGET, index::TARGET, options::TARGET, system::TARGET, calls::TARGET];

/// The target of that name.
///
/// # Panics
/// If there is none.
pub(crate) fn find(name: &str) -> &'static Target {
    TARGETS.iter().find(|target| target.name == name).expect("a target")
}

/// An error of something that strangers wrote stays on one line, without control characters: it
/// goes to logs and terminals.
pub(crate) fn check_words(error: &str) {
    let control = error.chars().find(|character| character.is_control());
    assert!(control.is_none() && !error.is_empty(), "a message with {control:?}: {error:?}");
    assert!(error.len() < 20_000, "a message of {} bytes", error.len());
}
