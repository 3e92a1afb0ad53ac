//! What the library logs, for tests that ask; and loggers that do more than log.

use std::sync::{Mutex, MutexGuard, OnceLock};

/// Messages so far, of all threads of all tests, with the name of the thread that logged each.
static MESSAGES: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());
/// What happens, once, when a thread of this name logs a message with this text.
static REACTIONS: Mutex<Vec<Reaction>> = Mutex::new(Vec::new());

struct Reaction {
    thread: String,
    text: String,
    react: Box<dyn FnOnce() + Send>,
}

struct Collector;

impl log::Log for Collector {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        // In a forked child another thread's copy may hold the locks for ever.
        metadata.level() <= log::Level::Warn && !vbar::process::ending()
    }

    fn log(&self, record: &log::Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let (thread, message) = (this_thread(), record.args().to_string());
        let reaction = {
            let mut reactions = lock(&REACTIONS);
            let fits = |one: &Reaction| one.thread == thread && message.contains(&one.text);
            let at = reactions.iter().position(fits);
            at.map(|at| reactions.remove(at))
        };
        lock(&MESSAGES).push((thread, message));
        if let Some(Reaction { react, .. }) = reaction {
            react();
        }
    }

    fn flush(&self) {}
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Keeps warnings and errors from now on.
pub(crate) fn collect() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        log::set_logger(&Collector).expect("the first logger of this process");
        log::set_max_level(log::LevelFilter::Warn);
    });
}

/// Has the logger do something in the middle of one message.
pub(crate) fn react(thread: &str, text: &str, react: impl FnOnce() + Send + 'static) {
    collect();
    let (thread, text) = (thread.to_owned(), text.to_owned());
    lock(&REACTIONS).push(Reaction { thread, text, react: Box::new(react) });
}

/// How many messages of threads of this name contain the text.
pub(crate) fn count(thread: &str, text: &str) -> usize {
    let fits = |(name, message): &&(String, String)| name == thread && message.contains(text);
    lock(&MESSAGES).iter().filter(fits).count()
}

/// The name of the calling thread, which the test harness gives each test.
pub(crate) fn this_thread() -> String {
    std::thread::current().name().unwrap_or_default().to_owned()
}
