//! A small inference engine whose model is larger than the memory that it may use.
//!
//! ```sh
//! cargo run --example engine                          # a model of its own, 96 MiB, in 6 MiB
//! cargo run --example engine -- MODEL [BUDGET_MIB]    # a safetensors model, in half of its size
//! ```
//!
//! Two sequences run through all layers, pass after pass, each on a stream of its own. Before a
//! layer is launched its weight is faulted for the stream: it is resident, at the address that it
//! had from the start, or it is offloaded and the host computes the layer. A layer is the library's
//! checksum kernel, which runs on a GPU and on the simulated device alike: it adds a number made of
//! the weight to a word of the activations. The results are compared with those of the host alone.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vbar::driver::select::{Selection, open};
use vbar::driver::{Driver, KernelCall, kernel};
use vbar::host::locked::{LockedSlot, allocate};
use vbar::memory::pager::HeldPins;
use vbar::model::synth::synthesize;
use vbar::units::{DeviceAddress, MIB, PageSize, Stream};
use vbar::{Allocation, AllocationFault, Error, ErrorCode, Fault, Guard, Result};
use vbar::{ModelBar, Runtime, RuntimeOptions};

const PASSES: u64 = 4;
const SEQUENCES: usize = 2;
/// Numbers of a sequence's activations.
const WIDTH: usize = 1024;
const STATE_BYTES: usize = WIDTH * size_of::<u64>();
const OWN_BYTES: u64 = 96 * MIB;
const OWN_BUDGET: u64 = 6 * MIB;

/// A sequence of tokens, as far as memory goes: its stream and its activations.
struct Sequence<'a> {
    stream: Stream,
    /// Keeps the activations on the device as long as the sequence lives.
    state: Guard<'a>,
    /// Page-locked: where the activations meet the host.
    host: LockedSlot,
    expected: Vec<u64>,
}

struct Engine {
    runtime: Runtime,
    driver: Arc<dyn Driver>,
    model: ModelBar,
    /// Where each weight is on the device. It never changes.
    addresses: Vec<DeviceAddress>,
}

/// A model of our own, gone with the program.
struct OwnModel(PathBuf);

impl OwnModel {
    fn write() -> Result<Self> {
        let name = format!("vbar-engine-{}.safetensors", std::process::id());
        let model = Self(std::env::temp_dir().join(name));
        synthesize(&model.0, OWN_BYTES, 1)?;
        Ok(model)
    }
}

impl Drop for OwnModel {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (path, own) = match arguments.next() {
        Some(path) => (PathBuf::from(path), None),
        None => {
            let own = OwnModel::write()?;
            (own.0.clone(), Some(own))
        }
    };
    let engine = Engine::open(&path)?;
    let budget = match arguments.next().map(|text| text.parse::<u64>()) {
        Some(Ok(mebibytes)) => mebibytes * MIB,
        Some(Err(error)) => return Err(failed(format!("the budget in MiB: {error}"))),
        None if own.is_some() => OWN_BUDGET,
        None => engine.model.model().total_bytes() / 2 + 4 * MIB,
    };
    engine.runtime.set_budget(Some(budget))?;
    println!("budget {:.1} MiB", mebibytes(budget));

    let states = engine.runtime.create_bar((SEQUENCES * STATE_BYTES) as u64)?;
    let allocations: Vec<Allocation> =
        (0..SEQUENCES).map(|_| states.allocate(STATE_BYTES as u64)).collect::<Result<_>>()?;
    let mut sequences: Vec<Sequence<'_>> =
        allocations.iter().map(|allocation| engine.start(allocation)).collect::<Result<_>>()?;
    let mut wrong = 0;
    for pass in 0..PASSES {
        wrong += engine.run_pass(&mut sequences, pass)?;
    }
    engine.print_statistics();
    engine.end(sequences)?;
    if wrong > 0 {
        return Err(failed(format!("{wrong} results are wrong")));
    }
    println!("all results are right");
    Ok(())
}

fn failed(text: String) -> Error {
    Error::new(ErrorCode::InvalidArgument, text)
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}

impl Engine {
    /// A GPU where there is one, else the simulated device; `VBAR_DRIVER` says which by name.
    fn open(path: &Path) -> Result<Self> {
        let chosen = open(&Selection::Auto)?;
        println!("{}", chosen.how);
        let page_size = PageSize::new(2 * MIB).expect("a power of two");
        let options = RuntimeOptions { page_size, ..RuntimeOptions::default() };
        let runtime = Runtime::open(chosen.driver, chosen.device, options)?;
        let driver = Arc::clone(&runtime.device().driver);
        driver.ctx_set_current(Some(runtime.device().context))?;
        driver.module_load()?;
        let model = runtime.open_model(path)?;
        let layers = model.model().tensors();
        println!("{} layers, {:.1} MiB", layers.len(), mebibytes(model.model().total_bytes()));
        let addresses = (0..layers.len()).map(|layer| model.address(layer)).collect();
        Ok(Self { runtime, driver, model, addresses })
    }

