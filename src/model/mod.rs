//! Models: where their bytes lie, in files and in VBARs.

pub mod binding;
pub mod synth;
