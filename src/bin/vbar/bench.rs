//! `vbar bench`: figures beside their bounds, as a table, as JSON and as a plot.
//!
//! Owns the choice of the benchmark; each is a module of its own.

mod floor;
mod load;
mod plot;
mod policy;
mod stream;
mod subject;

use clap::{Args, Subcommand};
use vbar::Result;

use crate::help::{DEVICES, Help, SIZES};
use crate::output::{Output, Verdict};

pub(crate) const HELP: Help = Help {
    examples: &[
        ("Which policy loads how much, and how long that takes", "vbar bench policy"),
        ("The same for a slower link, drawn", "vbar bench policy --link 25 --svg policy.svg"),
        ("How fast a model gets to the device", "vbar bench load model.safetensors"),
        (
            "Passes at several budgets, with twice the compute that the link would hide",
            "vbar bench stream --bytes 8G --compute-ratio 2 --svg stream.svg",
        ),
    ],
    notes: &[
        "policy computes: it needs no device, and always comes to the same. Caches that load on \
         demand stand beside a resident prefix, the library's spread placement and Belady's \
         optimum, on a loop over one model, on uneven layers and on a workflow of several models.",
        "load measures, from a warm page cache and from a cold one, beside the slower of two: the \
         link, and reading the file by itself with the best of 1, 4, 8 and 16 threads. Where the \
         file cannot be made cold it says so. The model must fit on the device.",
        "stream measures passes at several budgets, with a kernel a tensor that takes a settled \
         time, beside max(compute, streamed / link).",
        SIZES,
        DEVICES,
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
    Load(load::Arguments),
    Stream(stream::Arguments),
}

/// Runs the command.
pub(crate) fn bench(arguments: &Arguments, output: &Output) -> Result<Verdict> {
    match &arguments.benchmark {
        Benchmark::Policy(arguments) => policy::policy(arguments, output),
        Benchmark::Load(arguments) => load::load(arguments, output),
        Benchmark::Stream(arguments) => stream::stream(arguments, output),
    }
}
