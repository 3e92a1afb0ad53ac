//! What `--help` ends with: examples, notes, exit codes. The manual page is made of the same.
//!
//! Owns their form, and what is common to all subcommands; each subcommand owns its own text.

use crate::look;

/// What one subcommand's help ends with.
pub(crate) struct Help {
    /// What it does, and the command.
    pub(crate) examples: &'static [(&'static str, &'static str)],
    /// Paragraphs.
    pub(crate) notes: &'static [&'static str],
    /// What 0 and 1 mean here; 2 and 3 are the same everywhere.
    pub(crate) exit: &'static [(u8, &'static str)],
}

/// Exit codes whose meaning does not depend on the subcommand.
pub(crate) const EXIT: &[(u8, &str)] = &[
    (2, "wrong arguments"),
    (3, "an error: a file, the driver, the system or standard output failed"),
];

/// Exit codes in general, for the program's own help.
pub(crate) const EXIT_GENERAL: &[(u8, &str)] = &[
    (0, "everything is as it should be"),
    (
        1,
        "a check failed: bytes differ, an invariant is broken, nothing could be checked, the \
         machine is not fit (also where there is no GPU and only the simulated device is left)",
    ),
];

/// Variables that are read.
pub(crate) const ENVIRONMENT: &[(&str, &str)] = &[
    ("VBAR_DRIVER", "what --device auto means, as sim:capacity=8G,seed=7 or cuda:1"),
    (
        "VBAR_TRACE",
        "a file for a trace of the whole program, as vbar trace writes one; %p is its id",
    ),
    ("VBAR_PYTHON", "the Python that doctor --comfy asks"),
    ("RUST_LOG", "which messages of the library are shown on standard error, as vbar=debug"),
    ("NO_COLOR", "no colours, when it is set to anything but the empty text"),
    ("TMPDIR", "where stress and bench keep a model while they run; /tmp unless set"),
    (
        "CUDA_VISIBLE_DEVICES",
        "read by the CUDA driver: which devices there are, and in which order",
    ),
];

/// Sizes are the same in every argument.
pub(crate) const SIZES: &str = "Sizes are bytes or carry K, M, G or T (powers of 1024).";

/// Devices are too.
pub(crate) const DEVICES: &str = "A device is auto (VBAR_DRIVER if it is set, else the first GPU, \
                                  else a simulated device), cuda or cuda:INDEX, sim or \
                                  sim:KEY=VALUE,... (capacity, granularity, seed, latency and \
                                  others; a wrong key lists them).";

/// Widest help text, as clap has it.
const COLUMNS_MAX: usize = 100;

impl Help {
    /// The text for `--help`.
    pub(crate) fn text(&self) -> String {
        let mut text = Text::new();
        text.examples(self.examples);
        self.notes.iter().for_each(|note| text.paragraph(note));
        text.table("Exit codes:", self.exit.iter().chain(EXIT).map(|(code, what)| (code, *what)));
        text.lines.join("\n")
    }
}

/// The text for the program's own `--help`.
pub(crate) fn general(examples: &[(&str, &str)]) -> String {
    let mut text = Text::new();
    text.examples(examples);
    text.paragraph(SIZES);
    text.paragraph(DEVICES);
    let codes = EXIT_GENERAL.iter().chain(EXIT).map(|(code, what)| (code, *what));
    text.table("Exit codes:", codes);
    text.table("Environment:", ENVIRONMENT.iter().map(|(name, what)| (name, *what)));
    text.lines.join("\n")
}

/// Lines that fit the terminal. clap would break them too, but not keep what stands below what.
struct Text {
    columns: usize,
    lines: Vec<String>,
}

impl Text {
    fn new() -> Self {
        // As clap: whichever of the two is a terminal, so that `--help | less` fits as well.
        let sizes = [console::Term::stdout(), console::Term::stderr()];
        let size = sizes.iter().find_map(console::Term::size_checked);
        let columns = size.map_or(COLUMNS_MAX, |(_, columns)| usize::from(columns));
        Self { columns: columns.clamp(1, COLUMNS_MAX), lines: Vec::new() }
    }

    fn push(&mut self, text: &str, indent: usize) {
        self.lines.extend(look::broken(text, self.columns, indent));
    }

    fn part(&mut self) {
        if !self.lines.is_empty() {
            self.lines.push(String::new());
        }
    }

    fn examples(&mut self, examples: &[(&str, &str)]) {
        self.part();
        self.push("Examples:", 2);
        for (what, command) in examples {
            self.push(&format!("  # {what}"), 4);
            self.push(&format!("  {command}"), 6);
        }
    }

    fn paragraph(&mut self, text: &str) {
        self.part();
        self.push(text, 0);
    }

    fn table<'a, T: std::fmt::Display>(
        &mut self,
        heading: &str,
        rows: impl Iterator<Item = (T, &'a str)> + Clone,
    ) {
        self.part();
        self.push(heading, 0);
        let width = rows.clone().map(|(name, _)| name.to_string().len()).max().unwrap_or(0);
        for (name, what) in rows {
            self.push(&format!("  {:<width$}  {what}", name.to_string()), width + 4);
        }
    }
}
