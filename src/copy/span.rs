//! A span, the bytes of one fill that fit into one slot, and its reading by several threads.
//!
//! What the program has in page-locked memory is read by nobody: spans of it are [`Way::Direct`],
//! and lie between spans that are read.
//!
//! [`pieces`] cuts a span into reads of at most 1 MiB, or 2 MiB into new memory; a [`SpanRead`]
//! counts them to the end and keeps the first failure. Whoever gives a read up leaves the slot with
//! it, which comes free with the last piece: nobody waits for a disk that does not answer.
//!
//! Many threads that wait for a disk each for their own piece have it jump to and fro. So the first
//! piece that is not in the page cache asks the system to read the whole span, in order, and all
//! of them wait for that.

use std::cell::OnceCell;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::counters::{self, Sources};
use crate::error::{Error, ErrorCode, Result};
use crate::host::anonymous::HUGE_PAGE_BYTES;
use crate::host::bound::{Bound, Source};
use crate::host::file_pages::WINDOW_BYTES_MAX;
use crate::host::locked::LentPart;
use crate::host::memory::{HostLease, HostMemory};
use crate::host::reading::{ReadBytes, Reading};
use crate::host::source::ModelFile;
use crate::model::binding::{Encoding, Segment};
use crate::process;
use crate::sync::device::Device;
use crate::sync::{AtomicBool, AtomicU64, Condvar, Mutex, Once, Relaxed};
use crate::trace::{self, Kind};
use crate::units::MIB;

/// Bytes of one read: enough to be quick, and few enough that all threads share a page.
const PIECE_BYTES: u64 = MIB;
/// Gaps in a file that are read along rather than skipped by another call.
const GAP_BYTES_MAX: u64 = 32 << 10;

/// Copies straight from a file's pages are of this size at least, on the average, but for a few.
const COPY_BYTES: u64 = 256 << 10;
const COPIES_MIN: u64 = 16;
/// How the bytes of a span come to the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// The device reads them where the program has them.
    Direct,
    /// They are read, and may stay in the page-locked cache.
    Read,
    /// They are read. Other spans of the same slot's worth are too, and the cache has one place
    /// for all of them, so that none has it.
    ReadApart,
}

/// See the module's text.
pub(super) struct Span {
    /// Index of the job that it belongs to.
    pub(super) job: usize,
    /// From the first byte that comes from a source to the last, in the VBAR; empty without any.
    pub(super) bytes: Range<u64>,
    pub(super) segments: Vec<Segment>,
    pub(super) way: Way,
    /// Whether it is the last of its job.
    pub(super) is_last: bool,
    /// Whether it comes from a disk, once that was asked.
    from_disk: OnceCell<bool>,
}

impl Span {
    fn new(job: usize, bytes: Range<u64>, segments: Vec<Segment>, way: Way) -> Self {
        Self { job, bytes, segments, way, is_last: false, from_disk: OnceCell::new() }
    }

    /// The spans of a job over `target`, in slots of `slot_bytes`; one that is empty where the
    /// whole target has no bytes of its own.
    pub(super) fn of_job(
        job: usize,
        bound: &Bound,
        target: &Range<u64>,
        slot_bytes: u64,
    ) -> Vec<Self> {
        let mut spans = Vec::new();
        let mut start = target.start;
        while start < target.end {
            let end = target.end.min(start + slot_bytes);
            let segments = bound.binding().segments_of(start..end);
            let is_direct = |segment: &Segment| bound.locked_memory(segment.file).is_some();
            let groups = segments.chunk_by(|left, right| is_direct(left) == is_direct(right));
            let groups: Vec<&[Segment]> = groups.collect();
            let read_count = groups.iter().filter(|group| !is_direct(&group[0])).count();
            for group in groups {
                let bytes = group[0].target.start..group[group.len() - 1].target.end;
                let way = match read_count {
                    _ if is_direct(&group[0]) => Way::Direct,
                    1 => Way::Read,
                    _ => Way::ReadApart,
                };
                spans.push(Self::new(job, bytes, group.to_vec(), way));
            }
            start = end;
        }
        if spans.is_empty() {
            let (bytes, way) = (target.start..target.start, Way::Read);
            spans.push(Self::new(job, bytes, Vec::new(), way));
        }
        spans.last_mut().expect("there is one at least").is_last = true;
        spans
    }

