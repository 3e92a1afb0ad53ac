//! The model that a command is given.

use std::path::Path;

use vbar::host::model_files::Model;
use vbar::{Error, Result};

/// Opens a model; where there is nothing, says how to come by one.
pub(crate) fn open(path: &Path) -> Result<Model> {
    Model::open(path).map_err(|error| match path.try_exists() {
        Ok(false) => Error::new(error.code(), format!("{error}; `vbar synth` writes one to try")),
        _ => error,
    })
}
