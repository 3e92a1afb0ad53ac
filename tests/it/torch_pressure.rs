//! PyTorch's allocator and weights on the same frames.

use std::collections::HashMap;
use std::time::Duration;

use vbar::Vbar;
use vbar::driver::Driver;
use vbar::options::{ContextWaits, Eviction, RuntimeOptions};
use vbar::outcome::WaitKind;
use vbar::torch::PoolId;
use vbar::{AllocationFault, Fault, Reason};

use crate::torch::{Random, Torch};
use crate::world::{DEVICE, P, ROOMY, World, budget_options, options, pattern_sum};

/// Makes pages of weights resident, as many as there is room for.
fn load(torch: &Torch, vbar: &Vbar, pages: u64) -> u64 {
    (0..pages).filter(|page| torch.world.touch(vbar, *page..page + 1).is_ok()).count() as u64
}

#[test]
fn the_largest_block_without_weights_can_be_had_while_they_are_loaded() {
    for world in [World::new(24), World::budget(23)] {
        let torch = Torch::of(world);
        let weights = torch.world.vbar(64);
        weights.set_class(1000).unwrap();
        assert_eq!(load(&torch, &weights, 23), 23);
        let block = torch.malloc(23 * P);
        torch.write(block, 23 * P, 9, torch.world.stream);
        torch.sum(block, 23 * P, torch.world.stream);
        assert_eq!(torch.world.word(torch.target, torch.world.stream), pattern_sum(23 * P, 9));
        assert_eq!(weights.draw(23), ".".repeat(23));
        torch.allocator.free(block);
        torch.check();
    }
}

#[test]
fn cached_pages_above_the_reserve_go_before_weights() {
    let torch = Torch::budget(16);
    let weights = torch.world.vbar(16);
    let step = || {
        let blocks: Vec<u64> = (0..12).map(|_| torch.malloc(P)).collect();
        for block in blocks {
            torch.allocator.free(block);
        }
    };
    step();
    assert_eq!(load(&torch, &weights, 6), 6);
    // They were all in use a moment ago, and once: nothing says that they will be again.
    assert_eq!((weights.draw(6).as_str(), torch.reserved()), ("######", 10));
    // When they are, each step wants them again, and weights give way to one another.
    let more = torch.world.vbar(16);
    more.prioritise().unwrap();
    for page in 0..2 {
        step();
        assert_eq!(torch.world.touch(&more, page..page + 1), Ok(()));
    }
    assert_eq!((weights.draw(6).as_str(), torch.reserved()), ("##....", 12));
    assert_eq!(torch.allocator.statistics().reserve_bytes, 12 * P);
    // After an empty cache nothing is kept.
    torch.allocator.empty_cache().unwrap();
    assert_eq!(torch.allocator.statistics().reserve_bytes, 0);
    step();
    assert_eq!(torch.world.touch(&more, 2..8), Ok(()));
    assert_eq!((more.draw(8).as_str(), torch.reserved()), ("########", 6));
    torch.check();
}

#[test]
fn what_is_kept_for_the_next_step_goes_before_weights_are_refused() {
    let torch = Torch::budget(8);
    let block = torch.malloc(8 * P);
    torch.allocator.free(block);
    let weights = torch.world.vbar(8);
    assert_eq!(torch.world.touch(&weights, 0..6), Ok(()));
    assert_eq!(torch.reserved(), 2);
    // And the other way round.
    torch.malloc(8 * P);
    assert_eq!(weights.draw(8), "........");
    torch.check();
}

