//! `vbar inspect`: the tensors of a model and the pages they will be on, from its headers alone.
//!
//! Owns the facts, as `--json` gives them. How they are drawn is in `draw`, how names fall into
//! groups in `groups`, what a page's sign is in `pages`.

mod draw;
mod groups;
mod pages;

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use vbar::Result;
use vbar::host::model_files::{Model, ModelTensor};
use vbar::units::PageSize;

use crate::arguments;
use crate::help::{Help, SIZES};
use crate::models;
use crate::output::{Output, Verdict};
use groups::Group;
use pages::{PageTotals, Place};

pub(crate) const HELP: Help = Help {
    examples: &[
        ("The files, tensors and pages of a model", "vbar inspect model.safetensors"),
        (
            "Every tensor and page, in pages of 2 MiB",
            "vbar inspect model-folder --page-size 2M --all",
        ),
        ("Names and bytes of the ten largest tensors", INSPECT_WITH_JQ),
    ],
    notes: &[
        "A page's sign is the letter of the one tensor that is on it (the letter is in the list of \
         tensors), the number of tensors where several share it, + for more than nine, . for none. \
         Where a sign stands for several pages, it is that of all of them together.",
        "On a terminal long lists are cut, unless --all is given; into a pipe they are whole.",
        SIZES,
    ],
    exit: &[(0, "the model's headers are valid")],
};
const INSPECT_WITH_JQ: &str = "vbar inspect model.safetensors --json | \
                               jq -r '.tensors | sort_by(-.bytes)[:10][] | [.bytes, .name] | @tsv'";

/// Show a model's files, tensors and pages; reads headers only
#[derive(Args)]
#[command(after_help = HELP.text())]
pub(crate) struct Arguments {
    /// A safetensors file, the index of a sharded model, or a folder with one of them
    model: PathBuf,
    /// Bytes of a page
    #[arg(long, value_parser = arguments::page_size, value_name = "N", default_value = "16M")]
    page_size: PageSize,
    /// Show every tensor, group and page, however many there are
    #[arg(long)]
    all: bool,
}

/// The serialized fields are part of the program's interface.
#[derive(Serialize)]
struct Report<'a> {
    model: &'a str,
    model_bytes: u64,
    tensor_count: usize,
    files: Vec<File<'a>>,
    dtypes: BTreeMap<String, Sum>,
    groups: Vec<Group>,
    pages: PageTotals,
    tensors: Vec<Tensor<'a>>,
    ok: bool,
}

#[derive(Serialize)]
struct File<'a> {
    path: &'a str,
    bytes: u64,
    #[serde(flatten)]
    tensors: Sum,
    metadata: &'a BTreeMap<String, String>,
}

/// Tensors together.
#[derive(Serialize, Default, Clone, Copy, PartialEq, Eq, Debug)]
struct Sum {
    tensor_count: u64,
    tensor_bytes: u64,
}

#[derive(Serialize)]
struct Tensor<'a> {
    name: &'a str,
    dtype: String,
    shape: &'a [u64],
    bytes: u64,
    file: usize,
    offset: u64,
    #[serde(flatten)]
    place: Place,
}

impl Sum {
    fn add(&mut self, bytes: u64) {
        self.tensor_count += 1;
        self.tensor_bytes += bytes;
    }
}

/// Runs the command.
pub(crate) fn inspect(arguments: &Arguments, output: &Output) -> Result<Verdict> {
    let model = models::open(&arguments.model)?;
    let report = report(&model, arguments.page_size)?;
    output.object(&report);
    if !output.is_json() {
        draw::Drawing::new(output, arguments.all).show(&report);
    }
    Ok(Verdict::Good)
}

fn report(model: &Model, page_size: PageSize) -> Result<Report<'_>> {
    let (places, pages) = pages::lay_out_on_pages(model, page_size)?;
    let mut dtypes: BTreeMap<String, Sum> = BTreeMap::new();
    let mut sums = vec![Sum::default(); model.files().len()];
    for tensor in model.tensors() {
        dtypes.entry(dtype(tensor)).or_default().add(tensor.bytes);
        sums[tensor.file].add(tensor.bytes);
    }
    let files = model.files().iter().zip(sums).enumerate();
    let tensors = model.tensors().iter().zip(places);
    Ok(Report {
        model: model.name(),
        model_bytes: model.total_bytes(),
        tensor_count: model.tensors().len(),
        files: files
            .map(|(index, (file, tensors))| File {
                path: file.name(),
                bytes: file.bytes(),
                tensors,
                metadata: model.metadata(index),
            })
            .collect(),
        dtypes,
        groups: groups::groups(model.tensors().iter().map(|tensor| (&*tensor.name, tensor.bytes))),
        pages,
        tensors: tensors.map(|(tensor, place)| describe(tensor, place)).collect(),
        ok: true,
    })
}

fn describe(tensor: &ModelTensor, place: Place) -> Tensor<'_> {
    Tensor {
        name: &tensor.name,
        dtype: dtype(tensor),
        shape: &tensor.shape,
        bytes: tensor.bytes,
        file: tensor.file,
        offset: tensor.offset,
        place,
    }
}

/// The dtype's name in the format: `BF16`, `F8_E4M3`.
fn dtype(tensor: &ModelTensor) -> String {
    tensor.dtype.to_string()
}
