//! What a fault costs, beside the driver calls that it must make.
//!
//! A harness of its own: each figure is a ratio between two interleaved series (ours, and the raw
//! driver calls), with threads and a device behind them, which the usual harnesses do not pair.
//! Prints medians of rounds; nothing here passes or fails. `VBAR_BENCH_DEVICE=sim` takes the
//! simulated device where a real one is present.
//!
//! `cargo bench --bench faults`, or the prebuilt binary of `make device-bundle`.

use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use vbar::driver::cuda::Cuda;
use vbar::driver::sim::{Sim, SimOptions};
use vbar::driver::{Driver, FrameHandle};
use vbar::error::Result;
use vbar::options::RuntimeOptions;
use vbar::units::{DeviceAddress, DeviceOrdinal, GIB, MIB, PageSize, Stream};
use vbar::{Runtime, Vbar};

const DEVICE: DeviceOrdinal = DeviceOrdinal(0);
const ROUNDS: usize = 15;
const HITS: u32 = 100_000;
const COLD_PAGES: u64 = 64;

fn main() -> Result<()> {
    let driver = open_driver()?;
    println!("driver: {}", driver.description());
    println!("device: {}", driver.device_get_name(DEVICE)?);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("cores: {cores}, rounds: {ROUNDS}, medians below\n");
    bench_hits(&driver)?;
    bench_threads(&driver, cores)?;
    bench_cold(&driver)?;
    bench_recycled(&driver)?;
    bench_independence(&driver)
}

fn open_driver() -> Result<Arc<dyn Driver>> {
    let wanted = std::env::var("VBAR_BENCH_DEVICE").unwrap_or_default();
    if wanted != "sim" {
        match Cuda::open() {
            Ok(cuda) => return Ok(cuda),
            Err(error) => println!("no CUDA device ({error}): simulated device"),
        }
    }
    Ok(Sim::new(SimOptions::parse("capacity=24G")?).driver())
}

fn open(driver: &Arc<dyn Driver>, page: u64, budget: u64) -> Result<Runtime> {
    let options = RuntimeOptions {
        page_size: PageSize::new(page).expect("a power of two"),
        budget_bytes: Some(budget),
        headroom_bytes: Some(0),
        ..RuntimeOptions::default()
    };
    let runtime = Runtime::open(Arc::clone(driver), DEVICE, options)?;
    driver.ctx_set_current(Some(runtime.device().context))?;
    Ok(runtime)
}

/// Sorts and takes the middle.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn rounds(mut measure: impl FnMut() -> Result<f64>) -> Result<f64> {
    measure()?;
    let values: Result<Vec<f64>> = (0..ROUNDS).map(|_| measure()).collect();
    let values = values?;
    if std::env::var_os("VBAR_BENCH_ROUNDS").is_some() {
        println!("  rounds: {values:.0?}");
    }
    Ok(median(values))
}

fn nanos_each(started: Instant, count: u32) -> f64 {
    started.elapsed().as_nanos() as f64 / f64::from(count)
}

fn hit(vbar: &Vbar, range: std::ops::Range<u64>, stream: Stream) -> Result<()> {
    let guard = vbar.fault(range, stream)?.resident().expect("the page is resident");
    black_box(guard.address());
    guard.unpin()
}

