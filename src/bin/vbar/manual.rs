//! `vbar man`: the manual page of section 1, made of the same definition as `--help`.
//!
//! Owns the order of its sections (man-pages(7)) and the few that `--help` does not have. One page
//! for the program and its subcommands: they are few, and share most of what there is to say.

use clap::{Args, Command, CommandFactory};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use serde::Serialize;
use vbar::{Error, Result};

use crate::help::{self, Help};
use crate::output::{Output, Verdict};
use crate::{Cli, EXAMPLES, HELPS};

/// Print the manual page, in roff
#[derive(Args)]
pub(crate) struct Arguments {}

#[derive(Serialize)]
struct Report<'a> {
    page: &'a str,
    ok: bool,
}

const DESCRIPTION: &[&str] = &[
    "vbar lets a program use models that are larger than its GPU: addresses in device memory cost \
     nothing, physical memory comes behind them when a layer needs its weights, and is taken back \
     from the coldest weights when anything else needs it.",
    "This program tells whether a machine is fit for it, how a model lies in pages, how fast it \
     streams through a given budget, and whether it survives random operations under checks. \
     Everything runs on a simulated device as well, where there is no GPU.",
];

const FILES: &[(&str, &str)] = &[
    ("libcuda.so.1", "the CUDA driver's library, found by the dynamic linker; not needed to start"),
    (
        "*.safetensors, *.safetensors.index.json",
        "a model, or the index of a model in several files",
    ),
    (
        "/proc, /sys/fs/cgroup, /sys/bus/pci",
        "what doctor reads of the machine, its limits and its devices",
    ),
    ("$TMPDIR/vbar-stress-*.safetensors", "the model of vbar stress while it runs"),
];

const SEE_ALSO: &str = "nvidia-smi(1), proc(5), cgroups(7), dlopen(3), ld.so(8)";

/// Runs the command.
pub(crate) fn manual(output: &Output) -> Result<Verdict> {
    let page = page().map_err(|error| Error::io("the manual page", &error))?;
    output.text(&page);
    output.object(&Report { page: &page, ok: true });
    Ok(Verdict::Good)
}

fn page() -> std::io::Result<String> {
    let mut command = Cli::command();
    command.build();
    let mut page = Vec::new();
    let man = Man::new(without_help(&command)).manual("vbar").section("1");
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    let mut roff = Roff::new();
    roff.control("SH", ["DESCRIPTION"]);
    paragraphs(&mut roff, DESCRIPTION);
    paragraphs(&mut roff, &[help::SIZES, help::DEVICES]);
    roff.to_writer(&mut page)?;
    man.render_options_section(&mut page)?;
    Roff::new().control("SH", ["COMMANDS"]).to_writer(&mut page)?;
    for (name, help) in HELPS {
        if let Some(subcommand) = command.find_subcommand(name) {
            render_subcommand(subcommand, help, &mut page)?;
        }
    }
    closing_sections().to_writer(&mut page)?;
    Ok(String::from_utf8_lossy(&page).into_owned())
}

/// The page ends with what clap would put before its own version and notes.
fn without_help(command: &Command) -> Command {
    command.clone().after_help("").disable_help_subcommand(true).subcommand_value_name("COMMAND")
}

fn render_subcommand(command: &Command, help: &Help, page: &mut Vec<u8>) -> std::io::Result<()> {
    let mut roff = Roff::new();
    roff.control("SS", [&*format!("vbar {}", command.get_name())]);
    roff.to_writer(page)?;
    // Without the headings: they would be sections of the whole page.
    let man = Man::new(command.clone());
    let mut part = Vec::new();
    man.render_synopsis_section(&mut part)?;
    without_heading(&part, page);
    let mut roff = Roff::new();
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    paragraphs(&mut roff, &[&*format!("{about}.")]);
    // What is the same everywhere stands in the description.
    let notes = help.notes.iter().filter(|note| ![help::SIZES, help::DEVICES].contains(note));
    paragraphs(&mut roff, &notes.copied().collect::<Vec<_>>());
    roff.to_writer(page)?;
    let mut part = Vec::new();
    man.render_options_section(&mut part)?;
    without_heading(&part, page);
    for own in command.get_subcommands().filter(|own| own.get_name() != "help") {
        render_own(command, own, page)?;
    }
    let mut roff = Roff::new();
    paragraphs(&mut roff, &["Exit status:"]);
    help.exit.iter().for_each(|(code, what)| item(&mut roff, &code.to_string(), what));
    roff.to_writer(page)
}

/// A subcommand of a subcommand: what it does and its options, below those of the other.
fn render_own(command: &Command, own: &Command, page: &mut Vec<u8>) -> std::io::Result<()> {
    let mut roff = Roff::new();
    roff.control("PP", []);
    roff.text([bold(format!("vbar {} {}", command.get_name(), own.get_name()))]);
    let about = own.get_about().map(ToString::to_string).unwrap_or_default();
    paragraphs(&mut roff, &[&*format!("{about}.")]);
    roff.to_writer(page)?;
    let mut part = Vec::new();
    Man::new(own.clone()).render_options_section(&mut part)?;
    without_heading(&part, page);
    Ok(())
}

fn without_heading(part: &[u8], page: &mut Vec<u8>) {
    let text = String::from_utf8_lossy(part);
    for line in text.lines().filter(|line| !line.starts_with(".SH ")) {
        page.extend_from_slice(line.as_bytes());
        page.push(b'\n');
    }
}

fn closing_sections() -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["EXAMPLES"]);
    let examples = HELPS.iter().flat_map(|(_, help)| help.examples);
    for (what, command) in EXAMPLES.iter().chain(examples) {
        roff.control("PP", []);
        roff.text([roman(format!("{what}:"))]);
        roff.control("PP", []).control("RS", ["4"]).control("nf", []);
        roff.text([bold(*command)]);
        roff.control("fi", []).control("RE", []);
    }
    roff.control("SH", ["EXIT STATUS"]);
    let codes = help::EXIT_GENERAL.iter().chain(help::EXIT);
    codes.for_each(|(code, what)| item(&mut roff, &code.to_string(), what));
    roff.control("SH", ["ENVIRONMENT"]);
    help::ENVIRONMENT.iter().for_each(|(name, what)| item(&mut roff, name, what));
    roff.control("SH", ["FILES"]);
    FILES.iter().for_each(|(name, what)| item(&mut roff, name, what));
    roff.control("SH", ["SEE ALSO"]);
    roff.text([roman(SEE_ALSO)]);
    roff
}

fn paragraphs(roff: &mut Roff, texts: &[&str]) {
    for text in texts {
        roff.control("PP", []);
        roff.text([roman(*text)]);
    }
}

fn item(roff: &mut Roff, name: &str, what: &str) {
    roff.control("TP", []);
    roff.text([bold(name)]);
    roff.text([roman(what)]);
}
