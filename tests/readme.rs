//! The README's programs are the files in `examples/` that other tests compile and run.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::path::Path;

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The fenced block whose fence says `language`.
fn block(readme: &str, language: &str) -> String {
    let start = format!("```{language}\n");
    let (_, rest) = readme.split_once(&start).unwrap_or_else(|| panic!("no block of {language}"));
    rest.split_once("```").unwrap().0.to_owned()
}

#[test]
fn the_smallest_programs_are_those_that_run() {
    let readme = read("README.md");
    for (language, file) in [
        ("c", "examples/smallest.c"),
        ("cpp", "examples/smallest.cpp"),
        ("python", "examples/smallest.py"),
    ] {
        assert!(block(&readme, language) == read(file), "README.md: its {language} is not {file}");
    }
}
