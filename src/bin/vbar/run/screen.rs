//! What is seen while a run goes on: a progress bar and a strip of the pages' states.
//!
//! On a terminal both are drawn on standard error and move; into a pipe go plain lines only, and
//! nothing with `--json`.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::pass::Counted;
use crate::output::{Output, rate};

/// How often the strip is drawn anew.
const STRIP_INTERVAL: Duration = Duration::from_millis(60);
/// What the strip's characters mean.
const LEGEND: &str = "# resident, i on its way, P pinned, ! leaving, . absent";
/// Room beside the strip, in columns.
const MARGIN: usize = 2;

/// What there is to be seen in the middle of a pass; the last two are of the whole run.
pub(super) struct Seen {
    /// A drawing of the pages.
    pub(super) strip: String,
    pub(super) counted: Counted,
    pub(super) pages_ahead: u64,
    pub(super) filled_bytes: u64,
}

/// See the module's text.
pub(super) struct Screen<'a> {
    output: &'a Output,
    bar: RefCell<ProgressBar>,
    /// When it was drawn last, and how many bytes had been copied then.
    drawn_at: Cell<Option<(Instant, u64)>>,
    has_legend: Cell<bool>,
}

impl<'a> Screen<'a> {
    pub(super) fn new(output: &'a Output) -> Self {
        let bar = RefCell::new(ProgressBar::hidden());
        Self { output, bar, drawn_at: Cell::new(None), has_legend: Cell::new(false) }
    }

    /// A line that stays.
    pub(super) fn say(&self, text: impl AsRef<str>) {
        self.bar.borrow().suspend(|| self.output.line(text));
    }

    /// The same with a label.
    pub(super) fn labelled(&self, label: &str, text: impl AsRef<str>) {
        self.bar.borrow().suspend(|| self.output.labelled(label, text));
    }

    /// Progress of the checksums of `count` tensors; may be moved on by any thread.
    pub(super) fn checksums(&self, count: usize) -> ProgressBar {
        self.say("computing the checksums of the file's bytes …");
        self.bar_of(count, "checksums [{wide_bar}] {pos}/{len} tensors")
    }

    /// A pass over `count` tensors begins. Above the first strip goes what it means.
    pub(super) fn begin(&self, number: u32, of: u32, count: usize) {
        if self.output.draws() && !self.has_legend.replace(true) {
            self.labelled("pages", LEGEND);
        }
        let template = format!(
            "pass {}/{of}  [{{wide_bar}}] {{pos}}/{{len}} tensors {{elapsed}}\n{{prefix}}\n{{msg}}",
            number + 1
        );
        *self.bar.borrow_mut() = self.bar_of(count, &template);
    }

    /// Another tensor is done. `seen` is called when it is time to draw.
    pub(super) fn step(&self, seen: impl FnOnce() -> Seen) {
        let bar = self.bar.borrow();
        if bar.is_hidden() {
            return;
        }
        let (now, before) = (Instant::now(), self.drawn_at.get());
        if before.is_none_or(|(at, _)| now - at >= STRIP_INTERVAL) {
            let Seen { strip, counted, pages_ahead, filled_bytes } = seen();
            self.drawn_at.set(Some((now, filled_bytes)));
            let columns = usize::from(console::Term::stderr().size().1).saturating_sub(MARGIN);
            bar.set_message(compress(&strip, columns));
            let speed = before.map_or_else(String::new, |(at, filled)| {
                let ms = (now - at).as_secs_f64() * 1e3;
                format!("  {}", rate(filled_bytes - filled, ms))
            });
            let (hits, misses) = (100.0 * counted.hit_rate(), counted.refilled);
            let numbers = format!("hits {hits:.0} %  misses {misses}  ahead {pages_ahead}{speed}");
            bar.set_prefix(numbers.chars().take(columns).collect::<String>());
        }
        bar.inc(1);
    }

    /// The pass is over, and came to this.
    pub(super) fn end(&self, label: &str, line: &str) {
        self.bar.replace(ProgressBar::hidden()).finish_and_clear();
        self.output.labelled(label, line);
    }

    fn bar_of(&self, count: usize, template: &str) -> ProgressBar {
        if !self.output.draws() {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new(count as u64);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar
    }
}

/// A drawing of pages in at most `columns` characters: each stands for as many pages as it must,
/// and shows what most of them are, the first of equals.
fn compress(drawing: &str, columns: usize) -> String {
    let pages: Vec<char> = drawing.chars().collect();
    if pages.len() <= columns || columns == 0 {
        return drawing.to_owned();
    }
    let bound = |column: usize| column * pages.len() / columns;
    (0..columns).map(|column| commonest(&pages[bound(column)..bound(column + 1)])).collect()
}

fn commonest(pages: &[char]) -> char {
    let count = |wanted: char| pages.iter().filter(|page| **page == wanted).count();
    let best = pages.iter().rev().max_by_key(|page| count(**page));
    best.copied().unwrap_or(' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strip_fits_its_width_and_shows_what_most_pages_are() {
        assert_eq!(compress("##..", 10), "##..");
        assert_eq!(compress("####....", 4), "##..");
        assert_eq!(compress("###.....P", 3), "#..");
        assert_eq!(compress("#.", 1), "#");
        assert_eq!(compress(&"#".repeat(1000), 79).len(), 79);
    }
}
