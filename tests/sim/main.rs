//! Deterministic simulation: a seed drives threads (as scheduled steps), streams, models from
//! files, PyTorch's allocator, other processes, budgets and failing driver calls on a simulated
//! device, against a small model of what every page, pin, generation, byte and count must be.
//!
//! A failing seed prints itself, and the shortest trace that still fails in the same way:
//! `VBAR_SIM_SEED=n` runs a seed alone, `VBAR_SIM_TRACE` (the trace, or the path of a file with
//! it) a trace. Traces in `tests/sim/traces` are always run: what once failed stays there.
//! `VBAR_SIM_SEEDS=n` runs more or fewer seeds, `VBAR_SIM_SECONDS=n` fresh ones for so long.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod act;
mod bare;
mod bound;
mod checks;
mod lines;
mod model_file;
mod operations;
mod saves;
mod shrink;
mod sweep;
mod torch;
mod totals;
mod trace;
mod world;

use std::io::Write;
use std::path::Path;

use vbar::driver::sim::Verb;

use crate::sweep::{Failed, SEEDS, attempt, sweep};
use crate::trace::Trace;

/// Steps of a seed: what takes many to come about has some seeds of its own.
pub(crate) fn steps_of(seed: u64) -> u64 {
    if seed % 16 == 9 { 300 } else { 60 }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// Runs one trace and tells what is wrong with it.
fn run_alone(trace: &Trace) {
    if let Err(failure) = attempt(trace) {
        panic!("{failure}\n{trace}");
    }
}

#[test]
fn every_sequence_of_steps_keeps_the_promises() {
    if let Ok(text) = std::env::var("VBAR_SIM_TRACE") {
        let text = match text.starts_with("world") {
            true => text,
            false => std::fs::read_to_string(text).unwrap(),
        };
        return run_alone(&text.parse().unwrap());
    }
    let seeds = match (number("VBAR_SIM_SEED"), number("VBAR_SIM_SECONDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, Some(_)) => {
            // Fresh ones: nobody has seen them.
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            let start = now.unwrap().as_nanos() as u64 >> 10 << 24 >> 24;
            start..u64::MAX
        }
        (None, None) => 0..number("VBAR_SIM_SEEDS").unwrap_or(SEEDS),
    };
    let (totals, failed) = sweep(seeds, number("VBAR_SIM_SECONDS"));
    // Past the harness, which keeps what passing tests print: what was done is part of the result.
    let _ = writeln!(std::io::stderr(), "{totals}");
    if let Some(Failed { seed, failure, trace }) = failed {
        panic!(
            "seed {seed} failed (VBAR_SIM_SEED={seed} runs it alone): {failure}\n\
             the shortest trace that fails so, for a file in tests/sim/traces or VBAR_SIM_TRACE:\n\
             {trace}"
        );
    }
}

#[test]
fn what_once_failed_does_not_fail_again() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sim/traces");
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "trace") {
            let trace: Trace = std::fs::read_to_string(&path).unwrap().parse().unwrap();
            // The call that failed then may be another one by now: each of the first ones.
            let shifted = (0..8).map(|nth| trace.failing_at(nth));
            for trace in std::iter::once(trace.clone()).chain(shifted) {
                if let Err(failure) = attempt(&trace) {
                    panic!("{}: {failure}\n{trace}", path.display());
                }
            }
        }
    }
}

/// Failures are drawn from all verbs: the door has no method that is none of them.
#[test]
fn every_method_of_the_door_can_fail() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/driver/mod.rs");
    let source = std::fs::read_to_string(source).unwrap();
    let (_, door) = source.split_once("pub trait Driver").unwrap();
    let mut methods: Vec<&str> = door
        .lines()
        .take_while(|line| *line != "}")
        .filter_map(|line| {
            let line = line.trim();
            let line = line.strip_prefix("unsafe ").unwrap_or(line);
            line.strip_prefix("fn ")?.split('(').next()
        })
        // It calls no driver.
        .filter(|name| *name != "description")
        .collect();
    let mut verbs: Vec<&str> = Verb::ALL.iter().map(|verb| verb.name()).collect();
    methods.sort_unstable();
    verbs.sort_unstable();
    assert_eq!(methods, verbs);
}
