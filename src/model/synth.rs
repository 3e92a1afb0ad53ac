//! Synthetic models: safetensors files of any size, with tensors as a transformer has them and
//! bytes that can be computed again.
//!
//! The bytes of a tensor are the pattern of [`tensor_seed`], which the library's own kernel writes
//! too (`driver/kernel`), so they can be checked without the file; two tensors differ in every
//! word. They are no sensible numbers: a model of them computes nothing. Two models of equal size,
//! seed and shards are equal byte for byte. A file says in its `__metadata__` what it is, and
//! appears under its name only when it is whole (short of a power failure: it is not synced). What
//! is in its place goes only if it is of a synthetic model too: see `existing`.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Metadata, TensorInfo};

use crate::driver::kernel::mix;
use crate::error::{Error, ErrorCode, Result};
use crate::host::model_files::Model;
use crate::host::safetensors::PREFIX_BYTES;
use crate::names::natural_order;
use crate::units::format_bytes;

mod existing;
mod plan;
mod writer;

pub use plan::TOTAL_BYTES_MIN;
pub use writer::Progress;

use existing::{Replace, check_folder, check_replaceable, kind_of, name_of};
use plan::{PlannedTensor, plan};
use writer::{Partial, Stretch, check_space, write_file};

/// The most shards: each is larger than the largest tensor, so none is empty.
pub const SHARDS_MAX: u32 = 16;
/// The index of a sharded model, in its folder.
pub const INDEX_NAME: &str = "model.safetensors.index.json";

/// Where a file says what it is. The only entry: the order of several would not be fixed.
const METADATA_KEY: &str = "vbar.synthetic";
/// To be raised when the same numbers give other files.
const VERSION: u32 = 1;
/// Room for headers when the disk's is checked.
const HEADERS_BYTES: u64 = 1 << 20;

/// What a synthetic model is made from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SyntheticModel {
    /// Bytes of all tensors together, at least 64 KiB; the headers come on top.
    pub total_bytes: u64,
    /// Any number; sizes and bytes follow from it.
    pub seed: u64,
    /// Files, 1 to [`SHARDS_MAX`]. More than one have an index.
    pub shards: u32,
}

/// Writes a model of one file, unless it is there already.
///
/// # Errors
/// Those of [`SyntheticModel::write`].
pub fn synthesize(path: &Path, total_bytes: u64, seed: u64) -> Result<Vec<PathBuf>> {
    SyntheticModel { total_bytes, seed, shards: 1 }.ensure(path, &|_| {})
}

/// Writes a model of `shards` files and an index into a folder, unless it is there already.
///
/// # Errors
/// Those of [`SyntheticModel::write`].
pub fn synthesize_sharded(
    folder: &Path,
    total_bytes: u64,
    seed: u64,
    shards: u32,
) -> Result<Vec<PathBuf>> {
    SyntheticModel { total_bytes, seed, shards }.ensure(folder, &|_| {})
}

/// The seed of a tensor's pattern in a model of `model_seed`.
#[must_use]
pub fn tensor_seed(model_seed: u64, name: &str) -> u64 {
    name.bytes().fold(mix(model_seed, 0), |hash, byte| mix(hash ^ u64::from(byte), 1))
}

impl SyntheticModel {
    /// [`Self::write`], unless [`Self::is_at`] says that it is there already.
    ///
    /// # Errors
    /// Those of [`Self::write`].
    pub fn ensure(&self, path: &Path, progress: Progress<'_>) -> Result<Vec<PathBuf>> {
        if self.is_at(path) {
            return Ok(self.paths(path));
        }
        self.write(path, progress)
    }

