//! Charts as SVG: lines over two axes from zero, one chart below another.
//!
//! Written out, since it is all that the benchmarks draw: a plotting crate would bring fonts and
//! image formats for a hundred lines.

use std::fmt::Write;
use std::io::Write as _;
use std::path::Path;

use vbar::host::output;
use vbar::{Error, Result};

use crate::output::Output;
use crate::written;

/// A line and its name.
pub(super) struct Line {
    pub(super) name: String,
    /// By rising first number; none is negative.
    pub(super) points: Vec<(f64, f64)>,
}

/// Some lines over the same axes.
pub(super) struct Chart {
    pub(super) title: String,
    /// What the horizontal axis is, with its unit.
    pub(super) x: String,
    /// What the vertical axis is, with its unit.
    pub(super) y: String,
    pub(super) lines: Vec<Line>,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 110.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 46.0;

/// Told apart by people with any colour vision, and in print (Okabe and Ito).
const COLOURS: [&str; 6] = ["#d55e00", "#e69f00", "#56b4e9", "#0072b2", "#009e73", "#cc79a7"];
/// Lines that coincide show through each other.
const DASHES: [&str; 6] = ["", "7 4", "", "", "2 3", "10 3 2 3"];

const KIND: output::Kind = output::Kind { name: "plot", start: "<svg " };

/// Writes charts to a file, and says where they are.
pub(super) fn write(path: &Path, charts: &[Chart], output: &Output) -> Result<()> {
    let written =
        output::create(path).and_then(|mut file| file.write_all(document(charts).as_bytes()));
    written.map_err(|error| Error::io(path.display(), &error))?;
    output.line(format!("plot in {}", path.display()));
    Ok(())
}

/// Refuses a file that could not be written, before what it is to show is measured.
pub(super) fn check(path: Option<&Path>) -> Result<()> {
    path.map_or(Ok(()), |path| written::check(path, &KIND))
}

/// The charts as one document.
fn document(charts: &[Chart]) -> String {
    let height = HEIGHT * charts.len() as f64;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (index, chart) in charts.iter().enumerate() {
        let _ = writeln!(text, "<g transform=\"translate(0 {})\">", HEIGHT * index as f64);
        draw(chart, &mut text);
        text.push_str("</g>\n");
    }
    text.push_str("</svg>\n");
    text
}

fn draw(chart: &Chart, text: &mut String) {
    let points = || chart.lines.iter().flat_map(|line| &line.points);
    let x_step = step(points().map(|point| point.0).fold(0.0, f64::max));
    let y_step = step(points().map(|point| point.1).fold(0.0, f64::max));
    let last = |step: f64, max: f64| (max / step - 1e-9).ceil().max(1.0) * step;
    let x_max = last(x_step, points().map(|point| point.0).fold(0.0, f64::max));
    let y_max = last(y_step, points().map(|point| point.1).fold(0.0, f64::max));
    let x_at = |x: f64| LEFT + x / x_max * (WIDTH - LEFT - RIGHT);
    let y_at = |y: f64| HEIGHT - BOTTOM - y / y_max * (HEIGHT - TOP - BOTTOM);
    let (left, right) = (x_at(0.0), x_at(x_max));
    write_text(text, LEFT, 20.0, "start", &chart.title);
    for y in ticks(y_step, y_max) {
        let at = y_at(y);
        let _ = writeln!(text, "<path d=\"M{left:.1} {at:.1}H{right:.1}\" stroke=\"#dddddd\"/>");
        write_text(text, LEFT - 6.0, at + 4.0, "end", &format!("{y}"));
    }
    for x in ticks(x_step, x_max) {
        write_text(text, x_at(x), HEIGHT - BOTTOM + 16.0, "middle", &format!("{x}"));
    }
    write_text(text, f64::midpoint(left, right), HEIGHT - 10.0, "middle", &chart.x);
    let middle = y_at(y_max / 2.0);
    let _ = writeln!(text, "<g transform=\"rotate(-90 16 {middle:.1})\">");
    write_text(text, 16.0, middle, "middle", &chart.y);
    text.push_str("</g>\n");
    for (index, line) in chart.lines.iter().enumerate() {
        let look = format!(
            "fill=\"none\" stroke-width=\"2\" stroke=\"{}\" stroke-dasharray=\"{}\"",
            COLOURS[index % COLOURS.len()],
            DASHES[index % DASHES.len()]
        );
        let points: Vec<String> =
            line.points.iter().map(|(x, y)| format!("{:.1},{:.1}", x_at(*x), y_at(*y))).collect();
        let _ = writeln!(text, "<polyline {look} points=\"{}\"/>", points.join(" "));
        let at = TOP + 18.0 * (index as f64 + 0.5);
        let (from, to) = (right + 10.0, right + 38.0);
        let _ = writeln!(text, "<path {look} d=\"M{from:.1} {at:.1}H{to:.1}\"/>");
        write_text(text, to + 6.0, at + 4.0, "start", &line.name);
    }
}

fn write_text(text: &mut String, x: f64, y: f64, anchor: &str, what: &str) {
    let what = what.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ =
        writeln!(text, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{what}</text>");
}

/// Distance of ticks, so that there are four to ten up to `max`: 1, 2 or 5 times a power of ten.
fn step(max: f64) -> f64 {
    if max <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf((max / 10.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|n| n * power);
    steps.into_iter().find(|step| max / step <= 10.0).unwrap_or(10.0 * power)
}

fn ticks(step: f64, max: f64) -> impl Iterator<Item = f64> {
    // Multiples, not sums: 0.1 + 0.1 + 0.1 would be labelled 0.30000000000000004.
    let count = (max / step).round() as u32;
    (0..=count).map(move |n| (f64::from(n) * step * 1e9).round() / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_few_and_round() {
        for (max, expected) in [(100.0, 10.0), (7.0, 1.0), (0.35, 0.05), (1234.0, 200.0)] {
            assert!((step(max) - expected).abs() < 1e-9, "{max}: {}", step(max));
        }
        assert_eq!(step(0.0), 1.0);
        assert_eq!(ticks(0.1, 0.3).collect::<Vec<_>>(), [0.0, 0.1, 0.2, 0.3]);
    }

    #[test]
    fn a_chart_has_its_lines_and_no_markup_of_its_text() {
        let line = |name: &str, points: &[(f64, f64)]| Line {
            name: name.to_owned(),
            points: points.to_vec(),
        };
        let chart = Chart {
            title: "a < b & c".to_owned(),
            x: "x".to_owned(),
            y: "y".to_owned(),
            lines: vec![line("one", &[(0.0, 0.0), (10.0, 5.0)]), line("none", &[])],
        };
        let text = document(&[chart]);
        assert!(text.contains("a &lt; b &amp; c") && text.contains(">none</text>"), "{text}");
        assert!(text.contains("points=\"70.0,274.0 610.0,34.0\""), "{text}");
        assert_eq!(text.matches("<polyline").count(), 2);
        assert_eq!(text.matches("<g").count(), text.matches("</g>").count());
    }
}
