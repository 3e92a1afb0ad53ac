//! `vbar`: is this machine fit, how fast is it, does it survive.
//!
//! Owns the arguments and the exit codes; each subcommand is a module. The library does the work:
//! nothing here is needed by a program that uses it.

mod arguments;
mod compute;
mod doctor;
mod inspect;
mod models;
mod output;
mod run;
mod stress;
mod synth;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use output::{Format, Output, USAGE};

const EXAMPLES: &str = "\
Examples:
  vbar doctor
  vbar synth model.safetensors --bytes 1G --seed 7
  vbar inspect model.safetensors
  vbar run model.safetensors --budget 40% --passes 4 --verify

Sizes are bytes or carry K, M, G or T (powers of 1024).

Exit codes:
  0  everything is as it should be
  1  a check failed: bytes differ, an invariant is broken, nothing could be checked, the machine
     is not fit (doctor: also where there is no GPU and only the simulated device is left)
  2  wrong arguments
  3  an error: a file, the driver or the system failed

Environment:
  VBAR_DRIVER  what --device auto means, as sim:capacity=8G,seed=7 or cuda:1
  RUST_LOG     which messages of the library are shown, as vbar=debug
  NO_COLOR     no colours";

#[derive(Parser)]
#[command(name = "vbar", version, about = "Run models larger than the GPU", long_about = None)]
#[command(after_help = EXAMPLES, subcommand_required = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Print one JSON object and nothing else
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    Synth(synth::Arguments),
    Inspect(inspect::Arguments),
    Run(run::Arguments),
    Stress(stress::Arguments),
    Doctor(doctor::Arguments),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Nobody reads: then nobody is told.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(USAGE));
        }
    };
    // Under stress, warnings are what the library is asked for.
    let level = if matches!(cli.command, Command::Stress(_)) { "error" } else { "warn" };
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or(level)).init();
    let output = Output::new(if cli.json { Format::Json } else { Format::Human });
    let result = match &cli.command {
        Command::Synth(arguments) => synth::synth(arguments, &output),
        Command::Inspect(arguments) => inspect::inspect(arguments, &output),
        Command::Run(arguments) => run::run(arguments, &output),
        Command::Stress(arguments) => stress::stress(arguments, &output),
        Command::Doctor(arguments) => doctor::doctor(arguments, &output),
    };
    output.finish(result)
}
