//! A model as people see it: bars of sizes, the pages with the tensors on them, the tensors.
//!
//! Owns how much is shown and where it stands on a terminal of 40 columns and more. Into a pipe it
//! is drawn as on a terminal of 100, without colours, and lists are whole.

use textwrap::core::display_width;
use vbar::units::format_bytes;

use super::groups::{Group, folded};
use super::pages::{PageTotals, Sign, letter, signs};
use super::{Report, Tensor};
use crate::look::{self, Paint};
use crate::output::Output;

/// Width of drawings where there is no terminal.
const COLUMNS_DEFAULT: usize = 100;
/// Narrower terminals show sizes and bars only, and no other numbers.
const NARROW_BELOW: usize = 64;
/// Rows of a list, unless all are asked for.
const ROWS_MAX: usize = 32;
/// Lines of the pages' drawing, unless all are asked for.
const PAGE_LINES_MAX: usize = 12;
/// Signs between two blanks, so that they can be counted.
const SIGNS_A_BLOCK: usize = 10;
const BAR_COLUMNS_MAX: usize = 40;
const BAR_COLUMNS_MIN: usize = 8;

/// See the module's text.
pub(super) struct Drawing<'a> {
    output: &'a Output,
    columns: usize,
    lists_are_whole: bool,
    pages_are_whole: bool,
}

/// A row with a bar.
struct Row<'a> {
    name: &'a str,
    tensor_count: u64,
    bytes: u64,
}

impl<'a> Drawing<'a> {
    pub(super) fn new(output: &'a Output, all: bool) -> Self {
        let columns = output.columns();
        Self {
            output,
            columns: columns.unwrap_or(COLUMNS_DEFAULT),
            lists_are_whole: all || columns.is_none(),
            pages_are_whole: all,
        }
    }

    pub(super) fn show(&self, report: &Report<'_>) {
        let files = report.files.len();
        self.output.line(format!(
            "{}: {} tensors, {} in {files} {}",
            report.model,
            report.tensor_count,
            format_bytes(report.model_bytes),
            if files == 1 { "file" } else { "files" }
        ));
        if report.tensor_count == 0 {
            self.output.line("the model has no tensors: there is nothing to bind or to run");
            return;
        }
        self.sizes(report);
        self.totals(&report.pages);
        self.pages(report);
        self.tensors(&report.tensors);
    }

    /// The three tables with bars; those of one row say nothing that was not said.
    fn sizes(&self, report: &Report<'_>) {
        let dtypes = report.dtypes.iter().map(|(name, sum)| {
            let (tensor_count, bytes) = (sum.tensor_count, sum.tensor_bytes);
            Row { name, tensor_count, bytes }
        });
        self.bars("dtypes", &dtypes.collect::<Vec<_>>());
        let files = report.files.iter().map(|file| {
            let name = file.path.rsplit_once('/').map_or(file.path, |(_, name)| name);
            let (tensor_count, bytes) = (file.tensors.tensor_count, file.tensors.tensor_bytes);
            Row { name, tensor_count, bytes }
        });
        if report.files.len() > 1 {
            self.bars("files", &files.collect::<Vec<_>>());
        }
        let groups =
            if self.pages_are_whole { report.groups.clone() } else { folded(&report.groups) };
        let rows = groups.iter().map(|group| {
            let Group { name, tensor_count, tensor_bytes } = group;
            Row { name, tensor_count: *tensor_count, bytes: *tensor_bytes }
        });
        if (2..report.tensor_count).contains(&groups.len()) {
            self.bars("groups", &rows.collect::<Vec<_>>());
        }
    }

