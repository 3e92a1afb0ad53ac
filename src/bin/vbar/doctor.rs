//! `vbar doctor`: is this machine fit, and what to do where it is not.
//!
//! Owns the order of what is examined, the report for programs, and what makes a machine unfit: a
//! problem of the driver or of a device, or no GPU where none was said to be simulated. Limits and
//! slow disks are notes. Each part is examined by a module of its own.

mod comfy;
mod device;
mod disk;
mod driver;
mod limits;
mod line;
mod machine;
mod measure;
mod memory;
mod model;
mod python;
mod window;

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;
use vbar::driver::select::{self, Opened, Selection};
use vbar::driver::{DeviceAttribute, Driver};
use vbar::host::allowance::SystemMemory;
use vbar::units::DeviceOrdinal;
use vbar::{Error, ErrorCode, Result};

use crate::arguments;
use crate::help::{DEVICES, Help};
use crate::models;
use crate::output::{Output, Verdict};
use comfy::ComfyFacts;
use device::Device;
use driver::DriverFacts;
use limits::Limits;
use line::{Level, Line, Lines};
use machine::{Machine, Platform};
use measure::Measured;
use memory::Memory;
use model::ModelFacts;

pub(crate) const HELP: Help = Help {
    examples: &[
        ("Everything, with the link's speed", "vbar doctor"),
        ("The file system of a model too", "vbar doctor model.safetensors"),
        ("Insist on a GPU, and measure the second one", "vbar doctor --device cuda:1"),
        (
            "ComfyUI, its Python and how it is started",
            "vbar doctor --comfy path/to/ComfyUI -- --listen --reserve-vram 2",
        ),
        (
            "What is wrong, for a program",
            "vbar doctor --no-measure --json | jq '.lines[] | select(.verdict != \"ok\")'",
        ),
    ],
    notes: &[
        "Each line is ok, a note (it works, but better known) or a problem (the machine is not fit \
         because of it), with what to do behind an arrow. All devices are described, the chosen \
         one is measured: a few copies of at most 64 MiB in either direction, and the allocation \
         of as much page-locked memory; two seconds in all. Of a model's file at most 64 MiB are \
         read past the page cache, for a quarter of a second. Nothing is kept.",
        DEVICES,
    ],
    exit: &[
        (0, "fit: no problem was found"),
        (1, "not fit, also where auto finds no GPU and only the simulated device is left"),
    ],
};

/// Say whether this machine is fit, and what to do where it is not
#[derive(Args)]
#[command(after_help = HELP.text())]
pub(crate) struct Arguments {
    /// A model whose file system is examined too: a safetensors file, the index of a sharded model,
    /// or a folder with one of them
    model: Option<PathBuf>,
    /// auto, cuda[:index] or sim[:options]
    #[arg(long, value_parser = arguments::device, default_value = "auto")]
    device: Selection,
    /// Do not measure the link, page-locking and the model's disk
    #[arg(long)]
    no_measure: bool,
    /// Look at what ComfyUI needs too: its folder, the current one if none is named, its Python,
    /// its models' disk
    #[arg(long, value_name = "FOLDER", num_args = 0..=1)]
    comfy: Option<Option<PathBuf>>,
    /// Arguments that ComfyUI is started with, to be looked at
    #[arg(last = true, requires = "comfy", value_name = "ARGUMENTS")]
    comfy_arguments: Vec<String>,
}

/// The serialized fields are part of the program's interface. What could not be read is null, and
/// a line says why.
#[derive(Serialize)]
struct Report {
    driver: DriverFacts,
    devices: Vec<Device>,
    platform: Option<Platform>,
    memory: Option<Memory>,
    limits: Option<Limits>,
    model: Option<ModelFacts>,
    measured: Option<Measured>,
    comfy: Option<ComfyFacts>,
    lines: Vec<Line>,
    ok: bool,
}

