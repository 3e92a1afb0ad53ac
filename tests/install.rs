//! What `make install` installs, used as its users would: programs in C and C++ are built against
//! the installed tree with pkg-config and with CMake, and run, under valgrind too.
//!
//! `cargo test` passes it over: it builds the archive, and needs `c++`, `pkg-config`, `cmake` and
//! `valgrind`. `make test-install` runs it, and CI does. Everything happens in cargo's target
//! folder.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tempfile::TempDir;
use vbar::driver::sim::Verb;

#[path = "install/programs.rs"]
mod programs;
#[path = "abi/sources.rs"]
mod sources;
#[path = "install/tree.rs"]
mod tree;

use programs::{Leaks, Program};
use tree::{Tree, need, root, run};

/// Warnings that users have, all of them errors.
const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Werror", "-pedantic"];

/// The tree that all tests share: built and installed once.
fn installed() -> &'static Tree {
    static INSTALLED: OnceLock<Tree> = OnceLock::new();
    INSTALLED.get_or_init(|| Tree::install("shared", &[]))
}

/// The functions of both headers.
fn declared() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for header in ["vbar.h", "vbar_sim.h"] {
        let text = fs::read_to_string(root().join("include").join(header)).unwrap();
        for line in text.lines().filter(|line| line.contains("vbar_") && line.contains('(')) {
            let start = line.find("vbar_").unwrap();
            let is_declaration = !line.starts_with([' ', '/', '*', '#']);
            if is_declaration {
                found.insert(line[start..].split('(').next().unwrap().to_owned());
            }
        }
    }
    found
}

/// Where the system's list of folders has the libraries ldconfig helps, elsewhere it does not.
#[test]
fn what_is_left_to_do_after_installing_is_told_by_the_place() {
    let folder = tempfile::tempdir().unwrap();
    let staged = folder.path().join("staged");
    fs::create_dir_all(staged.join("completions")).unwrap();
    for name in ["vbar", "libvbar.so", "libvbar.a", "vbar.1", "native-static-libs"] {
        fs::write(staged.join(name), "").unwrap();
    }
    for shell in ["bash", "zsh", "fish"] {
        fs::write(staged.join("completions").join(shell), "").unwrap();
    }
    let said = |prefix: &Path, libraries: &Path, destdir: &str| {
        let mut install = Command::new("sh");
        install.current_dir(root()).arg("packaging/install.sh").arg("install").arg(&staged);
        install.env("DESTDIR", destdir).env("PREFIX", prefix).env("LIBDIR", libraries);
        for (name, place) in [("BINDIR", "bin"), ("INCLUDEDIR", "include"), ("DATADIR", "share")] {
            install.env(name, prefix.join(place));
        }
        install.env("MANDIR", prefix.join("share/man")).env("VERSION", "0").env("ABI", "1");
        run(&mut install)
    };
    let prefix = folder.path().join("private");
    let told = said(&prefix, &prefix.join("lib"), "");
    let place = prefix.join("lib").display().to_string();
    assert!(told.contains(&format!("LD_LIBRARY_PATH={place}")), "{told}");
    assert!(told.contains(&format!("-Wl,-rpath,{place}")) && !told.contains("ldconfig"), "{told}");
    // A packager's folder is nobody's to run from.
    assert_eq!(said(Path::new("/usr"), Path::new("/usr/lib"), prefix.to_str().unwrap()), "");
}

#[test]
#[ignore = "make test-install"]
fn the_libraries_define_their_functions_and_nothing_else() {
    let tree = installed();
    for (name, which) in [("libvbar.so", "-D"), ("libvbar.a", "-g")] {
        let library = tree.place("lib").join(name);
        let symbols = run(Command::new("nm").args([which, "--defined-only"]).arg(&library));
        let defined: BTreeSet<String> = symbols
            .lines()
            .filter(|line| line.split_whitespace().count() == 3)
            .filter_map(|line| line.split_whitespace().last().map(str::to_owned))
            .collect();
        assert_eq!(defined, declared(), "{name}");
    }
}

