//! The streaming engine: brings pages in before the program asks for them.
//!
//! One thread a device. It is told of every fault and unpin of bound VBARs while these exceed the
//! budget, learns their order (`model/schedule`), decides which pages stay (`model/placement`), and
//! fetches what comes next through the pager, as far as there are frames. It makes no promise: a
//! fault that comes before its pages helps itself, and whatever the engine does wrong costs time
//! and no byte. It keeps nothing alive: whoever stops it waits for its end.

mod course;
mod notes;
mod plan;
mod runner;
mod samples;

use std::mem::ManuallyDrop;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::{Error, ErrorCode, Result};
use crate::memory::pager::{Follow, Pager};
use crate::model::schedule::Span;
use crate::process;
use crate::sync::Mutex;
use crate::sync::device::Device;
use crate::sync::wait::set_wait_check;
use crate::units::Stream;

use notes::{Closed, Note, Notes, Taken};
use runner::Runner;
use samples::Samples;

pub use runner::EngineNumbers;

/// The thread's name, as the operating system shows it.
const NAME: &str = "vbar engine";

/// The engine of one runtime, whether its thread runs or not.
pub struct Engine {
    work: Arc<Work>,
    thread: Mutex<Option<ManuallyDrop<JoinHandle<()>>>>,
}

/// What the thread works on.
#[derive(Default)]
struct Work {
    notes: Notes,
    runner: Mutex<Runner>,
    samples: Samples,
    numbers: Mutex<EngineNumbers>,
}

impl Engine {
    /// An engine without a thread: it takes no notes.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self { work: Arc::default(), thread: Mutex::new(None) })
    }

    /// Starts the thread, unless it runs.
    ///
    /// # Errors
    /// `Io` when the operating system gives no thread.
    pub fn start(&self, pager: &Arc<Pager>) -> Result<()> {
        let mut thread = self.thread.lock();
        if let Some(ended) = thread.take_if(|handle| handle.is_finished()) {
            let _ = ManuallyDrop::into_inner(ended).join();
        }
        if thread.is_some() {
            return Ok(());
        }
        self.work.notes.open();
        let (work, pager) = (Arc::clone(&self.work), Arc::downgrade(pager));
        let spawned = process::spawn(NAME, move || run(&pager, &work));
        let handle = spawned.map_err(|error| {
            let _ = self.work.notes.close();
            Error::io(format_args!("the thread '{NAME}'"), &error)
        })?;
        *thread = Some(ManuallyDrop::new(handle));
        Ok(())
    }

    /// Ends the engine, its thread too where it has one, and waits for that. Plans are void
    /// afterwards.
    pub fn stop(&self, pager: &Pager) {
        // A forked child has no such thread; at exit it ends by itself.
        if process::ending() {
            return;
        }
        let handle = self.thread.lock().take();
        if self.work.notes.close() == Closed::Before {
            return;
        }
        if let Some(handle) = handle.map(ManuallyDrop::into_inner) {
            // On the thread itself when what it did dropped the last runtime: it ends after this.
            let own = handle.thread().id() == std::thread::current().id();
            if !own && handle.join().is_err() {
                log::error!("the thread '{NAME}' has panicked");
            }
        }
        self.work.end(pager);
    }

    /// Takes notes without a thread: they are worked on by [`Engine::drive`] only. For tests that
    /// say when the engine runs.
    pub fn open_by_hand(&self) {
        self.work.notes.open();
    }

    /// Works on the notes that there are, on the calling thread, until nothing more can be done.
    ///
    /// # Errors
    /// As [`Pager::fetch`].
    pub fn drive(&self, pager: &Pager) -> Result<()> {
        while let Some(taken) = self.work.notes.take(Duration::ZERO) {
            let pause = self.work.step(pager, taken)?;
            if !pause.is_zero() {
                break;
            }
        }
        Ok(())
    }

    /// The program says in which order it will fault, again and again.
    pub fn hint(&self, order: Vec<Vec<Span>>) {
        self.work.notes.add(Note::Hint(order));
    }

    /// The program will want a span soon, once.
    pub fn prefetch(&self, span: Span) {
        self.work.notes.add(Note::Prefetch(span));
    }

    /// What the engine knows and does.
    #[must_use]
    pub fn numbers(&self) -> EngineNumbers {
        *self.work.numbers.lock()
    }
}

impl Follow for Engine {
    fn faulted(&self, device: &Device, spans: &[Span], stream: Stream) {
        if self.work.notes.is_closed() {
            return;
        }
        self.work.samples.begin(device, spans, stream);
        self.work.notes.add(Note::Faulted(spans.to_vec()));
    }

    fn unpinned(&self, device: &Device, spans: &[Span], stream: Stream) {
        self.work.samples.end(device, spans, stream);
        self.work.notes.add_all(spans.iter().map(|span| Note::Unpinned(*span)));
    }

    fn closed(&self, bar: u32) {
        self.work.notes.add(Note::Closed(bar));
    }
}

impl Work {
    /// Nobody works on from here.
    fn end(&self, pager: &Pager) {
        // Not free where a runtime ends on the engine's own thread, which then plans no more.
        if let Some(mut runner) = self.runner.try_lock() {
            runner.restart(pager);
        }
        self.samples.close(pager);
    }

    /// Works on what was taken. Returns how long to wait for more.
    fn step(&self, pager: &Pager, taken: Taken) -> Result<Duration> {
        let mut runner = self.runner.lock();
        for sample in self.samples.take(pager) {
            runner.sample(&sample);
        }
        let done = runner.work(pager, taken, &self.notes);
        self.samples.want(runner.wants_samples());
        let recovered = done.or_else(|error| match error.code() {
            ErrorCode::DeviceLost | ErrorCode::ProcessEnding => Err(error),
            _ => {
                runner.tell(&error);
                runner.restart(pager);
                Ok(runner::PAUSE_MAX)
            }
        });
        *self.numbers.lock() = runner.numbers();
        recovered
    }
}

fn run(pager: &Weak<Pager>, work: &Arc<Work>) {
    let asked = Arc::clone(work);
    set_wait_check(Some(Box::new(move || match asked.notes.is_closed() || process::ending() {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    })));
    let mut pause = runner::PAUSE_MAX;
    while let Some(taken) = work.notes.take(pause) {
        let Some(_work) = process::work() else { return };
        let Some(pager) = pager.upgrade() else { return };
        // Whatever panics in it, the logger of the program for one.
        let done = catch_unwind(AssertUnwindSafe(|| work.step(&pager, taken)));
        match done {
            Ok(Ok(next)) => pause = next,
            Ok(Err(_)) => return,
            Err(_) => log::error!("the thread '{NAME}' has caught a panic"),
        }
    }
}
