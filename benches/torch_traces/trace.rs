//! Traces of what asks an allocator for memory, their text, and their replay.
//!
//! An event a line, a `#` begins a comment:
//!
//! ```text
//! malloc ID BYTES STREAM
//! record ID STREAM         the block is used on another stream too
//! free ID
//! ```
//!
//! A replay runs no work: it tells how much memory an order of requests makes an allocator hold.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;

use vbar::torch::Allocator;
use vbar::units::Stream;

use super::Outcome;

/// What a program asks for. An id names one block from its request to its free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    Malloc { id: u64, bytes: u64, stream: usize },
    Record { id: u64, stream: usize },
    Free { id: u64 },
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malloc { id, bytes, stream } => write!(f, "malloc {id} {bytes} {stream}"),
            Self::Record { id, stream } => write!(f, "record {id} {stream}"),
            Self::Free { id } => write!(f, "free {id}"),
        }
    }
}

impl FromStr for Event {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let wrong = || format!("'{line}' is no event");
        let mut words = line.split_whitespace();
        let verb = words.next().ok_or_else(wrong)?;
        let numbers: Result<Vec<u64>, _> = words.map(str::parse).collect();
        match (verb, &numbers.map_err(|_| wrong())?[..]) {
            ("malloc", &[id, bytes, stream]) => {
                Ok(Self::Malloc { id, bytes, stream: stream as usize })
            }
            ("record", &[id, stream]) => Ok(Self::Record { id, stream: stream as usize }),
            ("free", &[id]) => Ok(Self::Free { id }),
            _ => Err(wrong()),
        }
    }
}

/// The events of a text.
pub(crate) fn parse(text: &str) -> Result<Vec<Event>, String> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or("").trim());
    lines.filter(|line| !line.is_empty()).map(str::parse).collect()
}

/// The text of a file; of one whose name ends in `.gz` what `gzip` makes of it.
pub(crate) fn read(path: &Path) -> Outcome<String> {
    if path.extension().is_none_or(|extension| extension != "gz") {
        return Ok(std::fs::read_to_string(path)?);
    }
    let unpacked = Command::new("gzip").arg("-dc").arg(path).output()?;
    if !unpacked.status.success() {
        return Err(String::from_utf8_lossy(&unpacked.stderr).into());
    }
    Ok(String::from_utf8(unpacked.stdout)?)
}

/// What a replay came to, in bytes.
pub(crate) struct Replayed {
    /// Most that was asked for at a time, unrounded.
    pub(crate) live_peak: u64,
    /// Most that the allocator held.
    pub(crate) reserved_peak: u64,
    pub(crate) nanos_an_event: f64,
    /// Times that a page was given memory.
    pub(crate) mapped_pages: u64,
}

impl Replayed {
    pub(crate) fn utilisation(&self) -> f64 {
        self.live_peak as f64 / self.reserved_peak as f64
    }
}

/// Asks an allocator, which holds nothing yet, for what a trace says. Stream 0 is the default one,
/// `make` gives each other.
pub(crate) fn replay(
    allocator: &Allocator,
    events: &[Event],
    mut make: impl FnMut() -> Outcome<Stream>,
) -> Outcome<Replayed> {
    let mut streams = vec![Stream::DEFAULT];
    let mut blocks: HashMap<u64, (u64, u64)> = HashMap::new();
    let (mut live, mut live_peak) = (0, 0);
    let started = std::time::Instant::now();
    for event in events {
        if let Event::Malloc { stream, .. } | Event::Record { stream, .. } = event {
            while streams.len() <= *stream {
                streams.push(make()?);
            }
        }
        match *event {
            Event::Malloc { id, bytes, stream } => {
                let address = allocator.malloc(bytes as usize, streams[stream])?;
                if blocks.insert(id, (address, bytes)).is_some() {
                    return Err(format!("{event}: the id is in use").into());
                }
                live += bytes;
                live_peak = live_peak.max(live);
            }
            Event::Record { id, stream } => {
                let (address, _) = blocks.get(&id).ok_or_else(|| format!("{event}: no block"))?;
                allocator.record_stream(*address, streams[stream]);
            }
            Event::Free { id } => {
                let (address, bytes) =
                    blocks.remove(&id).ok_or_else(|| format!("{event}: no block"))?;
                allocator.free(address);
                live -= bytes;
            }
        }
    }
    let nanos_an_event = started.elapsed().as_nanos() as f64 / events.len().max(1) as f64;
    let statistics = allocator.statistics();
    let reserved_peak = statistics.reserved_bytes.all.peak;
    let mapped_pages = statistics.num_device_alloc;
    blocks.into_values().for_each(|(address, _)| {
        allocator.free(address);
    });
    Ok(Replayed { live_peak, reserved_peak, nanos_an_event, mapped_pages })
}

/// Makes traces: the same of a seed every time.
struct Writer {
    random: u64,
    next: u64,
    events: Vec<Event>,
}