/// What was freed on a stream that rests is covered by no fence: a request for another stream waits
/// for the work of the context rather than be refused, unless PyTorch captures a graph.
#[test]
fn frames_that_were_freed_on_a_stream_that_rests_are_waited_for() {
    let options = RuntimeOptions { context_waits: ContextWaits::Never, ..budget_options(8) };
    let torch = Torch::of(World::with(ROOMY, options));
    let (resting, other) = (torch.world.stream, torch.world.another_stream());
    let weights = torch.world.vbar(8);
    let fault = |pages: u64| match weights.fault(0..pages * P, other).unwrap() {
        Fault::Offloaded(refusal) => Err(refusal.reason),
        Fault::Resident(_) | Fault::HostMapped(_) => Ok(()),
    };
    for is_captured in [true, false] {
        let block = torch.malloc_on(8 * P, resting);
        torch.world.sim.hold_stream(resting).unwrap();
        torch.write(block, 8 * P, 5, resting);
        torch.allocator.free(block);
        if is_captured {
            let id = PoolId(0, 7);
            torch.allocator.begin_pool(id, Box::new(|_| false));
            assert_eq!(fault(6), Err(Reason::FenceUnknown));
            torch.allocator.end_pool(id);
            torch.allocator.release_pool(id);
            torch.world.sim.release_stream(resting).unwrap();
            continue;
        }
        std::thread::scope(|scope| {
            let fault = scope.spawn(|| fault(6));
            std::thread::sleep(Duration::from_millis(5));
            torch.world.sim.release_stream(resting).unwrap();
            assert_eq!(fault.join().unwrap(), Ok(()));
        });
    }
    // Also where the work was done by then: nothing tells so.
    let waited = torch.world.runtime.statistics().waited(WaitKind::Context);
    assert_eq!(waited.count, 1);
    torch.check();
}

#[test]
fn a_smaller_budget_takes_cached_pages_before_weights() {
    let torch = Torch::budget(16);
    let weights = torch.world.vbar(8);
    let block = torch.malloc(8 * P);
    assert_eq!(load(&torch, &weights, 8), 8);
    torch.allocator.free(block);
    torch.malloc(512);
    torch.allocator.empty_cache().unwrap();
    let cached = torch.malloc(7 * P);
    torch.allocator.free(cached);
    torch.world.sim.stream_synchronize(torch.world.stream).unwrap();
    torch.world.runtime.set_budget(Some(4 * P)).unwrap();
    assert!(torch.world.used() <= 4, "{}", torch.world.used());
    torch.check();
}

#[test]
fn headroom_and_outside_use_are_respected() {
    let torch = Torch::of(World::with(
        "capacity=2M,granularity=64K",
        RuntimeOptions { headroom_bytes: Some(4 * P), ..options() },
    ));
    // One page is the test's own.
    let block = torch.malloc(27 * P);
    assert!(torch.allocator.malloc(P as usize, torch.world.stream).is_err());
    torch.allocator.free(block);
    torch.world.sim.set_outside_bytes(DEVICE, 20 * P);
    // As the thread that looks at pressure does: what the driver calls free is 0 at first, however
    // much is missing.
    for _ in 0..8 {
        torch.world.runtime.refresh().unwrap();
    }
    torch.malloc(7 * P);
    assert!(torch.allocator.malloc(P as usize, torch.world.stream).is_err());
    assert!(torch.world.sim.mem_get_info().unwrap().free_bytes >= 4 * P);
    torch.check();
}

#[test]
fn blocks_and_weights_take_turns_without_a_wrong_byte() {
    let torch = Torch::of(World::with(
        "capacity=64M,granularity=64K",
        RuntimeOptions { ..budget_options(24) },
    ));
    let (one, two) = (torch.world.stream, torch.world.another_stream());
    let weights = torch.world.vbar(24);
    let mut expected = 0u64;
    for round in 0..60u64 {
        let bytes = (1 + round * 7 % 20) * P - 512 * (round % 3);
        let stream = if round % 3 == 0 { two } else { one };
        let block = torch.malloc_on(bytes, stream);
        torch.write(block, bytes, round, stream);
        torch.sum(block, bytes, stream);
        expected = expected.wrapping_add(pattern_sum(bytes, round));
        weights.prioritise().unwrap();
        let _ = torch.world.touch(&weights, 0..4);
        torch.allocator.free(block);
        let _ = torch.world.touch(&weights, round % 20..round % 20 + 4);
        torch.check();
    }
    torch.world.sim.stream_synchronize(one).unwrap();
    assert_eq!(torch.world.word(torch.target, two), expected);
    torch.check();
}

