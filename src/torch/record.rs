//! A record of what a program asks the allocator for, as a text that can be replayed.
//!
//! An event a line, a `#` begins a comment:
//!
//! ```text
//! malloc ID BYTES STREAM   as it was asked for, not rounded
//! record ID STREAM         the block is used on another stream too
//! free ID
//! ```
//!
//! An id names one block from its request to its free; streams are numbered as they appear, 0 is
//! the default one. Blocks that live when the record begins come first. A request is written when
//! it is served and a free before it is done, so that an address is never two blocks at a time.
//! While nothing is recorded, which is nearly always, a request and a free read one flag for it.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::Allocator;
use super::heap::Core;
use crate::error::{Error, ErrorCode, Result};
use crate::host::output;
use crate::process;
use crate::sync::{AtomicBool, Mutex, Relaxed, Release};
use crate::units::Stream;

/// Bytes that are written at a time.
const BUFFER_BYTES: usize = 1 << 20;

/// A record that is under way.
struct Open {
    path: PathBuf,
    file: BufWriter<File>,
    /// Ids of live blocks by their addresses.
    ids: HashMap<u64, u64>,
    /// Numbers of streams by their handles.
    streams: HashMap<Stream, usize>,
    next_id: u64,
    event_count: u64,
    /// What went wrong first: nothing is written after it.
    failed: Option<io::Error>,
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Recorder {
    is_on: AtomicBool,
    open: Mutex<Option<Open>>,
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // What the parent has not written yet is the parent's to write, to a file that both have.
        if process::is_forked() {
            std::mem::forget(self.open.get_mut().take());
        }
    }
}

/// A block that lives when a record begins.
pub(super) struct Living {
    pub(super) address: u64,
    pub(super) requested: u64,
    pub(super) stream: Stream,
    /// Streams that it was recorded for.
    pub(super) uses: Vec<Stream>,
}

impl Open {
    fn number(&mut self, stream: Stream) -> usize {
        if stream.is_default() {
            return 0;
        }
        let next = self.streams.len() + 1;
        *self.streams.entry(stream).or_insert(next)
    }

    fn write(&mut self, event: std::fmt::Arguments<'_>) {
        self.event_count += 1;
        if self.failed.is_none() {
            self.failed = self.file.write_fmt(format_args!("{event}\n")).err();
        }
    }

    fn malloc(&mut self, address: u64, bytes: u64, stream: Stream) {
        // One whose free began before the record did: the address is another block's by now.
        self.free(address);
        let (id, number) = (self.next_id, self.number(stream));
        self.next_id += 1;
        self.ids.insert(address, id);
        self.write(format_args!("malloc {id} {bytes} {number}"));
    }

    fn record(&mut self, address: u64, stream: Stream) {
        let Some(&id) = self.ids.get(&address) else { return };
        let number = self.number(stream);
        self.write(format_args!("record {id} {number}"));
    }

    /// An address of no block is nobody's, and in no record.
    fn free(&mut self, address: u64) {
        if let Some(id) = self.ids.remove(&address) {
            self.write(format_args!("free {id}"));
        }
    }
}

impl Recorder {
    #[inline(always)]
    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Relaxed)
    }

    #[cold]
    pub(super) fn malloc(&self, address: u64, bytes: u64, stream: Stream) {
        self.note(|open| open.malloc(address, bytes, stream));
    }

    #[cold]
    pub(super) fn free(&self, address: u64) {
        self.note(|open| open.free(address));
    }

    #[cold]
    pub(super) fn record(&self, address: u64, stream: Stream) {
        self.note(|open| open.record(address, stream));
    }

    fn note(&self, event: impl FnOnce(&mut Open)) {
        if let Some(open) = &mut *self.open.lock() {
            event(open);
        }
    }
}

impl Allocator {
    /// Writes what is asked for from now on to a file, which replaces what was at its path; the
    /// module's text says how. What lives now comes first. Requests for graph pools are written as
    /// any other, segments of callers that cache by themselves are not.
    ///
    /// # Errors
    /// `InvalidArgument` while a record is under way, `Io`, `ProcessEnding`.
    pub fn start_recording(&self, path: &Path) -> Result<()> {
        process::check()?;
        let mut place = self.recorder.open.lock();
        if let Some(open) = &*place {
            let text = format!("a record is under way, to {}", open.path.display());
            return Err(Error::new(ErrorCode::InvalidArgument, text));
        }
        let file = output::create(path).map_err(|error| Error::io(path.display(), &error))?;
        let mut open = Open {
            path: path.to_owned(),
            file: BufWriter::with_capacity(BUFFER_BYTES, file),
            ids: HashMap::new(),
            streams: HashMap::new(),
            next_id: 1,
            event_count: 0,
            failed: None,
        };
        // Before what lives is looked at: nothing may come between. Events wait for the lock.
        self.recorder.is_on.store(true, Release);
        for block in self.living() {
            open.malloc(block.address, block.requested, block.stream);
            for stream in block.uses {
                open.record(block.address, stream);
            }
        }
        *place = Some(open);
        Ok(())
    }

    /// Ends the record that is under way; all of it is in the file then. Returns how many events
    /// it has.
    ///
    /// # Errors
    /// `InvalidArgument` when there is none; `Io` when the file could not be written: it has what
    /// came before.
    pub fn stop_recording(&self) -> Result<u64> {
        process::check()?;
        let taken = {
            let mut place = self.recorder.open.lock();
            self.recorder.is_on.store(false, Release);
            place.take()
        };
        let Some(mut open) = taken else {
            return Err(Error::new(ErrorCode::InvalidArgument, "nothing is being recorded"));
        };
        let failed = open.failed.take().or_else(|| open.file.flush().err());
        match failed {
            Some(error) => Err(Error::io(open.path.display(), &error)),
            None => Ok(open.event_count),
        }
    }

    /// What lives now, in order of address.
    fn living(&self) -> Vec<Living> {
        let mut living = match &self.direct {
            Some(direct) => direct.living(),
            None => self.core.lock().living(),
        };
        living.iter_mut().for_each(|block| block.address += self.base);
        living.sort_unstable_by_key(|block| block.address);
        living
    }
}

impl Core {
    fn living(&self) -> Vec<Living> {
        let block = |offset: u64, requested: u64, heap: u32| {
            let uses = self.uses.get(&offset).into_iter().flatten();
            let uses = uses.map(|used| used.stream).filter(|stream| !stream.is_none()).collect();
            Living { address: offset, requested, stream: self.heap(heap).stream, uses }
        };
        let pieces = self.live.iter().filter(|(_, live)| live.sort != super::heap::Sort::Segment);
        let pieces = pieces.map(|(offset, live)| block(*offset, live.requested, live.heap));
        let slots = self.slabs.iter().flatten().flat_map(|slab| {
            let live = slab.live().filter(|offset| !self.pending.contains(*offset));
            live.map(|offset| block(offset, slab.requested(offset).unwrap_or(0), slab.heap))
        });
        pieces.chain(slots).collect()
    }
}