/// Floor: the driver calls that a hit must make, two capture queries and one stream id.
fn bench_hits(driver: &Arc<dyn Driver>) -> Result<()> {
    let runtime = open(driver, 2 * MIB, 64 * MIB)?;
    let stream = driver.stream_create()?;
    let vbar = runtime.create_bar(16 * MIB)?;
    drop(vbar.fault(0..16 * MIB, stream)?);
    let floor = rounds(|| {
        let started = Instant::now();
        for _ in 0..HITS {
            black_box(driver.stream_is_capturing(stream)?);
            black_box(driver.stream_get_id(stream)?);
            black_box(driver.stream_is_capturing(stream)?);
        }
        Ok(nanos_each(started, HITS))
    })?;
    let cases = [
        ("1 page", 1, stream, floor),
        ("8 pages", 16 * MIB, stream, floor),
        ("1 page, no stream (no driver call)", 1, Stream::NONE, 0.0),
        ("1 page, again", 1, stream, floor),
    ];
    for (name, bytes, stream, floor) in cases {
        let ours = rounds(|| {
            let started = Instant::now();
            for _ in 0..HITS {
                hit(&vbar, 0..bytes, stream)?;
            }
            Ok(nanos_each(started, HITS))
        })?;
        println!("hit, {name}: {ours:.0} ns; its driver calls {floor:.0} ns");
    }
    let record = rounds(|| {
        let started = Instant::now();
        for _ in 0..1000 {
            let fences = &runtime.device().fences;
            let slot = fences.slot_of(stream)?.expect("a stream");
            fences.record_in_passing(stream, slot)?;
        }
        Ok(nanos_each(started, 1000))
    })?;
    println!("one fence record and query: {record:.0} ns, at most once in 50 us");
    drop(vbar);
    driver.stream_synchronize(stream)?;
    driver.stream_destroy(stream).map_err(Into::into)
}

/// Hits on different pages, a stream a thread.
fn bench_threads(driver: &Arc<dyn Driver>, cores: usize) -> Result<()> {
    let runtime = open(driver, 2 * MIB, 64 * MIB)?;
    let vbar = runtime.create_bar(32 * MIB)?;
    drop(vbar.fault(0..32 * MIB, Stream::NONE)?);
    let one = rounds(|| hits_per_second(driver, &runtime, &vbar, 1))?;
    for threads in [2, 4, 8].into_iter().filter(|threads| *threads <= cores) {
        let all = rounds(|| hits_per_second(driver, &runtime, &vbar, threads))?;
        let floor = rounds(|| floor_per_second(driver, &runtime, threads))?
            / rounds(|| floor_per_second(driver, &runtime, 1))?;
        println!(
            "hits of {threads} threads: {:.1} M/s, {:.2} times one thread's {:.1} M/s; \
             the driver calls alone scale {floor:.2} times",
            all / 1e6,
            all / one,
            one / 1e6
        );
    }
    Ok(())
}

fn hits_per_second(
    driver: &Arc<dyn Driver>,
    runtime: &Runtime,
    vbar: &Vbar,
    threads: usize,
) -> Result<f64> {
    per_second(driver, runtime, threads, |thread, stream| {
        let start = thread as u64 * 2 * MIB;
        hit(vbar, start..start + 1, stream)
    })
}

fn floor_per_second(driver: &Arc<dyn Driver>, runtime: &Runtime, threads: usize) -> Result<f64> {
    per_second(driver, runtime, threads, |_, stream| {
        black_box(driver.stream_is_capturing(stream)?);
        black_box(driver.stream_get_id(stream)?);
        black_box(driver.stream_is_capturing(stream)?);
        Ok(())
    })
}

fn per_second(
    driver: &Arc<dyn Driver>,
    runtime: &Runtime,
    threads: usize,
    work: impl Fn(usize, Stream) -> Result<()> + Sync,
) -> Result<f64> {
    let barrier = Barrier::new(threads);
    let times: Result<Vec<Duration>> = std::thread::scope(|scope| {
        let run = |thread: usize| {
            let (barrier, work) = (&barrier, &work);
            scope.spawn(move || {
                driver.ctx_set_current(Some(runtime.device().context))?;
                let stream = driver.stream_create()?;
                barrier.wait();
                let started = Instant::now();
                for _ in 0..HITS {
                    work(thread, stream)?;
                }
                let time = started.elapsed();
                driver.stream_synchronize(stream)?;
                runtime.retire_stream(stream)?;
                driver.stream_destroy(stream)?;
                Ok(time)
            })
        };
        let handles: Vec<_> = (0..threads).map(run).collect();
        handles.into_iter().map(|handle| handle.join().expect("no thread panics")).collect()
    });
    let slowest = times?.into_iter().max().unwrap_or_default();
    Ok(threads as f64 * f64::from(HITS) / slowest.as_secs_f64())
}

