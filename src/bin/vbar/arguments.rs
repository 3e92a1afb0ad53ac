//! Arguments that several subcommands have, parsed from text.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use vbar::driver::select::Selection;
use vbar::model::synth::TOTAL_BYTES_MIN;
use vbar::names::quoted;
use vbar::options::{Prefer, Scrub, Threads};
use vbar::units::{GIB, KIB, MIB, PageSize, format_bytes, parse_bytes};

/// Parses a whole number in a range.
pub(crate) fn whole<T>(
    range: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: Copy + FromStr + Display + PartialOrd + Send + Sync + 'static,
{
    move |text: &str| {
        let number = text.trim().parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| {
            let (from, to) = (range.start(), range.end());
            format!("{} is no whole number from {from} to {to}", quoted(text))
        })
    }
}

/// Bytes of a synthetic model.
pub(crate) fn synthetic_size(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text)?;
    match bytes >= TOTAL_BYTES_MIN {
        true => Ok(bytes),
        false => {
            Err(format!("{}: at least {} are needed", quoted(text), format_bytes(TOTAL_BYTES_MIN)))
        }
    }
}

/// A size as it can be given to [`parse_bytes`], exact.
pub(crate) fn argument_of_bytes(bytes: u64) -> String {
    let unit = [(GIB, "G"), (MIB, "M"), (KIB, "K")]
        .into_iter()
        .find(|(unit, _)| bytes >= *unit && bytes.is_multiple_of(*unit));
    unit.map_or_else(|| bytes.to_string(), |(unit, letter)| format!("{}{letter}", bytes / unit))
}

/// A page size.
pub(crate) fn page_size(text: &str) -> Result<PageSize, String> {
    let bytes = parse_bytes(text)?;
    PageSize::new(bytes)
        .ok_or_else(|| format!("{}: pages are a power of two, 4K to 1T", quoted(text)))
}

/// A device by its words.
pub(crate) fn device(text: &str) -> Result<Selection, String> {
    Selection::parse(text).map_err(|error| error.to_string())
}

/// A probability.
pub(crate) fn probability(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if (0.0..=1.0).contains(&rate) => Ok(rate),
        _ => Err(format!("{} is no probability: use 0 to 1, as 0.02", quoted(text))),
    }
}

/// Whether the library has threads of its own.
pub(crate) fn threads(text: &str) -> Result<Threads, String> {
    match text {
        "on" => Ok(Threads::On),
        "off" => Ok(Threads::Off),
        _ => Err(format!("{} is neither on nor off", quoted(text))),
    }
}

/// Yes or no.
pub(crate) fn on_off(text: &str) -> Result<bool, String> {
    threads(text).map(|threads| threads == Threads::On)
}

/// Whether frames are cleared.
pub(crate) fn scrub(text: &str) -> Result<Scrub, String> {
    on_off(text).map(|on| if on { Scrub::On } else { Scrub::Off })
}

/// Where model files are read from.
pub(crate) fn prefer(text: &str) -> Result<Prefer, String> {
    match text {
        "auto" => Ok(Prefer::Auto),
        "ram" => Ok(Prefer::Ram),
        "disk" => Ok(Prefer::Disk),
        _ => Err(format!("{} is neither auto, ram nor disk", quoted(text))),
    }
}

/// A budget: bytes, or a part of the model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Budget {
    Bytes(u64),
    Percent(f64),
}

/// Parses `400M` or `40%`.
pub(crate) fn budget(text: &str) -> Result<Budget, String> {
    let Some(number) = text.trim().strip_suffix('%') else {
        let of_model = |why| format!("{why}; or a part of the model, as 40%");
        return parse_bytes(text).map(Budget::Bytes).map_err(of_model);
    };
    match number.trim().parse::<f64>() {
        Ok(percent) if percent > 0.0 && percent.is_finite() => Ok(Budget::Percent(percent)),
        _ => {
            Err(format!("{} is no part of a model: use a percentage above 0, as 40%", quoted(text)))
        }
    }
}

impl Budget {
    /// The budget for a model of `model_bytes`.
    pub(crate) fn bytes(self, model_bytes: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => (model_bytes as f64 * percent / 100.0) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_bytes_or_parts() {
        assert_eq!(budget("8M"), Ok(Budget::Bytes(8 << 20)));
        assert_eq!(budget("40%").map(|budget| budget.bytes(1000)), Ok(400));
        assert_eq!(budget("0.5 %").map(|budget| budget.bytes(1000)), Ok(5));
        for wrong in ["", "%", "-1%", "0%", "inf%", "nan%", "4X", "40x", "12 34"] {
            let error = budget(wrong).unwrap_err();
            assert!(error.contains("40%"), "{error}");
        }
    }

    #[test]
    fn whole_numbers_are_bounded_and_their_bounds_told() {
        let seconds = whole(0..=u64::MAX);
        assert_eq!((seconds("10"), seconds("0")), (Ok(10), Ok(0)));
        for wrong in ["abc", "", "-1", "1.5", "1k", "99999999999999999999"] {
            let error = seconds(wrong).unwrap_err();
            assert!(error.starts_with(&format!("'{wrong}' is no whole number from 0 to")));
        }
        let threads = whole(1..=64u32);
        assert_eq!(threads("65").unwrap_err(), "'65' is no whole number from 1 to 64");
        assert!(threads("0").is_err() && threads("64") == Ok(64));
    }

    #[test]
    fn sizes_are_told_as_they_are_given() {
        for (bytes, text) in [(0, "0"), (1000, "1000"), (64 << 10, "64K"), (3 << 30, "3G")] {
            assert_eq!(argument_of_bytes(bytes), text);
            assert_eq!(parse_bytes(text), Ok(bytes));
        }
        assert_eq!(argument_of_bytes((1 << 20) + (64 << 10)), "1088K");
        assert_eq!(synthetic_size("64K"), Ok(64 << 10));
        assert!(synthetic_size("63K").is_err() && synthetic_size("x").is_err());
    }

    #[test]
    fn probabilities_are_bounded() {
        assert_eq!(probability("0.25"), Ok(0.25));
        assert!(probability("1.5").is_err() && probability("x").is_err());
        assert!(probability("nan").is_err());
        assert_eq!((threads("on"), threads("off")), (Ok(Threads::On), Ok(Threads::Off)));
        assert_eq!([prefer("auto"), prefer("ram"), prefer("disk")], {
            [Ok(Prefer::Auto), Ok(Prefer::Ram), Ok(Prefer::Disk)]
        });
        assert!(prefer("").is_err() && prefer("RAM").is_err());
        assert!(threads("On").is_err() && threads("").is_err());
        assert_eq!((on_off("on"), on_off("off")), (Ok(true), Ok(false)));
        assert!(on_off("yes").is_err());
    }
}
