//! `vbar bench stream`: passes over a model at several budgets, beside their bounds.
//!
//! The compute is a kernel a tensor that reads it and takes a settled time, so that a pass over a
//! model that is resident takes as long as the link takes for the model, times a ratio. The budget
//! is the model's alone: the word that the sums go to has a page of its own on top.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use serde::Serialize;
use vbar::host::model_files::Model;
use vbar::names::quoted;
use vbar::runtime::Statistics;
use vbar::units::{DeviceAddress, format_bytes};
use vbar::{Error, ErrorCode, Fault, Guard, ModelBar, Result, Vbar};

use super::floor;
use super::plot::{self, Chart, Line};
use super::subject::{Settings, Subject, median};
use crate::arguments;
use crate::compute::Compute;
use crate::look::Paint;
use crate::output::{Output, Verdict};
use crate::sources::Sources;

/// Measure passes over a model at several budgets, while a kernel uses each tensor
#[derive(Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    settings: Settings,
    /// Budgets, in percent of the model's pages
    #[arg(long, value_name = "PERCENT", value_delimiter = ',')]
    #[arg(default_value = "10,25,50,75,90,100")]
    #[arg(value_parser = arguments::whole(1..=100u32))]
    budgets: Vec<u32>,
    /// Compute of a pass, by the time that the link takes for the model
    #[arg(long, value_name = "R", default_value_t = 1.0, value_parser = ratio)]
    compute_ratio: f64,
    /// Passes of a round
    #[arg(long, value_name = "N", default_value_t = 2)]
    #[arg(value_parser = arguments::whole(1..=1000u32))]
    passes: u32,
    /// Passes before the first round, the first one included
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = arguments::whole(1..=1000u32))]
    learn: u32,
}

fn ratio(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(ratio) if (0.0..=1000.0).contains(&ratio) => Ok(ratio),
        _ => Err(format!("{} is no ratio: use 0 to 1000", quoted(text))),
    }
}

/// The serialized fields are part of the program's interface.
#[derive(Serialize)]
struct Report {
    device: String,
    model_bytes: u64,
    tensor_count: usize,
    page_bytes: u64,
    model_pages: u64,
    /// Bytes a second from page-locked memory to the device.
    link_rate: f64,
    compute_ratio: f64,
    /// A pass of the same kernels over memory that is resident.
    compute_ms: f64,
    rounds: u32,
    passes: u32,
    rows: Vec<Row>,
    svg: Option<PathBuf>,
    ok: bool,
}

/// One budget. Medians of the rounds, means of the passes.
#[derive(Serialize)]
struct Row {
    budget_percent: u32,
    budget_pages: u64,
    pass_ms: f64,
    rounds_ms: Vec<f64>,
    first_pass_ms: f64,
    /// Over max(compute, model / link).
    first_over_bound: f64,
    streamed_bytes: u64,
    /// Over max(compute, streamed / link).
    over_bound: f64,
    /// Over max(compute, (model - budget) / link).
    over_ideal: f64,
    /// Pages that got a frame in a pass.
    loads: f64,
    /// The model's pages less the budget's.
    least_loads: u64,
    /// Of all rounds together, as what follows.
    offloaded: u64,
    waits: BTreeMap<&'static str, Wait>,
    sources: Sources,
}

#[derive(Serialize, Clone, Copy)]
struct Wait {
    count: u64,
    ms: f64,
}

/// Runs the benchmark.
pub(super) fn stream(arguments: &Arguments, output: &Output) -> Result<Verdict> {
    let settings = &arguments.settings;
    let subject = Subject::new(settings)?;
    let device = Arc::clone(subject.runtime.device());
    let _scope = device.enter()?;
    let compute = Compute::new(&subject.runtime)?;
    device.driver.module_load()?;
    let word = Word::new(&compute)?;
    let sum = word.pinned(&compute)?;
    let (link_rate, model) = (floor::link_rate(&compute)?, subject.model()?);
    let kernels = Kernels {
        compute: &compute,
        word: sum.address(),
        nanos_a_byte: arguments.compute_ratio * 1e9 / link_rate,
    };
    let compute_ms = kernels.resident_ms(&model, settings.rounds)?;
    let bench = Bench { subject: &subject, kernels, link_rate, compute_ms };
    let mut report = bench.report(arguments, &model)?;
    report.show(output);
    if let Some(path) = &settings.svg {
        plot::write(path, &[report.chart()], output)?;
        report.svg = Some(path.clone());
    }
    output.object(&report);
    Ok(Verdict::Good)
}

/// Where the kernels' sums go.
struct Word(Vbar);

