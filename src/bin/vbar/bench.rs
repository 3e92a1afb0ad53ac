//! `vbar bench`: figures beside their bounds, as a table, as JSON and as a plot.
//!
//! Owns the choice of the benchmark; each is a module of its own.

mod plot;
mod policy;

use clap::{Args, Subcommand};
use vbar::Result;

use crate::help::Help;
use crate::output::{Output, Verdict};

pub(crate) const HELP: Help = Help {
    examples: &[
        ("Which policy loads how much, and how long that takes", "vbar bench policy"),
        ("The same for a slower link, drawn", "vbar bench policy --link 25 --svg policy.svg"),
    ],
    notes: &[
        "policy computes: it needs no device, and always comes to the same. Caches that load on \
         demand stand beside a resident prefix, the library's spread placement and Belady's \
         optimum, on a loop over one model, on uneven layers and on a workflow of several models.",
    ],
    exit: &[(0, "the benchmark was run")],
};

/// Measure or compute figures beside their bounds
#[derive(Args)]
#[command(after_help = HELP.text())]
pub(crate) struct Arguments {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Subcommand)]
enum Benchmark {
    Policy(policy::Arguments),
}

/// Runs the command.
pub(crate) fn bench(arguments: &Arguments, output: &Output) -> Result<Verdict> {
    match &arguments.benchmark {
        Benchmark::Policy(arguments) => policy::policy(arguments, output),
    }
}
