//! Hostile input: bytes from strangers, and programs that call in any order with anything.
//!
//! A target takes bytes and panics when a promise is broken. Here, on stable Rust, each target gets
//! its corpus (`tests/fuzz/corpus`, inputs that found something among it) and the same mutations of
//! it each time; `make fuzz` gives the same targets to libFuzzer, which looks for
//! inputs that take new ways through the code.
//!
//! `VBAR_FUZZ_RUNS=n` runs more or fewer mutations, `VBAR_FUZZ_SEED=n` draws others. An input that
//! fails is shrunk, printed and saved; `VBAR_FUZZ_TARGET=name VBAR_FUZZ_INPUT=path` runs it alone
//! in the test `child`, and `VBAR_FUZZ_TELL=1` prints the calls of one of `calls`.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod corpus;
mod mutate;
mod runner;
mod targets;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use runner::{Found, Plan, child_of, look};
use targets::{TARGETS, Target};

/// A target survives its corpus and its mutations, in a process of its own.
fn check(name: &str) {
    let target = targets::find(name);
    let plan = Plan::usual(target);
    if let Some(found) = look(&plan) {
        panic!("{found}");
    }
}

#[test]
fn headers_of_strangers() {
    check("header");
}

#[test]
fn indexes_of_strangers() {
    check("index");
}

#[test]
fn option_strings() {
    check("options");
}

#[test]
fn what_the_system_tells() {
    check("system");
}

#[test]
fn calls_in_any_order() {
    check("calls");
}

/// What the others start: it does nothing by itself.
#[test]
fn child() {
    child_of(TARGETS.iter().chain(planted::ALL));
}

#[test]
fn every_target_has_a_corpus_and_every_corpus_a_target() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus");
    let entries = std::fs::read_dir(folder).unwrap();
    let found: BTreeSet<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    let named: BTreeSet<String> = TARGETS.iter().map(|target| target.name.to_owned()).collect();
    assert_eq!(found, named);
    for target in TARGETS {
        let inputs = corpus::of(target.name);
        assert!(!inputs.is_empty(), "{}", target.name);
        let longest = inputs.iter().map(Vec::len).max().unwrap();
        assert!(longest <= target.bytes_max, "{}: {longest}", target.name);
    }
}

/// The program gets the models of the corpora too: it shows them or says what is wrong.
#[test]
fn the_program_inspects_every_model_of_the_corpus() {
    let mut shown = 0;
    for (name, make) in [
        ("header", targets::header::model as fn(&[u8], &Path) -> std::path::PathBuf),
        ("index", targets::index::model),
    ] {
        for input in corpus::of(name) {
            let folder = tempfile::tempdir().unwrap();
            let model = make(&input, folder.path());
            let program = env!("CARGO_BIN_EXE_vbar");
            let out = Command::new(program).arg("inspect").arg(&model).output().unwrap();
            let told = String::from_utf8_lossy(&out.stderr).into_owned();
            let code = out.status.code();
            assert!(matches!(code, Some(0 | 2 | 3)), "{name}: {code:?}: {told}");
            assert!(!told.contains("panicked") && !told.contains('\u{1b}'), "{name}: {told}");
            shown += u32::from(code == Some(0));
        }
    }
    assert!(shown > 3, "{shown} models could be shown");
}

/// Targets that fail, so that the runner can be seen to find, to shrink and to tell.
mod planted {
    use super::Target;

    fn has(bytes: &[u8], word: &[u8]) -> bool {
        bytes.windows(word.len()).any(|window| window == word)
    }

    const fn target(name: &'static str, run: fn(&[u8])) -> Target {
        Target { name, run, words: &["<!>"], runs: 4000, bytes_max: 100 }
    }

    pub(super) const ALL: &[Target] = &[
        target("planted panic", |bytes| assert!(!has(bytes, b"<!>"), "the word is there")),
        target("planted abort", |bytes| {
            if has(bytes, b"<!>") {
                std::process::abort();
            }
        }),
        target("planted hang", |bytes| while has(bytes, b"<!>") {}),
        target("planted nothing", |_| {}),
    ];
}

fn planted(at: usize) -> Option<Found> {
    let corpus = vec![b"some bytes that are not short at all".to_vec()];
    let target = &planted::ALL[at];
    look(&Plan { corpus, still_seconds: 4, ..Plan::usual(target) })
}

#[test]
fn the_runner_finds_a_panic_and_shrinks_it() {
    let found = planted(0).expect("it panics");
    assert_eq!(found.input, b"<!>");
    let told = found.to_string();
    assert!(told.contains("the word is there") && told.contains("VBAR_FUZZ_INPUT"), "{told}");
    assert_eq!(std::fs::read(&found.path).unwrap(), b"<!>");
}

#[test]
fn the_runner_finds_an_abort_and_shrinks_it() {
    let found = planted(1).expect("it aborts");
    assert_eq!(found.input, b"<!>");
    assert!(found.to_string().contains("signal"), "{found}");
}

#[test]
fn the_runner_finds_what_never_ends() {
    let found = planted(2).expect("it hangs");
    assert!(found.input.windows(3).any(|window| window == b"<!>"));
    assert!(found.to_string().contains("did not end"), "{found}");
}

#[test]
fn the_runner_finds_nothing_where_nothing_is() {
    assert!(planted(3).is_none());
}

/// A function of the headers that no sequence of calls can have is not tried.
#[test]
fn sequences_have_every_function_of_the_headers() {
    let declared: BTreeSet<&str> = targets::calls::statuses::functions().collect();
    let called: BTreeSet<&str> = targets::calls::functions().collect();
    assert_eq!(declared, called);
}
