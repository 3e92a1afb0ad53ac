//! What a request and its free cost from a cache, beside the least that they could: a lock that
//! nobody wants and a look into a hash table, twice.
//!
//! One thread, then several on streams of their own, then several on one stream. Nothing here
//! passes or fails. `VBAR_BENCH_DEVICE=sim` takes the simulated device, where telling streams apart
//! costs more than on a real one; the default stream needs no driver call on either.

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::time::Instant;

use parking_lot::Mutex;
use vbar::driver::Driver;
use vbar::driver::select::{Selection, open};
use vbar::torch::Allocator;
use vbar::units::{MIB, Stream};
use vbar::{Runtime, RuntimeOptions};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const ROUNDS: usize = 31;
const PAIRS: u32 = 50_000;
const THREADS: usize = 8;

fn main() -> Outcome<()> {
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
