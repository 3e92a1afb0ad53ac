//! The host's side of the bytes: model files, their headers, reading them, and the memory that may
//! hold them.

pub mod allowance;
pub mod anonymous;
pub mod bound;
pub mod carved;
pub mod checksum;
pub mod direct;
pub mod file_pages;
pub mod file_system;
pub mod kernel_module;
pub mod locked;
pub mod memory;
pub mod model_files;
pub mod mounts;
pub mod output;
pub(crate) mod own;
pub mod pageable;
pub mod reading;
pub mod room;
pub mod safetensors;
pub mod source;
pub mod spare;
pub mod system_memory;
