//! A trace that was taken: records by thread, their totals, and which unpin ends which fault.
//!
//! Pure: it holds values and answers from them.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use super::{Kind, Record, What};

/// What a fault came to when its pages were pinned: such a fault has an unpin.
pub(crate) const RESIDENT: &str = "resident";

/// The records of one thread, in the order of their ends.
#[derive(Clone, Debug)]
pub struct Thread {
    /// Its name.
    pub name: String,
    /// What it recorded.
    pub records: Vec<Record>,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Trace {
    pub(super) process: u32,
    pub(super) started_ns: u64,
    pub(super) stopped_ns: u64,
    pub(super) dropped: u64,
    pub(super) threads: Vec<Thread>,
}

/// Records of one kind together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Total {
    /// The kind.
    pub kind: Kind,
    /// How many.
    pub count: u64,
    /// Their times together; spans of several threads at once count for each.
    pub time: Duration,
    /// Their bytes together.
    pub bytes: u64,
}

/// A fault and its unpin: thread and begin of each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Flow {
    pub(super) from: (usize, u64),
    pub(super) to: (usize, u64),
}

impl Trace {
    /// One with nothing in it.
    pub(super) fn empty(process: u32) -> Self {
        Self { process, started_ns: 0, stopped_ns: 0, dropped: 0, threads: Vec::new() }
    }

    /// Every thread that recorded anything, in the order in which they came.
    #[must_use]
    pub fn threads(&self) -> &[Thread] {
        &self.threads
    }

    /// Spans and marks of threads and devices; values of counters are none.
    #[must_use]
    pub fn span_count(&self) -> u64 {
        self.records().filter(|(_, record)| record.kind().is_some()).count() as u64
    }

    /// Records that found no room.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// From the begin of the first span to the end of the last.
    #[must_use]
    pub fn covered(&self) -> Duration {
        let spans = || self.records().filter(|(_, record)| record.kind().is_some());
        let begin = spans().map(|(_, record)| self.since_start(record.start_ns)).min();
        let end = spans().map(|(_, record)| self.since_start(record.end_ns)).max();
        Duration::from_nanos(end.unwrap_or(0) - begin.unwrap_or(0))
    }

    /// The totals of each kind that there is, in the order of [`Kind::ALL`].
    #[must_use]
    pub fn totals(&self) -> Vec<Total> {
        let total = |&kind: &Kind| Total { kind, count: 0, time: Duration::ZERO, bytes: 0 };
        let mut totals: Vec<Total> = Kind::ALL.iter().map(total).collect();
        for (_, record) in self.records() {
            let Some(kind) = record.kind() else { continue };
            let total = &mut totals[kind as usize];
            total.count += 1;
            total.time += Duration::from_nanos(record.end_ns - record.start_ns);
            total.bytes += record.bytes;
        }
        totals.retain(|total| total.count > 0);
        totals
    }

    /// Nanoseconds since the trace was started; what was before then counts as then.
    pub(super) fn since_start(&self, clock_ns: u64) -> u64 {
        clock_ns.saturating_sub(self.started_ns)
    }

    /// The spans of a thread by their begin, outer ones first, and each within the one that it
    /// began in. A few that are not held by a scope end in another order than they should, some
    /// nanoseconds apart: those are cut where the outer one ends.
    pub(super) fn nested(&self, thread: usize) -> Vec<Record> {
        let spans = self.threads[thread].records.iter();
        let spans = spans.filter(|record| matches!(record.what, What::Span(_)));
        let mut spans: Vec<Record> = spans.copied().collect();
        for span in &mut spans {
            span.start_ns = span.start_ns.max(self.started_ns);
            span.end_ns = span.end_ns.max(span.start_ns);
        }
        spans.sort_by_key(|span| (span.start_ns, std::cmp::Reverse(span.end_ns)));
        let mut outer: Vec<u64> = Vec::new();
        for span in &mut spans {
            // One that ends as this begins is over, unless this takes no time.
            while outer.last().is_some_and(|end| *end <= span.start_ns && *end < span.end_ns) {
                outer.pop();
            }
            if let Some(end) = outer.last() {
                span.end_ns = span.end_ns.min(*end);
            }
            outer.push(span.end_ns);
        }
        spans
    }

    /// Faults that pinned their pages, each with the unpin that came first of those that it was
    /// before; of several faults of the same pages the first.
    pub(super) fn flows(&self) -> Vec<Flow> {
        let mut events: Vec<(u64, usize, &Record)> = Vec::new();
        for (thread, record) in self.records() {
            match record.what {
                What::Span(Kind::Fault) | What::Mark(Kind::Fault) if record.detail == RESIDENT => {
                    events.push((record.end_ns, thread, record));
                }
                What::Span(Kind::Unpin) => events.push((record.start_ns, thread, record)),
                _ => {}
            }
        }
        events.sort_by_key(|(time, ..)| *time);
        let mut held: HashMap<_, VecDeque<(usize, u64)>> = HashMap::new();
        let mut flows = Vec::new();
        for (_, thread, record) in events {
            let Record { what, device, bar, pages, start_ns, .. } = *record;
            let held = held.entry((device, bar, pages)).or_default();
            let here = (thread, self.since_start(start_ns));
            if what != What::Span(Kind::Unpin) {
                held.push_back(here);
            } else if let Some(from) = held.pop_front() {
                flows.push(Flow { from, to: here });
            }
        }
        flows
    }

    pub(super) fn records(&self) -> impl Iterator<Item = (usize, &Record)> {
        let threads = self.threads.iter().enumerate();
        threads.flat_map(|(thread, of)| of.records.iter().map(move |record| (thread, record)))
    }
}
