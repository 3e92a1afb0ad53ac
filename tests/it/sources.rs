//! Where the bytes of fills come from, and how much host memory that takes: a filler by itself on a
//! simulated device, with reader threads, files, and a tree that stands for the system.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use vbar::copy::fill::{FillJob, Filler, Keep};
use vbar::counters::SourceBytes;
use vbar::driver::Driver;
use vbar::driver::kernel::pattern;
use vbar::driver::sim::{Sim, SimOptions};
use vbar::host::bound::Bound;
use vbar::host::source::{FileIdentity, ModelFile, ReadAt};
use vbar::model::binding::Binding;
use vbar::options::{Prefer, RuntimeOptions, Threads};
use vbar::sync::device::Device;
use vbar::units::{DeviceAddress, MIB};
use vbar::{Error, Result};

use crate::world::{DEVICE, P, ROOMY, options};

mod book;
mod cases;
mod host_memory;
mod paced;
mod registered;
mod registered_faults;

/// A slot or a window: a page and room for the edges of direct reads.
const UNIT: u64 = P + 4096;
/// Where the model's bytes begin in their file: nowhere in particular.
const OFFSET: u64 = 1234 + 8 * 4096;

/// What a reader did and does.
#[derive(Default)]
struct Watch {
    read_bytes: AtomicU64,
    fails: AtomicBool,
}

/// A file that is watched.
struct Watched {
    file: File,
    watch: Arc<Watch>,
}

impl ReadAt for Watched {
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        if self.watch.fails.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(5));
        }
        let read = ReadAt::read_at(&self.file, target, offset)?;
        self.watch.read_bytes.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }

    fn identity(&self) -> io::Result<FileIdentity> {
        ReadAt::identity(&self.file)
    }
}

/// A filler, its device, and a model of so many pages.
struct Rig {
    sim: Arc<Sim>,
    device: Arc<Device>,
    filler: Option<Filler>,
    base: DeviceAddress,
    bound: Arc<Bound>,
    bytes: Vec<u8>,
    path: PathBuf,
    watch: Arc<Watch>,
    folder: TempDir,
}

/// Options with threads, and a ring of one slot.
fn threaded() -> RuntimeOptions {
    RuntimeOptions { threads: Some(Threads::On), staging_slot_count: 1, ..options() }
}

/// Whether the model's file is read by its descriptor, or by a reader that counts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reader {
    Descriptor,
    Watched,
}

impl Rig {
    fn new(pages: u64, options: RuntimeOptions, reader: Reader) -> Self {
        Self::on(ROOMY, TempDir::new().unwrap(), pages, options, reader)
    }

    /// On a device of its own kind, with the model in a folder.
    fn on(sim: &str, folder: TempDir, pages: u64, options: RuntimeOptions, reader: Reader) -> Self {
        let sim = Sim::new(SimOptions::parse(sim).unwrap());
        let context = sim.device_primary_ctx_retain(DEVICE).unwrap();
        sim.ctx_set_current(Some(context)).unwrap();
        let device = Arc::new(Device::new(sim.driver(), DEVICE, context, options));
        let path = folder.path().join("model");
        let mut content = vec![0; (OFFSET + pages * P) as usize];
        pattern(&mut content, 7);
        std::fs::write(&path, &content).unwrap();
        let watch = Arc::<Watch>::default();
        let file = match reader {
            Reader::Descriptor => ModelFile::open(&path).unwrap(),
            Reader::Watched => {
                let file = Watched { file: File::open(&path).unwrap(), watch: watch.clone() };
                ModelFile::from_reader(Box::new(file), "watched").unwrap()
            }
        };
        let mut binding = Binding::new();
        binding.bind(0..pages * P, 0, OFFSET, pages * P).unwrap();
        let bound = Arc::new(Bound::new(binding, vec![Arc::new(file)]).unwrap());
        let base = sim.mem_address_reserve(pages * P, 0).unwrap();
        for page in 0..pages {
            let frame = sim.mem_create(DEVICE, P).unwrap();
            sim.mem_map(base.offset(page * P), P, frame).unwrap();
        }
        sim.mem_set_access(base, pages * P, &[DEVICE]).unwrap();
        let filler = Some(Filler::new(Arc::clone(&device)).unwrap());
        let bytes = content[OFFSET as usize..].to_vec();
        Self { sim, device, filler, base, bound, bytes, path, watch, folder }
    }

