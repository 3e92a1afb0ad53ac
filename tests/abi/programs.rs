//! The C tests of this folder, and the examples in C and Rust: compiled, run on the simulated
//! device, and believed only when they say so themselves.

use std::collections::BTreeSet;
use std::process::Command;

use crate::built::{Programs, run};
use crate::{declared_functions, headers};

const HOSTILE: &[&str] = &[
    "tests/abi/hostile.c",
    "tests/abi/hostile_device.c",
    "tests/abi/hostile_bar.c",
    "tests/abi/hostile_model.c",
    "tests/abi/hostile_sim.c",
];

/// Compiles a program and runs it; it gets a folder for files of its own.
#[track_caller]
fn check_program(sources: &[&str]) {
    let programs = Programs::new();
    let program = programs.compile("program", sources);
    run(Command::new(program).arg(programs.path()));
}

#[test]
fn every_function_has_a_hostile_case() {
    let programs = Programs::new();
    let list = run(Command::new(programs.compile("hostile", HOSTILE)).arg("--list"));
    let cases: BTreeSet<&str> = list.lines().collect();
    assert_eq!(cases.len(), list.lines().count(), "a function has two cases");
    assert_eq!(cases, declared_functions(&headers()), "tests/abi/hostile_*.c");
}

#[test]
fn hostile_calls_come_back_with_a_status_and_change_nothing() {
    check_program(HOSTILE);
}
