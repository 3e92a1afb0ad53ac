//! Many seeds on two threads, the first that fails made small.

use std::cell::RefCell;
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use crate::shrink::shrink;
use crate::steps_of;
use crate::totals::Totals;
use crate::trace::Trace;
use crate::world::World;

/// Seeds of an ordinary run.
pub(crate) const SEEDS: u64 = 4000;
/// Traces that are tried to make one shorter.
const TRIES: u32 = 3000;
/// A trace takes milliseconds: one that takes so long hangs.
const HANGS: Duration = Duration::from_secs(120);
const THREADS: usize = 2;

thread_local! {
    /// Where and why a trace of this thread failed; the hook puts it there.
    static FAILURE: RefCell<Option<Failure>> = const { RefCell::new(None) };
    /// Whether panics of this thread are noted.
    static NOTED: RefCell<bool> = const { RefCell::new(false) };
}

/// Where and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Failure {
    place: String,
    text: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.place, self.text)
    }
}

/// A seed that failed, and its shortest trace.
pub(crate) struct Failed {
    pub(crate) seed: u64,
    pub(crate) failure: Failure,
    pub(crate) trace: Trace,
}

fn note_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if std::thread::current().name() != Some(NAME) && !NOTED.with_borrow(|noted| *noted) {
                return usual(info);
            }
            let place = info.location().map_or_else(String::new, ToString::to_string);
            let text = info.payload_as_str().unwrap_or("a panic").to_owned();
            FAILURE.with_borrow_mut(|failure| {
                failure.get_or_insert(Failure { place, text });
            });
        }));
    });
}

const NAME: &str = "a step";

/// Runs a trace; what failed, if something did.
pub(crate) fn attempt(trace: &Trace) -> Result<Totals, Failure> {
    note_panics();
    NOTED.set(true);
    FAILURE.set(None);
    let trace = Arc::new(trace.clone());
    let run = || {
        let mut world = World::new(Arc::clone(&trace));
        let ran = std::panic::catch_unwind(AssertUnwindSafe(|| world.run()));
        if let Err(panic) = ran {
            // What closing it says now is of no interest.
            let close = AssertUnwindSafe(|| {
                world.sim.heal();
                world.release_streams();
                drop(world);
            });
            let _ = std::panic::catch_unwind(close);
            std::panic::resume_unwind(panic);
        }
        world.finish()
    };
    let done = std::panic::catch_unwind(AssertUnwindSafe(run));
    NOTED.set(false);
    done.map_err(|_| {
        let unknown = Failure { place: String::new(), text: "a thread's step".to_owned() };
        FAILURE.take().unwrap_or(unknown)
    })
}

/// Runs seeds until one fails, for `seconds` at most.
pub(crate) fn sweep(seeds: Range<u64>, seconds: Option<u64>) -> (Totals, Option<Failed>) {
    let next = AtomicU64::new(seeds.start);
    let start = Instant::now();
    let is_over = || seconds.is_some_and(|seconds| start.elapsed().as_secs() >= seconds);
    let totals = Mutex::new(Totals::default());
    let failed: Mutex<Option<(u64, Failure)>> = Mutex::new(None);
    let working = [const { Mutex::new(None) }; THREADS];
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for working in &working {
            scope.spawn(|| {
                while failed.lock().unwrap().is_none() && !is_over() {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    *working.lock().unwrap() = Some((seed, Instant::now()));
                    match attempt(&Trace::draw(seed, steps_of(seed))) {
                        Ok(more) => totals.lock().unwrap().add(more),
                        Err(failure) => {
                            let mut failed = failed.lock().unwrap();
                            if failed.as_ref().is_none_or(|(other, _)| seed < *other) {
                                *failed = Some((seed, failure));
                            }
                        }
                    }
                    *working.lock().unwrap() = None;
                }
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        while done.load(Ordering::Relaxed) < THREADS as u64 {
            std::thread::sleep(Duration::from_millis(20));
            working.iter().for_each(look_for_hang);
        }
    });
    let mut totals = totals.into_inner().unwrap();
    let failed = failed.into_inner().unwrap().map(|(seed, failure)| {
        totals.violations += 1;
        let fails =
            |trace: &Trace| attempt(trace).err().is_some_and(|other| other.place == failure.place);
        let trace = shrink(Trace::draw(seed, steps_of(seed)), TRIES, fails);
        Failed { seed, failure, trace }
    });
    (totals, failed)
}

/// A panic cannot end a thread that hangs.
fn look_for_hang(working: &Mutex<Option<(u64, Instant)>>) {
    if let Some((seed, since)) = *working.lock().unwrap()
        && since.elapsed() > HANGS
    {
        eprintln!("seed {seed} hangs: VBAR_SIM_SEED={seed} runs it alone");
        std::process::abort();
    }
}
