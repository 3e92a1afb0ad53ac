//! Standard output: lines for people or one JSON object for programs, and what it all came to.
//!
//! Owns the rule that a reader who goes away is no panic: what he does not read is dropped, and the
//! exit code is still that of the work. Any other failure of writing is an error. On a terminal
//! lines are broken at its width; into a pipe they go whole, as programs that read lines want them.

use std::cell::RefCell;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::process::ExitCode;

use serde::Serialize;
use vbar::{Error, ErrorCode, Result};

use crate::look::{self, Look, Paint};

/// What a command that ran to its end found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// Everything is as it should be.
    Good,
    /// A check failed.
    Bad,
}

impl Verdict {
    pub(crate) fn of(ok: bool) -> Self {
        if ok { Self::Good } else { Self::Bad }
    }
}

/// For whom the output is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Format {
    Human,
    Json,
}

/// Exit code after wrong arguments, whoever refuses them; clap uses the same.
pub(crate) const USAGE: u8 = 2;
/// Exit code when a file, the driver, the system or standard output failed.
pub(crate) const FAILED: u8 = 3;

/// Columns of a label and the blanks behind it.
const LABEL_COLUMNS: usize = 9;

/// Standard output of one command.
pub(crate) struct Output {
    format: Format,
    look: Look,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    closed: bool,
    failed: Option<io::Error>,
}

#[derive(Serialize)]
struct Failure {
    ok: bool,
    error: String,
}

impl Output {
    pub(crate) fn new(format: Format) -> Self {
        Self { format, look: Look::of_stdout(), state: RefCell::default() }
    }

    pub(crate) fn is_json(&self) -> bool {
        self.format == Format::Json
    }

    /// Whether there is a terminal to draw progress on. It is drawn on standard error, so that
    /// standard output stays clean.
    pub(crate) fn draws(&self) -> bool {
        !self.is_json() && self.look.columns().is_some() && io::stderr().is_terminal()
    }

    /// Whether nobody reads any more, so that a long list can end.
    pub(crate) fn is_closed(&self) -> bool {
        self.state.borrow().closed
    }

    /// Width of the terminal; `None` when there is none.
    pub(crate) fn columns(&self) -> Option<usize> {
        self.look.columns()
    }

    /// The text in a colour, where colours are wanted.
    pub(crate) fn paint(&self, paint: Paint, text: &str) -> String {
        self.look.paint(paint, text)
    }

    /// A line for people; nothing with `--json`.
    pub(crate) fn line(&self, text: impl AsRef<str>) {
        self.hanging(text.as_ref(), 2);
    }

    /// A line with a label, below which the rest of a long text stands.
    pub(crate) fn labelled(&self, label: &str, text: impl AsRef<str>) {
        let label = format!("{label:<0$}  ", LABEL_COLUMNS - 2);
        self.hanging(&format!("{label}{}", text.as_ref()), label.len());
    }

    /// A line whose continuations are indented by `indent` columns, less on narrow terminals.
    fn hanging(&self, text: &str, indent: usize) {
        if !self.is_json() {
            let text = look::printable(text);
            self.look.broken(&text, indent).iter().for_each(|line| self.write(line));
        }
    }

    /// A line that is written as it is: fitted to the terminal, painted, and printable.
    pub(crate) fn fitted(&self, text: impl AsRef<str>) {
        if !self.is_json() {
            self.write(text.as_ref());
        }
    }

    /// A text that ends its own last line, as programs read it.
    pub(crate) fn text(&self, text: &str) {
        self.fitted(text.strip_suffix('\n').unwrap_or(text));
    }

    /// The object for programs; nothing without `--json`.
    pub(crate) fn object(&self, value: &impl Serialize) {
        if self.is_json() {
            match serde_json::to_string_pretty(value) {
                Ok(text) => self.write(&text),
                Err(error) => self.state.borrow_mut().failed = Some(io::Error::other(error)),
            }
        }
    }

    fn write(&self, text: &str) {
        let mut state = self.state.borrow_mut();
        if state.closed || state.failed.is_some() {
            return;
        }
        let mut stdout = io::stdout().lock();
        match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::BrokenPipe => state.closed = true,
            Err(error) => state.failed = Some(error),
        }
    }

    /// Says what went wrong, if anything did, and gives the exit code.
    pub(crate) fn finish(self, result: Result<Verdict>) -> ExitCode {
        if let Err(error) = &result {
            complain(error);
            self.object(&Failure { ok: false, error: error.to_string() });
        }
        if let Some(error) = self.state.into_inner().failed {
            complain(&Error::io("standard output", &error));
            return ExitCode::from(FAILED);
        }
        match result {
            Ok(Verdict::Good) => ExitCode::SUCCESS,
            Ok(Verdict::Bad) => ExitCode::from(1),
            Err(error) if error.code() == ErrorCode::InvalidArgument => ExitCode::from(USAGE),
            Err(_) => ExitCode::from(FAILED),
        }
    }
}

/// One line on standard error; if that is closed too there is nobody to tell.
fn complain(error: &Error) {
    let text = error.to_string();
    let _ = writeln!(io::stderr(), "vbar: {}", look::printable(&text));
}

/// A speed for people.
pub(crate) fn rate(bytes: u64, ms: f64) -> String {
    let speed = megabytes_a_second(bytes, ms);
    if speed < 1000.0 { format!("{speed:.0} MB/s") } else { format!("{:.2} GB/s", speed / 1e3) }
}

/// Bytes a second in MB, as links are rated: a million bytes.
pub(crate) fn megabytes_a_second(bytes: u64, milliseconds: f64) -> f64 {
    if milliseconds <= 0.0 { 0.0 } else { bytes as f64 / 1e3 / milliseconds }
}
