//! What no load can be faster than: the link, and reading the file by itself.
//!
//! Owns the state of the page cache: warm after a read of everything, cold after advice that is
//! checked.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;

use parking_lot::RwLock;
use rustix::fs::{Advice, fadvise};
use vbar::host::direct::ALIGNMENT_MAX;
use vbar::host::locked;
use vbar::host::model_files::Model;
use vbar::host::source::ReadAt;
use vbar::units::{MIB, format_bytes};
use vbar::{Error, ErrorCode, Fault, Result};

use super::subject::median;
use crate::compute::Compute;

/// Threads that are tried.
pub(super) const THREADS: [usize; 4] = [1, 4, 8, 16];
/// One read; large enough that a disk is busy with one a thread.
const CHUNK_BYTES: usize = 8 << 20;
/// Largest copy that the link is measured by.
const COPY_BYTES_MAX: u64 = 64 * MIB;
/// Of a round, so that waiting for its end does not count.
const COPIES: u64 = 8;
const LINK_ROUNDS: usize = 7;
/// One byte in so many is asked whether it is in the page cache.
const PROBE_BYTES: u64 = MIB;

/// Bytes a second from page-locked memory to the device.
///
/// # Errors
/// What the driver says; `HostMemory` where nothing is free on the device.
pub(super) fn link_rate(compute: &Compute) -> Result<f64> {
    let (runtime, device) = (compute.runtime(), compute.device());
    let page_bytes = runtime.page_size().bytes();
    let room = (runtime.numbers().budget_bytes / 4).clamp(page_bytes, COPY_BYTES_MAX);
    let bytes = (room / page_bytes).max(1) * page_bytes;
    let target = runtime.create_bar(bytes)?;
    let Fault::Resident(guard) = target.fault(0..bytes, compute.stream)? else {
        let text = format!(
            "no room on the device for {} to measure the link with: use smaller pages \
             (--page-size), or another device",
            format_bytes(bytes)
        );
        return Err(Error::new(ErrorCode::HostMemory, text));
    };
    let mut slots = locked::allocate(&device.driver, 1, bytes as usize)?;
    let slot = &mut slots[0];
    slot.bytes_mut().fill(1);
    let mut rates = Vec::new();
    // The first round pays for what the driver makes late.
    for round in 0..=LINK_ROUNDS {
        let start = Instant::now();
        for _ in 0..COPIES {
            slot.copy_to_device(0..bytes as usize, guard.address(), compute.stream)?;
        }
        compute.synchronize()?;
        if round > 0 {
            rates.push((COPIES * bytes) as f64 / start.elapsed().as_secs_f64().max(1e-9));
        }
    }
    guard.unpin()?;
    Ok(median(&rates))
}

/// How a file is read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Through the page cache.
    Cached,
    /// Past it.
    Direct,
}

/// Bytes a second of reading a model's files into memory of `threads`.
///
/// # Errors
/// What the system says; `Unsupported` where a file cannot be read past the page cache.
pub(super) fn read_rate(model: &Model, way: Way, threads: usize) -> Result<f64> {
    let files = files(model)?;
    let chunks: Vec<(usize, u64)> = model
        .files()
        .iter()
        .enumerate()
        .flat_map(|(index, file)| {
            let starts = (0..file.bytes()).step_by(CHUNK_BYTES);
            starts.map(move |start| (index, start))
        })
        .collect();
    // Readers begin when all of them are there; none does where one could not be had.
    let (next, gate) = (AtomicUsize::new(0), RwLock::new(false));
    let (ready, all_ready) = mpsc::channel();
    let read_some = || -> Result<u64> {
        let mut memory = vec![1; CHUNK_BYTES + ALIGNMENT_MAX as usize];
        let skew = memory.as_ptr().addr().wrapping_neg() % ALIGNMENT_MAX as usize;
        let target = &mut memory[skew..skew + CHUNK_BYTES];
        // Somebody waits for it, unless nobody is to begin.
        let _ = ready.send(());
        let begins = *gate.read();
        let mut done = 0;
        while begins && let Some((index, start)) = chunks.get(next.fetch_add(1, Ordering::Relaxed))
        {
            let file = &model.files()[*index];
            let bytes = (file.bytes() - start).min(CHUNK_BYTES as u64) as usize;
            let target = &mut target[..bytes];
            let read = match (way, file.direct()) {
                (Way::Cached, _) => files[*index].read_exact_at(target, *start),
                (Way::Direct, Some(direct)) => {
                    direct.read_at(*start, target).map(drop).map_err(|(_, error)| error)
                }
                (Way::Direct, None) => Err(std::io::ErrorKind::Unsupported.into()),
            };
            read.map_err(|error| Error::io(file.name(), &error))?;
            done += bytes as u64;
        }
        Ok(done)
    };
    std::thread::scope(|scope| {
        let mut begins = gate.write();
        let readers = (0..threads)
            .map(|_| std::thread::Builder::new().spawn_scoped(scope, read_some))
            .collect::<std::io::Result<Vec<_>>>()
            .map_err(|error| Error::io(format_args!("{threads} threads to read in"), &error))?;
        all_ready.iter().take(readers.len()).for_each(drop);
        *begins = true;
        let start = Instant::now();
        drop(begins);
        let mut bytes = 0;
        for reader in readers {
            let lost = |_| Error::new(ErrorCode::Internal, "a reader ended with a panic");
            bytes += reader.join().map_err(lost)??;
        }
        Ok(bytes as f64 / start.elapsed().as_secs_f64().max(1e-9))
    })
}

/// Reads everything, so that the page cache has it.
pub(super) fn warm(model: &Model) -> Result<()> {
    read_rate(model, Way::Cached, 4).map(drop)
}

/// Asks the system to drop the files from the page cache. Returns why they are not cold, where
/// that is so.
pub(super) fn make_cold(model: &Model) -> Result<Option<String>> {
    let (mut probes, mut cached) = (0u64, 0u64);
    for (file, description) in model.files().iter().zip(files(model)?) {
        let failed = |error: std::io::Error| Error::io(file.name(), &error);
        // Pages that are still to be written would stay.
        description.sync_all().map_err(failed)?;
        let advise = |advice| fadvise(&description, 0, None, advice);
        advise(Advice::DontNeed).map_err(|error| failed(error.into()))?;
        // Else a probe would have more read than itself.
        advise(Advice::Random).map_err(|error| failed(error.into()))?;
        for start in (0..file.bytes()).step_by(PROBE_BYTES as usize) {
            probes += 1;
            match description.read_cached_at(&mut [0], start) {
                Ok(_) => cached += 1,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    return Ok(Some(format!("whether the file is cold cannot be told: {error}")));
                }
            }
        }
        advise(Advice::DontNeed).map_err(|error| failed(error.into()))?;
    }
    let percent = 100 * cached / probes.max(1);
    Ok((percent > 0).then(|| {
        format!("the file could not be made cold: {percent} % of it stayed in the page cache")
    }))
}

/// Descriptions of our own, whose advice is nobody else's.
fn files(model: &Model) -> Result<Vec<File>> {
    let open = |file: &std::sync::Arc<vbar::host::source::ModelFile>| {
        let path = file.path().ok_or_else(|| {
            Error::new(ErrorCode::Unsupported, format!("{}: it has no path", file.name()))
        })?;
        File::open(path).map_err(|error| Error::io(path.display(), &error))
    };
    model.files().iter().map(open).collect()
}
