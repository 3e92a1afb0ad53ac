//! `vbar bench load`: a model to the device through binding and faults, beside its floors.
//!
//! Each load is as a program's first: nothing of the model is on the device, and no frame is kept
//! from the load before. It is timed from opening the file to the end of its last copy.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use serde::Serialize;
use vbar::host::model_files::Model;
use vbar::model::binding::lay_out;
use vbar::units::format_bytes;
use vbar::{Error, ErrorCode, Fault, Result, Runtime, Vbar};

use super::floor::{self, THREADS, Way};
use super::plot::{self, Chart, Line};
use super::subject::{Settings, Subject, median};
use crate::compute::Compute;
use crate::look::Paint;
use crate::output::{Output, Verdict};
use crate::sources::Sources;

/// Measure how fast a model gets to the device, from a warm and a cold page cache
#[derive(Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    settings: Settings,
}

/// The serialized fields are part of the program's interface. Rates are bytes a second.
#[derive(Serialize)]
struct Report {
    device: String,
    model_bytes: u64,
    tensor_count: usize,
    page_bytes: u64,
    rounds: u32,
    /// From page-locked memory to the device.
    link_rate: f64,
    /// Reading through a warm page cache, and past it, into memory.
    read_rates: Vec<ReadRate>,
    /// Why there are no direct rates; null where there are.
    direct_missing: Option<String>,
    loads: Vec<Load>,
    notes: Vec<String>,
    svg: Option<PathBuf>,
    ok: bool,
}

#[derive(Serialize)]
struct ReadRate {
    threads: usize,
    cached: f64,
    /// Null where files cannot be read past the page cache.
    direct: Option<f64>,
}

/// One way to load, in all rounds.
#[derive(Serialize)]
struct Load {
    /// warm or cold.
    cache: &'static str,
    /// model: all tensors by one fault; tensor: one after the other.
    faults: &'static str,
    /// Median.
    ms: f64,
    rounds_ms: Vec<f64>,
    rate: f64,
    /// The smaller one of the link and the best reading that such a cache allows; null where none
    /// is known.
    floor_rate: Option<f64>,
    over_floor: Option<f64>,
    /// Of the last round.
    sources: Sources,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Cache {
    Warm,
    Cold,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Faults {
    Model,
    Tensor,
}

/// Runs the benchmark.
pub(super) fn load(arguments: &Arguments, output: &Output) -> Result<Verdict> {
    let settings = &arguments.settings;
    let subject = Subject::new(settings)?;
    let device = std::sync::Arc::clone(subject.runtime.device());
    let _scope = device.enter()?;
    let compute = Compute::new(&subject.runtime)?;
    let model = subject.model()?;
    check_fits(&model, &subject)?;
    let bench = Bench { subject: &subject, compute: &compute, model };
    let mut report = bench.report(settings)?;
    report.show(output);
    if let Some(path) = &settings.svg {
        plot::write(path, &[report.chart()], output)?;
        report.svg = Some(path.clone());
    }
    output.object(&report);
    Ok(Verdict::Good)
}

struct Bench<'a> {
    subject: &'a Subject,
    compute: &'a Compute,
    model: Model,
}

impl Bench<'_> {
    fn report(&self, settings: &Settings) -> Result<Report> {
        let link_rate = floor::link_rate(self.compute)?;
        let (read_rates, direct_missing) = self.read_rates()?;
        let best = |of: fn(&ReadRate) -> Option<f64>| {
            let rates = read_rates.iter().filter_map(of);
            rates.fold(None, |best: Option<f64>, rate| Some(best.map_or(rate, |it| it.max(rate))))
        };
        let floors = [best(|it| Some(it.cached)), best(|it| it.direct)];
        let floors = floors.map(|rate| rate.map(|rate| rate.min(link_rate)));
        let (mut loads, mut notes) = (Vec::new(), Vec::new());
        for (cache, floor) in [Cache::Warm, Cache::Cold].into_iter().zip(floors) {
            for faults in [Faults::Model, Faults::Tensor] {
                loads.push(self.rounds(cache, faults, floor, settings.rounds, &mut notes)?);
            }
        }
        Ok(Report {
            device: self.subject.opened.how.clone(),
            model_bytes: self.model.total_bytes(),
            tensor_count: self.model.tensors().len(),
            page_bytes: self.subject.runtime.page_size().bytes(),
            rounds: settings.rounds,
            link_rate,
            read_rates,
            direct_missing,
            loads,
            notes,
            svg: None,
            ok: true,
        })
    }

    fn read_rates(&self) -> Result<(Vec<ReadRate>, Option<String>)> {
        floor::warm(&self.model)?;
        let (mut rates, mut missing) = (Vec::new(), None);
        for threads in THREADS {
            let cached = floor::read_rate(&self.model, Way::Cached, threads)?;
            rates.push(ReadRate { threads, cached, direct: None });
        }
        for rate in &mut rates {
            floor::make_cold(&self.model)?;
            match floor::read_rate(&self.model, Way::Direct, rate.threads) {
                Ok(direct) => rate.direct = Some(direct),
                Err(error) => missing = Some(error.to_string()),
            }
        }
        Ok((rates, missing))
    }