/// Runs the command.
pub(crate) fn doctor(arguments: &Arguments, output: &Output) -> Result<Verdict> {
    // A model that is not there is an error, as for every subcommand, and no finding.
    let model = arguments.model.as_deref().map(models::open).transpose()?;
    let comfy_folder = arguments.comfy.as_ref().map(|named| comfy::folder(named.as_deref()));
    let comfy_folder = comfy_folder.transpose()?;
    let machine = Machine::here();
    let mut lines = Lines::new(output);
    if comfy_folder == Some(None) {
        lines.push(comfy::unnamed());
    }
    let opened = open(&arguments.device)?;
    let driver = examine_driver(&opened, &machine, &mut lines)?;
    let driver_problems = lines.count(Level::Problem);
    let opened = opened.ok();
    let devices = examine_devices(opened.as_ref(), &driver, &machine, &mut lines);
    let platform = noted("machine", Platform::read(&machine), &mut lines);
    if let Some(platform) = &platform {
        let mig = devices.iter().filter(|device| device.is_mig()).map(Device::title);
        lines.extend(platform.lines(&mig.collect::<Vec<_>>()));
    }
    let memory = noted("RAM", SystemMemory::read(&machine.root).map(Memory::new), &mut lines);
    lines.extend(memory.iter().flat_map(Memory::lines));
    let measured_for = (!arguments.no_measure).then_some(disk::PATIENCE);
    let model = model.as_ref().map(|model| ModelFacts::read(model, &machine.root, measured_for));
    let model = model.and_then(|model| noted("model", model, &mut lines));
    let limits = noted("limits", Limits::read(&machine.root), &mut lines);
    let simulated = opened.as_ref().is_some_and(|opened| opened.sim.is_some());
    let file_count = model.as_ref().map_or(0, ModelFacts::file_count);
    lines.extend(limits.iter().flat_map(|limits| limits.lines(simulated, file_count)));
    let chosen = opened.as_ref().and_then(|opened| devices.get(opened.device.0 as usize));
    if let Some(model) = &model {
        let free_bytes = chosen.and_then(|device| device.free_bytes);
        lines.extend(model.lines(free_bytes, memory.as_ref().map(|it| it.allowance_bytes)));
    }
    let measured = match &opened {
        Some(opened) if !arguments.no_measure => {
            measured(opened, chosen, memory.as_ref(), &mut lines)
        }
        _ => None,
    };
    let comfy = comfy_folder.map(|folder| {
        let (own, is_measured) = (&arguments.comfy_arguments, !arguments.no_measure);
        let facts = ComfyFacts::read(folder, own, &machine, memory.as_ref(), is_measured);
        lines.extend(facts.lines(driver.cuda_version(), &machine, memory.as_ref()));
        facts
    });
    let ok = lines.count(Level::Problem) == 0;
    let is_simulated_only = opened.is_some_and(|opened| opened.missing.is_some());
    output.line(conclusion(&lines, is_simulated_only.then_some(driver_problems)));
    let lines = lines.into_shown();
    let report =
        Report { driver, devices, platform, memory, limits, model, measured, comfy, lines, ok };
    output.object(&report);
    Ok(Verdict::of(ok))
}

/// A driver that was asked for by name and is not there is a finding, not an error; a simulated
/// device that cannot be had, or a variable that says nothing, is an error.
fn open(selection: &Selection) -> Result<std::result::Result<Opened, Error>> {
    match select::open(selection) {
        Ok(opened) => Ok(Ok(opened)),
        Err(error) if matches!(selection, Selection::Sim(_)) => Err(error),
        Err(error) if error.code() == ErrorCode::InvalidArgument => Err(error),
        Err(error) => Ok(Err(error)),
    }
}

fn examine_driver(
    opened: &std::result::Result<Opened, Error>,
    machine: &Machine,
    lines: &mut Lines<'_>,
) -> Result<DriverFacts> {
    let facts = DriverFacts::new(opened.as_ref().ok(), machine)?;
    let why = match opened {
        Ok(opened) => opened.missing.clone(),
        Err(error) => Some(error.to_string()),
    };
    match (why, opened.as_ref().err().map(Error::code)) {
        // The driver works, but has no such device.
        (Some(why), Some(ErrorCode::DeviceNotRegistered)) => {
            let advice = "nvidia-smi -L lists them; CUDA_VISIBLE_DEVICES hides and renumbers them";
            lines.push(Line::problem("device", why, advice));
        }
        // Not the driver's fault: there was nobody to ask it.
        (Some(why), Some(ErrorCode::HostMemory)) => {
            lines.push(Line::problem("simulated", why, "ulimit -v unlimited"));
        }
        (Some(why), _) => lines.extend(facts.failure_lines(&why, &machine.root)),
        (None, _) => {}
    }
    if opened.is_ok() {
        lines.extend(facts.lines());
    }
    Ok(facts)
}

