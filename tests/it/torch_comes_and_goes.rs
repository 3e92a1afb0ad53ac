//! A program's own tensors that come and go in each pass over a model that does not fit beside
//! them: what that costs in plans made anew and in pages loaded twice.

use std::ops::Range;

use tempfile::TempDir;
use vbar::driver::Driver;
use vbar::model::synth::synthesize;
use vbar::options::Threads;
use vbar::{Fault, ModelBar, RuntimeOptions};

use crate::torch::Torch;
use crate::world::{P, ROOMY, World, budget_options, resident};

struct Rig {
    torch: Torch,
    model: ModelBar,
    _folder: TempDir,
}

impl Rig {
    fn new(budget: u64, pages: u64) -> Self {
        let options = RuntimeOptions { threads: Some(Threads::Off), ..budget_options(budget) };
        let (torch, folder) = (Torch::of(World::with(ROOMY, options)), TempDir::new().unwrap());
        torch.world.runtime.open_engine_by_hand();
        let path = folder.path().join("model.safetensors");
        synthesize(&path, pages * P, 5).unwrap();
        let model = torch.world.runtime.open_model(&path).unwrap();
        Self { torch, model, _folder: folder }
    }

    /// A pass: at a third of it a tensor comes, which goes at the half.
    fn pass(&self, tensor_pages: u64) {
        let count = self.model.model().tensors().len();
        self.fault(0..count / 3);
        let block = (tensor_pages > 0).then(|| self.torch.malloc(tensor_pages * P));
        self.fault(count / 3..count / 2);
        block.map(|block| self.torch.allocator.free(block));
        self.fault(count / 2..count);
    }

    fn fault(&self, tensors: Range<usize>) {
        let stream = self.torch.world.stream;
        for tensor in tensors {
            match self.model.fault(tensor, stream).unwrap() {
                Fault::Resident(weight) | Fault::HostMapped(weight) => weight.unpin().unwrap(),
                Fault::Offloaded(refusal) => panic!("tensor {tensor}: {refusal}"),
            }
            self.torch.world.sim.stream_synchronize(stream).unwrap();
            // By hand: the engine sees each layer, and no time passes.
            self.torch.world.runtime.drive_engine().unwrap();
        }
    }

    fn check_shut(self) {
        let Self { torch, model, .. } = self;
        torch.check();
        drop(model);
        torch.check_shut();
    }

    /// Plans, pages loaded, misses, and pages mapped for tensors so far.
    fn numbers(&self) -> [u64; 4] {
        let told = self.torch.world.runtime.statistics();
        let cache = self.torch.allocator.statistics();
        [told.engine.plans, told.bytes_filled / P, told.misses, cache.num_device_alloc]
    }

    /// What `work` adds to them.
    fn added(&self, work: impl FnOnce()) -> [u64; 4] {
        let before = self.numbers();
        work();
        let after = self.numbers();
        std::array::from_fn(|at| after[at] - before[at])
    }
}

#[test]
fn what_comes_and_goes_in_each_pass_has_no_plan_made_anew() {
    let rig = Rig::new(40, 60);
    let engine = || rig.torch.world.runtime.statistics().engine;
    // It learns that the tensor comes in each pass.
    (0..6).for_each(|_| rig.pass(12));
    let [plans, loaded, missed, mapped] = rig.added(|| (0..12).for_each(|_| rig.pass(12)));
    assert_eq!(plans, 0, "plans made anew, {:?}", engine());
    // What is beside it throughout.
    assert!((1..=28).contains(&engine().kept_pages), "{:?}", engine());
    // No page is loaded twice a pass, nor found missing by the program but where it has just come.
    let streamed = engine().planned_pages - engine().kept_pages;
    assert!(loaded / 12 <= streamed, "{loaded} pages of 12 times {streamed}, {:?}", engine());
    assert!(missed <= 24, "{missed} misses in 12 passes, {:?}", engine());
    // Nor does the tensor's memory go and come.
    assert_eq!(mapped, 0);
    // Nor is a cache that is emptied between passes a reason for another plan, and what it gave
    // back is not filled with pages that would lose their frames again.
    let [plans, loaded, missed, _] = rig.added(|| {
        for _ in 0..6 {
            rig.torch.allocator.empty_cache().unwrap();
            rig.pass(12);
            rig.pass(12);
        }
    });
    assert_eq!(plans, 0, "plans made anew, {:?}", engine());
    assert!(loaded / 12 <= streamed, "{loaded} pages of 12 times {streamed}, {:?}", engine());
    assert!(missed <= 24, "{missed} misses in 12 passes, {:?}", engine());
    // It comes no more, and weights have its frames.
    (0..4).for_each(|_| rig.pass(0));
    assert!(engine().kept_pages + engine().streaming_frames >= 36, "{:?}", engine());
    rig.check_shut();
}

/// What was fetched ahead and is needed next is not what a tensor's frames come from.
#[test]
fn a_tensor_takes_what_is_needed_last() {
    const LAYERS: u64 = 15;
    let rig = Rig::new(40, 60);
    let world = &rig.torch.world;
    // Layers of four pages, so that several stream at a time.
    let layer = |at: u64| {
        drop(resident(world, rig.model.vbar(), at * 4..at * 4 + 4));
        world.sim.stream_synchronize(world.stream).unwrap();
        world.runtime.drive_engine().unwrap();
    };
    (0..6).for_each(|_| (0..LAYERS).for_each(layer));
    // Also where what is needed next is the end of the model, and its start comes behind.
    for behind in 1..LAYERS {
        (0..behind).for_each(layer);
        let block = rig.torch.malloc(2 * P);
        let [_, _, missed, _] = rig.added(|| layer(behind));
        assert_eq!(missed, 0, "layer {behind} of {LAYERS}");
        rig.torch.allocator.free(block);
        (behind + 1..LAYERS).for_each(layer);
        (0..3).for_each(|_| (0..LAYERS).for_each(layer));
    }
    rig.check_shut();
}