    fn rounds(
        &self,
        cache: Cache,
        faults: Faults,
        floor_rate: Option<f64>,
        rounds: u32,
        notes: &mut Vec<String>,
    ) -> Result<Load> {
        let counters = &self.compute.device().counters;
        let (mut rounds_ms, mut sources) = (Vec::new(), Sources::default());
        for _ in 0..rounds {
            match cache {
                Cache::Warm => floor::warm(&self.model)?,
                Cache::Cold => {
                    let note = floor::make_cold(&self.model)?;
                    notes.extend(note.filter(|note| !notes.contains(note)));
                }
            }
            let before = counters.sources.bytes();
            rounds_ms.push(self.load_once(faults)?);
            sources = counters.sources.bytes().since(before).into();
        }
        let ms = median(&rounds_ms);
        let rate = self.model.total_bytes() as f64 / (ms / 1e3).max(1e-9);
        Ok(Load {
            cache: if cache == Cache::Warm { "warm" } else { "cold" },
            faults: if faults == Faults::Model { "model" } else { "tensor" },
            ms,
            rounds_ms,
            rate,
            floor_rate,
            over_floor: floor_rate.map(|floor| floor / rate.max(1e-9)),
            sources,
        })
    }

    /// Milliseconds of one load.
    fn load_once(&self, faults: Faults) -> Result<f64> {
        let (runtime, stream) = (&self.subject.runtime, self.compute.stream);
        let start = Instant::now();
        let bar = runtime.open_model(self.subject.path())?;
        let tensors = (0..bar.model().tensors().len()).filter(|it| !bar.range(*it).is_empty());
        let mut guards = Vec::new();
        match faults {
            Faults::Model => {
                let ranges: Vec<(&Vbar, _)> =
                    tensors.map(|tensor| (bar.vbar(), bar.range(tensor))).collect();
                match runtime.fault_many(&ranges, stream)? {
                    Fault::Resident(all) => guards = all.into_vec(),
                    _ => return Err(does_not_fit(bar.vbar().bytes(), runtime)),
                }
            }
            Faults::Tensor => {
                for tensor in tensors {
                    match bar.fault(tensor, stream)? {
                        Fault::Resident(guard) => guards.push(guard),
                        _ => return Err(does_not_fit(bar.vbar().bytes(), runtime)),
                    }
                }
            }
        }
        self.compute.synchronize()?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        drop(guards);
        drop(bar);
        runtime.trim(0)?;
        Ok(ms)
    }
}

/// Refuses a model for which there is no room, before the link and the disk are measured.
fn check_fits(model: &Model, subject: &Subject) -> Result<()> {
    let page_size = subject.runtime.page_size();
    let end = lay_out(&model.layout_items(), page_size, 0)?.end;
    let bytes = page_size.pages_for(end).saturating_mul(page_size.bytes());
    match bytes <= subject.runtime.numbers().budget_bytes {
        true => Ok(()),
        false => Err(does_not_fit(bytes, &subject.runtime)),
    }
}

fn does_not_fit(bytes: u64, runtime: &Runtime) -> Error {
    let budget_bytes = runtime.numbers().budget_bytes;
    let text = format!(
        "a model in {} of pages does not fit into the device's {}: take a smaller one \
         (--bytes), or smaller pages (--page-size)",
        format_bytes(bytes),
        format_bytes(budget_bytes)
    );
    Error::new(ErrorCode::InvalidArgument, text)
}

fn gigabytes(rate: f64) -> String {
    format!("{:.2} GB/s", rate / 1e9)
}

impl Report {
    fn show(&self, output: &Output) {
        output.labelled("device", &self.device);
        output.labelled(
            "model",
            format!("{} in {} tensors", format_bytes(self.model_bytes), self.tensor_count),
        );
        output.labelled("link", format!("page-locked to device {}", gigabytes(self.link_rate)));
        for rate in &self.read_rates {
            let direct = rate.direct.map_or_else(|| "-".to_owned(), gigabytes);
            output.labelled(
                "read",
                format!(
                    "{:>2} threads: page cache {:>12}, past it {direct:>12}",
                    rate.threads,
                    gigabytes(rate.cached)
                ),
            );
        }
        let heading = format!(
            "{:<6} {:<7} {:>11} {:>12} {:>12} {:>10}",
            "cache", "faults", "median ms", "rate", "floor", "over floor"
        );
        output.fitted(output.paint(Paint::Dim, &heading));
        for load in &self.loads {
            let floor = load.floor_rate.map_or_else(|| "-".to_owned(), gigabytes);
            let over = load.over_floor.map_or_else(|| "-".to_owned(), |over| format!("{over:.2}x"));
            output.line(format!(
                "{:<6} {:<7} {:>11.1} {:>12} {floor:>12} {over:>10}  {}",
                load.cache,
                load.faults,
                load.ms,
                gigabytes(load.rate),
                load.sources.text()
            ));
        }
        let notes = self.notes.iter().chain(&self.direct_missing);
        notes.for_each(|note| output.labelled("note", note));
        output.line("floor: the slower of the link and the best reading by itself");
    }

    fn chart(&self) -> Chart {
        let (first, last) = (THREADS[0] as f64, THREADS[THREADS.len() - 1] as f64);
        let level = |name: String, rate: f64| Line {
            name,
            points: vec![(first, rate / 1e9), (last, rate / 1e9)],
        };
        let read = |name: &str, of: fn(&ReadRate) -> Option<f64>| Line {
            name: name.to_owned(),
            points: (self.read_rates.iter())
                .filter_map(|rate| Some((rate.threads as f64, of(rate)? / 1e9)))
                .collect(),
        };
        let mut lines = vec![
            read("page cache", |rate| Some(rate.cached)),
            read("O_DIRECT", |rate| rate.direct),
            level("link".to_owned(), self.link_rate),
        ];
        let loads = self.loads.iter().filter(|load| load.faults == "model");
        lines.extend(loads.map(|load| level(format!("load, {}", load.cache), load.rate)));
        Chart {
            title: format!("{} to the device", format_bytes(self.model_bytes)),
            x: "threads that read by themselves".to_owned(),
            y: "GB/s".to_owned(),
            lines,
        }
    }
}
