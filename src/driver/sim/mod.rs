//! A simulated device in host memory, stricter than a real one.
//!
//! Device memory is a sealed memory file of fixed capacity, the MMU is `mmap`. Streams really run
//! asynchronously, or by a seeded schedule. What CUDA leaves undefined is found and told: a race
//! between streams, by vector clocks; unmapping a page that work is pending on; touching what is
//! not mapped. Such a *violation* is logged with the page's history, listed, and costs the device.
//! The device can be scarce, late, shared by two processes, limited in address space and mappings,
//! and fail the n-th call of any verb.
//!
//! Lock order, each optional: launches, event record, address space, stream queue, order, then one
//! of a frame's record or a mapping's touches. Nobody waits for a stream while holding the last
//! five. Data path: `door` (checks, counts) -> `memory`, `event`, `capture`, `stream` (enqueue) ->
//! `executor` (when) -> `execute` (what).
//!
//! Not modelled: peer topology (every device reaches every other), read-only registration,
//! foreign kernels, IPC.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex, RwLock};

mod capture;
mod context;
mod device;
mod door;
mod event;
mod execute;
mod executor;
mod faults;
mod host;
mod inspect;
mod memory;
mod options;
mod order;
mod os;
mod random;
mod stream;
mod verb;

pub use capture::SimGraph;
pub use faults::{FailRule, Struck};
pub use options::{OnViolation, SimKey, SimOptions};
pub use verb::Verb;

use crate::driver::{DriverCode, DriverResult};
use crate::error::{Error, ErrorCode, Result};
use crate::units::{DeviceOrdinal, format_bytes};

/// A simulated driver, as one process sees it.
pub struct Sim {
    core: Arc<Core>,
}

/// Everything of one simulated process; its threads hold it too.
struct Core {
    /// Tells simulated processes apart in the threads' states.
    id: u64,
    options: SimOptions,
    devices: Vec<Arc<device::Device>>,
    holdings: Vec<Arc<device::Holdings>>,
    host_frames: device::HostFrames,
    /// The sticky code of each device, 0 while it works.
    lost: Vec<AtomicI32>,
    primaries: Vec<context::Primary>,
    streams: context::Table<stream::StreamState>,
    events: context::Table<event::EventState>,
    /// Default and destroyed streams too, until their work is known to be done.
    all_streams: Mutex<Vec<Arc<stream::StreamState>>>,
    space: RwLock<memory::Space>,
    host: host::HostMemory,
    order: Mutex<order::Order>,
    /// Read by whoever enqueues, written by calls that stop launches while they wait.
    launches: RwLock<()>,
    captures: Mutex<Vec<Arc<capture::Capture>>>,
    open_captures: AtomicUsize,
    faults: faults::Faults,
    calls: [AtomicU64; Verb::COUNT],
    violations: Mutex<Vec<String>>,
    /// Draws of jitter and latency.
    random: Mutex<random::Random>,
    /// The interleaving's draws; held while an operation runs.
    seeded: Option<Mutex<random::Random>>,
    activity: AtomicU64,
    /// Nothing runs between the program's calls.
    unhelped: AtomicBool,
    stopping: AtomicBool,
    threads: Arc<Threads>,
}

/// Violations that are kept; a broken program makes many.
const VIOLATIONS_MAX: usize = 1000;

impl Sim {
    /// A simulated driver with its devices, for tests.
    ///
    /// # Panics
    /// Where [`Sim::try_new`] fails: there is no machine to simulate on.
    #[must_use]
    pub fn new(options: SimOptions) -> Arc<Self> {
        Self::try_new(options).expect("a simulated device")
    }

    /// A simulated driver with its devices.
    ///
    /// # Errors
    /// `HostMemory` when the operating system refuses the memory file or its mapping, as under a
    /// limit of the address space: each device takes twice its capacity of addresses.
    pub fn try_new(options: SimOptions) -> Result<Arc<Self>> {
        let made = (0..options.devices).map(|ordinal| {
            let ordinal = DeviceOrdinal(ordinal);
            device::Device::new(ordinal, options.capacity, options.granularity).map(Arc::new)
        });
        let devices = made.collect::<std::io::Result<_>>().map_err(|error| {
            let advice = match error.raw_os_error() {
                Some(libc::EMFILE | libc::ENFILE) => "raise the limit of open files (ulimit -n)",
                _ => "make it smaller, as sim:capacity=64M, or raise the limit (ulimit -v)",
            };
            let bytes = format_bytes(options.capacity);
            let text = format!(
                "a simulated device of {bytes} cannot have its addresses: {error}; {advice}"
            );
            Error::new(ErrorCode::HostMemory, text)
        })?;
        Ok(Self::on_devices(options, devices))
    }

