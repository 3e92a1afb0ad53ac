//! `vbar`: is this machine fit, how fast is it, does it survive.
//!
//! Owns the arguments and the exit codes; each subcommand is a module. The library does the work:
//! nothing here is needed by a program that uses it.

mod arguments;
mod bench;
mod completions;
mod compute;
mod doctor;
mod help;
mod inspect;
mod look;
mod manual;
mod models;
mod output;
mod run;
mod sources;
mod stress;
mod synth;
mod trace;
mod written;

use std::io;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use help::Help;
use output::{FAILED, Format, Output, USAGE};

/// What the program's own help shows.
const EXAMPLES: &[(&str, &str)] = &[
    ("Is this machine fit", "vbar doctor"),
    ("A model to try", "vbar synth model.safetensors --bytes 1G --seed 7"),
    ("Its tensors and pages", "vbar inspect model.safetensors"),
    (
        "Stream it through less than it needs, verified",
        "vbar run model.safetensors --budget 40% --passes 4 --verify",
    ),
];

/// The subcommands that people are told of, in the order of their telling.
const HELPS: &[(&str, Help)] = &[
    ("doctor", doctor::HELP),
    ("inspect", inspect::HELP),
    ("synth", synth::HELP),
    ("run", run::HELP),
    ("trace", trace::HELP),
    ("stress", stress::HELP),
    ("bench", bench::HELP),
    ("completions", completions::HELP),
];

#[derive(Parser)]
#[command(name = "vbar", version, about = "Run models larger than the GPU", long_about = None)]
#[command(subcommand_required = true, arg_required_else_help = true)]
#[command(after_help = help::general(EXAMPLES))]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Print one JSON object and nothing else
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    Doctor(doctor::Arguments),
    Inspect(inspect::Arguments),
    Synth(synth::Arguments),
    Run(run::Arguments),
    Trace(trace::Arguments),
    Stress(stress::Arguments),
    Bench(bench::Arguments),
    Completions(completions::Arguments),
    // For packagers, `make install` among them.
    #[command(hide = true)]
    Man(manual::Arguments),
}

fn main() -> ExitCode {
    let parsed = command().try_get_matches();
    let cli = match parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => {
            let error = with_hint(error);
            let code = u8::try_from(error.exit_code()).unwrap_or(USAGE);
            return match error.print() {
                // Nobody reads: then nobody is told.
                Err(failed) if failed.kind() != io::ErrorKind::BrokenPipe => ExitCode::from(FAILED),
                _ => ExitCode::from(code),
            };
        }
    };
    // Under stress, warnings are what the library is asked for.
    let level = if matches!(cli.command, Command::Stress(_)) { "error" } else { "warn" };
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or(level)).init();
    let output = Output::new(if cli.json { Format::Json } else { Format::Human });
    let result = match &cli.command {
        Command::Doctor(arguments) => doctor::doctor(arguments, &output),
        Command::Inspect(arguments) => inspect::inspect(arguments, &output),
        Command::Synth(arguments) => synth::synth(arguments, &output),
        Command::Run(arguments) => run::run(arguments, &output),
        Command::Trace(arguments) => trace::trace(arguments, &output),
        Command::Stress(arguments) => stress::stress(arguments, &output),
        Command::Bench(arguments) => bench::bench(arguments, &output),
        Command::Completions(arguments) => completions::completions(arguments, &output),
        Command::Man(_) => manual::manual(&output),
    };
    output.finish(result)
}

/// The arguments, with a negative number told to the option that it was given to.
fn command() -> clap::Command {
    fn with_numbers(command: clap::Command) -> clap::Command {
        let command = command.mut_args(|argument| {
            let takes_number = argument.get_action().takes_values() && !argument.is_positional();
            if takes_number { argument.allow_negative_numbers(true) } else { argument }
        });
        command.mut_subcommands(with_numbers)
    }
    with_numbers(Cli::command())
}

/// What an option was called once, and is elsewhere; and where JSON goes.
fn with_hint(mut error: clap::Error) -> clap::Error {
    let context = |error: &clap::Error, kind| error.get(kind).map(ToString::to_string);
    let of_a_run = |usage: &str| [" run ", " trace "].iter().any(|name| usage.contains(name));
    let wrong = context(&error, ContextKind::InvalidArg).unwrap_or_default();
    let hint = if wrong == "--threads"
        && context(&error, ContextKind::Usage).is_some_and(|usage| of_a_run(&usage))
    {
        "whether the library has threads of its own is '--library-threads on|off'"
    } else if wrong.ends_with(".json") && error.kind() == ErrorKind::UnknownArgument {
        "'--json' takes no file: the object goes to standard output, as in '--json > report.json'"
    } else {
        return error;
    };
    error.remove(ContextKind::SuggestedArg);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint.into()]));
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_sound_and_every_subcommand_has_help() {
        let command = command();
        command.clone().debug_assert();
        let visible = command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
        let names: Vec<&str> = visible.map(clap::Command::get_name).collect();
        assert_eq!(names, HELPS.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    }
}
