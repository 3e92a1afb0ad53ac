//! An installed tree: how it is made, and where things are in it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Once;

#[path = "../abi/command.rs"]
mod command;

pub(crate) use command::{root, run};

/// A tool that the test cannot do without.
#[track_caller]
pub(crate) fn need(tool: &str, package: &str) {
    if Command::new(tool).arg("--version").output().is_err() {
        panic!("missing: {tool}, which this test needs. Debian, Ubuntu: apt-get install {package}");
    }
}

/// A tree that was installed below a folder of its own, with a prefix that no system has it at.
pub(crate) struct Tree {
    destdir: PathBuf,
    libraries: &'static str,
}

const PREFIX: &str = "usr/local";

impl Tree {
    /// An empty folder for a tree.
    pub(crate) fn new(name: &str) -> Self {
        let destdir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("install").join(name);
        if destdir.exists() {
            fs::remove_dir_all(&destdir).unwrap();
        }
        fs::create_dir_all(&destdir).unwrap();
        Self { destdir, libraries: "lib" }
    }

    /// Builds what is not built, with the profile of the tests, and installs it.
    pub(crate) fn install(name: &str, variables: &[&str]) -> Self {
        let mut tree = Self::new(name);
        if variables.iter().any(|variable| variable.ends_with("x86_64-linux-gnu")) {
            tree.libraries = "lib/x86_64-linux-gnu";
        }
        tree.make("install", variables);
        tree
    }

    /// Runs a target of the Makefile for this tree.
    pub(crate) fn make(&self, target: &str, variables: &[&str]) {
        // What is installed is built once, however many tests come here at the same time.
        static BUILT: Once = Once::new();
        BUILT.call_once(|| self.make_unguarded("build", &[]));
        self.make_unguarded(target, variables);
    }

    fn make_unguarded(&self, target: &str, variables: &[&str]) {
        let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
        let mut make = Command::new("make");
        make.current_dir(root()).args([target, &format!("PROFILE={profile}")]).args(variables);
        make.arg(format!("DESTDIR={}", self.destdir.display()));
        // This test is run by `make` itself: its variables are not this call's.
        make.env_remove("MAKEFLAGS").env_remove("MFLAGS").env_remove("MAKELEVEL");
        // The target folder of this test, wherever the environment has it.
        let built = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
        run(make.env("CARGO_TARGET_DIR", built));
    }

    /// The same tree somewhere else.
    pub(crate) fn moved(self, name: &str) -> Self {
        let moved = Self::new(name);
        fs::remove_dir(&moved.destdir).unwrap();
        fs::rename(&self.destdir, &moved.destdir).unwrap();
        Self { libraries: self.libraries, ..moved }
    }

    pub(crate) fn destdir(&self) -> &Path {
        &self.destdir
    }

    pub(crate) fn prefix(&self) -> PathBuf {
        self.destdir.join(PREFIX)
    }

    /// A place below the prefix.
    pub(crate) fn place(&self, path: &str) -> PathBuf {
        self.prefix().join(path)
    }

    /// The folder of the libraries.
    pub(crate) fn lib(&self) -> PathBuf {
        self.place(self.libraries)
    }
}
