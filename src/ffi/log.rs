//! Messages of the library, for a callback or for who polls.
//!
//! A message is queued where it is made, wherever that is, and delivered at the end of a call of
//! the C ABI, with no lock held: a callback may call the library. Each place in the source may say
//! ten things a second; what is left out is counted in its next message. The queue is bounded.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{CString, c_char, c_void};
use std::time::{Duration, Instant};

use ::log::{Level, LevelFilter, Log, Metadata, Record};

use super::call::{call, invalid, keeping_message};
use super::status::VbarStatus;
use super::value::{Out, OutArray, Plain};
use crate::error::{Error, ErrorCode, Result};
use crate::process::{ending, entering};
use crate::sync::{AcqRel, AtomicBool, Mutex, Ordering, Relaxed, Release};

/// How serious a message is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarLogLevel {
    /// No messages.
    Off = 0,
    /// Something failed.
    Error = 1,
    /// Something is not as it should be.
    Warn = 2,
    /// What was opened, and how.
    Info = 3,
    /// For debugging.
    Debug = 4,
    /// For debugging, a lot.
    Trace = 5,
}

/// Takes one message: its level (a `VbarLogLevel`), a C string that lives during the call, and the
/// pointer given with the callback. Called by whichever thread is about to leave a call of the
/// library, one at a time, with no lock held. What it calls leaves that call's status and message
/// as they are. It must not throw or jump out.
pub type VbarLogCallback =
    Option<unsafe extern "C" fn(level: u32, message: *const c_char, user: *mut c_void)>;

// SAFETY: a byte.
unsafe impl Plain for c_char {}
// SAFETY: an integer.
unsafe impl Plain for usize {}

/// Messages kept until somebody takes them.
const QUEUED_MAX: usize = 256;
/// Messages of one place in the source in one window.
const SAID_MAX: u32 = 10;
const WINDOW: Duration = Duration::from_secs(1);

/// A callback with its pointer, which its owner vouches for.
#[derive(Clone, Copy)]
struct Callback {
    function: unsafe extern "C" fn(u32, *const c_char, *mut c_void),
    user: *mut c_void,
}

// SAFETY: the pointer is only handed back to its callback; whoever set it promised that any thread
// may do that.
unsafe impl Send for Callback {}

#[derive(Default)]
struct Queue {
    messages: VecDeque<(u32, String)>,
    lost: u64,
    places: HashMap<(&'static str, u32), Place>,
    callback: Option<Callback>,
}

/// How much one place in the source has said lately.
struct Place {
    since: Instant,
    said: u32,
    left_out: u64,
}

struct Logger {
    queue: Mutex<Option<Queue>>,
    /// Whether there is a message and a callback for it: all that a quick call reads.
    pending: AtomicBool,
    /// Whether a thread is delivering.
    delivering: AtomicBool,
}

static LOGGER: Logger = Logger::new();

thread_local!(static DELIVERS: Cell<bool> = const { Cell::new(false) });

/// Has messages of `level` (a `VbarLogLevel`) and more serious ones kept for a callback or
/// `vbar_log_poll`; 0 ends that. The default is 0. Statuses: the common ones, `UNSUPPORTED` where
/// the program has a Rust logger. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_log_set_level(level: u32) -> VbarStatus {
    call(|| {
        let filter = match level {
            0 => LevelFilter::Off,
            1 => LevelFilter::Error,
            2 => LevelFilter::Warn,
            3 => LevelFilter::Info,
            4 => LevelFilter::Debug,
            5 => LevelFilter::Trace,
            _ => return Err(invalid(format!("there is no log level {level}"))),
        };
        install()?;
        ::log::set_max_level(filter);
        Ok(())
    })
}