    pub(super) fn len(&self) -> usize {
        (self.bytes.end - self.bytes.start) as usize
    }

    /// Compares the files that it comes from with what they were. Memory has nothing to compare.
    pub(super) fn check_unchanged(&self, bound: &Bound) -> Result<()> {
        let mut files: Vec<usize> = self.segments.iter().map(|segment| segment.file).collect();
        files.dedup();
        let files = files.into_iter().filter_map(|file| bound.source(file).file());
        files.into_iter().try_for_each(|file| file.check_unchanged())
    }

    /// What of which file it reads.
    fn extents<'a>(
        &self,
        bound: &'a Bound,
    ) -> impl Iterator<Item = (&'a Arc<ModelFile>, Range<u64>)> + use<'a> {
        runs(&self.segments).into_iter().filter_map(|run| {
            let file = bound.source(run.file).file()?;
            Some((file, run.source..run.source + run.bytes))
        })
    }

    /// Whether some of it comes from a disk, as far as the system says; where it does not, it does.
    pub(super) fn comes_from_disk(&self, bound: &Bound, reading: Reading) -> bool {
        *self.from_disk.get_or_init(|| {
            self.extents(bound).any(|(file, range)| {
                let is_passed_by = reading == Reading::Direct && file.direct().is_some();
                is_passed_by || !file.is_in_memory(&range, PIECE_BYTES)
            })
        })
    }

    /// Where its bytes lie in their file, if that is one, they lie close together, and few copies
    /// bring them: what one window of the file's pages can stand for.
    pub(super) fn source(&self) -> Option<FileSource> {
        let runs = runs(&self.segments);
        let file = runs.first()?.file;
        let start = runs.iter().map(|run| run.source).min()?;
        let end = runs.iter().map(|run| run.source + run.bytes).max()?;
        let (length, bytes) = (self.len() as u64, end - start);
        let is_close = bytes <= WINDOW_BYTES_MAX.min(2 * length);
        let is_quick = runs.len() as u64 <= COPIES_MIN + length / COPY_BYTES;
        let is_one = runs.iter().all(|run| run.file == file);
        (is_close && is_quick && is_one).then_some(FileSource { file, bytes: start..end, runs })
    }

    /// Room to leave before the span in its slot, so that its largest run of bytes lies there as
    /// it does in the file, for reads of multiples of `alignment`.
    pub(super) fn pad(&self, alignment: u64) -> usize {
        let largest = runs(&self.segments).into_iter().max_by_key(|run| run.bytes);
        largest.map_or(0, |run| {
            let within = run.target - self.bytes.start;
            (run.source.wrapping_sub(within) % alignment) as usize
        })
    }
}

/// Where a span's bytes are in their file.
pub(super) struct FileSource {
    pub(super) file: usize,
    /// From the first of them to the last.
    pub(super) bytes: Range<u64>,
    pub(super) runs: Vec<Run>,
}

/// Bytes that lie together in a source and in the VBAR.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Run {
    file: usize,
    pub(super) source: u64,
    pub(super) target: u64,
    pub(super) bytes: u64,
}

/// Segments joined where one read does for several.
fn runs(segments: &[Segment]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for segment in segments {
        let Encoding::Raw = segment.encoding;
        let (file, source, target) = (segment.file, segment.source_offset, segment.target.start);
        if let Some(last) = runs.last_mut() {
            let gap = target - (last.target + last.bytes);
            if last.file == file && gap <= GAP_BYTES_MAX && last.source + last.bytes + gap == source
            {
                last.bytes += gap + segment.bytes();
                continue;
            }
        }
        runs.push(Run { file, source, target, bytes: segment.bytes() });
    }
    runs
}

