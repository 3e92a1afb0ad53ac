//! Memory graphs against a model of intervals and bytes, by seeds.
//!
//! The model knows which blocks live, what is in them, and of which scope they are; it knows
//! nothing of places. Kernels write each block and read it when it is freed: what they read must be
//! what was written, whoever shares the memory meanwhile.

use std::collections::BTreeMap;

use vbar::driver::Driver;
use vbar::torch::{MemoryGraph, Pass};
use vbar::units::Stream;

use crate::torch::{Random, Torch, check_books, enter_apart};
use crate::world::{P, fault, pattern_sum};

struct Block {
    address: u64,
    bytes: u64,
    seed: u64,
    stream: Stream,
    /// The graph and the serial of the scope, where it is a graph's.
    of: Option<(usize, u64)>,
}

/// A graph, and what the model says of it.
struct Scoped {
    graph: MemoryGraph,
    stream: Stream,
    /// Serials of the scopes that are open.
    scopes: Vec<u64>,
    pauses: u64,
    peak: u64,
}

struct Storm {
    torch: Torch,
    random: Random,
    streams: [Stream; 3],
    graphs: Vec<Scoped>,
    blocks: Vec<Block>,
    live: BTreeMap<u64, u64>,
    next_serial: u64,
    next_seed: u64,
    expected: u64,
    served: u64,
}

