//! The index of a sharded model: which tensor is in which file.
//!
//! Pure: text in, table out. A shard is named by a path relative to the index's folder; one that
//! could lead out of the folder is refused, since the index may come from a stranger. (A symbolic
//! link inside the folder is followed when the shard is opened: whoever made the link may read
//! what it points to, and caches of downloaded models are built of such links.)

use std::collections::BTreeMap;
use std::path::{Component, Path};

use serde::Deserialize;

use super::json::UniqueMap;
use crate::error::{Error, ErrorCode, Result};
use crate::names::{quoted, told};

/// The largest index that is read, in bytes: the limit of a header.
pub const INDEX_BYTES_MAX: u64 = super::HEADER_BYTES_MAX;

/// Members that are not needed, `metadata` with its often wrong `total_size` among them, are
/// skipped.
#[derive(Deserialize)]
struct RawIndex {
    weight_map: UniqueMap<String>,
}

/// Parses a `*.safetensors.index.json`: the shard of each tensor, by the tensor's name.
///
/// # Errors
/// `Format`, with the index's and the tensor's name: no JSON, no `weight_map`, a name that occurs
/// twice, a shard's path that is empty, absolute or has a `.` or `..` in it.
pub fn parse_index(file: &str, text: &[u8]) -> Result<BTreeMap<String, String>> {
    let index: RawIndex = serde_json::from_slice(text).map_err(|error| {
        Error::new(ErrorCode::Format, format!("{file}: not an index of shards: {}", told(&error)))
    })?;
    let weight_map = index.weight_map.0;
    if weight_map.is_empty() {
        return Err(Error::new(ErrorCode::Format, format!("{file}: the index names no tensor")));
    }
    for (tensor, shard) in &weight_map {
        if !stays_inside(shard) {
            return Err(Error::new(
                ErrorCode::Format,
                format!(
                    "{file}: tensor {}: shard {} is not a path inside the index's folder",
                    quoted(tensor),
                    quoted(shard)
                ),
            ));
        }
    }
    Ok(weight_map)
}

/// Only plain components, spelled the one way that yields them: two spellings of one file would
/// be opened as two.
fn stays_inside(shard: &str) -> bool {
    let mut plain = Vec::new();
    for component in Path::new(shard).components() {
        match component {
            Component::Normal(part) => plain.push(part.to_string_lossy()),
            _ => return false,
        }
    }
    !plain.is_empty() && !shard.contains('\0') && plain.join("/") == shard
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_shard(shard: &str) -> Result<BTreeMap<String, String>> {
        parse_index("the index", format!(r#"{{"weight_map":{{"w":"{shard}"}}}}"#).as_bytes())
    }

    #[test]
    fn shards_stay_in_their_folder() {
        for inside in ["a.safetensors", "deep/er/a.safetensors", "..a", "a..b/c"] {
            assert_eq!(parse_shard(inside).unwrap()["w"], inside);
        }
        for outside in [
            "",
            "/etc/passwd",
            "../a",
            "a/../../b",
            "a/..",
            ".",
            "./a",
            "a/./b",
            "a//b",
            "a/",
            "\\u0000",
        ] {
            let error = parse_shard(outside).unwrap_err();
            assert_eq!(error.code(), ErrorCode::Format);
            let text = error.to_string();
            assert!(text.contains("the index") && text.contains("'w'"), "{text}");
        }
    }

    #[test]
    fn an_index_names_each_tensor_once() {
        for wrong in [
            "",
            "[]",
            "{}",
            r#"{"weight_map":{}}"#,
            r#"{"weight_map":{"w":"a","w":"b"}}"#,
            r#"{"weight_map":{"w":1}}"#,
            r#"{"weight_map":{"w":"a"},"weight_map":{"w":"b"}}"#,
        ] {
            let error = parse_index("the index", wrong.as_bytes()).unwrap_err();
            assert_eq!(error.code(), ErrorCode::Format, "{wrong}");
        }
        let good = r#"{"metadata":{"total_size":1.5},"weight_map":{"w":"a"},"other":[{}]}"#;
        assert_eq!(parse_index("the index", good.as_bytes()).unwrap().len(), 1);
    }
}
