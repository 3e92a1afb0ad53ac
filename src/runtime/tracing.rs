//! `VBAR_TRACE=file`: a trace of everything from the first runtime of a process to its last.
//!
//! For programs that do not trace themselves. Written when the last runtime closes; a process that
//! runs with other rights than its caller's takes no file name from its environment.

use std::io::{BufWriter, Write};
use std::path::PathBuf;

use crate::host::output;
use crate::process;
use crate::sync::Mutex;
use crate::trace;

/// Spans that there is room for: minutes of a busy engine, in about 100 MiB.
const SPANS_MAX: usize = 1 << 20;

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
    match trace::start(SPANS_MAX) {
        Ok(()) => asked.1 = Some(path),
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
    let written = output::create(&path).and_then(|file| {
        let mut file = BufWriter::new(file);
        taken.write_chrome_json(&mut file).and_then(|()| file.flush())
    });
    match written {
        Ok(()) => log::info!("{} spans written to {}", taken.span_count(), path.display()),
        Err(error) => log::error!("VBAR_TRACE: {}: {error}", path.display()),
    }
}

fn asked_path() -> Option<PathBuf> {
    process::variable("VBAR_TRACE").map(PathBuf::from)
}
