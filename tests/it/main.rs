//! What a user of the library sees, one module a part.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod cli;
mod door;
mod files;
mod refill;
mod scenarios;
mod sim_device;
mod world;
