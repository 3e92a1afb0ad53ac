//! What the benchmarks that measure have in common: a model, a device, a runtime with threads.
//!
//! Owns the model that is written where none is given, and removes it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use vbar::driver::select::{self, Opened, Selection};
use vbar::host::model_files::Model;
use vbar::model::synth::SyntheticModel;
use vbar::options::{HEADROOM_DEFAULT, Prefer, Threads};
use vbar::units::{PageSize, parse_bytes};
use vbar::{Result, Runtime, RuntimeOptions};

use super::plot;
use crate::{arguments, models};

/// At most this part of a device is left free.
const HEADROOM_PARTS: u64 = 16;

// Of what, and how often. Not a doc comment: that would become the subcommand's own text.
#[derive(Args)]
pub(super) struct Settings {
    /// A safetensors file, the index of a sharded model, or a folder with one of them [default: a
    /// synthetic one in a temporary file]
    model: Option<PathBuf>,
    /// Bytes of the synthetic model
    #[arg(long, value_parser = arguments::synthetic_size, value_name = "N", default_value = "1G")]
    #[arg(conflicts_with = "model")]
    bytes: u64,
    /// Rounds, of which the median is told
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = arguments::whole(1..=1000u32))]
    pub(super) rounds: u32,
    /// auto, cuda[:index] or sim[:options]
    #[arg(long, value_parser = arguments::device, default_value = "auto")]
    device: Selection,
    /// Bytes of a page
    #[arg(long, value_parser = arguments::page_size, value_name = "N", default_value = "16M")]
    page_size: PageSize,
    /// Where the file is read from: auto, ram (through the page cache) or disk (past it)
    #[arg(long, value_name = "auto|ram|disk", default_value = "auto")]
    #[arg(value_parser = arguments::prefer)]
    prefer: Prefer,
    /// Most page-locked host memory, 0 for none [default: what the system can spare]
    #[arg(long, value_parser = parse_bytes, value_name = "N")]
    host_allowance: Option<u64>,
    /// Write a plot to this file
    #[arg(long, value_name = "FILE")]
    pub(super) svg: Option<PathBuf>,
}

/// What is measured. The runtime goes first, then the model.
pub(super) struct Subject {
    pub(super) runtime: Runtime,
    pub(super) opened: Opened,
    file: File,
}

impl Subject {
    pub(super) fn new(settings: &Settings) -> Result<Self> {
        plot::check(settings.svg.as_deref())?;
        let file = File::of(settings)?;
        // What is wrong with it is told before a device is opened.
        models::open_filled(&file.path)?;
        let opened = select::open(&settings.device)?;
        let total = opened.driver.device_total_mem(opened.device)?;
        let options = RuntimeOptions {
            headroom_bytes: Some(HEADROOM_DEFAULT.min(total / HEADROOM_PARTS)),
            page_size: settings.page_size,
            prefer: settings.prefer,
            host_allowance: settings.host_allowance,
            threads: Some(Threads::On),
            ..RuntimeOptions::default()
        };
        let runtime = Runtime::open(Arc::clone(&opened.driver), opened.device, options)?;
        Ok(Self { runtime, opened, file })
    }

    pub(super) fn path(&self) -> &Path {
        &self.file.path
    }

    pub(super) fn model(&self) -> Result<Model> {
        models::open(&self.file.path)
    }
}

/// A model's path; one of ours is removed at the end.
struct File {
    path: PathBuf,
    is_ours: bool,
}

impl File {
    fn of(settings: &Settings) -> Result<Self> {
        if let Some(path) = &settings.model {
            return Ok(Self { path: path.clone(), is_ours: false });
        }
        let name = format!("vbar-bench-{}.safetensors", std::process::id());
        let path = std::env::temp_dir().join(name);
        let model = SyntheticModel { total_bytes: settings.bytes, seed: 1, shards: 1 };
        model.write(&path, &|_| {})?;
        // Not before: what was there and was not replaced is not removed either.
        Ok(Self { path, is_ours: true })
    }
}

impl Drop for File {
    fn drop(&mut self) {
        if self.is_ours
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            log::warn!("{}: {error}", self.path.display());
        }
    }
}

/// The middle one, of two the larger; 0 of none.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_in_the_middle() {
        assert_eq!([median(&[3.0, 1.0, 2.0]), median(&[1.0, 2.0]), median(&[])], [2.0, 2.0, 0.0]);
    }
}
