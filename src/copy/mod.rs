//! Bytes on their way from files to frames.

pub mod engine;
pub mod fill;
pub mod ring;
pub mod staging;