/// Sets who takes messages; NULL: nobody, they wait for `vbar_log_poll`. When this returns, the
/// callback before is not running on another thread and will not be called again. Statuses: those
/// of `vbar_log_set_level`. Thread-safe.
///
/// # Safety
/// Any thread may call `callback` with `user` until another one is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_log_set_callback(
    callback: VbarLogCallback,
    user: *mut c_void,
) -> VbarStatus {
    call(|| {
        install()?;
        let callback = callback.map(|function| Callback { function, user });
        {
            let _entering = entering();
            let mut queue = LOGGER.queue.lock();
            let queue = queue.get_or_insert_default();
            queue.callback = callback;
            LOGGER.pending.store(callback.is_some() && !queue.messages.is_empty(), Release);
        }
        // From inside a callback the one before is this one.
        while LOGGER.delivering.load(Ordering::Acquire) && !DELIVERS.get() {
            std::thread::yield_now();
        }
        Ok(())
    })
}

/// Takes the oldest message: its level, 0 when there is none, and its length in bytes without the
/// closing zero; it is cut off at `capacity` bytes, the closing zero included. Statuses: the common
/// ones. Thread-safe.
///
/// # Safety
/// `message` has room for `capacity` bytes; the other outputs are NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_log_poll(
    message: *mut c_char,
    capacity: usize,
    level: *mut u32,
    message_bytes: *mut usize,
) -> VbarStatus {
    call(|| {
        let outputs = (Out::new(level)?, Out::new(message_bytes)?);
        let place = OutArray::new(message, capacity)?;
        if capacity == 0 {
            return Err(invalid("a message needs room"));
        }
        let (level, text) = next_message().unwrap_or_default();
        let cut = text.floor_char_boundary(capacity - 1);
        place.write(text[..cut].bytes().chain([0]).map(|byte| byte as c_char));
        outputs.0.write(level);
        outputs.1.write(text.len());
        Ok(())
    })
}

fn next_message() -> Option<(u32, String)> {
    let _entering = entering();
    LOGGER.queue.lock().as_mut()?.next_message()
}

/// Makes the C ABI's logger the process's, once.
fn install() -> Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let _entering = entering();
    let mut installed = INSTALLED.lock();
    if !*installed {
        ::log::set_logger(&LOGGER).map_err(|_| {
            let text = "the program has a Rust logger, which takes the messages";
            Error::new(ErrorCode::Unsupported, text)
        })?;
        *installed = true;
    }
    Ok(())
}

/// Delivers what is queued to the callback, if there is one; nothing where one is running already.
#[inline]
pub(super) fn deliver() {
    // After a fork the queue's lock may be held for ever; at exit the callback's owner may be gone.
    if LOGGER.pending.load(Relaxed) && !ending() {
        LOGGER.deliver();
    }
}

impl Logger {
    const fn new() -> Self {
        let (pending, delivering) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { queue: Mutex::new(None), pending, delivering }
    }

    #[cold]
    fn deliver(&self) {
        // A child that is forked meanwhile would wait for its end for ever.
        let _entering = entering();
        // What is queued between the last look and the end of the delivery is left to it by who
        // queued it, so it looks again.
        while self.pending.load(Relaxed) && !ending() {
            // Exchanged at both ends: who finds a delivery under way is seen by its end, and what
            // was queued before with it.
            if self.delivering.swap(true, AcqRel) {
                return;
            }
            DELIVERS.set(true);
            // The caller asks for the message of its own call, not of a callback's.
            keeping_message(|| self.deliver_queued());
            DELIVERS.set(false);
            self.delivering.swap(false, AcqRel);
        }
    }

    fn deliver_queued(&self) {
        // A callback may fork.
        while !ending()
            && let Some((callback, level, text)) = self.next_delivery()
        {
            let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
            // SAFETY: whoever set the callback promised that any thread may call it so.
            unsafe { (callback.function)(level, text.as_ptr(), callback.user) };
        }
    }

    /// Under one lock, so that a message that comes meanwhile is seen by this delivery or the next.
    fn next_delivery(&self) -> Option<(Callback, u32, String)> {
        let mut queue = self.queue.lock();
        let next = queue.as_mut().and_then(|queue| {
            let callback = queue.callback?;
            queue.next_message().map(|(level, text)| (callback, level, text))
        });
        if next.is_none() {
            self.pending.store(false, Release);
        }
        next
    }
}