/// Raw calls of a cold fault: a handle and a mapping for each page, access over the whole range.
struct Raw<'a> {
    driver: &'a Arc<dyn Driver>,
    address: DeviceAddress,
    page: u64,
    frames: Vec<FrameHandle>,
}

impl<'a> Raw<'a> {
    fn new(driver: &'a Arc<dyn Driver>, page: u64) -> Result<Self> {
        let address = driver.mem_address_reserve(COLD_PAGES * page, 0)?;
        Ok(Self { driver, address, page, frames: Vec::new() })
    }

    fn at(&self, index: usize) -> DeviceAddress {
        self.address.offset(index as u64 * self.page)
    }

    fn create(&mut self) -> Result<()> {
        for _ in 0..COLD_PAGES {
            self.frames.push(self.driver.mem_create(DEVICE, self.page)?);
        }
        Ok(())
    }

    fn map(&self) -> Result<()> {
        for (index, frame) in self.frames.iter().enumerate() {
            self.driver.mem_map(self.at(index), self.page, *frame)?;
        }
        Ok(self.driver.mem_set_access(self.address, COLD_PAGES * self.page, &[DEVICE])?)
    }

    fn unmap(&self) -> Result<()> {
        (0..self.frames.len())
            .try_for_each(|index| Ok(self.driver.mem_unmap(self.at(index), self.page)?))
    }

    fn release(&mut self) -> Result<()> {
        self.frames.drain(..).try_for_each(|frame| Ok(self.driver.mem_release(frame)?))
    }
}

impl Drop for Raw<'_> {
    fn drop(&mut self) {
        let _ = self.driver.mem_address_free(self.address, COLD_PAGES * self.page);
    }
}

fn micros(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let started = Instant::now();
    work()?;
    Ok(started.elapsed().as_secs_f64() * 1e6)
}

/// Ours and raw in turn, so that both meet the same moods of the machine.
fn pairs(mut pair: impl FnMut() -> Result<(f64, f64)>) -> Result<(f64, f64, f64)> {
    pair()?;
    let values: Result<Vec<(f64, f64)>> = (0..ROUNDS).map(|_| pair()).collect();
    let values = values?;
    let ratio = median(values.iter().map(|(ours, raw)| ours / raw).collect());
    let ours = median(values.iter().map(|(ours, _)| *ours).collect());
    Ok((ours, median(values.iter().map(|(_, raw)| *raw).collect()), ratio))
}

fn bench_cold(driver: &Arc<dyn Driver>) -> Result<()> {
    for page in [2 * MIB, 16 * MIB] {
        let runtime = open(driver, page, COLD_PAGES * page)?;
        let stream = driver.stream_create()?;
        let vbar = runtime.create_bar(COLD_PAGES * page)?;
        let (ours, raw, ratio) = pairs(|| {
            let ours = micros(|| {
                vbar.fault(0..vbar.bytes(), stream)?
                    .resident()
                    .map_or_else(|| panic!("64 pages fit"), |guard| guard.unpin())
            })?;
            driver.stream_synchronize(stream)?;
            vbar.free_memory(u64::MAX)?;
            vbar.prioritise()?;
            let mut calls = Raw::new(driver, page)?;
            let raw = micros(|| calls.create().and_then(|()| calls.map()))?;
            calls.unmap()?;
            calls.release()?;
            Ok((ours, raw))
        })?;
        println!(
            "cold fault, {COLD_PAGES} pages of {} MiB: {ours:.0} us, raw calls {raw:.0} us, \
             ratio {ratio:.3}",
            page / MIB
        );
        drop(vbar);
        driver.stream_destroy(stream)?;
    }
    Ok(())
}

