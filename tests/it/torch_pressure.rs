//! PyTorch's allocator and weights on the same frames.

use vbar::Vbar;
use vbar::driver::Driver;
use vbar::options::RuntimeOptions;

use crate::torch::Torch;
use crate::world::{DEVICE, P, World, budget_options, options, pattern_sum};

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
