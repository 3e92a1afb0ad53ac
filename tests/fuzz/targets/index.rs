//! A folder of strangers: an index, shards, links, pipes, and names that try to get out.
//!
//! The first line says what is opened; what stands behind it is `model.safetensors.index.json`,
//! unless it is nothing. The sections are the other files (`tree`). Beside the folder there is a
//! model that no index may reach.

use std::path::{Path, PathBuf};

use super::{Target, streamed, tree};

pub(crate) const TARGET: Target = Target {
    name: "index",
    run,
    words: &[
        tree::WORDS[0],
        tree::WORDS[1],
        tree::WORDS[2],
        tree::WORDS[3],
        tree::WORDS[4],
        tree::WORDS[5],
        tree::WORDS[6],
        tree::WORDS[7],
        tree::WORDS[8],
        tree::WORDS[9],
        tree::WORDS[10],
        tree::WORDS[11],
        "../outside.safetensors",
        "a.safetensors",
        "b.safetensors",
        "model.safetensors",
        "model.safetensors.index.json",
        "/dev/zero",
        "{\"weight_map\":{\"a\":\"a.safetensors\"}}",
        "\"weight_map\"",
        "\"metadata\"",
        "{",
        "}",
        "\\u0000",
        "\\u002e\\u002e/",
        "\\/",
        "\"a\"",
        "\"b\":\"b.safetensors\"",
        ",",
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}",
    ],
    runs: 1500,
    bytes_max: 4096,
};

pub(crate) fn run(input: &[u8]) {
    let folder = tree::folder();
    let opened = model(input, folder.path());
    if streamed::check(&opened) {
        streamed::check_paths(&opened, &folder.path().join("in"));
    }
}

/// Writes the folder; what is to be opened of it.
pub(crate) fn model(input: &[u8], folder: &Path) -> PathBuf {
    const OUTSIDE: &[u8] = br#"{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}"#;
    tree::write_model(&folder.join("outside.safetensors"), OUTSIDE, 8).expect("a file");
    let inside = folder.join("in");
    std::fs::create_dir(&inside).expect("a folder");
    let first = tree::make(input, &inside);
    let end = first.iter().position(|byte| *byte == b'\n').unwrap_or(first.len());
    let index = first.get(end + 1..).unwrap_or_default();
    if !index.is_empty() {
        std::fs::write(inside.join("model.safetensors.index.json"), index).expect("a file");
    }
    match &first[..end] {
        b"folder" => inside,
        b"link" => inside.join("link"),
        b"file" => inside.join("model.safetensors"),
        _ => inside.join("model.safetensors.index.json"),
    }
}
