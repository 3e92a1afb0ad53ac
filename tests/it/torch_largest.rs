//! The largest tensor that can be had, freed, and then a pass over weights that fit: in numbers of
//! pages a large GPU's own, so that plans, reserve and ring are what they are there.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use tempfile::TempDir;
use vbar::driver::Driver;
use vbar::memory::page_table::PageState;
use vbar::options::Threads;
use vbar::units::PageSize;
use vbar::{Fault, ModelBar, RuntimeOptions};

use crate::torch::Torch;
use crate::world::{P, World};

/// 60 weights of 32 pages: with pages of 16 MiB they are 30 GiB.
const WEIGHTS: u64 = 60;
const WEIGHT: u64 = 32;
const MODEL: u64 = WEIGHTS * WEIGHT;
/// 140 GiB of such pages. Copies are slow enough to be under way when a fault returns.
const DEVICE: &str = "capacity=560M,granularity=64K,bandwidth=500M";

struct Rig {
    torch: Torch,
    model: ModelBar,
    _folder: TempDir,
}

impl Rig {
    /// As a program opens a device that says nothing about it but this.
    fn new(budget: Option<u64>, threads: Threads) -> Self {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("model.safetensors");
        write_zeros(&path);
        let options = RuntimeOptions {
            page_size: PageSize::new(P).unwrap(),
            budget_bytes: budget.map(|pages| pages * P),
            headroom_bytes: Some(64 * P),
            threads: Some(threads),
            ..RuntimeOptions::default()
        };
        let torch = Torch::of(World::with(DEVICE, options));
        let model = torch.world.runtime.open_model(&path).unwrap();
        Self { torch, model, _folder: folder }
    }

    /// A pass that reads each weight's ends, looks at it twice, as a tensor made of it does, and
    /// keeps so many pages of each layer.
    fn pass(&self, activation: u64) {
        let (torch, stream) = (&self.torch, self.torch.world.stream);
        let mut kept = Vec::new();
        for tensor in 0..WEIGHTS as usize {
            let Fault::Resident(weight) = self.model.fault(tensor, stream).unwrap() else {
                panic!("tensor {tensor} is not on the device");
            };
            drop(self.model.fault(tensor, stream).unwrap());
            for address in [weight.address().0, weight.address().0 + WEIGHT * P - 8] {
                torch.sum(address, 8, stream);
                torch.world.sim.stream_synchronize(stream).unwrap();
            }
            drop(weight);
            if activation > 0 {
                kept.push(torch.malloc(activation * P));
                torch.write(kept[tensor], activation * P, 3, stream);
            }
        }
        torch.world.sim.stream_synchronize(stream).unwrap();
        for block in kept {
            torch.allocator.free(block);
        }
    }

    #[track_caller]
    fn check_loaded(&self, what: &str) {
        let pages = self.model.vbar().residency();
        let count = |state| pages.iter().filter(|page| page.state == state).count() as u64;
        let (issued, resident) = (count(PageState::Issued), count(PageState::Resident));
        let (told, cache) =
            (self.torch.world.runtime.statistics(), self.torch.allocator.statistics());
        // Each weight was read, so what was on its way has arrived.
        assert_eq!(
            (issued, resident),
            (0, MODEL),
            "{what}: {} of {} frames are free, {} cached, {} pages evicted; {:?}",
            told.memory.free_bytes / P,
            told.memory.used_bytes / P,
            cache.reserved_bytes.all.current / P,
            told.pages_evicted,
            told.engine,
        );
    }

    fn check_largest(self, most: u64) {
        let Self { torch, .. } = &self;
        let runtime = &torch.world.runtime;
        torch.allocator.empty_cache().unwrap();
        runtime.free_memory(u64::MAX).unwrap();
        runtime.trim(0).unwrap();
        let alone = torch.largest(most);
        let budget = runtime.numbers().budget_bytes / P;
        self.pass(0);
        self.check_loaded("behind tensors of all sizes");
        let block = torch.malloc(alone * P);
        torch.write(block, alone * P, 9, torch.world.stream);
        torch.world.sim.stream_synchronize(torch.world.stream).unwrap();
        let pages = self.model.vbar().residency();
        let left = pages.iter().filter(|page| page.state != PageState::Absent).count() as u64;
        assert!(left <= budget - alone, "{left} pages are left beside {alone} of {budget}");
        torch.allocator.free(block);
        // An engine that was not run meanwhile may have begun to fetch beside the tensor.
        for _ in 0..if runtime.threads() == Threads::On { 2 } else { 1 } {
            self.pass(0);
        }
        self.check_loaded("behind the largest tensor again");
        runtime.set_threads(Threads::Off).unwrap();
        let Self { torch, model, .. } = self;
        torch.check();
        drop(model);
        torch.check_shut();
    }
}

/// A model of zeros in a file that takes no room.
fn write_zeros(path: &Path) {
    let entries: Vec<String> = (0..WEIGHTS)
        .map(|at| {
            let (bytes, start) = (WEIGHT * P, at * WEIGHT * P);
            let offsets = format!("[{start},{}]", start + bytes);
            format!(r#""layer{at:02}":{{"dtype":"U8","shape":[{bytes}],"data_offsets":{offsets}}}"#)
        })
        .collect();
    let text = format!("{{{}}}", entries.join(","));
    let header = (text.len() as u64 + 8).next_multiple_of(4096) - 8;
    let text = format!("{text:width$}", width = header as usize);
    let file = File::create(path).unwrap();
    file.write_all_at(&header.to_le_bytes(), 0).unwrap();
    file.write_all_at(text.as_bytes(), 8).unwrap();
    file.set_len(8 + header + MODEL * P).unwrap();
}

#[test]
fn a_model_is_loaded_behind_the_largest_tensor_of_the_whole_device() {
    for threads in [Threads::Off, Threads::On] {
        Rig::new(None, threads).check_largest(141 * 64);
    }
}

#[test]
fn a_model_is_loaded_behind_the_largest_tensor_of_a_budget() {
    for threads in [Threads::Off, Threads::On] {
        let rig = Rig::new(Some(40 * 64), threads);
        for _ in 0..3 {
            rig.pass(16);
        }
        assert!(rig.torch.world.runtime.statistics().pages_evicted > 0);
        rig.check_largest(41 * 64);
    }
}
