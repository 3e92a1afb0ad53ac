//! Several callers of the library in one process: Rust, C and PyTorch's entry points of one copy of
//! it, which share a device, and a second copy (a plug-in's, say), which shares the machine.
#![expect(unsafe_code, reason = "calls the C ABI, of this copy and of another one")]

use std::ffi::{CString, c_char};
use std::path::Path;
use std::process::Command;

use libloading::Library;
use tempfile::TempDir;
use vbar::driver::select::{self, Selection};
use vbar::driver::sim::{Sim, SimOptions};
use vbar::ffi::VbarStatus;
use vbar::ffi::device::{self, VBAR_HEADROOM_NONE, VbarDevice, VbarDeviceOptions};
use vbar::ffi::fault::{VbarFault, VbarOutcome};
use vbar::ffi::model::{self, VbarModel};
use vbar::ffi::token::{self, VbarToken};
use vbar::ffi::torch;
use vbar::model::synth::{synthesize, tensor_seed};
use vbar::units::{DeviceAddress, DeviceOrdinal, Stream};
use vbar::{Fault, ModelBar, Runtime, RuntimeOptions};

use crate::world::{P, budget_options, pattern_bytes};

const SEED: u64 = 4;
const MODEL: u64 = 24;
const BUDGET: u64 = 10;
const RESIDENT: u32 = VbarOutcome::Resident as u32;
const SPEC: &str = "capacity=64M,granularity=64K,seed=77";

/// Runs a test of this file in a process of its own, where it may leave everything open.
#[track_caller]
fn check_alone(test: &str) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    synthesize(&path, MODEL * P, SEED).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("callers::{test}"), "--ignored", "--nocapture"]);
    let output = command.env("VBAR_TEST_MODEL", &path).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    assert!(text.contains("the end was reached"), "{text}");
}

/// Ends the process with whatever is open.
fn end() -> ! {
    println!("the end was reached");
    std::process::exit(0)
}

fn path() -> std::path::PathBuf {
    std::env::var_os("VBAR_TEST_MODEL").unwrap().into()
}

fn open_in_rust() -> (Runtime, std::sync::Arc<Sim>) {
    let options = SimOptions::parse(SPEC).unwrap();
    let opened = select::open_shared(&Selection::Sim(options)).unwrap();
    let runtime = Runtime::open(opened.driver, DeviceOrdinal(0), budget_options(BUDGET)).unwrap();
    (runtime, opened.sim.unwrap())
}

fn c_options(driver: &CString) -> VbarDeviceOptions {
    VbarDeviceOptions {
        size: size_of::<VbarDeviceOptions>(),
        driver: driver.as_ptr(),
        budget_bytes: BUDGET * P,
        headroom_bytes: VBAR_HEADROOM_NONE,
        page_bytes: P,
        // SAFETY: plain C data, zeros are its defaults.
        ..unsafe { std::mem::zeroed() }
    }
}

/// A pass over the model by Rust; every byte is the file's.
#[track_caller]
fn check_pass(model: &ModelBar, sim: &Sim) {
    for (index, tensor) in model.model().tensors().iter().enumerate() {
        let Fault::Resident(weight) = model.fault(index, Stream::LEGACY).unwrap() else {
            panic!("it fits");
        };
        check_bytes(sim, weight.address(), &tensor.name, tensor.bytes);
    }
}

#[track_caller]
fn check_bytes(sim: &Sim, address: DeviceAddress, name: &str, bytes: u64) {
    sim.spare(|| vbar::driver::Driver::ctx_synchronize(sim)).unwrap();
    let found = sim.read_bytes(address, bytes as usize).unwrap();
    assert!(found == pattern_bytes(bytes, tensor_seed(SEED, name)), "{name}");
}

#[test]
fn rust_c_and_pytorch_share_one_device() {
    check_alone("shares_one_device");
}

