//! One safetensors file, of any bytes: what the format's own crate accepts is accepted, and every
//! tensor of it becomes resident with the file's bytes.
//!
//! An input that begins with `+`, a number and a line end is a header, and as many bytes of data
//! behind it, which may be terabytes; any other is the file itself.

use std::path::{Path, PathBuf};

use vbar::ErrorCode;
use vbar::host::safetensors::{PREFIX_BYTES, header_bytes, parse_header};

use super::{Target, streamed, tree};

pub(crate) const TARGET: Target = Target {
    name: "header",
    run,
    words: &[
        "{}",
        "[]",
        "{\"",
        "\":{\"dtype\":\"",
        "\",\"shape\":[",
        "],\"data_offsets\":[",
        "]}",
        ",",
        "\"__metadata__\"",
        "null",
        "F4",
        "F6_E2M3",
        "F8_E4M3",
        "BOOL",
        "BF16",
        "F32",
        "C64",
        "I64",
        "U8",
        "\\u0000",
        "\\ud800",
        "\\n",
        "\u{feff}",
        " ",
        "\"a\"",
        "0,0",
        "8,16",
        "+16\n",
        "+0\n",
        "+1099511627776\n",
        "-0",
        "1.0",
        "1e1",
        "true",
        "[[[[",
        "}}}}",
    ],
    runs: 3000,
    bytes_max: 4096,
};

/// Differential, then the whole way to the device.
pub(crate) fn run(input: &[u8]) {
    let accepted = if input.starts_with(b"+") { None } else { Some(compare(input)) };
    let folder = tree::folder();
    let opened = streamed::check(&model(input, folder.path()));
    assert!(accepted.is_none_or(|accepted| accepted == opened), "parsed, but not opened");
}

/// Writes the input as a file.
pub(crate) fn model(input: &[u8], folder: &Path) -> PathBuf {
    let path = folder.join("model.safetensors");
    let text = input.strip_prefix(b"+").unwrap_or_default();
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number = std::str::from_utf8(&text[..digits]).ok().and_then(|text| text.parse().ok());
    match number {
        Some(bytes) => {
            let header = text.get(digits + 1..).unwrap_or_default();
            tree::write_model(&path, header, bytes).expect("a file");
        }
        None => std::fs::write(&path, input).expect("a file"),
    }
    path
}

/// Whether it is a model, for us and, but for names that occur twice, for the format's crate.
fn compare(file: &[u8]) -> bool {
    let theirs = safetensors::SafeTensors::deserialize(file);
    let bytes = file.len() as u64;
    let parsed = header_bytes("f", file, bytes)
        .and_then(|length| parse_header("f", &file[PREFIX_BYTES as usize..][..length], bytes));
    match (parsed, theirs) {
        (Ok(header), Ok(theirs)) => {
            assert_eq!(theirs.len(), header.tensors.len());
            for tensor in &header.tensors {
                let view = theirs.tensor(&tensor.name).expect("they have it too");
                let extent = tensor.extent.start as usize..tensor.extent.end as usize;
                assert!(view.data() == &file[extent], "other bytes");
                assert_eq!(view.dtype(), tensor.dtype);
            }
            true
        }
        (Ok(_), Err(error)) => panic!("the format's crate refuses it: {error}"),
        (Err(error), theirs) => {
            assert_eq!(error.code(), ErrorCode::Format);
            let twice = error.to_string().contains("twice");
            assert!(theirs.is_err() || twice, "only the format's crate takes it: {error}");
            false
        }
    }
}
