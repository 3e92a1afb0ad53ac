//! What PyTorch's allocator keeps from weights although it is free: what comes to be in use again,
//! and not what was there once.

use std::ops::Range;

use tempfile::TempDir;
use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode};
use vbar::model::synth::synthesize;
use vbar::options::{Scrub, Threads};
use vbar::{Fault, ModelBar, RuntimeOptions};

use crate::engine_more::eventually;
use crate::torch::Torch;
use crate::world::{P, ROOMY, World, budget_options, options};

/// A device, and models of the sizes given, in pages.
struct Rig {
    torch: Torch,
    models: Vec<ModelBar>,
    _folder: TempDir,
}

impl Rig {
    fn new(world: World, sizes: &[u64]) -> Self {
        let (torch, folder) = (Torch::of(world), TempDir::new().unwrap());
        let models = sizes.iter().enumerate().map(|(at, pages)| {
            let path = folder.path().join(format!("{at}.safetensors"));
            synthesize(&path, pages * P, at as u64).unwrap();
            torch.world.runtime.open_model(&path).unwrap()
        });
        let models = models.collect();
        Self { torch, models, _folder: folder }
    }

    fn budget(pages: u64, threads: Threads, sizes: &[u64]) -> Self {
        let options = RuntimeOptions { threads: Some(threads), ..budget_options(pages) };
        Self::new(World::with(ROOMY, options), sizes)
    }

    /// A pass over a model: each weight in turn, and `layer` behind it.
    fn pass(&self, model: usize, mut layer: impl FnMut(usize)) {
        let model = &self.models[model];
        for tensor in 0..model.model().tensors().len() {
            match model.fault(tensor, self.torch.world.stream).unwrap() {
                Fault::Resident(weight) | Fault::HostMapped(weight) => weight.unpin().unwrap(),
                Fault::Offloaded(refusal) => panic!("tensor {tensor}: {refusal}"),
            }
            layer(tensor);
        }
    }

    /// What a layer does: blocks of so many pages at a time, one after the other.
    fn activate(&self, blocks: &[u64]) {
        for pages in blocks {
            let block = self.torch.malloc(pages * P);
            let small = self.torch.malloc(512);
            self.torch.write(block, pages * P, 3, self.torch.world.stream);
            self.torch.allocator.free(block);
            self.torch.allocator.free(small);
        }
    }

    fn all_resident(&self, model: usize) -> bool {
        let vbar = self.models[model].vbar();
        !vbar.draw(u32::MAX).contains(['.', '!'])
    }

    /// Pages that the allocator has mapped, and given back, so far.
    fn mapped(&self) -> (u64, u64) {
        let statistics = self.torch.allocator.statistics();
        (statistics.num_device_alloc, statistics.num_device_free)
    }

    fn check_shut(self) {
        let Self { torch, models, .. } = self;
        torch.world.runtime.set_threads(Threads::Off).unwrap();
        torch.check();
        drop(models);
        torch.check_shut();
    }
}

#[test]
fn weights_come_into_the_frames_of_a_huge_tensor_that_was_freed_and_of_no_others() {
    // In a budget, and on the whole device, of which a page is the test's own.
    let whole = || World::with(&format!("capacity={},granularity=64K", 41 * P), options());
    let budget = |threads| World::with(ROOMY, RuntimeOptions { threads, ..budget_options(40) });
    let worlds = [budget(Some(Threads::Off)), budget(Some(Threads::On)), whole()];
    for (has_engine, world) in [false, true, false].into_iter().zip(worlds) {
        let rig = Rig::new(world, &[30]);
        assert_eq!(rig.torch.largest(50), 40);
        rig.pass(0, |_| rig.activate(&[]));
        assert!(rig.all_resident(0), "{}", rig.models[0].vbar().draw(40));
        // Weights give way to it as before, and have the frames back at once, also when it came
        // twice with a few weights in between.
        for _ in 0..2 {
            for tensor in 0..2 {
                let block = rig.torch.malloc(40 * P);
                rig.torch.allocator.free(block);
                drop(rig.models[0].fault(tensor, rig.torch.world.stream).unwrap());
            }
            // An engine may have a frame on its way still, as it had planned beside the tensor.
            for _ in 0..if has_engine { 3 } else { 1 } {
                rig.pass(0, |_| {
                    let small = rig.torch.malloc(512);
                    rig.torch.allocator.free(small);
                });
            }
            assert!(rig.all_resident(0), "{has_engine} {}", rig.models[0].vbar().draw(40));
        }
        rig.check_shut();
    }
}