#[test]
#[ignore = "make test-install"]
fn the_library_has_its_name_stays_and_needs_no_driver() {
    let tree = installed();
    let library = tree.place("lib/libvbar.so");
    let dynamic = run(Command::new("readelf").arg("-dW").arg(&library));
    assert!(dynamic.contains("soname: [libvbar.so.1]"), "{dynamic}");
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
    assert!(!dynamic.contains("libcuda"), "{dynamic}");
    let version = env!("CARGO_PKG_VERSION");
    let link = |name: &str| fs::read_link(tree.place("lib").join(name)).unwrap();
    assert_eq!(link("libvbar.so"), Path::new("libvbar.so.1"));
    assert_eq!(link("libvbar.so.1"), Path::new(&format!("libvbar.so.1.{version}")));
    let pc = fs::read_to_string(tree.place("lib/pkgconfig/vbar.pc")).unwrap();
    let fields = pc.lines().filter(|line| !line.starts_with('#'));
    assert!(!fields.collect::<String>().contains("cuda"), "{pc}");
    assert!(!pc.contains(tree.destdir().to_str().unwrap()) && !pc.contains('@'), "{pc}");
}

#[test]
#[ignore = "make test-install"]
fn program_manual_and_completions_are_there() {
    let tree = installed();
    let version = run(Command::new(tree.place("bin/vbar")).arg("--version"));
    assert_eq!(version.trim(), concat!("vbar ", env!("CARGO_PKG_VERSION")));
    let manual = fs::read_to_string(tree.place("share/man/man1/vbar.1")).unwrap();
    assert!(manual.contains(".TH vbar 1") && manual.contains("synth"), "{manual}");
    for completion in [
        "share/bash-completion/completions/vbar",
        "share/zsh/site-functions/_vbar",
        "share/fish/vendor_completions.d/vbar.fish",
    ] {
        let text = fs::read_to_string(tree.place(completion)).unwrap();
        assert!(text.contains("vbar") && text.contains("doctor"), "{completion}");
    }
    for text in ["README.md", "LICENSE-MIT", "LICENSE-APACHE"] {
        assert!(tree.place("share/doc/vbar").join(text).is_file(), "{text}");
    }
}

/// Builds and runs the examples in both languages with what pkg-config says of a tree.
#[track_caller]
fn check_pkg_config(tree: &Tree, set_up: &dyn Fn(&mut Command), linking: Linking) {
    need("pkg-config", "pkg-config");
    need("c++", "g++");
    let mut asked = Command::new("pkg-config");
    set_up(&mut asked);
    if linking == Linking::Archive {
        asked.arg("--static");
    }
    let flags = run(asked.args(["--cflags", "--libs", "vbar >= 0.1"]));
    let flags: Vec<String> = flags
        .split_whitespace()
        .map(|flag| match (linking, flag) {
            (Linking::Archive, "-lvbar") => "-l:libvbar.a".to_owned(),
            _ => flag.to_owned(),
        })
        .collect();
    let folder = TempDir::new().unwrap();
    for program in programs::EXAMPLES {
        let built = folder.path().join(program.name);
        let mut compile = Command::new(program.compiler());
        compile.arg(program.standard()).args(WARNINGS).current_dir(root());
        compile.args(program.sources).arg("-o").arg(&built).args(&flags);
        run(compile.args(["-ldl", "-pthread"]));
        check_linked(&built, linking);
        program.check(tree, Command::new(&built));
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Linking {
    Shared,
    Archive,
}

/// A program needs the library by its ABI's name, or not at all.
#[track_caller]
fn check_linked(program: &Path, linking: Linking) {
    let dynamic = run(Command::new("readelf").arg("-dW").arg(program));
    let needs = dynamic.contains("Shared library: [libvbar.so.1]");
    assert_eq!(needs, linking == Linking::Shared, "{}: {dynamic}", program.display());
    assert!(!dynamic.contains("libcuda"), "{dynamic}");
}

fn in_tree(tree: &Tree) -> impl Fn(&mut Command) + '_ {
    |command| {
        command.env("PKG_CONFIG_PATH", tree.lib().join("pkgconfig"));
    }
}

#[test]
#[ignore = "make test-install"]
fn pkg_config_builds_programs_with_the_shared_library() {
    check_pkg_config(installed(), &in_tree(installed()), Linking::Shared);
}

#[test]
#[ignore = "make test-install"]
fn pkg_config_builds_programs_with_the_archive() {
    check_pkg_config(installed(), &in_tree(installed()), Linking::Archive);
}

/// Builds and runs the examples with CMake, shared and with the archive.
#[track_caller]
fn check_cmake(tree: &Tree, prefix: &Path) {
    need("cmake", "cmake");
    need("c++", "g++");
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("CMakeLists.txt"), programs::cmake_project()).unwrap();
    let built = folder.path().join("built");
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(folder.path()).arg("-B").arg(&built);
    configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display()));
    run(configure.arg(format!("-DSOURCES={}", root().display())));
    run(Command::new("cmake").arg("--build").arg(&built));
    for program in programs::EXAMPLES {
        for (suffix, linking) in [("", Linking::Shared), ("_static", Linking::Archive)] {
            let file = built.join(format!("{}{suffix}", program.name));
            check_linked(&file, linking);
            program.check(tree, Command::new(&file));
        }
    }
}

