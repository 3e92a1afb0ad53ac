//! What PyTorch does: blocks on several streams, recorded for others, and graphs with pools.

use std::sync::Arc;

use vbar::driver::kernel::mix;
use vbar::driver::{CaptureMode, Driver, KernelCall};
use vbar::torch::{Allocator, Freed, PoolId};
use vbar::units::{DeviceAddress, Stream};

use crate::act::pattern_sum;
use crate::world::{Block, Graph, P, World};

/// Most blocks that live at a time.
const BLOCKS: usize = 64;

fn size_of(number: u64) -> u64 {
    let limit = [1 << 10, 2 << 10, P, 3 * P, 6 * P][number as usize % 5];
    8 + mix(number, 7) % limit / 8 * 8
}

impl World {
    fn allocator(&mut self, device: usize) -> Option<Arc<Allocator>> {
        if let Some(allocator) = &self.devices[device].allocator {
            return Some(Arc::clone(allocator));
        }
        match self.devices[device].runtime.torch_allocator() {
            Ok(allocator) => self.devices[device].allocator = Some(allocator),
            Err(error) => self.accept(device, &error),
        }
        self.devices[device].allocator.clone()
    }

    /// A block that overlaps no other; `None` where there is no memory.
    fn take(&mut self, device: usize, bytes: u64, stream: Stream) -> Option<u64> {
        let allocator = self.allocator(device)?;
        let was_lost = self.knows_loss(device);
        let address = match allocator.malloc(bytes as usize, stream) {
            Ok(address) => address,
            Err(error) => {
                let excused = self.trouble || self.is_dead(device) || !self.held.is_empty();
                assert!(error.is_memory() || excused, "{error}");
                self.totals.refuse("out of memory");
                return None;
            }
        };
        assert!(!was_lost, "memory of a lost device");
        assert!(address != 0 && address.is_multiple_of(512), "{address:#x}");
        let live = self.blocks.iter().map(|block| (block.address, block.bytes));
        for (other, length) in live {
            assert!(
                address + bytes <= other || other + length <= address,
                "{bytes} bytes at {address:#x} overlap {length} at {other:#x}"
            );
        }
        Some(address)
    }

    pub(crate) fn malloc(&mut self, device: u64, size: u64, stream: u64) {
        let device = self.device(device);
        let (bytes, stream) = (size_of(size), self.block_stream(device, stream));
        if self.blocks.len() >= BLOCKS {
            return;
        }
        let Some(address) = self.take(device, bytes, stream) else { return };
        let seed = self.new_number();
        self.write(device, (DeviceAddress(address), bytes), seed, stream);
        self.blocks.push(Block { device, address, bytes, seed, stream });
    }

    /// PyTorch always has a stream.
    fn block_stream(&self, device: usize, number: u64) -> Stream {
        match self.stream(device, number) {
            Stream::NONE => Stream::DEFAULT,
            stream => stream,
        }
    }

    /// Reads a block, on another stream at times, and frees it.
    pub(crate) fn free(&mut self, block: u64, reader: u64) {
        if self.blocks.is_empty() {
            return;
        }
        let at = block as usize % self.blocks.len();
        let Block { device, address, bytes, seed, stream } = self.blocks.swap_remove(at);
        let mut by = stream;
        if reader < 2 {
            by = self.block_stream(device, reader + 5);
            self.order(device, stream, by);
        }
        let sum = pattern_sum(bytes, seed);
        self.verify(device, (DeviceAddress(address), bytes), sum, by);
        let allocator = self.allocator(device).expect("it gave the block");
        if reader < 2 {
            allocator.record_stream(address, by);
        }
        let freed = allocator.free(address);
        assert!(freed != Freed::Unknown && freed != Freed::Nothing, "{freed:?}");
        assert!(freed != Freed::Ending || self.is_dead(device));
        if mix(address, block).is_multiple_of(4) && !self.is_dead(device) {
            assert_eq!(allocator.free(address), Freed::Unknown, "freed twice");
        }
    }

