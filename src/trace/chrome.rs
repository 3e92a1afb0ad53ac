//! The trace event format, which Perfetto and Chrome read: JSON, an object for each event.
//!
//! Source: "Trace Event Format", the document of Chrome's tracing. Spans of threads are complete
//! events ("X"), marks are instants ("i"), counters "C"; names are metadata ("M"). Spans of a
//! device may overlap, so they are asynchronous ("b", "e") in a process of their own for each
//! device. An arrow ("s", "f") leads from a fault to its unpin. Times are in microseconds since
//! the start of the trace.

use std::collections::BTreeSet;
use std::io::{self, Write};

use serde::Serialize;

use super::taken::Trace;
use super::{Record, What};
use crate::units::{DeviceOrdinal, Stream};

/// Process numbers of devices come after those that Linux gives out (2^22 at most).
const DEVICE_PROCESS: u32 = 1 << 24;

/// The file's first bytes.
pub const FILE_START: &str = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";

#[derive(Serialize, Default)]
struct Event<'a> {
    name: &'a str,
    cat: &'static str,
    ph: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    pid: u32,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u64>,
    /// Of an instant: that it is of its thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'static str>,
    /// Of an arrow's end: that it ends at the span around it.
    #[serde(skip_serializing_if = "Option::is_none")]
    bp: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Arguments<'a>>,
}

#[derive(Serialize, Default)]
struct Arguments<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bar: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_page: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    page_count: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<&'a str>,
}

impl Trace {
    /// Writes the trace for Perfetto (ui.perfetto.dev) or chrome://tracing, about 200 bytes a span.
    /// The target should be buffered.
    ///
    /// # Errors
    /// Those of the target.
    pub fn write_chrome_json(&self, target: &mut impl Write) -> io::Result<()> {
        let mut file = File { trace: self, target, is_first: true };
        file.target.write_all(FILE_START.as_bytes())?;
        file.names()?;
        for thread in 0..self.threads.len() {
            file.thread(thread)?;
        }
        file.devices()?;
        file.arrows()?;
        let dropped = self.dropped;
        let recorded = self.since_start(self.stopped_ns);
        let end = format!(
            "\n],\"otherData\":{{\"dropped\":{dropped},\"recorded_ns\":{recorded},\
             \"version\":\"{}\"}}}}\n",
            env!("CARGO_PKG_VERSION")
        );
        file.target.write_all(end.as_bytes())
    }
}

struct File<'a, W> {
    trace: &'a Trace,
    target: &'a mut W,
    is_first: bool,
}

impl<W: Write> File<'_, W> {
    fn event(&mut self, event: &Event<'_>) -> io::Result<()> {
        let separator = if std::mem::take(&mut self.is_first) { "\n" } else { ",\n" };
        self.target.write_all(separator.as_bytes())?;
        serde_json::to_writer(&mut *self.target, event).map_err(io::Error::from)
    }

    /// Names of the process, its threads and the devices.
    fn names(&mut self) -> io::Result<()> {
        let trace = self.trace;
        self.name("process_name", trace.process, 0, "vbar")?;
        for (thread, of) in trace.threads.iter().enumerate() {
            self.name("thread_name", trace.process, thread_number(thread), &of.name)?;
        }
        let of_devices = trace.records().filter(|(_, record)| is_on_device(record));
        let devices: BTreeSet<_> = of_devices.map(|(_, record)| ordinal(record.device)).collect();
        for device in devices {
            self.name("process_name", DEVICE_PROCESS + device, 0, &format!("device {device}"))?;
        }
        Ok(())
    }

    fn name(&mut self, what: &str, pid: u32, tid: usize, name: &str) -> io::Result<()> {
        let args = Some(Arguments { name: Some(name), ..Arguments::default() });
        self.event(&Event { name: what, ph: "M", pid, tid, args, ..Event::default() })
    }

    fn thread(&mut self, thread: usize) -> io::Result<()> {
        let trace = self.trace;
        for span in trace.nested(thread) {
            let dur = Some(microseconds(span.end_ns - span.start_ns));
            self.event(&Event { ph: "X", dur, ..self.event_of(&span, thread) })?;
        }
        for record in &trace.threads[thread].records {
            match record.what {
                What::Mark(_) => {
                    let s = Some("t");
                    self.event(&Event { ph: "i", s, ..self.event_of(record, thread) })?;
                }
                What::Value(counter) => self.value(counter.word(), record)?,
                What::Span(_) | What::OnDevice(_) => {}
            }
        }
        Ok(())
    }

    /// A counter has a name for each device: they would be one line otherwise.
    fn value(&mut self, counter: &str, record: &Record) -> io::Result<()> {
        let name = match record.device {
            Some(device) => format!("{counter} of device {device}"),
            None => counter.to_owned(),
        };
        let args = Some(Arguments { bytes: Some(record.bytes), ..Arguments::default() });
        let event = Event { name: &name, ph: "C", args, ..self.event_of(record, 0) };
        self.event(&Event { tid: 0, ..event })
    }

    fn devices(&mut self) -> io::Result<()> {
        let trace = self.trace;
        let spans = trace.records().filter(|(_, record)| is_on_device(record));
        for ((_, span), id) in spans.zip(0..) {
            let pid = DEVICE_PROCESS + ordinal(span.device);
            for (ph, time_ns) in [("b", span.start_ns), ("e", span.end_ns)] {
                let ts = Some(microseconds(trace.since_start(time_ns)));
                let event = Event { ph, ts, pid, id: Some(id), ..self.event_of(span, 0) };
                self.event(&Event { tid: 0, ..event })?;
            }
        }
        Ok(())
    }

    fn arrows(&mut self) -> io::Result<()> {
        for (flow, id) in self.trace.flows().into_iter().zip(0..) {
            let ends = [("s", None, flow.from), ("f", Some("e"), flow.to)];
            for (ph, bp, (thread, time_ns)) in ends {
                let (name, cat, pid) = ("pinned", "vbar", self.trace.process);
                let (ts, tid) = (Some(microseconds(time_ns)), thread_number(thread));
                let id = Some(id);
                self.event(&Event { name, cat, ph, ts, pid, tid, id, bp, ..Event::default() })?;
            }
        }
        Ok(())
    }

    /// What all events have.
    fn event_of<'r>(&self, record: &'r Record, thread: usize) -> Event<'r> {
        let (start, end) = record.pages;
        let has_pages = record.bar.is_some() && start < end;
        let args = Arguments {
            name: None,
            device: record.device.map(|device| device.0),
            bar: record.bar,
            first_page: has_pages.then_some(start),
            page_count: has_pages.then(|| end - start),
            bytes: (record.bytes > 0).then_some(record.bytes),
            stream: (record.stream != Stream::NONE).then(|| format!("{:#x}", record.stream.0)),
            detail: (!record.detail.is_empty()).then_some(record.detail),
        };
        Event {
            name: record.kind().map_or("", super::Kind::word),
            cat: "vbar",
            ts: Some(microseconds(self.trace.since_start(record.start_ns))),
            pid: self.trace.process,
            tid: thread_number(thread),
            args: Some(args),
            ..Event::default()
        }
    }
}

/// Threads are counted from 1: those of the operating system are used again.
fn thread_number(thread: usize) -> usize {
    thread + 1
}

fn is_on_device(record: &Record) -> bool {
    matches!(record.what, What::OnDevice(_))
}

fn ordinal(device: Option<DeviceOrdinal>) -> u32 {
    device.map_or(0, |device| device.0)
}

fn microseconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e3
}