#[test]
#[ignore = "for a process of its own: PyTorch's devices are never closed"]
fn shares_one_device() {
    let (runtime, sim) = open_in_rust();
    let context = runtime.device().context;
    vbar::driver::Driver::ctx_set_current(&*sim, Some(context)).unwrap();
    let ours = runtime.open_model(&path()).unwrap();
    let driver = CString::new(format!("sim:{SPEC}")).unwrap();
    let (options, name) = (c_options(&driver), CString::new(path().to_str().unwrap()).unwrap());
    let (mut id, mut theirs) = (VbarDevice { id: 0 }, VbarModel { id: 0 });
    // SAFETY: the options and the name live during the calls, the outputs are ours.
    let status = unsafe { device::vbar_device_open(&raw const options, &raw mut id) };
    assert_eq!(status, VbarStatus::Ok);
    // SAFETY: as above.
    let status = unsafe { model::vbar_model_open(id, name.as_ptr(), &raw mut theirs) };
    assert_eq!(status, VbarStatus::Ok);
    // SAFETY: as above.
    let status = unsafe { torch::vbar_torch_configure(&raw const options) };
    assert_eq!(status, VbarStatus::Ok);
    let tensors = ours.model().tensors().to_vec();
    for round in 0..4u64 {
        // All three in one budget, whoever was first.
        let block = torch::vbar_torch_malloc((3 * P) as usize, 0, 0);
        assert!(!block.is_null(), "round {round}");
        check_pass(&ours, &sim);
        for (index, tensor) in tensors.iter().enumerate() {
            // SAFETY: plain C data, of which zeros are a value.
            let mut told: VbarFault = unsafe { std::mem::zeroed() };
            // SAFETY: the output is ours.
            let status = unsafe { model::vbar_model_fault(theirs, index as u64, 0, &raw mut told) };
            assert_eq!((status, told.outcome), (VbarStatus::Ok, RESIDENT), "{}", tensor.name);
            check_bytes(&sim, DeviceAddress(told.address), &tensor.name, tensor.bytes);
            assert_eq!(token::vbar_token_unpin(told.token, 0), VbarStatus::Ok);
        }
        assert!(runtime.used_bytes() <= BUDGET * P, "{}", runtime.used_bytes());
        torch::vbar_torch_free(block, (3 * P) as usize, 0, 0);
    }
    assert!(runtime.is_valid());
    assert_eq!(sim.violations(), Vec::<String>::new());
    // C closes what is its own: the others go on.
    assert_eq!(model::vbar_model_close(theirs), VbarStatus::Ok);
    assert_eq!(device::vbar_device_close(id), VbarStatus::Ok);
    assert_eq!(device::vbar_device_close(id), VbarStatus::StaleHandle);
    check_pass(&ours, &sim);
    // Rust drops its own: PyTorch goes on.
    drop((ours, runtime));
    let block = torch::vbar_torch_malloc(P as usize, 0, 0);
    assert!(!block.is_null());
    assert_eq!(sim.violations(), Vec::<String>::new());
    end();
}

#[test]
fn two_copies_of_the_library_work_in_one_process() {
    check_alone("works_beside_another_copy");
}

type Open = unsafe extern "C" fn(*const VbarDeviceOptions, *mut VbarDevice) -> VbarStatus;
type OpenModel = unsafe extern "C" fn(VbarDevice, *const c_char, *mut VbarModel) -> VbarStatus;
type FaultModel = unsafe extern "C" fn(VbarModel, u64, usize, *mut VbarFault) -> VbarStatus;
type Unpin = unsafe extern "C" fn(VbarToken, usize) -> VbarStatus;
type Copy = unsafe extern "C" fn(VbarDevice, *mut u8, u64, usize, usize) -> VbarStatus;
type Synchronize = unsafe extern "C" fn(VbarDevice, usize) -> VbarStatus;