    pub(crate) fn empty_cache(&mut self, device: u64) {
        let device = self.device(device);
        let Some(allocator) = self.devices[device].allocator.clone() else { return };
        self.accept_any(device, allocator.empty_cache());
    }

    /// Captures a graph that writes and reads blocks of a pool of its own, or of another's.
    pub(crate) fn graph(
        &mut self,
        device: u64,
        stream: u64,
        (count, sizes): (u64, u64),
        shared: u64,
    ) {
        let device = self.device(device);
        let stream = self.devices[device].streams[stream as usize % 3];
        if self.depth > 0 || self.graphs.len() >= 4 || self.is_dead(device) {
            return;
        }
        let Some(allocator) = self.allocator(device) else { return };
        let mut pools = self.graphs.iter().filter(|graph| graph.device == device);
        let id = match pools.next() {
            Some(graph) if shared > 0 => graph.id,
            _ => PoolId(0, self.new_number()),
        };
        let target = self.word(device, 0);
        let word = self.devices[device].sums.len() - 1;
        allocator.begin_pool(id, Box::new(move |asked| asked == stream));
        self.own(device, |sim| sim.begin_capture(stream, CaptureMode::Global)).unwrap();
        let (mut sum, mut outputs) = (0u64, Vec::new());
        for number in 0..count % 8 {
            let (bytes, seed) = (size_of(mix(sizes, number)), self.new_number());
            let Some(address) = self.take(device, bytes, stream) else { continue };
            let place = DeviceAddress(address);
            let kernels = [
                KernelCall::Pattern { target: place, bytes, seed, delay_nanos: 0 },
                KernelCall::Checksum {
                    source: place,
                    bytes,
                    first_word: 0,
                    delay_nanos: 0,
                    target,
                },
            ];
            for kernel in kernels {
                let launched = self.own(device, |sim| sim.launch_kernel(kernel, stream));
                assert!(launched.is_ok() || self.trouble || self.is_dead(device), "{launched:?}");
            }
            sum = sum.wrapping_add(pattern_sum(bytes, seed));
            match mix(sizes, number + 100) % 3 {
                0 => outputs.push(address),
                _ => assert_ne!(allocator.free(address), Freed::Unknown),
            }
        }
        let ended = self.own(device, |sim| sim.end_capture(stream));
        allocator.end_pool(id);
        match ended {
            Ok(graph) => self.graphs.push(Graph { device, graph, id, sum, word, outputs }),
            Err(error) => {
                let excused = self.trouble || self.is_dead(device);
                assert!(excused, "our calls broke the capture: {error}");
                allocator.release_pool(id);
                self.free_outputs(&allocator, outputs);
            }
        }
    }

    fn free_outputs(&self, allocator: &Allocator, outputs: Vec<u64>) {
        for output in outputs {
            assert_ne!(allocator.free(output), Freed::Unknown);
        }
    }

    pub(crate) fn launch_graph(&mut self, graph: u64) {
        if self.graphs.is_empty() {
            return;
        }
        let at = graph as usize % self.graphs.len();
        let Graph { device, sum, word, .. } = self.graphs[at];
        if self.is_dead(device) {
            return;
        }
        // Graphs that share memory run in order, as PyTorch has it: all on one stream.
        let stream = self.devices[device].streams[0];
        self.own(device, |_| self.graphs[at].graph.launch(stream)).unwrap();
        let expected = &mut self.devices[device].sums[word];
        *expected = expected.wrapping_add(sum);
    }

    pub(crate) fn reset_graph(&mut self, graph: u64) {
        if self.graphs.is_empty() {
            return;
        }
        let at = graph as usize % self.graphs.len();
        let Graph { device, graph, id, outputs, .. } = self.graphs.swap_remove(at);
        self.own(device, |_| drop(graph));
        let allocator = self.allocator(device).expect("it has the pool");
        allocator.release_pool(id);
        self.free_outputs(&allocator, outputs);
    }
}
