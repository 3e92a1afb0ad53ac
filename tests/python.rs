//! The Python package against the library that cargo built, on the simulated device.
//!
//! Each file of `tests/python` is a test here. Those that need more than Python have a target of
//! their own: those whose names end with `_gpu.py` one or two GPUs, `check_wheel.py` a wheel.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The library that cargo built beside this test.
fn library() -> PathBuf {
    let library = std::env::current_exe().unwrap().with_file_name("libvbar.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

/// Runs the tests of a file; a failure shows what they said.
#[track_caller]
fn check_passes(file: &str) {
    let output = Command::new("python3")
        .args(["-X", "dev", "-W", "error"])
        .arg(root().join("tests/python").join(file))
        .env("PYTHONPATH", root().join("python_shim"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("VBAR_LIBRARY", library())
        .env_remove("VBAR_DRIVER")
        .output()
        .unwrap_or_else(|error| panic!("python3: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    let ran = said.lines().rev().find(|line| line.starts_with("Ran "));
    println!("{file}: {}", ran.unwrap_or("nothing ran"));
    assert!(output.status.success(), "{file}: {}\n{said}", output.status);
    assert!(ran.is_some_and(|ran| !ran.starts_with("Ran 0 ")), "{file} has no test:\n{said}");
}

macro_rules! files {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                check_passes(concat!(stringify!($name), ".py"));
            }
        )*

        const FILES: &[&str] = &[$(concat!(stringify!($name), ".py")),*];
    };
}

files! {
    test_dlpack
    test_errors
    test_faults
    test_ahead
    test_comfy
    test_comfy_bench
    test_comfy_graph
    test_comfy_paged
    test_comfy_report
    test_comfy_residents
    test_comfy_saved
    test_comfy_start
    test_comfy_traces
    test_garbage
    test_header
    test_interrupt
    test_library
    test_life
    test_shared
    test_signals
    test_sim
    test_soak
    test_torch_install
    test_torch_plug
    test_torch_record
    test_torch_stream
}

/// Those with PyTorch run on a GPU: here they are read, with the benchmarks.
#[test]
fn the_programs_that_need_a_gpu_are_python() {
    let program = "import ast, sys\nfor path in sys.argv[1:]: ast.parse(open(path).read(), path)";
    let mut command = Command::new("python3");
    command.args(["-W", "error", "-c", program]);
    for folder in ["examples", "benches", "tests/python"] {
        let files = std::fs::read_dir(root().join(folder)).unwrap();
        let paths = files.map(|entry| entry.unwrap().path());
        command.args(paths.filter(|path| path.extension().is_some_and(|kind| kind == "py")));
    }
    assert!(command.get_args().count() > 20);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn every_file_of_tests_is_run() {
    let folder = std::fs::read_dir(root().join("tests/python")).unwrap();
    let names = folder.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let found: BTreeSet<String> =
        names.filter(|name| name.starts_with("test_") && !name.ends_with("_gpu.py")).collect();
    assert_eq!(found, FILES.iter().map(ToString::to_string).collect());
}
