//! Which driver and device a program means by a word: `auto`, `cuda:1`, `sim:capacity=8G`.
//!
//! Owns the words and the order of preference. Every answer carries a sentence that says what was
//! chosen and why, so that nobody takes a simulated device for a real one.

use std::sync::{Arc, Weak};

use super::Driver;
use super::cuda::Cuda;
use super::sim::{Sim, SimOptions};
use super::sys;
use crate::error::{Error, ErrorCode, Result};
use crate::names::quoted;
use crate::process;
use crate::sync::Mutex;
use crate::units::DeviceOrdinal;

/// The environment variable that says what `auto` means, see [`process::variable`].
pub const VARIABLE: &str = "VBAR_DRIVER";

/// What follows the error of a driver that is there and does not work.
pub const DOCTOR: &str = "`vbar doctor` tells what to do";

/// Where a missing driver's text turns to the simulated device.
const SIM_ADVICE: &str = ". With no GPU, ";

/// What a user asked for.
#[derive(Clone, PartialEq, Debug)]
pub enum Selection {
    /// What [`VARIABLE`] says when it is set; else CUDA where there is a device, else simulated.
    Auto,
    /// A device of the CUDA driver, or an error.
    Cuda(DeviceOrdinal),
    /// A simulated device.
    Sim(SimOptions),
}

/// A driver that was opened, and the device meant.
pub struct Opened {
    /// The door.
    pub driver: Arc<dyn Driver>,
    /// The device.
    pub device: DeviceOrdinal,
    /// The same driver when it is simulated, for those who make trouble on it.
    pub sim: Option<Arc<Sim>>,
    /// What was chosen and why, a sentence without a full stop.
    pub how: String,
    /// Why `auto` did not take CUDA, where it did not and nobody told it not to, and what to do.
    pub missing: Option<String>,
}

impl Selection {
    /// Parses `auto`, `cuda`, `cuda:1`, `sim` or `sim:` with the options of
    /// [`SimOptions::parse`].
    ///
    /// # Errors
    /// `InvalidArgument` that quotes the text and lists the words.
    pub fn parse(text: &str) -> Result<Self> {
        let (word, rest) = match text.split_once(':') {
            Some((word, rest)) => (word, Some(rest)),
            None => (text, None),
        };
        let wrong = || {
            let text = quoted(text);
            let text = format!("{text} is no device: use auto, cuda[:index] or sim[:options]");
            Error::new(ErrorCode::InvalidArgument, text)
        };
        match (word, rest) {
            ("auto", None) => Ok(Self::Auto),
            ("cuda", rest) => {
                let ordinal = rest.unwrap_or("0").parse().map_err(|_| wrong())?;
                Ok(Self::Cuda(DeviceOrdinal(ordinal)))
            }
            ("sim", rest) => SimOptions::parse(rest.unwrap_or_default()).map(Self::Sim),
            _ => Err(wrong()),
        }
    }
}

/// Opens what was selected.
///
/// # Errors
/// `DriverMissing` or `Driver` when CUDA was asked for and is not there, `DeviceNotRegistered` for
/// an ordinal that the driver does not have, `InvalidArgument` for a [`VARIABLE`] that says
/// nothing, `HostMemory` when the system does not give a simulated device its addresses,
/// `ProcessEnding`. `Auto` without the variable never fails for want of a driver.
pub fn open(selection: &Selection) -> Result<Opened> {
    let entering = process::enter()?;
    let variable = process::variable(VARIABLE).map(|text| text.to_string_lossy().into_owned());
    let opened = open_with(selection, variable.as_deref(), Cuda::open)?;
    entering.stay();
    Ok(opened)
}

/// As [`open`], through drivers that the process shares: one CUDA driver, and a simulated one for
/// each set of options, as long as anybody has it.
///
/// # Errors
/// As [`open`].
pub fn open_shared(selection: &Selection) -> Result<Opened> {
    let entering = process::enter()?;
    let opened = find_or_open(selection)?;
    entering.stay();
    Ok(opened)
}

