//! The reader threads: what reads files into page-locked memory while the caller goes on.
//!
//! Owns the threads and the queue of tasks between them and whoever fills. A task runs once, on any
//! of them, in the order of the queue; it never waits for another. They end when they are stopped,
//! after what is in the queue; a task that panics takes nobody with it.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::process;
use crate::sync::{Condvar, Mutex};

/// 16 threads read 48 GB/s from the page cache, and more are no faster.
const THREADS_MAX: usize = 16;
/// Their names, as the operating system shows them.
const NAME: &str = "vbar reader";

type Task = Box<dyn FnOnce() + Send>;

/// See the module's text.
pub struct Readers {
    queue: Arc<Queue>,
    /// Never detached by a drop: in a forked child there are no such threads.
    threads: Vec<ManuallyDrop<JoinHandle<()>>>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    tasks: VecDeque<Task>,
    stopping: bool,
}

impl Readers {
    /// Starts a thread for each core, 16 at most.
    ///
    /// # Errors
    /// What the operating system says when it gives none at all.
    pub fn start() -> std::io::Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut readers = Self { queue: Arc::default(), threads: Vec::new() };
        for _ in 0..cores.min(THREADS_MAX) {
            let queue = Arc::clone(&readers.queue);
            match process::spawn(NAME, move || queue.work()) {
                Ok(thread) => readers.threads.push(ManuallyDrop::new(thread)),
                Err(error) if readers.threads.is_empty() => return Err(error),
                // Fewer threads read as well, only not as fast.
                Err(_) => break,
            }
        }
        Ok(readers)
    }

    /// Threads that there are.
    #[must_use]
    pub fn thread_count(&self) -> usize {
        self.threads.len()
    }

    /// Puts tasks at the end of the queue.
    pub fn submit(&self, tasks: impl IntoIterator<Item = Task>) {
        let mut state = self.queue.state.lock();
        let before = state.tasks.len();
        state.tasks.extend(tasks);
        let added = state.tasks.len() - before;
        drop(state);
        for _ in 0..added.min(self.threads.len()) {
            self.queue.changed.notify_one();
        }
    }
}

impl Queue {
    fn work(&self) {
        while let Some(task) = self.next() {
            // What a task owes to others it does when it is dropped, too.
            if catch_unwind(AssertUnwindSafe(task)).is_err() {
                let _ = catch_unwind(|| log::error!("a read panicked"));
            }
        }
    }

    fn next(&self) -> Option<Task> {
        let mut state = self.state.lock();
        loop {
            if let Some(task) = state.tasks.pop_front() {
                return Some(task);
            }
            if state.stopping {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        // A forked child has no such threads, and a copy of a lock that nobody may ever release.
        if process::ending() {
            return;
        }
        self.queue.state.lock().stopping = true;
        self.queue.changed.notify_all();
        let own = std::thread::current().id();
        for thread in self.threads.drain(..).map(ManuallyDrop::into_inner) {
            if thread.thread().id() != own && thread.join().is_err() {
                log::error!("a thread '{NAME}' has panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn every_task_runs_and_a_panic_takes_none_along() {
        let readers = Readers::start().unwrap();
        assert!((1..=THREADS_MAX).contains(&readers.thread_count()));
        let (sender, receiver) = mpsc::channel();
        let tasks = (0..100).map(|number| {
            let sender = sender.clone();
            Box::new(move || {
                assert_ne!(number, 50, "expected by this test");
                sender.send(number).unwrap();
            }) as Task
        });
        readers.submit(tasks);
        drop((sender, readers));
        let mut seen: Vec<_> = receiver.iter().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..100).filter(|number| *number != 50).collect::<Vec<_>>());
    }
}
