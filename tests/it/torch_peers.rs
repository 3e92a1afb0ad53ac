//! PyTorch's allocator on a host with two devices: whose an address is, memory that the other
//! device reaches, and blocks that are used on its streams.

use vbar::Runtime;
use vbar::driver::sim::Verb;
use vbar::driver::{CaptureMode, Context, Driver, DriverCode};
use vbar::torch::Freed;
use vbar::units::{DeviceOrdinal, Stream};

use crate::torch::Torch;
use crate::torch_memory::{earn, hole};
use crate::world::{DEVICE, P, World, budget_options, fault, options, pattern_sum};

const OTHER: DeviceOrdinal = DeviceOrdinal(1);
const TWO: &str = "capacity=64M,granularity=64K,devices=2";

/// A world with the allocator of the first device, and a stream of the second.
struct Pair {
    torch: Torch,
    here: Context,
    there: Context,
    stream: Stream,
}

impl Pair {
    fn new(sim: &str) -> Self {
        let torch = Torch::of(World::with(sim, budget_options(16)));
        let sim = &torch.world.sim;
        let here = sim.ctx_get_current().unwrap().unwrap();
        let there = sim.device_primary_ctx_retain(OTHER).unwrap();
        sim.ctx_set_current(Some(there)).unwrap();
        sim.module_load().unwrap();
        let stream = sim.stream_create().unwrap();
        sim.ctx_set_current(Some(here)).unwrap();
        Self { torch, here, there, stream }
    }

    /// Does something with the second device's context current.
    fn there<T>(&self, work: impl FnOnce() -> T) -> T {
        self.torch.world.sim.ctx_set_current(Some(self.there)).unwrap();
        let done = work();
        self.torch.world.sim.ctx_set_current(Some(self.here)).unwrap();
        done
    }

    /// Lets the second device's stream go on to its end, and what waits for it too.
    fn release(&self) {
        let sim = &self.torch.world.sim;
        self.there(|| sim.release_stream(self.stream).unwrap());
        self.there(|| sim.stream_synchronize(self.stream).unwrap());
        sim.ctx_synchronize().unwrap();
    }

    fn write_there(&self, address: u64, bytes: u64, seed: u64) {
        self.there(|| self.torch.write(address, bytes, seed, self.stream));
    }
}

#[test]
fn an_address_is_of_one_device() {
    let pair = Pair::new(TWO);
    let second = Runtime::open(pair.torch.world.sim.driver(), OTHER, options()).unwrap();
    let second = second.torch_allocator().unwrap();
    let one = pair.torch.malloc(3 * P);
    let two = second.malloc(3 * P as usize, Stream::DEFAULT).unwrap();
    let first = &pair.torch.allocator;
    for within in [0, 1, 3 * P - 1] {
        assert!(first.owns(one + within) && !second.owns(one + within));
        assert!(second.owns(two + within) && !first.owns(two + within));
    }
    assert_eq!((first.free(two), second.free(one)), (Freed::Unknown, Freed::Unknown));
    assert_eq!((first.free(one), second.free(two)), (Freed::Cached, Freed::Cached));
    // Also when nothing is live there.
    assert!(first.owns(one) && second.owns(two));
    assert!(!first.owns(0) && !first.owns(u64::MAX) && !first.owns(pair.torch.target.0));
}

#[test]
fn what_is_allocated_is_reached_by_the_other_device() {
    let pair = Pair::new(TWO);
    for bytes in [512, P, 5 * P] {
        let block = pair.torch.malloc(bytes);
        pair.write_there(block, bytes, bytes);
        pair.torch.world.sim.stream_synchronize(pair.stream).unwrap();
        pair.torch.sum(block, bytes, pair.torch.world.stream);
        let sum = pair.torch.world.word(pair.torch.target, pair.torch.world.stream);
        assert_eq!(sum, pattern_sum(bytes, bytes));
        pair.torch.world.sim.write_bytes(pair.torch.target, &[0; 8]).unwrap();
        pair.torch.allocator.free(block);
    }
    pair.torch.check();
}

/// Frames that move are mapped for the peers again.
#[test]
fn what_has_moved_is_reached_by_the_other_device() {
    let pair = Pair::new(TWO);
    let torch = &pair.torch;
    torch.world.runtime.set_budget(Some(900 * P)).unwrap();
    let stream = torch.world.stream;
    let (first, behind) = hole(torch, 40, stream);
    earn(torch, 50, stream);
    assert_eq!(torch.malloc(40 * P), first);
    torch.allocator.free(first);
    let large = torch.malloc(60 * P);
    assert_eq!(torch.reserved(), 61, "frames moved");
    for (block, bytes) in [(large, 60 * P), (behind, P)] {
        pair.write_there(block, bytes, 3);
        torch.world.sim.stream_synchronize(pair.stream).unwrap();
        torch.sum(block, bytes, stream);
    }
    let sum = pattern_sum(60 * P, 3).wrapping_add(pattern_sum(P, 3));
    assert_eq!(torch.world.word(torch.target, stream), sum);
    torch.check();
}

