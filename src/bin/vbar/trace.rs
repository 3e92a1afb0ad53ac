//! `vbar trace`: a run that records what the library does, for Perfetto.
//!
//! Owns the file and the totals by kind. The run is that of `vbar run`. A file that is there and no
//! trace is not replaced.

use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use vbar::host::output;
use vbar::trace::{FILE_START, Trace};
use vbar::units::format_bytes;
use vbar::{Error, Result, trace};

use crate::arguments;
use crate::help::{DEVICES, Help, SIZES};
use crate::output::{Output, Verdict};
use crate::run;
use crate::written;

pub(crate) const HELP: Help = Help {
    examples: &[
        (
            "Two passes through 40 % of the model's size, then open the file in ui.perfetto.dev",
            "vbar trace model.safetensors --output trace.json --budget 40%",
        ),
        (
            "On a simulated device, the totals for a program to read",
            "vbar trace model.safetensors --output trace.json --device sim --json",
        ),
    ],
    notes: &[
        "The file has the spans of each thread (faults, claims, maps, reads, copies, waits, \
         evictions), memory over time, and an arrow from each fault to its unpin. Times of spans \
         within others count for both. A copy's span is its enqueuing.",
        "A trace that is there is replaced; any other file is not.",
        SIZES,
        DEVICES,
    ],
    exit: &[
        (0, "every pass went through, and the trace is written"),
        (1, "tensors had other bytes than the file; the trace is written"),
    ],
};

/// Run as `vbar run` does, and write a trace of what the library did
#[derive(Args)]
#[command(after_help = HELP.text())]
pub(crate) struct Arguments {
    #[command(flatten)]
    run: run::Settings,
    /// File to write, in the trace event format of Perfetto and Chrome
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Spans to keep, of about 80 bytes each; more are counted and dropped
    #[arg(long, value_name = "N", default_value_t = 1 << 20)]
    #[arg(value_parser = arguments::whole(1..=usize::MAX))]
    spans: usize,
}

const KIND: output::Kind = output::Kind { name: "trace", start: FILE_START };

/// Spans of one kind.
#[derive(Serialize)]
struct Total {
    count: u64,
    ms: f64,
    bytes: u64,
}

#[derive(Serialize)]
struct Report<'a> {
    output: &'a Path,
    spans: u64,
    dropped: u64,
    threads: usize,
    covered_ms: f64,
    kinds: BTreeMap<&'static str, Total>,
    run: &'a run::Report,
    ok: bool,
}

/// Runs the command.
pub(crate) fn trace(arguments: &Arguments, output: &Output) -> Result<Verdict> {
    let path = &arguments.output;
    written::check(path, &KIND)?;
    trace::start(arguments.spans)?;
    let report = run::carry_out(&arguments.run, output);
    let trace = trace::stop();
    // One of a run that failed tells most.
    if trace.span_count() > 0 || report.is_ok() {
        write(&trace, path)?;
    }
    let report = report?;
    report.show(output);
    show(&trace, path, output);
    output.object(&Report {
        output: path,
        spans: trace.span_count(),
        dropped: trace.dropped(),
        threads: trace.threads().len(),
        covered_ms: milliseconds(trace.covered()),
        kinds: totals(&trace),
        run: &report,
        ok: report.ok,
    });
    Ok(Verdict::of(report.ok))
}

fn write(trace: &Trace, path: &Path) -> Result<()> {
    let written = output::create(path).and_then(|file| {
        let mut file = BufWriter::new(file);
        trace.write_chrome_json(&mut file)?;
        file.flush()
    });
    written.map_err(|error| Error::io(path.display(), &error))
}

fn show(trace: &Trace, path: &Path, output: &Output) {
    let dropped = match trace.dropped() {
        0 => "none dropped".to_owned(),
        dropped => format!("{dropped} DROPPED: raise --spans"),
    };
    let threads = match trace.threads().len() {
        1 => "1 thread".to_owned(),
        count => format!("{count} threads"),
    };
    output.labelled(
        "trace",
        format!(
            "{}: {} spans of {threads} over {:.1} ms, {dropped}",
            path.display(),
            trace.span_count(),
            milliseconds(trace.covered())
        ),
    );
    let heading = ["kind", "times", "ms in all", "bytes", "what it is"];
    let [kind, times, ms, bytes, what] = heading;
    output.line(format!("{kind:<13} {times:>8} {ms:>11} {bytes:>11}  {what}"));
    for total in trace.totals() {
        let bytes = if total.bytes == 0 { "-".to_owned() } else { format_bytes(total.bytes) };
        let (kind, ms) = (total.kind.word(), milliseconds(total.time));
        let (times, what) = (total.count, total.kind.meaning());
        output.line(format!("{kind:<13} {times:>8} {ms:>11.3} {bytes:>11}  {what}"));
    }
}

fn totals(trace: &Trace) -> BTreeMap<&'static str, Total> {
    let totals = trace.totals().into_iter().map(|total| {
        let (count, bytes) = (total.count, total.bytes);
        (total.kind.word(), Total { count, ms: milliseconds(total.time), bytes })
    });
    totals.collect()
}

fn milliseconds(time: std::time::Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