impl Queue {
    fn next_message(&mut self) -> Option<(u32, String)> {
        if self.lost > 0 {
            let lost = std::mem::take(&mut self.lost);
            return Some((Level::Warn as u32, format!("{lost} messages were lost")));
        }
        self.messages.pop_front()
    }

    /// Queues a message unless its place has said enough lately.
    fn push(&mut self, record: &Record<'_>, now: Instant) {
        let key = (record.file_static().unwrap_or("?"), record.line().unwrap_or(0));
        let fresh = Place { since: now, said: 0, left_out: 0 };
        let place = self.places.entry(key).or_insert(fresh);
        if now.duration_since(place.since) >= WINDOW {
            (place.since, place.said) = (now, 0);
        }
        if place.said == SAID_MAX {
            place.left_out += 1;
            return;
        }
        place.said += 1;
        let mut text = record.args().to_string();
        if place.left_out > 0 {
            text +=
                &format!(" ({} more like it were left out)", std::mem::take(&mut place.left_out));
        }
        if self.messages.len() == QUEUED_MAX {
            self.messages.pop_front();
            self.lost += 1;
        }
        self.messages.push_back((record.level() as u32, text));
    }
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("vbar")
    }

    fn log(&self, record: &Record<'_>) {
        // In a forked child the queue's lock may be held, or waited for, by nobody who is there.
        if !self.enabled(record.metadata()) || ending() {
            return;
        }
        let _entering = entering();
        let mut queue = self.queue.lock();
        let queue = queue.get_or_insert_default();
        queue.push(record, Instant::now());
        self.pending.store(queue.callback.is_some(), Release);
    }

    fn flush(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, AtomicUsize};

    /// Two threads queue and deliver at almost the same time, each a little before the other in
    /// turn. That one queues as the other ends its delivery is rare all the same.
    #[test]
    fn no_message_waits_for_the_next_call() {
        const ROUNDS: u32 = 20_000;
        static LOGGER: Logger = Logger::new();
        static ARRIVED: AtomicU32 = AtomicU32::new(0);
        static LEFT: AtomicUsize = AtomicUsize::new(0);
        unsafe extern "C" fn nothing(_: u32, _: *const c_char, _: *mut c_void) {}
        fn meet(times: u32) {
            ARRIVED.fetch_add(1, AcqRel);
            while ARRIVED.load(Ordering::Acquire) < 2 * times {
                std::thread::yield_now();
            }
        }
        fn say(late: impl Fn(u32) -> u32) {
            for round in 0..ROUNDS {
                let text = format_args!("one");
                let record = Record::builder().args(text).target("vbar").line(Some(round)).build();
                meet(2 * round + 1);
                (0..late(round)).for_each(|_| std::hint::spin_loop());
                LOGGER.log(&record);
                LOGGER.deliver();
                meet(2 * round + 2);
                let left = LOGGER.queue.lock().as_ref().map_or(0, |queue| queue.messages.len());
                LEFT.fetch_add(left, Relaxed);
            }
        }
        let callback = Callback { function: nothing, user: std::ptr::null_mut() };
        LOGGER.queue.lock().get_or_insert_default().callback = Some(callback);
        std::thread::scope(|scope| {
            scope.spawn(|| say(|round| round % 101));
            scope.spawn(|| say(|round| round % 103));
        });
        assert_eq!(LEFT.load(Relaxed), 0);
    }

    #[test]
    fn a_place_that_says_too_much_is_left_out_and_counted() {
        let mut queue = Queue::default();
        let start = Instant::now();
        let say = |queue: &mut Queue, line, text: &str, at| {
            let arguments = format_args!("{text}");
            let record = Record::builder()
                .args(arguments)
                .level(Level::Warn)
                .file_static(Some("a.rs"))
                .line(Some(line))
                .build();
            queue.push(&record, at);
        };
        for number in 0..25 {
            say(&mut queue, 1, &format!("first {number}"), start);
        }
        say(&mut queue, 2, "second", start);
        assert_eq!(queue.messages.len(), 11);
        say(&mut queue, 1, "later", start + WINDOW);
        let last = queue.messages.back().unwrap();
        assert_eq!(*last, (2, "later (15 more like it were left out)".to_owned()));
    }
}
