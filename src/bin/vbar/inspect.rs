//! `vbar inspect`: the tensors of a model, from its headers alone.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use vbar::Result;
use vbar::host::model_files::{Model, ModelTensor};
use vbar::units::format_bytes;

use crate::models;
use crate::output::{Output, Verdict};

const EXAMPLES: &str = "\
Examples:
  vbar inspect model.safetensors
  vbar inspect model.safetensors.index.json --json";

/// Show a model's files and tensors; reads headers only
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// A safetensors file, the index of a sharded model, or a folder with one of them
    model: PathBuf,
}

#[derive(Serialize)]
struct Report<'a> {
    model: &'a str,
    model_bytes: u64,
    tensor_count: usize,
    files: Vec<File<'a>>,
    dtypes: BTreeMap<String, Sum>,
    tensors: Vec<Tensor<'a>>,
    ok: bool,
}

#[derive(Serialize)]
struct File<'a> {
    path: &'a str,
    bytes: u64,
    metadata: &'a BTreeMap<String, String>,
}

#[derive(Serialize, Default, Clone, Copy)]
struct Sum {
    count: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct Tensor<'a> {
    name: &'a str,
    dtype: String,
    shape: &'a [u64],
    bytes: u64,
    file: usize,
    offset: u64,
}

/// Runs the command.
pub(crate) fn inspect(arguments: &Arguments, output: &Output) -> Result<Verdict> {
    let model = models::open(&arguments.model)?;
    let report = report(&model);
    output.object(&report);
    output.line(format!(
        "{}: {} tensors, {} in {} {}",
        report.model,
        report.tensor_count,
        format_bytes(report.model_bytes),
        report.files.len(),
        if report.files.len() == 1 { "file" } else { "files" }
    ));
    for (dtype, sum) in &report.dtypes {
        let size = format_bytes(sum.bytes);
        output.line(format!("  {dtype:<8} {:>6} tensors {size:>12}", sum.count));
    }
    for tensor in &report.tensors {
        if output.is_closed() {
            break;
        }
        let Tensor { name, dtype, shape, bytes, .. } = tensor;
        let shape = format!("{shape:?}");
        output.line(format!("{:>12}  {dtype:<8} {shape:<20} {name}", format_bytes(*bytes)));
    }
    Ok(Verdict::Good)
}

fn report(model: &Model) -> Report<'_> {
    let mut dtypes: BTreeMap<String, Sum> = BTreeMap::new();
    for tensor in model.tensors() {
        let sum = dtypes.entry(dtype(tensor)).or_default();
        *sum = Sum { count: sum.count + 1, bytes: sum.bytes + tensor.bytes };
    }
    let files = model.files().iter().enumerate();
    Report {
        model: model.name(),
        model_bytes: model.total_bytes(),
        tensor_count: model.tensors().len(),
        files: files
            .map(|(index, file)| File {
                path: file.name(),
                bytes: file.bytes(),
                metadata: model.metadata(index),
            })
            .collect(),
        dtypes,
        tensors: model.tensors().iter().map(describe).collect(),
        ok: true,
    }
}

fn describe(tensor: &ModelTensor) -> Tensor<'_> {
    Tensor {
        name: &tensor.name,
        dtype: dtype(tensor),
        shape: &tensor.shape,
        bytes: tensor.bytes,
        file: tensor.file,
        offset: tensor.offset,
    }
}

/// The dtype's name in the format: `BF16`, `F8_E4M3`.
fn dtype(tensor: &ModelTensor) -> String {
    tensor.dtype.to_string()
}
