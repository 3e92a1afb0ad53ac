//! Operations for `each_call`: what each needs, what it does, and what a failed one may leave.

use std::sync::Arc;

use tempfile::TempDir;
use vbar::memory::pager::HeldPins;
use vbar::model::synth::synthesize;
use vbar::options::{Eviction, HostMapped, Poison, RuntimeOptions, Scrub};
use vbar::torch::Allocator;
use vbar::{ErrorCode, Fault, ModelBar, Result, Vbar};

use vbar::driver::{Driver, KernelCall};

use crate::world::{P, World, pattern_bytes};

/// The pattern that is saved.
const SEED: u64 = 7;

/// What an operation works on.
pub(crate) struct Scene {
    pub(crate) world: World,
    pub(crate) bars: Vec<Vbar>,
    pub(crate) model: Option<ModelBar>,
    pub(crate) allocator: Option<Arc<Allocator>>,
    pub(crate) blocks: Vec<u64>,
    pub(crate) folder: TempDir,
}

/// What it came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Came {
    Done,
    /// A refusal, by decision.
    Refused,
}

/// What a failed one leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Leaves {
    /// Everything as it was.
    Before,
    /// What it had come to: memory that it was to give back may be gone, and pages that were
    /// filled may stay, unpinned, where the caller's stream could not be told to wait for them.
    Progress,
}

pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) leaves: Leaves,
    pub(crate) budget: u64,
    pub(crate) change: fn(RuntimeOptions) -> RuntimeOptions,
    pub(crate) prepare: fn(&mut Scene),
    pub(crate) act: fn(&mut Scene) -> Result<Came>,
}

fn same(options: RuntimeOptions) -> RuntimeOptions {
    options
}

fn strict(options: RuntimeOptions) -> RuntimeOptions {
    RuntimeOptions { eviction: Eviction::Strict, ..options }
}

fn poisoned(options: RuntimeOptions) -> RuntimeOptions {
    RuntimeOptions { poison: Poison::On, ..options }
}

fn scrubbed(options: RuntimeOptions) -> RuntimeOptions {
    RuntimeOptions { scrub: Scrub::On, ..options }
}

fn host_mapped(options: RuntimeOptions) -> RuntimeOptions {
    RuntimeOptions { host_mapped: HostMapped::On, ..options }
}

fn came<G>(fault: Fault<G>) -> Came {
    match fault {
        Fault::Resident(_) | Fault::HostMapped(_) => Came::Done,
        Fault::Offloaded(_) => Came::Refused,
    }
}

fn nothing(_: &mut Scene) {}

fn fault_three(scene: &mut Scene) -> Result<Came> {
    scene.bars[0].prioritise()?;
    scene.bars[0].fault(0..3 * P, scene.world.stream).map(came)
}

fn fault_two_bars(scene: &mut Scene) -> Result<Came> {
    scene.bars[0].prioritise()?;
    scene.bars[1].prioritise()?;
    let ranges = [(&scene.bars[0], 0..2 * P), (&scene.bars[1], P..3 * P)];
    scene.world.runtime.fault_many(&ranges, scene.world.stream).map(came)
}

/// The other VBAR has all frames.
fn fill_other(scene: &mut Scene) {
    let other = scene.world.vbar(4);
    drop(other.fault(0..4 * P, scene.world.stream).unwrap().resident().unwrap());
    other.deprioritise().unwrap();
    scene.bars.push(other);
}

fn fill_both(scene: &mut Scene) {
    drop(scene.bars[0].fault(0..3 * P, scene.world.stream).unwrap().resident().unwrap());
    drop(scene.bars[1].fault(0..2 * P, scene.world.stream).unwrap().resident().unwrap());
}

fn open(scene: &Scene) -> Result<ModelBar> {
    let path = scene.folder.path().join("model.safetensors");
    synthesize(&path, 4 * P, 3).unwrap();
    scene.world.runtime.open_model(&path)
}

fn open_model(scene: &mut Scene) {
    scene.model = Some(open(scene).unwrap());
}

fn open_model_beside_another(scene: &mut Scene) {
    fill_other(scene);
    open_model(scene);
}

fn fill_model(scene: &mut Scene) -> Result<Came> {
    let vbar = scene.model.as_ref().unwrap().vbar();
    vbar.fault(0..vbar.bytes(), scene.world.stream).map(came)
}

