//! Models: where their bytes lie, in files and in VBARs, when they are used, and which of them stay.

pub mod binding;
pub mod schedule;
pub mod synth;
