//! PyTorch's allocator under everything at once, by seed: blocks on several streams, recorded for
//! others, captured, beside weights and a budget that moves. Every block's bytes are checked before
//! it is freed, and the device checks who touches what when.

use std::time::Duration;

use vbar::driver::sim::SimGraph;
use vbar::driver::{CaptureMode, Driver};
use vbar::options::{ContextWaits, Eviction, Poison, RuntimeOptions};
use vbar::torch::{Freed, PoolId};
use vbar::units::{DeviceAddress, Stream};
use vbar::{Runtime, Vbar};

use crate::torch::{Random, Torch};
use crate::world::{P, ROOMY, World, options, pattern_sum};

struct Block {
    address: u64,
    bytes: u64,
    seed: u64,
    stream: Stream,
    /// Its own stream is no more; this one comes after it.
    is_orphan: bool,
}

struct Graph {
    graph: SimGraph,
    id: PoolId,
    /// What a launch adds to the word.
    sum: u64,
    outputs: Vec<u64>,
}

struct Storm {
    torch: Torch,
    random: Random,
    streams: Vec<Stream>,
    blocks: Vec<Block>,
    graphs: Vec<Graph>,
    expected: u64,
    pools: u64,
    /// Blocks are of many pages, and frames are let move.
    moves: bool,
    /// Requests for which frames moved.
    moved: u64,
    /// Blocks in the hands of a caller that caches by itself.
    segments: Vec<Block>,
}

impl Storm {
    fn new(seed: u64, options: RuntimeOptions) -> Self {
        let torch = Torch::of(World::with(ROOMY, options));
        let mut streams = vec![torch.world.stream, Stream::DEFAULT];
        streams.extend((0..3).map(|_| torch.world.another_stream()));
        let (blocks, graphs) = (Vec::new(), Vec::new());
        let random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let segments = Vec::new();
        let (expected, pools, moves, moved) = (0, 0, false, 0);
        Self { torch, random, streams, blocks, graphs, expected, pools, moves, moved, segments }
    }

    fn stream(&mut self) -> Stream {
        self.streams[self.random.below(self.streams.len() as u64) as usize]
    }

    fn size(&mut self) -> u64 {
        let limits = match self.moves {
            false => [1 << 10, 8 << 10, 60 << 10, 3 * P, 9 * P],
            true => [1 << 10, 60 << 10, 9 * P, 40 * P, 90 * P],
        };
        let limit = limits[self.random.below(5) as usize];
        8 + self.random.below(limit) / 8 * 8
    }

    fn malloc(&mut self) {
        let (bytes, stream, seed) = (self.size(), self.stream(), self.random.below(u64::MAX));
        let runtime = &self.torch.world.runtime;
        let gone = || self.torch.allocator.statistics().num_device_free;
        let (before, numbers) = (gone(), runtime.numbers());
        let Ok(address) = self.torch.allocator.malloc(bytes as usize, stream) else { return };
        // Pages go though there is room: their frames are wanted elsewhere.
        let is_roomy = numbers.used_bytes + bytes + P < numbers.budget_bytes;
        self.moved += u64::from(is_roomy && gone() > before);
        self.torch.write(address, bytes, seed, stream);
        self.blocks.push(Block { address, bytes, seed, stream, is_orphan: false });
    }

    /// Asks for a segment, or sums one and gives it back.
    fn segment(&mut self) {
        if self.segments.len() < 3 {
            let (bytes, stream, seed) = (self.size(), self.stream(), self.random.below(u64::MAX));
            let asked = self.torch.allocator.segment_malloc(bytes as usize, stream);
            let Some(address) = asked else { return };
            self.torch.write(address, bytes, seed, stream);
            return self.segments.push(Block { address, bytes, seed, stream, is_orphan: false });
        }
        let at = self.random.below(3) as usize;
        let Block { address, bytes, seed, stream, .. } = self.segments.swap_remove(at);
        self.torch.sum(address, bytes, stream);
        self.expected = self.expected.wrapping_add(pattern_sum(bytes, seed));
        assert_ne!(self.torch.allocator.segment_free(address), Freed::Unknown);
    }

