//! The programs that are built against an installed tree, and what they must do.

use std::process::Command;

use tempfile::TempDir;
use vbar::driver::sim::Verb;
use vbar::model::synth::synthesize;

use crate::sources::HOSTILE;
use crate::tree::{Tree, run};

/// What memcheck is to say of blocks that are left.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leaks {
    /// None may be left that nothing in use points to the start of.
    Told,
    /// The program ends on purpose with everything open, in children with one thread of many.
    Meant,
}

impl Leaks {
    pub(crate) fn options(self) -> &'static [&'static str] {
        match self {
            Self::Told => &[
                "--leak-check=full",
                "--show-leak-kinds=definite,possible",
                "--errors-for-leak-kinds=definite,possible",
            ],
            Self::Meant => &["--leak-check=no"],
        }
    }
}

/// What a program takes and prints.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Takes a model, prints a line for each tensor.
    Smallest,
    /// Makes a model, says whether its results are right.
    Engine,
    /// Takes a folder, prints nothing when all is well.
    Test,
    /// Takes a folder and the driver's verbs.
    Failing,
    /// Takes the library, which it loads and unloads, and prints nothing when all is well.
    Reload,
    /// Takes nothing, prints the library's version.
    Version,
    /// Takes a folder, prints how many signals there were.
    Signals,
}

/// A program and how it is checked.
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) sources: &'static [&'static str],
    pub(crate) leaks: Leaks,
    kind: Kind,
}

const fn example(name: &'static str, sources: &'static [&'static str], kind: Kind) -> Program {
    Program { name, sources, leaks: Leaks::Told, kind }
}

const fn test(name: &'static str, sources: &'static [&'static str]) -> Program {
    Program { name, sources, leaks: Leaks::Told, kind: Kind::Test }
}

/// What an engine author starts from, in both languages.
pub(crate) const EXAMPLES: &[Program] = &[
    example("smallest_c", &["examples/smallest.c"], Kind::Smallest),
    example("engine_c", &["examples/engine.c"], Kind::Engine),
    example("smallest_cpp", &["examples/smallest.cpp"], Kind::Smallest),
    example("engine_cpp", &["examples/engine.cpp"], Kind::Engine),
];

/// What is run under memcheck: every program in C, and the examples in C++. (`tests/abi_cpp.rs`
/// does so with the suite in C++, `tests/abi/torch.rs` with what stands in for PyTorch.)
pub(crate) const CHECKED: &[Program] = &[
    example("smallest_c", &["examples/smallest.c"], Kind::Smallest),
    example("smallest_cpp", &["examples/smallest.cpp"], Kind::Smallest),
    example("engine_c", &["examples/engine.c"], Kind::Engine),
    example("engine_cpp", &["examples/engine.cpp"], Kind::Engine),
    test("hostile", HOSTILE),
    test("sizes", &["tests/abi/sizes.c"]),
    test("life", &["tests/abi/life.c"]),
    test("threads", &["tests/abi/threads.c"]),
    test("files", &["tests/abi/files.c"]),
    test("streaming", &["tests/abi/streaming.c"]),
    test("addresses", &["tests/abi/addresses.c"]),
    test("log", &["tests/abi/log.c"]),
    test("messages", &["tests/abi/messages.c"]),
    Program { kind: Kind::Version, ..test("status", &["tests/abi/status.c"]) },
    Program { kind: Kind::Reload, ..test("reload", &["tests/abi/reload.c"]) },
    Program { leaks: Leaks::Meant, ..test("process", &["tests/abi/process.c"]) },
    Program {
        leaks: Leaks::Meant,
        kind: Kind::Signals,
        ..test("signals", &["tests/abi/signals.c"])
    },
    Program { kind: Kind::Failing, ..test("failing", &["tests/abi/failing.c"]) },
];

/// Programs that memcheck is not run with, and why.
pub(crate) const UNCHECKED: &[(&str, &str)] = &[
    ("tests/abi/gpu.c", "it needs a GPU, where compute-sanitizer watches"),
    ("tests/abi/reset.c", "it needs a GPU, which it resets"),
    ("tests/abi/opening.c", "hundreds of children, a minute, and no more than `process` has"),
];

/// Programs with one mistake each, which memcheck has to find in what the library does with it.
pub(crate) const WRONG: &[(&str, &str)] = &[
    (
        "options_that_were_never_written",
        r#"
#include <stdlib.h>
#include <vbar.h>

int main(void) {
    VbarDeviceOptions *options = malloc(sizeof *options);
    VbarDevice device;
    options->size = sizeof *options;
    vbar_device_open(options, &device);
    free(options);
    return 0;
}
"#,
    ),
    (
        "a_text_that_was_freed",
        r#"
#include <stdlib.h>
#include <string.h>
#include <vbar.h>

int main(void) {
    VbarDeviceOptions options = {.size = sizeof options};
    VbarDevice device;
    char *driver = malloc(64);
    strcpy(driver, "sim:capacity=64M");
    options.driver = driver;
    free(driver);
    vbar_device_open(&options, &device);
    return 0;
}
"#,
    ),
    (
        "memory_that_nobody_has_any_more",
        r#"
#include <stdlib.h>
#include <vbar.h>

int main(void) {
    char *volatile lost = malloc(64);
    lost = NULL;
    return lost != NULL || vbar_abi_version() != VBAR_ABI_VERSION;
}
"#,
    ),
];

impl Program {
    fn is_cpp(&self) -> bool {
        self.sources[0].ends_with(".cpp")
    }

    pub(crate) fn compiler(&self) -> &'static str {
        if self.is_cpp() { "c++" } else { "cc" }
    }

    pub(crate) fn standard(&self) -> &'static str {
        if self.is_cpp() { "-std=c++17" } else { "-std=c11" }
    }

    /// Runs `command`, which is this program, with the libraries of `tree`.
    #[track_caller]
    pub(crate) fn check(&self, tree: &Tree, command: Command) {
        self.check_part(tree, command, Verb::ALL);
    }

    /// The same; the program of all failures has these verbs fail.
    #[track_caller]
    pub(crate) fn check_part(&self, tree: &Tree, mut command: Command, verbs: &[Verb]) {
        let folder = TempDir::new().unwrap();
        // Addresses for valgrind, which has fewer to give.
        command.env("VBAR_DRIVER", "sim:capacity=512M,address_space=8G");
        command.env("LD_LIBRARY_PATH", tree.lib()).current_dir(folder.path());
        let model = folder.path().join("model.safetensors");
        if self.kind == Kind::Smallest {
            synthesize(&model, 1 << 20, 7).unwrap();
        }
        match self.kind {
            Kind::Smallest => drop(command.arg(&model)),
            Kind::Engine | Kind::Version => {}
            Kind::Reload => drop(command.arg(tree.lib().join("libvbar.so"))),
            Kind::Test | Kind::Signals => drop(command.arg(folder.path())),
            Kind::Failing => {
                command.arg(folder.path()).args(verbs.iter().map(|verb| verb.name()));
            }
        }
        let printed = run(&mut command);
        let last = printed.lines().last().unwrap_or_default();
        let good = match self.kind {
            Kind::Smallest => last.contains(" bytes at 0x"),
            Kind::Engine => last == "all results are right",
            Kind::Test | Kind::Reload => printed.is_empty(),
            Kind::Version => last == concat!("vbar ", env!("CARGO_PKG_VERSION")),
            Kind::Failing => last.ends_with(" failures"),
            Kind::Signals => last.ends_with(" signals"),
        };
        assert!(good, "{}: {printed}", self.name);
    }
}

