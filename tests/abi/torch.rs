//! PyTorch's plug-in functions, called as PyTorch calls them, from C++: exceptions by their type
//! with stand-ins for PyTorch's libraries, and functions of C++ that are kept.

use std::path::PathBuf;
use std::process::Command;

use crate::built::{Programs, run};

/// The tests need `c++`, which CI installs.
fn compiler_is_here() -> bool {
    let found = Command::new("c++").arg("--version").output().is_ok();
    if !found {
        println!("no c++ here: nothing was tried");
    }
    found
}

fn shared(name: &str) -> Vec<String> {
    let flags = ["-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden"];
    flags.map(String::from).into_iter().chain([format!("-Wl,-soname,{name}")]).collect()
}

/// Stand-ins for PyTorch's libraries, in the folder of the programs; `other` has one without the
/// exception's type.
fn make_libraries(programs: &Programs) {
    let compile = |path: &str, more: &[&str], sources: &[&str]| -> PathBuf {
        let name = path.rsplit('/').next().unwrap();
        let flags = shared(name);
        let flags: Vec<&str> = flags.iter().map(String::as_str).chain(more.to_vec()).collect();
        programs.compile_as(path, "c++", &flags, sources)
    };
    let c10 = compile("libc10.so", &[], &["tests/abi/torch/c10.cpp"]);
    let (c10, cuda) = (c10.to_str().unwrap(), "tests/abi/torch/c10_cuda.cpp");
    compile("libc10_cuda.so", &[], &[cuda, c10]);
    std::fs::create_dir(programs.path().join("other")).unwrap();
    compile("other/libc10_cuda.so", &["-DWITHOUT_THE_TYPE"], &[cuda, c10]);
}

/// As valgrind runs it, where there is one: an error or a leak fails.
fn checked(program: &std::path::Path) -> Command {
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("no valgrind here: memory was not watched");
        return Command::new(program);
    }
    let mut command = Command::new("valgrind");
    command.args(["-q", "--error-exitcode=9", "--leak-check=full", "--fair-sched=try"]);
    command.args(["--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"]);
    command.arg(program);
    command
}

#[test]
fn scenario_28_out_of_memory_is_an_exception_of_pytorchs() {
    if !compiler_is_here() {
        return;
    }
    let programs = Programs::new();
    make_libraries(&programs);
    // Exceptions are told apart by the names of their types: the program has its own of them.
    let sources = ["tests/abi/torch/raise.cpp", "tests/abi/torch/c10.cpp"];
    let program = programs.compile("raise", &sources);
    for mode in ["typed", "fallback", "absent"] {
        run(Command::new(&program).arg(programs.path()).arg(mode));
    }
    run(checked(&program).arg(programs.path()).arg("typed"));
}

#[test]
fn functions_of_cpp_are_kept_and_may_throw() {
    if !compiler_is_here() {
        return;
    }
    let programs = Programs::new();
    let program = programs.compile("pools", &["tests/abi/torch/pools.cpp"]);
    run(&mut Command::new(&program));
    run(&mut checked(&program));
}
