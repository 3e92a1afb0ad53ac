//! Quantities with a unit: addresses, page indexes, streams, sizes.
//!
//! Owns the newtypes that keep a page index from being used as a byte count, and the parser and
//! printer of sizes (`8G`, `512M`). Does not own any state.

use std::fmt;
use std::ops::Range;

use crate::names::quoted;

/// One unit past the kilobyte: sizes in options carry K, M, G or T, powers of 1024.
pub const KIB: u64 = 1 << 10;
/// 1024 KiB, in bytes.
pub const MIB: u64 = 1 << 20;
/// 1024 MiB, in bytes.
pub const GIB: u64 = 1 << 30;
/// 1024 GiB, in bytes.
pub const TIB: u64 = 1 << 40;

/// An address in a device's virtual address space, as `CUdeviceptr`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DeviceAddress(pub u64);

impl DeviceAddress {
    /// The address `bytes` further on, or `None` past 2^64.
    #[must_use]
    pub fn checked_add(self, bytes: u64) -> Option<Self> {
        self.0.checked_add(bytes).map(Self)
    }

    /// The address `bytes` further on.
    ///
    /// # Panics
    /// In debug builds, past 2^64: callers have checked their range.
    #[must_use]
    pub fn offset(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

impl fmt::Debug for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A device by its ordinal in the driver, as `CUdevice`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct DeviceOrdinal(pub u32);

impl fmt::Display for DeviceOrdinal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A context, as `CUcontext`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Context(pub usize);

/// A stream as the caller's runtime names it, as `CUstream`. Valid only during the call it is
/// given to; the library never keeps one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stream(pub usize);

impl Stream {
    /// The legacy default stream in its null form.
    pub const DEFAULT: Self = Self(0);
    /// `CU_STREAM_LEGACY`.
    pub const LEGACY: Self = Self(1);
    /// `CU_STREAM_PER_THREAD`.
    pub const PER_THREAD: Self = Self(2);
    /// No stream: the caller promises that the work it speaks of has finished.
    pub const NONE: Self = Self(usize::MAX);

    /// Whether this is the promise that no work is pending, and no stream.
    #[must_use]
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }

    /// Whether this is the default stream of the calling thread's current context.
    #[inline(always)]
    #[must_use]
    pub fn is_default(self) -> bool {
        self.0 <= 1
    }

    /// Whether the handle's meaning depends on the calling thread's current context.
    #[must_use]
    pub fn is_implicit(self) -> bool {
        self.0 <= 2
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NONE => f.write_str("stream none"),
            Stream(handle) => write!(f, "stream {handle:#x}"),
        }
    }
}

/// The position of a page in its VBAR, counted from the VBAR's first address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PageIndex(pub u32);

impl fmt::Display for PageIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A page's generation: process-wide, never repeated, 44 bits used, never 0 for a page with bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Generation(pub u64);

/// The size of a page and of a frame, a power of two and a multiple of the granularity.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PageSize {
    shift: u32,
}

impl PageSize {
    /// The default: 16 MiB copies within 1 % of the link rate and keeps the page tables small.
    pub const DEFAULT: Self = Self { shift: 24 };

    /// A page size of `bytes`, or `None` unless it is a power of two of at least 4 KiB.
    #[must_use]
    pub fn new(bytes: u64) -> Option<Self> {
        let shift = bytes.trailing_zeros();
        (bytes.is_power_of_two() && (12..=40).contains(&shift)).then_some(Self { shift })
    }

    /// Bytes in one page.
    #[must_use]
    pub fn bytes(self) -> u64 {
        1 << self.shift
    }

    /// Pages that hold `bytes`, rounded up.
    #[must_use]
    pub fn pages_for(self, bytes: u64) -> u64 {
        (bytes >> self.shift) + u64::from(bytes & (self.bytes() - 1) != 0)
    }

