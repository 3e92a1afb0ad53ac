//! What the headers say that each function may return: their sentences, read.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

const HEADER: &str = include_str!("../../../../include/vbar.h");
const SIM_HEADER: &str = include_str!("../../../../include/vbar_sim.h");

/// Statuses whose number is told by their name; INTERNAL and PROCESS_ENDING are never right here.
const NAMES: &[(&str, i32)] = &[
    ("OK", 0),
    ("INVALID_ARGUMENT", 1),
    ("STALE_HANDLE", 2),
    ("STALE_TOKEN", 3),
    ("DRIVER_MISSING", 4),
    ("DRIVER", 5),
    ("DEVICE_LOST", 6),
    ("DEVICE_NOT_REGISTERED", 7),
    ("ALREADY_OPEN", 8),
    ("UNSUPPORTED", 9),
    ("NO_ADDRESSES", 10),
    ("TOO_MANY_MAPPINGS", 11),
    ("IO", 12),
    ("FORMAT", 13),
    ("FILE_CHANGED", 14),
    ("TIMED_OUT", 15),
    ("CANCELLED", 16),
    ("HOST_MEMORY", 17),
    ("TOO_MANY_PINS", 18),
    ("CLOSED", 20),
    ("NOT_FOUND", 21),
];

/// The names of all functions of both headers.
pub(crate) fn functions() -> impl Iterator<Item = &'static str> {
    [HEADER, SIM_HEADER].into_iter().flat_map(declarations).map(|(name, ..)| name)
}

/// Name, comment and parameters of what a header declares.
fn declarations(header: &'static str) -> Vec<(&'static str, &'static str, &'static str)> {
    let mut found = Vec::new();
    for (at, _) in header.match_indices("(") {
        let name_start = header[..at].rfind([' ', '*', '\n']).map_or(0, |space| space + 1);
        let name = &header[name_start..at];
        let line_start = header[..name_start].rfind('\n').map_or(0, |end| end + 1);
        let line = &header[line_start..name_start];
        if !name.starts_with("vbar_") || line.is_empty() || line.starts_with([' ', '*', '/', '#']) {
            continue;
        }
        let comment = header[..line_start].rsplit_once("/*").map_or("", |(_, comment)| comment);
        let parameters = header[at..].split_once(';').map_or("", |(parameters, _)| parameters);
        found.push((name, comment, parameters));
    }
    found
}

/// Whether a function may return that status here: in one process, by one thread, with no GPU.
pub(super) fn may_return(function: &str, status: i32) -> bool {
    static MAY: OnceLock<BTreeMap<&str, BTreeSet<i32>>> = OnceLock::new();
    MAY.get_or_init(read)[function].contains(&status)
}

fn read() -> BTreeMap<&'static str, BTreeSet<i32>> {
    let told = declarations(HEADER);
    let sentences: BTreeMap<&str, (&str, &str)> = told
        .iter()
        .map(|(name, comment, parameters)| (*name, (sentence(comment), *parameters)))
        .collect();
    let mut may: BTreeMap<&str, BTreeSet<i32>> =
        sentences.keys().map(|name| (*name, of_function(name, &sentences, 0))).collect();
    for (name, _, parameters) in declarations(SIM_HEADER) {
        let mut statuses = common();
        statuses.extend(["DRIVER", "DEVICE_LOST"].map(number));
        // The kernels' module is loaded by the first launch.
        if parameters.contains("VbarDevice") {
            statuses.insert(number("UNSUPPORTED"));
        }
        if name == "vbar_sim_violation" {
            statuses.insert(number("NOT_FOUND"));
        }
        may.insert(name, statuses);
    }
    may
}

fn number(name: &str) -> i32 {
    NAMES.iter().find(|(other, _)| *other == name).expect("a status").1
}

fn common() -> BTreeSet<i32> {
    ["OK", "INVALID_ARGUMENT", "STALE_HANDLE", "STALE_TOKEN"].map(number).into()
}

/// What stands behind `Statuses:`.
fn sentence(comment: &'static str) -> &'static str {
    let Some((_, after)) = comment.split_once("Statuses:") else { return "" };
    after.split_once("Thread-safe").map_or(after, |(sentence, _)| sentence)
}

fn of_function(
    name: &str,
    sentences: &BTreeMap<&'static str, (&'static str, &'static str)>,
    depth: u32,
) -> BTreeSet<i32> {
    assert!(depth < 8, "{name}: statuses are told in a circle");
    let (sentence, parameters) = sentences[name];
    let mut statuses = BTreeSet::from([0]);
    let words: Vec<&str> = sentence.split_whitespace().collect();
    let text = words.join(" ");
    if text.contains("the common ones") {
        statuses.extend(common());
    }
    if text.contains("the driver's") {
        statuses.extend(["DRIVER", "DEVICE_LOST"].map(number));
    }
    for other in text.split('`').filter(|word| word.starts_with("vbar_")) {
        if text.contains(&format!("those of `{other}`")) {
            statuses.extend(of_function(other, sentences, depth + 1));
        }
    }
    let is_sign = |sign: char| !(sign.is_ascii_uppercase() || sign == '_');
    for word in text.split(is_sign) {
        statuses.extend(NAMES.iter().filter(|(name, _)| *name == word).map(|(_, number)| number));
    }
    // "A function that takes a stream may have to find out which of 256 others are done."
    if parameters.contains("VbarStream") {
        statuses.extend(["UNSUPPORTED", "TIMED_OUT", "CANCELLED"].map(number));
    }
    statuses
}
