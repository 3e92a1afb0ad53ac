//! What a hit costs through the C ABI, beside the same hit from Rust.
//!
//! The library is opened as a C program's loader would, so that its thread-local storage and its
//! calls are those of a shared object; both sides work on one device, in turns, and the difference
//! is told per pair of rounds. Nothing here passes or fails. `VBAR_BENCH_DEVICE=sim` takes the
//! simulated device; `VBAR_BENCH_LIBRARY` names the library, else it is sought beside the program.
#![expect(unsafe_code, reason = "calls the C ABI as a C program does")]

use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Barrier;
use std::time::Instant;

use libloading::{Library, Symbol};
use vbar::driver::Driver;
use vbar::driver::select::{Selection, open};
use vbar::ffi::VbarStatus;
use vbar::ffi::bar::VbarBar;
use vbar::ffi::device::{VbarDevice, VbarDeviceOptions, VbarStream};
use vbar::ffi::fault::VbarFault;
use vbar::ffi::token::VbarToken;
use vbar::units::{DeviceOrdinal, MIB, PageSize, Stream};
use vbar::{Runtime, RuntimeOptions, Vbar};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;
type Fault = unsafe extern "C" fn(VbarBar, u64, u64, VbarStream, *mut VbarFault) -> VbarStatus;
type Unpin = extern "C" fn(VbarToken, VbarStream) -> VbarStatus;

const ROUNDS: usize = 31;
const HITS: u32 = 50_000;
const PAGE: u64 = 2 * MIB;
const PAGES: u64 = 16;

/// The two functions that a hit calls, and a VBAR of the library's with every page resident.
struct CSide {
    fault: Fault,
    unpin: Unpin,
    bar: VbarBar,
}

/// The same from Rust.
struct RustSide {
    driver: Arc<dyn Driver>,
    runtime: Runtime,
    vbar: Vbar,
}

