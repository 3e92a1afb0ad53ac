//! `vbar completions`: what a shell needs to complete the program's arguments.

use clap::{Args, Command, CommandFactory};
use clap_complete::Shell;
use serde::Serialize;
use vbar::Result;

use crate::Cli;
use crate::help::Help;
use crate::output::{Output, Verdict};

pub(crate) const HELP: Help = Help {
    examples: &[
        (
            "bash, with the package bash-completion",
            "vbar completions bash > ~/.local/share/bash-completion/completions/vbar",
        ),
        ("zsh, with that folder in fpath before compinit", "vbar completions zsh > ~/.zfunc/_vbar"),
        ("fish", "vbar completions fish > ~/.config/fish/completions/vbar.fish"),
    ],
    notes: &["The script goes to standard output and is made for this version of the program."],
    exit: &[(0, "the script was written")],
};

/// Print the completion script of a shell
#[derive(Args)]
#[command(after_help = HELP.text())]
pub(crate) struct Arguments {
    /// The shell
    shell: Shell,
}

#[derive(Serialize)]
struct Report<'a> {
    shell: String,
    script: &'a str,
    ok: bool,
}

/// The program without the subcommands that people are not told of; completion would tell them.
fn told_command() -> Command {
    let full = Cli::command();
    let told = full.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
    Command::new("vbar")
        .version(env!("CARGO_PKG_VERSION"))
        .args(full.get_arguments())
        .subcommands(told)
}

/// Runs the command.
pub(crate) fn completions(arguments: &Arguments, output: &Output) -> Result<Verdict> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut told_command(), "vbar", &mut script);
    let script = String::from_utf8_lossy(&script);
    output.text(&script);
    output.object(&Report { shell: arguments.shell.to_string(), script: &script, ok: true });
    Ok(Verdict::Good)
}
