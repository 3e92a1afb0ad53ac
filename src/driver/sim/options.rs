//! What a simulated device is like: its size, its temper, its seed.
//!
//! Owns the option string (`capacity=8G,seed=7`), its parser and its canonical form.

use std::fmt;
use std::time::Duration;

use super::faults::FailRule;
use super::verb::Verb;
use crate::driver::code::DriverCode;
use crate::error::{Error, ErrorCode, Result};
use crate::names::quoted;
use crate::units::{GIB, KIB, MIB, TIB, parse_bytes};

/// What happens to a device on which a violation was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnViolation {
    /// It is lost, with `ILLEGAL_ADDRESS`.
    Lose,
    /// It goes on; the violation is on the list.
    Record,
}

/// The options of a simulated device, with their defaults.
#[derive(Clone, PartialEq, Debug)]
pub struct SimOptions {
    /// Memory of each device, in bytes. 8 GiB.
    pub capacity: u64,
    /// Devices. 1.
    pub devices: u32,
    /// Smallest unit that can be mapped, a power of two of at least one OS page. 2 MiB.
    pub granularity: u64,
    /// With a seed, one operation runs at a time, in an order drawn from it; without, each stream
    /// has a thread.
    pub seed: Option<u64>,
    /// Most time that an operation waits before it runs; the wait is drawn. 0. It is real time,
    /// as the delays of kernels and the bandwidth are: with any of them a seed's interleaving
    /// depends on the clock too.
    pub latency: Duration,
    /// Bytes a second that copies run at. As fast as the host can.
    pub bandwidth: Option<u64>,
    /// Most bytes that may be reserved. What the operating system has.
    pub address_space: Option<u64>,
    /// Most live mappings. What the operating system allows.
    pub mappings: Option<u64>,
    /// By how much the free memory that the driver tells may fall short, in bytes. 0.
    pub jitter: u64,
    /// Whether new frames hold 0xA5 instead of zeros. No.
    pub poison: bool,
    /// Whether virtual memory management works. Yes.
    pub vmm: bool,
    /// Whether host memory can be mapped at device addresses, as it can since CUDA 12.9. Yes.
    pub host_vmm: bool,
    /// Whether an event can be recorded for a whole context, as it can since CUDA 12.5. Yes.
    pub ctx_event: bool,
    /// Whether the devices reach each other's memory. Yes.
    pub peers: bool,
    /// Whether pages of files can be registered for reading. No.
    pub read_only: bool,
    /// The verb whose calls do not return, as those of a driver that is stuck. None.
    pub hang: Option<Verb>,
    /// Whether host peeks must be ordered after the device's writes, and the sources of copies
    /// from page-locked memory are compared with what they were when the copy was enqueued. No.
    pub checked: bool,
    /// What a violation does. It loses the device.
    pub on_violation: OnViolation,
    /// Probability with which memory, copy and event calls fail. 0.
    pub fail_rate: f64,
    /// Failures to inject from the start.
    pub fail: Vec<FailRule>,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            capacity: 8 * GIB,
            devices: 1,
            granularity: 2 * MIB,
            seed: None,
            latency: Duration::ZERO,
            bandwidth: None,
            address_space: None,
            mappings: None,
            jitter: 0,
            poison: false,
            vmm: true,
            host_vmm: true,
            ctx_event: true,
            peers: true,
            read_only: false,
            hang: None,
            checked: false,
            on_violation: OnViolation::Lose,
            fail_rate: 0.0,
            fail: Vec::new(),
        }
    }
}

/// Sets a key to its value, or says what is wrong with it.
type Set = fn(&mut SimOptions, &str) -> std::result::Result<(), String>;

/// A key of the option string.
pub struct SimKey {
    /// The key.
    pub name: &'static str,
    /// What its value is, with its unit.
    pub value: &'static str,
    /// What it is for, and its default.
    pub about: &'static str,
    set: Set,
}

/// What the value of a flag is called.
const FLAG: &str = "FLAG";

const fn key(name: &'static str, value: &'static str, about: &'static str, set: Set) -> SimKey {
    SimKey { name, value, about, set }
}