    /// Sums a block, on another stream at times, and frees it.
    fn free(&mut self) {
        if self.blocks.is_empty() {
            return;
        }
        let at = self.random.below(self.blocks.len() as u64) as usize;
        let Block { address, bytes, seed, stream, is_orphan } = self.blocks.swap_remove(at);
        let mut reader = stream;
        if is_orphan {
            self.torch.allocator.record_stream(address, stream);
        }
        if self.random.below(3) == 0 {
            reader = self.stream();
            self.order(stream, reader);
            self.torch.allocator.record_stream(address, reader);
        }
        let delay = Duration::from_micros(self.random.below(60));
        let source = DeviceAddress(address);
        self.torch.world.sum(source, bytes, self.torch.target, delay, reader);
        self.expected = self.expected.wrapping_add(pattern_sum(bytes, seed));
        assert_ne!(self.torch.allocator.free(address), Freed::Unknown);
    }

    /// What comes on one stream is after what was on another.
    fn order(&self, before: Stream, after: Stream) {
        let sim = &self.torch.world.sim;
        let event = sim.event_create().unwrap();
        sim.event_record(event, before).unwrap();
        sim.stream_wait_event(after, event).unwrap();
        sim.event_destroy(event).unwrap();
    }

    /// A stream goes, with its work under way and its blocks live, and another one comes.
    fn replace_stream(&mut self) {
        let at = 2 + self.random.below(3) as usize;
        let (gone, heir) = (self.streams[at], self.streams[0]);
        self.order(gone, heir);
        self.torch.world.runtime.retire_stream(gone).unwrap();
        if self.random.below(2) == 0 {
            // It was used after all.
            let asked = self.torch.allocator.malloc(600, gone).unwrap_or(0);
            self.torch.allocator.free(asked);
            self.torch.world.runtime.retire_stream(gone).unwrap();
        }
        self.torch.world.sim.stream_destroy(gone).unwrap();
        self.streams[at] = self.torch.world.another_stream();
        for block in self.blocks.iter_mut().chain(&mut self.segments) {
            if block.stream == gone {
                (block.stream, block.is_orphan) = (heir, true);
            }
        }
    }

    /// A pool without a capture, as `torch.cuda.use_mem_pool` has it.
    fn borrow_pool(&mut self) {
        let stream = self.stream();
        self.pools += 1;
        let id = PoolId(1, self.pools);
        self.torch.allocator.begin_pool(id, Box::new(move |asked| asked == stream));
        for _ in 0..self.random.below(5) {
            self.malloc();
            if self.random.below(2) == 0 {
                self.free();
            }
        }
        self.torch.allocator.end_pool(id);
        self.torch.allocator.release_pool(id);
    }

    fn capture(&mut self) {
        let stream = self.streams[2 + self.random.below(3) as usize];
        self.pools += 1;
        let id = match self.graphs.first() {
            Some(graph) if self.random.below(3) == 0 => graph.id,
            _ => PoolId(0, self.pools),
        };
        self.torch.allocator.begin_pool(id, Box::new(move |asked| asked == stream));
        let sim = &self.torch.world.sim;
        sim.begin_capture(stream, CaptureMode::Global).unwrap();
        let (mut sum, mut outputs) = (0u64, Vec::new());
        for _ in 0..self.random.below(6) {
            let (bytes, seed) = (self.size(), self.random.below(u64::MAX));
            let Ok(address) = self.torch.allocator.malloc(bytes as usize, stream) else { continue };
            self.torch.write(address, bytes, seed, stream);
            self.torch.sum(address, bytes, stream);
            sum = sum.wrapping_add(pattern_sum(bytes, seed));
            match self.random.below(3) {
                0 => outputs.push(address),
                _ => assert_ne!(self.torch.allocator.free(address), Freed::Unknown),
            }
            // Others go on meanwhile, and what is freed is looked at later.
            if self.random.below(3) == 0 {
                let eager = self.streams[2..].iter().find(|other| **other != stream);
                let eager = *eager.unwrap();
                let bytes = self.size();
                if let Ok(address) = self.torch.allocator.malloc(bytes as usize, eager) {
                    self.torch.write(address, bytes, 1, eager);
                    assert_ne!(self.torch.allocator.free(address), Freed::Unknown);
                }
            }
        }
        let graph = self.torch.world.sim.end_capture(stream).expect("our calls broke the capture");
        self.torch.allocator.end_pool(id);
        self.graphs.push(Graph { graph, id, sum, outputs });
    }

