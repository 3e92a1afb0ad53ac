//! `vbar doctor`: is this machine fit, and what is missing.
//!
//! A machine without a CUDA device is told so and does not pass, unless a simulated one was asked
//! for by `--device` or `VBAR_DRIVER`. How to get a driver is said here and nowhere else.

use clap::Args;
use serde::Serialize;
use vbar::Result;
use vbar::driver::select::{self, Selection};
use vbar::driver::{DeviceAttribute, DeviceMemory, Driver};
use vbar::units::{DeviceOrdinal, format_bytes};

use crate::arguments;
use crate::output::{Output, Verdict};

const EXAMPLES: &str = "\
Examples:
  vbar doctor
  vbar doctor --device cuda
  vbar doctor --device sim:capacity=8G --json

The exit code is 1 when something is missing, also where auto finds no GPU and only the simulated
device is left.";

/// Say whether this machine is fit, and what is missing
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// auto, cuda[:index] or sim[:options]
    #[arg(long, value_parser = arguments::device, default_value = "auto")]
    device: Selection,
}

#[derive(Serialize)]
struct Report {
    driver: String,
    version: Option<String>,
    devices: Vec<Device>,
    missing: Vec<String>,
    ok: bool,
    /// `auto` found no GPU.
    #[serde(skip)]
    simulated_only: bool,
}

#[derive(Serialize)]
struct Device {
    ordinal: u32,
    name: String,
    compute_capability: Option<String>,
    virtual_memory_management: bool,
    granularity_bytes: Option<u64>,
    total_bytes: u64,
    free_bytes: Option<u64>,
}

/// Runs the command.
pub(crate) fn doctor(arguments: &Arguments, output: &Output) -> Result<Verdict> {
    let report = examine(&arguments.device)?;
    output.object(&report);
    output.line(format!("driver       {}", report.driver));
    output.line(format!("version      {}", report.version.as_deref().unwrap_or("unknown")));
    for device in &report.devices {
        show(device, output);
    }
    for missing in &report.missing {
        output.line(format!("missing      {missing}"));
    }
    output.line(match (report.ok, report.simulated_only) {
        (true, _) => "fit: yes",
        (false, true) => "fit: for the simulated device only; no GPU",
        (false, false) => "fit: no",
    });
    Ok(Verdict::of(report.ok))
}

fn show(device: &Device, output: &Output) {
    let size = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".to_owned(), format_bytes);
    output.line(format!("device {}     {}", device.ordinal, device.name));
    let capability = device.compute_capability.as_deref().unwrap_or("unknown");
    output.line(format!("  compute capability         {capability}"));
    let vmm = if device.virtual_memory_management { "yes" } else { "no" };
    output.line(format!("  virtual memory management  {vmm}"));
    output.line(format!("  granularity                {}", size(device.granularity_bytes)));
    output.line(format!(
        "  memory                     {} free of {}",
        size(device.free_bytes),
        format_bytes(device.total_bytes)
    ));
}

/// A driver that was asked for by name and is not there is a finding, not an error.
fn examine(selection: &Selection) -> Result<Report> {
    let opened = match select::open(selection) {
        Ok(opened) => opened,
        Err(error) if matches!(selection, Selection::Sim(_)) => return Err(error),
        Err(error) => {
            let missing = vec![error.to_string()];
            let driver = "none".to_owned();
            return Ok(Report {
                driver,
                version: None,
                devices: Vec::new(),
                missing,
                ok: false,
                simulated_only: false,
            });
        }
    };
    let driver = &*opened.driver;
    let simulated_only = opened.missing.is_some();
    let mut missing: Vec<String> = opened.missing.into_iter().collect();
    let count = driver.device_get_count()?;
    let devices: Vec<Device> = (0..count)
        .map(|ordinal| describe(driver, DeviceOrdinal(ordinal)))
        .collect::<Result<_>>()?;
    for device in devices.iter().filter(|device| !device.virtual_memory_management) {
        missing.push(format!(
            "device {} has no virtual memory management: everything is offloaded on it",
            device.ordinal
        ));
    }
    let version =
        driver.version().ok().map(|version| format!("{}.{}", version / 1000, version % 1000 / 10));
    let ok = missing.is_empty() && !devices.is_empty();
    Ok(Report { driver: opened.how, version, devices, missing, ok, simulated_only })
}

fn describe(driver: &dyn Driver, ordinal: DeviceOrdinal) -> Result<Device> {
    let attribute = |attribute| driver.device_get_attribute(ordinal, attribute).ok();
    let capability = attribute(DeviceAttribute::ComputeCapabilityMajor)
        .zip(attribute(DeviceAttribute::ComputeCapabilityMinor))
        .map(|(major, minor)| format!("{major}.{minor}"));
    Ok(Device {
        ordinal: ordinal.0,
        name: driver.device_get_name(ordinal)?,
        compute_capability: capability,
        virtual_memory_management: has_virtual_memory(driver, ordinal),
        granularity_bytes: driver.mem_get_allocation_granularity(ordinal).ok(),
        total_bytes: driver.device_total_mem(ordinal)?,
        free_bytes: memory(driver, ordinal).ok().map(|memory| memory.free_bytes),
    })
}

/// Whether anything can be resident on the device. A driver that does not know the attribute has no
/// virtual memory management.
pub(crate) fn has_virtual_memory(driver: &dyn Driver, ordinal: DeviceOrdinal) -> bool {
    let attribute = DeviceAttribute::VirtualMemoryManagementSupported;
    driver.device_get_attribute(ordinal, attribute).is_ok_and(|supported| supported != 0)
}

/// Free memory is told in a context only. The thread has none yet, so it is put back to none.
fn memory(driver: &dyn Driver, ordinal: DeviceOrdinal) -> Result<DeviceMemory> {
    let context = driver.device_primary_ctx_retain(ordinal)?;
    let asked = driver.ctx_set_current(Some(context)).and_then(|()| driver.mem_get_info());
    driver.ctx_set_current(None)?;
    driver.device_primary_ctx_release(ordinal)?;
    Ok(asked?)
}
