//! Texts that a user gives: devices, their options, sizes, budgets, and the program's other
//! arguments. A text is taken or refused with one line that says why; what was taken is written and
//! read back as the same; and a device that it describes can be opened, or not, with nothing left.

use std::time::Duration;

use vbar::driver::code::DriverCode;
use vbar::driver::select::Selection;
use vbar::driver::sim::{OnViolation, Sim, SimOptions, Verb};
use vbar::host::safetensors::{Dtype, tensor_bytes};
use vbar::names::{natural_order, quoted};
use vbar::options::{RuntimeOptions, Threads};
use vbar::units::{DeviceOrdinal, GIB, MIB, PageSize, Stream, parse_bytes};
use vbar::{ErrorCode, Fault, Runtime};

use super::Target;
use super::check_words;

/// The program's own parsers.
#[path = "../../../src/bin/vbar/arguments.rs"]
mod arguments;

pub(crate) const TARGET: Target = Target {
    name: "options",
    run,
    words: &[
        "sim:",
        "auto",
        "cuda:",
        "capacity=",
        "devices=",
        "granularity=",
        "seed=",
        "latency=",
        "bandwidth=",
        "slow_copy=",
        "address_space=",
        "mappings=",
        "jitter=",
        "poison=",
        "vmm=",
        "host_vmm=",
        "ctx_event=",
        "peers=",
        "read_only=",
        "checked=",
        "hang=mem_release",
        "on_violation=",
        "lose",
        "record",
        "fail_rate=",
        "fail=mem_map:1:2",
        "fail=mem_create:",
        ":600",
        ":0",
        "64M",
        "64K",
        "16T",
        "1.5G",
        "8388608T",
        "us",
        "ms",
        "s",
        "%",
        ",",
        "=",
        ":",
        "nan",
        "inf",
        "-",
        "+",
        "\u{1b}[2J",
        "\n",
        "\u{0660}",
        "on",
        "off",
        "ram",
        "disk",
    ],
    runs: 6000,
    bytes_max: 512,
};

pub(crate) fn run(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    check_sizes(&text);
    check_arguments(&text);
    for text in [text.as_ref(), &format!("sim:{text}")] {
        match Selection::parse(text) {
            Ok(Selection::Sim(options)) => check_options(options),
            Ok(Selection::Auto | Selection::Cuda(_)) => {}
            Err(error) => {
                assert_eq!(error.code(), ErrorCode::InvalidArgument);
                check_words(&error.to_string());
            }
        }
    }
}

fn check_sizes(text: &str) {
    match parse_bytes(text) {
        Ok(bytes) => assert_eq!(parse_bytes(&arguments::argument_of_bytes(bytes)), Ok(bytes)),
        Err(error) => check_words(&error),
    }
    // An exact number of bytes stays exact.
    if let Ok(number) = text.parse::<u64>()
        && !text.starts_with('+')
    {
        assert_eq!(parse_bytes(text), Ok(number));
    }
    check_words(&quoted(text));
    let _ = natural_order(text, &text.to_lowercase());
    let shape: Vec<usize> = text.split(',').filter_map(|part| part.parse().ok()).collect();
    for dtype in [Dtype::F4, Dtype::F6_E2M3, Dtype::C64] {
        let _ = tensor_bytes(dtype, &shape).map_err(|error| check_words(&error));
    }
}

fn check_arguments(text: &str) {
    let refused = [
        arguments::synthetic_size(text).err(),
        arguments::page_size(text).err(),
        arguments::device(text).err(),
        arguments::probability(text).err(),
        arguments::threads(text).err(),
        arguments::on_off(text).err(),
        arguments::prefer(text).err(),
        arguments::scrub(text).err(),
        text.parse::<Verb>().err(),
    ];
    refused.into_iter().flatten().for_each(|error| check_words(&error));
    match arguments::budget(text) {
        Ok(budget) => {
            for model_bytes in [0, 1, GIB, u64::MAX] {
                let _ = budget.bytes(model_bytes);
            }
        }
        Err(error) => check_words(&error),
    }
}

fn check_options(options: SimOptions) {
    let written = options.to_string();
    let read = SimOptions::parse(&written);
    assert!(read.as_ref() == Ok(&options), "{written} is read back as {read:?}");
    for rule in &options.fail {
        assert_ne!(rule.code, DriverCode::SUCCESS, "{written}: a failure that is none");
    }
    let quick = options.latency == Duration::ZERO
        && options.bandwidth.is_none_or(|bandwidth| bandwidth >= GIB);
    if quick && options.hang.is_none() && options.devices <= 4 && options.fail.len() < 8 {
        use_device(SimOptions { on_violation: OnViolation::Record, ..options });
    }
}

/// A page is made resident on each device, given back, and nothing is left.
fn use_device(options: SimOptions) {
    let devices = options.devices;
    let disturbed = !options.fail.is_empty() || options.fail_rate > 0.0;
    let sim = match Sim::try_new(options) {
        Ok(sim) => sim,
        Err(error) => {
            assert_eq!(error.code(), ErrorCode::HostMemory);
            return check_words(&error.to_string());
        }
    };
    for ordinal in 0..devices {
        let runtime_options = RuntimeOptions {
            page_size: PageSize::new(2 * MIB).expect("a power of two"),
            threads: Some(Threads::Off),
            wait_timeout: Duration::from_millis(50),
            ..RuntimeOptions::default()
        };
        match Runtime::open(sim.driver(), DeviceOrdinal(ordinal), runtime_options) {
            Ok(runtime) => use_runtime(&runtime),
            Err(error) => check_words(&error.to_string()),
        }
        assert!(disturbed || sim.live_frames(DeviceOrdinal(ordinal)) == 0, "a frame is left");
    }
    assert!(sim.violations().is_empty(), "{:?}", sim.violations());
    assert!(disturbed || sim.live_mappings() == 0, "a mapping is left");
}

fn use_runtime(runtime: &Runtime) {
    let bar = match runtime.create_bar(4 * MIB) {
        Ok(bar) => bar,
        Err(error) => return check_words(&error.to_string()),
    };
    match bar.fault(0..MIB, Stream::DEFAULT) {
        Ok(Fault::Resident(guard)) => drop(guard),
        Ok(Fault::HostMapped(_)) => panic!("nobody asked for that"),
        Ok(Fault::Offloaded(refused)) => check_words(&refused.to_string()),
        Err(error) => check_words(&error.to_string()),
    }
    if let Err(error) = bar.destroy_wait() {
        check_words(&error.to_string());
    }
}
