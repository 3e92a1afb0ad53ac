//! The JSON of headers and shard indexes, with names that occur twice refused.
//!
//! A JSON object may name a member twice; readers then keep the first, the last, or both, so two
//! programs can see two different models in one file. These visitors stop at the second one.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::marker::PhantomData;

use ::safetensors::tensor::TensorInfo;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use crate::names::quoted;

/// The member of a header that is no tensor.
const METADATA_NAME: &str = "__metadata__";

/// A JSON object whose names are all different.
pub(super) struct UniqueMap<V>(pub(super) BTreeMap<String, V>);

/// A header as it is written, its numbers not yet checked.
pub(super) struct RawHeader {
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) tensors: BTreeMap<String, TensorInfo>,
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueMapVisitor(PhantomData))
    }
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(RawHeaderVisitor)
    }
}

struct UniqueMapVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueMapVisitor<V> {
    type Value = UniqueMap<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            insert_unique(&mut entries, name, "name", &mut map)?;
        }
        Ok(UniqueMap(entries))
    }
}

struct RawHeaderVisitor;

impl<'de> Visitor<'de> for RawHeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut metadata = None;
        let mut tensors = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            if name != METADATA_NAME {
                insert_unique(&mut tensors, name, "tensor", &mut map)?;
                continue;
            }
            if metadata.is_some() {
                return Err(A::Error::custom(format!("{METADATA_NAME} occurs twice")));
            }
            let value = map.next_value::<Option<UniqueMap<String>>>();
            let value = value.map_err(|error| said_of(METADATA_NAME, &error))?;
            metadata = Some(value.map(|map| map.0).unwrap_or_default());
        }
        Ok(RawHeader { metadata: metadata.unwrap_or_default(), tensors })
    }
}

fn insert_unique<'de, V: Deserialize<'de>, A: MapAccess<'de>>(
    entries: &mut BTreeMap<String, V>,
    name: String,
    kind: &str,
    map: &mut A,
) -> Result<(), A::Error> {
    match entries.entry(name) {
        Entry::Occupied(first) => {
            Err(A::Error::custom(format!("{kind} {} occurs twice", quoted(first.key()))))
        }
        Entry::Vacant(slot) => {
            let value = map
                .next_value::<V>()
                .map_err(|error| said_of(format_args!("{kind} {}", quoted(slot.key())), &error))?;
            slot.insert(value);
            Ok(())
        }
    }
}

/// The error with what it is about before it; the position in the text is kept by `serde_json`.
fn said_of<E: serde::de::Error>(what: impl fmt::Display, error: &E) -> E {
    E::custom(format!("{what}: {error}"))
}
