//! What the library logs, for tests that ask.

use std::sync::{Mutex, MutexGuard, OnceLock};

/// Messages so far, of all threads of all tests, with the name of the thread that logged each.
static MESSAGES: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());
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
        lock(&MESSAGES).push((thread, message));
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

/// How many messages of threads of this name contain the text.
pub(crate) fn count(thread: &str, text: &str) -> usize {
    let fits = |(name, message): &&(String, String)| name == thread && message.contains(text);
    lock(&MESSAGES).iter().filter(fits).count()
}

/// The name of the calling thread, which the test harness gives each test.
pub(crate) fn this_thread() -> String {
    std::thread::current().name().unwrap_or_default().to_owned()
}
