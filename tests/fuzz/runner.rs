//! Runs a target in a child process, so that an abort, a signal or a loop without end is found as a
//! panic is, and shrinks the input that did it.
//!
//! The child writes the number of each input before it runs it; inputs follow from their numbers,
//! so that the parent knows which one it was.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::corpus;
use crate::mutate::mutated;
use crate::targets::Target;

const TARGET: &str = "VBAR_FUZZ_TARGET";
const INPUT: &str = "VBAR_FUZZ_INPUT";
const PROGRESS: &str = "VBAR_FUZZ_PROGRESS";
const SEED: &str = "VBAR_FUZZ_SEED";
const RUNS: &str = "VBAR_FUZZ_RUNS";
/// Inputs that are tried to make one shorter.
const TRIES_MAX: u32 = 600;

/// What is run.
pub(crate) struct Plan<'a> {
    pub(crate) target: &'a Target,
    pub(crate) corpus: Vec<Vec<u8>>,
    /// An input that takes longer than this never ends.
    pub(crate) still_seconds: u64,
    pub(crate) seed: u64,
    pub(crate) runs: u64,
}

impl<'a> Plan<'a> {
    /// The committed corpus and as many mutations as the target or the environment says.
    pub(crate) fn usual(target: &'a Target) -> Self {
        let number = |name| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
        Self {
            target,
            corpus: corpus::of(target.name),
            still_seconds: 60,
            seed: number(SEED).unwrap_or(1),
            runs: number(RUNS).unwrap_or(target.runs),
        }
    }

    fn count(&self) -> u64 {
        self.corpus.len() as u64 + self.runs
    }

    fn input(&self, number: u64) -> Vec<u8> {
        let Target { words, bytes_max, .. } = *self.target;
        match self.corpus.get(number as usize) {
            Some(input) => input.clone(),
            None => mutated(&self.corpus, words, bytes_max, self.seed, number),
        }
    }
}

/// An input that a target fails on.
pub(crate) struct Found {
    target: &'static str,
    pub(crate) input: Vec<u8>,
    pub(crate) path: PathBuf,
    number: u64,
    why: String,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { target, input, path, number, why } = self;
        write!(
            f,
            "{target}: input {number} fails: {why}\n\
             the shortest that fails so has {} bytes: {}\n\
             {TARGET}='{target}' {INPUT}={} cargo test --test fuzz child runs it alone; put it \
             into tests/fuzz/corpus/{target} when that is mended",
            input.len(),
            input.escape_ascii(),
            path.display()
        )
    }
}

/// How a child ended.
enum End {
    Well,
    /// Told so, and what tells this failure from others.
    Badly(String, String),
}

/// Runs a plan; the first input that fails, shrunk.
pub(crate) fn look(plan: &Plan<'_>) -> Option<Found> {
    let folder = tempfile::tempdir().unwrap();
    let corpus = folder.path().join("corpus");
    std::fs::create_dir(&corpus).unwrap();
    for (at, input) in plan.corpus.iter().enumerate() {
        std::fs::write(corpus.join(format!("{at:06}")), input).unwrap();
    }
    let progress = folder.path().join("progress");
    let run = |command: &mut Command| {
        command.env(INPUT, &corpus).env(PROGRESS, &progress);
        command.env(SEED, plan.seed.to_string()).env(RUNS, plan.runs.to_string());
    };
    let End::Badly(mut why, kind) = run_child(plan, &folder.path().join("log"), &progress, run)
    else {
        let last = number_in(&progress);
        assert_eq!(last, Some(plan.count()), "{}: the child did not run", plan.target.name);
        return None;
    };
    let number = number_in(&progress).unwrap_or_default();
    let mut input = plan.input(number);
    let path = saved(plan.target.name);
    std::fs::write(&path, &input).unwrap();
    match alone(plan, &path, folder.path()) {
        Some(other) if other == kind => input = shrunk(plan, input, &kind, folder.path()),
        _ => why += "\n(alone it does not: it takes the inputs before it)",
    }
    std::fs::write(&path, &input).unwrap();
    Some(Found { target: plan.target.name, input, path, number, why })
}

