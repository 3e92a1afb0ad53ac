//! Models for traces: real files of a few pages, and what is done to them.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use vbar::driver::kernel::{checksum, pattern};
use vbar::host::model_files::Model as Files;
use vbar::host::source::{FileIdentity, ModelFile, ReadAt};
use vbar::model::synth::{synthesize, tensor_seed};
use vbar::{ModelBar, Runtime};

/// Bytes of the models, the seeds of their patterns being their numbers.
const SIZES: [u64; 2] = [64 << 10, 96 << 10];

/// A model that is open.
pub(crate) struct Model {
    pub(crate) device: usize,
    pub(crate) bar: ModelBar,
    /// Cut or written over: it is another file from now on.
    pub(crate) is_changed: bool,
    /// Until it is healed.
    pub(crate) is_unreadable: bool,
    /// The checksum of each tensor.
    pub(crate) sums: Vec<u64>,
    path: PathBuf,
    bad_from: Arc<AtomicU64>,
    by_reader: bool,
}

/// A file that fails past an offset, while it is told to.
struct Failing {
    file: File,
    bad_from: Arc<AtomicU64>,
}

impl ReadAt for Failing {
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        let left = self.bad_from.load(Ordering::Relaxed).saturating_sub(offset);
        if left == 0 && !target.is_empty() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let length = (target.len() as u64).min(left) as usize;
        ReadAt::read_at(&self.file, &mut target[..length], offset)
    }

    fn identity(&self) -> io::Result<FileIdentity> {
        self.file.identity()
    }
}

/// The bytes of a model's file, made once.
fn contents(number: usize) -> &'static [u8] {
    static MADE: [OnceLock<Vec<u8>>; 2] = [const { OnceLock::new() }; 2];
    MADE[number].get_or_init(|| {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("model.safetensors");
        synthesize(&path, SIZES[number], number as u64).unwrap();
        std::fs::read(path).unwrap()
    })
}

impl Model {
    /// Opens model `number`, in a file of its own.
    pub(crate) fn open(
        runtime: &Runtime,
        device: usize,
        number: usize,
        path: &Path,
        by_reader: bool,
    ) -> vbar::Result<Self> {
        std::fs::write(path, contents(number)).unwrap();
        let bad_from = Arc::new(AtomicU64::new(u64::MAX));
        let bar = if by_reader {
            let file = File::open(path).unwrap();
            let reader = Failing { file, bad_from: Arc::clone(&bad_from) };
            let file = ModelFile::from_reader(Box::new(reader), "failing")?;
            runtime.bind_model(Files::from_file(file)?)?
        } else {
            runtime.open_model(path)?
        };
        let sum = |(name, bytes): (&str, u64)| {
            let mut expected = vec![0; bytes as usize];
            pattern(&mut expected, tensor_seed(number as u64, name));
            checksum(&expected, 0)
        };
        static SUMS: [OnceLock<Vec<u64>>; 2] = [const { OnceLock::new() }; 2];
        let tensors = bar.model().tensors().iter();
        let sums = SUMS[number]
            .get_or_init(|| tensors.map(|tensor| sum((&tensor.name, tensor.bytes))).collect());
        let (sums, path) = (sums.clone(), path.to_owned());
        let (is_changed, is_unreadable) = (false, false);
        Ok(Self { device, bar, is_changed, is_unreadable, sums, path, bad_from, by_reader })
    }

    /// Tensors that have bytes.
    pub(crate) fn tensors(&self) -> Vec<usize> {
        let tensors = self.bar.model().tensors().iter().enumerate();
        tensors.filter(|(_, tensor)| tensor.bytes > 0).map(|(index, _)| index).collect()
    }

    /// Does something to the file.
    pub(crate) fn damage(&mut self, how: u64) {
        match how {
            0 => {
                let file = File::options().write(true).open(&self.path).unwrap();
                file.set_len(SIZES[0] / 2).unwrap();
                touch(&file);
                self.is_changed = true;
            }
            1 => {
                let length = std::fs::metadata(&self.path).unwrap().len();
                std::fs::write(&self.path, vec![0x5A; length as usize]).unwrap();
                touch(&File::options().write(true).open(&self.path).unwrap());
                self.is_changed = true;
            }
            2 if self.by_reader => {
                self.bad_from.store(SIZES[0] / 3, Ordering::Relaxed);
                self.is_unreadable = true;
            }
            _ => {
                self.bad_from.store(u64::MAX, Ordering::Relaxed);
                self.is_unreadable = false;
            }
        }
    }
}

/// File systems keep coarse times: a change in the moment of the opening would not be seen.
fn touch(file: &File) {
    file.set_modified(SystemTime::now() + Duration::from_secs(60)).unwrap();
}
