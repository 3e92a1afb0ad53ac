//! `VBAR_TRACE=file`: a trace of everything from the first runtime of a process to its last.
//!
//! For programs that do not trace themselves. Written when the last runtime closes, and at the
//! exit of a process that leaves one open, as PyTorch's allocator does. One that is killed, calls
//! `_exit` or becomes another program by an exec writes none. `%p` in the name is the process's
//! number. A file that is there and no trace is not replaced. Who runs with other rights than its
//! caller's takes no file name from its environment.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::host::output;
use crate::process;
use crate::sync::Mutex;
use crate::trace::{self, FILE_START, Trace};

/// Spans that there is room for: minutes of a busy engine, in about 100 MiB.
const SPANS_MAX: usize = 1 << 20;

/// The exit waits no longer for a lock that its own thread may hold.
const EXIT_PATIENCE: Duration = Duration::from_millis(100);

/// Runtimes that are open, and where the trace goes.
static ASKED: Mutex<(usize, Option<PathBuf>)> = Mutex::new((0, None));

/// A runtime opens.
pub(super) fn begin() {
    let mut asked = ASKED.lock();
    asked.0 += 1;
    if asked.0 > 1 {
        return;
    }
    let Some(path) = asked_path() else { return };
    // At the end nobody may be there any more who could be told.
    let kind = output::Kind { name: "trace", start: FILE_START };
    if let Err(error) = output::check_kind(&path, &kind).and_then(|()| output::create(&path)) {
        log::warn!("VBAR_TRACE: no trace of this run: {}: {error}", path.display());
        return;
    }
    match trace::start(SPANS_MAX) {
        Ok(()) => {
            asked.1 = Some(path);
            process::at_exit(at_exit);
        }
        Err(error) => log::warn!("VBAR_TRACE: no trace of this run: {error}"),
    }
}

/// A runtime has closed. In a forked child it is the parent's, as the file is.
pub(super) fn end() {
    if process::ending() {
        return;
    }
    let mut asked = ASKED.lock();
    asked.0 = asked.0.saturating_sub(1);
    if asked.0 > 0 {
        return;
    }
    let Some(path) = asked.1.take() else { return };
    let taken = trace::stop();
    match write(&taken, &path) {
        Ok(()) => log::info!("{} spans written to {}", taken.span_count(), path.display()),
        Err(error) => log::error!("VBAR_TRACE: {}: {error}", path.display()),
    }
}

/// The process exits with runtimes open. Whoever takes the library's messages may be gone.
fn at_exit() {
    let path = ASKED.try_lock_for(EXIT_PATIENCE).and_then(|mut asked| asked.1.take());
    let Some(path) = path else { return };
    if let Err(error) = write(&trace::stop(), &path) {
        let _ = writeln!(io::stderr(), "vbar: VBAR_TRACE: {}: {error}", path.display());
    }
}

fn write(taken: &Trace, path: &Path) -> io::Result<()> {
    let mut file = BufWriter::new(output::create(path)?);
    taken.write_chrome_json(&mut file)?;
    file.flush()
}

fn asked_path() -> Option<PathBuf> {
    let name = process::variable("VBAR_TRACE")?;
    // A name that is no text is taken as it is.
    let name = name.into_string().map(|name| name.replace("%p", &std::process::id().to_string()));
    Some(name.map_or_else(PathBuf::from, PathBuf::from))
}