/// One read: of which source, from where, and to where in the slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Piece {
    pub(super) file: usize,
    pub(super) source: u64,
    pub(super) place: Range<usize>,
}

/// Where reads are cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cut {
    /// At multiples of their size in the file, as direct reads want it.
    InFile,
    /// At the huge pages of memory that nothing was read to before: two threads that touch one of
    /// them first take five times as long as one.
    InMemory,
}

/// The reads of a span that lies `pad` bytes into its slot, in order.
pub(super) fn pieces(span: &Span, pad: usize, cut: Cut) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for run in runs(&span.segments) {
        let mut done = 0;
        while done < run.bytes {
            let source = run.source + done;
            let start = pad as u64 + (run.target + done - span.bytes.start);
            // The pad lets memory lie as the file does, so that either suits direct reads.
            let (at, unit) = match cut {
                Cut::InFile => (source, PIECE_BYTES),
                Cut::InMemory => (start, HUGE_PAGE_BYTES as u64),
            };
            let bytes = (unit - at % unit).min(run.bytes - done);
            let place = start as usize..(start + bytes) as usize;
            pieces.push(Piece { file: run.file, source, place });
            done += bytes;
        }
    }
    pieces
}

/// The copies of a span that the device reads where the program has it, in order, each with its
/// memory; places count from the span's start. None crosses the end of a page-locked range.
pub(super) fn direct_copies<'a>(span: &Span, bound: &'a Bound) -> Vec<(&'a HostMemory, Piece)> {
    let mut copies = Vec::new();
    for Run { file, source, target, bytes } in runs(&span.segments) {
        let Some(memory) = bound.locked_memory(file) else { continue };
        let (end, mut at) = (source + bytes, source);
        while at < end {
            let cut = memory.locked_end(at).min(end);
            let start = (target + (at - source) - span.bytes.start) as usize;
            let place = start..start + (cut - at) as usize;
            copies.push((memory, Piece { file, source: at, place }));
            at = cut;
        }
    }
    copies
}

/// What is done after the last piece, on the thread that read it: locks a window.
pub(super) type After = Box<dyn FnOnce() -> Result<()> + Send>;

/// The reading of one span.
pub(super) struct SpanRead {
    state: Mutex<State>,
    done: Condvar,
    /// Nobody wants the bytes any more.
    given_up: AtomicBool,
    /// Bytes that came from the disk.
    disk_bytes: AtomicU64,
    /// When the first piece was begun.
    begun: OnceLock<Instant>,
    /// What of which file it reads.
    extents: Vec<(Arc<ModelFile>, Range<u64>)>,
    /// They are being read into the page cache.
    ahead: Once,
}

struct State {
    pending: usize,
    is_done: bool,
    /// From the beginning of the first piece to the end of all.
    time: Duration,
    /// The failure of the first piece that failed, in the order of pieces.
    failure: Option<(usize, Error)>,
    after: Option<After>,
    after_failure: Option<Error>,
    /// The slot, of a read that was given up.
    left: Option<Box<dyn Send>>,
}

/// How a read ended.
pub(super) struct ReadEnd {
    pub(super) read: Result<()>,
    /// What was to be done after it.
    pub(super) after: Result<()>,
    /// From the beginning of its first piece to the end of all, what came after it included.
    pub(super) time: Duration,
}

impl SpanRead {
    pub(super) fn new(
        pieces: usize,
        span: &Span,
        bound: &Bound,
        after: Option<After>,
    ) -> Arc<Self> {
        let state = State {
            pending: pieces,
            is_done: false,
            time: Duration::ZERO,
            failure: None,
            after,
            after_failure: None,
            left: None,
        };
        let (state, done) = (Mutex::new(state), Condvar::new());
        let (given_up, disk_bytes, begun) = Default::default();
        let extents = span.extents(bound).map(|(file, range)| (Arc::clone(file), range));
        let (extents, ahead) = (extents.collect(), Once::new());
        Arc::new(Self { state, done, given_up, disk_bytes, begun, extents, ahead })
    }

