//! A binding together with its open files: what fills a bound VBAR.

use std::sync::Arc;

use crate::error::{Error, ErrorCode, Result};
use crate::host::source::ModelFile;
use crate::model::binding::Binding;
use crate::options::Prefer;

/// Says which bytes of which open file belong to each range of a VBAR.
pub struct Bound {
    binding: Binding,
    files: Vec<Arc<ModelFile>>,
    prefer: Option<Prefer>,
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
        Ok(Self { binding, files, prefer: None })
    }

    /// Reads its files as told, whatever the runtime's option says.
    #[must_use]
    pub fn preferring(self, prefer: Prefer) -> Self {
        Self { prefer: Some(prefer), ..self }
    }

    /// Where its files are read from, if it was told.
    #[must_use]
    pub fn prefer(&self) -> Option<Prefer> {
        self.prefer
    }

    /// Bytes of all its files together.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes()))
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
    pub fn file(&self, index: usize) -> &Arc<ModelFile> {
        &self.files[index]
    }
}
