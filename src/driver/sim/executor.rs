//! Who runs the work: a thread a stream, or one operation at a time in a seeded order.
//!
//! Without a seed each stream has a worker thread, started with its first work. With one, work
//! runs inside the calls that the program makes: enqueuing and querying run a few operations,
//! waiting runs as many as it takes, always the head of a stream drawn from the seed. A program of
//! one thread then gets the same interleaving from the same seed. A program that makes no calls for
//! a while is helped on by an idle thread, as a device would go on by itself.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Core;
use super::random::Random;
use super::stream::{LOOK, Operation, StreamState, Work};
use super::verb::Verb;
use crate::driver::{DriverCode, DriverResult, KernelCall};

/// What a step of the seeded executor did.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// An operation ran, or began to.
    Ran,
    /// There is none that may run now.
    Nothing,
}

thread_local! {
    /// Whether this is a thread of a simulated device.
    static OURS: Cell<bool> = const { Cell::new(false) };
}

/// A program that has made no call for this long is helped on.
const IDLE: Duration = Duration::from_millis(20);

impl Core {
    /// How long an operation takes before it touches memory.
    fn delay_of(&self, work: &Work) -> Duration {
        let mut delay = match work {
            Work::Kernel(
                KernelCall::Checksum { delay_nanos, .. } | KernelCall::Pattern { delay_nanos, .. },
            ) => Duration::from_nanos(*delay_nanos),
            Work::CopyIn { bytes, .. } | Work::CopyOut { bytes, .. } if self.seeded.is_some() => {
                self.transfer_time(*bytes)
            }
            _ => Duration::ZERO,
        };
        let latency = u64::try_from(self.options.latency.as_nanos()).unwrap_or(u64::MAX);
        if latency > 0 {
            delay += Duration::from_nanos(self.random.lock().below(latency + 1));
        }
        delay
    }