#[test]
#[ignore = "make test-install"]
fn cmake_builds_programs_with_both_targets() {
    check_cmake(installed(), &installed().prefix());
}

#[test]
#[ignore = "make test-install"]
fn cmake_takes_versions_that_fit_and_no_others() {
    need("cmake", "cmake");
    let found = |wanted: &str| {
        let folder = TempDir::new().unwrap();
        let project = format!(
            "cmake_minimum_required(VERSION 3.19)\nproject(wish C)\n\
             find_package(vbar {wanted} CONFIG REQUIRED)\n"
        );
        fs::write(folder.path().join("CMakeLists.txt"), project).unwrap();
        let mut configure = Command::new("cmake");
        configure.arg("-S").arg(folder.path()).arg("-B").arg(folder.path().join("built"));
        configure.arg(format!("-DCMAKE_PREFIX_PATH={}", installed().prefix().display()));
        configure.output().unwrap().status.success()
    };
    for fits in ["", "0", "0.1", "0.1.0", "0.1.0 EXACT", "0.0.9...0.2", "0.1...0.1.0"] {
        assert!(found(fits), "vbar {fits}");
    }
    for does_not in ["0.2", "1", "0.1.1", "0.0.9", "0.1.9 EXACT", "0.2...1", "0.0.1...<0.1.0"] {
        assert!(!found(does_not), "vbar {does_not}");
    }
}

/// A tree with libraries where Debian has them, moved after it was installed: relative ways inside.
#[test]
#[ignore = "make test-install"]
fn a_tree_may_be_moved_and_have_libraries_elsewhere() {
    let libraries = "LIBDIR=/usr/local/lib/x86_64-linux-gnu";
    let tree = Tree::install("elsewhere", &[libraries]).moved("moved");
    check_pkg_config(&tree, &in_tree(&tree), Linking::Shared);
    check_cmake(&tree, &tree.prefix());
}

/// As who builds for another root does: the root goes before every place once.
#[test]
#[ignore = "make test-install"]
fn a_tree_may_be_another_systems_root() {
    let tree = installed();
    let set_up = |command: &mut Command| {
        command.env("PKG_CONFIG_SYSROOT_DIR", tree.destdir());
        command.env("PKG_CONFIG_LIBDIR", tree.lib().join("pkgconfig"));
    };
    check_pkg_config(tree, &set_up, Linking::Shared);
}

