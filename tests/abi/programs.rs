//! The C tests of this folder, and the examples in C and Rust: compiled, run on the simulated
//! device, and believed only when they say so themselves.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use vbar::driver::sim::Verb;
use vbar::driver::sys::Api;
use vbar::host::model_files::Model;
use vbar::model::synth::{synthesize, synthesize_sharded};

use crate::built::{Programs, library, root, run};
use crate::sources::HOSTILE;
use crate::{declared_functions, headers};

/// Compiles a program and runs it; it gets a folder for files of its own.
#[track_caller]
fn check_program(sources: &[&str]) {
    let programs = Programs::new();
    let program = programs.compile("program", sources);
    run(Command::new(program).arg(programs.path()));
}

/// As [`check_program`], once more with a thread of the library's own.
#[track_caller]
fn check_program_with_threads(sources: &[&str]) {
    let programs = Programs::new();
    let program = programs.compile("program", sources);
    run(Command::new(&program).arg(programs.path()));
    run(Command::new(&program).arg(programs.path()).env("VBAR_TEST_THREADS", "1"));
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
    check_program_with_threads(HOSTILE);
}

#[test]
fn structs_grow_in_both_directions() {
    check_program(&["tests/abi/sizes.c"]);
}

#[test]
fn scenarios_4_and_5_ids_are_closed_once() {
    check_program_with_threads(&["tests/abi/life.c"]);
}

#[test]
fn threads_without_a_context_may_call_everything() {
    check_program_with_threads(&["tests/abi/threads.c"]);
}

#[test]
fn scenario_38_files_that_do_not_stay_as_they_were() {
    check_program(&["tests/abi/files.c"]);
}

#[test]
fn a_model_streams_pass_after_pass_with_threads() {
    check_program(&["tests/abi/streaming.c"]);
}

#[test]
fn scenario_32_addresses_are_what_they_cost() {
    check_program(&["tests/abi/addresses.c"]);
}

#[test]
fn processes_end_and_fork_with_everything_open() {
    check_program_with_threads(&["tests/abi/process.c"]);
}

/// The CUDA driver of a machine without a device, `libcuda.so.1` in the programs' folder.
fn stand_in_driver(programs: &Programs) {
    let mut source = std::fs::read_to_string(root().join("tests/abi/opening_driver.c")).unwrap();
    for name in Api::REQUIRED.iter().filter(|name| **name != "cuInit") {
        source.push_str(&format!("int {name}(void) {{ return 801; }}\n"));
    }
    let (text, library) = (programs.path().join("driver.c"), programs.path().join("libcuda.so.1"));
    std::fs::write(&text, source).unwrap();
    let arguments = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o"];
    run(Command::new("cc").args(arguments).args([library, text]));
}

#[test]
fn a_child_that_is_forked_in_a_first_opening_never_hangs() {
    let programs = Programs::new();
    stand_in_driver(&programs);
    let program = programs.compile("opening", &["tests/abi/opening.c"]);
    run(Command::new(program).arg("stand-in").env("LD_LIBRARY_PATH", programs.path()));
}

#[test]
fn signals_change_nothing_and_a_handler_may_end_waits() {
    check_program_with_threads(&["tests/abi/signals.c"]);
}

#[test]
fn messages_are_delivered_with_no_lock_held() {
    check_program(&["tests/abi/log.c"]);
}

#[test]
fn scenario_60_messages_say_what_failed_and_how_full_it_was() {
    check_program(&["tests/abi/messages.c"]);
}

#[test]
fn every_call_of_the_driver_may_fail() {
    let programs = Programs::new();
    let program = programs.compile("failing", &["tests/abi/failing.c"]);
    let verbs = Verb::ALL.iter().map(|verb| verb.name());
    run(Command::new(program).arg(programs.path()).args(verbs));
}

/// They run on a GPU, by `make device`.
#[test]
fn the_tests_for_a_gpu_compile() {
    for name in ["gpu", "reset"] {
        Programs::new().compile(name, &[&format!("tests/abi/{name}.c")]);
    }
}

#[test]
fn a_library_that_is_unloaded_stays() {
    let programs = Programs::new();
    let program = programs.compile("reload", &["tests/abi/reload.c"]);
    run(Command::new(&program).arg(library()));
    // With threads of the library's own, too.
    run(Command::new(&program).arg(library()).env("VBAR_TEST_THREADS", "1"));
}

/// A simulated device that holds the default headroom and what an example needs.
const EXAMPLE_DRIVER: &str = "sim:capacity=512M";

