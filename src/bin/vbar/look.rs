//! What the terminal allows: its width, and whether it wants colours.
//!
//! Owns the rules: lines are broken on terminals only; colours need a terminal that can show them
//! and no `NO_COLOR` (any text but the empty one, as no-color.org says).

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal};

use textwrap::WordSplitter;

/// Width of a terminal that does not tell.
const COLUMNS_DEFAULT: usize = 80;
/// Below it nothing is fitted any more.
const COLUMNS_MIN: usize = 20;
/// On terminals narrower than that continuations are indented by little.
const NARROW_BELOW: usize = 60;
const NARROW_INDENT: usize = 2;

/// What a piece of text is, to be told apart by its colour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Paint {
    Good,
    Note,
    Bad,
    /// Less important than the rest.
    Dim,
    /// One of two kinds that alternate.
    Even,
    Odd,
    Heading,
}

/// See the module's text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Look {
    columns: Option<usize>,
    colours: bool,
}

impl Look {
    /// What standard output is connected to.
    pub(crate) fn of_stdout() -> Self {
        let columns = io::stdout().is_terminal().then(|| {
            let size = console::Term::stdout().size_checked();
            size.map_or(0, |(_, columns)| usize::from(columns))
        });
        let variable = |name| std::env::var_os(name);
        Self::decide(columns, variable("NO_COLOR"), variable("TERM"))
    }

    /// `columns` is `None` for what is no terminal, and 0 for one that does not tell.
    fn decide(columns: Option<usize>, no_color: Option<OsString>, term: Option<OsString>) -> Self {
        let columns = columns.map(|columns| match columns {
            0 => COLUMNS_DEFAULT,
            columns => columns.max(COLUMNS_MIN),
        });
        let forbidden = no_color.is_some_and(|text| !text.is_empty());
        let dumb = term.is_none_or(|term| term == OsStr::new("dumb"));
        Self { columns, colours: columns.is_some() && !forbidden && !dumb }
    }

    /// Width of the terminal; `None` when there is none.
    pub(crate) fn columns(self) -> Option<usize> {
        self.columns
    }

    /// The text in a colour, where colours are wanted.
    pub(crate) fn paint(self, paint: Paint, text: &str) -> String {
        let codes = match paint {
            _ if !self.colours || text.is_empty() => return text.to_owned(),
            Paint::Good => "32",
            Paint::Note => "33",
            Paint::Bad => "1;31",
            Paint::Dim => "2",
            Paint::Even => "36",
            Paint::Odd => "35",
            Paint::Heading => "1",
        };
        format!("\u{1b}[{codes}m{text}\u{1b}[0m")
    }

    /// The lines of a text without colours, continuations indented.
    pub(crate) fn broken(self, text: &str, indent: usize) -> Vec<String> {
        let Some(columns) = self.columns else { return vec![text.to_owned()] };
        broken(text, columns, indent)
    }
}

/// A text without control characters: names come from files, and a terminal obeys what is printed.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return Cow::Borrowed(text);
    }
    let escaped = text.chars().map(|sign| match sign.is_control() {
        true => sign.escape_default().to_string(),
        false => sign.to_string(),
    });
    Cow::Owned(escaped.collect())
}

/// A text in lines of at most `columns`, all but the first indented by `indent`, less on narrow
/// terminals. Words that are too long are cut.
pub(crate) fn broken(text: &str, columns: usize, indent: usize) -> Vec<String> {
    let indent = if columns < NARROW_BELOW { indent.min(NARROW_INDENT) } else { indent };
    let indent = " ".repeat(indent);
    let options = textwrap::Options::new(columns)
        .subsequent_indent(&indent)
        .word_splitter(WordSplitter::NoHyphenation);
    textwrap::wrap(text, options).into_iter().map(Cow::into_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decide(columns: Option<usize>, no_color: Option<&str>, term: Option<&str>) -> Look {
        Look::decide(columns, no_color.map(OsString::from), term.map(OsString::from))
    }

    #[test]
    fn colours_are_for_terminals_that_want_them() {
        let paint = |look: Look| look.paint(Paint::Good, "x");
        assert_eq!(paint(decide(Some(80), None, Some("xterm"))), "\u{1b}[32mx\u{1b}[0m");
        assert_eq!(paint(decide(Some(80), Some(""), Some("xterm"))), "\u{1b}[32mx\u{1b}[0m");
        for look in [
            decide(None, None, Some("xterm")),
            decide(Some(80), Some("1"), Some("xterm")),
            decide(Some(80), None, Some("dumb")),
            decide(Some(80), None, None),
        ] {
            assert_eq!(paint(look), "x", "{look:?}");
        }
    }

    #[test]
    fn a_terminal_is_told_nothing_by_a_name() {
        assert_eq!(printable("layers.0 é"), "layers.0 é");
        assert_eq!(printable("a\u{1b}[2J\nb\u{9b}"), "a\\u{1b}[2J\\nb\\u{9b}");
    }

    #[test]
    fn lines_are_broken_on_terminals_only() {
        let text = "label    some words and a_word_that_is_longer_than_the_whole_line";
        assert_eq!(decide(None, None, None).broken(text, 9), [text]);
        let narrow = decide(Some(24), None, None).broken(text, 9);
        assert_eq!(narrow[..2], ["label    some words and", "  a_word_that_is_longer_"]);
        let wide = decide(Some(60), None, None).broken(text, 9);
        assert_eq!(wide[1], "         a_word_that_is_longer_than_the_whole_line");
        assert_eq!(decide(Some(0), None, None).columns(), Some(COLUMNS_DEFAULT));
        assert_eq!(decide(Some(3), None, None).columns(), Some(COLUMNS_MIN));
    }
}