impl SimOptions {
    /// Every key, in the order of the canonical form; `include/vbar_sim.h` lists them.
    pub const KEYS: &'static [SimKey] = &[
        key("capacity", "SIZE", "memory of each device, at most 16T; 8G", |to, text| {
            set(&mut to.capacity, size(text))
        }),
        key("devices", "COUNT", "devices, at most 64; 1", |to, text| {
            let count = u32::try_from(number(text)?);
            set(&mut to.devices, count.map_err(|_| "too many devices".into()))
        }),
        key(
            "granularity",
            "SIZE",
            "smallest unit that can be mapped, a power of two; 2M",
            |to, text| set(&mut to.granularity, size(text)),
        ),
        key(
            "seed",
            "NUMBER",
            "operations of all streams run in an order drawn from it; none",
            |to, text| set(&mut to.seed, number(text).map(Some)),
        ),
        key(
            "latency",
            "TIME",
            "most time that an operation waits before it runs; 0",
            |to, text| set(&mut to.latency, parse_duration(text)),
        ),
        key("bandwidth", "SIZE", "bytes a second that copies run at; the host's", |to, text| {
            set(&mut to.bandwidth, size(text).map(Some))
        }),
        key("slow_copy", "SIZE", "another name of bandwidth", |to, text| {
            set(&mut to.bandwidth, size(text).map(Some))
        }),
        key("address_space", "SIZE", "most bytes that may be reserved; the host's", |to, text| {
            set(&mut to.address_space, size(text).map(Some))
        }),
        key("mappings", "COUNT", "most live mappings; the host's", |to, text| {
            set(&mut to.mappings, number(text).map(Some))
        }),
        key("jitter", "SIZE", "how much less than is free the driver may tell; 0", |to, text| {
            set(&mut to.jitter, size(text))
        }),
        key("poison", FLAG, "new memory holds 0xA5 instead of zeros; 0", |to, text| {
            set(&mut to.poison, flag(text))
        }),
        key("vmm", FLAG, "virtual memory management works; 1", |to, text| {
            set(&mut to.vmm, flag(text))
        }),
        key("host_vmm", FLAG, "host frames can be mapped, as since CUDA 12.9; 1", |to, text| {
            set(&mut to.host_vmm, flag(text))
        }),
        key("ctx_event", FLAG, "cuCtxRecordEvent works, as since CUDA 12.5; 1", |to, text| {
            set(&mut to.ctx_event, flag(text))
        }),
        key("peers", FLAG, "devices reach each other's memory; 1", |to, text| {
            set(&mut to.peers, flag(text))
        }),
        key("read_only", FLAG, "pages of files can be registered; 0", |to, text| {
            set(&mut to.read_only, flag(text))
        }),
        key(
            "checked",
            FLAG,
            "peeks and sources of copies are checked for races too; 0",
            |to, text| set(&mut to.checked, flag(text)),
        ),
        key("hang", "VERB", "calls of it do not return, as mem_release; none", |to, text| {
            set(&mut to.hang, text.parse().map(Some))
        }),
        key("on_violation", "lose|record", "what a breach does to the device; lose", |to, text| {
            set(
                &mut to.on_violation,
                match text {
                    "lose" => Ok(OnViolation::Lose),
                    "record" => Ok(OnViolation::Record),
                    _ => Err("lose or record".into()),
                },
            )
        }),
        key(
            "fail_rate",
            "NUMBER",
            "probability of memory, copy and event calls to fail; 0",
            |to, text| {
                set(&mut to.fail_rate, text.parse().map_err(|_| "0 to 1 is expected".into()))
            },
        ),
        key(
            "fail",
            "VERB:N:CODE",
            "the N-th call from 1 fails, as mem_map:3:2; none",
            |to, text| {
                to.fail.push(parse_fail(text)?);
                Ok(())
            },
        ),
    ];

    /// Parses `key=value` pairs with commas between; the empty text gives the defaults. A flag's
    /// name alone sets it.
    ///
    /// # Errors
    /// `InvalidArgument` that names the key, and lists the keys when it is unknown; for a key
    /// without its value too.
    pub fn parse(text: &str) -> Result<Self> {
        let mut options = Self::default();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = match pair.split_once('=') {
                Some((key, value)) => (key.trim(), Some(value.trim())),
                None => (pair, None),
            };
            options
                .set(key, value)
                .and_then(|()| options.check())
                .map_err(|why| Error::new(ErrorCode::InvalidArgument, format!("sim: {why}")))?;
        }
        Ok(options)
    }

    fn set(&mut self, name: &str, value: Option<&str>) -> std::result::Result<(), String> {
        let Some(key) = Self::KEYS.iter().find(|key| key.name == name) else {
            let keys: Vec<&str> = Self::KEYS.iter().map(|key| key.name).collect();
            let (name, keys) = (quoted(name), keys.join(", "));
            return Err(format!("unknown option {name}; the options are: {keys}"));
        };
        let value = match (value, key.value) {
            (None, FLAG) => "1",
            (None | Some(""), wanted) => {
                let (name, about) = (key.name, key.about);
                return Err(format!("{name} needs a value, as {name}={wanted}: {about}"));
            }
            (Some(value), _) => value,
        };
        (key.set)(self, value).map_err(|why| format!("{name}={}: {why}", quoted(value)))
    }

    fn check(&self) -> std::result::Result<(), String> {
        if !self.granularity.is_power_of_two() || self.granularity < 4 * KIB {
            return Err("granularity must be a power of two of at least 4K".into());
        }
        if self.capacity == 0 || self.capacity > 16 * TIB {
            // Twice the capacity must fit in the address space of a process.
            return Err("capacity must be between 1 byte and 16T".into());
        }
        if !(1..=64).contains(&self.devices) {
            return Err("devices must be 1 to 64".into());
        }
        if !(0.0..=1.0).contains(&self.fail_rate) {
            return Err("fail_rate must be 0 to 1".into());
        }
        if self.bandwidth == Some(0) {
            return Err("bandwidth must not be 0".into());
        }
        Ok(())
    }
}

