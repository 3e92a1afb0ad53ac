//! What the threads of a stress run share, and the small model of it that they check against.
//!
//! The model knows of each allocation which version of its bytes was committed, and of each bound
//! tensor its bytes. It is independent of the library: it learns only from what a program does
//! (writes, commits) and never from what the library answers.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use vbar::driver::kernel::{checksum, mix};
use vbar::driver::sim::Sim;
use vbar::host::model_files::Model;
use vbar::units::{DeviceOrdinal, Generation};
use vbar::{Allocation, Error, ModelBar, Result, Runtime, Vbar};

use super::choice::Choice;
use super::journal::Journal;
use super::saves::Saved;

/// Bare VBARs at a time.
pub(super) const BARE_COUNT: usize = 3;
/// Pages of a bare VBAR.
const BARE_PAGES: u64 = 14;
/// Allocations in a bare VBAR.
const PIECES: usize = 24;

/// Everything shared.
pub(super) struct World {
    pub(super) runtime: Runtime,
    pub(super) sim: Option<Arc<Sim>>,
    pub(super) device: DeviceOrdinal,
    pub(super) journal: Journal,
    pub(super) budget_pages: u64,
    pub(super) bare: Vec<RwLock<Arc<Bare>>>,
    pub(super) bound: RwLock<Arc<Bound>>,
    pub(super) model_path: PathBuf,
    /// Bytes of the model's tensors, with their checksums.
    pub(super) tensors: Vec<(Vec<u8>, u64)>,
    /// Held for reading by every operation, for writing while the invariants are looked at.
    pub(super) pause: RwLock<()>,
    /// Pages that tokens pin, each counted as often as it is pinned.
    pub(super) held_pages: AtomicU64,
    next_version: AtomicU64,
}

/// A bare VBAR with its allocations.
pub(super) struct Bare {
    pub(super) vbar: Vbar,
    pub(super) pieces: Vec<Piece>,
    /// Those that are written and saved, by whoever holds the lock.
    pub(super) kept: Vec<(Allocation, Mutex<Option<Saved>>)>,
    pub(super) usage: Usage,
}

/// A bound VBAR.
pub(super) struct Bound {
    pub(super) bar: ModelBar,
    pub(super) usage: Usage,
}

/// How often pins were released by force. Whoever uses pages holds it for reading: a program must
/// not take pins by force while it uses them. Of two, the bound VBAR's is taken first.
#[derive(Default)]
pub(super) struct Usage(pub(super) RwLock<u64>);

/// An allocation, and what it must contain.
pub(super) struct Piece {
    pub(super) allocation: Allocation,
    /// Held by whoever writes: only then is the content unsettled.
    pub(super) content: Mutex<Content>,
    /// Whether someone has the right to write; the library gives it to one at a time.
    pub(super) filling: AtomicBool,
}

/// What is known of an allocation's bytes.
#[derive(Default)]
pub(super) struct Content {
    /// The seed of the pattern that was committed last, if it is still good.
    pub(super) version: Option<u64>,
    /// The checksum of that pattern.
    pub(super) checksum: u64,
    /// The signature at that commit.
    pub(super) signature: Vec<Generation>,
}

impl World {
    /// A version of some bytes that no other has.
    pub(super) fn new_version(&self) -> u64 {
        mix(self.next_version.fetch_add(1, Ordering::Relaxed), 0xB17E5)
    }

    /// Everything, on a runtime with nothing in it.
    pub(super) fn new(
        runtime: Runtime,
        sim: Option<Arc<Sim>>,
        journal: Journal,
        model_path: &Path,
        budget_pages: u64,
        seed: u64,
    ) -> Result<Self> {
        let mut choice = Choice::new(seed, u64::MAX);
        let model = Model::open(model_path)?;
        let tensors = read_tensors(&model)?;
        let bound = Bound { bar: runtime.bind_model(model)?, usage: Usage::default() };
        let bare = (0..BARE_COUNT).map(|_| Bare::new(&runtime, &mut choice).map(Arc::new));
        let bare: Vec<_> = bare.map(|bare| bare.map(RwLock::new)).collect::<Result<_>>()?;
        Ok(Self {
            device: runtime.ordinal(),
            runtime,
            sim,
            journal,
            budget_pages,
            bare,
            bound: RwLock::new(Arc::new(bound)),
            model_path: model_path.to_owned(),
            tensors,
            pause: RwLock::new(()),
            held_pages: AtomicU64::new(0),
            next_version: AtomicU64::new(1),
        })
    }

