//! `vbar run`: a model through a budget, pass after pass, every byte checked on the device.
//!
//! Owns the course of a run: open, bind, passes, and in a verified one the budget that is halved in
//! mid-run and restored.
//! How a pass faults is in `pass`, how bytes are checked in `verify`, how much room a run needs in
//! `room`, what is shown in `screen` and `report`.

mod pass;
mod report;
mod room;
mod screen;
mod verify;

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use vbar::driver::select::{self, Opened, Selection};
use vbar::host::model_files::Model;
use vbar::options::{Prefer, Scrub, Threads};
use vbar::units::{PageSize, format_bytes, parse_bytes};
use vbar::{Error, ErrorCode, ModelBar, Result, Runtime, RuntimeOptions};

use crate::arguments::{self, Budget};
use crate::compute::Compute;
use crate::help::{DEVICES, Help, SIZES};
use crate::models;
use crate::output::{Output, Verdict};
use pass::Course;
pub(crate) use report::Report;
use report::{BudgetChange, Done, PassReport};
use room::Room;
use screen::Screen;
use verify::Verifier;

pub(crate) const HELP: Help = Help {
    examples: &[
        (
            "A model through 40 % of its size, every byte verified",
            "vbar run model.safetensors --budget 40% --passes 4 --verify",
        ),
        (
            "On the second GPU, for a program to read",
            "vbar run model.safetensors --budget 8G --device cuda:1 --verify --json",
        ),
        (
            "On a small simulated device whose copies are late",
            "vbar run model.safetensors --budget 64M --device sim:capacity=1G,latency=50us",
        ),
    ],
    notes: &[
        "A run keeps its budget. A verified one of two passes or more is there to check, so the \
         budget is halved between the halves of the middle pass and restored between those of the \
         next, unless --halve-budget says otherwise.",
        "While it runs, a terminal shows where the pages are: # resident, P pinned, i on its way, \
         ! leaving, . absent.",
        SIZES,
        DEVICES,
    ],
    exit: &[
        (0, "every pass went through; with --verify, all bytes were those of the file"),
        (1, "tensors had other bytes than the file"),
    ],
};

/// Stream a model through a budget, tensor by tensor
#[derive(Args)]
#[command(after_help = HELP.text())]
pub(crate) struct Arguments {
    #[command(flatten)]
    settings: Settings,
}

// What a run is of and how it goes, for every subcommand that makes one. Not a doc comment: that
// would become the subcommand's own text.
#[derive(Args)]
pub(crate) struct Settings {
    /// A safetensors file, the index of a sharded model, or a folder with one of them
    model: PathBuf,
    /// Device memory in all, scratch included: bytes, or a part of the model [default: what is
    /// free]
    #[arg(long, value_parser = arguments::budget, value_name = "N|N%")]
    budget: Option<Budget>,
    /// Times that every tensor is used
    #[arg(long, value_name = "N", default_value_t = 2)]
    #[arg(value_parser = arguments::whole(1..=u32::MAX))]
    passes: u32,
    /// auto, cuda[:index] or sim[:options]
    #[arg(long, value_parser = arguments::device, default_value = "auto")]
    device: Selection,
    /// Compare every tensor of every pass, on the device, with the bytes of the file
    #[arg(long)]
    verify: bool,
    /// Whether the budget is halved in mid-run and restored: on or off [default: on with --verify]
    #[arg(long, value_name = "on|off", value_parser = arguments::on_off)]
    halve_budget: Option<bool>,
    /// Take the bytes to compare with from this copy of the model
    #[arg(long, value_name = "MODEL", requires = "verify")]
    expect: Option<PathBuf>,
    /// Bytes of a page [default: 16M, less for a budget of few pages]
    #[arg(long, value_parser = arguments::page_size, value_name = "N")]
    page_size: Option<PageSize>,
    /// Whether the library works on threads of its own, which fetch ahead of need: on or off
    #[arg(long, value_name = "on|off", default_value = "on", value_parser = arguments::threads)]
    library_threads: Threads,
    /// Where the file is read from: auto, ram (through the page cache) or disk (past it)
    #[arg(long, value_name = "auto|ram|disk", default_value = "auto")]
    #[arg(value_parser = arguments::prefer)]
    prefer: Prefer,
    /// Most page-locked host memory, 0 for none [default: what the system can spare]
    #[arg(long, value_parser = parse_bytes, value_name = "N")]
    host_allowance: Option<u64>,
    /// Whether frames are cleared before another page has them: on or off
    #[arg(long, value_name = "on|off", default_value = "off", value_parser = arguments::scrub)]
    scrub: Scrub,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments, output: &Output) -> Result<Verdict> {
    let report = carry_out(&arguments.settings, output)?;
    report.show(output);
    output.object(&report);
    Ok(Verdict::of(report.ok))
}

/// Makes a run, showing what goes on; its report has still to be shown.
///
/// # Errors
/// Those of opening model and device, and of every step.
pub(crate) fn carry_out(arguments: &Settings, output: &Output) -> Result<Report> {
    arguments.check()?;
    let model = models::open_filled(&arguments.model)?;
    let expected = match &arguments.expect {
        Some(path) => Some(models::open_copy(path, &model)?),
        None => None,
    };
    let opened = select::open(&arguments.device)?;
    let budget = arguments.budget.map(|budget| budget.bytes(model.total_bytes()));
    let room = Room::new(&opened, &model, arguments.page_size, arguments.verify);
    let page_size = room.page_size(budget);
    let least_budget = room.least_budget(budget)?;
    if arguments.verify {
        verify::check(&opened, &model, page_size, budget, least_budget)?;
    }
    let headroom_bytes = Some(room::fitting_headroom(&opened)?);
    let options = RuntimeOptions {
        budget_bytes: budget,
        headroom_bytes,
        page_size,
        threads: Some(arguments.library_threads),
        prefer: arguments.prefer,
        host_allowance: arguments.host_allowance,
        scrub: arguments.scrub,
        ..RuntimeOptions::default()
    };
    let runtime = Runtime::open(Arc::clone(&opened.driver), opened.device, options)?;
    let screen = Screen::new(output);
    screen.labelled("device", &opened.how);
    let checksums = match arguments.verify {
        true => Some(verify::checksums(&model, expected.as_ref().unwrap_or(&model), &screen)?),
        false => None,
    };
    let course = Plan {
        pass_count: arguments.passes,
        halves_budget: arguments.halve_budget.unwrap_or(arguments.verify) && arguments.passes >= 2,
        least_budget,
    };
    stream(&opened, &runtime, model, checksums, course, &screen)
}