fn examine_devices(
    opened: Option<&Opened>,
    driver: &DriverFacts,
    machine: &Machine,
    lines: &mut Lines<'_>,
) -> Vec<Device> {
    let Some(opened) = opened else { return Vec::new() };
    let count = match opened.driver.device_get_count() {
        Ok(count) => count,
        Err(error) => {
            lines.push(Line::problem("devices", error.to_string(), "nvidia-smi -L lists them"));
            0
        }
    };
    let module = driver.module_version.as_deref();
    let mut devices = Vec::new();
    for ordinal in 0..count {
        let ordinal = DeviceOrdinal(ordinal);
        let device = Device::examine(&opened.driver, ordinal, module, &machine.root);
        // What others do with another device is no fault of the one that was chosen.
        let told = device.lines().into_iter().map(|line| match ordinal == opened.device {
            true => line,
            false => line.at_most_a_note(),
        });
        lines.extend(told);
        devices.push(device);
    }
    devices
}

/// What could not be read is a line.
fn noted<T>(topic: &str, read: Result<T>, lines: &mut Lines<'_>) -> Option<T> {
    match read {
        Ok(read) => Some(read),
        Err(error) => {
            let advice = "is /proc mounted, and may this user read it?";
            lines.push(Line::note(topic, error.to_string(), advice));
            None
        }
    }
}

fn measured(
    opened: &Opened,
    chosen: Option<&Device>,
    memory: Option<&Memory>,
    lines: &mut Lines<'_>,
) -> Option<Measured> {
    // Where the allowance is not known, a few buffers are no risk.
    let allowance_bytes = memory.map_or(u64::MAX, |memory| memory.allowance_bytes);
    let means = chosen.and_then(|device| device.means(opened.sim.is_some(), allowance_bytes))?;
    match measure::measure(&opened.driver, means, measure::PATIENCE) {
        Ok(measured) => {
            lines.extend(measured.lines());
            Some(measured)
        }
        Err(error) if matches!(error.code(), ErrorCode::TimedOut | ErrorCode::DeviceLost) => {
            let advice = "nvidia-smi; dmesg | grep -i xid tells what the device reported";
            lines.push(Line::problem("link", error.to_string(), advice));
            None
        }
        Err(error) => {
            let advice = "try again when less is going on, or leave it out with --no-measure";
            lines.push(Line::note("link", format!("not measured: {error}"), advice));
            None
        }
    }
}

/// What it all comes to. `driver_problems`: how many of the first problems say that there is no
/// GPU, where only the simulated device works.
fn conclusion(lines: &Lines<'_>, driver_problems: Option<usize>) -> String {
    let notes = match lines.count(Level::Note) {
        0 => String::new(),
        1 => " (1 note)".to_owned(),
        count => format!(" ({count} notes)"),
    };
    let problems = lines.topics(Level::Problem).skip(driver_problems.unwrap_or(0));
    let problems: Vec<&str> = problems.collect();
    let count = match problems.len() {
        1 => "1 problem".to_owned(),
        count => format!("{count} problems"),
    };
    let named = format!("{count}: {}", problems.join(", "));
    let what = match (problems.is_empty(), driver_problems) {
        (true, None) => return format!("fit: yes{notes}"),
        (true, Some(_)) => "there is no GPU; only the simulated device works".to_owned(),
        (false, Some(_)) => {
            format!("there is no GPU; only the simulated device works; and for {named}")
        }
        (false, None) => format!("for {named}"),
    };
    format!("fit: no, {what}{notes}")
}

/// Whether anything can be resident on the device. A driver that does not know the attribute has no
/// virtual memory management.
pub(crate) fn has_virtual_memory(driver: &dyn Driver, ordinal: DeviceOrdinal) -> bool {
    let attribute = DeviceAttribute::VirtualMemoryManagementSupported;
    driver.device_get_attribute(ordinal, attribute).is_ok_and(|supported| supported != 0)
}
