//! Verification on the device: a checksum of every tensor against one of the file's bytes.
//!
//! Owns a scratch VBAR inside the budget: one 64-bit word a tensor, zeroed at the begin of a pass
//! and read back at its end, and behind them room for a chunk, through which the bytes of offloaded
//! tensors go. Everything runs in the order of the compute stream; the only waits in a pass are
//! those for a page-locked slot.

use std::sync::atomic::{AtomicUsize, Ordering};

use vbar::copy::staging::Staging;
use vbar::driver::select::Opened;
use vbar::host::locked::{self, LockedSlot};
use vbar::host::model_files::Model;
use vbar::outcome::{Reason, Refusal};
use vbar::sync::ticket::Ticket;
use vbar::units::{MIB, PageSize, align_up};
use vbar::{Error, ErrorCode, Fault, Guard, Result, Vbar};

use super::screen::Screen;
use crate::arguments::argument_of_bytes;
use crate::compute::Compute;
use crate::doctor::has_virtual_memory;

/// Tensors and chunks start at multiples of this.
const ALIGNMENT: u64 = 512;
/// Chunks of offloaded tensors; larger ones are hardly faster.
const CHUNK_BYTES_MAX: u64 = 4 * MIB;
/// Less than this is not worth a copy.
const CHUNK_BYTES_MIN: u64 = 32 << 10;
const WORD_BYTES: u64 = 8;
/// One is read from the file while the other is copied.
const SLOT_COUNT: usize = 2;

/// Refuses what cannot be verified before anything is read for it.
///
/// # Errors
/// `Unsupported`: nothing can be resident on the device, or the scratch does not fit the budget.
pub(super) fn check(
    opened: &Opened,
    model: &Model,
    page_size: PageSize,
    budget: Option<u64>,
    least_budget: u64,
) -> Result<()> {
    if !has_virtual_memory(&*opened.driver, opened.device) {
        let device = opened.device;
        let why =
            format!("device {device} has no virtual memory management, so nothing can be on it");
        return Err(cannot_verify(why, "choose another with --device"));
    }
    match (scratch_bytes(model, page_size), budget) {
        (Some(scratch), Some(budget)) if budget < scratch => {
            let scratch = argument_of_bytes(scratch);
            let why = format!("the budget has no room for {scratch} of scratch");
            // With no more than the scratch not one tensor would be resident.
            let least = argument_of_bytes(least_budget);
            Err(cannot_verify(why, &format!("raise --budget to at least {least}")))
        }
        _ => Ok(()),
    }
}

/// Device bytes that a verification takes, whole pages; `None` of more than can be counted.
pub(super) fn scratch_bytes(model: &Model, page_size: PageSize) -> Option<u64> {
    let layout = Layout::new(model.tensors().len(), page_size.bytes())?;
    align_up(layout.bytes(), page_size.bytes())
}

/// An error of verification: why, and what to do about it.
fn cannot_verify(why: impl std::fmt::Display, remedy: &str) -> Error {
    let text = format!(
        "the model cannot be verified on the device: {why}; {remedy}, or run without --verify"
    );
    Error::new(ErrorCode::Unsupported, text)
}

/// The checksums of a model's tensors, by index, from the bytes of `source`: the model itself or a
/// copy of it.
pub(super) fn checksums(model: &Model, source: &Model, screen: &Screen<'_>) -> Result<Vec<u64>> {
    let tensors = model.tensors();
    let bar = screen.checksums(tensors.len());
    let next = AtomicUsize::new(0);
    let work = || -> Result<Vec<(usize, u64)>> {
        let mut sums = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(tensor) = tensors.get(index) else { return Ok(sums) };
            sums.push((index, source.checksum(&tensor.name)?));
            bar.inc(1);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get().min(16));
    let parts: Vec<Result<Vec<(usize, u64)>>> = std::thread::scope(|scope| {
        // As many as the system gives; this one works too.
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, work).ok();
        let workers: Vec<_> = (1..threads).map_while(spawn).collect();
        let own = std::iter::once(work());
        let panicked = || Error::new(ErrorCode::Internal, "a checksum thread panicked");
        let others = workers.into_iter().map(|worker| worker.join());
        own.chain(others.map(|done| done.unwrap_or_else(|_| Err(panicked())))).collect()
    });
    let mut all = vec![0; tensors.len()];
    for part in parts {
        part?.into_iter().for_each(|(index, sum)| all[index] = sum);
    }
    bar.finish_and_clear();
    Ok(all)
}