/// Two VBARs that take each other's frames: unmap, map and access for each page.
fn bench_recycled(driver: &Arc<dyn Driver>) -> Result<()> {
    for page in [2 * MIB, 16 * MIB] {
        let runtime = open(driver, page, COLD_PAGES * page)?;
        let stream = driver.stream_create()?;
        let bars = [runtime.create_bar(COLD_PAGES * page)?, runtime.create_bar(COLD_PAGES * page)?];
        let mut turn = 0;
        let mut calls = Raw::new(driver, page)?;
        // Raw frames come on top of the budget's: both sides hold theirs all the time.
        calls.create()?;
        calls.map()?;
        let (ours, raw, ratio) = pairs(|| {
            let vbar = &bars[turn % 2];
            turn += 1;
            vbar.prioritise()?;
            let ours = micros(|| match vbar.fault(0..vbar.bytes(), stream)?.resident() {
                Some(guard) => guard.unpin(),
                None => panic!("64 pages fit"),
            })?;
            vbar.end_of_run(stream, vbar::memory::pager::HeldPins::Keep)?;
            driver.stream_synchronize(stream)?;
            let raw = micros(|| calls.unmap().and_then(|()| calls.map()))?;
            Ok((ours, raw))
        })?;
        println!(
            "refault into recycled frames, {COLD_PAGES} pages of {} MiB: {ours:.0} us, raw calls \
             {raw:.0} us, ratio {ratio:.3}",
            page / MIB
        );
        calls.unmap()?;
        calls.release()?;
        drop(bars);
        driver.stream_destroy(stream)?;
    }
    Ok(())
}

/// The same hit and the same one-page miss, alone and among 10,000 pages in 100 VBARs.
fn bench_independence(driver: &Arc<dyn Driver>) -> Result<()> {
    let page = driver.mem_get_allocation_granularity(DEVICE)?;
    let mut results = Vec::new();
    for (bars, pages) in [(1u64, 10u64), (100, 10_000)] {
        let resident = pages.min(20 * GIB / page / bars * bars);
        let runtime = open(driver, page, (resident + 2) * page)?;
        let stream = driver.stream_create()?;
        let others: Result<Vec<Vbar>> =
            (0..bars).map(|_| runtime.create_bar(resident / bars * page)).collect();
        let others = others?;
        for other in &others {
            drop(other.fault(0..other.bytes(), stream)?.resident().expect("they fit"));
        }
        let rivals = [runtime.create_bar(2 * page)?, runtime.create_bar(2 * page)?];
        let resident_now = &others[0];
        let hit_nanos = rounds(|| {
            let started = Instant::now();
            for _ in 0..HITS / 10 {
                hit(resident_now, 0..1, stream)?;
            }
            Ok(nanos_each(started, HITS / 10))
        })?;
        for other in &others {
            other.set_class(1)?;
        }
        let mut turn = 0;
        let miss_micros = rounds(|| {
            let mut total = 0.0;
            for _ in 0..50 {
                let rival = &rivals[turn % 2];
                turn += 1;
                rival.prioritise()?;
                total += micros(|| match rival.fault(0..2 * page, stream)?.resident() {
                    Some(guard) => guard.unpin(),
                    None => panic!("two pages fit"),
                })?;
                rival.end_of_run(stream, vbar::memory::pager::HeldPins::Keep)?;
                driver.stream_synchronize(stream)?;
            }
            Ok(total / 50.0)
        })?;
        println!(
            "among {bars} VBARs with {resident} resident pages: hit {hit_nanos:.0} ns, miss of two \
             pages with eviction {miss_micros:.1} us"
        );
        results.push((hit_nanos, miss_micros));
        drop((others, rivals));
        driver.stream_destroy(stream)?;
    }
    println!(
        "ratio large / small: hit {:.2}, miss {:.2}",
        results[1].0 / results[0].0,
        results[1].1 / results[0].1
    );
    Ok(())
}