fn main() -> Outcome<()> {
    let word = match std::env::var("VBAR_BENCH_DEVICE").as_deref() {
        Ok("sim") => "sim",
        _ => "cuda",
    };
    let (rust, library) = (RustSide::open(word)?, library()?);
    let c = CSide::open(&library, word)?;
    println!("driver: {}, medians of {ROUNDS} pairs of {HITS} hits", rust.driver.description());
    compare(&rust, &c, "no stream", Stream::NONE)?;
    if word == "cuda" {
        // One primary context: both sides know the stream. A simulated device is each side's own.
        rust.driver.ctx_set_current(Some(rust.runtime.device().context))?;
        compare(&rust, &c, "a stream", rust.driver.stream_create()?)?;
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for threads in [1, 2, 4, 8].into_iter().filter(|threads| *threads <= cores) {
        let mut rates: Vec<f64> = (0..7).map(|_| c.hits_per_second(threads)).collect();
        rates.sort_by(f64::total_cmp);
        println!("C, {threads} threads, no stream, one VBAR: {:.1} M/s", rates[3] / 1e6);
    }
    Ok(())
}

fn library() -> Outcome<Library> {
    let beside = || Ok(std::env::current_exe()?.with_file_name("libvbar.so"));
    let path = std::env::var_os("VBAR_BENCH_LIBRARY").map(PathBuf::from);
    let path: PathBuf = path.map_or_else(beside, Ok::<_, std::io::Error>)?;
    // SAFETY: the library's constructors are Rust's own; it is never unloaded.
    let library = unsafe { Library::new(&path) };
    library.map_err(|error| format!("{}: {error}", path.display()).into())
}

impl RustSide {
    fn open(word: &str) -> Outcome<Self> {
        let opened = open(&Selection::parse(word)?)?;
        let options = RuntimeOptions {
            page_size: PageSize::new(PAGE).expect("a power of two"),
            budget_bytes: Some(2 * PAGES * PAGE),
            headroom_bytes: Some(0),
            ..RuntimeOptions::default()
        };
        let runtime = Runtime::open(Arc::clone(&opened.driver), DeviceOrdinal(0), options)?;
        let vbar = runtime.create_bar(PAGES * PAGE)?;
        drop(vbar.fault(0..PAGES * PAGE, Stream::NONE)?);
        Ok(Self { driver: opened.driver, runtime, vbar })
    }

    fn hits(&self, stream: Stream) -> Outcome<f64> {
        let started = Instant::now();
        for _ in 0..HITS {
            let guard = self.vbar.fault(0..1, stream)?.resident().expect("the page is resident");
            black_box(guard.address());
            guard.unpin()?;
        }
        Ok(nanos_each(started))
    }
}

impl CSide {
    fn open(library: &Library, word: &str) -> Outcome<Self> {
        type Open = unsafe extern "C" fn(*const VbarDeviceOptions, *mut VbarDevice) -> VbarStatus;
        type Create = unsafe extern "C" fn(VbarDevice, u64, *mut VbarBar) -> VbarStatus;
        // SAFETY: the header declares them so.
        let open: Symbol<'_, Open> = unsafe { library.get(b"vbar_device_open") }?;
        // SAFETY: as above.
        let create: Symbol<'_, Create> = unsafe { library.get(b"vbar_bar_create") }?;
        // SAFETY: as above.
        let fault: Symbol<'_, Fault> = unsafe { library.get(b"vbar_bar_fault") }?;
        // SAFETY: as above.
        let unpin: Symbol<'_, Unpin> = unsafe { library.get(b"vbar_token_unpin") }?;
        let word = std::ffi::CString::new(word)?;
        let options = VbarDeviceOptions {
            size: size_of::<VbarDeviceOptions>(),
            driver: word.as_ptr(),
            budget_bytes: 2 * PAGES * PAGE,
            headroom_bytes: vbar::ffi::device::VBAR_HEADROOM_NONE,
            page_bytes: PAGE,
            // SAFETY: plain C data, zeros are its defaults.
            ..unsafe { std::mem::zeroed() }
        };
        let (mut device, mut bar) = (VbarDevice { id: 0 }, VbarBar { id: 0 });
        // SAFETY: the options live during the call, the output is ours.
        check(unsafe { open(&raw const options, &raw mut device) })?;
        // SAFETY: the output is ours.
        check(unsafe { create(device, PAGES * PAGE, &raw mut bar) })?;
        let side = Self { fault: *fault, unpin: *unpin, bar };
        side.hit(0, PAGES * PAGE, usize::MAX)?;
        Ok(side)
    }

    #[inline]
    fn hit(&self, offset: u64, bytes: u64, stream: VbarStream) -> Outcome<()> {
        let mut fault = std::mem::MaybeUninit::<VbarFault>::uninit();
        // SAFETY: the output is ours; written when the status is ok.
        check(unsafe { (self.fault)(self.bar, offset, bytes, stream, fault.as_mut_ptr()) })?;
        // SAFETY: as above.
        let fault = unsafe { fault.assume_init() };
        black_box(fault.address);
        check((self.unpin)(fault.token, stream))
    }

    fn hits(&self, stream: Stream) -> Outcome<f64> {
        let started = Instant::now();
        (0..HITS).try_for_each(|_| self.hit(0, 1, stream.0))?;
        Ok(nanos_each(started))
    }

    fn hits_per_second(&self, threads: usize) -> f64 {
        let barrier = Barrier::new(threads);
        let run = |thread: usize| {
            barrier.wait();
            let started = Instant::now();
            for _ in 0..HITS {
                self.hit(thread as u64 * PAGE, 1, usize::MAX).expect("the page is resident");
            }
            started.elapsed()
        };
        let slowest = std::thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> =
                (0..threads).map(|thread| scope.spawn(move || run(thread))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).max()
        });
        threads as f64 * f64::from(HITS) / slowest.expect("a thread").as_secs_f64()
    }
}

fn check(status: VbarStatus) -> Outcome<()> {
    match status {
        VbarStatus::Ok => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}

fn nanos_each(started: Instant) -> f64 {
    started.elapsed().as_nanos() as f64 / f64::from(HITS)
}

/// Rust and C in turn, so that both meet the same moods of the machine.
fn compare(rust: &RustSide, c: &CSide, name: &str, stream: Stream) -> Outcome<()> {
    let mut pairs = Vec::with_capacity(ROUNDS);
    for _ in 0..=ROUNDS {
        pairs.push((rust.hits(stream)?, c.hits(stream)?));
    }
    pairs.remove(0);
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let ours = median(pairs.iter().map(|(rust, _)| *rust).collect());
    let through = median(pairs.iter().map(|(_, c)| *c).collect());
    let more = median(pairs.iter().map(|(rust, c)| c - rust).collect());
    println!("hit of one page, {name}: Rust {ours:.0} ns, C {through:.0} ns, {more:+.0} ns");
    Ok(())
}