#[test]
fn weights_and_devices_that_are_no_peers_are_not_reached() {
    for (peers, arena) in [("1", false), ("0", true), ("0", false)] {
        let pair = Pair::new(&format!("{TWO},peers={peers},on_violation=record"));
        let vbar = pair.torch.world.vbar(2);
        let address = match arena {
            true => pair.torch.malloc(P),
            false => {
                let guard = fault(&pair.torch.world, &vbar, 0..1);
                drop(guard);
                vbar.base().0
            }
        };
        pair.write_there(address, P, 1);
        pair.torch.world.sim.stream_synchronize(pair.stream).unwrap();
        let violations = pair.torch.world.sim.violations();
        assert!(violations[0].contains("no access"), "{violations:?}");
    }
}

/// The free names no stream of the other device: the record does.
fn check_used_there(pair: &Pair, record: impl Fn(u64)) {
    let torch = &pair.torch;
    let (sim, stream) = (&torch.world.sim, torch.world.stream);
    for bytes in [4096, 48 << 10, 2 * P] {
        let block = torch.malloc(bytes);
        torch.write(block, bytes, 7, stream);
        sim.stream_synchronize(stream).unwrap();
        pair.there(|| sim.hold_stream(pair.stream).unwrap());
        record(block);
        // Enqueued after the record, before the free: it counts.
        pair.write_there(block, bytes, 9);
        assert_eq!(torch.allocator.free(block), Freed::Deferred);
        assert_eq!(torch.allocator.statistics().pending_bytes, bytes);
        let other = torch.malloc(bytes);
        assert_ne!(other, block, "used again too soon");
        pair.release();
        let again = torch.malloc(bytes);
        assert_eq!(again, block, "not used again");
        torch.write(again, bytes, 8, stream);
        torch.allocator.free(again);
        torch.allocator.free(other);
    }
    torch.check();
}

#[test]
fn a_block_waits_for_a_stream_of_the_other_device() {
    let pair = Pair::new(TWO);
    check_used_there(&pair, |block| pair.torch.allocator.record_stream(block, pair.stream));
}

#[test]
fn a_default_stream_is_that_of_the_current_device_too() {
    let pair = Pair { stream: Stream::LEGACY, ..Pair::new(TWO) };
    let record = |block| {
        pair.there(|| pair.torch.allocator.record_stream(block, Stream::DEFAULT));
    };
    check_used_there(&pair, record);
}

#[test]
fn a_use_in_a_capture_of_the_other_device_is_waited_for_after_it() {
    let pair = Pair::new(TWO);
    let (torch, sim) = (&pair.torch, &pair.torch.world.sim);
    let block = torch.malloc(2 * P);
    sim.begin_capture(pair.stream, CaptureMode::Relaxed).unwrap();
    torch.allocator.record_stream(block, pair.stream);
    assert_eq!(torch.allocator.free(block), Freed::Deferred);
    assert_ne!(torch.malloc(2 * P), block, "used again in the capture");
    drop(sim.end_capture(pair.stream).expect("the capture is whole"));
    sim.hold_stream(pair.stream).unwrap();
    pair.write_there(block, 2 * P, 1);
    assert_ne!(torch.malloc(2 * P), block, "used again before its replay");
    pair.release();
    let again = torch.malloc(2 * P);
    assert_eq!(again, block, "not used again");
    torch.write(again, 2 * P, 2, torch.world.stream);
    torch.check();
}

#[test]
fn a_use_that_cannot_be_fenced_yet_keeps_its_block() {
    let pair = Pair::new(TWO);
    let (torch, sim) = (&pair.torch, &pair.torch.world.sim);
    let block = torch.malloc(2 * P);
    torch.allocator.record_stream(block, pair.stream);
    pair.write_there(block, 2 * P, 1);
    sim.fail_always(Verb::EventRecord, DriverCode::INVALID_HANDLE);
    assert_eq!(torch.allocator.free(block), Freed::Deferred);
    // A wait for the first device is no word on the second.
    sim.ctx_synchronize().unwrap();
    let other = torch.malloc(2 * P);
    assert_ne!(other, block, "used again although its use has no fence");
    sim.heal();
    torch.allocator.free(torch.malloc(512));
    pair.release();
    assert_eq!(torch.malloc(2 * P), block, "never used again");
    torch.check();
}

#[test]
fn a_device_tells_its_peers_and_a_stream_its_context() {
    for peers in [true, false] {
        let pair = Pair::new(&format!("{TWO},peers={}", u8::from(peers)));
        let sim = &pair.torch.world.sim;
        assert_eq!(sim.device_can_access_peer(DEVICE, OTHER), Ok(peers));
        assert_eq!(sim.device_can_access_peer(DEVICE, DEVICE), Ok(false));
        let none = sim.device_can_access_peer(DEVICE, DeviceOrdinal(2));
        assert_eq!(none.map_err(|error| error.code), Err(DriverCode::INVALID_DEVICE));
        assert_eq!(sim.stream_get_context(pair.stream), Ok(pair.there));
        assert_eq!(sim.stream_get_context(pair.torch.world.stream), Ok(pair.here));
        let given = sim.mem_set_access(pair.torch.target, P, &[DEVICE, OTHER]);
        let code = DriverCode::INVALID_DEVICE;
        assert_eq!(given.map_err(|error| error.code), if peers { Ok(()) } else { Err(code) });
    }
}
