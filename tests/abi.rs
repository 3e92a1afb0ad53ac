//! The C ABI from outside: header, exported symbols, C, C++ and Python against the built library.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The library that cargo built beside this test.
fn library() -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let library = folder.join("libvbar.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

#[track_caller]
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

#[test]
fn the_header_is_the_one_that_cbindgen_makes() {
    let config = cbindgen::Config::from_root_or_default(root());
    let source = root().join("src/ffi/mod.rs");
    let mut fresh = Vec::new();
    let builder = cbindgen::Builder::new().with_config(config).with_src(source);
    builder.generate().unwrap().write(&mut fresh);
    let committed = std::fs::read_to_string(root().join("include/vbar.h")).unwrap();
    assert!(String::from_utf8(fresh).unwrap() == committed, "include/vbar.h: run `make header`");
}

#[test]
fn the_library_exports_what_the_header_declares() {
    let symbols = run(Command::new("nm").args(["-D", "--defined-only"]).arg(library()));
    let exported: BTreeSet<&str> = symbols
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .filter(|name| name.starts_with("vbar"))
        .collect();
    let header = std::fs::read_to_string(root().join("include/vbar.h")).unwrap();
    let declared: BTreeSet<&str> = header
        .lines()
        .filter(|line| line.ends_with(");") && !line.starts_with([' ', '/', '*']))
        .filter_map(|line| line.split('(').next()?.rsplit([' ', '*']).next())
        .collect();
    assert_eq!(exported, declared);
}

fn check_compiles_and_runs(compiler: &str, standard: &str) {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("status");
    let library = library();
    let source = root().join("tests/abi/status.c");
    let mut compile = Command::new(compiler);
    compile.args([standard, "-Wall", "-Wextra", "-Werror", "-pedantic"]);
    if compiler == "c++" {
        compile.args(["-x", "c++"]);
    }
    compile.arg(source).arg("-I").arg(root().join("include")).arg("-o").arg(&program);
    compile.args(["-x", "none"]).arg(&library);
    run(&mut compile);
    let printed = run(Command::new(&program).env("LD_LIBRARY_PATH", library.parent().unwrap()));
    assert_eq!(printed.trim(), format!("vbar {}", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_c_program_reads_the_status_texts() {
    check_compiles_and_runs("cc", "-std=c11");
}

#[test]
fn a_cpp_program_reads_the_status_texts() {
    // The only tool that `make test` can do without; CI installs it.
    if Command::new("c++").arg("--version").output().is_err() {
        println!("no c++ here: the header was not compiled as C++");
        return;
    }
    check_compiles_and_runs("c++", "-std=c++17");
}

#[test]
fn the_python_shim_checks_the_abi_first() {
    run(Command::new("python3")
        .arg(root().join("tests/python/test_shim.py"))
        .env("PYTHONPATH", root().join("python_shim"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("VBAR_LIBRARY", library()));
}
