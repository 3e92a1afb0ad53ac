//! The host's side of the bytes: model files, their headers, and reading them.

pub mod bound;
pub mod checksum;
pub mod locked;
pub mod model_files;
pub mod safetensors;
pub mod source;
