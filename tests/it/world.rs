//! A simulated device, its runtime, and the questions that tests ask of both.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vbar::driver::kernel::{checksum, pattern};
use vbar::driver::sim::{Sim, SimOptions};
use vbar::driver::{Driver, KernelCall};
use vbar::options::Eviction;
use vbar::units::{DeviceAddress, DeviceOrdinal, PageSize, Stream};
use vbar::{Fault, Guard, Reason, Runtime, RuntimeOptions, Vbar};

/// One page: small, so that tests are quick.
pub(crate) const P: u64 = 64 << 10;

/// The first device.
pub(crate) const DEVICE: DeviceOrdinal = DeviceOrdinal(0);

/// A device with memory to spare.
pub(crate) const ROOMY: &str = "capacity=64M,granularity=64K";

/// A simulated device with a runtime on it.
pub(crate) struct World {
    pub(crate) sim: Arc<Sim>,
    pub(crate) runtime: Runtime,
    pub(crate) stream: Stream,
    /// Bytes of device memory that the test itself holds.
    own_bytes: AtomicU64,
}

/// Options of a runtime for tests: small pages, no headroom, free memory asked at every miss, a
/// fence at every unpin.
pub(crate) fn options() -> RuntimeOptions {
    RuntimeOptions {
        page_size: PageSize::new(P).unwrap(),
        headroom_bytes: Some(0),
        poll_interval: Duration::ZERO,
        heal_window: Duration::ZERO,
        record_interval: Duration::ZERO,
        wait_timeout: Duration::from_secs(5),
        ..RuntimeOptions::default()
    }
}

/// Those options with a budget of `pages` pages.
pub(crate) fn budget_options(pages: u64) -> RuntimeOptions {
    RuntimeOptions { budget_bytes: Some(pages * P), ..options() }
}

impl World {
    /// A device of `pages` pages.
    pub(crate) fn new(pages: u64) -> Self {
        Self::with(&format!("capacity={},granularity=64K", pages * P), options())
    }

    /// A device with a budget of `pages` pages, and memory to spare.
    pub(crate) fn budget(pages: u64) -> Self {
        Self::with(ROOMY, budget_options(pages))
    }

    /// As [`World::budget`], frames moving as told.
    pub(crate) fn evicting(pages: u64, eviction: Eviction) -> Self {
        Self::with(ROOMY, RuntimeOptions { eviction, ..budget_options(pages) })
    }

    pub(crate) fn with(sim: &str, options: RuntimeOptions) -> Self {
        let sim = Sim::new(SimOptions::parse(sim).unwrap());
        let runtime = Runtime::open(sim.driver(), DEVICE, options).unwrap();
        let context = runtime.device().context;
        sim.ctx_set_current(Some(context)).unwrap();
        let stream = sim.stream_create().unwrap();
        sim.module_load().unwrap();
        Self { sim, runtime, stream, own_bytes: AtomicU64::new(0) }
    }

    /// One more stream.
    pub(crate) fn another_stream(&self) -> Stream {
        self.sim.stream_create().unwrap()
    }

    /// A VBAR of `pages` pages.
    pub(crate) fn vbar(&self, pages: u64) -> Vbar {
        self.runtime.create_bar(pages * P).unwrap()
    }

    /// Pages of frames held.
    pub(crate) fn used(&self) -> u64 {
        self.runtime.used_bytes() / P
    }

    /// Faults pages and gives them back; whether they were resident.
    pub(crate) fn touch(&self, vbar: &Vbar, pages: Range<u64>) -> Result<(), Reason> {
        match fault(self, vbar, pages) {
            Fault::Resident(guard) | Fault::HostMapped(guard) => {
                drop(guard);
                Ok(())
            }
            Fault::Offloaded(refusal) => Err(refusal.reason),
        }
    }

    /// A page of zeros of the test's own, behind the runtime's back: where kernels put results.
    pub(crate) fn scratch(&self) -> DeviceAddress {
        let address = self.sim.mem_address_reserve(P, 0).unwrap();
        let frame = self.sim.mem_create(DEVICE, P).unwrap();
        self.sim.mem_map(address, P, frame).unwrap();
        self.sim.mem_set_access(address, P, &[DEVICE]).unwrap();
        self.sim.write_bytes(address, &vec![0; P as usize]).unwrap();
        self.own_bytes.fetch_add(P, Ordering::Relaxed);
        address
    }

