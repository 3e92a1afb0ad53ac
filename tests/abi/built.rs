//! Programs in C and C++ against the library that cargo built, for the tests that run them.
//!
//! Owns how they are compiled (every warning an error) and how they find the library: a loader
//! looks for the name with the ABI's version, which cargo does not give to the file it makes.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

#[path = "command.rs"]
mod command;

pub(crate) use command::{root, run};

/// The library that cargo built beside this test.
pub(crate) fn library() -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let library = folder.join("libvbar.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

/// A folder of programs, and of the library under the names that linkers and loaders look for.
pub(crate) struct Programs {
    folder: TempDir,
}

impl Programs {
    pub(crate) fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let library = library();
        for name in ["libvbar.so".to_owned(), soname()] {
            std::os::unix::fs::symlink(&library, folder.path().join(name)).unwrap();
        }
        Self { folder }
    }

    /// The folder, for files of the programs' own.
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Compiles sources, paths from the repository's root, as C11 or, where the first one ends in
    /// `.cpp`, as C++17. The program that comes of it finds the library wherever it is run.
    #[track_caller]
    pub(crate) fn compile(&self, name: &str, sources: &[&str]) -> PathBuf {
        let is_cpp = sources[0].ends_with(".cpp");
        let (compiler, standard) = if is_cpp { ("c++", "-std=c++17") } else { ("cc", "-std=c11") };
        self.compile_as(name, compiler, &[standard], sources)
    }

    /// As [`Programs::compile`], with another compiler or language.
    #[track_caller]
    pub(crate) fn compile_as(
        &self,
        name: &str,
        compiler: &str,
        language: &[&str],
        sources: &[&str],
    ) -> PathBuf {
        let program = self.folder.path().join(name);
        let mut compile = Command::new(compiler);
        compile.args(language).args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-g", "-pthread"]);
        compile.current_dir(root()).args(["-I", "include"]).args(sources).arg("-o").arg(&program);
        // A program that loads the library itself is not linked to it.
        compile.args(["-x", "none", "-Wl,--as-needed", "-L"]).arg(self.folder.path());
        compile.args(["-lvbar", "-ldl"]);
        compile.arg(format!("-Wl,-rpath,{}", self.folder.path().display()));
        run(&mut compile);
        program
    }
}

/// The name that the library goes by, from itself: the header's ABI version is in it.
fn soname() -> String {
    let header = std::fs::read_to_string(root().join("include/vbar.h")).unwrap();
    let version = header.lines().find_map(|line| line.strip_prefix("#define VBAR_ABI_VERSION "));
    format!("libvbar.so.{}", version.unwrap())
}