#[test]
#[ignore = "make test-install"]
fn places_outside_of_the_prefix_are_named_in_full() {
    let tree = Tree::install("apart", &["LIBDIR=/opt/lib", "INCLUDEDIR=/opt/headers"]);
    let read = |place: &str| fs::read_to_string(tree.destdir().join(place)).unwrap();
    let pc = read("opt/lib/pkgconfig/vbar.pc");
    assert!(pc.contains("libdir=/opt/lib\n") && pc.contains("includedir=/opt/headers\n"), "{pc}");
    let config = read("opt/lib/cmake/vbar/vbarConfig.cmake");
    assert!(config.contains("\"/opt/lib\"") && config.contains("\"/opt/headers\""), "{config}");
}

/// Rust's standard library is in the archive, and in another one that a program may link too.
#[test]
#[ignore = "make test-install"]
fn an_archive_of_other_rust_code_links_beside_it() {
    let tree = installed();
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("other.rs"), programs::OTHER_ARCHIVE).unwrap();
    for options in [&["-O", "-C", "lto=fat"][..], &["-C", "codegen-units=16"]] {
        let mut other = Command::new("rustc");
        other.args(["--edition", "2024", "--crate-type", "staticlib"]).args(options);
        run(other.arg(path("other.rs")).arg("-o").arg(path("libother.a")));
        fs::write(path("both.c"), programs::BOTH_ARCHIVES).unwrap();
        for order in [["libvbar.a", "libother.a"], ["libother.a", "libvbar.a"]] {
            let archive = |name: &str| match name {
                "libvbar.a" => tree.place("lib").join(name),
                _ => path(name),
            };
            let mut compile = Command::new("cc");
            compile.arg(path("both.c")).arg("-I").arg(tree.place("include"));
            compile.args(order.map(archive)).arg("-o").arg(path("both"));
            let private = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];
            run(compile.args(private));
            let printed = run(&mut Command::new(path("both")));
            assert_eq!(printed, concat!("vbar ", env!("CARGO_PKG_VERSION"), ", other 10\n"));
        }
    }
}

/// The C tests and the engine, built against the tree, under memcheck.
#[test]
#[ignore = "make test-install"]
fn programs_are_clean_under_memcheck() {
    need("valgrind", "valgrind");
    let tree = installed();
    let folder = TempDir::new().unwrap();
    let built = |program: &Program| {
        let file = folder.path().join(program.name);
        let mut compile = Command::new(program.compiler());
        compile.arg(program.standard()).args(WARNINGS).current_dir(root());
        run(linked(&mut compile, program.sources, &file));
        file
    };
    // Two at a time. The program of all failures is long: its verbs are shared, and what fails has
    // one code of some, since what is done about them is the same; all of them are tried without
    // memcheck.
    let (long, others): (Vec<_>, Vec<_>) =
        programs::CHECKED.iter().partition(|program| program.name == "failing");
    // In turn, since those of one kind take about as long.
    let every_second = |first| Verb::ALL.iter().skip(first).step_by(2).copied().collect::<Vec<_>>();
    let (some, rest) = (every_second(0), every_second(1));
    let long: Vec<_> = long.into_iter().map(|program| (program, built(program))).collect();
    let fail = |verbs: &[Verb]| {
        for (program, file) in &long {
            let mut command = memcheck(program.leaks, file);
            command.env("VBAR_TEST_CODES", "in_turn");
            program.check_part(tree, command, verbs);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| fail(&rest));
        fail(&some);
        for program in others {
            program.check(tree, memcheck(program.leaks, &built(program)));
        }
    });
}

/// Has a compiler link a program that memcheck is to run with the installed library. One that loads
/// the library by itself is not linked to it.
fn linked<'a>(compile: &'a mut Command, sources: &[&str], file: &Path) -> &'a mut Command {
    let tree = installed();
    compile.arg("-g").args(sources).arg("-o").arg(file);
    compile.arg("-I").arg(tree.place("include")).arg("-L").arg(tree.place("lib"));
    compile.args(["-Wl,--as-needed", "-lvbar", "-ldl", "-pthread"])
}

/// What memcheck ends a program with that it has found something in.
const FOUND: i32 = 99;