/// Where things lie in the scratch VBAR.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Layout {
    /// Of the words.
    words_bytes: u64,
    /// The chunk's, behind the words.
    chunk_bytes: u64,
}

impl Layout {
    /// One page where that is enough.
    fn new(tensor_count: usize, page_bytes: u64) -> Option<Self> {
        let words_bytes = align_up((tensor_count as u64).max(1) * WORD_BYTES, ALIGNMENT)?;
        let mut room = align_up(words_bytes, page_bytes)? - words_bytes;
        if room < CHUNK_BYTES_MIN {
            room += page_bytes;
        }
        Some(Self { words_bytes, chunk_bytes: room.min(CHUNK_BYTES_MAX) })
    }

    fn bytes(self) -> u64 {
        self.words_bytes + self.chunk_bytes
    }
}

/// See the module's text.
pub(super) struct Verifier {
    vbar: Vbar,
    layout: Layout,
    staging: Staging,
    words: LockedSlot,
    expected: Vec<u64>,
}

impl Verifier {
    /// Everything that a pass needs, before the first.
    pub(super) fn new(compute: &Compute, expected: Vec<u64>) -> Result<Self> {
        let (runtime, device) = (compute.runtime(), compute.device());
        device.driver.module_load()?;
        let layout = Layout::new(expected.len(), runtime.page_size().bytes());
        let layout = layout.ok_or_else(|| cannot_verify("too many tensors", "use larger pages"))?;
        let vbar = runtime.create_bar(layout.bytes())?;
        // Pages of the model go first.
        vbar.set_class(i32::MAX)?;
        let staging = Staging::new(device, SLOT_COUNT, layout.chunk_bytes as usize)?;
        let words = locked::allocate(&device.driver, 1, layout.words_bytes as usize)?;
        let words = words
            .into_iter()
            .next()
            .ok_or_else(|| cannot_verify("no page-locked memory", "free some"))?;
        Ok(Self { vbar, layout, staging, words, expected })
    }

    /// Page-locked bytes.
    pub(super) fn locked_bytes(&self) -> u64 {
        self.staging.locked_bytes() + self.words.len() as u64
    }

    /// Device bytes, whole pages.
    pub(super) fn scratch_bytes(&self) -> u64 {
        self.vbar.bytes()
    }

    /// Pins the scratch and zeroes the words.
    pub(super) fn begin<'v>(&'v mut self, compute: &'v Compute) -> Result<Round<'v>> {
        // Its watermark may have sunk while nothing pinned it.
        self.vbar.prioritise()?;
        let scratch = match self.vbar.fault(0..self.layout.bytes(), compute.stream)? {
            Fault::Resident(guard) | Fault::HostMapped(guard) => guard,
            Fault::Offloaded(Refusal { reason, .. }) => {
                let bytes = argument_of_bytes(self.vbar.bytes());
                let why = format!("its scratch of {bytes} did not fit ({reason})");
                let remedy = match reason {
                    Reason::NoAddresses => "give the process more addresses",
                    Reason::Mappings => "use larger pages (--page-size)",
                    // A budget that was given has room for it: the device has less.
                    Reason::TooLarge => "use smaller pages (--page-size) or another device",
                    _ => "free memory of the device",
                };
                return Err(cannot_verify(why, remedy));
            }
        };
        let words = self.layout.words_bytes;
        compute.device().driver.memset_d8_async(scratch.address(), 0, words, compute.stream)?;
        Ok(Round {
            compute,
            layout: self.layout,
            scratch,
            staging: &self.staging,
            words: &mut self.words,
            expected: &self.expected,
            copied_bytes: 0,
        })
    }
}

/// The verification of one pass.
pub(super) struct Round<'v> {
    compute: &'v Compute,
    layout: Layout,
    scratch: Guard<'v>,
    staging: &'v Staging,
    words: &'v mut LockedSlot,
    expected: &'v [u64],
    copied_bytes: u64,
}

/// What a round found.
pub(super) struct Found {
    /// Tensors whose bytes were not the file's.
    pub(super) mismatched: Vec<usize>,
    /// Bytes of offloaded tensors that were copied.
    pub(super) copied_bytes: u64,
}