    fn filler(&self) -> &Filler {
        self.filler.as_ref().unwrap()
    }

    /// Fills pages in one batch. The results that came, in order.
    fn try_fill(&self, pages: Range<u32>, keep: Keep) -> Vec<Result<()>> {
        let jobs = pages.map(|page| FillJob {
            bound: Arc::clone(&self.bound),
            base: self.base,
            target: u64::from(page) * P..u64::from(page + 1) * P,
            bar: 0,
            page,
            keep,
            after: Vec::new(),
        });
        let mut results = Vec::new();
        self.filler().begin(jobs.collect()).run(&mut |index, result| {
            assert_eq!(index, results.len(), "each job is told once, in order");
            results.push(result.map(|ticket| assert!(!ticket.is_none())));
        });
        results
    }

    /// Fills pages that must come, and checks every byte of them.
    #[track_caller]
    fn fill(&self, pages: Range<u32>, keep: Keep) {
        let range = (u64::from(pages.start) * P) as usize..(u64::from(pages.end) * P) as usize;
        let at = self.base.offset(range.start as u64);
        // What was there is gone, so that bytes which did not come are seen.
        let (stream, _) = self.filler().stream();
        self.sim.memset_d8_async(at, 0xEE, range.len() as u64, stream).unwrap();
        let results = self.try_fill(pages.clone(), keep);
        assert_eq!(results.len(), pages.len(), "{results:?}");
        results.into_iter().for_each(Result::unwrap);
        self.sim.stream_synchronize(stream).unwrap();
        let found = self.sim.read_bytes(at, range.len()).unwrap();
        assert!(found == self.bytes[range], "pages {pages:?} have other bytes");
        assert!(self.filler().locked_bytes() <= self.filler().allowance_bytes());
    }

    /// Fills pages of which one fails: its error.
    #[track_caller]
    fn fill_failing(&self, pages: Range<u32>, keep: Keep) -> Error {
        let last = self.try_fill(pages, keep).pop();
        last.expect("a job was told").expect_err("one of them fails")
    }

    fn sources(&self) -> SourceBytes {
        self.device.counters.sources.bytes()
    }

    fn read_bytes(&self) -> u64 {
        self.watch.read_bytes.load(Ordering::Relaxed)
    }

    fn cache_bytes(&self) -> u64 {
        self.filler().locked().cache_bytes
    }

    fn ring_bytes(&self) -> u64 {
        self.filler().locked().ring_bytes
    }

    /// Calls the housekeeping until the cache holds `bytes`.
    #[track_caller]
    fn keep_house_until(&self, bytes: u64) {
        for _ in 0..400 {
            self.filler().housekeep().unwrap();
            if self.cache_bytes() == bytes {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the cache has {} bytes, not {bytes}", self.cache_bytes());
    }

    /// Waits until all that is page-locked is counted: a slot that the ring grows by is locked
    /// before it is the ring's.
    #[track_caller]
    fn wait_for_growth(&self) {
        for _ in 0..400 {
            if self.sim.locked_bytes() <= self.filler().locked_bytes() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("{} of {} bytes", self.filler().locked_bytes(), self.sim.locked_bytes());
    }

    /// Closes the filler: nothing of it is left, and the device saw no breach.
    #[track_caller]
    fn check_shut(mut self) {
        assert_eq!(self.sim.violations(), Vec::<String>::new());
        self.wait_for_growth();
        drop(self.filler.take());
        assert_eq!((self.sim.locked_bytes(), self.sim.live_streams()), (0, 0));
        self.device.fences.destroy_events();
        assert_eq!(self.sim.violations(), Vec::<String>::new());
    }
}
