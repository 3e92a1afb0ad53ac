//! The committed inputs of a target, in the order of their names.

use std::path::{Path, PathBuf};

/// The folder of a target's inputs.
pub(crate) fn folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(target)
}

/// The inputs of a target; none where it has no folder.
pub(crate) fn of(target: &str) -> Vec<Vec<u8>> {
    let Ok(entries) = std::fs::read_dir(folder(target)) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}
