//! The C ABI from outside: header, exported symbols, C and C++ against the built library.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

#[path = "abi/built.rs"]
mod built;
#[path = "abi/made.rs"]
mod made;
#[path = "abi/programs.rs"]
mod programs;
#[path = "abi/sources.rs"]
mod sources;
#[path = "abi/torch.rs"]
mod torch;

use std::collections::BTreeSet;
use std::process::Command;

use built::{Programs, library, root, run};

#[test]
fn the_headers_are_those_that_cbindgen_makes() {
    for header in made::HEADERS {
        let fresh = made::make(root(), header).unwrap();
        let committed = std::fs::read_to_string(root().join("include").join(header.name)).unwrap();
        assert!(fresh == committed, "include/{}: run `make header`", header.name);
    }
}

/// The text of both headers.
fn headers() -> String {
    let read = |header: &made::Header| root().join("include").join(header.name);
    made::HEADERS.iter().map(|header| std::fs::read_to_string(read(header)).unwrap()).collect()
}

/// Names of the functions of a header: what stands before the bracket of a declaration.
fn declared_functions(header: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    let mut rest = header;
    while let Some(at) = rest.find("vbar_") {
        let name_end = rest[at..].find(|c: char| !c.is_alphanumeric() && c != '_').unwrap();
        let (before, name) = (&rest[..at], &rest[at..at + name_end]);
        let line = before.rsplit('\n').next().unwrap();
        let declares = !line.starts_with([' ', '/', '*', '#']) && !line.is_empty();
        if declares && rest[at + name_end..].starts_with('(') {
            found.insert(name);
        }
        rest = &rest[at + name_end..];
    }
    found
}

/// Callers branch on statuses, so that each function has to say which it may return.
#[test]
fn every_function_tells_its_statuses() {
    let header = std::fs::read_to_string(root().join("include/vbar.h")).unwrap();
    let mut told = 0;
    for (before, after) in
        header.match_indices("\nVbarStatus vbar_").map(|(at, _)| header.split_at(at))
    {
        let name = after.split_once('(').unwrap().0.trim_start_matches("\nVbarStatus ");
        let comment = before.rsplit_once("/*").unwrap().1;
        assert!(comment.contains("Statuses:"), "{name}");
        told += 1;
    }
    assert!(told > 50, "{told}");
}

#[test]
fn the_library_exports_what_the_header_declares() {
    let symbols = run(Command::new("nm").args(["-D", "--defined-only"]).arg(library()));
    let exported: BTreeSet<&str> =
        symbols.lines().filter_map(|line| line.split_whitespace().last()).collect();
    assert_eq!(exported, declared_functions(&headers()));
}

fn check_compiles_and_runs(compiler: &str, language: &[&str]) {
    let programs = Programs::new();
    let program = programs.compile_as("status", compiler, language, &["tests/abi/status.c"]);
    let printed = run(&mut Command::new(&program));
    assert_eq!(printed.trim(), format!("vbar {}", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_c_program_reads_the_status_texts() {
    check_compiles_and_runs("cc", &["-std=c11"]);
}

#[test]
fn a_cpp_program_reads_the_status_texts() {
    // The only tool that `make test` can do without; CI installs it.
    if Command::new("c++").arg("--version").output().is_err() {
        println!("no c++ here: the header was not compiled as C++");
        return;
    }
    check_compiles_and_runs("c++", &["-std=c++17", "-x", "c++"]);
}