impl Word {
    fn new(compute: &Compute) -> Result<Self> {
        compute.runtime().create_bar(1).map(Self)
    }

    fn pinned(&self, compute: &Compute) -> Result<Guard<'_>> {
        resident(&self.0, self.0.bytes(), compute)
    }
}

fn resident<'a>(bar: &'a Vbar, bytes: u64, compute: &Compute) -> Result<Guard<'a>> {
    match bar.fault(0..bytes, compute.stream)? {
        Fault::Resident(guard) => Ok(guard),
        _ => {
            let text = format!("no room on the device for {}", format_bytes(bytes));
            Err(Error::new(ErrorCode::HostMemory, text))
        }
    }
}

/// What uses the tensors.
struct Kernels<'a> {
    compute: &'a Compute,
    word: DeviceAddress,
    nanos_a_byte: f64,
}

impl Kernels<'_> {
    fn launch(&self, source: DeviceAddress, read_bytes: u64, bytes: u64) -> Result<()> {
        let nanos = (bytes as f64 * self.nanos_a_byte) as u64;
        self.compute.add_late_checksum(source, read_bytes, nanos, self.word)
    }

    /// Median time of a pass of the kernels over memory that stays.
    fn resident_ms(&self, model: &Model, rounds: u32) -> Result<f64> {
        let runtime = self.compute.runtime();
        let largest = model.tensors().iter().map(|tensor| tensor.bytes).max().unwrap_or(0);
        let bytes = largest.min(runtime.numbers().budget_bytes / 2).max(1);
        let memory = runtime.create_bar(bytes)?;
        let guard = resident(&memory, bytes, self.compute)?;
        let mut times = Vec::new();
        for _ in 0..rounds {
            let start = Instant::now();
            for tensor in model.tensors() {
                self.launch(guard.address(), tensor.bytes.min(bytes), tensor.bytes)?;
            }
            self.compute.synchronize()?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
        guard.unpin()?;
        Ok(median(&times))
    }
}

struct Bench<'a> {
    subject: &'a Subject,
    kernels: Kernels<'a>,
    link_rate: f64,
    compute_ms: f64,
}

impl Bench<'_> {
    fn report(&self, arguments: &Arguments, model: &Model) -> Result<Report> {
        let mut rows = Vec::new();
        let mut model_pages = 0;
        for percent in &arguments.budgets {
            floor::warm(model)?;
            // Of its own for each budget: an order that was learned is forgotten.
            let bar = self.subject.runtime.open_model(self.subject.path())?;
            model_pages = self.subject.runtime.page_size().pages_for(bar.vbar().bytes());
            rows.push(self.row(arguments, *percent, &bar, model_pages)?);
        }
        Ok(Report {
            device: self.subject.opened.how.clone(),
            model_bytes: model.total_bytes(),
            tensor_count: model.tensors().len(),
            page_bytes: self.subject.runtime.page_size().bytes(),
            model_pages,
            link_rate: self.link_rate,
            compute_ratio: arguments.compute_ratio,
            compute_ms: self.compute_ms,
            rounds: arguments.settings.rounds,
            passes: arguments.passes,
            rows,
            svg: None,
            ok: true,
        })
    }

    fn row(
        &self,
        arguments: &Arguments,
        percent: u32,
        bar: &ModelBar,
        model_pages: u64,
    ) -> Result<Row> {
        let runtime = &self.subject.runtime;
        let page_bytes = runtime.page_size().bytes();
        let wanted = (model_pages * u64::from(percent)).div_ceil(100);
        runtime.set_budget(Some((wanted + 1) * page_bytes))?;
        // Less where the device has less.
        let budget_pages = (runtime.numbers().budget_bytes / page_bytes).saturating_sub(1);
        let (first_pass_ms, _) = self.passes(bar, 1)?;
        self.passes(bar, arguments.learn - 1)?;
        let before = runtime.statistics();
        let (mut rounds_ms, mut offloaded) = (Vec::new(), 0);
        for _ in 0..arguments.settings.rounds {
            let (ms, refused) = self.passes(bar, arguments.passes)?;
            rounds_ms.push(ms / f64::from(arguments.passes));
            offloaded += refused;
        }
        let after = runtime.statistics();
        let count = f64::from(arguments.settings.rounds) * f64::from(arguments.passes);
        let streamed = (after.bytes_filled - before.bytes_filled) as f64 / count;
        let pass_ms = median(&rounds_ms);
        let over = |ms: f64, bytes: f64| {
            let link_ms = bytes / self.link_rate * 1e3;
            ms / self.compute_ms.max(link_ms).max(1e-9)
        };
        let model_bytes = bar.model().total_bytes();
        let missing = model_bytes.saturating_sub(budget_pages * page_bytes);
        Ok(Row {
            budget_percent: percent,
            budget_pages,
            pass_ms,
            rounds_ms,
            first_pass_ms,
            first_over_bound: over(first_pass_ms, model_bytes as f64),
            streamed_bytes: streamed as u64,
            over_bound: over(pass_ms, streamed),
            over_ideal: over(pass_ms, missing as f64),
            loads: (after.pages_mapped - before.pages_mapped) as f64 / count,
            least_loads: model_pages.saturating_sub(budget_pages),
            offloaded,
            waits: waits(&before, &after),
            sources: after.sources.since(before.sources).into(),
        })
    }

    /// Makes passes and waits for their end. Returns milliseconds, and the faults refused.
    fn passes(&self, bar: &ModelBar, count: u32) -> Result<(f64, u64)> {
        let compute = self.kernels.compute;
        let (start, mut refused) = (Instant::now(), 0);
        for _ in 0..count {
            for tensor in 0..bar.model().tensors().len() {
                match bar.fault(tensor, compute.stream)? {
                    Fault::Resident(guard) | Fault::HostMapped(guard) => {
                        self.kernels.launch(guard.address(), guard.bytes(), guard.bytes())?;
                        guard.unpin()?;
                    }
                    Fault::Offloaded(_) => refused += 1,
                }
            }
        }
        compute.synchronize()?;
        Ok((start.elapsed().as_secs_f64() * 1e3, refused))
    }
}

