//! What a request and its free cost from a cache, beside the least that they could: a lock that
//! nobody wants and a look into a hash table, twice.
//!
//! One thread, then several on streams of their own, then several on one stream. Nothing here
//! passes or fails. `VBAR_BENCH_DEVICE=sim` takes the simulated device, where telling streams apart
//! costs more than on a real one; the default stream needs no driver call on either.
//!
//! The same pairs go through the C ABI of the library as a shared object, as PyTorch calls it:
//! `VBAR_BENCH_LIBRARY` names it, else it is sought beside the program. Last, traces are replayed
//! on a simulated device, and how much of what the allocator held was asked for is told: two that
//! are made here, two that `torch_replay.py` recorded on a GPU, and that of a file which
//! `VBAR_BENCH_TRACE` names. `VBAR_BENCH_ONLY=traces` does nothing else.
#![expect(unsafe_code, reason = "calls the C ABI as PyTorch does")]

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use std::time::Instant;

use libloading::Library;
use parking_lot::Mutex;
use vbar::driver::Driver;
use vbar::driver::select::{Selection, open};
use vbar::ffi::VbarStatus;
use vbar::ffi::device::VbarDeviceOptions;
use vbar::torch::{Allocator, OutOfMemory};
use vbar::units::{MIB, PageSize, Stream};
use vbar::{Runtime, RuntimeOptions};

#[path = "torch_traces/trace.rs"]
mod trace;

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;
type Malloc = unsafe extern "C-unwind" fn(usize, i32, usize) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut c_void, usize, i32, usize);
type Configure = unsafe extern "C" fn(*const VbarDeviceOptions) -> VbarStatus;

const ROUNDS: usize = 31;
const PAIRS: u32 = 50_000;
const THREADS: usize = 8;

fn main() -> Outcome<()> {
    if std::env::var("VBAR_BENCH_ONLY").as_deref() != Ok("traces") {
        costs()?;
    }
    traces()
}

/// Replays traces, each on an allocator of its own.
fn traces() -> Outcome<()> {
    let mut all = vec![
        ("training".to_owned(), trace::training(7)),
        ("sampling".to_owned(), trace::sampling(7)),
    ];
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/torch_traces/traces");
    let mut paths = ["training.txt.gz", "sampling.txt.gz"].map(|name| recorded.join(name)).to_vec();
    paths.extend(std::env::var_os("VBAR_BENCH_TRACE").map(PathBuf::from));
    for path in paths {
        let events = trace::parse(&trace::read(&path)?)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        all.push((name, events));
    }
    for (name, events) in all {
        let text: String = events.iter().map(|event| format!("{event}\n")).collect();
        if trace::parse(&text)? != events {
            return Err(format!("{name}: the text of the trace is another one").into());
        }
        for page_bytes in [2 * MIB, 16 * MIB] {
            let free = replayed(&events, page_bytes, None)?.ok_or("no memory for a trace")?;
            println!(
                "{name}, {} events, pages of {:>2} MiB: {:>6.2} % of {:>6} MiB, {:>5.0} ns each, \
                 {} pages mapped",
                events.len(),
                page_bytes / MIB,
                free.utilisation() * 100.0,
                free.reserved_peak / MIB,
                free.nanos_an_event,
                free.mapped_pages,
            );
            // What is cached is kept while nobody wants it: what is needed shows when all want it.
            for percent in 100..=200 {
                let budget = (free.live_peak * percent / 100).next_multiple_of(page_bytes);
                if let Some(tight) = replayed(&events, page_bytes, Some(budget))? {
                    let part = tight.live_peak as f64 / budget as f64 * 100.0;
                    println!("    it runs in {} MiB: {part:>6.2} % of them", budget / MIB);
                    break;
                }
            }
        }
    }
    Ok(())
}