impl Settings {
    /// Refuses what is asked for and could not be done, before anything is read.
    fn check(&self) -> Result<()> {
        if self.halve_budget == Some(true) && self.passes < 2 {
            let text = "--halve-budget on: the budget is halved in one pass and restored in the \
                        next, so --passes must be 2 or more";
            return Err(Error::new(ErrorCode::InvalidArgument, text));
        }
        Ok(())
    }
}

/// What a run comes to.
#[derive(Clone, Copy)]
struct Plan {
    pass_count: u32,
    /// Only a run of two passes or more can.
    halves_budget: bool,
    /// In which each tensor fits.
    least_budget: u64,
}

/// All passes, between opening and closing what they need.
fn stream(
    opened: &Opened,
    runtime: &Runtime,
    model: Model,
    checksums: Option<Vec<u64>>,
    plan: Plan,
    screen: &Screen<'_>,
) -> Result<Report> {
    let device = Arc::clone(runtime.device());
    let _scope = device.enter()?;
    let bar = runtime.bind_model(model)?;
    let compute = Compute::new(runtime)?;
    let mut verifier = match checksums {
        Some(expected) => Some(Verifier::new(&compute, expected)?),
        None => None,
    };
    let budget_bytes = match runtime.budget_settings().0 {
        Some(bytes) => bytes,
        None => runtime.numbers().budget_bytes,
    };
    announce(&bar, budget_bytes, plan, screen);
    let half = Halving::new(runtime, budget_bytes, verifier.as_ref(), plan);
    let pass_count = plan.pass_count;
    let course = Course { bar: &bar, compute: &compute, screen };
    let mut passes = Vec::new();
    for number in 0..pass_count {
        screen.begin(number, pass_count, bar.model().tensors().len());
        let counted = course.pass(verifier.as_mut(), || half.between_halves(number, screen))?;
        let report = PassReport::from(counted);
        screen.end(&format!("pass {}/{pass_count}", number + 1), &report.line(verifier.is_some()));
        passes.push(report);
    }
    let (verifier, budget_changes) = (verifier.as_ref(), half.changes.take());
    // What the engine knew; then it ends, so that the counts are of the passes and stand still.
    let (threads, engine) = (runtime.threads(), runtime.engine_numbers());
    runtime.set_threads(Threads::Off)?;
    let engine = (threads == Threads::On).then_some(engine);
    Ok(Report::new(Done {
        opened,
        bar: &bar,
        verifier,
        budget_bytes,
        least_budget: plan.least_budget,
        budget_changes,
        passes,
        engine,
    }))
}

fn announce(bar: &ModelBar, budget_bytes: u64, plan: Plan, screen: &Screen<'_>) {
    let (model, page_size) = (bar.model(), bar.vbar().runtime().page_size());
    screen.labelled(
        "model",
        format!(
            "{}: {} in {} tensors",
            model.name(),
            format_bytes(model.total_bytes()),
            model.tensors().len()
        ),
    );
    let course = match plan.halves_budget {
        true => "; halved in mid-run, to check that too (--halve-budget off keeps it)",
        false => "",
    };
    screen.labelled(
        "budget",
        format!(
            "{} in pages of {}, scratch included{course}",
            format_bytes(budget_bytes),
            format_bytes(page_size.bytes())
        ),
    );
}

/// The budget's way down and up again.
struct Halving<'a> {
    runtime: &'a Runtime,
    full: Option<u64>,
    half: u64,
    /// The pass in whose middle the budget goes down; it comes back in the middle of the next.
    at: Option<u32>,
    changes: RefCell<Vec<BudgetChange>>,
}

impl<'a> Halving<'a> {
    fn new(
        runtime: &'a Runtime,
        budget_bytes: u64,
        verifier: Option<&Verifier>,
        plan: Plan,
    ) -> Self {
        // The scratch pages are pinned: less than them cannot be had.
        let least = verifier.map_or(0, Verifier::scratch_bytes);
        let half = (budget_bytes / 2).max(least);
        let at = plan.halves_budget.then(|| (plan.pass_count - 1) / 2);
        Self { runtime, full: runtime.budget_settings().0, half, at, changes: RefCell::default() }
    }

    fn between_halves(&self, number: u32, screen: &Screen<'_>) -> Result<()> {
        let Some(at) = self.at else { return Ok(()) };
        if number == at {
            screen.labelled("budget", format!("halved to {}", format_bytes(self.half)));
            return self.change(number, Some(self.half));
        }
        if number == at + 1 {
            let full = self.full.map_or_else(|| "what is free".to_owned(), format_bytes);
            screen.labelled("budget", format!("restored to {full}"));
            return self.change(number, self.full);
        }
        Ok(())
    }

    fn change(&self, number: u32, budget_bytes: Option<u64>) -> Result<()> {
        self.changes.borrow_mut().push(BudgetChange { pass: number + 1, budget_bytes });
        self.runtime.set_budget(budget_bytes)
    }
}