fn waits(before: &Statistics, after: &Statistics) -> BTreeMap<&'static str, Wait> {
    let waits = after.waits.iter().filter_map(|(kind, wait)| {
        let was = before.waited(*kind);
        let ms = (wait.total - was.total).as_secs_f64() * 1e3;
        let count = wait.count - was.count;
        (count > 0).then_some((kind.word(), Wait { count, ms }))
    });
    waits.collect()
}

impl Report {
    fn show(&self, output: &Output) {
        output.labelled("device", &self.device);
        let (size, count, pages) =
            (format_bytes(self.model_bytes), self.tensor_count, self.model_pages);
        output.labelled("model", format!("{size} in {count} tensors, {pages} pages"));
        output.labelled(
            "bounds",
            format!("link {:.2} GB/s, compute {:.2} ms", self.link_rate / 1e9, self.compute_ms),
        );
        let heading = format!(
            "{:>6} {:>10} {:>8} {:>8} {:>10} {:>7} {:>7} {:>7}",
            "budget", "pass ms", "bound x", "ideal x", "streamed", "loads", "N - C", "first x"
        );
        output.fitted(output.paint(Paint::Dim, &heading));
        for row in &self.rows {
            output.line(row.line());
            let waits = row.waits.iter();
            let waits: Vec<String> =
                waits.map(|(kind, it)| format!("{kind} {} ({:.1} ms)", it.count, it.ms)).collect();
            let waits = if waits.is_empty() { "none".to_owned() } else { waits.join(", ") };
            output.line(format!("{:>6} waits {waits}; bytes of {}", "", row.sources.text()));
        }
        output.line("bound: max(compute, streamed / link); ideal: max(compute, N - C / link)");
    }

    fn chart(&self) -> Chart {
        let line = |name: &str, of: &dyn Fn(&Row) -> f64| {
            let point = |row: &Row| (f64::from(row.budget_percent), of(row));
            let mut points: Vec<(f64, f64)> = self.rows.iter().map(point).collect();
            points.sort_by(|left, right| left.0.total_cmp(&right.0));
            Line { name: name.to_owned(), points }
        };
        Chart {
            title: format!("passes over {}", format_bytes(self.model_bytes)),
            x: "budget, % of the pages".to_owned(),
            y: "ms a pass".to_owned(),
            lines: vec![
                line("pass", &|row| row.pass_ms),
                line("bound", &|row| row.pass_ms / row.over_bound.max(1e-9)),
                line("compute", &|_| self.compute_ms),
                line("first pass", &|row| row.first_pass_ms),
            ],
        }
    }
}

impl Row {
    fn line(&self) -> String {
        let offloaded = match self.offloaded {
            0 => String::new(),
            count => format!("  {count} faults OFFLOADED"),
        };
        format!(
            "{:>4} % {:>10.2} {:>8.3} {:>8.3} {:>10} {:>7.1} {:>7} {:>7.2}{offloaded}",
            self.budget_percent,
            self.pass_ms,
            self.over_bound,
            self.over_ideal,
            format_bytes(self.streamed_bytes),
            self.loads,
            self.least_loads,
            self.first_over_bound
        )
    }
}
