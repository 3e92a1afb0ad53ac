//! Models: where their bytes lie, in files and in VBARs, in which order they are used, and which of
//! them stay.

pub mod binding;
pub mod placement;
pub mod policy_model;
pub mod schedule;
pub mod synth;
