//! A safetensors header: from its bytes to a checked table of tensors.
//!
//! Pure: it takes bytes and the file's length and returns numbers; reading is `host/source`'s. The
//! invariant of a [`Header`]: its tensors lie one behind the other, without overlap or hole, from
//! the end of the header to the end of the file, and each is as long as its shape and dtype say.
//!
//! It accepts what the format's own crate accepts (a test compares the two on damaged headers),
//! except names that occur twice, which that crate lets pass. So, in every mode: **trailing bytes
//! are refused**, as are holes; zero-size tensors, any UTF-8 in names, JSON white space around the
//! header, and any order of the entries are fine. A dtype of less than a byte must fill whole
//! bytes.

use std::collections::BTreeMap;
use std::ops::Range;

pub use ::safetensors::Dtype;
use ::safetensors::tensor::TensorInfo;

use crate::error::{Error, ErrorCode, Result};
use crate::names::{quoted, told};

mod index;
mod json;

pub use index::{INDEX_BYTES_MAX, parse_index};

/// The little-endian length of the header, before the header.
pub const PREFIX_BYTES: u64 = 8;
/// The format's limit of a header, in bytes.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;

/// A tensor as its file's header describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorEntry {
    /// Any UTF-8, unique in its file.
    pub name: Box<str>,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Elements in each dimension, the slowest first; empty for a scalar.
    pub shape: Box<[u64]>,
    /// Its bytes, from the start of the file.
    pub extent: Range<u64>,
}

/// A checked header.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Header {
    /// The tensors by rising extent, without overlap or hole.
    pub tensors: Vec<TensorEntry>,
    /// The `__metadata__` of the file, empty without one.
    pub metadata: BTreeMap<String, String>,
    /// The first byte after the header, from the start of the file.
    pub data_offset: u64,
}

/// The length of the header in bytes, from the first bytes of the file (fewer than
/// [`PREFIX_BYTES`] only if the file has no more).
///
/// # Errors
/// `Format`: the file is shorter than the prefix or than the header, or the header is longer than
/// [`HEADER_BYTES_MAX`].
pub fn header_bytes(file: &str, prefix: &[u8], file_bytes: u64) -> Result<usize> {
    let Some(prefix) = prefix.first_chunk::<{ PREFIX_BYTES as usize }>() else {
        return Err(wrong(file, format!("{file_bytes} bytes are too few for a safetensors file")));
    };
    let header_bytes = u64::from_le_bytes(*prefix);
    if header_bytes > HEADER_BYTES_MAX {
        let text = format!(
            "not a safetensors file: its header would have {header_bytes} bytes, the limit is \
             {HEADER_BYTES_MAX}"
        );
        return Err(wrong(file, text));
    }
    if file_bytes.saturating_sub(PREFIX_BYTES) < header_bytes {
        let text =
            format!("a header of {header_bytes} bytes does not fit in the file of {file_bytes}");
        return Err(wrong(file, text));
    }
    Ok(usize::try_from(header_bytes).expect("at most HEADER_BYTES_MAX"))
}

/// Parses and checks the header, which follows the prefix, of a file of `file_bytes` bytes.
///
/// # Errors
/// `Format`, with the file's name and, where one is to blame, the tensor's: not UTF-8, not JSON, a
/// name that occurs twice, an unknown dtype, a size that is not that of the shape, extents that
/// overlap, leave a hole, or end before or behind the end of the file.
pub fn parse_header(file: &str, header: &[u8], file_bytes: u64) -> Result<Header> {
    let text = std::str::from_utf8(header)
        .map_err(|error| wrong(file, format!("the header is not UTF-8: {error}")))?;
    let raw: json::RawHeader = serde_json::from_str(text)
        .map_err(|error| wrong(file, format!("the header is not valid: {}", told(&error))))?;
    let data_offset = PREFIX_BYTES + header.len() as u64;
    let data_bytes = file_bytes.checked_sub(data_offset).ok_or_else(|| {
        wrong(file, format!("the header ends at {data_offset}, the file at {file_bytes}"))
    })?;

    let mut entries: Vec<(String, TensorInfo)> = raw.tensors.into_iter().collect();
    for (name, info) in &entries {
        check_size(info).map_err(|text| wrong_tensor(file, name, text))?;
    }
    entries.sort_by_key(|(_, info)| info.data_offsets);
    check_cover(file, &entries, data_bytes)?;

    let tensors = entries.into_iter().map(|(name, info)| TensorEntry {
        name: name.into_boxed_str(),
        dtype: info.dtype,
        shape: info.shape.iter().map(|size| *size as u64).collect(),
        extent: data_offset + info.data_offsets.0 as u64..data_offset + info.data_offsets.1 as u64,
    });
    Ok(Header { tensors: tensors.collect(), metadata: raw.metadata, data_offset })
}

