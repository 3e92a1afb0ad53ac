//! `vbar synth`: writes a synthetic model, unless it is there already.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use vbar::Result;
use vbar::model::synth::{SHARDS_MAX, SyntheticModel};
use vbar::units::format_bytes;

use crate::arguments;
use crate::help::{Help, SIZES};
use crate::output::{Output, Verdict, megabytes_a_second};

pub(crate) const HELP: Help = Help {
    examples: &[
        ("One file of 1 GiB", "vbar synth model.safetensors --bytes 1G --seed 7"),
        ("A folder with four files and an index", "vbar synth model-folder --bytes 16G --shards 4"),
    ],
    notes: &[
        "The same bytes, seed and shards always give the same files. Another synthetic model in \
         their place is replaced; any other file only with --force; folders, links, pipes and \
         devices never.",
        SIZES,
    ],
    exit: &[(0, "the model is there, written now or before")],
};

/// Write a synthetic safetensors model, unless it is there already
#[derive(Args)]
#[command(after_help = HELP.text())]
pub(crate) struct Arguments {
    /// File to write; with several shards the folder
    path: PathBuf,
    /// Bytes of all tensors together, at least 64K
    #[arg(long, value_parser = arguments::synthetic_size, value_name = "N")]
    bytes: u64,
    /// Sizes and bytes follow from it
    #[arg(long, value_name = "S", default_value_t = 1)]
    #[arg(value_parser = arguments::whole(0..=u64::MAX))]
    seed: u64,
    /// Files; more than one have an index
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = arguments::whole(1..=SHARDS_MAX))]
    shards: u32,
    /// Replace regular files that are no synthetic models
    #[arg(long)]
    force: bool,
}

#[derive(Serialize)]
struct Report {
    paths: Vec<PathBuf>,
    bytes: u64,
    seed: u64,
    shards: u32,
    written: bool,
    ms: f64,
    ok: bool,
}

/// Runs the command.
pub(crate) fn synth(arguments: &Arguments, output: &Output) -> Result<Verdict> {
    let Arguments { path, bytes, seed, shards, force } = arguments;
    let model = SyntheticModel { total_bytes: *bytes, seed: *seed, shards: *shards };
    let start = Instant::now();
    let written = !model.is_at(path);
    let bar = progress(*bytes, output);
    let progress = |bytes| bar.inc(bytes);
    let paths = match written && *force {
        true => model.overwrite(path, &progress)?,
        false => model.ensure(path, &progress)?,
    };
    bar.finish_and_clear();
    let ms = start.elapsed().as_secs_f64() * 1e3;
    let size = format_bytes(*bytes);
    output.line(match written {
        true => format!(
            "wrote {size} to {} in {:.1} s ({:.0} MB/s)",
            path.display(),
            ms / 1e3,
            megabytes_a_second(*bytes, ms)
        ),
        false => format!("{} is there already: {size}, seed {seed}", path.display()),
    });
    let (bytes, seed, shards) = (*bytes, *seed, *shards);
    output.object(&Report { paths, bytes, seed, shards, written, ms, ok: true });
    Ok(Verdict::Good)
}

fn progress(bytes: u64, output: &Output) -> ProgressBar {
    if !output.draws() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(bytes);
    let template = "writing [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}