    /// The activations of a sequence: memory that the engine writes itself, on the sequence's
    /// stream. As long as the guard lives they stay where they are.
    fn start<'a>(&self, allocation: &'a Allocation) -> Result<Sequence<'a>> {
        let stream = self.driver.stream_create()?;
        let state = match allocation.fault(stream)? {
            AllocationFault::Refill(fill) => {
                self.driver.memset_d8_async(fill.address(), 0, fill.bytes(), stream)?;
                fill.commit(stream)?
            }
            other => return Err(failed(format!("no room for the activations: {other:?}"))),
        };
        let mut host = allocate(&self.driver, 1, STATE_BYTES)?;
        let host = host.pop().expect("one was asked for");
        Ok(Sequence { stream, state, host, expected: vec![0; WIDTH] })
    }

    /// Runs all layers for all sequences. Returns how many results were wrong.
    fn run_pass(&self, sequences: &mut [Sequence<'_>], pass: u64) -> Result<usize> {
        let (mut on_device, mut on_host) = (0, 0);
        for layer in 0..self.addresses.len() {
            for sequence in &mut *sequences {
                match self.run_layer(sequence, layer)? {
                    true => on_device += 1,
                    false => on_host += 1,
                }
            }
        }
        for layer in 0..self.addresses.len() {
            let number = kernel::checksum(&self.read_weight(layer)?, 0);
            for sequence in &mut *sequences {
                let word = &mut sequence.expected[layer % WIDTH];
                *word = word.wrapping_add(number);
            }
        }
        let mut wrong = 0;
        for sequence in &mut *sequences {
            wrong += usize::from(self.download(sequence)? != sequence.expected);
        }
        println!(
            "pass {}: {on_device} layers on the device, {on_host} on the host, {wrong} of {} \
             results wrong",
            pass + 1,
            sequences.len()
        );
        Ok(wrong)
    }

    /// Enqueues a layer of a sequence. Returns whether it runs on the device.
    fn run_layer(&self, sequence: &mut Sequence<'_>, layer: usize) -> Result<bool> {
        let weight = match self.model.fault(layer, sequence.stream)? {
            Fault::Resident(weight) | Fault::HostMapped(weight) => weight,
            Fault::Offloaded(_) => return self.run_on_host(sequence, layer).map(|()| false),
        };
        assert_eq!(weight.address(), self.addresses[layer], "an address never changes");
        let call = KernelCall::Checksum {
            source: self.addresses[layer],
            bytes: weight.bytes(),
            first_word: 0,
            delay_nanos: 0,
            target: sequence.state.address().offset((layer % WIDTH * size_of::<u64>()) as u64),
        };
        self.driver.launch_kernel(call, sequence.stream)?;
        // The launch is behind us: the weight stays until it is done, and not longer than it must.
        weight.unpin()?;
        Ok(true)
    }

    /// The layer on the host: the activations go there and back.
    fn run_on_host(&self, sequence: &mut Sequence<'_>, layer: usize) -> Result<()> {
        let mut state = self.download(sequence)?;
        let word = &mut state[layer % WIDTH];
        *word = word.wrapping_add(kernel::checksum(&self.read_weight(layer)?, 0));
        for (bytes, word) in sequence.host.bytes_mut().chunks_exact_mut(8).zip(state) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let target = sequence.state.address();
        sequence.host.copy_to_device(0..STATE_BYTES, target, sequence.stream)?;
        // The page-locked bytes are the copy's until it is done.
        Ok(self.driver.stream_synchronize(sequence.stream)?)
    }

    /// The activations, when everything that was enqueued before has run.
    fn download(&self, sequence: &mut Sequence<'_>) -> Result<Vec<u64>> {
        let source = sequence.state.address();
        sequence.host.copy_from_device(0..STATE_BYTES, source, sequence.stream)?;
        self.driver.stream_synchronize(sequence.stream)?;
        let words = sequence.host.bytes_mut().chunks_exact(8);
        Ok(words.map(|word| u64::from_le_bytes(word.try_into().expect("eight"))).collect())
    }

    /// A weight's bytes for the host; another engine has a mapping of the file, or its own copies.
    fn read_weight(&self, layer: usize) -> Result<Vec<u8>> {
        let model = self.model.model();
        let tensor = &model.tensors()[layer];
        let mut bytes = vec![0; tensor.bytes as usize];
        model.files()[tensor.file].read_exact_at(tensor.offset, &mut bytes)?;
        Ok(bytes)
    }

    fn print_statistics(&self) {
        let told = self.runtime.statistics();
        println!(
            "{} hits, {} misses, {} pages evicted, {:.1} MiB filled, at most {:.1} MiB held",
            told.hits,
            told.misses,
            told.pages_evicted,
            mebibytes(told.bytes_filled),
            mebibytes(told.memory.peak_bytes)
        );
    }

    fn end(&self, sequences: Vec<Sequence<'_>>) -> Result<()> {
        for sequence in sequences {
            let stream = sequence.stream;
            drop(sequence);
            let ended = self.model.vbar().end_of_run(stream, HeldPins::Keep)?;
            assert!(ended.held.is_empty(), "weights are pinned still");
            // Before the stream goes: its fences outlive it.
            self.runtime.retire_stream(stream)?;
            self.driver.stream_destroy(stream)?;
        }
        Ok(())
    }
}
