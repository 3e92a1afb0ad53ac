//! A program's own tensors that come and go in each pass over a model that does not fit beside
//! them: what that costs in plans made anew and in pages loaded twice.

use tempfile::TempDir;
use vbar::driver::Driver;
use vbar::model::synth::synthesize;
use vbar::options::Threads;
use vbar::{Fault, ModelBar, RuntimeOptions};

use crate::torch::Torch;
use crate::world::{P, ROOMY, World, budget_options};

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
        let stream = self.torch.world.stream;
        let count = self.model.model().tensors().len();
        let mut block = None;
        for tensor in 0..count {
            match self.model.fault(tensor, stream).unwrap() {
                Fault::Resident(weight) | Fault::HostMapped(weight) => weight.unpin().unwrap(),
                Fault::Offloaded(refusal) => panic!("tensor {tensor}: {refusal}"),
            }
            if tensor == count / 3 && tensor_pages > 0 {
                block = Some(self.torch.malloc(tensor_pages * P));
            }
            if tensor == count / 2 {
                block.take().map(|block| self.torch.allocator.free(block));
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
}

#[test]
fn what_comes_and_goes_in_each_pass_has_no_plan_made_anew() {
    let rig = Rig::new(40, 60);
    let numbers = || {
        let told = rig.torch.world.runtime.statistics();
        let cache = rig.torch.allocator.statistics();
        (told.engine.plans, told.bytes_filled / P, told.misses, cache.num_device_alloc)
    };
    // It learns that the tensor comes in each pass.
    (0..6).for_each(|_| rig.pass(12));
    let before = numbers();
    (0..12).for_each(|_| rig.pass(12));
    let after = numbers();
    let engine = rig.torch.world.runtime.statistics().engine;
    assert_eq!(after.0 - before.0, 0, "plans made anew, {engine:?}");
    // What is beside it throughout.
    assert!((1..=28).contains(&engine.kept_pages), "{engine:?}");
    // No page is loaded twice a pass, nor found missing by the program but where it has just come.
    let streamed = engine.planned_pages - engine.kept_pages;
    let (loaded, missed) = ((after.1 - before.1) / 12, after.2 - before.2);
    assert!(loaded <= streamed, "{loaded} pages a pass of {streamed}, {engine:?}");
    assert!(missed <= 24, "{missed} misses in 12 passes, {engine:?}");
    // Nor does the tensor's memory go and come.
    assert_eq!(after.3, before.3);
    // It comes no more, and weights have its frames.
    (0..4).for_each(|_| rig.pass(0));
    let engine = rig.torch.world.runtime.statistics().engine;
    assert!(engine.kept_pages + engine.streaming_frames >= 36, "{engine:?}");
    rig.check_shut();
}
