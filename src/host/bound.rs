//! A binding together with its open files and the program's memory: what fills a bound VBAR.

use std::sync::Arc;

use crate::error::{Error, ErrorCode, Result};
use crate::host::memory::HostMemory;
use crate::host::source::ModelFile;
use crate::model::binding::Binding;
use crate::options::Prefer;

/// Where the bytes of segments come from.
pub enum Source {
    /// An open file.
    File(Arc<ModelFile>),
    /// Memory of the program.
    Memory(Arc<HostMemory>),
}

impl From<Arc<ModelFile>> for Source {
    fn from(file: Arc<ModelFile>) -> Self {
        Self::File(file)
    }
}

impl From<HostMemory> for Source {
    fn from(memory: HostMemory) -> Self {
        Self::Memory(Arc::new(memory))
    }
}

impl From<Arc<HostMemory>> for Source {
    fn from(memory: Arc<HostMemory>) -> Self {
        Self::Memory(memory)
    }
}

impl Source {
    /// Its length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::File(file) => file.bytes(),
            Self::Memory(memory) => memory.bytes(),
        }
    }

    /// The file, if it is one.
    #[must_use]
    pub fn file(&self) -> Option<&Arc<ModelFile>> {
        match self {
            Self::File(file) => Some(file),
            Self::Memory(_) => None,
        }
    }
}

/// Says which bytes of which source belong to each range of a VBAR.
pub struct Bound {
    binding: Binding,
    sources: Vec<Source>,
    prefer: Option<Prefer>,
}

impl Bound {
    /// Joins a binding with the sources that its segments count from 0.
    ///
    /// # Errors
    /// `InvalidArgument` when a segment names a source that is not there or leaves its source.
    pub fn new<S: Into<Source>>(binding: Binding, sources: Vec<S>) -> Result<Self> {
        let sources: Vec<Source> = sources.into_iter().map(Into::into).collect();
        for segment in binding.segments() {
            let length = segment.target.end - segment.target.start;
            let end = segment.source_offset.checked_add(length);
            let source = sources.get(segment.file);
            let size = source.map(Source::bytes);
            if !matches!((end, size), (Some(end), Some(size)) if end <= size) {
                let kind =
                    if matches!(source, Some(Source::Memory(_))) { "memory" } else { "file" };
                let text = format!(
                    "bytes {}..{} of the VBAR are bound to {length} bytes at {} of {kind} {}, \
                     which has {size:?} bytes",
                    segment.target.start, segment.target.end, segment.source_offset, segment.file
                );
                return Err(Error::new(ErrorCode::InvalidArgument, text));
            }
        }
        Ok(Self { binding, sources, prefer: None })
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
        let files = self.sources.iter().filter_map(Source::file);
        files.fold(0, |sum, file| sum.saturating_add(file.bytes()))
    }

    /// The layout.
    #[must_use]
    pub fn binding(&self) -> &Binding {
        &self.binding
    }

    /// A source by the number that segments use.
    ///
    /// # Panics
    /// For a number that no segment has.
    #[must_use]
    pub fn source(&self, index: usize) -> &Source {
        &self.sources[index]
    }

    /// A file by the number that segments use.
    ///
    /// # Panics
    /// For a number that no segment has, and one of what is no file.
    #[must_use]
    pub fn file(&self, index: usize) -> &Arc<ModelFile> {
        self.source(index).file().expect("the source is a file")
    }

    /// The memory of a source that the device reads directly, if it does.
    #[must_use]
    pub fn locked_memory(&self, index: usize) -> Option<&HostMemory> {
        match self.source(index) {
            Source::Memory(memory) if memory.is_locked() => Some(&**memory),
            _ => None,
        }
    }

    /// The program's memory among its sources.
    pub fn memories(&self) -> impl Iterator<Item = &HostMemory> {
        self.sources.iter().filter_map(|source| match source {
            Source::Memory(memory) => Some(&**memory),
            Source::File(_) => None,
        })
    }
}
