//! The C++ headers, compiled as users would, warnings denied, and run on the simulated device.
//!
//! The checks themselves are C++ (`tests/abi/cpp/`); this compiles them in each standard by each
//! compiler that is here, and runs them, the examples too. `make test` can do without `c++`, which
//! CI installs, without `clang++` and without `valgrind`: what is missing is said.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

#[path = "abi/built.rs"]
#[expect(dead_code, reason = "what this test compiles has options of its own")]
mod built;

use std::path::{Path, PathBuf};
use std::process::Command;

use built::{Programs, root, run};

/// Files of the suite; the last one is of the style without exceptions.
const SUITE: &[&str] = &[
    "main",
    "words",
    "ownership",
    "faults",
    "failures",
    "files",
    "device",
    "threads",
    "dlpack",
    "no_exceptions",
];

const HEADERS: &[&str] =
    &["vbar.hpp", "vbar_callbacks.hpp", "vbar_fault.hpp", "vbar_sim.hpp", "vbar_types.hpp"];

/// Functions that only Python needs.
const NOT_FOR_CPP: &[&str] = &[
    "vbar_dlpack_capsule_destructor",
    "vbar_dlpack_export_capsule",
    "vbar_dlpack_set_capsule_functions",
];

/// Functions that PyTorch calls by their addresses, and what its Python side asks.
const OF_PYTORCH: &str = "vbar_torch_";

fn is_here(tool: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok();
    if !found {
        println!("no {tool} here: nothing was tried with it");
    }
    found
}

/// A folder of what one compiler makes in one standard.
struct Builder {
    compiler: &'static str,
    standard: &'static str,
    programs: Programs,
}

