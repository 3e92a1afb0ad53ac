//! A simulated device, its runtime, and the questions that tests ask of both.

use std::sync::Arc;
use std::time::Duration;

use vbar::driver::Driver;
use vbar::driver::sim::{Sim, SimOptions};
use vbar::units::{DeviceOrdinal, PageSize, Stream};
use vbar::{Fault, Guard, Reason, Runtime, RuntimeOptions, Vbar};

/// One page: small, so that tests are quick.
pub(crate) const P: u64 = 64 << 10;

/// The first device.
pub(crate) const DEVICE: DeviceOrdinal = DeviceOrdinal(0);

/// A simulated device with a runtime on it.
pub(crate) struct World {
    pub(crate) sim: Arc<Sim>,
    pub(crate) runtime: Runtime,
    pub(crate) stream: Stream,
}

/// Options of a runtime for tests: small pages, no headroom, free memory asked at every miss.
pub(crate) fn options() -> RuntimeOptions {
    RuntimeOptions {
        page_size: PageSize::new(P).unwrap(),
        headroom_bytes: Some(0),
        poll_interval: Duration::ZERO,
        heal_window: Duration::ZERO,
        wait_timeout: Duration::from_secs(5),
        ..RuntimeOptions::default()
    }
}

impl World {
    /// A device of `pages` pages.
    pub(crate) fn new(pages: u64) -> Self {
        Self::with(&format!("capacity={},granularity=64K", pages * P), options())
    }

    /// A device with a budget of `pages` pages, and memory to spare.
    pub(crate) fn budget(pages: u64) -> Self {
        let options = RuntimeOptions { budget_bytes: Some(pages * P), ..options() };
        Self::with("capacity=64M,granularity=64K", options)
    }

    pub(crate) fn with(sim: &str, options: RuntimeOptions) -> Self {
        let sim = Sim::new(SimOptions::parse(sim).unwrap());
        let runtime = Runtime::open(sim.driver(), DEVICE, options).unwrap();
        let context = runtime.device().context;
        sim.ctx_set_current(Some(context)).unwrap();
        let stream = sim.stream_create().unwrap();
        Self { sim, runtime, stream }
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
    pub(crate) fn touch(&self, vbar: &Vbar, pages: std::ops::Range<u64>) -> Result<(), Reason> {
        match fault(self, vbar, pages) {
            Fault::Resident(guard) => {
                drop(guard);
                Ok(())
            }
            Fault::Offloaded(reason) => Err(reason),
        }
    }

    /// The books of library and device agree, and the device saw no breach.
    #[track_caller]
    pub(crate) fn check(&self) {
        assert_eq!(self.sim.violations(), Vec::<String>::new());
        assert!(self.runtime.is_valid(), "the pager's tables contradict themselves");
        assert_eq!(self.sim.used_bytes(DEVICE), self.runtime.used_bytes());
    }
}

/// Faults pages.
#[track_caller]
pub(crate) fn fault<'a>(
    world: &World,
    vbar: &'a Vbar,
    pages: std::ops::Range<u64>,
) -> Fault<Guard<'a>> {
    vbar.fault(pages.start * P..pages.end * P, world.stream).unwrap()
}

/// Faults pages that must be resident.
#[track_caller]
pub(crate) fn resident<'a>(
    world: &World,
    vbar: &'a Vbar,
    pages: std::ops::Range<u64>,
) -> Guard<'a> {
    match fault(world, vbar, pages.clone()) {
        Fault::Resident(guard) => guard,
        Fault::Offloaded(reason) => panic!("pages {pages:?} are offloaded: {reason}"),
    }
}
