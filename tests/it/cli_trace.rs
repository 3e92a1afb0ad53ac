//! `vbar trace`: the file, its events, and what is told of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;
use vbar::trace::Kind;

use crate::program::{SIM, json, lines, model, number, output, text};

/// Times are written in microseconds with three places.
const NANOSECOND: f64 = 0.001;

fn events(path: &Path) -> Vec<Value> {
    let file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    file["traceEvents"].as_array().unwrap().clone()
}

fn of<'a>(events: &'a [Value], phase: &'a str) -> impl Iterator<Item = &'a Value> {
    events.iter().filter(move |event| event["ph"] == phase)
}

fn time(event: &Value, key: &str) -> f64 {
    event[key].as_f64().unwrap_or_else(|| panic!("{key} in {event}"))
}

/// Every span has a known name and a time, and within its thread lies in the one around it.
#[track_caller]
pub(crate) fn check_spans(events: &[Value]) {
    let known: BTreeSet<&str> = Kind::ALL.iter().map(|kind| kind.word()).collect();
    let mut threads: BTreeMap<u64, Vec<(f64, f64)>> = BTreeMap::new();
    for event in of(events, "X") {
        assert!(known.contains(event["name"].as_str().unwrap()), "{event}");
        let (start, duration) = (time(event, "ts"), time(event, "dur"));
        assert!(start >= 0.0 && duration >= 0.0, "{event}");
        threads.entry(number(event, "tid")).or_default().push((start, start + duration));
    }
    let named: BTreeSet<u64> = of(events, "M").map(|event| number(event, "tid")).collect();
    assert!(!threads.is_empty());
    for (thread, spans) in threads {
        assert!(named.contains(&thread), "thread {thread} has no name");
        let mut outer: Vec<(f64, f64)> = Vec::new();
        for (start, end) in spans {
            while outer.last().is_some_and(|(_, outer_end)| *outer_end <= start + NANOSECOND / 2.0)
            {
                outer.pop();
            }
            if let Some((outer_start, outer_end)) = outer.last() {
                let within = start >= *outer_start && end <= outer_end + NANOSECOND / 2.0;
                assert!(within, "{start}..{end} in {outer_start}..{outer_end}");
            }
            outer.push((start, end));
        }
    }
}

/// A counter is never negative, and one of them was above nothing.
#[track_caller]
fn check_counters(events: &[Value]) {
    for name in ["held_bytes of device 0", "resident_bytes of device 0", "locked_bytes"] {
        let of_name = of(events, "C").filter(|event| event["name"] == name);
        let values: Vec<u64> = of_name.map(|event| number(&event["args"], "bytes")).collect();
        assert!(values.iter().any(|value| *value > 0), "{name}: {values:?}");
    }
}

#[test]
fn a_run_with_evictions_leaves_its_spans() {
    let (folder, path) = model("4M");
    let file = folder.path().join("trace.json");
    let arguments = ["trace", text(&path), "--output", text(&file), "--budget", "40%", "--json"];
    let report = json(0, &[&arguments[..], &["--device", SIM, "--passes", "3"]].concat());
    let events = events(&file);
    check_spans(&events);
    check_counters(&events);
    let kinds: BTreeMap<&str, usize> =
        Kind::ALL.iter().map(|kind| (kind.word(), 0)).collect::<BTreeMap<_, _>>();
    let kinds = events.iter().fold(kinds, |mut kinds, event| {
        let name = event["name"].as_str().unwrap();
        let count = kinds.get_mut(name).filter(|_| event["ph"] == "X" || event["ph"] == "i");
        if let Some(count) = count {
            *count += 1;
        }
        kinds
    });
    for kind in ["fault", "unpin", "claim", "map", "set_access", "unmap", "read", "copy", "evict"] {
        assert!(kinds[kind] > 0, "no {kind}: {kinds:?}");
        let told = number(&report["kinds"][kind], "count");
        assert_eq!(told, kinds[kind] as u64, "{kind}");
    }
    // Three passes; the headroom at the begin, and what the library's own thread looks at.
    assert_eq!(kinds["pass"], 3);
    assert!(kinds["budget_change"] >= 1, "{kinds:?}");
    let run = &report["run"];
    assert_eq!(kinds["evict"] as u64, number(run, "evicted_pages"));
    let waits = run["waits"].as_object().unwrap().values();
    let waits: u64 = waits.map(|wait| number(wait, "count")).sum();
    assert!(kinds["wait"] as u64 >= waits, "{} of {waits}", kinds["wait"]);
    // Each unpin ends the arrow of a fault.
    let (begun, ended) = (of(&events, "s").count(), of(&events, "f").count());
    assert_eq!((begun, ended), (kinds["unpin"], kinds["unpin"]));
    assert_eq!((number(&report, "dropped"), &report["ok"]), (0, &Value::Bool(true)));
    assert!(number(&report, "spans") > 0 && report["covered_ms"].as_f64().unwrap() > 0.0);
}

#[test]
fn what_is_dropped_is_told() {
    let (folder, path) = model("2M");
    let file = folder.path().join("trace.json");
    let arguments = ["trace", text(&path), "--output", text(&file), "--device", SIM];
    let few = [&arguments[..], &["--spans", "100"]].concat();
    let report = json(0, &[&few[..], &["--json"]].concat());
    assert!(number(&report, "dropped") > 0 && number(&report, "spans") <= 100, "{report}");
    check_spans(&events(&file));
    let told = lines(0, &few);
    assert!(told.contains("DROPPED: raise --spans"), "{told}");
    // The file that is there is a trace, and is replaced.
    let told = lines(0, &arguments);
    for expected in ["none dropped", "pass 2/2", "\nkind ", "\nfault ", "\ncopy "] {
        assert!(told.contains(expected), "{expected}: {told}");
    }
    // A reader finds out what each row is of.
    let table: Vec<&str> = told.lines().skip_while(|line| !line.starts_with("kind ")).collect();
    let heading = table[0];
    let columns: Vec<&str> = heading.split("  ").filter(|word| !word.is_empty()).collect();
    let columns: Vec<&str> = columns.into_iter().map(str::trim).collect();
    assert_eq!(columns, ["kind", "times", "ms in all", "bytes", "what it is"]);
    for kind in Kind::ALL {
        let row = table.iter().find(|line| line.starts_with(&format!("{} ", kind.word())));
        assert!(row.is_none_or(|row| row.ends_with(kind.meaning())), "{row:?}");
    }
}

#[test]
fn nothing_else_is_replaced() {
    let (folder, path) = model("1M");
    let before = std::fs::read(&path).unwrap();
    let nowhere = folder.path().join("nowhere").join("trace.json");
    for (code, target, why) in [
        (2, text(&path), "no trace; remove it"),
        (2, text(folder.path()), "is a folder"),
        (3, text(&nowhere), "nowhere does not exist"),
    ] {
        let arguments = ["trace", text(&path), "--output", target, "--device", SIM, "--json"];
        let report = json(code, &arguments);
        let error = report["error"].as_str().unwrap();
        assert!(error.starts_with(target) && error.contains(why), "{error}");
    }
    assert_eq!(std::fs::read(&path).unwrap(), before);
    // A run that never began leaves no file.
    let file = folder.path().join("trace.json");
    let arguments = ["trace", "/nowhere/model", "--output", text(&file), "--json"];
    json(3, &arguments);
    assert!(!file.exists());
    assert_eq!(output(&["trace", text(&path)]).status.code(), Some(2));
}