    /// The pages that the byte range touches, as indexes from the start of the VBAR. An empty byte
    /// range touches none.
    #[must_use]
    pub fn pages_of(self, bytes: &Range<u64>) -> Range<u32> {
        if bytes.is_empty() {
            return 0..0;
        }
        let first = bytes.start >> self.shift;
        let last = (bytes.end - 1) >> self.shift;
        let index = |page: u64| u32::try_from(page).expect("a VBAR has less than 2^32 pages");
        index(first)..index(last + 1)
    }

    /// The first byte of a page, from the start of the VBAR.
    #[must_use]
    pub fn offset_of(self, page: PageIndex) -> u64 {
        u64::from(page.0) << self.shift
    }
}

/// `value` rounded up to a multiple of `alignment`, a power of two; `None` past 2^64.
#[must_use]
pub fn align_up(value: u64, alignment: u64) -> Option<u64> {
    debug_assert!(alignment.is_power_of_two());
    Some(value.checked_add(alignment - 1)? & !(alignment - 1))
}

/// Parses a size in bytes: digits, a decimal point if wanted, then nothing or one of K, M, G, T
/// (powers of 1024, an `iB` or `B` behind them is accepted).
///
/// # Errors
/// A sentence that quotes the text when it is no such size or does not fit in 64 bits.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let no_size = || format!("{} is not a size: use bytes, or K, M, G, T", quoted(text));
    let trimmed = text.trim();
    let number_end =
        trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, suffix) = trimmed.split_at(number_end);
    let unit = match suffix.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => KIB,
        "m" | "mb" | "mib" => MIB,
        "g" | "gb" | "gib" => GIB,
        "t" | "tb" | "tib" => TIB,
        _ => return Err(no_size()),
    };
    let too_large = || format!("{} is not a size that fits in 64 bits", quoted(text));
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit).ok_or_else(too_large);
    }
    let fraction: f64 = number.parse().map_err(|_| no_size())?;
    let bytes = fraction * unit as f64;
    if !(0.0..1.8e19).contains(&bytes) {
        return Err(too_large());
    }
    Ok(bytes as u64)
}

/// A size as people read it, with one decimal: `512 B`, `1.5 GiB`.
#[must_use]
pub fn format_bytes(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0..KIB => return format!("{bytes} B"),
        KIB..MIB => (KIB, "KiB"),
        MIB..GIB => (MIB, "MiB"),
        GIB..TIB => (GIB, "GiB"),
        _ => (TIB, "TiB"),
    };
    format!("{:.1} {name}", bytes as f64 / unit as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_with_their_suffix() {
        assert_eq!(parse_bytes("17"), Ok(17));
        assert_eq!(parse_bytes("8G"), Ok(8 * GIB));
        assert_eq!(parse_bytes("1.5MiB"), Ok(MIB + MIB / 2));
        assert_eq!(parse_bytes(" 2 kb "), Ok(2 * KIB));
        for wrong in ["", "G", "-1", "1X", "1e400", "99999999999999999999", "20000000T", "1.2.3"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong} was accepted");
        }
        // What is no number is not said to be too large.
        for (text, is_number) in [("", false), (".", false), ("1.2.3", false), ("20000000T", true)]
        {
            let error = parse_bytes(text).unwrap_err();
            assert_eq!(error.contains("64 bits"), is_number, "{error}");
        }
    }

    #[test]
    fn a_byte_range_touches_its_pages() {
        let page = PageSize::new(4096).unwrap();
        assert_eq!(page.pages_of(&(0..1)), 0..1);
        assert_eq!(page.pages_of(&(4095..4097)), 0..2);
        assert_eq!(page.pages_of(&(4096..8192)), 1..2);
        assert!(page.pages_of(&(5..5)).is_empty());
        assert_eq!(page.pages_for(u64::MAX), 1 << 52);
    }

    #[test]
    fn page_sizes_are_powers_of_two() {
        assert!(PageSize::new(0).is_none());
        assert!(PageSize::new(3 << 20).is_none());
        assert_eq!(PageSize::new(2 * MIB).unwrap().bytes(), 2 * MIB);
    }
}