impl Builder {
    fn new(compiler: &'static str, standard: &'static str) -> Self {
        Self { compiler, standard, programs: Programs::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.programs.path().join(name)
    }

    fn command(&self, options: &[&str]) -> Command {
        let mut command = Command::new(self.compiler);
        command.arg(self.standard).args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-g"]);
        command.args(options).current_dir(root()).args(["-I", "include"]);
        command
    }

    fn compile(&self, name: &str) -> PathBuf {
        let object = self.path(&format!("{name}.o"));
        let options: &[&str] = match name {
            "no_exceptions" => &["-fno-exceptions", "-fno-rtti"],
            _ => &[],
        };
        let source = format!("tests/abi/cpp/{name}.cpp");
        run(self.command(options).arg("-c").arg(source).arg("-o").arg(&object));
        object
    }

    /// A program of sources or objects, which finds the library wherever it is run.
    fn link(&self, name: &str, options: &[&str], parts: &[PathBuf]) -> PathBuf {
        let program = self.path(name);
        let mut command = self.command(options);
        command.args(parts).arg("-o").arg(&program).arg("-L").arg(self.programs.path());
        command.args(["-lvbar", "-ldl", "-pthread"]);
        command.arg(format!("-Wl,-rpath,{}", self.programs.path().display()));
        run(&mut command);
        program
    }

    /// The suite, its files compiled two at a time.
    fn suite(&self) -> PathBuf {
        let (first, second) = SUITE.split_at(SUITE.len() / 2);
        let compile = |names: &[&str]| -> Vec<PathBuf> {
            names.iter().map(|name| self.compile(name)).collect()
        };
        let objects = std::thread::scope(|scope| {
            let other = scope.spawn(|| compile(second));
            let mut objects = compile(first);
            objects.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            objects
        });
        self.link("suite", &[], &objects)
    }
}

/// Passed by each of the suite's runs: more than any file of it has.
const TESTS_MIN: usize = 50;

#[track_caller]
fn check_suite_passed(printed: &str) {
    let last = printed.lines().last().unwrap_or_default();
    let passed = last.strip_suffix(" passed, 0 failed").and_then(|count| count.parse().ok());
    assert!(passed.is_some_and(|count: usize| count >= TESTS_MIN), "{printed}");
}

fn check_suite(compiler: &'static str, standard: &'static str) {
    if is_here(compiler) {
        let builder = Builder::new(compiler, standard);
        check_suite_passed(&run(&mut Command::new(builder.suite())));
    }
}

#[test]
fn the_suite_passes_as_cpp17_and_under_valgrind() {
    if !is_here("c++") {
        return;
    }
    let builder = Builder::new("c++", "-std=c++17");
    let suite = builder.suite();
    check_suite_passed(&run(&mut Command::new(&suite)));
    if is_here("valgrind") {
        check_suite_passed(&run(memcheck().arg(&suite)));
    }
}

/// Valgrind, which fails on an error or a leak.
fn memcheck() -> Command {
    let mut command = Command::new("valgrind");
    command.args(["-q", "--error-exitcode=9", "--leak-check=full", "--fair-sched=try"]);
    // The library keeps tables and its logger until the process ends.
    command.args(["--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"]);
    command
}

#[test]
fn the_suite_passes_as_cpp20() {
    check_suite("c++", "-std=c++20");
}

#[test]
fn the_suite_passes_by_clang() {
    check_suite("clang++", "-std=c++17");
    check_suite("clang++", "-std=c++20");
}

#[test]
fn a_hit_allocates_nothing() {
    if !is_here("c++") {
        return;
    }
    let builder = Builder::new("c++", "-std=c++17");
    let sources = [root().join("tests/abi/cpp/hit_path.cpp")];
    for optimised in ["-O0", "-O2"] {
        let program = builder.link("hit_path", &[optimised], &sources);
        assert_eq!(run(&mut Command::new(program)), "a hit allocates nothing\n");
    }
}

/// Each header alone, so that none leans on what another included, with more warnings than the
/// tests have: they are the user's warnings.
#[test]
fn every_header_stands_alone() {
    if !is_here("c++") {
        return;
    }
    let builder = Builder::new("c++", "-std=c++17");
    let warnings = ["-Wconversion", "-Wsign-conversion", "-Wshadow", "-Wold-style-cast"];
    for header in
        ["vbar.hpp", "vbar_fault.hpp", "vbar_callbacks.hpp", "vbar_sim.hpp", "vbar_types.hpp"]
    {
        let source = builder.path("alone.cpp");
        std::fs::write(&source, format!("#include <{header}>\nint main() {{}}\n")).unwrap();
        for style in [&[][..], &["-fno-exceptions", "-fno-rtti"]] {
            let mut command = builder.command(style);
            run(command.args(warnings).arg("-fsyntax-only").arg(&source));
        }
    }
}

/// Every constant of the C headers' enums has its name in C++.
#[test]
fn every_number_has_its_name() {
    let read = |name: &str| std::fs::read_to_string(root().join("include").join(name)).unwrap();
    let (header, types) = (read("vbar.h"), read("vbar_types.hpp"));
    let constants: Vec<&str> = header
        .lines()
        .filter_map(|line| line.strip_prefix("  VBAR_")?.split_once(" = "))
        .map(|(name, _)| name)
        .collect();
    assert!(constants.len() > 80, "{} constants", constants.len());
    let missing: Vec<_> = constants
        .iter()
        .filter(|name| {
            let named = |end: char| types.contains(&format!("= VBAR_{name}{end}"));
            !(named(',') || named(' '))
        })
        .collect();
    assert!(missing.is_empty(), "vbar_types.hpp has no name for {missing:?}");
}

/// Every function of the C headers is behind one of the C++ headers.
#[test]
fn every_function_is_used() {
    let read = |name: &str| std::fs::read_to_string(root().join("include").join(name)).unwrap();
    let wrapped: String = HEADERS.iter().map(|name| read(name)).collect();
    for header in ["vbar.h", "vbar_sim.h"].map(read) {
        let declarations =
            header.lines().filter_map(|line| line.split_once('(')?.0.rsplit_once(' '));
        for name in declarations.map(|(_, name)| name.trim_start_matches('*')) {
            let is_function = name.starts_with("vbar_")
                && !name.starts_with(OF_PYTORCH)
                && !NOT_FOR_CPP.contains(&name);
            assert!(!is_function || wrapped.contains(name), "{name} has no place in C++");
        }
    }
}

#[test]
fn the_smallest_program_runs() {
    if !is_here("c++") {
        return;
    }
    let builder = Builder::new("c++", "-std=c++17");
    let program = builder.link("smallest", &[], &[root().join("examples/smallest.cpp")]);
    let model = builder.path("model.safetensors");
    vbar::model::synth::synthesize(&model, 64 << 20, 3).unwrap();
    let smallest = |arguments: &[&Path]| {
        let mut command = Command::new(&program);
        command.args(arguments).env("VBAR_DRIVER", "sim:capacity=1G,address_space=8G");
        command
    };
    let printed = run(&mut smallest(&[&model]));
    let tensors = printed.lines().filter(|line| line.contains(" bytes at 0x")).count();
    assert!(tensors > 0 && tensors == printed.lines().count(), "{printed}");

    std::fs::remove_file(&model).unwrap();
    for (arguments, words) in [(&[&*model][..], "model.safetensors"), (&[], "usage: smallest")] {
        let missing = smallest(arguments).output().unwrap();
        assert_eq!(missing.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&missing.stderr).contains(words));
    }
}