    /// Another process on the same devices: handles, contexts, addresses and violations of its
    /// own, the memory shared.
    #[must_use]
    pub fn second_process(&self) -> Arc<Self> {
        Self::on_devices(self.core.options.clone(), self.core.devices.clone())
    }

    fn on_devices(options: SimOptions, devices: Vec<Arc<device::Device>>) -> Arc<Self> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let count = devices.len();
        let seed = options.seed.unwrap_or(0);
        let faults = faults::Faults::default();
        options.fail.iter().for_each(|rule| faults.add(*rule));
        options.hang.iter().for_each(|verb| faults.hang(*verb));
        if options.fail_rate > 0.0 {
            faults.set_rate(options.fail_rate, seed);
        }
        let core = Arc::new(Core {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            devices,
            host_frames: device::HostFrames::default(),
            holdings: (0..count).map(|_| Arc::default()).collect(),
            lost: (0..count).map(|_| AtomicI32::new(0)).collect(),
            primaries: (0..count).map(|_| context::Primary::default()).collect(),
            streams: context::Table::new(0x5700_0000_0000),
            events: context::Table::new(0x5E00_0000_0000),
            all_streams: Mutex::default(),
            space: RwLock::default(),
            host: host::HostMemory::default(),
            order: Mutex::default(),
            launches: RwLock::new(()),
            captures: Mutex::default(),
            open_captures: AtomicUsize::new(0),
            faults,
            calls: [const { AtomicU64::new(0) }; Verb::COUNT],
            violations: Mutex::default(),
            random: Mutex::new(random::Random::new(!seed)),
            seeded: options.seed.map(|seed| Mutex::new(random::Random::new(seed))),
            activity: AtomicU64::new(0),
            unhelped: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            threads: Arc::default(),
            options,
        });
        if core.seeded.is_some() {
            let idle = core.start_thread("sim idle".into(), |core| core.help_idle_programs());
            idle.expect("the simulated device needs a thread");
        }
        Arc::new(Self { core })
    }
}

/// Threads of a simulated device that have not ended. Apart from [`Core`], so that a thread can say
/// that it holds no part of the device any more.
#[derive(Default)]
struct Threads {
    count: Mutex<usize>,
    ended: Condvar,
}

impl Drop for Sim {
    fn drop(&mut self) {
        self.core.shut_down();
        self.core.abandon_captures();
        self.core.forget_thread();
    }
}

impl Core {
    /// Counts a call and lets an injected failure strike, before the verb does anything.
    fn enter(&self, verb: Verb) -> DriverResult<()> {
        self.calls[verb as usize].fetch_add(1, Ordering::Relaxed);
        let Some(code) = self.faults.check(verb) else { return Ok(()) };
        if code.is_sticky() {
            self.lose(self.current_device().unwrap_or(0), code);
        }
        Err(verb.error(code))
    }

    fn device_index(&self, device: DeviceOrdinal, verb: Verb) -> DriverResult<usize> {
        let index = device.0 as usize;
        if index < self.devices.len() {
            Ok(index)
        } else {
            Err(verb.error(DriverCode::INVALID_DEVICE))
        }
    }

    fn is_lost(&self, device: usize) -> bool {
        self.lost[device].load(Ordering::Acquire) != 0
    }

    /// The sticky error of a lost device.
    fn alive(&self, device: usize, verb: Verb) -> DriverResult<()> {
        match self.lost[device].load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(verb.error(DriverCode(code))),
        }
    }

    /// Loses a device for this process; the first code stays.
    fn lose(&self, device: usize, code: DriverCode) {
        let lost = &self.lost[device];
        let _ = lost.compare_exchange(0, code.0, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Lists a breach and, unless told otherwise, loses the device. Called with no lock held that
    /// a logger could need.
    fn violation(&self, device: usize, text: String) {
        log::error!("sim: device {device}: {text}");
        let mut violations = self.violations.lock();
        if violations.len() < VIOLATIONS_MAX {
            violations.push(text);
        }
        drop(violations);
        if self.options.on_violation == OnViolation::Lose {
            self.lose(device, DriverCode::ILLEGAL_ADDRESS);
        }
    }
}