/// The bytes of a tensor, or why its dtype and shape have no size in bytes.
///
/// # Errors
/// A sentence: more than 2^64 bits, or a part of a byte.
pub fn tensor_bytes(dtype: Dtype, shape: &[usize]) -> std::result::Result<u64, String> {
    let elements = shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size as u64));
    let bits = elements.and_then(|elements| elements.checked_mul(dtype.bitsize() as u64));
    let bits = bits.ok_or_else(|| {
        format!("shape {} of {dtype} has more than 2^64 bits", format_shape(shape))
    })?;
    if bits % 8 != 0 {
        return Err(format!(
            "shape {} of {dtype} is {bits} bits, not whole bytes",
            format_shape(shape)
        ));
    }
    Ok(bits / 8)
}

/// Checks a tensor by itself: its extent is as long as its shape says.
fn check_size(info: &TensorInfo) -> std::result::Result<(), String> {
    let (start, end) = info.data_offsets;
    let Some(extent_bytes) = end.checked_sub(start) else {
        return Err(format!("its data ends at {end}, before its start at {start}"));
    };
    let wanted = tensor_bytes(info.dtype, &info.shape)?;
    if extent_bytes as u64 != wanted {
        return Err(format!(
            "{extent_bytes} bytes of data, but shape {} of {} has {wanted}",
            format_shape(&info.shape),
            info.dtype
        ));
    }
    Ok(())
}

/// Checks the tensors together: sorted by extent, they cover the data without overlap or hole.
fn check_cover(file: &str, entries: &[(String, TensorInfo)], data_bytes: u64) -> Result<()> {
    let mut covered = 0;
    let mut previous = "";
    for (name, info) in entries {
        let (start, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        if start < covered {
            let text = format!(
                "overlaps tensor {}: it starts at {start}, the other ends at {covered}",
                quoted(previous)
            );
            return Err(wrong_tensor(file, name, text));
        }
        if start > covered {
            let text = format!("a hole of {} bytes lies before it", start - covered);
            return Err(wrong_tensor(file, name, text));
        }
        if end > data_bytes {
            let text =
                format!("its data ends at {end}, but the file has only {data_bytes} bytes of data");
            return Err(wrong_tensor(file, name, text));
        }
        (covered, previous) = (end, name);
    }
    if covered != data_bytes {
        let text = format!("{} bytes follow the last tensor", data_bytes - covered);
        return Err(match previous {
            "" => wrong(file, text),
            last => wrong_tensor(file, last, text),
        });
    }
    Ok(())
}

/// The shape for an error, cut off when it is long.
fn format_shape(shape: &[usize]) -> String {
    const DIMENSIONS_MAX: usize = 16;
    if shape.len() <= DIMENSIONS_MAX {
        return format!("{shape:?}");
    }
    format!("{:?} and {} more", &shape[..DIMENSIONS_MAX], shape.len() - DIMENSIONS_MAX)
}

fn wrong(file: &str, text: String) -> Error {
    Error::new(ErrorCode::Format, format!("{file}: {text}"))
}

fn wrong_tensor(file: &str, name: &str, text: String) -> Error {
    wrong(file, format!("tensor {}: {text}", quoted(name)))
}

#[cfg(test)]
mod tests;
