//! Programs of more than one file, for the tests that compile them.

/// Hostile calls of every function.
pub(crate) const HOSTILE: &[&str] = &[
    "tests/abi/hostile.c",
    "tests/abi/hostile_device.c",
    "tests/abi/hostile_bar.c",
    "tests/abi/hostile_model.c",
    "tests/abi/hostile_dlpack.c",
    "tests/abi/hostile_sim.c",
    "tests/abi/hostile_torch.c",
    "tests/abi/hostile_transfer.c",
];