fn find_or_open(selection: &Selection) -> Result<Opened> {
    static SIMULATED: Mutex<Vec<Weak<Sim>>> = Mutex::new(Vec::new());
    let selection = match (selection, from_environment()) {
        (Selection::Auto, Some(named)) => named?,
        _ => selection.clone(),
    };
    match &selection {
        Selection::Cuda(device) => cuda(shared_cuda()?, *device, "asked for"),
        Selection::Auto => automatic(shared_cuda),
        Selection::Sim(options) => {
            let mut shared = SIMULATED.lock();
            shared.retain(|sim| sim.strong_count() > 0);
            let alike =
                shared.iter().filter_map(Weak::upgrade).find(|sim| sim.options() == options);
            if let Some(sim) = alike {
                return Ok(opened_sim(sim, "asked for"));
            }
            let opened = sim(options.clone(), "asked for")?;
            shared.extend(opened.sim.as_ref().map(Arc::downgrade));
            Ok(opened)
        }
    }
}

/// The driver, once it could be opened.
fn shared_cuda() -> Result<Arc<Cuda>> {
    static SHARED: Mutex<Option<Arc<Cuda>>> = Mutex::new(None);
    let mut shared = SHARED.lock();
    if let Some(cuda) = &*shared {
        return Ok(Arc::clone(cuda));
    }
    Ok(Arc::clone(shared.insert(Cuda::open()?)))
}

/// What [`VARIABLE`] says, if it is set.
///
/// # Errors
/// `InvalidArgument` when it says nothing that is known.
#[must_use]
pub fn from_environment() -> Option<Result<Selection>> {
    let text = process::variable(VARIABLE)?;
    Some(Selection::parse(&text.to_string_lossy()).map_err(|error| error.context(VARIABLE)))
}

fn open_with(
    selection: &Selection,
    variable: Option<&str>,
    open_cuda: impl Fn() -> Result<Arc<Cuda>>,
) -> Result<Opened> {
    match selection {
        Selection::Cuda(device) => cuda(open_cuda()?, *device, "asked for"),
        Selection::Sim(options) => sim(options.clone(), "asked for"),
        Selection::Auto => match variable.filter(|text| !text.is_empty()) {
            Some(text) => {
                let named = Selection::parse(text).map_err(|error| error.context(VARIABLE))?;
                let why = format!("{VARIABLE} says so");
                match named {
                    Selection::Auto => automatic(open_cuda),
                    Selection::Cuda(device) => cuda(open_cuda()?, device, &why),
                    Selection::Sim(options) => sim(options, &why),
                }
            }
            None => automatic(open_cuda),
        },
    }
}

fn automatic(open_cuda: impl Fn() -> Result<Arc<Cuda>>) -> Result<Opened> {
    let (short, missing) = match open_cuda() {
        Ok(driver) if driver.device_get_count()? > 0 => {
            return cuda(driver, DeviceOrdinal(0), "a CUDA driver with a device is here");
        }
        Ok(_) => {
            let why = "the CUDA driver has no device";
            (why.to_owned(), why.to_owned())
        }
        Err(error) => {
            let text = error.to_string();
            // It has been chosen: nobody needs to be told how to.
            let advice = text.split_once(SIM_ADVICE).map_or(&*text, |(before, _)| before);
            (why_in_short(&error), format!("no CUDA device: {advice}"))
        }
    };
    let how = format!("simulated device ({short})");
    let sim = sim(SimOptions::default(), &short).map_err(|error| error.context(&how))?;
    Ok(Opened { missing: Some(missing), how, ..sim })
}

/// One short clause; the advice is in [`Opened::missing`].
fn why_in_short(error: &Error) -> String {
    let text = error.to_string();
    if error.code() == ErrorCode::DriverMissing && text.contains("No such file") {
        return format!("no CUDA driver: {} not found", sys::LIBRARY);
    }
    let first = text.split([';', '\n']).next().unwrap_or_default();
    let first = first.split(". ").next().unwrap_or_default();
    let what = if error.code() == ErrorCode::DriverMissing { "driver" } else { "device" };
    format!("no CUDA {what}: {}", first.trim_end_matches('.'))
}

