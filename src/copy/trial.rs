//! One window that is registered on a thread of its own: some drivers do not come back from it.
//!
//! The thread owns the window until it has come back; left behind, it gives the window back itself
//! if it ever does. It holds the driver and nothing of the runtime.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::counters::Waiter;
use crate::driver::{CaptureMode, Driver, DriverResult};
use crate::error::{Error, Result};
use crate::host::file_pages::FileWindow;
use crate::host::source::ModelFile;
use crate::outcome::WaitKind;
use crate::process;
use crate::sync::device::Device;
use crate::sync::{Condvar, Mutex};
use crate::units::Context;

/// Its name, as the operating system shows it.
const NAME: &str = "vbar trial";

/// See the module's text.
pub(super) struct Trial {
    shared: Arc<Shared>,
    file: Arc<ModelFile>,
    bytes: u64,
    begun: Instant,
}

#[derive(Default)]
struct Shared {
    answer: Mutex<Answer>,
    changed: Condvar,
}

#[derive(Default)]
enum Answer {
    #[default]
    Pending,
    LeftBehind,
    Come(DriverResult<FileWindow>, Duration),
}

impl Trial {
    /// Begins to register a window.
    ///
    /// # Errors
    /// `Io` when there is no thread to be had.
    pub(super) fn start(device: &Device, window: FileWindow) -> Result<Self> {
        let (file, bytes, begun) = (Arc::clone(window.file()), window.bytes(), Instant::now());
        let shared = Arc::<Shared>::default();
        let (driver, context) = (Arc::clone(&device.driver), device.context);
        let answer = Arc::clone(&shared);
        process::spawn(NAME, move || answer.run(&driver, context, window))
            .map_err(|error| Error::io(format_args!("the thread '{NAME}'"), &error))?;
        Ok(Self { shared, file, bytes, begun })
    }

    pub(super) fn file(&self) -> &Arc<ModelFile> {
        &self.file
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How long ago it was begun.
    pub(super) fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    pub(super) fn has_come(&self) -> bool {
        matches!(*self.shared.answer.lock(), Answer::Come(..))
    }

    /// Waits until it has come back or is older than told.
    pub(super) fn wait(&self, age: Duration) {
        let mut answer = self.shared.answer.lock();
        while matches!(*answer, Answer::Pending) {
            let left = age.saturating_sub(self.age());
            if left.is_zero() {
                return;
            }
            self.shared.changed.wait_for(&mut answer, left);
        }
    }

    /// What came of it; `None` when it is left behind.
    pub(super) fn end(self, device: &Device) -> Option<Result<FileWindow>> {
        let answer = std::mem::replace(&mut *self.shared.answer.lock(), Answer::LeftBehind);
        let Answer::Come(window, time) = answer else { return None };
        device.counters.wait(WaitKind::Register, time, Waiter::Library);
        Some(window.map_err(|error| device.note(error.into())))
    }
}

impl Shared {
    fn run(&self, driver: &Arc<dyn Driver>, context: Context, mut window: FileWindow) {
        let Some(_work) = process::work() else { return };
        let begun = Instant::now();
        let entered = driver
            .ctx_set_current(Some(context))
            .and_then(|()| driver.thread_exchange_stream_capture_mode(CaptureMode::Relaxed));
        let registered = entered.and_then(|_| window.register());
        let mut answer = self.answer.lock();
        if matches!(*answer, Answer::LeftBehind) {
            drop(answer);
            // Gives it back, late.
            drop(window);
        } else {
            *answer = Answer::Come(registered.map(|()| window), begun.elapsed());
            self.changed.notify_all();
            drop(answer);
        }
        let _ = driver.ctx_set_current(None);
    }
}