/// As the test on a GPU does: passes that keep what each layer makes, then the largest tensor.
#[test]
fn a_plan_that_was_made_beside_activations_grows_into_the_frames_of_a_huge_tensor() {
    for threads in [Threads::Off, Threads::On] {
        let rig = Rig::budget(40, threads, &[30]);
        for _ in 0..3 {
            let mut kept = Vec::new();
            rig.pass(0, |tensor| {
                kept.extend((tensor % 5 == 0).then(|| rig.torch.malloc(P)));
            });
            for block in kept {
                rig.torch.allocator.free(block);
            }
        }
        rig.torch.allocator.empty_cache().unwrap();
        rig.torch.world.runtime.free_memory(u64::MAX).unwrap();
        rig.torch.world.runtime.trim(0).unwrap();
        assert_eq!(rig.torch.largest(41), 40);
        let block = rig.torch.malloc(40 * P);
        rig.torch.allocator.free(block);
        // An engine may have a frame on its way still, as it had planned beside the tensor.
        for _ in 0..if threads == Threads::On { 3 } else { 1 } {
            rig.pass(0, |_| ());
        }
        assert!(rig.all_resident(0), "{threads:?} {}", rig.models[0].vbar().draw(40));
        rig.check_shut();
    }
}

#[test]
fn an_engine_fetches_into_frames_that_activations_no_longer_need_and_waits_for_no_fault() {
    let rig = Rig::budget(40, Threads::On, &[30]);
    let block = rig.torch.malloc(20 * P);
    for _ in 0..4 {
        rig.pass(0, |_| ());
    }
    let numbers = || rig.torch.world.runtime.engine_numbers();
    eventually("a plan", || numbers().plans > 0);
    assert!((1..=20).contains(&numbers().kept_pages), "{:?}", numbers());
    rig.torch.allocator.free(block);
    // The work before the free is known to be over behind the next use of its stream.
    let first = rig.models[0].fault(0, rig.torch.world.stream).unwrap();
    drop(first);
    eventually("all weights are resident", || rig.all_resident(0));
    rig.check_shut();
}

#[test]
fn what_was_freed_last_goes_before_weights_though_nothing_was_recorded_behind_it() {
    let torch = Torch::budget(16);
    let (weights, more) = (torch.world.vbar(4), torch.world.vbar(8));
    assert_eq!(torch.world.touch(&weights, 0..4), Ok(()));
    let block = torch.malloc(12 * P);
    torch.write(block, 12 * P, 5, torch.world.stream);
    torch.allocator.free(block);
    assert_eq!(torch.world.touch(&more, 0..8), Ok(()));
    let drawn = [weights.draw(4), more.draw(8)].map(|drawn| drawn.replace('i', "#"));
    assert_eq!(drawn, ["####", "########"]);
    assert_eq!(torch.reserved(), 4);
    torch.check();
}