    /// Whether the model at `path` is this one, whole: decided by what its files say of
    /// themselves and by their sizes; the bytes of the tensors are not read.
    #[must_use]
    pub fn is_at(&self, path: &Path) -> bool {
        let paths = self.paths(path);
        // A folder with such a file in it is not the file, and a pipe is not even opened.
        let is_file = |path: &PathBuf| path.metadata().is_ok_and(|metadata| metadata.is_file());
        let Some(first) = paths.first().filter(|_| paths.iter().all(is_file)) else {
            return false;
        };
        let Ok(model) = Model::open(first) else { return false };
        let described = |shard: u32| {
            let metadata = model.metadata(shard as usize);
            metadata.get(METADATA_KEY) == Some(&self.description(shard))
        };
        model.files().len() == self.shards as usize
            && model.total_bytes() == self.total_bytes
            && (0..self.shards).all(described)
    }

    /// Writes the model, in place of a synthetic one that is there: to the file `path`; of several
    /// shards, into the folder `path`, which is made if need be, the index last. The paths written,
    /// the index first.
    ///
    /// # Errors
    /// `InvalidArgument`: fewer bytes than 64 KiB, no or too many shards, a file in the place of
    /// one of the model's that is not of a synthetic model, anything else there that is no regular
    /// file, `path` a file where it should be a folder. `Io`: the folder of `path` does not exist,
    /// which is made for shards only; too little space on the file system, which is checked first;
    /// another process is writing the same model; any failure of writing.
    pub fn write(&self, path: &Path, progress: Progress<'_>) -> Result<Vec<PathBuf>> {
        self.write_over(path, Replace::Synthetic, progress)
    }

    /// [`Self::write`] that replaces any regular file.
    ///
    /// # Errors
    /// Those of [`Self::write`].
    pub fn overwrite(&self, path: &Path, progress: Progress<'_>) -> Result<Vec<PathBuf>> {
        self.write_over(path, Replace::AnyFile, progress)
    }

