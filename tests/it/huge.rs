//! Models far larger than the machine: opening and binding one takes addresses and tables only.

use std::io::Write;
use std::path::Path;

use tempfile::TempDir;
use vbar::driver::sim::Verb;
use vbar::units::{GIB, MIB, PageSize};
use vbar::{Fault, RuntimeOptions};

use crate::world::{DEVICE, World, options};

const SHARDS: u64 = 2;
const SHARD_BYTES: u64 = 28 * GIB;
const TENSORS: u64 = 320;

/// A sharded model with nothing but holes where its bytes are, and its index.
fn write_sparse(folder: &Path) {
    let mut places = Vec::new();
    for shard in 0..SHARDS {
        let name = format!("model-{:05}-of-{SHARDS:05}.safetensors", shard + 1);
        let bytes = SHARD_BYTES / TENSORS / 2 * 2;
        let tensors: Vec<String> = (0..TENSORS)
            .map(|number| {
                let tensor = format!("layers.{}.weight", shard * TENSORS + number);
                places.push(format!("\"{tensor}\":\"{name}\""));
                let (start, elements) = (number * bytes, bytes / 2);
                let end = start + bytes;
                format!(
                    "\"{tensor}\":{{\"dtype\":\"BF16\",\"shape\":[{elements}],\
                     \"data_offsets\":[{start},{end}]}}"
                )
            })
            .collect();
        let header = format!("{{{}}}", tensors.join(","));
        let mut file = std::fs::File::create(folder.join(&name)).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(header.as_bytes()).unwrap();
        file.set_len(8 + header.len() as u64 + TENSORS * bytes).unwrap();
    }
    let index = format!("{{\"weight_map\":{{{}}}}}", places.join(","));
    std::fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
}

#[test]
fn opening_a_model_of_56_gib_takes_no_memory() {
    let folder = TempDir::new().unwrap();
    write_sparse(folder.path());
    let options = RuntimeOptions { page_size: PageSize::new(16 * MIB).unwrap(), ..options() };
    let world = World::with("capacity=256M", options);
    // What an open runtime has once something was bound: the staging slots.
    let small = folder.path().join("small.safetensors");
    vbar::model::synth::synthesize(&small, 64 << 10, 1).unwrap();
    let first = world.runtime.open_model(&small).unwrap();
    let before = (world.sim.locked_bytes(), world.sim.reserved_bytes());
    assert_eq!(before.0, world.runtime.statistics().locked.ring_bytes);
    let verbs = [Verb::MemCreate, Verb::MemMap, Verb::MemcpyHtodAsync, Verb::MemHostRegister];
    let calls = || verbs.map(|verb| world.sim.calls(verb));
    let (calls_before, allocated) = (calls(), world.sim.calls(Verb::MemHostAlloc));

    let model = world.runtime.open_model(folder.path()).unwrap();
    assert_eq!(model.model().tensors().len() as u64, SHARDS * TENSORS);
    let bytes = model.vbar().bytes();
    assert!(bytes >= SHARDS * SHARD_BYTES - TENSORS * SHARDS * 2, "{bytes}");
    assert_eq!(world.sim.reserved_bytes() - before.1, bytes);
    assert_eq!(world.sim.locked_bytes(), before.0, "page-locked memory");
    assert_eq!((world.sim.used_bytes(DEVICE), world.sim.live_host_frames()), (0, 0));
    let told = world.runtime.statistics();
    assert_eq!((told.memory.used_bytes, told.bytes_filled, told.pages_mapped), (0, 0, 0));
    assert_eq!((calls(), world.sim.calls(Verb::MemHostAlloc)), (calls_before, allocated));
    // It is a model all the same: its last tensor, zeros as the hole in the file is.
    let last = model.model().tensors().len() - 1;
    match model.fault(last, world.stream).unwrap() {
        Fault::Resident(guard) => {
            let end = guard.address().offset(guard.bytes() - 8);
            assert_eq!(world.word(end, world.stream), 0);
        }
        other => panic!("{other:?}"),
    }
    world.check();
    drop((first, model));
    world.check_shut();
}