    /// How long a copy of `bytes` takes at the set bandwidth.
    pub(super) fn transfer_time(&self, bytes: u64) -> Duration {
        self.options.bandwidth.map_or(Duration::ZERO, |bandwidth| {
            Duration::from_secs_f64(bytes as f64 / bandwidth as f64)
        })
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Sleeps, unless the device goes away meanwhile.
    pub(super) fn sleep(&self, time: Duration) {
        let end = Instant::now() + time;
        while !self.is_stopping() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(LOOK));
        }
    }

    /// Waits until the operation has finished, or the device goes away.
    pub(super) fn wait_for(&self, stream: &Arc<StreamState>, number: u64) {
        while stream.completed() < number && !self.is_stopping() {
            if self.seeded.is_none() {
                stream.wait_briefly(number, LOOK);
            } else if self.step() == Step::Nothing {
                stream.wait_briefly(number, Duration::from_micros(100));
            }
        }
    }

    /// A thread for the work of a stream, unless it has one. Asked for before anything is enqueued:
    /// later there is no way back.
    ///
    /// # Errors
    /// `OPERATING_SYSTEM`, as of a driver that is given none.
    pub(super) fn ensure_worker(
        self: &Arc<Self>,
        stream: &Arc<StreamState>,
        verb: Verb,
    ) -> DriverResult<()> {
        if self.seeded.is_some() {
            return Ok(());
        }
        let mut queue = stream.queue.lock();
        if !queue.has_worker {
            let started = self.start_worker(stream.clone());
            started.map_err(|_| verb.error(DriverCode::OPERATING_SYSTEM))?;
            queue.has_worker = true;
        }
        Ok(())
    }

    pub(super) fn start_worker(self: &Arc<Self>, stream: Arc<StreamState>) -> io::Result<()> {
        let name = format!("sim stream {}", stream.id);
        self.start_thread(name, move |core| {
            while let Some(operation) = next_operation(core, &stream) {
                run_in_worker(core, &stream, &operation);
            }
        })
    }

    /// Starts a thread that `shut_down` waits for.
    ///
    /// # Errors
    /// What the operating system says.
    pub(super) fn start_thread(
        self: &Arc<Self>,
        name: String,
        body: impl FnOnce(&Arc<Core>) + Send + 'static,
    ) -> io::Result<()> {
        let core = self.clone();
        *self.threads.count.lock() += 1;
        let threads = Arc::clone(&self.threads);
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            OURS.set(true);
            body(&core);
            // First the device, then the count: who waits for the thread may ask at once for the
            // memory that the device held.
            drop(core);
            *threads.count.lock() -= 1;
            threads.ended.notify_all();
        });
        if thread.is_err() {
            *self.threads.count.lock() -= 1;
        }
        thread.map(drop)
    }

    /// Stops all threads; work that has not run never will.
    pub(super) fn shut_down(&self) {
        self.stopping.store(true, Ordering::Release);
        for stream in self.all_streams.lock().iter() {
            // Under the lock, so that no worker misses it between its look and its sleep.
            let _queue = stream.queue.lock();
            stream.wake.notify_all();
        }
        // What a graph retained may hold the last handle of the device, and be dropped on a thread
        // of ours: that one cannot be waited for.
        let own = usize::from(OURS.get());
        let mut count = self.threads.count.lock();
        self.threads.ended.notify_all();
        while *count > own {
            self.threads.ended.wait_for(&mut count, LOOK);
        }
    }

    /// Seeded: runs a few operations, as many as the seed says.
    pub(super) fn drive(&self) {
        let Some(seeded) = &self.seeded else { return };
        self.activity.fetch_add(1, Ordering::Relaxed);
        // Who finds it taken has somebody else running operations.
        let Some(mut random) = seeded.try_lock() else { return };
        for _ in 0..random.below(3) {
            if self.step_with(&mut random) == Step::Nothing {
                return;
            }
        }
    }

    fn step(&self) -> Step {
        self.activity.fetch_add(1, Ordering::Relaxed);
        self.seeded.as_ref().map_or(Step::Nothing, |seeded| self.step_with(&mut seeded.lock()))
    }

    /// Runs one operation of those that may run, drawn from the seed.
    fn step_with(&self, random: &mut Random) -> Step {
        let now = Instant::now();
        let mut ready: Vec<_> = self.all_streams.lock().clone();
        ready.retain(|stream| {
            let queue = stream.queue.lock();
            let head = queue.operations.front();
            let may_run = head.is_some_and(|head| head.after.iter().all(|point| point.passed()));
            may_run && !queue.held && queue.not_before.is_none_or(|time| time <= now)
        });
        if ready.is_empty() {
            return Step::Nothing;
        }
        let stream = ready.swap_remove(random.below(ready.len() as u64) as usize);
        let operation = {
            let mut queue = stream.queue.lock();
            if queue.not_before.take().is_none() {
                let delay = queue.operations.front().map(|head| self.delay_of(&head.work));
                if let Some(delay) = delay.filter(|delay| !delay.is_zero()) {
                    queue.not_before = Some(now + delay);
                    return Step::Ran;
                }
            }
            queue.operations.pop_front()
        };
        if let Some(operation) = operation {
            self.execute(&stream, &operation);
            stream.complete_one();
        }
        Step::Ran
    }

    /// The idle thread of a seeded device.
    pub(super) fn help_idle_programs(&self) {
        let mut seen = self.activity.load(Ordering::Relaxed);
        while !self.is_stopping() {
            {
                // Woken early by threads that end, which does no harm, and by the shutdown.
                let mut count = self.threads.count.lock();
                self.threads.ended.wait_for(&mut count, IDLE);
            }
            let now = self.activity.load(Ordering::Relaxed);
            if now == seen && !self.unhelped.load(Ordering::Relaxed) {
                while self.step() == Step::Ran && !self.is_stopping() {}
            }
            seen = self.activity.load(Ordering::Relaxed);
        }
    }
}

/// Takes the head of the queue; `None` when there will be no more.
fn next_operation(core: &Core, stream: &StreamState) -> Option<Operation> {
    let mut queue = stream.queue.lock();
    loop {
        if core.is_stopping() {
            return None;
        }
        if !queue.held
            && let Some(operation) = queue.operations.pop_front()
        {
            return Some(operation);
        }
        if queue.closed && queue.operations.is_empty() {
            queue.has_worker = false;
            return None;
        }
        stream.wake.wait(&mut queue);
    }
}

fn run_in_worker(core: &Core, stream: &StreamState, operation: &Operation) {
    for point in &operation.after {
        while !point.passed() && !core.is_stopping() {
            point.stream.wait_briefly(point.number, LOOK);
        }
    }
    let delay = core.delay_of(&operation.work);
    if !delay.is_zero() {
        core.sleep(delay);
    }
    // Held meanwhile: it must not run before it is let go.
    let mut queue = stream.queue.lock();
    while queue.held && !core.is_stopping() {
        stream.wake.wait(&mut queue);
    }
    drop(queue);
    if !core.is_stopping() {
        core.execute(stream, operation);
        stream.complete_one();
    }
}