    fn write_over(
        &self,
        path: &Path,
        replace: Replace,
        progress: Progress<'_>,
    ) -> Result<Vec<PathBuf>> {
        self.check(path)?;
        let mut paths = self.paths(path);
        let mut tensors = plan(self.total_bytes, self.seed);
        if self.shards == 1 {
            check_folder(path)?;
            check_replaceable(path, replace)?;
            self.write_shard(path, 0, &tensors, progress)?;
            return Ok(paths);
        }
        make_folder(path)?;
        // Nothing is touched before all may be.
        paths.iter().try_for_each(|path| check_replaceable(path, replace))?;
        check_space(&path.join(INDEX_NAME), self.total_bytes.saturating_add(HEADERS_BYTES))?;
        // An index without its shards, or with others', must not be taken for a model.
        let index = paths.remove(0);
        match std::fs::remove_file(&index) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io(index.display(), &error));
            }
            _ => {}
        }
        tensors.sort_by(|left, right| natural_order(&left.name, &right.name));
        let groups = self.divide(tensors);
        for ((shard, group), shard_path) in (0..).zip(&groups).zip(&paths) {
            self.write_shard(shard_path, shard, group, progress)?;
        }
        self.write_index(&index, &groups)?;
        paths.insert(0, index);
        Ok(paths)
    }

    fn check(&self, path: &Path) -> Result<()> {
        let text = if self.total_bytes < TOTAL_BYTES_MIN {
            format!("a synthetic model has at least {}", format_bytes(TOTAL_BYTES_MIN))
        } else if !(1..=SHARDS_MAX).contains(&self.shards) {
            format!("{} shards, where 1 to {SHARDS_MAX} can be", self.shards)
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorCode::InvalidArgument, format!("{}: {text}", path.display())))
    }

    /// The model's files below or at `path`, the index first.
    fn paths(&self, path: &Path) -> Vec<PathBuf> {
        if self.shards == 1 {
            return vec![path.to_owned()];
        }
        let shards = (0..self.shards).map(|shard| path.join(self.shard_name(shard)));
        std::iter::once(path.join(INDEX_NAME)).chain(shards).collect()
    }

    fn shard_name(&self, shard: u32) -> String {
        format!("model-{:05}-of-{:05}.safetensors", shard + 1, self.shards)
    }

    fn description(&self, shard: u32) -> String {
        let Self { total_bytes, seed, shards } = self;
        format!("version {VERSION}, {total_bytes} bytes, seed {seed}, file {shard} of {shards}")
    }

    /// Parts of about equal bytes, none empty.
    fn divide(&self, tensors: Vec<PlannedTensor>) -> Vec<Vec<PlannedTensor>> {
        let mut groups: Vec<_> = (0..self.shards).map(|_| Vec::new()).collect();
        let mut before = 0u64;
        for tensor in tensors {
            let group = u128::from(before) * u128::from(self.shards) / u128::from(self.total_bytes);
            before += tensor.bytes;
            // The last tensors may have no bytes and begin at the end.
            let last = groups.len() - 1;
            groups[usize::try_from(group).map_or(last, |group| group.min(last))].push(tensor);
        }
        groups
    }

    fn write_shard(
        &self,
        path: &Path,
        shard: u32,
        tensors: &[PlannedTensor],
        progress: Progress<'_>,
    ) -> Result<()> {
        // As the format's own writer: larger elements first, so that all are aligned, then names.
        let mut tensors: Vec<&PlannedTensor> = tensors.iter().collect();
        tensors.sort_by(|left, right| {
            right.dtype.cmp(&left.dtype).then_with(|| left.name.cmp(&right.name))
        });
        let head = self.head(shard, &tensors)?;
        let mut offset = head.len() as u64;
        let mut stretches = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let seed = tensor_seed(self.seed, &tensor.name);
            stretches.push(Stretch { offset, bytes: tensor.bytes, seed });
            offset += tensor.bytes;
        }
        write_file(path, &head, &stretches, progress)
    }

    /// Prefix and header, padded so that the data begins at a multiple of 8.
    fn head(&self, shard: u32, tensors: &[&PlannedTensor]) -> Result<Vec<u8>> {
        let mut end = 0;
        let infos = tensors.iter().map(|tensor| {
            let start = end;
            end += tensor.bytes as usize;
            let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
            (tensor.name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) })
        });
        let metadata = HashMap::from([(METADATA_KEY.to_owned(), self.description(shard))]);
        let wrong = |text: String| Error::new(ErrorCode::Internal, format!("a header: {text}"));
        let table = Metadata::new(Some(metadata), infos.collect())
            .map_err(|error| wrong(error.to_string()))?;
        let mut header = serde_json::to_vec(&table).map_err(|error| wrong(error.to_string()))?;
        header.resize(header.len().next_multiple_of(PREFIX_BYTES as usize), b' ');
        let mut head = (header.len() as u64).to_le_bytes().to_vec();
        head.append(&mut header);
        Ok(head)
    }

    fn write_index(&self, path: &Path, groups: &[Vec<PlannedTensor>]) -> Result<()> {
        let mut shard_of = BTreeMap::new();
        for (shard, group) in (0..).zip(groups) {
            let name = self.shard_name(shard);
            shard_of.extend(group.iter().map(|tensor| (&tensor.name, name.clone())));
        }
        let index = serde_json::json!({
            "metadata": { "total_size": self.total_bytes },
            "weight_map": shard_of,
        });
        let mut partial = Partial::create(path)?;
        let written = partial.file.write_all_at(index.to_string().as_bytes(), 0);
        written.map_err(|error| Error::io(path.display(), &error))?;
        partial.rename_to(path)
    }
}

/// The folder of a sharded model, which may be there already, also behind a link.
fn make_folder(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(kind) = kind_of(path)? {
        let name = if kind.is_file() { "a file" } else { name_of(kind) };
        let text = format!("{}: {name} is in the place of the folder", path.display());
        return Err(Error::new(ErrorCode::InvalidArgument, text));
    }
    std::fs::create_dir_all(path).map_err(|error| Error::io(path.display(), &error))
}
