//! The model that a command is given.

use std::path::Path;

use vbar::host::model_files::{Model, ModelTensor};
use vbar::names::quoted;
use vbar::{Error, ErrorCode, Result};

/// Opens a model; where there is nothing, says how to come by one.
pub(crate) fn open(path: &Path) -> Result<Model> {
    Model::open(path).map_err(|error| match path.try_exists() {
        Ok(false) => Error::new(error.code(), format!("{error}; `vbar synth` writes one to try")),
        _ => error,
    })
}

/// Opens a model that is to be run.
///
/// # Errors
/// `InvalidArgument` of one without bytes; as [`open`].
pub(crate) fn open_filled(path: &Path) -> Result<Model> {
    let model = open(path)?;
    let wrong = match (model.tensors().len(), model.total_bytes()) {
        (0, _) => "the model has no tensors",
        (_, 0) => "no tensor of the model has a byte",
        _ => return Ok(model),
    };
    let text = format!("{}: {wrong}, so there is nothing to run", model.name());
    Err(Error::new(ErrorCode::InvalidArgument, text))
}

/// Opens a copy of a model, which may have more tensors.
///
/// # Errors
/// `InvalidArgument`, naming what differs, where a tensor is missing or is another; as
/// [`Model::open`].
pub(crate) fn open_copy(path: &Path, model: &Model) -> Result<Model> {
    let copy = Model::open(path).map_err(|error| error.context("--expect"))?;
    match difference(model, &copy) {
        None => Ok(copy),
        Some(difference) => {
            let (name, model) = (copy.name(), model.name());
            let text = format!("--expect: {name} is no copy of {model}: {difference}");
            Err(Error::new(ErrorCode::InvalidArgument, text))
        }
    }
}

/// In what the tensors of a model differ from those of a copy, but for their bytes.
fn difference(model: &Model, copy: &Model) -> Option<String> {
    let is_alike = |tensor: &ModelTensor, other: &ModelTensor| {
        (tensor.dtype, &tensor.shape) == (other.dtype, &other.shape)
    };
    let differing = model
        .tensors()
        .iter()
        .filter(|tensor| copy.find(&tensor.name).is_none_or(|other| !is_alike(tensor, other)));
    let differing: Vec<&ModelTensor> = differing.collect();
    let first = *differing.first()?;
    let what = match copy.find(&first.name) {
        None => "is not in it".to_owned(),
        Some(other) => format!("is {} there, not {}", kind(other), kind(first)),
    };
    let name = quoted(&first.name);
    Some(match differing.len() {
        1 => format!("tensor {name} {what}"),
        count => {
            let of = model.tensors().len();
            format!("{count} of {of} tensors differ; the first, {name}, {what}")
        }
    })
}

/// A tensor's dtype and shape.
fn kind(tensor: &ModelTensor) -> String {
    format!("{} {:?}", tensor.dtype, tensor.shape)
}
