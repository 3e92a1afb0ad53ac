//! Recording by itself: what is kept, for whom, and how it is written.

use std::sync::Barrier;
use std::time::Duration;

use serde_json::Value;

use super::*;
use crate::error::ErrorCode;

/// There is one trace in the process, and tests run side by side: whoever records one holds this.
/// Others' work may be in it too, so that tests look for what is theirs, by its VBAR.
static ALONE: crate::sync::Mutex<()> = crate::sync::Mutex::new(());

/// Other tests' work does not fill it.
const PLENTY: usize = 1 << 20;
const BAR: u32 = 0x00C0_FFEE;
const DEVICE: DeviceOrdinal = DeviceOrdinal(7);

fn own(trace: &Trace) -> Vec<(usize, Record)> {
    let records = trace.records().filter(|(_, record)| record.bar == Some(BAR));
    records.map(|(thread, record)| (thread, *record)).collect()
}

fn events(trace: &Trace) -> Vec<Value> {
    let mut text = Vec::new();
    trace.write_chrome_json(&mut text).unwrap();
    assert!(text.starts_with(FILE_START.as_bytes()));
    let value: Value = serde_json::from_slice(&text).unwrap();
    value["traceEvents"].as_array().unwrap().clone()
}

fn of_own<'a>(events: &'a [Value], phase: &str) -> Vec<&'a Value> {
    let own = |event: &&Value| event["ph"] == phase && event["args"]["bar"] == BAR;
    events.iter().filter(own).collect()
}

fn record(what: What, start_ns: u64, end_ns: u64) -> Record {
    Record { start_ns, end_ns, bar: Some(BAR), pages: (1, 3), ..Record::new(what, 0) }
}

fn trace_of(records: Vec<Record>) -> Trace {
    let threads = vec![Thread { name: "one".to_owned(), records }];
    Trace { process: 1, started_ns: 0, stopped_ns: 1000, dropped: 0, threads }
}

#[test]
fn off_records_nothing() {
    let _alone = ALONE.lock();
    assert!(!is_on());
    assert_eq!(begin(), 0);
    let guard = span(Kind::Claim).pages(BAR, 0..1).since(begin());
    assert!(guard.open.is_none());
    // One that began while it was off is not recorded when it is on.
    start(PLENTY).unwrap();
    drop(guard);
    let trace = stop();
    assert!(own(&trace).is_empty());
    drop(span(Kind::Claim).pages(BAR, 0..1));
    assert!(own(&stop()).is_empty() && stop().span_count() == 0);
}

#[test]
fn what_is_said_of_a_span_is_in_the_file() {
    let _alone = ALONE.lock();
    start(PLENTY).unwrap();
    {
        let mut outer = span(Kind::Fault).device(DEVICE).pages(BAR, 3..5).bytes(8192);
        drop(span(Kind::Read).pages(BAR, 3..4).stream(Stream(0x40)).detail("file"));
        drop(mark(Kind::Evict).pages(BAR, 9..10));
        outer.note("resident");
    }
    drop(span(Kind::Unpin).device(DEVICE).pages(BAR, 3..5));
    gpu_span(DEVICE, Stream(0x40), BAR, 3..5, clock_ns(), clock_ns() + 5000);
    value(Counter::Held, Some(DEVICE), 4096);
    let trace = stop();
    let events = events(&trace);
    let spans = of_own(&events, "X");
    let names: Vec<&str> = spans.iter().map(|span| span["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["fault", "read", "unpin"]);
    let args = &spans[0]["args"];
    assert_eq!((&args["device"], &args["bytes"]), (&7.into(), &8192.into()));
    assert_eq!((&args["first_page"], &args["page_count"]), (&3.into(), &2.into()));
    assert_eq!(
        (&args["detail"], &spans[1]["args"]["stream"]),
        (&"resident".into(), &"0x40".into())
    );
    assert_eq!(of_own(&events, "i").len(), 1);
    let gpu = [of_own(&events, "b"), of_own(&events, "e")].concat();
    let times: Vec<f64> = gpu.iter().map(|event| event["ts"].as_f64().unwrap()).collect();
    assert!(gpu.len() == 2 && times[1] - times[0] >= 5.0, "{gpu:?}");
    let device = |event: &&Value| event["args"]["name"] == "device 7";
    assert!(events.iter().find(device).is_some_and(|name| name["pid"] == gpu[0]["pid"]));
    let counter = events.iter().find(|event| event["name"] == "held_bytes of device 7").unwrap();
    assert_eq!((&counter["ph"], &counter["args"]["bytes"]), (&"C".into(), &4096.into()));
    // The arrow leads from the fault to the unpin.
    let at = |span: &Value| (span["tid"].clone(), span["ts"].clone());
    for (phase, span) in [("s", spans[0]), ("f", spans[2])] {
        let mut ends = events.iter().filter(|event| event["ph"] == phase);
        assert!(ends.any(|end| at(end) == at(span)), "{phase} {span}");
    }
}

#[test]
fn no_more_is_kept_than_was_allowed() {
    let _alone = ALONE.lock();
    for capacity in [0, 1, 100] {
        start(capacity).unwrap();
        (0..500).for_each(|_| drop(span(Kind::Map).pages(BAR, 0..1)));
        let trace = stop();
        let kept = trace.records().count();
        assert!(kept <= capacity, "{kept} of {capacity}");
        // Of those of other tests some may be under way.
        assert!(trace.dropped() >= 500 - capacity as u64, "{}", trace.dropped());
        assert!(own(&trace).len() <= kept);
    }
}

#[test]
fn every_thread_has_its_own_lane_and_name() {
    const THREADS: usize = 16;
    let _alone = ALONE.lock();
    start(PLENTY).unwrap();
    let barrier = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let body = || {
                barrier.wait();
                for _ in 0..100 {
                    let _outer = span(Kind::Claim).pages(BAR, 0..1);
                    drop(span(Kind::Map).pages(BAR, 0..1));
                }
            };
            let named = std::thread::Builder::new().name(format!("lane {number}"));
            named.spawn_scoped(scope, body).unwrap();
        }
    });
    // The threads are gone, what they recorded is not.
    let trace = stop();
    let own = own(&trace);
    assert_eq!((own.len(), trace.dropped()), (THREADS * 200, 0));
    let events = events(&trace);
    for number in 0..THREADS {
        let name = format!("lane {number}");
        let named = |event: &&Value| event["ph"] == "M" && event["args"]["name"] == name.as_str();
        let thread = &events.iter().find(named).unwrap()["tid"];
        let of_thread = of_own(&events, "X").into_iter().filter(|event| event["tid"] == *thread);
        assert_eq!(of_thread.count(), 200);
    }
}