    /// One of the bare VBARs as it is now; it may be replaced while it is used.
    pub(super) fn bare(&self, index: usize) -> Arc<Bare> {
        Arc::clone(&self.bare[index].read())
    }

    /// The bound VBAR as it is now.
    pub(super) fn bound(&self) -> Arc<Bound> {
        Arc::clone(&self.bound.read())
    }

    /// Puts another VBAR in the place of a bare one, which goes when nobody uses it any more.
    pub(super) fn replace_bare(&self, index: usize, choice: &mut Choice) -> Result<()> {
        let new = Arc::new(Bare::new(&self.runtime, choice)?);
        let old = std::mem::replace(&mut *self.bare[index].write(), new);
        drop(old);
        Ok(())
    }

    /// Opens and binds the model again, in place of the bound VBAR.
    pub(super) fn replace_bound(&self) -> Result<()> {
        let bar = self.runtime.open_model(&self.model_path)?;
        let new = Arc::new(Bound { bar, usage: Usage::default() });
        let old = std::mem::replace(&mut *self.bound.write(), new);
        drop(old);
        Ok(())
    }

    pub(super) fn page_bytes(&self) -> u64 {
        self.runtime.page_size().bytes()
    }
}

fn read_tensors(model: &Model) -> Result<Vec<(Vec<u8>, u64)>> {
    let read = |tensor: &vbar::host::model_files::ModelTensor| -> Result<(Vec<u8>, u64)> {
        let mut bytes = vec![0; tensor.bytes as usize];
        model.files()[tensor.file].read_exact_at(tensor.offset, &mut bytes)?;
        let sum = checksum(&bytes, 0);
        Ok((bytes, sum))
    };
    model.tensors().iter().map(read).collect()
}

impl Bare {
    /// A VBAR full of allocations, some of which share pages and some of which span several.
    fn new(runtime: &Runtime, choice: &mut Choice) -> Result<Self> {
        let page = runtime.page_size().bytes();
        let vbar = runtime.create_bar(BARE_PAGES * page)?;
        let (mut pieces, mut kept) = (Vec::with_capacity(PIECES), Vec::new());
        for _ in 0..PIECES {
            let largest = if choice.one_in(4) { 3 * page } else { page / 2 };
            let bytes = 1 + choice.below(largest);
            match vbar.allocate(bytes) {
                Ok(allocation) if !pieces.is_empty() && choice.one_in(4) => {
                    kept.push((allocation, Mutex::default()));
                }
                Ok(allocation) => pieces.push(Piece::new(allocation)),
                // The VBAR is full.
                Err(_) if !pieces.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        Ok(Self { vbar, pieces, kept, usage: Usage::default() })
    }
}

impl Piece {
    fn new(allocation: Allocation) -> Self {
        Self { allocation, content: Mutex::default(), filling: AtomicBool::new(false) }
    }

    pub(super) fn bytes(&self) -> u64 {
        let range = self.allocation.range();
        range.end - range.start
    }
}

/// The checksum of the pattern of `seed` over `bytes` bytes.
pub(super) fn pattern_checksum(seed: u64, bytes: u64) -> u64 {
    let words = bytes / 8;
    let whole = (0..words).fold(0u64, |sum, index| sum.wrapping_add(mix(mix(seed, index), index)));
    let tail = mix(seed, words).to_le_bytes();
    whole.wrapping_add(checksum(&tail[..(bytes % 8) as usize], words))
}

/// An error that the world itself makes.
pub(super) fn internal(text: impl Into<String>) -> Error {
    Error::new(vbar::ErrorCode::Internal, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_of_a_pattern_is_that_of_its_bytes() {
        for bytes in [1u64, 7, 8, 9, 64, 1001] {
            let words = (0..bytes.div_ceil(8)).flat_map(|index| mix(42, index).to_le_bytes());
            let pattern: Vec<u8> = words.take(bytes as usize).collect();
            assert_eq!(pattern_checksum(42, bytes), checksum(&pattern, 0), "{bytes} bytes");
        }
    }
}