#[test]
fn the_engine_computes_what_the_host_does() {
    if !is_here("c++") {
        return;
    }
    // It runs as a file of a user's own would, in either standard.
    for standard in ["-std=c++17", "-std=c++20"] {
        let builder = Builder::new("c++", standard);
        let engine = builder.link("engine", &["-O1"], &[root().join("examples/engine.cpp")]);
        let driver = "sim:capacity=512M,address_space=8G";
        let checked = standard == "-std=c++17" && is_here("valgrind");
        let mut command = if checked { memcheck() } else { Command::new(&engine) };
        if checked {
            command.arg(&engine);
        }
        // The output of its own model is larger than the budget.
        let printed = run(command.env("VBAR_DRIVER", driver));
        check_engine(&printed);
        assert!(printed.contains("20 layers on the device, 2 on the host"), "{printed}");

        let model = builder.path("model.safetensors");
        vbar::model::synth::synthesize(&model, 24 << 20, 5).unwrap();
        let by_name = ["--driver", "sim:capacity=600M,seed=4", model.to_str().unwrap(), "12"];
        let printed = run(Command::new(&engine).args(by_name));
        check_engine(&printed);
        let shards = builder.path("shards");
        vbar::model::synth::synthesize_sharded(&shards, 24 << 20, 5, 3).unwrap();
        let by_name = ["--driver", "sim:capacity=600M,seed=4", shards.to_str().unwrap(), "12"];
        check_engine(&run(Command::new(&engine).args(by_name)));
        assert!(printed.contains("capacity=600M"), "{printed}");

        let refused = Command::new(&engine).args(["--driver", driver, "/nowhere"]).output();
        let refused = refused.unwrap();
        assert_eq!(refused.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&refused.stderr).contains("/nowhere"));
        let refused = Command::new(&engine).arg("--help").output().unwrap();
        assert_eq!(refused.status.code(), Some(2));
    }
}

/// Passes over a model larger than the budget.
#[track_caller]
fn check_engine(printed: &str) {
    assert!(printed.ends_with("all results are right\n"), "{printed}");
    assert!(printed.contains("a simulated device"), "{printed}");
    let number = |before: &str| -> u64 {
        let end = printed.find(before).unwrap_or_else(|| panic!("no {before:?} in {printed}"));
        let digits = printed[..end].rsplit(|character: char| !character.is_ascii_digit()).next();
        digits.unwrap().parse().unwrap()
    };
    assert!(number(" pages evicted") > 0, "{printed}");
    assert!(number(" layers on the device") > 0, "{printed}");
}