fn torch(scene: &mut Scene) {
    scene.allocator = Some(scene.world.runtime.torch_allocator().unwrap());
}

fn torch_beside_weights(scene: &mut Scene) {
    torch(scene);
    fill_other(scene);
}

fn malloc(scene: &mut Scene) -> Result<Came> {
    let allocator = scene.allocator.as_ref().unwrap();
    if let Some(block) = scene.blocks.pop() {
        allocator.free(block);
    }
    match allocator.malloc(3 * P as usize, scene.world.stream) {
        Ok(address) => {
            scene.blocks.push(address);
            Ok(Came::Done)
        }
        Err(error) => error.cause.map_or(Ok(Came::Refused), Err),
    }
}

fn cached(scene: &mut Scene) {
    torch(scene);
    for stream in [scene.world.stream, scene.world.another_stream()] {
        let allocator = scene.allocator.as_ref().unwrap();
        let address = allocator.malloc(2 * P as usize, stream).unwrap();
        allocator.free(address);
    }
}

/// Writes two pages and saves them, whatever an earlier try came to.
fn save(scene: &mut Scene) -> Result<Came> {
    let (vbar, stream, sim) = (&scene.bars[0], scene.world.stream, &scene.world.sim);
    vbar.drop_save(0..2 * P)?;
    vbar.prepare_save(0..2 * P)?;
    let Some(guard) = vbar.fault(0..2 * P, stream)?.resident() else { return Ok(Came::Refused) };
    let (target, bytes, seed) = (guard.address(), guard.bytes(), SEED);
    let call = KernelCall::Pattern { target, bytes, seed, delay_nanos: 0 };
    // On a lost device it is not written, and the save says why.
    let _ = sim.spare(|| sim.launch_kernel(call, stream));
    let saved = vbar.save(0..2 * P, stream);
    guard.unpin()?;
    saved.map(|()| Came::Done)
}