fn cuda(driver: Arc<Cuda>, device: DeviceOrdinal, why: &str) -> Result<Opened> {
    let count = driver.device_get_count()?;
    if device.0 >= count {
        let text = format!(
            "device {device} does not exist: the CUDA driver has {count}; nvidia-smi -L lists \
             them, CUDA_VISIBLE_DEVICES may hide some"
        );
        return Err(Error::new(ErrorCode::DeviceNotRegistered, text));
    }
    let name = driver.device_get_name(device)?;
    let how = format!("{name}, device {device} of {} ({why})", driver.description());
    Ok(Opened { driver, device, sim: None, how, missing: None })
}

fn sim(options: SimOptions, why: &str) -> Result<Opened> {
    Ok(opened_sim(Sim::try_new(options)?, why))
}

fn opened_sim(sim: Arc<Sim>, why: &str) -> Opened {
    let how = format!("a simulated device in host memory, {} ({why})", sim.driver().description());
    let (driver, device) = (sim.driver(), DeviceOrdinal(0));
    Opened { driver, device, sim: Some(sim), how, missing: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MIB;

    fn nothing() -> Result<Arc<Cuda>> {
        Err(Error::new(ErrorCode::DriverMissing, "libcuda.so.1 is not here"))
    }

    #[test]
    fn words_are_parsed() {
        assert_eq!(Selection::parse("auto").unwrap(), Selection::Auto);
        assert_eq!(Selection::parse("cuda:3").unwrap(), Selection::Cuda(DeviceOrdinal(3)));
        assert_eq!(Selection::parse("sim").unwrap(), Selection::Sim(SimOptions::default()));
        let Selection::Sim(options) =
            Selection::parse("sim:capacity=64M,fail=mem_map:3:2").unwrap()
        else {
            panic!("a simulated device was named");
        };
        assert_eq!((options.capacity, options.fail.len()), (64 * MIB, 1));
        for wrong in ["", "gpu", "cuda:x", "auto:1", "sim:colour=red", "CUDA"] {
            let error = Selection::parse(wrong).unwrap_err();
            assert_eq!(error.code(), ErrorCode::InvalidArgument, "{wrong}");
        }
    }

    #[test]
    fn without_a_driver_auto_is_simulated_and_says_why() {
        let nowhere = || Cuda::open_library(std::ffi::OsStr::new("/nowhere/libcuda.so.1"));
        let opened = open_with(&Selection::Auto, None, nowhere).unwrap();
        assert!(opened.sim.is_some());
        assert_eq!(opened.how, "simulated device (no CUDA driver: libcuda.so.1 not found)");
        let missing = opened.missing.unwrap();
        assert!(missing.contains("Install the NVIDIA driver"), "{missing}");
        assert!(!missing.contains("simulated") && !missing.contains(VARIABLE), "{missing}");
        let error = open_with(&Selection::Cuda(DeviceOrdinal(0)), None, nothing).err().unwrap();
        assert_eq!(error.code(), ErrorCode::DriverMissing);
    }

    #[test]
    fn why_there_is_no_device_is_one_clause() {
        let why = |code, text: &str| why_in_short(&Error::new(code, text));
        let text = "libcuda.so.1 has no symbol cuInit: it is older. Install another";
        let short = "no CUDA driver: libcuda.so.1 has no symbol cuInit: it is older";
        assert_eq!(why(ErrorCode::DriverMissing, text), short);
        let short = "no CUDA device: libcuda.so.1: cuInit failed";
        assert_eq!(why(ErrorCode::Driver, "libcuda.so.1: cuInit failed; more"), short);
    }

    #[test]
    fn the_variable_says_what_auto_means() {
        let opened = open_with(&Selection::Auto, Some("sim:capacity=32M"), nothing).unwrap();
        assert_eq!(opened.driver.device_total_mem(opened.device).unwrap(), 32 * MIB);
        assert!(opened.how.contains(VARIABLE));
        let asked = Selection::parse("sim:capacity=16M").unwrap();
        let opened = open_with(&asked, Some("sim:capacity=32M"), nothing).unwrap();
        assert_eq!(opened.driver.device_total_mem(opened.device).unwrap(), 16 * MIB);
        let error = open_with(&Selection::Auto, Some("gpu"), nothing).err().unwrap();
        assert!(error.to_string().starts_with(VARIABLE), "{error}");
    }
}
