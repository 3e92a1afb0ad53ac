//! The model that a command is given.

use std::path::Path;

use vbar::host::model_files::Model;
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