/// A CMake project of the examples, each with the shared library and with the archive.
pub(crate) fn cmake_project() -> String {
    let mut text = String::from(
        "cmake_minimum_required(VERSION 3.16)\n\
         project(engine C CXX)\n\
         set(CMAKE_C_STANDARD 11)\n\
         set(CMAKE_CXX_STANDARD 17)\n\
         set(CMAKE_C_EXTENSIONS OFF)\n\
         set(CMAKE_CXX_EXTENSIONS OFF)\n\
         find_package(vbar 0.1 CONFIG REQUIRED)\n\
         if(NOT vbar_ABI_VERSION EQUAL 1)\n\
         message(FATAL_ERROR \"the ABI is ${vbar_ABI_VERSION}\")\n\
         endif()\n\
         add_compile_options(-Wall -Wextra -Werror -pedantic)\n\
         link_libraries(${CMAKE_DL_LIBS})\n",
    );
    for Program { name, sources, .. } in EXAMPLES {
        for (suffix, target) in [("", "vbar::vbar"), ("_static", "vbar::vbar_static")] {
            let source = sources[0];
            text += &format!("add_executable({name}{suffix} ${{SOURCES}}/{source})\n");
            text += &format!("target_link_libraries({name}{suffix} PRIVATE {target})\n");
        }
    }
    text
}

/// A library in Rust that is not this one: allocates, panics and catches.
pub(crate) const OTHER_ARCHIVE: &str = r#"
#[unsafe(no_mangle)]
pub extern "C" fn other(count: u32) -> u32 {
    std::panic::set_hook(Box::new(|_| {}));
    let numbers: Vec<u32> = (0..count).collect();
    let caught = std::panic::catch_unwind(|| assert!(count < 3, "too many"));
    if caught.is_ok() { 0 } else { numbers.iter().sum() }
}
"#;

/// Links it beside ours, and has ours unwind nothing and allocate something.
pub(crate) const BOTH_ARCHIVES: &str = r#"
#include <stdio.h>
#include <vbar.h>

unsigned other(unsigned count);

int main(void) {
    VbarDeviceOptions options = {.size = sizeof options, .driver = "sim:capacity=64M"};
    VbarDevice device;
    if (vbar_device_open(&options, &device)) return 1;
    printf("vbar %s, other %u\n", vbar_version(), other(5));
    return vbar_device_close(device);
}
"#;