impl Storm {
    fn new(seed: u64) -> Self {
        let torch = Torch::budget(48);
        let world = &torch.world;
        let streams = [world.stream, world.another_stream(), Stream::DEFAULT];
        let graphs = [0, 1].map(|at| Scoped {
            graph: MemoryGraph::new(&torch.allocator, streams[at]).unwrap(),
            stream: streams[at],
            scopes: Vec::new(),
            pauses: 0,
            peak: 0,
        });
        Self {
            random: Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1),
            streams,
            graphs: graphs.into(),
            blocks: Vec::new(),
            live: BTreeMap::new(),
            next_serial: 1,
            next_seed: 1,
            expected: 0,
            served: 0,
            torch,
        }
    }

    fn active(&self) -> Option<usize> {
        self.graphs.iter().position(|scoped| !scoped.scopes.is_empty())
    }

    fn used(&self, graph: usize) -> u64 {
        let of = |block: &&Block| block.of.is_some_and(|(at, _)| at == graph);
        self.blocks.iter().filter(of).map(|block| block.bytes.next_multiple_of(512)).sum()
    }

    fn malloc(&mut self) {
        let sizes = [100, 512, 3000, 40 << 10, P / 2 + 1, P, 2 * P, 5 * P];
        let bytes = sizes[self.random.below(8) as usize];
        let stream = self.streams[self.random.below(3) as usize];
        let used: Vec<u64> = self.statistics(|told| told.used_bytes);
        let Ok(address) = self.torch.allocator.malloc(bytes as usize, stream) else { return };
        enter_apart(&mut self.live, address, bytes.next_multiple_of(512));
        let grown = self.statistics(|told| told.used_bytes);
        let graph = (0..used.len()).find(|at| grown[*at] > used[*at]);
        let of = graph.map(|at| {
            let scoped = &self.graphs[at];
            assert_eq!(Some(at), self.active(), "a graph without scopes has served");
            assert_eq!((scoped.stream, scoped.pauses), (stream, 0));
            self.served += 1;
            (at, *scoped.scopes.last().unwrap())
        });
        let seed = self.next_seed;
        self.next_seed += 1;
        self.torch.write(address, bytes, seed, stream);
        self.blocks.push(Block { address, bytes, seed, stream, of });
        if let Some((at, _)) = of {
            let used = self.used(at);
            self.graphs[at].peak = self.graphs[at].peak.max(used);
        }
    }

    fn free(&mut self) {
        if self.blocks.is_empty() {
            return;
        }
        let at = self.random.below(self.blocks.len() as u64) as usize;
        let block = self.blocks.swap_remove(at);
        self.live.remove(&block.address);
        let sum = pattern_sum(block.bytes, block.seed);
        self.torch.sum(block.address, block.bytes, block.stream);
        self.expected = self.expected.wrapping_add(sum);
        let other = self.streams[self.random.below(3) as usize];
        if self.random.below(6) == 0 && other != block.stream {
            // The other stream reads it after this one, and nobody waits for that.
            self.torch.world.sim.stream_synchronize(block.stream).unwrap();
            self.torch.sum(block.address, block.bytes, other);
            self.expected = self.expected.wrapping_add(sum);
            self.torch.allocator.record_stream(block.address, other);
        }
        let allocator = &self.torch.allocator;
        if self.random.below(8) == 0 {
            let free = || allocator.free(block.address);
            let _freed = std::thread::scope(|scope| scope.spawn(free).join().unwrap());
        } else {
            allocator.free(block.address);
        }
    }

    fn end_scope(&mut self, at: usize) {
        let serial = self.graphs[at].scopes.pop().unwrap();
        for block in self.blocks.iter_mut().filter(|block| block.of == Some((at, serial))) {
            block.of = Some((at, 0));
        }
        if self.graphs[at].scopes.is_empty() {
            self.graphs[at].pauses = 0;
        }
    }

    fn enter(&mut self, at: usize) {
        self.graphs[at].scopes.push(self.next_serial);
        self.next_serial += 1;
    }

    fn scope(&mut self) {
        let name = self.random.below(3);
        let chosen = self.random.below(self.graphs.len() as u64) as usize;
        let at = self.active().unwrap_or(chosen);
        let open = !self.graphs[at].scopes.is_empty();
        match self.random.below(5) {
            0 | 1 if self.graphs[at].scopes.len() < 4 => {
                self.graphs[at].graph.enter(name).unwrap();
                self.enter(at);
            }
            2 => {
                assert_eq!(self.graphs[at].graph.leave().is_ok(), open);
                if open {
                    self.end_scope(at);
                }
            }
            _ => {
                assert_eq!(self.graphs[at].graph.next(name).is_ok(), open);
                if open {
                    let pauses = self.graphs[at].pauses;
                    self.end_scope(at);
                    self.enter(at);
                    self.graphs[at].pauses = pauses;
                }
            }
        }
    }

    fn odd(&mut self) {
        let at = self.random.below(self.graphs.len() as u64) as usize;
        let open = !self.graphs[at].scopes.is_empty();
        match self.random.below(8) {
            0 => {
                assert_eq!(self.graphs[at].graph.pause().is_ok(), open);
                self.graphs[at].pauses += u64::from(open);
            }
            1 | 2 => {
                let paused = self.graphs[at].pauses > 0;
                assert_eq!(self.graphs[at].graph.resume().is_ok(), paused);
                self.graphs[at].pauses -= u64::from(paused);
            }
            3 => {
                self.graphs[at].graph.abort().unwrap();
                while !self.graphs[at].scopes.is_empty() {
                    self.end_scope(at);
                }
            }
            4 => {
                let stream = self.streams[self.random.below(3) as usize];
                self.graphs[at].graph.use_stream(stream).unwrap();
                self.graphs[at].stream = stream;
            }
            5 => self.torch.allocator.empty_cache().unwrap(),
            6 => {
                // Weights want their part.
                let vbar = self.torch.world.vbar(20);
                let first = self.random.below(10);
                drop(fault(&self.torch.world, &vbar, first..first + 10));
            }
            _ => {
                let stream = self.streams[at];
                let graph = MemoryGraph::new(&self.torch.allocator, stream).unwrap();
                let scopes = Vec::new();
                self.graphs[at] = Scoped { graph, stream, scopes, pauses: 0, peak: 0 };
                let of = |block: &&mut Block| block.of.is_some_and(|(of, _)| of == at);
                self.blocks.iter_mut().filter(of).for_each(|block| block.of = None);
            }
        }
    }

    fn statistics(&self, of: impl Fn(vbar::torch::GraphStatistics) -> u64) -> Vec<u64> {
        self.graphs.iter().map(|scoped| of(scoped.graph.statistics())).collect()
    }

    fn check(&self) {
        for (at, scoped) in self.graphs.iter().enumerate() {
            let told = scoped.graph.statistics();
            let rogue = self.blocks.iter().filter(|block| block.of == Some((at, 0))).count();
            assert_eq!(told.used_bytes, self.used(at));
            assert_eq!(told.rogue_count, rogue as u64);
            assert_eq!(told.peak_used_bytes, scoped.peak);
            assert!(told.pool_bytes >= told.used_bytes && told.pool_bytes.is_multiple_of(P));
        }
        check_books(&self.torch.allocator);
    }

    /// Returns how many requests graphs have served.
    fn run(mut self) -> u64 {
        for _ in 0..600 {
            match self.random.below(20) {
                0..8 => self.malloc(),
                8..15 => self.free(),
                15..19 => self.scope(),
                _ => self.odd(),
            }
            self.check();
        }
        while !self.blocks.is_empty() {
            self.free();
        }
        for stream in self.streams {
            self.torch.world.sim.stream_synchronize(stream).unwrap();
        }
        let read = self.torch.world.word(self.torch.target, self.streams[0]);
        assert_eq!(read, self.expected);
        self.graphs.clear();
        self.torch.check();
        self.torch.allocator.empty_cache().unwrap();
        assert_eq!(self.torch.reserved(), 0);
        self.torch.check_shut();
        self.served
    }
}