    /// Has the system read all of it into the page cache, once.
    fn read_ahead(&self) {
        self.ahead
            .call_once(|| self.extents.iter().for_each(|(file, range)| file.read_ahead(range)));
    }

    /// Bytes that came from the disk.
    pub(super) fn disk_bytes(&self) -> u64 {
        self.disk_bytes.load(Relaxed)
    }

    /// Waits for the end, not longer than told. Returns whether it has come.
    pub(super) fn wait(&self, at_most: Duration) -> bool {
        let mut state = self.state.lock();
        if !state.is_done && !at_most.is_zero() {
            self.done.wait_for(&mut state, at_most);
        }
        state.is_done
    }

    /// How it ended; asked once, when it has.
    pub(super) fn end(&self) -> ReadEnd {
        let mut state = self.state.lock();
        let failed = |failure: Option<Error>| failure.map_or(Ok(()), Err);
        let read = failed(state.failure.take().map(|(_, error)| error));
        ReadEnd { read, after: failed(state.after_failure.take()), time: state.time }
    }

    /// Gives the read up; `slot` is dropped when no piece of it is being read any more.
    pub(super) fn give_up(&self, slot: impl Send + 'static) {
        self.given_up.store(true, Relaxed);
        // In a forked child nobody reads.
        if process::ending() {
            return;
        }
        let mut state = self.state.lock();
        if !state.is_done {
            state.left = Some(Box::new(slot));
        }
    }

    fn finish_piece(&self, index: usize, result: Result<()>) {
        if process::ending() {
            return;
        }
        let mut state = self.state.lock();
        if let Err(error) = result
            && state.failure.as_ref().is_none_or(|(first, _)| index < *first)
        {
            state.failure = Some((index, error));
        }
        state.pending -= 1;
        if state.pending > 0 {
            return;
        }
        let wanted = state.failure.is_none() && !self.given_up.load(Relaxed);
        if let Some(after) = state.after.take().filter(|_| wanted) {
            drop(state);
            let failure = after().err();
            state = self.state.lock();
            state.after_failure = failure;
        }
        state.is_done = true;
        state.time = self.begun.get().map_or(Duration::ZERO, Instant::elapsed);
        let left = state.left.take();
        drop(state);
        self.done.notify_all();
        drop(left);
    }
}

/// What a piece is read from, kept for as long as that takes.
pub(super) enum Origin {
    File(Arc<ModelFile>),
    Memory(HostLease),
}

impl Origin {
    /// What a source's bytes are read from.
    pub(super) fn of(source: &Source) -> Result<Self> {
        Ok(match source {
            Source::File(file) => Self::File(Arc::clone(file)),
            Source::Memory(memory) => Self::Memory(memory.lease()?),
        })
    }

    /// Fills `target` with the bytes from `at` on, and counts them; `before_disk` as for
    /// [`ModelFile::read_by`]. Returns a word for where most came from, and the bytes that came
    /// from a disk.
    pub(super) fn read(
        &self,
        reading: Reading,
        at: u64,
        target: &mut [u8],
        sources: &Sources,
        before_disk: impl FnOnce(),
    ) -> Result<(&'static str, u64)> {
        match self {
            Self::File(file) => {
                let bytes = file.read_by(reading, at, target, before_disk)?;
                count(sources, bytes);
                Ok((bytes.word(), bytes.disk))
            }
            Self::Memory(lease) => {
                let bytes = target.len() as u64;
                target.copy_from_slice(lease.bytes(at..at + bytes));
                counters::add(&sources.host_pageable, bytes);
                Ok(("host memory", 0))
            }
        }
    }
}