    fn launch(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let at = self.random.below(self.graphs.len() as u64) as usize;
        // Graphs that share memory run in order, as PyTorch has it: all on one stream.
        self.graphs[at].graph.launch(self.streams[0]).unwrap();
        self.expected = self.expected.wrapping_add(self.graphs[at].sum);
    }

    fn reset(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let at = self.random.below(self.graphs.len() as u64) as usize;
        let Graph { graph, id, outputs, .. } = self.graphs.swap_remove(at);
        drop(graph);
        self.torch.allocator.release_pool(id);
        for output in outputs {
            assert_ne!(self.torch.allocator.free(output), Freed::Unknown);
        }
    }

    /// Lets frames of a few pages move.
    fn earn(&mut self) {
        let (stream, bytes) = (self.stream(), (10 + self.random.below(20)) * P);
        for _ in 0..(4 << 28) / bytes {
            let Ok(address) = self.torch.allocator.malloc(bytes as usize, stream) else { return };
            self.torch.allocator.free(address);
        }
    }

    fn step(&mut self, weights: &Vbar) {
        if self.moves {
            match self.random.below(36) {
                0..=2 => self.earn(),
                3 => self.replace_stream(),
                4 => self.borrow_pool(),
                _ => {}
            }
        }
        let runtime: &Runtime = &self.torch.world.runtime;
        match self.random.below(100) {
            0..=44 => self.malloc(),
            45..=84 => self.free(),
            85..=90 => {
                let first = self.random.below(40);
                weights.prioritise().unwrap();
                let _ = self.torch.world.touch(weights, first..first + 1 + first % 5);
            }
            91..=92 => {
                let unit = if self.moves { 10 * P } else { P };
                runtime.set_budget(Some((20 + self.random.below(60)) * unit)).unwrap();
            }
            93 => self.torch.allocator.empty_cache().unwrap(),
            94..=95 => self.capture(),
            96..=97 => self.launch(),
            98 if self.moves && self.random.below(2) == 0 => self.segment(),
            98 => self.reset(),
            _ => self.torch.check(),
        }
    }

    #[track_caller]
    fn end(mut self, weights: Vbar) -> u64 {
        for Block { address, .. } in std::mem::take(&mut self.segments) {
            assert_ne!(self.torch.allocator.segment_free(address), Freed::Unknown);
        }
        while !self.graphs.is_empty() {
            self.reset();
        }
        while !self.blocks.is_empty() {
            self.free();
        }
        self.torch.world.sim.ctx_synchronize().unwrap();
        assert_eq!(self.torch.world.word(self.torch.target, self.streams[0]), self.expected);
        self.torch.allocator.empty_cache().unwrap();
        let statistics = self.torch.allocator.statistics();
        assert_eq!((self.torch.reserved(), statistics.pending_bytes), (0, 0));
        assert_eq!(statistics.unknown_free, 0);
        self.torch.check();
        drop(weights);
        self.torch.check_shut();
        self.moved
    }
}

fn storm(seed: u64, options: RuntimeOptions, moves: bool) -> u64 {
    let mut storm = Storm { moves, ..Storm::new(seed, options) };
    let weights = storm.torch.world.vbar(48);
    for _ in 0..600 {
        storm.step(&weights);
    }
    storm.end(weights)
}

fn storms(seeds: u64, moves: bool) -> u64 {
    let mut moved = 0;
    let given = std::env::var("VBAR_SIM_SEEDS").ok().and_then(|count| count.parse().ok());
    for seed in 1..=given.unwrap_or(seeds) {
        println!("seed {seed}");
        let eviction = [Eviction::Aliasing, Eviction::Strict][seed as usize % 2];
        let context_waits = [ContextWaits::Allowed, ContextWaits::Never][seed as usize / 2 % 2];
        let poison = [Poison::Off, Poison::On][usize::from(moves && seed % 8 > 5)];
        let record_interval = Duration::from_micros([0, 50, 3_600_000_000][seed as usize % 3]);
        let budget_bytes = Some(if moves { 600 } else { 60 } * P);
        let options = RuntimeOptions {
            eviction,
            context_waits,
            poison,
            record_interval,
            budget_bytes,
            ..options()
        };
        moved += storm(seed, options, moves);
    }
    moved
}

#[test]
fn everything_at_once_by_seed() {
    storms(12, false);
}

/// The same with large blocks, whose frames move to other addresses.
#[test]
fn everything_at_once_by_seed_while_frames_move() {
    assert!(storms(8, true) > 10, "hardly anything moved");
}