/// The number before a word that an engine prints.
#[track_caller]
fn number_before(printed: &str, words: &str) -> u64 {
    let at = printed.find(words).unwrap_or_else(|| panic!("no '{words}' in:\n{printed}"));
    let number = printed[..at].trim_end().rsplit(|c: char| !c.is_ascii_digit()).next();
    number.unwrap().parse().unwrap_or_else(|_| panic!("no number before '{words}':\n{printed}"))
}

/// What an engine prints: that it streamed, fell back to the host, and was right.
#[track_caller]
fn check_engine(printed: &str) {
    assert!(printed.contains("simulated device in host memory"), "{printed}");
    assert!(printed.lines().last() == Some("all results are right"), "{printed}");
    assert_eq!(printed.matches("0 of 2 results wrong").count(), 4, "{printed}");
    for words in ["layers on the device", "on the host", "misses", "pages evicted"] {
        assert!(number_before(printed, words) > 0, "{words}: {printed}");
    }
}

/// An example in Rust, built now if it is not.
fn example(name: &str) -> PathBuf {
    let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
    let cargo = ["build", "--quiet", "--profile", profile, "--example", name];
    run(Command::new(env!("CARGO")).current_dir(root()).args(cargo));
    library().parent().unwrap().with_file_name("examples").join(name)
}

#[test]
fn the_engine_in_c_streams_a_model_and_is_right() {
    let programs = Programs::new();
    let program = programs.compile("engine", &["examples/engine.c"]);
    check_engine(&run(Command::new(&program).env("VBAR_DRIVER", EXAMPLE_DRIVER)));
    // A model of somebody else, shaped as models are.
    let path = programs.path().join("model.safetensors");
    synthesize(&path, 24 << 20, 7).unwrap();
    let shards = programs.path().join("shards");
    synthesize_sharded(&shards, 24 << 20, 7, 3).unwrap();
    for path in [path, shards] {
        let printed = run(Command::new(&program).arg(&path).env("VBAR_DRIVER", EXAMPLE_DRIVER));
        assert!(printed.ends_with("all results are right\n"), "{printed}");
        assert!(number_before(&printed, "pages evicted") > 0, "{printed}");
    }
}

#[test]
fn the_engine_in_rust_streams_a_model_and_is_right() {
    check_engine(&run(Command::new(example("engine")).env("VBAR_DRIVER", EXAMPLE_DRIVER)));
}

/// A smallest program: a line for each tensor, resident or offloaded, and a usage without a model.
#[track_caller]
fn check_smallest(program: &Path, source: &str) {
    let source = std::fs::read_to_string(root().join(source)).unwrap();
    assert!(source.lines().count() <= 40, "{} lines", source.lines().count());
    let programs = Programs::new();
    let path = programs.path().join("model.safetensors");
    synthesize(&path, 1 << 20, 7).unwrap();
    let tensors = Model::open(&path).unwrap().tensors().len();
    // The second has no memory beside the headroom; only a tensor without bytes needs none.
    for (driver, words) in [(EXAMPLE_DRIVER, " bytes at 0x"), ("sim:capacity=256M", "offloaded: ")]
    {
        let printed = run(Command::new(program).arg(&path).env("VBAR_DRIVER", driver));
        assert_eq!(printed.lines().count(), tensors, "{printed}");
        let fits = |line: &str| line.contains(words) || line.starts_with("0 bytes at ");
        assert!(printed.contains(words) && printed.lines().all(fits), "{printed}");
    }
    let fails = |arguments: &[&str], words: &str| {
        let mut command = Command::new(program);
        let failed = command.args(arguments).env("VBAR_DRIVER", EXAMPLE_DRIVER).output().unwrap();
        assert_eq!(failed.status.code(), Some(1));
        let said = String::from_utf8(failed.stderr).unwrap();
        assert!(said.contains(words), "{said}");
    };
    fails(&[], "usage: smallest MODEL");
    fails(&["/nowhere"], "/nowhere");
}

#[test]
fn the_smallest_program_in_c_is_short_and_faults_every_tensor() {
    let programs = Programs::new();
    let source = "examples/smallest.c";
    check_smallest(&programs.compile("smallest", &[source]), source);
}

#[test]
fn the_smallest_program_in_rust_is_short_and_faults_every_tensor() {
    check_smallest(&example("smallest"), "examples/smallest.rs");
}

#[test]
fn the_program_with_weights_of_its_own_refills_what_was_evicted() {
    let printed = run(Command::new(example("own_weights")).env("VBAR_DRIVER", EXAMPLE_DRIVER));
    assert_eq!(printed.matches("the bytes must be written").count(), 2, "{printed}");
}