/// Runs a program under memcheck: an error, and what `leaks` says, ends it with [`FOUND`].
fn memcheck(leaks: Leaks, file: &Path) -> Command {
    let mut valgrind = Command::new("valgrind");
    valgrind.arg("-q").arg(format!("--error-exitcode={FOUND}")).args(leaks.options());
    // Threads take turns: else one that calls without end keeps the others from running.
    valgrind.arg("--fair-sched=try");
    let suppressions = root().join("tests/abi/valgrind.supp");
    valgrind.arg(format!("--suppressions={}", suppressions.display())).arg(file);
    valgrind
}

/// The same options find what is wrong: a check that cannot fail says nothing.
#[test]
#[ignore = "make test-install"]
fn memcheck_finds_what_is_wrong_with_a_program() {
    need("valgrind", "valgrind");
    let folder = TempDir::new().unwrap();
    for (name, text) in programs::WRONG {
        let (source, file) = (folder.path().join(format!("{name}.c")), folder.path().join(name));
        fs::write(&source, text).unwrap();
        // Their mistakes are some that a compiler may see too.
        let mut compile = Command::new("cc");
        run(linked(compile.args(["-O0", "-w"]), &[source.to_str().unwrap()], &file));
        let mut command = memcheck(Leaks::Told, &file);
        command.env("LD_LIBRARY_PATH", installed().lib());
        let output = command.env("VBAR_DRIVER", "sim:capacity=64M,address_space=8G").output();
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(FOUND), "{name}: {said}");
    }
}

#[test]
#[ignore = "make test-install"]
fn every_program_is_checked_or_it_is_said_why_not() {
    let checked: BTreeSet<&str> =
        programs::CHECKED.iter().flat_map(|program| program.sources).copied().collect();
    for folder in ["tests/abi", "examples"] {
        for file in fs::read_dir(root().join(folder)).unwrap() {
            let path = file.unwrap().path();
            let is_program = path.extension().is_some_and(|it| it == "c" || it == "cpp")
                && fs::read_to_string(&path).unwrap().contains("\nint main(");
            let name = path.strip_prefix(root()).unwrap().to_str().unwrap();
            let is_excused = programs::UNCHECKED.iter().any(|(it, _)| *it == name);
            assert!(!is_program || checked.contains(name) != is_excused, "{name}");
        }
    }
}

fn files_below(folder: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() && !path.is_symlink() {
                true => folders.push(path),
                false => drop(found.insert(path)),
            }
        }
    }
    found
}

#[test]
#[ignore = "make test-install"]
fn uninstalling_removes_what_was_installed_and_nothing_else() {
    let tree = Tree::install("removed", &[]);
    assert!(files_below(tree.destdir()).len() > 15);
    let own = tree.place("lib/libother.so");
    fs::write(&own, "somebody else's").unwrap();
    tree.make("uninstall", &[]);
    assert_eq!(files_below(tree.destdir()), BTreeSet::from([own]));
    assert!(!tree.place("lib/cmake/vbar").exists() && !tree.place("share/doc/vbar").exists());
    // Once more: nothing is there, and that is no error.
    tree.make("uninstall", &[]);
}

#[test]
#[ignore = "make test-install"]
fn stripping_takes_debugging_information_and_no_function() {
    let tree = Tree::new("stripped");
    tree.make("install-strip", &[]);
    let full = installed();
    for file in ["lib/libvbar.so.1", "lib/libvbar.a", "bin/vbar"] {
        let bytes = |tree: &Tree| fs::metadata(tree.place(file)).unwrap().len();
        assert!(bytes(&tree) * 2 < bytes(full), "{file}: {} of {}", bytes(&tree), bytes(full));
    }
    let symbols = |tree: &Tree| {
        let library = tree.place("lib/libvbar.so");
        run(Command::new("nm").args(["-D", "--defined-only", "--format=just-symbols"]).arg(library))
    };
    assert_eq!(symbols(&tree), symbols(full));
    check_pkg_config(&tree, &in_tree(&tree), Linking::Archive);
}