#[test]
fn a_steady_loop_maps_and_gives_back_nothing_of_its_activations() {
    for threads in [Threads::Off, Threads::On] {
        for (model, budget) in [(30, 40), (30, 20), (60, 20)] {
            let rig = Rig::budget(budget, threads, &[model]);
            let layer = |_| rig.activate(&[2, 6, 1]);
            for _ in 0..4 {
                rig.pass(0, layer);
            }
            let before = rig.mapped();
            for _ in 0..4 {
                rig.pass(0, layer);
            }
            let (mapped, given) = (rig.mapped().0 - before.0, rig.mapped().1 - before.1);
            // An engine that runs ahead in a burst may have all of its frames turned over between
            // two layers, now and then, and more often where other programs delay it: at one layer
            // of twenty.
            let layers = 4 * rig.models[0].model().tensors().len() as u64;
            let most = if threads == Threads::On { layers * 6 / 20 } else { 0 };
            assert!(
                mapped.max(given) <= most,
                "{model} in {budget}, {threads:?}: {mapped} {given}"
            );
            // What came back at each layer is kept, and no more.
            let reserved = rig.torch.reserved();
            assert!((1..=8).contains(&reserved), "{reserved}");
            rig.check_shut();
        }
    }
}

/// Pages that were got for tensors and not given out are no weights: where time is counted in
/// these, what comes back would look as if it had not for long.
#[test]
fn tensors_that_could_not_be_made_do_not_count_as_weights_that_were_loaded() {
    let options = RuntimeOptions { scrub: Scrub::On, ..budget_options(40) };
    let rig = Rig::new(World::with(ROOMY, options), &[60]);
    let layer = |_| rig.activate(&[6]);
    (0..3).for_each(|_| rig.pass(0, layer));
    let (before, loaded) = (rig.mapped(), rig.torch.world.runtime.statistics().pages_mapped);
    let world = &rig.torch.world;
    for _ in 0..40 {
        world.sim.fail_nth(Verb::MemsetD8Async, 1, DriverCode::INVALID_VALUE);
        let refused = rig.torch.allocator.malloc((8 * P) as usize, world.stream);
        assert!(refused.is_err_and(|error| !error.is_memory()));
        world.sim.stream_synchronize(world.stream).unwrap();
        world.runtime.refresh().unwrap();
    }
    let vain = world.runtime.statistics().pages_mapped - loaded;
    assert!(vain >= 40, "{vain} pages were mapped in vain");
    rig.pass(0, layer);
    assert_eq!(rig.mapped(), before, "what comes back at each layer is kept");
    rig.check_shut();
}

/// Such weights ask nobody: how many they are has to be known all the same.
#[test]
fn weights_that_found_free_frames_are_counted_between_two_uses_of_the_same_memory() {
    let rig = Rig::budget(40, Threads::Off, &[30]);
    let load = |pages: Range<u64>| {
        let bytes = pages.start * P..pages.end * P;
        drop(rig.models[0].vbar().fault(bytes, rig.torch.world.stream).unwrap().resident());
    };
    // With the small block's page 19 pages, that come back behind 16 weights: 21 are for weights.
    rig.activate(&[18]);
    load(0..16);
    rig.activate(&[18]);
    let before = rig.mapped();
    load(16..30);
    rig.activate(&[18]);
    assert_eq!(rig.mapped(), before);
    assert_eq!(rig.torch.world.runtime.numbers().resident_pages, 40);
    rig.check_shut();
}

#[test]
fn phases_take_turns_and_each_maps_what_it_needs_once() {
    for threads in [Threads::Off, Threads::On] {
        // An encoder with large activations, a denoiser for several passes, a decoder with one huge
        // tensor.
        let rig = Rig::budget(32, threads, &[8, 40, 4]);
        for round in 0..4 {
            let phases: [(usize, usize, &[u64], u64); 3] =
                [(0, 1, &[10, 3], 0), (1, 5, &[4, 1], 0), (2, 1, &[2], 24)];
            for (model, passes, layer, huge) in phases {
                let (before, _) = rig.mapped();
                for _ in 0..passes {
                    rig.pass(model, |_| rig.activate(layer));
                }
                if huge > 0 {
                    rig.activate(&[huge]);
                }
                let (mapped, needed) = (rig.mapped().0 - before, layer[0].max(huge) + 1);
                // Once as it begins, once more what was given before it was seen to come back.
                let most = 2 * needed + 2;
                assert!(mapped <= most, "{threads:?} {round} {model}: {mapped} for {needed}");
            }
        }
        rig.check_shut();
    }
}
