//! A model on disk: one safetensors file, or several with an index.
//!
//! Owns the open files and the table of tensors, sorted by name as people count (`layers.2` before
//! `layers.10`), which for the usual names is the order in which a pass needs them. Everything a
//! header or an index claims has been checked against the files when [`Model::open`] returns. It
//! reads headers only; the tensors' bytes are not touched.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, ErrorCode, Result};
use crate::host::checksum::file_checksum;
use crate::host::safetensors::{
    Dtype, Header, INDEX_BYTES_MAX, PREFIX_BYTES, header_bytes, parse_header, parse_index,
};
use crate::host::source::ModelFile;
use crate::model::binding::{LayoutItem, TENSOR_ALIGNMENT};
use crate::names::{natural_order, quoted};

const INDEX_SUFFIX: &str = ".safetensors.index.json";
const MODEL_SUFFIX: &str = ".safetensors";

/// A tensor of a model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelTensor {
    /// Unique in the model.
    pub name: Box<str>,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Elements in each dimension, the slowest first; empty for a scalar.
    pub shape: Box<[u64]>,
    /// Index in [`Model::files`].
    pub file: usize,
    /// Its first byte, from the start of the file.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

/// A model's open files and the table of its tensors.
#[derive(Debug)]
pub struct Model {
    name: String,
    files: Vec<Arc<ModelFile>>,
    metadata: Vec<BTreeMap<String, String>>,
    tensors: Vec<ModelTensor>,
    total_bytes: u64,
}

impl Model {
    /// Opens a model: a safetensors file; the index of a sharded one (a name that ends in
    /// `.json`); or a folder with one of the two. In a folder an index comes before a file, and
    /// `model.safetensors` with or without index before any other name; several others are an
    /// error.
    ///
    /// Tensors of a shard that the index does not mention belong to the model too.
    ///
    /// # Errors
    /// `Io`: a file cannot be opened or read. `Format`: a header or index is not valid, a tensor is
    /// in two shards or not where the index says, a folder has no model or several; with the names
    /// of file and tensor. `FileChanged`: a file was written meanwhile.
    pub fn open(path: &Path) -> Result<Self> {
        let found = if path.is_dir() { find_in_folder(path)? } else { path.to_owned() };
        if found.as_os_str().to_string_lossy().ends_with(".json") {
            return Self::open_sharded(&found);
        }
        Self::from_file(ModelFile::open(&found)?)
    }

