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
use vbar::ffi::fault::{VbarFault, VbarRange};
use vbar::ffi::token::VbarToken;
use vbar::units::{DeviceOrdinal, MIB, PageSize, Stream};
use vbar::{Runtime, RuntimeOptions, Vbar};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;
type Fault = unsafe extern "C" fn(VbarBar, u64, u64, VbarStream, *mut VbarFault) -> VbarStatus;
type Unpin = extern "C" fn(VbarToken, VbarStream) -> VbarStatus;
type Create = unsafe extern "C" fn(VbarDevice, u64, *mut VbarBar) -> VbarStatus;
type FaultMany = unsafe extern "C" fn(
    VbarDevice,
    *const VbarRange,
    usize,
    VbarStream,
    *mut VbarFault,
) -> VbarStatus;
type UnpinMany = unsafe extern "C" fn(*const VbarToken, usize, VbarStream) -> VbarStatus;

const ROUNDS: usize = 31;
const HITS: u32 = 50_000;
const PAGE: u64 = 2 * MIB;
const PAGES: u64 = 16;
/// Ranges of one `fault_many`, and their bytes.
const GROUP: u64 = 100;
const SMALL: u64 = 64 << 10;
const GROUP_FAULTS: u32 = 500;

/// The functions that hits call, and a VBAR of the library's with every page resident.
struct CSide {
    fault: Fault,
    unpin: Unpin,
    fault_many: FaultMany,
    /// A library that is older has none: each token by itself then.
    unpin_many: Option<UnpinMany>,
    device: VbarDevice,
    bar: VbarBar,
    create: Create,
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
    groups(&rust, &c, word, "everything fits")?;
    let crowd = rust.crowd()?;
    c.crowd()?;
    groups(&rust, &c, word, "VBARs exceed the budget")?;
    drop(crowd);
    Ok(())
}

/// `fault_many` of a hundred small ranges, and the end of its pins.
fn groups(rust: &RustSide, c: &CSide, word: &str, name: &str) -> Outcome<()> {
    let stream = match word {
        "cuda" => rust.driver.stream_create()?,
        // Of a simulated device that is not ours only the default stream is known.
        _ => Stream::PER_THREAD,
    };
    let mut pairs = Vec::with_capacity(ROUNDS);
    for _ in 0..=ROUNDS {
        pairs.push((rust.groups(stream)?, c.groups(stream.0)?));
    }
    let ours = median(pairs.iter().skip(1).map(|(rust, _)| *rust).collect());
    let through = median(pairs.iter().skip(1).map(|(_, c)| *c).collect());
    println!("a range of {GROUP} by fault_many, {name}: Rust {ours:.0} ns, C {through:.0} ns");
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

    /// Nanoseconds of one range.
    fn groups(&self, stream: Stream) -> Outcome<f64> {
        let ranges: Vec<_> =
            (0..GROUP).map(|at| (&self.vbar, at * SMALL..(at + 1) * SMALL)).collect();
        let started = Instant::now();
        for _ in 0..GROUP_FAULTS {
            let guards = self.runtime.fault_many(&ranges, stream)?.resident();
            drop(black_box(guards.expect("the pages are resident")));
        }
        Ok(nanos_each_range(started))
    }

    /// A VBAR whose extent exceeds the budget.
    fn crowd(&self) -> Outcome<Vbar> {
        let crowd = self.runtime.create_bar(2 * PAGES * PAGE)?;
        let last = (2 * PAGES - 1) * PAGE..2 * PAGES * PAGE;
        drop(crowd.fault(last, Stream::NONE)?.resident().expect("there is a frame"));
        Ok(crowd)
    }
}

impl CSide {
    fn open(library: &Library, word: &str) -> Outcome<Self> {
        type Open = unsafe extern "C" fn(*const VbarDeviceOptions, *mut VbarDevice) -> VbarStatus;
        // SAFETY: the header declares them so.
        let open: Symbol<'_, Open> = unsafe { library.get(b"vbar_device_open") }?;
        // SAFETY: as above.
        let create: Symbol<'_, Create> = unsafe { library.get(b"vbar_bar_create") }?;
        // SAFETY: as above.
        let fault: Symbol<'_, Fault> = unsafe { library.get(b"vbar_bar_fault") }?;
        // SAFETY: as above.
        let unpin: Symbol<'_, Unpin> = unsafe { library.get(b"vbar_token_unpin") }?;
        // SAFETY: as above.
        let fault_many: Symbol<'_, FaultMany> = unsafe { library.get(b"vbar_device_fault_many") }?;
        // SAFETY: as above.
        let unpin_many = unsafe { library.get::<UnpinMany>(b"vbar_tokens_unpin") };
        let unpin_many = unpin_many.ok().map(|symbol| *symbol);
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
        let (fault, unpin, fault_many, create) = (*fault, *unpin, *fault_many, *create);
        let side = Self { fault, unpin, fault_many, unpin_many, device, bar, create };
        side.hit(0, PAGES * PAGE, usize::MAX)?;
        Ok(side)
    }

    /// As the same of the other side; the VBAR lives on.
    fn crowd(&self) -> Outcome<()> {
        let mut crowd = VbarBar { id: 0 };
        // SAFETY: the output is ours.
        check(unsafe { (self.create)(self.device, 2 * PAGES * PAGE, &raw mut crowd) })?;
        Self { bar: crowd, ..*self }.hit((2 * PAGES - 1) * PAGE, PAGE, usize::MAX)
    }

    fn groups(&self, stream: VbarStream) -> Outcome<f64> {
        let range = |at| VbarRange { bar: self.bar, bar_offset: at * SMALL, bytes: SMALL };
        let ranges: Vec<_> = (0..GROUP).map(range).collect();
        let mut faults = Vec::<VbarFault>::with_capacity(ranges.len());
        let mut tokens = Vec::with_capacity(ranges.len());
        let started = Instant::now();
        for _ in 0..GROUP_FAULTS {
            let (count, out) = (ranges.len(), faults.as_mut_ptr());
            // SAFETY: both arrays have as many elements.
            check(unsafe { (self.fault_many)(self.device, ranges.as_ptr(), count, stream, out) })?;
            // SAFETY: the call was good, so they were all written.
            unsafe { faults.set_len(count) };
            tokens.clear();
            tokens.extend(black_box(&faults).iter().map(|fault| fault.token));
            match self.unpin_many {
                // SAFETY: as many as it says.
                Some(unpin) => check(unsafe { unpin(tokens.as_ptr(), tokens.len(), stream) })?,
                None => tokens.iter().try_for_each(|token| check((self.unpin)(*token, stream)))?,
            }
        }
        Ok(nanos_each_range(started))
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

fn nanos_each_range(started: Instant) -> f64 {
    started.elapsed().as_nanos() as f64 / (f64::from(GROUP_FAULTS) * GROUP as f64)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Rust and C in turn, so that both meet the same moods of the machine.
fn compare(rust: &RustSide, c: &CSide, name: &str, stream: Stream) -> Outcome<()> {
    let mut pairs = Vec::with_capacity(ROUNDS);
    for _ in 0..=ROUNDS {
        pairs.push((rust.hits(stream)?, c.hits(stream)?));
    }
    pairs.remove(0);
    let ours = median(pairs.iter().map(|(rust, _)| *rust).collect());
    let through = median(pairs.iter().map(|(_, c)| *c).collect());
    let more = median(pairs.iter().map(|(rust, c)| c - rust).collect());
    println!("hit of one page, {name}: Rust {ours:.0} ns, C {through:.0} ns, {more:+.0} ns");
    Ok(())
}
