//! The housekeeping thread: notices what other programs take while this one makes no calls.
//!
//! Every 25 ms it does what [`Runtime::refresh`](super::Runtime::refresh) does, and nothing more
//! often. It never waits inside the driver, which would stop everybody's launches; its other waits
//! end when it is stopped, when the runtime's waits are cancelled, and when the process ends. It
//! keeps nothing alive: whoever stops it waits for its end, and only then may the runtime close.

use std::mem::ManuallyDrop;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::{Error, ErrorCode, Result};
use crate::memory::pager::Pager;
use crate::options::Threads;
use crate::process;
use crate::sync::wait::set_wait_check;
use crate::sync::{Acquire, AtomicBool, Mutex, Release};

/// Time between two looks.
const PERIOD: Duration = Duration::from_millis(25);

/// The thread's name, as the operating system shows it.
const NAME: &str = "vbar pressure";

/// The thread of one runtime, when it has one.
#[derive(Default)]
pub(super) struct Housekeeping {
    thread: Mutex<Option<Running>>,
}

struct Running {
    stop: Arc<AtomicBool>,
    /// Never detached by a drop: in a forked child there is no such thread.
    handle: ManuallyDrop<JoinHandle<()>>,
}

impl Housekeeping {
    /// Starts the thread, unless it runs.
    pub(super) fn start(&self, pager: &Arc<Pager>) -> Result<()> {
        let mut thread = self.thread.lock();
        if let Some(ended) = thread.take_if(|running| running.handle.is_finished()) {
            let _ = ManuallyDrop::into_inner(ended.handle).join();
        }
        if thread.is_some() {
            return Ok(());
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (pager, stopped) = (Arc::downgrade(pager), Arc::clone(&stop));
        let handle = process::spawn(NAME, move || keep_house(&pager, &stopped))
            .map_err(|error| Error::io(format_args!("the thread '{NAME}'"), &error))?;
        *thread = Some(Running { stop, handle: ManuallyDrop::new(handle) });
        Ok(())
    }

    /// Stops the thread and waits for its end, a few milliseconds.
    pub(super) fn stop(&self) {
        // A forked child has no such thread, and a copy of a lock that nobody may ever release. At
        // exit it ends by itself, and calls nothing any more.
        if process::ending() {
            return;
        }
        let running = self.thread.lock().take();
        let Some(Running { stop, handle }) = running else { return };
        let handle = ManuallyDrop::into_inner(handle);
        stop.store(true, Release);
        handle.thread().unpark();
        // On the thread itself when what it called dropped the last runtime: it ends after this.
        let own = handle.thread().id() == std::thread::current().id();
        if !own && handle.join().is_err() {
            log::error!("the thread '{NAME}' has panicked");
        }
    }

    pub(super) fn threads(&self) -> Threads {
        let runs = !process::ending() && self.thread.lock().is_some();
        if runs { Threads::On } else { Threads::Off }
    }
}

fn keep_house(pager: &Weak<Pager>, stop: &Arc<AtomicBool>) {
    let asked = Arc::clone(stop);
    set_wait_check(Some(Box::new(move || match asked.load(Acquire) || process::ending() {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    })));
    let mut told = Vec::new();
    while !stop.load(Acquire) {
        std::thread::park_timeout(PERIOD);
        if stop.load(Acquire) || look_safely(pager, &mut told).is_break() {
            return;
        }
    }
}

/// One look, whatever panics in it: the logger is the program's, for one.
fn look_safely(pager: &Weak<Pager>, told: &mut Vec<ErrorCode>) -> ControlFlow<()> {
    let looked = catch_unwind(AssertUnwindSafe(|| look(pager, told)));
    looked.unwrap_or_else(|_| {
        let text = "pressure was not noticed this time: a panic";
        let error = Error::new(ErrorCode::Internal, text);
        let _ = catch_unwind(AssertUnwindSafe(|| tell(&error, told)));
        ControlFlow::Continue(())
    })
}

/// Breaks when there is nothing left to look after.
fn look(pager: &Weak<Pager>, told: &mut Vec<ErrorCode>) -> ControlFlow<()> {
    let Some(_work) = process::work() else { return ControlFlow::Break(()) };
    let Some(pager) = pager.upgrade() else { return ControlFlow::Break(()) };
    let looked = pager.relieve().and(pager.housekeep_host());
    let Err(error) = looked else { return ControlFlow::Continue(()) };
    match error.code() {
        ErrorCode::DeviceLost | ErrorCode::ProcessEnding => return ControlFlow::Break(()),
        // The program's wish, and work that takes its time.
        ErrorCode::Cancelled | ErrorCode::TimedOut => {}
        _ => {
            let doing = format!("device {}: pressure was not noticed", pager.device.ordinal);
            tell(&error.context(doing), told);
        }
    }
    ControlFlow::Continue(())
}

/// Each kind of error is told once: it may come every 25 ms.
fn tell(error: &Error, told: &mut Vec<ErrorCode>) {
    if !told.contains(&error.code()) {
        told.push(error.code());
        log::error!("{error}; not told again");
    }
}