    fn bars(&self, heading: &str, rows: &[Row<'_>]) {
        let shown = self.shown(rows.len());
        let names: Vec<_> = rows[..shown].iter().map(|row| look::printable(row.name)).collect();
        let widest = names.iter().map(|name| display_width(name)).max().unwrap_or(0);
        let table = BarTable::new(rows, shown, widest, self.columns);
        self.heading(&match table.count_columns {
            Some(_) => format!("{heading}: tensors, bytes, share"),
            None => heading.to_owned(),
        });
        for (name, row) in names.iter().zip(rows) {
            let bar = self.output.paint(Paint::Even, &table.bar(row));
            let numbers = table.numbers(row);
            match table.name_columns {
                Some(columns) => {
                    let text = format!("  {}  {numbers}  {bar}", shortened(name, columns));
                    self.output.fitted(text.trim_end());
                }
                None => {
                    self.named(" ", name, 4);
                    self.output.fitted(format!("    {numbers}  {bar}").trim_end());
                }
            }
        }
        self.left_out(rows.len() - shown, "rows");
    }

    fn totals(&self, pages: &PageTotals) {
        let percent = pages.lost_bytes as f64 * 100.0 / pages.total_bytes.max(1) as f64;
        let lost = [
            (pages.skipped_bytes, "skipped so that tensors begin with a page"),
            (pages.alignment_bytes, "for alignment"),
            (pages.tail_bytes, "behind the last tensor"),
        ];
        let lost = lost.iter().filter(|(bytes, _)| *bytes > 0);
        let lost: Vec<_> =
            lost.map(|(bytes, what)| format!("{} {what}", format_bytes(*bytes))).collect();
        self.heading("pages");
        self.output.line(format!(
            "  {} of {}, {} in all; {} shared by several tensors",
            pages.page_count,
            format_bytes(pages.page_bytes),
            format_bytes(pages.total_bytes),
            pages.shared_page_count
        ));
        let what = if lost.is_empty() { String::new() } else { format!(": {}", lost.join(", ")) };
        let size = format_bytes(pages.lost_bytes);
        self.output.line(format!("  {size} hold no weights ({percent:.1} %){what}"));
    }

    /// Lines of signs, each with the number of its first page.
    fn pages(&self, report: &Report<'_>) {
        let page_count = report.pages.page_count;
        let number_columns = page_count.saturating_sub(1).to_string().len();
        let blocks = self.columns.saturating_sub(number_columns + 3) / (SIGNS_A_BLOCK + 1);
        let signs_a_line = blocks.max(1) * SIGNS_A_BLOCK;
        let mut pages_a_sign = 1;
        while !self.pages_are_whole
            && page_count.div_ceil(pages_a_sign) > (signs_a_line * PAGE_LINES_MAX) as u64
        {
            pages_a_sign *= 2;
        }
        let places: Vec<_> = report.tensors.iter().map(|tensor| tensor.place).collect();
        let signs = signs(&places, page_count, pages_a_sign);
        if pages_a_sign > 1 {
            self.output.line(format!("  a sign is {pages_a_sign} pages; --all shows each"));
        }
        for (line, signs) in signs.chunks(signs_a_line).enumerate() {
            if self.output.is_closed() {
                return;
            }
            let first = (line * signs_a_line) as u64 * pages_a_sign;
            let blocks = signs.chunks(SIGNS_A_BLOCK).map(|block| self.painted(block));
            let blocks = blocks.collect::<Vec<_>>().join(" ");
            self.output.fitted(format!("  {first:>number_columns$} {blocks}"));
        }
    }

    /// Signs that are painted alike go together.
    fn painted(&self, signs: &[Sign]) -> String {
        let chunks = signs.chunk_by(|left, right| paint_of(*left) == paint_of(*right));
        let painted = chunks.map(|chunk| {
            let text: String = chunk.iter().map(|sign| sign.character()).collect();
            self.output.paint(paint_of(chunk[0]), &text)
        });
        painted.collect()
    }

    fn tensors(&self, tensors: &[Tensor<'_>]) {
        let shown = self.shown(tensors.len());
        let names: Vec<_> = tensors[..shown].iter().map(|t| look::printable(t.name)).collect();
        let rows: Vec<[String; 4]> = tensors[..shown]
            .iter()
            .map(|tensor| {
                let shape = format!("{:?}", tensor.shape);
                [format_bytes(tensor.bytes), tensor.dtype.clone(), shape, tensor.place.pages()]
            })
            .collect();
        let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
        let [size, dtype, shape, pages] = [width(0), width(1), width(2), width(3)];
        let indent = size + dtype + shape + pages + 12;
        let widest = names.iter().map(|name| display_width(name)).max().unwrap_or(0);
        let one_line = self.output.columns().is_none_or(|columns| indent + widest <= columns);
        self.heading("tensors");
        for (index, (row, name)) in rows.iter().zip(names).enumerate() {
            if self.output.is_closed() {
                return;
            }
            let [own_size, own_dtype, own_shape, own_pages] = row;
            let letter = letter(index).to_string();
            let letter = self.output.paint(paint_of(Sign::One(index)), &letter);
            if one_line {
                self.output.fitted(format!(
                    "  {letter} {own_size:>size$}  {own_dtype:<dtype$}  {own_shape:<shape$}  \
                     {own_pages:>pages$}  {name}"
                ));
            } else {
                self.named(&letter, &name, 4);
                let pages = if own_pages.contains('-') { "pages" } else { "page" };
                let text = format!("{own_size}, {own_dtype} {own_shape}, {pages} {own_pages}");
                look::broken(&format!("    {text}"), self.columns, 4)
                    .iter()
                    .for_each(|line| self.output.fitted(line));
            }
        }
        self.left_out(tensors.len() - shown, "tensors");
    }

    /// A name behind the sign of its tensor, in as many lines as it needs.
    fn named(&self, sign: &str, name: &str, indent: usize) {
        for (number, line) in in_lines(name, self.columns - indent).iter().enumerate() {
            match number {
                0 => self.output.fitted(format!("  {sign} {line}")),
                _ => self.output.fitted(format!("{:indent$}{line}", "")),
            }
        }
    }

    fn shown(&self, count: usize) -> usize {
        if self.lists_are_whole { count } else { count.min(ROWS_MAX) }
    }

    fn left_out(&self, count: usize, what: &str) {
        if count > 0 {
            self.output.line(format!("  and {count} more {what}; --all shows them"));
        }
    }

    fn heading(&self, text: &str) {
        self.output.fitted("");
        self.output.fitted(self.output.paint(Paint::Heading, text));
    }
}

fn paint_of(sign: Sign) -> Paint {
    match sign {
        Sign::Empty => Paint::Dim,
        Sign::One(tensor) if tensor % 2 == 0 => Paint::Even,
        Sign::One(_) => Paint::Odd,
        Sign::Several(_) => Paint::Note,
    }
}

/// Where names, numbers and bars of a table stand.
struct BarTable {
    /// None: the names are too long to stand beside the rest, and have lines of their own.
    name_columns: Option<usize>,
    /// None on narrow terminals.
    count_columns: Option<usize>,
    bar_columns: usize,
    most: u64,
    total: u64,
}

impl BarTable {
    fn new(rows: &[Row<'_>], shown: usize, widest: usize, columns: usize) -> Self {
        let counts = rows[..shown].iter().map(|row| row.tensor_count.to_string().len());
        let count_columns = counts.max().filter(|_| columns >= NARROW_BELOW);
        // Blanks, count, size, share.
        let beside = 2 + count_columns.map_or(10 + 2, |count| count + 2 + 10 + 2 + 7 + 2);
        let left = columns.saturating_sub(beside + BAR_COLUMNS_MIN + 2);
        // A name that loses some of its middle is better than two lines, one that loses most not.
        let name_columns = (widest <= left || left >= 24).then_some(widest.min(left));
        let before = name_columns.map_or(2, |columns| columns + 2);
        Self {
            name_columns,
            count_columns,
            bar_columns: columns.saturating_sub(beside + before).min(BAR_COLUMNS_MAX),
            most: rows.iter().map(|row| row.bytes).max().unwrap_or(0),
            total: rows.iter().map(|row| row.bytes).sum::<u64>().max(1),
        }
    }

    fn numbers(&self, row: &Row<'_>) -> String {
        let size = format_bytes(row.bytes);
        let Some(count_columns) = self.count_columns else { return format!("{size:>10}") };
        let share = row.bytes as f64 * 100.0 / self.total as f64;
        format!("{:>count_columns$}  {size:>10}  {share:>5.1} %", row.tensor_count)
    }

    /// What is not nothing has one sign at least.
    fn bar(&self, row: &Row<'_>) -> String {
        bar(row.bytes, self.most, self.bar_columns)
    }
}

/// A bar of the part that `bytes` is of `most`.
fn bar(bytes: u64, most: u64, columns: usize) -> String {
    if bytes == 0 || most == 0 {
        return String::new();
    }
    let signs = (bytes as f64 / most as f64 * columns as f64).round() as usize;
    "#".repeat(signs.clamp(1, columns.max(1)))
}

/// A name in lines of at most `columns`, broken behind a point or a slash where one is in the
/// second half of a line, else behind another sign between words.
fn in_lines(name: &str, columns: usize) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = name;
    while display_width(rest) > columns {
        let (mut used, mut end) = (0, 0);
        let mut ends = [None, None];
        for sign in rest.chars() {
            used += display_width(sign.encode_utf8(&mut [0; 4]));
            if used > columns && end > 0 {
                break;
            }
            end += sign.len_utf8();
            match sign {
                '.' | '/' if used * 2 > columns => ends[0] = Some(end),
                '_' | '-' if used * 2 > columns => ends[1] = Some(end),
                _ => {}
            }
        }
        let (line, next) = rest.split_at(ends[0].or(ends[1]).unwrap_or(end));
        lines.push(line);
        rest = next;
    }
    if !rest.is_empty() || lines.is_empty() {
        lines.push(rest);
    }
    lines
}

/// A name in `columns` columns: filled up, or its middle left out.
fn shortened(name: &str, columns: usize) -> String {
    let filled = |name: &str| {
        let missing = columns.saturating_sub(display_width(name));
        format!("{name}{}", " ".repeat(missing))
    };
    if display_width(name) <= columns {
        return filled(name);
    }
    let head = columns.saturating_sub(1) / 2;
    let tail = columns.saturating_sub(1) - head;
    let from_behind: Vec<char> = name.chars().rev().collect();
    let tail: Vec<char> = within(from_behind.into_iter(), tail);
    let head = within(name.chars(), head).into_iter();
    filled(&head.chain(['…']).chain(tail.into_iter().rev()).collect::<String>())
}

/// As many of the first characters as fit.
fn within(signs: impl Iterator<Item = char>, columns: usize) -> Vec<char> {
    let mut used = 0;
    let fits = |sign: &char| {
        used += display_width(sign.encode_utf8(&mut [0; 4]));
        used <= columns
    };
    signs.take_while(fits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_show_parts() {
        assert_eq!(bar(50, 100, 10), "#####");
        assert_eq!((bar(1, 1000, 10), bar(0, 10, 10)), ("#".to_owned(), String::new()));
        assert_eq!((bar(7, 7, 4), bar(0, 0, 4)), ("####".to_owned(), String::new()));
    }

    #[test]
    fn long_names_are_broken_at_their_points() {
        let name = "model.layers.0.self_attn.q_proj.weight";
        assert_eq!(in_lines(name, 30), ["model.layers.0.self_attn.", "q_proj.weight"]);
        assert_eq!(in_lines(name, 40), [name]);
        assert_eq!(in_lines("abcdefgh", 3), ["abc", "def", "gh"]);
        assert_eq!(in_lines("模型模", 1), ["模", "型", "模"]);
        assert_eq!(in_lines("", 5), [""]);
    }

    #[test]
    fn long_names_lose_their_middle() {
        assert_eq!(shortened("model-00001.safetensors", 11), "model…nsors");
        assert_eq!(shortened("short", 7), "short  ");
        assert_eq!(shortened("ééééé", 3), "é…é");
        // Each takes two columns.
        assert_eq!(shortened("模型模型", 6), "模…型 ");
        assert_eq!(shortened("模型", 0), "…");
    }
}