#[test]
fn there_is_one_trace_at_a_time() {
    let _alone = ALONE.lock();
    start(10).unwrap();
    assert_eq!(start(10).unwrap_err().code(), ErrorCode::AlreadyOpen);
    drop(span(Kind::Map).pages(BAR, 0..1));
    let open = span(Kind::Map).pages(BAR, 0..1);
    assert!(own(&stop()).len() <= 1);
    // The next one begins with nothing, and what began before it is not in it.
    start(PLENTY).unwrap();
    drop(open);
    drop(span(Kind::Unmap).pages(BAR, 0..1));
    let kinds: Vec<_> = own(&stop()).iter().map(|(_, record)| record.what).collect();
    assert_eq!(kinds, [What::Span(Kind::Unmap)]);
}

#[test]
fn a_thread_that_stops_late_harms_nothing() {
    let _alone = ALONE.lock();
    start(PLENTY).unwrap();
    let barrier = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let late = span(Kind::Wait).pages(BAR, 0..1);
            barrier.wait();
            barrier.wait();
            drop(late);
        });
        barrier.wait();
        assert!(own(&stop()).is_empty());
        barrier.wait();
    });
    assert!(own(&stop()).is_empty());
}

#[test]
fn spans_are_written_nested_whatever_their_order() {
    let span = |kind, start, end| record(What::Span(kind), start, end);
    // The waits of one request end together, in any order.
    let trace = trace_of(vec![
        span(Kind::Map, 15, 16),
        span(Kind::Wait, 10, 30),
        span(Kind::Wait, 20, 31),
        span(Kind::Unpin, 30, 40),
        span(Kind::Fault, 5, 30),
        span(Kind::Unpin, 40, 40),
    ]);
    let nested: Vec<_> = trace.nested(0).iter().map(|span| (span.start_ns, span.end_ns)).collect();
    assert_eq!(nested, [(5, 30), (10, 30), (15, 16), (20, 30), (30, 40), (40, 40)]);
    let totals = trace.totals();
    let waits = totals.iter().find(|total| total.kind == Kind::Wait).unwrap();
    assert_eq!((waits.count, waits.time), (2, Duration::from_nanos(31)));
    assert_eq!(trace.covered(), Duration::from_nanos(35));
    assert_eq!(trace.span_count(), 6);
}

#[test]
fn an_arrow_leads_from_each_fault_to_its_unpin() {
    let fault =
        |start, detail| Record { detail, ..record(What::Span(Kind::Fault), start, start + 5) };
    let unpin = |start| record(What::Span(Kind::Unpin), start, start + 1);
    let elsewhere = Record { bar: Some(1), ..unpin(26) };
    let trace = trace_of(vec![
        unpin(1),
        fault(10, "resident"),
        fault(20, "resident"),
        elsewhere,
        unpin(30),
        fault(40, "budget"),
        unpin(50),
        unpin(60),
    ]);
    let arrows: Vec<_> = trace.flows().iter().map(|flow| (flow.from.1, flow.to.1)).collect();
    assert_eq!(arrows, [(10, 30), (20, 50)]);
}