    /// A model of one file that is open already.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_file(file: ModelFile) -> Result<Self> {
        let name = file.name().to_owned();
        Self::from_files(name, vec![file])
    }

    fn open_sharded(index: &Path) -> Result<Self> {
        let file = ModelFile::open(index)?;
        let shard_of = parse_index(file.name(), &read_index(&file)?)?;
        let shards: BTreeSet<&String> = shard_of.values().collect();
        let folder = index.parent().unwrap_or(Path::new(""));
        let mut files = Vec::with_capacity(shards.len());
        let mut position_of = BTreeMap::new();
        for shard in shards {
            let opened = ModelFile::open(&folder.join(shard)).map_err(|error| {
                let lost = shard_of.iter().find(|(_, other)| *other == shard);
                let tensor = quoted(lost.map_or("", |(tensor, _)| tensor));
                error.context(format_args!("{}: the shard of tensor {tensor}", file.name()))
            })?;
            position_of.insert(shard, files.len());
            files.push(opened);
        }
        let model = Self::from_files(file.name().to_owned(), files)?;
        for (tensor, shard) in &shard_of {
            model.check_shard(tensor, shard, position_of[shard])?;
        }
        Ok(model)
    }

    /// Reads the headers and joins them to one table.
    fn from_files(name: String, files: Vec<ModelFile>) -> Result<Self> {
        let mut tensors = Vec::new();
        let mut metadata = Vec::with_capacity(files.len());
        for (index, file) in files.iter().enumerate() {
            let header = read_header(file)?;
            metadata.push(header.metadata);
            tensors.extend(header.tensors.into_iter().map(|entry| ModelTensor {
                bytes: entry.extent.end - entry.extent.start,
                offset: entry.extent.start,
                file: index,
                name: entry.name,
                dtype: entry.dtype,
                shape: entry.shape,
            }));
        }
        tensors.sort_by(|left, right| natural_order(&left.name, &right.name));
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
            let text = format!(
                "{name}: tensor {} is in {} and in {}",
                quoted(&pair[0].name),
                files[pair[0].file].name(),
                files[pair[1].file].name()
            );
            return Err(Error::new(ErrorCode::Format, text));
        }
        let total_bytes =
            tensors.iter().try_fold(0u64, |sum, tensor| sum.checked_add(tensor.bytes));
        let total_bytes = total_bytes.ok_or_else(|| {
            Error::new(ErrorCode::Format, format!("{name}: the tensors have more than 2^64 bytes"))
        })?;
        let files = files.into_iter().map(Arc::new).collect();
        Ok(Self { name, files, metadata, tensors, total_bytes })
    }

    fn check_shard(&self, tensor: &str, shard: &str, file: usize) -> Result<()> {
        let elsewhere = match self.find(tensor) {
            Some(found) if found.file == file => return Ok(()),
            Some(found) => format!("; it is in {}", self.files[found.file].name()),
            None => String::new(),
        };
        let text = format!(
            "{}: tensor {} is not in shard {}, where the index says it is{elsewhere}",
            self.name,
            quoted(tensor),
            quoted(shard)
        );
        Err(Error::new(ErrorCode::Format, text))
    }

    /// What errors call it: the path of its file or index.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its files.
    #[must_use]
    pub fn files(&self) -> &[Arc<ModelFile>] {
        &self.files
    }

    /// The `__metadata__` of a file, empty without one.
    ///
    /// # Panics
    /// If there is no such file.
    #[must_use]
    pub fn metadata(&self, file: usize) -> &BTreeMap<String, String> {
        &self.metadata[file]
    }

    /// Its tensors in the natural order of their names.
    #[must_use]
    pub fn tensors(&self) -> &[ModelTensor] {
        &self.tensors
    }

    /// Bytes of all tensors together.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// The tensor of that name, if there is one.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&ModelTensor> {
        let found = self.tensors.binary_search_by(|tensor| natural_order(&tensor.name, name));
        found.ok().map(|index| &self.tensors[index])
    }

    /// The tensor of that name.
    ///
    /// # Errors
    /// `NotFound`, with the names of tensor and model.
    pub fn tensor(&self, name: &str) -> Result<&ModelTensor> {
        self.find(name).ok_or_else(|| {
            let text = format!("{}: there is no tensor {}", self.name, quoted(name));
            Error::new(ErrorCode::NotFound, text)
        })
    }

    /// The tensors as `model/binding` lays them out, in their order.
    #[must_use]
    pub fn layout_items(&self) -> Vec<LayoutItem<'_>> {
        let items = self.tensors.iter().map(|tensor| LayoutItem {
            name: &tensor.name,
            bytes: tensor.bytes,
            file: tensor.file,
            source_offset: tensor.offset,
            alignment: TENSOR_ALIGNMENT,
        });
        items.collect()
    }

    /// The tensor that a byte of a file belongs to, so that an error of a read can name it. None
    /// in a header or past the end. Looks at every tensor.
    #[must_use]
    pub fn tensor_at(&self, file: usize, offset: u64) -> Option<&ModelTensor> {
        self.tensors.iter().find(|tensor| {
            tensor.file == file
                && offset.checked_sub(tensor.offset).is_some_and(|within| within < tensor.bytes)
        })
    }

    /// The checksum of a tensor's bytes in its file, as the device computes it over the tensor.
    ///
    /// # Errors
    /// `NotFound` for a name that is not in the model; `Io`, naming tensor and file, when its bytes
    /// cannot be read.
    pub fn checksum(&self, name: &str) -> Result<u64> {
        let tensor = self.tensor(name)?;
        file_checksum(&self.files[tensor.file], tensor.offset, tensor.bytes)
            .map_err(|error| error.context(format_args!("tensor {}", quoted(name))))
    }

    /// Compares each file with what it was when the model was opened.
    ///
    /// # Errors
    /// Those of [`ModelFile::check_unchanged`], for the first file that changed.
    pub fn check_unchanged(&self) -> Result<()> {
        self.files.iter().try_for_each(|file| file.check_unchanged())
    }
}

/// Reads and checks the header of a file.
///
/// # Errors
/// Those of [`parse_header`] and of reading; `FileChanged` when the file was written meanwhile.
pub fn read_header(file: &ModelFile) -> Result<Header> {
    let mut prefix = vec![0; file.bytes().min(PREFIX_BYTES) as usize];
    file.read_exact_at(0, &mut prefix)?;
    let mut header = vec![0; header_bytes(file.name(), &prefix, file.bytes())?];
    file.read_exact_at(PREFIX_BYTES, &mut header)?;
    file.check_unchanged()?;
    parse_header(file.name(), &header, file.bytes())
}

fn read_index(file: &ModelFile) -> Result<Vec<u8>> {
    if file.bytes() > INDEX_BYTES_MAX {
        let text = format!("{}: an index of {} bytes is too large", file.name(), file.bytes());
        return Err(Error::new(ErrorCode::Format, text));
    }
    let mut text = vec![0; file.bytes() as usize];
    file.read_exact_at(0, &mut text)?;
    Ok(text)
}

/// The one model in a folder, as [`Model::open`] says.
fn find_in_folder(folder: &Path) -> Result<PathBuf> {
    let io_error = |error| Error::io(folder.display(), &error);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io_error)? {
        let name = entry.map_err(io_error)?.file_name();
        // A name that is not UTF-8 could not be in an index either; by its own path it opens.
        names.extend(name.into_string().ok().filter(|name| !name.starts_with('.')));
    }
    names.sort();
    for suffix in [INDEX_SUFFIX, MODEL_SUFFIX] {
        let fitting: Vec<&String> = names.iter().filter(|name| name.ends_with(suffix)).collect();
        let usual = fitting.iter().find(|name| name.strip_suffix(suffix) == Some("model"));
        match (usual, &fitting[..]) {
            (Some(name), _) | (None, [name]) => return Ok(folder.join(name)),
            (None, []) => {}
            (None, [first, second, ..]) => {
                let text = format!(
                    "{}: several models in the folder, {} and {} among them; name one",
                    folder.display(),
                    quoted(first),
                    quoted(second)
                );
                return Err(Error::new(ErrorCode::Format, text));
            }
        }
    }
    let text = format!("{}: no *{MODEL_SUFFIX} file in the folder", folder.display());
    Err(Error::new(ErrorCode::Format, text))
}