impl Round<'_> {
    /// Enqueues the checksum of a tensor at its own address.
    pub(super) fn resident(&mut self, tensor: usize, guard: &Guard<'_>) -> Result<()> {
        let target = self.scratch.address().offset(tensor as u64 * WORD_BYTES);
        self.compute.add_checksum(guard.address(), guard.bytes(), 0, target)
    }

    /// Sends a tensor's bytes through the scratch, chunk by chunk.
    pub(super) fn offloaded(&mut self, tensor: usize, model: &Model) -> Result<()> {
        let entry = &model.tensors()[tensor];
        let file = &model.files()[entry.file];
        let target = self.scratch.address().offset(tensor as u64 * WORD_BYTES);
        let chunk = self.scratch.address().offset(self.layout.words_bytes);
        let (device, stream) = (self.compute.device(), self.compute.stream);
        let mut done = 0;
        while done < entry.bytes {
            let bytes = (entry.bytes - done).min(self.layout.chunk_bytes);
            let length = bytes as usize;
            let slot = self.staging.take(device)?;
            let mut slot = slot.expect("a ring of its own keeps its slots");
            let memory = slot.memory();
            file.read_exact_at(entry.offset + done, &mut memory.bytes_mut()[..length])?;
            memory.copy_to_device(0..length, chunk, stream)?;
            slot.give_back(self.fence()?);
            self.compute.add_checksum(chunk, bytes, done / WORD_BYTES, target)?;
            done += bytes;
        }
        file.check_unchanged()?;
        self.copied_bytes += entry.bytes;
        Ok(())
    }

    /// A ticket for what is on the stream now. Should there be none, the work is waited for: its
    /// page-locked memory must not be used again before.
    fn fence(&self) -> Result<Ticket> {
        let fences = &self.compute.device().fences;
        let slot = fences.slot_of(self.compute.stream)?;
        let recorded = slot.map(|slot| fences.record(self.compute.stream, slot)).transpose();
        match recorded {
            Ok(Some(ticket)) => Ok(ticket),
            Ok(None) => self.compute.synchronize().map(|()| Ticket::NONE),
            Err(error) => {
                self.compute.synchronize()?;
                Err(error)
            }
        }
    }

    /// Reads the words back, waits for them and compares.
    pub(super) fn finish(mut self) -> Result<Found> {
        let length = self.expected.len() * WORD_BYTES as usize;
        if length > 0 {
            let (source, stream) = (self.scratch.address(), self.compute.stream);
            self.words.copy_from_device(0..length, source, stream)?;
        }
        self.compute.synchronize()?;
        let mismatched = compare(self.expected, &self.words.bytes_mut()[..length]);
        Ok(Found { mismatched, copied_bytes: std::mem::take(&mut self.copied_bytes) })
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        // After an error, copies from page-locked memory that is freed next may be under way.
        if let Err(error) = self.compute.synchronize() {
            log::debug!("ending a pass: {error}");
        }
    }
}

/// Indexes of the checksums, little-endian words, that are not as expected.
fn compare(expected: &[u64], found: &[u8]) -> Vec<usize> {
    let words = found.chunks_exact(WORD_BYTES as usize);
    let differs = |(index, (expected, word)): (usize, (&u64, &[u8]))| {
        (word != expected.to_le_bytes()).then_some(index)
    };
    expected.iter().zip(words).enumerate().filter_map(differs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_word_is_a_mismatch() {
        let words: Vec<u8> = [1u64, 2, u64::MAX].iter().flat_map(|w| w.to_le_bytes()).collect();
        assert_eq!(compare(&[1, 2, u64::MAX], &words), [0usize; 0]);
        assert_eq!(compare(&[1, 3, u64::MAX - 1], &words), [1, 2]);
        assert_eq!(compare(&[], &[]), [0usize; 0]);
    }

    #[test]
    fn the_scratch_fits_in_a_page_where_it_can() {
        for (tensors, page, pages) in [(100, 16 << 20, 1), (0, 1 << 16, 1), (8000, 1 << 16, 2)] {
            let layout = Layout::new(tensors, page).unwrap();
            assert_eq!(layout.bytes().div_ceil(page), pages);
            assert!(layout.chunk_bytes >= CHUNK_BYTES_MIN);
            assert_eq!(layout.words_bytes % ALIGNMENT, 0);
            assert_eq!(layout.chunk_bytes % WORD_BYTES, 0);
        }
    }
}
