//! The spans of each thread, and of all of them the session that they belong to.
//!
//! A thread writes to its own lane, which nobody else locks but the end of the session, for a
//! moment. All lanes share the session's room and take it by the chunk, so that many threads keep
//! no more than was allowed. A lane outlives its thread: the session holds it too.
//!
//! One session at a time. A thread's lane of an earlier session is closed, and replaced when the
//! thread records next. In a forked child the locks may be held by threads that it does not have:
//! none is waited for longer than a moment.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use super::taken::{Thread, Trace};
use super::{Counter, Record, clock_ns};
use crate::error::{Error, ErrorCode, Result};
use crate::process;
use crate::sync::Relaxed;
use crate::sync::fixed::{AtomicU32, AtomicU64, Mutex};

/// The session under way; 0 when there is none.
static SESSION: AtomicU32 = AtomicU32::new(0);
/// Records that the session still takes, those in lanes' chunks left out.
static ROOM: AtomicUsize = AtomicUsize::new(0);
/// Records of the session that found no room.
static DROPPED: AtomicU64 = AtomicU64::new(0);
static RECORDER: Mutex<Recorder> = Mutex::new(Recorder { sessions: 0, session: None });

/// Room that a lane takes at a time: a thread that ends takes at most so much with it.
const CHUNK: usize = 64;
/// No lock here is held longer, but by threads that a forked child does not have.
const PATIENCE: Duration = Duration::from_millis(100);

struct Recorder {
    /// Sessions so far.
    sessions: u32,
    session: Option<Session>,
}

struct Session {
    number: u32,
    /// The process that it is of: a forked child has a copy.
    process: u32,
    started_ns: u64,
    lanes: Vec<Arc<Lane>>,
}

struct Lane {
    session: u32,
    /// Of its thread.
    name: String,
    buffer: Mutex<Buffer>,
}

struct Buffer {
    records: Vec<Record>,
    /// Taken from the session and not used yet.
    room: usize,
    closed: bool,
}

thread_local! {
    static LANE: RefCell<Option<Arc<Lane>>> = const { RefCell::new(None) };
}

/// Whether a trace is being recorded.
#[inline(always)]
#[must_use]
pub fn is_on() -> bool {
    SESSION.load(Relaxed) != 0
}

/// Records from now on what the library does in this process, on all threads and devices: at most
/// `capacity` spans, of about 80 bytes each. Memory is taken as it is needed.
///
/// # Errors
/// `AlreadyOpen` while a trace is being recorded: there is one at a time, and whoever started it
/// has it. `ProcessEnding`.
pub fn start(capacity: usize) -> Result<()> {
    process::check()?;
    let process = std::process::id();
    {
        let Some(mut recorder) = RECORDER.try_lock_for(PATIENCE) else {
            let text = "a trace cannot be recorded in a forked child of a process that records one";
            return Err(Error::new(ErrorCode::ProcessEnding, text));
        };
        if recorder.session.as_ref().is_some_and(|session| session.process == process) {
            let text = "a trace is being recorded already";
            return Err(Error::new(ErrorCode::AlreadyOpen, text));
        }
        // 0 means none.
        recorder.sessions = recorder.sessions.wrapping_add(1).max(1);
        let (number, started_ns) = (recorder.sessions, clock_ns());
        recorder.session = Some(Session { number, process, started_ns, lanes: Vec::new() });
        ROOM.store(capacity, Relaxed);
        DROPPED.store(0, Relaxed);
        SESSION.store(number, Relaxed);
    }
    super::value(Counter::Locked, None, super::LOCKED_BYTES.load(Relaxed));
    Ok(())
}