/// Replays on an allocator of its own; `None` where the budget does not do.
fn replayed(
    events: &[trace::Event],
    page_bytes: u64,
    budget_bytes: Option<u64>,
) -> Outcome<Option<trace::Replayed>> {
    let chosen = open(&Selection::parse("sim:capacity=128G,seed=7")?)?;
    let page_size = PageSize::new(page_bytes).ok_or("a page is a power of two")?;
    let options = RuntimeOptions { page_size, budget_bytes, ..RuntimeOptions::default() };
    let runtime = Runtime::open(Arc::clone(&chosen.driver), chosen.device, options)?;
    chosen.driver.ctx_set_current(Some(runtime.device().context))?;
    let allocator = runtime.torch_allocator()?;
    match trace::replay(&allocator, events, || Ok(chosen.driver.stream_create()?)) {
        Ok(replayed) => Ok(Some(replayed)),
        Err(error) if error.is::<OutOfMemory>() => Ok(None),
        Err(error) => Err(error),
    }
}

fn costs() -> Outcome<()> {
    let word = match std::env::var("VBAR_BENCH_DEVICE").as_deref() {
        Ok("sim") => "sim:capacity=8G",
        _ => "cuda",
    };
    let chosen = open(&Selection::parse(word)?)?;
    let (driver, device) = (chosen.driver, chosen.device);
    let options = RuntimeOptions { budget_bytes: Some(2 << 30), ..RuntimeOptions::default() };
    let runtime = Runtime::open(Arc::clone(&driver), device, options)?;
    let allocator = runtime.torch_allocator()?;
    let context = Some(runtime.device().context);
    driver.ctx_set_current(context)?;
    println!("driver: {}, medians of {ROUNDS} rounds of {PAIRS} pairs", driver.description());
    println!("floor, a lock and a hash table twice: {:>6.0} ns", median(floor));
    let stream = driver.stream_create()?;
    for (name, stream) in [("default stream", Stream::DEFAULT), ("a stream", stream)] {
        for bytes in [512, 20 << 10, 700 << 10, 20 * MIB as usize, 300 * MIB as usize] {
            // What a step has live beside it.
            let held: Vec<u64> = (0..1000)
                .map(|i| allocator.malloc(512 + i % 7 * 4096, stream))
                .collect::<Result<_, _>>()?;
            let time = median(|| pairs(&allocator, bytes, stream));
            println!("{name:>14}, {bytes:>9} bytes: {time:>6.0} ns a pair");
            held.into_iter().for_each(|address| {
                black_box(allocator.free(address));
            });
        }
    }
    let fragments = median(|| fragmented(&allocator, stream));
    println!("one of 64 sizes among 2000 fragments: {fragments:>6.0} ns a pair");
    for shared in [false, true] {
        let times = threads(&driver, &allocator, context, shared)?;
        let name = if shared { "one stream" } else { "a stream each" };
        println!("{THREADS} threads on {name}: {times:>6.0} ns a pair and thread");
    }
    drop(allocator);
    drop(runtime);
    through_c(word)
}

/// The pair as PyTorch makes it, of a library that is opened by itself.
fn through_c(word: &str) -> Outcome<()> {
    let beside = || Ok(std::env::current_exe()?.with_file_name("libvbar.so"));
    let path = std::env::var_os("VBAR_BENCH_LIBRARY").map(PathBuf::from);
    let path: PathBuf = path.map_or_else(beside, Ok::<_, std::io::Error>)?;
    // SAFETY: the library's constructors are Rust's own.
    let library = unsafe { Library::new(&path) };
    // Never unloaded: it has exit handlers.
    let library: &'static Library =
        Box::leak(Box::new(library.map_err(|error| format!("{}: {error}", path.display()))?));
    // SAFETY: the signature is that of vbar.h.
    let malloc = *unsafe { library.get::<Malloc>("vbar_torch_malloc")? };
    // SAFETY: as above.
    let free = *unsafe { library.get::<Free>("vbar_torch_free")? };
    // SAFETY: as above.
    let configure = *unsafe { library.get::<Configure>("vbar_torch_configure")? };
    let driver = CString::new(word)?;
    // SAFETY: zeros are the defaults of every field.
    let mut options: VbarDeviceOptions = unsafe { std::mem::zeroed() };
    options.size = size_of::<VbarDeviceOptions>();
    options.driver = driver.as_ptr();
    options.budget_bytes = 2 << 30;
    // SAFETY: the options are read in the call.
    let status = unsafe { configure(&raw const options) };
    println!("C ABI, {}, configured with {status:?}", path.display());
    let pairs = |bytes: usize| {
        per_pair(|| {
            // SAFETY: the function takes any numbers.
            let place = unsafe { malloc(black_box(bytes), 0, 0) };
            // SAFETY: the block is of this library, and is freed once.
            unsafe { free(black_box(place), bytes, 0, 0) };
        })
    };
    // SAFETY: as above. NULL here would make every pair nothing.
    let first = unsafe { malloc(512, 0, 0) };
    if first.is_null() {
        return Err("the library has no memory".into());
    }
    for bytes in [512, 20 << 10, 700 << 10, 20 * MIB as usize] {
        let time = median(|| pairs(bytes));
        println!("C ABI, default stream, {bytes:>9} bytes: {time:>6.0} ns a pair");
    }
    let start = Barrier::new(THREADS);
    let times: Vec<f64> = std::thread::scope(|scope| {
        let work = || {
            start.wait();
            (0..5).map(|_| pairs(4096)).sum::<f64>() / 5.0
        };
        let workers: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).collect()
    });
    let mean = times.iter().sum::<f64>() / times.len() as f64;
    println!("C ABI, {THREADS} threads on the default stream: {mean:>6.0} ns a pair and thread");
    // SAFETY: as above.
    unsafe { free(first, 512, 0, 0) };
    Ok(())
}