/// The library that cargo built beside this test.
fn library() -> Library {
    let path = std::env::current_exe().unwrap().parent().unwrap().join("libvbar.so");
    // SAFETY: the library has no initialisers that ask for anything.
    let library = unsafe { Library::new(&path) };
    library.unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn symbol<T: std::marker::Copy>(library: &Library, name: &str) -> T {
    // SAFETY: the callers name a function of the header with its type.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    *found.unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Passes of the other copy over the model, every byte checked; everything stays open.
fn other_copy(library: &Library, path: &Path, passes: u64) {
    let driver = CString::new("sim:capacity=64M,granularity=64K").unwrap();
    let mut options = c_options(&driver);
    options.threads = device::VbarThreads::On as u32;
    let name = CString::new(path.to_str().unwrap()).unwrap();
    let tensors = vbar::host::model_files::Model::open(path).unwrap().tensors().to_vec();
    let (mut id, mut theirs) = (VbarDevice { id: 0 }, VbarModel { id: 0 });
    let open: Open = symbol(library, "vbar_device_open");
    let open_model: OpenModel = symbol(library, "vbar_model_open");
    let fault: FaultModel = symbol(library, "vbar_model_fault");
    let unpin: Unpin = symbol(library, "vbar_token_unpin");
    let copy: Copy = symbol(library, "vbar_sim_copy_to_host");
    let synchronize: Synchronize = symbol(library, "vbar_sim_stream_synchronize");
    // SAFETY: options and name live during the calls, the outputs are ours.
    assert_eq!(unsafe { open(&raw const options, &raw mut id) }, VbarStatus::Ok);
    // SAFETY: as above.
    assert_eq!(unsafe { open_model(id, name.as_ptr(), &raw mut theirs) }, VbarStatus::Ok);
    for index in (0..passes).flat_map(|_| 0..tensors.len()) {
        let tensor = &tensors[index];
        // SAFETY: plain C data, of which zeros are a value.
        let mut told: VbarFault = unsafe { std::mem::zeroed() };
        // SAFETY: the output is ours.
        let status = unsafe { fault(theirs, index as u64, 0, &raw mut told) };
        assert_eq!((status, told.outcome), (VbarStatus::Ok, RESIDENT), "{}", tensor.name);
        let mut found = vec![0; tensor.bytes as usize];
        // SAFETY: the target has room, and stays until the copy is done.
        let status = unsafe { copy(id, found.as_mut_ptr(), told.address, found.len(), 0) };
        assert_eq!(status, VbarStatus::Ok);
        // SAFETY: takes numbers.
        assert_eq!(unsafe { synchronize(id, 0) }, VbarStatus::Ok);
        assert!(found == pattern_bytes(tensor.bytes, tensor_seed(SEED, &tensor.name)));
        // SAFETY: takes numbers.
        assert_eq!(unsafe { unpin(told.token, 0) }, VbarStatus::Ok);
    }
}

#[test]
#[ignore = "for a process of its own: everything is open when it ends"]
fn works_beside_another_copy() {
    let (path, library) = (path(), library());
    let more = RuntimeOptions { threads: Some(vbar::Threads::On), ..budget_options(BUDGET) };
    let options = SimOptions::parse("capacity=64M,granularity=64K").unwrap();
    let opened = select::open_shared(&Selection::Sim(options)).unwrap();
    let sim = opened.sim.unwrap();
    let runtime = Runtime::open(opened.driver, DeviceOrdinal(0), more).unwrap();
    let ours = runtime.open_model(&path).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| other_copy(&library, &path, 8));
        let context = runtime.device().context;
        vbar::driver::Driver::ctx_set_current(&*sim, Some(context)).unwrap();
        (0..8).for_each(|_| check_pass(&ours, &sim));
    });
    // Neither copy in the child of a fork, each by itself.
    assert!(crate::forked::in_child(|| ours.fault(0, Stream::LEGACY).is_err()));
    // Two handlers at the exit, threads of both.
    std::mem::forget((ours, runtime, library));
    end();
}
