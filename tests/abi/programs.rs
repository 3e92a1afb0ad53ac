//! The C tests of this folder, and the examples in C and Rust: compiled, run on the simulated
//! device, and believed only when they say so themselves.

use std::collections::BTreeSet;
use std::process::Command;

use vbar::driver::sim::Verb;

use crate::built::{Programs, library, run};
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

#[test]
fn structs_grow_in_both_directions() {
    check_program(&["tests/abi/sizes.c"]);
}

#[test]
fn scenarios_4_and_5_ids_are_closed_once() {
    check_program(&["tests/abi/life.c"]);
}

#[test]
fn threads_without_a_context_may_call_everything() {
    check_program(&["tests/abi/threads.c"]);
}

#[test]
fn scenario_38_files_that_do_not_stay_as_they_were() {
    check_program(&["tests/abi/files.c"]);
}

#[test]
fn scenario_32_addresses_are_what_they_cost() {
    check_program(&["tests/abi/addresses.c"]);
}

#[test]
fn processes_end_and_fork_with_everything_open() {
    check_program(&["tests/abi/process.c"]);
}

#[test]
fn messages_are_delivered_with_no_lock_held() {
    check_program(&["tests/abi/log.c"]);
}

#[test]
fn every_call_of_the_driver_may_fail() {
    let programs = Programs::new();
    let program = programs.compile("failing", &["tests/abi/failing.c"]);
    let verbs = Verb::ALL.iter().map(|verb| verb.name());
    run(Command::new(program).arg(programs.path()).args(verbs));
}

#[test]
fn a_library_that_is_unloaded_stays() {
    let programs = Programs::new();
    let program = programs.compile("reload", &["tests/abi/reload.c"]);
    run(Command::new(program).arg(library()));
}