/// One piece in the hands of a thread.
pub(super) struct PieceRead {
    pub(super) device: Arc<Device>,
    pub(super) span: Arc<SpanRead>,
    pub(super) index: usize,
    pub(super) origin: Origin,
    pub(super) source: u64,
    pub(super) reading: Reading,
    /// Taken when the piece is done.
    pub(super) memory: Option<LentPart>,
}

impl PieceRead {
    /// Reads.
    pub(super) fn run(mut self) {
        let Some(memory) = self.memory.take() else { return };
        // When the read panics the memory goes back first, then the end is told.
        let unwinding = Unfinished(&self);
        let mut memory = memory;
        let given_up = self.span.given_up.load(Relaxed);
        self.span.begun.get_or_init(Instant::now);
        let result = if given_up { Ok(()) } else { self.read(memory.bytes_mut()) };
        drop(memory);
        std::mem::forget(unwinding);
        self.span.finish_piece(self.index, result);
    }

    fn read(&self, target: &mut [u8]) -> Result<()> {
        let read = trace::span(Kind::Read).device(self.device.ordinal);
        let read = read.bytes(target.len() as u64);
        let sources = &self.device.counters.sources;
        let ahead = || self.span.read_ahead();
        let (word, disk_bytes) =
            self.origin.read(self.reading, self.source, target, sources, ahead)?;
        self.span.disk_bytes.fetch_add(disk_bytes, Relaxed);
        drop(read.detail(word));
        Ok(())
    }
}

/// Adds a read to the counters.
fn count(sources: &Sources, bytes: ReadBytes) {
    let counts = [
        (&sources.page_cache, bytes.page_cache),
        (&sources.disk, bytes.disk),
        (&sources.direct, bytes.direct),
    ];
    for (counter, bytes) in counts.into_iter().filter(|(_, bytes)| *bytes > 0) {
        counters::add(counter, bytes);
    }
}

/// Ends a piece whose read panics.
struct Unfinished<'a>(&'a PieceRead);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.0.span.finish_piece(self.0.index, Err(never_read()));
    }
}

impl Drop for PieceRead {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            drop(memory);
            self.span.finish_piece(self.index, Err(never_read()));
        }
    }
}

fn never_read() -> Error {
    Error::new(ErrorCode::Internal, "a read did not come to its end")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::binding::Binding;

    /// A span of two stretches of a file, `gap` bytes apart in it and side by side in the VBAR.
    fn span(bytes: u64, gap: u64) -> Span {
        let (first, second) = (0..bytes / 3, bytes / 3..bytes);
        let mut binding = Binding::new();
        binding.bind(first.clone(), 0, 1234, first.end).unwrap();
        let from = 1234 + first.end + gap;
        binding.bind(second.clone(), 0, from, second.end - second.start).unwrap();
        Span::new(0, 0..bytes, binding.segments_of(0..bytes), Way::Read)
    }

    #[test]
    fn reads_are_cut_in_the_file_or_at_huge_pages_and_bring_every_byte_once() {
        for (bytes, gap, pad) in [(16 * MIB, 0, 1234), (16 * MIB, MIB, 7), (999, 5, 0)] {
            let span = span(bytes, gap);
            for cut in [Cut::InFile, Cut::InMemory] {
                let (mut end, mut source) = (pad, 1234);
                for Piece { source: from, place, .. } in pieces(&span, pad, cut) {
                    assert_eq!(place.start, end, "{cut:?}");
                    let is_gap = place.start == pad + (bytes / 3) as usize;
                    source += if is_gap { gap } else { 0 };
                    assert_eq!(from, source, "{cut:?}");
                    let length = (place.end - place.start) as u64;
                    let (first, last, unit) = match cut {
                        Cut::InFile => (from, from + length - 1, MIB),
                        Cut::InMemory => (place.start as u64, place.end as u64 - 1, 2 * MIB),
                    };
                    assert_eq!(first / unit, last / unit, "{cut:?}: {place:?}");
                    (end, source) = (place.end, source + length);
                }
                assert_eq!(end, pad + bytes as usize, "{cut:?}");
            }
        }
    }
}
