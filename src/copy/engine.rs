//! The streaming engine: brings pages in before the program asks for them.
//!
//! One thread a device. It is told of every fault and unpin of bound VBARs while these exceed the
//! budget, learns their order (`model/schedule`), decides which pages stay (`model/placement`), and
//! fetches what comes next through the pager, as far as there are frames. On its thread it measures
//! the cycles, and corrects by them what was computed. It makes no promise: a fault that comes
//! before its pages helps itself, and whatever the engine does wrong costs time and no byte. It
//! keeps nothing alive: whoever stops it waits for its end.

mod course;
mod drift;
mod fewest;
mod meter;
mod notes;
mod plan;
mod position;
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
use crate::model::placement::PassMeasured;
use crate::model::schedule::Span;
use crate::process;
use crate::sync::Mutex;
use crate::sync::device::Device;
use crate::sync::wait::set_wait_check;
use crate::trace;
use crate::units::Stream;

use notes::{Note, Notes, Taken};
use runner::Runner;
use samples::{Sample, Samples, Wanted};

pub use runner::EngineNumbers;

/// The thread's name, as the operating system shows it.
const NAME: &str = "vbar engine";

/// The engine of one runtime, whether it runs or not.
#[derive(Default)]
pub struct Engine {
    running: Mutex<Option<Running>>,
    /// Of the one that ran last.
    numbers: Arc<Mutex<EngineNumbers>>,
}

/// An engine that runs. Whoever takes it out ends it: one that is started meanwhile is another one
/// and shares nothing with it.
struct Running {
    work: Arc<Work>,
    /// `None` where it is driven by hand. Never detached by a drop: a forked child has no such
    /// thread.
    thread: Option<ManuallyDrop<JoinHandle<()>>>,
}

/// What the thread works on.
#[derive(Default)]
struct Work {
    notes: Notes,
    runner: Mutex<Runner>,
    samples: Samples,
    time: Time,
    numbers: Arc<Mutex<EngineNumbers>>,
}

/// Where the engine has its times from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Time {
    /// The clock: what it measures changes what it does.
    Clock,
    /// Whoever drives it by hand tells it, or it has none: it does the same each time.
    #[default]
    Told,
}

impl Engine {
    /// An engine that does not run: it takes no notes.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Starts the thread, unless it runs.
    ///
    /// # Errors
    /// `Io` when the operating system gives no thread.
    pub fn start(&self, pager: &Arc<Pager>) -> Result<()> {
        let mut running = self.running.lock();
        let ended =
            |running: &Running| running.thread.as_ref().is_some_and(|thread| thread.is_finished());
        if let Some(ended) = running.take_if(|running| ended(running)) {
            ended.end(pager);
        }
        if running.is_some() {
            return Ok(());
        }
        let work = self.open(Time::Clock);
        let (for_thread, pager) = (Arc::clone(&work), Arc::downgrade(pager));
        let spawned = process::spawn(NAME, move || run(&pager, &for_thread));
        let handle =
            spawned.map_err(|error| Error::io(format_args!("the thread '{NAME}'"), &error))?;
        *running = Some(Running { work, thread: Some(ManuallyDrop::new(handle)) });
        Ok(())
    }

    /// Ends the engine, its thread too where it has one, and waits for that. Plans are void
    /// afterwards.
    pub fn stop(&self, pager: &Pager) {
        // A forked child has no such thread; at exit it ends by itself.
        if process::ending() {
            return;
        }
        let running = self.running.lock().take();
        // With no lock held: what the thread is in the middle of may take its time.
        if let Some(running) = running {
            running.end(pager);
        }
    }

    /// Takes notes without a thread: they are worked on by [`Engine::drive`] only. For tests that
    /// say when the engine runs.
    pub fn open_by_hand(&self) {
        let work = self.open(Time::Told);
        self.running.lock().get_or_insert(Running { work, thread: None });
    }

    fn open(&self, time: Time) -> Arc<Work> {
        let numbers = Arc::clone(&self.numbers);
        let work = Arc::new(Work { numbers, time, ..Work::default() });
        work.notes.open();
        work
    }

    /// Works on the notes that there are, on the calling thread, until nothing more can be done.
    ///
    /// # Errors
    /// As [`Pager::fetch`].
    pub fn drive(&self, pager: &Pager) -> Result<()> {
        let Some(work) = self.work() else { return Ok(()) };
        while let Some(taken) = work.notes.take(Duration::ZERO) {
            let pause = work.step(pager, taken)?;
            if !pause.is_zero() {
                break;
            }
        }
        Ok(())
    }

    /// A cycle came to this: for tests that drive it by hand, whose engine has no clock.
    pub fn tell_cycle(&self, pager: &Pager, pass: PassMeasured) {
        let Some(work) = self.work() else { return };
        let mut runner = work.runner.lock();
        runner.observe(pager, pass);
        *work.numbers.lock() = runner.numbers();
    }

    /// The device took so long from a fault to its unpin: for the same tests.
    pub fn tell_compute(&self, spans: Vec<Span>, compute_ns: u64) {
        let Some(work) = self.work() else { return };
        work.runner.lock().sample(&Sample { spans, compute_ns });
    }

    /// The program says in which order it will fault, again and again.
    pub fn hint(&self, order: Vec<Vec<Span>>) {
        self.note(|| Note::Hint(order));
    }

    /// The program will want a span soon, once.
    pub fn prefetch(&self, span: Span) {
        self.note(|| Note::Prefetch(span));
    }

    /// What the engine knows and does.
    #[must_use]
    pub fn numbers(&self) -> EngineNumbers {
        // In a forked child the lock may be held by a thread that is not there.
        if process::ending() {
            return EngineNumbers::default();
        }
        *self.numbers.lock()
    }

    fn work(&self) -> Option<Arc<Work>> {
        if process::ending() {
            return None;
        }
        Some(Arc::clone(&self.running.lock().as_ref()?.work))
    }

    fn note(&self, note: impl FnOnce() -> Note) {
        if let Some(work) = self.work() {
            work.notes.add(note());
        }
    }
}

impl Running {
    fn end(self, pager: &Pager) {
        self.work.notes.close();
        if let Some(handle) = self.thread.map(ManuallyDrop::into_inner) {
            // On the thread itself when what it did dropped the last runtime: it ends after this.
            let own = handle.thread().id() == std::thread::current().id();
            if !own && handle.join().is_err() {
                log::error!("the thread '{NAME}' has panicked");
            }
        }
        self.work.end(pager);
    }
}

impl Follow for Engine {
    fn faulted(&self, device: &Device, spans: &[Span], stream: Stream) {
        if let Some(work) = self.work() {
            work.samples.begin(device, spans, stream);
            let at_ns = (work.time == Time::Clock).then(trace::clock_ns);
            work.notes.add(Note::Faulted { spans: spans.to_vec(), at_ns });
        }
    }

    fn unpinned(&self, device: &Device, spans: &[Span], stream: Stream) {
        if let Some(work) = self.work() {
            work.samples.end(device, spans, stream);
            work.notes.add_all(spans.iter().map(|span| Note::Unpinned(*span)));
        }
    }

    fn closed(&self, bar: u32) {
        self.note(|| Note::Closed(bar));
    }

    fn gave_back(&self) {
        self.note(|| Note::GaveBack);
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
        self.samples.want(match runner.wants_samples() {
            Wanted::Some if self.time == Time::Told => Wanted::None,
            wanted => wanted,
        });
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
