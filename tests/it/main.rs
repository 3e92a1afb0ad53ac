//! Integration tests: one binary, a module a subject.

mod door;
mod sim_device;