    /// Enqueues the pattern of `seed` over `bytes` bytes.
    pub(crate) fn write(&self, target: DeviceAddress, bytes: u64, seed: u64, stream: Stream) {
        let call = KernelCall::Pattern { target, bytes, seed, delay_nanos: 0 };
        self.sim.launch_kernel(call, stream).unwrap();
    }

    /// Enqueues a checksum of `bytes` bytes, added to the word at `target`, after `delay`.
    pub(crate) fn sum(
        &self,
        source: DeviceAddress,
        bytes: u64,
        target: DeviceAddress,
        delay: Duration,
        stream: Stream,
    ) {
        let delay_nanos = delay.as_nanos() as u64;
        let call = KernelCall::Checksum { source, bytes, first_word: 0, delay_nanos, target };
        self.sim.launch_kernel(call, stream).unwrap();
    }

    /// The word at an address, once `stream` is done.
    pub(crate) fn word(&self, address: DeviceAddress, stream: Stream) -> u64 {
        self.sim.stream_synchronize(stream).unwrap();
        u64::from_le_bytes(self.sim.read_bytes(address, 8).unwrap().try_into().unwrap())
    }

    /// The books of library and device agree, and the device saw no breach.
    #[track_caller]
    pub(crate) fn check(&self) {
        assert_eq!(self.sim.violations(), Vec::<String>::new());
        assert!(self.runtime.is_valid(), "the pager's tables contradict themselves");
        let own = self.own_bytes.load(Ordering::Relaxed);
        assert_eq!(self.sim.used_bytes(DEVICE) - own, self.runtime.used_bytes());
        let host_bytes = self.runtime.numbers().host_mapped_bytes;
        assert_eq!(self.sim.live_host_frames() * P, host_bytes);
    }

    /// Closes the runtime, whose VBARs are gone: nothing of it is left.
    #[track_caller]
    pub(crate) fn check_shut(self) {
        let Self { sim, runtime, stream, own_bytes } = self;
        let _ = sim.stream_destroy(stream);
        let own = own_bytes.into_inner() / P;
        drop(runtime);
        assert_eq!(sim.violations(), Vec::<String>::new());
        assert_eq!((sim.live_frames(DEVICE), sim.live_mappings() as u64), (own, own));
        assert_eq!((sim.live_reservations() as u64, sim.live_events()), (own, 0));
        assert_eq!(sim.locked_bytes(), 0);
    }
}

/// The checksum of the pattern of `seed` over `bytes` bytes.
pub(crate) fn pattern_sum(bytes: u64, seed: u64) -> u64 {
    checksum(&pattern_bytes(bytes, seed), 0)
}

/// The pattern itself.
pub(crate) fn pattern_bytes(bytes: u64, seed: u64) -> Vec<u8> {
    let mut expected = vec![0; bytes as usize];
    pattern(&mut expected, seed);
    expected
}

/// A drawing in which a page that is known to be ready looks like one that will be.
pub(crate) fn drawn(vbar: &Vbar, pages: u32) -> String {
    vbar.draw(pages).replace('i', "#")
}

/// Faults pages.
#[track_caller]
pub(crate) fn fault<'a>(world: &World, vbar: &'a Vbar, pages: Range<u64>) -> Fault<Guard<'a>> {
    vbar.fault(pages.start * P..pages.end * P, world.stream).unwrap()
}

/// Faults pages that must be resident.
#[track_caller]
pub(crate) fn resident<'a>(world: &World, vbar: &'a Vbar, pages: Range<u64>) -> Guard<'a> {
    resident_on(vbar, pages, world.stream)
}

/// Faults pages for a stream; they must be resident.
#[track_caller]
pub(crate) fn resident_on<'a>(vbar: &'a Vbar, pages: Range<u64>, stream: Stream) -> Guard<'a> {
    match vbar.fault(pages.start * P..pages.end * P, stream).unwrap() {
        Fault::Resident(guard) | Fault::HostMapped(guard) => guard,
        Fault::Offloaded(reason) => panic!("pages {pages:?} are offloaded: {reason}"),
    }
}
