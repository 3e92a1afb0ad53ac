//! A model of strangers on a simulated device: opened, and every tensor of it made resident.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path};
use std::sync::{Arc, OnceLock};

use vbar::driver::sim::{OnViolation, Sim, SimOptions};
use vbar::host::model_files::Model;
use vbar::model::binding::lay_out;
use vbar::options::{RuntimeOptions, Threads};
use vbar::units::{DeviceOrdinal, KIB, MIB, PageSize, Stream};
use vbar::{ErrorCode, Fault, ModelBar, Runtime};

const PAGE_BYTES: u64 = 64 * KIB;
/// Tensors that are faulted, of each end of a model.
const TENSORS_MAX: usize = 24;
/// Bytes of a tensor that are compared.
const COMPARED_BYTES: usize = 256;

struct World {
    sim: Arc<Sim>,
    runtime: Runtime,
}

/// One device for all inputs: what an input leaves behind is found at its end.
fn world() -> &'static World {
    static WORLD: OnceLock<World> = OnceLock::new();
    WORLD.get_or_init(|| {
        let sim = Sim::new(SimOptions {
            capacity: 8 * MIB,
            granularity: PAGE_BYTES,
            poison: true,
            on_violation: OnViolation::Record,
            ..SimOptions::default()
        });
        let options = RuntimeOptions {
            page_size: PageSize::new(PAGE_BYTES).expect("a power of two"),
            budget_bytes: Some(16 * PAGE_BYTES),
            headroom_bytes: Some(0),
            threads: Some(Threads::Off),
            ..RuntimeOptions::default()
        };
        let runtime = Runtime::open(sim.driver(), DeviceOrdinal(0), options).expect("a runtime");
        World { sim, runtime }
    })
}

/// Opens what is at `path` and uses it. Whether it is a model.
pub(super) fn check(path: &Path) -> bool {
    let model = match Model::open(path) {
        Ok(model) => model,
        Err(error) => {
            let code = error.code();
            assert!(matches!(code, ErrorCode::Format | ErrorCode::Io), "{code:?}: {error}");
            super::check_words(&error.to_string());
            return false;
        }
    };
    check_table(&model);
    let world = world();
    let is_empty = model.total_bytes() == 0;
    match world.runtime.bind_model(model) {
        Ok(bar) => check_bar(world, &bar),
        Err(error) => {
            let code = error.code();
            // No byte at all, or more than any address space has.
            let expected =
                code == ErrorCode::NoAddresses || code == ErrorCode::InvalidArgument && is_empty;
            assert!(expected, "{code:?}: {error}");
            super::check_words(&error.to_string());
        }
    }
    check_nothing_left(world);
    true
}

/// Every file of a model that was opened at `folder` is named by a path that stays in it.
pub(super) fn check_paths(path: &Path, folder: &Path) {
    let Ok(model) = Model::open(path) else { return };
    for file in model.files() {
        let name = file.path().expect("it was opened by one");
        let within = name.strip_prefix(folder).expect("a file of the folder");
        let plain = within.components().all(|part| matches!(part, Component::Normal(_)));
        assert!(plain, "{} was opened", file.name());
    }
}

/// What a table of tensors promises, whoever wrote the headers.
fn check_table(model: &Model) {
    let mut total = 0_u64;
    for tensor in model.tensors() {
        let file = &model.files()[tensor.file];
        let end = tensor.offset.checked_add(tensor.bytes).expect("within 64 bits");
        assert!(end <= file.bytes(), "tensor {:?} ends behind its file", tensor.name);
        total = total.checked_add(tensor.bytes).expect("within 64 bits");
        let found = model.find(&tensor.name).expect("its name is in the table");
        assert_eq!(found, tensor);
        if tensor.bytes > 0 {
            assert_eq!(model.tensor_at(tensor.file, tensor.offset), Some(tensor));
        }
    }
    assert_eq!(total, model.total_bytes());
    // What `vbar inspect` draws.
    for page_bytes in [4 * KIB, 16 * MIB] {
        let page = PageSize::new(page_bytes).expect("a power of two");
        let Ok(layout) = lay_out(&model.layout_items(), page, 0) else { continue };
        assert!(layout.binding.is_valid() && layout.binding.end() <= layout.end);
        assert_eq!(layout.binding.bound_bytes(), total);
    }
}

fn check_bar(world: &World, bar: &ModelBar) {
    let _context = world.runtime.device().enter_context().expect("a context");
    let count = bar.model().tensors().len();
    let last = count.saturating_sub(TENSORS_MAX).max(TENSORS_MAX);
    for tensor in (0..count).filter(|at| *at < TENSORS_MAX || *at >= last) {
        let stream = Stream::DEFAULT;
        match bar.fault(tensor, stream) {
            Ok(Fault::Resident(guard)) => {
                world.sim.driver().stream_synchronize(stream).expect("a stream");
                check_bytes(world, bar, tensor, guard.address().0);
            }
            Ok(Fault::HostMapped(_)) => panic!("nobody asked for that"),
            Ok(Fault::Offloaded(refused)) => {
                let bytes = bar.model().tensors()[tensor].bytes;
                assert!(bytes > 8 * PAGE_BYTES, "{bytes} bytes are offloaded: {refused}");
            }
            Err(error) => panic!("tensor {tensor}: {error:?}"),
        }
    }
}

/// The bytes of both ends of a tensor are those of its file.
fn check_bytes(world: &World, bar: &ModelBar, tensor: usize, address: u64) {
    let tensor = &bar.model().tensors()[tensor];
    let file =
        File::open(bar.model().files()[tensor.file].path().expect("a path")).expect("a file");
    let length = (tensor.bytes as usize).min(COMPARED_BYTES);
    for from in [0, tensor.bytes - length as u64] {
        let mut expected = vec![0; length];
        file.read_exact_at(&mut expected, tensor.offset + from).expect("its bytes");
        let place = vbar::units::DeviceAddress(address + from);
        let found = world.sim.read_bytes(place, length).expect("mapped");
        assert!(found == expected, "tensor {:?} has other bytes", tensor.name);
    }
}

fn check_nothing_left(world: &World) {
    let numbers = world.runtime.statistics();
    assert_eq!(numbers.memory.quarantined_bytes, 0);
    assert_eq!(numbers.memory.bars, 0, "a VBAR is left");
    let violations = world.sim.violations();
    assert!(violations.is_empty(), "{violations:?}");
}