/// The same of a weight that is to be written anew, whose pages have lost nothing.
#[test]
fn a_refill_waits_for_what_a_stream_that_rests_has_used() {
    for has_torch in [false, true] {
        let options = RuntimeOptions {
            context_waits: ContextWaits::Never,
            record_interval: Duration::from_secs(3600),
            ..budget_options(8)
        };
        let world = World::with(ROOMY, options);
        let (resting, other) = (world.stream, world.another_stream());
        let torch = has_torch.then(|| world.runtime.torch_allocator().unwrap());
        let vbar = world.vbar(1);
        let weight = vbar.allocate(P).unwrap();
        let AllocationFault::Refill(fill) = weight.fault(resting).unwrap() else { panic!() };
        fill.commit(resting).unwrap();
        let AllocationFault::Resident(guard) = weight.fault(resting).unwrap() else { panic!() };
        drop(guard);
        weight.invalidate();
        match weight.fault(other).unwrap() {
            AllocationFault::Refill(_) => assert!(has_torch),
            AllocationFault::Offloaded(refusal) => {
                assert_eq!((refusal.reason, has_torch), (Reason::FenceUnknown, false));
            }
            _ => panic!("neither to be written nor refused"),
        }
        let waited = world.runtime.statistics().waited(WaitKind::Context).count;
        assert_eq!(waited, u64::from(has_torch));
        drop(weight);
        drop((vbar, torch));
        world.check();
    }
}

/// Two programs in one runtime, as `benches/soak.py` has them: one computes with blocks and weights
/// on three streams and then rests, the other goes on with its own weights on two, and the budget
/// changes. Waits for the context are off, as in Python. What is refused is for want of memory, and
/// never since nothing tells when a stream that rests was done.
#[test]
fn nothing_is_refused_for_what_a_program_that_rests_has_used() {
    for seed in 1..=12 {
        let options = RuntimeOptions {
            context_waits: ContextWaits::Never,
            eviction: [Eviction::Aliasing, Eviction::Strict][seed as usize % 2],
            record_interval: Duration::from_micros([0, 50, 3_600_000_000][seed as usize % 3]),
            ..budget_options(24)
        };
        let torch = Torch::of(World::with(ROOMY, options));
        let mut random = Random((seed * 0x9E37_79B9) | 1);
        // Each stream with weights of its own, for it writes to them.
        let streams = [(); 5].map(|()| (torch.world.another_stream(), torch.world.vbar(16)));
        let (computing, others) = streams.split_at(3);
        let (mut blocks, mut refused) = (Vec::new(), HashMap::new());
        for round in 0..240u64 {
            if random.below(8) == 0 {
                torch.world.runtime.set_budget(Some((8 + random.below(20)) * P)).unwrap();
            }
            let rests = round % 8 > 3;
            let (stream, vbar) = match rests {
                true => &others[random.below(2) as usize],
                false => &computing[random.below(3) as usize],
            };
            let stream = *stream;
            if !rests {
                let bytes = (1 + random.below(6)) * P;
                if let Ok(address) = torch.allocator.malloc(bytes as usize, stream) {
                    torch.write(address, bytes, round, stream);
                    blocks.push(address);
                }
                while blocks.len() > 2 {
                    torch.allocator.free(blocks.remove(0));
                }
            }
            vbar.prioritise().unwrap();
            for _ in 0..4 {
                let first = random.below(12);
                let range = first * P..(first + 1 + random.below(4)) * P;
                match vbar.fault(range, stream).unwrap() {
                    Fault::Offloaded(refusal) => *refused.entry(refusal.reason).or_insert(0) += 1,
                    Fault::Resident(guard) | Fault::HostMapped(guard) => {
                        torch.world.write(guard.address(), guard.bytes(), round, stream);
                        drop(guard);
                    }
                }
            }
            torch.check();
        }
        assert_eq!(refused.get(&Reason::FenceUnknown), None, "seed {seed}: {refused:?}");
    }
}
