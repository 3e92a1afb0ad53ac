//! The program as tests start it: with a pipe, and on a terminal of a given width.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;

/// Small pages, so that small models have many.
pub(crate) const SIM: &str = "sim:capacity=64M,granularity=64K";

/// What changes the program's ways, whatever the environment of the tests says.
const VARIABLES: &[&str] = &["VBAR_DRIVER", "RUST_LOG", "NO_COLOR", "COLUMNS", "TERM"];

pub(crate) fn vbar(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vbar"));
    command.args(arguments);
    VARIABLES.iter().for_each(|name| {
        command.env_remove(name);
    });
    command
}

/// Writes a program that tests run, by another process: one that is open for writing cannot be run,
/// and what this one has open other tests' processes have too, until they run theirs.
pub(crate) fn write_program(path: &Path, content: &[u8]) {
    let mut writing = Command::new("sh")
        .args(["-c", r#"cat >"$0" && chmod 755 "$0""#])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    writing.stdin.take().unwrap().write_all(content).unwrap();
    assert!(writing.wait().unwrap().success(), "{path:?} is not written");
}

/// A copy of the program in a folder, as [`write_program`] writes one.
pub(crate) fn copied(folder: &Path) -> PathBuf {
    let path = folder.join("vbar");
    let copying = Command::new("cp").arg(env!("CARGO_BIN_EXE_vbar")).arg(&path).status();
    assert!(copying.unwrap().success(), "{path:?} is not written");
    path
}

pub(crate) fn output(arguments: &[&str]) -> Output {
    vbar(arguments).output().unwrap()
}

/// Runs the program into a pipe; it must return `code`. What it prints.
#[track_caller]
pub(crate) fn lines(code: i32, arguments: &[&str]) -> String {
    let output = output(arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}\n{text}\n{errors}");
    text
}

/// Runs the program, which must return `code`, and parses the one object that it prints.
#[track_caller]
pub(crate) fn json(code: i32, arguments: &[&str]) -> Value {
    let text = lines(code, arguments);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[track_caller]
pub(crate) fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} in {value}"))
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A model in a folder that is removed with it.
pub(crate) fn model(bytes: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let report = json(0, &["synth", text(&path), "--bytes", bytes, "--seed", "7", "--json"]);
    assert_eq!(report["written"], true);
    (folder, path)
}

/// A model of tensors of bytes, by name and length, in this order in the file.
pub(crate) fn written_model(tensors: &[(&str, u64)]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut end = 0;
    let entries = tensors.iter().map(|(name, bytes)| {
        let start = end;
        end += bytes;
        let name = serde_json::to_string(name).unwrap();
        format!("{name}:{{\"dtype\":\"U8\",\"shape\":[{bytes}],\"data_offsets\":[{start},{end}]}}")
    });
    let header = format!("{{{}}}", entries.collect::<Vec<_>>().join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    let file = File::create(&path).unwrap();
    std::io::Write::write_all(&mut &file, &bytes).unwrap();
    file.set_len(bytes.len() as u64 + end).unwrap();
    (folder, path)
}

/// What a terminal was sent.
pub(crate) struct Shown {
    pub(crate) code: Option<i32>,
    /// All of it, escapes included, lines ending in `\n`.
    pub(crate) raw: String,
}

impl Shown {
    /// What is read.
    pub(crate) fn text(&self) -> String {
        console::strip_ansi_codes(&self.raw).into_owned()
    }

    /// No line is wider than the terminal. What is drawn over again has its lines filled up, so
    /// that the terminal itself goes on to the next; and clap does not break the usage.
    #[track_caller]
    pub(crate) fn check_fits(&self, columns: u16) {
        let columns = usize::from(columns);
        for line in self.text().split(['\n', '\r']).filter(|line| !line.starts_with("Usage:")) {
            let width = console::measure_text_width(line);
            let fits = width <= columns || width.is_multiple_of(columns);
            assert!(fits, "{width} of {columns} columns: {line}");
        }
    }
}

/// The tests' own terminal stays what it is, and no other program inherits these.
const FLAGS: OpenptFlags = OpenptFlags::RDWR.union(OpenptFlags::NOCTTY).union(OpenptFlags::CLOEXEC);

/// Runs the program on a terminal that is `columns` wide, with these variables.
pub(crate) fn on_terminal(columns: u16, arguments: &[&str], variables: &[(&str, &str)]) -> Shown {
    let terminal = openpt(FLAGS).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let size = Winsize { ws_row: 50, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&terminal, size).unwrap();
    let side = || Stdio::from(ioctl_tiocgptpeer(&terminal, FLAGS).unwrap());
    let mut command = vbar(arguments);
    command.env("TERM", "xterm-256color").envs(variables.iter().copied());
    let mut child = command.stdin(side()).stdout(side()).stderr(side()).spawn().unwrap();
    // It holds the program's side open too, and then reading would not end.
    drop(command);
    let mut bytes = Vec::new();
    // The end is an error (EIO), once the program's side is closed.
    let _ = File::from(terminal).read_to_end(&mut bytes);
    let raw = String::from_utf8_lossy(&bytes).replace("\r\n", "\n");
    Shown { code: child.wait().unwrap().code(), raw }
}
