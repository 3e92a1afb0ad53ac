//! A binding together with its open files: what fills a bound VBAR.

use std::sync::Arc;

use crate::error::{Error, ErrorCode, Result};
use crate::host::source::ModelFile;
use crate::model::binding::Binding;

/// Says which bytes of which open file belong to each range of a VBAR.
pub struct Bound {
    binding: Binding,
    files: Vec<Arc<ModelFile>>,
}

impl Bound {
    /// Joins a binding with the files that its segments count from 0.
    ///
    /// # Errors
    /// `InvalidArgument` when a segment names a file that is not there or leaves its file.
    pub fn new(binding: Binding, files: Vec<Arc<ModelFile>>) -> Result<Self> {
        for segment in binding.segments() {
            let length = segment.target.end - segment.target.start;
            let end = segment.source_offset.checked_add(length);
            let size = files.get(segment.file).map(|file| file.bytes());
            if !matches!((end, size), (Some(end), Some(size)) if end <= size) {
                let text = format!(
                    "bytes {}..{} of the VBAR are bound to {length} bytes at {} of file {}, \
                     which has {size:?} bytes",
                    segment.target.start, segment.target.end, segment.source_offset, segment.file
                );
                return Err(Error::new(ErrorCode::InvalidArgument, text));
            }
        }
        Ok(Self { binding, files })
    }

    /// The layout.
    #[must_use]
    pub fn binding(&self) -> &Binding {
        &self.binding
    }

    /// A file by the number that segments use.
    ///
    /// # Panics
    /// For a number that no segment has.
    #[must_use]
    pub fn file(&self, index: usize) -> &ModelFile {
        &self.files[index]
    }
}