#[test]
fn any_order_of_calls_leaves_all_bytes_and_counts_right() {
    let mut served = 0;
    for seed in 1..40 {
        println!("seed {seed}");
        served += Storm::new(seed).run();
    }
    assert!(served > 1000, "{served}");
}

/// What a program does in a scope: takes a block of a size, frees one of those it has, or has a
/// scope within.
enum Does {
    Take(u64),
    Free(u64),
    Within(u64, Vec<Does>),
}

fn program(random: &mut Random, depth: u64) -> Vec<Does> {
    let length = 5 + random.below(20);
    let one = |random: &mut Random| match random.below(10) {
        0 if depth > 0 => Does::Within(random.below(3), program(random, depth - 1)),
        0..6 => Does::Take([200, 4000, P / 2, P / 2 + 1, P, 3 * P][random.below(6) as usize]),
        _ => Does::Free(random.below(100)),
    };
    (0..length).map(|_| one(random)).collect()
}

fn run(torch: &Torch, graph: &MemoryGraph, program: &[Does], addresses: &mut Vec<u64>) {
    let mut own = Vec::new();
    for does in program {
        match does {
            Does::Take(bytes) => {
                let address = torch.malloc(*bytes);
                own.push(address);
                addresses.push(address);
            }
            Does::Free(which) if !own.is_empty() => {
                torch.allocator.free(own.swap_remove(*which as usize % own.len()));
            }
            Does::Free(_) => {}
            Does::Within(name, program) => {
                graph.enter(*name).unwrap();
                run(torch, graph, program, addresses);
                graph.leave().unwrap();
            }
        }
    }
    for address in own {
        torch.allocator.free(address);
    }
}

#[test]
fn any_program_repeats_its_addresses() {
    for seed in 1..60 {
        println!("seed {seed}");
        let mut random = Random(seed * 7919);
        let programs = [0, 1, 2].map(|_| program(&mut random, 2));
        let torch = Torch::budget(400);
        let graph = MemoryGraph::new(&torch.allocator, torch.world.stream).unwrap();
        let mut first: [Option<Vec<u64>>; 3] = Default::default();
        for pass in 0..12 {
            let which = if pass < 3 { pass } else { random.below(3) as usize };
            graph.enter(1000).unwrap();
            let mut addresses = Vec::new();
            run(&torch, &graph, &programs[which], &mut addresses);
            let outcome = graph.leave().unwrap();
            let told = first[which].get_or_insert_with(|| addresses.clone());
            assert_eq!(*told, addresses);
            assert!(pass < 3 || outcome == Pass::Whole);
        }
        torch.check();
    }
}
