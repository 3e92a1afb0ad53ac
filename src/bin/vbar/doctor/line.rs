//! A verdict and what to do: one line of what the doctor says.
//!
//! Owns how it stands: verdict, topic, text, and below it the advice; on narrow terminals the text
//! has lines of its own, and into a pipe all goes on one line.

use serde::Serialize;

use crate::look::{self, Paint};
use crate::output::Output;

/// How it is.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    /// As it should be.
    Ok,
    /// Works, but better known.
    Note,
    /// The machine is not fit because of it.
    Problem,
}

/// See the module's text.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
pub(super) struct Line {
    pub(super) topic: String,
    pub(super) verdict: Level,
    pub(super) text: String,
    /// What to do about it.
    pub(super) advice: Option<String>,
}

impl Line {
    pub(super) fn ok(topic: impl Into<String>, text: impl Into<String>) -> Self {
        let (topic, text) = (topic.into(), text.into());
        Self { topic, verdict: Level::Ok, text, advice: None }
    }

    pub(super) fn note(
        topic: impl Into<String>,
        text: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { verdict: Level::Note, advice: Some(advice.into()), ..Self::ok(topic, text) }
    }

    pub(super) fn problem(
        topic: impl Into<String>,
        text: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { verdict: Level::Problem, ..Self::note(topic, text, advice) }
    }
}

impl Line {
    /// The same of another topic.
    pub(super) fn of(self, topic: impl Into<String>) -> Self {
        Self { topic: topic.into(), ..self }
    }

    /// The same where it is no reason to call the machine unfit.
    pub(super) fn at_most_a_note(self) -> Self {
        let problem = self.verdict == Level::Problem;
        Self { verdict: if problem { Level::Note } else { self.verdict }, ..self }
    }
}

const VERDICT_COLUMNS: usize = 9;
const TOPIC_COLUMNS: usize = 16;
/// On narrower terminals the text stands below verdict and topic.
const ONE_LINE_FROM: usize = 60;

/// Lines that have been shown, for the report.
pub(super) struct Lines<'a> {
    output: &'a Output,
    shown: Vec<Line>,
}

impl<'a> Lines<'a> {
    pub(super) fn new(output: &'a Output) -> Self {
        Self { output, shown: Vec::new() }
    }

    /// Shows a line at once: what is measured after it takes a while.
    pub(super) fn push(&mut self, line: Line) {
        if !self.output.is_json() {
            self.show(&line);
        }
        self.shown.push(line);
    }

    pub(super) fn extend(&mut self, lines: impl IntoIterator<Item = Line>) {
        lines.into_iter().for_each(|line| self.push(line));
    }

    pub(super) fn count(&self, level: Level) -> usize {
        self.topics(level).count()
    }

    /// What the lines of a level are about, in their order.
    pub(super) fn topics(&self, level: Level) -> impl Iterator<Item = &str> {
        self.shown.iter().filter(move |line| line.verdict == level).map(|line| &*line.topic)
    }

    pub(super) fn into_shown(self) -> Vec<Line> {
        self.shown
    }

    fn show(&self, line: &Line) {
        let (word, paint) = match line.verdict {
            Level::Ok => ("ok", Paint::Good),
            Level::Note => ("note", Paint::Note),
            Level::Problem => ("problem", Paint::Bad),
        };
        let verdict = self.output.paint(paint, &format!("{word:<VERDICT_COLUMNS$}"));
        let topic = look::printable(&line.topic);
        let text = look::printable(&line.text);
        let advice = line.advice.as_deref().map(|advice| format!("-> {}", look::printable(advice)));
        let Some(columns) = self.output.columns() else {
            let advice = advice.map_or(String::new(), |advice| format!(" {advice}"));
            self.output.fitted(format!("{verdict}{topic:<TOPIC_COLUMNS$}{text}{advice}"));
            return;
        };
        let indent = if columns < ONE_LINE_FROM { 2 } else { VERDICT_COLUMNS + TOPIC_COLUMNS };
        let below = |text: &str| {
            let lines = look::broken(text, columns - indent, 0);
            lines.into_iter().map(|line| format!("{:indent$}{line}", "")).collect::<Vec<_>>()
        };
        let mut lines = below(&text);
        if columns < ONE_LINE_FROM {
            self.output.fitted(format!("{verdict}{topic}"));
        } else {
            let first = lines.remove(0).split_off(indent);
            self.output.fitted(format!("{verdict}{topic:<TOPIC_COLUMNS$}{first}"));
        }
        let advice = advice.map_or(Vec::new(), |advice| below(&advice));
        lines.iter().chain(&advice).for_each(|line| self.output.fitted(line));
    }
}
