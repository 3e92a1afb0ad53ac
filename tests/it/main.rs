//! What a user of the library sees, one module a part.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod allocations;
mod bound;
mod bound_memory;
mod cli;
mod cli_bench;
mod cli_doctor;
mod cli_help;
mod cli_inspect;
mod cli_terminal;
mod cli_trace;
mod closing;
mod closing_threads;
mod door;
mod engine;
mod engine_more;
mod files;
mod forked;
mod host_mapped;
mod host_mapped_twin;
mod huge;
mod limits;
mod logs;
mod many;
mod poison;
mod pressure;
mod program;
mod refill;
mod reviewed;
mod reviewed_life;
mod scenarios;
mod scenarios_failures;
mod scenarios_life;
mod scenarios_messages;
mod scenarios_pressure;
mod seams;
mod sim_device;
mod sources;
mod streams;
mod threads;
mod traces;
mod transient;
mod waits;
mod world;