fn set<T>(
    target: &mut T,
    value: std::result::Result<T, String>,
) -> std::result::Result<(), String> {
    *target = value?;
    Ok(())
}

fn number(text: &str) -> std::result::Result<u64, String> {
    text.parse().map_err(|_| "a whole number is expected".into())
}

fn flag(text: &str) -> std::result::Result<bool, String> {
    let number: u64 = text.parse().map_err(|_| "0 or 1 is expected".to_owned())?;
    Ok(number != 0)
}

fn size(text: &str) -> std::result::Result<u64, String> {
    parse_bytes(text)
}

/// `verb:n:code`: the n-th call, counted from 1, fails with the code.
fn parse_fail(value: &str) -> std::result::Result<FailRule, String> {
    let wrong = || "verb:n:code is expected, as mem_set_access:3:600".to_owned();
    let mut parts = value.split(':');
    let verb = parts.next().unwrap_or_default().parse::<Verb>()?;
    let nth: u64 = parts.next().and_then(|text| text.parse().ok()).ok_or_else(wrong)?;
    let code: i32 = parts.next().and_then(|text| text.parse().ok()).ok_or_else(wrong)?;
    let skip = nth.checked_sub(1).ok_or_else(wrong)?;
    if parts.next().is_some() {
        return Err(wrong());
    }
    if DriverCode(code) == DriverCode::SUCCESS {
        return Err("code 0 is success".into());
    }
    Ok(FailRule { verb, skip, count: 1, code: DriverCode(code) })
}

fn parse_duration(value: &str) -> std::result::Result<Duration, String> {
    let end = value.find(|c: char| !c.is_ascii_digit()).unwrap_or(value.len());
    let (number, unit) = value.split_at(end);
    let number: u64 = number.parse().map_err(|_| format!("{} is no duration", quoted(value)))?;
    let micros = match unit {
        "" | "us" => Some(number),
        "ms" => number.checked_mul(1000),
        "s" => number.checked_mul(1_000_000),
        _ => return Err(format!("{} is no duration: use us, ms or s", quoted(value))),
    };
    // As it is written again.
    let micros = micros.ok_or_else(|| format!("{} is too long", quoted(value)))?;
    Ok(Duration::from_micros(micros))
}

/// A size in its largest whole unit, as [`parse_bytes`] reads it.
fn exact(bytes: u64) -> String {
    for (unit, name) in [(TIB, "T"), (GIB, "G"), (MIB, "M"), (KIB, "K")] {
        if bytes >= unit && bytes.is_multiple_of(unit) {
            return format!("{}{name}", bytes / unit);
        }
    }
    bytes.to_string()
}

