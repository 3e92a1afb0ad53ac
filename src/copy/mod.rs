//! Bytes on their way from files to frames.

mod cache;
pub mod engine;
pub mod fill;
mod gpu_clock;
mod host_copies;
mod locked_bytes;
mod pace;
pub mod pipeline;
mod place;
pub mod readers;
mod registered;
pub mod ring;
mod saved;
mod scrub;
mod span;
pub mod staging;
pub mod transfer;
mod trial;
mod warmth;
mod windows;