/// Nanoseconds a pair, in the median round.
fn median(mut round: impl FnMut() -> f64) -> f64 {
    let mut times: Vec<f64> = (0..ROUNDS).map(|_| round()).collect();
    times.sort_by(f64::total_cmp);
    times[ROUNDS / 2]
}

fn per_pair(work: impl Fn()) -> f64 {
    let started = Instant::now();
    (0..PAIRS).for_each(|_| work());
    started.elapsed().as_nanos() as f64 / f64::from(PAIRS)
}

fn floor() -> f64 {
    let table: Mutex<HashMap<u64, u64>> = Mutex::new((0..1000).map(|i| (i * 512, i)).collect());
    per_pair(|| {
        table.lock().insert(black_box(512 << 20), 1);
        black_box(table.lock().remove(&black_box(512 << 20)));
    })
}

fn pairs(allocator: &Allocator, bytes: usize, stream: Stream) -> f64 {
    per_pair(|| {
        let address = allocator.malloc(black_box(bytes), stream).unwrap_or(0);
        black_box(allocator.free(black_box(address)));
    })
}

/// Pairs of many sizes while every second of 4000 blocks is free.
fn fragmented(allocator: &Allocator, stream: Stream) -> f64 {
    let size = |i: usize| (33 + i * 37 % 64) << 10;
    let blocks = (0..4000).map(|i| allocator.malloc(size(i), stream).unwrap_or(0));
    let blocks: Vec<u64> = blocks.collect();
    let (freed, kept): (Vec<_>, Vec<_>) = blocks.iter().enumerate().partition(|(i, _)| i % 2 == 0);
    freed.into_iter().for_each(|(_, address)| {
        black_box(allocator.free(*address));
    });
    let next = std::cell::Cell::new(0);
    let time = per_pair(|| {
        next.set(next.get() + 1);
        let address = allocator.malloc(black_box(size(next.get())), stream).unwrap_or(0);
        black_box(allocator.free(black_box(address)));
    });
    kept.into_iter().for_each(|(_, address)| {
        black_box(allocator.free(*address));
    });
    time
}

/// Nanoseconds a pair and thread, all threads at once.
fn threads(
    driver: &Arc<dyn Driver>,
    allocator: &Arc<Allocator>,
    context: Option<vbar::driver::Context>,
    shared: bool,
) -> Outcome<f64> {
    let start = Barrier::new(THREADS);
    let one = driver.stream_create()?;
    let times = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| -> Outcome<f64> {
                    driver.ctx_set_current(context)?;
                    let stream = if shared { one } else { driver.stream_create()? };
                    start.wait();
                    Ok((0..5).map(|_| pairs(allocator, 4096, stream)).sum::<f64>() / 5.0)
                })
            })
            .collect();
        let times = workers.into_iter().map(|worker| match worker.join() {
            Ok(time) => time,
            Err(_) => Err("a thread panicked".into()),
        });
        times.collect::<Outcome<Vec<f64>>>()
    })?;
    Ok(times.iter().sum::<f64>() / times.len() as f64)
}
