//! Which tensors belong together, by their names: `model.layers.12` and all below it.
//!
//! Pure. A group ends at the first number of a name; a name without one falls under its first part.
//! For people, groups that differ in that number alone are folded into one row.

use std::collections::HashMap;

use serde::Serialize;

/// Tensors that belong together.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) tensor_count: u64,
    pub(super) tensor_bytes: u64,
}

/// The groups of tensors, given by name and bytes, in the order in which they first occur.
pub(super) fn groups<'a>(tensors: impl Iterator<Item = (&'a str, u64)>) -> Vec<Group> {
    summed(tensors.map(|(name, tensor_bytes)| {
        let name = group_of(name).to_owned();
        Group { name, tensor_count: 1, tensor_bytes }
    }))
}

/// Groups that differ in their number alone as one, `model.layers.*`; one that is alone keeps it.
pub(super) fn folded(groups: &[Group]) -> Vec<Group> {
    let mut alike: HashMap<String, usize> = HashMap::new();
    groups.iter().for_each(|group| *alike.entry(stem_of(&group.name)).or_default() += 1);
    summed(groups.iter().map(|group| {
        let stem = stem_of(&group.name);
        let name = if alike[&stem] > 1 { stem } else { group.name.clone() };
        Group { name, ..*group }
    }))
}

fn group_of(name: &str) -> &str {
    let mut end = 0;
    for part in name.split('.') {
        end += part.len();
        if is_number(part) {
            return &name[..end];
        }
        end += 1;
    }
    name.split_once('.').map_or(name, |(first, _)| first)
}

fn stem_of(group: &str) -> String {
    match group.rsplit_once('.') {
        Some((stem, number)) if is_number(number) => format!("{stem}.*"),
        None if is_number(group) => "*".to_owned(),
        _ => group.to_owned(),
    }
}

fn is_number(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())
}

/// Groups of the same name as one, in the order in which they first occur.
fn summed(groups: impl Iterator<Item = Group>) -> Vec<Group> {
    let mut found: Vec<Group> = Vec::new();
    let mut position_of: HashMap<String, usize> = HashMap::new();
    for group in groups {
        match position_of.get(&group.name) {
            Some(&position) => {
                found[position].tensor_count += group.tensor_count;
                found[position].tensor_bytes += group.tensor_bytes;
            }
            None => {
                position_of.insert(group.name.clone(), found.len());
                found.push(group);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(groups: &[Group]) -> Vec<(&str, u64, u64)> {
        groups.iter().map(|g| (&*g.name, g.tensor_count, g.tensor_bytes)).collect()
    }

    #[test]
    fn a_group_ends_at_the_first_number() {
        for (name, group) in [
            ("model.layers.12.attn.0.weight", "model.layers.12"),
            ("blk.0.attn_q.weight", "blk.0"),
            ("model.embed_tokens.weight", "model"),
            ("lm_head.weight", "lm_head"),
            ("7.weight", "7"),
            ("scale", "scale"),
            ("", ""),
            (".", ""),
            ("a..3", "a..3"),
        ] {
            assert_eq!(group_of(name), group, "{name}");
        }
    }

    #[test]
    fn groups_that_differ_in_their_number_are_folded() {
        let tensors = [
            ("embed.weight", 5),
            ("layers.0.q", 1),
            ("layers.0.k", 2),
            ("layers.1.q", 3),
            ("mid.0.q", 4),
            ("0.x", 1),
            ("1.x", 1),
            ("embed.bias", 1),
        ];
        let groups = groups(tensors.into_iter());
        let each = names(&groups);
        assert_eq!(each[..3], [("embed", 2, 6), ("layers.0", 2, 3), ("layers.1", 1, 3)]);
        let folded = folded(&groups);
        let expected = [("embed", 2, 6), ("layers.*", 3, 6), ("mid.0", 1, 4), ("*", 2, 2)];
        assert_eq!(names(&folded), expected);
    }
}