/// Where an input that failed stays.
fn saved(target: &str) -> PathBuf {
    let name = format!("fuzz-{}", target.replace(' ', "-"));
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// Runs one input in a child; what it failed with.
fn alone(plan: &Plan<'_>, path: &Path, folder: &Path) -> Option<String> {
    let progress = folder.join("progress-alone");
    let _ = std::fs::remove_file(&progress);
    let run = |command: &mut Command| {
        command.env(INPUT, path).env(PROGRESS, &progress);
    };
    match run_child(plan, &folder.join("log-alone"), &progress, run) {
        End::Well => None,
        End::Badly(_, kind) => Some(kind),
    }
}

/// The shortest input found that fails in the same way.
fn shrunk(plan: &Plan<'_>, mut input: Vec<u8>, kind: &str, folder: &Path) -> Vec<u8> {
    if kind == HANGS {
        return input;
    }
    let path = folder.join("shorter");
    let mut tries = TRIES_MAX;
    let mut length = input.len().next_power_of_two() / 2;
    while length > 0 {
        let mut place = 0;
        while place < input.len() && tries > 0 {
            tries -= 1;
            let mut shorter = input.clone();
            shorter.drain(place..(place + length).min(input.len()));
            std::fs::write(&path, &shorter).unwrap();
            match alone(plan, &path, folder) {
                Some(other) if other == kind => input = shorter,
                _ => place += length,
            }
        }
        length /= 2;
    }
    input
}

const HANGS: &str = "hangs";

/// Starts this test binary again for one target and waits for it.
fn run_child(plan: &Plan<'_>, log: &Path, progress: &Path, more: impl Fn(&mut Command)) -> End {
    let errors = File::create(log).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["child", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(TARGET, plan.target.name).env("RUST_BACKTRACE", "0");
    command.env_remove("VBAR_DRIVER").env_remove("VBAR_TRACE");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
    more(&mut command);
    let mut child = command.spawn().unwrap();
    let Some(status) = wait(&mut child, progress, plan.still_seconds) else {
        let text = format!("it did not end within {} s", plan.still_seconds);
        return End::Badly(text, HANGS.to_owned());
    };
    if status.success() {
        return End::Well;
    }
    let told = String::from_utf8_lossy(&std::fs::read(log).unwrap()).into_owned();
    let kind = kind_of(status, &told);
    let told: Vec<&str> = told.lines().take(20).collect();
    End::Badly(format!("{status}\n{}", told.join("\n")), kind)
}

/// What tells one failure from another: the place of the panic, or the signal.
fn kind_of(status: ExitStatus, told: &str) -> String {
    let place = told.lines().find_map(|line| Some(line.split_once("panicked at ")?.1.to_owned()));
    match (status.signal(), place) {
        (None, Some(place)) => place,
        (Some(signal), place) => format!("signal {signal} {}", place.unwrap_or_default()),
        (None, None) => status.to_string(),
    }
}

/// The child's status; `None` when it made no progress for so long, and was killed.
fn wait(child: &mut Child, progress: &Path, still_seconds: u64) -> Option<ExitStatus> {
    let mut last = (number_in(progress), Instant::now());
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        let now = number_in(progress);
        if now != last.0 {
            last = (now, Instant::now());
        }
        if now.is_some() && last.1.elapsed() > Duration::from_secs(still_seconds) {
            child.kill().unwrap();
            child.wait().unwrap();
            return None;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn number_in(progress: &Path) -> Option<u64> {
    let bytes = std::fs::read(progress).ok()?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

/// The body of the child: one input, or all of a plan.
pub(crate) fn child_of<'a>(mut targets: impl Iterator<Item = &'a Target>) {
    let (Ok(name), Some(input)) = (std::env::var(TARGET), std::env::var_os(INPUT)) else { return };
    let target = targets.find(|target| target.name == name).expect("a target");
    let input = PathBuf::from(input);
    let progress = std::env::var_os(PROGRESS).map(|path| File::create(path).unwrap());
    let tell = |number: u64| {
        let Some(file) = &progress else { return };
        file.write_all_at(&number.to_le_bytes(), 0).unwrap();
    };
    if input.is_file() {
        tell(0);
        return (target.run)(&std::fs::read(&input).unwrap());
    }
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(&input).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let corpus = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    let plan = Plan { corpus, ..Plan::usual(target) };
    for number in 0..plan.count() {
        tell(number);
        (target.run)(&plan.input(number));
    }
    tell(plan.count());
}