fn save_and_lose(scene: &mut Scene) {
    assert_eq!(save(scene).unwrap(), Came::Done);
    scene.settle();
    fill_other(scene);
}

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "a range that is written and saved",
        leaves: Leaves::Progress,
        budget: 8,
        change: same,
        prepare: nothing,
        act: save,
    },
    Case {
        name: "saved bytes that come back",
        leaves: Leaves::Progress,
        budget: 4,
        change: same,
        prepare: save_and_lose,
        act: |scene| {
            scene.bars[0].prioritise()?;
            let fault = scene.bars[0].fault(0..2 * P, scene.world.stream)?;
            let Some(guard) = fault.resident() else { return Ok(Came::Refused) };
            let (sim, stream) = (&scene.world.sim, scene.world.stream);
            if sim.spare(|| sim.stream_synchronize(stream)).is_ok() {
                let bytes = sim.read_bytes(guard.address(), 2 * P as usize).unwrap();
                assert!(bytes == pattern_bytes(2 * P, SEED), "the bytes are others");
            }
            Ok(Came::Done)
        },
    },
    Case {
        name: "saved bytes that are dropped",
        leaves: Leaves::Progress,
        budget: 8,
        change: same,
        prepare: |scene| assert_eq!(save(scene).unwrap(), Came::Done),
        act: |scene| {
            scene.bars[0].drop_save(0..2 * P)?;
            scene.world.runtime.trim_host(0)?;
            let left = scene.world.runtime.statistics().locked.saved_bytes;
            Ok(if left == 0 { Came::Done } else { Came::Refused })
        },
    },
    Case {
        name: "a fault of three pages",
        leaves: Leaves::Before,
        budget: 8,
        change: same,
        prepare: nothing,
        act: fault_three,
    },
    Case {
        name: "a fault of three pages, poisoned",
        leaves: Leaves::Progress,
        budget: 5,
        change: poisoned,
        prepare: fill_other,
        act: fault_three,
    },
    Case {
        name: "a fault that takes frames",
        leaves: Leaves::Before,
        budget: 4,
        change: same,
        prepare: fill_other,
        act: fault_three,
    },
    Case {
        name: "a fault that evicts first",
        leaves: Leaves::Progress,
        budget: 4,
        change: strict,
        prepare: fill_other,
        act: fault_three,
    },
    Case {
        name: "a fault of two bars",
        leaves: Leaves::Before,
        budget: 8,
        change: same,
        prepare: nothing,
        act: fault_two_bars,
    },
    Case {
        name: "a fault of two bars that takes frames",
        leaves: Leaves::Before,
        budget: 4,
        change: same,
        prepare: fill_other,
        act: fault_two_bars,
    },
    Case {
        name: "a hit",
        leaves: Leaves::Before,
        budget: 8,
        change: same,
        prepare: fill_both,
        act: fault_three,
    },
    Case {
        name: "a new VBAR",
        leaves: Leaves::Before,
        budget: 8,
        change: same,
        prepare: nothing,
        act: |scene| {
            let vbar = scene.world.runtime.create_bar(2 * P)?;
            let came = if vbar.is_reserved() { Came::Done } else { Came::Refused };
            vbar.allocate(P)?;
            Ok(came)
        },
    },
    Case {
        name: "a binding",
        leaves: Leaves::Before,
        budget: 8,
        change: same,
        prepare: nothing,
        act: |scene| {
            let bound = open(scene)?;
            Ok(if bound.vbar().is_reserved() { Came::Done } else { Came::Refused })
        },
    },
    Case {
        name: "a fill",
        leaves: Leaves::Progress,
        budget: 8,
        change: same,
        prepare: open_model,
        act: fill_model,
    },
    Case {
        name: "a fill that takes frames",
        leaves: Leaves::Progress,
        budget: 6,
        change: same,
        prepare: open_model_beside_another,
        act: fill_model,
    },
    Case {
        name: "a fill that evicts first",
        leaves: Leaves::Progress,
        budget: 6,
        change: strict,
        prepare: open_model_beside_another,
        act: fill_model,
    },
    Case {
        name: "a fill of host memory",
        leaves: Leaves::Progress,
        budget: 2,
        change: host_mapped,
        prepare: open_model,
        act: fill_model,
    },
    Case {
        name: "freeing",
        leaves: Leaves::Progress,
        budget: 8,
        change: same,
        prepare: fill_both,
        act: |scene| {
            scene.world.runtime.free_memory(u64::MAX)?;
            let is_done = scene.world.used() == 0;
            Ok(if is_done { Came::Done } else { Came::Refused })
        },
    },
    Case {
        name: "a smaller budget",
        leaves: Leaves::Progress,
        budget: 8,
        change: same,
        prepare: fill_both,
        act: |scene| {
            scene.world.runtime.set_budget(Some(2 * P))?;
            let is_done = scene.world.used() <= 2;
            Ok(if is_done { Came::Done } else { Came::Refused })
        },
    },
    Case {
        name: "trimming",
        leaves: Leaves::Progress,
        budget: 8,
        change: same,
        prepare: |scene| {
            fill_other(scene);
            scene.bars.pop().unwrap().destroy_wait().unwrap();
        },
        act: |scene| {
            scene.world.runtime.trim(0)?;
            Ok(if scene.world.used() == 0 { Came::Done } else { Came::Refused })
        },
    },
    Case {
        name: "an end of a run, and pins by force",
        leaves: Leaves::Progress,
        budget: 8,
        change: same,
        prepare: |scene| {
            fill_both(scene);
            let guard = scene.bars[0].fault(0..P, scene.world.stream).unwrap();
            let _ = guard.resident().unwrap().into_token();
        },
        act: |scene| {
            scene.bars[0].end_of_run(scene.world.stream, HeldPins::Release).map(|_| Came::Done)
        },
    },
    Case {
        name: "closing a VBAR",
        leaves: Leaves::Progress,
        budget: 8,
        change: same,
        prepare: fill_both,
        act: |scene| {
            let Some(vbar) = scene.bars.get(2).or(scene.bars.first()).cloned() else {
                return Ok(Came::Done);
            };
            scene.bars.retain(|bar| bar.base() != vbar.base());
            let number = vbar.number();
            match vbar.destroy_wait() {
                // It is closed all the same, and goes with the next look at it.
                Err(error) => {
                    scene.world.sim.spare(|| {
                        scene.world.sim.ctx_synchronize().ok();
                        scene.world.runtime.trim(u64::MAX).ok();
                    });
                    assert!(error.code() != ErrorCode::Closed, "{number}");
                    Err(error)
                }
                Ok(()) => Ok(Came::Done),
            }
        },
    },
    Case {
        name: "closing a model",
        leaves: Leaves::Progress,
        budget: 8,
        change: same,
        prepare: |scene| {
            open_model(scene);
            fill_model(scene).unwrap();
        },
        act: |scene| {
            drop(scene.model.take());
            Ok(Came::Done)
        },
    },
    Case {
        name: "an unpin",
        leaves: Leaves::Progress,
        budget: 8,
        change: same,
        prepare: fill_both,
        act: |scene| {
            let fault = scene.bars[0].fault(0..3 * P, scene.world.stream)?;
            let Some(guard) = fault.resident() else { return Ok(Came::Refused) };
            guard.unpin().map(|()| Came::Done)
        },
    },
    Case {
        name: "a stream that is retired",
        leaves: Leaves::Progress,
        budget: 8,
        change: same,
        prepare: fill_both,
        act: |scene| scene.world.runtime.retire_stream(scene.world.stream).map(|()| Came::Done),
    },
    Case {
        name: "host memory that is given back",
        leaves: Leaves::Progress,
        budget: 8,
        change: same,
        prepare: open_model,
        act: |scene| scene.world.runtime.trim_host(0).map(|_| Came::Done),
    },
    Case {
        name: "the first of PyTorch's allocator",
        leaves: Leaves::Before,
        budget: 8,
        change: same,
        prepare: nothing,
        act: |scene| {
            let allocator = scene.world.runtime.torch_allocator();
            match allocator {
                Ok(_) => Ok(Came::Done),
                Err(error) if error.code() == ErrorCode::NoAddresses => Ok(Came::Refused),
                Err(error) => Err(error),
            }
        },
    },
    Case {
        name: "PyTorch's memory that grows",
        leaves: Leaves::Before,
        budget: 8,
        change: same,
        prepare: torch,
        act: malloc,
    },
    Case {
        name: "PyTorch's memory that takes weights' frames",
        leaves: Leaves::Progress,
        budget: 4,
        change: same,
        prepare: torch_beside_weights,
        act: malloc,
    },
    Case {
        name: "PyTorch's memory that is freed",
        leaves: Leaves::Progress,
        budget: 8,
        change: same,
        prepare: |scene| {
            torch(scene);
            malloc(scene).unwrap();
        },
        act: |scene| {
            let Some(block) = scene.blocks.pop() else { return Ok(Came::Done) };
            let other = scene.world.sim.spare(|| scene.world.another_stream());
            let allocator = scene.allocator.as_ref().unwrap();
            allocator.record_stream(block, other);
            allocator.free(block);
            Ok(Came::Done)
        },
    },
    Case {
        name: "PyTorch's cache that is emptied",
        leaves: Leaves::Progress,
        budget: 8,
        change: same,
        prepare: cached,
        act: |scene| scene.allocator.as_ref().unwrap().empty_cache().map(|()| Came::Done),
    },
    Case {
        name: "weights that take PyTorch's cache",
        leaves: Leaves::Progress,
        budget: 4,
        change: same,
        prepare: cached,
        act: fault_three,
    },
    Case {
        name: "a fault of two bars whose frames are cleared",
        leaves: Leaves::Progress,
        budget: 4,
        change: scrubbed,
        prepare: fill_other,
        act: fault_two_bars,
    },
    Case {
        name: "a model whose frames are cleared",
        leaves: Leaves::Progress,
        budget: 6,
        change: scrubbed,
        prepare: open_model_beside_another,
        act: fill_model,
    },
    Case {
        name: "a request of PyTorch's whose frames are cleared",
        leaves: Leaves::Progress,
        budget: 4,
        change: scrubbed,
        prepare: torch_beside_weights,
        act: malloc,
    },
];

/// A model with its bytes, weights, and blocks of PyTorch's, live and cached.
pub(crate) fn fill_everything(scene: &mut Scene) {
    cached(scene);
    fill_both(scene);
    open_model(scene);
    assert_eq!(fill_model(scene), Ok(Came::Done));
    assert_eq!(malloc(scene), Ok(Came::Done));
}
