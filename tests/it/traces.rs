//! A trace of a program: what threads record while pages change hands, and what a child does not.
//!
//! There is one trace in the process, and other tests' work may be in it: what is asked is asked of
//! threads by their names.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vbar::trace::{self, Kind, Thread, Trace, What};
use vbar::units::Stream;
use vbar::{ErrorCode, Fault};

use crate::cli_trace::check_spans;
use crate::forked::in_child;
use crate::world::{P, World, resident, resident_on};

/// Other tests' work does not fill it.
const PLENTY: usize = 1 << 22;

fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn named<'a>(trace: &'a Trace, name: &str) -> &'a Thread {
    trace.threads().iter().find(|thread| thread.name == name).unwrap()
}

fn counts(thread: &Thread) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    for kind in thread.records.iter().filter_map(|record| record.kind()) {
        *counts.entry(kind.word()).or_default() += 1;
    }
    counts
}

#[test]
fn threads_record_what_they_do_to_pages() {
    const THREADS: u64 = 3;
    const ROUNDS: u64 = 50;
    let _alone = alone();
    let world = World::budget(4);
    let vbars: Vec<_> = (0..THREADS).map(|_| world.vbar(4)).collect();
    trace::start(PLENTY).unwrap();
    std::thread::scope(|scope| {
        for (number, vbar) in vbars.iter().enumerate() {
            let stream = world.another_stream();
            let body = move || {
                for round in 0..ROUNDS {
                    let page = round % 4;
                    // What is refused is a fault too.
                    if let Fault::Resident(guard) = vbar.fault(page * P..(page + 1) * P, stream)? {
                        guard.unpin()?;
                    }
                    vbar.prioritise()?;
                }
                vbar::Result::Ok(())
            };
            let thread = std::thread::Builder::new().name(format!("traced {number}"));
            thread.spawn_scoped(scope, body).unwrap();
        }
    });
    let trace = trace::stop();
    assert_eq!(trace.dropped(), 0);
    let mut all = BTreeMap::new();
    for number in 0..THREADS {
        let thread = named(&trace, &format!("traced {number}"));
        let counts = counts(thread);
        assert_eq!(counts["fault"], ROUNDS as usize, "{counts:?}");
        let resident = |record: &&trace::Record| {
            record.what == What::Span(Kind::Fault) && record.detail == "resident"
        };
        let resident = thread.records.iter().filter(resident).count();
        assert_eq!(counts.get("unpin").copied().unwrap_or(0), resident, "{counts:?}");
        counts.into_iter().for_each(|(kind, count)| *all.entry(kind).or_insert(0) += count);
    }
    for kind in ["claim", "map", "set_access", "evict", "unmap"] {
        assert!(all.contains_key(kind), "no {kind}: {all:?}");
    }
    let mut text = Vec::new();
    trace.write_chrome_json(&mut text).unwrap();
    let file: serde_json::Value = serde_json::from_slice(&text).unwrap();
    check_spans(file["traceEvents"].as_array().unwrap());
    world.check();
}

#[test]
fn ranges_that_are_faulted_together_are_told_one_by_one() {
    let _alone = alone();
    let world = World::budget(4);
    let vbar = world.vbar(4);
    trace::start(PLENTY).unwrap();
    let work = || {
        let guards =
            world.runtime.fault_many(&[(&vbar, 0..P), (&vbar, 2 * P..4 * P)], world.stream);
        drop(guards.unwrap().resident().unwrap());
        // A hit, and one for no stream.
        drop(resident(&world, &vbar, 0..1));
        drop(resident_on(&vbar, 0..1, Stream::NONE));
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("together".to_owned());
        thread.spawn_scoped(scope, work).unwrap().join().unwrap();
    });
    let trace = trace::stop();
    let thread = named(&trace, "together");
    let of = |what| thread.records.iter().filter(move |record| record.what == what);
    let marks: Vec<_> = of(What::Mark(Kind::Fault)).map(|mark| mark.pages).collect();
    assert_eq!(marks, [(0, 1), (2, 4)]);
    assert_eq!(of(What::Span(Kind::Fault)).count(), 3);
    assert_eq!(of(What::Span(Kind::Unpin)).count(), 4);
    let bytes: Vec<u64> = of(What::Span(Kind::Fault)).map(|fault| fault.bytes).collect();
    assert_eq!(bytes, [3 * P, P, P]);
    world.check();
}

#[test]
fn a_forked_child_records_nothing_and_takes_nothing() {
    let _alone = alone();
    let world = World::budget(1);
    let vbar = world.vbar(1);
    trace::start(PLENTY).unwrap();
    drop(resident(&world, &vbar, 0..1));
    let good = in_child(|| {
        drop(trace::span(Kind::Pass));
        trace::value(trace::Counter::Held, None, 1);
        let refused = trace::start(1).is_err_and(|error| error.code() == ErrorCode::ProcessEnding);
        let taken = trace::stop();
        refused && taken.threads().is_empty() && taken.covered() == Duration::ZERO
    });
    assert!(good, "the child recorded, or took its parent's trace");
    let trace = trace::stop();
    assert!(trace.totals().iter().any(|total| total.kind == Kind::Unpin), "{:?}", trace.totals());
}