/// The canonical form: the capacity, then what differs from the defaults.
impl fmt::Display for SimOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self::default();
        write!(f, "capacity={}", exact(self.capacity))?;
        if self.devices != default.devices {
            write!(f, ",devices={}", self.devices)?;
        }
        if self.granularity != default.granularity {
            write!(f, ",granularity={}", exact(self.granularity))?;
        }
        if let Some(seed) = self.seed {
            write!(f, ",seed={seed}")?;
        }
        if self.latency != default.latency {
            write!(f, ",latency={}us", self.latency.as_micros())?;
        }
        let sizes = [("bandwidth", self.bandwidth), ("address_space", self.address_space)];
        for (key, value) in sizes {
            if let Some(bytes) = value {
                write!(f, ",{key}={}", exact(bytes))?;
            }
        }
        if let Some(count) = self.mappings {
            write!(f, ",mappings={count}")?;
        }
        if self.jitter != 0 {
            write!(f, ",jitter={}", exact(self.jitter))?;
        }
        let flags = [
            ("poison", self.poison, false),
            ("vmm", self.vmm, true),
            ("host_vmm", self.host_vmm, true),
            ("ctx_event", self.ctx_event, true),
            ("peers", self.peers, true),
            ("read_only", self.read_only, false),
            ("checked", self.checked, false),
        ];
        for (key, value, default) in flags {
            if value != default {
                write!(f, ",{key}={}", u8::from(value))?;
            }
        }
        if let Some(verb) = self.hang {
            write!(f, ",hang={verb}")?;
        }
        if self.on_violation == OnViolation::Record {
            f.write_str(",on_violation=record")?;
        }
        if self.fail_rate != 0.0 {
            write!(f, ",fail_rate={}", self.fail_rate)?;
        }
        for rule in &self.fail {
            write!(f, ",fail={}:{}:{}", rule.verb, rule.skip + 1, rule.code.0)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_canonical_form_is_parsed_back() {
        let text = "capacity=64M,devices=2,granularity=64K,seed=7,latency=50us,bandwidth=1G,\
                    address_space=1T,mappings=9,jitter=1M,poison=1,vmm=0,host_vmm=0,\
                    ctx_event=0,peers=0,read_only=1,checked=1,hang=mem_release,\
                    on_violation=record,fail_rate=0.25,fail=mem_set_access:3:600";
        let options = SimOptions::parse(text).unwrap();
        assert_eq!(options.to_string(), text);
        assert_eq!(SimOptions::parse("").unwrap(), SimOptions::default());
    }

    #[test]
    fn what_is_taken_is_parsed_back() {
        let error = SimOptions::parse("latency=18446744073709551615s").unwrap_err().to_string();
        assert!(error.contains("too long"), "{error}");
        let longest = SimOptions::parse("latency=18446744073709s").unwrap();
        assert_eq!(SimOptions::parse(&longest.to_string()).unwrap(), longest);
    }

    #[test]
    fn only_a_flag_needs_no_value() {
        for SimKey { name, value, .. } in SimOptions::KEYS {
            let alone = SimOptions::parse(name);
            let empty = SimOptions::parse(&format!("{name}= ")).unwrap_err().to_string();
            let expected = format!("{name} needs a value, as {name}={value}");
            assert!(empty.contains(&expected), "{empty}");
            if *value == FLAG {
                assert_eq!(alone.unwrap(), SimOptions::parse(&format!("{name}=1")).unwrap());
            } else {
                assert_eq!(alone.unwrap_err().to_string(), empty);
            }
        }
        let error = SimOptions::parse("poison=yes").unwrap_err().to_string();
        assert!(error.contains("poison='yes': 0 or 1 is expected"), "{error}");
    }

    #[test]
    fn a_failure_is_no_success() {
        let error = SimOptions::parse("fail=mem_map:1:0").unwrap_err().to_string();
        assert!(error.contains("code 0 is success"), "{error}");
    }

    #[test]
    fn texts_are_quoted_and_short() {
        for text in ["\u{1b}[2J=1", "capacity=\u{1b}[2J", "hang=\n", "latency=5\u{7}"] {
            let error = SimOptions::parse(&format!("{text}{}", "x".repeat(9000))).unwrap_err();
            let error = error.to_string();
            assert!(!error.contains(char::is_control) && error.len() < 3000, "{error:?}");
        }
    }

    #[test]
    fn an_unknown_key_lists_the_keys() {
        let error = SimOptions::parse("capacity=1G,colour=red").unwrap_err().to_string();
        assert!(error.contains("colour") && error.contains("granularity"), "{error}");
        for wrong in ["capacity=x", "devices=0", "granularity=3M", "fail=mem_map:0:1", "latency=1h"]
        {
            assert!(SimOptions::parse(wrong).is_err(), "{wrong} was accepted");
        }
    }
}