impl Writer {
    fn new(seed: u64) -> Self {
        Self { random: seed | 1, next: 0, events: Vec::new() }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    fn malloc_on(&mut self, bytes: u64, stream: usize) -> u64 {
        self.next += 1;
        self.events.push(Event::Malloc { id: self.next, bytes, stream });
        self.next
    }

    fn malloc(&mut self, bytes: u64) -> u64 {
        self.malloc_on(bytes, 0)
    }

    fn free(&mut self, id: u64) {
        self.events.push(Event::Free { id });
    }

    fn temporary_on(&mut self, bytes: u64, stream: usize) {
        let id = self.malloc_on(bytes, stream);
        self.free(id);
    }

    fn temporary(&mut self, bytes: u64) {
        self.temporary_on(bytes, 0);
    }
}

/// Steps of training a decoder in bfloat16: activations that live from the forward pass to the
/// backward one, which frees them in reverse, gradients that live to the end of a step, and an
/// optimizer with temporaries as large as its parameters. Lengths of sequences vary.
pub(crate) fn training(seed: u64) -> Vec<Event> {
    let (layers, width, heads, vocabulary) = (24, 2048, 16, 32_000);
    let mut to = Writer::new(seed);
    let layer = [3 * width * width, width * width, 4 * width * width, 4 * width * width, width];
    let mut weights: Vec<u64> = (0..layers).flat_map(|_| layer).collect();
    weights.extend([vocabulary * width, vocabulary * width]);
    weights.iter().for_each(|count| {
        to.malloc(count * 2);
    });
    for step in 0..8 {
        let tokens = (24 + to.below(41)) * 64;
        let (row, wide) = (tokens * width * 2, tokens * width * 8);
        let mut kept = Vec::new();
        for _ in 0..layers {
            let sizes = [row, row * 3, tokens * heads * 4, row, row, wide, wide, tokens * 8];
            kept.push(sizes.map(|bytes| to.malloc(bytes)));
            to.temporary(row);
        }
        let logits = to.malloc(tokens * vocabulary * 2);
        let mut gradient = to.malloc(tokens * vocabulary * 4);
        to.free(logits);
        let mut gradients =
            vec![to.malloc(vocabulary * width * 2), to.malloc(vocabulary * width * 2)];
        for saved in kept.into_iter().rev() {
            for (id, bytes) in saved.into_iter().rev().zip([row, wide, wide, row, row, row * 3]) {
                let next = to.malloc(bytes);
                to.free(gradient);
                to.free(id);
                gradient = next;
            }
            saved[..2].iter().rev().for_each(|id| to.free(*id));
            gradients.extend(layer.map(|count| to.malloc(count * 2)));
        }
        to.free(gradient);
        if step == 0 {
            // Both moments, in single precision.
            weights.iter().chain(&weights).for_each(|count| {
                to.malloc(count * 4);
            });
        }
        for group in weights.chunks(20) {
            let held: Vec<u64> = group.iter().map(|count| to.malloc(count * 4)).collect();
            held.into_iter().for_each(|id| to.free(id));
        }
        gradients.into_iter().for_each(|id| to.free(id));
    }
    to.events
}

/// Images sampled one after the other, each of another size: an encoder of text, steps of a
/// transformer whose temporaries are the same in each, a decoder whose maps grow, and a preview
/// that is copied away on a second stream.
pub(crate) fn sampling(seed: u64) -> Vec<Event> {
    let (blocks, steps, inner) = (38, 20, 3072);
    let mut to = Writer::new(seed);
    for _ in 0..6 {
        let (height, width) = (64 + to.below(9) * 16, 64 + to.below(9) * 16);
        let words = 64 + to.below(449);
        let text = to.malloc(words * 4096 * 2);
        for _ in 0..24 {
            let parts = [3, 1, 4].map(|parts| to.malloc(words * 4096 * 2 * parts));
            parts.into_iter().for_each(|id| to.free(id));
        }
        let tokens = height * width / 4;
        let mut latent = to.malloc(height * width * 16 * 4);
        for step in 0..steps {
            let mut hidden = to.malloc((tokens + words) * inner * 2);
            for _ in 0..blocks {
                let row = (tokens + words) * inner * 2;
                let (normed, qkv) = (to.malloc(row), to.malloc(3 * row));
                let attended = to.malloc(row);
                to.free(qkv);
                to.free(normed);
                let wide = to.malloc(4 * row);
                to.temporary(4 * row);
                let next = to.malloc(row);
                [wide, attended, hidden].into_iter().for_each(|id| to.free(id));
                hidden = next;
            }
            let next = to.malloc(height * width * 16 * 4);
            to.free(hidden);
            to.free(latent);
            latent = next;
            if step % 5 == 4 {
                let preview = to.malloc(height * width * 3 * 4);
                to.events.push(Event::Record { id: preview, stream: 1 });
                to.temporary_on(height * width * 3, 1);
                to.free(preview);
            }
        }
        let mut map = to.malloc(height * width * 512 * 2);
        for (scale, channels) in [(1, 512), (2, 512), (4, 256), (8, 128)] {
            for _ in 0..3 {
                let bytes = height * width * scale * scale * channels * 2;
                to.temporary(bytes);
                let next = to.malloc(bytes);
                to.free(map);
                map = next;
            }
        }
        [map, latent, text].into_iter().for_each(|id| to.free(id));
    }
    to.events
}