/// Ends the recording and gives out what was recorded: spans that ended until now. Spans that are
/// still open are not in it. Empty when nothing was started, in a forked child of a process that
/// had a device open, and at exit.
#[must_use]
pub fn stop() -> Trace {
    let process = std::process::id();
    if process::ending() {
        return Trace::empty(process);
    }
    let session = RECORDER.try_lock_for(PATIENCE).and_then(|mut recorder| {
        SESSION.store(0, Relaxed);
        recorder.session.take()
    });
    let Some(session) = session.filter(|session| session.process == process) else {
        return Trace::empty(process);
    };
    let stopped_ns = clock_ns();
    let threads = session.lanes.iter().filter_map(|lane| {
        // Nobody holds it for longer, but the exiting thread itself in the middle of a record.
        let mut buffer = lane.buffer.try_lock_for(PATIENCE)?;
        buffer.closed = true;
        let records = std::mem::take(&mut buffer.records);
        (!records.is_empty()).then(|| Thread { name: lane.name.clone(), records })
    });
    let threads = threads.collect();
    let dropped = DROPPED.load(Relaxed);
    Trace { process, started_ns: session.started_ns, stopped_ns, dropped, threads }
}

/// Makes the calling thread known to the session under way, if it is not, and returns its number.
/// `None` when there is none, or the thread cannot record (it is ending).
pub(super) fn enter() -> Option<u32> {
    let session = SESSION.load(Relaxed);
    if session == 0 {
        return None;
    }
    let entered = LANE.try_with(|own| {
        // Taken while this thread records already: by an allocator, say, that calls the library.
        let Ok(mut own) = own.try_borrow_mut() else { return false };
        if own.as_ref().is_none_or(|lane| lane.session != session) {
            *own = Lane::open(session);
        }
        own.is_some()
    });
    if entered.is_ok_and(|entered| entered) {
        return Some(session);
    }
    DROPPED.fetch_add(1, Relaxed);
    None
}

/// Keeps a record of the calling thread, if its session still goes on and has room.
pub(super) fn push(session: u32, record: Record) {
    // A thread whose locals are gone has counted what it drops when it tried to enter.
    let _gone = LANE.try_with(|own| {
        if let Ok(own) = own.try_borrow()
            && let Some(lane) = own.as_ref()
            && lane.session == session
        {
            lane.push(record);
        }
    });
}

/// Takes room for more records, up to a chunk.
fn take_room() -> usize {
    let taken = |room: usize| room.min(CHUNK);
    let take = |room: usize| (room > 0).then(|| room - taken(room));
    ROOM.fetch_update(Relaxed, Relaxed, take).map_or(0, taken)
}

impl Lane {
    /// A lane of the calling thread. Only where there is room left: threads that would keep
    /// nothing leave nothing behind.
    fn open(session: u32) -> Option<Arc<Self>> {
        let room = take_room();
        if room == 0 {
            return None;
        }
        let buffer = Mutex::new(Buffer { records: Vec::new(), room, closed: false });
        let lane = Arc::new(Self { session, name: thread_name(), buffer });
        let mut recorder = RECORDER.try_lock_for(PATIENCE)?;
        let current = recorder.session.as_mut().filter(|current| current.number == session)?;
        current.lanes.push(Arc::clone(&lane));
        Some(lane)
    }

    fn push(&self, record: Record) {
        // Only the end of the session locks it too: what comes then comes too late.
        let Some(mut buffer) = self.buffer.try_lock() else { return };
        if buffer.closed {
            return;
        }
        if buffer.room == 0 {
            buffer.room = take_room();
        }
        match buffer.room.checked_sub(1) {
            Some(room) => {
                buffer.room = room;
                buffer.records.push(record);
            }
            None => {
                DROPPED.fetch_add(1, Relaxed);
            }
        }
    }
}

/// Rust's name of the thread, or that of the operating system for a thread of another language.
fn thread_name() -> String {
    if let Some(name) = std::thread::current().name() {
        return name.to_owned();
    }
    let known = std::fs::read("/proc/thread-self/comm").unwrap_or_default();
    let known = String::from_utf8_lossy(&known).trim().to_owned();
    if known.is_empty() { "thread".to_owned() } else { known }
}
