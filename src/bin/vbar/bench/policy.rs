//! `vbar bench policy`: loads and time of each policy on cycles that programs have, computed.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use vbar::Result;
use vbar::model::placement::{Ranking, TooFewFrames};
use vbar::model::policy_model::{Policy, Workload, run, workloads};
use vbar::names::quoted;
use vbar::units::MIB;

use super::plot::{self, Chart, Line};
use crate::arguments;
use crate::look::Paint;
use crate::output::{Output, Verdict};

/// Pages of the workloads.
const PAGE_BYTES: u64 = 16 * MIB;

/// Compute what each policy loads, and how long that takes
#[derive(Args)]
pub(super) struct Arguments {
    /// Rate of the link, in GB (a billion bytes) a second
    #[arg(long, value_name = "GB", default_value_t = 55.0, value_parser = rate)]
    link: f64,
    /// Budgets, in percent of the workload's pages
    #[arg(
        long,
        value_name = "PERCENT",
        value_delimiter = ',',
        default_value = "10,25,50,75,90,100"
    )]
    #[arg(value_parser = arguments::whole(1..=100u32))]
    budgets: Vec<u32>,
    /// Write a plot of the times to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// The serialized fields are part of the program's interface.
#[derive(Serialize)]
struct Report {
    link_gb_s: f64,
    page_bytes: u64,
    workloads: Vec<WorkloadReport>,
    svg: Option<PathBuf>,
    ok: bool,
}

#[derive(Serialize)]
struct WorkloadReport {
    name: &'static str,
    text: &'static str,
    pages: u32,
    compute_ms: f64,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    policy: &'static str,
    budget_percent: u32,
    frames: u32,
    /// Frames that the workload needs, where it cannot run at all.
    frames_needed: Option<u32>,
    loads_per_cycle: Option<f64>,
    cycle_ms: Option<f64>,
    /// Time over max(compute, least that must be loaded at link rate): Belady's own time.
    over_optimum: Option<f64>,
    streaming_frames: Option<u32>,
}

fn rate(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if (0.001..=10_000.0).contains(&rate) => Ok(rate),
        _ => Err(format!("{} is no rate: use GB a second, 0.001 to 10000", quoted(text))),
    }
}

/// Runs the benchmark.
pub(super) fn policy(arguments: &Arguments, output: &Output) -> Result<Verdict> {
    plot::check(arguments.svg.as_deref())?;
    let page_ns = (PAGE_BYTES as f64 / arguments.link).max(1.0) as u64;
    let workloads = workloads(page_ns);
    let reports: Vec<WorkloadReport> =
        workloads.iter().map(|workload| measured(workload, &arguments.budgets)).collect();
    reports.iter().for_each(|report| show(report, &arguments.budgets, output));
    output.line(
        "pages loaded a pass, and time as a multiple of belady's, which no policy loads less than; \
         spread is what vbar does",
    );
    if let Some(path) = &arguments.svg {
        plot::write(path, &charts(&reports), output)?;
    }
    output.object(&Report {
        link_gb_s: arguments.link,
        page_bytes: PAGE_BYTES,
        workloads: reports,
        svg: arguments.svg.clone(),
        ok: true,
    });
    Ok(Verdict::Good)
}

fn measured(workload: &Workload, budgets: &[u32]) -> WorkloadReport {
    let ranking = Ranking::new(workload.cycle.clone());
    let pages = ranking.page_count();
    let mut rows = Vec::new();
    for budget in budgets {
        let frames = u32::try_from(u64::from(pages) * u64::from(*budget) / 100).unwrap_or(pages);
        let optimum = run(Policy::Belady, &ranking, frames).map_or(0.0, |flow| flow.cycle_ns);
        for policy in Policy::ALL {
            let (flow, frames_needed) = match run(policy, &ranking, frames) {
                Ok(flow) => (Some(flow), None),
                Err(TooFewFrames { needed }) => (None, Some(needed)),
            };
            rows.push(Row {
                policy: policy.name(),
                budget_percent: *budget,
                frames,
                frames_needed,
                loads_per_cycle: flow.map(|flow| flow.loads),
                cycle_ms: flow.map(|flow| flow.cycle_ns / 1e6),
                over_optimum: flow.map(|flow| flow.cycle_ns / optimum.max(1.0)),
                streaming_frames: flow.map(|flow| flow.streaming_frames),
            });
        }
    }
    WorkloadReport {
        name: workload.name,
        text: workload.text,
        pages,
        compute_ms: workload.cycle.compute_ns() as f64 / 1e6,
        rows,
    }
}

/// Two figures a budget: loads in a cycle, and time over the optimum's. On terminals too narrow
/// for all budgets, as many as fit on a line.
fn show(report: &WorkloadReport, budgets: &[u32], output: &Output) {
    const LABEL: usize = 8;
    const COLUMN: usize = 14;
    let WorkloadReport { name, text, pages, compute_ms, .. } = report;
    output.fitted(output.paint(Paint::Heading, name));
    output.line(format!("{text}; {pages} pages, {compute_ms:.1} ms of compute"));
    let columns = output.columns().unwrap_or(100).saturating_sub(LABEL) / COLUMN;
    for budgets in budgets.chunks(columns.max(1)) {
        let mut line = format!("{:<LABEL$}", "budget");
        for budget in budgets {
            let _ = write!(line, "{:>COLUMN$}", format!("{budget} %"));
        }
        output.fitted(output.paint(Paint::Dim, &line));
        for policy in Policy::ALL {
            let mut line = format!("{:<LABEL$}", policy.name());
            for budget in budgets {
                let is_cell =
                    |row: &&Row| row.policy == policy.name() && row.budget_percent == *budget;
                let row = report.rows.iter().find(is_cell);
                let _ = write!(line, "{:>COLUMN$}", row.map(cell).unwrap_or_default());
            }
            output.fitted(line);
        }
    }
    output.fitted("");
}

fn cell(row: &Row) -> String {
    match (row.loads_per_cycle, row.over_optimum) {
        (Some(loads), Some(over)) => format!("{loads:.0} {over:.2}x"),
        _ => "-".to_owned(),
    }
}

fn charts(reports: &[WorkloadReport]) -> Vec<Chart> {
    let chart = |report: &WorkloadReport| Chart {
        title: format!("{}: {}", report.name, report.text),
        x: "budget, % of the pages".to_owned(),
        y: "ms a cycle".to_owned(),
        lines: Policy::ALL.iter().map(|policy| line(report, policy.name())).collect(),
    };
    reports.iter().map(chart).collect()
}

fn line(report: &WorkloadReport, policy: &str) -> Line {
    let rows = report.rows.iter().filter(|row| row.policy == policy);
    let point = |row: &Row| Some((f64::from(row.budget_percent), row.cycle_ms?));
    let mut points: Vec<(f64, f64)> = rows.filter_map(point).collect();
    points.sort_by(|left, right| left.0.total_cmp(&right.0));
    Line { name: policy.to_owned(), points }
}
