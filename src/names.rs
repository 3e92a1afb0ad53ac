//! Names of tensors and files: how they are ordered and how an error quotes them.
//!
//! Names come from files that anybody may have written. They are ordered as people count
//! (`layers.2` before `layers.10`), and quoted so that a hostile one can neither break a log line
//! nor fill it. Does not own any state.

use std::cmp::Ordering;
use std::fmt::Display;

/// A quoted name longer than this is cut off, in characters.
const QUOTED_CHARS_MAX: usize = 120;

/// The name between quotes, control characters escaped, cut off with `...` when it is long.
#[must_use]
pub fn quoted(name: &str) -> String {
    let mut text = String::with_capacity(name.len().min(2 * QUOTED_CHARS_MAX) + 2);
    text.push('\'');
    for (position, character) in name.chars().enumerate() {
        if position == QUOTED_CHARS_MAX {
            text.push_str("...");
            break;
        }
        text.extend(character.escape_debug());
    }
    text.push('\'');
    text
}

/// Most characters of another's error text, which may quote all of a file; the end says where.
const TOLD_CHARS_MAX: usize = 400;
const TOLD_END_CHARS: usize = 80;

/// What another library says of a stranger's file: printable, cut in the middle when it is long.
#[must_use]
pub fn told(error: &impl Display) -> String {
    let text = error.to_string();
    let begin = text.char_indices().nth(TOLD_CHARS_MAX - TOLD_END_CHARS).map(|(at, _)| at);
    let end = text.char_indices().nth_back(TOLD_END_CHARS - 1).map(|(at, _)| at);
    let cut = begin.zip(end).filter(|(begin, end)| {
        // Of a text that is hardly too long the end begins before the beginning ends.
        let between = text.get(*begin..*end);
        between.is_some_and(|between| between.chars().nth(TOLD_END_CHARS).is_some())
    });
    match cut {
        Some((begin, end)) => {
            format!("{} ... {}", printable(&text[..begin]), printable(&text[end..]))
        }
        None => printable(&text),
    }
}

/// A text with its control characters escaped: for a path that a stranger's index has a part of.
#[must_use]
pub fn printable(text: &str) -> String {
    let escaped = |text: &mut String, character: char| match character.is_control() {
        true => text.extend(character.escape_default()),
        false => text.push(character),
    };
    text.chars().fold(String::with_capacity(text.len()), |mut text, character| {
        escaped(&mut text, character);
        text
    })
}

/// Compares names with every run of decimal digits taken as one number, anything else bytewise.
///
/// A total order: names are equal only when they are the same, so a table sorted with it can be
/// searched with it. `layers.02` comes after `layers.2`.
#[must_use]
pub fn natural_order(left: &str, right: &str) -> Ordering {
    let (mut a, mut b) = (left.as_bytes(), right.as_bytes());
    loop {
        let ordering = match (a.first(), b.first()) {
            (Some(x), Some(y)) if x.is_ascii_digit() && y.is_ascii_digit() => {
                let (number_a, number_b) = (take_digits(&mut a), take_digits(&mut b));
                compare_numbers(number_a, number_b)
            }
            (Some(x), Some(y)) => {
                (a, b) = (&a[1..], &b[1..]);
                x.cmp(y)
            }
            // Equal but for leading zeros: the bytes decide.
            (None, None) => return left.cmp(right),
            (None, Some(_)) => Ordering::Less,
            (Some(_), None) => Ordering::Greater,
        };
        if ordering != Ordering::Equal {
            return ordering;
        }
    }
}

fn take_digits<'a>(text: &mut &'a [u8]) -> &'a [u8] {
    let end = text.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    *text = rest;
    digits
}

/// Numbers of any length, so no overflow: without leading zeros the longer one is larger.
fn compare_numbers(left: &[u8], right: &[u8]) -> Ordering {
    let significant = |digits: &[u8]| digits.iter().position(|digit| *digit != b'0');
    let left = &left[significant(left).unwrap_or(left.len())..];
    let right = &right[significant(right).unwrap_or(right.len())..];
    left.len().cmp(&right.len()).then_with(|| left.cmp(right))
}

#[cfg(test)]
#[cfg(not(vbar_loom))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn layers_are_counted() {
        let mut names =
            ["layers.10.w", "layers.2.w", "layers.2.b", "layers.02.b", "layers.x", "lay", "9", ""];
        names.sort_by(|a, b| natural_order(a, b));
        assert_eq!(
            names,
            ["", "9", "lay", "layers.02.b", "layers.2.b", "layers.2.w", "layers.10.w", "layers.x"]
        );
        let long = "99999999999999999999999999999999";
        assert_eq!(natural_order(long, &format!("1{long}")), Ordering::Less);
    }

    #[test]
    fn hostile_names_stay_on_one_short_line() {
        let text = quoted(&"a\n\u{1b}[2J".repeat(1000));
        assert!(text.len() < 2000 && !text.contains(['\n', '\u{1b}']), "{text}");
        assert_eq!(quoted("layers.0"), "'layers.0'");
        assert_eq!(printable("mödel/a\n\u{1b}[2J\u{9b}"), "mödel/a\\n\\u{1b}[2J\\u{9b}");
    }

    #[test]
    fn what_others_say_is_short_and_keeps_its_end() {
        assert_eq!(told(&"unknown variant `\0` at line 1"), "unknown variant `\\u{0}` at line 1");
        let long = told(&format!("unknown variant `{}` at line 1 column 2", "é\n".repeat(100_000)));
        assert!(long.starts_with("unknown variant `é\\n"), "{long}");
        assert!(long.ends_with("at line 1 column 2") && !long.contains('\n'), "{long}");
        assert!(long.chars().count() < 1000, "{long}");
        for (letter, count) in
            ["a", "é", "日"].into_iter().flat_map(|of| (0..700).map(move |n| (of, n)))
        {
            let said = told(&letter.repeat(count));
            let whole = said.chars().count() == count;
            assert!(whole || count > TOLD_CHARS_MAX && said.contains(" ... "), "{count}: {said}");
            assert!(said.chars().count() <= TOLD_CHARS_MAX + TOLD_END_CHARS, "{count}: {said}");
        }
    }

    proptest! {
        #[test]
        fn the_order_is_total(names in prop::collection::vec("[0-2a:/]{0,6}", 3)) {
            let [a, b, c] = [&names[0], &names[1], &names[2]];
            prop_assert_eq!(natural_order(a, b), natural_order(b, a).reverse());
            prop_assert_eq!(natural_order(a, b) == Ordering::Equal, a == b);
            if natural_order(a, b).is_le() && natural_order(b, c).is_le() {
                prop_assert!(natural_order(a, c).is_le());
            }
        }
    }
}
